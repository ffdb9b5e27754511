/* Functions of optimizer_step.c for torchium._C.Optimizer, a session (session.h). */
#ifndef TORCHIUM_PYTHON_OPTIMIZER_H
#define TORCHIUM_PYTHON_OPTIMIZER_H

#include "session.h"

void py_place_set(py_place *place, const tch_tensor *tensor);
PyObject *py_optimizer_step(PY_ARGUMENTS);
PyObject *py_same_items(PY_ARGUMENTS);

#endif

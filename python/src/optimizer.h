/* torchium._C.Optimizer, a session (session.h). Several files define its methods. */
#ifndef TORCHIUM_PYTHON_OPTIMIZER_H
#define TORCHIUM_PYTHON_OPTIMIZER_H

#include "session.h"

/* Whether it is elementwise, or (elementwise, batch_dims, cuts); cuts lie in the object. */
int py_take_role(PyObject *item, tch_parameter *parameter);

void py_place_set(py_place *place, const tch_tensor *tensor);

/* Methods: of optimizer_groups.c and optimizer_step.c. */
PyObject *py_optimizer_add_group(PY_ARGUMENTS);
PyObject *py_optimizer_set_config(PY_ARGUMENTS);
PyObject *py_optimizer_set_lr(PY_ARGUMENTS);
PyObject *py_optimizer_set_lr_tensor(PY_ARGUMENTS);
PyObject *py_optimizer_step(PY_ARGUMENTS);
PyObject *py_same_items(PY_ARGUMENTS);

#endif

/* What each file adds to the module torchium._C. All return 0, or -1 with an exception set. */
#ifndef TORCHIUM_PYTHON_MODULE_H
#define TORCHIUM_PYTHON_MODULE_H

#include "python.h"

int py_devices_register(PyObject *module);
int py_grad_register(PyObject *module);
int py_kernel_register(PyObject *module);
int py_kfac_register(PyObject *module);
int py_layer_register(PyObject *module);
int py_linalg_register(PyObject *module);
int py_listeners_register(PyObject *module);
int py_memory_register(PyObject *module);
int py_optimizer_register(PyObject *module);
int py_scaler_register(PyObject *module);

#endif

/* What each file adds to the module torchium._C, and shared objects. Functions that return int return 0, or -1 with an
 * exception set. */
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

/* Adds a type by the last part of its name. A type in *kept is reused instead of creating one, so that objects work
 * with every import of the module; NULL if this is not needed. */
int py_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **kept);

/* A torchium._C.Memory described by `view` that owns `owner`: writable, in use on `stream`. */
PyObject *py_memory_wrap(const tch_tensor *view, PyObject *owner, void *stream);

/* Copies the description of a torchium._C.Layer. The scale of the output gradients, which changes with the batch, is an
 * argument of each call. */
int py_layer_take(PyObject *value, const char *name, tch_layer *layer);

#endif

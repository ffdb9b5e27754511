/* The type torchium._C.Memory: a tensor for from_dlpack of any library. */
#ifndef TORCHIUM_PYTHON_MEMORY_H
#define TORCHIUM_PYTHON_MEMORY_H

#include "python.h"

/* A Memory that shows what `view` describes and keeps `owner` alive: writable, and in use on `stream`. */
PyObject *py_memory_wrap(const tch_tensor *view, PyObject *owner, void *stream);

#endif

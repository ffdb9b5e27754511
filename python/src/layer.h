/* The type torchium._C.Layer: what kind of layer gradients of samples are taken of, with its options. It never changes;
 * the scale of the output gradients, which does with the batch, is an argument of each call. */
#ifndef TORCHIUM_PYTHON_LAYER_H
#define TORCHIUM_PYTHON_LAYER_H

#include "python.h"

/* Copies the description out of an argument that must be a Layer. Returns 0, or -1 with an exception set. */
int py_layer_take(PyObject *value, const char *name, tch_layer *layer);

#endif

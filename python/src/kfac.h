/* The inside of torchium._C.Kfac: one tch_kfac and the context it runs on. Its methods are in kfac.c and kfac_state.c.
 *
 * A method has the object to itself from py_kfac_enter to py_runner_leave, also while the GIL is released; who comes in
 * between gets a RuntimeError. */
#ifndef TORCHIUM_PYTHON_KFAC_H
#define TORCHIUM_PYTHON_KFAC_H

#include "arrays.h"
#include "chunks.h"
#include "comm.h"
#include "contexts.h"
#include "python.h"

enum { PY_KFAC_LABEL = 256 };

/* What stands for the arguments of tch_kfac_create: the layers' names are part of the Python objects in `tuples`. */
typedef struct py_kfac_layers {
    int32_t count;
    tch_kfac_layer *entries;
    PyObject *tuples;
} py_kfac_layers;

typedef struct py_kfac {
    PyObject ob_base;
    py_runner on;
    tch_kfac *kfac;
    py_chunks memory; /* of the state */
    py_comm group;    /* that it is shared by */
    int32_t count;    /* layers */
    py_operands step; /* two of each for every layer, the gradients of its weight and its bias */
    char (*labels)[PY_KFAC_LABEL];
} py_kfac;

/* 0, or -1 with a RuntimeError set. */
int py_kfac_enter(py_kfac *self);

/* A list of (layer, inputs, outputs, bias, name), and a dictionary with the fields of tch_kfac_config by name: missing
 * ones have the defaults. 0, or -1 with an exception set and nothing to release. */
int py_kfac_layers_take(PyObject *list, py_kfac_layers *layers);
void py_kfac_layers_release(py_kfac_layers *layers);
int py_kfac_config(PyObject *dictionary, tch_kfac_config *config);

PyObject *py_kfac_states(PY_ARGUMENTS);
PyObject *py_kfac_get_counts(PY_ARGUMENTS);
PyObject *py_kfac_set_counts(PY_ARGUMENTS);
PyObject *py_kfac_stats(PY_ARGUMENTS);
PyObject *py_kfac_forecast(PY_ARGUMENTS);

#endif

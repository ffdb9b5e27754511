/* What a _C.Kfac is made from: layers and configuration, taken from Python's objects. Whether a value is in range is
 * the library's to judge. */
#include "kfac.h"

#include "arguments.h"
#include "layer.h"
#include "optim_config.h"

static const char *const methods[] = {"eigen", "inverse", "ekfac", NULL};
static const char *const sharings[] = {"expand", "reduce", NULL};

/* --- layers ------------------------------------------------------------------------------------------------------ */

/* (layer, inputs, outputs, bias, name) */
static int take_layer(PyObject *tuple, tch_kfac_layer *entry)
{
    bool bias;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 5) {
        return py_wrong_type(tuple, "layers must have entries (layer, inputs, outputs, bias, name)");
    }
    if (py_layer_take(PyTuple_GetItem(tuple, 0), "layer", &entry->layer) < 0 ||
        py_take_int(PyTuple_GetItem(tuple, 1), "inputs", INT64_MIN, INT64_MAX, &entry->inputs) < 0 ||
        py_take_int(PyTuple_GetItem(tuple, 2), "outputs", INT64_MIN, INT64_MAX, &entry->outputs) < 0 ||
        py_take_bool(PyTuple_GetItem(tuple, 3), "bias", &bias) < 0 ||
        py_take_string(PyTuple_GetItem(tuple, 4), "name", &entry->name) < 0) {
        return -1;
    }
    entry->bias = bias;
    return 0;
}

int py_kfac_layers_take(PyObject *list, py_kfac_layers *layers)
{
    *layers = (py_kfac_layers){0};
    if (!PyList_Check(list)) {
        return py_wrong_type(list, "layers must be a list");
    }
    if (PyList_Size(list) > INT32_MAX / 2) {
        PyErr_SetString(PyExc_ValueError, "layers has more entries than can be counted");
        return -1;
    }
    layers->tuples = PyList_AsTuple(list); /* which nobody changes while its items are read */
    if (layers->tuples == NULL) {
        return -1;
    }
    layers->count = (int32_t)PyTuple_Size(layers->tuples);
    layers->entries = PyMem_Calloc((size_t)layers->count + 1, sizeof *layers->entries);
    int failed = layers->entries == NULL;
    if (failed) {
        PyErr_NoMemory();
    }
    for (int32_t i = 0; i < layers->count && !failed; i++) {
        failed = take_layer(PyTuple_GetItem(layers->tuples, i), &layers->entries[i]) < 0;
    }
    if (failed) {
        py_kfac_layers_release(layers);
    }
    return failed ? -1 : 0;
}

void py_kfac_layers_release(py_kfac_layers *layers)
{
    PyMem_Free(layers->entries);
    Py_CLEAR(layers->tuples);
    layers->entries = NULL;
}

/* --- configuration ----------------------------------------------------------------------------------------------- */

static int take_enum(PyObject *value, const char *name, const char *const *words, void *at)
{
    int index;
    if (py_take_word(value, name, words, &index) < 0) {
        return -1;
    }
    *(int32_t *)at = index; /* enumerations have the size of an int */
    return 0;
}

static int take_small(PyObject *value, const char *name, int64_t low, int64_t high, int32_t *at)
{
    int64_t number;
    if (py_take_int(value, name, low, high, &number) < 0) {
        return -1;
    }
    *at = (int32_t)number;
    return 0;
}

/* 1 where the option is known and taken, 0 where there is no such option, -1 with an exception set. */
static int take_option(PyObject *key, PyObject *value, tch_kfac_config *config)
{
    struct {
        const char *name;
        double *at;
    } const numbers[] = {
        {"damping", &config->damping}, {"factor_decay", &config->factor_decay}, {"kl_clip", &config->kl_clip}};
    for (int i = 0; i < 3; i++) {
        if (PyUnicode_CompareWithASCIIString(key, numbers[i].name) == 0) {
            return py_take_double(value, numbers[i].name, numbers[i].at) < 0 ? -1 : 1;
        }
    }
    if (PyUnicode_CompareWithASCIIString(key, "method") == 0) {
        return take_enum(value, "method", methods, &config->method) < 0 ? -1 : 1;
    }
    if (PyUnicode_CompareWithASCIIString(key, "sharing") == 0) {
        return take_enum(value, "sharing", sharings, &config->sharing) < 0 ? -1 : 1;
    }
    if (PyUnicode_CompareWithASCIIString(key, "bias_correction") == 0) {
        return take_small(value, "bias_correction", 0, 1, &config->bias_correction) < 0 ? -1 : 1;
    }
    if (PyUnicode_CompareWithASCIIString(key, "accumulation") == 0) {
        return take_small(value, "accumulation", INT32_MIN, INT32_MAX, &config->accumulation) < 0 ? -1 : 1;
    }
    if (PyUnicode_CompareWithASCIIString(key, "factor_dtype") == 0) {
        return py_take_dtype(value, "factor_dtype", &config->factor_dtype) < 0 ? -1 : 1;
    }
    return 0;
}

int py_kfac_config(PyObject *dictionary, tch_kfac_config *config)
{
    PyObject *key;
    PyObject *value;
    Py_ssize_t at = 0;
    *config = (tch_kfac_config)TCH_KFAC_CONFIG_INIT;
    if (!PyDict_Check(dictionary)) {
        return py_wrong_type(dictionary, "config must be a dictionary");
    }
    while (PyDict_Next(dictionary, &at, &key, &value)) {
        if (!PyUnicode_Check(key)) {
            return py_wrong_type(key, "the options of a config must be strings");
        }
        int taken = take_option(key, value, config);
        if (taken == 0) {
            PyErr_Format(PyExc_TypeError, "config has no option '%U'", key);
        }
        if (taken <= 0) {
            return -1;
        }
    }
    return 0;
}

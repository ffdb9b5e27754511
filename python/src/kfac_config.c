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

#define AT(name) #name, offsetof(tch_kfac_config, name)

static const py_field fields[] = {
    {AT(method), PY_WORD, methods},     {AT(sharing), PY_WORD, sharings},   {AT(damping), PY_REAL, NULL},
    {AT(factor_decay), PY_REAL, NULL},  {AT(kl_clip), PY_REAL, NULL},       {AT(bias_correction), PY_BOOL, NULL},
    {AT(accumulation), PY_INT32, NULL}, {AT(factor_dtype), PY_DTYPE, NULL},
};

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
        const py_field *field = py_find_field(key, fields, (int)(sizeof fields / sizeof fields[0]));
        if (field == NULL || py_take_field(field, value, config) < 0) {
            return -1;
        }
    }
    return 0;
}

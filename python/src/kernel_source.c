/* What is to be compiled, from the arguments of a Python call: the texts belong to Python's objects, which are kept
 * alive until they have been read. */
#include "kernel.h"

#include <stdio.h>

#include "arguments.h"

/* A list or tuple of strings: *items keeps them alive. */
static int take_strings(PyObject *value, const char *name, PyObject **items, const char ***strings, int32_t *count)
{
    *items = PyUnicode_Check(value) || !PySequence_Check(value) ? NULL : PySequence_Tuple(value);
    Py_ssize_t length = *items != NULL ? PyTuple_Size(*items) : 0;
    if (*items == NULL || length > INT32_MAX) {
        if (!PyErr_Occurred()) {
            PyErr_Format(PyExc_TypeError, "%s must be a sequence of strings", name);
        }
        return -1;
    }
    *strings = PyMem_Calloc((size_t)length + 1, sizeof **strings);
    if (*strings == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        char label[48];
        snprintf(label, sizeof label, "%s[%d]", name, (int)i);
        if (py_take_string(PyTuple_GetItem(*items, i), label, &(*strings)[i]) < 0) {
            return -1;
        }
    }
    *count = (int32_t)length;
    return 0;
}

static int take_optional(PyObject *value, const char *name, const char **text)
{
    return value == Py_None ? 0 : py_take_string(value, name, text);
}

int py_kernel_source_take(py_kernel_source *source, PyObject *const *values)
{
    tch_kernel_config *config = &source->config;
    bool cache = true;
    *source = (py_kernel_source){.config = TCH_KERNEL_CONFIG_INIT};
    if (take_optional(values[0], "source", &config->source) < 0 ||
        take_optional(values[1], "path", &config->path) < 0 || py_take_string(values[2], "name", &config->name) < 0 ||
        take_strings(values[3], "options", &source->options, &source->option_texts, &config->option_count) < 0 ||
        take_strings(values[4], "includes", &source->includes, &source->include_texts, &config->include_count) < 0 ||
        py_take_bool(values[5], "cache", &cache) < 0) {
        py_kernel_source_release(source);
        return -1;
    }
    config->options = source->option_texts;
    config->includes = source->include_texts;
    config->use_cache = cache;
    return 0;
}

void py_kernel_source_release(py_kernel_source *source)
{
    PyMem_Free((void *)source->option_texts);
    PyMem_Free((void *)source->include_texts);
    Py_XDECREF(source->options);
    Py_XDECREF(source->includes);
}

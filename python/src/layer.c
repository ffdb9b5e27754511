/* The type torchium._C.Layer: the kind of a layer for per-sample gradients, with its options; immutable. Types and
 * lengths are checked here; the library validates the combination in every call. */
#include "module.h"

#include "arguments.h"

typedef struct py_layer {
    PyObject ob_base;
    tch_layer layer;
} py_layer;

static PyTypeObject *layer_type; /* single interpreter, see module.c */

int py_layer_take(PyObject *value, const char *name, tch_layer *layer)
{
    if (Py_TYPE(value) != layer_type) {
        return py_refuse_type(value, name, "a torchium._C.Layer");
    }
    *layer = ((py_layer *)value)->layer;
    return 0;
}

/* --- options ----------------------------------------------------------------------------------------------------- */

/* One to three integers: exactly `dims`, or, if that is 0, any number, which it is set to. */
static int take_sizes(PyObject *value, const char *name, int64_t *values, int32_t *dims)
{
    if (value == NULL || value == Py_None) {
        return 0;
    }
    int count = py_take_sizes(value, name, INT64_MIN, INT64_MAX, 1, 3, values);
    if (count > 0 && *dims != 0 && count != *dims) {
        PyErr_Format(PyExc_ValueError, "%s has %d numbers, expected %d as kernel has", name, count, (int)*dims);
        return -1;
    }
    *dims = count > 0 ? count : *dims;
    return count > 0 ? 0 : -1;
}

static int take_convolution(PyObject *const *v, tch_layer *layer)
{
    static const char *const words[] = {"zeros", "reflect", "replicate", "circular", NULL};
    int padding = TCH_PADDING_ZEROS;
    if (take_sizes(v[0], "kernel", layer->kernel, &layer->dims) < 0 ||
        take_sizes(v[1], "stride", layer->stride, &layer->dims) < 0 ||
        take_sizes(v[2], "dilation", layer->dilation, &layer->dims) < 0 ||
        take_sizes(v[3], "before", layer->before, &layer->dims) < 0 ||
        take_sizes(v[4], "after", layer->after, &layer->dims) < 0 ||
        (v[5] != NULL && py_take_word(v[5], "padding", words, &padding) < 0)) {
        return -1;
    }
    layer->padding = (tch_padding)padding;
    return 0;
}

static int take_count(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *result)
{
    return value == NULL ? 0 : py_take_int(value, name, low, high, result);
}

static int take_options(PyObject *const *v, tch_layer *layer)
{
    bool rounded = true;
    int64_t normalized = layer->normalized;
    if ((v[1] != NULL && py_take_bool(v[1], "rounded", &rounded) < 0) || take_convolution(v + 2, layer) < 0 ||
        take_count(v[8], "groups", 1, INT64_MAX, &layer->groups) < 0 ||
        take_count(v[9], "rows", 0, INT64_MAX, &layer->rows) < 0 ||
        take_count(v[10], "padding_index", -1, INT64_MAX, &layer->padding_index) < 0 ||
        take_count(v[11], "normalized", 1, TCH_MAX_RANK, &normalized) < 0 ||
        (v[12] != NULL && py_take_double(v[12], "eps", &layer->eps) < 0)) {
        return -1;
    }
    layer->rounded = rounded;
    layer->normalized = (int32_t)normalized;
    return 0;
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static const char *const kinds[] = {"linear", "conv", "embedding", "layer_norm", "rms_norm", "group_norm", NULL};

/* Everything is initialized on construction, so that no partial object exists. */
static PyObject *new_layer(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"kind",    "rounded", "kernel", "stride",        "dilation",   "before", "after",
                            "padding", "groups",  "rows",   "padding_index", "normalized", "eps",    NULL};
    PyObject *v[13] = {NULL};
    int kind;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$OOOOOOOOOOOO:Layer", names, &v[0], &v[1], &v[2], &v[3], &v[4],
                                     &v[5], &v[6], &v[7], &v[8], &v[9], &v[10], &v[11], &v[12]) ||
        py_take_word(v[0], "kind", kinds, &kind) < 0) {
        return NULL;
    }
    tch_layer layer = TCH_LAYER_INIT((tch_layer_kind)kind);
    if (take_options(v, &layer) < 0) {
        return NULL;
    }
    py_layer *self = (py_layer *)(void *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->layer = layer;
    }
    return (PyObject *)self;
}

static void deallocate_layer(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *describe_layer(PyObject *object)
{
    return PyUnicode_FromFormat("<torchium._C.Layer '%s'>", kinds[((py_layer *)object)->layer.kind]);
}

int py_layer_register(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_doc, "What kind of layer gradients of samples are taken of, with its options."},
        {Py_tp_new, PY_SLOT(new_layer)},
        {Py_tp_dealloc, PY_SLOT(deallocate_layer)},
        {Py_tp_repr, PY_SLOT(describe_layer)},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Layer", sizeof(py_layer), 0, Py_TPFLAGS_DEFAULT, slots};
    return py_add_type(module, &spec, &layer_type);
}

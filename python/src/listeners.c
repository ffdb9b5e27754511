/* Whether a call with PyTorch tensors may bypass the dispatcher: nothing records or intercepts it, and the tensors are
 * ordinary ones. PyTorch has no single check for this, so torchium._ops sets a list of checks, with the results that
 * permit it. */
#include "module.h"

#include "arguments.h"

/* Set once by set_listeners; the references are held forever. */
static struct {
    PyObject *types;       /* a tuple: types of ordinary tensors */
    PyObject *calls;       /* a tuple of (function, expected result) */
    PyObject *attributes;  /* a tuple of (object, name, expected value) */
    PyObject *is_recorded; /* a function: whether gradients are enabled */
} asked;

/* Created once. */
static struct {
    PyObject *is_cuda, *is_cpu, *requires_grad;
} names;

/* 1 if the result, a new reference or NULL with an exception set, is the expected one. */
static int is_quiet(PyObject *answer, PyObject *quiet)
{
    int same = answer != NULL ? PyObject_RichCompareBool(answer, quiet, Py_EQ) : -1;
    Py_XDECREF(answer);
    return same;
}

static int nobody_listens(void)
{
    int quiet = 1;
    for (Py_ssize_t i = 0; quiet == 1 && i < PyTuple_Size(asked.calls); i++) {
        PyObject *row = PyTuple_GetItem(asked.calls, i);
        quiet = is_quiet(PyObject_CallNoArgs(PyTuple_GetItem(row, 0)), PyTuple_GetItem(row, 1));
    }
    for (Py_ssize_t i = 0; quiet == 1 && i < PyTuple_Size(asked.attributes); i++) {
        PyObject *row = PyTuple_GetItem(asked.attributes, i);
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(row, 0), PyTuple_GetItem(row, 1));
        quiet = is_quiet(value, PyTuple_GetItem(row, 2));
    }
    return quiet;
}

static int is_true(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int answer = value != NULL ? value == Py_True : -1;
    Py_XDECREF(value);
    return answer;
}

/* Of one of the types, on a CPU or a GPU. */
static int is_ordinary(PyObject *object)
{
    bool known = false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(asked.types); i++) {
        known = known || (PyObject *)Py_TYPE(object) == PyTuple_GetItem(asked.types, i);
    }
    if (!known) {
        return 0;
    }
    int on_gpu = is_true(object, names.is_cuda);
    return on_gpu != 0 ? on_gpu : is_true(object, names.is_cpu);
}

static int wants_gradient(PyObject *const *tensors, Py_ssize_t count)
{
    PyObject *records = PyObject_CallNoArgs(asked.is_recorded);
    Py_XDECREF(records);
    if (records != Py_True) {
        return records != NULL ? 0 : -1;
    }
    int required = 0;
    for (Py_ssize_t i = 0; required == 0 && i < count; i++) {
        required = is_true(tensors[i], names.requires_grad);
    }
    return required;
}

static PyObject *recorded(PyObject *module PY_UNUSED, PyObject *const *tensors, Py_ssize_t count)
{
    int ordinary = asked.types != NULL ? nobody_listens() : 0;
    for (Py_ssize_t i = 0; ordinary == 1 && i < count; i++) {
        ordinary = is_ordinary(tensors[i]);
    }
    if (ordinary != 1) {
        return ordinary == 0 ? Py_NewRef(Py_None) : NULL;
    }
    int required = wants_gradient(tensors, count);
    return required < 0 ? NULL : PyBool_FromLong(required);
}

/* A tuple of tuples of this many items. */
static bool is_table(PyObject *value, Py_ssize_t width)
{
    bool fits = PyTuple_Check(value);
    for (Py_ssize_t i = 0; fits && i < PyTuple_Size(value); i++) {
        PyObject *row = PyTuple_GetItem(value, i);
        fits = PyTuple_Check(row) && PyTuple_Size(row) == width;
    }
    return fits;
}

static PyObject *set_listeners(PY_ARGUMENTS)
{
    PY_TAKE("set_listeners", 4, "types", "calls", "attributes", "is_recorded");
    if (!PyTuple_Check(v[0]) || !is_table(v[1], 2) || !is_table(v[2], 3) || !PyCallable_Check(v[3])) {
        PyErr_SetString(PyExc_TypeError, "set_listeners() wants types, (function, answer) pairs, (object, name, value) "
                                         "triples, all in tuples, and a function");
        return NULL;
    }
    if (asked.types == NULL) {
        asked.calls = Py_NewRef(v[1]);
        asked.attributes = Py_NewRef(v[2]);
        asked.is_recorded = Py_NewRef(v[3]);
        asked.types = Py_NewRef(v[0]);
    }
    return Py_NewRef(Py_None);
}

int py_listeners_register(PyObject *module)
{
    static PyMethodDef functions[] = {
        {"recorded", (PyCFunction)(void (*)(void))recorded, METH_FASTCALL,
         "Whether autograd records a call with these tensors; None where it must go through its operator."},
        PY_METHOD("set_listeners", set_listeners, "What `recorded` asks."),
        {NULL, NULL, 0, NULL},
    };
    names.is_cuda = PyUnicode_InternFromString("is_cuda");
    names.is_cpu = PyUnicode_InternFromString("is_cpu");
    names.requires_grad = PyUnicode_InternFromString("requires_grad");
    bool failed = names.is_cuda == NULL || names.is_cpu == NULL || names.requires_grad == NULL;
    return failed ? -1 : PyModule_AddFunctions(module, functions);
}

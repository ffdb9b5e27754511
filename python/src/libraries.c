/* What a type of arrays publishes: the table of C functions, and two methods of PyTorch's. A type is looked up once:
 * the last few are remembered, with and without a table. */
#include "arrays.h"

#define MOST_TYPES 16

typedef struct kind {
    PyObject *type; /* a reference is held, so that the address stays this type's */
    const DLPackExchange *table;
    PyObject *is_neg; /* methods, or NULL */
    PyObject *new_empty;
} kind;

static kind kinds[MOST_TYPES];
static unsigned next_place;

/* The table of the major version we know, or NULL. */
static const DLPackExchange *known_version(const DLPackExchangeHeader *header)
{
    while (header != NULL && header->version.major != DLPACK_MAJOR) {
        header = header->previous;
    }
    const DLPackExchange *table = (const DLPackExchange *)header;
    return table != NULL && table->borrow != NULL && table->current_stream != NULL ? table : NULL;
}

/* What cannot be read is as good as absent: the array is then asked for a capsule. */
static const DLPackExchange *find_table(PyObject *type)
{
    static const char name[] = "dlpack_exchange_api";
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const DLPackExchangeHeader *header = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, name)) {
        header = PyCapsule_GetPointer(capsule, name);
    }
    Py_XDECREF(capsule);
    PyErr_Clear();
    return known_version(header);
}

static kind look_up(PyObject *type)
{
    kind found = {.type = Py_NewRef(type), .table = find_table(type)};
    if (found.table != NULL) {
        found.is_neg = PyObject_GetAttrString(type, "is_neg");
        PyErr_Clear();
    }
    found.new_empty = PyObject_GetAttrString(type, "new_empty"); /* tensors of PyTorch before 2.10 have no table */
    PyErr_Clear();
    return found;
}

/* Valid until the next call. */
static const kind *kind_of(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    for (int i = 0; i < MOST_TYPES; i++) {
        if (kinds[i].type == type) {
            return &kinds[i];
        }
    }
    kind found = look_up(type);
    kind *place = &kinds[next_place++ % MOST_TYPES];
    kind forgotten = *place;
    *place = found;
    Py_XDECREF(forgotten.is_neg);
    Py_XDECREF(forgotten.new_empty);
    Py_XDECREF(forgotten.type);
    return place;
}

const DLPackExchange *py_table_of(PyObject *object)
{
    return kind_of(object)->table;
}

int py_is_negated(PyObject *object)
{
    PyObject *method = kind_of(object)->is_neg;
    if (method == NULL) {
        return 0;
    }
    Py_INCREF(method); /* a class may have a method of its own, which may do anything */
    PyObject *answer = PyObject_CallFunctionObjArgs(method, object, NULL);
    int negated = answer != NULL ? answer == Py_True : -1;
    Py_XDECREF(answer);
    Py_DECREF(method);
    return negated;
}

/* (object, sizes...): sizes one by one are what PyTorch reads fastest; no sizes at all must be an empty tuple. */
static PyObject *arguments_of_new_empty(PyObject *object, int32_t rank, const int64_t *sizes)
{
    if (rank == 0) {
        return Py_BuildValue("(O())", object);
    }
    PyObject *arguments = PyTuple_New(rank + 1);
    if (arguments == NULL || PyTuple_SetItem(arguments, 0, Py_NewRef(object)) < 0) {
        Py_XDECREF(arguments);
        return NULL;
    }
    for (int32_t i = 0; i < rank; i++) {
        PyObject *size = PyLong_FromLongLong(sizes[i]);
        if (size == NULL || PyTuple_SetItem(arguments, i + 1, size) < 0) {
            Py_DECREF(arguments);
            return NULL;
        }
    }
    return arguments;
}

bool py_makes_new(PyObject *object)
{
    return kind_of(object)->new_empty != NULL;
}

PyObject *py_new_like(PyObject *object, int32_t rank, const int64_t *sizes)
{
    PyObject *method = kind_of(object)->new_empty;
    if (method == NULL) {
        PyErr_SetString(PyExc_TypeError, "a result must be given: arrays of this library are not made here");
        return NULL;
    }
    Py_INCREF(method);
    PyObject *arguments = arguments_of_new_empty(object, rank, sizes);
    PyObject *made = arguments != NULL ? PyObject_Call(method, arguments, NULL) : NULL;
    Py_XDECREF(arguments);
    Py_DECREF(method);
    return made;
}

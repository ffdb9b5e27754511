/* Caches what array types publish: the table of C functions, and some of PyTorch's methods. The last few types are
 * remembered, with and without a table. */
#include "arrays.h"

#define MOST_TYPES 16

enum { IS_NEG, UNTYPED_STORAGE, STORAGE_OFFSET, NEW_EMPTY, METHODS };

typedef struct kind {
    PyObject *type; /* a reference is held, so that the address is not reused */
    const DLPackExchange *table;
    PyObject *methods[METHODS]; /* or NULL */
} kind;

static kind kinds[MOST_TYPES];
static unsigned next_place;

/* The table if its major version is known, else NULL. */
static const DLPackExchange *known_version(const DLPackExchangeHeader *header)
{
    while (header != NULL && header->version.major != DLPACK_MAJOR) {
        header = header->previous;
    }
    const DLPackExchange *table = (const DLPackExchange *)header;
    return table != NULL && table->borrow != NULL && table->current_stream != NULL ? table : NULL;
}

/* Unreadable tables count as absent: the array is then asked for a capsule. */
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

static kind look_up_type(PyObject *type)
{
    kind found = {.type = Py_NewRef(type), .table = find_table(type)};
    static const char *const names[METHODS] = {"is_neg", "untyped_storage", "storage_offset", "new_empty"};
    for (int i = 0; i < METHODS; i++) {
        found.methods[i] = PyObject_GetAttrString(type, names[i]);
        PyErr_Clear();
    }
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
    kind found = look_up_type(type);
    kind *place = &kinds[next_place++ % MOST_TYPES];
    kind forgotten = *place;
    *place = found;
    for (int i = 0; i < METHODS; i++) {
        Py_XDECREF(forgotten.methods[i]);
    }
    Py_XDECREF(forgotten.type);
    return place;
}

const DLPackExchange *py_table_of(PyObject *object)
{
    return kind_of(object)->table;
}

/* The result, a new reference; None if the type has no such method. Subclasses may override it: any code may run. */
static PyObject *ask_method(PyObject *object, int which)
{
    PyObject *method = kind_of(object)->methods[which];
    if (method == NULL) {
        return Py_NewRef(Py_None);
    }
    Py_INCREF(method);
    PyObject *answer = PyObject_CallFunctionObjArgs(method, object, NULL);
    Py_DECREF(method);
    return answer;
}

int py_is_negated(PyObject *object)
{
    PyObject *answer = ask_method(object, IS_NEG);
    int negated = answer != NULL ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return negated;
}

/* Elements spanned by the tensor; PyTorch's strides are never negative. */
static int64_t extent_of(const tch_tensor *tensor)
{
    int64_t last = 0;
    for (int32_t k = 0; k < tensor->ndim; k++) {
        if (tensor->shape[k] == 0) {
            return 0;
        }
        last += (tensor->shape[k] - 1) * py_stride_of(tensor, k);
    }
    return last + 1;
}

int py_is_shrunk(PyObject *object, const tch_tensor *tensor)
{
    int64_t extent = extent_of(tensor), size = (int64_t)tch_dtype_size(tensor->dtype); /* before other code runs */
    PyObject *storage = ask_method(object, UNTYPED_STORAGE);
    PyObject *offset = storage == NULL || storage == Py_None ? NULL : ask_method(object, STORAGE_OFFSET);
    int shrunk = storage == Py_None ? 0 : -1;
    if (offset != NULL) {
        Py_ssize_t bytes = PyObject_Size(storage);
        int64_t start = PyLong_AsLongLong(offset);
        shrunk = PyErr_Occurred() ? -1 : extent > 0 && bytes < (start + extent) * size;
    }
    Py_XDECREF(offset);
    Py_XDECREF(storage);
    return shrunk;
}

/* (object, sizes...): PyTorch parses separate sizes fastest; a scalar needs an empty tuple. */
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
    return kind_of(object)->methods[NEW_EMPTY] != NULL;
}

PyObject *py_new_like(PyObject *object, int32_t rank, const int64_t *sizes)
{
    PyObject *method = kind_of(object)->methods[NEW_EMPTY];
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

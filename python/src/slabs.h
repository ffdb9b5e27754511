/* The memory of a library object's state, from a function of the caller's: PyTorch counts it as its own, and views of it
 * outlive the object. The library calls back without the GIL, which is taken here. */
#ifndef TORCHIUM_PYTHON_SLABS_H
#define TORCHIUM_PYTHON_SLABS_H

#include "python.h"

/* Memory, and the object that keeps it. */
typedef struct py_slab {
    char *pointer;
    int64_t bytes;
    PyObject *owner;
} py_slab;

typedef struct py_slabs {
    PyObject *allocate; /* allocate(bytes) gives (owner, address); None for the library's own memory */
    py_slab *list;
    int32_t count;
    /* an exception that came out of `allocate`, until the library has returned */
    PyObject *error_type, *error_value, *error_trace;
} py_slabs;

/* What the library takes; `slabs` must stay where it is as long as the library's object is there. */
tch_state_allocator py_slabs_allocator(py_slabs *slabs);

/* Sets the exception of a failed call, the one that `allocate` raised if it did. Always -1. */
int py_slabs_fail(py_slabs *slabs, tch_status status);

/* Who keeps this memory alive: the caller's own object, or `other` where the memory is the library's. Borrowed. */
PyObject *py_slabs_owner(const py_slabs *slabs, const char *data, PyObject *other);

int py_slabs_traverse(const py_slabs *slabs, visitproc visit, void *arg);

/* Lets go of everything, after the library's object is gone. */
void py_slabs_clear(py_slabs *slabs);

#endif

/* The memory of a library object's state, from a function of the caller's: PyTorch counts it as its own, and views of
 * it outlive the object. The library calls back without the GIL, which is taken here. */
#ifndef TORCHIUM_PYTHON_CHUNKS_H
#define TORCHIUM_PYTHON_CHUNKS_H

#include "python.h"

/* Memory, and the object that keeps it. */
typedef struct py_chunk {
    char *pointer;
    int64_t bytes;
    PyObject *owner;
} py_chunk;

typedef struct py_chunks {
    PyObject *allocate; /* allocate(bytes) gives (owner, address); None for the library's own memory */
    py_chunk *list;
    int32_t count;
    /* an exception that came out of `allocate`, until the library has returned */
    PyObject *error_type, *error_value, *error_trace;
} py_chunks;

/* What the library takes; `chunks` must stay where it is as long as the library's object is there. */
tch_state_allocator py_chunks_allocator(py_chunks *chunks);

/* Sets the exception of a failed call, the one that `allocate` raised if it did. Always -1. */
int py_chunks_fail(py_chunks *chunks, tch_status status);

/* (name, parameter or layer, memory) of a tensor of the state; a name may have slashes in it before the last. */
PyObject *py_chunks_describe(const py_chunks *chunks, const tch_optim_state *state, PyObject *other, void *stream);

int py_chunks_traverse(const py_chunks *chunks, visitproc visit, void *arg);

/* Lets go of everything, after the library's object is gone. */
void py_chunks_clear(py_chunks *chunks);

#endif

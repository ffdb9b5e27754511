/* A group of processes for the library from a function of the caller's, over torch.distributed as a rule. The library
 * calls back without the GIL, which is taken here. */
#ifndef TORCHIUM_PYTHON_COMM_H
#define TORCHIUM_PYTHON_COMM_H

#include "chunks.h"
#include "python.h"

typedef struct py_comm {
    PyObject *collective; /* collective(operation, send, receive, numbers, stream); NULL where there is no group */
    tch_comm *comm;
    int32_t size;
    /* an exception that came out of it, until the library has returned */
    PyObject *error_type, *error_value, *error_trace;
} py_comm;

/* From (name, rank, size, collective). `group` must stay where it is as long as the library uses it. 0, or -1 with an
 * exception set. */
int py_comm_open(PyObject *given, py_comm *group);

/* Raises what `collective` has raised: true where there was something. */
bool py_comm_raise(py_comm *group);

/* Sets the exception of a failed call: what the group or the memory has raised, or the status'. Always -1. */
int py_comm_fail(py_comm *group, py_chunks *memory, tch_status status);

int py_comm_traverse(const py_comm *group, visitproc visit, void *arg);
void py_comm_clear(py_comm *group);

/* Placements of parameters from a list of None (the whole on every rank) and (shape, shards), each shard (rank, start,
 * size, offset). All memory is in one block, which the caller frees with PyMem_Free. NULL with an exception set. */
tch_placement *py_placements(PyObject *list, Py_ssize_t count);

#endif

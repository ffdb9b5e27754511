/* Objects with their own context: torchium._C.Optimizer, Kfac and Scaler. The first two are sessions, which can also
 * allocate by a function of the caller and be sharded over a group of processes. */
#ifndef TORCHIUM_PYTHON_SESSION_H
#define TORCHIUM_PYTHON_SESSION_H

#include "arrays.h"
#include "python.h"

/* Between py_runner_enter and py_runner_leave a method has exclusive use of the object, even while the GIL is released,
 * in the process that created it only: not in a forked child. */
typedef struct py_runner {
    const char *name; /* for messages; NULL until initialized */
    tch_device device;
    tch_context *context;
    bool busy;
    long process;
    bool has_stream;
    void *stream;
} py_runner;

/* Creates the context. 0, or -1 with an exception set. */
int py_runner_open(py_runner *on, PyObject *device);

/* 0, or -1 with a RuntimeError set. */
int py_runner_enter(py_runner *on);
void py_runner_leave(py_runner *on);

/* The result of a method: None, or the exception of the status. */
PyObject *py_runner_done(py_runner *on, tch_status status);

/* Switches the library's calls to this stream. 0, or -1 with an exception set. */
int py_runner_follow(py_runner *on, void *stream);

/* Borrows or imports `count` arrays and switches to their stream. 0, or -1 with an exception set and nothing to
 * release. */
int py_runner_take(py_runner *on, const py_operands *o, int count, PyObject *given, py_stream *stream);

/* Memory of the state and its owner. */
typedef struct py_chunk {
    char *pointer;
    int64_t bytes;
    PyObject *owner;
} py_chunk;

/* A parameter as passed to the library; shape and strides point into the struct. */
typedef struct py_place {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    const void *gradient, *sizes, *data;  /* identity of its gradient at the last check */
    char label[256], gradient_label[256]; /* for messages */
} py_place;

typedef struct py_session {
    PyObject ob_base;
    py_runner on;
    tch_optimizer *optimizer; /* of an Optimizer, over all groups */
    tch_kfac *kfac;           /* of a Kfac */
    PyObject *allocate;       /* allocate(bytes) returns (owner, address); None: the library allocates */
    py_chunk *chunks;
    int32_t chunk_count;
    PyObject *collective; /* collective(operation, send, receive, numbers, stream), if sharded */
    tch_comm *comm;
    int32_t ranks;
    PyObject *error[3];   /* an exception raised by either function, until the library returns */
    PyObject *push, *pop; /* called with a step's phases */
    PyObject *lr_tensors; /* a dictionary by group: owners of the learning rates */
    int32_t count, room;  /* parameters of an Optimizer, and allocated entries; layers of a Kfac */
    py_place **places;    /* of an Optimizer */
    py_operands step;     /* the arrays of a step */
    char (*labels)[256];  /* of a Kfac's gradients, two per layer */
} py_session;

/* Arguments common to __init__: device, allocate (or None) and group (or None). 0, or -1 with an exception set. */
int py_session_open(py_session *self, PyObject *device, PyObject *allocate, PyObject *group);

/* Options to create the library's object; `allocator` owns what they point to. */
tch_optim_setup py_session_setup(py_session *self, const tch_placement *placements, tch_state_allocator *allocator);

/* Sets the exception of a failed call: the one that the caller's functions raised, or the status's. Always -1. */
int py_session_fail(py_session *self, tch_status status);

/* Joins the group (name, rank, size, collective), usually over torch.distributed. 0, or -1 with an exception set. */
int py_comm_open(PyObject *given, py_session *self);

/* The group alone, for a forecast, which calls no collective. */
int py_comm_create(PyObject *given, void *user, tch_comm **comm);

/* Placements of parameters from a tuple of None (replicated) and (shape, shards), each shard (rank, start, size,
 * offset). One allocation, which the caller frees with PyMem_Free. NULL with an exception set. */
tch_placement *py_placements(PyObject *list, Py_ssize_t count);

/* Adds a session type and its module functions. 0, or -1 with an exception set. */
int py_session_register(PyObject *module, const char *name, const char *text, initproc initialize, PyMethodDef *methods,
                        PyMethodDef *functions);

/* Methods of both types. */
PyObject *py_session_states(PY_NO_ARGUMENTS);
PyObject *py_session_get_counts(PY_ARGUMENTS);
PyObject *py_session_set_counts(PY_ARGUMENTS);

#endif

/* Objects with a context of their own: torchium._C.Optimizer, Kfac and Scaler. The first two are sessions, which also
 * have memory from a function of the caller's and may be shared by a group of processes. */
#ifndef TORCHIUM_PYTHON_SESSION_H
#define TORCHIUM_PYTHON_SESSION_H

#include "arrays.h"
#include "python.h"

/* A method has the object to itself from py_runner_enter to py_runner_leave, also while the GIL is released, and only
 * in the process that made it: a child of a fork leaves it alone. */
typedef struct py_runner {
    const char *name; /* for messages; NULL until the object is made */
    tch_device device;
    tch_context *context;
    bool busy;
    long process;
    bool has_stream;
    void *stream;
} py_runner;

/* Makes the context. 0, or -1 with an exception set. */
int py_runner_open(py_runner *on, PyObject *device);

/* 0, or -1 with a RuntimeError set. */
int py_runner_enter(py_runner *on);
void py_runner_leave(py_runner *on);

/* The end of a method: None, or the exception of the status. */
PyObject *py_runner_done(py_runner *on, tch_status status);

/* Makes the library's calls go to this stream. 0, or -1 with an exception set. */
int py_runner_follow(py_runner *on, void *stream);

/* Takes `count` arrays and follows their stream. 0, or -1 with an exception set and nothing to release. */
int py_runner_take(py_runner *on, const py_operands *o, int count, PyObject *given, py_stream *stream);

/* Memory of the state, and the object that keeps it. */
typedef struct py_chunk {
    char *pointer;
    int64_t bytes;
    PyObject *owner;
} py_chunk;

/* A parameter as the library knows it: shape and strides point into the struct. */
typedef struct py_place {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    const void *gradient, *sizes, *data;  /* what its gradient was told from when it was last asked */
    char label[256], gradient_label[256]; /* for messages */
} py_place;

typedef struct py_session {
    PyObject ob_base;
    py_runner on;
    tch_optimizer *optimizer; /* of an Optimizer, from the first group on */
    tch_kfac *kfac;           /* of a Kfac */
    PyObject *allocate;       /* allocate(bytes) gives (owner, address); None for the library's own memory */
    py_chunk *chunks;
    int32_t chunk_count;
    PyObject *collective; /* collective(operation, send, receive, numbers, stream), of a shared one */
    tch_comm *comm;
    int32_t ranks;
    PyObject *error[3];   /* an exception that came out of either function, until the library has returned */
    PyObject *push, *pop; /* told of a step's phases */
    PyObject *lr_tensors; /* a dictionary, group: what keeps its learning rate alive */
    int32_t count, room;  /* parameters of an Optimizer, and places made for them; layers of a Kfac */
    py_place **places;    /* of an Optimizer */
    py_operands step;     /* the arrays of a step */
    char (*labels)[256];  /* of a Kfac's gradients, two for each layer */
} py_session;

/* What __init__ begins with: device, allocate (or None) and group (or None). 0, or -1 with an exception set. */
int py_session_open(py_session *self, PyObject *device, PyObject *allocate, PyObject *group);

/* What the library's object is made with; `allocator` holds what the result points to. */
tch_optim_setup py_session_setup(py_session *self, const tch_placement *placements, tch_state_allocator *allocator);

/* Sets the exception of a failed call: what the caller's functions raised, or the status'. Always -1. */
int py_session_fail(py_session *self, tch_status status);

/* Joins the group (name, rank, size, collective), over torch.distributed as a rule. 0, or -1 with an exception set. */
int py_comm_open(PyObject *given, py_session *self);

/* Placements of parameters from a tuple of None (the whole on every rank) and (shape, shards), each shard (rank, start,
 * size, offset). All memory is in one block, which the caller frees with PyMem_Free. NULL with an exception set. */
tch_placement *py_placements(PyObject *list, Py_ssize_t count);

/* Adds a type of sessions and functions beside it to the module. 0, or -1 with an exception set. */
int py_session_register(PyObject *module, const char *name, const char *text, initproc initialize, PyMethodDef *methods,
                        PyMethodDef *functions);

/* Methods of both types. */
PyObject *py_session_states(PY_NO_ARGUMENTS);
PyObject *py_session_get_counts(PY_ARGUMENTS);
PyObject *py_session_set_counts(PY_ARGUMENTS);

#endif

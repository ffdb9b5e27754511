/* The contexts that calls run on. A context serves one thread at a time, so a call borrows one and gives it back. All
 * functions want the GIL, which is also the lock of the list. */
#ifndef TORCHIUM_PYTHON_CONTEXTS_H
#define TORCHIUM_PYTHON_CONTEXTS_H

#include <stdatomic.h>

#include "python.h"

typedef struct py_context {
    tch_context *context;
    tch_device device;
    void *stream;    /* NULL on the CPU, and for a GPU's default stream */
    bool busy;       /* some call has it */
    bool captured;   /* a graph may use its memory: no longer for calls outside captures */
    atomic_int lent; /* tensors of its pool that are out: they come back in the order of its stream */
    uint64_t used;   /* when: a count of loans */
    struct py_context *next;
} py_context;

int py_contexts_register(void);

/* An idle context of the device whose calls go to `stream`, made where there is none. While PyTorch records a graph
 * (`capturing`) nothing can be allocated: the context that was used last is taken, since it has what the same calls
 * needed before. NULL with an exception set on failure. Releases the GIL where it has to wait. */
py_context *py_context_borrow(tch_device device, void *stream, bool capturing);
void py_context_return(py_context *place);

/* Calls `visit` with every idle context of the device, without the GIL, until one fails. Returns 0, or -1 with the
 * exception of that failure. */
int py_contexts_visit(tch_device device, tch_status (*visit)(tch_context *context, void *user), void *user);

/* What an object has that keeps a context of its own. A method has the object to itself from py_runner_enter on, also
 * while the GIL is released, and only in the process that made it: a child of a fork leaves it alone. */
typedef struct py_runner {
    tch_device device;
    tch_context *context;
    bool busy;
    long process;
    bool has_stream;
    void *stream;
} py_runner;

/* 0, or -1 with a RuntimeError that calls the object `name`; `made` is whether its making succeeded. */
int py_runner_enter(py_runner *runner, const char *name, bool made);
void py_runner_leave(py_runner *runner);

/* The end of a method: None, or the exception of the status. */
PyObject *py_runner_done(py_runner *runner, tch_status status);

/* Makes the library's calls go to the stream that the arrays of a call are worked on. 0, or -1 with an exception
 * set. */
int py_runner_follow(py_runner *runner, void *stream);

/* "cpu" or "cuda:1", as tch_context_create reads it. */
const char *py_device_text(tch_device device, char *text, size_t size);

#endif

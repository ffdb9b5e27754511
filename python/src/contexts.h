/* The contexts of calls. A context serves one thread at a time, so a call borrows one and returns it. All functions
 * require the GIL, which also protects the list. */
#ifndef TORCHIUM_PYTHON_CONTEXTS_H
#define TORCHIUM_PYTHON_CONTEXTS_H

#include <stdatomic.h>

#include "python.h"

typedef struct py_context {
    tch_context *context;
    tch_device device;
    void *stream;    /* NULL on the CPU, and for a GPU's default stream */
    bool busy;       /* borrowed by a call */
    bool captured;   /* a graph may use its memory: not for calls outside captures */
    atomic_int lent; /* allocated tensors of its pool, which are freed in the order of its stream */
    uint64_t used;   /* when, as a count of loans */
    struct py_context *next;
} py_context;

int py_contexts_register(void);

/* An idle context of the device for calls on `stream`, created if needed. While PyTorch captures a graph (`capturing`)
 * nothing can be allocated, so the most recently used context is taken, which has the workspace of earlier calls. NULL
 * with an exception set on failure. Releases the GIL to wait. */
py_context *py_context_borrow(tch_device device, void *stream, bool capturing);
void py_context_return(py_context *place);

/* Calls `visit` with every idle context of the device, without the GIL, until one fails. Returns 0, or -1 with the
 * exception of that failure. */
int py_contexts_visit(tch_device device, tch_status (*visit)(tch_context *context, void *user), void *user);

/* "cpu" or "cuda:1", as tch_context_create reads it. */
const char *py_device_text(tch_device device, char *text, size_t size);

#endif

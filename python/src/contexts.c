/* The list of contexts. Usually a call finds the context of its stream idle and uses it: no event, no synchronization.
 * Contexts are never destroyed: at process exit the GPU's driver may already be unloaded, and the memory is freed with
 * the process. */
#include "contexts.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Streams of one GPU that can have contexts at the same time, each with its own workspaces and cuBLAS handle. Beyond
 * this number the context of the least recently used stream moves to the new one. */
#define MOST_STREAMS 4

static py_context *contexts;
static uint64_t loans;

/* After fork(), the parent's contexts are not touched: their locks and threads may be in any state. OpenMP's threads do
 * not exist in the child, so it uses one thread. */
static void forget_contexts(void)
{
    contexts = NULL;
    tch_set_num_threads(1);
}

int py_contexts_register(void)
{
    static bool registered;
    if (!registered && pthread_atfork(NULL, NULL, forget_contexts) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    registered = true;
    return 0;
}

const char *py_device_text(tch_device device, char *text, size_t size)
{
    if (device.type == TCH_DEVICE_CUDA) {
        snprintf(text, size, "cuda:%d", (int)device.index);
    } else {
        snprintf(text, size, "cpu");
    }
    return text;
}

static bool is_idle_on(const py_context *c, tch_device device)
{
    return !c->busy && c->device.type == device.type && c->device.index == device.index;
}

/* --- choosing a context ------------------------------------------------------------------------------------------ */

static py_context *idle_on_stream(tch_device device, void *stream)
{
    for (py_context *c = contexts; c != NULL; c = c->next) {
        if (is_idle_on(c, device) && c->stream == stream && !c->captured) {
            return c;
        }
    }
    return NULL;
}

/* Idle, on another stream, and allowed to move. */
static py_context *least_recent(tch_device device)
{
    py_context *found = NULL;
    for (py_context *c = contexts; c != NULL; c = c->next) {
        if (is_idle_on(c, device) && !c->captured && atomic_load(&c->lent) == 0 &&
            (found == NULL || c->used < found->used)) {
            found = c;
        }
    }
    return found;
}

static py_context *most_recent(tch_device device, void *stream)
{
    py_context *found = NULL;
    for (py_context *c = contexts; c != NULL; c = c->next) {
        bool may_move = c->stream == stream || (!c->captured && atomic_load(&c->lent) == 0);
        if (is_idle_on(c, device) && may_move && (found == NULL || c->used > found->used)) {
            found = c;
        }
    }
    return found;
}

static int streams_on(tch_device device)
{
    int count = 0;
    for (py_context *c = contexts; c != NULL; c = c->next) {
        count += c->device.type == device.type && c->device.index == device.index && !c->captured;
    }
    return count;
}

/* --- creating and moving ----------------------------------------------------------------------------------------- */

static tch_status create_context(tch_device device, void *stream, tch_context **context)
{
    char text[32];
    tch_status status = tch_context_create(py_device_text(device, text, sizeof text), context);
    if (status == TCH_OK && device.type == TCH_DEVICE_CUDA) {
        status = tch_context_set_stream(*context, stream);
        if (status != TCH_OK) {
            tch_context_destroy(*context);
        }
    }
    return status;
}

static py_context *make_context(tch_device device, void *stream)
{
    py_context *made = calloc(1, sizeof *made);
    tch_status status = TCH_OK;
    if (made == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    made->device = device;
    made->stream = stream;
    made->busy = true;
    PY_UNLOCKED(status, create_context(device, stream, &made->context));
    if (status != TCH_OK) {
        py_fail(status);
        free(made);
        return NULL;
    }
    made->next = contexts;
    contexts = made;
    return made;
}

/* The library orders the new stream after the context's work on the old one. */
static py_context *move_context(py_context *c, void *stream)
{
    tch_status status = TCH_OK;
    c->busy = true;
    PY_UNLOCKED(status, tch_context_set_stream(c->context, stream));
    if (status != TCH_OK) {
        c->busy = false;
        py_fail(status);
        return NULL;
    }
    c->stream = stream;
    return c;
}

/* --- borrowing --------------------------------------------------------------------------------------------------- */

static py_context *choose_context(tch_device device, void *stream, bool capturing)
{
    py_context *found = capturing ? most_recent(device, stream) : idle_on_stream(device, stream);
    if (found == NULL && streams_on(device) >= MOST_STREAMS && device.type == TCH_DEVICE_CUDA) {
        found = least_recent(device);
    }
    if (found == NULL) {
        return make_context(device, stream);
    }
    return found->stream == stream ? found : move_context(found, stream);
}

py_context *py_context_borrow(tch_device device, void *stream, bool capturing)
{
    py_context *c = choose_context(device, stream, capturing);
    if (c != NULL) {
        c->busy = true;
        c->captured = c->captured || capturing;
        c->used = ++loans;
    }
    return c;
}

void py_context_return(py_context *place)
{
    place->busy = false;
}

/* The list may grow while the GIL is released, at its head only. */
int py_contexts_visit(tch_device device, tch_status (*visit)(tch_context *context, void *user), void *user)
{
    for (py_context *c = contexts; c != NULL; c = c->next) {
        tch_status status = TCH_OK;
        if (!is_idle_on(c, device)) {
            continue;
        }
        c->busy = true;
        PY_UNLOCKED(status, visit(c->context, user));
        c->busy = false;
        if (status != TCH_OK) {
            py_fail(status);
            return -1;
        }
    }
    return 0;
}

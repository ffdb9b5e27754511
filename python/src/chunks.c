/* See chunks.h. */
#include "chunks.h"

#include <string.h>

#include "arguments.h"
#include "errors.h"
#include "memory.h"

#define STATE_ALIGNMENT 256

/* (owner, address): memory at the address that lives as long as the owner. */
static int take_memory(PyObject *pair, PyObject **owner, char **address)
{
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        return py_wrong_type(pair, "allocate must return (owner, address)");
    }
    *address = PyLong_AsVoidPtr(PyTuple_GetItem(pair, 1));
    if (*address == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_MemoryError, "allocate returned the address 0");
        }
        return -1;
    }
    *owner = Py_NewRef(PyTuple_GetItem(pair, 0));
    return 0;
}

static int add_chunk(py_chunks *chunks, int64_t bytes, void **pointer)
{
    py_chunk *list = PyMem_Realloc(chunks->list, (size_t)(chunks->count + 1) * sizeof *list);
    if (list == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    chunks->list = list;
    PyObject *pair = PyObject_CallFunction(chunks->allocate, "L", (long long)(bytes + STATE_ALIGNMENT));
    PyObject *owner = NULL;
    char *address = NULL;
    int failed = pair == NULL || take_memory(pair, &owner, &address) < 0;
    Py_XDECREF(pair);
    if (failed) {
        return -1;
    }
    address += (STATE_ALIGNMENT - (uintptr_t)address % STATE_ALIGNMENT) % STATE_ALIGNMENT;
    chunks->list[chunks->count++] = (py_chunk){address, bytes, owner};
    *pointer = address;
    return 0;
}

static tch_status allocate_chunk(void *user, int64_t bytes, void **pointer)
{
    py_chunks *chunks = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    int failed = add_chunk(chunks, bytes, pointer);
    if (failed) {
        PyErr_Fetch(&chunks->error_type, &chunks->error_value, &chunks->error_trace);
    }
    PyGILState_Release(gil);
    return failed ? TCH_ERR_OUT_OF_MEMORY : TCH_OK;
}

static void release_chunk(void *user, void *pointer, int64_t bytes)
{
    py_chunks *chunks = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    (void)bytes;
    for (int32_t i = 0; i < chunks->count; i++) {
        if (chunks->list[i].pointer == (char *)pointer) {
            PyObject *owner = chunks->list[i].owner;
            chunks->list[i] = chunks->list[--chunks->count];
            Py_DECREF(owner);
            break;
        }
    }
    PyGILState_Release(gil);
}

tch_state_allocator py_chunks_allocator(py_chunks *chunks)
{
    return (tch_state_allocator){sizeof(tch_state_allocator), allocate_chunk, release_chunk, chunks};
}

int py_chunks_fail(py_chunks *chunks, tch_status status)
{
    if (chunks->error_type != NULL) {
        PyErr_Restore(chunks->error_type, chunks->error_value, chunks->error_trace);
        chunks->error_type = chunks->error_value = chunks->error_trace = NULL;
    } else {
        py_fail(status);
    }
    return -1;
}

/* Who keeps this memory alive: the caller's own object, or `other` where the memory is the library's. Borrowed. */
static PyObject *owner_of(const py_chunks *chunks, const char *data, PyObject *other)
{
    for (int32_t i = 0; i < chunks->count; i++) {
        const py_chunk *chunk = &chunks->list[i];
        if (data >= chunk->pointer && data < chunk->pointer + chunk->bytes) {
            return chunk->owner;
        }
    }
    return other;
}

PyObject *py_chunks_describe(const py_chunks *chunks, const tch_optim_state *state, PyObject *other, void *stream)
{
    PyObject *memory = py_memory_wrap(state->tensor, owner_of(chunks, state->tensor->data, other), stream);
    return memory == NULL ? NULL : Py_BuildValue("(siN)", strrchr(state->name, '/') + 1, (int)state->parameter, memory);
}

int py_chunks_traverse(const py_chunks *chunks, visitproc visit, void *arg)
{
    Py_VISIT(chunks->allocate);
    for (int32_t i = 0; i < chunks->count; i++) {
        Py_VISIT(chunks->list[i].owner);
    }
    return 0;
}

void py_chunks_clear(py_chunks *chunks)
{
    Py_CLEAR(chunks->allocate);
    while (chunks->count > 0) {
        Py_DECREF(chunks->list[--chunks->count].owner);
    }
    PyMem_Free(chunks->list);
    chunks->list = NULL;
}

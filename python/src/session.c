/* The library calls `allocate` and the range hooks without the GIL, which is acquired here. */
#include "session.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "arguments.h"
#include "contexts.h"
#include "module.h"

enum { STATE_ALIGNMENT = 256 };

/* --- a session's context ----------------------------------------------------------------------------------------- */

int py_runner_open(py_runner *on, PyObject *device)
{
    char text[32];
    if (py_take_device(device, "device", &on->device) < 0) {
        return -1;
    }
    on->process = (long)getpid();
    tch_status status = tch_context_create(py_device_text(on->device, text, sizeof text), &on->context);
    return status == TCH_OK ? 0 : (py_fail(status), -1);
}

int py_runner_enter(py_runner *on)
{
    const char *why = on->name == NULL ? "was never made: its __init__ did not succeed"
                      : on->process != (long)getpid()
                          ? "belongs to the process that this one was forked from; make a new one here"
                      : on->busy ? "is in use by another call, perhaps in another thread"
                                 : NULL;
    if (why != NULL) {
        PyErr_Format(PyExc_RuntimeError, "this %s %s", on->name != NULL ? on->name : "object", why);
        return -1;
    }
    on->busy = true;
    return 0;
}

void py_runner_leave(py_runner *on)
{
    on->busy = false;
}

PyObject *py_runner_done(py_runner *on, tch_status status)
{
    on->busy = false;
    return status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
}

int py_runner_follow(py_runner *on, void *stream)
{
    if (on->device.type != TCH_DEVICE_CUDA || (on->has_stream && stream == on->stream)) {
        return 0;
    }
    tch_status status = tch_context_set_stream(on->context, stream);
    if (status != TCH_OK) {
        py_fail(status);
        return -1;
    }
    on->has_stream = true;
    on->stream = stream;
    return 0;
}

int py_runner_take(py_runner *on, const py_operands *o, int count, PyObject *given, py_stream *stream)
{
    if (py_arrays_take(o->arrays, o->tensors, o->operands, count, given, stream) < 0) {
        return -1;
    }
    if (on->device.type == TCH_DEVICE_CPU) {
        py_arrays_device(o->tensors, count); /* page-locked memory counts as the CPU's */
    }
    if (py_runner_follow(on, stream->handle) < 0) {
        py_arrays_release(o->arrays, o->tensors, count);
        return -1;
    }
    return 0;
}

/* --- caller-owned memory ----------------------------------------------------------------------------------------- */

/* (owner, address): memory at the address, valid as long as the owner. */
static int take_memory(PyObject *pair, PyObject **owner, char **address)
{
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        return py_refuse_type(pair, "what allocate returns", "(owner, address)");
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

static int add_chunk(py_session *self, int64_t bytes, void **pointer)
{
    py_chunk *chunks = PyMem_Realloc(self->chunks, (size_t)(self->chunk_count + 1) * sizeof *chunks);
    if (chunks == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->chunks = chunks;
    PyObject *pair = PyObject_CallFunction(self->allocate, "L", (long long)(bytes + STATE_ALIGNMENT));
    PyObject *owner = NULL;
    char *address = NULL;
    int failed = pair == NULL || take_memory(pair, &owner, &address) < 0;
    Py_XDECREF(pair);
    if (failed) {
        return -1;
    }
    address += (STATE_ALIGNMENT - (uintptr_t)address % STATE_ALIGNMENT) % STATE_ALIGNMENT;
    self->chunks[self->chunk_count++] = (py_chunk){address, bytes, owner};
    *pointer = address;
    return 0;
}

static tch_status allocate_chunk(void *user, int64_t bytes, void **pointer)
{
    py_session *self = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    int failed = add_chunk(self, bytes, pointer);
    if (failed) {
        PyErr_Fetch(&self->error[0], &self->error[1], &self->error[2]);
    }
    PyGILState_Release(gil);
    return failed ? TCH_ERR_OUT_OF_MEMORY : TCH_OK;
}

static void release_chunk(void *user, void *pointer, int64_t bytes)
{
    py_session *self = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    (void)bytes;
    for (int32_t i = 0; i < self->chunk_count; i++) {
        if (self->chunks[i].pointer == (char *)pointer) {
            PyObject *owner = self->chunks[i].owner;
            self->chunks[i] = self->chunks[--self->chunk_count];
            Py_DECREF(owner);
            break;
        }
    }
    PyGILState_Release(gil);
}

tch_optim_setup py_session_setup(py_session *self, const tch_placement *placements, tch_state_allocator *allocator)
{
    *allocator = (tch_state_allocator){sizeof *allocator, allocate_chunk, release_chunk, self};
    return (tch_optim_setup){sizeof(tch_optim_setup), .comm = self->comm, .placements = placements,
                             .allocator = self->allocate != Py_None ? allocator : NULL};
}

int py_session_fail(py_session *self, tch_status status)
{
    if (self->error[0] != NULL) {
        PyErr_Restore(self->error[0], self->error[1], self->error[2]);
        self->error[0] = self->error[1] = self->error[2] = NULL;
    } else {
        py_fail(status);
    }
    return -1;
}

/* --- the state --------------------------------------------------------------------------------------------------- */

/* The owner of this memory: the caller's object, or the session if the memory is the library's. Borrowed. */
static PyObject *owner_of(const py_session *self, const char *data)
{
    for (int32_t i = 0; i < self->chunk_count; i++) {
        const py_chunk *chunk = &self->chunks[i];
        if (data >= chunk->pointer && data < chunk->pointer + chunk->bytes) {
            return chunk->owner;
        }
    }
    return (PyObject *)self;
}

/* (name, parameter or layer, memory); a name may contain slashes before the last. */
static PyObject *describe_state(const py_session *self, int32_t index)
{
    tch_optim_state state = TCH_OPTIM_STATE_INIT;
    tch_status status = self->kfac != NULL ? tch_kfac_get_state(self->kfac, index, &state)
                                           : tch_optimizer_get_state(self->optimizer, index, &state);
    if (status != TCH_OK) {
        return py_fail(status);
    }
    PyObject *memory = py_memory_wrap(state.tensor, owner_of(self, state.tensor->data), self->on.stream);
    return memory == NULL ? NULL : Py_BuildValue("(siN)", strrchr(state.name, '/') + 1, (int)state.parameter, memory);
}

PyObject *py_session_states(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    int32_t total = self->kfac != NULL ? tch_kfac_state_count(self->kfac) : tch_optimizer_state_count(self->optimizer);
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list != NULL && i < total; i++) {
        py_append(&list, describe_state(self, i));
    }
    py_runner_leave(&self->on);
    return list;
}

PyObject *py_session_get_counts(PY_ARGUMENTS)
{
    PY_TAKE("get_counts", 1, "number");
    py_session *self = (py_session *)object;
    int64_t number;
    if (py_take_int(v[0], "number", 0, INT32_MAX, &number) < 0 || py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    int32_t at = (int32_t)number;
    int64_t length = self->kfac != NULL ? TCH_KFAC_COUNTS : tch_optimizer_counts_length(self->optimizer, at);
    int64_t *counts = PyMem_Calloc((size_t)length + 1, sizeof *counts);
    PyObject *list = NULL;
    if (counts == NULL) {
        PyErr_NoMemory();
    } else {
        tch_status status = self->kfac != NULL ? tch_kfac_get_counts(self->kfac, at, counts)
                                               : tch_optimizer_get_counts(self->optimizer, at, length, counts);
        list = status == TCH_OK ? py_list_numbers(counts, length) : py_fail(status);
    }
    PyMem_Free(counts);
    py_runner_leave(&self->on);
    return list;
}

/* As many counts as the library has for a layer or parameter. */
static PyObject *put_counts(py_session *self, int32_t at, PyObject *tuple)
{
    int length = self->kfac != NULL ? TCH_KFAC_COUNTS : (int)PyTuple_Size(tuple);
    int64_t *counts = PyMem_Calloc((size_t)length + 1, sizeof *counts);
    PyObject *result = NULL;
    if (counts == NULL) {
        PyErr_NoMemory();
    } else if (py_take_sizes(tuple, "counts", INT64_MIN, INT64_MAX, length, length, counts) == length) {
        tch_status status = self->kfac != NULL ? tch_kfac_set_counts(self->kfac, at, counts)
                                               : tch_optimizer_set_counts(self->optimizer, at, length, counts);
        result = status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
    }
    PyMem_Free(counts);
    return result;
}

PyObject *py_session_set_counts(PY_ARGUMENTS)
{
    PY_TAKE("set_counts", 2, "number", "counts");
    py_session *self = (py_session *)object;
    int64_t number;
    if (py_take_int(v[0], "number", 0, INT32_MAX, &number) < 0) {
        return NULL;
    }
    PyObject *counts = PySequence_Tuple(v[1]); /* reading the items could change a list */
    if (counts == NULL || py_runner_enter(&self->on) < 0) {
        Py_XDECREF(counts);
        return NULL;
    }
    PyObject *result = put_counts(self, (int32_t)number, counts);
    Py_DECREF(counts);
    py_runner_leave(&self->on);
    return result;
}

/* --- construction and destruction -------------------------------------------------------------------------------- */

int py_session_open(py_session *self, PyObject *device, PyObject *allocate, PyObject *group)
{
    if (self->allocate != NULL || (allocate != Py_None && !PyCallable_Check(allocate))) {
        PyErr_SetString(PyExc_TypeError,
                        self->allocate != NULL ? "an object is made once" : "allocate must be callable, or None");
        return -1;
    }
    if (py_runner_open(&self->on, device) < 0) {
        return -1;
    }
    self->allocate = Py_NewRef(allocate);
    self->lr_tensors = PyDict_New();
    return self->lr_tensors == NULL || (group != Py_None && py_comm_open(group, self) < 0) ? -1 : 0;
}

static int traverse_session(PyObject *object, visitproc visit, void *arg)
{
    py_session *self = (py_session *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->allocate);
    Py_VISIT(self->collective);
    Py_VISIT(self->push);
    Py_VISIT(self->pop);
    Py_VISIT(self->lr_tensors);
    for (int i = 0; i < 3; i++) {
        Py_VISIT(self->error[i]);
    }
    for (int32_t i = 0; i < self->chunk_count; i++) {
        Py_VISIT(self->chunks[i].owner);
    }
    return 0;
}

/* First the library's object, which synchronizes and then releases the state by release_chunk. Profilers are not
 * called: the interpreter may be shutting down. */
static int clear_session(PyObject *object)
{
    py_session *self = (py_session *)object;
    if (self->on.busy) {
        return 0;
    }
    if (self->on.process == (long)getpid() && self->on.context != NULL) {
        tch_context_set_range_hook(self->on.context, NULL, NULL, NULL);
        tch_optimizer_destroy(self->optimizer);
        tch_kfac_destroy(self->kfac);
        tch_context_destroy(self->on.context);
    }
    tch_comm_destroy(self->comm);
    self->optimizer = NULL;
    self->kfac = NULL;
    self->comm = NULL;
    self->on = (py_runner){0};
    Py_CLEAR(self->allocate);
    Py_CLEAR(self->collective);
    Py_CLEAR(self->push);
    Py_CLEAR(self->pop);
    Py_CLEAR(self->lr_tensors);
    for (int i = 0; i < 3; i++) {
        Py_CLEAR(self->error[i]);
    }
    while (self->chunk_count > 0) {
        Py_DECREF(self->chunks[--self->chunk_count].owner);
    }
    return 0;
}

static void deallocate_session(PyObject *object)
{
    py_session *self = (py_session *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *kind, *value, *trace;
    PyObject_GC_UnTrack(object);
    PyErr_Fetch(&kind, &value, &trace);
    self->on.busy = false;
    clear_session(object);
    PyErr_Restore(kind, value, trace);
    while (self->room > 0) {
        PyMem_Free(self->places[--self->room]);
    }
    PyMem_Free((void *)self->places);
    PyMem_Free(self->labels);
    PyMem_Free(self->chunks);
    py_operands_free(&self->step);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

int py_session_register(PyObject *module, const char *name, const char *text, initproc initialize, PyMethodDef *methods,
                        PyMethodDef *functions)
{
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)(uintptr_t)text},
        {Py_tp_init, PY_SLOT(initialize)},
        {Py_tp_traverse, PY_SLOT(traverse_session)},
        {Py_tp_clear, PY_SLOT(clear_session)},
        {Py_tp_dealloc, PY_SLOT(deallocate_session)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    PyType_Spec spec = {name, sizeof(py_session), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    return py_add_type(module, &spec, NULL) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}

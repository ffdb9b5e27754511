/* The type torchium._C.Optimizer: its making and end, where the memory of the state comes from, and the hook for
 * profilers. What runs inside the library without the GIL and calls Python back is `push` and `pop`, and the memory's
 * functions of chunks.c: each takes the GIL for itself. */
#include "optimizer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "arguments.h"
#include "contexts.h"
#include "errors.h"
#include "module.h"
#include "optim_config.h"

int py_optimizer_enter(py_optimizer *self)
{
    return py_runner_enter(&self->on, "optimizer", self->on.context != NULL);
}

/* --- names for a profiler ---------------------------------------------------------------------------------------- */

/* A step goes on whatever a profiler's function does. */
static void call_quietly(PyObject *function, const char *name)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result =
        name != NULL ? PyObject_CallFunction(function, "s", name) : PyObject_CallFunction(function, NULL);
    if (result == NULL) {
        PyErr_WriteUnraisable(function);
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
}

static void push_range(void *user, const char *name)
{
    call_quietly(((py_optimizer *)user)->push, name);
}

static void pop_range(void *user)
{
    call_quietly(((py_optimizer *)user)->pop, NULL);
}

static void replace_object(PyObject **place, PyObject *value)
{
    PyObject *before = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(before);
}

static PyObject *set_range_hook(PY_ARGUMENTS)
{
    PY_TAKE("set_range_hook", 2, "push", "pop");
    py_optimizer *self = (py_optimizer *)object;
    bool none = v[0] == Py_None && v[1] == Py_None;
    if (!none && !(PyCallable_Check(v[0]) && PyCallable_Check(v[1]))) {
        PyErr_SetString(PyExc_TypeError, "push and pop must both be callable, or both None");
        return NULL;
    }
    if (py_optimizer_enter(self) < 0) {
        return NULL;
    }
    replace_object(&self->push, v[0]);
    replace_object(&self->pop, v[1]);
    return py_runner_done(&self->on, tch_context_set_range_hook(self->on.context, none ? NULL : push_range,
                                                                none ? NULL : pop_range, self));
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static int initialize_optimizer(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "allocate", "group", NULL};
    py_optimizer *self = (py_optimizer *)object;
    PyObject *device;
    PyObject *memory = Py_None;
    PyObject *group = Py_None;
    char text[32];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|OO:Optimizer", names, &device, &memory, &group) ||
        py_take_device(device, "device", &self->on.device) < 0) {
        return -1;
    }
    if (self->on.context != NULL || (memory != Py_None && !PyCallable_Check(memory))) {
        PyErr_SetString(PyExc_TypeError,
                        self->on.context != NULL ? "an optimizer is made once" : "allocate must be callable, or None");
        return -1;
    }
    self->lr_tensors = PyDict_New();
    if (self->lr_tensors == NULL) {
        return -1;
    }
    replace_object(&self->memory.allocate, memory);
    self->on.process = (long)getpid();
    if (group != Py_None && py_comm_open(group, &self->group) < 0) {
        return -1;
    }
    tch_status status = tch_context_create(py_device_text(self->on.device, text, sizeof text), &self->on.context);
    return status == TCH_OK ? 0 : py_chunks_fail(&self->memory, status);
}

static int traverse_optimizer(PyObject *object, visitproc visit, void *arg)
{
    py_optimizer *self = (py_optimizer *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->push);
    Py_VISIT(self->pop);
    Py_VISIT(self->lr_tensors);
    int stop = py_comm_traverse(&self->group, visit, arg);
    return stop != 0 ? stop : py_chunks_traverse(&self->memory, visit, arg);
}

/* The library first: it waits for the device and then gives the state's memory back, through `release`. A profiler is
 * not told of it: the interpreter may be at its end. */
static void close_library(py_optimizer *self)
{
    if (self->on.process == (long)getpid() && self->on.context != NULL) {
        tch_context_set_range_hook(self->on.context, NULL, NULL, NULL);
        tch_optimizer_destroy(self->optimizer);
        tch_context_destroy(self->on.context);
    }
    self->optimizer = NULL;
    self->on.context = NULL;
}

static int clear_optimizer(PyObject *object)
{
    py_optimizer *self = (py_optimizer *)object;
    if (self->on.busy) {
        return 0;
    }
    close_library(self);
    Py_CLEAR(self->push);
    Py_CLEAR(self->pop);
    Py_CLEAR(self->lr_tensors);
    py_comm_clear(&self->group);
    py_chunks_clear(&self->memory);
    return 0;
}

static void deallocate_optimizer(PyObject *object)
{
    py_optimizer *self = (py_optimizer *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *kind, *value, *trace;
    PyObject_GC_UnTrack(object);
    PyErr_Fetch(&kind, &value, &trace);
    self->on.busy = false;
    clear_optimizer(object);
    PyErr_Restore(kind, value, trace);
    for (int32_t i = 0; i < self->count; i++) {
        PyMem_Free(self->places[i]);
    }
    PyMem_Free((void *)self->places);
    py_operands_free(&self->step);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    PY_METHOD("add_group", py_optimizer_add_group, "Parameters with one configuration; returns the group's number."),
    PY_METHOD("set_config", py_optimizer_set_config, "Changes the numbers of a group."),
    PY_METHOD("set_lr", py_optimizer_set_lr, "Changes the learning rate of a group."),
    PY_METHOD("set_lr_tensor", py_optimizer_set_lr_tensor, "A learning rate that lives on the device, or None."),
    PY_METHOD("step", py_optimizer_step, "One step with the gradients given, or with those that the parameters have."),
    PY_METHOD("states", py_optimizer_states, "(name, parameter, memory) of every tensor of the state."),
    PY_METHOD("get_counts", py_optimizer_get_counts, "What the host counts for a parameter."),
    PY_METHOD("set_counts", py_optimizer_set_counts, "Puts the counts of a parameter back, after its tensors."),
    PY_METHOD("tiles", py_optimizer_tiles, "What the ranks of a group divide."),
    PY_METHOD("memory", py_optimizer_memory, "Bytes of state, scratch and refreshes."),
    PY_METHOD("stats", py_optimizer_stats, "Steps, skipped steps, refreshes. Waits for the device."),
    PY_METHOD("set_range_hook", set_range_hook, "Functions that are told of a step's phases, or None and None."),
    {NULL, NULL, 0, NULL}};

int py_optimizer_register(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_doc, "One tch_optimizer: all parameters of one device."},
        {Py_tp_init, PY_SLOT(initialize_optimizer)},
        {Py_tp_traverse, PY_SLOT(traverse_optimizer)},
        {Py_tp_clear, PY_SLOT(clear_optimizer)},
        {Py_tp_dealloc, PY_SLOT(deallocate_optimizer)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Optimizer", sizeof(py_optimizer), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    static PyMethodDef functions[] = {
        PY_METHOD("same_items", py_same_items, "Whether two lists hold the same objects."),
        PY_METHOD("optim_forecast", py_optim_forecast, "What an optimizer would take, before anything is allocated."),
        {NULL, NULL, 0, NULL}};
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Optimizer", type) < 0 ||
                 PyModule_AddFunctions(module, functions) < 0 || py_optim_config_register(module) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

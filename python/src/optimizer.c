/* The type torchium._C.Optimizer: parameter groups, profiler hooks, queries, and forecasts. Steps are in
 * optimizer_step.c. */
#include "optimizer.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"
#include "contexts.h"
#include "module.h"
#include "optim_config.h"

/* --- parameters -------------------------------------------------------------------------------------------------- */

void py_place_set(py_place *place, const tch_tensor *tensor)
{
    size_t bytes = (size_t)tensor->ndim * sizeof(int64_t);
    place->tensor = *tensor;
    place->tensor.shape = place->shape;
    memcpy(place->shape, tensor->shape, bytes);
    if (tensor->strides != NULL) {
        memcpy(place->strides, tensor->strides, bytes);
        place->tensor.strides = place->strides;
    }
}

/* Allocates before the library adds a group: empty parameters, and room for the arrays of a step. */
static int prepare_places(py_session *self, const tch_parameter *entries, int32_t count)
{
    int32_t total = self->count + count;
    py_operands step;
    py_place **places =
        PyMem_Realloc(self->places, ((size_t)(total > self->room ? total : self->room) + 1) * sizeof(py_place *));
    if (places == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    self->places = places;
    for (; self->room < total; self->room++) {
        if ((places[self->room] = PyMem_Malloc(sizeof **places)) == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    if (py_operands_make(&step, 2 * (size_t)total + 2) < 0) {
        return -1;
    }
    py_operands_free(&self->step);
    self->step = step;
    for (int32_t i = 0; i < count; i++) {
        py_place *place = places[self->count + i];
        place->gradient = NULL;
        snprintf(place->label, sizeof place->label, "parameter '%s'", entries[i].name);
        snprintf(place->gradient_label, sizeof place->gradient_label, "the gradient of '%s'", entries[i].name);
    }
    return 0;
}

/* --- a new group ------------------------------------------------------------------------------------------------- */

static int make_group(py_session *self, const tch_optim_config *config, int32_t count, const tch_parameter *entries,
                      const tch_placement *placements, int32_t *group)
{
    tch_state_allocator allocator;
    tch_optim_setup setup = py_session_setup(self, placements, &allocator);
    tch_status status;
    *group = 0;
    if (prepare_places(self, entries, count) < 0) {
        return -1;
    }
    PY_UNLOCKED(status, self->optimizer != NULL
                            ? tch_optimizer_add_group(self->optimizer, config, count, entries, placements, group)
                            : tch_optimizer_create(self->on.context, config, &setup, count, entries, &self->optimizer));
    if (status != TCH_OK) {
        return py_session_fail(self, status);
    }
    for (int32_t i = 0; i < count; i++) {
        py_place_set(self->places[self->count++], entries[i].tensor);
    }
    return 0;
}

/* Elementwise or not, or (elementwise, batch_dims, cuts); cuts are part of the object. */
static int take_role(PyObject *item, tch_parameter *parameter)
{
    bool elementwise;
    PyObject *cuts;
    Py_ssize_t bytes = 0;
    if (!PyTuple_Check(item)) {
        int failed = py_take_bool(item, "a role", &elementwise);
        parameter->use_adamw = failed == 0 && elementwise;
        return failed;
    }
    char *data = NULL;
    if (!PyArg_ParseTuple(item, "piO", &parameter->use_adamw, &parameter->batch_dims, &cuts) ||
        PyBytes_AsStringAndSize(cuts, &data, &bytes) < 0 || bytes % (Py_ssize_t)sizeof(int64_t) != 0 ||
        bytes / (Py_ssize_t)sizeof(int64_t) > INT32_MAX) {
        PyErr_Clear();
        return py_refuse_type(item, "a role", "a bool or (elementwise, batch_dims, cuts)");
    }
    parameter->cut_count = (int32_t)(bytes / (Py_ssize_t)sizeof(int64_t));
    parameter->cuts = (const int64_t *)(const void *)data;
    return 0;
}

/* Adds the parameters of three tuples: arrays, names and roles. */
static int add_parameters(py_session *self, const tch_optim_config *config, PyObject *const *tuples, PyObject *given,
                          const tch_placement *placements, int32_t *group)
{
    int32_t count = (int32_t)PyTuple_Size(tuples[0]);
    py_operands o;
    py_stream stream;
    if (py_operands_make(&o, (size_t)count) < 0) {
        return -1;
    }
    tch_parameter *entries = PyMem_Calloc((size_t)count + 1, sizeof *entries);
    int failed = entries == NULL;
    if (failed) {
        PyErr_NoMemory();
    }
    for (int32_t i = 0; i < count && !failed; i++) {
        failed = py_take_string(PyTuple_GetItem(tuples[1], i), "a parameter's name", &entries[i].name) < 0 ||
                 take_role(PyTuple_GetItem(tuples[2], i), &entries[i]) < 0;
        o.operands[i] = (py_operand){PyTuple_GetItem(tuples[0], i), entries[i].name, PY_WRITTEN | PY_WHOLE};
    }
    failed = failed || py_runner_take(&self->on, &o, count, given, &stream) < 0;
    if (!failed) {
        for (int32_t i = 0; i < count; i++) {
            entries[i].tensor = o.tensors[i];
        }
        failed = make_group(self, config, count, entries, placements, group) < 0;
        py_arrays_release(o.arrays, o.tensors, count);
    }
    PyMem_Free(entries);
    py_operands_free(&o);
    return failed ? -1 : 0;
}

/* The three lists as new tuples. */
static int take_lists(PyObject *const *lists, PyObject **tuples)
{
    static const char *const names[] = {"parameters", "names", "roles"};
    for (int i = 0; i < 3; i++) {
        if ((tuples[i] = py_take_list(lists[i], names[i])) == NULL) {
            return -1;
        }
        if (PyTuple_Size(tuples[i]) != PyTuple_Size(tuples[0])) {
            PyErr_Format(PyExc_TypeError, "%s must be as long as parameters", names[i]);
            return -1;
        }
    }
    return 0;
}

static PyObject *add_group(PY_ARGUMENTS)
{
    PY_TAKE("add_group", 4, "config", "parameters", "names", "roles", "stream", "placements");
    py_session *self = (py_session *)object;
    PyObject *tuples[3] = {NULL};
    tch_optim_config config;
    if (py_optim_config(v[0], &config) < 0 || py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    int32_t group = 0;
    tch_placement *placements = NULL;
    bool placed = v[5] != NULL && v[5] != Py_None;
    int failed = take_lists(v + 1, tuples) < 0 ||
                 (placed && (placements = py_placements(v[5], PyTuple_Size(tuples[0]))) == NULL) ||
                 add_parameters(self, &config, tuples, v[4], placements, &group) < 0;
    PyMem_Free(placements);
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(tuples[i]);
    }
    py_runner_leave(&self->on);
    return failed ? NULL : PyLong_FromLong(group);
}

static PyObject *set_config(PY_ARGUMENTS)
{
    PY_TAKE("set_config", 2, "group", "config");
    py_session *self = (py_session *)object;
    int64_t group;
    tch_optim_config config;
    if (py_take_int(v[0], "group", 0, INT32_MAX, &group) < 0 || py_optim_config(v[1], &config) < 0 ||
        py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    return py_runner_done(&self->on, tch_optimizer_set_config(self->optimizer, (int32_t)group, &config));
}

static PyObject *set_lr(PY_ARGUMENTS)
{
    PY_TAKE("set_lr", 2, "group", "lr");
    py_session *self = (py_session *)object;
    int64_t group;
    double lr;
    if (py_take_int(v[0], "group", 0, INT32_MAX, &group) < 0 || py_take_double(v[1], "lr", &lr) < 0 ||
        py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    return py_runner_done(&self->on, tch_optimizer_set_lr(self->optimizer, (int32_t)group, lr));
}

/* TCH_ERR_INTERNAL with a Python exception set. */
static tch_status use_lr_tensor(py_session *self, PyObject *group, int32_t index, PyObject *lr)
{
    const py_operand operand = {lr, "lr", false};
    py_array array;
    tch_tensor *tensor;
    py_stream stream;
    if (py_arrays_take(&array, &tensor, &operand, 1, NULL, &stream) < 0) {
        return TCH_ERR_INTERNAL;
    }
    tch_status status = tch_optimizer_set_lr_tensor(self->optimizer, index, tensor);
    py_arrays_release(&array, &tensor, 1);
    if (status == TCH_OK && PyDict_SetItem(self->lr_tensors, group, lr) < 0) {
        tch_optimizer_set_lr_tensor(self->optimizer, index, NULL);
        return TCH_ERR_INTERNAL;
    }
    return status;
}

static PyObject *set_lr_tensor(PY_ARGUMENTS)
{
    PY_TAKE("set_lr_tensor", 2, "group", "lr");
    py_session *self = (py_session *)object;
    int64_t group;
    if (py_take_int(v[0], "group", 0, INT32_MAX, &group) < 0 || py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    tch_status status = use_lr_tensor(self, v[0], (int32_t)group, v[1]);
    if (PyErr_Occurred()) {
        py_runner_leave(&self->on);
        return NULL;
    }
    return py_runner_done(&self->on, status);
}

/* --- profiler ranges --------------------------------------------------------------------------------------------- */

/* Exceptions of a profiler's function do not stop a step. */
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
    call_quietly(((py_session *)user)->push, name);
}

static void pop_range(void *user)
{
    call_quietly(((py_session *)user)->pop, NULL);
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
    py_session *self = (py_session *)object;
    bool none = v[0] == Py_None && v[1] == Py_None;
    if (!none && !(PyCallable_Check(v[0]) && PyCallable_Check(v[1]))) {
        PyErr_SetString(PyExc_TypeError, "push and pop must both be callable, or both None");
        return NULL;
    }
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    replace_object(&self->push, v[0]);
    replace_object(&self->pop, v[1]);
    return py_runner_done(&self->on, tch_context_set_range_hook(self->on.context, none ? NULL : push_range,
                                                                none ? NULL : pop_range, self));
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

static PyObject *tuple_of(const int64_t *numbers, int32_t count)
{
    PyObject *list = py_list_numbers(numbers, count);
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

static PyObject *optimizer_tiles(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < tch_optimizer_tile_count(self->optimizer); i++) {
        tch_optim_tile t = TCH_OPTIM_TILE_INIT;
        tch_optimizer_get_tile(self->optimizer, i, &t);
        py_append(&list,
                  Py_BuildValue("(iiiiNNN)", (int)t.parameter, (int)t.number, (int)t.owner, (int)t.factors,
                                tuple_of(t.dims, t.order), tuple_of(t.start, t.order), tuple_of(t.size, t.order)));
    }
    py_runner_leave(&self->on);
    return list;
}

/* --- memory and statistics --------------------------------------------------------------------------------------- */

static PyObject *describe_memory(const tch_optim_memory *m)
{
    return Py_BuildValue("{sLsLsLsLsLsL}", "state", (long long)m->state, "scratch", (long long)m->scratch, "refresh",
                         (long long)m->refresh, "blocks", (long long)m->blocks, "factors", (long long)m->factors,
                         "recorded", (long long)m->recorded);
}

static PyObject *optimizer_memory(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    tch_status status = tch_optimizer_get_memory(self->optimizer, &memory);
    PyObject *result = status == TCH_OK ? describe_memory(&memory) : py_fail(status);
    py_runner_leave(&self->on);
    return result;
}

static PyObject *optimizer_stats(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    tch_optim_stats s = TCH_OPTIM_STATS_INIT;
    tch_status status;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, tch_optimizer_get_stats(self->optimizer, &s));
    PyObject *result =
        status != TCH_OK
            ? py_fail(status)
            : Py_BuildValue("{sdsdsdsdsdsdsdsdsdsd}", "steps", (double)s.steps, "skipped", (double)s.skipped,
                            "refreshes", (double)s.refreshes, "failed", (double)s.failed, "worst_residual",
                            s.worst_residual, "refreshed_factors", (double)s.refreshed_factors, "interval_mean",
                            s.interval_mean, "interval_max", s.interval_max, "staleness_mean", s.staleness_mean,
                            "staleness_max", s.staleness_max);
    py_runner_leave(&self->on);
    return result;
}

/* --- forecast ---------------------------------------------------------------------------------------------------- */

/* (shape, dtype, role) of a parameter, which need not exist. */
static int read_parameter(PyObject *item, py_place *place, tch_parameter *parameter)
{
    PyObject *shape;
    PyObject *dtype;
    PyObject *role;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OOO", &shape, &dtype, &role)) {
        PyErr_Clear();
        return py_refuse_type(item, "an entry of parameters", "(shape, dtype, role)");
    }
    *place = (py_place){.tensor = {.shape = place->shape}};
    *parameter = (tch_parameter){.tensor = &place->tensor};
    place->tensor.ndim = py_take_sizes(shape, "shape", INT64_MIN, INT64_MAX, 0, TCH_MAX_RANK, place->shape);
    return place->tensor.ndim < 0 || take_role(role, parameter) < 0 ||
                   py_take_dtype(dtype, "dtype", &place->tensor.dtype) < 0
               ? -1
               : 0;
}

static PyObject *forecast_memory(tch_device device, const tch_optim_config *config, const tch_optim_setup *setup,
                                 PyObject *list, py_place *places, tch_parameter *parameters)
{
    Py_ssize_t count = PyTuple_Size(list);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_parameter(PyTuple_GetItem(list, i), &places[i], &parameters[i]) < 0) {
            return NULL;
        }
        places[i].tensor.device = device;
    }
    py_context *place = py_context_borrow(device, NULL, false);
    if (place == NULL) {
        return NULL;
    }
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_status status = tch_optim_forecast_with(place->context, config, setup, (int32_t)count, parameters, &memory);
    PyObject *result = status == TCH_OK ? describe_memory(&memory) : py_fail(status);
    py_context_return(place);
    return result;
}

static PyObject *optim_forecast(PY_ARGUMENTS)
{
    PY_TAKE("optim_forecast", 3, "device", "config", "parameters", "group", "placements");
    tch_device device;
    tch_optim_config config;
    if (py_take_device(v[0], "device", &device) < 0 || py_optim_config(v[1], &config) < 0) {
        return NULL;
    }
    PyObject *list = py_take_list(v[2], "parameters");
    if (list == NULL) {
        return NULL;
    }
    size_t room = (size_t)PyTuple_Size(list) + 1;
    py_place *places = PyMem_Calloc(room, sizeof *places);
    tch_parameter *parameters = PyMem_Calloc(room, sizeof *parameters);
    tch_optim_setup setup = TCH_OPTIM_SETUP_INIT;
    tch_placement *placements = NULL;
    PyObject *result = NULL;
    if (places == NULL || parameters == NULL) {
        PyErr_NoMemory();
    } else if (v[3] == NULL || v[3] == Py_None) {
        result = forecast_memory(device, &config, &setup, list, places, parameters);
    } else if (py_comm_create(v[3], NULL, &setup.comm) == 0 &&
               (v[4] == NULL || v[4] == Py_None || (placements = py_placements(v[4], PyTuple_Size(list))) != NULL)) {
        setup.placements = placements;
        result = forecast_memory(device, &config, &setup, list, places, parameters);
    }
    tch_comm_destroy(setup.comm);
    PyMem_Free(placements);
    PyMem_Free(places);
    PyMem_Free(parameters);
    Py_DECREF(list);
    return result;
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static int initialize_optimizer(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "allocate", "group", NULL};
    py_session *self = (py_session *)object;
    PyObject *device;
    PyObject *allocate = Py_None;
    PyObject *group = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|OO:Optimizer", names, &device, &allocate, &group) ||
        py_session_open(self, device, allocate, group) < 0) {
        return -1;
    }
    self->on.name = "optimizer";
    return 0;
}

int py_optimizer_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        PY_METHOD("add_group", add_group, "Parameters with one configuration; returns the group's number."),
        PY_METHOD("set_config", set_config, "Changes the numbers of a group."),
        PY_METHOD("set_lr", set_lr, "Changes the learning rate of a group."),
        PY_METHOD("set_lr_tensor", set_lr_tensor, "A learning rate that lives on the device, or None."),
        PY_METHOD("step", py_optimizer_step,
                  "One step with the gradients given, or with those that the parameters have."),
        {"states", py_session_states, METH_NOARGS, "(name, parameter, memory) of every tensor of the state."},
        PY_METHOD("get_counts", py_session_get_counts, "What the host counts for a parameter."),
        PY_METHOD("set_counts", py_session_set_counts, "Puts the counts of a parameter back, after its tensors."),
        {"tiles", optimizer_tiles, METH_NOARGS, "What the ranks of a group divide."},
        {"memory", optimizer_memory, METH_NOARGS, "Bytes of state, scratch and refreshes."},
        {"stats", optimizer_stats, METH_NOARGS, "Steps, skipped steps, refreshes. Waits for the device."},
        PY_METHOD("set_range_hook", set_range_hook, "Functions that are told of a step's phases, or None and None."),
        {NULL, NULL, 0, NULL}};
    static PyMethodDef functions[] = {
        PY_METHOD("same_items", py_same_items, "Whether two lists hold the same objects."),
        PY_METHOD("optim_forecast", optim_forecast, "What an optimizer would take, before anything is allocated."),
        {NULL, NULL, 0, NULL}};
    return py_session_register(module, "torchium._C.Optimizer", "One tch_optimizer: all parameters of one device.",
                               initialize_optimizer, methods, functions);
}

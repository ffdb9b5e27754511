/* The type torchium._C.Optimizer: its making, the hook for profilers, what is asked of it, and the forecast of one. */
#include "optimizer.h"

#include "arguments.h"
#include "contexts.h"
#include "errors.h"
#include "module.h"
#include "optim_config.h"

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
                  Py_BuildValue("(iiiNNN)", (int)t.parameter, (int)t.number, (int)t.owner, tuple_of(t.dims, t.order),
                                tuple_of(t.start, t.order), tuple_of(t.size, t.order)));
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
    PyObject *result = status != TCH_OK ? py_fail(status)
                                        : Py_BuildValue("{sdsdsdsdsd}", "steps", (double)s.steps, "skipped",
                                                        (double)s.skipped, "refreshes", (double)s.refreshes, "failed",
                                                        (double)s.failed, "worst_residual", s.worst_residual);
    py_runner_leave(&self->on);
    return result;
}

/* --- forecast ---------------------------------------------------------------------------------------------------- */

/* (shape, dtype, role) of a parameter that need not exist. */
static int read_parameter(PyObject *item, py_place *place, tch_parameter *parameter)
{
    PyObject *shape;
    PyObject *dtype;
    PyObject *role;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "OOO", &shape, &dtype, &role)) {
        PyErr_Clear();
        return py_refuse_type(item, "an entry of parameters", "(shape, dtype, role)");
    }
    PyObject *sizes = PySequence_Tuple(shape);
    if (sizes == NULL) {
        PyErr_Clear();
        return py_refuse_type(shape, "shape", "a sequence of sizes");
    }
    Py_ssize_t ndim = PyTuple_Size(sizes);
    int failed = ndim > TCH_MAX_RANK;
    if (failed) {
        PyErr_Format(PyExc_ValueError, "shape must have at most %d sizes, got %zd", TCH_MAX_RANK, ndim);
    } else {
        *place = (py_place){.tensor = {.ndim = (int32_t)ndim, .shape = place->shape}};
        *parameter = (tch_parameter){.tensor = &place->tensor};
        failed = py_take_role(role, parameter) < 0 || py_take_dtype(dtype, "dtype", &place->tensor.dtype) < 0 ||
                 py_take_ints(sizes, "counts", INT64_MIN, INT64_MAX, place->shape) < 0;
    }
    Py_DECREF(sizes);
    return failed ? -1 : 0;
}

static PyObject *forecast_memory(tch_device device, const tch_optim_config *config, PyObject *list, py_place *places,
                                 tch_parameter *parameters)
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
    tch_status status = tch_optim_forecast(place->context, config, (int32_t)count, parameters, &memory);
    PyObject *result = status == TCH_OK ? describe_memory(&memory) : py_fail(status);
    py_context_return(place);
    return result;
}

static PyObject *optim_forecast(PY_ARGUMENTS)
{
    PY_TAKE("optim_forecast", 3, "device", "config", "parameters");
    tch_device device;
    tch_optim_config config;
    if (py_take_device(v[0], "device", &device) < 0 || py_optim_config(v[1], &config) < 0) {
        return NULL;
    }
    if (!PyList_Check(v[2]) || PyList_Size(v[2]) > INT32_MAX) {
        PyErr_SetString(PyExc_TypeError, "parameters must be a list of (shape, dtype, role)");
        return NULL;
    }
    PyObject *list = PyList_AsTuple(v[2]); /* which nobody changes while its items are read */
    if (list == NULL) {
        return NULL;
    }
    size_t room = (size_t)PyTuple_Size(list) + 1;
    py_place *places = PyMem_Calloc(room, sizeof *places);
    tch_parameter *parameters = PyMem_Calloc(room, sizeof *parameters);
    PyObject *result = places == NULL || parameters == NULL
                           ? PyErr_NoMemory()
                           : forecast_memory(device, &config, list, places, parameters);
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
        PY_METHOD("add_group", py_optimizer_add_group,
                  "Parameters with one configuration; returns the group's number."),
        PY_METHOD("set_config", py_optimizer_set_config, "Changes the numbers of a group."),
        PY_METHOD("set_lr", py_optimizer_set_lr, "Changes the learning rate of a group."),
        PY_METHOD("set_lr_tensor", py_optimizer_set_lr_tensor, "A learning rate that lives on the device, or None."),
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
    return py_optim_config_register() < 0 ? -1
                                          : py_session_register(module, "torchium._C.Optimizer",
                                                                "One tch_optimizer: all parameters of one device.",
                                                                initialize_optimizer, methods, functions);
}

/* What is asked of an optimizer: its state as tensors, its counts, memory and statistics; and the forecast of one. */
#include "optimizer.h"

#include "arguments.h"
#include "contexts.h"
#include "errors.h"
#include "optim_config.h"

/* --- the state --------------------------------------------------------------------------------------------------- */

static PyObject *describe_state(py_optimizer *self, int32_t index)
{
    tch_optim_state state = TCH_OPTIM_STATE_INIT;
    tch_status status = tch_optimizer_get_state(self->optimizer, index, &state);
    return status != TCH_OK ? py_fail(status)
                            : py_chunks_describe(&self->memory, &state, (PyObject *)self, self->on.stream);
}

PyObject *py_optimizer_states(PY_ARGUMENTS)
{
    PY_TAKE_NONE("states");
    py_optimizer *self = (py_optimizer *)object;
    if (py_optimizer_enter(self) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list != NULL && i < tch_optimizer_state_count(self->optimizer); i++) {
        py_append(&list, describe_state(self, i));
    }
    py_runner_leave(&self->on);
    return list;
}

/* --- counts ------------------------------------------------------------------------------------------------------ */

PyObject *py_optimizer_get_counts(PY_ARGUMENTS)
{
    PY_TAKE("get_counts", 1, "parameter");
    py_optimizer *self = (py_optimizer *)object;
    int64_t parameter;
    if (py_take_int(v[0], "parameter", 0, INT32_MAX, &parameter) < 0 || py_optimizer_enter(self) < 0) {
        return NULL;
    }
    int64_t length = tch_optimizer_counts_length(self->optimizer, (int32_t)parameter);
    int64_t *numbers = PyMem_Calloc((size_t)length + 1, sizeof *numbers);
    PyObject *list = NULL;
    if (numbers == NULL) {
        PyErr_NoMemory();
    } else {
        tch_status status = tch_optimizer_get_counts(self->optimizer, (int32_t)parameter, length, numbers);
        list = status == TCH_OK ? py_list_numbers(numbers, length) : py_fail(status);
    }
    PyMem_Free(numbers);
    py_runner_leave(&self->on);
    return list;
}

PyObject *py_optimizer_set_counts(PY_ARGUMENTS)
{
    PY_TAKE("set_counts", 2, "parameter", "counts");
    py_optimizer *self = (py_optimizer *)object;
    int64_t parameter;
    if (py_take_int(v[0], "parameter", 0, INT32_MAX, &parameter) < 0) {
        return NULL;
    }
    PyObject *counts = PySequence_Tuple(v[1]); /* a list could be changed by its items while they are read */
    if (counts == NULL || py_optimizer_enter(self) < 0) {
        Py_XDECREF(counts);
        return NULL;
    }
    Py_ssize_t length = PyTuple_Size(counts);
    int64_t *numbers = PyMem_Calloc((size_t)length + 1, sizeof *numbers);
    int failed = numbers == NULL;
    if (failed) {
        PyErr_NoMemory();
    } else if (!(failed = py_take_ints(counts, "counts", INT64_MIN, INT64_MAX, numbers) < 0)) {
        tch_status status = tch_optimizer_set_counts(self->optimizer, (int32_t)parameter, length, numbers);
        failed = status != TCH_OK && py_fail(status) == NULL;
    }
    PyMem_Free(numbers);
    Py_DECREF(counts);
    py_runner_leave(&self->on);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* --- tiles ------------------------------------------------------------------------------------------------------- */

static PyObject *tuple_of(const int64_t *numbers, int32_t count)
{
    PyObject *list = py_list_numbers(numbers, count);
    PyObject *tuple = list == NULL ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

PyObject *py_optimizer_tiles(PY_ARGUMENTS)
{
    PY_TAKE_NONE("tiles");
    py_optimizer *self = (py_optimizer *)object;
    if (py_optimizer_enter(self) < 0) {
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

PyObject *py_optimizer_memory(PY_ARGUMENTS)
{
    PY_TAKE_NONE("memory");
    py_optimizer *self = (py_optimizer *)object;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (py_optimizer_enter(self) < 0) {
        return NULL;
    }
    tch_status status = tch_optimizer_get_memory(self->optimizer, &memory);
    PyObject *result = status == TCH_OK ? describe_memory(&memory) : py_fail(status);
    py_runner_leave(&self->on);
    return result;
}

PyObject *py_optimizer_stats(PY_ARGUMENTS)
{
    PY_TAKE_NONE("stats");
    py_optimizer *self = (py_optimizer *)object;
    tch_optim_stats s = TCH_OPTIM_STATS_INIT;
    tch_status status;
    if (py_optimizer_enter(self) < 0) {
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
        return py_wrong_type(item, "parameters must have entries (shape, dtype, role)");
    }
    PyObject *sizes = PySequence_Tuple(shape);
    if (sizes == NULL) {
        PyErr_Clear();
        return py_wrong_type(shape, "shape must be a sequence of sizes");
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

PyObject *py_optim_forecast(PY_ARGUMENTS)
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

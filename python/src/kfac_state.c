/* What is asked of a Kfac: its state as tensors, its counts and statistics; and the forecast of one. */
#include "kfac.h"

#include "arguments.h"
#include "errors.h"

static PyObject *describe_state(py_kfac *self, int32_t index)
{
    tch_optim_state state = TCH_OPTIM_STATE_INIT;
    tch_status status = tch_kfac_get_state(self->kfac, index, &state);
    return status != TCH_OK ? py_fail(status)
                            : py_chunks_describe(&self->memory, &state, (PyObject *)self, self->on.stream);
}

PyObject *py_kfac_states(PY_ARGUMENTS)
{
    PY_TAKE_NONE("states");
    py_kfac *self = (py_kfac *)object;
    if (py_kfac_enter(self) < 0) {
        return NULL;
    }
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list != NULL && i < tch_kfac_state_count(self->kfac); i++) {
        py_append(&list, describe_state(self, i));
    }
    py_runner_leave(&self->on);
    return list;
}

PyObject *py_kfac_get_counts(PY_ARGUMENTS)
{
    PY_TAKE("get_counts", 1, "layer");
    py_kfac *self = (py_kfac *)object;
    int64_t layer;
    int64_t n[TCH_KFAC_COUNTS];
    if (py_take_int(v[0], "layer", 0, INT32_MAX, &layer) < 0 || py_kfac_enter(self) < 0) {
        return NULL;
    }
    tch_status status = tch_kfac_get_counts(self->kfac, (int32_t)layer, n);
    PyObject *result =
        status != TCH_OK ? py_fail(status)
                         : Py_BuildValue("[LLLL]", (long long)n[0], (long long)n[1], (long long)n[2], (long long)n[3]);
    py_runner_leave(&self->on);
    return result;
}

static int take_counts(PyObject *value, int64_t *numbers)
{
    PyObject *items = PySequence_Tuple(value); /* which nobody changes while its items are read */
    if (items == NULL) {
        return -1;
    }
    int failed = PyTuple_Size(items) != TCH_KFAC_COUNTS;
    if (failed) {
        PyErr_Format(PyExc_ValueError, "counts has %zd numbers, expected %d", PyTuple_Size(items), TCH_KFAC_COUNTS);
    }
    failed = failed || py_take_ints(items, "counts", INT64_MIN, INT64_MAX, numbers) < 0;
    Py_DECREF(items);
    return failed ? -1 : 0;
}

PyObject *py_kfac_set_counts(PY_ARGUMENTS)
{
    PY_TAKE("set_counts", 2, "layer", "counts");
    py_kfac *self = (py_kfac *)object;
    int64_t layer;
    int64_t numbers[TCH_KFAC_COUNTS];
    if (py_take_int(v[0], "layer", 0, INT32_MAX, &layer) < 0 || take_counts(v[1], numbers) < 0 ||
        py_kfac_enter(self) < 0) {
        return NULL;
    }
    tch_status status = tch_kfac_set_counts(self->kfac, (int32_t)layer, numbers);
    py_runner_leave(&self->on);
    return status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
}

PyObject *py_kfac_stats(PY_ARGUMENTS)
{
    PY_TAKE_NONE("stats");
    py_kfac *self = (py_kfac *)object;
    tch_kfac_stats s = TCH_KFAC_STATS_INIT;
    tch_status status;
    if (py_kfac_enter(self) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, tch_kfac_get_stats(self->kfac, &s));
    PyObject *result = status != TCH_OK
                           ? py_fail(status)
                           : Py_BuildValue("{sdsdsdsdsdsd}", "observations", (double)s.observations, "refreshes",
                                           (double)s.refreshes, "failed", (double)s.failed, "rejected",
                                           (double)s.rejected, "worst_residual", s.worst_residual, "scale", s.scale);
    py_runner_leave(&self->on);
    return result;
}

PyObject *py_kfac_forecast(PY_ARGUMENTS)
{
    PY_TAKE("kfac_forecast", 2, "config", "layers");
    tch_kfac_config config;
    py_kfac_layers layers;
    int64_t bytes = 0;
    if (py_kfac_config(v[0], &config) < 0 || py_kfac_layers_take(v[1], &layers) < 0) {
        return NULL;
    }
    tch_status status = tch_kfac_forecast(&config, layers.count, layers.entries, &bytes);
    py_kfac_layers_release(&layers);
    return status == TCH_OK ? PyLong_FromLongLong((long long)bytes) : py_fail(status);
}

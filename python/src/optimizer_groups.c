/* Groups of parameters and their numbers. */
#include "optimizer.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"
#include "errors.h"
#include "optim_config.h"

/* --- places ------------------------------------------------------------------------------------------------------ */

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

/* Everything that needs memory, before the library has a new group: places without a tensor yet, and room for the
 * arrays of a step. */
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

int py_take_role(PyObject *item, tch_parameter *parameter)
{
    bool elementwise;
    PyObject *cuts;
    Py_ssize_t bytes = 0;
    if (!PyTuple_Check(item)) {
        int failed = py_take_bool(item, "a role", &elementwise);
        parameter->elementwise = failed == 0 && elementwise;
        return failed;
    }
    char *data = NULL;
    if (!PyArg_ParseTuple(item, "piO", &parameter->elementwise, &parameter->batch_dims, &cuts) ||
        PyBytes_AsStringAndSize(cuts, &data, &bytes) < 0 || bytes % (Py_ssize_t)sizeof(int64_t) != 0 ||
        bytes / (Py_ssize_t)sizeof(int64_t) > INT32_MAX) {
        PyErr_Clear();
        return py_refuse_type(item, "a role", "a bool or (elementwise, batch_dims, cuts)");
    }
    parameter->cut_count = (int32_t)(bytes / (Py_ssize_t)sizeof(int64_t));
    parameter->cuts = (const int64_t *)(const void *)data;
    return 0;
}

/* Adds the parameters of three tuples, arrays, names and roles, with room for what the library reads of them. */
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
                 py_take_role(PyTuple_GetItem(tuples[2], i), &entries[i]) < 0;
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

/* The three lists as tuples, which nobody changes while arrays are asked for; they are new references. */
static int take_lists(PyObject *const *lists, PyObject **tuples)
{
    static const char *const names[] = {"parameters", "names", "roles"};
    for (int i = 0; i < 3; i++) {
        if (!PyList_Check(lists[i]) || PyList_Size(lists[i]) != PyList_Size(lists[0])) {
            PyErr_Format(PyExc_TypeError, "%s must be a list, as long as that of the parameters", names[i]);
            return -1;
        }
        if (PyList_Size(lists[i]) > INT32_MAX / 2) {
            PyErr_SetString(PyExc_ValueError, "parameters has more entries than can be counted");
            return -1;
        }
        tuples[i] = PyList_AsTuple(lists[i]);
        if (tuples[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

PyObject *py_optimizer_add_group(PY_ARGUMENTS)
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

PyObject *py_optimizer_set_config(PY_ARGUMENTS)
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

PyObject *py_optimizer_set_lr(PY_ARGUMENTS)
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

/* TCH_ERR_INTERNAL where an exception of its own is set. */
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

PyObject *py_optimizer_set_lr_tensor(PY_ARGUMENTS)
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

/* The type torchium._C.Kfac: one tch_kfac, a session (session.h), created from Python's layers and configuration. The
 * library validates ranges. */
#include "session.h"

#include <stdio.h>

#include "arguments.h"
#include "module.h"
#include "optim_config.h"

/* Arguments of tch_kfac_create: `tuples` owns the layers' names. */
typedef struct layer_list {
    int32_t count;
    tch_kfac_layer *entries;
    PyObject *tuples;
} layer_list;

static const char *const method_words[] = {"eigen", "inverse", "ekfac", NULL};
static const char *const sharing_words[] = {"expand", "reduce", NULL};

/* --- layers ------------------------------------------------------------------------------------------------------ */

/* (layer, inputs, outputs, bias, name) */
static int take_layer(PyObject *tuple, tch_kfac_layer *entry)
{
    bool bias;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 5) {
        return py_refuse_type(tuple, "an entry of layers", "(layer, inputs, outputs, bias, name)");
    }
    if (py_layer_take(PyTuple_GetItem(tuple, 0), "layer", &entry->layer) < 0 ||
        py_take_int(PyTuple_GetItem(tuple, 1), "inputs", INT64_MIN, INT64_MAX, &entry->inputs) < 0 ||
        py_take_int(PyTuple_GetItem(tuple, 2), "outputs", INT64_MIN, INT64_MAX, &entry->outputs) < 0 ||
        py_take_bool(PyTuple_GetItem(tuple, 3), "bias", &bias) < 0 ||
        py_take_string(PyTuple_GetItem(tuple, 4), "name", &entry->name) < 0) {
        return -1;
    }
    entry->bias = bias;
    return 0;
}

static void release_layers(layer_list *layers)
{
    PyMem_Free(layers->entries);
    Py_CLEAR(layers->tuples);
    layers->entries = NULL;
}

/* 0, or -1 with an exception set and nothing to release. */
static int take_layers(PyObject *list, layer_list *layers)
{
    *layers = (layer_list){0};
    layers->tuples = py_take_list(list, "layers");
    if (layers->tuples == NULL) {
        return -1;
    }
    layers->count = (int32_t)PyTuple_Size(layers->tuples);
    layers->entries = PyMem_Calloc((size_t)layers->count + 1, sizeof *layers->entries);
    int failed = layers->entries == NULL;
    if (failed) {
        PyErr_NoMemory();
    }
    for (int32_t i = 0; i < layers->count && !failed; i++) {
        failed = take_layer(PyTuple_GetItem(layers->tuples, i), &layers->entries[i]) < 0;
    }
    if (failed) {
        release_layers(layers);
    }
    return failed ? -1 : 0;
}

/* --- configuration ----------------------------------------------------------------------------------------------- */

#define AT(name) #name, offsetof(tch_kfac_config, name)

static const py_field fields[] = {
    {AT(method), PY_WORD, method_words},
    {AT(sharing), PY_WORD, sharing_words},
    {AT(damping), PY_REAL, NULL},
    {AT(factor_decay), PY_REAL, NULL},
    {AT(kl_clip), PY_REAL, NULL},
    {AT(use_bias_correction), PY_BOOL, NULL},
    {AT(accumulation_steps), PY_INT32, NULL},
    {AT(factor_dtype), PY_DTYPE, NULL},
};

/* Missing fields have their defaults. */
static int take_config(PyObject *dictionary, tch_kfac_config *config)
{
    *config = (tch_kfac_config)TCH_KFAC_CONFIG_INIT;
    return py_take_config(dictionary, fields, (int)(sizeof fields / sizeof fields[0]), config);
}

/* --- steps ------------------------------------------------------------------------------------------------------- */

static PyObject *observe_layer(PY_ARGUMENTS)
{
    PY_TAKE("observe", 4, "layer", "input", "output_gradient", "scale", "grad_scale", "stream");
    py_session *self = (py_session *)object;
    int64_t layer;
    double scale;
    if (py_take_int(v[0], "layer", 0, INT32_MAX, &layer) < 0 || py_take_double(v[3], "scale", &scale) < 0 ||
        py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    py_operand operands[] = {
        {v[1], "input", PY_REQUIRED}, {v[2], "output_gradient", PY_REQUIRED}, {v[4], "grad_scale", 0}};
    py_array arrays[3];
    tch_tensor *t[3];
    py_stream stream;
    int failed = py_runner_take(&self->on, &(py_operands){operands, arrays, t}, 3, v[5], &stream) < 0;
    if (!failed) {
        tch_status status;
        PY_UNLOCKED(status, tch_kfac_observe(self->kfac, (int32_t)layer, t[0], t[1], scale, t[2]));
        failed = status != TCH_OK && py_session_fail(self, status) < 0;
        py_arrays_release(arrays, t, 3);
    }
    py_runner_leave(&self->on);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *refresh_layers(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    tch_status status;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, tch_kfac_refresh(self->kfac));
    py_runner_leave(&self->on);
    return status != TCH_OK && py_session_fail(self, status) < 0 ? NULL : Py_NewRef(Py_None);
}

/* Gradients of weight and bias of each layer, in place. */
static int precondition_arrays(py_session *self, double lr, PyObject *gradients, PyObject *given)
{
    int32_t total = 2 * self->count;
    py_stream stream;
    tch_status status;
    if (PyTuple_Size(gradients) != total) {
        PyErr_Format(PyExc_ValueError, "gradients has %zd entries, expected %d: weight and bias of each layer",
                     PyTuple_Size(gradients), (int)total);
        return -1;
    }
    for (int32_t i = 0; i < total; i++) {
        self->step.operands[i].object = PyTuple_GetItem(gradients, i);
    }
    if (py_runner_take(&self->on, &self->step, total, given, &stream) < 0) {
        return -1;
    }
    PY_UNLOCKED(status, tch_kfac_precondition(self->kfac, lr, total, self->step.tensors));
    int failed = status != TCH_OK && py_session_fail(self, status) < 0;
    py_arrays_release(self->step.arrays, self->step.tensors, total);
    return failed ? -1 : 0;
}

static PyObject *precondition_gradients(PY_ARGUMENTS)
{
    PY_TAKE("precondition", 2, "lr", "gradients", "stream");
    py_session *self = (py_session *)object;
    double lr;
    if (py_take_double(v[0], "lr", &lr) < 0) {
        return NULL;
    }
    PyObject *gradients = py_take_list(v[1], "gradients");
    if (gradients == NULL || py_runner_enter(&self->on) < 0) {
        Py_XDECREF(gradients);
        return NULL;
    }
    int failed = precondition_arrays(self, lr, gradients, v[2]);
    py_runner_leave(&self->on);
    Py_DECREF(gradients);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *set_kfac_config(PY_ARGUMENTS)
{
    PY_TAKE("set_config", 1, "config");
    py_session *self = (py_session *)object;
    tch_kfac_config config;
    if (take_config(v[0], &config) < 0 || py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    return py_runner_done(&self->on, tch_kfac_set_config(self->kfac, &config));
}

static PyObject *kfac_stats(PY_NO_ARGUMENTS)
{
    py_session *self = (py_session *)object;
    tch_kfac_stats s = TCH_KFAC_STATS_INIT;
    tch_status status;
    if (py_runner_enter(&self->on) < 0) {
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

static PyObject *kfac_forecast(PY_ARGUMENTS)
{
    PY_TAKE("kfac_forecast", 2, "config", "layers");
    tch_kfac_config config;
    layer_list layers;
    int64_t bytes = 0;
    if (take_config(v[0], &config) < 0 || take_layers(v[1], &layers) < 0) {
        return NULL;
    }
    tch_status status = tch_kfac_forecast(&config, layers.count, layers.entries, &bytes);
    release_layers(&layers);
    return status == TCH_OK ? PyLong_FromLongLong((long long)bytes) : py_fail(status);
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static int make_room(py_session *self, const layer_list *layers)
{
    size_t total = 2 * (size_t)layers->count;
    self->labels = PyMem_Calloc(total + 1, sizeof *self->labels);
    if (self->labels == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (py_operands_make(&self->step, total) < 0) {
        return -1;
    }
    for (int32_t i = 0; i < 2 * layers->count; i++) {
        snprintf(self->labels[i], sizeof self->labels[i], "the gradient of '%.200s.%s'", layers->entries[i / 2].name,
                 i % 2 == 0 ? "weight" : "bias");
        self->step.operands[i] = (py_operand){NULL, self->labels[i], PY_WRITTEN};
    }
    self->count = layers->count;
    return 0;
}

static int initialize_kfac(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "config", "layers", "allocate", "group", NULL};
    py_session *self = (py_session *)object;
    PyObject *device, *options, *list;
    PyObject *allocate = Py_None;
    PyObject *group = Py_None;
    tch_kfac_config config;
    layer_list layers;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|OO:Kfac", names, &device, &options, &list, &allocate,
                                     &group) ||
        take_config(options, &config) < 0 || take_layers(list, &layers) < 0) {
        return -1;
    }
    int failed = py_session_open(self, device, allocate, group) < 0 || make_room(self, &layers) < 0;
    if (!failed) {
        tch_state_allocator allocator;
        tch_status status;
        tch_optim_setup setup = py_session_setup(self, NULL, &allocator);
        PY_UNLOCKED(status,
                    tch_kfac_create(self->on.context, &config, &setup, layers.count, layers.entries, &self->kfac));
        failed = status != TCH_OK && py_session_fail(self, status) < 0;
        self->on.name = failed ? NULL : "Kfac";
    }
    release_layers(&layers);
    return failed ? -1 : 0;
}

int py_kfac_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        PY_METHOD("observe", observe_layer, "The factors of one layer see one more batch."),
        {"refresh", refresh_layers, METH_NOARGS, "Inverses or eigenbases anew for every layer that has been observed."},
        PY_METHOD("precondition", precondition_gradients, "Preconditions the gradients of all layers in place."),
        PY_METHOD("set_config", set_kfac_config, "Changes the numbers that may change between steps."),
        {"states", py_session_states, METH_NOARGS, "(name, layer, memory) of every tensor of the state."},
        PY_METHOD("get_counts", py_session_get_counts, "What the host counts for a layer."),
        PY_METHOD("set_counts", py_session_set_counts, "Puts the counts of a layer back, after its tensors."),
        {"stats", kfac_stats, METH_NOARGS, "Observations, refreshes, failures. Waits for the device."},
        {NULL, NULL, 0, NULL}};
    static PyMethodDef functions[] = {
        PY_METHOD("kfac_forecast", kfac_forecast, "Bytes of state, before anything is allocated."),
        {NULL, NULL, 0, NULL}};
    return py_session_register(module, "torchium._C.Kfac", "One tch_kfac: the layers of a model on one device.",
                               initialize_kfac, methods, functions);
}

/* The type torchium._C.Kfac: its making and end, and what a training step calls. The library's memory of the state
 * comes from chunks.c. */
#include "kfac.h"

#include <stdio.h>
#include <unistd.h>

#include "arguments.h"
#include "contexts.h"
#include "errors.h"
#include "module.h"

int py_kfac_enter(py_kfac *self)
{
    return py_runner_enter(&self->on, "Kfac", self->kfac != NULL);
}

/* --- what a step calls ------------------------------------------------------------------------------------------- */

static int observe_arrays(py_kfac *self, int32_t layer, double scale, const py_operand *operands, PyObject *given)
{
    py_array arrays[3];
    tch_tensor *tensors[3];
    py_stream stream;
    tch_status status = TCH_OK;
    if (py_arrays_take(arrays, tensors, operands, 3, given, &stream) < 0) {
        return -1;
    }
    py_arrays_device(tensors, 3); /* page-locked memory counts as the CPU's */
    int failed = py_runner_follow(&self->on, stream.handle) < 0;
    if (!failed) {
        PY_UNLOCKED(status, tch_kfac_observe(self->kfac, layer, tensors[0], tensors[1], scale, tensors[2]));
    }
    if (status != TCH_OK) {
        failed = py_chunks_fail(&self->memory, status) < 0;
    }
    py_arrays_release(arrays, tensors, 3);
    return failed ? -1 : 0;
}

static PyObject *observe_layer(PY_ARGUMENTS)
{
    PY_TAKE("observe", 4, "layer", "input", "output_gradient", "scale", "grad_scale", "stream");
    py_kfac *self = (py_kfac *)object;
    int64_t layer;
    double scale;
    if (py_take_int(v[0], "layer", 0, INT32_MAX, &layer) < 0 || py_take_double(v[3], "scale", &scale) < 0 ||
        py_kfac_enter(self) < 0) {
        return NULL;
    }
    const py_operand operands[] = {
        {v[1], "input", PY_REQUIRED}, {v[2], "output_gradient", PY_REQUIRED}, {v[4], "grad_scale", 0}};
    int failed = observe_arrays(self, (int32_t)layer, scale, operands, v[5]);
    py_runner_leave(&self->on);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *refresh_layers(PY_ARGUMENTS)
{
    PY_TAKE_NONE("refresh");
    py_kfac *self = (py_kfac *)object;
    tch_status status;
    if (py_kfac_enter(self) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, tch_kfac_refresh(self->kfac));
    if (status != TCH_OK && self->group.comm != NULL) {
        py_comm_fail(&self->group, &self->memory, status);
        py_runner_leave(&self->on);
        return NULL;
    }
    return py_runner_done(&self->on, status);
}

static int precondition_arrays(py_kfac *self, double lr, PyObject *given)
{
    int32_t total = 2 * self->count;
    py_stream stream;
    tch_status status = TCH_OK;
    if (py_arrays_take(self->step.arrays, self->step.tensors, self->step.operands, total, given, &stream) < 0) {
        return -1;
    }
    py_arrays_device(self->step.tensors, total);
    int failed = py_runner_follow(&self->on, stream.handle) < 0;
    if (!failed) {
        PY_UNLOCKED(status, tch_kfac_precondition(self->kfac, lr, total, self->step.tensors));
    }
    if (status != TCH_OK) {
        failed = py_comm_fail(&self->group, &self->memory, status) < 0;
    }
    py_arrays_release(self->step.arrays, self->step.tensors, total);
    return failed ? -1 : 0;
}

static PyObject *precondition_gradients(PY_ARGUMENTS)
{
    PY_TAKE("precondition", 2, "lr", "gradients", "stream");
    py_kfac *self = (py_kfac *)object;
    double lr;
    if (py_take_double(v[0], "lr", &lr) < 0) {
        return NULL;
    }
    if (!PyList_Check(v[1])) {
        PyErr_SetString(PyExc_TypeError, "gradients must be a list");
        return NULL;
    }
    PyObject *gradients = PyList_AsTuple(v[1]); /* which nobody changes while arrays are asked for */
    if (gradients == NULL || py_kfac_enter(self) < 0) {
        Py_XDECREF(gradients);
        return NULL;
    }
    int failed = PyTuple_Size(gradients) != 2 * (Py_ssize_t)self->count;
    if (failed) {
        PyErr_Format(PyExc_ValueError, "gradients has %zd entries, expected %d: weight and bias of each layer",
                     PyTuple_Size(gradients), 2 * (int)self->count);
    } else {
        for (int32_t i = 0; i < 2 * self->count; i++) {
            self->step.operands[i].object = PyTuple_GetItem(gradients, i);
        }
        failed = precondition_arrays(self, lr, v[2]);
    }
    py_runner_leave(&self->on);
    Py_DECREF(gradients);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *set_kfac_config(PY_ARGUMENTS)
{
    PY_TAKE("set_config", 1, "config");
    py_kfac *self = (py_kfac *)object;
    tch_kfac_config config;
    if (py_kfac_config(v[0], &config) < 0 || py_kfac_enter(self) < 0) {
        return NULL;
    }
    return py_runner_done(&self->on, tch_kfac_set_config(self->kfac, &config));
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static int make_room(py_kfac *self, const py_kfac_layers *layers)
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

static int make_library(py_kfac *self, const tch_kfac_config *config, const py_kfac_layers *layers)
{
    const tch_state_allocator memory = py_chunks_allocator(&self->memory);
    bool own = self->memory.allocate != Py_None;
    char text[32];
    tch_status status = tch_context_create(py_device_text(self->on.device, text, sizeof text), &self->on.context);
    if (status == TCH_OK) {
        PY_UNLOCKED(status, tch_kfac_create(self->on.context, config,
                                            &(tch_optim_setup){sizeof(tch_optim_setup), .comm = self->group.comm,
                                                               .allocator = own ? &memory : NULL},
                                            layers->count, layers->entries, &self->kfac));
    }
    return status == TCH_OK ? 0 : py_chunks_fail(&self->memory, status);
}

static int initialize_kfac(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", "config", "layers", "allocate", "group", NULL};
    py_kfac *self = (py_kfac *)object;
    PyObject *device, *options, *list;
    PyObject *memory = Py_None;
    PyObject *group = Py_None;
    tch_kfac_config config;
    py_kfac_layers layers;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|OO:Kfac", names, &device, &options, &list, &memory, &group)) {
        return -1;
    }
    if (self->memory.allocate != NULL || (memory != Py_None && !PyCallable_Check(memory))) {
        PyErr_SetString(PyExc_TypeError,
                        self->memory.allocate != NULL ? "a Kfac is made once" : "allocate must be callable, or None");
        return -1;
    }
    if (py_take_device(device, "device", &self->on.device) < 0 || py_kfac_config(options, &config) < 0 ||
        py_kfac_layers_take(list, &layers) < 0) {
        return -1;
    }
    self->memory.allocate = Py_NewRef(memory);
    self->on.process = (long)getpid();
    int failed = (group != Py_None && py_comm_open(group, &self->group) < 0) || make_room(self, &layers) < 0 ||
                 make_library(self, &config, &layers) < 0;
    py_kfac_layers_release(&layers);
    return failed ? -1 : 0;
}

static int traverse_kfac(PyObject *object, visitproc visit, void *arg)
{
    py_kfac *self = (py_kfac *)object;
    Py_VISIT(Py_TYPE(object));
    int stop = py_comm_traverse(&self->group, visit, arg);
    return stop != 0 ? stop : py_chunks_traverse(&self->memory, visit, arg);
}

/* The library first: it waits for the device and then gives the state's memory back. */
static int clear_kfac(PyObject *object)
{
    py_kfac *self = (py_kfac *)object;
    if (self->on.busy) {
        return 0;
    }
    if (self->on.process == (long)getpid() && self->on.context != NULL) {
        tch_kfac_destroy(self->kfac);
        tch_context_destroy(self->on.context);
    }
    self->kfac = NULL;
    self->on.context = NULL;
    py_comm_clear(&self->group);
    py_chunks_clear(&self->memory);
    return 0;
}

static void deallocate_kfac(PyObject *object)
{
    py_kfac *self = (py_kfac *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject *kind, *value, *trace;
    PyObject_GC_UnTrack(object);
    PyErr_Fetch(&kind, &value, &trace);
    self->on.busy = false;
    clear_kfac(object);
    PyErr_Restore(kind, value, trace);
    py_operands_free(&self->step);
    PyMem_Free(self->labels);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    PY_METHOD("observe", observe_layer, "The factors of one layer see one more batch."),
    PY_METHOD("refresh", refresh_layers, "Inverses or eigenbases anew for every layer that has been observed."),
    PY_METHOD("precondition", precondition_gradients, "Preconditions the gradients of all layers in place."),
    PY_METHOD("set_config", set_kfac_config, "Changes the numbers that may change between steps."),
    PY_METHOD("states", py_kfac_states, "(name, layer, memory) of every tensor of the state."),
    PY_METHOD("get_counts", py_kfac_get_counts, "What the host counts for a layer."),
    PY_METHOD("set_counts", py_kfac_set_counts, "Puts the counts of a layer back, after its tensors."),
    PY_METHOD("stats", py_kfac_stats, "Observations, refreshes, failures. Waits for the device."),
    {NULL, NULL, 0, NULL}};

int py_kfac_register(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_doc, "One tch_kfac: the layers of a model on one device."},
        {Py_tp_init, PY_SLOT(initialize_kfac)},
        {Py_tp_traverse, PY_SLOT(traverse_kfac)},
        {Py_tp_clear, PY_SLOT(clear_kfac)},
        {Py_tp_dealloc, PY_SLOT(deallocate_kfac)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Kfac", sizeof(py_kfac), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    static PyMethodDef functions[] = {
        PY_METHOD("kfac_forecast", py_kfac_forecast, "Bytes of state, before anything is allocated."),
        {NULL, NULL, 0, NULL}};
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed =
        type == NULL || PyModule_AddObjectRef(module, "Kfac", type) < 0 || PyModule_AddFunctions(module, functions) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

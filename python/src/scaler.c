/* The type torchium._C.Scaler: one tch_scaler and the context it runs on. The scale and the flag are handed out as
 * views that may be written to: torchium.amp keeps PyTorch's state machine with them. */
#include "module.h"

#include <unistd.h>

#include "arguments.h"
#include "arrays.h"
#include "contexts.h"
#include "errors.h"
#include "memory.h"
#include "optimizer.h"

typedef struct scaler {
    PyObject ob_base;
    py_runner on;
    tch_scaler *scaler;
} scaler;

static int enter_scaler(scaler *self)
{
    return py_runner_enter(&self->on, "scaler", self->scaler != NULL);
}

/* --- gradients --------------------------------------------------------------------------------------------------- */

/* Without arrays that tell: the stream that is given, or the one of the last call. */
static int follow_given(scaler *self, PyObject *given)
{
    int64_t number;
    if (given == NULL || given == Py_None) {
        return 0;
    }
    return py_take_int(given, "stream", 0, INT64_MAX, &number) < 0
               ? -1
               : py_runner_follow(&self->on, (void *)(uintptr_t)number);
}

static tch_status visit_gradients(scaler *self, tch_tensor *const *tensors, int32_t count, bool divide, bool wait)
{
    tch_status status = divide ? tch_scaler_unscale(self->scaler, count, tensors)
                               : tch_scaler_check(self->scaler, count, (const tch_tensor *const *)tensors);
    return status == TCH_OK && wait ? tch_context_synchronize(self->on.context) : status;
}

static PyObject *visit_all(scaler *self, PyObject *tuple, PyObject *given, bool divide, py_operands *o)
{
    int32_t count = (int32_t)PyTuple_Size(tuple);
    py_stream stream;
    PyObject *result = NULL;
    for (int32_t i = 0; i < count; i++) {
        o->operands[i] = (py_operand){PyTuple_GetItem(tuple, i), "a gradient", divide};
    }
    if (py_arrays_take(o->arrays, o->tensors, o->operands, count, given, &stream) < 0) {
        return NULL;
    }
    if (self->on.device.type == TCH_DEVICE_CPU) {
        py_arrays_device(o->tensors, count); /* page-locked memory counts as the CPU's */
    }
    if (py_runner_follow(&self->on, stream.handle) == 0) {
        tch_status status;
        PY_UNLOCKED(status, visit_gradients(self, o->tensors, count, divide, stream.wait));
        result = status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
    }
    py_arrays_release(o->arrays, o->tensors, count);
    return result;
}

static PyObject *unscale_gradients(PY_ARGUMENTS)
{
    PY_TAKE("unscale", 1, "gradients", "stream", "divide");
    scaler *self = (scaler *)object;
    bool divide = true;
    if (v[2] != NULL && py_take_bool(v[2], "divide", &divide) < 0) {
        return NULL;
    }
    if (!PyList_Check(v[0]) || PyList_Size(v[0]) > INT32_MAX) {
        py_wrong_type(v[0], "gradients must be a list");
        return NULL;
    }
    PyObject *tuple = PyList_AsTuple(v[0]); /* which nobody changes while arrays are asked for */
    PyObject *result = NULL;
    py_operands operands;
    if (tuple != NULL && py_operands_make(&operands, (size_t)PyTuple_Size(tuple)) == 0) {
        if (enter_scaler(self) == 0) {
            result = visit_all(self, tuple, v[1], divide, &operands);
            py_runner_leave(&self->on);
        }
        py_operands_free(&operands);
    }
    Py_XDECREF(tuple);
    return result;
}

/* --- the numbers ------------------------------------------------------------------------------------------------- */

static PyObject *view_of(PyObject *object, const char *function, PyObject *const *args, Py_ssize_t count,
                         PyObject *keywords, const tch_tensor *(*get)(const tch_scaler *))
{
    static const char *const names[] = {NULL};
    scaler *self = (scaler *)object;
    if (py_arguments(function, names, 0, args, count, keywords, NULL) < 0 || enter_scaler(self) < 0) {
        return NULL;
    }
    py_runner_leave(&self->on);
    return py_memory_wrap(get(self->scaler), object, self->on.stream);
}

static PyObject *view_scale(PY_ARGUMENTS)
{
    return view_of(object, "scale", args, count, keywords, tch_scaler_scale);
}

static PyObject *view_found_inf(PY_ARGUMENTS)
{
    return view_of(object, "found_inf", args, count, keywords, tch_scaler_found_inf);
}

static PyObject *update_scale(PY_ARGUMENTS)
{
    PY_TAKE("update", 0, "stream");
    scaler *self = (scaler *)object;
    if (enter_scaler(self) < 0) {
        return NULL;
    }
    if (follow_given(self, v[0]) < 0) {
        py_runner_leave(&self->on);
        return NULL;
    }
    return py_runner_done(&self->on, tch_scaler_update(self->scaler));
}

static PyObject *get_state(PY_ARGUMENTS)
{
    PY_TAKE_NONE("get_state");
    scaler *self = (scaler *)object;
    tch_scaler_state s = TCH_SCALER_STATE_INIT;
    tch_status status;
    if (enter_scaler(self) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, tch_scaler_get_state(self->scaler, &s));
    py_runner_leave(&self->on);
    return status != TCH_OK ? py_fail(status)
                            : Py_BuildValue("{sdsdsdsisi}", "scale", s.scale, "growth_factor", s.growth_factor,
                                            "backoff_factor", s.backoff_factor, "growth_interval",
                                            (int)s.growth_interval, "_growth_tracker", (int)s.growth_tracker);
}

static PyObject *item_of(PyObject *state, const char *name)
{
    PyObject *value = PyMapping_GetItemString(state, name);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_KeyError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "state has no '%s'", name);
    }
    return value;
}

static int read_number(PyObject *state, const char *name, double *number)
{
    PyObject *value = item_of(state, name);
    int failed = value == NULL || py_take_double(value, name, number) < 0;
    Py_XDECREF(value);
    return failed;
}

static int read_count(PyObject *state, const char *name, int32_t *number)
{
    int64_t wide = 0;
    PyObject *value = item_of(state, name);
    int failed = value == NULL || py_take_int(value, name, 0, INT32_MAX, &wide) < 0;
    Py_XDECREF(value);
    *number = (int32_t)wide;
    return failed;
}

static PyObject *set_state(PY_ARGUMENTS)
{
    PY_TAKE("set_state", 1, "state");
    scaler *self = (scaler *)object;
    tch_scaler_state s = TCH_SCALER_STATE_INIT;
    if (!PyDict_Check(v[0])) {
        py_wrong_type(v[0], "state must be a dictionary");
        return NULL;
    }
    if (read_number(v[0], "scale", &s.scale) || read_number(v[0], "growth_factor", &s.growth_factor) ||
        read_number(v[0], "backoff_factor", &s.backoff_factor) ||
        read_count(v[0], "growth_interval", &s.growth_interval) ||
        read_count(v[0], "_growth_tracker", &s.growth_tracker) || enter_scaler(self) < 0) {
        return NULL;
    }
    return py_runner_done(&self->on, tch_scaler_set_state(self->scaler, &s));
}

/* --- the type ---------------------------------------------------------------------------------------------------- */

static int initialize_scaler(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device",          "init_scale", "growth_factor", "backoff_factor",
                            "growth_interval", "enabled",    "stream",        NULL};
    scaler *self = (scaler *)object;
    tch_scaler_config c = TCH_SCALER_CONFIG_INIT;
    PyObject *device;
    PyObject *stream = Py_None;
    char text[32];
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|dddipO:Scaler", names, &device, &c.init_scale, &c.growth_factor,
                                     &c.backoff_factor, &c.growth_interval, &c.enabled, &stream) ||
        py_take_device(device, "device", &self->on.device) < 0) {
        return -1;
    }
    if (self->on.context != NULL) {
        PyErr_SetString(PyExc_TypeError, "a scaler is made once");
        return -1;
    }
    self->on.process = (long)getpid();
    tch_status status = tch_context_create(py_device_text(self->on.device, text, sizeof text), &self->on.context);
    if (status == TCH_OK && follow_given(self, stream) < 0) {
        return -1;
    }
    status = status == TCH_OK ? tch_scaler_create(self->on.context, &c, &self->scaler) : status;
    return status == TCH_OK ? 0 : (py_fail(status), -1);
}

static void deallocate_scaler(PyObject *object)
{
    scaler *self = (scaler *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->on.process == (long)getpid()) {
        tch_scaler_destroy(self->scaler);
        tch_context_destroy(self->on.context);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    PY_METHOD("scale", view_scale, "The scale, a float32 on the device, as memory that may be written to."),
    PY_METHOD("found_inf", view_found_inf, "The flag of this iteration, likewise."),
    PY_METHOD("unscale", unscale_gradients, "Divides gradients by the scale and looks for infinities; or only looks."),
    PY_METHOD("update", update_scale, "The end of an iteration: the scale falls or grows, the flag is cleared."),
    PY_METHOD("get_state", get_state, "The numbers of a state_dict. Waits for the device."),
    PY_METHOD("set_state", set_state, "Puts them back."),
    {NULL, NULL, 0, NULL}};

int py_scaler_register(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_doc, "One tch_scaler: the scale, the growth tracker and the flag of the iteration, on one device."},
        {Py_tp_init, PY_SLOT(initialize_scaler)},
        {Py_tp_dealloc, PY_SLOT(deallocate_scaler)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Scaler", sizeof(scaler), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Scaler", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

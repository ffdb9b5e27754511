/* The type torchium._C.Scaler: one tch_scaler and its context. The scale and the flag are exported as writable views:
 * torchium.amp keeps PyTorch's state machine with them. */
#include "session.h"

#include <unistd.h>

#include "arguments.h"
#include "module.h"

typedef struct scaler {
    PyObject ob_base;
    py_runner on;
    tch_scaler *scaler;
} scaler;

static tch_status visit_gradients(scaler *self, tch_tensor *const *tensors, int32_t count, bool divide, bool wait)
{
    tch_status status = divide ? tch_scaler_unscale(self->scaler, count, tensors)
                               : tch_scaler_check(self->scaler, count, (const tch_tensor *const *)tensors);
    return status == TCH_OK && wait ? tch_context_synchronize(self->on.context) : status;
}

static PyObject *visit_tuple(scaler *self, PyObject *tuple, bool divide, py_operands *o)
{
    int32_t count = (int32_t)PyTuple_Size(tuple);
    py_stream stream;
    tch_status status;
    for (int32_t i = 0; i < count; i++) {
        o->operands[i] = (py_operand){PyTuple_GetItem(tuple, i), "a gradient", divide ? PY_WRITTEN : 0};
    }
    if (py_runner_take(&self->on, o, count, NULL, &stream) < 0) {
        return NULL;
    }
    PY_UNLOCKED(status, visit_gradients(self, o->tensors, count, divide, stream.wait));
    PyObject *result = status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
    py_arrays_release(o->arrays, o->tensors, count);
    return result;
}

static PyObject *unscale_gradients(PY_ARGUMENTS)
{
    PY_TAKE("unscale", 1, "gradients", "divide");
    scaler *self = (scaler *)object;
    bool divide = true;
    if (v[1] != NULL && py_take_bool(v[1], "divide", &divide) < 0) {
        return NULL;
    }
    PyObject *tuple = py_take_list(v[0], "gradients");
    PyObject *result = NULL;
    py_operands operands;
    if (tuple != NULL && py_operands_make(&operands, (size_t)PyTuple_Size(tuple)) == 0) {
        if (py_runner_enter(&self->on) == 0) {
            result = visit_tuple(self, tuple, divide, &operands);
            py_runner_leave(&self->on);
        }
        py_operands_free(&operands);
    }
    Py_XDECREF(tuple);
    return result;
}

static PyObject *view_of(PyObject *object, const tch_tensor *(*get)(const tch_scaler *))
{
    scaler *self = (scaler *)object;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    py_runner_leave(&self->on);
    return py_memory_wrap(get(self->scaler), object, self->on.stream);
}

static PyObject *view_scale(PY_NO_ARGUMENTS)
{
    return view_of(object, tch_scaler_scale);
}

static PyObject *view_found_inf(PY_NO_ARGUMENTS)
{
    return view_of(object, tch_scaler_found_inf);
}

static PyObject *update_scale(PY_NO_ARGUMENTS)
{
    scaler *self = (scaler *)object;
    return py_runner_enter(&self->on) < 0 ? NULL : py_runner_done(&self->on, tch_scaler_update(self->scaler));
}

static int initialize_scaler(PyObject *object, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    scaler *self = (scaler *)object;
    const tch_scaler_config config = TCH_SCALER_CONFIG_INIT;
    PyObject *device;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O:Scaler", names, &device)) {
        return -1;
    }
    if (self->on.context != NULL) {
        PyErr_SetString(PyExc_TypeError, "a scaler is made once");
        return -1;
    }
    if (py_runner_open(&self->on, device) < 0) {
        return -1;
    }
    tch_status status = tch_scaler_create(self->on.context, &config, &self->scaler);
    self->on.name = status == TCH_OK ? "scaler" : NULL;
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

int py_scaler_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"scale", view_scale, METH_NOARGS, "The scale, a float32 on the device, as memory that may be written to."},
        {"found_inf", view_found_inf, METH_NOARGS, "The flag of this iteration, likewise."},
        PY_METHOD("unscale", unscale_gradients,
                  "Divides gradients by the scale and looks for infinities; or only looks."),
        {"update", update_scale, METH_NOARGS, "Ends the iteration: the scale falls or grows, the flag is cleared."},
        {NULL, NULL, 0, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_doc, "One tch_scaler: the scale and the flag of the iteration, on one device."},
        {Py_tp_init, PY_SLOT(initialize_scaler)},
        {Py_tp_dealloc, PY_SLOT(deallocate_scaler)},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    static PyType_Spec spec = {"torchium._C.Scaler", sizeof(scaler), 0, Py_TPFLAGS_DEFAULT, slots};
    return py_add_type(module, &spec, NULL);
}

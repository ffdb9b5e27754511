/* Optimizer.step: all arrays of a step in one call. Parameters are mostly where they were: a look at each tells. One whose
 * memory is elsewhere than last time is followed; one that has become another tensor (shape, type, layout or device) is named
 * to the caller, before anything has changed. */
#include "optimizer.h"

#include "arguments.h"
#include "errors.h"

enum { FITS = -1 };

static int64_t stride_of(const tch_tensor *tensor, int32_t k)
{
    if (tensor->strides != NULL) {
        return tensor->strides[k];
    }
    int64_t stride = 1;
    for (int32_t i = k + 1; i < tensor->ndim; i++) {
        stride *= tensor->shape[i];
    }
    return stride;
}

static bool same_form(const tch_tensor *a, const tch_tensor *b)
{
    bool same = a->ndim == b->ndim && tch_dtype_equal(a->dtype, b->dtype) && a->device.type == b->device.type &&
                a->device.index == b->device.index;
    for (int32_t k = 0; same && k < a->ndim; k++) {
        same = a->shape[k] == b->shape[k] && (a->shape[k] <= 1 || stride_of(a, k) == stride_of(b, k));
    }
    return same;
}

static const char *data_of(const tch_tensor *tensor)
{
    return (const char *)tensor->data + tensor->byte_offset;
}

/* --- parameters that have moved ----------------------------------------------------------------------------------- */

static int32_t first_unlike(const py_optimizer *self)
{
    for (int32_t i = 0; i < self->count; i++) {
        if (!same_form(&self->places[i]->tensor, self->step.tensors[i])) {
            return i;
        }
    }
    return FITS;
}

/* Once through those that are elsewhere; *left is the first that could not be placed, since another one is still there. */
static int32_t follow_once(py_optimizer *self, int32_t *left)
{
    int32_t followed = 0;
    *left = FITS;
    for (int32_t i = 0; i < self->count; i++) {
        tch_tensor *now = self->step.tensors[i];
        if (data_of(now) == data_of(&self->places[i]->tensor)) {
            continue;
        }
        if (tch_optimizer_set_parameter(self->optimizer, i, now) == TCH_OK) {
            py_place_set(self->places[i], now);
            followed++;
        } else if (*left == FITS) {
            *left = i;
        }
    }
    return followed;
}

/* The number of a parameter that cannot be followed, or FITS. */
static int32_t follow(py_optimizer *self)
{
    int32_t left = first_unlike(self);
    if (left != FITS) {
        return left;
    }
    while (follow_once(self, &left) > 0 && left != FITS) {
    }
    return left;
}

/* --- the step ----------------------------------------------------------------------------------------------------- */

/* Whether every parameter is the tensor it was, at the same place; where a library has no table, nobody knows. */
static bool are_in_place(const py_optimizer *self, PyObject *parameters)
{
    for (int32_t i = 0; i < self->count; i++) {
        PyObject *object = PyTuple_GetItem(parameters, i);
        const tch_tensor *known = &self->places[i]->tensor;
        const DLPackExchange *table = py_table_of(object);
        tch_tensor now;
        if (table == NULL || table->borrow(object, &now) != 0) {
            PyErr_Clear();
            return false;
        }
        if (data_of(&now) != data_of(known) || !same_form(&now, known)) {
            return false;
        }
    }
    return true;
}

static PyObject *run(py_optimizer *self, const py_stream *stream)
{
    tch_tensor *const *tensors = self->step.tensors;
    const tch_tensor *const *gradients = (const tch_tensor *const *)(tensors + self->count);
    tch_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tch_optimizer_step_scaled(self->optimizer, self->count, gradients, tensors[2 * self->count],
                                       tensors[2 * self->count + 1]);
    if (status == TCH_OK && stream->wait) {
        status = tch_context_synchronize(self->context);
    }
    Py_END_ALLOW_THREADS;
    return status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
}

static void list_operands(py_optimizer *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    py_operand *operands = self->step.operands;
    for (int32_t i = 0; i < self->count; i++) {
        operands[i].object = PyTuple_GetItem(parameters, i);
        operands[self->count + i].object = PyTuple_GetItem(gradients, i);
    }
    operands[2 * self->count].object = values[2];
    operands[2 * self->count + 1].object = values[3];
}

static PyObject *step(py_optimizer *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    py_stream stream;
    bool in_place = are_in_place(self, parameters);
    int first = in_place ? self->count : 0; /* of the operands that are taken */
    int count = 2 * self->count + 2 - first;
    py_array *arrays = self->step.arrays + first;
    tch_tensor **tensors = self->step.tensors + first;
    list_operands(self, parameters, gradients, values);
    if (py_arrays_take(arrays, tensors, self->step.operands + first, count, values[4], &stream) < 0) {
        return NULL;
    }
    if (self->device.type == TCH_DEVICE_CPU) {
        py_arrays_device(tensors, count); /* page-locked memory counts as the CPU's */
    }
    PyObject *result = NULL;
    if (py_optimizer_follow_stream(self, &stream) == 0) {
        int32_t unlike = in_place ? FITS : follow(self);
        result = unlike != FITS ? PyLong_FromLong(unlike) : run(self, &stream);
    }
    py_arrays_release(arrays, tensors, count);
    return result;
}

static PyObject *take_list(const py_optimizer *self, PyObject *list, const char *name)
{
    if (!PyList_Check(list) || PyList_Size(list) != self->count) {
        PyErr_Format(PyList_Check(list) ? PyExc_ValueError : PyExc_TypeError,
                     "%s must be a list with an entry for each of the %d parameters", name, (int)self->count);
        return NULL;
    }
    return PyList_AsTuple(list); /* which nobody changes while arrays are asked for */
}

static PyObject *take_parameters(const py_optimizer *self, PyObject *list)
{
    PyObject *tuple = take_list(self, list, "parameters");
    for (int32_t i = 0; tuple != NULL && i < self->count; i++) {
        if (PyTuple_GetItem(tuple, i) == Py_None) {
            PyErr_Format(PyExc_TypeError, "parameters[%d] is None, expected an array", (int)i);
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* The attribute `grad` of each. */
static PyObject *gradients_of(const py_optimizer *self, PyObject *parameters)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("grad")) == NULL) {
        return NULL;
    }
    PyObject *gradients = PyTuple_New(self->count);
    for (int32_t i = 0; gradients != NULL && i < self->count; i++) {
        PyObject *gradient = PyObject_GetAttr(PyTuple_GetItem(parameters, i), name);
        if (gradient == NULL || PyTuple_SetItem(gradients, i, gradient) < 0) {
            Py_CLEAR(gradients);
        }
    }
    return gradients;
}

/* The parameters that have a gradient, as a list; NULL without an exception where all have one. */
static PyObject *list_present(const py_optimizer *self, PyObject *parameters, PyObject *gradients)
{
    int32_t missing = 0;
    for (int32_t i = 0; i < self->count; i++) {
        missing += PyTuple_GetItem(gradients, i) == Py_None;
    }
    PyObject *list = missing == 0 && self->count > 0 ? NULL : PyList_New(0);
    for (int32_t i = 0; list != NULL && i < self->count; i++) {
        if (PyTuple_GetItem(gradients, i) != Py_None && PyList_Append(list, PyTuple_GetItem(parameters, i)) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *step_or_rest(py_optimizer *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    PyObject *present = list_present(self, parameters, gradients);
    if (PyErr_Occurred() || (present != NULL && PyList_Size(present) == 0)) {
        return present;
    }
    PyObject *result = step(self, parameters, gradients, values);
    if (result == Py_None && present != NULL) {
        Py_DECREF(result);
        return present;
    }
    Py_XDECREF(present);
    return result;
}

PyObject *py_optimizer_step(PyObject *object, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"parameters", "gradients", "grad_scale", "found_inf", "stream", NULL};
    py_optimizer *self = (py_optimizer *)object;
    PyObject *values[5];
    if (py_arguments("step", names, 1, args, count, keywords, values) < 0 || py_optimizer_enter(self) < 0) {
        return NULL;
    }
    PyObject *parameters = NULL;
    PyObject *gradients = NULL;
    PyObject *result = NULL;
    if (self->optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer has no parameters yet; add a group first");
    } else if ((parameters = take_parameters(self, values[0])) != NULL) {
        bool given = values[1] != NULL && values[1] != Py_None;
        gradients = given ? take_list(self, values[1], "gradients") : gradients_of(self, parameters);
        result = gradients == NULL ? NULL : step_or_rest(self, parameters, gradients, values);
    }
    Py_XDECREF(parameters);
    Py_XDECREF(gradients);
    py_optimizer_leave(self);
    return result;
}

PyObject *py_same_items(PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords)
{
    static const char *const names[] = {"a", "b", NULL};
    PyObject *lists[2];
    (void)module;
    if (py_arguments("same_items", names, 2, args, count, keywords, lists) < 0) {
        return NULL;
    }
    if (!PyList_Check(lists[0]) || !PyList_Check(lists[1])) {
        PyErr_SetString(PyExc_TypeError, "a and b must be lists");
        return NULL;
    }
    Py_ssize_t size = PyList_Size(lists[0]);
    bool same = size == PyList_Size(lists[1]);
    for (Py_ssize_t i = 0; same && i < size; i++) {
        same = PyList_GetItem(lists[0], i) == PyList_GetItem(lists[1], i);
    }
    return PyBool_FromLong(same);
}

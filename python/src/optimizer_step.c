/* Optimizer.step: all arrays of a step in one call. Usually they are PyTorch's and the parameters have not moved, so
 * that one check per parameter and one per gradient suffice. Otherwise moved parameters are followed, and a parameter
 * that has become another tensor (shape, type, layout or device) is reported before anything has changed. */
#include "optimizer.h"

#include "arguments.h"

enum { FITS = -1 };

/* --- moved parameters -------------------------------------------------------------------------------------------- */

static int32_t first_unlike(const py_session *self)
{
    for (int32_t i = 0; i < self->count; i++) {
        if (!py_same_form(&self->places[i]->tensor, self->step.tensors[i])) {
            return i;
        }
    }
    return FITS;
}

/* One pass over the moved ones; *left is the first whose memory another parameter still occupies. */
static int32_t follow_once(py_session *self, int32_t *left)
{
    int32_t followed = 0;
    *left = FITS;
    for (int32_t i = 0; i < self->count; i++) {
        tch_tensor *now = self->step.tensors[i];
        if (py_data_of(now) == py_data_of(&self->places[i]->tensor)) {
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

/* The index of a parameter that cannot be followed, or FITS. */
static int32_t follow_parameters(py_session *self)
{
    int32_t left = first_unlike(self);
    if (left != FITS) {
        return left;
    }
    while (follow_once(self, &left) > 0 && left != FITS) {
    }
    return left;
}

/* --- the general path -------------------------------------------------------------------------------------------- */

static PyObject *run_step(py_session *self, const py_stream *stream)
{
    tch_tensor *const *tensors = self->step.tensors;
    const tch_tensor *const *gradients = (const tch_tensor *const *)(tensors + self->count);
    tch_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tch_optimizer_step_scaled(self->optimizer, self->count, gradients, tensors[2 * self->count],
                                       tensors[2 * self->count + 1]);
    if (status == TCH_OK && stream->wait) {
        status = tch_context_synchronize(self->on.context);
    }
    Py_END_ALLOW_THREADS;
    if (status != TCH_OK) {
        py_session_fail(self, status);
        return NULL;
    }
    return Py_NewRef(Py_None);
}

/* Any step: arrays of any library, and parameters that may have moved. */
static PyObject *step_any(py_session *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    py_stream stream;
    int32_t n = self->count;
    const py_operands *o = &self->step;
    for (int32_t i = 0; i < n; i++) {
        const py_place *place = self->places[i];
        o->operands[i] = (py_operand){PyTuple_GetItem(parameters, i), place->label, PY_WRITTEN | PY_WHOLE};
        o->operands[n + i] = (py_operand){PyTuple_GetItem(gradients, i), place->gradient_label, PY_WHOLE};
    }
    o->operands[2 * n] = (py_operand){values[2], "grad_scale", 0};
    o->operands[2 * n + 1] = (py_operand){values[3], "found_inf", 0};
    if (py_runner_take(&self->on, o, 2 * n + 2, values[4], &stream) < 0) {
        return NULL;
    }
    int32_t unlike = follow_parameters(self);
    PyObject *result = unlike != FITS ? PyLong_FromLong(unlike) : run_step(self, &stream);
    py_arrays_release(o->arrays, o->tensors, 2 * n + 2);
    return result;
}

/* --- the fast path ----------------------------------------------------------------------------------------------- */

/* Describes the object by the table of its type, if any. */
static bool look_at(PyObject *object, const DLPackExchange *table, tch_tensor *now)
{
    return table != NULL && table->borrow(object, now) == 0 && now->ndim >= 0 && now->ndim <= TCH_MAX_RANK &&
           (now->ndim == 0 || now->shape != NULL);
}

static bool is_in_place(PyObject *parameter, const py_place *place)
{
    tch_tensor now;
    return look_at(parameter, py_table_of(parameter), &now) && py_data_of(&now) == py_data_of(&place->tensor) &&
           py_same_form(&now, &place->tensor);
}

/* Asking PyTorch whether a gradient is lazily negated or its storage was shrunk takes longer than fetching it, so only
 * tensors other than those of the last step are checked. A tensor is identified by its object, the address of its
 * sizes, which is inside the tensor, and its memory, which changes when a storage is resized. */
static bool is_known(const py_place *place, PyObject *gradient, const tch_tensor *now)
{
    return place->gradient == gradient && place->sizes == now->shape && place->data == py_data_of(now);
}

static bool ask_gradient(py_place *place, PyObject *gradient, const tch_tensor *now)
{
    place->gradient = gradient;
    place->sizes = now->shape;
    place->data = py_data_of(now);
    if (py_is_shrunk(gradient, now) != 0 || py_is_negated(gradient) != 0) {
        place->gradient = NULL;
        return false;
    }
    return true;
}

/* The tensor of a gradient, with the shape and strides of its parameter if they agree. Not owned: the caller holds all
 * gradients. False if it must take the general path, perhaps with an exception set. */
static bool take_gradient(py_session *self, int32_t i, PyObject *gradient, bool *asked)
{
    int32_t at = self->count + i;
    py_array *array = &self->step.arrays[at];
    const tch_tensor *like = &self->places[i]->tensor;
    tch_tensor now;
    self->step.tensors[at] = NULL;
    if (gradient == Py_None) {
        return true;
    }
    array->table = py_table_of(gradient);
    if (!look_at(gradient, array->table, &now)) {
        return false;
    }
    if (!is_known(self->places[i], gradient, &now)) {
        *asked = true;
        return ask_gradient(self->places[i], gradient, &now);
    }
    self->step.operands[at] = (py_operand){gradient, self->places[i]->gradient_label, PY_WHOLE};
    self->step.tensors[at] = &array->tensor;
    if (now.data == NULL || !py_same_form(&now, like)) {
        return py_array_adopt(array, &self->step.operands[at], &now) == 0;
    }
    array->tensor = now;
    array->tensor.shape = like->shape;
    array->tensor.strides = like->strides;
    return true;
}

static bool is_borrowed_or_absent(PyObject *object)
{
    return object == NULL || object == Py_None || py_table_of(object) != NULL;
}

/* Whether no parameter has moved, and all other arrays are PyTorch's. Checking a gradient may run a subclass's methods,
 * which may change anything: then all arrays are checked again. */
static bool is_usual(py_session *self, PyObject *parameters, PyObject *gradients)
{
    bool asked = true;
    for (int pass = 0; pass < 2 && asked; pass++) {
        asked = false;
        for (int32_t i = 0; i < self->count; i++) {
            if (!take_gradient(self, i, PyTuple_GetItem(gradients, i), &asked)) {
                PyErr_Clear();
                return false;
            }
        }
    }
    for (int32_t i = 0; i < self->count && !asked; i++) {
        if (!is_in_place(PyTuple_GetItem(parameters, i), self->places[i])) {
            PyErr_Clear();
            return false;
        }
    }
    return !asked;
}

/* The rare grad_scale and found_inf come first: reading them may run code, too. */
static PyObject *step_usual(py_session *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    py_stream stream;
    const py_operands *o = &self->step;
    int32_t n = self->count, last = 2 * n;
    bool given = values[4] != NULL && values[4] != Py_None;
    PyObject *result = NULL;
    if (!is_borrowed_or_absent(values[2]) || !is_borrowed_or_absent(values[3])) {
        return step_any(self, parameters, gradients, values);
    }
    o->operands[last] = (py_operand){values[2], "grad_scale", 0};
    o->operands[last + 1] = (py_operand){values[3], "found_inf", 0};
    if (py_arrays_take(o->arrays + last, o->tensors + last, o->operands + last, 2, values[4], &stream) < 0) {
        return NULL;
    }
    bool usual = is_usual(self, parameters, gradients);
    if (usual && (given || py_arrays_stream(o->arrays + n, o->tensors + n, o->operands + n, n, &stream) == 0)) {
        if (self->on.device.type == TCH_DEVICE_CPU) {
            py_arrays_device(o->tensors + n, n + 2); /* page-locked memory counts as the CPU's */
        }
        result = py_runner_follow(&self->on, stream.handle) == 0 ? run_step(self, &stream) : NULL;
    }
    py_arrays_release(o->arrays + last, o->tensors + last, 2);
    return usual ? result : step_any(self, parameters, gradients, values);
}

static PyObject *take_list(const py_session *self, PyObject *list, const char *name)
{
    if (!PyList_Check(list) || PyList_Size(list) != self->count) {
        PyErr_Format(PyList_Check(list) ? PyExc_ValueError : PyExc_TypeError,
                     "%s must be a list with an entry for each of the %d parameters", name, (int)self->count);
        return NULL;
    }
    return PyList_AsTuple(list); /* immutable while arrays are read */
}

static PyObject *take_parameters(const py_session *self, PyObject *list)
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

/* The attribute `grad` of each parameter. */
static PyObject *gradients_of(const py_session *self, PyObject *parameters)
{
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("grad")) == NULL) {
        return NULL;
    }
    PyObject *gradients = PyTuple_New(self->count);
    for (int32_t i = 0; gradients != NULL && i < self->count; i++) {
        PyObject *gradient = PyObject_GetAttr(PyTuple_GetItem(parameters, i), name);
        if (gradient == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "parameters[%d] has no attribute 'grad', and no gradients are given", (int)i);
        }
        if (gradient == NULL || PyTuple_SetItem(gradients, i, gradient) < 0) {
            Py_CLEAR(gradients);
        }
    }
    return gradients;
}

/* The parameters with a gradient, as a list; NULL without an exception if all have one. */
static PyObject *list_present(const py_session *self, PyObject *parameters, PyObject *gradients)
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

static PyObject *step_or_rest(py_session *self, PyObject *parameters, PyObject *gradients, PyObject *const *values)
{
    PyObject *present = list_present(self, parameters, gradients);
    bool nothing = present != NULL && PyList_Size(present) == 0;
    if (PyErr_Occurred() || (nothing && self->comm == NULL)) { /* all ranks of a group take part in every step */
        return present;
    }
    PyObject *result = step_usual(self, parameters, gradients, values);
    if (result == Py_None && present != NULL) {
        Py_DECREF(result);
        return present;
    }
    Py_XDECREF(present);
    return result;
}

PyObject *py_optimizer_step(PY_ARGUMENTS)
{
    PY_TAKE("step", 1, "parameters", "gradients", "grad_scale", "found_inf", "stream");
    py_session *self = (py_session *)object;
    if (py_runner_enter(&self->on) < 0) {
        return NULL;
    }
    PyObject *parameters = NULL;
    PyObject *gradients = NULL;
    PyObject *result = NULL;
    if (self->optimizer == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this optimizer has no parameters yet; add a group first");
    } else if ((parameters = take_parameters(self, v[0])) != NULL) {
        bool given = v[1] != NULL && v[1] != Py_None;
        gradients = given ? take_list(self, v[1], "gradients") : gradients_of(self, parameters);
        result = gradients == NULL ? NULL : step_or_rest(self, parameters, gradients, v);
    }
    Py_XDECREF(parameters);
    Py_XDECREF(gradients);
    py_runner_leave(&self->on);
    return result;
}

PyObject *py_same_items(PY_ARGUMENTS)
{
    PY_TAKE("same_items", 2, "a", "b");
    if (!PyList_Check(v[0]) || !PyList_Check(v[1])) {
        PyErr_SetString(PyExc_TypeError, "a and b must be lists");
        return NULL;
    }
    Py_ssize_t size = PyList_Size(v[0]);
    bool same = size == PyList_Size(v[1]);
    for (Py_ssize_t i = 0; same && i < size; i++) {
        same = PyList_GetItem(v[0], i) == PyList_GetItem(v[1], i);
    }
    return PyBool_FromLong(same);
}

/* Descriptions of arrays are copied, so that they stay valid if the object changes; the library validates shapes,
 * strides and devices. */
#include "arrays.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"

/* --- rejected arrays --------------------------------------------------------------------------------------------- */

/* The first line of an exception's message, since PyTorch appends stack traces. NULL if there is none. */
static PyObject *first_line(PyObject *value)
{
    PyObject *text = value != NULL ? PyObject_Str(value) : NULL;
    if (text == NULL) {
        PyErr_Clear();
        return NULL;
    }
    Py_ssize_t end = PyUnicode_FindChar(text, '\n', 0, PyUnicode_GetLength(text), 1);
    if (end >= 0) {
        PyObject *line = PyUnicode_Substring(text, 0, end);
        Py_DECREF(text);
        return line;
    }
    return text;
}

/* Exceptions that are not about the array (an interrupt, no memory) are passed on unchanged. */
static bool is_about_array(void)
{
    return PyErr_ExceptionMatches(PyExc_Exception) && !PyErr_ExceptionMatches(PyExc_MemoryError);
}

int py_array_refuse(PyObject *exception, const py_operand *operand, const char *why)
{
    if (PyErr_Occurred() && !is_about_array()) {
        return -1;
    }
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyErr_NormalizeException(&kind, &value, &trace);
    PyObject *type = py_type_name(operand->object);
    PyObject *text = first_line(value);
    if (type != NULL && text != NULL) {
        PyErr_Format(exception, "%s (of type %U) %s: %U", operand->name, type, why, text);
    } else if (type != NULL) {
        PyErr_Format(exception, "%s (of type %U) %s", operand->name, type, why);
    }
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(kind);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return -1;
}

/* --- one array --------------------------------------------------------------------------------------------------- */

const char *py_dtype_text(tch_dtype dtype, char *text, size_t size)
{
    static const char *const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    if (dtype.code >= sizeof kinds / sizeof kinds[0] || dtype.lanes != 1) {
        snprintf(text, size, "of code %u, %u bits, %u lanes", dtype.code, dtype.bits, dtype.lanes);
    } else if (dtype.code == 6) {
        snprintf(text, size, "bool");
    } else {
        snprintf(text, size, "%s%u", kinds[dtype.code], dtype.bits);
    }
    return text;
}

static int refuse_dtype(const py_operand *operand, tch_dtype dtype)
{
    char text[64];
    const char *expected = dtype.code == 5
                               ? ": complex numbers are not supported, expected float16, bfloat16, float32 or float64"
                               : ", expected float16, bfloat16, float32, float64, int32 or int64";
    PyErr_Format(PyExc_TypeError, "%s has dtype %s%s", operand->name, py_dtype_text(dtype, text, sizeof text),
                 expected);
    return -1;
}

int py_array_adopt(py_array *array, const py_operand *operand, const tch_tensor *given)
{
    if (given->ndim < 0 || given->ndim > TCH_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions, expected at most %d", operand->name, (int)given->ndim,
                     TCH_MAX_RANK);
        return -1;
    }
    if ((operand->use & PY_ANY_DTYPE) == 0 && tch_dtype_size(given->dtype) == 0) {
        return refuse_dtype(operand, given->dtype);
    }
    if (given->ndim > 0 && given->shape == NULL) {
        return py_array_refuse(PyExc_TypeError, operand, "gave an array without a shape");
    }
    if (given->data == NULL && tch_tensor_numel(given) != 0) {
        return py_array_refuse(PyExc_TypeError, operand, "has no storage");
    }
    array->tensor = *given;
    if (given->device.type == TCH_DEVICE_CPU) {
        array->tensor.device.index = 0; /* JAX numbers CPU devices; the library has one */
    }
    array->tensor.shape = array->shape;
    array->tensor.strides = NULL;
    for (int32_t i = 0; i < given->ndim; i++) {
        array->shape[i] = given->shape[i];
    }
    if (given->strides != NULL) {
        memcpy(array->strides, given->strides, (size_t)given->ndim * sizeof(int64_t));
        array->tensor.strides = array->strides;
    }
    return 0;
}

int64_t py_stride_of(const tch_tensor *tensor, int32_t k)
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

bool py_same_form(const tch_tensor *a, const tch_tensor *b)
{
    bool same = a->ndim == b->ndim && tch_dtype_equal(a->dtype, b->dtype) && a->device.type == b->device.type &&
                a->device.index == b->device.index;
    for (int32_t k = 0; same && k < a->ndim; k++) {
        same = a->shape[k] == b->shape[k] && (a->shape[k] <= 1 || py_stride_of(a, k) == py_stride_of(b, k));
    }
    return same;
}

const char *py_data_of(const tch_tensor *tensor)
{
    return tensor->data == NULL ? NULL : (const char *)tensor->data + tensor->byte_offset;
}

static int refuse_shrunk(const py_array *array, const py_operand *operand)
{
    int shrunk = (operand->use & PY_WHOLE) != 0 ? py_is_shrunk(operand->object, &array->tensor) : 0;
    if (shrunk < 0) {
        return py_array_refuse(PyExc_TypeError, operand, "cannot be used as an array");
    }
    return shrunk == 0 ? 0
                       : py_array_refuse(PyExc_ValueError, operand,
                                         "has less memory than its shape needs: its storage was resized");
}

static int refuse_negated(const py_operand *operand)
{
    int negated = py_is_negated(operand->object);
    if (negated < 0) {
        return py_array_refuse(PyExc_TypeError, operand, "cannot be used as an array");
    }
    return negated ? py_array_refuse(PyExc_TypeError, operand, "is lazily negated; use its resolve_neg()") : 0;
}

int py_array_borrow(py_array *array, const py_operand *operand, const DLPackExchange *table)
{
    if (refuse_negated(operand) < 0 || py_array_borrow_new(array, operand, table) < 0) {
        return -1;
    }
    if (refuse_shrunk(array, operand) < 0) {
        Py_CLEAR(array->owner);
        return -1;
    }
    return 0;
}

int py_array_borrow_new(py_array *array, const py_operand *operand, const DLPackExchange *table)
{
    tch_tensor given;
    if (table->borrow(operand->object, &given) != 0) {
        return py_array_refuse(PyExc_TypeError, operand, "cannot be used as an array");
    }
    if (py_array_adopt(array, operand, &given) < 0) {
        return -1;
    }
    array->table = table;
    array->owner = Py_NewRef(operand->object);
    array->versioned = NULL;
    array->unversioned = NULL;
    return 0;
}

static void release_array(py_array *array)
{
    if (array->versioned != NULL && array->versioned->deleter != NULL) {
        array->versioned->deleter(array->versioned);
    }
    if (array->unversioned != NULL && array->unversioned->deleter != NULL) {
        array->unversioned->deleter(array->unversioned);
    }
    Py_XDECREF(array->owner);
}

/* --- all arrays of a call ---------------------------------------------------------------------------------------- */

int py_operands_make(py_operands *operands, size_t count)
{
    *operands =
        (py_operands){PyMem_Calloc(count + 1, sizeof *operands->operands),
                      PyMem_Calloc(count + 1, sizeof *operands->arrays), PyMem_Calloc(count + 1, sizeof(void *))};
    if (operands->operands == NULL || operands->arrays == NULL || operands->tensors == NULL) {
        py_operands_free(operands);
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

void py_operands_free(py_operands *operands)
{
    PyMem_Free(operands->operands);
    PyMem_Free(operands->arrays);
    PyMem_Free((void *)operands->tensors);
    *operands = (py_operands){NULL, NULL, NULL};
}

static bool is_absent(const py_operand *operand)
{
    return operand->object == NULL || operand->object == Py_None;
}

int py_ask_torch(py_question *question)
{
    if (question->function_name == NULL) {
        question->module_name = PyUnicode_InternFromString(question->module);
        question->function_name = PyUnicode_InternFromString(question->function);
    }
    bool named = question->module_name != NULL && question->function_name != NULL;
    PyObject *module = named ? PyDict_GetItemWithError(PyImport_GetModuleDict(), question->module_name) : NULL;
    Py_XINCREF(module);
    PyObject *function = module != NULL ? PyObject_GetAttr(module, question->function_name) : NULL;
    PyObject *answer = function != NULL ? PyObject_CallNoArgs(function) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(function);
    Py_XDECREF(answer);
    return PyErr_Occurred() ? -1 : answer == Py_True;
}

int py_arrays_stream(const py_array *arrays, tch_tensor *const *tensors, const py_operand *operands, int count,
                     py_stream *stream)
{
    for (int i = 0; i < count; i++) {
        if (tensors[i] == NULL || tensors[i]->device.type != TCH_DEVICE_CUDA) {
            continue;
        }
        if (arrays[i].table->current_stream(TCH_DEVICE_CUDA, tensors[i]->device.index, &stream->handle) != 0) {
            return py_array_refuse(PyExc_RuntimeError, &operands[i], "did not tell its stream");
        }
        stream->asked = true;
        return 0;
    }
    return 0;
}

static int check_present(const py_operand *operands, int count)
{
    for (int i = 0; i < count; i++) {
        if ((operands[i].use & PY_REQUIRED) != 0 && is_absent(&operands[i])) {
            PyErr_Format(PyExc_TypeError, "%s must be an array, got None", operands[i].name);
            return -1;
        }
    }
    return 0;
}

static int borrow_all(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count)
{
    for (int i = 0; i < count; i++) {
        const DLPackExchange *table = is_absent(&operands[i]) ? NULL : py_table_of(operands[i].object);
        if (table != NULL) {
            if (py_array_borrow(&arrays[i], &operands[i], table) < 0) {
                return -1;
            }
            tensors[i] = &arrays[i].tensor;
        }
    }
    return 0;
}

/* Returns how many were imported, or -1. */
static int import_others(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count, void *stream)
{
    int imported = 0;
    for (int i = 0; i < count; i++) {
        if (tensors[i] == NULL && !is_absent(&operands[i])) {
            if (refuse_negated(&operands[i]) < 0 || py_array_import(&arrays[i], &operands[i], stream) < 0) {
                return -1;
            }
            tensors[i] = &arrays[i].tensor;
            imported++;
            if (refuse_shrunk(&arrays[i], &operands[i]) < 0) {
                return -1;
            }
        }
    }
    return imported;
}

/* Subclasses of tensors may override methods, and importing ran code of other libraries: either may have changed arrays
 * borrowed earlier. Compares by the table alone, which runs no such code. */
static int check_unchanged(const py_array *arrays, tch_tensor *const *tensors, const py_operand *operands, int count)
{
    for (int i = 0; i < count; i++) {
        tch_tensor now;
        if (tensors[i] == NULL || arrays[i].table == NULL) {
            continue;
        }
        if (arrays[i].table->borrow(operands[i].object, &now) != 0) {
            return py_array_refuse(PyExc_TypeError, &operands[i], "cannot be used as an array");
        }
        if (py_data_of(&now) != py_data_of(tensors[i]) || !py_same_form(&now, tensors[i])) {
            return py_array_refuse(PyExc_ValueError, &operands[i],
                                   "was changed while the arrays of the call were read");
        }
    }
    return 0;
}

static bool any_on_gpu(const py_array *arrays, tch_tensor *const *tensors, int count, bool borrowed)
{
    for (int i = 0; i < count; i++) {
        if (tensors[i] != NULL && tensors[i]->device.type == TCH_DEVICE_CUDA && (arrays[i].table != NULL) == borrowed) {
            return true;
        }
    }
    return false;
}

static int take_all(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count, PyObject *given,
                    py_stream *stream)
{
    bool is_given = given != NULL && given != Py_None;
    int64_t number = 0;
    if (is_given && py_take_int(given, "stream", 0, INT64_MAX, &number) < 0) {
        return -1;
    }
    stream->handle = (void *)(uintptr_t)number;
    if (check_present(operands, count) < 0 || borrow_all(arrays, tensors, operands, count) < 0 ||
        (!is_given && py_arrays_stream(arrays, tensors, operands, count, stream) < 0)) {
        return -1;
    }
    int imported = import_others(arrays, tensors, operands, count, stream->handle);
    if (imported < 0 || check_unchanged(arrays, tensors, operands, count) < 0) {
        return -1;
    }
    stream->wait = imported > 0 && !is_given && any_on_gpu(arrays, tensors, count, false);
    stream->passing = is_given && stream->handle != NULL && !any_on_gpu(arrays, tensors, count, true);
    return 0;
}

int py_arrays_take(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count, PyObject *given,
                   py_stream *stream)
{
    *stream = (py_stream){.handle = NULL};
    for (int i = 0; i < count; i++) {
        tensors[i] = NULL;
    }
    if (take_all(arrays, tensors, operands, count, given, stream) < 0) {
        py_arrays_release(arrays, tensors, count);
        return -1;
    }
    return 0;
}

void py_arrays_release(py_array *arrays, tch_tensor *const *tensors, int count)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    for (int i = 0; i < count; i++) {
        if (tensors[i] != NULL) {
            release_array(&arrays[i]);
        }
    }
    PyErr_Restore(kind, value, trace);
}

tch_device py_arrays_device(tch_tensor *const *tensors, int count)
{
    for (int i = 0; i < count; i++) {
        if (tensors[i] != NULL && tensors[i]->device.type == TCH_DEVICE_CUDA) {
            return tensors[i]->device;
        }
    }
    tch_device cpu = {TCH_DEVICE_CPU, 0};
    for (int i = 0; i < count; i++) {
        if (tensors[i] != NULL && tensors[i]->device.type == TCH_DEVICE_CUDA_HOST) {
            tensors[i]->device = cpu;
        }
    }
    return cpu;
}

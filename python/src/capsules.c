/* Imports arrays through Python's __dlpack__. A capsule belongs to whoever renames it, and its deleter is called
 * exactly once, when the call is over. */
#include "arrays.h"

#include <string.h>

#include "arguments.h"

/* Created once, by py_capsules_register. */
static struct {
    PyObject *dlpack, *dlpack_device, *max_version, *stream, *version, *no_arguments;
} constants;

int py_capsules_register(void)
{
    constants.dlpack = PyUnicode_InternFromString("__dlpack__");
    constants.dlpack_device = PyUnicode_InternFromString("__dlpack_device__");
    constants.max_version = PyUnicode_InternFromString("max_version");
    constants.stream = PyUnicode_InternFromString("stream");
    constants.version = Py_BuildValue("(ii)", DLPACK_MAJOR, 0);
    constants.no_arguments = PyTuple_New(0);
    bool failed = constants.dlpack == NULL || constants.dlpack_device == NULL || constants.max_version == NULL ||
                  constants.stream == NULL || constants.version == NULL || constants.no_arguments == NULL;
    return failed ? -1 : 0;
}

/* Libraries with immutable arrays, though their capsules do not always say so. */
static bool is_immutable(PyObject *object)
{
    static const char *const names[] = {"jax", "tensorflow"};
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    const char *text = module != NULL && PyUnicode_Check(module) ? PyUnicode_AsUTF8AndSize(module, NULL) : NULL;
    bool found = false;
    for (size_t i = 0; text != NULL && i < sizeof names / sizeof names[0]; i++) {
        found = found || strncmp(text, names[i], strlen(names[i])) == 0;
    }
    Py_XDECREF(module);
    PyErr_Clear();
    return found;
}

/* --- requesting the capsule -------------------------------------------------------------------------------------- */

/* The device as reported by the object. Only its type matters here: arrays on a GPU are requested with a stream. */
static int device_kind(const py_operand *operand, int64_t *kind)
{
    PyObject *method = PyObject_GetAttr(operand->object, constants.dlpack_device);
    if (method == NULL) {
        PyErr_Clear();
        return py_array_refuse(PyExc_TypeError, operand,
                               "is not an array: expected a torch tensor or an array that speaks DLPack");
    }
    PyObject *pair = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    PyObject *first = pair != NULL && PyTuple_Check(pair) && PyTuple_Size(pair) == 2 ? PyTuple_GetItem(pair, 0) : NULL;
    int failed = first == NULL || py_take_int(first, "the device", INT32_MIN, INT32_MAX, kind) < 0;
    Py_XDECREF(pair);
    return failed ? py_array_refuse(PyExc_TypeError, operand, "does not tell its device") : 0;
}

/* {"max_version": (1, 0)} and, for a GPU, {"stream": number}; the default stream is 1. */
static PyObject *request_keywords(bool versioned, bool on_gpu, void *stream)
{
    PyObject *keywords = PyDict_New();
    PyObject *number = on_gpu ? PyLong_FromUnsignedLongLong(stream == NULL ? 1 : (uintptr_t)stream) : NULL;
    bool failed = keywords == NULL || (on_gpu && number == NULL) ||
                  (versioned && PyDict_SetItem(keywords, constants.max_version, constants.version) < 0) ||
                  (on_gpu && PyDict_SetItem(keywords, constants.stream, number) < 0);
    Py_XDECREF(number);
    if (failed) {
        Py_CLEAR(keywords);
    }
    return keywords;
}

static PyObject *ask_for_capsule(PyObject *method, bool versioned, bool on_gpu, void *stream)
{
    PyObject *keywords = request_keywords(versioned, on_gpu, stream);
    PyObject *capsule = keywords != NULL ? PyObject_Call(method, constants.no_arguments, keywords) : NULL;
    Py_XDECREF(keywords);
    return capsule;
}

/* Libraries older than DLPack 1.0 raise TypeError for max_version. */
static PyObject *capsule_of(PyObject *object, bool on_gpu, void *stream)
{
    PyObject *method = PyObject_GetAttr(object, constants.dlpack);
    if (method == NULL) {
        return NULL;
    }
    PyObject *capsule = ask_for_capsule(method, true, on_gpu, stream);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        capsule = ask_for_capsule(method, false, on_gpu, stream);
    }
    Py_DECREF(method);
    return capsule;
}

/* PyTorch before 2.10 does not export tensors that require gradients; detached, it does. If the second attempt fails
 * too, the exception of the first is kept. */
static PyObject *capsule_without_history(PyObject *object, bool on_gpu, void *stream)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *method = PyObject_GetAttrString(object, "detach");
    PyObject *detached = method != NULL ? PyObject_CallNoArgs(method) : NULL;
    PyObject *capsule = detached != NULL ? capsule_of(detached, on_gpu, stream) : NULL;
    Py_XDECREF(method);
    Py_XDECREF(detached);
    if (capsule != NULL) {
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    } else {
        PyErr_Restore(kind, value, trace);
    }
    return capsule;
}

/* --- reading it -------------------------------------------------------------------------------------------------- */

static int open_versioned(py_array *array, const py_operand *operand, PyObject *capsule)
{
    DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (managed == NULL || PyCapsule_SetName(capsule, "used_dltensor_versioned") != 0) {
        return -1;
    }
    array->versioned = managed;
    if (managed->version.major != DLPACK_MAJOR) {
        return py_array_refuse(PyExc_TypeError, operand, "gave a capsule of another DLPack than 1");
    }
    bool written = (operand->use & PY_WRITTEN) != 0;
    if (written && (managed->flags & DLPACK_READ_ONLY) != 0) {
        return py_array_refuse(PyExc_ValueError, operand, "is read-only, and would be written to");
    }
    if (written && (managed->flags & DLPACK_IS_COPIED) != 0) {
        return py_array_refuse(PyExc_ValueError, operand, "gave a copy of itself, and would be written to");
    }
    return py_array_adopt(array, operand, &managed->tensor);
}

static int open_unversioned(py_array *array, const py_operand *operand, PyObject *capsule)
{
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (managed == NULL || PyCapsule_SetName(capsule, "used_dltensor") != 0) {
        return -1;
    }
    array->unversioned = managed;
    return py_array_adopt(array, operand, &managed->tensor);
}

static int open_capsule(py_array *array, const py_operand *operand, PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        return open_versioned(array, operand, capsule);
    }
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        return open_unversioned(array, operand, capsule);
    }
    if (PyCapsule_IsValid(capsule, "used_dltensor_versioned") || PyCapsule_IsValid(capsule, "used_dltensor")) {
        return py_array_refuse(PyExc_TypeError, operand, "gave a capsule that was used before");
    }
    return py_array_refuse(PyExc_TypeError, operand, "gave something else than a DLPack capsule");
}

int py_array_import(py_array *array, const py_operand *operand, void *stream)
{
    array->table = NULL;
    array->owner = NULL;
    array->versioned = NULL;
    array->unversioned = NULL;
    int64_t kind = 0;
    if ((operand->use & PY_WRITTEN) != 0 && is_immutable(operand->object)) {
        return py_array_refuse(PyExc_ValueError, operand, "is of a library whose arrays are never written to");
    }
    if (device_kind(operand, &kind) < 0) {
        return -1;
    }
    PyObject *capsule = capsule_of(operand->object, kind == TCH_DEVICE_CUDA, stream);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        capsule = capsule_without_history(operand->object, kind == TCH_DEVICE_CUDA, stream);
    }
    if (capsule == NULL) {
        bool buffer = PyErr_ExceptionMatches(PyExc_BufferError);
        return py_array_refuse(buffer ? PyExc_ValueError : PyExc_TypeError, operand, "cannot be used as an array");
    }
    int failed = open_capsule(array, operand, capsule);
    Py_DECREF(capsule);
    if (failed) {
        tch_tensor *const tensor = &array->tensor;
        py_arrays_release(array, &tensor, 1);
    }
    return failed;
}

/* The parameter determines the type of an argument: a float for an `int` parameter is an error, not a conversion. The
 * library checks again; here messages name what Python users know. */
#include "kernel.h"

#include <stdio.h>
#include <string.h>

#include "arguments.h"
#include "contexts.h"

/* --- names of parameters ----------------------------------------------------------------------------------------- */

static const char *value_type(tch_parameter_class what, int32_t size, bool brain)
{
    switch (what) {
    case TCH_PARAMETER_INT:
        return size == 1 ? "signed char" : size == 2 ? "short" : size == 4 ? "int" : "long long";
    case TCH_PARAMETER_UINT:
        return size == 1   ? "unsigned char"
               : size == 2 ? "unsigned short"
               : size == 4 ? "unsigned int"
                           : "unsigned long long";
    case TCH_PARAMETER_REAL:
        return size == 8 ? "double" : size == 4 ? "float" : brain ? "__nv_bfloat16" : "__half";
    case TCH_PARAMETER_POINTER:
        return "void *";
    default:
        return "";
    }
}

void py_parameter_describe(py_parameter *parameter, int32_t index)
{
    const tch_kernel_parameter *is = &parameter->is;
    const char *before = is->is_const ? "const " : "";
    if (is->what == TCH_PARAMETER_POINTER && is->pointee == TCH_PARAMETER_OTHER) {
        snprintf(parameter->type, sizeof parameter->type, is->pointee_size == 0 ? "%svoid *" : "%sstruct *", before);
    } else if (is->what == TCH_PARAMETER_POINTER) {
        snprintf(parameter->type, sizeof parameter->type, "%s%s *", before,
                 value_type(is->pointee, is->pointee_size, is->is_brain != 0));
    } else if (is->what == TCH_PARAMETER_OTHER) {
        snprintf(parameter->type, sizeof parameter->type, "struct of %d bytes", (int)is->size);
    } else {
        snprintf(parameter->type, sizeof parameter->type, "%s", value_type(is->what, is->size, is->is_brain != 0));
    }
    snprintf(parameter->label, sizeof parameter->label, "argument %d ('%s')", (int)index + 1, parameter->type);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

py_launch *py_launch_make(int32_t count)
{
    size_t n = (size_t)count;
    size_t each =
        sizeof(tch_kernel_argument) + sizeof(py_operand) + sizeof(py_array) + sizeof(tch_tensor *) + sizeof(PyObject *);
    py_launch *launch = PyMem_Malloc(sizeof *launch + n * each);
    if (launch == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *launch = (py_launch){.count = count};
    launch->arrays = (py_array *)(void *)(launch + 1);
    launch->arguments = (tch_kernel_argument *)(void *)(launch->arrays + n);
    launch->operands = (py_operand *)(void *)(launch->arguments + n);
    launch->tensors = (tch_tensor **)(void *)(launch->operands + n);
    launch->bytes = (PyObject **)(void *)(launch->tensors + n);
    for (int32_t i = 0; i < count; i++) {
        launch->tensors[i] = NULL;
        launch->bytes[i] = NULL;
    }
    return launch;
}

void py_launch_free(py_launch *launch)
{
    py_arrays_release(launch->arrays, launch->tensors, launch->count);
    for (int32_t i = 0; i < launch->count; i++) {
        Py_XDECREF(launch->bytes[i]);
    }
    PyMem_Free(launch);
}

/* --- numbers and structs ----------------------------------------------------------------------------------------- */

/* NumPy's bool is an integer only in C. */
static bool is_numpy_bool(PyObject *object)
{
    PyObject *type = py_type_name(object);
    bool found = type != NULL && (PyUnicode_CompareWithASCIIString(type, "numpy.bool") == 0 ||
                                  PyUnicode_CompareWithASCIIString(type, "numpy.bool_") == 0);
    Py_XDECREF(type);
    return found;
}

/* The library's interface has no integers above 63 bits. */
static int take_integer(PyObject *object, const py_parameter *parameter, tch_kernel_argument *argument)
{
    bool is_signed = parameter->is.what == TCH_PARAMETER_INT;
    int bits = 8 * parameter->is.size - (is_signed ? 1 : 0);
    int64_t high = bits >= 63 ? INT64_MAX : ((int64_t)1 << bits) - 1;
    *argument = (tch_kernel_argument)TCH_ARGUMENT_INT(0);
    if (!PyIndex_Check(object) && is_numpy_bool(object)) {
        argument->integer = PyObject_IsTrue(object) == 1;
        return 0;
    }
    return py_take_int(object, parameter->label, is_signed ? -high - 1 : 0, high, &argument->integer);
}

static int take_real(PyObject *object, const py_parameter *parameter, tch_kernel_argument *argument)
{
    *argument = (tch_kernel_argument)TCH_ARGUMENT_REAL(0.0);
    return py_take_real(object, parameter->label, &argument->real);
}

/* A ctypes or NumPy struct, or bytes, of the parameter's size. */
static int take_struct(PyObject *object, const py_parameter *parameter, tch_kernel_argument *argument, PyObject **bytes)
{
    char *data;
    Py_ssize_t size;
    *bytes = PyUnicode_Check(object) ? NULL : PyBytes_FromObject(object);
    if (*bytes == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear();
        return py_refuse_type(object, parameter->label, "bytes or a struct of ctypes or NumPy");
    }
    if (PyBytes_AsStringAndSize(*bytes, &data, &size) < 0) {
        return -1;
    }
    if (size != parameter->is.size) {
        PyErr_Format(PyExc_ValueError, "%s has %zd bytes, expected %d", parameter->label, size,
                     (int)parameter->is.size);
        return -1;
    }
    *argument = (tch_kernel_argument)TCH_ARGUMENT_BYTES(data, (size_t)size);
    return 0;
}

/* A tensor has __index__ and __float__ too, which would synchronize. */
static int take_value(PyObject *object, const py_parameter *parameter, tch_kernel_argument *argument, PyObject **bytes)
{
    if (parameter->is.what == TCH_PARAMETER_OTHER) {
        return take_struct(object, parameter, argument, bytes);
    }
    if (py_table_of(object) != NULL) {
        return py_refuse_type(object, parameter->label, "a number");
    }
    return parameter->is.what == TCH_PARAMETER_REAL ? take_real(object, parameter, argument)
                                                    : take_integer(object, parameter, argument);
}

/* --- arrays ------------------------------------------------------------------------------------------------------ */

int py_is_watched(PyObject *object)
{
    static py_question is_grad_enabled = {"torch", "is_grad_enabled", NULL, NULL};
    static PyObject *name;
    if (name == NULL && (name = PyUnicode_InternFromString("requires_grad")) == NULL) {
        return -1;
    }
    PyObject *answer = PyObject_GetAttr(object, name);
    Py_XDECREF(answer);
    if (answer == NULL) {
        PyErr_Clear();
    }
    return answer == Py_True ? py_ask_torch(&is_grad_enabled) : 0;
}

static int check_watched(PyObject *object, const py_parameter *parameter)
{
    int watched = parameter->is.is_const ? 0 : py_is_watched(object);
    if (watched > 0) {
        PyErr_Format(PyExc_RuntimeError,
                     "%s requires a gradient, and the kernel may write to it: use torch.no_grad() or its detach(), or "
                     "declare the parameter const",
                     parameter->label);
    }
    return watched == 0 ? 0 : -1;
}

static bool is_of_type(tch_dtype dtype, const tch_kernel_parameter *is)
{
    enum { SIGNED = 0, UNSIGNED = 1, REAL = 2, BRAIN = 4, BOOL = 6 };
    if (is->pointee == TCH_PARAMETER_OTHER || is->pointee == TCH_PARAMETER_POINTER) {
        return true;
    }
    if (dtype.lanes != 1 || dtype.bits != 8 * is->pointee_size) {
        return false;
    }
    if (is->pointee == TCH_PARAMETER_REAL) {
        return dtype.code == (is->is_brain ? BRAIN : REAL);
    }
    return dtype.code == SIGNED || dtype.code == UNSIGNED || dtype.code == BOOL;
}

static int check_array(const tch_tensor *tensor, const py_parameter *parameter, tch_device device, bool strided)
{
    char here[32], there[64];
    if (tensor->device.type != device.type || tensor->device.index != device.index) {
        PyErr_Format(PyExc_ValueError, "%s is on %s, expected %s: all arrays of a launch are on one device",
                     parameter->label, py_device_text(tensor->device, here, sizeof here),
                     py_device_text(device, there, sizeof there));
        return -1;
    }
    if (!is_of_type(tensor->dtype, &parameter->is)) {
        PyErr_Format(PyExc_TypeError, "%s points to another type than the array's elements, which are %s",
                     parameter->label, py_dtype_text(tensor->dtype, there, sizeof there));
        return -1;
    }
    if (!strided && !tch_tensor_is_contiguous(tensor)) {
        PyErr_Format(PyExc_ValueError,
                     "%s is not contiguous: use its contiguous(), or allow_strided=True where the kernel knows the "
                     "strides",
                     parameter->label);
        return -1;
    }
    return 0;
}

static int take_array(py_launch *launch, const py_parameter *parameter, PyObject *object, int32_t index)
{
    int use = PY_ANY_DTYPE | (parameter->is.is_const ? 0 : PY_WRITTEN);
    launch->operands[index] = (py_operand){object, parameter->label, use};
    launch->arguments[index] = (tch_kernel_argument)TCH_ARGUMENT_TENSOR(NULL);
    return object == Py_None ? 0 : check_watched(object, parameter);
}

static int take_arrays(py_launch *launch, const py_parameter *parameters, tch_device device, PyObject *stream)
{
    if (py_arrays_take(launch->arrays, launch->tensors, launch->operands, launch->count, stream, &launch->stream) < 0) {
        memset((void *)launch->tensors, 0, (size_t)launch->count * sizeof(tch_tensor *)); /* nothing to release */
        return -1;
    }
    if (device.type == TCH_DEVICE_CPU) {
        py_arrays_device(launch->tensors, launch->count); /* page-locked memory counts as the CPU's */
        if (stream != NULL && stream != Py_None) {
            PyErr_SetString(PyExc_ValueError, "stream was given for a kernel on the CPU, which has no streams");
            return -1;
        }
    }
    for (int32_t i = 0; i < launch->count; i++) {
        if (launch->tensors[i] == NULL) {
            continue;
        }
        if (check_array(launch->tensors[i], &parameters[i], device, launch->strided) < 0) {
            return -1;
        }
        launch->arguments[i].tensor = launch->tensors[i];
    }
    return 0;
}

int py_launch_take(py_launch *launch, const py_parameter *parameters, PyObject *args, tch_device device,
                   PyObject *stream)
{
    for (int32_t i = 0; i < launch->count; i++) {
        PyObject *object = PyTuple_GetItem(args, i);
        launch->operands[i] = (py_operand){NULL, parameters[i].label, 0};
        int failed = parameters[i].is.what == TCH_PARAMETER_POINTER
                         ? take_array(launch, &parameters[i], object, i)
                         : take_value(object, &parameters[i], &launch->arguments[i], &launch->bytes[i]);
        if (failed < 0) {
            return -1;
        }
    }
    return take_arrays(launch, parameters, device, stream);
}

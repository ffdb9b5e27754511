/* Exceptions: each status maps to the type that Python programmers expect; the message is the library's. */
#include "python.h"

#include <stdbool.h>
#include <string.h>

PyObject *py_out_of_memory_error;
PyObject *py_numeric_error;
PyObject *py_kernel_error;

int py_errors_register(PyObject *module)
{
    const struct {
        const char *name, *text;
        PyObject *base, **exception;
    } rows[] = {
        {"torchium.OutOfMemoryError", "The device or the host has not enough memory for the call.", PyExc_MemoryError,
         &py_out_of_memory_error},
        {"torchium.KernelError", "A kernel does not compile, with the compiler's messages, or there is no compiler.",
         PyExc_RuntimeError, &py_kernel_error},
        {"torchium.NumericError",
         "A matrix is not finite, not symmetric, not positive definite, or an iteration did not converge. The message "
         "names the matrix.",
         PyExc_RuntimeError, &py_numeric_error},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        PyObject **kept = rows[i].exception;
        if (*kept == NULL) {
            *kept = PyErr_NewExceptionWithDoc(rows[i].name, rows[i].text, rows[i].base, NULL);
        }
        if (*kept == NULL || PyModule_AddObjectRef(module, strchr(rows[i].name, '.') + 1, *kept) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *exception_of(tch_status status)
{
    switch (status) {
    case TCH_ERR_INVALID_ARGUMENT:
    case TCH_ERR_SHAPE:
    case TCH_ERR_DEVICE:
    case TCH_ERR_LAYOUT:
        return PyExc_ValueError;
    case TCH_ERR_DTYPE:
        return PyExc_TypeError;
    case TCH_ERR_OUT_OF_MEMORY:
        return py_out_of_memory_error;
    case TCH_ERR_NUMERIC:
        return py_numeric_error;
    case TCH_ERR_IO:
        return PyExc_OSError;
    default:
        return PyExc_RuntimeError;
    }
}

/* Names of the C interface in messages, and their Python equivalents. */
static const struct {
    const char *c, *python;
} words[] = {
    {"tch_matrix_power", "matrix_power"},
    {"copy it there with tch_tensor_copy", "move it there first"},
    {"copy it to a contiguous tensor with tch_tensor_copy", "make it contiguous first"},
    {"; raise it with tch_context_set_workspace_limit", ""},
    {"call tch_scaler_step or tch_scaler_unscale first", "call step or unscale_ first"},
};

/* Skips the C function name that a message may begin with, "tch_name: ": Python's traceback has it. */
static const char *after_function(const char *message)
{
    size_t length = strspn(message, "abcdefghijklmnopqrstuvwxyz0123456789_");
    bool named = strncmp(message, "tch_", 4) == 0 && strncmp(message + length, ": ", 2) == 0;
    return named ? message + length + 2 : message;
}

/* A new reference, or NULL with an exception set. */
static PyObject *in_python(const char *message)
{
    PyObject *text = py_text(after_function(message));
    for (size_t i = 0; i < sizeof words / sizeof words[0] && text != NULL; i++) {
        PyObject *c = py_text(words[i].c), *python = py_text(words[i].python);
        PyObject *replaced = c != NULL && python != NULL ? PyUnicode_Replace(text, c, python, -1) : NULL;
        Py_XDECREF(c);
        Py_XDECREF(python);
        Py_DECREF(text);
        text = replaced;
    }
    return text;
}

PyObject *py_fail(tch_status status)
{
    const char *message = tch_last_error();
    PyObject *text = in_python(message[0] != '\0' ? message : tch_status_text(status));
    if (text != NULL) {
        PyErr_Format(exception_of(status), "%U", text);
        Py_DECREF(text);
    }
    return NULL;
}

PyObject *py_type_name(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    PyObject *module = PyObject_GetAttrString(type, "__module__");
    PyObject *name = PyObject_GetAttrString(type, "__qualname__");
    PyObject *text = NULL;
    if (module != NULL && name != NULL && PyUnicode_Check(module)) {
        bool plain = PyUnicode_CompareWithASCIIString(module, "builtins") == 0;
        text = plain ? PyUnicode_FromFormat("%S", name) : PyUnicode_FromFormat("%U.%S", module, name);
    }
    Py_XDECREF(module);
    Py_XDECREF(name);
    if (text == NULL) {
        PyErr_Clear();
        text = PyUnicode_FromString("an object without a readable type");
    }
    return text;
}

PyObject *py_text(const char *text)
{
    return PyUnicode_FromFormat("%s", text); /* replaces invalid UTF-8 */
}

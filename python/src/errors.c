/* The exceptions. Each status becomes the type that a Python programmer would catch for it; the text is the library's. */
#include "errors.h"

#include <stdio.h>

PyObject *py_out_of_memory_error;
PyObject *py_numeric_error;
PyObject *py_kernel_error;

static int add_exception(PyObject *module, const char *name, const char *text, PyObject *base, PyObject **exception)
{
    if (*exception == NULL) {
        char qualified[64];
        snprintf(qualified, sizeof qualified, "torchium.%s", name);
        *exception = PyErr_NewExceptionWithDoc(qualified, text, base, NULL);
    }
    return *exception == NULL ? -1 : PyModule_AddObjectRef(module, name, *exception);
}

int py_errors_register(PyObject *module)
{
    if (add_exception(module, "OutOfMemoryError", "The device or the host has not enough memory for the call.",
                      PyExc_MemoryError, &py_out_of_memory_error) < 0 ||
        add_exception(module, "KernelError",
                      "A kernel that cannot be compiled: what the compiler says of it, or that there is none.",
                      PyExc_RuntimeError, &py_kernel_error) < 0) {
        return -1;
    }
    return add_exception(module, "NumericError",
                         "The numbers do not allow it: not finite, not symmetric, not positive definite, or no "
                         "convergence. The message names the matrix.",
                         PyExc_RuntimeError, &py_numeric_error);
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

PyObject *py_fail(tch_status status)
{
    const char *message = tch_last_error();
    PyErr_Format(exception_of(status), "%s", message[0] != '\0' ? message : tch_status_text(status));
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
    return PyUnicode_FromFormat("%s", text); /* which replaces what is not UTF-8 */
}

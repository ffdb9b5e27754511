/* CPython, libtorchium and the exceptions, included first by all files of the extension. Only CPython's limited API is
 * used, so that one binary supports every Python from 3.10 on. */
#ifndef TORCHIUM_PYTHON_H
#define TORCHIUM_PYTHON_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030A0000
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <torchium/torchium.h>

/* The parameters of a function in a method table: module or self, arguments, their number, keyword names; with
 * METH_NOARGS; with METH_O. */
#define PY_UNUSED __attribute__((unused))
#define PY_ARGUMENTS PyObject *object PY_UNUSED, PyObject *const *args, Py_ssize_t count, PyObject *keywords
#define PY_NO_ARGUMENTS PyObject *object PY_UNUSED, PyObject *unused PY_UNUSED
#define PY_ONE_ARGUMENT(name) PyObject *object PY_UNUSED, PyObject *name

/* An entry of the table for such a function. */
#define PY_METHOD(name, function, text)                                                                                \
    {                                                                                                                  \
        name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS, text                             \
    }

/* status = expression, a call that returns a status, without the GIL. */
#define PY_UNLOCKED(status, expression)                                                                                \
    do {                                                                                                               \
        Py_BEGIN_ALLOW_THREADS(status) = (expression);                                                                 \
        Py_END_ALLOW_THREADS                                                                                           \
    } while (0)

/* Casts a function to the type of CPython's slot tables. */
#define PY_SLOT(function) ((void *)(uintptr_t)(function))

/* --- errors.c: exceptions for the library's statuses ------------------------------------------------------------- */

/* torchium.OutOfMemoryError, a MemoryError; torchium.NumericError and torchium.KernelError, both RuntimeErrors. */
extern PyObject *py_out_of_memory_error;
extern PyObject *py_numeric_error;
extern PyObject *py_kernel_error;

int py_errors_register(PyObject *module);

/* Sets the exception of a failed call, with the library's message, which is per thread and valid until the thread's
 * next call. Always returns NULL. */
PyObject *py_fail(tch_status status);

/* "numpy.ndarray" or "str": a new reference to the name of an object's type, for messages. */
PyObject *py_type_name(PyObject *object);

/* A string from the library's text, which may be truncated within a character. */
PyObject *py_text(const char *text);

#endif

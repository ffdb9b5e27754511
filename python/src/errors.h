/* From the library's statuses to Python's exceptions. */
#ifndef TORCHIUM_PYTHON_ERRORS_H
#define TORCHIUM_PYTHON_ERRORS_H

#include "python.h"

/* torchium.OutOfMemoryError, a MemoryError; torchium.NumericError and torchium.KernelError, both RuntimeErrors. */
extern PyObject *py_out_of_memory_error;
extern PyObject *py_numeric_error;
extern PyObject *py_kernel_error;

int py_errors_register(PyObject *module);

/* Sets the exception of a failed call, with the library's message. To be called on the thread that made the call,
 * before that thread makes another. Always returns NULL. */
PyObject *py_fail(tch_status status);

/* "numpy.ndarray" or "str": a new reference to the name of an object's type, for messages. */
PyObject *py_type_name(PyObject *object);

/* A string from the library's text, which may have been cut in the middle of a character. */
PyObject *py_text(const char *text);

#endif

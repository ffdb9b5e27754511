/* Argument parsing for the extension: faster than a format string, with messages that name the argument, its value and
 * what was expected. All return 0, or -1 with an exception set. */
#ifndef TORCHIUM_PYTHON_ARGUMENTS_H
#define TORCHIUM_PYTHON_ARGUMENTS_H

#include "python.h"

/* Sorts positional and keyword arguments into `values`, one for each of `names`, which ends in NULL. The first
 * `required` are mandatory; missing optional ones are NULL. References are borrowed. */
int py_arguments(const char *function, const char *const *names, int required, PyObject *const *args, Py_ssize_t count,
                 PyObject *keywords, PyObject **values);

/* In a function with PY_ARGUMENTS: `v`, the values of the named arguments; returns NULL on an error. */
#define PY_TAKE(function, required, ...)                                                                               \
    static const char *const names[] = {__VA_ARGS__, NULL};                                                            \
    PyObject *v[sizeof names / sizeof names[0] - 1];                                                                   \
    if (py_arguments(function, names, required, args, count, keywords, v) < 0) {                                       \
        return NULL;                                                                                                   \
    }

/* Raises TypeError "NAME must be EXPECTED, got an object of type TYPE", without calling repr(). Always -1. */
int py_refuse_type(PyObject *value, const char *name, const char *expected);

/* A real number other than NaN. */
int py_take_real(PyObject *value, const char *name, double *result);
int py_take_double(PyObject *value, const char *name, double *result);

/* An integer between `low` and `high`. */
int py_take_int(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *result);

/* `least` to `most` integers of a sequence, named in messages as in "kernel[0]"; returns their number. */
int py_take_sizes(PyObject *value, const char *name, int64_t low, int64_t high, int least, int most, int64_t *results);

/* The items of a list as a new tuple, which cannot change during the call; NULL with an exception set. */
PyObject *py_take_list(PyObject *value, const char *name);

int py_take_bool(PyObject *value, const char *name, bool *result);

/* A string; *result is valid as long as `value`. */
int py_take_string(PyObject *value, const char *name, const char **result);

/* One of a NULL-terminated list of words; *result is its index. */
int py_take_word(PyObject *value, const char *name, const char *const *words, int *result);

int py_take_device(PyObject *value, const char *name, tch_device *result);

int py_take_dtype(PyObject *value, const char *name, tch_dtype *result);

/* Appends a new reference and releases it; on failure, or if it is NULL, the list is released and set to NULL. */
void py_append(PyObject **list, PyObject *item);

/* A list of integers, or NULL with an exception set. */
PyObject *py_list_numbers(const int64_t *numbers, int64_t count);

#endif

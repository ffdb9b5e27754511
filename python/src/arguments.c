/* Numbers are converted by Python's own protocols (__float__, __index__), so every Python number is accepted. */
#include "arguments.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

int py_refuse_type(PyObject *value, const char *name, const char *expected)
{
    PyObject *type = py_type_name(value);
    if (type != NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be %s, got an object of type %U", name, expected, type);
        Py_DECREF(type);
    }
    return -1;
}

static int find_name(const char *const *names, PyObject *keyword)
{
    for (int i = 0; names[i] != NULL; i++) {
        if (PyUnicode_CompareWithASCIIString(keyword, names[i]) == 0) {
            return i;
        }
    }
    return -1;
}

static int take_keywords(const char *function, const char *const *names, PyObject *const *args, Py_ssize_t positional,
                         PyObject *keywords, PyObject **values)
{
    Py_ssize_t count = PyTuple_Size(keywords);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *keyword = PyTuple_GetItem(keywords, i);
        int place = find_name(names, keyword);
        if (place < 0) {
            PyErr_Format(PyExc_TypeError, "%s() has no argument named '%U'", function, keyword);
            return -1;
        }
        if (values[place] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got two values for argument '%s'", function, names[place]);
            return -1;
        }
        values[place] = args[positional + i];
    }
    return 0;
}

int py_arguments(const char *function, const char *const *names, int required, PyObject *const *args, Py_ssize_t count,
                 PyObject *keywords, PyObject **values)
{
    int known = 0;
    while (names[known] != NULL) {
        values[known] = known < count ? args[known] : NULL;
        known++;
    }
    if (count > known) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments, got %zd", function, known, count);
        return -1;
    }
    if (keywords != NULL && take_keywords(function, names, args, count, keywords, values) < 0) {
        return -1;
    }
    for (int i = 0; i < required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() needs the argument '%s'", function, names[i]);
            return -1;
        }
    }
    return 0;
}

/* Calls a method without arguments; NULL, without an exception, on failure. */
static PyObject *result_of(PyObject *object, const char *name)
{
    PyObject *method = object == NULL ? NULL : PyObject_GetAttrString(object, name);
    PyObject *result = method == NULL ? NULL : PyObject_CallNoArgs(method);
    Py_XDECREF(method);
    PyErr_Clear();
    return result;
}

/* Rejects a tensor whose storage was resized to less, before its __float__ or __index__ reads freed memory. */
static int check_readable(PyObject *value, const char *name)
{
    if (PyLong_Check(value) || PyFloat_Check(value)) {
        return 0;
    }
    PyObject *storage = result_of(value, "untyped_storage");
    PyObject *bytes = result_of(storage, "size");
    bool is_hollow = bytes != NULL && PyLong_Check(bytes) && PyObject_IsTrue(bytes) == 0;
    Py_XDECREF(storage);
    Py_XDECREF(bytes);
    if (is_hollow) {
        PyErr_Format(PyExc_TypeError, "%s must be a number, got a tensor without storage", name);
        return -1;
    }
    return 0;
}

int py_take_real(PyObject *value, const char *name, double *result)
{
    if (check_readable(value, name) < 0) {
        return -1;
    }
    double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            return py_refuse_type(value, name, "a real number");
        }
        return -1;
    }
    *result = number;
    return 0;
}

int py_take_double(PyObject *value, const char *name, double *result)
{
    if (py_take_real(value, name, result) < 0) {
        return -1;
    }
    if (isnan(*result)) {
        PyErr_Format(PyExc_ValueError, "%s must be a number, got nan", name);
        return -1;
    }
    return 0;
}

int py_take_int(PyObject *value, const char *name, int64_t low, int64_t high, int64_t *result)
{
    if (!PyIndex_Check(value)) {
        return py_refuse_type(value, name, "an integer");
    }
    if (check_readable(value, name) < 0) {
        return -1;
    }
    PyObject *integer = PyNumber_Index(value);
    if (integer == NULL) {
        return -1;
    }
    int overflow = 0;
    long long number = PyLong_AsLongLongAndOverflow(integer, &overflow);
    Py_DECREF(integer);
    if (number == -1 && overflow == 0 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "%s must be between %lld and %lld, got a number beyond 64 bits", name,
                     (long long)low, (long long)high);
        return -1;
    }
    if (number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s must be between %lld and %lld, got %lld", name, (long long)low,
                     (long long)high, number);
        return -1;
    }
    *result = number;
    return 0;
}

int py_take_sizes(PyObject *value, const char *name, int64_t low, int64_t high, int least, int most, int64_t *results)
{
    char label[64];
    PyObject *items = PySequence_Check(value) && !PyUnicode_Check(value) ? PySequence_Tuple(value) : NULL;
    if (items == NULL) {
        return PyErr_Occurred() ? -1 : py_refuse_type(value, name, "a sequence of integers");
    }
    Py_ssize_t count = PyTuple_Size(items);
    int failed = count < least || count > most;
    if (failed) {
        PyErr_Format(PyExc_ValueError, "%s must have %d to %d numbers, got %zd", name, least, most, count);
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        snprintf(label, sizeof label, "%s[%d]", name, (int)i);
        failed = py_take_int(PyTuple_GetItem(items, i), label, low, high, &results[i]) < 0;
    }
    Py_DECREF(items);
    return failed ? -1 : (int)count;
}

PyObject *py_take_list(PyObject *value, const char *name)
{
    if (!PyList_Check(value) || PyList_Size(value) > INT32_MAX / 2) {
        py_refuse_type(value, name, "a list of at most 2**30 items");
        return NULL;
    }
    return PyList_AsTuple(value);
}

int py_take_bool(PyObject *value, const char *name, bool *result)
{
    if (!PyBool_Check(value)) {
        return py_refuse_type(value, name, "True or False");
    }
    *result = value == Py_True;
    return 0;
}

int py_take_string(PyObject *value, const char *name, const char **result)
{
    if (!PyUnicode_Check(value)) {
        return py_refuse_type(value, name, "a string");
    }
    Py_ssize_t length = 0;
    const char *text = PyUnicode_AsUTF8AndSize(value, &length);
    if (text == NULL) {
        return -1;
    }
    if (strlen(text) != (size_t)length) {
        PyErr_Format(PyExc_ValueError, "%s must not contain null characters, got %R", name, value);
        return -1;
    }
    *result = text;
    return 0;
}

/* "'auto', 'eigen' or 'newton'", truncated to fit. */
static void list_words(const char *const *words, char *text, size_t size)
{
    size_t used = 0;
    for (int i = 0; words[i] != NULL && used < size; i++) {
        const char *before = i == 0 ? "" : words[i + 1] == NULL ? " or " : ", ";
        used += (size_t)snprintf(text + used, size - used, "%s'%s'", before, words[i]);
    }
}

int py_take_word(PyObject *value, const char *name, const char *const *words, int *result)
{
    const char *text;
    if (py_take_string(value, name, &text) < 0) {
        return -1;
    }
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(text, words[i]) == 0) {
            *result = i;
            return 0;
        }
    }
    char list[256] = "";
    list_words(words, list, sizeof list);
    PyErr_Format(PyExc_ValueError, "%s must be %s, got %R", name, list, value);
    return -1;
}

void py_append(PyObject **list, PyObject *item)
{
    if (item == NULL || PyList_Append(*list, item) < 0) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}

PyObject *py_list_numbers(const int64_t *numbers, int64_t count)
{
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list != NULL && i < count; i++) {
        py_append(&list, PyLong_FromLongLong(numbers[i]));
    }
    return list;
}

int py_take_device(PyObject *value, const char *name, tch_device *result)
{
    const char *text;
    if (py_take_string(value, name, &text) < 0) {
        return -1;
    }
    if (tch_device_parse(text, result) != TCH_OK) {
        PyErr_Format(PyExc_ValueError, "%s must be 'cpu', 'cuda' or 'cuda:N', got %R", name, value);
        return -1;
    }
    return 0;
}

int py_take_dtype(PyObject *value, const char *name, tch_dtype *result)
{
    static const char *const words[] = {"float64", "float32", "float16", "bfloat16", "int32", "int64", NULL};
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16, TCH_INT32, TCH_INT64};
    int index;
    if (py_take_word(value, name, words, &index) < 0) {
        return -1;
    }
    *result = types[index];
    return 0;
}

/* See comm.h. */
#include "comm.h"

#include "arguments.h"
#include "errors.h"

/* --- collectives ------------------------------------------------------------------------------------------------- */

static tch_status call_collective(py_comm *group, const char *operation, const void *send, void *receive,
                                  PyObject *numbers, void *stream)
{
    PyObject *result = numbers == NULL ? NULL
                                       : PyObject_CallFunction(group->collective, "sKKOK", operation,
                                                               (unsigned long long)(uintptr_t)send,
                                                               (unsigned long long)(uintptr_t)receive, numbers,
                                                               (unsigned long long)(uintptr_t)stream);
    Py_XDECREF(numbers);
    if (result == NULL) {
        PyErr_Fetch(&group->error_type, &group->error_value, &group->error_trace);
        return TCH_ERR_COMM;
    }
    Py_DECREF(result);
    return TCH_OK;
}

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    tch_status status = call_collective(user, "all_gather", send, receive, PyLong_FromLongLong(bytes), stream);
    PyGILState_Release(gil);
    return status;
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    py_comm *group = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *numbers = Py_BuildValue(
        "NNNN", py_list_numbers(counts->send_offsets, group->size), py_list_numbers(counts->send_bytes, group->size),
        py_list_numbers(counts->receive_offsets, group->size), py_list_numbers(counts->receive_bytes, group->size));
    tch_status status = call_collective(group, "all_to_all", send, receive, numbers, stream);
    PyGILState_Release(gil);
    return status;
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    tch_status status = call_collective(user, "reduce_max", values, values, PyLong_FromLong(count), stream);
    PyGILState_Release(gil);
    return status;
}

/* --- the group --------------------------------------------------------------------------------------------------- */

int py_comm_open(PyObject *given, py_comm *group)
{
    static const tch_comm_ops ops = {sizeof ops, all_gather, all_to_all, reduce_max, NULL, NULL, NULL};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    int64_t rank, size;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != 4) {
        return py_wrong_type(given, "group must be (name, rank, size, collective), or None");
    }
    PyObject *collective = PyTuple_GetItem(given, 3);
    if (py_take_string(PyTuple_GetItem(given, 0), "the group's name", &config.name) < 0 ||
        py_take_int(PyTuple_GetItem(given, 1), "rank", 0, INT32_MAX, &rank) < 0 ||
        py_take_int(PyTuple_GetItem(given, 2), "size", 1, INT32_MAX, &size) < 0) {
        return -1;
    }
    if (!PyCallable_Check(collective)) {
        PyErr_SetString(PyExc_TypeError, "the group's collective must be callable");
        return -1;
    }
    config.rank = (int32_t)rank;
    config.size = group->size = (int32_t)size;
    config.ops = &ops;
    config.user = group;
    tch_status status = tch_comm_create(&config, &group->comm);
    if (status != TCH_OK) {
        py_fail(status);
        return -1;
    }
    group->collective = Py_NewRef(collective);
    return 0;
}

bool py_comm_raise(py_comm *group)
{
    if (group->error_type == NULL) {
        return false;
    }
    PyErr_Restore(group->error_type, group->error_value, group->error_trace);
    group->error_type = group->error_value = group->error_trace = NULL;
    return true;
}

int py_comm_fail(py_comm *group, py_chunks *memory, tch_status status)
{
    return py_comm_raise(group) ? -1 : py_chunks_fail(memory, status);
}

int py_comm_traverse(const py_comm *group, visitproc visit, void *arg)
{
    Py_VISIT(group->collective);
    Py_VISIT(group->error_type);
    Py_VISIT(group->error_value);
    Py_VISIT(group->error_trace);
    return 0;
}

void py_comm_clear(py_comm *group)
{
    tch_comm_destroy(group->comm);
    group->comm = NULL;
    Py_CLEAR(group->collective);
    Py_CLEAR(group->error_type);
    Py_CLEAR(group->error_value);
    Py_CLEAR(group->error_trace);
}

/* --- placements -------------------------------------------------------------------------------------------------- */

/* A tuple of `count` sizes; -1 for any number of them, returned. */
static int take_sizes(PyObject *tuple, int32_t count, int64_t *sizes)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) > TCH_MAX_RANK || (count >= 0 && PyTuple_Size(tuple) != count)) {
        return py_wrong_type(tuple, "a shard's start, size and offset must be tuples, as long as the shape");
    }
    bool failed = py_take_ints(tuple, "a size of a placement", 0, INT64_MAX / 8, sizes) < 0;
    return failed ? -1 : (int)PyTuple_Size(tuple);
}

static int take_shard(PyObject *tuple, int32_t ndim, tch_shard *shard)
{
    int64_t rank;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        return py_wrong_type(tuple, "a shard must be (rank, start, size, offset)");
    }
    if (py_take_int(PyTuple_GetItem(tuple, 0), "the rank of a shard", 0, INT32_MAX, &rank) < 0 ||
        take_sizes(PyTuple_GetItem(tuple, 1), ndim, shard->start) < 0 ||
        take_sizes(PyTuple_GetItem(tuple, 2), ndim, shard->size) < 0 ||
        take_sizes(PyTuple_GetItem(tuple, 3), ndim, shard->offset) < 0) {
        return -1;
    }
    shard->rank = (int32_t)rank;
    return 0;
}

/* The shards of an entry, or NULL where there are none; borrowed. */
static PyObject *shards_of(PyObject *entry)
{
    return entry == Py_None ? NULL : PyTuple_GetItem(entry, 1);
}

static bool is_entry(PyObject *entry)
{
    return entry == Py_None ||
           (PyTuple_Check(entry) && PyTuple_Size(entry) == 2 && PyTuple_Check(PyTuple_GetItem(entry, 1)));
}

static int fill_placement(PyObject *entry, tch_placement *placement, int64_t *shape, tch_shard *shards)
{
    *placement = (tch_placement)TCH_PLACEMENT_INIT;
    if (entry == Py_None) {
        return 0;
    }
    int ndim = take_sizes(PyTuple_GetItem(entry, 0), -1, shape);
    if (ndim < 0) {
        return -1;
    }
    placement->ndim = ndim;
    placement->shape = shape;
    placement->count = (int32_t)PyTuple_Size(shards_of(entry));
    placement->shards = shards;
    for (int32_t i = 0; i < placement->count; i++) {
        if (take_shard(PyTuple_GetItem(shards_of(entry), i), ndim, &shards[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

tch_placement *py_placements(PyObject *list, Py_ssize_t count)
{
    Py_ssize_t total = 0;
    if (!PyTuple_Check(list) || PyTuple_Size(list) != count) {
        PyErr_SetString(PyExc_TypeError, "placements must be a tuple, as long as the list of parameters");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *entry = PyTuple_GetItem(list, i);
        if (!is_entry(entry)) {
            py_wrong_type(entry, "a placement must be None or (shape, shards)");
            return NULL;
        }
        total += entry == Py_None ? 0 : PyTuple_Size(shards_of(entry));
    }
    size_t each = sizeof(tch_placement) + TCH_MAX_RANK * sizeof(int64_t);
    tch_placement *placements = PyMem_Calloc(1, ((size_t)count + 1) * each + (size_t)total * sizeof(tch_shard));
    if (placements == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    int64_t *shapes = (int64_t *)(placements + count + 1);
    tch_shard *shards = (tch_shard *)(shapes + (count + 1) * TCH_MAX_RANK);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (fill_placement(PyTuple_GetItem(list, i), &placements[i], shapes + i * TCH_MAX_RANK, shards) < 0) {
            PyMem_Free(placements);
            return NULL;
        }
        shards += placements[i].count;
    }
    return placements;
}

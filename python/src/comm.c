/* Groups of processes whose collectives are a Python function, called by the library without the GIL, which is acquired
 * here; and placements of parameters. */
#include "session.h"

#include "arguments.h"

/* --- collectives ------------------------------------------------------------------------------------------------- */

/* Without `counts`, `number` is passed: bytes or elements. */
static tch_status call_collective(py_session *self, const char *operation, const void *send, void *receive,
                                  int64_t number, const tch_comm_counts *counts, void *stream)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    int32_t n = self->ranks;
    PyObject *numbers =
        counts == NULL
            ? PyLong_FromLongLong(number)
            : Py_BuildValue("NNNN", py_list_numbers(counts->send_offsets, n), py_list_numbers(counts->send_bytes, n),
                            py_list_numbers(counts->receive_offsets, n), py_list_numbers(counts->receive_bytes, n));
    PyObject *result = numbers == NULL ? NULL
                                       : PyObject_CallFunction(self->collective, "sKKNK", operation,
                                                               (unsigned long long)(uintptr_t)send,
                                                               (unsigned long long)(uintptr_t)receive, numbers,
                                                               (unsigned long long)(uintptr_t)stream);
    tch_status status = result != NULL ? TCH_OK : TCH_ERR_COMM;
    if (result == NULL) {
        PyErr_Fetch(&self->error[0], &self->error[1], &self->error[2]);
    }
    if (result == NULL && self->on.device.type == TCH_DEVICE_CPU) {
        Py_INCREF(self); /* never released: threads of the transport may still write to the buffers */
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
    return status;
}

/* The step has failed here, and the other ranks may wait for this one: the reason goes to the same function. */
static void abort_group(void *user)
{
    py_session *self = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *result = self->error[1] != NULL
                           ? PyObject_CallFunction(self->collective, "siiOi", "abort", 0, 0, self->error[1], 0)
                           : PyObject_CallFunction(self->collective, "siisi", "abort", 0, 0, tch_last_error(), 0);
    if (result == NULL) {
        PyErr_WriteUnraisable(self->collective);
    }
    Py_XDECREF(result);
    PyGILState_Release(gil);
}

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    return call_collective(user, "all_gather", send, receive, bytes, NULL, stream);
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    return call_collective(user, "all_to_all", send, receive, 0, counts, stream);
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    return call_collective(user, "reduce_max", values, values, count, NULL, stream);
}

/* --- the group --------------------------------------------------------------------------------------------------- */

int py_comm_create(PyObject *given, void *user, tch_comm **comm)
{
    static const tch_comm_ops ops = {sizeof ops, all_gather, all_to_all, reduce_max, NULL, abort_group, NULL};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    int64_t rank, size;
    if (!PyTuple_Check(given) || PyTuple_Size(given) != 4) {
        return py_refuse_type(given, "group", "(name, rank, size, collective), or None");
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
    config.size = (int32_t)size;
    config.ops = &ops;
    config.user = user;
    tch_status status = tch_comm_create(&config, comm);
    return status == TCH_OK ? 0 : (py_fail(status), -1);
}

int py_comm_open(PyObject *given, py_session *self)
{
    if (py_comm_create(given, self, &self->comm) < 0) {
        return -1;
    }
    self->ranks = tch_comm_size(self->comm);
    self->collective = Py_NewRef(PyTuple_GetItem(given, 3));
    return 0;
}

/* --- placements -------------------------------------------------------------------------------------------------- */

static const int64_t largest_size = INT64_MAX / 8;

static int take_shard(PyObject *tuple, int32_t ndim, tch_shard *shard)
{
    int64_t rank;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        return py_refuse_type(tuple, "a shard", "(rank, start, size, offset)");
    }
    if (py_take_int(PyTuple_GetItem(tuple, 0), "the rank of a shard", 0, INT32_MAX, &rank) < 0 ||
        py_take_sizes(PyTuple_GetItem(tuple, 1), "a shard's start", 0, largest_size, ndim, ndim, shard->start) < 0 ||
        py_take_sizes(PyTuple_GetItem(tuple, 2), "a shard's size", 0, largest_size, ndim, ndim, shard->size) < 0 ||
        py_take_sizes(PyTuple_GetItem(tuple, 3), "a shard's offset", 0, largest_size, ndim, ndim, shard->offset) < 0) {
        return -1;
    }
    shard->rank = (int32_t)rank;
    return 0;
}

/* The shards of an entry, or NULL if there are none; borrowed. */
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
    int ndim =
        py_take_sizes(PyTuple_GetItem(entry, 0), "the shape of a placement", 0, largest_size, 0, TCH_MAX_RANK, shape);
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

/* The first entry that is the same object: equal parameters share a placement, which has a shard for every rank. */
static Py_ssize_t first_same(PyObject *list, Py_ssize_t index)
{
    Py_ssize_t i = 0;
    while (i < index && PyTuple_GetItem(list, i) != PyTuple_GetItem(list, index)) {
        i++;
    }
    return i;
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
            py_refuse_type(entry, "a placement", "None or (shape, shards)");
            return NULL;
        }
        total += entry == Py_None || first_same(list, i) < i ? 0 : PyTuple_Size(shards_of(entry));
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
        Py_ssize_t same = first_same(list, i);
        if (same < i) {
            placements[i] = placements[same];
            continue;
        }
        if (fill_placement(PyTuple_GetItem(list, i), &placements[i], shapes + i * TCH_MAX_RANK, shards) < 0) {
            PyMem_Free(placements);
            return NULL;
        }
        shards += placements[i].count;
    }
    return placements;
}

/* Devices, backends and the memory of the calls' pools. */
#define _GNU_SOURCE /* dladdr */
#include "module.h"

#include <dlfcn.h>

#include "arguments.h"
#include "calls.h"
#include "contexts.h"

static PyObject *library_path(PY_NO_ARGUMENTS)
{
    Dl_info info;
    if (dladdr(PY_SLOT(tch_version), &info) == 0 || info.dli_fname == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the loader does not say where libtorchium is");
        return NULL;
    }
    return PyUnicode_DecodeFSDefault(info.dli_fname);
}

static PyObject *library_time(PY_NO_ARGUMENTS)
{
    return PyLong_FromLongLong((long long)py_library_time());
}

/* --- queries ----------------------------------------------------------------------------------------------------- */

static PyObject *device_count(PY_ONE_ARGUMENT(kind))
{
    static const char *const words[] = {"cpu", "cuda", NULL};
    int index;
    if (py_take_word(kind, "kind", words, &index) < 0) {
        return NULL;
    }
    int32_t count;
    Py_BEGIN_ALLOW_THREADS /* the first call loads modules */
        count = tch_device_count(index == 0 ? TCH_DEVICE_CPU : TCH_DEVICE_CUDA);
    Py_END_ALLOW_THREADS return PyLong_FromLong(count);
}

static PyObject *describe_device(tch_device device)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    tch_status status;
    char text[32];
    PY_UNLOCKED(status, tch_device_info_get(device, &info));
    if (status != TCH_OK) {
        return py_fail(status);
    }
    return Py_BuildValue("{s:s,s:N,s:N,s:L,s:L,s:(ii),s:i}", "device", py_device_text(device, text, sizeof text),
                         "name", py_text(info.name), "features", py_text(info.features), "total_memory",
                         (long long)info.total_memory, "free_memory", (long long)info.free_memory, "capability",
                         (int)info.compute_major, (int)info.compute_minor, "processors", (int)info.processors);
}

static PyObject *devices(PY_NO_ARGUMENTS)
{
    static const tch_device_type types[] = {TCH_DEVICE_CPU, TCH_DEVICE_CUDA};
    PyObject *list = PyList_New(0);
    for (int t = 0; list != NULL && t < 2; t++) {
        int32_t count = tch_device_count(types[t]);
        for (int32_t i = 0; list != NULL && i < count; i++) {
            py_append(&list, describe_device((tch_device){(int32_t)types[t], i}));
        }
    }
    return list;
}

static PyObject *describe_backend(int32_t index)
{
    tch_backend_info info = TCH_BACKEND_INFO_INIT;
    tch_status status = tch_backend_info_get(index, &info);
    if (status != TCH_OK) {
        return py_fail(status);
    }
    return Py_BuildValue("{s:N,s:O,s:i,s:N,s:N,s:N}", "name", py_text(info.name), "available",
                         info.available ? Py_True : Py_False, "devices", (int)info.devices, "library",
                         py_text(info.library), "details", py_text(info.details), "reason", py_text(info.reason));
}

static PyObject *backends(PY_NO_ARGUMENTS)
{
    PyObject *list = PyList_New(0);
    int32_t count = tch_backend_count();
    for (int32_t i = 0; list != NULL && i < count; i++) {
        py_append(&list, describe_backend(i));
    }
    return list;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static tch_status add_figures(tch_context *context, void *user)
{
    tch_memory_info *sum = user;
    tch_memory_info one = TCH_MEMORY_INFO_INIT;
    tch_status status = tch_memory_get_info(context, &one);
    if (status == TCH_OK) {
        sum->total = one.total;
        sum->free = one.free;
        sum->allocated += one.allocated;
        sum->reserved += one.reserved;
        sum->peak += one.peak;
        sum->requests += one.requests;
        sum->misses += one.misses;
    }
    return status;
}

/* A device not used yet has no context: one is created. */
static int ensure_context(tch_device device)
{
    py_context *place = py_context_borrow(device, NULL, false);
    if (place == NULL) {
        return -1;
    }
    py_context_return(place);
    return 0;
}

static PyObject *memory_info(PY_ONE_ARGUMENT(argument))
{
    tch_device device;
    tch_memory_info sum = TCH_MEMORY_INFO_INIT;
    if (py_take_device(argument, "device", &device) < 0 || ensure_context(device) < 0 ||
        py_contexts_visit(device, add_figures, &sum) < 0) {
        return NULL;
    }
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "total", (long long)sum.total, "free", (long long)sum.free,
                         "allocated", (long long)sum.allocated, "reserved", (long long)sum.reserved, "peak",
                         (long long)sum.peak, "requests", (long long)sum.requests, "misses", (long long)sum.misses);
}

static tch_status trim_context(tch_context *context, void *user)
{
    return tch_memory_trim(context, *(const int64_t *)user);
}

static PyObject *trim_pool(PY_ARGUMENTS)
{
    PY_TAKE("trim_pool", 1, "device", "keep");
    tch_device device;
    int64_t keep = 0;
    if (py_take_device(v[0], "device", &device) < 0 ||
        (v[1] != NULL && py_take_int(v[1], "keep", 0, INT64_MAX, &keep) < 0) ||
        py_contexts_visit(device, trim_context, &keep) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static tch_status wait_for_context(tch_context *context, void *user)
{
    (void)user;
    return tch_context_synchronize(context);
}

static PyObject *synchronize(PY_ONE_ARGUMENT(argument))
{
    tch_device device;
    if (py_take_device(argument, "device", &device) < 0 || py_contexts_visit(device, wait_for_context, NULL) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

/* --- threads ----------------------------------------------------------------------------------------------------- */

static PyObject *set_num_threads(PY_ONE_ARGUMENT(argument))
{
    int64_t threads;
    if (py_take_int(argument, "count", INT32_MIN, INT32_MAX, &threads) < 0) {
        return NULL;
    }
    tch_status status = tch_set_num_threads((int32_t)threads);
    return status == TCH_OK ? Py_NewRef(Py_None) : py_fail(status);
}

static PyObject *get_num_threads(PY_NO_ARGUMENTS)
{
    return PyLong_FromLong(tch_get_num_threads());
}

int py_devices_register(PyObject *module)
{
    static PyMethodDef functions[] = {
        {"library_path", library_path, METH_NOARGS, "The file of libtorchium."},
        {"library_time", library_time, METH_NOARGS,
         "Nanoseconds this thread has spent in matrix functions of the library."},
        {"device_count", device_count, METH_O, "How many devices of a kind, 'cpu' or 'cuda', can be used."},
        {"devices", devices, METH_NOARGS, "A dictionary for each device that can be used."},
        {"backends", backends, METH_NOARGS, "A dictionary for each backend known, with the reason where it is absent."},
        {"memory_info", memory_info, METH_O, "Memory of a device, and of the pools that calls on it use."},
        PY_METHOD("trim_pool", trim_pool, "Gives kept memory back to the device, until `keep` bytes are left."),
        {"synchronize", synchronize, METH_O, "Waits for all calls made on a device."},
        {"set_num_threads", set_num_threads, METH_O, "Threads that calls on the CPU may use."},
        {"get_num_threads", get_num_threads, METH_NOARGS, "Threads that calls on the CPU may use."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, functions);
}

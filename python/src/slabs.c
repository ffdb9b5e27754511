/* See slabs.h. */
#include "slabs.h"

#include "errors.h"
#include "optim_config.h"

#define STATE_ALIGNMENT 256

/* (owner, address): memory at the address that lives as long as the owner. */
static int take_memory(PyObject *pair, PyObject **owner, char **address)
{
    if (!PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        return py_wrong_type(pair, "allocate must return (owner, address)");
    }
    *address = PyLong_AsVoidPtr(PyTuple_GetItem(pair, 1));
    if (*address == NULL) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_MemoryError, "allocate returned the address 0");
        }
        return -1;
    }
    *owner = Py_NewRef(PyTuple_GetItem(pair, 0));
    return 0;
}

static int add_slab(py_slabs *slabs, int64_t bytes, void **pointer)
{
    py_slab *list = PyMem_Realloc(slabs->list, (size_t)(slabs->count + 1) * sizeof *list);
    if (list == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    slabs->list = list;
    PyObject *pair = PyObject_CallFunction(slabs->allocate, "L", (long long)(bytes + STATE_ALIGNMENT));
    PyObject *owner = NULL;
    char *address = NULL;
    int failed = pair == NULL || take_memory(pair, &owner, &address) < 0;
    Py_XDECREF(pair);
    if (failed) {
        return -1;
    }
    address += (STATE_ALIGNMENT - (uintptr_t)address % STATE_ALIGNMENT) % STATE_ALIGNMENT;
    slabs->list[slabs->count++] = (py_slab){address, bytes, owner};
    *pointer = address;
    return 0;
}

static tch_status allocate(void *user, int64_t bytes, void **pointer)
{
    py_slabs *slabs = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    int failed = add_slab(slabs, bytes, pointer);
    if (failed) {
        PyErr_Fetch(&slabs->error_type, &slabs->error_value, &slabs->error_trace);
    }
    PyGILState_Release(gil);
    return failed ? TCH_ERR_OUT_OF_MEMORY : TCH_OK;
}

static void release(void *user, void *pointer, int64_t bytes)
{
    py_slabs *slabs = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    (void)bytes;
    for (int32_t i = 0; i < slabs->count; i++) {
        if (slabs->list[i].pointer == (char *)pointer) {
            PyObject *owner = slabs->list[i].owner;
            slabs->list[i] = slabs->list[--slabs->count];
            Py_DECREF(owner);
            break;
        }
    }
    PyGILState_Release(gil);
}

tch_state_allocator py_slabs_allocator(py_slabs *slabs)
{
    return (tch_state_allocator){sizeof(tch_state_allocator), allocate, release, slabs};
}

int py_slabs_fail(py_slabs *slabs, tch_status status)
{
    if (slabs->error_type != NULL) {
        PyErr_Restore(slabs->error_type, slabs->error_value, slabs->error_trace);
        slabs->error_type = slabs->error_value = slabs->error_trace = NULL;
    } else {
        py_fail(status);
    }
    return -1;
}

PyObject *py_slabs_owner(const py_slabs *slabs, const char *data, PyObject *other)
{
    for (int32_t i = 0; i < slabs->count; i++) {
        const py_slab *slab = &slabs->list[i];
        if (data >= slab->pointer && data < slab->pointer + slab->bytes) {
            return slab->owner;
        }
    }
    return other;
}

int py_slabs_traverse(const py_slabs *slabs, visitproc visit, void *arg)
{
    Py_VISIT(slabs->allocate);
    for (int32_t i = 0; i < slabs->count; i++) {
        Py_VISIT(slabs->list[i].owner);
    }
    return 0;
}

void py_slabs_clear(py_slabs *slabs)
{
    Py_CLEAR(slabs->allocate);
    while (slabs->count > 0) {
        Py_DECREF(slabs->list[--slabs->count].owner);
    }
    PyMem_Free(slabs->list);
    slabs->list = NULL;
}

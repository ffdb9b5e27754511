/* The type Memory: memory of a pool or another library, exported by DLPack. Exports are counted in a separate struct,
 * so that they may outlive the Python object and be released by any thread, with or without the GIL. */
#include "module.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "arguments.h"
#include "contexts.h"
#include "dlpack.h"

typedef struct storage {
    atomic_int references;
    tch_tensor tensor; /* a copy with its own shape and strides */
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
    tch_tensor *pooled; /* memory of a pool, and its context */
    py_context *place;
    PyObject *owner; /* or the object that owns it */
} storage;

typedef struct memory {
    PyObject_HEAD storage *storage;
    void *stream; /* stream that wrote the memory */
} memory;

static PyTypeObject *memory_type;

/* --- storage ----------------------------------------------------------------------------------------------------- */

static storage *storage_of(const tch_tensor *described)
{
    storage *s = calloc(1, sizeof *s);
    if (s == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    atomic_init(&s->references, 1);
    s->tensor = *described;
    s->tensor.shape = s->shape;
    s->tensor.strides = s->strides;
    int64_t stride = 1;
    for (int32_t i = described->ndim - 1; i >= 0; i--) {
        s->shape[i] = described->shape[i];
        s->strides[i] = described->strides != NULL ? described->strides[i] : stride;
        stride *= described->shape[i];
    }
    return s;
}

/* Releasing a Python object needs the GIL; after interpreter shutdown it is leaked. */
static void drop_owner(PyObject *owner)
{
    if (owner != NULL && Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(owner);
        PyGILState_Release(state);
    }
}

static void storage_release(storage *s)
{
    if (s == NULL || atomic_fetch_sub(&s->references, 1) != 1) {
        return;
    }
    if (s->pooled != NULL) {
        tch_tensor_destroy(s->pooled);
        atomic_fetch_sub(&s->place->lent, 1);
    }
    drop_owner(s->owner);
    free(s);
}

/* --- capsules ---------------------------------------------------------------------------------------------------- */

static void delete_versioned(DLManagedTensorVersioned *managed)
{
    storage_release(managed->owner);
    free(managed);
}

static void delete_unversioned(DLManagedTensor *managed)
{
    storage_release(managed->owner);
    free(managed);
}

/* An unconsumed capsule still has its first name and owns its contents. */
static void forget_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        delete_unversioned(PyCapsule_GetPointer(capsule, "dltensor"));
    }
}

/* For consumers with DLPack 1, or older ones. */
static PyObject *make_capsule(storage *s, bool versioned)
{
    void *managed = malloc(versioned ? sizeof(DLManagedTensorVersioned) : sizeof(DLManagedTensor));
    if (managed == NULL) {
        return PyErr_NoMemory();
    }
    if (versioned) {
        *(DLManagedTensorVersioned *)managed = (DLManagedTensorVersioned){
            .version = {DLPACK_MAJOR, DLPACK_MINOR}, .owner = s, .deleter = delete_versioned, .tensor = s->tensor};
    } else {
        *(DLManagedTensor *)managed = (DLManagedTensor){.tensor = s->tensor, .owner = s, .deleter = delete_unversioned};
    }
    PyObject *capsule = PyCapsule_New(managed, versioned ? "dltensor_versioned" : "dltensor", forget_capsule);
    if (capsule == NULL) {
        free(managed);
        return NULL;
    }
    atomic_fetch_add(&s->references, 1);
    return capsule;
}

/* --- consumers' requests ----------------------------------------------------------------------------------------- */

/* The consumer's stream: None, 0 and 1 are the default one, -1 requests no synchronization. If the memory was written
 * on another stream, the host synchronizes, which is rare. */
static int order_after_filling(const memory *self, PyObject *stream)
{
    int64_t number = 0;
    tch_device device = self->storage->tensor.device;
    if (stream != NULL && stream != Py_None && py_take_int(stream, "stream", -1, INT64_MAX, &number) < 0) {
        return -1;
    }
    void *consumer = number <= 1 ? NULL : (void *)(uintptr_t)number;
    if (device.type != TCH_DEVICE_CUDA || number == -1 || consumer == self->stream) {
        return 0;
    }
    py_context *place = py_context_borrow(device, self->stream, false);
    if (place == NULL) {
        return -1;
    }
    tch_status status;
    PY_UNLOCKED(status, tch_context_synchronize(place->context));
    if (status != TCH_OK) {
        py_fail(status);
    }
    py_context_return(place);
    return status == TCH_OK ? 0 : -1;
}

/* (device type, index), or None for any. */
static int check_device(const memory *self, PyObject *requested)
{
    tch_device device = self->storage->tensor.device;
    int type = device.type;
    int index = device.index;
    if (requested == NULL || requested == Py_None) {
        return 0;
    }
    if (!PyTuple_Check(requested) || !PyArg_ParseTuple(requested, "ii", &type, &index)) {
        PyErr_SetString(PyExc_TypeError, "dl_device must be None or a pair of integers");
        return -1;
    }
    if (type != device.type || index != device.index) {
        PyErr_Format(PyExc_BufferError, "dl_device is (%d, %d), but the memory is on (%d, %d) and is not copied", type,
                     index, (int)device.type, (int)device.index);
        return -1;
    }
    return 0;
}

/* Whether the consumer supports DLPack 1. */
static int supports_versions(PyObject *max_version, bool *result)
{
    int major = 0;
    int minor = 0;
    if (max_version != NULL && max_version != Py_None &&
        (!PyTuple_Check(max_version) || !PyArg_ParseTuple(max_version, "ii", &major, &minor))) {
        PyErr_SetString(PyExc_TypeError, "max_version must be None or a pair of integers");
        return -1;
    }
    *result = major >= DLPACK_MAJOR;
    return 0;
}

static PyObject *memory_dlpack(PY_ARGUMENTS)
{
    PY_TAKE("__dlpack__", 0, "stream", "max_version", "dl_device", "copy");
    const memory *self = (memory *)object;
    bool versions;
    if (v[3] != NULL && v[3] != Py_None && v[3] != Py_False) {
        PyErr_SetString(PyExc_BufferError, "copy must be None or False: the memory is handed out, not copied");
        return NULL;
    }
    if (supports_versions(v[1], &versions) < 0 || check_device(self, v[2]) < 0 || order_after_filling(self, v[0]) < 0) {
        return NULL;
    }
    return make_capsule(self->storage, versions);
}

static PyObject *memory_dlpack_device(PY_NO_ARGUMENTS)
{
    tch_device device = ((memory *)object)->storage->tensor.device;
    return Py_BuildValue("(ii)", (int)device.type, (int)device.index);
}

/* --- creation ---------------------------------------------------------------------------------------------------- */

static PyObject *new_memory(PyTypeObject *type, storage *s, void *stream)
{
    memory *self = (memory *)(void *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        storage_release(s);
        return NULL;
    }
    self->storage = s;
    self->stream = stream;
    return (PyObject *)self;
}

static storage *pooled_storage(tch_device device, void *stream, tch_dtype dtype, int32_t rank, const int64_t *shape,
                               tch_memory_format format)
{
    py_context *place = py_context_borrow(device, stream, false);
    if (place == NULL) {
        return NULL;
    }
    tch_tensor *tensor = NULL;
    tch_status status;
    PY_UNLOCKED(status, tch_tensor_create(place->context, dtype, rank, shape, format, &tensor));
    storage *s = NULL;
    if (status != TCH_OK) {
        py_fail(status);
    } else if ((s = storage_of(tensor)) == NULL) {
        tch_tensor_destroy(tensor);
    } else {
        s->pooled = tensor;
        s->place = place;
        atomic_fetch_add(&place->lent, 1);
    }
    py_context_return(place);
    return s;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"shape", "dtype", "device", "channels_last", "stream", NULL};
    PyObject *v[5] = {NULL};
    tch_device device;
    tch_dtype dtype;
    int64_t shape[TCH_MAX_RANK];
    int64_t stream = 0;
    int rank = -1;
    bool channels_last = false;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOO|OO:Memory", names, &v[0], &v[1], &v[2], &v[3], &v[4]) ||
        (rank = py_take_sizes(v[0], "shape", 0, INT64_MAX, 0, TCH_MAX_RANK, shape)) < 0 ||
        py_take_dtype(v[1], "dtype", &dtype) < 0 || py_take_device(v[2], "device", &device) < 0 ||
        (v[3] != NULL && py_take_bool(v[3], "channels_last", &channels_last) < 0) ||
        (v[4] != NULL && v[4] != Py_None && py_take_int(v[4], "stream", 0, INT64_MAX, &stream) < 0)) {
        return NULL;
    }
    void *handle = device.type == TCH_DEVICE_CUDA ? (void *)(uintptr_t)stream : NULL;
    storage *s = pooled_storage(device, handle, dtype, rank, shape, channels_last ? TCH_CHANNELS_LAST : TCH_CONTIGUOUS);
    return s != NULL ? new_memory(type, s, handle) : NULL;
}

static void memory_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    storage_release(((memory *)object)->storage);
    PyObject_Free(object);
    Py_DECREF(type);
}

PyObject *py_memory_wrap(const tch_tensor *view, PyObject *owner, void *stream)
{
    storage *s = storage_of(view);
    if (s == NULL) {
        return NULL;
    }
    s->owner = Py_NewRef(owner);
    return new_memory(memory_type, s, stream);
}

int py_memory_register(PyObject *module)
{
    static PyMethodDef methods[] = {
        PY_METHOD("__dlpack__", memory_dlpack, "A DLPack capsule of the memory."),
        {"__dlpack_device__", memory_dlpack_device, METH_NOARGS, "(device type, device index)"},
        {NULL, NULL, 0, NULL},
    };
    static PyType_Slot slots[] = {{Py_tp_new, PY_SLOT(memory_new)},
                                  {Py_tp_dealloc, PY_SLOT(memory_dealloc)},
                                  {Py_tp_methods, methods},
                                  {Py_tp_doc, "A zero-filled tensor in memory of the pool, for from_dlpack."},
                                  {0, NULL}};
    static PyType_Spec spec = {"torchium._C.Memory", sizeof(memory), 0, Py_TPFLAGS_DEFAULT, slots};
    return py_add_type(module, &spec, &memory_type);
}

/* DLPack capsules with arbitrary fields except for addresses. Accepted ones must refer to memory of the target, and the
 * library must validate them without access outside the array. Python is embedded, with the extension's sources linked
 * in.
 *
 * A capsule does not have the size of its memory, so a tensor that exceeds it is described and not read: array
 * libraries are trusted with that, see SECURITY.md. */
#include "arrays.h" /* Python's header must come first */

#include <string.h>

#include "fuzz.h"
#include "module.h"

PyObject *PyInit__C(void);

enum { ELEMENTS = 512, MOST_GIVEN = 12 };
static double memory[ELEMENTS];
static PyObject *producers, *shared; /* a list of objects of several kinds, and the class that defines their fields */

static const char program[] =
    "class Producer:\n"
    "    capsule = device = None\n"
    "    def __dlpack_device__(self):\n"
    "        return self.device\n"
    "    def __dlpack__(self, **keywords):\n"
    "        return self.capsule\n"
    "class Old(Producer):\n" /* older than max_version */
    "    def __dlpack__(self, stream=None):\n"
    "        return self.capsule\n"
    "class History(Producer):\n" /* must be detached first */
    "    def __dlpack__(self, **keywords):\n"
    "        raise BufferError('has a history')\n"
    "    def detach(self):\n"
    "        return Producer()\n"
    "class Stuck(History):\n" /* constant */
    "    def detach(self):\n"
    "        return self\n"
    "class Deviceless:\n"
    "    pass\n"
    "class Half(Deviceless):\n"
    "    def __dlpack_device__(self):\n"
    "        return (1, 0)\n"
    "class Immutable(Producer):\n"
    "    __module__ = 'jax.arrays'\n"
    "producers = [k() for k in (Producer, Old, History, Stuck, Deviceless, Half, Immutable)]\n";

static void begin(void)
{
    REQUIRE(PyImport_AppendInittab("_C", PyInit__C) == 0);
    Py_InitializeEx(0);
    PyObject *module = PyImport_ImportModule("_C");
    if (module == NULL) {
        PyErr_Print();
    }
    REQUIRE(module != NULL);
    PyObject *names = PyModule_GetDict(PyImport_AddModule("__main__"));
    PyObject *code = Py_CompileString(program, "fuzz", Py_file_input);
    PyObject *result = code != NULL ? PyEval_EvalCode(code, names, names) : NULL;
    REQUIRE(result != NULL);
    producers = PyDict_GetItemString(names, "producers");
    shared = PyDict_GetItemString(names, "Producer");
    REQUIRE(producers != NULL && shared != NULL);
}

/* --- reading the input ------------------------------------------------------------------------------------------- */

typedef struct reader {
    const uint8_t *at, *end;
} reader;

static uint64_t next(reader *r, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes && r->at < r->end; i++) {
        value = value << 8 | *r->at++;
    }
    return value;
}

/* Mostly small: a byte with its highest bit set is followed by all 64. */
static int64_t next_size(reader *r)
{
    uint64_t small = next(r, 1);
    return small < 128 ? (int64_t)small - 4 : (int64_t)next(r, 8);
}

/* --- a capsule --------------------------------------------------------------------------------------------------- */

typedef struct lie {
    int64_t shape[MOST_GIVEN], strides[MOST_GIVEN];
    DLManagedTensorVersioned versioned;
    DLManagedTensor unversioned;
} lie;

static lie told;
static int deleted;

static void delete_versioned(DLManagedTensorVersioned *self)
{
    REQUIRE(self == &told.versioned);
    deleted++;
}

static void delete_unversioned(DLManagedTensor *self)
{
    REQUIRE(self == &told.unversioned);
    deleted++;
}

static tch_tensor next_tensor(reader *r, unsigned choice)
{
    tch_tensor t = {.data = (choice & 1) != 0 ? NULL : memory};
    int64_t rank = (int64_t)next(r, 1);
    t.ndim = rank < 200 ? (int32_t)(rank % (MOST_GIVEN + 1)) : (int32_t)next(r, 4);
    t.dtype = (tch_dtype){.code = (uint8_t)next(r, 1), .bits = (uint8_t)next(r, 1), .lanes = (uint16_t)next(r, 1)};
    t.device = (tch_device){(tch_device_type)(int32_t)next(r, 1), (int32_t)next(r, 1)};
    t.byte_offset = (choice & 2) != 0 ? next(r, 8) : 0;
    for (int i = 0; i < MOST_GIVEN; i++) {
        told.shape[i] = next_size(r);
        told.strides[i] = next_size(r);
    }
    t.shape = (choice & 4) != 0 ? NULL : told.shape;
    t.strides = (choice & 8) != 0 ? NULL : told.strides;
    return t;
}

static PyObject *next_capsule(reader *r)
{
    static const char *const names[] = {"dltensor_versioned", "dltensor", "used_dltensor", "other"};
    unsigned choice = (unsigned)next(r, 1);
    unsigned which = (unsigned)next(r, 1);
    which = which < 160 ? which & 1 : which % 5;
    told.versioned = (DLManagedTensorVersioned){.version = {(uint32_t)next(r, 1), (uint32_t)next(r, 1)},
                                                .flags = next(r, 1),
                                                .deleter = (choice & 16) != 0 ? NULL : delete_versioned};
    told.versioned.tensor = told.unversioned.tensor = next_tensor(r, choice);
    told.unversioned.deleter = (choice & 16) != 0 ? NULL : delete_unversioned;
    if (which == 4) {
        return PyLong_FromLong(7);
    }
    return PyCapsule_New(which == 1 ? (void *)&told.unversioned : (void *)&told.versioned, names[which], NULL);
}

static PyObject *next_device(reader *r)
{
    unsigned choice = (unsigned)next(r, 1);
    long kind = (long)next(r, 1);
    return choice < 200   ? Py_BuildValue("(ll)", kind, 0L)
           : choice < 220 ? Py_BuildValue("(l)", kind)
           : choice < 240 ? Py_BuildValue("(si)", "cpu", 0)
                          : Py_BuildValue("(LL)", (long long)next(r, 8), 0LL);
}

/* --- use --------------------------------------------------------------------------------------------------------- */

/* Whether every element is in the target's memory. */
static int is_inside(const tch_tensor *t)
{
    int64_t low = 0;
    int64_t high = 0;
    if (t->device.type != TCH_DEVICE_CPU || t->byte_offset >= sizeof memory) {
        return 0;
    }
    for (int32_t i = 0; i < t->ndim; i++) {
        int64_t stride = t->strides != NULL ? t->strides[i] : ELEMENTS;
        if (t->shape[i] < 0 || t->shape[i] > ELEMENTS || stride > ELEMENTS || stride < -ELEMENTS) {
            return 0;
        }
        *(stride < 0 ? &low : &high) += (t->shape[i] > 0 ? t->shape[i] - 1 : 0) * stride;
    }
    int64_t bytes = (high + 1) * (int64_t)tch_dtype_size(t->dtype) + (int64_t)t->byte_offset;
    return low == 0 && bytes <= (int64_t)sizeof memory;
}

static void use(const tch_tensor *t)
{
    double sum[8];
    int64_t shape[TCH_MAX_RANK];
    if (tch_tensor_numel(t) > 8 || tch_tensor_numel(t) < 0 || !is_inside(t)) {
        return;
    }
    for (int32_t i = 0; i < t->ndim; i++) {
        shape[i] = t->shape[i];
    }
    tch_tensor out = tch_tensor_view(sum, t->dtype, t->ndim, shape);
    (void)tch_tensor_copy(fuzz_context(), &out, t);
}

static void check_taken(const py_array *array, const tch_tensor *t)
{
    REQUIRE(t->ndim >= 0 && t->ndim <= TCH_MAX_RANK);
    REQUIRE(t->shape == array->shape && (t->strides == NULL || t->strides == array->strides));
    REQUIRE(tch_dtype_size(t->dtype) > 0);
    REQUIRE(t->data != NULL || tch_tensor_numel(t) == 0);
    use(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    if (producers == NULL) {
        begin();
    }
    reader r = {bytes, bytes + count};
    PyObject *device = next_device(&r);
    PyObject *capsule = next_capsule(&r);
    REQUIRE(device != NULL && capsule != NULL);
    REQUIRE(PyObject_SetAttrString(shared, "device", device) == 0);
    REQUIRE(PyObject_SetAttrString(shared, "capsule", capsule) == 0);
    int use_as = (int)next(&r, 1);
    PyObject *producer = PyList_GetItem(producers, use_as / 2 % PyList_Size(producers));
    py_operand operand = {producer, "x", (use_as & 1) != 0 ? PY_REQUIRED : PY_REQUIRED | PY_WRITTEN};
    py_array array;
    tch_tensor *tensor;
    py_stream stream;
    deleted = 0;
    if (py_arrays_take(&array, &tensor, &operand, 1, NULL, &stream) == 0) {
        check_taken(&array, tensor);
        py_arrays_release(&array, &tensor, 1);
    } else {
        REQUIRE(PyErr_Occurred() != NULL);
        PyErr_Clear();
    }
    REQUIRE(deleted <= 1);
    Py_DECREF(device);
    Py_DECREF(capsule);
    return 0;
}

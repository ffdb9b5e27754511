/* Arrays of any library as the library's tensors for one call, without copying.
 *
 * From 2.10, PyTorch publishes a table of C functions on its type that describes a tensor in about 50 ns, whether or
 * not it requires gradients: such an array is borrowed. Every other array is asked for a DLPack capsule: it is
 * imported. All functions require the GIL, and return 0, or -1 with an exception set. */
#ifndef TORCHIUM_PYTHON_ARRAYS_H
#define TORCHIUM_PYTHON_ARRAYS_H

#include "dlpack.h"
#include "python.h"

typedef struct py_array {
    tch_tensor tensor; /* shape and strides point into this struct, so it must not be moved */
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
    const DLPackExchange *table; /* of a borrowed array: its type's table, and the object itself */
    PyObject *owner;
    DLManagedTensorVersioned *versioned; /* an imported array has one of these, whose deleter is called at the end */
    DLManagedTensor *unversioned;
} py_array;

/* An array argument and its name for messages. */
typedef struct py_operand {
    PyObject *object;
    const char *name;
    int use; /* of PY_WRITTEN: written by the call; PY_REQUIRED: must not be None; PY_ANY_DTYPE: also dtypes that the
                library lacks; PY_WHOLE: its storage must cover it, which is asked of PyTorch */
} py_operand;

#define PY_WRITTEN 1
#define PY_REQUIRED 2
#define PY_ANY_DTYPE 4
#define PY_WHOLE 8

/* The stream of a call's arrays. */
typedef struct py_stream {
    void *handle; /* a cudaStream_t; NULL is the default stream */
    bool wait;    /* an array's library does not order its work after the stream: the call must synchronize before it
                     returns */
    bool passing; /* given by the caller, for arrays whose library may destroy it after the call */
    bool asked;   /* given by the arrays' library */
} py_stream;

/* The arrays of a call with any number of them. */
typedef struct py_operands {
    py_operand *operands;
    py_array *arrays;
    tch_tensor **tensors; /* NULL if there is none */
} py_operands;

/* Allocates for `count` arrays; 0, or -1 with an exception set. */
int py_operands_make(py_operands *operands, size_t count);
void py_operands_free(py_operands *operands);

/* Borrows or imports all arrays of a call: tensors[i] is that of operands[i], or NULL if the object is NULL or an
 * allowed None. `given` is NULL, None or a stream number; by default the stream is the current one of the first GPU
 * array's library. On failure nothing needs to be released. */
int py_arrays_take(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count, PyObject *given,
                   py_stream *stream);

/* A PyTorch method without arguments; the names become Python strings at first use. */
typedef struct py_question {
    const char *module, *function;
    PyObject *module_name, *function_name;
} py_question;

/* Whether it returns True; 0 without PyTorch, -1 with an exception set. */
int py_ask_torch(py_question *question);

/* "float32", "bool" or "of code 99, 3 bits, 1 lanes". */
const char *py_dtype_text(tch_dtype dtype, char *text, size_t size);

/* Releases what py_arrays_take returned. An exception that is set stays. */
void py_arrays_release(py_array *arrays, tch_tensor *const *tensors, int count);

/* The device of the first GPU tensor, else the CPU. Page-locked memory counts as the CPU's, and is relabeled so if all
 * tensors are in host memory. */
tch_device py_arrays_device(tch_tensor *const *tensors, int count);

/* --- internal: borrowing and importing --------------------------------------------------------------------------- */

int py_capsules_register(void);

/* The table of the object's type; NULL without an exception if it publishes none. */
const DLPackExchange *py_table_of(PyObject *object);

/* 1 for a tensor with PyTorch's lazy negation bit, whose memory holds the negated values; 0, or -1 with an exception
 * set. */
int py_is_negated(PyObject *object);

/* 1 for a PyTorch tensor whose storage ends before its last element; 0, or -1 with an exception set. */
int py_is_shrunk(PyObject *object, const tch_tensor *tensor);

int64_t py_stride_of(const tch_tensor *tensor, int32_t k);

/* Compares shape, dtype and device, and strides if they matter. */
bool py_same_form(const tch_tensor *a, const tch_tensor *b);

const char *py_data_of(const tch_tensor *tensor);

/* Whether the object's library can create an array. */
bool py_makes_new(PyObject *object);

/* A new contiguous array of the same library, dtype and device by PyTorch's new_empty; NULL with an exception set, a
 * TypeError if the library has no such method. */
PyObject *py_new_like(PyObject *object, int32_t rank, const int64_t *sizes);

/* The stream of the first borrowed array on a GPU, if any: all tensors but NULL ones are borrowed. */
int py_arrays_stream(const py_array *arrays, tch_tensor *const *tensors, const py_operand *operands, int count,
                     py_stream *stream);

int py_array_borrow(py_array *array, const py_operand *operand, const DLPackExchange *table);
/* The same for an array created by the call, which is not negated. */
int py_array_borrow_new(py_array *array, const py_operand *operand, const DLPackExchange *table);
int py_array_import(py_array *array, const py_operand *operand, void *stream);

/* Copies a description into the array, after checking what the library cannot: rank, dtype, storage. */
int py_array_adopt(py_array *array, const py_operand *operand, const tch_tensor *given);

/* Raises "NAME (of type TYPE) WHY", followed by the first line of the exception that is set, if any. Always -1. */
int py_array_refuse(PyObject *exception, const py_operand *operand, const char *why);

#endif

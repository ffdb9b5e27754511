/* Arrays of any library as tensors of ours, for the length of one call and without copying.
 *
 * PyTorch from 2.10 on publishes a table of C functions on its type, through which a tensor costs some fifty
 * nanoseconds, whether it requires gradients or not: such an array is borrowed. Every other array is asked for a DLPack
 * capsule: it is imported. All functions want the GIL, and return 0, or -1 with an exception set. */
#ifndef TORCHIUM_PYTHON_ARRAYS_H
#define TORCHIUM_PYTHON_ARRAYS_H

#include "dlpack.h"
#include "python.h"

typedef struct py_array {
    tch_tensor tensor; /* shape and strides point into this struct, so it must not be moved */
    int64_t shape[TCH_MAX_RANK];
    int64_t strides[TCH_MAX_RANK];
    const DLPackExchange *table; /* a borrowed array has its type's table and the object itself */
    PyObject *owner;
    DLManagedTensorVersioned
        *versioned; /* an imported array has one of these two, whose deleter is called at the end */
    DLManagedTensor *unversioned;
} py_array;

/* An argument that is an array, with its name for messages. */
typedef struct py_operand {
    PyObject *object;
    const char *name;
    int use; /* of PY_WRITTEN: the call writes to it; PY_REQUIRED: it may not be None; PY_ANY_DTYPE: not only ours;
                PY_WHOLE: its storage must not have been shrunk, which PyTorch is asked */
} py_operand;

#define PY_WRITTEN 1
#define PY_REQUIRED 2
#define PY_ANY_DTYPE 4
#define PY_WHOLE 8

/* What is known of the stream that a call's arrays are worked on. */
typedef struct py_stream {
    void *handle; /* a cudaStream_t; NULL is the device's default stream */
    bool wait;    /* some array's library will not wait for the stream by itself: the call must, before it returns */
    bool passing; /* the caller gave it, for arrays of a library that may destroy it any time after the call */
    bool asked;   /* the arrays' library was asked for it */
} py_stream;

/* The arrays of a call whose number is known at run time. */
typedef struct py_operands {
    py_operand *operands;
    py_array *arrays;
    tch_tensor **tensors; /* NULL where there is none */
} py_operands;

/* Room for so many arrays; 0, or -1 with an exception set. */
int py_operands_make(py_operands *operands, size_t count);
void py_operands_free(py_operands *operands);

/* Takes all arrays of a call: tensors[i] becomes that of operands[i], or NULL where the object is NULL or None
 * and may be. `given`
 * is NULL, None or the number of a stream; without one, the stream is what the library of the first array on a GPU is
 * working on. On failure nothing is left to release. */
int py_arrays_take(py_array *arrays, tch_tensor **tensors, const py_operand *operands, int count, PyObject *given,
                   py_stream *stream);

/* A function of PyTorch's without arguments, and its names as Python strings once they were needed. */
typedef struct py_question {
    const char *module, *function;
    PyObject *module_name, *function_name;
} py_question;

/* Whether it answers True; 0 without PyTorch, -1 with an exception set. */
int py_ask_torch(py_question *question);

/* "float32", "bool" or "of code 99, 3 bits, 1 lanes". */
const char *py_dtype_text(tch_dtype dtype, char *text, size_t size);

/* Gives back what py_arrays_take took. An exception that is set stays. */
void py_arrays_release(py_array *arrays, tch_tensor *const *tensors, int count);

/* The first tensor's device that is a GPU, else the CPU. Page-locked memory counts as the CPU's, and is relabeled so
 * where all tensors lie in host memory. */
tch_device py_arrays_device(tch_tensor *const *tensors, int count);

/* --- inside: the two ways in ------------------------------------------------------------------------------------- */

int py_capsules_register(void);

/* The table of the object's type, or NULL without an exception where it publishes none. */
const DLPackExchange *py_table_of(PyObject *object);

/* 1 for a tensor that PyTorch has negated only in name, so that its memory holds the numbers with the other sign; 0, or
 * -1 with an exception set. */
int py_is_negated(PyObject *object);

/* 1 for a tensor of PyTorch whose storage ends before its last element; 0, or -1 with an exception set. */
int py_is_shrunk(PyObject *object, const tch_tensor *tensor);

int64_t py_stride_of(const tch_tensor *tensor, int32_t k);

/* Whether shape, strides where they matter, dtype and device are the same. */
bool py_same_form(const tch_tensor *a, const tch_tensor *b);

const char *py_data_of(const tch_tensor *tensor);

/* Whether the object's library can be asked for a new array. */
bool py_makes_new(PyObject *object);

/* A new array of the same library, dtype and device by PyTorch's new_empty, without gaps; NULL with an exception set, a
 * TypeError where the library has no such method. */
PyObject *py_new_like(PyObject *object, int32_t rank, const int64_t *sizes);

/* The stream of the first borrowed array on a GPU, where there is one: all tensors but NULL ones are borrowed. */
int py_arrays_stream(const py_array *arrays, tch_tensor *const *tensors, const py_operand *operands, int count,
                     py_stream *stream);

int py_array_borrow(py_array *array, const py_operand *operand, const DLPackExchange *table);
/* The same for one that was made for the call, and so is not negated. */
int py_array_borrow_new(py_array *array, const py_operand *operand, const DLPackExchange *table);
int py_array_import(py_array *array, const py_operand *operand, void *stream);

/* Copies a description into the array, after checking what the library cannot: rank, dtype, that there is memory. */
int py_array_adopt(py_array *array, const py_operand *operand, const tch_tensor *given);

/* "NAME (of type TYPE) WHY", followed by the first line of the exception that is set, if one is. Always -1. */
int py_array_refuse(PyObject *exception, const py_operand *operand, const char *why);

#endif

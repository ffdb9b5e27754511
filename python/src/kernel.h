/* Internals of torchium._C.Kernel, and conversion of Python objects to kernel arguments. */
#ifndef TORCHIUM_PYTHON_KERNEL_H
#define TORCHIUM_PYTHON_KERNEL_H

#include "arrays.h"
#include "python.h"

enum { PY_KERNEL_LABEL = 64 };

/* A parameter as reported by the compiler, and its label for messages: "argument 1 ('const float *')". */
typedef struct py_parameter {
    tch_kernel_parameter is;
    char type[32];
    char label[PY_KERNEL_LABEL];
} py_parameter;

typedef struct py_kernel {
    PyObject ob_base;
    tch_device device;
    tch_context *context;
    tch_kernel *kernel;
    PyThread_type_lock lock; /* protects the context */
    long process;            /* of creation: a forked child does not use it */
    bool has_stream;
    void *stream;
    int32_t count;
    py_parameter *parameters;
} py_kernel;

/* All data of one launch in one allocation, so that concurrent launches of a kernel share none. */
typedef struct py_launch {
    int32_t count;
    bool strided; /* arrays may be non-contiguous */
    py_stream stream;
    tch_kernel_shape shape;
    tch_kernel_argument *arguments;
    py_operand *operands;
    py_array *arrays;
    tch_tensor **tensors;
    PyObject **bytes; /* sources of struct arguments */
} py_launch;

/* Sets `type` and `label` of the parameter with this index. */
void py_parameter_describe(py_parameter *parameter, int32_t index);

/* NULL with an exception set. Release with py_launch_free, with or without py_launch_take. */
py_launch *py_launch_make(int32_t count);
void py_launch_free(py_launch *launch);

/* Converts the objects of the tuple `args`, one per parameter, for a kernel on `device`. 0, or -1 with an exception
 * set. */
int py_launch_take(py_launch *launch, const py_parameter *parameters, PyObject *args, tch_device device,
                   PyObject *stream);

/* Launches with the arguments set by py_launch_take or by the caller. None, or NULL with an exception set. */
PyObject *py_kernel_run(py_kernel *self, const py_launch *launch);

/* 1 if autograd must record a write to the object, or a use of it; 0, or -1 with an exception set. */
int py_is_watched(PyObject *object);

extern PyTypeObject *py_kernel_type;

/* Adds the type Elementwise, created from a kernel. */
int py_elementwise_register(PyObject *module);

#endif

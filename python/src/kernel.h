/* The inside of torchium._C.Kernel, and the arguments of a launch: Python objects as what the parameters of a kernel
 * want. */
#ifndef TORCHIUM_PYTHON_KERNEL_H
#define TORCHIUM_PYTHON_KERNEL_H

#include "arrays.h"
#include "python.h"

enum { PY_KERNEL_LABEL = 64 };

/* A parameter as a kernel's compiler knows it, and its words for messages: "argument 1 ('const float *')". */
typedef struct py_parameter {
    tch_kernel_parameter is;
    char type[32];
    char label[PY_KERNEL_LABEL];
} py_parameter;

/* torchium._C.Kernel. */
typedef struct py_kernel {
    PyObject ob_base;
    tch_device device;
    tch_context *context;
    tch_kernel *kernel;
    PyThread_type_lock lock; /* who has it may use the context */
    long process;            /* that made it: a child of a fork leaves it alone */
    bool has_stream;
    void *stream;
    int32_t count;
    py_parameter *parameters;
} py_kernel;

/* Everything one launch needs, in one chunk of memory, so that launches of one kernel do not meet in it. */
typedef struct py_launch {
    int32_t count;
    bool strided; /* arrays may have gaps */
    py_stream stream;
    tch_kernel_shape shape;
    tch_kernel_argument *arguments;
    py_operand *operands;
    py_array *arrays;
    tch_tensor **tensors;
    PyObject **bytes; /* what structs were read from */
} py_launch;

/* Writes `type` and `label` for the parameter of that number, from 0. */
void py_parameter_describe(py_parameter *parameter, int32_t index);

/* NULL with an exception set; to be given back by py_launch_free, after py_launch_take or without it. */
py_launch *py_launch_make(int32_t count);
void py_launch_free(py_launch *launch);

/* Takes the objects of the tuple `args`, as many as there are parameters, for a kernel on `device`. 0, or -1 with an
 * exception set. */
int py_launch_take(py_launch *launch, const py_parameter *parameters, PyObject *args, tch_device device,
                   PyObject *stream);

/* Launches it with what py_launch_take, or the caller himself, has put there. None, or NULL with an exception set. */
PyObject *py_kernel_run(py_kernel *self, const py_launch *launch);

/* 1 where autograd would have to know of a write to the object, or of a use of it; 0, or -1 with an exception set. */
int py_is_watched(PyObject *object);

extern PyTypeObject *py_kernel_type;

/* Adds the type Elementwise, which is made of a kernel. */
int py_elementwise_register(PyObject *module);

#endif

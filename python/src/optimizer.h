/* The inside of torchium._C.Optimizer: one tch_optimizer and the context it runs on. Several files define its methods.
 *
 * A method has the object to itself from py_optimizer_enter to py_runner_leave, also while the GIL is released: who
 * comes in between, from another thread or from a function the object itself has called, gets a RuntimeError. */
#ifndef TORCHIUM_PYTHON_OPTIMIZER_H
#define TORCHIUM_PYTHON_OPTIMIZER_H

#include "arrays.h"
#include "chunks.h"
#include "comm.h"
#include "contexts.h"
#include "python.h"

/* A parameter as the library knows it: shape and strides point into the struct. */
typedef struct py_place {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
    const void *gradient, *sizes, *data;  /* what its gradient was told from when it was last asked */
    char label[256], gradient_label[256]; /* for messages */
} py_place;

typedef struct py_optimizer {
    PyObject ob_base;
    py_runner on;
    tch_optimizer *optimizer; /* NULL until the first group */
    py_chunks memory;         /* of the state */
    py_comm group;            /* that it is shared by */
    PyObject *push, *pop;
    PyObject *lr_tensors; /* a dictionary, group: what keeps its learning rate alive */
    int32_t count;        /* parameters */
    py_place **places;    /* one for each */
    py_operands step;     /* the parameters, their gradients, grad_scale and found_inf */
} py_optimizer;

/* 0, or -1 with a RuntimeError set. */
int py_optimizer_enter(py_optimizer *self);

/* Whether it is elementwise, or (elementwise, batch_dims, cuts); cuts lie in the object. */
int py_take_role(PyObject *item, tch_parameter *parameter);

void py_place_set(py_place *place, const tch_tensor *tensor);

/* Methods: of optimizer_groups.c, optimizer_step.c and optimizer_state.c. */
PyObject *py_optimizer_add_group(PY_ARGUMENTS);
PyObject *py_optimizer_set_config(PY_ARGUMENTS);
PyObject *py_optimizer_set_lr(PY_ARGUMENTS);
PyObject *py_optimizer_set_lr_tensor(PY_ARGUMENTS);
PyObject *py_optimizer_step(PY_ARGUMENTS);
PyObject *py_same_items(PY_ARGUMENTS);
PyObject *py_optimizer_states(PY_ARGUMENTS);
PyObject *py_optimizer_get_counts(PY_ARGUMENTS);
PyObject *py_optimizer_set_counts(PY_ARGUMENTS);
PyObject *py_optimizer_tiles(PY_ARGUMENTS);
PyObject *py_optimizer_memory(PY_ARGUMENTS);
PyObject *py_optimizer_stats(PY_ARGUMENTS);
PyObject *py_optim_forecast(PY_ARGUMENTS);

#endif

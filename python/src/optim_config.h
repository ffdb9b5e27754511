/* Optimizer configurations as dictionaries: the fields of tch_optim_config by name, enumerations as strings. */
#ifndef TORCHIUM_PYTHON_OPTIM_CONFIG_H
#define TORCHIUM_PYTHON_OPTIM_CONFIG_H

#include "python.h"

typedef enum py_field_kind {
    PY_REAL,
    PY_INT32,
    PY_INT64,
    PY_UINT64,
    PY_BOOL,
    PY_WORD,
    PY_TRIPLE,
    PY_DTYPE
} py_field_kind;

typedef struct py_field {
    const char *name;
    size_t offset;
    py_field_kind kind;
    const char *const *words; /* of an enumeration, in order */
} py_field;

/* Sets the fields named by the dictionary's keys. 0, or -1 with an exception set. */
int py_take_config(PyObject *dictionary, const py_field *fields_of, int count, void *config);

/* The defaults of the dictionary's "kind", overridden by its other entries. Returns 0, or -1 with an exception set. */
int py_optim_config(PyObject *dictionary, tch_optim_config *config);

#endif

/* A new option of tch_optim_config is one line in the table below; the library validates its range. */
#include "optim_config.h"

#include "arguments.h"

#define AT(name) #name, offsetof(tch_optim_config, name)

enum { MOST_KINDS = 32 };
static const char *kinds[MOST_KINDS + 1]; /* from the library, at first use */
static const char *const decays[] = {"decoupled", "l2", "cautious", NULL};
static const char *const graftings[] = {"none", "sgd", "adagrad", "rmsprop", "adam", NULL};
static const char *const policies[] = {"skip", "raise", "ignore", NULL};
static const char *const adjust_lr_fns[] = {"original", "match_rms_adamw", "plain", NULL};
static const char *const ns_dtypes[] = {"auto", "bfloat16", "float32", NULL};
static const char *const precisions[] = {"high", "highest", NULL};
static const char *const state_dtypes[] = {"float32", "bfloat16", "int8", NULL};
static const char *const root_dtypes[] = {"float32", "bfloat16", NULL};
static const char *const roots[] = {"auto", "eigen", "newton", "rational", NULL};
static const char *const orthos[] = {"polar_express", "muon", "minimax", NULL};

static const py_field fields[] = {
    {AT(kind), PY_WORD, kinds},
    {AT(lr), PY_REAL, NULL},
    {AT(weight_decay), PY_REAL, NULL},
    {AT(weight_decay_type), PY_WORD, decays},
    {AT(maximize), PY_BOOL, NULL},
    {AT(momentum), PY_REAL, NULL},
    {AT(dampening), PY_REAL, NULL},
    {AT(nesterov), PY_BOOL, NULL},
    {AT(beta1), PY_REAL, NULL},
    {AT(beta2), PY_REAL, NULL},
    {AT(eps), PY_REAL, NULL},
    {AT(use_bias_correction), PY_BOOL, NULL},
    {AT(amsgrad), PY_BOOL, NULL},
    {AT(constant_norm), PY_BOOL, NULL},
    {AT(adamw.lr), PY_REAL, NULL},
    {AT(adamw.base_lr), PY_REAL, NULL},
    {AT(adamw.beta1), PY_REAL, NULL},
    {AT(adamw.beta2), PY_REAL, NULL},
    {AT(adamw.eps), PY_REAL, NULL},
    {AT(adamw.weight_decay), PY_REAL, NULL},
    {AT(shampoo.max_preconditioner_dim), PY_INT64, NULL},
    {AT(soap.block), PY_BOOL, NULL},
    {AT(shampoo.merge_dims), PY_BOOL, NULL},
    {AT(shampoo.precondition_1d), PY_BOOL, NULL},
    {AT(memory.packed_factors), PY_BOOL, NULL},
    {AT(shampoo.precondition_frequency), PY_INT32, NULL},
    {AT(shampoo.refresh_drift), PY_REAL, NULL},
    {AT(shampoo.start_preconditioning_step), PY_INT32, NULL},
    {AT(shampoo.stagger), PY_BOOL, NULL},
    {AT(numerics.precision), PY_WORD, precisions},
    {AT(numerics.world_invariant), PY_BOOL, NULL},
    {AT(numerics.damping), PY_REAL, NULL},
    {AT(numerics.tolerance), PY_REAL, NULL},
    {AT(memory.root_dtype), PY_WORD, root_dtypes},
    {AT(numerics.method), PY_WORD, roots},
    {AT(shampoo.exponent_override), PY_INT32, NULL},
    {AT(shampoo.grafting), PY_WORD, graftings},
    {AT(shampoo.grafting_beta2), PY_REAL, NULL},
    {AT(shampoo.grafting_eps), PY_REAL, NULL},
    {AT(soap.shampoo_beta), PY_REAL, NULL},
    {AT(soap.normalize_grads), PY_BOOL, NULL},
    {AT(soap.orthogonalize), PY_BOOL, NULL},
    {AT(muon.method), PY_WORD, orthos},
    {AT(muon.ns_coefficients), PY_TRIPLE, NULL},
    {AT(muon.ns_steps), PY_INT32, NULL},
    {AT(muon.adjust_lr_fn), PY_WORD, adjust_lr_fns},
    {AT(muon.ns_dtype), PY_WORD, ns_dtypes},
    {AT(memory.master_weights), PY_BOOL, NULL},
    {AT(memory.stochastic_rounding), PY_BOOL, NULL},
    {AT(memory.state_dtype), PY_WORD, state_dtypes},
    {AT(numerics.nonfinite), PY_WORD, policies},
    {AT(memory.seed), PY_UINT64, NULL},
    {AT(memory.budget), PY_INT64, NULL},
};

static int take_triple(PyObject *value, const char *name, double *at)
{
    PyObject *items = PySequence_Tuple(value);
    if (items == NULL) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s must be three numbers", name);
        return -1;
    }
    if (PyTuple_Size(items) != 3) {
        PyErr_Format(PyExc_ValueError, "%s must be three numbers, got %zd", name, PyTuple_Size(items));
        Py_DECREF(items);
        return -1;
    }
    int failed = 0;
    for (Py_ssize_t i = 0; i < 3 && !failed; i++) {
        failed = py_take_double(PyTuple_GetItem(items, i), name, &at[i]);
    }
    Py_DECREF(items);
    return failed;
}

static int take_int32(PyObject *value, const char *name, int64_t low, int64_t high, int32_t *at)
{
    int64_t number;
    if (py_take_int(value, name, low, high, &number) < 0) {
        return -1;
    }
    *at = (int32_t)number;
    return 0;
}

/* Sets a field of the configuration; 0, or -1 with an exception set. */
static int take_field(const py_field *f, PyObject *value, void *config)
{
    void *at = (char *)config + f->offset;
    bool whole = f->kind == PY_INT32 || f->kind == PY_INT64 || f->kind == PY_UINT64;
    if (whole && PyBool_Check(value)) { /* an int in Python, but hardly intended */
        PyErr_Format(PyExc_TypeError, "%s must be an integer, got %s", f->name, value == Py_True ? "True" : "False");
        return -1;
    }
    switch (f->kind) {
    case PY_REAL:
        return py_take_double(value, f->name, at);
    case PY_INT32:
        return take_int32(value, f->name, INT32_MIN, INT32_MAX, at);
    case PY_INT64:
        return py_take_int(value, f->name, INT64_MIN, INT64_MAX, at);
    case PY_UINT64:
        return py_take_int(value, f->name, 0, INT64_MAX, at);
    case PY_BOOL: /* or 0 and 1, as in a checkpoint */
        return PyIndex_Check(value) ? take_int32(value, f->name, 0, 1, at)
                                    : py_refuse_type(value, f->name, "True or False");
    case PY_WORD: /* enumerations have the size of an int */
        return py_take_word(value, f->name, f->words, at);
    case PY_DTYPE:
        return py_take_dtype(value, f->name, at);
    default:
        return take_triple(value, f->name, at);
    }
}

static const py_field *find_field(PyObject *key, const py_field *fields_of, int count)
{
    if (!PyUnicode_Check(key)) {
        py_refuse_type(key, "the options of a config", "strings");
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        if (PyUnicode_CompareWithASCIIString(key, fields_of[i].name) == 0) {
            return &fields_of[i];
        }
    }
    PyErr_Format(PyExc_TypeError, "config has no option '%U'", key);
    return NULL;
}

int py_take_config(PyObject *dictionary, const py_field *fields_of, int count, void *config)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    if (!PyDict_Check(dictionary)) {
        return py_refuse_type(dictionary, "config", "a dictionary");
    }
    PyObject *copy = PyDict_Copy(dictionary); /* immutable while its values are read */
    int failed = copy == NULL;
    while (!failed && PyDict_Next(copy, &at, &key, &value)) {
        const py_field *field = find_field(key, fields_of, count);
        failed = field == NULL || take_field(field, value, config) < 0;
    }
    Py_XDECREF(copy);
    return failed ? -1 : 0;
}

int py_optim_config(PyObject *dictionary, tch_optim_config *config)
{
    PyObject *value = PyDict_Check(dictionary) ? PyDict_GetItemString(dictionary, "kind") : NULL;
    int kind = 0;
    for (int i = 0; i < MOST_KINDS && (i > 0 || kinds[0] == NULL); i++) {
        kinds[i] = tch_optim_kind_name((tch_optim_kind)i);
    }
    if (value == NULL && PyDict_Check(dictionary)) {
        PyErr_SetString(PyExc_TypeError, "config needs the option 'kind'");
        return -1;
    }
    if (value != NULL && py_take_word(value, "kind", kinds, &kind) < 0) {
        return -1;
    }
    *config = tch_optim_defaults((tch_optim_kind)kind);
    return py_take_config(dictionary, fields, (int)(sizeof fields / sizeof fields[0]), config);
}

/* The matrix functions of linalg.h, one for one: arguments taken apart, arrays taken, the library called without the
 * GIL. What the functions compute is said in linalg.h and, for users, in torchium.linalg. */
#include "module.h"

#include "arguments.h"
#include "calls.h"

/* The parameters every function here has. */
#define ARGUMENTS PyObject *module, PyObject *const *args, Py_ssize_t count, PyObject *keywords

/* Operands: read, written, and written if given, which a result is that the call can make itself. */
#define INPUT(object, name)                                                                                            \
    {                                                                                                                  \
        object, name, PY_REQUIRED                                                                                      \
    }
#define OUTPUT(object, name)                                                                                           \
    {                                                                                                                  \
        object, name, PY_REQUIRED | PY_WRITTEN                                                                         \
    }
#define MAYBE(object, name)                                                                                            \
    {                                                                                                                  \
        object, name, PY_WRITTEN                                                                                       \
    }

/* --- products ---------------------------------------------------------------------------------------------------- */

static PyObject *matmul(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "out", "stream", NULL};
    PyObject *v[4];
    py_call call;
    (void)module;
    if (py_arguments("matmul", names, 3, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), MAYBE(v[2], "out")};
    if (py_call_begin(&call, operands, 3, v[3], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_product(call.tensors[0], call.tensors[1]));
    }
    PY_CALL(call, tch_matmul(call.context, call.tensors[0], call.tensors[1], call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *matmul_chunked(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "memory_budget", "out", "device", "stream", NULL};
    PyObject *v[6];
    py_call call;
    int64_t budget;
    tch_device device;
    (void)module;
    if (py_arguments("matmul_chunked", names, 4, args, count, keywords, v) < 0 ||
        py_take_int(v[2], "memory_budget", 0, INT64_MAX, &budget) < 0) {
        return NULL;
    }
    bool somewhere = v[4] != NULL && v[4] != Py_None;
    if (somewhere && py_take_device(v[4], "device", &device) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), MAYBE(v[3], "out")};
    if (py_call_begin(&call, operands, 3, v[5], somewhere ? &device : NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_product(call.tensors[0], call.tensors[1]));
    }
    PY_CALL(call, tch_matmul_chunked(call.context, call.tensors[0], call.tensors[1], budget, call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *symmetric_product(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "out", "stream", NULL};
    PyObject *v[4];
    py_call call;
    (void)module;
    if (py_arguments("symmetric_product", names, 3, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), MAYBE(v[2], "out")};
    if (py_call_begin(&call, operands, 3, v[3], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_symmetric_product(call.context, call.tensors[0], call.tensors[1], call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *gram(ARGUMENTS)
{
    static const char *const names[] = {"alpha", "a", "transpose", "beta", "out", "stream", NULL};
    PyObject *v[6];
    py_call call;
    double alpha, beta;
    bool transpose;
    (void)module;
    if (py_arguments("gram", names, 5, args, count, keywords, v) < 0 || py_take_double(v[0], "alpha", &alpha) < 0 ||
        py_take_bool(v[2], "transpose", &transpose) < 0 || py_take_double(v[3], "beta", &beta) < 0) {
        return NULL;
    }
    if (v[4] == Py_None && beta != 0.0) {
        PyErr_SetString(PyExc_TypeError, "out must be an array where beta is not 0, got None");
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[1], "a"), MAYBE(v[4], "out")};
    if (py_call_begin(&call, operands, 2, v[5], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[1] == NULL) {
        py_call_make(&call, 1, 0, py_shape_gram(call.tensors[0], transpose));
    }
    PY_CALL(call, tch_gram(call.context, alpha, call.tensors[0], transpose, beta, call.tensors[1]));
    return py_call_end(&call);
}

/* --- eigenvalues, powers, roots ---------------------------------------------------------------------------------- */

static PyObject *eigh(ARGUMENTS)
{
    static const char *const names[] = {"a", "w", "v", "report", "stream", NULL};
    PyObject *v[5];
    py_call call;
    (void)module;
    if (py_arguments("eigh", names, 4, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), MAYBE(v[1], "w"), MAYBE(v[2], "v"), MAYBE(v[3], "report")};
    if (py_call_begin(&call, operands, 4, v[4], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[1] == NULL) { /* then both are wanted */
        py_call_make(&call, 1, 0, py_shape_rows(call.tensors[0]));
        if (call.tensors[2] == NULL) {
            py_call_make(&call, 2, 0, py_shape_like(call.tensors[0]));
        }
    }
    PY_CALL(call, tch_eigh(call.context, call.tensors[0], call.tensors[1], call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *matrix_power(ARGUMENTS)
{
    static const char *const names[] = {"a", "power", "eps", "out", "report", "stream", NULL};
    PyObject *v[6];
    py_call call;
    double power, eps;
    (void)module;
    if (py_arguments("matrix_power", names, 5, args, count, keywords, v) < 0 ||
        py_take_double(v[1], "power", &power) < 0 || py_take_double(v[2], "eps", &eps) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), MAYBE(v[3], "out"), MAYBE(v[4], "report")};
    if (py_call_begin(&call, operands, 3, v[5], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[1] == NULL) {
        py_call_make(&call, 1, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_matrix_power(call.context, call.tensors[0], power, eps, call.tensors[1], call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *matrix_power_backward(ARGUMENTS)
{
    static const char *const names[] = {"a", "power", "eps", "grad", "out", "report", "stream", NULL};
    PyObject *v[7];
    py_call call;
    double power, eps;
    (void)module;
    if (py_arguments("matrix_power_backward", names, 5, args, count, keywords, v) < 0 ||
        py_take_double(v[1], "power", &power) < 0 || py_take_double(v[2], "eps", &eps) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[3], "grad"), MAYBE(v[4], "out"), MAYBE(v[5], "report")};
    if (py_call_begin(&call, operands, 4, v[6], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_matrix_power_backward(call.context, call.tensors[0], power, eps, call.tensors[1], call.tensors[2],
                                            call.tensors[3]));
    return py_call_end(&call);
}

static int take_method(PyObject *value, tch_root_method *method)
{
    static const char *const words[] = {"auto", "eigen", "newton", "rational", NULL};
    int index;
    if (py_take_word(value, "method", words, &index) < 0) {
        return -1;
    }
    *method = (tch_root_method)index;
    return 0;
}

static PyObject *inverse_root(ARGUMENTS)
{
    static const char *const names[] = {"a",   "root",     "eps",    "relative_eps", "method", "tolerance",
                                        "out", "residual", "report", "stream",       NULL};
    PyObject *v[10];
    py_call call;
    int64_t root;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    (void)module;
    if (py_arguments("inverse_root", names, 9, args, count, keywords, v) < 0 ||
        py_take_int(v[1], "root", INT32_MIN, INT32_MAX, &root) < 0 || py_take_double(v[2], "eps", &config.eps) < 0 ||
        py_take_double(v[3], "relative_eps", &config.relative_eps) < 0 || take_method(v[4], &config.method) < 0 ||
        py_take_double(v[5], "tolerance", &config.tolerance) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), MAYBE(v[6], "out"), MAYBE(v[7], "residual"),
                                   MAYBE(v[8], "report")};
    if (py_call_begin(&call, operands, 4, v[9], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[1] == NULL) {
        py_call_make(&call, 1, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_inverse_root(call.context, call.tensors[0], (int32_t)root, &config, call.tensors[1],
                                   call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *inverse_root_backward(ARGUMENTS)
{
    static const char *const names[] = {"a", "root", "eps", "relative_eps", "grad", "out", "report", "stream", NULL};
    PyObject *v[8];
    py_call call;
    int64_t root;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    (void)module;
    if (py_arguments("inverse_root_backward", names, 6, args, count, keywords, v) < 0 ||
        py_take_int(v[1], "root", INT32_MIN, INT32_MAX, &root) < 0 || py_take_double(v[2], "eps", &config.eps) < 0 ||
        py_take_double(v[3], "relative_eps", &config.relative_eps) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[4], "grad"), MAYBE(v[5], "out"), MAYBE(v[6], "report")};
    if (py_call_begin(&call, operands, 4, v[7], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_inverse_root_backward(call.context, call.tensors[0], (int32_t)root, &config, call.tensors[1],
                                            call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

/* --- orthogonalization ------------------------------------------------------------------------------------------- */

static PyObject *orthogonalize(ARGUMENTS)
{
    static const char *const names[] = {"a", "steps", "method", "out", "stream", NULL};
    static const char *const methods[] = {"polar_express", "muon", "minimax", NULL};
    PyObject *v[5];
    py_call call;
    int64_t steps;
    int method;
    (void)module;
    if (py_arguments("orthogonalize", names, 4, args, count, keywords, v) < 0 ||
        py_take_int(v[1], "steps", INT32_MIN, INT32_MAX, &steps) < 0 ||
        py_take_word(v[2], "method", methods, &method) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), MAYBE(v[3], "out")};
    if (py_call_begin(&call, operands, 2, v[4], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[1] == NULL) {
        py_call_make(&call, 1, 0, py_shape_like(call.tensors[0]));
    }
    PY_CALL(call, tch_orthogonalize(call.context, call.tensors[0], (int32_t)steps, (tch_ortho_method)method,
                                    call.tensors[1]));
    return py_call_end(&call);
}

/* --- Kronecker algebra ------------------------------------------------------------------------------------------- */

static PyObject *kronecker_product(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "out", "stream", NULL};
    PyObject *v[4];
    py_call call;
    (void)module;
    if (py_arguments("kronecker_product", names, 3, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), MAYBE(v[2], "out")};
    if (py_call_begin(&call, operands, 3, v[3], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[2] == NULL) {
        py_call_make(&call, 2, 0, py_shape_kronecker(call.tensors[0], call.tensors[1]));
    }
    PY_CALL(call, tch_kronecker_product(call.context, call.tensors[0], call.tensors[1], call.tensors[2]));
    return py_call_end(&call);
}

static PyObject *kronecker_matmul(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "x", "out", "stream", NULL};
    PyObject *v[5];
    py_call call;
    (void)module;
    if (py_arguments("kronecker_matmul", names, 4, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), INPUT(v[2], "x"), MAYBE(v[3], "out")};
    if (py_call_begin(&call, operands, 4, v[4], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[3] == NULL) {
        py_call_make(&call, 3, 2, py_shape_kronecker_matmul(call.tensors[0], call.tensors[1], call.tensors[2]));
    }
    PY_CALL(call,
            tch_kronecker_matmul(call.context, call.tensors[0], call.tensors[1], call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *kronecker_apply(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "x", "out", "stream", NULL};
    PyObject *v[5];
    py_call call;
    (void)module;
    if (py_arguments("kronecker_apply", names, 4, args, count, keywords, v) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), INPUT(v[2], "x"), MAYBE(v[3], "out")};
    if (py_call_begin(&call, operands, 4, v[4], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[3] == NULL) {
        py_call_make(&call, 3, 2, py_shape_kronecker_apply(call.tensors[0], call.tensors[1], call.tensors[2]));
    }
    PY_CALL(call,
            tch_kronecker_apply(call.context, call.tensors[0], call.tensors[1], call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

static PyObject *kronecker_solve(ARGUMENTS)
{
    static const char *const names[] = {"a", "b", "x", "damping", "out", "report", "stream", NULL};
    PyObject *v[7];
    py_call call;
    double damping;
    (void)module;
    if (py_arguments("kronecker_solve", names, 6, args, count, keywords, v) < 0 ||
        py_take_double(v[3], "damping", &damping) < 0) {
        return NULL;
    }
    const py_operand operands[] = {INPUT(v[0], "a"), INPUT(v[1], "b"), INPUT(v[2], "x"), MAYBE(v[4], "out"),
                                   MAYBE(v[5], "report")};
    if (py_call_begin(&call, operands, 5, v[6], NULL) < 0) {
        return NULL;
    }
    if (call.tensors[3] == NULL) {
        py_call_make(&call, 3, 2, py_shape_like(call.tensors[2]));
    }
    PY_CALL(call, tch_kronecker_solve(call.context, call.tensors[0], call.tensors[1], call.tensors[2], damping,
                                      call.tensors[3], call.tensors[4]));
    return py_call_end(&call);
}

/* The shape of one matrix, given in the place of an array that is to be made. */
static int take_size(PyObject *value, const char *name, int64_t size[2])
{
    if (PyTuple_Size(value) != 2) {
        PyErr_Format(PyExc_ValueError, "%s has %zd sizes, expected those of one matrix", name, PyTuple_Size(value));
        return -1;
    }
    return py_take_int(PyTuple_GetItem(value, 0), name, 0, INT64_MAX, &size[0]) < 0 ||
                   py_take_int(PyTuple_GetItem(value, 1), name, 0, INT64_MAX, &size[1]) < 0
               ? -1
               : 0;
}

static PyObject *nearest_kronecker(ARGUMENTS)
{
    static const char *const names[] = {"m", "a", "b", "error", "stream", NULL};
    PyObject *v[5];
    py_call call;
    int64_t size[2][2];
    (void)module;
    if (py_arguments("nearest_kronecker", names, 4, args, count, keywords, v) < 0) {
        return NULL;
    }
    bool made = PyTuple_Check(v[1]) && PyTuple_Check(v[2]);
    if (made && (take_size(v[1], "a", size[0]) < 0 || take_size(v[2], "b", size[1]) < 0)) {
        return NULL;
    }
    const py_operand given[] = {INPUT(v[0], "m"), OUTPUT(v[1], "a"), OUTPUT(v[2], "b"), MAYBE(v[3], "error")};
    const py_operand wanted[] = {INPUT(v[0], "m"), MAYBE(Py_None, "a"), MAYBE(Py_None, "b"), MAYBE(v[3], "error")};
    if (py_call_begin(&call, made ? wanted : given, 4, v[4], NULL) < 0) {
        return NULL;
    }
    for (int i = 0; made && i < 2; i++) {
        py_call_make(&call, 1 + i, 0, py_shape_matrices(call.tensors[0], "m", size[i]));
    }
    PY_CALL(call,
            tch_nearest_kronecker(call.context, call.tensors[0], call.tensors[1], call.tensors[2], call.tensors[3]));
    return py_call_end(&call);
}

int py_linalg_register(PyObject *module)
{
    static PyMethodDef functions[] = {
        PY_METHOD("matmul", matmul, "out = a b"),
        PY_METHOD("matmul_chunked", matmul_chunked, "out = a b within a memory budget"),
        PY_METHOD("symmetric_product", symmetric_product, "out = a b for symmetric a and b that commute"),
        PY_METHOD("gram", gram, "out = alpha a a' + beta out, or with a' a"),
        PY_METHOD("eigh", eigh, "a = v diag(w) v' for symmetric a"),
        PY_METHOD("matrix_power", matrix_power, "out = v max(w + eps, eps)^power v'"),
        PY_METHOD("matrix_power_backward", matrix_power_backward,
                  "out = the gradient of matrix_power with respect to a"),
        PY_METHOD("inverse_root", inverse_root, "out = (a + damping I)^(-1/root)"),
        PY_METHOD("inverse_root_backward", inverse_root_backward,
                  "out = the gradient of inverse_root with respect to a"),
        PY_METHOD("orthogonalize", orthogonalize, "out = near the closest semi-orthogonal matrix to a"),
        PY_METHOD("kronecker_product", kronecker_product, "out = a (x) b"),
        PY_METHOD("kronecker_matmul", kronecker_matmul, "out = (a (x) b) x"),
        PY_METHOD("kronecker_apply", kronecker_apply, "out = a x b'"),
        PY_METHOD("kronecker_solve", kronecker_solve,
                  "out = (a + pi sqrt(damping) I)^-1 x (b + sqrt(damping)/pi I)^-1"),
        PY_METHOD("nearest_kronecker", nearest_kronecker, "the a and b that make |m - a (x) b| least"),
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, functions);
}

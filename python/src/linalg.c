/* The matrix functions of linalg.h, one for one. They are documented in linalg.h and, for users, in torchium.linalg. */
#include "module.h"

#include "arguments.h"
#include "calls.h"

/* --- products ---------------------------------------------------------------------------------------------------- */

typedef tch_status product_of_two(tch_context *, const tch_tensor *, const tch_tensor *, tch_tensor *);
typedef tch_status product_of_three(tch_context *, const tch_tensor *, const tch_tensor *, const tch_tensor *,
                                    tch_tensor *);

/* Of a, b, out and stream. */
static PyObject *multiply_two(PyObject *const *v, const char *const *names, product_of_two *product,
                              py_shape (*shape)(const tch_tensor *, const tch_tensor *))
{
    PY_BEGIN(v[3], NULL, PY_IN(0), PY_IN(1), PY_MAYBE_OUT(2));
    PY_MAKE(2, 0, shape(t[0], t[1]));
    PY_CALL(call, product(call.context, t[0], t[1], t[2]));
    return py_call_end(&call);
}

/* Of a, b, x, out and stream. */
static PyObject *multiply_three(PyObject *const *v, const char *const *names, product_of_three *product,
                                py_shape (*shape)(const tch_tensor *, const tch_tensor *, const tch_tensor *))
{
    PY_BEGIN(v[4], NULL, PY_IN(0), PY_IN(1), PY_IN(2), PY_MAYBE_OUT(3));
    PY_MAKE(3, 2, shape(t[0], t[1], t[2]));
    PY_CALL(call, product(call.context, t[0], t[1], t[2], t[3]));
    return py_call_end(&call);
}

static PyObject *matmul(PY_ARGUMENTS)
{
    PY_TAKE("matmul", 3, "a", "b", "out", "stream");
    return multiply_two(v, names, tch_matmul, py_shape_product);
}

static PyObject *matmul_chunked(PY_ARGUMENTS)
{
    PY_TAKE("matmul_chunked", 4, "a", "b", "memory_budget", "out", "device", "stream");
    int64_t budget;
    tch_device device;
    if (py_take_int(v[2], "memory_budget", 0, INT64_MAX, &budget) < 0) {
        return NULL;
    }
    bool somewhere = v[4] != NULL && v[4] != Py_None;
    if (somewhere && py_take_device(v[4], "device", &device) < 0) {
        return NULL;
    }
    PY_BEGIN(v[5], somewhere ? &device : NULL, PY_IN(0), PY_IN(1), PY_MAYBE_OUT(3));
    PY_MAKE(2, 0, py_shape_product(t[0], t[1]));
    PY_CALL(call, tch_matmul_chunked(call.context, t[0], t[1], budget, t[2]));
    return py_call_end(&call);
}

static py_shape shape_of_first(const tch_tensor *a, const tch_tensor *b)
{
    (void)b;
    return py_shape_like(a);
}

static PyObject *symmetric_product(PY_ARGUMENTS)
{
    PY_TAKE("symmetric_product", 3, "a", "b", "out", "stream");
    return multiply_two(v, names, tch_symmetric_product, shape_of_first);
}

static PyObject *gram(PY_ARGUMENTS)
{
    PY_TAKE("gram", 4, "a", "transpose", "alpha", "out", "stream");
    double alpha;
    bool transpose;
    if (py_take_bool(v[1], "transpose", &transpose) < 0 || py_take_double(v[2], "alpha", &alpha) < 0) {
        return NULL;
    }
    PY_BEGIN(v[4], NULL, PY_IN(0), PY_MAYBE_OUT(3));
    PY_MAKE(1, 0, py_shape_gram(t[0], transpose));
    PY_CALL(call, tch_gram(call.context, alpha, t[0], transpose, 0.0, t[1]));
    return py_call_end(&call);
}

/* --- eigenvalues, powers, roots ---------------------------------------------------------------------------------- */

static PyObject *eigh(PY_ARGUMENTS)
{
    PY_TAKE("eigh", 3, "a", "w", "v", "report", "stream");
    PY_BEGIN(v[4], NULL, PY_IN(0), PY_MAYBE_OUT(1), PY_MAYBE_OUT(2), PY_MAYBE_OUT(3));
    if (t[1] == NULL) { /* then both are needed */
        py_call_make(&call, 1, 0, py_shape_rows(t[0]));
        if (t[2] == NULL) {
            py_call_make(&call, 2, 0, py_shape_like(t[0]));
        }
    }
    PY_CALL(call, tch_eigh(call.context, t[0], t[1], t[2], t[3]));
    return py_call_end(&call);
}

static PyObject *matrix_power(PY_ARGUMENTS)
{
    PY_TAKE("matrix_power", 4, "a", "power", "eps", "out", "report", "stream");
    double power, eps;
    if (py_take_double(v[1], "power", &power) < 0 || py_take_double(v[2], "eps", &eps) < 0) {
        return NULL;
    }
    PY_BEGIN(v[5], NULL, PY_IN(0), PY_MAYBE_OUT(3), PY_MAYBE_OUT(4));
    PY_MAKE(1, 0, py_shape_like(t[0]));
    PY_CALL(call, tch_matrix_power(call.context, t[0], power, eps, t[1], t[2]));
    return py_call_end(&call);
}

static PyObject *matrix_power_backward(PY_ARGUMENTS)
{
    PY_TAKE("matrix_power_backward", 5, "a", "power", "eps", "grad", "out", "report", "stream");
    double power, eps;
    if (py_take_double(v[1], "power", &power) < 0 || py_take_double(v[2], "eps", &eps) < 0) {
        return NULL;
    }
    PY_BEGIN(v[6], NULL, PY_IN(0), PY_IN(3), PY_MAYBE_OUT(4), PY_MAYBE_OUT(5));
    PY_MAKE(2, 0, py_shape_like(t[0]));
    PY_CALL(call, tch_matrix_power_backward(call.context, t[0], power, eps, t[1], t[2], t[3]));
    return py_call_end(&call);
}

static PyObject *inverse_root(PY_ARGUMENTS)
{
    PY_TAKE("inverse_root", 7, "a", "root", "eps", "relative_eps", "method", "tolerance", "out", "residual", "report",
            "stream");
    static const char *const methods[] = {"auto", "eigen", "newton", "rational", NULL};
    int64_t root;
    int method;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    if (py_take_int(v[1], "root", INT32_MIN, INT32_MAX, &root) < 0 || py_take_double(v[2], "eps", &config.eps) < 0 ||
        py_take_double(v[3], "relative_eps", &config.relative_eps) < 0 ||
        py_take_word(v[4], "method", methods, &method) < 0 ||
        py_take_double(v[5], "tolerance", &config.tolerance) < 0) {
        return NULL;
    }
    config.method = (tch_root_method)method;
    PY_BEGIN(v[9], NULL, PY_IN(0), PY_MAYBE_OUT(6), PY_MAYBE_OUT(7), PY_MAYBE_OUT(8));
    PY_MAKE(1, 0, py_shape_like(t[0]));
    PY_CALL(call, tch_inverse_root(call.context, t[0], (int32_t)root, &config, t[1], t[2], t[3]));
    return py_call_end(&call);
}

static PyObject *inverse_root_backward(PY_ARGUMENTS)
{
    PY_TAKE("inverse_root_backward", 6, "a", "root", "eps", "relative_eps", "grad", "out", "report", "stream");
    int64_t root;
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    if (py_take_int(v[1], "root", INT32_MIN, INT32_MAX, &root) < 0 || py_take_double(v[2], "eps", &config.eps) < 0 ||
        py_take_double(v[3], "relative_eps", &config.relative_eps) < 0) {
        return NULL;
    }
    PY_BEGIN(v[7], NULL, PY_IN(0), PY_IN(4), PY_MAYBE_OUT(5), PY_MAYBE_OUT(6));
    PY_MAKE(2, 0, py_shape_like(t[0]));
    PY_CALL(call, tch_inverse_root_backward(call.context, t[0], (int32_t)root, &config, t[1], t[2], t[3]));
    return py_call_end(&call);
}

/* --- orthogonalization ------------------------------------------------------------------------------------------- */

static PyObject *orthogonalize(PY_ARGUMENTS)
{
    PY_TAKE("orthogonalize", 4, "a", "steps", "method", "out", "stream");
    static const char *const methods[] = {"polar_express", "muon", "minimax", NULL};
    int64_t steps;
    int method;
    if (py_take_int(v[1], "steps", INT32_MIN, INT32_MAX, &steps) < 0 ||
        py_take_word(v[2], "method", methods, &method) < 0) {
        return NULL;
    }
    PY_BEGIN(v[4], NULL, PY_IN(0), PY_MAYBE_OUT(3));
    PY_MAKE(1, 0, py_shape_like(t[0]));
    PY_CALL(call, tch_orthogonalize(call.context, t[0], (int32_t)steps, (tch_ortho_method)method, t[1]));
    return py_call_end(&call);
}

/* --- Kronecker algebra ------------------------------------------------------------------------------------------- */

static PyObject *kronecker_product(PY_ARGUMENTS)
{
    PY_TAKE("kronecker_product", 3, "a", "b", "out", "stream");
    return multiply_two(v, names, tch_kronecker_product, py_shape_kronecker);
}

static PyObject *kronecker_matmul(PY_ARGUMENTS)
{
    PY_TAKE("kronecker_matmul", 4, "a", "b", "x", "out", "stream");
    return multiply_three(v, names, tch_kronecker_matmul, py_shape_kronecker_matmul);
}

static PyObject *kronecker_apply(PY_ARGUMENTS)
{
    PY_TAKE("kronecker_apply", 4, "a", "b", "x", "out", "stream");
    return multiply_three(v, names, tch_kronecker_apply, py_shape_kronecker_apply);
}

static PyObject *kronecker_solve(PY_ARGUMENTS)
{
    PY_TAKE("kronecker_solve", 5, "a", "b", "x", "damping", "out", "report", "stream");
    double damping;
    if (py_take_double(v[3], "damping", &damping) < 0) {
        return NULL;
    }
    PY_BEGIN(v[6], NULL, PY_IN(0), PY_IN(1), PY_IN(2), PY_MAYBE_OUT(4), PY_MAYBE_OUT(5));
    PY_MAKE(3, 2, py_shape_like(t[2]));
    PY_CALL(call, tch_kronecker_solve(call.context, t[0], t[1], t[2], damping, t[3], t[4]));
    return py_call_end(&call);
}

static PyObject *nearest_kronecker(PY_ARGUMENTS)
{
    PY_TAKE("nearest_kronecker", 4, "m", "a", "b", "error", "stream");
    int64_t size[2][2];
    bool made = PyTuple_Check(v[1]) && PyTuple_Check(v[2]);
    if (made && (py_take_sizes(v[1], "a", 0, INT64_MAX, 2, 2, size[0]) < 0 ||
                 py_take_sizes(v[2], "b", 0, INT64_MAX, 2, 2, size[1]) < 0)) {
        return NULL;
    }
    PY_BEGIN(v[4], NULL, PY_IN(0), made ? PY_NONE(1) : PY_OUT(1), made ? PY_NONE(2) : PY_OUT(2), PY_MAYBE_OUT(3));
    for (int i = 0; made && i < 2; i++) {
        py_call_make(&call, 1 + i, 0, py_shape_matrices(t[0], size[i][0], size[i][1]));
    }
    PY_CALL(call, tch_nearest_kronecker(call.context, t[0], t[1], t[2], t[3]));
    return py_call_end(&call);
}

int py_linalg_register(PyObject *module)
{
    static PyMethodDef functions[] = {
        PY_METHOD("matmul", matmul, "out = a b"),
        PY_METHOD("matmul_chunked", matmul_chunked, "out = a b within a memory budget"),
        PY_METHOD("symmetric_product", symmetric_product, "out = a b for symmetric a and b that commute"),
        PY_METHOD("gram", gram, "out = alpha a a', or with a' a"),
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

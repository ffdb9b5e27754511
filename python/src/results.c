/* Shapes of results: see results.h. Only what the shape itself needs is checked here. */
#include "results.h"

#include <stdio.h>
#include <string.h>

static const py_shape none = {.rank = -1};

/* "[2, 3]" */
static const char *describe_sizes(const int64_t *sizes, int32_t rank, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < rank && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i > 0 ? ", " : "", (long long)sizes[i]);
    }
    snprintf(text + (used < size ? used : size - 2), 2, "]");
    return text;
}

static bool is_matrix(const tch_tensor *t, const char *name)
{
    char text[200];
    if (t->ndim >= 2) {
        return true;
    }
    PyErr_Format(PyExc_ValueError, "%s has shape %s, expected a matrix or a batch of matrices, [..., m, n]", name,
                 describe_sizes(t->shape, t->ndim, text, sizeof text));
    return false;
}

static int64_t rows_of(const tch_tensor *t)
{
    return t->shape[t->ndim - 2];
}

static int64_t columns_of(const tch_tensor *t)
{
    return t->shape[t->ndim - 1];
}

/* Matrices with the leading dimensions of `leading`. */
static py_shape shape_of_matrices(const tch_tensor *leading, int64_t rows, int64_t columns)
{
    py_shape shape = {.rank = leading->ndim};
    memcpy(shape.sizes, leading->shape, (size_t)leading->ndim * sizeof(int64_t));
    shape.sizes[shape.rank - 2] = rows;
    shape.sizes[shape.rank - 1] = columns;
    return shape;
}

py_shape py_shape_like(const tch_tensor *a)
{
    py_shape shape = {.rank = a->ndim};
    memcpy(shape.sizes, a->shape, (size_t)a->ndim * sizeof(int64_t));
    return shape;
}

py_shape py_shape_rows(const tch_tensor *a)
{
    if (!is_matrix(a, "a")) {
        return none;
    }
    py_shape shape = py_shape_like(a);
    shape.rank--;
    return shape;
}

py_shape py_shape_matrices(const tch_tensor *a, const char *name, const int64_t size[2])
{
    return is_matrix(a, name) ? shape_of_matrices(a, size[0], size[1]) : none;
}

py_shape py_shape_gram(const tch_tensor *a, bool transpose)
{
    if (!is_matrix(a, "a")) {
        return none;
    }
    int64_t n = transpose ? columns_of(a) : rows_of(a);
    return shape_of_matrices(a, n, n);
}

/* --- products ---------------------------------------------------------------------------------------------------- */

static py_shape cannot_broadcast(const tch_tensor *a, const tch_tensor *b)
{
    char of_a[200];
    char of_b[200];
    PyErr_Format(PyExc_ValueError, "the leading dimensions %s of b and %s of a cannot be broadcast together",
                 describe_sizes(b->shape, b->ndim - 2, of_b, sizeof of_b),
                 describe_sizes(a->shape, a->ndim - 2, of_a, sizeof of_a));
    return none;
}

/* `a` has at least as many dimensions as `b`. */
static py_shape broadcast_shape(const tch_tensor *wide, const tch_tensor *narrow, int64_t rows, int64_t columns,
                                bool *fits)
{
    py_shape shape = shape_of_matrices(wide, rows, columns);
    int32_t offset = wide->ndim - narrow->ndim;
    *fits = true;
    for (int32_t i = 0; i < narrow->ndim - 2; i++) {
        int64_t size = narrow->shape[i];
        int64_t *both = &shape.sizes[offset + i];
        *fits = *fits && (*both == size || *both == 1 || size == 1);
        *both = *both == 1 ? size : *both;
    }
    return shape;
}

py_shape py_shape_product(const tch_tensor *a, const tch_tensor *b)
{
    if (!is_matrix(a, "a") || !is_matrix(b, "b")) {
        return none;
    }
    if (columns_of(a) != rows_of(b)) {
        char of_a[200];
        char of_b[200];
        PyErr_Format(PyExc_ValueError, "b has shape %s, expected %lld rows, as many as a of shape %s has columns",
                     describe_sizes(b->shape, b->ndim, of_b, sizeof of_b), (long long)columns_of(a),
                     describe_sizes(a->shape, a->ndim, of_a, sizeof of_a));
        return none;
    }
    bool fits;
    bool a_is_wide = a->ndim >= b->ndim;
    py_shape shape = broadcast_shape(a_is_wide ? a : b, a_is_wide ? b : a, rows_of(a), columns_of(b), &fits);
    return fits ? shape : cannot_broadcast(a, b);
}

/* --- Kronecker algebra ------------------------------------------------------------------------------------------- */

static const tch_tensor *with_leading(const tch_tensor *first, const tch_tensor *second)
{
    return first->ndim > 2 ? first : second;
}

static py_shape checked_shape(py_shape shape)
{
    if (shape.sizes[shape.rank - 2] < 0 || shape.sizes[shape.rank - 1] < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the Kronecker product of a and b has more rows or columns than 63 bits count");
        return none;
    }
    return shape;
}

/* -1 where it does not fit. */
static int64_t checked_product(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? -1 : product;
}

py_shape py_shape_kronecker(const tch_tensor *a, const tch_tensor *b)
{
    if (!is_matrix(a, "a") || !is_matrix(b, "b")) {
        return none;
    }
    return checked_shape(shape_of_matrices(with_leading(a, b), checked_product(rows_of(a), rows_of(b)),
                                           checked_product(columns_of(a), columns_of(b))));
}

py_shape py_shape_kronecker_matmul(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x)
{
    if (!is_matrix(a, "a") || !is_matrix(b, "b") || !is_matrix(x, "x")) {
        return none;
    }
    return checked_shape(
        shape_of_matrices(with_leading(x, with_leading(a, b)), checked_product(rows_of(a), rows_of(b)), columns_of(x)));
}

py_shape py_shape_kronecker_apply(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x)
{
    if (!is_matrix(a, "a") || !is_matrix(b, "b") || !is_matrix(x, "x")) {
        return none;
    }
    return shape_of_matrices(with_leading(x, with_leading(a, b)), rows_of(a), rows_of(b));
}

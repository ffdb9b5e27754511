/* Shapes of results. If arguments do not fit together, the result has the shape of one of them, and the library
 * raises. */
#include <string.h>

#include "calls.h"

static int64_t rows_of(const tch_tensor *t)
{
    return t->ndim >= 2 ? t->shape[t->ndim - 2] : 0;
}

static int64_t columns_of(const tch_tensor *t)
{
    return t->ndim >= 2 ? t->shape[t->ndim - 1] : 0;
}

py_shape py_shape_like(const tch_tensor *a)
{
    py_shape shape = {.rank = a->ndim};
    memcpy(shape.sizes, a->shape, (size_t)a->ndim * sizeof(int64_t));
    return shape;
}

py_shape py_shape_rows(const tch_tensor *a)
{
    py_shape shape = py_shape_like(a);
    shape.rank -= shape.rank > 0;
    return shape;
}

py_shape py_shape_matrices(const tch_tensor *a, int64_t rows, int64_t columns)
{
    py_shape shape = py_shape_like(a);
    if (shape.rank >= 2) {
        shape.sizes[shape.rank - 2] = rows;
        shape.sizes[shape.rank - 1] = columns;
    }
    return shape;
}

py_shape py_shape_gram(const tch_tensor *a, bool transpose)
{
    int64_t n = transpose ? columns_of(a) : rows_of(a);
    return py_shape_matrices(a, n, n);
}

py_shape py_shape_product(const tch_tensor *a, const tch_tensor *b)
{
    const tch_tensor *longer = a->ndim >= b->ndim ? a : b, *shorter = longer == a ? b : a;
    py_shape shape = py_shape_matrices(longer, rows_of(a), columns_of(b));
    bool fits = shorter->ndim >= 2 && columns_of(a) == rows_of(b);
    for (int32_t i = 0; fits && i < shorter->ndim - 2; i++) {
        int64_t size = shorter->shape[i];
        int64_t *both = &shape.sizes[longer->ndim - shorter->ndim + i];
        fits = *both == size || *both == 1 || size == 1;
        *both = *both == 1 ? size : *both;
    }
    return fits ? shape : py_shape_like(a);
}

/* --- Kronecker algebra ------------------------------------------------------------------------------------------- */

static const tch_tensor *with_leading(const tch_tensor *first, const tch_tensor *second)
{
    return first->ndim > 2 ? first : second;
}

/* Sizes above 63 bits exceed any memory. */
static int64_t capped_product(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

py_shape py_shape_kronecker(const tch_tensor *a, const tch_tensor *b)
{
    return py_shape_matrices(with_leading(a, b), capped_product(rows_of(a), rows_of(b)),
                             capped_product(columns_of(a), columns_of(b)));
}

py_shape py_shape_kronecker_matmul(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x)
{
    return py_shape_matrices(with_leading(x, with_leading(a, b)), capped_product(rows_of(a), rows_of(b)),
                             columns_of(x));
}

py_shape py_shape_kronecker_apply(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x)
{
    return py_shape_matrices(with_leading(x, with_leading(a, b)), rows_of(a), rows_of(b));
}

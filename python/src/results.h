/* Shapes of results that a call makes itself, where the caller gave none. A rule that finds its arguments wrong sets an
 * exception and returns a shape of rank -1. */
#ifndef TORCHIUM_PYTHON_RESULTS_H
#define TORCHIUM_PYTHON_RESULTS_H

#include "python.h"

typedef struct py_shape {
    int32_t rank;
    int64_t sizes[TCH_MAX_RANK];
} py_shape;

/* The shape of `a`. */
py_shape py_shape_like(const tch_tensor *a);

/* [..., n] for a [..., n, n]. */
py_shape py_shape_rows(const tch_tensor *a);

/* [..., rows, columns] for a [..., m, n]. */
py_shape py_shape_matrices(const tch_tensor *a, const char *name, const int64_t size[2]);

/* [..., m, m] for a [..., m, n], or [..., n, n]. */
py_shape py_shape_gram(const tch_tensor *a, bool transpose);

/* [..., m, n] for a [..., m, k] and b [..., k, n], leading dimensions broadcast. */
py_shape py_shape_product(const tch_tensor *a, const tch_tensor *b);

/* [..., m p, n q], [..., m p, r] and [..., m, p] for a [..., m, n], b [..., p, q] and x. The leading dimensions are
 * those of the argument that has any; the library checks that the others agree. */
py_shape py_shape_kronecker(const tch_tensor *a, const tch_tensor *b);
py_shape py_shape_kronecker_matmul(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x);
py_shape py_shape_kronecker_apply(const tch_tensor *a, const tch_tensor *b, const tch_tensor *x);

#endif

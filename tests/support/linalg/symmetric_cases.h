/* Symmetric matrices for the conformance cases, with their eigendecompositions by the reference. A size has one set of
 * matrices, whatever the layout, so that each reference is computed once and kept. */
#ifndef TORCHIUM_TESTS_SYMMETRIC_CASES_H
#define TORCHIUM_TESTS_SYMMETRIC_CASES_H

#include "cases.h"

/* One matrix as the dtype holds it: a, and its eigenvalues w (ascending) and eigenvectors v by the reference. */
typedef struct known_matrix {
    int64_t n;
    double *a, *w, *v;
} known_matrix;

/* Spectrum from 1 down to 1/condition in equal ratios; a negative condition makes every second eigenvalue negative.
 * `index` tells the matrices of one size apart. Kept until test_known_release. */
const known_matrix *test_known(int64_t n, int64_t index, double condition, tch_dtype dtype);
void test_known_release(void);
int test_close_known(void **state); /* test_close_context after it */

/* The batch of a case, of such matrices; the input's layout with one exception: single matrices are not expanded,
 * since equal rows are not symmetric. */
test_tensor *test_known_tensor(tch_context *context, const test_variation *v, double condition, tch_dtype dtype);

/* Matrix number b of that tensor: expanded batches repeat the matrices of the last index. */
const known_matrix *test_known_of(const test_variation *v, int64_t b, double condition, tch_dtype dtype);

#endif

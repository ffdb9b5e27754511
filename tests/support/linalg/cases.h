/* The table of cases for all conformance tests: sizes 1, 2, 3, odd, and around powers of two, where kernels have edge
 * cases; empty batches, single matrices, and one or several batch dimensions; all pairs of input and output layouts for
 * small matrices, and each layout at least once for large ones. */
#ifndef TORCHIUM_TESTS_CASES_H
#define TORCHIUM_TESTS_CASES_H

#include <stddef.h>

#include "support/tensors.h"

#define TEST_MAX_BATCH_RANK 3

typedef struct test_variation {
    int64_t n, k, m; /* n by n matrices; or products n by k times k by m */
    int32_t batch_rank;
    int64_t batch[TEST_MAX_BATCH_RANK];
    int64_t matrices;    /* product of batch */
    test_layout in, out; /* out is never expanded */
    uint64_t stream;     /* for random numbers: the same for every layout of the same size */
} test_variation;

typedef void (*test_check)(tch_context *context, const test_variation *v, tch_dtype dtype);

/* Calls `check` for every case with n at most `largest`, and sets the case's name. */
void test_for_each_case(tch_context *context, const char *operation, tch_dtype dtype, int64_t largest,
                        test_check check);

/* The same for every floating-point type, half types with n at most `largest_half`. */
void test_for_each_dtype(tch_context *context, const char *operation, int64_t largest, int64_t largest_half,
                         test_check check);

/* The same for every row of a table of operations. */
typedef struct test_conformance {
    const char *operation;
    int64_t largest, largest_half;
    test_check check;
} test_conformance;
void test_for_each_operation(tch_context *context, const test_conformance *rows, size_t count);

/* A tensor of the batch's shape followed by rows and cols (-1: omitted). */
test_tensor *test_case_tensor(tch_context *context, const test_variation *v, tch_dtype dtype, int64_t rows,
                              int64_t cols, test_layout layout);

/* The same filled with normal random numbers. */
test_tensor *test_case_random(tch_context *context, const test_variation *v, tch_dtype dtype, int64_t rows,
                              int64_t cols, test_layout layout, uint64_t salt);

/* --- symmetric matrices ------------------------------------------------------------------------------------------- */

/* Each size has one set of matrices, whatever the layout, so that references are computed once and cached. One matrix
 * as rounded to the dtype: a, and its eigenvalues w (ascending) and eigenvectors v by the reference. */
typedef struct known_matrix {
    int64_t n;
    double *a, *w, *v;
} known_matrix;

/* A geometric spectrum from 1 down to 1/condition; a negative condition makes every second eigenvalue negative. `index`
 * distinguishes matrices of one size. Cached until test_known_release. */
const known_matrix *test_known(int64_t n, int64_t index, double condition, tch_dtype dtype);
void test_known_release(void);
int test_close_known(void **state); /* test_close_context after it */

/* A batch of such matrices in the case's input layout, but single matrices are not expanded, since equal rows are not
 * symmetric. */
test_tensor *test_known_tensor(tch_context *context, const test_variation *v, double condition, tch_dtype dtype);

/* Matrix b of that tensor: expanded batches repeat the matrices of the last index. */
const known_matrix *test_known_of(const test_variation *v, int64_t b, double condition, tch_dtype dtype);

#endif

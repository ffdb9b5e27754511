/* Steps shared by the algorithms, on batches in scratch memory: products with a generic fallback, the inspection of
 * symmetric inputs, and argument checks. */
#ifndef TCHI_ALGEBRA_H
#define TCHI_ALGEBRA_H

#include <torchium/linalg.h>

#include "core/context.h"
#include "core/tensor.h"

/* C = A B, where C is symmetric. */
tch_status tchi_symmetric_product(tch_context *context, const tch_matrices *a, const tch_matrices *b,
                                  const tch_matrices *c);

/* C = c0 I + c1 D + c2 A B, all symmetric; D may be NULL. */
tch_status tchi_symmetric_polynomial(tch_context *context, double c0, double c1, const tch_matrices *d, double c2,
                                     const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);

/* C = X S for lower triangular X, whose upper triangle is not read. */
tch_status tchi_lower_product(tch_context *context, const tch_matrices *x, const tch_matrices *s,
                              const tch_matrices *c);

/* out = X', for every matrix. */
tch_status tchi_transpose(tch_context *context, const tch_matrices *x, const tch_matrices *out);

/* The backend's relative product throughput by type; by default float32 is twice as fast as float64. */
tch_product_rates tchi_product_rates(const tch_context *context);

/* C = alpha A A' + beta C, or alpha A' A + beta C. */
tch_status tchi_gram(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                     const tch_matrices *c);

/* The same with float32 operands rounded to 11 bits if that is faster. */
tch_status tchi_gram_rounded(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                             const tch_matrices *c);

/* Per-matrix numbers on the device. */
typedef struct tchi_inspection {
    double *largest;
    double *max_abs, *nonfinite, *asymmetry; /* contiguous, in this order */
    double *damping, *bound;
    int32_t *flags;
} tchi_inspection;

void tchi_inspection_layout(tchi_inspection *inspection, tchi_arena *arena, int64_t batch);

/* Largest |a_ij - a_ji|, relative to the largest entry, that counts as symmetric. */
double tchi_symmetry_tolerance(tch_scalar type);

/* Computes max_abs, nonfinite and asymmetry. */
tch_status tchi_measure(tch_context *context, const tch_matrices *a, tchi_inspection *inspection);

/* Flags each matrix as finite and symmetric or not; `type` is the type of the caller's tensor. */
tch_status tchi_inspect(tch_context *context, const tch_matrices *a, tch_scalar type, tchi_inspection *inspection);

/* Copies flags to the caller's report or, without one, synchronizes and returns an error for the first bad matrix.
 * `first` is the index of this part's first matrix in the batch; *bad keeps the first message over all parts. */
tch_status tchi_report(tch_context *context, const tch_tensor *report, int64_t first, int64_t count,
                       const int32_t *flags, const char *name, tch_status *bad);

/* tch_inverse_root of the `count` matrices whose indices are `picked`, ascending; of all where that is NULL. */
tch_status tchi_inverse_root_of(tch_context *context, const tch_tensor *a, const int64_t *picked, int64_t count,
                                int32_t root, const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                tch_tensor *report);

/* `report` is NULL, or an int32 tensor of the leading dimensions of `tensor`. */
tch_status tchi_check_report(const tch_context *context, const tch_tensor *report, const char *name,
                             const tch_tensor *tensor, tch_dtype dtype);

/* Checks a matrix power and its eps. */
tch_status tchi_check_power(double power, double eps);

/* Checks sizes against the 32-bit integers of the libraries below: of one matrix, in a batch of any size. */
#define TCHI_MOST_SIZE INT32_MAX
tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name);

/* Checks an input: matrices of a valid size and a float type. */
tch_status tchi_check_matrices(const tch_context *context, const tch_tensor *tensor, const char *name);

/* Checks an output: the type and shape of `tensor`. */
tch_status tchi_check_output_like(const tch_context *context, const tch_tensor *out, const char *out_name,
                                  const tch_tensor *tensor, const char *name);

/* The largest number that rounds to a finite number of this type. */
double tchi_most_number(tch_scalar type);

#endif

/* Steps shared by the algorithms, on batches in scratch memory: products that fall back to general ones where a backend
 * has no better, the inspection of symmetric inputs, and checks of arguments. */
#ifndef TCHI_ALGEBRA_H
#define TCHI_ALGEBRA_H

#include "core/context.h"
#include "core/tensor.h"

/* C = A B, which is symmetric. */
tch_status tchi_symmetric_product(tch_context *context, const tch_matrices *a, const tch_matrices *b,
                                  const tch_matrices *c);

/* C = c0 I + c1 D + c2 A B, all of them symmetric; D may be NULL. */
tch_status tchi_symmetric_polynomial(tch_context *context, double c0, double c1, const tch_matrices *d, double c2,
                                     const tch_matrices *a, const tch_matrices *b, const tch_matrices *c);

/* C = X S for lower triangular X, whose other half is not looked at. */
tch_status tchi_lower_product(tch_context *context, const tch_matrices *x, const tch_matrices *s,
                              const tch_matrices *c);

/* out = X', for every matrix. */
tch_status tchi_transpose(tch_context *context, const tch_matrices *x, const tch_matrices *out);

/* What the backend says of its arithmetic; where it says nothing, float32 is twice as fast as float64. */
tch_product_rates tchi_product_rates(const tch_context *context);

/* C = alpha A A' + beta C, or alpha A' A + beta C. */
tch_status tchi_gram(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                     const tch_matrices *c);

/* The same where operands of float32 may be rounded to 11 bits, if the backend gains by it. */
tch_status tchi_gram_rounded(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                             const tch_matrices *c);

/* Numbers per matrix, on the device. */
typedef struct tchi_inspection {
    double *largest;
    double *max_abs, *nonfinite, *asymmetry; /* one behind the other */
    double *damping, *bound;
    int32_t *flags;
} tchi_inspection;

void tchi_inspection_layout(tchi_inspection *inspection, tchi_arena *arena, int64_t batch);

/* Largest |a_ij - a_ji| that still counts as symmetric, relative to the largest entry. */
double tchi_symmetry_tolerance(tch_scalar type);

/* Only the numbers flags are judged by: max_abs, nonfinite and asymmetry. */
tch_status tchi_measure(tch_context *context, const tch_matrices *a, tchi_inspection *inspection);

/* Flags each matrix as finite and symmetric or not; `type` is that of the caller's tensor. */
tch_status tchi_inspect(tch_context *context, const tch_matrices *a, tch_scalar type, tchi_inspection *inspection);

/* Copies flags to the caller's report, or, without one, waits and turns the first bad matrix into an error. `first` is
 * the number of the first matrix of this part of the batch; *bad keeps the message of the first bad one over all
 * parts. */
tch_status tchi_report(tch_context *context, const tch_tensor *report, int64_t first, int64_t count,
                       const int32_t *flags, const char *name, tch_status *bad);

/* `report` is NULL, or an int32 tensor of the leading dimensions of `tensor`. */
tch_status tchi_check_report(const tch_context *context, const tch_tensor *report, const char *name,
                             const tch_tensor *tensor, tch_dtype dtype);

/* The numbers of a matrix power. */
tch_status tchi_check_power(double power, double eps);

/* Sizes that the libraries below support, whose integers have 32 bits: of one matrix, in a batch of any size. */
#define TCHI_MOST_SIZE INT32_MAX
tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name);

/* An input: matrices of such a size, of a float type. */
tch_status tchi_check_matrices(const tch_context *context, const tch_tensor *tensor, const char *name);

/* An output of the type and the shape of `tensor`. */
tch_status tchi_check_output_like(const tch_context *context, const tch_tensor *out, const char *out_name,
                                  const tch_tensor *tensor, const char *name);

/* The largest number that is still finite when it is rounded to this type. */
double tchi_most_number(tch_scalar type);

#endif

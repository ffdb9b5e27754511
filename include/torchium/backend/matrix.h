/* Operations table, chapter 2: batches of matrices. Every backend has it; the matrix functions use it, and the
 * optimizers use those.
 *
 * An operation processes a whole batch. Values per matrix are arrays of double on the device, and flags arrays of
 * int32_t, each a tch_report. Where an operation says so, a matrix whose flag is not TCH_REPORT_OK on entry is skipped
 * and its result is undefined.
 *
 * Arguments have been validated; sizes may be zero. Outputs do not overlap inputs unless an entry allows it. Results do
 * not depend on how a batch is divided among calls. */
#ifndef TORCHIUM_BACKEND_MATRIX_H
#define TORCHIUM_BACKEND_MATRIX_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/linalg.h>
#include <torchium/status.h>

typedef enum tch_reduction {
    TCH_REDUCE_FROBENIUS = 0, /* square root of the sum of squares, without overflow */
    TCH_REDUCE_MAX_ABS = 1,   /* largest |entry| */
    TCH_REDUCE_TRACE = 2,     /* sum of the diagonal */
    TCH_REDUCE_NONFINITE = 3, /* number of entries that are infinite or NaN */
    TCH_REDUCE_ASYMMETRY = 4, /* largest |a_ij - a_ji|, square matrices only */
    TCH_REDUCE_INSPECT = 5,   /* MAX_ABS, NONFINITE and ASYMMETRY of square matrices, as contiguous arrays */
    TCH_REDUCE_COUNT = 6
} tch_reduction;

/* Inputs of `root_setup`; arrays with one double per matrix. */
typedef struct tch_root_norms {
    const double *largest; /* largest eigenvalue, estimated from below */
    const double *max_abs;
    const double *nonfinite;
    const double *asymmetry;
} tch_root_norms;

/* The function of eigenvalues that `spectrum_power` and `divided_differences` use. */
typedef struct tch_spectrum_map {
    double eps; /* damping = max(eps, relative_eps * largest eigenvalue) */
    double relative_eps;
    double power;    /* w is mapped to (w + damping)^power */
    int32_t clamp;   /* w + damping is replaced by damping if it is below it (1), or not positive (0) */
    double negative; /* without clamp, an eigenvalue below both -negative * largest and -damping makes the matrix
                            TCH_REPORT_NOT_POSITIVE */
} tch_spectrum_map;

/* Throughput of large matrix products for each compute type, in any unit, from which algorithms choose. 0 for an
 * unsupported type; a backend with bf16x2 has `split_rows`, and its `cholesky` supports `inverse` = 0. */
typedef struct tch_product_rates {
    double f64, f32;
    double bf16x2;        /* split operands: hi hi + hi lo + lo hi, accumulated in float32 */
    double bf16;          /* accumulated in float32 */
    double f16x2;         /* operands split by `split_rows`, as three float16 products by gemm */
    int64_t newton_limit; /* largest n that `newton` supports, 0 for none */
} tch_product_rates;

/* Elements of `scale` per matrix in `normalize`. */
#define TCH_NORMALIZE_NUMBERS 65

/* The coupled iteration of an inverse root: H = c[0] I + c[1] M + c[2] M^2, X <- X H, M <- H^root M. */
#define TCH_NEWTON_MAX_STEPS 40
typedef struct tch_newton_iteration {
    int32_t root;
    int32_t degree; /* of H: 1 or 2 */
    int32_t count;  /* of steps */
    double c[TCH_NEWTON_MAX_STEPS][3];
} tch_newton_iteration;

/* A product with operands or result in host memory. */
typedef struct tch_streamed_product {
    double alpha, beta;
    tch_matrices a, b, c; /* batch of 1 each, row-major */
    int32_t transpose_a, transpose_b;
    int32_t a_on_host, b_on_host, c_on_host;
} tch_streamed_product;

/* --- elementwise ------------------------------------------------------------------------------------------------- */

/* dst = src, converted by rounding to nearest even; equal shapes, any strides of src (0 repeats). */
typedef tch_status tch_copy_op(void *state, const tch_array *dst, const tch_array *src);
/* Every element of dst = value. */
typedef tch_status tch_fill_op(void *state, const tch_array *dst, double value);
/* out = c0 I + c1 X + c2 Y; x or y may be NULL with its coefficient ignored; out may be x or y. */
typedef tch_status tch_combine_op(void *state, double c0, double c1, const tch_matrices *x, double c2,
                                  const tch_matrices *y, const tch_matrices *out);
/* out_b = (X_b + shift_b I) scale_b^exponent; shift and scale may be NULL, for 0 and 1. Float types, the split type
 * included, may differ; in place is allowed if they do not. */
typedef tch_status tch_shift_scale_op(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                      double exponent, const tch_matrices *out);
/* out(i, j) = X(i, j) w(i), with w 1 by rows per matrix, of X's type; in place allowed. */
typedef tch_status tch_scale_rows_op(void *state, const tch_matrices *x, const tch_matrices *w,
                                     const tch_matrices *out);
/* Random signs +1 and -1 that depend only on seed, row and column, not on the batch. */
typedef tch_status tch_random_signs_op(void *state, uint64_t seed, const tch_matrices *out);
/* out_b = X_b, converted, where flags[b] is 0; other out_b are unchanged. */
typedef tch_status tch_select_op(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out);
/* Packed storage of symmetric float32 or float64 matrices: the rows of the lower triangle, n (n + 1) / 2 elements per
 * matrix, without gaps. Packing reads the lower triangle of X; with `unpack` both triangles are written. `type`, of the
 * packed elements, is that of the matrices, or bfloat16 for float32 ones, rounded to nearest even. */
typedef tch_status tch_pack_op(void *state, const tch_matrices *x, tch_scalar type, void *packed, int32_t unpack);
/* The Kronecker product of each pair. */
typedef tch_status tch_kronecker_op(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out);

/* --- reductions and decisions ------------------------------------------------------------------------------------ */

/* One double per matrix; three with TCH_REDUCE_INSPECT. */
typedef tch_status tch_reduce_op(void *state, tch_reduction kind, const tch_matrices *x, double *out);
/* flags[b] = OVERFLOW where it is OK and X_b has a NaN or an entry above `most` in absolute value. */
typedef tch_status tch_flag_overflow_op(void *state, const tch_matrices *x, double most, int32_t *flags);
/* A lower estimate of each symmetric matrix's largest eigenvalue, by Lanczos iteration from a fixed start vector until
 * the estimated relative error is below `tolerance`, which the device decides, or for a fixed number of steps. */
typedef tch_status tch_largest_eigenvalue_op(void *state, const tch_matrices *x, double tolerance, double *out,
                                             void *scratch);
/* For each matrix: flags = NOT_FINITE, NOT_SYMMETRIC (asymmetry > symmetry * max_abs), OVERFLOW (an infinite bound of
 * finite entries), NOT_POSITIVE (zero matrix without damping) or OK; damping = max(eps, relative_eps * largest); bound
 * = damping + margin * largest, with a margin for the estimate's error. Flagged matrices get damping 0 and bound 1. */
typedef tch_status tch_root_setup_op(void *state, int64_t batch, const tch_root_norms *norms, double eps,
                                     double relative_eps, double margin, double symmetry, double *damping,
                                     double *bound, int32_t *flags);
/* out = |R| / sqrt(n) with R = X^floor(p/2) A X^ceil(p/2) - I for A_b + shift_b I, in float64: over `probes` random
 * sign vectors, or exactly if probes is 0. Unlike others, this balanced form does not amplify the rounding of X. error,
 * if not NULL, = |X R| / (p |X|) likewise, which bounds the relative error of a symmetric X. Unless flags is NULL,
 * flags[b] is set to NO_CONVERGENCE where it is OK and error, or out if error is NULL, is not at most tolerance. */
typedef tch_status tch_root_residual_op(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                        const tch_matrices *x, int32_t probes, double *out, double *error,
                                        double tolerance, int32_t *flags, void *scratch);
/* Factored damping: with pi = sqrt((trace_a / m) / (trace_b / n)), or 1 where a trace is not positive, shift_a = pi
 * sqrt(damping) and shift_b = sqrt(damping) / pi, for each matrix. */
typedef tch_status tch_factored_damping_op(void *state, int64_t batch, const double *trace_a, int64_t m,
                                           const double *trace_b, int64_t n, double damping, double *shift_a,
                                           double *shift_b);

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Without it products are computed in the matrices' type. */
typedef void tch_product_rates_op(void *state, tch_product_rates *rates);
/* C = alpha op(A) op(B) + beta C; with beta = 0, C is not read. All of one type, or C float32 and A and B float16 or
 * bfloat16. With `rounded`, float32 operands may be rounded to 11 bits (TF32), with float32 accumulation: enough for
 * directions, not for roots. */
typedef tch_status tch_gemm_op(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                               const tch_matrices *b, int32_t transpose_b, double beta, int32_t rounded,
                               const tch_matrices *c);
/* C = alpha A A' + beta C (transpose: A' A); writes both triangles, reads only the lower one. Without transpose and
 * beta C may have another type, as in `symmetric_product`. With `rounded`, float32 operands may be rounded to 11 bits,
 * with float32 accumulation, for factors; with product_rates, C may then be float32 and A float16 or bfloat16. */
typedef tch_status tch_gram_op(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                               int32_t rounded, const tch_matrices *c);
/* C = c0 I + c1 D + c2 A B for symmetric B, D and result: the lower half is computed and mirrored. D may be NULL, which
 * ignores c1. A, B and D have one type, and C may have another; all have a rate above 0. In the split type rows are
 * aligned to 16 bytes. C is not an operand.
 *
 * scale is NULL unless `normalize` deferred to these products. Then C_b = scale_b^exponent (c0 I + c1 D + c2 A B'),
 * with exponent 0 to 2; A, B and D are all bfloat16 or all float16, and C is either. */
typedef tch_status tch_symmetric_product_op(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                            const tch_matrices *a, const tch_matrices *b, const double *scale,
                                            int32_t exponent, const tch_matrices *c);
/* X_b = X_b / max(|X_b|, eps); zero matrices are unchanged if eps is 0. If squares could overflow or underflow (norms
 * outside 2^-120 to 2^120, 2^-1000 to 2^1000 in float64), X_b is first scaled by a power of two, unless its norm is
 * below eps.
 *
 * Or *deferred is set to 1, X_b is at most scaled by that power of two, and scale[b] is its remaining factor:
 * `symmetric_product` with that scale then supports the products of a Newton-Schulz step on X in bfloat16 and float16,
 * which saves a pass over X. The decision is that for a batch of `all` matrices of this shape. `scale` always has
 * TCH_NORMALIZE_NUMBERS elements per matrix. */
typedef tch_status tch_normalize_op(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                                    int32_t *deferred);
/* A product larger than the device's memory, with copies in both directions that overlap with the arithmetic. `scratch`
 * is device memory; pageable host memory is copied through page-locked buffers of the state, which this may allocate.
 * Returns when host operands have been read and a host result is complete. */
typedef tch_status tch_streamed_product_op(void *state, const tch_streamed_product *product, void *scratch,
                                           int64_t scratch_bytes);

/* --- spectral ---------------------------------------------------------------------------------------------------- */

/* v holds symmetric matrices, both triangles, and is overwritten: row i is the eigenvector of eigenvalue i. w, 1 by n
 * of v's type, receives the eigenvalues, ascending. An OK flag is set to NO_CONVERGENCE on failure, or to OVERFLOW if
 * an eigenvalue is beyond the type's range; matrices flagged on entry are skipped. */
typedef tch_status tch_eigh_op(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags,
                               void *scratch);
/* Maps w in place; damping (one double per matrix, may be NULL) receives the damping. A negative power of zero or an
 * eigenvalue that is too negative sets the flag to NOT_POSITIVE, any other result beyond w's type to OVERFLOW. */
typedef tch_status tch_spectrum_power_op(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                         double *damping, int32_t *flags);
/* Multiplies B(i, j), float64, by the divided difference of the map's function at eigenvalues i and j of w (1 by n,
 * float64), or by its derivative if they are equal.
 *
 * Without `values`: the derivative of a matrix power in its eigenbasis, w ascending, computed without cancellation;
 * damping is not read. The function is constant where clamped; a negative eigenvalue of at most `negative` times the
 * largest counts as zero, with the derivative from above. If the damping is relative_eps times the largest eigenvalue,
 * its derivative is included, shared evenly among eigenvalues equal to the largest. An OK flag is set to NOT_POSITIVE
 * if a derivative is infinite or, without clamp, an eigenvalue is too negative, and to OVERFLOW if a derivative is
 * beyond float64; matrices flagged on entry are skipped.
 *
 * With `values`, only in backends with product_rates: B is nearly diagonal, w is its diagonal, and values (1 by n) are
 * (w + damping)^power, constant where clamped. B is replaced by that function of B, to first order in its off-diagonal
 * elements; those above half of an eigenvalue are too large for it and are treated as rounding: zero. Flags are not
 * read. */
typedef tch_status tch_divided_differences_op(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                              const tch_matrices *values, const double *damping, const tch_matrices *b,
                                              int32_t *flags);
/* B = (A + shift I)^-1 B for symmetric positive definite A + shift I; A is overwritten. shift may be NULL. flags as in
 * eigh, with NOT_POSITIVE. B may have any number of columns. */
typedef tch_status tch_spd_solve_op(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                                    int32_t *flags, void *scratch);
/* X = sum over j of weights[j] (A + shifts[j] I)^-1 for positive shifts, host arrays; A is overwritten. flags as in
 * spd_solve. One reduction to band form serves all shifts; spd_solve would factor A for each. */
typedef tch_status tch_shifted_inverse_op(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                          const double *weights, const tch_matrices *x, int32_t *flags, void *scratch);
/* X_b = (A_b + shift_b I)^(-1/root), all steps in one launch and in float64: the iteration starts from M = (A + shift
 * I) / bound, and its X is scaled by bound^(-1/root). A and X are float32 or float64, and n is at most the newton_limit
 * of product_rates. For small matrices launches of single steps would take most of the time. */
typedef tch_status tch_newton_op(void *state, const tch_newton_iteration *iteration, const tch_matrices *a,
                                 const double *shift, const double *bound, const tch_matrices *x);
/* A = L L'; X, lower triangular, is L^-1 with `inverse`, else L. A is overwritten. flags as in spd_solve; X of a
 * flagged matrix is undefined. Above the diagonal, L^-1 (float32 or float64) is zero within its diagonal blocks of
 * TCH_LOWER_BLOCK rows, and L (float64) rounding errors within those of TCH_CHOLESKY_BLOCK rows; elements to the right
 * of the blocks are undefined. `scratch` for L has A's size. */
#define TCH_LOWER_BLOCK 128
#define TCH_CHOLESKY_BLOCK 512
typedef tch_status tch_cholesky_op(void *state, const tch_matrices *a, int32_t inverse, const tch_matrices *x,
                                   int32_t *flags, void *scratch);
/* w(i) = (sum over j of X(i, j) Y(i, j))^exponent, summed in float64, with w 1 by rows of X's type; 0 if exponent is
 * not 1 and the sum is not positive. */
typedef tch_status tch_row_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                                   const tch_matrices *w);
/* order[b n + k] is the index of the k-th largest element of w_b (1 by n), ties by index, NaN last. With flags, w is
 * not read: order[b n + k] = k where flags[b] is not 0; other orders are unchanged. */
typedef tch_status tch_descending_op(void *state, const tch_matrices *w, const int32_t *flags, int32_t *order);
/* out(i, j) = X(rows[i], cols[j]), with orders per matrix from `descending`; NULL: no permutation. `out` may be float64
 * for a float32 X. */
typedef tch_status tch_permute_op(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                                  const tch_matrices *out);

/* A batch of matrices times `scale` as high + low, both float16 or both bfloat16. */
typedef struct tch_split_matrices {
    tch_matrices high, low;
    double scale;
} tch_split_matrices;

/* Holds for the matrices b of a batch with of[b] <= most, on the device; NULL: for none. */
typedef struct tch_condition {
    const double *of;
    double most;
} tch_condition;

/* Splits X, float32, or float64 rounded to float32, into two float16: high is X scale rounded, low the rounded
 * remainder. Accurate to 22 bits where low is not below 2^-14, the smallest normal number, otherwise to 2^-25.
 *
 * With `rows`, float32 and possibly X, the rows of X are normalized, stored there, and split, except for matrices for
 * which `done` holds: for these nothing is written. Norms are summed in float64; zero rows stay. Without `rows`, and
 * with shift and bound, (X_b + shift[b] I) / bound[b], computed in float32, is split. */
typedef struct tch_rows_to_split {
    const tch_matrices *x, *rows;
    const tch_split_matrices *out; /* float16; low.data may be NULL: only high parts */
    tch_condition done;            /* only with `rows` */
    const double *shift, *bound;   /* both or neither; only without `rows` */
} tch_rows_to_split;
typedef tch_status tch_split_rows_op(void *state, const tch_rows_to_split *problem);

/* The operands whose low parts a product uses. */
typedef enum tch_low { TCH_LOW_NONE = 0, TCH_LOW_A = 1, TCH_LOW_B = 2, TCH_LOW_BOTH = 3 } tch_low;

/* C = alpha A B + beta C, or A B': the product of the high parts plus, for each operand in `low`, that of its low and
 * the other's high parts, accumulated in float32. C is float32; or the result is `split_c`, float16, split with its
 * scale: then beta is 0, and C gives the shape and is scratch. */
typedef struct tch_split_problem {
    double alpha;
    const tch_split_matrices *a, *b;
    int32_t transpose_b;
    tch_low low;
    double beta;
    const tch_matrices *c;
    const tch_split_matrices *split_c;
    tch_condition high_alone; /* low parts may be ignored */
    tch_condition negligible; /* A B may be treated as zero */
    double *largest;          /* with split_c; NULL, or the maximum of itself and |alpha A B| of each matrix */
    const tch_matrices *wide; /* without split_c; NULL, or the result in float64: then C is input or scratch */
} tch_split_problem;
/* *handled is set to 1, or to 0 if `gemm` on the parts is no slower: then nothing is done. */
typedef tch_status tch_split_product_op(void *state, const tch_split_problem *problem, int32_t *handled);

typedef struct tch_matrix_ops {
    /* REQUIRED */
    tch_copy_op *copy;
    tch_fill_op *fill;
    tch_combine_op *combine;
    tch_shift_scale_op *shift_scale;
    tch_scale_rows_op *scale_rows;
    tch_random_signs_op *random_signs;
    tch_select_op *select;
    tch_kronecker_op *kronecker;
    tch_reduce_op *reduce;
    tch_flag_overflow_op *flag_overflow;
    tch_largest_eigenvalue_op *largest_eigenvalue;
    tch_root_setup_op *root_setup;
    tch_root_residual_op *root_residual;
    tch_factored_damping_op *factored_damping;
    tch_gemm_op *gemm;
    tch_normalize_op *normalize;
    tch_eigh_op *eigh;
    tch_spectrum_power_op *spectrum_power;
    tch_divided_differences_op *divided_differences;
    tch_spd_solve_op *spd_solve;
    tch_cholesky_op *cholesky;
    tch_row_dots_op *row_dots;
    tch_descending_op *descending;
    tch_permute_op *permute;
    /* OPTIONAL: the library works without them, or composes the result */
    tch_product_rates_op *product_rates;
    tch_gram_op *gram;
    tch_symmetric_product_op *symmetric_product;
    /* OPTIONAL, NO DEFAULT: without them, functions are unsupported or use another method */
    tch_streamed_product_op *streamed_product;
    tch_shifted_inverse_op *shifted_inverse;
    tch_newton_op *newton;
    tch_split_rows_op *split_rows;
    tch_split_product_op *split_product;
    tch_pack_op *pack;
} tch_matrix_ops;

#endif

/* Operations table, chapter 2: batches of matrices. Every backend has it: the matrix functions are written over it, and
 * the optimizers over those.
 *
 * An operation works on a whole batch. Numbers that differ between the matrices of a batch live on the device, as
 * arrays of double with one entry per matrix; so do the flags, one int32_t per matrix and one of tch_report. A matrix
 * whose flag is not TCH_REPORT_OK on entry is skipped where an operation says so, and its result is undefined.
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
    TCH_REDUCE_INSPECT = 5,   /* MAX_ABS, NONFINITE and ASYMMETRY of square matrices, one array behind the other */
    TCH_REDUCE_COUNT = 6
} tch_reduction;

/* What `root_setup` decides from; arrays of one double per matrix. */
typedef struct tch_root_norms {
    const double *largest; /* largest eigenvalue, estimated from below */
    const double *max_abs;
    const double *nonfinite;
    const double *asymmetry;
} tch_root_norms;

/* How `spectrum_power` maps eigenvalues, and what `divided_differences` are taken of. */
typedef struct tch_spectrum_map {
    double eps; /* damping = max(eps, relative_eps * largest eigenvalue) */
    double relative_eps;
    double power;    /* w becomes (w + damping)^power */
    int32_t clamp;   /* where w + damping is below damping (1), or not positive (0), damping takes its place */
    double negative; /* without clamp, an eigenvalue below both -negative * largest and -damping makes the matrix
                            TCH_REPORT_NOT_POSITIVE */
} tch_spectrum_map;

/* Products per second of each arithmetic, for large matrices, in any unit: what the choice of arithmetic weighs. 0
 * where the backend does not offer the compute type; one that offers bf16x2 has `split_rows`, and `cholesky`
 * gives the factor itself. */
typedef struct tch_product_rates {
    double f64, f32;
    double bf16x2;        /* split operands: hi hi + hi lo + lo hi, accumulated in float32 */
    double bf16;          /* accumulated in float32 */
    double f16x2;         /* operands split by `split_rows`, as three products of float16 by gemm */
    int64_t newton_limit; /* largest n that `newton` supports, 0 for none */
} tch_product_rates;

/* Numbers of float64 for each matrix that `normalize` is given, the scales among them. */
#define TCH_NORMALIZE_NUMBERS 65

/* The coupled iteration of an inverse root: H = c[0] I + c[1] M + c[2] M^2, X <- X H, M <- H^root M. */
#define TCH_NEWTON_MAX_STEPS 40
typedef struct tch_newton_iteration {
    int32_t root;
    int32_t degree; /* of H: 1 or 2 */
    int32_t count;  /* of steps */
    double c[TCH_NEWTON_MAX_STEPS][3];
} tch_newton_iteration;

/* A product whose operands or result lie in host memory. `host` says which of A, B, C do. */
typedef struct tch_streamed_product {
    double alpha, beta;
    tch_matrices a, b, c; /* batch of 1 each, row-major */
    int32_t transpose_a, transpose_b;
    int32_t a_on_host, b_on_host, c_on_host;
} tch_streamed_product;

/* --- elementwise ------------------------------------------------------------------------------------------------- */

/* dst = src with conversion of type (to nearest even), equal shapes, any strides of src (0 repeats). */
typedef tch_status tch_copy_op(void *state, const tch_array *dst, const tch_array *src);
/* Every element of dst = value. */
typedef tch_status tch_fill_op(void *state, const tch_array *dst, double value);
/* out = c0 I + c1 X + c2 Y; x or y may be NULL with its coefficient ignored; out may be x or y. */
typedef tch_status tch_combine_op(void *state, double c0, double c1, const tch_matrices *x, double c2,
                                  const tch_matrices *y, const tch_matrices *out);
/* out_b = (X_b + shift_b I) scale_b^exponent; shift and scale may be NULL, for 0 and 1; float types may differ, the
 * split type included; in place allowed where they do not. */
typedef tch_status tch_shift_scale_op(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                      double exponent, const tch_matrices *out);
/* out(i, j) = X(i, j) w(i), w being 1 by rows per matrix, of X's type; in place allowed. */
typedef tch_status tch_scale_rows_op(void *state, const tch_matrices *x, const tch_matrices *w,
                                     const tch_matrices *out);
/* Signs +1 and -1 that depend only on seed, row, column and not on the batch. */
typedef tch_status tch_random_signs_op(void *state, uint64_t seed, const tch_matrices *out);
/* out_b = X_b, converted, wherever flags[b] is 0; elsewhere out_b is left as it is. */
typedef tch_status tch_select_op(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out);
/* Packed storage of symmetric matrices, float32 or float64: n (n + 1) / 2 elements for each, the rows of the lower
 * triangle one after the other, without gaps between matrices. Packing reads the lower triangle of X; with `unpack`
 * both of them are written. `type` is that of the packed elements: the matrices' own, whose bits are not changed, or
 * bfloat16 of float32 matrices, rounded to nearest, ties to even. */
typedef tch_status tch_pack_op(void *state, const tch_matrices *x, tch_scalar type, void *packed, int32_t unpack);
/* The Kronecker product of each pair. */
typedef tch_status tch_kronecker_op(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out);

/* --- reductions and decisions ------------------------------------------------------------------------------------ */

/* One double per matrix; three with TCH_REDUCE_INSPECT. */
typedef tch_status tch_reduce_op(void *state, tch_reduction kind, const tch_matrices *x, double *out);
/* flags[b] = OVERFLOW where it is OK and X_b has an entry beyond `most` in size, or a NaN. */
typedef tch_status tch_flag_overflow_op(void *state, const tch_matrices *x, double most, int32_t *flags);
/* An estimate from below of each symmetric matrix's largest eigenvalue, by Lanczos iteration from a fixed start until
 * its relative error is expected below `tolerance` (or, where the device cannot decide, for a fixed number of steps):
 * one call, since the device decides when to stop. */
typedef tch_status tch_largest_eigenvalue_op(void *state, const tch_matrices *x, double tolerance, double *out,
                                             void *scratch);
/* For each matrix: flags = NOT_FINITE, NOT_SYMMETRIC (asymmetry > symmetry * max_abs), OVERFLOW (an infinite bound of
 * finite entries), NOT_POSITIVE (zero matrix and no damping) or OK; damping = max(eps, relative_eps * largest); bound =
 * damping + margin * largest, the margin covering what an estimate lacks. Flagged matrices get damping 0 and bound 1.
  */
typedef tch_status tch_root_setup_op(void *state, int64_t batch, const tch_root_norms *norms, double eps,
                                     double relative_eps, double margin, double symmetry, double *damping,
                                     double *bound, int32_t *flags);
/* out = |R| / sqrt(n) with R = X^floor(p/2) A X^ceil(p/2) - I for A_b + shift_b I, in float64: over `probes` random
 * sign vectors, or exactly when probes is 0. This balanced form is the one that does not magnify X's own rounding.
 * error, if not NULL, = |X R| / (p |X|) likewise, which bounds the error of a symmetric X relative to its norm. Unless
 * flags is NULL, flags[b] = NO_CONVERGENCE where it is OK and error, or out where error is NULL, is not at most
 * tolerance. */
typedef tch_status tch_root_residual_op(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                        const tch_matrices *x, int32_t probes, double *out, double *error,
                                        double tolerance, int32_t *flags, void *scratch);
/* Factored damping: with pi = sqrt((trace_a / m) / (trace_b / n)), or 1 where a trace is not positive, shift_a = pi
 * sqrt(damping) and shift_b = sqrt(damping) / pi, for each matrix. */
typedef tch_status tch_factored_damping_op(void *state, int64_t batch, const double *trace_a, int64_t m,
                                           const double *trace_b, int64_t n, double damping, double *shift_a,
                                           double *shift_b);

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Without it every type is taken to compute in itself, and products are done in the matrices' own type. */
typedef void tch_product_rates_op(void *state, tch_product_rates *rates);
/* C = alpha op(A) op(B) + beta C; beta = 0 does not read C. One type for all three, or C of float32 where A and B are
 * of a half type. With `rounded`, operands of float32 may be rounded to 11 bits (TF32), with sums in float32: enough
 * for directions, not for roots. */
typedef tch_status tch_gemm_op(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                               const tch_matrices *b, int32_t transpose_b, double beta, int32_t rounded,
                               const tch_matrices *c);
/* C = alpha A A' + beta C (transpose: A' A), both triangles written, only the lower read. Without transpose and beta, C
 * may have another type, as in `symmetric_product`. With `rounded`, operands of float32 may be rounded to 11 bits, with
 * sums in float32: for factors; and a backend with product_rates lets C be of float32 where A is of a half type. */
typedef tch_status tch_gram_op(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                               int32_t rounded, const tch_matrices *c);
/* C = c0 I + c1 D + c2 A B, where B, D and the result are symmetric: its lower half is computed and mirrored. D may be
 * NULL with c1 ignored. A, B and D have one type, C may have another: types are those whose rate is not 0. In the split
 * type rows are aligned to 16 bytes. No operand may be C.
 *
 * scale is NULL unless `normalize` deferred its work to these products. Then C_b = scale_b^exponent (c0 I + c1 D + c2 A
 * B'), for exponents 0 to 2; A, B and D are of bfloat16 or all of float16, and C of either. */
typedef tch_status tch_symmetric_product_op(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                            const tch_matrices *a, const tch_matrices *b, const double *scale,
                                            int32_t exponent, const tch_matrices *c);
/* X_b becomes X_b / max(|X_b|, eps), or stays as it is where eps is 0 and so is X_b. A norm that the type does not hold
 * to full precision (beyond 2^-120 to 2^120, 2^-1000 to 2^1000 in float64), or not at all, is that of an X_b multiplied
 * by a power of two first, unless it is below eps.
 *
 * Or *deferred becomes 1, and scale[b] is what X_b, a power of two times what it was where squares might leave the
 * range of float32, has yet to be multiplied by: `symmetric_product` with that scale then supports the products of a
 * Newton-Schulz step on X in bfloat16 and float16, and does them without a pass over X. That is decided as for `all`
 * matrices of this shape. `scale` has room for TCH_NORMALIZE_NUMBERS for each matrix in any case. An entry of its own
 * for the sake of those backends. */
typedef tch_status tch_normalize_op(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                                    int32_t *deferred);
/* A product larger than the device, streamed: copies both ways overlap with arithmetic, which no sequence of copies and
 * products would do. `scratch` is device memory;
 * host memory that is not page-locked goes through page-locked buffers of the state, which may be allocated here.
 * Returns when the host's operands have been read and its result is written. */
typedef tch_status tch_streamed_product_op(void *state, const tch_streamed_product *product, void *scratch,
                                           int64_t scratch_bytes);

/* --- spectral ---------------------------------------------------------------------------------------------------- */

/* On entry symmetric matrices in v (both triangles given); on return row i of v is the eigenvector of the i-th
 * eigenvalue, which are ascending in w, 1 by n of v's type. flags[b], where it was OK on entry, becomes NO_CONVERGENCE
 * on failure and OVERFLOW where an eigenvalue is beyond the type; matrices flagged on entry are skipped. */
typedef tch_status tch_eigh_op(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags,
                               void *scratch);
/* Maps w in place; damping (one double per matrix, may be NULL) receives what was added. A negative power of zero, or
 * an eigenvalue that is too negative, sets the flag NOT_POSITIVE, any other result beyond w's type OVERFLOW. */
typedef tch_status tch_spectrum_power_op(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                         double *damping, int32_t *flags);
/* B(i, j), float64, is multiplied by the divided difference, at eigenvalues i and j of w (1 by n, float64), of the
 * function that the map describes, or by its derivative where they are equal: elementwise, with formulas that no other
 * entry has.
 *
 * Without `values`: the derivative of a power in its own basis, w ascending, computed without cancellation; damping is
 * not read. The function is flat where it is clamped, and an eigenvalue no more than `negative` times the largest below
 * zero counts as zero, where the derivative is that from above. Where the damping is relative_eps times the largest
 * eigenvalue, the derivative through that is added, shared evenly among eigenvalues that equal it. A flag that was OK
 * becomes NOT_POSITIVE where a derivative is infinite or, without clamp, an eigenvalue is too negative, and OVERFLOW
 * where a derivative is beyond float64; matrices flagged on entry are skipped.
 *
 * With `values`, of which only backends with product_rates are asked: B is nearly diagonal, w is its diagonal and
 * values (1 by n) are (w + damping)^power, constant where clamped. B becomes that function of B to first order in what
 * is off the diagonal. Elements too large for that, more than half of an eigenvalue, count as rounding: zero. Flags are
 * not read. */
typedef tch_status tch_divided_differences_op(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                              const tch_matrices *values, const double *damping, const tch_matrices *b,
                                              int32_t *flags);
/* B = (A + shift I)^-1 B for symmetric positive definite A + shift I; A is destroyed. shift may be NULL. flags as in
 * eigh, with NOT_POSITIVE. B may have any number of columns. */
typedef tch_status tch_spd_solve_op(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                                    int32_t *flags, void *scratch);
/* X = sum over j of weights[j] (A + shifts[j] I)^-1 for positive shifts, host arrays; A is destroyed. flags as in
 * spd_solve. One reduction to a band serves all shifts, where spd_solve would factor A anew for each. */
typedef tch_status tch_shifted_inverse_op(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                          const double *weights, const tch_matrices *x, int32_t *flags, void *scratch);
/* X_b = (A_b + shift_b I)^(-1/root), all steps in one launch and in float64: the iteration starts from M = (A + shift
 * I) / bound, and its X is scaled by bound^(-1/root). A and X may be of float32 or float64. n is at most the
 * newton_limit of product_rates; composed, small matrices would spend their time on launches. */
typedef tch_status tch_newton_op(void *state, const tch_newton_iteration *iteration, const tch_matrices *a,
                                 const double *shift, const double *bound, const tch_matrices *x);
/* A = L L'; X, lower triangular, becomes L^-1 with `inverse`, else L. A is destroyed. flags as in spd_solve; X of a
 * flagged matrix is undefined. L^-1 of float32 or float64 has zeros above the diagonal within its diagonal blocks of
 * TCH_LOWER_BLOCK rows; L, of float64, nothing but rounding within those of TCH_CHOLESKY_BLOCK rows. What is right of
 * the blocks may be left as it was. `scratch` for L has A's size. */
#define TCH_LOWER_BLOCK 128
#define TCH_CHOLESKY_BLOCK 512
typedef tch_status tch_cholesky_op(void *state, const tch_matrices *a, int32_t inverse, const tch_matrices *x,
                                   int32_t *flags, void *scratch);
/* w(i) = (sum over j of X(i, j) Y(i, j))^exponent, summed in float64, w being 1 by rows of X's type; 0 where exponent
 * is not 1 and the sum not positive. */
typedef tch_status tch_row_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                                   const tch_matrices *w);
/* order[b n + k] is the index of the k-th largest of w_b (1 by n), equal ones by index, NaN last. With flags, w is not
 * read: order[b n + k] = k where flags[b] is not 0, and the other orders stay, as `select` keeps matrices. */
typedef tch_status tch_descending_op(void *state, const tch_matrices *w, const int32_t *flags, int32_t *order);
/* out(i, j) = X(rows[i], cols[j]), orders per matrix as `descending` gives them; NULL keeps that order. `out`
 * may be of float64 where X is of float32. */
typedef tch_status tch_permute_op(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                                  const tch_matrices *out);

/* A batch of numbers, times `scale`, as high + low, both of float16 or both of bfloat16. */
typedef struct tch_split_matrices {
    tch_matrices high, low;
    double scale;
} tch_split_matrices;

/* Holds of the matrices b of a batch with of[b] <= most, on the device; NULL: of none. */
typedef struct tch_condition {
    const double *of;
    double most;
} tch_condition;

/* X, float32, as a sum of two float16, or float64 that is rounded to float32 first: high is X scale rounded, low is
 * what that leaves of X scale, rounded. Good to 22 bits of a number of which low is not below the smallest normal
 * number, 2^-14, and to 2^-25 of smaller ones. With `rows`, of float32, which may be X, the rows of X brought to length
 * 1 go there and are what is split, but for matrices of which `done` holds, of which nothing is written; sums are in
 * float64, rows of zeros stay. Without, X_b stands for (X_b + shift[b] I) / bound[b], in float32, where those are not
 * NULL. */
typedef struct tch_rows_to_split {
    const tch_matrices *x, *rows;
    const tch_split_matrices *out; /* of float16; low.data may be NULL, for high parts alone */
    tch_condition done;            /* with `rows` alone */
    const double *shift, *bound;   /* both or neither; without `rows` alone */
} tch_rows_to_split;
typedef tch_status tch_split_rows_op(void *state, const tch_rows_to_split *problem);

/* Whose low parts count in a product. */
typedef enum tch_low { TCH_LOW_NONE = 0, TCH_LOW_A = 1, TCH_LOW_B = 2, TCH_LOW_BOTH = 3 } tch_low;

/* C = alpha A B + beta C, or A B': the product of the high parts, and one of low and high parts for each operand whose
 * low parts count, summed in float32. C is of float32; or, with `split_c` of float16, comes out as that, split with
 * its scale, beta is 0, and C says no more than the shape and is scratch. */
typedef struct tch_split_problem {
    double alpha;
    const tch_split_matrices *a, *b;
    int32_t transpose_b;
    tch_low low;
    double beta;
    const tch_matrices *c;
    const tch_split_matrices *split_c;
    tch_condition high_alone; /* where it holds, no low parts need count */
    tch_condition negligible; /* where it holds, A B may count as zero */
    double *largest;          /* with split_c, NULL or raised to the largest |alpha A B| of each matrix */
    const tch_matrices *wide; /* without, NULL or, of float64, where the result goes; C is then read, or scratch */
} tch_split_problem;
/* *handled is set to 1; or to 0 and nothing is done, where `gemm` on the parts, one after the other, is no slower. */
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
    /* OPTIONAL: may be NULL, and the library does without or composes the result */
    tch_product_rates_op *product_rates;
    tch_gram_op *gram;
    tch_symmetric_product_op *symmetric_product;
    /* OPTIONAL, NO DEFAULT: may be NULL, and what needs it is then not offered or done another way */
    tch_streamed_product_op *streamed_product;
    tch_shifted_inverse_op *shifted_inverse;
    tch_newton_op *newton;
    tch_split_rows_op *split_rows;
    tch_split_product_op *split_product;
    tch_pack_op *pack;
} tch_matrix_ops;

#endif

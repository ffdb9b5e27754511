/* Operations table, chapter 4: per-sample gradients, their norms, and curvature. A backend without it offers neither
 * per-sample gradients nor KFAC.
 *
 * Matrices A (T by d) and G (T by p) are the inputs and output gradients of one sample at T positions; a batch of them
 * is the samples, or samples times groups, `groups` of one sample following each other. Both have one type: float64,
 * float32, float16 or bfloat16. Sums are in float64 for float64, in float32 at least for the rest. `rounded` allows the
 * operands of float32 products to be rounded as in gemm_rounded. */
#ifndef TORCHIUM_BACKEND_SAMPLE_H
#define TORCHIUM_BACKEND_SAMPLE_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/grad.h>
#include <torchium/status.h>

/* A convolution's view of its input, always in three dimensions, the unused ones in front with size, kernel, stride and
 * dilation 1 and no padding. Channel c of group h of sample b at (x, y, z) is at data[b strides[0] + (h channels + c)
 * strides[1] + x strides[2] + y strides[3] + z strides[4]]. */
typedef struct tch_patches {
    const void *data;
    tch_scalar type;
    int64_t samples, groups, channels; /* channels of one group */
    int64_t strides[5];
    int64_t size[3], kernel[3], stride[3], dilation[3], before[3], outputs[3];
    tch_padding padding;
} tch_patches;

/* A normalization layer and its input; x and g are row-major, and of one type.
 * LAYER_NORM, RMS_NORM: [samples, positions, features]; GROUP_NORM: [samples, features (channels), positions]. */
typedef struct tch_normalized {
    tch_layer_kind kind;
    const void *x, *g;
    tch_scalar type;
    int64_t samples, positions, features;
    int64_t groups; /* GROUP_NORM */
    double eps;
} tch_normalized;

typedef enum tch_clip_rule {
    TCH_CLIP_NORM = 0, /* min(1, most / (sqrt(x) + 1e-6)); 0 where x is not finite, a negative x counts as 0 */
    TCH_CLIP_KL = 1    /* min(1, sqrt(most / |x|)); 1 where that is not finite or x is 0 */
} tch_clip_rule;

/* --- per-sample gradients ---------------------------------------------------------------------------------------- */

/* norms[b / groups] += scale |G_b' A_b|^2, sum of squares of a p by d matrix that is not formed whole. As a sum of
 * <a_s, a_t> <g_s, g_t>, whose terms have both signs, only where it is not 256 times smaller than they are. `sums` is
 * NULL, or has the squared norm of the bias's gradient added too, as if A had a column of ones more: room for the sums
 * of the rows of each G_b (1 by p, without gaps, float64 for float64 and float32 for the rest), where they are taken.
 * Scratch is then what sample_sums and pair_dots want, too. One operation, since the fastest way depends on sizes and
 * device. */
typedef tch_status tch_sample_norms_op(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                       double scale, int32_t rounded, const tch_matrices *sums, double *norms,
                                       void *scratch);
/* out = beta out + scale times the sum over samples of the squares of the elements of G_b' A_b, b counting samples of
 * one group: out (p by d) has `groups` matrices. float32 or float64, which A and G may be narrower than. One
 * operation, so that no G_b' A_b is ever stored. */
typedef tch_status tch_sample_squares_op(void *state, const tch_matrices *a, const tch_matrices *g, double scale,
                                         double beta, int32_t rounded, const tch_matrices *out, void *scratch);
/* Row b of out (a single matrix, batch by cols, float32 or float64) = beta times itself + scale times the sum of the
 * rows of X_b. */
typedef tch_status tch_sample_sums_op(void *state, const tch_matrices *x, double scale, double beta,
                                      const tch_matrices *out, void *scratch);
/* Matrix b groups + h of out (of the input's type, samples times groups of them, outputs' product by channels times
 * kernel's product) has in row l what output position l sees of group h: column (c, i, j, k) in the order of the
 * weight. One operation, since copy knows no padding. */
typedef tch_status tch_im2col_op(void *state, const tch_patches *patches, const tch_matrices *out);
/* dots[b] += scale times the inner product of E_b, the sum over s of e(tokens(b, s)) (row s of G_b), V by d, which
 * is the gradient of an embedding, with another matrix of that size; V is `rows`. Without `w` it is E_b itself, and
 * the result a squared norm; w alone is a single matrix, V by d, of G's type, or float32 where that is a half type;
 * and with `by` it is by_b' w_b, the gradient of a linear layer, for w T by d and by T by V, of G's type. tokens: a
 * single matrix of int32 or int64, a sample in each row; G_b is S by d. Tokens outside [0, V) and those that equal
 * `padding` count for nothing, here and below. */
typedef tch_status tch_token_dots_op(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                     const tch_matrices *g, const tch_matrices *w, const tch_matrices *by, double scale,
                                     double *dots, void *scratch);
/* Row v of out = beta times itself + sum over samples b, positions s with token v, of weights[b] times scale times row
 * s of G_b, in a fixed order; out is V by d, float32 or float64. weights may be NULL, for 1; a weight of 0 leaves its
 * sample out. With `apart`, out is a batch with a matrix for each sample. */
typedef tch_status tch_token_sums_op(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                                     const double *weights, double scale, double beta, int32_t apart,
                                     const tch_matrices *out, void *scratch);
/* For each sample and feature: weight = scale times the sum over positions of x^ g, x^ the normalized x; bias = scale
 * times that of g. Each a single matrix, samples by features, float32 or float64; either may be NULL. One
 * operation, so that x^ is never stored. */
typedef tch_status tch_normalized_sums_op(void *state, const tch_normalized *layer, double scale,
                                          const tch_matrices *weight, const tch_matrices *bias, void *scratch);
/* out(i, j) = beta times itself + scale times the sum over the elements of block (i, j) of X(r, c) Y(r, c), blocks
 * being `height` by `width`; X and Y are single matrices of one type, out float32 or float64, and one of them where
 * blocks have one element. */
typedef tch_status tch_block_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height,
                                     int64_t width, double scale, double beta, const tch_matrices *out, void *scratch);
/* out[b / groups] += scale times the sum of X_b(i, j) Y_b(i, j); in float64. A stride of 0 repeats one. */
typedef tch_status tch_pair_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups,
                                    double scale, double *out, void *scratch);
/* weights[i], of x = scale squares[i], so that what x is the square of stays within bounds. May be in place. One caller
 * for each rule: with other operations it would be five launches over a few numbers. */
typedef tch_status tch_clip_weights_op(void *state, tch_clip_rule rule, int64_t count, const double *squares,
                                       double scale, double most, double *weights);
/* out_b = X_b weights[b / groups], converted to out's type, and 0 where the weight is 0 whatever X is. With `drop_only`
 * weights only say which samples are left out: X_b itself where its weight is not 0. In place where the types are
 * equal. */
typedef tch_status tch_weigh_samples_op(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                        int32_t drop_only, const tch_matrices *out);

/* --- curvature --------------------------------------------------------------------------------------------------- */

/* X(i, j) = X(i, j) / (rows(i) cols(j) + damping), rows and cols being 1 by so many per matrix; or, where they are
 * NULL, X(i, j) / (values(i, j) + damping). Negative rows, cols and values count as 0. */
typedef tch_status tch_damped_divide_op(void *state, const tch_matrices *x, const tch_matrices *rows,
                                        const tch_matrices *cols, const tch_matrices *values, double damping);
typedef struct tch_sample_ops {
    /* all REQUIRED */
    tch_sample_norms_op *sample_norms;
    tch_sample_squares_op *sample_squares;
    tch_sample_sums_op *sample_sums;
    tch_im2col_op *im2col;
    tch_token_sums_op *token_sums;
    tch_token_dots_op *token_dots;
    tch_normalized_sums_op *normalized_sums;
    tch_block_dots_op *block_dots;
    tch_pair_dots_op *pair_dots;
    tch_clip_weights_op *clip_weights;
    tch_weigh_samples_op *weigh_samples;
    tch_damped_divide_op *damped_divide;
} tch_sample_ops;

#endif

/* Operations table, chapter 4: per-sample gradients, their norms, and curvature. A backend without it supports neither
 * per-sample gradients nor KFAC.
 *
 * Matrices A (T by d) and G (T by p) are the inputs and output gradients of one sample at T positions; a batch has one
 * per sample, or `groups` consecutive ones per sample. Both have one type: float64, float32, float16 or bfloat16. Sums
 * are in float64 for float64, at least in float32 otherwise. `rounded` allows rounded float32 operands, as in
 * `gemm`. */
#ifndef TORCHIUM_BACKEND_SAMPLE_H
#define TORCHIUM_BACKEND_SAMPLE_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/grad.h>
#include <torchium/status.h>

/* A convolution's input, always in three dimensions; unused ones come first, with size, kernel, stride and dilation 1
 * and no padding. Channel c of group h of sample b at (x, y, z) is at data[b strides[0] + (h channels + c) strides[1] +
 * x strides[2] + y strides[3] + z strides[4]]. */
typedef struct tch_patches {
    const void *data;
    tch_scalar type;
    int64_t samples, groups, channels; /* channels of one group */
    int64_t strides[5];
    int64_t size[3], kernel[3], stride[3], dilation[3], before[3], outputs[3];
    tch_padding padding;
} tch_patches;

/* A normalization layer and its input; x and g are row-major and have one type.
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
    TCH_CLIP_NORM = 0, /* min(1, most / (sqrt(x) + 1e-6)); 0 if x is not finite; a negative x counts as 0 */
    TCH_CLIP_KL = 1    /* min(1, sqrt(most / |x|)); 1 if x is 0 or not finite */
} tch_clip_rule;

/* --- per-sample gradients ---------------------------------------------------------------------------------------- */

/* norms[b / groups] += scale |G_b' A_b|^2, without forming the whole p by d matrix. A backend may sum <a_s, a_t> <g_s,
 * g_t>, terms of both signs, unless cancellation exceeds 256. If `sums` is not NULL, the squared norm of the bias's
 * gradient is added, as if A had another column of ones; `sums` is scratch for the sums of the rows of each G_b (1 by
 * p, without gaps, float64 for float64, otherwise float32), and `scratch` is also large enough for sample_sums and
 * pair_dots. One operation, since the fastest method depends on sizes and device. */
typedef tch_status tch_sample_norms_op(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                       double scale, int32_t rounded, const tch_matrices *sums, double *norms,
                                       void *scratch);
/* out = beta out + scale times the sum over samples of the elementwise square of G_b' A_b. out has one matrix (p by d)
 * per group, float32 or float64, also for 16-bit A and G. One operation, so that no G_b' A_b is stored. */
typedef tch_status tch_sample_squares_op(void *state, const tch_matrices *a, const tch_matrices *g, double scale,
                                         double beta, int32_t rounded, const tch_matrices *out, void *scratch);
/* Row b of out = beta (row b of out) + scale times the sum of the rows of X_b; out is a single matrix, batch by cols,
 * float32 or float64. */
typedef tch_status tch_sample_sums_op(void *state, const tch_matrices *x, double scale, double beta,
                                      const tch_matrices *out, void *scratch);
/* Row l of matrix b groups + h of out, of the input's type, is the patch of group h of sample b at output position l,
 * with columns (c, i, j, k) in the order of the weight. One operation, since `copy` does not pad. */
typedef tch_status tch_im2col_op(void *state, const tch_patches *patches, const tch_matrices *out);
/* dots[b] += scale <E_b, M>, with E_b = sum over s of e(tokens(b, s)) (row s of G_b), V by d, the gradient of an
 * embedding; V is `rows`. M is E_b without `w`, for a squared norm; `w` alone is M, a single V by d matrix of G's type,
 * or float32 for a 16-bit G; with `by`, M is by_b' w_b, the gradient of a linear layer, for w_b T by d and by_b T by V,
 * of G's type. `tokens` is a single matrix of int32 or int64 with a sample in each row; G_b is S by d. Here and below
 * tokens outside [0, V) or equal to `padding` are ignored. */
typedef tch_status tch_token_dots_op(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                     const tch_matrices *g, const tch_matrices *w, const tch_matrices *by, double scale,
                                     double *dots, void *scratch);
/* Row v of out = beta (row v of out) + the sum over samples b and positions s with token v of scale weights[b] (row s
 * of G_b), in a fixed order; out is V by d, float32 or float64. weights may be NULL, for 1; a weight of 0 excludes its
 * sample. With `apart`, out is a batch with one matrix per sample. */
typedef tch_status tch_token_sums_op(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                                     const double *weights, double scale, double beta, int32_t apart,
                                     const tch_matrices *out, void *scratch);
/* For each sample and feature: weight = scale times the sum over positions of x^ g, with x^ the normalized x; bias =
 * scale times the sum of g. Each is a single matrix, samples by features, float32 or float64; either may be NULL. One
 * operation, so that x^ is not stored. */
typedef tch_status tch_normalized_sums_op(void *state, const tch_normalized *layer, double scale,
                                          const tch_matrices *weight, const tch_matrices *bias, void *scratch);
/* out(i, j) = beta out(i, j) + scale times the sum of X(r, c) Y(r, c) over block (i, j), of `height` by `width`
 * elements. X and Y are single matrices of one type, out is float32 or float64; with blocks of one element it may be X
 * or Y. */
typedef tch_status tch_block_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height,
                                     int64_t width, double scale, double beta, const tch_matrices *out, void *scratch);
/* out[b / groups] += scale times the sum of X_b(i, j) Y_b(i, j), in float64. Strides may be 0. */
typedef tch_status tch_pair_dots_op(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups,
                                    double scale, double *out, void *scratch);
/* weights[i] = the rule for x = scale squares[i]; in place allowed. Composed of other operations, these few elements
 * would take five launches. */
typedef tch_status tch_clip_weights_op(void *state, tch_clip_rule rule, int64_t count, const double *squares,
                                       double scale, double most, double *weights);
/* out_b = X_b weights[b / groups], converted to out's type; 0 if the weight is 0, even for a non-finite X_b. With
 * `drop_only` nonzero weights count as 1. In place allowed for equal types. */
typedef tch_status tch_weigh_samples_op(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                        int32_t drop_only, const tch_matrices *out);

/* --- curvature --------------------------------------------------------------------------------------------------- */

/* X(i, j) = X(i, j) / (rows(i) cols(j) + damping), with rows 1 by rows and cols 1 by cols per matrix; if they are NULL,
 * X(i, j) / (values(i, j) + damping). Negative rows, cols and values count as 0. */
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

/* Per-sample gradients: what a batch's mean gradient is the mean of.
 *
 *     tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
 *     tch_grad_norms(ctx, &layer, inputs, output_gradients, TCH_GRAD_BOTH, 0, norms);      // [B] squared norms
 *     tch_grad_clip_weights(ctx, norms, 1.0, weights);                                     // about min(1, 1 / norm)
 *     tch_grad_weighted_sum(ctx, &layer, inputs, output_gradients, weights, 0.0, weight_gradient, bias_gradient);
 *
 * A layer is described by its kind and options. What is known of a batch is the layer's input and the gradient of the
 * loss with respect to the layer's output, both with the samples first; `output_gradients` is that of the sum of the
 * samples' losses, so that sample i of it is the gradient of sample i's own loss; where it is that of a mean, the
 * layer's `scale` makes up for it. B, the number of samples, may be 0.
 *
 * Conventions, in addition to those of linalg.h:
 * - Inputs and output gradients have one dtype, float64, float32, float16 or bfloat16, and any strides; sums are taken
 *   in float32 at least, and in float64 for float64. Outputs have the inputs' dtype, or float32 where that is a half
 *   type; numbers per sample (`norms`, `weights`, `dots`) are float64 [B], one after the other.
 * - No function makes a buffer of B times the parameters, or of B times the square of the positions: work is cut into
 *   chunks that fit the context's workspace limit.
 * - Nothing synchronizes; calls can be captured in a CUDA graph. */
#ifndef TORCHIUM_GRAD_H
#define TORCHIUM_GRAD_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

/* Shapes below: B samples; T positions that share the weight, any number of dimensions "..." and 1 where there are
 * none. */
typedef enum tch_layer_kind {
    TCH_LAYER_LINEAR = 0, /* y = x W' + b; x [B, ..., d], y [B, ..., p], W [p, d], b [p] */
    TCH_LAYER_CONV = 1,   /* cross-correlation in 1 to 3 dimensions as PyTorch defines it; x [B, C, size...], y [B, p,
                                 size...], W [p, C / groups, kernel...], b [p] */
    TCH_LAYER_EMBEDDING = 2,  /* y = W[x]; x [B, ...] of int32 or int64, y [B, ..., d], W [V, d]; no bias */
    TCH_LAYER_LAYER_NORM = 3, /* y = (x - mean) / sqrt(var + eps) W + b over the last `normalized` dimensions n;
                                 x, y [B, ..., n], W and b [n] */
    TCH_LAYER_RMS_NORM = 4,   /* y = x / sqrt(mean of x^2 + eps) W; no bias */
    TCH_LAYER_GROUP_NORM = 5, /* mean and var over each of `groups` groups of channels; x, y [B, C, ...], W and b [C] */
    TCH_LAYER_COUNT = 6
} tch_layer_kind;

/* The values outside a convolution's input. */
typedef enum tch_padding {
    TCH_PADDING_ZEROS = 0,
    TCH_PADDING_REFLECT = 1,   /* the edge is not repeated; less padding than input */
    TCH_PADDING_REPLICATE = 2, /* the edge itself */
    TCH_PADDING_CIRCULAR = 3,  /* the other end; at most the input's size */
    TCH_PADDING_COUNT = 4
} tch_padding;

/* Start from TCH_LAYER_INIT(kind) and set what the kind has. */
typedef struct tch_layer {
    size_t struct_size;
    tch_layer_kind kind;
    int32_t rounded; /* 1 (the default): on a GPU with TF32, operands of float32 products may be rounded to 11 bits in
                        norms, Gram matrices and curvature, whose sums are in float32; never in gradients and sums of
                        them. 0: as exact as float32 sums; norms on Hopper may take an element off by 2^-21 of the
                        largest of 32 neighbors, which in them is less than the rounding of the sums */
    double scale; /* output gradients are multiplied by this: 1, or B where they are those of a mean over the samples */

    /* --- CONV: the first `dims` entries count */
    int32_t dims; /* 1 to 3 */
    int64_t kernel[3], stride[3], dilation[3];
    int64_t before[3], after[3]; /* padding at each end; PyTorch's 'same' may differ by one between them */
    tch_padding padding;
    int64_t groups; /* CONV, GROUP_NORM */

    /* --- EMBEDDING */
    int64_t rows;          /* V */
    int64_t padding_index; /* its row has no gradient; -1 for none */

    /* --- norms */
    int32_t normalized; /* LAYER_NORM, RMS_NORM: dimensions at the end, at least 1 */
    double eps;
} tch_layer;
#define TCH_LAYER_INIT(layer_kind)                                                                                     \
    {                                                                                                                  \
        sizeof(tch_layer), (layer_kind), 1, 1.0, 0, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0},             \
            TCH_PADDING_ZEROS, 1, 0, -1, 1, 1e-5                                                                       \
    }

/* Which parameters of a layer a norm or an inner product is over. */
typedef enum tch_grad_part { TCH_GRAD_WEIGHT = 1, TCH_GRAD_BIAS = 2, TCH_GRAD_BOTH = 3 } tch_grad_part;

TCH_BEGIN_DECLS

/* === Gradients ==================================================================================================== */

/* weight [B, shape of W] and bias [B, shape of b]: the gradient of each sample. Either may be NULL. */
TCH_API tch_status tch_grad_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, tch_tensor *weight, tch_tensor *bias);

/* norms[i] = |gradient of sample i|^2 over the parts, without forming it; added to what norms holds where `accumulate`
 * is not 0. By inner products of positions or by tiles of the gradient, whichever takes fewer operations; where the
 * terms of the former cancel, being more than 256 times their sum, once more and more exactly.
 * docs/per-sample-gradients.md has the bounds of the error. A bias that the kind does not have adds nothing. */
TCH_API tch_status tch_grad_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate,
                                  tch_tensor *norms);

/* weight = beta weight + sum over i of weights[i] (gradient of sample i), and bias; either may be NULL. `weights` NULL:
 * all 1, the plain sum. A sample of weight 0 adds nothing, even if its gradient is not finite. Output gradients of
 * bfloat16 are rounded once more after weighing. */
TCH_API tch_status tch_grad_weighted_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                         const tch_tensor *output_gradient, const tch_tensor *weights, double beta,
                                         tch_tensor *weight, tch_tensor *bias);

/* gram[i, j] = <gradient of sample i, gradient of sample j> over the parts, float64 or float32 [B, B], both triangles;
 * added where `accumulate` is not 0. Rows may lie apart, their elements not; symmetric to the bit. */
TCH_API tch_status tch_grad_gram(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate,
                                 tch_tensor *gram);

/* dots[i] = <gradient of sample i, (weight, bias)>, float64 [B]; a direction that is NULL counts as 0. */
TCH_API tch_status tch_grad_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                                 int32_t accumulate, tch_tensor *dots);

/* --- one weight in two places ------------------------------------------------------------------------------------ */

/* A weight used twice has the sum of two gradients, whose squared norm is more than the sum of two norms. For two uses
 * of one kind, join the positions: inputs and output gradients of both uses, one after the other along a middle
 * dimension, are those of one layer with more positions. For an embedding whose weight is also that of a linear layer,
 * as in language models, this adds what is missing: norms[i] += 2 <gradient of sample i in the embedding, in the linear
 * layer>, tokens [B, S] with embedding_gradient [B, S, d], linear_input [B, T, d] with linear_gradient [B, T, V]. The
 * layer is the embedding. */
TCH_API tch_status tch_grad_tied_norms(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                                       const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                                       const tch_tensor *linear_gradient, tch_tensor *norms);

/* --- clipping and the natural gradient --------------------------------------------------------------------------- */

/* weights[i] = min(1, max_norm / (sqrt(norms[i]) + 1e-6)), and 0 where norms[i] is not finite; max_norm > 0. So a
 * clipped gradient is shorter than max_norm, as far as the norm is exact. A norm below 0, which only the rounding of a
 * tied one makes, counts as 0. May be done in place. */
TCH_API tch_status tch_grad_clip_weights(tch_context *context, const tch_tensor *norms, double max_norm,
                                         tch_tensor *weights);

/* weights = (gram + B damping I)^-1 rhs, float64 [B]; gram [B, B], damping > 0. With rhs all ones (or NULL) the
 * weighted sum of the per-sample gradients with these weights is (F + damping I)^-1 times their mean, for F the mean of
 * their outer products: the natural gradient in the span of the batch. Waits for the device where `report` is NULL. */
TCH_API tch_status tch_grad_natural_weights(tch_context *context, const tch_tensor *gram, const tch_tensor *rhs,
                                            double damping, tch_tensor *weights, tch_tensor *report);

/* === Curvature of one layer: LINEAR and CONV ====================================================================== */

/* How the positions of a sample enter a factor. */
typedef enum tch_sharing {
    TCH_SHARING_EXPAND =
        0, /* every position is a sample of its own: A = sum of a a' over samples and positions, divided
                               by B T; G = sum of g g' divided by B. Exact where positions are independent */
    TCH_SHARING_REDUCE =
        1, /* inputs are averaged, output gradients summed over the positions first; A and G divided by B */
    TCH_SHARING_COUNT = 2
} tch_sharing;

/* The factors of KFAC: input_factor [d, d] = alpha A + beta input_factor and output_factor [p, p] = alpha G + beta
 * output_factor. d counts the inputs in the order of the weight's columns (for a convolution C kernel...), and one
 * more, a 1 at the end, where `bias` is not 0. Output gradients are those of the sum of losses, see above. A
 * convolution in `groups` groups has factors [groups, d, d] and [groups, p / groups, p / groups]. Either factor may be
 * NULL; then so may what it is made of. Inputs and output gradients may differ in dtype, and factors are float32 or
 * float64 whatever those are. Both factors stay as they are where what would be added to either is not finite, and for
 * a batch of no samples. */
TCH_API tch_status tch_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing, double alpha,
                                    double beta, tch_tensor *input_factor, tch_tensor *output_factor);

/* The scales of EKFAC: scales [p, d] = alpha E + beta scales, with E the mean over samples of the squares of the
 * elements of output_basis (gradient of the sample) input_basis'. Bases, of the scales' dtype, have eigenvectors as
 * rows, as `tch_kfac` keeps them; d, `bias`, groups, dtypes and what is not finite as above. */
TCH_API tch_status tch_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                   const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                                   const tch_tensor *output_basis, double alpha, double beta, tch_tensor *scales);

TCH_END_DECLS

#endif

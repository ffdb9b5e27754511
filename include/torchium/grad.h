/* Per-sample gradients, their norms and inner products, and the factors of KFAC.
 *
 *     tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
 *     tch_grad_norms(ctx, &layer, inputs, output_gradients, TCH_GRAD_BOTH, 0, norms);      // [B] squared norms
 *     tch_grad_clip_weights(ctx, norms, 1.0, weights);                                     // about min(1, 1 / norm)
 *     tch_grad_weighted_sum(ctx, &layer, inputs, output_gradients, weights, 0.0, weight_gradient, bias_gradient);
 *
 * A layer is described by its kind and options, and a batch by the layer's input and the gradient of the loss with
 * respect to the layer's output, both with the samples first. `output_gradients` is that of the sum of the samples'
 * losses, so that entry i is the gradient of sample i's loss; for a mean, set the layer's `scale` to B. B, the number
 * of samples, may be 0.
 *
 * Conventions, in addition to those of linalg.h:
 * - Inputs and output gradients have one dtype, float64, float32, float16 or bfloat16, and any strides; accumulation is
 *   in float32, or float64 for float64. Outputs have the inputs' dtype, or float32 for 16-bit types; per-sample numbers
 *   (`norms`, `weights`, `dots`) are contiguous float64 [B].
 * - No function allocates B times the parameters, or B times the square of the positions: work is split into chunks
 *   within the context's workspace limit.
 * - Calls do not synchronize and can be captured in a CUDA graph. */
#ifndef TORCHIUM_GRAD_H
#define TORCHIUM_GRAD_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

/* Shapes: B samples, T positions that share the weight, the product of the dimensions "...". */
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

/* Padding of a convolution's input. */
typedef enum tch_padding {
    TCH_PADDING_ZEROS = 0,
    TCH_PADDING_REFLECT = 1,   /* the edge is not repeated; less padding than input */
    TCH_PADDING_REPLICATE = 2, /* the edge itself */
    TCH_PADDING_CIRCULAR = 3,  /* the other end; at most the input's size */
    TCH_PADDING_COUNT = 4
} tch_padding;

/* Start from TCH_LAYER_INIT(kind) and set the fields of the kind. */
typedef struct tch_layer {
    size_t struct_size;
    tch_layer_kind kind;
    int32_t rounded; /* 1 (the default): on a GPU with TF32, operands of float32 products may be rounded to 11 bits in
                        norms, Gram matrices and curvature, with float32 accumulation; never in gradients and their
                        sums. 0: float32 accuracy; norms on Hopper may perturb an element by 2^-21 of the largest of 32
                        neighbors, less than the rounding of their sums */
    double scale;    /* factor of output gradients: 1, or B if the loss is a mean over the samples */

    /* --- CONV: the first `dims` entries are used */
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

/* The parameters over which norms and inner products are taken. */
typedef enum tch_grad_part { TCH_GRAD_WEIGHT = 1, TCH_GRAD_BIAS = 2, TCH_GRAD_BOTH = 3 } tch_grad_part;

TCH_BEGIN_DECLS

/* === Gradients ==================================================================================================== */

/* weight [B, shape of W] and bias [B, shape of b]: the gradient of each sample. Either may be NULL. */
TCH_API tch_status tch_grad_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, tch_tensor *weight, tch_tensor *bias);

/* norms[i] = |gradient of sample i|^2 over the parts, without forming it; added to norms[i] if `accumulate` is not 0.
 * Computed from inner products of positions or tiles of the gradient, whichever takes fewer operations; sums of inner
 * products with cancellation above 256 are recomputed in higher precision. Error bounds:
 * docs/per-sample-gradients.md. */
TCH_API tch_status tch_grad_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate,
                                  tch_tensor *norms);

/* weight = beta weight + sum over i of weights[i] (gradient of sample i), and bias; either may be NULL. `weights` NULL:
 * all 1. A sample of weight 0 adds nothing, even if its gradient is not finite. bfloat16 output gradients are rounded
 * once more after weighting. */
TCH_API tch_status tch_grad_weighted_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                         const tch_tensor *output_gradient, const tch_tensor *weights, double beta,
                                         tch_tensor *weight, tch_tensor *bias);

/* gram[i, j] = <gradient of sample i, gradient of sample j> over the parts, float64 or float32 [B, B], both triangles;
 * added if `accumulate` is not 0. Rows may have any stride, elements must be contiguous; exactly symmetric. */
TCH_API tch_status tch_grad_gram(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate,
                                 tch_tensor *gram);

/* dots[i] = <gradient of sample i, (weight, bias)>, float64 [B]; NULL counts as 0. */
TCH_API tch_status tch_grad_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                                 int32_t accumulate, tch_tensor *dots);

/* --- tied weights ------------------------------------------------------------------------------------------------- */

/* The gradient of a weight used twice is the sum of two gradients. For two layers of one kind, concatenate inputs and
 * output gradients along a dimension of positions. For an embedding tied to a linear layer, as in language models, this
 * adds the cross term: norms[i] += 2 <gradient of sample i in the embedding, in the linear layer>, tokens [B, S] with
 * embedding_gradient [B, S, d], linear_input [B, T, d] with linear_gradient [B, T, V]. The layer is the embedding. */
TCH_API tch_status tch_grad_tied_norms(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                                       const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                                       const tch_tensor *linear_gradient, tch_tensor *norms);

/* --- clipping and the natural gradient --------------------------------------------------------------------------- */

/* weights[i] = min(1, max_norm / (sqrt(norms[i]) + 1e-6)), and 0 where norms[i] is not finite; max_norm > 0. A norm
 * below 0, from rounding of tied weights, counts as 0. In place is allowed. */
TCH_API tch_status tch_grad_clip_weights(tch_context *context, const tch_tensor *norms, double max_norm,
                                         tch_tensor *weights);

/* weights = (gram + B damping I)^-1 rhs, float64 [B]; gram [B, B], damping > 0. With rhs all ones (or NULL) the
 * weighted sum of the per-sample gradients with these weights is (F + damping I)^-1 times their mean, for F the mean of
 * their outer products: the natural gradient in the span of the batch. Synchronizes if `report` is NULL. */
TCH_API tch_status tch_grad_natural_weights(tch_context *context, const tch_tensor *gram, const tch_tensor *rhs,
                                            double damping, tch_tensor *weights, tch_tensor *report);

/* === Curvature of one layer: LINEAR and CONV ====================================================================== */

/* How the positions of a sample contribute to a factor. */
typedef enum tch_sharing {
    TCH_SHARING_EXPAND = 0, /* every position is a separate sample: A = sum of a a' over samples and positions, divided
                               by B T; G = sum of g g' divided by B. Exact where positions are independent */
    TCH_SHARING_REDUCE =
        1, /* inputs are averaged, output gradients summed over the positions first; A and G divided by B */
    TCH_SHARING_COUNT = 2
} tch_sharing;

/* The factors of KFAC: input_factor [d, d] = alpha A + beta input_factor and output_factor [p, p] = alpha G + beta
 * output_factor. d counts the inputs in the order of the weight's columns (for a convolution C kernel...), and one
 * more, a 1 at the end, where `bias` is not 0. Output gradients are those of the sum of losses, see above. A
 * convolution in `groups` groups has factors [groups, d, d] and [groups, p / groups, p / groups]. Either factor and its
 * operand may be NULL. Inputs and output gradients may differ in dtype; factors are float32 or float64. A non-finite
 * update of either leaves both unchanged, as does a batch without samples. */
TCH_API tch_status tch_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing, double alpha,
                                    double beta, tch_tensor *input_factor, tch_tensor *output_factor);

/* The scales of EKFAC: scales [p, d] = alpha E + beta scales, with E the mean over samples of the squares of the
 * elements of output_basis (gradient of the sample) input_basis'. Bases, of the scales' dtype, have eigenvectors as
 * rows, as `tch_kfac` keeps them; d, `bias`, groups, dtypes and non-finite updates as above. */
TCH_API tch_status tch_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                   const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                                   const tch_tensor *output_basis, double alpha, double beta, tch_tensor *scales);

TCH_END_DECLS

#endif

/* A multilayer perceptron on a context's device, to train in C.
 *
 *     const int64_t hidden[] = {256, 128};
 *     tch_network_config config = TCH_NETWORK_CONFIG_INIT;
 *     config.inputs = 400, config.outputs = 10, config.hidden_count = 2, config.hidden = hidden;
 *     tch_network *net;
 *     tch_network_create(ctx, &config, &net);
 *     tch_tensor_fill(ctx, totals, 0.0);
 *     tch_network_loss_and_gradients(net, inputs, labels, NULL, totals);    // asynchronous
 *     ... an optimizer's step over tch_network_parameter(net, i) and tch_network_gradient(net, i) ...
 *     tch_network_destroy(net);
 *
 * Layer k computes a_k = f(a_(k-1) W_k' + b_k); the last one has no f. Everything is float32, on the context's device,
 * and in row-major order with one example per row. Inputs may be rows of a larger tensor: any stride between rows, none
 * between columns.
 *
 * A network belongs to its context: it is used by the same thread, and destroyed before it. */
#ifndef TORCHIUM_NETWORK_H
#define TORCHIUM_NETWORK_H

#include <stddef.h>
#include <stdint.h>

#include <torchium/context.h>
#include <torchium/export.h>
#include <torchium/grad.h>
#include <torchium/status.h>
#include <torchium/tensor.h>

typedef struct tch_network tch_network;

/* The f between layers. */
typedef enum tch_activation {
    TCH_ACTIVATION_NONE = 0, /* x */
    TCH_ACTIVATION_RELU = 1, /* max(x, 0) */
    TCH_ACTIVATION_TANH = 2,
    TCH_ACTIVATION_GELU = 3, /* x P(N(0, 1) <= x), the exact form with erf */
    TCH_ACTIVATION_COUNT = 4
} tch_activation;

/* The loss of one example with outputs y; a batch's loss is the mean over its rows. */
typedef enum tch_loss {
    TCH_LOSS_CROSS_ENTROPY = 0, /* log(sum exp(y)) - y[label]; targets are labels, int32 [B], from 0 */
    TCH_LOSS_SQUARED = 1,       /* mean over the outputs of (y - t)^2; targets are float32 [B, outputs] */
    TCH_LOSS_COUNT = 2
} tch_loss;

#define TCH_NETWORK_MAX_HIDDEN 64

typedef struct tch_network_config {
    size_t struct_size;    /* set by TCH_NETWORK_CONFIG_INIT */
    int64_t inputs;        /* numbers in an example, at least 1 */
    int64_t outputs;       /* classes, or numbers to predict, at least 1 */
    int32_t hidden_count;  /* 0 to TCH_NETWORK_MAX_HIDDEN; 0 is a linear model */
    const int64_t *hidden; /* their widths, read by tch_network_create only */
    tch_activation activation;
    tch_loss loss;
    uint64_t seed;     /* of the initial weights, which are bitwise-identical on every device and machine */
    int64_t max_batch; /* rows to allocate for at creation; 0: allocated at the first batch */
} tch_network_config;
#define TCH_NETWORK_CONFIG_INIT                                                                                        \
    {                                                                                                                  \
        sizeof(tch_network_config), 0, 0, 0, NULL, TCH_ACTIVATION_RELU, TCH_LOSS_CROSS_ENTROPY, 0, 0                   \
    }

/* The entries of `totals`, a float64 tensor [TCH_NETWORK_TOTALS] on the device to which calls add. Fill it with zeros
 * before a sum; only reading it synchronizes. */
enum {
    TCH_TOTAL_LOSS = 0,    /* summed over the rows counted */
    TCH_TOTAL_RIGHT = 1,   /* correct rows: the (first) largest output is the label's; 0 for TCH_LOSS_SQUARED */
    TCH_TOTAL_ROWS = 2,    /* rows counted */
    TCH_TOTAL_SKIPPED = 3, /* rows not counted: their label is not a class */
    TCH_NETWORK_TOTALS = 4
};

TCH_BEGIN_DECLS

/* Weights are uniform with mean 0 and the variance that keeps signals at their size: 2 / inputs of the layer before
 * RELU and GELU (He), 2 / (inputs + outputs) before TANH and NONE (Glorot), 1 / inputs in the last layer. Biases
 * are 0. */
TCH_API tch_status tch_network_create(tch_context *context, const tch_network_config *config, tch_network **network);

/* NULL is allowed. The network's tensors become invalid. */
TCH_API void tch_network_destroy(tch_network *network);

/* --- parameters ------------------------------------------------------------------------------------------------- */

/* Two for each layer: 2 (hidden_count + 1). 0 for NULL. */
TCH_API int32_t tch_network_parameter_count(const tch_network *network);

/* Parameter 2 k is the weight [outputs, inputs] of layer k + 1 and 2 k + 1 its bias [outputs]; the gradients have the
 * same shapes. The tensors belong to the network; their addresses do not change, and the caller may modify their
 * contents. The name is "layer1.weight", "layer1.bias" and so on. NULL for an invalid index. */
TCH_API tch_tensor *tch_network_parameter(const tch_network *network, int32_t index);
TCH_API tch_tensor *tch_network_gradient(const tch_network *network, int32_t index);
TCH_API const char *tch_network_parameter_name(const tch_network *network, int32_t index);

/* Number of elements of all parameters. */
TCH_API int64_t tch_network_size(const tch_network *network);

/* --- steps ------------------------------------------------------------------------------------------------------ */

/* Batches may have any number of rows B, 0 included. Only a batch larger than all before allocates memory; others can
 * be captured in a CUDA graph. */

/* outputs [B, outputs] of the last layer (no softmax) for inputs [B, inputs]. */
TCH_API tch_status tch_network_forward(tch_network *network, const tch_tensor *inputs, tch_tensor *outputs);

/* Adds the batch's loss to `totals` and overwrites the gradients with those of the mean loss times `loss_scale`, one
 * float32 on the device, for mixed precision, or NULL for 1. A row whose label is not a class adds nothing to the
 * gradients but counts in the mean. */
TCH_API tch_status tch_network_loss_and_gradients(tch_network *network, const tch_tensor *inputs,
                                                  const tch_tensor *targets, const tch_tensor *loss_scale,
                                                  tch_tensor *totals);

/* The same without gradients. */
TCH_API tch_status tch_network_evaluate(tch_network *network, const tch_tensor *inputs, const tch_tensor *targets,
                                        tch_tensor *totals);

/* --- per-sample gradients and curvature --------------------------------------------------------------------------- */

/* A layer's input and output gradient of the latest batch, for the functions of grad.h and kfac.h. The squared norms of
 * per-sample gradients, for example, are sums over the layers:
 *
 *     for (int32_t k = 0; k < tch_network_layer_count(net); k++) {
 *         tch_network_layer at = TCH_NETWORK_LAYER_INIT;
 *         tch_network_get_layer(net, k, &at);
 *         tch_grad_norms(ctx, &at.layer, at.input, at.output_gradient, TCH_GRAD_BOTH, k > 0, norms);
 *     }
 */
typedef struct tch_network_layer {
    size_t struct_size;
    tch_layer layer;                   /* TCH_LAYER_LINEAR with scale B, since the loss is a mean */
    const tch_tensor *input;           /* [B, inputs] */
    const tch_tensor *output_gradient; /* [B, outputs], with respect to input W' + b, before the activation */
} tch_network_layer;
#define TCH_NETWORK_LAYER_INIT                                                                                         \
    {                                                                                                                  \
        sizeof(tch_network_layer), TCH_LAYER_INIT(TCH_LAYER_LINEAR), NULL, NULL                                        \
    }

/* hidden_count + 1. 0 for NULL. */
TCH_API int32_t tch_network_layer_count(const tch_network *network);

/* Layer `index`, from 0, of the batch of the latest tch_network_loss_and_gradients. The tensors are views, valid
 * until the next batch, also of tch_network_forward or tch_network_evaluate; the first layer's input is the caller's
 * memory. Output gradients include the loss scale. */
TCH_API tch_status tch_network_get_layer(tch_network *network, int32_t index, tch_network_layer *layer);

/* Overwrites the gradients of all parameters with scale times the sum over the rows of weights[i] times the gradient of
 * row i's loss, without another backward pass. `weights` is float64 [B]; NULL: 1. With tch_grad_clip_weights and scale
 * 1 / B this is the mean of clipped gradients, with tch_grad_natural_weights and scale 1 the natural gradient. After
 * TCH_ERR_OUT_OF_MEMORY gradients are undefined. */
TCH_API tch_status tch_network_weigh_samples(tch_network *network, const tch_tensor *weights, double scale);

/* Samples a label for each row of the latest batch from the softmax of the outputs and replaces the output gradients by
 * those of these labels, without a loss scale, so that KFAC's factors are those of the true Fisher matrix. The
 * parameters' gradients stay. A seed gives the same numbers on every device. TCH_ERR_UNSUPPORTED for
 * TCH_LOSS_SQUARED. */
TCH_API tch_status tch_network_draw_labels(tch_network *network, uint64_t seed);

TCH_END_DECLS

#endif

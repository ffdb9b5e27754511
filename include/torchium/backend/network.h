/* Operations table, chapter 5: layers and losses of small networks. A backend without it offers no tch_network.
 *
 * Matrices here are float32, one of them (a batch of 1), an example in each row. */
#ifndef TORCHIUM_BACKEND_NETWORK_H
#define TORCHIUM_BACKEND_NETWORK_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/network.h>
#include <torchium/status.h>

/* The rows of a batch are always cut into this many ranges, [rows k / N, rows (k + 1) / N): sums over them are taken in
 * each range by itself and then from range to range, so that they do not depend on how the device divides its work. */
#define TCH_LOSS_RANGES 256

/* What the losses of a batch share: where the gradient with respect to the outputs goes, and the sums. */
typedef struct tch_loss_results {
    const tch_matrices *gradient; /* of the outputs' shape; NULL where it is not wanted */
    double weight;                /* of each row in it */
    const float *scale;           /* one number on the device that multiplies it, or NULL */
    double *totals;               /* TCH_NETWORK_TOTALS numbers on the device, added to */
    double *scratch;              /* 3 TCH_LOSS_RANGES numbers on the device */
} tch_loss_results;

/* --- layers ------------------------------------------------------------------------------------------------------ */

/* Each is one pass over its matrices, which others in turn would be several of. */

/* z = X + bias in every row, bias being 1 by cols; out = f(z). X becomes z, unless out is X. */
typedef tch_status tch_bias_activation_op(void *state, tch_activation activation, const tch_matrices *x,
                                          const tch_matrices *bias, const tch_matrices *out);
/* gradient = gradient f'(z), element by element, and bias_gradient, 1 by cols, the sum of its rows; 0 where there are
 * none. `kept` is z for GELU and f(z) for the others, which is enough to know f' by; it is not read for NONE.
 * bias_gradient may be NULL. */
typedef tch_status tch_bias_activation_backward_op(void *state, tch_activation activation, const tch_matrices *kept,
                                                   const tch_matrices *gradient, const tch_matrices *bias_gradient);

/* --- losses ------------------------------------------------------------------------------------------------------ */

/* TCH_LOSS_CROSS_ENTROPY of each row of `outputs` with its label, `targets` being rows by 1 of int32: loss, right
 * answers and rows are added to the totals; gradient = (softmax - indicator of the label) weight scale. Labels
 * outside [0, cols) are never used as an index: their rows are counted as skipped and have gradient 0.
 * TCH_LOSS_SQUARED: gradient = 2 (outputs - targets) / cols weight scale. */
typedef tch_status tch_loss_op(void *state, tch_loss loss, const tch_matrices *outputs, const tch_matrices *targets,
                               const tch_loss_results *results);
/* Labels drawn from the softmax of each row of `logits`: the Fisher matrix's own. Row r takes the first class whose
 * cumulative probability passes a uniform number, made of the low 24 bits of the first word of Philox-4x32-10 with
 * counter (r low, r high, 0, 0) and key (seed low, seed high). A row that is not finite gets label -1.
 * No other operation draws from a distribution. */
typedef tch_status tch_sample_labels_op(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels);

typedef struct tch_network_ops {
    /* all REQUIRED */
    tch_bias_activation_op *bias_activation;
    tch_bias_activation_backward_op *bias_activation_backward;
    tch_loss_op *loss;
    tch_sample_labels_op *sample_labels;
} tch_network_ops;

#endif

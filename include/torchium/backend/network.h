/* Operations table, chapter 5: layers and losses of small networks. A backend without it does not support tch_network.
 *
 * Matrices are float32 with a batch of 1 and one example per row. */
#ifndef TORCHIUM_BACKEND_NETWORK_H
#define TORCHIUM_BACKEND_NETWORK_H

#include <stdint.h>

#include <torchium/backend/types.h>
#include <torchium/network.h>
#include <torchium/status.h>

/* The rows of a batch are divided into this many ranges, [rows k / N, rows (k + 1) / N), which are summed one by one
 * and then added in order, so that sums do not depend on how the device divides the work. */
#define TCH_LOSS_RANGES 256

/* The results of a loss. */
typedef struct tch_loss_results {
    const tch_matrices *gradient; /* with respect to the outputs, of their shape; may be NULL */
    double weight;                /* of each row in it */
    const float *scale;           /* its factor on the device, or NULL */
    double *totals;               /* TCH_NETWORK_TOTALS elements on the device, which are added to */
    double *scratch;              /* 3 TCH_LOSS_RANGES elements on the device */
} tch_loss_results;

/* --- layers ------------------------------------------------------------------------------------------------------ */

/* Each is one pass over its matrices. */

/* z = X + bias in every row, with bias 1 by cols; out = f(z). X is set to z, unless out is X. */
typedef tch_status tch_bias_activation_op(void *state, tch_activation activation, const tch_matrices *x,
                                          const tch_matrices *bias, const tch_matrices *out);
/* gradient = gradient f'(z), elementwise; bias_gradient, 1 by cols or NULL, is the sum of its rows, 0 without rows.
 * `kept` is z for GELU and f(z) for the others, from which f' is computed; it is not read for NONE. */
typedef tch_status tch_bias_activation_backward_op(void *state, tch_activation activation, const tch_matrices *kept,
                                                   const tch_matrices *gradient, const tch_matrices *bias_gradient);

/* --- losses ------------------------------------------------------------------------------------------------------ */

/* TCH_LOSS_CROSS_ENTROPY of each row of `outputs` with its label in `targets`, rows by 1 of int32: adds loss, correct
 * rows and rows to the totals; gradient = (softmax - indicator of the label) weight scale. Labels outside [0, cols) are
 * never used as an index: their rows count as skipped and have gradient 0.
 * TCH_LOSS_SQUARED: gradient = 2 (outputs - targets) / cols weight scale. */
typedef tch_status tch_loss_op(void *state, tch_loss loss, const tch_matrices *outputs, const tch_matrices *targets,
                               const tch_loss_results *results);
/* Samples labels from the softmax of each row of `logits`, for the true Fisher matrix. Row r gets the first class whose
 * cumulative probability exceeds a uniform number, the low 24 bits of the first word of Philox-4x32-10 with counter (r
 * low, r high, 0, 0) and key (seed low, seed high). Non-finite rows get label -1. */
typedef tch_status tch_sample_labels_op(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels);

typedef struct tch_network_ops {
    /* all REQUIRED */
    tch_bias_activation_op *bias_activation;
    tch_bias_activation_backward_op *bias_activation_backward;
    tch_loss_op *loss;
    tch_sample_labels_op *sample_labels;
} tch_network_ops;

#endif

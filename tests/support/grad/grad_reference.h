/* Per-sample gradients of every layer kind by plain loops in float64, straight from its definition. Every gradient
 * comes with its magnitude, the same sum of absolute values, which bounds its rounding error. */
#ifndef TORCHIUM_TESTS_GRAD_REFERENCE_H
#define TORCHIUM_TESTS_GRAD_REFERENCE_H

#include <stdbool.h>

#include <torchium/grad.h>

typedef struct grad_reference {
    int64_t samples, positions;
    int64_t inputs, outputs; /* of linear layers and convolutions: columns of the weight as a matrix, and p */
    int64_t features;        /* of the others: d of an embedding, channels of a group norm, or what is normalized */
    int64_t weights, biases; /* elements of one weight and of one bias */
    int32_t weight_ndim;
    int64_t weight_shape[6];      /* with a leading dimension of samples */
    double *gradient, *magnitude; /* [samples, weights + biases] */
} grad_reference;

/* x and g are row-major, with the shapes in grad.h; gradients are multiplied by the layer's scale. For a normalized
 * input (x - m) / s the magnitude is (|x| + |m|) / s, or with `wide_statistics` |x - m| / s. */
grad_reference *grad_reference_make(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                    const double *x, const double *g, bool wide_statistics);

#endif

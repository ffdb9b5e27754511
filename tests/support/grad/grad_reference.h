/* Per-sample gradients of every kind of layer by plain loops in float64, straight from the definition of the layer.
 * Beside every gradient stands its magnitude, the same sum with absolute values, which bounds what rounding can do
 * to it. */
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
    int64_t weight_shape[6];      /* with the samples in front */
    double *gradient, *magnitude; /* [samples, weights + biases] */
} grad_reference;

/* x and g are row-major, of the shapes that grad.h says; gradients are multiplied by the layer's scale. For a
 * normalized input (x - m) / s the magnitude is (|x| + |m|) / s, or with `wide_statistics` |x - m| / s. */
grad_reference *grad_reference_make(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                    const double *x, const double *g, bool wide_statistics);

#endif

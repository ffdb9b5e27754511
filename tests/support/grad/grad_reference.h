/* Per-sample gradients of linear layers and convolutions by plain loops in float64, straight from the definition of
 * the layer: no patches and no matrices. Beside every gradient stands its magnitude, the same sum with absolute values,
 * which bounds what rounding can do to it. */
#ifndef TORCHIUM_TESTS_GRAD_REFERENCE_H
#define TORCHIUM_TESTS_GRAD_REFERENCE_H

#include <torchium/grad.h>

typedef struct grad_reference {
    int64_t samples, positions;
    int64_t inputs, outputs; /* columns of the weight as a matrix, and p */
    int64_t weights;         /* elements of one weight */
    double *weight, *bias;   /* [samples, weights] and [samples, outputs] */
    double *magnitude, *bias_magnitude;
} grad_reference;

/* Sizes of the layer's output along its dimensions, for an input of this shape. */
void grad_reference_outputs(const tch_layer *layer, const int64_t *input_shape, int64_t *sizes);

/* x and g are row-major, of the shapes that grad.h says; gradients are multiplied by the layer's scale. */
grad_reference *grad_reference_make(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                    const double *x, const double *g);

#endif

/* Linear layers and convolutions in the plainest form, for tests of curvature: what each position of each sample sees
 * of the input, and the gradient of its outputs, in float64. Random inputs of any shape are made here too. */
#ifndef TORCHIUM_TESTS_LAYER_POSITIONS_H
#define TORCHIUM_TESTS_LAYER_POSITIONS_H

#include <torchium/torchium.h>

#include "support/tensors.h"

/* A layer and the shapes of its batch. LINEAR: size[0] positions, inputs and outputs. CONV: `inputs` channels of
 * size[0] to size[dims - 1]. Zeros are the only padding. */
typedef struct test_layer_case {
    const char *name;
    tch_layer layer;
    int64_t samples, inputs, outputs;
    int64_t size[3];
} test_layer_case;

/* A batch: tensors on the device, and a [samples, groups, positions, d], g [samples, groups, positions, p] of one group
 * each, as the tensors' dtype holds them. */
typedef struct test_positions {
    int64_t samples, groups, positions, d, p;
    test_tensor *input, *gradient;
    double *a, *g;
} test_positions;

test_positions test_positions_make(tch_context *context, const test_layer_case *c, tch_dtype dtype, test_layout layout,
                                   uint64_t stream);

/* Inputs with the 1 of the bias at the end, where `bias` is 1: [samples, groups, positions, d + bias]. */
double *test_with_bias(const test_positions *positions, int bias);

/* alpha times a factor of the batch, f [groups, n, n], from rows x [samples, groups, positions, n], and the same of
 * absolute values. `mean`: of the inputs, whose positions are averaged; otherwise of the output gradients. */
void test_reference_factor(const test_positions *positions, const double *x, int64_t n, tch_sharing sharing, int mean,
                           double alpha, double *f, double *sizes);

/* weight times the sum over samples of the squared coordinates of their gradients in the bases, rows of qa [groups, n,
 * n] and qg [groups, p, p]: [groups, p, n], and the same of absolute values. `a` comes from test_with_bias. */
void test_reference_scales(const test_positions *positions, const double *a, int64_t n, const double *qa,
                           const double *qg, double weight, double *expected, double *sizes);

#endif

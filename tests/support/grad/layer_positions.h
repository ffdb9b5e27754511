/* Reference for linear layers and convolutions, straight from their definitions: the input that each position of a
 * sample sees, and its output gradient, in float64. Also random batches, and calls with the least workspace that
 * succeeds. */
#ifndef TORCHIUM_TESTS_LAYER_POSITIONS_H
#define TORCHIUM_TESTS_LAYER_POSITIONS_H

#include <torchium/torchium.h>

#include "support/tensors.h"

/* A layer and the shapes of its batch. LINEAR: size[0] positions, inputs and outputs. CONV: `inputs` channels of
 * size[0] to size[dims - 1]. Padding is with zeros only. */
typedef struct test_layer_case {
    const char *name;
    tch_layer layer;
    int64_t samples, inputs, outputs;
    int64_t size[3];
} test_layer_case;

/* A batch: tensors on the device, if created, and a [samples, groups, positions, d], g [samples, groups, positions, p],
 * d and p per group, as rounded to the tensors' dtype. */
typedef struct test_positions {
    int64_t samples, groups, positions, d, p;
    test_tensor *input, *gradient;
    double *a, *g;
} test_positions;

/* The shape of the output gradient for an input of this shape; returns its rank. `outputs` is the number of outputs of
 * a linear layer, channels of a convolution or columns of an embedding. */
int32_t test_gradient_shape(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                            int64_t *shape);

/* From an input x and an output gradient y, row-major with the shapes in grad.h; without tensors. */
test_positions test_positions_of(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                 const double *x, const double *y);

test_positions test_positions_make(tch_context *context, const test_layer_case *c, tch_dtype dtype, test_layout layout,
                                   uint64_t stream);

/* Appends the bias's 1 to inputs if `bias` is 1: [samples, groups, positions, d + bias]. */
double *test_with_bias(const test_positions *positions, int bias);

/* alpha times a factor of the batch, f [groups, n, n], from rows x [samples, groups, positions, n], and the same of
 * absolute values. `mean`: of the inputs, whose positions are averaged; otherwise of the output gradients. */
void test_reference_factor(const test_positions *positions, const double *x, int64_t n, tch_sharing sharing, int mean,
                           double alpha, double *f, double *sizes);

/* weight times the sum over samples of the squared coordinates of their gradients in the bases, rows of qa [groups, n,
 * n] and qg [groups, p, p]: [groups, p, n], and the same of absolute values. `a` comes from test_with_bias. */
void test_reference_scales(const test_positions *positions, const double *a, int64_t n, const double *qa,
                           const double *qg, double weight, double *expected, double *sizes);

/* Workspace limits to try in sequence, increasing until a call does not return TCH_ERR_OUT_OF_MEMORY; without `little`
 * a single try without limit. */
typedef struct test_limits {
    tch_context *context;
    bool little;
    int64_t limit; /* the latest, 0 at first */
} test_limits;

bool test_limits_next(test_limits *limits, tch_status status);

#define TEST_WITHIN_LIMITS(context, little, call)                                                                      \
    do {                                                                                                               \
        tch_status ran_ = TCH_ERR_OUT_OF_MEMORY;                                                                       \
        for (test_limits limits_ = {context, little, 0}; test_limits_next(&limits_, ran_);) {                          \
            ran_ = (call);                                                                                             \
        }                                                                                                              \
        CHECK(ran_ == TCH_OK, "%s gave %s: %s", #call, tch_status_name(ran_), tch_last_error());                       \
    } while (0)

#endif

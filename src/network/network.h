/* Internals of a network: its layers and their state after a batch.
 *
 * After tch_network_loss_and_gradients each layer holds, for the rows of that batch, the inputs of curvature: the
 * layer's `input` and the gradient of the batch's mean loss with respect to its pre-activation, `delta`. The first
 * layer's input is the caller's tensor. The rest is in one block of device memory with room for `capacity` rows; a
 * smaller batch uses the first of them. */
#ifndef TCHI_NETWORK_H
#define TCHI_NETWORK_H

#include <stdbool.h>

#include <torchium/network.h>

#include "core/context.h"
#include "core/tensor.h"

/* A matrix of the batch as a tensor, with the shape and strides that the tensor points to. */
typedef struct tchi_rows_view {
    tch_tensor tensor;
    int64_t shape[2], strides[2];
} tchi_rows_view;

typedef struct tchi_layer {
    int64_t inputs, outputs;
    tch_activation activation; /* NONE in the last layer */
    tch_tensor *weight;        /* [outputs, inputs] */
    tch_tensor *bias;          /* [outputs] */
    tch_tensor *weight_gradient, *bias_gradient;
    char weight_name[32], bias_name[32];
    tch_matrices input;  /* the batch's inputs, or the output of the layer before */
    tch_matrices z;      /* input W' + bias */
    tch_matrices output; /* f(z), in the memory of z unless that must be kept: see tch_backend's activation_backward */
    tch_matrices delta;  /* d loss / d z */
    tchi_rows_view input_view, delta_view; /* returned by tch_network_get_layer */
} tchi_layer;

struct tch_network {
    tch_context *context;
    tch_loss loss;
    int32_t layer_count;
    int64_t rows;     /* the batch of the layers' deltas; -1: none */
    int64_t capacity; /* rows of `memory` */
    void *memory;     /* of the pool; NULL while capacity is 0. The rest lies in it: */
    double *scratch;  /* of the losses */
    double *ignored;  /* totals that the caller did not request */
    int32_t *labels;  /* drawn from the outputs, one for each row */
    tchi_layer layers[];
};

/* Makes room for a batch of `rows`, keeping the old memory on failure. All layers' matrices are then those of this
 * batch, except the first one's input. */
tch_status tchi_network_set_batch(tch_network *network, int64_t rows);

#endif

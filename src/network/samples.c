/* What a batch leaves behind, for per-sample gradients and for curvature: views of each layer's input and delta,
 * gradients summed anew with weights, and deltas of labels that the network draws itself. All of it stands on the
 * deltas of the latest batch with gradients; where there is none, that is said. */
#include "network.h"

#include <math.h>

#include "core/check.h"
#include "core/status.h"

/* --- checks ------------------------------------------------------------------------------------------------------ */

static tch_status check_batch(const tch_network *network, const char *function)
{
    return network->rows >= 0 ? TCH_OK
                              : tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                                          "%s: network has no batch at hand: call tch_network_loss_and_gradients "
                                          "first, and nothing that takes another batch in between",
                                          function);
}

static tch_status check_weights(const tch_network *network, const tch_tensor *weights)
{
    TCHI_TRY(tchi_check_input(network->context, weights, "weights"));
    TCHI_TRY(tchi_check_dtype(weights, "weights", TCH_FLOAT64));
    TCHI_TRY(tchi_check_shape(weights, "weights", 1, &network->rows));
    for (int32_t i = 0; i < tch_network_parameter_count(network); i++) {
        TCHI_TRY(tchi_check_disjoint(tch_network_gradient(network, i), tch_network_parameter_name(network, i), weights,
                                     "weights"));
    }
    return TCH_OK;
}

/* --- views ------------------------------------------------------------------------------------------------------- */

static const tch_tensor *view_of(const tch_network *network, const tch_matrices *rows, tchi_rows_view *view)
{
    view->shape[0] = rows->rows;
    view->shape[1] = rows->cols;
    view->strides[0] = rows->ld;
    view->strides[1] = 1;
    view->tensor = tch_tensor_view(rows->data, TCH_FLOAT32, 2, view->shape);
    view->tensor.strides = view->strides;
    view->tensor.device = network->layers[0].weight->device;
    return &view->tensor;
}

static tch_network_layer layer_at(tch_network *network, int32_t index)
{
    tchi_layer *layer = &network->layers[index];
    tch_network_layer at = TCH_NETWORK_LAYER_INIT;
    at.layer.scale = network->rows > 0 ? (double)network->rows : 1.0;
    at.input = view_of(network, &layer->input, &layer->input_view);
    at.output_gradient = view_of(network, &layer->delta, &layer->delta_view);
    return at;
}

int32_t tch_network_layer_count(const tch_network *network)
{
    return network == NULL ? 0 : network->layer_count;
}

tch_status tch_network_get_layer(tch_network *network, int32_t index, tch_network_layer *layer)
{
    if (network == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_get_layer: network is NULL");
    }
    if (layer == NULL || layer->struct_size != sizeof *layer) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_network_get_layer: layer must point to a struct set to TCH_NETWORK_LAYER_INIT");
    }
    if (index < 0 || index >= network->layer_count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_get_layer: index is %d, expected 0 to %d", index,
                         network->layer_count - 1);
    }
    TCHI_TRY(check_batch(network, "tch_network_get_layer"));
    *layer = layer_at(network, index);
    return TCH_OK;
}

/* --- sums with weights ------------------------------------------------------------------------------------------- */

tch_status tch_network_weigh_samples(tch_network *network, const tch_tensor *weights, double scale)
{
    if (network == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_weigh_samples: network is NULL");
    }
    TCHI_ENTER_FOR(network->context, "tch_network_weigh_samples", sample);
    TCHI_TRY(check_batch(network, "tch_network_weigh_samples"));
    TCHI_TRY(weights != NULL ? check_weights(network, weights) : TCH_OK);
    if (!isfinite(scale)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_weigh_samples: scale is %g, expected a finite number",
                         scale);
    }
    for (int32_t i = 0; i < network->layer_count; i++) {
        tch_network_layer at = layer_at(network, i);
        at.layer.scale *= scale;
        TCHI_TRY(tch_grad_weighted_sum(network->context, &at.layer, at.input, at.output_gradient, weights, 0.0,
                                       network->layers[i].weight_gradient, network->layers[i].bias_gradient));
    }
    return TCH_OK;
}

/* --- labels of the network's own --------------------------------------------------------------------------------- */

tch_status tch_network_draw_labels(tch_network *network, uint64_t seed)
{
    if (network == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_network_draw_labels: network is NULL");
    }
    tch_context *context = network->context;
    TCHI_ENTER_FOR(context, "tch_network_draw_labels", network);
    TCHI_TRY(check_batch(network, "tch_network_draw_labels"));
    if (network->loss != TCH_LOSS_CROSS_ENTROPY) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "tch_network_draw_labels: the network's loss is TCH_LOSS_SQUARED, which "
                                              "has no labels; expected TCH_LOSS_CROSS_ENTROPY");
    }
    const tchi_layer *last = &network->layers[network->layer_count - 1];
    const tch_loss_results results = {
        .gradient = &last->delta,
        .weight = network->rows > 0 ? 1.0 / (double)network->rows : 0.0,
        .totals = network->ignored,
        .scratch = network->scratch,
    };
    TCHI_TRY(
        context->backend->device->zero_bytes(context->state, network->ignored, TCH_NETWORK_TOTALS * sizeof(double)));
    TCHI_TRY(context->backend->network->sample_labels(context->state, &last->output, seed, network->labels));
    const tch_matrices labels = tchi_matrices_new(network->labels, TCH_SCALAR_I32, 1, network->rows, 1);
    TCHI_TRY(context->backend->network->loss(context->state, network->loss, &last->output, &labels, &results));
    return tchi_network_backward(network, false);
}

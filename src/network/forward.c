/* One batch through a network: forward pass, loss, backward pass. The same on every device and without host
 * synchronization; every argument is checked before the first write. */
#include "network.h"

#include <math.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"

/* --- the walk ---------------------------------------------------------------------------------------------------- */

static tch_matrices parameter_matrix(const tch_tensor *tensor, int64_t rows, int64_t cols)
{
    return tchi_matrices_new(tchi_tensor_data(tensor), TCH_SCALAR_F32, 1, rows, cols);
}

static tch_status forward_layers(tch_network *network)
{
    const tch_context *context = network->context;
    const tch_backend *t = context->backend;
    for (int32_t i = 0; i < network->layer_count; i++) {
        tchi_layer *layer = &network->layers[i];
        tch_matrices weight = parameter_matrix(layer->weight, layer->outputs, layer->inputs);
        tch_matrices bias = parameter_matrix(layer->bias, 1, layer->outputs);
        TCHI_TRY(t->matrix->gemm(context->state, 1.0, &layer->input, 0, &weight, 1, 0.0, 0, &layer->z));
        TCHI_TRY(t->network->bias_activation(context->state, layer->activation, &layer->z, &bias, &layer->output));
    }
    return TCH_OK;
}

/* A layer's gradients from its delta, which on entry is that of its output, and the delta of the layer below. */
static tch_status layer_backward(const tch_network *network, int32_t index, bool with_gradients)
{
    const tch_context *context = network->context;
    const tch_backend *t = context->backend;
    const tchi_layer *layer = &network->layers[index];
    const tch_matrices *kept = layer->activation == TCH_ACTIVATION_GELU ? &layer->z : &layer->output;
    tch_matrices weight = parameter_matrix(layer->weight, layer->outputs, layer->inputs);
    tch_matrices weight_gradient = parameter_matrix(layer->weight_gradient, layer->outputs, layer->inputs);
    tch_matrices bias_gradient = parameter_matrix(layer->bias_gradient, 1, layer->outputs);
    TCHI_TRY(t->network->bias_activation_backward(context->state, layer->activation, kept, &layer->delta,
                                                  with_gradients ? &bias_gradient : NULL));
    if (with_gradients) {
        TCHI_TRY(t->matrix->gemm(context->state, 1.0, &layer->delta, 1, &layer->input, 0, 0.0, 0, &weight_gradient));
    }
    return index == 0 ? TCH_OK
                      : t->matrix->gemm(context->state, 1.0, &layer->delta, 0, &weight, 0, 0.0, 0, &layer[-1].delta);
}

/* Propagates the last delta to all layers and, if requested, computes the parameter gradients. */
static tch_status layers_backward(const tch_network *network, bool with_gradients)
{
    for (int32_t i = network->layer_count - 1; i >= 0; i--) {
        TCHI_TRY(layer_backward(network, i, with_gradients));
    }
    return TCH_OK;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

/* Rows of float32: any row stride, unit column stride. */
static tch_status check_rows(const tch_tensor *tensor, const char *name, int64_t cols)
{
    char text[TCHI_DESCRIBE_SIZE];
    tch_matrices rows;
    TCHI_TRY(tchi_check_dtype(tensor, name, TCH_FLOAT32));
    if (tensor->ndim != 2 || tensor->shape[1] != cols) {
        return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected [rows, %lld]", name,
                         tchi_describe_shape(tensor, text, sizeof text), (long long)cols);
    }
    TCHI_TRY(tchi_check_matrix_size(tensor, name));
    if (!tchi_matrices_of(tensor, &rows) || rows.ld > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_LAYOUT,
                         "%s has strides [%lld, %lld]: its rows must be contiguous, one after "
                         "the other; copy it to a contiguous tensor",
                         name, (long long)tchi_tensor_stride(tensor, 0), (long long)tchi_tensor_stride(tensor, 1));
    }
    return TCH_OK;
}

static tch_status check_inputs(const tch_network *network, const tch_tensor *inputs)
{
    TCHI_TRY(tchi_check_input(network->context, inputs, "inputs"));
    return check_rows(inputs, "inputs", network->layers[0].inputs);
}

static tch_status check_targets(const tch_network *network, const tch_tensor *targets, int64_t rows)
{
    TCHI_TRY(tchi_check_input(network->context, targets, "targets"));
    if (network->loss == TCH_LOSS_SQUARED) {
        const int64_t shape[] = {rows, network->layers[network->layer_count - 1].outputs};
        TCHI_TRY(check_rows(targets, "targets", shape[1]));
        return tchi_check_shape(targets, "targets", 2, shape);
    }
    TCHI_TRY(tchi_check_dtype(targets, "targets", TCH_INT32));
    TCHI_TRY(tchi_check_shape(targets, "targets", 1, &rows));
    if (!tch_tensor_is_contiguous(targets)) {
        return tchi_fail(TCH_ERR_LAYOUT, "targets has stride %lld: labels must be contiguous",
                         (long long)tchi_tensor_stride(targets, 0));
    }
    return TCH_OK;
}

static tch_status check_totals(const tch_network *network, const tch_tensor *totals)
{
    const int64_t shape[] = {TCH_NETWORK_TOTALS};
    TCHI_TRY(tchi_check_output(network->context, totals, "totals"));
    TCHI_TRY(tchi_check_dtype(totals, "totals", TCH_FLOAT64));
    TCHI_TRY(tchi_check_shape(totals, "totals", 1, shape));
    return tch_tensor_is_contiguous(totals)
               ? TCH_OK
               : tchi_fail(TCH_ERR_LAYOUT, "totals has stride %lld: its elements must be contiguous",
                           (long long)tchi_tensor_stride(totals, 0));
}

static tch_status check_scale(const tch_network *network, const tch_tensor *scale)
{
    char text[TCHI_DESCRIBE_SIZE];
    if (scale == NULL) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_check_input(network->context, scale, "loss_scale"));
    TCHI_TRY(tchi_check_dtype(scale, "loss_scale", TCH_FLOAT32));
    return tch_tensor_numel(scale) == 1 ? TCH_OK
                                        : tchi_fail(TCH_ERR_SHAPE, "loss_scale has shape %s, expected one number",
                                                    tchi_describe_shape(scale, text, sizeof text));
}

/* `out` does not overlap the network's parameters and gradients. */
static tch_status check_apart(const tch_network *network, const tch_tensor *out, const char *name)
{
    for (int32_t i = 0; i < tch_network_parameter_count(network); i++) {
        const char *other = tch_network_parameter_name(network, i);
        TCHI_TRY(tchi_check_disjoint(out, name, tch_network_parameter(network, i), other));
        TCHI_TRY(tchi_check_disjoint(out, name, tch_network_gradient(network, i), other));
    }
    return TCH_OK;
}

static tch_status check_loss_call(const tch_network *network, const tch_tensor *inputs, const tch_tensor *targets,
                                  const tch_tensor *scale, const tch_tensor *totals)
{
    TCHI_TRY(check_inputs(network, inputs));
    TCHI_TRY(check_targets(network, targets, inputs->shape[0]));
    TCHI_TRY(check_scale(network, scale));
    TCHI_TRY(check_totals(network, totals));
    TCHI_TRY(check_apart(network, inputs, "inputs"));
    TCHI_TRY(check_apart(network, targets, "targets"));
    TCHI_TRY(check_apart(network, totals, "totals"));
    const tchi_named out = {totals, "totals"};
    const tchi_named in[] = {{inputs, "inputs"}, {targets, "targets"}, {scale, "loss_scale"}};
    return tchi_check_all_disjoint(&out, 1, in, 3);
}

/* --- the public calls -------------------------------------------------------------------------------------------- */

static tch_status begin_batch(tch_network *network, const tch_tensor *inputs)
{
    TCHI_TRY(tchi_network_set_batch(network, inputs->shape[0]));
    (void)tchi_matrices_of(inputs, &network->layers[0].input); /* which was checked */
    return TCH_OK;
}

tch_status tch_network_forward(tch_network *network, const tch_tensor *inputs, tch_tensor *outputs)
{
    TCHI_TRY(tchi_check_not_null("tch_network_forward", "network", network));
    TCHI_ENTER(network->context, "tch_network_forward");
    tchi_layer *last = &network->layers[network->layer_count - 1];
    TCHI_TRY(check_inputs(network, inputs));
    TCHI_TRY(tchi_check_output(network->context, outputs, "outputs"));
    TCHI_TRY(tchi_check_dtype(outputs, "outputs", TCH_FLOAT32));
    const int64_t shape[] = {inputs->shape[0], last->outputs};
    TCHI_TRY(tchi_check_shape(outputs, "outputs", 2, shape));
    TCHI_TRY(tchi_check_disjoint(outputs, "outputs", inputs, "inputs"));
    TCHI_TRY(check_apart(network, outputs, "outputs"));
    TCHI_TRY(begin_batch(network, inputs));
    TCHI_TRY(forward_layers(network));
    int64_t strides[TCH_MAX_RANK];
    const int64_t steps[] = {last->output.ld, 1};
    const tch_array from = {last->output.data, TCH_SCALAR_F32, 2, shape, steps};
    const tch_array to = tchi_array_of(outputs, strides);
    return network->context->backend->matrix->copy(network->context->state, &to, &from);
}

static tch_status batch_loss(tch_network *network, const tch_tensor *inputs, const tch_tensor *targets,
                             const tch_tensor *scale, const tch_tensor *totals, bool with_gradients)
{
    const tch_context *context = network->context;
    const tchi_layer *last = &network->layers[network->layer_count - 1];
    int64_t rows = inputs->shape[0];
    tch_matrices target = tchi_matrices_new(tchi_tensor_data(targets), TCH_SCALAR_I32, 1, rows, 1);
    if (network->loss == TCH_LOSS_SQUARED) {
        (void)tchi_matrices_of(targets, &target); /* which was checked */
    }
    TCHI_TRY(begin_batch(network, inputs));
    TCHI_TRY(forward_layers(network));
    const tch_loss_results results = {
        .gradient = with_gradients ? &last->delta : NULL,
        .weight = rows > 0 ? 1.0 / (double)rows : 0.0,
        .scale = scale != NULL ? tchi_tensor_data(scale) : NULL,
        .totals = tchi_tensor_data(totals),
        .scratch = network->scratch,
    };
    TCHI_TRY(context->backend->network->loss(context->state, network->loss, &last->output, &target, &results));
    if (with_gradients) {
        TCHI_TRY(layers_backward(network, true));
        network->rows = rows;
    }
    return TCH_OK;
}

tch_status tch_network_loss_and_gradients(tch_network *network, const tch_tensor *inputs, const tch_tensor *targets,
                                          const tch_tensor *loss_scale, tch_tensor *totals)
{
    TCHI_TRY(tchi_check_not_null("tch_network_loss_and_gradients", "network", network));
    TCHI_ENTER(network->context, "tch_network_loss_and_gradients");
    TCHI_TRY(check_loss_call(network, inputs, targets, loss_scale, totals));
    return batch_loss(network, inputs, targets, loss_scale, totals, true);
}

tch_status tch_network_evaluate(tch_network *network, const tch_tensor *inputs, const tch_tensor *targets,
                                tch_tensor *totals)
{
    TCHI_TRY(tchi_check_not_null("tch_network_evaluate", "network", network));
    TCHI_ENTER(network->context, "tch_network_evaluate");
    TCHI_TRY(check_loss_call(network, inputs, targets, NULL, totals));
    return batch_loss(network, inputs, targets, NULL, totals, false);
}

/* --- what a batch leaves behind ----------------------------------------------------------------------------------- */

/* For per-sample gradients and curvature: views of each layer's input and delta, weighted sums of gradients, and deltas
 * of sampled labels. All require the deltas of the latest batch with gradients. */
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
    TCHI_TRY(tchi_check_not_null("tch_network_get_layer", "network", network));
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
    TCHI_TRY(tchi_check_not_null("tch_network_weigh_samples", "network", network));
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
    TCHI_TRY(tchi_check_not_null("tch_network_draw_labels", "network", network));
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
    return layers_backward(network, false);
}

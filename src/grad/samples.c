/* tch_grad_samples: the gradient of each sample, formed. For linear layers and convolutions it is one product for each
 * sample and group, written where the caller wants it. */
#include <torchium/grad.h>

#include "core/check.h"
#include "core/status.h"

#include "kinds.h"
#include "layer.h"
#include "linalg/batch.h"
#include "parameters.h"
#include "positions.h"
#include "walk.h"

typedef struct samples_call {
    const tch_layer *layer;
    tchi_side inputs, gradients;
    tchi_parameter weight, bias;
    /* of a chunk */
    tch_matrices a, g, weights, biases;
    void *scratch;
} samples_call;

/* Sums for a bias are of float32 at least, whatever the caller wants them as. */
static void samples_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    samples_call *c = call;
    const tchi_side *g = &c->gradients;
    c->g = tchi_side_place(g, arena, first, count, TCHI_APART);
    if (c->weight.given) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_APART);
        c->weights = tchi_parameter_place(&c->weight, arena, c->weight.type, first, count);
    }
    if (c->bias.given) {
        c->biases = tchi_parameter_place(&c->bias, arena, tchi_compute_type(c->bias.type), first, count);
        c->scratch = tchi_arena_take(
            arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, g->type,
                                                           g->positions, g->cols, count * g->groups, 0));
    }
}

static tch_status samples_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    (void)count;
    samples_call *c = call;
    const tch_backend *t = context->backend;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->weight.given) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        TCHI_TRY(t->matrix->gemm(context->state, c->layer->scale, &c->g, 1, &c->a, 0, 0.0, 0, &c->weights));
        TCHI_TRY(tchi_parameter_write(context, &c->weight, first, &c->weights));
    }
    if (c->bias.given) {
        tch_matrices rows = tchi_tall(&c->biases);
        TCHI_TRY(t->sample->sample_sums(context->state, &c->g, c->layer->scale, 0.0, &rows, c->scratch));
        TCHI_TRY(tchi_parameter_write(context, &c->bias, first, &c->biases));
    }
    return TCH_OK;
}

static tch_status fill_zeros(tch_context *context, const tch_tensor *tensor)
{
    if (tensor == NULL) {
        return TCH_OK;
    }
    int64_t strides[TCH_MAX_RANK];
    tch_array array = tchi_array_of(tensor, strides);
    return context->backend->matrix->fill(context->state, &array, 0.0);
}

static tch_status check_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias)
{
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parameters(context, layer, input, output_gradient, input->shape[0], true, weight, bias));
    const tchi_named inputs[] = {{input, "input"}, {output_gradient, "output_gradient"}};
    const tchi_named outputs[] = {{weight, "weight"}, {bias, "bias"}};
    return tchi_check_all_disjoint(outputs, 2, inputs, 2);
}

tch_status tch_grad_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, tch_tensor *weight, tch_tensor *bias)
{
    TCHI_ENTER_FOR(context, "tch_grad_samples", sample);
    TCHI_TRY(check_samples(context, layer, input, output_gradient, weight, bias));
    if (weight == NULL && bias == NULL) {
        return TCH_OK;
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return tchi_embedding_samples(context, layer, input, output_gradient, weight);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_samples(context, layer, input, output_gradient, weight, bias);
    }
    samples_call c = {.layer = layer};
    c.inputs = tchi_input_side(layer, input);
    c.gradients = tchi_gradient_side(layer, output_gradient);
    if (c.gradients.samples == 0 || c.gradients.positions == 0) {
        TCHI_TRY(fill_zeros(context, weight));
        return fill_zeros(context, bias);
    }
    c.weight = tchi_parameter_of(weight, true, c.gradients.groups, c.gradients.cols, c.inputs.cols);
    c.bias = tchi_parameter_of(bias, true, c.gradients.groups, 1, c.gradients.cols);
    const tchi_walk walk = {.samples = c.gradients.samples,
                            .positions = c.gradients.positions,
                            .layout = samples_layout,
                            .part = samples_part};
    return tchi_walk_samples(context, &walk, &c);
}

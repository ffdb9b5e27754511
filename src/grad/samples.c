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

typedef struct samples_call {
    const tch_layer *layer;
    tchi_side a, g;
    tchi_parameter weight, bias;
    tch_tensor *weight_tensor, *bias_tensor; /* or NULL */
} samples_call;

/* --- weights ----------------------------------------------------------------------------------------------------- */

typedef struct weight_buffers {
    tch_matrices a, g, out;
} weight_buffers;

static void weight_layout(weight_buffers *w, tchi_arena *arena, const samples_call *c, int64_t first, int64_t count)
{
    w->a = tchi_side_place(&c->a, arena, first, count, TCHI_APART);
    w->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
    w->out = tchi_parameter_place(&c->weight, arena, c->weight.type, first, count);
}

static tch_status weight_part(tch_context *context, const samples_call *c, int64_t first, int64_t count)
{
    weight_buffers w;
    tchi_arena arena = {0};
    weight_layout(&w, &arena, c, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    weight_layout(&w, &arena, c, first, count);
    TCHI_TRY(tchi_side_read(context, &c->a, first, &w.a));
    TCHI_TRY(tchi_side_read(context, &c->g, first, &w.g));
    TCHI_TRY(context->backend->matrix->gemm(context->state, c->layer->scale, &w.g, 1, &w.a, 0, 0.0, &w.out));
    return tchi_parameter_write(context, &c->weight, first, &w.out);
}

/* --- biases ------------------------------------------------------------------------------------------------------ */

typedef struct bias_buffers {
    tch_matrices g, out;
    void *scratch;
} bias_buffers;

/* Sums are of float32 at least, whatever the caller wants them as. */
static void bias_layout(bias_buffers *b, tchi_arena *arena, tch_context *context, const samples_call *c, int64_t first,
                        int64_t count)
{
    b->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
    b->out = tchi_parameter_place(&c->bias, arena, tchi_compute_type(c->bias.type), first, count);
    b->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS,
                                                                                c->g.type, c->g.positions, c->g.cols,
                                                                                count * c->g.groups, 0));
}

static tch_status bias_part(tch_context *context, const samples_call *c, int64_t first, int64_t count)
{
    bias_buffers b;
    tchi_arena arena = {0};
    bias_layout(&b, &arena, context, c, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    bias_layout(&b, &arena, context, c, first, count);
    TCHI_TRY(tchi_side_read(context, &c->g, first, &b.g));
    tch_matrices rows = tchi_tall(&b.out);
    TCHI_TRY(context->backend->sample->sample_sums(context->state, &b.g, c->layer->scale, 0.0, &rows, b.scratch));
    return tchi_parameter_write(context, &c->bias, first, &b.out);
}

/* --- both -------------------------------------------------------------------------------------------------------- */

/* Bytes of scratch that `count` samples take, in whichever part takes more. */
static int64_t bytes_of(tch_context *context, const samples_call *c, int64_t count)
{
    weight_buffers w;
    bias_buffers b;
    tchi_arena for_weight = {0};
    tchi_arena for_bias = {0};
    if (c->weight_tensor != NULL) {
        weight_layout(&w, &for_weight, c, 0, count);
    }
    if (c->bias_tensor != NULL) {
        bias_layout(&b, &for_bias, context, c, 0, count);
    }
    return for_weight.used > for_bias.used ? for_weight.used : for_bias.used;
}

static tch_status fill_zeros(tch_context *context, tch_tensor *tensor)
{
    int64_t strides[TCH_MAX_RANK];
    tch_array array = tchi_array_of(tensor, strides);
    return context->backend->matrix->fill(context->state, &array, 0.0);
}

static tch_status no_positions(tch_context *context, const samples_call *c)
{
    if (c->weight_tensor != NULL) {
        TCHI_TRY(fill_zeros(context, c->weight_tensor));
    }
    return c->bias_tensor == NULL ? TCH_OK : fill_zeros(context, c->bias_tensor);
}

static tch_status product_samples(tch_context *context, const samples_call *c)
{
    int64_t samples = c->g.samples;
    if (samples == 0 || c->g.positions == 0) {
        return no_positions(context, c);
    }
    int64_t chunk = tchi_chunk_samples(context, samples, c->g.positions, bytes_of(context, c, 1), 0);
    TCHI_TRY(tchi_reserve_first(context, bytes_of(context, c, chunk)));
    for (int64_t first = 0; first < samples; first += chunk) {
        int64_t count = samples - first < chunk ? samples - first : chunk;
        if (c->weight_tensor != NULL) {
            TCHI_TRY(weight_part(context, c, first, count));
        }
        if (c->bias_tensor != NULL) {
            TCHI_TRY(bias_part(context, c, first, count));
        }
    }
    return TCH_OK;
}

static tch_status check_call(tch_context *context, const tch_layer *layer, const tch_tensor *input,
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
    TCHI_TRY(check_call(context, layer, input, output_gradient, weight, bias));
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return weight == NULL ? TCH_OK : tchi_embedding_samples(context, layer, input, output_gradient, weight);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_samples(context, layer, input, output_gradient, weight, bias);
    }
    samples_call c = {.layer = layer, .weight_tensor = weight, .bias_tensor = bias};
    c.a = tchi_input_side(layer, input);
    c.g = tchi_gradient_side(layer, output_gradient);
    if (weight != NULL) {
        c.weight = tchi_parameter_of(weight, true, c.g.groups, c.g.cols, c.a.cols);
    }
    if (bias != NULL) {
        c.bias = tchi_parameter_of(bias, true, c.g.groups, 1, c.g.cols);
    }
    return product_samples(context, &c);
}

/* tch_grad_norms: the squared norm of each sample's gradient, by the table's sample_norms for linear layers and
 * convolutions. Norms are added to, part by part and chunk by chunk; they are cleared once all memory is there. */
#include <torchium/grad.h>

#include "core/check.h"
#include "core/status.h"

#include "core/arith.h"
#include "kinds.h"
#include "layer.h"
#include "linalg/batch.h"
#include "positions.h"

typedef struct norms_buffers {
    tch_matrices a, g;
    tch_matrices sums; /* of output gradients over positions, where they are taken: the bias's gradients */
    void *scratch;     /* of whichever operation is under way */
} norms_buffers;

typedef struct norms_call {
    const tch_layer *layer;
    tchi_side a, g;
    tch_grad_part parts;
    double *norms;
} norms_call;

static int64_t scratch_of(tch_context *context, const norms_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    int64_t batch = count * c->g.groups;
    int64_t p = c->g.cols;
    tch_scalar wide = tchi_compute_type(c->g.type);
    int64_t bytes = 0;
    if (c->parts & TCH_GRAD_WEIGHT) {
        bytes =
            t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_NORMS, c->g.type, c->g.positions, c->a.cols, batch, p);
    }
    if (c->parts & TCH_GRAD_BIAS) {
        bytes = tchi_max(
            bytes, t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_SUMS, c->g.type, c->g.positions, p, batch, 0));
        bytes = tchi_max(bytes, t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, wide, 1, p, batch, 0));
    }
    return bytes;
}

static void layout(norms_buffers *n, tchi_arena *arena, tch_context *context, const norms_call *c, int64_t first,
                   int64_t count)
{
    n->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
    if (c->parts & TCH_GRAD_WEIGHT) {
        n->a = tchi_side_place(&c->a, arena, first, count, TCHI_APART);
    }
    if (c->parts & TCH_GRAD_BIAS) {
        n->sums = tchi_scratch_matrices(arena, tchi_compute_type(c->g.type), count * c->g.groups, 1, c->g.cols);
    }
    n->scratch = tchi_arena_take(arena, scratch_of(context, c, count));
}

static tch_status bias_norms(tch_context *context, const norms_call *c, const norms_buffers *n, double square,
                             double *norms)
{
    const tch_backend *t = context->backend;
    tch_matrices rows = tchi_tall(&n->sums);
    TCHI_TRY(t->sample->sample_sums(context->state, &n->g, 1.0, 0.0, &rows, n->scratch));
    return t->sample->pair_dots(context->state, &n->sums, &n->sums, c->g.groups, square, norms, n->scratch);
}

static tch_status norms_part(tch_context *context, const norms_call *c, int64_t first, int64_t count)
{
    double square = c->layer->scale * c->layer->scale;
    double *norms = c->norms + first;
    norms_buffers n;
    tchi_arena arena = {0};
    layout(&n, &arena, context, c, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(&n, &arena, context, c, first, count);
    TCHI_TRY(tchi_side_read(context, &c->g, first, &n.g));
    if (!(c->parts & TCH_GRAD_WEIGHT)) {
        return bias_norms(context, c, &n, square, norms);
    }
    TCHI_TRY(tchi_side_read(context, &c->a, first, &n.a));
    return context->backend->sample->sample_norms(context->state, &n.a, &n.g, c->g.groups, square, c->layer->rounded,
                                                  c->parts & TCH_GRAD_BIAS ? &n.sums : NULL, norms, n.scratch);
}

static int64_t choose_chunk(tch_context *context, const norms_call *c)
{
    norms_buffers probe;
    tchi_arena one = {0};
    layout(&probe, &one, context, c, 0, 1);
    int64_t each = one.used - scratch_of(context, c, 1);
    return tchi_chunk_samples(context, c->g.samples, c->g.positions, each, scratch_of(context, c, c->g.samples));
}

static tch_status product_norms(tch_context *context, const norms_call *c, int32_t accumulate)
{
    norms_buffers probe;
    tchi_arena all = {0};
    int64_t samples = c->g.samples;
    int64_t chunk = c->g.positions == 0 ? samples : choose_chunk(context, c);
    layout(&probe, &all, context, c, 0, chunk);
    TCHI_TRY(tchi_reserve_first(context, all.used));
    TCHI_TRY(tchi_clear_numbers(context, accumulate, c->norms, samples));
    for (int64_t first = 0; first < samples && c->g.positions > 0; first += chunk) {
        TCHI_TRY(norms_part(context, c, first, samples - first < chunk ? samples - first : chunk));
    }
    return TCH_OK;
}

static tch_status check_call(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, tch_grad_part parts, const tch_tensor *norms)
{
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parts(parts));
    TCHI_TRY(tchi_check_numbers(context, norms, "norms", input->shape[0]));
    const tchi_named inputs[] = {{input, "input"}, {output_gradient, "output_gradient"}};
    const tchi_named outputs[] = {{norms, "norms"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 2);
}

tch_status tch_grad_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                          const tch_tensor *output_gradient, tch_grad_part parts, int32_t accumulate, tch_tensor *norms)
{
    TCHI_ENTER_FOR(context, "tch_grad_norms", sample);
    TCHI_TRY(check_call(context, layer, input, output_gradient, parts, norms));
    int64_t samples = input->shape[0];
    double *numbers = tchi_tensor_data(norms);
    if (samples == 0) {
        return TCH_OK;
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return parts & TCH_GRAD_WEIGHT
                   ? tchi_embedding_norms(context, layer, input, output_gradient, accumulate, numbers)
                   : tchi_clear_numbers(context, accumulate, numbers, samples);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_norms(context, layer, input, output_gradient, parts, accumulate, numbers);
    }
    norms_call c = {layer, tchi_input_side(layer, input), tchi_gradient_side(layer, output_gradient), parts, numbers};
    return product_norms(context, &c, accumulate);
}

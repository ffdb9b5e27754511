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
#include "walk.h"

typedef struct norms_call {
    const tch_layer *layer;
    tchi_side inputs, gradients;
    tch_grad_part parts;
    int32_t accumulate;
    double *norms;
    /* of a chunk */
    tch_matrices a, g;
    tch_matrices sums; /* of output gradients over positions, where they are taken: the bias's gradients */
    void *scratch;     /* of whichever operation is under way */
} norms_call;

static int64_t norms_scratch(tch_context *context, const norms_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    const tchi_side *g = &c->gradients;
    void *state = context->state;
    int64_t batch = count * g->groups;
    int64_t bytes = 0;
    if (c->parts & TCH_GRAD_WEIGHT) {
        bytes = t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_NORMS, g->type, g->positions, c->inputs.cols, batch,
                                         g->cols);
    }
    if (c->parts & TCH_GRAD_BIAS) {
        int64_t sums =
            t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_SUMS, g->type, g->positions, g->cols, batch, 0);
        int64_t dots =
            t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, tchi_compute_type(g->type), 1, g->cols, batch, 0);
        bytes = tchi_max(bytes, tchi_max(sums, dots));
    }
    return bytes;
}

static void norms_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    norms_call *c = call;
    const tchi_side *g = &c->gradients;
    c->g = tchi_side_place(g, arena, first, count, TCHI_APART);
    if (c->parts & TCH_GRAD_WEIGHT) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_APART);
    }
    if (c->parts & TCH_GRAD_BIAS) {
        c->sums = tchi_scratch_matrices(arena, tchi_compute_type(g->type), count * g->groups, 1, g->cols);
    }
    c->scratch = tchi_arena_take(arena, norms_scratch(context, c, count));
}

static tch_status clear_norms(tch_context *context, void *call)
{
    norms_call *c = call;
    return tchi_clear_numbers(context, c->accumulate, c->norms, c->gradients.samples);
}

static tch_status norms_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    (void)count;
    norms_call *c = call;
    const tch_backend *t = context->backend;
    double square = c->layer->scale * c->layer->scale;
    double *norms = c->norms + first;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->parts & TCH_GRAD_WEIGHT) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        return t->sample->sample_norms(context->state, &c->a, &c->g, c->gradients.groups, square, c->layer->rounded,
                                       c->parts & TCH_GRAD_BIAS ? &c->sums : NULL, norms, c->scratch);
    }
    tch_matrices rows = tchi_tall(&c->sums);
    TCHI_TRY(t->sample->sample_sums(context->state, &c->g, 1.0, 0.0, &rows, c->scratch));
    return t->sample->pair_dots(context->state, &c->sums, &c->sums, c->gradients.groups, square, norms, c->scratch);
}

/* Scratch counts for all samples at once: how much a sample takes of it depends on their number. */
static int64_t norms_chunk(tch_context *context, norms_call *c)
{
    const tchi_side *g = &c->gradients;
    tchi_arena one = {0};
    norms_layout(c, &one, context, 0, 1);
    return tchi_chunk_samples(context, g->samples, g->positions, one.used - norms_scratch(context, c, 1),
                              norms_scratch(context, c, g->samples));
}

static tch_status check_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
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
    TCHI_TRY(check_norms(context, layer, input, output_gradient, parts, norms));
    int64_t samples = input->shape[0];
    double *numbers = tchi_tensor_data(norms);
    if (samples == 0) {
        return TCH_OK;
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return parts & TCH_GRAD_WEIGHT
                   ? tchi_embedding_dots(context, layer, input, output_gradient, NULL, accumulate, numbers)
                   : tchi_clear_numbers(context, accumulate, numbers, samples);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_norms(context, layer, input, output_gradient, parts, accumulate, numbers);
    }
    norms_call c = {.layer = layer, .parts = parts, .accumulate = accumulate, .norms = numbers};
    c.inputs = tchi_input_side(layer, input);
    c.gradients = tchi_gradient_side(layer, output_gradient);
    if (c.gradients.positions == 0) {
        return tchi_clear_numbers(context, accumulate, numbers, samples);
    }
    const tchi_walk walk = {.samples = samples,
                            .chunk = norms_chunk(context, &c),
                            .layout = norms_layout,
                            .begin = clear_norms,
                            .part = norms_part};
    return tchi_walk_samples(context, &walk, &c);
}

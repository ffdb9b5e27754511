/* tch_grad_dots: the inner product of each sample's gradient with one direction. In one group and without half types it
 * is the sum over positions of <g, V a>, and the gradient is never formed; otherwise the gradients of a chunk of
 * samples are. */
#include <torchium/grad.h>

#include "core/check.h"
#include "core/status.h"

#include "core/arith.h"
#include "kinds.h"
#include "layer.h"
#include "linalg/batch.h"
#include "parameters.h"
#include "positions.h"

typedef struct dots_call {
    const tch_layer *layer;
    tchi_side a, g;
    tchi_parameter weight, bias; /* the direction */
    bool has_weight, has_bias;
    bool formed;
    tch_scalar type; /* of the direction, and of sums */
    double *dots;
} dots_call;

/* The direction comes first: its place does not depend on the number of samples. */
typedef struct dots_buffers {
    tch_matrices weight, bias;
    tch_matrices a, g;
    tch_matrices product; /* A V', or the gradients */
    tch_matrices sums;
    void *scratch;
} dots_buffers;

static int64_t scratch_of(tch_context *context, const dots_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    int64_t p = c->g.groups * c->g.cols;
    int64_t bytes = 0;
    if (c->has_weight && c->formed) {
        bytes = t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, c->type, 1, p * c->a.cols, count, 0);
    } else if (c->has_weight) {
        bytes = t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, c->type, c->g.positions, p, count, 0);
    }
    if (c->has_bias) {
        int64_t over_positions = t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_SUMS, c->g.type, c->g.positions,
                                                          c->g.cols, count * c->g.groups, 0);
        bytes = tchi_max(bytes, over_positions);
        bytes = tchi_max(bytes, t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, c->type, 1, p, count, 0));
    }
    return bytes;
}

static void layout(dots_buffers *b, tchi_arena *arena, tch_context *context, const dots_call *c, int64_t first,
                   int64_t count)
{
    if (c->has_weight) {
        b->weight = tchi_parameter_place(&c->weight, arena, c->type, 0, 1);
    }
    if (c->has_bias) {
        b->bias = tchi_parameter_place(&c->bias, arena, c->type, 0, 1);
        b->sums = tchi_scratch_matrices(arena, c->type, count * c->g.groups, 1, c->g.cols);
    }
    b->g = tchi_side_place(&c->g, arena, first, count, TCHI_APART);
    if (c->has_weight) {
        b->a = tchi_side_place(&c->a, arena, first, count, c->formed ? TCHI_APART : TCHI_TALL);
        b->product = tchi_scratch_matrices(arena, c->type, count * c->g.groups, c->formed ? c->g.cols : c->g.positions,
                                           c->formed ? c->a.cols : c->g.cols);
    }
    b->scratch = tchi_arena_take(arena, scratch_of(context, c, count));
}

/* --- one chunk --------------------------------------------------------------------------------------------------- */

/* dots[i] += scale times the inner product of row i of `x` with the one direction. */
static tch_status dot_rows(tch_context *context, const dots_call *c, const tch_matrices *x,
                           const tch_matrices *direction, double *dots, void *scratch)
{
    tch_matrices rows = tchi_matrices_new(x->data, x->type, x->rows, 1, x->cols);
    tch_matrices repeated = tchi_matrices_new(direction->data, direction->type, x->rows, 1, x->cols);
    repeated.stride = 0;
    return context->backend->sample->pair_dots(context->state, &rows, &repeated, 1, c->layer->scale, dots, scratch);
}

static tch_status weight_dots(tch_context *context, const dots_call *c, const dots_buffers *b, int64_t count,
                              double *dots)
{
    const tch_backend *t = context->backend;
    if (c->formed) {
        tch_matrices rows = tchi_flat(&b->product, count);
        TCHI_TRY(t->matrix->gemm(context->state, 1.0, &b->g, 1, &b->a, 0, 0.0, &b->product));
        return dot_rows(context, c, &rows, &b->weight, dots, b->scratch);
    }
    tch_matrices tall_a = tchi_tall(&b->a);
    tch_matrices tall = tchi_tall(&b->product);
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &tall_a, 0, &b->weight, 1, 0.0, &tall));
    return t->sample->pair_dots(context->state, &b->product, &b->g, 1, c->layer->scale, dots, b->scratch);
}

static tch_status bias_dots(tch_context *context, const dots_call *c, const dots_buffers *b, int64_t count,
                            double *dots)
{
    tch_matrices tall = tchi_tall(&b->sums);
    tch_matrices rows = tchi_flat(&b->sums, count);
    TCHI_TRY(context->backend->sample->sample_sums(context->state, &b->g, 1.0, 0.0, &tall, b->scratch));
    return dot_rows(context, c, &rows, &b->bias, dots, b->scratch);
}

static tch_status dots_part(tch_context *context, const dots_call *c, const dots_buffers *b, int64_t first,
                            int64_t count)
{
    double *dots = c->dots + first;
    TCHI_TRY(tchi_side_read(context, &c->g, first, &b->g));
    if (c->has_weight) {
        TCHI_TRY(tchi_side_read(context, &c->a, first, &b->a));
        TCHI_TRY(weight_dots(context, c, b, count, dots));
    }
    return c->has_bias ? bias_dots(context, c, b, count, dots) : TCH_OK;
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

static int64_t choose_chunk(tch_context *context, const dots_call *c)
{
    dots_buffers probe;
    tchi_arena none = {0};
    tchi_arena one = {0};
    layout(&probe, &none, context, c, 0, 0);
    layout(&probe, &one, context, c, 0, 1);
    int64_t fixed = none.used + scratch_of(context, c, c->g.samples);
    return tchi_chunk_samples(context, c->g.samples, c->g.positions, one.used - none.used, fixed);
}

static tch_status read_direction(tch_context *context, const dots_call *c, const dots_buffers *b)
{
    if (c->has_weight) {
        TCHI_TRY(tchi_parameter_read(context, &c->weight, 0, &b->weight));
    }
    return c->has_bias ? tchi_parameter_read(context, &c->bias, 0, &b->bias) : TCH_OK;
}

static tch_status product_dots(tch_context *context, const dots_call *c, int32_t accumulate)
{
    dots_buffers b;
    tchi_arena arena = {0};
    int64_t samples = c->g.samples;
    if (c->g.positions == 0) {
        return tchi_clear_numbers(context, accumulate, c->dots, samples);
    }
    int64_t chunk = choose_chunk(context, c);
    layout(&b, &arena, context, c, 0, chunk);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    void *base = arena.base;
    layout(&b, &arena, context, c, 0, chunk);
    TCHI_TRY(tchi_clear_numbers(context, accumulate, c->dots, samples));
    TCHI_TRY(read_direction(context, c, &b));
    for (int64_t first = 0; first < samples; first += chunk) {
        int64_t count = samples - first < chunk ? samples - first : chunk;
        tchi_arena again = {.base = base};
        layout(&b, &again, context, c, first, count);
        TCHI_TRY(dots_part(context, c, &b, first, count));
    }
    return TCH_OK;
}

static tch_status check_call(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                             const tch_tensor *dots)
{
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parameters(context, layer, input, output_gradient, -1, false, weight, bias));
    TCHI_TRY(tchi_check_numbers(context, dots, "dots", input->shape[0]));
    const tchi_named inputs[] = {
        {input, "input"}, {output_gradient, "output_gradient"}, {weight, "weight"}, {bias, "bias"}};
    const tchi_named outputs[] = {{dots, "dots"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 4);
}

static dots_call call_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *output_gradient,
                         const tch_tensor *weight, const tch_tensor *bias, double *dots)
{
    dots_call c = {.layer = layer, .dots = dots};
    c.a = tchi_input_side(layer, input);
    c.g = tchi_gradient_side(layer, output_gradient);
    c.type = tchi_compute_type(c.g.type);
    c.formed = c.g.groups > 1 || c.type != c.g.type;
    c.has_weight = weight != NULL;
    c.has_bias = bias != NULL;
    if (c.has_weight) {
        c.weight = tchi_parameter_of(weight, false, c.g.groups, c.g.cols, c.a.cols);
    }
    if (c.has_bias) {
        c.bias = tchi_parameter_of(bias, false, c.g.groups, 1, c.g.cols);
    }
    return c;
}

tch_status tch_grad_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                         const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                         int32_t accumulate, tch_tensor *dots)
{
    TCHI_ENTER_FOR(context, "tch_grad_dots", sample);
    TCHI_TRY(check_call(context, layer, input, output_gradient, weight, bias, dots));
    int64_t samples = input->shape[0];
    double *numbers = tchi_tensor_data(dots);
    if (samples == 0) {
        return TCH_OK;
    }
    if (weight == NULL && bias == NULL) {
        return tchi_clear_numbers(context, accumulate, numbers, samples);
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return tchi_embedding_dots(context, layer, input, output_gradient, weight, accumulate, numbers);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_dots(context, layer, input, output_gradient, weight, bias, accumulate, numbers);
    }
    dots_call c = call_of(layer, input, output_gradient, weight, bias, numbers);
    return product_dots(context, &c, accumulate);
}

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
#include "sample_rows.h"
#include "walk.h"

typedef struct dots_call {
    const tch_layer *layer;
    tchi_side inputs, gradients;
    tchi_parameter weight, bias; /* the direction */
    bool formed;
    tch_scalar type; /* of the direction, and of sums */
    int32_t accumulate;
    double *dots;
    /* of a chunk; the direction's place does not depend on the number of samples */
    tch_matrices of_weight, of_bias;
    tch_matrices a, g;
    tch_matrices product; /* A V', or the gradients */
    tch_matrices sums;
    void *scratch;
} dots_call;

static int64_t dots_scratch(tch_context *context, const dots_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    const tchi_side *g = &c->gradients;
    int64_t p = g->groups * g->cols;
    int64_t bytes = 0;
    if (c->weight.given) {
        bytes = t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, c->type, c->formed ? 1 : g->positions,
                                         c->formed ? p * c->inputs.cols : p, count, 0);
    }
    if (c->bias.given) {
        int64_t sums = t->device->scratch_bytes(state, TCH_SCRATCH_SAMPLE_SUMS, g->type, g->positions, g->cols,
                                                count * g->groups, 0);
        int64_t dots = t->device->scratch_bytes(state, TCH_SCRATCH_PAIR_DOTS, c->type, 1, p, count, 0);
        bytes = tchi_max(bytes, tchi_max(sums, dots));
    }
    return bytes;
}

static void dots_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    dots_call *c = call;
    const tchi_side *g = &c->gradients;
    c->of_weight = tchi_parameter_place(&c->weight, arena, c->type, 0, 1);
    c->of_bias = tchi_parameter_place(&c->bias, arena, c->type, 0, 1);
    if (c->bias.given) {
        c->sums = tchi_scratch_matrices(arena, c->type, count * g->groups, 1, g->cols);
    }
    c->g = tchi_side_place(g, arena, first, count, TCHI_APART);
    if (c->weight.given) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, c->formed ? TCHI_APART : TCHI_TALL);
        c->product = tchi_scratch_matrices(arena, c->type, count * g->groups, c->formed ? g->cols : g->positions,
                                           c->formed ? c->inputs.cols : g->cols);
    }
    c->scratch = tchi_arena_take(arena, dots_scratch(context, c, count));
}

static tch_status begin_dots(tch_context *context, void *call)
{
    dots_call *c = call;
    TCHI_TRY(tchi_clear_numbers(context, c->accumulate, c->dots, c->gradients.samples));
    TCHI_TRY(tchi_parameter_read(context, &c->weight, 0, &c->of_weight));
    return tchi_parameter_read(context, &c->bias, 0, &c->of_bias);
}

static tch_status weight_dots(tch_context *context, const dots_call *c, int64_t count, double *dots)
{
    const tch_backend *t = context->backend;
    if (c->formed) {
        tch_matrices rows = tchi_flat(&c->product, count);
        TCHI_TRY(t->matrix->gemm(context->state, 1.0, &c->g, 1, &c->a, 0, 0.0, 0, &c->product));
        return tchi_rows_dots(context, &rows, &c->of_weight, c->layer->scale, dots, c->scratch);
    }
    tch_matrices tall_a = tchi_tall(&c->a);
    tch_matrices tall = tchi_tall(&c->product);
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &tall_a, 0, &c->of_weight, 1, 0.0, 0, &tall));
    return t->sample->pair_dots(context->state, &c->product, &c->g, 1, c->layer->scale, dots, c->scratch);
}

static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    dots_call *c = call;
    double *dots = c->dots + first;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->weight.given) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        TCHI_TRY(weight_dots(context, c, count, dots));
    }
    if (!c->bias.given) {
        return TCH_OK;
    }
    tch_matrices tall = tchi_tall(&c->sums);
    tch_matrices rows = tchi_flat(&c->sums, count);
    TCHI_TRY(context->backend->sample->sample_sums(context->state, &c->g, 1.0, 0.0, &tall, c->scratch));
    return tchi_rows_dots(context, &rows, &c->of_bias, c->layer->scale, dots, c->scratch);
}

static tch_status check_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
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

tch_status tch_grad_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                         const tch_tensor *output_gradient, const tch_tensor *weight, const tch_tensor *bias,
                         int32_t accumulate, tch_tensor *dots)
{
    TCHI_ENTER_FOR(context, "tch_grad_dots", sample);
    TCHI_TRY(check_dots(context, layer, input, output_gradient, weight, bias, dots));
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
    dots_call c = {.layer = layer, .accumulate = accumulate, .dots = numbers};
    c.inputs = tchi_input_side(layer, input);
    c.gradients = tchi_gradient_side(layer, output_gradient);
    if (c.gradients.positions == 0) {
        return tchi_clear_numbers(context, accumulate, numbers, samples);
    }
    c.type = tchi_compute_type(c.gradients.type);
    c.formed = c.gradients.groups > 1 || c.type != c.gradients.type;
    c.weight = tchi_parameter_of(weight, false, c.gradients.groups, c.gradients.cols, c.inputs.cols);
    c.bias = tchi_parameter_of(bias, false, c.gradients.groups, 1, c.gradients.cols);
    const tchi_walk walk = {.samples = samples,
                            .positions = c.gradients.positions,
                            .bytes_beside = dots_scratch(context, &c, samples),
                            .layout = dots_layout,
                            .begin = begin_dots,
                            .part = dots_part};
    return tchi_walk_samples(context, &walk, &c);
}

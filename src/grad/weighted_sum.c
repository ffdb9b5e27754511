/* tch_grad_weighted_sum: for linear layers and convolutions in one group a single tall product over the positions of
 * all samples, the output gradients weighed before; with several groups, whose gradients are small, the gradients of a
 * chunk of samples are formed, weighed and summed. Sums are kept from chunk to chunk in float32 at least.
 *
 * A weight of 0 must leave its sample out whatever it holds, and 0 times NaN is NaN: so both operands of the tall
 * product are zeroed there, which costs a pass over the inputs. */
#include <torchium/grad.h>

#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "core/arith.h"
#include "kinds.h"
#include "layer.h"
#include "linalg/batch.h"
#include "parameters.h"
#include "positions.h"

typedef struct sum_call {
    const tch_layer *layer;
    tchi_side a, g;
    tchi_parameter weight, bias;
    bool has_weight, has_bias;
    const double *weights; /* or NULL */
    double beta;
    tch_scalar type;    /* of sums */
    tch_scalar weighed; /* of operands after weighing */
} sum_call;

/* The sums come first: their places do not depend on the number of samples. */
typedef struct sum_buffers {
    tch_matrices weight, bias;
    tch_matrices a, g;
    tch_matrices weighed_a, weighed_g;
    tch_matrices formed; /* gradients of samples, for several groups */
    tch_matrices sums;   /* of output gradients over positions */
    void *scratch;
} sum_buffers;

/* float16 has too little range for a small weight times a small gradient; bfloat16 has all of it, and rounding again
 * costs no more than rounding the first time did. */
static tch_scalar weighed_type(tch_scalar type)
{
    return type == TCH_SCALAR_F16 ? TCH_SCALAR_F32 : type;
}

static int64_t scratch_of(tch_context *context, const sum_call *c, int64_t count)
{
    const tch_backend *t = context->backend;
    int64_t p = c->g.groups * c->g.cols;
    int64_t bytes = 0;
    if (c->has_weight && c->g.groups > 1) {
        bytes = t->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, c->type, count, p * c->a.cols, 1, 0);
    }
    if (c->has_bias) {
        int64_t over_positions = t->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, c->g.type,
                                                          c->g.positions, c->g.cols, count * c->g.groups, 0);
        bytes = tchi_max(bytes, over_positions);
        bytes =
            tchi_max(bytes, t->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, c->type, count, p, 1, 0));
    }
    return bytes;
}

/* Where a side is weighed: in the scratch it was read into, or in scratch of its own. */
static tch_matrices place_weighed(const sum_call *c, const tchi_side *side, tchi_arena *arena, int64_t count,
                                  const tch_matrices *read)
{
    if (!tchi_side_in_place(side, TCHI_TALL) && c->weighed == side->type) {
        return *read;
    }
    return tchi_scratch_matrices(arena, c->weighed, count * side->groups, side->positions, side->cols);
}

static void operands_layout(sum_buffers *s, tchi_arena *arena, const sum_call *c, int64_t first, int64_t count)
{
    if (c->g.groups > 1) {
        s->a = tchi_side_place(&c->a, arena, first, count, TCHI_APART);
        s->formed = tchi_scratch_matrices(arena, c->type, count * c->g.groups, c->g.cols, c->a.cols);
        return;
    }
    s->a = tchi_side_place(&c->a, arena, first, count, TCHI_TALL);
    if (c->weights != NULL) {
        s->weighed_a = place_weighed(c, &c->a, arena, count, &s->a);
        s->weighed_g = place_weighed(c, &c->g, arena, count, &s->g);
    }
}

static void layout(sum_buffers *s, tchi_arena *arena, tch_context *context, const sum_call *c, int64_t first,
                   int64_t count)
{
    if (c->has_weight) {
        s->weight = tchi_parameter_place(&c->weight, arena, c->type, 0, 1);
    }
    if (c->has_bias) {
        s->bias = tchi_parameter_place(&c->bias, arena, c->type, 0, 1);
        s->sums = tchi_scratch_matrices(arena, c->type, count * c->g.groups, 1, c->g.cols);
    }
    s->g = tchi_side_place(&c->g, arena, first, count, c->g.groups > 1 ? TCHI_APART : TCHI_TALL);
    if (c->has_weight) {
        operands_layout(s, arena, c, first, count);
    }
    s->scratch = tchi_arena_take(arena, scratch_of(context, c, count));
}

/* --- one chunk --------------------------------------------------------------------------------------------------- */

/* Rows of `x`, one for each sample, weighed and added up: out = beta out + scale times their sum. */
static tch_status add_rows(tch_context *context, const sum_call *c, const tch_matrices *x, const double *weights,
                           double beta, const tch_matrices *out, void *scratch)
{
    const tch_backend *t = context->backend;
    if (weights != NULL) {
        tch_matrices rows = tchi_matrices_new(x->data, x->type, x->rows, 1, x->cols);
        TCHI_TRY(t->sample->weigh_samples(context->state, &rows, 1, weights, 0, &rows));
    }
    return t->sample->sample_sums(context->state, x, c->layer->scale, beta, out, scratch);
}

static tch_status add_formed(tch_context *context, const sum_call *c, const sum_buffers *s, int64_t count,
                             const double *weights, double beta)
{
    tch_matrices rows = tchi_flat(&s->formed, count);
    tch_matrices out = tchi_flat(&s->weight, 1);
    TCHI_TRY(context->backend->matrix->gemm(context->state, 1.0, &s->g, 1, &s->a, 0, 0.0, &s->formed));
    return add_rows(context, c, &rows, weights, beta, &out, s->scratch);
}

static tch_status add_tall(tch_context *context, const sum_call *c, const sum_buffers *s, const double *weights,
                           double beta)
{
    const tch_backend *t = context->backend;
    const tch_matrices *a = &s->a;
    const tch_matrices *g = &s->g;
    if (weights != NULL) {
        TCHI_TRY(t->sample->weigh_samples(context->state, a, 1, weights, 1, &s->weighed_a));
        TCHI_TRY(t->sample->weigh_samples(context->state, g, 1, weights, 0, &s->weighed_g));
        a = &s->weighed_a;
        g = &s->weighed_g;
    }
    tch_matrices tall_a = tchi_tall(a);
    tch_matrices tall_g = tchi_tall(g);
    return t->matrix->gemm(context->state, c->layer->scale, &tall_g, 1, &tall_a, 0, beta, &s->weight);
}

/* Sums over positions come before anything is weighed in place. */
static tch_status add_bias(tch_context *context, const sum_call *c, const sum_buffers *s, int64_t count,
                           const double *weights, double beta)
{
    tch_matrices rows = tchi_tall(&s->sums);
    tch_matrices by_sample = tchi_flat(&s->sums, count);
    tch_matrices out = tchi_flat(&s->bias, 1);
    TCHI_TRY(context->backend->sample->sample_sums(context->state, &s->g, 1.0, 0.0, &rows, s->scratch));
    return add_rows(context, c, &by_sample, weights, beta, &out, s->scratch);
}

static tch_status add_part(tch_context *context, const sum_call *c, const sum_buffers *s, int64_t first, int64_t count)
{
    double beta = first == 0 ? c->beta : 1.0;
    const double *weights = c->weights == NULL ? NULL : c->weights + first;
    TCHI_TRY(tchi_side_read(context, &c->g, first, &s->g));
    if (c->has_bias) {
        TCHI_TRY(add_bias(context, c, s, count, weights, beta));
    }
    if (!c->has_weight) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_side_read(context, &c->a, first, &s->a));
    return c->g.groups > 1 ? add_formed(context, c, s, count, weights, beta) : add_tall(context, c, s, weights, beta);
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

static tch_status multiply_by(tch_context *context, double beta, const tch_matrices *x)
{
    return context->backend->matrix->combine(context->state, 0.0, beta, beta == 0.0 ? NULL : x, 0.0, NULL, x);
}

static tch_status read_sums(tch_context *context, const sum_call *c, const sum_buffers *s)
{
    if (c->has_weight && c->beta != 0.0) {
        TCHI_TRY(tchi_parameter_read(context, &c->weight, 0, &s->weight));
    }
    return c->has_bias && c->beta != 0.0 ? tchi_parameter_read(context, &c->bias, 0, &s->bias) : TCH_OK;
}

static tch_status write_sums(tch_context *context, const sum_call *c, const sum_buffers *s)
{
    if (c->has_weight) {
        TCHI_TRY(tchi_parameter_write(context, &c->weight, 0, &s->weight));
    }
    return c->has_bias ? tchi_parameter_write(context, &c->bias, 0, &s->bias) : TCH_OK;
}

/* Nothing to add: what is there is multiplied by beta. */
static tch_status add_nothing(tch_context *context, const sum_call *c, const sum_buffers *s)
{
    if (c->has_weight) {
        TCHI_TRY(multiply_by(context, c->beta, &s->weight));
    }
    return c->has_bias ? multiply_by(context, c->beta, &s->bias) : TCH_OK;
}

static int64_t choose_chunk(tch_context *context, const sum_call *c)
{
    sum_buffers probe;
    tchi_arena none = {0};
    tchi_arena one = {0};
    layout(&probe, &none, context, c, 0, 0);
    layout(&probe, &one, context, c, 0, 1);
    int64_t fixed = none.used + scratch_of(context, c, c->g.samples);
    return tchi_chunk_samples(context, c->g.samples, c->g.positions, one.used - none.used, fixed);
}

static tch_status product_sum(tch_context *context, const sum_call *c)
{
    sum_buffers s;
    tchi_arena arena = {0};
    int64_t samples = c->g.positions == 0 ? 0 : c->g.samples;
    int64_t chunk = samples == 0 ? 0 : choose_chunk(context, c);
    layout(&s, &arena, context, c, 0, chunk);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    void *base = arena.base;
    layout(&s, &arena, context, c, 0, chunk);
    TCHI_TRY(read_sums(context, c, &s));
    if (samples == 0) {
        TCHI_TRY(add_nothing(context, c, &s));
    }
    for (int64_t first = 0; first < samples; first += chunk) {
        int64_t count = samples - first < chunk ? samples - first : chunk;
        tchi_arena again = {.base = base};
        layout(&s, &again, context, c, first, count);
        TCHI_TRY(add_part(context, c, &s, first, count));
    }
    return write_sums(context, c, &s);
}

static tch_status check_call(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, const tch_tensor *weights, double beta,
                             const tch_tensor *weight, const tch_tensor *bias)
{
    TCHI_TRY(tchi_check_layer_call(context, layer, input, output_gradient));
    TCHI_TRY(tchi_check_parameters(context, layer, input, output_gradient, -1, true, weight, bias));
    if (weights != NULL) {
        TCHI_TRY(tchi_check_numbers(context, weights, "weights", input->shape[0]));
    }
    if (!isfinite(beta)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "beta is %g, expected a finite number", beta);
    }
    const tchi_named inputs[] = {{input, "input"}, {output_gradient, "output_gradient"}, {weights, "weights"}};
    const tchi_named outputs[] = {{weight, "weight"}, {bias, "bias"}};
    return tchi_check_all_disjoint(outputs, 2, inputs, 3);
}

tch_status tch_grad_weighted_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *output_gradient, const tch_tensor *weights, double beta,
                                 tch_tensor *weight, tch_tensor *bias)
{
    TCHI_ENTER_FOR(context, "tch_grad_weighted_sum", sample);
    TCHI_TRY(check_call(context, layer, input, output_gradient, weights, beta, weight, bias));
    const double *numbers = weights == NULL ? NULL : tchi_tensor_data(weights);
    if (weight == NULL && bias == NULL) {
        return TCH_OK;
    }
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        return tchi_embedding_sum(context, layer, input, output_gradient, numbers, beta, weight);
    }
    if (!tchi_layer_is_product(layer->kind)) {
        return tchi_normalizing_sum(context, layer, input, output_gradient, numbers, beta, weight, bias);
    }
    sum_call c = {.layer = layer, .weights = numbers, .beta = beta};
    c.a = tchi_input_side(layer, input);
    c.g = tchi_gradient_side(layer, output_gradient);
    c.type = tchi_compute_type(c.g.type);
    c.weighed = weighed_type(c.g.type);
    c.has_weight = weight != NULL;
    c.has_bias = bias != NULL;
    if (c.has_weight) {
        c.weight = tchi_parameter_of(weight, false, c.g.groups, c.g.cols, c.a.cols);
    }
    if (c.has_bias) {
        c.bias = tchi_parameter_of(bias, false, c.g.groups, 1, c.g.cols);
    }
    return product_sum(context, &c);
}

/* Linear layers and convolutions. A sample's gradient is one product per group, G' A of output gradients and inputs,
 * and for the bias the sum of output gradients over positions. Products are formed if requested, or if that is cheaper:
 *
 *   norms           by the table's sample_norms, without gradients
 *   inner products  for one group without half precision: the sum over positions of <g, V a>
 *   sums            for one group: a tall product over the positions of all samples, with weighted output gradients;
 *                   gradients of several groups are small, and are formed, weighted and summed
 *
 * Results are accumulated by part and chunk, sums in at least float32. */
#include "call.h"

#include "core/arith.h"
#include "core/status.h"
#include "linalg/batch.h"

#include "positions.h"
#include "tensor_rows.h"
#include "walk.h"

typedef struct product_call {
    const tchi_grad_call *call;
    tchi_side inputs, gradients;
    tchi_parameter weight, bias;
    bool formed;        /* inner products of materialized gradients */
    tch_scalar type;    /* of sums */
    tch_scalar weighed; /* of operands after weighing */
    /* of a chunk; offsets of directions and sums do not depend on the number of samples */
    tch_matrices of_weight, of_bias;
    tch_matrices a, g;
    tch_matrices weighed_a, weighed_g;
    tch_matrices product; /* gradients, or A V' */
    tch_matrices sums;    /* of output gradients over positions */
    void *scratch;        /* of the current operation */
} product_call;

static product_call call_for(const tchi_grad_call *call, bool per_sample)
{
    product_call c = {.call = call,
                      .inputs = tchi_input_side(call->layer, call->input),
                      .gradients = tchi_gradient_side(call->layer, call->gradient)};
    const tchi_side *g = &c.gradients;
    c.type = tchi_compute_type(g->type);
    c.weight = tchi_parameter_of(call->weight, per_sample, g->groups, g->cols, c.inputs.cols);
    c.bias = tchi_parameter_of(call->bias, per_sample, g->groups, 1, g->cols);
    return c;
}

static bool has(const product_call *c, tch_grad_part part)
{
    return (c->call->parts & part) != 0;
}

static int64_t scratch_for(const tch_context *context, tch_scratch_for what, tch_scalar type, int64_t rows,
                           int64_t cols, int64_t batch)
{
    return context->backend->device->scratch_bytes(context->state, what, type, rows, cols, batch, 0);
}

/* For sum_positions. */
static int64_t positions_scratch(const tch_context *context, const product_call *c, int64_t count)
{
    const tchi_side *g = &c->gradients;
    return scratch_for(context, TCH_SCRATCH_SAMPLE_SUMS, g->type, g->positions, g->cols, count * g->groups);
}

static tch_matrices place_sums(const product_call *c, tchi_arena *arena, int64_t count)
{
    return tchi_scratch_matrices(arena, c->type, count * c->gradients.groups, 1, c->gradients.cols);
}

/* A row of `sums` per sample and group. */
static tch_status sum_positions(tch_context *context, const product_call *c, double scale, const tch_matrices *sums)
{
    tch_matrices rows = tchi_tall(sums);
    return context->backend->sample->sample_sums(context->state, &c->g, scale, 0.0, &rows, c->scratch);
}

static tch_status form_products(tch_context *context, const product_call *c, double scale, const tch_matrices *out)
{
    return context->backend->matrix->gemm(context->state, scale, &c->g, 1, &c->a, 0, 0.0, 0, out);
}

static tch_status clear_numbers(tch_context *context, const product_call *c)
{
    return tchi_clear_numbers(context, c->call->accumulate, c->call->numbers, c->gradients.samples);
}

/* Clears numbers; reads directions and sums. */
static tch_status begin_products(tch_context *context, void *call)
{
    const product_call *c = call;
    if (c->call->numbers != NULL) {
        TCHI_TRY(clear_numbers(context, c));
    } else if (c->call->beta == 0.0) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_parameter_read(context, &c->weight, 0, &c->of_weight));
    return tchi_parameter_read(context, &c->bias, 0, &c->of_bias);
}

/* --- gradients of samples ---------------------------------------------------------------------------------------- */

/* Sums for a bias are at least float32, whatever the result's type. */
static void samples_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    product_call *c = call;
    c->g = tchi_side_place(&c->gradients, arena, first, count, TCHI_APART);
    if (c->weight.given) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_APART);
        c->of_weight = tchi_parameter_place(&c->weight, arena, c->weight.type, first, count);
    }
    if (c->bias.given) {
        c->of_bias = tchi_parameter_place(&c->bias, arena, tchi_compute_type(c->bias.type), first, count);
        c->scratch = tchi_arena_take(arena, positions_scratch(context, c, count));
    }
}

static tch_status samples_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    product_call *c = call;
    double scale = c->call->layer->scale;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->weight.given) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        TCHI_TRY(form_products(context, c, scale, &c->of_weight));
        TCHI_TRY(tchi_parameter_write(context, &c->weight, first, &c->of_weight));
    }
    if (c->bias.given) {
        TCHI_TRY(sum_positions(context, c, scale, &c->of_bias));
        TCHI_TRY(tchi_parameter_write(context, &c->bias, first, &c->of_bias));
    }
    return TCH_OK;
}

static tch_status fill_zeros(tch_context *context, const tch_tensor *tensor)
{
    int64_t strides[TCH_MAX_RANK];
    if (tensor == NULL) {
        return TCH_OK;
    }
    tch_array array = tchi_array_of(tensor, strides);
    return context->backend->matrix->fill(context->state, &array, 0.0);
}

tch_status tchi_product_samples(tch_context *context, const tchi_grad_call *call)
{
    product_call c = call_for(call, true);
    const tchi_walk walk = {.samples = c.gradients.samples,
                            .positions = c.gradients.positions,
                            .layout = samples_layout,
                            .part = samples_part};
    if (walk.samples == 0 || walk.positions == 0) {
        TCHI_TRY(fill_zeros(context, call->weight));
        return fill_zeros(context, call->bias);
    }
    return tchi_walk_samples(context, &walk, &c);
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

static int64_t norms_scratch(tch_context *context, const product_call *c, int64_t count)
{
    const tchi_side *g = &c->gradients;
    int64_t batch = count * g->groups;
    int64_t bytes = 0;
    if (has(c, TCH_GRAD_WEIGHT)) {
        bytes = context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_NORMS, g->type, g->positions,
                                                        c->inputs.cols, batch, g->cols);
    }
    if (has(c, TCH_GRAD_BIAS)) {
        bytes = tchi_max(bytes, positions_scratch(context, c, count));
        bytes = tchi_max(bytes, scratch_for(context, TCH_SCRATCH_PAIR_DOTS, c->type, 1, g->cols, batch));
    }
    return bytes;
}

static void norms_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    product_call *c = call;
    c->g = tchi_side_place(&c->gradients, arena, first, count, TCHI_APART);
    if (has(c, TCH_GRAD_WEIGHT)) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_APART);
    }
    if (has(c, TCH_GRAD_BIAS)) {
        c->sums = place_sums(c, arena, count);
    }
    c->scratch = tchi_arena_take(arena, norms_scratch(context, c, count));
}

static tch_status norms_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    product_call *c = call;
    const tch_sample_ops *t = context->backend->sample;
    const tch_layer *layer = c->call->layer;
    double square = layer->scale * layer->scale;
    double *norms = c->call->numbers + first;
    int64_t groups = c->gradients.groups;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (has(c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        return t->sample_norms(context->state, &c->a, &c->g, groups, square, layer->rounded,
                               has(c, TCH_GRAD_BIAS) ? &c->sums : NULL, norms, c->scratch);
    }
    TCHI_TRY(sum_positions(context, c, 1.0, &c->sums));
    return t->pair_dots(context->state, &c->sums, &c->sums, groups, square, norms, c->scratch);
}

/* Measured for all samples at once: scratch per sample depends on their number. */
tch_status tchi_product_norms(tch_context *context, const tchi_grad_call *call)
{
    product_call c = call_for(call, false);
    const tchi_side *g = &c.gradients;
    tchi_arena one = {0};
    if (g->positions == 0) {
        return clear_numbers(context, &c);
    }
    norms_layout(&c, &one, context, 0, 1);
    int64_t each = one.used - norms_scratch(context, &c, 1);
    int64_t fixed = norms_scratch(context, &c, g->samples);
    const tchi_walk walk = {.samples = g->samples,
                            .chunk = tchi_chunk_samples(context, g->samples, g->positions, each, fixed),
                            .layout = norms_layout,
                            .begin = begin_products,
                            .part = norms_part};
    return tchi_walk_samples(context, &walk, &c);
}

/* --- inner products ---------------------------------------------------------------------------------------------- */

/* Directions, or sums. */
static void place_parameters(product_call *c, tchi_arena *arena, int64_t count)
{
    c->of_weight = tchi_parameter_place(&c->weight, arena, c->type, 0, 1);
    c->of_bias = tchi_parameter_place(&c->bias, arena, c->type, 0, 1);
    if (c->bias.given) {
        c->sums = place_sums(c, arena, count);
    }
}

static int64_t dots_scratch(tch_context *context, const product_call *c, int64_t count)
{
    const tchi_side *g = &c->gradients;
    int64_t p = g->groups * g->cols;
    int64_t bytes = 0;
    if (c->weight.given) {
        bytes = scratch_for(context, TCH_SCRATCH_PAIR_DOTS, c->type, c->formed ? 1 : g->positions,
                            c->formed ? p * c->inputs.cols : p, count);
    }
    if (c->bias.given) {
        bytes = tchi_max(bytes, positions_scratch(context, c, count));
        bytes = tchi_max(bytes, scratch_for(context, TCH_SCRATCH_PAIR_DOTS, c->type, 1, p, count));
    }
    return bytes;
}

static void dots_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    product_call *c = call;
    const tchi_side *g = &c->gradients;
    place_parameters(c, arena, count);
    c->g = tchi_side_place(g, arena, first, count, TCHI_APART);
    if (c->weight.given) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, c->formed ? TCHI_APART : TCHI_TALL);
        c->product = tchi_scratch_matrices(arena, c->type, count * g->groups, c->formed ? g->cols : g->positions,
                                           c->formed ? c->inputs.cols : g->cols);
    }
    c->scratch = tchi_arena_take(arena, dots_scratch(context, c, count));
}

static tch_status weight_dots(tch_context *context, const product_call *c, int64_t count, double *dots)
{
    const tch_backend *t = context->backend;
    double scale = c->call->layer->scale;
    if (c->formed) {
        tch_matrices rows = tchi_flat(&c->product, count);
        TCHI_TRY(form_products(context, c, 1.0, &c->product));
        return tchi_rows_dots(context, &rows, &c->of_weight, scale, dots, c->scratch);
    }
    tch_matrices tall_a = tchi_tall(&c->a);
    tch_matrices tall = tchi_tall(&c->product);
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &tall_a, 0, &c->of_weight, 1, 0.0, 0, &tall));
    return t->sample->pair_dots(context->state, &c->product, &c->g, 1, scale, dots, c->scratch);
}

static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    product_call *c = call;
    double *dots = c->call->numbers + first;
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->weight.given) {
        TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
        TCHI_TRY(weight_dots(context, c, count, dots));
    }
    if (!c->bias.given) {
        return TCH_OK;
    }
    tch_matrices rows = tchi_flat(&c->sums, count);
    TCHI_TRY(sum_positions(context, c, 1.0, &c->sums));
    return tchi_rows_dots(context, &rows, &c->of_bias, c->call->layer->scale, dots, c->scratch);
}

tch_status tchi_product_dots(tch_context *context, const tchi_grad_call *call)
{
    product_call c = call_for(call, false);
    c.formed = c.gradients.groups > 1 || c.type != c.gradients.type;
    const tchi_walk walk = {.samples = c.gradients.samples,
                            .positions = c.gradients.positions,
                            .bytes_beside = dots_scratch(context, &c, c.gradients.samples),
                            .layout = dots_layout,
                            .begin = begin_products,
                            .part = dots_part};
    return walk.positions == 0 ? clear_numbers(context, &c) : tchi_walk_samples(context, &walk, &c);
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

static int64_t sum_scratch(tch_context *context, const product_call *c, int64_t count)
{
    const tchi_side *g = &c->gradients;
    int64_t p = g->groups * g->cols;
    int64_t bytes = 0;
    if (c->weight.given && g->groups > 1) {
        bytes = scratch_for(context, TCH_SCRATCH_SAMPLE_SUMS, c->type, count, p * c->inputs.cols, 1);
    }
    if (c->bias.given) {
        bytes = tchi_max(bytes, positions_scratch(context, c, count));
        bytes = tchi_max(bytes, scratch_for(context, TCH_SCRATCH_SAMPLE_SUMS, c->type, count, p, 1));
    }
    return bytes;
}

/* The weighted side: in the scratch it was read into, or in separate scratch. */
static tch_matrices place_weighed(const product_call *c, const tchi_side *side, tchi_arena *arena, int64_t count,
                                  const tch_matrices *read)
{
    if (!tchi_side_in_place(side, TCHI_TALL) && c->weighed == side->type) {
        return *read;
    }
    return tchi_scratch_matrices(arena, c->weighed, count * side->groups, side->positions, side->cols);
}

static void sum_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    product_call *c = call;
    const tchi_side *g = &c->gradients;
    tchi_arrangement how = g->groups > 1 ? TCHI_APART : TCHI_TALL;
    place_parameters(c, arena, count);
    c->g = tchi_side_place(g, arena, first, count, how);
    if (c->weight.given) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, how);
        if (g->groups > 1) {
            c->product = tchi_scratch_matrices(arena, c->type, count * g->groups, g->cols, c->inputs.cols);
        } else if (c->call->weights != NULL) {
            c->weighed_a = place_weighed(c, &c->inputs, arena, count, &c->a);
            c->weighed_g = place_weighed(c, g, arena, count, &c->g);
        }
    }
    c->scratch = tchi_arena_take(arena, sum_scratch(context, c, count));
}

static tch_status add_formed(tch_context *context, const product_call *c, int64_t count, const double *weights,
                             double beta)
{
    tch_matrices rows = tchi_flat(&c->product, count);
    TCHI_TRY(form_products(context, c, 1.0, &c->product));
    return tchi_rows_sum(context, &rows, weights, c->call->layer->scale, beta, &c->of_weight, c->scratch);
}

/* Weight 0 must exclude a sample whatever its values, and 0 times NaN is NaN: both operands are zeroed, which costs a
 * pass over the inputs. */
static tch_status add_tall(tch_context *context, const product_call *c, const double *weights, double beta)
{
    const tch_backend *t = context->backend;
    tch_matrices tall_a = tchi_tall(weights != NULL ? &c->weighed_a : &c->a);
    tch_matrices tall_g = tchi_tall(weights != NULL ? &c->weighed_g : &c->g);
    if (weights != NULL) {
        TCHI_TRY(t->sample->weigh_samples(context->state, &c->a, 1, weights, 1, &c->weighed_a));
        TCHI_TRY(t->sample->weigh_samples(context->state, &c->g, 1, weights, 0, &c->weighed_g));
    }
    double scale = c->call->layer->scale;
    return t->matrix->gemm(context->state, scale, &tall_g, 1, &tall_a, 0, beta, 0, &c->of_weight);
}

/* Without summands: scales the previous value by beta. */
static tch_status add_nothing(tch_context *context, double beta, const tchi_parameter *parameter, const tch_matrices *x)
{
    return parameter->given
               ? context->backend->matrix->combine(context->state, 0.0, beta, beta == 0.0 ? NULL : x, 0.0, NULL, x)
               : TCH_OK;
}

/* Sums over positions precede weighting in place. */
static tch_status sum_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    product_call *c = call;
    double beta = first == 0 ? c->call->beta : 1.0;
    const double *weights = c->call->weights == NULL ? NULL : c->call->weights + first;
    if (count == 0) {
        TCHI_TRY(add_nothing(context, beta, &c->weight, &c->of_weight));
        return add_nothing(context, beta, &c->bias, &c->of_bias);
    }
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->bias.given) {
        tch_matrices rows = tchi_flat(&c->sums, count);
        TCHI_TRY(sum_positions(context, c, 1.0, &c->sums));
        TCHI_TRY(tchi_rows_sum(context, &rows, weights, c->call->layer->scale, beta, &c->of_bias, c->scratch));
    }
    if (!c->weight.given) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
    return c->gradients.groups > 1 ? add_formed(context, c, count, weights, beta) : add_tall(context, c, weights, beta);
}

tch_status tchi_product_sum(tch_context *context, const tchi_grad_call *call)
{
    product_call c = call_for(call, false);
    /* float16 lacks the range for a small weight times a small gradient; bfloat16 has it, and its second rounding costs
     * no more than the first. */
    c.weighed = c.gradients.type == TCH_SCALAR_F16 ? TCH_SCALAR_F32 : c.gradients.type;
    const tchi_walk walk = {.samples = c.gradients.positions == 0 ? 0 : c.gradients.samples,
                            .positions = c.gradients.positions,
                            .bytes_beside = sum_scratch(context, &c, c.gradients.samples),
                            .layout = sum_layout,
                            .begin = begin_products,
                            .part = sum_part};
    TCHI_TRY(tchi_walk_samples(context, &walk, &c));
    TCHI_TRY(tchi_parameter_write(context, &c.weight, 0, &c.of_weight));
    return tchi_parameter_write(context, &c.bias, 0, &c.of_bias);
}

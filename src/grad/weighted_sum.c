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
#include "sample_rows.h"
#include "walk.h"

typedef struct sum_call {
    const tch_layer *layer;
    tchi_side inputs, gradients;
    tchi_parameter weight, bias;
    const double *weights; /* or NULL */
    double beta;
    tch_scalar type;    /* of sums */
    tch_scalar weighed; /* of operands after weighing */
    /* of a chunk; the place of the sums does not depend on the number of samples */
    tch_matrices sum_of_weights, sum_of_biases;
    tch_matrices a, g;
    tch_matrices weighed_a, weighed_g;
    tch_matrices formed; /* gradients of samples, for several groups */
    tch_matrices sums;   /* of output gradients over positions */
    void *scratch;
} sum_call;

/* float16 has too little range for a small weight times a small gradient; bfloat16 has all of it, and rounding again
 * costs no more than rounding the first time did. */
static tch_scalar weighed_type(tch_scalar type)
{
    return type == TCH_SCALAR_F16 ? TCH_SCALAR_F32 : type;
}

static int64_t sums_bytes(tch_context *context, tch_scalar type, int64_t rows, int64_t cols, int64_t batch)
{
    return context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS, type, rows, cols, batch, 0);
}

static int64_t sum_scratch(tch_context *context, const sum_call *c, int64_t count)
{
    const tchi_side *g = &c->gradients;
    int64_t p = g->groups * g->cols;
    int64_t bytes = 0;
    if (c->weight.given && g->groups > 1) {
        bytes = sums_bytes(context, c->type, count, p * c->inputs.cols, 1);
    }
    if (c->bias.given) {
        bytes = tchi_max(bytes, sums_bytes(context, g->type, g->positions, g->cols, count * g->groups));
        bytes = tchi_max(bytes, sums_bytes(context, c->type, count, p, 1));
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

static void operands_layout(sum_call *c, tchi_arena *arena, int64_t first, int64_t count)
{
    if (c->gradients.groups > 1) {
        c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_APART);
        c->formed =
            tchi_scratch_matrices(arena, c->type, count * c->gradients.groups, c->gradients.cols, c->inputs.cols);
        return;
    }
    c->a = tchi_side_place(&c->inputs, arena, first, count, TCHI_TALL);
    if (c->weights != NULL) {
        c->weighed_a = place_weighed(c, &c->inputs, arena, count, &c->a);
        c->weighed_g = place_weighed(c, &c->gradients, arena, count, &c->g);
    }
}

static void sum_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    sum_call *c = call;
    const tchi_side *g = &c->gradients;
    c->sum_of_weights = tchi_parameter_place(&c->weight, arena, c->type, 0, 1);
    c->sum_of_biases = tchi_parameter_place(&c->bias, arena, c->type, 0, 1);
    if (c->bias.given) {
        c->sums = tchi_scratch_matrices(arena, c->type, count * g->groups, 1, g->cols);
    }
    c->g = tchi_side_place(g, arena, first, count, g->groups > 1 ? TCHI_APART : TCHI_TALL);
    if (c->weight.given) {
        operands_layout(c, arena, first, count);
    }
    c->scratch = tchi_arena_take(arena, sum_scratch(context, c, count));
}

static tch_status read_sums(tch_context *context, void *call)
{
    sum_call *c = call;
    if (c->beta == 0.0) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_parameter_read(context, &c->weight, 0, &c->sum_of_weights));
    return tchi_parameter_read(context, &c->bias, 0, &c->sum_of_biases);
}

/* --- one chunk --------------------------------------------------------------------------------------------------- */

static tch_status add_formed(tch_context *context, const sum_call *c, int64_t count, const double *weights, double beta)
{
    tch_matrices rows = tchi_flat(&c->formed, count);
    TCHI_TRY(context->backend->matrix->gemm(context->state, 1.0, &c->g, 1, &c->a, 0, 0.0, 0, &c->formed));
    return tchi_rows_sum(context, &rows, weights, c->layer->scale, beta, &c->sum_of_weights, c->scratch);
}

static tch_status add_tall(tch_context *context, const sum_call *c, const double *weights, double beta)
{
    const tch_backend *t = context->backend;
    const tch_matrices *a = &c->a;
    const tch_matrices *g = &c->g;
    if (weights != NULL) {
        TCHI_TRY(t->sample->weigh_samples(context->state, a, 1, weights, 1, &c->weighed_a));
        TCHI_TRY(t->sample->weigh_samples(context->state, g, 1, weights, 0, &c->weighed_g));
        a = &c->weighed_a;
        g = &c->weighed_g;
    }
    tch_matrices tall_a = tchi_tall(a);
    tch_matrices tall_g = tchi_tall(g);
    return t->matrix->gemm(context->state, c->layer->scale, &tall_g, 1, &tall_a, 0, beta, 0, &c->sum_of_weights);
}

/* Nothing to add: what is there is multiplied by beta. */
static tch_status add_nothing(tch_context *context, double beta, const tchi_parameter *parameter, const tch_matrices *x)
{
    return parameter->given
               ? context->backend->matrix->combine(context->state, 0.0, beta, beta == 0.0 ? NULL : x, 0.0, NULL, x)
               : TCH_OK;
}

/* Sums over positions come before anything is weighed in place. */
static tch_status sum_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    sum_call *c = call;
    double beta = first == 0 ? c->beta : 1.0;
    const double *weights = c->weights == NULL ? NULL : c->weights + first;
    if (count == 0) {
        TCHI_TRY(add_nothing(context, beta, &c->weight, &c->sum_of_weights));
        return add_nothing(context, beta, &c->bias, &c->sum_of_biases);
    }
    TCHI_TRY(tchi_side_read(context, &c->gradients, first, &c->g));
    if (c->bias.given) {
        tch_matrices tall = tchi_tall(&c->sums);
        tch_matrices rows = tchi_flat(&c->sums, count);
        TCHI_TRY(context->backend->sample->sample_sums(context->state, &c->g, 1.0, 0.0, &tall, c->scratch));
        TCHI_TRY(tchi_rows_sum(context, &rows, weights, c->layer->scale, beta, &c->sum_of_biases, c->scratch));
    }
    if (!c->weight.given) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_side_read(context, &c->inputs, first, &c->a));
    return c->gradients.groups > 1 ? add_formed(context, c, count, weights, beta) : add_tall(context, c, weights, beta);
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

static tch_status check_weighted_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
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
    TCHI_TRY(check_weighted_sum(context, layer, input, output_gradient, weights, beta, weight, bias));
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
    c.inputs = tchi_input_side(layer, input);
    c.gradients = tchi_gradient_side(layer, output_gradient);
    c.type = tchi_compute_type(c.gradients.type);
    c.weighed = weighed_type(c.gradients.type);
    c.weight = tchi_parameter_of(weight, false, c.gradients.groups, c.gradients.cols, c.inputs.cols);
    c.bias = tchi_parameter_of(bias, false, c.gradients.groups, 1, c.gradients.cols);
    const tchi_walk walk = {.samples = c.gradients.positions == 0 ? 0 : c.gradients.samples,
                            .positions = c.gradients.positions,
                            .bytes_beside = sum_scratch(context, &c, c.gradients.samples),
                            .layout = sum_layout,
                            .begin = read_sums,
                            .part = sum_part};
    TCHI_TRY(tchi_walk_samples(context, &walk, &c));
    TCHI_TRY(tchi_parameter_write(context, &c.weight, 0, &c.sum_of_weights));
    return tchi_parameter_write(context, &c.bias, 0, &c.sum_of_biases);
}

/* Normalizing layers: the gradients of their weights are vectors, so each chunk of samples has its own formed in
 * scratch, samples by features, and everything else is done on them. The normalized inputs are never stored. */
#include "normalizing.h"

#include "core/status.h"
#include "linalg/batch.h"

#include "call.h"
#include "positions.h"
#include "sample_rows.h"
#include "walk.h"

/* --- gradients of some samples ----------------------------------------------------------------------------------- */

tchi_normalizing tchi_normalizing_of(const tchi_grad_call *call)
{
    const tch_layer *layer = call->layer;
    const tch_tensor *input = call->input;
    tchi_normalizing c = {.layer = layer, .input = input, .gradient = call->gradient, .samples = input->shape[0]};
    int32_t inner = input->ndim - layer->normalized;
    bool group = layer->kind == TCH_LAYER_GROUP_NORM;
    c.parts = layer->kind == TCH_LAYER_RMS_NORM ? call->parts & TCH_GRAD_WEIGHT : call->parts;
    c.type = tchi_compute_type(tchi_scalar_of(input->dtype));
    c.features = group ? input->shape[1] : tchi_tensor_count(input, inner, input->ndim);
    c.positions = group ? tchi_tensor_count(input, 2, input->ndim) : tchi_tensor_count(input, 1, inner);
    return c;
}

/* Rows for some samples: the caller's memory or scratch. */
static tch_matrices place_rows(const tchi_normalizing *c, const tchi_parameter *parameter, tchi_arena *arena,
                               int64_t first, int64_t count)
{
    if (parameter == NULL || !parameter->given) {
        return tchi_scratch_matrices(arena, c->type, 1, count, c->features);
    }
    tch_matrices placed = tchi_parameter_place(parameter, arena, c->type, first, count);
    return (tch_matrices){placed.data, c->type, count, c->features, placed.stride, 1, 0};
}

void tchi_normalizing_layout(const tchi_normalizing *c, tchi_normalizing_chunk *p, const tchi_parameter *weight,
                             const tchi_parameter *bias, tchi_arena *arena, tch_context *context, int64_t first,
                             int64_t count)
{
    tch_scalar type = tchi_scalar_of(c->input->dtype);
    p->x = tchi_rows_place(c->input, type, arena, first, count);
    p->g = tchi_rows_place(c->gradient, type, arena, first, count);
    p->weight = place_rows(c, weight, arena, first, count);
    p->bias = place_rows(c, bias, arena, first, count);
    p->scratch =
        tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_NORMALIZED, type,
                                                                       c->positions, c->features, count, 0));
}

int64_t tchi_normalizing_chunk_size(const tchi_normalizing *c, tch_context *context, int64_t bytes_fixed)
{
    tchi_normalizing_chunk p;
    tchi_arena one = {0};
    tchi_normalizing_layout(c, &p, NULL, NULL, &one, context, 0, 1);
    return tchi_chunk_samples(context, c->samples, c->positions, one.used, bytes_fixed);
}

static tch_status clear_rows(tch_context *context, const tch_matrices *m)
{
    return context->backend->matrix->combine(context->state, 0.0, 0.0, NULL, 0.0, NULL, m);
}

tch_status tchi_normalizing_form(tch_context *context, const tchi_normalizing *c, const tchi_normalizing_chunk *p,
                                 int64_t first, int64_t count)
{
    const tch_backend *t = context->backend;
    tch_normalized layer = {
        .kind = c->layer->kind, .x = p->x.data, .g = p->g.data, .type = p->x.type, .samples = count};
    layer.positions = c->positions;
    layer.features = c->features;
    layer.groups = c->layer->groups;
    layer.eps = c->layer->eps;
    if (count == 0 || c->features == 0) {
        return TCH_OK;
    }
    if (c->positions == 0) {
        TCHI_TRY(tchi_normalizing_has(c, TCH_GRAD_WEIGHT) ? clear_rows(context, &p->weight) : TCH_OK);
        return tchi_normalizing_has(c, TCH_GRAD_BIAS) ? clear_rows(context, &p->bias) : TCH_OK;
    }
    TCHI_TRY(tchi_rows_read(context, c->input, first, &p->x));
    TCHI_TRY(tchi_rows_read(context, c->gradient, first, &p->g));
    return t->sample->normalized_sums(context->state, &layer, c->layer->scale,
                                      tchi_normalizing_has(c, TCH_GRAD_WEIGHT) ? &p->weight : NULL,
                                      tchi_normalizing_has(c, TCH_GRAD_BIAS) ? &p->bias : NULL, p->scratch);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

/* Weight and bias: gradients of samples, directions to multiply those with, or their sums. */
typedef struct row_call {
    const tchi_grad_call *call;
    tchi_normalizing c;
    tchi_parameter weight, bias;
    tch_matrices of_weight, of_bias; /* directions or sums, which keep their place from chunk to chunk */
    tchi_normalizing_chunk p;
    tch_scratch_for operation; /* on the rows of a chunk */
    void *scratch;
} row_call;

static row_call call_for(const tchi_grad_call *call, bool per_sample)
{
    row_call r = {.call = call, .c = tchi_normalizing_of(call)};
    r.weight = tchi_parameter_of(call->weight, per_sample, 1, 1, r.c.features);
    r.bias = tchi_parameter_of(call->bias, per_sample, 1, 1, r.c.features);
    return r;
}

static void samples_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    row_call *r = call;
    tchi_normalizing_layout(&r->c, &r->p, &r->weight, &r->bias, arena, context, first, count);
}

static tch_status samples_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    tch_matrices weights = tchi_each_row(&r->p.weight);
    tch_matrices biases = tchi_each_row(&r->p.bias);
    TCHI_TRY(tchi_normalizing_form(context, &r->c, &r->p, first, count));
    TCHI_TRY(tchi_parameter_write(context, &r->weight, first, &weights));
    return tchi_parameter_write(context, &r->bias, first, &biases);
}

tch_status tchi_normalizing_samples(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, true);
    const tchi_walk walk = {.samples = r.c.samples,
                            .chunk = tchi_normalizing_chunk_size(&r.c, context, 0),
                            .layout = samples_layout,
                            .part = samples_part};
    return tchi_walk_samples(context, &walk, &r);
}

static void rows_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    row_call *r = call;
    bool sums = r->operation == TCH_SCRATCH_SAMPLE_SUMS; /* over samples, which are rows of one matrix */
    r->of_weight = tchi_parameter_place(&r->weight, arena, r->c.type, 0, 1);
    r->of_bias = tchi_parameter_place(&r->bias, arena, r->c.type, 0, 1);
    tchi_normalizing_layout(&r->c, &r->p, NULL, NULL, arena, context, first, count);
    r->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, r->operation, r->c.type,
                                                                                sums ? count : 1, r->c.features,
                                                                                sums ? 1 : count, 0));
}

static tch_status walk_rows(tch_context *context, row_call *r, tch_scratch_for operation,
                            tch_status (*begin)(tch_context *context, void *call),
                            tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count))
{
    int64_t fixed = 2 * r->c.features * tchi_scalar_size(r->c.type);
    const tchi_walk walk = {.samples = r->c.samples,
                            .chunk = tchi_normalizing_chunk_size(&r->c, context, fixed),
                            .layout = rows_layout,
                            .begin = begin,
                            .part = part};
    r->operation = operation;
    return tchi_walk_samples(context, &walk, r);
}

static tch_status read_rows(tch_context *context, row_call *r)
{
    TCHI_TRY(tchi_parameter_read(context, &r->weight, 0, &r->of_weight));
    return tchi_parameter_read(context, &r->bias, 0, &r->of_bias);
}

static tch_status begin_dots(tch_context *context, void *call)
{
    row_call *r = call;
    TCHI_TRY(tchi_clear_numbers(context, r->call->accumulate, r->call->numbers, r->c.samples));
    return read_rows(context, r);
}

/* With the directions given, or of the gradients with themselves. */
static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    double *out = r->call->numbers + first;
    TCHI_TRY(tchi_normalizing_form(context, &r->c, &r->p, first, count));
    if (tchi_normalizing_has(&r->c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(tchi_rows_dots(context, &r->p.weight, r->weight.given ? &r->of_weight : NULL, 1.0, out, r->scratch));
    }
    return tchi_normalizing_has(&r->c, TCH_GRAD_BIAS)
               ? tchi_rows_dots(context, &r->p.bias, r->bias.given ? &r->of_bias : NULL, 1.0, out, r->scratch)
               : TCH_OK;
}

tch_status tchi_normalizing_dots(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, false);
    return walk_rows(context, &r, TCH_SCRATCH_PAIR_DOTS, begin_dots, dots_part);
}

static tch_status begin_sum(tch_context *context, void *call)
{
    row_call *r = call;
    return r->call->beta == 0.0 ? TCH_OK : read_rows(context, r);
}

/* The first chunk brings beta in, also where it has no samples. */
static tch_status sum_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    const double *weights = r->call->weights != NULL ? r->call->weights + first : NULL;
    double beta = first == 0 ? r->call->beta : 1.0;
    TCHI_TRY(tchi_normalizing_form(context, &r->c, &r->p, first, count));
    if (r->weight.given) {
        TCHI_TRY(tchi_rows_sum(context, &r->p.weight, weights, 1.0, beta, &r->of_weight, r->scratch));
    }
    return r->bias.given ? tchi_rows_sum(context, &r->p.bias, weights, 1.0, beta, &r->of_bias, r->scratch) : TCH_OK;
}

tch_status tchi_normalizing_sum(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, false);
    TCHI_TRY(walk_rows(context, &r, TCH_SCRATCH_SAMPLE_SUMS, begin_sum, sum_part));
    TCHI_TRY(tchi_parameter_write(context, &r.weight, 0, &r.of_weight));
    return tchi_parameter_write(context, &r.bias, 0, &r.of_bias);
}

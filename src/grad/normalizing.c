/* Normalizing layers: the gradients of their weights are vectors, so each chunk of samples has its own formed in
 * scratch, samples by features, and everything else is done on them. The normalized inputs are never stored. */
#include "normalizing.h"

#include "core/status.h"
#include "linalg/batch.h"

#include "kinds.h"
#include "positions.h"
#include "sample_rows.h"

/* --- gradients of some samples ----------------------------------------------------------------------------------- */

tchi_normalizing tchi_normalizing_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *gradient,
                                     tch_grad_part parts)
{
    tchi_normalizing c = {.layer = layer, .input = input, .gradient = gradient, .samples = input->shape[0]};
    int32_t inner = input->ndim - layer->normalized;
    bool group = layer->kind == TCH_LAYER_GROUP_NORM;
    c.parts = layer->kind == TCH_LAYER_RMS_NORM ? parts & TCH_GRAD_WEIGHT : parts;
    c.type = tchi_compute_type(tchi_scalar_of(input->dtype));
    c.features = group ? input->shape[1] : tchi_tensor_count(input, inner, input->ndim);
    c.positions = group ? tchi_tensor_count(input, 2, input->ndim) : tchi_tensor_count(input, 1, inner);
    return c;
}

void tchi_normalizing_layout(const tchi_normalizing *c, tchi_normalizing_chunk *p, const tch_tensor *weight,
                             const tch_tensor *bias, tchi_arena *arena, tch_context *context, int64_t first,
                             int64_t count)
{
    tch_scalar type = tchi_scalar_of(c->input->dtype);
    int64_t bytes = context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_NORMALIZED, type, c->positions,
                                                            c->features, count, 0);
    p->x = tchi_rows_place(c->input, type, arena, first, count);
    p->g = tchi_rows_place(c->gradient, type, arena, first, count);
    p->weight = weight != NULL ? tchi_rows_place(weight, c->type, arena, first, count)
                               : tchi_scratch_matrices(arena, c->type, 1, count, c->features);
    p->bias = bias != NULL ? tchi_rows_place(bias, c->type, arena, first, count)
                           : tchi_scratch_matrices(arena, c->type, 1, count, c->features);
    p->weight = tchi_matrices_new(p->weight.data, c->type, 1, count, c->features);
    p->bias = tchi_matrices_new(p->bias.data, c->type, 1, count, c->features);
    p->scratch = tchi_arena_take(arena, bytes);
}

static int64_t bytes_of(const tchi_normalizing *c, tch_context *context, int64_t count)
{
    tchi_normalizing_chunk p;
    tchi_arena arena = {0};
    tchi_normalizing_layout(c, &p, NULL, NULL, &arena, context, 0, count);
    return arena.used;
}

tchi_chunks tchi_normalizing_chunks(const tchi_normalizing *c, tch_context *context, int64_t bytes_fixed)
{
    int64_t each = bytes_of(c, context, 1);
    return (tchi_chunks){c->samples, tchi_chunk_samples(context, c->samples, c->positions, each, bytes_fixed)};
}

static tch_status clear(tch_context *context, const tch_matrices *m)
{
    return context->backend->device->zero_bytes(context->state, m->data, m->rows * m->cols * tchi_scalar_size(m->type));
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
        TCHI_TRY(tchi_normalizing_has(c, TCH_GRAD_WEIGHT) ? clear(context, &p->weight) : TCH_OK);
        return tchi_normalizing_has(c, TCH_GRAD_BIAS) ? clear(context, &p->bias) : TCH_OK;
    }
    TCHI_TRY(tchi_rows_read(context, c->input, first, &p->x));
    TCHI_TRY(tchi_rows_read(context, c->gradient, first, &p->g));
    return t->sample->normalized_sums(context->state, &layer, c->layer->scale,
                                      tchi_normalizing_has(c, TCH_GRAD_WEIGHT) ? &p->weight : NULL,
                                      tchi_normalizing_has(c, TCH_GRAD_BIAS) ? &p->bias : NULL, p->scratch);
}

/* Those that the caller gave tensors for. */
static tch_grad_part parts_given(const tch_tensor *weight, const tch_tensor *bias)
{
    int parts = (weight != NULL ? TCH_GRAD_WEIGHT : 0) | (bias != NULL ? TCH_GRAD_BIAS : 0);
    return (tch_grad_part)parts;
}

/* --- samples ----------------------------------------------------------------------------------------------------- */

static tch_status samples_part(tch_context *context, const tchi_normalizing *c, const tch_tensor *weight,
                               const tch_tensor *bias, int64_t first, int64_t count)
{
    tchi_arena arena = {0};
    tchi_normalizing_chunk p;
    tchi_normalizing_layout(c, &p, weight, bias, &arena, context, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tchi_normalizing_layout(c, &p, weight, bias, &arena, context, first, count);
    TCHI_TRY(tchi_normalizing_form(context, c, &p, first, count));
    if (weight != NULL) {
        TCHI_TRY(tchi_rows_write(context, weight, first, &p.weight));
    }
    return bias != NULL ? tchi_rows_write(context, bias, first, &p.bias) : TCH_OK;
}

tch_status tchi_normalizing_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *gradient, tch_tensor *weight, tch_tensor *bias)
{
    tchi_normalizing c = tchi_normalizing_of(layer, input, gradient, parts_given(weight, bias));
    tchi_chunks chunks = tchi_normalizing_chunks(&c, context, 0);
    for (int64_t first = 0; first < c.samples; first += chunks.size) {
        TCHI_TRY(samples_part(context, &c, weight, bias, first, tchi_chunk_at(&chunks, first)));
    }
    return TCH_OK;
}

/* --- numbers for each sample ------------------------------------------------------------------------------------- */

/* Beside the gradients of a chunk: directions to multiply them with, and scratch to do it. */
typedef struct dots_buffers {
    tchi_normalizing_chunk p;
    tch_matrices weight, bias; /* 1 by features each */
    void *scratch;
} dots_buffers;

static tch_matrices place_direction(const tchi_normalizing *c, const tch_tensor *direction, tchi_arena *arena)
{
    tch_matrices rows = {0};
    if (direction != NULL) {
        rows = tchi_rows_place(direction, c->type, arena, 0, direction->shape[0]);
    }
    return rows;
}

/* Directions keep their place from chunk to chunk. */
static void dots_layout(const tchi_normalizing *c, dots_buffers *d, const tch_tensor *weight, const tch_tensor *bias,
                        tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    d->weight = place_direction(c, weight, arena);
    d->bias = place_direction(c, bias, arena);
    tchi_normalizing_layout(c, &d->p, NULL, NULL, arena, context, first, count);
    d->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_PAIR_DOTS,
                                                                                c->type, 1, c->features, count, 0));
}

/* out[i] += <row i of the gradients, direction>, or the row's own square where there is no direction. */
static tch_status add_dots(tch_context *context, const tch_matrices *rows, const tch_matrices *direction, double *out,
                           void *scratch)
{
    tch_matrices x = tchi_matrices_new(rows->data, rows->type, rows->rows, 1, rows->cols);
    tch_matrices y = x;
    if (rows->rows == 0 || rows->cols == 0) {
        return TCH_OK;
    }
    if (direction->data != NULL) {
        y.data = direction->data;
        y.stride = 0;
    }
    return context->backend->sample->pair_dots(context->state, &x, &y, 1, 1.0, out, scratch);
}

static tch_status read_directions(tch_context *context, const dots_buffers *d, const tch_tensor *weight,
                                  const tch_tensor *bias)
{
    if (weight != NULL) {
        TCHI_TRY(tchi_rows_read(context, weight, 0, &d->weight));
    }
    return bias != NULL ? tchi_rows_read(context, bias, 0, &d->bias) : TCH_OK;
}

static tch_status numbers_part(tch_context *context, const tchi_normalizing *c, const dots_buffers *d, int64_t first,
                               int64_t count, double *out)
{
    TCHI_TRY(tchi_normalizing_form(context, c, &d->p, first, count));
    if (tchi_normalizing_has(c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(add_dots(context, &d->p.weight, &d->weight, out, d->scratch));
    }
    return tchi_normalizing_has(c, TCH_GRAD_BIAS) ? add_dots(context, &d->p.bias, &d->bias, out, d->scratch) : TCH_OK;
}

/* Over the wanted parts, with directions for them or with themselves. */
static tch_status numbers_of(tch_context *context, const tchi_normalizing *c, const tch_tensor *weight,
                             const tch_tensor *bias, int32_t accumulate, double *out)
{
    dots_buffers d;
    tchi_arena arena = {0};
    tchi_arena last = {0};
    tchi_chunks chunks = tchi_normalizing_chunks(c, context, 2 * c->features * tchi_scalar_size(c->type));
    dots_layout(c, &d, weight, bias, &arena, context, 0, tchi_chunk_at(&chunks, 0));
    dots_layout(c, &d, weight, bias, &last, context, 0, tchi_chunk_last(&chunks));
    arena.used = last.used > arena.used ? last.used : arena.used;
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    for (int64_t first = 0; first < c->samples; first += chunks.size) {
        tchi_arena here = arena;
        int64_t count = tchi_chunk_at(&chunks, first);
        dots_layout(c, &d, weight, bias, &here, context, first, count);
        if (first == 0) {
            TCHI_TRY(tchi_clear_numbers(context, accumulate, out, c->samples));
            TCHI_TRY(read_directions(context, &d, weight, bias));
        }
        TCHI_TRY(numbers_part(context, c, &d, first, count, out + first));
    }
    return TCH_OK;
}

tch_status tchi_normalizing_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *gradient, tch_grad_part parts, int32_t accumulate, double *norms)
{
    tchi_normalizing c = tchi_normalizing_of(layer, input, gradient, parts);
    return numbers_of(context, &c, NULL, NULL, accumulate, norms);
}

tch_status tchi_normalizing_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *gradient, const tch_tensor *weight, const tch_tensor *bias,
                                 int32_t accumulate, double *dots)
{
    tchi_normalizing c = tchi_normalizing_of(layer, input, gradient, parts_given(weight, bias));
    return numbers_of(context, &c, weight, bias, accumulate, dots);
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

typedef struct sum_buffers {
    tch_matrices weight, bias; /* the sums, 1 by features */
    tchi_normalizing_chunk p;
    void *scratch;
} sum_buffers;

/* Sums keep their place from chunk to chunk. */
static void sum_layout(const tchi_normalizing *c, sum_buffers *s, const tch_tensor *weight, const tch_tensor *bias,
                       tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    s->weight = place_direction(c, weight, arena);
    s->bias = place_direction(c, bias, arena);
    tchi_normalizing_layout(c, &s->p, NULL, NULL, arena, context, first, count);
    s->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_SAMPLE_SUMS,
                                                                                c->type, count, c->features, 1, 0));
}

/* out = beta out + the sum of weights[i] times row i. */
static tch_status add_rows(tch_context *context, const tch_matrices *rows, const double *weights, double beta,
                           const tch_matrices *out, void *scratch)
{
    const tch_backend *t = context->backend;
    tch_matrices sum = tchi_matrices_new(out->data, out->type, 1, 1, rows->cols);
    if (rows->cols == 0) {
        return TCH_OK;
    }
    if (rows->rows == 0) {
        return t->matrix->combine(context->state, 0.0, beta, beta == 0.0 ? NULL : &sum, 0.0, NULL, &sum);
    }
    if (weights != NULL) {
        tch_matrices each = tchi_matrices_new(rows->data, rows->type, rows->rows, 1, rows->cols);
        TCHI_TRY(t->sample->weigh_samples(context->state, &each, 1, weights, 0, &each));
    }
    return t->sample->sample_sums(context->state, rows, 1.0, beta, &sum, scratch);
}

static tch_status sum_chunk(tch_context *context, const tchi_normalizing *c, const sum_buffers *s, int64_t first,
                            const double *weights, double beta)
{
    int64_t count = s->p.weight.rows;
    const double *here = weights != NULL ? weights + first : NULL;
    TCHI_TRY(tchi_normalizing_form(context, c, &s->p, first, count));
    if (tchi_normalizing_has(c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(add_rows(context, &s->p.weight, here, beta, &s->weight, s->scratch));
    }
    if (tchi_normalizing_has(c, TCH_GRAD_BIAS)) {
        TCHI_TRY(add_rows(context, &s->p.bias, here, beta, &s->bias, s->scratch));
    }
    return TCH_OK;
}

static tch_status transfer_sums(tch_context *context, const sum_buffers *s, const tch_tensor *weight,
                                const tch_tensor *bias,
                                tch_status (*way)(tch_context *, const tch_tensor *, int64_t, const tch_matrices *))
{
    if (weight != NULL) {
        TCHI_TRY(way(context, weight, 0, &s->weight));
    }
    return bias != NULL ? way(context, bias, 0, &s->bias) : TCH_OK;
}

/* The first chunk brings beta in, also where it has no samples. */
tch_status tchi_normalizing_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                const tch_tensor *gradient, const double *weights, double beta, tch_tensor *weight,
                                tch_tensor *bias)
{
    tchi_normalizing c = tchi_normalizing_of(layer, input, gradient, parts_given(weight, bias));
    sum_buffers s;
    tchi_arena arena = {0};
    tchi_arena last = {0};
    tchi_chunks chunks = tchi_normalizing_chunks(&c, context, 2 * c.features * tchi_scalar_size(c.type));
    sum_layout(&c, &s, weight, bias, &arena, context, 0, tchi_chunk_at(&chunks, 0));
    sum_layout(&c, &s, weight, bias, &last, context, 0, tchi_chunk_last(&chunks));
    arena.used = last.used > arena.used ? last.used : arena.used;
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    int64_t first = 0;
    do {
        tchi_arena here = arena;
        sum_layout(&c, &s, weight, bias, &here, context, first, tchi_chunk_at(&chunks, first));
        if (first == 0 && beta != 0.0) {
            TCHI_TRY(transfer_sums(context, &s, weight, bias, tchi_rows_read));
        }
        TCHI_TRY(sum_chunk(context, &c, &s, first, weights, first == 0 ? beta : 1.0));
        first += chunks.size;
    } while (first < c.samples);
    return transfer_sums(context, &s, weight, bias, tchi_rows_write);
}

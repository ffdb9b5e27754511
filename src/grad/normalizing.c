/* Normalization layers: gradients of their weights are vectors, so each chunk of samples forms them in scratch, samples
 * by features, and all else is computed from those. Normalized inputs are never stored. */
#include "call.h"

#include "core/arith.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "positions.h"
#include "tensor_rows.h"
#include "walk.h"

/* --- gradients of some samples ----------------------------------------------------------------------------------- */

typedef struct normalizing {
    const tch_layer *layer;
    const tch_tensor *input, *gradient;
    tch_grad_part parts; /* requested, and existing for the kind */
    tch_scalar type;     /* of the gradients of weights: the compute type */
    int64_t samples, positions, features;
} normalizing;

static bool has(const normalizing *c, tch_grad_part part)
{
    return (c->parts & part) != 0;
}

/* Inputs and output gradients of a chunk, and the gradients of the weights, samples by features. */
typedef struct normalizing_chunk {
    tch_matrices x, g, weight, bias;
    void *scratch;
} normalizing_chunk;

static normalizing normalizing_of(const tchi_grad_call *call)
{
    const tch_layer *layer = call->layer;
    const tch_tensor *input = call->input;
    normalizing c = {.layer = layer, .input = input, .gradient = call->gradient, .samples = input->shape[0]};
    int32_t inner = input->ndim - layer->normalized;
    bool group = layer->kind == TCH_LAYER_GROUP_NORM;
    c.parts = layer->kind == TCH_LAYER_RMS_NORM ? call->parts & TCH_GRAD_WEIGHT : call->parts;
    c.type = tchi_compute_type(tchi_scalar_of(input->dtype));
    c.features = group ? input->shape[1] : tchi_tensor_count(input, inner, input->ndim);
    c.positions = group ? tchi_tensor_count(input, 2, input->ndim) : tchi_tensor_count(input, 1, inner);
    return c;
}

/* Rows for some samples: the caller's memory or scratch. */
static tch_matrices place_rows(const normalizing *c, const tchi_parameter *parameter, tchi_arena *arena, int64_t first,
                               int64_t count)
{
    if (parameter == NULL || !parameter->given) {
        return tchi_scratch_matrices(arena, c->type, 1, count, c->features);
    }
    tch_matrices placed = tchi_parameter_place(parameter, arena, c->type, first, count);
    return (tch_matrices){placed.data, c->type, count, c->features, placed.stride, 1, 0};
}

/* Samples [first, first + count). The layout runs twice. Gradients are written directly to `weight` and `bias`, which
 * may be NULL, if their layout permits. */
static void chunk_layout(const normalizing *c, normalizing_chunk *p, const tchi_parameter *weight,
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

/* Samples per chunk in addition to `bytes_fixed` of scratch. */
static int64_t chunk_size(const normalizing *c, tch_context *context, int64_t bytes_fixed)
{
    normalizing_chunk p;
    tchi_arena one = {0};
    chunk_layout(c, &p, NULL, NULL, &one, context, 0, 1);
    return tchi_chunk_samples(context, c->samples, c->positions, one.used, bytes_fixed);
}

static tch_status clear_rows(tch_context *context, const tch_matrices *m)
{
    return context->backend->matrix->combine(context->state, 0.0, 0.0, NULL, 0.0, NULL, m);
}

/* Computes p->weight and p->bias, if requested. */
static tch_status form_gradients(tch_context *context, const normalizing *c, const normalizing_chunk *p, int64_t first,
                                 int64_t count)
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
        TCHI_TRY(has(c, TCH_GRAD_WEIGHT) ? clear_rows(context, &p->weight) : TCH_OK);
        return has(c, TCH_GRAD_BIAS) ? clear_rows(context, &p->bias) : TCH_OK;
    }
    TCHI_TRY(tchi_rows_read(context, c->input, first, &p->x));
    TCHI_TRY(tchi_rows_read(context, c->gradient, first, &p->g));
    return t->sample->normalized_sums(context->state, &layer, c->layer->scale,
                                      has(c, TCH_GRAD_WEIGHT) ? &p->weight : NULL,
                                      has(c, TCH_GRAD_BIAS) ? &p->bias : NULL, p->scratch);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

/* Weight and bias: per-sample gradients, directions for products, or sums. */
typedef struct row_call {
    const tchi_grad_call *call;
    normalizing c;
    tchi_parameter weight, bias;
    tch_matrices of_weight, of_bias; /* directions or sums, at offsets independent of the chunk */
    normalizing_chunk p;
    tch_scratch_for operation; /* on the rows of a chunk */
    void *scratch;
} row_call;

static row_call call_for(const tchi_grad_call *call, bool per_sample)
{
    row_call r = {.call = call, .c = normalizing_of(call)};
    r.weight = tchi_parameter_of(call->weight, per_sample, 1, 1, r.c.features);
    r.bias = tchi_parameter_of(call->bias, per_sample, 1, 1, r.c.features);
    return r;
}

static void samples_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    row_call *r = call;
    chunk_layout(&r->c, &r->p, &r->weight, &r->bias, arena, context, first, count);
}

static tch_status samples_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    tch_matrices weights = tchi_each_row(&r->p.weight);
    tch_matrices biases = tchi_each_row(&r->p.bias);
    TCHI_TRY(form_gradients(context, &r->c, &r->p, first, count));
    TCHI_TRY(tchi_parameter_write(context, &r->weight, first, &weights));
    return tchi_parameter_write(context, &r->bias, first, &biases);
}

tch_status tchi_normalizing_samples(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, true);
    const tchi_walk walk = {
        .samples = r.c.samples, .chunk = chunk_size(&r.c, context, 0), .layout = samples_layout, .part = samples_part};
    return tchi_walk_samples(context, &walk, &r);
}

static void rows_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    row_call *r = call;
    bool sums = r->operation == TCH_SCRATCH_SAMPLE_SUMS; /* over samples: rows of one matrix */
    r->of_weight = tchi_parameter_place(&r->weight, arena, r->c.type, 0, 1);
    r->of_bias = tchi_parameter_place(&r->bias, arena, r->c.type, 0, 1);
    chunk_layout(&r->c, &r->p, NULL, NULL, arena, context, first, count);
    r->scratch = tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, r->operation, r->c.type,
                                                                                sums ? count : 1, r->c.features,
                                                                                sums ? 1 : count, 0));
}

/* Clears numbers; reads directions and sums. */
static tch_status begin_rows(tch_context *context, void *call)
{
    row_call *r = call;
    const tchi_grad_call *c = r->call;
    if (c->numbers != NULL) {
        TCHI_TRY(tchi_clear_numbers(context, c->accumulate, c->numbers, r->c.samples));
    } else if (c->beta == 0.0) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_parameter_read(context, &r->weight, 0, &r->of_weight));
    return tchi_parameter_read(context, &r->bias, 0, &r->of_bias);
}

static tch_status walk_rows(tch_context *context, row_call *r, tch_scratch_for operation,
                            tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count))
{
    int64_t fixed = 2 * r->c.features * tchi_scalar_size(r->c.type);
    const tchi_walk walk = {.samples = r->c.samples,
                            .chunk = chunk_size(&r->c, context, fixed),
                            .layout = rows_layout,
                            .begin = begin_rows,
                            .part = part};
    r->operation = operation;
    return tchi_walk_samples(context, &walk, r);
}

/* With the given directions, or of the gradients with themselves. */
static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    double *out = r->call->numbers + first;
    TCHI_TRY(form_gradients(context, &r->c, &r->p, first, count));
    if (has(&r->c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(tchi_rows_dots(context, &r->p.weight, r->weight.given ? &r->of_weight : NULL, 1.0, out, r->scratch));
    }
    return has(&r->c, TCH_GRAD_BIAS)
               ? tchi_rows_dots(context, &r->p.bias, r->bias.given ? &r->of_bias : NULL, 1.0, out, r->scratch)
               : TCH_OK;
}

tch_status tchi_normalizing_dots(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, false);
    return walk_rows(context, &r, TCH_SCRATCH_PAIR_DOTS, dots_part);
}

/* The first chunk applies beta, even without samples. */
static tch_status sum_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    row_call *r = call;
    const double *weights = r->call->weights != NULL ? r->call->weights + first : NULL;
    double beta = first == 0 ? r->call->beta : 1.0;
    TCHI_TRY(form_gradients(context, &r->c, &r->p, first, count));
    if (r->weight.given) {
        TCHI_TRY(tchi_rows_sum(context, &r->p.weight, weights, 1.0, beta, &r->of_weight, r->scratch));
    }
    return r->bias.given ? tchi_rows_sum(context, &r->p.bias, weights, 1.0, beta, &r->of_bias, r->scratch) : TCH_OK;
}

tch_status tchi_normalizing_sum(tch_context *context, const tchi_grad_call *call)
{
    row_call r = call_for(call, false);
    TCHI_TRY(walk_rows(context, &r, TCH_SCRATCH_SAMPLE_SUMS, sum_part));
    TCHI_TRY(tchi_parameter_write(context, &r.weight, 0, &r.of_weight));
    return tchi_parameter_write(context, &r.bias, 0, &r.of_bias);
}

/* --- Gram matrices ------------------------------------------------------------------------------------------------ */

/* Products of blocks of samples; a single block unless scratch is limited. Blocks below the diagonal are computed and
 * mirrored. */
typedef struct gram_buffers {
    tch_matrices sum;       /* B by B, of the type of the gradients */
    tch_matrices converted; /* the same in the type of the caller's matrix */
    normalizing_chunk left, right;
} gram_buffers;

typedef struct gram_call {
    normalizing c;
    tch_matrices out; /* the caller's */
    int64_t chunk;
} gram_call;

/* Samples per block. */
typedef struct range {
    int64_t first, count;
} range;

/* Fixed offsets first; a diagonal block has no right side. */
static void blocks_layout(const gram_call *g, gram_buffers *b, tchi_arena *arena, tch_context *context, range left,
                          range right)
{
    int64_t n = g->c.samples;
    b->sum = tchi_scratch_matrices(arena, g->c.type, 1, n, n);
    b->converted = g->out.type == g->c.type ? b->sum : tchi_scratch_matrices(arena, g->out.type, 1, n, n);
    chunk_layout(&g->c, &b->left, NULL, NULL, arena, context, left.first, left.count);
    chunk_layout(&g->c, &b->right, NULL, NULL, arena, context, right.first, right.count);
}

/* target = left right' + beta target; a Gram matrix on the diagonal, where left is right. */
static tch_status rows_product(tch_context *context, const tch_matrices *left, const tch_matrices *right, double beta,
                               const tch_matrices *target)
{
    return left == right ? tchi_gram(context, 1.0, left, 0, beta, target)
                         : context->backend->matrix->gemm(context->state, 1.0, left, 0, right, 1, beta, 0, target);
}

static tch_status add_block(tch_context *context, const gram_call *g, const gram_buffers *b, range rows, range cols)
{
    bool diagonal = rows.first == cols.first;
    const normalizing_chunk *right = diagonal ? &b->left : &b->right;
    tch_matrices block = tchi_matrices_block(&b->sum, rows.first, cols.first, rows.count, cols.count);
    tch_matrices image = tchi_matrices_block(&b->sum, cols.first, rows.first, cols.count, rows.count);
    double beta = 0.0;
    if (has(&g->c, TCH_GRAD_WEIGHT)) {
        TCHI_TRY(rows_product(context, &b->left.weight, &right->weight, beta, &block));
        beta = 1.0;
    }
    if (has(&g->c, TCH_GRAD_BIAS)) {
        TCHI_TRY(rows_product(context, &b->left.bias, &right->bias, beta, &block));
    }
    return diagonal ? TCH_OK : tchi_transpose(context, &block, &image);
}

static tch_status sum_blocks(tch_context *context, const gram_call *g, const tchi_arena *arena, gram_buffers *b)
{
    int64_t n = g->c.samples;
    for (int64_t row = 0; row < n; row += g->chunk) {
        range rows = {row, tchi_min(g->chunk, n - row)};
        for (int64_t col = 0; col <= row; col += g->chunk) {
            range cols = {col, col == row ? rows.count : g->chunk};
            tchi_arena here = *arena;
            blocks_layout(g, b, &here, context, rows, col == row ? (range){0, 0} : cols);
            if (col == 0) {
                TCHI_TRY(form_gradients(context, &g->c, &b->left, rows.first, rows.count));
            }
            if (col < row) {
                TCHI_TRY(form_gradients(context, &g->c, &b->right, cols.first, cols.count));
            }
            TCHI_TRY(add_block(context, g, b, rows, cols));
        }
    }
    return TCH_OK;
}

/* Two blocks share scratch, unless one has all samples. */
static int64_t choose_chunk(tch_context *context, const gram_call *g)
{
    gram_buffers b;
    tchi_arena fixed = {0};
    blocks_layout(g, &b, &fixed, context, (range){0, 0}, (range){0, 0});
    int64_t chunk = chunk_size(&g->c, context, fixed.used);
    return chunk >= g->c.samples ? chunk : chunk > 1 ? chunk / 2 : 1;
}

/* gram = sum or gram + sum, in gram's type. */
static tch_status add_to(tch_context *context, const gram_buffers *b, int32_t accumulate, const tch_matrices *gram)
{
    const tch_backend *t = context->backend;
    if (b->sum.type != gram->type) {
        TCHI_TRY(t->matrix->shift_scale(context->state, &b->sum, NULL, NULL, 0.0, &b->converted));
    }
    return t->matrix->combine(context->state, 0.0, 1.0, accumulate ? gram : NULL, 1.0, &b->converted, gram);
}

tch_status tchi_normalizing_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram)
{
    gram_call g = {.c = normalizing_of(call)};
    gram_buffers b;
    tchi_arena arena = {0};
    tchi_arena last = {0};
    if (g.c.features == 0 || g.c.parts == 0 || !tchi_matrices_of(gram, &g.out)) {
        return tchi_clear_gram(context, call->accumulate, gram);
    }
    g.chunk = choose_chunk(context, &g);
    range right = {0, g.chunk < g.c.samples ? g.chunk : 0};
    blocks_layout(&g, &b, &arena, context, (range){0, tchi_min(g.chunk, g.c.samples)}, right);
    blocks_layout(&g, &b, &last, context, (range){0, g.c.samples % g.chunk}, right);
    arena.used = tchi_max(arena.used, last.used);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    TCHI_TRY(sum_blocks(context, &g, &arena, &b));
    return add_to(context, &b, call->accumulate, &g.out);
}

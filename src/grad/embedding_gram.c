/* The Gram matrix of an embedding's gradients. The gradient of one sample at a time is formed, and the inner products
 * of the others with it are taken at the rows of their tokens alone: one gradient in memory, or as many of its columns
 * as fit, and work that grows with the positions and not with the vocabulary, save for clearing the gradient. */
#include "call.h"

#include "core/arith.h"
#include "core/status.h"
#include "linalg/batch.h"

#include "embedding.h"
#include "gram.h"
#include "walk.h"

typedef struct gram_buffers {
    tch_matrices sum;       /* B by B in float64: the caller's, or scratch */
    tch_matrices direction; /* some columns of one gradient: V by at most `width` */
    tchi_token_chunk one;   /* the sample it is formed of */
    tchi_token_chunk block; /* those it is multiplied with */
} gram_buffers;

typedef struct gram_call {
    tchi_tokens t;
    const tch_tensor *gram;
    int64_t width; /* columns of a gradient at a time */
    int64_t chunk; /* samples of a block */
} gram_call;

/* The caller's matrix, whose rows are contiguous, or scratch. */
static tch_matrices place_sum(const tch_tensor *gram, tchi_arena *arena)
{
    tch_matrices m;
    bool in_place = tchi_scalar_of(gram->dtype) == TCH_SCALAR_F64 && tchi_matrices_of(gram, &m);
    return in_place ? m : tchi_scratch_matrices(arena, TCH_SCALAR_F64, 1, gram->shape[0], gram->shape[1]);
}

/* What keeps its place comes first. */
static void blocks_layout(const gram_call *c, gram_buffers *b, tchi_arena *arena, tch_context *context, int64_t sample,
                          int64_t first, int64_t count)
{
    b->sum = place_sum(c->gram, arena);
    b->direction = tchi_scratch_matrices(arena, tchi_compute_type(c->t.gradient.type), 1, c->t.layer->rows, c->width);
    tchi_tokens_layout(&c->t, &b->one, arena, context, sample, 1);
    tchi_tokens_layout(&c->t, &b->block, arena, context, first, count);
}

/* sum(sample, k) += <gradient of the sample, that of sample k> for k from `from` on in the block, whose first sample is
 * number `first`. */
static tch_status add_products(tch_context *context, const gram_call *c, const gram_buffers *b, int64_t sample,
                               int64_t first, int64_t from)
{
    const tch_backend *t = context->backend;
    const tch_layer *layer = c->t.layer;
    int64_t count = b->block.tokens.rows - (from - first);
    int64_t size = tchi_scalar_size(b->block.tokens.type);
    tch_matrices tokens = b->block.tokens;
    tokens.data = (char *)tokens.data + (from - first) * tokens.ld * size;
    tokens.rows = count;
    tch_matrices others = tchi_matrices_part(&b->block.g, from - first, count);
    double *out = (double *)b->sum.data + sample * b->sum.ld + from;
    for (int64_t column = 0; column < others.cols; column += c->width) {
        int64_t n = others.cols - column < c->width ? others.cols - column : c->width;
        tch_matrices g = tchi_block(&b->one.g, 0, b->one.g.rows, column, n);
        tch_matrices h = tchi_block(&others, 0, others.rows, column, n);
        tch_matrices direction = tchi_matrices_new(b->direction.data, b->direction.type, 1, layer->rows, n);
        TCHI_TRY(t->sample->token_sums(context->state, &b->one.tokens, layer->padding_index, &g, NULL, layer->scale,
                                       0.0, 0, &direction, b->one.scratch));
        TCHI_TRY(t->sample->token_dots(context->state, &tokens, layer->rows, layer->padding_index, &h, &direction, NULL,
                                       layer->scale, out, b->block.scratch));
    }
    return TCH_OK;
}

/* All products of the samples of a block with those up to themselves: columns of the upper triangle. */
static tch_status add_block(tch_context *context, const gram_call *c, const tchi_arena *arena, int64_t first,
                            int64_t count)
{
    gram_buffers b;
    for (int64_t sample = 0; sample < first + count; sample++) {
        tchi_arena here = *arena;
        blocks_layout(c, &b, &here, context, sample, first, count);
        if (sample == 0) {
            TCHI_TRY(tchi_tokens_read(context, &c->t, first, &b.block));
        }
        TCHI_TRY(tchi_tokens_read(context, &c->t, sample, &b.one));
        TCHI_TRY(add_products(context, c, &b, sample, first, sample > first ? sample : first));
    }
    return TCH_OK;
}

/* The lower triangle becomes the mirror image of the upper one. */
static tch_status mirror_upper(tch_context *context, const tch_matrices *sum)
{
    for (int64_t i = 0; i + 1 < sum->rows; i++) {
        tch_matrices row = tchi_block(sum, i, 1, i + 1, sum->rows - i - 1);
        tch_matrices column = tchi_block(sum, i + 1, sum->rows - i - 1, i, 1);
        TCHI_TRY(tchi_transpose(context, &row, &column));
    }
    return TCH_OK;
}

/* Columns of the gradient and samples of a block, by what fits: half of what is left is for either. */
static void choose_sizes(tch_context *context, gram_call *c)
{
    tchi_token_chunk chunk;
    tchi_arena fixed = {0};
    tchi_arena one = {0};
    int64_t column = c->t.layer->rows * tchi_scalar_size(tchi_compute_type(c->t.gradient.type));
    (void)place_sum(c->gram, &fixed);
    tchi_tokens_layout(&c->t, &chunk, &one, context, 0, 1);
    c->width = tchi_arena_fit(context, c->t.gradient.cols, 2 * column, fixed.used + 2 * one.used);
    int64_t used = fixed.used + one.used + c->width * column;
    c->chunk = tchi_chunk_samples(context, c->t.gradient.samples, c->t.gradient.positions, one.used, used);
}

tch_status tchi_embedding_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram)
{
    gram_call c = {.t = tchi_tokens_of(call->layer, call->input, call->gradient), .gram = gram};
    gram_buffers b;
    tchi_arena arena = {0};
    tchi_arena last = {0};
    tchi_batch batch = tchi_batch_of(gram, 2);
    int64_t samples = c.t.gradient.samples;
    choose_sizes(context, &c);
    blocks_layout(&c, &b, &arena, context, 0, 0, tchi_min(c.chunk, samples));
    blocks_layout(&c, &b, &last, context, 0, 0, samples % c.chunk);
    arena.used = tchi_max(arena.used, last.used);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tchi_arena start = arena;
    b.sum = place_sum(gram, &start);
    bool in_place = b.sum.data == tchi_tensor_data(gram);
    if (!call->accumulate) {
        TCHI_TRY(context->backend->matrix->combine(context->state, 0.0, 0.0, NULL, 0.0, NULL, &b.sum));
    } else if (!in_place) {
        TCHI_TRY(tchi_batch_read(context, &batch, 0, &b.sum));
    }
    for (int64_t first = 0; first < samples; first += c.chunk) {
        TCHI_TRY(add_block(context, &c, &arena, first, tchi_min(c.chunk, samples - first)));
    }
    TCHI_TRY(mirror_upper(context, &b.sum));
    return in_place ? TCH_OK : tchi_batch_write(context, &batch, 0, &b.sum);
}

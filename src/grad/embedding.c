/* Embeddings: a sample's gradient has a row for each of its tokens, the sum of the output gradients at the token's
 * positions. The operation table excludes tokens outside the table and the padding index, so the host never reads
 * tokens. */
#include "call.h"

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "layer.h"
#include "positions.h"
#include "tensor_rows.h"
#include "walk.h"

/* --- samples at hand --------------------------------------------------------------------------------------------- */

typedef struct token_source {
    const tch_layer *layer;
    const tch_tensor *input; /* int32 or int64 [B, ...] */
    tchi_side gradient;      /* positions by d for each sample */
} token_source;

/* A chunk of the samples, for the operation table. */
typedef struct token_chunk {
    tch_matrices tokens, g;
    void *scratch; /* of TCH_SCRATCH_TOKENS */
} token_chunk;

static token_source tokens_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *gradient)
{
    const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    return (token_source){layer, input, tchi_gradient_side(&linear, gradient)};
}

/* Samples [first, first + count). The layout runs twice: measured, then allocated. */
static void tokens_layout(const token_source *t, token_chunk *chunk, tchi_arena *arena, tch_context *context,
                          int64_t first, int64_t count)
{
    chunk->tokens = tchi_rows_place(t->input, tchi_scalar_of(t->input->dtype), arena, first, count);
    chunk->g = tchi_side_place(&t->gradient, arena, first, count, TCHI_APART);
    chunk->scratch = tchi_arena_take(
        arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_TOKENS, t->gradient.type, count,
                                                       t->gradient.positions, t->gradient.cols, t->layer->rows));
}

static tch_status tokens_read(tch_context *context, const token_source *t, int64_t first, const token_chunk *chunk)
{
    TCHI_TRY(tchi_rows_read(context, t->input, first, &chunk->tokens));
    return tchi_side_read(context, &t->gradient, first, &chunk->g);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

typedef struct embedding_call {
    const tchi_grad_call *call;
    token_source t;
    tchi_parameter weight; /* per-sample gradients, a direction, or the sum */
    bool per_sample;
    tch_matrices m; /* the weight: V by d */
    token_chunk chunk;
} embedding_call;

/* Its offset does not depend on the chunk. */
static void embedding_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    embedding_call *e = call;
    tch_scalar type = tchi_compute_type(e->t.gradient.type);
    e->m = tchi_parameter_place(&e->weight, arena, type, e->per_sample ? first : 0, e->per_sample ? count : 1);
    tokens_layout(&e->t, &e->chunk, arena, context, first, count);
}

/* Clears numbers; reads directions and sums. */
static tch_status begin_embedding(tch_context *context, void *call)
{
    embedding_call *e = call;
    const tchi_grad_call *c = e->call;
    if (c->numbers != NULL) {
        TCHI_TRY(tchi_clear_numbers(context, c->accumulate, c->numbers, e->t.gradient.samples));
    }
    return c->numbers == NULL && c->beta == 0.0 ? TCH_OK : tchi_parameter_read(context, &e->weight, 0, &e->m);
}

static tch_status walk_embedding(tch_context *context, embedding_call *e,
                                 tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count))
{
    tchi_arena weight = {0};
    tchi_arena tokens = {0};
    int64_t samples = e->t.gradient.samples;
    (void)tchi_parameter_place(&e->weight, &weight, tchi_compute_type(e->t.gradient.type), 0, 1);
    tokens_layout(&e->t, &e->chunk, &tokens, context, 0, 1);
    int64_t each = tokens.used + (e->per_sample ? weight.used : 0);
    int64_t fixed = e->per_sample ? 0 : weight.used;
    const tchi_walk walk = {.samples = samples,
                            .chunk = tchi_chunk_samples(context, samples, e->t.gradient.positions, each, fixed),
                            .layout = embedding_layout,
                            .begin = begin_embedding,
                            .part = part};
    return tchi_walk_samples(context, &walk, e);
}

static embedding_call call_for(const tchi_grad_call *call, bool per_sample)
{
    token_source tokens = tokens_of(call->layer, call->input, call->gradient);
    return (embedding_call){
        .call = call,
        .t = tokens,
        .per_sample = per_sample,
        .weight = tchi_parameter_of(call->weight, per_sample, 1, call->layer->rows, tokens.gradient.cols)};
}

/* The first chunk applies beta, even without samples. */
static tch_status sums_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    embedding_call *e = call;
    const tch_layer *layer = e->call->layer;
    const double *weights = e->call->weights;
    TCHI_TRY(tokens_read(context, &e->t, first, &e->chunk));
    TCHI_TRY(context->backend->sample->token_sums(
        context->state, &e->chunk.tokens, layer->padding_index, &e->chunk.g, weights != NULL ? weights + first : NULL,
        layer->scale, e->per_sample || first == 0 ? e->call->beta : 1.0, e->per_sample, &e->m, e->chunk.scratch));
    return e->per_sample ? tchi_parameter_write(context, &e->weight, first, &e->m) : TCH_OK;
}

tch_status tchi_embedding_samples(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, true);
    return walk_embedding(context, &e, sums_part);
}

tch_status tchi_embedding_sum(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, false);
    TCHI_TRY(walk_embedding(context, &e, sums_part));
    return tchi_parameter_write(context, &e.weight, 0, &e.m);
}

/* With a direction, or of the gradients with themselves: squared norms. */
static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    embedding_call *e = call;
    const tch_layer *layer = e->call->layer;
    TCHI_TRY(tokens_read(context, &e->t, first, &e->chunk));
    return context->backend->sample->token_dots(context->state, &e->chunk.tokens, layer->rows, layer->padding_index,
                                                &e->chunk.g, e->weight.given ? &e->m : NULL, NULL,
                                                e->weight.given ? layer->scale : layer->scale * layer->scale,
                                                e->call->numbers + first, e->chunk.scratch);
}

tch_status tchi_embedding_dots(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, false);
    return walk_embedding(context, &e, dots_part);
}

/* --- Gram matrices ------------------------------------------------------------------------------------------------ */

/* Forms the gradient of one sample at a time and multiplies the others with it at the rows of their tokens only. One
 * gradient in memory, or as many columns as fit; the work grows with the positions and not with the vocabulary, except
 * for clearing the gradient. */
typedef struct gram_buffers {
    tch_matrices sum;       /* B by B in float64: the caller's, or scratch */
    tch_matrices direction; /* columns of one gradient: V by at most `width` */
    token_chunk one;        /* the sample of the gradient */
    token_chunk block;      /* the samples to multiply with it */
} gram_buffers;

typedef struct gram_call {
    token_source t;
    const tch_tensor *gram;
    int64_t width; /* columns of a gradient at a time */
    int64_t chunk; /* samples of a block */
} gram_call;

/* The caller's matrix if its rows are contiguous, otherwise scratch. */
static tch_matrices place_sum(const tch_tensor *gram, tchi_arena *arena)
{
    tch_matrices m;
    bool in_place = tchi_scalar_of(gram->dtype) == TCH_SCALAR_F64 && tchi_matrices_of(gram, &m);
    return in_place ? m : tchi_scratch_matrices(arena, TCH_SCALAR_F64, 1, gram->shape[0], gram->shape[1]);
}

/* Fixed offsets first. */
static void blocks_layout(const gram_call *c, gram_buffers *b, tchi_arena *arena, tch_context *context, int64_t sample,
                          int64_t first, int64_t count)
{
    b->sum = place_sum(c->gram, arena);
    b->direction = tchi_scratch_matrices(arena, tchi_compute_type(c->t.gradient.type), 1, c->t.layer->rows, c->width);
    tokens_layout(&c->t, &b->one, arena, context, sample, 1);
    tokens_layout(&c->t, &b->block, arena, context, first, count);
}

/* sum(sample, k) += <gradient of the sample, that of sample k> for k >= `from` in the block, which begins at sample
 * `first`. */
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
        tch_matrices g = tchi_matrices_block(&b->one.g, 0, column, b->one.g.rows, n);
        tch_matrices h = tchi_matrices_block(&others, 0, column, others.rows, n);
        tch_matrices direction = tchi_matrices_new(b->direction.data, b->direction.type, 1, layer->rows, n);
        TCHI_TRY(t->sample->token_sums(context->state, &b->one.tokens, layer->padding_index, &g, NULL, layer->scale,
                                       0.0, 0, &direction, b->one.scratch));
        TCHI_TRY(t->sample->token_dots(context->state, &tokens, layer->rows, layer->padding_index, &h, &direction, NULL,
                                       layer->scale, out, b->block.scratch));
    }
    return TCH_OK;
}

/* All products of a block's samples with earlier ones: columns of the upper triangle. */
static tch_status add_block(tch_context *context, const gram_call *c, const tchi_arena *arena, int64_t first,
                            int64_t count)
{
    gram_buffers b;
    for (int64_t sample = 0; sample < first + count; sample++) {
        tchi_arena here = *arena;
        blocks_layout(c, &b, &here, context, sample, first, count);
        if (sample == 0) {
            TCHI_TRY(tokens_read(context, &c->t, first, &b.block));
        }
        TCHI_TRY(tokens_read(context, &c->t, sample, &b.one));
        TCHI_TRY(add_products(context, c, &b, sample, first, sample > first ? sample : first));
    }
    return TCH_OK;
}

/* Mirrors the upper triangle. */
static tch_status mirror_upper(tch_context *context, const tch_matrices *sum)
{
    for (int64_t i = 0; i + 1 < sum->rows; i++) {
        tch_matrices row = tchi_matrices_block(sum, i, i + 1, 1, sum->rows - i - 1);
        tch_matrices column = tchi_matrices_block(sum, i + 1, i, sum->rows - i - 1, 1);
        TCHI_TRY(tchi_transpose(context, &row, &column));
    }
    return TCH_OK;
}

/* Columns of the gradient and samples of a block: each gets half of the remaining scratch. */
static void choose_sizes(tch_context *context, gram_call *c)
{
    token_chunk chunk;
    tchi_arena fixed = {0};
    tchi_arena one = {0};
    int64_t column = c->t.layer->rows * tchi_scalar_size(tchi_compute_type(c->t.gradient.type));
    (void)place_sum(c->gram, &fixed);
    tokens_layout(&c->t, &chunk, &one, context, 0, 1);
    c->width = tchi_arena_fit(context, c->t.gradient.cols, 2 * column, fixed.used + 2 * one.used);
    int64_t used = fixed.used + one.used + c->width * column;
    c->chunk = tchi_chunk_samples(context, c->t.gradient.samples, c->t.gradient.positions, one.used, used);
}

tch_status tchi_embedding_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram)
{
    gram_call c = {.t = tokens_of(call->layer, call->input, call->gradient), .gram = gram};
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

/* --- tied weights ------------------------------------------------------------------------------------------------- */

/* The mixed term of a weight used as embedding and linear layer. The gradient of the linear layer, with a row per word,
 * is never formed; its output gradients are read in place. */
typedef struct tied_call {
    token_source tokens;
    tchi_side input, gradient; /* of the linear layer */
    double *norms;
    token_chunk chunk;
    tch_matrices a, g;
} tied_call;

static void tied_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    tied_call *c = call;
    tokens_layout(&c->tokens, &c->chunk, arena, context, first, count);
    c->a = tchi_side_place(&c->input, arena, first, count, TCHI_APART);
    c->g = tchi_side_place(&c->gradient, arena, first, count, TCHI_APART);
}

static tch_status tied_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    tied_call *c = call;
    const tch_layer *layer = c->tokens.layer;
    TCHI_TRY(tokens_read(context, &c->tokens, first, &c->chunk));
    TCHI_TRY(tchi_side_read(context, &c->input, first, &c->a));
    TCHI_TRY(tchi_side_read(context, &c->gradient, first, &c->g));
    return context->backend->sample->token_dots(context->state, &c->chunk.tokens, layer->rows, layer->padding_index,
                                                &c->chunk.g, &c->a, &c->g, 2.0 * layer->scale * layer->scale,
                                                c->norms + first, c->chunk.scratch);
}

/* Checks that the first `count` dimensions are equal. */
static bool same_sizes(const tch_tensor *a, const tch_tensor *b, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        if (a->shape[i] != b->shape[i]) {
            return false;
        }
    }
    return true;
}

static tch_status check_embedding_gradient(tch_context *context, const tch_tensor *tokens, const tch_tensor *gradient)
{
    TCHI_TRY(tchi_check_input(context, gradient, "embedding_gradient"));
    TCHI_TRY(tchi_check_float(gradient, "embedding_gradient"));
    if (gradient->ndim == tokens->ndim + 1 && same_sizes(gradient, tokens, tokens->ndim)) {
        return TCH_OK;
    }
    return tchi_wrong_shape(gradient, "embedding_gradient", "the shape of tokens and one more dimension");
}

/* One of the linear layer's tensors: [B, ..., cols], of the embedding gradient's type. */
static tch_status check_linear(tch_context *context, const tch_tensor *tensor, const char *name,
                               const tch_tensor *gradient, int64_t cols)
{
    TCHI_TRY(tchi_check_input(context, tensor, name));
    TCHI_TRY(tchi_check_same_dtype(tensor, name, gradient, "embedding_gradient"));
    if (tensor->ndim >= 2 && tensor->shape[0] == gradient->shape[0] && tensor->shape[tensor->ndim - 1] == cols) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected [%lld, ..., %lld]", name,
                     tchi_describe_shape(tensor, text, sizeof text), (long long)gradient->shape[0], (long long)cols);
}

static tch_status check_tied(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                             const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                             const tch_tensor *linear_gradient, const tch_tensor *norms)
{
    TCHI_TRY(tchi_check_layer(layer));
    if (layer->kind != TCH_LAYER_EMBEDDING) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "layer is of kind %s, expected EMBEDDING",
                         tchi_layer_name(layer->kind));
    }
    TCHI_TRY(tchi_check_input(context, tokens, "tokens"));
    TCHI_TRY(tchi_check_tokens(tokens, "tokens"));
    TCHI_TRY(tokens->ndim >= 1 ? TCH_OK : tchi_wrong_shape(tokens, "tokens", "[B, ...]"));
    TCHI_TRY(check_embedding_gradient(context, tokens, embedding_gradient));
    int64_t features = embedding_gradient->shape[embedding_gradient->ndim - 1];
    TCHI_TRY(check_linear(context, linear_input, "linear_input", embedding_gradient, features));
    TCHI_TRY(check_linear(context, linear_gradient, "linear_gradient", embedding_gradient, layer->rows));
    if (linear_gradient->ndim != linear_input->ndim ||
        !same_sizes(linear_gradient, linear_input, linear_input->ndim - 1)) {
        return tchi_wrong_shape(linear_gradient, "linear_gradient", "the positions of linear_input");
    }
    TCHI_TRY(tchi_check_output(context, norms, "norms"));
    TCHI_TRY(tchi_check_numbers(context, norms, "norms", tokens->shape[0]));
    const tchi_named inputs[] = {{tokens, "tokens"},
                                 {embedding_gradient, "embedding_gradient"},
                                 {linear_input, "linear_input"},
                                 {linear_gradient, "linear_gradient"}};
    const tchi_named outputs[] = {{norms, "norms"}};
    return tchi_check_all_disjoint(outputs, 1, inputs, 4);
}

tch_status tch_grad_tied_norms(tch_context *context, const tch_layer *layer, const tch_tensor *tokens,
                               const tch_tensor *embedding_gradient, const tch_tensor *linear_input,
                               const tch_tensor *linear_gradient, tch_tensor *norms)
{
    TCHI_ENTER_FOR(context, "tch_grad_tied_norms", sample);
    TCHI_TRY(check_tied(context, layer, tokens, embedding_gradient, linear_input, linear_gradient, norms));
    const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    tied_call c = {.tokens = tokens_of(layer, tokens, embedding_gradient),
                   .input = tchi_input_side(&linear, linear_input),
                   .gradient = tchi_gradient_side(&linear, linear_gradient),
                   .norms = tchi_tensor_data(norms)};
    tchi_arena one = {0};
    int64_t samples = c.input.samples;
    tied_layout(&c, &one, context, 0, 1);
    const tchi_walk walk = {.samples = samples,
                            .chunk = tchi_chunk_samples(context, samples, c.input.positions, one.used, 0),
                            .layout = tied_layout,
                            .part = tied_part};
    return samples == 0 ? TCH_OK : tchi_walk_samples(context, &walk, &c);
}

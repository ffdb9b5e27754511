/* Embeddings: the gradient of a sample has a row for each token that occurs in it, the sum of the output gradients at
 * its positions. Tokens outside the table and the padding index have none; the operations table sees to that, so that
 * no token is ever looked at on the host. */
#include "embedding.h"

#include "core/status.h"
#include "linalg/batch.h"

#include "call.h"
#include "parameters.h"
#include "sample_rows.h"
#include "walk.h"

/* --- samples at hand --------------------------------------------------------------------------------------------- */

tchi_tokens tchi_tokens_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *gradient)
{
    const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    return (tchi_tokens){layer, input, tchi_gradient_side(&linear, gradient)};
}

void tchi_tokens_layout(const tchi_tokens *t, tchi_token_chunk *chunk, tchi_arena *arena, tch_context *context,
                        int64_t first, int64_t count)
{
    chunk->tokens = tchi_rows_place(t->input, tchi_scalar_of(t->input->dtype), arena, first, count);
    chunk->g = tchi_side_place(&t->gradient, arena, first, count, TCHI_APART);
    chunk->scratch = tchi_arena_take(
        arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_TOKENS, t->gradient.type, count,
                                                       t->gradient.positions, t->gradient.cols, t->layer->rows));
}

tch_status tchi_tokens_read(tch_context *context, const tchi_tokens *t, int64_t first, const tchi_token_chunk *chunk)
{
    TCHI_TRY(tchi_rows_read(context, t->input, first, &chunk->tokens));
    return tchi_side_read(context, &t->gradient, first, &chunk->g);
}

/* --- the calls --------------------------------------------------------------------------------------------------- */

typedef struct embedding_call {
    const tchi_grad_call *call;
    tchi_tokens t;
    tchi_parameter weight; /* of each sample, a direction, or where the sum goes */
    bool per_sample;
    tch_matrices m; /* the weight: V by d */
    tchi_token_chunk chunk;
} embedding_call;

/* One weight keeps its place from chunk to chunk. */
static void embedding_layout(void *call, tchi_arena *arena, tch_context *context, int64_t first, int64_t count)
{
    embedding_call *e = call;
    tch_scalar type = tchi_compute_type(e->t.gradient.type);
    e->m = tchi_parameter_place(&e->weight, arena, type, e->per_sample ? first : 0, e->per_sample ? count : 1);
    tchi_tokens_layout(&e->t, &e->chunk, arena, context, first, count);
}

static tch_status walk_embedding(tch_context *context, embedding_call *e,
                                 tch_status (*begin)(tch_context *context, void *call),
                                 tch_status (*part)(tch_context *context, void *call, int64_t first, int64_t count))
{
    tchi_arena weight = {0};
    tchi_arena tokens = {0};
    int64_t samples = e->t.gradient.samples;
    (void)tchi_parameter_place(&e->weight, &weight, tchi_compute_type(e->t.gradient.type), 0, 1);
    tchi_tokens_layout(&e->t, &e->chunk, &tokens, context, 0, 1);
    int64_t each = tokens.used + (e->per_sample ? weight.used : 0);
    int64_t fixed = e->per_sample ? 0 : weight.used;
    const tchi_walk walk = {.samples = samples,
                            .chunk = tchi_chunk_samples(context, samples, e->t.gradient.positions, each, fixed),
                            .layout = embedding_layout,
                            .begin = begin,
                            .part = part};
    return tchi_walk_samples(context, &walk, e);
}

static embedding_call call_for(const tchi_grad_call *call, bool per_sample)
{
    tchi_tokens tokens = tchi_tokens_of(call->layer, call->input, call->gradient);
    return (embedding_call){
        .call = call,
        .t = tokens,
        .per_sample = per_sample,
        .weight = tchi_parameter_of(call->weight, per_sample, 1, call->layer->rows, tokens.gradient.cols)};
}

/* The first chunk brings beta in, also where it has no samples. */
static tch_status sums_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    (void)count;
    embedding_call *e = call;
    const tch_layer *layer = e->call->layer;
    const double *weights = e->call->weights;
    TCHI_TRY(tchi_tokens_read(context, &e->t, first, &e->chunk));
    TCHI_TRY(context->backend->sample->token_sums(
        context->state, &e->chunk.tokens, layer->padding_index, &e->chunk.g, weights != NULL ? weights + first : NULL,
        layer->scale, e->per_sample || first == 0 ? e->call->beta : 1.0, e->per_sample, &e->m, e->chunk.scratch));
    return e->per_sample ? tchi_parameter_write(context, &e->weight, first, &e->m) : TCH_OK;
}

static tch_status begin_sums(tch_context *context, void *call)
{
    embedding_call *e = call;
    return e->call->beta == 0.0 ? TCH_OK : tchi_parameter_read(context, &e->weight, 0, &e->m);
}

tch_status tchi_embedding_samples(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, true);
    return walk_embedding(context, &e, NULL, sums_part);
}

tch_status tchi_embedding_sum(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, false);
    TCHI_TRY(walk_embedding(context, &e, begin_sums, sums_part));
    return tchi_parameter_write(context, &e.weight, 0, &e.m);
}

/* With a direction, or without one of the gradients with themselves: their squared norms. */
static tch_status dots_part(tch_context *context, void *call, int64_t first, int64_t count)
{
    (void)count;
    embedding_call *e = call;
    const tch_layer *layer = e->call->layer;
    TCHI_TRY(tchi_tokens_read(context, &e->t, first, &e->chunk));
    return context->backend->sample->token_dots(context->state, &e->chunk.tokens, layer->rows, layer->padding_index,
                                                &e->chunk.g, e->weight.given ? &e->m : NULL, NULL,
                                                e->weight.given ? layer->scale : layer->scale * layer->scale,
                                                e->call->numbers + first, e->chunk.scratch);
}

static tch_status begin_dots(tch_context *context, void *call)
{
    embedding_call *e = call;
    TCHI_TRY(tchi_clear_numbers(context, e->call->accumulate, e->call->numbers, e->t.gradient.samples));
    return tchi_parameter_read(context, &e->weight, 0, &e->m);
}

tch_status tchi_embedding_dots(tch_context *context, const tchi_grad_call *call)
{
    embedding_call e = call_for(call, false);
    return walk_embedding(context, &e, begin_dots, dots_part);
}

/* Embeddings: the gradient of a sample has a row for each token that occurs in it, the sum of the output gradients at
 * its positions. Tokens outside the table and the padding index have none; the operations table sees to that, so that
 * no token is ever looked at on the host. */
#include "embedding.h"

#include "core/status.h"
#include "linalg/batch.h"

#include "kinds.h"
#include "sample_rows.h"

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

/* Samples at a time, when each takes `bytes_each` beside its tokens and gradients, and all of them `bytes_fixed`. */
static tchi_chunks choose_chunks(tch_context *context, const tchi_tokens *t, int64_t bytes_each, int64_t bytes_fixed)
{
    tchi_token_chunk one;
    tchi_arena arena = {0};
    tchi_tokens_layout(t, &one, &arena, context, 0, 1);
    int64_t samples = t->gradient.samples;
    int64_t each = arena.used + bytes_each;
    return (tchi_chunks){samples, tchi_chunk_samples(context, samples, t->gradient.positions, each, bytes_fixed)};
}

/* --- gradients --------------------------------------------------------------------------------------------------- */

/* The gradients of `count` samples, as matrices of V by d. */
static tch_matrices place_gradients(const tchi_tokens *t, const tch_tensor *weight, tchi_arena *arena, int64_t first,
                                    int64_t count, tch_matrices *rows)
{
    *rows = tchi_rows_place(weight, tchi_compute_type(t->gradient.type), arena, first, count);
    return tchi_matrices_new(rows->data, rows->type, count, t->layer->rows, t->gradient.cols);
}

static tch_status samples_part(tch_context *context, const tchi_tokens *t, const tch_tensor *weight, int64_t first,
                               int64_t count)
{
    tchi_arena arena = {0};
    tchi_token_chunk chunk;
    tch_matrices rows;
    tch_matrices out = place_gradients(t, weight, &arena, first, count, &rows);
    tchi_tokens_layout(t, &chunk, &arena, context, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    out = place_gradients(t, weight, &arena, first, count, &rows);
    tchi_tokens_layout(t, &chunk, &arena, context, first, count);
    TCHI_TRY(tchi_tokens_read(context, t, first, &chunk));
    TCHI_TRY(context->backend->sample->token_sums(context->state, &chunk.tokens, t->layer->padding_index, &chunk.g,
                                                  NULL, t->layer->scale, 0.0, 1, &out, chunk.scratch));
    return tchi_rows_write(context, weight, first, &rows);
}

tch_status tchi_embedding_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *gradient, tch_tensor *weight)
{
    tchi_tokens t = tchi_tokens_of(layer, input, gradient);
    tch_scalar type = tchi_compute_type(t.gradient.type);
    int64_t each = layer->rows * t.gradient.cols * tchi_scalar_size(type);
    tchi_chunks chunks = choose_chunks(context, &t, tchi_rows_in_place(weight, type) ? 0 : each, 0);
    for (int64_t first = 0; first < chunks.samples; first += chunks.size) {
        TCHI_TRY(samples_part(context, &t, weight, first, tchi_chunk_at(&chunks, first)));
    }
    return TCH_OK;
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

static tch_status open_chunk(tch_context *context, const tchi_tokens *t, int64_t first, int64_t count,
                             tchi_token_chunk *chunk)
{
    tchi_arena arena = {0};
    tchi_tokens_layout(t, chunk, &arena, context, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tchi_tokens_layout(t, chunk, &arena, context, first, count);
    return tchi_tokens_read(context, t, first, chunk);
}

tch_status tchi_embedding_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                const tch_tensor *gradient, int32_t accumulate, double *norms)
{
    tchi_tokens t = tchi_tokens_of(layer, input, gradient);
    tchi_chunks chunks = choose_chunks(context, &t, 0, 0);
    double scale = layer->scale * layer->scale;
    for (int64_t first = 0; first < chunks.samples; first += chunks.size) {
        tchi_token_chunk chunk;
        TCHI_TRY(open_chunk(context, &t, first, tchi_chunk_at(&chunks, first), &chunk));
        if (first == 0) {
            TCHI_TRY(tchi_clear_numbers(context, accumulate, norms, chunks.samples));
        }
        TCHI_TRY(context->backend->sample->token_dots(context->state, &chunk.tokens, layer->rows, layer->padding_index,
                                                      &chunk.g, NULL, NULL, scale, norms + first, chunk.scratch));
    }
    return TCH_OK;
}

/* --- a parameter-sized matrix in scratch where the caller's cannot be used --------------------------------------- */

static bool parameter_in_place(const tch_tensor *parameter, tch_scalar type)
{
    tch_matrices m;
    return tchi_scalar_of(parameter->dtype) == type && tchi_matrices_of(parameter, &m);
}

static tch_matrices place_parameter(const tch_tensor *parameter, tch_scalar type, tchi_arena *arena)
{
    tch_matrices m;
    if (parameter_in_place(parameter, type)) {
        (void)tchi_matrices_of(parameter, &m);
        return m;
    }
    return tchi_scratch_matrices(arena, type, 1, parameter->shape[0], parameter->shape[1]);
}

static tch_status read_parameter(tch_context *context, const tch_tensor *parameter, const tch_matrices *m)
{
    tchi_batch batch = tchi_batch_of(parameter, 2);
    return parameter_in_place(parameter, m->type) ? TCH_OK : tchi_batch_read(context, &batch, 0, m);
}

static tch_status write_parameter(tch_context *context, const tch_tensor *parameter, const tch_matrices *m)
{
    tchi_batch batch = tchi_batch_of(parameter, 2);
    return parameter_in_place(parameter, m->type) ? TCH_OK : tchi_batch_write(context, &batch, 0, m);
}

static int64_t parameter_bytes(const tch_tensor *parameter, tch_scalar type)
{
    tchi_arena arena = {0};
    (void)place_parameter(parameter, type, &arena);
    return arena.used;
}

/* The parameter comes first, so that it stays where it is from chunk to chunk. */
static void parameter_layout(const tchi_tokens *t, const tch_tensor *parameter, tch_matrices *m,
                             tchi_token_chunk *chunk, tchi_arena *arena, tch_context *context, int64_t first,
                             int64_t count)
{
    *m = place_parameter(parameter, tchi_compute_type(t->gradient.type), arena);
    tchi_tokens_layout(t, chunk, arena, context, first, count);
}

/* Memory for all chunks; *m is the parameter from here on. */
static tch_status parameter_open(tch_context *context, const tchi_tokens *t, const tch_tensor *parameter,
                                 const tchi_chunks *chunks, tchi_arena *arena, tch_matrices *m)
{
    tchi_token_chunk chunk;
    tchi_arena last = {0};
    *arena = (tchi_arena){0};
    parameter_layout(t, parameter, m, &chunk, arena, context, 0, tchi_chunk_at(chunks, 0));
    parameter_layout(t, parameter, m, &chunk, &last, context, 0, tchi_chunk_last(chunks));
    arena->used = last.used > arena->used ? last.used : arena->used;
    TCHI_TRY(tchi_arena_reserve(context, arena));
    tchi_arena start = *arena;
    *m = place_parameter(parameter, tchi_compute_type(t->gradient.type), &start);
    return TCH_OK;
}

static tch_status parameter_chunk(tch_context *context, const tchi_tokens *t, const tch_tensor *parameter,
                                  tchi_arena arena, int64_t first, int64_t count, tchi_token_chunk *chunk)
{
    tch_matrices m;
    parameter_layout(t, parameter, &m, chunk, &arena, context, first, count);
    return tchi_tokens_read(context, t, first, chunk);
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

/* The first chunk brings beta in, also where it has no samples. */
tch_status tchi_embedding_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                              const tch_tensor *gradient, const double *weights, double beta, tch_tensor *weight)
{
    tchi_tokens t = tchi_tokens_of(layer, input, gradient);
    tchi_chunks chunks = choose_chunks(context, &t, 0, parameter_bytes(weight, tchi_compute_type(t.gradient.type)));
    tchi_arena arena;
    tch_matrices out;
    TCHI_TRY(parameter_open(context, &t, weight, &chunks, &arena, &out));
    if (beta != 0.0) {
        TCHI_TRY(read_parameter(context, weight, &out));
    }
    int64_t first = 0;
    do {
        tchi_token_chunk chunk;
        TCHI_TRY(parameter_chunk(context, &t, weight, arena, first, tchi_chunk_at(&chunks, first), &chunk));
        TCHI_TRY(context->backend->sample->token_sums(context->state, &chunk.tokens, layer->padding_index, &chunk.g,
                                                      weights != NULL ? weights + first : NULL, layer->scale,
                                                      first == 0 ? beta : 1.0, 0, &out, chunk.scratch));
        first += chunks.size;
    } while (first < chunks.samples);
    return write_parameter(context, weight, &out);
}

/* --- inner products with a direction ----------------------------------------------------------------------------- */

tch_status tchi_embedding_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                               const tch_tensor *gradient, const tch_tensor *weight, int32_t accumulate, double *dots)
{
    tchi_tokens t = tchi_tokens_of(layer, input, gradient);
    tchi_chunks chunks = choose_chunks(context, &t, 0, parameter_bytes(weight, tchi_compute_type(t.gradient.type)));
    tchi_arena arena;
    tch_matrices w;
    if (chunks.samples == 0) {
        return TCH_OK;
    }
    TCHI_TRY(parameter_open(context, &t, weight, &chunks, &arena, &w));
    TCHI_TRY(read_parameter(context, weight, &w));
    TCHI_TRY(tchi_clear_numbers(context, accumulate, dots, chunks.samples));
    for (int64_t first = 0; first < chunks.samples; first += chunks.size) {
        tchi_token_chunk chunk;
        TCHI_TRY(parameter_chunk(context, &t, weight, arena, first, tchi_chunk_at(&chunks, first), &chunk));
        TCHI_TRY(context->backend->sample->token_dots(context->state, &chunk.tokens, layer->rows, layer->padding_index,
                                                      &chunk.g, &w, NULL, layer->scale, dots + first, chunk.scratch));
    }
    return TCH_OK;
}

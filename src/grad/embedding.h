/* Tokens and the output gradients of an embedding, a chunk of samples at a time: what the files on embeddings share. */
#ifndef TCHI_GRAD_EMBEDDING_H
#define TCHI_GRAD_EMBEDDING_H

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

#include "positions.h"

typedef struct tchi_tokens {
    const tch_layer *layer;
    const tch_tensor *input; /* int32 or int64 [B, ...] */
    tchi_side gradient;      /* positions by d for each sample */
} tchi_tokens;

/* Some of the samples, as the operations table takes them. */
typedef struct tchi_token_chunk {
    tch_matrices tokens, g;
    void *scratch; /* of TCH_SCRATCH_TOKENS */
} tchi_token_chunk;

tchi_tokens tchi_tokens_of(const tch_layer *layer, const tch_tensor *input, const tch_tensor *gradient);

/* Samples [first, first + count) in the layout of a call, which runs twice, and then what has to be copied. */
void tchi_tokens_layout(const tchi_tokens *t, tchi_token_chunk *chunk, tchi_arena *arena, tch_context *context,
                        int64_t first, int64_t count);
tch_status tchi_tokens_read(tch_context *context, const tchi_tokens *t, int64_t first, const tchi_token_chunk *chunk);

#endif

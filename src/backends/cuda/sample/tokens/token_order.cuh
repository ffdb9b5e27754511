/* Positions sorted by token, stably. token_order.cu sorts, tokens.cu sums over runs of equal tokens. */
#ifndef TCHI_CUDA_TOKEN_ORDER_CUH
#define TCHI_CUDA_TOKEN_ORDER_CUH

#include "backends/cuda/device/elements.cuh"

/* Tokens of all samples, n = sample * positions + position, sorted in groups of `length`: one group per sample, or one
 * in total. */
typedef struct tchi_cuda_token_list {
    const void *tokens; /* samples by positions */
    tch_scalar type;    /* int32 or int64 */
    int64_t ld, positions;
    int64_t rows, padding; /* valid tokens: 0 to rows, without padding */
    int64_t groups, length;
} tchi_cuda_token_list;

static inline tchi_cuda_token_list tchi_cuda_token_list_of(const tch_matrices *tokens, int64_t rows, int64_t padding,
                                                           bool apart)
{
    int64_t groups = apart ? tokens->rows : 1;
    int64_t length = apart ? tokens->cols : tokens->rows * tokens->cols;
    return {tokens->data, tokens->type, tokens->ld, tokens->cols, rows, padding, groups, length};
}

/* A token; `rows` for ignored ones. */
static __device__ inline int64_t tchi_cuda_token_at(const tchi_cuda_token_list &list, int64_t sample, int64_t position)
{
    int64_t index = sample * list.ld + position;
    int64_t token = list.type == TCH_SCALAR_I64 ? ((const int64_t *)list.tokens)[index]
                                                : (int64_t)((const int32_t *)list.tokens)[index];
    return token >= 0 && token < list.rows && token != list.padding ? token : list.rows;
}

static __device__ inline int64_t tchi_cuda_token_of(const tchi_cuda_token_list &list, int64_t n)
{
    int64_t sample = n / list.positions;
    return tchi_cuda_token_at(list, sample, n - sample * list.positions);
}

/* Bytes of scratch, a multiple of 16. */
int64_t tchi_cuda_token_order_scratch(int64_t groups, int64_t length);

/* Queues the sort; *order points into scratch, to positions within each group. Groups have fewer than 2^31. */
tch_status tchi_cuda_order_tokens(const tchi_cuda_state *state, const tchi_cuda_token_list &list, void *scratch,
                                  const int32_t **order);

#endif

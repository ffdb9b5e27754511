/* The rectangles of an update as kernel parameters: by value, as many as fit, each divided into chunks, one per block
 * of threads. The division depends on the rectangle alone, so that results do not depend on which rectangles share a
 * call. */
#ifndef TCHI_CUDA_UPDATES_RECTS_H
#define TCHI_CUDA_UPDATES_RECTS_H

#include <torchium/backend.h>

/* Kernel parameters are limited to 32764 bytes; this many rectangles leave more than a kilobyte for the others. */
#define TCHI_CUDA_MAX_RECTS 212

/* Data slots of a rectangle. */
typedef enum tchi_cuda_slot {
    TCHI_CUDA_PARAM = 0,
    TCHI_CUDA_MASTER = 1,
    TCHI_CUDA_GRAD = 2,
    TCHI_CUDA_STATE_0 = 3,
    TCHI_CUDA_STATE_1 = 4,
    TCHI_CUDA_STATE_2 = 5, /* with encoded moments: the scales of state 0, */
    TCHI_CUDA_BLOCK_0 = 6,
    TCHI_CUDA_BLOCK_1 = 7, /* and, without blocks, of state 1 */
    TCHI_CUDA_SLOTS = 8
} tchi_cuda_slot;

/* Chunks are rectangles with a power of two of elements, with sides that are powers of two from 4 on, in row-major
 * order, `across` per row; the last ones extend beyond the rectangle. */
typedef struct tchi_cuda_rect {
    void *data[TCHI_CUDA_SLOTS];
    const tch_clock *clock;
    int64_t rows, cols, stride, block_ld, first, skipped;
    int32_t across;
    int32_t parameter, block_index;
    uint8_t log_width, log_height; /* of a chunk */
    uint8_t transposed : 1, by_column : 1;
    uint8_t wide; /* bit s: in slot s every fourth element of a row is aligned for vec4s, or the slot is empty */
    double factor;
} tchi_cuda_rect;

/* The work of one launch. */
typedef struct tchi_cuda_rects {
    const tch_hyper *hyper;
    const int32_t *skip;
    const float *grad_scale;
    uint64_t seed;
    tch_scalar real, param_type, grad_type, block_type;
    int32_t plain;  /* all types of the operation are the compute type */
    int32_t shorts; /* they are float32, but for blocks, which are bfloat16 */
    int32_t fp16;   /* or float16 */
    int32_t even;   /* every chunk is full and aligned, and no rectangle has a master copy */
    int32_t maximize, stochastic;
    int64_t before; /* chunks of previous launches */
    int32_t count;
    int32_t first_chunk[TCHI_CUDA_MAX_RECTS + 1]; /* per rectangle, and at the end their total */
    tchi_cuda_rect rect[TCHI_CUDA_MAX_RECTS];
} tchi_cuda_rects;

/* The part of a rectangle that an operation uses. */
typedef enum tchi_cuda_use {
    TCHI_CUDA_PARAMS = 0,
    TCHI_CUDA_BLOCKS = 1,
    TCHI_CUDA_ROWS = 2,     /* also blocks; contiguous rows are not merged */
    TCHI_CUDA_NO_BLOCKS = 3 /* chunks as with blocks, which are all NULL */
} tchi_cuda_use;

TCH_BEGIN_DECLS

/* Packs as many rectangles of the update as fit one launch, from *next on, into chunks of 2^log_chunk elements, and
 * advances *next; empty ones are skipped. Returns the number of chunks, 0 at the end. `blocks` is a tchi_cuda_use. With
 * `fp16`, blocks are float16 at the front of these two buffers, where blocks of the compute type would be. */
int32_t tchi_cuda_pack(const tch_update *update, int log_chunk, int blocks, void *const *fp16, int64_t *next,
                       tchi_cuda_rects *list);

/* Chunks of one rectangle, as tchi_cuda_pack cuts it. */
int64_t tchi_cuda_chunks_of(const tch_rect *rect, int log_chunk, int blocks);

/* Upper bound of the chunks of `rects` rectangles with `elements` in total. */
int64_t tchi_cuda_most_chunks(int64_t elements, int64_t rects, int log_chunk);

TCH_END_DECLS

#endif

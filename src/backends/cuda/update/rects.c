/* Divides rectangles into chunks: as few as possible, since the part outside a rectangle is idle threads, with rows
 * long enough for memory on both sides of a transposition. */
#include "rects.h"

#include "backends/cuda/runtime/scalars.h"

/* The shortest row of a chunk if the rectangle has longer ones: 32 float32 elements are 128 bytes, a cache line. */
#define LOG_LINE 5

#define LOG_FOUR 2
#define LOG_CODES 7

_Static_assert(1 << LOG_CODES == TCH_CODE_BLOCK, "a warp has no block of codes");
_Static_assert(sizeof(tchi_cuda_rects) <= 31744, "the rectangles leave no room for a kernel's other parameters");

/* The extent of a rectangle after merging contiguous rows. */
typedef struct extent {
    int64_t rows, cols;
    int transposed;
    int coded; /* a warp, 128 neighbors in a chunk, has a block of codes */
} extent;

typedef struct cut {
    int log_width, log_height;
    int64_t across, down;
} cut;

static extent extent_of(const tch_rect *rect, int blocks)
{
    extent e = {rect->rows, rect->cols, blocks && rect->transposed, rect->scale[0] != NULL};
    int gapless = e.rows > 1 && rect->stride == e.cols && rect->skipped == 0 && !e.transposed &&
                  (!blocks || rect->block_ld == e.cols);
    if (gapless && blocks != TCHI_CUDA_ROWS) {
        e.cols *= e.rows;
        e.rows = 1;
    }
    return e;
}

/* The least log2, from 4 elements up to a line, that covers a side of n elements. */
static int log_least(int64_t n)
{
    int log = LOG_FOUR;
    while (log < LOG_LINE && (int64_t)1 << log < n) {
        log++;
    }
    return log;
}

static int64_t ceil_shift(int64_t n, int log)
{
    return (n + ((int64_t)1 << log) - 1) >> log;
}

/* Of the widths with the fewest chunks the widest, or for transposed blocks the squarest. */
static cut cut_up(extent e, int log_chunk)
{
    int least = e.coded ? LOG_CODES : log_least(e.cols);
    int most = e.transposed ? log_chunk - (e.coded ? LOG_FOUR : log_least(e.rows)) : log_chunk;
    cut best = {0, 0, 0, 0};
    for (int log = least; log <= most; log++) {
        cut c = {log, log_chunk - log, ceil_shift(e.cols, log), ceil_shift(e.rows, log_chunk - log)};
        int64_t more = best.across == 0 ? -1 : c.across * c.down - best.across * best.down;
        if (more < 0 || (more == 0 && (!e.transposed || 2 * log <= log_chunk))) {
            best = c;
        }
    }
    return best;
}

int64_t tchi_cuda_chunks_of(const tch_rect *rect, int log_chunk, int blocks)
{
    if (rect->rows == 0 || rect->cols == 0) {
        return 0;
    }
    cut c = cut_up(extent_of(rect, blocks), log_chunk);
    return c.across * c.down;
}

/* A side of a chunk is at most twice as long as needed, and four times if 1 becomes 4: at most three times the
 * rectangle is outside, or there is a single chunk. */
int64_t tchi_cuda_most_chunks(int64_t elements, int64_t rects, int log_chunk)
{
    return ceil_shift(elements, log_chunk - LOG_FOUR) + rects;
}

/* --- packing ----------------------------------------------------------------------------------------------------- */

static tch_scalar type_of(const tch_update *update, int use, int slot)
{
    int kept = slot == TCHI_CUDA_STATE_0 || (slot == TCHI_CUDA_STATE_1 && use == TCHI_CUDA_PARAMS);

    switch (slot) {
    case TCHI_CUDA_PARAM:
        return update->param_type;
    case TCHI_CUDA_MASTER:
        return TCH_SCALAR_F32;
    case TCHI_CUDA_GRAD:
        return update->grad_type;
    case TCHI_CUDA_BLOCK_0:
    case TCHI_CUDA_BLOCK_1:
        return update->block_type;
    default:
        return kept && update->moments == TCH_MOMENTS_BF16 ? TCH_SCALAR_BF16 : update->real;
    }
}

/* vec4s are 16 bytes, 8 for 2-byte elements; for float64 two loads of 16. */
static int is_wide(const void *data, tch_scalar type, int64_t rows, int64_t ld)
{
    uintptr_t alignment = tchi_cuda_scalar_size(type) == 2 ? 8 : 16;
    return data == NULL || ((uintptr_t)data % alignment == 0 && (rows == 1 || ld % 4 == 0));
}

static uint8_t wide_slots(const tch_update *update, int use, const tchi_cuda_rect *p)
{
    unsigned wide = 0;
    for (int slot = 0; slot < TCHI_CUDA_SLOTS; slot++) {
        int in_block = slot >= TCHI_CUDA_BLOCK_0;
        int64_t rows = in_block && p->transposed ? p->cols : p->rows;
        int64_t ld = in_block ? p->block_ld : p->stride;
        wide |= (unsigned)is_wide(p->data[slot], type_of(update, use, slot), rows, ld) << slot;
    }
    return (uint8_t)wide;
}

static void pack_rect(const tch_update *update, int use, const tch_rect *from, void *const block[2], extent e, cut c,
                      tchi_cuda_rect *to)
{
    *to = (tchi_cuda_rect){
        .data = {from->param, from->master, from->grad, from->state[0], from->state[1], from->state[2], block[0],
                 block[1]},
        .clock = from->clock,
        .rows = e.rows,
        .cols = e.cols,
        .stride = from->stride,
        .block_ld = from->block_ld,
        .first = from->first,
        .skipped = from->skipped,
        .across = (int32_t)c.across,
        .parameter = from->parameter,
        .block_index = from->block_index,
        .factor = from->factor,
        .log_width = (uint8_t)c.log_width,
        .log_height = (uint8_t)c.log_height,
        .transposed = e.transposed != 0,
        .by_column = from->by_column != 0,
    };
    to->wide = wide_slots(update, use, to);
    if (update->moments == TCH_MOMENTS_CODES) {
        to->data[TCHI_CUDA_STATE_2] = from->scale[0];
        to->data[TCHI_CUDA_BLOCK_1] = use == TCHI_CUDA_PARAMS ? from->scale[1] : block[1];
    }
}

static void pack_shared(const tch_update *update, int blocks, tchi_cuda_rects *list)
{
    list->hyper = update->hyper;
    list->skip = update->skip;
    list->grad_scale = update->grad_scale;
    list->seed = update->seed;
    list->real = update->real;
    list->param_type = update->param_type;
    list->grad_type = update->grad_type;
    list->block_type = update->block_type;
    list->plain = update->param_type == update->real && update->grad_type == update->real &&
                  (!blocks || update->block_type == update->real);
    int floats = update->real == TCH_SCALAR_F32 && update->param_type == update->real &&
                 update->grad_type == update->real && blocks;
    list->shorts = floats && update->block_type == TCH_SCALAR_BF16;
    list->fp16 = floats && update->block_type == TCH_SCALAR_F16;
    list->maximize = update->maximize;
    list->stochastic = update->stochastic;
}

static void *block_of(const tch_update *update, const tch_rect *rect, int k, int use, void *const *fp16)
{
    char *at = rect->block[k];
    if (at == NULL || use == TCHI_CUDA_NO_BLOCKS) {
        return NULL;
    }
    return fp16 == NULL ? at : (char *)fp16[k] + (at - (char *)fp16[k]) / tchi_cuda_scalar_size(update->real) * 2;
}

/* 31 bits suffice for the chunks of a launch: more would need at least 2^40 elements. */
int32_t tchi_cuda_pack(const tch_update *update, int log_chunk, int blocks, void *const *fp16, int64_t *next,
                       tchi_cuda_rects *list)
{
    int64_t chunks = 0;
    pack_shared(update, blocks, list);
    list->count = 0;
    list->even = 1;
    for (; *next < update->count && list->count < TCHI_CUDA_MAX_RECTS; ++*next) {
        const tch_rect *rect = &update->rects[*next];
        if (rect->rows == 0 || rect->cols == 0) {
            continue;
        }
        extent e = extent_of(rect, blocks);
        cut c = cut_up(e, log_chunk);
        list->first_chunk[list->count] = (int32_t)chunks;
        void *const block[2] = {block_of(update, rect, 0, blocks, fp16), block_of(update, rect, 1, blocks, fp16)};
        pack_rect(update, blocks, rect, block, e, c, &list->rect[list->count]);
        const tchi_cuda_rect *p = &list->rect[list->count++];
        int64_t beyond = (p->rows & ((1 << p->log_height) - 1)) | (p->cols & ((1 << p->log_width) - 1));
        list->even &= beyond == 0 && p->wide == 0xFF && p->data[TCHI_CUDA_MASTER] == NULL;
        chunks += c.across * c.down;
    }
    list->first_chunk[list->count] = (int32_t)chunks;
    return (int32_t)chunks;
}

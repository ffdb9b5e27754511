/* Copies between arrays of any strides, with type conversion. Contiguous dimensions are merged, the smallest stride in
 * dst becomes the inner loop, and a row that is strided on either side passes through a small buffer: gather, convert,
 * scatter. */
#include "backends/axes.h"
#include "backends/cpu/cpu.h"
#include "core/arith.h"

#include <string.h>

#include <torchium/tensor.h>

#define RUN 256 /* elements of a row at once: their buffers fit L1 */
#define ROWS 64 /* rows that share a strip of RUN columns, so that a transposed source is read by whole cache lines */

typedef struct copy_ctx {
    tchi_axis axes[TCH_MAX_RANK]; /* the last one is the inner loop */
    int32_t rank;
    const tch_array *dst, *src;
    int64_t rows; /* product of all sizes but the last */
} copy_ctx;

static void merge_axes(copy_ctx *ctx)
{
    ctx->rank = tchi_merge_axes(ctx->dst, (ctx->src != NULL ? ctx->src : ctx->dst)->strides, ctx->axes);
    ctx->rows = tchi_count_rows(ctx->axes, ctx->rank - 1);
}

/* Offsets of the first element of a row on both sides. */
static void row_offsets(const copy_ctx *ctx, int64_t row, int64_t *dst, int64_t *src)
{
    *dst = *src = 0;
    for (int32_t i = ctx->rank - 2; i >= 0; i--) {
        int64_t index = row % ctx->axes[i].size;
        row /= ctx->axes[i].size;
        *dst += index * ctx->axes[i].dst;
        *src += index * ctx->axes[i].src;
    }
}

static inline __attribute__((always_inline)) void copy_sized(int64_t n, int64_t size, char *dst, int64_t dst_stride,
                                                             const char *src, int64_t src_stride)
{
    for (int64_t i = 0; i < n; i++) {
        memcpy(dst + i * dst_stride * size, src + i * src_stride * size, (size_t)size);
    }
}

/* Strides are in elements. */
static void copy_strided(int64_t n, int64_t size, char *dst, int64_t dst_stride, const char *src, int64_t src_stride)
{
    if (size == 8) {
        copy_sized(n, 8, dst, dst_stride, src, src_stride);
    } else if (size == 4) {
        copy_sized(n, 4, dst, dst_stride, src, src_stride);
    } else {
        copy_sized(n, 2, dst, dst_stride, src, src_stride);
    }
}

static void copy_run(const copy_ctx *ctx, int64_t n, char *dst, const char *src)
{
    char gathered[RUN * 8], converted[RUN * 8];
    const tchi_axis *inner = &ctx->axes[ctx->rank - 1];
    const char *from = src;
    if (inner->src != 1 && n > 1) {
        copy_strided(n, tchi_cpu_size(ctx->src->type), gathered, 1, src, inner->src);
        from = gathered;
    }
    if (inner->dst == 1 || n == 1) {
        tchi_convert(n, ctx->dst->type, dst, ctx->src->type, from);
        return;
    }
    tchi_convert(n, ctx->dst->type, converted, ctx->src->type, from);
    copy_strided(n, tchi_cpu_size(ctx->dst->type), dst, inner->dst, converted, 1);
}

static void copy_rows(void *argument, int64_t from, int64_t to)
{
    const copy_ctx *ctx = argument;
    const tchi_axis *inner = &ctx->axes[ctx->rank - 1];
    int64_t dst_size = tchi_cpu_size(ctx->dst->type);
    int64_t src_size = tchi_cpu_size(ctx->src->type);
    for (int64_t block = from; block < to; block += ROWS) {
        int64_t last = block + ROWS < to ? block + ROWS : to;
        for (int64_t column = 0; column < inner->size; column += RUN) {
            int64_t n = tchi_min(inner->size - column, RUN);
            for (int64_t row = block; row < last; row++) {
                int64_t dst, src;
                row_offsets(ctx, row, &dst, &src);
                copy_run(ctx, n, (char *)ctx->dst->data + (dst + column * inner->dst) * dst_size,
                         (const char *)ctx->src->data + (src + column * inner->src) * src_size);
            }
        }
    }
}

/* Divides a single long row into equal parts, if its length allows, so that threads can share it. */
static void cut_single_row(copy_ctx *ctx)
{
    tchi_axis *only = &ctx->axes[0];
    for (int64_t parts = 64; ctx->rank == 1 && parts >= 2; parts--) {
        if (only->size % parts == 0 && only->size / parts >= RUN) {
            int64_t length = only->size / parts;
            ctx->axes[1] = (tchi_axis){length, only->dst, only->src};
            *only = (tchi_axis){parts, only->dst * length, only->src * length};
            ctx->rank = 2;
            ctx->rows = parts;
        }
    }
}

tch_status tchi_cpu_copy(void *state, const tch_array *dst, const tch_array *src)
{
    copy_ctx ctx = {.dst = dst, .src = src};
    if (tchi_is_empty(dst)) {
        return TCH_OK;
    }
    merge_axes(&ctx);
    cut_single_row(&ctx);
    tchi_cpu_split(state, ctx.rows, (double)ctx.rows * (double)ctx.axes[ctx.rank - 1].size, copy_rows, &ctx);
    return TCH_OK;
}

/* --- fill ------------------------------------------------------------------------------------------------------- */

typedef struct fill_ctx {
    copy_ctx copy;
    char pattern[RUN * 8]; /* one element, already rounded, repeated */
} fill_ctx;

static void fill_rows(void *argument, int64_t from, int64_t to)
{
    const fill_ctx *ctx = argument;
    const tchi_axis *inner = &ctx->copy.axes[ctx->copy.rank - 1];
    int64_t size = tchi_cpu_size(ctx->copy.dst->type);
    for (int64_t row = from; row < to; row++) {
        int64_t dst, src;
        row_offsets(&ctx->copy, row, &dst, &src);
        char *start = (char *)ctx->copy.dst->data + dst * size;
        for (int64_t i = 0; i < inner->size; i += RUN) {
            int64_t n = tchi_min(inner->size - i, RUN);
            char *run = start + i * inner->dst * size;
            if (inner->dst == 1) {
                memcpy(run, ctx->pattern, (size_t)(n * size));
            } else {
                copy_strided(n, size, run, inner->dst, ctx->pattern, 1);
            }
        }
    }
}

/* Integers: truncated towards zero and saturated. */
static void make_pattern(tch_scalar type, double value, char *pattern)
{
    if (type == TCH_SCALAR_I32) {
        int32_t i = value != value           ? 0
                    : value >= 2147483647.0  ? INT32_MAX
                    : value <= -2147483648.0 ? INT32_MIN
                                             : (int32_t)value;
        memcpy(pattern, &i, sizeof i);
    } else if (type == TCH_SCALAR_I64) {
        int64_t i = value != value ? 0 : value >= 0x1p63 ? INT64_MAX : value <= -0x1p63 ? INT64_MIN : (int64_t)value;
        memcpy(pattern, &i, sizeof i);
    } else {
        tchi_convert(1, type, pattern, TCH_SCALAR_F64, &value);
    }
}

tch_status tchi_cpu_fill(void *state, const tch_array *dst, double value)
{
    fill_ctx ctx = {.copy = {.dst = dst}};
    if (tchi_is_empty(dst)) {
        return TCH_OK;
    }
    int64_t size = tchi_cpu_size(dst->type);
    make_pattern(dst->type, value, ctx.pattern);
    for (int64_t i = 1; i < RUN; i++) {
        memcpy(ctx.pattern + i * size, ctx.pattern, (size_t)size);
    }
    merge_axes(&ctx.copy);
    cut_single_row(&ctx.copy);
    int64_t inner = ctx.copy.axes[ctx.copy.rank - 1].size;
    tchi_cpu_split(state, ctx.copy.rows, (double)ctx.copy.rows * (double)inner, fill_rows, &ctx);
    return TCH_OK;
}

/* --- blocks of matrices ------------------------------------------------------------------------------------------ */

void tchi_cpu_convert_block(const tch_matrices *m, int64_t index, int64_t row, int64_t rows, int64_t column,
                            int64_t cols, tch_scalar type, void *out, int64_t ld)
{
    for (int64_t i = 0; i < rows; i++) {
        const char *from = (const char *)tchi_cpu_row(m, index, row + i) + column * tchi_cpu_size(m->type);
        tchi_convert(cols, type, (char *)out + i * ld * tchi_cpu_size(type), m->type, from);
    }
}

/* Batched products A' B with a short contraction or small matrices, as in per-sample gradients. BLAS reads C before
 * writing it and has a setup cost; these kernels accumulate tiles in registers. The batch is divided into blocks of C,
 * on which no result depends. */
#define _DEFAULT_SOURCE
#include "backends/cpu/cpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include "core/arith.h"

/* How to write a result larger than the caches, measured for 268 MB on two cores. If its pages are resident:
 * non-temporal stores, 6.5 ms vs 14.5 ms. If they were never touched the kernel clears them through the caches: 107 ms
 * when all pages of a band are requested at once, 160 ms page by page. */
#define LARGE ((int64_t)16 << 20)

#ifndef MADV_POPULATE_WRITE /* since Linux 5.14; older kernels reject it, harmlessly */
#define MADV_POPULATE_WRITE 23
#endif

/* Columns of a block that is accumulated in several passes and should stay near the core. */
#define MOST_COLS 1024

typedef struct thin_ctx {
    const tch_matrices *a, *b, *c;
    float alpha;
    int64_t block_rows, block_cols;
    int64_t down, across; /* blocks of one matrix */
    int past_caches;      /* the result is large, and its pages are resident */
    int untouched;        /* it is large, and they are not */
    const tchi_thin_product *product;
} thin_ctx;

static void ask_for_pages(void *start, int64_t bytes)
{
    int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
    int64_t before = (page - (int64_t)((uintptr_t)start % (uintptr_t)page)) % page;
    int64_t whole = (bytes - before) / page * page;
    if (whole > 0) {
        (void)madvise((char *)start + before, (size_t)whole, MADV_POPULATE_WRITE);
    }
}

/* Blocks are numbered across the batch, row by row. */
static void thin_block(void *argument, int64_t index, int thread)
{
    const thin_ctx *t = argument;
    int64_t i = index / (t->down * t->across);
    int64_t row = index / t->across % t->down * t->block_rows;
    int64_t col = index % t->across * t->block_cols;
    tchi_thin_ctx j = {.lda = t->a->ld, .ldb = t->b->ld, .ldc = t->c->ld, .inner = t->a->rows, .alpha = t->alpha};
    j.a = (const float *)tchi_cpu_row(t->a, i, 0) + row;
    j.b = (const float *)tchi_cpu_row(t->b, i, 0) + col;
    j.c = (float *)tchi_cpu_row(t->c, i, row) + col;
    j.rows = tchi_min(t->c->rows - row, t->block_rows);
    j.cols = tchi_min(t->c->cols - col, t->block_cols);
    j.past_caches = t->past_caches;
    if (t->untouched && col == 0) {
        ask_for_pages(j.c, ((j.rows - 1) * j.ldc + t->c->cols) * (int64_t)sizeof *j.c);
    }
    t->product->run(&j);
}

/* Samples one page in the middle. */
static int is_resident(void *address)
{
    unsigned char answer = 0;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *start = (char *)address - (uintptr_t)address % page;
    return mincore(start, (size_t)page, &answer) == 0 && (answer & 1) != 0;
}

/* Large means half of the last-level cache, if known: smaller results stay cached for the next reader. */
static void choose_writing(thin_ctx *ctx)
{
    const tch_matrices *c = ctx->c;
    int64_t bytes = c->batch * c->rows * c->cols * tchi_cpu_size(c->type);
    int aligned = (uintptr_t)c->data % 64 == 0 && c->ld % 16 == 0 && (c->batch < 2 || c->stride % 16 == 0);
    if (bytes >= tchi_max((int64_t)sysconf(_SC_LEVEL3_CACHE_SIZE) / 2, LARGE)) {
        int resident = is_resident(tchi_cpu_row(c, c->batch / 2, c->rows / 2));
        ctx->past_caches = resident && aligned && ctx->a->rows <= ctx->product->one_pass;
        ctx->untouched = !resident;
    }
}

/* As few blocks as possible, in equal numbers per thread if there are only a few. */
static void choose_blocks(thin_ctx *ctx, int64_t threads)
{
    const tch_matrices *c = ctx->c;
    ctx->block_cols = ctx->a->rows > ctx->product->one_pass ? tchi_min(c->cols, MOST_COLS) : c->cols;
    ctx->across = tchi_ceil_div(c->cols, ctx->block_cols);
    ctx->down = tchi_ceil_div(c->rows, TCHI_THIN_MOST_ROWS);
    int64_t blocks = c->batch * ctx->across;
    while (blocks * ctx->down % threads != 0 && blocks * ctx->down < 4 * threads) {
        ctx->down++;
    }
    ctx->block_rows = tchi_round_up(tchi_ceil_div(c->rows, ctx->down), ctx->product->rows);
    ctx->down = tchi_ceil_div(c->rows, ctx->block_rows);
}

static int is_suited(const tchi_thin_product *product, const tch_matrices *a, const tch_matrices *c)
{
    if (product == NULL || c->type != TCH_SCALAR_F32 || c->rows < product->rows || c->cols < product->cols) {
        return 0;
    }
    return a->rows <= product->one_pass || c->rows * c->cols <= product->most_elements;
}

int tchi_cpu_thin_product(const tchi_cpu_state *state, double alpha, const tch_matrices *a, const tch_matrices *b,
                          const tch_matrices *c)
{
    thin_ctx ctx = {.a = a, .b = b, .c = c, .alpha = (float)alpha, .product = tchi_thin_product_now()};
    if (!is_suited(ctx.product, a, c)) {
        return 0;
    }
    choose_writing(&ctx);
    choose_blocks(&ctx, state->threads);
    double work = 2.0 * (double)ctx.block_rows * (double)ctx.block_cols * (double)(a->rows + 1);
    tchi_cpu_for_each(state, c->batch * ctx.down * ctx.across, work, thin_block, &ctx);
    return 1;
}

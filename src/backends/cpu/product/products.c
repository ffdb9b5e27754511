/* Batched BLAS products. Symmetric products compute the lower triangle and mirror it; 16-bit operands are converted to
 * float32 block by block. */
#include "backends/cpu/cpu.h"

#include "backends/cpu/runtime/blas/parallel_blas.h"
#include "core/arith.h"

typedef struct gemm_ctx {
    const tchi_cpu_state *state;
    double alpha, beta;
    const tch_matrices *a, *b, *c;
    int trans_a, trans_b;
    int64_t inner;
} gemm_ctx;

static int blas_trans(int32_t transpose)
{
    return transpose ? TCHI_TRANS : TCHI_NO_TRANS;
}

static void gemm_one(void *argument, int64_t i, int thread)
{
    const gemm_ctx *j = argument;
    const void *a = tchi_cpu_row(j->a, i, 0);
    const void *b = tchi_cpu_row(j->b, i, 0);
    void *c = tchi_cpu_row(j->c, i, 0);
    tchi_parallel_blas_for(j->c->type)
        ->gemm(j->state, j->trans_a, j->trans_b, j->c->rows, j->c->cols, j->inner, j->alpha, a, j->a->ld, b, j->b->ld,
               j->beta, c, j->c->ld);
}

/* --- 16-bit operands --------------------------------------------------------------------------------------------- */

/* Blocks of C and of the contraction, small enough for the stack of a thread. */
#define WIDE_ROWS 64
#define WIDE_COLS 256
#define WIDE_INNER 128

typedef struct wide_blocks {
    float a[WIDE_ROWS * WIDE_INNER];
    float b[WIDE_INNER * WIDE_COLS];
    float c[WIDE_ROWS * WIDE_COLS];
} wide_blocks;

/* The m by n block of C at (row, col): `w->c` = op(A) op(B). */
static void wide_product(const gemm_ctx *j, int64_t i, int64_t row, int64_t m, int64_t col, int64_t n, wide_blocks *w)
{
    int transposed_a = j->trans_a == TCHI_TRANS;
    int transposed_b = j->trans_b == TCHI_TRANS;
    int64_t from = 0;
    do { /* inner > 0: tchi_cpu_gemm handles empty sums */
        int64_t k = tchi_min(j->inner - from, WIDE_INNER);
        int64_t cols_a = transposed_a ? m : k, cols_b = transposed_b ? k : n;
        tchi_cpu_convert_block(j->a, i, transposed_a ? from : row, transposed_a ? k : m, transposed_a ? row : from,
                               cols_a, TCH_SCALAR_F32, w->a, cols_a);
        tchi_cpu_convert_block(j->b, i, transposed_b ? col : from, transposed_b ? n : k, transposed_b ? from : col,
                               cols_b, TCH_SCALAR_F32, w->b, cols_b);
        j->state->blas->f32.gemm(TCHI_ROW_MAJOR, j->trans_a, j->trans_b, (int)m, (int)n, (int)k, 1.0F, w->a,
                                 (int)cols_a, w->b, (int)cols_b, from > 0 ? 1.0F : 0.0F, w->c, (int)n);
        from += WIDE_INNER;
    } while (from < j->inner);
}

/* C = alpha block + beta C, for C of float32 or 16 bits. */
static void write_block(const gemm_ctx *j, int64_t i, int64_t row, int64_t m, int64_t col, int64_t n, float *block)
{
    float before[WIDE_COLS] = {0};
    for (int64_t r = 0; r < m; r++) {
        float *from = block + r * n;
        void *to = (char *)tchi_cpu_row(j->c, i, row + r) + col * tchi_cpu_size(j->c->type);
        if (j->beta != 0.0) {
            tchi_convert(n, TCH_SCALAR_F32, before, j->c->type, to);
        }
        for (int64_t k = 0; k < n; k++) {
            from[k] = (float)j->alpha * from[k] + (float)j->beta * before[k];
        }
        tchi_convert(n, j->c->type, to, TCH_SCALAR_F32, from);
    }
}

/* One block of C; blocks are numbered across the batch. */
static void wide_gemm_block(void *argument, int64_t index, int thread)
{
    const gemm_ctx *j = argument;
    int64_t across = tchi_ceil_div(j->c->cols, WIDE_COLS);
    int64_t down = tchi_ceil_div(j->c->rows, WIDE_ROWS);
    int64_t i = index / (down * across);
    int64_t row = index / across % down * WIDE_ROWS;
    int64_t col = index % across * WIDE_COLS;
    int64_t m = tchi_min(j->c->rows - row, WIDE_ROWS);
    int64_t n = tchi_min(j->c->cols - col, WIDE_COLS);
    wide_blocks w;
    wide_product(j, i, row, m, col, n, &w);
    write_block(j, i, row, m, col, n, w.c);
}

/* --- outer products ---------------------------------------------------------------------------------------------- */

/* Outer product: row i of C is element i of A times B; the time is that of writing C. */
static void outer_rows_of(const gemm_ctx *j, int64_t matrix, int64_t from, int64_t to)
{
    const tchi_loops *loops = tchi_loops_for(j->c->type);
    const void *a = tchi_cpu_row(j->a, matrix, 0), *b = tchi_cpu_row(j->b, matrix, 0);
    int64_t step = j->trans_a == TCHI_TRANS ? 1 : j->a->ld;
    for (int64_t i = from; i < to; i++) {
        double factor = j->c->type == TCH_SCALAR_F64 ? ((const double *)a)[i * step] : ((const float *)a)[i * step];
        loops->scale(j->c->cols, j->alpha * factor, b, tchi_cpu_row(j->c, matrix, i));
    }
}

/* Rows are numbered across the batch. */
static void outer_rows(void *argument, int64_t from, int64_t to)
{
    const gemm_ctx *j = argument;
    int64_t rows = j->c->rows;
    while (from < to) {
        int64_t matrix = from / rows, end = (matrix + 1) * rows;
        end = end < to ? end : to;
        outer_rows_of(j, matrix, from - matrix * rows, end - matrix * rows);
        from = end;
    }
}

/* BLAS does not touch C if there is nothing to add and beta is one; with k = 0 it scales by beta, while here beta = 0
 * must mean "not read". */
tch_status tchi_cpu_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a, const tch_matrices *b,
                         int32_t transpose_b, double beta, int32_t rounded, const tch_matrices *c)
{
    tchi_cpu_state *s = state;
    int64_t inner = transpose_a ? a->rows : a->cols;
    if (c->rows == 0 || c->cols == 0) {
        return TCH_OK;
    }
    if (inner == 0) {
        return tchi_cpu_combine(state, 0.0, beta, beta == 0.0 ? NULL : c, 0.0, NULL, c);
    }
    gemm_ctx ctx = {s, alpha, beta, a, b, c, blas_trans(transpose_a), blas_trans(transpose_b), inner};
    double work = 2.0 * (double)c->rows * (double)c->cols * (double)inner;
    if (a->type == TCH_SCALAR_F16 || a->type == TCH_SCALAR_BF16) {
        int64_t blocks = tchi_ceil_div(c->rows, WIDE_ROWS) * tchi_ceil_div(c->cols, WIDE_COLS);
        work = 2.0 * WIDE_ROWS * WIDE_COLS * (double)inner;
        tchi_cpu_for_each(s, c->batch * blocks, work, wide_gemm_block, &ctx);
    } else if (beta == 0.0 && transpose_a && !transpose_b && tchi_cpu_thin_product(s, alpha, a, b, c)) {
        return TCH_OK;
    } else if (inner == 1 && (!transpose_b || b->ld == 1) && beta == 0.0) {
        int64_t rows = c->batch * c->rows;
        tchi_cpu_split(s, rows, (double)rows * (double)c->cols, outer_rows, &ctx);
    } else {
        tchi_cpu_for_each(s, c->batch, work, gemm_one, &ctx);
    }
    return TCH_OK;
}

/* --- symmetric products ------------------------------------------------------------------------------------------ */

typedef struct mirror_ctx {
    const tchi_loops *loops;
    int64_t n, ld;
    void *data;
} mirror_ctx;

static void mirror_rows(void *argument, int64_t from, int64_t to)
{
    const mirror_ctx *j = argument;
    j->loops->mirror(j->n, j->data, j->ld, from, to);
}

static void mirror_one(const tchi_cpu_state *state, const tch_matrices *c, int64_t i)
{
    mirror_ctx ctx = {tchi_loops_for(c->type), c->rows, c->ld, tchi_cpu_row(c, i, 0)};
    tchi_cpu_split(state, c->rows, (double)c->rows * (double)c->rows, mirror_rows, &ctx);
}

static void gram_one(void *argument, int64_t i, int thread)
{
    const gemm_ctx *j = argument;
    int64_t n = j->c->rows;
    const void *a = tchi_cpu_row(j->a, i, 0);
    void *c = tchi_cpu_row(j->c, i, 0);
    tchi_parallel_blas_for(j->c->type)
        ->syrk(j->state, j->trans_a, n, j->inner, j->alpha, a, j->a->ld, j->beta, c, j->c->ld);
    mirror_one(j->state, j->c, i);
}

tch_status tchi_cpu_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                         int32_t rounded, const tch_matrices *c)
{
    tchi_cpu_state *s = state;
    int64_t inner = transpose ? a->rows : a->cols;
    if (c->rows == 0) {
        return TCH_OK;
    }
    if (inner == 0) {
        for (int64_t i = 0; i < c->batch; i++) {
            mirror_one(s, c, i);
        }
        return tchi_cpu_combine(state, 0.0, beta, beta == 0.0 ? NULL : c, 0.0, NULL, c);
    }
    gemm_ctx ctx = {s, alpha, beta, a, NULL, c, blas_trans(transpose), 0, inner};
    tchi_cpu_for_each(s, c->batch, (double)c->rows * (double)c->rows * (double)inner, gram_one, &ctx);
    return TCH_OK;
}

static void symmetric_one(void *argument, int64_t i, int thread)
{
    const gemm_ctx *j = argument;
    const void *a = tchi_cpu_row(j->a, i, 0);
    const void *b = tchi_cpu_row(j->b, i, 0);
    void *c = tchi_cpu_row(j->c, i, 0);
    tchi_parallel_blas_for(j->c->type)->symm(j->state, j->c->rows, a, j->a->ld, b, j->b->ld, c, j->c->ld);
    mirror_one(j->state, j->c, i);
}

/* A square is a Gram matrix, which BLAS computes by syrk. */
static tch_status lower_product(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    tchi_cpu_state *s = state;
    if (a->data == b->data && a->stride == b->stride && a->ld == b->ld) {
        return tchi_cpu_gram(state, 1.0, a, 0, 0.0, 0, c);
    }
    gemm_ctx ctx = {s, 1.0, 0.0, a, b, c, TCHI_NO_TRANS, TCHI_NO_TRANS, c->rows};
    double n = (double)c->rows;
    tchi_cpu_for_each(s, c->batch, n * n * n, symmetric_one, &ctx);
    return TCH_OK;
}

/* `normalize` never defers on the CPU: scale is NULL. */
tch_status tchi_cpu_symmetric_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                      const tch_matrices *a, const tch_matrices *b, const double *scale,
                                      int32_t exponent, const tch_matrices *c)
{
    tch_status status = lower_product(state, a, b, c);
    if (status != TCH_OK || (c0 == 0.0 && d == NULL && c2 == 1.0)) {
        return status;
    }
    return tchi_cpu_combine(state, c0, c1, d, c2, c, c);
}

/* NorMuon: second moments of the rows of a direction, and the step with every row divided by the root of its second
 * moment. A row belongs to the parameter's matrix and runs along the rows or the columns of its block. One thread
 * computes each sum sequentially, so that results do not depend on the number of threads. */
#include "rects.h"

#include <math.h>

#include "backends/rules.h"
#include "core/arith.h"

typedef struct row_ctx {
    const tch_update *update;
    double *norms;
    double *parts; /* of the squared norms, one per row */
    tch_decay decay;
} row_ctx;

/* --- moments ---------------------------------------------------------------------------------------------------- */

/* A rectangle as `count` rows of `length` elements, which are contiguous or block_ld apart. Empty rows do not count. */
static int64_t row_count(const tch_rect *rect)
{
    bool empty = rect->rows == 0 || rect->cols == 0;
    return empty ? 0 : rect->by_column ? rect->cols : rect->rows;
}

static int64_t row_length(const tch_rect *rect)
{
    return rect->by_column ? rect->rows : rect->cols;
}

/* Elements of the block from index `first` on, in the compute type. */
static const void *read_block(const tch_update *u, const tch_rect *rect, int64_t first, int64_t n, void *buffer)
{
    const char *from = (const char *)rect->block[0] + first * tchi_cpu_size(u->block_type);
    if (u->block_type == u->real) {
        return from;
    }
    tchi_convert(n, u->real, buffer, u->block_type, from);
    return buffer;
}

static double sum_row(const tch_update *u, const tch_rect *rect, int64_t row)
{
    const tchi_loops *loops = tchi_loops_for(u->real);
    _Alignas(64) char buffer[TCHI_CPU_RUN * sizeof(double)];
    int64_t length = row_length(rect);
    double sum = 0;
    for (int64_t at = 0; at < length; at += TCHI_CPU_RUN) {
        int64_t n = tchi_min(length - at, TCHI_CPU_RUN);
        sum += loops->sum_squares(n, 1.0, read_block(u, rect, row * rect->block_ld + at, n, buffer));
    }
    return sum;
}

/* Of n rows from `first` on, adjacent in memory. */
static void sum_columns(const tch_update *u, const tch_rect *rect, int64_t first, int64_t n, double *sums)
{
    const tchi_cpu_steps *steps = tchi_cpu_steps_for(u->real);
    _Alignas(64) char buffer[TCHI_CPU_RUN * sizeof(double)];
    for (int64_t k = 0; k < n; k++) {
        sums[k] = 0;
    }
    for (int64_t i = 0; i < row_length(rect); i++) {
        steps->add_squares(n, read_block(u, rect, i * rect->block_ld + first, n, buffer), sums);
    }
}

static double moment_at(const tch_update *u, const tch_rect *rect, int64_t row)
{
    return u->real == TCH_SCALAR_F64 ? ((const double *)rect->state[1])[row]
                                     : (double)((const float *)rect->state[1])[row];
}

/* Updates v, rounded as stored; returns the row's share of the squared norm of the direction. */
static double update_moment(const tch_update *u, const tch_rect *rect, int64_t row, double sum)
{
    double beta2 = u->hyper->beta2;
    double v = beta2 * moment_at(u, rect, row) + (1.0 - beta2) * sum / (double)row_length(rect);
    if (u->real == TCH_SCALAR_F64) {
        ((double *)rect->state[1])[row] = v;
    } else {
        ((float *)rect->state[1])[row] = (float)v;
    }
    return tchi_rule_row_share(sum, moment_at(u, rect, row), u->hyper->eps);
}

/* Rows [from, to) of a rectangle, whose parts begin at `parts`. */
static void update_moments(const tch_update *u, const tch_rect *rect, int64_t from, int64_t to, double *parts)
{
    double sums[TCHI_CPU_RUN];
    bool follow = (rect->by_column != 0) == (rect->transposed != 0); /* elements of a row are adjacent */
    for (int64_t row = from; row < to;) {
        int64_t n = follow ? 1 : tchi_min(to - row, TCHI_CPU_RUN);
        if (follow) {
            sums[0] = sum_row(u, rect, row);
        } else {
            sum_columns(u, rect, row, n, sums);
        }
        for (int64_t k = 0; k < n; k++) {
            parts[row + k] = update_moment(u, rect, row + k, sums[k]);
        }
        row += n;
    }
}

/* Rows are numbered across rectangles; this thread has [from, to). */
static void moments_range(void *argument, int64_t from, int64_t to)
{
    const row_ctx *ctx = argument;
    int64_t at = 0;
    for (int64_t k = 0; k < ctx->update->count && at < to; k++) {
        const tch_rect *rect = &ctx->update->rects[k];
        int64_t rows = row_count(rect);
        int64_t first = from > at ? from - at : 0;
        int64_t last = tchi_min(to - at, rows);
        if (first < last) {
            update_moments(ctx->update, rect, first, last, ctx->parts + at);
        }
        at += rows;
    }
}

static void finish_row_norms(const tch_update *u, const double *parts, double *norms)
{
    for (int64_t k = 0; k < u->count; k++) {
        double sum = 0;
        for (int64_t left = row_count(&u->rects[k]); left > 0; left--) {
            sum += *parts++;
        }
        norms[u->rects[k].block_index] = sqrt(sum);
    }
}

/* --- the step --------------------------------------------------------------------------------------------------- */

/* Elements [at, at + n) of a run, within one row of the rectangle, starting at its column `col`. The direction is
 * rounded separately, so that it can be sent before it is applied. */
static void apply_part(tchi_cpu_run *run, tchi_keep decay, int64_t at, int64_t n, int64_t row, int64_t col, double norm,
                       const void *d, void *p)
{
    const tch_update *u = run->update;
    const tch_hyper *h = u->hyper;
    int64_t size = tchi_cpu_size(u->real);
    const char *from = (const char *)d + at * size;
    char *to = (char *)p + at * size;
    double divisor = norm;
    if (run->rect->by_column) {
        run->steps->divide_by_roots(n, h->eps, (const char *)run->rect->state[1] + col * size, from, run->other);
        from = run->other;
    } else {
        divisor *= sqrt(moment_at(u, run->rect, row)) + h->eps;
    }
    run->loops->scale(n, divisor > 0.0 ? 1.0 / divisor : 0.0, from, run->other);
    run->steps->descend(n, decay, h->lr * run->rect->factor, run->other, to);
}

/* A dense rectangle may be treated as one long row: runs are divided where its rows begin. */
static void apply_rows_of_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const row_ctx *ctx = argument;
    const tch_rect *rect = chunk->rect;
    double norm = ctx->norms[rect->block_index];
    tchi_cpu_tile direction;
    tchi_cpu_run run;
    tchi_cpu_tile_open(&direction, ctx->update, chunk, 0, true);
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        const void *d = tchi_cpu_tile_run(&direction, &run);
        void *p = tchi_cpu_run_param(&run);
        for (int64_t at = 0; at < run.n;) {
            int64_t row = (run.at + at) / rect->stride;
            int64_t col = (run.at + at) % rect->stride;
            int64_t n = rect->cols - col < run.n - at ? rect->cols - col : run.n - at;
            apply_part(&run, tchi_rule_keep(ctx->update->hyper, ctx->decay), at, n, row, col, norm, d, p);
            at += n;
        }
        tchi_cpu_run_store_param(&run, p);
    }
}

tch_status tchi_cpu_apply_rows(void *state, const tch_update *update, double *norms, double *parts, tch_decay decay)
{
    row_ctx ctx = {update, norms, parts, decay};
    int64_t rows = 0;
    double work = 0;
    for (int64_t k = 0; k < update->count; k++) {
        rows += row_count(&update->rects[k]);
        work += 2.0 * (double)update->rects[k].rows * (double)update->rects[k].cols;
    }
    if (!tchi_cpu_is_skipped(update) && rows > 0) {
        tchi_cpu_split(state, rows, work, moments_range, &ctx);
        finish_row_norms(update, parts, norms);
        tchi_cpu_for_chunks(state, update, true, 4.0, apply_rows_of_chunk, &ctx);
    }
    return TCH_OK;
}

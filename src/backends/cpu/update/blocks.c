/* What second-order optimizers do between parameters and blocks: gradients go into blocks, directions come out of them.
 * Products are done elsewhere; everything here is element by element. */
#include "rects.h"

#include <math.h>
#include <string.h>

typedef struct block_ctx {
    const tch_update *update;
    tch_filter filter;
    tch_block_scale scale;
    int32_t l2, nesterov, decay;
    const double *wanted, *norms;
} block_ctx;

/* --- from gradients to blocks ----------------------------------------------------------------------------------- */

static void filter_run(tchi_cpu_run *run, tch_filter filter, const void *g, void *out)
{
    double beta1 = run->update->hyper->beta1;
    void *s = tchi_cpu_run_state(run, 0);
    run->loops->combine(run->n, beta1, s, 1.0 - beta1, g, s);
    if (out == NULL) {
        return;
    }
    if (filter == TCH_FILTER_NESTEROV) {
        run->loops->combine(run->n, beta1, s, 1.0 - beta1, g, out);
    } else {
        run->loops->scale(run->n, 1.0 / run->rect->clock->correction1, s, out);
    }
}

static void gather_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_update *u = ctx->update;
    tchi_cpu_tile plain, filtered;
    tchi_cpu_run run;
    tchi_cpu_tile_open(&plain, u, chunk, 0, false);
    tchi_cpu_tile_open(&filtered, u, chunk, 1, false);
    tchi_cpu_run_begin(&run, u, chunk);
    while (tchi_cpu_run_next(&run)) {
        const void *g = tchi_cpu_run_gradient(&run, ctx->l2 ? tchi_cpu_run_param(&run) : NULL, u->hyper->weight_decay);
        if (plain.data != NULL) {
            memcpy(tchi_cpu_tile_run(&plain, &run), g, (size_t)(run.n * tchi_cpu_size(u->real)));
        }
        if (ctx->filter != TCH_FILTER_NONE) {
            filter_run(&run, ctx->filter, g, filtered.data != NULL ? tchi_cpu_tile_run(&filtered, &run) : NULL);
        }
    }
    tchi_cpu_tile_store(&plain, u, chunk, 0);
    if (ctx->filter != TCH_FILTER_NONE) {
        tchi_cpu_tile_store(&filtered, u, chunk, 1);
    }
}

static void zero_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    tchi_cpu_tile tile;
    for (int index = 0; index < (ctx->filter != TCH_FILTER_NONE ? 2 : 1); index++) {
        tchi_cpu_tile_open(&tile, ctx->update, chunk, index, false);
        for (int64_t i = 0; tile.data != NULL && i < chunk->rows; i++) {
            int64_t size = tchi_cpu_size(ctx->update->real);
            memset(tile.data + i * tile.ld * size, 0, (size_t)(chunk->cols * size));
        }
        tchi_cpu_tile_store(&tile, ctx->update, chunk, index);
    }
}

tch_status tchi_cpu_gather(void *state, const tch_update *update, tch_filter filter, int32_t l2, uint32_t *largest,
                           uint32_t *filtered)
{
    (void)largest; /* NULL, since there is no two_sided here */
    (void)filtered;
    block_ctx ctx = {.update = update, .filter = filter, .l2 = l2};
    tchi_cpu_for_chunks(state, update, true, 4.0, tchi_cpu_is_skipped(update) ? zero_chunk : gather_chunk, &ctx);
    return TCH_OK;
}

/* --- Adam inside blocks --------------------------------------------------------------------------------------- */

static void rotated_adam_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_hyper *h = ctx->update->hyper;
    double factor = sqrt(chunk->rect->clock->correction2) / chunk->rect->clock->correction1;
    tchi_cpu_tile gradient, direction;
    tchi_cpu_run run;
    tchi_cpu_tile_open(&gradient, ctx->update, chunk, 0, true);
    tchi_cpu_tile_open(&direction, ctx->update, chunk, 1, true);
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        void *v = tchi_cpu_run_state(&run, 1);
        void *d = tchi_cpu_tile_run(&direction, &run);
        run.steps->square(run.n, h->beta2, 1.0 - h->beta2, tchi_cpu_tile_run(&gradient, &run), v);
        run.steps->whiten(run.n, 1.0, h->eps, factor, v, d, d);
    }
    tchi_cpu_tile_store(&direction, ctx->update, chunk, 1);
}

tch_status tchi_cpu_rotated_adam(void *state, const tch_update *update, uint32_t *largest)
{
    (void)largest;
    block_ctx ctx = {.update = update};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, true, 8.0, rotated_adam_chunk, &ctx);
    }
    return TCH_OK;
}

/* --- from blocks to parameters ---------------------------------------------------------------------------------- */

static double scale_of(const block_ctx *ctx, int32_t block)
{
    if (ctx->scale == TCH_BLOCK_AS_IS) {
        return 1.0;
    }
    if (ctx->norms[block] == 0.0) {
        return 0.0;
    }
    double wanted = ctx->wanted[block];
    return (ctx->scale == TCH_BLOCK_UNIT_RMS ? sqrt(wanted) : wanted) / ctx->norms[block];
}

/* The direction after momentum; *scale is its factor, taken in on the way. */
static const void *with_momentum(tchi_cpu_run *run, const void *d, double *scale, int32_t nesterov)
{
    double momentum = run->update->hyper->momentum;
    void *buffer = tchi_cpu_run_state(run, 2);
    double own = *scale;
    *scale = 1.0;
    run->loops->combine(run->n, momentum, buffer, own, d, buffer);
    if (!nesterov) {
        return buffer;
    }
    run->loops->combine(run->n, own, d, momentum, buffer, run->other);
    return run->other;
}

static void apply_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_hyper *h = ctx->update->hyper;
    const tch_rect *rect = chunk->rect;
    bool momentum = h->momentum != 0.0 && rect->state[2] != NULL;
    double keep = ctx->decay ? 1.0 - h->lr * h->weight_decay : 1.0;
    double own_scale = scale_of(ctx, rect->block_index);
    tchi_cpu_tile direction;
    tchi_cpu_run run;
    tchi_cpu_tile_open(&direction, ctx->update, chunk, rect->block[1] != NULL ? 1 : 0, true);
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        double scale = own_scale;
        const void *d = tchi_cpu_tile_run(&direction, &run);
        void *p = tchi_cpu_run_param(&run);
        if (momentum) {
            d = with_momentum(&run, d, &scale, ctx->nesterov);
        } else if (scale != 1.0) { /* rounded by itself, so that a direction can travel before it is applied */
            run.loops->scale(run.n, scale, d, run.other);
            d = run.other;
            scale = 1.0;
        }
        run.loops->combine(run.n, keep, p, -h->lr * (double)rect->factor * scale, d, p);
        tchi_cpu_run_store_param(&run, p);
    }
}

tch_status tchi_cpu_apply(void *state, const tch_update *update, tch_block_scale scale, const double *wanted,
                          const double *norms, int32_t nesterov, int32_t decay)
{
    block_ctx ctx = {
        .update = update, .scale = scale, .nesterov = nesterov, .decay = decay, .wanted = wanted, .norms = norms};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, true, 4.0, apply_chunk, &ctx);
    }
    return TCH_OK;
}

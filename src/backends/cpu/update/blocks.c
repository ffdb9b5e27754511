/* Between parameters and blocks: gathers gradients into blocks and applies directions from them, elementwise. */
#include "rects.h"

#include <math.h>
#include <string.h>

typedef struct block_ctx {
    const tch_update *update;
    const tch_gathering *how;
    tch_block_scale scale;
    int32_t nesterov;
    tch_decay decay;
    const double *target_norms, *norms;
} block_ctx;

/* --- from gradients to blocks ----------------------------------------------------------------------------------- */

static void filter_run(tchi_cpu_run *run, tch_filter filter, const void *g, void *out)
{
    double beta1 = run->update->hyper->beta1;
    void *s = tchi_cpu_run_moment(run, 0);
    run->loops->combine(run->n, beta1, s, 1.0 - beta1, g, s);
    if (out != NULL && filter == TCH_FILTER_NESTEROV) {
        run->loops->combine(run->n, beta1, s, 1.0 - beta1, g, out);
    } else if (out != NULL) {
        run->loops->scale(run->n, 1.0 / run->rect->clock->correction1, s, out);
    }
    tchi_cpu_run_store_moments(run, TCHI_CODE_SGD);
}

/* d of the grafted method, updating v; f itself for SGD. */
static const void *graft_run(tchi_cpu_run *run, tch_graft kind, const void *g, const void *f, void *out)
{
    const tch_hyper *h = run->update->hyper;
    if (kind == TCH_GRAFT_SGD) {
        return f;
    }
    bool sum = kind == TCH_GRAFT_ADAGRAD;
    double root = kind == TCH_GRAFT_ADAM ? 1.0 / sqrt(run->rect->clock->graft) : 1.0;
    void *v = tchi_cpu_run_state(run, 1);
    run->steps->square(run->n, sum ? 1.0 : h->graft_beta2, sum ? 1.0 : 1.0 - h->graft_beta2, g, v);
    run->steps->whiten(run->n, root, h->graft_eps, 1.0, v, f, out);
    return out;
}

static void gather_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_gathering *how = ctx->how;
    const tch_update *u = ctx->update;
    bool replace = how->graft != TCH_GRAFT_NONE && how->norms == NULL;
    tchi_cpu_tile plain, filtered;
    tchi_cpu_run run;
    double sum = 0.0;
    tchi_cpu_tile_open(&plain, u, chunk, 0, false);
    tchi_cpu_tile_open(&filtered, u, chunk, 1, false);
    filtered.data = how->filter != TCH_FILTER_NONE ? filtered.data : NULL;
    tchi_cpu_run_begin(&run, u, chunk);
    while (tchi_cpu_run_next(&run)) {
        const void *g = tchi_cpu_run_gradient(&run, how->l2 ? tchi_cpu_run_param(&run) : NULL, u->hyper->weight_decay);
        void *in_plain = plain.data != NULL ? tchi_cpu_tile_run(&plain, &run) : NULL;
        void *out = filtered.data != NULL ? tchi_cpu_tile_run(&filtered, &run) : NULL;
        const void *f = how->filter != TCH_FILTER_NONE ? out : g;
        if (in_plain != NULL) {
            memcpy(in_plain, g, (size_t)(run.n * tchi_cpu_size(u->real)));
        }
        if (how->filter != TCH_FILTER_NONE) {
            filter_run(&run, how->filter, g, out);
        }
        if (how->graft != TCH_GRAFT_NONE) {
            const void *d = graft_run(&run, how->graft, g, f, !replace ? run.other : out != NULL ? out : in_plain);
            sum += replace ? 0.0 : run.loops->sum_squares(run.n, 1.0, d);
        }
    }
    if (how->graft != TCH_GRAFT_NONE && !replace) {
        ((double *)how->scratch)[chunk->number] = sum;
    }
    tchi_cpu_tile_store(&plain, u, chunk, 0);
    tchi_cpu_tile_store(&filtered, u, chunk, 1);
}

static void zero_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    tchi_cpu_tile tile;
    for (int index = 0; index < 2; index++) {
        tchi_cpu_tile_open(&tile, ctx->update, chunk, index, false);
        for (int64_t i = 0; tile.data != NULL && i < chunk->rows; i++) {
            int64_t size = tchi_cpu_size(ctx->update->real);
            memset(tile.data + i * tile.ld * size, 0, (size_t)(chunk->cols * size));
        }
        tchi_cpu_tile_store(&tile, ctx->update, chunk, index);
    }
}

/* Adds the chunks' sums of squares in the order of the rectangles, so that norms do not depend on the number of
 * threads. Rectangles of a block are consecutive, and so are their chunks. */
static void finish_norms(const tch_update *update, const double *parts, double *norms)
{
    double sum = 0;
    for (int64_t k = 0; k < update->count; k++) {
        int32_t block = update->rects[k].block_index;
        for (int64_t left = tchi_cpu_chunks_of(&update->rects[k], true); left > 0; left--) {
            sum += *parts++;
        }
        if (k + 1 == update->count || update->rects[k + 1].block_index != block) {
            norms[block] = sqrt(sum);
            sum = 0;
        }
    }
}

/* Blocks keep their type, and scales are not written. */
tch_status tchi_cpu_gather(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    block_ctx ctx = {.update = update, .how = how};
    bool skipped = tchi_cpu_is_skipped(update);
    tchi_cpu_for_chunks(state, update, true, how->graft != TCH_GRAFT_NONE ? 12.0 : 4.0,
                        skipped ? zero_chunk : gather_chunk, &ctx);
    if (how->graft != TCH_GRAFT_NONE && how->norms != NULL && !skipped) {
        finish_norms(update, how->scratch, how->norms);
    }
    if (chosen != NULL) {
        *chosen = update->block_type;
    }
    return TCH_OK;
}

int64_t tchi_cpu_graft_scratch(int64_t elements, int64_t rects)
{
    return tchi_cpu_chunks_at_most(elements, rects) * (int64_t)sizeof(double);
}

/* --- Adam inside blocks --------------------------------------------------------------------------------------- */

static void rotated_adam_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_hyper *h = ctx->update->hyper;
    double factor = sqrt(chunk->rect->clock->correction2);
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

tch_status tchi_cpu_rotated_adam(void *state, const tch_update *update, uint32_t *notes)
{
    block_ctx ctx = {.update = update};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, true, 8.0, rotated_adam_chunk, &ctx);
    }
    return TCH_OK;
}

/* --- from blocks to parameters ---------------------------------------------------------------------------------- */

static double scale_of_block(const block_ctx *ctx, int32_t block)
{
    if (ctx->scale == TCH_BLOCK_AS_IS) {
        return 1.0;
    }
    if (ctx->norms[block] == 0.0) {
        return 0.0;
    }
    double target = ctx->target_norms[block];
    double scale = (ctx->scale == TCH_BLOCK_GRAFT ? target : sqrt(target)) / ctx->norms[block];
    return ctx->scale == TCH_BLOCK_CLIP_RMS && scale > 1.0 ? 1.0 : scale;
}

/* The direction after momentum; *scale is absorbed and becomes 1. */
static const void *apply_momentum(tchi_cpu_run *run, const void *d, double *scale, int32_t nesterov)
{
    double momentum = run->update->hyper->momentum;
    void *buffer = tchi_cpu_run_state(run, 2);
    double direction_scale = *scale;
    *scale = 1.0;
    run->loops->combine(run->n, momentum, buffer, direction_scale, d, buffer);
    if (!nesterov) {
        return buffer;
    }
    run->loops->combine(run->n, direction_scale, d, momentum, buffer, run->other);
    return run->other;
}

static void apply_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const block_ctx *ctx = argument;
    const tch_hyper *h = ctx->update->hyper;
    const tch_rect *rect = chunk->rect;
    bool momentum = h->momentum != 0.0 && rect->state[2] != NULL;
    tchi_keep decay = tchi_rule_keep(h, ctx->decay);
    double block_scale = scale_of_block(ctx, rect->block_index);
    tchi_cpu_tile direction;
    tchi_cpu_run run;
    tchi_cpu_tile_open(&direction, ctx->update, chunk, rect->block[1] != NULL ? 1 : 0, true);
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        double scale = block_scale;
        const void *d = tchi_cpu_tile_run(&direction, &run);
        void *p = tchi_cpu_run_param(&run);
        if (momentum) {
            d = apply_momentum(&run, d, &scale, ctx->nesterov);
        } else if (scale != 1.0) { /* rounded separately, so that a direction can be sent before it is applied */
            run.loops->scale(run.n, scale, d, run.other);
            d = run.other;
            scale = 1.0;
        }
        run.steps->descend(run.n, decay, h->lr * (double)rect->factor * scale, d, p);
        tchi_cpu_run_store_param(&run, p);
    }
}

tch_status tchi_cpu_apply(void *state, const tch_update *update, tch_block_scale scale, const double *target_norms,
                          double *norms, int32_t nesterov, tch_decay decay)
{
    block_ctx ctx = {.update = update,
                     .scale = scale,
                     .nesterov = nesterov,
                     .decay = decay,
                     .target_norms = target_norms,
                     .norms = norms};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, true, 4.0, apply_chunk, &ctx);
        return TCH_OK;
    }
    for (int64_t i = 0; i < update->count && norms != NULL; i++) {
        norms[update->rects[i].block_index] = -1.0;
    }
    return TCH_OK;
}

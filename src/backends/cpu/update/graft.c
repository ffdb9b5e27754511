/* Grafting: another optimizer's step, of which the norm is taken and the direction is not. Norms are summed chunk by
 * chunk, then from chunk to chunk in the order of the rectangles, so that they do not depend on the number of
 * threads. */
#include "rects.h"

#include <math.h>

typedef struct graft_ctx {
    const tch_update *update;
    tch_graft kind;
    int32_t replace;
    double *parts; /* sums of squares, one per chunk */
} graft_ctx;

/* v takes the gradient in, and d = f / (sqrt(v) + graft_eps), which for SGD is f itself. */
static const void *graft_run(tchi_cpu_run *run, tch_graft kind, const void *g, const void *f, void *out)
{
    const tch_hyper *h = run->update->hyper;
    if (kind == TCH_GRAFT_NONE || kind == TCH_GRAFT_SGD) {
        return f;
    }
    bool sum = kind == TCH_GRAFT_ADAGRAD;
    double root = kind == TCH_GRAFT_ADAM ? 1.0 / sqrt(run->rect->clock->graft) : 1.0;
    void *v = tchi_cpu_run_state(run, 1);
    run->steps->square(run->n, sum ? 1.0 : h->graft_beta2, sum ? 1.0 : 1.0 - h->graft_beta2, g, v);
    run->steps->whiten(run->n, root, h->graft_eps, 1.0, v, f, out);
    return out;
}

static void graft_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const graft_ctx *ctx = argument;
    int which = chunk->rect->block[1] != NULL ? 1 : 0;
    tchi_cpu_tile gradient, direction;
    tchi_cpu_run run;
    double sum = 0;
    tchi_cpu_tile_open(&gradient, ctx->update, chunk, 0, true);
    tchi_cpu_tile_open(&direction, ctx->update, chunk, which, true);
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        const void *g = gradient.data != NULL ? tchi_cpu_tile_run(&gradient, &run) : NULL;
        void *f = tchi_cpu_tile_run(&direction, &run);
        const void *d = graft_run(&run, ctx->kind, g, f, ctx->replace ? f : run.other);
        sum += run.loops->sum_squares(run.n, 1.0, d);
    }
    ctx->parts[chunk->number] = sum;
    if (ctx->replace) {
        tchi_cpu_tile_store(&direction, ctx->update, chunk, which);
    }
}

/* Rectangles of one block follow each other, and so do the sums of their chunks. */
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

tch_status tchi_cpu_graft(void *state, const tch_update *update, tch_graft kind, int32_t replace, double *norms,
                          void *scratch)
{
    graft_ctx ctx = {update, kind, replace, scratch};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, true, 8.0, graft_chunk, &ctx);
        finish_norms(update, scratch, norms);
    }
    return TCH_OK;
}

int64_t tchi_cpu_graft_scratch(int64_t elements, int64_t rects)
{
    return tchi_cpu_chunks_at_most(elements, rects) * (int64_t)sizeof(double);
}

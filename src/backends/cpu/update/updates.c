/* AdamW, SGD and Lion: a whole step in one pass over memory. */
#include "rects.h"

#include <math.h>
#include <string.h>

typedef struct step_ctx {
    const tch_update *update;
    const tch_elementwise_rule *rule;
} step_ctx;

static const void *gradient_of(const step_ctx *ctx, tchi_cpu_run *run, const void *p)
{
    return tchi_cpu_run_gradient(run, ctx->rule->decay == TCH_DECAY_L2 ? p : NULL, ctx->update->hyper->weight_decay);
}

/* --- AdamW ------------------------------------------------------------------------------------------------------ */

static tchi_cpu_adamw_numbers adamw_numbers(const tch_hyper *h, const tch_rect *rect, tch_decay decay)
{
    return (tchi_cpu_adamw_numbers){
        .keep1 = h->beta1,
        .take1 = 1.0 - h->beta1,
        .keep2 = h->beta2,
        .take2 = 1.0 - h->beta2,
        .root = 1.0 / sqrt(rect->clock->correction2),
        .eps = h->eps,
        .decay = tchi_rule_keep(h, decay),
        .step = h->lr * (double)rect->factor / rect->clock->correction1,
    };
}

static void adamw_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const step_ctx *ctx = argument;
    const tch_hyper *hyper = ctx->update->hyper;
    tchi_cpu_adamw_numbers numbers = adamw_numbers(hyper, chunk->rect, ctx->rule->decay);
    tchi_cpu_run run;
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        void *p = tchi_cpu_run_param(&run);
        const void *g = gradient_of(ctx, &run, p);
        run.steps->adamw(run.n, &numbers, p, g, tchi_cpu_run_moment(&run, 0), tchi_cpu_run_moment(&run, 1),
                         ctx->rule->amsgrad ? tchi_cpu_run_state(&run, 2) : NULL);
        tchi_cpu_run_store_moments(&run, TCHI_CODE_ADAMW);
        tchi_cpu_run_store_param(&run, p);
    }
}

/* --- SGD -------------------------------------------------------------------------------------------------------- */

/* The direction after momentum. The first step writes the buffer without reading it. */
static const void *apply_sgd_momentum(tchi_cpu_run *run, const void *g, int32_t nesterov)
{
    const tch_hyper *h = run->update->hyper;
    void *buffer = tchi_cpu_run_moment(run, 0);
    if (run->rect->clock->step <= 1.0) {
        memcpy(buffer, g, (size_t)(run->n * tchi_cpu_size(run->update->real)));
    } else {
        run->loops->combine(run->n, h->momentum, buffer, 1.0 - h->dampening, g, buffer);
    }
    if (!nesterov) {
        return buffer;
    }
    run->loops->combine(run->n, 1.0, g, h->momentum, buffer, run->other);
    return run->other;
}

static void sgd_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const step_ctx *ctx = argument;
    const tch_hyper *hyper = ctx->update->hyper;
    tchi_keep decay = tchi_rule_keep(hyper, ctx->rule->decay);
    bool momentum = hyper->momentum != 0.0 && chunk->rect->state[0] != NULL;
    tchi_cpu_run run;
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        void *p = tchi_cpu_run_param(&run);
        const void *g = gradient_of(ctx, &run, p);
        const void *d = momentum ? apply_sgd_momentum(&run, g, ctx->rule->nesterov) : g;
        if (momentum) {
            tchi_cpu_run_store_moments(&run, TCHI_CODE_SGD);
        }
        run.steps->descend(run.n, decay, hyper->lr * (double)chunk->rect->factor, d, p);
        tchi_cpu_run_store_param(&run, p);
    }
}

/* --- Lion ------------------------------------------------------------------------------------------------------- */

static tchi_cpu_lion_numbers lion_numbers(const tch_hyper *h, const tch_rect *rect, tch_decay decay)
{
    return (tchi_cpu_lion_numbers){
        .keep1 = h->beta1,
        .take1 = 1.0 - h->beta1,
        .keep2 = h->beta2,
        .take2 = 1.0 - h->beta2,
        .decay = tchi_rule_keep(h, decay),
        .step = h->lr * (double)rect->factor,
    };
}

static void lion_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    const step_ctx *ctx = argument;
    tchi_cpu_lion_numbers numbers = lion_numbers(ctx->update->hyper, chunk->rect, ctx->rule->decay);
    tchi_cpu_run run;
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        void *p = tchi_cpu_run_param(&run);
        const void *g = gradient_of(ctx, &run, p);
        run.steps->lion(run.n, &numbers, p, g, tchi_cpu_run_moment(&run, 0));
        tchi_cpu_run_store_moments(&run, TCHI_CODE_LION);
        tchi_cpu_run_store_param(&run, p);
    }
}

tch_status tchi_cpu_elementwise(void *state, const tch_update *update, const tch_elementwise_rule *rule)
{
    static const struct {
        tchi_cpu_chunk_task task;
        double work;
    } of[] = {[TCH_ELEMENTWISE_ADAMW] = {adamw_chunk, 8.0},
              [TCH_ELEMENTWISE_SGD] = {sgd_chunk, 4.0},
              [TCH_ELEMENTWISE_LION] = {lion_chunk, 4.0}};
    step_ctx ctx = {update, rule};
    if (!tchi_cpu_is_skipped(update)) {
        tchi_cpu_for_chunks(state, update, false, of[rule->kind].work, of[rule->kind].task, &ctx);
    }
    return TCH_OK;
}

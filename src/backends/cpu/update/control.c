/* Step control: clocks, non-finite gradients and loss scales. */
#include "rects.h"

#include <stdatomic.h>

#include "backends/rules.h"

tch_status tchi_cpu_decide_skip(void *state, const int32_t *found, const float *found_inf, const int32_t *agreement,
                                int32_t *skip, double *counts)
{
    tchi_rule_decide_skip(found, found_inf, agreement, skip, counts);
    return TCH_OK;
}

/* --- clocks ----------------------------------------------------------------------------------------------------- */

tch_status tchi_cpu_advance(void *state, int64_t count, tch_clock *const *clocks, const tch_hyper *hyper,
                            const int32_t *skip, int32_t correct, tch_factor_rule rule)
{
    for (int64_t k = 0; k < count; k++) {
        tchi_rule_advance(clocks[k], hyper, skip != NULL ? *skip : 0, correct, rule);
    }
    return TCH_OK;
}

/* --- non-finite gradients ---------------------------------------------------------------------------------------- */

typedef struct gradient_ctx {
    const tch_update *update;
    atomic_int found;
} gradient_ctx;

static int64_t count_nonfinite(tchi_cpu_run *run, const void *gradient)
{
    const tch_update *u = run->update;
    if (u->grad_type != u->real) {
        tchi_convert(run->n, u->real, run->other, u->grad_type, gradient);
        gradient = run->other;
    }
    return run->loops->count_nonfinite(run->n, gradient);
}

static void find_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    gradient_ctx *ctx = argument;
    int64_t size = tchi_cpu_size(ctx->update->grad_type);
    tchi_cpu_run run;
    tchi_cpu_run_begin(&run, ctx->update, chunk);
    while (tchi_cpu_run_next(&run)) {
        if (count_nonfinite(&run, (const char *)chunk->rect->grad + run.at * size) > 0) {
            atomic_store_explicit(&ctx->found, 1, memory_order_relaxed);
        }
    }
}

/* A non-finite number stays so after division, so checking the stored result suffices. */
static void unscale_chunk(void *argument, const tchi_cpu_chunk *chunk)
{
    gradient_ctx *ctx = argument;
    const tch_update *u = ctx->update;
    int64_t size = tchi_cpu_size(u->grad_type);
    tchi_cpu_run run;
    tchi_cpu_run_begin(&run, u, chunk);
    while (tchi_cpu_run_next(&run)) {
        char *stored = (char *)chunk->rect->grad + run.at * size;
        const void *g = stored;
        if (u->grad_type != u->real) {
            tchi_convert(run.n, u->real, run.gradient, u->grad_type, stored);
            g = run.gradient;
        }
        run.steps->divide(run.n, (double)*u->grad_scale, g, run.gradient);
        tchi_convert(run.n, u->grad_type, stored, u->real, run.gradient);
        if (count_nonfinite(&run, stored) > 0) {
            atomic_store_explicit(&ctx->found, 1, memory_order_relaxed);
        }
    }
}

tch_status tchi_cpu_inspect_gradients(void *state, const tch_update *update, int32_t unscale, int32_t *found,
                                      float *found_inf)
{
    gradient_ctx ctx = {.update = update};
    bool divides = unscale && update->grad_scale != NULL;
    tchi_cpu_for_chunks(state, update, false, divides ? 4.0 : 1.0, divides ? unscale_chunk : find_chunk, &ctx);
    if (ctx.found && found != NULL) {
        *found = 1;
    }
    if (ctx.found && found_inf != NULL) {
        *found_inf = 1.0f;
    }
    return TCH_OK;
}

tch_status tchi_cpu_update_scale(void *state, float *scale, int32_t *tracker, const float *found_inf, double growth,
                                 double backoff, int32_t interval)
{
    tchi_rule_update_scale(scale, tracker, found_inf, growth, backoff, interval);
    return TCH_OK;
}

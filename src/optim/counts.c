/* Host-side counters, as checkpoints and callers see them. The counts of a parameter are [steps of the optimizer, steps
 * with its gradient, one number for each factor], factors in the order of block batches, blocks and dimensions, which
 * depends only on its sizes. */
#include <math.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "refresh.h"

enum { STEPS, STEPS_SEEN, FACTORS }; /* offsets */

bool tchi_is_clock(double step)
{
    return step >= 0.0 && step <= (double)TCHI_MOST_STEPS && step == floor(step);
}

void tchi_param_resume(tchi_param *param, int64_t steps_seen, double step)
{
    uint64_t bits;
    memcpy(&bits, &step, sizeof bits);
    param->steps_seen = steps_seen;
    /* parameters with equal counts and equal clocks share an id: their later clocks are equal too */
    param->clock_id = ((uint64_t)steps_seen * 0x9E3779B97F4A7C15u) ^ (bits * 0xC2B2AE3D27D4EB4Fu);
}

/* Bit fields: 2 bits for failures, 5 for the interval, 5 for the next interval, 1 for stale, 16 for the level. */
enum { GAP_AT = 2, NEXT_GAP_AT = 7, STALE_AT = 12, LEVEL_AT = 13, MOST_GAP = 30 };

int64_t tchi_factor_count(const tchi_factor_batch *factor_batch, int64_t factor)
{
    return factor_batch->failures[factor] | (int64_t)factor_batch->gap[factor] << GAP_AT |
           (int64_t)factor_batch->next_gap[factor] << NEXT_GAP_AT | (int64_t)factor_batch->stale[factor] << STALE_AT |
           (int64_t)factor_batch->level[factor] << LEVEL_AT;
}

bool tchi_is_factor_count(int64_t count)
{
    return count >= 0 && count <= TCHI_MOST_FACTOR_COUNT && (count & 3) <= TCHI_MOST_FAILURES &&
           (count >> GAP_AT & 31) <= MOST_GAP && (count >> NEXT_GAP_AT & 31) <= MOST_GAP;
}

void tchi_factor_resume(tchi_factor_batch *factor_batch, int64_t factor, int64_t count)
{
    factor_batch->failures[factor] = count & 3;
    factor_batch->gap[factor] = count >> GAP_AT & 31;
    factor_batch->next_gap[factor] = count >> NEXT_GAP_AT & 31;
    factor_batch->stale[factor] = count >> STALE_AT & 1;
    factor_batch->level[factor] = (uint16_t)(count >> LEVEL_AT);
    tchi_outcomes_forget(factor_batch, factor);
}

static bool exists(const tch_optimizer *o, int32_t parameter)
{
    return o != NULL && parameter >= 0 && parameter < o->params.count;
}

/* Writes the factor counts of a parameter to `into`, or sets them from `from`; either may be NULL. Returns their
 * number. */
static int64_t each_factor(const tch_optimizer *o, int32_t parameter, int64_t *into, const int64_t *from)
{
    const tchi_group *g = tchi_group_at(o, tchi_param_at(o, parameter)->group);
    int64_t count = 0;
    for (int32_t i = g->first_block_batch; i < g->first_block_batch + g->block_batches; i++) {
        const tchi_block_batch *batch = tchi_block_batch_at(o, i);
        for (int64_t b = 0; b < batch->count; b++) {
            bool other = tchi_block_param(o, tchi_block_at(o, batch->first + b))->index != parameter;
            for (int32_t k = 0; k < batch->order && !other; k++) {
                tchi_factor_batch *f = tchi_factor_batch_of(o, batch, k);
                if (f != NULL && into != NULL) {
                    into[count] = tchi_factor_count(f, batch->position[k] + b);
                }
                if (f != NULL && from != NULL) {
                    tchi_factor_resume(f, batch->position[k] + b, from[count]);
                }
                count += f != NULL;
            }
        }
    }
    return count;
}

int64_t tch_optimizer_counts_length(const tch_optimizer *optimizer, int32_t parameter)
{
    return exists(optimizer, parameter) ? FACTORS + each_factor(optimizer, parameter, NULL, NULL) : 0;
}

static tch_status check(const tch_optimizer *o, const char *function, int32_t parameter, int64_t length,
                        const int64_t *counts)
{
    if (!exists(o, parameter)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: there is no parameter %d", function, parameter);
    }
    int64_t expected = tch_optimizer_counts_length(o, parameter);
    if (length != expected || counts == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: the counts of '%s' are %lld numbers, expected %lld", function,
                         tchi_param_at(o, parameter)->name, counts == NULL ? 0LL : (long long)length,
                         (long long)expected);
    }
    return TCH_OK;
}

tch_status tch_optimizer_get_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length, int64_t *counts)
{
    TCHI_TRY(check(optimizer, "tch_optimizer_get_counts", parameter, length, counts));
    TCHI_ENTER(optimizer->context, "tch_optimizer_get_counts");
    TCHI_TRY(tchi_outcomes_settle(optimizer));
    counts[STEPS] = optimizer->steps;
    counts[STEPS_SEEN] = tchi_param_at(optimizer, parameter)->steps_seen;
    each_factor(optimizer, parameter, counts + FACTORS, NULL);
    return TCH_OK;
}

static tch_status check_values(const char *function, const char *name, int64_t length, const int64_t *counts)
{
    for (int64_t i = 0; i < length; i++) {
        int64_t most = i < FACTORS ? TCHI_MOST_STEPS : TCHI_MOST_FACTOR_COUNT;
        bool good = i < FACTORS ? counts[i] >= 0 && counts[i] <= most : tchi_is_factor_count(counts[i]);
        if (!good) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: counts[%lld] of '%s' is %lld, expected 0 to %lld", function,
                             (long long)i, name, (long long)counts[i], (long long)most);
        }
    }
    return TCH_OK;
}

tch_status tch_optimizer_set_counts(tch_optimizer *optimizer, int32_t parameter, int64_t length, const int64_t *counts)
{
    static const char function[] = "tch_optimizer_set_counts";
    TCHI_TRY(check(optimizer, function, parameter, length, counts));
    tchi_param *p = tchi_param_at(optimizer, parameter);
    TCHI_TRY(check_values(function, p->name, length, counts));
    TCHI_ENTER(optimizer->context, function);
    double step;
    TCHI_TRY(optimizer->context->backend->device->copy_bytes(optimizer->context->state, &step, &p->clock->step,
                                                             sizeof step, TCH_COPY_TO_HOST));
    if (!tchi_is_clock(step)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: the clock of '%s', its state 'step', is %.17g, expected 0 to %lld", function, p->name,
                         step, (long long)TCHI_MOST_STEPS);
    }
    tchi_param_resume(p, counts[STEPS_SEEN], step);
    optimizer->steps = counts[STEPS];
    each_factor(optimizer, parameter, NULL, counts + FACTORS);
    return TCH_OK;
}

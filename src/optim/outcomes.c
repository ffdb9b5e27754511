/* The status of refreshes: which roots missed the tolerance, and the drift of factors from their bases. It stays on the
 * device and is read before the next refresh of the same factor, which then uses more damping or the eigen method, or
 * changes its interval. For refresh by norm, the norms of directions are stored in place of the drift, and read at the
 * next step. The trajectory therefore depends neither on calls for statistics nor on when the device finishes. */
#include <math.h>

#include "core/allocator.h"
#include "core/arith.h"
#include "core/status.h"

#include "refresh.h"

/* --- storage ----------------------------------------------------------------------------------------------------- */

static int64_t bytes_of_flags(const tchi_factor_batch *f)
{
    return tchi_round_up(f->count * (int64_t)sizeof *f->flags, (int64_t)sizeof(double));
}

int64_t tchi_outcome_bytes(const tchi_factor_batch *factor_batch)
{
    return bytes_of_flags(factor_batch) + factor_batch->count * (int64_t)sizeof(double);
}

double *tchi_outcome_drift(const tchi_factor_batch *factor_batch, int32_t *flags)
{
    return flags == NULL ? NULL : (double *)((char *)flags + bytes_of_flags(factor_batch));
}

/* --- effect on later refreshes ----------------------------------------------------------------------------------- */

static void note_status(const tch_optimizer *o, tchi_factor_batch *f, int64_t k, int32_t flag, double drift)
{
    const tch_optim_config *config = &tchi_group_at(o, f->group)->config;
    if (flag == TCH_REPORT_OK && tchi_refresh_by_drift(o, config) && drift > 0.0) { /* 0 for a first basis */
        f->next_gap[k] = tchi_refresh_next_gap(config, f->gap[k], drift);
    } else if (tchi_refresh_failed(config, flag) && f->root > 0 && f->failures[k] < TCHI_MOST_FAILURES) {
        f->failures[k]++;
    }
}

/* The mean square of a direction in steps of 2^(1/64), above 0. */
#define LEVELS 64.0
static uint16_t level_of(double norm, int64_t elements)
{
    double level = 32768.0 + round(LEVELS * (2.0 * log2(norm) - log2((double)elements)));
    return (uint16_t)fmin(fmax(level, 1.0), 65535.0);
}

/* Compares the norm of a block's direction, stored with factor k, to that right after the latest refresh of its roots.
 * Stale roots let the direction grow with the gradients, or shrink; rounding and noise do so less than the limits. A
 * direction of zeros means nothing; a negative norm is that of a skipped step, whose refreshes are repeated. */
static void note_norm(const tch_optimizer *o, tchi_factor_batch *f, int64_t k, double norm)
{
    const tchi_block_batch *c = tchi_block_batch_at(o, f->block_batch[k]);
    double limit = LEVELS * log2(tchi_group_at(o, f->group)->config.shampoo.refresh_drift);
    bool fresh = false;
    for (int32_t j = 0; j < c->order; j++) {
        const tchi_factor_batch *other = tchi_factor_batch_of(o, c, j);
        fresh = fresh || (other != NULL && other->refresh[c->position[j] + f->block[k]]);
    }
    bool skipped = norm < 0.0;
    if (norm == 0.0 || (skipped && !fresh)) {
        return;
    }
    uint16_t level = isfinite(norm) && !skipped ? level_of(norm, c->elements) : 0;
    double change = (double)level - (double)f->level[k];
    bool stale = level == 0 || (!fresh && (f->level[k] == 0 || change > limit || change < -limit - LEVELS));
    for (int32_t j = 0; j < c->order; j++) {
        if (c->factor_batch[j] >= 0) {
            tchi_factor_batch_of(o, c, j)->stale[c->position[j] + f->block[k]] = stale;
        }
    }
    f->level[k] = fresh && !skipped ? level : f->level[k];
}

static void note_all(tch_optimizer *o, tchi_factor_batch *f, const int32_t *flags)
{
    const double *drift = (const double *)((const char *)flags + bytes_of_flags(f));
    for (int64_t k = 0; k < f->count; k++) {
        uint8_t unread = f->unread[k];
        f->unread[k] = 0;
        if ((unread & TCHI_UNREAD_STATUS) != 0) {
            note_status(o, f, k, flags[k], drift[k]);
        }
        if ((unread & TCHI_UNREAD_NORM) != 0) {
            note_norm(o, f, k, drift[k]);
        }
    }
}

/* --- readback ---------------------------------------------------------------------------------------------------- */

static bool any_of(const uint8_t *marks, int64_t count)
{
    int64_t k = 0;
    while (k < count && marks[k] == 0) {
        k++;
    }
    return k < count;
}

/* Reads the status of all factors of a factor batch. Synchronizes. */
static tch_status read_now(tch_optimizer *o, tchi_factor_batch *f)
{
    size_t bytes = (size_t)tchi_outcome_bytes(f);
    int32_t *flags;
    TCHI_TRY(tchi_host_take(bytes, "the outcomes of a refresh", &flags));
    tch_status status =
        o->context->backend->device->copy_bytes(o->context->state, flags, f->flags, (int64_t)bytes, TCH_COPY_TO_HOST);
    if (status == TCH_OK) {
        note_all(o, f, flags);
    }
    tchi_host_release(flags, bytes);
    return status;
}

static tch_status note_batch(tch_optimizer *o, tchi_factor_batch *f)
{
    const tch_backend *t = o->context->backend;
    if (t->host_memory) {
        note_all(o, f, f->flags);
        return TCH_OK;
    }
    if (f->readback == NULL) {
        return read_now(o, f);
    }
    const void *outcomes;
    TCHI_TRY(t->device->readback_wait(o->context->state, f->readback, &outcomes));
    if (outcomes != NULL) {
        note_all(o, f, outcomes);
    }
    return TCH_OK;
}

tch_status tchi_outcomes_note(tch_optimizer *optimizer, int32_t group)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (any_of(f->unread, f->count) && any_of(f->refresh, f->count)) {
            TCHI_TRY(note_batch(optimizer, f));
        }
        for (int64_t k = 0; k < f->count; k++) {
            f->gap[k] = f->refresh[k] ? f->next_gap[k] : f->gap[k];
        }
    }
    return TCH_OK;
}

static tch_status ask_batch(tch_optimizer *o, tchi_factor_batch *f)
{
    const tch_backend *t = o->context->backend;
    int64_t bytes = tchi_outcome_bytes(f);
    for (int64_t k = 0; k < f->count; k++) {
        f->unread[k] |= f->refresh[k] ? TCHI_UNREAD_STATUS : 0;
    }
    if (t->host_memory || t->device->readback_post == NULL) {
        return TCH_OK;
    }
    return t->device->readback_post(o->context->state, &f->readback, f->flags, bytes);
}

tch_status tchi_outcomes_ask(tch_optimizer *optimizer, int32_t group)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        bool is_read = f->root > 0 || tchi_refresh_by_drift(optimizer, &g->config); /* otherwise unused */
        if (is_read && (any_of(f->refresh, f->count) || any_of(f->unread, f->count))) {
            TCHI_TRY(ask_batch(optimizer, f));
        }
    }
    return TCH_OK;
}

tch_status tchi_outcomes_settle(tch_optimizer *optimizer)
{
    for (int32_t i = 0; i < optimizer->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (any_of(f->unread, f->count)) {
            TCHI_TRY(note_batch(optimizer, f));
        }
    }
    return TCH_OK;
}

void tchi_outcomes_forget(tchi_factor_batch *factor_batch, int64_t factor)
{
    factor_batch->unread[factor] = 0;
    factor_batch->refreshed[factor] = 0;
}

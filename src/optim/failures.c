/* See failures.h. */
#include "failures.h"

#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "counts.h"
#include "user_kernel.h"

/* A root that the custom kernel failed is the built-in's next time, as if nothing had been. */
static void note_one(tch_optimizer *o, tchi_factor_batch *f, int64_t factor, int32_t flag)
{
    uint8_t *own = &f->own[factor];
    f->unread[factor] = 0;
    if (flag == TCH_REPORT_OK) {
        return;
    }
    if (*own == TCHI_USER_KERNEL_LATEST && flag == TCH_REPORT_NO_CONVERGENCE) {
        *own = TCHI_USER_KERNEL_REFUSED;
        o->own[TCH_OPTIM_PART_ROOT].refused++;
    } else if (*own != TCHI_USER_KERNEL_REFUSED && f->failures[factor] < TCHI_MOST_FAILURES) {
        f->failures[factor]++;
    }
}

static void note_all(tch_optimizer *o, tchi_factor_batch *f, const int32_t *flags)
{
    for (int64_t k = 0; k < f->count; k++) {
        if (f->unread[k]) {
            note_one(o, f, k, flags[k]);
        }
    }
}

static bool any_of(const uint8_t *marks, int64_t count)
{
    return count > 0 && memchr(marks, 1, (size_t)count) != NULL;
}

static bool has_news(const tchi_factor_batch *f)
{
    return f->root > 0 && any_of(f->unread, f->count);
}

/* All flags of a factor batch, with a wait for everything that is queued. */
static tch_status read_now(tch_optimizer *o, tchi_factor_batch *f)
{
    size_t bytes = (size_t)f->count * sizeof(int32_t);
    int32_t *flags;
    TCHI_TRY(tchi_host_take(bytes, "the flags of a refresh", &flags));
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
    const void *flags;
    TCHI_TRY(t->device->readback_wait(o->context->state, f->readback, &flags));
    if (flags != NULL) {
        note_all(o, f, flags);
    }
    return TCH_OK;
}

tch_status tchi_failures_note(tch_optimizer *optimizer, int32_t group)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (has_news(f) && any_of(f->due, f->count)) {
            TCHI_TRY(note_batch(optimizer, f));
        }
    }
    return TCH_OK;
}

static tch_status ask_batch(tch_optimizer *o, tchi_factor_batch *f)
{
    const tch_backend *t = o->context->backend;
    int64_t bytes = f->count * (int64_t)sizeof *f->flags;
    for (int64_t k = 0; k < f->count; k++) {
        f->unread[k] |= f->due[k];
    }
    if (t->host_memory || t->device->readback_create == NULL) {
        return TCH_OK;
    }
    if (f->readback == NULL) {
        TCHI_TRY(t->device->readback_create(o->context->state, bytes, &f->readback));
    }
    return t->device->readback_post(o->context->state, f->readback, f->flags, bytes);
}

tch_status tchi_failures_ask(tch_optimizer *optimizer, int32_t group)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (f->root > 0 && any_of(f->due, f->count)) {
            TCHI_TRY(ask_batch(optimizer, f));
        }
    }
    return TCH_OK;
}

tch_status tchi_failures_settle(tch_optimizer *optimizer)
{
    for (int32_t i = 0; i < optimizer->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (has_news(f)) {
            TCHI_TRY(note_batch(optimizer, f));
        }
    }
    return TCH_OK;
}

void tchi_failures_forget(tchi_factor_batch *factor_batch, int64_t factor)
{
    factor_batch->unread[factor] = 0;
}

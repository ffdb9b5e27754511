/* See recording.h. A new key only gets a list entry: recording pays for repeated work. A failed recording is not an
 * error: the work then runs without one. */
#include "recording.h"

#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "status.h"

/* Warm-up calls before recording, in which the backend loads kernels lazily and the workspace reaches its size. */
#define WARM_CALLS 2

/* A recording in use is not evicted: with more recordings than places each would be recorded anew before its replay,
 * which costs more than not recording. */
#define IDLE_CALLS (4 * TCHI_MOST_RECORDINGS)

/* The caller's key and the workspace. All int64_t: no padding, so bytes can be compared. */
typedef struct full_key {
    tchi_recording_key local;
    int64_t workspace, workspace_bytes, workspace_limit;
} full_key;

typedef struct recording {
    full_key key;
    int64_t calls;
    int64_t latest;  /* when it was last used, counted by the owner's calls */
    void *recorded;  /* the backend's, or NULL */
    int64_t kernels; /* in it */
    bool refused;
} recording;

static full_key key_of(const tch_context *context, const tchi_recording_key *key)
{
    return (full_key){.local = *key,
                      .workspace = (int64_t)(intptr_t)context->workspace,
                      .workspace_bytes = context->workspace_bytes,
                      .workspace_limit = context->workspace_limit};
}

static void release_recording(const tch_context *context, recording *r)
{
    if (r->recorded != NULL) {
        context->backend->recording->release(context->state, r->recorded);
    }
    r->recorded = NULL;
}

/* --- the list ---------------------------------------------------------------------------------------------------- */

static recording *find_recording(const tchi_recordings *recordings, const full_key *key)
{
    recording *all = recordings->list.items;
    for (int64_t i = 0; i < recordings->list.count; i++) {
        if (memcmp(&all[i].key, key, sizeof *key) == 0) {
            return &all[i];
        }
    }
    return NULL;
}

static recording *oldest_recording(const tchi_recordings *recordings)
{
    recording *all = recordings->list.items;
    recording *found = all;
    for (int64_t i = 1; i < recordings->list.count; i++) {
        found = all[i].latest < found->latest ? &all[i] : found;
    }
    return found;
}

/* A free list entry, or that of a recording long idle; NULL if there is neither. */
static recording *claim_entry(const tch_context *context, tchi_recordings *recordings)
{
    if (recordings->list.count < recordings->list.room) {
        return tchi_list_extend(&recordings->list);
    }
    recording *place = oldest_recording(recordings);
    if (recordings->calls - place->latest < IDLE_CALLS) {
        return NULL;
    }
    release_recording(context, place);
    *place = (recording){0};
    return place;
}

static recording *place_of(const tch_context *context, tchi_recordings *recordings, const full_key *key)
{
    recording *r = find_recording(recordings, key);
    recordings->calls++;
    if (r == NULL && (r = claim_entry(context, recordings)) != NULL) {
        r->key = *key;
    }
    if (r != NULL) {
        r->latest = recordings->calls;
    }
    return r;
}

/* --- recording and replaying ------------------------------------------------------------------------------------- */

/* r->recorded stays NULL if the work cannot be recorded. If recording grew the workspace its addresses do not match the
 * key and it is dropped. Errors are the backend's. */
static tch_status record_work(tch_context *context, recording *r, tch_status (*work)(void *argument), void *argument)
{
    TCHI_TRY(context->backend->recording->record(context->state, work, argument, &r->recorded, &r->kernels));
    full_key now = key_of(context, &r->key.local);
    if (memcmp(&now, &r->key, sizeof now) != 0) {
        release_recording(context, r);
    }
    return TCH_OK;
}

static tch_status replay_work(tch_context *context, const recording *r, int32_t *begun)
{
    TCHI_RANGE(context, "recorded");
    return context->backend->recording->replay(context->state, r->recorded, begun);
}

/* A replay that fails before it begins has queued nothing. */
static tch_status record_and_replay(tch_context *context, recording *r, tch_status (*work)(void *argument),
                                    void *argument)
{
    int32_t begun = 0;
    if (r->recorded == NULL) {
        TCHI_TRY(record_work(context, r, work, argument));
    }
    if (r->recorded != NULL) {
        tch_status status = replay_work(context, r, &begun);
        if (status == TCH_OK || begun) {
            return status;
        }
    }
    release_recording(context, r);
    r->refused = true;
    return work(argument);
}

bool tchi_can_record(const tch_context *context)
{
    const tch_recording_ops *ops = context->backend->recording;
    return ops != NULL && ops->bytes(context->state, 0) >= 0;
}

tch_status tchi_recorded(tch_context *context, tchi_recordings *recordings, const tchi_recording_key *key,
                         tch_status (*work)(void *argument), void *argument)
{
    bool listening = context->range_push != NULL; /* who listens to ranges wants to see the phases of the work */
    if (recordings->list.room == 0 || listening || !tchi_can_record(context)) {
        return work(argument);
    }
    full_key full = key_of(context, key);
    recording *r = place_of(context, recordings, &full);
    if (r == NULL || r->refused || ++r->calls <= WARM_CALLS) {
        return work(argument);
    }
    return record_and_replay(context, r, work, argument);
}

/* --- the owner's ------------------------------------------------------------------------------------------------- */

tch_status tchi_recordings_open(const tch_context *context, tchi_recordings *recordings)
{
    recordings->list.item_size = sizeof(recording);
    return context->backend->recording == NULL ? TCH_OK : tchi_list_reserve(&recordings->list, TCHI_MOST_RECORDINGS);
}

int64_t tchi_recordings_kernels(const tchi_recordings *recordings)
{
    const recording *all = recordings->list.items;
    int64_t kernels = 0;
    for (int64_t i = 0; i < recordings->list.count; i++) {
        kernels += all[i].recorded != NULL ? all[i].kernels : 0;
    }
    return kernels;
}

int64_t tchi_recorded_bytes(const tch_context *context, int64_t kernels)
{
    return tchi_can_record(context) ? context->backend->recording->bytes(context->state, kernels) : 0;
}

void tchi_recordings_clear(const tch_context *context, tchi_recordings *recordings)
{
    recording *all = recordings->list.items;
    for (int64_t i = 0; i < recordings->list.count; i++) {
        release_recording(context, &all[i]);
    }
    recordings->list.count = 0;
}

void tchi_recordings_close(const tch_context *context, tchi_recordings *recordings)
{
    tchi_recordings_clear(context, recordings);
    tchi_list_release(&recordings->list);
}

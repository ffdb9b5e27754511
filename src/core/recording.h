/* Repeated work with the same arguments: recorded once, then queued as a whole by one backend call. Saves host time,
 * not device time, with bitwise-identical results.
 *
 * The one thing to know before using it: every number and address that `work` passes to the backend must follow from
 * the key, or be invalidated by tchi_recordings_clear when it changes; device memory may change freely. `work` may or
 * may not be called: host-side counters belong outside of it. */
#ifndef TCHI_RECORDING_H
#define TCHI_RECORDING_H

#include <string.h>

#include "context.h"
#include "list.h"

/* Key of a recording; unused entries are 0. The context's workspace is added. */
#define TCHI_RECORDING_PARTS 8
typedef struct tchi_recording_key {
    int64_t part[TCHI_RECORDING_PARTS];
} tchi_recording_key;

/* A number passed to work by value, as part of a key. */
static inline int64_t tchi_recording_number(double number)
{
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* Of one owner, at a time. */
#define TCHI_MOST_RECORDINGS 256

/* The recordings of one owner, an optimizer. Zero-initialized it is closed: work runs unrecorded. */
typedef struct tchi_recordings {
    tchi_list list;
    int64_t calls;
} tchi_recordings;

/* Allocates the list, so that work does not have to; nothing if the backend cannot record. */
tch_status tchi_recordings_open(const tch_context *context, tchi_recordings *recordings);

/* Whether the backend can record work now. */
bool tchi_can_record(const tch_context *context);

/* Runs `work`: directly during the first calls and while the caller listens to ranges; otherwise, if the backend can,
 * recorded and replayed. While recording nothing may allocate, synchronize or copy to the host: such work fails and is
 * never recorded. `work` must not change its owner. */
tch_status tchi_recorded(tch_context *context, tchi_recordings *recordings, const tchi_recording_key *key,
                         tch_status (*work)(void *argument), void *argument);

/* The number of recorded kernels; and the device memory they use by the backend's estimate, 0 if it does not record. */
int64_t tchi_recordings_kernels(const tchi_recordings *recordings);
int64_t tchi_recorded_bytes(const tch_context *context, int64_t kernels);

/* Drops all recordings. They may still be running: their memory must stay valid as for directly queued work. */
void tchi_recordings_clear(const tch_context *context, tchi_recordings *recordings);

void tchi_recordings_close(const tch_context *context, tchi_recordings *recordings);

#endif

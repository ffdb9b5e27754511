/* Work that is queued again and again with the same arguments: recorded once, and from then on queued as a whole by one
 * call of the backend. It saves the host's time, not the device's, and gives the same results to the bit.
 *
 * The one thing to know before using it: whatever `work` hands to the backend, numbers and addresses, must follow from
 * the key, or be forgotten by tchi_recordings_clear when it changes; what the device reads from its memory may change
 * freely. And `work` may be called or not: what the host keeps count of belongs outside of it. */
#ifndef TCHI_RECORDING_H
#define TCHI_RECORDING_H

#include <string.h>

#include "context.h"
#include "list.h"

/* What one recording is found by; those that are not used are 0. The context's workspace is added to it. */
#define TCHI_RECORDING_PARTS 8
typedef struct tchi_recording_key {
    int64_t part[TCHI_RECORDING_PARTS];
} tchi_recording_key;

/* A number that work is given by value, as a part of a key. */
static inline int64_t tchi_recording_number(double number)
{
    int64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* Of one owner, at a time. */
#define TCHI_MOST_RECORDINGS 256

/* The recordings of one owner, an optimizer. All zero they are closed, and work is only done. */
typedef struct tchi_recordings {
    tchi_list list;
    int64_t calls;
} tchi_recordings;

/* Takes the memory for them, so that no work has to; where the backend cannot record there is nothing to take. */
tch_status tchi_recordings_open(const tch_context *context, tchi_recordings *recordings);

/* Whether the backend can record work now. */
bool tchi_can_record(const tch_context *context);

/* Does `work`. It is called the first times, and while the caller is told of ranges; otherwise, where the backend can,
 * it is recorded and replayed. While recording, nothing may allocate, synchronize or copy to the host: work that
 * does so fails then, and is never recorded. The owner must not be changed by `work`. */
tch_status tchi_recorded(tch_context *context, tchi_recordings *recordings, const tchi_recording_key *key,
                         tch_status (*work)(void *argument), void *argument);

/* The kernels that are recorded now; and what so many take of the device's memory, by the backend's estimate: 0 where
 * it does not record. */
int64_t tchi_recordings_kernels(const tchi_recordings *recordings);
int64_t tchi_recorded_bytes(const tch_context *context, int64_t kernels);

/* Forgets all of them. They may still be running: their memory must stay as it would for work that was queued
 * singly. */
void tchi_recordings_clear(const tch_context *context, tchi_recordings *recordings);

void tchi_recordings_close(const tch_context *context, tchi_recordings *recordings);

#endif

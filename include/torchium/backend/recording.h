/* Operations table, chapter 6: recorded work, for devices on which queueing takes the host long. Without it work is
 * queued each time.
 *
 * Work that comes again with the same arguments is kept once, and from then on queued as a whole. src/core/recording.c
 * decides what, and is the one caller: no other entry can queue several operations at once. */
#ifndef TORCHIUM_BACKEND_RECORDING_H
#define TORCHIUM_BACKEND_RECORDING_H

#include <stdint.h>

#include <torchium/status.h>

/* Bytes of device memory that recordings with this many kernels in total take outside of any pool: an estimate. -1
 * while work cannot be recorded: the caller captures what is queued, or synchronizes after every operation. */
typedef int64_t tch_recording_bytes_op(void *state, int64_t kernels);
/* Calls `work`, and keeps what it queues instead of doing it; it must not allocate or synchronize. *recording is NULL
 * if the work failed or cannot be kept, which is no error; *kernels is the number of kernels in it. An error is one of
 * the state, which can no longer be used. */
typedef tch_status tch_recording_record_op(void *state, tch_status (*work)(void *argument), void *argument,
                                           void **recording, int64_t *kernels);
/* Queues all of it, in order with other work. *begun is 0, and becomes 1 when a part has been queued: after a failure
 * with it the work cannot be done another way. */
typedef tch_status tch_recording_replay_op(void *state, void *recording, int32_t *begun);
/* Called also outside begin and end, and while what was queued is still running. */
typedef void tch_recording_release_op(void *state, void *recording);

typedef struct tch_recording_ops {
    /* all REQUIRED */
    tch_recording_bytes_op *bytes;
    tch_recording_record_op *record;
    tch_recording_replay_op *replay;
    tch_recording_release_op *release;
} tch_recording_ops;

#endif

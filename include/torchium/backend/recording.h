/* Operations table, chapter 6: recorded work, for devices on which queueing takes the host long. Without it work is
 * queued each time.
 *
 * Work that comes again with the same arguments is kept once, and from then on queued as a whole. */
#ifndef TORCHIUM_BACKEND_RECORDING_H
#define TORCHIUM_BACKEND_RECORDING_H

#include <stdint.h>

#include <torchium/status.h>

/* Whether work can be recorded now: not while the caller records what is queued, or wants every operation by itself. */
typedef int32_t tch_recording_possible_op(void *state);
/* What is queued from here on is kept and not done; until recording_end nothing may allocate or synchronize. After a
 * failure everything is as it was. */
typedef tch_status tch_recording_begin_op(void *state);
/* Also after an error of what was queued. *recording is NULL where it cannot be kept, which is no failure; *kernels is
 * how many pieces of work it holds. */
typedef tch_status tch_recording_end_op(void *state, void **recording, int64_t *kernels);
/* Queues all of it, in order with other work. *begun is 0, and becomes 1 when a part has been queued: after a failure
 * with it the work cannot be done another way. */
typedef tch_status tch_recording_replay_op(void *state, void *recording, int32_t *begun);
/* Bytes of the device's memory that recordings with so many kernels in all take outside of any pool: an estimate. */
typedef int64_t tch_recording_bytes_op(void *state, int64_t kernels);
/* Called also outside begin and end, and while what was queued is still running. */
typedef void tch_recording_release_op(void *state, void *recording);

typedef struct tch_recording_ops {
    /* all REQUIRED */
    tch_recording_possible_op *possible;
    tch_recording_begin_op *begin;
    tch_recording_end_op *end;
    tch_recording_replay_op *replay;
    tch_recording_bytes_op *bytes;
    tch_recording_release_op *release;
} tch_recording_ops;

#endif

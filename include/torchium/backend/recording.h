/* Operations table, chapter 6: recordings (CUDA graphs), for devices on which launches are expensive for the host.
 * Without it work is queued each time.
 *
 * Work that repeats with the same arguments is recorded once and then replayed with one launch. The only caller is
 * src/core/recording.c, which decides what to record. */
#ifndef TORCHIUM_BACKEND_RECORDING_H
#define TORCHIUM_BACKEND_RECORDING_H

#include <stdint.h>

#include <torchium/status.h>

/* An estimate of the device memory, outside of any pool, of recordings with this many kernels in total. -1 while work
 * cannot be recorded: the caller captures the stream, or synchronizes after every operation. */
typedef int64_t tch_recording_bytes_op(void *state, int64_t kernels);
/* Calls `work`, which must not allocate or synchronize, and records what it queues without running it. *recording is
 * NULL if the work failed or cannot be recorded, which is not an error; *kernels is the number of kernels in it. After
 * an error the state is unusable. */
typedef tch_status tch_recording_record_op(void *state, tch_status (*work)(void *argument), void *argument,
                                           void **recording, int64_t *kernels);
/* Queues the recording in stream order. *begun is 0 and is set to 1 once a part has been queued: after a failure the
 * caller then cannot queue the work directly. */
typedef tch_status tch_recording_replay_op(void *state, void *recording, int32_t *begun);
/* Also called outside `begin` and `end`, and while a replay is still running. */
typedef void tch_recording_release_op(void *state, void *recording);

typedef struct tch_recording_ops {
    /* all REQUIRED */
    tch_recording_bytes_op *bytes;
    tch_recording_record_op *record;
    tch_recording_replay_op *replay;
    tch_recording_release_op *release;
} tch_recording_ops;

#endif

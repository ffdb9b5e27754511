/* The library's services for the CUDA module, for tests of its host side on the emulated device: messages are kept,
 * host memory is counted and can run out, and ranges are recorded in emulated.timeline. */
#ifndef EMULATOR_FAKE_HOST_H
#define EMULATOR_FAKE_HOST_H

#include <stdint.h>

#include <torchium/status.h>

#include "emulator/api/control.h"

typedef struct fake_host_record {
    char message[8192];
    int64_t bytes;        /* allocated */
    int allocations_left; /* until one fails; -1 for never */
    int ranges_heard;     /* whether a profiler is attached */
} fake_host_record;

extern fake_host_record fake_host;

/* Two devices of capability 9.0, of which 0 is current, and no message. */
void fake_host_reset(void);
/* Fixtures: *state is a state on device 1 after a reset; the teardown releases everything. */
int fake_host_open(void **state);
int fake_host_close(void **state);
#define FAKE_HOST_TEST(test) TEST_WITH(test, fake_host_open, fake_host_close)
/* Whether everything was released and restored: memory, streams, graphs, the device, errors. */
int fake_host_is_clean(void);
/* Checks that the latest message contains these words. */
void fake_host_expect(const char *words);
/* The stream of a state; and a capture of a stream, which must not have been invalidated. */
cudaStream_t fake_host_stream(void *state);
void fake_host_begin_capture(cudaStream_t stream);
void fake_host_end_capture(cudaStream_t stream);
/* Repeats the call with its first, second, ... allocation failing until it succeeds; each failure must report out of
 * memory and leak nothing. Returns their number. */
int fake_host_fail_allocations(tch_status (*call)(void *data), void *data);
/* Runs `body` in a child process, for per-process initialization; it must return 0. */
void fake_host_in_a_child(int (*body)(void));

#endif

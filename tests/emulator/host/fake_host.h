/* What the library offers the CUDA module, for tests of its host side on the emulated device: messages are kept, host
 * memory is counted and can be made to run out, and ranges are written down in emulated.timeline. */
#ifndef EMULATOR_FAKE_HOST_H
#define EMULATOR_FAKE_HOST_H

#include <stdint.h>

#include <torchium/status.h>

#include "emulator/api/control.h"

typedef struct fake_host_record {
    char message[8192];
    int64_t bytes;        /* allocated */
    int allocations_left; /* until one fails; -1 for never */
    int ranges_heard;     /* whether a profiler listens */
} fake_host_record;

extern fake_host_record fake_host;

/* Two devices of capability 9.0, of which 0 is current, and no message. */
void fake_host_reset(void);
/* Fixtures: after a reset *state is a state on device 1; it leaves everything clean. */
int fake_host_open(void **state);
int fake_host_close(void **state);
#define FAKE_HOST_TEST(test) TEST_WITH(test, fake_host_open, fake_host_close)
/* Whether everything was given back and left as it was: memory, streams, graphs, the device, errors. */
int fake_host_is_clean(void);
/* That the latest message has these words. */
void fake_host_expect(const char *words);
/* The stream a state works on; and a capture of a stream, which nothing may have ended. */
cudaStream_t fake_host_stream(void *state);
void fake_host_begin_capture(cudaStream_t stream);
void fake_host_end_capture(cudaStream_t stream);
/* Makes the call with each of its allocations failing in turn until it succeeds; each failure must be for want of
 * memory and leave nothing. Returns how many there were. */
int fake_host_fail_allocations(tch_status (*call)(void *data), void *data);
/* Runs `body` in a child, for what a process finds out or decides only once; it must return 0. */
void fake_host_in_a_child(int (*body)(void));

#endif

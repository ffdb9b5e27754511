/* What the library offers the CUDA module, for tests of its host side on support/cuda/fake_runtime.h: messages are
 * kept, and host memory is counted and can be made to run out. */
#ifndef TORCHIUM_TESTS_FAKE_HOST_H
#define TORCHIUM_TESTS_FAKE_HOST_H

#include <stdint.h>

typedef struct fake_host_record {
    char message[8192];
    int64_t bytes;        /* allocated */
    int allocations_left; /* until one fails; -1 for never */
} fake_host_record;

extern fake_host_record fake_host;

/* That the latest message has these words. */
void fake_host_expect(const char *wanted);

#endif

/* Random bits and error texts of the system. */
#include "system.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* Falls back to the clock and an address while the system boots or without the call. */
uint64_t tchi_random_bits(void)
{
    uint64_t bits = 0;
    if (getrandom(&bits, sizeof bits, GRND_NONBLOCK) != (ssize_t)sizeof bits) {
        struct timespec now = {0};
        clock_gettime(CLOCK_MONOTONIC, &now);
        bits = ((uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec ^ (uint64_t)(uintptr_t)&now) * 0x9e3779b97f4a7c15;
    }
    return bits;
}

const char *tchi_errno_text(int error, char text[TCHI_ERRNO_SIZE])
{
    if (strerror_r(error, text, TCHI_ERRNO_SIZE) != 0) {
        snprintf(text, TCHI_ERRNO_SIZE, "error %d", error);
    }
    return text;
}

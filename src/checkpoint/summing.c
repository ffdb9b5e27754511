/* See summing.h. */
#define _POSIX_C_SOURCE 200809L
#include "summing.h"

#include <signal.h>

#include "crc32c.h"

/* Summed in 100 microseconds or less, which is what a thread may take to start on a busy machine. */
#define FEW_BYTES ((int64_t)1 << 20)

static void *sum_bytes(void *argument)
{
    tchi_summing *s = argument;
    s->checksum = tchi_crc32c(s->checksum, s->bytes, s->count);
    return NULL;
}

/* The program's signals are for its own threads. */
static bool start_beside(tchi_summing *s)
{
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) {
        return false;
    }
    bool started = pthread_create(&s->thread, NULL, sum_bytes, s) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

void tchi_summing_begin(tchi_summing *summing, uint32_t checksum, const void *bytes, int64_t count)
{
    *summing = (tchi_summing){.bytes = bytes, .count = count, .checksum = checksum};
    summing->beside = count > FEW_BYTES && start_beside(summing);
    if (!summing->beside) {
        (void)sum_bytes(summing);
    }
}

uint32_t tchi_summing_end(tchi_summing *summing)
{
    if (summing->beside) {
        (void)pthread_join(summing->thread, NULL);
    }
    return summing->checksum;
}

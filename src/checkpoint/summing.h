/* A checksum taken by a thread of its own while the bytes are written: what a save costs more is a start of a thread.
 *
 *     tchi_summing summing;
 *     tchi_summing_begin(&summing, checksum, bytes, count);
 *     ...                                                      // whatever reads the bytes
 *     checksum = tchi_summing_end(&summing);
 */
#ifndef TCHI_CHECKPOINT_SUMMING_H
#define TCHI_CHECKPOINT_SUMMING_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct tchi_summing {
    const void *bytes;
    int64_t count;
    uint32_t checksum;
    bool beside; /* there is a thread */
    pthread_t thread;
} tchi_summing;

/* Bytes that are few, or for which no thread can be had, are summed before this returns. */
void tchi_summing_begin(tchi_summing *summing, uint32_t checksum, const void *bytes, int64_t count);
uint32_t tchi_summing_end(tchi_summing *summing);

#endif

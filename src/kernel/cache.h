/* Compiled kernels on disk. Processes share a folder without locking: an entry appears complete, by a rename, and may
 * disappear at any time. A failure costs a compilation, never a call. */
#ifndef TCHI_KERNEL_CACHE_H
#define TCHI_KERNEL_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include <torchium/backend.h>

#include "core/sha256.h"

typedef struct tchi_cache_key {
    bool usable; /* false: compile each time and keep nothing */
    uint8_t bytes[TCHI_SHA256_BYTES];
} tchi_cache_key;

/* The key of a text that reads no files; `compiler` is the backend's identification, empty if images must not be
 * kept. */
tchi_cache_key tchi_cache_key_make(const tch_kernel_text *text, const char *compiler);

/* Whether the text may read files that the key does not cover (includes.c). */
bool tchi_kernel_reads_files(const tch_kernel_text *text);

/* Whether there is an entry, and its image in host memory. Damaged entries are removed. */
bool tchi_cache_find(const tchi_cache_key *key, tch_kernel_image *image);
void tchi_cache_keep(const tchi_cache_key *key, const tch_kernel_image *image);
void tchi_cache_remove(const tchi_cache_key *key);

/* "0123...ef.kernel": 64 digits and this. */
#define TCHI_CACHE_SUFFIX ".kernel"

#endif

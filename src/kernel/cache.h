/* Compiled kernels on disk. Many processes may use one folder at once and none waits for another: an entry appears
 * whole, by a rename, and may disappear at any moment. Whatever goes wrong here costs a compilation, never a call. */
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

/* Of a text that reads no files; `compiler` is the backend's line, empty where images must not be kept. */
tchi_cache_key tchi_cache_key_make(const tch_kernel_text *text, const char *compiler);

/* True where a compiler may read files that the key does not cover (includes.c). */
bool tchi_kernel_reads_files(const tch_kernel_text *text);

/* True where there was an entry, and then its image, of host memory. An entry that is damaged is removed. */
bool tchi_cache_find(const tchi_cache_key *key, tch_kernel_image *image);
void tchi_cache_keep(const tchi_cache_key *key, const tch_kernel_image *image);
void tchi_cache_remove(const tchi_cache_key *key);

/* "0123...ef.kernel": 64 digits and this. */
#define TCHI_CACHE_SUFFIX ".kernel"

#endif

/* SHA-256 of FIPS 180-4: the names of cache entries, and the proof that an entry is whole. */
#ifndef TCHI_SHA256_H
#define TCHI_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define TCHI_SHA256_BYTES 32

typedef struct tchi_sha256_state {
    uint32_t words[8];
    uint64_t count; /* bytes so far */
    uint8_t block[64];
} tchi_sha256_state;

void tchi_sha256_begin(tchi_sha256_state *state);
void tchi_sha256_add(tchi_sha256_state *state, const void *bytes, size_t count);
void tchi_sha256_end(tchi_sha256_state *state, uint8_t digest[TCHI_SHA256_BYTES]);

/* All three at once. */
void tchi_sha256(const void *bytes, size_t count, uint8_t digest[TCHI_SHA256_BYTES]);

#endif

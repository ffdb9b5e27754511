/* SHA-256 as in FIPS 180-4. The message is processed in blocks of 64 bytes; an incomplete block is buffered in the
 * state. */
#include "sha256.h"

#include <string.h>

#define BLOCK 64

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int by)
{
    return x >> by | x << (32 - by);
}

static void expand(uint32_t w[64], const uint8_t *block)
{
    for (int i = 0; i < 16; i++) {
        const uint8_t *b = block + 4 * i;
        w[i] = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
    }
    for (int i = 16; i < 64; i++) {
        uint32_t near = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t far = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + near + w[i - 7] + far;
    }
}

/* The eight words under the standard's letters, which keeps them in registers: shifting an array each round took twice
 * as long. */
static void mix(uint32_t words[8], const uint8_t *block)
{
    uint32_t w[64];
    expand(w, block);
    uint32_t a = words[0], b = words[1], c = words[2], d = words[3];
    uint32_t e = words[4], f = words[5], g = words[6], h = words[7];
    for (int i = 0; i < 64; i++) {
        uint32_t choice = (e & f) ^ (~e & g);
        uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
        uint32_t one = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice + constants[i] + w[i];
        uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
        h = g, g = f, f = e, e = d + one;
        d = c, c = b, b = a, a = one + two;
    }
    words[0] += a, words[1] += b, words[2] += c, words[3] += d;
    words[4] += e, words[5] += f, words[6] += g, words[7] += h;
}

void tchi_sha256_begin(tchi_sha256_state *state)
{
    /* The same of the square roots of the first eight primes. */
    *state = (tchi_sha256_state){
        .words = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void tchi_sha256_add(tchi_sha256_state *state, const void *bytes, size_t count)
{
    const uint8_t *at = bytes;
    while (count > 0) {
        size_t waiting = state->count % BLOCK;
        size_t part = BLOCK - waiting < count ? BLOCK - waiting : count;
        memcpy(state->block + waiting, at, part);
        state->count += part;
        at += part;
        count -= part;
        if (state->count % BLOCK == 0) {
            mix(state->words, state->block);
        }
    }
}

/* A bit of 1, zeros up to 8 bytes before the end of a block, and there the number of bits. */
void tchi_sha256_end(tchi_sha256_state *state, uint8_t digest[TCHI_SHA256_BYTES])
{
    uint64_t bits = state->count * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) {
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    }
    tchi_sha256_add(state, "\x80", 1);
    while (state->count % BLOCK != BLOCK - sizeof length) {
        tchi_sha256_add(state, "", 1);
    }
    tchi_sha256_add(state, length, sizeof length);
    for (int i = 0; i < TCHI_SHA256_BYTES; i++) {
        digest[i] = (uint8_t)(state->words[i / 4] >> (24 - 8 * (i % 4)));
    }
}

void tchi_sha256(const void *bytes, size_t count, uint8_t digest[TCHI_SHA256_BYTES])
{
    tchi_sha256_state state;
    tchi_sha256_begin(&state);
    tchi_sha256_add(&state, bytes, count);
    tchi_sha256_end(&state, digest);
}

/* CRC-32C by the processor's instruction, which takes eight bytes and is begun every cycle but done two or three later.
 * So three stretches are summed side by side, and joined: the register of the first, moved past the second, is its
 * share. Moving is a product of polynomials. */
#include "crc32c.h"

#include <string.h>

/* Compiled for the instruction by an attribute and not by an option: the rest of the library does without. */
#if defined(__x86_64__)
#include <nmmintrin.h>
#define WITH_CRC __attribute__((target("sse4.2")))
#define STEP_WORD(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define STEP_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
#elif defined(__aarch64__) && defined(__clang__)
#define WITH_CRC __attribute__((target("crc")))
#define STEP_WORD(crc, word) __builtin_arm_crc32cd(crc, word)
#define STEP_BYTE(crc, byte) __builtin_arm_crc32cb(crc, byte)
#elif defined(__aarch64__)
#define WITH_CRC __attribute__((target("+crc")))
#define STEP_WORD(crc, word) __builtin_aarch64_crc32cx(crc, word)
#define STEP_BYTE(crc, byte) __builtin_aarch64_crc32cb(crc, byte)
#endif

#if defined(WITH_CRC)

/* Bytes of a stretch: joining costs as much as 1 KiB, 2 % of three stretches. */
#define STRETCH 16384
/* x^(8 STRETCH) modulo the polynomial. */
#define PAST_STRETCH 0xbf455269u

/* The product of two polynomials modulo the third. Bit 31 is the power 0. */
static uint32_t multiply_polynomials(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a != 0; a <<= 1) {
        product ^= a >> 31 ? b : 0;
        b = b >> 1 ^ (b & 1 ? TCHI_CRC32C_POLYNOMIAL : 0);
    }
    return product;
}

static uint64_t word_at(const unsigned char *at)
{
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

WITH_CRC static uint32_t three_stretches(uint32_t crc, const unsigned char *at)
{
    uint32_t second = 0;
    uint32_t third = 0;
    for (int i = 0; i < STRETCH; i += 8) {
        crc = STEP_WORD(crc, word_at(at + i));
        second = STEP_WORD(second, word_at(at + STRETCH + i));
        third = STEP_WORD(third, word_at(at + 2 * STRETCH + i));
    }
    return multiply_polynomials(multiply_polynomials(crc, PAST_STRETCH) ^ second, PAST_STRETCH) ^ third;
}

WITH_CRC uint32_t tchi_crc32c_fast(uint32_t crc, const void *bytes, int64_t count)
{
    const unsigned char *at = bytes;
    crc = ~crc;
    for (; count >= 3 * STRETCH; count -= 3 * STRETCH, at += 3 * STRETCH) {
        crc = three_stretches(crc, at);
    }
    for (; count >= 8; count -= 8, at += 8) {
        crc = STEP_WORD(crc, word_at(at));
    }
    for (; count > 0; count--, at++) {
        crc = STEP_BYTE(crc, *at);
    }
    return ~crc;
}

#else

uint32_t tchi_crc32c_fast(uint32_t crc, const void *bytes, int64_t count)
{
    return tchi_crc32c_plain(crc, bytes, count);
}

#endif

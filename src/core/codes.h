/* Moments in eight bits, for both languages: floating-point numbers with three bits of fraction, whose exponents count
 * down from that of a block of TCH_CODE_BLOCK neighbors. The block's scale is that exponent as a power of two in
 * float32, the one of its largest magnitude, or a higher one where rounding might carry.
 *
 *     second moments   code c > 0 is (1 + c % 8 / 8) 2^(c / 8 - 31) scale: 255 numbers over 32 powers of two
 *     first moments    a sign and code c > 0 of seven bits, (1 + c % 8 / 8) 2^(c / 8 - 15) scale: over 16
 *
 * and code 0 is 0. In terms of a float32's bits all of it is addition and shifting, and rounding at random is adding
 * random bits below those that stay: the same on every device, to the bit. Scales are powers of two so that a number
 * which does not change keeps its code exactly when its block's scale does.
 *
 * A second moment above 0 never becomes 0, however small it is beside its neighbors: it is divided by, and the step
 * would have no bound. It becomes the least code instead, and what is below the least code of the first moments is at
 * most that small itself: the step stays bounded by what AdamW's own bound is times a small number. */
#ifndef TCHI_CODES_H
#define TCHI_CODES_H

#include <stdint.h>
#include <string.h>

#include <torchium/backend/update.h>

#ifdef __CUDACC__
#define TCHI_CODE_FN static __host__ __device__ inline
#else
#define TCHI_CODE_FN static inline
#endif

#define TCHI_CODE_SHIFT 20        /* a code's unit among a float32's bits */
#define TCHI_CODE_NEAREST 0x8000u /* for `random`: to the nearest code */
#define TCHI_CODE_TOP_SQUARE 248u /* the code of the scale itself */
#define TCHI_CODE_TOP_SIGNED 120u
#define TCHI_CODE_LEAST_EXPONENT 32u /* of a scale, as a float32 has it: the least codes are normal numbers then */

TCHI_CODE_FN uint32_t tchi_code_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

TCHI_CODE_FN float tchi_code_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The scale, in bits, of a block whose largest magnitude has these. */
TCHI_CODE_FN uint32_t tchi_code_scale(uint32_t largest)
{
    uint32_t exponent = (largest + ((1u << TCHI_CODE_SHIFT) - 1)) >> 23;
    exponent = exponent < TCHI_CODE_LEAST_EXPONENT ? TCHI_CODE_LEAST_EXPONENT : exponent > 255u ? 255u : exponent;
    return exponent << 23;
}

/* 16 random bits, at the top of what is cut off, and half a bit below them: what is a code already stays as it is. */
TCHI_CODE_FN uint32_t tchi_code_dither(uint32_t random)
{
    return random << 4 | 8u;
}

/* The code of a magnitude, `top` being that of the scale; below 1 where it is smaller than the least. Scales are
 * multiples of a code's unit, so that one sum and one shift do it. */
TCHI_CODE_FN int32_t tchi_code_below(uint32_t magnitude, uint32_t scale, uint32_t top, uint32_t random)
{
    return (int32_t)(magnitude + tchi_code_dither(random) + ((top << TCHI_CODE_SHIFT) - scale)) >> TCHI_CODE_SHIFT;
}

TCHI_CODE_FN uint32_t tchi_code_square(float value, uint32_t scale, uint32_t random)
{
    uint32_t magnitude = tchi_code_bits(value) & 0x7FFFFFFFu;
    int32_t code = tchi_code_below(magnitude, scale, TCHI_CODE_TOP_SQUARE, random);
    int32_t least = magnitude != 0;
    code = code < least ? least : code;
    return code > 255 ? 255u : (uint32_t)code;
}

TCHI_CODE_FN uint32_t tchi_code_least_signed(uint32_t scale)
{
    return scale - ((TCHI_CODE_TOP_SIGNED - 1) << TCHI_CODE_SHIFT);
}

/* A first moment that is 0, or at least the least code. */
TCHI_CODE_FN uint32_t tchi_code_signed_large(float value, uint32_t scale, uint32_t random)
{
    uint32_t bits = tchi_code_bits(value);
    int32_t code = tchi_code_below(bits & 0x7FFFFFFFu, scale, TCHI_CODE_TOP_SIGNED, random);
    code = code < 0 ? 0 : code > 127 ? 127 : code;
    return code == 0 ? 0u : (bits >> 24 & 0x80u) | (uint32_t)code;
}

/* Below the least code a number becomes that or 0, in proportion; both products are exact. */
TCHI_CODE_FN uint32_t tchi_code_signed_small(float value, uint32_t scale, uint32_t random)
{
    uint32_t bits = tchi_code_bits(value);
    float least = tchi_code_float(tchi_code_least_signed(scale));
    float magnitude = tchi_code_float(bits & 0x7FFFFFFFu);
    return magnitude * 131072.0f > (float)(131071u - 2u * random) * least ? (bits >> 24 & 0x80u) | 1u : 0u;
}

TCHI_CODE_FN int tchi_code_is_small(float value, uint32_t scale)
{
    return (tchi_code_bits(value) & 0x7FFFFFFFu) < tchi_code_least_signed(scale);
}

TCHI_CODE_FN uint32_t tchi_code_signed(float value, uint32_t scale, uint32_t random)
{
    return tchi_code_is_small(value, scale) ? tchi_code_signed_small(value, scale, random)
                                            : tchi_code_signed_large(value, scale, random);
}

TCHI_CODE_FN float tchi_decode_square(uint32_t code, uint32_t scale)
{
    uint32_t bits = (code << TCHI_CODE_SHIFT) + (scale - (TCHI_CODE_TOP_SQUARE << TCHI_CODE_SHIFT));
    return tchi_code_float(code == 0 ? 0u : bits);
}

TCHI_CODE_FN float tchi_decode_signed(uint32_t code, uint32_t scale)
{
    uint32_t magnitude = code & 127u;
    uint32_t bits = (magnitude << TCHI_CODE_SHIFT) + (scale - (TCHI_CODE_TOP_SIGNED << TCHI_CODE_SHIFT));
    return tchi_code_float(magnitude == 0 ? 0u : (code & 0x80u) << 24 | bits);
}

/* --- bfloat16 ---------------------------------------------------------------------------------------------------- */

/* The upper half after 16 random bits were added to the lower; what is not finite is rounded to nearest. */
TCHI_CODE_FN uint16_t tchi_code_bfloat(float value, uint32_t random)
{
    uint32_t bits = tchi_code_bits(value);
    uint32_t quiet = bits | ((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x400000u : 0u);
    return (uint16_t)(((bits & 0x7F800000u) == 0x7F800000u ? quiet : bits + random) >> 16);
}

#endif

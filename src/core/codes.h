/* Moments in eight bits, for both languages. A block of TCH_CODE_BLOCK neighbors has one float32 word of scale, two
 * bfloat16: `top` in its upper half, at least the block's largest magnitude, and `floor` in its lower half. Codes
 * count equal steps of a float32's bits, which are close to equal steps of its logarithm:
 *
 *     second moments   from floor, at most the least v > 0 of the block, to top:
 *                      code 0 is 0, code c > 0 is float(bits(floor) + (c - 1) step), at most top, where step is the
 *                      least power of two that reaches top with code 255: rounding is an addition and a shift
 *     first moments    a sign and seven bits c, of |m| + floor from floor to top + floor:
 *                      |m| = float(bits(floor) + c step) - floor, so that codes are linear below floor and logarithmic
 *                      above it (mu-law companding with a mu for each block)
 *
 * Second moments of a block are close to each other after some steps, and their codes then lie as close. What AdamW
 * needs of m is its ratio to sqrt(v), so the floor of m follows from the range of v: it is
 * 2 top sqrt(floor of v / top of v). Momentum of SGD is added as it is, and its floor is a quarter of top. Lion takes
 * the sign of m plus a multiple of its last change d, so its floor is a quarter of the least max(|m|, 16 |d|) of two
 * neighbors of the block: codes are fine around 0 only where neither m nor gradients are large.
 *
 * Rounding adds random bits below those that stay; exact codes stay as they are. It is unbiased where both neighbors
 * have one exponent. Moments of Lion and SGD that changed by half a code or more are rounded to nearest, with half
 * the variance: only smaller changes would be lost. Above the last code but one rounding stays stochastic: the largest
 * number of a block lies there at every step, always close to top. Devices may differ by a code of m where the sum is
 * within 1e-4 of one or the change is half a code to float32's rounding. A second moment above 0 never becomes 0,
 * however small it is relative to its neighbors: the step divides by its root. It becomes the least code instead, at
 * least 2^-48 of top. */
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

#define TCHI_CODE_NEAREST 0x8000u /* for `random`: to the nearest code */
#define TCHI_CODE_LEAST 0x80u     /* the least bfloat16 that is normal: what every floor is at least */
#define TCHI_CODE_OCTAVE 0x80     /* a factor of two, among a bfloat16's bits */

/* The optimizer, which determines the floors of first moments. */
typedef enum tchi_code_use {
    TCHI_CODE_ADAMW, /* the range of the second moments */
    TCHI_CODE_LION,  /* the moments and their changes */
    TCHI_CODE_SGD    /* top alone */
} tchi_code_use;

/* A decoded block scale. */
typedef struct tchi_code_range {
    uint32_t floor, top; /* bits of the least number and of the largest, for first moments of both plus floor */
    uint32_t step;       /* of bits, from one code to the next; for second moments its exponent */
} tchi_code_range;

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

TCHI_CODE_FN uint32_t tchi_code_magnitude(float value)
{
    return tchi_code_bits(value) & 0x7FFFFFFFu;
}

TCHI_CODE_FN int32_t tchi_code_between(int32_t value, int32_t least, int32_t most)
{
    value = value < least ? least : value;
    return value > most ? most : value;
}

/* A scale with this floor, a bfloat16, if it is within `octaves` below top and `above` bits above it. */
TCHI_CODE_FN uint32_t tchi_code_scale(uint32_t largest, int32_t floor, int32_t octaves, int32_t above)
{
    int32_t top = tchi_code_between((int32_t)((largest + 0xFFFFu) >> 16), TCHI_CODE_LEAST + 1, 0x7F80);
    int32_t least = top - octaves * TCHI_CODE_OCTAVE;
    least = least < (int32_t)TCHI_CODE_LEAST ? (int32_t)TCHI_CODE_LEAST : least;
    return (uint32_t)top << 16 | (uint32_t)tchi_code_between(floor, least, top + above);
}

/* Statistics that determine a block's scale, as bits: the largest magnitude, the least, and the least maximum of
 * elements 2 i and 2 i + 1 and 16 times their changes. The last two are less 1, so that 0 compares largest. */
typedef struct tchi_code_extent {
    uint32_t largest, least, pairs;
} tchi_code_extent;

#define TCHI_CODE_EXTENT_INIT                                                                                          \
    {                                                                                                                  \
        0u, 0xFFFFFFFFu, 0xFFFFFFFFu                                                                                   \
    }

/* Two elements and their previous values, which only Lion's scale uses. */
TCHI_CODE_FN tchi_code_extent tchi_code_extend(tchi_code_extent e, const float now[2], const float was[2])
{
    uint32_t a = tchi_code_magnitude(now[0]);
    uint32_t b = tchi_code_magnitude(now[1]);
    uint32_t c = tchi_code_magnitude(16.0f * (now[0] - was[0]));
    uint32_t d = tchi_code_magnitude(16.0f * (now[1] - was[1]));
    uint32_t most = a > b ? a : b;
    uint32_t least = a - 1u < b - 1u ? a - 1u : b - 1u;
    uint32_t change = c > d ? c : d;
    uint32_t pair = most > change ? most : change;
    e.largest = most > e.largest ? most : e.largest;
    e.least = least < e.least ? least : e.least;
    e.pairs = pair - 1u < e.pairs ? pair - 1u : e.pairs;
    return e;
}

TCHI_CODE_FN uint32_t tchi_code_scale_squares(tchi_code_extent e)
{
    return tchi_code_scale(e.largest, (int32_t)(e.least >> 16), 48, -1);
}

/* `squares` is the scale of AdamW's second moments. */
TCHI_CODE_FN uint32_t tchi_code_scale_signed(tchi_code_use use, tchi_code_extent e, uint32_t squares)
{
    int32_t top = (int32_t)((e.largest + 0xFFFFu) >> 16);
    int32_t range = (int32_t)(squares >> 16) - (int32_t)(squares & 0xFFFFu);
    int32_t floor = use == TCHI_CODE_LION  ? (int32_t)(e.pairs >> 16) - 2 * TCHI_CODE_OCTAVE
                    : use == TCHI_CODE_SGD ? top - 2 * TCHI_CODE_OCTAVE
                                           : top + TCHI_CODE_OCTAVE - range / 2;
    return tchi_code_scale(e.largest, floor, 24, TCHI_CODE_OCTAVE);
}

/* top and floor are different bfloat16, so that their distance is exact in float32. A scale of 0, the initial state,
 * has no step; any will do. */
TCHI_CODE_FN tchi_code_range tchi_code_range_squares(uint32_t scale)
{
    tchi_code_range range = {scale << 16, scale & 0xFFFF0000u, 0};
    uint32_t length = range.top - range.floor;
    uint32_t shift = (tchi_code_bits((float)(int32_t)length) >> 23) - 134u;
    range.step = (shift + (length > 254u << (shift & 31u))) & 31u;
    return range;
}

TCHI_CODE_FN tchi_code_range tchi_code_range_signed(uint32_t scale)
{
    tchi_code_range range = {scale << 16, 0, 0};
    range.top = tchi_code_bits(tchi_code_float(scale & 0xFFFF0000u) + tchi_code_float(range.floor));
    range.step = (range.top - range.floor + 126u) / 127u;
    return range;
}

TCHI_CODE_FN uint32_t tchi_code_within(uint32_t bits, uint32_t floor, uint32_t top)
{
    bits = bits > top ? top : bits;
    return bits < floor ? floor : bits;
}

TCHI_CODE_FN uint32_t tchi_code_square(float value, tchi_code_range range, uint32_t random)
{
    uint32_t magnitude = tchi_code_magnitude(value);
    uint32_t above = tchi_code_within(magnitude, range.floor, range.top) - range.floor;
    uint32_t offset = (random << 16 | 0x8000u) >> (32u - range.step);
    return magnitude == 0 ? 0u : 1u + ((above + offset) >> range.step);
}

/* What rounds to the codes of first moments, without conversions for each element: with step 2^k in [2^23, 2^24),
 * code = (bits 2^k + base + random offset) reciprocal / 2^54. Steps are less than 2^21. The quotient is off by less
 * than 6e-5, and offsets stay 1e-4 of a step away from a whole one. */
typedef struct tchi_code_rounding {
    uint32_t floor, top, step;
    uint32_t power, base, width, reciprocal;
} tchi_code_rounding;

TCHI_CODE_FN uint32_t tchi_code_high(uint32_t a, uint32_t b)
{
    return (uint32_t)((uint64_t)a * b >> 32);
}

TCHI_CODE_FN float tchi_code_quotient(float a, float b)
{
#ifdef __CUDA_ARCH__
    return __fdividef(a, b); /* two instructions in place of ten */
#else
    return a / b;
#endif
}

TCHI_CODE_FN tchi_code_rounding tchi_code_rounding_of(tchi_code_range range)
{
    uint32_t bits = tchi_code_bits((float)(int32_t)range.step);
    uint32_t step = (bits & 0x7FFFFFu) | 0x800000u;
    uint32_t margin = step >> 13;
    uint32_t power = 1u << ((150u - (bits >> 23)) & 31u);
    tchi_code_rounding r = {range.floor, range.top, range.step, power, 0, step - 2u * margin, 0};
    r.base = margin - range.floor * r.power;
    r.reciprocal = (uint32_t)tchi_code_quotient(0x1p54f, (float)(int32_t)step);
    return r;
}

TCHI_CODE_FN uint32_t tchi_code_raised(float value, tchi_code_rounding r)
{
    float raised = tchi_code_float(tchi_code_magnitude(value)) + tchi_code_float(r.floor);
    return tchi_code_within(tchi_code_bits(raised), r.floor, r.top);
}

/* The bits to round a first moment by: those of the nearest code where it has changed by at least half of one. */
TCHI_CODE_FN uint32_t tchi_code_random(float value, float was, tchi_code_rounding r, uint32_t random)
{
    uint32_t within = tchi_code_raised(value, r);
    uint32_t next = within + r.step;
    float change = tchi_code_float(tchi_code_magnitude(value - was));
    int nearest = next <= r.top && 2.0f * change >= tchi_code_float(next) - tchi_code_float(within);
    return nearest ? TCHI_CODE_NEAREST : random;
}

TCHI_CODE_FN uint32_t tchi_code_signed(float value, tchi_code_rounding r, uint32_t random)
{
    uint32_t within = tchi_code_raised(value, r);
    uint32_t offset = tchi_code_high(random << 16 | 0x8000u, r.width) + r.base;
    uint32_t steps = tchi_code_high(within * r.power + offset, r.reciprocal) >> 22;
    uint32_t sign = steps == 0 ? 0u : tchi_code_bits(value) >> 24 & 0x80u;
    return sign | (steps > 127u ? 127u : steps);
}

TCHI_CODE_FN float tchi_decode_square(uint32_t code, tchi_code_range range)
{
    uint32_t bits = range.floor + ((code - 1u) << range.step);
    return tchi_code_float(code == 0 ? 0u : bits > range.top ? range.top : bits);
}

TCHI_CODE_FN float tchi_decode_signed(uint32_t code, tchi_code_range range)
{
    uint32_t bits = range.floor + (code & 127u) * range.step;
    float magnitude = tchi_code_float(bits > range.top ? range.top : bits) - tchi_code_float(range.floor);
    return tchi_code_float(tchi_code_bits(magnitude) | (code & 0x80u) << 24);
}

/* --- bfloat16 ---------------------------------------------------------------------------------------------------- */

/* Adds 16 random bits to the lower half and truncates; non-finite values round to nearest. */
TCHI_CODE_FN uint16_t tchi_code_bfloat(float value, uint32_t random)
{
    uint32_t bits = tchi_code_bits(value);
    uint32_t quiet = bits | ((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x400000u : 0u);
    return (uint16_t)(((bits & 0x7F800000u) == 0x7F800000u ? quiet : bits + random) >> 16);
}

#endif

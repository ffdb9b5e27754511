/* Conversions between float types over contiguous runs, rounding to nearest even. They operate on bits, so that all
 * compilers and processors give the same result and the loops vectorize. A file that defines CUSTOM_FP16 provides
 * f16_to_f32 and f32_to_f16. */
#include "backends/cpu/loops/loops.h"

#include <string.h>

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Multiplying by 2^112 rebiases the exponent from float16 to float32 and normalizes subnormals. */
static inline float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t magnitude = half & 0x7FFFu;
    float finite = float_of(magnitude << 13) * float_of(0x77800000u);
    uint32_t bits = magnitude >= 0x7C00u ? (magnitude << 13) + 0x70000000u : bits_of(finite);
    return float_of(bits | sign);
}

/* Normal results round by adding half a unit of the last kept bit (less one if that bit is even), subnormal ones by
 * adding 0.5 in float32, which aligns them. Above the largest float16 the result is infinite. */
static inline uint16_t float_to_half(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477FF000u ? 0x7C00u : result;
    result = magnitude > 0x7F800000u ? 0x7E00u : result;
    return (uint16_t)(result | sign);
}

static inline float bfloat_to_float(uint16_t bfloat)
{
    return float_of((uint32_t)bfloat << 16);
}

static inline uint16_t float_to_bfloat(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

/* Round to odd: a double rounded to float so that rounding again to 16 bits equals a single rounding. An inexact result
 * is truncated and its last bit set. */
static inline float double_to_odd(double value)
{
    float nearest = (float)value;
    uint32_t bits = bits_of(nearest);
    double back = (double)nearest;
    int inexact = back != value && value - value == 0;
    double size = value < 0 ? -value : value;
    double back_size = back < 0 ? -back : back;
    bits -= (uint32_t)(inexact && back_size > size);
    bits |= (uint32_t)inexact;
    return float_of(bits);
}

#define CONVERSION(name, from, to, value)                                                                              \
    static void name(int64_t n, const void *src, void *dst)                                                            \
    {                                                                                                                  \
        const from *x = src;                                                                                           \
        to *y = dst;                                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            y[i] = value;                                                                                              \
        }                                                                                                              \
    }

CONVERSION(f64_to_f32, double, float, (float)x[i])
CONVERSION(f32_to_f64, float, double, (double)x[i])
CONVERSION(f16_to_f64, uint16_t, double, (double)half_to_float(x[i]))
CONVERSION(f64_to_f16, double, uint16_t, float_to_half(double_to_odd(x[i])))
CONVERSION(bf16_to_f32, uint16_t, float, bfloat_to_float(x[i]))
CONVERSION(bf16_to_f64, uint16_t, double, (double)bfloat_to_float(x[i]))
CONVERSION(f32_to_bf16, float, uint16_t, float_to_bfloat(x[i]))
CONVERSION(f64_to_bf16, double, uint16_t, float_to_bfloat(double_to_odd(x[i])))
CONVERSION(f16_to_bf16, uint16_t, uint16_t, float_to_bfloat(half_to_float(x[i])))
CONVERSION(bf16_to_f16, uint16_t, uint16_t, float_to_half(bfloat_to_float(x[i])))

#if !defined(CUSTOM_FP16)
CONVERSION(f16_to_f32, uint16_t, float, half_to_float(x[i]))
CONVERSION(f32_to_f16, float, uint16_t, float_to_half(x[i]))
#endif

#define CONVERSIONS_TABLE                                                                                              \
    {                                                                                                                  \
        .run = {[TCH_SCALAR_F64] =                                                                                     \
                    {[TCH_SCALAR_F32] = f32_to_f64, [TCH_SCALAR_F16] = f16_to_f64, [TCH_SCALAR_BF16] = bf16_to_f64},   \
                [TCH_SCALAR_F32] =                                                                                     \
                    {[TCH_SCALAR_F64] = f64_to_f32, [TCH_SCALAR_F16] = f16_to_f32, [TCH_SCALAR_BF16] = bf16_to_f32},   \
                [TCH_SCALAR_F16] =                                                                                     \
                    {[TCH_SCALAR_F64] = f64_to_f16, [TCH_SCALAR_F32] = f32_to_f16, [TCH_SCALAR_BF16] = bf16_to_f16},   \
                [TCH_SCALAR_BF16] = {                                                                                  \
                    [TCH_SCALAR_F64] = f64_to_bf16, [TCH_SCALAR_F32] = f32_to_bf16, [TCH_SCALAR_F16] = f16_to_bf16}},  \
    }

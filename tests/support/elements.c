/* A floating type is described by its precision and smallest numbers; rounding works on doubles, which represent every
 * value of the narrower types. */
#include "elements.h"

#include <math.h>
#include <string.h>

typedef struct format {
    int precision;     /* bits of the significand, the hidden one included */
    int last_exponent; /* the smallest positive number is 2^last_exponent */
    double normal;     /* the smallest number with all bits */
    double largest;
} format;

static const format half_format = {11, -24, 0x1p-14, 65504.0};
static const format bfloat_format = {8, -133, 0x1p-126, 0x1.fep127};

static double round_to_format(double value, const format *target)
{
    if (!isfinite(value) || value == 0.0) {
        return value;
    }
    double rounded;
    if (fabs(value) >= target->normal) { /* on the bits: with ldexp this is most of the time of large cases */
        const uint64_t last = UINT64_C(1) << (53 - target->precision);
        uint64_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits += last / 2 - 1 + ((bits & last) != 0);
        bits &= ~(last - 1);
        memcpy(&rounded, &bits, sizeof rounded);
    } else {
        rounded = ldexp(rint(ldexp(value, -target->last_exponent)), target->last_exponent);
    }
    return fabs(rounded) > target->largest ? copysign(INFINITY, value) : rounded;
}

/* `value` is already rounded to the format. */
static uint16_t half_bits(double value)
{
    uint16_t sign = signbit(value) ? 0x8000u : 0u;
    double magnitude = fabs(value);
    if (isnan(value)) {
        return 0x7e00u;
    }
    if (isinf(value)) {
        return sign | 0x7c00u;
    }
    if (magnitude < 0x1p-14) {
        return (uint16_t)(sign | (unsigned)ldexp(magnitude, 24));
    }
    int exponent;
    double significand = frexp(magnitude, &exponent); /* in [0.5, 1) */
    return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 | ((unsigned)ldexp(significand, 11) - 1024u));
}

static double half_value(uint16_t bits)
{
    int exponent = bits >> 10 & 0x1f;
    double fraction = bits & 0x3ff;
    double magnitude = exponent == 31  ? (fraction == 0.0 ? INFINITY : NAN)
                       : exponent == 0 ? ldexp(fraction, -24)
                                       : ldexp(1024.0 + fraction, exponent - 25);
    return bits & 0x8000u ? -magnitude : magnitude;
}

static uint16_t bfloat_bits(double value)
{
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    return (uint16_t)(bits >> 16);
}

static double bfloat_value(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static double decode_integer(tch_dtype dtype, const void *element)
{
    int32_t narrow;
    int64_t wide;
    if (dtype.bits == 32) {
        memcpy(&narrow, element, sizeof narrow);
        return narrow;
    }
    memcpy(&wide, element, sizeof wide);
    return (double)wide;
}

double test_decode(tch_dtype dtype, const void *element)
{
    double wide;
    float single;
    uint16_t half;
    if (dtype.code == TCH_INT) {
        return decode_integer(dtype, element);
    }
    if (dtype.bits == 64) {
        memcpy(&wide, element, sizeof wide);
        return wide;
    }
    if (dtype.bits == 32) {
        memcpy(&single, element, sizeof single);
        return single;
    }
    memcpy(&half, element, sizeof half);
    return dtype.code == TCH_BFLOAT ? bfloat_value(half) : half_value(half);
}

static void encode_integer(tch_dtype dtype, double value, void *element)
{
    int32_t narrow = (int32_t)value;
    int64_t wide = (int64_t)value;
    if (dtype.bits == 32) {
        memcpy(element, &narrow, sizeof narrow);
    } else {
        memcpy(element, &wide, sizeof wide);
    }
}

void test_encode(tch_dtype dtype, double value, void *element)
{
    float single = (float)value;
    uint16_t half;
    if (dtype.code == TCH_INT) {
        encode_integer(dtype, value, element);
    } else if (dtype.bits == 64) {
        memcpy(element, &value, sizeof value);
    } else if (dtype.bits == 32) {
        memcpy(element, &single, sizeof single);
    } else {
        half = dtype.code == TCH_BFLOAT ? bfloat_bits(round_to_format(value, &bfloat_format))
                                        : half_bits(round_to_format(value, &half_format));
        memcpy(element, &half, sizeof half);
    }
}

double test_round(tch_dtype dtype, double value)
{
    unsigned char element[8];
    test_encode(dtype, value, element);
    return test_decode(dtype, element);
}

double test_unit_roundoff(tch_dtype dtype)
{
    if (dtype.bits == 64) {
        return 0x1p-53;
    }
    if (dtype.bits == 32) {
        return 0x1p-24;
    }
    return dtype.code == TCH_BFLOAT ? 0x1p-8 : 0x1p-11;
}

double test_arithmetic_roundoff(tch_dtype dtype)
{
    return dtype.bits == 64 ? 0x1p-53 : 0x1p-24;
}

double test_storage_roundoff(tch_dtype dtype)
{
    return dtype.bits == 16 ? test_unit_roundoff(dtype) : 0.0;
}

double test_underflow(tch_dtype dtype)
{
    if (dtype.bits == 64) {
        return 0x1p-1074;
    }
    if (dtype.bits == 32) {
        return 0x1p-150;
    }
    return dtype.code == TCH_BFLOAT ? 0x1p-134 : 0x1p-25;
}

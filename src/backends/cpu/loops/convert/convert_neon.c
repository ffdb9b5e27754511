/* Conversions of element type for aarch64, whose instructions between half and float round as convert_body.h does.
 * NaN alone is another matter: they would quiet one on the way up and keep its payload on the way down, so that NaN
 * takes the way of convert_body.h, and results are bitwise-identical. */
#define OWN_HALVES
#include "convert_body.h"

#include <arm_neon.h>

/* The instruction sets the quiet bit of a signaling NaN, which `quieted` has in bit 7 and which is cleared again. */
static inline float32x4_t widen(uint16x4_t halves, uint16x4_t quieted)
{
    uint32x4_t bits = vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves)));
    return vreinterpretq_f32_u32(vbicq_u32(bits, vshll_n_u16(quieted, 15)));
}

static inline uint16x4_t narrow(float32x4_t values)
{
    uint16x4_t sign = vand_u16(vshrn_n_u32(vreinterpretq_u32_f32(values), 16), vdup_n_u16(0x8000));
    uint16x4_t nan = vorr_u16(sign, vdup_n_u16(0x7E00));
    uint16x4_t number = vreinterpret_u16_f16(vcvt_f16_f32(values));
    return vbsl_u16(vmovn_u32(vceqq_f32(values, values)), number, nan);
}

static void f16_to_f32(int64_t n, const void *src, void *dst)
{
    const uint16_t *x = src;
    float *y = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint16x8_t halves = vld1q_u16(x + i);
        /* Of infinity too, which has no bit there. */
        uint16x8_t signaling = vceqq_u16(vandq_u16(halves, vdupq_n_u16(0x7E00)), vdupq_n_u16(0x7C00));
        uint16x8_t quieted = vandq_u16(signaling, vdupq_n_u16(0x80));
        vst1q_f32(y + i, widen(vget_low_u16(halves), vget_low_u16(quieted)));
        vst1q_f32(y + i + 4, widen(vget_high_u16(halves), vget_high_u16(quieted)));
    }
    for (; i < n; i++) {
        y[i] = half_to_float(x[i]);
    }
}

static void f32_to_f16(int64_t n, const void *src, void *dst)
{
    const float *x = src;
    uint16_t *y = dst;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        vst1q_u16(y + i, vcombine_u16(narrow(vld1q_f32(x + i)), narrow(vld1q_f32(x + i + 4))));
    }
    for (; i < n; i++) {
        y[i] = float_to_half(x[i]);
    }
}

const tchi_conversions tchi_conversions_neon = CONVERSIONS_TABLE;

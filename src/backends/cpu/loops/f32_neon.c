/* The loops in float32, and the conversions, for aarch64. Except for the transpose, the optimizers' loops are the
 * common text, which the compiler vectorizes. The conversion instructions between half and float round like
 * convert_body.h, but they quiet a NaN on widening and keep its payload on narrowing, so NaN is handled as in
 * convert_body.h, and results are bitwise identical. */
#define CUSTOM_FP16
#define CUSTOM_RUNS
#define CUSTOM_TRANSPOSE
#include "f32_body.h"

#define VECTOR float32x4_t
#define LOAD vld1q_f32
#define STORE vst1q_f32
#define SCALE vmulq_n_f32
#define ABS vabsq_f32
#define GREATER vcgtq_f32
#define SELECT vbslq_f32
#define LOAD_DOUBLES(x) vcvt_f64_f32(vld1_f32(x))
#include "loops_neon.h"

/* The instruction sets the quiet bit of a signaling NaN, marked in bit 7 of `quieted`, which is cleared again. */
static inline float32x4_t floats_of_fp16(uint16x4_t fp16, uint16x4_t quieted)
{
    uint32x4_t bits = vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(fp16)));
    return vreinterpretq_f32_u32(vbicq_u32(bits, vshll_n_u16(quieted, 15)));
}

static inline uint16x4_t fp16_of_floats(float32x4_t values)
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
        uint16x8_t fp16 = vld1q_u16(x + i);
        /* Also of infinity, which lacks that bit. */
        uint16x8_t signaling = vceqq_u16(vandq_u16(fp16, vdupq_n_u16(0x7E00)), vdupq_n_u16(0x7C00));
        uint16x8_t quieted = vandq_u16(signaling, vdupq_n_u16(0x80));
        vst1q_f32(y + i, floats_of_fp16(vget_low_u16(fp16), vget_low_u16(quieted)));
        vst1q_f32(y + i + 4, floats_of_fp16(vget_high_u16(fp16), vget_high_u16(quieted)));
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
        vst1q_u16(y + i, vcombine_u16(fp16_of_floats(vld1q_f32(x + i)), fp16_of_floats(vld1q_f32(x + i + 4))));
    }
    for (; i < n; i++) {
        y[i] = float_to_half(x[i]);
    }
}

/* Columns [from, to) of x, one number at a time. */
static void transpose_columns(int64_t rows, int64_t from, int64_t to, const float *x, int64_t ld, float *out,
                              int64_t out_ld)
{
    for (int64_t j = from; j < to; j++) {
        for (int64_t i = 0; i < rows; i++) {
            out[j * out_ld + i] = x[i * ld + j];
        }
    }
}

static inline void transpose_four(const float *x, int64_t ld, float *out, int64_t out_ld)
{
    float32x4_t a = vld1q_f32(x), b = vld1q_f32(x + ld), c = vld1q_f32(x + 2 * ld), d = vld1q_f32(x + 3 * ld);
    float32x4_t ac_low = vzip1q_f32(a, c), ac_high = vzip2q_f32(a, c);
    float32x4_t bd_low = vzip1q_f32(b, d), bd_high = vzip2q_f32(b, d);
    vst1q_f32(out, vzip1q_f32(ac_low, bd_low));
    vst1q_f32(out + out_ld, vzip2q_f32(ac_low, bd_low));
    vst1q_f32(out + 2 * out_ld, vzip1q_f32(ac_high, bd_high));
    vst1q_f32(out + 3 * out_ld, vzip2q_f32(ac_high, bd_high));
}

/* By 4 by 4 squares, read and written along rows. */
static void transpose(int64_t rows, int64_t cols, const void *x_data, int64_t ld, void *out_data, int64_t out_ld)
{
    const float *x = x_data;
    float *out = out_data;
    int64_t down = rows / 4 * 4, across = cols / 4 * 4;
    for (int64_t j = 0; j < across; j += 4) {
        for (int64_t i = 0; i < down; i += 4) {
            transpose_four(x + i * ld + j, ld, out + j * out_ld + i, out_ld);
        }
    }
    transpose_columns(rows - down, 0, across, x + down * ld, ld, out + down, out_ld);
    transpose_columns(rows, across, cols, x, ld, out, out_ld);
}

const tchi_loops tchi_loops_f32_neon = LOOPS_TABLE;
const tchi_cpu_steps tchi_cpu_steps_f32_neon = STEPS_TABLE;
const tchi_conversions tchi_conversions_neon = CONVERSIONS_TABLE;

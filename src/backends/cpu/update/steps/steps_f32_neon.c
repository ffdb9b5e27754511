/* The optimizers' float32 loops for aarch64. All but the transpose are the common text, which the compiler
 * vectorizes. */
#define REAL float
#define REAL_SQRT sqrtf
#define OWN_TRANSPOSE
#include <arm_neon.h>
#include <stdint.h>

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

/* In squares of four, which are read and written along rows. */
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

#include "steps_body.h"

const tchi_cpu_steps tchi_cpu_steps_f32_neon = STEPS_TABLE;

/* Throughput of each compute type by kind of GPU. Only ratios matter, roughly: a compute type is chosen if it wins by a
 * wide margin. */
#include "backends/cuda/cuda.h"

typedef struct capability_rates {
    int32_t major, minor; /* the row serves this capability and those after it, up to the next row */
    tch_product_rates rates;
} capability_rates;

/* TFLOP/s of large matrix products, in ascending order of capability. 9.0 was measured on an H200: float64, float32 and
 * bfloat16 with cuBLAS; the split product, counted as a whole one, reaches 300 at 16 x 1024 and 480 at 1 x 4096 and is
 * set lower for smaller sizes; three float16 products by cuBLAS average 180 over those of a basis
 * (bench/logs/cuda_basis.md). The others are data-sheet peaks less a tenth or more. Graphics GPUs have one float64
 * unit per 64 of float32. */
static const capability_rates table[] = {
    {7, 5, {.f64 = 0.5, .f32 = 16.0, .bf16x2 = 0.0, .bf16 = 0.0}}, /* no bfloat16 */
    {8, 0, {.f64 = 19.0, .f32 = 19.0, .bf16x2 = 90.0, .bf16 = 280.0, .f16x2 = 80.0}},
    {8, 6, {.f64 = 30.0 / 64, .f32 = 30.0, .bf16x2 = 40.0, .bf16 = 130.0}}, /* and 8.7, 8.9 */
    {9, 0, {.f64 = 56.0, .f32 = 50.0, .bf16x2 = 280.0, .bf16 = 700.0, .f16x2 = 180.0}},
    {10, 0, {.f64 = 37.0, .f32 = 75.0, .bf16x2 = 400.0, .bf16 = 1500.0}},
    {10, 3, {.f64 = 1.3, .f32 = 75.0, .bf16x2 = 400.0, .bf16 = 1500.0}},
    {11, 0, {.f64 = 60.0 / 64, .f32 = 60.0, .bf16x2 = 60.0, .bf16 = 190.0}}, /* and 12.x, and later ones */
};

tch_product_rates tchi_cuda_rates_of(int32_t major, int32_t minor)
{
    tch_product_rates rates = table[0].rates;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        if (major > table[i].major || (major == table[i].major && minor >= table[i].minor)) {
            rates = table[i].rates;
        }
    }
    return rates;
}

void tchi_cuda_product_rates(void *state, tch_product_rates *rates)
{
    const tchi_cuda_state *s = state;
    *rates = tchi_cuda_rates_of(s->device.major, s->device.minor);
    rates->newton_limit = tchi_cuda_newton_limit(s);
}

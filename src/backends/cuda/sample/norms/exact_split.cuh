/* Float32 numbers as sums of two float16, for products on the tensor cores of sm_90 as accurate as float32 sums. A row
 * has a unit, a power of two; a number becomes an integer multiple of it, below 2^10, and a residual of at most 1/2
 * unit. The integer products of 128 columns sum to less than 2^24, which is exact even though tensor cores truncate,
 * unless nearly all numbers are as large as the largest; then the last bit of a float32 is at stake. A unit fits the
 * row's numbers so far, and grows with larger ones.
 *
 * Before changing it: splitting permutes a k-tile's columns, in the same way in all rows. */
#ifndef TCHI_CUDA_EXACT_SPLIT_CUH
#define TCHI_CUDA_EXACT_SPLIT_CUH

#include <cuda_fp16.h>

#include "backends/cuda/device/hopper.cuh"

#define TCHI_EXACT_ROWS 128 /* of a tile */

/* Units of its rows, before a k-tile and in it. */
typedef struct tchi_exact_units {
    uint8_t before[TCHI_EXACT_ROWS], now[TCHI_EXACT_ROWS];
} tchi_exact_units;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* uses instructions of sm_90a */

/* --- units ------------------------------------------------------------------------------------------------------- */

#define TCHI_EXACT_NO_UNIT 10 /* the smallest whose reciprocal is a float32 */

static __device__ __forceinline__ float tchi_exact_power(int exponent)
{
    return __uint_as_float((uint32_t)(127 + exponent) << 23);
}

/* Unit u is 2^(u - 136). It is kept while the row's numbers stay below 2^10 units; a new one leaves a factor of two to
 * grow, so changes are rare. Infinities have no unit and become NaN. */
static __device__ __forceinline__ int tchi_exact_unit(float largest, int before)
{
    int exponent = (int)(__float_as_uint(largest) >> 23);
    return exponent > before ? min(exponent + 1, 255) : before;
}

static __device__ __forceinline__ float tchi_exact_size(const tchi_exact_units &u, int row)
{
    return tchi_exact_power(u.now[row] - 136);
}

/* Rescales sums from previous to current units. */
static __device__ __forceinline__ float tchi_exact_ratio(const tchi_exact_units &u, int row)
{
    return tchi_exact_power(max(u.before[row] - u.now[row], -127));
}

/* --- numbers ----------------------------------------------------------------------------------------------------- */

/* Adding and subtracting 1.5 * 2^23 rounds to an integer. */
static __device__ __forceinline__ void tchi_exact_pair(float x, float y, float scale, uint32_t *integers,
                                                       uint32_t *rests)
{
    const float shift = 0x1.8p23f;
    float top_x = fmaf(x, scale, shift) - shift;
    float top_y = fmaf(y, scale, shift) - shift;
    __half2 top = __floats2half2_rn(top_x, top_y);
    __half2 rest = __floats2half2_rn(fmaf(x, scale, -top_x), fmaf(y, scale, -top_y));
    *integers = *(uint32_t *)&top;
    *rests = *(uint32_t *)&rest;
}

static __device__ __forceinline__ float tchi_exact_largest(float4 v)
{
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* Splits 32 numbers of a row in place, by one thread; their 16-byte chunks are swizzled by chunk ^ (row % 8). Chunks c
 * and c + 4 become 8 integers, in chunk c, and 8 residuals, in chunk c + 4. Returns the row's unit. */
static __device__ __forceinline__ int tchi_exact_row(char *ktile, int row, int unit)
{
    float4 v[8];
    float largest = 0.0f;
    char *line = ktile + row * 128;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        v[c] = *(const float4 *)(line + ((c ^ (row & 7)) << 4));
        largest = fmaxf(largest, tchi_exact_largest(v[c]));
    }
    unit = tchi_exact_unit(largest, unit);
    float scale = tchi_exact_power(136 - unit);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        uint4 top, rest;
        tchi_exact_pair(v[c].x, v[c].y, scale, &top.x, &rest.x);
        tchi_exact_pair(v[c].z, v[c].w, scale, &top.y, &rest.y);
        tchi_exact_pair(v[c + 4].x, v[c + 4].y, scale, &top.z, &rest.z);
        tchi_exact_pair(v[c + 4].z, v[c + 4].w, scale, &top.w, &rest.w);
        *(uint4 *)(line + ((c ^ (row & 7)) << 4)) = top;
        *(uint4 *)(line + (((c + 4) ^ (row & 7)) << 4)) = rest;
    }
    return unit;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* Integer products, accumulated if `add` is 1; the others are added to `rests`. Descriptor addresses are in units of 16
 * bytes: a step of 16 columns is 2, residuals begin at 4. */
static __device__ __forceinline__ void tchi_exact_start(float (&integers)[64], float (&rests)[64], const char *rows,
                                                        const char *cols, int add)
{
    uint64_t x = tchi_wgmma_rows(rows);
    uint64_t y = tchi_wgmma_rows(cols);
    tchi_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        tchi_wgmma<TCH_SCALAR_F16>(integers, x + k, y + k, k > 0 ? 1 : add);
    }
#pragma unroll
    for (int k = 0; k < 4; k += 2) {
        tchi_wgmma<TCH_SCALAR_F16>(rests, x + k + 4, y + k + 4, 1);
        tchi_wgmma<TCH_SCALAR_F16>(rests, x + k, y + k + 4, 1);
        tchi_wgmma<TCH_SCALAR_F16>(rests, x + k + 4, y + k, 1);
    }
    tchi_wgmma_commit();
}

/* The first of a thread's two rows of the tile, the other being 8 below, and its first column; sum[4 j + e] is at row e
 * / 2 and column 8 j + e % 2 from there. */
static __device__ __forceinline__ int tchi_exact_first_row()
{
    return tchi_thread_index() / 32 * 16 + tchi_thread_index() % 32 / 4;
}

static __device__ __forceinline__ int tchi_exact_first_col()
{
    return tchi_thread_index() % 4 * 2;
}

/* The accumulated sums in current units. */
static __device__ __forceinline__ void tchi_exact_change(float (&sum)[64], float (&rests)[64],
                                                         const tchi_exact_units &rows, const tchi_exact_units &cols)
{
    int row = tchi_exact_first_row();
    int col = tchi_exact_first_col();
    float of_rows[2] = {tchi_exact_ratio(rows, row), tchi_exact_ratio(rows, row + 8)};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        float ratio = of_rows[i % 4 / 2] * tchi_exact_ratio(cols, col + i / 4 * 8 + i % 2);
        sum[i] *= ratio;
        rests[i] *= ratio;
    }
}

static __device__ __forceinline__ void tchi_exact_finish(float (&sum)[64], const float (&rests)[64],
                                                         const tchi_exact_units &rows, const tchi_exact_units &cols)
{
    int row = tchi_exact_first_row();
    int col = tchi_exact_first_col();
    float of_rows[2] = {tchi_exact_size(rows, row), tchi_exact_size(rows, row + 8)};
#pragma unroll
    for (int i = 0; i < 64; i++) {
        float of_col = tchi_exact_size(cols, col + i / 4 * 8 + i % 2);
        sum[i] = (sum[i] + rests[i]) * of_rows[i % 4 / 2] * of_col;
    }
}

#endif

#endif

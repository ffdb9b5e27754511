/* The epilogue of symmetric_pingpong.cu for curvature factors: C = alpha A A' + beta C in float32, from an fp16 copy of
 * A. */
#ifndef TCHI_CUDA_SYMMETRIC_FACTOR_CUH
#define TCHI_CUDA_SYMMETRIC_FACTOR_CUH

#include "backends/cuda/matrix/fp16_copy.h"
#include "symmetric_pingpong.cuh"

/* Device weights are those of a step. `back` is the inverse of the scale of an fp16 copy. */
typedef struct pingpong_factor {
    float alpha, beta, back;
} pingpong_factor;

static __device__ __forceinline__ pingpong_factor factor_of(const pingpong_problem &p, int matrix)
{
    const float *w = p.factor.on_device;
    return {w == NULL ? p.factor.alpha : p.factor.alpha * w[0],
            p.factor.adds ? 1.0f
            : w == NULL   ? p.factor.beta
                          : w[1],
            1.0f / tchi_fp16_scale(p.largest[matrix])};
}

/* In two steps: the square of `back` may be out of float32's range. */
static __device__ __forceinline__ float factor_number(const pingpong_factor &f, float sum, float old)
{
    return fmaf(f.alpha, sum * f.back * f.back, f.beta * old);
}

/* A packed factor has contiguous rows of its lower triangle, and no ld. */
static __device__ __forceinline__ bool is_packed(const pingpong_problem &p)
{
    return p.wide_c.ld == 0;
}

static __device__ __forceinline__ int64_t packed_row(int64_t row)
{
    return row * (row + 1) / 2;
}

/* A square of a factor and its mirror image, from registers: four lanes have 32 bytes of a row, eight those of a
 * column. Each thread reads the elements of C below the diagonal that it writes. `inner` squares need no bounds checks.
 * A pair that begins left of the diagonal ends on it at most. */
template <int from, bool inner>
static __device__ __forceinline__ void write_factor(const pingpong_problem &p, const pingpong_factor &f, int matrix,
                                                    int row, int col, const float (&sum)[64])
{
    const int lane = (int)threadIdx.x % 32;
    const int y = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, x = col + lane % 4 * 2;
    const int64_t ld = p.wide_c.ld;
    float *below = (float *)p.wide_c.data + matrix * p.wide_c.stride + y * ld + x;
    float *above = (float *)p.wide_c.data + matrix * p.wide_c.stride + x * ld + y;
    float2 old[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int r = y + i % 2 * 8, k = x + i / 2 * 8;
        const float *from_c = below + i % 2 * 8 * ld + i / 2 * 8;
        old[i] = make_float2(0.0f, 0.0f);
        if (f.beta != 0.0f && (inner || (r < p.n && k < r))) {
            old[i] = *(const float2 *)from_c;
        } else if (!inner && f.beta != 0.0f && r < p.n && k == r) {
            old[i].x = *from_c;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int r = y + i % 2 * 8, k = x + i / 2 * 8;
        const float2 two = make_float2(factor_number(f, sum[from + 2 * i], old[i].x),
                                       factor_number(f, sum[from + 2 * i + 1], old[i].y));
        if (inner || (r < p.n && k <= r)) {
            above[i % 2 * 8] = two.x;
        }
        if (inner || (r < p.n && k < r)) {
            *(float2 *)(below + i % 2 * 8 * ld + i / 2 * 8) = two;
            above[ld + i % 2 * 8] = two.y;
        }
        above += i % 2 * 8 * ld;
    }
}

/* The same for a packed factor, without mirror image. Rows are unaligned. */
template <int from, bool inner>
static __device__ __forceinline__ void write_packed(const pingpong_problem &p, const pingpong_factor &f, int matrix,
                                                    int row, int col, const float (&sum)[64])
{
    const int lane = (int)threadIdx.x % 32;
    const int y = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, x = col + lane % 4 * 2;
    float *c = (float *)p.wide_c.data + matrix * p.wide_c.stride;
    float *const rows[2] = {c + packed_row(y), c + packed_row(y + 8)};
    float old[32];
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = y + i / 2 % 2 * 8, k = x + i / 4 * 8 + i % 2;
        old[i] = f.beta != 0.0f && (inner || (r < p.n && k <= r)) ? rows[i / 2 % 2][k] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int r = y + i / 2 % 2 * 8, k = x + i / 4 * 8 + i % 2;
        if (inner || (r < p.n && k <= r)) {
            rows[i / 2 % 2][k] = factor_number(f, sum[from + i], old[i]);
        }
    }
}

template <int from, bool inner>
static __device__ __forceinline__ void write_square_of(const pingpong_problem &p, const pingpong_factor &f, int matrix,
                                                       int row, int col, const float (&sum)[64])
{
    if (is_packed(p)) {
        write_packed<from, inner>(p, f, matrix, row, col, sum);
    } else {
        write_factor<from, inner>(p, f, matrix, row, col, sum);
    }
}

/* The squares of a tile of a factor. A skipped step leaves it unchanged. */
static __device__ __forceinline__ void write_factor_tile(const pingpong_problem &p, const pingpong_tile &t,
                                                         const pingpong_sums &sum)
{
    const pingpong_factor f = factor_of(p, t.matrix);
    if (t.nothing || (f.alpha == 0.0f && f.beta == 1.0f)) {
        return;
    }
#pragma unroll
    for (int number = 0; number < 4; number++) {
        constexpr int half = 32; /* a tile's right squares follow its left ones in the sums */
        const int row = t.row + TCHI_SQUARE * (number / 2), col = t.col + TCHI_SQUARE * (number % 2);
        const bool inner = col < row && row + TCHI_SQUARE <= p.n;
        if (inner && number % 2 == 0) {
            write_square_of<0, true>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (inner) {
            write_square_of<half, true>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (col <= row && row < p.n && number % 2 == 0) {
            write_square_of<0, false>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (col <= row && row < p.n) {
            write_square_of<half, false>(p, f, t.matrix, row, col, sum[number / 2]);
        }
    }
}

/* Prefetches the epilogue's part of C into L2: of each row 512 bytes, four lines. */
static __device__ __forceinline__ void prefetch_factor_tile(const pingpong_problem &p, const pingpong_tile &t)
{
    const int row = t.row + (int)threadIdx.x % 128;
    const int64_t begin = is_packed(p) ? packed_row(row) : row * p.wide_c.ld;
    const float *c = (const float *)p.wide_c.data + t.matrix * p.wide_c.stride + begin + t.col;
#pragma unroll
    for (int line = 0; line < TILE / 32; line++) {
        if (row < p.n && t.col + 32 * line <= row) {
            tchi_prefetch(c + 32 * line);
        }
    }
}

#endif

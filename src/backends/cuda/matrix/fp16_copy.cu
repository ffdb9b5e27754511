/* See fp16_copy.h.
 *
 *     largest = 0;
 *     for (each element x of the matrix) {                    // largest_bits
 *         largest = max(largest, fabsf(x));
 *     }
 *     scale = 2^(14 - floor(log2(largest)));
 *     for (each element) {                                    // fp16_rows
 *         to[i][j] = x is float32 ? float_to_half(scale * x[i][j]) : x[i][j];
 *     } */
#include "fp16_copy.h"

#include "backends/cuda/device/mma_tiles.cuh"

#define THREADS 256
#define ROWS 8 /* of a matrix per thread */

typedef struct fp16_problem {
    tchi_cuda_operand x, to;
    int64_t rows, cols, batch;
    uint32_t *largest;
    tchi_tile_side side; /* x again, for rows at any address */
} fp16_problem;

static __device__ __forceinline__ uint32_t larger(uint32_t most, float x)
{
    return max(most, __float_as_uint(x) & 0x7FFFFFFFu);
}

/* Over four columns of ROWS rows from (i, j) on, `count` of them inside. All rows are loaded before the first is used,
 * which bounds checks would prevent. */
static __device__ __forceinline__ uint32_t largest_of_rows(const fp16_problem &p, int64_t b, int64_t i, int64_t j,
                                                           int count, uint32_t most)
{
    if (p.x.wide && count == 4 && i + ROWS <= p.rows) {
        const char *from = tchi_cuda_at(p.x, b, i, j);
        float4 four[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            four[r] = *(const float4 *)(from + r * p.x.ld * 4);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            most = larger(larger(larger(larger(most, four[r].x), four[r].y), four[r].z), four[r].w);
        }
        return most;
    }
    for (int r = 0; r < ROWS && i + r < p.rows; r++) {
        tchi_cuda_vec4<float> four = tchi_cuda_load_vec4<float>(p.x, b, i + r, j, count);
        for (int k = 0; k < 4; k++) {
            most = larger(most, four.v[k]);
        }
    }
    return most;
}

/* Reads x once: 100 MB of float32, 8192 by 3072, are 0.024 ms at 4.19 TB/s. */
static __global__ void __launch_bounds__(THREADS, 4) largest_bits(const fp16_problem p)
{
    int64_t j = 4 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    int count = j >= p.cols ? 0 : p.cols - j < 4 ? (int)(p.cols - j) : 4;
    for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
        uint32_t most = 0;
        for (int64_t first = (int64_t)blockIdx.y * ROWS; first < p.rows; first += (int64_t)gridDim.y * ROWS) {
            most = largest_of_rows(p, b, first, j, count, most);
        }
        most = tchi_cuda_warp_max(most);
        if (threadIdx.x % 32 == 0) {
            atomicMax(p.largest + b, most);
        }
    }
}

/* Eight elements of 16 bits, written together. */
static __device__ __forceinline__ uint4 eight_of(const fp16_problem &p, int64_t b, int64_t i, int64_t j, int count,
                                                 float scale)
{
    const char *from = tchi_cuda_at(p.x, b, i, j);
    if (p.x.type != TCH_SCALAR_F32) {
        return tchi_tile_fetch<2>(p.side, from, 2 * count);
    }
    tchi_cuda_vec4<float> low = tchi_cuda_load_from<float>(p.x, from, count);
    tchi_cuda_vec4<float> high = tchi_cuda_load_from<float>(p.x, from + 16, count - 4);
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const tchi_cuda_vec4<float> &four = k < 2 ? low : high;
        uint32_t even = __half_as_ushort(__float2half_rn(scale * four.v[k % 2 * 2]));
        uint32_t odd = __half_as_ushort(__float2half_rn(scale * four.v[k % 2 * 2 + 1]));
        w[k] = even | odd << 16;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* Reads x and writes half as much, or as much: 8192 by 3072 of float32 are 150 MB, 0.036 ms at 4.19 TB/s. Pads rows
 * with zeros to 16 bytes. */
static __global__ void __launch_bounds__(THREADS, 4) fp16_rows(const fp16_problem p)
{
    int64_t j = 8 * ((int64_t)blockIdx.x * THREADS + threadIdx.x);
    int count = p.cols - j < 8 ? (int)(p.cols - j) : 8;
    if (j >= p.cols) {
        return;
    }
    for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
        float scale = p.largest == nullptr ? 1.0f : tchi_fp16_scale(p.largest[b]);
        for (int64_t first = (int64_t)blockIdx.y * ROWS; first < p.rows; first += (int64_t)gridDim.y * ROWS) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (first + r < p.rows) {
                    *(uint4 *)tchi_cuda_at(p.to, b, first + r, j) = eight_of(p, b, first + r, j, count, scale);
                }
            }
        }
    }
}

/* --- host -------------------------------------------------------------------------------------------------------- */

static dim3 grid_of(const fp16_problem &p, int64_t each)
{
    return dim3(tchi_cuda_grid(tchi_cuda_ceil_div(p.cols, each * THREADS)),
                tchi_cuda_grid_yz(tchi_cuda_ceil_div(p.rows, ROWS)), tchi_cuda_grid_yz(p.batch));
}

tch_status tchi_cuda_largest_bits(const tchi_cuda_state *state, const tch_matrices *x, uint32_t *largest)
{
    fp16_problem p = {tchi_cuda_operand_of(x), {}, x->rows, x->cols, x->batch, largest, {}};
    TCHI_CUDA_TRY(cudaMemsetAsync(largest, 0, (size_t)x->batch * sizeof *largest, state->stream), "largest_bits");
    return tchi_cuda_launch(state, "largest_bits", largest_bits, grid_of(p, 4), THREADS, p);
}

tch_status tchi_cuda_fp16_copy(const tchi_cuda_state *state, const tch_matrices *x, const uint32_t *largest,
                               const tch_matrices *to)
{
    fp16_problem p = {tchi_cuda_operand_of(x), tchi_cuda_operand_of(to),  x->rows, x->cols, x->batch,
                      (uint32_t *)largest,     tchi_tile_side_of(x, true)};
    return tchi_cuda_launch(state, "fp16_rows", fp16_rows, grid_of(p, 8), THREADS, p);
}

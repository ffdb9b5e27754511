/* Moves squares of 64 by 64 numbers between the accumulators of a warpgroup and shared memory, where they are bfloat16
 * or float16 in rows of 128 bytes with the swizzle of wgmma and TMA, chunk c of row r at c ^ (r % 8). A square begins
 * at a multiple of 1024 bytes.
 *
 * A thread's 32 numbers of a square are sum[from] to sum[from + 31], `from` being 0 or 32: the left or the right half
 * of tchi_wgmma's result. With lane = 4 g + t, warp w of the warpgroup has rows 16 w + g and 16 w + g + 8. */
#ifndef TCHI_CUDA_SYMMETRIC_SQUARES_CUH
#define TCHI_CUDA_SYMMETRIC_SQUARES_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string.h>

#include <torchium/backend.h>

#include "backends/cuda/device/hopper.cuh"

#define TCHI_SQUARE 64
#define TCHI_SQUARE_BYTES (TCHI_SQUARE * TCHI_SQUARE * 2)

static __device__ __forceinline__ char *tchi_square_chunk(char *square, int row, int chunk)
{
    return square + row * TCHI_SQUARE * 2 + ((chunk ^ (row & 7)) << 4);
}

/* r[i] gets numbers 2 i and 2 i + 1 of a thread, the first in the lower half. */
static __device__ __forceinline__ void tchi_square_read(uint32_t (&r)[16], char *square)
{
    int lane = (int)threadIdx.x % 32;
    int row = (int)threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk += 2) {
        tchi_ldmatrix_x4(r + 2 * chunk, tchi_square_chunk(square, row, chunk + lane / 16));
    }
}

/* Adds c0 on the diagonal. Number i of a thread is in row g + i / 2 % 2 * 8 and column 8 (i / 4) + 2 t + i % 2 of its
 * warp's sixteen rows. */
template <int from> static __device__ __forceinline__ void tchi_square_add_identity(float (&sum)[64], float c0)
{
    int lane = (int)threadIdx.x % 32;
    int diagonal = (int)threadIdx.x % 128 / 32 * 16 + lane / 4 - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] += 8 * (i / 4) + i % 2 - i / 2 % 2 * 8 == diagonal ? c0 : 0.0f;
    }
}

/* Number `which` of the two in a word. */
template <tch_scalar type> static __device__ __forceinline__ float tchi_square_number(uint32_t pair, int which)
{
    if (type == TCH_SCALAR_F16) {
        return __half2float(__ushort_as_half((unsigned short)(which == 0 ? pair & 0xFFFFu : pair >> 16)));
    }
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

template <tch_scalar type> static __device__ __forceinline__ uint32_t tchi_square_pack(float low, float high)
{
    uint32_t bits;
    if (type == TCH_SCALAR_F16) {
        __half2 pair = __floats2half2_rn(low, high);
        memcpy(&bits, &pair, sizeof bits);
    } else {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&bits, &pair, sizeof bits);
    }
    return bits;
}

/* Rounds a square and writes it and its transpose. */
template <int from, tch_scalar type>
static __device__ __forceinline__ void tchi_square_write(char *square, char *mirror, const float (&sum)[64])
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x % 128 / 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float *v = sum + from + 4 * j;
        uint32_t r[4] = {tchi_square_pack<type>(v[0], v[1]), tchi_square_pack<type>(v[2], v[3]),
                         tchi_square_pack<type>(v[4], v[5]), tchi_square_pack<type>(v[6], v[7])};
        tchi_stmatrix_x4(tchi_square_chunk(square, 16 * warp + lane % 16, j + lane / 16), r);
        tchi_stmatrix_x4_transposed(tchi_square_chunk(mirror, 8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2),
                                    r);
    }
}

/* Replaces the part above the diagonal by the transpose. */
static __device__ inline void tchi_square_symmetrize(char *square, char *mirror)
{
    for (int i = (int)threadIdx.x % 128; i < TCHI_SQUARE * 8; i += 128) {
        int row = i / 8;
        int chunk = i % 8;
        uint16_t *to = (uint16_t *)tchi_square_chunk(square, row, chunk);
        const uint16_t *with = (const uint16_t *)tchi_square_chunk(mirror, row, chunk);
        for (int e = max(row + 1 - 8 * chunk, 0); e < 8; e++) {
            to[e] = with[e];
        }
    }
}

#endif

/* Packed storage of symmetric matrices: rows of the lower triangle, one after the other.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j <= i; j++) {
 *             packed[i (i + 1) / 2 + j] = full[i ld + j];    // unpack: full[i ld + j] = full[j ld + i] = packed[...]
 *         }
 *     }
 *
 * Packed elements may be the bfloat16 of float32 ones. A block takes a tile on or below the diagonal. Rows are read and
 * written as they lie; what is mirrored is turned around in shared memory. */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/triangle.cuh"

#define TILE 32
#define ROWS 8 /* of a tile at once: a warp to each */

template <typename word, typename kept> struct packed_params {
    word *full;
    kept *packed;
    int64_t n, ld, stride, batch;
};

template <typename word, typename kept>
static __device__ inline int64_t packed_at(const packed_params<word, kept> &p, int64_t b, int64_t i, int64_t j)
{
    return b * (p.n * (p.n + 1) / 2) + i * (i + 1) / 2 + j;
}

/* Bits as they are, or those of a float32 rounded to the upper half, and back. */
static __device__ inline void move_element(uint64_t from, uint64_t *to)
{
    *to = from;
}

static __device__ inline void move_element(uint32_t from, uint32_t *to)
{
    *to = from;
}

static __device__ inline void move_element(uint32_t from, __nv_bfloat16 *to)
{
    *to = tchi_cuda_to_bf16(__uint_as_float(from));
}

static __device__ inline void move_element(__nv_bfloat16 from, uint32_t *to)
{
    *to = __float_as_uint(__bfloat162float(from));
}

/* The thread's elements of a tile are ROWS rows apart. From row i on that is so far in packed storage. */
static __device__ inline int64_t packed_step(int64_t i)
{
    return ROWS * i + ROWS * (ROWS + 1) / 2;
}

/* Moves: half of every matrix in, and out. */
template <typename word, typename kept>
static __global__ void __launch_bounds__(TILE *ROWS) pack_kernel(packed_params<word, kept> p)
{
    int64_t row = tchi_lower_row(blockIdx.x);
    int64_t first = row * TILE + threadIdx.y;
    int64_t j = (blockIdx.x - tchi_lower_tiles(row)) * TILE + threadIdx.x;
    for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
        word values[TILE / ROWS] = {}; /* all are read before one is written, or each would wait for the one before */
        const word *from = p.full + b * p.stride + first * p.ld + j;
#pragma unroll
        for (int k = 0; k < TILE / ROWS; k++) {
            int64_t i = first + k * ROWS;
            if (i < p.n && j <= i) {
                values[k] = from[k * ROWS * p.ld];
            }
        }
        kept *to = p.packed + packed_at(p, b, first, j);
#pragma unroll
        for (int k = 0; k < TILE / ROWS; k++) {
            int64_t i = first + k * ROWS;
            if (i < p.n && j <= i) {
                move_element(values[k], to);
            }
            to += packed_step(i);
        }
    }
}

/* Moves: half of every matrix in, all of it out. */
template <typename word, typename kept>
static __global__ void __launch_bounds__(TILE *ROWS) unpack_kernel(packed_params<word, kept> p)
{
    __shared__ word turned[TILE][TILE + 1];
    int64_t row = tchi_lower_row(blockIdx.x);
    int64_t left = (blockIdx.x - tchi_lower_tiles(row)) * TILE;
    int64_t first = row * TILE + threadIdx.y;
    int64_t j = left + threadIdx.x;
    for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
        word values[TILE / ROWS] = {};
        const kept *from = p.packed + packed_at(p, b, first, j);
#pragma unroll
        for (int k = 0; k < TILE / ROWS; k++) {
            int64_t i = first + k * ROWS;
            if (i < p.n && j <= i) {
                move_element(*from, &values[k]);
            }
            from += packed_step(i);
        }
        word *to = p.full + b * p.stride + first * p.ld + j;
#pragma unroll
        for (int k = 0; k < TILE / ROWS; k++) {
            int64_t i = first + k * ROWS;
            turned[threadIdx.y + k * ROWS][threadIdx.x] = values[k];
            if (i < p.n && j <= i) {
                to[k * ROWS * p.ld] = values[k];
            }
        }
        __syncthreads();
        int64_t column = row * TILE + threadIdx.x;
        to = p.full + b * p.stride + (left + threadIdx.y) * p.ld + column;
#pragma unroll
        for (int k = 0; k < TILE / ROWS; k++) {
            int r = threadIdx.y + k * ROWS;
            if (column < p.n && column > left + r) {
                to[k * ROWS * p.ld] = turned[threadIdx.x][r];
            }
        }
        __syncthreads();
    }
}

template <typename word, typename kept>
static void launch(const tchi_cuda_state *s, const tch_matrices *full, void *packed, bool unpacks)
{
    int64_t tiles = tchi_cuda_ceil_div(full->rows, TILE);
    packed_params<word, kept> p = {(word *)full->data, (kept *)packed, full->rows, full->ld, full->stride, full->batch};
    dim3 grid((unsigned)tchi_lower_tiles(tiles), tchi_cuda_grid_yz(full->batch));
    dim3 block(TILE, ROWS);
    if (unpacks) {
        unpack_kernel<word, kept><<<grid, block, 0, s->stream>>>(p);
    } else {
        pack_kernel<word, kept><<<grid, block, 0, s->stream>>>(p);
    }
}

static tch_status move(void *state, const tch_matrices *full, tch_scalar type, void *packed, bool unpacks)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (full->batch == 0 || full->rows == 0) {
        return TCH_OK;
    }
    if (type == TCH_SCALAR_F64) {
        launch<uint64_t, uint64_t>(s, full, packed, unpacks);
    } else if (type == TCH_SCALAR_BF16) {
        launch<uint32_t, __nv_bfloat16>(s, full, packed, unpacks);
    } else {
        launch<uint32_t, uint32_t>(s, full, packed, unpacks);
    }
    return tchi_cuda_launched(s, unpacks ? "unpack" : "pack");
}

tch_status tchi_cuda_pack_matrices(void *state, const tch_matrices *x, tch_scalar type, void *packed)
{
    return move(state, x, type, packed, false);
}

tch_status tchi_cuda_unpack_matrices(void *state, const void *packed, tch_scalar type, const tch_matrices *out)
{
    return move(state, out, type, (void *)packed, true);
}

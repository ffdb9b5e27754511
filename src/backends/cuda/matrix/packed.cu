/* Packed storage of symmetric matrices: contiguous rows of the lower triangle.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j <= i; j++) {
 *             packed[i (i + 1) / 2 + j] = full[i ld + j];    // unpack: full[i ld + j] = full[j ld + i] = packed[...]
 *         }
 *     }
 *
 * Packed elements may be bfloat16 for float32 matrices. A block handles a tile on or below the diagonal. Rows are read
 * and written in order; the mirror image is transposed in shared memory. */
#include "backends/cuda/device/elements.cuh"

#define TILE 32
#define ROWS 8 /* of a tile at once, one per warp */

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
template <typename word> static __device__ inline void move_element(word from, word *to)
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

/* The thread's elements of a tile are ROWS rows apart; the distance in packed storage from row i on. */
static __device__ inline int64_t packed_step(int64_t i)
{
    return ROWS * i + ROWS * (ROWS + 1) / 2;
}

template <typename word, typename kept>
static __global__ void __launch_bounds__(TILE *ROWS) pack_kernel(packed_params<word, kept> p)
{
    int64_t row = tchi_lower_row(blockIdx.x);
    int64_t first = row * TILE + threadIdx.y;
    int64_t j = (blockIdx.x - tchi_lower_tiles(row)) * TILE + threadIdx.x;
    for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
        word values[TILE / ROWS] = {}; /* loads all before the first store, which would otherwise wait for each */
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

#define WARPS 8 /* of a block that unpacks, one per row of a tile */

/* The first element of a block's tile. */
typedef struct tile_corner {
    int64_t row, col;
} tile_corner;

template <typename kept, int side> using packed_tile = kept[side][side + (sizeof(kept) == 2 ? 2 : 1)];

/* A tile below the diagonal and inside the matrix, without bounds checks, which take longer than memory does. Row r of
 * the tile starts r (row + (r + 1) / 2) elements after its first one. */
template <typename word, typename kept, int side>
static __device__ inline void unpack_whole(const packed_params<word, kept> &p, int64_t b, tile_corner at,
                                           packed_tile<kept, side> &tile)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const kept *from = p.packed + packed_at(p, b, at.row, at.col) + lane;
#pragma unroll 4
    for (int r = warp; r < side; r += WARPS) {
        const kept *piece = from + ((int64_t)r * at.row + r * (r + 1) / 2);
#pragma unroll
        for (int k = 0; k < side; k += 32) {
            tile[r][lane + k] = piece[k];
        }
    }
    __syncthreads();
    word *below = p.full + b * p.stride + (at.row + warp) * p.ld + at.col + lane;
    word *above = p.full + b * p.stride + (at.col + warp) * p.ld + at.row + lane;
#pragma unroll 2
    for (int r = warp; r < side; r += WARPS) {
#pragma unroll
        for (int k = 0; k < side; k += 32) {
            move_element(tile[r][lane + k], &below[k]);
            move_element(tile[lane + k][r], &above[k]);
        }
        below += WARPS * p.ld;
        above += WARPS * p.ld;
    }
    __syncthreads();
}

template <typename word, typename kept, int side>
static __device__ inline void unpack_part(const packed_params<word, kept> &p, int64_t b, tile_corner at,
                                          packed_tile<kept, side> &tile)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int r = warp; r < side; r += WARPS) {
        const kept *from = p.packed + packed_at(p, b, at.row + r, at.col);
        for (int c = lane; c < side; c += 32) {
            if (at.row + r < p.n && at.col + c <= at.row + r) {
                tile[r][c] = from[c];
            }
        }
    }
    __syncthreads();
    word *full = p.full + b * p.stride;
    for (int r = warp; r < side; r += WARPS) {
        for (int c = lane; c < side; c += 32) {
            if (at.row + r < p.n && at.col + c <= at.row + r) {
                move_element(tile[r][c], &full[(at.row + r) * p.ld + at.col + c]);
            }
            if (at.row + c < p.n && at.col + r < at.row + c) {
                move_element(tile[c][r], &full[(at.col + r) * p.ld + at.row + c]);
            }
        }
    }
    __syncthreads();
}

/* A block handles a tile of `side` rows and columns: wider tiles write longer row segments on both sides of the
 * diagonal. */
template <typename word, typename kept, int side>
static __global__ void __launch_bounds__(32 * WARPS) unpack_kernel(packed_params<word, kept> p)
{
    __shared__ packed_tile<kept, side> tile;
    const int64_t lower = tchi_lower_row(blockIdx.x);
    const tile_corner at = {lower * side, (blockIdx.x - tchi_lower_tiles(lower)) * side};
    const bool whole = at.row != at.col && at.row + side <= p.n;
    for (int64_t b = blockIdx.y; b < p.batch; b += gridDim.y) {
        if (whole) {
            unpack_whole<word, kept, side>(p, b, at, tile);
        } else {
            unpack_part<word, kept, side>(p, b, at, tile);
        }
    }
}

template <typename word, typename kept>
static tch_status launch_packed(void *state, const tch_matrices *full, void *packed, bool unpacks)
{
    constexpr int side = sizeof(kept) == 2 ? 128 : sizeof(kept) == 4 ? 64 : 32;
    packed_params<word, kept> p = {(word *)full->data, (kept *)packed, full->rows, full->ld, full->stride, full->batch};
    dim3 grid((unsigned)tchi_lower_tiles(tchi_cuda_ceil_div(p.n, unpacks ? side : TILE)), tchi_cuda_grid_yz(p.batch));
    return unpacks ? tchi_cuda_launch(state, "unpack", unpack_kernel<word, kept, side>, grid, 32 * WARPS, p)
                   : tchi_cuda_launch(state, "pack", pack_kernel<word, kept>, grid, dim3(TILE, ROWS), p);
}

tch_status tchi_cuda_pack_matrices(void *state, const tch_matrices *full, tch_scalar type, void *packed, int32_t unpack)
{
    if (type == TCH_SCALAR_F64) {
        return launch_packed<uint64_t, uint64_t>(state, full, packed, unpack);
    }
    return type == TCH_SCALAR_BF16 ? launch_packed<uint32_t, __nv_bfloat16>(state, full, packed, unpack)
                                   : launch_packed<uint32_t, uint32_t>(state, full, packed, unpack);
}

/* token_cross for half types: tiles of H A' by tensor cores, exact products with sums in float32, each multiplied in
 * registers by the entries of G that the tokens pick. The tiles are those of mma_tiles.cuh. */
#include "backends/cuda/device/mma_tiles.cuh"
#include "token_cross.cuh"

/* Accumulators of a warp beside each other. */
#define WIDE 4

static_assert(TCHI_TILE_ROWS == TCHI_CUDA_CROSS_TILE && tchi_tile_shape<WIDE>::cols == TCHI_CUDA_CROSS_TILE,
              "both ways cut the positions alike");

/* The sum of a tile of H A' times G(t, token of s), over one thread's part. */
template <tch_scalar type>
static __device__ __forceinline__ double weighted(const tchi_cuda_cross &c, int64_t b, int64_t s, int64_t t,
                                                  const tchi_tile_sums<WIDE> &sum)
{
    double total = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) { /* rows of the tile that the thread has */
        int64_t position = s + tchi_tile_row<2, true>(k / 2, k % 2);
        int64_t token = position < c.list.positions ? tchi_cuda_token_at(c.list, b, position) : c.list.rows;
        if (token == c.list.rows) {
            continue;
        }
#pragma unroll
        for (int n = 0; n < 2 * WIDE; n++) { /* and columns */
            int64_t row = t + tchi_tile_col<2, true, WIDE>(n / 2, n % 2);
            float g = row < c.rows ? tchi_cuda_load<float>(type, tchi_cuda_at(c.g, b, row, token), 0, 0) : 0.0f;
            float product = row < c.rows ? sum.v[k / 2][n / 2][k % 2 * 2 + n % 2] : 0.0f;
            total = fma((double)g, (double)product, total);
        }
    }
    return total;
}

/* H (positions, cols), A (rows, cols), G (rows, tokens) for each sample. Moves: G at positions times rows places, 32
 * bytes each, and H and A a few times from the cache. Does: 2 positions rows cols operations. For 32 samples of 1024
 * positions and 768 columns: 51 GFLOP, 0.07 ms at the 757 TFLOP/s of cuBLAS in bfloat16; 1.07 GB, 0.26 ms at 4.19
 * TB/s. */
template <tch_scalar type, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, 1)
    token_cross_tiles(const __grid_constant__ tchi_cuda_cross c, const __grid_constant__ tchi_tile_pair pair,
                      double *partial)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) char shared[];
    __shared__ double sums[32];
    constexpr int cols = tchi_tile_shape<WIDE>::cols;
    const int64_t across = tchi_cuda_ceil_div(c.rows, cols);
    for (int64_t n = blockIdx.x; n < c.samples * c.tiles * TCHI_CUDA_CROSS_RANGES; n += gridDim.x) {
        int64_t range = n % TCHI_CUDA_CROSS_RANGES;
        int64_t b = n / TCHI_CUDA_CROSS_RANGES / c.tiles;
        int64_t s = n / TCHI_CUDA_CROSS_RANGES % c.tiles * TCHI_TILE_ROWS;
        int64_t last = across * (range + 1) / TCHI_CUDA_CROSS_RANGES;
        double total = 0.0;
        for (int64_t tile = across * range / TCHI_CUDA_CROSS_RANGES; tile < last; tile++) {
            tchi_tile_work w = {s, tile * cols, b, 0, 1};
            tchi_tiles<type, true, aligned, WIDE>(
                shared, pair, w, [&](tchi_tile_sums<WIDE> &sum) { total += weighted<type>(c, b, w.row, w.col, sum); });
        }
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, TCHI_TILE_THREADS, sums);
        if (threadIdx.x == 0) {
            partial[n] = total;
        }
    }
#endif
}

bool tchi_cuda_token_cross_mma_supported(const tchi_cuda_state *state, const tch_matrices *h, const tch_matrices *a)
{
    return tchi_cuda_kernel_fits(state, TCHI_CROSS_MMA, a, NULL) && h->type == a->type &&
           state->device.shared_per_block >= tchi_tile_shape<WIDE>::shared_bytes + 1024;
}

typedef void (*cross_kernel)(tchi_cuda_cross, tchi_tile_pair, double *);

template <tch_scalar type> static cross_kernel kernel_of(bool aligned)
{
    return aligned ? token_cross_tiles<type, true> : token_cross_tiles<type, false>;
}

tch_status tchi_cuda_token_cross_mma(const tchi_cuda_state *state, const tchi_cuda_cross &c, const tch_matrices *h,
                                     const tch_matrices *a, double *partial)
{
    const int shared = tchi_tile_shape<WIDE>::shared_bytes;
    bool aligned = tchi_tile_aligned(h) && tchi_tile_aligned(a);
    cross_kernel kernel =
        a->type == TCH_SCALAR_F16 ? kernel_of<TCH_SCALAR_F16>(aligned) : kernel_of<TCH_SCALAR_BF16>(aligned);
    tchi_tile_pair pair = {tchi_tile_side_of(h, true), tchi_tile_side_of(a, true), a->cols};
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
                  "token_cross");
    unsigned blocks = tchi_cuda_grid(c.samples * c.tiles * TCHI_CUDA_CROSS_RANGES);
    kernel<<<blocks, TCHI_TILE_THREADS, (size_t)shared, state->stream>>>(c, pair, partial);
    return tchi_cuda_launched(state, "token_cross_tiles");
}

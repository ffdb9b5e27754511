/* The symmetric product of plain or split bfloat16 matrices: the mma.sync kernel for every GPU from sm_80 on, and the
 * choice between it and wgmma. Before changing the main loop, see symmetric_bf16x2.cuh for the shared-memory layout and
 * the rule by which tiles write C; measurements in bench/logs/cuda_symmetric_bf16x2.md.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j <= i; j++) {
 *             float sum = 0;
 *             for (l = 0; l < k; l++) {                       // x = x.high + x.low; plain numbers have no low part
 *                 sum += a[i][l].high * b[j][l].high + a[i][l].high * b[j][l].low + a[i][l].low * b[j][l].high;
 *             }
 *             c[i][j] = c[j][i] = c0 * (i == j) + c1 * d[i][j] + c2 * sum;    // the epilogue
 *         }
 *     } */
#include "symmetric_bf16x2.cuh"

/* Stages: 3 of 128 + 128 rows are 96 KiB, the limit of a block on sm_86, 89 and 120. */
#define STAGES 3
/* Blocks with large tiles per multiprocessor: two if shared memory allows and the compiler keeps within half of the
 * registers, which on sm_100 it does only by spilling. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define LARGE_BLOCKS 2
#else
#define LARGE_BLOCKS 1
#endif
/* Measured on an H200: wgmma takes 0.026 ms for 256 x 128, small tiles 0.029. mma.sync's large tiles win at 4096 only
 * there and are up to a sixth slower elsewhere. With fewer large tiles than its 132 multiprocessors, small ones: 1 x
 * 1024 takes 0.039 ms with 36 large tiles and 0.034 with small ones, 64 x 256 of 192 takes 0.028 and 0.031. */

/* --- mma.sync ---------------------------------------------------------------------------------------------------- */

/* One warp's share of a tile: `high` by `wide` accumulators of 16 by 8, from (row, col) of the tile on. */
template <int high, int wide> struct warp_tile {
    int row, col;
    float sum[high][wide][4];
};

/* Rows of A, 16 by 16 at chunk `chunk`: lanes 0 to 15 address the left halves, the others the right ones. The swizzle
 * repeats every sixteen rows. */
template <int high> static __device__ inline void load_a(uint32_t (&a)[high][4], char *ktile, int row, int chunk)
{
    int lane = (int)threadIdx.x % 32;
    const char *first = tchi_bf16x2_chunk(ktile, row + lane % 16, chunk + lane / 16);
#pragma unroll
    for (int i = 0; i < high; i++) {
        tchi_ldmatrix_x4(a[i], first + 16 * i * TCHI_BF16X2_ROW_BYTES);
    }
}

/* Rows of B, two sets of eight: b[j] holds left and right of the first, then of the second. */
template <int pairs> static __device__ inline void load_b(uint32_t (&b)[pairs][4], char *ktile, int row, int chunk)
{
    int lane = (int)threadIdx.x % 32;
    const char *first = tchi_bf16x2_chunk(ktile, row + lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < pairs; j++) {
        tchi_ldmatrix_x4(b[j], first + 16 * j * TCHI_BF16X2_ROW_BYTES);
    }
}

template <int high, int wide>
static __device__ inline void multiply_fragments(warp_tile<high, wide> &warp, const uint32_t (&a)[high][4],
                                                 const uint32_t (&b)[wide / 2][4])
{
#pragma unroll
    for (int i = 0; i < high; i++) {
#pragma unroll
        for (int j = 0; j < wide; j++) {
            tchi_mma_bf16(warp.sum[i][j], a[i], b[j / 2] + j % 2 * 2);
        }
    }
}

/* All products of one k-tile, 16 along k at a time: for split operands high low, high high and low high, in an order
 * that keeps one fragment of each in registers. */
template <int high, int wide, int planes>
static __device__ inline void multiply_ktile(warp_tile<high, wide> &warp, char *ktile_a, char *ktile_b)
{
    constexpr int low = 4; /* first chunk of the low parts */
#pragma unroll
    for (int chunk = 0; chunk < 8 / planes; chunk += 2) {
        uint32_t a[high][4];
        uint32_t b[wide / 2][4];
        load_a<high>(a, ktile_a, warp.row, chunk);
        if (planes == 2) {
            load_b<wide / 2>(b, ktile_b, warp.col, chunk + low);
            multiply_fragments<high, wide>(warp, a, b);
        }
        load_b<wide / 2>(b, ktile_b, warp.col, chunk);
        multiply_fragments<high, wide>(warp, a, b);
        if (planes == 2) {
            load_a<high>(a, ktile_a, warp.row, chunk + low);
            multiply_fragments<high, wide>(warp, a, b);
        }
    }
}

/* A block computes a square tile of `size`, each warp 16 high by 8 wide of it.
 *
 * For 16 matrices of n = k = 1024, split: 51.5 GFLOP, 0.068 ms at the 757 TFLOP/s cuBLAS reaches by wgmma and about 0.1
 * by mma.sync; to and from memory 64 MiB each for A, B and C and 36 for D, 0.05 ms at 4.8 TB/s; from the L2 cache
 * 576 MiB with tiles of 128. */
template <int size, int high, int wide, int planes>
static __global__ void __launch_bounds__((size / 16 / high) * (size / 8 / wide) * 32, size == 128 ? LARGE_BLOCKS : 4)
    symmetric_bf16x2_mma(const __grid_constant__ tchi_bf16x2_problem p)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    constexpr int warps_wide = size / 8 / wide;
    constexpr int threads = (size / 16 / high) * warps_wide * 32;
    constexpr int stage_bytes = 2 * size * TCHI_BF16X2_ROW_BYTES;
    extern __shared__ __align__(1024) char shared[];
    tchi_bf16x2_tile tile = tchi_bf16x2_tile_of(p, size);
    int number = (int)threadIdx.x / 32;
    warp_tile<high, wide> warp = {number / warps_wide * high * 16, number % warps_wide * wide * 8, {}};
    int ktiles = (p.k + tchi_bf16x2_ktile<planes>::depth - 1) / tchi_bf16x2_ktile<planes>::depth;
    for (int s = 0; s < STAGES - 1; s++) {
        tchi_bf16x2_load<size, threads, planes>(shared + s * stage_bytes, p, tile, s);
    }
    for (int s = 0; s < ktiles; s++) {
        char *stage = shared + s % STAGES * stage_bytes;
        tchi_cp_async_wait<STAGES - 2>();
        __syncthreads(); /* k-tile s has landed for all, and the previous one is no longer in use */
        tchi_bf16x2_load<size, threads, planes>(shared + (s + STAGES - 1) % STAGES * stage_bytes, p, tile,
                                                s + STAGES - 1);
        multiply_ktile<high, wide, planes>(warp, stage, stage + size * TCHI_BF16X2_ROW_BYTES);
    }
    __syncthreads();
    float *staged = (float *)shared;
#pragma unroll
    for (int i = 0; i < high; i++) {
#pragma unroll
        for (int j = 0; j < wide; j++) {
            const float(&d)[4] = warp.sum[i][j];
            tchi_bf16x2_stage<size>(staged, warp.row + 16 * i, warp.col + 8 * j, d[0], d[1], d[2], d[3]);
        }
    }
    __syncthreads();
    tchi_bf16x2_write<size, threads, planes>(p, tile, staged);
#endif
}

static tch_status split_mma(tchi_cuda_state *state, tchi_bf16x2_problem *p, int64_t batch, int size)
{
    int split = p->a.type == TCH_SCALAR_BF16X2;
    int shared = STAGES * 2 * size * TCHI_BF16X2_ROW_BYTES;
    p->tiles = (int32_t)tchi_bf16x2_tile_count(p->n, size);
    if (size == 128) {
        tchi_bf16x2_kernel kernel = split ? symmetric_bf16x2_mma<128, 4, 4, 2> : symmetric_bf16x2_mma<128, 4, 4, 1>;
        return tchi_bf16x2_launch(state, kernel, "symmetric_bf16x2_mma", p, batch, 256, shared);
    }
    tchi_bf16x2_kernel kernel = split ? symmetric_bf16x2_mma<64, 2, 4, 2> : symmetric_bf16x2_mma<64, 2, 4, 1>;
    return tchi_bf16x2_launch(state, kernel, "symmetric_bf16x2_mma", p, batch, 128, shared);
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* Tiles and elements of one matrix are counted in 32 bits. */
#define SIZE_LIMIT (1 << 21)

extern "C" int tchi_cuda_symmetric_bf16x2_supported(const tchi_cuda_state *state, const tch_matrices *,
                                                    const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    return b->type == a->type && c->rows < SIZE_LIMIT && a->cols < (1 << 30) &&
           tchi_cuda_kernel_fits(state, TCHI_SYMMETRIC_MMA_64, a, c) &&
           tchi_cuda_kernel_fits(state, TCHI_SYMMETRIC_MMA_64, b, c);
}

static tchi_bf16x2_problem bf16x2_problem_of(double c0, double c1, const tch_matrices *d, double c2,
                                             const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    tchi_bf16x2_problem p = {};
    p.n = (int32_t)c->rows;
    p.k = (int32_t)a->cols;
    p.c0 = (float)c0;
    p.c1 = (float)c1;
    p.c2 = (float)c2;
    p.a = tchi_cuda_operand_of(a);
    p.b = tchi_cuda_operand_of(b);
    p.c = tchi_cuda_operand_of(c);
    if (d != NULL) {
        p.has_d = 1;
        p.d = tchi_cuda_operand_of(d);
    }
    return p;
}

/* wgmma exists on sm_90 only; later architectures have other instructions. */
extern "C" tch_status tchi_cuda_symmetric_bf16x2(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                                 double c2, const tch_matrices *a, const tch_matrices *b,
                                                 const tch_matrices *c)
{
    if (c->rows == 0 || c->batch == 0) {
        return TCH_OK;
    }
    tchi_bf16x2_problem p = bf16x2_problem_of(c0, c1, d, c2, a, b, c);
    if (tchi_cuda_kernel_fits(state, TCHI_SYMMETRIC_WGMMA, a, c)) {
        return tchi_cuda_split_wgmma(state, &p, c->batch);
    }
    return split_mma(state, &p, c->batch, tchi_cuda_kernel_fits(state, TCHI_SYMMETRIC_MMA_128, a, c) ? 128 : 64);
}

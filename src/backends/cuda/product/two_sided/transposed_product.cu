/* The transpose of a product, C' for C = op(A) B, with A of float32 and B of float16: half of a two-sided product
 * (two_sided.cu), for sm_90. A persistent GEMM (persistent_gemm.cuh): each warpgroup multiplies 64 rows of a tile. A is
 * cast to float16 in registers: roots and bases are stored in float32, and a copy would have to be written and read.
 * The two CTAs of a cluster have vertically adjacent tiles and share B. Design choices: bench/logs/cuda_two_sided.md.
 *
 *     for (each tile of 128 by 256 of C) {
 *         for (k = 0; k < depth; k += 32) {
 *             sum += half(scale_a op(A)[rows][k ..]) B[k ..][cols];    // wgmma, sums in float32
 *         }
 *         C'[cols][rows] = 2^power sum;                                 // in float16 or in float32
 *         partial = the sum of squares of that;                         // for float32
 *     }
 *
 * C is written transposed so that it is the next product's B: wgmma reads B along its rows, and P = L X R' is the
 * transpose of R (L X)'. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"
#include "backends/cuda/matrix/fp16_copy.h"
#include "two_sided.h"

#include <cuda_fp16.h>

#define TILE_ROWS 128 /* of C, half of them for each warpgroup */
#define TILE_COLS 256
#define DEPTH 32 /* of a k-tile: 128 bytes of A's rows */
#define BOX_COLS TCHI_CUDA_BOX_COLS
#define BOX_BYTES (DEPTH * BOX_COLS * 2) /* of B */
#define BOXES (TILE_COLS / BOX_COLS)
#define A_BYTES (TILE_ROWS * DEPTH * 4)
#define A_BOX_ROWS 32 /* of op(A), if A is transposed */
#define A_BOX_BYTES (A_BOX_ROWS * DEPTH * 4)
#define STAGES 5
#define CLUSTER 2
#define RESULT_BYTES (64 * 256 * 2) /* of a warpgroup: all of its columns in float16, or half in float32 */
#define FLOAT_COLS 128              /* of C in that half */
#define FLOAT_ROWS 32               /* of C in a box of float32 */
#define SMALLEST 256                /* contraction that is supported */

typedef struct transposed_problem {
    int32_t pairs, across; /* tiles of one matrix: two by two down, and across */
    int32_t items;         /* one is a tile for each CTA of a cluster */
    int32_t ktiles;
    tchi_transposed_scales scales;
    double *partial; /* of each matrix, tile and warpgroup; or NULL */
    CUtensorMap a, b, c;
} transposed_problem;

typedef struct transposed_memory {
    char a[STAGES][A_BYTES];
    char b[STAGES][BOXES][BOX_BYTES];
    char result[TCHI_GEMM_WARPGROUPS][RESULT_BYTES];
    double sums[TCHI_GEMM_WARPGROUPS][4];
    tchi_ring<STAGES> ring;
} transposed_memory;

/* --- tiles ------------------------------------------------------------------------------------------------------- */

typedef struct transposed_tile {
    int matrix, row, col;
    int number; /* within its matrix */
} transposed_tile;

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* A thread's fragments of 64 rows of A for two steps along k. */
typedef uint32_t transposed_fragment[2][4];

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    return (uint32_t)__half_as_ushort(__float2half_rn(low)) | (uint32_t)__half_as_ushort(__float2half_rn(high)) << 16;
}

/* With lane = 4 g + t: word 2 i + h has row g + 8 h and columns 8 i + 2 t and the next. Rows of 128 bytes are swizzled,
 * chunk c of row r at c ^ (r % 8): no bank conflicts here and below. */
static __device__ __forceinline__ void read_rows(transposed_fragment &f, const char *a, float scale)
{
    int lane = (int)threadIdx.x % 32;
    int row = (int)threadIdx.x / 32 * 16 + lane / 4;
    const char *at = a + row * 128 + lane % 2 * 8;
    int chunk = lane % 4 / 2 ^ lane / 4;
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int word = 0; word < 4; word++) {
            int place = chunk ^ (4 * k + word / 2 * 2);
            float2 two = *(const float2 *)(at + word % 2 * 8 * 128 + place * 16);
            f[k][word] = pack(scale * two.x, scale * two.y);
        }
    }
}

/* The same for transposed A: rows of op(A) along rows of shared memory, in boxes of 32. */
static __device__ __forceinline__ void read_columns(transposed_fragment &f, const char *a, float scale)
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32;
    int row = warp % 2 * 16 + lane / 4; /* in the box */
    const char *at = a + warp / 2 * A_BOX_BYTES + row % 4 * 4;
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int word = 0; word < 4; word++) {
            float two[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int line = 2 * (lane % 4) + e; /* of eight */
                int place = (row / 4 + word % 2 * 2) ^ line;
                two[e] = *(const float *)(at + (16 * k + word / 2 * 8 + line) * 128 + place * 16);
            }
            f[k][word] = pack(scale * two[0], scale * two[1]);
        }
    }
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* Waits until TMA has read the warpgroup's previous results, or reads the current ones. */
static __device__ __forceinline__ void await_place(int group)
{
    if (threadIdx.x % 128 == 0) {
        tchi_tma_wait_read();
    }
    tchi_warpgroup_sync(1 + group);
}

/* As float16: 256 rows of C', 64 numbers each. Four squares of 8 by 8 at a time. */
static __device__ __forceinline__ void write_fp16(const transposed_problem &p, const transposed_tile &t, int group,
                                                  char *place, const float (&sum)[128], float factor)
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x % 128 / 32;
    await_place(group);
    char *at = place + (lane / 16 * 8 + lane % 8) * 128 + (((2 * warp + lane / 8 % 2) ^ lane % 8) << 4);
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        uint32_t four[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float *two = sum + 4 * (j + i / 2) + 2 * (i % 2);
            four[i] = pack(factor * two[0], factor * two[1]);
        }
        tchi_stmatrix_x4_transposed(at + j * 8 * 128, four);
    }
    tchi_tma_publish();
    tchi_warpgroup_sync(1 + group);
    if (threadIdx.x % 128 == 0) {
        tchi_tma_store(&p.c, t.row + group * 64, t.col, t.matrix, place);
        tchi_tma_commit();
    }
}

/* As float32, one half of the columns of C after the other: 128 rows of C' in two boxes of 32 numbers a row. */
static __device__ __forceinline__ void write_floats(const transposed_problem &p, const transposed_tile &t, int group,
                                                    char *place, const float (&sum)[128], float2 back)
{
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x % 128 / 32;
    int row = warp % 2 * 16 + lane / 4;
    char *at = place + warp / 2 * (RESULT_BYTES / 2) + row % 4 * 4;
#pragma unroll
    for (int half = 0; half < TILE_COLS / FLOAT_COLS; half++) {
        await_place(group);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int line = lane % 4 * 2 + i % 2; /* of eight */
            int chunk = (row / 4 + i / 2 % 2 * 2) ^ line;
            *(float *)(at + (i / 4 * 8 + line) * 128 + chunk * 16) = back.x * sum[64 * half + i] * back.y;
        }
        tchi_tma_publish();
        tchi_warpgroup_sync(1 + group);
        if (threadIdx.x % 128 == 0) {
#pragma unroll
            for (int box = 0; box < 2; box++) {
                tchi_tma_store(&p.c, t.row + group * 64 + box * FLOAT_ROWS, t.col + half * FLOAT_COLS, t.matrix,
                               place + box * (RESULT_BYTES / 2));
            }
            tchi_tma_commit();
        }
    }
}

/* The sum of squares of a warpgroup's numbers, in a fixed order. Elements outside C are 0. */
static __device__ __forceinline__ void add_squares(const transposed_problem &p, transposed_memory &m,
                                                   const transposed_tile &t, int group, const float (&sum)[128],
                                                   double factor)
{
    double total = 0;
#pragma unroll
    for (int i = 0; i < 128; i += 8) {
        float eight = 0;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            eight = fmaf(sum[i + k], sum[i + k], eight);
        }
        total += (double)eight;
    }
    total = tchi_cuda_warp_sum(total);
    if (threadIdx.x % 32 == 0) {
        m.sums[group][threadIdx.x % 128 / 32] = total;
    }
    tchi_warpgroup_sync(1 + group);
    if (threadIdx.x % 128 == 0) {
        const double *four = m.sums[group];
        int64_t tiles = (int64_t)p.pairs * CLUSTER * p.across;
        p.partial[(t.matrix * tiles + t.number) * TCHI_GEMM_WARPGROUPS + group] =
            ((four[0] + four[1]) + (four[2] + four[3])) * factor * factor;
    }
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int side_power(const uint32_t *largest, int matrix)
{
    return largest == NULL ? 0 : tchi_fp16_unit_power(largest[matrix]);
}

/* Undoes all scales in two factors, since their product may overflow: after the first, sums are between the stored and
 * the final values. Beyond 2^250 nothing is left of float32 either way. */
static __device__ __forceinline__ float2 rescaling(const transposed_problem &p, int matrix)
{
    int power = p.scales.power - side_power(p.scales.a, matrix) - side_power(p.scales.before, matrix) -
                tchi_fp16_power(p.scales.b[matrix]);
    power = max(min(power, 250), -250);
    return make_float2(tchi_power_of_two(power / 2), tchi_power_of_two(power - power / 2));
}

template <bool transpose_a, tch_scalar out> struct transposed_gemm : tchi_gemm<STAGES, CLUSTER> {
    static constexpr bool stores_by_tma = true, alternates = true;
    using problem = transposed_problem;
    using memory = transposed_memory;
    using fragment = transposed_fragment;

    /* Tiles of a matrix in sequence, so that it stays in L2 while it is needed. */
    static __device__ __forceinline__ transposed_tile tile_of(const transposed_problem &p, int item, int rank)
    {
        int each = p.pairs * p.across;
        int left = item % each;
        int down = left / p.across * CLUSTER + rank;
        int col = left % p.across;
        return {item / each, down * TILE_ROWS, col * TILE_COLS, down * p.across + col};
    }

    /* Each CTA loads its A, and half of B for both. */
    static __device__ __forceinline__ void load(const transposed_problem &p, transposed_memory &m, int stage,
                                                const transposed_tile &t, int rank, int ktile)
    {
        const int k = ktile * DEPTH;
        uint64_t *full = m.ring.full + stage;
        tchi_barrier_arrive_expecting(full, A_BYTES + BOXES * BOX_BYTES);
        if (transpose_a) {
#pragma unroll
            for (int i = 0; i < TILE_ROWS / A_BOX_ROWS; i++) {
                tchi_tma_load(m.a[stage] + i * A_BOX_BYTES, &p.a, t.row + i * A_BOX_ROWS, k, t.matrix, full);
            }
        } else {
            tchi_tma_load(m.a[stage], &p.a, k, t.row, t.matrix, full);
        }
#pragma unroll
        for (int i = 0; i < BOXES / CLUSTER; i++) {
            int box = rank * (BOXES / CLUSTER) + i;
            tchi_tma_load_to((1 << CLUSTER) - 1, m.b[stage][box], &p.b, t.col + box * BOX_COLS, k, t.matrix, full);
        }
    }

    static __device__ __forceinline__ void start(const transposed_problem &, transposed_memory &m, int stage,
                                                 float scale, float (&sum)[1][128], transposed_fragment &f, int add)
    {
        if (transpose_a) {
            read_columns(f, m.a[stage], scale);
        } else {
            read_rows(f, m.a[stage], scale);
        }
        uint64_t b = tchi_wgmma_columns(m.b[stage], BOX_BYTES);
        tchi_wgmma_fence();
        tchi_wgmma_registers(sum[0], f[0], b, add);
        tchi_wgmma_registers(sum[0], f[1], b + (16 * 128 >> 4), 1);
    }

    static __device__ __forceinline__ void compute(const transposed_problem &p, transposed_memory &m,
                                                   const transposed_tile &t, int group, int, tchi_ring_place *at)
    {
        float sum[1][128];
        float scale = tchi_power_of_two(side_power(p.scales.a, t.matrix));
        int last = tchi_gemm_multiply<transposed_gemm>(p, m, scale, sum, p.ktiles, at);
        tchi_gemm_finish<transposed_gemm>(m, sum, last);
        char *place = m.result[group];
        if (out == TCH_SCALAR_F16) {
            write_fp16(p, t, group, place, sum[0], tchi_power_of_two(p.scales.power));
            return;
        }
        float2 back = rescaling(p, t.matrix);
        write_floats(p, t, group, place, sum[0], back);
        if (p.partial != NULL) {
            add_squares(p, m, t, group, sum[0], (double)back.x * (double)back.y);
        }
    }
};

/* For 100 matrices of m = n = k = 1024: 215 GFLOP, 0.33 ms at 650 TFLOP/s; 400 MB of A, 200 of B and 200 or 400 of C,
 * 0.24 ms at 4.2 TB/s. From shared memory a multiprocessor reads 48 KB for a k-tile and gets 32, in 512 cycles of
 * wgmma. */
template <class gemm>
static __global__ void __launch_bounds__(gemm::threads, 1)
    transposed_product(const __grid_constant__ transposed_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gemm>(p);
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

extern "C" int64_t tchi_cuda_transposed_partials(int64_t rows, int64_t cols)
{
    int64_t pairs = tchi_cuda_ceil_div(rows, TILE_ROWS * CLUSTER);
    return pairs * CLUSTER * tchi_cuda_ceil_div(cols, TILE_COLS) * TCHI_GEMM_WARPGROUPS;
}

/* Matrices smaller than 256 waste more of a tile than float16 gains. The batch size does not matter: an optimizer's
 * step must be bitwise-identical however its blocks are divided. TMA writes whole 16-byte chunks of a row:
 * tchi_tma_store. */
extern "C" int tchi_cuda_transposed_product_supported(const tchi_cuda_state *state, const tch_matrices *a,
                                                      const tch_matrices *b, const tch_matrices *c)
{
    const int64_t most = (int64_t)1 << 20;
    int countable = b->rows >= SMALLEST && b->rows < most && c->rows < most && c->cols < most &&
                    tchi_cuda_transposed_partials(c->cols, c->rows) < (1 << 30) / c->batch;
    return tchi_cuda_kernel_fits(state, TCHI_TWO_SIDED_TRANSPOSED, a, c) && countable &&
           tchi_cuda_tensor_map_supported(a, 4) && tchi_cuda_tensor_map_supported(b, 2) &&
           tchi_cuda_tensor_map_supported(c, c->type == TCH_SCALAR_F32 ? 4 : 2);
}

template <bool transpose_a>
static tch_status launch_transposed(tchi_cuda_state *state, tch_scalar out, const transposed_problem &p)
{
    using to_fp16 = transposed_gemm<transpose_a, TCH_SCALAR_F16>;
    using to_floats = transposed_gemm<transpose_a, TCH_SCALAR_F32>;
    return out == TCH_SCALAR_F16
               ? tchi_gemm_launch<to_fp16>(state, "transposed_product", transposed_product<to_fp16>, p)
               : tchi_gemm_launch<to_floats>(state, "transposed_product", transposed_product<to_floats>, p);
}

extern "C" tch_status tchi_cuda_transposed_product(tchi_cuda_state *state, const tch_matrices *a, int32_t transpose_a,
                                                   const tch_matrices *b, const tch_matrices *c,
                                                   const tchi_transposed_scales *scales, double *partial)
{
    transposed_problem p = {};
    p.pairs = (int32_t)tchi_cuda_ceil_div(c->cols, TILE_ROWS * CLUSTER);
    p.across = (int32_t)tchi_cuda_ceil_div(c->rows, TILE_COLS);
    p.items = (int32_t)(p.pairs * p.across * c->batch);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(b->rows, DEPTH);
    p.scales = *scales;
    p.partial = partial;
    TCHI_TRY(tchi_cuda_tensor_map(a, transpose_a ? DEPTH : TILE_ROWS, &p.a));
    TCHI_TRY(tchi_cuda_tensor_map(b, DEPTH, &p.b));
    TCHI_TRY(tchi_cuda_tensor_map(c, c->type == TCH_SCALAR_F16 ? TILE_COLS : FLOAT_COLS, &p.c));
    return transpose_a ? launch_transposed<true>(state, c->type, p) : launch_transposed<false>(state, c->type, p);
}

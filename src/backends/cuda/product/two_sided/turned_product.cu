/* The transpose of a product, C' for C = op(A) B, with A of float32 and B of float16: half of a product from both sides
 * (two_sided.cu), for sm_90. A persistent kernel: a producer warp asks the tensor memory accelerator for k-tiles of A
 * and B, and two warpgroups multiply 64 rows of a tile each. A goes through registers, where it becomes float16 on its
 * way: a root or a basis is kept in float32, and a copy of it would have to be written and read. The two blocks of a
 * cluster have tiles below each other and share B. How this way was chosen: bench/ladder/cuda_two_sided.md.
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
 * transpose of R (L X)'. The one thing to know before changing it is what pair_ring.cuh says of rings. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/hopper.cuh"
#include "backends/cuda/device/pair_launch.cuh"
#include "backends/cuda/device/pair_ring.cuh"
#include "backends/cuda/device/tensor_map.h"
#include "backends/cuda/matrix/narrow.h"
#include "two_sided.h"

#include <cuda_fp16.h>

#define TILE_ROWS 128 /* of C, half of them for each warpgroup */
#define TILE_COLS 256
#define DEPTH 32 /* of a k-tile: 128 bytes of A's rows */
#define BOX_COLS TCHI_CUDA_BOX_COLS
#define BOX_BYTES (DEPTH * BOX_COLS * 2) /* of B */
#define BOXES (TILE_COLS / BOX_COLS)
#define A_BYTES (TILE_ROWS * DEPTH * 4)
#define A_BOX_ROWS 32 /* of op(A), where A lies transposed */
#define A_BOX_BYTES (A_BOX_ROWS * DEPTH * 4)
#define STAGES 5
#define CLUSTER 2
#define WARPGROUPS 2
#define THREADS (128 * (WARPGROUPS + 1))
#define RESULT_BYTES (64 * 256 * 2) /* of a warpgroup: all it has in float16, or half of it in float32 */
#define FLOAT_COLS 128              /* of C in that half */
#define FLOAT_ROWS 32               /* of C in a box of float32 */
#define SMALLEST 256                /* side of a matrix that is taken */
#define MULTIPLY_REGISTERS 232
#define LOAD_REGISTERS 40

typedef struct turned_problem {
    int32_t pairs, across; /* tiles of one matrix: two by two down, and across */
    int32_t items;         /* one is a tile for each block of a cluster */
    int32_t ktiles;
    tchi_turned_scales scales;
    double *partial; /* of each matrix, tile and warpgroup; or nothing */
    CUtensorMap a, b, c;
} turned_problem;

typedef struct turned_memory {
    char a[STAGES][A_BYTES];
    char b[STAGES][BOXES][BOX_BYTES];
    char result[WARPGROUPS][RESULT_BYTES];
    uint64_t full[STAGES], empty[STAGES];
    double sums[WARPGROUPS][4];
} turned_memory;

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

/* --- tiles ------------------------------------------------------------------------------------------------------- */

typedef struct turned_tile {
    int matrix, row, col;
    int number; /* within its matrix */
} turned_tile;

/* Those of a matrix one after the other, so that it stays in the L2 cache for as long as it is needed. */
static __device__ inline turned_tile tile_of(const turned_problem &p, int item, int rank)
{
    int each = p.pairs * p.across;
    int left = item % each;
    int down = left / p.across * CLUSTER + rank;
    int col = left % p.across;
    return {item / each, down * TILE_ROWS, col * TILE_COLS, down * p.across + col};
}

/* --- loading: one thread ----------------------------------------------------------------------------------------- */

/* Each block brings its own A, and half of B to both. */
template <bool turned_a>
static __device__ __forceinline__ void load_ktile(const turned_problem &p, turned_memory &m, int stage,
                                                  const turned_tile &t, int rank, int k)
{
    uint64_t *full = m.full + stage;
    tchi_barrier_arrive_expecting(full, A_BYTES + BOXES * BOX_BYTES);
    if (turned_a) {
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

template <bool turned_a> static __device__ inline void load_all(const turned_problem &p, turned_memory &m)
{
    int rank = tchi_cluster_rank();
    tchi_ring_place at = {0, 0};
    for (int own = 0; tchi_pair_item(own) < p.items; own++) {
        turned_tile t = tile_of(p, tchi_pair_item(own), rank);
        for (int ktile = 0; ktile < p.ktiles; ktile++) {
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            load_ktile<turned_a>(p, m, at.stage, t, rank, ktile * DEPTH);
            tchi_ring_step<STAGES>(&at);
        }
    }
}

/* --- multiplying ------------------------------------------------------------------------------------------------- */

/* A thread's part of 64 rows of A over a k-tile: what wgmma wants of two steps along k. */
typedef uint32_t turned_fragment[2][4];

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    return (uint32_t)__half_as_ushort(__float2half_rn(low)) | (uint32_t)__half_as_ushort(__float2half_rn(high)) << 16;
}

/* With lane = 4 g + t: word 2 i + h has row g + 8 h and columns 8 i + 2 t and the next. Rows of 128 bytes lie with
 * chunk c of row r at place c ^ (r % 8): no two lanes that read at a time meet in a bank, nor below. */
static __device__ __forceinline__ void read_rows(turned_fragment &f, const char *a, float scale)
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

/* The same where A lies transposed: rows of op(A) along rows of shared memory, in boxes of 32 of them. */
static __device__ __forceinline__ void read_columns(turned_fragment &f, const char *a, float scale)
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

/* One k-tile into the background, while the one before is still being multiplied: that one's stage is left when it is
 * over, and its registers are free for the next. */
template <bool turned_a>
static __device__ __forceinline__ void multiply_ktile(turned_memory &m, float (&sum)[128], turned_fragment &f,
                                                      float scale, tchi_ring_place *at, int ktile)
{
    tchi_barrier_wait(m.full + at->stage, at->parity);
    if (turned_a) {
        read_columns(f, m.a[at->stage], scale);
    } else {
        read_rows(f, m.a[at->stage], scale);
    }
    uint64_t b = tchi_wgmma_columns(m.b[at->stage], BOX_BYTES);
    tchi_wgmma_fence();
    tchi_wgmma_f16_n256_registers(sum, f[0], b, ktile > 0);
    tchi_wgmma_f16_n256_registers(sum, f[1], b + (16 * 128 >> 4), 1);
    tchi_wgmma_commit();
    tchi_wgmma_wait<1>();
    if (ktile > 0) {
        tchi_ring_leave(m.empty + (at->stage + STAGES - 1) % STAGES);
    }
    tchi_ring_step<STAGES>(at);
}

/* All k-tiles of a tile; the last stage is left, too. */
template <bool turned_a>
static __device__ __forceinline__ void multiply(const turned_problem &p, turned_memory &m, float (&sum)[128],
                                                float scale, tchi_ring_place *at)
{
    turned_fragment even, odd;
    int ktile = 0;
    for (; ktile + 1 < p.ktiles; ktile += 2) {
        multiply_ktile<turned_a>(m, sum, even, scale, at, ktile);
        multiply_ktile<turned_a>(m, sum, odd, scale, at, ktile + 1);
    }
    if (ktile < p.ktiles) {
        multiply_ktile<turned_a>(m, sum, even, scale, at, ktile);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum);
    tchi_ring_leave(m.empty + (at->stage + STAGES - 1) % STAGES);
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* The accelerator has read what was in a warpgroup's place for results, or it reads what is there now. */
static __device__ __forceinline__ void await_place(int group)
{
    if (threadIdx.x % 128 == 0) {
        tchi_tma_wait_read();
    }
    tchi_warpgroup_sync(1 + group);
}

/* As float16: 256 rows of C', 64 numbers each. Four squares of 8 by 8 at a time. */
static __device__ __forceinline__ void write_halves(const turned_problem &p, const turned_tile &t, int group,
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
static __device__ __forceinline__ void write_floats(const turned_problem &p, const turned_tile &t, int group,
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

/* The squares of a warpgroup's numbers, always in the same order. What lies outside of C is 0. */
static __device__ __forceinline__ void add_squares(const turned_problem &p, turned_memory &m, const turned_tile &t,
                                                   int group, const float (&sum)[128], double factor)
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
        p.partial[(t.matrix * tiles + t.number) * WARPGROUPS + group] =
            ((four[0] + four[1]) + (four[2] + four[3])) * factor * factor;
    }
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

/* Roots are brought to where their largest number is 1 to 2: by which power of two. */
static __device__ __forceinline__ int side_power(const uint32_t *largest, int matrix)
{
    return largest == NULL ? 0 : max(tchi_narrow_power(largest[matrix]) - 14, -126);
}

/* What takes all scales back, in two parts, since their product may be no number: sums times the first lie between what
 * they are and what they become. Beyond 2^250 nothing is left of float32 either way. */
static __device__ __forceinline__ float2 taken_back(const turned_problem &p, int matrix)
{
    int power = p.scales.power - side_power(p.scales.a, matrix) - side_power(p.scales.before, matrix) -
                tchi_narrow_power(p.scales.b[matrix]);
    power = max(min(power, 250), -250);
    return make_float2(tchi_power_of_two(power / 2), tchi_power_of_two(power - power / 2));
}

template <bool turned_a, tch_scalar out>
static __device__ __forceinline__ void compute_tile(const turned_problem &p, turned_memory &m, const turned_tile &t,
                                                    tchi_ring_place *at)
{
    float sum[128];
    multiply<turned_a>(p, m, sum, tchi_power_of_two(side_power(p.scales.a, t.matrix)), at);
    int group = tchi_warpgroup();
    char *place = m.result[group];
    if (out == TCH_SCALAR_F16) {
        write_halves(p, t, group, place, sum, tchi_power_of_two(p.scales.power));
    } else {
        float2 back = taken_back(p, t.matrix);
        write_floats(p, t, group, place, sum, back);
        if (p.partial != NULL) {
            add_squares(p, m, t, group, sum, (double)back.x * (double)back.y);
        }
    }
}

#endif

/* For 100 matrices of m = n = k = 1024: 215 GFLOP, 0.33 ms at 650 TFLOP/s; 400 MB of A, 200 of B and 200 or 400 of C,
 * 0.24 ms at 4.2 TB/s. From shared memory a multiprocessor reads 48 KB for a k-tile and gets 32, in 512 cycles of
 * wgmma. */
template <bool turned_a, tch_scalar out>
static __global__ void __launch_bounds__(THREADS, 1) turned_product(const __grid_constant__ turned_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    turned_memory &m = *(turned_memory *)shared;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            tchi_barrier_create(m.full + i, 1);
            tchi_barrier_create(m.empty + i, 4 * WARPGROUPS * CLUSTER);
        }
        tchi_barrier_publish();
    }
    __syncwarp();
    tchi_cluster_sync();
    if (threadIdx.x >= 128 * WARPGROUPS) {
        tchi_registers_give<LOAD_REGISTERS>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            load_all<turned_a>(p, m);
        }
        __syncwarp();
        tchi_cluster_sync();
    } else {
        tchi_registers_take<MULTIPLY_REGISTERS>();
        int rank = tchi_cluster_rank();
        tchi_ring_place at = {0, 0};
        for (int own = 0; tchi_pair_item(own) < p.items; own++) {
            compute_tile<turned_a, out>(p, m, tile_of(p, tchi_pair_item(own), rank), &at);
        }
        if (threadIdx.x % 128 == 0) {
            tchi_tma_wait_read();
        }
        __syncwarp();
        tchi_cluster_sync();
    }
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

extern "C" int64_t tchi_cuda_turned_partials(int64_t rows, int64_t cols)
{
    int64_t pairs = tchi_cuda_ceil_div(rows, TILE_ROWS * CLUSTER);
    return pairs * CLUSTER * tchi_cuda_ceil_div(cols, TILE_COLS) * WARPGROUPS;
}

/* Smaller matrices waste more of a tile than float16 gains. How many there are has no part in it: an optimizer's step
 * must have the same bits however its blocks are divided. The accelerator writes whole 16 bytes of a row:
 * tchi_tma_store. */
extern "C" int tchi_cuda_turned_product_takes(const tchi_cuda_state *state, const tch_matrices *a,
                                              const tch_matrices *b, const tch_matrices *c)
{
    const int64_t most = (int64_t)1 << 20;
    int sized = c->rows >= SMALLEST && c->cols >= SMALLEST && b->rows >= SMALLEST && c->rows % 8 == 0 &&
                c->cols % 8 == 0 && b->rows < most && c->rows < most && c->cols < most &&
                tchi_cuda_turned_partials(c->cols, c->rows) < (1 << 30) / c->batch;
    return state->device.major == 9 && sized && tchi_cuda_tensor_map_takes_floats(a) && tchi_cuda_tensor_map_takes(b) &&
           (c->type == TCH_SCALAR_F32 ? tchi_cuda_tensor_map_takes_floats(c) : tchi_cuda_tensor_map_takes(c));
}

static tch_status launch(tchi_cuda_state *state, const turned_problem *p, void (*kernel)(turned_problem))
{
    return tchi_cuda_launch_pairs(state, "turned_product", kernel, *p, p->items, THREADS, sizeof(turned_memory));
}

extern "C" tch_status tchi_cuda_turned_product(tchi_cuda_state *state, const tch_matrices *a, int32_t turned_a,
                                               const tch_matrices *b, const tch_matrices *c,
                                               const tchi_turned_scales *scales, double *partial)
{
    int halves = c->type == TCH_SCALAR_F16;
    turned_problem p = {};
    p.pairs = (int32_t)tchi_cuda_ceil_div(c->cols, TILE_ROWS * CLUSTER);
    p.across = (int32_t)tchi_cuda_ceil_div(c->rows, TILE_COLS);
    p.items = (int32_t)(p.pairs * p.across * c->batch);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(b->rows, DEPTH);
    p.scales = *scales;
    p.partial = partial;
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(a, turned_a ? DEPTH : TILE_ROWS, &p.a));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(b, DEPTH, &p.b));
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(c, halves ? TILE_COLS : FLOAT_COLS, &p.c));
    if (turned_a) {
        return launch(state, &p, halves ? turned_product<true, TCH_SCALAR_F16> : turned_product<true, TCH_SCALAR_F32>);
    }
    return launch(state, &p, halves ? turned_product<false, TCH_SCALAR_F16> : turned_product<false, TCH_SCALAR_F32>);
}

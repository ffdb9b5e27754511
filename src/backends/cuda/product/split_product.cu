/* Products of matrices that are split into two of float16 or of bfloat16, for sm_90: C = alpha (high high + low high +
 * high low) + beta C in one pass, in float32 or split again. A persistent kernel: a producer warp asks the tensor
 * memory accelerator for k-tiles of both parts of A and B, which serve three products where they come once, and two
 * warpgroups multiply 64 rows of a tile each. The two blocks of a cluster have tiles below each other and share B.
 *
 *     for (each tile of 128 by 128 of C) {
 *         for (k = 0; k < depth; k += 64) {
 *             small += A.high[rows][k ..] B.low[k ..][cols] + A.low[rows][k ..] B.high[k ..][cols];
 *             large += A.high[rows][k ..] B.high[k ..][cols];
 *         }
 *         C[rows][cols] = factor (large + small) + beta C[rows][cols];   // or the two halves of scale times that
 *     }
 *
 * High parts alone are multiplied, or nothing, where a number of the matrix on the device says that this will do. Small
 * products have sums of their own: tensor cores cut sums off instead of rounding them, and what is added to a large sum
 * would be cut each time. The one thing to know before changing it is what pair_ring.cuh says of rings. How this way
 * was chosen: bench/ladder/cuda_basis.md. */
#include <cuda_fp16.h>

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/hopper.cuh"
#include "backends/cuda/device/pair_launch.cuh"
#include "backends/cuda/device/pair_ring.cuh"
#include "backends/cuda/device/tensor_map.h"

#define TILE 128 /* rows and columns of C, of which a warpgroup has half of the rows */
#define DEPTH TCHI_CUDA_BOX_COLS
#define ROW_BYTES (2 * DEPTH)
#define BOX_BYTES (TILE * ROW_BYTES)
#define STAGES 3
#define CLUSTER 2
#define WARPGROUPS 2
#define MULTIPLY_REGISTERS 232
#define LOAD_REGISTERS 40
#define MULTIPLIERS (128 * WARPGROUPS) /* threads; one behind them asks for copies */

typedef struct split_launch {
    int32_t rows, cols;
    int32_t pairs, across; /* tiles of one matrix: two by two down, and across */
    int32_t items;         /* one is a tile for each block of a cluster */
    int32_t steps;         /* of the ring for a tile */
    int32_t low;           /* whose low parts count */
    float factor, beta, scale;
    tch_condition high_alone, negligible;
    double *largest;                 /* NULL or one for each matrix */
    CUtensorMap a[2], b[2];          /* high and low parts */
    tchi_cuda_operand c;             /* of float32, */
    tchi_cuda_operand wide;          /* of float64, in the place of it if there is one, */
    tchi_cuda_operand high_c, low_c; /* or split */
} split_launch;

/* How many operands have low parts that count. */
enum { OF_NONE, OF_ONE, OF_BOTH };

/* Without low parts a thread has half of the sums and a step of the ring half of the bytes, so that two blocks fit on a
 * multiprocessor: one multiplies while the other writes. */
template <int low> struct split_means {
    static constexpr int boxes = low == OF_NONE ? 1 : 2;
    static constexpr int resident = low == OF_NONE ? 2 : 1;
    static constexpr int threads = MULTIPLIERS + (low == OF_NONE ? 32 : 128); /* registers move between warpgroups */
    static constexpr int rows_at_once = low == OF_NONE ? 1 : 2;               /* of C, on their way to a thread */
};

template <int low> struct split_memory {
    char a[STAGES][split_means<low>::boxes][BOX_BYTES];
    char b[STAGES][split_means<low>::boxes][BOX_BYTES];
    uint64_t full[STAGES], empty[STAGES];
};

/* What comes out. */
enum { AS_FLOATS, AS_DOUBLES, AS_HALVES };

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA

/* --- tiles -------------------------------------------------------------------------------------------------------- */

typedef struct split_tile {
    int matrix, row, col;
} split_tile;

/* Those of a matrix one after the other, so that it stays in the L2 cache for as long as it is needed. */
static __device__ inline split_tile tile_of(const split_launch &p, int item, int rank)
{
    int each = p.pairs * p.across;
    int left = item % each;
    return {item / each, (left % p.pairs * CLUSTER + rank) * TILE, left / p.pairs * TILE};
}

static __device__ __forceinline__ bool holds(const tch_condition &c, int matrix)
{
    return c.of != NULL && c.of[matrix] <= c.most;
}

/* Matrices that need high parts alone are in a launch of their own: were it decided tile by tile, two loops would have
 * sums in the same registers, and the compiler lets products wait for each other then. */
template <int low> static __device__ __forceinline__ bool is_elsewhere(const split_launch &p, int matrix)
{
    return p.high_alone.of != NULL && holds(p.high_alone, matrix) != (low == OF_NONE);
}

/* The pair's next item to be multiplied, number `own` of its own or a later one. */
template <int low> static __device__ __forceinline__ int next_own(const split_launch &p, int own)
{
    for (; tchi_pair_item(own) < p.items; own++) {
        int matrix = tile_of(p, tchi_pair_item(own), 0).matrix;
        if (!is_elsewhere<low>(p, matrix) && !holds(p.negligible, matrix)) {
            break;
        }
    }
    return own;
}

/* --- loading: one thread ----------------------------------------------------------------------------------------- */

template <int low>
static __device__ __forceinline__ void load_a(const split_launch &p, split_memory<low> &m, int stage,
                                              const split_tile &t, int box, int part, int k)
{
    tchi_tma_load(m.a[stage][box], &p.a[part], k, t.row, t.matrix, m.full + stage);
}

/* Each block brings half of B to both. A B that is not transposed comes in boxes of 64 columns. */
template <bool transposed, int low>
static __device__ __forceinline__ void load_b(const split_launch &p, split_memory<low> &m, int stage,
                                              const split_tile &t, int box, int part, int k)
{
    int rank = tchi_cluster_rank();
    int col = t.col + rank * (TILE / CLUSTER);
    tchi_tma_load_to((1 << CLUSTER) - 1, m.b[stage][box] + rank * (BOX_BYTES / CLUSTER), &p.b[part],
                     transposed ? k : col, transposed ? col : k, t.matrix, m.full + stage);
}

/* The high parts of a step and those low parts that count. */
template <bool transposed, int low>
static __device__ __forceinline__ void load_step(const split_launch &p, split_memory<low> &m, int stage,
                                                 const split_tile &t, int step)
{
    const int k = step * DEPTH;
    tchi_barrier_arrive_expecting(m.full + stage, (2 + low) * BOX_BYTES);
    load_a(p, m, stage, t, 0, 0, k);
    load_b<transposed>(p, m, stage, t, 0, 0, k);
    if (low == OF_BOTH || (low == OF_ONE && (p.low & TCH_LOW_A) != 0)) {
        load_a(p, m, stage, t, 1, 1, k);
    }
    if (low == OF_BOTH || (low == OF_ONE && (p.low & TCH_LOW_B) != 0)) {
        load_b<transposed>(p, m, stage, t, 1, 1, k);
    }
}

template <bool transposed, int low> static __device__ inline void load_all(const split_launch &p, split_memory<low> &m)
{
    int rank = tchi_cluster_rank();
    tchi_ring_place at = {0, 0};
    for (int own = next_own<low>(p, 0); tchi_pair_item(own) < p.items; own = next_own<low>(p, own + 1)) {
        split_tile t = tile_of(p, tchi_pair_item(own), rank);
        for (int step = 0; step < p.steps; step++) {
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            load_step<transposed, low>(p, m, at.stage, t, step);
            tchi_ring_step<STAGES>(&at);
        }
    }
}

/* --- multiplying ------------------------------------------------------------------------------------------------- */

/* Of a warpgroup's 64 rows of a tile. */
typedef float split_sums[64];

/* 64 rows of A and all of B, which lies transposed or not. */
template <tch_scalar type, bool transposed>
static __device__ __forceinline__ void multiply_rows(split_sums &sum, uint64_t a, uint64_t b, int add)
{
    if (type == TCH_SCALAR_F16 && transposed) {
        tchi_wgmma_f16_n128(sum, a, b, add);
    } else if (type == TCH_SCALAR_F16) {
        tchi_wgmma_f16_n128_by_columns(sum, a, b, add);
    } else if (transposed) {
        tchi_wgmma_bf16_n128(sum, a, b, add);
    } else {
        tchi_wgmma_bf16_n128_by_columns(sum, a, b, add);
    }
}

/* The product of a warpgroup's rows of a box of A and a box of B, the first of a tile (`add` 0) into sums that hold
 * nothing. A step of 16 along k is 32 bytes of a row, or 16 rows of boxes of columns; addresses in descriptors count
 * 16. */
template <tch_scalar type, bool transposed>
static __device__ __forceinline__ void multiply_boxes(split_sums &sum, const char *a, const char *b, int add)
{
    constexpr int down = transposed ? 2 : 16 * ROW_BYTES >> 4;
    uint64_t left = tchi_wgmma_rows(a);
    uint64_t right = transposed ? tchi_wgmma_rows(b) : tchi_wgmma_columns(b, BOX_BYTES / 2);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        multiply_rows<type, transposed>(sum, left + 2 * k, right + down * k, k > 0 ? 1 : add);
    }
}

/* All products of a step as one group in the background. */
template <tch_scalar type, bool transposed, int low>
static __device__ __forceinline__ void start_step(const split_launch &p, split_memory<low> &m, int stage, int group,
                                                  split_sums &large, split_sums &small, int add)
{
    constexpr int last = split_means<low>::boxes - 1;
    const int mine = group * (BOX_BYTES / WARPGROUPS);
    const char *a[2] = {m.a[stage][0] + mine, m.a[stage][last] + mine};
    const char *b[2] = {m.b[stage][0], m.b[stage][last]};
    tchi_wgmma_fence();
    multiply_boxes<type, transposed>(large, a[0], b[0], add);
    if (low == OF_ONE) {
        bool of_a = (p.low & TCH_LOW_A) != 0;
        multiply_boxes<type, transposed>(small, of_a ? a[1] : a[0], of_a ? b[0] : b[1], add);
    } else if (low == OF_BOTH) {
        multiply_boxes<type, transposed>(small, a[0], b[1], add);
        multiply_boxes<type, transposed>(small, a[1], b[0], 1);
    }
    tchi_wgmma_commit();
}

/* A place is left when the next step's products are already under way, so that the tensor cores do not run dry. The
 * sums are complete in `large` when it returns. */
template <tch_scalar type, bool transposed, int low>
static __device__ __forceinline__ void multiply(const split_launch &p, split_memory<low> &m, int group,
                                                split_sums &large, tchi_ring_place *at)
{
    split_sums small;
    for (int step = 0; step < p.steps; step++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        start_step<type, transposed, low>(p, m, at->stage, group, large, small, step > 0);
        tchi_wgmma_wait<1>();
        if (step > 0) {
            tchi_ring_leave(m.empty + (at->stage + STAGES - 1) % STAGES);
        }
        tchi_ring_step<STAGES>(at);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(large);
    tchi_ring_leave(m.empty + (at->stage + STAGES - 1) % STAGES);
    if (low != OF_NONE) {
        tchi_wgmma_results(small);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            large[i] += small[i];
        }
    }
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* Of 64 rows and 64 columns of a tile a thread has two rows, 8 apart, and pairs of neighbors in each, 8 apart too. */
enum { ROWS = 2, PAIRS = 8, APART = 8 };

/* `left` is how many columns of C there are from here on. */
static __device__ __forceinline__ float2 read_pair(const float *c, int left)
{
    return left > 1 ? *(const float2 *)c : make_float2(left == 1 ? *c : 0.0f, 0.0f);
}

static __device__ __forceinline__ void write_pair(float *c, int left, float2 pair)
{
    if (left > 1) {
        *(float2 *)c = pair;
    } else if (left == 1) {
        *c = pair.x;
    }
}

static __device__ __forceinline__ void write_pair(double *c, int left, float2 pair)
{
    if (left > 1) {
        *(double2 *)c = make_double2((double)pair.x, (double)pair.y);
    } else if (left == 1) {
        *c = (double)pair.x;
    }
}

/* Many pairs are read before one is written: the compiler does not know that they are other places, and would wait for
 * one after the other. */
template <int low, int from, int result>
static __device__ __forceinline__ void write_floats(const split_launch &p, int matrix, int row, int col,
                                                    const split_sums &sum)
{
    constexpr int held = split_means<low>::rows_at_once;
    float2 old[held][PAIRS];
#pragma unroll
    for (int h = 0; h < ROWS; h++) {
        if (h % held == 0) {
#pragma unroll
            for (int k = 0; k < held * PAIRS; k++) {
                int y = row + (h + k / PAIRS) * APART, x = col + k % PAIRS * APART;
                const float *c = (const float *)tchi_cuda_at(p.c, matrix, y, col) + k % PAIRS * APART;
                old[k / PAIRS][k % PAIRS] = read_pair(c, p.beta == 0.0f || y >= p.rows ? 0 : p.cols - x);
            }
        }
        int y = row + h * APART;
        float *c = (float *)tchi_cuda_at(p.c, matrix, y, col);
        double *wide = (double *)tchi_cuda_at(p.wide, matrix, y, col);
#pragma unroll
        for (int k = 0; k < PAIRS; k++) {
            const int at = from + 2 * (ROWS * k + h);
            int left = y < p.rows ? p.cols - col - k * APART : 0;
            float2 now = make_float2(fmaf(p.factor, sum[at], p.beta * old[h % held][k].x),
                                     fmaf(p.factor, sum[at + 1], p.beta * old[h % held][k].y));
            if (result == AS_DOUBLES) {
                write_pair(wide + k * APART, left, now);
            } else {
                write_pair(c + k * APART, left, now);
            }
        }
    }
}

template <int from>
static __device__ __forceinline__ void write_halves(const split_launch &p, int matrix, int row, int col,
                                                    const split_sums &sum)
{
#pragma unroll
    for (int i = 0; i < ROWS * PAIRS; i++) {
        int y = row + i % ROWS * APART, x = col + i / ROWS * APART;
        if (y >= p.rows || x >= p.cols) {
            continue;
        }
        __half *high = (__half *)tchi_cuda_at(p.high_c, matrix, y, x);
        __half *low = (__half *)tchi_cuda_at(p.low_c, matrix, y, x);
        float a = p.factor * sum[from + 2 * i] * p.scale;
        float b = p.factor * sum[from + 2 * i + 1] * p.scale;
        __half2 top = __floats2half2_rn(a, b);
        __half2 rest = __floats2half2_rn(tchi_cuda_left_by(__low2half(top), a), tchi_cuda_left_by(__high2half(top), b));
        if (x + 1 < p.cols) {
            *(__half2 *)high = top;
            *(__half2 *)low = rest;
        } else {
            *high = __low2half(top);
            *low = __low2half(rest);
        }
    }
}

/* Doubles that are not negative are ordered as their bits are, NaN above all others. */
static __device__ __forceinline__ void raise_largest(const split_launch &p, int matrix, const split_sums &sum)
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) {
        most = max(most, __float_as_uint(fabsf(p.factor * sum[i])));
    }
    most = tchi_cuda_warp_max(most);
    if (threadIdx.x % 32 == 0) {
        double value = (double)__uint_as_float(most);
        atomicMax((unsigned long long *)p.largest + matrix, (unsigned long long)__double_as_longlong(value));
    }
}

/* Four lanes have 8 neighbors of a row. */
template <int low, int result>
static __device__ __forceinline__ void write_rows(const split_launch &p, const split_tile &t, int group,
                                                  const split_sums &sum)
{
    constexpr int half = 2 * ROWS * PAIRS;
    const int lane = (int)threadIdx.x % 32;
    const int row = t.row + group * (TILE / WARPGROUPS) + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int col = t.col + lane % 4 * 2;
    if (result == AS_HALVES) {
        write_halves<0>(p, t.matrix, row, col, sum);
        write_halves<half>(p, t.matrix, row, col + TILE / 2, sum);
    } else {
        write_floats<low, 0, result>(p, t.matrix, row, col, sum);
        write_floats<low, half, result>(p, t.matrix, row, col + TILE / 2, sum);
    }
}

/* Tiles whose product counts as zero. */
template <int low, int result> static __device__ __forceinline__ void write_zeros(const split_launch &p, int group)
{
    const split_sums zeros = {};
    bool changes = result != AS_FLOATS || p.beta != 1.0f;
    for (int own = 0; p.negligible.of != NULL && changes && tchi_pair_item(own) < p.items; own++) {
        split_tile t = tile_of(p, tchi_pair_item(own), tchi_cluster_rank());
        if (holds(p.negligible, t.matrix) && !is_elsewhere<low>(p, t.matrix)) {
            write_rows<low, result>(p, t, group, zeros);
        }
    }
}

/* What the epilogue will read of C, on its way to the L2 cache while the tile is multiplied: of each row the 512 bytes
 * of the tile, four lines. */
static __device__ __forceinline__ void prefetch_tile(const split_launch &p, const split_tile &t)
{
    int row = t.row + (int)threadIdx.x % TILE;
    int first = t.col + (int)threadIdx.x / TILE * (TILE / WARPGROUPS);
#pragma unroll
    for (int col = first; col < first + TILE / WARPGROUPS; col += 32) {
        if (p.beta != 0.0f && row < p.rows && col < p.cols) {
            tchi_prefetch(tchi_cuda_at(p.c, t.matrix, row, col));
        }
    }
}

template <int low> static __device__ __forceinline__ void create_barriers(split_memory<low> &m)
{
    for (int i = 0; i < STAGES; i++) {
        tchi_barrier_create(m.full + i, 1);
        tchi_barrier_create(m.empty + i, 4 * WARPGROUPS * CLUSTER);
    }
    tchi_barrier_publish();
}

#endif

/* --- the kernel -------------------------------------------------------------------------------------------------- */

/* For 12 matrices of n = 3072, all low parts: 2.09 TFLOP, 3.0 ms at 700 TFLOP/s; to and from memory 4 bytes an element
 * of A, of B and of C, 1.4 GB, 0.32 ms at 4.2 TB/s. Of the 64 KiB that a multiprocessor multiplies at a step 16 come
 * from its neighbor.
 *
 * Copies land in the other block of a cluster too, so nobody begins before its barriers are there, and nobody exits
 * while the other block still arrives at them. */
template <tch_scalar type, bool transposed, int low, int result>
static __global__ void __launch_bounds__(split_means<low>::threads, split_means<low>::resident)
    split_product(const __grid_constant__ split_launch p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    split_memory<low> &m = *(split_memory<low> *)shared;
    if (threadIdx.x == 0) {
        create_barriers(m);
    }
    __syncwarp();
    tchi_cluster_sync();
    if (threadIdx.x >= MULTIPLIERS) {
        if (low != OF_NONE) {
            tchi_registers_give<LOAD_REGISTERS>();
        }
        if (threadIdx.x == MULTIPLIERS) {
            load_all<transposed, low>(p, m);
        }
        __syncwarp();
        tchi_cluster_sync();
    } else {
        if (low != OF_NONE) {
            tchi_registers_take<MULTIPLY_REGISTERS>();
        }
        int group = tchi_warpgroup();
        int rank = tchi_cluster_rank();
        tchi_ring_place at = {0, 0};
        write_zeros<low, result>(p, group);
        for (int own = next_own<low>(p, 0); tchi_pair_item(own) < p.items; own = next_own<low>(p, own + 1)) {
            split_tile t = tile_of(p, tchi_pair_item(own), rank);
            split_sums sum;
            if (result != AS_HALVES) {
                prefetch_tile(p, t);
            }
            multiply<type, transposed, low>(p, m, group, sum, &at);
            if (result == AS_HALVES && p.largest != NULL) {
                raise_largest(p, t.matrix, sum);
            }
            write_rows<low, result>(p, t, group, sum);
        }
        tchi_cluster_sync();
    }
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

/* With fewer pairs of tiles than a third of the multiprocessors' pairs cuBLAS, which cuts products finer. SOAP with a
 * period of 10, which has two or three factors of 3072 at a time, takes as long with all of them and with fewer. */
#define LEAST_SHARE 3

static int pairs_lie_at(const tch_matrices *m, int64_t bytes)
{
    return (uintptr_t)m->data % (uintptr_t)bytes == 0 && m->ld % 2 == 0 && (m->batch == 1 || m->stride % 2 == 0);
}

static int64_t depth_of(const tch_split_problem *p)
{
    return p->a->high.cols;
}

static int64_t items_of(const tch_matrices *c)
{
    return tchi_cuda_ceil_div(c->rows, TILE * CLUSTER) * tchi_cuda_ceil_div(c->cols, TILE) * c->batch;
}

static int takes_operand(const tch_split_matrices *x)
{
    return x->high.type == x->low.type && tchi_cuda_tensor_map_takes(&x->high) && tchi_cuda_tensor_map_takes(&x->low);
}

static int takes(const tchi_cuda_state *state, const tch_split_problem *p)
{
    const int64_t most = (int64_t)1 << 20;
    int64_t items = items_of(p->c);
    int countable = p->c->rows < most && p->c->cols < most && depth_of(p) > 0 && depth_of(p) < most &&
                    items >= state->device.processors / CLUSTER / LEAST_SHARE && items < (1 << 30);
    int aligned = p->split_c == NULL ? pairs_lie_at(p->c, 8)
                                     : pairs_lie_at(&p->split_c->high, 4) && pairs_lie_at(&p->split_c->low, 4);
    aligned = aligned && (p->wide == NULL || pairs_lie_at(p->wide, 16));
    tch_scalar type = p->a->high.type;
    int typed = p->b->high.type == type &&
                (type == TCH_SCALAR_F16 || (type == TCH_SCALAR_BF16 && p->split_c == NULL && p->wide == NULL));
    return state->device.major == 9 && countable && aligned && typed && takes_operand(p->a) && takes_operand(p->b);
}

static tch_status describe(const tch_split_matrices *x, int box_rows, CUtensorMap (&maps)[2])
{
    TCHI_CUDA_PASS(tchi_cuda_tensor_map(&x->high, box_rows, &maps[0]));
    return tchi_cuda_tensor_map(&x->low, box_rows, &maps[1]);
}

typedef void (*split_kernel)(split_launch);

template <tch_scalar type, int result, int low> static split_kernel kernel_of(int transposed)
{
    return transposed ? split_product<type, true, low, result> : split_product<type, false, low, result>;
}

template <tch_scalar type, int result> static split_kernel kernel_to(int transposed, tch_low low)
{
    return low == TCH_LOW_NONE   ? kernel_of<type, result, OF_NONE>(transposed)
           : low == TCH_LOW_BOTH ? kernel_of<type, result, OF_BOTH>(transposed)
                                 : kernel_of<type, result, OF_ONE>(transposed);
}

static split_kernel kernel_for(const tch_split_problem *p, tch_low low)
{
    if (p->a->high.type == TCH_SCALAR_BF16) {
        return kernel_to<TCH_SCALAR_BF16, AS_FLOATS>(p->transpose_b, low);
    }
    return p->split_c != NULL ? kernel_to<TCH_SCALAR_F16, AS_HALVES>(p->transpose_b, low)
           : p->wide != NULL  ? kernel_to<TCH_SCALAR_F16, AS_DOUBLES>(p->transpose_b, low)
                              : kernel_to<TCH_SCALAR_F16, AS_FLOATS>(p->transpose_b, low);
}

template <int low> static tch_status launch_as(tchi_cuda_state *state, split_kernel kernel, const split_launch &p)
{
    return tchi_cuda_launch_pairs(state, "split_product", kernel, p, p.items, split_means<low>::threads,
                                  sizeof(split_memory<low>), split_means<low>::resident);
}

static tch_status launch(tchi_cuda_state *state, const tch_split_problem *problem, tch_low low)
{
    split_launch p = {};
    const tch_matrices *c = problem->c;
    p.rows = (int32_t)c->rows;
    p.cols = (int32_t)c->cols;
    p.pairs = (int32_t)tchi_cuda_ceil_div(c->rows, TILE * CLUSTER);
    p.across = (int32_t)tchi_cuda_ceil_div(c->cols, TILE);
    p.items = (int32_t)items_of(c);
    p.low = low;
    p.steps = (int32_t)tchi_cuda_ceil_div(depth_of(problem), DEPTH);
    if (problem->low != TCH_LOW_NONE) {
        p.high_alone = problem->high_alone;
    }
    p.negligible = problem->negligible;
    p.largest = problem->largest;
    p.factor = (float)(problem->alpha / (problem->a->scale * problem->b->scale));
    p.beta = (float)problem->beta;
    TCHI_CUDA_PASS(describe(problem->a, TILE, p.a));
    TCHI_CUDA_PASS(describe(problem->b, problem->transpose_b ? TILE / CLUSTER : DEPTH, p.b));
    if (problem->split_c != NULL) {
        p.scale = (float)problem->split_c->scale;
        p.high_c = tchi_cuda_operand_of(&problem->split_c->high);
        p.low_c = tchi_cuda_operand_of(&problem->split_c->low);
    } else {
        p.c = tchi_cuda_operand_of(c);
    }
    if (problem->wide != NULL) {
        p.wide = tchi_cuda_operand_of(problem->wide);
    }
    return low == TCH_LOW_NONE ? launch_as<OF_NONE>(state, kernel_for(problem, low), p)
                               : launch_as<OF_BOTH>(state, kernel_for(problem, low), p);
}

tch_status tchi_cuda_split_product(void *state, const tch_split_problem *problem, int32_t *taken)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    *taken = takes(s, problem);
    if (*taken && problem->low != TCH_LOW_NONE && problem->high_alone.of != NULL) {
        TCHI_CUDA_PASS(launch(s, problem, TCH_LOW_NONE));
    }
    return *taken ? launch(s, problem, problem->low) : TCH_OK;
}

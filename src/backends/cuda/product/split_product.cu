/* Products of matrices split into two of float16 or bfloat16, for sm_90: C = alpha (high high + low high + high low) +
 * beta C in one pass, in float32 or split again. A persistent GEMM (persistent_gemm.cuh): k-tiles of both parts of A
 * and B, loaded once, serve three products, and each warpgroup multiplies 64 rows of a tile. The two CTAs of a cluster
 * have vertically adjacent tiles and share B.
 *
 *     for (each tile of 128 by 128 of C) {
 *         for (k = 0; k < depth; k += 64) {
 *             small += A.high[rows][k ..] B.low[k ..][cols] + A.low[rows][k ..] B.high[k ..][cols];
 *             large += A.high[rows][k ..] B.high[k ..][cols];
 *         }
 *         C[rows][cols] = factor (large + small) + beta C[rows][cols];   // or scale times that, split
 *     }
 *
 * Only high parts are multiplied, or nothing, if a per-matrix number on the device permits. Small products have
 * separate sums: tensor cores truncate, so adding them to a large sum would lose them. Design choices:
 * bench/logs/cuda_basis.md. */
#include <cuda_fp16.h>

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/persistent_gemm.cuh"

#define TILE TCHI_GEMM_BOX /* rows and columns of C, of which a warpgroup has half of the rows */
#define STAGES 3
#define CLUSTER 2

typedef struct split_launch {
    int32_t rows, cols;
    int32_t pairs, across; /* tiles of one matrix: two by two down, and across */
    int32_t items;         /* one is a tile for each CTA of a cluster */
    int32_t ktiles;
    int32_t low; /* low parts included */
    float factor, beta, scale;
    tch_condition high_alone, negligible;
    double *largest;                 /* NULL or one per matrix */
    CUtensorMap a[2], b[2];          /* high and low parts */
    tchi_cuda_operand c;             /* of float32, */
    tchi_cuda_operand wide;          /* of float64, which replaces it if given, */
    tchi_cuda_operand high_c, low_c; /* or split */
} split_launch;

/* The number of operands whose low parts are included. */
enum { OF_NONE, OF_ONE, OF_BOTH };

/* The form of the result. */
enum { AS_FLOATS, AS_DOUBLES, AS_FP16 };

/* --- tiles -------------------------------------------------------------------------------------------------------- */

typedef struct split_tile {
    int matrix, row, col;
} split_tile;

static __device__ __forceinline__ bool holds(const tch_condition &c, int matrix)
{
    return c.of != NULL && c.of[matrix] <= c.most;
}

/* Matrices that need only high parts have a separate launch: with both loops in one kernel the sums would share
 * registers, and the compiler would serialize the products. */
template <int low> static __device__ __forceinline__ bool is_elsewhere(const split_launch &p, int matrix)
{
    return p.high_alone.of != NULL && holds(p.high_alone, matrix) != (low == OF_NONE);
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* Of a warpgroup's 64 rows of a tile. */
typedef float split_sums[64];

/* Of 64 rows and 64 columns of a tile a thread has two rows, 8 apart, and pairs of neighbors in each, 8 apart too. */
enum { ROWS = 2, PAIRS = 8, APART = 8 };

/* `left` is the number of remaining columns of C. */
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

/* Reads many pairs before writing one: the compiler cannot rule out aliasing. */
template <int low, int from, int result>
static __device__ __forceinline__ void write_floats(const split_launch &p, int matrix, int row, int col,
                                                    const split_sums &sum)
{
    constexpr int held = low == OF_NONE ? 1 : 2; /* rows of C loaded ahead per thread */
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
static __device__ __forceinline__ void write_fp16(const split_launch &p, int matrix, int row, int col,
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

/* Nonnegative doubles compare like their bits; NaN propagates. */
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
    const int row = t.row + group * (TILE / TCHI_GEMM_WARPGROUPS) + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const int col = t.col + lane % 4 * 2;
    if (result == AS_FP16) {
        write_fp16<0>(p, t.matrix, row, col, sum);
        write_fp16<half>(p, t.matrix, row, col + TILE / 2, sum);
    } else {
        write_floats<low, 0, result>(p, t.matrix, row, col, sum);
        write_floats<low, half, result>(p, t.matrix, row, col + TILE / 2, sum);
    }
}

/* Prefetches the epilogue's part of C into L2: of each row 512 bytes, four lines. */
static __device__ __forceinline__ void prefetch_tile(const split_launch &p, const split_tile &t)
{
    int row = t.row + (int)threadIdx.x % TILE;
    int first = t.col + (int)threadIdx.x / TILE * (TILE / TCHI_GEMM_WARPGROUPS);
#pragma unroll
    for (int col = first; col < first + TILE / TCHI_GEMM_WARPGROUPS; col += 32) {
        if (p.beta != 0.0f && row < p.rows && col < p.cols) {
            tchi_prefetch(tchi_cuda_at(p.c, t.matrix, row, col));
        }
    }
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

/* Without low parts sums and stages are half the size, so that two CTAs fit on a multiprocessor: one multiplies while
 * the other writes. */
template <tch_scalar type, bool transposed, int low, int result>
struct split_gemm : tchi_gemm<STAGES, CLUSTER, false, low != OF_NONE> {
    static constexpr int boxes = low == OF_NONE ? 1 : 2;
    static constexpr int resident = low == OF_NONE ? 2 : 1;
    using problem = split_launch;
    struct memory {
        char a[STAGES][boxes][TCHI_GEMM_BOX_BYTES];
        char b[STAGES][boxes][TCHI_GEMM_BOX_BYTES];
        tchi_ring<STAGES> ring;
    };

    /* Tiles of a matrix in sequence, so that it stays in L2 while it is needed. */
    static __device__ __forceinline__ split_tile tile_of(const split_launch &p, int item, int rank)
    {
        int each = p.pairs * p.across;
        int left = item % each;
        return {item / each, (left % p.pairs * CLUSTER + rank) * TILE, left / p.pairs * TILE};
    }

    /* The pair's next item to multiply, its i-th or a later one. */
    static __device__ __forceinline__ int next(const split_launch &p, int i)
    {
        for (; tchi_gemm_item<split_gemm>(i) < p.items; i++) {
            int matrix = tile_of(p, tchi_gemm_item<split_gemm>(i), 0).matrix;
            if (!is_elsewhere<low>(p, matrix) && !holds(p.negligible, matrix)) {
                break;
            }
        }
        return i;
    }

    /* The high parts of a k-tile and the included low parts. */
    static __device__ __forceinline__ void load(const split_launch &p, memory &m, int stage, const split_tile &t,
                                                int rank, int ktile)
    {
        constexpr bool columns = !transposed;
        const int k = ktile * TCHI_GEMM_DEPTH;
        uint64_t *full = m.ring.full + stage;
        tchi_barrier_arrive_expecting(full, (2 + low) * TCHI_GEMM_BOX_BYTES);
        tchi_gemm_load_a<false>(m.a[stage][0], &p.a[0], k, t.row, t.matrix, full);
        tchi_gemm_load_b<columns>(m.b[stage][0], &p.b[0], k, t.col, t.matrix, full, rank, true);
        if (low == OF_BOTH || (low == OF_ONE && (p.low & TCH_LOW_A) != 0)) {
            tchi_gemm_load_a<false>(m.a[stage][boxes - 1], &p.a[1], k, t.row, t.matrix, full);
        }
        if (low == OF_BOTH || (low == OF_ONE && (p.low & TCH_LOW_B) != 0)) {
            tchi_gemm_load_b<columns>(m.b[stage][boxes - 1], &p.b[1], k, t.col, t.matrix, full, rank, true);
        }
    }

    /* sum[0] gets the products of high parts, sum[1] those with low ones. */
    static __device__ __forceinline__ void start(const split_launch &p, memory &m, int stage, int group,
                                                 float (&sum)[boxes][64], tchi_no_fragment &, int add)
    {
        const int mine = group * (TCHI_GEMM_BOX_BYTES / TCHI_GEMM_WARPGROUPS);
        const char *a[2] = {m.a[stage][0] + mine, m.a[stage][boxes - 1] + mine};
        const char *b[2] = {m.b[stage][0], m.b[stage][boxes - 1]};
        tchi_wgmma_fence();
        tchi_gemm_boxes<type, false, !transposed, 1>(sum, a[0], b[0], add);
        if (low == OF_ONE) {
            bool of_a = (p.low & TCH_LOW_A) != 0;
            tchi_gemm_boxes<type, false, !transposed, 1>(sum + 1, of_a ? a[1] : a[0], of_a ? b[0] : b[1], add);
        } else if (low == OF_BOTH) {
            tchi_gemm_boxes<type, false, !transposed, 1>(sum + 1, a[0], b[1], add);
            tchi_gemm_boxes<type, false, !transposed, 1>(sum + 1, a[1], b[0], 1);
        }
    }

    /* Tiles whose product is zero. */
    static __device__ __forceinline__ void begin(const split_launch &p, int group)
    {
        const split_sums zeros = {};
        bool changes = result != AS_FLOATS || p.beta != 1.0f;
        for (int i = 0; p.negligible.of != NULL && changes && tchi_gemm_item<split_gemm>(i) < p.items; i++) {
            split_tile t = tile_of(p, tchi_gemm_item<split_gemm>(i), tchi_cluster_rank());
            if (holds(p.negligible, t.matrix) && !is_elsewhere<low>(p, t.matrix)) {
                write_rows<low, result>(p, t, group, zeros);
            }
        }
    }

    static __device__ __forceinline__ void compute(const split_launch &p, memory &m, const split_tile &t, int group,
                                                   int, tchi_ring_place *at)
    {
        float sum[boxes][64];
        if (result != AS_FP16) {
            prefetch_tile(p, t);
        }
        int last = tchi_gemm_multiply<split_gemm>(p, m, group, sum, p.ktiles, at);
        tchi_gemm_finish<split_gemm>(m, sum, last);
#pragma unroll
        for (int i = 0; low != OF_NONE && i < 64; i++) {
            sum[0][i] += sum[boxes - 1][i];
        }
        if (result == AS_FP16 && p.largest != NULL) {
            raise_largest(p, t.matrix, sum[0]);
        }
        write_rows<low, result>(p, t, group, sum[0]);
    }
};

/* For 12 matrices of n = 3072, all low parts: 2.09 TFLOP, 3.0 ms at 700 TFLOP/s; to and from memory 4 bytes per element
 * of A, of B and of C, 1.4 GB, 0.32 ms at 4.2 TB/s. Of the 64 KiB that a multiprocessor multiplies at a step 16 come
 * from its neighbor. */
template <class gemm>
static __global__ void __launch_bounds__(gemm::threads, gemm::resident)
    split_product(const __grid_constant__ split_launch p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gemm>(p);
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

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

static int is_supported(const tch_split_matrices *x)
{
    return x->high.type == x->low.type && tchi_cuda_tensor_map_supported(&x->high, 2) &&
           tchi_cuda_tensor_map_supported(&x->low, 2);
}

static int supported(const tchi_cuda_state *state, const tch_split_problem *p)
{
    const int64_t most = (int64_t)1 << 20;
    int64_t items = items_of(p->c);
    int countable =
        p->c->rows < most && p->c->cols < most && depth_of(p) > 0 && depth_of(p) < most && items < (1 << 30);
    int aligned = p->split_c == NULL ? pairs_lie_at(p->c, 8)
                                     : pairs_lie_at(&p->split_c->high, 4) && pairs_lie_at(&p->split_c->low, 4);
    aligned = aligned && (p->wide == NULL || pairs_lie_at(p->wide, 16));
    tch_scalar type = p->a->high.type;
    int typed = p->b->high.type == type &&
                (type == TCH_SCALAR_F16 || (type == TCH_SCALAR_BF16 && p->split_c == NULL && p->wide == NULL));
    return tchi_cuda_kernel_fits(state, TCHI_SPLIT_PRODUCT, &p->a->high, p->c) && countable && aligned && typed &&
           is_supported(p->a) && is_supported(p->b);
}

static tch_status describe(const tch_split_matrices *x, int box_rows, CUtensorMap (&maps)[2])
{
    TCHI_TRY(tchi_cuda_tensor_map(&x->high, box_rows, &maps[0]));
    return tchi_cuda_tensor_map(&x->low, box_rows, &maps[1]);
}

template <tch_scalar type, int result, int low>
static tch_status launch_split_as(tchi_cuda_state *state, int transposed, const split_launch &p)
{
    using by_rows = split_gemm<type, true, low, result>;
    using by_columns = split_gemm<type, false, low, result>;
    return transposed ? tchi_gemm_launch<by_rows>(state, "split_product", split_product<by_rows>, p)
                      : tchi_gemm_launch<by_columns>(state, "split_product", split_product<by_columns>, p);
}

template <tch_scalar type, int result>
static tch_status launch_to(tchi_cuda_state *state, int transposed, const split_launch &p)
{
    return p.low == TCH_LOW_NONE   ? launch_split_as<type, result, OF_NONE>(state, transposed, p)
           : p.low == TCH_LOW_BOTH ? launch_split_as<type, result, OF_BOTH>(state, transposed, p)
                                   : launch_split_as<type, result, OF_ONE>(state, transposed, p);
}

static tch_status launch_split(tchi_cuda_state *state, const tch_split_problem *problem, tch_low low)
{
    split_launch p = {};
    const tch_matrices *c = problem->c;
    p.rows = (int32_t)c->rows;
    p.cols = (int32_t)c->cols;
    p.pairs = (int32_t)tchi_cuda_ceil_div(c->rows, TILE * CLUSTER);
    p.across = (int32_t)tchi_cuda_ceil_div(c->cols, TILE);
    p.items = (int32_t)items_of(c);
    p.low = low;
    p.ktiles = (int32_t)tchi_cuda_ceil_div(depth_of(problem), TCHI_GEMM_DEPTH);
    if (problem->low != TCH_LOW_NONE) {
        p.high_alone = problem->high_alone;
    }
    p.negligible = problem->negligible;
    p.largest = problem->largest;
    p.factor = (float)(problem->alpha / (problem->a->scale * problem->b->scale));
    p.beta = (float)problem->beta;
    TCHI_TRY(describe(problem->a, TILE, p.a));
    TCHI_TRY(describe(problem->b, problem->transpose_b ? TILE / CLUSTER : TCHI_GEMM_DEPTH, p.b));
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
    const int transposed = problem->transpose_b;
    if (problem->a->high.type == TCH_SCALAR_BF16) {
        return launch_to<TCH_SCALAR_BF16, AS_FLOATS>(state, transposed, p);
    }
    return problem->split_c != NULL ? launch_to<TCH_SCALAR_F16, AS_FP16>(state, transposed, p)
           : problem->wide != NULL  ? launch_to<TCH_SCALAR_F16, AS_DOUBLES>(state, transposed, p)
                                    : launch_to<TCH_SCALAR_F16, AS_FLOATS>(state, transposed, p);
}

tch_status tchi_cuda_split_product(void *state, const tch_split_problem *problem, int32_t *handled)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    *handled = supported(s, problem);
    if (*handled && problem->low != TCH_LOW_NONE && problem->high_alone.of != NULL) {
        TCHI_TRY(launch_split(s, problem, TCH_LOW_NONE));
    }
    return *handled ? launch_split(s, problem, problem->low) : TCH_OK;
}

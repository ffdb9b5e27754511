/* Symmetric products of bfloat16, float16 and split bfloat16 for sm_90: C = scale (c0 I + c1 D + c2 A B') over the
 * lower tiles of C, mirrored, with an optional scale per matrix; and curvature factors, C = alpha A A' + beta C in
 * float32, from fp16 copies. A persistent GEMM (persistent_gemm.cuh) in ping-pong: one warpgroup is in its epilogue
 * while the other multiplies. The two CTAs of a cluster have vertically adjacent tiles and share B.
 *
 * Design choices: bench/logs/cuda_orthogonalize.md, and for split operands cuda_symmetric_bf16x2.md. */
#include "symmetric_factor.cuh"
#include "symmetric_pingpong.cuh"

/* --- the result -------------------------------------------------------------------------------------------------- */

/* A thread's part of a tile of D, square by square. */
typedef uint32_t pingpong_addends[4][16];

static __device__ __forceinline__ void read_d(pingpong_addends &d, char (&stage)[2][1][TCHI_GEMM_BOX_BYTES])
{
#pragma unroll
    for (int number = 0; number < 4; number++) {
        tchi_square_read(d[number], stage[number % 2][0] + number / 2 * TCHI_SQUARE_BYTES);
    }
}

/* The coefficients of one matrix, its scale in them. */
typedef struct pingpong_weights {
    float c0, c1, c2;
} pingpong_weights;

static __device__ __forceinline__ pingpong_weights weights_of(const pingpong_problem &p, int matrix)
{
    float one = p.scale != NULL && p.exponent > 0 ? (float)p.scale[matrix] : 1.0f;
    float scale = p.exponent > 1 ? one * one : one;
    return {p.c0 * scale, p.c1 * scale, p.c2 * scale};
}

/* From sums to results: c2 times those of the square that begin at `from`, and c1 D. */
template <int from, bool has_d, tch_scalar type>
static __device__ __forceinline__ void finish(const pingpong_weights &w, float (&sum)[64], const uint32_t (&d)[16])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] *= w.c2;
        if (has_d) {
            sum[from + i] += w.c1 * tchi_square_number<type>(d[i / 2], i % 2);
        }
    }
}

/* The same for a square at (row, col) of a split D, whose planes fit neither registers nor shared memory. */
template <int from>
static __device__ __forceinline__ void finish_split(const pingpong_problem &p, const pingpong_weights &w, int matrix,
                                                    int row, int col, float (&sum)[64])
{
    int lane = (int)threadIdx.x % 32;
    int x = col + lane % 4 * 2;
    int y = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const char *high = tchi_cuda_at(p.split_d, matrix, y, x);
    const char *low = high + p.split_d.stride * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int64_t at = (i % 2 * 8 * p.split_d.ld + i / 2 * 8) * 2;
        bool inside = y + i % 2 * 8 < p.n && x + i / 2 * 8 < p.n;
        uint32_t h = inside ? *(const uint32_t *)(high + at) : 0;
        uint32_t l = inside ? *(const uint32_t *)(low + at) : 0;
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float d = tchi_square_number<TCH_SCALAR_BF16>(h, e) + tchi_square_number<TCH_SCALAR_BF16>(l, e);
            sum[from + 2 * i + e] = w.c2 * sum[from + 2 * i + e] + w.c1 * d;
        }
    }
}

/* Residuals of a square after rounding to bfloat16. */
template <int from> static __device__ __forceinline__ void keep_low_parts(float (&sum)[64])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] -= __bfloat162float(__float2bfloat16_rn(sum[from + i]));
    }
}

/* Writes a plane of one square of C and its mirror image. One elected thread of the warpgroup issues the TMA stores and
 * waits until they have read the previous data. */
template <int from, tch_scalar type>
static __device__ __forceinline__ void write_plane(const pingpong_problem &p, int z, int row, int col,
                                                   const float (&sum)[64], char (&place)[2][TCHI_SQUARE_BYTES])
{
    bool elected = threadIdx.x % 128 == 0;
    int barrier = 1 + tchi_warpgroup();
    if (elected) {
        tchi_tma_wait_read();
    }
    tchi_warpgroup_sync(barrier);
    tchi_square_write<from, type>(place[0], place[1], sum);
    if (row == col) {
        tchi_warpgroup_sync(barrier);
        tchi_square_symmetrize(place[0], place[1]);
    }
    tchi_tma_publish();
    tchi_warpgroup_sync(barrier);
    if (elected) {
        tchi_tma_store(&p.c, col, row, z, place[0]);
        if (row != col) {
            tchi_tma_store(&p.c, row, col, z, place[1]);
        }
        tchi_tma_commit();
    }
}

/* A square of float64 and its mirror image, from registers: four lanes have 64 bytes of a row, and eight those of a
 * column. On the diagonal, elements below it are written twice. */
template <int from>
static __device__ __forceinline__ void write_doubles(const pingpong_problem &p, int matrix, int row, int col,
                                                     const float (&sum)[64])
{
    int lane = (int)threadIdx.x % 32;
    double *c = (double *)p.wide_c.data + matrix * p.wide_c.stride;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        int y = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4 + i % 2 * 8;
        int x = col + lane % 4 * 2 + i / 2 * 8;
        double2 two = make_double2(sum[from + 2 * i], sum[from + 2 * i + 1]);
        if (y >= p.n || x > y) {
            continue;
        }
        c[x * p.wide_c.ld + y] = two.x;
        if (x + 1 <= y) {
            *(double2 *)(c + y * p.wide_c.ld + x) = two;
            c[(x + 1) * p.wide_c.ld + y] = two.y;
        } else {
            c[y * p.wide_c.ld + x] = two.x;
        }
    }
}

template <int from, bool has_d, tch_scalar in, tch_scalar out>
static __device__ __forceinline__ void write_square(const pingpong_problem &p, const pingpong_weights &w, int matrix,
                                                    int row, int col, float (&sum)[64], const uint32_t (&d)[16],
                                                    char (&place)[2][TCHI_SQUARE_BYTES])
{
    if (has_d && in == TCH_SCALAR_BF16X2) {
        finish_split<from>(p, w, matrix, row, col, sum);
    } else {
        finish<from, has_d, in>(w, sum, d);
    }
    if (row == col) {
        tchi_square_add_identity<from>(sum, w.c0);
    }
    if constexpr (out == TCH_SCALAR_F64) {
        write_doubles<from>(p, matrix, row, col, sum);
    } else if constexpr (out == TCH_SCALAR_BF16X2) {
        write_plane<from, TCH_SCALAR_BF16>(p, 2 * matrix, row, col, sum, place);
        keep_low_parts<from>(sum);
        write_plane<from, TCH_SCALAR_BF16>(p, 2 * matrix + 1, row, col, sum, place);
    } else {
        write_plane<from, out>(p, matrix, row, col, sum, place);
    }
}

/* The four squares of a tile, except those above the diagonal, which are mirror images, and those outside. */
template <bool has_d, tch_scalar in, tch_scalar out>
static __device__ __forceinline__ void write_tile(const pingpong_problem &p, const pingpong_tile &t, pingpong_sums &sum,
                                                  const pingpong_addends &d, char (&place)[2][TCHI_SQUARE_BYTES])
{
    pingpong_weights w = weights_of(p, t.matrix);
#pragma unroll
    for (int number = 0; number < 4; number++) {
        int row = t.row + TCHI_SQUARE * (number / 2);
        int col = t.col + TCHI_SQUARE * (number % 2);
        if (t.nothing || col > row || row >= p.n) {
            continue;
        }
        if (number % 2 == 0) {
            write_square<0, has_d, in, out>(p, w, t.matrix, row, col, sum[number / 2], d[number], place);
        } else {
            write_square<32, has_d, in, out>(p, w, t.matrix, row, col, sum[number / 2], d[number], place);
        }
    }
}

/* --- the kernel -------------------------------------------------------------------------------------------------- */

template <bool has_d_, tch_scalar in_, tch_scalar out_, bool columns_ = false>
struct pingpong_gemm : tchi_gemm<STAGES / planes_of(in_), CLUSTER, true> {
    static constexpr tch_scalar in = in_, out = out_;
    static constexpr bool has_d = has_d_, columns = columns_; /* A and B are transposed */
    static constexpr int planes = planes_of(in);
    static constexpr int stages = STAGES / planes;
    static constexpr bool staged_d = has_d && planes == 1; /* D follows the k-tiles of a tile through the ring */
    static constexpr bool stores_by_tma = true;
    using problem = pingpong_problem;
    struct memory {
        char stage[stages][2][planes][TCHI_GEMM_BOX_BYTES]; /* A and B; or the left and the right half of a tile of D */
        char result[TCHI_GEMM_WARPGROUPS][2][TCHI_SQUARE_BYTES]; /* a square and its mirror image */
        tchi_ring<stages> ring;
    };

    static __device__ __forceinline__ pingpong_tile tile_of(const pingpong_problem &p, int item, int rank)
    {
        return pingpong_tile_of(p, item, rank);
    }

    static __device__ __forceinline__ int ktiles(const pingpong_problem &p)
    {
        return p.ktiles + staged_d;
    }

    static __device__ __forceinline__ void load(const pingpong_problem &p, memory &m, int stage, const pingpong_tile &t,
                                                int rank, int ktile)
    {
        uint64_t *full = m.ring.full + stage;
        tchi_barrier_arrive_expecting(full, 2 * planes * TCHI_GEMM_BOX_BYTES);
        if (staged_d && ktile == p.ktiles) {
            tchi_tma_load(m.stage[stage][0][0], &p.d, t.col, t.row, t.matrix, full);
            tchi_tma_load(m.stage[stage][1][0], &p.d, t.col + TCHI_GEMM_DEPTH, t.row, t.matrix, full);
            return;
        }
#pragma unroll
        for (int plane = 0; plane < planes; plane++) {
            int k = ktile * TCHI_GEMM_DEPTH, z = t.matrix * planes + plane;
            tchi_gemm_load_a<columns>(m.stage[stage][0][plane], &p.a, k, t.row, z, full);
            tchi_gemm_load_b<columns>(m.stage[stage][1][plane], &p.b, k, t.col, z, full, rank, t.shares_b);
        }
    }

    /* Split operands skip the product of the low parts. */
    static __device__ __forceinline__ void start(const pingpong_problem &, memory &m, int stage, int,
                                                 pingpong_sums &sum, tchi_no_fragment &, int add)
    {
        constexpr tch_scalar type = in == TCH_SCALAR_F16 ? TCH_SCALAR_F16 : TCH_SCALAR_BF16;
        const auto &a = m.stage[stage][0], &b = m.stage[stage][1];
        tchi_wgmma_fence();
        tchi_gemm_boxes<type, columns, columns, 2>(sum, a[0], b[0], add);
        if constexpr (planes == 2) {
            tchi_gemm_boxes<type, columns, columns, 2>(sum, a[0], b[1], 1);
            tchi_gemm_boxes<type, columns, columns, 2>(sum, a[1], b[0], 1);
        }
    }

    /* One tile: products when this warpgroup is active, the epilogue while the other multiplies. */
    static __device__ __forceinline__ void compute(const pingpong_problem &p, memory &m, const pingpong_tile &t,
                                                   int group, int i, tchi_ring_place *at)
    {
        pingpong_sums sum;
        pingpong_addends d;
        if constexpr (out == TCH_SCALAR_F32) {
            prefetch_factor_tile(p, t);
        }
        tchi_turn_await(m.ring.turn, group, i);
        int last = tchi_gemm_multiply<pingpong_gemm>(p, m, group, sum, p.ktiles, at);
        if constexpr (staged_d) {
            tchi_barrier_wait(m.ring.full + at->stage, at->parity);
            tchi_turn_pass(m.ring.turn, group);
            read_d(d, m.stage[at->stage]);
            tchi_tma_publish(); /* reads must also complete before TMA may write there again */
            __syncwarp();
            tchi_ring_leave<CLUSTER>(m.ring.empty + at->stage);
        } else {
            tchi_turn_pass(m.ring.turn, group);
        }
        tchi_gemm_finish<pingpong_gemm>(m, sum, last);
        if constexpr (out == TCH_SCALAR_F32) {
            write_factor_tile(p, t, sum);
        } else {
            write_tile<has_d, in, out>(p, t, sum, d, m.result[group]);
        }
    }
};

/* For 64 matrices of n = k = 2048: 550 GFLOP for half of the products, 0.73 ms at the 757 TFLOP/s of a full product by
 * cuBLAS; to and from memory 512 MiB for each of A, B and C and half of it for D, 0.45 ms at 4.3 TB/s with all of
 * them. */
template <class gemm>
static __global__ void __launch_bounds__(gemm::threads, 1)
    symmetric_pingpong(const __grid_constant__ pingpong_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    tchi_gemm_run<gemm>(p);
#endif
}

/* --- host -------------------------------------------------------------------------------------------------------- */

/* Limits of the table (kernel_choice.c): matrices smaller than 256 share too little of B. On an H200, 1.46x to 1.62x
 * symmetric_bf16x2_wgmma.cu from 768 on. With fewer tiles than multiprocessors, for split operands than a quarter of
 * them, small tiles occupy more of the device: 1 x 1024 split takes 0.030 ms with these, 0.034 with small ones. C's
 * rows are multiples of 8: see tchi_tma_store. */
static int64_t tiles_of(int64_t n)
{
    return tchi_lower_tiles(tchi_cuda_ceil_div(n, TILE));
}

/* A split batch as a batch of planes. */
static tch_matrices as_planes(const tch_matrices *m)
{
    tch_matrices planes = *m;
    if (m->type == TCH_SCALAR_BF16X2) {
        planes.type = TCH_SCALAR_BF16;
        planes.batch *= 2;
    }
    return planes;
}

static int map_supported(const tch_matrices *m)
{
    tch_matrices planes = as_planes(m);
    return tchi_cuda_tensor_map_supported(&planes, 2);
}

static tch_status map_of(const tch_matrices *m, int box_rows, CUtensorMap *map)
{
    tch_matrices planes = as_planes(m);
    return tchi_cuda_tensor_map(&planes, box_rows, map);
}

extern "C" int tchi_cuda_symmetric_pingpong_supported(const tchi_cuda_state *state, const tch_matrices *d,
                                                      const tch_matrices *a, const tch_matrices *b,
                                                      const tch_matrices *c)
{
    tchi_kernel kernel = a->type == TCH_SCALAR_BF16X2 ? TCHI_SYMMETRIC_PINGPONG_SPLIT : TCHI_SYMMETRIC_PINGPONG;
    int countable = c->rows < (1 << 20) && c->batch < (1 << 30) && tiles_of(c->rows) * c->batch < (1 << 30) &&
                    a->cols > 0 && a->cols < (1 << 30);
    int typed = a->type == b->type && (d == NULL || d->type == a->type);
    return tchi_cuda_kernel_fits(state, kernel, a, c) && countable && typed && map_supported(a) && map_supported(b) &&
           (c->type == TCH_SCALAR_F64 ? tchi_cuda_operand_of(c).wide : map_supported(c)) &&
           (d == NULL || map_supported(d));
}

static pingpong_problem pingpong_problem_of(double c0, double c1, double c2, const tch_matrices *a,
                                            const tch_matrices *c)
{
    pingpong_problem p = {};
    p.n = (int32_t)c->rows;
    p.batch = (int32_t)c->batch;
    p.side = (int32_t)tchi_cuda_ceil_div(c->rows, TILE);
    p.singles = (p.side + 1) / 2;
    p.pairs = (int32_t)(tiles_of(c->rows) - p.singles) / 2;
    p.items = p.batch / GROUP * group_items(p, GROUP) + group_items(p, p.batch % GROUP);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(a->cols, TCHI_GEMM_DEPTH);
    p.c0 = (float)c0;
    p.c1 = (float)c1;
    p.c2 = (float)c2;
    return p;
}

template <bool has_d, tch_scalar in, tch_scalar out, bool columns = false>
static tch_status launch_pingpong(const tchi_cuda_state *state, const pingpong_problem &p)
{
    using gemm = pingpong_gemm<has_d, in, out, columns>;
    return tchi_gemm_launch<gemm>(state, "symmetric_pingpong", symmetric_pingpong<gemm>, p);
}

template <bool has_d>
static tch_status launch_pingpong_as(const tchi_cuda_state *state, tch_scalar in, tch_scalar out,
                                     const pingpong_problem &p)
{
    constexpr tch_scalar f16 = TCH_SCALAR_F16, bf16 = TCH_SCALAR_BF16, split = TCH_SCALAR_BF16X2;
    if (in == split) {
        return out == TCH_SCALAR_F64 ? launch_pingpong<has_d, split, TCH_SCALAR_F64>(state, p)
                                     : launch_pingpong<has_d, split, split>(state, p);
    }
    if (in == f16) {
        return out == f16 ? launch_pingpong<has_d, f16, f16>(state, p) : launch_pingpong<has_d, f16, bf16>(state, p);
    }
    return out == f16 ? launch_pingpong<has_d, bf16, f16>(state, p) : launch_pingpong<has_d, bf16, bf16>(state, p);
}

static tch_status run_pingpong(tchi_cuda_state *state, pingpong_problem *p, const tch_matrices *d,
                               const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    TCHI_TRY(map_of(a, TILE, &p->a));
    TCHI_TRY(map_of(b, TILE / CLUSTER, &p->b));
    if (c->type == TCH_SCALAR_F64) {
        p->wide_c = tchi_cuda_operand_of(c);
    } else {
        TCHI_TRY(map_of(c, TCHI_SQUARE, &p->c));
    }
    if (d != NULL && d->type == TCH_SCALAR_BF16X2) {
        p->split_d = tchi_cuda_operand_of(d);
    } else if (d != NULL) {
        TCHI_TRY(map_of(d, TILE, &p->d));
    }
    return d != NULL ? launch_pingpong_as<true>(state, a->type, c->type, *p)
                     : launch_pingpong_as<false>(state, a->type, c->type, *p);
}

extern "C" tch_status tchi_cuda_symmetric_pingpong(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                                   double c2, const tch_matrices *a, const tch_matrices *b,
                                                   const tch_matrices *c)
{
    pingpong_problem p = pingpong_problem_of(c0, c1, c2, a, c);
    return run_pingpong(state, &p, d, a, b, c);
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

/* Pairs of C's rows are read and written together, unless C is packed. */
extern "C" int tchi_cuda_factor_pingpong_supported(const tchi_cuda_state *state, const tch_matrices *c)
{
    int paired = c->ld == 0 || ((uintptr_t)c->data % 8 == 0 && c->ld % 2 == 0 && (c->batch == 1 || c->stride % 2 == 0));
    return tchi_cuda_kernel_fits(state, TCHI_FACTOR_PINGPONG, c, c) && c->rows < (1 << 20) &&
           tiles_of(c->rows) * c->batch < (1 << 30) && paired;
}

extern "C" tch_status tchi_cuda_factor_pingpong(tchi_cuda_state *state, tchi_factor_weights weights,
                                                const tch_matrices *a, int32_t transpose, const uint32_t *largest,
                                                const tch_matrices *c)
{
    pingpong_problem p = pingpong_problem_of(0.0, 0.0, 1.0, a, c);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(transpose ? a->rows : a->cols, TCHI_GEMM_DEPTH);
    p.factor = weights;
    p.largest = largest;
    p.wide_c = tchi_cuda_operand_of(c);
    TCHI_TRY(map_of(a, transpose ? TCHI_GEMM_DEPTH : TILE, &p.a));
    TCHI_TRY(map_of(a, transpose ? TCHI_GEMM_DEPTH : TILE / CLUSTER, &p.b));
    return transpose ? launch_pingpong<false, TCH_SCALAR_F16, TCH_SCALAR_F32, true>(state, p)
                     : launch_pingpong<false, TCH_SCALAR_F16, TCH_SCALAR_F32>(state, p);
}

/* --- orthogonalization ------------------------------------------------------------------------------------------- */

/* Whether steps on X are supported: its Gram matrix, aligned like all scratch, and products of that. */
extern "C" int tchi_cuda_symmetric_scaled_supported(const tchi_cuda_state *state, const tch_matrices *x)
{
    tch_matrices m = *x;
    m.cols = m.rows;
    m.ld = tchi_cuda_ceil_div(m.rows, 8) * 8;
    m.stride = m.rows * m.ld;
    return x->type == TCH_SCALAR_BF16 && tchi_cuda_symmetric_pingpong_supported(state, NULL, x, x, &m) &&
           tchi_cuda_symmetric_pingpong_supported(state, &m, &m, &m, &m);
}

extern "C" tch_status tchi_cuda_symmetric_scaled(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                                 double c2, const tch_matrices *a, const tch_matrices *b,
                                                 const double *scale, int32_t exponent, const tch_matrices *c)
{
    pingpong_problem p = pingpong_problem_of(c0, c1, c2, a, c);
    p.scale = scale;
    p.exponent = exponent;
    return run_pingpong(state, &p, d, a, b, c);
}

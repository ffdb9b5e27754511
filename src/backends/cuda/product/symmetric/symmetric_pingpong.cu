/* Symmetric products of bfloat16, float16 and split bfloat16 for sm_90: C = scale (c0 I + c1 D + c2 A B') over the
 * lower tiles of C, mirrored, with a scale for each matrix or none; and factors of curvature, C = alpha A A' + beta C
 * in float32, from float16 that stands for float32. A persistent ping-pong kernel: a producer warp asks the tensor
 * memory accelerator for k-tiles of A and B, and two consumer warpgroups have tiles in turn, so that one is in its
 * epilogue while the other multiplies. The two blocks of a cluster have tiles below each other and share B.
 *
 * The one thing to know before changing it is what pair_ring.cuh says of rings. How this way was chosen:
 * bench/ladder/cuda_orthogonalize.md, and for split operands cuda_symmetric_bf16x2.md. */
#include "backends/cuda/device/pair_launch.cuh"
#include "backends/cuda/device/pair_ring.cuh"
#include "symmetric_factor.cuh"
#include "symmetric_pingpong.cuh"

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* what follows has instructions of sm_90a */

/* --- the ring ---------------------------------------------------------------------------------------------------- */

template <bool staged_d> static __device__ inline int ktiles_of_tile(const pingpong_problem &p)
{
    return p.ktiles + staged_d;
}

template <int planes> static __device__ __forceinline__ void step(tchi_ring_place *at)
{
    tchi_ring_step<pingpong_memory<planes>::stages>(at);
}

/* --- loading: one thread ----------------------------------------------------------------------------------------- */

/* A k-tile where A and B lie transposed: a box of 64 columns for each half of the rows of the tile. */
static __device__ __forceinline__ void load_columns(const pingpong_problem &p, pingpong_memory<1> &m, int stage,
                                                    const pingpong_tile &t, int rank, int ktile)
{
    constexpr int half = TILE / CLUSTER, box_bytes = KTILE_BYTES / CLUSTER;
    char *a = m.stage[stage][0][0], *b = m.stage[stage][1][0];
    uint64_t *full = m.full + stage;
    int y = ktile * DEPTH;
    tchi_barrier_arrive_expecting(full, 2 * KTILE_BYTES);
    tchi_tma_load(a, &p.a, t.row, y, t.matrix, full);
    tchi_tma_load(a + box_bytes, &p.a, t.row + half, y, t.matrix, full);
    if (t.shares_b) {
        tchi_tma_load_to((1 << CLUSTER) - 1, b + rank * box_bytes, &p.b, t.col + rank * half, y, t.matrix, full);
    } else {
        tchi_tma_load(b, &p.b, t.col, y, t.matrix, full);
        tchi_tma_load(b + box_bytes, &p.b, t.col + half, y, t.matrix, full);
    }
}

/* Each block brings its own A. Of a B they share each brings half, to both. */
template <int planes>
static __device__ __forceinline__ void load_ktile(const pingpong_problem &p, pingpong_memory<planes> &m, int stage,
                                                  const pingpong_tile &t, int rank, int ktile)
{
    constexpr int half = TILE / CLUSTER;
    uint64_t *full = m.full + stage;
    int x = ktile * DEPTH;
    tchi_barrier_arrive_expecting(full, 2 * planes * KTILE_BYTES);
#pragma unroll
    for (int plane = 0; plane < planes; plane++) {
        int z = t.matrix * planes + plane;
        char *b = m.stage[stage][1][plane];
        tchi_tma_load(m.stage[stage][0][plane], &p.a, x, t.row, z, full);
        if (t.shares_b) {
            tchi_tma_load_to((1 << CLUSTER) - 1, b + rank * half * ROW_BYTES, &p.b, x, t.col + rank * half, z, full);
        } else {
            tchi_tma_load(b, &p.b, x, t.col, z, full);
            tchi_tma_load(b + half * ROW_BYTES, &p.b, x, t.col + half, z, full);
        }
    }
}

static __device__ __forceinline__ void load_d(const pingpong_problem &p, pingpong_memory<1> &m, int stage,
                                              const pingpong_tile &t)
{
    uint64_t *full = m.full + stage;
    tchi_barrier_arrive_expecting(full, 2 * KTILE_BYTES);
    tchi_tma_load(m.stage[stage][0][0], &p.d, t.col, t.row, t.matrix, full);
    tchi_tma_load(m.stage[stage][1][0], &p.d, t.col + DEPTH, t.row, t.matrix, full);
}

/* The k-tiles of all tiles, and behind each tile's its D: so D arrives while the products run. */
template <bool staged_d, bool by_columns, int planes>
static __device__ inline void load_all(const pingpong_problem &p, pingpong_memory<planes> &m)
{
    int rank = tchi_cluster_rank();
    tchi_ring_place at = {0, 0};
    for (int own = 0; tchi_pair_item(own) < p.items; own++) {
        pingpong_tile t = tile_of(p, tchi_pair_item(own), rank);
        for (int ktile = 0; ktile < ktiles_of_tile<staged_d>(p); ktile++) {
            tchi_barrier_wait(m.empty + at.stage, at.parity ^ 1);
            if constexpr (staged_d) {
                if (ktile == p.ktiles) {
                    load_d(p, m, at.stage, t);
                    step<planes>(&at);
                    continue;
                }
            }
            if constexpr (by_columns) {
                load_columns(p, m, at.stage, t, rank, ktile);
            } else {
                load_ktile(p, m, at.stage, t, rank, ktile);
            }
            step<planes>(&at);
        }
    }
}

/* --- multiplying ------------------------------------------------------------------------------------------------- */

/* 64 rows of A and all of B. */
template <tch_scalar type>
static __device__ __forceinline__ void multiply_rows(float (&sum)[64], uint64_t a, uint64_t b, int add)
{
    if (type == TCH_SCALAR_F16) {
        tchi_wgmma_f16_n128(sum, a, b, add);
    } else {
        tchi_wgmma_bf16_n128(sum, a, b, add);
    }
}

/* The product of a plane of A and one of B over a k-tile, the first of a tile (`add` 0) into sums that hold nothing. A
 * step of 16 along k is 32 bytes of a row, and addresses in descriptors count 16. */
template <tch_scalar type>
static __device__ __forceinline__ void multiply_planes(pingpong_sums &sum, const char (&a)[KTILE_BYTES],
                                                       const char (&b)[KTILE_BYTES], int add)
{
    uint64_t upper = tchi_wgmma_rows(a);
    uint64_t lower = tchi_wgmma_rows(a + KTILE_BYTES / 2);
    uint64_t all = tchi_wgmma_rows(b);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        int more = k > 0 ? 1 : add;
        multiply_rows<type>(sum[0], upper + 2 * k, all + 2 * k, more);
        multiply_rows<type>(sum[1], lower + 2 * k, all + 2 * k, more);
    }
}

/* The same where they lie transposed, columns of boxes in the place of rows: a step of 16 along k is 16 of a box's
 * rows. */
static __device__ __forceinline__ void multiply_columns(pingpong_sums &sum, const char (&a)[KTILE_BYTES],
                                                        const char (&b)[KTILE_BYTES], int add)
{
    uint64_t upper = tchi_wgmma_columns(a, KTILE_BYTES / 2);
    uint64_t lower = tchi_wgmma_columns(a + KTILE_BYTES / 2, KTILE_BYTES / 2);
    uint64_t all = tchi_wgmma_columns(b, KTILE_BYTES / 2);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
        int more = k > 0 ? 1 : add;
        int down = k * (16 * ROW_BYTES >> 4);
        tchi_wgmma_f16_n128_columns(sum[0], upper + down, all + down, more);
        tchi_wgmma_f16_n128_columns(sum[1], lower + down, all + down, more);
    }
}

/* All products of a k-tile as one group in the background. Of split operands that of the low parts is left out. */
template <tch_scalar type, bool by_columns, int planes>
static __device__ __forceinline__ void start_ktile(pingpong_sums &sum, const char (&stage)[2][planes][KTILE_BYTES],
                                                   int add)
{
    tchi_wgmma_fence();
    if constexpr (by_columns) {
        multiply_columns(sum, stage[0][0], stage[1][0], add);
    } else {
        multiply_planes<type>(sum, stage[0][0], stage[1][0], add);
    }
    if constexpr (planes == 2) {
        multiply_planes<type>(sum, stage[0][0], stage[1][1], 1);
        multiply_planes<type>(sum, stage[0][1], stage[1][0], 1);
    }
    tchi_wgmma_commit();
}

/* A k-tile is left when the next one is already being multiplied, so that the tensor cores do not run dry. The last one
 * is left to the caller: its stage is returned. */
template <tch_scalar type, bool by_columns, int planes>
static __device__ __forceinline__ int multiply(const pingpong_problem &p, pingpong_memory<planes> &m,
                                               pingpong_sums &sum, tchi_ring_place *at)
{
    int before = 0;
    for (int ktile = 0; ktile < p.ktiles; ktile++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        start_ktile<type, by_columns>(sum, m.stage[at->stage], ktile > 0);
        tchi_wgmma_wait<1>();
        if (ktile > 0) {
            tchi_ring_leave(m.empty + before);
        }
        before = at->stage;
        step<planes>(at);
    }
    return before;
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* What a thread's sums need of a tile of D, square by square. */
typedef uint32_t pingpong_addends[4][16];

static __device__ __forceinline__ void read_d(pingpong_addends &d, char (&stage)[2][1][KTILE_BYTES])
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

/* The same for a square at (row, col) of a split D: both planes of it would not fit into registers beside the sums, nor
 * into shared memory for as long as the result takes, so it is read from memory when it is needed. */
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

/* What rounding to bfloat16 leaves of a square. */
template <int from> static __device__ __forceinline__ void keep_low_parts(float (&sum)[64])
{
#pragma unroll
    for (int i = 0; i < 32; i++) {
        sum[from + i] -= __bfloat162float(__float2bfloat16_rn(sum[from + i]));
    }
}

/* Writes a plane of one square of C, on or below the diagonal, and its mirror image. One thread of the warpgroup speaks
 * to the accelerator, and waits until it has read what was there before. */
template <int from, tch_scalar type>
static __device__ __forceinline__ void write_plane(const pingpong_problem &p, int z, int row, int col,
                                                   const float (&sum)[64], char (&place)[2][TCHI_SQUARE_BYTES])
{
    bool speaker = threadIdx.x % 128 == 0;
    int barrier = 1 + tchi_warpgroup();
    if (speaker) {
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
    if (speaker) {
        tchi_tma_store(&p.c, col, row, z, place[0]);
        if (row != col) {
            tchi_tma_store(&p.c, row, col, z, place[1]);
        }
        tchi_tma_commit();
    }
}

/* A square of float64 and its mirror image, from registers: four lanes have 64 bytes of a row, and eight those of a
 * column. On the diagonal an element below it is written to both places. */
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

/* The four squares of a tile but for those above the diagonal, which are another's mirror image, and those outside. */
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

/* One tile: its products in turn, its result while the other warpgroup multiplies. */
template <bool has_d, tch_scalar in, tch_scalar out, bool by_columns, int planes>
static __device__ __forceinline__ void compute_tile(const pingpong_problem &p, pingpong_memory<planes> &m, int group,
                                                    int own, const pingpong_tile &t)
{
    constexpr bool staged_d = has_d && planes == 1;
    pingpong_sums sum;
    pingpong_addends d;
    int64_t first = (int64_t)own * ktiles_of_tile<staged_d>(p);
    tchi_ring_place at = tchi_ring_at<pingpong_memory<planes>::stages>(first);
    if constexpr (out == TCH_SCALAR_F32) {
        prefetch_factor_tile(p, t);
    }
    tchi_turn_await(m.turn, group, own);
    int last = multiply<in, by_columns>(p, m, sum, &at);
    if constexpr (staged_d) {
        tchi_barrier_wait(m.full + at.stage, at.parity);
        tchi_turn_pass(m.turn, group);
        read_d(d, m.stage[at.stage]);
        tchi_tma_publish(); /* reads, too, must be over before the accelerator may write there again */
        __syncwarp();
        tchi_ring_leave(m.empty + at.stage);
    } else {
        tchi_turn_pass(m.turn, group);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum[0]);
    tchi_wgmma_results(sum[1]);
    tchi_ring_leave(m.empty + last);
    if constexpr (out == TCH_SCALAR_F32) {
        write_factor_tile(p, t, sum);
    } else {
        write_tile<has_d, in, out>(p, t, sum, d, m.result[group]);
    }
}

template <int planes> static __device__ __forceinline__ void create_barriers(pingpong_memory<planes> &m)
{
    for (int i = 0; i < m.stages; i++) {
        tchi_barrier_create(m.full + i, 1);
        tchi_barrier_create(m.empty + i, 4 * CLUSTER); /* the warps of one warpgroup in each block */
    }
    for (int i = 0; i < WARPGROUPS; i++) {
        tchi_barrier_create(m.turn + i, 4);
    }
    tchi_barrier_publish();
}

#endif

/* For 64 matrices of n = k = 2048: 550 GFLOP for exact halves, 0.73 ms at the 757 TFLOP/s of a whole product by cuBLAS;
 * to and from memory 512 MiB for each of A, B and C and half of it for D, 0.45 ms at 4.3 TB/s with all of them.
 *
 * Copies land in the other block of a cluster too, so nobody begins before its barriers are there, and nobody exits
 * while the other block still arrives at them. */
template <bool has_d, tch_scalar in, tch_scalar out, bool by_columns = false>
static __global__ void __launch_bounds__(THREADS, 1) symmetric_pingpong(const __grid_constant__ pingpong_problem p)
{
#if !defined(__CUDA_ARCH__) || TCHI_WGMMA
    extern __shared__ __align__(1024) char shared[];
    constexpr int planes = planes_of(in);
    pingpong_memory<planes> &m = *(pingpong_memory<planes> *)shared;
    if (threadIdx.x == 0) {
        create_barriers(m);
    }
    __syncwarp();
    tchi_cluster_sync();
    if (threadIdx.x >= 128 * WARPGROUPS) {
        tchi_registers_give<LOAD_REGISTERS>();
        if (threadIdx.x == 128 * WARPGROUPS) {
            load_all<has_d && planes == 1, by_columns>(p, m);
        }
        __syncwarp();
        tchi_cluster_sync();
    } else {
        tchi_registers_take<MULTIPLY_REGISTERS>();
        int group = tchi_warpgroup();
        int rank = tchi_cluster_rank();
        for (int own = group; tchi_pair_item(own) < p.items; own += WARPGROUPS) {
            compute_tile<has_d, in, out, by_columns>(p, m, group, own, tile_of(p, tchi_pair_item(own), rank));
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

/* Smaller matrices have no tiles that share B without much of them outside. Measured on an H200 from 768 on, where this
 * is 1.46 to 1.62 times as fast as symmetric_bf16x2_wgmma.cu was in another run; 256 and 512 are reasoned. */
#define SMALLEST 256
/* With fewer tiles than multiprocessors the small tiles of symmetric_bf16x2.cu, which keep more of the device at work:
 * the limit is that of its own large tiles, which are as large as these. For split operands it is a quarter: with 36
 * tiles on 132 multiprocessors, 1 x 1024, these take 0.030 ms on an H200 and small tiles 0.034. */
static int64_t least_tiles(const tchi_cuda_state *state, tch_scalar in)
{
    return in == TCH_SCALAR_BF16X2 ? state->device.processors / 4 : state->device.processors;
}

static int64_t tiles_of(int64_t n)
{
    return tchi_lower_tiles(tchi_cuda_ceil_div(n, TILE));
}

/* A split batch as one of its planes, those of a matrix behind each other. */
static tch_matrices as_planes(const tch_matrices *m)
{
    tch_matrices planes = *m;
    if (m->type == TCH_SCALAR_BF16X2) {
        planes.type = TCH_SCALAR_BF16;
        planes.batch *= 2;
    }
    return planes;
}

static int map_takes(const tch_matrices *m)
{
    tch_matrices planes = as_planes(m);
    return tchi_cuda_tensor_map_takes(&planes);
}

static tch_status map_of(const tch_matrices *m, int box_rows, CUtensorMap *map)
{
    tch_matrices planes = as_planes(m);
    return tchi_cuda_tensor_map(&planes, box_rows, map);
}

/* Split products come out split or in float64, others in 16 bits. */
static int takes_result(tch_scalar in, const tch_matrices *c)
{
    if (in == TCH_SCALAR_BF16X2 && c->type == TCH_SCALAR_F64) {
        return tchi_cuda_operand_of(c).wide;
    }
    return (in == TCH_SCALAR_BF16X2) == (c->type == TCH_SCALAR_BF16X2) && map_takes(c);
}

extern "C" int tchi_cuda_symmetric_pingpong_takes(const tchi_cuda_state *state, const tch_matrices *d,
                                                  const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    int64_t tiles = tiles_of(c->rows) * c->batch;
    int large = c->rows >= SMALLEST && tiles >= least_tiles(state, a->type);
    int countable =
        c->rows < (1 << 20) && c->batch < (1 << 30) && tiles < (1 << 30) && a->cols > 0 && a->cols < (1 << 30);
    int whole = c->rows % 8 == 0; /* the accelerator would write beyond the ends of other rows: tchi_tma_store */
    int typed = a->type == b->type && (d == NULL || d->type == a->type);
    return state->device.major == 9 && large && countable && whole && typed && map_takes(a) && map_takes(b) &&
           takes_result(a->type, c) && (d == NULL || map_takes(d));
}

static pingpong_problem problem_of(double c0, double c1, double c2, const tch_matrices *a, const tch_matrices *c)
{
    pingpong_problem p = {};
    p.n = (int32_t)c->rows;
    p.batch = (int32_t)c->batch;
    p.side = (int32_t)tchi_cuda_ceil_div(c->rows, TILE);
    p.singles = (p.side + 1) / 2;
    p.pairs = (int32_t)(tiles_of(c->rows) - p.singles) / 2;
    p.items = p.batch / GROUP * group_items(p, GROUP) + group_items(p, p.batch % GROUP);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(a->cols, DEPTH);
    p.c0 = (float)c0;
    p.c1 = (float)c1;
    p.c2 = (float)c2;
    return p;
}

static tch_status launch(tchi_cuda_state *state, const pingpong_problem *p, void (*kernel)(pingpong_problem))
{
    const size_t shared = sizeof(pingpong_memory<1>); /* which is no less than that of two planes */
    return tchi_cuda_launch_pairs(state, "symmetric_pingpong", kernel, *p, p->items, THREADS, shared);
}

typedef void (*pingpong_kernel)(pingpong_problem);

template <tch_scalar in> static pingpong_kernel kernel_to(tch_scalar out, int has_d)
{
    if (out == TCH_SCALAR_F16) {
        return has_d ? symmetric_pingpong<true, in, TCH_SCALAR_F16> : symmetric_pingpong<false, in, TCH_SCALAR_F16>;
    }
    return has_d ? symmetric_pingpong<true, in, TCH_SCALAR_BF16> : symmetric_pingpong<false, in, TCH_SCALAR_BF16>;
}

template <tch_scalar out> static pingpong_kernel split_kernel_to(int has_d)
{
    constexpr tch_scalar split = TCH_SCALAR_BF16X2;
    return has_d ? symmetric_pingpong<true, split, out> : symmetric_pingpong<false, split, out>;
}

static pingpong_kernel kernel_for(tch_scalar in, tch_scalar out, int has_d)
{
    if (in == TCH_SCALAR_BF16X2) {
        return out == TCH_SCALAR_F64 ? split_kernel_to<TCH_SCALAR_F64>(has_d)
                                     : split_kernel_to<TCH_SCALAR_BF16X2>(has_d);
    }
    return in == TCH_SCALAR_F16 ? kernel_to<TCH_SCALAR_F16>(out, has_d) : kernel_to<TCH_SCALAR_BF16>(out, has_d);
}

static tch_status run(tchi_cuda_state *state, pingpong_problem *p, const tch_matrices *d, const tch_matrices *a,
                      const tch_matrices *b, const tch_matrices *c)
{
    TCHI_CUDA_PASS(map_of(a, TILE, &p->a));
    TCHI_CUDA_PASS(map_of(b, TILE / CLUSTER, &p->b));
    if (c->type == TCH_SCALAR_F64) {
        p->wide_c = tchi_cuda_operand_of(c);
    } else {
        TCHI_CUDA_PASS(map_of(c, TCHI_SQUARE, &p->c));
    }
    if (d != NULL && d->type == TCH_SCALAR_BF16X2) {
        p->split_d = tchi_cuda_operand_of(d);
    } else if (d != NULL) {
        TCHI_CUDA_PASS(map_of(d, TILE, &p->d));
    }
    return launch(state, p, kernel_for(a->type, c->type, d != NULL));
}

extern "C" tch_status tchi_cuda_symmetric_pingpong(tchi_cuda_state *state, double c0, double c1, const tch_matrices *d,
                                                   double c2, const tch_matrices *a, const tch_matrices *b,
                                                   const tch_matrices *c)
{
    pingpong_problem p = problem_of(c0, c1, c2, a, c);
    return run(state, &p, d, a, b, c);
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

/* Pairs of C's rows are read and written together, where C is not packed. */
extern "C" int tchi_cuda_factor_pingpong_takes(const tchi_cuda_state *state, const tch_matrices *c)
{
    int64_t tiles = tiles_of(c->rows) * c->batch;
    int paired = c->ld == 0 || ((uintptr_t)c->data % 8 == 0 && c->ld % 2 == 0 && (c->batch == 1 || c->stride % 2 == 0));
    return state->device.major == 9 && c->type == TCH_SCALAR_F32 && c->rows >= SMALLEST && c->rows < (1 << 20) &&
           tiles >= least_tiles(state, TCH_SCALAR_F16) && tiles < (1 << 30) && paired;
}

extern "C" tch_status tchi_cuda_factor_pingpong(tchi_cuda_state *state, tchi_factor_weights weights,
                                                const tch_matrices *a, int32_t transpose, const uint32_t *largest,
                                                const tch_matrices *c)
{
    pingpong_problem p = problem_of(0.0, 0.0, 1.0, a, c);
    p.ktiles = (int32_t)tchi_cuda_ceil_div(transpose ? a->rows : a->cols, DEPTH);
    p.factor = weights;
    p.largest = largest;
    p.wide_c = tchi_cuda_operand_of(c);
    TCHI_CUDA_PASS(map_of(a, transpose ? DEPTH : TILE, &p.a));
    TCHI_CUDA_PASS(map_of(a, transpose ? DEPTH : TILE / CLUSTER, &p.b));
    return launch(state, &p,
                  transpose ? symmetric_pingpong<false, TCH_SCALAR_F16, TCH_SCALAR_F32, true>
                            : symmetric_pingpong<false, TCH_SCALAR_F16, TCH_SCALAR_F32>);
}

/* --- orthogonalization ------------------------------------------------------------------------------------------- */

/* For steps on X: its Gram matrix, whose rows are aligned like all scratch, and products of that. */
extern "C" int32_t tchi_cuda_normalize_takes(void *state, const tch_matrices *x)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    tch_matrices m = *x;
    m.cols = m.rows;
    m.ld = tchi_cuda_ceil_div(m.rows, 8) * 8;
    m.stride = m.rows * m.ld;
    return x->type == TCH_SCALAR_BF16 && tchi_cuda_symmetric_pingpong_takes(s, NULL, x, x, &m) &&
           tchi_cuda_symmetric_pingpong_takes(s, &m, &m, &m, &m);
}

extern "C" tch_status tchi_cuda_scaled_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                               const tch_matrices *a, const tch_matrices *b, const double *scale,
                                               int32_t exponent, const tch_matrices *c)
{
    pingpong_problem p = problem_of(c0, c1, c2, a, c);
    p.scale = scale;
    p.exponent = exponent;
    return run((tchi_cuda_state *)state, &p, d, a, b, c);
}

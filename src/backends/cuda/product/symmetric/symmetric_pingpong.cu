/* Symmetric products of bfloat16, float16 and split bfloat16 for sm_90: C = scale (c0 I + c1 D + c2 A B') over the
 * lower tiles of C, mirrored, with a scale for each matrix or none; and factors of curvature, C = alpha A A' + beta C
 * in float32, from float16 that stands for float32. A persistent ping-pong kernel: a producer warp asks the tensor
 * memory accelerator for k-tiles of A and B, and two consumer warpgroups have tiles in turn, so that one is in its
 * epilogue while the other multiplies. The two blocks of a cluster have tiles below each other and share B.
 *
 * The one thing to know before changing it: k-tiles go round through STAGES places in shared memory, each with a
 * barrier for "full" and one for "empty", and a barrier tells apart only the phase that has just ended and the one
 * before. So nobody may wait for a k-tile before it is certain that the k-tile before it in that place has landed,
 * which is what the warpgroups' turns are for. How this way was chosen: bench/ladder/cuda_orthogonalize.md, and for
 * split operands cuda_symmetric_bf16x2.md. */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/hopper.cuh"
#include "backends/cuda/device/tensor_map.h"
#include "backends/cuda/device/triangle.cuh"
#include "backends/cuda/matrix/narrow.h"
#include "backends/cuda/product/factor_gram/factor_gram.h"
#include "symmetric_squares.cuh"

#define TILE 128                 /* rows and columns of C that a warpgroup computes at a time */
#define DEPTH TCHI_CUDA_BOX_COLS /* numbers along k in a k-tile */
#define ROW_BYTES (2 * DEPTH)
#define KTILE_BYTES (TILE * ROW_BYTES) /* of a plane of A, and of B */
#define STAGES 6                       /* of one plane; half as many of two */
#define CLUSTER 2
#define WARPGROUPS 2                     /* that multiply */
#define THREADS (128 * (WARPGROUPS + 1)) /* one thread of the last ones asks for copies */
/* A thread begins with 168 registers. The sums of a tile are 128 of each thread that multiplies. */
#define MULTIPLY_REGISTERS 232
#define LOAD_REGISTERS 40
/* Matrices whose tiles come one after the other, those on the diagonal last: so a matrix is still in the L2 cache when
 * its last tiles come, and these, which come singly, seldom leave a block of a cluster without one. */
#define GROUP 4

typedef struct pingpong_problem {
    int32_t n, batch;
    int32_t side;           /* tiles along one side of C */
    int32_t pairs, singles; /* of one matrix */
    int32_t items;          /* one is a tile for each block of a cluster */
    int32_t ktiles;         /* of A and of B for a tile */
    float c0, c1, c2;
    const double *scale; /* one per matrix, to the power of `exponent`; NULL for 1 */
    int32_t exponent;    /* 0, 1 or 2 */
    CUtensorMap a, b, c; /* of split matrices the planes, one after the other */
    CUtensorMap d;
    tchi_cuda_operand split_d; /* instead of d, for split products */
    tchi_cuda_operand wide_c;  /* instead of c, for float64 and factors */
    tchi_factor_weights factor;
    const uint32_t *largest; /* of each matrix that A was narrowed from */
} pingpong_problem;

/* Planes of a matrix: a split one has its high parts and its low parts. */
static __host__ __device__ constexpr int planes_of(tch_scalar type)
{
    return type == TCH_SCALAR_BF16X2 ? 2 : 1;
}

template <int planes> struct pingpong_memory {
    static constexpr int stages = STAGES / planes;
    char stage[stages][2][planes][KTILE_BYTES];    /* A and B; or the left and the right half of a tile of D */
    char result[WARPGROUPS][2][TCHI_SQUARE_BYTES]; /* a square and its mirror image */
    uint64_t full[stages], empty[stages];
    uint64_t turn[WARPGROUPS];
};

/* Items of so many matrices: pairs of tiles for the two blocks of a cluster, then two singles at a time. */
static __host__ __device__ inline int group_items(const pingpong_problem &p, int matrices)
{
    return matrices * p.pairs + (matrices * p.singles + CLUSTER - 1) / CLUSTER;
}

#if !defined(__CUDA_ARCH__) || TCHI_WGMMA /* what follows has instructions of sm_90a */

/* --- tiles ------------------------------------------------------------------------------------------------------- */

typedef struct pingpong_tile {
    int matrix, row, col;
    bool shares_b; /* with the other block */
    bool nothing;  /* none was left for this block: it goes through the motions with another and writes nothing */
} pingpong_tile;

/* Tiles of a column of C are taken two by two from below; one on the diagonal may be left, of every second column. */
static __device__ inline pingpong_tile pair_tile(const pingpong_problem &p, int matrix, int pair, int rank)
{
    int col = 0;
    while (pair >= (p.side - col) / 2) {
        pair -= (p.side - col) / 2;
        col++;
    }
    int row = col + (p.side - col) % 2 + 2 * pair + rank;
    return {matrix, row * TILE, col * TILE, true, false};
}

static __device__ inline pingpong_tile single_tile(const pingpong_problem &p, int matrix, int single)
{
    int col = 2 * single + 1 - p.side % 2;
    return {matrix, col * TILE, col * TILE, false, false};
}

/* This block's tile of an item: all pairs of a group of matrices, then their singles. */
static __device__ inline pingpong_tile tile_of(const pingpong_problem &p, int item, int rank)
{
    int first = item / group_items(p, GROUP) * GROUP;
    int left = item % group_items(p, GROUP);
    int matrices = min(p.batch - first, GROUP);
    if (left < matrices * p.pairs) {
        return pair_tile(p, first + left / p.pairs, left % p.pairs, rank);
    }
    int single = (left - matrices * p.pairs) * CLUSTER + rank;
    if (single < matrices * p.singles) {
        return single_tile(p, first + single / p.singles, single % p.singles);
    }
    pingpong_tile none = single_tile(p, first, 0);
    none.nothing = true;
    return none;
}

/* The block's tile number `own`, or one past the last. */
static __device__ inline int item_of(int own)
{
    return (int)(blockIdx.x / CLUSTER) + own * (int)(gridDim.x / CLUSTER);
}

/* --- the ring ---------------------------------------------------------------------------------------------------- */

/* Where a walk over the stages stands, and the parity of that phase of its full barrier. */
typedef struct pingpong_place {
    int stage, parity;
} pingpong_place;

template <bool staged_d> static __device__ inline int ktiles_of_tile(const pingpong_problem &p)
{
    return p.ktiles + staged_d;
}

template <int planes, bool staged_d>
static __device__ inline pingpong_place place_of_tile(const pingpong_problem &p, int own)
{
    constexpr int stages = pingpong_memory<planes>::stages;
    int64_t ktile = (int64_t)own * ktiles_of_tile<staged_d>(p);
    return {(int)(ktile % stages), (int)(ktile / stages % 2)};
}

template <int planes> static __device__ __forceinline__ void step(pingpong_place *at)
{
    at->stage++;
    if (at->stage == pingpong_memory<planes>::stages) {
        at->stage = 0;
        at->parity ^= 1;
    }
}

/* A warp leaves a stage: one lane tells each block, since both copy into it. */
static __device__ __forceinline__ void leave(uint64_t *empty)
{
    int lane = (int)threadIdx.x % 32;
    if (lane < CLUSTER) {
        tchi_barrier_arrive_at(empty, lane);
    }
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
    pingpong_place at = {0, 0};
    for (int own = 0; item_of(own) < p.items; own++) {
        pingpong_tile t = tile_of(p, item_of(own), rank);
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

/* The sums of rows 0 to 63 of a tile and of rows 64 to 127. */
typedef float pingpong_sums[2][64];

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

/* The same where they lie transposed, columns of boxes in the place of rows: a step of 16 along k is 16 of a box's rows. */
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
                                               pingpong_sums &sum, pingpong_place *at)
{
    int before = 0;
    for (int ktile = 0; ktile < p.ktiles; ktile++) {
        tchi_barrier_wait(m.full + at->stage, at->parity);
        start_ktile<type, by_columns>(sum, m.stage[at->stage], ktile > 0);
        tchi_wgmma_wait<1>();
        if (ktile > 0) {
            leave(m.empty + before);
        }
        before = at->stage;
        step<planes>(at);
    }
    return before;
}

/* Warpgroup 0 begins; `own` counts the block's tiles. */
static __device__ __forceinline__ void await_turn(uint64_t *turn, int group, int own)
{
    tchi_barrier_wait(turn + group, (own / WARPGROUPS + group + 1) % 2);
}

/* To the other warpgroup, once all k-tiles of this one's tile have been seen. */
static __device__ __forceinline__ void pass_turn(uint64_t *turn, int group)
{
    if (threadIdx.x % 32 == 0) {
        tchi_barrier_arrive(turn + (group + 1) % WARPGROUPS);
    }
    __syncwarp();
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

/* Weights that lie on the device are those of a step. `back` is what a narrowed matrix was divided by. */
typedef struct pingpong_factor {
    float alpha, beta, back;
} pingpong_factor;

static __device__ __forceinline__ pingpong_factor factor_of(const pingpong_problem &p, int matrix)
{
    const float *w = p.factor.on_device;
    return {w == NULL ? p.factor.alpha : w[0],
            p.factor.adds ? 1.0f
            : w == NULL   ? p.factor.beta
                          : w[1],
            1.0f / tchi_narrow_scale(p.largest[matrix])};
}

/* Multiplied step by step: the square of `back` may lie outside of what float32 holds. */
static __device__ __forceinline__ float factor_number(const pingpong_factor &f, float sum, float old)
{
    return fmaf(f.alpha, sum * f.back * f.back, f.beta * old);
}

/* A square of a factor and its mirror image, from registers: four lanes have 32 bytes of a row, and eight those of a
 * column. C is read below the diagonal, each number by the thread that writes it. `inner` squares lie below the
 * diagonal and inside of the matrix, and ask about no element. A pair that begins left of the diagonal ends no
 * further than on it. */
template <int from, bool inner>
static __device__ __forceinline__ void write_factor(const pingpong_problem &p, const pingpong_factor &f, int matrix,
                                                    int row, int col, const float (&sum)[64])
{
    const int lane = (int)threadIdx.x % 32;
    const int y = row + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, x = col + lane % 4 * 2;
    const int64_t ld = p.wide_c.ld;
    float *below = (float *)p.wide_c.data + matrix * p.wide_c.stride + y * ld + x;
    float *above = (float *)p.wide_c.data + matrix * p.wide_c.stride + x * ld + y;
    float2 old[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int r = y + i % 2 * 8, k = x + i / 2 * 8;
        const float *from_c = below + i % 2 * 8 * ld + i / 2 * 8;
        old[i] = make_float2(0.0f, 0.0f);
        if (f.beta != 0.0f && (inner || (r < p.n && k < r))) {
            old[i] = *(const float2 *)from_c;
        } else if (!inner && f.beta != 0.0f && r < p.n && k == r) {
            old[i].x = *from_c;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int r = y + i % 2 * 8, k = x + i / 2 * 8;
        const float2 two = make_float2(factor_number(f, sum[from + 2 * i], old[i].x),
                                       factor_number(f, sum[from + 2 * i + 1], old[i].y));
        if (inner || (r < p.n && k <= r)) {
            above[i % 2 * 8] = two.x;
        }
        if (inner || (r < p.n && k < r)) {
            *(float2 *)(below + i % 2 * 8 * ld + i / 2 * 8) = two;
            above[ld + i % 2 * 8] = two.y;
        }
        above += i % 2 * 8 * ld;
    }
}

/* The squares of a tile of a factor. A step that is skipped leaves what is there, to the bit. */
static __device__ __forceinline__ void write_factor_tile(const pingpong_problem &p, const pingpong_tile &t,
                                                         const pingpong_sums &sum)
{
    const pingpong_factor f = factor_of(p, t.matrix);
    if (t.nothing || (f.alpha == 0.0f && f.beta == 1.0f)) {
        return;
    }
#pragma unroll
    for (int number = 0; number < 4; number++) {
        constexpr int half = 32; /* sums of the right squares of a tile come behind those of the left ones */
        const int row = t.row + TCHI_SQUARE * (number / 2), col = t.col + TCHI_SQUARE * (number % 2);
        const bool inner = col < row && row + TCHI_SQUARE <= p.n;
        if (inner && number % 2 == 0) {
            write_factor<0, true>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (inner) {
            write_factor<half, true>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (col <= row && row < p.n && number % 2 == 0) {
            write_factor<0, false>(p, f, t.matrix, row, col, sum[number / 2]);
        } else if (col <= row && row < p.n) {
            write_factor<half, false>(p, f, t.matrix, row, col, sum[number / 2]);
        }
    }
}

/* What the epilogue will read of C, on its way to the L2 cache while the tile is multiplied: of each row the 512
 * bytes of the tile, four lines. */
static __device__ __forceinline__ void prefetch_factor_tile(const pingpong_problem &p, const pingpong_tile &t)
{
    const int row = t.row + (int)threadIdx.x % 128;
    const float *c = (const float *)p.wide_c.data + t.matrix * p.wide_c.stride + row * p.wide_c.ld + t.col;
#pragma unroll
    for (int line = 0; line < TILE / 32; line++) {
        if (row < p.n && t.col + 32 * line <= row) {
            tchi_prefetch(c + 32 * line);
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
    pingpong_place at = place_of_tile<planes, staged_d>(p, own);
    if constexpr (out == TCH_SCALAR_F32) {
        prefetch_factor_tile(p, t);
    }
    await_turn(m.turn, group, own);
    int last = multiply<in, by_columns>(p, m, sum, &at);
    if constexpr (staged_d) {
        tchi_barrier_wait(m.full + at.stage, at.parity);
        pass_turn(m.turn, group);
        read_d(d, m.stage[at.stage]);
        tchi_tma_publish(); /* reads, too, must be over before the accelerator may write there again */
        __syncwarp();
        leave(m.empty + at.stage);
    } else {
        pass_turn(m.turn, group);
    }
    tchi_wgmma_wait<0>();
    tchi_wgmma_results(sum[0]);
    tchi_wgmma_results(sum[1]);
    leave(m.empty + last);
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
        for (int own = group; item_of(own) < p.items; own += WARPGROUPS) {
            compute_tile<has_d, in, out, by_columns>(p, m, group, own, tile_of(p, item_of(own), rank));
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

/* Two blocks for every pair of multiprocessors, or fewer where there are fewer tiles. Should the GPU not hold all
 * clusters at one time, those left over run after the others. */
static tch_status launch(tchi_cuda_state *state, const pingpong_problem *p, void (*kernel)(pingpong_problem))
{
    const size_t shared = sizeof(pingpong_memory<1>); /* which is no less than that of two planes */
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                  "symmetric_pingpong");
    int clusters = state->device.processors / CLUSTER;
    clusters = clusters < p->items ? clusters : p->items;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = CLUSTER;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(clusters * CLUSTER));
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = shared;
    config.stream = state->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    TCHI_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, *p), "symmetric_pingpong");
    return tchi_cuda_launched(state, "symmetric_pingpong");
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

/* Pairs of C's rows are read and written together. */
extern "C" int tchi_cuda_factor_pingpong_takes(const tchi_cuda_state *state, const tch_matrices *c)
{
    int64_t tiles = tiles_of(c->rows) * c->batch;
    int paired = (uintptr_t)c->data % 8 == 0 && c->ld % 2 == 0 && (c->batch == 1 || c->stride % 2 == 0);
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

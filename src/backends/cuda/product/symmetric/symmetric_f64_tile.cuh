/* One tile of the symmetric product in float64 on tensor cores: cp.async loads k-tiles of A and B into a ring of stages
 * in shared memory, warps multiply them, and each stores its sums and their mirror image from registers. */
#ifndef TCHI_CUDA_SYMMETRIC_F64_TILE_CUH
#define TCHI_CUDA_SYMMETRIC_F64_TILE_CUH

#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

/* Division of a tile of `rows` by `cols`: warps of warp_rows by warp_cols, k-tiles of 16 columns of A and B in a ring
 * of `stages`, products of 8 columns at a time (below compute capability 9.0 of 4), whose fragments are loaded one step
 * ahead. Three CTAs per multiprocessor hide each other's starts, barriers and ends; larger tiles read less from L2 and
 * were slower for all but one matrix of n = 4096. */
struct tiling {
    static constexpr int rows = 64, cols = 64, warp_rows = 32, warp_cols = 32;
    static constexpr int ktile = 16, stages = 4, blocks = 3;
    static constexpr int warps = (rows / warp_rows) * (cols / warp_cols);
    static constexpr int threads = 32 * warps;
    static constexpr int steps = ktile / 8;
    static constexpr int stage = 8 * (rows + cols) * ktile; /* bytes */
    static constexpr int copied = threads / (ktile / 2);    /* rows that the threads copy at a time, 16 bytes each */
    static constexpr int copies = (rows + cols) / copied;   /* of each thread for a k-tile */
    static constexpr int copies_of_a = rows / copied;
    /* A warp's in one step, and the operands that a lane reads for them. */
    static constexpr int products = (warp_rows / 16) * (warp_cols / 8);
    static constexpr int loads = (warp_rows + warp_cols) / 8 * 2;
    static constexpr int shared_bytes = stages * stage;

    static_assert(rows % cols == 0, "rows of tiles end at the diagonal");
    static_assert(warp_rows % 16 == 0 && warp_cols % 8 == 0, "whole products");
    static_assert(copied % 4 == 0 && cols % copied == 0,
                  "copies have no remainder, and a thread keeps its permutation");
    static_assert(steps % 2 == 0, "the two fragments take turns");
};

typedef struct operand {
    const double *data; /* NULL: none */
    int64_t ld, stride;
} operand;

typedef struct problem {
    operand a, b, d;
    void *c;
    tch_scalar c_type;
    int64_t c_ld, c_stride;
    int c_paired, d_paired; /* elements 2 j and 2 j + 1 of a row are aligned for one access */
    int n, k;
    double c0, c1, c2;
    int64_t tiles; /* of one matrix */
} problem;

/* The first row and column of a tile of C. */
typedef struct place {
    int matrix, row, col;
} place;

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* A k-tile row is 128 bytes, four parts of 32, swizzled as part ^ (row % 4). The 16 lanes that shared memory serves at
 * a time read one part of four rows and hit every bank once. */
static __device__ __forceinline__ int swizzled(int row, int byte)
{
    return byte ^ (row % 4 * 32);
}

/* A thread's share of every k-tile copy: 16 bytes of some rows of A and of B, `copied` rows apart. */
typedef struct source {
    const char *a, *b;
    uint32_t a_apart, b_apart; /* bytes from one of its rows to the next */
    int a_rows, b_rows;        /* its rows inside the matrix */
    int columns;               /* remaining columns of k */
    char *to;                  /* in the first stage */
} source;

static __device__ __forceinline__ source source_of(char *shared, const problem &p, const place &at)
{
    const int row = (int)threadIdx.x / (tiling::ktile / 2), column = (int)threadIdx.x % (tiling::ktile / 2) * 2;
    source s;
    s.a = (const char *)(p.a.data + at.matrix * p.a.stride + (at.row + row) * p.a.ld + column);
    s.b = (const char *)(p.b.data + at.matrix * p.b.stride + (at.col + row) * p.b.ld + column);
    s.a_apart = (uint32_t)(8 * tiling::copied * p.a.ld);
    s.b_apart = (uint32_t)(8 * tiling::copied * p.b.ld);
    s.a_rows = (p.n - at.row - row + tiling::copied - 1) / tiling::copied;
    s.b_rows = (p.n - at.col - row + tiling::copied - 1) / tiling::copied;
    s.columns = p.k - column;
    s.to = shared + row * 8 * tiling::ktile + swizzled(row, 8 * column);
    return s;
}

/* This thread's copies of a k-tile. Unless all is `inside`, rows from n on and columns from k on are zeros. */
template <bool inside> static __device__ __forceinline__ void fetch_stage(source &s, int stage)
{
    const int bytes = 8 * min(max(s.columns, 0), 2);
#pragma unroll
    for (int copy = 0; copy < tiling::copies; copy++) {
        const bool of_a = copy < tiling::copies_of_a;
        const int row = of_a ? copy : copy - tiling::copies_of_a;
        const char *from = of_a ? s.a + (uint64_t)s.a_apart * row : s.b + (uint64_t)s.b_apart * row;
        char *to = s.to + stage + copy * tiling::copied * 8 * tiling::ktile;
        if constexpr (inside) {
            tchi_cp_async_16(to, from);
        } else {
            tchi_cp_async_16(to, from, row < (of_a ? s.a_rows : s.b_rows) ? bytes : 0);
        }
    }
    s.a += 8 * tiling::ktile;
    s.b += 8 * tiling::ktile;
    s.columns -= tiling::ktile;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* A warp's operands of one step, in register order. */
struct fragments {
    double a[tiling::warp_rows / 16][4];
    double b[tiling::warp_cols / 8][2];
};

/* Element (row, col) of a warp's part of the tile is in sum[row / 16][col / 8], at 2 (row / 8 % 2) + col % 2 of the
 * lane 4 (row % 8) + col / 2 % 4: the layout of every float64 mma. */
struct sums {
    double v[tiling::warp_rows / 16][tiling::warp_cols / 8][4];
};

static __device__ __forceinline__ int warp_row()
{
    return (int)threadIdx.x / 32 / (tiling::cols / tiling::warp_cols) * tiling::warp_rows;
}

static __device__ __forceinline__ int warp_col()
{
    return (int)threadIdx.x / 32 % (tiling::cols / tiling::warp_cols) * tiling::warp_cols;
}

/* Where a lane reads the first column of its first rows of A and B, in bytes from where a stage begins. */
typedef struct reader {
    const char *shared;
    int a, b;
} reader;

static __device__ __forceinline__ reader reader_of(const char *shared)
{
    const int group = (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4;
    const int first = group * 8 * tiling::ktile + swizzled(group, 8 * column);
    reader r;
    r.shared = shared;
    r.a = first + warp_row() * 8 * tiling::ktile;
    r.b = first + (tiling::rows + warp_col()) * 8 * tiling::ktile;
    return r;
}

/* Operands `first` to `end` - 1 of a step, B's before A's, since all rows of A need them. Lane 4 g + t reads columns t
 * and t + 4 of every eighth row from g on, each into the instruction's register: loading two columns at a time would
 * save loads but cost four moves per product. */
static __device__ __forceinline__ void load_fragments(fragments &f, const reader &r, int stage, int step, int first,
                                                      int end)
{
    constexpr int of_b = tiling::warp_cols / 8 * 2;
#pragma unroll
    for (int e = first; e < end; e++) {
        const int y = e < of_b ? e / 2 : (e - of_b) / 2, part = 2 * step + e % 2;
        const int from = (stage + (e < of_b ? r.b : r.a)) ^ (32 * part);
        double *to = e < of_b ? &f.b[y][e % 2] : &f.a[y / 2][e % 2 * 2 + y % 2];
        *to = tchi_load_shared_f64(r.shared + from + y * 64 * tiling::ktile);
    }
}

/* 16 by 8 sums. */
static __device__ __forceinline__ void multiply_16_by_8(double *sum, const double *a, const double *b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma unroll
    for (int e = 0; e < 4; e++) {
        tchi_mma_f64_8x8x4(sum + e % 2 * 2, a[e], b[e / 2]);
    }
#else
    tchi_mma_f64_16x8x8(sum, a, b);
#endif
}

/* Whether any element of this warp's part is stored. */
static __device__ __forceinline__ bool has_lower_part(const problem &p, const place &at)
{
    int row = at.row + warp_row();
    int col = at.col + warp_col();
    return row < p.n && col < p.n && col < row + tiling::warp_rows;
}

/* --- the loop over k --------------------------------------------------------------------------------------------- */

/* The products of one step, interleaved with the loads for the next one, number `step` of `stage`: issued together they
 * would fill the shared-memory queue. */
static __device__ __forceinline__ void multiply_step(sums &sum, const fragments &now, fragments &next, const reader &r,
                                                     int stage, int step)
{
    constexpr int products = tiling::products, across = tiling::warp_cols / 8;
#pragma unroll
    for (int e = 0; e < products; e++) {
        multiply_16_by_8(sum.v[e / across][e % across], now.a[e / across], now.b[e % across]);
        load_fragments(next, r, stage, step, e * tiling::loads / products, (e + 1) * tiling::loads / products);
    }
}

/* The copies of a k-tile as one group, empty beyond the last. */
static __device__ __forceinline__ void fetch_group(source &s, int stage, bool exists, bool inside)
{
    if (exists && inside) {
        fetch_stage<true>(s, stage);
    } else if (exists) {
        fetch_stage<false>(s, stage);
    }
    tchi_cp_async_commit();
}

/* sum = A B' of this warp's part. A stage is refilled once every warp has loaded its fragments. A warp without products
 * still copies for the others and takes part in their barriers. */
static __device__ __forceinline__ void accumulate(sums &sum, char *shared, const problem &p, const place &at)
{
    const int count = (p.k + tiling::ktile - 1) / tiling::ktile;
    const bool busy = has_lower_part(p, at);
    const bool inside = at.row + tiling::rows <= p.n && at.col + tiling::cols <= p.n && p.k % tiling::ktile == 0;
    const reader r = reader_of(shared);
    source s = source_of(shared, p, at);
    fragments f[2];
    int now = 0;
    for (int ktile = 0; ktile < tiling::stages; ktile++) {
        fetch_group(s, ktile * tiling::stage, ktile < count, inside);
    }
    tchi_cp_async_wait<tiling::stages - 1>();
    __syncthreads();
    load_fragments(f[0], r, 0, 0, 0, tiling::loads);
#pragma unroll 1
    for (int ktile = 0; ktile < count; ktile++) {
        const int next = now == (tiling::stages - 1) * tiling::stage ? 0 : now + tiling::stage;
        if (busy) {
            multiply_step(sum, f[0], f[1], r, now, 1);
        }
        tchi_cp_async_wait<tiling::stages - 2>();
        __syncthreads();
        fetch_group(s, now, ktile + tiling::stages < count, inside);
        if (busy) {
            multiply_step(sum, f[1], f[0], r, next, 0);
        }
        now = next;
    }
    tchi_cp_async_wait<0>();
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* Eight lanes hold eight rows of a column, four lanes eight columns of a row: stored from registers, an accumulator and
 * its mirror image fill 64-byte chunks, whole sectors, without synchronization. */

static __device__ __forceinline__ bool is_lower(const problem &p, int row, int col)
{
    return col <= row && row < p.n;
}

/* D at (row, col) and (row, col + 1), with D's data at `d`. `inner`: the whole tile is below the diagonal and inside
 * the matrix. */
template <bool inner>
static __device__ __forceinline__ double2 load_d(const problem &p, const double *d, int row, int col)
{
    const double *from = d + row * p.d.ld + col;
    if (inner && p.d_paired) {
        return *(const double2 *)from;
    }
    double x = inner || is_lower(p, row, col) ? from[0] : 0.0;
    double y = inner || is_lower(p, row, col + 1) ? from[1] : 0.0;
    return make_double2(x, y);
}

template <tch_scalar type>
static __device__ __forceinline__ void store_value(const problem &p, int64_t index, double value)
{
    tchi_cuda_store(type, p.c, index, p.c_stride, value);
}

/* Two neighbors of a row. */
template <tch_scalar type>
static __device__ __forceinline__ void put_pair(const problem &p, int64_t index, double2 value)
{
    if (type == TCH_SCALAR_F64 && p.c_paired) {
        *(double2 *)((double *)p.c + index) = value;
    } else {
        store_value<type>(p, index, value.x);
        store_value<type>(p, index + 1, value.y);
    }
}

/* The values of (row, col) and (row, col + 1), to both of their places. `first` is where C's matrix begins. */
template <tch_scalar type, bool inner>
static __device__ __forceinline__ void store_both(const problem &p, int64_t first, int row, int col, double2 value)
{
    const int64_t below = first + row * p.c_ld + col, above = first + col * p.c_ld + row;
    if constexpr (inner) {
        put_pair<type>(p, below, value);
        store_value<type>(p, above, value.x);
        store_value<type>(p, above + p.c_ld, value.y);
        return;
    }
    value.x += row == col ? p.c0 : 0.0;
    value.y += row == col + 1 ? p.c0 : 0.0;
    if (is_lower(p, row, col)) {
        store_value<type>(p, below, value.x);
    }
    if (is_lower(p, row, col + 1)) {
        store_value<type>(p, below + 1, value.y);
    }
    if (is_lower(p, row, col) && row != col) {
        store_value<type>(p, above, value.x);
    }
    if (is_lower(p, row, col + 1) && row != col + 1) {
        store_value<type>(p, above + p.c_ld, value.y);
    }
}

/* D is loaded for several groups of eight rows at a time, so that latencies overlap; for the rarer types, whose
 * conversions need registers, one. It may be C itself: each element is read by the thread that writes it, and the upper
 * triangle is not read. */
template <tch_scalar type, bool inner>
static __device__ __forceinline__ void store_sums(const sums &sum, const problem &p, const place &at)
{
    constexpr int across = tiling::warp_cols / 8, together = (type == TCH_SCALAR_F64 ? 2 : 1) * across;
    const int row = at.row + warp_row() + (int)threadIdx.x % 32 / 4;
    const int col = at.col + warp_col() + (int)threadIdx.x % 4 * 2;
    const int64_t first = (type == TCH_SCALAR_BF16X2 ? 2 : 1) * p.c_stride * at.matrix;
    const double *d = p.d.data + at.matrix * p.d.stride;
#pragma unroll
    for (int from = 0; from < tiling::warp_rows / 8 * across; from += together) {
        double2 add[together] = {};
        if (p.d.data != NULL) {
#pragma unroll
            for (int e = from; e < from + together; e++) {
                add[e - from] = load_d<inner>(p, d, row + e / across * 8, col + e % across * 8);
            }
        }
#pragma unroll
        for (int e = from; e < from + together; e++) {
            const double *v = sum.v[e / across / 2][e % across] + e / across % 2 * 2;
            double2 value = {p.c2 * v[0] + p.c1 * add[e - from].x, p.c2 * v[1] + p.c1 * add[e - from].y};
            store_both<type, inner>(p, first, row + e / across * 8, col + e % across * 8, value);
        }
    }
}

template <tch_scalar type>
static __device__ __forceinline__ void store_tile(const sums &sum, const problem &p, const place &at)
{
    if (at.row + tiling::rows <= p.n && at.col + tiling::cols <= at.row) {
        store_sums<type, true>(sum, p, at);
    } else if (has_lower_part(p, at)) {
        store_sums<type, false>(sum, p, at);
    }
}

static __device__ __forceinline__ void compute_tile(char *shared, const problem &p, const place &at)
{
    sums sum = {};
    accumulate(sum, shared, p, at);
    if (p.c_type == TCH_SCALAR_F64) {
        store_tile<TCH_SCALAR_F64>(sum, p, at);
    } else if (p.c_type == TCH_SCALAR_BF16X2) {
        store_tile<TCH_SCALAR_BF16X2>(sum, p, at);
    } else {
        store_tile<TCH_SCALAR_F32>(sum, p, at);
    }
}

#endif

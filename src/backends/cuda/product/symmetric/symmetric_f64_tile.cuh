/* One tile of the symmetric product in float64 on tensor cores: k-tiles of A's and B's rows come ahead by cp.async into
 * a ring of buffers in shared memory, warps multiply them, and each stores its sums and their mirror image from
 * registers. Before changing the way operands are read: A and B only have to agree on which k stands where, so
 * fragments take their k in pairs (see load_pair), and rows beyond n may hold anything, for nothing that comes of them
 * is stored. */
#ifndef TCHI_CUDA_SYMMETRIC_F64_TILE_CUH
#define TCHI_CUDA_SYMMETRIC_F64_TILE_CUH

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

/* How a tile of `rows` by `cols` is divided: warps of warp_rows by warp_cols, k-tiles of `k-tile` columns of A and B in
 * a ring of `stages`, products of mma_k columns at a time (8 or 16; below compute capability 9.0 always 4). `buffers`
 * is 2 where fragments are read one step ahead, for which the registers have to suffice. `blocks` of them are meant to
 * share a multiprocessor. */
template <int rows_, int cols_, int warp_rows_, int warp_cols_, int mma_k_, int ktile_, int stages_, int buffers_,
          int blocks_>
struct tiling {
    static constexpr int rows = rows_, cols = cols_, warp_rows = warp_rows_, warp_cols = warp_cols_;
    static constexpr int mma_k = mma_k_, ktile = ktile_, stages = stages_, buffers = buffers_, blocks = blocks_;
    static constexpr int warps = (rows / warp_rows) * (cols / warp_cols);
    static constexpr int threads = 32 * warps;
    static constexpr int steps = ktile / mma_k;
    static constexpr int stage = (rows + cols) * ktile;   /* doubles */
    static constexpr int copied = threads / (ktile / 2);  /* rows that the threads copy at a time, 16 bytes each */
    static constexpr int copies = (rows + cols) / copied; /* of each thread for a k-tile */
    /* A warp's in one step, and the pairs of operands that a lane reads for them. */
    static constexpr int products = (warp_rows / 16) * (warp_cols / 8);
    static constexpr int pairs = (warp_rows + warp_cols) / 8 * (mma_k / 8);
    static constexpr int shared_bytes = 8 * stages * stage;

    static_assert(rows % cols == 0, "rows of tiles end at the diagonal");
    static_assert(ktile % 16 == 0 && ktile % mma_k == 0 && warp_rows % 16 == 0 && warp_cols % 8 == 0, "whole products");
    static_assert(copied % 2 == 0 && cols % copied == 0,
                  "copies have no remainder, and a thread keeps its permutation");
    static_assert(buffers == 1 || steps % 2 == 0, "the two fragments take turns");
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
    int c_paired, d_paired; /* elements 2 j and 2 j + 1 of a row lie aligned for one access */
    int n, k;
    double c0, c1, c2;
    int64_t tiles; /* of one matrix */
    int64_t whole; /* tiles, of all matrices, that are computed whole; later ones are cut */
} problem;

/* The first row and column of a tile of C. */
typedef struct place {
    int matrix, row, col;
} place;

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* Where the 16 bytes number `chunk` of a k-tile's row lie: odd rows have their halves of 128 bytes exchanged. Eight
 * lanes that read four chunks of one row and four of the next then meet all banks once. */
static __device__ __forceinline__ int swizzled(int row, int chunk)
{
    return chunk ^ ((row & 1) << 2);
}

/* Copy number `copy` of a k-tile by this thread: 16 bytes of a row, A's rows before B's. Columns from k on are read as
 * zeros, also in k-tiles that begin beyond. Rows from n on repeat the last one: they only reach elements of the tile
 * that are not stored. */
template <class T>
static __device__ __forceinline__ void fetch_part(double *shared, const problem &p, const place &at, int ktile,
                                                  int copy)
{
    constexpr int chunks = T::ktile / 2;
    const bool of_a = copy * T::copied < T::rows;
    const operand &from = of_a ? p.a : p.b;
    int thread = tchi_thread_index();
    int chunk = thread % chunks;
    int row = copy * T::copied + thread / chunks;
    int source = of_a ? at.row + row : at.col + row - T::rows;
    int column = ktile * T::ktile + 2 * chunk;
    int bytes = 8 * min(max(p.k - column, 0), 2);
    int64_t offset = at.matrix * from.stride + min(source, p.n - 1) * from.ld + column;
    double *stage = shared + ktile % T::stages * T::stage;
    tchi_cp_async_16(stage + row * T::ktile + 2 * swizzled(row, chunk), from.data + (bytes > 0 ? offset : 0), bytes);
}

/* Copies number `first` to `end` - 1. */
template <class T>
static __device__ __forceinline__ void fetch(double *shared, const problem &p, const place &at, int ktile, int first,
                                             int end)
{
#pragma unroll
    for (int copy = first; copy < end; copy++) {
        fetch_part<T>(shared, p, at, ktile, copy);
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* What one warp multiplies in one step: pairs along k of its rows of A and B. */
template <class T> struct fragments {
    double2 a[T::warp_rows / 8][T::mma_k / 8];
    double2 b[T::warp_cols / 8][T::mma_k / 8];
};

/* Element (row, col) of a warp's part of the tile is in sum[row / 16][col / 8], at 2 (row / 8 % 2) + col % 2 of the
 * lane 4 (row % 8) + col / 2 % 4: the layout of every float64 mma. */
template <class T> struct sums {
    double v[T::warp_rows / 16][T::warp_cols / 8][4];
};

template <class T> static __device__ __forceinline__ int warp_row()
{
    return tchi_thread_index() / 32 / (T::cols / T::warp_cols) * T::warp_rows;
}

template <class T> static __device__ __forceinline__ int warp_col()
{
    return tchi_thread_index() / 32 % (T::cols / T::warp_cols) * T::warp_cols;
}

/* Where a lane reads one step's operands: its first rows of A and B, and the columns' place in them. */
typedef struct reader {
    const double *a, *b;
    int offset;
} reader;

template <class T> static __device__ __forceinline__ reader reader_of(const double *stage, int step)
{
    int group = tchi_thread_index() % 32 / 4;
    int chunk = step * (T::mma_k / 2) + tchi_thread_index() % 4;
    reader r;
    r.a = stage + (warp_row<T>() + group) * T::ktile;
    r.b = stage + (T::rows + warp_col<T>() + group) * T::ktile;
    r.offset = 2 * swizzled(group, chunk);
    return r;
}

/* Pair number `pair` of a step's fragments, B's before A's, since all rows of A wait for them. The instructions want k
 * = t, t + 4, t + 8, ... from lane 4 g + t, for row g. Any order of k serves that is the same in A and in B; with 2 t,
 * 2 t + 1 of each eight a lane reads 16 bytes at a time. */
template <class T> static __device__ __forceinline__ void load_pair(fragments<T> &f, const reader &r, int pair)
{
    constexpr int halves = T::mma_k / 8, of_b = T::warp_cols / 8;
    int y = pair / halves, h = pair % halves;
    if (y < of_b) {
        f.b[y][h] = tchi_load_shared_pair(r.b + 8 * y * T::ktile + (r.offset ^ 8 * h));
    } else {
        f.a[y - of_b][h] = tchi_load_shared_pair(r.a + 8 * (y - of_b) * T::ktile + (r.offset ^ 8 * h));
    }
}

template <class T>
static __device__ __forceinline__ void load_pairs(fragments<T> &f, const reader &r, int first, int end)
{
#pragma unroll
    for (int pair = first; pair < end; pair++) {
        load_pair<T>(f, r, pair);
    }
}

/* 16 by 8 sums, from rows `low` and `low` + 8 of A and one row of B per group of lanes. */
template <int mma_k>
static __device__ __forceinline__ void multiply_16_by_8(double *sum, const double2 *low, const double2 *high,
                                                        const double2 *b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma unroll
    for (int h = 0; h < mma_k / 8; h++) {
        tchi_mma_f64_8x8x4(sum, low[h].x, b[h].x);
        tchi_mma_f64_8x8x4(sum, low[h].y, b[h].y);
        tchi_mma_f64_8x8x4(sum + 2, high[h].x, b[h].x);
        tchi_mma_f64_8x8x4(sum + 2, high[h].y, b[h].y);
    }
#else
    if constexpr (mma_k == 16) {
        const double a[8] = {low[0].x, high[0].x, low[0].y, high[0].y, low[1].x, high[1].x, low[1].y, high[1].y};
        const double columns[4] = {b[0].x, b[0].y, b[1].x, b[1].y};
        tchi_mma_f64_16x8x16(sum, a, columns);
    } else {
        const double a[4] = {low[0].x, high[0].x, low[0].y, high[0].y};
        const double columns[2] = {b[0].x, b[0].y};
        tchi_mma_f64_16x8x8(sum, a, columns);
    }
#endif
}

template <class T> static __device__ __forceinline__ void multiply_one(sums<T> &sum, const fragments<T> &f, int product)
{
    constexpr int across = T::warp_cols / 8;
    int i = product / across, j = product % across;
    multiply_16_by_8<T::mma_k>(sum.v[i][j], f.a[2 * i], f.a[2 * i + 1], f.b[j]);
}

/* Whether any element of this warp's part is stored. */
template <class T> static __device__ __forceinline__ bool has_lower_part(const problem &p, const place &at)
{
    int row = at.row + warp_row<T>();
    int col = at.col + warp_col<T>();
    return row < p.n && col < p.n && col < row + T::warp_rows;
}

/* The k-tile that is multiplied, with the one whose buffer is free to be filled meanwhile. */
typedef struct ktiles {
    const double *now, *next;
    int fetched;
} ktiles;

/* All warps have read what they need of the current k-tile, and the copies of the next one have arrived. */
template <class T> static __device__ __forceinline__ void leave_ktile()
{
    tchi_cp_async_commit();
    tchi_cp_async_wait<T::stages - 2>();
    __syncthreads();
}

/* The copies of a later k-tile that are made in one step: all steps but the last have a share. */
template <class T> static __device__ __forceinline__ int copies_until(int step)
{
    constexpr int fetching = T::steps - 1;
    return min(step, fetching) * T::copies / fetching;
}

/* The products of one step, between them the loads for the step after it and some copies for a later k-tile: in one
 * heap they would keep the queue to shared memory full, and the products behind them waiting. */
template <class T>
static __device__ __forceinline__ void multiply_step(sums<T> &sum, const fragments<T> &now, fragments<T> &next,
                                                     double *shared, const problem &p, const place &at, const ktiles &s,
                                                     int step)
{
    constexpr int products = T::products;
    const bool last = step == T::steps - 1;
    const int first = copies_until<T>(step);
    const int copies = copies_until<T>(step + 1) - first;
    reader r = reader_of<T>(last ? s.next : s.now, last ? 0 : step + 1);
#pragma unroll
    for (int e = 0; e < products; e++) {
        multiply_one<T>(sum, now, e);
        load_pairs<T>(next, r, e * T::pairs / products, (e + 1) * T::pairs / products);
        fetch<T>(shared, p, at, s.fetched, first + e * copies / products, first + (e + 1) * copies / products);
    }
}

/* f[0] holds the first step's fragments on entry and those of the next k-tile on return. A warp without products still
 * copies for the others, and all meet at the same barrier. */
template <class T>
static __device__ __forceinline__ void multiply_ktile_ahead(sums<T> &sum, fragments<T> *f, double *shared,
                                                            const problem &p, const place &at, const ktiles &s,
                                                            bool busy)
{
#pragma unroll
    for (int step = 0; step < T::steps; step++) {
        if (step == T::steps - 1) {
            leave_ktile<T>();
        }
        if (busy) {
            multiply_step<T>(sum, f[step % 2], f[(step + 1) % 2], shared, p, at, s, step);
        } else {
            fetch<T>(shared, p, at, s.fetched, copies_until<T>(step), copies_until<T>(step + 1));
        }
    }
}

/* Without fragments ahead: other warps have to fill the time in which this one loads. */
template <class T>
static __device__ __forceinline__ void multiply_ktile(sums<T> &sum, fragments<T> *f, double *shared, const problem &p,
                                                      const place &at, const ktiles &s, bool busy)
{
    tchi_cp_async_wait<T::stages - 2>();
    __syncthreads();
    fetch<T>(shared, p, at, s.fetched, 0, T::copies);
    tchi_cp_async_commit();
#pragma unroll
    for (int step = 0; step < T::steps && busy; step++) {
        load_pairs<T>(f[0], reader_of<T>(s.now, step), 0, T::pairs);
#pragma unroll
        for (int e = 0; e < T::products; e++) {
            multiply_one<T>(sum, f[0], e);
        }
    }
}

/* sum = A B' of this warp's part. A k-tile is fetched into the buffer of the k-tile before the current one, which every
 * warp has left at the barrier; one group of copies is committed per k-tile, of zeros beyond the last, so that the
 * count to wait for stays the same to the end. */
template <class T>
static __device__ __forceinline__ void accumulate(sums<T> &sum, double *shared, const problem &p, const place &at)
{
    const int count = (p.k + T::ktile - 1) / T::ktile;
    const bool busy = has_lower_part<T>(p, at);
    fragments<T> f[T::buffers];
    for (int ktile = 0; ktile < T::stages - 1; ktile++) {
        fetch<T>(shared, p, at, ktile, 0, T::copies);
        tchi_cp_async_commit();
    }
    if constexpr (T::buffers == 2) {
        tchi_cp_async_wait<T::stages - 2>();
        __syncthreads();
        load_pairs<T>(f[0], reader_of<T>(shared, 0), 0, T::pairs);
    }
#pragma unroll 1
    for (int ktile = 0; ktile < count; ktile++) {
        const ktiles s = {shared + ktile % T::stages * T::stage, shared + (ktile + 1) % T::stages * T::stage,
                          ktile + T::stages - 1};
        if constexpr (T::buffers == 1) {
            multiply_ktile<T>(sum, f, shared, p, at, s, busy);
        } else {
            multiply_ktile_ahead<T>(sum, f, shared, p, at, s, busy);
        }
    }
    tchi_cp_async_wait<0>();
}

/* --- the result -------------------------------------------------------------------------------------------------- */

/* Eight lanes hold eight rows of a column, four lanes eight columns of a row: stored from registers, either image of an
 * accumulator fills chunks of 64 bytes, whole sectors, and no warp has to wait for another. */

static __device__ __forceinline__ bool is_lower(const problem &p, int row, int col)
{
    return col <= row && row < p.n;
}

/* D at (row, col) and (row, col + 1); D's data begin at `d`. `inner` where the whole tile lies below the diagonal and
 * inside the matrix. */
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

template <tch_scalar type> static __device__ __forceinline__ void put(const problem &p, int64_t index, double value)
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
        put<type>(p, index, value.x);
        put<type>(p, index + 1, value.y);
    }
}

/* The values of (row, col) and (row, col + 1), to both of their places. `first` is where C's matrix begins. */
template <tch_scalar type, bool inner>
static __device__ __forceinline__ void store_both(const problem &p, int64_t first, int row, int col, double2 value)
{
    const int64_t below = first + row * p.c_ld + col, above = first + col * p.c_ld + row;
    if constexpr (inner) {
        put_pair<type>(p, below, value);
        put<type>(p, above, value.x);
        put<type>(p, above + p.c_ld, value.y);
        return;
    }
    value.x += row == col ? p.c0 : 0.0;
    value.y += row == col + 1 ? p.c0 : 0.0;
    if (is_lower(p, row, col)) {
        put<type>(p, below, value.x);
    }
    if (is_lower(p, row, col + 1)) {
        put<type>(p, below + 1, value.y);
    }
    if (is_lower(p, row, col) && row != col) {
        put<type>(p, above, value.x);
    }
    if (is_lower(p, row, col + 1) && row != col + 1) {
        put<type>(p, above + p.c_ld, value.y);
    }
}

/* D is asked for several groups of eight rows at a time, so that its latencies overlap; for the rarer types, whose
 * conversions need registers, one. It may be C itself, since an element is read by the thread that writes it and the
 * upper triangle is not read. */
template <class T, tch_scalar type, bool inner>
static __device__ __forceinline__ void store_sums(const sums<T> &sum, const problem &p, const place &at)
{
    constexpr int across = T::warp_cols / 8, together = (type == TCH_SCALAR_F64 ? 2 : 1) * across;
    const int row = at.row + warp_row<T>() + (int)threadIdx.x % 32 / 4;
    const int col = at.col + warp_col<T>() + (int)threadIdx.x % 4 * 2;
    const int64_t first = (type == TCH_SCALAR_BF16X2 ? 2 : 1) * p.c_stride * at.matrix;
    const double *d = p.d.data + at.matrix * p.d.stride;
#pragma unroll
    for (int from = 0; from < T::warp_rows / 8 * across; from += together) {
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

template <class T, tch_scalar type>
static __device__ __forceinline__ void store_tile(const sums<T> &sum, const problem &p, const place &at)
{
    if (at.row + T::rows <= p.n && at.col + T::cols <= at.row) {
        store_sums<T, type, true>(sum, p, at);
    } else if (has_lower_part<T>(p, at)) {
        store_sums<T, type, false>(sum, p, at);
    }
}

template <class T>
static __device__ __forceinline__ void compute_tile(double *shared, const problem &p, const place &at)
{
    sums<T> sum = {};
    accumulate<T>(sum, shared, p, at);
    if (p.c_type == TCH_SCALAR_F64) {
        store_tile<T, TCH_SCALAR_F64>(sum, p, at);
    } else if (p.c_type == TCH_SCALAR_BF16X2) {
        store_tile<T, TCH_SCALAR_BF16X2>(sum, p, at);
    } else {
        store_tile<T, TCH_SCALAR_F32>(sum, p, at);
    }
}

#endif

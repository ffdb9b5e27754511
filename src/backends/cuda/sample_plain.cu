/* Norms and squares of single samples' gradients by plain multiplications, in float64 for float64 and in float32 for the
 * rest: for every type, size and GPU. Where speed matters, sample_norms.cu and sample_squares.cu have found a faster way
 * before; where float32 may not be rounded, this is the way. Nothing but a tile of a gradient, or of the two Gram
 * matrices, is ever formed. */
#include "sample_norms.h"

#include "elements.cuh"

#define TILE TCHI_SAMPLE_PLAIN_TILE
#define SLAB 16

/* Rows and columns of a tile that a thread computes, in fours: 8 of each, or 4 of float64; threads along each side of a
 * block; elements of a slab that a thread brings. */
template <typename real> struct shape {
    static constexpr int each = sizeof(real) == 4 ? 8 : 4;
    static constexpr int side = TILE / each;
    static constexpr int threads = side * side;
    static constexpr int held = TILE * SLAB / threads;
};

/* X Y' of rows, or X' Y of columns; element (m, k) of X is m across and k along the contraction. */
typedef struct factor {
    tchi_cuda_operand m;
    int64_t count;
} factor;

typedef struct product {
    factor x, y;
    int64_t depth;
} product;

/* Steps of the contraction one after the other, so that a thread has its four rows and its four columns together. */
template <typename real> struct slabs {
    real x[SLAB][TILE + 4], y[SLAB][TILE + 4];
};

template <typename real> struct __align__(16) four_of
{
    real v[4];
};

/* A thread's part of a tile, in rows and columns row_of(i) and row_of(j) from its own corner on. */
template <typename real> struct part {
    real v[shape<real>::each][shape<real>::each];
};

/* Threads go along what lies together in memory. */
template <bool by_rows> static __device__ __forceinline__ int across_of(int e)
{
    return by_rows ? e / SLAB : e % TILE;
}

template <bool by_rows> static __device__ __forceinline__ int along_of(int e)
{
    return by_rows ? e % SLAB : e / TILE;
}

template <typename real, bool by_rows>
static __device__ void fetch(real (&held)[shape<real>::held], const factor &f, int64_t depth, int64_t matrix,
                             int64_t first, int64_t from)
{
    int64_t i = first + across_of<by_rows>((int)threadIdx.x), j = from + along_of<by_rows>((int)threadIdx.x);
    const char *at = by_rows ? tchi_cuda_at(f.m, matrix, i, j) : tchi_cuda_at(f.m, matrix, j, i);
    int64_t lines = (by_rows ? f.count : depth) - (by_rows ? i : j);
    bool inside = by_rows ? j < depth : i < f.count;
    constexpr int step = by_rows ? shape<real>::threads / SLAB : shape<real>::threads / TILE;
#pragma unroll
    for (int h = 0; h < shape<real>::held; h++) {
        held[h] = inside && h * step < lines ? tchi_cuda_load<real>(f.m.type, at, h * step * f.m.ld, 0) : (real)0;
    }
}

template <typename real, bool by_rows>
static __device__ void put(real (&slab)[SLAB][TILE + 4], const real (&held)[shape<real>::held])
{
#pragma unroll
    for (int h = 0; h < shape<real>::held; h++) {
        int e = (int)threadIdx.x + h * shape<real>::threads;
        slab[along_of<by_rows>(e)][across_of<by_rows>(e)] = held[h];
    }
}

/* Fours of a thread are as far apart as all threads' fours are wide, so that neighbours read neighbouring fours. */
template <typename real> static __device__ __forceinline__ int row_of(int i)
{
    return i / 4 * (4 * shape<real>::side) + i % 4;
}

template <typename real>
static __device__ __forceinline__ void read_fours(real (&values)[shape<real>::each], const real *line)
{
#pragma unroll
    for (int i = 0; i < shape<real>::each; i += 4) {
        four_of<real> four = *(const four_of<real> *)(line + row_of<real>(i));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[i + k] = four.v[k];
        }
    }
}

template <typename real> static __device__ __forceinline__ void multiply_slab(part<real> &sum, const slabs<real> &s)
{
    constexpr int each = shape<real>::each;
    int x = 4 * ((int)threadIdx.x % shape<real>::side), y = 4 * ((int)threadIdx.x / shape<real>::side);
#pragma unroll 4
    for (int k = 0; k < SLAB; k++) {
        real rows[each], cols[each];
        read_fours<real>(rows, &s.x[k][y]);
        read_fours<real>(cols, &s.y[k][x]);
#pragma unroll
        for (int e = 0; e < each * each; e++) {
            sum.v[e / each][e % each] += rows[e / each] * cols[e % each];
        }
    }
}

/* The tile at (row, col). The next slab is on its way while one is multiplied. */
template <typename real, bool by_rows>
static __device__ void multiply(part<real> &sum, slabs<real> &s, const product &p, int64_t matrix, int64_t row,
                                int64_t col)
{
    real x[shape<real>::held], y[shape<real>::held];
#pragma unroll
    for (int e = 0; e < shape<real>::each * shape<real>::each; e++) {
        sum.v[e / shape<real>::each][e % shape<real>::each] = (real)0;
    }
    fetch<real, by_rows>(x, p.x, p.depth, matrix, row, 0);
    fetch<real, by_rows>(y, p.y, p.depth, matrix, col, 0);
    for (int64_t from = 0; from < p.depth; from += SLAB) {
        __syncthreads(); /* the slab before has been used */
        put<real, by_rows>(s.x, x);
        put<real, by_rows>(s.y, y);
        __syncthreads();
        if (from + SLAB < p.depth) {
            fetch<real, by_rows>(x, p.x, p.depth, matrix, row, from + SLAB);
            fetch<real, by_rows>(y, p.y, p.depth, matrix, col, from + SLAB);
        }
        multiply_slab<real>(sum, s);
    }
}

static product product_of(const tch_matrices *x, const tch_matrices *y, bool by_rows)
{
    product p;
    p.x = {tchi_cuda_operand_of(x), by_rows ? x->rows : x->cols};
    p.y = {tchi_cuda_operand_of(y), by_rows ? y->rows : y->cols};
    p.depth = by_rows ? x->cols : x->rows;
    return p;
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

typedef struct norms_problem {
    product first, second; /* G' A; or, in Gram form, A A' and G G' */
    int64_t across;        /* tiles in a row of G' A */
    int64_t tiles, items;  /* of one sample, of all */
    double *parts;
} norms_problem;

/* Tile form: 2 T p d operations a sample; Gram form: T^2 (p + d), half of the matrices. A tile reads 2 TILE elements for
 * every step along its contraction. */
template <typename real, bool gram>
static __global__ void __launch_bounds__(shape<real>::threads) sample_norms_plain(const norms_problem p)
{
    constexpr int each = shape<real>::each;
    __shared__ slabs<real> s;
    __shared__ double sums[32];
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t matrix = item / p.tiles, tile = item % p.tiles;
        int64_t above = gram ? tchi_lower_row(tile) : tile / p.across;
        int64_t left = gram ? tile - tchi_lower_tiles(above) : tile % p.across;
        part<real> one, other;
        multiply<real, gram>(one, s, p.first, matrix, above * TILE, left * TILE);
        if (gram) {
            multiply<real, true>(other, s, p.second, matrix, above * TILE, left * TILE);
        }
        double total = 0.0;
#pragma unroll
        for (int e = 0; e < each * each; e++) {
            real value = one.v[e / each][e % each];
            total += (double)value * (double)(gram ? other.v[e / each][e % each] : value);
        }
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, shape<real>::threads, sums);
        if (threadIdx.x == 0) {
            p.parts[item] = gram && above != left ? 2.0 * total : total;
        }
    }
}

template <typename real> static void launch_norms(const tchi_cuda_state *state, const norms_problem &p, bool gram)
{
    if (gram) {
        sample_norms_plain<real, true><<<tchi_cuda_grid(p.items), shape<real>::threads, 0, state->stream>>>(p);
    } else {
        sample_norms_plain<real, false><<<tchi_cuda_grid(p.items), shape<real>::threads, 0, state->stream>>>(p);
    }
}

tch_status tchi_cuda_sample_norms_plain(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        bool gram, double *parts, int64_t *tiles)
{
    norms_problem p = {};
    p.first = gram ? product_of(a, a, true) : product_of(g, a, false);
    p.second = gram ? product_of(g, g, true) : p.first;
    p.across = tchi_cuda_ceil_div(a->cols, TILE);
    p.tiles = gram ? tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE)) : p.across * tchi_cuda_ceil_div(g->cols, TILE);
    p.items = p.tiles * a->batch;
    p.parts = parts;
    *tiles = p.tiles;
    if (a->type == TCH_SCALAR_F64) {
        launch_norms<double>(state, p, gram);
    } else {
        launch_norms<float>(state, p, gram);
    }
    return tchi_cuda_launched(state, "sample_norms_plain");
}

/* --- squares ------------------------------------------------------------------------------------------------------ */

typedef struct squares_problem {
    product gradient;
    tchi_cuda_operand out;
    int64_t samples, groups;
    int64_t across, tiles, items;
    double scale, beta;
} squares_problem;

template <typename real>
static __device__ void store(const squares_problem &p, int64_t group, int64_t i, int64_t j, real value)
{
    if (i < p.gradient.x.count && j < p.gradient.y.count) {
        char *to = tchi_cuda_at(p.out, group, i, j);
        real before = p.beta == 0.0 ? (real)0 : tchi_cuda_load<real>(p.out.type, to, 0, 0);
        tchi_cuda_store<real>(p.out.type, to, 0, 0, (real)p.beta * before + (real)p.scale * value);
    }
}

/* 2 T p d operations a sample; out is read and written once. */
template <typename real>
static __global__ void __launch_bounds__(shape<real>::threads) sample_squares_plain(const squares_problem p)
{
    constexpr int each = shape<real>::each;
    __shared__ slabs<real> s;
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t group = item / p.tiles, tile = item % p.tiles;
        int64_t row = tile / p.across * TILE, col = tile % p.across * TILE;
        part<real> squares = {};
        for (int64_t b = 0; b < p.samples; b++) {
            part<real> sum;
            multiply<real, false>(sum, s, p.gradient, b * p.groups + group, row, col);
#pragma unroll
            for (int e = 0; e < each * each; e++) {
                squares.v[e / each][e % each] += sum.v[e / each][e % each] * sum.v[e / each][e % each];
            }
        }
#pragma unroll
        for (int e = 0; e < each * each; e++) {
            int y = 4 * ((int)threadIdx.x / shape<real>::side) + row_of<real>(e / each);
            int x = 4 * ((int)threadIdx.x % shape<real>::side) + row_of<real>(e % each);
            store<real>(p, group, row + y, col + x, squares.v[e / each][e % each]);
        }
    }
}

tch_status tchi_cuda_sample_squares_plain(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                          double scale, double beta, const tch_matrices *out)
{
    squares_problem p = {};
    p.gradient = product_of(g, a, false);
    p.out = tchi_cuda_operand_of(out);
    p.groups = out->batch;
    p.samples = a->batch / out->batch;
    p.across = tchi_cuda_ceil_div(a->cols, TILE);
    p.tiles = p.across * tchi_cuda_ceil_div(g->cols, TILE);
    p.items = p.tiles * p.groups;
    p.scale = scale;
    p.beta = beta;
    if (out->type == TCH_SCALAR_F64) {
        sample_squares_plain<double><<<tchi_cuda_grid(p.items), shape<double>::threads, 0, state->stream>>>(p);
    } else {
        sample_squares_plain<float><<<tchi_cuda_grid(p.items), shape<float>::threads, 0, state->stream>>>(p);
    }
    return tchi_cuda_launched(state, "sample_squares_plain");
}

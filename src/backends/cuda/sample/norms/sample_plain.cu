/* Norms and squares of per-sample gradients on CUDA cores, in float64 for float64 and in float32 for the rest: for
 * every type, size and GPU. The fallback of sample_norms.cu and sample_norms_mma.cu, and the only kernel if float32
 * must not be rounded. Only a tile of a gradient, or of the two Gram matrices, is formed at a time.
 *
 *     for (i = 0; i < p; i++) {
 *         for (j = 0; j < d; j++) {
 *             real sum = sum over s of g[s][i] * a[s][j];     // of one sample
 *             norm += sum * sum;                              // sample_norms_plain, in tile form
 *             out[i][j] += scale * sum * sum;                 // sample_squares_plain, over all samples
 *         }
 *     }
 *     norm = sum over s and u of dot(a[s], a[u]) * dot(g[s], g[u]);   // sample_norms_plain, in Gram form */
#include "sample_norms.h"

#include "backends/cuda/device/elements.cuh"

#define TILE TCHI_SAMPLE_PLAIN_TILE
/* Work of a block. A thread computes 8 rows and 8 columns of a tile in vec4s, or 4 of each in float64, and `groups`
 * groups of threads each compute the whole tile from their share of every k-tile's steps: with few samples of few
 * positions there are too few tiles to occupy a GPU with one group per block. */
template <typename real, int groups> struct shape {
    static constexpr int each = sizeof(real) == 4 ? 8 : 4;
    static constexpr int side = TILE / each;  /* threads along each side of a tile */
    static constexpr int group = side * side; /* threads */
    static constexpr int threads = groups * group;
    static constexpr int depth = groups == 1 ? 16 : 8 * groups; /* steps of the contraction in a k-tile */
    static constexpr int vec4s = TILE * depth / 4 / threads;    /* of a k-tile that a thread loads */
};

/* Norms of float32 and narrower; bench/logs/cuda_sample_norms.md has the time with one group. */
template <typename real> static constexpr int groups_of = sizeof(real) == 4 ? 4 : 1;

/* X Y' of rows, or X' Y of columns; k is along the contraction. `ones` is the index of the bias column after those of
 * A, or -1. */
typedef struct factor {
    tchi_cuda_operand m;
    int64_t count, ones;
} factor;

typedef struct product {
    factor x, y;
    int64_t depth;
} product;

/* Contraction-major, so that a thread's four rows and four columns are contiguous. Between products groups exchange
 * sums here. */
template <typename real, int groups> struct ktiles {
    real x[shape<real, groups>::depth][TILE + 4], y[shape<real, groups>::depth][TILE + 4];
};

template <typename real> struct __align__(16) four_of
{
    real v[4];
};

/* A thread's part of a tile: rows and columns row_of(i) and row_of(j) from its corner on. */
template <typename real> struct part {
    static constexpr int each = shape<real, 1>::each;
    real v[each][each];
};

/* --- k-tiles ----------------------------------------------------------------------------------------------------- */

/* Position of four number f in a k-tile. By rows it is four steps of one row, eight rows in sequence, which limits bank
 * conflicts to two; by columns it is four columns of one step. */
template <int depth, bool by_rows> static __device__ __forceinline__ int across_of(int f)
{
    return by_rows ? f / (2 * depth) * 8 + f % 8 : f % (TILE / 4) * 4;
}

template <int depth, bool by_rows> static __device__ __forceinline__ int along_of(int f)
{
    return by_rows ? f / 8 % (depth / 4) * 4 : f / (TILE / 4);
}

/* How many of `want` elements from `at` on are before `end`. */
static __device__ __forceinline__ int count_inside(int64_t at, int64_t end, int want)
{
    return end - at < want ? (int)(end > at ? end - at : 0) : want;
}

/* A thread's part of a k-tile, and the k-tile. Named because clang, which compiles this file for tests, parses such an
 * array parameter as an expression. */
template <typename real, int groups> using held_vec4s = tchi_cuda_vec4<real>[shape<real, groups>::vec4s];
template <typename real, int groups> using ktile_of = real[shape<real, groups>::depth][TILE + 4];

/* Without run-time indexing, so that the four stay in registers. */
template <typename real> static __device__ __forceinline__ void put_one(tchi_cuda_vec4<real> *four, int place)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        four->v[e] = e == place ? (real)1 : four->v[e];
    }
}

template <typename real, int groups, bool by_rows, bool with_ones = false>
static __device__ void fetch_operand(held_vec4s<real, groups> &held, const factor &f, int64_t depth, int64_t matrix,
                                     int64_t first, int64_t from)
{
    constexpr int steps = shape<real, groups>::depth;
#pragma unroll
    for (int h = 0; h < shape<real, groups>::vec4s; h++) {
        int four = (int)threadIdx.x + h * shape<real, groups>::threads;
        int64_t m = first + across_of<steps, by_rows>(four);
        int64_t k = from + along_of<steps, by_rows>(four);
        int count =
            by_rows ? (m < f.count ? count_inside(k, depth, 4) : 0) : (k < depth ? count_inside(m, f.count, 4) : 0);
        held[h] = tchi_cuda_load_vec4<real>(f.m, matrix, by_rows ? m : k, by_rows ? k : m, count);
        if (with_ones && m <= f.ones && f.ones < m + 4) {
            put_one(&held[h], (int)(f.ones - m));
        }
    }
}

template <typename real, int groups, bool by_rows>
static __device__ void store_ktile(ktile_of<real, groups> &ktile, const held_vec4s<real, groups> &held)
{
    constexpr int steps = shape<real, groups>::depth;
#pragma unroll
    for (int h = 0; h < shape<real, groups>::vec4s; h++) {
        int four = (int)threadIdx.x + h * shape<real, groups>::threads;
        int m = across_of<steps, by_rows>(four);
        int k = along_of<steps, by_rows>(four);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            ktile[by_rows ? k + e : k][by_rows ? m : m + e] = held[h].v[e];
        }
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* A thread's vec4s are interleaved with those of the other threads, so that neighbors read adjacent vec4s. */
template <typename real> static __device__ __forceinline__ int row_of(int i)
{
    return i / 4 * (4 * shape<real, 1>::side) + i % 4;
}

/* The thread's corner. */
template <typename real> static __device__ __forceinline__ int first_row()
{
    return 4 * ((int)threadIdx.x % shape<real, 1>::group / shape<real, 1>::side);
}

template <typename real> static __device__ __forceinline__ int first_col()
{
    return 4 * ((int)threadIdx.x % shape<real, 1>::side);
}

template <typename real>
static __device__ __forceinline__ void read_vec4(real (&values)[part<real>::each], const real *line)
{
#pragma unroll
    for (int i = 0; i < part<real>::each; i += 4) {
        four_of<real> four = *(const four_of<real> *)(line + row_of<real>(i));
#pragma unroll
        for (int k = 0; k < 4; k++) {
            values[i + k] = four.v[k];
        }
    }
}

/* The group's share of a k-tile. */
template <typename real, int groups>
static __device__ __forceinline__ void multiply_ktile(part<real> &sum, const ktiles<real, groups> &s)
{
    constexpr int each = part<real>::each;
    constexpr int steps = shape<real, groups>::depth / groups;
    int first = (int)threadIdx.x / shape<real, groups>::group * steps;
#pragma unroll 8
    for (int k = first; k < first + steps; k++) {
        real rows[each], cols[each];
        read_vec4<real>(rows, &s.x[k][first_row<real>()]);
        read_vec4<real>(cols, &s.y[k][first_col<real>()]);
#pragma unroll
        for (int e = 0; e < each * each; e++) {
            sum.v[e / each][e % each] += rows[e / each] * cols[e % each];
        }
    }
}

/* Adds the sums of the other groups, in order, to those of the first. */
template <typename real, int groups> static __device__ void gather(part<real> &sum, ktiles<real, groups> &s)
{
    constexpr int each = part<real>::each;
    constexpr int threads = shape<real, groups>::group;
    static_assert(groups == 1 || sizeof s >= (size_t)threads * sizeof sum, "the sums of a group fit");
    int group = (int)threadIdx.x / threads;
    real *mine = &s.x[0][0] + threadIdx.x % threads;
    for (int g = 1; g < groups; g++) {
        __syncthreads(); /* the previous values have been read */
        if (group == g) {
#pragma unroll
            for (int e = 0; e < each * each; e++) {
                mine[e * threads] = sum.v[e / each][e % each];
            }
        }
        __syncthreads();
        if (group == 0) {
#pragma unroll
            for (int e = 0; e < each * each; e++) {
                sum.v[e / each][e % each] += mine[e * threads];
            }
        }
    }
}

/* The tile at (row, col), in the threads of the first group. The next k-tile is in flight while one is multiplied. */
template <typename real, int groups, bool by_rows, bool with_ones = false>
static __device__ void multiply_plain_tile(part<real> &sum, ktiles<real, groups> &s, const product &p, int64_t matrix,
                                           int64_t row, int64_t col)
{
    constexpr int each = part<real>::each;
    constexpr int steps = shape<real, groups>::depth;
    tchi_cuda_vec4<real> x[shape<real, groups>::vec4s], y[shape<real, groups>::vec4s];
#pragma unroll
    for (int e = 0; e < each * each; e++) {
        sum.v[e / each][e % each] = (real)0;
    }
    fetch_operand<real, groups, by_rows>(x, p.x, p.depth, matrix, row, 0);
    fetch_operand<real, groups, by_rows, with_ones>(y, p.y, p.depth, matrix, col, 0);
    for (int64_t from = 0; from < p.depth; from += steps) {
        __syncthreads(); /* the previous k-tile is no longer in use */
        store_ktile<real, groups, by_rows>(s.x, x);
        store_ktile<real, groups, by_rows>(s.y, y);
        __syncthreads();
        if (from + steps < p.depth) {
            fetch_operand<real, groups, by_rows>(x, p.x, p.depth, matrix, row, from + steps);
            fetch_operand<real, groups, by_rows, with_ones>(y, p.y, p.depth, matrix, col, from + steps);
        }
        multiply_ktile<real, groups>(sum, s);
    }
    gather<real, groups>(sum, s);
}

static product product_of(const tch_matrices *x, const tch_matrices *y, bool by_rows)
{
    product p;
    p.x = {tchi_cuda_operand_of(x), by_rows ? x->rows : x->cols, -1};
    p.y = {tchi_cuda_operand_of(y), by_rows ? y->rows : y->cols, -1};
    p.depth = by_rows ? x->cols : x->rows;
    return p;
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

typedef struct norms_problem {
    product first, second; /* G' A; or, in Gram form, A A' and G G' */
    int64_t across;        /* tiles in a row of G' A */
    int64_t tiles, items;  /* of one sample, of all */
    int32_t one;           /* added to A A': 1 with a bias, or 0 */
    double *parts, *sizes;
    const int32_t *list, *count; /* of LISTED */
} norms_problem;

/* LISTED: tiles of the listed matrices only, in a separate kernel because the others have no register left. */
enum norms_of { GRAM, TILES, LISTED };

/* Tile form: 2 T p d operations per sample; Gram form: T^2 (p + d), half of the matrices. A tile reads 2 TILE elements
 * for every step along its contraction. */
template <typename real, norms_of form>
static __global__ void __launch_bounds__(shape<real, groups_of<real>>::threads, form == TILES ? 2 : 1)
    sample_norms_plain(const norms_problem p)
{
    constexpr bool gram = form == GRAM;
    constexpr int each = part<real>::each;
    constexpr int groups = groups_of<real>;
    constexpr int threads = shape<real, groups>::threads;
    __shared__ __align__(16) ktiles<real, groups> s;
    __shared__ double sums[32];
    int64_t items = form == LISTED ? *p.count * p.tiles : p.items;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t tile = item % p.tiles;
        int64_t matrix = form == LISTED ? p.list[item / p.tiles] : item / p.tiles;
        int64_t above = gram ? tchi_lower_row(tile) : tile / p.across;
        int64_t left = gram ? tile - tchi_lower_tiles(above) : tile % p.across;
        part<real> one, other;
        multiply_plain_tile<real, groups, gram, form == LISTED>(one, s, p.first, matrix, above * TILE, left * TILE);
        if (gram) {
            multiply_plain_tile<real, groups, true>(other, s, p.second, matrix, above * TILE, left * TILE);
        }
        double total = 0.0;
        double size = 0.0;
        if (threadIdx.x < shape<real, groups>::group) {
#pragma unroll
            for (int e = 0; e < each * each; e++) {
                real value = one.v[e / each][e % each] + (real)(gram ? p.one : 0);
                double term = (double)value * (double)(gram ? other.v[e / each][e % each] : value);
                total += term;
                size += fabs(term);
            }
        }
        total = tchi_cuda_block_sum(total, (int)threadIdx.x, threads, sums);
        if (threadIdx.x == 0) {
            p.parts[form == LISTED ? matrix * p.tiles + tile : item] = gram && above != left ? 2.0 * total : total;
        }
        if (gram && p.sizes != nullptr) {
            size = tchi_cuda_block_sum(size, (int)threadIdx.x, threads, sums);
            if (threadIdx.x == 0) {
                p.sizes[item] = above != left ? 2.0 * size : size;
            }
        }
    }
}

template <norms_of form>
static tch_status launch_norms(const tchi_cuda_state *state, tch_scalar type, const norms_problem &p, int64_t blocks)
{
    auto kernel = type == TCH_SCALAR_F64 ? sample_norms_plain<double, form> : sample_norms_plain<float, form>;
    int threads =
        type == TCH_SCALAR_F64 ? shape<double, groups_of<double>>::threads : shape<float, groups_of<float>>::threads;
    return tchi_cuda_launch(state, "sample_norms_plain", kernel, tchi_cuda_grid(blocks), threads, p);
}

/* `ones`: columns of ones after those of A. */
static norms_problem norms_problem_of(const tch_matrices *a, const tch_matrices *g, bool gram, int ones)
{
    norms_problem p = {};
    p.first = gram ? product_of(a, a, true) : product_of(g, a, false);
    p.second = gram ? product_of(g, g, true) : p.first;
    p.across = tchi_cuda_ceil_div(a->cols + ones, TILE);
    p.tiles = gram ? tchi_lower_tiles(tchi_cuda_ceil_div(a->rows, TILE)) : p.across * tchi_cuda_ceil_div(g->cols, TILE);
    p.items = p.tiles * a->batch;
    return p;
}

tch_status tchi_cuda_sample_norms_plain(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                        bool gram, bool bias, double *parts, double *sizes, int64_t *tiles)
{
    norms_problem p = norms_problem_of(a, g, gram, 0);
    p.one = bias ? 1 : 0;
    p.parts = parts;
    p.sizes = sizes;
    *tiles = p.tiles;
    return gram ? launch_norms<GRAM>(state, a->type, p, p.items) : launch_norms<TILES>(state, a->type, p, p.items);
}

/* At most as many blocks as fit the GPU: the list is nearly always empty, and even idle blocks cost time. */
tch_status tchi_cuda_sample_norms_listed(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *g,
                                         bool bias, const int32_t *list, const int32_t *count, double *parts,
                                         int64_t *tiles)
{
    norms_problem p = norms_problem_of(a, g, false, bias ? 1 : 0);
    p.first.y.ones = bias ? a->cols : -1;
    int64_t most = 2 * (int64_t)state->device.processors;
    p.parts = parts;
    p.list = list;
    p.count = count;
    *tiles = p.tiles;
    return launch_norms<LISTED>(state, a->type, p, p.items < most ? p.items : most);
}

/* --- squares ----------------------------------------------------------------------------------------------------- */

typedef struct squares_problem {
    product gradient;
    tchi_cuda_operand out;
    int64_t samples, groups;
    int64_t across, tiles, items;
    double scale, beta;
} squares_problem;

template <typename real>
static __device__ void store_squares(const squares_problem &p, int64_t group, int64_t i, int64_t j, real value)
{
    if (i < p.gradient.x.count && j < p.gradient.y.count) {
        char *to = tchi_cuda_at(p.out, group, i, j);
        real before = p.beta == 0.0 ? (real)0 : tchi_cuda_load<real>(p.out.type, to, 0, 0);
        tchi_cuda_store<real>(p.out.type, to, 0, 0, (real)p.beta * before + (real)p.scale * value);
    }
}

/* 2 T p d operations per sample; out is read and written once. */
template <typename real>
static __global__ void __launch_bounds__(shape<real, 1>::threads) sample_squares_plain(const squares_problem p)
{
    constexpr int each = part<real>::each;
    __shared__ __align__(16) ktiles<real, 1> s;
    for (int64_t item = blockIdx.x; item < p.items; item += gridDim.x) {
        int64_t group = item / p.tiles, tile = item % p.tiles;
        int64_t row = tile / p.across * TILE, col = tile % p.across * TILE;
        part<real> squares = {};
        for (int64_t b = 0; b < p.samples; b++) {
            part<real> sum;
            multiply_plain_tile<real, 1, false>(sum, s, p.gradient, b * p.groups + group, row, col);
#pragma unroll
            for (int e = 0; e < each * each; e++) {
                squares.v[e / each][e % each] += sum.v[e / each][e % each] * sum.v[e / each][e % each];
            }
        }
#pragma unroll
        for (int e = 0; e < each * each; e++) {
            int64_t y = row + first_row<real>() + row_of<real>(e / each);
            int64_t x = col + first_col<real>() + row_of<real>(e % each);
            store_squares<real>(p, group, y, x, squares.v[e / each][e % each]);
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
    const bool wide = out->type == TCH_SCALAR_F64;
    return tchi_cuda_launch(state, "sample_squares_plain",
                            wide ? sample_squares_plain<double> : sample_squares_plain<float>, tchi_cuda_grid(p.items),
                            wide ? shape<double, 1>::threads : shape<float, 1>::threads, p);
}

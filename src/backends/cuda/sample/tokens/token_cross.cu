/* Per-sample inner products with the gradient of an embedding: with that of a linear layer of the same weight, and with
 * a matrix of the weight's shape. For the first, tiles of the products <row s of H, row t of A> stay in registers, are
 * multiplied by the entries of G that the tokens select, and summed; nothing of size S by T is stored.
 *
 *     for (s = 0; s < S; s++) {                               // token_dots with `by`, of one sample
 *         for (t = 0; t < T; t++) {
 *             norm += scale * g[t][token[s]] * dot(h[s], a[t]);
 *         }
 *     }
 *     for (s = 0; s < S; s++) {                               // token_dots
 *         dot += scale * dot(g[s], w[token[s]]);
 *     } */
#include "backends/cuda/device/mma_tiles.cuh"
#include "token_order.cuh"

#define CROSS_TILE 128 /* positions of H and of A */
#define CROSS_RANGES 8 /* ranges of A's positions, for more blocks than tiles of H */
#define THREADS 256
#define DEPTH 8  /* columns per step */
#define EACH 8   /* rows and columns of the tile per thread: two vec4s, half a tile apart */
#define CHUNK 64 /* positions per block of token_dots */

/* Blocks per multiprocessor for float32: two if ptxas fits them into 128 registers without spilling. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
#define BLOCKS 2
#else
#define BLOCKS 1
#endif

typedef struct cross_call {
    tchi_cuda_token_list list; /* of H's positions */
    tchi_cuda_operand h, a, g;
    int64_t samples, tiles; /* of a sample's H */
    int64_t rows, cols;     /* positions of A, columns of A and H */
} cross_call;

/* partial[(sample tiles + tile) ranges + range] = the sum of tile_sum(sample, s, t) over the tiles of A's range, by a
 * block of threads. Memory: G at positions times rows places, 32 bytes each; H and A several times from cache. Compute:
 * 2 positions rows cols operations. For 32 samples of 1024 positions and 768 columns: 51 GFLOP, 0.07 ms at the 757
 * TFLOP/s of cuBLAS in bfloat16; 1.07 GB, 0.26 ms at 4.19 TB/s. */
template <class function>
static __device__ __forceinline__ void sum_tiles(const cross_call &c, double *shared, double *partial,
                                                 const function &tile_sum)
{
    const int64_t across = tchi_cuda_ceil_div(c.rows, CROSS_TILE); /* tiles of A */
    for (int64_t n = blockIdx.x; n < c.samples * c.tiles * CROSS_RANGES; n += gridDim.x) {
        int64_t range = n % CROSS_RANGES;
        int64_t b = n / CROSS_RANGES / c.tiles;
        int64_t s = n / CROSS_RANGES % c.tiles * CROSS_TILE;
        int64_t last = across * (range + 1) / CROSS_RANGES;
        double sum = 0;
        for (int64_t tile = across * range / CROSS_RANGES; tile < last; tile++) {
            sum += tile_sum(b, s, tile * CROSS_TILE);
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            partial[n] = sum;
        }
    }
}

/* --- on CUDA cores ----------------------------------------------------------------------------------------------- */

/* Columns of the operand first, so that a thread reads four of its positions at once. */
template <typename real> struct cross_tile {
    alignas(16) real at[DEPTH][CROSS_TILE + 4];
};

/* Row (or column) `n` of thread row (or column) `thread` in the tile. */
static __device__ inline int place_in_tile(int thread, int n)
{
    return 4 * thread + n % 4 + n / 4 * (CROSS_TILE / 2);
}

/* The thread's four elements of rows `first` on, columns j on; zeros beyond the edges. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> fetch_operand(const tchi_cuda_operand &m, int64_t b, int64_t first,
                                                            int64_t rows, int64_t j, int64_t cols)
{
    int64_t row = first + threadIdx.x / (DEPTH / 4);
    int64_t col = j + threadIdx.x % (DEPTH / 4) * 4;
    int64_t left = cols - col;
    int count = left < 0 || row >= rows ? 0 : left < 4 ? (int)left : 4;
    return tchi_cuda_load_vec4<real>(m, b, row, col, count);
}

template <typename real>
static __device__ inline void store_cross_tile(cross_tile<real> &tile, const tchi_cuda_vec4<real> &four)
{
    int row = (int)threadIdx.x / (DEPTH / 4);
    int col = (int)threadIdx.x % (DEPTH / 4) * 4;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        tile.at[col + k][row] = four.v[k];
    }
}

/* products += the share of DEPTH columns. */
template <typename real>
static __device__ inline void add_cross_products(const cross_tile<real> &h, const cross_tile<real> &a,
                                                 real products[EACH][EACH])
{
    const int down = (int)threadIdx.x / 16;
    const int along = (int)threadIdx.x % 16;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        real x[EACH];
        real y[EACH];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            x[n] = h.at[k][place_in_tile(down, n)];
            y[n] = a.at[k][place_in_tile(along, n)];
        }
#pragma unroll
        for (int n = 0; n < EACH * EACH; n++) {
            products[n / EACH][n % EACH] = fma(x[n / EACH], y[n % EACH], products[n / EACH][n % EACH]);
        }
    }
}

/* <row s of H, row t of A> for the thread's part of a tile. While one block loads a step, another multiplies. */
template <typename real>
static __device__ inline void tile_products(const cross_call &c, int64_t b, int64_t s, int64_t t, cross_tile<real> &h,
                                            cross_tile<real> &a, real products[EACH][EACH])
{
    for (int64_t j = 0; j < c.cols; j += DEPTH) {
        tchi_cuda_vec4<real> four_h = fetch_operand<real>(c.h, b, s, c.list.positions, j, c.cols);
        tchi_cuda_vec4<real> four_a = fetch_operand<real>(c.a, b, t, c.rows, j, c.cols);
        __syncthreads(); /* the previous step is no longer in use */
        store_cross_tile(h, four_h);
        store_cross_tile(a, four_a);
        __syncthreads();
        add_cross_products(h, a, products);
    }
}

/* The sum of the products times G(t, token of s). */
template <typename real>
static __device__ inline double weigh_products(const cross_call &c, int64_t b, int64_t s, int64_t t,
                                               const real products[EACH][EACH])
{
    double sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int64_t position = s + place_in_tile((int)threadIdx.x / 16, i);
        int64_t token = position < c.list.positions ? tchi_cuda_token_at(c.list, b, position) : c.list.rows;
        if (token == c.list.rows) {
            continue;
        }
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            int64_t row = t + place_in_tile((int)threadIdx.x % 16, k);
            if (row < c.rows) {
                double g = (double)tchi_cuda_load<real>(c.g.type, tchi_cuda_at(c.g, b, row, token), 0, 0);
                sum = fma(g, (double)products[i][k], sum);
            }
        }
    }
    return sum;
}

/* H (positions, cols), A (rows, cols), G (rows, tokens) for each sample. */
template <typename real>
static __global__ void __launch_bounds__(THREADS, sizeof(real) == sizeof(double) ? 1 : BLOCKS)
    token_cross_kernel(const __grid_constant__ cross_call c, double *partial)
{
    __shared__ cross_tile<real> h;
    __shared__ cross_tile<real> a;
    __shared__ double shared[32];
    sum_tiles(c, shared, partial, [&](int64_t b, int64_t s, int64_t t) {
        real products[EACH][EACH] = {};
        tile_products(c, b, s, t, h, a, products);
        return weigh_products(c, b, s, t, products);
    });
}

/* --- half types by tensor cores: exact products, sums in float32 -------------------------------------------------- */

static_assert(TCHI_TILE_ROWS == CROSS_TILE && TCHI_TILE_COLS == CROSS_TILE && TCHI_TILE_THREADS == THREADS,
              "both ways cut the positions alike");

/* The sum of a tile of H A' times G(t, token of s), over one thread's part. */
template <tch_scalar type>
static __device__ __forceinline__ double weigh_sums(const cross_call &c, int64_t b, int64_t s, int64_t t,
                                                    const tchi_tile_sums &sum)
{
    double total = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) { /* the thread's rows of the tile */
        int64_t position = s + tchi_tile_row<2, true>(k / 2, k % 2);
        int64_t token = position < c.list.positions ? tchi_cuda_token_at(c.list, b, position) : c.list.rows;
        if (token == c.list.rows) {
            continue;
        }
#pragma unroll
        for (int n = 0; n < 8; n++) { /* and columns */
            int64_t row = t + tchi_tile_col<2, true>(n / 2, n % 2);
            float g = row < c.rows ? tchi_cuda_load<float>(type, tchi_cuda_at(c.g, b, row, token), 0, 0) : 0.0f;
            float product = row < c.rows ? sum.v[k / 2][n / 2][k % 2 * 2 + n % 2] : 0.0f;
            total = fma((double)g, (double)product, total);
        }
    }
    return total;
}

template <tch_scalar type, bool aligned>
static __global__ void __launch_bounds__(TCHI_TILE_THREADS, 1)
    token_cross_tiles(const __grid_constant__ cross_call c, const __grid_constant__ tchi_tile_pair pair,
                      double *partial)
{
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    extern __shared__ __align__(1024) char shared[];
    __shared__ double sums[32];
    sum_tiles(c, sums, partial, [&](int64_t b, int64_t s, int64_t t) {
        double total = 0.0;
        tchi_tile_work w = {s, t, b, 0, 1};
        tchi_tiles<type, true, aligned>(shared, pair, w,
                                        [&](tchi_tile_sums &sum) { total = weigh_sums<type>(c, b, s, t, sum); });
        return total;
    });
#endif
}

/* --- the choice -------------------------------------------------------------------------------------------------- */

/* token_dots has at most as many chunks. */
int64_t tchi_cuda_token_cross_scratch(int64_t samples, int64_t positions)
{
    int64_t tiles = tchi_cuda_ceil_div(positions, CROSS_TILE);
    return samples * tiles * CROSS_RANGES * (int64_t)sizeof(double);
}

static tch_status launch_cross(const tchi_cuda_state *state, const cross_call &c, const tch_matrices *h,
                               const tch_matrices *a, double *partial)
{
    const unsigned blocks = tchi_cuda_grid(c.samples * c.tiles * CROSS_RANGES);
    if (!tchi_cuda_kernel_fits(state, TCHI_CROSS_MMA, a, NULL) || h->type != a->type ||
        state->device.shared_per_block < TCHI_TILE_SHARED_BYTES + 1024) {
        auto kernel = a->type == TCH_SCALAR_F64 ? token_cross_kernel<double> : token_cross_kernel<float>;
        return tchi_cuda_launch(state, "token_cross", kernel, blocks, THREADS, c, partial);
    }
    constexpr tch_scalar f16 = TCH_SCALAR_F16, bf16 = TCH_SCALAR_BF16;
    auto aligned = a->type == f16 ? token_cross_tiles<f16, true> : token_cross_tiles<bf16, true>;
    auto others = a->type == f16 ? token_cross_tiles<f16, false> : token_cross_tiles<bf16, false>;
    return tchi_cuda_launch_shared(state, "token_cross_tiles",
                                   tchi_tile_aligned(h) && tchi_tile_aligned(a) ? aligned : others, blocks,
                                   TCHI_TILE_THREADS, TCHI_TILE_SHARED_BYTES, TCHI_TILE_SHARED_BYTES, c,
                                   {tchi_tile_side_of(h, true), tchi_tile_side_of(a, true), a->cols}, partial);
}

static tch_status cross_dots(const tchi_cuda_state *s, const tch_matrices *tokens, int64_t padding,
                             const tch_matrices *h, const tch_matrices *a, const tch_matrices *g, double scale,
                             double *dots, void *scratch)
{
    int64_t tiles = tchi_cuda_ceil_div(tokens->cols, CROSS_TILE);
    cross_call c = {tchi_cuda_token_list_of(tokens, g->cols, padding, true),
                    tchi_cuda_operand_of(h),
                    tchi_cuda_operand_of(a),
                    tchi_cuda_operand_of(g),
                    tokens->rows,
                    tiles,
                    a->rows,
                    a->cols};
    double *partial = (double *)scratch;
    if (c.samples == 0 || c.tiles == 0 || c.rows == 0 || c.cols == 0) {
        return TCH_OK;
    }
    TCHI_TRY(launch_cross(s, c, h, a, partial));
    return tchi_cuda_add_partials(s, c.samples, c.tiles * CROSS_RANGES, partial, scale, dots);
}

/* --- rows of a weight -------------------------------------------------------------------------------------------- */

typedef struct dots_call {
    tchi_cuda_token_list list;
    tchi_cuda_operand g, w;
    int64_t samples, chunks, cols;
} dots_call;

/* <row s of G, row `token` of W>, a lane's share of it. */
template <typename real>
static __device__ inline double share_of_dot(const dots_call &c, int64_t b, int64_t s, int64_t token, int lane)
{
    double sum = 0;
    for (int64_t j = lane * 4; j < c.cols; j += 128) {
        int count = c.cols - j < 4 ? (int)(c.cols - j) : 4;
        tchi_cuda_vec4<real> g = tchi_cuda_load_vec4<real>(c.g, b, s, j, count);
        tchi_cuda_vec4<real> w = tchi_cuda_load_vec4<real>(c.w, 0, token, j, count);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum = fma((double)g.v[k], (double)w.v[k], sum);
        }
    }
    return sum;
}

/* G (positions, cols) per sample, W (tokens, cols). Memory: G and a row of W per position. Compute: a product and a sum
 * per element. A block per CHUNK positions of a sample, a warp per eighth of them. */
template <typename real>
static __global__ void __launch_bounds__(THREADS, 4)
    token_dots_kernel(const __grid_constant__ dots_call c, double *partial)
{
    __shared__ double shared[32];
    const int lane = (int)threadIdx.x % 32;
    for (int64_t n = blockIdx.x; n < c.samples * c.chunks; n += gridDim.x) {
        int64_t b = n / c.chunks;
        int64_t first = (n - b * c.chunks) * CHUNK;
        int64_t last = first + CHUNK < c.list.positions ? first + CHUNK : c.list.positions;
        double sum = 0;
        for (int64_t s = first + threadIdx.x / 32; s < last; s += THREADS / 32) {
            int64_t token = tchi_cuda_token_at(c.list, b, s);
            sum += token < c.list.rows ? share_of_dot<real>(c, b, s, token, lane) : 0.0;
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            partial[n] = sum;
        }
    }
}

static tch_status row_dots(const tchi_cuda_state *s, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                           const tch_matrices *w, double scale, double *dots, void *scratch)
{
    dots_call c = {tchi_cuda_token_list_of(tokens, w->rows, padding, true),
                   tchi_cuda_operand_of(g),
                   tchi_cuda_operand_of(w),
                   tokens->rows,
                   tchi_cuda_ceil_div(tokens->cols, CHUNK),
                   g->cols};
    double *partial = (double *)scratch;
    if (c.samples == 0 || c.chunks == 0 || c.cols == 0) {
        return TCH_OK;
    }
    unsigned blocks = tchi_cuda_grid(c.samples * c.chunks);
    auto kernel = g->type == TCH_SCALAR_F64 ? token_dots_kernel<double> : token_dots_kernel<float>;
    TCHI_TRY(tchi_cuda_launch(s, "token_dots", kernel, blocks, THREADS, c, partial));
    return tchi_cuda_add_partials(s, c.samples, c.chunks, partial, scale, dots);
}

tch_status tchi_cuda_token_dots(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                                const tch_matrices *g, const tch_matrices *w, const tch_matrices *by, double scale,
                                double *dots, void *scratch)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (by != NULL) {
        return cross_dots(s, tokens, padding, g, w, by, scale, dots, scratch);
    }
    return w == NULL ? tchi_cuda_token_norms(s, tokens, rows, padding, g, scale, dots, scratch)
                     : row_dots(s, tokens, padding, g, w, scale, dots, scratch);
}

/* The inverse Cholesky factor of small matrices, the leaves of cholesky.c. A is eliminated together with the identity:
 * step k consumes column k of A, where column k of the result begins, so that one array holds both.
 *
 *     for (k = 0; k < n; k++) {                               // out begins as the identity
 *         pivot[k] = a[k][k];
 *         for (i = k + 1; i < n; i++) {
 *             factor = a[i][k] / pivot[k];
 *             for (j = 0; j < n; j++) {
 *                 a[i][j] -= factor * a[k][j];
 *                 out[i][j] -= factor * out[k][j];
 *             }
 *         }
 *     }
 *     out[i][j] /= sqrt(pivot[i]);                            // for all i and j: out A out' = I
 *
 * Two kernels. float64 uses tiles of 16 by 16 on tensor cores, with a warp eliminating the diagonal tile; float32, and
 * float64 on GPUs without such tensor cores or with too little shared memory, proceeds element by element with the
 * matrix in registers.
 *
 * A (batch, n, n), of which the lower triangle is read, and X of the same shape. Memory: half of A and all of X.
 * Compute: 2/3 n^3 per matrix. The latency of a step decides; measurements in bench/logs/cuda_cholesky.md. */
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

#define LEAF TCHI_CUDA_CHOLESKY_LEAF
#define SIDE 16          /* threads along a side of a block */
#define SMALL (LEAF / 2) /* matrices up to this size take half as many registers along a side */

/* --- element by element ------------------------------------------------------------------------------------------ */

/* In what follows a thread holds `each` by `each` elements, (y + SIDE a, x + SIDE c), of a matrix of up to SIDE each.
 *
 * Before changing a step: a thread reads other threads' numbers only from the vector published by the step.
 *
 * Shared memory of a block. Published vectors are double-buffered, so that one barrier per step suffices. */
template <typename real, int each> struct leaf_memory {
    real vector[2][SIDE * each + 1]; /* one more is read, and not used, in the last step */
    real pivot[SIDE * each];
    real next[2]; /* the next step's diagonal, before this step */
};

/* The lower triangle of A; beyond it, and beyond n, the identity. */
template <typename real, int each>
static __device__ void load_leaf(real c[each][each], const real *a, int64_t ld, int n, int y, int x)
{
#pragma unroll
    for (int row = 0; row < each; row++) {
#pragma unroll
        for (int col = 0; col < each; col++) {
            int i = y + SIDE * row;
            int j = x + SIDE * col;
            c[row][col] = i < n && j <= i ? a[i * ld + j] : i == j ? (real)1 : (real)0;
        }
    }
}

/* The vector of step k = y_k + SIDE row: v(j) is element (k, j) left of the diagonal and (j, k) from it on. */
template <typename real, int each, int row>
static __device__ __forceinline__ void publish(const real c[each][each], int k, real *v, int y, int x)
{
    if (y == k % SIDE) {
#pragma unroll
        for (int col = 0; col <= row; col++) {
            if (x + SIDE * col < k) {
                v[x + SIDE * col] = c[row][col];
            }
        }
    }
    if (x == k % SIDE) {
#pragma unroll
        for (int below = row; below < each; below++) {
            if (y + SIDE * below >= k) {
                v[y + SIDE * below] = c[below][row];
            }
        }
    }
}

/* Subtracts v(i) / v(k) times row k from rows i > k, for k in the group of rows `row`. Left of the diagonal of row k
 * that is the result's row, right of it A's; the element on it is 1 in the result, which begins there. Groups above
 * `row` are done, and those right of the diagonal are empty: more than half is skipped. */
template <typename real, int each, int row>
static __device__ __forceinline__ void eliminate(real c[each][each], int k, real inverse, const real *v, int y, int x)
{
    const int step = k % SIDE;
    real right[each];
#pragma unroll
    for (int col = 0; col < each; col++) {
        right[col] = col == row && x == step ? (real)1 : v[x + SIDE * col];
    }
#pragma unroll
    for (int below = row; below < each; below++) {
        real factor = below > row || y > step ? v[y + SIDE * below] * inverse : (real)0;
#pragma unroll
        for (int col = 0; col <= below; col++) {
            real old = c[below][col];
            if (col == row && x == step) {
                old = below > row || y > step ? (real)0 : y == step ? (real)1 : old;
            }
            c[below][col] = old - factor * right[col];
        }
    }
}

/* 1 / pivot, for positive finite numbers. In float64 by Newton's iteration from an approximation of 20 bits,
 * branch-free so that it overlaps other work, unlike the compiler's division. */
static __device__ __forceinline__ double reciprocal(double pivot)
{
    double scale = pivot < 0x1p-900 ? 0x1p200 : pivot > 0x1p900 ? 0x1p-200 : 1.0;
    double scaled = pivot * scale;
    double inverse = tchi_reciprocal_approx(scaled);
    inverse = fma(inverse, fma(-scaled, inverse, 1.0), inverse);
    inverse = fma(inverse, fma(-scaled, inverse, 1.0), inverse);
    return inverse * scale;
}

static __device__ __forceinline__ float reciprocal(float pivot)
{
    return 1.0f / pivot;
}

/* The next pivot, and the state of the previous ones. A pivot that is not positive and finite becomes 1. */
template <typename real> struct pivots {
    real value, inverse;
    bool bad;
};

template <typename real> static __device__ __forceinline__ void take_pivot(pivots<real> &p, real value)
{
    bool good = value > (real)0 && isfinite(value);
    p.bad = p.bad || !good;
    p.value = good ? value : (real)1;
    p.inverse = reciprocal(p.value);
}

/* Steps [SIDE row, SIDE (row + 1)). Every thread computes the next pivot from its value before this step, so that its
 * reciprocal overlaps the step's work. */
template <typename real, int each, int row>
static __device__ __forceinline__ void eliminate_rows(real c[each][each], int n, leaf_memory<real, each> &memory,
                                                      pivots<real> &p, int y, int x)
{
    constexpr int below = row + 1 < each ? row + 1 : row;
#pragma unroll 1
    for (int k = SIDE * row; k < SIDE * (row + 1) && k < n; k++) {
        real *v = memory.vector[k % 2];
        publish<real, each, row>(c, k, v, y, x);
        if (y == x && y == (k + 1) % SIDE) {
            memory.next[k % 2] = y == 0 ? c[below][below] : c[row][row];
        }
        __syncthreads();
        if (y == 0 && x == 0) {
            memory.pivot[k] = p.value;
        }
        real inverse = p.inverse;
        real next = memory.next[k % 2] - v[k + 1] * inverse * v[k + 1];
        take_pivot(p, k + 1 < n ? next : (real)1);
        eliminate<real, each, row>(c, k, inverse, v, y, x);
    }
}

/* Groups of rows from `row` on. */
template <typename real, int each, int row>
static __device__ __forceinline__ void eliminate_from(real c[each][each], int n, leaf_memory<real, each> &memory,
                                                      pivots<real> &p, int y, int x)
{
    eliminate_rows<real, each, row>(c, n, memory, p, y, x);
    if constexpr (row + 1 < each) {
        eliminate_from<real, each, row + 1>(c, n, memory, p, y, x);
    }
}

/* Eliminated rows times their pivots^-1/2; the identity for a flagged matrix. */
template <typename real, int each>
static __device__ void store_leaf(const real c[each][each], real *out, int64_t ld, int n, const real *pivots,
                                  bool flagged, int y, int x)
{
#pragma unroll
    for (int row = 0; row < each; row++) {
        int i = y + SIDE * row;
        real scale = i < n && !flagged ? (real)1 / sqrt(pivots[i]) : (real)0;
#pragma unroll
        for (int col = 0; col < each; col++) {
            int j = x + SIDE * col;
            if (i < n && j < n) {
                real value = flagged ? (i == j ? (real)1 : (real)0) : c[row][col] * scale;
                out[i * ld + j] = j <= i ? value : (real)0;
            }
        }
    }
}

/* About n (SIDE each)^2 operations; a multiprocessor holds several matrices. */
template <typename real, int each>
static __global__ void __launch_bounds__(SIDE *SIDE, each > 4 ? 1 : 2)
    cholesky_leaf_kernel(int n, int64_t batch, const real *a, int64_t lda, int64_t stride_a, real *x, int64_t ldx,
                         int64_t stride_x, int32_t *flags)
{
    __shared__ leaf_memory<real, each> memory;
    const int ty = (int)threadIdx.x / SIDE;
    const int tx = (int)threadIdx.x % SIDE;
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        real c[each][each];
        bool flagged = flags[b] != TCH_REPORT_OK;
        __syncthreads(); /* all threads have read the flag and no longer use the memory */
        if (!flagged) {
            pivots<real> p = {};
            load_leaf(c, a + b * stride_a, lda, n, ty, tx);
            take_pivot(p, a[b * stride_a]);
            eliminate_from<real, each, 0>(c, n, memory, p, ty, tx);
            __syncthreads();
            flagged = p.bad;
            if (p.bad && threadIdx.x == 0) {
                flags[b] = TCH_REPORT_NOT_POSITIVE;
            }
        }
        store_leaf(c, x + b * stride_x, ldx, n, memory.pivot, flagged, ty, tx);
    }
}

/* --- float64 by tiles -------------------------------------------------------------------------------------------- */

/* The tiles of row k and column k are a cross, of which warp w computes one tile, (w, k) of L below the diagonal and
 * (k, w) of the result left of it: with L_kk^-1 = X_kk, and out_kk = X_kk,
 *
 *     L_wk = (A_wk - sum over j < k of L_wj L_kj') X_kk'                   w > k
 *     out_kw' = (0 - sum over w <= j < k of out_jw' L_kj') X_kk'           w < k
 *
 * Both are the same, products of a tile with a transposed one, if what is kept of the result is transposed. Tile (i, j)
 * in shared memory is L_ij until step i, and out_ij' from then on. Step k:
 *
 *     1. warp k inverts the factor of the tile on the diagonal; the others sum over j < k for the next cross
 *     2. L_wk and out_kw', into shared memory
 *     3. the last term, j = k, of the next cross; row k of the result, to X
 *
 * with barriers after 1 and 2. Before changing the order: all warps read row k + 1 of L in 1 and 3, and step 2 of the
 * next k overwrites it with the result. */
constexpr int TILE = 16;
constexpr int TILE_ELEMENTS = TILE * TILE;
constexpr int MAX_TILES = LEAF / TILE;
constexpr unsigned WARP = 0xFFFFFFFFu;

/* A lane's part of a tile, lane = 4 g + t: v[4 h + 2 r + e] is row g + 8 r, column 8 h + 2 t + e. Products are produced
 * in this order; operands can use it too, since both then permute the depth alike. */
struct share {
    double v[8];
};

/* Where tile (row, col) begins, row >= col. */
static __device__ __forceinline__ int tile_at(int row, int col)
{
    return (row * (row + 1) / 2 + col) * TILE_ELEMENTS;
}

/* Position of an element in its tile. Rows permute their columns so that neither two rows of four pairs nor four
 * columns of every other row, the simultaneous accesses, conflict in a bank. */
static __device__ __forceinline__ int element_at(int row, int col)
{
    return row * TILE + (col ^ (((row ^ row >> 1) & 1) << 3 | (row & 4)));
}

static __device__ __forceinline__ int lane_row()
{
    return (int)threadIdx.x % 32 / 4;
}

static __device__ __forceinline__ int lane_col()
{
    return (int)threadIdx.x % 4 * 2;
}

/* Row and column in its tile of number i of a lane's share. */
static __device__ __forceinline__ int row_of(int i)
{
    return lane_row() + i / 2 % 2 * 8;
}

static __device__ __forceinline__ int col_of(int i)
{
    return lane_col() + i / 4 * 8 + i % 2;
}

/* Positions of number i of a lane's share, (row_of(i), col_of(i)), and its mirror image, largely independent of i. */
static __device__ __forceinline__ int share_at(int i)
{
    return (element_at(lane_row(), lane_col()) ^ i / 4 * 8) + i / 2 % 2 * 8 * TILE + i % 2;
}

static __device__ __forceinline__ int transposed_at(int i)
{
    return (element_at(lane_col(), lane_row()) ^ (i ^ i / 2) % 2 * 8) + (i / 4 * 8 + i % 2) * TILE;
}

static __device__ __forceinline__ share load_share(const double *tile)
{
    share s;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        double2 pair = *(const double2 *)(tile + share_at(i));
        s.v[i] = pair.x;
        s.v[i + 1] = pair.y;
    }
    return s;
}

static __device__ __forceinline__ void store_share(double *tile, const share &s)
{
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        *(double2 *)(tile + share_at(i)) = make_double2(s.v[i], s.v[i + 1]);
    }
}

static __device__ __forceinline__ void store_transposed(double *tile, const share &s)
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        tile[transposed_at(i)] = s.v[i];
    }
}

/* sum += P Q' */
static __device__ __forceinline__ void add_product(share &sum, const share &p, const share &q)
{
    const double left[8] = {p.v[0], p.v[2], p.v[1], p.v[3], p.v[4], p.v[6], p.v[5], p.v[7]};
    const double low[4] = {q.v[0], q.v[1], q.v[4], q.v[5]};
    const double high[4] = {q.v[2], q.v[3], q.v[6], q.v[7]};
    tchi_mma_f64_16x8x16(sum.v, left, low);
    tchi_mma_f64_16x8x16(sum.v + 4, left, high);
}

/* --- the tile on the diagonal, by one warp ----------------------------------------------------------------------- */

/* The next pivot and derived values. Division would take longer than the rest of a step, so row i becomes pivot row i -
 * a[i][k] row k, both times the power of two that makes scale = power pivot a number near 1. Rows not yet eliminated
 * are then scaled by `ones`, and so are their pivots; `weight` is pivot times ones of the lane's two rows, whose
 * inverse roots undo both. */
struct tile_pivot {
    double value, power, scale, ones;
    double weight[2];
    unsigned worst;
};

/* Range of valid pivots, 2^-1000 to 2^1000, compared by upper halves, so that neither the power of two nor a root
 * leaves float64. Non-positive and non-finite pivots are outside too; the elimination continues with undefined values
 * that are discarded. */
constexpr unsigned FIRST_PIVOT = 0x01700000u;
constexpr unsigned LAST_PIVOT = 0x7E700000u;

static __device__ __forceinline__ void set_pivot(tile_pivot &p, double value)
{
    p.value = value;
    p.power = __hiloint2double((0x7FE80000 - __double2hiint(value)) & 0x7FF00000, 0);
    p.scale = value * p.power; /* in [0.75, 1.5] */
}

/* The pivot after k = 8 half + 2 pair + odd, computed by every lane from its tile before step k, so that the step does
 * not wait for it. Undefined after the last one. */
template <int half, int odd>
static __device__ __forceinline__ double next_pivot(const share &c, const tile_pivot &p, int pair)
{
    const bool crosses = half == 0 && odd && pair == 3; /* row 8 is next, in the other half */
    const int row = (2 * pair + odd + 1) % 8;
    double diagonal = crosses ? c.v[6] : c.v[6 * half + 1 - odd];
    double below = crosses ? c.v[3] : c.v[6 * half + odd];
    diagonal = __shfl_sync(WARP, diagonal, 4 * row + row / 2);
    below = __shfl_sync(WARP, below, 4 * row + pair);
    return fma(-(below * p.power), below, p.scale * diagonal);
}

/* Step k = 8 half + 2 pair + odd. Left of column k is the result, right of it A, which stays symmetric in both
 * halves. */
template <int half, int odd> static __device__ __forceinline__ void eliminate_pivot(share &c, tile_pivot &p, int pair)
{
    constexpr int column = 4 * half + odd; /* number of column k, for lanes that have it */
    const int step = 2 * pair + odd;
    const bool has_column = lane_col() == 2 * pair;
    double next = next_pivot<half, odd>(c, p, pair);
    double left[2], right[4];
#pragma unroll
    for (int r = half; r < 2; r++) {
        left[r] = __shfl_sync(WARP, c.v[column + 2 * r], pair, 4);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        right[i] = __shfl_sync(WARP, c.v[i / 2 * 4 + 2 * half + i % 2], 4 * step + lane_col() / 2);
    }
    p.worst = max(p.worst, (unsigned)__double2hiint(p.value) - FIRST_PIVOT);
    p.weight[half] = lane_row() == step ? p.value * p.ones : p.weight[half];
    right[2 * half + odd] = has_column ? p.ones : right[2 * half + odd];
#pragma unroll
    for (int r = half; r < 2; r++) {
        const bool below = r > half || lane_row() > step;
        const double scale = below ? p.scale : 1.0;
        const double factor = left[r] * (below ? p.power : 0.0);
        if (has_column) {
            double &begins = c.v[column + 2 * r];
            begins = below ? 0.0 : lane_row() == step ? p.ones : begins;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            double &element = c.v[i / 2 * 4 + 2 * r + i % 2];
            element = fma(-factor, right[i], scale * element);
        }
    }
    p.ones *= p.scale;
    set_pivot(p, next);
}

template <int half> static __device__ __forceinline__ void eliminate_half(share &c, tile_pivot &p)
{
#pragma unroll 1
    for (int pair = 0; pair < 4; pair++) {
        eliminate_pivot<half, 0>(c, p, pair);
        eliminate_pivot<half, 1>(c, p, pair);
    }
}

/* x^-1/2 for normal numbers: an approximation of 20 bits, refined to 2^-60 by one third-order step. */
static __device__ __forceinline__ double inverse_root(double x)
{
    double root = tchi_inverse_root_approx(x);
    double error = fma(-(x * root), root, 1.0);
    return fma(root * error, fma(0.375, error, 0.5), root);
}

/* Replaces a symmetric tile by the inverse of its Cholesky factor; returns whether it exists. */
static __device__ __forceinline__ bool invert_factor(share &c)
{
    tile_pivot p = {};
    p.ones = 1.0;
    set_pivot(p, __shfl_sync(WARP, c.v[0], 0));
    eliminate_half<0>(c, p);
    eliminate_half<1>(c, p);
    const double roots[2] = {inverse_root(p.weight[0]), inverse_root(p.weight[1])};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        c.v[i] = col_of(i) <= row_of(i) ? c.v[i] * roots[i / 2 % 2] : 0.0;
    }
    return p.worst < LAST_PIVOT - FIRST_PIVOT;
}

/* --- between global memory and registers ------------------------------------------------------------------------- */

/* Recomputes rows and columns from the lane: held through all steps they would need too many registers. */

/* Tile (row, col), row >= col, of A, symmetric if on the diagonal; beyond n the identity. */
static __device__ __forceinline__ share load_tile(const double *a, int64_t ld, int n, int row, int col)
{
    const int lane = tchi_thread_index() % 32;
    share s;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        int i = row * TILE + lane / 4 + e / 2 % 2 * 8;
        int j = col * TILE + lane % 4 * 2 + e / 4 * 8 + e % 2;
        s.v[e] = max(i, j) < n ? a[max(i, j) * ld + min(i, j)] : i == j ? 1.0 : 0.0;
    }
    return s;
}

/* Tile (row, col) of X, row >= col, from its transpose, and zeros for tile (col, row), or above the diagonal. */
static __device__ __forceinline__ void store_tile(double *x, int64_t ld, int n, int row, int col, const share &s)
{
    const int lane = tchi_thread_index() % 32;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        int i = row * TILE + lane % 4 * 2 + e / 4 * 8 + e % 2;
        int j = col * TILE + lane / 4 + e / 2 % 2 * 8;
        if (i < n && j < n) {
            x[i * ld + j] = s.v[e];
            if (row > col) {
                x[j * ld + i] = 0.0;
            }
        }
    }
}

static __device__ __forceinline__ void store_identity(double *x, int64_t ld, int n)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x / 32; i < n; i += (int)blockDim.x / 32) {
#pragma unroll 1
        for (int j = (int)threadIdx.x % 32; j < n; j += 32) {
            x[i * ld + j] = i == j ? 1.0 : 0.0;
        }
    }
}

/* --- all tiles --------------------------------------------------------------------------------------------------- */

/* The sum over j < k for this warp's tile of cross k + 1, less A where A contributes: the negative of the result. */
static __device__ __forceinline__ share begin_cross(const double *shared, const double *a, int64_t ld, int n, int k,
                                                    int warp)
{
    share sum = {}, local = {};
    if (warp > k) {
        local = load_tile(a, ld, n, warp, k + 1);
    }
#pragma unroll 1
    for (int j = warp > k ? 0 : warp; j < k; j++) {
        share p = load_share(shared + tile_at(max(warp, j), min(warp, j)));
        share q = load_share(shared + tile_at(k + 1, j));
        add_product(sum, p, q);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum.v[i] -= local.v[i];
    }
    return sum;
}

/* X of one matrix, by a warp per row of tiles; returns whether a pivot was bad. X_kk follows the lower tiles in shared
 * memory. */
static __device__ __forceinline__ bool invert_tiles(double *shared, const double *a, int64_t lda, double *x,
                                                    int64_t ldx, int n)
{
    const int tiles = (int)blockDim.x / 32;
    const int warp = __shfl_sync(WARP, (int)threadIdx.x / 32, 0); /* from one lane, so that the compiler knows it is
                                                                     uniform */
    double *inverse = shared + tile_at(tiles, 0);
    bool bad = false;
    share local = load_tile(a, lda, n, warp, 0);
#pragma unroll 1
    for (int k = 0; k < tiles; k++) {
        const bool last = k + 1 == tiles;
        double *tile = shared + tile_at(max(warp, k), min(warp, k));
        share next = {};
        if (warp == k) {
            bad = !invert_factor(local);
            store_share(inverse, local);
            store_transposed(tile, local);
        } else if (!last) {
            next = begin_cross(shared, a, lda, n, k, warp);
        }
        __syncthreads();
        if (warp == k) {
            local = load_share(tile);
        } else {
            share product = {};
            add_product(product, local, load_share(inverse));
            local = product;
            store_share(tile, local);
        }
        __syncthreads();
        if (!last) {
            add_product(next, local, warp == k + 1 ? local : load_share(shared + tile_at(k + 1, k)));
        }
        if (warp <= k) { /* the next one to eliminate has nothing to store */
            store_tile(x, ldx, n, k, warp, local);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            local.v[i] = -next.v[i];
        }
    }
    return bad;
}

/* About n^3 operations. */
static __global__ void __launch_bounds__(32 * MAX_TILES, 2)
    cholesky_tiles_kernel(int n, int64_t batch, const double *a, int64_t lda, int64_t stride_a, double *x, int64_t ldx,
                          int64_t stride_x, int32_t *flags)
{
    extern __shared__ __align__(16) double shared[];
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        bool flagged = flags[b] != TCH_REPORT_OK;
        if (!flagged) {
            bool bad = invert_tiles(shared, a + b * stride_a, lda, x + b * stride_x, ldx, n);
            flagged = __syncthreads_or(bad); /* after which X and shared memory are no longer in use either */
            if (flagged && threadIdx.x == 0) {
                flags[b] = TCH_REPORT_NOT_POSITIVE;
            }
        }
        if (flagged) {
            store_identity(x + b * stride_x, ldx, n);
        }
    }
}

/* --- the operation ----------------------------------------------------------------------------------------------- */

static int64_t shared_bytes(int tiles)
{
    return (int64_t)(tiles * (tiles + 1) / 2 + 1) * TILE_ELEMENTS * (int64_t)sizeof(double);
}

template <typename real>
static tch_status launch_elements(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x,
                                  int32_t *flags)
{
    auto kernel = a->rows <= SMALL ? cholesky_leaf_kernel<real, SMALL / SIDE> : cholesky_leaf_kernel<real, LEAF / SIDE>;
    return tchi_cuda_launch(state, "cholesky_leaf_kernel", kernel, tchi_cuda_grid(a->batch), SIDE * SIDE, (int)a->rows,
                            a->batch, (const real *)a->data, a->ld, a->stride, (real *)x->data, x->ld, x->stride,
                            flags);
}

tch_status tchi_cuda_cholesky_leaf(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x,
                                   int32_t *flags)
{
    if (a->rows == 0 || a->batch == 0) {
        return TCH_OK;
    }
    if (a->type != TCH_SCALAR_F64) {
        return launch_elements<float>(state, a, x, flags);
    }
    if (state->device.major < 8 || state->device.shared_per_block < shared_bytes(MAX_TILES)) {
        return launch_elements<double>(state, a, x, flags);
    }
    const int tiles = (int)tchi_cuda_ceil_div(a->rows, TILE);
    return tchi_cuda_launch_shared(state, "cholesky_tiles_kernel", cholesky_tiles_kernel, tchi_cuda_grid(a->batch),
                                   32 * tiles, shared_bytes(MAX_TILES), shared_bytes(tiles), (int)a->rows, a->batch,
                                   (const double *)a->data, a->ld, a->stride, (double *)x->data, x->ld, x->stride,
                                   flags);
}

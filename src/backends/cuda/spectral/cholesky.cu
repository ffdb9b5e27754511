/* The inverse Cholesky factor of small matrices, the leaves of cholesky.c. A block holds its matrix in registers and
 * eliminates with A and the identity side by side, in one array: column k of A is used up by step k, where column k of
 * the result begins. Before changing a step: what a thread reads of other threads' numbers, it reads from the vector
 * that the step published, and nowhere else.
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
 */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/device/ptx.cuh"

#define LEAF TCHI_CUDA_CHOLESKY_LEAF
#define SIDE 16          /* threads along a side of a block */
#define SMALL (LEAF / 2) /* matrices up to this size take half as many registers along a side */

/* In what follows a thread holds `each` by `each` elements, (y + SIDE a, x + SIDE c), of a matrix of up to SIDE each.
 *
 * What the block shares. Published vectors alternate, so that one barrier to a step is enough. */
template <typename real, int each> struct leaf_memory {
    real vector[2][SIDE * each + 1]; /* one more is read, and not used, in the last step */
    real pivot[SIDE * each];
    real next[2]; /* what the step after this one has on the diagonal, before this one */
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

/* The numbers that step k = y_k + SIDE row needs: v(j) is element (k, j) left of the diagonal and (j, k) from it on. */
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

/* Rows i > k lose v(i) / v(k) times row k, for k in the group of rows `row`. Left of the diagonal of row k that is of
 * the result, right of it of A; the element on it is 1 in the result, which begins there. Groups above `row` are done,
 * and those right of the diagonal hold nothing: what is skipped is more than half. */
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

/* 1 / pivot, for positive finite numbers. In float64 by Newton's iteration from an approximation of 20 bits, and
 * without a branch, so that it can be under way while other work is done: the compiler's division has one. */
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

/* The pivot of the step to come, and what is known of those before. A pivot that is not positive and finite becomes
 * 1. */
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

/* Steps [SIDE row, SIDE (row + 1)). The next pivot is computed by every thread, from what it was before this step, so
 * that its reciprocal is under way while the step's own work is done. */
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

/* A (batch, n, n), of which the lower triangle is read, and X of the same shape. Bytes that must move: half of A's and
 * all of X's. Operations that must be done: 2/3 n^3 a matrix; about n (SIDE each)^2 are done. What counts is the time
 * from one step to the next, and a multiprocessor holds several matrices. */
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
        __syncthreads(); /* everyone has read the flag and is done with the memory */
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

template <typename real>
static void launch(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags)
{
    auto kernel = a->rows <= SMALL ? cholesky_leaf_kernel<real, SMALL / SIDE> : cholesky_leaf_kernel<real, LEAF / SIDE>;
    kernel<<<tchi_cuda_grid(a->batch), SIDE * SIDE, 0, state->stream>>>(
        (int)a->rows, a->batch, (const real *)a->data, a->ld, a->stride, (real *)x->data, x->ld, x->stride, flags);
}

tch_status tchi_cuda_cholesky_leaf(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x,
                                   int32_t *flags)
{
    if (a->rows == 0 || a->batch == 0) {
        return TCH_OK;
    }
    if (a->type == TCH_SCALAR_F64) {
        launch<double>(state, a, x, flags);
    } else {
        launch<float>(state, a, x, flags);
    }
    return tchi_cuda_launched(state, "cholesky_leaf_kernel");
}

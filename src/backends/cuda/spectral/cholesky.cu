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

#define LEAF TCHI_CUDA_CHOLESKY_LEAF
#define SIDE 16            /* threads along a side of a block */
#define EACH (LEAF / SIDE) /* elements along a side of a thread's share: (y + SIDE a, x + SIDE c) */
#define BLOCKS 2           /* that must fit on a multiprocessor: with no number the compiler spills for more of them */

/* What the block shares. Published vectors alternate, so that one barrier to a step is enough. */
template <typename real> struct leaf_memory {
    real vector[2][LEAF];
    real pivot[LEAF];
};

/* The lower triangle of A; beyond it, and beyond n, the identity. */
template <typename real>
static __device__ void load_leaf(real c[EACH][EACH], const real *a, int64_t ld, int n, int y, int x)
{
#pragma unroll
    for (int row = 0; row < EACH; row++) {
#pragma unroll
        for (int col = 0; col < EACH; col++) {
            int i = y + SIDE * row;
            int j = x + SIDE * col;
            c[row][col] = i < n && j <= i ? a[i * ld + j] : i == j ? (real)1 : (real)0;
        }
    }
}

/* The numbers that step k = y_k + SIDE row needs: v(j) is element (k, j) left of the diagonal and (j, k) from it on. */
template <typename real, int row>
static __device__ __forceinline__ void publish(const real c[EACH][EACH], int k, real *v, int y, int x)
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
        for (int below = row; below < EACH; below++) {
            if (y + SIDE * below >= k) {
                v[y + SIDE * below] = c[below][row];
            }
        }
    }
}

/* Rows i > k lose v(i) / v(k) times row k. Left of the diagonal of row k that is of the result, right of it of A; the
 * element on it is 1 in the result, which begins there. */
template <typename real>
static __device__ __forceinline__ void eliminate(real c[EACH][EACH], int k, real inverse, const real *v, int y, int x)
{
    real right[EACH];
#pragma unroll
    for (int col = 0; col < EACH; col++) {
        right[col] = x + SIDE * col == k ? (real)1 : v[x + SIDE * col];
    }
#pragma unroll
    for (int row = 0; row < EACH; row++) {
        int i = y + SIDE * row;
        real factor = i > k ? v[i] * inverse : (real)0;
#pragma unroll
        for (int col = 0; col < EACH; col++) {
            int j = x + SIDE * col;
            real old = j == k && i >= k ? (i == k ? (real)1 : (real)0) : c[row][col];
            c[row][col] = old - factor * right[col];
        }
    }
}

/* Steps [SIDE row, SIDE (row + 1)). A pivot that is not positive and finite becomes 1; returns whether there was
 * one. */
template <typename real, int row>
static __device__ __forceinline__ bool eliminate_rows(real c[EACH][EACH], int n, leaf_memory<real> &memory, int y,
                                                      int x)
{
    bool bad = false;
#pragma unroll 1
    for (int k = SIDE * row; k < SIDE * (row + 1) && k < n; k++) {
        real *v = memory.vector[k % 2];
        publish<real, row>(c, k, v, y, x);
        __syncthreads();
        real pivot = v[k];
        bool good = pivot > (real)0 && isfinite(pivot);
        bad = bad || !good;
        pivot = good ? pivot : (real)1;
        if (y == 0 && x == 0) {
            memory.pivot[k] = pivot;
        }
        eliminate(c, k, (real)1 / pivot, v, y, x);
    }
    return bad;
}

/* Eliminated rows times their pivots^-1/2; the identity for a flagged matrix. */
template <typename real>
static __device__ void store_leaf(const real c[EACH][EACH], real *out, int64_t ld, int n, const real *pivots,
                                  bool flagged, int y, int x)
{
#pragma unroll
    for (int row = 0; row < EACH; row++) {
        int i = y + SIDE * row;
        real scale = i < n && !flagged ? (real)1 / sqrt(pivots[i]) : (real)0;
#pragma unroll
        for (int col = 0; col < EACH; col++) {
            int j = x + SIDE * col;
            if (i < n && j < n) {
                real value = flagged ? (i == j ? (real)1 : (real)0) : c[row][col] * scale;
                out[i * ld + j] = j <= i ? value : (real)0;
            }
        }
    }
}

/* A (batch, n, n), of which the lower triangle is read, and X of the same shape. Bytes that must move: half of A's and
 * all of X's. Operations that must be done: 2/3 n^3 a matrix; every thread does its whole share in each step, 2 n
 * LEAF^2, since what counts is the time from one step to the next, and a multiprocessor holds several matrices. */
template <typename real>
static __global__ void __launch_bounds__(SIDE *SIDE, BLOCKS)
    cholesky_leaf_kernel(int n, int64_t batch, const real *a, int64_t lda, int64_t stride_a, real *x, int64_t ldx,
                         int64_t stride_x, int32_t *flags)
{
    __shared__ leaf_memory<real> memory;
    const int ty = (int)threadIdx.x / SIDE;
    const int tx = (int)threadIdx.x % SIDE;
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        real c[EACH][EACH];
        bool flagged = flags[b] != TCH_REPORT_OK;
        __syncthreads(); /* everyone has read the flag and is done with the memory */
        if (!flagged) {
            load_leaf(c, a + b * stride_a, lda, n, ty, tx);
            bool bad = eliminate_rows<real, 0>(c, n, memory, ty, tx);
            bad = eliminate_rows<real, 1>(c, n, memory, ty, tx) || bad;
            bad = eliminate_rows<real, 2>(c, n, memory, ty, tx) || bad;
            bad = eliminate_rows<real, 3>(c, n, memory, ty, tx) || bad;
            __syncthreads();
            flagged = bad;
            if (bad && threadIdx.x == 0) {
                flags[b] = TCH_REPORT_NOT_POSITIVE;
            }
        }
        store_leaf(c, x + b * stride_x, ldx, n, memory.pivot, flagged, ty, tx);
    }
}

static_assert(EACH == 4, "the kernel runs through four groups of rows");

template <typename real>
static void launch(const tchi_cuda_state *state, const tch_matrices *a, const tch_matrices *x, int32_t *flags)
{
    cholesky_leaf_kernel<real><<<tchi_cuda_grid(a->batch), SIDE * SIDE, 0, state->stream>>>(
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

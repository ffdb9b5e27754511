/* Repairs eigenvectors that are not orthonormal, as cuSOLVER's are for equal eigenvalues: in float32 those of a 17 by
 * 17 matrix of ones are off by 0.015. Gram-Schmidt by one block per matrix, slower than the solver but rarely run;
 * usually the block exits at once.
 *
 *     for (each row v[i], from the largest |w[i]| down) {
 *         before = dot(v[i], v[i]);
 *         for (pass = 0; pass < 3 && a pass took much; pass++) {
 *             for (each row v[k] that is done) {
 *                 c[k] = dot(v[k], v[i]);
 *             }
 *             v[i] -= sum over k of c[k] v[k];
 *         }
 *         v[i] = dot(v[i], v[i]) > before / 1024 ? v[i] / |v[i]| : 0;     // zeros are replaced at the end
 *     }
 *
 * The eigenvectors stay as accurate as before. Subtracting c = <v_i, v_j> times row i from row j changes its residual
 * r_j = A v_j - w_j v_j by c (w_i - w_j) v_i, and for symmetric A c (w_i - w_j) is <v_i, r_j> - <r_i, v_j>: rows mix
 * only as far as their residuals allow, which grow together by at most 1 + sqrt(2) while every c is small. Otherwise
 * the order determines which rows to trust: those of large eigenvalues come first. */
#include <float.h>

#include "backends/cuda/device/elements.cuh"
#include "decompositions.h"

#define LANES 32
#define MOST_THREADS 512

/* A row with a residual below 1/32 has no reliable direction: errors are magnified by as much. Squared. */
#define LEAST_KEPT (1.0 / 1024.0)

/* A projection leaves a fraction of what it removed, about the defect of the rows it projects from, so if it removed
 * little it suffices. Three are for nearly dependent rows. */
#define TOOK_LITTLE 0.98
#define MOST_PASSES 3

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* Rows of V that are orthonormal, or zero: all but the `gap` rows from row `first` on. */
template <typename real> struct basis {
    const real *v;
    int64_t n, ld;
    int64_t first, gap;
};

template <typename real> static __device__ inline const real *basis_row(const basis<real> &q, int64_t k)
{
    return q.v + (k < q.first ? k : k + q.gap) * q.ld;
}

/* A block's workspace: a row in double and its products with others, n numbers each in global memory, and 32 in shared
 * memory. */
struct work_row {
    double *x, *c;
    double *shared;
};

static __device__ inline double block_sum(double value, double *shared)
{
    return tchi_cuda_block_sum(value, (int)threadIdx.x, (int)blockDim.x, shared);
}

/* x = the row; returns its sum of squares. */
template <typename real> static __device__ double load_row(const real *row, int64_t n, const work_row &r)
{
    double square = 0.0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        double value = (double)row[j];
        r.x[j] = value;
        square += value * value;
    }
    return block_sum(square, r.shared);
}

/* The row = x normalized, or zero if its sum of squares is negligible. */
template <typename real> static __device__ void store_row(real *row, int64_t n, const work_row &r, double square)
{
    double scale = square > 0.0 ? 1.0 / sqrt(square) : 0.0;
    for (int64_t j = threadIdx.x; j < n; j += blockDim.x) {
        row[j] = (real)(r.x[j] * scale);
    }
    __syncthreads();
}

/* --- projection -------------------------------------------------------------------------------------------------- */

/* c = Q x, a warp per row of Q. */
template <typename real> static __device__ void multiply_rows(const basis<real> &q, const work_row &r)
{
    int64_t lane = threadIdx.x % LANES;
    for (int64_t k = threadIdx.x / LANES; k < q.n - q.gap; k += blockDim.x / LANES) {
        const real *row = basis_row(q, k);
        double sum = 0.0;
#pragma unroll 8
        for (int64_t j = lane; j < q.n; j += LANES) {
            sum += (double)row[j] * r.x[j];
        }
        sum = tchi_cuda_warp_sum(sum);
        if (lane == 0) {
            r.c[k] = sum;
        }
    }
    __syncthreads();
}

/* x -= Q' c, a thread per element; returns the sum of squares. */
template <typename real> static __device__ double subtract_rows(const basis<real> &q, const work_row &r)
{
    double square = 0.0;
    for (int64_t j = threadIdx.x; j < q.n; j += blockDim.x) {
        double value = r.x[j];
#pragma unroll 8
        for (int64_t k = 0; k < q.n - q.gap; k++) {
            value -= r.c[k] * (double)basis_row(q, k)[j];
        }
        r.x[j] = value;
        square += value * value;
    }
    return block_sum(square, r.shared);
}

/* Subtracts from x its projection on the span of Q; returns the remaining sum of squares. */
template <typename real> static __device__ double project(const basis<real> &q, const work_row &r, double square)
{
    for (int pass = 0; pass < MOST_PASSES; pass++) {
        double before = square;
        multiply_rows(q, r);
        square = subtract_rows(q, r);
        if (square > TOOK_LITTLE * before) {
            break;
        }
    }
    return square;
}

/* --- the rows of one matrix -------------------------------------------------------------------------------------- */

/* Orthogonalizes every row against those of larger |eigenvalues|; since they are ascending, the largest is at one of
 * the ends. Rows that vanish become zero. */
template <typename real>
static __device__ void orthonormalize(real *v, int64_t n, int64_t ld, const real *w, const work_row &r)
{
    int64_t low = 0;
    int64_t high = n - 1;
    while (low <= high) {
        bool at_low = fabs(w[low]) > fabs(w[high]);
        real *row = v + (at_low ? low : high) * ld;
        basis<real> larger = {v, n, ld, low, high - low + 1};
        double before = load_row(row, n, r);
        double kept = project(larger, r, before);
        store_row(row, n, r, kept > LEAST_KEPT * before ? kept : 0.0);
        low += at_low ? 1 : 0;
        high -= at_low ? 0 : 1;
    }
}

/* The unit vector with the largest residual: at least 1/n of its square while a row is zero. */
template <typename real> static __device__ int64_t freest_column(const basis<real> &q, double *shared)
{
    double most = -1.0;
    int64_t column = 0;
    for (int64_t j = threadIdx.x; j < q.n; j += blockDim.x) {
        double left = 1.0;
        for (int64_t i = 0; i < q.n; i++) {
            double entry = (double)q.v[i * q.ld + j];
            left -= entry * entry;
        }
        left = fmax(left, 0.0);
        if (left > most) {
            most = left;
            column = j;
        }
    }
    const int thread = (int)threadIdx.x, threads = (int)blockDim.x;
    double found = tchi_cuda_block_max(fmax(most, 0.0), thread, threads, shared);
    return q.n - (int64_t)tchi_cuda_block_max(most == found ? (double)(q.n - column) : 0.0, thread, threads, shared);
}

/* Replaces zero rows by vectors orthogonal to all others. */
template <typename real> static __device__ void complete(real *v, int64_t n, int64_t ld, const work_row &r)
{
    basis<real> all = {v, n, ld, 0, 0};
    for (int64_t i = 0; i < n; i++) {
        if (load_row(v + i * ld, n, r) > 0.0) {
            continue;
        }
        int64_t column = freest_column(all, r.shared);
        if (threadIdx.x == 0) {
            r.x[column] = 1.0;
        }
        __syncthreads();
        store_row(v + i * ld, n, r, project(all, r, 1.0));
    }
}

/* --- the batch --------------------------------------------------------------------------------------------------- */

/* For orthonormal rows reads two numbers per matrix. Otherwise about n^3 elements, mostly from L2, for 2 n^3 operations
 * in float64. */
template <typename real>
static __global__ void __launch_bounds__(MOST_THREADS)
    orthonormal_rows_kernel(tch_matrices v, const void *values, const double *defects, double limit, double *rows,
                            int32_t *flags)
{
    __shared__ double shared[LANES];
    const int64_t n = v.rows;
    for (int64_t b = blockIdx.x; b < v.batch; b += gridDim.x) {
        real *matrix = (real *)v.data + b * v.stride;
        double defect = defects[b];
        if (flags[b] != TCH_REPORT_OK || defect <= limit) {
            continue;
        }
        __syncthreads(); /* all threads have read the flag before it changes */
        if (isfinite(defect)) {
            work_row r = {rows + b * 2 * n, rows + b * 2 * n + n, shared};
            orthonormalize(matrix, n, v.ld, (const real *)values + b * n, r);
            complete(matrix, n, v.ld, r);
        } else if (threadIdx.x == 0) {
            flags[b] = TCH_REPORT_NO_CONVERGENCE;
        }
    }
}

/* A stable solver's rows have errors below (n + 10) u each, with margin. Half of that, since |V V' - I| was computed in
 * the precision of V and has its own error. */
static double defect_limit(tch_scalar type, int64_t n)
{
    double roundoff = type == TCH_SCALAR_F64 ? DBL_EPSILON / 2 : FLT_EPSILON / 2;
    return 0.5 * (double)(n + 10) * roundoff * sqrt((double)n);
}

tch_status tchi_cuda_orthonormal_rows(const tchi_cuda_state *state, const tch_matrices *v, const void *values,
                                      const double *defects, double *rows, int32_t *flags)
{
    /* four threads per element of a row share its products with the others */
    const int64_t n = v->rows;
    const unsigned threads = n >= MOST_THREADS / 4 ? MOST_THREADS : (unsigned)tchi_cuda_ceil_div(4 * n, LANES) * LANES;
    auto kernel = v->type == TCH_SCALAR_F64 ? orthonormal_rows_kernel<double> : orthonormal_rows_kernel<float>;
    return tchi_cuda_launch(state, "orthonormal_rows_kernel", kernel, tchi_cuda_grid(v->batch), threads, *v, values,
                            defects, defect_limit(v->type, v->rows), rows, flags);
}

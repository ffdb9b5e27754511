/* Kernels before and after cuSOLVER's calls: see decompositions.h. A block has a matrix to itself, since the batches
 * are either large or their matrices so expensive to decompose that a pass over one does not count.
 *
 *     a = flagged or not finite ? I : a * 2^-e;               // eigh_prepare; e is 0 but for extremes
 *     w[i] = values[i] * 2^e;                                 // eigh_finish
 *     a[i][i] += shift;                                       // solve_prepare
 *     a = factorization failed ? I : a;                       // solve_verdict
 */
#include "decompositions.h"

#include "backends/cuda/device/elements.cuh"

#define THREADS 256
#define LANES 32

/* --- shared by the kernels --------------------------------------------------------------------------------------- */

/* Rows are dealt to the warps of the block, so that no index is divided. */
template <typename real> static __device__ void write_identity(real *x, int64_t n, int64_t ld)
{
    for (int64_t i = threadIdx.x / LANES; i < n; i += THREADS / LANES) {
        for (int64_t j = threadIdx.x % LANES; j < n; j += LANES) {
            x[i * ld + j] = i == j ? (real)1 : (real)0;
        }
    }
}

/* --- eigendecomposition, before ---------------------------------------------------------------------------------- */

/* Entries from 2^-LIMIT to 2^LIMIT have sums of squares in range, with room for rounding errors relative to them. */
template <typename real> struct exponent_limit;
template <> struct exponent_limit<float> {
    static constexpr int value = 50;
};
template <> struct exponent_limit<double> {
    static constexpr int value = 480;
};

/* The exponent that brings the largest entry to [0.5, 1), where it has to be brought there at all. */
template <typename real> static __device__ int range_exponent(double largest)
{
    int exponent = 0;
    if (largest > 0.0) {
        frexp(largest, &exponent);
    }
    return abs(exponent) > exponent_limit<real>::value ? exponent : 0;
}

template <typename real> static __device__ void scale_matrix(real *x, int64_t n, int64_t ld, int exponent)
{
    for (int64_t i = threadIdx.x / LANES; i < n; i += THREADS / LANES) {
        for (int64_t j = threadIdx.x % LANES; j < n; j += LANES) {
            x[i * ld + j] = ldexp(x[i * ld + j], -exponent);
        }
    }
}

/* The largest |entry|, to all threads; infinity where an entry is not finite. */
template <typename real> static __device__ double largest_entry(const real *x, int64_t n, int64_t ld, double *shared)
{
    double largest = 0.0;
    int finite = 1;
    for (int64_t i = threadIdx.x / LANES; i < n; i += THREADS / LANES) {
        for (int64_t j = threadIdx.x % LANES; j < n; j += LANES) {
            real entry = x[i * ld + j];
            finite = finite && isfinite(entry);
            largest = fmax(largest, (double)fabs(entry));
        }
    }
    double found = tchi_cuda_block_max(largest, (int)threadIdx.x, THREADS, shared);
    return __syncthreads_and(finite) ? found : (double)INFINITY;
}

/* Reads n n elements of every matrix once; writes only those that are out of the ordinary. */
template <typename real>
static __global__ void __launch_bounds__(THREADS) eigh_prepare_kernel(real *v, int64_t n, int64_t ld, int64_t stride,
                                                                      int64_t batch, int32_t *exponents, int32_t *flags)
{
    __shared__ double shared[LANES];
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        real *x = v + b * stride;
        int flag = flags[b];
        double largest = flag == TCH_REPORT_OK ? largest_entry(x, n, ld, shared) : 0.0;
        __syncthreads(); /* everyone has read the flag before it changes */
        if (isinf(largest)) {
            flag = TCH_REPORT_NOT_FINITE;
        }
        int exponent = range_exponent<real>(flag == TCH_REPORT_OK ? largest : 0.0);
        if (flag != TCH_REPORT_OK) {
            write_identity(x, n, ld);
        } else if (exponent != 0) {
            scale_matrix(x, n, ld, exponent);
        }
        if (threadIdx.x == 0) {
            exponents[b] = exponent;
            flags[b] = flag;
        }
    }
}

tch_status tchi_cuda_eigh_prepare(const tchi_cuda_state *state, const tch_matrices *v, int32_t *exponents,
                                  int32_t *flags)
{
    unsigned grid = tchi_cuda_grid(v->batch);
    if (v->type == TCH_SCALAR_F64) {
        eigh_prepare_kernel<<<grid, THREADS, 0, state->stream>>>((double *)v->data, v->rows, v->ld, v->stride, v->batch,
                                                                 exponents, flags);
    } else {
        eigh_prepare_kernel<<<grid, THREADS, 0, state->stream>>>((float *)v->data, v->rows, v->ld, v->stride, v->batch,
                                                                 exponents, flags);
    }
    return tchi_cuda_launched(state, "eigh_prepare_kernel");
}

/* --- eigendecomposition, after ----------------------------------------------------------------------------------- */

/* Moves n numbers of every matrix. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    eigh_finish_kernel(const real *values, const int32_t *exponents, const int32_t *info, real *w, int64_t n,
                       int64_t stride, int64_t batch, int32_t *flags)
{
    for (int64_t b = blockIdx.x; b < batch; b += gridDim.x) {
        int good = flags[b] == TCH_REPORT_OK;
        __syncthreads();
        if (good && info[b] != 0 && threadIdx.x == 0) {
            flags[b] = TCH_REPORT_NO_CONVERGENCE;
        }
        bool beyond = false; /* eigenvalues can be larger than any entry */
        for (int64_t i = threadIdx.x; good && info[b] == 0 && i < n; i += THREADS) {
            real value = ldexp(values[b * n + i], exponents[b]);
            beyond = beyond || !isfinite(value);
            w[b * stride + i] = value;
        }
        if (__syncthreads_or(beyond) && threadIdx.x == 0) {
            flags[b] = TCH_REPORT_OVERFLOW;
        }
    }
}

tch_status tchi_cuda_eigh_finish(const tchi_cuda_state *state, const void *values, const int32_t *exponents,
                                 const int32_t *info, const tch_matrices *w, int32_t *flags)
{
    unsigned grid = tchi_cuda_grid(w->batch);
    if (w->type == TCH_SCALAR_F64) {
        eigh_finish_kernel<<<grid, THREADS, 0, state->stream>>>((const double *)values, exponents, info,
                                                                (double *)w->data, w->cols, w->stride, w->batch, flags);
    } else {
        eigh_finish_kernel<<<grid, THREADS, 0, state->stream>>>((const float *)values, exponents, info,
                                                                (float *)w->data, w->cols, w->stride, w->batch, flags);
    }
    return tchi_cuda_launched(state, "eigh_finish_kernel");
}

/* --- eigendecomposition of numbers ------------------------------------------------------------------------------- */

template <typename real>
static __global__ void __launch_bounds__(THREADS)
    eigh_single_kernel(real *v, int64_t v_stride, real *w, int64_t w_stride, int64_t batch, int32_t *flags)
{
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x; b < batch; b += step) {
        if (flags[b] != TCH_REPORT_OK) {
            continue;
        }
        if (isfinite(v[b * v_stride])) {
            w[b * w_stride] = v[b * v_stride];
            v[b * v_stride] = (real)1;
        } else {
            flags[b] = TCH_REPORT_NOT_FINITE;
        }
    }
}

tch_status tchi_cuda_eigh_single(const tchi_cuda_state *state, const tch_matrices *v, const tch_matrices *w,
                                 int32_t *flags)
{
    unsigned grid = tchi_cuda_grid(tchi_cuda_ceil_div(v->batch, THREADS));
    if (v->type == TCH_SCALAR_F64) {
        eigh_single_kernel<<<grid, THREADS, 0, state->stream>>>((double *)v->data, v->stride, (double *)w->data,
                                                                w->stride, v->batch, flags);
    } else {
        eigh_single_kernel<<<grid, THREADS, 0, state->stream>>>((float *)v->data, v->stride, (float *)w->data,
                                                                w->stride, v->batch, flags);
    }
    return tchi_cuda_launched(state, "eigh_single_kernel");
}

/* --- solve, before ----------------------------------------------------------------------------------------------- */

template <typename real> struct solve_operands {
    real *a;
    int64_t n, a_ld, a_stride;
    real *b;
    int64_t b_stride;
    int64_t batch;
};

/* Touches the n numbers of every diagonal. The sum is rounded once. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    solve_prepare_kernel(solve_operands<real> o, const double *shift, const int32_t *flags, void **a_addresses,
                         void **b_addresses)
{
    for (int64_t m = blockIdx.x; m < o.batch; m += gridDim.x) {
        real *a = o.a + m * o.a_stride;
        if (threadIdx.x == 0) {
            a_addresses[m] = a;
            b_addresses[m] = o.b + m * o.b_stride;
        }
        if (shift == NULL || flags[m] != TCH_REPORT_OK) {
            continue;
        }
        for (int64_t i = threadIdx.x; i < o.n; i += THREADS) {
            a[i * (o.a_ld + 1)] = (real)((double)a[i * (o.a_ld + 1)] + shift[m]);
        }
    }
}

template <typename real>
static void prepare_solve(const tchi_cuda_state *state, const tch_matrices *a, const double *shift,
                          const tch_matrices *b, const int32_t *flags, void **a_addresses, void **b_addresses)
{
    solve_operands<real> o = {(real *)a->data, a->rows, a->ld, a->stride, (real *)b->data, b->stride, a->batch};
    solve_prepare_kernel<real>
        <<<tchi_cuda_grid(a->batch), THREADS, 0, state->stream>>>(o, shift, flags, a_addresses, b_addresses);
}

tch_status tchi_cuda_solve_prepare(const tchi_cuda_state *state, const tch_matrices *a, const double *shift,
                                   const tch_matrices *b, const int32_t *flags, void **a_addresses, void **b_addresses)
{
    if (a->type == TCH_SCALAR_F64) {
        prepare_solve<double>(state, a, shift, b, flags, a_addresses, b_addresses);
    } else {
        prepare_solve<float>(state, a, shift, b, flags, a_addresses, b_addresses);
    }
    return tchi_cuda_launched(state, "solve_prepare_kernel");
}

/* --- solve, between the factorization and the triangular solves -------------------------------------------------- */

/* A NaN or an infinity in the triangle that was read ends up in the diagonal of the factor, whatever info says. */
template <typename real> static __device__ int diagonal_is_good(const real *a, int64_t n, int64_t ld)
{
    int good = 1;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        real pivot = a[i * (ld + 1)];
        good = good && pivot > (real)0 && isfinite(pivot);
    }
    return __syncthreads_and(good);
}

/* Reads the n numbers of every diagonal. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    solve_verdict_kernel(real *data, int64_t n, int64_t ld, int64_t stride, int64_t batch, const int32_t *info,
                         int32_t *flags)
{
    for (int64_t m = blockIdx.x; m < batch; m += gridDim.x) {
        real *a = data + m * stride;
        int flag = flags[m];
        int factored = diagonal_is_good(a, n, ld) && info[m] == 0;
        if (flag == TCH_REPORT_OK && !factored) {
            flag = TCH_REPORT_NOT_POSITIVE;
        }
        if (flag != TCH_REPORT_OK) {
            write_identity(a, n, ld);
        }
        if (threadIdx.x == 0) {
            flags[m] = flag;
        }
    }
}

tch_status tchi_cuda_solve_verdict(const tchi_cuda_state *state, const tch_matrices *a, const int32_t *info,
                                   int32_t *flags)
{
    unsigned grid = tchi_cuda_grid(a->batch);
    if (a->type == TCH_SCALAR_F64) {
        solve_verdict_kernel<<<grid, THREADS, 0, state->stream>>>((double *)a->data, a->rows, a->ld, a->stride,
                                                                  a->batch, info, flags);
    } else {
        solve_verdict_kernel<<<grid, THREADS, 0, state->stream>>>((float *)a->data, a->rows, a->ld, a->stride, a->batch,
                                                                  info, flags);
    }
    return tchi_cuda_launched(state, "solve_verdict_kernel");
}

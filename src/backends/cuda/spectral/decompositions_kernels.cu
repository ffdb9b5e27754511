/* Kernels before and after cuSOLVER's calls: see decompositions.h. A block per matrix: either the batch is large or a
 * pass over a matrix is negligible next to its decomposition.
 *
 *     a = flagged or not finite ? I : a * 2^-e;               // eigh_prepare; the largest |a| is below 1
 *     w[i] = max(values[0], ..., values[i]) * 2^e;            // eigh_finish
 *     a[i][i] += shift;                                       // solve_prepare
 *     a = factorization failed ? I : a;                       // solve_verdict */
#include "decompositions.h"

#include "backends/cuda/device/elements.cuh"

#define THREADS 256
#define LANES 32

/* --- shared by the kernels --------------------------------------------------------------------------------------- */

/* Rows are assigned to the warps of the block, so that no index is divided. */
template <typename real> static __device__ void write_identity(real *x, int64_t n, int64_t ld)
{
    for (int64_t i = threadIdx.x / LANES; i < n; i += THREADS / LANES) {
        for (int64_t j = threadIdx.x % LANES; j < n; j += LANES) {
            x[i * ld + j] = i == j ? (real)1 : (real)0;
        }
    }
}

/* --- eigendecomposition, before ---------------------------------------------------------------------------------- */

/* The exponent that scales the largest entry to [0.5, 1). */
static __device__ int range_exponent(double largest)
{
    int exponent = 0;
    if (largest > 0.0) {
        frexp(largest, &exponent);
    }
    return exponent;
}

template <typename real> static __device__ void scale_matrix(real *x, int64_t n, int64_t ld, int exponent)
{
    for (int64_t i = threadIdx.x / LANES; i < n; i += THREADS / LANES) {
        for (int64_t j = threadIdx.x % LANES; j < n; j += LANES) {
            x[i * ld + j] = ldexp(x[i * ld + j], -exponent);
        }
    }
}

/* The largest |entry|, to all threads; infinity if an entry is not finite. */
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

/* Every matrix is scaled, since cuSOLVER loses small entries long before their squares underflow: in float32, an entry
 * of 5e-5 times the norm for a norm of 1e-10. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    eigh_prepare_kernel(tch_matrices v, int32_t *exponents, int32_t *flags)
{
    __shared__ double shared[LANES];
    const int64_t n = v.rows, ld = v.ld;
    for (int64_t b = blockIdx.x; b < v.batch; b += gridDim.x) {
        real *x = (real *)v.data + b * v.stride;
        int flag = flags[b];
        double largest = flag == TCH_REPORT_OK ? largest_entry(x, n, ld, shared) : 0.0;
        __syncthreads(); /* all threads have read the flag before it changes */
        if (isinf(largest)) {
            flag = TCH_REPORT_NOT_FINITE;
        }
        int exponent = range_exponent(flag == TCH_REPORT_OK ? largest : 0.0);
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
    auto kernel = v->type == TCH_SCALAR_F64 ? eigh_prepare_kernel<double> : eigh_prepare_kernel<float>;
    return tchi_cuda_launch(state, "eigh_prepare_kernel", kernel, tchi_cuda_grid(v->batch), THREADS, *v, exponents,
                            flags);
}

/* --- eigendecomposition, after ----------------------------------------------------------------------------------- */

/* A thread scales consecutive eigenvalues. The running maximum makes them ascending: in clusters cuSOLVER's may descend
 * by rounding. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    eigh_finish_kernel(const void *values, const int32_t *exponents, const int32_t *info, tch_matrices w,
                       int32_t *flags)
{
    __shared__ real largest[THREADS];
    const int64_t each = (w.cols + THREADS - 1) / THREADS, first = threadIdx.x * each;
    const int64_t end = first + each < w.cols ? first + each : w.cols;
    for (int64_t b = blockIdx.x; b < w.batch; b += gridDim.x) {
        const real *from = (const real *)values + b * w.cols;
        real most = from[first < w.cols ? first : w.cols - 1];
        for (int64_t i = first + 1; i < end; i++) {
            most = fmax(most, from[i]);
        }
        largest[threadIdx.x] = most;
        int good = flags[b] == TCH_REPORT_OK;
        __syncthreads();
        most = largest[0];
        for (unsigned before = 1; first < end && before < threadIdx.x; before++) {
            most = fmax(most, largest[before]);
        }
        if (good && info[b] != 0 && threadIdx.x == 0) {
            flags[b] = TCH_REPORT_NO_CONVERGENCE;
        }
        bool beyond = false; /* eigenvalues can be larger than any entry */
        for (int64_t i = first; good && info[b] == 0 && i < end; i++) {
            most = i == 0 ? from[0] : fmax(most, from[i]);
            real value = ldexp(most, exponents[b]);
            beyond = beyond || isnan(from[i]) || !isfinite(value);
            ((real *)w.data)[b * w.stride + i] = value;
        }
        if (__syncthreads_or(beyond) && threadIdx.x == 0) {
            flags[b] = TCH_REPORT_OVERFLOW;
        }
    }
}

tch_status tchi_cuda_eigh_finish(const tchi_cuda_state *state, const void *values, const int32_t *exponents,
                                 const int32_t *info, const tch_matrices *w, int32_t *flags)
{
    auto kernel = w->type == TCH_SCALAR_F64 ? eigh_finish_kernel<double> : eigh_finish_kernel<float>;
    return tchi_cuda_launch(state, "eigh_finish_kernel", kernel, tchi_cuda_grid(w->batch), THREADS, values, exponents,
                            info, *w, flags);
}

/* --- eigendecomposition of numbers ------------------------------------------------------------------------------- */

template <typename real>
static __global__ void __launch_bounds__(THREADS) eigh_single_kernel(tch_matrices v, tch_matrices w, int32_t *flags)
{
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t b = (int64_t)blockIdx.x * THREADS + threadIdx.x; b < v.batch; b += step) {
        real *vector = (real *)v.data + b * v.stride;
        if (flags[b] == TCH_REPORT_OK && isfinite(*vector)) {
            ((real *)w.data)[b * w.stride] = *vector;
            *vector = (real)1;
        } else if (flags[b] == TCH_REPORT_OK) {
            flags[b] = TCH_REPORT_NOT_FINITE;
        }
    }
}

tch_status tchi_cuda_eigh_single(const tchi_cuda_state *state, const tch_matrices *v, const tch_matrices *w,
                                 int32_t *flags)
{
    auto kernel = v->type == TCH_SCALAR_F64 ? eigh_single_kernel<double> : eigh_single_kernel<float>;
    return tchi_cuda_launch(state, "eigh_single_kernel", kernel, tchi_cuda_grid(tchi_cuda_ceil_div(v->batch, THREADS)),
                            THREADS, *v, *w, flags);
}

/* --- solve, before ----------------------------------------------------------------------------------------------- */

/* Touches the n numbers of every diagonal. The sum is rounded once. */
template <typename real>
static __global__ void __launch_bounds__(THREADS)
    solve_prepare_kernel(tch_matrices a, const double *shift, tch_matrices b, const int32_t *flags, void **a_addresses,
                         void **b_addresses)
{
    for (int64_t m = blockIdx.x; m < a.batch; m += gridDim.x) {
        real *matrix = (real *)a.data + m * a.stride;
        if (threadIdx.x == 0) {
            a_addresses[m] = matrix;
            b_addresses[m] = (real *)b.data + m * b.stride;
        }
        if (shift == NULL || flags[m] != TCH_REPORT_OK) {
            continue;
        }
        for (int64_t i = threadIdx.x; i < a.rows; i += THREADS) {
            real *entry = matrix + i * (a.ld + 1);
            *entry = (real)((double)*entry + shift[m]);
        }
    }
}

tch_status tchi_cuda_solve_prepare(const tchi_cuda_state *state, const tch_matrices *a, const double *shift,
                                   const tch_matrices *b, const int32_t *flags, void **a_addresses, void **b_addresses)
{
    auto kernel = a->type == TCH_SCALAR_F64 ? solve_prepare_kernel<double> : solve_prepare_kernel<float>;
    return tchi_cuda_launch(state, "solve_prepare_kernel", kernel, tchi_cuda_grid(a->batch), THREADS, *a, shift, *b,
                            flags, a_addresses, b_addresses);
}

/* --- solve, between the factorization and the triangular solves -------------------------------------------------- */

/* A NaN or an infinity in the input triangle reaches the factor's diagonal, whatever info says. */
template <typename real> static __device__ int diagonal_is_good(const real *a, int64_t n, int64_t ld)
{
    int good = 1;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        real pivot = a[i * (ld + 1)];
        good = good && pivot > (real)0 && isfinite(pivot);
    }
    return __syncthreads_and(good);
}

template <typename real>
static __global__ void __launch_bounds__(THREADS)
    solve_verdict_kernel(tch_matrices all, const int32_t *info, int32_t *flags)
{
    const int64_t n = all.rows, ld = all.ld;
    for (int64_t m = blockIdx.x; m < all.batch; m += gridDim.x) {
        real *a = (real *)all.data + m * all.stride;
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
    auto kernel = a->type == TCH_SCALAR_F64 ? solve_verdict_kernel<double> : solve_verdict_kernel<float>;
    return tchi_cuda_launch(state, "solve_verdict_kernel", kernel, tchi_cuda_grid(a->batch), THREADS, *a, info, flags);
}

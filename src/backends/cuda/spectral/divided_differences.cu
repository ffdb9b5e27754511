/* Divided differences of a matrix power. With values: the power of a matrix that is diagonal up to rounding, to first
 * order in its off-diagonal part, which refines a float32 eigendecomposition to a power beyond float32
 * (src/linalg/eigen.c). Without: its derivative, a rotated gradient times divided differences, plus the effect of
 * relative damping through the largest eigenvalue.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {                           // f(x) = (x + damping)^power
 *             slope = i, j far apart ? (f(lambda[i]) - f(lambda[j])) / (lambda[i] - lambda[j]) : f'(lambda[i]);
 *             b[i][j] = i == j ? f(lambda[i]) : b[i][j] is small ? b[i][j] * slope : 0;
 *         }
 *     }
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {                           // x = w[i] + damping, y = w[j] + damping
 *             b[i][j] *= x == y ? power * pow(x, power - 1) : (pow(x, power) - pow(y, power)) / (x - y);
 *         }
 *     }
 *     if (damping == relative_eps * largest) {                // for the i whose w[i] equals the largest
 *         b[i][i] += relative_eps * (sum over k of b[k][k]) / how many they are;
 *     } */
#include "backends/cuda/device/elements.cuh"

#include "backends/loewner.h"

#define THREADS 256

typedef struct differences_params {
    const double *lambda, *values, *damping;
    int64_t lambda_stride, values_stride;
    double power;
    double *b;
    int64_t n, ld, stride, batch;
} differences_params;

/* The slope between two points of (lambda + damping)^power, or the derivative if they are too close. Below zero the
 * clamped function is flat. */
static __device__ inline double slope(const differences_params &params, double x, double fx, double y, double fy,
                                      double damping)
{
    double apart = x - y;
    double scale = fmax(fabs(x + damping), fabs(y + damping));
    if (fabs(apart) > 1e-6 * scale) {
        return (fx - fy) / apart;
    }
    return fmin(x, y) < 0.0 || x + damping == 0.0 ? 0.0 : params.power * fx / (x + damping);
}

/* Memory: 16 n^2 bytes per matrix. Compute: dominated by a division per element. */
static __global__ void __launch_bounds__(THREADS) divided_differences_kernel(differences_params params)
{
    int64_t count = params.n * params.n;
    for (int64_t matrix = blockIdx.y; matrix < params.batch; matrix += gridDim.y) {
        const double *lambda = params.lambda + matrix * params.lambda_stride;
        const double *values = params.values + matrix * params.values_stride;
        double damping = params.damping[matrix];
        for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < count; t += (int64_t)gridDim.x * THREADS) {
            int64_t i = t / params.n;
            int64_t j = t - i * params.n;
            double *place = params.b + matrix * params.stride + i * params.ld + j;
            double least = fmin(lambda[i], lambda[j]) + damping;
            double element = *place;
            bool small = fabs(element) <= 0.5 * fmax(least, damping);
            double between = small ? element * slope(params, lambda[i], values[i], lambda[j], values[j], damping) : 0.0;
            *place = i == j ? values[i] : between;
        }
    }
}

/* --- derivatives of a power --------------------------------------------------------------------------------------- */

typedef struct loewner_params {
    tch_spectrum_map map;
    const double *w;
    int64_t w_stride;
    double *b;
    int64_t n, ld, stride, batch;
    int32_t *flags;
} loewner_params;

/* Memory: 16 n^2 bytes per matrix. Compute: two exponentials, two logarithms and three divisions per element, which
 * dominate in float64. */
static __global__ void __launch_bounds__(THREADS) loewner_kernel(loewner_params params)
{
    int64_t count = params.n * params.n;
    for (int64_t matrix = blockIdx.y; matrix < params.batch; matrix += gridDim.y) {
        if (params.flags[matrix] != TCH_REPORT_OK) {
            continue;
        }
        const double *w = params.w + matrix * params.w_stride;
        tchi_spectrum s = tchi_spectrum_of(&params.map, w[params.n - 1]);
        for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < count; t += (int64_t)gridDim.x * THREADS) {
            int64_t i = t / params.n;
            int64_t j = t - i * params.n;
            tchi_damped p = tchi_damp(&params.map, &s, w[i]);
            tchi_damped q = tchi_damp(&params.map, &s, w[j]);
            params.b[matrix * params.stride + i * params.ld + j] *= tchi_divided_difference(params.map.power, p, q);
        }
    }
}

/* Whether the function has a derivative in range at eigenvalue i. */
static __device__ inline int32_t judge(const loewner_params &params, const tchi_spectrum &s, const double *w, int64_t i)
{
    tchi_damped d = tchi_damp(&params.map, &s, w[i]);
    if (!params.map.clamp && w[i] < -fmax(params.map.negative * s.largest, s.added)) {
        return TCH_REPORT_NOT_POSITIVE;
    }
    if (isfinite(tchi_divided_difference(params.map.power, d, d))) {
        return TCH_REPORT_OK;
    }
    return d.place > 0.0 ? TCH_REPORT_OVERFLOW : TCH_REPORT_NOT_POSITIVE;
}

/* A block per matrix. Memory: a line per diagonal element, twice. */
static __global__ void __launch_bounds__(THREADS) loewner_ends_kernel(loewner_params params)
{
    __shared__ double shared[32];
    for (int64_t matrix = blockIdx.x; matrix < params.batch; matrix += gridDim.x) {
        if (params.flags[matrix] != TCH_REPORT_OK) {
            continue;
        }
        const double *w = params.w + matrix * params.w_stride;
        double *b = params.b + matrix * params.stride;
        tchi_spectrum s = tchi_spectrum_of(&params.map, w[params.n - 1]);
        double top = s.largest * (1.0 - TCHI_LOEWNER_EQUAL);
        double sum = 0.0;
        double equal = 0.0;
        bool bad = false;
        bool beyond = false;
        for (int64_t i = threadIdx.x; i < params.n; i += THREADS) {
            int32_t report = judge(params, s, w, i);
            bad = bad || report == TCH_REPORT_NOT_POSITIVE;
            beyond = beyond || report == TCH_REPORT_OVERFLOW;
            sum += b[i * params.ld + i];
            equal += w[i] >= top ? 1.0 : 0.0;
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        equal = tchi_cuda_block_sum(equal, (int)threadIdx.x, THREADS, shared);
        bad = __syncthreads_or(bad) != 0;
        beyond = __syncthreads_or(beyond) != 0;
        for (int64_t i = threadIdx.x; i < params.n && s.relative; i += THREADS) {
            b[i * params.ld + i] += w[i] >= top ? params.map.relative_eps * sum / equal : 0.0;
        }
        if (threadIdx.x == 0) {
            params.flags[matrix] = bad ? TCH_REPORT_NOT_POSITIVE : beyond ? TCH_REPORT_OVERFLOW : TCH_REPORT_OK;
        }
    }
}

extern "C" tch_status tchi_cuda_divided_differences(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                                    const tch_matrices *values, const double *damping,
                                                    const tch_matrices *b, int32_t *flags)
{
    const double *spectrum = (const double *)w->data;
    double *data = (double *)b->data;
    if (b->rows == 0 || b->batch == 0) {
        return TCH_OK;
    }
    if (values == NULL) {
        loewner_params params = {*map, spectrum, w->stride, data, b->rows, b->ld, b->stride, b->batch, flags};
        dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(b->rows * b->rows, THREADS)), tchi_cuda_grid_yz(b->batch));
        TCHI_TRY(tchi_cuda_launch(state, "loewner", loewner_kernel, grid, THREADS, params));
        return tchi_cuda_launch(state, "loewner_ends", loewner_ends_kernel, tchi_cuda_grid(b->batch), THREADS, params);
    }
    differences_params params = {spectrum,       (const double *)values->data,
                                 damping,        w->stride,
                                 values->stride, map->power,
                                 data,           b->rows,
                                 b->ld,          b->stride,
                                 b->batch};
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(b->rows * b->rows, 4 * THREADS)), tchi_cuda_grid_yz(b->batch));
    return tchi_cuda_launch(state, "divided_differences", divided_differences_kernel, grid, THREADS, params);
}

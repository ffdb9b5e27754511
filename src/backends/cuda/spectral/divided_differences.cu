/* A function of a matrix that is diagonal up to rounding, to first order in what is off its diagonal: what turns a
 * float32 eigendecomposition into a power that is good beyond float32 (src/linalg/eigen.c).
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {                           // f(x) = (x + damping)^power
 *             slope = i, j far apart ? (f(lambda[i]) - f(lambda[j])) / (lambda[i] - lambda[j]) : f'(lambda[i]);
 *             b[i][j] = i == j ? f(lambda[i]) : b[i][j] is small ? b[i][j] * slope : 0;
 *         }
 *     }
 */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

#define THREADS 256

typedef struct differences_params {
    const double *lambda, *values, *damping;
    int64_t lambda_stride, values_stride;
    double power;
    double *b;
    int64_t n, ld, stride, batch;
} differences_params;

/* The slope between two points of (lambda + damping)^power; where they are too close for a quotient, its derivative.
 * Below zero the function was clamped, and is flat. */
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

/* Moves: 16 n^2 bytes for each matrix. Does: a division for each element, beside which the rest is nothing. */
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

extern "C" tch_status tchi_cuda_divided_differences(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                                    const tch_matrices *values, const double *damping,
                                                    const tch_matrices *b, int32_t *flags)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (b->rows == 0 || b->batch == 0) {
        return TCH_OK;
    }
    if (values == NULL) {
        return tchi_cuda_loewner(s, map, w, b, flags);
    }
    differences_params params = {(const double *)w->data,
                                 (const double *)values->data,
                                 damping,
                                 w->stride,
                                 values->stride,
                                 map->power,
                                 (double *)b->data,
                                 b->rows,
                                 b->ld,
                                 b->stride,
                                 b->batch};
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(b->rows * b->rows, 4 * THREADS)), tchi_cuda_grid_yz(b->batch));
    divided_differences_kernel<<<grid, THREADS, 0, s->stream>>>(params);
    return tchi_cuda_launched(s, "divided_differences");
}

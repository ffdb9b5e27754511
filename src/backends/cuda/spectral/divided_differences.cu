/* A function of a matrix that is diagonal up to rounding, to first order in what is off its diagonal: what turns a
 * float32 eigendecomposition into a power that is good beyond float32 (src/linalg/eigen.c). */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

#define THREADS 256

typedef struct differences_job {
    const double *lambda, *values, *damping;
    int64_t lambda_stride, values_stride;
    double power;
    double *b;
    int64_t n, ld, stride, batch;
} differences_job;

/* The slope between two points of (lambda + damping)^power; where they are too close for a quotient, its derivative.
 * Below zero the function was clamped, and is flat. */
static __device__ inline double slope(const differences_job &job, double x, double fx, double y, double fy,
                                      double damping)
{
    double apart = x - y;
    double scale = fmax(fabs(x + damping), fabs(y + damping));
    if (fabs(apart) > 1e-6 * scale) {
        return (fx - fy) / apart;
    }
    return fmin(x, y) < 0.0 || x + damping == 0.0 ? 0.0 : job.power * fx / (x + damping);
}

/* Moves: 16 n^2 bytes for each matrix. Does: a division for each element, beside which the rest is nothing. */
static __global__ void __launch_bounds__(THREADS) divided_differences_kernel(differences_job job)
{
    int64_t count = job.n * job.n;
    for (int64_t matrix = blockIdx.y; matrix < job.batch; matrix += gridDim.y) {
        const double *lambda = job.lambda + matrix * job.lambda_stride;
        const double *values = job.values + matrix * job.values_stride;
        double damping = job.damping[matrix];
        for (int64_t t = (int64_t)blockIdx.x * THREADS + threadIdx.x; t < count; t += (int64_t)gridDim.x * THREADS) {
            int64_t i = t / job.n;
            int64_t j = t - i * job.n;
            double *place = job.b + matrix * job.stride + i * job.ld + j;
            double least = fmin(lambda[i], lambda[j]) + damping;
            double element = *place;
            bool small = fabs(element) <= 0.5 * fmax(least, damping);
            double between = small ? element * slope(job, lambda[i], values[i], lambda[j], values[j], damping) : 0.0;
            *place = i == j ? values[i] : between;
        }
    }
}

extern "C" tch_status tchi_cuda_divided_differences(void *state, const tch_matrices *lambda, const tch_matrices *values,
                                                    const double *damping, double power, const tch_matrices *b)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    if (b->rows == 0 || b->batch == 0) {
        return TCH_OK;
    }
    differences_job job = {(const double *)lambda->data,
                           (const double *)values->data,
                           damping,
                           lambda->stride,
                           values->stride,
                           power,
                           (double *)b->data,
                           b->rows,
                           b->ld,
                           b->stride,
                           b->batch};
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(b->rows * b->rows, 4 * THREADS)), tchi_cuda_grid_yz(b->batch));
    divided_differences_kernel<<<grid, THREADS, 0, s->stream>>>(job);
    return tchi_cuda_launched(s, "divided_differences");
}

/* Derivatives of a matrix power: a rotated gradient times divided differences, element by element, and then what the
 * damping of all does through the largest eigenvalue.
 *
 *     for (i = 0; i < n; i++) {
 *         for (j = 0; j < n; j++) {                           // x = w[i] + damping, y = w[j] + damping
 *             b[i][j] *= x == y ? power * pow(x, power - 1) : (pow(x, power) - pow(y, power)) / (x - y);
 *         }
 *     }
 *     if (damping == relative_eps * largest) {                // for the i whose w[i] equals the largest
 *         b[i][i] += relative_eps * (sum over k of b[k][k]) / how many they are;
 *     }
 */
#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

#include "backends/loewner.h"

#define THREADS 256

typedef struct loewner_params {
    tch_spectrum_map map;
    const double *w;
    int64_t w_stride;
    double *b;
    int64_t n, ld, stride, batch;
    int32_t *flags;
} loewner_params;

/* Moves: 16 n^2 bytes for each matrix. Does: two exponentials, two logarithms and three divisions for each element,
 * which in float64 take longer than that. */
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

/* Whether the function has a derivative at eigenvalue i, and if so whether it is one in range. */
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

/* A block for each matrix. Moves: a line of memory for each of n diagonal elements, twice. */
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

extern "C" tch_status tchi_cuda_loewner(const tchi_cuda_state *s, const tch_spectrum_map *map, const tch_matrices *w,
                                        const tch_matrices *b, int32_t *flags)
{
    loewner_params params = {
        *map, (const double *)w->data, w->stride, (double *)b->data, b->rows, b->ld, b->stride, b->batch, flags};
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(b->rows * b->rows, THREADS)), tchi_cuda_grid_yz(b->batch));
    loewner_kernel<<<grid, THREADS, 0, s->stream>>>(params);
    TCHI_CUDA_PASS(tchi_cuda_launched(s, "loewner"));
    loewner_ends_kernel<<<tchi_cuda_grid(b->batch), THREADS, 0, s->stream>>>(params);
    return tchi_cuda_launched(s, "loewner_ends");
}

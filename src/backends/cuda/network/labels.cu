/* Labels drawn from the softmax of logits. torchium/backend.h specifies a row's uniform number; sums are in float64, so
 * that the CPU, which adds in another order, draws the same labels up to rounding errors of 2^-53.
 *
 *     top = the largest of logits[i];
 *     for (sum = 0, j = 0; j < cols; j++) {
 *         sum += exp(logits[i][j] - top);
 *     }
 *     limit = uniform(seed, i) * sum;
 *     for (part = 0, j = 0; j < cols - 1; j++) {
 *         part += exp(logits[i][j] - top);
 *         if (part > limit) {
 *             break;
 *         }
 *     }
 *     labels[i] = j;                                          // -1 where a logit is not finite */
#include "backends/cuda/update/updates.cuh"

#define WARPS 4

/* The maximum of a row, or NaN if any element is not finite. Called by all lanes of a warp. */
static __device__ inline double largest_of(const tchi_cuda_operand &x, int64_t i, int64_t cols, int lane)
{
    double top = -INFINITY;
    bool good = true;
    for (int64_t j = lane; j < cols; j += 32) {
        double value = tchi_cuda_load<double>(x.type, tchi_cuda_at(x, 0, i, j), 0, 0);
        good = good && isfinite(value);
        top = fmax(top, value);
    }
    return __all_sync(0xFFFFFFFFu, good) ? tchi_cuda_warp_max(top) : (double)NAN;
}

/* Inclusive prefix sums over a warp. */
static __device__ inline double sums_to_lane(double value, int lane)
{
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        double below = __shfl_up_sync(0xFFFFFFFFu, value, distance);
        value += lane >= distance ? below : 0.0;
    }
    return value;
}

/* Walks along a row until the sum of exp(x - top) passes `limit`; returns the class, or `cols`, and the sum so far. */
static __device__ inline int64_t walk_row(const tchi_cuda_operand &x, int64_t i, int64_t cols, double top, double limit,
                                          int lane, double *sum)
{
    *sum = 0;
    for (int64_t first = 0; first < cols; first += 32) {
        int64_t j = first + lane;
        double part = j < cols ? exp(tchi_cuda_load<double>(x.type, tchi_cuda_at(x, 0, i, j), 0, 0) - top) : 0.0;
        double passed = *sum + sums_to_lane(part, lane);
        unsigned over = __ballot_sync(0xFFFFFFFFu, passed > limit && j < cols);
        if (over != 0) {
            return first + __ffs((int)over) - 1;
        }
        *sum = __shfl_sync(0xFFFFFFFFu, passed, 31);
    }
    return cols;
}

/* logits (rows, cols). Memory: 4 bytes per element, the second and third pass over a row from cache. Compute: up to two
 * exponentials per element. A warp per row. The second walk adds in the order of the first, so it exceeds any fraction
 * of the sum below 1. */
static __global__ void __launch_bounds__(WARPS * 32)
    sample_labels_kernel(int64_t rows, int64_t cols, tchi_cuda_operand logits, uint64_t seed, int32_t *labels)
{
    const int lane = (int)threadIdx.x % 32;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; i < rows; i += (int64_t)gridDim.x * WARPS) {
        uint4 counter = make_uint4((uint32_t)i, (uint32_t)((uint64_t)i >> 32), 0, 0);
        uint4 words = tchi_cuda_philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
        double uniform = (double)(words.x & 0xFFFFFFu) * 0x1p-24;
        double top = largest_of(logits, i, cols, lane);
        double sum = 0;
        double ignored;
        int64_t label = -1;
        if (!isnan(top)) {
            walk_row(logits, i, cols, top, INFINITY, lane, &sum);
            label = walk_row(logits, i, cols, top, uniform * sum, lane, &ignored);
            label = label < cols ? label : cols - 1;
        }
        if (lane == 0) {
            labels[i] = (int32_t)label;
        }
    }
}

tch_status tchi_cuda_sample_labels(void *state, const tch_matrices *logits, uint64_t seed, int32_t *labels)
{
    unsigned blocks = tchi_cuda_grid(tchi_cuda_ceil_div(logits->rows, WARPS));
    return tchi_cuda_launch(state, "sample_labels", sample_labels_kernel, blocks, WARPS * 32, logits->rows,
                            logits->cols, tchi_cuda_operand_of(logits), seed, labels);
}

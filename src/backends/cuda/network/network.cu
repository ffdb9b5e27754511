/* Activations, their derivatives, column sums and losses of networks. Matrices are float32 and mostly so small that
 * launches dominate, so there are few launches. The order of sums depends on the sizes alone.
 *
 *     z = x[i][j] + bias[j];                                  // bias_activation
 *     out[i][j] = f(z);
 *     gradient[i][j] *= f'(z);                                // bias_activation_backward
 *     bias_gradient[j] = sum over i of gradient[i][j];
 *     loss = log(sum over j of exp(x[i][j])) - x[i][label];   // cross_entropy, of row i
 *     gradient[i][j] = factor * (softmax(x[i])[j] - (j == label));
 *     loss = sum over j of (y[i][j] - t[i][j])^2 / cols;      // squared
 *     gradient[i][j] = factor * (y[i][j] - t[i][j]); */
#include "backends/cuda/device/batch_walk.cuh"

/* --- activations ------------------------------------------------------------------------------------------------- */

/* NaN propagates. */
static __device__ inline float activate(tch_activation activation, float z)
{
    switch (activation) {
    case TCH_ACTIVATION_RELU:
        return z < 0.0f ? 0.0f : z;
    case TCH_ACTIVATION_TANH:
        return tanhf(z);
    case TCH_ACTIVATION_GELU:
        return z * normcdff(z);
    default:
        return z;
    }
}

/* gradient f'(z), from z for GELU and f(z) for the others. */
static __device__ inline float derive(tch_activation activation, float kept, float gradient)
{
    switch (activation) {
    case TCH_ACTIVATION_RELU:
        return kept <= 0.0f ? 0.0f : gradient;
    case TCH_ACTIVATION_TANH:
        return gradient * (1.0f - kept * kept);
    case TCH_ACTIVATION_GELU:
        return gradient * (normcdff(kept) + kept * (0.39894228f * expf(-0.5f * kept * kept)));
    default:
        return gradient;
    }
}

/* An operand with a type known at compile time, which removes the branches over types. */
static __device__ inline tchi_cuda_operand float_operand(const tchi_cuda_operand &m)
{
    return {m.data, TCH_SCALAR_F32, m.wide, m.ld, m.stride};
}

/* bias (1, cols). */
struct bias_activation {
    tch_activation activation;
    tchi_cuda_operand x, bias, out;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        const tchi_cuda_vec4<float> added = tchi_cuda_load_vec4<float>(float_operand(bias), 0, 0, p.j, p.count);
        tchi_cuda_patch_values<float> values = tchi_cuda_load_patch<float>(float_operand(x), p);
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            values.row[k / 4].v[k % 4] += added.v[k % 4];
        }
        if (out.data != x.data) {
            tchi_cuda_store_patch(float_operand(x), p, values);
        }
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            values.row[k / 4].v[k % 4] = activate(activation, values.row[k / 4].v[k % 4]);
        }
        tchi_cuda_store_patch(float_operand(out), p, values);
    }
};

tch_status tchi_cuda_bias_activation(void *state, tch_activation activation, const tch_matrices *x,
                                     const tch_matrices *bias, const tch_matrices *out)
{
    return tchi_cuda_walk(
        state, "bias_activation", x,
        bias_activation{activation, tchi_cuda_operand_of(x), tchi_cuda_operand_of(bias), tchi_cuda_operand_of(out)});
}

struct activation_backward {
    tch_activation activation;
    tchi_cuda_operand kept, gradient;

    __device__ inline void operator()(const tchi_cuda_patch &p) const
    {
        tchi_cuda_patch_values<float> known = tchi_cuda_load_patch<float>(float_operand(kept), p);
        tchi_cuda_patch_values<float> values = tchi_cuda_load_patch<float>(float_operand(gradient), p);
#pragma unroll
        for (int k = 0; k < 4 * TCHI_CUDA_PATCH_STEPS; k++) {
            float *value = &values.row[k / 4].v[k % 4];
            *value = derive(activation, known.row[k / 4].v[k % 4], *value);
        }
        tchi_cuda_store_patch(float_operand(gradient), p, values);
    }
};

/* --- column sums ------------------------------------------------------------------------------------------------- */

/* A block has eight columns, 32 bytes, the minimum memory transaction: more would leave most of a GPU idle at the few
 * hundred columns of a layer. Threads walk down the rows with four rows in flight each. */
#define COLUMNS 8
#define COLUMN_THREADS 64 /* per column */
#define ROWS_AT_ONCE 4

/* x (rows, cols), out (cols). Memory: 4 bytes per element. Compute: a sum each. */
static __global__ void __launch_bounds__(COLUMNS *COLUMN_THREADS)
    column_sums_kernel(int64_t rows, int64_t cols, const float *x, int64_t ld, float *out)
{
    __shared__ float sums[COLUMN_THREADS][COLUMNS + 1];
    int64_t column = (int64_t)blockIdx.x * COLUMNS + threadIdx.x;
    float sum = 0;
    for (int64_t i = threadIdx.y; i < rows && column < cols; i += COLUMN_THREADS * ROWS_AT_ONCE) {
        float values[ROWS_AT_ONCE];
#pragma unroll
        for (int k = 0; k < ROWS_AT_ONCE; k++) {
            int64_t row = i + k * COLUMN_THREADS;
            values[k] = row < rows ? x[row * ld + column] : 0.0f;
        }
        sum += (values[0] + values[1]) + (values[2] + values[3]);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    for (unsigned half = COLUMN_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) {
            sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
        }
    }
    if (threadIdx.y == 0 && column < cols) {
        out[column] = sums[0][threadIdx.x];
    }
}

tch_status tchi_cuda_bias_activation_backward(void *state, tch_activation activation, const tch_matrices *kept,
                                              const tch_matrices *gradient, const tch_matrices *bias_gradient)
{
    if (activation != TCH_ACTIVATION_NONE) {
        TCHI_TRY(tchi_cuda_walk(
            state, "activation_backward", gradient,
            activation_backward{activation, tchi_cuda_operand_of(kept), tchi_cuda_operand_of(gradient)}));
    }
    if (bias_gradient == NULL || gradient->cols == 0) {
        return TCH_OK;
    }
    unsigned blocks = (unsigned)tchi_cuda_ceil_div(gradient->cols, COLUMNS);
    dim3 threads(COLUMNS, COLUMN_THREADS);
    return tchi_cuda_launch(state, "column_sums", column_sums_kernel, blocks, threads, gradient->rows, gradient->cols,
                            (const float *)gradient->data, gradient->ld, (float *)bias_gradient->data);
}

/* --- losses ------------------------------------------------------------------------------------------------------ */

/* One block for each range of rows, one warp for a row. */
#define LOSS_WARPS 4

typedef struct loss_sums {
    double loss, right, skipped;
} loss_sums;

typedef struct loss_call {
    int64_t rows, cols;
    const float *outputs, *targets;
    const int32_t *labels;
    int64_t ld, target_ld;
    float *gradient; /* NULL if not requested */
    int64_t gradient_ld;
    double factor; /* of the gradient, scale apart */
    const float *scale;
} loss_call;

typedef struct top_entry {
    float value;
    int64_t index; /* INT64_MAX: none yet */
} top_entry;

/* The larger, or the first of equals; skips NaN, which propagates through the sum. */
static __device__ inline top_entry larger(top_entry a, top_entry b)
{
    bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
    return second ? b : a;
}

static __device__ inline top_entry top_of_row(const float *x, int64_t cols, int lane)
{
    top_entry top = {-INFINITY, INT64_MAX};
    for (int64_t j = lane; j < cols; j += 32) {
        top = larger(top, {x[j], j});
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        top_entry other = {__shfl_xor_sync(0xFFFFFFFFu, top.value, distance),
                           (int64_t)__shfl_xor_sync(0xFFFFFFFFu, (long long)top.index, distance)};
        top = larger(top, other);
    }
    return top;
}

/* All lanes of a warp call these; every lane gets the sums. */
struct cross_entropy {
    static __device__ inline void row(const loss_call &c, int64_t i, int lane, float factor, loss_sums &sums)
    {
        const float *x = c.outputs + i * c.ld;
        float *gradient = c.gradient != NULL ? c.gradient + i * c.gradient_ld : NULL;
        int64_t label = c.labels[i];
        bool known = label >= 0 && label < c.cols;
        top_entry top = top_of_row(x, c.cols, lane);
        float part = 0;
        for (int64_t j = lane; j < c.cols; j += 32) {
            part += expf(x[j] - top.value);
        }
        float sum = (float)tchi_cuda_warp_sum((double)part);
        for (int64_t j = lane; gradient != NULL && j < c.cols; j += 32) {
            float softmax = expf(x[j] - top.value) * (factor / sum);
            gradient[j] = known ? softmax - (j == label ? factor : 0.0f) : 0.0f;
        }
        double loss = known ? (double)logf(sum) + ((double)top.value - (double)x[label]) : 0.0;
        sums.loss += loss;
        sums.right += known && top.index == label && loss == loss ? 1.0 : 0.0;
        sums.skipped += known ? 0.0 : 1.0;
    }
};

struct squared {
    static __device__ inline void row(const loss_call &c, int64_t i, int lane, float factor, loss_sums &sums)
    {
        const float *y = c.outputs + i * c.ld;
        const float *t = c.targets + i * c.target_ld;
        double part = 0;
        for (int64_t j = lane; j < c.cols; j += 32) {
            float difference = y[j] - t[j];
            part += (double)difference * (double)difference;
            if (c.gradient != NULL) {
                c.gradient[i * c.gradient_ld + j] = difference * factor;
            }
        }
        sums.loss += tchi_cuda_warp_sum(part) / (double)c.cols;
    }
};

/* outputs, gradient (rows, cols). Memory: 8 bytes per element with the gradient, the second and third pass over a row
 * from cache. Compute: two exponentials per element. One set of sums per block in `ranges`. */
template <typename loss>
static __global__ void __launch_bounds__(LOSS_WARPS * 32)
    loss_kernel(const __grid_constant__ loss_call c, loss_sums *ranges)
{
    __shared__ loss_sums shared[LOSS_WARPS];
    int lane = (int)threadIdx.x % 32;
    int warp = (int)threadIdx.x / 32;
    int64_t last = c.rows * ((int64_t)blockIdx.x + 1) / TCH_LOSS_RANGES;
    float factor = (float)(c.factor * (c.scale != NULL ? (double)*c.scale : 1.0));
    loss_sums sums = {0, 0, 0};
    for (int64_t i = c.rows * (int64_t)blockIdx.x / TCH_LOSS_RANGES + warp; i < last; i += LOSS_WARPS) {
        loss::row(c, i, lane, factor, sums);
    }
    if (lane == 0) {
        shared[warp] = sums;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        loss_sums all = {0, 0, 0};
        for (int w = 0; w < LOSS_WARPS; w++) {
            all = {all.loss + shared[w].loss, all.right + shared[w].right, all.skipped + shared[w].skipped};
        }
        ranges[blockIdx.x] = all;
    }
}

/* One block. Memory: 6 KB. Compute: three sums of TCH_LOSS_RANGES numbers. */
static __global__ void __launch_bounds__(TCH_LOSS_RANGES)
    add_totals_kernel(int64_t rows, const loss_sums *ranges, double *totals)
{
    __shared__ double shared[32];
    int thread = (int)threadIdx.x;
    double loss = tchi_cuda_block_sum(ranges[thread].loss, thread, TCH_LOSS_RANGES, shared);
    double right = tchi_cuda_block_sum(ranges[thread].right, thread, TCH_LOSS_RANGES, shared);
    double skipped = tchi_cuda_block_sum(ranges[thread].skipped, thread, TCH_LOSS_RANGES, shared);
    if (thread == 0) {
        totals[TCH_TOTAL_LOSS] += loss;
        totals[TCH_TOTAL_RIGHT] += right;
        totals[TCH_TOTAL_ROWS] += (double)rows - skipped;
        totals[TCH_TOTAL_SKIPPED] += skipped;
    }
}

static loss_call call_of(const tch_matrices *outputs, double factor, const tch_loss_results *results)
{
    loss_call c = {};
    c.rows = outputs->rows;
    c.cols = outputs->cols;
    c.outputs = (const float *)outputs->data;
    c.ld = outputs->ld;
    c.gradient = results->gradient != NULL ? (float *)results->gradient->data : NULL;
    c.gradient_ld = results->gradient != NULL ? results->gradient->ld : 0;
    c.factor = factor * results->weight;
    c.scale = results->scale;
    return c;
}

template <typename loss>
static tch_status run_loss(tchi_cuda_state *s, const loss_call &c, const tch_loss_results *results, const char *name)
{
    if (c.rows == 0 || c.cols == 0) {
        return TCH_OK;
    }
    loss_sums *ranges = (loss_sums *)results->scratch;
    TCHI_TRY(tchi_cuda_launch(s, name, loss_kernel<loss>, TCH_LOSS_RANGES, LOSS_WARPS * 32, c, ranges));
    return tchi_cuda_launch(s, "add_totals", add_totals_kernel, 1, TCH_LOSS_RANGES, c.rows, ranges, results->totals);
}

tch_status tchi_cuda_loss(void *state, tch_loss loss, const tch_matrices *outputs, const tch_matrices *targets,
                          const tch_loss_results *results)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    bool labels = loss == TCH_LOSS_CROSS_ENTROPY;
    loss_call c = call_of(outputs, labels ? 1.0 : 2.0 / (double)outputs->cols, results);
    if (labels) {
        c.labels = (const int32_t *)targets->data;
        return run_loss<cross_entropy>(s, c, results, "softmax_loss");
    }
    c.targets = (const float *)targets->data;
    c.target_ld = targets->ld;
    return run_loss<squared>(s, c, results, "squared_loss");
}

/* The scale by which Newton-Schulz steps divide a bfloat16 matrix. The symmetric products apply it to their results: X
 * is only read here, and written only if its squares would leave the range of float32, which does not happen in
 * training.
 *
 *     double sum = 0;
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {
 *             sum += x[i][j] * x[i][j];
 *         }
 *     }
 *     norm = sqrt(sum);
 *     unit = norm is between 2^-40 and 2^40 ? 1 : 2^-floor(log2(norm));
 *     x = unit * x;                                           // nothing to do where unit is 1
 *     scale = norm == 0 ? 1 : 1 / (max(norm, eps) * unit);
 *
 * A matrix is always divided into the same PARTS, each summed by one block and added in order: its norm is
 * deterministic and independent of the batch. */
#include "backends/cuda/device/batch_walk.cuh"

#define THREADS 256
#define PARTS (TCH_NORMALIZE_NUMBERS - 1)
#define HELD 4 /* rows with loads in flight per thread: 64 bytes */
#define WIDE 8 /* numbers in 16 bytes */

/* Norms from 2^-40 to 2^40 need no scaling: sums of squares stay below 2^80. */
#define MOST_EXPONENT 40

/* --- the norm ---------------------------------------------------------------------------------------------------- */

static __device__ inline float number_of(const uint4 &eight, int k)
{
    uint32_t pair = k < 4 ? (k < 2 ? eight.x : eight.y) : (k < 6 ? eight.z : eight.w);
    return __uint_as_float(k % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
}

/* In float32 if in range, which saves seven of eight conversions to float64. */
static __device__ inline double sum_of_squares(const uint4 &eight)
{
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        sum = fmaf(number_of(eight, k), number_of(eight, k), sum);
    }
    if (sum > 0x1p-80f && sum < 0x1p80f) {
        return (double)sum;
    }
    double exact = 0.0;
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        exact += (double)number_of(eight, k) * (double)number_of(eight, k);
    }
    return exact;
}

/* Numbers col to col + 7 of a row; zeros beyond its end. */
static __device__ inline uint4 load_eight(const tchi_cuda_operand &x, const tchi_cuda_extent &e, int64_t b, int64_t row,
                                          int64_t col)
{
    if (row >= e.rows) {
        return make_uint4(0, 0, 0, 0);
    }
    const char *from = tchi_cuda_at(x, b, row, col);
    if (col + WIDE <= e.cols) {
        return *(const uint4 *)from;
    }
    uint32_t word[WIDE / 2] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        uint32_t bits = col + k < e.cols ? ((const unsigned short *)from)[k] : 0u;
        word[k / 2] |= bits << (k % 2 * 16);
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

/* Part p of a matrix is its rows p, p + PARTS and so on. 2 bytes and 2 operations for an element. */
static __global__ void __launch_bounds__(THREADS)
    squares_kernel(tchi_cuda_extent e, tchi_cuda_operand x, double *partial)
{
    __shared__ double shared[32];
    int64_t part = blockIdx.x;
    for (int64_t b = blockIdx.y; b < e.batch; b += gridDim.y) {
        double sum = 0.0;
        for (int64_t row = part; row < e.rows; row += HELD * PARTS) {
            for (int64_t col = (int64_t)threadIdx.x * WIDE; col < e.cols; col += THREADS * WIDE) {
                uint4 eight[HELD];
#pragma unroll
                for (int h = 0; h < HELD; h++) {
                    eight[h] = load_eight(x, e, b, row + h * PARTS, col);
                }
#pragma unroll
                for (int h = 0; h < HELD; h++) {
                    sum += sum_of_squares(eight[h]);
                }
            }
        }
        sum = tchi_cuda_block_sum(sum, (int)threadIdx.x, THREADS, shared);
        if (threadIdx.x == 0) {
            partial[b * PARTS + part] = sum;
        }
        __syncthreads();
    }
}

/* --- the scale --------------------------------------------------------------------------------------------------- */

/* The power of two that scales a norm to between 1 and 2, or 1 if it needs none, is zero or is not finite. */
static __device__ inline double unit_of(double norm)
{
    if (!(norm > 0.0) || isinf(norm)) {
        return 1.0;
    }
    int exponent = ilogb(norm);
    return exponent < -MOST_EXPONENT || exponent >= MOST_EXPONENT ? ldexp(1.0, -exponent) : 1.0;
}

/* Usually nothing to do; else 4 bytes and a product per element. */
static __global__ void __launch_bounds__(THREADS)
    finish_kernel(tchi_cuda_extent e, tchi_cuda_operand x, const double *partial, double eps, double *scale)
{
    for (int64_t b = blockIdx.y; b < e.batch; b += gridDim.y) {
        double sum = 0.0;
        for (int part = 0; part < PARTS; part++) {
            sum += partial[b * PARTS + part];
        }
        double norm = sqrt(sum);
        double unit = unit_of(norm);
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            scale[b] = norm == 0.0 ? 1.0 : 1.0 / (fmax(norm, eps) * unit);
        }
        for (int64_t row = blockIdx.x; unit != 1.0 && row < e.rows; row += gridDim.x) {
            for (int64_t col = threadIdx.x; col < e.cols; col += THREADS) {
                char *at = tchi_cuda_at(x, b, row, col);
                double value = tchi_cuda_load<double>(x.type, at, 0, x.stride);
                tchi_cuda_store<double>(x.type, at, 0, x.stride, value * unit);
            }
        }
    }
}

static tch_status find_scales(const tchi_cuda_state *s, double eps, const tch_matrices *x, double *scale)
{
    const tchi_cuda_extent e = tchi_cuda_extent_of(x);
    const tchi_cuda_operand from = tchi_cuda_operand_of(x);
    double *partial = scale + e.batch;
    dim3 grid(PARTS, tchi_cuda_grid_yz(e.batch));
    TCHI_TRY(tchi_cuda_launch(s, "squares", squares_kernel, grid, THREADS, e, from, partial));
    return tchi_cuda_launch(s, "normalize", finish_kernel, grid, THREADS, e, from, partial, eps, scale);
}

/* With the norm as the largest eigenvalue and relative damping 1, root_setup returns max(|X|, eps) as the bound, or
 * 1. */
static tch_status divide_by_norm(tchi_cuda_state *s, double eps, const tch_matrices *x, double *norm)
{
    double *zeros = norm + x->batch, *damping = zeros + x->batch, *bound = damping + x->batch;
    tch_root_norms norms = {norm, norm, zeros, zeros};
    TCHI_TRY(tchi_cuda_reduce(s, TCH_REDUCE_FROBENIUS, x, norm));
    TCHI_TRY(tchi_cuda_rescale(s, eps, x, norm));
    TCHI_TRY(tchi_cuda_zero_bytes(s, zeros, x->batch * (int64_t)sizeof *zeros));
    TCHI_TRY(tchi_cuda_root_setup(s, x->batch, &norms, eps, 1.0, 0.0, 1.0, damping, bound,
                                  (int32_t *)(void *)(bound + x->batch)));
    return tchi_cuda_shift_scale(s, x, NULL, bound, -1.0, x);
}

extern "C" tch_status tchi_cuda_normalize(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                                          int32_t *deferred)
{
    tchi_cuda_state *s = (tchi_cuda_state *)state;
    tch_matrices many = *x;
    many.batch = all;
    *deferred = eps > 0.0 && tchi_cuda_symmetric_scaled_supported(s, &many);
    return *deferred ? find_scales(s, eps, x, scale) : divide_by_norm(s, eps, x, scale);
}

/* (X + shift I) scale^exponent for each matrix of a batch, also for type conversion: one kernel is specialized for the
 * types in rows of aligned vec4s, the other dispatches at run time. The diagonal is computed in double, since a shift
 * may be far below the rounding error of its type. */
#include <type_traits>

#include "backends/cuda/device/batch_walk.cuh"

/* For the specialized kernel: rows per thread, and the most blocks per multiprocessor, few enough that each computes a
 * power for several patches. On an H200, 16 x 1024 reaches 0.93 to 0.96 of the speed of a copy (float32 and split,
 * float64 to split); two rows are up to 5 % slower, one row up to 22 %. */
#define STEPS 4
#define BLOCKS 16

/* bfloat16 in place, for orthogonalization: half the bytes per row, so twice the rows. */
#define SHORT_STEPS 8

/* From float32 to float64 other sizes are faster: 58 us with these, 71 with those above, 49 for a copy of as much. */
#define WIDENING_STEPS 1
#define WIDENING_BLOCKS 4

typedef struct shift_scale_factors {
    const double *shift, *scale; /* one per matrix, or NULL */
    double exponent;
} shift_scale_factors;

/* scale^exponent as a product of two factors, so that neither leaves the range of `type` near its ends, as 1 / scale
 * may. The second is 1 everywhere else. */
struct factor_pair {
    double first, second;
};

template <typename real> static __device__ inline factor_pair factors_of(const shift_scale_factors &f, int64_t b)
{
    if (f.scale == NULL) {
        return {1.0, 1.0};
    }
    const double most = sizeof(real) == sizeof(double) ? 0x1p+1000 : 0x1p+120;
    double scale = f.scale[b];
    double factor = f.exponent == 1.0 ? scale : pow(scale, f.exponent);
    if ((factor < most && factor > 1.0 / most) || !(scale > 0.0) || isinf(scale)) {
        return {factor, 1.0};
    }
    int half = ilogb(scale) / 2;
    return {pow(ldexp(1.0, half), f.exponent), pow(ldexp(scale, -half), f.exponent)};
}

/* A type dispatched at run time per row, whose conversion waits for that row before the next load. Other types are
 * compile-time constants with rows of aligned vec4s. */
#define ANY_TYPE TCH_SCALAR_COUNT

template <typename real, tch_scalar type, int steps>
static __device__ inline void load_rows(tchi_cuda_vec4<real> (&values)[steps], const tchi_cuda_operand &m, int64_t b,
                                        int64_t i, int64_t j, const tchi_cuda_extent &e)
{
    const char *from = tchi_cuda_at(m, b, 0, type == ANY_TYPE ? j : min(j, e.cols - 4));
#pragma unroll
    for (int k = 0; k < steps; k++) {
        int64_t row = i + (int64_t)(k * blockDim.y);
        if (type == ANY_TYPE) {
            int count = row < e.rows && j < e.cols ? (int)min(e.cols - j, (int64_t)4) : 0;
            values[k] = tchi_cuda_load_from<real>(m, from + row * m.ld * tchi_cuda_size(m.type), count);
        } else { /* beyond the end the last row is read again, and not stored */
            values[k] = tchi_cuda_load_wide<real>(type, from, min(row, e.rows - 1) * m.ld, m.stride);
        }
    }
}

/* The diagonal is computed in double. */
template <typename real, tch_scalar type, int steps>
static __device__ inline void store_rows(const tchi_cuda_operand &m, int64_t b, int64_t i, int64_t j,
                                         const tchi_cuda_extent &e, const tchi_cuda_vec4<real> (&values)[steps],
                                         const double *shift, const factor_pair &factor)
{
    const real first = (real)factor.first;
    const real second = (real)factor.second;
    char *to = tchi_cuda_at(m, b, 0, j);
#pragma unroll
    for (int k = 0; k < steps; k++) {
        int64_t row = i + (int64_t)(k * blockDim.y);
        if (row >= e.rows || j >= e.cols) {
            continue;
        }
        tchi_cuda_vec4<real> four = values[k];
#pragma unroll
        for (int l = 0; l < 4; l++) {
            four.v[l] = four.v[l] * first * second;
        }
        if (type == ANY_TYPE) {
            tchi_cuda_store_vec4<real>(m, b, row, j, (int)min(e.cols - j, (int64_t)4), four);
        } else {
            tchi_cuda_store_wide<real>(type, to, row * m.ld, m.stride, four);
        }
        if (shift != NULL && row >= j && row < j + 4 && row < e.cols) {
            const real *v = values[k].v;
            double value = (double)(row < j + 2 ? (row == j ? v[0] : v[1]) : (row == j + 2 ? v[2] : v[3]));
            tchi_cuda_store<double>(type == ANY_TYPE ? m.type : type, to, row * m.ld + (row - j), m.stride,
                                    (value + shift[b]) * factor.first * factor.second);
        }
    }
}

/* One thread computes the power while the block's first loads are in flight. */
template <typename real, tch_scalar source, tch_scalar target, int steps>
static __global__ void __launch_bounds__(TCHI_CUDA_PATCH_THREADS)
    shift_scale_kernel(tchi_cuda_extent e, tchi_cuda_operand x, shift_scale_factors f, tchi_cuda_operand out)
{
    __shared__ factor_pair factor;
    int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    int64_t down = (int64_t)gridDim.y * blockDim.y * steps;
    for (int64_t b = blockIdx.z; b < e.batch; b += gridDim.z) {
        int64_t i = (int64_t)blockIdx.y * blockDim.y * steps + threadIdx.y;
        tchi_cuda_vec4<real> values[steps];
        load_rows<real, source, steps>(values, x, b, i, j, e);
        if (threadIdx.x == 0 && threadIdx.y == 0) {
            factor = factors_of<real>(f, b);
        }
        __syncthreads();
        while (true) {
            store_rows<real, target, steps>(out, b, i, j, e, values, f.shift, factor);
            i += down;
            if (i >= e.rows) {
                break;
            }
            load_rows<real, source, steps>(values, x, b, i, j, e);
        }
        __syncthreads();
    }
}

/* At most `most` blocks, beyond those that are needed across a matrix and for the batch. */
template <tch_scalar source, tch_scalar target, int steps>
static tch_status launch_known(const void *state, const tchi_cuda_extent &e, const tchi_cuda_operand &x,
                               const shift_scale_factors &f, const tchi_cuda_operand &out, int64_t most)
{
    constexpr bool in_double = source == TCH_SCALAR_F64 || target == TCH_SCALAR_F64;
    typedef typename std::conditional<in_double, double, float>::type real;
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e, steps);
    int64_t down = most / ((int64_t)shape.grid.x * shape.grid.z);
    shape.grid.y = (unsigned)(down < 1 ? 1 : down < shape.grid.y ? down : shape.grid.y);
    return tchi_cuda_launch(state, "shift_scale", shift_scale_kernel<real, source, target, steps>, shape.grid,
                            shape.block, e, x, f, out);
}

template <tch_scalar source>
static tch_status launch_known_from(const void *state, const tchi_cuda_extent &e, const tchi_cuda_operand &x,
                                    const shift_scale_factors &f, const tchi_cuda_operand &out, int64_t processors)
{
    if (out.type == TCH_SCALAR_F64) {
        constexpr bool widening = source == TCH_SCALAR_F32;
        constexpr int steps = widening ? WIDENING_STEPS : STEPS;
        int64_t most = processors * (widening ? WIDENING_BLOCKS : BLOCKS);
        return launch_known<source, TCH_SCALAR_F64, steps>(state, e, x, f, out, most);
    }
    return out.type == TCH_SCALAR_F32
               ? launch_known<source, TCH_SCALAR_F32, STEPS>(state, e, x, f, out, processors * BLOCKS)
               : launch_known<source, TCH_SCALAR_BF16X2, STEPS>(state, e, x, f, out, processors * BLOCKS);
}

static bool is_known(const tchi_cuda_operand &m, const tchi_cuda_extent &e)
{
    bool type = m.type == TCH_SCALAR_F64 || m.type == TCH_SCALAR_F32 || m.type == TCH_SCALAR_BF16X2;
    return type && m.wide && e.cols % 4 == 0;
}

tch_status tchi_cuda_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                 double exponent, const tch_matrices *out)
{
    const tchi_cuda_extent e = tchi_cuda_extent_of(out);
    const tchi_cuda_operand from = tchi_cuda_operand_of(x), to = tchi_cuda_operand_of(out);
    const shift_scale_factors f = {shift, scale, exponent};
    const int64_t processors = ((const tchi_cuda_state *)state)->device.processors;
    if (tchi_cuda_is_empty(e)) {
        return TCH_OK;
    }
    if (x->type == TCH_SCALAR_BF16 && out->type == TCH_SCALAR_BF16 && from.wide && to.wide && e.cols % 4 == 0) {
        return launch_known<TCH_SCALAR_BF16, TCH_SCALAR_BF16, SHORT_STEPS>(state, e, from, f, to, processors * BLOCKS);
    }
    if (is_known(from, e) && is_known(to, e)) {
        return x->type == TCH_SCALAR_F64   ? launch_known_from<TCH_SCALAR_F64>(state, e, from, f, to, processors)
               : x->type == TCH_SCALAR_F32 ? launch_known_from<TCH_SCALAR_F32>(state, e, from, f, to, processors)
                                           : launch_known_from<TCH_SCALAR_BF16X2>(state, e, from, f, to, processors);
    }
    auto kernel = x->type == TCH_SCALAR_F64 || out->type == TCH_SCALAR_F64
                      ? shift_scale_kernel<double, ANY_TYPE, ANY_TYPE, TCHI_CUDA_PATCH_STEPS>
                      : shift_scale_kernel<float, ANY_TYPE, ANY_TYPE, TCHI_CUDA_PATCH_STEPS>;
    tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
    return tchi_cuda_launch(state, "shift_scale", kernel, shape.grid, shape.block, e, from, f, to);
}

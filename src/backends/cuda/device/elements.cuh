/* Device helpers: elements of every float type, loaded as float or double and stored rounded once to nearest even;
 * launches; sums and maxima over warps and blocks in a fixed order. Kernels are compiled for float and double only: the
 * storage type is a uniform branch next to a memory access. */
#ifndef TCHI_CUDA_ELEMENTS_CUH
#define TCHI_CUDA_ELEMENTS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "backends/cuda/cuda.h"

/* --- types ------------------------------------------------------------------------------------------------------- */

/* Bytes from one element to the next; of the split type, in one of its planes. */
static __host__ __device__ inline int64_t tchi_cuda_size(tch_scalar type)
{
    switch (type) {
    case TCH_SCALAR_F64:
    case TCH_SCALAR_I64:
        return 8;
    case TCH_SCALAR_F32:
    case TCH_SCALAR_I32:
        return 4;
    default:
        return 2;
    }
}

/* Round to odd: a double as a float that rounds to 16 bits as the double itself would, truncated, with the last bit set
 * if inexact. */
static __device__ inline float tchi_cuda_to_odd(double value)
{
    float cut = __double2float_rz(value);
    bool lost = (double)cut != value && value == value;
    return lost ? __uint_as_float(__float_as_uint(cut) | 1u) : cut;
}

static __device__ inline __nv_bfloat16 tchi_cuda_to_bf16(float value)
{
    return __float2bfloat16_rn(value);
}

static __device__ inline __nv_bfloat16 tchi_cuda_to_bf16(double value)
{
    return __float2bfloat16_rn(tchi_cuda_to_odd(value));
}

static __device__ inline __half tchi_cuda_to_f16(float value)
{
    return __float2half_rn(value);
}

static __device__ inline __half tchi_cuda_to_f16(double value)
{
    return __float2half_rn(tchi_cuda_to_odd(value));
}

/* A number as two bfloat16. The rest is exact, and nothing where the high part is infinite. */
template <typename real>
static __device__ inline void tchi_cuda_split(real value, __nv_bfloat16 *high, __nv_bfloat16 *low)
{
    *high = tchi_cuda_to_bf16(value);
    real top = (real)__bfloat162float(*high);
    *low = tchi_cuda_to_bf16(isinf(top) ? (real)0 : value - top);
}

/* --- one element ------------------------------------------------------------------------------------------------- */

/* Element `index` from `data` on; `plane` is the distance from high to low parts, read for the split type only. */
template <typename real>
static __device__ inline real tchi_cuda_load(tch_scalar type, const void *data, int64_t index, int64_t plane)
{
    switch (type) {
    case TCH_SCALAR_F64:
        return (real)((const double *)data)[index];
    case TCH_SCALAR_F32:
        return (real)((const float *)data)[index];
    case TCH_SCALAR_F16:
        return (real)__half2float(((const __half *)data)[index]);
    case TCH_SCALAR_BF16:
        return (real)__bfloat162float(((const __nv_bfloat16 *)data)[index]);
    case TCH_SCALAR_BF16X2:
        return (real)__bfloat162float(((const __nv_bfloat16 *)data)[index]) +
               (real)__bfloat162float(((const __nv_bfloat16 *)data)[index + plane]);
    default:
        return (real)0;
    }
}

template <typename real>
static __device__ inline void tchi_cuda_store(tch_scalar type, void *data, int64_t index, int64_t plane, real value)
{
    switch (type) {
    case TCH_SCALAR_F64:
        ((double *)data)[index] = (double)value;
        break;
    case TCH_SCALAR_F32:
        ((float *)data)[index] = (float)value;
        break;
    case TCH_SCALAR_F16:
        ((__half *)data)[index] = tchi_cuda_to_f16(value);
        break;
    case TCH_SCALAR_BF16:
        ((__nv_bfloat16 *)data)[index] = tchi_cuda_to_bf16(value);
        break;
    case TCH_SCALAR_BF16X2:
        tchi_cuda_split(value, (__nv_bfloat16 *)data + index, (__nv_bfloat16 *)data + index + plane);
        break;
    default:
        break;
    }
}

/* --- four elements of a row -------------------------------------------------------------------------------------- */

template <typename real> struct tchi_cuda_vec4 {
    real v[4];
};

/* Vector accesses: four elements of 4 or 2 bytes, or two of 8. */
struct __align__(8) tchi_cuda_shorts
{
    uint16_t v[4];
};

template <typename real> static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_bf16x4(const __nv_bfloat16 *from)
{
    tchi_cuda_shorts s = *(const tchi_cuda_shorts *)from;
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = (real)__uint_as_float((uint32_t)s.v[k] << 16);
    }
    return four;
}

template <typename real> static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_f16x4(const __half *from)
{
    tchi_cuda_shorts s = *(const tchi_cuda_shorts *)from;
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = (real)__half2float(__ushort_as_half(s.v[k]));
    }
    return four;
}

/* Four elements at an address aligned for them: to 16 bytes, or to 8 for 16-bit elements. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_wide(tch_scalar type, const void *data, int64_t index,
                                                                  int64_t plane)
{
    if (type == TCH_SCALAR_F32) {
        float4 f = *(const float4 *)((const float *)data + index);
        return {{(real)f.x, (real)f.y, (real)f.z, (real)f.w}};
    }
    if (type == TCH_SCALAR_F64) {
        const double2 *from = (const double2 *)((const double *)data + index);
        double2 a = from[0];
        double2 b = from[1];
        return {{(real)a.x, (real)a.y, (real)b.x, (real)b.y}};
    }
    if (type == TCH_SCALAR_F16) {
        return tchi_cuda_load_f16x4<real>((const __half *)data + index);
    }
    tchi_cuda_vec4<real> four = tchi_cuda_load_bf16x4<real>((const __nv_bfloat16 *)data + index);
    if (type == TCH_SCALAR_BF16X2) {
        tchi_cuda_vec4<real> low = tchi_cuda_load_bf16x4<real>((const __nv_bfloat16 *)data + index + plane);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            four.v[k] += low.v[k];
        }
    }
    return four;
}

template <typename real>
static __device__ inline void tchi_cuda_store_split4(__nv_bfloat16 *high, __nv_bfloat16 *low,
                                                     const tchi_cuda_vec4<real> &four)
{
    tchi_cuda_shorts h;
    tchi_cuda_shorts l;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        __nv_bfloat16 top;
        __nv_bfloat16 rest;
        tchi_cuda_split(four.v[k], &top, &rest);
        h.v[k] = __bfloat16_as_ushort(top);
        l.v[k] = __bfloat16_as_ushort(rest);
    }
    *(tchi_cuda_shorts *)high = h;
    *(tchi_cuda_shorts *)low = l;
}

template <typename real>
static __device__ inline void tchi_cuda_store_short4(tch_scalar type, uint16_t *to, const tchi_cuda_vec4<real> &four)
{
    tchi_cuda_shorts s;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        s.v[k] = type == TCH_SCALAR_F16 ? __half_as_ushort(tchi_cuda_to_f16(four.v[k]))
                                        : __bfloat16_as_ushort(tchi_cuda_to_bf16(four.v[k]));
    }
    *(tchi_cuda_shorts *)to = s;
}

template <typename real>
static __device__ inline void tchi_cuda_store_wide(tch_scalar type, void *data, int64_t index, int64_t plane,
                                                   const tchi_cuda_vec4<real> &four)
{
    if (type == TCH_SCALAR_F32) {
        *(float4 *)((float *)data + index) =
            make_float4((float)four.v[0], (float)four.v[1], (float)four.v[2], (float)four.v[3]);
    } else if (type == TCH_SCALAR_F64) {
        double2 *to = (double2 *)((double *)data + index);
        to[0] = make_double2((double)four.v[0], (double)four.v[1]);
        to[1] = make_double2((double)four.v[2], (double)four.v[3]);
    } else if (type == TCH_SCALAR_BF16X2) {
        __nv_bfloat16 *high = (__nv_bfloat16 *)data + index;
        tchi_cuda_store_split4(high, high + plane, four);
    } else {
        tchi_cuda_store_short4(type, (uint16_t *)data + index, four);
    }
}

/* --- matrices of a batch ----------------------------------------------------------------------------------------- */

/* A tch_matrices for kernels. `wide` if every fourth element of every row is aligned for vector accesses. */
typedef struct tchi_cuda_operand {
    char *data;
    tch_scalar type;
    int32_t wide;
    int64_t ld, stride;
} tchi_cuda_operand;

static inline tchi_cuda_operand tchi_cuda_operand_of(const tch_matrices *m)
{
    int64_t size = tchi_cuda_size(m->type);
    int aligned = (uintptr_t)m->data % (size == 2 ? 8 : 16) == 0;
    int wide = aligned && m->ld % 4 == 0 && m->stride % 4 == 0;
    return {(char *)m->data, m->type, wide, m->ld, m->stride};
}

/* The address of element (i, j) of matrix b; of the split type, of its high part, the low one `stride` elements on. */
static __device__ inline char *tchi_cuda_at(const tchi_cuda_operand &m, int64_t b, int64_t i, int64_t j)
{
    int64_t first = (m.type == TCH_SCALAR_BF16X2 ? 2 * b : b) * m.stride;
    return m.data + (first + i * m.ld + j) * tchi_cuda_size(m.type);
}

/* Up to four elements from an address within m on; zeros beyond `count`. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_from(const tchi_cuda_operand &m, const char *from,
                                                                  int count)
{
    if (m.wide && count >= 4) {
        return tchi_cuda_load_wide<real>(m.type, from, 0, m.stride);
    }
    tchi_cuda_vec4<real> four;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        four.v[k] = k < count ? tchi_cuda_load<real>(m.type, from, k, m.stride) : (real)0;
    }
    return four;
}

/* The same from (i, j) of matrix b on; if m is wide, j must be a multiple of four. */
template <typename real>
static __device__ inline tchi_cuda_vec4<real> tchi_cuda_load_vec4(const tchi_cuda_operand &m, int64_t b, int64_t i,
                                                                  int64_t j, int count)
{
    return tchi_cuda_load_from<real>(m, tchi_cuda_at(m, b, i, j), count);
}

template <typename real>
static __device__ inline void tchi_cuda_store_vec4(const tchi_cuda_operand &m, int64_t b, int64_t i, int64_t j,
                                                   int count, const tchi_cuda_vec4<real> &four)
{
    char *to = tchi_cuda_at(m, b, i, j);
    if (m.wide && count >= 4) {
        tchi_cuda_store_wide<real>(m.type, to, 0, m.stride, four);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k < count) {
            tchi_cuda_store<real>(m.type, to, k, m.stride, four.v[k]);
        }
    }
}

/* --- tiles of a lower triangle, numbered row by row: 0 is (0, 0), 1 is (1, 0), 2 is (1, 1), ... ------------------- */

/* Tiles in the first `rows` rows. */
static __host__ __device__ inline int64_t tchi_lower_tiles(int64_t rows)
{
    return rows * (rows + 1) / 2;
}

/* The row that a tile is in; the square root is a guess, corrected afterwards. */
static __device__ inline int64_t tchi_lower_row(int64_t tile)
{
    int64_t i = (int64_t)((sqrtf(8.0f * (float)tile + 1.0f) - 1.0f) * 0.5f);
    while (tchi_lower_tiles(i) > tile) {
        i--;
    }
    while (tchi_lower_tiles(i + 1) <= tile) {
        i++;
    }
    return i;
}

/* --- launches, and reductions over a block ----------------------------------------------------------------------- */

/* A launch with clusters of `cluster` blocks. */
static inline cudaLaunchConfig_t tchi_cuda_cluster_config(const tchi_cuda_state *state, dim3 grid, dim3 block,
                                                          int64_t shared, int cluster, cudaLaunchAttribute *attribute)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = (size_t)shared;
    config.stream = state->stream;
    attribute->id = cudaLaunchAttributeClusterDimension;
    attribute->val.clusterDim.x = (unsigned)cluster;
    attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
    config.attrs = attribute;
    config.numAttrs = cluster > 1 ? 1 : 0;
    return config;
}

/* Arguments are converted to the kernel's parameters. */
template <typename param> struct tchi_cuda_param {
    typedef param type;
};

/* Launches a kernel on the state's stream, unless its grid is empty, and checks the launch. */
template <typename... params>
static tch_status tchi_cuda_launch(const void *state, const char *name, void (*kernel)(params...), dim3 grid,
                                   dim3 block, typename tchi_cuda_param<params>::type... with)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return TCH_OK;
    }
    kernel<<<grid, block, 0, s->stream>>>(with...);
    return tchi_cuda_launched(s, name);
}

/* The same with dynamic shared memory, at most `most` bytes in any launch: the limit belongs to the kernel, so
 * concurrent launches of different sizes must set the same one. */
template <typename... params>
static tch_status tchi_cuda_launch_shared(const void *state, const char *name, void (*kernel)(params...), dim3 grid,
                                          dim3 block, int64_t most, int64_t shared,
                                          typename tchi_cuda_param<params>::type... with)
{
    const tchi_cuda_state *s = (const tchi_cuda_state *)state;
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most),
                  name);
    kernel<<<grid, block, (size_t)shared, s->stream>>>(with...);
    return tchi_cuda_launched(s, name);
}

/* Grid-stride kernels accept any number of blocks. */
static inline unsigned tchi_cuda_grid(int64_t blocks)
{
    return (unsigned)(blocks < 0x7FFFFFFF ? blocks : 0x7FFFFFFF);
}

static __host__ __device__ inline int64_t tchi_cuda_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#define TCHI_CUDA_MOST_BLOCKS 65535 /* along y and z of a grid */

static inline unsigned tchi_cuda_grid_yz(int64_t blocks)
{
    return (unsigned)(blocks < TCHI_CUDA_MOST_BLOCKS ? blocks : TCHI_CUDA_MOST_BLOCKS);
}

/* A block over `across` by `down`, threads along rows: as wide as needed up to a warp, then as tall as needed up to
 * `threads` in total, then wider for flat ones. Sides are powers of two. */
static inline dim3 tchi_cuda_block_for(int64_t across, int64_t down, int64_t threads)
{
    int64_t x = 1;
    int64_t y = 1;
    while (x < 32 && x < across) {
        x *= 2;
    }
    while (x * y < threads && y < down) {
        y *= 2;
    }
    while (x * y < threads && x < across) {
        x *= 2;
    }
    return dim3((unsigned)x, (unsigned)y);
}

/* The residual of the high part of a number split into two float16, which is exact; 0 if that part is infinite. */
static __device__ __forceinline__ float tchi_cuda_left_by(__half high, float value)
{
    float top = __half2float(high);
    return isinf(top) ? 0.0f : value - top;
}

static __device__ inline double tchi_cuda_warp_sum(double value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    }
    return value;
}

/* NaN is skipped. */
static __device__ inline double tchi_cuda_warp_max(double value)
{
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = fmax(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    return value;
}

static __device__ inline uint32_t tchi_cuda_warp_max(uint32_t value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    }
    return value;
#endif
}

/* Over a block of whole warps, `thread` of `threads`; every thread gets the result. `shared` holds 32 doubles and can
 * be reused at once. Maxima are of nonnegative numbers. */
static __device__ inline double tchi_cuda_block_sum(double value, int thread, int threads, double *shared)
{
    value = tchi_cuda_warp_sum(value);
    if (thread % 32 == 0) {
        shared[thread / 32] = value;
    }
    __syncthreads();
    value = tchi_cuda_warp_sum(thread % 32 < threads / 32 ? shared[thread % 32] : 0.0);
    __syncthreads();
    return value;
}

static __device__ inline double tchi_cuda_block_max(double value, int thread, int threads, double *shared)
{
    value = tchi_cuda_warp_max(value);
    if (thread % 32 == 0) {
        shared[thread / 32] = value;
    }
    __syncthreads();
    value = tchi_cuda_warp_max(thread % 32 < threads / 32 ? shared[thread % 32] : 0.0);
    __syncthreads();
    return value;
}

#endif

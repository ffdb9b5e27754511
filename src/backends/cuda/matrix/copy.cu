/* Copies between arrays of any strides with type conversion, and fill. Contiguous dimensions are merged on the host.
 * Equal types move as bits, in units as large as alignment allows; others are read as float, double or integer and
 * rounded once. Sources with transposed rows pass through shared memory in tiles. Every element is read once and
 * written once.
 *
 *     for (i = 0; i < rows; i++) {
 *         for (j = 0; j < cols; j++) {                        // as many loops as there are dimensions
 *             dst[i * dst_rows + j * dst_cols] = convert(src[i * src_rows + j * src_cols]);
 *         }
 *     } */
#include "backends/axes.h"
#include "backends/cuda/device/elements.cuh"

#define THREADS 256
#define TILE 32

/* Threads run along the last axis; in a transposed copy the one before it is the source's contiguous axis. */
typedef struct copy_params {
    tchi_axis axes[TCH_MAX_RANK];
    int32_t rank;
    tch_scalar dst_type, src_type;
    char *dst;
    const char *src;
    int64_t rows; /* product of all sizes but the last; transposed, of all but the last two */
} copy_params;

/* --- on the host: the shape of a copy ---------------------------------------------------------------------------- */

/* Whether two neighboring units of `bytes` can be moved as one. */
static bool can_pair(const copy_params *params, int64_t bytes)
{
    const tchi_axis *inner = &params->axes[params->rank - 1];
    bool fits = inner->dst == 1 && inner->src == 1 && inner->size % 2 == 0 &&
                ((uintptr_t)params->dst | (uintptr_t)params->src) % (uintptr_t)(2 * bytes) == 0;
    for (int32_t i = 0; fits && i < params->rank - 1; i++) {
        fits = params->axes[i].dst % 2 == 0 && params->axes[i].src % 2 == 0;
    }
    return fits;
}

/* Merges elements into units of up to 16 bytes; returns their size. */
static int64_t widen(copy_params *params)
{
    int64_t bytes = tchi_cuda_size(params->dst_type);
    while (bytes < 16 && can_pair(params, bytes)) {
        for (int32_t i = 0; i < params->rank - 1; i++) {
            params->axes[i].dst /= 2;
            params->axes[i].src /= 2;
        }
        params->axes[params->rank - 1].size /= 2;
        bytes *= 2;
    }
    return bytes;
}

/* Moves the source's contiguous axis next to the last one if both are long enough for tiles. */
static bool transpose_dimensions(copy_params *params)
{
    const tchi_axis *inner = &params->axes[params->rank - 1];
    if (inner->src == 1 || inner->src == 0 || inner->size < TILE / 4) {
        return false;
    }
    for (int32_t i = 0; i < params->rank - 1; i++) {
        if (params->axes[i].src == 1 && params->axes[i].size >= TILE / 4) {
            tchi_axis found = params->axes[i];
            params->axes[i] = params->axes[params->rank - 2];
            params->axes[params->rank - 2] = found;
            return true;
        }
    }
    return false;
}

/* Equal types move in units of `bytes` from widen, others by element. */
static copy_params in_bytes(const copy_params *params, int64_t bytes)
{
    copy_params scaled = *params;
    bool equal = params->dst_type == params->src_type;
    for (int32_t i = 0; i < scaled.rank; i++) {
        scaled.axes[i].dst *= equal ? bytes : tchi_cuda_size(params->dst_type);
        scaled.axes[i].src *= equal ? bytes : tchi_cuda_size(params->src_type);
    }
    return scaled;
}

/* --- one element ------------------------------------------------------------------------------------------------- */

/* A value in a conversion from or to integers. */
typedef struct number {
    double real;
    int64_t integer;
    bool is_integer;
} number;

/* Truncates towards zero and saturates; NaN becomes 0. */
static __device__ inline int64_t to_integer(double value)
{
    if (!(value == value)) {
        return 0;
    }
    return value >= 0x1p63 ? INT64_MAX : value <= -0x1p63 ? INT64_MIN : (int64_t)value;
}

/* Bits are moved as they are: value is an unsigned integer of the element's size, or uint4. */
template <typename value> static __device__ inline value get(tch_scalar, const char *from)
{
    return *(const value *)from;
}

template <> __device__ inline float get<float>(tch_scalar type, const char *from)
{
    return tchi_cuda_load<float>(type, from, 0, 0);
}

template <> __device__ inline double get<double>(tch_scalar type, const char *from)
{
    return tchi_cuda_load<double>(type, from, 0, 0);
}

template <> __device__ inline number get<number>(tch_scalar type, const char *from)
{
    if (type == TCH_SCALAR_I32) {
        return {0, *(const int32_t *)from, true};
    }
    if (type == TCH_SCALAR_I64) {
        return {0, *(const int64_t *)from, true};
    }
    return {tchi_cuda_load<double>(type, from, 0, 0), 0, false};
}

template <typename value> static __device__ inline void put(tch_scalar, char *to, value v)
{
    *(value *)to = v;
}

template <> __device__ inline void put<float>(tch_scalar type, char *to, float v)
{
    tchi_cuda_store<float>(type, to, 0, 0, v);
}

template <> __device__ inline void put<double>(tch_scalar type, char *to, double v)
{
    tchi_cuda_store<double>(type, to, 0, 0, v);
}

/* 64-bit integers convert to float32 with one rounding, to 16 bits through float64, which is exact below 2^53. */
template <> __device__ inline void put<number>(tch_scalar type, char *to, number v)
{
    int64_t integer = v.is_integer ? v.integer : to_integer(v.real);
    if (type == TCH_SCALAR_I64) {
        *(int64_t *)to = integer;
    } else if (type == TCH_SCALAR_I32) {
        integer = integer > INT32_MAX ? INT32_MAX : integer < INT32_MIN ? INT32_MIN : integer;
        *(int32_t *)to = (int32_t)integer;
    } else if (type == TCH_SCALAR_F32 && v.is_integer) {
        *(float *)to = (float)v.integer;
    } else {
        tchi_cuda_store<double>(type, to, 0, 0, v.is_integer ? (double)v.integer : v.real);
    }
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* Both sides of a copy, from a given position on. */
typedef struct places {
    char *dst;
    const char *src;
} places;

/* The first elements of row `row`, over the first `count` axes. */
static __device__ inline places row_places(const copy_params &params, int32_t count, int64_t row)
{
    places at = {params.dst, params.src};
    for (int32_t i = count - 1; i > 0; i--) {
        int64_t above = row / params.axes[i].size;
        int64_t index = row - above * params.axes[i].size;
        at.dst += index * params.axes[i].dst;
        at.src += index * params.axes[i].src;
        row = above;
    }
    if (count > 0) {
        at.dst += row * params.axes[0].dst;
        at.src += row * params.axes[0].src;
    }
    return at;
}

/* Elements in flight per thread, a block width apart, so that warps access contiguous memory. */
template <typename value> static __host__ __device__ constexpr int items_of()
{
    return sizeof(value) <= 8 ? 8 : 4;
}

template <typename value> static __global__ void __launch_bounds__(THREADS) copy_rows_kernel(copy_params params)
{
    const int items = items_of<value>();
    tchi_axis inner = params.axes[params.rank - 1];
    int64_t width = blockDim.x;
    int64_t first = blockIdx.x * width * items + threadIdx.x;
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < params.rows;
         row += (int64_t)gridDim.y * blockDim.y) {
        places at = row_places(params, params.rank - 1, row);
        const char *from = at.src + first * inner.src;
        char *to = at.dst + first * inner.dst;
        value held[items];
#pragma unroll
        for (int k = 0; k < items; k++) {
            if (first + k * width < inner.size) {
                held[k] = get<value>(params.src_type, from);
            }
            from += width * inner.src;
        }
#pragma unroll
        for (int k = 0; k < items; k++) {
            if (first + k * width < inner.size) {
                put<value>(params.dst_type, to, held[k]);
            }
            to += width * inner.dst;
        }
    }
}

/* A grid over rows of `size` elements, `items` to a thread. */
static dim3 rows_grid(dim3 block, int64_t size, int64_t rows, int items)
{
    return dim3(tchi_cuda_grid(tchi_cuda_ceil_div(size, (int64_t)block.x * items)),
                tchi_cuda_grid_yz(tchi_cuda_ceil_div(rows, block.y)));
}

template <typename value> static tch_status launch_rows(void *state, copy_params *params)
{
    params->rows = tchi_count_rows(params->axes, params->rank - 1);
    int64_t size = params->axes[params->rank - 1].size;
    dim3 block = tchi_cuda_block_for(size, params->rows, THREADS);
    dim3 grid = rows_grid(block, size, params->rows, items_of<value>());
    return tchi_cuda_launch(state, "copy", copy_rows_kernel<value>, grid, block, in_bytes(params, sizeof(value)));
}

/* --- transposed -------------------------------------------------------------------------------------------------- */

#define LINES (THREADS / TILE) /* of a tile that a block holds at once */

/* Blocks are TILE by LINES. Axes: ..., the source's contiguous one (t), dst's (i). A tile is read along t and written
 * along i. */
template <typename value>
static __global__ void __launch_bounds__(THREADS, 4) copy_transposed_kernel(copy_params params)
{
    __shared__ value tile[TILE][TILE + 1];
    tchi_axis along = params.axes[params.rank - 2];
    tchi_axis inner = params.axes[params.rank - 1];
    int64_t across = tchi_cuda_ceil_div(inner.size, TILE);
    int64_t t0 = (int64_t)blockIdx.x / across * TILE;
    int64_t i0 = (int64_t)blockIdx.x % across * TILE;
    int x = (int)threadIdx.x;
    int y = (int)threadIdx.y;
    for (int64_t row = blockIdx.y; row < params.rows; row += gridDim.y) {
        places at = row_places(params, params.rank - 2, row);
        const char *from = at.src + (t0 + x) * along.src + (i0 + y) * inner.src;
#pragma unroll
        for (int k = 0; k < TILE; k += LINES) {
            if (t0 + x < along.size && i0 + y + k < inner.size) {
                tile[y + k][x] = get<value>(params.src_type, from);
            }
            from += LINES * inner.src;
        }
        __syncthreads();
        char *to = at.dst + (t0 + y) * along.dst + (i0 + x) * inner.dst;
#pragma unroll
        for (int k = 0; k < TILE; k += LINES) {
            if (t0 + y + k < along.size && i0 + x < inner.size) {
                put<value>(params.dst_type, to, tile[x][y + k]);
            }
            to += LINES * along.dst;
        }
        __syncthreads();
    }
}

template <typename value> static tch_status launch_transposed(void *state, copy_params *params)
{
    params->rows = tchi_count_rows(params->axes, params->rank - 2);
    int64_t tiles = tchi_cuda_ceil_div(params->axes[params->rank - 2].size, TILE) *
                    tchi_cuda_ceil_div(params->axes[params->rank - 1].size, TILE);
    dim3 grid((unsigned)tiles, tchi_cuda_grid_yz(params->rows));
    return tchi_cuda_launch(state, "copy", copy_transposed_kernel<value>, grid, dim3(TILE, LINES),
                            in_bytes(params, sizeof(value)));
}

template <typename value> static tch_status launch(void *state, copy_params *params)
{
    return transpose_dimensions(params) ? launch_transposed<value>(state, params) : launch_rows<value>(state, params);
}

static tch_status launch_bits(void *state, copy_params *params)
{
    switch (widen(params)) {
    case 16:
        return launch_rows<uint4>(state, params);
    case 8:
        return launch<uint64_t>(state, params);
    case 4:
        return launch<uint32_t>(state, params);
    default:
        return launch<uint16_t>(state, params);
    }
}

static bool is_integer(const tch_array *array)
{
    return array->type == TCH_SCALAR_I32 || array->type == TCH_SCALAR_I64;
}

tch_status tchi_cuda_copy(void *state, const tch_array *dst, const tch_array *src)
{
    copy_params params = {};
    if (tchi_is_empty(dst)) {
        return TCH_OK;
    }
    params.rank = tchi_merge_axes(dst, src->strides, params.axes);
    params.dst = (char *)dst->data;
    params.src = (const char *)src->data;
    params.dst_type = dst->type;
    params.src_type = src->type;
    if (dst->type == src->type) {
        return launch_bits(state, &params);
    }
    if (is_integer(dst) || is_integer(src)) {
        return launch_rows<number>(state, &params);
    }
    return dst->type == TCH_SCALAR_F64 || src->type == TCH_SCALAR_F64 ? launch<double>(state, &params)
                                                                      : launch<float>(state, &params);
}

/* --- fill -------------------------------------------------------------------------------------------------------- */

/* The value is rounded once per thread and stored as bits. */
template <typename bits> static __global__ void __launch_bounds__(THREADS) fill_kernel(copy_params params, double v)
{
    const int items = items_of<bits>();
    tchi_axis inner = params.axes[params.rank - 1];
    int64_t width = blockDim.x;
    int64_t first = blockIdx.x * width * items + threadIdx.x;
    bits pattern;
    put<number>(params.dst_type, (char *)&pattern, {v, 0, false});
    for (int64_t row = (int64_t)blockIdx.y * blockDim.y + threadIdx.y; row < params.rows;
         row += (int64_t)gridDim.y * blockDim.y) {
        places at = row_places(params, params.rank - 1, row);
#pragma unroll
        for (int k = 0; k < items; k++) {
            if (first + k * width < inner.size) {
                *(bits *)(at.dst + (first + k * width) * inner.dst) = pattern;
            }
        }
    }
}

tch_status tchi_cuda_fill(void *state, const tch_array *dst, double value)
{
    copy_params params = {};
    if (tchi_is_empty(dst)) {
        return TCH_OK;
    }
    params.rank = tchi_merge_axes(dst, dst->strides, params.axes);
    params.rows = tchi_count_rows(params.axes, params.rank - 1);
    params.dst = (char *)dst->data;
    params.dst_type = params.src_type = dst->type;
    int64_t size = params.axes[params.rank - 1].size;
    params = in_bytes(&params, tchi_cuda_size(dst->type));
    dim3 block = tchi_cuda_block_for(size, params.rows, THREADS);
    dim3 grid = rows_grid(block, size, params.rows, items_of<uint64_t>());
    const int64_t bytes = tchi_cuda_size(dst->type);
    auto kernel = bytes == 8 ? fill_kernel<uint64_t> : bytes == 4 ? fill_kernel<uint32_t> : fill_kernel<uint16_t>;
    return tchi_cuda_launch(state, "fill", kernel, grid, block, params, value);
}

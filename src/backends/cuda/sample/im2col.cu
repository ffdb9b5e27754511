/* im2col: a row of input patches per output position of a convolution. A thread keeps its columns, which are offsets
 * into the kernel's window, and steps down the rows by counting, which replaces divisions per element by a few per
 * thread.
 *
 *     for (y = 0; y < outputs; y++) {                         // im2col, of one dimension; there are up to three
 *         for (c = 0; c < channels; c++) {
 *             for (k = 0; k < kernel; k++) {
 *                 x = y * stride + k * dilation - before;
 *                 out[y][c * kernel + k] = x is outside ? what the padding puts there : image[c][x];
 *             }
 *         }
 *     } */
#include "backends/cuda/device/elements.cuh"

#define THREADS 256
#define ROWS 16 /* per thread */
#define WIDE 4  /* columns of a thread */

/* tch_patches for kernels, with elements as bits. */
typedef struct patch_call {
    const void *data;
    char *out;
    int64_t ld, stride; /* of out */
    int64_t matrices, rows, cols;
    int64_t groups, channels;
    int64_t strides[5];
    int32_t size[3], kernel[3], stride_of[3], dilation[3], before[3], outputs[3];
    tch_padding padding;
    int32_t wide; /* rows of out take four elements at once */
} patch_call;

/* A column: offset of its channel, and of its tap in each dimension. */
typedef struct patch_column {
    int64_t channel;
    int32_t offset[3];
} patch_column;

static __device__ inline patch_column column_at(const patch_call &c, int64_t column)
{
    patch_column at;
#pragma unroll
    for (int d = 2; d >= 0; d--) {
        int64_t rest = column / c.kernel[d];
        at.offset[d] = (int32_t)(column - rest * c.kernel[d]) * c.dilation[d] - c.before[d];
        column = rest;
    }
    at.channel = column * c.strides[1];
    return at;
}

/* The padded coordinate of x; -1 for a zero. */
static __device__ inline int32_t pad_position(int32_t x, int32_t size, tch_padding padding)
{
    if (x >= 0 && x < size) {
        return x;
    }
    switch (padding) {
    case TCH_PADDING_REFLECT:
        x = x < 0 ? -x : 2 * (size - 1) - x;
        break;
    case TCH_PADDING_REPLICATE:
        return x < 0 ? 0 : size - 1;
    case TCH_PADDING_CIRCULAR:
        x = x < 0 ? x + size : x - size;
        break;
    default:
        return -1;
    }
    return x >= 0 && x < size ? x : -1;
}

/* A row: its output position. */
typedef struct patch_row {
    int32_t at[3];
} patch_row;

static __device__ inline patch_row row_at(const patch_call &c, int64_t row)
{
    patch_row r;
#pragma unroll
    for (int d = 2; d >= 0; d--) {
        int64_t rest = row / c.outputs[d];
        r.at[d] = (int32_t)(row - rest * c.outputs[d]);
        row = rest;
    }
    return r;
}

static __device__ inline void next_row(const patch_call &c, patch_row &r)
{
#pragma unroll
    for (int d = 2; d >= 0; d--) {
        r.at[d]++;
        if (r.at[d] < c.outputs[d] || d == 0) {
            return;
        }
        r.at[d] = 0;
    }
}

template <typename bits>
static __device__ inline bits element_at(const patch_call &c, const bits *image, const patch_column &column,
                                         const patch_row &row)
{
    int64_t index = column.channel;
#pragma unroll
    for (int d = 0; d < 3; d++) {
        int32_t x = pad_position(row.at[d] * c.stride_of[d] + column.offset[d], c.size[d], c.padding);
        if (x < 0) {
            return 0;
        }
        index += x * c.strides[2 + d];
    }
    return image[index];
}

template <typename bits> struct alignas(WIDE * sizeof(bits) < 16 ? WIDE * sizeof(bits) : 16) patch_four {
    bits v[WIDE];
};

template <typename bits>
static __device__ inline void store_row(const patch_call &c, bits *to, int count, const patch_four<bits> &four)
{
    if (c.wide && count == WIDE) {
        *(patch_four<bits> *)to = four;
        return;
    }
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        if (k < count) {
            to[k] = four.v[k];
        }
    }
}

/* input (samples, groups channels, size), out (rows, cols) per sample and group. Memory: the input once, if its
 * neighborhood stays in cache, and out once. Compute: addresses only. Grid: columns, rows, matrices. */
template <typename bits>
static __global__ void __launch_bounds__(THREADS) im2col_kernel(const __grid_constant__ patch_call c)
{
    const int64_t j = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * WIDE;
    if (j >= c.cols) {
        return;
    }
    const int count = c.cols - j < WIDE ? (int)(c.cols - j) : WIDE;
    patch_column columns[WIDE];
#pragma unroll
    for (int k = 0; k < WIDE; k++) {
        columns[k] = column_at(c, j + (k < count ? k : 0));
    }
    const int64_t step = (int64_t)gridDim.y * blockDim.y * ROWS;
    for (int64_t m = blockIdx.z; m < c.matrices; m += gridDim.z) {
        int64_t sample = m / c.groups;
        int64_t group = m - sample * c.groups;
        const bits *image = (const bits *)c.data + sample * c.strides[0] + group * c.channels * c.strides[1];
        for (int64_t first = ((int64_t)blockIdx.y * blockDim.y + threadIdx.y) * ROWS; first < c.rows; first += step) {
            patch_row row = row_at(c, first);
            bits *to = (bits *)c.out + m * c.stride + first * c.ld + j;
            for (int r = 0; r < ROWS && first + r < c.rows; r++) {
                patch_four<bits> four;
#pragma unroll
                for (int k = 0; k < WIDE; k++) {
                    four.v[k] = element_at(c, image, columns[k], row);
                }
                store_row(c, to + r * c.ld, count, four);
                next_row(c, row);
            }
        }
    }
}

template <typename bits> static tch_status launch_patches(const void *state, const patch_call &c)
{
    dim3 block = tchi_cuda_block_for(tchi_cuda_ceil_div(c.cols, WIDE), tchi_cuda_ceil_div(c.rows, ROWS), THREADS);
    dim3 grid(tchi_cuda_grid(tchi_cuda_ceil_div(c.cols, (int64_t)block.x * WIDE)),
              tchi_cuda_grid_yz(tchi_cuda_ceil_div(c.rows, (int64_t)block.y * ROWS)), tchi_cuda_grid_yz(c.matrices));
    return tchi_cuda_launch(state, "im2col", im2col_kernel<bits>, grid, block, c);
}

static patch_call call_of(const tch_patches *p, const tch_matrices *out)
{
    patch_call c = {};
    c.data = p->data;
    c.out = (char *)out->data;
    c.ld = out->ld;
    c.stride = out->stride;
    c.matrices = p->samples * p->groups;
    c.groups = p->groups;
    c.channels = p->channels;
    c.rows = out->rows;
    c.cols = out->cols;
    c.padding = p->padding;
    c.wide = tchi_cuda_operand_of(out).wide;
    for (int d = 0; d < 5; d++) {
        c.strides[d] = p->strides[d];
    }
    for (int d = 0; d < 3; d++) {
        c.size[d] = (int32_t)p->size[d];
        c.kernel[d] = (int32_t)p->kernel[d];
        c.stride_of[d] = (int32_t)p->stride[d];
        c.dilation[d] = (int32_t)p->dilation[d];
        c.before[d] = (int32_t)p->before[d];
        c.outputs[d] = (int32_t)p->outputs[d];
    }
    return c;
}

tch_status tchi_cuda_im2col(void *state, const tch_patches *patches, const tch_matrices *out)
{
    patch_call c = call_of(patches, out);
    for (int d = 0; d < 3; d++) {
        /* kernel coordinates have 32 bits; an output's window ends `reach` after the input's start */
        const int64_t most = 1 << 30;
        double reach = (double)patches->outputs[d] * (double)patches->stride[d] +
                       (double)patches->kernel[d] * (double)patches->dilation[d];
        if (patches->size[d] >= most || patches->before[d] >= most || reach >= (double)most) {
            return tchi_cuda_host->fail(
                TCH_ERR_UNSUPPORTED, "a convolution over %lld elements along one dimension: at most 2^30 with padding",
                (long long)patches->size[d]);
        }
    }
    const int64_t bytes = tchi_cuda_size(patches->type);
    return bytes == 8   ? launch_patches<uint64_t>(state, c)
           : bytes == 4 ? launch_patches<uint32_t>(state, c)
                        : launch_patches<uint16_t>(state, c);
}

/* The symmetric product in float64 (src/backends/cuda/product/symmetric/symmetric_f64.cu) alone on a GPU: first every tiling
 * against a plain kernel on odd shapes, then their times. Not part of the build:
 *
 *     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/symmetric_f64_bench.cu
 *
 * `a.out check` stops after the checks. TFLOP/s count batch n^2 k operations, the lower half of the product, whatever a
 * tiling computes beyond it. */
#include <algorithm>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <cuda_runtime.h>

#include "backends/cuda/product/symmetric/symmetric_f64.cu"

const tch_backend_host *tchi_cuda_host;

tch_status tchi_cuda_check(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        printf("%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
    return TCH_OK;
}

tch_status tchi_cuda_launched(const tchi_cuda_state *, const char *kernel)
{
    return tchi_cuda_check(cudaGetLastError(), kernel);
}

/* --- the tilings -------------------------------------------------------------------------------------------------- */

typedef tch_status (*launcher)(const tchi_cuda_state *, problem, int64_t);

typedef struct variant {
    const char *name;
    launcher run;
} variant;

typedef tiling<128, 128, 64, 32, 8, 16, 6, 2, 1> large_deep;
typedef tiling<128, 128, 64, 32, 8, 32, 3, 2, 1> large_ktile32;
typedef tiling<128, 128, 32, 64, 8, 16, 4, 2, 1> large_32x64;
typedef tiling<128, 128, 32, 32, 8, 16, 4, 1, 1> large_16_warps;
typedef tiling<128, 64, 64, 32, 8, 16, 4, 2, 2> medium;
typedef tiling<64, 64, 32, 32, 8, 16, 4, 2, 2> medium_piece;
typedef tiling<64, 64, 32, 32, 16, 16, 4, 1, 3> small_k16;
typedef tiling<64, 64, 32, 32, 8, 16, 3, 1, 4> small_4_blocks;
typedef tiling<64, 64, 32, 16, 8, 16, 4, 2, 2> small_8_warps;

static const variant variants[] = {
    {"128x128 64x32, cut", launch<large_tiling, large_piece>},
    {"128x128 64x32", launch<large_tiling, large_tiling>},
    {"  the same, 6 stages, cut", launch<large_deep, large_piece>},
    {"  the same, ktile 32, cut", launch<large_ktile32, large_piece>},
    {"128x128 32x64, cut", launch<large_32x64, large_piece>},
    {"128x128 32x32 16 warps, not ahead", launch<large_16_warps, large_16_warps>},
    {"128x64 64x32, 2 blocks", launch<medium, medium>},
    {"128x64 64x32, 2 blocks, cut", launch<medium, medium_piece>},
    {"64x64 32x32, 3 blocks", launch<small_tiling, small_tiling>},
    {"64x64 32x32, 2 blocks", launch<medium_piece, medium_piece>},
    {"64x64 32x32 k16, 3 blocks", launch<small_k16, small_k16>},
    {"64x64 32x32 not ahead, 4 blocks", launch<small_4_blocks, small_4_blocks>},
    {"64x64 32x16, 2 blocks", launch<small_8_warps, small_8_warps>},
};

/* --- data --------------------------------------------------------------------------------------------------------- */

/* A number in [-1, 1) that depends on the index alone. */
static __device__ double noise(uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)(int64_t)(x ^ (x >> 31)) * 0x1p-63;
}

static __global__ void fill_kernel(double *out, int64_t count, uint64_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        out[i] = noise(seed + (uint64_t)i);
    }
}

static void *device_memory(int64_t bytes)
{
    void *pointer = NULL;
    tchi_cuda_check(cudaMalloc(&pointer, (size_t)bytes), "cudaMalloc");
    return pointer;
}

static double *noisy(int64_t count, uint64_t seed)
{
    double *data = (double *)device_memory(8 * count);
    fill_kernel<<<256, 256>>>(data, count, seed);
    tchi_cuda_check(cudaGetLastError(), "fill_kernel");
    return data;
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

/* out: batch by n by n, every element from the rows that the lower triangle has. */
static __global__ void plain_kernel(problem p, double *out)
{
    int64_t element = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
    int64_t matrix = blockIdx.y;
    if (element >= (int64_t)p.n * p.n) {
        return;
    }
    int64_t i = max(element / p.n, element % p.n), j = min(element / p.n, element % p.n);
    double sum = 0.0;
    for (int k = 0; k < p.k; k++) {
        sum += p.a.data[matrix * p.a.stride + i * p.a.ld + k] * p.b.data[matrix * p.b.stride + j * p.b.ld + k];
    }
    sum *= p.c2;
    sum += p.d.data != NULL ? p.c1 * p.d.data[matrix * p.d.stride + i * p.d.ld + j] : 0.0;
    out[matrix * p.n * p.n + element] = sum + (i == j ? p.c0 : 0.0);
}

typedef struct shape {
    int n, k, batch;
    int pad; /* columns that every ld has beyond its matrix, kept even by rounding up */
    int with_d, repeat_b;
    tch_scalar type;
} shape;

static const shape shapes[] = {
    {1, 1, 1, 0, 0, 0, TCH_SCALAR_F64},       {1, 5, 3, 2, 1, 0, TCH_SCALAR_F64},
    {2, 3, 2, 0, 1, 0, TCH_SCALAR_F32},       {7, 8, 2, 1, 1, 0, TCH_SCALAR_F64},
    {16, 16, 1, 0, 1, 0, TCH_SCALAR_BF16X2},  {17, 33, 3, 3, 0, 1, TCH_SCALAR_F64},
    {31, 1, 2, 0, 1, 0, TCH_SCALAR_F64},      {33, 0, 2, 0, 1, 0, TCH_SCALAR_F64},
    {63, 64, 2, 1, 1, 0, TCH_SCALAR_F32},     {64, 64, 3, 0, 1, 0, TCH_SCALAR_F64},
    {65, 63, 2, 4, 1, 1, TCH_SCALAR_F64},     {96, 15, 1, 0, 0, 0, TCH_SCALAR_BF16X2},
    {100, 17, 4, 0, 1, 0, TCH_SCALAR_F64},    {127, 31, 2, 5, 1, 0, TCH_SCALAR_F64},
    {128, 128, 2, 0, 1, 0, TCH_SCALAR_F64},   {129, 47, 2, 0, 1, 0, TCH_SCALAR_F64},
    {160, 49, 1, 2, 0, 0, TCH_SCALAR_F32},    {193, 80, 2, 0, 1, 0, TCH_SCALAR_F64},
    {200, 95, 1, 7, 1, 1, TCH_SCALAR_BF16X2}, {257, 113, 2, 0, 1, 0, TCH_SCALAR_F64},
    {300, 64, 1, 0, 1, 0, TCH_SCALAR_F64},    {256, 40, 1, 0, 1, 0, TCH_SCALAR_BF16X2},
    {261, 33, 1, 0, 1, 0, TCH_SCALAR_F32},
};

static problem make_problem(const shape &s, int64_t c_rows_stride)
{
    problem p = {};
    p.n = s.n;
    p.k = s.k;
    p.a.ld = (s.k + s.pad + 1) / 2 * 2;
    p.a.stride = (s.n + 1) * p.a.ld;
    p.b.ld = p.a.ld + 2;
    p.b.stride = s.repeat_b ? 0 : s.n * p.b.ld;
    p.a.data = noisy(s.batch * p.a.stride + 2, 1);
    p.b.data = noisy((s.repeat_b ? 1 : s.batch) * s.n * p.b.ld + 2, 1000003);
    if (s.with_d) {
        p.d.ld = s.n + s.pad;
        p.d.stride = s.n * p.d.ld;
        p.d.data = noisy(s.batch * p.d.stride, 2000003);
    }
    p.c_type = s.type;
    p.d_paired = p.d.ld % 2 == 0 && p.d.stride % 2 == 0;
    p.c_ld = s.n + s.pad;
    p.c_stride = c_rows_stride * p.c_ld;
    p.c_paired = p.c_ld % 2 == 0 && p.c_stride % 2 == 0;
    p.c0 = 1.25;
    p.c1 = -0.75;
    p.c2 = 0.5;
    return p;
}

static double bf16_at(const std::vector<unsigned char> &bytes, int64_t index)
{
    uint16_t half;
    memcpy(&half, &bytes[(size_t)(2 * index)], 2);
    uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static double element_at(const problem &p, const std::vector<unsigned char> &bytes, int64_t matrix, int64_t i,
                         int64_t j)
{
    int64_t index = matrix * p.c_stride + i * p.c_ld + j;
    double wide;
    float narrow;
    switch (p.c_type) {
    case TCH_SCALAR_F64:
        memcpy(&wide, &bytes[(size_t)(8 * index)], 8);
        return wide;
    case TCH_SCALAR_F32:
        memcpy(&narrow, &bytes[(size_t)(4 * index)], 4);
        return narrow;
    default:
        index += matrix * p.c_stride;
        return bf16_at(bytes, index) + bf16_at(bytes, index + p.c_stride);
    }
}

/* Every element is right and equal to its mirror image, and what lies around the matrices is still poison. Entries of
 * the operands are at most 1, so k terms are at most k; each of their roundings is at most half an epsilon of that, and
 * they do not all fall on one side. */
static int wrong_elements(const problem &p, const shape &s, const std::vector<unsigned char> &got,
                          const std::vector<double> &expected)
{
    const double rounding = p.c_type == TCH_SCALAR_F64 ? 0.0 : p.c_type == TCH_SCALAR_F32 ? 0x1p-24 : 0x1p-17;
    int wrong = 0;
    for (int64_t m = 0; m < s.batch; m++) {
        for (int64_t i = 0; i < p.c_stride / p.c_ld; i++) {
            for (int64_t j = 0; j < p.c_ld; j++) {
                double value = element_at(p, got, m, i, j);
                if (i >= p.n || j >= p.n) {
                    wrong += !isnan(value);
                    continue;
                }
                double want = expected[(size_t)((m * p.n + i) * p.n + j)];
                wrong += !(fabs(value - want) <= 0x1p-52 * (p.k + 4) + rounding * fabs(want));
                wrong += value != element_at(p, got, m, j, i);
            }
        }
    }
    return wrong;
}

static int check(const tchi_cuda_state *state, const variant &v, const shape &s)
{
    problem p = make_problem(s, s.n + 1);
    const int64_t element = s.type == TCH_SCALAR_F64 ? 8 : 4;
    std::vector<unsigned char> got((size_t)(element * s.batch * p.c_stride));
    std::vector<double> expected((size_t)(s.batch * s.n * s.n));
    double *plain = (double *)device_memory(8 * (int64_t)expected.size());
    p.c = device_memory((int64_t)got.size());
    tchi_cuda_check(cudaMemset(p.c, 0xff, got.size()), "cudaMemset");
    v.run(state, p, s.batch);
    plain_kernel<<<dim3((unsigned)((s.n * s.n + 127) / 128), (unsigned)s.batch), 128>>>(p, plain);
    tchi_cuda_check(cudaGetLastError(), "plain_kernel");
    tchi_cuda_check(cudaMemcpy(got.data(), p.c, got.size(), cudaMemcpyDeviceToHost), v.name);
    tchi_cuda_check(cudaMemcpy(expected.data(), plain, 8 * expected.size(), cudaMemcpyDeviceToHost), v.name);
    int wrong = wrong_elements(p, s, got, expected);
    if (wrong > 0) {
        printf("%s: n %d, k %d, batch %d: %d wrong\n", v.name, s.n, s.k, s.batch, wrong);
    }
    cudaFree((void *)p.a.data);
    cudaFree((void *)p.b.data);
    cudaFree((void *)p.d.data);
    cudaFree(p.c);
    cudaFree(plain);
    return wrong;
}

/* With few processors most tiles are in whole rounds and some are cut; with many, all are. */
static int check_all(tchi_cuda_state state)
{
    int wrong = 0;
    for (const variant &v : variants) {
        for (const shape &s : shapes) {
            for (int processors : {1, 2, 132}) {
                state.device.processors = processors;
                wrong += check(&state, v, s);
            }
        }
    }
    printf("checks: %s\n", wrong == 0 ? "all right" : "FAILED");
    return wrong;
}

/* --- times -------------------------------------------------------------------------------------------------------- */

/* Milliseconds of one launch, the median over runs of several in a row: one alone would be timed with its launch. */
static double median_ms(const tchi_cuda_state *state, const variant &v, const problem &p, int64_t batch)
{
    const int runs = 20, in_a_row = 4;
    cudaEvent_t from, to;
    tchi_cuda_check(cudaEventCreate(&from), "cudaEventCreate");
    tchi_cuda_check(cudaEventCreate(&to), "cudaEventCreate");
    std::vector<float> times;
    for (int i = -3; i < runs; i++) {
        float ms = 0.0f;
        cudaEventRecord(from, state->stream);
        for (int k = 0; k < in_a_row; k++) {
            v.run(state, p, batch);
        }
        cudaEventRecord(to, state->stream);
        tchi_cuda_check(cudaEventSynchronize(to), v.name);
        cudaEventElapsedTime(&ms, from, to);
        if (i >= 0) {
            times.push_back(ms / in_a_row);
        }
    }
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    std::sort(times.begin(), times.end());
    return times[runs / 2];
}

/* With D as in a step's polynomial (A = B = D), and without as in its other products. */
static void time_size(const tchi_cuda_state *state, int batch, int n)
{
    shape s = {n, n, batch, 0, 0, 0, TCH_SCALAR_F64};
    problem p = make_problem(s, n);
    p.c = device_memory(8 * batch * p.c_stride);
    problem square = p;
    square.b = p.a;
    square.d = p.a;
    square.d_paired = 1;
    const double operations = (double)batch * n * n * n;
    printf("\n%d x %d: the library takes the %s tiling\n", batch, n,
           prefers_small(state, n, n, batch) ? "small" : "large");
    printf("%-34s %12s %9s %12s %9s\n", "", "A B' ms", "TFLOP/s", "with D ms", "TFLOP/s");
    for (const variant &v : variants) {
        double product = median_ms(state, v, p, batch), polynomial = median_ms(state, v, square, batch);
        printf("%-34s %12.4f %9.1f %12.4f %9.1f\n", v.name, product, operations / product * 1e-9, polynomial,
               operations / polynomial * 1e-9);
    }
    cudaFree((void *)p.a.data);
    cudaFree((void *)p.b.data);
    cudaFree(p.c);
}

int main(int argc, char **argv)
{
    cudaDeviceProp device;
    tchi_cuda_check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    tchi_cuda_state state = {};
    state.device.major = device.major;
    state.device.minor = device.minor;
    state.device.processors = device.multiProcessorCount;
    state.device.shared_per_block = (int64_t)device.sharedMemPerBlockOptin;
    printf("%s, %d multiprocessors\n", device.name, device.multiProcessorCount);
    if (check_all(state) != 0) {
        return 1;
    }
    if (argc > 1 && strcmp(argv[1], "check") == 0) {
        return 0;
    }
    const int sizes[][2] = {{16, 1024}, {4, 2048}, {64, 256}, {1, 4096}, {256, 128}};
    for (const int(&size)[2] : sizes) {
        time_size(&state, size[0], size[1]);
    }
    return 0;
}

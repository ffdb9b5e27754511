/* A laboratory for the symmetric product in bfloat16: the kernels that are in use and the best one that lost, each
 * against a plain kernel on shapes that are hard on edges, then their speed. Stands alone, on a GPU of sm_90; from the
 * root of the repository:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/symmetric_bf16x2_bench.cu \
 *       src/backends/cuda/product/symmetric/symmetric_pingpong.cu src/backends/cuda/device/tensor_map.c \
 *       src/backends/cuda/product/kernel_choice.c
 * With the argument `plain` only the products of an orthogonalization are timed, with `split` only those of inverse
 * roots. Exits with 1 if a check fails. */
#include <algorithm>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include <cuda_runtime.h>

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"
#include "backends/cuda/product/symmetric/symmetric_bf16x2.cu"
#include "backends/cuda/product/symmetric/symmetric_bf16x2_wgmma.cu"

/* --- what the rest of the module would offer --------------------------------------------------------------------- */

static tch_status bench_fail(tch_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    return status;
}

static const tch_backend_host bench_host = {sizeof bench_host, bench_fail, NULL, NULL};
const tch_backend_host *tchi_cuda_host = &bench_host;

static void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
        exit(1);
    }
}

static void must(tch_status status, const char *what)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s failed\n", what);
        exit(1);
    }
}

tch_status tchi_cuda_check(cudaError_t error, const char *what)
{
    must(error, what);
    return TCH_OK;
}

tch_status tchi_cuda_launched(const tchi_cuda_state *, const char *kernel)
{
    return tchi_cuda_check(cudaGetLastError(), kernel);
}

/* The first GPU, with a stream of its own for what is timed; the default stream, on which checks run, waits for it. */
static tchi_cuda_state open_device()
{
    cudaDeviceProp found;
    tchi_cuda_state state = {};
    must(cudaGetDeviceProperties(&found, 0), "cudaGetDeviceProperties");
    must(cudaStreamCreate(&state.stream), "cudaStreamCreate");
    state.device.major = found.major;
    state.device.minor = found.minor;
    state.device.processors = found.multiProcessorCount;
    state.device.shared_per_block = (int64_t)found.sharedMemPerBlockOptin;
    state.device.l2_bytes = found.l2CacheSize;
    printf("%s, %d multiprocessors, %.0f MB of L2\n", found.name, found.multiProcessorCount, found.l2CacheSize / 1e6);
    return state;
}

/* --- operands ---------------------------------------------------------------------------------------------------- */

/* A number in [-1, 1) that depends on the index alone. */
static __device__ double noise(uint64_t index)
{
    uint64_t x = (index + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)(int64_t)(x ^ (x >> 31)) * 0x1p-63;
}

static __global__ void noise_kernel(tchi_cuda_operand m, int64_t rows, int64_t cols, int64_t batch, uint64_t seed,
                                    int symmetric)
{
    int64_t count = rows * cols * batch;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t b = e / cols / rows, i = e / cols % rows, j = e % cols;
        int64_t mirror = (b * rows + j) * cols + i;
        float value = (float)noise((seed << 40) + (uint64_t)(symmetric ? min(e, mirror) : e));
        tchi_cuda_store<float>(m.type, tchi_cuda_at(m, b, i, j), 0, m.stride, value);
    }
}

static int64_t planes_of(tch_scalar type)
{
    return type == TCH_SCALAR_BF16X2 ? 2 : 1;
}

/* A batch of which all bytes are 0xFF, NaN in every type, padding included; `shift` elements off alignment. */
static tch_matrices make_poisoned(tch_scalar type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int shift)
{
    int64_t size = tchi_cuda_size(type), bytes = (rows * ld * planes_of(type) * batch + shift + 64) * size;
    char *data;
    must(cudaMalloc((void **)&data, (size_t)bytes), "cudaMalloc");
    must(cudaMemset(data, 0xFF, (size_t)bytes), "cudaMemset");
    return {data + shift * size, type, rows, cols, ld, batch, rows * ld};
}

static tch_matrices make_random(tch_scalar type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int shift,
                                uint64_t seed, int symmetric)
{
    tch_matrices m = make_poisoned(type, rows, cols, ld, batch, shift);
    noise_kernel<<<1024, 256>>>(tchi_cuda_operand_of(&m), rows, cols, batch, seed, symmetric);
    must(cudaGetLastError(), "noise_kernel");
    return m;
}

static void free_matrices(const tch_matrices *m, int shift)
{
    must(cudaFree((char *)m->data - shift * tchi_cuda_size(m->type)), "cudaFree");
}

/* C = 0.75 I - 0.5 D + 1.25 A B', with D or without. */
typedef struct product {
    tch_matrices a, b, c, d;
    int has_d;
} product;

static tchi_bf16x2_problem problem_for(const product *q)
{
    return problem_of(0.75, -0.5, q->has_d ? &q->d : NULL, 1.25, &q->a, &q->b, &q->c);
}

/* --- variants ---------------------------------------------------------------------------------------------------- */

/* For few tiles and older GPUs; the best that lost, which still serves what ping-pong does not support; ping-pong. */
enum variant { MMA_64, WGMMA_128, PINGPONG, VARIANTS };

static const char *const variant_names[VARIANTS] = {"mma 64x64", "wgmma 128x128", "ping-pong"};

/* PINGPONG is asked as if the GPU had one multiprocessor, so that few tiles are measured as well. */
static bool variant_supported(const tchi_cuda_state *state, enum variant v, const product *q)
{
    tchi_cuda_state small = *state;
    small.device.processors = 1;
    return v != PINGPONG ||
           tchi_cuda_symmetric_pingpong_supported(&small, q->has_d ? &q->d : NULL, &q->a, &q->b, &q->c);
}

static void run_variant(tchi_cuda_state *state, enum variant v, const product *q)
{
    tchi_bf16x2_problem p = problem_for(q);
    tch_status status;
    if (v == PINGPONG) {
        const tch_matrices *d = q->has_d ? &q->d : NULL;
        status = tchi_cuda_symmetric_pingpong(state, 0.75, -0.5, d, 1.25, &q->a, &q->b, &q->c);
    } else if (v == MMA_64) {
        status = split_mma(state, &p, q->c.batch, 64);
    } else {
        status = tchi_cuda_split_wgmma(state, &p, q->c.batch);
    }
    must(status, variant_names[v]);
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

/* One thread per element, in float64, of the numbers that the split type stands for. worst[0] gets the largest error in
 * units of sqrt(k + 1) + |expected|, worst[1] the number of elements that differ from their mirror image. The error is
 * kept as the bits of a non-negative float, whose order is that of integers; NaN is above all of them. */
static __global__ void plain_check(tchi_bf16x2_problem p, int64_t batch, unsigned *worst)
{
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (int64_t)p.n * p.n * batch) {
        return;
    }
    int64_t b = at / p.n / p.n, i = at / p.n % p.n, j = at % p.n, row = max(i, j), col = min(i, j);
    double sum = 0.0;
    for (int64_t l = 0; l < p.k; l++) {
        sum += tchi_cuda_load<double>(p.a.type, tchi_cuda_at(p.a, b, row, l), 0, p.a.stride) *
               tchi_cuda_load<double>(p.b.type, tchi_cuda_at(p.b, b, col, l), 0, p.b.stride);
    }
    double expected = p.c2 * sum + (row == col ? p.c0 : 0.0f);
    if (p.has_d) {
        expected += p.c1 * tchi_cuda_load<double>(p.d.type, tchi_cuda_at(p.d, b, row, col), 0, p.d.stride);
    }
    double got = tchi_cuda_load<double>(p.c.type, tchi_cuda_at(p.c, b, i, j), 0, p.c.stride);
    double mirror = tchi_cuda_load<double>(p.c.type, tchi_cuda_at(p.c, b, j, i), 0, p.c.stride);
    float error = (float)(fabs(got - expected) / (sqrt((double)p.k + 1.0) + fabs(expected)));
    atomicMax(worst, __float_as_uint(error) & 0x7FFFFFFFu);
    if (!(got == mirror)) {
        atomicAdd(worst + 1, 1u);
    }
}

/* Bytes of the padding of C that were written: all of them were 0xFF. */
static __global__ void padding_check(tchi_cuda_operand c, int64_t n, int64_t batch, unsigned *strayed)
{
    int64_t planes = c.type == TCH_SCALAR_BF16X2 ? 2 : 1, size = tchi_cuda_size(c.type);
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= c.stride * planes * batch || at % c.ld < n) {
        return;
    }
    for (int64_t k = 0; k < size; k++) {
        if ((unsigned char)c.data[at * size + k] != 0xFF) {
            atomicAdd(strayed, 1u);
        }
    }
}

typedef struct shape_case {
    tch_scalar in, out;
    int64_t n, k, batch;
    int has_d;
    int odd; /* C and D neither aligned nor with an even leading dimension */
} shape_case;

#define SPLIT TCH_SCALAR_BF16X2
#define PLAIN TCH_SCALAR_BF16
static const shape_case cases[] = {
    {SPLIT, SPLIT, 1, 1, 1, 1, 0},
    {SPLIT, SPLIT, 129, 130, 2, 1, 1},
    {SPLIT, TCH_SCALAR_F32, 255, 31, 2, 0, 1},
    {SPLIT, TCH_SCALAR_F64, 257, 33, 2, 1, 1},
    {SPLIT, TCH_SCALAR_F32, 40, 0, 2, 1, 0},
    {SPLIT, SPLIT, 300, 1000, 1, 0, 0},
    {SPLIT, SPLIT, 1000, 4099, 1, 1, 0},
    {SPLIT, SPLIT, 5, 7, 3000, 1, 1},
    {SPLIT, SPLIT, 256, 64, 300, 1, 0},
    {SPLIT, SPLIT, 264, 264, 45, 1, 0},
    {SPLIT, SPLIT, 768, 768, 12, 1, 0},
    {PLAIN, PLAIN, 127, 200, 3, 1, 1},
    {PLAIN, TCH_SCALAR_F32, 300, 64, 2, 0, 0},
    {PLAIN, SPLIT, 100, 520, 2, 1, 0},
    {PLAIN, PLAIN, 256, 64, 300, 1, 0},
    {PLAIN, PLAIN, 600, 321, 3, 0, 0},
    {PLAIN, PLAIN, 256, 0, 1, 1, 0},
    {PLAIN, PLAIN, 2048, 2048, 3, 1, 0},
};

/* What rounding the result leaves, or float32 sums and the low low products that are dropped; and for each instruction,
 * 16 along k, the half of a unit of the sum's last place that tensor cores cut off on average. */
static double tolerance_of(const shape_case *s)
{
    double cut = (double)(s->k / 16 + 1) * (s->in == SPLIT ? 3.0 : 1.0) * 0x1p-24;
    if (s->out == PLAIN) {
        return 4e-3 + cut;
    }
    return cut + (s->in == PLAIN && s->out != SPLIT ? 1e-6 : 0x1p-16);
}

static int check_case(tchi_cuda_state *state, enum variant v, const shape_case *s, unsigned *worst)
{
    int64_t ld_in = (s->k + 15) / 8 * 8, ld_even = (s->n + 15) / 8 * 8, ld_out = s->odd ? s->n + 1 : ld_even;
    int shift = s->odd ? 1 : 0, d_shift = s->in == PLAIN ? shift : 0; /* D of the split type is aligned by contract */
    unsigned got[3] = {0};
    float error = 0.0f;
    product q = {};
    q.a = make_random(s->in, s->n, s->k, ld_in, s->batch, 0, 1, 0);
    q.b = make_random(s->in, s->n, s->k, ld_in + 8, s->batch, 0, 2, 0);
    q.d = make_random(s->in, s->n, s->n, s->in == PLAIN ? ld_out : ld_even, s->batch, d_shift, 3, 1);
    q.c = make_poisoned(s->out, s->n, s->n, ld_out, s->batch, shift);
    q.has_d = s->has_d;
    if (variant_supported(state, v, &q)) {
        must(cudaMemset(worst, 0, sizeof got), "cudaMemset");
        run_variant(state, v, &q);
        tchi_bf16x2_problem p = problem_for(&q);
        int64_t elements = s->n * s->n * s->batch, stored = q.c.stride * planes_of(s->out) * s->batch;
        plain_check<<<(unsigned)((elements + 255) / 256), 256>>>(p, s->batch, worst);
        padding_check<<<(unsigned)((stored + 255) / 256), 256>>>(p.c, s->n, s->batch, worst + 2);
        must(cudaMemcpy(got, worst, sizeof got, cudaMemcpyDeviceToHost), variant_names[v]);
        memcpy(&error, got, sizeof error);
    }
    free_matrices(&q.a, 0), free_matrices(&q.b, 0), free_matrices(&q.d, d_shift), free_matrices(&q.c, shift);
    if (error <= tolerance_of(s) && got[1] == 0 && got[2] == 0) {
        return 0;
    }
    printf("FAIL %s: in %d out %d n %lld k %lld batch %lld d %d odd %d: error %.2e, asymmetric %u, strayed %u\n",
           variant_names[v], (int)s->in, (int)s->out, (long long)s->n, (long long)s->k, (long long)s->batch, s->has_d,
           s->odd, error, got[1], got[2]);
    return 1;
}

static int check_all(tchi_cuda_state *state)
{
    unsigned *worst;
    must(cudaMalloc((void **)&worst, 3 * sizeof *worst), "cudaMalloc");
    int failed = 0;
    for (int v = 0; v < VARIANTS; v++) {
        for (const shape_case &s : cases) {
            failed += check_case(state, (enum variant)v, &s, worst);
        }
    }
    must(cudaFree(worst), "cudaFree");
    return failed;
}

/* --- speed ------------------------------------------------------------------------------------------------------- */

/* The median of 20 times between two events, in ms, after three that are not counted. */
static double median_ms(tchi_cuda_state *state, enum variant v, const product *q)
{
    std::vector<float> times;
    cudaEvent_t from, to;
    must(cudaEventCreate(&from), "cudaEventCreate");
    must(cudaEventCreate(&to), "cudaEventCreate");
    for (int i = -3; i < 20; i++) {
        float ms;
        must(cudaEventRecord(from, state->stream), "cudaEventRecord");
        run_variant(state, v, q);
        must(cudaEventRecord(to, state->stream), "cudaEventRecord");
        must(cudaEventSynchronize(to), "a kernel");
        must(cudaEventElapsedTime(&ms, from, to), "cudaEventElapsedTime");
        if (i >= 0) {
            times.push_back(ms);
        }
    }
    must(cudaEventDestroy(from), "cudaEventDestroy");
    must(cudaEventDestroy(to), "cudaEventDestroy");
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* TFLOP/s count a symmetric product: n^2 k for each product of parts, three of them for split operands. */
static void time_product(tchi_cuda_state *state, tch_scalar type, int64_t batch, int64_t n, int64_t k, int has_d)
{
    product q = {};
    q.a = make_random(type, n, k, k, batch, 0, 1, 0);
    q.b = make_random(type, n, k, k, batch, 0, 2, 0);
    q.d = make_random(type, n, n, n, batch, 0, 3, 1);
    q.c = make_poisoned(type, n, n, n, batch, 0);
    q.has_d = has_d;
    double flop = (type == SPLIT ? 3.0 : 1.0) * (double)n * (double)n * (double)k * (double)batch;
    printf("%4lld x %4lld, k %4lld, %s %s", (long long)batch, (long long)n, (long long)k,
           type == SPLIT ? "split" : "plain", has_d ? "with D:   " : "without D:");
    for (int v = 0; v < VARIANTS; v++) {
        if (variant_supported(state, (enum variant)v, &q)) {
            double ms = median_ms(state, (enum variant)v, &q);
            printf("  %s %.4f ms %.0f TFLOP/s", variant_names[v], ms, flop / ms * 1e-9);
        }
    }
    printf("\n");
    fflush(stdout);
    free_matrices(&q.a, 0), free_matrices(&q.b, 0), free_matrices(&q.d, 0), free_matrices(&q.c, 0);
}

/* The symmetric products of Muon's matrices: Gram matrices of their rows, and polynomials in those. */
static const int64_t orthogonalization_sizes[][3] = {
    {44, 256, 1024}, {48, 512, 512},  {4, 1024, 1024},  {48, 768, 768},
    {24, 768, 3072}, {8, 2048, 2048}, {64, 2048, 2048}, {48, 2048, 5632},
};
static const int64_t root_sizes[][2] = {{16, 1024}, {4, 2048}, {64, 256}, {32, 512}, {1, 4096}, {256, 128}};

int main(int argc, char **argv)
{
    tchi_cuda_state state = open_device();
    if (state.device.major != 9) {
        fprintf(stderr, "needs a GPU of sm_90\n");
        return 1;
    }
    int failed = check_all(&state);
    printf("%d checks failed\n", failed);
    const char *only = argc > 1 ? argv[1] : "";
    for (const auto &size : orthogonalization_sizes) {
        for (int has_d = 0; has_d <= (size[1] == size[2]) && strcmp(only, "split") != 0; has_d++) {
            time_product(&state, PLAIN, size[0], size[1], size[2], has_d);
        }
    }
    for (const auto &size : root_sizes) {
        for (int has_d = 0; has_d <= 1 && strcmp(only, "plain") != 0; has_d++) {
            time_product(&state, SPLIT, size[0], size[1], size[1], has_d);
        }
    }
    return failed != 0;
}

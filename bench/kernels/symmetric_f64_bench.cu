/* The symmetric product in float64 (src/backends/cuda/product/symmetric/symmetric_f64.cu) alone on a GPU: the library's
 * tiling and two that lost, first against a plain kernel on odd shapes, then their times. The others are in
 * bench/ladder/cuda_symmetric_f64.md. Not part of the build:
 *
 *     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/symmetric_f64_bench.cu
 *
 * `a.out check` stops after the checks. TFLOP/s count batch n^2 k operations, the lower half of the product, whatever a
 * tiling computes beyond it. */
#include "common.cuh"

#include "backends/cuda/product/symmetric/symmetric_f64.cu"

/* --- the tilings ------------------------------------------------------------------------------------------------- */

typedef tch_status (*launcher)(const tchi_cuda_state *, problem, int64_t);

typedef struct variant {
    const char *name;
    launcher run;
} variant;

typedef tiling<128, 64, 64, 32, 4, 2> medium;
typedef tiling<128, 128, 64, 32, 4, 1> large;

static const variant variants[] = {
    {"64x64 32x32, 3 blocks", launch<usual_tiling>},
    {"128x64 64x32, 2 blocks, lost", launch<medium>},
    {"128x128 64x32, lost", launch<large>},
};

/* --- data -------------------------------------------------------------------------------------------------------- */

static __global__ void fill_kernel(double *out, int64_t count, uint64_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        out[i] = noise(seed + (uint64_t)i);
    }
}

static double *noisy(int64_t count, uint64_t seed)
{
    double *data = device_array<double>(count);
    fill_kernel<<<256, 256>>>(data, count, seed);
    must(cudaGetLastError(), "fill_kernel");
    return data;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

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
    double *plain = device_array<double>((int64_t)expected.size());
    p.c = device_array<char>((int64_t)got.size());
    must(cudaMemset(p.c, 0xff, got.size()), "cudaMemset");
    v.run(state, p, s.batch);
    plain_kernel<<<dim3((unsigned)((s.n * s.n + 127) / 128), (unsigned)s.batch), 128>>>(p, plain);
    must(cudaGetLastError(), "plain_kernel");
    must(cudaMemcpy(got.data(), p.c, got.size(), cudaMemcpyDeviceToHost), v.name);
    must(cudaMemcpy(expected.data(), plain, 8 * expected.size(), cudaMemcpyDeviceToHost), v.name);
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

static int check_all(const tchi_cuda_state *state)
{
    int wrong = 0;
    for (const variant &v : variants) {
        for (const shape &s : shapes) {
            wrong += check(state, v, s);
        }
    }
    printf("checks: %s\n", wrong == 0 ? "all right" : "FAILED");
    return wrong;
}

/* --- times ------------------------------------------------------------------------------------------------------- */

/* Milliseconds of one launch among several in a row: one alone would be timed with its launch. */
static double time_of(const tchi_cuda_state *state, const variant &v, const problem &p, int64_t batch)
{
    const int in_a_row = 4;
    double ms = median_ms(state->stream, [&] {
        for (int k = 0; k < in_a_row; k++) {
            v.run(state, p, batch);
        }
    });
    return ms / in_a_row;
}

/* With D as in a step's polynomial (A = B = D), and without as in its other products. */
static void time_size(const tchi_cuda_state *state, int batch, int n)
{
    shape s = {n, n, batch, 0, 0, 0, TCH_SCALAR_F64};
    problem p = make_problem(s, n);
    p.b.ld = p.a.ld; /* as the library's own matrices lie; other rows begin inside of sectors */
    p.b.stride = n * p.b.ld;
    p.c = device_array<double>(batch * p.c_stride);
    problem square = p;
    square.b = p.a;
    square.d = p.a;
    square.d_paired = 1;
    const double operations = (double)batch * n * n * n;
    printf("\n%d x %d\n", batch, n);
    printf("%-34s %12s %9s %12s %9s\n", "", "A B' ms", "TFLOP/s", "with D ms", "TFLOP/s");
    for (const variant &v : variants) {
        double product = time_of(state, v, p, batch), polynomial = time_of(state, v, square, batch);
        printf("%-34s %12.4f %9.1f %12.4f %9.1f\n", v.name, product, operations / product * 1e-9, polynomial,
               operations / polynomial * 1e-9);
    }
    cudaFree((void *)p.a.data);
    cudaFree((void *)p.b.data);
    cudaFree(p.c);
}

int main(int argc, char **argv)
{
    tchi_cuda_state state = this_device();
    if (check_all(&state) != 0) {
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

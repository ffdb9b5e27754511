/* The kernels and their references. References are loops in float64; bounds are stated where they are checked, with u
 * the round-off of float32. Outputs are poisoned before a launch, and their surroundings checked after it. */
#include "support/kernel/kernel_sources.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

#define U 5.97e-8 /* 2^-24 */
#define N 3001

/* --- arrays and launches ----------------------------------------------------------------------------------------- */

typedef struct array {
    test_tensor *tensor;
    double *values; /* what was written, as the dtype holds it */
} array;

static array make(kernel_trial *t, tch_dtype dtype, int64_t count)
{
    return (array){test_tensor_make(t->context, dtype, 1, &count, LAYOUT_CONTIGUOUS), NULL};
}

static array filled(kernel_trial *t, tch_dtype dtype, int64_t count, const double *values)
{
    array a = make(t, dtype, count);
    test_tensor_write(a.tensor, values);
    a.values = test_tensor_read(a.tensor);
    return a;
}

static array random_array(kernel_trial *t, tch_dtype dtype, int64_t count, uint64_t stream)
{
    double *values = test_alloc((size_t)count * sizeof *values);
    test_random random = test_random_stream(7700 + stream);
    test_random_fill_normal(&random, values, count);
    return filled(t, dtype, count, values);
}

static array zeros(kernel_trial *t, tch_dtype dtype, int64_t count)
{
    return filled(t, dtype, count, test_zeros(count));
}

static array random_integers(kernel_trial *t, int64_t count, int range, uint64_t stream)
{
    double *values = test_alloc((size_t)count * sizeof *values);
    test_random random = test_random_stream(7800 + stream);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)(test_random_bits(&random) % (uint64_t)range);
    }
    return filled(t, TCH_INT32, count, values);
}

static void launch(kernel_trial *t, const int64_t grid[3], const int64_t block[3], int64_t shared, int32_t count,
                   const tch_kernel_argument *arguments)
{
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(grid[0], block[0]);
    memcpy(shape.grid, grid, sizeof shape.grid);
    memcpy(shape.block, block, sizeof shape.block);
    shape.shared_bytes = shared;
    CHECK_OK(tch_kernel_launch(t->kernel, &shape, count, arguments));
}

static void launch_line(kernel_trial *t, int64_t blocks, int64_t threads, int32_t count,
                        const tch_kernel_argument *arguments)
{
    launch(t, (int64_t[]){blocks, 1, 1}, (int64_t[]){threads, 1, 1}, 0, count, arguments);
}

static void expect(array out, int64_t i, double got, double wanted, double bound)
{
    (void)out;
    CHECK(fabs(got - wanted) <= bound, "element %lld is %.9g, %.9g was expected, within %.3g", (long long)i, got,
          wanted, bound);
}

#define T(a) TCH_ARGUMENT_TENSOR(&(a).tensor->tensor)

/* y must be written everywhere, and nowhere else. */
static double *result(array y)
{
    test_tensor_check_written(y.tensor, "the output");
    return test_tensor_read(y.tensor);
}

/* --- elementwise ------------------------------------------------------------------------------------------------- */

/* Two roundings of a product and a sum. */
static void check_axpy(kernel_trial *t, int64_t blocks)
{
    array x = random_array(t, TCH_FLOAT32, N, 1), y = random_array(t, TCH_FLOAT32, N, 2);
    tch_kernel_argument arguments[] = {TCH_ARGUMENT_REAL(1.5), T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, blocks, 256, 4, arguments);
    double *got = test_tensor_read(y.tensor);
    for (int64_t i = 0; i < N; i++) {
        double product = 1.5 * x.values[i];
        expect(y, i, got[i], product + y.values[i], 2 * U * (fabs(product) + fabs(product + y.values[i])));
    }
}

static void check_one_each(kernel_trial *t)
{
    check_axpy(t, (N + 255) / 256);
}

static void check_stride(kernel_trial *t)
{
    check_axpy(t, 3);
    check_axpy(t, 1);
    check_axpy(t, 40);
}

/* Each thread halves its own factor from turn to turn: which thread takes which element shows. */
static void check_halving(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, N, 18), y = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {TCH_ARGUMENT_REAL(1.0), T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, 3, 128, 4, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        expect(y, i, got[i], ldexp(x.values[i], -(int)(i / (3 * 128))), 0.0);
    }
}

/* expf is good to 2 units in the last place on every device. */
static void check_exp(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, N, 3), y = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, 5, 128, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        expect(y, i, got[i], exp(x.values[i]), 4 * U * exp(x.values[i]));
    }
}

static void check_stencil(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, N, 4), y = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 127) / 128, 128, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        double sum = 0.0, size = 0.0;
        for (int64_t k = i - 2; k <= i + 2; k++) {
            double v = k >= 0 && k < N ? x.values[k] : 0.0;
            sum += v, size += fabs(v);
        }
        expect(y, i, got[i], sum, 5 * U * size);
    }
}

/* --- reductions -------------------------------------------------------------------------------------------------- */

/* A sum of n terms in any order is off by at most n u times the sum of their absolute values. */
static void check_total(kernel_trial *t, int64_t shared, int64_t outputs, int64_t blocks)
{
    array x = random_array(t, TCH_FLOAT32, N, 5), y = zeros(t, TCH_FLOAT32, outputs);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch(t, (int64_t[]){blocks, 1, 1}, (int64_t[]){256, 1, 1}, shared, 3, arguments);
    double *got = test_tensor_read(y.tensor), sum = 0.0, wanted = 0.0, size = 0.0;
    for (int64_t i = 0; i < outputs; i++) {
        sum += got[i];
    }
    for (int64_t i = 0; i < N; i++) {
        wanted += x.values[i], size += fabs(x.values[i]);
    }
    expect(y, 0, sum, wanted, N * U * size);
}

static void check_shared_sum(kernel_trial *t)
{
    check_total(t, 0, 12, 12);
}

static void check_dynamic_sum(kernel_trial *t)
{
    check_total(t, 256 * 4, 12, 12);
}

static void check_atomic_sum(kernel_trial *t)
{
    check_total(t, 0, 1, 12);
}

static void check_maximum(kernel_trial *t)
{
    array x = random_integers(t, N, 1000000, 6), y = zeros(t, TCH_INT32, 1);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 255) / 256, 256, 3, arguments);
    double *got = test_tensor_read(y.tensor), wanted = 0.0;
    for (int64_t i = 0; i < N; i++) {
        wanted = fmax(wanted, x.values[i]);
    }
    expect(y, 0, got[0], wanted, 0.0);
}

static void check_histogram(kernel_trial *t)
{
    array x = random_integers(t, N, 64, 7), y = zeros(t, TCH_INT32, 64);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, 7, 96, 3, arguments);
    double *got = test_tensor_read(y.tensor), wanted[64] = {0};
    for (int64_t i = 0; i < N; i++) {
        wanted[(int)x.values[i]]++;
    }
    for (int64_t i = 0; i < 64; i++) {
        expect(y, i, got[i], wanted[i], 0.0);
    }
}

/* Partial sums of integers: exact. */
static void check_scan(kernel_trial *t)
{
    array x = random_integers(t, 1000, 100, 8), y = make(t, TCH_INT32, 1000);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(1000)};
    launch_line(t, 1, 1024, 3, arguments);
    double *got = result(y), sum = 0.0;
    for (int64_t i = 0; i < 1000; i++) {
        sum += x.values[i];
        expect(y, i, got[i], sum, 0.0);
    }
}

/* How many numbers of each warp are odd, by a vote. */
static void check_votes(kernel_trial *t)
{
    array x = random_integers(t, 320, 1000, 9), y = make(t, TCH_INT32, 10);
    tch_kernel_argument arguments[] = {T(x), T(y)};
    launch_line(t, 2, 160, 2, arguments);
    double *got = result(y);
    for (int64_t warp = 0; warp < 10; warp++) {
        double odd = 0.0;
        for (int64_t lane = 0; lane < 32; lane++) {
            odd += (int)x.values[warp * 32 + lane] % 2;
        }
        expect(y, warp, got[warp], odd, 0.0);
    }
}

/* Sums of the integers before and at each thread, within segments of 8. */
static void check_segments(kernel_trial *t)
{
    array x = random_integers(t, 320, 1000, 19), y = make(t, TCH_INT32, 320);
    tch_kernel_argument arguments[] = {T(x), T(y)};
    launch_line(t, 2, 160, 2, arguments);
    double *got = result(y), sum = 0.0;
    for (int64_t i = 0; i < 320; i++) {
        sum = i % 8 == 0 ? x.values[i] : sum + x.values[i];
        expect(y, i, got[i], sum, 0.0);
    }
}

/* --- matrices ---------------------------------------------------------------------------------------------------- */

enum { ROWS = 75, COLS = 43, INNER = 37 };

static void check_transpose(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, (int64_t)ROWS * COLS, 10), y = make(t, TCH_FLOAT32, (int64_t)ROWS * COLS);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(ROWS), TCH_ARGUMENT_INT(COLS)};
    launch(t, (int64_t[]){(COLS + 15) / 16, (ROWS + 15) / 16, 1}, (int64_t[]){16, 16, 1}, 0, 4, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < ROWS; i++) {
        for (int64_t j = 0; j < COLS; j++) {
            expect(y, j * ROWS + i, got[j * ROWS + i], x.values[i * COLS + j], 0.0);
        }
    }
}

static void check_product(kernel_trial *t)
{
    array a = random_array(t, TCH_FLOAT32, ROWS * INNER, 11), b = random_array(t, TCH_FLOAT32, INNER * COLS, 12);
    array c = make(t, TCH_FLOAT32, ROWS * COLS);
    tch_kernel_argument arguments[] = {
        T(a), T(b), T(c), TCH_ARGUMENT_INT(ROWS), TCH_ARGUMENT_INT(COLS), TCH_ARGUMENT_INT(INNER)};
    launch(t, (int64_t[]){(COLS + 15) / 16, (ROWS + 15) / 16, 1}, (int64_t[]){16, 16, 1}, 0, 6, arguments);
    double *got = result(c);
    for (int64_t i = 0; i < ROWS; i++) {
        for (int64_t j = 0; j < COLS; j++) {
            double sum = 0.0, size = 0.0;
            for (int64_t k = 0; k < INNER; k++) {
                sum += a.values[i * INNER + k] * b.values[k * COLS + j];
                size += fabs(a.values[i * INNER + k] * b.values[k * COLS + j]);
            }
            expect(c, i * COLS + j, got[i * COLS + j], sum, (INNER + 1) * U * size);
        }
    }
}

/* exp, sum and quotient: relative error of a few units and of COLS terms of one sign. */
static void check_softmax(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, ROWS * COLS, 13), y = make(t, TCH_FLOAT32, ROWS * COLS);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(COLS)};
    launch_line(t, ROWS, 64, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < ROWS; i++) {
        double largest = -HUGE_VAL, sum = 0.0;
        for (int64_t j = 0; j < COLS; j++) {
            largest = fmax(largest, x.values[i * COLS + j]);
        }
        for (int64_t j = 0; j < COLS; j++) {
            sum += exp(x.values[i * COLS + j] - largest);
        }
        for (int64_t j = 0; j < COLS; j++) {
            double wanted = exp(x.values[i * COLS + j] - largest) / sum;
            /* the exponent itself is rounded: up to 8 u of an argument below 8 in size */
            expect(y, i * COLS + j, got[i * COLS + j], wanted, (COLS + 24) * U * wanted);
        }
    }
}

/* --- parameters and types ---------------------------------------------------------------------------------------- */

static void check_template(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT64, N, 14), y = make(t, TCH_FLOAT64, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 255) / 256, 256, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        expect(y, i, got[i], 4.0 * x.values[i], 0.0);
    }
}

/* One rounding of a product that float32 holds exactly. */
static void check_narrow(kernel_trial *t, tch_dtype dtype, double u)
{
    array x = random_array(t, dtype, N, 15), y = make(t, dtype, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 255) / 256, 256, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        double wanted = x.values[i] * x.values[i];
        expect(y, i, got[i], wanted, u * wanted + 3e-8);
    }
}

/* Numbers of all sizes a half has, and some beyond, are rounded as the tests' own arrays round them; back is exact. */
static void check_conversions(kernel_trial *t)
{
    double *values = test_alloc(N * sizeof *values);
    test_random random = test_random_stream(7720);
    for (int64_t i = 0; i < N; i++) {
        values[i] = ldexp(test_random_normal(&random), (int)(test_random_bits(&random) % 42) - 26);
    }
    array x = filled(t, TCH_FLOAT32, N, values), wanted = filled(t, TCH_FLOAT16, N, x.values);
    array narrow = make(t, TCH_FLOAT16, N), wide = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(narrow), T(wide), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 255) / 256, 256, 4, arguments);
    double *got = result(narrow), *back = result(wide);
    for (int64_t i = 0; i < N; i++) {
        CHECK(got[i] == wanted.values[i] && back[i] == wanted.values[i], "%.9g became %.9g and %.9g, not %.9g",
              x.values[i], got[i], back[i], wanted.values[i]);
    }
}

/* One thread, one loop: that is enough to crash some compilers, which must not be the end of it. */
static void check_largest_as_double(kernel_trial *t)
{
    array x = random_array(t, TCH_FLOAT32, N, 18), y = make(t, TCH_FLOAT64, 1);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    double wanted = 0;
    for (int64_t i = 0; i < N; i++) {
        wanted = fmax(wanted, x.values[i]);
    }
    launch_line(t, 1, 1, 3, arguments);
    double *got = result(y);
    expect(y, 0, got[0], wanted, 0.0);
}

static void check_half(kernel_trial *t)
{
    check_narrow(t, TCH_FLOAT16, 4.9e-4);
}

static void check_brain(kernel_trial *t)
{
    check_narrow(t, TCH_BFLOAT16, 3.95e-3);
}

static void check_struct(kernel_trial *t)
{
    struct {
        float scale, shift;
        int count;
    } line = {2.0f, 0.25f, N};
    array x = random_array(t, TCH_FLOAT32, N, 16), y = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_BYTES(&line, sizeof line)};
    launch_line(t, (N + 255) / 256, 256, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        double wanted = 2.0 * x.values[i] + 0.25;
        expect(y, i, got[i], wanted, U * fabs(wanted));
    }
}

static void check_table(kernel_trial *t)
{
    static const double table[] = {1, -2, 4, -8};
    array x = random_array(t, TCH_FLOAT32, N, 17), y = make(t, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(N)};
    launch_line(t, (N + 255) / 256, 256, 3, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < N; i++) {
        expect(y, i, got[i], table[i % 4] * x.values[i], 0.0);
    }
}

/* Every point of a box writes its number once. */
static void check_box(kernel_trial *t)
{
    array y = make(t, TCH_INT32, 11 * 7 * 5);
    tch_kernel_argument arguments[] = {T(y), TCH_ARGUMENT_INT(11), TCH_ARGUMENT_INT(7), TCH_ARGUMENT_INT(5)};
    launch(t, (int64_t[]){3, 4, 3}, (int64_t[]){4, 2, 2}, 0, 4, arguments);
    double *got = result(y);
    for (int64_t i = 0; i < 11 * 7 * 5; i++) {
        expect(y, i, got[i], (double)i, 0.0);
    }
}

/* --- the list ---------------------------------------------------------------------------------------------------- */

#define HERE "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"

const kernel_source kernel_sources[] = {
    {"one element each", "axpy",
     "__global__ void axpy(float a, const float *x, float *y, int n)\n{\n" HERE
     "if (i < n) y[i] = a * x[i] + y[i];\n}\n",
     check_one_each},
    {"early return", "axpy",
     "extern \"C\" __global__ void axpy(float a, const float *__restrict__ x, float *__restrict__ y, int n)\n{\n" HERE
     "if (i >= n) return;\ny[i] = fmaf(a, __ldg(x + i), y[i]);\n}\n",
     check_one_each},
    {"grid-stride loop", "axpy",
     "__global__ void axpy(float a, const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)\n"
     "y[i] = a * x[i] + y[i];\n}\n",
     check_stride},
    {"grid-stride loop with names", "axpy",
     "__global__ void axpy(float a, const float *x, float *y, int n)\n{\nint index = threadIdx.x + blockIdx.x * "
     "blockDim.x;\nint stride = gridDim.x * blockDim.x;\n"
     "for (int i = index; i < n; i += stride) {\nfloat v = a * x[i];\ny[i] = v + y[i];\n}\n}\n",
     check_stride},
    {"grid-stride loop that counts its turns", "axpy",
     "__global__ void axpy(float a, const float *x, float *y, int n)\n{\nint turns = 0;\n"
     "for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x, turns++)\n"
     "if (turns * (size_t)(blockDim.x * gridDim.x) + blockIdx.x * blockDim.x + threadIdx.x == i)\n"
     "y[i] = a * x[i] + y[i];\n}\n",
     check_stride},
    {"grid-stride loop that changes a parameter", "halving",
     "__global__ void halving(float a, const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {\n"
     "y[i] = a * x[i];\na *= 0.5f;\n}\n}\n",
     check_halving},
    {"grid-stride loop with a variable before it", "halving",
     "__global__ void halving(float a, const float *x, float *y, int n)\n{\nfloat b = a;\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) {\n"
     "y[i] = b * x[i];\nb *= 0.5f;\n}\n}\n",
     check_halving},
    {"exponential by a device function", "apply",
     "__device__ __forceinline__ float f(float x) { return expf(x); }\n"
     "__global__ void apply(const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) y[i] = f(x[i]);\n}\n",
     check_exp},
    {"lambda in a namespace", "space::apply",
     "namespace space {\ntemplate <typename F> __device__ float call(F f, float x) { return f(x); }\n"
     "__global__ void apply(const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)\n"
     "y[i] = call([](float v) { return expf(v); }, x[i]);\n}\n}\n",
     check_exp},
    {"stencil with halo", "stencil",
     "__global__ void stencil(const float *x, float *y, int n)\n{\n__shared__ float s[128 + 4];\n" HERE
     "int k = threadIdx.x + 2;\ns[k] = i < n ? x[i] : 0.0f;\n"
     "if (threadIdx.x < 2) {\ns[k - 2] = i >= 2 && i - 2 < n ? x[i - 2] : 0.0f;\n"
     "s[k + 128] = i + 128 < n ? x[i + 128] : 0.0f;\n}\n__syncthreads();\n"
     "if (i < n) y[i] = s[k - 2] + s[k - 1] + s[k] + s[k + 1] + s[k + 2];\n}\n",
     check_stencil},
    {"sum by shared memory", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\n__shared__ float s[256];\n" HERE
     "s[threadIdx.x] = i < n ? x[i] : 0.0f;\n__syncthreads();\n"
     "for (int half = blockDim.x / 2; half > 0; half /= 2) {\n"
     "if (threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];\n__syncthreads();\n}\n"
     "if (threadIdx.x == 0) y[blockIdx.x] = s[0];\n}\n",
     check_shared_sum},
    {"sum by dynamic shared memory", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\nextern __shared__ __align__(16) float s[];\n" HERE
     "s[threadIdx.x] = i < n ? x[i] : 0.0f;\n__syncthreads();\n"
     "for (int half = blockDim.x / 2; half > 0; half /= 2) {\n"
     "if (threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];\n__syncthreads();\n}\n"
     "if (threadIdx.x == 0) y[blockIdx.x] = s[0];\n}\n",
     check_dynamic_sum},
    {"sum by dynamic shared memory of the whole source", "total",
     "extern __shared__ unsigned char bytes[];\n"
     "__global__ void total(const float *x, float *y, int n)\n{\nfloat *s = reinterpret_cast<float *>(bytes);\n" HERE
     "s[threadIdx.x] = i < n ? x[i] : 0.0f;\n__syncthreads();\n"
     "if (threadIdx.x == 0) {\nfloat sum = 0.0f;\nfor (int k = 0; k < 256; k++) sum += s[k];\ny[blockIdx.x] = "
     "sum;\n}\n}\n",
     check_dynamic_sum},
    {"sum by shuffles", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\n__shared__ float sums[32];\n" HERE
     "float v = i < n ? x[i] : 0.0f;\n"
     "for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffffu, v, d);\n"
     "if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;\n__syncthreads();\n"
     "if (threadIdx.x < 32) {\nv = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0f;\n"
     "for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);\n"
     "if (threadIdx.x == 0) y[blockIdx.x] = v;\n}\n}\n",
     check_shared_sum},
    {"sum by atomics", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\n" HERE "if (i < n) atomicAdd(y, x[i]);\n}\n",
     check_atomic_sum},
    {"maximum by atomics", "largest",
     "__global__ void largest(const int *x, int *y, int n)\n{\n" HERE "if (i < n) atomicMax(y, x[i]);\n}\n",
     check_maximum},
    {"histogram", "count",
     "__global__ void count(const int *x, int *y, int n)\n{\n__shared__ int bins[64];\n"
     "for (int k = threadIdx.x; k < 64; k += blockDim.x) bins[k] = 0;\n__syncthreads();\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) atomicAdd(&bins[x[i]], "
     "1);\n"
     "__syncthreads();\nfor (int k = threadIdx.x; k < 64; k += blockDim.x) atomicAdd(y + k, bins[k]);\n}\n",
     check_histogram},
    {"prefix sum", "scan",
     "__global__ void scan(const int *x, int *y, int n)\n{\n__shared__ int s[2][1024];\nint k = threadIdx.x, from = "
     "0;\n"
     "s[0][k] = k < n ? x[k] : 0;\n__syncthreads();\n"
     "for (int d = 1; d < 1024; d *= 2) {\ns[1 - from][k] = s[from][k] + (k >= d ? s[from][k - d] : 0);\nfrom = 1 - "
     "from;\n"
     "__syncthreads();\n}\nif (k < n) y[k] = s[from][k];\n}\n",
     check_scan},
    {"votes", "votes",
     "__global__ void votes(const int *x, int *y)\n{\n" HERE
     "unsigned odd = __ballot_sync(0xffffffffu, x[i] % 2 != 0);\nif (threadIdx.x % warpSize == 0) y[i / 32] = "
     "__popc(odd);\n}\n",
     check_votes},
    {"shuffles in segments", "sums",
     "__global__ void sums(const int *x, int *y)\n{\n" HERE "int v = x[i];\n"
     "for (int d = 1; d < 8; d *= 2) {\nint before = __shfl_up_sync(0xffffffffu, v, d, 8);\n"
     "if (threadIdx.x % 8 >= d) v += before;\n}\ny[i] = v;\n}\n",
     check_segments},
    {"transpose", "transpose",
     "__global__ void transpose(const float *x, float *y, int rows, int cols)\n{\n"
     "int j = blockIdx.x * blockDim.x + threadIdx.x, i = blockIdx.y * blockDim.y + threadIdx.y;\n"
     "if (i < rows && j < cols) y[j * rows + i] = x[i * cols + j];\n}\n",
     check_transpose},
    {"transpose by tiles", "transpose<16>",
     "template <int side> __global__ void transpose(const float *x, float *y, int rows, int cols)\n{\n"
     "__shared__ float tile[side][side + 1];\n"
     "int j = blockIdx.x * side + threadIdx.x, i = blockIdx.y * side + threadIdx.y;\n"
     "if (i < rows && j < cols) tile[threadIdx.y][threadIdx.x] = x[i * cols + j];\n__syncthreads();\n"
     "i = blockIdx.y * side + threadIdx.x, j = blockIdx.x * side + threadIdx.y;\n"
     "if (i < rows && j < cols) y[j * rows + i] = tile[threadIdx.x][threadIdx.y];\n}\n",
     check_transpose},
    {"matrix product by tiles", "product",
     "#define SIDE 16\n__global__ void __launch_bounds__(256) product(const float *a, const float *b, float *c, int m, "
     "int n, int "
     "k)\n{\n__shared__ float sa[SIDE][SIDE], sb[SIDE][SIDE];\n"
     "int tx = threadIdx.x, ty = threadIdx.y, row = blockIdx.y * SIDE + ty, col = blockIdx.x * SIDE + tx;\nfloat sum = "
     "0.0f;\n"
     "for (int first = 0; first < k; first += SIDE) {\n"
     "sa[ty][tx] = row < m && first + tx < k ? a[row * k + first + tx] : 0.0f;\n"
     "sb[ty][tx] = col < n && first + ty < k ? b[(first + ty) * n + col] : 0.0f;\n__syncthreads();\n"
     "#pragma unroll\nfor (int i = 0; i < SIDE; i++) sum += sa[ty][i] * sb[i][tx];\n__syncthreads();\n}\n"
     "if (row < m && col < n) c[row * n + col] = sum;\n}\n",
     check_product},
    {"softmax of rows", "softmax",
     "__device__ float joined(float v, float *s, bool largest)\n{\n"
     "for (int d = 16; d > 0; d /= 2) {\nfloat o = __shfl_xor_sync(0xffffffffu, v, d);\nv = largest ? fmaxf(v, o) : v "
     "+ o;\n}\n"
     "if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;\n__syncthreads();\n"
     "v = largest ? fmaxf(s[0], s[1]) : s[0] + s[1];\n__syncthreads();\nreturn v;\n}\n"
     "__global__ void softmax(const float *x, float *y, int n)\n{\n__shared__ float s[2];\n"
     "x += blockIdx.x * n, y += blockIdx.x * n;\nfloat v = -INFINITY, sum = 0.0f;\n"
     "for (int j = threadIdx.x; j < n; j += blockDim.x) v = fmaxf(v, x[j]);\nv = joined(v, s, true);\n"
     "for (int j = threadIdx.x; j < n; j += blockDim.x) sum += expf(x[j] - v);\nsum = joined(sum, s, false);\n"
     "for (int j = threadIdx.x; j < n; j += blockDim.x) y[j] = expf(x[j] - v) / sum;\n}\n",
     check_softmax},
    {"template by name expression", "scale<double, 4>",
     "template <typename T, int factor> __global__ void scale(const T *x, T *y, int n)\n{\n" HERE
     "if (i < n) y[i] = T(factor) * x[i];\n}\n",
     check_template},
    {"largest as a double", "largest",
     "__global__ void largest(const float *x, double *y, int n)\n{\ndouble most = 0;\n"
     "for (int i = 0; i < n; i++) most = fmax(most, (double)x[i]);\n*y = most;\n}\n",
     check_largest_as_double},
    {"half", "square",
     "#include <cuda_fp16.h>\n__global__ void square(const __half *x, __half *y, int n)\n{\n" HERE
     "if (i < n) y[i] = __hmul(x[i], x[i]);\n}\n",
     check_half},
    {"conversions of half", "convert",
     "#include <cuda_fp16.h>\n__global__ void convert(const float *x, __half *narrow, float *wide, int n)\n{\n" HERE
     "if (i < n) {\nnarrow[i] = __float2half(x[i]);\nwide[i] = __half2float(__float2half_rn(x[i]));\n}\n}\n",
     check_conversions},
    {"bfloat16", "square",
     "#include <cuda_bf16.h>\n__global__ void square(const __nv_bfloat16 *x, __nv_bfloat16 *y, int n)\n{\n" HERE
     "if (i < n) {\nfloat v = __bfloat162float(x[i]);\ny[i] = __float2bfloat16(v * v);\n}\n}\n",
     check_brain},
    {"structure by value", "line",
     "struct Line {\nfloat scale, shift;\nint count;\n};\n__global__ void line(const float *x, float *y, Line "
     "l)\n{\n" HERE "if (i < l.count) y[i] = l.scale * x[i] + l.shift;\n}\n",
     check_struct},
    {"constant table", "weigh",
     "__constant__ float table[4] = {1, -2, 4, -8};\n__global__ void weigh(const float *x, float *y, int n)\n{\n" HERE
     "if (i < n) y[i] = table[i % 4] * x[i];\n}\n",
     check_table},
    {"grid of three dimensions", "box",
     "__global__ void box(int *y, int a, int b, int c)\n{\nint i = blockIdx.x * blockDim.x + threadIdx.x;\n"
     "int j = blockIdx.y * blockDim.y + threadIdx.y, k = blockIdx.z * blockDim.z + threadIdx.z;\n"
     "if (i < a && j < b && k < c) y[(k * b + j) * a + i] = (k * b + j) * a + i;\n}\n",
     check_box},
};
const int kernel_source_count = sizeof kernel_sources / sizeof *kernel_sources;

/* Kernels and their references. References are loops in float64; error bounds are stated where they are computed, with
 * u the unit roundoff of float32. Outputs are poisoned before a launch, and guards checked after it. */
#include "support/kernel/kernel_sources.h"

#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

#define U 5.97e-8 /* 2^-24 */
#define N 3001

enum { ROWS = 75, COLS = 43 };

/* --- arrays and launches ----------------------------------------------------------------------------------------- */

typedef struct array {
    test_tensor *tensor;
    double *values; /* written values, rounded to the dtype */
} array;

static array make_array(tch_context *context, tch_dtype dtype, int64_t count)
{
    return (array){test_tensor_make(context, dtype, 1, &count, LAYOUT_CONTIGUOUS), NULL};
}

static array make_filled_array(tch_context *context, tch_dtype dtype, int64_t count, const double *values)
{
    array a = make_array(context, dtype, count);
    test_tensor_write(a.tensor, values);
    a.values = test_tensor_read(a.tensor);
    return a;
}

/* Normal numbers, or with a range integers below it; a negative range spreads normal numbers over 42 exponents. */
static array random_array(tch_context *context, tch_dtype dtype, int64_t count, int range, uint64_t stream)
{
    double *values = test_alloc((size_t)count * sizeof *values);
    test_random random = test_random_stream(7700 + stream);
    for (int64_t i = 0; i < count; i++) {
        values[i] = range > 0 ? (double)(test_random_bits(&random) % (uint64_t)range) : test_random_normal(&random);
        values[i] = range < 0 ? ldexp(values[i], (int)(test_random_bits(&random) % 42) - 26) : values[i];
    }
    return make_filled_array(context, dtype, count, values);
}

static void launch_trial(const kernel_trial *t, int64_t blocks, int64_t rows, int32_t count,
                         const tch_kernel_argument *arguments)
{
    const kernel_source *s = t->source;
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(blocks, s->threads);
    shape.grid[1] = rows, shape.block[1] = s->height > 0 ? s->height : 1;
    shape.shared_bytes = s->shared;
    CHECK_OK(tch_kernel_launch(t->kernel, &shape, count, arguments));
}

static void expect_element(int64_t i, double got, double wanted, double bound)
{
    CHECK(fabs(got - wanted) <= bound, "element %lld is %.9g, %.9g was expected, within %.3g", (long long)i, got,
          wanted, bound);
}

#define T(a) TCH_ARGUMENT_TENSOR(&(a).tensor->tensor)

/* Checks that all of y was written, and nothing else. */
static double *read_result(array y)
{
    test_tensor_check_written(y.tensor, "the output");
    return test_tensor_read(y.tensor);
}

/* --- kernels with parameters x, y and n -------------------------------------------------------------------------- */

/* (const X *x, Y *y, int n), and a reference per element of y. Accumulated outputs start at zero. */
static void check_map(kernel_trial *t)
{
    const kernel_source *s = t->source;
    int64_t inputs = s->inputs > 0 ? s->inputs : N, outputs = s->outputs > 0 ? s->outputs : inputs;
    int64_t blocks = s->blocks > 0 ? s->blocks : (inputs + s->threads - 1) / s->threads;
    array x = random_array(t->context, *s->from, inputs, s->range, t->number);
    array y = s->adds ? make_filled_array(t->context, *s->to, outputs, test_zeros(outputs))
                      : make_array(t->context, *s->to, outputs);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(s->n > 0 ? s->n : inputs)};
    launch_trial(t, blocks, 1, 3, arguments);
    double *got = s->adds ? test_tensor_read(y.tensor) : read_result(y);
    for (int64_t i = 0; i < outputs; i++) {
        double bound = 0.0, wanted = s->reference(x.values, i, &bound);
        expect_element(i, got[i], wanted, bound);
    }
}

/* expf is accurate to 2 ulp on every device. */
static double of_exp(const double *x, int64_t i, double *bound)
{
    *bound = 4 * U * exp(x[i]);
    return exp(x[i]);
}

/* The error of a sum of n terms in any order is at most n u times the sum of their absolute values. */
static double sum_of(const double *x, int64_t from, int64_t to, double *bound)
{
    double sum = 0.0, size = 0.0;
    for (int64_t k = from < 0 ? 0 : from; k < to && k < N; k++) {
        sum += x[k], size += fabs(x[k]);
    }
    *bound = (double)(to - from) * U * size;
    return sum;
}

static double of_stencil(const double *x, int64_t i, double *bound)
{
    return sum_of(x, i - 2, i + 3, bound);
}

static double of_block_sum(const double *x, int64_t i, double *bound)
{
    return sum_of(x, 256 * i, 256 * i + 256, bound);
}

static double of_sum(const double *x, int64_t i, double *bound)
{
    return sum_of(x, 0, N, bound);
}

static double of_largest(const double *x, int64_t i, double *bound)
{
    double largest = 0.0;
    for (int64_t k = 0; k < N; k++) {
        largest = fmax(largest, x[k]);
    }
    return largest;
}

static double of_count(const double *x, int64_t i, double *bound)
{
    double count = 0.0;
    for (int64_t k = 0; k < N; k++) {
        count += x[k] == (double)i;
    }
    return count;
}

/* Partial sums of integers: exact. */
static double of_prefix(const double *x, int64_t i, double *bound)
{
    double sum = sum_of(x, 0, i + 1, bound);
    *bound = 0.0;
    return sum;
}

/* Counts the odd numbers of each warp by a vote. */
static double of_votes(const double *x, int64_t warp, double *bound)
{
    double odd = 0.0;
    for (int64_t lane = 0; lane < 32; lane++) {
        odd += (int)x[warp * 32 + lane] % 2;
    }
    return odd;
}

/* Inclusive prefix sums of integers within segments of 8. */
static double of_segment(const double *x, int64_t i, double *bound)
{
    double sum = sum_of(x, i / 8 * 8, i + 1, bound);
    *bound = 0.0;
    return sum;
}

/* exp, sum and quotient: relative error of a few ulp and of COLS terms of one sign. The exponent itself is rounded: up
 * to 8 u for arguments below 8 in magnitude. */
static double of_softmax(const double *x, int64_t i, double *bound)
{
    const double *row = x + i / COLS * COLS;
    double largest = -HUGE_VAL, sum = 0.0;
    for (int64_t j = 0; j < COLS; j++) {
        largest = fmax(largest, row[j]);
    }
    for (int64_t j = 0; j < COLS; j++) {
        sum += exp(row[j] - largest);
    }
    *bound = (COLS + 24) * U * exp(x[i] - largest) / sum;
    return exp(x[i] - largest) / sum;
}

static double of_four_times(const double *x, int64_t i, double *bound)
{
    return 4.0 * x[i];
}

/* One rounding of a product that is exact in float32. */
static double of_half_square(const double *x, int64_t i, double *bound)
{
    *bound = 4.9e-4 * x[i] * x[i] + 3e-8;
    return x[i] * x[i];
}

static double of_brain_square(const double *x, int64_t i, double *bound)
{
    *bound = 3.95e-3 * x[i] * x[i] + 3e-8;
    return x[i] * x[i];
}

static double of_table(const double *x, int64_t i, double *bound)
{
    static const double table[] = {1, -2, 4, -8};
    return table[i % 4] * x[i];
}

/* --- kernels with other parameters ------------------------------------------------------------------------------- */

/* Two roundings, of a product and a sum, with grids that cover the elements and that do not. */
static void check_axpy(kernel_trial *t)
{
    static const int64_t grids[] = {3, 1, 40};
    for (int g = 0; g < (t->source->blocks > 0 ? 1 : 3); g++) {
        array x = random_array(t->context, TCH_FLOAT32, N, 0, 1), y = random_array(t->context, TCH_FLOAT32, N, 0, 2);
        tch_kernel_argument arguments[] = {TCH_ARGUMENT_REAL(1.5), T(x), T(y), TCH_ARGUMENT_INT(N)};
        launch_trial(t, t->source->blocks > 0 ? t->source->blocks : grids[g], 1, 4, arguments);
        double *got = test_tensor_read(y.tensor);
        for (int64_t i = 0; i < N; i++) {
            double product = 1.5 * x.values[i];
            expect_element(i, got[i], product + y.values[i], 2 * U * (fabs(product) + fabs(product + y.values[i])));
        }
    }
}

static void check_transpose(kernel_trial *t)
{
    array x = random_array(t->context, TCH_FLOAT32, (int64_t)ROWS * COLS, 0, 10),
          y = make_array(t->context, TCH_FLOAT32, (int64_t)ROWS * COLS);
    tch_kernel_argument arguments[] = {T(x), T(y), TCH_ARGUMENT_INT(ROWS), TCH_ARGUMENT_INT(COLS)};
    launch_trial(t, (COLS + 15) / 16, (ROWS + 15) / 16, 4, arguments);
    double *got = read_result(y);
    for (int64_t i = 0; i < ROWS; i++) {
        for (int64_t j = 0; j < COLS; j++) {
            expect_element(j * ROWS + i, got[j * ROWS + i], x.values[i * COLS + j], 0.0);
        }
    }
}

/* Numbers of all magnitudes of a half type, and some beyond, round as in the tests' own conversion; the way back is
 * exact. */
static void check_conversions(kernel_trial *t)
{
    array x = random_array(t->context, TCH_FLOAT32, N, -1, 20);
    array wanted = make_filled_array(t->context, TCH_FLOAT16, N, x.values);
    array narrow = make_array(t->context, TCH_FLOAT16, N), wide = make_array(t->context, TCH_FLOAT32, N);
    tch_kernel_argument arguments[] = {T(x), T(narrow), T(wide), TCH_ARGUMENT_INT(N)};
    launch_trial(t, (N + 255) / 256, 1, 4, arguments);
    double *got = read_result(narrow), *back = read_result(wide);
    for (int64_t i = 0; i < N; i++) {
        CHECK(got[i] == wanted.values[i] && back[i] == wanted.values[i], "%.9g became %.9g and %.9g, not %.9g",
              x.values[i], got[i], back[i], wanted.values[i]);
    }
}

/* Every point of a box writes its index once. */
static void check_box(kernel_trial *t)
{
    array y = make_array(t->context, TCH_INT32, 11 * 7 * 5);
    tch_kernel_argument arguments[] = {T(y), TCH_ARGUMENT_INT(11), TCH_ARGUMENT_INT(7), TCH_ARGUMENT_INT(5)};
    tch_kernel_shape shape = {sizeof shape, {3, 4, 3}, {4, 2, 2}, 0};
    CHECK_OK(tch_kernel_launch(t->kernel, &shape, 4, arguments));
    double *got = read_result(y);
    for (int64_t i = 0; i < 11 * 7 * 5; i++) {
        expect_element(i, got[i], (double)i, 0.0);
    }
}

/* --- the table --------------------------------------------------------------------------------------------------- */

#define MAP(X, Y, f) .check = check_map, .from = (X), .to = (Y), .reference = (f)
#define HERE "int i = blockIdx.x * blockDim.x + threadIdx.x;\n"

const kernel_source kernel_sources[] = {
    {"early return", "axpy",
     "extern \"C\" __global__ void axpy(float a, const float *__restrict__ x, float *__restrict__ y, int n)\n{\n" HERE
     "if (i >= n) return;\ny[i] = fmaf(a, __ldg(x + i), y[i]);\n}\n",
     .check = check_axpy, .threads = 256, .blocks = (N + 255) / 256},
    {"grid-stride loop", "axpy",
     "__global__ void axpy(float a, const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)\n"
     "y[i] = a * x[i] + y[i];\n}\n",
     .check = check_axpy, .threads = 256},
    {"lambda in a namespace", "space::apply",
     "namespace space {\ntemplate <typename F> __device__ float call(F f, float x) { return f(x); }\n"
     "__global__ void apply(const float *x, float *y, int n)\n{\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x)\n"
     "y[i] = call([](float v) { return expf(v); }, x[i]);\n}\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_exp), .threads = 128, .blocks = 5},
    {"stencil with halo", "stencil",
     "__global__ void stencil(const float *x, float *y, int n)\n{\n__shared__ float s[128 + 4];\n" HERE
     "int k = threadIdx.x + 2;\ns[k] = i < n ? x[i] : 0.0f;\n"
     "if (threadIdx.x < 2) {\ns[k - 2] = i >= 2 && i - 2 < n ? x[i - 2] : 0.0f;\n"
     "s[k + 128] = i + 128 < n ? x[i + 128] : 0.0f;\n}\n__syncthreads();\n"
     "if (i < n) y[i] = s[k - 2] + s[k - 1] + s[k] + s[k + 1] + s[k + 2];\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_stencil), .threads = 128},
    {"sum by dynamic shared memory", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\nextern __shared__ __align__(16) float s[];\n" HERE
     "s[threadIdx.x] = i < n ? x[i] : 0.0f;\n__syncthreads();\n"
     "for (int half = blockDim.x / 2; half > 0; half /= 2) {\n"
     "if (threadIdx.x < half) s[threadIdx.x] += s[threadIdx.x + half];\n__syncthreads();\n}\n"
     "if (threadIdx.x == 0) y[blockIdx.x] = s[0];\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_block_sum), .threads = 256, .outputs = 12, .shared = 256 * 4},
    {"sum by dynamic shared memory of the whole source", "total",
     "extern __shared__ unsigned char bytes[];\n"
     "__global__ void total(const float *x, float *y, int n)\n{\nfloat *s = reinterpret_cast<float *>(bytes);\n" HERE
     "s[threadIdx.x] = i < n ? x[i] : 0.0f;\n__syncthreads();\n"
     "if (threadIdx.x == 0) {\nfloat sum = 0.0f;\nfor (int k = 0; k < 256; k++) sum += s[k];\ny[blockIdx.x] = "
     "sum;\n}\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_block_sum), .threads = 256, .outputs = 12, .shared = 256 * 4},
    {"sum by shuffles", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\n__shared__ float sums[32];\n" HERE
     "float v = i < n ? x[i] : 0.0f;\n"
     "for (int d = 16; d > 0; d /= 2) v += __shfl_down_sync(0xffffffffu, v, d);\n"
     "if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;\n__syncthreads();\n"
     "if (threadIdx.x < 32) {\nv = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0f;\n"
     "for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);\n"
     "if (threadIdx.x == 0) y[blockIdx.x] = v;\n}\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_block_sum), .threads = 256, .outputs = 12},
    {"sum by atomics", "total",
     "__global__ void total(const float *x, float *y, int n)\n{\n" HERE "if (i < n) atomicAdd(y, x[i]);\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_sum), .threads = 256, .outputs = 1, .adds = 1},
    {"maximum by atomics", "largest",
     "__global__ void largest(const int *x, int *y, int n)\n{\n" HERE "if (i < n) atomicMax(y, x[i]);\n}\n",
     MAP(&TCH_INT32, &TCH_INT32, of_largest), .threads = 256, .range = 1000000, .outputs = 1, .adds = 1},
    {"histogram", "count",
     "__global__ void count(const int *x, int *y, int n)\n{\n__shared__ int bins[64];\n"
     "for (int k = threadIdx.x; k < 64; k += blockDim.x) bins[k] = 0;\n__syncthreads();\n"
     "for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += blockDim.x * gridDim.x) atomicAdd(&bins[x[i]], "
     "1);\n"
     "__syncthreads();\nfor (int k = threadIdx.x; k < 64; k += blockDim.x) atomicAdd(y + k, bins[k]);\n}\n",
     MAP(&TCH_INT32, &TCH_INT32, of_count), .threads = 96, .blocks = 7, .range = 64, .outputs = 64, .adds = 1},
    {"prefix sum", "scan",
     "__global__ void scan(const int *x, int *y, int n)\n{\n__shared__ int s[2][1024];\nint k = threadIdx.x, from = "
     "0;\n"
     "s[0][k] = k < n ? x[k] : 0;\n__syncthreads();\n"
     "for (int d = 1; d < 1024; d *= 2) {\ns[1 - from][k] = s[from][k] + (k >= d ? s[from][k - d] : 0);\nfrom = 1 - "
     "from;\n"
     "__syncthreads();\n}\nif (k < n) y[k] = s[from][k];\n}\n",
     MAP(&TCH_INT32, &TCH_INT32, of_prefix), .threads = 1024, .range = 100, .inputs = 1000},
    {"votes", "votes",
     "__global__ void votes(const int *x, int *y, int)\n{\n" HERE
     "unsigned odd = __ballot_sync(0xffffffffu, x[i] % 2 != 0);\nif (threadIdx.x % warpSize == 0) y[i / 32] = "
     "__popc(odd);\n}\n",
     MAP(&TCH_INT32, &TCH_INT32, of_votes), .threads = 160, .range = 1000, .inputs = 320, .outputs = 10},
    {"shuffles in segments", "sums",
     "__global__ void sums(const int *x, int *y, int)\n{\n" HERE "int v = x[i];\n"
     "for (int d = 1; d < 8; d *= 2) {\nint before = __shfl_up_sync(0xffffffffu, v, d, 8);\n"
     "if (threadIdx.x % 8 >= d) v += before;\n}\ny[i] = v;\n}\n",
     MAP(&TCH_INT32, &TCH_INT32, of_segment), .threads = 160, .range = 1000, .inputs = 320},
    {"transpose by tiles", "transpose<16>",
     "template <int side> __global__ void transpose(const float *x, float *y, int rows, int cols)\n{\n"
     "__shared__ float tile[side][side + 1];\n"
     "int j = blockIdx.x * side + threadIdx.x, i = blockIdx.y * side + threadIdx.y;\n"
     "if (i < rows && j < cols) tile[threadIdx.y][threadIdx.x] = x[i * cols + j];\n__syncthreads();\n"
     "i = blockIdx.y * side + threadIdx.x, j = blockIdx.x * side + threadIdx.y;\n"
     "if (i < rows && j < cols) y[j * rows + i] = tile[threadIdx.x][threadIdx.y];\n}\n",
     .check = check_transpose, .threads = 16, .height = 16},
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
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_softmax), .threads = 64, .blocks = ROWS, .inputs = ROWS * COLS, .n = COLS},
    {"template by name expression", "scale<double, 4>",
     "template <typename T, int factor> __global__ void scale(const T *x, T *y, int n)\n{\n" HERE
     "if (i < n) y[i] = T(factor) * x[i];\n}\n",
     MAP(&TCH_FLOAT64, &TCH_FLOAT64, of_four_times), .threads = 256},
    {"half", "square",
     "#include <cuda_fp16.h>\n__global__ void square(const __half *x, __half *y, int n)\n{\n" HERE
     "if (i < n) y[i] = __hmul(x[i], x[i]);\n}\n",
     MAP(&TCH_FLOAT16, &TCH_FLOAT16, of_half_square), .threads = 256},
    {"conversions of half", "convert",
     "#include <cuda_fp16.h>\n__global__ void convert(const float *x, __half *narrow, float *wide, int n)\n{\n" HERE
     "if (i < n) {\nnarrow[i] = __float2half(x[i]);\nwide[i] = __half2float(__float2half_rn(x[i]));\n}\n}\n",
     .check = check_conversions, .threads = 256},
    {"bfloat16", "square",
     "#include <cuda_bf16.h>\n__global__ void square(const __nv_bfloat16 *x, __nv_bfloat16 *y, int n)\n{\n" HERE
     "if (i < n) {\nfloat v = __bfloat162float(x[i]);\ny[i] = __float2bfloat16(v * v);\n}\n}\n",
     MAP(&TCH_BFLOAT16, &TCH_BFLOAT16, of_brain_square), .threads = 256},
    {"constant table", "weigh",
     "__constant__ float table[4] = {1, -2, 4, -8};\n__global__ void weigh(const float *x, float *y, int n)\n{\n" HERE
     "if (i < n) y[i] = table[i % 4] * x[i];\n}\n",
     MAP(&TCH_FLOAT32, &TCH_FLOAT32, of_table), .threads = 256},
    {"grid of three dimensions", "box",
     "__global__ void box(int *y, int a, int b, int c)\n{\nint i = blockIdx.x * blockDim.x + threadIdx.x;\n"
     "int j = blockIdx.y * blockDim.y + threadIdx.y, k = blockIdx.z * blockDim.z + threadIdx.z;\n"
     "if (i < a && j < b && k < c) y[(k * b + j) * a + i] = (k * b + j) * a + i;\n}\n",
     .check = check_box},
};
const int kernel_source_count = sizeof kernel_sources / sizeof *kernel_sources;

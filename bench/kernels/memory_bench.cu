/* Kernels whose limit is memory, alone on a GPU: kronecker, shift_scale, root_residual and largest_eigenvalue of
 * src/backends/cuda, each checked against a plain kernel and then timed beside its limit and the best that lost; the
 * rest is in bench/ladder. Not part of the build:
 *
 *     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/memory_bench.cu
 *
 * GB/s count what the operation has to move, which for the last two is every product's matrix, from wherever it comes.
 * A star marks what the library does. */
#include <type_traits>

#include "common.cuh"

#include "backends/cuda/device/matvec.cuh"
#include "backends/cuda/device/batch_walk.cuh"

/* The files under test use the same short names: each gets a namespace, and the constants that vary are set here. */
namespace kron
{
#include "backends/cuda/matrix/kronecker.cu"
const int library_threads = THREADS, library_rows = ROWS;
#undef THREADS
#undef ROWS
} // namespace kron
namespace elementwise
{
#include "backends/cuda/matrix/elementwise.cu"
} // namespace elementwise
namespace scale
{
#include "backends/cuda/matrix/shift_scale.cu"
const int library_blocks = BLOCKS;
#undef STEPS
#undef BLOCKS
} // namespace scale
namespace lanczos_file
{
#include "backends/cuda/spectral/lanczos.cu"
#undef THREADS
} // namespace lanczos_file
namespace residual
{
#include "backends/cuda/spectral/root_residual.cu"
#undef THREADS
#undef ROWS
#undef STEP
#undef PROBES
#undef AHEAD
#undef SIGNS_SEED
#undef EXACT_ELEMENTS
} // namespace residual
#define AHEAD 192
namespace residual_ahead_192
{
#include "backends/cuda/spectral/root_residual.cu"
} // namespace residual_ahead_192

/* --- what the rest of the module would offer --------------------------------------------------------------------- */

static int failures;
static cudaStream_t work; /* of everything that is timed */

tch_status tchi_cuda_random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    return elementwise::tchi_cuda_random_signs(state, seed, out);
}

/* Of the exact residual, which is not looked at here. */
tch_status tchi_cuda_gemm(void *, double, const tch_matrices *, int32_t, const tch_matrices *, int32_t, double,
                          const tch_matrices *)
{
    abort();
}

tch_status tchi_cuda_combine(void *, double, double, const tch_matrices *, double, const tch_matrices *,
                             const tch_matrices *)
{
    abort();
}

tch_status tchi_cuda_shift_scale(void *, const tch_matrices *, const double *, const double *, double,
                                 const tch_matrices *)
{
    abort();
}

tch_status tchi_cuda_reduce(void *, tch_reduction, const tch_matrices *, double *)
{
    abort();
}

/* --- time and data ----------------------------------------------------------------------------------------------- */

template <typename function> static double time_of(function call)
{
    return replayed_us(work, call);
}

static void report(const char *name, double bytes, double microseconds, bool library)
{
    printf("  %c %-44s %8.1f us %7.0f GB/s\n", library ? '*' : ' ', name, microseconds, bytes / microseconds / 1e3);
}

static void judge(bool right, const char *name)
{
    failures += !right;
    if (!right) {
        printf("WRONG: %s\n", name);
    }
}

/* Square matrices: `diagonal` / sqrt(i + 1) on the diagonal where it is not 0, 1 otherwise; noise / scale beside it. */
static __global__ void fill_kernel(tchi_cuda_operand m, int64_t rows, int64_t cols, double diagonal, double scale,
                                   uint64_t seed)
{
    int64_t b = blockIdx.y;
    for (int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
        for (int64_t j = threadIdx.x; j < cols; j += blockDim.x) {
            double beside = noise(seed + (uint64_t)((b * rows + i) * cols + j)) * scale;
            double value = i != j ? beside : diagonal != 0 ? diagonal / sqrt(i + 1.0) : 1 + beside;
            tchi_cuda_store<double>(m.type, tchi_cuda_at(m, b, i, j), 0, m.stride, value);
        }
    }
}

static tch_matrices matrices(tch_scalar type, int64_t rows, int64_t cols, int64_t batch)
{
    return make_poisoned(type, rows, cols, cols, batch, rows * cols, 0);
}

static tch_matrices filled(tch_scalar type, int64_t rows, int64_t cols, int64_t batch, double diagonal, double scale,
                           uint64_t seed)
{
    tch_matrices m = matrices(type, rows, cols, batch);
    fill_kernel<<<dim3(128, (unsigned)batch), 256>>>(tchi_cuda_operand_of(&m), rows, cols, diagonal, scale, seed);
    must(cudaGetLastError(), "fill_kernel");
    return m;
}

/* How many elements differ, as the host reads it. */
static int64_t read_count(const unsigned long long *differences)
{
    unsigned long long count = 0;
    must(cudaMemcpy(&count, differences, sizeof(count), cudaMemcpyDeviceToHost), "a check");
    return (int64_t)count;
}

static unsigned long long *new_count()
{
    static unsigned long long *count = device_array<unsigned long long>(1);
    must(cudaMemset(count, 0, sizeof(*count)), "cudaMemset");
    return count;
}

/* --- kronecker --------------------------------------------------------------------------------------------------- */

static __global__ void compare_kronecker(kron::kronecker_params params, unsigned long long *differences)
{
    for (int64_t i = blockIdx.x; i < params.rows; i += gridDim.x) {
        for (int64_t j = threadIdx.x; j < params.cols; j += blockDim.x) {
            double a =
                tchi_cuda_load<double>(params.a.type, tchi_cuda_at(params.a, 0, i / params.p, j / params.q), 0, 0);
            double b =
                tchi_cuda_load<double>(params.b.type, tchi_cuda_at(params.b, 0, i % params.p, j % params.q), 0, 0);
            double out = tchi_cuda_load<double>(params.out.type, tchi_cuda_at(params.out, 0, i, j), 0, 0);
            double wanted = params.out.type == TCH_SCALAR_F64 ? a * b : (double)((float)a * (float)b);
            if (params.out.type == TCH_SCALAR_BF16) {
                wanted = (double)__bfloat162float(__float2bfloat16_rn((float)wanted));
            }
            if (out != wanted) {
                atomicAdd(differences, 1ull);
            }
        }
    }
}

/* A block writes 32 KB of one row, four columns at a time: only for rows of 8192 and q = 128. */
static __global__ void __launch_bounds__(256) along_rows_kernel(kron::kronecker_params params)
{
    int64_t row = blockIdx.x;
    const float *a = (const float *)params.a.data + row / 128 * params.a.ld + threadIdx.x / 32;
    float4 b = *(const float4 *)((const float *)params.b.data + row % 128 * params.b.ld + threadIdx.x % 32 * 4);
    float *out = (float *)params.out.data + row * params.out.ld + threadIdx.x * 4;
    float from_a[8];
#pragma unroll
    for (int k = 0; k < 8; k++) {
        from_a[k] = a[8 * k];
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        __stcs((float4 *)(out + 1024 * k),
               make_float4(from_a[k] * b.x, from_a[k] * b.y, from_a[k] * b.z, from_a[k] * b.w));
    }
}

template <typename function>
static void try_kronecker(const char *name, const kron::kronecker_params &params, bool library, function call)
{
    double bytes = (double)(params.rows * params.cols * tchi_cuda_size(params.out.type));
    must(cudaMemset(params.out.data, 0xFF, (size_t)bytes), "cudaMemset");
    call();
    unsigned long long *differences = new_count();
    compare_kronecker<<<2048, 256>>>(params, differences);
    judge(read_count(differences) == 0, name);
    report(name, bytes, time_of(call), library);
}

template <typename T> static void try_library(const kron::kronecker_params &params)
{
    kron::kronecker_params streamed = params;
    streamed.stream = 1;
    try_kronecker("as it is", params, true,
                  [&] { kron::launch_vector<T, kron::library_rows>(streamed, kron::library_threads, work); });
}

static kron::kronecker_params new_kronecker(const tchi_cuda_state &state, tch_scalar type, int64_t m, int64_t p)
{
    tch_matrices a = filled(type, m, m, 1, 0, 1, 1);
    tch_matrices b = filled(type, p, p, 1, 0, 1, 2);
    tch_matrices out = matrices(type, m * p, m * p, 1);
    return kron::params_of(&state, &a, &b, &out);
}

static void release(const kron::kronecker_params &params)
{
    cudaFree(params.a.data);
    cudaFree(params.b.data);
    cudaFree(params.out.data);
}

static void bench_kronecker(const tchi_cuda_state &state)
{
    printf("kronecker, 64x64 (x) 128x128, float32\n");
    kron::kronecker_params params = new_kronecker(state, TCH_SCALAR_F32, 64, 128);
    double bytes = (double)(params.rows * params.cols * 4);
    report("cudaMemset", bytes, time_of([&] { cudaMemsetAsync(params.out.data, 0, (size_t)bytes, work); }), false);
    try_kronecker("blocks along rows", params, false, [&] { along_rows_kernel<<<8192, 256, 0, work>>>(params); });
    try_library<float>(params);
    release(params);
    printf("kronecker, 64x64 (x) 128x128, float64 and bfloat16\n");
    params = new_kronecker(state, TCH_SCALAR_F64, 64, 128);
    try_library<double>(params);
    release(params);
    params = new_kronecker(state, TCH_SCALAR_BF16, 64, 128);
    try_library<__nv_bfloat16>(params);
    release(params);
}

/* --- shift_scale ------------------------------------------------------------------------------------------------- */

/* The library's other kernel has the same expressions; here they stand alone, element by element. */
template <typename real>
static __global__ void compare_shift_scale(tchi_cuda_extent e, tchi_cuda_operand x, scale::shift_scale_factors f,
                                           tchi_cuda_operand out, unsigned long long *differences)
{
    int64_t b = blockIdx.y;
    double factor = pow(f.scale[b], f.exponent);
    for (int64_t i = blockIdx.x; i < e.rows; i += gridDim.x) {
        for (int64_t j = threadIdx.x; j < e.cols; j += blockDim.x) {
            real value = tchi_cuda_load<real>(x.type, tchi_cuda_at(x, b, i, j), 0, x.stride);
            double wanted = i == j ? ((double)value + f.shift[b]) * factor : (double)(value * (real)factor);
            double found = tchi_cuda_load<double>(out.type, tchi_cuda_at(out, b, i, j), 0, out.stride);
            double room = out.type == TCH_SCALAR_F64 ? 1e-15 : out.type == TCH_SCALAR_F32 ? 0x1p-23 : 0x1p-16;
            if (!(fabs(found - wanted) <= room * fabs(wanted))) {
                atomicAdd(differences, 1ull);
            }
        }
    }
}

static double element_bytes(tch_scalar type)
{
    return type == TCH_SCALAR_BF16X2 ? 4.0 : (double)tchi_cuda_size(type);
}

template <tch_scalar source, tch_scalar target>
static void bench_shift_scale(const tchi_cuda_state &state, const char *name, int64_t n, int64_t batch,
                              const scale::shift_scale_factors &f)
{
    constexpr bool in_double = source == TCH_SCALAR_F64 || target == TCH_SCALAR_F64;
    typedef typename std::conditional<in_double, double, float>::type real;
    tch_matrices x = filled(source, n, n, batch, 0, 1, 3), out = matrices(target, n, n, batch);
    tchi_cuda_extent e = tchi_cuda_extent_of(&out);
    tchi_cuda_operand from = tchi_cuda_operand_of(&x), to = tchi_cuda_operand_of(&out);
    size_t half = (size_t)(n * n * batch) * (size_t)(element_bytes(source) + element_bytes(target)) / 2;
    char *copy = device_array<char>(2 * (int64_t)half);
    auto attempt = [&](const char *way, bool library, auto call) {
        must(cudaMemset(out.data, 0xFF, (size_t)(n * n * batch * element_bytes(target))), "cudaMemset");
        call();
        unsigned long long *differences = new_count();
        compare_shift_scale<real><<<dim3(128, (unsigned)e.batch), 256>>>(e, from, f, to, differences);
        judge(read_count(differences) == 0, way);
        report(way, 2.0 * (double)half, time_of(call), library);
    };
    printf("shift_scale, %d x %d, %s\n", (int)batch, (int)n, name);
    report("a copy of as much", 2.0 * (double)half,
           time_of([&] { cudaMemcpyAsync(copy, copy + half, half, cudaMemcpyDeviceToDevice, work); }), false);
    attempt("types looked up", false, [&] {
        tchi_cuda_launch_shape shape = tchi_cuda_shape_for(e);
        scale::shift_scale_kernel<real><<<shape.grid, shape.block, 0, work>>>(e, from, f, to);
    });
    attempt("two rows a thread", false, [&] {
        scale::launch_known<source, target, 2>(work, e, from, f, to, scale::library_blocks * state.device.processors);
    });
    attempt("as it is", true, [&] { scale::launch_shift_scale(&state, e, from, f, to); });
    cudaFree(x.data);
    cudaFree(out.data);
    cudaFree(copy);
}

static void bench_shift_scales(const tchi_cuda_state &state)
{
    double host[64];
    for (int i = 0; i < 64; i++) {
        host[i] = 0.5 + 0.01 * i;
    }
    double *numbers = device_array<double>(64);
    cudaMemcpy(numbers, host, sizeof(host), cudaMemcpyHostToDevice);
    scale::shift_scale_factors f = {numbers, numbers, -0.25};
    const tch_scalar f64 = TCH_SCALAR_F64, f32 = TCH_SCALAR_F32, split = TCH_SCALAR_BF16X2;
    bench_shift_scale<split, f32>(state, "split to float32", 1024, 16, f);
    bench_shift_scale<f32, split>(state, "float32 to split", 1024, 16, f);
    bench_shift_scale<f64, split>(state, "float64 to split", 1024, 16, f);
    bench_shift_scale<f32, f64>(state, "float32 to float64", 1024, 16, f);
    bench_shift_scale<split, f32>(state, "split to float32", 256, 64, f);
    cudaFree(numbers);
}

/* --- root_residual ----------------------------------------------------------------------------------------------- */

/* out = M y + shift y for `probes` vectors of each matrix, (batch, probes, n), in double. */
static __global__ void plain_product(tchi_cuda_operand m, int64_t n, int probes, double shift, const double *y,
                                     double *out)
{
    int64_t b = blockIdx.z, probe = blockIdx.y;
    const double *from = y + (b * probes + probe) * n;
    for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        double sum = shift * from[i];
        for (int64_t j = 0; j < n; j++) {
            sum += tchi_cuda_load<double>(m.type, tchi_cuda_at(m, b, i, j), 0, m.stride) * from[j];
        }
        out[(b * probes + probe) * n + i] = sum;
    }
}

typedef struct certificate {
    tch_matrices a, x;
    double *shift, *out;
    void *scratch;
    int root;
} certificate;

static const int probes = 4;
static const double shift_of_all = 0.01;

static std::vector<double> plain_residuals(tchi_cuda_state *state, const certificate &c)
{
    int64_t n = c.a.rows, batch = c.a.batch, count = batch * probes * n;
    double *y = device_array<double>(count), *next = device_array<double>(count);
    std::vector<double> signs((size_t)(probes * n)), last((size_t)count), residuals;
    tch_matrices first = {y, TCH_SCALAR_F64, probes, n, n, 1, probes * n};
    tchi_cuda_random_signs(state, 0x726F6F74u, &first);
    cudaMemcpy(signs.data(), y, signs.size() * 8, cudaMemcpyDeviceToHost);
    for (int64_t b = 1; b < batch; b++) {
        cudaMemcpy(y + b * probes * n, y, signs.size() * 8, cudaMemcpyDeviceToDevice);
    }
    for (int step = 0; step <= c.root; step++) {
        bool with_a = step == c.root / 2;
        plain_product<<<dim3(8, probes, (unsigned)batch), 128>>>(tchi_cuda_operand_of(with_a ? &c.a : &c.x), n, probes,
                                                                 with_a ? shift_of_all : 0.0, y, next);
        std::swap(y, next);
    }
    must(cudaMemcpy(last.data(), y, last.size() * 8, cudaMemcpyDeviceToHost), "plain_product");
    for (int64_t b = 0; b < batch; b++) {
        double sum = 0;
        for (size_t i = 0; i < signs.size(); i++) {
            double off = last[(size_t)b * signs.size() + i] - signs[i];
            sum += off * off;
        }
        residuals.push_back(sqrt(sum / (double)signs.size()));
    }
    cudaFree(y);
    cudaFree(next);
    return residuals;
}

typedef tch_status (*residual_function)(void *, int32_t, const tch_matrices *, const double *, const tch_matrices *,
                                        int32_t, double *, double *, void *);

static void try_residual(const char *name, tchi_cuda_state state, const certificate &c,
                         const std::vector<double> &wanted, residual_function function, bool library)
{
    auto call = [&] { function(&state, c.root, &c.a, c.shift, &c.x, probes, c.out, NULL, c.scratch); };
    std::vector<double> found(wanted.size());
    call();
    must(cudaMemcpy(found.data(), c.out, found.size() * 8, cudaMemcpyDeviceToHost), name);
    bool right = true;
    for (size_t i = 0; i < found.size(); i++) {
        right = right && fabs(found[i] - wanted[i]) <= 1e-11 * wanted[i];
    }
    judge(right, name);
    double bytes =
        (double)(c.a.rows * c.a.rows * c.a.batch) * (element_bytes(c.a.type) + c.root * element_bytes(c.x.type));
    report(name, bytes, time_of(call), library);
}

static void bench_residual(const tchi_cuda_state &state, int64_t n, int64_t batch, tch_scalar type_a, tch_scalar type_x)
{
    certificate c = {};
    std::vector<double> shift((size_t)batch, shift_of_all);
    double scale = 0.2 / sqrt((double)n);
    c.root = 4;
    c.a = filled(type_a, n, n, batch, 0, scale, 5);
    c.x = filled(type_x, n, n, batch, 0, scale, 6);
    c.shift = device_array<double>(batch);
    c.out = device_array<double>(batch);
    c.scratch = device_array<char>(residual::tchi_cuda_root_residual_scratch(&state, type_a, n, batch, probes));
    cudaMemcpy(c.shift, shift.data(), shift.size() * 8, cudaMemcpyHostToDevice);
    printf("root_residual, %d x %d, A float%d, X float%d\n", (int)batch, (int)n, (int)element_bytes(type_a) * 8,
           (int)element_bytes(type_x) * 8);
    tchi_cuda_state here = state;
    std::vector<double> wanted = plain_residuals(&here, c);
    try_residual("as it is, 128 columns ahead", state, c, wanted, residual::tchi_cuda_root_residual, true);
    try_residual("192 columns ahead", state, c, wanted, residual_ahead_192::tchi_cuda_root_residual, false);
    cudaFree(c.a.data);
    cudaFree(c.x.data);
    cudaFree(c.shift);
    cudaFree(c.out);
    cudaFree(c.scratch);
}

/* --- largest_eigenvalue ------------------------------------------------------------------------------------------ */

/* Diagonal matrices, whose largest entry is 1: seven steps or so, as real ones take. */
static void try_lanczos(const char *name, tchi_cuda_state state, int64_t n, int64_t batch, bool library)
{
    tch_matrices x = filled(TCH_SCALAR_F32, n, n, batch, 1.0, 0, 7);
    double *out = device_array<double>(batch);
    void *scratch = device_array<char>(lanczos_file::tchi_cuda_largest_eigenvalue_scratch(&state, x.type, n, batch));
    auto call = [&] { lanczos_file::tchi_cuda_largest_eigenvalue(&state, &x, 1e-5, out, scratch); };
    std::vector<double> found((size_t)batch);
    call();
    must(cudaMemcpy(found.data(), out, found.size() * 8, cudaMemcpyDeviceToHost), name);
    for (double value : found) {
        judge(value <= 1 + 1e-6 && value >= 1 - 1e-4, name);
    }
    report(name, (double)(n * n * batch) * 4 * 7, time_of(call), library);
    cudaFree(x.data);
    cudaFree(out);
    cudaFree(scratch);
}

static void bench_lanczos(const tchi_cuda_state &state)
{
    printf("largest_eigenvalue, float32, GB/s as if of seven products\n");
    tchi_cuda_state fewer = state;
    fewer.device.processors /= 2;
    try_lanczos("16 x 1024", state, 1024, 16, true);
    try_lanczos("16 x 1024, half of the blocks", fewer, 1024, 16, false);
    try_lanczos("64 x 256", state, 256, 64, true);
    try_lanczos("64 x 256, half of the blocks", fewer, 256, 64, false);
    try_lanczos("4 x 2048", state, 2048, 4, true);
    try_lanczos("4 x 2048, half of the blocks", fewer, 2048, 4, false);
}

int main()
{
    tchi_cuda_state state = this_device();
    work = state.stream;
    bench_kronecker(state);
    bench_shift_scales(state);
    bench_residual(state, 1024, 16, TCH_SCALAR_F32, TCH_SCALAR_F32);
    bench_residual(state, 256, 64, TCH_SCALAR_F32, TCH_SCALAR_F32);
    bench_residual(state, 2048, 4, TCH_SCALAR_F32, TCH_SCALAR_F32);
    bench_residual(state, 1024, 16, TCH_SCALAR_F32, TCH_SCALAR_F64);
    bench_residual(state, 1001, 3, TCH_SCALAR_F64, TCH_SCALAR_F32);
    bench_lanczos(state);
    printf(failures == 0 ? "all right\n" : "%d WRONG\n", failures);
    return failures != 0;
}

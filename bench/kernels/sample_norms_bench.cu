/* A laboratory for what per-sample gradients cost on CUDA: squared norms in both forms, sums of squares, outer
 * products and the factors of curvature. Every kernel is checked against plain float64 on fresh random inputs, sizes
 * around the edges of tiles and outputs that held NaN; then it is timed, one line for each: name, median of 20 in ms,
 * TFLOP/s of the form's own operations or TB/s, and the error of that very run. From the root of the repository:
 *   cd src/backends/cuda && nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -I../../../include -I../.. \
 *       ../../../bench/kernels/sample_norms_bench.cu sample/norms/*.cu sample/samples.cu sample/sample_dots.cu \
 *       product/factor_gram/*.c matrix/narrow.cu product/outer.cu product/products.c \
 *       product/symmetric/symmetric_any.cu product/symmetric/symmetric_pingpong.cu device/tensor_map.c \
 *       runtime/errors.c runtime/faults.c runtime/libraries/libraries.c
 * cuBLAS is looked for as the module does; without it its lines are left out. With the argument `norms` it looks at
 * norms of float32 only. Exits with 1 if a check fails. */
#define BENCH_LINKS_ERRORS
#include "common.cuh"

#include "backends/cuda/product/factor_gram/factor_gram.h"
#include "backends/cuda/product/outer.h"
#include "backends/cuda/sample/norms/sample_norms.h"

/* --- what the kernels need of the module ------------------------------------------------------------------------- */

extern "C" {
int64_t tchi_cuda_workspace_bytes(const tchi_cuda_state *)
{
    return (int64_t)32 << 20;
}
int32_t tchi_cuda_entered(void)
{
    return -1;
}
/* Fallbacks that nothing here comes to. */
tch_status tchi_cuda_combine(void *, double, double, const tch_matrices *, double, const tch_matrices *,
                             const tch_matrices *)
{
    return TCH_ERR_INTERNAL;
}
tch_status tchi_cuda_shift_scale(void *, const tch_matrices *, const double *, const double *, double,
                                 const tch_matrices *)
{
    return TCH_ERR_INTERNAL;
}
tch_status tchi_cuda_gram(void *, double, const tch_matrices *, int32_t, double, const tch_matrices *)
{
    return TCH_ERR_INTERNAL;
}
}

static tchi_cuda_state state;
static int failed;

/* --- matrices ---------------------------------------------------------------------------------------------------- */

static __device__ uint32_t mixed(uint64_t x)
{
    return (uint32_t)((uint64_t)((noise(x) + 1.0) * 0x1p31));
}

static int64_t elements_of(const tch_matrices *m)
{
    return m->batch * m->stride;
}

/* NaN in every element. */
static void poison(const tch_matrices *m)
{
    must(cudaMemset(m->data, 0xFF, (size_t)(elements_of(m) * tchi_cuda_size(m->type))), "cudaMemset");
}

/* `shift` elements behind an aligned place, rows `pad` longer than they are. */
static tch_matrices make(tch_scalar type, int64_t batch, int64_t rows, int64_t cols, int64_t pad, int64_t shift)
{
    return make_poisoned(type, rows, cols, cols + pad, batch, rows * (cols + pad) + pad, shift);
}

static tch_matrices make_random(tch_scalar type, int64_t batch, int64_t rows, int64_t cols, int64_t pad, int64_t shift)
{
    static uint64_t seed = 1;
    tch_matrices m = make(type, batch, rows, cols, pad, shift);
    fill_noise(&m, seed++, 0);
    return m;
}

static __global__ void widen(tch_matrices from, tch_matrices to, int64_t count)
{
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        ((double *)to.data)[e] = tchi_cuda_load<double>(from.type, from.data, e, 0);
    }
}

static tch_matrices widened(const tch_matrices *m)
{
    tch_matrices wide = *m;
    wide.type = TCH_SCALAR_F64;
    must(cudaMalloc(&wide.data, (size_t)elements_of(m) * 8 + 16), "cudaMalloc");
    widen<<<1024, 256>>>(*m, wide, elements_of(m));
    return wide;
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

enum norms_variant {
    PLAIN_TILES,
    PLAIN_GRAM,
    SPLIT_GRAM,
    NORMS_EXACT,
    EXACT_BIAS,
    MMA_TILES,
    MMA_GRAM,
    WGMMA_TILES,
    NARROW_TILES,
    WGMMA_GRAM,
    NORMS_CHOSEN,
    CHOSEN_BIAS,
    NORMS_VARIANTS
};
static const char *const norms_names[] = {"plain tiles",   "plain Gram", "split Gram", "chosen, exact",
                                          "exact, bias",   "mma tiles",  "mma Gram",   "wgmma tiles",
                                          "copies, wgmma", "wgmma Gram", "chosen",     "chosen, bias"};

/* The layer's function: it chooses a kernel, and with a bias adds its part. */
static bool is_chosen(int v)
{
    return v == NORMS_EXACT || v == EXACT_BIAS || v == NORMS_CHOSEN || v == CHOSEN_BIAS;
}

static bool has_bias(int v)
{
    return v == EXACT_BIAS || v == CHOSEN_BIAS;
}

static bool norms_takes(int v, const tch_matrices *a, const tch_matrices *g, int64_t groups)
{
    bool mma = v == MMA_TILES || v == MMA_GRAM;
    if (v == NARROW_TILES) {
        return state.device.major == 9 && a->type != TCH_SCALAR_F64 &&
               !tchi_cuda_sample_norms_wgmma_takes(&state, a, g) &&
               tchi_cuda_sample_norms_narrow_takes(&state, a, g, groups);
    }
    if (v == NORMS_EXACT || v == EXACT_BIAS) {
        return a->type == TCH_SCALAR_F32;
    }
    if (v == SPLIT_GRAM) {
        return tchi_cuda_sample_norms_split_takes(&state, a, g);
    }
    if (v == WGMMA_GRAM) {
        return tchi_cuda_sample_norms_wgmma_gram_takes(&state, a, g);
    }
    return v == WGMMA_TILES ? tchi_cuda_sample_norms_wgmma_takes(&state, a, g) : !mma || a->type != TCH_SCALAR_F64;
}

static int64_t scratch_bytes(const tch_matrices *a, const tch_matrices *g)
{
    return std::max(tchi_cuda_sample_norms_scratch(a->rows, a->cols, g->cols, a->batch),
                    std::max(tchi_cuda_sample_sums_scratch(g->rows, g->cols, g->batch),
                             tchi_cuda_pair_dots_scratch(1, g->cols, g->batch)));
}

/* Room for the sums of the rows of G, behind the scratch. */
static tch_matrices sums_of(const tch_matrices *a, const tch_matrices *g, double *parts)
{
    tch_scalar type = g->type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    void *behind = (char *)parts + (scratch_bytes(a, g) + 255) / 256 * 256;
    return {behind, type, 1, g->cols, g->cols, g->batch, g->cols};
}

static void norms_run(int v, const tch_matrices *a, const tch_matrices *g, int64_t groups, double *norms, double *parts)
{
    int64_t tiles = 0;
    if (is_chosen(v)) {
        tch_matrices sums = sums_of(a, g, parts);
        must(tchi_cuda_sample_norms(&state, a, g, groups, 1.0, v >= NORMS_CHOSEN, has_bias(v) ? &sums : NULL, norms,
                                    parts),
             "sample_norms");
        return;
    }
    if (v == NARROW_TILES) {
        must(tchi_cuda_sample_norms_narrow(&state, a, g, groups, 1.0, norms, parts), "sample_norms_narrow");
        return;
    }
    must(v == PLAIN_TILES  ? tchi_cuda_sample_norms_plain(&state, a, g, false, false, parts, NULL, &tiles)
         : v == PLAIN_GRAM ? tchi_cuda_sample_norms_plain(&state, a, g, true, false, parts, NULL, &tiles)
         : v == MMA_TILES  ? tchi_cuda_sample_norms_mma(&state, a, g, TCHI_NORMS_TILES, false, parts, NULL, &tiles)
         : v == MMA_GRAM   ? tchi_cuda_sample_norms_mma(&state, a, g, TCHI_NORMS_GRAM, false, parts, NULL, &tiles)
         : v == SPLIT_GRAM ? tchi_cuda_sample_norms_split(&state, a, g, false, parts, NULL, &tiles)
         : v == WGMMA_GRAM ? tchi_cuda_sample_norms_wgmma_gram(&state, a, g, false, parts, NULL, &tiles)
                           : tchi_cuda_sample_norms_wgmma(&state, a, g, parts, &tiles),
         norms_names[v]);
    tchi_norms_parts sums = {parts, tiles, groups, NULL, NULL};
    must(tchi_cuda_sample_norms_add(&state, a->batch / groups, &sums, 1.0, norms), "sample_norms_add");
}

/* The largest relative error of a sample's norm. */
static double norms_error(int v, const tch_matrices *a, const tch_matrices *g, int64_t groups, double *parts,
                          const std::vector<double> &expected)
{
    int64_t samples = a->batch / groups;
    std::vector<double> got((size_t)samples, 0.0);
    double *norms;
    must(cudaMalloc((void **)&norms, (size_t)samples * 8), "cudaMalloc");
    must(cudaMemset(norms, 0, (size_t)samples * 8), "cudaMemset");
    must(cudaMemset(parts, 0xFF, (size_t)scratch_bytes(a, g)), "parts");
    norms_run(v, a, g, groups, norms, parts);
    must(cudaMemcpy(got.data(), norms, (size_t)samples * 8, cudaMemcpyDeviceToHost), norms_names[v]);
    double worst = 0.0;
    for (int64_t i = 0; i < samples; i++) {
        double error = fabs(got[(size_t)i] - expected[(size_t)i]) / (expected[(size_t)i] + 1e-300);
        worst = error <= worst ? worst : error;
    }
    must(cudaFree(norms), "cudaFree");
    return worst;
}

/* The bias's part is added by itself, from sums in float64. */
static std::vector<double> norms_expected(const tch_matrices *a, const tch_matrices *g, int64_t groups, double *parts,
                                          bool bias = false)
{
    tch_matrices wide_a = widened(a), wide_g = widened(g);
    std::vector<double> expected((size_t)(a->batch / groups));
    double *norms;
    bool gram = a->rows < 2 * a->cols * g->cols / (a->cols + g->cols);
    must(cudaMalloc((void **)&norms, expected.size() * 8), "cudaMalloc");
    must(cudaMemset(norms, 0, expected.size() * 8), "cudaMemset");
    norms_run(gram ? PLAIN_GRAM : PLAIN_TILES, &wide_a, &wide_g, groups, norms, parts);
    if (bias) {
        tch_matrices sums = sums_of(a, &wide_g, parts);
        tch_matrices rows = {sums.data, sums.type, sums.batch, sums.cols, sums.cols, 1, 0};
        must(tchi_cuda_sample_sums(&state, &wide_g, 1.0, 0.0, &rows, parts), "sample_sums");
        must(tchi_cuda_pair_dots(&state, &sums, &sums, groups, 1.0, norms, parts), "pair_dots");
    }
    must(cudaMemcpy(expected.data(), norms, expected.size() * 8, cudaMemcpyDeviceToHost), "reference");
    must(cudaFree(norms), "cudaFree");
    drop(&wide_a, 0);
    drop(&wide_g, 0);
    return expected;
}

/* Four operands of TF32 are wrong by 2^-11 at most; sums in float32, cut off at every step by tensor cores, by 2^-23
 * for every step, four times over. */
static double norms_allowed(int v, tch_scalar type, const tch_matrices *a, const tch_matrices *g)
{
    if (type == TCH_SCALAR_F64) {
        return 1e-12;
    }
    bool rounded = type == TCH_SCALAR_F32 && v >= MMA_TILES;
    double steps = (double)std::max(std::max(a->cols, g->cols), a->rows) / 8.0 + 16.0;
    return (rounded ? 4.0 * 0x1p-11 : 0.0) + 4.0 * steps * 0x1p-23;
}

static double *parts_for(const tch_matrices *a, const tch_matrices *g)
{
    double *parts;
    must(cudaMalloc((void **)&parts, (size_t)(scratch_bytes(a, g) + g->batch * g->cols * 8 + 256)), "cudaMalloc");
    return parts;
}

static double norms_flop(int v, const tch_matrices *a, const tch_matrices *g)
{
    double t = (double)a->rows, d = (double)a->cols, p = (double)g->cols, b = (double)a->batch;
    double gram = t * t * (p + d), tiles = 2.0 * t * p * d;
    bool of_gram = v == PLAIN_GRAM || v == SPLIT_GRAM || v == MMA_GRAM || v == WGMMA_GRAM;
    return b * (of_gram ? gram : is_chosen(v) ? std::min(gram, tiles) : tiles);
}

/* Of half types the plain kernels are not timed. */
static void norms_case(tch_scalar type, int64_t samples, int64_t groups, int64_t t, int64_t d, int64_t p, int64_t pad,
                       int64_t shift, bool timed)
{
    tch_matrices a = make_random(type, samples * groups, t, d, pad, shift);
    tch_matrices g = make_random(type, samples * groups, t, p, pad, shift);
    double *parts = parts_for(&a, &g);
    std::vector<double> alone = norms_expected(&a, &g, groups, parts);
    std::vector<double> with_bias = norms_expected(&a, &g, groups, parts, true);
    for (int v = 0; v < NORMS_VARIANTS; v++) {
        const std::vector<double> &expected = has_bias(v) ? with_bias : alone;
        if (!norms_takes(v, &a, &g, groups) || (timed && v <= PLAIN_GRAM && type != TCH_SCALAR_F32)) {
            continue;
        }
        double error = norms_error(v, &a, &g, groups, parts, expected);
        double again = norms_error(v, &a, &g, groups, parts, expected);
        double allowed = norms_allowed(v, type, &a, &g);
        if (!(error <= allowed) || again != error) {
            failed++;
            printf("FAIL ");
        }
        if (timed) {
            double *norms;
            must(cudaMalloc((void **)&norms, (size_t)samples * 8), "cudaMalloc");
            double ms = median_ms(state.stream, [&] { norms_run(v, &a, &g, groups, norms, parts); });
            must(cudaFree(norms), "cudaFree");
            printf("norms %s B %lld T %lld %lld -> %lld: %-14s %.4f ms %6.1f TFLOP/s error %.1e\n", type_name(type),
                   (long long)samples, (long long)t, (long long)d, (long long)p, norms_names[v], ms,
                   norms_flop(v, &a, &g) / ms * 1e-9, error);
        } else if (!(error <= allowed) || again != error) {
            printf("norms %s B %lld groups %lld T %lld d %lld p %lld pad %lld shift %lld: %s error %.2e, again %.2e\n",
                   type_name(type), (long long)samples, (long long)groups, (long long)t, (long long)d, (long long)p,
                   (long long)pad, (long long)shift, norms_names[v], error, again);
        }
        fflush(stdout);
    }
    drop(&a, shift);
    drop(&g, shift);
    must(cudaFree(parts), "cudaFree");
}

static void check_norms(bool only_float32)
{
    const tch_scalar types[] = {TCH_SCALAR_F64, TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_BF16};
    const int64_t sizes[][7] = {{3, 1, 5, 7, 3, 0, 0},       {2, 1, 64, 256, 128, 0, 0},  {2, 2, 130, 137, 69, 3, 1},
                                {3, 1, 257, 200, 264, 8, 0}, {2, 1, 1000, 72, 520, 0, 0}, {1, 1, 33, 131, 1, 0, 0},
                                {70, 2, 96, 8, 8, 0, 0},     {2, 1, 127, 255, 129, 1, 0}, {5, 3, 2, 64, 64, 0, 0},
                                {2, 1, 128, 128, 128, 0, 0}, {3, 1, 1, 1000, 37, 0, 1},   {2, 1, 2049, 40, 24, 0, 0},
                                {9, 1, 320, 768, 512, 0, 0}, {2, 1, 63, 1024, 2048, 0, 0}};
    for (tch_scalar type : types) {
        if (only_float32 && type != TCH_SCALAR_F32) {
            continue;
        }
        for (const auto &s : sizes) {
            norms_case(type, s[0], s[1], s[2], s[3], s[4], s[5], s[6], false);
        }
    }
}

/* Elements far from 1, of both signs of the exponent. */
static __global__ void multiply(tch_matrices m, int64_t count, float factor)
{
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        ((float *)m.data)[e] *= factor;
    }
}

static void check_scaling()
{
    for (float factor : {1e-12f, 1e12f}) {
        tch_matrices a = make_random(TCH_SCALAR_F32, 3, 300, 200, 0, 0),
                     g = make_random(TCH_SCALAR_F32, 3, 300, 130, 0, 0);
        multiply<<<256, 256>>>(a, elements_of(&a), factor);
        multiply<<<256, 256>>>(g, elements_of(&g), 1e-3f / factor);
        double *parts = parts_for(&a, &g);
        std::vector<double> expected = norms_expected(&a, &g, 1, parts);
        for (int v : {NARROW_TILES, SPLIT_GRAM}) {
            if (!norms_takes(v, &a, &g, 1)) {
                continue;
            }
            double error = norms_error(v, &a, &g, 1, parts, expected);
            if (!(error <= norms_allowed(v, TCH_SCALAR_F32, &a, &g))) {
                failed++;
                printf("FAIL scaling by %g: %s error %.2e\n", factor, norms_names[v], error);
            }
        }
        drop(&a, 0);
        drop(&g, 0);
        must(cudaFree(parts), "cudaFree");
    }
}

/* Rows whose numbers grow by `growth` from column to column, after `zeros` columns of nothing. */
static __global__ void stretch(tch_matrices m, int64_t count, float growth, int64_t zeros)
{
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t col = e % m.stride % m.ld;
        ((float *)m.data)[e] *= col < zeros ? 0.0f : powf(growth, (float)col);
    }
}

static void check_rows_that_grow()
{
    const float growths[] = {1.0f, 1.03f, 1.08f, 0.97f};
    for (float growth : growths) {
        for (int64_t zeros : {0, 70}) {
            tch_matrices a = make_random(TCH_SCALAR_F32, 5, 300, 200, 0, 0),
                         g = make_random(TCH_SCALAR_F32, 5, 300, 232, 0, 0);
            stretch<<<256, 256>>>(a, elements_of(&a), growth, zeros);
            stretch<<<256, 256>>>(g, elements_of(&g), growth, zeros / 2);
            double *parts = parts_for(&a, &g);
            std::vector<double> expected = norms_expected(&a, &g, 1, parts);
            double error = norms_takes(SPLIT_GRAM, &a, &g, 1) ? norms_error(SPLIT_GRAM, &a, &g, 1, parts, expected) : 0;
            if (!(error <= norms_allowed(SPLIT_GRAM, TCH_SCALAR_F32, &a, &g))) {
                failed++;
                printf("FAIL rows growing by %g after %lld zeros: error %.2e\n", growth, (long long)zeros, error);
            }
            drop(&a, 0);
            drop(&g, 0);
            must(cudaFree(parts), "cudaFree");
        }
    }
}

/* The layer of the table, then others, of which the last's rows are not aligned. */
static void time_float32()
{
    const int64_t sizes[][4] = {{32, 256, 768, 3072},  {8, 1024, 768, 3072}, {64, 128, 1024, 1024},
                                {1, 2048, 1024, 4096}, {7, 333, 772, 1004},  {7, 333, 771, 1003}};
    for (const auto &s : sizes) {
        norms_case(TCH_SCALAR_F32, s[0], 1, s[1], s[2], s[3], 0, 0, true);
    }
}

static void time_norms()
{
    norms_case(TCH_SCALAR_F32, 32, 1, 256, 768, 3072, 0, 0, true);
    const int64_t layers[][2] = {{768, 2304}, {768, 768}, {768, 3072}, {3072, 768}};
    for (tch_scalar type : {TCH_SCALAR_BF16, TCH_SCALAR_F32}) {
        for (const auto &layer : layers) {
            norms_case(type, 8, 1, 1024, layer[0], layer[1], 0, 0, true);
        }
    }
    norms_case(TCH_SCALAR_BF16, 8, 1, 1024, 768, 50257, 0, 0, true);
    norms_case(TCH_SCALAR_BF16, 8, 1, 1024, 768, 50304, 0, 0, true);
}

/* --- sums of squares --------------------------------------------------------------------------------------------- */

/* Largest |difference| and largest |expected|, over all elements. */
static __global__ void compare(tch_matrices got, tch_matrices expected, int64_t count, unsigned long long *worst)
{
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t b = e / (got.rows * got.cols), i = e / got.cols % got.rows, j = e % got.cols;
        double x = tchi_cuda_load<double>(got.type, got.data, b * got.stride + i * got.ld + j, 0);
        double y = tchi_cuda_load<double>(expected.type, expected.data, b * expected.stride + i * expected.ld + j, 0);
        double error = fabs(x - y);
        error = error == error ? error : INFINITY;
        atomicMax(worst, (unsigned long long)__double_as_longlong(error));
        atomicMax(worst + 1, (unsigned long long)__double_as_longlong(fabs(y)));
    }
}

static double relative_error(const tch_matrices *got, const tch_matrices *expected)
{
    unsigned long long *worst;
    double values[2];
    must(cudaMalloc((void **)&worst, 16), "cudaMalloc");
    must(cudaMemset(worst, 0, 16), "cudaMemset");
    compare<<<1024, 256>>>(*got, *expected, got->batch * got->rows * got->cols, worst);
    must(cudaMemcpy(values, worst, 16, cudaMemcpyDeviceToHost), "compare");
    must(cudaFree(worst), "cudaFree");
    return values[0] / (values[1] + 1e-300);
}

static void squares_case(tch_scalar type, int64_t samples, int64_t groups, int64_t t, int64_t d, int64_t p, int64_t pad,
                         int64_t shift, bool timed)
{
    tch_matrices a = make_random(type, samples * groups, t, d, pad, shift);
    tch_matrices g = make_random(type, samples * groups, t, p, pad, shift);
    tch_matrices wide_a = widened(&a), wide_g = widened(&g);
    tch_matrices expected = make(TCH_SCALAR_F64, groups, p, d, 0, 0);
    tch_matrices out = make(TCH_SCALAR_F32, groups, p, d, pad, shift);
    must(tchi_cuda_sample_squares_plain(&state, &wide_a, &wide_g, 0.5, 0.0, &expected), "squares");
    for (int mma = 0; mma < 2; mma++) {
        auto run = [&] {
            must(mma ? tchi_cuda_sample_squares_mma(&state, &a, &g, 0.5, 0.0, &out)
                     : tchi_cuda_sample_squares_plain(&state, &a, &g, 0.5, 0.0, &out),
                 "squares");
        };
        poison(&out);
        run();
        double error = relative_error(&out, &expected);
        double allowed =
            (mma && type == TCH_SCALAR_F32 ? 4.0 * 0x1p-11 : 0.0) + 4.0 * ((double)t / 8.0 + 32.0) * 0x1p-23;
        if (!(error <= allowed)) {
            failed++;
            printf("FAIL squares %s T %lld d %lld p %lld mma %d: error %.2e\n", type_name(type), (long long)t,
                   (long long)d, (long long)p, mma, error);
        }
        if (timed) {
            double ms = median_ms(state.stream, run);
            printf("squares %s B %lld T %lld %lld -> %lld: %s %.4f ms %.1f TFLOP/s error %.1e\n", type_name(type),
                   (long long)samples, (long long)t, (long long)d, (long long)p, mma ? "mma" : "plain", ms,
                   2.0 * (double)(samples * t * d * p) / ms * 1e-9, error);
        }
        fflush(stdout);
    }
    drop(&a, shift);
    drop(&g, shift);
    drop(&wide_a, 0);
    drop(&wide_g, 0);
    drop(&expected, 0);
    drop(&out, shift);
}

static void check_squares()
{
    for (tch_scalar type : {TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_BF16}) {
        squares_case(type, 3, 1, 70, 136, 130, 0, 0, false);
        squares_case(type, 2, 2, 37, 131, 65, 1, 1, false);
        squares_case(type, 9, 1, 1, 300, 64, 0, 0, false);
    }
}

/* --- outer products ---------------------------------------------------------------------------------------------- */

static __global__ void outer_plain(tch_matrices x, tch_matrices y, tch_matrices c, double alpha)
{
    int64_t count = c.batch * c.rows * c.cols;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t b = e / (c.rows * c.cols), i = e / c.cols % c.rows, j = e % c.cols;
        double left = tchi_cuda_load<double>(x.type, x.data, b * x.stride + i, 0);
        double right = tchi_cuda_load<double>(y.type, y.data, b * y.stride + j, 0);
        ((double *)c.data)[b * c.stride + i * c.ld + j] = alpha * left * right;
    }
}

static void outer_case(tch_scalar type, tch_scalar out, int64_t batch, int64_t m, int64_t n, int64_t pad, int64_t shift,
                       bool timed)
{
    tch_matrices x = make_random(type, batch, 1, m, pad, shift), y = make_random(type, batch, 1, n, pad, shift);
    tch_matrices c = make(out, batch, m, n, pad, shift);
    auto run = [&] { must(tchi_cuda_outer(&state, 1.25, &x, 1, &y, 0, &c), "outer"); };
    run();
    double error = 0.0;
    if (!timed) {
        tch_matrices expected = make(TCH_SCALAR_F64, batch, m, n, 0, 0);
        outer_plain<<<1024, 256>>>(x, y, expected, 1.25);
        error = relative_error(&c, &expected);
        drop(&expected, 0);
    }
    double unit = out == TCH_SCALAR_F64   ? 0x1p-52
                  : out == TCH_SCALAR_F32 ? 0x1p-23
                  : out == TCH_SCALAR_F16 ? 0x1p-10
                                          : 0x1p-7;
    if (!(error <= 2.0 * unit)) {
        failed++;
        printf("FAIL outer %s to %s %lld x %lld x %lld: error %.2e\n", type_name(type), type_name(out),
               (long long)batch, (long long)m, (long long)n, error);
    }
    if (timed) {
        double bytes = (double)(batch * m * n) * (double)tchi_cuda_size(out);
        double ms = median_ms(state.stream, run);
        double plain = median_ms(state.stream,
                                 [&] { must(cudaMemsetAsync(c.data, 0, (size_t)bytes, state.stream), "cudaMemset"); });
        printf("outer %s %lld x %lld x %lld: %.4f ms %.2f TB/s; cudaMemset of as much: %.4f ms %.2f TB/s\n",
               type_name(type), (long long)batch, (long long)m, (long long)n, ms, bytes / ms * 1e-9, plain,
               bytes / plain * 1e-9);
    }
    drop(&x, shift);
    drop(&y, shift);
    drop(&c, shift);
}

static void check_outer()
{
    const tch_scalar types[][2] = {{TCH_SCALAR_F64, TCH_SCALAR_F64},   {TCH_SCALAR_F32, TCH_SCALAR_F32},
                                   {TCH_SCALAR_BF16, TCH_SCALAR_F32},  {TCH_SCALAR_F16, TCH_SCALAR_F16},
                                   {TCH_SCALAR_BF16, TCH_SCALAR_BF16}, {TCH_SCALAR_F16, TCH_SCALAR_F32}};
    for (const auto &type : types) {
        outer_case(type[0], type[1], 3, 5, 7, 0, 0, false);
        outer_case(type[0], type[1], 2, 300, 1028, 0, 0, false);
        outer_case(type[0], type[1], 70000, 3, 2, 0, 0, false);
        outer_case(type[0], type[1], 2, 67, 129, 3, 1, false);
        outer_case(type[0], type[1], 1, 1, 1, 0, 0, false);
    }
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

/* Elements of C = alpha A'A (or A A') + beta before, `probes` of them at random or, where that is 0, all; worst[0] the
 * largest error over sqrt(C_ii C_jj), worst[1] the number of elements that are not symmetric to the bit. */
static __global__ void factor_check(tch_matrices a, int transpose, tch_matrices c, const float *before, double alpha,
                                    double beta, int64_t probes, unsigned long long *worst)
{
    int64_t n = c.rows, k = transpose ? a.rows : a.cols, count = probes > 0 ? probes : n * n;
    for (int64_t e = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; e < count; e += (int64_t)gridDim.x * blockDim.x) {
        int64_t i = probes > 0 ? mixed(2 * (uint64_t)e + 77) % n : e / n;
        int64_t j = probes > 0 ? mixed(2 * (uint64_t)e + 78) % n : e % n;
        if (j > i) {
            int64_t low = i;
            i = j, j = low;
        }
        double sum = 0.0, left = 0.0, right = 0.0;
        for (int64_t r = 0; r < k; r++) {
            double x = tchi_cuda_load<double>(a.type, a.data, transpose ? r * a.ld + i : i * a.ld + r, 0);
            double y = tchi_cuda_load<double>(a.type, a.data, transpose ? r * a.ld + j : j * a.ld + r, 0);
            sum += x * y, left += x * x, right += y * y;
        }
        const float *out = (const float *)c.data;
        double value = alpha * sum + (beta == 0.0 ? 0.0 : beta * before[i * c.ld + j]);
        double error = fabs(out[i * c.ld + j] - value) / (alpha * sqrt(left * right) + fabs(beta) + 1e-300);
        error = error == error ? error : INFINITY;
        atomicMax(worst, (unsigned long long)__double_as_longlong(error));
        if (__float_as_uint(out[i * c.ld + j]) != __float_as_uint(out[j * c.ld + i])) {
            atomicAdd(worst + 1, 1ull);
        }
    }
}

/* `way` 0 is our kernel, through copies in float16; others are so many panels by cuBLAS. */

static void factor_run(int64_t way, double alpha, const tch_matrices *a, int transpose, double beta,
                       const tch_matrices *c)
{
    const tchi_factor_weights weights = {(float)alpha, (float)beta, NULL, 0};
    must(way == 0 ? tchi_cuda_factor_narrow(&state, weights, a, transpose, c)
                  : tchi_cuda_factor_gram_panels(&state, way, alpha, a, transpose, beta, c),
         "factor_gram");
}

static void factor_case(tch_scalar type, int64_t n, int64_t k, int transpose, double beta, int64_t pad, int64_t shift,
                        int64_t way, bool timed)
{
    if (way > 0 && state.blas == NULL) {
        return;
    }
    tch_matrices a = make_random(type, 1, transpose ? k : n, transpose ? n : k, pad, shift);
    tch_matrices c = make_random(TCH_SCALAR_F32, 1, n, n, pad, shift);
    tch_matrices before = make(TCH_SCALAR_F32, 1, n, n, pad, 0);
    double alpha = 1.0 / (double)k;
    unsigned long long *worst;
    double values[2];
    if (way == 0 && !tchi_cuda_factor_narrow_takes(&state, &a, transpose, &c)) {
        drop(&a, shift);
        drop(&c, shift);
        drop(&before, 0);
        return;
    }
    if (beta == 0.0) {
        poison(&c);
    }
    must(cudaMemcpy(before.data, c.data, (size_t)elements_of(&c) * 4, cudaMemcpyDeviceToDevice), "before");
    must(cudaMalloc((void **)&worst, 16), "cudaMalloc");
    must(cudaMemset(worst, 0, 16), "cudaMemset");
    factor_run(way, alpha, &a, transpose, beta, &c);
    factor_check<<<512, 128>>>(a, transpose, c, (const float *)before.data, alpha, beta, timed ? 20000 : 0, worst);
    must(cudaMemcpy(values, worst, 16, cudaMemcpyDeviceToHost), "factor_check");
    double allowed = (type == TCH_SCALAR_F32 ? 2.0 * 0x1p-10 : 0.0) + ((double)k / 8.0 + 16.0) * 0x1p-23;
    if (!(values[0] <= allowed) || values[1] != 0.0) {
        failed++;
        printf("FAIL factor %s n %lld k %lld transpose %d beta %g way %lld: error %.2e, asymmetric %d\n",
               type_name(type), (long long)n, (long long)k, transpose, beta, (long long)way, values[0],
               values[1] != 0.0);
    }
    if (timed) {
        double ms = median_ms(state.stream, [&] { factor_run(way, alpha, &a, transpose, beta, &c); });
        printf("factor %s n %lld k %lld: %s %lld %.4f ms %.1f TFLOP/s of exact halves, error %.1e\n", type_name(type),
               (long long)n, (long long)k, way == 0 ? "copies" : "panels", (long long)way, ms,
               (double)n * (double)n * (double)k / ms * 1e-9, values[0]);
    }
    fflush(stdout);
    drop(&a, shift);
    drop(&c, shift);
    drop(&before, 0);
    must(cudaFree(worst), "cudaFree");
}

static void check_factors()
{
    for (tch_scalar type : {TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_BF16}) {
        for (int64_t way : {0, 1, 3}) {
            for (int transpose = 0; transpose < 2; transpose++) {
                factor_case(type, 300, 200, transpose, 0.0, 0, 0, way, false);
                factor_case(type, 300, 1000, transpose, 0.5, 4, 0, way, false);
                factor_case(type, 131, 77, transpose, 0.5, 1, 1, way, false);
                factor_case(type, 1, 3, transpose, 0.0, 0, 0, way, false);
                factor_case(type, 2050, 130, transpose, 0.5, 2, 2, way, false);
                factor_case(type, 2176, 9001, transpose, 0.5, 0, 0, way, false);
            }
        }
    }
}

static void time_factors()
{
    for (tch_scalar type : {TCH_SCALAR_F32, TCH_SCALAR_BF16}) {
        for (int64_t n : {768, 3072}) {
            for (int64_t way : {0, 1, 2, 3, 4}) {
                factor_case(type, n, 8192, 1, 0.95, 0, 0, way, true);
            }
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------------ */

static void open_blas()
{
    const char *reason = "";
    const tchi_cublas *blas = tchi_cublas_open(&reason);
    const size_t bytes = (size_t)tchi_cuda_workspace_bytes(&state);
    must(cudaMalloc(&state.blas_workspace, bytes), "cudaMalloc");
    if (blas == NULL || blas->create(&state.blas) != 0) {
        printf("without cuBLAS: %s\n", reason);
        state.blas = NULL;
        return;
    }
    if (blas->set_stream(state.blas, state.stream) != 0 ||
        blas->set_workspace(state.blas, state.blas_workspace, bytes) != 0) {
        exit(1);
    }
}

int main(int count, char **arguments)
{
    bool only_norms = count > 1 && strcmp(arguments[1], "norms") == 0;
    state = this_device();
    open_blas();
    check_norms(only_norms);
    check_scaling();
    check_rows_that_grow();
    if (only_norms) {
        time_float32();
        printf("%d checks failed\n", failed);
        return failed != 0;
    }
    check_squares();
    check_outer();
    check_factors();
    printf("%d checks failed\n", failed);
    fflush(stdout);
    outer_case(TCH_SCALAR_F32, TCH_SCALAR_F32, 256, 1024, 1024, 0, 0, true);
    time_norms();
    squares_case(TCH_SCALAR_F32, 32, 1, 256, 768, 3072, 0, 0, true);
    squares_case(TCH_SCALAR_BF16, 8, 1, 1024, 768, 3072, 0, 0, true);
    time_factors();
    printf("%d checks failed\n", failed);
    return failed != 0;
}

/* A laboratory for the symmetric product in bfloat16: every kernel against a plain one on shapes that are hard on
 * edges, then their speed. Stands alone, on a GPU of sm_90; from the root of the
 * repository:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/symmetric_bf16x2_bench.cu \
 *       src/backends/cuda/product/symmetric/symmetric_pingpong.cu src/backends/cuda/device/tensor_map.c \
 *       src/backends/cuda/product/kernel_choice.c
 * With the argument `plain` only the products of an orthogonalization are timed, with `split` only those of inverse
 * roots. Exits with 1 if a check fails. */
#include "common.cuh"

#include "backends/cuda/product/symmetric/symmetric_bf16x2.cu"
#include "backends/cuda/product/symmetric/symmetric_bf16x2_wgmma.cu"

/* --- variants ---------------------------------------------------------------------------------------------------- */

/* CHOSEN is symmetric_bf16x2.cu's own choice, which does not know PINGPONG. */
enum variant { MMA_64, MMA_128, WGMMA_128, CHOSEN, PINGPONG, VARIANTS };

static const char *const variant_names[VARIANTS] = {"mma 64x64", "mma 128x128", "wgmma 128x128", "as chosen",
                                                    "ping-pong"};

typedef struct product {
    double c0, c1, c2;
    tch_matrices a, b, c, d;
    int has_d;
} product;

static tchi_bf16x2_problem problem_for(const product *q)
{
    return problem_of(q->c0, q->c1, q->has_d ? &q->d : NULL, q->c2, &q->a, &q->b, &q->c);
}

/* PINGPONG is asked as if the GPU had one multiprocessor, so that few tiles are measured as well. */
static bool takes(const tchi_cuda_state *state, enum variant v, const product *q)
{
    tchi_cuda_state small = *state;
    small.device.processors = 1;
    return v != PINGPONG ||
           tchi_cuda_symmetric_pingpong_supported(&small, q->has_d ? &q->d : NULL, &q->a, &q->b, &q->c);
}

static void run(tchi_cuda_state *state, enum variant v, const product *q)
{
    const tch_matrices *d = q->has_d ? &q->d : NULL;
    tchi_bf16x2_problem p = problem_for(q);
    tch_status status;
    if (v == CHOSEN) {
        status = tchi_cuda_symmetric_bf16x2(state, q->c0, q->c1, d, q->c2, &q->a, &q->b, &q->c);
    } else if (v == PINGPONG) {
        status = tchi_cuda_symmetric_pingpong(state, q->c0, q->c1, d, q->c2, &q->a, &q->b, &q->c);
    } else if (v == MMA_64 || v == MMA_128) {
        status = split_mma(state, &p, q->c.batch, v == MMA_64 ? 64 : 128);
    } else {
        status = tchi_cuda_split_wgmma(state, &p, q->c.batch);
    }
    must(status, variant_names[v]);
}

/* --- operands ---------------------------------------------------------------------------------------------------- */

static tch_matrices make(tch_scalar type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int shift)
{
    return make_poisoned(type, rows, cols, ld, batch, rows * ld, shift);
}

static tch_matrices make_random(tch_scalar type, int64_t rows, int64_t cols, int64_t ld, int64_t batch, int shift,
                                uint64_t seed, int symmetric)
{
    tch_matrices m = make(type, rows, cols, ld, batch, shift);
    fill_noise(&m, seed, symmetric);
    return m;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

/* One thread per element, in float64, of the numbers that the split type stands for. worst[0] gets the largest error in
 * units of sqrt(k + 1) + |wanted|, worst[1] the number of elements that differ from their mirror image. Both are kept
 * as bits of non-negative floats, whose order is that of integers; NaN is above all of them. */
static __global__ void plain_check(tchi_bf16x2_problem p, int64_t batch, unsigned *worst)
{
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (int64_t)p.n * p.n * batch) {
        return;
    }
    int64_t b = at / p.n / p.n;
    int64_t i = at / p.n % p.n;
    int64_t j = at % p.n;
    int64_t row = max(i, j);
    int64_t col = min(i, j);
    double sum = 0.0;
    for (int64_t l = 0; l < p.k; l++) {
        sum += tchi_cuda_load<double>(p.a.type, tchi_cuda_at(p.a, b, row, l), 0, p.a.stride) *
               tchi_cuda_load<double>(p.b.type, tchi_cuda_at(p.b, b, col, l), 0, p.b.stride);
    }
    double want = p.c2 * sum + (row == col ? p.c0 : 0.0f);
    if (p.has_d) {
        want += p.c1 * tchi_cuda_load<double>(p.d.type, tchi_cuda_at(p.d, b, row, col), 0, p.d.stride);
    }
    double got = tchi_cuda_load<double>(p.c.type, tchi_cuda_at(p.c, b, i, j), 0, p.c.stride);
    double mirror = tchi_cuda_load<double>(p.c.type, tchi_cuda_at(p.c, b, j, i), 0, p.c.stride);
    float error = (float)(fabs(got - want) / (sqrt((double)p.k + 1.0) + fabs(want)));
    atomicMax(worst, __float_as_uint(error) & 0x7FFFFFFFu);
    if (!(got == mirror)) {
        atomicAdd(worst + 1, 1u);
    }
}

/* Numbers of the padding of C that were written: they were NaN with all bits set. */
static __global__ void padding_check(tchi_cuda_operand c, int64_t n, int64_t batch, unsigned *strayed)
{
    int64_t planes = c.type == TCH_SCALAR_BF16X2 ? 2 : 1;
    int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= c.stride * planes * batch || at % c.ld < n) {
        return;
    }
    int64_t size = tchi_cuda_size(c.type);
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

/* What rounding the result leaves, or float32 sums and the low low products that are dropped; and for each instruction,
 * 16 along k, the half of a unit of the sum's last place that tensor cores cut off on average. */
static double tolerance_of(const shape_case *s)
{
    double instructions = (double)(s->k / 16 + 1) * (s->in == TCH_SCALAR_BF16X2 ? 3.0 : 1.0);
    double cut = instructions * 0x1p-24;
    if (s->out == TCH_SCALAR_BF16) {
        return 4e-3 + cut;
    }
    int exact = s->in == TCH_SCALAR_BF16 && s->out != TCH_SCALAR_BF16X2;
    return cut + (exact ? 1e-6 : 0x1p-16);
}

static int check(tchi_cuda_state *state, enum variant v, const shape_case *s, unsigned *worst, double *share)
{
    int64_t ld_in = (s->k + 15) / 8 * 8;
    int64_t ld_out = s->odd ? s->n + 1 : (s->n + 15) / 8 * 8;
    int shift = s->odd ? 1 : 0;
    /* D of the split type is aligned by contract. */
    int d_shift = s->in == TCH_SCALAR_BF16 ? shift : 0;
    int64_t ld_d = s->in == TCH_SCALAR_BF16 ? ld_out : (s->n + 15) / 8 * 8;
    product q = {};
    q.c0 = 0.75;
    q.c1 = -0.5;
    q.c2 = 1.25;
    q.a = make_random(s->in, s->n, s->k, ld_in, s->batch, 0, 1, 0);
    q.b = make_random(s->in, s->n, s->k, ld_in + 8, s->batch, 0, 2, 0);
    q.d = make_random(s->in, s->n, s->n, ld_d, s->batch, d_shift, 3, 1);
    q.c = make(s->out, s->n, s->n, ld_out, s->batch, shift);
    q.has_d = s->has_d;
    if (!takes(state, v, &q)) {
        drop(&q.a, 0), drop(&q.b, 0), drop(&q.d, d_shift), drop(&q.c, shift);
        return 0;
    }
    must(cudaMemset(worst, 0, 3 * sizeof *worst), "cudaMemset");
    run(state, v, &q);
    tchi_bf16x2_problem p = problem_for(&q);
    int64_t planes = planes_of(s->out);
    plain_check<<<(unsigned)((s->n * s->n * s->batch + 255) / 256), 256>>>(p, s->batch, worst);
    padding_check<<<(unsigned)((q.c.stride * planes * s->batch + 255) / 256), 256>>>(p.c, s->n, s->batch, worst + 2);
    unsigned got[3];
    must(cudaMemcpy(got, worst, sizeof got, cudaMemcpyDeviceToHost), variant_names[v]);
    float error;
    memcpy(&error, got, sizeof error);
    *share = std::max(*share, error / tolerance_of(s));
    int bad = !(error <= tolerance_of(s)) || got[1] != 0 || got[2] != 0;
    if (bad) {
        printf("FAIL %s: in %d out %d n %lld k %lld batch %lld d %d odd %d: error %.2e, asymmetric %u, strayed %u\n",
               variant_names[v], (int)s->in, (int)s->out, (long long)s->n, (long long)s->k, (long long)s->batch,
               s->has_d, s->odd, error, got[1], got[2]);
    }
    drop(&q.a, 0), drop(&q.b, 0), drop(&q.d, d_shift), drop(&q.c, shift);
    return bad;
}

#define SPLIT TCH_SCALAR_BF16X2
#define PLAIN TCH_SCALAR_BF16
static const shape_case cases[] = {
    {SPLIT, SPLIT, 1, 1, 1, 1, 0},
    {SPLIT, SPLIT, 64, 64, 3, 1, 0},
    {SPLIT, SPLIT, 128, 128, 5, 1, 0},
    {SPLIT, SPLIT, 129, 130, 2, 1, 1},
    {SPLIT, TCH_SCALAR_F32, 255, 31, 2, 0, 1},
    {SPLIT, TCH_SCALAR_F64, 257, 33, 2, 1, 1},
    {SPLIT, TCH_SCALAR_F32, 40, 0, 2, 1, 0},
    {SPLIT, SPLIT, 300, 1000, 1, 0, 0},
    {SPLIT, SPLIT, 511, 513, 2, 1, 0},
    {SPLIT, TCH_SCALAR_F64, 1024, 1024, 2, 1, 0},
    {SPLIT, SPLIT, 1000, 4099, 1, 1, 0},
    {SPLIT, SPLIT, 5, 7, 3000, 1, 1},
    {SPLIT, PLAIN, 96, 96, 4, 1, 0},
    {SPLIT, SPLIT, 384, 96, 45, 1, 0},
    {SPLIT, TCH_SCALAR_F64, 300, 64, 46, 0, 1},
    {SPLIT, SPLIT, 256, 64, 300, 1, 0},
    {SPLIT, SPLIT, 256, 8, 1, 1, 0},
    {SPLIT, SPLIT, 264, 264, 45, 1, 0},
    {SPLIT, SPLIT, 512, 520, 14, 0, 0},
    {SPLIT, SPLIT, 768, 768, 12, 1, 0},
    {SPLIT, SPLIT, 1000, 72, 5, 1, 0},
    {SPLIT, SPLIT, 2048, 2048, 3, 1, 0},
    {PLAIN, PLAIN, 384, 96, 50, 1, 0},
    {PLAIN, PLAIN, 1, 5, 2, 1, 1},
    {PLAIN, PLAIN, 127, 200, 3, 1, 1},
    {PLAIN, TCH_SCALAR_F32, 300, 64, 2, 0, 0},
    {PLAIN, SPLIT, 100, 520, 2, 1, 0},
    {PLAIN, PLAIN, 640, 2048, 2, 1, 0},
    {PLAIN, PLAIN, 1, 1, 3, 1, 0},
    {PLAIN, PLAIN, 256, 64, 300, 1, 0},
    {PLAIN, PLAIN, 257, 130, 2, 1, 0},
    {PLAIN, PLAIN, 600, 321, 3, 0, 0},
    {PLAIN, PLAIN, 768, 2304, 48, 0, 0},
    {PLAIN, PLAIN, 2048, 2048, 3, 1, 0},
    {PLAIN, TCH_SCALAR_F64, 385, 129, 2, 1, 1},
    {PLAIN, PLAIN, 256, 0, 1, 1, 0},
    {PLAIN, PLAIN, 256, 8, 1, 1, 0},
    {PLAIN, PLAIN, 1000, 72, 5, 1, 0},
    {PLAIN, PLAIN, 512, 520, 14, 0, 0},
};

static int check_all(tchi_cuda_state *state)
{
    unsigned *worst;
    must(cudaMalloc((void **)&worst, 3 * sizeof *worst), "cudaMalloc");
    int failed = 0;
    for (int v = 0; v < VARIANTS; v++) {
        double share = 0.0;
        for (const shape_case &s : cases) {
            failed += check(state, (enum variant)v, &s, worst, &share);
        }
        printf("checked %s: largest error %.2f of what is allowed\n", variant_names[v], share);
        fflush(stdout);
    }
    must(cudaFree(worst), "cudaFree");
    return failed;
}

/* --- speed ------------------------------------------------------------------------------------------------------- */

/* TFLOP/s count a symmetric product: n^2 k for each product of parts, three of them for split operands. */
static void time_all(tchi_cuda_state *state, tch_scalar type, int64_t batch, int64_t n, int64_t k, int has_d)
{
    product q = {};
    q.c0 = 0.75;
    q.c1 = -0.5;
    q.c2 = 1.25;
    q.a = make_random(type, n, k, k, batch, 0, 1, 0);
    q.b = make_random(type, n, k, k, batch, 0, 2, 0);
    q.d = make_random(type, n, n, n, batch, 0, 3, 1);
    q.c = make(type, n, n, n, batch, 0);
    q.has_d = has_d;
    double flop = (type == SPLIT ? 3.0 : 1.0) * (double)n * (double)n * (double)k * (double)batch;
    printf("%4lld x %4lld, k %4lld, %s %s", (long long)batch, (long long)n, (long long)k,
           type == SPLIT ? "split" : "plain", has_d ? "with D:   " : "without D:");
    for (int v = 0; v < VARIANTS; v++) {
        if (!takes(state, (enum variant)v, &q)) {
            continue;
        }
        double ms = median_ms(state->stream, [&] { run(state, (enum variant)v, &q); });
        printf("  %s %.4f ms %.0f TFLOP/s", variant_names[v], ms, flop / ms * 1e-9);
    }
    printf("\n");
    fflush(stdout);
    drop(&q.a, 0), drop(&q.b, 0), drop(&q.d, 0), drop(&q.c, 0);
}

/* The symmetric products of Muon's matrices: Gram matrices of their rows, and polynomials in those. */
static void time_orthogonalization(tchi_cuda_state *state)
{
    const int64_t sizes[][3] = {{44, 256, 256},   {128, 256, 256},  {44, 256, 1024}, {14, 512, 512},  {48, 512, 512},
                                {1, 1024, 1024},  {4, 1024, 1024},  {1, 2048, 2048}, {12, 768, 768},  {24, 768, 768},
                                {48, 768, 768},   {12, 768, 2304},  {24, 768, 3072}, {8, 2048, 2048}, {16, 2048, 2048},
                                {64, 2048, 2048}, {16, 2048, 5632}, {48, 2048, 5632}};
    for (const auto &size : sizes) {
        time_all(state, PLAIN, size[0], size[1], size[2], 0);
        if (size[1] == size[2]) {
            time_all(state, PLAIN, size[0], size[1], size[2], 1);
        }
    }
}

/* Those of inverse roots. */
static void time_roots(tchi_cuda_state *state)
{
    const int64_t sizes[][2] = {{16, 1024}, {4, 2048},  {64, 256}, {1, 4096}, {256, 128}, {32, 512}, {1, 1024},
                                {44, 256},  {128, 256}, {14, 512}, {4, 1024}, {48, 1024}, {12, 768}, {60, 768},
                                {1, 2048},  {12, 2048}, {1, 3072}, {3, 3072}, {6, 3072}};
    for (const auto &size : sizes) {
        time_all(state, SPLIT, size[0], size[1], size[1], 0);
        time_all(state, SPLIT, size[0], size[1], size[1], 1);
    }
}

int main(int argc, char **argv)
{
    tchi_cuda_state state = this_device();
    if (state.device.major != 9) {
        fprintf(stderr, "needs a GPU of sm_90\n");
        return 1;
    }
    int failed = check_all(&state);
    printf("%d checks failed\n", failed);
    const char *only = argc > 1 ? argv[1] : "";
    if (strcmp(only, "split") != 0) {
        time_orthogonalization(&state);
    }
    if (strcmp(only, "plain") != 0) {
        time_roots(&state);
    }
    return failed != 0;
}

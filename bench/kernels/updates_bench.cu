/* The optimizers' kernels alone on a GPU, over the parameters of two networks: adamw, sgd, find_nonfinite, gather,
 * graft, rotated_adam and apply of src/backends/cuda, checked against plain kernels and then timed. Not part of the
 * build:
 *
 *     nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Iinclude -Isrc bench/kernels/updates_bench.cu \
 *         src/backends/cuda/update/*.cu src/backends/cuda/update/rects.c
 *
 * GB/s count what an operation has to move. -DTCHI_CUDA_STEPS=1 or 4 gives every thread another number of vec4s. */
#include <chrono>

#include "common.cuh"

#include "backends/cuda/update/updates.cuh"

static int failures;
static tchi_cuda_state state;

/* --- time -------------------------------------------------------------------------------------------------------- */

template <typename function> static double time_of(function call)
{
    return replayed_us(state.stream, call);
}

/* Microseconds that the host spends in one call, without a graph. */
template <typename function> static double host_time_of(function call)
{
    const int calls = 50;
    call();
    must(cudaStreamSynchronize(state.stream), "cudaStreamSynchronize");
    auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; i++) {
        call();
    }
    std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
    must(cudaStreamSynchronize(state.stream), "cudaStreamSynchronize");
    return taken.count() / calls;
}

static void report(const char *name, double bytes, double microseconds)
{
    printf("  %-44s %8.1f us %7.0f GB/s\n", name, microseconds, bytes / microseconds / 1e3);
}

/* --- networks ---------------------------------------------------------------------------------------------------- */

typedef struct shape {
    int64_t rows, cols;
} shape;

static void repeat(std::vector<shape> &all, int times, const std::vector<shape> &layer)
{
    for (int i = 0; i < times; i++) {
        all.insert(all.end(), layer.begin(), layer.end());
    }
}

/* Twelve layers of GPT-2 without its embeddings: 48 matrices and 98 vectors, 85 M parameters. */
static std::vector<shape> gpt2()
{
    std::vector<shape> all;
    repeat(all, 12,
           {{768, 2304},
            {768, 768},
            {768, 3072},
            {3072, 768},
            {1, 2304},
            {1, 768},
            {1, 3072},
            {1, 768},
            {1, 768},
            {1, 768},
            {1, 768},
            {1, 768}});
    repeat(all, 2, {{1, 768}});
    return all;
}

/* Sixteen layers of a Llama of width 2048 without its embeddings: 822 M parameters. */
static std::vector<shape> llama()
{
    std::vector<shape> all;
    repeat(all, 16,
           {{2048, 2048},
            {2048, 2048},
            {2048, 2048},
            {2048, 2048},
            {2048, 5632},
            {2048, 5632},
            {5632, 2048},
            {1, 2048},
            {1, 2048}});
    repeat(all, 1, {{1, 2048}});
    return all;
}

/* All of a network's parameters in one array, each aligned to 256 bytes, and arrays of the same layout beside it. */
typedef struct network {
    std::vector<shape> shapes;
    std::vector<int64_t> first; /* where each parameter begins */
    int64_t span;               /* of the arrays */
    double parameters;
    float *param, *grad, *state[3], *block[2];
    tch_clock *clock;
    tch_hyper *hyper;
    double *norms, *wanted;
} network;

static const tch_clock the_clock = {3, 1 - 0.9 * 0.9 * 0.9, 1 - 0.95 * 0.95 * 0.95, 0.2, {0.5, 0.5}, {0.5f, 0.5f}, 0};
static const tch_hyper the_hyper = {1e-3, 0.9, 0.95, 1e-8, 0.1, 0.9, 0.0, 0.99, 1e-8, {}};

static network network_of(const std::vector<shape> &shapes)
{
    network n = {};
    n.shapes = shapes;
    for (const shape &s : shapes) {
        n.first.push_back(n.span);
        n.span += (s.rows * s.cols + 63) / 64 * 64;
        n.parameters += (double)(s.rows * s.cols);
    }
    n.param = device_array<float>(n.span);
    n.grad = device_array<float>(n.span);
    for (float *&one : n.state) {
        one = device_array<float>(n.span);
    }
    for (float *&one : n.block) {
        one = device_array<float>(n.span);
    }
    n.clock = device_array<tch_clock>(1);
    n.hyper = device_array<tch_hyper>(1);
    n.norms = device_array<double>(4096);
    n.wanted = device_array<double>(4096);
    cudaMemcpy(n.clock, &the_clock, sizeof(the_clock), cudaMemcpyHostToDevice);
    cudaMemcpy(n.hyper, &the_hyper, sizeof(the_hyper), cudaMemcpyHostToDevice);
    std::vector<double> ones(4096, 1.0);
    cudaMemcpy(n.norms, ones.data(), ones.size() * 8, cudaMemcpyHostToDevice);
    cudaMemcpy(n.wanted, ones.data(), ones.size() * 8, cudaMemcpyHostToDevice);
    return n;
}

static void free_network(network &n)
{
    for (void *one : {(void *)n.param, (void *)n.grad, (void *)n.state[0], (void *)n.state[1], (void *)n.state[2],
                      (void *)n.block[0], (void *)n.block[1], (void *)n.clock, (void *)n.hyper, (void *)n.norms,
                      (void *)n.wanted}) {
        cudaFree(one);
    }
}

/* A rectangle of a parameter; its block lies where it does, one after the other in the span. */
static tch_rect rect_of(const network &n, int64_t at, shape whole, int64_t i, int64_t j, int64_t rows, int64_t cols,
                        int64_t block_at, bool transposed)
{
    tch_rect p = {};
    int64_t offset = at + i * whole.cols + j;
    p.param = n.param + offset;
    p.grad = n.grad + offset;
    for (int k = 0; k < 3; k++) {
        p.state[k] = n.state[k] + offset;
    }
    for (int k = 0; k < 2; k++) {
        p.block[k] = n.block[k] + block_at;
    }
    p.clock = n.clock;
    p.rows = rows;
    p.cols = cols;
    p.stride = whole.cols;
    p.block_ld = transposed ? rows : cols;
    p.transposed = transposed;
    p.factor = 1;
    return p;
}

static std::vector<tch_rect> whole_rects(const network &n)
{
    std::vector<tch_rect> rects;
    for (size_t k = 0; k < n.shapes.size(); k++) {
        int64_t size = n.shapes[k].rows * n.shapes[k].cols;
        rects.push_back(rect_of(n, n.first[k], {1, size}, 0, 0, 1, size, n.first[k], false));
    }
    return rects;
}

/* The matrices in rectangles of at most 1024 by 1024. */
static std::vector<tch_rect> block_rects(const network &n, bool transposed)
{
    std::vector<tch_rect> rects;
    for (size_t k = 0; k < n.shapes.size(); k++) {
        const shape &s = n.shapes[k];
        int64_t block_at = n.first[k];
        for (int64_t i = 0; s.rows > 1 && i < s.rows; i += 1024) {
            for (int64_t j = 0; j < s.cols; j += 1024) {
                int64_t rows = std::min<int64_t>(1024, s.rows - i);
                int64_t cols = std::min<int64_t>(1024, s.cols - j);
                rects.push_back(rect_of(n, n.first[k], s, i, j, rows, cols, block_at, transposed));
                rects.back().block_index = (int32_t)rects.size() - 1;
                block_at += rows * cols;
            }
        }
    }
    return rects;
}

static double elements_of(const std::vector<tch_rect> &rects)
{
    double sum = 0;
    for (const tch_rect &p : rects) {
        sum += (double)(p.rows * p.cols);
    }
    return sum;
}

static tch_update update_of(const network &n, const std::vector<tch_rect> &rects)
{
    tch_update u = {};
    u.rects = rects.data();
    u.count = (int64_t)rects.size();
    u.real = u.param_type = u.grad_type = u.block_type = TCH_SCALAR_F32;
    u.hyper = n.hyper;
    return u;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static __global__ void fill_kernel(float *to, int64_t count, uint64_t seed, bool positive)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        float value = (float)noise(seed * 1000000007u + (uint64_t)i);
        to[i] = positive ? fabsf(value) + 0.01f : value;
    }
}

static void fill(network &n)
{
    float *arrays[] = {n.param, n.grad, n.state[0], n.state[1], n.state[2], n.block[0], n.block[1]};
    for (int k = 0; k < 7; k++) {
        fill_kernel<<<1024, 256>>>(arrays[k], n.span, (uint64_t)k, k == 3 || k == 4);
    }
    must(cudaDeviceSynchronize(), "fill_kernel");
}

/* The largest difference of p, and of the block, from what a step from fill's numbers must give, for one operation. */
typedef enum operation { ADAMW, GATHER, APPLY } operation;

static __global__ void compare_kernel(tch_rect p, operation kind, int64_t at, int64_t block_at, tch_clock c,
                                      tch_hyper h, float *worst)
{
    for (int64_t e = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; e < p.rows * p.cols;
         e += (int64_t)gridDim.x * blockDim.x) {
        int64_t i = e / p.cols, j = e % p.cols;
        int64_t here = i * p.stride + j, there = p.transposed ? j * p.block_ld + i : i * p.block_ld + j;
        double was = (float)noise((uint64_t)(at + here)), g = (float)noise(1000000007u + (uint64_t)(at + here));
        double m = (float)noise(2 * 1000000007ull + (uint64_t)(at + here));
        double v = fabs((float)noise(3 * 1000000007ull + (uint64_t)(at + here))) + 0.01f;
        double d = (float)noise(6 * 1000000007ull + (uint64_t)(block_at + there));
        double wanted = g, found = ((float *)p.block[0])[there];
        if (kind == ADAMW) {
            m = h.beta1 * m + (1 - h.beta1) * g;
            v = h.beta2 * v + (1 - h.beta2) * g * g;
            wanted = was * (1 - h.lr * h.weight_decay) - h.lr * m / c.correction1 / (sqrt(v / c.correction2) + h.eps);
        } else if (kind == APPLY) {
            wanted = was * (1 - h.lr * h.weight_decay) - h.lr * d;
        }
        if (kind != GATHER) {
            found = ((float *)p.param)[here];
        }
        float error = (float)fabs(found - wanted);
        if (!(error <= 1e-6f)) {
            *worst = error; /* any of them will do */
        }
    }
}

static void check(const network &n, const std::vector<tch_rect> &rects, operation kind, const char *name)
{
    float worst = 0;
    float *found = device_array<float>(1);
    cudaMemset(found, 0, sizeof(float));
    for (const tch_rect &p : rects) {
        compare_kernel<<<256, 256>>>(p, kind, (float *)p.param - n.param, (float *)p.block[0] - n.block[0], the_clock,
                                     the_hyper, found);
    }
    must(cudaMemcpy(&worst, found, sizeof(float), cudaMemcpyDeviceToHost), name);
    cudaFree(found);
    if (worst != 0) {
        failures++;
        printf("WRONG: %s, by %g\n", name, worst);
    }
}

/* --- the operations ---------------------------------------------------------------------------------------------- */

static void bench_whole(network &n)
{
    std::vector<tch_rect> rects = whole_rects(n);
    tch_update u = update_of(n, rects);
    double bytes = n.parameters * 4;
    int32_t *found = (int32_t *)n.norms;
    float *copy = n.block[0];
    report("a copy of 3.5 arrays", 7 * bytes,
           3.5 *
               time_of([&] { cudaMemcpyAsync(copy, n.param, (size_t)bytes, cudaMemcpyDeviceToDevice, state.stream); }));
    auto adamw = [&] { tchi_cuda_adamw(&state, &u, 0, 0); };
    fill(n);
    adamw();
    check(n, rects, ADAMW, "adamw");
    report("adamw", 7 * bytes, time_of(adamw));
    printf("  %-44s %8.1f us\n", "adamw, the host's part", host_time_of(adamw));
    report("adamw, amsgrad", 9 * bytes, time_of([&] { tchi_cuda_adamw(&state, &u, 1, 0); }));
    report("sgd with momentum", 5 * bytes, time_of([&] { tchi_cuda_sgd(&state, &u, 0); }));
    report("find_nonfinite", bytes, time_of([&] { tchi_cuda_find_nonfinite(&state, &u, found); }));
    tch_update half = u; /* bfloat16 parameters and gradients with a float32 master copy, over the same memory */
    std::vector<tch_rect> mastered = rects;
    for (tch_rect &p : mastered) {
        p.master = p.param;
        p.param = p.block[0];
    }
    half.rects = mastered.data();
    half.param_type = half.grad_type = TCH_SCALAR_BF16;
    report("adamw, bfloat16 with a master copy", 7 * bytes, time_of([&] { tchi_cuda_adamw(&state, &half, 0, 0); }));
    tch_update random = u;
    random.param_type = random.grad_type = TCH_SCALAR_BF16;
    random.stochastic = 1;
    report("adamw, bfloat16 rounded at random", 5.5 * bytes, time_of([&] { tchi_cuda_adamw(&state, &random, 0, 0); }));
}

static void bench_blocks(network &n, bool transposed)
{
    std::vector<tch_rect> rects = block_rects(n, transposed);
    tch_update u = update_of(n, rects);
    double bytes = elements_of(rects) * 4;
    void *scratch = device_array<char>(tchi_cuda_graft_scratch((int64_t)elements_of(rects), u.count));
    printf(" blocks of 1024, %s, %d rectangles\n", transposed ? "transposed" : "as they lie", (int)u.count);
    auto gather = [&] { tchi_cuda_gather(&state, &u, TCH_FILTER_NONE, 0); };
    auto apply = [&] { tchi_cuda_apply(&state, &u, TCH_BLOCK_GRAFT, n.wanted, n.norms, 0, 1); };
    std::vector<double> ones(4096, 1.0);
    cudaMemcpy(n.norms, ones.data(), ones.size() * 8, cudaMemcpyHostToDevice);
    fill(n);
    gather();
    check(n, rects, GATHER, "gather");
    report("gather", 2 * bytes, time_of(gather));
    report("gather, filtered", 5 * bytes, time_of([&] { tchi_cuda_gather(&state, &u, TCH_FILTER_EMA, 0); }));
    report("graft, Adam", 4 * bytes,
           time_of([&] { tchi_cuda_graft(&state, &u, TCH_GRAFT_ADAM, 0, n.wanted, scratch); }));
    report("rotated_adam", 5 * bytes, time_of([&] { tchi_cuda_rotated_adam(&state, &u); }));
    cudaMemcpy(n.wanted, ones.data(), ones.size() * 8, cudaMemcpyHostToDevice);
    report("apply with momentum", 5 * bytes, time_of(apply));
    for (tch_rect &p : rects) {
        p.state[2] = NULL;
    }
    fill(n);
    apply();
    check(n, rects, APPLY, "apply");
    report("apply", 3 * bytes, time_of(apply));
    cudaFree(scratch);
}

static void bench(const char *name, const std::vector<shape> &shapes)
{
    network n = network_of(shapes);
    printf("%s: %d tensors, %.1f M parameters\n", name, (int)shapes.size(), n.parameters / 1e6);
    bench_whole(n);
    bench_blocks(n, false);
    bench_blocks(n, true);
    free_network(n);
}

int main()
{
    state = this_device();
    printf("%d vec4s a thread\n", TCHI_CUDA_STEPS);
    bench("GPT-2", gpt2());
    bench("a Llama", llama());
    printf(failures == 0 ? "all right\n" : "%d WRONG\n", failures);
    return failures != 0;
}

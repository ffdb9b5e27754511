/* A custom kernel: one CUDA source, a template, run on the GPU if there is one and else on the CPU. It takes a
 * step of sign descent, w -= lr * sign(g), and counts with an atomic how many weights moved; the result is compared
 * with a loop. */
#include "example.h"

enum { N = 100003, THREADS = 256 };

static const char source[] =
    "template <typename T>\n"
    "__global__ void sign_step(T *w, const T *g, T lr, int n, int *moved)\n"
    "{\n"
    "    __shared__ int count;\n"
    "    if (threadIdx.x == 0) count = 0;\n"
    "    __syncthreads();\n"
    "    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {\n"
    "        T sign = g[i] > T(0) ? T(1) : g[i] < T(0) ? T(-1) : T(0);\n"
    "        w[i] -= lr * sign;\n"
    "        if (sign != T(0)) atomicAdd(&count, 1);\n"
    "    }\n"
    "    __syncthreads();\n"
    "    if (threadIdx.x == 0) atomicAdd(moved, count);\n"
    "}\n";

/* NULL where this machine has nothing to compile with, which is no fault of the example. */
static tch_kernel *compile(tch_context *context)
{
    tch_kernel *kernel;
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = source;
    config.path = "sign_step.cu"; /* what the compiler calls it in its messages */
    config.name = "sign_step<float>";
    tch_status status = tch_kernel_compile(context, &config, &kernel);
    if (status == TCH_ERR_UNAVAILABLE || status == TCH_ERR_UNSUPPORTED) {
        printf("not run: %s\n", tch_last_error());
        return NULL;
    }
    must(status);
    return kernel;
}

int main(void)
{
    static float w[N], g[N], expected[N];
    int32_t moved = 0, expected_moves = 0, wrong = 0;
    int64_t shape[] = {N}, one[] = {1};
    for (int i = 0; i < N; i++) {
        w[i] = (float)i / N;
        g[i] = (float)(i % 7 - 3);
        expected[i] = w[i] - 0.125f * (float)((g[i] > 0.0f) - (g[i] < 0.0f));
        expected_moves += g[i] != 0.0f;
    }
    tch_tensor W = tch_tensor_view(w, TCH_FLOAT32, 1, shape);
    tch_tensor G = tch_tensor_view(g, TCH_FLOAT32, 1, shape);
    tch_tensor M = tch_tensor_view(&moved, TCH_INT32, 1, one);
    tch_context *context;
    must(tch_context_create("auto", &context));
    tch_kernel *kernel = compile(context);
    if (kernel == NULL) {
        tch_context_destroy(context);
        return 0;
    }
    tch_tensor *weights = send_tensor(context, &W), *gradient = send_tensor(context, &G),
               *count = send_tensor(context, &M);
    tch_kernel_argument arguments[] = {TCH_ARGUMENT_TENSOR(weights), TCH_ARGUMENT_TENSOR(gradient),
                                       TCH_ARGUMENT_REAL(0.125), TCH_ARGUMENT_INT(N), TCH_ARGUMENT_TENSOR(count)};
    tch_kernel_shape launch = TCH_KERNEL_SHAPE_INIT((N + THREADS - 1) / THREADS, THREADS);
    must(tch_kernel_launch(kernel, &launch, 5, arguments)); /* queued; asynchronous */
    must(tch_tensor_copy(context, &W, weights));            /* synchronizes */
    must(tch_tensor_copy(context, &M, count));
    for (int i = 0; i < N; i++) {
        wrong += fabsf(w[i] - expected[i]) > 1e-6f;
    }
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    must(tch_kernel_get_info(kernel, &info));
    printf("%s: %d of %d weights moved, %d wrong; %s, %d threads a block suggested\n", tch_kernel_name(kernel), moved,
           N, wrong, info.from_cache ? "from the cache" : "compiled", info.suggested_threads);
    tch_tensor_destroy(weights);
    tch_tensor_destroy(gradient);
    tch_tensor_destroy(count);
    tch_kernel_destroy(kernel);
    tch_context_destroy(context);
    return wrong == 0 && moved == expected_moves ? 0 : 1;
}

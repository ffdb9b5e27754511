/* An optimizer with an update of one's own: Lion, which goes by the sign of a moving average, as a function of one
 * element in the place of AdamW's. The library launches it for many parameters at once, on the GPU if there is one and
 * else on the CPU. A function that does not compile leaves AdamW at work, and the optimizer says why. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/torchium.h>

enum { N = 5003, STEPS = 200 };

static const char lion[] = "__device__ void lion(tch_element &e, const tch_numbers &k)\n"
                           "{\n"
                           "    tch_real c = k.beta1 * e.m + k.one_minus_beta1 * e.g;\n"
                           "    e.p -= k.lr * ((c > 0) - (c < 0) + k.weight_decay * e.p);\n"
                           "    e.m = k.beta2 * e.m + k.one_minus_beta2 * e.g;\n"
                           "}\n";

static const char broken[] = "__device__ void lion(tch_element &e, const tch_numbers &k) { e.p -= k.rate * e.g; }\n";

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

/* Whether the optimizer uses it; if not, the reason is printed. */
static int set(tch_optimizer *optimizer, const char *source)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    tch_optim_kernel kernel = TCH_OPTIM_KERNEL_INIT;
    tch_optim_kernel_info info = TCH_OPTIM_KERNEL_INFO_INIT;
    config.source = source;
    config.path = "lion.cu"; /* what the compiler calls it in its messages */
    config.name = "lion";
    kernel.kernel = &config;
    must(tch_optimizer_set_kernel(optimizer, TCH_OPTIM_PART_UPDATE, &kernel));
    must(tch_optimizer_get_kernel(optimizer, TCH_OPTIM_PART_UPDATE, &info));
    if (!info.in_use) {
        printf("the built-in is used: %s\n", info.reason);
    }
    return info.in_use;
}

int main(void)
{
    static float x[N], g[N];
    int64_t shape[] = {N};
    tch_tensor X = tch_tensor_view(x, TCH_FLOAT32, 1, shape), G = tch_tensor_view(g, TCH_FLOAT32, 1, shape);
    tch_context *context;
    tch_optimizer *optimizer;
    tch_parameter parameter = {.name = "x"};
    tch_tensor *gradient;
    must(tch_context_create("auto", &context));
    must(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &parameter.tensor));
    must(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &gradient));
    must(tch_tensor_fill(context, parameter.tensor, 0.0));

    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    config.lr = 0.01;
    config.beta2 = 0.99;
    config.weight_decay = 0.0;
    must(tch_optimizer_create(context, &config, 1, &parameter, &optimizer));
    int refused = !set(optimizer, broken), used = set(optimizer, lion);

    /* |x - t|^2 / 2 with t = -1, 0 and 1: every step goes 0.01 towards it. */
    double worst = 0.0;
    const tch_tensor *gradients[] = {gradient};
    for (int step = 0; step <= STEPS; step++) {
        must(tch_tensor_copy(context, &X, parameter.tensor));
        worst = 0.0;
        for (int i = 0; i < N; i++) {
            g[i] = x[i] - (float)(i % 3 - 1);
            worst = fmax(worst, fabs((double)g[i]));
        }
        must(tch_tensor_copy(context, gradient, &G));
        must(tch_optimizer_step(optimizer, 1, gradients));
    }
    printf("after %d steps of %s: at most %.3f from the minimum\n", STEPS, used ? "Lion" : "AdamW", worst);
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(parameter.tensor);
    tch_tensor_destroy(gradient);
    tch_context_destroy(context);
    return refused && worst < 0.3 ? 0 : 1;
}

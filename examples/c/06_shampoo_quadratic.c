/* Shampoo on a quadratic whose directions are tangled: f(X) = tr((X - T)' A (X - T) A) / 2 with A ill-conditioned and
 * far from diagonal. A method that looks at one entry at a time sees nothing of A; Shampoo learns it from gradients. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/optim.h>
#include <torchium/torchium.h>

#define N 32
#define STEPS 300

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

/* Minimizes from X = 0, with 1 and -1 in T, and returns f at the end as a share of f at the beginning. */
static double minimize(tch_context *context, const tch_optim_config *config)
{
    static float a[N * N], x[N * N], error[N * N], half[N * N], gradient[N * N];
    int64_t shape[] = {N, N};
    tch_tensor A = tch_tensor_view(a, TCH_FLOAT32, 2, shape), X = tch_tensor_view(x, TCH_FLOAT32, 2, shape);
    tch_tensor E = tch_tensor_view(error, TCH_FLOAT32, 2, shape), H = tch_tensor_view(half, TCH_FLOAT32, 2, shape);
    tch_tensor G = tch_tensor_view(gradient, TCH_FLOAT32, 2, shape);
    const tch_tensor *gradients[] = {&G};
    const tch_parameter parameter = {.tensor = &X, .name = "x"};
    tch_optimizer *optimizer;
    must(tch_optimizer_create(context, config, 1, &parameter, &optimizer));
    for (int i = 0; i < N * N; i++) {
        int apart = abs(i / N - i % N);
        a[i] = powf(0.9f, (float)apart); /* condition number about 260 */
        x[i] = 0.0f;
    }
    double first = 0.0, last = 0.0;
    for (int step = 0; step <= STEPS; step++) {
        for (int i = 0; i < N * N; i++) {
            error[i] = x[i] - (i % 3 == 0 ? 1.0f : -1.0f);
        }
        must(tch_matmul(context, &A, &E, &H)); /* G = A E A */
        must(tch_matmul(context, &H, &A, &G));
        last = 0.0;
        for (int i = 0; i < N * N; i++) {
            last += 0.5 * error[i] * gradient[i];
        }
        first = step == 0 ? last : first;
        must(tch_optimizer_set_lr(optimizer, 0, config->lr * (1.0 - (double)step / (STEPS + 1))));
        must(tch_optimizer_step(optimizer, 1, gradients));
    }
    tch_optimizer_destroy(optimizer);
    return last / first;
}

int main(void)
{
    tch_context *context;
    must(tch_context_create("cpu", &context));
    tch_optim_config shampoo = tch_optim_defaults(TCH_OPTIM_SHAMPOO), adamw = tch_optim_defaults(TCH_OPTIM_ADAMW);
    shampoo.lr = 0.1;
    shampoo.precondition_frequency = 5; /* new roots at every fifth step, */
    shampoo.refresh_drift = 0.0;        /* not by need */
    shampoo.grafting = TCH_GRAFTING_ADAM;
    adamw.lr = 0.1;
    adamw.weight_decay = 0.0;
    double with_shampoo = minimize(context, &shampoo), with_adamw = minimize(context, &adamw);
    printf("after %d steps, of the first value: Shampoo %.1e, AdamW %.1e\n", STEPS, with_shampoo, with_adamw);
    tch_context_destroy(context);
    return with_shampoo < with_adamw ? 0 : 1;
}

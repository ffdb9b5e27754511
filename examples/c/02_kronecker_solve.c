/* One KFAC step for a linear layer: factors from activations and output gradients, then the preconditioned gradient
 * (G + pi sqrt(g) I)^-1 grad (A + sqrt(g)/pi I)^-1, without ever forming the Kronecker product of the factors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/torchium.h>

enum { SAMPLES = 64, INPUTS = 96, OUTPUTS = 40 };

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

/* Numbers between -1 and 1; columns shrink, so that the factors are ill-conditioned as real ones are. */
static void fill(float *x, int rows, int cols, uint64_t seed)
{
    for (int i = 0; i < rows * cols; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)((double)(seed >> 40) / 0x1p23 - 1.0) / (float)(1 + i % cols);
    }
}

static double dot(const float *x, const float *y, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)x[i] * y[i];
    }
    return sum;
}

static double trace(const float *a, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++) {
        sum += a[i * n + i];
    }
    return sum;
}

static void add_to_diagonal(float *a, int n, double shift)
{
    for (int i = 0; i < n; i++) {
        a[i * n + i] += (float)shift;
    }
}

int main(void)
{
    static float inputs[SAMPLES * INPUTS], outputs[SAMPLES * OUTPUTS];
    static float factor_a[INPUTS * INPUTS], factor_g[OUTPUTS * OUTPUTS];
    static float gradient[OUTPUTS * INPUTS], step[OUTPUTS * INPUTS], back[OUTPUTS * INPUTS];
    int64_t in_shape[] = {SAMPLES, INPUTS}, out_shape[] = {SAMPLES, OUTPUTS}, weight_shape[] = {OUTPUTS, INPUTS};
    int64_t a_shape[] = {INPUTS, INPUTS}, g_shape[] = {OUTPUTS, OUTPUTS};
    tch_tensor x = tch_tensor_view(inputs, TCH_FLOAT32, 2, in_shape);
    tch_tensor y = tch_tensor_view(outputs, TCH_FLOAT32, 2, out_shape);
    tch_tensor a = tch_tensor_view(factor_a, TCH_FLOAT32, 2, a_shape);
    tch_tensor g = tch_tensor_view(factor_g, TCH_FLOAT32, 2, g_shape);
    tch_tensor grad = tch_tensor_view(gradient, TCH_FLOAT32, 2, weight_shape);
    tch_tensor direction = tch_tensor_view(step, TCH_FLOAT32, 2, weight_shape);
    tch_tensor product = tch_tensor_view(back, TCH_FLOAT32, 2, weight_shape);
    const double damping = 1e-3, mean = 1.0 / SAMPLES;
    fill(inputs, SAMPLES, INPUTS, 1);
    fill(outputs, SAMPLES, OUTPUTS, 2);

    tch_context *context;
    must(tch_context_create("cpu", &context));
    must(tch_gram(context, mean, &x, 1, 0.0, &a));           /* A = x'x / samples */
    must(tch_gram(context, mean, &y, 1, 0.0, &g));           /* G = y'y / samples */
    must(tch_gemm(context, mean, &y, 1, &x, 0, 0.0, &grad)); /* grad = y'x / samples */
    must(tch_kronecker_solve(context, &g, &a, &grad, damping, &direction, NULL));

    /* The check: damp the factors by hand and multiply back. (G (x) A) vec(X) is vec(G X A'). */
    double pi = sqrt(trace(factor_g, OUTPUTS) / OUTPUTS / (trace(factor_a, INPUTS) / INPUTS));
    add_to_diagonal(factor_g, OUTPUTS, pi * sqrt(damping));
    add_to_diagonal(factor_a, INPUTS, sqrt(damping) / pi);
    must(tch_kronecker_apply(context, &g, &a, &direction, &product));
    tch_context_destroy(context);

    const int weights = OUTPUTS * INPUTS;
    double norm = sqrt(dot(gradient, gradient, weights));
    double cosine = dot(gradient, step, weights) / norm / sqrt(dot(step, step, weights));
    for (int i = 0; i < weights; i++) {
        back[i] -= gradient[i];
    }
    double residual = sqrt(dot(back, back, weights)) / norm;
    printf("layer %d -> %d, %d samples, damping %g, pi %.3f\n", INPUTS, OUTPUTS, SAMPLES, damping, pi);
    printf("residual |G D A - grad| / |grad| = %.1e, cosine to the gradient %.3f\n", residual, cosine);
    return residual < 1e-5 && cosine > 0 ? 0 : 1;
}

/* Per-sample gradients: a linear regression whose batch has one measurement that went wrong. Its gradient drowns the
 * others in the plain mean; the norms say which sample it is, and clipping every sample to the same norm bounds what
 * any one of them can do. Neither forms the gradients themselves. */
#include "example.h"

enum { SAMPLES = 8, INPUTS = 5, OUTPUTS = 3, OUTLIER = 5 };

/* Numbers between -1 and 1. */
static void fill(float *x, int count, uint64_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)((double)(seed >> 40) / 0x1p23 - 1.0);
    }
}

/* With weights of 0 the error y - t is -t, and the gradient of |y - t|^2 / 2 with respect to y is the error. */
static void make_batch(float *x, float *errors)
{
    static float truth[OUTPUTS * INPUTS];
    fill(x, SAMPLES * INPUTS, 1);
    fill(truth, OUTPUTS * INPUTS, 2);
    for (int i = 0; i < SAMPLES * OUTPUTS; i++) {
        errors[i] = 0.0f;
        for (int k = 0; k < INPUTS; k++) {
            errors[i] -= truth[i % OUTPUTS * INPUTS + k] * x[i / OUTPUTS * INPUTS + k];
        }
        errors[i] += i / OUTPUTS == OUTLIER ? 100.0f : 0.0f;
    }
}

static double length_of(const float *x, int count)
{
    double sum = 0.0;
    for (int i = 0; i < count; i++) {
        sum += (double)x[i] * x[i];
    }
    return sqrt(sum);
}

int main(void)
{
    static float x[SAMPLES * INPUTS], errors[SAMPLES * OUTPUTS], weight[OUTPUTS * INPUTS], bias[OUTPUTS];
    double norms[SAMPLES], weights[SAMPLES];
    int64_t input_shape[] = {SAMPLES, INPUTS}, output_shape[] = {SAMPLES, OUTPUTS};
    int64_t weight_shape[] = {OUTPUTS, INPUTS}, bias_shape[] = {OUTPUTS}, sample_shape[] = {SAMPLES};
    tch_tensor X = tch_tensor_view(x, TCH_FLOAT32, 2, input_shape);
    tch_tensor E = tch_tensor_view(errors, TCH_FLOAT32, 2, output_shape);
    tch_tensor W = tch_tensor_view(weight, TCH_FLOAT32, 2, weight_shape);
    tch_tensor B = tch_tensor_view(bias, TCH_FLOAT32, 1, bias_shape);
    tch_tensor norms_of = tch_tensor_view(norms, TCH_FLOAT64, 1, sample_shape);
    tch_tensor weights_of = tch_tensor_view(weights, TCH_FLOAT64, 1, sample_shape);
    const tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    tch_context *context;
    must(tch_context_create("cpu", &context));
    make_batch(x, errors);
    must(tch_grad_norms(context, &layer, &X, &E, TCH_GRAD_BOTH, 0, &norms_of));
    must(tch_grad_clip_weights(context, &norms_of, 1.0, &weights_of));
    printf("sample  gradient's norm  weight\n");
    for (int i = 0; i < SAMPLES; i++) {
        printf("%6d  %15.3f  %6.3f%s\n", i, sqrt(norms[i]), weights[i], i == OUTLIER ? "  <- went wrong" : "");
    }
    must(tch_grad_weighted_sum(context, &layer, &X, &E, NULL, 0.0, &W, &B));
    double plain = hypot(length_of(weight, OUTPUTS * INPUTS), length_of(bias, OUTPUTS)) / SAMPLES;
    must(tch_grad_weighted_sum(context, &layer, &X, &E, &weights_of, 0.0, &W, &B));
    double clipped = hypot(length_of(weight, OUTPUTS * INPUTS), length_of(bias, OUTPUTS)) / SAMPLES;
    printf("norm of the mean gradient: %.3f as it is, %.3f clipped\n", plain, clipped);
    tch_context_destroy(context);
    return clipped <= 1.0 && weights[OUTLIER] < 0.1 ? 0 : 1;
}

#include "shared_kfac.h"

#include "support/testing.h"

#define SAMPLES 24

/* Layers of equal and of different sizes, so that ranks share block batches. */
static const struct {
    int64_t inputs, outputs;
    int32_t bias;
} model[KFAC_LAYERS] = {{9, 6, 1}, {10, 6, 0}, {9, 6, 1}, {4, 12, 1}, {12, 4, 0}, {20, 20, 1}, {9, 6, 1}};

void shared_kfac_describe(tch_kfac_layer *layers)
{
    for (int32_t i = 0; i < KFAC_LAYERS; i++) {
        const tch_layer linear = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
        layers[i] = (tch_kfac_layer){linear, model[i].inputs, model[i].outputs, model[i].bias, NULL};
    }
}

static tch_tensor view(double *data, int64_t *shape, int32_t ndim)
{
    return tch_tensor_view(data, TCH_FLOAT64, ndim, shape);
}

tch_status shared_kfac_observe(tch_kfac *kfac, test_random *random)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < KFAC_LAYERS && status == TCH_OK; i++) {
        double input[KFAC_MOST_ELEMENTS];
        double output[KFAC_MOST_ELEMENTS];
        int64_t in[2] = {SAMPLES, model[i].inputs};
        int64_t out[2] = {SAMPLES, model[i].outputs};
        test_random_fill_normal(random, input, in[0] * in[1]);
        test_random_fill_normal(random, output, out[0] * out[1]);
        const tch_tensor a = view(input, in, 2);
        const tch_tensor g = view(output, out, 2);
        status = tch_kfac_observe(kfac, i, &a, &g, 1.0, NULL);
    }
    return status;
}

static tch_status precondition_all(tch_kfac *kfac, test_random *random, double *values)
{
    tch_tensor tensors[2 * KFAC_LAYERS];
    tch_tensor *gradients[2 * KFAC_LAYERS];
    int64_t shapes[2 * KFAC_LAYERS][2];
    for (int32_t i = 0; i < 2 * KFAC_LAYERS; i++) {
        bool bias = i % 2 == 1;
        shapes[i][0] = model[i / 2].outputs;
        shapes[i][1] = bias ? 1 : model[i / 2].inputs;
        test_random_fill_normal(random, values + i * KFAC_MOST_ELEMENTS, shapes[i][0] * shapes[i][1]);
        tensors[i] = view(values + i * KFAC_MOST_ELEMENTS, shapes[i], bias ? 1 : 2);
        gradients[i] = bias && !model[i / 2].bias ? NULL : &tensors[i];
    }
    return tch_kfac_precondition(kfac, 0.5, 2 * KFAC_LAYERS, gradients);
}

tch_status shared_kfac_step(tch_kfac *kfac, int32_t step, double *gradients)
{
    test_random random = test_random_stream(2300 + (uint64_t)step);
    tch_status status = shared_kfac_observe(kfac, &random);
    if (status == TCH_OK && step % 2 == 0) {
        status = tch_kfac_refresh(kfac);
    }
    return status == TCH_OK ? precondition_all(kfac, &random, gradients) : status;
}

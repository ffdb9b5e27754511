/* KFAC captured in a CUDA graph and replayed: factors and gradients must go the same way, to the bit, as with calls.
 * The weights of the averages are fixed in a graph, so they are the constant ones here, without bias correction; and
 * bases are made anew by calls only, since NVIDIA's eigensolver waits. */
#include "support/cuda/graphs.h"

enum { LAYERS = 3, SAMPLES = 24, WARM = 3, REPLAYS = 5 };

static const int64_t inputs[LAYERS] = {40, 33, 40};
static const int64_t outputs[LAYERS] = {33, 20, 33};

typedef struct training {
    tch_kfac *kfac;
    bool refresh; /* in every step */
    test_tensor *input[LAYERS], *output_gradient[LAYERS], *gradient[2 * LAYERS];
    tch_tensor *gradients[2 * LAYERS];
} training;

static test_tensor *make(tch_context *context, int32_t ndim, int64_t rows, int64_t cols)
{
    return test_tensor_make(context, TCH_FLOAT32, ndim, (const int64_t[]){rows, cols}, LAYOUT_CONTIGUOUS);
}

static training begin(tch_context *context, const tch_kfac_config *config)
{
    training t = {.refresh = true};
    tch_kfac_layer layers[LAYERS] = {0};
    for (int i = 0; i < LAYERS; i++) {
        layers[i] = (tch_kfac_layer){TCH_LAYER_INIT(TCH_LAYER_LINEAR), inputs[i], outputs[i], 1, NULL};
        t.input[i] = make(context, 2, SAMPLES, inputs[i]);
        t.output_gradient[i] = make(context, 2, SAMPLES, outputs[i]);
        t.gradient[2 * i] = make(context, 2, outputs[i], inputs[i]);
        t.gradient[2 * i + 1] = make(context, 1, outputs[i], 0);
    }
    for (int i = 0; i < 2 * LAYERS; i++) {
        t.gradients[i] = &t.gradient[i]->tensor;
    }
    CHECK_OK(tch_kfac_create(context, config, NULL, LAYERS, layers, &t.kfac));
    return t;
}

static void end(training *t)
{
    tch_kfac_destroy(t->kfac);
    for (int i = 0; i < LAYERS; i++) {
        test_tensor_free(t->input[i]);
        test_tensor_free(t->output_gradient[i]);
        test_tensor_free(t->gradient[2 * i]);
        test_tensor_free(t->gradient[2 * i + 1]);
    }
}

static void draw(training *t, int step)
{
    uint64_t stream = 100 * (uint64_t)(step + 1);
    for (int i = 0; i < LAYERS; i++) {
        test_tensor_draw(t->input[i], stream++);
        test_tensor_draw(t->output_gradient[i], stream++);
        test_tensor_draw(t->gradient[2 * i], stream++);
        test_tensor_draw(t->gradient[2 * i + 1], stream++);
    }
}

static tch_status step(const void *data)
{
    training *t = (training *)data;
    for (int32_t i = 0; i < LAYERS; i++) {
        tch_status status =
            tch_kfac_observe(t->kfac, i, &t->input[i]->tensor, &t->output_gradient[i]->tensor, 1.0, NULL);
        if (status != TCH_OK) {
            return status;
        }
    }
    tch_status status = t->refresh ? tch_kfac_refresh(t->kfac) : TCH_OK;
    return status == TCH_OK ? tch_kfac_precondition(t->kfac, 0.1, 2 * LAYERS, t->gradients) : status;
}

static void check_method(tch_context *context, tch_kfac_method method, bool refresh)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.method = method;
    config.bias_correction = 0;
    test_case("method %d, %s", (int)method, refresh ? "with a refresh" : "without a refresh");
    cudaStream_t stream = test_enter_stream(context);
    training called = begin(context, &config);
    training replayed = begin(context, &config);
    for (int i = 0; i < WARM; i++) {
        draw(&called, i);
        draw(&replayed, i);
        CHECK_OK(step(&called));
        CHECK_OK(step(&replayed));
    }
    called.refresh = replayed.refresh = refresh;
    cudaGraphExec_t graph = test_capture(stream, step, &replayed);
    for (int i = WARM; i < WARM + REPLAYS; i++) {
        draw(&called, i);
        draw(&replayed, i);
        CHECK_OK(step(&called));
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
        CHECK_OK(tch_context_synchronize(context));
        test_check_same(2 * LAYERS, called.gradient, replayed.gradient);
    }
    end(&called);
    end(&replayed);
    test_leave_stream(context, stream, graph);
}

static void steps_are_captured_and_replayed(void **state)
{
    check_method(*state, TCH_KFAC_INVERSE, true);
    check_method(*state, TCH_KFAC_EIGEN, false);
    check_method(*state, TCH_KFAC_EKFAC, false);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_captured_and_replayed),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

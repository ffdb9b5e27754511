/* KFAC over twenty steps of observing, refreshing and preconditioning against a plain float64 version of it, for every
 * method and the options people combine. support/grad/kfac_trial.c has the reference and the bounds. */
#include "support/grad/kfac_trial.h"
#include "support/testing.h"

#define LINEAR TCH_LAYER_INIT(TCH_LAYER_LINEAR)
#define CONV(dims_, k0, k1, stride_, before_, after_, groups_)                                                         \
    {                                                                                                                  \
        .struct_size = sizeof(tch_layer), .kind = TCH_LAYER_CONV, .rounded = 0, .scale = 1.0, .dims = (dims_),         \
        .kernel = {k0, k1, 1}, .stride = {stride_, 1, 1}, .dilation = {1, 1, 1}, .before = {before_, 0, 0},            \
        .after = {after_, 0, 0}, .groups = (groups_), .padding_index = -1, .normalized = 1, .eps = 1e-5                \
    }

/* With its bias the first layer has the sizes of the second, so that both are of one class. */
static const test_layer_case cases[] = {
    {"first", LINEAR, 12, 4, 3, {1}},
    {"second", LINEAR, 8, 5, 3, {3}},
    {"third", LINEAR, 11, 6, 5, {2}},
    {"conv", CONV(2, 2, 1, 1, 1, 0, 1), 6, 3, 4, {4, 3}},
    {"grouped", CONV(1, 2, 1, 1, 0, 1, 2), 9, 4, 6, {5}},
    {"fourth", LINEAR, 14, 4, 3, {1}},
};
static const test_kfac_layer layers[] = {
    {&cases[0], 1}, {&cases[1], 0}, {&cases[2], 1}, {&cases[3], 1}, {&cases[4], 0}, {&cases[5], 1},
};
#define LAYERS ((int32_t)(sizeof layers / sizeof layers[0]))

static void exact_layers(test_kfac_layer *exact, test_layer_case *copies)
{
    for (int i = 0; i < LAYERS; i++) {
        copies[i] = *layers[i].layer;
        copies[i].layer.rounded = 0;
        exact[i] = (test_kfac_layer){&copies[i], layers[i].bias};
    }
}

static void run(tch_context *context, const tch_kfac_config *config, tch_dtype dtype, double lr, bool little)
{
    test_kfac_layer exact[LAYERS];
    test_layer_case copies[LAYERS];
    exact_layers(exact, copies);
    test_kfac_trial *t = test_kfac_make(context, config, LAYERS, exact, dtype);
    t->little = little;
    for (int step = 0; step < 20; step++) {
        for (int part = 0; part < config->accumulation; part++) {
            for (int32_t i = 0; i < LAYERS; i++) {
                bool late =
                    i == 5 && step < 4; /* not seen at first: refreshed and preconditioned later than the others */
                if (!late) {
                    test_kfac_observe(t, i, i == 2 ? 2.5 : 1.0);
                }
            }
        }
        if (step % 3 == 1) {
            test_kfac_refresh(t);
        }
        test_kfac_draw_gradients(t, step % LAYOUT_COUNT);
        test_kfac_precondition(t, lr);
        test_kfac_check_gradients(t);
    }
}

static void every_method_and_option(void **state)
{
    const char *const methods[] = {"eigen", "inverse", "ekfac"};
    for (int i = 0; i < 3 * 2 * 2 * 2 * 2; i++) {
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        config.method = i % 3;
        config.sharing = i / 3 % 2;
        config.bias_correction = i / 6 % 2;
        config.kl_clip = i / 12 % 2 == 0 ? 0.0 : 1e-3;
        config.accumulation = i / 24 == 0 ? 1 : 3;
        config.damping = 1e-2;
        config.factor_decay = 0.8;
        config.factor_dtype = TCH_FLOAT64;
        test_case("%s, sharing %d, bias_correction %d, kl_clip %g, accumulation %d", methods[config.method],
                  config.sharing, config.bias_correction, config.kl_clip, config.accumulation);
        run(*state, &config, TCH_FLOAT64, 0.1, false);
    }
}

static void other_decays_and_dampings(void **state)
{
    const double decays[] = {0.0, 0.5, 1.0};
    for (int i = 0; i < 18; i++) {
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        config.method = i % 3;
        config.factor_decay = decays[i / 3 % 3];
        config.damping = i / 9 == 0 ? 1.0 : 1e-6;
        config.factor_dtype = TCH_FLOAT64;
        test_case("method %d, factor_decay %g, damping %g", i % 3, config.factor_decay, config.damping);
        run(*state, &config, TCH_FLOAT64, 10.0, false);
    }
}

static void every_type(void **state)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < 3 * 4 * 2; i++) {
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        config.method = i % 3;
        config.damping = 0.1;
        config.factor_dtype = i / 12 == 0 ? TCH_FLOAT32 : TCH_FLOAT64;
        test_case("method %d, %s with factors of %s", i % 3, tch_dtype_name(dtypes[i / 3 % 4]),
                  tch_dtype_name(config.factor_dtype));
        run(*state, &config, dtypes[i / 3 % 4], 0.1, false);
    }
}

/* So little workspace that results are not kept, and samples, factors and layers go a few at a time. */
static void little_workspace(void **state)
{
    for (int i = 0; i < 6; i++) {
        tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
        config.method = i % 3;
        config.damping = 1e-2;
        config.kl_clip = i / 3 == 0 ? 1e-3 : 0.0;
        config.factor_dtype = TCH_FLOAT64;
        test_case("method %d, kl_clip %g, little workspace", i % 3, config.kl_clip);
        run(*state, &config, TCH_FLOAT64, 0.1, true);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_method_and_option),
        cmocka_unit_test(other_decays_and_dampings),
        cmocka_unit_test(every_type),
        cmocka_unit_test(little_workspace),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

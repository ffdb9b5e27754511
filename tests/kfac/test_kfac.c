/* KFAC over twenty steps of observing, refreshing and preconditioning against a plain float64 version of it, for every
 * method and the options people combine. support/grad/kfac_trial.c has the reference and the bounds. */
#include "support/grad/kfac_trial.h"
#include "support/testing.h"

#define LINEAR                                                                                                         \
    {                                                                                                                  \
        .struct_size = sizeof(tch_layer), .kind = TCH_LAYER_LINEAR, .rounded = 0, .scale = 1.0, .groups = 1            \
    }
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
#define LAYERS ((int32_t)TEST_COUNT(layers))

/* The last layer is not seen at first: it is refreshed and preconditioned later than the others. */
static void check_steps(tch_context *context, const tch_kfac_config *config, tch_dtype dtype, double lr, bool little)
{
    test_kfac_trial *t = test_kfac_make(context, config, LAYERS, layers, dtype);
    t->little = little;
    for (int step = 0; step < 20; step++) {
        int32_t count = step < 4 ? LAYERS - 1 : LAYERS;
        for (int32_t k = 0; k < config->accumulation * count; k++) {
            test_kfac_observe(t, k % count, k % count == 2 ? 2.5 : 1.0);
        }
        if (step % 3 == 1) {
            test_kfac_refresh(t);
        }
        test_kfac_draw_gradients(t, step % LAYOUT_COUNT);
        test_kfac_precondition(t, lr);
        test_kfac_check_gradients(t);
    }
}

static tch_kfac_config config_of(int method, double damping)
{
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.method = (tch_kfac_method)method;
    config.damping = damping;
    config.factor_dtype = TCH_FLOAT64;
    return config;
}

static void every_method_and_option(void **state)
{
    const char *const methods[] = {"eigen", "inverse", "ekfac"};
    for (int i = 0; i < 3 * 2 * 2 * 2 * 2; i++) {
        tch_kfac_config config = config_of(i % 3, 1e-2);
        config.sharing = i / 3 % 2;
        config.bias_correction = i / 6 % 2;
        config.kl_clip = i / 12 % 2 == 0 ? 0.0 : 1e-3;
        config.accumulation = i / 24 == 0 ? 1 : 3;
        config.factor_decay = 0.8;
        test_case("%s, sharing %d, bias_correction %d, kl_clip %g, accumulation %d", methods[config.method],
                  config.sharing, config.bias_correction, config.kl_clip, config.accumulation);
        check_steps(*state, &config, TCH_FLOAT64, 0.1, false);
    }
}

static void other_decays_and_dampings(void **state)
{
    const double decays[] = {0.0, 0.5, 1.0};
    for (int i = 0; i < 18; i++) {
        tch_kfac_config config = config_of(i % 3, i / 9 == 0 ? 1.0 : 1e-6);
        config.factor_decay = decays[i / 3 % 3];
        test_case("method %d, factor_decay %g, damping %g", i % 3, config.factor_decay, config.damping);
        check_steps(*state, &config, TCH_FLOAT64, 10.0, false);
    }
}

static void every_type(void **state)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < 3 * 4 * 2; i++) {
        tch_kfac_config config = config_of(i % 3, 0.1);
        config.factor_dtype = i / 12 == 0 ? TCH_FLOAT32 : TCH_FLOAT64;
        test_case("method %d, %s with factors of %s", i % 3, tch_dtype_name(dtypes[i / 3 % 4]),
                  tch_dtype_name(config.factor_dtype));
        check_steps(*state, &config, dtypes[i / 3 % 4], 0.1, false);
    }
}

/* So little workspace that results are not kept, and samples, factors and layers go a few at a time. */
static void little_workspace(void **state)
{
    for (int i = 0; i < 6; i++) {
        tch_kfac_config config = config_of(i % 3, 1e-2);
        config.kl_clip = i / 3 == 0 ? 1e-3 : 0.0;
        test_case("method %d, kl_clip %g, little workspace", i % 3, config.kl_clip);
        check_steps(*state, &config, TCH_FLOAT64, 0.1, true);
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

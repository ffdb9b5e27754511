/* KFAC over twenty steps of observing, refreshing and preconditioning vs a plain float64 reference, for every method
 * and combination of options; support/grad/kfac_trial.c has the reference and the bounds. Then vs a dense solve with
 * the Fisher matrix, and with factors whose rounding errors exceed the damping. */
#include "support/grad/kfac_trial.h"
#include "support/linalg/reference.h"
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

/* With its bias the first layer has the sizes of the second, so that both are in one class. */
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

/* The last layer is not observed at first: it is refreshed and preconditioned later than the others. */
static void check_steps(tch_context *context, const tch_kfac_config *config, tch_dtype dtype, double lr, bool little)
{
    test_kfac_trial *t = test_kfac_make(context, config, LAYERS, layers, dtype);
    t->little = little;
    for (int step = 0; step < 20; step++) {
        int32_t count = step < 4 ? LAYERS - 1 : LAYERS;
        for (int32_t k = 0; k < config->accumulation_steps * count; k++) {
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

TEST(every_method_and_option)
{
    const char *const methods[] = {"eigen", "inverse", "ekfac"};
    for (int i = 0; i < 3 * 2 * 2 * 2 * 2; i++) {
        tch_kfac_config config = config_of(i % 3, 1e-2);
        config.sharing = i / 3 % 2;
        config.use_bias_correction = i / 6 % 2;
        config.kl_clip = i / 12 % 2 == 0 ? 0.0 : 1e-3;
        config.accumulation_steps = i / 24 == 0 ? 1 : 3;
        config.factor_decay = 0.8;
        test_case("%s, sharing %d, bias_correction %d, kl_clip %g, accumulation %d", methods[config.method],
                  config.sharing, config.use_bias_correction, config.kl_clip, config.accumulation_steps);
        check_steps(*state, &config, TCH_FLOAT64, 0.1, false);
    }
}

TEST(other_decays_and_dampings)
{
    const double decays[] = {0.0, 0.5, 1.0};
    for (int i = 0; i < 18; i++) {
        tch_kfac_config config = config_of(i % 3, i / 9 == 0 ? 1.0 : 1e-6);
        config.factor_decay = decays[i / 3 % 3];
        test_case("method %d, factor_decay %g, damping %g", i % 3, config.factor_decay, config.damping);
        check_steps(*state, &config, TCH_FLOAT64, 10.0, false);
    }
}

TEST(every_type)
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

/* So little workspace that results are not kept, and samples, factors and layers are processed a few at a time. */
TEST(little_workspace)
{
    for (int i = 0; i < 6; i++) {
        tch_kfac_config config = config_of(i % 3, 1e-2);
        config.kl_clip = i / 3 == 0 ? 1e-3 : 0.0;
        test_case("method %d, kl_clip %g, little workspace", i % 3, config.kl_clip);
        check_steps(*state, &config, TCH_FLOAT64, 0.1, true);
    }
}

/* --- against dense matrices -------------------------------------------------------------------------------------- */

/* (a + shift I)^-1 by eigenvectors. */
static double *invert_shifted(int64_t n, const double *a, double shift)
{
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    ref_eigh(n, a, w, v);
    return ref_power(n, w, v, shift, -1.0);
}

enum { D = 4, P = 3, SAMPLES = 9, SIZE = D * P };

/* E[v v'] of the per-sample gradients v = g (x) a. */
static void empirical_fisher(const test_positions *batch, double *fisher)
{
    for (int64_t i = 0; i < SAMPLES; i++) {
        double v[SIZE];
        for (int k = 0; k < SIZE; k++) {
            v[k] = batch->g[i * P + k / D] * batch->a[i * D + k % D];
        }
        for (int k = 0; k < SIZE * SIZE; k++) {
            fisher[k] += v[k / SIZE] * v[k % SIZE] / SAMPLES;
        }
    }
}

/* If all samples have one output gradient, the Fisher matrix is E[a a'] (x) g g': KFAC is exact, and in the eigenbasis
 * its step is the damped natural gradient step. */
TEST(eigen_steps_are_natural_gradient_steps)
{
    static const test_layer_case layer_case = {"layer", LINEAR, SAMPLES, D, P, {1}};
    const test_kfac_layer layer = {&layer_case, 0};
    for (int method = TCH_KFAC_EIGEN; method <= TCH_KFAC_EKFAC; method += TCH_KFAC_EKFAC - TCH_KFAC_EIGEN) {
        tch_kfac_config config = config_of(method, 1e-2);
        config.factor_decay = 0.0;
        config.kl_clip = 0.0;
        test_case("method %d, one output gradient", method);
        test_kfac_trial *t = test_kfac_make(*state, &config, 1, &layer, TCH_FLOAT64);
        test_positions batch = test_positions_make(*state, &layer_case, TCH_FLOAT64, LAYOUT_CONTIGUOUS, 60);
        for (int64_t i = P; i < SAMPLES * P; i++) {
            batch.g[i] = batch.g[i % P];
        }
        test_tensor_write(batch.gradient, batch.g);
        for (int round = 0; round < 2; round++) { /* the second makes EKFAC's scales */
            CHECK_OK(tch_kfac_observe(t->kfac, 0, &batch.input->tensor, &batch.gradient->tensor, 1.0, NULL));
            CHECK_OK(round == 0 ? tch_kfac_refresh(t->kfac) : TCH_OK);
        }
        double fisher[SIZE * SIZE] = {0}, expected[SIZE];
        test_kfac_draw_gradients(t, LAYOUT_CONTIGUOUS);
        tch_tensor *gradients[2] = {&t->gradients[0]->tensor, NULL};
        empirical_fisher(&batch, fisher);
        ref_matmul(SIZE, SIZE, 1, invert_shifted(SIZE, fisher, config.damping), test_tensor_read(t->gradients[0]),
                   expected);
        CHECK_OK(tch_kfac_precondition(t->kfac, 1.0, 2, gradients));
        double off = ref_distance(SIZE, test_tensor_read(t->gradients[0]), expected) / ref_norm(SIZE, expected);
        CHECK(off <= 1e-10, "off by %.3g of its size", off);
    }
}

/* With 3 samples all but three eigenvalues of a factor are rounding errors, some of them negative and larger than this
 * damping: the damping must include the factor's rounding error, 2 u times its trace. */
TEST(rounding_errors_of_factors_are_damped)
{
    enum { N = 48 };
    static const char *const factors[] = {"input_factor", "output_factor"};
    static const char *const inverses[] = {"input_inverse", "output_inverse"};
    static const test_layer_case layer_case = {"wide", LINEAR, 3, N, N, {1}};
    const test_kfac_layer layer = {&layer_case, 0};
    tch_kfac_config config = config_of(TCH_KFAC_INVERSE, 1e-18);
    tch_kfac_stats stats = TCH_KFAC_STATS_INIT;
    config.factor_dtype = TCH_FLOAT32;
    config.factor_decay = 0.0;
    test_case("factors of rank 3");
    test_kfac_trial *t = test_kfac_make(*state, &config, 1, &layer, TCH_FLOAT32);
    test_kfac_observe(t, 0, 1.0);
    CHECK_OK(tch_kfac_refresh(t->kfac));
    CHECK_OK(tch_kfac_get_stats(t->kfac, &stats));
    CHECK(stats.failed == 0 && stats.worst_residual < 1e-3, "%lld layers failed, the residual is %g",
          (long long)stats.failed, stats.worst_residual);
    double *f[2], traces[2];
    for (int side = 0; side < 2; side++) {
        f[side] = test_kfac_state(t, 0, factors[side], &(int64_t){0});
        traces[side] = ref_trace(N, f[side]);
    }
    for (int side = 0; side < 2; side++) {
        double *got = test_kfac_state(t, 0, inverses[side], &(int64_t){0});
        double damping = sqrt(config.damping * traces[side] / traces[1 - side]);
        double *expected = invert_shifted(N, f[side], damping + 0x1p-23 * traces[side]);
        double off = ref_distance(N * N, got, expected) / ref_norm(N * N, expected);
        CHECK(off <= 1e-6, "%s is off by %.3g of its size", inverses[side], off);
    }
}

TEST_MAIN(test_open_context, test_close_context)

/* Loss scaling: the state machine against PyTorch's rules, unscaling and the search for infinities over every layout
 * and dtype, and steps that are skipped if there is an infinity and equal to unscaled ones otherwise. */

#include <torchium/amp.h>

#include "support/bad_input.h"
#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

static const trial_shape shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 0},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_scaler_state state_of(tch_scaler *scaler)
{
    tch_scaler_state state = TCH_SCALER_STATE_INIT;
    CHECK_OK(tch_scaler_get_state(scaler, &state));
    return state;
}

static double number_in(tch_context *context, const tch_tensor *tensor)
{
    float value = NAN;
    tch_tensor host = tch_tensor_view(&value, TCH_FLOAT32, 0, NULL);
    CHECK_OK(tch_tensor_copy(context, &host, tensor));
    CHECK_OK(tch_context_synchronize(context));
    return value;
}

/* --- unscaling and search ---------------------------------------------------------------------------------------- */

/* Every writable layout and every dtype: each element is divided once and rounded once. */
static void check_division(tch_context *context, tch_dtype dtype, test_layout layout, const int64_t *sizes)
{
    tch_scaler *scaler = NULL;
    tch_scaler_config config = TCH_SCALER_CONFIG_INIT;
    test_random random = test_random_stream(17);
    config.init_scale = 48.0; /* no power of two, so that rounding shows */
    CHECK_OK(tch_scaler_create(context, &config, &scaler));
    test_tensor *g = test_tensor_make(context, dtype, 3, sizes, layout);
    double *values = test_alloc((size_t)g->count * sizeof *values);
    for (int64_t i = 0; i < g->count; i++) {
        values[i] = test_round(dtype, 100.0 * test_random_normal(&random));
    }
    test_tensor_write(g, values);
    tch_tensor *list[] = {NULL, &g->tensor};
    CHECK_OK(tch_scaler_unscale(scaler, 2, list));
    double *got = test_tensor_read(g);
    double unit = test_unit_roundoff(dtype) + 2.0 * test_arithmetic_roundoff(dtype); /* multiplies by 1/scale */
    for (int64_t i = 0; i < g->count; i++) {
        double expected = values[i] / 48.0;
        double bound = unit * fabs(expected) * 1.01 + test_underflow(dtype);
        CHECK(fabs(got[i] - expected) <= bound, "element %lld is %.9g, expected %.9g", (long long)i, got[i], expected);
    }
    test_tensor_check_written(g, "the gradient");
    CHECK(number_in(context, tch_scaler_found_inf(scaler)) == 0.0, "an infinity was found");
    tch_scaler_destroy(scaler);
}

TEST(every_layout_is_divided)
{
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    const int64_t sizes[][3] = {{3, 5, 7}, {1, 9, 1}, {2, 1, 6}, {0, 4, 4}, {4, 33, 70}};
    for (int t = 0; t < 4; t++) {
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            for (int s = 0; s < 5; s++) {
                test_case("%s %s, case %d", tch_dtype_name(types[t]), test_layout_name((test_layout)layout), s);
                check_division(*state, types[t], (test_layout)layout, sizes[s]);
            }
        }
    }
}

/* One bad element, first, last or in the middle, in one of several gradients of all dtypes, is found by unscaling and
 * by the search, which does not change gradients. */
TEST(every_infinity_is_found)
{
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    const double bad[] = {INFINITY, -INFINITY, NAN};
    const int64_t sizes[] = {4, 9, 5};
    tch_context *context = *state;
    for (int k = 0; k < 2 * 4 * 3 * 3; k++) {
        bool divide = k % 2 == 0;
        int variant = k / 2;
        tch_scaler *scaler = NULL;
        test_tensor *g[4];
        tch_tensor *list[4];
        double values[180];
        CHECK_OK(tch_scaler_create(context, NULL, &scaler));
        for (int i = 0; i < 4; i++) {
            for (int at = 0; at < 180; at++) {
                values[at] = at;
            }
            values[variant / 12 * 179 / 2] = i == variant % 4 ? bad[variant / 4 % 3] : 1.0;
            g[i] = test_tensor_make(context, types[i], 3, sizes, (test_layout)(variant % LAYOUT_COUNT));
            test_tensor_write(g[i], values);
            list[i] = &g[i]->tensor;
        }
        test_case("%g in a gradient of %s, place %d, %s", bad[variant / 4 % 3], tch_dtype_name(types[variant % 4]),
                  variant / 12, divide ? "divided" : "looked at");
        CHECK_OK(divide ? tch_scaler_unscale(scaler, 4, list)
                        : tch_scaler_check(scaler, 4, (const tch_tensor *const *)list));
        CHECK(number_in(context, tch_scaler_found_inf(scaler)) != 0.0, "it was not found");
        CHECK_OK(tch_scaler_update(scaler));
        CHECK(number_in(context, tch_scaler_found_inf(scaler)) == 0.0, "the flag was not cleared");
        CHECK(number_in(context, tch_scaler_scale(scaler)) == 32768.0, "the scale did not fall");
        for (int i = 0; i < 4; i++) {
            if (!divide) {
                test_tensor_check_unchanged(g[i], "the gradient");
            }
        }
        tch_scaler_destroy(scaler);
    }
}

/* --- the state machine ------------------------------------------------------------------------------------------- */

/* PyTorch's rule: an infinity multiplies the scale by the backoff factor and resets the count; `interval` good steps in
 * a row multiply it by the growth factor, unless that overflows float32. */
static void follow(float *scale, int32_t *tracker, bool bad, const tch_scaler_config *c)
{
    if (bad) {
        *scale = (float)(*scale * c->backoff_factor);
        *tracker = 0;
    } else if (++*tracker == c->growth_interval) {
        float grown = (float)(*scale * c->growth_factor);
        *scale = isfinite(grown) ? grown : *scale;
        *tracker = 0;
    }
}

static void run_machine(tch_context *context, const tch_scaler_config *config, uint64_t stream, double share)
{
    tch_scaler *scaler = NULL;
    test_random random = test_random_stream(stream);
    const int64_t size = 5;
    float scale = (float)config->init_scale;
    int32_t tracker = 0;
    CHECK_OK(tch_scaler_create(context, config, &scaler));
    test_tensor *g = test_tensor_make(context, TCH_FLOAT32, 1, &size, LAYOUT_CONTIGUOUS);
    for (int i = 0; i < 60; i++) {
        bool bad = test_random_uniform(&random) < share;
        const double values[] = {1e-20, 2e-20, bad ? INFINITY : 3e-20, 4e-20, 5e-20}; /* finite after division */
        tch_tensor *list[] = {&g->tensor};
        test_tensor_write(g, values);
        CHECK_OK(tch_scaler_unscale(scaler, 1, list));
        CHECK_OK(tch_scaler_update(scaler));
        follow(&scale, &tracker, bad, config);
        tch_scaler_state now = state_of(scaler);
        CHECK(now.scale == scale && now.growth_tracker == tracker, "iteration %d: %.9g and %d, expected %.9g and %d", i,
              now.scale, now.growth_tracker, scale, tracker);
        CHECK(number_in(context, tch_scaler_scale(scaler)) == scale, "the tensor holds another number");
    }
    tch_scaler_destroy(scaler);
}

TEST(the_scale_follows_pytorchs_rule)
{
    static const tch_scaler_config configs[] = {
        {sizeof(tch_scaler_config), 65536.0, 2.0, 0.5, 4, 1},
        {sizeof(tch_scaler_config), 1.0, 1.7, 0.3, 1, 1},
        {sizeof(tch_scaler_config), 1e38, 2.0, 0.5, 3, 1}, /* growth that overflows float32 */
        {sizeof(tch_scaler_config), 1e-3, 1.001, 0.999, 5, 1},
    };
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < 3; k++) {
            test_case("configuration %d, share %d of bad steps", i, k);
            run_machine(*state, &configs[i], (uint64_t)(100 + 10 * i + k), 0.15 * k);
        }
    }
}

TEST(state_goes_out_and_in)
{
    tch_context *context = *state;
    tch_scaler *scaler = NULL;
    tch_scaler_state s = TCH_SCALER_STATE_INIT;
    test_case("defaults");
    CHECK_OK(tch_scaler_create(context, NULL, &scaler));
    s = state_of(scaler);
    CHECK(s.scale == 65536.0 && s.growth_factor == 2.0 && s.backoff_factor == 0.5, "PyTorch's are others");
    CHECK(s.growth_interval == 2000 && s.growth_tracker == 0, "PyTorch's are others");
    test_case("set and read");
    s.scale = 12.0;
    s.growth_factor = 3.0;
    s.backoff_factor = 0.25;
    s.growth_interval = 7;
    s.growth_tracker = 6;
    CHECK_OK(tch_scaler_set_state(scaler, &s));
    tch_scaler_state got = state_of(scaler);
    CHECK(memcmp(&got, &s, sizeof s) == 0, "what was set is not what is read");
    test_case("one good step after it");
    CHECK_OK(tch_scaler_unscale(scaler, 0, NULL));
    CHECK_OK(tch_scaler_update(scaler));
    got = state_of(scaler);
    CHECK(got.scale == 36.0 && got.growth_tracker == 0, "%g and %d", got.scale, got.growth_tracker);
    tch_scaler_destroy(scaler);
    tch_scaler_destroy(NULL);
}

/* --- steps ------------------------------------------------------------------------------------------------------- */

/* The device's gradient is `scale` times the drawn one; with `bad`, one element is an infinity. */
static void scale_gradients(trial *t, double scale, bool bad)
{
    trial_scale_gradients(t, scale);
    if (bad) {
        trial_spoil(t, t->count / 2, INFINITY);
    }
}

/* Unscaled explicitly never (0), always (1), or in every second iteration (2); this has no effect on the next
 * iteration. */
static void run_steps(tch_context *context, tch_optim_kind kind, int unscale)
{
    trial t;
    tch_optim_config config = test_optim_defaults(kind);
    tch_scaler_config how = TCH_SCALER_CONFIG_INIT;
    tch_scaler *scaler = NULL;
    const tch_tensor *gradients[SHAPES];
    tch_tensor *writable[SHAPES];
    config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : 0.0;
    how.growth_interval = 3;
    how.init_scale = 1024.0; /* powers of two: dividing by them is exact */
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &config, SHAPES, shapes);
    CHECK_OK(tch_scaler_create(context, &how, &scaler));
    int64_t skipped = 0;
    for (int i = 0; i < 24; i++) {
        bool bad = i % 5 == 0;
        bool unscale_first = unscale == 1 || (unscale == 2 && i % 2 == 0);
        trial_draw(&t);
        scale_gradients(&t, state_of(scaler).scale, bad);
        trial_list_gradients(&t, gradients);
        for (int32_t k = 0; k < t.count; k++) {
            writable[k] = &t.parameters[k].gradient;
        }
        if (unscale_first) {
            CHECK_OK(tch_scaler_unscale(scaler, t.count, writable));
        }
        CHECK_OK(tch_scaler_step(scaler, t.optimizer, t.count, gradients));
        CHECK((number_in(context, tch_scaler_found_inf(scaler)) != 0.0) == bad, "step %d: the flag is wrong", i);
        for (int32_t k = 0; k < t.count && !unscale_first; k++) {
            test_tensor_check_unchanged(t.parameters[k].gradient_memory, "a gradient");
        }
        CHECK_OK(tch_scaler_update(scaler));
        skipped += bad;
        if (!bad) {
            trial_step_references(&t);
        }
    }
    for (int32_t i = 0; i < t.count; i++) {
        double error = trial_error(&t, i, (double)t.steps);
        CHECK(error < 1e-12, "parameter %d: off by %.3e of the path", i, error);
        test_tensor_check_written(t.parameters[i].memory, "the parameter");
    }
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t.optimizer, &stats));
    CHECK(stats.steps == 24 && stats.skipped == skipped, "%lld steps, %lld skipped", (long long)stats.steps,
          (long long)stats.skipped);
    tch_scaler_destroy(scaler);
}

TEST(steps_with_scaled_gradients)
{
    for (int kind = TCH_OPTIM_SGD; kind <= TCH_OPTIM_ADAMW; kind++) {
        static const char *const names[] = {"scaled", "unscaled first", "unscaled now and then"};
        for (int unscale = 0; unscale < 3; unscale++) {
            test_case("%s, %s", tch_optim_kind_name(kind), names[unscale]);
            run_steps(*state, kind, unscale);
        }
    }
}

/* Two optimizers, one scaler: an infinity in the second one's gradients does not undo the first one's step, and the
 * scale is reduced once. */
TEST(several_optimizers_share_a_scaler)
{
    tch_context *context = *state;
    trial t[2];
    tch_scaler *scaler = NULL;
    test_case("two optimizers");
    CHECK_OK(tch_scaler_create(context, NULL, &scaler));
    for (int k = 0; k < 2; k++) {
        tch_optim_config config = tch_optim_defaults(k == 0 ? TCH_OPTIM_ADAMW : TCH_OPTIM_SGD);
        trial_open(&t[k], context, TCH_FLOAT32, TCH_FLOAT32, &config, SHAPES, shapes);
    }
    for (int k = 0; k < 2; k++) {
        const tch_tensor *gradients[SHAPES];
        trial_draw(&t[k]);
        scale_gradients(&t[k], 65536.0, k == 1);
        trial_list_gradients(&t[k], gradients);
        CHECK_OK(tch_scaler_step(scaler, t[k].optimizer, SHAPES, gradients));
        for (int i = 0; i < SHAPES; i++) {
            CHECK(test_tensor_is_unchanged(t[k].parameters[i].memory) == (k == 1), "optimizer %d, parameter %d", k, i);
        }
    }
    CHECK_OK(tch_scaler_update(scaler));
    CHECK(state_of(scaler).scale == 32768.0, "the scale is %g", state_of(scaler).scale);
    tch_scaler_destroy(scaler);
}

TEST(a_disabled_scaler_does_nothing)
{
    tch_scaler_config how = TCH_SCALER_CONFIG_INIT;
    tch_scaler *scaler = NULL;
    trial t;
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    const tch_tensor *gradients[SHAPES];
    how.enabled = 0;
    test_case("enabled = 0");
    CHECK_OK(tch_scaler_create(*state, &how, &scaler));
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &config, SHAPES, shapes);
    for (int i = 0; i < 5; i++) {
        tch_tensor *writable[] = {&t.parameters[0].gradient};
        trial_draw(&t);
        trial_list_gradients(&t, gradients);
        CHECK_OK(tch_scaler_unscale(scaler, 1, writable));
        CHECK_OK(tch_scaler_step(scaler, t.optimizer, t.count, gradients));
        CHECK_OK(tch_scaler_update(scaler));
        trial_step_references(&t);
    }
    trial_check(&t, 1e-13);
    CHECK(state_of(scaler).scale == 1.0 && state_of(scaler).growth_tracker == 0, "the scale has changed");
    tch_scaler_destroy(scaler);
}

/* --- bad input --------------------------------------------------------------------------------------------------- */

#define FIELD(member) TEST_FIELD(tch_scaler_config, member)

TEST(bad_configurations)
{
    static const test_range ranges[] = {
        {FIELD(init_scale), 0, 5, {0.0, -1.0, NAN, INFINITY, 1e39}},
        {FIELD(growth_factor), 0, 5, {1.0, 0.5, NAN, INFINITY, -2.0}},
        {FIELD(backoff_factor), 0, 5, {0.0, 1.0, NAN, 1.5, -0.5}},
        {FIELD(growth_interval), 0, 5, {0, -1, -2, -3, -4}},
        {FIELD(enabled), 0, 5, {2, 3, 4, 5, 6}},
        {FIELD(struct_size), 0, 1, {sizeof(tch_scaler_config) - 1}},
    };
    tch_scaler *scaler = NULL;
    for (size_t i = 0; i < TEST_COUNT(ranges); i++) {
        for (int k = 0; k < ranges[i].count; k++) {
            tch_scaler_config c = TCH_SCALER_CONFIG_INIT;
            test_case("%s = %g", ranges[i].field.name, ranges[i].bad[k]);
            test_field_set(&c, &ranges[i].field, ranges[i].bad[k]);
            scaler = (tch_scaler *)&c;
            test_check_refused(tch_scaler_create(*state, &c, &scaler), TCH_ERR_INVALID_ARGUMENT, ranges[i].field.name);
            CHECK(scaler == NULL, "a scaler was returned");
        }
    }
    test_check_refused(tch_scaler_create(NULL, NULL, &scaler), TCH_ERR_INVALID_ARGUMENT, "context");
    test_check_refused(tch_scaler_create(*state, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "scaler");
}

TEST(bad_calls)
{
    static const test_flaw flaws[] = {
        {"integers", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_INT, 32, 1}},
        {"repeated elements", TCH_ERR_LAYOUT, PART_STRIDE, 0, {0}},
        {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
    };
    tch_context *context = *state;
    tch_scaler *scaler = NULL;
    const int64_t shape[] = {3, 4};
    const tch_tensor *none[1] = {NULL};
    tch_scaler_state s = TCH_SCALER_STATE_INIT;
    CHECK_OK(tch_scaler_create(context, NULL, &scaler));
    test_tensor *whole = test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS);
    test_broken b;
    tch_tensor *list[] = {NULL, &b.tensor};
    for (size_t i = 0; i < TEST_COUNT(flaws); i++) {
        test_case("a gradient with %s", flaws[i].what);
        test_broken_make(&b, &whole->tensor, &flaws[i]);
        test_check_refused(tch_scaler_unscale(scaler, 2, list), flaws[i].expected, "gradients[1]");
    }
    test_tensor_check_unchanged(whole, "the gradient");
    test_case("NULL");
    test_check_refused(tch_scaler_unscale(scaler, 1, NULL), TCH_ERR_INVALID_ARGUMENT, "gradients");
    test_check_refused(tch_scaler_unscale(scaler, -1, list), TCH_ERR_INVALID_ARGUMENT, "count");
    test_check_refused(tch_scaler_unscale(NULL, 0, list), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_check_refused(tch_scaler_check(scaler, 1, NULL), TCH_ERR_INVALID_ARGUMENT, "gradients");
    test_check_refused(tch_scaler_check(NULL, 1, none), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_check_refused(tch_scaler_step(scaler, NULL, 1, none), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    test_check_refused(tch_scaler_step(NULL, NULL, 1, none), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_check_refused(tch_scaler_update(NULL), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_check_refused(tch_scaler_get_state(scaler, NULL), TCH_ERR_INVALID_ARGUMENT, "state");
    test_check_refused(tch_scaler_set_state(scaler, NULL), TCH_ERR_INVALID_ARGUMENT, "state");
    CHECK(tch_scaler_scale(NULL) == NULL && tch_scaler_found_inf(NULL) == NULL, "a tensor of no scaler");
    test_case("an update without a look at gradients, as in PyTorch");
    test_check_refused(tch_scaler_update(scaler), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_case("a state that is set begins a new iteration");
    CHECK_OK(tch_scaler_unscale(scaler, 0, NULL));
    s = state_of(scaler);
    CHECK_OK(tch_scaler_set_state(scaler, &s));
    test_check_refused(tch_scaler_update(scaler), TCH_ERR_INVALID_ARGUMENT, "scaler");
    test_case("a state that cannot be");
    s = state_of(scaler);
    s.scale = 0.0;
    test_check_refused(tch_scaler_set_state(scaler, &s), TCH_ERR_INVALID_ARGUMENT, "scale");
    s.scale = 1.0;
    s.growth_tracker = -1;
    test_check_refused(tch_scaler_set_state(scaler, &s), TCH_ERR_INVALID_ARGUMENT, "growth_tracker");
    CHECK(state_of(scaler).scale == 65536.0, "a refused state was taken");
    tch_scaler_destroy(scaler);
}

TEST_MAIN(test_open_context, test_close_context)

/* Edge cases of steps for every kind of optimizer: master copies and stochastic rounding; gradients that are not
 * finite, missing or of two types; changing learning rates; and bitwise reproducibility between runs and numbers of
 * threads. */
#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 24

/* Square if SOAP needs it to be determined. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {9, 9}},
    {.ndim = 1, .shape = {37}},
    {.ndim = 3, .shape = {3, 4, 5}, .order = {2, 0, 1}},
    {.ndim = 0},
    {.ndim = 2, .shape = {8, 8}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {5, 6}, .elementwise = 1},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    if (kind == TCH_OPTIM_SHAMPOO || kind == TCH_OPTIM_KL_SHAMPOO) { /* refreshes come at every step */
        c.shampoo.precondition_frequency = 1;
    }
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.shampoo.stagger = 1;
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
        c.momentum = 0.5;
    }
    return c;
}

/* --- rounding ---------------------------------------------------------------------------------------------------- */

#define MANY 20000

/* Parameters that all begin at 1.5, after steps of SGD with gradients of 1. */
static double *step_from_one_and_a_half(tch_context *context, const tch_optim_config *c, int32_t steps)
{
    static const trial_shape shape = {.ndim = 1, .shape = {MANY}};
    trial t;
    tch_parameter entry;
    trial_prepare(&t, context, TCH_BFLOAT16, TCH_BFLOAT16, c, 1, &shape, &entry);
    double *values = test_alloc(MANY * sizeof *values);
    for (int i = 0; i < MANY; i++) {
        values[i] = 1.5;
        t.parameters[0].drawn[i] = 1.0;
    }
    test_tensor_write(t.parameters[0].memory, values);
    test_tensor_write(t.parameters[0].gradient_memory, t.parameters[0].drawn);
    CHECK_OK(tch_optimizer_create(context, c, NULL, 1, &entry, &t.optimizer));
    for (int i = 0; i < steps; i++) {
        CHECK_OK(trial_step_library(&t));
    }
    values = test_tensor_read(t.parameters[0].memory);
    trial_close(&t);
    return values;
}

/* A thousand steps of a thousandth of the spacing each: a master copy accumulates them, rounding to nearest loses
 * all. */
TEST(small_steps_add_up_in_a_master_copy)
{
    for (int32_t master = 0; master < 2; master++) {
        tch_optim_config c = tch_optim_defaults(TCH_OPTIM_SGD);
        c.lr = 0x1p-17;
        c.memory.master_weights = master;
        test_case("small steps %s master copy", master ? "with" : "without");
        const double *got = step_from_one_and_a_half(*state, &c, 4096);
        for (int i = 0; i < MANY; i++) {
            double expected = master ? 1.5 - 4096.0 * 0x1p-17 : 1.5;
            CHECK(got[i] == expected, "element %d is %.9g, expected %.9g", i, got[i], expected);
        }
    }
}

/* Forty steps of 0.128 spacings each. */
static double *round_at_random(tch_context *context, uint64_t seed, int32_t stochastic)
{
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_SGD);
    c.lr = 1e-3;
    c.memory.stochastic_rounding = stochastic;
    c.memory.seed = seed;
    return step_from_one_and_a_half(context, &c, 40);
}

TEST(stochastic_rounding_is_right_on_average)
{
    test_case("the mean of %d parameters", MANY);
    double *got = round_at_random(*state, 5, 1);
    double *again = round_at_random(*state, 5, 1);
    double *other = round_at_random(*state, 6, 1);
    double *nearest = round_at_random(*state, 5, 0);
    double mean = 0.0;
    double square = 0.0;
    for (int i = 0; i < MANY; i++) {
        mean += got[i] / MANY;
        square += (got[i] - 1.46) * (got[i] - 1.46) / MANY;
        CHECK(got[i] == test_round(TCH_BFLOAT16, got[i]), "element %d is no bfloat16", i);
        CHECK(nearest[i] == 1.5, "rounding to nearest has moved element %d to %g", i, nearest[i]);
    }
    /* A step rounds up or down with probabilities 0.872 and 0.128: a standard deviation of 0.334 spacings of 2^-7, 40
     * times. */
    double deviation = 0x1p-7 * sqrt(40.0 * 0.872 * 0.128);
    CHECK(fabs(mean - 1.46) < 5.0 * deviation / sqrt(MANY), "the mean is %.6f, expected 1.46", mean);
    CHECK(fabs(sqrt(square) / deviation - 1.0) < 0.05, "the deviation is %g, expected %g", sqrt(square), deviation);
    CHECK(memcmp(got, again, MANY * sizeof *got) == 0, "the same seed gives other bits");
    CHECK(memcmp(got, other, MANY * sizeof *got) != 0, "another seed is bitwise-identical");
}

/* Two blocks with the same values and gradients: the same steps, but different random rounding. */
TEST(blocks_are_rounded_apart)
{
    enum { ROWS = 8, COLS = 16 };
    const trial_shape wide[] = {{.ndim = 2, .shape = {ROWS, COLS}}};
    double values[ROWS * COLS];
    int differing = 0;
    trial t;
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
    c.shampoo.max_preconditioner_dim = COLS / 2;
    c.memory.stochastic_rounding = 1;
    test_case("stochastic rounding of two blocks");
    trial_open(&t, *state, TCH_BFLOAT16, TCH_BFLOAT16, &c, 1, wide);
    trial_draw(&t);
    for (int i = 0; i < ROWS * COLS; i++) {
        values[i] = t.parameters[0].drawn[i / COLS * COLS + i % (COLS / 2)];
    }
    test_tensor_write(t.parameters[0].gradient_memory, values);
    for (int i = 0; i < ROWS * COLS; i++) {
        values[i] = 1.0;
    }
    test_tensor_write(t.parameters[0].memory, values);
    CHECK_OK(trial_step_library(&t));
    double *after = test_tensor_read(t.parameters[0].memory);
    for (int i = 0; i < ROWS * COLS; i++) {
        differing += i % COLS < COLS / 2 && after[i] != after[i + COLS / 2];
    }
    CHECK(differing > 0, "both blocks have the same bits");
}

/* --- skipped steps ----------------------------------------------------------------------------------------------- */

/* Reasons to skip a step: a non-finite gradient, or the result of loss scaling, which applies even if the step itself
 * does not check. */
typedef struct refusal {
    tch_nonfinite policy;
    bool told;
} refusal;

static const refusal refusals[] = {{TCH_NONFINITE_SKIP, false},
                                   {TCH_NONFINITE_RAISE, false},
                                   {TCH_NONFINITE_SKIP, true},
                                   {TCH_NONFINITE_RAISE, true},
                                   {TCH_NONFINITE_IGNORE, true}};

/* Status and message by the policy; parameters and state are bitwise unchanged. */
static void take_bad_step(trial *t, const refusal *r, int32_t parameter, double bad)
{
    double *before[TRIAL_MOST_PARAMETERS];
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    char name[32];
    double yes = 1.0;
    test_tensor *found = test_tensor_make(t->context, TCH_FLOAT32, 0, NULL, LAYOUT_CONTIGUOUS);
    snprintf(name, sizeof name, "'parameter%d'", parameter);
    trial_draw(t);
    test_tensor_write(found, &yes);
    if (!r->told) {
        trial_spoil(t, parameter, bad);
    }
    for (int32_t i = 0; i < t->count; i++) {
        before[i] = test_tensor_read(t->parameters[i].memory);
    }
    unsigned char *state = trial_snapshot(t, -1);
    trial_list_gradients(t, gradients);
    tch_status got =
        tch_optimizer_step_scaled(t->optimizer, t->count, gradients, NULL, r->told ? &found->tensor : NULL);
    bool raises = r->policy == TCH_NONFINITE_RAISE;
    CHECK(got == (raises ? TCH_ERR_NUMERIC : TCH_OK), "it gave %s (%s)", tch_status_name(got), tch_last_error());
    CHECK(!raises || strstr(tch_last_error(), r->told ? "found_inf" : name) != NULL, "%s", tch_last_error());
    for (int32_t i = 0; i < t->count; i++) {
        double *after = test_tensor_read(t->parameters[i].memory);
        CHECK(memcmp(before[i], after, (size_t)t->parameters[i].memory->count * sizeof *after) == 0,
              "parameter %d has changed", i);
    }
    trial_check_snapshot(t, -1, state);
}

/* Of two groups. A GPU may update a due basis once more at a skipped step: here none is due. */
static void refuse_steps(tch_context *context, tch_optim_kind kind)
{
    const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < TEST_COUNT(refusals); k++) {
        trial t;
        tch_optim_config c = config_of(kind);
        c.numerics.nonfinite = refusals[k].policy;
        if (!test_on_cpu()) {
            c.shampoo.precondition_frequency = kind == TCH_OPTIM_SOAP ? 1000 : c.shampoo.precondition_frequency;
        }
        test_case("%s, policy %d, %s", tch_optim_kind_name(kind), (int)c.numerics.nonfinite,
                  refusals[k].told ? "told" : "seen");
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES - 3, shapes);
        trial_add_group(&t, &c, 3, shapes + SHAPES - 3);
        for (int i = 0; i < SHAPES; i++) {
            trial_steps(&t, 2);
            take_bad_step(&t, &refusals[k], i, bad[i % 3]);
        }
        trial_steps(&t, 2);
        trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
        tch_optim_stats stats = trial_stats(&t);
        CHECK(stats.skipped == SHAPES && stats.steps == 3 * SHAPES + 2, "%lld of %lld steps were skipped",
              (long long)stats.skipped, (long long)stats.steps);
    }
}

/* On a GPU the host learns a step later that roots were refreshed without a skipped step's gradient. */
TEST(skipped_refreshes_are_repeated)
{
    trial t;
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
    c.shampoo.precondition_frequency = 1000;
    c.shampoo.refresh_drift = 1.05;
    test_case("skipped refreshes");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < 8; i++) {
        trial_steps(&t, 1 + i % 2);
        trial_draw(&t);
        trial_spoil(&t, i % SHAPES, NAN);
        CHECK_OK(trial_step_library(&t));
    }
    trial_steps(&t, 1);
    trial_check(&t, trial_tolerance(TCH_OPTIM_SHAMPOO, TCH_FLOAT64));
}

/* Without the check: affected values are spoiled, and a step later the optimizer still updates the others. */
TEST(bad_gradients_are_ignored)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    c.numerics.nonfinite = TCH_NONFINITE_IGNORE;
    test_case("ignore");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_draw(&t);
    trial_spoil(&t, 1, NAN);
    CHECK_OK(trial_step_library(&t));
    double *spoiled = test_tensor_read(t.parameters[1].memory);
    double *good = test_tensor_read(t.parameters[0].memory);
    CHECK(isnan(spoiled[36]) && isfinite(spoiled[0]), "%g and %g", spoiled[36], spoiled[0]);
    CHECK(isfinite(ref_largest(81, good)), "another parameter is spoiled");
}

/* The first steps are skipped, as at the beginning of training with a loss scale, and refreshes are far apart: the
 * first good gradient must be used before the next of them. */
static void skipped_first(tch_context *context, tch_optim_kind kind)
{
    trial t;
    tch_optim_config c = config_of(kind);
    c.shampoo.precondition_frequency = 100;
    c.shampoo.stagger = 0;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < 3; i++) {
        take_bad_step(&t, &refusals[0], i, INFINITY);
    }
    trial_steps(&t, STEPS);
    trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
}

/* --- missing gradients, or two types ----------------------------------------------------------------------------- */

/* Each parameter has a gradient at some steps only, also of three of one shape, the last of which begins late: without
 * one its values and state are bitwise unchanged, including roots and bases that others of its shape refresh. */
static void miss_gradients(tch_context *context, tch_optim_kind kind)
{
    for (int32_t stagger = 0; stagger < 2; stagger++) {
        trial t;
        tch_optim_config c = config_of(kind);
        c.shampoo.precondition_frequency = 3;
        c.shampoo.stagger = stagger;
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        for (int i = 0; i < 2 * STEPS; i++) {
            int32_t rests = -1;
            for (int32_t k = 0; k < t.count; k++) {
                t.parameters[k].missing = (i * 7 + k * 5) % (k + 2) == 1 || i == 0 || (k == 7 && i < 4);
                rests = t.parameters[k].missing ? k : rests;
            }
            unsigned char *state = rests < 0 ? NULL : trial_snapshot(&t, rests);
            double *before = rests < 0 ? NULL : test_tensor_read(t.parameters[rests].memory);
            trial_step(&t);
            if (rests >= 0) {
                double *after = test_tensor_read(t.parameters[rests].memory);
                size_t bytes = (size_t)t.parameters[rests].memory->count * sizeof *after;
                CHECK(memcmp(before, after, bytes) == 0, "step %d changed parameter %d", i, rests);
                trial_check_snapshot(&t, rests, state);
            }
        }
        if (!stagger) { /* the references do not know when others are refreshed */
            trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
        }
    }
}

/* float32 parameters of one shape, of which one gets its gradients in bfloat16. */
static void two_types(tch_context *context, tch_optim_kind kind)
{
    trial t;
    const tch_tensor *gradients[SHAPES];
    tch_optim_config c = trial_config(kind);
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_parameter *p = &t.parameters[6];
    test_tensor *half = test_tensor_make(context, TCH_BFLOAT16, 2, p->sizes, LAYOUT_CONTIGUOUS);
    for (int i = 0; i < 15; i++) {
        trial_draw(&t);
        for (int64_t k = 0; k < p->memory->count; k++) {
            p->drawn[k] = test_round(TCH_BFLOAT16, p->drawn[k]);
        }
        test_tensor_write(half, p->drawn);
        trial_list_gradients(&t, gradients);
        gradients[6] = &half->tensor;
        CHECK_OK(tch_optimizer_step(t.optimizer, SHAPES, gradients));
        trial_step_references(&t);
    }
    trial_check(&t, ref_orthogonalizes(kind) && !test_on_cpu() ? 0.05 : 1e-4);
}

/* --- learning rates ---------------------------------------------------------------------------------------------- */

/* The device's number is lr: AdamW's rate follows it, keeping its ratio if it has one. */
static void rates_for_the_rest(tch_context *context, tch_optim_kind kind)
{
    const double scalar_rates[] = {0.0, 0.007};
    const tch_dtype types[] = {TCH_FLOAT32, TCH_FLOAT64};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = trial_config(kind);
        c.adamw.lr = scalar_rates[k];
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        test_tensor *lr = test_tensor_make(context, types[k], k, (const int64_t[]){1}, LAYOUT_CONTIGUOUS);
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr->tensor));
        for (int i = 0; i < 15; i++) {
            t.configs[0].lr = test_round(types[k], 0.01 * (1 + i % 5));
            test_tensor_write(lr, &t.configs[0].lr);
            trial_step(&t);
        }
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, NULL)); /* back to the configuration's */
        t.configs[0].lr = c.lr;
        trial_step(&t);
        trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
    }
}

/* Changes to a group's rates between two steps. */
typedef enum rate_change {
    NO_CHANGE,
    BY_CALL,
    BY_CALL_WITHOUT_RATIO, /* AdamW's rate is unchanged, unless 0 */
    BY_CONFIG,
    BY_CONFIG_WITHOUT_STEP,
    THE_END
} rate_change;

#define MOST_CHANGES 12

typedef struct rate_script {
    const char *what;
    double lr, adamw_lr;
    struct {
        rate_change how;
        double lr, adamw_lr;
    } changes[MOST_CHANGES];
} rate_script;

static const rate_script scripts[] = {
    {"in proportion, through 0, then by configurations, of which one brings another rate",
     0.02,
     0.007,
     {{NO_CHANGE, 0, 0},
      {BY_CALL, 0.01, 0},
      {BY_CALL, 0.0, 0},
      {BY_CALL, 0.005, 0},
      {BY_CONFIG, 0.01, 0.007},
      {BY_CONFIG, 0.04, 0.007},
      {BY_CONFIG, 0.0, 0.007},
      {BY_CONFIG, 0.005, 0.007},
      {BY_CONFIG, 0.03, 0.002},
      {BY_CONFIG, 0.01, 0.002},
      {THE_END, 0, 0}}},
    {"not given: a share of lr, to which a configuration may return",
     0.02,
     0.0,
     {{NO_CHANGE, 0, 0},
      {BY_CALL, 0.0, 0},
      {BY_CALL, 0.04, 0},
      {BY_CONFIG, 0.02, 0.007},
      {BY_CONFIG, 0.01, 0.0},
      {THE_END, 0, 0}}},
    {"given while lr is still 0, after a share: without a ratio",
     0.0,
     0.0,
     {{NO_CHANGE, 0, 0},
      {BY_CONFIG_WITHOUT_STEP, 0.0, 0.007},
      {BY_CALL_WITHOUT_RATIO, 0.01, 0},
      {BY_CALL_WITHOUT_RATIO, 0.04, 0},
      {BY_CALL_WITHOUT_RATIO, 0.0, 0},
      {BY_CALL_WITHOUT_RATIO, 0.005, 0},
      {THE_END, 0, 0}}},
};

static void change_rates(trial *t, tch_optim_config *c, rate_change how, double lr, double adamw_lr)
{
    if (how == BY_CALL || how == BY_CALL_WITHOUT_RATIO) {
        t->configs[0].lr = lr;
        if (how == BY_CALL_WITHOUT_RATIO) {
            t->configs[0].adamw.base_lr = lr > 0.0 ? lr : 1.0; /* the reference's rate: as given, or 0 */
        }
        CHECK_OK(tch_optimizer_set_lr(t->optimizer, 0, lr));
    } else if (how != NO_CHANGE) {
        c->lr = lr;
        c->adamw.lr = adamw_lr;
        trial_set_config(t, 0, c);
    }
}

/* AdamW's rate, set by the group's configuration. The reference has a ratio from fill_in_rate. */
static void rates_of_the_rest(tch_context *context, tch_optim_kind kind)
{
    for (size_t i = 0; i < TEST_COUNT(scripts); i++) {
        const rate_script *s = &scripts[i];
        trial t;
        tch_optim_config now;
        tch_optim_config c = trial_config(kind);
        c.lr = s->lr;
        c.adamw.lr = s->adamw_lr;
        test_case("%s, a rate of AdamW's part %s", tch_optim_kind_name(kind), s->what);
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
        double share = kind == TCH_OPTIM_MUON ? 0.3 * now.adamw.base_lr : 0.0;
        CHECK(now.adamw.lr == (s->adamw_lr > 0.0 ? s->adamw_lr : share), "%g", now.adamw.lr);
        for (int k = 0; s->changes[k].how != THE_END; k++) {
            change_rates(&t, &c, s->changes[k].how, s->changes[k].lr, s->changes[k].adamw_lr);
            if (s->changes[k].how != BY_CONFIG_WITHOUT_STEP) {
                trial_step(&t);
            }
        }
        trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
    }
}

/* --- bitwise reproducibility ------------------------------------------------------------------------------------- */

/* Between runs and, for elementwise methods, numbers of threads. */
static void repeat_steps(tch_context *context, tch_optim_kind kind)
{
    static const trial_shape large[] = {{.ndim = 2, .shape = {96, 160}},
                                        {.ndim = 1, .shape = {70001}},
                                        {.ndim = 2, .shape = {130, 130}, .order = {1, 0}}};
    trial t[2];
    tch_optim_config c = config_of(kind);
    int32_t threads = tch_get_num_threads();
    c.shampoo.max_preconditioner_dim = 64;
    c.shampoo.precondition_frequency = 2;
    c.soap.block = kind == TCH_OPTIM_SOAP;
    c.numerics.precision = TCH_PRECISION_HIGH;
    for (int32_t n = 0; n <= (ref_has_blocks(kind) ? 0 : 3); n++) {
        for (int k = 0; k < 2; k++) {
            trial_open(&t[k], context, TCH_FLOAT32, TCH_FLOAT32, &c, 3, large);
            CHECK_OK(tch_set_num_threads(k == 1 && n > 0 ? n : threads));
            for (int i = 0; i < 6; i++) {
                trial_draw(&t[k]);
                CHECK_OK(trial_step_library(&t[k]));
            }
        }
        trial_check_same_parameters(&t[0], &t[1]);
    }
    CHECK_OK(tch_set_num_threads(threads));
}

TEST(every_kind)
{
    static const struct {
        const char *what;
        void (*check)(tch_context *context, tch_optim_kind kind);
    } cases[] = {
        {"bad steps", refuse_steps},
        {"the first steps are skipped", skipped_first},
        {"missing gradients", miss_gradients},
        {"gradients of two types", two_types},
        {"a learning rate on the device", rates_for_the_rest},
        {"a rate of AdamW's part", rates_of_the_rest},
        {"the same bits", repeat_steps},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial_for_every_kind(*state, cases[i].what, cases[i].check);
    }
}

TEST_MAIN(test_open_context, test_close_context)

/* Numbers at their limits, for every kind of optimizer: what a master copy and stochastic rounding are for, gradients
 * that are not finite, gradients that are missing, and results that are the same to the bit: from run to run and by
 * however many threads. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 24

/* Square where SOAP needs it to be determined. */
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
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.stagger = 1; /* refreshes come at every step */
        c.precondition_frequency = 1;
        c.grafting = TCH_GRAFTING_ADAM;
        c.momentum = 0.5;
    }
    return c;
}

/* --- rounding ---------------------------------------------------------------------------------------------------- */

/* A thousand steps of a thousandth of the spacing each: a master copy adds them up, rounding to nearest loses all. */
static void small_steps_add_up_in_a_master_copy(void **state)
{
    const trial_shape one = {.ndim = 1, .shape = {64}};
    for (int32_t master = 0; master < 2; master++) {
        trial t;
        double values[64];
        const tch_tensor *gradients[1];
        tch_optim_config c = tch_optim_defaults(TCH_OPTIM_SGD);
        c.lr = 0x1p-17;
        c.master_weights = master;
        test_case("small steps %s master copy", master ? "with" : "without");
        trial_open(&t, *state, TCH_BFLOAT16, TCH_BFLOAT16, &c, 1, &one);
        trial_list_gradients(&t, gradients);
        for (int i = 0; i < 64; i++) {
            values[i] = 1.5;
            t.parameters[0].drawn[i] = 1.0;
        }
        test_tensor_write(t.parameters[0].gradient_memory, t.parameters[0].drawn);
        test_tensor_write(t.parameters[0].memory, values);
        tch_parameter entry = {.tensor = &t.parameters[0].tensor};
        tch_optimizer_destroy(t.optimizer);
        CHECK_OK(tch_optimizer_create(*state, &c, NULL, 1, &entry, &t.optimizer));
        for (int i = 0; i < 4096; i++) {
            CHECK_OK(tch_optimizer_step(t.optimizer, 1, gradients));
        }
        double *got = test_tensor_read(t.parameters[0].memory);
        for (int i = 0; i < 64; i++) {
            double expected = master ? 1.5 - 4096.0 * 0x1p-17 : 1.5;
            CHECK(got[i] == expected, "element %d is %.9g, expected %.9g", i, got[i], expected);
        }
        trial_close(&t);
    }
}

#define MANY 20000

/* Forty steps of 0.128 spacings each on numbers that all begin at 1.5. */
static double *round_at_random(tch_context *context, uint64_t seed, int32_t stochastic)
{
    trial t;
    const trial_shape shape = {.ndim = 1, .shape = {MANY}};
    const tch_tensor *gradients[1];
    tch_parameter entry;
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_SGD);
    c.lr = 1e-3;
    c.stochastic_rounding = stochastic;
    c.seed = seed;
    trial_prepare(&t, context, TCH_BFLOAT16, TCH_BFLOAT16, &c, 1, &shape, &entry);
    double *values = test_alloc(MANY * sizeof *values);
    for (int i = 0; i < MANY; i++) {
        values[i] = 1.5;
        t.parameters[0].drawn[i] = 1.0;
    }
    test_tensor_write(t.parameters[0].memory, values);
    test_tensor_write(t.parameters[0].gradient_memory, t.parameters[0].drawn);
    CHECK_OK(tch_optimizer_create(context, &c, NULL, 1, &entry, &t.optimizer));
    trial_list_gradients(&t, gradients);
    for (int i = 0; i < 40; i++) {
        CHECK_OK(tch_optimizer_step(t.optimizer, 1, gradients));
    }
    values = test_tensor_read(t.parameters[0].memory);
    trial_close(&t);
    return values;
}

static void stochastic_rounding_is_right_on_average(void **state)
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
    /* A step rounds up or down with chances 0.872 and 0.128: a deviation of 0.334 spacings of 2^-7, 40 times. */
    double deviation = 0x1p-7 * sqrt(40.0 * 0.872 * 0.128);
    CHECK(fabs(mean - 1.46) < 5.0 * deviation / sqrt(MANY), "the mean is %.6f, expected 1.46", mean);
    CHECK(fabs(sqrt(square) / deviation - 1.0) < 0.05, "the deviation is %g, expected %g", sqrt(square), deviation);
    CHECK(memcmp(got, again, MANY * sizeof *got) == 0, "the same seed gives other bits");
    CHECK(memcmp(got, other, MANY * sizeof *got) != 0, "another seed is bitwise-identical");
}

/* --- gradients that are not finite ------------------------------------------------------------------------------- */

/* A step with a bad gradient: the status by the policy, and not a bit of parameters or state has changed. */
static void take_bad_step(trial *t, int32_t parameter, double bad, tch_status expected)
{
    double *before[TRIAL_MOST_PARAMETERS];
    trial_draw(t);
    trial_spoil(t, parameter, bad);
    for (int32_t i = 0; i < t->count; i++) {
        before[i] = test_tensor_read(t->parameters[i].memory);
    }
    unsigned char *state = trial_snapshot(t, -1);
    tch_status got = trial_step_library(t);
    CHECK(got == expected, "a bad gradient gave %s (%s)", tch_status_name(got), tch_last_error());
    for (int32_t i = 0; i < t->count; i++) {
        double *after = test_tensor_read(t->parameters[i].memory);
        CHECK(memcmp(before[i], after, (size_t)t->parameters[i].memory->count * sizeof *after) == 0,
              "parameter %d has changed", i);
    }
    trial_check_snapshot(t, -1, state);
}

/* A GPU may follow a basis once more at a skipped step in which that was due: there it is not. */
static void run_bad_gradients(tch_context *context, tch_optim_kind kind, tch_nonfinite policy)
{
    const double bad[] = {NAN, INFINITY, -INFINITY};
    trial t;
    tch_optim_config c = config_of(kind);
    tch_status expected = policy == TCH_NONFINITE_RAISE ? TCH_ERR_NUMERIC : TCH_OK;
    int64_t skipped = 0;
    c.nonfinite = policy;
    if (!test_on_cpu()) {
        c.precondition_frequency = kind == TCH_OPTIM_SOAP ? 1000 : c.precondition_frequency;
    }
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
        if (i % 3 == 1) {
            take_bad_step(&t, i % SHAPES, bad[i % 3], expected);
            skipped++;
        }
    }
    trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t.optimizer, &stats));
    CHECK(stats.skipped == skipped && stats.steps == STEPS + skipped, "%lld of %lld steps were skipped",
          (long long)stats.skipped, (long long)stats.steps);
    trial_close(&t);
}

static void skips(tch_context *context, tch_optim_kind kind)
{
    run_bad_gradients(context, kind, TCH_NONFINITE_SKIP);
}

static void raises(tch_context *context, tch_optim_kind kind)
{
    run_bad_gradients(context, kind, TCH_NONFINITE_RAISE);
}

static void bad_gradients_are_skipped(void **state)
{
    trial_for_every_kind(*state, "skip", skips);
}

static void bad_gradients_are_raised(void **state)
{
    trial_for_every_kind(*state, "raise", raises);
}

/* Not looked for: what it touches is spoiled, and a step later the optimizer still works on the others. */
static void bad_gradients_are_ignored(void **state)
{
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    c.nonfinite = TCH_NONFINITE_IGNORE;
    test_case("ignore");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_draw(&t);
    trial_spoil(&t, 1, NAN);
    trial_list_gradients(&t, gradients);
    CHECK_OK(tch_optimizer_step(t.optimizer, t.count, gradients));
    double *spoiled = test_tensor_read(t.parameters[1].memory);
    double *good = test_tensor_read(t.parameters[0].memory);
    CHECK(isnan(spoiled[36]) && isfinite(spoiled[0]), "%g and %g", spoiled[36], spoiled[0]);
    CHECK(isfinite(ref_largest(81, good)), "another parameter is spoiled");
    trial_close(&t);
}

/* The first steps are skipped, as they are at the beginning of training with a loss scale, and refreshes are far apart:
 * what the first good gradient gives must not wait for the next of them. */
static void skipped_first(tch_context *context, tch_optim_kind kind)
{
    trial t;
    tch_optim_config c = config_of(kind);
    c.precondition_frequency = 100;
    c.stagger = 0;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < 3; i++) {
        take_bad_step(&t, i, INFINITY, TCH_OK);
    }
    trial_steps(&t, STEPS);
    trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
    trial_close(&t);
}

static void skipped_first_steps(void **state)
{
    trial_for_every_kind(*state, "the first steps are skipped", skipped_first);
}

/* --- gradients that are missing ---------------------------------------------------------------------------------- */

/* Each parameter has a gradient at some steps only, also of three of one shape, of which the last begins late: it then
 * keeps its numbers, its state and its count of steps. */
static void miss(tch_context *context, tch_optim_kind kind)
{
    trial t;
    tch_optim_config c = config_of(kind);
    c.precondition_frequency = 3;
    c.stagger = 0;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < 2 * STEPS; i++) {
        for (int32_t k = 0; k < t.count; k++) {
            t.parameters[k].missing = (i * 7 + k * 5) % (k + 2) == 1 || i == 0 || (k == 7 && i < 4);
        }
        double *before = test_tensor_read(t.parameters[0].memory);
        trial_step(&t);
        double *after = test_tensor_read(t.parameters[0].memory);
        CHECK(!t.parameters[0].missing || memcmp(before, after, 81 * sizeof *after) == 0, "step %d changed it", i);
    }
    trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
    trial_close(&t);
}

static void missing_gradients(void **state)
{
    trial_for_every_kind(*state, "missing gradients", miss);
}

/* --- the same bits ----------------------------------------------------------------------------------------------- */

static const trial_shape large[] = {
    {.ndim = 2, .shape = {96, 160}}, {.ndim = 1, .shape = {70001}}, {.ndim = 2, .shape = {130, 130}, .order = {1, 0}}};

static void run_once(tch_context *context, const tch_optim_config *c, double **results)
{
    trial t;
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    tch_parameter entries[3];
    trial_prepare(&t, context, TCH_FLOAT32, TCH_FLOAT32, c, 3, large, entries);
    CHECK_OK(tch_optimizer_create(context, c, NULL, 3, entries, &t.optimizer));
    trial_list_gradients(&t, gradients);
    for (int i = 0; i < 6; i++) {
        trial_draw(&t);
        CHECK_OK(tch_optimizer_step(t.optimizer, 3, gradients));
    }
    for (int32_t i = 0; i < 3; i++) {
        results[i] = test_tensor_read(t.parameters[i].memory);
    }
    trial_close(&t);
}

static void compare_runs(double **first, double **second, const char *what)
{
    for (int32_t i = 0; i < 3; i++) {
        int64_t count = large[i].shape[0] * (large[i].ndim > 1 ? large[i].shape[1] : 1);
        CHECK(memcmp(first[i], second[i], (size_t)count * sizeof(double)) == 0, "parameter %d has other bits %s", i,
              what);
    }
}

static void repeat(tch_context *context, tch_optim_kind kind)
{
    double *first[3];
    double *second[3];
    tch_optim_config c = config_of(kind);
    c.max_preconditioner_dim = 64;
    c.precondition_frequency = 2;
    c.block = kind == TCH_OPTIM_SOAP;
    c.precision = TCH_PRECISION_HIGH;
    run_once(context, &c, first);
    run_once(context, &c, second);
    compare_runs(first, second, "from run to run");
    int32_t threads = tch_get_num_threads();
    for (int32_t n = 1; n <= 3 && !ref_has_blocks(kind); n++) {
        CHECK_OK(tch_set_num_threads(n));
        run_once(context, &c, second);
        compare_runs(first, second, "with another number of threads");
    }
    CHECK_OK(tch_set_num_threads(threads));
}

static void results_are_the_same_to_the_bit(void **state)
{
    trial_for_every_kind(*state, "the same bits", repeat);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_steps_add_up_in_a_master_copy),
        cmocka_unit_test(stochastic_rounding_is_right_on_average),
        cmocka_unit_test(bad_gradients_are_skipped),
        cmocka_unit_test(bad_gradients_are_raised),
        cmocka_unit_test(bad_gradients_are_ignored),
        cmocka_unit_test(skipped_first_steps),
        cmocka_unit_test(missing_gradients),
        cmocka_unit_test(results_are_the_same_to_the_bit),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

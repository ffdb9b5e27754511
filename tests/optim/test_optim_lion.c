/* Lion against the plain reference over 25 steps: every option, alone and together, all layouts, groups and numbers
 * that change between steps.
 *
 * A step has length lr whatever the gradient, so an error shows only where a sign does: c = beta1 m + (1 - beta1) g is
 * off by a few roundings, and where it is no larger than that, about 3e-7 of all elements in float32, the sign may be
 * any. The shapes in float32 are small enough for none to be expected; otherwise the bound is that of AdamW, 2 (steps +
 * 10) u of the way. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/messages.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 25

/* Vectors and scalars, nothing at all, matrices by rows and by columns, channels last; the last one long. */
static const trial_shape shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 0},
    {.ndim = 1, .shape = {0}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 3, .shape = {3, 1, 5}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {17, 31}, .gradient = LAYOUT_REVERSED},
    {.ndim = 1, .shape = {5003}, .gradient = LAYOUT_OFFSET},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))
#define SMALL_SHAPES (SHAPES - 1)

static tch_optim_config base(void)
{
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_LION);
    c.lr = 0.02;
    return c;
}

static const trial_option options[] = {
    {.name = "defaults"},
    {"decay", {SET(weight_decay, 0.3)}},
    {"maximize", {SET(maximize, 1)}},
    {"betas", {SET(beta1, 0.5), SET(beta2, 0.7)}},
    {"no average", {SET(beta1, 0.0), SET(beta2, 0.0)}}, /* the sign of the gradient itself */
    /* Those of other kinds, which Lion does not read: decay is decoupled in any case. */
    {"options of others",
     {SET(weight_decay, 0.3), SET(decay, TCH_DECAY_L2), SET(momentum, 0.5), SET(nesterov, 1), SET(eps, 0.1),
      SET(bias_correction, 0), SET(scalar_lr, 3.0)}},
    {"all of them", {SET(weight_decay, 0.3), SET(maximize, 1), SET(beta1, 0.5), SET(beta2, 0.7)}},
    {.name = NULL},
};

static double tolerance_of(tch_dtype dtype)
{
    return 2.0 * (STEPS + 10) * test_arithmetic_roundoff(dtype);
}

static void every_option_in_float64(void **state)
{
    const tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT64, &c, options, SHAPES, shapes, STEPS, tolerance_of(TCH_FLOAT64));
}

static void every_option_in_float32(void **state)
{
    const tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT32, &c, options, SMALL_SHAPES, shapes, STEPS, tolerance_of(TCH_FLOAT32));
}

static void float32_parameters_take_half_gradients(void **state)
{
    const tch_dtype halves[] = {TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < 2; i++) {
        trial t;
        tch_optim_config c = base();
        test_case("gradients in %s", tch_dtype_name(halves[i]));
        trial_open(&t, *state, TCH_FLOAT32, halves[i], &c, SMALL_SHAPES, shapes);
        trial_steps(&t, STEPS);
        trial_check(&t, tolerance_of(TCH_FLOAT32));
        trial_close(&t);
    }
}

/* Everything that Lion reads, in two groups, of which the second comes in the middle. */
static void groups_and_changing_numbers(void **state)
{
    trial t;
    tch_optim_config first = base();
    tch_optim_config second = base();
    test_case("two groups whose numbers change");
    trial_set_option(&second, options, "all of them");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &first, 4, shapes);
    for (int i = 0; i < 2 * STEPS; i++) {
        if (i == STEPS) {
            trial_add_group(&t, &second, SHAPES - 4, shapes + 4);
        }
        if (i % 8 == 4) {
            first.lr *= 0.7;
            first.weight_decay += 0.05;
            first.beta1 *= 0.95;
            first.beta2 *= 0.98;
            trial_set_config(&t, 0, &first);
        }
        trial_step(&t);
    }
    trial_check(&t, 2.0 * tolerance_of(TCH_FLOAT64));
    trial_close(&t);
}

/* However small a gradient is, the step has the length lr; a gradient of 0 takes none. */
static void steps_have_one_length(void **state)
{
    const double gradients[] = {1e-30, -1e-30, 1e30, -1e30, 0.0};
    enum { COUNT = 5 };
    const int64_t shape[] = {COUNT};
    tch_context *context = *state;
    tch_optim_config c = base();
    tch_optimizer *optimizer = NULL;
    test_case("tiny and huge gradients");
    test_tensor *p = test_tensor_make(context, TCH_FLOAT32, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor *g = test_tensor_make(context, TCH_FLOAT32, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(p, (const double[COUNT]){1.0, 1.0, 1.0, 1.0, 1.0});
    test_tensor_write(g, gradients);
    c.lr = 0x1p-6;
    const tch_parameter entry = {.tensor = &p->tensor, .name = "p"};
    const tch_tensor *gradient = &g->tensor;
    CHECK_OK(tch_optimizer_create(context, &c, 1, &entry, &optimizer));
    CHECK_OK(tch_optimizer_step(optimizer, 1, &gradient));
    double *got = test_tensor_read(p);
    for (int i = 0; i < COUNT; i++) {
        double expected = 1.0 - 0x1p-6 * ((gradients[i] > 0) - (gradients[i] < 0));
        CHECK(got[i] == expected, "from gradient %g: %.9g, expected %.9g", gradients[i], got[i], expected);
    }
    tch_optimizer_destroy(optimizer);
}

/* One moment beside the clock, called as others call it. */
static void state_has_its_names(void **state)
{
    static const char *const names[] = {"parameter0/step", "parameter0/exp_avg"};
    trial t;
    tch_optim_config c = base();
    test_case("names of the state");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, shapes);
    CHECK(tch_optimizer_state_count(t.optimizer) == 2, "%d states", tch_optimizer_state_count(t.optimizer));
    for (int32_t i = 0; i < 2; i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t.optimizer, i, &s));
        CHECK(strcmp(s.name, names[i]) == 0, "state %d is %s, expected %s", i, s.name, names[i]);
    }
    trial_close(&t);
}

static void the_papers_defaults(void **state)
{
    (void)state;
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_LION);
    test_case("defaults");
    CHECK(c.lr == 1e-4 && c.beta1 == 0.9 && c.beta2 == 0.99 && c.weight_decay == 0.0, "not the paper's");
}

/* Averages that would not forget, or would grow. */
static void betas_out_of_range(void **state)
{
    static const double bad[] = {-0.1, 1.0, 1.5, NAN};
    for (int i = 0; i < 8; i++) {
        tch_optim_config c = base();
        tch_optimizer *optimizer = NULL;
        const char *name = i < 4 ? "beta1" : "beta2";
        *(i < 4 ? &c.beta1 : &c.beta2) = bad[i % 4];
        test_case("%s = %g", name, bad[i % 4]);
        test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, name);
        CHECK(optimizer == NULL, "an optimizer was returned");
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_papers_defaults),         cmocka_unit_test(every_option_in_float64),
        cmocka_unit_test(every_option_in_float32),     cmocka_unit_test(float32_parameters_take_half_gradients),
        cmocka_unit_test(groups_and_changing_numbers), cmocka_unit_test(steps_have_one_length),
        cmocka_unit_test(state_has_its_names),         cmocka_unit_test(betas_out_of_range),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* What the tests of each kind do not reach: parameters of one shape whose gradients come at different times, refreshes
 * that fail, schedules that change, a learning rate on the device for what AdamW is left with, and checkpoints that are
 * loaded into an optimizer unlike the one that wrote them.
 *
 * Tolerances are shares of the way, as in the tests of each kind. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/amp.h>

#include "support/elements.h"
#include "support/fakes/counting_allocator.h"
#include "support/files.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 15

/* Square where SOAP needs it to be determined; the first three are of one class. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}}, {.ndim = 2, .shape = {8, 8}},  {.ndim = 2, .shape = {8, 8}},
    {.ndim = 1, .shape = {19}},   {.ndim = 2, .shape = {6, 12}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))
#define DETERMINED 4 /* of them, in SOAP too */

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.weight_decay = 0.05;
    c.precision = TCH_PRECISION_HIGHEST;
    c.precondition_frequency = 3;
    c.stagger = 0;
    if (kind == TCH_OPTIM_SGD) {
        c.momentum = 0.9;
    }
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.beta2 = 0.95;
        c.relative_eps = 1e-3;
        c.root_method = TCH_ROOT_EIGEN;
    }
    return c;
}

static double tolerance_of(tch_optim_kind kind)
{
    static const double tolerances[] = {1e-13, 1e-13, 1e-11, 1e-10, 1e-11, 1e-13, 1e-11};
    return tolerances[kind];
}

/* --- the state, by name ------------------------------------------------------------------------------------------ */

/* All state of one parameter, one number after the other. */
static double *snapshot(const trial *t, int32_t parameter, int64_t *count)
{
    double *all = NULL;
    *count = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t->optimizer, i, &s));
        if (s.parameter == parameter) {
            int64_t n = tch_tensor_numel(s.tensor);
            double *values = trial_read(t, s.tensor);
            all = realloc(all, (size_t)(*count + n) * sizeof *all);
            CHECK(all != NULL, "the test itself has no memory");
            memcpy(all + *count, values, (size_t)n * sizeof *all);
            *count += n;
        }
    }
    test_own(all, free);
    return all;
}

static bool same_parameter(const trial *a, const trial *b, int32_t parameter)
{
    double *first = test_tensor_read(a->parameters[parameter].memory);
    double *second = test_tensor_read(b->parameters[parameter].memory);
    bool same = memcmp(first, second, (size_t)a->parameters[parameter].memory->count * sizeof *first) == 0;
    return same;
}

/* A fresh optimizer of the same parameters takes the place of the trial's. */
static void replace_optimizer(trial *t, const tch_optim_config *config)
{
    tch_parameter entries[TRIAL_MOST_PARAMETERS];
    for (int32_t i = 0; i < t->count; i++) {
        entries[i] =
            (tch_parameter){.tensor = &t->parameters[i].tensor, .elementwise = t->parameters[i].shape.elementwise};
    }
    tch_optimizer_destroy(t->optimizer);
    t->optimizer = NULL;
    CHECK_OK(tch_optimizer_create(t->context, config, t->count, entries, &t->optimizer));
}

/* --- gradients at different times -------------------------------------------------------------------------------- */

/* The first has every gradient, the second misses the first and then some, the third begins late. */
static void choose_missing(trial *t, int step)
{
    t->parameters[1].missing = step % 5 == 0;
    t->parameters[2].missing = step < 4 || step % 2 == 1;
}

static void at_different_times(tch_context *context, tch_optim_kind kind)
{
    trial t;
    tch_optim_config c = config_of(kind);
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    for (int i = 0; i < 2 * STEPS; i++) {
        choose_missing(&t, i);
        trial_step(&t);
    }
    trial_check(&t, tolerance_of(kind));
    trial_close(&t);
}

static void equal_shapes_at_different_times(void **state)
{
    trial_for_every_kind(*state, "gradients at different times", at_different_times);
}

/* A parameter without gradients keeps its state to the bit, also roots and bases that others of its shape refresh. */
static void rest(tch_context *context, tch_optim_kind kind)
{
    for (int32_t stagger = 0; stagger < 2; stagger++) {
        trial t;
        int64_t count;
        tch_optim_config c = config_of(kind);
        c.precondition_frequency = 4;
        c.stagger = stagger;
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        trial_steps(&t, 6);
        double *before = snapshot(&t, 1, &count);
        t.parameters[1].missing = 1;
        trial_steps(&t, 9);
        double *after = snapshot(&t, 1, &count);
        CHECK(memcmp(before, after, (size_t)count * sizeof *after) == 0, "its state has changed, stagger %d", stagger);
        trial_close(&t);
    }
}

static void state_rests_without_gradients(void **state)
{
    trial_for_every_kind(*state, "a parameter rests", rest);
}

/* float32 parameters of one shape, of which the second gets its gradients in bfloat16. */
static void two_types(tch_context *context, tch_optim_kind kind)
{
    trial t;
    const tch_tensor *gradients[DETERMINED];
    tch_optim_config c = config_of(kind);
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, DETERMINED, shapes);
    trial_parameter *p = &t.parameters[1];
    test_tensor *half = test_tensor_make(context, TCH_BFLOAT16, 2, p->sizes, LAYOUT_CONTIGUOUS);
    for (int i = 0; i < STEPS; i++) {
        trial_draw(&t);
        for (int64_t k = 0; k < p->memory->count; k++) {
            p->drawn[k] = test_round(TCH_BFLOAT16, p->drawn[k]);
        }
        test_tensor_write(half, p->drawn);
        trial_list_gradients(&t, gradients);
        gradients[1] = &half->tensor;
        CHECK_OK(tch_optimizer_step(t.optimizer, DETERMINED, gradients));
        trial_step_references(&t);
    }
    trial_check(&t, ref_orthogonalizes(kind) && !test_on_cpu() ? 0.05 : 1e-4);
    trial_close(&t);
}

static void equal_shapes_with_gradients_of_two_types(void **state)
{
    trial_for_every_kind(*state, "gradients of two types", two_types);
}

/* Two by two is the smallest matrix whose transpose is another. */
static void the_smallest_transposed_gradient(void **state)
{
    const trial_shape small[] = {{.ndim = 2, .shape = {2, 2}, .gradient = LAYOUT_TRANSPOSED}};
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    test_case("a transposed gradient of 2 by 2");
    trial_run(*state, TCH_FLOAT64, &c, 1, small, STEPS, tolerance_of(TCH_OPTIM_SGD));
}

/* The smallest two neighbors of five dimensions become one, wherever they are. */
static void five_dimensions(void **state)
{
    const trial_shape deep[] = {{.ndim = 5, .shape = {2, 3, 4, 5, 2}}, {.ndim = 5, .shape = {4, 5, 2, 3, 4}}};
    for (int kind = TCH_OPTIM_SHAMPOO; kind <= TCH_OPTIM_SOAP; kind++) {
        tch_optim_config c = config_of(kind);
        c.merge_dims = 0;
        test_case("%s, five dimensions", tch_optim_kind_name(kind));
        trial_run(*state, TCH_FLOAT64, &c, 2, deep, STEPS, tolerance_of(kind));
    }
}

/* A lying matrix and a standing one go through Muon as one batch, each with the step length of its own shape. */
static void lying_and_standing_matrices(void **state)
{
    const trial_shape sides[] = {
        {.ndim = 2, .shape = {9, 4}}, {.ndim = 2, .shape = {4, 9}}, {.ndim = 2, .shape = {9, 4}}};
    for (int k = TCH_MUON_LR_ORIGINAL; k <= TCH_MUON_LR_PLAIN; k++) {
        tch_optim_config c = config_of(TCH_OPTIM_MUON);
        c.muon_lr = (tch_muon_lr)k;
        test_case("lying and standing, step length %d", k);
        trial_run(*state, TCH_FLOAT64, &c, 3, sides, STEPS, tolerance_of(TCH_OPTIM_MUON));
    }
}

/* amsgrad is AdamW's own: the AdamW of the other kinds has no place for it and goes without. */
static void amsgrad_elsewhere(tch_context *context, tch_optim_kind kind)
{
    trial t;
    tch_optim_config c = config_of(kind);
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    c.amsgrad = 1;
    replace_optimizer(&t, &c);
    t.configs[0].amsgrad = kind == TCH_OPTIM_ADAMW;
    trial_steps(&t, STEPS);
    trial_check(&t, tolerance_of(kind));
    trial_close(&t);
}

static void options_of_other_kinds(void **state)
{
    trial_for_every_kind(*state, "amsgrad", amsgrad_elsewhere);
}

/* Two blocks with the same numbers and gradients: the same steps, but not rounded by the same random numbers. */
static void blocks_are_rounded_apart(void **state)
{
    enum { ROWS = 8, COLS = 16 };
    const trial_shape wide[] = {{.ndim = 2, .shape = {ROWS, COLS}}};
    double values[ROWS * COLS];
    int differing = 0;
    trial t;
    const tch_tensor *gradients[1];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    c.max_preconditioner_dim = COLS / 2;
    c.stochastic_rounding = 1;
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
    trial_list_gradients(&t, gradients);
    CHECK_OK(tch_optimizer_step(t.optimizer, 1, gradients));
    double *after = test_tensor_read(t.parameters[0].memory);
    for (int i = 0; i < ROWS * COLS; i++) {
        differing += i % COLS < COLS / 2 && after[i] != after[i + COLS / 2];
    }
    CHECK(differing > 0, "both blocks have the same bits");
    trial_close(&t);
}

/* --- learning rates ---------------------------------------------------------------------------------------------- */

/* The number on the device is lr: what AdamW is left with follows it too, by the ratio of its rate where it has one. */
static void rates_for_the_rest(tch_context *context, tch_optim_kind kind)
{
    const double scalar_rates[] = {0.0, 0.007};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = config_of(kind);
        c.scalar_lr = scalar_rates[k];
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        test_tensor *lr = test_tensor_make(context, TCH_FLOAT64, 0, (const int64_t[]){1}, LAYOUT_CONTIGUOUS);
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr->tensor));
        for (int i = 0; i < STEPS; i++) {
            t.configs[0].lr = 0.01 * (1 + i % 5);
            test_tensor_write(lr, &t.configs[0].lr);
            trial_step(&t);
        }
        trial_check(&t, tolerance_of(kind));
        trial_close(&t);
    }
}

static void learning_rates_on_the_device(void **state)
{
    trial_for_every_kind(*state, "a learning rate on the device", rates_for_the_rest);
}

/* A schedule through 0, by the two calls that change lr, and then by a configuration that brings another rate. */
static void rates_follow(tch_context *context, tch_optim_kind kind)
{
    static const double rates[] = {0.01, 0.04, 0.0, 0.005};
    trial t;
    tch_optim_config c = config_of(kind);
    c.scalar_lr = 0.007;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    trial_step(&t);
    for (int i = 0; i < 4; i++) {
        t.configs[0].lr = rates[i];
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, rates[i]));
        trial_step(&t);
    }
    for (int i = 0; i < 4; i++) {
        c.lr = rates[i];
        trial_set_config(&t, 0, &c);
        trial_step(&t);
    }
    c.lr = 0.03;
    c.scalar_lr = 0.002;
    trial_set_config(&t, 0, &c);
    trial_step(&t);
    c.lr = 0.01;
    trial_set_config(&t, 0, &c);
    trial_step(&t);
    trial_check(&t, tolerance_of(kind));
    trial_close(&t);
}

/* A group whose lr was 0 from the start has no ratio: nothing moves, then the rate stays. */
static void rates_without_ratio(tch_context *context, tch_optim_kind kind)
{
    static const double rates[] = {0.0, 0.01, 0.04, 0.0, 0.005};
    trial t;
    tch_optim_config c = config_of(kind);
    c.lr = 0.0;
    c.scalar_lr = 0.007;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    for (int i = 0; i < 5; i++) {
        t.configs[0].lr = rates[i];
        t.configs[0].scalar_base_lr = rates[i] > 0.0 ? rates[i] : 1.0; /* the reference's: 0.007, or 0 */
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, rates[i]));
        trial_step(&t);
    }
    trial_check(&t, tolerance_of(kind));
    trial_close(&t);
}

/* Not given: a share of lr, whatever lr is at first, which a configuration may return to; told by the group's
 * configuration. The reference has the share from fill_in_scalar_lr. */
static void rates_not_given(tch_context *context, tch_optim_kind kind)
{
    static const double rates[] = {0.02, 0.0, 0.04};
    for (int i = 0; i < 2; i++) {
        trial t;
        tch_optim_config now;
        tch_optim_config c = config_of(kind);
        c.lr = rates[i];
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
        CHECK(now.scalar_lr == (kind == TCH_OPTIM_MUON ? 0.3 * now.scalar_base_lr : 0.0), "%g", now.scalar_lr);
        trial_step(&t);
        for (int k = 0; k < 3; k++) {
            t.configs[0].lr = rates[k];
            CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, rates[k]));
            trial_step(&t);
        }
        c.lr = 0.02;
        c.scalar_lr = 0.007;
        trial_set_config(&t, 0, &c);
        trial_step(&t);
        c.lr = 0.01;
        c.scalar_lr = 0.0;
        trial_set_config(&t, 0, &c);
        trial_step(&t);
        trial_check(&t, tolerance_of(kind));
        trial_close(&t);
    }
}

/* A group whose lr was 0 from the start had a share, and gets a rate while lr is still 0: it has no ratio. */
static void rates_after_a_share(tch_context *context, tch_optim_kind kind)
{
    static const double rates[] = {0.01, 0.04, 0.0, 0.005};
    trial t;
    tch_optim_config c = config_of(kind);
    c.lr = 0.0;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    trial_step(&t);
    c.scalar_lr = 0.007;
    trial_set_config(&t, 0, &c);
    for (int i = 0; i < 4; i++) {
        t.configs[0].lr = rates[i];
        t.configs[0].scalar_base_lr = rates[i] > 0.0 ? rates[i] : 1.0; /* the reference's: 0.007, or 0 */
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, rates[i]));
        trial_step(&t);
    }
    trial_check(&t, tolerance_of(kind));
    trial_close(&t);
}

static void learning_rates_in_proportion(void **state)
{
    trial_for_every_kind(*state, "a rate of AdamW's part after a share", rates_after_a_share);
    trial_for_every_kind(*state, "a rate of AdamW's part that is not given", rates_not_given);
    trial_for_every_kind(*state, "a rate of AdamW's part in proportion", rates_follow);
    trial_for_every_kind(*state, "a rate of AdamW's part without a ratio", rates_without_ratio);
}

/* --- steps that are not taken ------------------------------------------------------------------------------------ */

/* A bad gradient of any group is found, keeps every group where it is, and is told by its name. */
static void bad_gradients_of_a_second_group(void **state)
{
    const tch_nonfinite policies[] = {TCH_NONFINITE_SKIP, TCH_NONFINITE_RAISE};
    for (int k = 0; k < 2; k++) {
        trial t;
        const tch_tensor *gradients[2 * DETERMINED];
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        c.nonfinite = policies[k];
        if (!test_on_cpu()) { /* the schedule counts skips that the host does not know of: refresh at every step */
            c.precondition_frequency = 1;
        }
        test_case("a bad gradient of the second group, policy %d", (int)policies[k]);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        trial_add_group(&t, &c, DETERMINED, shapes);
        for (int i = 0; i < STEPS; i++) {
            trial_step(&t);
            trial_draw(&t);
            trial_spoil(&t, DETERMINED + i % DETERMINED, NAN);
            trial_list_gradients(&t, gradients);
            tch_status got = tch_optimizer_step(t.optimizer, t.count, gradients);
            char name[32];
            snprintf(name, sizeof name, "'parameter%d'", DETERMINED + i % DETERMINED);
            CHECK(got == (k == 0 ? TCH_OK : TCH_ERR_NUMERIC), "gave %s", tch_status_name(got));
            CHECK(k == 0 || strstr(tch_last_error(), name) != NULL, "%s is not in: %s", name, tch_last_error());
        }
        trial_check(&t, tolerance_of(TCH_OPTIM_SHAMPOO));
        trial_close(&t);
    }
}

/* What loss scaling has found counts, whether or not the step would have looked itself. */
static void found_inf_under_every_policy(void **state)
{
    const tch_nonfinite policies[] = {TCH_NONFINITE_SKIP, TCH_NONFINITE_RAISE, TCH_NONFINITE_IGNORE};
    for (int k = 0; k < 3; k++) {
        trial t;
        const tch_tensor *gradients[SHAPES];
        tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
        c.nonfinite = policies[k];
        test_case("found_inf, policy %d", (int)policies[k]);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        test_tensor *found = test_tensor_make(*state, TCH_FLOAT32, 0, (const int64_t[]){1}, LAYOUT_CONTIGUOUS);
        trial_list_gradients(&t, gradients);
        for (int i = 0; i < STEPS; i++) {
            bool bad = i % 3 == 1;
            test_tensor_write(found, &(double){bad ? 1.0 : 0.0});
            trial_draw(&t);
            tch_status got = tch_optimizer_step_scaled(t.optimizer, SHAPES, gradients, NULL, &found->tensor);
            tch_status expected = bad && policies[k] == TCH_NONFINITE_RAISE ? TCH_ERR_NUMERIC : TCH_OK;
            CHECK(got == expected, "step %d gave %s", i, tch_status_name(got));
            if (!bad) {
                trial_step_references(&t);
            }
        }
        CHECK(trial_stats(&t).skipped == STEPS / 3, "%lld steps were skipped", (long long)trial_stats(&t).skipped);
        trial_check(&t, tolerance_of(TCH_OPTIM_ADAMW));
        trial_close(&t);
    }
}

/* --- roots ------------------------------------------------------------------------------------------------------- */

static tch_optim_config loose_newton(void)
{
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    c.beta1 = 0.0;
    c.beta2 = 1.0;
    c.weight_decay = 0.0;
    c.eps = 1e-12;
    c.precondition_frequency = 1;
    c.root_method = TCH_ROOT_NEWTON;
    c.root_tolerance = 1e-3;
    return c;
}

/* The inverse fourth root of a factor of the state as tch_inverse_root gives it; its certificate if wanted. */
static double *root_of(const trial *t, const tch_tensor *factor, tch_root_method method, double relative_eps,
                       double tolerance, double *residual)
{
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    tch_tensor *out = NULL;
    tch_tensor *certificate = NULL;
    how.eps = t->configs[0].eps;
    how.relative_eps = relative_eps;
    how.tolerance = tolerance;
    how.method = method;
    CHECK_OK(tch_tensor_create(t->context, factor->dtype, 2, factor->shape, TCH_CONTIGUOUS, &out));
    CHECK_OK(tch_tensor_create(t->context, TCH_FLOAT64, 0, NULL, TCH_CONTIGUOUS, &certificate));
    CHECK_OK(tch_inverse_root(t->context, factor, 4, &how, out, certificate, NULL));
    double *values = trial_read(t, out);
    double *number = trial_read(t, certificate);
    if (residual != NULL) {
        *residual = *number;
    }
    tch_tensor_destroy(out);
    tch_tensor_destroy(certificate);
    return values;
}

/* How far the root in the state is from this one, as a share of it. */
static double gap(const trial *t, int32_t parameter, tch_root_method method, double relative_eps, double tolerance)
{
    char name[64];
    snprintf(name, sizeof name, "parameter%d/factor.0.0", parameter);
    const tch_tensor *factor = trial_state(t, name);
    snprintf(name, sizeof name, "parameter%d/root.0.0", parameter);
    double *expected = root_of(t, factor, method, relative_eps, tolerance, NULL);
    double *got = trial_read(t, trial_state(t, name));
    int64_t count = tch_tensor_numel(factor);
    double share = ref_distance(count, got, expected) / ref_norm(count, expected);
    return share;
}

static void clear_factors(const trial *t)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t->optimizer, i, &s));
        if (strstr(s.name, "/factor.") != NULL) {
            CHECK_OK(tch_tensor_fill(t->context, s.tensor, 0.0));
        }
    }
}

static void step_spoiled(trial *t, int32_t first_bad)
{
    const tch_tensor *gradients[3];
    trial_draw(t);
    for (int32_t i = first_bad; i < 3; i++) {
        trial_spoil(t, i, NAN);
    }
    trial_list_gradients(t, gradients);
    CHECK_OK(tch_optimizer_step(t->optimizer, 3, gradients));
}

static tch_status try_load(const trial *t, const char *path)
{
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    tch_status status = tch_optimizer_load(t->optimizer, checkpoint, "optimizer");
    tch_checkpoint_close(checkpoint);
    return status;
}

static void look(const trial *t, int times, int64_t failed)
{
    for (int i = 0; i < times; i++) {
        int64_t told = trial_stats(t).failed;
        CHECK(told == failed, "%lld roots have failed, expected %lld", (long long)told, (long long)failed);
    }
}

/* The third parameter's factors are spoiled twice, the second's once: those then get ten times the damping and
 * a tolerance of 1e-5, and the third's the eigen method as well, in a restarted training too, and however often
 * statistics are asked for. */
static void check_failed_roots(tch_context *context, bool restart, int looks)
{
    trial t;
    const char *path = test_path("trouble.safetensors");
    tch_optim_config c = loose_newton();
    c.nonfinite = TCH_NONFINITE_IGNORE;
    test_case("roots that fail%s, statistics read %d times", restart ? ", restarted" : "", looks);
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, 3, shapes);
    step_spoiled(&t, 2);
    look(&t, looks, 2);
    step_spoiled(&t, 1);
    look(&t, looks, 4);
    clear_factors(&t);
    if (restart) {
        trial_save(&t, path);
        replace_optimizer(&t, &c);
        CHECK_OK(try_load(&t, path));
    }
    step_spoiled(&t, 3);
    look(&t, 1, 0);
    double damping = c.relative_eps;
    CHECK(gap(&t, 2, TCH_ROOT_NEWTON, 10.0 * damping, 1e-5) > 1e-12, "the test cannot tell the methods apart");
    CHECK(gap(&t, 1, TCH_ROOT_NEWTON, 10.0 * damping, 1e-3) > 1e-8, "the test cannot tell the tolerances apart");
    CHECK(gap(&t, 0, TCH_ROOT_NEWTON, damping, 1e-3) < 1e-9, "a root that never failed is another");
    CHECK(gap(&t, 1, TCH_ROOT_NEWTON, 10.0 * damping, 1e-5) < 1e-9, "not more damping and care after one failure");
    CHECK(gap(&t, 2, TCH_ROOT_EIGEN, 10.0 * damping, 1e-5) < 1e-13, "not the eigen method after two failures");
    trial_close(&t);
}

static void failed_roots_go_another_way(void **state)
{
    for (int i = 0; i < 4; i++) {
        check_failed_roots(*state, i % 2 == 1, i < 2 ? 0 : 256);
    }
}

/* The largest certificate among all roots. */
static void the_worst_residual(void **state)
{
    trial t;
    double worst = 0.0;
    tch_optim_config c = loose_newton();
    test_case("the worst residual");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 3, shapes);
    step_spoiled(&t, 3);
    for (int32_t i = 0; i < 3; i++) {
        for (int k = 0; k < 2; k++) {
            char name[64];
            double residual;
            snprintf(name, sizeof name, "parameter%d/factor.0.%d", i, k);
            root_of(&t, trial_state(&t, name), TCH_ROOT_NEWTON, c.relative_eps, c.root_tolerance, &residual);
            worst = fmax(worst, residual);
        }
    }
    double told = trial_stats(&t).worst_residual;
    CHECK(worst > 0.0 && told > 0.2 * worst && told < 5.0 * worst, "%g, the roots by themselves %g", told, worst);
    trial_close(&t);
}

/* relative_eps is taken as at least 2 u sqrt(gradients in the factor). Factors of low rank show what it is. */
static void damping_covers_rounding(void **state)
{
    const double beta2[] = {1.0, 0.5};
    const trial_shape tall[] = {{.ndim = 2, .shape = {24, 2}}};
    for (int k = 0; k < 2; k++) {
        trial t;
        const tch_tensor *gradients[1];
        tch_optim_config c = loose_newton();
        c.root_method = TCH_ROOT_EIGEN;
        c.relative_eps = 1e-9;
        c.eps = 1e-30;
        c.beta2 = beta2[k];
        test_case("damping and rounding, beta2 %g", beta2[k]);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, tall);
        trial_list_gradients(&t, gradients);
        for (int i = 0; i < 8; i++) {
            trial_draw(&t);
            CHECK_OK(tch_optimizer_step(t.optimizer, 1, gradients));
        }
        double expected = 2.0 * 0x1p-24 * sqrt(beta2[k] < 1.0 ? 2.0 : 8.0);
        double off = gap(&t, 0, TCH_ROOT_EIGEN, expected, 1e-3);
        CHECK(off < 0.02, "the root is off by %g from that with a relative damping of %g", off, expected);
        trial_close(&t);
    }
}

static void roots_begin_at_the_identity(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    test_case("roots before the first step");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, shapes);
    double *root = trial_read(&t, trial_state(&t, "parameter0/root.0.1"));
    for (int i = 0; i < 64; i++) {
        CHECK(root[i] == (i % 9 == 0 ? 1.0 : 0.0), "element %d is %g", i, root[i]);
    }
    trial_close(&t);
}

/* --- schedules --------------------------------------------------------------------------------------------------- */

/* Vectors have one factor each: the step of a period in which the largest is refreshed has nothing else to do. */
static void small_roots_make_room_for_large_ones(void **state)
{
    const trial_shape vectors[] = {
        {.ndim = 1, .shape = {20}}, {.ndim = 1, .shape = {8}}, {.ndim = 1, .shape = {7}}, {.ndim = 1, .shape = {6}}};
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    c.precondition_1d = 1;
    c.stagger = 1;
    c.precondition_frequency = 2;
    test_case("one large root and three small ones");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 4, vectors);
    trial_step(&t);
    for (int i = 0; i < 4; i++) {
        int64_t before = trial_stats(&t).refreshes;
        double *root = trial_read(&t, trial_state(&t, "parameter0/root.0.0"));
        trial_step(&t);
        double *now = trial_read(&t, trial_state(&t, "parameter0/root.0.0"));
        int64_t others = trial_stats(&t).refreshes - before;
        bool large = memcmp(root, now, 400 * sizeof *now) != 0;
        CHECK(others == (large ? 1 : 3), "%lld roots beside %s", (long long)others, large ? "the large one" : "none");
    }
    trial_close(&t);
}

/* After a change of the period every root is refreshed once in each new one. */
static void staggered_periods_change(void **state)
{
    const int32_t periods[] = {6, 3, 7};
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    c.stagger = 1;
    c.precondition_frequency = periods[0];
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    int64_t factors = trial_stats(&t).refreshes;
    for (int k = 0; k < 3; k++) {
        test_case("a period of %d", periods[k]);
        c.precondition_frequency = periods[k];
        trial_set_config(&t, 0, &c);
        for (int round = 0; round < 2; round++) {
            int64_t before = trial_stats(&t).refreshes;
            for (int i = 0; i < periods[k]; i++) {
                trial_step(&t);
            }
            int64_t taken = trial_stats(&t).refreshes - before;
            CHECK(taken == factors, "%lld of %lld roots were refreshed", (long long)taken, (long long)factors);
        }
    }
    trial_close(&t);
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

/* Two trainings, of which the second goes on in a fresh optimizer from a checkpoint: with parameters of one shape whose
 * gradients came at different times, one of them none yet, and with another seed of stochastic rounding at first. */
static void resume_with(tch_context *context, tch_optim_kind kind, double drift)
{
    enum { AT = 3 };
    trial t[2];
    const tch_tensor *gradients[SHAPES];
    const char *path = test_path("more.safetensors");
    tch_optim_config c = config_of(kind);
    c.stochastic_rounding = 1;
    c.seed = 11;
    c.refresh_drift = drift;
    c.precondition_frequency = drift > 0.0 ? 16 : c.precondition_frequency;
    for (int k = 0; k < 2; k++) {
        trial_open(&t[k], context, TCH_BFLOAT16, TCH_BFLOAT16, &c, SHAPES, shapes);
    }
    for (int i = 0; i < STEPS; i++) {
        for (int k = 0; k < 2; k++) {
            choose_missing(&t[k], i);
            trial_draw(&t[k]);
            trial_list_gradients(&t[k], gradients);
            CHECK_OK(tch_optimizer_step(t[k].optimizer, SHAPES, gradients));
        }
        if (i == AT) {
            tch_optim_config other = c;
            trial_save(&t[1], path);
            other.seed = 12;
            replace_optimizer(&t[1], &other);
            CHECK_OK(try_load(&t[1], path));
        }
    }
    for (int32_t i = 0; i < SHAPES; i++) {
        CHECK(same_parameter(&t[0], &t[1], i), "parameter %d has other bits", i);
    }
    trial_close(&t[0]);
    trial_close(&t[1]);
}

/* With gaps that are kept, halved and doubled where refreshes are by need. */
static void resume(tch_context *context, tch_optim_kind kind)
{
    static const double drifts[] = {0.0, 1e-9, 1.5, 1e6};
    for (size_t i = 0; i < TEST_COUNT(drifts); i++) {
        resume_with(context, kind, drifts[i]);
    }
}

static void training_is_resumed_with_all_it_had(void **state)
{
    trial_for_every_kind(*state, "resumed", resume);
}

/* Back to an earlier state in the same optimizer, whose learning rate has changed since: the same steps again. */
static void rewind_training(tch_context *context, tch_optim_kind kind)
{
    trial t[2];
    const tch_tensor *gradients[SHAPES];
    const char *path = test_path("rewound.safetensors");
    tch_optim_config c = config_of(kind);
    for (int k = 0; k < 2; k++) {
        trial_open(&t[k], context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        trial_step(&t[k]);
    }
    trial_save(&t[1], path);
    CHECK_OK(tch_optimizer_set_lr(t[1].optimizer, 0, 0.3));
    double *before[SHAPES];
    for (int32_t i = 0; i < SHAPES; i++) {
        before[i] = test_tensor_read(t[1].parameters[i].memory);
    }
    trial_list_gradients(&t[1], gradients);
    CHECK_OK(tch_optimizer_step(t[1].optimizer, SHAPES, gradients));
    CHECK_OK(try_load(&t[1], path));
    for (int32_t i = 0; i < SHAPES; i++) {
        test_tensor_write(t[1].parameters[i].memory, before[i]);
    }
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < STEPS; i++) {
            trial_step(&t[k]);
        }
    }
    for (int32_t i = 0; i < SHAPES; i++) {
        CHECK(same_parameter(&t[0], &t[1], i), "parameter %d has other bits", i);
    }
    trial_close(&t[0]);
    trial_close(&t[1]);
}

static void training_is_rewound(void **state)
{
    trial_for_every_kind(*state, "rewound", rewind_training);
}

/* What is of this machine and not of the training stays the optimizer's own. */
static void checkpoints_leave_the_machines_options(void **state)
{
    trial t;
    const char *path = test_path("own.safetensors");
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_config now;
    test_case("another budget, policy and precision");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    trial_save(&t, path);
    c.memory_budget = 1 << 22;
    c.nonfinite = TCH_NONFINITE_RAISE;
    c.precision = TCH_PRECISION_HIGH;
    replace_optimizer(&t, &c);
    CHECK_OK(try_load(&t, path));
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.memory_budget == c.memory_budget && now.nonfinite == c.nonfinite && now.precision == c.precision,
          "the checkpoint's were taken");
    trial_step(&t);
    trial_check(&t, tolerance_of(TCH_OPTIM_SHAMPOO));
    trial_close(&t);
}

/* Saved where a schedule has lr at 0, the ratio goes on. A file of a version that kept none leaves that which the
 * optimizer was made with. */
static void checkpoints_keep_the_ratio(void **state)
{
    for (int old = 0; old < 2; old++) {
        trial t;
        const char *path = test_path("ratio.safetensors");
        const char *older = test_path("older.safetensors");
        tch_optim_config c = config_of(TCH_OPTIM_MUON);
        c.scalar_lr = 0.007;
        test_case("a ratio, %s", old ? "of an earlier version" : "saved");
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        trial_step(&t);
        t.configs[0].lr = 0.0;
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, 0.0));
        trial_step(&t);
        trial_save(&t, path);
        test_checkpoint_set_text(path, older, "optimizer/group0.scalar_base_lr", NULL);
        c.lr = old ? c.lr : 0.5; /* what the file has is taken */
        replace_optimizer(&t, &c);
        CHECK_OK(try_load(&t, old ? older : path));
        t.configs[0].lr = 0.01;
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, 0.01));
        trial_step(&t);
        trial_check(&t, tolerance_of(TCH_OPTIM_MUON));
        trial_close(&t);
    }
}

/* There a rate that was not given was lr itself, and it goes on so. */
static void checkpoints_without_a_share(void **state)
{
    const char *path = test_path("share.safetensors");
    const char *older = test_path("older.safetensors");
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    trial t;
    test_case("no share of lr in an earlier version");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
    trial_step(&t);
    trial_save(&t, path);
    test_checkpoint_set_text(path, older, "optimizer/group0.scalar_lr", "0");
    replace_optimizer(&t, &c);
    CHECK_OK(try_load(&t, older));
    c.lr = 0.01;
    CHECK_OK(tch_optimizer_set_config(t.optimizer, 0, &c));
    t.configs[0] = c; /* 0 is lr to the reference */
    trial_step(&t);
    trial_check(&t, tolerance_of(TCH_OPTIM_MUON));
    trial_close(&t);
}

/* A file without the options that came later loads, and leaves those of the optimizer. */
static void checkpoints_of_earlier_versions(void **state)
{
    static const char *const later[] = {"refresh_drift", "world_invariant", "scalar_base_lr"};
    const char *paths[] = {test_path("new.safetensors"), test_path("old.safetensors")};
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_config now;
    trial t;
    test_case("options that a file does not have");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    trial_save(&t, paths[0]);
    for (size_t i = 0; i < TEST_COUNT(later); i++) {
        char key[64];
        snprintf(key, sizeof key, "optimizer/group0.%s", later[i]);
        test_checkpoint_set_text(paths[i % 2], paths[(i + 1) % 2], key, NULL);
    }
    c.refresh_drift = 0.25;
    replace_optimizer(&t, &c);
    CHECK_OK(try_load(&t, paths[TEST_COUNT(later) % 2]));
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.refresh_drift == 0.25, "refresh_drift became %g", now.refresh_drift);
    trial_close(&t);
}

static void with_momentum(tch_optim_config *c)
{
    c->momentum = 0.9;
}

static void maximizing(tch_optim_config *c)
{
    c->maximize = 1;
}

/* A checkpoint of other options is refused, and the optimizer goes on as if it had not been tried. */
static void checkpoints_of_other_options(void **state)
{
    static const struct {
        const char *name;
        tch_optim_kind kind;
        void (*change)(tch_optim_config *config);
    } cases[] = {
        {"a buffer that this one has no place for", TCH_OPTIM_SHAMPOO, with_momentum},
        {"maximize", TCH_OPTIM_SHAMPOO, maximizing},
        {"maximize", TCH_OPTIM_ADAMW, maximizing},
        {"maximize", TCH_OPTIM_LION, maximizing},
        {"maximize", TCH_OPTIM_NORMUON, maximizing},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        trial t;
        trial other;
        const char *path = test_path("other.safetensors");
        tch_optim_config c = config_of(cases[k].kind);
        tch_optim_config changed = c;
        cases[k].change(&changed);
        test_case("a checkpoint of another optimizer: %s", cases[k].name);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        trial_open(&other, *state, TCH_FLOAT64, TCH_FLOAT64, &changed, SHAPES, shapes);
        trial_step(&t);
        trial_step(&other);
        trial_step(&other);
        trial_save(&other, path);
        tch_status got = try_load(&t, path);
        CHECK(got == TCH_ERR_INVALID_ARGUMENT, "gave %s", tch_status_name(got));
        trial_steps(&t, STEPS);
        trial_check(&t, tolerance_of(cases[k].kind));
        trial_close(&other);
        trial_close(&t);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

typedef struct caller_memory {
    tch_context *context;
    int64_t bytes, off;
} caller_memory;

static tch_status caller_allocate(void *user, int64_t bytes, void **pointer)
{
    caller_memory *m = user;
    tch_status status = tch_memory_alloc(m->context, bytes + 256, pointer);
    m->bytes += status == TCH_OK ? bytes : 0;
    *pointer = (char *)*pointer + m->off;
    return status;
}

static void caller_release(void *user, void *pointer, int64_t bytes)
{
    caller_memory *m = user;
    m->bytes -= bytes;
    (void)tch_memory_free(m->context, (char *)pointer - m->off);
}

/* All state comes from the caller's allocator, also that of a later group; memory that is not aligned is refused. */
static void memory_of_the_caller(void **state)
{
    trial t;
    tch_parameter entries[SHAPES];
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    caller_memory m = {.context = *state, .off = 64};
    const tch_state_allocator allocator = {sizeof allocator, caller_allocate, caller_release, &m};
    test_case("memory of the caller's");
    trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes, entries);
    tch_status got = tch_optimizer_create_with(*state, &c, SHAPES, entries, &allocator, &t.optimizer);
    CHECK(got == TCH_ERR_INVALID_ARGUMENT && t.optimizer == NULL, "memory off by 64 gave %s", tch_status_name(got));
    m.off = m.bytes = 0;
    CHECK_OK(tch_optimizer_create_with(*state, &c, SHAPES, entries, &allocator, &t.optimizer));
    trial_add_group(&t, &c, SHAPES, shapes);
    trial_steps(&t, STEPS);
    trial_check(&t, tolerance_of(TCH_OPTIM_SHAMPOO));
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    CHECK(memory.state == m.bytes, "%lld bytes of state, %lld from the caller", (long long)memory.state,
          (long long)m.bytes);
    trial_close(&t);
    CHECK(m.bytes == 0, "%lld bytes were not given back", (long long)m.bytes);
}

static int64_t allocated(tch_context *context)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_trim(context, 0));
    CHECK_OK(tch_memory_get_info(context, &info));
    return info.allocated;
}

/* Scratch that grew with a new group leaves nothing behind, and the context's limit is what the caller set. */
static void steps_give_back_what_they_borrow(tch_context *context, tch_optim_kind kind)
{
    const int64_t limit = (int64_t)1 << 33;
    const trial_shape large[] = {{.ndim = 2, .shape = {64, 64}}};
    trial t;
    trial more;
    tch_parameter entries[SHAPES];
    tch_parameter others[1];
    tch_optim_config c = config_of(kind);
    c.memory_budget = 1 << 20;
    CHECK_OK(tch_context_set_workspace_limit(context, limit));
    trial_prepare(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes, entries);
    trial_prepare(&more, context, TCH_FLOAT64, TCH_FLOAT64, &c, 1, large, others);
    others[0].name = "large";
    int64_t before = allocated(context);
    CHECK_OK(tch_optimizer_create(context, &c, SHAPES, entries, &t.optimizer));
    for (int i = 0; i < 2; i++) {
        trial_step(&t);
        CHECK(tch_context_get_workspace_limit(context) == limit, "the limit of the workspace has changed");
    }
    CHECK_OK(tch_optimizer_add_group(t.optimizer, &c, 1, others, NULL));
    tch_optimizer_destroy(t.optimizer);
    t.optimizer = NULL;
    int64_t left = allocated(context) - before;
    CHECK(left == 0, "%lld bytes are left after the optimizer", (long long)left);
    trial_close(&more);
    trial_close(&t);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
}

static void what_is_borrowed_is_given_back(void **state)
{
    trial_for_every_kind(*state, "what is borrowed", steps_give_back_what_they_borrow);
}

/* Large chunks of state go back to the device with their optimizer instead of waiting in the pool. */
static void state_goes_back_to_the_device(void **state)
{
    trial t;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    const trial_shape large[] = {{.ndim = 2, .shape = {64, 64}}};
    tch_parameter entries[1];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    test_case("state goes back");
    trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, large, entries);
    CHECK_OK(tch_memory_trim(*state, 0));
    CHECK_OK(tch_memory_get_info(*state, &before));
    CHECK_OK(tch_optimizer_create(*state, &c, 1, entries, &t.optimizer));
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    tch_optimizer_destroy(t.optimizer);
    t.optimizer = NULL;
    CHECK_OK(tch_memory_get_info(*state, &after));
    CHECK(after.reserved - before.reserved < memory.state / 4, "%lld bytes are kept of %lld of state",
          (long long)(after.reserved - before.reserved), (long long)memory.state);
    trial_close(&t);
}

/* Within a small workspace a few bases are made and followed at a time, to the same end. On the CPU: the eigensolver of
 * a GPU needs more for one basis than bases of these sizes take in all. */
static void bases_in_a_small_workspace(void **state)
{
    if (!test_on_cpu()) {
        skip();
    }
    enum { COUNT = 12 };
    const int64_t limit = 64 << 10;
    trial_shape squares[COUNT];
    trial t;
    tch_parameter entries[COUNT];
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    tch_optim_config c = config_of(TCH_OPTIM_SOAP);
    test_case("bases within %lld bytes", (long long)limit);
    for (int i = 0; i < COUNT; i++) {
        squares[i] = (trial_shape){.ndim = 2, .shape = {24, 24}};
    }
    CHECK_OK(tch_context_set_workspace_limit(*state, limit));
    trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, COUNT, squares, entries);
    int64_t held = allocated(*state);
    CHECK_OK(tch_memory_reset_peak(*state));
    CHECK_OK(tch_optimizer_create(*state, &c, COUNT, entries, &t.optimizer));
    trial_steps(&t, STEPS);
    CHECK_OK(tch_memory_get_info(*state, &info));
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    CHECK(memory.refresh > 2 * limit, "all at once take only %lld bytes", (long long)memory.refresh);
    int64_t taken = info.peak - held - memory.state - memory.scratch - 4096 /* small things */;
    CHECK(taken <= limit, "%lld bytes of workspace", (long long)taken);
    trial_check(&t, tolerance_of(TCH_OPTIM_SOAP));
    trial_close(&t);
    CHECK_OK(tch_context_set_workspace_limit(*state, 0));
}

/* A number of 64 bits is looked at as one. */
static void budgets_out_of_range(void **state)
{
    tch_optimizer *optimizer = NULL;
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    test_case("a budget below zero");
    c.memory_budget = -((int64_t)1 << 33);
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT,
                       "memory_budget");
}

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

static tch_scaler *make_scaler(tch_context *context, double scale)
{
    tch_scaler *scaler = NULL;
    tch_scaler_config how = TCH_SCALER_CONFIG_INIT;
    how.init_scale = scale;
    CHECK_OK(tch_scaler_create(context, &how, &scaler));
    return scaler;
}

/* Gradients are unscaled by hand in every second iteration: what was called in one does not count in the next. */
static void unscaling_now_and_then(void **state)
{
    trial t;
    const tch_tensor *gradients[SHAPES];
    tch_tensor *writable[SHAPES];
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    tch_scaler *scaler = make_scaler(*state, 1024.0);
    test_case("unscaled now and then");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_list_gradients(&t, gradients);
    for (int i = 0; i < STEPS; i++) {
        trial_draw(&t);
        for (int32_t k = 0; k < SHAPES; k++) {
            double *values = test_tensor_read(t.parameters[k].gradient_memory);
            for (int64_t e = 0; e < t.parameters[k].memory->count; e++) {
                values[e] *= 1024.0;
            }
            test_tensor_write(t.parameters[k].gradient_memory, values);
            writable[k] = &t.parameters[k].gradient;
        }
        if (i % 2 == 0) {
            CHECK_OK(tch_scaler_unscale(scaler, SHAPES, writable));
        }
        CHECK_OK(tch_scaler_step(scaler, t.optimizer, SHAPES, gradients));
        CHECK_OK(tch_scaler_update(scaler));
        trial_step_references(&t);
    }
    for (int32_t i = 0; i < SHAPES; i++) {
        CHECK(trial_error(&t, i, STEPS) < tolerance_of(TCH_OPTIM_SGD), "parameter %d is off", i);
    }
    tch_scaler_destroy(scaler);
    trial_close(&t);
}

/* A state that is set begins a new iteration. */
static void a_state_begins_an_iteration(void **state)
{
    tch_scaler *scaler = make_scaler(*state, 8.0);
    tch_scaler_state numbers = TCH_SCALER_STATE_INIT;
    test_case("a state in the middle of an iteration");
    CHECK_OK(tch_scaler_unscale(scaler, 0, NULL));
    CHECK_OK(tch_scaler_get_state(scaler, &numbers));
    CHECK_OK(tch_scaler_set_state(scaler, &numbers));
    test_check_refused(tch_scaler_update(scaler), TCH_ERR_INVALID_ARGUMENT, "scaler");
    tch_scaler_destroy(scaler);
}

/* A box of a larger tensor, with one element, row and matrix left out at every end: inside all is divided and searched,
 * outside nothing. */
static void a_box_with_gaps_of_one(void **state)
{
    int64_t outer[] = {3, 4, 5, 6};
    int64_t inner[] = {2, 3, 4, 5};
    int64_t strides[] = {120, 30, 6, 1};
    double values[360];
    tch_scaler *scaler = make_scaler(*state, 2.0);
    test_tensor *memory = test_tensor_make(*state, TCH_FLOAT32, 4, outer, LAYOUT_CONTIGUOUS);
    tch_tensor box = memory->tensor;
    tch_tensor *list[] = {&box};
    box.shape = inner;
    box.strides = strides;
    test_case("a box with gaps");
    for (int i = 0; i < 360; i++) {
        values[i] = i + 1.0;
    }
    values[359] = INFINITY; /* outside */
    test_tensor_write(memory, values);
    CHECK_OK(tch_scaler_unscale(scaler, 1, list));
    double *after = test_tensor_read(memory);
    for (int i = 0; i < 360; i++) {
        bool inside = i / 120 < 2 && i / 30 % 4 < 3 && i / 6 % 5 < 4 && i % 6 < 5;
        CHECK(after[i] == (inside ? values[i] / 2.0 : values[i]), "element %d is %g", i, after[i]);
    }
    CHECK_OK(tch_scaler_update(scaler));
    tch_scaler_state numbers = TCH_SCALER_STATE_INIT;
    CHECK_OK(tch_scaler_get_state(scaler, &numbers));
    CHECK(numbers.scale == 2.0, "an infinity outside the box was found");
    tch_scaler_destroy(scaler);
}

/* A group that cannot be added for want of any allocation leaves the figures of memory as they were. */
static void figures_after_a_group_that_failed(void **state)
{
    counting_allocator counting = {0};
    tch_host_allocator interface = counting_allocator_interface(&counting);
    bool through = false;
    (void)state;
    CHECK_OK(tch_set_host_allocator(&interface));
    for (long long k = 1; !through; k++) {
        trial t;
        trial more;
        tch_parameter entries[SHAPES];
        tch_context *context = NULL;
        tch_optim_memory before = TCH_OPTIM_MEMORY_INIT;
        tch_optim_memory after = TCH_OPTIM_MEMORY_INIT;
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        test_case("adding a group, allocation %lld", k);
        CHECK_OK(tch_context_create(test_device(), &context));
        trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, 2, shapes);
        trial_prepare(&more, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes, entries);
        for (int32_t i = 0; i < SHAPES; i++) {
            static const char *const names[SHAPES] = {"a", "b", "c", "d", "e"};
            entries[i].name = names[i];
        }
        CHECK_OK(tch_optimizer_get_memory(t.optimizer, &before));
        counting_allocator_arm(&counting, k);
        tch_status status = tch_optimizer_add_group(t.optimizer, &c, SHAPES, entries, NULL);
        through = atomic_load(&counting.calls) < k;
        counting_allocator_arm(&counting, 0);
        CHECK_OK(tch_optimizer_get_memory(t.optimizer, &after));
        CHECK(status == TCH_OK || memcmp(&before, &after, sizeof after) == 0, "%lld bytes of state were %lld",
              (long long)after.state, (long long)before.state);
        trial_close(&t);
        trial_close(&more);
        tch_context_destroy(context);
    }
    CHECK_OK(tch_set_host_allocator(NULL));
}

/* --- the program ------------------------------------------------------------------------------------------------- */

/* Allocators are exchanged while no memory is held, so this one has no context of the group's. */
static int count_allocations(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(figures_after_a_group_that_failed)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_shapes_at_different_times),
        cmocka_unit_test(state_rests_without_gradients),
        cmocka_unit_test(equal_shapes_with_gradients_of_two_types),
        cmocka_unit_test(the_smallest_transposed_gradient),
        cmocka_unit_test(five_dimensions),
        cmocka_unit_test(lying_and_standing_matrices),
        cmocka_unit_test(options_of_other_kinds),
        cmocka_unit_test(blocks_are_rounded_apart),
        cmocka_unit_test(learning_rates_on_the_device),
        cmocka_unit_test(learning_rates_in_proportion),
        cmocka_unit_test(bad_gradients_of_a_second_group),
        cmocka_unit_test(found_inf_under_every_policy),
        cmocka_unit_test(failed_roots_go_another_way),
        cmocka_unit_test(the_worst_residual),
        cmocka_unit_test(damping_covers_rounding),
        cmocka_unit_test(roots_begin_at_the_identity),
        cmocka_unit_test(small_roots_make_room_for_large_ones),
        cmocka_unit_test(staggered_periods_change),
        cmocka_unit_test(training_is_resumed_with_all_it_had),
        cmocka_unit_test(training_is_rewound),
        cmocka_unit_test(checkpoints_leave_the_machines_options),
        cmocka_unit_test(checkpoints_of_earlier_versions),
        cmocka_unit_test(checkpoints_keep_the_ratio),
        cmocka_unit_test(checkpoints_without_a_share),
        cmocka_unit_test(checkpoints_of_other_options),
        cmocka_unit_test(memory_of_the_caller),
        cmocka_unit_test(what_is_borrowed_is_given_back),
        cmocka_unit_test(state_goes_back_to_the_device),
        cmocka_unit_test(bases_in_a_small_workspace),
        cmocka_unit_test(budgets_out_of_range),
        cmocka_unit_test(unscaling_now_and_then),
        cmocka_unit_test(a_state_begins_an_iteration),
        cmocka_unit_test(a_box_with_gaps_of_one),
    };
    test_begin(argc, argv);
    int failed = count_allocations();
    return failed + cmocka_run_group_tests(tests, test_open_context_and_folder, test_close_context_and_folder);
}

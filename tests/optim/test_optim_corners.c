/* What the tests of each kind do not reach: parameters that rest while others of their shape do not, refreshes that
 * fail, schedules that change, learning rates on the device and of what AdamW is left with, and memory that is given
 * back.
 *
 * Tolerances are shares of the way, as in the tests of each kind. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/amp.h>

#include "support/elements.h"
#include "support/files.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
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

/* --- gradients at different times -------------------------------------------------------------------------------- */

/* A parameter without gradients keeps its state to the bit, also roots and bases that others of its shape refresh. */
static void rest(tch_context *context, tch_optim_kind kind)
{
    for (int32_t stagger = 0; stagger < 2; stagger++) {
        trial t;
        tch_optim_config c = trial_config(kind);
        c.precondition_frequency = 4;
        c.stagger = stagger;
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        trial_steps(&t, 6);
        unsigned char *before = trial_snapshot(&t, 1);
        t.parameters[1].missing = 1;
        trial_steps(&t, 9);
        trial_check_snapshot(&t, 1, before);
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
    tch_optim_config c = trial_config(kind);
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

/* Two blocks with the same numbers and gradients: the same steps, but not rounded by the same random numbers. */
static void blocks_are_rounded_apart(void **state)
{
    enum { ROWS = 8, COLS = 16 };
    const trial_shape wide[] = {{.ndim = 2, .shape = {ROWS, COLS}}};
    double values[ROWS * COLS];
    int differing = 0;
    trial t;
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
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
    CHECK_OK(trial_step_library(&t));
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
    const tch_dtype types[] = {TCH_FLOAT32, TCH_FLOAT64};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = trial_config(kind);
        c.scalar_lr = scalar_rates[k];
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        test_tensor *lr = test_tensor_make(context, types[k], k, (const int64_t[]){1}, LAYOUT_CONTIGUOUS);
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr->tensor));
        for (int i = 0; i < STEPS; i++) {
            t.configs[0].lr = test_round(types[k], 0.01 * (1 + i % 5));
            test_tensor_write(lr, &t.configs[0].lr);
            trial_step(&t);
        }
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, NULL)); /* back to the configuration's */
        t.configs[0].lr = c.lr;
        trial_step(&t);
        trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
        trial_close(&t);
    }
}

static void learning_rates_on_the_device(void **state)
{
    trial_for_every_kind(*state, "a learning rate on the device", rates_for_the_rest);
}

/* What happens to the rates of a group between two steps. */
typedef enum rate_change {
    NO_CHANGE,
    BY_CALL,
    BY_CALL_WITHOUT_RATIO, /* AdamW's part keeps its own rate, but for 0 */
    BY_CONFIG,
    BY_CONFIG_WITHOUT_STEP,
    THE_END
} rate_change;

#define MOST_CHANGES 12

typedef struct rate_script {
    const char *what;
    double lr, scalar_lr;
    struct {
        rate_change how;
        double lr, scalar_lr;
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
    {"without a ratio: lr was 0 from the start",
     0.0,
     0.007,
     {{BY_CALL_WITHOUT_RATIO, 0.0, 0},
      {BY_CALL_WITHOUT_RATIO, 0.01, 0},
      {BY_CALL_WITHOUT_RATIO, 0.04, 0},
      {BY_CALL_WITHOUT_RATIO, 0.0, 0},
      {BY_CALL_WITHOUT_RATIO, 0.005, 0},
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
    {"not given, and lr 0 at first",
     0.0,
     0.0,
     {{NO_CHANGE, 0, 0}, {BY_CALL, 0.02, 0}, {BY_CONFIG, 0.02, 0.007}, {BY_CONFIG, 0.01, 0.0}, {THE_END, 0, 0}}},
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

static void change_rates(trial *t, tch_optim_config *c, rate_change how, double lr, double scalar_lr)
{
    if (how == BY_CALL || how == BY_CALL_WITHOUT_RATIO) {
        t->configs[0].lr = lr;
        if (how == BY_CALL_WITHOUT_RATIO) {
            t->configs[0].scalar_base_lr = lr > 0.0 ? lr : 1.0; /* the reference's rate: as given, or 0 */
        }
        CHECK_OK(tch_optimizer_set_lr(t->optimizer, 0, lr));
    } else if (how != NO_CHANGE) {
        c->lr = lr;
        c->scalar_lr = scalar_lr;
        trial_set_config(t, 0, c);
    }
}

/* The rate of AdamW's part, which is told by the group's configuration. The reference has a share from
 * fill_in_scalar_lr. */
static void rates_of_the_rest(tch_context *context, tch_optim_kind kind)
{
    for (size_t i = 0; i < TEST_COUNT(scripts); i++) {
        const rate_script *s = &scripts[i];
        trial t;
        tch_optim_config now;
        tch_optim_config c = trial_config(kind);
        c.lr = s->lr;
        c.scalar_lr = s->scalar_lr;
        test_case("%s, a rate of AdamW's part %s", tch_optim_kind_name(kind), s->what);
        trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
        double share = kind == TCH_OPTIM_MUON ? 0.3 * now.scalar_base_lr : 0.0;
        CHECK(now.scalar_lr == (s->scalar_lr > 0.0 ? s->scalar_lr : share), "%g", now.scalar_lr);
        for (int k = 0; s->changes[k].how != THE_END; k++) {
            change_rates(&t, &c, s->changes[k].how, s->changes[k].lr, s->changes[k].scalar_lr);
            if (s->changes[k].how != BY_CONFIG_WITHOUT_STEP) {
                trial_step(&t);
            }
        }
        trial_check(&t, trial_tolerance(kind, TCH_FLOAT64));
        trial_close(&t);
    }
}

static void learning_rates_in_proportion(void **state)
{
    trial_for_every_kind(*state, "a rate of AdamW's part", rates_of_the_rest);
}

/* --- steps that are not taken ------------------------------------------------------------------------------------ */

/* A bad gradient of any group is found, keeps every group where it is, and is told by its name. */
static void bad_gradients_of_a_second_group(void **state)
{
    const tch_nonfinite policies[] = {TCH_NONFINITE_SKIP, TCH_NONFINITE_RAISE};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
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
            tch_status got = trial_step_library(&t);
            char name[32];
            snprintf(name, sizeof name, "'parameter%d'", DETERMINED + i % DETERMINED);
            CHECK(got == (k == 0 ? TCH_OK : TCH_ERR_NUMERIC), "gave %s", tch_status_name(got));
            CHECK(k == 0 || strstr(tch_last_error(), name) != NULL, "%s is not in: %s", name, tch_last_error());
        }
        trial_check(&t, trial_tolerance(TCH_OPTIM_SHAMPOO, TCH_FLOAT64));
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
        tch_optim_config c = trial_config(TCH_OPTIM_ADAMW);
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
        trial_check(&t, trial_tolerance(TCH_OPTIM_ADAMW, TCH_FLOAT64));
        trial_close(&t);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

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
    tch_optim_config c = trial_config(kind);
    c.memory_budget = 1 << 20;
    CHECK_OK(tch_context_set_workspace_limit(context, limit));
    trial_prepare(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes, entries);
    trial_prepare(&more, context, TCH_FLOAT64, TCH_FLOAT64, &c, 1, large, others);
    others[0].name = "large";
    int64_t before = allocated(context);
    CHECK_OK(tch_optimizer_create(context, &c, NULL, SHAPES, entries, &t.optimizer));
    for (int i = 0; i < 2; i++) {
        trial_step(&t);
        CHECK(tch_context_get_workspace_limit(context) == limit, "the limit of the workspace has changed");
    }
    CHECK_OK(tch_optimizer_add_group(t.optimizer, &c, 1, others, NULL, NULL));
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
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
    test_case("state goes back");
    trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, large, entries);
    CHECK_OK(tch_memory_trim(*state, 0));
    CHECK_OK(tch_memory_get_info(*state, &before));
    CHECK_OK(tch_optimizer_create(*state, &c, NULL, 1, entries, &t.optimizer));
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
    tch_optim_config c = trial_config(TCH_OPTIM_SOAP);
    test_case("bases within %lld bytes", (long long)limit);
    for (int i = 0; i < COUNT; i++) {
        squares[i] = (trial_shape){.ndim = 2, .shape = {24, 24}};
    }
    CHECK_OK(tch_context_set_workspace_limit(*state, limit));
    trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, COUNT, squares, entries);
    int64_t held = allocated(*state);
    CHECK_OK(tch_memory_reset_peak(*state));
    CHECK_OK(tch_optimizer_create(*state, &c, NULL, COUNT, entries, &t.optimizer));
    trial_steps(&t, STEPS);
    CHECK_OK(tch_memory_get_info(*state, &info));
    CHECK_OK(tch_optimizer_get_memory(t.optimizer, &memory));
    CHECK(memory.refresh > 2 * limit, "all at once take only %lld bytes", (long long)memory.refresh);
    int64_t taken = info.peak - held - memory.state - memory.scratch - 4096 /* small things */;
    CHECK(taken <= limit, "%lld bytes of workspace", (long long)taken);
    trial_check(&t, trial_tolerance(TCH_OPTIM_SOAP, TCH_FLOAT64));
    trial_close(&t);
    CHECK_OK(tch_context_set_workspace_limit(*state, 0));
}

/* --- loss scaling ------------------------------------------------------------------------------------------------ */

/* A box of a larger tensor, with one element, row and matrix left out at every end: inside all is divided and searched,
 * outside nothing. */
static void a_box_with_gaps_of_one(void **state)
{
    int64_t outer[] = {3, 4, 5, 6};
    int64_t inner[] = {2, 3, 4, 5};
    int64_t strides[] = {120, 30, 6, 1};
    double values[360];
    tch_scaler *scaler = NULL;
    tch_scaler_config how = TCH_SCALER_CONFIG_INIT;
    how.init_scale = 2.0;
    CHECK_OK(tch_scaler_create(*state, &how, &scaler));
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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(state_rests_without_gradients), cmocka_unit_test(equal_shapes_with_gradients_of_two_types),
        cmocka_unit_test(blocks_are_rounded_apart),      cmocka_unit_test(learning_rates_on_the_device),
        cmocka_unit_test(learning_rates_in_proportion),  cmocka_unit_test(bad_gradients_of_a_second_group),
        cmocka_unit_test(found_inf_under_every_policy),  cmocka_unit_test(what_is_borrowed_is_given_back),
        cmocka_unit_test(state_goes_back_to_the_device), cmocka_unit_test(bases_in_a_small_workspace),
        cmocka_unit_test(a_box_with_gaps_of_one),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context_and_folder, test_close_context_and_folder);
}

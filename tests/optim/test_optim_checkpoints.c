/* Checkpoints of optimizers: a resumed run continues bitwise, from a file and from state copied by the caller, tensors
 * and counts; and files loaded into an optimizer with other options. */
#include "support/files.h"
#include "support/messages.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 15
#define AT 6
#define MOST_STATES 256
#define MOST_COUNTS 64

/* Several of one class, of which the first four are determined in SOAP too; blocks with a partial edge, a scalar, an
 * embedding, a convolution, a vector large enough for compressed moments. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 2, .shape = {21, 6}},
    {.ndim = 0},
    {.ndim = 2, .shape = {5, 7}, .elementwise = 1},
    {.ndim = 4, .shape = {4, 3, 2, 2}},
    {.ndim = 1, .shape = {4097}},
};
#define SHAPES ((int32_t)TEST_COUNT(shapes))
#define DETERMINED 4

/* --- bitwise resume ---------------------------------------------------------------------------------------------- */

typedef struct resume_case {
    const char *what;
    int32_t narrow, master, stochastic, by_hand;
    tch_state_dtype moments;
    double drift; /* 0: refreshes at a fixed interval */
} resume_case;

static const resume_case cases[] = {
    {"float32", 0, 0, 0, 0, TCH_STATE_FLOAT32, 0.0},
    {"bfloat16 with master", 1, 1, 0, 0, TCH_STATE_FLOAT32, 0.0},
    {"bfloat16, rounded at random", 1, 0, 1, 0, TCH_STATE_FLOAT32, 0.0},
    {"adaptive refreshes, gaps that halve", 1, 0, 1, 0, TCH_STATE_FLOAT32, 1e-9},
    {"adaptive refreshes, gaps that stay", 1, 0, 1, 0, TCH_STATE_FLOAT32, 1.5},
    {"adaptive refreshes, gaps that double", 1, 0, 1, 0, TCH_STATE_FLOAT32, 1e6},
    {"moments in bfloat16", 0, 0, 0, 0, TCH_STATE_BFLOAT16, 0.0},
    {"moments in int8", 0, 0, 0, 0, TCH_STATE_INT8, 0.0},
    {"float32 by hand", 0, 0, 0, 1, TCH_STATE_FLOAT32, 0.0},
    {"bfloat16 by hand, rounded at random", 1, 0, 1, 1, TCH_STATE_FLOAT32, 0.0},
};

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    c.shampoo.max_preconditioner_dim = 8;
    c.soap.block = 1;
    c.momentum = 0.9;
    c.memory.seed = 11;
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
    }
    return c;
}

/* Copies the state's tensors and counts to a new optimizer. */
static void replace_by_hand(trial *t, const tch_optim_config *config)
{
    tch_tensor *tensors[MOST_STATES];
    int64_t counts[TRIAL_MOST_PARAMETERS][MOST_COUNTS];
    int32_t states = tch_optimizer_state_count(t->optimizer);
    CHECK(states <= MOST_STATES, "%d states are too many for the test", states);
    for (int32_t i = 0; i < states; i++) {
        const tch_tensor *from = trial_state_at(t, i).tensor;
        CHECK_OK(tch_tensor_create(t->context, from->dtype, from->ndim, from->shape, TCH_CONTIGUOUS, &tensors[i]));
        CHECK_OK(tch_tensor_copy(t->context, tensors[i], from));
    }
    for (int32_t p = 0; p < t->count; p++) {
        int64_t length = tch_optimizer_counts_length(t->optimizer, p);
        CHECK(length <= MOST_COUNTS, "%lld counts are too many for the test", (long long)length);
        CHECK_OK(tch_optimizer_get_counts(t->optimizer, p, length, counts[p]));
    }
    trial_replace_optimizer(t, config);
    CHECK(states == tch_optimizer_state_count(t->optimizer), "another number of states");
    for (int32_t i = 0; i < states; i++) {
        CHECK_OK(tch_tensor_copy(t->context, trial_state_at(t, i).tensor, tensors[i]));
        tch_tensor_destroy(tensors[i]);
    }
    for (int32_t p = 0; p < t->count; p++) {
        CHECK_OK(tch_optimizer_set_counts(t->optimizer, p, tch_optimizer_counts_length(t->optimizer, p), counts[p]));
    }
}

/* Through a file, to an optimizer with another learning rate and seed. */
static void replace_by_file(trial *t, const tch_optim_config *config)
{
    tch_optim_config other = *config;
    const char *path = test_path("resumed.safetensors");
    other.lr = 7.0;
    other.memory.seed = 12;
    trial_save(t, path);
    trial_replace_optimizer(t, &other);
    CHECK_OK(trial_load(t, path));
}

/* The first has every gradient, the second misses some, the third begins after the checkpoint. */
static void take_step(trial *t, int step)
{
    t->parameters[1].missing = step % 5 == 0;
    t->parameters[2].missing = step <= AT + 1 || step % 2 == 1;
    trial_draw(t);
    CHECK_OK(trial_step_library(t));
}

static void resume(tch_context *context, tch_optim_kind kind)
{
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t[2];
        tch_optim_config c = config_of(kind);
        tch_dtype dtype = cases[i].narrow ? TCH_BFLOAT16 : TCH_FLOAT32;
        test_case("%s, %s", tch_optim_kind_name(kind), cases[i].what);
        c.memory.master_weights = cases[i].master;
        c.memory.stochastic_rounding = cases[i].stochastic;
        c.memory.state_dtype = cases[i].moments;
        c.shampoo.refresh_drift = cases[i].drift;
        c.shampoo.precondition_frequency = cases[i].drift > 0.0 ? 16 : c.shampoo.precondition_frequency;
        for (int k = 0; k < 2; k++) {
            trial_open(&t[k], context, dtype, dtype, &c, SHAPES, shapes);
        }
        for (int step = 0; step < STEPS; step++) {
            take_step(&t[0], step);
            take_step(&t[1], step);
            if (step == AT) {
                (cases[i].by_hand ? replace_by_hand : replace_by_file)(&t[1], &c);
            }
        }
        trial_check_same_parameters(&t[0], &t[1]);
    }
}

TEST(training_is_resumed_bit_for_bit)
{
    trial_for_every_kind(*state, "resumed", resume);
}

/* Restores an earlier state in the same optimizer, whose learning rate has changed since: the same steps again. */
static void rewind_training(tch_context *context, tch_optim_kind kind)
{
    trial t[2];
    double *before[SHAPES];
    const char *path = test_path("rewound.safetensors");
    tch_optim_config c = trial_config(kind);
    for (int k = 0; k < 2; k++) {
        trial_open(&t[k], context, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        trial_step(&t[k]);
    }
    trial_save(&t[1], path);
    CHECK_OK(tch_optimizer_set_lr(t[1].optimizer, 0, 0.3));
    for (int32_t i = 0; i < SHAPES; i++) {
        before[i] = test_tensor_read(t[1].parameters[i].memory);
    }
    CHECK_OK(trial_step_library(&t[1]));
    CHECK_OK(trial_load(&t[1], path));
    for (int32_t i = 0; i < SHAPES; i++) {
        test_tensor_write(t[1].parameters[i].memory, before[i]);
    }
    for (int k = 0; k < 2; k++) {
        trial_steps(&t[k], STEPS);
    }
    trial_check_same_parameters(&t[0], &t[1]);
}

TEST(training_is_rewound)
{
    trial_for_every_kind(*state, "rewound", rewind_training);
}

/* --- counts ------------------------------------------------------------------------------------------------------ */

TEST(counts_are_what_happened)
{
    trial t;
    int64_t counts[MOST_COUNTS];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < STEPS; i++) {
        take_step(&t, i);
    }
    /* Parameters, their steps, and their factors: 21 by 6 is three blocks; a vector has none. */
    const struct {
        int32_t parameter;
        int64_t taken, factors;
    } expected[] = {{0, STEPS, 2}, {1, STEPS - 3, 2}, {2, 4, 2}, {3, STEPS, 0}, {4, STEPS, 6}};
    for (size_t i = 0; i < TEST_COUNT(expected); i++) {
        int64_t length = tch_optimizer_counts_length(t.optimizer, expected[i].parameter);
        test_case("the counts of parameter %d", expected[i].parameter);
        CHECK(length == 2 + expected[i].factors, "%lld numbers", (long long)length);
        CHECK_OK(tch_optimizer_get_counts(t.optimizer, expected[i].parameter, length, counts));
        CHECK(counts[0] == STEPS && counts[1] == expected[i].taken, "%lld and %lld", (long long)counts[0],
              (long long)counts[1]);
    }
}

TEST(wrong_counts_are_refused)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    int64_t counts[MOST_COUNTS] = {1, 1};
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    tch_optimizer *o = t.optimizer;
    test_case("no such parameter, no optimizer");
    test_check_refused(tch_optimizer_get_counts(o, SHAPES, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_check_refused(tch_optimizer_set_counts(o, -1, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_check_refused(tch_optimizer_set_counts(NULL, 0, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    CHECK(tch_optimizer_counts_length(NULL, 0) == 0 && tch_optimizer_counts_length(o, SHAPES) == 0, "a length");
    test_case("another length, NULL");
    test_check_refused(tch_optimizer_set_counts(o, 0, 3, counts), TCH_ERR_INVALID_ARGUMENT, "parameter0");
    test_check_refused(tch_optimizer_get_counts(o, 0, 4, NULL), TCH_ERR_INVALID_ARGUMENT, "parameter0");
    for (int64_t i = 0; i < 4; i++) {
        int64_t wrong[4] = {1, 1, 0, 0};
        wrong[i] = i < 2 ? -1 : 3;
        test_case("counts[%lld] out of range", (long long)i);
        test_check_refused(tch_optimizer_set_counts(o, 0, 4, wrong), TCH_ERR_INVALID_ARGUMENT, "counts");
    }
    CHECK_OK(tch_optimizer_get_counts(o, 0, 4, counts));
    CHECK(counts[0] == 0 && counts[1] == 0, "a refused call has changed them");
}

/* --- other optimizers' files ------------------------------------------------------------------------------------- */

/* Loads a checkpoint of an optimizer with other options, with some settings changed or, if their text is NULL,
 * removed. */
static void load_changed(trial *t, const tch_optim_config *config, int count, const char *const (*changes)[2])
{
    const char *paths[] = {test_path("saved.safetensors"), test_path("changed.safetensors")};
    trial_save(t, paths[0]);
    for (int i = 0; i < count; i++) {
        char key[64];
        snprintf(key, sizeof key, "optimizer/group0.%s", changes[i][0]);
        test_checkpoint_set_text(paths[i % 2], paths[(i + 1) % 2], key, changes[i][1]);
    }
    trial_replace_optimizer(t, config);
    CHECK_OK(trial_load(t, paths[count % 2]));
}

/* Settings of the machine rather than the run are not loaded, nor are settings missing in a file of an earlier
 * version. */
TEST(checkpoints_leave_other_options)
{
    static const char *const later[][2] = {
        {"refresh_drift", NULL}, {"world_invariant", NULL}, {"scalar_base_lr", NULL}};
    trial t;
    tch_optim_config c = trial_config(TCH_OPTIM_SHAMPOO);
    tch_optim_config now;
    test_case("another budget, policy and precision, and a drift that the file does not have");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    c.memory.budget = 1 << 22;
    c.numerics.nonfinite = TCH_NONFINITE_RAISE;
    c.numerics.precision = TCH_PRECISION_HIGH;
    c.shampoo.refresh_drift = 1e-9;
    load_changed(&t, &c, 3, later);
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.memory.budget == c.memory.budget && now.numerics.nonfinite == c.numerics.nonfinite &&
              now.numerics.precision == c.numerics.precision && now.shampoo.refresh_drift == c.shampoo.refresh_drift,
          "the checkpoint's were taken");
    c.shampoo.refresh_drift = 0.0; /* as the reference does */
    trial_set_config(&t, 0, &c);
    trial_step(&t);
    trial_check(&t, trial_tolerance(TCH_OPTIM_SHAMPOO, TCH_FLOAT64));
}

/* Saved while a schedule has lr = 0, the ratio of AdamW's rate is restored. A file of a version without it leaves the
 * optimizer's own; a rate that was not given equaled lr then, and still does. */
TEST(checkpoints_keep_the_ratio)
{
    static const struct {
        const char *what;
        double adamw_lr, lr; /* of the loading optimizer */
        int changes;
        const char *change[1][2];
    } cases[] = {{"a ratio", 0.007, 0.5, 0, {{NULL, NULL}}},
                 {"a ratio of an earlier version", 0.007, 0.02, 1, {{"scalar_base_lr", NULL}}},
                 {"no share of lr in an earlier version", 0.0, 0.02, 1, {{"scalar_lr", "0"}}}};
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t;
        tch_optim_config c = trial_config(TCH_OPTIM_MUON);
        c.adamw.lr = cases[i].adamw_lr;
        test_case("%s", cases[i].what);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, DETERMINED, shapes);
        trial_step(&t);
        t.configs[0].lr = 0.0;
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, 0.0));
        trial_step(&t);
        c.lr = cases[i].lr;
        load_changed(&t, &c, cases[i].changes, cases[i].change);
        if (c.adamw.lr == 0.0) {
            t.configs[0].adamw.lr = 0.0; /* is lr to the reference */
        }
        t.configs[0].lr = 0.01;
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 0, 0.01));
        trial_step(&t);
        trial_check(&t, trial_tolerance(TCH_OPTIM_MUON, TCH_FLOAT64));
    }
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)

/* Recorded and replayed steps vs executed ones: parameters must be bitwise equal after every step, whatever changes in
 * between. Gradients move at every step, and their old memory is poisoned.
 *
 * One context has TORCHIUM_CUDA_RECORD=0. On the CPU, which does not record, the other one gets a table that declines
 * (support/backend/recording_backend.h), so that sanitizers cover that path. */
#include "core/context.h"
#include "support/backend/recording_backend.h"
#include "support/backend/table_copy.h"
#include "support/files.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

enum { PARAMETERS = 7, MOST_PARAMETERS = 9, GRADIENTS = 3 };

/* Two of one shape, which share calls as long as both have gradients. The last two are a separate group. */
static const trial_shape shapes[MOST_PARAMETERS] = {
    {.ndim = 2, .shape = {45, 70}},
    {.ndim = 2, .shape = {70, 33}},
    {.ndim = 2, .shape = {45, 70}},
    {.ndim = 2, .shape = {24, 24}},
    {.ndim = 3, .shape = {6, 5, 7}},
    {.ndim = 1, .shape = {77}},
    {.ndim = 0},
    {.ndim = 2, .shape = {30, 40}},
    {.ndim = 1, .shape = {19}},
};

/* --- two contexts ------------------------------------------------------------------------------------------------ */

static tch_context *plain, *recording;
static const tch_backend *real;
static table_copy counting;
static int counted;

static tch_status count_replay(void *state, void *what, int32_t *begun)
{
    counted++;
    return real->recording->replay(state, what, begun);
}

static int open_contexts(void **state)
{
    setenv("TORCHIUM_CUDA_RECORD", "0", 1);
    CHECK_OK(tch_context_create(test_device(), &plain));
    unsetenv("TORCHIUM_CUDA_RECORD");
    CHECK_OK(tch_context_create(test_device(), &recording));
    if (test_on_cpu()) {
        recording_backend_install(recording);
        recording_fault.begin_fails = true;
        return 0;
    }
    real = recording->backend;
    table_copy_make(&counting, real);
    counting.recording.replay = count_replay;
    recording->backend = &counting.backend;
    return 0;
}

static int close_contexts(void **state)
{
    bool tried = !test_on_cpu() || recorded.begun > 0;
    tch_context_destroy(plain);
    tch_context_destroy(recording);
    return tried ? 0 : -1;
}

/* --- the same model on both -------------------------------------------------------------------------------------- */

typedef struct pair {
    trial t[2];
    test_tensor *gradients[2][GRADIENTS][MOST_PARAMETERS]; /* of the latest steps in turn */
    int steps;
} pair;

static void open_pair(pair *p, const tch_optim_config *config, tch_dtype dtype, tch_dtype gradients)
{
    memset(p, 0, sizeof *p);
    trial_open(&p->t[0], plain, dtype, gradients, config, PARAMETERS, shapes);
    trial_open(&p->t[1], recording, dtype, gradients, config, PARAMETERS, shapes);
}

static void close_pair(pair *p)
{
    trial_close(&p->t[0]);
    trial_close(&p->t[1]);
}

static test_tensor *number(tch_context *context, double value)
{
    test_tensor *t = test_tensor_make(context, TCH_FLOAT32, 0, NULL, LAYOUT_CONTIGUOUS);
    test_tensor_write(t, &value);
    return t;
}

/* Moves the next gradients. */
static void move_gradients(trial *t, test_tensor **latest)
{
    for (int i = 0; i < t->count; i++) {
        trial_parameter *p = &t->parameters[i];
        if (latest[i] != NULL) {
            test_tensor_poison(latest[i]);
        }
        latest[i] = p->gradient_memory;
        p->gradient_memory =
            test_tensor_make(t->context, t->gradient_dtype, p->shape.ndim, p->sizes, LAYOUT_CONTIGUOUS);
        p->gradient = p->gradient_memory->tensor;
    }
}

/* Loss scaling unless `scale` is 0. */
static void step_scaled(pair *p, double scale, bool found_inf)
{
    for (int k = 0; k < 2; k++) {
        trial *t = &p->t[k];
        const tch_tensor *gradients[MOST_PARAMETERS];
        const test_tensor *by = number(t->context, scale);
        const test_tensor *found = number(t->context, found_inf);
        move_gradients(t, p->gradients[k][p->steps % GRADIENTS]);
        trial_draw(t);
        trial_list_gradients(t, gradients);
        CHECK_OK(scale == 0.0
                     ? tch_optimizer_step(t->optimizer, t->count, gradients)
                     : tch_optimizer_step_scaled(t->optimizer, t->count, gradients, &by->tensor, &found->tensor));
    }
    trial_check_same_parameters(&p->t[0], &p->t[1]);
    for (int i = 0; i < p->t[0].count; i++) {
        const double *values = test_tensor_read(p->t[0].parameters[i].memory);
        for (int64_t k = 0; k < p->t[0].parameters[i].memory->count; k++) {
            CHECK(isfinite(values[k]), "step %d, parameter %d, element %lld is %g", p->steps, i, (long long)k,
                  values[k]);
        }
    }
    p->steps++;
}

static void take_steps(pair *p, int count)
{
    for (int i = 0; i < count; i++) {
        step_scaled(p, 0.0, false);
    }
}

/* --- changes between steps --------------------------------------------------------------------------------------- */

static void set_configs(pair *p, const tch_optim_config *config)
{
    trial_set_config(&p->t[0], 0, config);
    trial_set_config(&p->t[1], 0, config);
}

static void change_numbers(pair *p, tch_optim_config *config)
{
    config->lr *= 2.0;
    config->weight_decay += 0.01;
    config->beta2 = config->beta2 < 1.0 ? 0.9 : 1.0;
    config->shampoo.grafting_eps *= 3.0;
    config->eps = 2.0 * config->eps + 1e-3;
    set_configs(p, config);
}

/* To other memory; the old memory is poisoned. */
static void move_parameter(pair *p, int parameter)
{
    test_tensor_poison(trial_move_parameter(&p->t[0], parameter));
    test_tensor_poison(trial_move_parameter(&p->t[1], parameter));
}

/* Skipped on an emulated device, where a step takes a hundred times as long: options that another configuration also
 * has. */
static bool is_emulated(void)
{
    return getenv("TORCHIUM_EMULATOR_CAPABILITY") != NULL;
}

/* Long enough after each change for recording. On the CPU one configuration per method suffices. */
static void check_all_changes(tch_optim_config config, tch_dtype dtype, tch_dtype gradients, const char *name)
{
    enum { LONG_ENOUGH = 5 };
    static int latest_kind = -1;
    if (test_on_cpu() && latest_kind == (int)config.kind) {
        return;
    }
    latest_kind = (int)config.kind;
    test_case("%s", name);
    int before = counted;
    static pair p;
    open_pair(&p, &config, dtype, gradients);
    take_steps(&p, LONG_ENOUGH);
    p.t[0].parameters[2].missing = p.t[1].parameters[2].missing = 1;
    take_steps(&p, 1); /* from here on two blocks of one class have different step counts */
    p.t[0].parameters[2].missing = p.t[1].parameters[2].missing = 0;
    take_steps(&p, LONG_ENOUGH);
    change_numbers(&p, &config);
    take_steps(&p, 2);
    step_scaled(&p, 4.0, false);
    step_scaled(&p, 2.0, true);
    take_steps(&p, 2);
    move_parameter(&p, 0);
    take_steps(&p, LONG_ENOUGH);
    for (int k = 0; k < 2; k++) {
        trial_add_group(&p.t[k], &config, MOST_PARAMETERS - PARAMETERS, shapes + PARAMETERS);
    }
    take_steps(&p, LONG_ENOUGH + 1);
    CHECK_OK(tch_memory_trim(plain, 0));
    CHECK_OK(tch_memory_trim(recording, 0));
    take_steps(&p, LONG_ENOUGH);
    config.beta1 = 0.0;
    set_configs(&p, &config);
    take_steps(&p, LONG_ENOUGH);
    config.numerics.damping *= 5.0; /* of Shampoo's roots only */
    set_configs(&p, &config);
    take_steps(&p, LONG_ENOUGH);
    CHECK(test_on_cpu() || !ref_has_blocks(config.kind) || counted - before > p.steps, "%d replays in %d steps",
          counted - before, p.steps);
    close_pair(&p);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static int64_t recorded_bytes(const trial *t)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    CHECK_OK(tch_optimizer_get_memory(t->optimizer, &memory));
    return memory.recorded;
}

static int64_t forecast_bytes(trial *t)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_parameter list[MOST_PARAMETERS] = {{0}};
    for (int i = 0; i < t->count; i++) {
        list[i].tensor = &t->parameters[i].tensor;
    }
    CHECK_OK(tch_optim_forecast(t->context, &t->configs[0], t->count, list, &memory));
    return memory.recorded;
}

/* No memory, then the recordings, within the forecast, and none after they are dropped; always none without
 * recording. */
static void check_memory(tch_optim_kind kind)
{
    static pair p;
    tch_optim_config config = test_optim_defaults(kind);
    config.shampoo.precondition_frequency = 1;
    config.numerics.damping = 1e-6;
    test_case("%s", tch_optim_kind_name(kind));
    open_pair(&p, &config, TCH_FLOAT32, TCH_FLOAT32);
    int64_t most = forecast_bytes(&p.t[1]);
    CHECK(recorded_bytes(&p.t[1]) == 0, "%lld bytes before the first step", (long long)recorded_bytes(&p.t[1]));
    take_steps(&p, 5);
    int64_t bytes = recorded_bytes(&p.t[1]);
    CHECK((bytes > 0 || test_on_cpu()) && bytes <= most, "%lld bytes, where %lld were forecast", (long long)bytes,
          (long long)most);
    CHECK(recorded_bytes(&p.t[0]) == 0 && forecast_bytes(&p.t[0]) == 0, "of steps that are not recorded");
    move_parameter(&p, 0);
    CHECK(recorded_bytes(&p.t[1]) == 0, "%lld bytes are left", (long long)recorded_bytes(&p.t[1]));
    close_pair(&p);
}

TEST(memory_of_recordings)
{
    check_memory(TCH_OPTIM_SHAMPOO);
    check_memory(TCH_OPTIM_SOAP);
    check_memory(TCH_OPTIM_MUON);
    check_memory(TCH_OPTIM_NORMUON);
}

/* --- all changes ------------------------------------------------------------------------------------------------- */

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config config = test_optim_defaults(kind);
    config.lr = 0.01;
    config.weight_decay = 0.01;
    config.beta2 = 0.95;
    config.shampoo.precondition_frequency = 1;
    config.numerics.nonfinite = TCH_NONFINITE_SKIP;
    if (kind == TCH_OPTIM_SHAMPOO) {
        config.numerics.damping = 1e-3;
        config.shampoo.max_preconditioner_dim = 40;
        config.shampoo.precondition_frequency = 4;
    }
    return config;
}

TEST(soap)
{
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "soap");
        check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "soap in float64");
    }
    config.shampoo.precondition_frequency = 3;
    config.soap.normalize_grads = 1;
    config.shampoo.merge_dims = 0;
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "soap, bases every third step, bfloat16 gradients");
    }
    config.shampoo.max_preconditioner_dim = 32;
    config.soap.block = config.soap.orthogonalize = config.constant_norm = 1;
    config.soap.normalize_grads = 0;
    config.memory.budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, is_emulated() ? TCH_BFLOAT16 : TCH_FLOAT32, "soap in blocks, few at a time");
}

TEST(shampoo)
{
    tch_optim_config config = config_of(TCH_OPTIM_SHAMPOO);
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo");
    }
    config.numerics.method = TCH_ROOT_NEWTON; /* does not synchronize on any device, so its roots are recorded */
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo with roots by products");
    }
    config.shampoo.grafting = TCH_GRAFTING_ADAM;
    config.momentum = 0.5;
    config.nesterov = 1;
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo with grafting and momentum");
    }
    config.shampoo.merge_dims = 0;
    config.shampoo.start_preconditioning_step = 4;
    config.shampoo.stagger = 0;
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "shampoo that begins late");
    }
    config.beta1 = 0.0;
    config.shampoo.grafting = TCH_GRAFTING_SGD;
    config.weight_decay_type = TCH_WEIGHT_DECAY_L2;
    config.memory.master_weights = 1;
    check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "shampoo without a filter, bfloat16 with master weights");
    config.memory.master_weights = 0;
    config.memory.stochastic_rounding = 1;
    if (!is_emulated()) {
        check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "shampoo with stochastic rounding");
    }
}

TEST(muon)
{
    tch_optim_config config = config_of(TCH_OPTIM_MUON);
    config.eps = 20.0; /* above the norms, so that a change has an effect */
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "muon");
    }
    config.muon.method = TCH_ORTHO_MUON;
    config.muon.adjust_lr_fn = TCH_ADJUST_LR_MATCH_RMS_ADAMW;
    config.memory.budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "muon, few at a time, bfloat16 gradients");
    config.muon.method = TCH_ORTHO_POLAR_EXPRESS;
    config.memory.master_weights = 1;
    if (!is_emulated()) {
        check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "muon, bfloat16 with master weights");
    }
}

TEST(normuon)
{
    tch_optim_config config = config_of(TCH_OPTIM_NORMUON);
    if (!is_emulated()) {
        check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "normuon");
        check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "normuon in float64");
    }
    config.eps = 20.0; /* above the norms, so that a change has an effect */
    config.muon.method = TCH_ORTHO_MUON;
    config.muon.adjust_lr_fn = TCH_ADJUST_LR_ORIGINAL;
    config.memory.budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "normuon, few at a time, bfloat16 gradients");
    config.muon.method = TCH_ORTHO_POLAR_EXPRESS;
    config.memory.master_weights = 1;
    if (!is_emulated()) {
        check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "normuon, bfloat16 with master weights");
    }
}

TEST(elementwise)
{
    check_all_changes(config_of(TCH_OPTIM_ADAMW), TCH_FLOAT32, TCH_FLOAT32, "adamw");
    check_all_changes(config_of(TCH_OPTIM_SGD), TCH_FLOAT32, TCH_FLOAT32, "sgd");
    check_all_changes(config_of(TCH_OPTIM_LION), TCH_FLOAT32, TCH_FLOAT32, "lion");
}

/* --- several optimizers on one context --------------------------------------------------------------------------- */

/* The third may reuse the first's address, and must not find its recordings. */
TEST(two_in_turn_and_a_third)
{
    static pair a, b, c;
    test_case("several optimizers");
    tch_optim_config first = config_of(TCH_OPTIM_SOAP);
    tch_optim_config second = config_of(TCH_OPTIM_SHAMPOO);
    open_pair(&a, &first, TCH_FLOAT32, TCH_FLOAT32);
    open_pair(&b, &second, TCH_FLOAT32, TCH_FLOAT32);
    for (int i = 0; i < 6; i++) {
        take_steps(&a, 1);
        take_steps(&b, 1);
    }
    close_pair(&a);
    take_steps(&b, 2);
    first.lr = 0.03;
    open_pair(&c, &first, TCH_FLOAT32, TCH_FLOAT32);
    for (int i = 0; i < 6; i++) {
        take_steps(&c, 1);
        take_steps(&b, 1);
    }
    close_pair(&b);
    take_steps(&c, 2);
    close_pair(&c);
}

/* Stochastic rounding takes the checkpoint's seed, a kernel argument. */
TEST_IN_FOLDER(a_checkpoint_with_another_seed)
{
    static pair p, other;
    test_case("a checkpoint");
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    config.memory.stochastic_rounding = 1;
    config.memory.seed = 7;
    open_pair(&other, &config, TCH_BFLOAT16, TCH_BFLOAT16);
    take_steps(&other, 2);
    trial_save(&other.t[0], test_path("checkpoint"));
    config.memory.seed = 8;
    open_pair(&p, &config, TCH_BFLOAT16, TCH_BFLOAT16);
    take_steps(&p, 6);
    CHECK_OK(trial_load(&p.t[0], test_path("checkpoint")));
    CHECK_OK(trial_load(&p.t[1], test_path("checkpoint")));
    take_steps(&p, 6);
    close_pair(&p);
    close_pair(&other);
}

TEST(other_streams)
{
    static pair p;
    test_case("the default stream, and back");
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    open_pair(&p, &config, TCH_FLOAT32, TCH_FLOAT32);
    void *own = tch_context_get_stream(recording);
    take_steps(&p, 2);
    CHECK_OK(tch_context_set_stream(recording, NULL));
    take_steps(&p, 4);
    CHECK_OK(tch_context_set_stream(recording, own));
    take_steps(&p, 2);
    close_pair(&p);
}

TEST_MAIN(open_contexts, close_contexts)

/* Steps that are recorded and replayed against steps that are not: parameters must be the same to the bit after every
 * step, whatever changes in between. Gradients lie elsewhere at every step, and where they lay before there is poison.
 *
 * The one context is made with TORCHIUM_CUDA_RECORD=0. On the CPU, which has no need to record, the other one gets a
 * table that never begins to (support/backend/recording_backend.h), so that sanitizers see the way to there. */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "support/backend/recording_backend.h"
#include "support/backend/table_copy.h"
#include "support/files.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_reference.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

enum { PARAMETERS = 7, MOST_PARAMETERS = 9, GRADIENTS = 3 };

typedef struct shape {
    int32_t ndim;
    int64_t size[4];
} shape;

/* Two of one shape, which share their calls as long as both have gradients; one that can lie over the other's
 * blocks. */
static const shape shapes[MOST_PARAMETERS] = {{2, {45, 70}}, {2, {70, 33}},  {2, {45, 70}},
                                              {2, {24, 24}}, {3, {6, 5, 7}}, {1, {77}},
                                              {0, {0}},      {2, {30, 40}},  {1, {19}}};

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

typedef struct model {
    tch_context *context;
    tch_optimizer *optimizer;
    tch_dtype dtype, gradient_dtype;
    int count;
    test_tensor *parameter[MOST_PARAMETERS];
    test_tensor *gradient[GRADIENTS][MOST_PARAMETERS]; /* of the latest steps in turn */
    test_tensor *scale[GRADIENTS], *found[GRADIENTS];
} model;

typedef struct pair {
    model m[2];
    uint64_t stream;
    int steps;
} pair;

static test_tensor *tensor_of(const model *m, tch_dtype dtype, const shape *s, uint64_t stream)
{
    test_tensor *t = test_tensor_make(m->context, dtype, s->ndim, s->size, LAYOUT_CONTIGUOUS);
    test_tensor_draw(t, stream);
    return t;
}

static test_tensor *number(const model *m, double value)
{
    int64_t one = 1;
    test_tensor *t = test_tensor_make(m->context, TCH_FLOAT32, 1, &one, LAYOUT_CONTIGUOUS);
    test_tensor_write(t, &value);
    return t;
}

static void drop(test_tensor **t)
{
    if (*t != NULL) {
        test_tensor_poison(*t);
    }
    *t = NULL;
}

static void add_parameters(model *m, int upto, uint64_t stream, tch_parameter *list)
{
    for (int i = m->count; i < upto; i++) {
        m->parameter[i] = tensor_of(m, m->dtype, &shapes[i], stream + (uint64_t)i);
        list[i - m->count] = (tch_parameter){.tensor = &m->parameter[i]->tensor};
    }
    m->count = upto;
}

static pair open_pair(const tch_optim_config *config, tch_dtype dtype, tch_dtype gradients, uint64_t stream)
{
    pair p = {.m = {{.context = plain}, {.context = recording}}, .stream = 1000 * stream};
    for (int k = 0; k < 2; k++) {
        tch_parameter list[MOST_PARAMETERS];
        p.m[k].dtype = dtype;
        p.m[k].gradient_dtype = gradients;
        add_parameters(&p.m[k], PARAMETERS, p.stream, list);
        CHECK_OK(tch_optimizer_create(p.m[k].context, config, NULL, PARAMETERS, list, &p.m[k].optimizer));
    }
    return p;
}

static void close_pair(pair *p)
{
    for (int k = 0; k < 2; k++) {
        model *m = &p->m[k];
        tch_optimizer_destroy(m->optimizer);
        for (int g = 0; g < GRADIENTS; g++) {
            drop(&m->scale[g]);
            drop(&m->found[g]);
            for (int i = 0; i < m->count; i++) {
                drop(&m->gradient[g][i]);
            }
        }
    }
}

/* `missing` has no gradient; loss scaling where `scale` is not 0. */
static void step_model(model *m, const pair *p, int missing, double scale, bool found_inf)
{
    int turn = p->steps % GRADIENTS;
    const tch_tensor *gradients[MOST_PARAMETERS];
    drop(&m->scale[turn]);
    drop(&m->found[turn]);
    for (int i = 0; i < m->count; i++) {
        drop(&m->gradient[turn][i]);
        m->gradient[turn][i] =
            tensor_of(m, m->gradient_dtype, &shapes[i], p->stream + (uint64_t)(20 + p->steps * MOST_PARAMETERS + i));
        gradients[i] = i == missing ? NULL : &m->gradient[turn][i]->tensor;
    }
    if (scale == 0.0) {
        CHECK_OK(tch_optimizer_step(m->optimizer, m->count, gradients));
        return;
    }
    m->scale[turn] = number(m, scale);
    m->found[turn] = number(m, found_inf);
    CHECK_OK(
        tch_optimizer_step_scaled(m->optimizer, m->count, gradients, &m->scale[turn]->tensor, &m->found[turn]->tensor));
}

static void compare(const pair *p)
{
    for (int i = 0; i < p->m[0].count; i++) {
        double *x = test_tensor_read(p->m[0].parameter[i]);
        double *y = test_tensor_read(p->m[1].parameter[i]);
        for (int64_t k = 0; k < p->m[0].parameter[i]->count; k++) {
            CHECK(x[k] == y[k] && isfinite(x[k]), "step %d, parameter %d, element %lld: %.9g, and recorded %.9g",
                  p->steps, i, (long long)k, x[k], y[k]);
        }
    }
}

static void step_scaled(pair *p, int missing, double scale, bool found_inf)
{
    step_model(&p->m[0], p, missing, scale, found_inf);
    step_model(&p->m[1], p, missing, scale, found_inf);
    compare(p);
    p->steps++;
}

static void step(pair *p)
{
    step_scaled(p, -1, 0.0, false);
}

static void steps(pair *p, int count)
{
    for (int i = 0; i < count; i++) {
        step(p);
    }
}

/* --- what may change between steps ------------------------------------------------------------------------------- */

static void change_numbers(pair *p, tch_optim_config *config)
{
    config->lr *= 2.0;
    config->weight_decay += 0.01;
    config->beta2 = config->beta2 < 1.0 ? 0.9 : 1.0;
    config->grafting_eps *= 3.0;
    config->eps = 2.0 * config->eps + 1e-3;
    for (int k = 0; k < 2; k++) {
        CHECK_OK(tch_optimizer_set_config(p->m[k].optimizer, 0, config));
    }
}

/* Of Shampoo's roots, and nothing else with it. */
static void change_damping(pair *p, tch_optim_config *config)
{
    config->relative_eps *= 5.0;
    for (int k = 0; k < 2; k++) {
        CHECK_OK(tch_optimizer_set_config(p->m[k].optimizer, 0, config));
    }
}

static void drop_filter(pair *p, tch_optim_config *config)
{
    config->beta1 = 0.0;
    for (int k = 0; k < 2; k++) {
        CHECK_OK(tch_optimizer_set_config(p->m[k].optimizer, 0, config));
    }
}

/* To other memory; the old one becomes poison. */
static void move_parameter(pair *p, int parameter)
{
    for (int k = 0; k < 2; k++) {
        model *m = &p->m[k];
        double *values = test_tensor_read(m->parameter[parameter]);
        test_tensor *fresh = tensor_of(m, m->dtype, &shapes[parameter], 1);
        test_tensor_write(fresh, values);
        CHECK_OK(tch_optimizer_set_parameter(m->optimizer, parameter, &fresh->tensor));
        drop(&m->parameter[parameter]);
        m->parameter[parameter] = fresh;
    }
}

static void add_group(pair *p, const tch_optim_config *config)
{
    for (int k = 0; k < 2; k++) {
        model *m = &p->m[k];
        tch_parameter list[MOST_PARAMETERS];
        int before = m->count;
        add_parameters(m, MOST_PARAMETERS, p->stream, list);
        CHECK_OK(tch_optimizer_add_group(m->optimizer, config, MOST_PARAMETERS - before, list, NULL, NULL));
    }
}

static void trim(const pair *p)
{
    for (int k = 0; k < 2; k++) {
        CHECK_OK(tch_memory_trim(p->m[k].context, 0));
    }
}

/* Long enough after each change for its steps to be recorded. On the CPU one configuration of a method will do. */
static void check_all_changes(tch_optim_config config, tch_dtype dtype, tch_dtype gradients, const char *name)
{
    enum { LONG_ENOUGH = 5 };
    static uint64_t stream = 1;
    static int latest_kind = -1;
    if (test_on_cpu() && latest_kind == (int)config.kind) {
        return;
    }
    latest_kind = (int)config.kind;
    test_case("%s", name);
    int before = counted;
    pair p = open_pair(&config, dtype, gradients, stream++);
    steps(&p, LONG_ENOUGH);
    step_scaled(&p, 2, 0.0, false); /* from here on two blocks of one class have different clocks */
    steps(&p, LONG_ENOUGH);
    change_numbers(&p, &config);
    steps(&p, 2);
    step_scaled(&p, -1, 4.0, false);
    step_scaled(&p, -1, 2.0, true);
    steps(&p, 2);
    move_parameter(&p, 0);
    steps(&p, LONG_ENOUGH);
    add_group(&p, &config);
    steps(&p, LONG_ENOUGH + 1);
    trim(&p);
    steps(&p, LONG_ENOUGH);
    drop_filter(&p, &config);
    steps(&p, LONG_ENOUGH);
    change_damping(&p, &config);
    steps(&p, LONG_ENOUGH);
    CHECK(test_on_cpu() || !ref_has_blocks(config.kind) || counted - before > p.steps, "%d replays in %d steps",
          counted - before, p.steps);
    close_pair(&p);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static int64_t recorded_bytes(const model *m)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    CHECK_OK(tch_optimizer_get_memory(m->optimizer, &memory));
    return memory.recorded;
}

static int64_t forecast_bytes(const model *m, const tch_optim_config *config)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_parameter list[MOST_PARAMETERS] = {{0}};
    for (int i = 0; i < m->count; i++) {
        list[i].tensor = &m->parameter[i]->tensor;
    }
    CHECK_OK(tch_optim_forecast(m->context, config, m->count, list, &memory));
    return memory.recorded;
}

/* Nothing, then what was recorded, within the forecast, and nothing when it is forgotten; always nothing where steps
 * are not recorded. */
static void check_memory(tch_optim_kind kind)
{
    tch_optim_config config = test_optim_defaults(kind);
    config.precondition_frequency = 1;
    config.relative_eps = 1e-6;
    test_case("%s", tch_optim_kind_name(kind));
    pair p = open_pair(&config, TCH_FLOAT32, TCH_FLOAT32, 900);
    int64_t most = forecast_bytes(&p.m[1], &config);
    CHECK(recorded_bytes(&p.m[1]) == 0, "%lld bytes before the first step", (long long)recorded_bytes(&p.m[1]));
    steps(&p, 5);
    int64_t bytes = recorded_bytes(&p.m[1]);
    CHECK((bytes > 0 || test_on_cpu()) && bytes <= most, "%lld bytes, where %lld were forecast", (long long)bytes,
          (long long)most);
    CHECK(recorded_bytes(&p.m[0]) == 0 && forecast_bytes(&p.m[0], &config) == 0, "of steps that are not recorded");
    move_parameter(&p, 0);
    CHECK(recorded_bytes(&p.m[1]) == 0, "%lld bytes are left", (long long)recorded_bytes(&p.m[1]));
    close_pair(&p);
}

static void memory_of_recordings(void **state)
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
    config.precondition_frequency = 1;
    config.nonfinite = TCH_NONFINITE_SKIP;
    if (kind == TCH_OPTIM_SHAMPOO) {
        config.relative_eps = 1e-3;
        config.max_preconditioner_dim = 40;
        config.precondition_frequency = 4;
    }
    return config;
}

static void soap(void **state)
{
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "soap");
    check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "soap in float64");
    config.precondition_frequency = 3;
    config.normalize_grads = 1;
    config.merge_dims = 0;
    check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "soap, bases every third step, bfloat16 gradients");
    config.max_preconditioner_dim = 32;
    config.block = 1;
    config.memory_budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "soap in blocks, few at a time");
}

static void shampoo(void **state)
{
    tch_optim_config config = config_of(TCH_OPTIM_SHAMPOO);
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo");
    config.root_method = TCH_ROOT_NEWTON; /* does not wait on any device, and so its roots are recorded */
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo with roots by products");
    config.grafting = TCH_GRAFTING_ADAM;
    config.momentum = 0.5;
    config.nesterov = 1;
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "shampoo with grafting and momentum");
    config.merge_dims = 0;
    config.start_preconditioning_step = 4;
    config.stagger = 0;
    check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "shampoo that begins late");
    config.beta1 = 0.0;
    config.grafting = TCH_GRAFTING_SGD;
    config.decay = TCH_DECAY_L2;
    config.master_weights = 1;
    check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "shampoo without a filter, bfloat16 with master weights");
    config.master_weights = 0;
    config.stochastic_rounding = 1;
    check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "shampoo with stochastic rounding");
}

static void muon(void **state)
{
    tch_optim_config config = config_of(TCH_OPTIM_MUON);
    config.eps = 20.0; /* above the norms, so that a change of it is seen */
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "muon");
    config.muon_method = TCH_ORTHO_MUON;
    config.muon_lr = TCH_MUON_LR_MATCH_RMS_ADAMW;
    config.memory_budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "muon, few at a time, bfloat16 gradients");
    config.muon_method = TCH_ORTHO_POLAR_EXPRESS;
    config.master_weights = 1;
    check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "muon, bfloat16 with master weights");
}

static void normuon(void **state)
{
    tch_optim_config config = config_of(TCH_OPTIM_NORMUON);
    check_all_changes(config, TCH_FLOAT32, TCH_FLOAT32, "normuon");
    check_all_changes(config, TCH_FLOAT64, TCH_FLOAT64, "normuon in float64");
    config.eps = 20.0; /* above the norms, so that a change of it is seen */
    config.muon_method = TCH_ORTHO_MUON;
    config.muon_lr = TCH_MUON_LR_ORIGINAL;
    config.memory_budget = 64 * 1024;
    check_all_changes(config, TCH_FLOAT32, TCH_BFLOAT16, "normuon, few at a time, bfloat16 gradients");
    config.muon_method = TCH_ORTHO_POLAR_EXPRESS;
    config.master_weights = 1;
    check_all_changes(config, TCH_BFLOAT16, TCH_BFLOAT16, "normuon, bfloat16 with master weights");
}

static void elementwise(void **state)
{
    check_all_changes(config_of(TCH_OPTIM_ADAMW), TCH_FLOAT32, TCH_FLOAT32, "adamw");
    check_all_changes(config_of(TCH_OPTIM_SGD), TCH_FLOAT32, TCH_FLOAT32, "sgd");
    check_all_changes(config_of(TCH_OPTIM_LION), TCH_FLOAT32, TCH_FLOAT32, "lion");
}

/* --- several optimizers on one context --------------------------------------------------------------------------- */

/* The third may lie where the first lay, and must not find its recordings. */
static void two_in_turn_and_a_third(void **state)
{
    test_case("several optimizers");
    tch_optim_config first = config_of(TCH_OPTIM_SOAP);
    tch_optim_config second = config_of(TCH_OPTIM_SHAMPOO);
    pair a = open_pair(&first, TCH_FLOAT32, TCH_FLOAT32, 100);
    pair b = open_pair(&second, TCH_FLOAT32, TCH_FLOAT32, 101);
    for (int i = 0; i < 6; i++) {
        step(&a);
        step(&b);
    }
    close_pair(&a);
    steps(&b, 2);
    first.lr = 0.03;
    pair c = open_pair(&first, TCH_FLOAT32, TCH_FLOAT32, 102);
    for (int i = 0; i < 6; i++) {
        step(&c);
        step(&b);
    }
    close_pair(&b);
    steps(&c, 2);
    close_pair(&c);
}

/* Stochastic rounding takes the checkpoint's seed, which is an argument of kernels. */
static void a_checkpoint_with_another_seed(void **state)
{
    test_case("a checkpoint");
    tch_checkpoint_writer *writer = NULL;
    tch_checkpoint *checkpoint = NULL;
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    config.stochastic_rounding = 1;
    config.seed = 7;
    pair other = open_pair(&config, TCH_BFLOAT16, TCH_BFLOAT16, 104);
    steps(&other, 2);
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_optimizer_save(other.m[0].optimizer, writer, "optimizer"));
    CHECK_OK(tch_checkpoint_writer_save(writer, plain, test_path("checkpoint")));
    config.seed = 8;
    pair p = open_pair(&config, TCH_BFLOAT16, TCH_BFLOAT16, 105);
    steps(&p, 6);
    CHECK_OK(tch_checkpoint_open(test_path("checkpoint"), &checkpoint));
    CHECK_OK(tch_optimizer_load(p.m[0].optimizer, checkpoint, "optimizer"));
    CHECK_OK(tch_optimizer_load(p.m[1].optimizer, checkpoint, "optimizer"));
    steps(&p, 6);
    tch_checkpoint_close(checkpoint);
    tch_checkpoint_writer_destroy(writer);
    close_pair(&p);
    close_pair(&other);
}

static void other_streams(void **state)
{
    test_case("the default stream, and back");
    tch_optim_config config = config_of(TCH_OPTIM_SOAP);
    pair p = open_pair(&config, TCH_FLOAT32, TCH_FLOAT32, 103);
    void *own = tch_context_get_stream(recording);
    steps(&p, 2);
    CHECK_OK(tch_context_set_stream(recording, NULL));
    steps(&p, 4);
    CHECK_OK(tch_context_set_stream(recording, own));
    steps(&p, 2);
    close_pair(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(soap),
        cmocka_unit_test(shampoo),
        cmocka_unit_test(muon),
        cmocka_unit_test(normuon),
        cmocka_unit_test(elementwise),
        cmocka_unit_test(two_in_turn_and_a_third),
        cmocka_unit_test(memory_of_recordings),
        cmocka_unit_test_setup_teardown(a_checkpoint_with_another_seed, test_folder_make, test_folder_remove),
        cmocka_unit_test(other_streams),
    };
    test_begin(argc, argv);
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    return cmocka_run_group_tests(tests, open_contexts, close_contexts);
}

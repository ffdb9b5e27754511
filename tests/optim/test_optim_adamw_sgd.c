/* AdamW and SGD against the plain references over 25 steps: every option, alone and together, all layouts; then what
 * belongs to all optimizers and shows best here: groups, numbers that change between steps, a learning rate on the
 * device, parameters that move.
 *
 * In float32 a step is a dozen roundings, and a moving average carries those of the steps before: 2 (steps + 10) u of
 * the way. A beta that was rounded before it was taken from 1 would cost a hundred times as much. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 25

/* Vectors and scalars, nothing at all, matrices by rows and by columns, channels last; gradients in other layouts. */
static const trial_shape shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 0},
    {.ndim = 1, .shape = {0}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 3, .shape = {3, 1, 5}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {17, 61}, .gradient = LAYOUT_REVERSED},
    {.ndim = 1, .shape = {5003}, .gradient = LAYOUT_OFFSET},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static const trial_option adamw_options[] = {
    {.name = "defaults"},
    {"maximize", {SET(maximize, 1)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"l2", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"amsgrad", {SET(amsgrad, 1), SET(beta2, 0.5)}}, /* so that the largest is not always the latest */
    {"amsgrad, maximize, l2",
     {SET(amsgrad, 1), SET(beta2, 0.5), SET(maximize, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"betas", {SET(beta1, 0.0), SET(beta2, 0.99), SET(eps, 0.1)}},
    {.name = NULL},
};

static const trial_option sgd_options[] = {
    {.name = "plain"},
    {"maximize", {SET(maximize, 1)}},
    {"l2", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"momentum", {SET(momentum, 0.9)}},
    {"dampening", {SET(momentum, 0.9), SET(dampening, 0.3)}},
    {"nesterov", {SET(momentum, 0.8), SET(nesterov, 1)}},
    {"all of them",
     {SET(momentum, 0.9), SET(dampening, 0.3), SET(maximize, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"nesterov with decay", {SET(momentum, 0.8), SET(nesterov, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {.name = NULL},
};

static double tolerance_of(tch_dtype dtype)
{
    return 2.0 * (STEPS + 10) * test_arithmetic_roundoff(dtype);
}

static tch_optim_config base(tch_optim_kind kind)
{
    tch_optim_config config = tch_optim_defaults(kind);
    config.lr = 0.02;
    config.weight_decay = kind == TCH_OPTIM_ADAMW ? 0.1 : 0.0;
    return config;
}

static void run_options(tch_context *context, tch_optim_kind kind, const trial_option *options, tch_dtype dtype)
{
    const tch_optim_config config = base(kind);
    trial_run_options(context, dtype, &config, options, SHAPES, shapes, STEPS, tolerance_of(dtype));
}

static void adamw_in_float64(void **state)
{
    run_options(*state, TCH_OPTIM_ADAMW, adamw_options, TCH_FLOAT64);
}

static void adamw_in_float32(void **state)
{
    run_options(*state, TCH_OPTIM_ADAMW, adamw_options, TCH_FLOAT32);
}

static void sgd_in_float64(void **state)
{
    run_options(*state, TCH_OPTIM_SGD, sgd_options, TCH_FLOAT64);
}

static void sgd_in_float32(void **state)
{
    run_options(*state, TCH_OPTIM_SGD, sgd_options, TCH_FLOAT32);
}

static void float32_parameters_take_half_gradients(void **state)
{
    const tch_dtype halves[] = {TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < 2; i++) {
        trial t;
        tch_optim_config config = base(TCH_OPTIM_ADAMW);
        test_case("gradients in %s", tch_dtype_name(halves[i]));
        trial_open(&t, *state, TCH_FLOAT32, halves[i], &config, SHAPES, shapes);
        trial_steps(&t, STEPS);
        trial_check(&t, tolerance_of(TCH_FLOAT32));
        trial_close(&t);
    }
}

/* Three groups of different numbers, the last one added in the middle: its clocks begin at their own first step. */
static void groups_have_their_own_numbers(void **state)
{
    for (int kind = TCH_OPTIM_SGD; kind <= TCH_OPTIM_ADAMW; kind++) {
        trial t;
        tch_optim_config config = base(kind);
        test_case("groups of %s", tch_optim_kind_name(kind));
        config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : config.momentum;
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &config, 3, shapes);
        config.lr = 0.3;
        config.beta1 = 0.5;
        config.maximize = 1;
        trial_add_group(&t, &config, 4, shapes + 3);
        trial_steps(&t, STEPS);
        config.weight_decay = 0.7;
        config.decay = TCH_DECAY_L2;
        trial_add_group(&t, &config, 2, shapes + 7);
        CHECK(tch_optimizer_group_count(t.optimizer) == 3, "%d groups", tch_optimizer_group_count(t.optimizer));
        CHECK(tch_optimizer_parameter_count(t.optimizer) == 9, "%d", tch_optimizer_parameter_count(t.optimizer));
        trial_steps(&t, STEPS);
        trial_check(&t, tolerance_of(TCH_FLOAT64));
        trial_close(&t);
    }
}

/* Everything marked (step) in the header, at once, twice. */
static void numbers_change_between_steps(void **state)
{
    for (int kind = TCH_OPTIM_SGD; kind <= TCH_OPTIM_ADAMW; kind++) {
        trial t;
        tch_optim_config config = base(kind);
        config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : config.momentum;
        test_case("changing numbers of %s", tch_optim_kind_name(kind));
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &config, SHAPES, shapes);
        for (int i = 0; i < STEPS; i++) {
            if (i % 8 == 4) {
                config.lr *= 0.7;
                config.weight_decay += 0.05;
                config.momentum *= 0.9;
                config.dampening = kind == TCH_OPTIM_SGD ? config.dampening + 0.1 : 0.0;
                config.beta1 *= 0.95;
                config.beta2 *= 0.98;
                config.eps *= 3.0;
                trial_set_config(&t, 0, &config);
            }
            trial_step(&t);
        }
        tch_optim_config now = config;
        CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
        CHECK(now.lr == config.lr && now.beta2 == config.beta2 && now.eps == config.eps, "the numbers are not kept");
        trial_check(&t, tolerance_of(TCH_FLOAT64));
        trial_close(&t);
    }
}

static void set_lr_changes_one_group(void **state)
{
    trial t;
    tch_optim_config config = base(TCH_OPTIM_ADAMW);
    test_case("tch_optimizer_set_lr");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &config, 2, shapes);
    trial_add_group(&t, &config, 2, shapes + 3);
    for (int i = 0; i < STEPS; i++) {
        t.configs[1].lr = 0.02 / (i + 1);
        CHECK_OK(tch_optimizer_set_lr(t.optimizer, 1, t.configs[1].lr));
        trial_step(&t);
    }
    trial_check(&t, tolerance_of(TCH_FLOAT64));
    trial_close(&t);
}

/* The number on the device is read by the step that comes after its change; NULL returns to the configuration's. */
static void learning_rates_on_the_device(void **state)
{
    const tch_dtype types[] = {TCH_FLOAT32, TCH_FLOAT64};
    for (int k = 0; k < 2; k++) {
        trial t;
        tch_optim_config config = base(TCH_OPTIM_ADAMW);
        const int64_t one = 1;
        test_case("a learning rate in %s", tch_dtype_name(types[k]));
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &config, 4, shapes);
        test_tensor *lr = test_tensor_make(*state, types[k], k, &one, LAYOUT_CONTIGUOUS);
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr->tensor));
        for (int i = 0; i < STEPS; i++) {
            t.configs[0].lr = test_round(types[k], 0.01 * (1 + i % 5));
            test_tensor_write(lr, &t.configs[0].lr);
            trial_step(&t);
        }
        CHECK_OK(tch_optimizer_set_lr_tensor(t.optimizer, 0, NULL));
        t.configs[0].lr = config.lr;
        trial_step(&t);
        trial_check(&t, tolerance_of(TCH_FLOAT64));
        trial_close(&t);
    }
}

/* The numbers move to other memory in the middle, as after a resize of a caller's arena; the old memory stays as it
 * is. */
static void parameters_move(void **state)
{
    trial t;
    tch_optim_config config = base(TCH_OPTIM_ADAMW);
    test_case("tch_optimizer_set_parameter");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &config, 4, shapes);
    trial_steps(&t, STEPS);
    trial_parameter *p = &t.parameters[3];
    test_tensor *old = p->memory;
    double *values = test_tensor_read(old);
    p->memory = test_tensor_make(*state, TCH_FLOAT32, p->shape.ndim, p->shape.shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(p->memory, values);
    test_tensor_write(old, values);
    p->tensor.data = p->memory->tensor.data;
    p->tensor.byte_offset = p->memory->tensor.byte_offset;
    CHECK_OK(tch_optimizer_set_parameter(t.optimizer, 3, &p->tensor));
    trial_steps(&t, STEPS);
    trial_check(&t, 2.0 * tolerance_of(TCH_FLOAT32));
    test_tensor_check_unchanged(old, "the old memory");
    trial_close(&t);
}

/* A thousand small parameters: more chunks than any one launch or chunk holds. */
static void many_small_parameters(void **state)
{
    enum { COUNT = 1000, SIZE = 33 };
    tch_context *context = *state;
    tch_optim_config config = base(TCH_OPTIM_ADAMW);
    const int64_t all[] = {COUNT, SIZE};
    const trial_shape whole = {.ndim = 2, .shape = {COUNT, SIZE}, .gradient_follows = 1};
    trial t;
    tch_parameter entry;
    static tch_tensor views[2][COUNT];
    static int64_t sizes[COUNT];
    static tch_parameter entries[COUNT];
    static const tch_tensor *gradients[COUNT];
    test_case("a thousand parameters");
    trial_prepare(&t, context, TCH_FLOAT32, TCH_FLOAT32, &config, 1, &whole, &entry);
    for (int i = 0; i < COUNT; i++) {
        sizes[i] = all[1];
        views[0][i] = t.parameters[0].tensor;
        views[1][i] = t.parameters[0].gradient;
        for (int k = 0; k < 2; k++) {
            views[k][i].ndim = 1;
            views[k][i].shape = &sizes[i];
            views[k][i].byte_offset += (uint64_t)i * SIZE * sizeof(float);
        }
        entries[i] = (tch_parameter){.tensor = &views[0][i]};
        gradients[i] = &views[1][i];
    }
    CHECK_OK(tch_optimizer_create(context, &config, COUNT, entries, &t.optimizer));
    for (int i = 0; i < STEPS; i++) {
        trial_draw(&t);
        CHECK_OK(tch_optimizer_step(t.optimizer, COUNT, gradients));
        trial_step_references(&t);
    }
    trial_check(&t, tolerance_of(TCH_FLOAT32));
    trial_close(&t);
}

static void names_and_defaults(void **state)
{
    (void)state;
    static const char *const names[] = {"sgd", "adamw", "shampoo", "soap", "muon", "lion", "normuon"};
    test_case("names");
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        tch_optim_config config = tch_optim_defaults(kind);
        CHECK(strcmp(tch_optim_kind_name(kind), names[kind]) == 0, "%s", tch_optim_kind_name(kind));
        CHECK(tch_optim_kind_parse(names[kind]) == kind, "%s is %d", names[kind], tch_optim_kind_parse(names[kind]));
        CHECK((int)config.kind == kind && config.struct_size == sizeof config, "the defaults of %s", names[kind]);
    }
    CHECK(tch_optim_kind_name((tch_optim_kind)(sizeof names / sizeof *names)) == NULL, "more kinds than names");
    CHECK(tch_optim_kind_name((tch_optim_kind)99) == NULL && tch_optim_kind_name((tch_optim_kind)-1) == NULL, "named");
    CHECK(tch_optim_kind_parse("adam") == -1 && tch_optim_kind_parse("") == -1 && tch_optim_kind_parse(NULL) == -1,
          "a name that is none");
    CHECK(tch_optim_defaults((tch_optim_kind)77).kind == TCH_OPTIM_SGD, "the defaults of no kind");
    test_case("PyTorch's defaults");
    tch_optim_config adamw = tch_optim_defaults(TCH_OPTIM_ADAMW);
    CHECK(adamw.lr == 1e-3 && adamw.beta1 == 0.9 && adamw.beta2 == 0.999 && adamw.eps == 1e-8, "AdamW");
    CHECK(adamw.weight_decay == 1e-2 && adamw.decay == TCH_DECAY_DECOUPLED && !adamw.amsgrad, "AdamW");
    tch_optim_config sgd = tch_optim_defaults(TCH_OPTIM_SGD);
    CHECK(sgd.lr == 1e-3 && sgd.momentum == 0.0 && sgd.dampening == 0.0 && sgd.weight_decay == 0.0, "SGD");
    tch_optim_config muon = tch_optim_defaults(TCH_OPTIM_MUON);
    CHECK(muon.lr == 1e-3 && muon.momentum == 0.95 && muon.nesterov && muon.weight_decay == 0.1, "Muon");
    CHECK(muon.eps == 1e-7 && muon.muon_steps == 0 && muon.muon_lr == TCH_MUON_LR_ORIGINAL, "Muon");
    CHECK(muon.muon_method == TCH_ORTHO_MINIMAX, "Muon");
    test_case("the papers' defaults");
    tch_optim_config shampoo = tch_optim_defaults(TCH_OPTIM_SHAMPOO);
    CHECK(shampoo.lr == 1e-3 && shampoo.eps == 1e-12 && shampoo.precondition_frequency == 100 &&
              shampoo.refresh_drift == 10.0,
          "Shampoo");
    CHECK(shampoo.relative_eps == 1e-6 && shampoo.grafting_beta2 == 0.999 && shampoo.grafting_eps == 1e-8, "Shampoo");
    CHECK(shampoo.beta1 == 0.9 && shampoo.beta2 == 0.95 && shampoo.max_preconditioner_dim == 1024, "Shampoo");
    CHECK(shampoo.start_preconditioning_step == -1 && shampoo.bias_correction && shampoo.stagger, "Shampoo");
    CHECK(shampoo.weight_decay == 0.0 && shampoo.grafting == TCH_GRAFTING_ADAM && shampoo.merge_dims, "Shampoo");
    tch_optim_config soap = tch_optim_defaults(TCH_OPTIM_SOAP);
    CHECK(soap.lr == 3e-3 && soap.beta1 == 0.95 && soap.beta2 == 0.95 && soap.shampoo_beta < 0.0, "SOAP");
    CHECK(soap.eps == 1e-8 && soap.weight_decay == 0.01 && soap.precondition_frequency == 100 &&
              soap.refresh_drift == 2.5,
          "SOAP");
    CHECK(soap.max_preconditioner_dim == 10000 && !soap.merge_dims && !soap.precondition_1d, "SOAP");
    CHECK(!soap.normalize_grads && soap.bias_correction, "SOAP");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_defaults),
        cmocka_unit_test(adamw_in_float64),
        cmocka_unit_test(adamw_in_float32),
        cmocka_unit_test(sgd_in_float64),
        cmocka_unit_test(sgd_in_float32),
        cmocka_unit_test(float32_parameters_take_half_gradients),
        cmocka_unit_test(groups_have_their_own_numbers),
        cmocka_unit_test(numbers_change_between_steps),
        cmocka_unit_test(set_lr_changes_one_group),
        cmocka_unit_test(learning_rates_on_the_device),
        cmocka_unit_test(parameters_move),
        cmocka_unit_test(many_small_parameters),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* Invalid input to optimizers. Every call returns its status, names the error and, for a number, its value; afterwards
 * the optimizer continues like the reference, since nothing has changed. */
#include <limits.h>

#include "support/bad_input.h"
#include "support/files.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 12

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {6, 6}}, {.ndim = 1, .shape = {11}}, {.ndim = 2, .shape = {5, 5}, .order = {1, 0}}};
#define SHAPES 3

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.shampoo.stagger = 0; /* as the references do */
    c.lr = 0.01;
    c.shampoo.precondition_frequency = 1;
    c.numerics.damping = 1e-3;
    c.numerics.method = TCH_ROOT_EIGEN;
    return c;
}

/* An optimizer of the kind, with gradients. */
static tch_optim_config open_kind(trial *t, tch_context *context, tch_dtype dtype, tch_optim_kind kind)
{
    tch_optim_config c = config_of(kind);
    trial_open(t, context, dtype, dtype, &c, SHAPES, shapes);
    trial_draw(t);
    return c;
}

static void refuse_argument(tch_status got, const char *name)
{
    test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, name);
}

/* After all rejected calls the optimizer continues like its references. */
static void go_on(trial *t, double tolerance)
{
    trial_steps(t, STEPS);
    trial_check(t, tolerance);
}

/* --- hyperparameters --------------------------------------------------------------------------------------------- */

#define FIELD(member) TEST_FIELD(tch_optim_config, member)

/* Whether the number may change between steps. */
static const test_range ranges[] = {
    {FIELD(lr), 1, 4, {-1e-3, NAN, INFINITY, -INFINITY}},
    {FIELD(weight_decay), 1, 3, {-0.1, NAN, INFINITY}},
    {FIELD(weight_decay_type), 0, 3, {-1, 3, 99}},
    {FIELD(maximize), 0, 2, {-1, 2}},
    {FIELD(momentum), 1, 4, {-0.1, 1.0, 1.5, NAN}},
    {FIELD(dampening), 1, 3, {NAN, INFINITY, -INFINITY}},
    {FIELD(nesterov), 0, 2, {-1, 7}},
    {FIELD(beta1), 1, 4, {-0.1, 1.0, 2.0, NAN}},
    {FIELD(beta2), 1, 4, {-0.1, 1.01, INFINITY, NAN}},
    {FIELD(eps), 1, 3, {-1e-8, NAN, INFINITY}},
    {FIELD(use_bias_correction), 0, 2, {-1, 2}},
    {FIELD(amsgrad), 0, 2, {-1, 2}},
    {FIELD(adamw.lr), 1, 3, {-1.0, NAN, INFINITY}},
    {FIELD(adamw.base_lr), 1, 3, {-1.0, NAN, INFINITY}},
    {FIELD(adamw.beta1), 1, 3, {-0.5, 1.0, NAN}},
    {FIELD(adamw.beta2), 1, 3, {-0.5, 1.0, NAN}},
    {FIELD(adamw.eps), 1, 2, {-1.0, NAN}},
    {FIELD(adamw.weight_decay), 1, 2, {NAN, INFINITY}},
    {FIELD(shampoo.max_preconditioner_dim), 0, 3, {0, -1, -1e18}},
    {FIELD(soap.block), 0, 2, {-1, 2}},
    {FIELD(constant_norm), 0, 2, {-1, 2}},
    {FIELD(shampoo.merge_dims), 0, 2, {-1, 2}},
    {FIELD(shampoo.precondition_1d), 0, 2, {-1, 2}},
    {FIELD(memory.packed_factors), 0, 2, {-1, 2}},
    {FIELD(shampoo.precondition_frequency), 1, 4, {0, -1, INT_MIN, INT_MAX}},
    {FIELD(shampoo.refresh_drift), 1, 4, {-1e-3, 1e7, NAN, INFINITY}},
    {FIELD(shampoo.start_preconditioning_step), 0, 3, {-2, INT_MIN, INT_MAX}},
    {FIELD(shampoo.stagger), 1, 2, {-1, 2}},
    {FIELD(numerics.precision), 0, 2, {-1, 2}},
    {FIELD(numerics.world_invariant), 0, 2, {-1, 2}},
    {FIELD(memory.state_dtype), 0, 3, {-1, 3, 1000}},
    {FIELD(memory.root_dtype), 0, 2, {-1, TCH_STATE_INT8}},
    {FIELD(numerics.damping), 1, 3, {-1e-3, NAN, INFINITY}},
    {FIELD(numerics.tolerance), 0, 3, {-1e-3, NAN, INFINITY}},
    {FIELD(numerics.method), 0, 2, {-1, 4}},
    {FIELD(shampoo.exponent_override), 0, 5, {-1, 5, 7, 9, INT_MAX}},
    {FIELD(shampoo.grafting), 0, 2, {-1, 5}},
    {FIELD(shampoo.grafting_beta2), 1, 3, {-0.1, 1.0, NAN}},
    {FIELD(shampoo.grafting_eps), 1, 2, {-1.0, NAN}},
    {FIELD(soap.shampoo_beta), 1, 3, {1.0, 2.0, NAN}},
    {FIELD(soap.normalize_grads), 0, 2, {-1, 2}},
    {FIELD(soap.orthogonalize), 0, 2, {-1, 2}},
    {FIELD(muon.method), 0, 2, {-1, 3}},
    {FIELD(muon.ns_steps), 0, 3, {-1, -5, 101}},
    {FIELD(muon.adjust_lr_fn), 0, 2, {-1, 3}},
    {FIELD(muon.ns_dtype), 0, 2, {-1, 3}},
    {FIELD(memory.master_weights), 0, 2, {-1, 2}},
    {FIELD(memory.stochastic_rounding), 0, 2, {-1, 2}},
    {FIELD(numerics.nonfinite), 0, 2, {-1, 3}},
    {FIELD(memory.budget), 0, 3, {-1, 9.2e18, -0x1p33}}, /* compared as a 64-bit number */
};

/* A value above the maximum does not report the minimum, nor the other way round. */
static void check_range_told(double value)
{
    const char *told = tch_last_error();
    CHECK(!(value > 1.0 && strstr(told, "or more") != NULL && strstr(told, "below") == NULL),
          "%g is too large, and the message does not say for what: %s", value, told);
    CHECK(!(value < 0.0 && strstr(told, "or less") != NULL),
          "%g is too small, and the message does not say for what: %s", value, told);
}

/* Rejected on creation; returns no optimizer. */
static void refuse_create(tch_context *context, const tch_optim_config *c, int32_t count, const tch_parameter *entries,
                          tch_status expected, const char *name)
{
    tch_optimizer *optimizer = (tch_optimizer *)&entries;
    test_check_refused(tch_optimizer_create(context, c, NULL, count, entries, &optimizer), expected, name);
    CHECK(optimizer == NULL, "an optimizer was returned");
}

TEST(options_out_of_range)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (size_t i = 0; i < TEST_COUNT(ranges); i++) {
            const char *name = ranges[i].field.name;
            for (int k = 0; k < ranges[i].count; k++) {
                tch_optim_config c = config_of(kind);
                tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
                test_field_set(&c, &ranges[i].field, ranges[i].bad[k]);
                test_case("%s with %s = %g", tch_optim_kind_name(kind), name, ranges[i].bad[k]);
                refuse_create(*state, &c, 0, NULL, TCH_ERR_INVALID_ARGUMENT, name);
                test_check_value_told(ranges[i].bad[k]);
                check_range_told(ranges[i].bad[k]);
                refuse_argument(tch_optim_forecast(*state, &c, 0, NULL, &memory), name);
            }
        }
    }
}

/* Invalid combinations. */
TEST(options_that_do_not_go_together)
{
    static const struct {
        const char *what, *name;
        tch_optim_kind kind;
        test_field fields[3];
        double values[3];
    } cases[] = {
        /* clang-format off */
        {"nesterov without momentum, as in PyTorch", "nesterov", TCH_OPTIM_SGD, {FIELD(nesterov)}, {1}},
        {"nesterov with dampening, as in PyTorch", "nesterov", TCH_OPTIM_SGD,
         {FIELD(nesterov), FIELD(momentum), FIELD(dampening)}, {1, 0.9, 0.1}},
        {"beta2 = 1, which is Shampoo's alone", "beta2", TCH_OPTIM_ADAMW, {FIELD(beta2)}, {1}},
        {"beta2 = 1, which is Shampoo's alone", "beta2", TCH_OPTIM_LION, {FIELD(beta2)}, {1}},
        {"beta2 = 1, which is Shampoo's alone", "beta2", TCH_OPTIM_NORMUON, {FIELD(beta2)}, {1}},
        {"beta2 = 1, which is Shampoo's alone", "beta2", TCH_OPTIM_SOAP, {FIELD(beta2)}, {1}},
        {"no damping", "eps", TCH_OPTIM_SHAMPOO, {FIELD(eps), FIELD(numerics.damping)}, {0, 0}},
        {"int8 amsgrad", "amsgrad", TCH_OPTIM_ADAMW, {FIELD(amsgrad), FIELD(memory.state_dtype)}, {1, TCH_STATE_INT8}},
        {"no kind", "kind", TCH_OPTIM_SGD, {FIELD(kind)}, {99}},
        {"no struct_size", "config", TCH_OPTIM_SGD, {FIELD(struct_size)}, {sizeof(tch_optim_config) - 8}},
        /* clang-format on */
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_optim_config c = config_of(cases[i].kind);
        test_case("%s with %s", tch_optim_kind_name(cases[i].kind), cases[i].what);
        for (int k = 0; k < 3 && cases[i].fields[k].name != NULL; k++) {
            test_field_set(&c, &cases[i].fields[k], cases[i].values[k]);
        }
        refuse_create(*state, &c, 0, NULL, TCH_ERR_INVALID_ARGUMENT, cases[i].name);
    }
}

/* A valid value other than the current one. */
static double another_value(const tch_optim_config *c, const test_field *f)
{
    double now = test_field_get(c, f);
    if (f->type == FIELD_REAL) {
        return now == 0.0 ? 0.25 : now * 0.5;
    }
    return f->type == FIELD_INT64 || now == 0 || now == 5 ? now + 1 : now == -1 ? 3 : 0;
}

/* Fields not marked (step) must not change; and invalid values of the others are rejected. */
TEST(changes_that_are_refused)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_optim_config good = open_kind(&t, *state, TCH_FLOAT64, (tch_optim_kind)kind);
        trial_step(&t);
        for (size_t i = 0; i < TEST_COUNT(ranges); i++) {
            const char *name = ranges[i].field.name;
            tch_optim_config c = good;
            double value = ranges[i].mark ? ranges[i].bad[0] : another_value(&good, &ranges[i].field);
            test_field_set(&c, &ranges[i].field, value);
            test_case("%s: changing %s to %g", tch_optim_kind_name(kind), name, value);
            refuse_argument(tch_optimizer_set_config(t.optimizer, 0, &c), name);
        }
        test_case("%s: changing the seed or the kind", tch_optim_kind_name(kind));
        tch_optim_config c = good;
        c.memory.seed += 1;
        refuse_argument(tch_optimizer_set_config(t.optimizer, 0, &c), "seed");
        c = test_optim_defaults(kind == TCH_OPTIM_SGD ? TCH_OPTIM_ADAMW : TCH_OPTIM_SGD);
        refuse_argument(tch_optimizer_set_config(t.optimizer, 0, &c), "kind");
        refuse_argument(tch_optimizer_set_config(t.optimizer, 0, NULL), "config");
        refuse_argument(tch_optimizer_set_config(t.optimizer, 1, &good), "group");
        refuse_argument(tch_optimizer_set_config(t.optimizer, -1, &good), "group");
        go_on(&t, 1e-10);
    }
}

/* Hyperparameters that need state which was not allocated on creation. */
TEST(numbers_that_begin_at_zero)
{
    static const struct {
        tch_optim_kind kind;
        test_field field;
    } cases[] = {
        {TCH_OPTIM_SGD, FIELD(momentum)},
        {TCH_OPTIM_SHAMPOO, FIELD(momentum)},
        {TCH_OPTIM_SHAMPOO, FIELD(beta1)},
    };
    for (int i = 0; i < 3; i++) {
        trial t;
        tch_optim_config c = config_of(cases[i].kind);
        test_case("%s of %s from 0", cases[i].field.name, tch_optim_kind_name(cases[i].kind));
        test_field_set(&c, &cases[i].field, 0.0);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        test_field_set(&c, &cases[i].field, 0.5);
        refuse_argument(tch_optimizer_set_config(t.optimizer, 0, &c), cases[i].field.name);
    }
}

/* --- parameters -------------------------------------------------------------------------------------------------- */

static void refuse_parameters(tch_context *context, int32_t count, const tch_parameter *entries, tch_status expected,
                              const char *name)
{
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    refuse_create(context, &c, count, entries, expected, name);
}

TEST(parameters_that_are_not_dense)
{
    const test_layout layouts[] = {LAYOUT_ROW_GAPS, LAYOUT_BATCH_GAPS, LAYOUT_STEPPED, LAYOUT_REVERSED,
                                   LAYOUT_EXPANDED};
    const int64_t size[] = {3, 4, 5};
    for (int i = 0; i < 5; i++) {
        test_tensor *gaps = test_tensor_make(*state, TCH_FLOAT32, 3, size, layouts[i]);
        test_case("a parameter with %s", test_layout_name(layouts[i]));
        refuse_parameters(*state, 1, &(tch_parameter){.tensor = &gaps->tensor, .name = "weight"}, TCH_ERR_LAYOUT,
                          "weight");
        test_tensor_check_unchanged(gaps, "the parameter");
    }
}

/* The same memory, its last element, or a part inside; and names in use. */
TEST(parameters_that_share)
{
    const int64_t size[] = {4, 5};
    int64_t two[] = {2};
    tch_context *context = *state;
    test_tensor *good = test_tensor_make(context, TCH_FLOAT32, 2, size, LAYOUT_CONTIGUOUS);
    test_tensor *own = test_tensor_make(context, TCH_FLOAT32, 2, size, LAYOUT_CONTIGUOUS);
    const uint64_t places[] = {0, 19, 7};
    for (int i = 0; i < 3; i++) {
        tch_tensor inside = good->tensor;
        inside.byte_offset += places[i] * sizeof(float);
        inside.ndim = i == 0 ? 2 : 1;
        inside.shape = i == 0 ? inside.shape : two;
        test_case("overlapping, case %d", i);
        const tch_parameter entries[] = {
            {.tensor = &good->tensor, .name = "first"}, {.tensor = &own->tensor}, {.tensor = &inside, .name = "last"}};
        refuse_parameters(context, 3, entries, TCH_ERR_LAYOUT, "first");
        CHECK(test_names_argument(tch_last_error(), "last"), "the message does not name both: %s", tch_last_error());
    }
    test_case("two of one name");
    const tch_parameter named[] = {{.tensor = &good->tensor, .name = "w"}, {.tensor = &own->tensor, .name = "w"}};
    refuse_parameters(context, 2, named, TCH_ERR_INVALID_ARGUMENT, "w");
}

/* No parameters at first, then some: a group may be empty, and a step without gradients does nothing. */
TEST(optimizers_without_parameters)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_optim_config c = config_of(kind);
        test_case("%s without parameters", tch_optim_kind_name(kind));
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 0, shapes);
        CHECK_OK(tch_optimizer_step(t.optimizer, 0, NULL));
        CHECK(tch_optimizer_state_count(t.optimizer) == 0, "there is state");
        trial_add_group(&t, &c, SHAPES, shapes);
        go_on(&t, 1e-10);
    }
}

/* A rejected group leaves the optimizer unchanged. */
TEST(groups_that_are_refused)
{
    trial t;
    int32_t group = 77;
    tch_optim_config c = open_kind(&t, *state, TCH_FLOAT64, TCH_OPTIM_SHAMPOO);
    tch_optim_config negative = c;
    negative.lr = -1.0;
    trial_step(&t);
    const tch_parameter again = {.tensor = &t.parameters[1].tensor, .name = "again"};
    const struct {
        const char *what;
        tch_optim_config config;
        int32_t count;
        tch_status expected;
        const char *name;
    } cases[] = {
        {"another kind", config_of(TCH_OPTIM_SOAP), 0, TCH_ERR_INVALID_ARGUMENT, "kind"},
        {"a parameter that is there already", c, 1, TCH_ERR_LAYOUT, "again"},
        {"a bad number", negative, 1, TCH_ERR_INVALID_ARGUMENT, "lr"},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("a group with %s", cases[i].what);
        tch_status got = tch_optimizer_add_group(t.optimizer, &cases[i].config, cases[i].count, &again, NULL, &group);
        test_check_refused(got, cases[i].expected, cases[i].name);
    }
    CHECK(group == 77, "a number was given to a refused group");
    CHECK(tch_optimizer_group_count(t.optimizer) == 1 && tch_optimizer_parameter_count(t.optimizer) == SHAPES,
          "the optimizer has grown");
    go_on(&t, 1e-10);
}

/* --- invalid tensors --------------------------------------------------------------------------------------------- */

typedef enum role { PARAMETER, MOVED_PARAMETER, GRADIENT, GRAD_SCALE, FOUND_INF, LEARNING_RATE } role;

/* The status of a call with the tensor in this role and valid other arguments. */
static tch_status give_tensor(trial *t, role role, tch_tensor *tensor)
{
    const tch_tensor *gradients[SHAPES];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const tch_parameter entries[] = {{.tensor = &t->parameters[0].tensor}, {.tensor = tensor, .name = "second"}};
    tch_optimizer *none = t->optimizer;
    trial_list_gradients(t, gradients);
    if (role == PARAMETER) {
        tch_status got = tch_optimizer_create(t->context, &c, NULL, 2, entries, &none);
        CHECK(none == NULL, "an optimizer was returned");
        return got;
    }
    if (role == MOVED_PARAMETER) {
        return tch_optimizer_set_parameter(t->optimizer, 0, tensor);
    }
    if (role == LEARNING_RATE) {
        return tch_optimizer_set_lr_tensor(t->optimizer, 0, tensor);
    }
    if (role == GRADIENT) {
        gradients[1] = tensor;
        return tch_optimizer_step(t->optimizer, SHAPES, gradients);
    }
    return tch_optimizer_step_scaled(t->optimizer, SHAPES, gradients, role == GRAD_SCALE ? tensor : NULL,
                                     role == FOUND_INF ? tensor : NULL);
}

static const test_flaw scale_flaws[] = {
    {"float64", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 64, 1}},
    {"two elements", TCH_ERR_SHAPE, PART_SIZE, 2, {0}},
    {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
};
static const test_flaw lr_flaws[] = {
    {"two numbers", TCH_ERR_INVALID_ARGUMENT, PART_SIZE, 2, {0}},
    {"an integer", TCH_ERR_INVALID_ARGUMENT, PART_DTYPE, 0, {TCH_INT, 32, 1}},
    {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
};
static const test_flaw moved_flaws[] = {
    {"another shape", TCH_ERR_SHAPE, PART_SIZE, 5, {0}},
    {"another type", TCH_ERR_SHAPE, PART_DTYPE, 0, {TCH_INT, 32, 1}},
    {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
};
static const test_flaw parameter_flaws[] = {
    {"no data", TCH_ERR_INVALID_ARGUMENT, PART_DATA, 0, {0}},
    {"a rank too high", TCH_ERR_SHAPE, PART_RANK, TCH_MAX_RANK + 1, {0}},
    {"integers", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_INT, 32, 1}},
    {"8 bits", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 8, 1}},
    {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
    {"a misaligned first element", TCH_ERR_LAYOUT, PART_OFFSET, 1, {0}},
};
static const test_flaw gradient_flaws[] = {
    {"float64", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 64, 1}},
    {"integers", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_INT, 32, 1}},
    {"8 bits", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 8, 1}},
    {"an element less", TCH_ERR_SHAPE, PART_SIZE, 10, {0}},
    {"a dimension more", TCH_ERR_SHAPE, PART_RANK, 2, {0}},
    {"a negative size", TCH_ERR_SHAPE, PART_SIZE, -11, {0}},
    {"no data", TCH_ERR_INVALID_ARGUMENT, PART_DATA, 0, {0}},
    {"another device", TCH_ERR_DEVICE, PART_INDEX, 1, {0}},
    {"strides out of the address space", TCH_ERR_LAYOUT, PART_STRIDE, INT64_MAX / 2, {0}},
};

TEST(broken_tensors)
{
    static const struct {
        const char *name;
        int32_t ndim;
        int64_t shape[2];
        const test_flaw *flaws;
        size_t count;
    } cases[] = {
        [PARAMETER] = {"second", 2, {4, 5}, parameter_flaws, TEST_COUNT(parameter_flaws)},
        [MOVED_PARAMETER] = {"parameter0", 2, {6, 6}, moved_flaws, TEST_COUNT(moved_flaws)},
        [GRADIENT] = {"parameter1", 1, {11}, gradient_flaws, TEST_COUNT(gradient_flaws)},
        [GRAD_SCALE] = {"grad_scale", 1, {1}, scale_flaws, TEST_COUNT(scale_flaws)},
        [FOUND_INF] = {"found_inf", 1, {1}, scale_flaws, TEST_COUNT(scale_flaws)},
        [LEARNING_RATE] = {"lr", 1, {1}, lr_flaws, TEST_COUNT(lr_flaws)},
    };
    trial t;
    test_broken b;
    open_kind(&t, *state, TCH_FLOAT32, TCH_OPTIM_ADAMW);
    for (size_t r = 0; r < TEST_COUNT(cases); r++) {
        test_tensor *good = test_tensor_make(*state, TCH_FLOAT32, cases[r].ndim, cases[r].shape, LAYOUT_CONTIGUOUS);
        for (size_t i = 0; i < cases[r].count; i++) {
            const test_flaw *flaw = &cases[r].flaws[i];
            test_case("%s with %s", cases[r].name, flaw->what);
            tch_status got = give_tensor(&t, (role)r, test_broken_make(&b, &good->tensor, flaw));
            test_check_refused(got, flaw->expected, cases[r].name);
            test_tensor_check_unchanged(good, cases[r].name);
            for (int32_t k = 0; k < SHAPES; k++) {
                test_tensor_check_unchanged(t.parameters[k].memory, "a parameter");
                test_tensor_check_unchanged(t.parameters[k].gradient_memory, "a gradient");
            }
        }
    }
    go_on(&t, 1e-5);
}

/* float64 accepts only its own type, and so do half types. */
TEST(gradients_of_other_types)
{
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    const tch_dtype others[] = {TCH_FLOAT32, TCH_BFLOAT16, TCH_FLOAT32};
    for (int i = 0; i < 3; i++) {
        trial t;
        tch_optim_config c = config_of(TCH_OPTIM_SGD);
        trial_open(&t, *state, types[i], others[i], &c, SHAPES, shapes);
        trial_draw(&t);
        test_case("%s for %s", tch_dtype_name(others[i]), tch_dtype_name(types[i]));
        test_check_refused(trial_step_library(&t), TCH_ERR_DTYPE, "parameter0");
    }
}

TEST(parameters_that_cannot_move)
{
    trial t;
    test_broken b;
    open_kind(&t, *state, TCH_FLOAT32, TCH_OPTIM_ADAMW);
    test_tensor *other = test_tensor_make(*state, TCH_FLOAT32, 2, shapes[0].shape, LAYOUT_TRANSPOSED);
    test_case("another layout");
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 0, &other->tensor), TCH_ERR_SHAPE, "parameter0");
    refuse_argument(tch_optimizer_set_parameter(t.optimizer, SHAPES, &other->tensor), "parameter");
    test_case("onto another parameter");
    test_broken_copy(&b, &t.parameters[0].tensor);
    b.tensor.ndim = 1;
    b.shape[0] = 11;
    b.strides[0] = 1;
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 1, &b.tensor), TCH_ERR_LAYOUT, "parameter1");
    go_on(&t, 1e-5);
    test_tensor_check_unchanged(other, "what was refused");
}

/* --- other arguments --------------------------------------------------------------------------------------------- */

TEST(wrong_numbers)
{
    trial t;
    const double rates[] = {-1e-3, NAN, INFINITY};
    const int32_t counts[] = {SHAPES - 1, SHAPES + 1, 0, -1};
    const tch_tensor *gradients[SHAPES];
    tch_optim_state s = TCH_OPTIM_STATE_INIT;
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_optim_config c = open_kind(&t, *state, TCH_FLOAT32, TCH_OPTIM_ADAMW);
    tch_optim_config now = c;
    trial_list_gradients(&t, gradients);
    for (int i = 0; i < 3; i++) {
        test_case("set_lr with %g", rates[i]);
        refuse_argument(tch_optimizer_set_lr(t.optimizer, 0, rates[i]), "lr");
    }
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.lr == c.lr, "a refused lr was taken");
    for (int i = 0; i < 4; i++) {
        test_case("%d gradients", counts[i]);
        tch_status got = tch_optimizer_step(t.optimizer, counts[i], gradients);
        CHECK(got == TCH_ERR_INVALID_ARGUMENT, "gave %s", tch_status_name(got));
    }
    test_case("numbers of groups, states and parameters");
    refuse_argument(tch_optimizer_set_lr(t.optimizer, 1, 0.1), "group");
    refuse_argument(tch_optimizer_set_lr_tensor(t.optimizer, 5, &t.parameters[0].tensor), "group");
    refuse_argument(tch_optimizer_get_config(t.optimizer, 1, &c), "group");
    refuse_argument(tch_optimizer_get_state(t.optimizer, tch_optimizer_state_count(t.optimizer), &s), "state");
    refuse_argument(tch_optimizer_get_state(t.optimizer, -1, &s), "state");
    refuse_parameters(*state, -1, &(tch_parameter){.tensor = &t.parameters[0].tensor}, TCH_ERR_INVALID_ARGUMENT,
                      "count");
    test_case("struct_size");
    s.struct_size = 3;
    refuse_argument(tch_optimizer_get_state(t.optimizer, 0, &s), "state");
    stats.struct_size = 1;
    refuse_argument(tch_optimizer_get_stats(t.optimizer, &stats), "stats");
    go_on(&t, 1e-5);
}

TEST(missing_arguments)
{
    trial t;
    int32_t group;
    tch_checkpoint_writer *writer = NULL;
    tch_checkpoint *file = NULL;
    tch_optimizer *none = NULL;
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    const tch_tensor *gradients[SHAPES];
    const char *path = test_path("adamw.safetensors");
    tch_optim_config c = open_kind(&t, *state, TCH_FLOAT64, TCH_OPTIM_ADAMW);
    tch_optimizer *o = t.optimizer;
    const tch_parameter entries[] = {{.tensor = &t.parameters[0].tensor}, {.name = "second"}};
    trial_list_gradients(&t, gradients);
    trial_save(&t, path);
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_checkpoint_open(path, &file));
    test_case("no optimizer");
    refuse_argument(tch_optimizer_create(*state, &c, NULL, 0, NULL, NULL), "optimizer");
    refuse_argument(tch_optimizer_set_config(NULL, 0, &c), "optimizer");
    refuse_argument(tch_optimizer_add_group(NULL, &c, 0, NULL, NULL, &group), "optimizer");
    refuse_argument(tch_optimizer_step(NULL, SHAPES, gradients), "optimizer");
    refuse_argument(tch_optimizer_set_lr(NULL, 0, 0.1), "optimizer");
    refuse_argument(tch_optimizer_get_stats(NULL, &stats), "optimizer");
    refuse_argument(tch_optimizer_get_memory(NULL, &memory), "optimizer");
    refuse_argument(tch_optimizer_save(NULL, writer, "o"), "optimizer");
    refuse_argument(tch_optimizer_load(NULL, file, "o"), "optimizer");
    CHECK(tch_optimizer_group_count(NULL) == 0 && tch_optimizer_parameter_count(NULL) == 0, "of no optimizer");
    CHECK(tch_optimizer_state_count(NULL) == 0, "of no optimizer");
    tch_optimizer_destroy(NULL);
    test_case("NULL");
    refuse_argument(tch_optimizer_create(NULL, &c, NULL, 1, entries, &none), "context");
    refuse_parameters(*state, 2, entries, TCH_ERR_INVALID_ARGUMENT, "second");
    refuse_parameters(*state, 1, NULL, TCH_ERR_INVALID_ARGUMENT, "parameters");
    refuse_argument(tch_optimizer_set_parameter(o, 0, NULL), "parameter0");
    refuse_argument(tch_optimizer_step(o, SHAPES, NULL), "gradients");
    refuse_argument(tch_optimizer_get_state(o, 0, NULL), "state");
    refuse_argument(tch_optimizer_get_stats(o, NULL), "stats");
    refuse_argument(tch_optimizer_get_memory(o, NULL), "memory");
    refuse_argument(tch_optimizer_get_config(o, 0, NULL), "config");
    refuse_argument(tch_optim_forecast(NULL, &c, 0, NULL, &memory), "context");
    refuse_argument(tch_optim_forecast(*state, &c, 0, NULL, NULL), "memory");
    refuse_argument(tch_optim_forecast(*state, NULL, 0, NULL, &memory), "config");
    refuse_argument(tch_optimizer_save(o, NULL, "o"), "writer");
    refuse_argument(tch_optimizer_save(o, writer, NULL), "prefix");
    refuse_argument(tch_optimizer_load(o, NULL, "o"), "checkpoint");
    refuse_argument(tch_optimizer_load(o, file, NULL), "prefix");
    tch_checkpoint_writer_destroy(writer);
    tch_checkpoint_close(file);
    go_on(&t, 1e-10);
}

/* A view of the state is valid as long as the optimizer, even if groups are added. */
TEST(views_of_the_state_stay)
{
    trial t;
    test_case("a view, then more groups");
    tch_optim_config c = open_kind(&t, *state, TCH_FLOAT32, TCH_OPTIM_SHAMPOO);
    const tch_tensor *view = trial_state_at(&t, 0).tensor;
    void *data = view->data;
    int64_t size = tch_tensor_numel(view);
    for (int i = 0; i < 3; i++) {
        trial_add_group(&t, &c, SHAPES, shapes);
    }
    CHECK(view->data == data && tch_tensor_numel(view) == size, "the view has changed");
    CHECK_OK(tch_tensor_check(view, "state"));
}

/* --- checkpoints of other runs ----------------------------------------------------------------------------------- */

/* An optimizer's checkpoint after some steps. */
static void save_trained(tch_context *context, const tch_optim_config *c, int32_t steps, const char *path)
{
    trial t;
    test_case("saving");
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, c, SHAPES, shapes);
    trial_steps(&t, steps);
    trial_save(&t, path);
}

/* Rejected, naming the error if given, and the optimizer continues unaffected. */
static void refuse_checkpoint(tch_context *context, const tch_optim_config *c, int32_t count, const trial_shape *with,
                              const char *prefix, const char *path, const char *name)
{
    trial t;
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, c, count, with);
    trial_step(&t);
    tch_status got = tch_optimizer_load(t.optimizer, checkpoint, prefix);
    CHECK(got == TCH_ERR_INVALID_ARGUMENT || (name == NULL && (got == TCH_ERR_SHAPE || got == TCH_ERR_DTYPE)),
          "gave %s", tch_status_name(got));
    CHECK(name == NULL || strstr(tch_last_error(), name) != NULL, "expected %s named: %s", name, tch_last_error());
    go_on(&t, 1e-10);
    tch_checkpoint_close(checkpoint);
}

/* clang-format off */
#define NONE {{NULL, 0, FIELD_REAL}, 0}
/* clang-format on */
#define OF(kind, saved, set) kind, kind, saved, set, SHAPES, shapes, "optimizer"

TEST(checkpoints_of_something_else)
{
    static const trial_shape changed[] = {
        {.ndim = 2, .shape = {6, 6}}, {.ndim = 1, .shape = {12}}, {.ndim = 2, .shape = {5, 5}, .order = {1, 0}}};
    /* The kind and an option of the saved optimizer, then of the loading one. */
    static const struct {
        const char *what;
        tch_optim_kind saved_kind, kind;
        trial_setting saved, set;
        int32_t count;
        const trial_shape *shapes;
        const char *prefix;
    } cases[] = {
        {"another shape", TCH_OPTIM_SHAMPOO, TCH_OPTIM_SHAMPOO, NONE, NONE, SHAPES, changed, "optimizer"},
        {"fewer parameters", TCH_OPTIM_SHAMPOO, TCH_OPTIM_SHAMPOO, NONE, NONE, SHAPES - 1, shapes, "optimizer"},
        {"another kind", TCH_OPTIM_SHAMPOO, TCH_OPTIM_ADAMW, NONE, NONE, SHAPES, shapes, "optimizer"},
        {"another prefix", TCH_OPTIM_SHAMPOO, TCH_OPTIM_SHAMPOO, NONE, NONE, SHAPES, shapes, "elsewhere"},
        {"other blocks", OF(TCH_OPTIM_SHAMPOO, NONE, SET(shampoo.max_preconditioner_dim, 4))},
        {"another graft", OF(TCH_OPTIM_SHAMPOO, NONE, SET(shampoo.grafting, TCH_GRAFTING_ADAM))},
        {"a buffer that it has no place for", OF(TCH_OPTIM_SHAMPOO, SET(momentum, 0.9), NONE)},
        {"maximize", OF(TCH_OPTIM_SHAMPOO, SET(maximize, 1), NONE)},
        {"maximize", OF(TCH_OPTIM_ADAMW, SET(maximize, 1), NONE)},
        {"maximize", OF(TCH_OPTIM_LION, SET(maximize, 1), NONE)},
        {"maximize", OF(TCH_OPTIM_NORMUON, SET(maximize, 1), NONE)},
    };
    const char *path = test_path("other.safetensors");
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_optim_config saved = config_of(cases[i].saved_kind);
        tch_optim_config c = config_of(cases[i].kind);
        trial_set(&saved, (const trial_setting[]){cases[i].saved, NONE});
        trial_set(&c, (const trial_setting[]){cases[i].set, NONE});
        save_trained(*state, &saved, STEPS, path);
        test_case("%s, %s", tch_optim_kind_name(c.kind), cases[i].what);
        refuse_checkpoint(*state, &c, cases[i].count, cases[i].shapes, cases[i].prefix, path, NULL);
    }
}

/* Invalid counts, on the host or on the device: they would change the training, or overflow. */
TEST(numbers_that_cannot_be)
{
    static const int64_t counts[] = {-1, -5, INT64_MAX, INT64_MIN, ((int64_t)1 << 53) + 1};
    static const int64_t trouble[] = {-1, 3, 31 << 2, 31 << 7, (int64_t)1 << 29, INT64_MAX}; /* failures, gaps, all */
    static const double clocks[] = {-5.0, -1.0, 0.5, 1e300, INFINITY, -INFINITY, NAN, 0x1p53 + 2.0};
    static const struct {
        const char *name;
        int64_t at;
        const void *values; /* of eight bytes each */
        size_t count;
    } cases[] = {
        {"optimizer/counts", 0, counts, TEST_COUNT(counts)},      /* a parameter's steps */
        {"optimizer/counts", SHAPES, counts, TEST_COUNT(counts)}, /* the optimizer's */
        {"optimizer/counts", -1, trouble, TEST_COUNT(trouble)},
        {"optimizer/parameter0/step", 0, clocks, TEST_COUNT(clocks)},
    };
    /* As text they can be anything; a cast to an integer would be undefined. */
    static const struct {
        const char *key, *text;
    } settings[] = {
        {"lr", "nan"},
        {"lr", "-1"},
        {"beta1", "inf"},
        {"eps", "1e400"},
        {"precondition_frequency", "0"},
        {"precondition_frequency", "-5"},
        {"precondition_frequency", "1.5"},
        {"precondition_frequency", "1e300"},
        {"precondition_frequency", "nan"},
        {"start_preconditioning_step", "9223372036854775807"},
        {"stagger", "0.5"},
        {"grafting", "4294967296"},
        {"max_preconditioner_dim", "1e300"},
        {"memory_budget", "nan"},
        {"nonfinite", "-1"},
    };
    char name[128];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const char *path = test_path("good.safetensors");
    const char *bad = test_path("bad.safetensors");
    save_trained(*state, &c, 1, path);
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        snprintf(name, sizeof name, "'%s'", cases[i].name);
        for (size_t k = 0; k < cases[i].count; k++) {
            test_case("%s, element %lld, bad value %zu", cases[i].name, (long long)cases[i].at, k);
            test_checkpoint_set_element(path, bad, cases[i].name, cases[i].at, (const int64_t *)cases[i].values + k);
            refuse_checkpoint(*state, &c, SHAPES, shapes, "optimizer", bad, name);
        }
    }
    for (size_t i = 0; i < TEST_COUNT(settings); i++) {
        test_case("%s is %s", settings[i].key, settings[i].text);
        snprintf(name, sizeof name, "optimizer/group0.%s", settings[i].key);
        test_checkpoint_set_text(path, bad, name, settings[i].text);
        refuse_checkpoint(*state, &c, SHAPES, shapes, "optimizer", bad, name);
    }
}

TEST_MAIN(test_open_context_and_folder, test_close_context_and_folder)

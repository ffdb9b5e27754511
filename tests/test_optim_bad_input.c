/* Bad input to optimizers. Every refusal has its status, names what was wrong and, for a number, gives its value; and
 * after all of them the optimizer goes on as the reference does, because nothing has changed. */
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/files.h"
#include "support/messages.h"
#include "support/optim_trial.h"
#include "support/testing.h"

#define STEPS 12

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {6, 6}}, {.ndim = 1, .shape = {11}}, {.ndim = 2, .shape = {5, 5}, .order = {1, 0}}};
#define SHAPES 3

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = tch_optim_defaults(kind);
    c.lr = 0.01;
    c.precondition_frequency = 1;
    c.relative_eps = 1e-3;
    c.root_method = TCH_ROOT_EIGEN;
    return c;
}

/* --- hyper-parameters --------------------------------------------------------------------------------------------- */

typedef enum field_type { REAL, INT32, INT64 } field_type;

#define MOST_BAD 6

/* A field, whether it may change between steps, and values that are out of its range. */
typedef struct field {
    const char *name;
    size_t offset;
    field_type type;
    int changes;
    int count;
    double bad[MOST_BAD];
} field;

#define AT(name) #name, offsetof(tch_optim_config, name)

static const field fields[] = {
    {AT(lr), REAL, 1, 4, {-1e-3, NAN, INFINITY, -INFINITY}},
    {AT(weight_decay), REAL, 1, 3, {-0.1, NAN, INFINITY}},
    {AT(decay), INT32, 0, 3, {-1, 2, 99}},
    {AT(maximize), INT32, 0, 2, {-1, 2}},
    {AT(momentum), REAL, 1, 4, {-0.1, 1.0, 1.5, NAN}},
    {AT(dampening), REAL, 1, 3, {NAN, INFINITY, -INFINITY}},
    {AT(nesterov), INT32, 0, 2, {-1, 7}},
    {AT(beta1), REAL, 1, 4, {-0.1, 1.0, 2.0, NAN}},
    {AT(beta2), REAL, 1, 4, {-0.1, 1.01, INFINITY, NAN}},
    {AT(eps), REAL, 1, 3, {-1e-8, NAN, INFINITY}},
    {AT(bias_correction), INT32, 0, 2, {-1, 2}},
    {AT(amsgrad), INT32, 0, 2, {-1, 2}},
    {AT(scalar_lr), REAL, 1, 3, {-1.0, NAN, INFINITY}},
    {AT(scalar_beta1), REAL, 1, 3, {-0.5, 1.0, NAN}},
    {AT(scalar_beta2), REAL, 1, 3, {-0.5, 1.0, NAN}},
    {AT(scalar_eps), REAL, 1, 2, {-1.0, NAN}},
    {AT(scalar_weight_decay), REAL, 1, 2, {NAN, INFINITY}},
    {AT(max_preconditioner_dim), INT64, 0, 3, {0, -1, -1e18}},
    {AT(block), INT32, 0, 2, {-1, 2}},
    {AT(merge_dims), INT32, 0, 2, {-1, 2}},
    {AT(precondition_1d), INT32, 0, 2, {-1, 2}},
    {AT(precondition_frequency), INT32, 1, 4, {0, -1, INT_MIN, INT_MAX}},
    {AT(start_preconditioning_step), INT32, 0, 3, {-2, INT_MIN, INT_MAX}},
    {AT(stagger), INT32, 1, 2, {-1, 2}},
    {AT(precision), INT32, 0, 2, {-1, 2}},
    {AT(relative_eps), REAL, 1, 3, {-1e-3, NAN, INFINITY}},
    {AT(root_tolerance), REAL, 0, 3, {-1e-3, NAN, INFINITY}},
    {AT(root_method), INT32, 0, 2, {-1, 4}},
    {AT(exponent_override), INT32, 0, 5, {-1, 5, 7, 9, INT_MAX}},
    {AT(grafting), INT32, 0, 2, {-1, 5}},
    {AT(grafting_beta2), REAL, 1, 3, {-0.1, 1.0, NAN}},
    {AT(grafting_eps), REAL, 1, 2, {-1.0, NAN}},
    {AT(shampoo_beta), REAL, 1, 3, {1.0, 2.0, NAN}},
    {AT(normalize_grads), INT32, 0, 2, {-1, 2}},
    {AT(muon_method), INT32, 0, 2, {-1, 3}},
    {AT(muon_steps), INT32, 0, 3, {-1, -5, 101}},
    {AT(muon_lr), INT32, 0, 2, {-1, 3}},
    {AT(master_weights), INT32, 0, 2, {-1, 2}},
    {AT(stochastic_rounding), INT32, 0, 2, {-1, 2}},
    {AT(nonfinite), INT32, 0, 2, {-1, 3}},
    {AT(memory_budget), INT64, 0, 2, {-1, 9.2e18}},
};
#define FIELDS ((int)(sizeof fields / sizeof fields[0]))

static void set_field(tch_optim_config *c, const field *f, double value)
{
    char *at = (char *)c + f->offset;
    int32_t narrow = f->type == INT32 ? (int32_t)value : 0;
    int64_t wide = f->type == INT64 ? (int64_t)value : 0;
    const void *from = f->type == REAL ? (const void *)&value : f->type == INT32 ? (void *)&narrow : (void *)&wide;
    memcpy(at, from, f->type == INT32 ? sizeof narrow : sizeof value);
}

/* The message has the value, in some notation: its first digits are enough. */
static void check_value_told(double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.4g", value);
    CHECK(isnan(value) || strstr(tch_last_error(), text) != NULL || fabs(value) > 1e6,
          "the message does not tell the value %s: %s", text, tch_last_error());
}

/* A value that is too large is not answered with a least one that it is above, nor the other way round. */
static void check_range_told(double value)
{
    const char *told = tch_last_error();
    CHECK(!(value > 1.0 && strstr(told, "or more") != NULL && strstr(told, "below") == NULL),
          "%g is too large, and the message does not say for what: %s", value, told);
    CHECK(!(value < 0.0 && strstr(told, "or less") != NULL),
          "%g is too small, and the message does not say for what: %s", value, told);
}

static void options_out_of_range(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (int i = 0; i < FIELDS; i++) {
            for (int k = 0; k < fields[i].count; k++) {
                tch_optim_config c = config_of(kind);
                tch_optimizer *optimizer = (tch_optimizer *)&c;
                tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
                set_field(&c, &fields[i], fields[i].bad[k]);
                test_case("%s with %s = %g", tch_optim_kind_name(kind), fields[i].name, fields[i].bad[k]);
                tch_status got = tch_optimizer_create(*state, &c, 0, NULL, &optimizer);
                test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, fields[i].name);
                check_value_told(fields[i].bad[k]);
                check_range_told(fields[i].bad[k]);
                CHECK(optimizer == NULL, "an optimizer was returned");
                got = tch_optim_forecast(*state, &c, 0, NULL, &memory);
                test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, fields[i].name);
            }
        }
    }
}

/* What only the combination shows. */
static void options_that_do_not_go_together(void **state)
{
    tch_optimizer *optimizer = NULL;
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    test_case("nesterov without momentum, as in PyTorch");
    c.nesterov = 1;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "nesterov");
    test_case("nesterov with dampening, as in PyTorch");
    c.momentum = 0.9;
    c.dampening = 0.1;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "nesterov");
    test_case("beta2 = 1 is Shampoo's alone");
    c = config_of(TCH_OPTIM_ADAMW);
    c.beta2 = 1.0;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "beta2");
    c = config_of(TCH_OPTIM_NORMUON);
    c.beta2 = 1.0;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "beta2");
    c = config_of(TCH_OPTIM_LION);
    c.beta2 = 1.0;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "beta2");
    c = config_of(TCH_OPTIM_SOAP);
    c.beta2 = 1.0;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "beta2");
    test_case("Shampoo without damping");
    c = config_of(TCH_OPTIM_SHAMPOO);
    c.eps = c.relative_eps = 0.0;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "eps");
    test_case("no kind");
    c = config_of(TCH_OPTIM_SGD);
    c.kind = (tch_optim_kind)99;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "kind");
    test_case("no struct_size");
    c = config_of(TCH_OPTIM_SGD);
    c.struct_size -= 8;
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT, "config");
    CHECK(optimizer == NULL, "an optimizer was returned");
}

/* A value in range that is not the one there is. */
static double another_value(const tch_optim_config *c, const field *f)
{
    double now = 0.0;
    int32_t narrow;
    int64_t wide;
    if (f->type == REAL) {
        memcpy(&now, (const char *)c + f->offset, sizeof now);
        return now == 0.0 ? 0.25 : now * 0.5;
    }
    if (f->type == INT64) {
        memcpy(&wide, (const char *)c + f->offset, sizeof wide);
        return (double)wide + 1.0;
    }
    memcpy(&narrow, (const char *)c + f->offset, sizeof narrow);
    return narrow == 0 || narrow == 5 ? narrow + 1 : narrow == -1 ? 3 : 0;
}

/* Every field that is not marked (step) is refused when it changes; and bad values of the others are. */
static void changes_that_are_refused(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_optim_config good = config_of(kind);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &good, SHAPES, shapes);
        trial_step(&t);
        for (int i = 0; i < FIELDS; i++) {
            tch_optim_config c = good;
            double value = fields[i].changes ? fields[i].bad[0] : another_value(&good, &fields[i]);
            set_field(&c, &fields[i], value);
            test_case("%s: changing %s to %g", tch_optim_kind_name(kind), fields[i].name, value);
            tch_status got = tch_optimizer_set_config(t.optimizer, 0, &c);
            test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, fields[i].name);
        }
        test_case("%s: changing the seed or the kind", tch_optim_kind_name(kind));
        tch_optim_config c = good;
        c.seed += 1;
        test_check_refused(tch_optimizer_set_config(t.optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, "seed");
        c = tch_optim_defaults(kind == TCH_OPTIM_SGD ? TCH_OPTIM_ADAMW : TCH_OPTIM_SGD);
        test_check_refused(tch_optimizer_set_config(t.optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, "kind");
        test_check_refused(tch_optimizer_set_config(t.optimizer, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "config");
        test_check_refused(tch_optimizer_set_config(t.optimizer, 1, &good), TCH_ERR_INVALID_ARGUMENT, "group");
        test_check_refused(tch_optimizer_set_config(t.optimizer, -1, &good), TCH_ERR_INVALID_ARGUMENT, "group");
        test_check_refused(tch_optimizer_set_config(NULL, 0, &good), TCH_ERR_INVALID_ARGUMENT, "optimizer");
        test_case("%s: after all that was refused", tch_optim_kind_name(kind));
        for (int i = 0; i < STEPS; i++) {
            trial_step(&t);
        }
        trial_check(&t, 1e-10);
        trial_close(&t);
    }
}

/* Numbers for which nothing was kept when the optimizer was made. */
static void numbers_that_begin_at_zero(void **state)
{
    static const struct {
        tch_optim_kind kind;
        const char *name;
        size_t offset;
    } cases[] = {
        {TCH_OPTIM_SGD, AT(momentum)},
        {TCH_OPTIM_SHAMPOO, AT(momentum)},
        {TCH_OPTIM_SHAMPOO, AT(beta1)},
    };
    for (int i = 0; i < 3; i++) {
        trial t;
        double value = 0.0;
        tch_optim_config c = config_of(cases[i].kind);
        memcpy((char *)&c + cases[i].offset, &value, sizeof value);
        test_case("%s of %s from 0", cases[i].name, tch_optim_kind_name(cases[i].kind));
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        value = 0.5;
        memcpy((char *)&c + cases[i].offset, &value, sizeof value);
        test_check_refused(tch_optimizer_set_config(t.optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, cases[i].name);
        trial_close(&t);
    }
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

static void refuse_parameters(tch_context *context, int32_t count, const tch_parameter *entries, tch_status expected,
                              const char *name)
{
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optimizer *optimizer = (tch_optimizer *)&c;
    test_check_refused(tch_optimizer_create(context, &c, count, entries, &optimizer), expected, name);
    CHECK(optimizer == NULL, "an optimizer was returned");
}

static void broken_parameters(void **state)
{
    tch_context *context = *state;
    const int64_t size[] = {4, 5};
    test_tensor *good = test_tensor_make(context, TCH_FLOAT32, 2, size, LAYOUT_CONTIGUOUS);
    test_tensor *other = test_tensor_make(context, TCH_FLOAT32, 2, size, LAYOUT_CONTIGUOUS);
    tch_tensor broken = other->tensor;
    const tch_parameter entries[] = {{&good->tensor, NULL, 0}, {&broken, "second", 0}};
    test_case("NULL");
    refuse_parameters(context, 2, (tch_parameter[]){entries[0], {NULL, "second", 0}}, TCH_ERR_INVALID_ARGUMENT,
                      "second");
    refuse_parameters(context, 1, NULL, TCH_ERR_INVALID_ARGUMENT, "parameters");
    refuse_parameters(context, -1, entries, TCH_ERR_INVALID_ARGUMENT, "count");
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optimizer *none = NULL;
    test_check_refused(tch_optimizer_create(NULL, &c, 2, entries, &none), TCH_ERR_INVALID_ARGUMENT, "context");
    broken.data = NULL;
    refuse_parameters(context, 2, entries, TCH_ERR_INVALID_ARGUMENT, "second");
    test_case("rank, type, device, alignment");
    broken = other->tensor;
    broken.ndim = TCH_MAX_RANK + 1;
    refuse_parameters(context, 2, entries, TCH_ERR_SHAPE, "second");
    broken = other->tensor;
    broken.dtype = TCH_INT32;
    refuse_parameters(context, 2, entries, TCH_ERR_DTYPE, "second");
    broken.dtype = (tch_dtype){TCH_FLOAT, 8, 1};
    refuse_parameters(context, 2, entries, TCH_ERR_DTYPE, "second");
    broken = other->tensor;
    broken.device.index += 1;
    refuse_parameters(context, 2, entries, TCH_ERR_DEVICE, "second");
    broken = other->tensor;
    broken.byte_offset += 1;
    refuse_parameters(context, 2, entries, TCH_ERR_LAYOUT, "second");
    test_tensor_check_unchanged(good, "a parameter");
    test_tensor_check_unchanged(other, "a parameter");
    test_tensor_free(good);
    test_tensor_free(other);
}

static void parameters_that_are_not_dense(void **state)
{
    const test_layout layouts[] = {LAYOUT_ROW_GAPS, LAYOUT_BATCH_GAPS, LAYOUT_STEPPED, LAYOUT_REVERSED,
                                   LAYOUT_EXPANDED};
    const int64_t size[] = {3, 4, 5};
    for (int i = 0; i < 5; i++) {
        test_tensor *gaps = test_tensor_make(*state, TCH_FLOAT32, 3, size, layouts[i]);
        test_case("a parameter with %s", test_layout_name(layouts[i]));
        refuse_parameters(*state, 1, &(tch_parameter){&gaps->tensor, "weight", 0}, TCH_ERR_LAYOUT, "weight");
        test_tensor_check_unchanged(gaps, "the parameter");
        test_tensor_free(gaps);
    }
}

/* The same memory, or its last element, or a part inside; and names that are taken. */
static void parameters_that_share(void **state)
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
        const tch_parameter entries[] = {{&good->tensor, "first", 0}, {&own->tensor, NULL, 0}, {&inside, "last", 0}};
        refuse_parameters(context, 3, entries, TCH_ERR_LAYOUT, "first");
        CHECK(test_names_argument(tch_last_error(), "last"), "the message does not name both: %s", tch_last_error());
    }
    test_case("two of one name");
    const tch_parameter named[] = {{&good->tensor, "w", 0}, {&own->tensor, "w", 0}};
    refuse_parameters(context, 2, named, TCH_ERR_INVALID_ARGUMENT, "w");
    test_tensor_free(good);
    test_tensor_free(own);
}

/* No parameters at all, then some: a group may be empty, and a step without gradients takes nothing. */
static void optimizers_without_parameters(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        trial t;
        tch_parameter entry;
        tch_optim_config c = config_of(kind);
        test_case("%s without parameters", tch_optim_kind_name(kind));
        trial_prepare(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 0, shapes, &entry);
        CHECK_OK(tch_optimizer_create(*state, &c, 0, NULL, &t.optimizer));
        CHECK_OK(tch_optimizer_step(t.optimizer, 0, NULL));
        CHECK(tch_optimizer_state_count(t.optimizer) == 0, "there is state");
        trial_add_group(&t, &c, SHAPES, shapes);
        for (int i = 0; i < STEPS; i++) {
            trial_step(&t);
        }
        trial_check(&t, 1e-10);
        trial_close(&t);
    }
}

/* A group that is refused leaves the optimizer as it was. */
static void groups_that_are_refused(void **state)
{
    trial t;
    int32_t group = 77;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_config other = config_of(TCH_OPTIM_SOAP);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    const tch_parameter again = {&t.parameters[1].tensor, "again", 0};
    test_case("a group of another kind");
    test_check_refused(tch_optimizer_add_group(t.optimizer, &other, 0, NULL, &group), TCH_ERR_INVALID_ARGUMENT, "kind");
    test_case("a parameter that is there already");
    tch_status got = tch_optimizer_add_group(t.optimizer, &c, 1, &again, &group);
    test_check_refused(got, TCH_ERR_LAYOUT, "again");
    test_case("a bad number");
    other = c;
    other.lr = -1.0;
    got = tch_optimizer_add_group(t.optimizer, &other, 1, &again, &group);
    test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, "lr");
    test_check_refused(tch_optimizer_add_group(NULL, &c, 0, NULL, &group), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    CHECK(group == 77, "a number was given to a refused group");
    CHECK(tch_optimizer_group_count(t.optimizer) == 1 && tch_optimizer_parameter_count(t.optimizer) == SHAPES,
          "the optimizer has grown");
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    trial_check(&t, 1e-10);
    trial_close(&t);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

typedef struct broken_gradient {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK], strides[TCH_MAX_RANK];
} broken_gradient;

static void refuse_gradient(trial *t, broken_gradient *b, tch_status expected)
{
    const tch_tensor *gradients[SHAPES];
    trial_list_gradients(t, gradients);
    gradients[1] = &b->tensor;
    test_check_refused(tch_optimizer_step(t->optimizer, SHAPES, gradients), expected, "parameter1");
    for (int32_t i = 0; i < SHAPES; i++) {
        test_tensor_check_unchanged(t->parameters[i].memory, "a parameter");
        test_tensor_check_unchanged(t->parameters[i].gradient_memory, "a gradient");
    }
    b->tensor = t->parameters[1].gradient;
    b->shape[0] = 11;
    b->strides[0] = 1;
    b->tensor.shape = b->shape;
    b->tensor.strides = b->strides;
}

static void broken_gradients(void **state)
{
    trial t;
    broken_gradient b;
    const tch_tensor *gradients[SHAPES];
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    const tch_dtype wrong[] = {TCH_FLOAT64, TCH_INT32, {TCH_FLOAT, 8, 1}};
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_draw(&t);
    trial_list_gradients(&t, gradients);
    b.tensor = t.parameters[1].gradient;
    test_case("dtypes");
    for (int i = 0; i < 3; i++) {
        b.tensor.dtype = wrong[i];
        refuse_gradient(&t, &b, TCH_ERR_DTYPE);
    }
    test_case("shapes");
    b.shape[0] = 10;
    refuse_gradient(&t, &b, TCH_ERR_SHAPE);
    b.shape[1] = b.strides[1] = 1;
    b.tensor.ndim = 2;
    refuse_gradient(&t, &b, TCH_ERR_SHAPE);
    b.shape[0] = -11;
    refuse_gradient(&t, &b, TCH_ERR_SHAPE);
    test_case("other things");
    b.tensor.data = NULL;
    refuse_gradient(&t, &b, TCH_ERR_INVALID_ARGUMENT);
    b.tensor.device.index += 1;
    refuse_gradient(&t, &b, TCH_ERR_DEVICE);
    b.strides[0] = INT64_MAX / 2;
    refuse_gradient(&t, &b, TCH_ERR_LAYOUT);
    test_case("counts");
    const int32_t counts[] = {SHAPES - 1, SHAPES + 1, 0, -1};
    for (int i = 0; i < 4; i++) {
        tch_status got = tch_optimizer_step(t.optimizer, counts[i], gradients);
        CHECK(got == TCH_ERR_INVALID_ARGUMENT, "%d gradients gave %s", counts[i], tch_status_name(got));
    }
    test_check_refused(tch_optimizer_step(t.optimizer, SHAPES, NULL), TCH_ERR_INVALID_ARGUMENT, "gradients");
    test_check_refused(tch_optimizer_step(NULL, SHAPES, gradients), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    test_case("after all that was refused");
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    trial_check(&t, 1e-5);
    trial_close(&t);
}

/* float64 takes its own type only, and half types theirs. */
static void gradients_of_other_types(void **state)
{
    const tch_dtype types[] = {TCH_FLOAT64, TCH_FLOAT16, TCH_BFLOAT16};
    const tch_dtype others[] = {TCH_FLOAT32, TCH_BFLOAT16, TCH_FLOAT32};
    for (int i = 0; i < 3; i++) {
        trial t;
        const tch_tensor *gradients[SHAPES];
        tch_optim_config c = config_of(TCH_OPTIM_SGD);
        trial_open(&t, *state, types[i], others[i], &c, SHAPES, shapes);
        trial_draw(&t);
        trial_list_gradients(&t, gradients);
        test_case("%s for %s", tch_dtype_name(others[i]), tch_dtype_name(types[i]));
        tch_status got = tch_optimizer_step(t.optimizer, SHAPES, gradients);
        test_check_refused(got, TCH_ERR_DTYPE, "parameter0");
        trial_close(&t);
    }
}

static void broken_scales(void **state)
{
    trial t;
    const tch_tensor *gradients[SHAPES];
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    const int64_t one = 1;
    const int64_t two = 2;
    test_tensor *wide = test_tensor_make(*state, TCH_FLOAT64, 1, &one, LAYOUT_CONTIGUOUS);
    test_tensor *pair = test_tensor_make(*state, TCH_FLOAT32, 1, &two, LAYOUT_CONTIGUOUS);
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_draw(&t);
    trial_list_gradients(&t, gradients);
    tch_tensor elsewhere = pair->tensor;
    elsewhere.ndim = 0;
    elsewhere.device.index += 1;
    const tch_tensor *bad[] = {&wide->tensor, &pair->tensor, &elsewhere};
    const tch_status expected[] = {TCH_ERR_DTYPE, TCH_ERR_SHAPE, TCH_ERR_DEVICE};
    for (int i = 0; i < 3; i++) {
        test_case("a bad scale %d", i);
        test_check_refused(tch_optimizer_step_scaled(t.optimizer, SHAPES, gradients, bad[i], NULL), expected[i],
                           "grad_scale");
        test_check_refused(tch_optimizer_step_scaled(t.optimizer, SHAPES, gradients, NULL, bad[i]), expected[i],
                           "found_inf");
    }
    test_tensor_check_unchanged(t.parameters[0].memory, "a parameter");
    test_tensor_free(wide);
    test_tensor_free(pair);
    trial_close(&t);
}

/* --- questions and changes ---------------------------------------------------------------------------------------- */

static void questions_without_answers(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_state s = TCH_OPTIM_STATE_INIT;
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    int32_t count = tch_optimizer_state_count(t.optimizer);
    test_case("state");
    test_check_refused(tch_optimizer_get_state(t.optimizer, count, &s), TCH_ERR_INVALID_ARGUMENT, "state");
    test_check_refused(tch_optimizer_get_state(t.optimizer, -1, &s), TCH_ERR_INVALID_ARGUMENT, "state");
    test_check_refused(tch_optimizer_get_state(t.optimizer, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "state");
    s.struct_size = 3;
    test_check_refused(tch_optimizer_get_state(t.optimizer, 0, &s), TCH_ERR_INVALID_ARGUMENT, "state");
    test_case("statistics and memory");
    test_check_refused(tch_optimizer_get_stats(t.optimizer, NULL), TCH_ERR_INVALID_ARGUMENT, "stats");
    test_check_refused(tch_optimizer_get_stats(NULL, &stats), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    stats.struct_size = 1;
    test_check_refused(tch_optimizer_get_stats(t.optimizer, &stats), TCH_ERR_INVALID_ARGUMENT, "stats");
    test_check_refused(tch_optimizer_get_memory(t.optimizer, NULL), TCH_ERR_INVALID_ARGUMENT, "memory");
    test_check_refused(tch_optimizer_get_memory(NULL, &memory), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    test_check_refused(tch_optim_forecast(NULL, &c, 0, NULL, &memory), TCH_ERR_INVALID_ARGUMENT, "context");
    test_check_refused(tch_optim_forecast(*state, &c, 0, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "memory");
    test_check_refused(tch_optim_forecast(*state, NULL, 0, NULL, &memory), TCH_ERR_INVALID_ARGUMENT, "config");
    test_case("configurations");
    test_check_refused(tch_optimizer_get_config(t.optimizer, 1, &c), TCH_ERR_INVALID_ARGUMENT, "group");
    test_check_refused(tch_optimizer_get_config(t.optimizer, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "config");
    CHECK(tch_optimizer_group_count(NULL) == 0 && tch_optimizer_parameter_count(NULL) == 0, "of no optimizer");
    CHECK(tch_optimizer_state_count(NULL) == 0, "of no optimizer");
    test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    tch_optimizer_destroy(NULL);
    trial_close(&t);
}

/* A view of the state is good as long as the optimizer, whatever is added to it. */
static void views_of_the_state_stay(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_state s = TCH_OPTIM_STATE_INIT;
    test_case("a view, then more groups");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, shapes);
    CHECK_OK(tch_optimizer_get_state(t.optimizer, 0, &s));
    void *data = s.tensor->data;
    int64_t size = tch_tensor_numel(s.tensor);
    for (int i = 0; i < 3; i++) {
        trial_add_group(&t, &c, SHAPES, shapes);
    }
    CHECK(s.tensor->data == data && tch_tensor_numel(s.tensor) == size, "the view has changed");
    CHECK_OK(tch_tensor_check(s.tensor, "state"));
    trial_close(&t);
}

static void learning_rates(void **state)
{
    trial t;
    const double bad[] = {-1e-3, NAN, INFINITY};
    const int64_t two = 2;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    tch_optim_config now = c;
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    for (int i = 0; i < 3; i++) {
        test_case("set_lr with %g", bad[i]);
        test_check_refused(tch_optimizer_set_lr(t.optimizer, 0, bad[i]), TCH_ERR_INVALID_ARGUMENT, "lr");
    }
    test_check_refused(tch_optimizer_set_lr(t.optimizer, 1, 0.1), TCH_ERR_INVALID_ARGUMENT, "group");
    test_check_refused(tch_optimizer_set_lr(NULL, 0, 0.1), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.lr == c.lr, "a refused lr was taken");
    test_case("tensors that hold no learning rate");
    test_tensor *pair = test_tensor_make(*state, TCH_FLOAT32, 1, &two, LAYOUT_CONTIGUOUS);
    tch_tensor lr = pair->tensor;
    tch_status got = tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr);
    CHECK(got != TCH_OK && test_names_argument(tch_last_error(), "lr"), "two numbers gave %s", tch_status_name(got));
    lr.ndim = 0;
    lr.dtype = TCH_INT32;
    got = tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr);
    CHECK(got != TCH_OK && test_names_argument(tch_last_error(), "lr"), "an integer gave %s", tch_status_name(got));
    lr.dtype = TCH_FLOAT32;
    lr.device.index += 1;
    test_check_refused(tch_optimizer_set_lr_tensor(t.optimizer, 0, &lr), TCH_ERR_DEVICE, "lr");
    test_check_refused(tch_optimizer_set_lr_tensor(t.optimizer, 5, &pair->tensor), TCH_ERR_INVALID_ARGUMENT, "group");
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    trial_check(&t, 1e-5);
    test_tensor_free(pair);
    trial_close(&t);
}

static void parameters_that_cannot_move(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    const int64_t size[] = {6, 6};
    test_tensor *other = test_tensor_make(*state, TCH_FLOAT32, 2, size, LAYOUT_CONTIGUOUS);
    tch_tensor moved = other->tensor;
    int64_t sizes[] = {6, 5};
    int64_t strides[] = {1, 6};
    test_case("other shapes, types, layouts");
    moved.shape = sizes;
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 0, &moved), TCH_ERR_SHAPE, "parameter0");
    moved = other->tensor;
    moved.dtype = TCH_INT32;
    tch_status got = tch_optimizer_set_parameter(t.optimizer, 0, &moved);
    CHECK(got != TCH_OK && test_names_argument(tch_last_error(), "parameter0"), "gave %s", tch_status_name(got));
    moved = other->tensor;
    moved.strides = strides;
    got = tch_optimizer_set_parameter(t.optimizer, 0, &moved);
    CHECK(got != TCH_OK && test_names_argument(tch_last_error(), "parameter0"), "gave %s", tch_status_name(got));
    moved = other->tensor;
    moved.device.index += 1;
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 0, &moved), TCH_ERR_DEVICE, "parameter0");
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "parameter0");
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, SHAPES, &moved), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_case("onto another parameter");
    moved = t.parameters[0].tensor;
    int64_t line[] = {11};
    moved.ndim = 1;
    moved.shape = line;
    test_check_refused(tch_optimizer_set_parameter(t.optimizer, 1, &moved), TCH_ERR_LAYOUT, "parameter1");
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    trial_check(&t, 1e-5);
    test_tensor_check_unchanged(other, "what was refused");
    test_tensor_free(other);
    trial_close(&t);
}

/* --- checkpoints of something else -------------------------------------------------------------------------------- */

static void save(trial *t, const char *path)
{
    tch_checkpoint_writer *writer = NULL;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_optimizer_save(t->optimizer, writer, "optimizer"));
    CHECK_OK(tch_checkpoint_writer_save(writer, t->context, path));
    tch_checkpoint_writer_destroy(writer);
}

/* Refused, and the optimizer that refused it goes on as if nothing had been tried. */
static void refuse_checkpoint(tch_context *context, const tch_optim_config *c, int32_t count, const trial_shape *own,
                              const char *prefix, const char *path)
{
    trial t;
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, c, count, own);
    trial_step(&t);
    tch_status got = tch_optimizer_load(t.optimizer, checkpoint, prefix);
    CHECK(got == TCH_ERR_INVALID_ARGUMENT || got == TCH_ERR_SHAPE || got == TCH_ERR_DTYPE, "gave %s",
          tch_status_name(got));
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    trial_check(&t, 1e-10);
    trial_close(&t);
    tch_checkpoint_close(checkpoint);
}

static void checkpoints_of_something_else(void **state)
{
    static const trial_shape changed[] = {
        {.ndim = 2, .shape = {6, 6}}, {.ndim = 1, .shape = {12}}, {.ndim = 2, .shape = {5, 5}, .order = {1, 0}}};
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    tch_optim_config other = config_of(TCH_OPTIM_ADAMW);
    const char *path = test_path("shampoo.safetensors");
    test_case("saving");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
    }
    save(&t, path);
    trial_close(&t);
    test_case("another shape");
    refuse_checkpoint(*state, &c, SHAPES, changed, "optimizer", path);
    test_case("fewer parameters");
    refuse_checkpoint(*state, &c, SHAPES - 1, shapes, "optimizer", path);
    test_case("another kind");
    refuse_checkpoint(*state, &other, SHAPES, shapes, "optimizer", path);
    test_case("another prefix");
    refuse_checkpoint(*state, &c, SHAPES, shapes, "elsewhere", path);
    test_case("another structure");
    other = c;
    other.max_preconditioner_dim = 4;
    refuse_checkpoint(*state, &other, SHAPES, shapes, "optimizer", path);
    other = c;
    other.grafting = TCH_GRAFTING_ADAM;
    refuse_checkpoint(*state, &other, SHAPES, shapes, "optimizer", path);
}

/* Loads a file with a bad number: refused in words that name it, and the training goes on as if it had not been tried. */
static void refuse_number(tch_context *context, const tch_optim_config *c, const char *path, const char *name)
{
    refuse_checkpoint(context, c, SHAPES, shapes, "optimizer", path);
    trial t;
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, c, SHAPES, shapes);
    tch_status got = tch_optimizer_load(t.optimizer, checkpoint, "optimizer");
    CHECK(got == TCH_ERR_INVALID_ARGUMENT && strstr(tch_last_error(), name) != NULL, "gave %s (%s), expected %s named",
          tch_status_name(got), tch_last_error(), name);
    trial_close(&t);
    tch_checkpoint_close(checkpoint);
}

/* The first parameter's clock, the name of which is the trial's own. */
static void find_clock(const char *path, char *name, size_t size)
{
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    name[0] = '\0';
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint) && name[0] == '\0'; i++) {
        const char *here = tch_checkpoint_name(checkpoint, i);
        size_t length = strlen(here);
        if (length > 5 && strcmp(here + length - 5, "/step") == 0) {
            snprintf(name, size, "%s", here);
        }
    }
    CHECK(name[0] != '\0', "there is no clock");
    tch_checkpoint_close(checkpoint);
}

/* Numbers that were never counted, on the host or on the device: they would change the training, or overflow. */
static void counts_and_clocks_that_cannot_be(void **state)
{
    static const int64_t counts[] = {-1, -5, INT64_MAX, INT64_MIN, ((int64_t)1 << 53) + 1};
    static const int64_t trouble[] = {-1, 3, 256, INT64_MAX};
    static const double clocks[] = {-5.0, -1.0, 0.5, 1e300, INFINITY, -INFINITY, NAN, 0x1p53 + 2.0};
    trial t;
    char clock[256];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const char *path = test_path("counted.safetensors");
    const char *bad = test_path("bad.safetensors");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    save(&t, path);
    trial_close(&t);
    for (int64_t at = 0; at <= SHAPES; at += SHAPES) { /* a parameter's steps, then the optimizer's */
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            test_case("count %lld is %lld", (long long)at, (long long)counts[i]);
            test_checkpoint_set_element(path, bad, "optimizer/counts", at, &counts[i]);
            refuse_number(*state, &c, bad, "'optimizer/counts'");
        }
    }
    for (size_t i = 0; i < sizeof trouble / sizeof *trouble; i++) {
        test_case("the last count is %lld", (long long)trouble[i]);
        test_checkpoint_set_element(path, bad, "optimizer/counts", -1, &trouble[i]);
        refuse_number(*state, &c, bad, "'optimizer/counts'");
    }
    find_clock(path, clock, sizeof clock);
    for (size_t i = 0; i < sizeof clocks / sizeof *clocks; i++) {
        test_case("%s is %g", clock, clocks[i]);
        test_checkpoint_set_element(path, bad, clock, 0, &clocks[i]);
        refuse_number(*state, &c, bad, clock);
    }
}

/* As text they can be anything; a cast to an integer would make of them whatever the processor does. */
static void settings_that_cannot_be(void **state)
{
    static const struct {
        const char *key, *text;
    } cases[] = {
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
    trial t;
    char key[128];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const char *path = test_path("set.safetensors");
    const char *bad = test_path("bad.safetensors");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_step(&t);
    save(&t, path);
    trial_close(&t);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case("%s is %s", cases[i].key, cases[i].text);
        snprintf(key, sizeof key, "optimizer/group0.%s", cases[i].key);
        test_checkpoint_set_text(path, bad, key, cases[i].text);
        refuse_number(*state, &c, bad, key);
    }
}

static void checkpoints_without_arguments(void **state)
{
    trial t;
    tch_checkpoint_writer *writer = NULL;
    tch_checkpoint *checkpoint = NULL;
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    const char *path = test_path("adamw.safetensors");
    test_case("NULL");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    save(&t, path);
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    test_check_refused(tch_optimizer_save(NULL, writer, "o"), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    test_check_refused(tch_optimizer_save(t.optimizer, NULL, "o"), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_check_refused(tch_optimizer_save(t.optimizer, writer, NULL), TCH_ERR_INVALID_ARGUMENT, "prefix");
    test_check_refused(tch_optimizer_load(NULL, checkpoint, "o"), TCH_ERR_INVALID_ARGUMENT, "optimizer");
    test_check_refused(tch_optimizer_load(t.optimizer, NULL, "o"), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    test_check_refused(tch_optimizer_load(t.optimizer, checkpoint, NULL), TCH_ERR_INVALID_ARGUMENT, "prefix");
    tch_checkpoint_writer_destroy(writer);
    tch_checkpoint_close(checkpoint);
    trial_close(&t);
}

static int open_both(void **state)
{
    return test_folder_make(state) != 0 ? -1 : test_open_context(state);
}

static int close_both(void **state)
{
    int failed = test_close_context(state);
    return test_folder_remove(state) != 0 ? -1 : failed;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_out_of_range),
        cmocka_unit_test(options_that_do_not_go_together),
        cmocka_unit_test(changes_that_are_refused),
        cmocka_unit_test(numbers_that_begin_at_zero),
        cmocka_unit_test(broken_parameters),
        cmocka_unit_test(parameters_that_are_not_dense),
        cmocka_unit_test(parameters_that_share),
        cmocka_unit_test(optimizers_without_parameters),
        cmocka_unit_test(groups_that_are_refused),
        cmocka_unit_test(broken_gradients),
        cmocka_unit_test(gradients_of_other_types),
        cmocka_unit_test(broken_scales),
        cmocka_unit_test(questions_without_answers),
        cmocka_unit_test(views_of_the_state_stay),
        cmocka_unit_test(learning_rates),
        cmocka_unit_test(parameters_that_cannot_move),
        cmocka_unit_test(checkpoints_of_something_else),
        cmocka_unit_test(counts_and_clocks_that_cannot_be),
        cmocka_unit_test(settings_that_cannot_be),
        cmocka_unit_test(checkpoints_without_arguments),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, open_both, close_both);
}

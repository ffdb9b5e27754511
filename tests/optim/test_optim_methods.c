/* SGD, AdamW, Lion, Muon and NorMuon against the plain references: every option, alone and together, all layouts, in
 * float64 and float32; groups whose numbers change between steps; gradients of zeros. test_optim_shampoo.c and
 * test_optim_soap.c have the same for those. Then what belongs to all optimizers and shows best here.
 *
 * In float32 an elementwise step is a dozen roundings, and a moving average carries those of the steps before: 2 (steps
 * + 10) u of the way. A beta that was rounded before it was taken from 1 would cost a hundred times as much. A step of
 * Lion has length lr whatever the gradient, so an error shows only where a sign does: where c = beta1 m + (1 - beta1) g
 * is no larger than its rounding, in float32 about 3e-7 of all elements. Its shapes in float32 are small enough for
 * none to be expected.
 *
 * A GPU orthogonalizes float32 matrices in bfloat16: measured for these shapes and options, that is 0.0005 to 0.02 of
 * the way, most for the smallest matrix. Second moments of NorMuon's rows add nothing to it: they are means of squares,
 * and their roots halve an error. */
#include <stdio.h>
#include <string.h>

#include "support/elements.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 25

/* Vectors and scalars, nothing at all, matrices by rows and by columns, channels last; gradients in other layouts. */
static const trial_shape elementwise_shapes[] = {
    {.ndim = 1, .shape = {37}},
    {.ndim = 0},
    {.ndim = 1, .shape = {0}},
    {.ndim = 2, .shape = {13, 9}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {2, 2}, .gradient = LAYOUT_TRANSPOSED}, /* the smallest whose transpose is another */
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}},
    {.ndim = 2, .shape = {6, 7}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}},
    {.ndim = 4, .shape = {2, 3, 4, 5}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 3, .shape = {3, 1, 5}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {17, 31}, .gradient = LAYOUT_REVERSED},
    {.ndim = 1, .shape = {5003}, .gradient = LAYOUT_OFFSET}, /* not of Lion in float32 */
};
#define ELEMENTWISE (int32_t) TEST_COUNT(elementwise_shapes), elementwise_shapes

/* Wide and tall ones share classes; by columns, rows of the tensor lie along the columns of memory. */
static const trial_shape matrix_shapes[] = {
    {.ndim = 2, .shape = {12, 12}},
    {.ndim = 2, .shape = {31, 7}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {7, 31}},
    {.ndim = 2, .shape = {31, 7}, .order = {1, 0}},
    {.ndim = 2, .shape = {7, 31}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 2, .shape = {5, 40}},
    {.ndim = 2, .shape = {2, 2}},
    {.ndim = 2, .shape = {64, 33}},
    {.ndim = 3, .shape = {1, 9, 16}, .order = {0, 2, 1}},
    {.ndim = 4, .shape = {6, 3, 2, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}, .gradient_follows = 1},
    {.ndim = 5, .shape = {3, 1, 3, 2, 3}},
    {.ndim = 2, .shape = {31, 7}},
    {.ndim = 2, .shape = {1, 17}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};
#define MATRICES (int32_t) TEST_COUNT(matrix_shapes), matrix_shapes

/* Sides that are powers of two times a few: a GPU has kernels for parameters whose elements it can divide evenly. */
static const trial_shape even_shapes[] = {
    {.ndim = 2, .shape = {64, 64}},
    {.ndim = 2, .shape = {128, 64}},
    {.ndim = 2, .shape = {64, 128}},
    {.ndim = 2, .shape = {192, 32}, .order = {1, 0}},
};

static const trial_option sgd_options[] = {
    {.name = "plain"},
    {"maximize", {SET(maximize, 1)}},
    {"l2", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"momentum", {SET(momentum, 0.9)}},
    {"dampening", {SET(momentum, 0.9), SET(dampening, 0.3)}},
    {"nesterov", {SET(momentum, 0.8), SET(nesterov, 1)}},
    {"nesterov with decay", {SET(momentum, 0.8), SET(nesterov, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"much at once",
     {SET(momentum, 0.9), SET(dampening, 0.3), SET(maximize, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {.name = NULL},
};

static const trial_option adamw_options[] = {
    {.name = "defaults"},
    {"maximize", {SET(maximize, 1)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"l2", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {"amsgrad", {SET(amsgrad, 1), SET(beta2, 0.5)}}, /* so that the largest is not always the latest */
    {"betas", {SET(beta1, 0.0), SET(beta2, 0.99), SET(eps, 0.1)}},
    {"much at once",
     {SET(amsgrad, 1), SET(beta2, 0.5), SET(maximize, 1), SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.3)}},
    {.name = NULL},
};

static const trial_option lion_options[] = {
    {.name = "defaults"},
    {"decay", {SET(weight_decay, 0.3)}},
    {"maximize", {SET(maximize, 1)}},
    {"betas", {SET(beta1, 0.5), SET(beta2, 0.7)}},
    {"no average", {SET(beta1, 0.0), SET(beta2, 0.0)}}, /* the sign of the gradient itself */
    /* Those of other kinds, which Lion does not read: decay is decoupled in any case. */
    {"options of others",
     {SET(weight_decay, 0.3), SET(decay, TCH_DECAY_L2), SET(momentum, 0.5), SET(nesterov, 1), SET(eps, 0.1),
      SET(bias_correction, 0), SET(scalar_lr, 3.0)}},
    {"much at once", {SET(weight_decay, 0.3), SET(maximize, 1), SET(beta1, 0.5), SET(beta2, 0.7)}},
    {.name = NULL},
};

static const trial_option muon_options[] = {
    {.name = "defaults"},
    {"Muon's polynomial", {SET(muon_method, TCH_ORTHO_MUON)}},
    {"own polynomial",
     {SET(muon_method, TCH_ORTHO_MUON), SET(muon_coefficients[0], 2.0), SET(muon_coefficients[1], -1.5),
      SET(muon_coefficients[2], 0.5), SET(muon_steps, 7)}},
    {"Polar Express", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS)}},
    {"eight steps of it", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS), SET(muon_steps, 8)}},
    {"short steps after the long ones", {SET(muon_steps, 5)}},
    {"one step", {SET(muon_steps, 1)}},
    /* It bounds the norm from below: the direction shrinks with a gradient far under it. */
    {"a large eps", {SET(eps, 100.0), SET(muon_steps, 2), SET(muon_method, TCH_ORTHO_MUON), SET(weight_decay, 0.0)}},
    {"no nesterov", {SET(nesterov, 0)}},
    {"other momentum", {SET(momentum, 0.5)}},
    {"no momentum", {SET(momentum, 0.0)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"match_rms_adamw", {SET(muon_lr, TCH_MUON_LR_MATCH_RMS_ADAMW)}},
    {"plain lr", {SET(muon_lr, TCH_MUON_LR_PLAIN)}},
    {"maximize", {SET(maximize, 1)}},
    {"other numbers for scalars",
     {SET(scalar_lr, 0.003), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0)}},
    {"much at once",
     {SET(muon_method, TCH_ORTHO_MUON), SET(muon_lr, TCH_MUON_LR_MATCH_RMS_ADAMW), SET(nesterov, 0), SET(maximize, 1),
      SET(scalar_lr, 0.003), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0), SET(weight_decay, 0.4)}},
    {.name = NULL},
};

/* Muon's are the same code; these are its own, and how others meet them. */
static const trial_option normuon_options[] = {
    {.name = "defaults"},
    {"other beta2", {SET(beta2, 0.5)}},
    {"no memory of rows", {SET(beta2, 0.0)}}, /* every row by its own length of this step */
    {"a large eps", {SET(eps, 0.3)}},         /* as large as the roots it stands beside */
    {"no eps", {SET(eps, 0.0)}},
    {"Muon's polynomial", {SET(muon_method, TCH_ORTHO_MUON)}},
    {"eight steps of Polar Express", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS), SET(muon_steps, 8)}},
    {"no nesterov", {SET(nesterov, 0)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"original lr", {SET(muon_lr, TCH_MUON_LR_ORIGINAL)}},
    {"plain lr", {SET(muon_lr, TCH_MUON_LR_PLAIN)}},
    {"maximize", {SET(maximize, 1)}},
    {"much at once",
     {SET(muon_method, TCH_ORTHO_MUON), SET(muon_lr, TCH_MUON_LR_ORIGINAL), SET(nesterov, 0), SET(maximize, 1),
      SET(scalar_lr, 0.003), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0), SET(beta2, 0.5), SET(weight_decay, 0.4)}},
    {.name = NULL},
};

/* `first` and `second` are what changes between steps in groups of two configurations. */
typedef struct method {
    tch_optim_kind kind;
    int32_t count;
    const trial_shape *shapes;
    const trial_option *options;
    trial_setting first[8], second[8];
} method;

static const method methods[] = {
    {TCH_OPTIM_SGD,
     ELEMENTWISE,
     sgd_options,
     {SET(momentum, 0.8), SET(dampening, 0.1), SET(weight_decay, 0.05)},
     {SET(dampening, 0.0), SET(momentum, 0.5)}},
    {TCH_OPTIM_ADAMW,
     ELEMENTWISE,
     adamw_options,
     {SET(weight_decay, 0.15), SET(beta1, 0.8), SET(beta2, 0.97), SET(eps, 1e-6)},
     {SET(beta1, 0.5), SET(eps, 1e-3)}},
    {TCH_OPTIM_LION,
     ELEMENTWISE,
     lion_options,
     {SET(weight_decay, 0.05), SET(beta1, 0.85), SET(beta2, 0.95)},
     {SET(beta1, 0.7)}},
    {TCH_OPTIM_MUON,
     MATRICES,
     muon_options,
     {SET(momentum, 0.8)},
     {SET(weight_decay, 0.1), SET(scalar_lr, 0.01), SET(scalar_weight_decay, 0.2), SET(scalar_beta1, 0.5)}},
    {TCH_OPTIM_NORMUON,
     MATRICES,
     normuon_options,
     {SET(momentum, 0.8), SET(beta2, 0.9), SET(eps, 1e-3)},
     {SET(weight_decay, 0.1), SET(beta2, 0.7), SET(scalar_lr, 0.01)}},
};

static tch_optim_config base(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.weight_decay = kind == TCH_OPTIM_ADAMW ? 0.1 : c.weight_decay;
    return c;
}

static double tolerance_of(tch_optim_kind kind, tch_dtype dtype)
{
    return ref_orthogonalizes(kind) ? trial_tolerance(kind, dtype)
                                    : 2.0 * (STEPS + 10) * test_arithmetic_roundoff(dtype);
}

static void every_option(void **state)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32};
    for (size_t i = 0; i < 2 * TEST_COUNT(methods); i++) {
        const method *m = &methods[i / 2];
        const tch_optim_config c = base(m->kind);
        tch_dtype dtype = dtypes[i % 2];
        int32_t count = m->count - (m->kind == TCH_OPTIM_LION && dtype.bits == 32);
        trial_run_options(*state, dtype, &c, m->options, count, m->shapes, STEPS, tolerance_of(m->kind, dtype));
        if (ref_orthogonalizes(m->kind)) {
            trial_run_options(*state, dtype, &c, m->options, 4, even_shapes, STEPS / 4, tolerance_of(m->kind, dtype));
        }
    }
}

/* Three groups of two configurations, the last one added in the middle, whose clocks begin at their own first step.
 * Numbers of all of them change, one by tch_optimizer_set_lr. */
static void check_groups(tch_context *context, const method *m)
{
    trial t;
    tch_optim_config first = base(m->kind);
    tch_optim_config second = base(m->kind);
    tch_optim_config now;
    trial_set(&first, m->first);
    trial_set_option(&second, m->options, "much at once");
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &first, 6, m->shapes);
    trial_add_group(&t, &second, m->count - 8, m->shapes + 6);
    for (int i = 0; i < 2 * STEPS; i++) {
        if (i == STEPS) {
            trial_add_group(&t, &second, 2, m->shapes + m->count - 2);
        }
        if (i % 7 == 5) {
            first.lr *= 0.5;
            first.weight_decay += 0.05;
            trial_set(&second, m->second);
            trial_set_config(&t, 0, &first);
            trial_set_config(&t, 1, &second);
        }
        if (i > STEPS) {
            t.configs[2].lr = 0.02 / i;
            CHECK_OK(tch_optimizer_set_lr(t.optimizer, 2, t.configs[2].lr));
        }
        trial_step(&t);
    }
    trial_check(&t, 2.0 * tolerance_of(m->kind, TCH_FLOAT64));
    CHECK(tch_optimizer_group_count(t.optimizer) == 3, "%d groups", tch_optimizer_group_count(t.optimizer));
    CHECK(tch_optimizer_parameter_count(t.optimizer) == m->count, "%d", tch_optimizer_parameter_count(t.optimizer));
    CHECK_OK(tch_optimizer_get_config(t.optimizer, 0, &now));
    CHECK(now.lr == first.lr && now.beta2 == first.beta2 && now.eps == first.eps, "the numbers are not kept");
    trial_close(&t);
}

static void groups_and_changing_numbers(void **state)
{
    for (size_t i = 0; i < TEST_COUNT(methods); i++) {
        test_case("%s, groups whose numbers change", tch_optim_kind_name(methods[i].kind));
        check_groups(*state, &methods[i]);
    }
}

/* A gradient of zeros has no direction, and nothing moves; nor is a row of zeros in a gradient a division by 0, where
 * NorMuon has no eps. */
static void check_zeros(tch_context *context, const method *m, bool rows)
{
    trial t;
    tch_optim_config c = base(m->kind);
    c.weight_decay = c.scalar_weight_decay = 0.0;
    c.eps = m->kind == TCH_OPTIM_NORMUON ? 0.0 : c.eps;
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, m->count, m->shapes);
    for (int i = 0; i < STEPS; i++) {
        trial_draw(&t);
        for (int32_t k = 0; k < t.count; k++) {
            const trial_parameter *p = &t.parameters[k];
            bool has_rows = p->shape.ndim == 2 && p->shape.shape[0] > 1;
            trial_erase(&t, k, !rows ? p->memory->count : has_rows ? p->shape.shape[1] : 0);
        }
        CHECK_OK(trial_step_library(&t));
        trial_step_references(&t);
    }
    for (int32_t k = 0; k < t.count && !rows; k++) {
        test_tensor_check_unchanged(t.parameters[k].memory, "a parameter");
    }
    if (rows) {
        trial_check(&t, tolerance_of(m->kind, TCH_FLOAT64));
    }
    trial_close(&t);
}

static void zero_gradients(void **state)
{
    for (size_t i = 0; i < 2 * TEST_COUNT(methods); i++) {
        test_case("%s, %s of zeros", tch_optim_kind_name(methods[i / 2].kind), i % 2 ? "a row" : "gradients");
        check_zeros(*state, &methods[i / 2], i % 2);
    }
}

/* However small a gradient is, Lion's step has the length lr. */
static void steps_of_lion_have_one_length(void **state)
{
    enum { COUNT = 5 };
    static const double gradients[COUNT] = {1e-30, -1e-30, 1e30, -1e30, 0.0};
    static const trial_shape shape = {.ndim = 1, .shape = {COUNT}};
    trial t;
    tch_optim_config c = base(TCH_OPTIM_LION);
    c.lr = 0x1p-6;
    test_case("tiny and huge gradients");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 1, &shape);
    test_tensor_write(t.parameters[0].memory, (const double[COUNT]){1.0, 1.0, 1.0, 1.0, 1.0});
    test_tensor_write(t.parameters[0].gradient_memory, gradients);
    CHECK_OK(trial_step_library(&t));
    double *got = test_tensor_read(t.parameters[0].memory);
    for (int i = 0; i < COUNT; i++) {
        double expected = 1.0 - 0x1p-6 * ((gradients[i] > 0) - (gradients[i] < 0));
        CHECK(got[i] == expected, "from gradient %g: %.9g, expected %.9g", gradients[i], got[i], expected);
    }
    trial_close(&t);
}

/* The numbers move to other memory in the middle, as after a resize of a caller's arena; the old memory stays as it
 * is. */
static void parameters_move(void **state)
{
    trial t;
    tch_optim_config config = base(TCH_OPTIM_ADAMW);
    test_case("tch_optimizer_set_parameter");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &config, 4, elementwise_shapes);
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
    trial_check(&t, 2.0 * tolerance_of(TCH_OPTIM_ADAMW, TCH_FLOAT32));
    test_tensor_check_unchanged(old, "the old memory");
    trial_close(&t);
}

/* One moment beside Lion's clock; of NorMuon a number for every row of the tensor, however it lies. */
static void state_has_its_names(void **state)
{
    static const struct {
        tch_optim_kind kind;
        const char *names[3];
    } cases[] = {{TCH_OPTIM_LION, {"step", "exp_avg"}},
                 {TCH_OPTIM_NORMUON, {"step", "momentum_buffer", "exp_avg_sq.0"}}};
    static const int64_t rows[] = {12, 31, 7, 7, 31};
    enum { COUNT = 5 };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t;
        tch_optim_config c = base(cases[i].kind);
        test_case("names of the state of %s", tch_optim_kind_name(cases[i].kind));
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, COUNT, matrix_shapes);
        int32_t each = 2 + (cases[i].names[2] != NULL);
        CHECK(tch_optimizer_state_count(t.optimizer) == each * COUNT, "%d", tch_optimizer_state_count(t.optimizer));
        for (int32_t k = 0; k < each * COUNT; k++) {
            char name[64];
            snprintf(name, sizeof name, "parameter%d/%s", k / each, cases[i].names[k % each]);
            const tch_tensor *tensor = trial_state(&t, name);
            CHECK(k % each != 2 || (tensor->ndim == 2 && tensor->shape[0] == rows[k / each] && tensor->shape[1] == 1),
                  "%s has %lld rows, expected %lld", name, (long long)tensor->shape[0], (long long)rows[k / each]);
        }
        trial_close(&t);
    }
}

static void names_and_defaults(void **state)
{
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
}

/* PyTorch's, and those of the papers. */
static void defaults(void **state)
{
    static const struct {
        tch_optim_kind kind;
        trial_setting expected[14];
    } cases[] = {
        {TCH_OPTIM_ADAMW,
         {SET(lr, 1e-3), SET(beta1, 0.9), SET(beta2, 0.999), SET(eps, 1e-8), SET(weight_decay, 1e-2),
          SET(decay, TCH_DECAY_DECOUPLED), SET(amsgrad, 0)}},
        {TCH_OPTIM_SGD, {SET(lr, 1e-3), SET(momentum, 0.0), SET(dampening, 0.0), SET(weight_decay, 0.0)}},
        {TCH_OPTIM_LION, {SET(lr, 1e-4), SET(beta1, 0.9), SET(beta2, 0.99), SET(weight_decay, 0.0)}},
        {TCH_OPTIM_MUON,
         {SET(lr, 1e-3), SET(momentum, 0.95), SET(nesterov, 1), SET(weight_decay, 0.1), SET(eps, 1e-7),
          SET(muon_steps, 0), SET(muon_lr, TCH_MUON_LR_ORIGINAL), SET(muon_method, TCH_ORTHO_MINIMAX)}},
        {TCH_OPTIM_NORMUON,
         {SET(lr, 1e-3), SET(weight_decay, 0.1), SET(momentum, 0.95), SET(beta2, 0.95), SET(nesterov, 1),
          SET(eps, 1e-8), SET(muon_lr, TCH_MUON_LR_MATCH_RMS_ADAMW), SET(muon_method, TCH_ORTHO_MINIMAX)}},
        {TCH_OPTIM_SHAMPOO,
         {SET(lr, 1e-3), SET(eps, 1e-12), SET(precondition_frequency, 100), SET(refresh_drift, 10.0),
          SET(relative_eps, 1e-6), SET(grafting_beta2, 0.999), SET(grafting_eps, 1e-8), SET(beta1, 0.9),
          SET(beta2, 0.95), SET(max_preconditioner_dim, 1024), SET(start_preconditioning_step, -1),
          SET(bias_correction, 1), SET(stagger, 1), SET(merge_dims, 1)}},
        {TCH_OPTIM_SHAMPOO, {SET(weight_decay, 0.0), SET(grafting, TCH_GRAFTING_ADAM)}},
        {TCH_OPTIM_SOAP,
         {SET(lr, 3e-3), SET(beta1, 0.95), SET(beta2, 0.95), SET(shampoo_beta, -1.0), SET(eps, 1e-8),
          SET(weight_decay, 0.01), SET(precondition_frequency, 100), SET(refresh_drift, 2.5),
          SET(max_preconditioner_dim, 10000), SET(merge_dims, 0), SET(precondition_1d, 0), SET(normalize_grads, 0),
          SET(bias_correction, 1)}},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        const tch_optim_config c = tch_optim_defaults(cases[i].kind);
        for (int k = 0; k < 14 && cases[i].expected[k].field.name != NULL; k++) {
            const trial_setting *s = &cases[i].expected[k];
            double got = test_field_get(&c, &s->field);
            CHECK(got == s->value, "%s of %s is %g, expected %g", s->field.name, tch_optim_kind_name(c.kind), got,
                  s->value);
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_defaults), cmocka_unit_test(defaults),
        cmocka_unit_test(every_option),       cmocka_unit_test(groups_and_changing_numbers),
        cmocka_unit_test(zero_gradients),     cmocka_unit_test(steps_of_lion_have_one_length),
        cmocka_unit_test(parameters_move),    cmocka_unit_test(state_has_its_names),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

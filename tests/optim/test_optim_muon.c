/* Muon against the plain reference: every option alone and together, in float64 everywhere and in float32 on the CPU,
 * where the steps of the orthogonalization are exact to rounding times their growth. A GPU does them in bfloat16 for
 * float32 parameters: there a direction is compared as a whole, and its singular values lie where the reference's
 * do. */
#include <math.h>

#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 22
#define EXACT 1e-11
#define EXACT_F32 1e-4
/* The same iteration with every product rounded to bfloat16, measured for these shapes and options: 0.0005 to 0.02 of
 * the way, most for the smallest matrix. */
#define BFLOAT16 0.05

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {12, 12}},
    {.ndim = 2, .shape = {31, 7}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {5, 40}},
    {.ndim = 2, .shape = {2, 2}},
    {.ndim = 2, .shape = {64, 33}},
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
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config base(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    return c;
}

static const trial_option options[] = {
    {.name = "defaults"},
    {"Muon's polynomial", {SET(muon_method, TCH_ORTHO_MUON)}},
    {"own polynomial",
     {SET(muon_method, TCH_ORTHO_MUON), SET(muon_coefficients[0], 2.0), SET(muon_coefficients[1], -1.5),
      SET(muon_coefficients[2], 0.5), SET(muon_steps, 7)}},
    {"Polar Express", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS)}},
    {"eight steps of it", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS), SET(muon_steps, 8)}},
    {"short steps after the long ones", {SET(muon_steps, 5)}},
    {"one step", {SET(muon_steps, 1)}},
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

static void every_option_in_float64(void **state)
{
    const tch_optim_config c = base(TCH_OPTIM_MUON);
    trial_run_options(*state, TCH_FLOAT64, &c, options, SHAPES, shapes, STEPS, EXACT);
}

static void every_option_in_float32(void **state)
{
    const tch_optim_config c = base(TCH_OPTIM_MUON);
    trial_run_options(*state, TCH_FLOAT32, &c, options, SHAPES, shapes, STEPS, test_on_cpu() ? EXACT_F32 : BFLOAT16);
}

/* Sides that are powers of two times a few: a GPU has kernels for parameters whose elements it can divide evenly. */
static void even_shapes(void **state)
{
    static const trial_shape even[] = {
        {.ndim = 2, .shape = {64, 64}},
        {.ndim = 2, .shape = {128, 64}},
        {.ndim = 2, .shape = {64, 128}},
        {.ndim = 2, .shape = {192, 32}},
    };
    static const char *const some[] = {"defaults", "no nesterov", "much at once"};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        tch_optim_config c = base(TCH_OPTIM_MUON);
        trial_set_option(&c, options, some[i]);
        test_case("%s, float32, even shapes", some[i]);
        trial_run(*state, TCH_FLOAT32, &c, 4, even, STEPS / 4, test_on_cpu() ? EXACT_F32 : BFLOAT16);
    }
}

/* The step length follows from the tensor's own shape, and so do NorMuon's rows and their moments: the same numbers
 * stored by columns take the same step. */
static void check_by_columns(tch_context *context, tch_optim_kind kind, tch_muon_lr rule)
{
    enum { ROWS = 31, COLS = 7 };
    static const trial_shape by_rows = {.ndim = 2, .shape = {ROWS, COLS}};
    trial t;
    tch_optim_config c = base(kind);
    c.muon_lr = rule;
    test_case("%s by columns, lr rule %d", tch_optim_kind_name(kind), rule);
    trial_open(&t, context, TCH_FLOAT64, TCH_FLOAT64, &c, 1, &by_rows);
    int64_t sizes[] = {ROWS, COLS};
    int64_t strides[] = {1, ROWS};
    test_tensor *columns = test_tensor_make(context, TCH_FLOAT64, 2, (int64_t[]){COLS, ROWS}, LAYOUT_CONTIGUOUS);
    double turned[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) {
        turned[i] = t.parameters[0].reference->values[i % ROWS * COLS + i / ROWS];
    }
    test_tensor_write(columns, turned);
    tch_tensor view = columns->tensor;
    view.shape = sizes;
    view.strides = strides;
    tch_parameter entry = {.tensor = &view};
    tch_optimizer *other = NULL;
    CHECK_OK(tch_optimizer_create(context, &c, 1, &entry, &other));
    for (int i = 0; i < STEPS; i++) {
        const tch_tensor *gradient = &t.parameters[0].gradient;
        trial_step(&t);
        CHECK_OK(tch_optimizer_step(other, 1, &gradient));
    }
    trial_check(&t, EXACT);
    double *got = test_tensor_read(columns);
    for (int i = 0; i < ROWS * COLS; i++) {
        double expected = t.parameters[0].reference->values[i % ROWS * COLS + i / ROWS];
        CHECK(fabs(got[i] - expected) < 1e-9, "element %d is %.12g, expected %.12g", i, got[i], expected);
    }
    tch_optimizer_destroy(other);
    trial_close(&t);
}

static void a_transposed_layout_changes_nothing(void **state)
{
    for (int rule = TCH_MUON_LR_ORIGINAL; rule <= TCH_MUON_LR_PLAIN; rule++) {
        check_by_columns(*state, TCH_OPTIM_MUON, (tch_muon_lr)rule);
        check_by_columns(*state, TCH_OPTIM_NORMUON, (tch_muon_lr)rule);
    }
}

/* Many matrices of one shape are one batch, whatever lies between them in the list. */
static void equal_shapes_are_a_batch(void **state)
{
    trial_shape many[20];
    for (int i = 0; i < 20; i++) {
        many[i] = shapes[i % 4];
    }
    tch_optim_config c = base(TCH_OPTIM_MUON);
    test_case("twenty parameters of four shapes");
    trial_run(*state, TCH_FLOAT64, &c, 20, many, STEPS, EXACT);
}

static void groups_and_changing_numbers(void **state)
{
    static const trial_setting first[] = {SET(momentum, 0.8), {{0}, 0}};
    static const trial_setting second[] = {
        SET(weight_decay, 0.1), SET(scalar_lr, 0.01), SET(scalar_weight_decay, 0.2), SET(scalar_beta1, 0.5), {{0}, 0}};
    trial_groups groups = {base(TCH_OPTIM_MUON), base(TCH_OPTIM_MUON), 6, first, second};
    trial_set_option(&groups.second, options, "much at once");
    trial_run_groups(*state, &groups, SHAPES, shapes, STEPS, EXACT);
}

/* eps bounds the norm from below: with a gradient far under it the direction shrinks with the gradient, and a zero
 * gradient gives a zero direction. */
static void small_and_zero_gradients(void **state)
{
    for (int zero = 0; zero < 2; zero++) {
        trial t;
        tch_optim_config c = base(TCH_OPTIM_MUON);
        const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
        c.eps = 100.0;
        c.muon_steps = 2;
        c.muon_method = TCH_ORTHO_MUON;
        c.weight_decay = 0.0;
        test_case(zero ? "zero gradients" : "a large eps");
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 5, shapes);
        trial_list_gradients(&t, gradients);
        for (int i = 0; i < STEPS; i++) {
            trial_draw(&t);
            for (int32_t k = 0; k < t.count && zero; k++) {
                trial_erase(&t, k, t.parameters[k].memory->count);
            }
            CHECK_OK(tch_optimizer_step(t.optimizer, t.count, gradients));
            trial_step_references(&t);
        }
        for (int32_t k = 0; k < t.count && zero; k++) {
            test_tensor_check_unchanged(t.parameters[k].memory, "a parameter");
        }
        if (!zero) {
            trial_check(&t, EXACT);
        }
        trial_close(&t);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_in_float64),
        cmocka_unit_test(every_option_in_float32),
        cmocka_unit_test(even_shapes),
        cmocka_unit_test(a_transposed_layout_changes_nothing),
        cmocka_unit_test(equal_shapes_are_a_batch),
        cmocka_unit_test(groups_and_changing_numbers),
        cmocka_unit_test(small_and_zero_gradients),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

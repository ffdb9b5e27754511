/* Muon against the plain reference: every option alone and together, in float64 everywhere and in float32 on the CPU,
 * where the steps of the orthogonalization are exact to rounding times their growth. A GPU does them in bfloat16 for
 * float32 parameters: there a direction is compared as a whole, and its singular values lie where the reference's
 * do. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

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

static tch_optim_config base(void)
{
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_MUON);
    c.lr = 0.02;
    return c;
}

typedef struct option {
    const char *name;
    void (*set)(tch_optim_config *config);
} option;

static void as_it_is(tch_optim_config *c)
{
    (void)c;
}

static void muons_polynomial(tch_optim_config *c)
{
    c->muon_method = TCH_ORTHO_MUON;
}

static void own_polynomial(tch_optim_config *c)
{
    c->muon_method = TCH_ORTHO_MUON;
    c->muon_coefficients[0] = 2.0;
    c->muon_coefficients[1] = -1.5;
    c->muon_coefficients[2] = 0.5;
    c->muon_steps = 7;
}

static void polar_express(tch_optim_config *c)
{
    c->muon_method = TCH_ORTHO_POLAR_EXPRESS;
}

static void eight_polar_steps(tch_optim_config *c)
{
    c->muon_method = TCH_ORTHO_POLAR_EXPRESS;
    c->muon_steps = 8;
}

static void long_steps_and_short(tch_optim_config *c)
{
    c->muon_steps = 5;
}

static void one_step(tch_optim_config *c)
{
    c->muon_steps = 1;
}

static void no_nesterov(tch_optim_config *c)
{
    c->nesterov = 0;
}

static void other_momentum(tch_optim_config *c)
{
    c->momentum = 0.5;
}

static void no_momentum(tch_optim_config *c)
{
    c->momentum = 0.0;
}

static void no_decay(tch_optim_config *c)
{
    c->weight_decay = 0.0;
}

static void match_rms(tch_optim_config *c)
{
    c->muon_lr = TCH_MUON_LR_MATCH_RMS_ADAMW;
}

static void plain_lr(tch_optim_config *c)
{
    c->muon_lr = TCH_MUON_LR_PLAIN;
}

static void maximize(tch_optim_config *c)
{
    c->maximize = 1;
}

static void other_scalars(tch_optim_config *c)
{
    c->scalar_lr = 0.003;
    c->scalar_beta1 = 0.7;
    c->scalar_beta2 = 0.8;
    c->scalar_eps = 0.1;
    c->scalar_weight_decay = 0.0;
}

static void much_at_once(tch_optim_config *c)
{
    muons_polynomial(c);
    match_rms(c);
    no_nesterov(c);
    maximize(c);
    other_scalars(c);
    c->weight_decay = 0.4;
}

static const option options[] = {
    {"defaults", as_it_is},
    {"Muon's polynomial", muons_polynomial},
    {"own polynomial", own_polynomial},
    {"Polar Express", polar_express},
    {"eight steps of it", eight_polar_steps},
    {"short steps after the long ones", long_steps_and_short},
    {"one step", one_step},
    {"no nesterov", no_nesterov},
    {"other momentum", other_momentum},
    {"no momentum", no_momentum},
    {"no decay", no_decay},
    {"match_rms_adamw", match_rms},
    {"plain lr", plain_lr},
    {"maximize", maximize},
    {"other numbers for scalars", other_scalars},
    {"much at once", much_at_once},
};
#define OPTIONS (sizeof options / sizeof *options)

static void every_option_in_float64(void **state)
{
    for (size_t i = 0; i < OPTIONS; i++) {
        tch_optim_config c = base();
        options[i].set(&c);
        test_case("%s, float64", options[i].name);
        trial_run(*state, TCH_FLOAT64, &c, SHAPES, shapes, STEPS, EXACT);
    }
}

static void every_option_in_float32(void **state)
{
    for (size_t i = 0; i < OPTIONS; i++) {
        tch_optim_config c = base();
        options[i].set(&c);
        test_case("%s, float32", options[i].name);
        trial_run(*state, TCH_FLOAT32, &c, SHAPES, shapes, STEPS, test_on_cpu() ? EXACT_F32 : BFLOAT16);
    }
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
    static const option some[] = {{"defaults", as_it_is}, {"no nesterov", no_nesterov}, {"much at once", much_at_once}};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        tch_optim_config c = base();
        some[i].set(&c);
        test_case("%s, float32, even shapes", some[i].name);
        trial_run(*state, TCH_FLOAT32, &c, 4, even, STEPS / 4, test_on_cpu() ? EXACT_F32 : BFLOAT16);
    }
}

/* The step length follows from the tensor's own shape: the same numbers stored by columns take the same step. */
static void a_transposed_layout_changes_nothing(void **state)
{
    static const trial_shape by_rows = {.ndim = 2, .shape = {31, 7}};
    for (int kind = TCH_MUON_LR_ORIGINAL; kind <= TCH_MUON_LR_PLAIN; kind++) {
        trial t;
        tch_optim_config c = base();
        c.muon_lr = (tch_muon_lr)kind;
        test_case("by columns, lr rule %d", kind);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, &by_rows);
        int64_t sizes[] = {31, 7};
        int64_t strides[] = {1, 31};
        test_tensor *columns = test_tensor_make(*state, TCH_FLOAT64, 2, (int64_t[]){7, 31}, LAYOUT_CONTIGUOUS);
        double turned[7 * 31];
        for (int i = 0; i < 7 * 31; i++) {
            turned[i] = t.parameters[0].reference->values[i % 31 * 7 + i / 31];
        }
        test_tensor_write(columns, turned);
        tch_tensor view = columns->tensor;
        view.shape = sizes;
        view.strides = strides;
        tch_parameter entry = {&view, NULL, 0};
        tch_optimizer *other = NULL;
        CHECK_OK(tch_optimizer_create(*state, &c, 1, &entry, &other));
        for (int i = 0; i < STEPS; i++) {
            const tch_tensor *gradient = &t.parameters[0].gradient;
            trial_step(&t);
            CHECK_OK(tch_optimizer_step(other, 1, &gradient));
        }
        trial_check(&t, EXACT);
        double *got = test_tensor_read(columns);
        for (int i = 0; i < 7 * 31; i++) {
            double expected = t.parameters[0].reference->values[i % 31 * 7 + i / 31];
            CHECK(fabs(got[i] - expected) < 1e-9, "element %d is %.12g, expected %.12g", i, got[i], expected);
        }
        free(got);
        tch_optimizer_destroy(other);
        test_tensor_free(columns);
        trial_close(&t);
    }
}

/* Many matrices of one shape are one batch, whatever lies between them in the list. */
static void equal_shapes_are_a_batch(void **state)
{
    trial_shape many[20];
    for (int i = 0; i < 20; i++) {
        many[i] = shapes[i % 4];
    }
    tch_optim_config c = base();
    test_case("twenty parameters of four shapes");
    trial_run(*state, TCH_FLOAT64, &c, 20, many, STEPS, EXACT);
}

static void groups_and_changing_numbers(void **state)
{
    trial t;
    tch_optim_config first = base();
    tch_optim_config second = base();
    test_case("two groups whose numbers change");
    much_at_once(&second);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &first, 6, shapes);
    trial_add_group(&t, &second, SHAPES - 6, shapes + 6);
    for (int i = 0; i < STEPS; i++) {
        if (i % 7 == 5) {
            first.lr *= 0.5;
            first.momentum = 0.8;
            second.weight_decay = 0.1;
            second.scalar_lr = 0.01;
            second.scalar_weight_decay = 0.2;
            second.scalar_beta1 = 0.5;
            trial_set_config(&t, 0, &first);
            trial_set_config(&t, 1, &second);
        }
        trial_step(&t);
    }
    trial_check(&t, EXACT);
    trial_close(&t);
}

/* eps bounds the norm from below: with a gradient far under it the direction shrinks with the gradient, and a zero
 * gradient gives a zero direction. */
static void small_and_zero_gradients(void **state)
{
    for (int zero = 0; zero < 2; zero++) {
        trial t;
        tch_optim_config c = base();
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
                memset(t.parameters[k].drawn, 0, (size_t)t.parameters[k].memory->count * sizeof(double));
                test_tensor_write(t.parameters[k].gradient_memory, t.parameters[k].drawn);
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

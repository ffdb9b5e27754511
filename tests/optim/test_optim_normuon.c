/* NorMuon against the plain reference: every option alone and together, in float64 everywhere and in float32 on the
 * CPU. As in the tests of Muon a GPU orthogonalizes float32 matrices in bfloat16, and a direction is compared as a
 * whole there. Second moments of rows add nothing to that: they are means of squares, and their roots halve an
 * error. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "support/messages.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 22
#define EXACT 1e-11
#define EXACT_F32 1e-4
#define BFLOAT16 0.05 /* see test_optim_muon.c */

/* Wide and tall ones share classes; by columns, rows of the tensor lie along the columns of memory. */
static const trial_shape shapes[] = {
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
    {.ndim = 5, .shape = {3, 1, 3, 2, 3}},
    {.ndim = 2, .shape = {1, 17}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config base(void)
{
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_NORMUON);
    c.lr = 0.02;
    return c;
}

static const trial_option options[] = {
    {.name = "defaults"},
    {"other beta2", {SET(beta2, 0.5)}},
    {"no memory of rows", {SET(beta2, 0.0)}}, /* every row by its own length of this step */
    {"a large eps", {SET(eps, 0.3)}},         /* as large as the roots it stands beside */
    {"no eps", {SET(eps, 0.0)}},
    {"Muon's polynomial", {SET(muon_method, TCH_ORTHO_MUON)}},
    {"eight steps of Polar Express", {SET(muon_method, TCH_ORTHO_POLAR_EXPRESS), SET(muon_steps, 8)}},
    {"no nesterov", {SET(nesterov, 0)}},
    {"other momentum", {SET(momentum, 0.5)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"original lr", {SET(muon_lr, TCH_MUON_LR_ORIGINAL)}},
    {"plain lr", {SET(muon_lr, TCH_MUON_LR_PLAIN)}},
    {"maximize", {SET(maximize, 1)}},
    {"other numbers for scalars",
     {SET(scalar_lr, 0.003), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0)}},
    {"much at once",
     {SET(muon_method, TCH_ORTHO_MUON), SET(muon_lr, TCH_MUON_LR_ORIGINAL), SET(nesterov, 0), SET(maximize, 1),
      SET(scalar_lr, 0.003), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0), SET(beta2, 0.5), SET(weight_decay, 0.4)}},
    {.name = NULL},
};

static void every_option_in_float64(void **state)
{
    const tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT64, &c, options, SHAPES, shapes, STEPS, EXACT);
}

static void every_option_in_float32(void **state)
{
    const tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT32, &c, options, SHAPES, shapes, STEPS, test_on_cpu() ? EXACT_F32 : BFLOAT16);
}

/* Sides that are powers of two times a few: a GPU has kernels for parameters whose elements it can divide evenly. */
static void even_shapes(void **state)
{
    static const trial_shape even[] = {
        {.ndim = 2, .shape = {64, 64}},
        {.ndim = 2, .shape = {128, 64}},
        {.ndim = 2, .shape = {64, 128}},
        {.ndim = 2, .shape = {192, 32}, .order = {1, 0}},
    };
    static const char *const some[] = {"defaults", "much at once"};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        tch_optim_config c = base();
        trial_set_option(&c, options, some[i]);
        test_case("%s, float32, even shapes", some[i]);
        trial_run(*state, TCH_FLOAT32, &c, 4, even, STEPS / 4, test_on_cpu() ? EXACT_F32 : BFLOAT16);
    }
}

/* Many matrices of one shape, and its transpose, are one batch. */
static void equal_shapes_are_a_batch(void **state)
{
    trial_shape many[20];
    for (int i = 0; i < 20; i++) {
        many[i] = shapes[1 + i % 4];
    }
    tch_optim_config c = base();
    test_case("twenty parameters of four layouts");
    trial_run(*state, TCH_FLOAT64, &c, 20, many, STEPS, EXACT);
}

static void groups_and_changing_numbers(void **state)
{
    static const trial_setting first[] = {SET(momentum, 0.8), SET(beta2, 0.9), SET(eps, 1e-3), {{0}, 0}};
    static const trial_setting second[] = {SET(weight_decay, 0.1), SET(beta2, 0.7), SET(scalar_lr, 0.01), {{0}, 0}};
    trial_groups groups = {base(), base(), 6, first, second};
    trial_set_option(&groups.second, options, "much at once");
    trial_run_groups(*state, &groups, SHAPES, shapes, STEPS, EXACT);
}

/* The paper's scaling: a step without decay has a root mean square of 0.2 lr, whatever the shape. */
static void steps_have_the_papers_length(void **state)
{
    trial t;
    tch_optim_config c = base();
    c.weight_decay = 0.0;
    test_case("the length of a step");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 12, shapes);
    double *before[12];
    for (int32_t k = 0; k < 12; k++) {
        before[k] = test_tensor_read(t.parameters[k].memory);
    }
    trial_step(&t);
    for (int32_t k = 0; k < 12; k++) {
        double *after = test_tensor_read(t.parameters[k].memory);
        double sum = 0.0;
        int64_t count = t.parameters[k].memory->count;
        for (int64_t i = 0; i < count; i++) {
            sum += (after[i] - before[k][i]) * (after[i] - before[k][i]);
        }
        double rms = sqrt(sum / (double)count);
        CHECK(fabs(rms - 0.2 * c.lr) < 1e-12, "parameter %d moves by %.15g, expected %.15g", k, rms, 0.2 * c.lr);
    }
    trial_close(&t);
}

/* A zero gradient has no direction; with eps = 0 its rows are 0 / 0, and still nothing moves. One row of zeros in a
 * gradient leaves the matrix finite. */
static void zero_gradients(void **state)
{
    for (int rows = 0; rows < 2; rows++) {
        trial t;
        const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
        tch_optim_config c = base();
        c.weight_decay = 0.0;
        c.eps = 0.0;
        test_case(rows ? "a row of zeros" : "zero gradients");
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, 8, shapes);
        trial_list_gradients(&t, gradients);
        for (int i = 0; i < STEPS; i++) {
            trial_draw(&t);
            for (int32_t k = 0; k < t.count; k++) {
                trial_erase(&t, k, rows ? t.parameters[k].shape.shape[1] : t.parameters[k].memory->count);
            }
            CHECK_OK(tch_optimizer_step(t.optimizer, t.count, gradients));
        }
        for (int32_t k = 0; k < t.count; k++) {
            double *got = test_tensor_read(t.parameters[k].memory);
            for (int64_t i = 0; i < t.parameters[k].memory->count; i++) {
                CHECK(isfinite(got[i]), "element %lld of parameter %d is %g", (long long)i, k, got[i]);
            }
            if (!rows) {
                test_tensor_check_unchanged(t.parameters[k].memory, "a parameter");
            }
        }
        trial_close(&t);
    }
}

/* --- state ------------------------------------------------------------------------------------------------------- */

/* A number for every row of the tensor, however it lies. */
static void state_has_its_names(void **state)
{
    static const int64_t rows[] = {12, 31, 7, 7, 31};
    enum { COUNT = 5 };
    trial t;
    tch_optim_config c = base();
    int found = 0;
    test_case("names of the state");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, COUNT, shapes);
    for (int32_t i = 0; i < tch_optimizer_state_count(t.optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t.optimizer, i, &s));
        const char *what = strchr(s.name, '/');
        CHECK(what != NULL, "%s has no parameter", s.name);
        bool known = strcmp(what, "/step") == 0 || strcmp(what, "/momentum_buffer") == 0;
        bool of_rows = strcmp(what, "/exp_avg_sq.0") == 0;
        CHECK(known || of_rows, "%s is not expected", s.name);
        if (of_rows) {
            CHECK(s.tensor->ndim == 2 && s.tensor->shape[0] == rows[s.parameter] && s.tensor->shape[1] == 1,
                  "%s has %lld rows, expected %lld", s.name, (long long)s.tensor->shape[0],
                  (long long)rows[s.parameter]);
            found++;
        }
    }
    CHECK(found == COUNT, "%d parameters have moments of their rows", found);
    trial_close(&t);
}

static void the_papers_defaults(void **state)
{
    (void)state;
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_NORMUON);
    test_case("defaults");
    CHECK(c.lr == 1e-3 && c.weight_decay == 0.1 && c.momentum == 0.95 && c.beta2 == 0.95 && c.nesterov, "NorMuon");
    CHECK(c.eps == 1e-8 && c.muon_lr == TCH_MUON_LR_MATCH_RMS_ADAMW && c.muon_method == TCH_ORTHO_MINIMAX, "NorMuon");
}

static void numbers_out_of_range(void **state)
{
    static const struct {
        const char *name;
        size_t offset;
        double bad[4];
    } cases[] = {
        {"beta2", offsetof(tch_optim_config, beta2), {-0.1, 1.0, 1.5, NAN}},
        {"momentum", offsetof(tch_optim_config, momentum), {-0.1, 1.0, 1.5, NAN}},
        {"eps", offsetof(tch_optim_config, eps), {-1e-8, -1.0, INFINITY, NAN}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int k = 0; k < 4; k++) {
            tch_optim_config c = base();
            tch_optimizer *optimizer = NULL;
            memcpy((char *)&c + cases[i].offset, &cases[i].bad[k], sizeof(double));
            test_case("%s = %g", cases[i].name, cases[i].bad[k]);
            test_check_refused(tch_optimizer_create(*state, &c, 0, NULL, &optimizer), TCH_ERR_INVALID_ARGUMENT,
                               cases[i].name);
            CHECK(optimizer == NULL, "an optimizer was returned");
        }
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_papers_defaults),          cmocka_unit_test(every_option_in_float64),
        cmocka_unit_test(every_option_in_float32),      cmocka_unit_test(even_shapes),
        cmocka_unit_test(equal_shapes_are_a_batch),     cmocka_unit_test(groups_and_changing_numbers),
        cmocka_unit_test(steps_have_the_papers_length), cmocka_unit_test(zero_gradients),
        cmocka_unit_test(state_has_its_names),          cmocka_unit_test(numbers_out_of_range),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* Shampoo against the plain reference: every option alone and in the combinations people use, over parameters that are
 * cut, merged, dropped and laid out in every way; and the schedule of staggered refreshes by what it promises.
 *
 * Tolerances are shares of the way a parameter has gone. In float64 with the eigen method a root is exact to about
 * u / (root d), d being the relative damping, and its smallest direction is cond^(1/root) times weaker than its norm:
 * 1e-11 leaves room. In float32 the same is 1.5e-5 times 5.6. What the default tolerance of a root and the rounded
 * products of TCH_PRECISION_HIGH cost is bounded by their own promises. */
#include <math.h>
#include <string.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 22
#define EXACT 1e-11      /* float64, eigen */
#define EXACT_F32 1e-4   /* float32, eigen, products in float32 */
#define ROUNDED_F32 5e-3 /* the same with products of TCH_PRECISION_HIGH, which a GPU rounds to 11 bits */

/* Blocks of 8: ragged, exact, tall, wide; what becomes a vector; ranks 3 to 5 with sizes of 1 between; columns first;
 * channels last; and what is left to AdamW. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {20, 13}},
    {.ndim = 2, .shape = {16, 8}},
    {.ndim = 2, .shape = {21, 3}, .gradient = LAYOUT_STEPPED},
    {.ndim = 2, .shape = {3, 21}},
    {.ndim = 2, .shape = {1, 17}},
    {.ndim = 3, .shape = {4, 3, 5}, .gradient = LAYOUT_REVERSED},
    {.ndim = 3, .shape = {5, 1, 11}},
    {.ndim = 4, .shape = {6, 3, 2, 2}},
    {.ndim = 4, .shape = {9, 2, 2, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 5, .shape = {3, 2, 3, 2, 3}},
    {.ndim = 5, .shape = {4, 5, 2, 3, 4}},
    {.ndim = 2, .shape = {7, 12}, .order = {1, 0}},
    {.ndim = 2, .shape = {7, 12}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config base(void)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    c.lr = 0.05;
    c.eps = 1e-8;
    c.relative_eps = 1e-3;
    c.max_preconditioner_dim = 8;
    c.precondition_frequency = 1;
    c.stagger = 0;
    c.root_method = TCH_ROOT_EIGEN;
    c.precision = TCH_PRECISION_HIGHEST;
    return c;
}

static const trial_option options[] = {
    {.name = "sums"},
    {"packed", {SET(packed_factors, 1)}},
    {"averaged factors", {SET(beta2, 0.95), SET(bias_correction, 0)}},
    {"corrected factors", {SET(beta2, 0.95), SET(bias_correction, 1)}},
    {"no filter", {SET(beta1, 0.0)}},
    {"uncorrected filter", {SET(bias_correction, 0)}},
    {"absolute damping", {SET(relative_eps, 0.0), SET(eps, 0.05)}},
    {"decoupled decay", {SET(weight_decay, 0.2)}},
    {"l2", {SET(weight_decay, 0.2), SET(decay, TCH_DECAY_L2)}},
    {"maximize", {SET(maximize, 1)}},
    {"momentum", {SET(momentum, 0.8)}},
    {"nesterov", {SET(momentum, 0.8), SET(nesterov, 1)}},
    {"no merging", {SET(merge_dims, 0)}},
    {"vectors too", {SET(precondition_1d, 1)}},
    {"blocks of 3", {SET(max_preconditioner_dim, 3)}},
    {"whole matrices", {SET(max_preconditioner_dim, 1024)}},
    {"staggered at every step", {SET(stagger, 1)}},
    {"every third step", {SET(precondition_frequency, 3)}},
    {"from the fifth step, every fourth", {SET(start_preconditioning_step, 5), SET(precondition_frequency, 4)}},
    {"other numbers for scalars",
     {SET(scalar_lr, 0.01), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.5), SET(weight_decay, 0.1)}},
    /* What people run: Adam's step lengths, moving averages, decay beside the step, momentum after it. */
    {"as in practice",
     {SET(beta2, 0.95), SET(bias_correction, 1), SET(weight_decay, 0.2), SET(momentum, 0.8),
      SET(grafting, TCH_GRAFTING_ADAM), SET(start_preconditioning_step, 3), SET(precondition_frequency, 5)}},
    {"as in the paper",
     {SET(beta1, 0.0), SET(momentum, 0.8), SET(relative_eps, 0.0), SET(eps, 0.05),
      SET(grafting, TCH_GRAFTING_ADAGRAD)}},
    {"much at once",
     {SET(beta2, 0.95), SET(bias_correction, 0), SET(weight_decay, 0.2), SET(decay, TCH_DECAY_L2), SET(momentum, 0.8),
      SET(nesterov, 1), SET(maximize, 1), SET(merge_dims, 0), SET(precondition_1d, 1),
      SET(grafting, TCH_GRAFTING_RMSPROP), SET(grafting_beta2, 0.9), SET(grafting_eps, 1e-3),
      SET(precondition_frequency, 2)}},
    {.name = NULL},
};

static void every_option_in_float64(void **state)
{
    const tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT64, &c, options, SHAPES, shapes, STEPS, EXACT);
}

static void every_option_in_float32(void **state)
{
    tch_optim_config c = base();
    trial_run_options(*state, TCH_FLOAT32, &c, options, SHAPES, shapes, STEPS, EXACT_F32);
    c.precision = TCH_PRECISION_HIGH;
    trial_run_options(*state, TCH_FLOAT32, &c, options, SHAPES, shapes, STEPS, test_on_cpu() ? EXACT_F32 : ROUNDED_F32);
}

/* Every grafting, with and without a filter, before and after the first refresh. */
static void graftings(void **state)
{
    static const char *const names[] = {"none", "sgd", "adagrad", "rmsprop", "adam"};
    for (int kind = TCH_GRAFTING_NONE; kind <= TCH_GRAFTING_ADAM; kind++) {
        for (int variant = 0; variant < 4; variant++) {
            tch_optim_config c = base();
            c.grafting = (tch_grafting)kind;
            c.grafting_beta2 = 0.97;
            c.grafting_eps = 1e-4;
            c.beta1 = variant % 2 ? 0.0 : 0.9;
            c.start_preconditioning_step = variant / 2 ? 7 : -1;
            test_case("grafting %s, beta1 %g, from step %d", names[kind], c.beta1, c.start_preconditioning_step);
            trial_run(*state, TCH_FLOAT64, &c, SHAPES, shapes, STEPS, EXACT);
        }
    }
}

/* The root taken instead of twice the number of factors. */
static void exponents(void **state)
{
    const int32_t roots[] = {1, 2, 3, 4, 6, 8};
    for (int i = 0; i < 6; i++) {
        tch_optim_config c = base();
        c.exponent_override = roots[i];
        c.relative_eps = 1e-2;
        c.lr = 0.01;
        test_case("exponent_override %d", roots[i]);
        trial_run(*state, TCH_FLOAT64, &c, SHAPES, shapes, STEPS, EXACT);
    }
}

/* The other ways to a root keep what they promise: an error of `tolerance` in norm, 5.6 times that in the weakest
 * direction, for each of at most four factors. */
static void root_methods(void **state)
{
    const tch_root_method methods[] = {TCH_ROOT_AUTO, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL};
    const double tolerances[] = {0.0, 1e-6};
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 2; k++) {
            tch_optim_config c = base();
            c.root_method = methods[i];
            c.root_tolerance = tolerances[k];
            c.max_preconditioner_dim = 24;
            double promised = tolerances[k] > 0.0 ? tolerances[k] : 1e-9;
            test_case("%s to %g", tch_root_method_name(methods[i]), promised);
            if (test_offers_method(methods[i])) {
                trial_run(*state, TCH_FLOAT64, &c, SHAPES, shapes, STEPS, 4 * 5.6 * promised + EXACT);
            }
        }
    }
}

/* Defaults as they are, and those of the paper, but for a refresh within the test. */
static void defaults_in_float32(void **state)
{
    const tch_optim_config both[] = {tch_optim_defaults(TCH_OPTIM_SHAMPOO), test_optim_defaults(TCH_OPTIM_SHAMPOO)};
    for (int k = 0; k < 2; k++) {
        tch_optim_config c = both[k];
        c.precondition_frequency = 1;
        c.stagger = 0;
        c.relative_eps = c.relative_eps > 1e-4 ? c.relative_eps : 1e-4; /* 10 times weaker in the weakest direction */
        test_case("%s defaults, float32", k == 0 ? "the" : "the paper's");
        trial_run(*state, TCH_FLOAT32, &c, SHAPES, shapes, STEPS, 2 * 10 * 1e-3);
    }
}

/* A side over 100 times as long as the rest of its block has no factor; at 100 it has one. A side of 12000 would have
 * twelve factors of 1024. */
static void thin_sides_have_no_factor(void **state)
{
    static const trial_shape thin[] = {
        {.ndim = 2, .shape = {2, 201}},    {.ndim = 2, .shape = {301, 3}}, {.ndim = 2, .shape = {2, 200}},
        {.ndim = 3, .shape = {2, 401, 2}}, {.ndim = 1, .shape = {150}},    {.ndim = 2, .shape = {2, 12000}},
    };
    static const int64_t factors[] = {2 * 2, 3 * 3, 2 * 2 + 200 * 200, 2 * 2 + 2 * 2, 150 * 150, 12 * 2 * 2};
    for (size_t i = 0; i < TEST_COUNT(thin); i++) {
        trial t;
        int64_t elements = 0;
        tch_optim_config c = base();
        c.max_preconditioner_dim = 1024;
        c.merge_dims = 0;
        c.precondition_1d = 1;
        test_case("%d dimensions, the first %lld", thin[i].ndim, (long long)thin[i].shape[0]);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 1, &thin[i]);
        trial_steps(&t, 2);
        trial_check(&t, EXACT);
        for (int32_t k = 0; k < tch_optimizer_state_count(t.optimizer); k++) {
            tch_optim_state s = TCH_OPTIM_STATE_INIT;
            CHECK_OK(tch_optimizer_get_state(t.optimizer, k, &s));
            elements += strstr(s.name, "factor.") != NULL ? tch_tensor_numel(s.tensor) : 0;
        }
        CHECK(elements == factors[i], "factors have %lld elements, expected %lld", (long long)elements,
              (long long)factors[i]);
        trial_close(&t);
    }
}

static void groups_and_changing_numbers(void **state)
{
    static const trial_setting first[] = {
        SET(momentum, 0.6),        SET(beta1, 0.8),         SET(beta2, 0.9),        SET(relative_eps, 3e-3),
        SET(grafting_beta2, 0.99), SET(grafting_eps, 1e-5), SET(weight_decay, 0.1), {{0}, 0}};
    static const trial_setting second[] = {SET(scalar_beta1, 0.6), SET(scalar_eps, 1e-3), {{0}, 0}};
    trial_groups groups = {base(), base(), 7, first, second};
    trial_set_option(&groups.first, options, "as in practice");
    groups.first.precondition_frequency = 1;
    groups.second.lr = 0.01;
    groups.second.max_preconditioner_dim = 5;
    groups.second.grafting = TCH_GRAFTING_SGD;
    trial_run_groups(*state, &groups, SHAPES, shapes, STEPS, EXACT);
}

/* Merging by itself: from the innermost dimension out, never to a vector, and to at most four. */
static void merged_dimensions(void **state)
{
    static const struct {
        int64_t most;
        int32_t merge, ndim;
        int64_t dims[TCH_MAX_RANK];
        int32_t left;
        int64_t expected[REF_MAX_ORDER];
    } cases[] = {
        {1024, 1, 4, {64, 3, 3, 3}, 2, {64, 27}},  {1024, 1, 2, {8, 16}, 2, {8, 16}},
        {8, 1, 4, {6, 3, 2, 2}, 3, {6, 3, 4}},     {6, 1, 4, {6, 3, 2, 2}, 3, {6, 3, 4}},
        {12, 1, 4, {6, 3, 2, 2}, 2, {6, 12}},      {8, 0, 5, {3, 2, 3, 2, 3}, 4, {6, 3, 2, 3}},
        {1024, 1, 5, {3, 2, 3, 2, 3}, 2, {3, 36}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t dims[TCH_MAX_RANK];
        tch_optim_config c = base();
        c.max_preconditioner_dim = cases[i].most;
        c.merge_dims = cases[i].merge;
        memcpy(dims, cases[i].dims, sizeof dims);
        test_case("merging, case %zu", i);
        int32_t left = ref_merge_dims(&c, cases[i].ndim, dims);
        CHECK(left == cases[i].left, "%d dimensions are left", left);
        CHECK(memcmp(dims, cases[i].expected, (size_t)left * sizeof *dims) == 0, "other sizes");
    }
}

/* --- staggered refreshes ----------------------------------------------------------------------------------------- */

#define MOST_ROOTS 128
#define PERIOD 6

typedef struct watched_root {
    tch_tensor *tensor;
    double *values;
    int64_t count;
    int32_t refreshed[4 * PERIOD + 1]; /* by step */
} watched_root;

static int32_t find_roots(const trial *t, watched_root *roots)
{
    int32_t found = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t->optimizer, i, &state));
        if (strstr(state.name, "/root.") != NULL) {
            CHECK(found < MOST_ROOTS, "too many roots for the test");
            memset(&roots[found], 0, sizeof roots[found]);
            roots[found].tensor = state.tensor;
            roots[found].count = tch_tensor_numel(state.tensor);
            roots[found].values = trial_read(t, state.tensor);
            found++;
        }
    }
    return found;
}

static void see_refreshes(const trial *t, watched_root *roots, int32_t count, int32_t step)
{
    for (int32_t i = 0; i < count; i++) {
        double *now = trial_read(t, roots[i].tensor);
        roots[i].refreshed[step] = memcmp(now, roots[i].values, (size_t)roots[i].count * sizeof *now) != 0;
        roots[i].values = now;
    }
}

/* All at the first step; then every root once in every period, at the same place of it. */
static void check_periods(const watched_root *roots, int32_t count, int32_t steps)
{
    for (int32_t i = 0; i < count; i++) {
        CHECK(roots[i].refreshed[1], "root %d was not taken at the first step", i);
        for (int32_t from = 2; from + PERIOD - 1 <= steps; from += PERIOD) {
            int32_t refreshes = 0;
            for (int32_t s = from; s < from + PERIOD; s++) {
                refreshes += roots[i].refreshed[s];
            }
            CHECK(refreshes == 1, "root %d was taken %d times from step %d on", i, refreshes, from);
        }
    }
}

/* No step of a period costs more than another by more than the most expensive root, by n^3. */
static void check_balance(const watched_root *roots, int32_t count, int32_t from)
{
    double least = HUGE_VAL;
    double most = 0.0;
    double largest = 0.0;
    for (int32_t s = from; s < from + PERIOD; s++) {
        double cost = 0.0;
        for (int32_t i = 0; i < count; i++) {
            double own = pow((double)roots[i].count, 1.5);
            largest = fmax(largest, own);
            cost += roots[i].refreshed[s] ? own : 0.0;
        }
        least = fmin(least, cost);
        most = fmax(most, cost);
    }
    CHECK(most - least <= largest * (1.0 + 1e-12), "from step %d on a step costs %g to %g, the largest root %g", from,
          least, most, largest);
}

static void staggered_refreshes(void **state)
{
    static watched_root roots[MOST_ROOTS];
    trial t;
    tch_optim_config c = base();
    c.stagger = 1;
    c.precondition_frequency = PERIOD;
    test_case("staggered over %d steps", PERIOD);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    int32_t count = find_roots(&t, roots);
    CHECK(count > 2 * PERIOD, "only %d roots were found", count);
    int32_t steps = 1 + 3 * PERIOD;
    for (int32_t s = 1; s <= steps; s++) {
        trial_step(&t);
        see_refreshes(&t, roots, count, s);
    }
    check_periods(roots, count, steps);
    for (int32_t from = 2; from + PERIOD - 1 <= steps; from += PERIOD) {
        check_balance(roots, count, from);
    }
    tch_optim_stats stats = trial_stats(&t);
    CHECK(stats.refreshes == 4 * (int64_t)count, "%lld refreshes of %d roots", (long long)stats.refreshes, count);
    CHECK(stats.steps == steps && stats.skipped == 0 && stats.failed == 0, "other statistics");
    trial_close(&t);
}

/* Eight roots of 8 are as much work as one of 16: of a period of five steps four have one of these each, and the fifth
 * has all of those, where a step with some of both would be two batches. */
static void roots_of_one_size_come_together(void **state)
{
    enum { LARGE = 4, SMALL = 8, TURNS = 5 };
    trial_shape vectors[LARGE + SMALL];
    trial t;
    tch_optim_config c = base();
    c.max_preconditioner_dim = 16;
    c.precondition_1d = 1;
    c.stagger = 1;
    c.precondition_frequency = TURNS;
    for (int i = 0; i < LARGE + SMALL; i++) {
        vectors[i] = (trial_shape){.ndim = 1, .shape = {i < LARGE ? 16 : 8}};
    }
    test_case("%d roots of 16 and %d of 8", LARGE, SMALL);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, LARGE + SMALL, vectors);
    trial_step(&t);
    int single = 0;
    for (int s = 0; s < TURNS; s++) {
        int64_t before = trial_stats(&t).refreshes;
        trial_step(&t);
        int64_t taken = trial_stats(&t).refreshes - before;
        CHECK(taken == 1 || taken == SMALL, "%lld roots at a step", (long long)taken);
        single += taken == 1;
    }
    assert_int_equal(single, LARGE);
    trial_close(&t);
}

/* A zero gradient gives a zero factor: its root is that of the damping alone, and nothing moves. */
static void zero_gradients(void **state)
{
    for (int kind = TCH_GRAFTING_NONE; kind <= TCH_GRAFTING_ADAM; kind++) {
        trial t;
        tch_optim_config c = base();
        c.grafting = (tch_grafting)kind;
        c.eps = 1e-4;
        test_case("zero gradients first, grafting %d", kind);
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
        const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
        trial_list_gradients(&t, gradients);
        for (int32_t i = 0; i < t.count; i++) {
            trial_erase(&t, i, t.parameters[i].memory->count);
        }
        for (int i = 0; i < 2; i++) {
            CHECK_OK(tch_optimizer_step(t.optimizer, t.count, gradients));
            trial_step_references(&t);
        }
        for (int32_t i = 0; i < t.count; i++) {
            test_tensor_check_unchanged(t.parameters[i].memory, "a parameter");
        }
        trial_steps(&t, STEPS);
        trial_check(&t, EXACT);
        trial_close(&t);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merged_dimensions),
        cmocka_unit_test(thin_sides_have_no_factor),
        cmocka_unit_test(every_option_in_float64),
        cmocka_unit_test(every_option_in_float32),
        cmocka_unit_test(graftings),
        cmocka_unit_test(exponents),
        cmocka_unit_test(root_methods),
        cmocka_unit_test(defaults_in_float32),
        cmocka_unit_test(groups_and_changing_numbers),
        cmocka_unit_test(staggered_refreshes),
        cmocka_unit_test(roots_of_one_size_come_together),
        cmocka_unit_test(zero_gradients),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

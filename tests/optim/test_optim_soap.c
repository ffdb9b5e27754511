/* SOAP against the plain reference: every option alone and together.
 *
 * A trajectory is determined only where the first gradient determines the bases, up to signs: every dimension that has
 * a factor is at most as large as all others together. Where it does not, in a tall matrix, the null space may have any
 * basis: then the library's own first bases are checked and handed to the reference, and the rest must agree.
 *
 * In float32 a basis is known to u |C| / gap; gaps of these factors are a hundredth and more, and what they do to a
 * direction is second order in neighboring second moments. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 22
#define EXACT 1e-10
#define EXACT_F32 1e-4
#define ROUNDED_F32 2e-2 /* products of TCH_PRECISION_HIGH, which a GPU rounds to 11 bits */

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {7, 7}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 5, 6}, .gradient = LAYOUT_REVERSED},
    {.ndim = 3, .shape = {3, 4, 2}},
    {.ndim = 4, .shape = {5, 2, 3, 4}, .order = {0, 3, 1, 2}},
    {.ndim = 5, .shape = {2, 3, 2, 3, 2}},
    {.ndim = 4, .shape = {1, 6, 1, 6}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {6, 5}, .elementwise = 1},
    {.ndim = 2, .shape = {0, 5}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config base(void)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SOAP);
    c.lr = 0.02;
    c.precondition_frequency = 3;
    c.stagger = 0; /* as the reference does */
    c.precision = TCH_PRECISION_HIGHEST;
    return c;
}

static const trial_option options[] = {
    {.name = "defaults"},
    {"packed", {SET(packed_factors, 1)}},
    {"every step", {SET(precondition_frequency, 1)}},
    {"every tenth step", {SET(precondition_frequency, 10)}},
    {"other betas", {SET(beta1, 0.8), SET(beta2, 0.99), SET(eps, 1e-3)}},
    {"own beta for factors", {SET(shampoo_beta, 0.7)}},
    {"no correction", {SET(bias_correction, 0)}},
    {"normalized", {SET(normalize_grads, 1)}},
    {"no decay", {SET(weight_decay, 0.0)}},
    {"l2", {SET(weight_decay, 0.2), SET(decay, TCH_DECAY_L2)}},
    {"maximize", {SET(maximize, 1)}},
    {"other numbers for scalars",
     {SET(scalar_lr, 0.01), SET(scalar_beta1, 0.7), SET(scalar_beta2, 0.8), SET(scalar_eps, 0.1),
      SET(scalar_weight_decay, 0.0)}},
    {"much at once",
     {SET(precondition_frequency, 1), SET(beta1, 0.8), SET(beta2, 0.99), SET(eps, 1e-3), SET(shampoo_beta, 0.7),
      SET(normalize_grads, 1), SET(weight_decay, 0.2), SET(decay, TCH_DECAY_L2), SET(maximize, 1)}},
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

/* A dimension above the limit has no factor, on either side; blocks of a square matrix have both. */
static void large_dimensions(void **state)
{
    static const trial_shape one_sided[] = {
        {.ndim = 2, .shape = {30, 6}},
        {.ndim = 2, .shape = {5, 33}},
        {.ndim = 2, .shape = {20, 7}, .order = {1, 0}},
        {.ndim = 3, .shape = {4, 21, 5}},
        {.ndim = 4, .shape = {9, 2, 2, 3}},
    };
    static const trial_shape thin[] = {{.ndim = 2, .shape = {2, 201}}, {.ndim = 2, .shape = {301, 3}}};
    static const trial_shape cut[] = {{.ndim = 2, .shape = {16, 24}}, {.ndim = 3, .shape = {16, 3, 8}}};
    for (int dtype = 0; dtype < 2; dtype++) {
        tch_optim_config c = base();
        c.max_preconditioner_dim = 8;
        test_case("one-sided, %s", dtype ? "float32" : "float64");
        trial_run(*state, dtype ? TCH_FLOAT32 : TCH_FLOAT64, &c, 5, one_sided, STEPS, dtype ? EXACT_F32 : EXACT);
        c.max_preconditioner_dim = 1000;
        test_case("thin, %s", dtype ? "float32" : "float64");
        trial_run(*state, dtype ? TCH_FLOAT32 : TCH_FLOAT64, &c, 2, thin, STEPS, dtype ? EXACT_F32 : EXACT);
        c.max_preconditioner_dim = 8;
        c.block = 1;
        test_case("blocks, %s", dtype ? "float32" : "float64");
        trial_run(*state, dtype ? TCH_FLOAT32 : TCH_FLOAT64, &c, 2, cut, STEPS, dtype ? EXACT_F32 : EXACT);
    }
}

static void merged_dimensions(void **state)
{
    static const trial_shape merged[] = {{.ndim = 4, .shape = {12, 3, 2, 2}}, {.ndim = 3, .shape = {4, 2, 2}}};
    tch_optim_config c = base();
    c.merge_dims = 1;
    c.max_preconditioner_dim = 64;
    test_case("merged to square matrices");
    trial_run(*state, TCH_FLOAT64, &c, 2, merged, STEPS, EXACT);
}

static void groups_and_changing_numbers(void **state)
{
    static const trial_setting first[] = {SET(weight_decay, 0.1), {{0}, 0}};
    static const trial_setting second[] = {
        SET(beta1, 0.9), SET(beta2, 0.95), SET(eps, 1e-5), SET(shampoo_beta, 0.8), SET(precondition_frequency, 2),
        {{0}, 0}};
    trial_groups groups = {base(), base(), 5, first, second};
    trial_set_option(&groups.second, options, "other betas");
    groups.second.shampoo_beta = 0.9;
    trial_run_groups(*state, &groups, SHAPES, shapes, STEPS, EXACT);
}

/* The first gradient only prepares: matrices stay where they are, to the bit, and the others take their step. */
static void the_first_gradient_prepares(void **state)
{
    trial t;
    tch_optim_config c = base();
    c.weight_decay = 0.3;
    test_case("the first step");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_step(&t);
    for (int32_t i = 0; i < t.count; i++) {
        const trial_parameter *p = &t.parameters[i];
        bool prepares = p->reference->method == TCH_OPTIM_SOAP || p->memory->count == 0;
        CHECK(test_tensor_is_unchanged(p->memory) == prepares, "parameter %d", i);
    }
    trial_close(&t);
}

/* --- bases that the first gradient leaves open ------------------------------------------------------------------- */

/* Rows of q are orthonormal, and q C q' is diagonal and falling. */
static void check_basis(int64_t n, const double *q, const double *factor)
{
    double *turned = test_alloc((size_t)(n * n) * sizeof *turned);
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    double *inner = test_alloc((size_t)(n * n) * sizeof *inner);
    double size = ref_norm(n * n, factor);
    ref_transpose(n, n, q, turned);
    ref_matmul(n, n, n, q, turned, product);
    for (int64_t i = 0; i < n * n; i++) {
        CHECK(fabs(product[i] - (i / n == i % n)) < 1e-12, "the basis is not orthonormal: %g", product[i]);
    }
    ref_matmul(n, n, n, q, factor, inner);
    ref_matmul(n, n, n, inner, turned, product);
    for (int64_t i = 0; i < n * n; i++) {
        CHECK(i / n == i % n || fabs(product[i]) < 1e-12 * size, "the basis does not diagonalize: %g", product[i]);
        CHECK(i / n == 0 || i / n != i % n || product[i] <= product[i - n - 1] + 1e-12 * size, "it is not sorted");
    }
}

static void adopt_bases(trial *t)
{
    for (int32_t i = 0; i < t->count; i++) {
        ref_optim *r = t->parameters[i].reference;
        for (int32_t b = 0; b < r->block_count; b++) {
            for (int32_t k = 0; k < r->order; k++) {
                char name[64];
                int64_t n = r->blocks[b].size[k];
                if (r->blocks[b].factor[k] == NULL) {
                    continue;
                }
                snprintf(name, sizeof name, "parameter%d/basis.%d.%d", i, b, k);
                double *q = trial_read(t, trial_state(t, name));
                check_basis(n, q, r->blocks[b].factor[k]);
                ref_transpose(n, n, q, r->blocks[b].root[k]);
            }
        }
    }
}

static void tall_and_wide_matrices(void **state)
{
    static const trial_shape open[] = {
        {.ndim = 2, .shape = {13, 5}},
        {.ndim = 2, .shape = {3, 17}},
        {.ndim = 2, .shape = {20, 11}, .order = {1, 0}},
        {.ndim = 4, .shape = {12, 2, 1, 3}},
        {.ndim = 1, .shape = {9}},
        {.ndim = 2, .shape = {1, 14}},
    };
    for (int block = 0; block < 2; block++) {
        trial t;
        tch_optim_config c = base();
        c.precondition_frequency = 1000;
        c.precondition_1d = 1;
        c.max_preconditioner_dim = block ? 8 : 1000;
        c.block = block;
        test_case("bases left open by the first gradient, %s", block ? "in blocks" : "whole");
        trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 6, open);
        trial_step(&t);
        adopt_bases(&t);
        for (int i = 1; i < STEPS; i++) {
            trial_step(&t);
        }
        trial_check(&t, EXACT);
        trial_close(&t);
    }
}

/* --- when bases are refreshed ------------------------------------------------------------------------------------ */

enum { MOST_BASES = 64, PERIOD = 4 };

typedef struct watched_basis {
    tch_tensor *tensor;
    double *values;
    bool *due; /* of the reference */
    int32_t refreshed;
} watched_basis;

static int32_t find_bases(const trial *t, watched_basis *bases)
{
    int32_t found = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer); i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        int parameter, block, k;
        CHECK_OK(tch_optimizer_get_state(t->optimizer, i, &state));
        if (sscanf(state.name, "parameter%d/basis.%d.%d", &parameter, &block, &k) == 3) {
            CHECK(found < MOST_BASES, "too many bases for the test");
            bases[found++] = (watched_basis){state.tensor, trial_read(t, state.tensor),
                                             &t->parameters[parameter].reference->blocks[block].due[k], 0};
        }
    }
    return found;
}

/* The library's step, after which the references learn which bases have followed. Returns how many. */
static int32_t step_and_tell(trial *t, watched_basis *bases, int32_t count)
{
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    int32_t moved = 0;
    trial_draw(t);
    trial_list_gradients(t, gradients);
    CHECK_OK(tch_optimizer_step(t->optimizer, t->count, gradients));
    for (int32_t i = 0; i < count; i++) {
        double *now = trial_read(t, bases[i].tensor);
        size_t bytes = (size_t)tch_tensor_numel(bases[i].tensor) * sizeof *now;
        *bases[i].due = memcmp(now, bases[i].values, bytes) != 0;
        bases[i].refreshed += *bases[i].due;
        moved += *bases[i].due;
        bases[i].values = now;
    }
    trial_step_references(t);
    return moved;
}

/* Each basis once in a period, not all at one step, and second moments with the bases that moved alone. */
static void staggered_bases(void **state)
{
    static watched_basis bases[MOST_BASES];
    trial t;
    tch_optim_config c = base();
    c.stagger = 1;
    c.precondition_frequency = PERIOD;
    c.max_preconditioner_dim = 8;
    c.block = 1;
    test_case("staggered over %d steps", PERIOD);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    int32_t count = find_bases(&t, bases);
    CHECK(count > 2 * PERIOD, "only %d bases were found", count);
    CHECK(step_and_tell(&t, bases, count) == count, "not all bases were found at the first step");
    for (int32_t period = 1; period <= 4; period++) {
        for (int32_t s = 0; s < PERIOD; s++) {
            int32_t moved = step_and_tell(&t, bases, count);
            CHECK(moved > 0 && moved < count, "%d of %d bases moved at step %d of period %d", moved, count, s, period);
        }
        for (int32_t i = 0; i < count; i++) {
            CHECK(bases[i].refreshed == period + 1, "basis %d moved %d times", i, bases[i].refreshed);
        }
    }
    trial_check(&t, EXACT);
    tch_optim_stats stats = trial_stats(&t);
    CHECK(stats.refreshes == 5 * (int64_t)count, "%lld refreshes of %d bases", (long long)stats.refreshes, count);
    trial_close(&t);
}

/* The schedule of a factor that is always found to have drifted little, or much, from the rule in optim.h: what a
 * refresh finds counts from the next one on. */
typedef struct expected_gap {
    int32_t gap, next;
    bool measured;
} expected_gap;

static bool expect_due(expected_gap *e, int32_t step, int32_t period, int32_t least, int32_t change)
{
    int32_t exponent = e->gap > least ? e->gap : least;
    int32_t gap = 1 << exponent < period ? 1 << exponent : period;
    if (step > 1 && (step - 1) % gap != 0) {
        return false;
    }
    if (e->measured) {
        int32_t next = exponent + change < 0 ? 0 : exponent + change;
        e->next = next < least ? least : next == 0 || 1 << (next - 1) < period ? next : exponent;
    }
    e->gap = e->next;
    e->measured = step > 1; /* a first basis has nothing to be measured by */
    return true;
}

static void gaps_by_need(void **state)
{
    static const struct {
        double drift, budget;
        int32_t least, change;
    } cases[] = {{1e6, 1.0, 0, 1}, {1e-9, 1.0, 0, -1}, {1e6, 0.3, 2, 1}, {1e-9, 0.25, 2, -1}};
    static watched_basis bases[MOST_BASES];
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t;
        expected_gap expected = {0};
        tch_optim_config c = base();
        c.stagger = 0;
        c.precondition_frequency = 10;
        c.refresh_drift = cases[i].drift;
        c.refresh_budget = cases[i].budget;
        test_case("gaps by need, drift %g, budget %g", cases[i].drift, cases[i].budget);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        int32_t count = find_bases(&t, bases);
        for (int32_t step = 1; step <= 45; step++) {
            int32_t moved = step_and_tell(&t, bases, count);
            bool due = expect_due(&expected, step, 10, cases[i].least, cases[i].change);
            CHECK(moved == (due ? count : 0), "%d bases moved at step %d, expected %d", moved, step, due ? count : 0);
        }
        trial_close(&t);
    }
}

/* Each has its turn also where gaps are the factors' own: in the end once in a period. */
static void staggered_gaps_by_need(void **state)
{
    static watched_basis bases[MOST_BASES];
    trial t;
    tch_optim_config c = base();
    c.stagger = 1;
    c.precondition_frequency = 10;
    c.refresh_drift = 1e6;
    test_case("staggered gaps by need");
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    int32_t count = find_bases(&t, bases);
    int64_t moved[2] = {0};
    for (int32_t step = 0; step < 100; step++) {
        moved[step >= 60] += step_and_tell(&t, bases, count);
    }
    CHECK(moved[1] == 4 * (int64_t)count, "%lld refreshes of %d bases in the last 40 steps", (long long)moved[1],
          count);
    CHECK(moved[0] > 6 * (int64_t)count, "%lld refreshes of %d bases in the first 60", (long long)moved[0], count);
    trial_close(&t);
}

/* With bases followed at every step from rank 1 on nothing is determined but this: they stay orthonormal, and every
 * number stays finite. */
static void bases_stay_orthonormal(void **state)
{
    static const trial_shape open[] = {{.ndim = 2, .shape = {24, 3}}, {.ndim = 2, .shape = {2, 31}}};
    trial t;
    tch_optim_config c = base();
    c.precondition_frequency = 1;
    test_case("bases of factors without full rank");
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, 2, open);
    for (int i = 0; i < STEPS; i++) {
        trial_step(&t);
        double *q = trial_read(&t, trial_state(&t, "parameter0/basis.0.0"));
        double *turned = test_alloc(24 * 24 * sizeof *turned);
        double *product = test_alloc(24 * 24 * sizeof *product);
        ref_transpose(24, 24, q, turned);
        ref_matmul(24, 24, 24, q, turned, product);
        for (int k = 0; k < 24 * 24; k++) {
            CHECK(fabs(product[k] - (k / 24 == k % 24)) < 1e-10, "step %d: not orthonormal: %g", i, product[k]);
        }
    }
    for (int32_t i = 0; i < t.count; i++) {
        double *p = test_tensor_read(t.parameters[i].memory);
        double size = ref_largest(t.parameters[i].memory->count, p);
        CHECK(isfinite(size) && size < 10.0, "parameter %d has grown to %g", i, size);
    }
    trial_close(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_in_float64),
        cmocka_unit_test(every_option_in_float32),
        cmocka_unit_test(large_dimensions),
        cmocka_unit_test(merged_dimensions),
        cmocka_unit_test(groups_and_changing_numbers),
        cmocka_unit_test(the_first_gradient_prepares),
        cmocka_unit_test(tall_and_wide_matrices),
        cmocka_unit_test(bases_stay_orthonormal),
        cmocka_unit_test(staggered_bases),
        cmocka_unit_test(gaps_by_need),
        cmocka_unit_test(staggered_gaps_by_need),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

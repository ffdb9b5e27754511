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
#include <string.h>

#include "support/elements.h"
#include "support/linalg/reference.h"
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
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_SOAP);
    c.lr = 0.02;
    c.precondition_frequency = 3;
    c.precision = TCH_PRECISION_HIGHEST;
    return c;
}

static const trial_option options[] = {
    {.name = "defaults"},
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
    static const trial_shape cut[] = {{.ndim = 2, .shape = {16, 24}}, {.ndim = 3, .shape = {16, 3, 8}}};
    for (int dtype = 0; dtype < 2; dtype++) {
        tch_optim_config c = base();
        c.max_preconditioner_dim = 8;
        test_case("one-sided, %s", dtype ? "float32" : "float64");
        trial_run(*state, dtype ? TCH_FLOAT32 : TCH_FLOAT64, &c, 5, one_sided, STEPS, dtype ? EXACT_F32 : EXACT);
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
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

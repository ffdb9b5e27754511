/* Shampoo's roots in bfloat16 (root_dtype). What is kept is the nearest bfloat16 of the root that float32 would keep,
 * and steps multiply by exactly that: an optimizer with float32 roots that is handed those numbers goes on
 * bitwise-identical. Checkpoints of any form are read by any other. Beside that: float64 parameters, forecasts, and a
 * backend that cannot pack.
 *
 * Factors do not depend on roots, so that two optimizers with the same gradients have the same ones. On a GPU they are
 * worked on one at a time, for the reason in test_optim_packed.c. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "support/backend/table_copy.h"
#include "support/files.h"
#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {24, 12}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {24, 12}},
    {.ndim = 2, .shape = {8, 48}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 8, 4}},
    {.ndim = 1, .shape = {12}},
    {.ndim = 0},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

/* How factors and roots are kept. */
typedef struct kept_form {
    const char *name;
    int32_t packed;
    tch_state_dtype roots;
} kept_form;

static const kept_form forms[] = {
    {"whole", 0, TCH_STATE_FLOAT32},
    {"packed", 1, TCH_STATE_FLOAT32},
    {"bfloat16", 0, TCH_STATE_BFLOAT16},
    {"bfloat16 and packed", 1, TCH_STATE_BFLOAT16},
};
#define FORMS ((int)(sizeof forms / sizeof forms[0]))

static const trial_option options[] = {
    {.name = "defaults"},
    {"at every step, without a filter", {SET(beta1, 0), SET(precondition_frequency, 1)}},
    {"spread over a period", {SET(stagger, 1), SET(precondition_frequency, 3)}},
    {"every dimension, vectors too", {SET(merge_dims, 0), SET(precondition_1d, 1)}},
    {"little memory", {SET(memory_budget, 1)}},
    {.name = NULL},
};

static tch_optim_config config_of(const trial_option *option, const kept_form *form)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    c.lr = 0.02;
    c.max_preconditioner_dim = 16;
    c.precondition_frequency = 2;
    c.relative_eps = 1e-3;
    c.stagger = 0;
    trial_set(&c, option->settings);
    c.world_invariant = !test_on_cpu();
    c.packed_factors = form->packed;
    c.root_dtype = form->roots;
    return c;
}

/* A root or factor as a whole matrix, whatever it is kept as, and its size. */
static double *matrix_of(const trial *t, const char *name, int64_t *n)
{
    const tch_tensor *kept = trial_state(t, name);
    double *values = trial_read(t, kept);
    if (kept->ndim == 2) {
        *n = kept->shape[0];
        return values;
    }
    *n = (int64_t)((sqrt(8.0 * (double)kept->shape[0] + 1.0) - 1.0) / 2.0 + 0.5);
    double *whole = test_zeros((size_t)(*n * *n));
    for (int64_t i = 0, k = 0; i < *n; i++) {
        for (int64_t j = 0; j <= i; j++, k++) {
            whole[i * *n + j] = whole[j * *n + i] = values[k];
        }
    }
    return whole;
}

/* The nearest number of eight significant bits, ties to even. */
static double to_bfloat16(double value)
{
    int exponent;
    double digits = frexp(value, &exponent);
    return ldexp(nearbyint(ldexp(digits, 8)), exponent - 8);
}

/* Matrices of `a` beside those of `b`, which has them rounded where it alone does. Returns how many roots there are. */
static int check_matrices(const trial *a, const trial *b, bool rounds)
{
    int roots = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(a->optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(a->optimizer, i, &s));
        bool root = strstr(s.name, "/root.") != NULL;
        if (!root && strstr(s.name, "/factor.") == NULL) {
            continue;
        }
        int64_t n;
        int64_t m;
        double *x = matrix_of(a, s.name, &n);
        double *y = matrix_of(b, s.name, &m);
        CHECK(n == m, "%s is of %lld rows, expected %lld", s.name, (long long)m, (long long)n);
        for (int64_t k = 0; k < n * n; k++) {
            double wanted = root && rounds ? to_bfloat16(x[k]) : x[k];
            CHECK(y[k] == wanted, "%s[%lld] is %.9g, expected %.9g", s.name, (long long)k, y[k], wanted);
        }
        roots += root;
    }
    return roots;
}

static void check_kept(const trial *t, const char *name, bool narrow)
{
    const tch_tensor *kept = trial_state(t, name);
    CHECK(tch_dtype_equal(kept->dtype, narrow ? TCH_BFLOAT16 : TCH_FLOAT32), "%s is %s", name,
          tch_dtype_name(kept->dtype));
    CHECK(!narrow || kept->ndim == 1, "%s has %d dimensions, expected a lower triangle", name, kept->ndim);
}

static void roots_are_rounded_to_nearest(void **state)
{
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_BFLOAT16};
    for (int k = 0; k < 2 * 2; k++) {
        for (const trial_option *option = options; option->name != NULL; option++) {
            trial exact;
            trial rounded;
            tch_optim_config c = config_of(option, &forms[k / 2]);
            tch_optim_config d = config_of(option, &forms[2 + k / 2]);
            test_case("%s, %s, %s", forms[k / 2].name, tch_dtype_name(dtypes[k % 2]), option->name);
            trial_open(&exact, *state, dtypes[k % 2], dtypes[k % 2], &c, SHAPES, shapes);
            trial_open(&rounded, *state, dtypes[k % 2], dtypes[k % 2], &d, SHAPES, shapes);
            rounded.random = exact.random;
            trial_steps(&exact, 7);
            trial_steps(&rounded, 7);
            check_kept(&exact, "parameter0/root.0.0", false);
            check_kept(&rounded, "parameter0/root.0.0", true);
            int roots = check_matrices(&exact, &rounded, true);
            CHECK(roots >= 12, "only %d roots", roots);
            CHECK(trial_stats(&rounded).failed == 0, "%lld refreshes failed", (long long)trial_stats(&rounded).failed);
            trial_close(&exact);
            trial_close(&rounded);
        }
    }
}

/* Writes the roots that `from` keeps into the float32 roots of `to`. */
static void hand_over_roots(const trial *from, const trial *to)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(to->optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(to->optimizer, i, &s));
        if (strstr(s.name, "/root.") != NULL) {
            int64_t n;
            double *root = matrix_of(from, s.name, &n);
            int64_t shape[2] = {n, n};
            tch_tensor host = tch_tensor_view(root, TCH_FLOAT64, 2, shape);
            CHECK_OK(tch_tensor_copy(to->context, s.tensor, &host));
        }
    }
    CHECK_OK(tch_context_synchronize(to->context));
}

/* Roots of the first step alone. */
static const trial_option once[] = {{"once", {SET(precondition_frequency, 1000)}}};

static void steps_multiply_by_what_is_kept(void **state)
{
    trial whole;
    trial rounded;
    tch_optim_config c = config_of(once, &forms[0]);
    tch_optim_config d = config_of(once, &forms[2]);
    trial_open(&whole, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    trial_open(&rounded, *state, TCH_FLOAT32, TCH_FLOAT32, &d, SHAPES, shapes);
    rounded.random = whole.random;
    trial_steps(&whole, 1);
    trial_steps(&rounded, 1);
    hand_over_roots(&rounded, &whole);
    trial_copy_parameters(&whole, &rounded);
    trial_steps(&whole, 4);
    trial_steps(&rounded, 4);
    trial_check_same_parameters(&whole, &rounded);
    trial_close(&whole);
    trial_close(&rounded);
}

/* Every form reads what every other has saved; where nothing is rounded it goes on as the one that saved. */
static void checkpoints_are_exchanged(void **state)
{
    const char *path = test_path("root_dtype.safetensors");
    for (int k = 0; k < FORMS * FORMS; k++) {
        const kept_form *from = &forms[k / FORMS];
        const kept_form *to = &forms[k % FORMS];
        bool rounds = from->roots == TCH_STATE_FLOAT32 && to->roots == TCH_STATE_BFLOAT16;
        trial a;
        trial b;
        tch_optim_config c = config_of(once, from);
        tch_optim_config d = config_of(once, to);
        test_case("%s to %s", from->name, to->name);
        trial_open(&a, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        trial_open(&b, *state, TCH_FLOAT32, TCH_FLOAT32, &d, SHAPES, shapes);
        trial_steps(&a, 3);
        trial_take_over(&b, &a, path);
        check_kept(&b, "parameter0/root.0.0", to->roots == TCH_STATE_BFLOAT16);
        check_matrices(&a, &b, rounds);
        trial_steps(&a, 3);
        trial_steps(&b, 3);
        if (!rounds) {
            trial_check_same_parameters(&a, &b);
        }
        trial_close(&a);
        trial_close(&b);
    }
}

/* float64 keeps float64. */
static void float64_is_as_without(void **state)
{
    trial a;
    trial b;
    tch_optim_config c = config_of(&options[0], &forms[0]);
    tch_optim_config d = config_of(&options[0], &forms[2]);
    trial_open(&a, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    trial_open(&b, *state, TCH_FLOAT64, TCH_FLOAT64, &d, SHAPES, shapes);
    b.random = a.random;
    trial_steps(&a, 5);
    trial_steps(&b, 5);
    trial_check_same_parameters(&a, &b);
    CHECK(tch_dtype_equal(trial_state(&b, "parameter0/root.0.0")->dtype, TCH_FLOAT64), "a root is not float64");
    trial_close(&a);
    trial_close(&b);
}

/* Of 4 blocks of 1024 there are 8 roots. */
static void forecasts_know_it(void **state)
{
    int64_t shape[] = {2048, 2048};
    tch_tensor nothing = tch_tensor_view(NULL, TCH_FLOAT32, 2, shape);
    const tch_parameter entry = {.tensor = &nothing};
    double whole = 8.0 * 4.0 * 1024.0 * 1024.0;
    double triangle = 8.0 * 1024.0 * 1025.0 / 2.0;
    double expected[] = {2.0 * whole, 8.0 * triangle, whole + 2.0 * triangle, 6.0 * triangle};
    double rest = 0.0;
    for (int k = 0; k < FORMS; k++) {
        tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
        tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
        c.packed_factors = forms[k].packed;
        c.root_dtype = forms[k].roots;
        CHECK_OK(tch_optim_forecast(*state, &c, 1, &entry, &memory));
        double other = (double)memory.state - expected[k];
        CHECK(k == 0 || fabs(other - rest) < 4096.0, "%s: %.0f bytes beside factors and roots, expected %.0f",
              forms[k].name, other, rest);
        rest = k == 0 ? other : rest;
    }
}

static void a_backend_that_cannot_pack(void **state)
{
    static table_copy table;
    tch_context *context = *state;
    const tch_backend *own = context->backend;
    tch_optimizer *optimizer = NULL;
    test_tensor *p = test_tensor_make(context, TCH_FLOAT32, 2, (const int64_t[]){4, 4}, LAYOUT_CONTIGUOUS);
    const tch_parameter entry = {.tensor = &p->tensor};
    tch_optim_config c = config_of(&options[0], &forms[2]);
    test_tensor_write(p, test_zeros(16));
    table_copy_make(&table, own);
    table.matrix.unpack = NULL;
    context->backend = &table.backend;
    tch_status status = tch_optimizer_create(context, &c, 1, &entry, &optimizer);
    context->backend = own;
    test_check_refused(status, TCH_ERR_UNSUPPORTED, "root_dtype is bfloat16");
    CHECK_OK(tch_optimizer_create(context, &c, 1, &entry, &optimizer));
    c.root_dtype = TCH_STATE_FLOAT32;
    test_check_refused(tch_optimizer_set_config(optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, "root_dtype");
    tch_optimizer_destroy(optimizer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(roots_are_rounded_to_nearest),
        cmocka_unit_test(steps_multiply_by_what_is_kept),
        cmocka_unit_test(checkpoints_are_exchanged),
        cmocka_unit_test(float64_is_as_without),
        cmocka_unit_test(forecasts_know_it),
        cmocka_unit_test(a_backend_that_cannot_pack),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* Factors and roots as lower triangles (packed_factors). They are the numbers that whole matrices would hold: what an
 * optimizer comes to is bitwise-identical to one with whole matrices, with every kind of block and in as many parts as
 * its memory allows; its state is the triangles of the other's; checkpoints of one are read by the other. Beside that:
 * forecasts, and a backend that cannot pack. The tests of Shampoo and SOAP have packed rows beside float64 references.
 *
 * On a GPU libraries choose kernels by how many matrices there are, which differs, and by how they are aligned. With
 * `world_invariant` it is one at a time, and with sizes that are multiples of 4 all lie at multiples of 16 bytes: so
 * bits are compared there too. */
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

/* Several blocks of a size, blocks cut both ways, a middle dimension, a vector, one that has no factors. */
static const trial_shape odd[] = {
    {.ndim = 2, .shape = {24, 17}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {24, 17}},
    {.ndim = 2, .shape = {9, 40}, .order = {1, 0}},
    {.ndim = 3, .shape = {5, 7, 6}},
    {.ndim = 1, .shape = {13}},
    {.ndim = 0},
};
static const trial_shape even[] = {
    {.ndim = 2, .shape = {24, 12}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {24, 12}},
    {.ndim = 2, .shape = {8, 48}, .order = {1, 0}},
    {.ndim = 3, .shape = {4, 8, 4}},
    {.ndim = 1, .shape = {12}},
    {.ndim = 0},
};
#define SHAPES ((int32_t)(sizeof odd / sizeof odd[0]))

static const trial_shape *shapes(void)
{
    return test_on_cpu() ? odd : even;
}

static const trial_option options[] = {
    {.name = "defaults"},
    {"a root of a step's own, without a filter", {SET(beta1, 0), SET(precondition_frequency, 1)}},
    {"by need", {SET(refresh_drift, 5.0), SET(precondition_frequency, 8)}},
    {"spread over a period", {SET(stagger, 1), SET(precondition_frequency, 3)}},
    {"every dimension, vectors too", {SET(merge_dims, 0), SET(precondition_1d, 1)}},
    {"little memory", {SET(memory_budget, 1)}},
    {.name = NULL},
};

static tch_optim_config config_of(tch_optim_kind kind, const trial_option *option, int32_t packed)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.max_preconditioner_dim = 16;
    c.block = 1;
    c.precondition_frequency = 2;
    c.relative_eps = 1e-3;
    c.stagger = 0;
    trial_set(&c, option->settings);
    c.world_invariant = !test_on_cpu();
    c.packed_factors = packed;
    return c;
}

/* A factor or root of the one with whole matrices beside the other's. */
static int check_triangle(const trial *whole, const trial *packed, const tch_optim_state *s)
{
    tch_tensor *other = trial_state(packed, s->name);
    int64_t n = s->tensor->ndim == 2 ? s->tensor->shape[0] : 0;
    if (other->ndim == s->tensor->ndim) {
        CHECK(strstr(s->name, "/factor.") == NULL && strstr(s->name, "/root.") == NULL, "%s is not packed", s->name);
        return 0;
    }
    CHECK(other->ndim == 1 && other->shape[0] == n * (n + 1) / 2, "%s has %lld elements", s->name,
          (long long)other->shape[0]);
    double *full = trial_read(whole, s->tensor);
    double *triangle = trial_read(packed, other);
    for (int64_t i = 0, k = 0; i < n; i++) {
        for (int64_t j = 0; j <= i; j++, k++) {
            CHECK(full[i * n + j] == triangle[k], "%s: (%lld, %lld) is %.9g, expected %.9g", s->name, (long long)i,
                  (long long)j, triangle[k], full[i * n + j]);
        }
    }
    return 1;
}

static void check_same_state(const trial *whole, const trial *packed, tch_optim_kind kind)
{
    int triangles = 0;
    int32_t count = tch_optimizer_state_count(whole->optimizer);
    CHECK(count == tch_optimizer_state_count(packed->optimizer), "other tensors of state");
    for (int32_t i = 0; i < count; i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(whole->optimizer, i, &s));
        triangles += check_triangle(whole, packed, &s);
    }
    CHECK(triangles >= (kind == TCH_OPTIM_SHAMPOO ? 12 : 6), "only %d matrices are packed", triangles);
}

static void the_numbers_are_the_same(void **state)
{
    const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP};
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64, TCH_BFLOAT16};
    /* On a GPU a product of a column and a row in float64 need not be symmetric to the last bit, and of a vector's
     * factor most of SOAP's basis is made of such bits. */
    int count = test_on_cpu() ? 2 * 3 : 4;
    for (int k = 0; k < count; k++) {
        for (const trial_option *option = options; option->name != NULL; option++) {
            trial whole;
            trial packed;
            tch_optim_config c = config_of(kinds[k / 3], option, 0);
            tch_optim_config d = config_of(kinds[k / 3], option, 1);
            test_case("%s, %s, %s", tch_optim_kind_name(kinds[k / 3]), tch_dtype_name(dtypes[k % 3]), option->name);
            trial_open(&whole, *state, dtypes[k % 3], dtypes[k % 3], &c, SHAPES, shapes());
            trial_open(&packed, *state, dtypes[k % 3], dtypes[k % 3], &d, SHAPES, shapes());
            packed.random = whole.random;
            trial_steps(&whole, 9);
            trial_steps(&packed, 9);
            trial_check_same_parameters(&whole, &packed);
            check_same_state(&whole, &packed, kinds[k / 3]);
            trial_close(&whole);
            trial_close(&packed);
        }
    }
}

/* Either reads what the other has saved, and goes on as the one that saved. */
static void checkpoints_are_exchanged(void **state)
{
    const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP};
    const char *path = test_path("packed.safetensors");
    for (int k = 0; k < 2 * 4; k++) {
        trial a;
        trial b;
        tch_optim_config from = config_of(kinds[k / 4], &options[0], k & 1);
        tch_optim_config to = config_of(kinds[k / 4], &options[0], k >> 1 & 1);
        test_case("%s, packed %d to %d", tch_optim_kind_name(kinds[k / 4]), k & 1, k >> 1 & 1);
        trial_open(&a, *state, TCH_FLOAT32, TCH_FLOAT32, &from, SHAPES, shapes());
        trial_open(&b, *state, TCH_FLOAT32, TCH_FLOAT32, &to, SHAPES, shapes());
        trial_steps(&a, 5);
        trial_take_over(&b, &a, path);
        trial_steps(&a, 5);
        trial_steps(&b, 5);
        trial_check_same_parameters(&a, &b);
        trial_close(&a);
        trial_close(&b);
    }
}

/* Of 4 blocks of 1024 there are 8 factors. */
static void forecasts_know_it(void **state)
{
    int64_t shape[] = {2048, 2048};
    tch_tensor nothing = tch_tensor_view(NULL, TCH_FLOAT32, 2, shape);
    const tch_parameter entry = {.tensor = &nothing};
    int64_t bytes[2];
    for (int packed = 0; packed < 2; packed++) {
        tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
        tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
        c.packed_factors = packed;
        CHECK_OK(tch_optim_forecast(*state, &c, 1, &entry, &memory));
        bytes[packed] = memory.state;
    }
    double saved = 8.0 * 2.0 * 4.0 * 1024.0 * 1023.0 / 2.0;
    CHECK(fabs((double)(bytes[0] - bytes[1]) - saved) < 4096.0, "%lld bytes less, expected %.0f",
          (long long)(bytes[0] - bytes[1]), saved);
}

static void a_backend_that_cannot_pack(void **state)
{
    static table_copy table;
    tch_context *context = *state;
    const tch_backend *own = context->backend;
    tch_optimizer *optimizer = NULL;
    test_tensor *p = test_tensor_make(context, TCH_FLOAT32, 2, (const int64_t[]){4, 4}, LAYOUT_CONTIGUOUS);
    const tch_parameter entry = {.tensor = &p->tensor};
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO, &options[0], 1);
    test_tensor_write(p, test_zeros(16));
    table_copy_make(&table, own);
    table.matrix.pack = NULL;
    context->backend = &table.backend;
    tch_status status = tch_optimizer_create(context, &c, 1, &entry, &optimizer);
    context->backend = own;
    test_check_refused(status, TCH_ERR_UNSUPPORTED, "packed_factors");
    CHECK_OK(tch_optimizer_create(context, &c, 1, &entry, &optimizer));
    c.packed_factors = 0;
    test_check_refused(tch_optimizer_set_config(optimizer, 0, &c), TCH_ERR_INVALID_ARGUMENT, "packed_factors");
    tch_optimizer_destroy(optimizer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_numbers_are_the_same),
        cmocka_unit_test(checkpoints_are_exchanged),
        cmocka_unit_test(forecasts_know_it),
        cmocka_unit_test(a_backend_that_cannot_pack),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

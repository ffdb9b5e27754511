/* Shampoo's and SOAP's blocks in float16 where a backend takes them: the bits are those of blocks of float32, of which
 * copies are made later, with and without a filter, with a refresh in a step and without one, whatever lies transposed.
 * The other way is had by a table whose `gather` is told of factors in float64, which no product in float16 writes; the
 * notes that copies are scaled by are made all the same. Backends that keep the type come to the same twice. */
#include "core/context.h"
#include "core/status.h"
#include "support/backend/table_copy.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

/* Sizes and numbers of which a GPU of 132 multiprocessors takes both factors and both roots. */
static const trial_shape large[] = {
    {.ndim = 2, .shape = {1024, 1032}},
    {.ndim = 2, .shape = {1024, 1032}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {1032, 1024}, .order = {1, 0}},
    {.ndim = 2, .shape = {1024, 1032}},
};
static const trial_shape small[] = {
    {.ndim = 2, .shape = {24, 16}},
    {.ndim = 2, .shape = {24, 16}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {16, 24}, .order = {1, 0}},
    {.ndim = 2, .shape = {24, 16}},
};
#define SHAPES ((int32_t)(sizeof large / sizeof large[0]))

static const trial_option options[] = {
    {.name = "defaults"},
    {"without grafting", {SET(grafting, TCH_GRAFTING_NONE)}},
    {"without roots at first or a filter", {SET(beta1, 0), SET(start_preconditioning_step, 3)}},
    {"without a filter", {SET(beta1, 0)}},
    {"weight decay in gradients", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.1)}},
    {"momentum, every step", {SET(momentum, 0.9), SET(precondition_frequency, 1)}},
    {"packed factors", {SET(packed_factors, 1)}},
    {"packed factors, roots of bfloat16", {SET(packed_factors, 1), SET(root_dtype, TCH_STATE_BFLOAT16)}},
    {.name = NULL},
};

static const trial_option soap_options[] = {
    {.name = "SOAP"},
    {"SOAP, weight decay in gradients", {SET(decay, TCH_DECAY_L2), SET(weight_decay, 0.1)}},
    {"SOAP, packed factors, every step", {SET(packed_factors, 1), SET(precondition_frequency, 1)}},
    {.name = NULL},
};

static table_copy table;
static const tch_backend *real;
static int written; /* times that blocks had a type of the backend's */

static tch_status gather_with_sides(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    TCHI_TRY(real->update->gather(state, update, how, chosen));
    written += chosen != NULL && *chosen != update->block_type;
    return TCH_OK;
}

static tch_status gather_in_float32(void *state, const tch_update *update, const tch_gathering *how, tch_scalar *chosen)
{
    tch_gathering wide = *how;
    tch_block_sides sides;
    if (how->sides != NULL) {
        sides = *how->sides;
        sides.factors[0].type = TCH_SCALAR_F64;
        wide.sides = &sides;
    }
    TCHI_TRY(real->update->gather(state, update, &wide, chosen));
    CHECK(chosen == NULL || *chosen == update->block_type, "blocks have another type");
    return TCH_OK;
}

static void step_with(tch_context *context, trial *t, tch_gather_op *gather, int32_t steps)
{
    table_copy_make(&table, real);
    table.update.gather = gather;
    context->backend = &table.backend;
    for (int32_t i = 0; i < steps; i++) {
        const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
        trial_draw(t);
        trial_list_gradients(t, gradients);
        CHECK_OK(tch_optimizer_step(t->optimizer, t->count, gradients));
    }
    context->backend = real;
}

static bool is_hopper(const tch_context *context)
{
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    CHECK_OK(tch_device_info_get(tch_context_device(context), &info));
    return info.compute_major == 9;
}

static void check_options(tch_context *context, const tch_optim_config *config, const trial_option *of)
{
    const trial_shape *shapes = test_on_cpu() ? small : large;
    real = context->backend;
    for (const trial_option *option = of; option->name != NULL; option++) {
        static trial with, without;
        tch_optim_config c = *config;
        c.lr = 0.01;
        c.beta2 = 0.95;
        c.precondition_frequency = 3;
        trial_set(&c, option->settings);
        test_case("%s", option->name);
        written = 0;
        trial_open(&with, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        step_with(context, &with, gather_with_sides, 5);
        trial_open(&without, context, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        step_with(context, &without, gather_in_float32, 5);
        trial_check_same_parameters(&with, &without);
        CHECK(!is_hopper(context) || written > 0, "no block had another type");
        trial_close(&with);
        trial_close(&without);
    }
}

static void fp16_blocks_change_no_bit(void **state)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    c.grafting = TCH_GRAFTING_ADAM;
    c.relative_eps = 1e-6;
    check_options(*state, &c, options);
}

static void fp16_blocks_change_no_bit_of_soap(void **state)
{
    tch_optim_config c = test_optim_defaults(TCH_OPTIM_SOAP);
    c.block = 1;
    c.max_preconditioner_dim = 1024;
    check_options(*state, &c, soap_options);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(fp16_blocks_change_no_bit),
                                       cmocka_unit_test(fp16_blocks_change_no_bit_of_soap)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

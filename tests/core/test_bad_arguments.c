/* Bad arguments that are not tensors: every number outside its range, configs of another version, and tensors that
 * cannot be created. Each refusal has its status, names the argument, and leaves every tensor as it was. */
#include <math.h>
#include <string.h>

#include "support/linalg/operations.h"
#include "support/messages.h"
#include "support/testing.h"

static const test_operation *operation_named(const char *name)
{
    for (int32_t i = 0; i < test_operation_count(); i++) {
        if (strcmp(test_operations[i].name, name) == 0) {
            return &test_operations[i];
        }
    }
    fail_msg("no operation %s", name);
    return NULL;
}

static void try_root(test_call *call, tch_context *context, int32_t root, const tch_root_config *config,
                     const char *argument)
{
    tch_tensor *const *t = call->arguments;
    test_check_refused(tch_inverse_root(context, t[0], root, config, t[1], t[2], t[3]), TCH_ERR_INVALID_ARGUMENT,
                       argument);
    test_call_check_unchanged(call);
    tch_root_method method = (tch_root_method)-5;
    int64_t bytes = -5;
    test_check_refused(tch_inverse_root_plan(context, TCH_FLOAT32, 2, 6, root, config, &method, &bytes),
                       TCH_ERR_INVALID_ARGUMENT, argument);
    CHECK(method == (tch_root_method)-5 && bytes == -5, "the plan was written");
}

static void roots_that_are_not_offered(void **state)
{
    const int32_t roots[] = {0, -1, 5, 7, 9, 16, INT32_MAX, INT32_MIN};
    test_call call;
    test_call_make(&call, *state, operation_named("tch_inverse_root"), TCH_FLOAT32);
    for (size_t i = 0; i < sizeof roots / sizeof roots[0]; i++) {
        test_case("root %d", roots[i]);
        try_root(&call, *state, roots[i], NULL, "root");
    }
    test_call_free(&call);
}

static void root_configs_out_of_range(void **state)
{
    const double bad[] = {-1.0, -1e-300, NAN, INFINITY, -INFINITY};
    test_call call;
    test_call_make(&call, *state, operation_named("tch_inverse_root"), TCH_FLOAT32);
    for (int i = 0; i < 5; i++) {
        tch_root_config config = TCH_ROOT_CONFIG_INIT;
        test_case("%g", bad[i]);
        config.eps = bad[i];
        try_root(&call, *state, 2, &config, "eps");
        config = (tch_root_config)TCH_ROOT_CONFIG_INIT;
        config.relative_eps = bad[i];
        try_root(&call, *state, 2, &config, "relative_eps");
        config = (tch_root_config)TCH_ROOT_CONFIG_INIT;
        config.tolerance = bad[i];
        try_root(&call, *state, 2, &config, "tolerance");
    }
    test_call_free(&call);
}

static void root_configs_with_strange_choices(void **state)
{
    test_call call;
    test_call_make(&call, *state, operation_named("tch_inverse_root"), TCH_FLOAT32);
    const int strange[] = {-1, 4, 99};
    for (int i = 0; i < 3; i++) {
        tch_root_config config = TCH_ROOT_CONFIG_INIT;
        test_case("%d", strange[i]);
        config.method = (tch_root_method)strange[i];
        try_root(&call, *state, 2, &config, "method");
        config = (tch_root_config)TCH_ROOT_CONFIG_INIT;
        config.degree = strange[i];
        try_root(&call, *state, 2, &config, "degree");
    }
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    test_case("struct_size");
    config.struct_size = 0;
    try_root(&call, *state, 2, &config, "struct_size");
    config.struct_size = sizeof config + 8;
    try_root(&call, *state, 2, &config, "struct_size");
    test_call_free(&call);
}

static void plans_that_make_no_sense(void **state)
{
    tch_root_method method = (tch_root_method)-5;
    int64_t bytes = -5;
    tch_context *context = *state;
    test_case("plan");
    test_check_refused(tch_inverse_root_plan(NULL, TCH_FLOAT32, 1, 4, 2, NULL, &method, &bytes),
                       TCH_ERR_INVALID_ARGUMENT, "context");
    test_check_refused(tch_inverse_root_plan(context, TCH_INT32, 1, 4, 2, NULL, &method, &bytes), TCH_ERR_DTYPE,
                       "dtype");
    test_check_refused(tch_inverse_root_plan(context, TCH_FLOAT32, 1, -4, 2, NULL, &method, &bytes), TCH_ERR_SHAPE,
                       "n");
    test_check_refused(tch_inverse_root_plan(context, TCH_FLOAT32, -1, 4, 2, NULL, &method, &bytes), TCH_ERR_SHAPE,
                       "batch");
    test_check_refused(tch_inverse_root_plan(context, TCH_FLOAT32, 1, INT64_MAX / 2, 2, NULL, &method, &bytes),
                       TCH_ERR_SHAPE, "n");
    CHECK(method == (tch_root_method)-5 && bytes == -5, "the plan was written");
    CHECK_OK(tch_inverse_root_plan(context, TCH_FLOAT32, 1, 4, 2, NULL, NULL, NULL));
    /* The figure is per matrix, so that no batch is too large for it. */
    CHECK_OK(tch_inverse_root_plan(context, TCH_FLOAT32, INT64_MAX, 64, 2, NULL, NULL, &bytes));
    int64_t most = test_on_cpu() ? 1 << 20 : 1 << 22; /* cuSOLVER asks for 1.1 MB of its own */
    CHECK(bytes > 0 && bytes < most, "%lld bytes for a matrix of 16 KiB", (long long)bytes);
}

static void orthogonalisation_out_of_range(void **state)
{
    const int32_t steps[] = {0, -1, 101, INT32_MAX, INT32_MIN};
    tch_context *context = *state;
    test_call call;
    test_call_make(&call, context, operation_named("tch_orthogonalize"), TCH_FLOAT32);
    for (int i = 0; i < 5; i++) {
        test_case("%d steps", steps[i]);
        test_check_refused(tch_orthogonalize(context, call.arguments[0], steps[i], TCH_ORTHO_MUON, call.arguments[1]),
                           TCH_ERR_INVALID_ARGUMENT, "steps");
        test_call_check_unchanged(&call);
    }
    test_case("an unknown method");
    test_check_refused(tch_orthogonalize(context, call.arguments[0], 5, (tch_ortho_method)9, call.arguments[1]),
                       TCH_ERR_INVALID_ARGUMENT, "method");
    test_call_check_unchanged(&call);
    test_call_free(&call);
}

static void powers_out_of_range(void **state)
{
    const double bad[] = {-1.0, NAN, INFINITY};
    tch_context *context = *state;
    test_call call;
    test_call_make(&call, context, operation_named("tch_matrix_power"), TCH_FLOAT32);
    tch_tensor *const *t = call.arguments;
    for (int i = 0; i < 3; i++) {
        test_case("%g", bad[i]);
        test_check_refused(tch_matrix_power(context, t[0], 0.5, bad[i], t[1], t[2]), TCH_ERR_INVALID_ARGUMENT, "eps");
        if (i > 0) {
            test_check_refused(tch_matrix_power(context, t[0], bad[i], 0.1, t[1], t[2]), TCH_ERR_INVALID_ARGUMENT,
                               "power");
        }
        test_call_check_unchanged(&call);
    }
    test_call_free(&call);
}

static void dampings_out_of_range(void **state)
{
    const double bad[] = {-1.0, -1e-300, NAN, INFINITY};
    tch_context *context = *state;
    test_call call;
    test_call_make(&call, context, operation_named("tch_kronecker_solve"), TCH_FLOAT32);
    tch_tensor *const *t = call.arguments;
    for (int i = 0; i < 4; i++) {
        test_case("damping %g", bad[i]);
        test_check_refused(tch_kronecker_solve(context, t[0], t[1], t[2], bad[i], t[3], t[4]), TCH_ERR_INVALID_ARGUMENT,
                           "damping");
        test_call_check_unchanged(&call);
    }
    test_call_free(&call);
}

static void budgets_out_of_range(void **state)
{
    tch_context *context = *state;
    test_call call;
    test_call_make(&call, context, operation_named("tch_matmul_chunked"), TCH_FLOAT32);
    tch_tensor *const *t = call.arguments;
    test_case("a negative budget");
    test_check_refused(tch_matmul_chunked(context, t[0], t[1], -1, t[2]), TCH_ERR_INVALID_ARGUMENT, "memory_budget");
    test_call_check_unchanged(&call);
    test_call_free(&call);
}

static void methods_have_names(void **state)
{
    (void)state;
    assert_string_equal(tch_root_method_name(TCH_ROOT_AUTO), "auto");
    assert_string_equal(tch_root_method_name(TCH_ROOT_EIGEN), "eigen");
    assert_string_equal(tch_root_method_name(TCH_ROOT_NEWTON), "newton");
    assert_string_equal(tch_root_method_name(TCH_ROOT_RATIONAL), "rational");
    assert_non_null(tch_root_method_name((tch_root_method)77));
    assert_non_null(tch_root_method_name((tch_root_method)-1));
}

/* --- creation ---------------------------------------------------------------------------------------------------- */

static void impossible_creations(void **state)
{
    tch_context *context = *state;
    tch_tensor *t = NULL;
    const int64_t good[] = {2, 3};
    const int64_t negative[] = {2, -3};
    const int64_t huge[] = {INT64_MAX / 2, 3};
    const int64_t huge_bytes[] = {INT64_MAX / 4, 1};
    test_case("creation");
    test_check_refused(tch_tensor_create(NULL, TCH_FLOAT32, 2, good, TCH_CONTIGUOUS, &t), TCH_ERR_INVALID_ARGUMENT,
                       "context");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, NULL, TCH_CONTIGUOUS, &t), TCH_ERR_INVALID_ARGUMENT,
                       "shape");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, good, TCH_CONTIGUOUS, NULL), TCH_ERR_INVALID_ARGUMENT,
                       "tensor");
    test_check_refused(tch_tensor_create(context, (tch_dtype){9, 9, 9}, 2, good, TCH_CONTIGUOUS, &t), TCH_ERR_DTYPE,
                       "dtype");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, -1, good, TCH_CONTIGUOUS, &t), TCH_ERR_SHAPE, "ndim");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 9, good, TCH_CONTIGUOUS, &t), TCH_ERR_SHAPE, "ndim");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, negative, TCH_CONTIGUOUS, &t), TCH_ERR_SHAPE,
                       "shape");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, huge, TCH_CONTIGUOUS, &t), TCH_ERR_SHAPE, "shape");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT64, 2, huge_bytes, TCH_CONTIGUOUS, &t), TCH_ERR_SHAPE,
                       "shape");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, good, TCH_CHANNELS_LAST, &t), TCH_ERR_SHAPE, "ndim");
    test_check_refused(tch_tensor_create(context, TCH_FLOAT32, 2, good, (tch_memory_format)7, &t),
                       TCH_ERR_INVALID_ARGUMENT, "format");
    CHECK(t == NULL, "a tensor was made");
}

static void more_memory_than_there_is(void **state)
{
    tch_context *context = *state;
    tch_tensor *t = NULL;
    const int64_t shape[] = {(int64_t)1 << 40, 1 << 18};
    test_case("half an exabyte");
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT16, 2, shape, TCH_CONTIGUOUS, &t), TCH_ERR_OUT_OF_MEMORY);
    assert_true(strlen(tch_last_error()) > 0);
    assert_null(t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(roots_that_are_not_offered),
        cmocka_unit_test(root_configs_out_of_range),
        cmocka_unit_test(root_configs_with_strange_choices),
        cmocka_unit_test(plans_that_make_no_sense),
        cmocka_unit_test(orthogonalisation_out_of_range),
        cmocka_unit_test(powers_out_of_range),
        cmocka_unit_test(dampings_out_of_range),
        cmocka_unit_test(budgets_out_of_range),
        cmocka_unit_test(methods_have_names),
        cmocka_unit_test(impossible_creations),
        cmocka_unit_test(more_memory_than_there_is),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

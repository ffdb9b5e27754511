/* Invalid arguments other than tensors: out-of-range numbers, configs of another version, and tensors that cannot be
 * created. Each call returns its status, names the argument, and changes no tensor. */
#include "support/bad_input.h"
#include "support/linalg/operations.h"
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

#define FIELD(member) TEST_FIELD(tch_root_config, member)

static const test_range root_ranges[] = {
    {FIELD(eps), 0, 5, {-1.0, -1e-300, NAN, INFINITY, -INFINITY}},
    {FIELD(relative_eps), 0, 5, {-1.0, -1e-300, NAN, INFINITY, -INFINITY}},
    {FIELD(tolerance), 0, 5, {-1.0, -1e-300, NAN, INFINITY, -INFINITY}},
    {FIELD(method), 0, 3, {-1, 4, 99}},
    {FIELD(degree), 0, 3, {-1, 4, 99}},
    {FIELD(struct_size), 0, 2, {0, sizeof(tch_root_config) + 8}},
};

TEST(roots_out_of_range)
{
    const int32_t roots[] = {0, -1, 5, 7, 9, 16, INT32_MAX, INT32_MIN};
    test_call call;
    test_call_make(&call, *state, operation_named("tch_inverse_root"), TCH_FLOAT32);
    for (size_t i = 0; i < TEST_COUNT(roots); i++) {
        test_case("root %d", roots[i]);
        try_root(&call, *state, roots[i], NULL, "root");
    }
    for (size_t i = 0; i < TEST_COUNT(root_ranges); i++) {
        for (int k = 0; k < root_ranges[i].count; k++) {
            tch_root_config config = TCH_ROOT_CONFIG_INIT;
            test_case("%s = %g", root_ranges[i].field.name, root_ranges[i].bad[k]);
            test_field_set(&config, &root_ranges[i].field, root_ranges[i].bad[k]);
            try_root(&call, *state, 2, &config, root_ranges[i].field.name);
        }
    }
    test_call_free(&call);
}

TEST(plans_that_make_no_sense)
{
    static const struct {
        const char *name;
        tch_status expected;
        tch_dtype dtype;
        int64_t batch, n;
    } cases[] = {
        {"context", TCH_ERR_INVALID_ARGUMENT, {TCH_FLOAT, 32, 1}, 1, 4},
        {"dtype", TCH_ERR_DTYPE, {TCH_INT, 32, 1}, 1, 4},
        {"n", TCH_ERR_SHAPE, {TCH_FLOAT, 32, 1}, 1, -4},
        {"batch", TCH_ERR_SHAPE, {TCH_FLOAT, 32, 1}, -1, 4},
        {"n", TCH_ERR_SHAPE, {TCH_FLOAT, 32, 1}, 1, INT64_MAX / 2},
    };
    tch_root_method method = (tch_root_method)-5;
    int64_t bytes = -5;
    tch_context *context = *state;
    test_case("plan");
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_status got = tch_inverse_root_plan(i == 0 ? NULL : context, cases[i].dtype, cases[i].batch, cases[i].n, 2,
                                               NULL, &method, &bytes);
        test_check_refused(got, cases[i].expected, cases[i].name);
    }
    CHECK(method == (tch_root_method)-5 && bytes == -5, "the plan was written");
    CHECK_OK(tch_inverse_root_plan(context, TCH_FLOAT32, 1, 4, 2, NULL, NULL, NULL));
    /* The value is per matrix, so that no batch is too large for it. */
    CHECK_OK(tch_inverse_root_plan(context, TCH_FLOAT32, INT64_MAX, 64, 2, NULL, NULL, &bytes));
    int64_t most = test_on_cpu() ? 1 << 20 : 1 << 22; /* cuSOLVER needs 1.1 MB */
    CHECK(bytes > 0 && bytes < most, "%lld bytes for a matrix of 16 KiB", (long long)bytes);
}

/* A call with one invalid number. */
typedef struct number_case {
    const char *operation, *argument;
    double value;
} number_case;

static const number_case number_cases[] = {
    /* clang-format off */
    {"tch_orthogonalize", "steps", 0}, {"tch_orthogonalize", "steps", -1}, {"tch_orthogonalize", "steps", 101},
    {"tch_orthogonalize", "steps", INT32_MAX}, {"tch_orthogonalize", "steps", INT32_MIN},
    {"tch_orthogonalize", "method", 9},
    {"tch_matrix_power", "eps", -1.0}, {"tch_matrix_power", "eps", NAN}, {"tch_matrix_power", "eps", INFINITY},
    {"tch_matrix_power", "power", NAN}, {"tch_matrix_power", "power", INFINITY},
    {"tch_kronecker_solve", "damping", -1.0}, {"tch_kronecker_solve", "damping", -1e-300},
    {"tch_kronecker_solve", "damping", NAN}, {"tch_kronecker_solve", "damping", INFINITY},
    {"tch_matmul_chunked", "memory_budget", -1},
    /* clang-format on */
};

static double number_of(const number_case *c, const char *argument, double good)
{
    return strcmp(c->argument, argument) == 0 ? c->value : good;
}

static tch_status call_with(tch_context *context, const number_case *c, tch_tensor *const *t)
{
    if (strcmp(c->operation, "tch_orthogonalize") == 0) {
        return tch_orthogonalize(context, t[0], (int32_t)number_of(c, "steps", 5),
                                 (tch_ortho_method)number_of(c, "method", TCH_ORTHO_MUON), t[1]);
    }
    if (strcmp(c->operation, "tch_matrix_power") == 0) {
        return tch_matrix_power(context, t[0], number_of(c, "power", 0.5), number_of(c, "eps", 0.1), t[1], t[2]);
    }
    if (strcmp(c->operation, "tch_kronecker_solve") == 0) {
        return tch_kronecker_solve(context, t[0], t[1], t[2], c->value, t[3], t[4]);
    }
    return tch_matmul_chunked(context, t[0], t[1], (int64_t)c->value, t[2]);
}

TEST(numbers_out_of_range)
{
    for (size_t i = 0; i < TEST_COUNT(number_cases); i++) {
        const number_case *c = &number_cases[i];
        test_call call;
        test_call_make(&call, *state, operation_named(c->operation), TCH_FLOAT32);
        test_case("%s with %s = %g", c->operation, c->argument, c->value);
        test_check_refused(call_with(*state, c, call.arguments), TCH_ERR_INVALID_ARGUMENT, c->argument);
        test_call_check_unchanged(&call);
        test_call_free(&call);
    }
}

TEST(methods_have_names)
{
    assert_string_equal(tch_root_method_name(TCH_ROOT_AUTO), "auto");
    assert_string_equal(tch_root_method_name(TCH_ROOT_EIGEN), "eigen");
    assert_string_equal(tch_root_method_name(TCH_ROOT_NEWTON), "newton");
    assert_string_equal(tch_root_method_name(TCH_ROOT_RATIONAL), "rational");
    assert_non_null(tch_root_method_name((tch_root_method)77));
    assert_non_null(tch_root_method_name((tch_root_method)-1));
}

/* --- creation ---------------------------------------------------------------------------------------------------- */

TEST(impossible_creations)
{
    const int64_t good[] = {2, 3};
    const int64_t negative[] = {2, -3};
    const int64_t huge[] = {INT64_MAX / 2, 3};
    const int64_t huge_bytes[] = {INT64_MAX / 4, 1};
    const struct {
        const char *name;
        tch_status expected;
        tch_dtype dtype;
        int32_t ndim;
        const int64_t *shape;
        int format;
    } cases[] = {
        {"context", TCH_ERR_INVALID_ARGUMENT, TCH_FLOAT32, 2, good, TCH_CONTIGUOUS},
        {"tensor", TCH_ERR_INVALID_ARGUMENT, TCH_FLOAT32, 2, good, TCH_CONTIGUOUS},
        {"shape", TCH_ERR_INVALID_ARGUMENT, TCH_FLOAT32, 2, NULL, TCH_CONTIGUOUS},
        {"dtype", TCH_ERR_DTYPE, {9, 9, 9}, 2, good, TCH_CONTIGUOUS},
        {"ndim", TCH_ERR_SHAPE, TCH_FLOAT32, -1, good, TCH_CONTIGUOUS},
        {"ndim", TCH_ERR_SHAPE, TCH_FLOAT32, 9, good, TCH_CONTIGUOUS},
        {"shape", TCH_ERR_SHAPE, TCH_FLOAT32, 2, negative, TCH_CONTIGUOUS},
        {"shape", TCH_ERR_SHAPE, TCH_FLOAT32, 2, huge, TCH_CONTIGUOUS},
        {"shape", TCH_ERR_SHAPE, TCH_FLOAT64, 2, huge_bytes, TCH_CONTIGUOUS},
        {"ndim", TCH_ERR_SHAPE, TCH_FLOAT32, 2, good, TCH_CHANNELS_LAST},
        {"format", TCH_ERR_INVALID_ARGUMENT, TCH_FLOAT32, 2, good, 7},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_tensor *t = NULL;
        test_case("creation, row %d: %s", (int)i, cases[i].name);
        tch_status got = tch_tensor_create(i == 0 ? NULL : *state, cases[i].dtype, cases[i].ndim, cases[i].shape,
                                           (tch_memory_format)cases[i].format, i == 1 ? NULL : &t);
        test_check_refused(got, cases[i].expected, cases[i].name);
        CHECK(t == NULL, "a tensor was made");
    }
}

TEST_MAIN(test_open_context, test_close_context)

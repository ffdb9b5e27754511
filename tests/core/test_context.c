/* Contexts: device names, streams, threads, and the scratch limit. */
#include "support/elements.h"
#include "support/linalg/operations.h"
#include "support/linalg/reference.h"
#include "support/tensors.h"
#include "support/testing.h"

TEST(device_names_are_parsed)
{
    static const struct {
        const char *text;
        int32_t type, index;
    } good[] = {{"cpu", TCH_DEVICE_CPU, 0},     {"cpu:0", TCH_DEVICE_CPU, 0},   {"cuda", TCH_DEVICE_CUDA, 0},
                {"cuda:0", TCH_DEVICE_CUDA, 0}, {"cuda:1", TCH_DEVICE_CUDA, 1}, {"cuda:15", TCH_DEVICE_CUDA, 15}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        tch_device device = {-1, -1};
        test_case("%s", good[i].text);
        CHECK_OK(tch_device_parse(good[i].text, &device));
        CHECK(device.type == good[i].type && device.index == good[i].index, "parsed as %d:%d", device.type,
              device.index);
    }
}

TEST(wrong_device_names_are_refused)
{
    static const char *const bad[] = {"",
                                      "gpu",
                                      "CPU",
                                      "cuda:",
                                      "cuda:-1",
                                      "cuda:x",
                                      "cuda:1x",
                                      "cuda: 1",
                                      "cuda:+1",
                                      "cudas",
                                      "cuda:99999999999999999999",
                                      " cpu",
                                      "cpu ",
                                      "auto:1",
                                      "cuda1",
                                      "cuda:0x1",
                                      "cuda:1:2"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tch_device device = {-7, -7};
        tch_context *context = (tch_context *)&device;
        test_case("\"%s\"", bad[i]);
        CHECK(tch_device_parse(bad[i], &device) == TCH_ERR_INVALID_ARGUMENT, "accepted");
        CHECK(strstr(tch_last_error(), bad[i]) != NULL, "the message does not quote it: %s", tch_last_error());
        CHECK(device.type == -7 && device.index == -7, "device was written");
        CHECK(tch_context_create(bad[i], &context) == TCH_ERR_INVALID_ARGUMENT, "a context was made");
    }
}

TEST(auto_gives_a_working_context)
{
    tch_device parsed;
    tch_context *context = NULL;
    CHECK_OK(tch_device_parse("auto", &parsed));
    CHECK_OK(tch_context_create("auto", &context));
    tch_device device = tch_context_device(context);
    assert_int_equal(device.type, parsed.type);
    assert_int_equal(device.index, parsed.index);
    assert_true(tch_device_count((tch_device_type)device.type) > 0);
    tch_context_destroy(context);
}

TEST(absent_devices_have_a_reason)
{
    tch_context *context = NULL;
    assert_int_equal(tch_context_create("cpu:1", &context), TCH_ERR_UNAVAILABLE);
    assert_null(context);
    assert_non_null(strstr(tch_last_error(), "cpu:1"));
    if (tch_device_count(TCH_DEVICE_CUDA) == 0) {
        tch_device_info info = TCH_DEVICE_INFO_INIT;
        assert_int_equal(tch_context_create("cuda", &context), TCH_ERR_UNAVAILABLE);
        assert_non_null(strstr(tch_last_error(), "cuda"));
        assert_int_equal(tch_device_info_get((tch_device){TCH_DEVICE_CUDA, 0}, &info), TCH_ERR_UNAVAILABLE);
    }
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    assert_int_equal(tch_device_info_get((tch_device){TCH_DEVICE_CPU, 3}, &info), TCH_ERR_UNAVAILABLE);
    assert_int_equal(tch_device_info_get((tch_device){TCH_DEVICE_CPU, -1}, &info), TCH_ERR_UNAVAILABLE);
    assert_int_equal(tch_device_info_get((tch_device){12345, 0}, &info), TCH_ERR_UNAVAILABLE);
    assert_int_equal(tch_device_count((tch_device_type)99), 0);
}

TEST(null_arguments_are_refused)
{
    tch_context *context = *state;
    tch_device device;
    tch_context *made = NULL;
    assert_int_equal(tch_context_create(test_device(), NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "context"));
    assert_int_equal(tch_context_create(NULL, &made), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_device_parse(NULL, &device), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "text"));
    assert_int_equal(tch_device_parse("cpu", NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "device"));
    assert_int_equal(tch_context_synchronize(NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_context_set_stream(NULL, NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_context_set_workspace_limit(NULL, 1), TCH_ERR_INVALID_ARGUMENT);
    assert_null(tch_context_get_stream(NULL));
    assert_int_equal(tch_context_get_workspace_limit(NULL), 0);
    assert_int_equal(tch_context_device(NULL).type, 0);
    assert_int_equal(tch_device_info_get(tch_context_device(context), NULL), TCH_ERR_INVALID_ARGUMENT);
    tch_context_destroy(NULL);
}

TEST(structs_of_another_version_are_refused)
{
    tch_context *context = *state;
    tch_device_info device = {0};
    tch_backend_info backend = {0};
    device.struct_size = sizeof device - 8;
    assert_int_equal(tch_device_info_get(tch_context_device(context), &device), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "info"));
    assert_int_equal(tch_backend_info_get(0, &backend), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "info"));
    backend = (tch_backend_info)TCH_BACKEND_INFO_INIT;
    assert_int_equal(tch_backend_info_get(-1, &backend), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_backend_info_get(tch_backend_count(), &backend), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "index"));
    assert_int_equal(tch_backend_info_get(0, NULL), TCH_ERR_INVALID_ARGUMENT);
}

TEST(devices_are_described)
{
    tch_context *context = *state;
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    CHECK_OK(tch_device_info_get(tch_context_device(context), &info));
    assert_int_equal(info.struct_size, sizeof info);
    assert_true(strlen(info.name) > 0);
    assert_true(info.total_memory > 0);
    assert_true(info.free_memory > 0 && info.free_memory <= info.total_memory);
    assert_true(info.processors >= 1);
    if (test_on_cpu()) {
        assert_int_equal(info.compute_major, 0);
        assert_int_equal(info.compute_minor, 0);
    }
}

TEST(the_cpu_has_no_streams)
{
    tch_context *context = *state;
    int anything;
    CHECK_OK(tch_context_set_stream(context, NULL));
    CHECK_OK(tch_context_synchronize(context));
    if (test_on_cpu()) {
        tch_status status = tch_context_set_stream(context, &anything);
        assert_true(status == TCH_ERR_INVALID_ARGUMENT || status == TCH_ERR_UNSUPPORTED);
        assert_non_null(strstr(tch_last_error(), "stream"));
        assert_null(tch_context_get_stream(context));
    }
}

TEST(threads_can_be_counted_and_set)
{
    int32_t usual = tch_get_num_threads();
    assert_true(usual >= 1);
    CHECK_OK(tch_set_num_threads(3));
    assert_int_equal(tch_get_num_threads(), 3);
    assert_int_equal(tch_set_num_threads(0), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "count"));
    assert_int_equal(tch_set_num_threads(-2), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_set_num_threads(INT32_MAX), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_get_num_threads(), 3);
    CHECK_OK(tch_set_num_threads(usual));
}

/* --- the scratch limit ------------------------------------------------------------------------------------------- */

/* Bytes in use; the peak is reset. */
static int64_t begin_peak(tch_context *context)
{
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_trim(context, 0));
    CHECK_OK(tch_memory_get_info(context, &before));
    CHECK_OK(tch_memory_reset_peak(context));
    return before.allocated;
}

/* Bytes allocated at most since then, beyond those in use. */
static int64_t end_peak(tch_context *context, int64_t before)
{
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &after));
    return after.peak - before;
}

/* The first number in the message above the limit is the required number of bytes. */
static long long bytes_named(const char *message, long long limit)
{
    while (*message != '\0') {
        char *end;
        long long value = strtoll(message, &end, 10);
        if (end != message && value > limit) {
            return value;
        }
        message = end != message ? end : message + 1;
    }
    return 0;
}

/* Below some limit an operation fails and writes nothing; above it the result equals the unlimited one, within the
 * memory limit. */
static bool run_limited(tch_context *context, const test_call *call, int64_t limit)
{
    int64_t before = begin_peak(context);
    CHECK_OK(tch_context_set_workspace_limit(context, limit));
    tch_status status = test_call_run(call, context);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
    int64_t used = end_peak(context, before);
    CHECK(used <= limit, "%lld bytes with a limit of %lld", (long long)used, (long long)limit);
    CHECK(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY, "gave %s", tch_status_name(status));
    return status == TCH_OK;
}

/* Bitwise equal on the CPU, except for sums over the batch, which are rounded chunk by chunk. A GPU's libraries choose
 * algorithms by batch size, and eigenvectors have two signs. Otherwise magnitudes agree within the rounding of the
 * arithmetic, which these well-conditioned problems (kappa at most 100 after damping) magnify by a few hundred, and of
 * storing both. */
static bool agrees(const test_operation *operation, double got, double expected, double largest, tch_dtype dtype)
{
    double freedom = 500.0 * test_arithmetic_roundoff(dtype) + 2.0 * test_unit_roundoff(dtype);
    return test_on_cpu() && test_is_batched(operation) ? memcmp(&got, &expected, sizeof got) == 0
                                                       : fabs(fabs(got) - fabs(expected)) <= freedom * largest;
}

static void check_against(const test_call *call, double *const *expected, tch_dtype dtype)
{
    for (int32_t i = 0; i < call->operation->count; i++) {
        const test_operand *operand = &call->operation->operands[i];
        double *got = test_tensor_read(call->tensors[i]);
        double largest = fmax(ref_largest(call->tensors[i]->count, expected[i]), 1.0);
        for (int64_t k = 0; k < call->tensors[i]->count; k++) {
            CHECK(agrees(call->operation, got[k], expected[i][k], largest, dtype),
                  "element %lld of %s was %.17g and is %.17g", (long long)k, operand->name, expected[i][k], got[k]);
        }
    }
}

static bool try_limit(tch_context *context, const test_operation *operation, tch_dtype dtype, int64_t limit,
                      double *const *expected)
{
    test_call call;
    test_case("%s %s %s, limit %lld", operation->name, operation->variant, tch_dtype_name(dtype), (long long)limit);
    test_call_make(&call, context, operation, dtype);
    bool through = run_limited(context, &call, limit);
    if (through) {
        test_call_check_done(&call);
        check_against(&call, expected, dtype);
    } else {
        CHECK(bytes_named(tch_last_error(), limit - limit / 8) > 0, "the message does not say how much: %s",
              tch_last_error());
        test_call_check_unchanged(&call);
    }
    test_call_free(&call);
    return through;
}

static void limit_operation(tch_context *context, const test_operation *operation, tch_dtype dtype)
{
    test_call whole;
    double *expected[TEST_MAX_OPERANDS];
    test_call_make(&whole, context, operation, dtype);
    CHECK_OK(test_call_run(&whole, context));
    for (int32_t i = 0; i < operation->count; i++) {
        expected[i] = test_tensor_read(whole.tensors[i]);
    }
    int64_t asked = 1;
    bool through = false;
    /* The CPU's threads have their own scratch, as do a GPU's libraries. */
    int64_t most = test_on_cpu() ? ((int64_t)1 << 19) * (1 + tch_get_num_threads()) : (int64_t)1 << 26;
    for (int64_t limit = 1; limit <= most; limit += limit / 2 + 1) {
        bool enough = try_limit(context, operation, dtype, limit, expected);
        CHECK(enough || !through, "it was refused though less was enough");
        asked = enough ? asked : bytes_named(tch_last_error(), limit - limit / 8);
        through = enough;
    }
    CHECK(through, "%lld bytes are not enough", (long long)most);
    /* The pool rounds blocks up by at most an eighth. */
    CHECK(try_limit(context, operation, dtype, asked + asked / 7 + 1, expected), "what was asked for is not enough");
    test_call_free(&whole);
}

/* With a batch of five, which limits split into chunks of every size. */
TEST(every_operation_keeps_to_the_limit)
{
    static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_BFLOAT, 16, 1}};
    for (int32_t i = 0; i < test_operation_count(); i++) {
        test_operation operation = test_operations[i];
        for (int32_t k = 0; k < operation.count && test_is_batched(&operation); k++) {
            operation.operands[k].shape[0] = 5;
        }
        for (size_t d = 0; d < TEST_COUNT(dtypes); d++) {
            limit_operation(*state, &operation, dtypes[d]);
        }
    }
}

/* A limit below the current workspace takes effect at once, not at the next call. */
TEST(a_limit_shrinks_the_workspace)
{
    tch_context *context = *state;
    tch_memory_info before = TCH_MEMORY_INFO_INIT, grown = TCH_MEMORY_INFO_INIT, limited = TCH_MEMORY_INFO_INIT;
    const int64_t shape[] = {12, 48, 48};
    test_case("shrinking");
    test_tensor *a = test_tensor_make(context, TCH_FLOAT64, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *out = test_tensor_make(context, TCH_FLOAT64, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(a, test_zeros(a->count));
    CHECK_OK(tch_memory_trim(context, 0));
    CHECK_OK(tch_memory_get_info(context, &before));
    CHECK_OK(tch_matrix_power(context, &a->tensor, 0.5, 1.0, &out->tensor, NULL));
    CHECK_OK(tch_memory_get_info(context, &grown));
    CHECK(grown.allocated > before.allocated + 5000, "there is no workspace");
    CHECK_OK(tch_context_set_workspace_limit(context, 5000));
    CHECK_OK(tch_memory_get_info(context, &limited));
    CHECK(limited.allocated - before.allocated <= 5000, "%lld bytes are still held",
          (long long)(limited.allocated - before.allocated));
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
}

TEST(a_negative_limit_is_refused)
{
    tch_context *context = *state;
    CHECK_OK(tch_context_set_workspace_limit(context, 12345));
    assert_int_equal(tch_context_set_workspace_limit(context, -1), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "bytes"));
    assert_int_equal(tch_context_get_workspace_limit(context), 12345);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
}

TEST_MAIN(test_open_context, test_close_context)

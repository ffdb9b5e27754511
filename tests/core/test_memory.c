/* The memory pool: statistics, reuse, trimming, misuse, and the host allocator below it. */
#include "support/fakes/counting_allocator.h"
#include "support/linalg/operations.h"
#include "support/tensors.h"
#include "support/testing.h"

static tch_memory_info figures(tch_context *context)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &info));
    CHECK(info.allocated >= 0 && info.allocated <= info.reserved, "allocated %lld, reserved %lld",
          (long long)info.allocated, (long long)info.reserved);
    CHECK(info.peak >= info.allocated, "peak %lld, allocated %lld", (long long)info.peak, (long long)info.allocated);
    CHECK(info.misses <= info.requests, "misses %lld, requests %lld", (long long)info.misses, (long long)info.requests);
    return info;
}

TEST_WITH(figures_follow_allocation_and_release, test_open_context, test_close_context)
{
    tch_context *context = *state;
    void *first = NULL, *second = NULL;
    CHECK_OK(tch_memory_alloc(context, 100000, &first));
    tch_memory_info one = figures(context);
    assert_true(one.allocated >= 100000 && one.allocated <= 2 * 100000);
    assert_int_equal(one.requests, 1);
    assert_int_equal(one.misses, 1);
    CHECK_OK(tch_memory_alloc(context, 50000, &second));
    tch_memory_info two = figures(context);
    assert_true(two.allocated >= 150000);
    assert_int_equal(two.peak, two.allocated);
    CHECK_OK(tch_memory_free(context, first));
    CHECK_OK(tch_memory_free(context, second));
    tch_memory_info none = figures(context);
    assert_int_equal(none.allocated, 0);
    assert_int_equal(none.reserved, two.reserved);
    assert_int_equal(none.peak, two.peak);
}

TEST_WITH(blocks_in_use_do_not_overlap, test_open_context, test_close_context)
{
    tch_context *context = *state;
    enum { COUNT = 200 };
    uintptr_t start[COUNT];
    int64_t bytes[COUNT];
    for (int i = 0; i < COUNT; i++) {
        void *pointer = NULL;
        bytes[i] = 1 + (int64_t)i * i * 7 % 5000;
        CHECK_OK(tch_memory_alloc(context, bytes[i], &pointer));
        start[i] = (uintptr_t)pointer;
        CHECK(start[i] % 64 == 0, "%lld bytes at %p are not aligned to 64", (long long)bytes[i], pointer);
        for (int j = 0; j < i; j++) {
            CHECK(start[i] >= start[j] + (uintptr_t)bytes[j] || start[j] >= start[i] + (uintptr_t)bytes[i],
                  "blocks %d and %d overlap", i, j);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(tch_memory_free(context, (void *)start[(i * 37) % COUNT]));
    }
    assert_int_equal(figures(context).allocated, 0);
}

TEST_WITH(trimming_returns_what_is_kept, test_open_context, test_close_context)
{
    tch_context *context = *state;
    void *held = NULL, *pointers[8];
    CHECK_OK(tch_memory_alloc(context, 1 << 16, &held));
    for (int i = 0; i < 8; i++) {
        CHECK_OK(tch_memory_alloc(context, 1 << 18, &pointers[i]));
    }
    for (int i = 0; i < 8; i++) {
        CHECK_OK(tch_memory_free(context, pointers[i]));
    }
    CHECK_OK(tch_memory_trim(context, 1 << 20));
    tch_memory_info some = figures(context);
    assert_true(some.reserved - some.allocated <= 1 << 20);
    assert_true(some.reserved - some.allocated > 0);
    CHECK_OK(tch_memory_trim(context, 0));
    tch_memory_info none = figures(context);
    assert_int_equal(none.reserved, none.allocated);
    assert_true(none.allocated >= 1 << 16);
    CHECK_OK(tch_memory_free(context, held));
    CHECK_OK(tch_memory_trim(context, 0));
    assert_int_equal(figures(context).reserved, 0);
}

TEST_WITH(the_peak_can_start_again, test_open_context, test_close_context)
{
    tch_context *context = *state;
    void *held = NULL, *pointer = NULL;
    CHECK_OK(tch_memory_alloc(context, 1 << 12, &held));
    CHECK_OK(tch_memory_alloc(context, 1 << 20, &pointer));
    CHECK_OK(tch_memory_free(context, pointer));
    assert_true(figures(context).peak >= 1 << 20);
    CHECK_OK(tch_memory_reset_peak(context));
    assert_true(figures(context).peak >= 1 << 12);
    assert_int_equal(figures(context).peak, figures(context).allocated);
    CHECK_OK(tch_memory_free(context, held));
}

TEST_WITH(nothing_is_allocated_in_a_steady_state, test_open_context, test_close_context)
{
    tch_context *context = *state;
    for (int32_t i = 0; i < test_operation_count(); i++) {
        test_call call;
        test_case("%s %s", test_operations[i].name, test_operations[i].variant);
        test_call_make(&call, context, &test_operations[i], TCH_FLOAT32);
        CHECK_OK(test_call_run(&call, context));
        tch_memory_info first = figures(context);
        for (int repeat = 0; repeat < 3; repeat++) {
            CHECK_OK(test_call_run(&call, context));
        }
        tch_memory_info last = figures(context);
        CHECK(last.misses == first.misses, "%lld more trips to the device", (long long)(last.misses - first.misses));
        CHECK(last.allocated == first.allocated && last.reserved == first.reserved, "memory grew");
        test_call_free(&call);
    }
    CHECK_OK(tch_memory_trim(context, 0));
    tch_memory_info end = figures(context);
    CHECK(end.allocated == 0 && end.reserved == 0, "%lld bytes are left", (long long)end.reserved);
}

TEST_WITH(mistakes_are_refused, test_open_context, test_close_context)
{
    tch_context *context = *state;
    int local;
    void *pointer = &local;
    CHECK_OK(tch_memory_alloc(context, 0, &pointer));
    assert_null(pointer);
    CHECK_OK(tch_memory_free(context, NULL));
    assert_int_equal(tch_memory_alloc(context, -1, &pointer), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "bytes"));
    assert_int_equal(tch_memory_alloc(context, 1, NULL), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "pointer"));
    assert_int_equal(tch_memory_alloc(NULL, 1, &pointer), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_memory_free(context, &local), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "pointer"));
    CHECK_OK(tch_memory_alloc(context, 1000, &pointer));
    assert_int_equal(tch_memory_free(context, (char *)pointer + 64), TCH_ERR_INVALID_ARGUMENT);
    CHECK_OK(tch_memory_free(context, pointer));
    assert_int_equal(tch_memory_free(context, pointer), TCH_ERR_INVALID_ARGUMENT);
    assert_int_equal(tch_memory_trim(context, -1), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "keep"));
    assert_int_equal(tch_memory_get_info(context, NULL), TCH_ERR_INVALID_ARGUMENT);
    tch_memory_info wrong = {0};
    assert_int_equal(tch_memory_get_info(context, &wrong), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "info"));
}

TEST_WITH(another_contexts_pointer_is_refused, test_open_context, test_close_context)
{
    tch_context *context = *state;
    tch_context *other = NULL;
    void *pointer = NULL;
    CHECK_OK(tch_context_create(test_device(), &other));
    CHECK_OK(tch_memory_alloc(other, 1000, &pointer));
    assert_int_equal(tch_memory_free(context, pointer), TCH_ERR_INVALID_ARGUMENT);
    CHECK_OK(tch_memory_free(other, pointer));
    tch_context_destroy(other);
}

/* Half an exabyte: no machine has it, and intermediate products must not wrap. */
TEST_WITH(more_than_there_is_is_out_of_memory, test_open_context, test_close_context)
{
    tch_context *context = *state;
    void *pointer = NULL;
    tch_memory_info before = figures(context);
    assert_int_equal(tch_memory_alloc(context, (int64_t)1 << 59, &pointer), TCH_ERR_OUT_OF_MEMORY);
    assert_true(strlen(tch_last_error()) > 0);
    tch_status status = tch_memory_alloc(context, INT64_MAX, &pointer);
    assert_true(status == TCH_ERR_OUT_OF_MEMORY || status == TCH_ERR_INVALID_ARGUMENT);
    tch_memory_info after = figures(context);
    assert_int_equal(after.allocated, before.allocated);
    CHECK_OK(tch_memory_alloc(context, 1000, &pointer));
    CHECK_OK(tch_memory_free(context, pointer));
}

TEST(tensors_outlive_their_context)
{
    tch_context *context = NULL;
    tch_tensor *t = NULL;
    const int64_t shape[] = {100};
    CHECK_OK(tch_context_create(test_device(), &context));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 1, shape, TCH_CONTIGUOUS, &t));
    CHECK_OK(tch_tensor_fill(context, t, 2.0));
    tch_context_destroy(context);
    tch_context *other = NULL;
    double values[100];
    int64_t count = 100;
    CHECK_OK(tch_context_create(test_device(), &other));
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 1, &count);
    CHECK_OK(tch_tensor_copy(other, &host, t));
    CHECK_OK(tch_context_synchronize(other));
    for (int i = 0; i < 100; i++) {
        CHECK(values[i] == 2.0, "element %d is %g", i, values[i]);
    }
    tch_tensor_destroy(t);
    tch_context_destroy(other);
}

/* --- the host allocator ------------------------------------------------------------------------------------------ */

TEST(all_host_memory_comes_from_the_callers_allocator)
{
    counting_allocator counting = {0};
    tch_host_allocator allocator = counting_allocator_interface(&counting);
    tch_context *context = NULL;
    (void)tch_backend_count();
    CHECK_OK(tch_set_host_allocator(&allocator));
    CHECK_OK(tch_context_create(test_device(), &context));
    assert_true(atomic_load(&counting.bytes) > 0);
    for (int32_t i = 0; i < test_operation_count(); i++) {
        test_call call;
        test_case("%s %s", test_operations[i].name, test_operations[i].variant);
        test_call_make(&call, context, &test_operations[i], TCH_FLOAT32);
        CHECK_OK(test_call_run(&call, context));
        test_call_free(&call);
    }
    if (test_on_cpu()) {
        CHECK(atomic_load(&counting.bytes) >= figures(context).reserved, "the pool's memory came from elsewhere");
    }
    tch_context_destroy(context);
    assert_int_equal(atomic_load(&counting.bytes), 0);
    assert_int_equal(atomic_load(&counting.blocks), 0);
    assert_int_equal(atomic_load(&counting.mistakes), 0);
    CHECK_OK(tch_set_host_allocator(NULL));
}

TEST(the_allocator_is_not_changed_under_a_context)
{
    counting_allocator counting = {0};
    tch_host_allocator allocator = counting_allocator_interface(&counting);
    tch_context *context = NULL;
    CHECK_OK(tch_context_create(test_device(), &context));
    assert_int_equal(tch_set_host_allocator(&allocator), TCH_ERR_INVALID_ARGUMENT);
    assert_true(strlen(tch_last_error()) > 0);
    assert_int_equal(tch_set_host_allocator(NULL), TCH_ERR_INVALID_ARGUMENT);
    const int64_t shape[] = {4};
    tch_tensor *t = NULL;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &t));
    tch_context_destroy(context);
    assert_int_equal(tch_set_host_allocator(&allocator), TCH_ERR_INVALID_ARGUMENT);
    tch_tensor_destroy(t);
    CHECK_OK(tch_set_host_allocator(&allocator));
    CHECK_OK(tch_set_host_allocator(NULL));
    assert_int_equal(atomic_load(&counting.calls), 0);
}

TEST(broken_allocators_are_refused)
{
    counting_allocator counting = {0};
    tch_host_allocator allocator = counting_allocator_interface(&counting);
    allocator.struct_size = 8;
    assert_int_equal(tch_set_host_allocator(&allocator), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "struct_size"));
    allocator = counting_allocator_interface(&counting);
    allocator.allocate = NULL;
    assert_int_equal(tch_set_host_allocator(&allocator), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "allocate"));
    allocator = counting_allocator_interface(&counting);
    allocator.release = NULL;
    assert_int_equal(tch_set_host_allocator(&allocator), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "release"));
}

TEST_MAIN(NULL, NULL)

/* Status codes, their names, and the thread's message. */
#include "support/testing.h"

/* The numbers are part of the binary interface: bindings in other languages contain them. */
TEST(numbers_do_not_move)
{
    assert_int_equal(TCH_OK, 0);
    assert_int_equal(TCH_ERR_INVALID_ARGUMENT, 1);
    assert_int_equal(TCH_ERR_SHAPE, 2);
    assert_int_equal(TCH_ERR_DTYPE, 3);
    assert_int_equal(TCH_ERR_DEVICE, 4);
    assert_int_equal(TCH_ERR_LAYOUT, 5);
    assert_int_equal(TCH_ERR_UNAVAILABLE, 6);
    assert_int_equal(TCH_ERR_UNSUPPORTED, 7);
    assert_int_equal(TCH_ERR_OUT_OF_MEMORY, 8);
    assert_int_equal(TCH_ERR_NUMERIC, 9);
    assert_int_equal(TCH_ERR_BACKEND, 10);
    assert_int_equal(TCH_ERR_IO, 11);
    assert_int_equal(TCH_ERR_INTERNAL, 12);
    assert_int_equal(TCH_ERR_COMM, 13);
    assert_int_equal(TCH_STATUS_COUNT, 14);
}

TEST(every_status_has_a_name_and_a_text)
{
    assert_string_equal(tch_status_name(TCH_OK), "TCH_OK");
    assert_string_equal(tch_status_name(TCH_ERR_SHAPE), "TCH_ERR_SHAPE");
    assert_string_equal(tch_status_name(TCH_ERR_INTERNAL), "TCH_ERR_INTERNAL");
    for (int i = 0; i < TCH_STATUS_COUNT; i++) {
        for (int j = 0; j < i; j++) {
            assert_string_not_equal(tch_status_name((tch_status)i), tch_status_name((tch_status)j));
            assert_string_not_equal(tch_status_text((tch_status)i), tch_status_text((tch_status)j));
        }
        assert_true(strlen(tch_status_text((tch_status)i)) > 0);
    }
}

TEST(numbers_that_are_no_status_are_harmless)
{
    const int wild[] = {-1, TCH_STATUS_COUNT, 1000, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof wild / sizeof wild[0]; i++) {
        tch_status status;
        memcpy(&status, &wild[i], sizeof status);
        assert_string_equal(tch_status_name(status), "unknown status");
        assert_non_null(tch_status_text(status));
    }
}

TEST(message_stays_until_the_next_failure)
{
    char first[512];
    tch_device device;
    tch_clear_error();
    assert_string_equal(tch_last_error(), "");
    assert_int_equal(tch_device_parse("toaster", &device), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "toaster"));
    snprintf(first, sizeof first, "%s", tch_last_error());
    assert_int_equal(tch_device_parse("cpu", &device), TCH_OK);
    assert_string_equal(tch_last_error(), first);
    assert_int_equal(tch_device_parse("kettle", &device), TCH_ERR_INVALID_ARGUMENT);
    assert_non_null(strstr(tch_last_error(), "kettle"));
    tch_clear_error();
    assert_string_equal(tch_last_error(), "");
}

/* A message is truncated, never overrun, if an argument is too long. */
TEST(long_arguments_do_not_overrun_the_message)
{
    static char longest[100000];
    tch_device device;
    memset(longest, 'x', sizeof longest - 1);
    assert_int_equal(tch_device_parse(longest, &device), TCH_ERR_INVALID_ARGUMENT);
    assert_true(strlen(tch_last_error()) > 0);
    assert_true(strlen(tch_last_error()) < 4096);
}

TEST(the_library_has_the_headers_version)
{
    char expected[32];
    snprintf(expected, sizeof expected, "%d.%d.%d", TCH_VERSION_MAJOR, TCH_VERSION_MINOR, TCH_VERSION_PATCH);
    assert_string_equal(TCH_VERSION_STRING, expected);
    assert_string_equal(tch_version(), expected);
}

TEST_MAIN(NULL, NULL)

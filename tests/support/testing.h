/* Shared by all test programs: the device and seed, a context, and failure messages with the case and how to repeat it.
 * Tests use the public API and never access device memory directly, so that one program tests every backend. */
#ifndef TORCHIUM_TESTS_TESTING_H
#define TORCHIUM_TESTS_TESTING_H

/* cmocka.h needs the first four before it; most tests use the others. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <torchium/torchium.h>

/* The exit status of a skipped test in ctest. */
#define TEST_SKIPPED 77

/* Called first in every main. Reads the device from the first argument or TORCHIUM_TEST_DEVICE ("cpu" by default), a
 * pattern of tests from the second, and the seed from TORCHIUM_TEST_SEED. If the device is unusable the program exits
 * here with the reason and TEST_SKIPPED, or fails with TORCHIUM_TEST_REQUIRE_DEVICE, for machines that must have it. */
void test_begin(int argc, char **argv);

const char *test_device(void);

/* Names the current case for failure messages. */
void test_case(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the case, the seed and the message, and fails the test. Only on the test's thread. */
_Noreturn void test_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            test_fail(__FILE__, __LINE__, __VA_ARGS__);                                                                \
    } while (0)

#define CHECK_OK(call)                                                                                                 \
    do {                                                                                                               \
        tch_status status_ = (call);                                                                                   \
        CHECK(status_ == TCH_OK, "%s gave %s: %s", #call, tch_status_name(status_), tch_last_error());                 \
    } while (0)

/* Marks reference functions, loops over the test's own arrays that take most of the time under sanitizers: see
 * support/CMakeLists.txt. They do not call the library. */
#define TEST_REFERENCE __attribute__((no_sanitize("address", "undefined")))

#define TEST_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Fixtures for cmocka groups: *state is a tch_context on the device under test. */
int test_open_context(void **state);
int test_close_context(void **state);

/* True if the device's tensors are in host memory. */
int test_on_cpu(void);

/* True if the device supports the method: backends without shifted_inverse have no rational method, and its tests are
 * skipped. The CPU supports every method. */
int test_offers_method(tch_root_method method);

/* Resources of a test are released after it, passed or failed, in reverse order. test_alloc is malloc that fails the
 * test instead of returning NULL; test_drop releases early, to limit memory, and test_keep transfers ownership to the
 * caller, who uses free. test_own registers anything else with its release function. Callable from any thread. */
void *test_alloc(size_t bytes);
double *test_zeros(int64_t count);
void test_drop(void *pointer);
void *test_keep(void *pointer);
void test_own(void *thing, void (*release)(void *thing));

/* Releases everything acquired since the mark: to limit memory, or if its owner ends before the test. */
size_t test_mark(void);
void test_release_since(size_t mark);

/* The teardown of TEST; other teardowns call it, and so does closing a context. */
int test_release(void **state);

/* `TEST(what_holds) { ... }` defines a test with the parameter `void **state` and registers it with its file; tests run
 * in the order of their lines. TEST_WITH has its own fixtures. TEST_ALONE runs after the others, outside the file's
 * fixtures. */
#define TEST(test) TEST_WITH(test, NULL, test_release)
#define TEST_WITH(test, setup, teardown) TEST_ADDED(test, setup, teardown, 0)
#define TEST_ALONE(test, setup, teardown) TEST_ADDED(test, setup, teardown, 1)
#define TEST_ADDED(test, setup, teardown, alone)                                                                       \
    static void test(void **state);                                                                                    \
    __attribute__((constructor)) static void test_add_##test(void)                                                     \
    {                                                                                                                  \
        test_add(__FILE__, __LINE__, alone, (struct CMUnitTest){#test, test, setup, teardown, NULL});                  \
    }                                                                                                                  \
    static void test(void **state)

/* The main of a file whose tests need no other: *state is set by `setup`. */
#define TEST_MAIN(setup, teardown)                                                                                     \
    int main(int argc, char **argv)                                                                                    \
    {                                                                                                                  \
        test_begin(argc, argv);                                                                                        \
        return test_run(__FILE__, setup, teardown);                                                                    \
    }

void test_add(const char *file, int line, int alone, struct CMUnitTest test);

/* Runs the tests of a file; returns how many failed, for main. */
int test_run(const char *file, CMFixtureFunction setup, CMFixtureFunction teardown);

#endif

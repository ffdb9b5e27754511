/* What every test program shares: the device and seed it was asked for, a context, and failures that say which case
 * broke and how to repeat it. Tests are written against the public API and never touch device memory themselves, so
 * that the same program checks every backend. */
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

/* The exit status that says "not run here"; ctest shows such a test as skipped. */
#define TEST_SKIPPED 77

/* Reads the device from the first argument or TORCHIUM_TEST_DEVICE ("cpu" if neither is given), a pattern of tests to
 * run from the second, and the seed from TORCHIUM_TEST_SEED. The first line of every main. Where the device cannot be
 * used the program ends here, with the reason and TEST_SKIPPED; with TORCHIUM_TEST_REQUIRE_DEVICE set, on machines that
 * must have it, it fails instead. */
void test_begin(int argc, char **argv);

const char *test_device(void);

/* Says which case runs now; a failure prints it. */
void test_case(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the case, the seed and the message, and ends the test. Only on the test's own thread. */
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

/* Marks a function that computes what is expected, by loops over the test's own arrays that take most of a sanitized
 * run: what support/CMakeLists.txt says of the references. Calls of the library stay outside. */
#define TEST_REFERENCE __attribute__((no_sanitize("address", "undefined")))

#define TEST_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Fixtures for cmocka groups: *state is a tch_context on the device under test. */
int test_open_context(void **state);
int test_close_context(void **state);

/* True when the device under test keeps its tensors in memory of the host. */
int test_on_cpu(void);

/* True when the device under test offers the method: the rational one is left out by backends without
 * shifted_inverse, and tests of it are then left out too. The CPU offers every method. */
int test_offers_method(tch_root_method method);

/* What a test takes is its own, and is given back after it, whether it passed or not, the latest first. test_alloc is
 * malloc that fails the test instead of returning NULL; test_drop gives back earlier, where much would come together,
 * and test_keep makes it the caller's, to be freed with free. test_own takes anything else, with the way to release it.
 * All may be called from any thread. */
void *test_alloc(size_t bytes);
double *test_zeros(int64_t count);
void test_drop(void *pointer);
void *test_keep(void *pointer);
void test_own(void *thing, void (*release)(void *thing));

/* Gives back what was taken since the mark: where cases of one test would need too much together, or what the memory
 * belongs to ends before the test does. */
size_t test_mark(void);
void test_release_since(size_t mark);

/* The teardown of TEST; other teardowns call it, and closing a context does so as well. */
int test_release(void **state);

/* Tests. `TEST(what_holds) { ... }` defines a test with the parameter `void **state` and adds it to those of its file,
 * which run in the order of their lines. TEST_WITH has fixtures of its own. TEST_ALONE runs after the others, outside
 * the fixtures of the file. */
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

/* The main of a file whose tests need no other: *state is what `setup` leaves there. */
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

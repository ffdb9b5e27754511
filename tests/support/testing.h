/* What every test program shares: the device and seed it was asked for, a context, and failures that say which case
 * broke and how to repeat it. Tests are written against the public API and never touch device memory themselves, so
 * that the same program checks every backend. */
#ifndef TORCHIUM_TESTS_TESTING_H
#define TORCHIUM_TESTS_TESTING_H

/* cmocka.h wants these four before it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <torchium/torchium.h>

/* The exit status that says "not run here"; ctest shows such a test as skipped. */
#define TEST_SKIPPED 77

/* Reads the device from the first argument or TORCHIUM_TEST_DEVICE ("cpu" if neither is given) and the seed from
 * TORCHIUM_TEST_SEED. The first line of every main. Where the device cannot be used the program ends here, with the
 * reason and TEST_SKIPPED; with TORCHIUM_TEST_REQUIRE_DEVICE set, on machines that must have it, it fails instead. */
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

/* The teardown of every test that has none of its own, which calls it; closing a context does so as well. */
int test_release(void **state);

#undef cmocka_unit_test
#define cmocka_unit_test(test) cmocka_unit_test_teardown(test, test_release)

#endif

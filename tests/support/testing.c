/* State is per process and set once in main, except the case's name, which is per thread. */
#include "testing.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

static const char *device_name = "cpu";
static char case_name[512];
static int offers_rational = 1;

static int is_offered(tch_context *context, tch_root_method method)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = method;
    config.relative_eps = 1e-3;
    return tch_inverse_root_plan(context, TCH_FLOAT32, 1, 4, 4, &config, NULL, NULL) != TCH_ERR_UNSUPPORTED;
}

/* The CPU is always available, and not queried before the tests: one of them must be the first to do so. */
static void look_at_device(void)
{
    tch_context *context = NULL;
    if (test_on_cpu()) {
        return;
    }
    if (tch_context_create(device_name, &context) == TCH_ERR_UNAVAILABLE) {
        int required = getenv("TORCHIUM_TEST_REQUIRE_DEVICE") != NULL;
        printf("%s: %s cannot be used here: %s\n", required ? "failed" : "skipped", device_name, tch_last_error());
        exit(required ? EXIT_FAILURE : TEST_SKIPPED);
    }
    offers_rational = context == NULL || is_offered(context, TCH_ROOT_RATIONAL);
    tch_context_destroy(context);
}

void test_begin(int argc, char **argv)
{
    const char *device = argc > 1 ? argv[1] : getenv("TORCHIUM_TEST_DEVICE");
    if (device != NULL && device[0] != '\0') {
        device_name = device;
    }
    const char *seed = getenv("TORCHIUM_TEST_SEED");
    if (seed != NULL && seed[0] != '\0') {
        test_random_set_seed(strtoull(seed, NULL, 0));
    }
    if (argc > 2) {
        cmocka_set_test_filter(argv[2]);
    }
    look_at_device();
}

const char *test_device(void)
{
    return device_name;
}

int test_on_cpu(void)
{
    return strcmp(device_name, "cpu") == 0;
}

int test_offers_method(tch_root_method method)
{
    return method != TCH_ROOT_RATIONAL || offers_rational;
}

void test_case(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(case_name, sizeof case_name, format, arguments);
    va_end(arguments);
}

void test_fail(const char *file, int line, const char *format, ...)
{
    char message[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    print_error("case: %s\n%s\nrepeat with TORCHIUM_TEST_SEED=%llu on device %s\n", case_name, message,
                (unsigned long long)test_random_seed(), device_name);
    _fail(file, line);
    abort(); /* unreachable: _fail leaves by longjmp */
}

int test_open_context(void **state)
{
    tch_context *context = NULL;
    case_name[0] = '\0';
    if (tch_context_create(device_name, &context) != TCH_OK) {
        print_error("no context on %s: %s\n", device_name, tch_last_error());
        return -1;
    }
    *state = context;
    return 0;
}

int test_close_context(void **state)
{
    test_release(state);
    tch_context_destroy(*state);
    *state = NULL;
    return 0;
}

/* --- resources of the running test ------------------------------------------------------------------------------- */

typedef struct owned {
    void *thing; /* NULL if it was released early */
    void (*release)(void *thing);
} owned;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static owned *list;
static size_t listed, room;

void test_own(void *thing, void (*release)(void *thing))
{
    pthread_mutex_lock(&lock);
    if (listed == room) {
        room = 2 * room + 64;
        list = realloc(list, room * sizeof *list);
    }
    if (list == NULL) {
        abort();
    }
    list[listed++] = (owned){thing, release};
    pthread_mutex_unlock(&lock);
}

/* Resources released early are mostly recent. */
void *test_keep(void *thing)
{
    pthread_mutex_lock(&lock);
    size_t i = listed;
    while (i > 0 && list[i - 1].thing != thing) {
        i--;
    }
    bool found = i > 0;
    if (found) {
        list[i - 1].thing = NULL;
    }
    while (listed > 0 && list[listed - 1].thing == NULL) {
        listed--;
    }
    pthread_mutex_unlock(&lock);
    CHECK(found, "the test does not own what it gives away");
    return thing;
}

void *test_alloc(size_t bytes)
{
    void *pointer = malloc(bytes > 0 ? bytes : 1);
    CHECK(pointer != NULL, "the test itself has no memory for %zu bytes", bytes);
    test_own(pointer, free);
    return pointer;
}

double *test_zeros(int64_t count)
{
    double *values = test_alloc((size_t)count * sizeof *values);
    memset(values, 0, (size_t)count * sizeof *values);
    return values;
}

void test_drop(void *pointer)
{
    if (pointer != NULL) {
        free(test_keep(pointer));
    }
}

size_t test_mark(void)
{
    return listed;
}

void test_release_since(size_t mark)
{
    while (listed > mark) {
        owned last = list[--listed];
        if (last.thing != NULL) {
            last.release(last.thing);
        }
    }
}

int test_release(void **state)
{
    test_release_since(0);
    free(list);
    list = NULL;
    room = 0;
    return 0;
}

/* --- the tests of each file -------------------------------------------------------------------------------------- */

static struct {
    const char *file;
    int line, alone;
    struct CMUnitTest test;
} tests[200];
static size_t test_count;

void test_add(const char *file, int line, int alone, struct CMUnitTest test)
{
    size_t at = test_count++;
    if (at == TEST_COUNT(tests)) {
        abort();
    }
    for (; at > 0 && tests[at - 1].line > line; at--) {
        tests[at] = tests[at - 1];
    }
    tests[at].file = file;
    tests[at].line = line;
    tests[at].alone = alone;
    tests[at].test = test;
}

static size_t select_tests(const char *file, int alone, struct CMUnitTest *selected)
{
    size_t count = 0;
    for (size_t i = 0; i < test_count; i++) {
        if (tests[i].alone == alone && strcmp(tests[i].file, file) == 0) {
            selected[count++] = tests[i].test;
        }
    }
    return count;
}

int test_run(const char *file, CMFixtureFunction setup, CMFixtureFunction teardown)
{
    struct CMUnitTest selected[TEST_COUNT(tests)];
    size_t count = select_tests(file, 0, selected);
    int failed = _cmocka_run_group_tests(file, selected, count, setup, teardown);
    size_t alone = select_tests(file, 1, selected);
    if (alone > 0) {
        failed += _cmocka_run_group_tests(file, selected, alone, NULL, NULL);
    }
    return count == 0 ? EXIT_FAILURE : failed;
}

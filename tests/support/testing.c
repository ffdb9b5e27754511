/* The state here is per process and set once in main, except the case's name, which belongs to the test's thread. */
#include "testing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random.h"

static const char *device_name = "cpu";
static char case_name[512];

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
}

const char *test_device(void)
{
    return device_name;
}

int test_on_cpu(void)
{
    return strcmp(device_name, "cpu") == 0;
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
    abort(); /* not reached: _fail leaves by longjmp */
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
    tch_context_destroy(*state);
    *state = NULL;
    return 0;
}

void *test_alloc(size_t bytes)
{
    void *pointer = malloc(bytes > 0 ? bytes : 1);
    CHECK(pointer != NULL, "the test itself has no memory for %zu bytes", bytes);
    return pointer;
}

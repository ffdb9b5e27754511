/* Kernels of the cache and the files that the compiler found by itself, with the real compiler of the CPU: a header
 * that the library was not told of changes, and so does the kernel. Then the parts: the compiler's list of files, and
 * what is known of a file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/tensors.h"
#include "support/testing.h"

static const char *const variables[] = {"CPATH", "CPLUS_INCLUDE_PATH"};

static void write_text(const char *name, const char *text)
{
    test_file_write(test_path(name), text, (int64_t)strlen(text));
}

static int open_all(void **state)
{
    tch_context *context = NULL;
    unsetenv("CPATH");
    unsetenv("CPLUS_INCLUDE_PATH");
    if (test_folder_make(state) != 0 || tch_context_create("cpu", &context) != TCH_OK ||
        setenv("TORCHIUM_CACHE", test_path("cache"), 1) != 0 || mkdir(test_path("one"), 0700) != 0 ||
        mkdir(test_path("two"), 0700) != 0) {
        return -1;
    }
    *state = context;
    return 0;
}

static int close_all(void **state)
{
    return fake_compiler_close(state);
}

/* --- kernels ----------------------------------------------------------------------------------------------------- */

/* Compiles and runs a kernel that writes VALUE of <value.h>; *compiled tells whether it was, or came from the cache. */
static int value_of(tch_context *context, int *compiled)
{
    tch_kernel *kernel = NULL;
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    int64_t one = 1;
    test_tensor *y = test_tensor_make(context, TCH_INT32, 1, &one, LAYOUT_CONTIGUOUS);
    tch_kernel_argument argument = TCH_ARGUMENT_TENSOR(&y->tensor);
    tch_kernel_shape shape = TCH_KERNEL_SHAPE_INIT(1, 1);
    config.source = "#include <value.h>\n__global__ void f(int *y) { *y = VALUE; }\n", config.name = "f";
    CHECK_OK(tch_kernel_compile(context, &config, &kernel));
    CHECK_OK(tch_kernel_get_info(kernel, &info));
    CHECK_OK(tch_kernel_launch(kernel, &shape, 1, &argument));
    double *got = test_tensor_read(y);
    int value = (int)got[0];
    tch_kernel_destroy(kernel);
    *compiled = !info.from_cache;
    return value;
}

static void expect(tch_context *context, int value, int compiled)
{
    int was_compiled = -1;
    int got = value_of(context, &was_compiled);
    CHECK(got == value, "the kernel has %d, expected %d", got, value);
    CHECK(was_compiled == compiled, "it %s", was_compiled ? "was compiled" : "came from the cache");
}

/* Lets the times of files be older than what could be two changes in one tick. */
static void age(const char *name)
{
    struct timespec times[2] = {{.tv_sec = 1600000000}, {.tv_sec = 1600000000}};
    assert_int_equal(utimensat(AT_FDCWD, test_path(name), times, 0), 0);
}

static void a_header_of_the_environment_changes(void **state)
{
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        test_case("%s", variables[i]);
        write_text("one/value.h", "#include \"inner.h\"\n#define VALUE (INNER + 1)\n");
        write_text("one/inner.h", "#define INNER 100\n");
        setenv(variables[i], test_path("one"), 1);
        expect(*state, 101, 1);
        expect(*state, 101, 0);
        write_text("one/inner.h", "#define INNER 200\n"); /* as many bytes */
        expect(*state, 201, 1);
        expect(*state, 201, 0);
        age("one/inner.h"); /* other times, the same contents */
        expect(*state, 201, 0);
        write_text("one/inner.h", "#define INNER 300\n");
        age("one/inner.h");
        expect(*state, 301, 1);
        write_text("one/value.h", "#define VALUE 7\n");
        expect(*state, 7, 1);
        unlink(test_path("one/inner.h")); /* no part of it any more */
        expect(*state, 7, 0);
        unsetenv(variables[i]);
    }
}

static void another_folder_of_the_environment(void **state)
{
    write_text("one/value.h", "#define VALUE 1\n");
    write_text("two/value.h", "#define VALUE 2\n");
    setenv("CPATH", test_path("one"), 1);
    expect(*state, 1, 1);
    setenv("CPATH", test_path("two"), 1);
    expect(*state, 2, 1);
    setenv("CPATH", test_path("one"), 1);
    expect(*state, 1, 0);
    setenv("CPATH", "", 1);
    unsetenv("CPATH");
}

/* An empty folder in CPATH is the current one. */
static void the_current_folder(void **state)
{
    char *before = get_current_dir_name();
    write_text("one/value.h", "#define VALUE 1\n");
    write_text("two/value.h", "#define VALUE 2\n");
    setenv("CPATH", ":/nowhere", 1);
    assert_int_equal(chdir(test_path("one")), 0);
    expect(*state, 1, 1);
    assert_int_equal(chdir(test_path("two")), 0);
    expect(*state, 2, 1);
    expect(*state, 2, 0);
    assert_int_equal(chdir(test_path("one")), 0);
    expect(*state, 1, 0);
    write_text("one/value.h", "#define VALUE 3\n");
    expect(*state, 3, 1);
    assert_int_equal(chdir(before), 0);
    free(before);
    unsetenv("CPATH");
}

/* --- the compiler's list ----------------------------------------------------------------------------------------- */

/* A list of files in the form of an image. */
static tchi_cpu_files files_of(const char *rule, time_t started)
{
    struct timespec time = {.tv_sec = started};
    tchi_cpu_files files;
    CHECK_OK(tchi_cpu_files_make(&files, rule, "/some/folder", &time));
    return files;
}

static int same_after(const tchi_cpu_files *files)
{
    char *copy = test_alloc(files->bytes); /* of exactly its size */
    memcpy(copy, files->data, files->bytes);
    int same = tchi_cpu_files_same(copy, files->bytes);
    return same;
}

#define FAR 4000000000 /* the compiler was started long after every change */

/* Names with what make has signs for, each written as GCC and clang do: a change of every one of them counts. */
static void names_in_a_rule(void **state)
{
    (void)state;
    static const struct {
        const char *name, *written;
    } cases[] = {
        {"plain.h", "plain.h"}, {"a b.h", "a\\ b.h"},       {"a$b.h", "a$$b.h"},          {"a#b.h", "a\\#b.h"},
        {"a\\b.h", "a\\b.h"},   {"a\\ b.h", "a\\\\\\ b.h"}, {"a:b.h", "a:b.h"},           {"a:c.h", "a\\:c.h"},
        {"'q\".h", "'q\".h"},   {"tail\\", "tail\\\\ "},    {"\xc3\xa4.h", "\xc3\xa4.h"}, {"a\tb.h", "a\\\tb.h"},
    };
    char rule[16000] = "kernel: /some/folder/kernel.cpp \\\n";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t used = strlen(rule);
        write_text(cases[i].name, "before");
        snprintf(rule + used, sizeof rule - used, " %s/%s \\\n", test_path("."), cases[i].written);
    }
    tchi_cpu_files files = files_of(rule, time(NULL) + 1); /* so soon that times say nothing */
    assert_true(same_after(&files));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case("%s", cases[i].name);
        write_text(cases[i].name, "behind");
        assert_false(same_after(&files));
        write_text(cases[i].name, "before");
        assert_true(same_after(&files));
    }
    tchi_cpu_files_release(&files);
}

/* What cannot be told is never the same: no list, names that nothing can be found by, files that changed meanwhile. */
static void what_cannot_be_told(void **state)
{
    (void)state;
    static char endless[20000] = "kernel: /";
    memset(endless + 9, 'x', sizeof endless - 10);
    write_text("a.h", "a");
    char rule[TEST_PATH_SIZE + 64];
    snprintf(rule, sizeof rule, "kernel: %s", test_path("a.h"));
    const struct {
        const char *rule;
        time_t started;
        int same;
    } cases[] = {
        {NULL, FAR, 0},
        {"", FAR, 0},
        {"nothing", FAR, 0},
        {"kernel:", FAR, 1},
        {"kernel: \\\n", FAR, 1},
        {endless, FAR, 0},
        {"kernel: \\", FAR, 0},
        {rule, FAR, 1},
        {rule, 1, 0},
        {"kernel: /no/file", FAR, 0},
        {"kernel: /tmp", FAR, 0},
        {"kernel: /some/folder/a.h /some/folder/b", FAR, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_case("case %zu", i);
        tchi_cpu_files files = files_of(cases[i].rule, cases[i].started);
        assert_int_equal(files.bytes > 0 ? same_after(&files) : 1, cases[i].same);
        tchi_cpu_files_release(&files);
    }
}

/* Cut off at every byte and with every byte changed the list is read without harm. */
static void a_damaged_list(void **state)
{
    (void)state;
    char rule[3 * TEST_PATH_SIZE];
    write_text("a.h", "a");
    write_text("b.h", "b");
    snprintf(rule, sizeof rule, "kernel: %s \\\n  %s\n", test_path("a.h"), test_path("b.h"));
    tchi_cpu_files files = files_of(rule, FAR);
    for (size_t length = 1; length < files.bytes; length++) {
        tchi_cpu_files part = {files.data, length, files.room};
        CHECK(length == files.bytes / 2 || !same_after(&part), "%zu bytes of %zu count", length, files.bytes);
    }
    for (size_t i = 0; i < files.bytes; i++) {
        files.data[i] = (char)(files.data[i] ^ 0xff);
        (void)same_after(&files);
        files.data[i] = (char)(files.data[i] ^ 0xff);
    }
    assert_true(same_after(&files));
    tchi_cpu_files_release(&files);
}

/* --- stacks ------------------------------------------------------------------------------------------------------ */

/* 32 KiB and the sum, at least 64 KiB and at most 1 MiB and 32 KiB; without a bound, or without lines, the most. */
static void what_a_stack_needs(void **state)
{
    (void)state;
    static const struct {
        const char *lines;
        uint64_t largest, stack;
    } cases[] = {
        {NULL, 0, 1081344},
        {"", 0, 65536},
        {"no tabs here\n\n\t\n", 0, 65536},
        {"k.cpp:1:2:void f(int)\t100\tstatic\n", 100, 65536},
        {"k.cpp:1:2:void f(int)\t50000\tstatic\nk.cpp:7:1:void g()\t40000\tdynamic,bounded", 50000, 122768},
        {"k.cpp:1:2:void f(int)\t16\tdynamic\n", 16, 1081344},
        {"a\tb\tc\t700000\tstatic\nd\t700000\tstatic\n", 700000, 1081344},
        {"f\t99999999999999999999999\tstatic\ng\t18446744073709551615\tstatic\n", UINT64_MAX, 1081344},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        tchi_stack_use use = tchi_stack_use_read(cases[i].lines);
        test_case("case %zu", i);
        CHECK(use.largest == cases[i].largest && use.stack_bytes == cases[i].stack, "%llu and %llu",
              (unsigned long long)use.largest, (unsigned long long)use.stack_bytes);
    }
}

#define IN_A_FOLDER(test) cmocka_unit_test_setup_teardown(test, open_all, close_all)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(a_header_of_the_environment_changes),
        IN_A_FOLDER(another_folder_of_the_environment),
        IN_A_FOLDER(the_current_folder),
        IN_A_FOLDER(names_in_a_rule),
        IN_A_FOLDER(what_cannot_be_told),
        IN_A_FOLDER(a_damaged_list),
        cmocka_unit_test(what_a_stack_needs),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

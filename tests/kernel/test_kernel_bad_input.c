/* Compiling invalid kernels: injection through names, options and paths, inconsistent configs, out of memory. The
 * compiler is never called. */
#define _GNU_SOURCE
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/fakes/counting_allocator.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/messages.h"
#include "support/testing.h"

#define MOST_ALLOCATIONS 200

static void refuse_config(tch_context *context, const tch_kernel_config *config, tch_status expected, const char *word)
{
    tch_kernel *kernel = (tch_kernel *)&fake;
    int before = fake.builds;
    tch_status status = tch_kernel_compile(context, config, &kernel);
    test_check_refused(status, expected, word);
    assert_null(kernel);
    CHECK(fake.builds == before, "the compiler was asked");
}

/* --- names ------------------------------------------------------------------------------------------------------ */

WITH_COMPILER(names)
{
    tch_context *context = *state;
    /* clang-format off */
    static const char *const good[] = {
        "f", "_f9", "space::f", "::space::inner::f", "f<float>", "f<float, 4>", "f< float ,-1 >",
        "f<space::type<int>, unsigned long long>", "f<g<h<1>>>", "f<>", "space<int>::f<0x10u, 1.5f, true>",
    };
    /* clang-format on */
    static const char *const bad[] = {"",         " f",         "f ",         "9f",       "f; system(\"x\")",
                                      "f<a;b>",   "../x",       "f\n",        "f\nint g", "f\t",
                                      "f\r",      "f<a\n>",     "f(1)",       "f<(1)>",   "f<sizeof(int)>",
                                      "f<",       "f>",         "f<a",        "f<a>>",    "f<<a>",
                                      "f<a,>",    "f<,a>",      "f<a b c 4>", "f<->",     "f<a*>",
                                      "f<a&b>",   "f:g",        "f::",        "f::::g",   "::",
                                      "f,g",      "f g",        "f{}",        "f\"",      "f'",
                                      "f\\",      "f#",         "f/**/",      "f//",      "f$(x)",
                                      "f`x`",     "f@",         "f%",         "f=1",      "f\xc3\xa9",
                                      "-f",       "-fplugin=x", "@f",         "f<1 2>",   "f<1+1>",
                                      "f<\"a\">", "f\x01",      "f\x7f"};
    for (size_t i = 0; i < TEST_COUNT(good); i++) {
        tch_kernel *kernel = NULL;
        tch_kernel_config config = fake_config(FAKE_SOURCE);
        config.name = good[i];
        test_case("%s", good[i]);
        CHECK_OK(tch_kernel_compile(context, &config, &kernel));
        assert_string_equal(tch_kernel_name(kernel), good[i]);
        tch_kernel_destroy(kernel);
    }
    for (size_t i = 0; i < TEST_COUNT(bad); i++) {
        tch_kernel_config config = fake_config(FAKE_SOURCE);
        config.name = bad[i];
        test_case("%s", bad[i]);
        refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "name");
    }
}

WITH_COMPILER(long_names)
{
    tch_context *context = *state;
    static char name[5000];
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    config.name = name;
    memset(name, 'f', 1025);
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "name");
    memset(name, 'f', sizeof name - 1);
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "name");
    memset(name, 0, sizeof name);
    snprintf(name, sizeof name, "f<f<f<f<f<f<f<f<f<f<f<f<f<f<f<f<f<f>>>>>>>>>>>>>>>>>"); /* one level too many */
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "name");
    config.name = NULL;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "name");
}

/* --- options ---------------------------------------------------------------------------------------------------- */

/* clang-format off */
static const char *const good_options[] = {
    "-DA", "-DA=", "-DA_1=x y", "-DA=\"q\" ; $(touch x) `x` -o y", "-UA", "-std=c++14", "-std=c++17", "-std=c++20",
    "--use_fast_math", "-O0", "-O3", "-I/", "-I.",
};
static const char *const bad_options[] = {
    "", "-", "--", "-D", "-D=1", "-D1", "-DA(x)=x", "-DA=1\n#include </etc/passwd>", "-DA\n", "-DA=\x01",
    "-DA=\xc3\xa9", "-D A", "-U", "-UA=1", "-I", "-I/\n", "-I/does/not/exist", "-fplugin=x.so", "-B.", "-B",
    "--compiler-bindir", "--compiler-bindir=/x", "-ccbin", "@file", "-o", "-ox", "-include", "-include/etc/passwd",
    "-imacros", "-Wl,x", "-Wp,x", "-Xlinker", "-lx", "-L.", "-x", "-xc", "-specs=x", "-wrapper", "-std=c++11",
    "-std=c++17 ", "-std=gnu++17", "-O", "-O4", "-Ofast", "-O3 -o x", "-g", "-isystem", "-use_fast_math",
    "--use_fast_math=true", " -DA", "file.cu", "/etc/passwd", "-save-temps", "-march=native", "-###",
};
/* clang-format on */

WITH_COMPILER(options)
{
    tch_context *context = *state;
    for (size_t i = 0; i < TEST_COUNT(good_options); i++) {
        tch_kernel *kernel = NULL;
        tch_kernel_config config = fake_config(FAKE_SOURCE);
        char line[200];
        test_case("%s", good_options[i]);
        config.option_count = 1, config.options = &good_options[i];
        CHECK_OK(tch_kernel_compile(context, &config, &kernel));
        snprintf(line, sizeof line, "\noption %s\n", good_options[i]);
        CHECK((strstr(fake.asked, line) != NULL) == (strncmp(good_options[i], "-I", 2) != 0), "was asked %s",
              fake.asked);
        tch_kernel_destroy(kernel);
    }
    for (size_t i = 0; i < TEST_COUNT(bad_options); i++) {
        tch_kernel_config config = fake_config(FAKE_SOURCE);
        test_case("%s", bad_options[i]);
        config.option_count = 1, config.options = &bad_options[i];
        refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "options");
    }
}

/* --- paths ------------------------------------------------------------------------------------------------------ */

/* Special characters of shells or command lines are part of file names here, and folders reach the backend as absolute
 * paths. */
WITH_COMPILER(strange_paths)
{
    tch_context *context = *state;
    static const char *const strange[] = {"with space", "quote\"s", "$(touch here)", "-o", "@x",
                                          "; rm x",     "=x",       "a\\b"};
    char here[PATH_MAX];
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(test_path(".")), 0);
    for (size_t i = 0; i < TEST_COUNT(strange); i++) {
        char file[100], line[PATH_MAX + 100];
        tch_kernel *kernel = NULL;
        tch_kernel_config config = fake_config(NULL);
        test_case("%s", strange[i]);
        assert_int_equal(mkdir(strange[i], 0700), 0);
        snprintf(file, sizeof file, "%s/%s", strange[i], strange[i]);
        test_file_write(file, "#include \"a.h\"\n", 15);
        config.path = file;
        config.include_count = 1, config.includes = &strange[i];
        CHECK_OK(tch_kernel_compile(context, &config, &kernel));
        tch_kernel_destroy(kernel);
        snprintf(line, sizeof line, "file %s\nname f\ninclude %s/%s\n", file, getcwd(here, sizeof here), strange[i]);
        CHECK(strncmp(fake.asked, line, strlen(line)) == 0, "was asked %s", fake.asked);
        CHECK(strncmp(strstr(line, "include"), fake.asked + strlen(line), strlen(strstr(line, "include"))) == 0,
              "was asked %s", fake.asked);
    }
    CHECK(access("here", F_OK) != 0, "a command was run");
}

WITH_COMPILER(bad_paths)
{
    tch_context *context = *state;
    static char most[(16 << 20) + 1];
    static char longest[PATH_MAX + 10];
    memset(longest, 'x', sizeof longest - 1);
    memset(most, ' ', sizeof most);
    test_file_write(test_path("nul.cu"), "f\0g", 3);
    test_file_write(test_path("large.cu"), most, sizeof most);
    assert_int_equal(mkfifo(test_path("pipe"), 0600), 0);
    const struct {
        const char *path, *source, *argument;
        tch_status expected;
    } cases[] = {
        {NULL, NULL, "source", TCH_ERR_INVALID_ARGUMENT},
        {test_path("absent.cu"), NULL, "path", TCH_ERR_IO},
        {test_path("."), NULL, "path", TCH_ERR_IO},
        {"/dev/zero", NULL, "path", TCH_ERR_IO},
        {test_path("pipe"), NULL, "path", TCH_ERR_IO},
        {"", NULL, "path", TCH_ERR_INVALID_ARGUMENT},
        {"a\nb.cu", NULL, "path", TCH_ERR_INVALID_ARGUMENT},
        {longest, NULL, "path", TCH_ERR_INVALID_ARGUMENT},
        {test_path("nul.cu"), NULL, "path", TCH_ERR_INVALID_ARGUMENT},
        {test_path("large.cu"), NULL, "path", TCH_ERR_INVALID_ARGUMENT},
        {"a\"\n#include \"b", FAKE_SOURCE, "path", TCH_ERR_INVALID_ARGUMENT},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_kernel_config config = fake_config(cases[i].source);
        config.path = cases[i].path;
        test_case("path %.100s", cases[i].path == NULL ? "NULL" : cases[i].path);
        refuse_config(context, &config, cases[i].expected, cases[i].argument);
    }
}

WITH_COMPILER(bad_configs)
{
    tch_context *context = *state;
    tch_kernel *kernel = NULL;
    char log[8];
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    test_check_refused(tch_kernel_compile(NULL, &config, &kernel), TCH_ERR_INVALID_ARGUMENT, "context");
    test_check_refused(tch_kernel_compile(context, &config, NULL), TCH_ERR_INVALID_ARGUMENT, "kernel");
    refuse_config(context, NULL, TCH_ERR_INVALID_ARGUMENT, "config");
    config.struct_size--;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "config");
    config = fake_config(FAKE_SOURCE), config.option_count = 1;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "options");
    config.option_count = -1;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "option_count");
    const char *nothing[] = {NULL};
    config.option_count = 1, config.options = nothing;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "options");
    config = fake_config(FAKE_SOURCE), config.include_count = 1;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "includes");
    config.includes = nothing;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "includes");
    const char *absent[] = {"/does/not/exist"};
    config.includes = absent;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "includes");
    config.include_count = 1000;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "include_count");
    config = fake_config(FAKE_SOURCE), config.use_cache = 2;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "use_cache");
    config = fake_config(FAKE_SOURCE), config.log = log;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "log");
    config = fake_config(FAKE_SOURCE), config.log_size = 8;
    refuse_config(context, &config, TCH_ERR_INVALID_ARGUMENT, "log_size");
}

WITH_COMPILER(too_many_parameters)
{
    tch_context *context = *state;
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    fake.parameter_count = 65;
    test_check_refused(tch_kernel_compile(context, &config, &kernel), TCH_ERR_INVALID_ARGUMENT, "parameters");
    fake.parameter_count = 1;
    fake.parameters[0] = fake_number(TCH_PARAMETER_OTHER, 4097);
    test_check_refused(tch_kernel_compile(context, &config, &kernel), TCH_ERR_INVALID_ARGUMENT, "parameters");
    CHECK(kernel == NULL && fake.loads == fake.unloads, "%d loads, %d unloads", fake.loads, fake.unloads);
}

/* --- memory ----------------------------------------------------------------------------------------------------- */

static counting_allocator counting;

static int open_counting(void **state)
{
    tch_host_allocator allocator = counting_allocator_interface(&counting);
    return tch_set_host_allocator(&allocator) == TCH_OK ? fake_compiler_open(state) : -1;
}

static int close_counting(void **state)
{
    int closed = fake_compiler_close(state);
    return tch_set_host_allocator(NULL) == TCH_OK ? closed : -1;
}

static tch_status compile_from_file(tch_context *context, const char *path, const char *folder)
{
    static const char *const flags[] = {"-DA=1", "-O2", "-I/"};
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(NULL);
    config.path = path;
    config.option_count = 3, config.options = flags;
    config.include_count = 1, config.includes = &folder;
    tch_status status = tch_kernel_compile(context, &config, &kernel);
    CHECK((status == TCH_OK) == (kernel != NULL), "status and kernel do not agree");
    tch_kernel_destroy(kernel);
    return status;
}

/* Every allocation fails once, with the cache empty and with the entry in it: the call fails with OUT_OF_MEMORY or
 * continues without something optional, nothing leaks, and the next call works. */
TEST_WITH(no_memory, open_counting, close_counting)
{
    tch_context *context = *state;
    char path[TEST_PATH_SIZE], folder[TEST_PATH_SIZE];
    snprintf(path, sizeof path, "%s", test_path("k.cu"));
    snprintf(folder, sizeof folder, "%s", test_path("."));
    test_file_write(path, FAKE_SOURCE, (int64_t)strlen(FAKE_SOURCE));
    long long held = atomic_load(&counting.blocks);
    for (int warm = 0; warm < 2; warm++) {
        long long failures = 1;
        int refused = 0;
        for (int at = 1; failures > 0; at++) {
            test_case("allocation %d, %s", at, warm ? "in the cache" : "not in the cache");
            CHECK(at < MOST_ALLOCATIONS, "there is no end");
            if (!warm) {
                fake_remove_tree(fake_cache());
            }
            long long before = atomic_load(&counting.failures);
            counting_allocator_arm(&counting, at);
            tch_status status = compile_from_file(context, path, folder);
            counting_allocator_arm(&counting, 0);
            failures = atomic_load(&counting.failures) - before;
            CHECK(status == TCH_OK || (failures > 0 && status == TCH_ERR_OUT_OF_MEMORY), "gave %s: %s",
                  tch_status_name(status), tch_last_error());
            refused += status != TCH_OK;
            CHECK(atomic_load(&counting.blocks) == held, "%lld blocks leaked", atomic_load(&counting.blocks) - held);
            CHECK(atomic_load(&counting.mistakes) == 0, "a release does not match its allocation");
            CHECK_OK(compile_from_file(context, path, folder));
        }
        CHECK(refused > 5, "only %d of the allocations mattered", refused);
    }
}

TEST_MAIN(NULL, NULL)

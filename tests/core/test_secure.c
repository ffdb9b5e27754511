/* Programs with more privileges than their caller, such as set-user-ID ones, ignore the environment variables that
 * select what is loaded, run or trusted. The test makes a copy of itself owned by another user, which needs root; it is
 * skipped otherwise, and on file systems without set-user-ID. */
#define _GNU_SOURCE
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "support/files.h"
#include "support/testing.h"

#define NOBODY 65534
enum { NOT_SECURE = 90 };

/* Exit statuses of the copy: 0 if all checks pass, otherwise the number of the failed one. */
static int look_around(void)
{
    char compiler[TCHI_PATH_SIZE];
    tch_context *context = NULL;
    if (getauxval(AT_SECURE) == 0) {
        return NOT_SECURE;
    }
    if (tch_context_create("cpu", &context) != TCH_OK) {
        return 1; /* TORCHIUM_BLAS was used */
    }
    if (tch_kernel_cache_folder() != NULL) {
        return 2;
    }
    if (tchi_cpu_find_compiler(compiler) != TCH_ERR_UNAVAILABLE) {
        return 3;
    }
    tch_context_destroy(context);
    return 0;
}

static void copy_self(const char *path)
{
    int64_t bytes;
    char *program = test_file_read("/proc/self/exe", &bytes);
    test_file_write(path, program, bytes);
    CHECK(chown(path, NOBODY, (gid_t)-1) == 0 && chmod(path, 04755) == 0, "the test cannot give its copy away");
}

static void set_variables(void)
{
    setenv("TORCHIUM_BLAS", "/no/such/library.so", 1);
    setenv("TORCHIUM_CACHE", "/tmp", 1);
    setenv("XDG_CACHE_HOME", "/tmp", 1);
    setenv("TORCHIUM_CXX", "/bin/sh", 1);
}

TEST(the_callers_variables_do_not_count)
{
    const char *path = test_path("copy");
    int status = -1;
    if (geteuid() != 0) {
        skip();
    }
    copy_self(path);
    assert_int_equal(chmod(test_path("."), 0755), 0);
    pid_t child = fork();
    if (child == 0) {
        set_variables();
        execl(path, "copy", "--look-around", (char *)NULL);
        _exit(NOT_SECURE);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == NOT_SECURE) {
        skip();
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the copy ended with %d", WEXITSTATUS(status));
}

/* This process sees what the copy must not. */
TEST(variables_count_otherwise)
{
    char compiler[TCHI_PATH_SIZE];
    tch_context *context = NULL;
    CHECK_OK(tch_context_create("cpu", &context));
    setenv("TORCHIUM_CXX", "/bin/sh", 1);
    CHECK_OK(tchi_cpu_find_compiler(compiler));
    CHECK(strcmp(compiler, "/bin/sh") == 0, "found %s", compiler);
    tch_context_destroy(context);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--look-around") == 0) {
        _exit(look_around()); /* without a sanitizer's exit checks, which such a program may not run */
    }
    test_begin(argc, argv);
    return test_run(__FILE__, test_folder_make, test_folder_remove);
}

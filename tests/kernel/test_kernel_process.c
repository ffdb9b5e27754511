/* Compiler processes: their output and status, and that after the end or the timeout none of their children survives.
 * The compilers are scripts. And parsing of the stack report. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backends/cpu/user_kernel/kernel.h"
#include "support/files.h"
#include "support/testing.h"

enum { LONG = 200, SHORT = 2, LOG = 64 }; /* seconds that never elapse, seconds that do, and bytes */

static char words[LOG];

/* Runs a shell script with a temporary folder as $1. */
static int run_script(const char *text, int seconds)
{
    char script[TEST_PATH_SIZE], folder[TEST_PATH_SIZE], log[TEST_PATH_SIZE];
    snprintf(script, sizeof script, "%s", test_path("compiler"));
    snprintf(folder, sizeof folder, "%s", test_path("."));
    snprintf(log, sizeof log, "%s", test_path("log"));
    test_file_write(script, text, (int64_t)strlen(text));
    assert_int_equal(chmod(script, 0700), 0);
    char *arguments[] = {script, folder, NULL};
    test_case("%s", text);
    return tchi_process_run(arguments, log, seconds, words, sizeof words);
}

/* Whether the process whose number a script has written is alive; zombies are not. */
static int is_alive(const char *file)
{
    char path[64], state = 'X';
    int number = 0;
    FILE *written = fopen(test_path(file), "r");
    CHECK(written != NULL && fscanf(written, "%d", &number) == 1, "the script wrote no number");
    fclose(written);
    snprintf(path, sizeof path, "/proc/%d/stat", number);
    FILE *about = fopen(path, "r");
    if (about != NULL) {
        if (fscanf(about, "%*d %*s %c", &state) != 1) {
            state = 'X';
        }
        fclose(about);
    }
    return state != 'X' && state != 'Z';
}

/* A signal needs a moment to arrive; a missing one ends in the test's timeout. */
static void must_end(const char *file)
{
    while (is_alive(file)) {
        usleep(1000);
    }
}

TEST_IN_FOLDER(words_and_statuses)
{
    assert_int_equal(run_script("#!/bin/sh\necho one; echo two >&2; exit 7\n", LONG), 7);
    assert_string_equal(words, "one\ntwo\n");
    assert_int_equal(run_script("#!/bin/sh\nkill -9 $$\n", LONG), 256);
    assert_int_equal(run_script("#!/bin/sh\ni=0; while [ $i -lt 9999 ]; do echo 0123456789; i=$((i+1)); done\n", LONG),
                     0);
    assert_int_equal(strlen(words), LOG - 1);
    assert_int_equal(run_script("#!/nowhere/at/all\n", LONG), TCHI_PROCESS_NOT_STARTED);
    assert_int_equal(run_script("#!/bin/sh\nexec >/dev/null 2>&1\nsleep 0.1; exit 3\n", LONG), 3);
}

/* With its outputs open, without them, and with children of both kinds. */
TEST_IN_FOLDER(a_compiler_that_sleeps)
{
    static const char *const scripts[] = {
        "#!/bin/sh\nsleep 1000 & echo $! >$1/child\necho $$ >$1/self\nsleep 1000\n",
        "#!/bin/sh\nsleep 1000 >/dev/null 2>&1 & echo $! >$1/child\necho $$ >$1/self\nexec >/dev/null 2>&1\nsleep "
        "1000\n",
        "#!/bin/sh\ntrap '' TERM INT HUP\nsh -c 'trap \"\" TERM INT HUP; echo $$ >$0/child; while :; do sleep 1; done' "
        "$1 &\necho $$ >$1/self\nwhile :; do echo still here; sleep 0.1; done\n",
    };
    for (size_t i = 0; i < sizeof scripts / sizeof *scripts; i++) {
        assert_int_equal(run_script(scripts[i], SHORT), TCHI_PROCESS_TOO_LONG);
        must_end("self");
        must_end("child");
    }
}

/* It is done when it exits, whoever still holds its outputs, and leaves no processes. */
TEST_IN_FOLDER(a_compiler_that_leaves_something)
{
    assert_int_equal(run_script("#!/bin/sh\nsleep 1000 & echo $! >$1/child\necho done; exit 5\n", LONG), 5);
    assert_string_equal(words, "done\n");
    must_end("child");
}

/* If SIGCHLD is ignored the status is unknown. */
TEST_IN_FOLDER(a_program_that_ignores_its_children)
{
    void (*before)(int) = signal(SIGCHLD, SIG_IGN);
    assert_int_equal(run_script("#!/bin/sh\necho one; sleep 0.1; exit 7\n", LONG), 0);
    assert_string_equal(words, "one\n");
    signal(SIGCHLD, before);
}

/* 32 KiB and the sum, at least 64 KiB and at most 1 MiB and 32 KiB; without a bound or without lines, the maximum. */
TEST(what_a_stack_needs)
{
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

TEST_MAIN(NULL, NULL)

/* The cache of compiled kernels: damaged entries, other users' folders, full disks, and concurrent processes. A fake
 * compiler counts its calls. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel/cache.h"
#include "support/files.h"
#include "support/kernel/fake_compiler.h"
#include "support/messages.h"
#include "support/testing.h"

#define NOBODY 65534
#define HOUR 3600

static void write_text(const char *name, const char *text)
{
    test_file_write(test_path(name), text, (int64_t)strlen(text));
}

/* In a child process: root can write everywhere, and a file size limit is permanent. */
static void in_child(tch_context *context, int (*work)(tch_context *context))
{
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        _exit(work(context));
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with wait status %d", status);
}

static int compile_quietly(tch_context *context, const char *source)
{
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(source);
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    if (tch_kernel_compile(context, &config, &kernel) != TCH_OK) {
        return -1;
    }
    tch_kernel_get_info(kernel, &info);
    tch_kernel_destroy(kernel);
    return !info.from_cache;
}

/* Only before the first call of tch_kernel_cache_limit: this test is the first. */
static int with_a_limit_of_the_environment(tch_context *context)
{
    fake.image_bytes = 600 << 10;
    setenv("TORCHIUM_CACHE_SIZE", "1", 1);
    int good = compile_quietly(context, "a") == 1 && compile_quietly(context, "b") == 1 && fake_cache_count("") == 1;
    setenv("TORCHIUM_CACHE_SIZE", "nonsense", 1);
    good = good && compile_quietly(context, "c") == 1 && fake_cache_count("") == 2;
    setenv("TORCHIUM_CACHE_SIZE", "99999999999999999999", 1);
    good = good && compile_quietly(context, "d") == 1 && fake_cache_count("") == 3;
    setenv("TORCHIUM_CACHE_SIZE", "0", 1);
    return good && compile_quietly(context, "e") == 1 && compile_quietly(context, "e") == 1 ? 0 : 1;
}

WITH_COMPILER(the_environment_limits)
{
    in_child(*state, with_a_limit_of_the_environment);
}

/* --- damage ----------------------------------------------------------------------------------------------------- */

/* With any byte changed and at any length the entry is detected as damaged, and replaced. */
WITH_COMPILER(damage_is_repaired)
{
    tch_context *context = *state;
    int64_t bytes, again;
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    const char *entry = fake_cache_entry();
    assert_non_null(entry);
    char path[TEST_PATH_SIZE];
    snprintf(path, sizeof path, "%s", entry);
    char *good = test_file_read(path, &bytes);
    char *bad = test_alloc((size_t)bytes + 1);
    for (int64_t i = 0; i < 3 * bytes + 1; i++) {
        test_case("damage %lld of %lld", (long long)i, (long long)bytes);
        memcpy(bad, good, (size_t)bytes);
        bad[bytes] = '\0';
        bad[i % bytes] = (char)(bad[i % bytes] ^ (i < bytes ? 0x01 : i < 2 * bytes ? 0xff : 0));
        test_file_write(path, bad, i < 2 * bytes ? bytes : i < 3 * bytes ? i - 2 * bytes : bytes + 1);
        assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
        assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 0);
        char *now = test_file_read(path, &again);
        CHECK(again == bytes && memcmp(now, good, (size_t)bytes) == 0, "the entry was not replaced");
    }
}

/* Intact, but the backend cannot load it, for instance after a driver update. */
WITH_COMPILER(an_entry_that_does_not_load)
{
    tch_context *context = *state;
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    fake.refuses_load = 1;
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 0);
    fake.refuses_load = 2; /* nor the new one */
    assert_int_equal(tch_kernel_compile(context, &config, &kernel), TCH_ERR_IO);
    assert_null(kernel);
    assert_int_equal(fake_cache_count(""), 0);
}

/* Links, pipes and files that others can write are not entries. */
WITH_COMPILER(foreign_entries)
{
    tch_context *context = *state;
    char path[TEST_PATH_SIZE];
    struct stat found;
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    snprintf(path, sizeof path, "%s", fake_cache_entry());
    assert_int_equal(stat(path, &found), 0);
    assert_int_equal(found.st_mode & 0777, 0600);
    assert_int_equal(chmod(path, 0620), 0);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(rename(path, test_path("moved")), 0);
    assert_int_equal(symlink(test_path("moved"), path), 0);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(lstat(path, &found), 0);
    assert_true(S_ISREG(found.st_mode));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_cache_count(".part"), 0);
}

/* --- the folder ------------------------------------------------------------------------------------------------- */

WITH_COMPILER(the_environment_names_the_folder)
{
    struct stat found;
    const char *home = test_path("home");
    unsetenv("TORCHIUM_CACHE");
    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", home, 1);
    assert_string_equal(tch_kernel_cache_folder(), test_path("home/.cache/torchium/kernels"));
    assert_int_equal(stat(test_path("home/.cache/torchium/kernels"), &found), 0);
    assert_int_equal(found.st_mode & 0777, 0700);
    assert_int_equal(stat(test_path("home/.cache"), &found), 0);
    assert_int_equal(found.st_mode & 0777, 0700);
    setenv("XDG_CACHE_HOME", test_path("xdg"), 1);
    assert_string_equal(tch_kernel_cache_folder(), test_path("xdg/torchium/kernels"));
    setenv("XDG_CACHE_HOME", "relative", 1);
    assert_null(tch_kernel_cache_folder());
    CHECK(strstr(tch_last_error(), "XDG_CACHE_HOME") != NULL, "the message is %s", tch_last_error());
    setenv("TORCHIUM_CACHE", test_path("own"), 1);
    assert_string_equal(tch_kernel_cache_folder(), test_path("own"));
    unsetenv("XDG_CACHE_HOME");
}

WITH_COMPILER(without_home)
{
    tch_context *context = *state;
    unsetenv("TORCHIUM_CACHE");
    unsetenv("XDG_CACHE_HOME");
    unsetenv("HOME");
    assert_null(tch_kernel_cache_folder());
    CHECK(strstr(tch_last_error(), "HOME") != NULL, "the message is %s", tch_last_error());
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    CHECK_OK(tch_kernel_cache_limit((int64_t)256 << 20));
}

static void check_refused_folder(tch_context *context, const char *because)
{
    test_case("%s", because);
    assert_null(tch_kernel_cache_folder());
    CHECK(strstr(tch_last_error(), because) != NULL, "the message is %s", tch_last_error());
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
}

WITH_COMPILER(folders_that_are_not_trusted)
{
    tch_context *context = *state;
    const char *cache = fake_cache();
    assert_int_equal(mkdir(cache, 0700), 0);
    assert_int_equal(chmod(cache, 0720), 0);
    check_refused_folder(context, "mode 720");
    assert_int_equal(chmod(cache, 01777), 0);
    check_refused_folder(context, "chmod go-w");
    assert_int_equal(chmod(cache, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(cache, NOBODY, NOBODY), 0);
        check_refused_folder(context, "another user");
        assert_int_equal(chown(cache, 0, 0), 0);
    }
    assert_int_equal(fake_cache_count(""), 0);
    assert_int_equal(rename(cache, test_path("real")), 0);
    assert_int_equal(symlink(test_path("real"), cache), 0);
    check_refused_folder(context, "cannot be used");
    assert_int_equal(unlink(cache), 0);
    write_text("cache", "a file");
    check_refused_folder(context, "cannot be used");
    assert_int_equal(unlink(cache), 0);
    setenv("TORCHIUM_CACHE", test_path("nothing\n\"$(touch here)\"/cache"), 1);
    assert_non_null(tch_kernel_cache_folder());
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 0);
}

static int on_a_full_disk(tch_context *context)
{
    struct rlimit small = {256, 256};
    signal(SIGXFSZ, SIG_IGN);
    fake.image_bytes = 4096;
    return setrlimit(RLIMIT_FSIZE, &small) == 0 && compile_quietly(context, FAKE_SOURCE) == 1 &&
                   compile_quietly(context, FAKE_SOURCE) == 1 && fake_cache_count("") == 0
               ? 0
               : 1;
}

static int in_a_folder_for_reading(tch_context *context)
{
    if (geteuid() == 0 && (setgid(NOBODY) != 0 || setuid(NOBODY) != 0)) {
        return 2;
    }
    return compile_quietly(context, FAKE_SOURCE) == 0 && compile_quietly(context, "other") == 1 &&
                   compile_quietly(context, "other") == 1
               ? 0
               : 1;
}

WITH_COMPILER(a_full_disk)
{
    in_child(*state, on_a_full_disk);
}

WITH_COMPILER(a_folder_for_reading)
{
    tch_context *context = *state;
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    if (geteuid() == 0) {
        assert_int_equal(chmod(test_path("."), 0755), 0);
        assert_int_equal(chown(fake_cache_entry(), NOBODY, NOBODY), 0);
        assert_int_equal(chown(fake_cache(), NOBODY, NOBODY), 0);
    }
    assert_int_equal(chmod(fake_cache(), 0500), 0);
    in_child(context, in_a_folder_for_reading);
    assert_int_equal(chmod(fake_cache(), 0700), 0);
    assert_int_equal(fake_cache_count(""), 1);
}

/* --- the limit -------------------------------------------------------------------------------------------------- */

static void set_age(const char *path, time_t seconds)
{
    struct timespec times[2] = {{.tv_sec = time(NULL) - seconds}, {.tv_sec = time(NULL) - seconds}};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void name_source(char source[32], int number)
{
    snprintf(source, 32, "// number %d\n", number);
}

/* The path of a source's entry. */
static void name_entry(char path[TEST_PATH_SIZE], const char *source)
{
    const tch_kernel_text text = {.source = source, .file = "kernel.cu", .name = "f"};
    tchi_cache_key key = tchi_cache_key_make(&text, fake.line);
    char name[100];
    size_t used = (size_t)snprintf(name, sizeof name, "cache/");
    for (int i = 0; i < TCHI_SHA256_BYTES; i++) {
        used += (size_t)snprintf(name + used, sizeof name - used, "%02x", key.bytes[i]);
    }
    snprintf(name + used, sizeof name - used, "%s", TCHI_CACHE_SUFFIX);
    snprintf(path, TEST_PATH_SIZE, "%s", test_path(name));
}

/* Ten entries of 1080 bytes, then a limit for five: the oldest are removed, except for the one used again. */
WITH_COMPILER(the_oldest_go_first)
{
    tch_context *context = *state;
    char source[32], paths[10][TEST_PATH_SIZE];
    fake.image_bytes = 1000;
    CHECK_OK(tch_kernel_cache_limit((int64_t)1 << 20));
    for (int i = 0; i < 10; i++) {
        name_source(source, i);
        assert_int_equal(fake_compile_text(context, source), 1);
    }
    for (int i = 0; i < 10; i++) {
        name_source(source, i);
        name_entry(paths[i], source);
        set_age(paths[i], HOUR - i);
    }
    name_source(source, 2);
    assert_int_equal(fake_compile_text(context, source), 0);
    CHECK_OK(tch_kernel_cache_limit(5 * 1080));
    for (int i = 0; i < 10; i++) {
        CHECK((access(paths[i], F_OK) == 0) == (i == 2 || i >= 6), "entry %d is %s", i,
              access(paths[i], F_OK) == 0 ? "there" : "gone");
    }
    name_source(source, 10);
    assert_int_equal(fake_compile_text(context, source), 1);
    CHECK(access(paths[6], F_OK) != 0 && access(paths[7], F_OK) == 0, "the oldest did not make room");
    fake.image_bytes = 5 * 1080;
    name_source(source, 11);
    assert_int_equal(fake_compile_text(context, source), 1);
    assert_int_equal(fake_cache_count(""), 5);
    CHECK_OK(tch_kernel_cache_limit(0));
    assert_int_equal(fake_cache_count(""), 0);
    assert_int_equal(fake_compile_text(context, source), 1);
    assert_int_equal(fake_cache_count(""), 0);
    test_check_refused(tch_kernel_cache_limit(-1), TCH_ERR_INVALID_ARGUMENT, "bytes");
    CHECK_OK(tch_kernel_cache_limit((int64_t)256 << 20));
}

/* Old leftovers of killed processes are removed; files with other names stay. */
WITH_COMPILER(leftovers_go)
{
    tch_context *context = *state;
    static const char *const kept[] = {"cache/.torchium-0123456789abcde.kernel.part", "cache/README",
                                       "cache/0123456789abcdef.kernel"};
    assert_int_equal(fake_compile_text(context, FAKE_SOURCE), 1);
    for (int i = 0; i < 3; i++) {
        write_text(kept[i], "mine");
        set_age(test_path(kept[i]), HOUR);
    }
    write_text("cache/.torchium-0123456789abcdef.kernel.part", "old");
    set_age(test_path("cache/.torchium-0123456789abcdef.kernel.part"), HOUR);
    write_text("cache/.torchium-fedcba9876543210.kernel.part", "new");
    assert_int_equal(fake_compile_text(context, "another"), 1);
    CHECK(access(test_path("cache/.torchium-0123456789abcdef.kernel.part"), F_OK) != 0, "the leftover is there");
    CHECK(access(test_path("cache/.torchium-fedcba9876543210.kernel.part"), F_OK) == 0, "a living one is gone");
    CHECK_OK(tch_kernel_cache_limit(0));
    CHECK_OK(tch_kernel_cache_limit((int64_t)256 << 20));
    for (int i = 0; i < 3; i++) {
        CHECK(access(test_path(kept[i]), F_OK) == 0, "%s is gone", kept[i]);
    }
}

/* --- concurrent processes ---------------------------------------------------------------------------------------- */

#define PROCESSES 8
#define KEYS 12

/* Compiles a few sources repeatedly, with a cache that holds half of them, until it is killed or done. */
static int hammer(tch_context *context, int process, int rounds)
{
    char source[32];
    uint64_t random = 12345 + (uint64_t)process;
    for (int i = 0; i < rounds; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        name_source(source, (int)(random >> 33) % KEYS);
        if (compile_quietly(context, source) < 0) {
            return 1;
        }
    }
    return fake.loads == rounds && fake.unloads == rounds ? 0 : 2;
}

WITH_COMPILER(many_processes)
{
    tch_context *context = *state;
    pid_t children[PROCESSES];
    fake.image_bytes = 20000;
    CHECK_OK(tch_kernel_cache_limit(KEYS / 2 * 20080));
    fflush(NULL);
    for (int i = 0; i < PROCESSES; i++) {
        children[i] = fork();
        assert_true(children[i] >= 0);
        if (children[i] == 0) {
            _exit(hammer(context, i, i % 2 == 0 ? 300 : 1 << 30));
        }
    }
    for (int i = 1; i < PROCESSES; i += 2) {
        usleep(20000 + 7919 * i);
        kill(children[i], SIGKILL);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status = -1;
        waitpid(children[i], &status, 0);
        if (i % 2 == 0) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "process %d ended with wait status %d", i, status);
        }
    }
    CHECK(fake_cache_count(".part") <= PROCESSES / 2, "%d leftovers of %d kills", fake_cache_count(".part"),
          PROCESSES / 2);
    CHECK_OK(tch_kernel_cache_limit(KEYS / 2 * 20080));
    CHECK(fake_cache_count(".kernel") <= KEYS / 2, "%d entries", fake_cache_count(".kernel"));
    CHECK_OK(tch_kernel_cache_limit((int64_t)256 << 20));
    char source[32];
    for (int i = 0; i < KEYS; i++) {
        name_source(source, i);
        fake_compile_text(context, source);
        assert_int_equal(fake_compile_text(context, source), 0);
    }
}

TEST_MAIN(NULL, NULL)

/* The C++ compiler: choosing it, identifying it and the processor in cache keys, running it, and reading its stack
 * report. The compiler is not started to identify it: size and time of its file change with its version and take
 * microseconds to read. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#else
#include <sys/auxv.h>
#endif

#include "core/sha256.h"
#include "kernel.h"

/* --- which one --------------------------------------------------------------------------------------------------- */

static int is_program(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISREG(about.st_mode) && access(path, X_OK) == 0;
}

/* A name with a slash is a path, any other is searched in $PATH, skipping empty entries, which mean the current folder.
 * A privileged program does not use $PATH and so has no compiler. */
static int find_program(const char *name, char path[TCHI_PATH_SIZE])
{
    if (strchr(name, '/') != NULL) {
        return snprintf(path, TCHI_PATH_SIZE, "%s", name) < TCHI_PATH_SIZE && is_program(path);
    }
    const char *folder = secure_getenv("PATH");
    while (folder != NULL && *folder != '\0') {
        size_t length = strcspn(folder, ":");
        if (length > 0 && snprintf(path, TCHI_PATH_SIZE, "%.*s/%s", (int)length, folder, name) < TCHI_PATH_SIZE &&
            is_program(path)) {
            return 1;
        }
        folder += length + (folder[length] == ':');
    }
    return 0;
}

tch_status tchi_cpu_find_compiler(char path[TCHI_PATH_SIZE])
{
    const char *chosen = secure_getenv("TORCHIUM_CXX");
    if (chosen != NULL && *chosen != '\0') {
        if (find_program(chosen, path)) {
            return TCH_OK;
        }
        return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE,
                                     "TORCHIUM_CXX is \"%.200s\", which is not a program: it must be the name or the "
                                     "path of a C++ compiler, without options",
                                     chosen);
    }
    const char *const names[] = {secure_getenv("CXX"), "c++", "g++", "clang++"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i] != NULL && *names[i] != '\0' && find_program(names[i], path)) {
            return TCH_OK;
        }
    }
    return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE,
                                 "no C++ compiler was found (looked for $TORCHIUM_CXX, $CXX, c++, g++ and clang++ in "
                                 "PATH): install g++ (Debian: apt-get install g++) or set TORCHIUM_CXX");
}

/* Everything -march=native depends on. */
static void describe_processor(char *text, size_t size)
{
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0, model = 0, basic[2] = {0, 0}, more[3] = {0, 0, 0}, newest = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        model = a, basic[0] = c, basic[1] = d;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        more[0] = b, more[1] = c, more[2] = d;
    }
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        newest = a;
    }
    snprintf(text, size, "x86-64 %x.%x.%x.%x.%x.%x.%x", model, basic[0], basic[1], more[0], more[1], more[2], newest);
#else
    snprintf(text, size, "cpu %lx.%lx", getauxval(AT_HWCAP), getauxval(AT_HWCAP2));
#endif
}

static unsigned long hash_text(unsigned long hash, const char *text)
{
    uint8_t digest[TCHI_SHA256_BYTES];
    tchi_sha256(text, strlen(text), digest);
    for (int byte = 0; byte < 8; byte++) {
        hash = hash * 31 + digest[byte];
    }
    return hash;
}

/* An image also depends on the prelude and on LIBRARY_PATH, which NVIDIA's container images set. */
static unsigned long hash_dependencies(void)
{
    const char *libraries = getenv("LIBRARY_PATH");
    unsigned long hash = hash_text(0, libraries != NULL ? libraries : "");
    for (int i = 0; i < TCHI_CPU_PARTS; i++) {
        hash = hash_text(hash, tchi_cpu_parts[i].text);
    }
    return hash;
}

/* Variables that make a compiler read other headers, parts of itself or options. */
static int environment_matters(void)
{
    static const char *const names[] = {"CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "GCC_EXEC_PREFIX",
                                        "CCC_OVERRIDE_OPTIONS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != '\0') {
            return 1;
        }
    }
    return 0;
}

tch_status tchi_cpu_kernel_compiler(void *state, char *text, size_t size)
{
    char path[TCHI_PATH_SIZE], real[TCHI_PATH_SIZE * 4], processor[128];
    struct stat about;
    TCHI_TRY(tchi_cpu_find_compiler(path));
    if (realpath(path, real) == NULL || stat(real, &about) != 0) {
        return tchi_cpu_host()->fail(TCH_ERR_UNAVAILABLE, "the C++ compiler %.200s cannot be read", path);
    }
    describe_processor(processor, sizeof processor);
    snprintf(text, size, "%s %.300s %lld %lld.%09ld around %lx", processor, real, (long long)about.st_size,
             (long long)about.st_mtim.tv_sec, about.st_mtim.tv_nsec, hash_dependencies());
    if (environment_matters()) {
        text[0] = '\0';
    }
    return TCH_OK;
}

/* --- running it: a process with an argument vector, its output in a file, a limit on its time -------------------- */

#define STEP_NANOSECONDS 1000000 /* interval between polls */

extern char **environ;

double tchi_seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The child gets no input, both outputs in the file, and no other descriptors. */
static int set_files(posix_spawn_file_actions_t *actions, int output)
{
    int failed = posix_spawn_file_actions_addopen(actions, 0, "/dev/null", O_RDONLY, 0);
    failed |= posix_spawn_file_actions_adddup2(actions, output, 1);
    failed |= posix_spawn_file_actions_adddup2(actions, output, 2);
#if defined(__GLIBC__) && defined(__GLIBC_PREREQ)
#if __GLIBC_PREREQ(2, 34)
    failed |= posix_spawn_file_actions_addclosefrom_np(actions, 3);
#endif
#endif
    return failed;
}

/* The child leads a process group, so that everything it started is killed with it. */
static int start_process(char *const *arguments, int output, pid_t *child)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    sigemptyset(&none);
    if (posix_spawn_file_actions_init(&actions) != 0) {
        return -1;
    }
    if (posix_spawnattr_init(&attributes) != 0) {
        posix_spawn_file_actions_destroy(&actions);
        return -1;
    }
    int failed = set_files(&actions, output);
    failed |= posix_spawnattr_setpgroup(&attributes, 0);
    failed |= posix_spawnattr_setsigmask(&attributes, &none);
    failed |= posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    if (!failed) {
        failed = posix_spawn(child, arguments[0], &actions, &attributes, arguments, environ);
    }
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return failed;
}

/* Whether the process has ended. It is not reaped, so its group id stays valid. */
static int has_ended(pid_t child)
{
    siginfo_t about = {0};
    int failed = waitid(P_PID, (id_t)child, &about, WEXITED | WNOHANG | WNOWAIT) != 0;
    return failed ? errno != EINTR : about.si_pid == child;
}

/* Waits for the process; nonzero on timeout. */
static int wait_until(pid_t child, double deadline)
{
    const struct timespec step = {0, STEP_NANOSECONDS};
    while (!has_ended(child)) {
        if (tchi_seconds_now() >= deadline) {
            return -1;
        }
        nanosleep(&step, NULL);
    }
    return 0;
}

/* If the program reaps its children itself the status is lost; then only the output file counts. */
static int collect_status(pid_t child)
{
    int status = 0;
    pid_t got;
    do {
        got = waitpid(child, &status, 0);
    } while (got < 0 && errno == EINTR);
    if (got < 0) {
        return 0;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 256;
}

int tchi_process_run(char *const *arguments, const char *file, int seconds, char *log, size_t log_size)
{
    pid_t child = 0;
    log[0] = '\0';
    int output = open(file, O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (output < 0) {
        return TCHI_PROCESS_NOT_STARTED;
    }
    if (start_process(arguments, output, &child) != 0) {
        close(output);
        return TCHI_PROCESS_NOT_STARTED;
    }
    int late = wait_until(child, tchi_seconds_now() + seconds) != 0;
    kill(-child, SIGKILL); /* also terminates its children */
    int status = collect_status(child);
    ssize_t count = pread(output, log, log_size - 1, 0);
    log[count > 0 ? count : 0] = '\0';
    close(output);
    return late ? TCHI_PROCESS_TOO_LONG : status;
}

/* --- stacks ------------------------------------------------------------------------------------------------------ */

/* Stack size of a block's threads. The compiler reports every function that it did not inline; without recursion a call
 * chain has each of them at most once, so their sum suffices. Stacks cost only the pages touched, so overestimating is
 * harmless. */
/* For calls outside the kernel: synchronization and the C library's math functions. */
#define OTHERS_BYTES 32768
#define LEAST_BYTES 65536
#define MOST_BYTES (TCHI_CPU_LOCAL_MOST + OTHERS_BYTES)

/* "file:line:column:function \t bytes \t qualifiers"; the function may contain anything. If the compiler knows no bound
 * the stack gets the maximum size. */
static void read_line(const char *line, size_t length, tchi_stack_use *use)
{
    const char *tabs[2] = {NULL, NULL}; /* the last two */
    for (size_t i = 0; i < length; i++) {
        if (line[i] == '\t') {
            tabs[0] = tabs[1];
            tabs[1] = line + i;
        }
    }
    if (tabs[0] == NULL) {
        return;
    }
    uint64_t bytes = strtoull(tabs[0] + 1, NULL, 10);
    size_t words = (size_t)(line + length - tabs[1] - 1);
    int bounded = memchr(tabs[1] + 1, ',', words) != NULL || strncmp(tabs[1] + 1, "static", 6) == 0;
    use->largest = bytes > use->largest ? bytes : use->largest;
    use->stack_bytes = !bounded || bytes > MOST_BYTES ? MOST_BYTES : use->stack_bytes + bytes;
    use->stack_bytes = use->stack_bytes > MOST_BYTES ? MOST_BYTES : use->stack_bytes;
}

tchi_stack_use tchi_stack_use_read(const char *lines)
{
    tchi_stack_use use = {0, lines != NULL ? OTHERS_BYTES : MOST_BYTES};
    while (lines != NULL && *lines != '\0') {
        size_t length = strcspn(lines, "\n");
        read_line(lines, length, &use);
        lines += length + (lines[length] == '\n');
    }
    use.stack_bytes = use.stack_bytes < LEAST_BYTES ? LEAST_BYTES : use.stack_bytes;
    return use;
}

/* Running the compiler: a process with an argument vector, its output in a file, a limit on its time. It leads a
 * process group, so that what it started ends with it, also what it left in the background. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

#define STEP_NANOSECONDS 1000000 /* from one look at whether it has ended to the next */

extern char **environ;

double tchi_seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The child has no input, both outputs in the file, and none of our other files. */
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

/* Whether the process has ended. It stays in the system's books, and so does the number of its group. */
static int has_ended(pid_t child)
{
    siginfo_t about = {0};
    int failed = waitid(P_PID, (id_t)child, &about, WEXITED | WNOHANG | WNOWAIT) != 0;
    return failed ? errno != EINTR : about.si_pid == child;
}

/* Until the process ends; nonzero where the time was over first. */
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

/* A program that collects its children itself may have taken ours: then only what was written tells how it went. */
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
    kill(-child, SIGKILL); /* what it has started and left goes with it */
    int status = collect_status(child);
    ssize_t count = pread(output, log, log_size - 1, 0);
    log[count > 0 ? count : 0] = '\0';
    close(output);
    return late ? TCHI_PROCESS_TOO_LONG : status;
}

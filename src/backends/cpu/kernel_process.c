/* Running the compiler: a process with an argument vector, its words through a pipe, an end to waiting. It is the leader of
 * a process group, so that what it started ends with it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

extern char **environ;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The child has no input, both outputs in the pipe, and none of our other files. */
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

static int start(char *const *arguments, int output, pid_t *child)
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

/* Reads until the pipe ends; what does not fit is read and dropped, so that the writer is never held up. Returns -1 where
 * the time was over first. */
static int collect(int input, double deadline, char *log, size_t log_size)
{
    size_t used = 0;
    char rest[4096] = "";
    log[0] = '\0';
    for (;;) {
        double left = deadline - now();
        struct pollfd entry = {input, POLLIN, 0};
        int ready = left > 0.0 ? poll(&entry, 1, (int)(left * 1e3) + 1) : 0;
        if (ready == 0) {
            return -1;
        }
        int fits = used + 1 < log_size;
        char *into = fits ? log + used : rest;
        ssize_t count = ready < 0 ? -1 : read(input, into, fits ? log_size - 1 - used : sizeof rest);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return 0;
        }
        used += fits ? (size_t)count : 0;
        log[used] = '\0';
    }
}

/* A program that collects its children itself may have taken ours: then only what was written tells how it went. */
static int wait_for(pid_t child)
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

int tchi_process_run(char *const *arguments, int seconds, char *log, size_t log_size)
{
    int ends[2];
    pid_t child = 0;
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return TCHI_PROCESS_NOT_STARTED;
    }
    int failed = start(arguments, ends[1], &child);
    close(ends[1]);
    if (failed) {
        close(ends[0]);
        return TCHI_PROCESS_NOT_STARTED;
    }
    int late = collect(ends[0], now() + seconds, log, log_size) != 0;
    if (late) {
        kill(-child, SIGKILL);
    }
    int status = wait_for(child);
    close(ends[0]);
    return late ? TCHI_PROCESS_TOO_LONG : status;
}

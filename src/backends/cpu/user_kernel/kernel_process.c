/* Running the compiler: a process with an argument vector, its words through a pipe, an end to waiting. It is the
 * leader of a process group, so that what it started ends with it, whether it closes its outputs, sleeps or goes on in
 * the background. */
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

#define STEP_MILLISECONDS 100 /* for an end that the pipe does not show */

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

/* What the process prints: into the log as long as it fits, the rest is read and dropped, so that the writer is never
 * held up. */
typedef struct listener {
    int input;
    int over; /* nobody has the other end any more */
    char *log;
    size_t size, used;
} listener;

static void read_once(listener *l)
{
    char rest[4096];
    int fits = l->used + 1 < l->size;
    ssize_t count = read(l->input, fits ? l->log + l->used : rest, fits ? l->size - 1 - l->used : sizeof rest);
    l->over = count == 0 || (count < 0 && errno != EINTR);
    if (fits && count > 0) {
        l->used += (size_t)count;
        l->log[l->used] = '\0';
    }
}

/* Waits `milliseconds` for words, and takes those that are there; false where none came. */
static int listen_for(listener *l, int milliseconds)
{
    struct pollfd entry = {l->over ? -1 : l->input, POLLIN, 0};
    int ready = poll(&entry, 1, milliseconds) > 0;
    if (ready) {
        read_once(l);
    }
    return ready && !l->over;
}

/* Whether the process has ended. It stays in the system's books, and so does the number of its group. */
static int has_ended(pid_t child)
{
    siginfo_t about = {0};
    int failed = waitid(P_PID, (id_t)child, &about, WEXITED | WNOHANG | WNOWAIT) != 0;
    return failed ? errno != EINTR : about.si_pid == child;
}

/* Until the process ends, or -1 where the time was over first. Its end shows at once where it closes the pipe; what it
 * left behind may hold that open, and it may itself have closed it long ago: hence both are looked at. */
static int follow(listener *l, pid_t child, double deadline)
{
    while (!has_ended(child)) {
        if (now() >= deadline) {
            return -1;
        }
        listen_for(l, l->over ? 1 : STEP_MILLISECONDS);
    }
    while (listen_for(l, 0)) {
    }
    return 0;
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
    listener l = {.input = ends[0], .log = log, .size = log_size};
    log[0] = '\0';
    int late = follow(&l, child, now() + seconds) != 0;
    kill(-child, SIGKILL); /* what it has started and left goes with it */
    int status = wait_for(child);
    close(ends[0]);
    return late ? TCHI_PROCESS_TOO_LONG : status;
}

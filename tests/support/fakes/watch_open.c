/* Declares functions without their headers, where they may be inline or have other attributes. */
#define _GNU_SOURCE
#include "watch_open.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int test_opened_mode = -1;
bool test_local_locks;
void (*test_before_rename)(const char *name);

static atomic_int left; /* calls until the failing one */
static atomic_bool failed;

bool test_fail_file_call(int number)
{
    atomic_store(&left, number);
    return atomic_exchange(&failed, false);
}

static bool fails(void)
{
    if (atomic_load(&left) <= 0 || atomic_fetch_sub(&left, 1) != 1) {
        return false;
    }
    atomic_store(&failed, true);
    errno = EIO;
    return true;
}

int openat(int folder, const char *path, int flags, ...);
int openat(int folder, const char *path, int flags, ...)
{
    va_list arguments;
    struct stat status;
    va_start(arguments, flags);
    unsigned mode = va_arg(arguments, unsigned); /* undefined and unused unless a file is created */
    va_end(arguments);
    int file = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (file >= 0 && strncmp(path, ".torchium-", 10) == 0 && fstat(file, &status) == 0) {
        test_opened_mode = status.st_mode & 0777;
    }
    return file;
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset)
{
    return fails() ? -1 : syscall(SYS_pwrite64, file, bytes, count, offset);
}

int fsync(int file)
{
    return fails() ? -1 : (int)syscall(SYS_fsync, file);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to);
int renameat(int from_folder, const char *from, int to_folder, const char *to)
{
    if (test_before_rename != NULL) {
        test_before_rename(to);
    }
    return fails() ? -1 : (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, 0);
}

/* The descriptor is closed even so, as on Linux. */
int close(int file)
{
    int closed = (int)syscall(SYS_close, file);
    return fails() ? -1 : closed;
}

int flock(int file, int operation);
int flock(int file, int operation)
{
    return test_local_locks ? 0 : (int)syscall(SYS_flock, file, operation);
}

/* Reads whole files. Opens without blocking, so that a pipe is refused instead of hanging. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "core/system.h"

int tchi_file_fill(int descriptor, void *text, size_t bytes)
{
    char *at = text;
    while (bytes > 0) {
        ssize_t got = read(descriptor, at, bytes);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return 0;
        }
        at += got;
        bytes -= (size_t)got;
    }
    return 1;
}

int tchi_file_write(int descriptor, const void *text, size_t bytes)
{
    const char *at = text;
    while (bytes > 0) {
        ssize_t written = write(descriptor, at, bytes);
        if (written <= 0) {
            return 0;
        }
        at += written;
        bytes -= (size_t)written;
    }
    return 1;
}

static tch_status refuse_file(const char *path, int error)
{
    char text[TCHI_ERRNO_SIZE];
    return tchi_fail(TCH_ERR_IO, "tch_kernel_compile: path %.600s cannot be read: %s", path,
                     tchi_errno_text(error, text));
}

static tch_status check_kind(const char *path, const struct stat *found)
{
    if (!S_ISREG(found->st_mode)) {
        return tchi_fail(TCH_ERR_IO, "tch_kernel_compile: path %.600s is a %s, expected a file", path,
                         S_ISDIR(found->st_mode) ? "folder" : "device, pipe or socket");
    }
    if ((uint64_t)found->st_size > TCHI_SOURCE_MOST) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: path %.600s has %lld bytes, expected at most %zu", path,
                         (long long)found->st_size, TCHI_SOURCE_MOST);
    }
    return TCH_OK;
}

static tch_status read_open(int descriptor, const char *path, tchi_file *file)
{
    struct stat found;
    if (fstat(descriptor, &found) != 0) {
        return refuse_file(path, errno);
    }
    TCHI_TRY(check_kind(path, &found));
    file->bytes = (size_t)found.st_size;
    TCHI_TRY(tchi_host_take(file->bytes + 1, "a kernel's source", &file->text));
    errno = EIO;
    if (!tchi_file_fill(descriptor, file->text, file->bytes)) {
        return refuse_file(path, errno);
    }
    const char *end = memchr(file->text, '\0', file->bytes);
    if (end != NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_compile: path %.600s has a NUL at byte %lld, expected the text of a source", path,
                         (long long)(end - file->text));
    }
    return TCH_OK;
}

tch_status tchi_file_read(const char *path, tchi_file *file)
{
    *file = (tchi_file){0};
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0) {
        return refuse_file(path, errno);
    }
    tch_status status = read_open(descriptor, path, file);
    close(descriptor);
    if (status != TCH_OK) {
        tchi_file_release(file);
    }
    return status;
}

void tchi_file_release(tchi_file *file)
{
    if (file->text != NULL) {
        tchi_host_release(file->text, file->bytes + 1);
    }
    *file = (tchi_file){0};
}

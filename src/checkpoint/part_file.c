/* Atomic writing of files. The order of the last steps matters: sync the bytes, rename, sync the folder. */
#include "part_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/status.h"
#include "core/system.h"

_Static_assert(sizeof(off_t) == 8, "a checkpoint may be larger than 2 GiB");

/* Names have 64 random bits, so a second attempt is rare and a tenth indicates another problem. */
#define ATTEMPTS 10

/* --- leftovers ---------------------------------------------------------------------------------------------------- */

/* Temporary files of killed processes are removed if all of this holds: the name is that of a temporary file, it
 * belongs to this user, it was not written for an hour, and it is not locked. The lock alone is not enough: on some
 * network file systems locks are local to a machine, and files of other ranks look unlocked. */
#define ABANDONED_S 3600

static bool is_part_name(const char *name)
{
    static const char prefix[] = TCHI_PART_PREFIX;
    size_t start = sizeof prefix - 1;
    if (strncmp(name, prefix, start) != 0) {
        return false;
    }
    size_t digits = strspn(name + start, "0123456789abcdef");
    return digits == TCHI_PART_DIGITS && strcmp(name + start + digits, TCHI_PART_SUFFIX) == 0;
}

static void remove_if_abandoned(int folder, const char *name, time_t now)
{
    struct stat status;
    int file = openat(folder, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) {
        return;
    }
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
        status.st_mtime < now - ABANDONED_S && flock(file, LOCK_EX | LOCK_NB) == 0) {
        (void)unlinkat(folder, name, 0);
    }
    close(file);
}

/* Locks the new temporary file and removes leftovers, ignoring errors. Ages are by the file system's clock, which may
 * differ from ours. */
static void remove_leftovers(int folder, int file)
{
    struct stat created;
    int listed = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = listed < 0 ? NULL : fdopendir(listed);
    (void)flock(file, LOCK_EX | LOCK_NB);
    if (entries == NULL) {
        if (listed >= 0) {
            close(listed);
        }
        return;
    }
    for (const struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        if (is_part_name(entry->d_name) && fstat(file, &created) == 0) {
            remove_if_abandoned(folder, entry->d_name, created.st_mtime);
        }
    }
    closedir(entries);
}

/* --- the file ----------------------------------------------------------------------------------------------------- */

static tch_status fail_part(const tchi_part_file *part, const char *what, int error)
{
    char text[TCHI_ERRNO_SIZE];
    return tchi_fail(TCH_ERR_IO, "tch_checkpoint_writer_save: path %.600s: %s: %s", part->path, what,
                     tchi_errno_text(error, text));
}

static tch_status open_folder(tchi_part_file *part)
{
    char folder[PATH_MAX];
    size_t length = (size_t)(part->base - part->path);
    if (length >= sizeof folder) {
        return fail_part(part, "the name of its folder is too long", ENAMETOOLONG);
    }
    memcpy(folder, part->path, length);
    folder[length] = '\0';
    part->folder = open(length > 0 ? folder : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return part->folder < 0 ? fail_part(part, "its folder cannot be opened", errno) : TCH_OK;
}

/* An existing path must be a file: a rename would also replace a device. */
static tch_status check_target(tchi_part_file *part)
{
    struct stat target;
    if (part->base[0] == '\0') {
        return fail_part(part, "it names no file", EISDIR);
    }
    if (fstatat(part->folder, part->base, &target, 0) != 0) {
        return errno == ENOENT ? TCH_OK : fail_part(part, "it cannot be replaced", errno);
    }
    if (S_ISDIR(target.st_mode)) {
        return fail_part(part, "it cannot be replaced", EISDIR);
    }
    if (!S_ISREG(target.st_mode)) {
        return tchi_fail(TCH_ERR_IO,
                         "tch_checkpoint_writer_save: path %.600s: it is a device, a pipe or a socket, expected a file",
                         part->path);
    }
    part->permissions = (tchi_permissions){true, target.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO), target.st_gid};
    return TCH_OK;
}

/* A new file has the permissions of the umask and the folder. One that replaces another is private until it is
 * complete, and then gets the other's permissions, which may be stricter: an early reader would keep it open. */
static int create_file(tchi_part_file *part)
{
    mode_t mode = part->permissions.replaces ? S_IRUSR | S_IWUSR : 0666;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        snprintf(part->name, sizeof part->name, "%s%0*llx%s", TCHI_PART_PREFIX, TCHI_PART_DIGITS,
                 (unsigned long long)tchi_random_bits(), TCHI_PART_SUFFIX);
        int file = openat(part->folder, part->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
        if (file >= 0 || errno != EEXIST) {
            return file;
        }
    }
    errno = EEXIST;
    return -1;
}

static tch_status create_part(tchi_part_file *part)
{
    TCHI_TRY(open_folder(part));
    TCHI_TRY(check_target(part));
    part->file = create_file(part);
    if (part->file < 0) {
        part->name[0] = '\0';
        return fail_part(part, "no file can be created in its folder", errno);
    }
    remove_leftovers(part->folder, part->file);
    return TCH_OK;
}

tch_status tchi_part_file_create(tchi_part_file *part, const char *path, const tchi_permissions *permissions)
{
    const char *slash = strrchr(path, '/');
    *part = (tchi_part_file){.path = path, .base = slash != NULL ? slash + 1 : path, .folder = -1, .file = -1};
    part->permissions = permissions != NULL ? *permissions : part->permissions;
    tch_status status = create_part(part);
    if (status != TCH_OK) {
        tchi_part_file_close(part);
    }
    return status;
}

tch_status tchi_part_file_write(tchi_part_file *part, int64_t at, const void *bytes, int64_t count)
{
    const char *from = bytes;
    while (count > 0) {
        ssize_t written = pwrite(part->file, from, (size_t)count, (off_t)at);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            return fail_part(part, "writing failed", written < 0 ? errno : ENOSPC);
        }
        from += written;
        at += written;
        count -= written;
    }
    return TCH_OK;
}

/* Some file systems cannot sync a folder, and report that. */
static tch_status sync_folder(const tchi_part_file *part)
{
    if (fsync(part->folder) == 0 || errno == EINVAL || errno == ENOTSUP) {
        return TCH_OK;
    }
    return fail_part(part, "the file is complete, but its folder could not be written to the disk", errno);
}

/* Sets the permissions of the replaced file. Those of the group apply to its group: if the file cannot be given to it,
 * our group gets at most the permissions of others. */
static tch_status give_permissions(const tchi_part_file *part)
{
    struct stat now;
    mode_t mode = part->permissions.mode;
    gid_t group = part->permissions.group;
    if (fstat(part->file, &now) != 0) {
        return fail_part(part, "the permissions of the file it replaces cannot be kept", errno);
    }
    if (now.st_gid != group && fchown(part->file, (uid_t)-1, group) != 0) {
        mode &= ~(mode_t)S_IRWXG | (mode & S_IRWXO) << 3;
    }
    if (fchmod(part->file, mode) != 0) {
        return fail_part(part, "the permissions of the file it replaces cannot be kept", errno);
    }
    return TCH_OK;
}

tch_status tchi_part_file_flush(tchi_part_file *part)
{
    TCHI_TRY(part->permissions.replaces ? give_permissions(part) : TCH_OK);
    return fsync(part->file) == 0 ? TCH_OK : fail_part(part, "the file could not be written to the disk", errno);
}

tch_status tchi_part_file_commit(tchi_part_file *part)
{
    if (renameat(part->folder, part->name, part->folder, part->base) != 0) {
        return fail_part(part, "the finished file could not be given this name", errno);
    }
    part->name[0] = '\0';
    return sync_folder(part);
}

/* The lock ends with the descriptor, after the rename. */
void tchi_part_file_close(tchi_part_file *part)
{
    if (part->name[0] != '\0') {
        (void)unlinkat(part->folder, part->name, 0);
    }
    if (part->file >= 0) {
        close(part->file);
    }
    if (part->folder >= 0) {
        close(part->folder);
    }
}

/* Temporary files that a killed process left behind. Whoever writes one holds a lock on it, which the system lets go
 * when the process ends, however it ends; so a file whose lock can be had is nobody's. Process numbers would not do:
 * another container or machine may share the folder. Where a file system has no locks, leftovers stay. */
#include "part_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

/* Between its creation and its lock a file looks like a leftover. Who removes it does so under the lock, so that once
 * we have it, either the file is still there and nobody else will touch it, or it has no name any more. */
bool tchi_part_lock(int file)
{
    struct stat status;
    while (flock(file, LOCK_EX) != 0) {
        if (errno != EINTR) {
            return true; /* no locks here, for those who clean up neither */
        }
    }
    return fstat(file, &status) != 0 || status.st_nlink > 0;
}

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

/* The name may have gone to its checkpoint since it was listed, and then the lock is had on that: compared under the
 * lock, name and file cannot part again before the removal. */
static void remove_if_abandoned(int folder, const char *name)
{
    struct stat opened;
    struct stat named;
    int file = openat(folder, name, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) {
        return;
    }
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &opened) == 0 && S_ISREG(opened.st_mode) &&
        fstatat(folder, name, &named, AT_SYMLINK_NOFOLLOW) == 0 && opened.st_dev == named.st_dev &&
        opened.st_ino == named.st_ino) {
        (void)unlinkat(folder, name, 0);
    }
    close(file);
}

void tchi_remove_leftovers(int folder)
{
    int listed = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = listed < 0 ? NULL : fdopendir(listed);
    if (entries == NULL) {
        if (listed >= 0) {
            close(listed);
        }
        return;
    }
    for (const struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        if (is_part_name(entry->d_name)) {
            remove_if_abandoned(folder, entry->d_name);
        }
    }
    closedir(entries);
}

/* Temporary files that a killed process left behind. One is removed when all of this holds: it has the name of one, it
 * belongs to this user, nothing was written to it for an hour, and it is not locked. The lock alone would not do: some
 * network file systems keep locks local to a machine, and then the files that other ranks are writing look free. */
#include "part_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

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

/* The time is that of the file system: its clock may differ from ours. */
void tchi_remove_leftovers(int folder, int file)
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

/* Finding and opening the cache's folder. Code that lies in it is run: whoever could write there could run
 * anything as this user, so it is looked at each time, through the descriptor that is then used. */
#define _GNU_SOURCE /* secure_getenv */
#include "folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torchium/kernel.h>

#include "core/status.h"
#include "core/system.h"

/* Not for a program that has more rights than its caller, who would choose what it runs. */
static const char *read_variable(const char *name)
{
    const char *value = secure_getenv(name);
    return value != NULL && value[0] != '\0' ? value : NULL;
}

tch_status tchi_cache_folder_name(char name[PATH_MAX])
{
    static const struct {
        const char *variable, *below;
    } places[] = {
        {"TORCHIUM_CACHE", ""}, {"XDG_CACHE_HOME", "/torchium/kernels"}, {"HOME", "/.cache/torchium/kernels"}};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const char *value = read_variable(places[i].variable);
        if (value == NULL) {
            continue;
        }
        if (value[0] != '/' || snprintf(name, PATH_MAX, "%s%s", value, places[i].below) >= PATH_MAX) {
            return tchi_fail(TCH_ERR_IO,
                             "the cache of kernels: %s is \"%.200s\", expected an absolute path of less "
                             "than %d bytes",
                             places[i].variable, value, PATH_MAX);
        }
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_IO,
                     "the cache of kernels: none of TORCHIUM_CACHE, XDG_CACHE_HOME and HOME is set, set one");
}

/* Every folder on the way that is not there; what cannot be made is noticed when the last one is opened. */
static void make_folders(const char *name)
{
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s", name);
    for (char *slash = strchr(part + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(part, S_IRWXU);
        *slash = '/';
    }
    (void)mkdir(part, S_IRWXU);
}

static tch_status check_owner(const char *name, int folder)
{
    struct stat found;
    if (fstat(folder, &found) != 0 || found.st_uid != geteuid()) {
        return tchi_fail(TCH_ERR_IO, "the cache of kernels: %.600s belongs to another user; set TORCHIUM_CACHE", name);
    }
    if ((found.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        return tchi_fail(TCH_ERR_IO,
                         "the cache of kernels: others may write to %.600s (mode %03o); take that away with chmod go-w",
                         name, (unsigned)(found.st_mode & 0777));
    }
    return TCH_OK;
}

static int open_directory(const char *name)
{
    return open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

tch_status tchi_cache_folder_open(const char *name, int *folder)
{
    char text[TCHI_ERRNO_SIZE];
    int opened = open_directory(name);
    if (opened < 0 && errno == ENOENT) {
        make_folders(name);
        opened = open_directory(name);
    }
    if (opened < 0) {
        return tchi_fail(TCH_ERR_IO, "the cache of kernels: %.600s cannot be used: %s", name,
                         tchi_errno_text(errno, text));
    }
    tch_status status = check_owner(name, opened);
    if (status != TCH_OK) {
        close(opened);
        return status;
    }
    *folder = opened;
    return TCH_OK;
}

const char *tch_kernel_cache_folder(void)
{
    static _Thread_local char name[PATH_MAX];
    int folder = -1;
    if (tchi_cache_folder_name(name) != TCH_OK || tchi_cache_folder_open(name, &folder) != TCH_OK) {
        return NULL;
    }
    close(folder);
    return name;
}

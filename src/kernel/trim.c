/* Keeping the cache below its limit. Only files with the names of entries are touched, and every one of them may be
 * gone before it is its turn: another process trims the same folder. */
#include "cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <torchium/kernel.h>

#include "core/list.h"
#include "core/status.h"
#include "folder.h"

#define DEFAULT_LIMIT ((int64_t)256 << 20)
#define MIB_MOST ((long long)1 << 40)
#define UNSET (-1)

/* Writing an entry takes milliseconds: what is still half written after this belongs to a process that is no more. */
#define LEFTOVER_SECONDS 600

typedef struct entry {
    char name[2 * TCHI_SHA256_BYTES + sizeof TCHI_CACHE_SUFFIX];
    int64_t bytes;
    struct timespec used;
} entry;

static atomic_llong limit = UNSET;

int64_t tchi_cache_limit(void)
{
    long long said = atomic_load(&limit);
    const char *text = getenv("TORCHIUM_CACHE_SIZE");
    if (said != UNSET || text == NULL || text[0] < '0' || text[0] > '9') {
        return said != UNSET ? said : DEFAULT_LIMIT;
    }
    char *end;
    long long mib = strtoll(text, &end, 10);
    return *end != '\0' ? DEFAULT_LIMIT : mib > MIB_MOST ? INT64_MAX : (int64_t)mib << 20;
}

static bool are_hex_digits(const char *text, size_t count)
{
    return strspn(text, "0123456789abcdef") == count;
}

static int by_use(const void *a, const void *b)
{
    const struct timespec *x = &((const entry *)a)->used;
    const struct timespec *y = &((const entry *)b)->used;
    int64_t seconds = (int64_t)x->tv_sec - y->tv_sec;
    int64_t order = seconds != 0 ? seconds : (int64_t)x->tv_nsec - y->tv_nsec;
    return (order > 0) - (order < 0);
}

static void add_or_remove_file(int folder, const char *name, tchi_list *entries)
{
    struct stat found;
    const size_t digits = (size_t)2 * TCHI_SHA256_BYTES, prefix = sizeof TCHI_CACHE_PREFIX - 1;
    bool part = strncmp(name, TCHI_CACHE_PREFIX, prefix) == 0 && are_hex_digits(name + prefix, 16) &&
                strcmp(name + prefix + 16, TCHI_CACHE_PART) == 0;
    bool entry_name = are_hex_digits(name, digits) && strcmp(name + digits, TCHI_CACHE_SUFFIX) == 0;
    if ((!part && !entry_name) || fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) != 0) {
        return;
    }
    if (part) {
        if (time(NULL) - found.st_mtime > LEFTOVER_SECONDS) {
            (void)unlinkat(folder, name, 0);
        }
        return;
    }
    entry one = {.bytes = found.st_size, .used = found.st_mtim};
    memcpy(one.name, name, sizeof one.name);
    (void)tchi_list_add(entries, &one); /* without memory it is not counted this time */
}

/* A descriptor of its own, since reading a folder moves a position that copies would share. */
static void list_entries(int folder, tchi_list *entries)
{
    int copy = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = copy >= 0 ? fdopendir(copy) : NULL;
    if (stream == NULL) {
        if (copy >= 0) {
            close(copy);
        }
        return;
    }
    for (struct dirent *found = readdir(stream); found != NULL; found = readdir(stream)) {
        add_or_remove_file(folder, found->d_name, entries);
    }
    closedir(stream);
}

void tchi_cache_trim(int folder, int64_t most)
{
    tchi_list list = {.item_size = sizeof(entry)};
    list_entries(folder, &list);
    entry *entries = list.items;
    int64_t total = 0;
    for (int64_t i = 0; i < list.count; i++) {
        total += entries[i].bytes;
    }
    if (total > most) {
        qsort(entries, (size_t)list.count, sizeof *entries, by_use);
    }
    for (int64_t i = 0; i < list.count && (total > most || most == 0); i++) {
        if (unlinkat(folder, entries[i].name, 0) == 0 || errno == ENOENT) {
            total -= entries[i].bytes;
        }
    }
    tchi_list_release(&list);
}

tch_status tch_kernel_cache_limit(int64_t bytes)
{
    char name[PATH_MAX];
    int folder = -1;
    if (bytes < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_cache_limit: bytes is %lld, expected 0 (keep nothing) or more", (long long)bytes);
    }
    atomic_store(&limit, bytes);
    if (tchi_cache_folder_name(name) == TCH_OK && tchi_cache_folder_open(name, &folder) == TCH_OK) {
        tchi_cache_trim(folder, bytes);
        close(folder);
    }
    return TCH_OK;
}

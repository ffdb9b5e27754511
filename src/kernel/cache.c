/* Cache entries: lookup, storage, removal. An entry is a header and an image; the header has the key and a hash of the
 * image, which detects truncated and foreign files.
 *
 * Code in the folder is executed: anyone who can write there can run anything as this user, so permissions are checked
 * on every access, through the descriptor in use. */
#define _GNU_SOURCE /* secure_getenv */
#include "cache.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <torchium/kernel.h>
#include <torchium/version.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "core/system.h"
#include "file.h"

/* Raised when the entries or the parts of the key change. */
#define FORMAT "2"
#define MAGIC "TCHKERN" FORMAT
#define IMAGE_ALIGNMENT 64
#define DEFAULT_LIMIT ((int64_t)256 << 20)
#define MIB_MOST ((long long)1 << 40)
#define UNSET (-1)

/* Writing an entry takes milliseconds: a partial file older than this belongs to a dead process. */
#define LEFTOVER_SECONDS 600

/* Name of an entry being written: prefix, 16 digits, suffix. */
#define PART_PREFIX ".torchium-"
#define PART_SUFFIX ".kernel.part"

typedef struct header {
    char magic[8];
    uint64_t bytes; /* of the image */
    uint8_t key[TCHI_SHA256_BYTES];
    uint8_t digest[TCHI_SHA256_BYTES];
} header;
_Static_assert(sizeof(header) == 80, "a header has no gaps");

/* --- keys ------------------------------------------------------------------------------------------------------- */

/* A part of a key: label and contents with their lengths, so that different lists of parts cannot collide. */
static void hash_text(tchi_sha256_state *hash, const char *label, const char *text)
{
    uint64_t sizes[2] = {strlen(label), strlen(text)};
    tchi_sha256_add(hash, sizes, sizeof sizes);
    tchi_sha256_add(hash, label, sizes[0]);
    tchi_sha256_add(hash, text, sizes[1]);
}

tchi_cache_key tchi_cache_key_make(const tch_kernel_text *text, const char *compiler)
{
    tchi_cache_key key = {.usable = compiler[0] != '\0'};
    tchi_sha256_state hash;
    tchi_sha256_begin(&hash);
    hash_text(&hash, "format", FORMAT);
    hash_text(&hash, "library", TCH_VERSION_STRING);
    hash_text(&hash, "compiler", compiler);
    hash_text(&hash, "file", text->file);
    hash_text(&hash, "source", text->source);
    hash_text(&hash, "name", text->name);
    for (int32_t i = 0; i < text->option_count; i++) {
        hash_text(&hash, "option", text->options[i]);
    }
    tchi_sha256_end(&hash, key.bytes);
    return key;
}

typedef struct entry_name {
    char text[2 * TCHI_SHA256_BYTES + sizeof TCHI_CACHE_SUFFIX];
} entry_name;

static entry_name name_of(const tchi_cache_key *key)
{
    entry_name name;
    for (int i = 0; i < TCHI_SHA256_BYTES; i++) {
        snprintf(name.text + 2 * i, 3, "%02x", key->bytes[i]);
    }
    snprintf(name.text + 2 * TCHI_SHA256_BYTES, sizeof TCHI_CACHE_SUFFIX, "%s", TCHI_CACHE_SUFFIX);
    return name;
}

/* --- the folder -------------------------------------------------------------------------------------------------- */

/* Variables are ignored in a privileged program, whose caller would choose what it runs. */
static tch_status name_folder(char name[PATH_MAX])
{
    static const struct {
        const char *variable, *below;
    } places[] = {
        {"TORCHIUM_CACHE", ""}, {"XDG_CACHE_HOME", "/torchium/kernels"}, {"HOME", "/.cache/torchium/kernels"}};
    for (size_t i = 0; i < sizeof places / sizeof places[0]; i++) {
        const char *value = secure_getenv(places[i].variable);
        if (value == NULL || value[0] == '\0') {
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

/* Creates missing parent folders; failures surface when the last one is opened. */
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
                         "the cache of kernels: others may write to %.600s (mode %03o); run chmod go-w on it", name,
                         (unsigned)(found.st_mode & 0777));
    }
    return TCH_OK;
}

static int open_directory(const char *name)
{
    return open(name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* Creates the folder if missing and opens it: it must be a real folder of this user that others cannot write to. */
static tch_status open_folder(const char *name, int *folder)
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

/* -1 if there is none. */
static int open_cache_folder(void)
{
    char name[PATH_MAX];
    int folder = -1;
    return name_folder(name) == TCH_OK && open_folder(name, &folder) == TCH_OK ? folder : -1;
}

/* --- finding ---------------------------------------------------------------------------------------------------- */

/* Accepts only a file of this user that others cannot write to. */
static bool read_header(int file, const tchi_cache_key *key, header *head)
{
    struct stat found;
    return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() &&
           (found.st_mode & (S_IWGRP | S_IWOTH)) == 0 && tchi_file_fill(file, head, sizeof *head) &&
           memcmp(head->magic, MAGIC, sizeof head->magic) == 0 &&
           memcmp(head->key, key->bytes, sizeof head->key) == 0 && head->bytes > 0 &&
           head->bytes == (uint64_t)found.st_size - sizeof *head;
}

static bool read_image(int file, const header *head, void *image)
{
    uint8_t digest[TCHI_SHA256_BYTES];
    if (!tchi_file_fill(file, image, head->bytes)) {
        return false;
    }
    tchi_sha256(image, head->bytes, digest);
    return memcmp(digest, head->digest, sizeof digest) == 0;
}

/* *damaged: whether to remove the entry; not set if memory is short. */
static bool read_entry(int file, const tchi_cache_key *key, tch_kernel_image *image, bool *damaged)
{
    header head;
    *damaged = !read_header(file, key, &head);
    void *data = *damaged ? NULL : tchi_host_allocate(head.bytes, IMAGE_ALIGNMENT);
    if (data == NULL) {
        return false;
    }
    *damaged = !read_image(file, &head, data);
    if (*damaged) {
        tchi_host_release(data, head.bytes);
        return false;
    }
    *image = (tch_kernel_image){data, head.bytes};
    return true;
}

bool tchi_cache_find(const tchi_cache_key *key, tch_kernel_image *image)
{
    bool found = false, damaged = false;
    entry_name name = name_of(key);
    int folder = open_cache_folder();
    int file = folder >= 0 ? openat(folder, name.text, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC) : -1;
    if (file >= 0) {
        found = read_entry(file, key, image, &damaged);
        if (found) {
            (void)futimens(file, NULL); /* used now: what is removed first goes by this */
        } else if (damaged) {
            (void)unlinkat(folder, name.text, 0);
        }
        close(file);
    }
    if (folder >= 0) {
        close(folder);
    }
    return found;
}

/* --- the limit --------------------------------------------------------------------------------------------------- */

typedef struct entry {
    entry_name name;
    int64_t bytes;
    struct timespec used;
} entry;

static atomic_llong limit = UNSET;

static int64_t cache_limit(void)
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
    const size_t digits = (size_t)2 * TCHI_SHA256_BYTES, prefix = sizeof PART_PREFIX - 1;
    bool part = strncmp(name, PART_PREFIX, prefix) == 0 && are_hex_digits(name + prefix, 16) &&
                strcmp(name + prefix + 16, PART_SUFFIX) == 0;
    bool whole = are_hex_digits(name, digits) && strcmp(name + digits, TCHI_CACHE_SUFFIX) == 0;
    if ((!part && !whole) || fstatat(folder, name, &found, AT_SYMLINK_NOFOLLOW) != 0) {
        return;
    }
    if (part) {
        if (time(NULL) - found.st_mtime > LEFTOVER_SECONDS) {
            (void)unlinkat(folder, name, 0);
        }
        return;
    }
    entry one = {.bytes = found.st_size, .used = found.st_mtim};
    memcpy(one.name.text, name, sizeof one.name.text);
    (void)tchi_list_add(entries, &one); /* without memory it is not counted this time */
}

/* Reopens the folder: reading moves a position that duplicates would share. */
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

/* Removes the least recently used entries until `most` bytes are left, and leftovers of killed processes. Touches only
 * files named like entries, any of which another process may remove meanwhile. */
static void trim_cache(int folder, int64_t most)
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
        if (unlinkat(folder, entries[i].name.text, 0) == 0 || errno == ENOENT) {
            total -= entries[i].bytes;
        }
    }
    tchi_list_release(&list);
}

/* --- keeping ---------------------------------------------------------------------------------------------------- */

static bool write_entry(int file, const tchi_cache_key *key, const tch_kernel_image *image)
{
    header head = {.bytes = image->bytes};
    memcpy(head.magic, MAGIC, sizeof head.magic);
    memcpy(head.key, key->bytes, sizeof head.key);
    tchi_sha256(image->data, image->bytes, head.digest);
    return tchi_file_write(file, &head, sizeof head) && tchi_file_write(file, image->data, image->bytes);
}

/* No fsync: the hash detects an incomplete entry after a crash. */
static void write_into(int folder, const tchi_cache_key *key, const tch_kernel_image *image)
{
    entry_name name = name_of(key);
    char part[64];
    snprintf(part, sizeof part, "%s%016llx%s", PART_PREFIX, (unsigned long long)tchi_random_bits(), PART_SUFFIX);
    int file = openat(folder, part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR);
    if (file < 0) {
        return;
    }
    bool whole = write_entry(file, key, image);
    whole = close(file) == 0 && whole;
    if (!whole || renameat(folder, part, folder, name.text) != 0) {
        (void)unlinkat(folder, part, 0);
    }
}

void tchi_cache_keep(const tchi_cache_key *key, const tch_kernel_image *image)
{
    int64_t most = cache_limit();
    if (most < (int64_t)sizeof(header) || image->bytes > (uint64_t)most - sizeof(header)) {
        return;
    }
    int folder = open_cache_folder();
    if (folder < 0) {
        return;
    }
    write_into(folder, key, image);
    trim_cache(folder, most);
    close(folder);
}

void tchi_cache_remove(const tchi_cache_key *key)
{
    int folder = open_cache_folder();
    if (folder >= 0) {
        (void)unlinkat(folder, name_of(key).text, 0);
        close(folder);
    }
}

/* --- kernel.h ---------------------------------------------------------------------------------------------------- */

const char *tch_kernel_cache_folder(void)
{
    static _Thread_local char name[PATH_MAX];
    int folder = -1;
    if (name_folder(name) != TCH_OK || open_folder(name, &folder) != TCH_OK) {
        return NULL;
    }
    close(folder);
    return name;
}

tch_status tch_kernel_cache_limit(int64_t bytes)
{
    if (bytes < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_cache_limit: bytes is %lld, expected 0 (keep nothing) or more", (long long)bytes);
    }
    atomic_store(&limit, bytes);
    int folder = open_cache_folder();
    if (folder >= 0) {
        trim_cache(folder, bytes);
        close(folder);
    }
    return TCH_OK;
}

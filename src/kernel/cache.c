/* Entries of the cache: found, kept, removed. An entry is a header and an image; the header has the key and a hash of
 * the image, so that half a file, or one of another program, is known for what it is. */
#include "cache.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torchium/version.h>

#include "core/allocator.h"
#include "core/status.h"
#include "core/system.h"
#include "file.h"
#include "folder.h"

/* Raised when the entries or the parts of the key change. */
#define FORMAT "2"
#define MAGIC "TCHKERN" FORMAT
#define IMAGE_ALIGNMENT 64

typedef struct header {
    char magic[8];
    uint64_t bytes; /* of the image */
    uint8_t key[TCHI_SHA256_BYTES];
    uint8_t digest[TCHI_SHA256_BYTES];
} header;
_Static_assert(sizeof(header) == 80, "a header has no gaps");

/* --- keys ------------------------------------------------------------------------------------------------------- */

/* A part of a key: label and contents behind their lengths, so that no two lists of parts look the same. */
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

/* -1 where there is none that can be used. */
static int open_cache_folder(void)
{
    char name[PATH_MAX];
    int folder = -1;
    return tchi_cache_folder_name(name) == TCH_OK && tchi_cache_folder_open(name, &folder) == TCH_OK ? folder : -1;
}

/* --- finding ---------------------------------------------------------------------------------------------------- */

/* Only a file of this user that nobody else could have written counts. */
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

/* *damaged where the entry should go. Want of memory says nothing about it. */
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

/* --- keeping ---------------------------------------------------------------------------------------------------- */

static bool write_entry(int file, const tchi_cache_key *key, const tch_kernel_image *image)
{
    header head = {.bytes = image->bytes};
    memcpy(head.magic, MAGIC, sizeof head.magic);
    memcpy(head.key, key->bytes, sizeof head.key);
    tchi_sha256(image->data, image->bytes, head.digest);
    return tchi_file_write(file, &head, sizeof head) && tchi_file_write(file, image->data, image->bytes);
}

/* Nothing is forced to the disk: after a crash the hash tells a whole entry from half of one. */
static void write_into(int folder, const tchi_cache_key *key, const tch_kernel_image *image)
{
    entry_name name = name_of(key);
    char part[64];
    snprintf(part, sizeof part, "%s%016llx%s", TCHI_CACHE_PREFIX, (unsigned long long)tchi_random_bits(),
             TCHI_CACHE_PART);
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
    int64_t most = tchi_cache_limit();
    if (most < (int64_t)sizeof(header) || image->bytes > (uint64_t)most - sizeof(header)) {
        return;
    }
    int folder = open_cache_folder();
    if (folder < 0) {
        return;
    }
    write_into(folder, key, image);
    tchi_cache_trim(folder, most);
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

/* Walking through what a source includes: a list of files that grows while it is read. A file counts as seen when it
 * was reached in the same folder, whatever the spelling, so that circles end. */
#include "includes.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "core/allocator.h"
#include "core/status.h"

#define FILES_MOST 4096

typedef struct seen_file {
    char *path; /* owned */
    dev_t device, folder_device;
    ino_t inode, folder_inode;
} seen_file;

typedef struct walk {
    const tchi_kernel_input *input;
    tchi_list files;
    bool known;
} walk;

void tchi_key_add(tchi_sha256_state *hash, const char *label, const void *bytes, size_t count)
{
    uint64_t sizes[2] = {strlen(label), count};
    tchi_sha256_add(hash, sizes, sizeof sizes);
    tchi_sha256_add(hash, label, strlen(label));
    tchi_sha256_add(hash, bytes, count);
}

static bool is_seen(const walk *w, const seen_file *file)
{
    const seen_file *files = w->files.items;
    for (int64_t i = 0; i < w->files.count; i++) {
        if (files[i].inode == file->inode && files[i].device == file->device &&
            files[i].folder_inode == file->folder_inode && files[i].folder_device == file->folder_device) {
            return true;
        }
    }
    return false;
}

/* The folder of a path, which has a slash. */
static void folder_of(const char *path, char folder[PATH_MAX])
{
    size_t length = (size_t)(strrchr(path, '/') - path);
    snprintf(folder, PATH_MAX, "%.*s", length == 0 ? 1 : (int)length, path);
}

static bool identify(const char *path, seen_file *file)
{
    char folder[PATH_MAX];
    struct stat one;
    struct stat two;
    folder_of(path, folder);
    if (stat(path, &one) != 0 || !S_ISREG(one.st_mode) || stat(folder, &two) != 0) {
        return false;
    }
    *file = (seen_file){NULL, one.st_dev, two.st_dev, one.st_ino, two.st_ino};
    return true;
}

static tch_status remember(walk *w, const char *path, seen_file *file)
{
    if (is_seen(w, file)) {
        return TCH_OK;
    }
    if (w->files.count == FILES_MOST) {
        w->known = false;
        return TCH_OK;
    }
    TCHI_TRY(tchi_list_reserve(&w->files, w->files.count + 1));
    TCHI_TRY(tchi_host_take(strlen(path) + 1, "the name of a file", &file->path));
    memcpy(file->path, path, strlen(path) + 1);
    *(seen_file *)tchi_list_extend(&w->files) = *file;
    return TCH_OK;
}

static bool look_in(const char *folder, const char *name, char path[PATH_MAX], seen_file *file)
{
    int used = name[0] == '/' ? snprintf(path, PATH_MAX, "%s", name) : snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return used < PATH_MAX && identify(path, file);
}

/* The first folder that has it, as for a compiler; "..." begins with the folder of the file in which it stands. */
static tch_status look_up(walk *w, const char *own_folder, const tchi_include *include)
{
    char path[PATH_MAX];
    seen_file file;
    if (include->quoted && own_folder != NULL && look_in(own_folder, include->name, path, &file)) {
        return remember(w, path, &file);
    }
    for (int32_t i = 0; i < w->input->text.include_count; i++) {
        if (look_in(w->input->text.includes[i], include->name, path, &file)) {
            return remember(w, path, &file);
        }
    }
    return include->name[0] == '/' && look_in("", include->name, path, &file) ? remember(w, path, &file) : TCH_OK;
}

/* Things with which a text depends on more than itself and its includes: what exists, what time it is, bytes that the
 * assembler reads, and other spellings of # and of the backslash. */
static bool is_open_ended(const char *text)
{
    static const char *const signs[] = {"__has_include", "__has_embed",   "incbin", "__TIME__",
                                        "__DATE__",      "__TIMESTAMP__", "?\?=",   "?\?/"};
    for (size_t i = 0; i < sizeof signs / sizeof signs[0]; i++) {
        if (strstr(text, signs[i]) != NULL) {
            return true;
        }
    }
    return false;
}

static tch_status scan(walk *w, const char *text, const char *own_folder)
{
    tchi_include include;
    w->known = w->known && !is_open_ended(text);
    while (w->known && tchi_include_next(&text, &include)) {
        w->known = include.known;
        if (include.known) {
            TCHI_TRY(look_up(w, own_folder, &include));
        }
    }
    return TCH_OK;
}

/* A file that is there and cannot be read is the compiler's to complain about. */
static tch_status add_file(walk *w, tchi_sha256_state *hash, const char *path)
{
    char folder[PATH_MAX];
    tchi_file file;
    tch_status status = tchi_file_read(path, "the included file", &file);
    if (status != TCH_OK) {
        w->known = false;
        return status == TCH_ERR_OUT_OF_MEMORY ? status : TCH_OK;
    }
    folder_of(path, folder);
    tchi_key_add(hash, "include", path, strlen(path));
    tchi_key_add(hash, "text", file.text, file.bytes);
    status = scan(w, file.text, folder);
    tchi_file_release(&file);
    return status;
}

static tch_status walk_through(walk *w, tchi_sha256_state *hash)
{
    TCHI_TRY(scan(w, w->input->text.source, w->input->folder));
    for (int64_t i = 0; i < w->files.count && w->known; i++) {
        TCHI_TRY(add_file(w, hash, ((const seen_file *)w->files.items)[i].path));
    }
    return TCH_OK;
}

tch_status tchi_includes_add(tchi_sha256_state *hash, const tchi_kernel_input *input, bool *known)
{
    walk w = {.input = input, .files = {.item_size = sizeof(seen_file)}, .known = true};
    tch_status status = walk_through(&w, hash);
    for (int64_t i = 0; i < w.files.count; i++) {
        char *path = ((const seen_file *)w.files.items)[i].path;
        tchi_host_release(path, strlen(path) + 1);
    }
    tchi_list_release(&w.files);
    *known = w.known;
    return status;
}

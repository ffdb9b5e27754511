/* Opens and closes files, and answers queries. The header is read into memory instead of mapped, so that it cannot
 * change while it is checked. */
#include "reader.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/system.h"
#include "format.h"
#include "text.h"

static tch_status fail_system(const char *path, const char *what, int error)
{
    char text[TCHI_ERRNO_SIZE];
    return tchi_fail(TCH_ERR_IO, "%.600s: %s: %s", path, what, tchi_errno_text(error, text));
}

tch_status tchi_checkpoint_bytes(int file, const char *path, int64_t offset, void *to, int64_t count)
{
    char *at = to;
    while (count > 0) {
        ssize_t got = pread(file, at, (size_t)count, (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return fail_system(path, "reading failed", errno);
        }
        if (got == 0) {
            return tchi_fail(TCH_ERR_IO, "%.600s: the file was cut short after it was opened: it ends at byte %lld",
                             path, (long long)offset);
        }
        at += got;
        offset += got;
        count -= got;
    }
    return TCH_OK;
}

/* O_NONBLOCK: opening a pipe must not block. */
tch_status tchi_open_file(const char *path, int *file, struct stat *status)
{
    *file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (*file < 0 || fstat(*file, status) != 0) {
        return fail_system(path, "it cannot be opened", errno);
    }
    if (!S_ISREG(status->st_mode)) {
        return tchi_fail(TCH_ERR_IO, "%.600s: it is %s, expected a file", path,
                         S_ISDIR(status->st_mode) ? "a folder" : "a device, a pipe or a socket");
    }
    return TCH_OK;
}

tch_status tchi_descriptor_borrow(const tch_checkpoint *file, int *descriptor)
{
    struct stat now = {0};
    *descriptor = file->file;
    if (file->file >= 0) {
        return TCH_OK;
    }
    tch_status status = tchi_open_file(file->path, descriptor, &now);
    if (status == TCH_OK && (now.st_dev != file->device || now.st_ino != file->inode)) {
        status = tchi_fail(TCH_ERR_IO, "%.600s: the file was replaced after it was opened; open the checkpoint again",
                           file->path);
    }
    if (status != TCH_OK) {
        tchi_descriptor_return(file, *descriptor);
        *descriptor = -1;
    }
    return status;
}

void tchi_descriptor_return(const tch_checkpoint *file, int descriptor)
{
    if (descriptor >= 0 && descriptor != file->file) {
        close(descriptor);
    }
}

/* The system assigns the lowest free descriptor. */
static void release_high_descriptor(tch_checkpoint *c)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && (rlim_t)c->file >= limit.rlim_cur / 2) {
        close(c->file);
        c->file = -1;
    }
}

/* Checks the header's length against the file's. */
static tch_status read_length(tch_checkpoint *c, int64_t file_bytes)
{
    unsigned char prefix[TCHI_PREFIX_BYTES];
    uint64_t length = 0;
    if (file_bytes < TCHI_PREFIX_BYTES) {
        return tchi_fail(TCH_ERR_IO, "%.600s: it has %lld bytes, too few for a safetensors file", c->path,
                         (long long)file_bytes);
    }
    TCHI_TRY(tchi_checkpoint_bytes(c->file, c->path, 0, prefix, TCHI_PREFIX_BYTES));
    for (int i = TCHI_PREFIX_BYTES - 1; i >= 0; i--) {
        length = length << 8 | prefix[i];
    }
    if (length > TCHI_MOST_HEADER_BYTES) {
        return tchi_fail(TCH_ERR_IO,
                         "%.600s: no safetensors file: its header would have %llu bytes, more than the %d allowed",
                         c->path, (unsigned long long)length, TCHI_MOST_HEADER_BYTES);
    }
    if ((int64_t)length > file_bytes - TCHI_PREFIX_BYTES) {
        return tchi_fail(TCH_ERR_IO, "%.600s: it is cut short: the header has %llu bytes and the file %lld", c->path,
                         (unsigned long long)length, (long long)file_bytes);
    }
    c->text_bytes = (int64_t)length;
    c->data_begin = TCHI_PREFIX_BYTES + (int64_t)length;
    return TCH_OK;
}

static tch_status read_header(tch_checkpoint *c, int64_t file_bytes)
{
    TCHI_TRY(read_length(c, file_bytes));
    TCHI_TRY(tchi_host_take((size_t)c->text_bytes, "the header", &c->text));
    TCHI_TRY(tchi_checkpoint_bytes(c->file, c->path, TCHI_PREFIX_BYTES, c->text, c->text_bytes));
    return tchi_header_read(&c->header, c->path, c->text, c->text_bytes, file_bytes - c->data_begin);
}

/* Only views need the mapping: without it the file can still be read. */
static void map_file(tch_checkpoint *c, int64_t file_bytes)
{
    c->map_bytes = file_bytes;
    c->map = mmap(NULL, (size_t)file_bytes, PROT_READ, MAP_PRIVATE, c->file, 0);
    if (c->map == MAP_FAILED) {
        c->map = NULL;
        c->map_error = errno;
    }
}

static tch_status open_and_read(tch_checkpoint *c)
{
    struct stat status = {0};
    TCHI_TRY(tchi_open_file(c->path, &c->file, &status));
    c->device = status.st_dev;
    c->inode = status.st_ino;
    TCHI_TRY(read_header(c, status.st_size));
    map_file(c, status.st_size);
    release_high_descriptor(c);
    return tchi_shards_find(c);
}

/* The struct and the path in one block. */
tch_status tchi_checkpoint_make(const char *path, tch_checkpoint **checkpoint)
{
    size_t path_bytes = strlen(path) + 1;
    size_t bytes = sizeof(tch_checkpoint) + path_bytes;
    TCHI_TRY(tchi_host_take(bytes, "a checkpoint", checkpoint));
    tch_checkpoint *c = *checkpoint;
    *c = (tch_checkpoint){.file = -1,
                          .header = TCHI_HEADER_INIT,
                          .files = {.item_size = sizeof(tch_checkpoint *)},
                          .path = (char *)(c + 1),
                          .block_bytes = bytes};
    memcpy(c->path, path, path_bytes);
    return TCH_OK;
}

/* Retries while saves replace the index and its files. */
#define MOST_ATTEMPTS 100

tch_status tch_checkpoint_open(const char *path, tch_checkpoint **checkpoint)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_open", "path", path));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_open", "checkpoint", checkpoint));
    bool again = true;
    tch_status status = TCH_OK;
    for (int attempt = 0; attempt < MOST_ATTEMPTS && again; attempt++) {
        tch_checkpoint *opened;
        TCHI_TRY(tchi_checkpoint_make(path, &opened));
        again = false;
        status = tchi_is_index(path) ? tchi_index_open(opened, &again) : open_and_read(opened);
        if (status == TCH_OK) {
            *checkpoint = opened;
        } else {
            tch_checkpoint_close(opened);
        }
    }
    return status;
}

void tch_checkpoint_close(tch_checkpoint *checkpoint)
{
    if (checkpoint == NULL) {
        return;
    }
    if (checkpoint->map != NULL) {
        munmap(checkpoint->map, (size_t)checkpoint->map_bytes);
    }
    if (checkpoint->file >= 0) {
        close(checkpoint->file);
    }
    for (int64_t i = 0; i < checkpoint->files.count; i++) {
        tch_checkpoint_close(((tch_checkpoint **)checkpoint->files.items)[i]);
    }
    tchi_list_release(&checkpoint->files);
    tchi_shards_release(&checkpoint->shards);
    tchi_header_release(&checkpoint->header);
    tchi_host_release(checkpoint->text, (size_t)checkpoint->text_bytes);
    tchi_host_release(checkpoint, checkpoint->block_bytes);
}

const tch_checkpoint *tchi_checkpoint_file(const tch_checkpoint *checkpoint, const tchi_stored *stored)
{
    return checkpoint->files.count > 0 ? ((tch_checkpoint **)checkpoint->files.items)[stored->file] : checkpoint;
}

const int64_t *tchi_checkpoint_sizes(const tch_checkpoint *checkpoint, const tchi_stored *stored)
{
    return stored->ndim > 0 ? (const int64_t *)checkpoint->header.sizes.items + stored->first_size : NULL;
}

/* --- questions -------------------------------------------------------------------------------------------------- */

static const tchi_stored *stored_at(const tch_checkpoint *checkpoint, int64_t index)
{
    bool there = checkpoint != NULL && index >= 0 && index < checkpoint->header.tensors.count;
    return there ? (const tchi_stored *)checkpoint->header.tensors.items + index : NULL;
}

int64_t tch_checkpoint_count(const tch_checkpoint *checkpoint)
{
    return checkpoint == NULL ? 0 : checkpoint->header.tensors.count;
}

int64_t tch_checkpoint_find(const tch_checkpoint *checkpoint, const char *name)
{
    return checkpoint == NULL || name == NULL ? -1 : tchi_names_find(&checkpoint->header.names, name);
}

const char *tch_checkpoint_name(const tch_checkpoint *checkpoint, int64_t index)
{
    const tchi_stored *stored = stored_at(checkpoint, index);
    return stored == NULL ? NULL : stored->name;
}

tch_status tch_checkpoint_get_info(const tch_checkpoint *checkpoint, int64_t index, tch_checkpoint_info *info)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_get_info", "checkpoint", checkpoint));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_get_info", "info", info));
    if (info->struct_size != sizeof *info) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_checkpoint_get_info: struct_size of info is %zu, this library expects %zu",
                         info->struct_size, sizeof *info);
    }
    const tchi_stored *stored = stored_at(checkpoint, index);
    if (stored == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_checkpoint_get_info: index is %lld, and the file has %lld tensors", (long long)index,
                         (long long)tch_checkpoint_count(checkpoint));
    }
    info->name = stored->name;
    info->type = stored->type->name;
    info->dtype = stored->type->dtype;
    info->ndim = stored->ndim;
    info->shape = tchi_checkpoint_sizes(checkpoint, stored);
    info->bytes = stored->end - stored->begin;
    info->has_checksum = stored->has_checksum;
    return TCH_OK;
}

/* --- settings: text, and numbers read from it -------------------------------------------------------------------- */

static const tchi_setting *setting_at(const tch_checkpoint *checkpoint, int64_t index)
{
    bool there = checkpoint != NULL && index >= 0 && index < checkpoint->header.settings.count;
    return there ? (const tchi_setting *)checkpoint->header.settings.items + index : NULL;
}

int64_t tch_checkpoint_key_count(const tch_checkpoint *checkpoint)
{
    return checkpoint == NULL ? 0 : checkpoint->header.settings.count;
}

const char *tch_checkpoint_key(const tch_checkpoint *checkpoint, int64_t index)
{
    const tchi_setting *setting = setting_at(checkpoint, index);
    return setting == NULL ? NULL : setting->key;
}

const char *tch_checkpoint_text(const tch_checkpoint *checkpoint, const char *key)
{
    if (checkpoint == NULL || key == NULL) {
        return NULL;
    }
    const tchi_setting *setting = setting_at(checkpoint, tchi_names_find(&checkpoint->header.keys, key));
    return setting == NULL ? NULL : setting->value;
}

/* Common to both types of numbers. */
static tch_status find_text(const char *function, const tch_checkpoint *checkpoint, const char *key, const void *value,
                            const char **text)
{
    TCHI_TRY(tchi_check_not_null(function, "checkpoint", checkpoint));
    TCHI_TRY(tchi_check_not_null(function, "key", key));
    TCHI_TRY(tchi_check_not_null(function, "value", value));
    *text = tch_checkpoint_text(checkpoint, key);
    if (*text == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %.600s has no setting with the key \"%s\"", function,
                         checkpoint->path, tchi_quote(key).text);
    }
    return TCH_OK;
}

static tch_status no_number(const tch_checkpoint *checkpoint, const char *key, const char *text, const char *expected)
{
    return tchi_fail(TCH_ERR_IO, "%.600s: the setting with the key \"%s\" is \"%s\", expected %s", checkpoint->path,
                     tchi_quote(key).text, tchi_quote(text).text, expected);
}

tch_status tch_checkpoint_number(const tch_checkpoint *checkpoint, const char *key, double *value)
{
    const char *text = "";
    TCHI_TRY(find_text("tch_checkpoint_number", checkpoint, key, value, &text));
    return tchi_number_parse(text, value) ? TCH_OK : no_number(checkpoint, key, text, "a number");
}

tch_status tch_checkpoint_integer(const tch_checkpoint *checkpoint, const char *key, int64_t *value)
{
    const char *text = "";
    TCHI_TRY(find_text("tch_checkpoint_integer", checkpoint, key, value, &text));
    return tchi_integer_parse(text, value) ? TCH_OK : no_number(checkpoint, key, text, "a whole number of 64 bits");
}

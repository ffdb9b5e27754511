/* Saves the writers of all ranks: a file per rank, then the index, which is renamed last. Until then the old index and
 * its files remain: file names contain a random number per save. An index removes the files of the one it replaces and
 * nothing else, so that two processes that save to one path do not remove each other's files.
 *
 * Ranks meet at four barriers: to agree on the number, after every file is synced, after every file is renamed, and
 * after the index is. A failed rank reaches the next barrier; then all ranks stop. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include <torchium/version.h>

#include "comm/comm.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/system.h"
#include "format.h"
#include "json.h"
#include "part_file.h"
#include "reader.h"
#include "writer.h"

static const char middle[] = ".safetensors";

/* The contribution of a rank to the first barrier: permissions, whether there are any, whether it has failed. */
enum { REPLACES = 01000, FAILED = 02000 };

typedef struct shard_save {
    tch_checkpoint_writer *writer;
    tch_context *context;
    tch_comm *comm;
    const char *path;
    size_t folder; /* bytes of the path up to the last slash */
    size_t stem;   /* and of the common prefix of file names */
    int32_t rank, ranks;
    uint32_t number[2];           /* random, of this save, 31 bits each */
    tchi_permissions permissions; /* of the files of the old index */
    tchi_part_file part;          /* of this rank */
    char file[PATH_MAX];
} shard_save;

/* --- names ------------------------------------------------------------------------------------------------------- */

static size_t without(const char *path, size_t length, const char *end)
{
    size_t bytes = strlen(end);
    return length > bytes && memcmp(path + length - bytes, end, bytes) == 0 ? length - bytes : length;
}

/* "model-0123456789abcdef-00002-of-00004.safetensors" */
#define TAIL_SIZE 64
static void name_file(const shard_save *s, int32_t rank, char path[PATH_MAX])
{
    snprintf(path, PATH_MAX, "%.*s-%08x%08x-%05d-of-%05d%s", (int)s->stem, s->path, (unsigned)s->number[0],
             (unsigned)s->number[1], rank + 1, s->ranks, middle);
}

/* Skips `count` characters of a kind; false if they do not match. */
static bool skip_characters(const char **text, const char *kind, size_t count, const char *then)
{
    bool there = strspn(*text, kind) == count && strncmp(*text + count, then, strlen(then)) == 0;
    *text += there ? count + strlen(then) : 0;
    return there;
}

/* Whether a name is that of a file of a save to this path. */
static bool is_of_a_save(const shard_save *s, const char *name)
{
    size_t stem = s->stem - s->folder;
    if (strncmp(name, s->path + s->folder, stem) != 0 || name[stem] != '-') {
        return false;
    }
    name += stem + 1;
    return skip_characters(&name, "0123456789abcdef", 16, "-") && skip_characters(&name, "0123456789", 5, "-of-") &&
           skip_characters(&name, "0123456789", 5, middle) && *name == '\0';
}

/* --- the old index ----------------------------------------------------------------------------------------------- */

/* The files of the index at the path; none if it is missing or invalid. */
static tch_status read_old(const shard_save *s, tchi_index_text *old)
{
    struct stat status;
    tch_status read = tchi_index_read(s->path, old, &status);
    if (read != TCH_OK) {
        tchi_index_release(old);
        *old = (tchi_index_text){.file = -1};
    }
    return read == TCH_ERR_OUT_OF_MEMORY ? read : TCH_OK;
}

static const char *old_path(const shard_save *s, const tchi_index_text *old, int64_t number, char path[PATH_MAX])
{
    int length = snprintf(path, PATH_MAX, "%.*s%s", (int)s->folder, s->path, ((char **)old->files.items)[number]);
    return length < PATH_MAX ? path : "";
}

/* The intersection of the permissions of its files. */
static tch_status find_permissions(shard_save *s)
{
    char path[PATH_MAX];
    struct stat file;
    tchi_index_text old;
    tchi_permissions *found = &s->permissions;
    TCHI_TRY(read_old(s, &old));
    for (int64_t i = 0; i < old.files.count; i++) {
        if (stat(old_path(s, &old, i, path), &file) == 0) {
            mode_t mode = file.st_mode & (S_IRWXU | S_IRWXG | S_IRWXO);
            *found = (tchi_permissions){true, found->replaces ? mode & found->mode : mode, file.st_gid};
        }
    }
    tchi_index_release(&old);
    return TCH_OK;
}

/* Removes only files written by a save: an index of another program may name files in use. */
static void remove_old(const shard_save *s, const tchi_index_text *old)
{
    char path[PATH_MAX];
    for (int64_t i = 0; i < old->files.count; i++) {
        if (is_of_a_save(s, ((char **)old->files.items)[i])) {
            (void)unlink(old_path(s, old, i, path));
        }
    }
}

/* --- the lock ---------------------------------------------------------------------------------------------------- */

#define LOCK_ATTEMPTS 200
#define LOCK_PAUSE_NS 10000000

static const char *lock_path(const shard_save *s, char path[PATH_MAX])
{
    int length = snprintf(path, PATH_MAX, "%.*s.%s.lock", (int)s->folder, s->path, s->path + s->folder);
    return length < PATH_MAX ? path : "";
}

/* Whether the file still has its name: the previous holder of the lock may have removed it. */
static bool is_named(int file, const char *path)
{
    struct stat opened;
    struct stat named;
    return fstat(file, &opened) == 0 && stat(path, &named) == 0 && opened.st_dev == named.st_dev &&
           opened.st_ino == named.st_ino;
}

/* Two processes that replace the index at once would both see the same old one, and leave the other's files behind:
 * hence the lock. It is optional: a save continues without it if the file system has no locks or another process holds
 * it for two seconds. Returns the descriptor, or -1. */
static int take_lock(const char *path)
{
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};
    for (int attempt = 0; attempt < LOCK_ATTEMPTS; attempt++) {
        int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        bool locked = file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0;
        bool busy = file >= 0 && !locked && (errno == EWOULDBLOCK || errno == EINTR);
        if (locked && is_named(file, path)) {
            return file;
        }
        if (file >= 0) {
            close(file);
        }
        if (!locked && !busy) {
            return -1;
        }
        nanosleep(&pause, NULL);
    }
    return -1;
}

static void release_lock(const char *path, int file)
{
    if (file >= 0) {
        (void)unlink(path);
        close(file);
    }
}

/* --- the index --------------------------------------------------------------------------------------------------- */

static void put_index(tchi_json_text *out, const shard_save *s, const tch_checkpoint *all)
{
    const tchi_stored *tensors = all->header.tensors.items;
    int64_t bytes = 0;
    for (int64_t i = 0; i < all->header.tensors.count; i++) {
        bytes += tensors[i].end - tensors[i].begin;
    }
    tchi_json_put_format(out, "{\"metadata\":{\"total_size\":%lld,\"%s\":\"%s\",", (long long)bytes, TCHI_FORMAT_KEY,
                         TCHI_FORMAT_NAME);
    tchi_json_put_format(out, "\"%s\":\"%s\"},\n\"weight_map\":{", TCHI_LIBRARY_VERSION_KEY, TCH_VERSION_STRING);
    for (int64_t i = 0; i < all->header.tensors.count; i++) {
        tchi_json_put(out, i == 0 ? "\n" : ",\n", i == 0 ? 1 : 2);
        tchi_json_put_string(out, tensors[i].name);
        tchi_json_put(out, ":", 1);
        tchi_json_put_string(out, tchi_checkpoint_file(all, &tensors[i])->path + s->folder);
    }
    tchi_json_put(out, "}}\n", 3);
}

/* *standing: the index was renamed, even if a later step failed. */
static tch_status write_text(const char *path, const char *text, int64_t bytes, bool *standing)
{
    tchi_part_file part;
    TCHI_TRY(tchi_part_file_create(&part, path, NULL));
    tch_status status = tchi_part_file_write(&part, 0, text, bytes);
    status = status != TCH_OK ? status : tchi_part_file_flush(&part);
    if (status == TCH_OK) {
        status = tchi_part_file_commit(&part);
        *standing = part.name[0] == '\0';
    }
    tchi_part_file_close(&part);
    return status;
}

/* Replaces the index, then removes the files of the previous one. */
static tch_status replace_index(const shard_save *s, const char *text, int64_t bytes, bool *standing)
{
    char path[PATH_MAX];
    tchi_index_text old;
    int lock = take_lock(lock_path(s, path));
    tch_status status = read_old(s, &old);
    status = status != TCH_OK ? status : write_text(s->path, text, bytes, standing);
    if (status == TCH_OK) {
        remove_old(s, &old);
    }
    release_lock(path, lock);
    tchi_index_release(&old);
    return status;
}

static tch_status write_gathered(const shard_save *s, const tch_checkpoint *all, bool *standing)
{
    tchi_json_text out = {0};
    put_index(&out, s, all);
    int64_t bytes = out.used;
    TCHI_TRY(tchi_host_take((size_t)bytes, "an index", &out.text));
    out.used = 0;
    put_index(&out, s, all);
    tch_status status = replace_index(s, out.text, bytes, standing);
    tchi_host_release(out.text, (size_t)bytes);
    return status;
}

static tch_status write_index(const shard_save *s, bool *standing)
{
    char path[PATH_MAX];
    tch_checkpoint *all = NULL;
    tch_status status = tchi_checkpoint_make(s->path, &all);
    for (int32_t r = 0; r < s->ranks && status == TCH_OK; r++) {
        name_file(s, r, path);
        status = tchi_index_add(all, path);
    }
    status = status != TCH_OK ? status : tchi_index_finish(all);
    status = status != TCH_OK ? status : tchi_shards_check_overlaps(all);
    status = status != TCH_OK ? status : write_gathered(s, all, standing);
    tch_checkpoint_close(all);
    return status;
}

/* --- the ranks together ------------------------------------------------------------------------------------------ */

/* A barrier of all ranks, which also computes the maximum of the numbers. The error is this rank's, or reports
 * another's; if the group itself fails, *met is false. */
static tch_status agree_on(const shard_save *s, tch_status status, int32_t values[TCHI_AGREED], const char *what,
                           bool *met)
{
    char message[1024];
    snprintf(message, sizeof message, "%s", status == TCH_OK ? "" : tch_last_error());
    values[0] |= status == TCH_OK ? 0 : FAILED;
    tch_status comm = s->comm == NULL ? TCH_OK : tchi_comm_largest(s->comm, s->context, values);
    *met = comm == TCH_OK;
    if (!*met || values[0] < FAILED) {
        return comm;
    }
    return status != TCH_OK ? tchi_fail(status, "%s", message)
                            : tchi_fail(TCH_ERR_IO,
                                        "tch_checkpoint_writer_save_sharded: another rank could not %s; the "
                                        "checkpoint that was there still is",
                                        what);
}

/* The first rank broadcasts the random number and the permissions. */
static tch_status agree_on_number(shard_save *s, tch_status status)
{
    bool met;
    int32_t values[TCHI_AGREED] = {0, 0, 0, INT32_MIN};
    if (s->rank == 0 && status == TCH_OK) {
        uint64_t bits = tchi_random_bits();
        status = find_permissions(s);
        values[0] = s->permissions.replaces ? REPLACES | (int32_t)s->permissions.mode : 0;
        values[1] = (int32_t)(bits & 0x7FFFFFFF);
        values[2] = (int32_t)((bits >> 32) & 0x7FFFFFFF);
        values[3] = (int32_t)s->permissions.group;
    }
    TCHI_TRY(agree_on(s, status, values, "begin", &met));
    s->number[0] = (uint32_t)values[1];
    s->number[1] = (uint32_t)values[2];
    s->permissions = (tchi_permissions){values[0] >= REPLACES, (mode_t)values[0] & (REPLACES - 1), (gid_t)values[3]};
    return TCH_OK;
}

/* Writes and syncs the file of this rank under a temporary name, which identifies leftovers of killed saves. */
static tch_status write_file(shard_save *s)
{
    bool met;
    name_file(s, s->rank, s->file);
    tch_status written = tchi_writer_write(s->writer, s->context, s->file, &s->permissions, &s->part);
    tch_status status = agree_on(s, written, (int32_t[TCHI_AGREED]){0}, "write its file", &met);
    if (written == TCH_OK && status != TCH_OK) {
        tchi_part_file_close(&s->part);
    }
    return status;
}

/* Removes the files of all ranks if the first one gives up: no index will name them. */
static void remove_files(shard_save *s)
{
    for (int32_t r = 0; r < (s->rank == 0 ? s->ranks : 1); r++) {
        name_file(s, s->rank == 0 ? r : s->rank, s->file);
        (void)unlink(s->file);
    }
}

/* If the group fails here, only the first rank knows that there will be no index. */
static tch_status name_files(shard_save *s)
{
    bool met;
    tch_status status = tchi_part_file_commit(&s->part);
    tchi_part_file_close(&s->part);
    status = agree_on(s, status, (int32_t[TCHI_AGREED]){0}, "name its file", &met);
    if (status != TCH_OK && (met || s->rank == 0)) {
        remove_files(s);
    }
    return status;
}

static tch_status finish_index(shard_save *s)
{
    bool met;
    bool standing = false;
    tch_status status = s->rank == 0 ? write_index(s, &standing) : TCH_OK;
    if (status != TCH_OK && !standing) {
        remove_files(s);
    }
    return agree_on(s, status, (int32_t[TCHI_AGREED]){0}, "write the index", &met);
}

static tch_status check_save(const shard_save *s)
{
    static const char function[] = "tch_checkpoint_writer_save_sharded";
    TCHI_TRY(tchi_check_not_null(function, "writer", s->writer));
    TCHI_TRY(tchi_check_not_null(function, "path", s->path));
    if (!tchi_is_index(s->path) || s->stem == s->folder || s->path[s->folder] == '.') {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: path is %.600s, expected the name of an index, such as model.safetensors%s", function,
                         s->path, TCHI_INDEX_ENDING);
    }
    if (s->stem + TAIL_SIZE >= PATH_MAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: path has %zu bytes, too many", function, strlen(s->path));
    }
    return TCH_OK;
}

static tch_status save_all(shard_save *s)
{
    TCHI_TRY(agree_on_number(s, check_save(s)));
    TCHI_TRY(write_file(s));
    TCHI_TRY(name_files(s));
    return finish_index(s);
}

tch_status tch_checkpoint_writer_save_sharded(tch_checkpoint_writer *writer, tch_context *context, tch_comm *comm,
                                              const char *path)
{
    shard_save s = {.writer = writer, .context = context, .comm = comm, .path = path, .ranks = 1};
    const char *slash = path == NULL ? NULL : strrchr(path, '/');
    s.folder = slash == NULL ? 0 : (size_t)(slash + 1 - path);
    s.stem = path == NULL ? 0 : without(path, without(path, strlen(path), TCHI_INDEX_ENDING), middle);
    if (comm == NULL) {
        return save_all(&s);
    }
    TCHI_ENTER(context, "tch_checkpoint_writer_save_sharded");
    s.rank = tch_comm_rank(comm);
    s.ranks = tch_comm_size(comm);
    return save_all(&s);
}

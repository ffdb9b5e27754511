/* From the writers of all ranks to one checkpoint: a file of each rank, then the index, which takes its name last.
 * Until then the old index stands, with its files beside it: those of a save have a number of their own in their names,
 * and go when the next index stands.
 *
 * The ranks meet three times: to take the number, when every file is on the disk, and when the index is. A rank that
 * fails goes on to the next meeting all the same and says so there, and then nobody goes further. */
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <torchium/version.h>

#include "comm/comm.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/system.h"
#include "format.h"
#include "json_text.h"
#include "part_file.h"
#include "reader.h"
#include "writer.h"

static const char ending[] = ".index.json";
static const char middle[] = ".safetensors";

/* What a rank may come with to a meeting; the largest counts. */
enum { WELL, FAILED, FAILED_LATE /* the index stands, and so its files must */ };

typedef struct shard_save {
    tch_checkpoint_writer *writer;
    tch_context *context;
    tch_comm *comm;
    const char *path;
    size_t stem; /* bytes of the path that names of files begin with too */
    int32_t rank, ranks;
    uint32_t number[2]; /* of this save, 31 bits each */
    char file[PATH_MAX];
} shard_save;

/* --- names ------------------------------------------------------------------------------------------------------- */

static size_t without(const char *path, size_t length, const char *end)
{
    size_t bytes = strlen(end);
    return length > bytes && memcmp(path + length - bytes, end, bytes) == 0 ? length - bytes : length;
}

/* "-0123456789abcdef-00002-of-00004.safetensors" */
#define TAIL_SIZE 64
static const char *tail_of(const shard_save *s, int32_t rank, char text[TAIL_SIZE])
{
    snprintf(text, TAIL_SIZE, "-%08x%08x-%05d-of-%05d%s", (unsigned)s->number[0], (unsigned)s->number[1], rank + 1,
             s->ranks, middle);
    return text;
}

static void name_file(const shard_save *s, int32_t rank, char path[PATH_MAX])
{
    char tail[TAIL_SIZE];
    snprintf(path, PATH_MAX, "%.*s%s", (int)s->stem, s->path, tail_of(s, rank, tail));
}

/* Passes over `count` characters of a kind; false where they are not there. */
static bool pass(const char **text, const char *kind, size_t count, const char *then)
{
    bool there = strspn(*text, kind) == count && strncmp(*text + count, then, strlen(then)) == 0;
    *text += there ? count + strlen(then) : 0;
    return there;
}

/* Whether a name is that of a file of some save to this path. */
static bool is_of_a_save(const char *name, const char *stem, size_t stem_bytes)
{
    if (strncmp(name, stem, stem_bytes) != 0 || name[stem_bytes] != '-') {
        return false;
    }
    name += stem_bytes + 1;
    return pass(&name, "0123456789abcdef", 16, "-") && pass(&name, "0123456789", 5, "-of-") &&
           pass(&name, "0123456789", 5, middle) && *name == '\0';
}

/* --- the index --------------------------------------------------------------------------------------------------- */

/* The opened files of all ranks, and which of their tensors the index lists: a name that several ranks have added is
 * the first one's. */
typedef struct listing {
    tchi_list files; /* tch_checkpoint * */
    tchi_names names;
    int64_t bytes; /* of tensors */
} listing;

static tch_status open_all(const shard_save *s, listing *l)
{
    char path[PATH_MAX];
    TCHI_TRY(tchi_list_reserve(&l->files, s->ranks));
    for (int32_t r = 0; r < s->ranks; r++) {
        tch_checkpoint *file = NULL;
        name_file(s, r, path);
        TCHI_TRY(tch_checkpoint_open(path, &file));
        *(tch_checkpoint **)tchi_list_extend(&l->files) = file;
    }
    return TCH_OK;
}

static const tch_checkpoint *file_at(const listing *l, int64_t number)
{
    return ((tch_checkpoint **)l->files.items)[number];
}

static tch_status note_names(listing *l)
{
    for (int64_t r = 0; r < l->files.count; r++) {
        for (int64_t i = 0; i < tch_checkpoint_count(file_at(l, r)); i++) {
            const char *name = tch_checkpoint_name(file_at(l, r), i);
            const tchi_stored *stored = (const tchi_stored *)file_at(l, r)->header.tensors.items + i;
            if (tchi_names_find(&l->names, name) < 0) {
                TCHI_TRY(tchi_names_add(&l->names, name, r));
                l->bytes += stored->end - stored->begin;
            }
        }
    }
    return TCH_OK;
}

static void put_index(tchi_json_text *out, const shard_save *s, const listing *l)
{
    const char *slash = strrchr(s->path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash + 1 - s->path);
    bool first = true;
    tchi_json_put_format(out, "{\"metadata\":{\"total_size\":%lld,\"%s\":\"%s\",", (long long)l->bytes, TCHI_FORMAT_KEY,
                         TCHI_FORMAT_NAME);
    tchi_json_put_format(out, "\"%s\":\"%s\"},\n\"weight_map\":{", TCHI_LIBRARY_VERSION_KEY, TCH_VERSION_STRING);
    for (int32_t r = 0; r < s->ranks; r++) {
        char path[PATH_MAX];
        name_file(s, r, path);
        for (int64_t i = 0; i < tch_checkpoint_count(file_at(l, r)); i++) {
            const char *name = tch_checkpoint_name(file_at(l, r), i);
            if (tchi_names_find(&l->names, name) == r) {
                tchi_json_put(out, first ? "\n" : ",\n", first ? 1 : 2);
                tchi_json_put_string(out, name);
                tchi_json_put(out, ":", 1);
                tchi_json_put_string(out, path + folder);
                first = false;
            }
        }
    }
    tchi_json_put(out, "}}\n", 3);
}

/* *standing: the index has its name, whatever came after. */
static tch_status write_text(const char *path, const char *text, int64_t bytes, bool *standing)
{
    tchi_part_file part;
    TCHI_TRY(tchi_part_file_create(&part, path));
    tch_status status = tchi_part_file_write(&part, 0, text, bytes);
    if (status == TCH_OK) {
        status = tchi_part_file_commit(&part);
        *standing = part.name[0] == '\0';
    }
    tchi_part_file_close(&part);
    return status;
}

static tch_status write_listing(const shard_save *s, const listing *l, bool *standing)
{
    tchi_json_text out = {0};
    put_index(&out, s, l);
    int64_t bytes = out.used;
    TCHI_TRY(tchi_host_take((size_t)bytes, "an index", &out.text));
    out.used = 0;
    put_index(&out, s, l);
    tch_status status = write_text(s->path, out.text, bytes, standing);
    tchi_host_release(out.text, (size_t)bytes);
    return status;
}

static tch_status write_index(const shard_save *s, bool *standing)
{
    listing l = {.files = {.item_size = sizeof(tch_checkpoint *)}};
    tch_status status = open_all(s, &l);
    if (status == TCH_OK) {
        status = note_names(&l);
    }
    if (status == TCH_OK) {
        status = write_listing(s, &l, standing);
    }
    for (int64_t i = 0; i < l.files.count; i++) {
        tch_checkpoint_close((tch_checkpoint *)file_at(&l, i));
    }
    tchi_list_release(&l.files);
    tchi_names_release(&l.names);
    return status;
}

/* Files of earlier saves to the same path, and of some that did not end. What cannot be removed stays. */
static void remove_earlier(const shard_save *s)
{
    char folder[PATH_MAX];
    char mine[TAIL_SIZE];
    const char *slash = strrchr(s->path, '/');
    size_t length = slash == NULL ? 0 : (size_t)(slash + 1 - s->path);
    snprintf(folder, sizeof folder, "%.*s", (int)length, s->path);
    DIR *entries = opendir(length > 0 ? folder : ".");
    if (entries == NULL) {
        return;
    }
    tail_of(s, 0, mine);
    for (const struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        const char *name = entry->d_name;
        if (is_of_a_save(name, s->path + length, s->stem - length) &&
            strncmp(name + s->stem - length, mine, 18) != 0) { /* up to the dash behind the number */
            (void)unlinkat(dirfd(entries), name, 0);
        }
    }
    closedir(entries);
}

/* --- the ranks together ------------------------------------------------------------------------------------------ */

/* Every rank comes, whatever happened to it. *worst is what the worst one came with; the error is of the group. */
static tch_status meet(const shard_save *s, int32_t mine, int32_t *worst)
{
    int32_t values[4] = {mine, 0, 0, 0};
    *worst = mine;
    TCHI_TRY(s->comm == NULL ? TCH_OK : tchi_comm_largest(s->comm, s->context, values));
    *worst = values[0];
    return TCH_OK;
}

/* The error of this rank, or one that says whose it was not. */
static tch_status fail_together(tch_status status, const char *message, const char *what)
{
    return status != TCH_OK ? tchi_fail(status, "%s", message)
                            : tchi_fail(TCH_ERR_IO,
                                        "tch_checkpoint_writer_save_sharded: another rank could not %s; the "
                                        "checkpoint that was there still is",
                                        what);
}

static void keep_message(char message[1024], tch_status status)
{
    snprintf(message, 1024, "%s", status == TCH_OK ? "" : tch_last_error());
}

/* All take the number that the first rank has drawn. */
static tch_status take_number(shard_save *s, tch_status status)
{
    char message[1024];
    keep_message(message, status);
    uint64_t bits = tchi_random_bits();
    int32_t values[4] = {status == TCH_OK ? WELL : FAILED, (int32_t)(bits & 0x7FFFFFFF),
                         (int32_t)((bits >> 32) & 0x7FFFFFFF), 0};
    if (s->rank != 0) {
        values[1] = values[2] = 0;
    }
    TCHI_TRY(s->comm == NULL ? TCH_OK : tchi_comm_largest(s->comm, s->context, values));
    s->number[0] = (uint32_t)values[1];
    s->number[1] = (uint32_t)values[2];
    return values[0] == WELL ? TCH_OK : fail_together(status, message, "begin");
}

static tch_status write_file(shard_save *s)
{
    int32_t worst;
    char message[1024];
    name_file(s, s->rank, s->file);
    tch_status status = tch_checkpoint_writer_save(s->writer, s->context, s->file);
    keep_message(message, status);
    TCHI_TRY(meet(s, status == TCH_OK ? WELL : FAILED, &worst));
    if (worst != WELL) {
        (void)unlink(s->file);
        return fail_together(status, message, "write its file");
    }
    return TCH_OK;
}

static tch_status finish_index(const shard_save *s)
{
    int32_t worst;
    char message[1024];
    bool standing = false;
    tch_status status = s->rank == 0 ? write_index(s, &standing) : TCH_OK;
    keep_message(message, status);
    TCHI_TRY(meet(s, status == TCH_OK ? WELL : standing ? FAILED_LATE : FAILED, &worst));
    if (worst == FAILED) {
        (void)unlink(s->file);
    } else if (worst == WELL && s->rank == 0) {
        remove_earlier(s);
    }
    return worst == WELL ? TCH_OK : fail_together(status, message, "write the index");
}

static tch_status check(const shard_save *s)
{
    static const char function[] = "tch_checkpoint_writer_save_sharded";
    if (s->writer == NULL || s->path == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, s->writer == NULL ? "writer" : "path");
    }
    const char *slash = strrchr(s->path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash + 1 - s->path);
    if (!tchi_is_index(s->path) || s->stem == folder || s->path[folder] == '.') {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: path is %.600s, expected the name of an index, such as model.safetensors%s", function,
                         s->path, ending);
    }
    if (s->stem + TAIL_SIZE >= PATH_MAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: path has %zu bytes, too many", function, strlen(s->path));
    }
    return TCH_OK;
}

static tch_status save_all(shard_save *s)
{
    TCHI_TRY(take_number(s, check(s)));
    TCHI_TRY(write_file(s));
    return finish_index(s);
}

tch_status tch_checkpoint_writer_save_sharded(tch_checkpoint_writer *writer, tch_context *context, tch_comm *comm,
                                              const char *path)
{
    shard_save s = {.writer = writer, .context = context, .comm = comm, .path = path, .ranks = 1};
    s.stem = path == NULL ? 0 : without(path, without(path, strlen(path), ending), middle);
    if (comm == NULL) {
        return save_all(&s);
    }
    TCHI_ENTER(context, "tch_checkpoint_writer_save_sharded");
    s.rank = tch_comm_rank(comm);
    s.ranks = tch_comm_size(comm);
    return save_all(&s);
}

/* An index: maps tensors to several files, in the common layout of sharded models,
 *
 *     {"metadata": {...}, "weight_map": {"layer1.weight": "model-00001-of-00002.safetensors", ...}}
 *
 * Files are opened like any other. They are named without a folder, and are in the folder of the index: other paths are
 * rejected. */
#include <string.h>
#include <unistd.h>

#include "core/allocator.h"
#include "core/status.h"
#include "format.h"
#include "json.h"
#include "reader.h"
#include "text.h"

#define MOST_INDEX_BYTES ((int64_t)1 << 30) /* ten million names; limits the memory for a wrong file */

bool tchi_is_index(const char *path)
{
    size_t length = strlen(path);
    size_t ending = strlen(TCHI_INDEX_ENDING);
    return length > ending && strcmp(path + length - ending, TCHI_INDEX_ENDING) == 0;
}

/* --- the text ---------------------------------------------------------------------------------------------------- */

/* An entry of the map. */
typedef struct mapped {
    const char *tensor;
    int32_t file;
} mapped;

static tch_status read_text(const char *path, int file, int64_t bytes, tchi_index_text *index)
{
    if (bytes > MOST_INDEX_BYTES) {
        return tchi_fail(TCH_ERR_IO, "%.600s: not an index: it has %lld bytes, more than the %lld allowed", path,
                         (long long)bytes, (long long)MOST_INDEX_BYTES);
    }
    TCHI_TRY(tchi_host_take((size_t)bytes, "an index", &index->text));
    index->bytes = bytes;
    return tchi_checkpoint_bytes(file, path, 0, index->text, bytes);
}

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == 'E' || c == '+' || c == '-' || c == '.';
}

/* A string, a number or a word. */
static tch_status skip_scalar(tchi_json *json)
{
    const char *string;
    int64_t before = json->at;
    if (json->at < json->length && json->text[json->at] == '"') {
        return tchi_json_string(json, &string);
    }
    while (json->at < json->length && is_word(json->text[json->at])) {
        json->at++;
    }
    return json->at > before ? TCH_OK : tchi_json_fail(json, "expected a value");
}

/* Skips an unused value of any kind and depth, as other programs may store. */
static tch_status skip_value(tchi_json *json)
{
    int64_t depth = 0;
    do {
        if (tchi_json_accept(json, '{') || tchi_json_accept(json, '[')) {
            depth++;
        } else if (depth > 0 && (tchi_json_accept(json, '}') || tchi_json_accept(json, ']'))) {
            depth--;
        } else if (depth == 0 || !(tchi_json_accept(json, ',') || tchi_json_accept(json, ':'))) {
            TCHI_TRY(skip_scalar(json));
        }
    } while (depth > 0);
    return TCH_OK;
}

/* Files are in the folder of the index, whatever the index says. */
static tch_status check_file_name(const tchi_json *json, const char *name)
{
    if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) {
        return tchi_json_fail(json, "it names the file \"%s\", expected one of its own folder", tchi_quote(name).text);
    }
    return TCH_OK;
}

static tch_status read_entry(tchi_json *json, tchi_index_text *text)
{
    mapped entry;
    const char *file;
    TCHI_TRY(tchi_json_string(json, &entry.tensor));
    TCHI_TRY(tchi_json_expect(json, ':'));
    TCHI_TRY(tchi_json_string(json, &file));
    TCHI_TRY(check_file_name(json, file));
    int64_t number = tchi_names_find(&text->names, file);
    if (number < 0) {
        number = text->files.count;
        TCHI_TRY(tchi_list_add(&text->files, &file));
        TCHI_TRY(tchi_names_add(&text->names, file, number));
    }
    entry.file = (int32_t)number; /* an index of 1 GiB has fewer than 2^31 */
    return tchi_list_add(&text->map, &entry);
}

static tch_status read_map(tchi_json *json, tchi_index_text *text)
{
    TCHI_TRY(tchi_json_expect(json, '{'));
    if (tchi_json_accept(json, '}')) {
        return TCH_OK;
    }
    do {
        TCHI_TRY(read_entry(json, text));
    } while (tchi_json_accept(json, ','));
    return tchi_json_expect(json, '}');
}

static tch_status parse_index(const char *path, tchi_index_text *text)
{
    tchi_json json = {.path = path, .what = "index", .text = text->text, .length = text->bytes};
    bool seen = false;
    TCHI_TRY(tchi_json_expect(&json, '{'));
    do {
        const char *member;
        TCHI_TRY(tchi_json_string(&json, &member));
        TCHI_TRY(tchi_json_expect(&json, ':'));
        bool is_map = strcmp(member, "weight_map") == 0;
        if (is_map && seen) {
            return tchi_json_fail(&json, "\"weight_map\" occurs twice");
        }
        seen = seen || is_map;
        TCHI_TRY(is_map ? read_map(&json, text) : skip_value(&json));
    } while (tchi_json_accept(&json, ','));
    TCHI_TRY(tchi_json_expect(&json, '}'));
    TCHI_TRY(tchi_json_end(&json));
    return seen ? TCH_OK : tchi_json_fail(&json, "there is no \"weight_map\"");
}

tch_status tchi_index_read(const char *path, tchi_index_text *index, struct stat *status)
{
    *index = (tchi_index_text){
        .file = -1, .map = {.item_size = sizeof(mapped)}, .files = {.item_size = sizeof(const char *)}};
    tch_status read = tchi_open_file(path, &index->file, status);
    read = read != TCH_OK ? read : read_text(path, index->file, status->st_size, index);
    return read != TCH_OK ? read : parse_index(path, index);
}

void tchi_index_release(tchi_index_text *index)
{
    if (index->file >= 0) {
        close(index->file);
    }
    tchi_host_release(index->text, (size_t)index->bytes);
    tchi_list_release(&index->map);
    tchi_list_release(&index->files);
    tchi_names_release(&index->names);
}

/* --- the files --------------------------------------------------------------------------------------------------- */

static tch_status open_file(tch_checkpoint *c, const char *path)
{
    tch_checkpoint *file = NULL;
    TCHI_TRY(tchi_list_reserve(&c->files, c->files.count + 1));
    TCHI_TRY(tchi_is_index(path) ? tchi_fail(TCH_ERR_IO, "%.600s: it names another index as one of its files", c->path)
                                 : tch_checkpoint_open(path, &file));
    return tchi_list_add(&c->files, &file);
}

static tch_status open_named(tch_checkpoint *c, const char *name)
{
    const char *slash = strrchr(c->path, '/');
    size_t folder = slash == NULL ? 0 : (size_t)(slash + 1 - c->path);
    size_t bytes = folder + strlen(name) + 1;
    char *path;
    TCHI_TRY(tchi_host_take(bytes, "the path of a file", &path));
    memcpy(path, c->path, folder);
    memcpy(path + folder, name, bytes - folder);
    tch_status status = open_file(c, path);
    tchi_host_release(path, bytes);
    return status;
}

static tch_status add_tensor(tch_checkpoint *c, const mapped *entry)
{
    tchi_header *h = &c->header;
    const tch_checkpoint *file = ((tch_checkpoint **)c->files.items)[entry->file];
    int64_t number = tchi_names_find(&file->header.names, entry->tensor);
    if (number < 0) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the index %.600s lists \"%s\", which it does not have", file->path,
                         c->path, tchi_quote(entry->tensor).text);
    }
    if (tchi_names_find(&h->names, entry->tensor) >= 0) {
        return tchi_fail(TCH_ERR_IO, "%.600s: two tensors are called \"%s\"", c->path, tchi_quote(entry->tensor).text);
    }
    const tchi_stored *theirs = (const tchi_stored *)file->header.tensors.items + number;
    const int64_t *sizes = tchi_checkpoint_sizes(file, theirs);
    TCHI_TRY(tchi_list_reserve(&h->tensors, h->tensors.count + 1));
    tchi_stored *stored = tchi_list_extend(&h->tensors);
    *stored = (tchi_stored){.name = theirs->name,
                            .type = theirs->type,
                            .ndim = theirs->ndim,
                            .file = entry->file,
                            .first_size = h->sizes.count,
                            .begin = theirs->begin,
                            .end = theirs->end,
                            .has_checksum = theirs->has_checksum,
                            .checksum = theirs->checksum};
    for (int32_t k = 0; k < theirs->ndim; k++) {
        TCHI_TRY(tchi_list_add(&h->sizes, &sizes[k]));
    }
    return tchi_names_add(&h->names, stored->name, h->tensors.count - 1);
}

/* Settings of several files are those of the first. */
static tch_status add_settings(tchi_header *h, const tchi_header *file)
{
    const tchi_setting *settings = file->settings.items;
    for (int64_t i = 0; i < file->settings.count; i++) {
        if (tchi_names_find(&h->keys, settings[i].key) < 0) {
            TCHI_TRY(tchi_list_add(&h->settings, &settings[i]));
            TCHI_TRY(tchi_names_add(&h->keys, settings[i].key, h->settings.count - 1));
        }
    }
    return TCH_OK;
}

tch_status tchi_index_finish(tch_checkpoint *checkpoint)
{
    checkpoint->header.complete = true;
    for (int64_t i = 0; i < checkpoint->files.count; i++) {
        const tchi_header *file = &((tch_checkpoint **)checkpoint->files.items)[i]->header;
        TCHI_TRY(add_settings(&checkpoint->header, file));
        checkpoint->header.complete = checkpoint->header.complete && file->complete;
    }
    return tchi_shards_find(checkpoint);
}

static tch_status put_together(tch_checkpoint *c, const tchi_index_text *text)
{
    const char *const *names = text->files.items;
    for (int64_t i = 0; i < text->files.count; i++) {
        TCHI_TRY(open_named(c, names[i]));
    }
    const mapped *entries = text->map.items;
    for (int64_t i = 0; i < text->map.count; i++) {
        TCHI_TRY(add_tensor(c, &entries[i]));
    }
    return tchi_index_finish(c);
}

/* Called while the previous index is still open, so that its inode number is not reused. */
static bool is_replaced(const char *path, const struct stat *read)
{
    struct stat now;
    return stat(path, &now) == 0 && (now.st_dev != read->st_dev || now.st_ino != read->st_ino);
}

tch_status tchi_index_open(tch_checkpoint *checkpoint, bool *replaced)
{
    struct stat status = {0};
    tchi_index_text text;
    tch_status opened = tchi_index_read(checkpoint->path, &text, &status);
    if (opened == TCH_OK) {
        opened = put_together(checkpoint, &text);
        *replaced = opened == TCH_ERR_IO && is_replaced(checkpoint->path, &status);
    }
    tchi_index_release(&text);
    return opened;
}

tch_status tchi_index_add(tch_checkpoint *index, const char *path)
{
    TCHI_TRY(open_file(index, path));
    int32_t number = (int32_t)index->files.count - 1;
    const tch_checkpoint *file = ((tch_checkpoint **)index->files.items)[number];
    for (int64_t i = 0; i < tch_checkpoint_count(file); i++) {
        mapped entry = {tch_checkpoint_name(file, i), number};
        bool known = tchi_names_find(&index->header.names, entry.tensor) >= 0;
        TCHI_TRY(known ? TCH_OK : add_tensor(index, &entry));
    }
    return TCH_OK;
}

/* Parses and validates a header. The rules of the format are strict: an unknown member is an error. */
#include "header.h"

#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "format.h"
#include "json.h"
#include "text.h"

/* --- one tensor ------------------------------------------------------------------------------------------------- */

typedef enum field { DTYPE, SHAPE, DATA_OFFSETS, FIELDS } field;
static const char *const field_names[FIELDS] = {"dtype", "shape", "data_offsets"};

static tch_status read_dtype(tchi_json *json, tchi_stored *stored)
{
    const char *name;
    TCHI_TRY(tchi_json_string(json, &name));
    stored->type = tchi_file_type_named(name);
    return stored->type != NULL ? TCH_OK
                                : tchi_json_fail(json, "no element type is called \"%s\"", tchi_quote(name).text);
}

static tch_status read_shape(tchi_json *json, tchi_header *header, tchi_stored *stored)
{
    stored->first_size = header->sizes.count;
    TCHI_TRY(tchi_json_expect(json, '['));
    if (!tchi_json_accept(json, ']')) {
        do {
            int64_t size;
            TCHI_TRY(tchi_json_integer(json, &size));
            TCHI_TRY(tchi_list_add(&header->sizes, &size));
        } while (tchi_json_accept(json, ','));
        TCHI_TRY(tchi_json_expect(json, ']'));
    }
    stored->ndim = (int32_t)(header->sizes.count - stored->first_size); /* a header of 100 MB has fewer than 2^31 */
    return TCH_OK;
}

static tch_status read_offsets(tchi_json *json, tchi_stored *stored)
{
    TCHI_TRY(tchi_json_expect(json, '['));
    TCHI_TRY(tchi_json_integer(json, &stored->begin));
    TCHI_TRY(tchi_json_expect(json, ','));
    TCHI_TRY(tchi_json_integer(json, &stored->end));
    return tchi_json_expect(json, ']');
}

static tch_status read_field(tchi_json *json, tchi_header *header, tchi_stored *stored, bool seen[FIELDS])
{
    const char *name;
    TCHI_TRY(tchi_json_string(json, &name));
    int which = 0;
    while (which < FIELDS && strcmp(name, field_names[which]) != 0) {
        which++;
    }
    if (which == FIELDS) {
        return tchi_json_fail(json, "a tensor has the unknown member \"%s\"", tchi_quote(name).text);
    }
    if (seen[which]) {
        return tchi_json_fail(json, "a tensor has \"%s\" twice", name);
    }
    seen[which] = true;
    TCHI_TRY(tchi_json_expect(json, ':'));
    return which == DTYPE   ? read_dtype(json, stored)
           : which == SHAPE ? read_shape(json, header, stored)
                            : read_offsets(json, stored);
}

/* Bytes of a shape of this type; -1 if not a whole number, or if the product of the sizes, in order, or the bits
 * overflow 64 bits: as in the format's library, also for empty tensors. */
static int64_t bytes_of(const int64_t *sizes, int32_t ndim, int32_t bits)
{
    uint64_t total = 1;
    bool overflow = false;
    for (int32_t i = 0; i < ndim; i++) {
        overflow = overflow || __builtin_mul_overflow(total, (uint64_t)sizes[i], &total);
    }
    overflow = overflow || __builtin_mul_overflow(total, (uint64_t)bits, &total);
    return overflow || total % 8 != 0 ? -1 : (int64_t)(total / 8);
}

static tch_status check_extent(const tchi_json *json, const tchi_header *header, const tchi_stored *stored,
                               int64_t data_bytes)
{
    if (stored->begin > stored->end || stored->end > data_bytes) {
        return tchi_json_fail(json, "\"%s\" is at bytes %lld to %lld of %lld", tchi_quote(stored->name).text,
                              (long long)stored->begin, (long long)stored->end, (long long)data_bytes);
    }
    const int64_t *sizes = stored->ndim > 0 ? (const int64_t *)header->sizes.items + stored->first_size : NULL;
    int64_t bytes = bytes_of(sizes, stored->ndim, stored->type->bits);
    if (bytes < 0) {
        return tchi_json_fail(json, "the shape of \"%s\" does not give a whole number of bytes below 2^63",
                              tchi_quote(stored->name).text);
    }
    if (bytes != stored->end - stored->begin) {
        return tchi_json_fail(json, "\"%s\" has %lld bytes by its shape and %lld by its offsets",
                              tchi_quote(stored->name).text, (long long)bytes,
                              (long long)(stored->end - stored->begin));
    }
    return TCH_OK;
}

static tch_status read_tensor(tchi_json *json, tchi_header *header, const char *name, int64_t data_bytes)
{
    tchi_stored stored = {.name = name};
    bool seen[FIELDS] = {false};
    TCHI_TRY(tchi_json_expect(json, '{'));
    do {
        TCHI_TRY(read_field(json, header, &stored, seen));
    } while (tchi_json_accept(json, ','));
    TCHI_TRY(tchi_json_expect(json, '}'));
    for (int i = 0; i < FIELDS; i++) {
        if (!seen[i]) {
            return tchi_json_fail(json, "\"%s\" has no \"%s\"", tchi_quote(name).text, field_names[i]);
        }
    }
    TCHI_TRY(check_extent(json, header, &stored, data_bytes));
    return tchi_list_add(&header->tensors, &stored);
}

/* --- settings --------------------------------------------------------------------------------------------------- */

static tch_status read_setting(tchi_json *json, tchi_header *header)
{
    tchi_setting setting;
    bool is_checksum = false;
    TCHI_TRY(tchi_json_string(json, &setting.key));
    TCHI_TRY(tchi_json_expect(json, ':'));
    TCHI_TRY(tchi_json_string(json, &setting.value));
    TCHI_TRY(tchi_header_note(header, json->path, &setting, &is_checksum));
    if (is_checksum) {
        return TCH_OK;
    }
    if (tchi_names_find(&header->keys, setting.key) >= 0) {
        return tchi_json_fail(json, "the setting \"%s\" occurs twice", tchi_quote(setting.key).text);
    }
    TCHI_TRY(tchi_list_add(&header->settings, &setting));
    return tchi_names_add(&header->keys, setting.key, header->settings.count - 1);
}

static tch_status read_settings(tchi_json *json, tchi_header *header)
{
    TCHI_TRY(tchi_json_expect(json, '{'));
    if (tchi_json_accept(json, '}')) {
        return TCH_OK;
    }
    do {
        TCHI_TRY(read_setting(json, header));
    } while (tchi_json_accept(json, ','));
    return tchi_json_expect(json, '}');
}

static const char *setting_of(const tchi_header *header, const char *key)
{
    int64_t number = tchi_names_find(&header->keys, key);
    return number < 0 ? NULL : ((const tchi_setting *)header->settings.items)[number].value;
}

/* Files of other programs have no version. */
static tch_status check_version(const tchi_header *header, const char *path)
{
    const char *format = setting_of(header, TCHI_FORMAT_KEY);
    if (format == NULL || strcmp(format, TCHI_FORMAT_NAME) != 0) {
        return TCH_OK;
    }
    const char *text = setting_of(header, TCHI_FORMAT_VERSION_KEY);
    int64_t version = 0;
    if (text == NULL || !tchi_integer_parse(text, &version) || version < 1) {
        return tchi_fail(TCH_ERR_IO, "%.600s: a file of Torchium whose %s is \"%s\", expected a number from 1", path,
                         TCHI_FORMAT_VERSION_KEY, text == NULL ? "missing" : tchi_quote(text).text);
    }
    if (version > TCHI_FORMAT_VERSION) {
        return tchi_fail(TCH_ERR_IO,
                         "%.600s: written by a later Torchium, in version %lld of the format; this one reads up to %d",
                         path, (long long)version, TCHI_FORMAT_VERSION);
    }
    return TCH_OK;
}

/* --- all of it -------------------------------------------------------------------------------------------------- */

static tch_status read_members(tchi_json *json, tchi_header *header, int64_t data_bytes)
{
    bool settings_seen = false;
    if (tchi_json_accept(json, '}')) {
        return TCH_OK;
    }
    do {
        const char *name;
        TCHI_TRY(tchi_json_string(json, &name));
        TCHI_TRY(tchi_json_expect(json, ':'));
        if (strcmp(name, TCHI_SETTINGS_NAME) != 0) {
            TCHI_TRY(read_tensor(json, header, name, data_bytes));
            continue;
        }
        if (settings_seen) {
            return tchi_json_fail(json, "\"%s\" occurs twice", TCHI_SETTINGS_NAME);
        }
        settings_seen = true;
        TCHI_TRY(read_settings(json, header));
    } while (tchi_json_accept(json, ','));
    return tchi_json_expect(json, '}');
}

/* Empty tensors may have the same offset; they are then in the order of the header. */
static int by_place(const void *a, const void *b)
{
    const tchi_stored *x = a;
    const tchi_stored *y = b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    if (x->end != y->end) {
        return x->end < y->end ? -1 : 1;
    }
    return (x->name > y->name) - (x->name < y->name);
}

/* The header may list tensors in any order; in the file they are contiguous. */
static tch_status check_cover(const tchi_header *header, const char *path, int64_t data_bytes)
{
    const tchi_stored *tensors = header->tensors.items;
    int64_t end = 0;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        if (tensors[i].begin != end) {
            return tchi_fail(TCH_ERR_IO, "%.600s: \"%s\" begins at byte %lld, and what precedes it ends at %lld", path,
                             tchi_quote(tensors[i].name).text, (long long)tensors[i].begin, (long long)end);
        }
        end = tensors[i].end;
    }
    if (end != data_bytes) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the last %lld bytes belong to no tensor", path,
                         (long long)(data_bytes - end));
    }
    return TCH_OK;
}

static tch_status number_names(tchi_header *header, const char *path)
{
    const tchi_stored *tensors = header->tensors.items;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        if (tchi_names_find(&header->names, tensors[i].name) >= 0) {
            return tchi_fail(TCH_ERR_IO, "%.600s: two tensors are called \"%s\"", path,
                             tchi_quote(tensors[i].name).text);
        }
        TCHI_TRY(tchi_names_add(&header->names, tensors[i].name, i));
    }
    return TCH_OK;
}

tch_status tchi_header_read(tchi_header *header, const char *path, char *text, int64_t length, int64_t data_bytes)
{
    *header = (tchi_header)TCHI_HEADER_INIT;
    tchi_json json = {.path = path, .what = "header", .text = text, .length = length};
    if (length == 0 || text[0] != '{') {
        return tchi_json_fail(&json, "a header begins with '{'");
    }
    json.at = 1;
    TCHI_TRY(read_members(&json, header, data_bytes));
    TCHI_TRY(tchi_json_end(&json));
    if (header->tensors.count > 0) {
        qsort(header->tensors.items, (size_t)header->tensors.count, sizeof(tchi_stored), by_place);
    }
    TCHI_TRY(number_names(header, path));
    TCHI_TRY(check_cover(header, path, data_bytes));
    TCHI_TRY(check_version(header, path));
    return tchi_header_check(header, path);
}

void tchi_header_release(tchi_header *header)
{
    tchi_list_release(&header->tensors);
    tchi_list_release(&header->sizes);
    tchi_list_release(&header->settings);
    tchi_names_release(&header->names);
    tchi_names_release(&header->keys);
    tchi_list_release(&header->noted);
}

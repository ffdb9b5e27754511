/* The checksums of a header that was read. Tensors without one are let pass, as of programs that know nothing of it;
 * what has one must be there, and be as it was: a checksum whose tensor is gone, or checksums without that of the
 * header, cannot come from our writer. */
#include <string.h>

#include "checksums.h"
#include "core/status.h"
#include "format.h"
#include "header.h"
#include "utf8.h"

tch_status tchi_header_note(tchi_header *header, const char *path, const tchi_setting *setting, bool *is_checksum)
{
    size_t prefix = strlen(TCHI_CHECKSUM_PREFIX);
    *is_checksum = true;
    if (strncmp(setting->key, TCHI_CHECKSUM_PREFIX, prefix) == 0) {
        tchi_setting noted = {setting->key + prefix, setting->value};
        return tchi_list_add(&header->noted, &noted);
    }
    *is_checksum = strcmp(setting->key, TCHI_CHECKSUM_KEY) == 0;
    if (*is_checksum && header->noted_header != NULL) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the setting \"%s\" is there twice", path, TCHI_CHECKSUM_KEY);
    }
    header->noted_header = *is_checksum ? setting->value : header->noted_header;
    return TCH_OK;
}

static tch_status no_checksum(const char *path, const char *name, const char *text)
{
    char quoted_name[TCHI_QUOTE_SIZE];
    char quoted[TCHI_QUOTE_SIZE];
    return tchi_fail(TCH_ERR_IO, "%.600s: the checksum of %s is \"%s\", expected %d hexadecimal digits", path,
                     tchi_quote(name, quoted_name), tchi_quote(text, quoted), TCHI_CHECKSUM_DIGITS);
}

static tch_status give_checksum(tchi_header *header, const char *path, const tchi_setting *noted)
{
    char quoted[TCHI_QUOTE_SIZE];
    int64_t number = tchi_names_find(&header->names, noted->key);
    if (number < 0) {
        return tchi_fail(TCH_ERR_IO, "%.600s: there is a checksum of \"%s\", and no such tensor", path,
                         tchi_quote(noted->key, quoted));
    }
    tchi_stored *stored = (tchi_stored *)header->tensors.items + number;
    if (stored->has_checksum) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the checksum of \"%s\" is there twice", path,
                         tchi_quote(noted->key, quoted));
    }
    stored->has_checksum = true;
    return tchi_checksum_parse(noted->value, &stored->checksum) ? TCH_OK : no_checksum(path, noted->key, noted->value);
}

/* --- the header's own -------------------------------------------------------------------------------------------- */

static tch_status cover_settings(const tchi_header *header, tchi_list *covered)
{
    const tchi_setting *settings = header->settings.items;
    for (int64_t i = 0; i < header->settings.count; i++) {
        tchi_covered item = {.name = settings[i].key, .value = settings[i].value};
        TCHI_TRY(tchi_list_add(covered, &item));
    }
    return TCH_OK;
}

static tch_status cover_tensors(const tchi_header *header, tchi_list *covered)
{
    const tchi_stored *tensors = header->tensors.items;
    const int64_t *sizes = header->sizes.items;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        const tchi_stored *t = &tensors[i];
        tchi_covered item = {.name = t->name, .type = t->type, .ndim = t->ndim, .checksum = t->checksum};
        item.sizes = t->ndim > 0 ? sizes + t->first_size : NULL;
        if (t->has_checksum) {
            TCHI_TRY(tchi_list_add(covered, &item));
        }
    }
    return TCH_OK;
}

static tch_status compare_header(const tchi_header *header, const char *path, tchi_list *covered)
{
    uint32_t expected = 0;
    if (!tchi_checksum_parse(header->noted_header, &expected)) {
        return no_checksum(path, "the header", header->noted_header);
    }
    TCHI_TRY(cover_settings(header, covered));
    TCHI_TRY(cover_tensors(header, covered));
    uint32_t found = tchi_header_checksum(covered->items, covered->count);
    if (found != expected) {
        return tchi_fail(TCH_ERR_IO,
                         "%.600s: the header's settings and tensors are not those that were written: their CRC-32C is "
                         "%08x, expected %08x; the file is damaged, or another program changed it and kept \"%s\"",
                         path, (unsigned)found, (unsigned)expected, TCHI_CHECKSUM_KEY);
    }
    return TCH_OK;
}

static bool is_complete(const tchi_header *header)
{
    return header->noted_header != NULL && header->noted.count == header->tensors.count;
}

tch_status tchi_header_check(tchi_header *header, const char *path)
{
    const tchi_setting *noted = header->noted.items;
    for (int64_t i = 0; i < header->noted.count; i++) {
        TCHI_TRY(give_checksum(header, path, &noted[i]));
    }
    header->complete = is_complete(header);
    if (header->noted_header == NULL) {
        return header->noted.count == 0
                   ? TCH_OK
                   : tchi_fail(TCH_ERR_IO, "%.600s: there are checksums of tensors, and none of the header, \"%s\"",
                               path, TCHI_CHECKSUM_KEY);
    }
    tchi_list covered = {.item_size = sizeof(tchi_covered)};
    tch_status status = compare_header(header, path, &covered);
    tchi_list_release(&covered);
    return status;
}

/* The checksums of a header. Each item covered by the header's own is a row of words, each terminated by NUL, which no
 * word contains.
 *
 * On reading, tensors without a checksum are accepted, as from programs that do not know it; a checksum without its
 * tensor, or without that of the header, cannot come from this writer and is an error. */
#include "checksums.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/status.h"
#include "crc32c.h"
#include "format.h"
#include "header.h"
#include "text.h"

#define WORD_SIZE 32 /* of a number */

/* Settings before tensors, each ordered by the bytes of their names. */
static int in_order(const void *a, const void *b)
{
    const tchi_covered *x = a;
    const tchi_covered *y = b;
    bool kinds_differ = (x->value == NULL) != (y->value == NULL);
    return kinds_differ ? (x->value == NULL) - (y->value == NULL) : strcmp(x->name, y->name);
}

static uint32_t add_word(uint32_t crc, const char *word)
{
    return tchi_crc32c(crc, word, (int64_t)strlen(word) + 1);
}

/* Sizes end with an empty word. */
static uint32_t add_tensor(uint32_t crc, const tchi_covered *tensor)
{
    char word[WORD_SIZE];
    crc = add_word(crc, tensor->type->name);
    for (int32_t i = 0; i < tensor->ndim; i++) {
        snprintf(word, sizeof word, "%lld", (long long)tensor->sizes[i]);
        crc = add_word(crc, word);
    }
    crc = add_word(crc, "");
    snprintf(word, sizeof word, "%0*x", TCHI_CHECKSUM_DIGITS, (unsigned)tensor->checksum);
    return add_word(crc, word);
}

uint32_t tchi_header_checksum(tchi_covered *items, int64_t count)
{
    uint32_t crc = 0;
    if (count > 1) {
        qsort(items, (size_t)count, sizeof *items, in_order);
    }
    for (int64_t i = 0; i < count; i++) {
        crc = add_word(crc, items[i].name);
        crc = items[i].value != NULL ? add_word(crc, items[i].value) : add_tensor(crc, &items[i]);
    }
    return crc;
}

static bool parse_checksum(const char *text, uint32_t *checksum)
{
    size_t digits = strspn(text, "0123456789abcdef");
    if (digits != TCHI_CHECKSUM_DIGITS || text[digits] != '\0') {
        return false;
    }
    *checksum = (uint32_t)strtoul(text, NULL, 16);
    return true;
}

/* --- of a header that was read ----------------------------------------------------------------------------------- */

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
        return tchi_fail(TCH_ERR_IO, "%.600s: the setting \"%s\" occurs twice", path, TCHI_CHECKSUM_KEY);
    }
    header->noted_header = *is_checksum ? setting->value : header->noted_header;
    return TCH_OK;
}

static tch_status no_checksum(const char *path, const char *name, const char *text)
{
    return tchi_fail(TCH_ERR_IO, "%.600s: the checksum of %s is \"%s\", expected %d hexadecimal digits", path,
                     tchi_quote(name).text, tchi_quote(text).text, TCHI_CHECKSUM_DIGITS);
}

static tch_status give_checksum(tchi_header *header, const char *path, const tchi_setting *noted)
{
    int64_t number = tchi_names_find(&header->names, noted->key);
    if (number < 0) {
        return tchi_fail(TCH_ERR_IO, "%.600s: there is a checksum of \"%s\", but no such tensor", path,
                         tchi_quote(noted->key).text);
    }
    tchi_stored *stored = (tchi_stored *)header->tensors.items + number;
    if (stored->has_checksum) {
        return tchi_fail(TCH_ERR_IO, "%.600s: the checksum of \"%s\" occurs twice", path, tchi_quote(noted->key).text);
    }
    stored->has_checksum = true;
    return parse_checksum(noted->value, &stored->checksum) ? TCH_OK : no_checksum(path, noted->key, noted->value);
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
    if (!parse_checksum(header->noted_header, &expected)) {
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

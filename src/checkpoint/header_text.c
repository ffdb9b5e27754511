/* The header of a file as text. The same code runs twice, first without memory and without checksums, to learn the
 * size. */
#include <torchium/version.h>

#include "core/status.h"
#include "format.h"
#include "chunks.h"
#include "json_text.h"
#include "writer.h"

bool tchi_library_setting(int32_t index, const char **key, const char **value)
{
    static const char *const settings[][2] = {
        {TCHI_FORMAT_KEY, TCHI_FORMAT_NAME},
        {TCHI_FORMAT_VERSION_KEY, TCHI_FORMAT_VERSION_TEXT},
        {TCHI_LIBRARY_VERSION_KEY, TCH_VERSION_STRING},
    };
    if (index >= (int32_t)(sizeof settings / sizeof settings[0])) {
        return false;
    }
    *key = settings[index][0];
    *value = settings[index][1];
    return true;
}

static void put_setting(tchi_json_text *out, const char *key, const char *value, bool first)
{
    tchi_json_put(out, ",", !first);
    tchi_json_put_string(out, key);
    tchi_json_put(out, ":", 1);
    tchi_json_put_string(out, value);
}

static void put_settings(tchi_json_text *out, const tch_checkpoint_writer *writer)
{
    const char *key;
    const char *value;
    for (int32_t i = 0; tchi_library_setting(i, &key, &value); i++) {
        put_setting(out, key, value, i == 0);
    }
    const tchi_set *settings = writer->settings.items;
    for (int64_t i = 0; i < writer->settings.count; i++) {
        put_setting(out, settings[i].key, settings[i].value, false);
    }
}

/* `checksums` is NULL while measuring, when any digits will do. */
static void put_checksums(tchi_json_text *out, const tch_checkpoint_writer *writer, const tchi_list *order,
                          const uint32_t *checksums, uint32_t header_checksum)
{
    const int64_t *numbers = order->items;
    tchi_json_put_format(out, ",\"%s\":\"%0*x\"", TCHI_CHECKSUM_KEY, TCHI_CHECKSUM_DIGITS, (unsigned)header_checksum);
    for (int64_t i = 0; i < order->count; i++) {
        const tchi_added *added = (const tchi_added *)writer->tensors.items + numbers[i];
        tchi_json_put_format(out, ",\"%s", TCHI_CHECKSUM_PREFIX);
        tchi_json_put_escaped(out, added->name);
        tchi_json_put_format(out, "\":\"%0*x\"", TCHI_CHECKSUM_DIGITS, checksums != NULL ? (unsigned)checksums[i] : 0);
    }
}

/* Returns where the tensor's bytes end, and so where the next one's begin. */
static int64_t put_tensor(tchi_json_text *out, const tchi_added *added, int64_t begin)
{
    tch_tensor tensor = tchi_added_tensor(added);
    int64_t end = begin + tchi_tensor_bytes(&tensor);
    tchi_json_put(out, ",", 1);
    tchi_json_put_string(out, added->name);
    tchi_json_put_format(out, ":{\"dtype\":\"%s\",\"shape\":[", added->type->name);
    for (int32_t i = 0; i < tensor.ndim; i++) {
        tchi_json_put_format(out, "%s%lld", i > 0 ? "," : "", (long long)tensor.shape[i]);
    }
    tchi_json_put_format(out, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)end);
    return end;
}

static void put_header(tchi_json_text *out, const tch_checkpoint_writer *writer, const tchi_list *order,
                       const uint32_t *checksums, uint32_t header_checksum)
{
    tchi_json_put_format(out, "{\"%s\":{", TCHI_SETTINGS_NAME);
    put_settings(out, writer);
    if (writer->checksums) {
        put_checksums(out, writer, order, checksums, header_checksum);
    }
    tchi_json_put(out, "}", 1);
    const int64_t *numbers = order->items;
    int64_t begin = 0;
    for (int64_t i = 0; i < order->count; i++) {
        begin = put_tensor(out, (const tchi_added *)writer->tensors.items + numbers[i], begin);
    }
    tchi_json_put(out, "}", 1);
    while (out->used % 8 != 0) {
        tchi_json_put(out, " ", 1);
    }
}

static void put_prefix(char *text, uint64_t length)
{
    for (int i = 0; i < TCHI_PREFIX_BYTES; i++) {
        text[i] = (char)(unsigned char)(length >> (8 * i));
    }
}

tch_status tchi_header_bytes(const tch_checkpoint_writer *writer, const tchi_list *order, int64_t *bytes)
{
    tchi_json_text measure = {0};
    put_header(&measure, writer, order, NULL, 0);
    if (measure.used > TCHI_MOST_HEADER_BYTES) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_checkpoint_writer_save: names, shapes, settings and checksums of writer take %lld bytes, "
                         "and readers of "
                         "the format accept %d",
                         (long long)measure.used, TCHI_MOST_HEADER_BYTES);
    }
    *bytes = TCHI_PREFIX_BYTES + measure.used;
    return TCH_OK;
}

void tchi_header_text(const tch_checkpoint_writer *writer, const tchi_list *order, const uint32_t *checksums,
                      uint32_t header_checksum, char *text)
{
    tchi_json_text out = {.text = text + TCHI_PREFIX_BYTES};
    put_header(&out, writer, order, checksums, header_checksum);
    put_prefix(text, (uint64_t)out.used);
}

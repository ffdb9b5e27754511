/* Saves a writer to a file. Everything that can fail in advance, including memory, is checked before the file is
 * created; afterwards only the disk and the device can fail. Checksums are known after the tensors, so the header is
 * written last, into space reserved for it; the file is still temporary. */
#include <torchium/checkpoint.h>
#include <torchium/version.h>

#include <pthread.h>
#include <signal.h>

#include "checksums.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/tensor.h"
#include "crc32c.h"
#include "format.h"
#include "json.h"
#include "part_file.h"
#include "chunks.h"
#include "text.h"
#include "writer.h"

/* --- the header -------------------------------------------------------------------------------------------------- */

static bool library_setting(int32_t index, const char **key, const char **value)
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
    for (int32_t i = 0; library_setting(i, &key, &value); i++) {
        put_setting(out, key, value, i == 0);
    }
    const tchi_set *settings = writer->settings.items;
    for (int64_t i = 0; i < writer->settings.count; i++) {
        put_setting(out, settings[i].key, settings[i].value, false);
    }
}

/* `checksums` is NULL while measuring, with arbitrary digits. */
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

/* Returns the end of the tensor's bytes, where the next begins. */
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

static tch_status measure_header(const tch_checkpoint_writer *writer, const tchi_list *order, int64_t *bytes)
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

static void write_header(const tch_checkpoint_writer *writer, const tchi_list *order, const uint32_t *checksums,
                         uint32_t header_checksum, char *text)
{
    tchi_json_text out = {.text = text + TCHI_PREFIX_BYTES};
    put_header(&out, writer, order, checksums, header_checksum);
    put_prefix(text, (uint64_t)out.used);
}

/* --- what a save needs -------------------------------------------------------------------------------------------- */

typedef struct saving {
    const tch_checkpoint_writer *writer;
    tch_context *context;
    tchi_list order; /* int64_t: indices of the tensors in file order */
    char *header;
    int64_t header_bytes;
    char *buffer;
    int64_t buffer_bytes;
    tchi_list checksums; /* uint32_t, in that order */
    tchi_list covered;   /* tchi_covered: items of the header's checksum */
    int64_t at;          /* in the file */
    uint32_t checksum;   /* of the current tensor */
    tchi_part_file *file;
} saving;

static const tchi_added *added_at(const tch_checkpoint_writer *writer, int64_t number)
{
    return (const tchi_added *)writer->tensors.items + number;
}

/* A device tensor needs a context of its device. */
static tch_status check_places(const tch_checkpoint_writer *writer, const tch_context *context)
{
    for (int64_t i = 0; i < writer->tensors.count; i++) {
        tch_tensor tensor = tchi_added_tensor(added_at(writer, i));
        tchi_quoted name = tchi_quote(added_at(writer, i)->name);
        if (tchi_on_host(&tensor)) {
            continue;
        }
        if (context == NULL) {
            return tchi_fail(TCH_ERR_DEVICE,
                             "tch_checkpoint_writer_save: context is NULL, and tensor \"%s\" is not in host memory; "
                             "give a context of its device",
                             name.text);
        }
        TCHI_TRY(tchi_check_device(context, &tensor, name.text));
    }
    return TCH_OK;
}

/* The format has no padding: from large elements to small ones, all are aligned. */
static tch_status put_in_order(saving *s)
{
    s->order = (tchi_list){.item_size = sizeof(int64_t)};
    for (int32_t bits = 64; bits >= 8; bits /= 2) {
        for (int64_t i = 0; i < s->writer->tensors.count; i++) {
            if (added_at(s->writer, i)->type->bits == bits) {
                TCHI_TRY(tchi_list_add(&s->order, &i));
            }
        }
    }
    return TCH_OK;
}

static tch_status take_buffer(saving *s)
{
    for (int64_t i = 0; i < s->writer->tensors.count; i++) {
        tch_tensor tensor = tchi_added_tensor(added_at(s->writer, i));
        int64_t bytes = tchi_buffer_bytes(&tensor);
        s->buffer_bytes = bytes > s->buffer_bytes ? bytes : s->buffer_bytes;
    }
    return tchi_host_take((size_t)s->buffer_bytes, "a buffer", &s->buffer);
}

/* Collects the items of the header's checksum; checksums of tensors are set later. */
static tch_status take_covered(saving *s)
{
    tchi_covered item = {0};
    s->checksums = (tchi_list){.item_size = sizeof(uint32_t)};
    s->covered = (tchi_list){.item_size = sizeof item};
    for (int32_t i = 0; library_setting(i, &item.name, &item.value); i++) {
        TCHI_TRY(tchi_list_add(&s->covered, &item));
    }
    const tchi_set *settings = s->writer->settings.items;
    for (int64_t i = 0; i < s->writer->settings.count; i++) {
        item = (tchi_covered){.name = settings[i].key, .value = settings[i].value};
        TCHI_TRY(tchi_list_add(&s->covered, &item));
    }
    TCHI_TRY(tchi_list_reserve(&s->covered, s->covered.count + s->order.count));
    return tchi_list_reserve(&s->checksums, s->order.count);
}

/* --- checksums --------------------------------------------------------------------------------------------------- */

/* Another thread computes the checksum during the write: the additional cost is starting a thread. */
typedef struct summing_bytes {
    const void *bytes;
    int64_t count;
    uint32_t checksum;
    bool beside; /* there is a thread */
    pthread_t thread;
} summing_bytes;

/* Summed in at most 100 microseconds, about the time to start a thread on a busy machine. */
#define FEW_BYTES ((int64_t)1 << 20)

static void *sum_bytes(void *argument)
{
    summing_bytes *s = argument;
    s->checksum = tchi_crc32c(s->checksum, s->bytes, s->count);
    return NULL;
}

/* Signals of the program are for its own threads. */
static bool start_beside(summing_bytes *s)
{
    sigset_t all, before;
    sigfillset(&all);
    if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) {
        return false;
    }
    bool started = pthread_create(&s->thread, NULL, sum_bytes, s) == 0;
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

/* A few bytes, or all if no thread can be started, are summed before this returns. */
static void begin_summing(summing_bytes *summing, uint32_t checksum, const void *bytes, int64_t count)
{
    *summing = (summing_bytes){.bytes = bytes, .count = count, .checksum = checksum};
    summing->beside = count > FEW_BYTES && start_beside(summing);
    if (!summing->beside) {
        (void)sum_bytes(summing);
    }
}

static uint32_t end_summing(summing_bytes *summing)
{
    if (summing->beside) {
        (void)pthread_join(summing->thread, NULL);
    }
    return summing->checksum;
}

/* --- writing ----------------------------------------------------------------------------------------------------- */

/* The next bytes of a tensor. */
static tch_status write_bytes(saving *s, const char *bytes, int64_t count)
{
    summing_bytes summing;
    if (s->writer->checksums) {
        begin_summing(&summing, s->checksum, bytes, count);
    }
    tch_status status = tchi_part_file_write(s->file, s->at, bytes, count);
    if (s->writer->checksums) {
        s->checksum = end_summing(&summing);
    }
    s->at += count;
    return status;
}

/* A copy from a device synchronizes, so the buffer is complete. */
static tch_status write_chunk(void *user, tch_tensor *chunk)
{
    saving *s = user;
    if (tchi_on_host(chunk)) {
        tchi_pack(chunk, s->buffer);
    } else {
        tch_tensor packed = tch_tensor_view(s->buffer, chunk->dtype, chunk->ndim, chunk->shape);
        TCHI_TRY(tch_tensor_copy(s->context, &packed, chunk));
    }
    return write_bytes(s, s->buffer, tchi_tensor_bytes(chunk));
}

static tch_status write_tensor(saving *s, const tch_tensor *tensor)
{
    if (tch_tensor_numel(tensor) == 0) { /* it may have no memory */
        return TCH_OK;
    }
    if (tchi_is_plain(tensor)) {
        return write_bytes(s, tchi_tensor_data(tensor), tchi_tensor_bytes(tensor));
    }
    int64_t room = s->buffer_bytes / (int64_t)tch_dtype_size(tensor->dtype);
    return tchi_visit_chunks(tensor, room, write_chunk, s);
}

/* There is room for both. */
static void note_checksum(saving *s, const tchi_added *added)
{
    *(uint32_t *)tchi_list_extend(&s->checksums) = s->checksum;
    *(tchi_covered *)tchi_list_extend(&s->covered) = (tchi_covered){.name = added->name,
                                                                    .type = added->type,
                                                                    .ndim = added->tensor.ndim,
                                                                    .sizes = added->shape,
                                                                    .checksum = s->checksum};
}

static tch_status write_tensors(saving *s)
{
    const int64_t *numbers = s->order.items;
    s->at = s->header_bytes;
    for (int64_t i = 0; i < s->order.count; i++) {
        const tchi_added *added = added_at(s->writer, numbers[i]);
        tch_tensor tensor = tchi_added_tensor(added);
        s->checksum = 0;
        TCHI_TRY(write_tensor(s, &tensor));
        if (s->writer->checksums) {
            note_checksum(s, added);
        }
    }
    return TCH_OK;
}

/* The header last: it contains the tensors' checksums. */
static tch_status write_all(saving *s)
{
    TCHI_TRY(write_tensors(s));
    uint32_t checksum = s->writer->checksums ? tchi_header_checksum(s->covered.items, s->covered.count) : 0;
    write_header(s->writer, &s->order, s->checksums.items, checksum, s->header);
    TCHI_TRY(tchi_part_file_write(s->file, 0, s->header, s->header_bytes));
    return tchi_part_file_flush(s->file);
}

static tch_status create_and_write(saving *s, const char *path, const tchi_permissions *permissions)
{
    TCHI_TRY(put_in_order(s));
    TCHI_TRY(take_buffer(s));
    TCHI_TRY(measure_header(s->writer, &s->order, &s->header_bytes));
    TCHI_TRY(tchi_host_take((size_t)s->header_bytes, "the header", &s->header));
    if (s->writer->checksums) {
        TCHI_TRY(take_covered(s));
    }
    TCHI_TRY(tchi_part_file_create(s->file, path, permissions));
    tch_status status = write_all(s);
    if (status != TCH_OK) {
        tchi_part_file_close(s->file);
    }
    return status;
}

tch_status tchi_writer_write(const tch_checkpoint_writer *writer, tch_context *context, const char *path,
                             const tchi_permissions *permissions, tchi_part_file *file)
{
    TCHI_TRY(check_places(writer, context));
    saving s = {.writer = writer, .context = context, .file = file};
    tch_status status = create_and_write(&s, path, permissions);
    tchi_list_release(&s.order);
    tchi_host_release(s.header, (size_t)s.header_bytes);
    tchi_host_release(s.buffer, (size_t)s.buffer_bytes);
    tchi_list_release(&s.checksums);
    tchi_list_release(&s.covered);
    return status;
}

tch_status tch_checkpoint_writer_save(tch_checkpoint_writer *writer, tch_context *context, const char *path)
{
    tchi_part_file file;
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_save", "writer", writer));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_save", "path", path));
    TCHI_TRY(tchi_writer_write(writer, context, path, NULL, &file));
    tch_status status = tchi_part_file_commit(&file);
    tchi_part_file_close(&file);
    return status;
}

/* Collects and checks the content of a checkpoint. No file is opened and no element is read; save.c does that. */
#include "writer.h"

#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "format.h"
#include "text.h"
#include "chunks.h"
#include "shards.h"

static tch_status join_texts(const char *first, const char *second, char **joined)
{
    size_t bytes = strlen(first) + strlen(second) + 1;
    TCHI_TRY(tchi_host_take(bytes, "a text of a checkpoint", joined));
    snprintf(*joined, bytes, "%s%s", first, second);
    return TCH_OK;
}

static void release_text(char *text)
{
    tchi_host_release(text, text == NULL ? 0 : strlen(text) + 1);
}

tch_status tch_checkpoint_writer_create(tch_checkpoint_writer **writer)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_create", "writer", writer));
    tch_checkpoint_writer *made;
    TCHI_TRY(tchi_host_take(sizeof *made, "a checkpoint's writer", &made));
    *made = (tch_checkpoint_writer){
        .tensors = {.item_size = sizeof(tchi_added)}, .settings = {.item_size = sizeof(tchi_set)}, .checksums = true};
    *writer = made;
    return TCH_OK;
}

tch_status tch_checkpoint_writer_set_checksums(tch_checkpoint_writer *writer, int32_t checksums)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_set_checksums", "writer", writer));
    if (checksums != 0 && checksums != 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_checkpoint_writer_set_checksums: checksums is %d, expected 0 or 1", checksums);
    }
    writer->checksums = checksums != 0;
    return TCH_OK;
}

void tch_checkpoint_writer_destroy(tch_checkpoint_writer *writer)
{
    if (writer == NULL) {
        return;
    }
    const tchi_added *tensors = writer->tensors.items;
    for (int64_t i = 0; i < writer->tensors.count; i++) {
        release_text(tensors[i].name);
    }
    const tchi_set *settings = writer->settings.items;
    for (int64_t i = 0; i < writer->settings.count; i++) {
        release_text(settings[i].key);
        release_text(settings[i].value);
    }
    tchi_list_release(&writer->tensors);
    tchi_list_release(&writer->settings);
    tchi_names_release(&writer->names);
    tchi_names_release(&writer->keys);
    tchi_host_release(writer, sizeof *writer);
}

/* Checks that `argument` is text that a file can store. */
static tch_status check_text(const char *function, const char *argument, const char *text)
{
    TCHI_TRY(tchi_check_not_null(function, argument, text));
    if (!tchi_utf8_is_valid(text)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s \"%s\" is not UTF-8", function, argument,
                         tchi_quote(text).text);
    }
    return TCH_OK;
}

/* --- tensors ---------------------------------------------------------------------------------------------------- */

static tch_status check_name(const tch_checkpoint_writer *writer, const char *name)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_add", "writer", writer));
    TCHI_TRY(check_text("tch_checkpoint_writer_add", "name", name));
    if (name[0] == '\0' || strcmp(name, TCHI_SETTINGS_NAME) == 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_checkpoint_writer_add: name is \"%s\", which no tensor can have", name);
    }
    if (tchi_names_find(&writer->names, name) >= 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_checkpoint_writer_add: name is \"%s\", which was added before",
                         tchi_quote(name).text);
    }
    return TCH_OK;
}

static tch_status check_tensor(const tch_checkpoint_writer *writer, const tch_tensor *tensor, int64_t *bytes)
{
    TCHI_TRY(tch_tensor_check(tensor, "tensor"));
    if (tchi_file_type_of(tensor->dtype) == NULL) {
        return tchi_fail(TCH_ERR_DTYPE, "tensor is %s, which safetensors files do not have",
                         tch_dtype_name(tensor->dtype));
    }
    if (__builtin_add_overflow(writer->bytes, tchi_tensor_bytes(tensor), bytes)) {
        return tchi_fail(TCH_ERR_SHAPE, "tensor has %lld bytes, too many for one file with those added before",
                         (long long)tchi_tensor_bytes(tensor));
    }
    return TCH_OK;
}

static tchi_added describe_tensor(char *name, const tch_tensor *tensor)
{
    tchi_added added = {.name = name, .type = tchi_file_type_of(tensor->dtype), .tensor = *tensor};
    if (tensor->ndim > 0) {
        memcpy(added.shape, tensor->shape, (size_t)tensor->ndim * sizeof *added.shape);
    }
    if (tensor->ndim > 0 && tensor->strides != NULL) {
        memcpy(added.strides, tensor->strides, (size_t)tensor->ndim * sizeof *added.strides);
    }
    return added;
}

tch_tensor tchi_added_tensor(const tchi_added *added)
{
    tch_tensor tensor = added->tensor;
    tensor.shape = (int64_t *)added->shape;
    tensor.strides = tensor.strides != NULL ? (int64_t *)added->strides : NULL;
    return tensor;
}

/* Takes ownership of `name` on success. */
static tch_status add_tensor(tch_checkpoint_writer *writer, char *name, const tch_tensor *tensor)
{
    int64_t bytes = 0;
    TCHI_TRY(check_tensor(writer, tensor, &bytes));
    TCHI_TRY(tchi_list_reserve(&writer->tensors, writer->tensors.count + 1));
    TCHI_TRY(tchi_names_add(&writer->names, name, writer->tensors.count));
    *(tchi_added *)tchi_list_extend(&writer->tensors) = describe_tensor(name, tensor);
    writer->bytes = bytes;
    return TCH_OK;
}

/* The same for a setting: both texts. */
static tch_status add_setting(tch_checkpoint_writer *writer, char *key, char *value)
{
    TCHI_TRY(tchi_list_reserve(&writer->settings, writer->settings.count + 1));
    TCHI_TRY(tchi_names_add(&writer->keys, key, writer->settings.count));
    *(tchi_set *)tchi_list_extend(&writer->settings) = (tchi_set){key, value};
    return TCH_OK;
}

tch_status tch_checkpoint_writer_add(tch_checkpoint_writer *writer, const char *name, const tch_tensor *tensor)
{
    char *copy;
    TCHI_TRY(check_name(writer, name));
    TCHI_TRY(join_texts(name, "", &copy));
    tch_status status = add_tensor(writer, copy, tensor);
    if (status != TCH_OK) {
        release_text(copy);
    }
    return status;
}

/* --- shards ----------------------------------------------------------------------------------------------------- */

/* Adds the settings of a shard. */
typedef struct shard_texts {
    char *name, *key, *value;
} shard_texts;

static void release_texts(const shard_texts *texts)
{
    release_text(texts->name);
    release_text(texts->key);
    release_text(texts->value);
}

/* "256,128;0,0" */
static void describe_shard(const tchi_slice *slice, char *text, size_t room)
{
    size_t used = 0;
    for (int32_t k = 0; k < 2 * slice->ndim; k++) {
        int64_t number = k < slice->ndim ? slice->shape[k] : slice->start[k - slice->ndim];
        const char *before = k == 0 ? "" : k == slice->ndim ? ";" : ",";
        used += (size_t)snprintf(text + used, room - used, "%s%lld", before, (long long)number);
    }
}

static tch_status check_shard(const char *name, const tch_tensor *tensor, const int64_t *shape, const int64_t *start,
                              tchi_slice *slice)
{
    static const char function[] = "tch_checkpoint_writer_add_shard";
    TCHI_TRY(check_text(function, "name", name));
    TCHI_TRY(tch_tensor_check(tensor, "tensor"));
    *slice = (tchi_slice){tensor->ndim, shape, start, tensor->shape};
    if (shape == NULL || start == NULL || tensor->ndim < 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s", function,
                         shape == NULL   ? "shape is NULL"
                         : start == NULL ? "start is NULL"
                                         : "tensor is a scalar, which has no shards");
    }
    if (!tchi_slice_is_sound(slice)) {
        return tchi_fail(TCH_ERR_SHAPE, "%s: tensor is not inside the whole \"%s\" of the given shape", function,
                         tchi_quote(name).text);
    }
    return TCH_OK;
}

static tch_status take_texts(const char *name, const tchi_slice *slice, shard_texts *texts)
{
    char text[TCHI_SHARD_SUFFIX_SIZE];
    TCHI_TRY(join_texts(name, tchi_shard_suffix(slice, text), &texts->name));
    TCHI_TRY(join_texts(TCHI_SHARD_PREFIX, texts->name, &texts->key));
    describe_shard(slice, text, sizeof text);
    return join_texts(text, "", &texts->value);
}

/* Reserves everything first: a shard is added with its description, or not at all. */
static tch_status add_with_texts(tch_checkpoint_writer *writer, const tch_tensor *tensor, const shard_texts *texts)
{
    TCHI_TRY(check_name(writer, texts->name));
    TCHI_TRY(tchi_list_reserve(&writer->settings, writer->settings.count + 1));
    TCHI_TRY(tchi_names_reserve(&writer->keys));
    TCHI_TRY(add_tensor(writer, texts->name, tensor));
    return add_setting(writer, texts->key, texts->value);
}

tch_status tch_checkpoint_writer_add_shard(tch_checkpoint_writer *writer, const char *name, const tch_tensor *tensor,
                                           const int64_t *shape, const int64_t *start)
{
    tchi_slice slice = {0};
    shard_texts texts = {0};
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_writer_add_shard", "writer", writer));
    TCHI_TRY(check_shard(name, tensor, shape, start, &slice));
    tch_status status = take_texts(name, &slice, &texts);
    if (status == TCH_OK) {
        status = add_with_texts(writer, tensor, &texts);
    }
    if (status != TCH_OK) {
        release_texts(&texts);
    }
    return status;
}

/* --- settings --------------------------------------------------------------------------------------------------- */

static tch_status check_key(const char *function, const tch_checkpoint_writer *writer, const char *key)
{
    TCHI_TRY(tchi_check_not_null(function, "writer", writer));
    TCHI_TRY(check_text(function, "key", key));
    if (key[0] == '\0') {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: key is empty", function);
    }
    if (strcmp(key, TCHI_FORMAT_KEY) == 0 || strncmp(key, TCHI_LIBRARY_PREFIX, strlen(TCHI_LIBRARY_PREFIX)) == 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: key is \"%s\"; \"%s\" and what begins with \"%s\" is set by the "
                         "library",
                         function, tchi_quote(key).text, TCHI_FORMAT_KEY, TCHI_LIBRARY_PREFIX);
    }
    return TCH_OK;
}

static tch_status put_setting(tch_checkpoint_writer *writer, const char *key, const char *value)
{
    char *key_copy = NULL;
    char *value_copy;
    TCHI_TRY(join_texts(value, "", &value_copy));
    int64_t number = tchi_names_find(&writer->keys, key);
    if (number >= 0) {
        tchi_set *known = (tchi_set *)writer->settings.items + number;
        release_text(known->value);
        known->value = value_copy;
        return TCH_OK;
    }
    tch_status status = join_texts(key, "", &key_copy);
    status = status != TCH_OK ? status : add_setting(writer, key_copy, value_copy);
    if (status != TCH_OK) {
        release_text(key_copy);
        release_text(value_copy);
    }
    return status;
}

tch_status tch_checkpoint_writer_set_text(tch_checkpoint_writer *writer, const char *key, const char *value)
{
    TCHI_TRY(check_key("tch_checkpoint_writer_set_text", writer, key));
    TCHI_TRY(check_text("tch_checkpoint_writer_set_text", "value", value));
    return put_setting(writer, key, value);
}

tch_status tch_checkpoint_writer_set_number(tch_checkpoint_writer *writer, const char *key, double value)
{
    char text[TCHI_NUMBER_SIZE];
    TCHI_TRY(check_key("tch_checkpoint_writer_set_number", writer, key));
    return put_setting(writer, key, tchi_number_text(value, text));
}

tch_status tch_checkpoint_writer_set_integer(tch_checkpoint_writer *writer, const char *key, int64_t value)
{
    char text[TCHI_NUMBER_SIZE];
    TCHI_TRY(check_key("tch_checkpoint_writer_set_integer", writer, key));
    snprintf(text, sizeof text, "%lld", (long long)value);
    return put_setting(writer, key, text);
}

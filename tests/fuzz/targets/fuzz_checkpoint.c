/* Untrusted bytes opened as a checkpoint: crashes, out-of-bounds reads, and files that open but are inconsistent. And
 * the same bytes as a name and as an element type. */
#include <string.h>

#include "checkpoint/reader.h"
#include "checkpoint/text.h"
#include "fuzz.h"

/* --- the header -------------------------------------------------------------------------------------------------- */

/* Tensors cover the data, each byte once, in order. */
static void check_places(const tchi_header *header, int64_t data_bytes)
{
    const tchi_stored *tensors = header->tensors.items;
    int64_t at = 0;
    for (int64_t i = 0; i < header->tensors.count; i++) {
        REQUIRE(tensors[i].begin == at && tensors[i].end >= at);
        REQUIRE(tchi_file_type_of(tensors[i].type->dtype) == tensors[i].type);
        REQUIRE(tensors[i].ndim >= 0 && tensors[i].first_size + tensors[i].ndim <= header->sizes.count);
        at = tensors[i].end;
    }
    REQUIRE(at == data_bytes);
}

static bool has_controls(const char *text)
{
    for (; *text != '\0'; text++) {
        if ((unsigned char)*text < ' ' || *text == 0x7f) {
            return true;
        }
    }
    return false;
}

/* Messages contain a printable, bounded form of any name; a valid short name is unchanged. */
static void check_text(const uint8_t *bytes, size_t count)
{
    char *text = fuzz_text(bytes, count);
    bool good = tchi_utf8_is_valid(text);
    REQUIRE(tchi_utf8_length(text, 0) == 0);
    tchi_quoted quoted = tchi_quote(text);
    REQUIRE(strlen(quoted.text) < TCHI_QUOTE_SIZE && tchi_utf8_is_valid(quoted.text));
    REQUIRE(!good || strlen(text) >= 100 || has_controls(text) || strcmp(text, quoted.text) == 0);
    free(text);
}

/* A known type parses to itself. */
static void check_type(const uint8_t *bytes)
{
    tch_dtype asked = {.code = bytes[0] % 20, .bits = (uint8_t)(1U << bytes[1] % 8), .lanes = bytes[2] % 3};
    const tchi_file_type *type = tchi_file_type_of(asked);
    REQUIRE(type == NULL || (tch_dtype_equal(type->dtype, asked) && tchi_file_type_named(type->name) == type));
}

/* --- tensors and settings ---------------------------------------------------------------------------------------- */

/* Both ways to read a tensor return the same bytes, as many as described; or both report a checksum mismatch. After an
 * injected fault the file may not be mapped, which only views need. */
static void check_tensor(const tch_checkpoint *checkpoint, const tch_checkpoint_info *info, bool faulted)
{
    if (tch_dtype_size(info->dtype) == 0 || info->ndim > TCH_MAX_RANK) {
        return;
    }
    void *memory = malloc(info->bytes > 0 ? (size_t)info->bytes : 1);
    tch_tensor out = tch_tensor_view(memory, info->dtype, info->ndim, (int64_t *)info->shape);
    REQUIRE(memory != NULL);
    REQUIRE(tch_tensor_numel(&out) * (int64_t)tch_dtype_size(info->dtype) == info->bytes);
    tch_status status = tch_checkpoint_read(checkpoint, NULL, info->name, &out);
    REQUIRE(status == TCH_OK || (status == TCH_ERR_IO && info->has_checksum));
    REQUIRE(tch_checkpoint_verify(checkpoint, info->name) == status);
    tch_tensor view;
    tch_status viewed = tch_checkpoint_view(checkpoint, info->name, &view);
    REQUIRE(viewed == status || viewed == TCH_ERR_LAYOUT || (viewed == TCH_ERR_IO && faulted));
    REQUIRE(viewed != TCH_OK || info->bytes == 0 || memcmp(view.data, memory, (size_t)info->bytes) == 0);
    free(memory);
}

static void check_settings(const tch_checkpoint *checkpoint)
{
    double nothing;
    REQUIRE(tch_checkpoint_text(checkpoint, NULL) == NULL && tch_checkpoint_text(NULL, "k") == NULL);
    REQUIRE(tch_checkpoint_number(checkpoint, NULL, &nothing) == TCH_ERR_INVALID_ARGUMENT);
    for (int64_t i = 0; i < tch_checkpoint_key_count(checkpoint); i++) {
        const char *key = tch_checkpoint_key(checkpoint, i);
        double number;
        int64_t integer;
        REQUIRE(key != NULL && tch_checkpoint_text(checkpoint, key) != NULL);
        (void)tch_checkpoint_number(checkpoint, key, &number);
        (void)tch_checkpoint_integer(checkpoint, key, &integer);
    }
}

/* Offsets without a tensor. */
static void check_no_tensors(const tch_checkpoint *checkpoint)
{
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    REQUIRE(tch_checkpoint_get_info(checkpoint, -1, &info) == TCH_ERR_INVALID_ARGUMENT);
    REQUIRE(tch_checkpoint_get_info(checkpoint, tch_checkpoint_count(checkpoint), &info) == TCH_ERR_INVALID_ARGUMENT);
    REQUIRE(tch_checkpoint_get_info(checkpoint, 0, NULL) == TCH_ERR_INVALID_ARGUMENT);
    info.struct_size = 1;
    REQUIRE(tch_checkpoint_get_info(checkpoint, 0, &info) == TCH_ERR_INVALID_ARGUMENT);
}

/* The file is truncated while open: reading the missing part is an error. */
static void check_cut(const tch_checkpoint *checkpoint, const uint8_t *bytes, size_t count)
{
    (void)fuzz_file(0, bytes, count - 1);
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint); i++) {
        double values[3];
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        REQUIRE(tch_checkpoint_get_info(checkpoint, i, &info) == TCH_OK);
        if (tch_dtype_size(info.dtype) > 0 && info.ndim <= TCH_MAX_RANK && info.bytes <= (int64_t)sizeof values) {
            tch_tensor out = tch_tensor_view(values, info.dtype, info.ndim, (int64_t *)info.shape);
            tch_status status = tch_checkpoint_read(checkpoint, NULL, info.name, &out);
            REQUIRE(status == TCH_OK || status == TCH_ERR_IO);
        }
    }
}

/* Returns the bytes of all tensors. */
static int64_t check_tensors(const tch_checkpoint *checkpoint, bool faulted)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint); i++) {
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        REQUIRE(tch_checkpoint_get_info(checkpoint, i, &info) == TCH_OK);
        REQUIRE(tch_checkpoint_find(checkpoint, info.name) == i);
        check_tensor(checkpoint, &info, faulted);
        bytes += info.bytes;
    }
    return bytes;
}

static uint64_t take(uint64_t *hash, uint64_t below)
{
    uint64_t taken = *hash % below;
    *hash /= below;
    return taken;
}

/* A rectangle of a tensor, sharded in some files. The hash chooses name, shape and rectangle, also out of bounds and
 * empty, and the destination: packed, strided, device memory, none. */
static void check_shards(const tch_checkpoint *checkpoint, uint64_t hash)
{
    static const struct {
        int32_t ndim;
        int64_t shape[3];
    } wholes[] = {{2, {2, 2}}, {2, {4, 1}}, {1, {4}}, {2, {3, 2}}, {2, {0, 3}}, {3, {2, 2, 2}}};
    static const char *const names[] = {"w", "w", "a", "x", NULL};
    const char *name = names[take(&hash, 5)];
    uint64_t way = take(&hash, 16);
    uint64_t which = take(&hash, 6);
    const int64_t *shape = wholes[which].shape;
    int64_t start[3], size[3], strides[] = {1, 4, 16}; /* column-major, so that it is read through a copy */
    float values[64];
    bool inside = true;
    for (int32_t k = 0; k < wholes[which].ndim; k++) {
        start[k] = (int64_t)take(&hash, 3);
        size[k] = (int64_t)take(&hash, 4);
        inside = inside && start[k] + size[k] <= shape[k];
    }
    tch_tensor out = tch_tensor_view(values, which == 5 ? TCH_FLOAT16 : TCH_FLOAT32, wholes[which].ndim, size);
    out.strides = way % 2 == 0 ? NULL : strides;
    out.device.type = way == 2 ? TCH_DEVICE_CUDA : TCH_DEVICE_CPU;
    tch_context *context = way == 4 ? fuzz_context() : NULL;
    tch_status checked = tch_checkpoint_check_shard(checkpoint, name, shape, start, way == 6 ? NULL : &out);
    tch_status got = tch_checkpoint_read_shard(way == 8 ? NULL : checkpoint, context, name, shape, start, &out);
    REQUIRE(inside || name == NULL || way == 6 || checked == TCH_ERR_SHAPE);
    REQUIRE(checked == TCH_OK || got != TCH_OK || way == 6);
}

/* The square that the seeds shard, and a column of it. Results must not depend on uninitialized memory: the square is
 * read over zeros and over ones. */
static void check_usual_shards(const tch_checkpoint *checkpoint)
{
    static const int64_t shape[] = {2, 2};
    static const int64_t start[] = {0, 1};
    int64_t size[] = {2, 1};
    float values[2];
    tch_tensor out = tch_tensor_view(values, TCH_FLOAT32, 2, size);
    (void)tch_checkpoint_read_shard(checkpoint, NULL, "w", shape, start, &out);
    int64_t turned[] = {1, 2}; /* strided, so that it is read through a copy */
    int64_t all[] = {2, 2};
    static const int64_t origin[] = {0, 0};
    float square[3][4];
    bool read = true;
    for (int i = 0; i < 3; i++) {
        memset(square[i], i == 0 ? 0 : 255, sizeof square[i]);
        tch_tensor strided = tch_tensor_view(square[i], TCH_FLOAT32, 2, all);
        strided.strides = i == 2 ? turned : NULL;
        read = tch_checkpoint_read_shard(checkpoint, NULL, "w", shape, origin, &strided) == TCH_OK && read;
    }
    REQUIRE(!read || memcmp(square[0], square[1], sizeof square[0]) == 0);
}

/* The corpus's files have this many data bytes, if any. */
void fuzz_repair(uint8_t *bytes, size_t count)
{
    fuzz_repair_safetensors(bytes, count, 24);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    tch_checkpoint *checkpoint = NULL;
    uint64_t hash = fuzz_hash(bytes, count);
    const char *path = fuzz_file(0, bytes, count);
    tch_clear_error();
    fuzz_faults_begin(hash);
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    bool faulted = fuzz_faults_end();
    REQUIRE(status == TCH_OK || (checkpoint == NULL && tch_last_error()[0] != '\0'));
    REQUIRE(status == TCH_OK || status == TCH_ERR_IO || (status == TCH_ERR_OUT_OF_MEMORY && faulted));
    check_text(bytes, count);
    if (count >= 3) {
        check_type(bytes);
    }
    if (status == TCH_OK) {
        check_places(&checkpoint->header, (int64_t)count - checkpoint->data_begin);
        REQUIRE(check_tensors(checkpoint, faulted) < (int64_t)count);
        check_no_tensors(checkpoint);
        check_settings(checkpoint);
        for (uint64_t i = 0; i < 4; i++) {
            check_shards(checkpoint, hash * (2 * i + 1) >> 16);
        }
        fuzz_faults_begin(hash / 1024);
        check_usual_shards(checkpoint);
        (void)fuzz_faults_end();
        tch_status verified = tch_checkpoint_verify(checkpoint, NULL);
        REQUIRE(verified == TCH_OK || verified == TCH_ERR_IO);
        if (hash % 16 == 1) {
            check_cut(checkpoint, bytes, count);
        }
        tch_checkpoint_close(checkpoint);
    }
    return 0;
}

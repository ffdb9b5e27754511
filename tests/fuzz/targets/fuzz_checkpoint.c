/* Bytes that somebody else chose, opened as a checkpoint: crashes, reads outside the file or the memory, and files that
 * open but contradict themselves. */
#include <string.h>

#include "fuzz.h"

/* Both ways to a tensor give the same bytes, and as many as its description says; or both say that they are not those
 * of its checksum. */
static void check_tensor(const tch_checkpoint *checkpoint, const tch_checkpoint_info *info)
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
    REQUIRE(viewed == status || viewed == TCH_ERR_LAYOUT);
    REQUIRE(viewed != TCH_OK || info->bytes == 0 || memcmp(view.data, memory, (size_t)info->bytes) == 0);
    free(memory);
}

static void check_settings(const tch_checkpoint *checkpoint)
{
    for (int64_t i = 0; i < tch_checkpoint_key_count(checkpoint); i++) {
        const char *key = tch_checkpoint_key(checkpoint, i);
        double number;
        int64_t integer;
        REQUIRE(key != NULL && tch_checkpoint_text(checkpoint, key) != NULL);
        (void)tch_checkpoint_number(checkpoint, key, &number);
        (void)tch_checkpoint_integer(checkpoint, key, &integer);
    }
}

/* Returns the bytes of all tensors. */
static int64_t check_tensors(const tch_checkpoint *checkpoint)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint); i++) {
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        REQUIRE(tch_checkpoint_get_info(checkpoint, i, &info) == TCH_OK);
        REQUIRE(tch_checkpoint_find(checkpoint, info.name) == i);
        check_tensor(checkpoint, &info);
        bytes += info.bytes;
    }
    return bytes;
}

/* A rectangle of a tensor that some files have in shards. */
static void check_shards(const tch_checkpoint *checkpoint)
{
    static const int64_t shape[] = {2, 2};
    static const int64_t start[] = {0, 1};
    int64_t size[] = {2, 1};
    float values[2];
    tch_tensor out = tch_tensor_view(values, TCH_FLOAT32, 2, size);
    (void)tch_checkpoint_read_shard(checkpoint, NULL, "w", shape, start, &out);
    (void)tch_checkpoint_check_shard(checkpoint, "w", shape, start, &out);
    int64_t turned[] = {1, 2}; /* strides, so that it is read by way of a copy */
    int64_t all[] = {2, 2};
    float square[4];
    tch_tensor strided = tch_tensor_view(square, TCH_FLOAT32, 2, all);
    strided.strides = turned;
    static const int64_t origin[] = {0, 0};
    (void)tch_checkpoint_read_shard(checkpoint, NULL, "w", shape, origin, &strided);
}

/* The files of the corpus have this much behind their header, if anything. */
void fuzz_repair(uint8_t *bytes, size_t count)
{
    fuzz_repair_safetensors(bytes, count, 24);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    tch_checkpoint *checkpoint = NULL;
    tch_clear_error();
    tch_status status = tch_checkpoint_open(fuzz_file(0, bytes, count), &checkpoint);
    REQUIRE(status == TCH_OK || (status == TCH_ERR_IO && checkpoint == NULL && tch_last_error()[0] != '\0'));
    if (status == TCH_OK) {
        REQUIRE(check_tensors(checkpoint) < (int64_t)count);
        check_settings(checkpoint);
        check_shards(checkpoint);
        tch_status verified = tch_checkpoint_verify(checkpoint, NULL);
        REQUIRE(verified == TCH_OK || verified == TCH_ERR_IO);
        tch_checkpoint_close(checkpoint);
    }
    return 0;
}

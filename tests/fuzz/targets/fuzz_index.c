/* The index of a checkpoint in several files, next to two valid ones and a folder: path traversal, missing tensors,
 * unexpected values. */
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "fuzz.h"

static void write_shard(const char *file, const char *name, int32_t count)
{
    static float values[4] = {1, 2, 3, 4};
    char path[PATH_MAX];
    int64_t size = count;
    tch_checkpoint_writer *writer = NULL;
    tch_tensor t = tch_tensor_view(values, TCH_FLOAT32, 1, &size);
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), file);
    REQUIRE(tch_checkpoint_writer_create(&writer) == TCH_OK);
    REQUIRE(tch_checkpoint_writer_add(writer, name, &t) == TCH_OK);
    REQUIRE(tch_checkpoint_writer_set_text(writer, "k", file) == TCH_OK);
    REQUIRE(tch_checkpoint_writer_save(writer, NULL, path) == TCH_OK);
    tch_checkpoint_writer_destroy(writer);
}

static void check_tensors(const tch_checkpoint *checkpoint)
{
    for (int64_t i = 0; i < tch_checkpoint_count(checkpoint); i++) {
        float values[4];
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        REQUIRE(tch_checkpoint_get_info(checkpoint, i, &info) == TCH_OK);
        REQUIRE(info.ndim == 1 && info.bytes <= (int64_t)sizeof values);
        tch_tensor out = tch_tensor_view(values, info.dtype, info.ndim, (int64_t *)info.shape);
        REQUIRE(tch_checkpoint_read(checkpoint, NULL, info.name, &out) == TCH_OK);
        REQUIRE(values[0] == 1.0F);
    }
    REQUIRE(tch_checkpoint_verify(checkpoint, NULL) == TCH_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count)
{
    static int index = -1;
    static char path[PATH_MAX];
    tch_checkpoint *checkpoint = NULL;
    if (index < 0) {
        write_shard("a.safetensors", "a", 4);
        write_shard("b.safetensors", "b", 2);
        snprintf(path, sizeof path, "%s/folder.safetensors", fuzz_folder());
        REQUIRE(mkdir(path, 0700) == 0);
        snprintf(path, sizeof path, "%s/x.index.json", fuzz_folder());
    }
    fuzz_write("x.index.json", &index, bytes, count);
    tch_clear_error();
    fuzz_faults_begin(fuzz_hash(bytes, count));
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    bool faulted = fuzz_faults_end();
    REQUIRE(status == TCH_OK || (checkpoint == NULL && tch_last_error()[0] != '\0'));
    REQUIRE(status == TCH_OK || status == TCH_ERR_IO || (status == TCH_ERR_OUT_OF_MEMORY && faulted));
    if (status == TCH_OK) {
        REQUIRE(tch_checkpoint_count(checkpoint) <= 2);
        check_tensors(checkpoint);
        tch_checkpoint_close(checkpoint);
    }
    return 0;
}

/* Whether a file holds what was written, tensor by tensor, without anything being taken out of it. */
#include "checksums.h"
#include "core/allocator.h"
#include "core/status.h"
#include "crc32c.h"
#include "reader.h"
#include "utf8.h"

tch_status tchi_checkpoint_compare(const tch_checkpoint *checkpoint, const tchi_stored *stored, uint32_t found)
{
    char quoted[TCHI_QUOTE_SIZE];
    if (!stored->has_checksum || found == stored->checksum) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_IO,
                     "%.600s: the bytes of \"%s\" are not those that were written: their CRC-32C is %08x, expected "
                     "%08x; the file is damaged",
                     checkpoint->path, tchi_quote(stored->name, quoted), (unsigned)found, (unsigned)stored->checksum);
}

/* `buffer` has TCHI_SUMMED_BYTES. */
static tch_status verify_tensor(const tch_checkpoint *checkpoint, const tchi_stored *stored, char *buffer)
{
    const tch_checkpoint *file = tchi_checkpoint_file(checkpoint, stored);
    uint32_t found = 0;
    int descriptor;
    if (!stored->has_checksum) {
        return TCH_OK;
    }
    tch_status status = tchi_descriptor_borrow(file, &descriptor);
    for (int64_t at = stored->begin; at < stored->end && status == TCH_OK; at += TCHI_SUMMED_BYTES) {
        int64_t here = stored->end - at < TCHI_SUMMED_BYTES ? stored->end - at : TCHI_SUMMED_BYTES;
        status = tchi_checkpoint_bytes(descriptor, file->path, file->data_begin + at, buffer, here);
        found = tchi_crc32c(found, buffer, here);
    }
    tchi_descriptor_return(file, descriptor);
    return status == TCH_OK ? tchi_checkpoint_compare(file, stored, found) : status;
}

static tch_status verify_tensors(const tch_checkpoint *checkpoint, int64_t first, int64_t count)
{
    const tchi_stored *tensors = checkpoint->header.tensors.items;
    char *buffer;
    TCHI_TRY(tchi_host_take((size_t)TCHI_SUMMED_BYTES, "a buffer", &buffer));
    tch_status status = TCH_OK;
    for (int64_t i = first; i < first + count && status == TCH_OK; i++) {
        status = verify_tensor(checkpoint, &tensors[i], buffer);
    }
    tchi_host_release(buffer, (size_t)TCHI_SUMMED_BYTES);
    return status;
}

tch_status tchi_checkpoint_verify_once(const tch_checkpoint *checkpoint, tchi_stored *stored)
{
    if (!stored->has_checksum || atomic_load_explicit(&stored->viewed, memory_order_relaxed)) {
        return TCH_OK;
    }
    TCHI_TRY(verify_tensors(checkpoint, stored - (const tchi_stored *)checkpoint->header.tensors.items, 1));
    atomic_store_explicit(&stored->viewed, true, memory_order_relaxed);
    return TCH_OK;
}

tch_status tch_checkpoint_verify(const tch_checkpoint *checkpoint, const char *name)
{
    char quoted[TCHI_QUOTE_SIZE];
    if (checkpoint == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_checkpoint_verify: checkpoint is NULL");
    }
    if (name == NULL) {
        return verify_tensors(checkpoint, 0, checkpoint->header.tensors.count);
    }
    int64_t number = tchi_names_find(&checkpoint->header.names, name);
    if (number < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_checkpoint_verify: %.600s has no tensor with the name \"%s\"",
                         checkpoint->path, tchi_quote(name, quoted));
    }
    return verify_tensors(checkpoint, number, 1);
}

int32_t tch_checkpoint_has_checksums(const tch_checkpoint *checkpoint)
{
    return checkpoint != NULL && checkpoint->header.complete;
}

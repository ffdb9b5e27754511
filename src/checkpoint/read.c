/* Reads tensors of an open file, as views of the mapping or as copies. Copies use system calls: if the file was
 * truncated they fail, while the mapping would kill the process. */
#include <stdio.h>

#include "checksums.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"
#include "core/system.h"
#include "core/tensor.h"
#include "crc32c.h"
#include "chunks.h"
#include "reader.h"
#include "text.h"

static tch_status compare_checksum(const tch_checkpoint *checkpoint, const tchi_stored *stored, uint32_t found)
{
    if (!stored->has_checksum || found == stored->checksum) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_IO,
                     "%.600s: the bytes of \"%s\" are not those that were written: their CRC-32C is %08x, expected "
                     "%08x; the file is damaged",
                     checkpoint->path, tchi_quote(stored->name).text, (unsigned)found, (unsigned)stored->checksum);
}

/* The tensor of this name; NULL with the reason in `status`. */
static tchi_stored *find_tensor(const char *function, const tch_checkpoint *checkpoint, const char *name,
                                tch_status *status)
{
    int64_t number = tchi_names_find(&checkpoint->header.names, name);
    if (number < 0) {
        *status = tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %.600s has no tensor with the name \"%s\"", function,
                            checkpoint->path, tchi_quote(name).text);
        return NULL;
    }
    return (tchi_stored *)checkpoint->header.tensors.items + number;
}

/* The same, if tensors can have its type and rank. */
static tchi_stored *find_loadable(const char *function, const tch_checkpoint *checkpoint, const char *name,
                                  tch_status *status)
{
    tchi_stored *stored = find_tensor(function, checkpoint, name, status);
    if (stored == NULL) {
        return NULL;
    }
    if (tch_dtype_size(stored->type->dtype) == 0) {
        *status = tchi_fail(TCH_ERR_DTYPE,
                            "%s: the tensor with the name \"%s\" is %s, a type that this library does not have",
                            function, tchi_quote(name).text, stored->type->name);
        return NULL;
    }
    if (stored->ndim > TCH_MAX_RANK) {
        *status = tchi_fail(TCH_ERR_SHAPE, "%s: the tensor with the name \"%s\" has %d dimensions, this library has %d",
                            function, tchi_quote(name).text, stored->ndim, TCH_MAX_RANK);
        return NULL;
    }
    return stored;
}

/* A view; `data` is the address of the file's first tensor. */
static tch_tensor tensor_of(const tch_checkpoint *checkpoint, const tchi_stored *stored, char *data)
{
    return tch_tensor_view(data == NULL || stored->begin == stored->end ? NULL : data + stored->begin,
                           stored->type->dtype, stored->ndim, (int64_t *)tchi_checkpoint_sizes(checkpoint, stored));
}

tch_status tch_checkpoint_view(const tch_checkpoint *checkpoint, const char *name, tch_tensor *view)
{
    char text[TCHI_ERRNO_SIZE];
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_view", "checkpoint", checkpoint));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_view", "name", name));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_view", "view", view));
    tch_status status = TCH_OK;
    tchi_stored *stored = find_loadable("tch_checkpoint_view", checkpoint, name, &status);
    if (stored == NULL) {
        return status;
    }
    const tch_checkpoint *file = tchi_checkpoint_file(checkpoint, stored);
    if (file->map == NULL) {
        return tchi_fail(TCH_ERR_IO, "%.600s: it cannot be mapped into memory: %s; use tch_checkpoint_read", file->path,
                         tchi_errno_text(file->map_error, text));
    }
    if ((file->data_begin + stored->begin) % (int64_t)tch_dtype_size(stored->type->dtype) != 0) {
        return tchi_fail(TCH_ERR_LAYOUT,
                         "tch_checkpoint_view: the tensor with the name \"%s\" is at byte %lld of the file, which is "
                         "not aligned for %s; use tch_checkpoint_read",
                         tchi_quote(name).text, (long long)(file->data_begin + stored->begin), stored->type->name);
    }
    TCHI_TRY(tchi_checkpoint_verify_once(checkpoint, stored)); /* later views are free */
    *view = tensor_of(checkpoint, stored, file->map + file->data_begin);
    return TCH_OK;
}

/* --- copies ----------------------------------------------------------------------------------------------------- */

typedef struct reading {
    const tch_checkpoint *checkpoint;
    const tchi_stored *stored;
    tch_context *context;
    int descriptor;
    int64_t at; /* in the file */
    uint32_t checksum;
    char *buffer;
    int64_t buffer_bytes;
} reading;

/* Reads the next bytes of the tensor, which are summed while cached. */
static tch_status read_bytes(reading *r, char *to, int64_t count)
{
    bool summed = r->stored->has_checksum;
    int64_t most = summed ? TCHI_SUMMED_BYTES : count;
    for (int64_t done = 0; done < count; done += most) {
        int64_t here = count - done < most ? count - done : most;
        TCHI_TRY(tchi_checkpoint_bytes(r->descriptor, r->checkpoint->path, r->at, to + done, here));
        r->checksum = summed ? tchi_crc32c(r->checksum, to + done, here) : 0;
        r->at += here;
    }
    return TCH_OK;
}

/* A copy to a device synchronizes, since the buffer is reused. */
static tch_status read_chunk(void *user, tch_tensor *chunk)
{
    reading *r = user;
    TCHI_TRY(read_bytes(r, r->buffer, tchi_tensor_bytes(chunk)));
    if (tchi_on_host(chunk)) {
        tchi_unpack(chunk, r->buffer);
        return TCH_OK;
    }
    tch_tensor packed = tch_tensor_view(r->buffer, chunk->dtype, chunk->ndim, chunk->shape);
    return tch_tensor_copy(r->context, chunk, &packed);
}

static tch_status read_through_buffer(reading *r, const tch_tensor *out)
{
    r->buffer_bytes = tchi_buffer_bytes(out);
    r->buffer = tchi_host_allocate((size_t)r->buffer_bytes, 64);
    if (r->buffer == NULL) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "tch_checkpoint_read: out of host memory: %lld bytes for a buffer",
                         (long long)r->buffer_bytes);
    }
    int64_t room = r->buffer_bytes / (int64_t)tch_dtype_size(out->dtype);
    tch_status status = tchi_visit_chunks(out, room, read_chunk, r);
    tchi_host_release(r->buffer, (size_t)r->buffer_bytes);
    return status;
}

tch_status tchi_checkpoint_check_out(const char *function, const tch_context *context, const tch_tensor *out)
{
    TCHI_TRY(tch_tensor_check(out, "out"));
    TCHI_TRY(tchi_check_writable(out, "out"));
    if (tchi_on_host(out)) {
        return TCH_OK;
    }
    return context != NULL ? tchi_check_device(context, out, "out")
                           : tchi_fail(TCH_ERR_DEVICE,
                                       "%s: context is NULL, and out is not in host memory; give a context of its "
                                       "device",
                                       function);
}

/* Checks type and shape. */
static tch_status check_out(const tch_checkpoint *checkpoint, const tch_context *context, const tchi_stored *stored,
                            const tch_tensor *out)
{
    char name[TCHI_QUOTE_SIZE + 32];
    TCHI_TRY(tchi_checkpoint_check_out("tch_checkpoint_read", context, out));
    snprintf(name, sizeof name, "\"%s\" in the file", tchi_quote(stored->name).text);
    tch_tensor expected = tensor_of(checkpoint, stored, NULL);
    TCHI_TRY(tchi_check_same_dtype(out, "out", &expected, name));
    return tchi_check_same_shape(out, "out", &expected);
}

tch_status tch_checkpoint_read(const tch_checkpoint *checkpoint, tch_context *context, const char *name,
                               tch_tensor *out)
{
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_read", "checkpoint", checkpoint));
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_read", "name", name));
    tch_status status = TCH_OK;
    const tchi_stored *stored = find_loadable("tch_checkpoint_read", checkpoint, name, &status);
    if (stored == NULL) {
        return status;
    }
    TCHI_TRY(check_out(checkpoint, context, stored, out));
    const tch_checkpoint *file = tchi_checkpoint_file(checkpoint, stored);
    reading r = {.checkpoint = file, .stored = stored, .context = context};
    r.at = file->data_begin + stored->begin;
    if (stored->begin < stored->end) { /* an empty tensor may have NULL memory */
        TCHI_TRY(tchi_descriptor_borrow(file, &r.descriptor));
        status = tchi_is_plain(out) ? read_bytes(&r, tchi_tensor_data(out), stored->end - stored->begin)
                                    : read_through_buffer(&r, out);
        tchi_descriptor_return(file, r.descriptor);
    }
    return status == TCH_OK ? compare_checksum(file, stored, r.checksum) : status;
}

/* --- verifying --------------------------------------------------------------------------------------------------- */

/* `buffer` has TCHI_SUMMED_BYTES bytes. */
static tch_status verify_through_buffer(const tch_checkpoint *checkpoint, const tchi_stored *stored, char *buffer)
{
    const tch_checkpoint *file = tchi_checkpoint_file(checkpoint, stored);
    uint32_t found = 0;
    int descriptor;
    tch_status status = tchi_descriptor_borrow(file, &descriptor);
    for (int64_t at = stored->begin; at < stored->end && status == TCH_OK; at += TCHI_SUMMED_BYTES) {
        int64_t here = stored->end - at < TCHI_SUMMED_BYTES ? stored->end - at : TCHI_SUMMED_BYTES;
        status = tchi_checkpoint_bytes(descriptor, file->path, file->data_begin + at, buffer, here);
        found = tchi_crc32c(found, buffer, here);
    }
    tchi_descriptor_return(file, descriptor);
    return status == TCH_OK ? compare_checksum(file, stored, found) : status;
}

static tch_status verify_tensor(const tch_checkpoint *checkpoint, const tchi_stored *stored)
{
    char *buffer;
    if (!stored->has_checksum) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_host_take((size_t)TCHI_SUMMED_BYTES, "a buffer", &buffer));
    tch_status status = verify_through_buffer(checkpoint, stored, buffer);
    tchi_host_release(buffer, (size_t)TCHI_SUMMED_BYTES);
    return status;
}

tch_status tchi_checkpoint_verify_once(const tch_checkpoint *checkpoint, tchi_stored *stored)
{
    if (!atomic_load_explicit(&stored->viewed, memory_order_relaxed)) {
        TCHI_TRY(verify_tensor(checkpoint, stored));
        atomic_store_explicit(&stored->viewed, true, memory_order_relaxed);
    }
    return TCH_OK;
}

tch_status tch_checkpoint_verify(const tch_checkpoint *checkpoint, const char *name)
{
    tch_status status = TCH_OK;
    TCHI_TRY(tchi_check_not_null("tch_checkpoint_verify", "checkpoint", checkpoint));
    if (name != NULL) {
        const tchi_stored *stored = find_tensor("tch_checkpoint_verify", checkpoint, name, &status);
        return stored == NULL ? status : verify_tensor(checkpoint, stored);
    }
    const tchi_stored *tensors = checkpoint->header.tensors.items;
    for (int64_t i = 0; i < checkpoint->header.tensors.count && status == TCH_OK; i++) {
        status = verify_tensor(checkpoint, &tensors[i]);
    }
    return status;
}

int32_t tch_checkpoint_has_checksums(const tch_checkpoint *checkpoint)
{
    return checkpoint != NULL && checkpoint->header.complete;
}

/* Contexts and tensors for the commands. All memory comes through the library, so that a size that does not fit is
 * refused with the library's own message. */
#include "workplace.h"

#include <math.h>
#include <stddef.h>

tch_status workplace_open(const char *device, workplace *place)
{
    *place = (workplace){NULL, NULL};
    tch_status status = tch_context_create(device, &place->device);
    if (status == TCH_OK) {
        status = tch_context_create("cpu", &place->host);
    }
    if (status != TCH_OK) {
        workplace_close(place);
    }
    return status;
}

void workplace_close(workplace *place)
{
    tch_context_destroy(place->device);
    tch_context_destroy(place->host);
    *place = (workplace){NULL, NULL};
}

tch_status workplace_matrices(tch_context *context, tch_dtype dtype, int64_t batch, int64_t rows, int64_t cols,
                              tch_tensor **tensor)
{
    const int64_t shape[] = {batch, rows, cols};
    return tch_tensor_create_uninitialized(context, dtype, 3, shape, TCH_CONTIGUOUS, tensor);
}

tch_status workplace_vector(tch_context *context, tch_dtype dtype, int64_t count, tch_tensor **tensor)
{
    return tch_tensor_create_uninitialized(context, dtype, 1, &count, TCH_CONTIGUOUS, tensor);
}

tch_tensor workplace_slice(const tch_tensor *batch, int64_t index)
{
    tch_tensor slice = *batch;
    uint64_t bytes = (uint64_t)(batch->shape[1] * batch->shape[2]) * tch_dtype_size(batch->dtype);
    slice.ndim = 2;
    slice.shape = batch->shape + 1;
    slice.strides = NULL;
    slice.byte_offset += (uint64_t)index * bytes;
    return slice;
}

tch_status workplace_poison(const workplace *place, tch_tensor *output)
{
    return tch_tensor_fill(place->device, output, (double)NAN);
}

tch_status workplace_fetch(const workplace *place, const tch_tensor *tensor, tch_tensor **host)
{
    tch_dtype dtype = tch_dtype_equal(tensor->dtype, TCH_INT32) ? TCH_INT32 : TCH_FLOAT64;
    *host = NULL;
    tch_status status =
        tch_tensor_create_uninitialized(place->host, dtype, tensor->ndim, tensor->shape, TCH_CONTIGUOUS, host);
    if (status == TCH_OK) {
        status = tch_tensor_copy(place->device, *host, tensor);
    }
    if (status == TCH_OK) {
        status = tch_context_synchronize(place->device);
    }
    if (status != TCH_OK) {
        tch_tensor_destroy(*host);
        *host = NULL;
    }
    return status;
}

double workplace_entry(const tch_tensor *host, int64_t index)
{
    if (tch_dtype_equal(host->dtype, TCH_INT32)) {
        return ((const int32_t *)host->data)[index];
    }
    return ((const double *)host->data)[index];
}

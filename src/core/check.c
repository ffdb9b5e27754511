/* Validation of arguments: see check.h. */
#include "check.h"

#include <stdio.h>
#include <stdlib.h>

#include "context.h"
#include "status.h"
#include "tensor.h"

const char *tchi_describe_shape(const tch_tensor *tensor, char *text, size_t size)
{
    size_t used = (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < tensor->ndim && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i > 0 ? ", " : "", (long long)tensor->shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
    return text;
}

static const char *device_word(int32_t type)
{
    switch (type) {
    case TCH_DEVICE_CPU:
        return "cpu";
    case TCH_DEVICE_CUDA:
        return "cuda";
    case TCH_DEVICE_CUDA_HOST:
        return "cuda_host";
    case TCH_DEVICE_EXTENSION:
        return "extension";
    default:
        return "unknown device";
    }
}

const char *tchi_describe(const tch_tensor *tensor, char *text, size_t size)
{
    char shape[TCHI_DESCRIBE_SIZE];
    snprintf(text, size, "%s %s on %s:%d", tch_dtype_name(tensor->dtype),
             tchi_describe_shape(tensor, shape, sizeof shape), device_word(tensor->device.type), tensor->device.index);
    return text;
}

tch_status tchi_enter(tch_context *context, const char *function, tch_context **entered)
{
    if (context == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: context is NULL", function);
    }
    TCHI_TRY(context->backend->device->begin(context->state));
    tchi_range_push(context, function);
    *entered = context;
    return TCH_OK;
}

tch_status tchi_check_chapter(const tch_context *context, const char *function, const void *operations,
                              const char *chapter)
{
    if (operations != NULL) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_UNSUPPORTED, "%s: the %s backend does not offer it: its table has no chapter `%s`",
                     function, context->backend->name, chapter);
}

void tchi_leave(tch_context **entered)
{
    tch_context *context = *entered;
    if (context == NULL) {
        return;
    }
    tchi_range_pop(context);
    if (context->backend->device->end != NULL) {
        context->backend->device->end(context->state);
    }
}

void tchi_range_push(tch_context *context, const char *name)
{
    if (context->backend->device->range != NULL) {
        context->backend->device->range(context->state, name);
    }
    if (context->range_push != NULL) {
        context->range_push(context->range_user, name);
    }
}

void tchi_range_pop(tch_context *context)
{
    if (context->range_pop != NULL) {
        context->range_pop(context->range_user);
    }
    if (context->backend->device->range != NULL) {
        context->backend->device->range(context->state, NULL);
    }
}

tch_context *tchi_range_open(tch_context *context, const char *name)
{
    tchi_range_push(context, name);
    return context;
}

void tchi_range_close(tch_context **context)
{
    tchi_range_pop(*context);
}

/* Whether the byte distance between the extreme elements fits in 63 bits. Requires a valid, nonempty shape. */
static int reach_fits(const tch_tensor *tensor, int64_t element)
{
    int64_t reach = element;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t stride = tchi_tensor_stride(tensor, i);
        int64_t step;
        if (tensor->shape[i] > 1 && (stride == INT64_MIN || __builtin_mul_overflow(llabs(stride), element, &step) ||
                                     __builtin_mul_overflow(step, tensor->shape[i] - 1, &step) ||
                                     __builtin_add_overflow(reach, step, &reach))) {
            return 0;
        }
    }
    return 1;
}

tch_status tch_tensor_check(const tch_tensor *tensor, const char *name)
{
    char text[TCHI_DESCRIBE_SIZE];
    if (tensor == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s is NULL", name);
    }
    if (tensor->ndim < 0 || tensor->ndim > TCH_MAX_RANK) {
        return tchi_fail(TCH_ERR_SHAPE, "%s has %d dimensions, expected 0 to %d", name, tensor->ndim, TCH_MAX_RANK);
    }
    if (tensor->ndim > 0 && tensor->shape == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s has %d dimensions but its shape is NULL", name, tensor->ndim);
    }
    size_t size = tch_dtype_size(tensor->dtype);
    if (size == 0) {
        return tchi_fail(TCH_ERR_DTYPE, "%s has an element type the library does not know (code %u, %u bits, %u lanes)",
                         name, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
    }
    int64_t count = tch_tensor_numel(tensor);
    if (count < 0 || count > INT64_MAX / (int64_t)size) {
        return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: a size is negative, or the elements do not fit in 64 bits",
                         name, tchi_describe_shape(tensor, text, sizeof text));
    }
    if (count > 0 && !reach_fits(tensor, (int64_t)size)) {
        return tchi_fail(TCH_ERR_LAYOUT, "%s has strides that reach further than 64 bits can address", name);
    }
    if (count > 0 && tensor->data == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s is %s but its data is NULL", name,
                         tchi_describe(tensor, text, sizeof text));
    }
    if (count > 0 && (uintptr_t)tchi_tensor_data(tensor) % size != 0) {
        return tchi_fail(TCH_ERR_LAYOUT, "%s: its first element at %p is not aligned to the %zu bytes of %s", name,
                         tchi_tensor_data(tensor), size, tch_dtype_name(tensor->dtype));
    }
    return TCH_OK;
}

tch_status tchi_check_not_null(const char *function, const char *name, const void *pointer)
{
    return pointer != NULL ? TCH_OK : tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is NULL", function, name);
}

tch_status tchi_check_device(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    tch_device device = tch_context_device(context);
    if (tensor->device.type == device.type && tensor->device.index == device.index) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_DEVICE, "%s is %s, the context is on %s:%d; copy it there with tch_tensor_copy", name,
                     tchi_describe(tensor, text, sizeof text), device_word(device.type), device.index);
}

tch_status tchi_check_input(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    TCHI_TRY(tch_tensor_check(tensor, name));
    return tchi_check_device(context, tensor, name);
}

typedef struct step {
    int64_t size, stride;
} step;

static int by_stride(const void *a, const void *b)
{
    int64_t x = ((const step *)a)->stride;
    int64_t y = ((const step *)b)->stride;
    return (x > y) - (x < y);
}

/* Elements are distinct if, in ascending order, each stride exceeds the reach of the smaller ones. */
tch_status tchi_check_writable(const tch_tensor *tensor, const char *name)
{
    step steps[TCH_MAX_RANK];
    int32_t count = 0;
    if (tch_tensor_numel(tensor) == 0) {
        return TCH_OK;
    }
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] > 1) {
            steps[count++] = (step){tensor->shape[i], llabs(tchi_tensor_stride(tensor, i))};
        }
    }
    qsort(steps, (size_t)count, sizeof *steps, by_stride);
    int64_t reach = 0;
    for (int32_t i = 0; i < count; i++) {
        if (steps[i].stride <= reach) {
            return tchi_fail(TCH_ERR_LAYOUT,
                             "%s is written to, but its strides make different elements share memory (stride %lld)",
                             name, (long long)steps[i].stride);
        }
        reach += (steps[i].size - 1) * steps[i].stride;
    }
    return TCH_OK;
}

tch_status tchi_check_output(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    TCHI_TRY(tchi_check_input(context, tensor, name));
    return tchi_check_writable(tensor, name);
}

tch_status tchi_check_float(const tch_tensor *tensor, const char *name)
{
    if (tchi_scalar_is_float(tchi_scalar_of(tensor->dtype))) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected float64, float32, float16 or bfloat16", name,
                     tch_dtype_name(tensor->dtype));
}

tch_status tchi_check_dtype(const tch_tensor *tensor, const char *name, tch_dtype expected)
{
    if (tch_dtype_equal(tensor->dtype, expected)) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected %s", name, tch_dtype_name(tensor->dtype),
                     tch_dtype_name(expected));
}

tch_status tchi_check_same_dtype(const tch_tensor *other, const char *other_name, const tch_tensor *tensor,
                                 const char *name)
{
    if (tch_dtype_equal(other->dtype, tensor->dtype)) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected %s as %s is", other_name, tch_dtype_name(other->dtype),
                     tch_dtype_name(tensor->dtype), name);
}

tch_status tchi_check_shape(const tch_tensor *out, const char *name, int32_t ndim, const int64_t *shape)
{
    int same = out->ndim == ndim;
    for (int32_t i = 0; same && i < ndim; i++) {
        same = out->shape[i] == shape[i];
    }
    if (same) {
        return TCH_OK;
    }
    char have[TCHI_DESCRIBE_SIZE], want[TCHI_DESCRIBE_SIZE];
    tch_tensor expected = {.ndim = ndim, .shape = (int64_t *)shape};
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected %s", name, tchi_describe_shape(out, have, sizeof have),
                     tchi_describe_shape(&expected, want, sizeof want));
}

tch_status tchi_check_same_shape(const tch_tensor *other, const char *other_name, const tch_tensor *tensor)
{
    return tchi_check_shape(other, other_name, tensor->ndim, tensor->shape);
}

tch_status tchi_check_matrix(const tch_tensor *tensor, const char *name)
{
    if (tensor->ndim >= 2) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected a matrix or a batch of them [..., m, n]", name,
                     tchi_describe_shape(tensor, text, sizeof text));
}

tch_status tchi_check_square(const tch_tensor *tensor, const char *name)
{
    if (tensor->ndim >= 2 && tensor->shape[tensor->ndim - 1] == tensor->shape[tensor->ndim - 2]) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected square matrices [..., n, n]", name,
                     tchi_describe_shape(tensor, text, sizeof text));
}

tch_status tchi_check_setup(const char *function, const tch_optim_setup *setup)
{
    if (setup != NULL && setup->struct_size != sizeof *setup) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: setup->struct_size is %zu, expected %zu", function,
                         setup->struct_size, sizeof *setup);
    }
    const tch_state_allocator *a = setup == NULL ? NULL : setup->allocator;
    if (a != NULL && (a->struct_size != sizeof *a || a->allocate == NULL || a->release == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: setup->allocator must have its struct_size and both functions set", function);
    }
    return TCH_OK;
}

tch_status tchi_check_disjoint(const tch_tensor *out, const char *out_name, const tch_tensor *in, const char *in_name)
{
    const char *out_low, *out_high, *in_low, *in_high;
    if (out == NULL || in == NULL) {
        return TCH_OK;
    }
    tchi_tensor_extent(out, &out_low, &out_high);
    tchi_tensor_extent(in, &in_low, &in_high);
    if (out_low == NULL || in_low == NULL || out_high <= in_low || in_high <= out_low) {
        return TCH_OK;
    }
    return tchi_fail(TCH_ERR_LAYOUT, "%s overlaps %s in memory; give it memory of its own", out_name, in_name);
}

tch_status tchi_check_all_disjoint(const tchi_named *outputs, int32_t output_count, const tchi_named *inputs,
                                   int32_t input_count)
{
    for (int32_t i = 0; i < output_count; i++) {
        for (int32_t k = 0; k < input_count; k++) {
            TCHI_TRY(tchi_check_disjoint(outputs[i].tensor, outputs[i].name, inputs[k].tensor, inputs[k].name));
        }
        for (int32_t k = i + 1; k < output_count; k++) {
            TCHI_TRY(tchi_check_disjoint(outputs[i].tensor, outputs[i].name, outputs[k].tensor, outputs[k].name));
        }
    }
    return TCH_OK;
}

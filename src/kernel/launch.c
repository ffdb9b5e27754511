/* A launch: shape and arguments checked, arguments packed on the stack, one call of the backend. Nothing here allocates
 * or waits: a launch is meant to cost little more than the device's own. */
#include <stdalign.h>
#include <string.h>

#include "arguments.h"
#include "core/check.h"
#include "core/context.h"
#include "core/status.h"
#include "kernel.h"

#define ALIGNMENT 16 /* of a value: no type of CUDA wants more */
#define VALUE_BYTES (TCHI_PARAMETER_BYTES_MOST + TCHI_PARAMETERS_MOST * ALIGNMENT)

/* What CUDA allows, on the CPU too, so that a launch that works there works everywhere. */
static const int64_t grid_most[3] = {INT32_MAX, 65535, 65535};
static const int64_t block_most[3] = {1024, 1024, 64};

static tch_status check_axes(const tch_kernel *kernel, const char *name, const int64_t sizes[3], int64_t least,
                             const int64_t most[3])
{
    for (int i = 0; i < 3; i++) {
        if (sizes[i] < least || sizes[i] > most[i]) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                             "tch_kernel_launch: kernel %.200s: shape's %s[%d] is %lld, expected %lld to %lld",
                             kernel->name, name, i, (long long)sizes[i], (long long)least, (long long)most[i]);
        }
    }
    return TCH_OK;
}

static tch_status check_shape(const tch_kernel *kernel, const tch_kernel_shape *shape)
{
    if (shape == NULL || shape->struct_size != sizeof *shape) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: shape must point to a struct set to TCH_KERNEL_SHAPE_INIT");
    }
    TCHI_TRY(check_axes(kernel, "grid", shape->grid, 0, grid_most));
    TCHI_TRY(check_axes(kernel, "block", shape->block, 1, block_most));
    int64_t threads = shape->block[0] * shape->block[1] * shape->block[2];
    if (threads > kernel->info.max_threads) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "tch_kernel_launch: kernel %.200s: shape's block has %lld threads, expected at most %d for this "
            "kernel",
            kernel->name, (long long)threads, kernel->info.max_threads);
    }
    if (shape->shared_bytes < 0 || shape->shared_bytes > INT32_MAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: kernel %.200s: shape's shared_bytes is %lld, expected 0 to %d",
                         kernel->name, (long long)shape->shared_bytes, INT32_MAX);
    }
    return TCH_OK;
}

static tch_status check_count(const tch_kernel *kernel, int32_t count, const tch_kernel_argument *arguments)
{
    if (count != kernel->info.parameters) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kernel_launch: kernel %.200s: count is %d, expected %d: one argument for each parameter",
                         kernel->name, count, kernel->info.parameters);
    }
    if (count > 0 && arguments == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_launch: kernel %.200s: arguments is NULL", kernel->name);
    }
    return TCH_OK;
}

static tch_status pack_and_launch(const tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                                  const tch_kernel_argument *arguments)
{
    alignas(ALIGNMENT) char values[VALUE_BYTES];
    const void *pointers[TCHI_PARAMETERS_MOST];
    char *value = values;
    for (int32_t i = 0; i < count; i++) {
        TCHI_TRY(tchi_argument_pack(kernel, i, &arguments[i], value));
        pointers[i] = value;
        value += (kernel->parameters[i].size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    if (shape->grid[0] == 0 || shape->grid[1] == 0 || shape->grid[2] == 0) {
        return TCH_OK;
    }
    tch_kernel_run run = {.shared_bytes = shape->shared_bytes, .arguments = pointers};
    memcpy(run.grid, shape->grid, sizeof run.grid);
    memcpy(run.block, shape->block, sizeof run.block);
    return kernel->context->backend->kernel->launch(kernel->context->state, kernel->handle, &run);
}

tch_status tch_kernel_launch(tch_kernel *kernel, const tch_kernel_shape *shape, int32_t count,
                             const tch_kernel_argument *arguments)
{
    if (kernel == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kernel_launch: kernel is NULL");
    }
    TCHI_ENTER(kernel->context, "tch_kernel_launch");
    TCHI_TRY(check_shape(kernel, shape));
    TCHI_TRY(check_count(kernel, count, arguments));
    return pack_and_launch(kernel, shape, count, arguments);
}

/* The host allocator and its replacement by the caller. The count of live blocks ensures that memory never returns to
 * an allocator it did not come from. */
#include "allocator.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/sysinfo.h>

#include <torchium/memory.h>

#include "status.h"

/* With overcommit the system grants more memory than exists and kills the program that uses it; all of ours is used, so
 * requests beyond the machine's memory are refused here. Small requests skip the system call. */
static bool fits_machine(size_t bytes)
{
    const size_t small = (size_t)1 << 30;
    struct sysinfo info;
    if (bytes < small || sysinfo(&info) != 0) {
        return true;
    }
    return bytes / info.mem_unit <= info.totalram + info.totalswap;
}

static void *allocate_aligned(void *user, size_t bytes, size_t alignment)
{
    if (!fits_machine(bytes)) {
        return NULL;
    }
    void *pointer = NULL;
    size_t least = alignment < sizeof(void *) ? sizeof(void *) : alignment;
    return posix_memalign(&pointer, least, bytes) == 0 ? pointer : NULL;
}

static void release_aligned(void *user, void *pointer, size_t bytes)
{
    free(pointer);
}

static const tch_host_allocator default_allocator = {sizeof(tch_host_allocator), allocate_aligned, release_aligned,
                                                     NULL};
static tch_host_allocator current = {sizeof(tch_host_allocator), allocate_aligned, release_aligned, NULL};
static atomic_llong live_blocks;

void *tchi_host_allocate(size_t bytes, size_t alignment)
{
    void *pointer = current.allocate(current.user, bytes > 0 ? bytes : 1, alignment);
    if (pointer != NULL) {
        atomic_fetch_add(&live_blocks, 1);
    }
    return pointer;
}

void tchi_host_release(void *pointer, size_t bytes)
{
    if (pointer != NULL) {
        current.release(current.user, pointer, bytes > 0 ? bytes : 1);
        atomic_fetch_sub(&live_blocks, 1);
    }
}

tch_status tch_set_host_allocator(const tch_host_allocator *allocator)
{
    long long live = atomic_load(&live_blocks);
    if (live != 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_set_host_allocator: %lld blocks of the present allocator are still in use; destroy every "
                         "context and tensor first",
                         live);
    }
    if (allocator == NULL) {
        current = default_allocator;
        return TCH_OK;
    }
    if (allocator->struct_size != sizeof(tch_host_allocator)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_set_host_allocator: struct_size is %zu, this library expects %zu", allocator->struct_size,
                         sizeof(tch_host_allocator));
    }
    if (allocator->allocate == NULL || allocator->release == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_set_host_allocator: allocate and release must both be given");
    }
    current = *allocator;
    return TCH_OK;
}

/* Host memory for the whole library. All host allocations go through here, so that tests can make the k-th one fail and
 * count leaks. */
#ifndef TCHI_ALLOCATOR_H
#define TCHI_ALLOCATOR_H

#include <stddef.h>

/* NULL if out of memory. `alignment` is a power of two. */
void *tchi_host_allocate(size_t bytes, size_t alignment);

/* `bytes` as allocated. NULL is allowed. */
void tchi_host_release(void *pointer, size_t bytes);

#endif

/* Host memory for the whole library. Everything that allocates on the host goes through here, so that a test can make
 * the k-th allocation fail and count what is left at the end. */
#ifndef TCHI_ALLOCATOR_H
#define TCHI_ALLOCATOR_H

#include <stddef.h>

/* NULL when there is no memory. `alignment` is a power of two. */
void *tchi_host_allocate(size_t bytes, size_t alignment);

/* `bytes` as given to the allocation. NULL is allowed. */
void tchi_host_release(void *pointer, size_t bytes);

#endif

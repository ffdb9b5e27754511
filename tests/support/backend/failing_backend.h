/* The test's side of failing_backend.c: counts device allocations and makes them fail, like counting_allocator.h on the
 * host. */
#ifndef TORCHIUM_TESTS_FAILING_BACKEND_H
#define TORCHIUM_TESTS_FAILING_BACKEND_H

#include <stdbool.h>

/* Called before every allocation; true makes it fail. NULL: none fails. */
typedef void (*failing_backend_watch_function)(bool (*refuses)(void *user), void *user);
#define FAILING_BACKEND_WATCH "failing_backend_watch"

/* Blocks of device memory in use. */
typedef long long (*failing_backend_blocks_function)(void);
#define FAILING_BACKEND_BLOCKS "failing_backend_blocks"

#endif

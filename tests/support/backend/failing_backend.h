/* The test's end of failing_backend.c: a module that stands before the real one and lets its allocations of device
 * memory be counted and refused, as counting_allocator.h does for the host's. */
#ifndef TORCHIUM_TESTS_FAILING_BACKEND_H
#define TORCHIUM_TESTS_FAILING_BACKEND_H

#include <stdbool.h>

/* Asked before every allocation; true refuses it. NULL lets all pass. */
typedef void (*failing_backend_watch_function)(bool (*refuses)(void *user), void *user);
#define FAILING_BACKEND_WATCH "failing_backend_watch"

/* Blocks of device memory in use. */
typedef long long (*failing_backend_blocks_function)(void);
#define FAILING_BACKEND_BLOCKS "failing_backend_blocks"

#endif

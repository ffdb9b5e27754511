/* Intercepts the library's file operations and makes them fail: the program's definitions override libc's. */
#ifndef TORCHIUM_TESTS_WATCH_OPEN_H
#define TORCHIUM_TESTS_WATCH_OPEN_H

#include <stdbool.h>

/* The permissions of the last temporary checkpoint file when it was opened; -1 before the first. */
extern int test_opened_mode;

/* From the call with this number on, pwrite, fsync, renameat or close fails with EIO; 0: none. Returns whether the
 * previously requested one has failed. */
bool test_fail_file_call(int number);

/* Simulates per-machine locks of a network file system: every lock is granted. */
extern bool test_local_locks;

/* Called before a file is renamed; NULL: nothing. */
extern void (*test_before_rename)(const char *name);

#endif

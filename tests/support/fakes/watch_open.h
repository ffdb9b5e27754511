/* Sees what the library does to files, and lets it fail: these functions of the program are the library's too. */
#ifndef TORCHIUM_TESTS_WATCH_OPEN_H
#define TORCHIUM_TESTS_WATCH_OPEN_H

#include <stdbool.h>

/* The permissions that the latest temporary file of a checkpoint had when it was opened; -1 before the first. */
extern int test_opened_mode;

/* Of pwrite, fsync, renameat and close, the call of this number from now on fails with EIO; 0: none. Returns whether
 * the one that was asked for before has failed. */
bool test_fail_file_call(int number);

/* Locks of files are those of a network file system that keeps them on each machine: everybody gets them. */
extern bool test_local_locks;

/* Called before a file gets a name; NULL: nothing is. */
extern void (*test_before_rename)(const char *name);

#endif

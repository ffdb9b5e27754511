/* Sees temporary files of checkpoints the moment they appear: openat of this program is the library's too. */
#ifndef TORCHIUM_TESTS_WATCH_OPEN_H
#define TORCHIUM_TESTS_WATCH_OPEN_H

/* The permissions that the latest one had when it was opened; -1 before the first. */
extern int test_opened_mode;

#endif

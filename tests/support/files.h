/* Files for checkpoint tests: a temporary folder, and hand-written safetensors files, including invalid ones. */
#ifndef TORCHIUM_TESTS_FILES_H
#define TORCHIUM_TESTS_FILES_H

#include <stdint.h>

#include <torchium/checkpoint.h>

#define TEST_PATH_SIZE 768

/* Fixtures of cmocka: a fresh folder, removed with all its files. One at a time. */
int test_folder_make(void **state);
int test_folder_remove(void **state);
#define TEST_IN_FOLDER(test) TEST_WITH(test, test_folder_make, test_folder_remove)

/* The same, with *state a context on the device under test. */
int test_open_context_and_folder(void **state);
int test_close_context_and_folder(void **state);

/* "FOLDER/name", in the test's memory. */
const char *test_path(const char *name);

/* The number of temporary checkpoint files in the folder. */
int test_leftover_count(void);

void test_file_write(const char *path, const void *bytes, int64_t count);

/* Sets the modification time two hours back; of a link itself, not of its target. */
void test_file_make_old(const char *path);

char *test_file_read(const char *path, int64_t *count);

/* The length of the header, the header, then `data_bytes` bytes 0, 1, 2, ... `length` replaces the header's length
 * unless it is -1. */
void test_safetensors_write(const char *path, const char *header, int64_t length, int64_t data_bytes);

/* An empty writer and an open checkpoint, released after the test; and the file of a writer. */
tch_checkpoint_writer *test_checkpoint_writer(void);
void test_checkpoint_save(tch_checkpoint_writer *writer, tch_context *context, const char *path);

tch_checkpoint *test_checkpoint_open(const char *path);

/* A copy of a checkpoint with one change, and matching checksums: a setting, or an 8-byte element of a tensor, counted
 * from the first or, if `index` < 0, from the end. A setting whose text is NULL is omitted. */
void test_checkpoint_set_text(const char *from, const char *to, const char *key, const char *text);
void test_checkpoint_set_element(const char *from, const char *to, const char *tensor, int64_t index,
                                 const void *element);

#endif

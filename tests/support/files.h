/* Files for the tests of checkpoints: a folder of one's own that disappears again, and safetensors files written by
 * hand, so that a test can write what no library would. */
#ifndef TORCHIUM_TESTS_FILES_H
#define TORCHIUM_TESTS_FILES_H

#include <stdint.h>

#include <torchium/checkpoint.h>

#define TEST_PATH_SIZE 768

/* Fixtures of cmocka: a fresh folder, removed with all its files. One at a time. */
int test_folder_make(void **state);
int test_folder_remove(void **state);
#define TEST_IN_FOLDER(test) TEST_WITH(test, test_folder_make, test_folder_remove)

/* The same with a context on the device under test, which *state is. */
int test_open_context_and_folder(void **state);
int test_close_context_and_folder(void **state);

/* "FOLDER/name", in memory of the test. */
const char *test_path(const char *name);

/* How many temporary files of a checkpoint's writer the folder has. */
int test_leftover_count(void);

void test_file_write(const char *path, const void *bytes, int64_t count);

/* As if nothing had been written to it for two hours; a link itself, not what it points to. */
void test_file_make_old(const char *path);

/* All bytes of a file. */
char *test_file_read(const char *path, int64_t *count);

/* The length of the header, the header, then `data_bytes` bytes that count from 0 up. `length` is what stands before
 * the header, -1 for the true one. */
void test_safetensors_write(const char *path, const char *header, int64_t length, int64_t data_bytes);

/* An empty writer; and the file of one, which is destroyed when it is saved. */
tch_checkpoint_writer *test_checkpoint_writer(void);
void test_checkpoint_save(tch_checkpoint_writer *writer, tch_context *context, const char *path);

tch_checkpoint *test_checkpoint_open(const char *path);

/* A copy of a checkpoint with one thing changed, and checksums to match: a setting, or an element of 8 bytes of a
 * tensor, counted from the first on or, where `index` is below 0, from the end. A setting whose text is NULL is left
 * out. */
void test_checkpoint_set_text(const char *from, const char *to, const char *key, const char *text);
void test_checkpoint_set_element(const char *from, const char *to, const char *tensor, int64_t index,
                                 const void *element);

#endif

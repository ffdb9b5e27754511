#include "files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "testing.h"

static char folder[TEST_PATH_SIZE / 2];

int test_folder_make(void **state)
{
    const char *place = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/torchium-test-XXXXXX", place != NULL && place[0] != '\0' ? place : "/tmp");
    return mkdtemp(folder) == NULL ? -1 : 0;
}

static int visit(int (*each)(const char *path))
{
    char path[TEST_PATH_SIZE];
    int count = 0;
    DIR *entries = opendir(folder);
    if (entries == NULL) {
        return 0;
    }
    for (const struct dirent *entry = readdir(entries); entry != NULL; entry = readdir(entries)) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) {
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            count += each(path);
        }
    }
    closedir(entries);
    return count;
}

static int is_leftover(const char *path)
{
    return strstr(path, "/.torchium-") != NULL;
}

int test_leftover_count(void)
{
    return visit(is_leftover);
}

int test_folder_remove(void **state)
{
    test_release(state);
    chmod(folder, S_IRWXU);
    visit(remove);
    return rmdir(folder);
}

int test_open_context_and_folder(void **state)
{
    return test_folder_make(state) == 0 ? test_open_context(state) : -1;
}

int test_close_context_and_folder(void **state)
{
    int closed = test_close_context(state);
    return test_folder_remove(state) == 0 ? closed : -1;
}

const char *test_path(const char *name)
{
    char *path = test_alloc(TEST_PATH_SIZE);
    snprintf(path, TEST_PATH_SIZE, "%s/%s", folder, name);
    return path;
}

void test_file_write(const char *path, const void *bytes, int64_t count)
{
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL, "the test cannot write %s", path);
    size_t written = count > 0 ? fwrite(bytes, 1, (size_t)count, file) : 0;
    int closed = fclose(file);
    CHECK(closed == 0 && (int64_t)written == count, "the test cannot write %s", path);
}

void test_file_make_old(const char *path)
{
    struct timespec times[2];
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[0].tv_sec -= 7200;
    times[1] = times[0];
    CHECK(utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW) == 0, "the test cannot change a time");
}

char *test_file_read(const char *path, int64_t *count)
{
    struct stat status;
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL && fstat(fileno(file), &status) == 0, "the test cannot read %s", path);
    *count = status.st_size;
    char *bytes = test_alloc((size_t)status.st_size);
    size_t got = fread(bytes, 1, (size_t)status.st_size, file);
    fclose(file);
    CHECK((int64_t)got == *count, "the test cannot read %s", path);
    return bytes;
}

void test_safetensors_write(const char *path, const char *header, int64_t length, int64_t data_bytes)
{
    size_t text = strlen(header);
    uint64_t stated = length < 0 ? text : (uint64_t)length;
    unsigned char *bytes = test_alloc(8 + text + (size_t)data_bytes);
    for (int i = 0; i < 8; i++) {
        bytes[i] = (unsigned char)(stated >> (8 * i));
    }
    memcpy(bytes + 8, header, text);
    for (int64_t i = 0; i < data_bytes; i++) {
        bytes[8 + (int64_t)text + i] = (unsigned char)i;
    }
    test_file_write(path, bytes, 8 + (int64_t)text + data_bytes);
    test_drop(bytes);
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

static void destroy_writer(void *writer)
{
    tch_checkpoint_writer_destroy(writer);
}

static void close_checkpoint(void *checkpoint)
{
    tch_checkpoint_close(checkpoint);
}

tch_checkpoint_writer *test_checkpoint_writer(void)
{
    tch_checkpoint_writer *writer = NULL;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    test_own(writer, destroy_writer);
    return writer;
}

void test_checkpoint_save(tch_checkpoint_writer *writer, tch_context *context, const char *path)
{
    CHECK_OK(tch_checkpoint_writer_save(writer, context, path));
}

tch_checkpoint *test_checkpoint_open(const char *path)
{
    tch_checkpoint *checkpoint = NULL;
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    test_own(checkpoint, close_checkpoint);
    return checkpoint;
}

/* --- checkpoints with one thing changed -------------------------------------------------------------------------- */

static void copy_settings(const tch_checkpoint *from, tch_checkpoint_writer *to, const char *without)
{
    for (int64_t i = 0; i < tch_checkpoint_key_count(from); i++) {
        const char *key = tch_checkpoint_key(from, i);
        bool kept = without == NULL || strcmp(key, without) != 0;
        if (kept && strcmp(key, "format") != 0 && strncmp(key, "torchium.", 9) != 0) {
            CHECK_OK(tch_checkpoint_writer_set_text(to, key, tch_checkpoint_text(from, key)));
        }
    }
}

/* Replaces the tensor of that name by `other`. */
static void copy_tensors(const tch_checkpoint *from, tch_checkpoint_writer *to, const char *name,
                         const tch_tensor *other)
{
    for (int64_t i = 0; i < tch_checkpoint_count(from); i++) {
        tch_tensor view;
        const char *here = tch_checkpoint_name(from, i);
        CHECK_OK(tch_checkpoint_view(from, here, &view));
        bool changed = name != NULL && strcmp(here, name) == 0;
        CHECK_OK(tch_checkpoint_writer_add(to, here, changed ? other : &view));
    }
}

void test_checkpoint_set_text(const char *from, const char *to, const char *key, const char *text)
{
    size_t mark = test_mark();
    tch_checkpoint *file = test_checkpoint_open(from);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK(tch_checkpoint_text(file, key) != NULL, "%s has no setting %s to change", from, key);
    copy_settings(file, writer, key);
    copy_tensors(file, writer, NULL, NULL);
    if (text != NULL) {
        CHECK_OK(tch_checkpoint_writer_set_text(writer, key, text));
    }
    test_checkpoint_save(writer, NULL, to);
    test_release_since(mark);
}

void test_checkpoint_set_element(const char *from, const char *to, const char *tensor, int64_t index,
                                 const void *element)
{
    tch_tensor other;
    size_t mark = test_mark();
    tch_checkpoint *file = test_checkpoint_open(from);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_view(file, tensor, &other));
    int64_t count = tch_tensor_numel(&other);
    index = index < 0 ? count + index : index;
    CHECK(tch_dtype_size(other.dtype) == 8 && index < count, "%s has no such element", tensor);
    char *elements = test_alloc((size_t)count * 8);
    memcpy(elements, other.data, (size_t)count * 8);
    memcpy(elements + 8 * index, element, 8);
    other.data = elements;
    copy_settings(file, writer, NULL);
    copy_tensors(file, writer, tensor, &other);
    test_checkpoint_save(writer, NULL, to);
    test_release_since(mark);
}

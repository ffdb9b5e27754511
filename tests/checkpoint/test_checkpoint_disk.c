/* Disks that do not do as they should, and two who want the same file. The first in a process with a file system of its
 * own, small and then read-only, which only root can have; elsewhere they are skipped, and test_checkpoint_faults.c has
 * the limit on the size of files and folders without permission. */
#define _GNU_SOURCE
#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/files.h"
#include "support/testing.h"

#define SIZE 5000 /* int64: more than half of the small disk, so that a second file does not fit beside the first */
#define DISK "size=64k"
#define CANNOT 2 /* exit status of a child that may not mount */

static int64_t values[SIZE];
static int64_t size = SIZE;

/* Every element of version v is v. */
static tch_status save(const char *path, int64_t version)
{
    tch_checkpoint_writer *writer = NULL;
    tch_tensor t = tch_tensor_view(values, TCH_INT64, 1, &size);
    for (int i = 0; i < SIZE; i++) {
        values[i] = version;
    }
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : tch_checkpoint_writer_add(writer, "t", &t);
    if (status == TCH_OK) {
        size_t length = strlen(path);
        bool index = length > 5 && strcmp(path + length - 5, ".json") == 0;
        status = index ? tch_checkpoint_writer_save_sharded(writer, NULL, NULL, path)
                       : tch_checkpoint_writer_save(writer, NULL, path);
    }
    tch_checkpoint_writer_destroy(writer);
    return status;
}

/* The version that is there, whole; -1 where it cannot be read. */
static int64_t version_of(const char *path)
{
    static int64_t got[SIZE];
    tch_checkpoint *checkpoint = NULL;
    tch_tensor out = tch_tensor_view(got, TCH_INT64, 1, &size);
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    status = status != TCH_OK ? status : tch_checkpoint_read(checkpoint, NULL, "t", &out);
    tch_checkpoint_close(checkpoint);
    for (int i = 1; i < SIZE && status == TCH_OK; i++) {
        status = got[i] == got[0] ? TCH_OK : TCH_ERR_INTERNAL;
    }
    return status == TCH_OK ? got[0] : -1;
}

static int count_files(const char *folder)
{
    int count = 0;
    DIR *entries = opendir(folder);
    for (const struct dirent *e = entries == NULL ? NULL : readdir(entries); e != NULL; e = readdir(entries)) {
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    }
    if (entries != NULL) {
        closedir(entries);
    }
    return count;
}

#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, tch_last_error());             \
            _exit(1);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* --- in a process with a disk of its own ------------------------------------------------------------------------- */

static void mount_small(const char *folder)
{
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("tmpfs", folder, "tmpfs", 0, DISK) != 0) {
        _exit(CANNOT);
    }
}

/* One version fits and two do not: the first stays, whole, nothing else is left, and where there is room again the next
 * save succeeds. */
static void on_a_full_disk(const char *folder, const char *name)
{
    char path[TEST_PATH_SIZE];
    mount_small(folder);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    EXPECT(save(path, 1) == TCH_OK);
    int files = count_files(folder);
    for (int i = 0; i < 3; i++) {
        EXPECT(save(path, 2) == TCH_ERR_IO && strstr(tch_last_error(), "No space left on device") != NULL);
        EXPECT(version_of(path) == 1 && count_files(folder) == files);
    }
    EXPECT(mount(NULL, folder, NULL, MS_REMOUNT, "size=1m") == 0);
    EXPECT(save(path, 3) == TCH_OK && version_of(path) == 3 && count_files(folder) == files);
}

static void on_a_read_only_disk(const char *folder, const char *name)
{
    char path[TEST_PATH_SIZE];
    mount_small(folder);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    EXPECT(save(path, 1) == TCH_OK);
    EXPECT(mount(NULL, folder, NULL, MS_REMOUNT | MS_RDONLY, NULL) == 0);
    EXPECT(save(path, 2) == TCH_ERR_IO && strstr(tch_last_error(), "Read-only file system") != NULL);
    EXPECT(version_of(path) == 1);
}

static void check_on_a_disk(void (*what)(const char *folder, const char *name), const char *name)
{
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        what(test_path("."), name);
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == CANNOT) {
        skip();
    }
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "see above");
}

static void a_full_disk(void **state)
{
    (void)state;
    check_on_a_disk(on_a_full_disk, "one.safetensors");
}

static void a_full_disk_and_an_index(void **state)
{
    (void)state;
    check_on_a_disk(on_a_full_disk, "x.safetensors.index.json");
}

static void a_read_only_disk(void **state)
{
    (void)state;
    check_on_a_disk(on_a_read_only_disk, "one.safetensors");
}

/* --- two writers ------------------------------------------------------------------------------------------------- */

enum { WRITERS = 2, SAVES = 40 };

static pid_t start_writer(const char *path, int number)
{
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < SAVES; i++) {
            EXPECT(save(path, 1000 * (number + 1) + i) == TCH_OK);
        }
        _exit(0);
    }
    return child;
}

/* Whoever reads meanwhile always finds a whole version of one or the other, and in the end it is one's last, without
 * files of others beside it. */
static void check_two_writers(const char *name, int files)
{
    char path[TEST_PATH_SIZE];
    snprintf(path, sizeof path, "%s", test_path(name));
    int before = count_files(test_path(""));
    pid_t writers[WRITERS];
    int running = WRITERS;
    int reads = 0;
    CHECK_OK(save(path, 1));
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = start_writer(path, i);
        CHECK(writers[i] > 0, "the test cannot fork");
    }
    while (running > 0) {
        CHECK(version_of(path) >= 1, "what is there cannot be read, or is of two versions: %s", tch_last_error());
        reads++;
        int status = 0;
        while (running > 0 && waitpid(-1, &status, WNOHANG) > 0) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a writer failed");
            running--;
        }
    }
    int64_t last = version_of(path);
    CHECK(last % 1000 == SAVES - 1 && reads > 1, "version %lld is there after %d reads", (long long)last, reads);
    CHECK(count_files(test_path("")) - before == files, "%d files are left", count_files(test_path("")) - before);
}

static void two_writers(void **state)
{
    (void)state;
    check_two_writers("shared", 1);
}

static void two_writers_of_an_index(void **state)
{
    (void)state;
    check_two_writers("shared.safetensors.index.json", 2);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_full_disk), cmocka_unit_test(a_full_disk_and_an_index),
                                       cmocka_unit_test(a_read_only_disk), cmocka_unit_test(two_writers),
                                       cmocka_unit_test(two_writers_of_an_index)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_folder_make, test_folder_remove);
}

/* Checkpoint errors: arguments, memory, disk, path. In every case the old file survives, no temporary file remains, and
 * the writer can save once the fault is gone. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/fakes/counting_allocator.h"
#include "support/fakes/watch_open.h"
#include "support/files.h"
#include "support/messages.h"
#include "support/testing.h"

#define NOBODY 65534

static int install(void **state)
{
    return test_counting_install(state) == 0 ? test_folder_make(state) : -1;
}

static int uninstall(void **state)
{
    return test_counting_remove(state) == 0 ? test_folder_remove(state) : -1;
}

static void check_nothing_left(void)
{
    test_counting_check_empty();
    CHECK(test_leftover_count() == 0, "a temporary file is left");
}

/* A few tensors, one non-contiguous so that a buffer is allocated, and settings. */
static float values[600];
static int64_t shape[] = {30, 20};
static int64_t strides[] = {1, 30};

static tch_status fill_writer(tch_checkpoint_writer *writer, const char *mark)
{
    tch_tensor plain = tch_tensor_view(values, TCH_FLOAT32, 2, shape);
    tch_tensor strided = plain;
    strided.strides = strides;
    tch_status status = tch_checkpoint_writer_add(writer, "plain", &plain);
    status = status != TCH_OK ? status : tch_checkpoint_writer_add(writer, "strided", &strided);
    status = status != TCH_OK ? status : tch_checkpoint_writer_set_text(writer, "mark", mark);
    return status != TCH_OK ? status : tch_checkpoint_writer_set_text(writer, "mark", mark);
}

static tch_status save(const char *path, const char *mark)
{
    tch_checkpoint_writer *writer = NULL;
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : fill_writer(writer, mark);
    status = status != TCH_OK ? status : tch_checkpoint_writer_save(writer, NULL, path);
    tch_checkpoint_writer_destroy(writer);
    return status;
}

static tch_status load(const char *path, const char *mark)
{
    static float got[600];
    tch_checkpoint *checkpoint = NULL;
    tch_tensor out = tch_tensor_view(got, TCH_FLOAT32, 2, shape);
    out.strides = strides;
    tch_status status = tch_checkpoint_open(path, &checkpoint);
    status = status != TCH_OK ? status : tch_checkpoint_read(checkpoint, NULL, "strided", &out);
    if (status == TCH_OK) {
        CHECK(memcmp(got, values, sizeof got) == 0, "the elements differ");
        CHECK(strcmp(tch_checkpoint_text(checkpoint, "mark"), mark) == 0, "another file is there");
    }
    tch_checkpoint_close(checkpoint);
    return status;
}

/* A call on a path that contains "old" unless the call succeeds. */
typedef struct file_call {
    tch_status (*call)(const char *path, const char *mark);
    const char *path, *mark;
} file_call;

static tch_status call_with_less_memory(void *user)
{
    const file_call *c = user;
    tch_clear_error();
    tch_status status = c->call(c->path, c->mark);
    CHECK(status == TCH_OK || strstr(tch_last_error(), "out of host memory") != NULL, "said %s", tch_last_error());
    return status;
}

static void check_file(void *user, bool through)
{
    const file_call *c = user;
    check_nothing_left();
    CHECK_OK(load(c->path, through ? c->mark : "old"));
}

static void fail_each_allocation(tch_status (*call)(const char *path, const char *mark), const char *path,
                                 const char *mark)
{
    file_call c = {call, path, mark};
    test_fail_each_allocation(path, call_with_less_memory, check_file, &c);
}

TEST(no_memory)
{
    const char *path = test_path("memory");
    CHECK_OK(save(path, "old"));
    fail_each_allocation(load, path, "old");
    fail_each_allocation(save, path, "new");
}

/* More names than the initial table and list hold: growing fails too. */
static tch_status save_many(const char *path, const char *mark)
{
    tch_checkpoint_writer *writer = NULL;
    char name[16];
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : fill_writer(writer, mark);
    for (int i = 0; i < 40 && status == TCH_OK; i++) {
        tch_tensor t = tch_tensor_view(&values[i], TCH_FLOAT32, 0, NULL);
        snprintf(name, sizeof name, "%d", i);
        status = tch_checkpoint_writer_add(writer, name, &t);
        status = status != TCH_OK ? status : tch_checkpoint_writer_set_integer(writer, name, i);
    }
    status = status != TCH_OK ? status : tch_checkpoint_writer_save(writer, NULL, path);
    tch_checkpoint_writer_destroy(writer);
    return status;
}

TEST(no_memory_to_grow)
{
    const char *path = test_path("grow");
    CHECK_OK(save(path, "old"));
    fail_each_allocation(save_many, path, "old");
    fail_each_allocation(load, path, "old");
}

/* A tensor that failed for lack of memory can be added later, and was not added partially. */
TEST(a_writer_survives_want_of_memory)
{
    tch_checkpoint *checkpoint = NULL;
    tch_tensor t = tch_tensor_view(values, TCH_FLOAT32, 2, shape);
    const char *path = test_path("survivor");
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    for (long long k = 1; k <= 3; k++) {
        counting_allocator_arm(&test_counting, k);
        CHECK(tch_checkpoint_writer_add(writer, "t", &t) == TCH_ERR_OUT_OF_MEMORY, "allocation %lld", k);
        counting_allocator_arm(&test_counting, k);
        CHECK(tch_checkpoint_writer_set_number(writer, "k", 1.0) == TCH_ERR_OUT_OF_MEMORY, "allocation %lld", k);
        counting_allocator_arm(&test_counting, 0);
        CHECK_OK(tch_checkpoint_writer_save(writer, NULL, path));
        CHECK_OK(tch_checkpoint_open(path, &checkpoint));
        CHECK(tch_checkpoint_count(checkpoint) == 0 && tch_checkpoint_text(checkpoint, "k") == NULL, "half there");
        tch_checkpoint_close(checkpoint);
    }
    CHECK_OK(tch_checkpoint_writer_add(writer, "t", &t));
    tch_checkpoint_writer_destroy(test_keep(writer));
    check_nothing_left();
}

/* A full disk after every number of bytes, simulated by a file size limit. */
TEST(a_full_disk)
{
    struct rlimit limit;
    struct rlimit small;
    const char *path = test_path("full");
    CHECK_OK(save(path, "old"));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    void (*before)(int) = signal(SIGXFSZ, SIG_IGN);
    for (rlim_t bytes = 0; bytes < 5000; bytes += 311) {
        test_case("room for %d bytes", (int)bytes);
        small = limit;
        small.rlim_cur = bytes;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        tch_status status = save(path, "new");
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        CHECK(status == TCH_ERR_IO && strstr(tch_last_error(), "File too large") != NULL, "gave %s (%s)",
              tch_status_name(status), tch_last_error());
        check_nothing_left();
        CHECK_OK(load(path, "old"));
    }
    signal(SIGXFSZ, before);
    CHECK_OK(save(path, "new"));
    CHECK_OK(load(path, "new"));
}

static void check_not_saved(const char *path, const char *message)
{
    test_case("%s", path);
    tch_status status = save(path, "new");
    CHECK(status == TCH_ERR_IO && strstr(tch_last_error(), message) != NULL, "gave %s (%s), expected \"%s\"",
          tch_status_name(status), tch_last_error(), message);
    CHECK(path[0] == '\0' || strstr(tch_last_error(), path) != NULL, "the message does not have the path");
    check_nothing_left();
}

TEST(paths_that_cannot_be_written)
{
    static char longest[5000];
    char long_name[400];
    check_not_saved(test_path("absent/file"), "No such file or directory");
    check_not_saved(test_path(""), "names no file");
    check_not_saved(test_path("."), "Is a directory");
    check_not_saved("", "names no file");
    check_not_saved("/dev/full", "it is a device");
    check_not_saved("/proc/torchium", "no file can be created");
    CHECK_OK(save(test_path("file"), "old"));
    check_not_saved(test_path("file/below"), "Not a directory");
    assert_int_equal(mkfifo(test_path("pipe"), 0600), 0);
    check_not_saved(test_path("pipe"), "a pipe");
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = '\0';
    check_not_saved(test_path(long_name), "File name too long");
    memset(longest, '/', sizeof longest - 2);
    longest[sizeof longest - 2] = 'x';
    tch_status status = save(longest, "new");
    CHECK(status == TCH_ERR_IO && strstr(tch_last_error(), "too long") != NULL, "gave %s", tch_status_name(status));
    CHECK_OK(load(test_path("file"), "old"));
}

/* In a child process, since root must drop its privileges first. */
TEST(a_folder_without_permission)
{
    const char *path = test_path("guarded");
    CHECK_OK(save(path, "old"));
    assert_int_equal(chmod(test_path("."), 0555), 0);
    pid_t child = fork();
    if (child == 0) {
        bool changed = geteuid() != 0 || (setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
        bool refused = save(path, "new") == TCH_ERR_IO && strstr(tch_last_error(), "Permission denied") != NULL;
        _exit(changed && refused ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    assert_int_equal(chmod(test_path("."), 0700), 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it was not refused as it should be");
    CHECK_OK(load(path, "old"));
    check_nothing_left();
}

/* Each system call fails once: an error leaves the old file or, after the rename, the new one. */
TEST(every_call_fails_once)
{
    const char *path = test_path("calls");
    bool failed = true;
    int errors = 0;
    for (int k = 1; failed; k++) {
        test_case("call %d", k);
        CHECK_OK(save(path, "old"));
        test_fail_file_call(k);
        tch_status status = save(path, "new");
        failed = test_fail_file_call(0);
        CHECK(status == TCH_OK || (failed && status == TCH_ERR_IO), "gave %s", tch_status_name(status));
        check_nothing_left();
        bool named = status == TCH_OK || strstr(tch_last_error(), "the file is complete") != NULL;
        CHECK_OK(load(path, named ? "new" : "old"));
        errors += status != TCH_OK;
    }
    CHECK(errors >= 5, "%d calls failed: not two writes, two of fsync and a rename", errors);
}

/* Only files with a leftover's name and the library's format that are old and unlocked are removed. */
TEST(leftovers_are_told_from_other_files)
{
    static const char *const kept[] = {".torchium-0123456789abcde.part", ".torchium-0123456789abcdeg.part",
                                       ".torchium-0123456789abcdef.part~", "torchium-0123456789abcdef.part"};
    const char *leftover = test_path(".torchium-0123456789abcdef.part");
    for (int i = 0; i < 4; i++) {
        test_file_write(test_path(kept[i]), "x", 1);
        test_file_make_old(test_path(kept[i]));
    }
    test_file_write(leftover, "x", 1);
    CHECK_OK(save(test_path("clean"), "new"));
    CHECK(access(leftover, F_OK) == 0, "a file that may be written on another machine was removed");
    test_file_make_old(leftover);
    if (geteuid() == 0) {
        CHECK(chown(leftover, NOBODY, NOBODY) == 0, "the test cannot give its file away");
        CHECK_OK(save(test_path("clean"), "new"));
        CHECK(access(leftover, F_OK) == 0 && chown(leftover, 0, 0) == 0, "the file of another user was removed");
    }
    int held = open(leftover, O_WRONLY);
    CHECK(held >= 0 && flock(held, LOCK_EX) == 0, "the test cannot lock its file");
    CHECK_OK(save(test_path("clean"), "new"));
    CHECK(access(leftover, F_OK) == 0, "the file of a living writer was removed");
    close(held);
    CHECK_OK(save(test_path("clean"), "new"));
    CHECK(access(leftover, F_OK) != 0, "the leftover is still there");
    assert_int_equal(symlink(kept[0], leftover), 0);
    test_file_make_old(leftover);
    CHECK_OK(save(test_path("clean"), "new"));
    CHECK(access(leftover, F_OK) == 0, "a link was removed");
    for (int i = 0; i < 4; i++) {
        CHECK(access(test_path(kept[i]), F_OK) == 0, "%s was removed", kept[i]);
        CHECK(unlink(test_path(kept[i])) == 0, "the test cannot clean up");
    }
    CHECK(unlink(leftover) == 0, "the test cannot clean up");
    check_nothing_left();
}

TEST(a_link_is_replaced)
{
    struct stat status;
    CHECK_OK(save(test_path("target"), "old"));
    assert_int_equal(symlink("target", test_path("link")), 0);
    CHECK_OK(save(test_path("link"), "new"));
    assert_int_equal(lstat(test_path("link"), &status), 0);
    assert_true(S_ISREG(status.st_mode));
    CHECK_OK(load(test_path("target"), "old"));
    CHECK_OK(load(test_path("link"), "new"));
}

/* --- permissions ------------------------------------------------------------------------------------------------ */

static int mode_of(const char *path)
{
    struct stat status;
    CHECK(stat(path, &status) == 0, "%s is not there", path);
    return status.st_mode & 0777;
}

/* The temporary file never has more permissions than the final one: whoever opened it would read all later data. */
TEST(nobody_sees_a_file_before_it_is_whole)
{
    static const mode_t modes[] = {0600, 0400, 0640, 0644, 0666};
    const char *path = test_path("private");
    mode_t before = umask(027);
    test_case("a new file");
    CHECK_OK(save(path, "old"));
    umask(0);
    CHECK(test_opened_mode == 0640 && mode_of(path) == 0640, "opened with %o, then %o", test_opened_mode,
          mode_of(path));
    for (int i = 0; i < 5; i++) {
        test_case("a file of %o", modes[i]);
        assert_int_equal(chmod(path, modes[i]), 0);
        CHECK_OK(save(path, "new"));
        CHECK(test_opened_mode == 0600, "opened with %o", test_opened_mode);
        CHECK(mode_of(path) == (int)modes[i], "became %o", mode_of(path));
    }
    umask(before);
    check_nothing_left();
}

/* As NOBODY, without supplementary groups. */
static bool save_as_nobody(const char *path)
{
    pid_t child = fork();
    if (child == 0) {
        bool changed = setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0;
        _exit(changed && save(path, "new") == TCH_OK ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* Group permissions are not passed to another group. Only root can test it. */
TEST(groups_are_kept_or_closed)
{
    enum { GROUP = 54321 };
    static const int modes[][2] = {{0640, 0600}, {0664, 0644}, {0660, 0600}, {0666, 0666}, {0604, 0604}};
    const char *path = test_path("group");
    struct stat status;
    if (geteuid() != 0) {
        skip();
    }
    CHECK_OK(save(path, "old"));
    CHECK(chown(path, NOBODY, GROUP) == 0 && chmod(path, 0640) == 0, "the test cannot give its file away");
    CHECK_OK(save(path, "new"));
    CHECK(stat(path, &status) == 0 && status.st_gid == GROUP && mode_of(path) == 0640, "of group %d, with %o",
          (int)status.st_gid, mode_of(path));
    assert_int_equal(chmod(test_path("."), 0777), 0);
    for (int i = 0; i < 5; i++) {
        test_case("%o of a group that is not ours", modes[i][0]);
        CHECK(chown(path, NOBODY, GROUP) == 0 && chmod(path, (mode_t)modes[i][0]) == 0, "the test cannot prepare");
        CHECK(save_as_nobody(path), "it was not saved");
        CHECK(stat(path, &status) == 0 && status.st_gid == NOBODY, "the group is %d", (int)status.st_gid);
        CHECK(mode_of(path) == modes[i][1], "became %o, expected %o", mode_of(path), modes[i][1]);
    }
    assert_int_equal(chmod(test_path("."), 0700), 0);
    check_nothing_left();
}

/* --- arguments -------------------------------------------------------------------------------------------------- */

TEST(bad_arguments_of_writers)
{
    tch_checkpoint_writer *writer = NULL;
    tch_tensor t = tch_tensor_view(values, TCH_FLOAT32, 2, shape);
    tch_tensor odd = t;
    tch_tensor far = t;
    odd.dtype = (tch_dtype){TCH_UINT, 8, 1};
    far.device = (tch_device){TCH_DEVICE_CUDA, 0};
    test_check_refused(tch_checkpoint_writer_create(NULL), TCH_ERR_INVALID_ARGUMENT, "writer");
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_checkpoint_writer_add(writer, "t", &t));
    test_check_refused(tch_checkpoint_writer_add(NULL, "u", &t), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_check_refused(tch_checkpoint_writer_add(writer, NULL, &t), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_writer_add(writer, "u", NULL), TCH_ERR_INVALID_ARGUMENT, "tensor");
    test_check_refused(tch_checkpoint_writer_add(writer, "t", &t), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_writer_add(writer, "", &t), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_writer_add(writer, "__metadata__", &t), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_writer_add(writer, "\xc3(", &t), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_writer_add(writer, "u", &odd), TCH_ERR_DTYPE, "tensor");
    test_check_refused(tch_checkpoint_writer_set_text(NULL, "k", "v"), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_check_refused(tch_checkpoint_writer_set_text(writer, NULL, "v"), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_writer_set_text(writer, "", "v"), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_writer_set_text(writer, "k", NULL), TCH_ERR_INVALID_ARGUMENT, "value");
    test_check_refused(tch_checkpoint_writer_set_text(writer, "k", "\xff"), TCH_ERR_INVALID_ARGUMENT, "value");
    test_check_refused(tch_checkpoint_writer_set_text(writer, "format", "v"), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_writer_set_number(writer, "torchium.x", 1), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_writer_set_integer(NULL, "k", 1), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_check_refused(tch_checkpoint_writer_save(NULL, NULL, "p"), TCH_ERR_INVALID_ARGUMENT, "writer");
    test_check_refused(tch_checkpoint_writer_save(writer, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "path");
    CHECK_OK(tch_checkpoint_writer_add(writer, "far", &far));
    test_check_refused(tch_checkpoint_writer_save(writer, NULL, test_path("p")), TCH_ERR_DEVICE, "context");
    CHECK(access(test_path("p"), F_OK) != 0, "something was written");
    tch_checkpoint_writer_destroy(writer);
    check_nothing_left();
}

/* Expanded tensors can describe more bytes than files can have. */
TEST(too_many_bytes)
{
    int64_t size = (int64_t)1 << 60;
    int64_t stride = 0;
    tch_tensor t = tch_tensor_view(values, TCH_FLOAT32, 1, &size);
    t.strides = &stride;
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, "a", &t));
    test_check_refused(tch_checkpoint_writer_add(writer, "b", &t), TCH_ERR_SHAPE, "tensor");
}

TEST(bad_arguments_of_readers)
{
    tch_checkpoint *c = NULL;
    double number = 7.0;
    int64_t integer = 7;
    tch_tensor view;
    tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
    CHECK_OK(save(test_path("arguments"), "1.5"));
    test_check_refused(tch_checkpoint_open(NULL, &c), TCH_ERR_INVALID_ARGUMENT, "path");
    test_check_refused(tch_checkpoint_open("x", NULL), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    CHECK_OK(tch_checkpoint_open(test_path("arguments"), &c));
    test_check_refused(tch_checkpoint_view(NULL, "plain", &view), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    test_check_refused(tch_checkpoint_view(c, NULL, &view), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_view(c, "plain", NULL), TCH_ERR_INVALID_ARGUMENT, "view");
    test_check_refused(tch_checkpoint_view(c, "absent", &view), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_get_info(NULL, 0, &info), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    test_check_refused(tch_checkpoint_get_info(c, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "info");
    test_check_refused(tch_checkpoint_get_info(c, 2, &info), TCH_ERR_INVALID_ARGUMENT, "index");
    test_check_refused(tch_checkpoint_get_info(c, -1, &info), TCH_ERR_INVALID_ARGUMENT, "index");
    info.struct_size = 8;
    test_check_refused(tch_checkpoint_get_info(c, 0, &info), TCH_ERR_INVALID_ARGUMENT, "info");
    test_check_refused(tch_checkpoint_number(NULL, "mark", &number), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    test_check_refused(tch_checkpoint_number(c, NULL, &number), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_number(c, "mark", NULL), TCH_ERR_INVALID_ARGUMENT, "value");
    test_check_refused(tch_checkpoint_number(c, "absent", &number), TCH_ERR_INVALID_ARGUMENT, "key");
    test_check_refused(tch_checkpoint_number(c, "format", &number), TCH_ERR_IO, "key");
    test_check_refused(tch_checkpoint_integer(c, "mark", &integer), TCH_ERR_IO, "key");
    CHECK(number == 7.0 && integer == 7, "written in spite of an error");
    CHECK(tch_checkpoint_count(NULL) == 0 && tch_checkpoint_key_count(NULL) == 0, "NULL has tensors");
    CHECK(tch_checkpoint_find(c, NULL) == -1 && tch_checkpoint_text(c, NULL) == NULL, "NULL is a name");
    tch_checkpoint_close(c);
}

TEST(tensors_that_do_not_fit)
{
    float got[600] = {0};
    int64_t other[] = {20, 30};
    int64_t zeros[] = {0, 1};
    CHECK_OK(save(test_path("fit"), "old"));
    tch_checkpoint *c = test_checkpoint_open(test_path("fit"));
    tch_tensor wrong = tch_tensor_view(got, TCH_FLOAT32, 2, other);
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", &wrong), TCH_ERR_SHAPE, "out");
    wrong = tch_tensor_view(got, TCH_INT32, 2, shape);
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", &wrong), TCH_ERR_DTYPE, "out");
    wrong = tch_tensor_view(got, TCH_FLOAT32, 2, shape);
    wrong.strides = zeros;
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", &wrong), TCH_ERR_LAYOUT, "out");
    wrong = tch_tensor_view(got, TCH_FLOAT32, 2, shape);
    wrong.device = (tch_device){TCH_DEVICE_CUDA, 0};
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", &wrong), TCH_ERR_DEVICE, "out");
    wrong = tch_tensor_view(NULL, TCH_FLOAT32, 2, shape);
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", &wrong), TCH_ERR_INVALID_ARGUMENT, "out");
    test_check_refused(tch_checkpoint_read(c, NULL, "plain", NULL), TCH_ERR_INVALID_ARGUMENT, "out");
    test_check_refused(tch_checkpoint_read(c, NULL, NULL, &wrong), TCH_ERR_INVALID_ARGUMENT, "name");
    test_check_refused(tch_checkpoint_read(NULL, NULL, "plain", &wrong), TCH_ERR_INVALID_ARGUMENT, "checkpoint");
    for (int i = 0; i < 600; i++) {
        CHECK(got[i] == 0.0f, "written in spite of an error");
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    for (int i = 0; i < 600; i++) {
        values[i] = (float)i;
    }
    return test_run(__FILE__, install, uninstall);
}

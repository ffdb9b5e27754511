/* A process that saves continuously is killed at random times. Afterwards the path holds one complete version, at least
 * as new as the last one whose save had returned, and later saves remove old temporary files. The same for an index and
 * its files, which are complete once they have their names. TORCHIUM_TEST_KILLS sets the number of kills. And two
 * processes that save to the same path. */
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support/files.h"
#include "support/random.h"
#include "support/testing.h"

#define KILLS 100        /* and half as many with an index */
#define SAVES_PER_LIFE 4 /* at most, extrapolated from the first one */
#define TENSORS 4
#define SIZE 60000

typedef tch_status (*saver)(tch_checkpoint_writer *writer, const char *path);

static int64_t values[TENSORS][SIZE];
static int64_t size = SIZE;

static const char *name_of(int i)
{
    static const char *const names[TENSORS] = {"a", "b", "c", "d"};
    return names[i];
}

static tch_status save_file(tch_checkpoint_writer *writer, const char *path)
{
    return tch_checkpoint_writer_save(writer, NULL, path);
}

static tch_status save_with_index(tch_checkpoint_writer *writer, const char *path)
{
    return tch_checkpoint_writer_save_sharded(writer, NULL, NULL, path);
}

/* Every element of version v is v, and so is its setting. */
static tch_status save_version(saver save, tch_checkpoint_writer *writer, const char *path, int64_t version)
{
    for (int i = 0; i < TENSORS; i++) {
        for (int j = 0; j < SIZE; j++) {
            values[i][j] = version;
        }
    }
    tch_status status = tch_checkpoint_writer_set_integer(writer, "version", version);
    return status != TCH_OK ? status : save(writer, path);
}

static tch_checkpoint_writer *new_writer(void)
{
    tch_checkpoint_writer *writer = NULL;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    for (int i = 0; i < TENSORS; i++) {
        tch_tensor t = tch_tensor_view(values[i], TCH_INT64, 1, &size);
        CHECK_OK(tch_checkpoint_writer_add(writer, name_of(i), &t));
    }
    return writer;
}

/* The child: saves version after version, and reports each through the pipe. */
static _Noreturn void save_until_killed(saver save, tch_checkpoint_writer *writer, const char *path, int64_t version,
                                        int pipe_end)
{
    for (;; version++) {
        if (save_version(save, writer, path, version) != TCH_OK ||
            write(pipe_end, &version, sizeof version) != (ssize_t)sizeof version) {
            _exit(1);
        }
    }
}

/* The version in the file; fails the test unless all of it is consistent. */
static int64_t version_of(const char *path)
{
    size_t mark = test_mark();
    int64_t version = -1;
    tch_checkpoint *checkpoint = test_checkpoint_open(path);
    CHECK_OK(tch_checkpoint_integer(checkpoint, "version", &version));
    CHECK(tch_checkpoint_count(checkpoint) == TENSORS, "tensors are missing");
    for (int i = 0; i < TENSORS; i++) {
        tch_tensor out = tch_tensor_view(values[i], TCH_INT64, 1, &size);
        CHECK_OK(tch_checkpoint_read(checkpoint, NULL, name_of(i), &out));
        for (int j = 0; j < SIZE; j++) {
            CHECK(values[i][j] == version, "%s has an element of version %lld in version %lld", name_of(i),
                  (long long)values[i][j], (long long)version);
        }
    }
    test_release_since(mark);
    return version;
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Kills a child after `life` seconds, and returns the last version it reported. */
static int64_t one_life(saver save, tch_checkpoint_writer *writer, const char *path, int64_t version, double life)
{
    int ends[2];
    int64_t done = version - 1;
    CHECK(pipe(ends) == 0, "the test has no pipe");
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        save_until_killed(save, writer, path, version, ends[1]);
    }
    CHECK(child > 0, "the test cannot fork");
    close(ends[1]);
    struct timespec sleep = {.tv_sec = (time_t)life, .tv_nsec = (long)((life - (double)(time_t)life) * 1e9)};
    nanosleep(&sleep, NULL);
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFSIGNALED(status), "the child ended by itself: saving failed");
    while (read(ends[0], &version, sizeof version) == (ssize_t)sizeof version) {
        done = version;
    }
    close(ends[0]);
    return done;
}

/* Visits the files with this prefix, and returns their number. */
static int visit_files(const char *start, void (*visit)(const char *path))
{
    int count = 0;
    DIR *entries = opendir(test_path(""));
    CHECK(entries != NULL, "the test has no folder");
    for (const struct dirent *e = readdir(entries); e != NULL; e = readdir(entries)) {
        if (strncmp(e->d_name, start, strlen(start)) == 0) {
            visit(test_path(e->d_name));
            count++;
        }
    }
    closedir(entries);
    return count;
}

static void kill_often(saver save, const char *name, int kills)
{
    const char *path = test_path(name);
    test_random random = test_random_stream(1);
    tch_checkpoint_writer *writer = new_writer();
    int64_t version = 1;
    int leftovers = 0;
    int saves = 0;
    double start = seconds();
    CHECK_OK(save_version(save, writer, path, version));
    double longest = SAVES_PER_LIFE * (seconds() - start);
    for (int i = 0; i < kills; i++) {
        int64_t before = version;
        test_case("kill %d after version %lld", i, (long long)before);
        int64_t done = one_life(save, writer, path, version + 1, longest * test_random_uniform(&random));
        version = version_of(path);
        CHECK(version == done || version == done + 1, "version %lld was done, and version %lld is there",
              (long long)done, (long long)version);
        CHECK(version == before || test_leftover_count() <= 1, "leftovers of earlier kills are still there");
        leftovers += visit_files(".torchium-", test_file_make_old);
        saves += version > before;
    }
    printf("%d of %d kills left a temporary file; %d came after a save\n", leftovers, kills, saves);
    CHECK(leftovers > 0 && saves > 0, "the kills came too late or too early to try anything");
    CHECK_OK(save_version(save, writer, path, version + 1));
    CHECK(test_leftover_count() == 0, "the last leftover is still there");
    tch_checkpoint_writer_destroy(writer);
}

static int kill_count(void)
{
    const char *text = getenv("TORCHIUM_TEST_KILLS");
    return text != NULL ? (int)strtol(text, NULL, 10) : KILLS;
}

TEST(killed_at_any_moment)
{
    kill_often(save_file, "killed", kill_count());
}

static void check_whole(const char *path)
{
    (void)version_of(path);
}

TEST(killed_with_an_index)
{
    kill_often(save_with_index, "shards.safetensors.index.json", kill_count() / 2);
    int files = visit_files("shards-", check_whole);
    printf("%d of these kills came between a file's name and the index's\n", files - 1);
    CHECK(files >= 1 && visit_files(".shards", test_file_make_old) == 0, "files are missing, or a lock is left");
}

/* --- two writers ------------------------------------------------------------------------------------------------- */

enum { WRITERS = 2, SAVES = 20 };

static pid_t start_writer(tch_checkpoint_writer *writer, const char *path, int number)
{
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < SAVES; i++) {
            if (save_version(save_file, writer, path, 1000 * (number + 1) + i) != TCH_OK) {
                _exit(1);
            }
        }
        _exit(0);
    }
    CHECK(child > 0, "the test cannot fork");
    return child;
}

static void leave(const char *path)
{
}

/* Concurrent readers always find a complete version of one writer, and at the end the last one of either, without other
 * files. */
TEST(two_writers)
{
    const char *path = test_path("two");
    tch_checkpoint_writer *writer = new_writer();
    int running = WRITERS;
    int reads = 0;
    CHECK_OK(save_version(save_file, writer, path, 1));
    for (int i = 0; i < WRITERS; i++) {
        start_writer(writer, path, i);
    }
    while (running > 0) {
        int status = 0;
        (void)version_of(path);
        reads++;
        while (running > 0 && waitpid(-1, &status, WNOHANG) > 0) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a writer failed");
            running--;
        }
    }
    int64_t last = version_of(path);
    CHECK(last % 1000 == SAVES - 1 && reads > 1, "version %lld is there after %d reads", (long long)last, reads);
    CHECK(visit_files("two", leave) == 1 && test_leftover_count() == 0, "%d files are left", visit_files("two", leave));
    tch_checkpoint_writer_destroy(writer);
}

TEST_MAIN(test_folder_make, test_folder_remove)

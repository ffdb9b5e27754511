/* Checkpoints saved by several ranks: what was saved in rectangles is read in any others, bitwise; a false index is
 * rejected; and a save that fails on one rank fails on all and leaves the old checkpoint intact. Ranks are threads. */
#include <dirent.h>
#include <glob.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/comm/pretend_group.h"
#include "support/fakes/counting_allocator.h"
#include "support/fakes/watch_open.h"
#include "support/files.h"
#include "support/messages.h"
#include "support/testing.h"

#define INDEX "model.safetensors.index.json"

/* --- a tensor in rectangles -------------------------------------------------------------------------------------- */

enum { ELEMENTS = 12 * 10 * 6 };

/* The same elements, with separate and with merged dimensions. */
static int64_t wholes[][3] = {{12, 10, 6}, {12, 60, 1}, {120, 6, 1}, {720, 1, 1}};
static const int32_t dimensions[] = {3, 2, 2, 1};

/* Cuts of each dimension; rectangles are all combinations. */
typedef struct cutting {
    int32_t whole;
    int64_t cuts[3];
} cutting;

static const cutting cuttings[] = {
    {0, {1, 1, 1}}, {0, {4, 1, 1}}, {0, {1, 3, 1}}, {0, {1, 1, 6}}, {0, {3, 2, 2}}, {1, {2, 4, 1}},
    {1, {5, 7, 1}}, {2, {1, 5, 1}}, {2, {7, 1, 1}}, {3, {1, 1, 1}}, {3, {9, 1, 1}},
};

/* Rectangle `number` of a partition; false past the last one. */
static bool rectangle(const cutting *c, int64_t number, int64_t *start, int64_t *size)
{
    for (int32_t k = dimensions[c->whole] - 1; k >= 0; k--) {
        int64_t length = wholes[c->whole][k];
        int64_t each = (length + c->cuts[k] - 1) / c->cuts[k];
        int64_t cuts = (length + each - 1) / each;
        start[k] = number % cuts * each;
        size[k] = length - start[k] < each ? length - start[k] : each;
        number /= cuts;
    }
    return number == 0;
}

/* The elements of a rectangle, each with its index in the tensor as value. */
static int64_t fill(int32_t whole, const int64_t *start, const int64_t *size, double *values)
{
    int64_t count = 1;
    for (int32_t k = 0; k < dimensions[whole]; k++) {
        count *= size[k];
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i;
        int64_t stride = 1;
        values[i] = 0.0;
        for (int32_t k = dimensions[whole] - 1; k >= 0; k--) {
            values[i] += (double)((start[k] + rest % size[k]) * stride);
            rest /= size[k];
            stride *= wholes[whole][k];
        }
    }
    return count;
}

typedef struct trial {
    const cutting *saved;
    pretend_group group;
    const char *paths[PRETEND_MOST];
    tch_status status[PRETEND_MOST];
    char message[PRETEND_MOST][256];
    const char *mark;
    tch_context *contexts[PRETEND_MOST];
} trial;

/* Rectangle i goes to rank i mod W. */
static tch_status add_rectangles(const trial *t, tch_checkpoint_writer *writer, int32_t rank, int32_t ranks,
                                 double *values)
{
    tch_status status = TCH_OK;
    int64_t start[3], size[3];
    for (int64_t i = 0; rectangle(t->saved, i, start, size) && status == TCH_OK; i++) {
        if (i % ranks == rank) {
            tch_tensor view = tch_tensor_view(values, TCH_FLOAT64, dimensions[t->saved->whole], size);
            values += fill(t->saved->whole, start, size, values);
            status = tch_checkpoint_writer_add_shard(writer, "w", &view, wholes[t->saved->whole], start);
        }
    }
    return status;
}

static tch_status save_rank(const trial *t, tch_comm *comm, int32_t rank)
{
    tch_checkpoint_writer *writer = NULL;
    double *values = test_alloc(ELEMENTS * sizeof(double));
    int32_t ranks = comm == NULL ? 1 : tch_comm_size(comm);
    char own[16];
    double number = rank;
    tch_tensor scalar = tch_tensor_view(&number, TCH_FLOAT64, 0, NULL);
    snprintf(own, sizeof own, "own%d", rank);
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : add_rectangles(t, writer, rank, ranks, values);
    status = status != TCH_OK ? status : tch_checkpoint_writer_add(writer, own, &scalar);
    status = status != TCH_OK ? status : tch_checkpoint_writer_add(writer, "common", &scalar);
    status = status != TCH_OK ? status : tch_checkpoint_writer_set_text(writer, "mark", t->mark);
    status = status != TCH_OK ? status : tch_checkpoint_writer_set_integer(writer, own, rank);
    if (status == TCH_OK || comm != NULL) {
        status = tch_checkpoint_writer_save_sharded(status == TCH_OK ? writer : NULL, t->contexts[rank], comm,
                                                    t->paths[rank]);
    }
    tch_checkpoint_writer_destroy(writer);
    return status;
}

static void save_task(tch_comm *comm, int32_t rank, void *user)
{
    trial *t = user;
    t->status[rank] = save_rank(t, comm, rank);
    snprintf(t->message[rank], sizeof t->message[rank], "%s", t->status[rank] == TCH_OK ? "" : tch_last_error());
}

static trial trial_of(const cutting *saved, const char *path, const char *mark)
{
    trial t = {.saved = saved, .mark = mark};
    for (int32_t r = 0; r < PRETEND_MOST; r++) {
        t.paths[r] = path;
    }
    return t;
}

static void open_group(trial *t, int32_t ranks)
{
    pretend_open(&t->group, ranks);
    for (int32_t r = 0; r < ranks; r++) {
        CHECK_OK(tch_context_create("cpu", &t->contexts[r]));
        (void)pretend_comm(&t->group, r); /* before an injected failure */
    }
}

static void close_group(trial *t)
{
    for (int32_t r = 0; r < t->group.size; r++) {
        tch_context_destroy(t->contexts[r]);
    }
    pretend_close(&t->group);
}

/* Rank `bad` fails at its collective `call`, unless that is 0. */
static void run_ranks(trial *t, int32_t ranks, int32_t bad, int64_t call)
{
    open_group(t, ranks);
    t->group.timeout_s = call > 0 ? 0.2 : 20.0;
    t->group.ranks[bad].gone_at = call;
    pretend_run(&t->group, save_task, t);
    close_group(t);
}

static void save_well(const cutting *saved, int32_t ranks, const char *path, const char *mark)
{
    trial t = trial_of(saved, path, mark);
    run_ranks(&t, ranks, 0, 0);
    for (int32_t r = 0; r < ranks; r++) {
        CHECK(t.status[r] == TCH_OK, "rank %d: %s", r, t.message[r]);
    }
}

/* Reads all elements, by all rectangles of a partition, `strided` into non-contiguous memory. */
static void check_elements(const tch_checkpoint *c, const cutting *read, bool strided)
{
    double *got = test_alloc(2 * ELEMENTS * sizeof(double));
    double *want = test_alloc(ELEMENTS * sizeof(double));
    int64_t start[3], size[3];
    for (int64_t i = 0; rectangle(read, i, start, size); i++) {
        int32_t ndim = dimensions[read->whole];
        int64_t strides[3] = {0};
        int64_t stride = strided ? 2 : 1;
        for (int32_t k = ndim - 1; k >= 0; k--) {
            strides[k] = stride;
            stride *= size[k];
        }
        tch_tensor out = tch_tensor_view(got, TCH_FLOAT64, ndim, size);
        out.strides = strides;
        CHECK_OK(tch_checkpoint_read_shard(c, NULL, "w", wholes[read->whole], start, &out));
        int64_t count = fill(read->whole, start, size, want);
        for (int64_t k = 0; k < count; k++) {
            CHECK(got[k * (strided ? 2 : 1)] == want[k], "element %lld of rectangle %lld is %g, expected %g",
                  (long long)k, (long long)i, got[k * (strided ? 2 : 1)], want[k]);
        }
    }
}

TEST_IN_FOLDER(every_cutting_from_every_other)
{
    for (size_t a = 0; a < TEST_COUNT(cuttings); a++) {
        const char *path = test_path(INDEX);
        save_well(&cuttings[a], 1 + (int32_t)a % 4, path, "now");
        tch_checkpoint *c = test_checkpoint_open(path);
        CHECK(strcmp(tch_checkpoint_text(c, "mark"), "now") == 0, "another checkpoint is there");
        CHECK(tch_checkpoint_has_checksums(c) == 1, "checksums are missing");
        CHECK_OK(tch_checkpoint_verify(c, NULL));
        for (size_t b = 0; b < TEST_COUNT(cuttings); b++) {
            test_case("saved by cutting %d, read by %d", (int)a, (int)b);
            int32_t saved = cuttings[a].whole;
            int32_t read = cuttings[b].whole;
            if (saved != 0 && read != 0 && saved + read == 3) { /* neither merges the other's dimensions */
                double value;
                int64_t one[2] = {1, 1};
                static const int64_t start[2];
                tch_tensor out = tch_tensor_view(&value, TCH_FLOAT64, 2, one);
                CHECK(tch_checkpoint_read_shard(c, NULL, "w", wholes[read], start, &out) == TCH_ERR_SHAPE,
                      "it was read");
            } else {
                check_elements(c, &cuttings[b], b % 2 == 1);
            }
        }
    }
}

/* A plain file with the unsharded tensor, as one process saves it. */
TEST_IN_FOLDER(whole_from_one_file)
{
    double values[ELEMENTS];
    static const int64_t start[3];
    fill(0, start, wholes[0], values);
    tch_tensor view = tch_tensor_view(values, TCH_FLOAT64, 3, wholes[0]);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    CHECK_OK(tch_checkpoint_writer_add(writer, "w", &view));
    test_checkpoint_save(writer, NULL, test_path("whole.safetensors"));
    tch_checkpoint *c = test_checkpoint_open(test_path("whole.safetensors"));
    for (size_t b = 0; b < TEST_COUNT(cuttings); b++) {
        check_elements(c, &cuttings[b], b % 2 == 0);
    }
}

/* Unsharded tensors and settings: those of each rank, and those common to all, which the first rank saves. */
TEST_IN_FOLDER(what_each_rank_has)
{
    const char *path = test_path(INDEX);
    save_well(&cuttings[1], 3, path, "now");
    tch_checkpoint *c = test_checkpoint_open(path);
    for (int r = 0; r < 3; r++) {
        char own[16];
        int64_t setting = -1;
        double value = -1.0;
        tch_tensor out = tch_tensor_view(&value, TCH_FLOAT64, 0, NULL);
        snprintf(own, sizeof own, "own%d", r);
        CHECK_OK(tch_checkpoint_read(c, NULL, own, &out));
        CHECK_OK(tch_checkpoint_integer(c, own, &setting));
        CHECK(value == r && setting == r, "rank %d has %g and %lld", r, value, (long long)setting);
        CHECK_OK(tch_checkpoint_view(c, own, &out));
        CHECK_OK(tch_checkpoint_read_shard(c, NULL, own, NULL, NULL,
                                           &(tch_tensor){.data = &value, .device = out.device, .dtype = TCH_FLOAT64}));
    }
    double common = -1.0;
    tch_tensor out = tch_tensor_view(&common, TCH_FLOAT64, 0, NULL);
    CHECK_OK(tch_checkpoint_read(c, NULL, "common", &out));
    CHECK(common == 0.0, "rank %g's is taken", common);
    CHECK(tch_checkpoint_count(c) == 4 + 3 + 1, "there are %lld tensors", (long long)tch_checkpoint_count(c));
}

/* --- files of different saves ------------------------------------------------------------------------------------ */

static int count_files(const char *ending)
{
    int count = 0;
    const char *folder = test_path("");
    DIR *entries = opendir(folder);
    for (const struct dirent *e = readdir(entries); e != NULL; e = readdir(entries)) {
        size_t length = strlen(e->d_name);
        count += length > strlen(ending) && strcmp(e->d_name + length - strlen(ending), ending) == 0;
    }
    closedir(entries);
    return count;
}

TEST_IN_FOLDER(earlier_files_go)
{
    static const char *const others[] = {"model-00001-of-00002.safetensors", "model.safetensors",
                                         "model-0123456789abcdef-00001-of-00002.safetensors.bak",
                                         "model-0123456789abcdef-00001-of-00002.safetensors",
                                         "other-0123456789abcdef-00001-of-00002.safetensors"};
    static const char theirs[] = "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\"}}";
    const char *path = test_path(INDEX);
    for (size_t i = 0; i < TEST_COUNT(others); i++) {
        test_file_write(test_path(others[i]), "x", 1);
    }
    test_file_write(path, theirs, sizeof theirs - 1); /* a name that no save uses */
    save_well(&cuttings[1], 4, path, "first");
    CHECK(count_files("-of-00004.safetensors") == 4, "there are other files than four");
    save_well(&cuttings[1], 2, path, "second");
    CHECK(count_files("-of-00004.safetensors") == 0, "files of the first save are left");
    CHECK(count_files("-of-00002.safetensors") == 2 + 3, "not two files, and three of others");
    for (size_t i = 0; i < TEST_COUNT(others); i++) {
        CHECK(access(test_path(others[i]), F_OK) == 0, "%s is gone", others[i]);
    }
}

static void check_mark(const char *path, const char *mark)
{
    size_t before = test_mark();
    tch_checkpoint *c = test_checkpoint_open(path);
    CHECK(strcmp(tch_checkpoint_text(c, "mark"), mark) == 0, "the checkpoint is %s", tch_checkpoint_text(c, "mark"));
    check_elements(c, &cuttings[4], false);
    test_release_since(before);
}

enum { GROUP = 54321 };

/* The number of files readable by the owner only, and of this group if root can choose one. */
static int count_private(bool make_so)
{
    glob_t files = {0};
    struct stat status;
    int count = 0;
    bool root = geteuid() == 0;
    CHECK(glob(test_path("*.safetensors"), 0, NULL, &files) == 0, "there are no files");
    for (size_t i = 0; i < files.gl_pathc; i++) {
        const char *path = files.gl_pathv[i];
        CHECK(!make_so || ((!root || chown(path, 0, GROUP) == 0) && chmod(path, 0600) == 0), "the test cannot prepare");
        CHECK(stat(path, &status) == 0, "%s is gone", path);
        count += (status.st_mode & 0777) == 0600 && (!root || status.st_gid == GROUP);
    }
    globfree(&files);
    return count;
}

/* Two indexes with a common file prefix; and files readable by their owner only stay so, for any number of ranks and
 * any umask. */
TEST_IN_FOLDER(beside_another_index)
{
    const char *path = test_path(INDEX);
    const char *other = test_path("model.index.json");
    save_well(&cuttings[1], 2, other, "other");
    save_well(&cuttings[1], 3, path, "first");
    CHECK(count_private(true) == 5, "the test cannot change permissions");
    mode_t before = umask(022);
    for (int32_t ranks = 1; ranks <= 4; ranks += 3) {
        save_well(&cuttings[1], ranks, path, "second");
        check_mark(path, "second");
        check_mark(other, "other");
        CHECK(count_files(".safetensors") == 2 + ranks, "%d files are there", count_files(".safetensors"));
        CHECK(count_private(false) == 2 + ranks, "permissions or groups were not kept");
    }
    umask(before);
}

static char between_path[TEST_PATH_SIZE];
static const char *between_name;
static bool between_done;

/* Another process saves before this file is renamed. */
static void save_between(const char *name)
{
    size_t length = strlen(name);
    size_t end = strlen(between_name);
    if (!between_done && length > end && strcmp(name + length - end, between_name) == 0) {
        test_before_rename = NULL;
        trial t = trial_of(&cuttings[1], between_path, "between");
        between_done = save_rank(&t, NULL, 0) == TCH_OK;
    }
}

/* Before the first file is renamed, and before the index is, while this process has the lock. The other process
 * proceeds without the lock, and no file in the index is lost. */
TEST_IN_FOLDER(another_save_in_between)
{
    static const char *const names[] = {".safetensors", ".index.json"};
    snprintf(between_path, sizeof between_path, "%s", test_path(INDEX));
    for (int i = 0; i < 2; i++) {
        test_case("before %s", names[i]);
        save_well(&cuttings[1], 1, between_path, "old");
        between_name = names[i];
        between_done = false;
        test_before_rename = save_between;
        trial t = trial_of(&cuttings[1], between_path, "new");
        CHECK_OK(save_rank(&t, NULL, 0));
        CHECK(between_done, "the test did not save in between");
        check_mark(between_path, "new");
        CHECK(count_files(".lock") == 0, "a lock is left");
    }
}

/* A file system with per-machine locks: files being written by ranks appear unlocked to the others. */
TEST_IN_FOLDER(local_locks)
{
    test_local_locks = true;
    for (int i = 0; i < 5; i++) {
        save_well(&cuttings[1], 8, test_path(INDEX), "now");
        check_mark(test_path(INDEX), "now");
    }
    test_local_locks = false;
}

/* Each system call fails once, on either rank: all get an error and the old checkpoint remains; or the new one, if it
 * was renamed and its folder could not be synced. */
TEST_IN_FOLDER(every_call_fails_once)
{
    const char *path = test_path(INDEX);
    for (int32_t ranks = 1; ranks <= 2; ranks++) {
        bool failed = true;
        int errors = 0;
        for (int k = 1; failed; k++) {
            test_case("call %d of %d ranks", k, ranks);
            save_well(&cuttings[1], ranks, path, "old");
            int files = count_files(".safetensors");
            trial t = trial_of(&cuttings[1], path, "new");
            test_fail_file_call(k);
            run_ranks(&t, ranks, 0, 0);
            failed = test_fail_file_call(0);
            bool well = t.status[0] == TCH_OK;
            CHECK(well || (failed && t.status[0] == TCH_ERR_IO), "gave %s", t.message[0]);
            CHECK(ranks == 1 || well == (t.status[1] == TCH_OK), "and the other: %s", t.message[1]);
            bool named = well || strstr(t.message[0], INDEX ": the file is complete") != NULL;
            check_mark(path, named ? "new" : "old");
            int left = count_files(".safetensors") - files;
            CHECK(test_leftover_count() == 0 && left == (named && !well ? ranks : 0), "%d files are left", left);
            CHECK(count_files(".lock") == 0, "a lock is left");
            errors += !well;
        }
        CHECK(errors >= 5 * (ranks + 1), "%d calls failed: not two writes, two of fsync and a rename of each", errors);
    }
}

/* --- failing ranks ----------------------------------------------------------------------------------------------- */

/* A rank that cannot write, into a missing folder or over a folder, or has invalid arguments: all fail, it gets its own
 * error, no rank hangs, and no file remains. */
TEST_IN_FOLDER(one_rank_cannot_save)
{
    static const char no_folder[] = "its folder cannot be opened";
    static const char not_written[] = "another rank could not write its file";
    static const struct {
        int32_t ranks, bad;
        const char *path, *bad_path;
        tch_status status;
        const char *own, *others;
    } cases[] = {
        {3, 0, INDEX, "missing/" INDEX, TCH_ERR_IO, no_folder, not_written},
        {3, 1, INDEX, "missing/" INDEX, TCH_ERR_IO, no_folder, not_written},
        {3, 2, INDEX, "missing/" INDEX, TCH_ERR_IO, no_folder, not_written},
        {3, 1, INDEX, "model.safetensors", TCH_ERR_INVALID_ARGUMENT, "the name of an index", "could not begin"},
        {2, 0, "folder." INDEX, "folder." INDEX, TCH_ERR_IO, "cannot be replaced", "could not write the index"},
    };
    save_well(&cuttings[1], 3, test_path(INDEX), "old");
    CHECK(mkdir(test_path("folder." INDEX), 0700) == 0, "the test cannot make a folder");
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        int32_t bad = cases[i].bad;
        test_case("rank %d: %s", bad, cases[i].own);
        trial t = trial_of(&cuttings[1], test_path(cases[i].path), "new");
        t.paths[bad] = test_path(cases[i].bad_path);
        run_ranks(&t, cases[i].ranks, 0, 0);
        for (int32_t r = 0; r < cases[i].ranks; r++) {
            const char *words = r == bad ? cases[i].own : cases[i].others;
            CHECK(t.status[r] == (r == bad ? cases[i].status : TCH_ERR_IO), "rank %d: %s", r, t.message[r]);
            CHECK(strstr(t.message[r], words) != NULL, "rank %d: %s", r, t.message[r]);
        }
        check_mark(test_path(INDEX), "old");
        CHECK(count_files(".safetensors") == 3 && test_leftover_count() == 0, "files are left");
    }
}

/* A rank dies at each of the four barriers: the others get an error. The checkpoint is old or new, and complete,
 * without other files. */
TEST_IN_FOLDER(rank_that_dies)
{
    const char *path = test_path(INDEX);
    save_well(&cuttings[1], 3, path, "old");
    for (int32_t bad = 0; bad < 3; bad++) {
        for (int64_t call = 1; call <= 4; call++) {
            test_case("rank %d at meeting %lld", bad, (long long)call);
            trial t = trial_of(&cuttings[1], path, "new");
            run_ranks(&t, 3, bad, call);
            for (int32_t r = 0; r < 3; r++) {
                CHECK(t.status[r] == TCH_ERR_COMM, "rank %d: %s", r, t.message[r]);
            }
            check_mark(path, call < 4 ? "old" : "new");
            CHECK(count_files(".safetensors") == 3, "files are left");
            save_well(&cuttings[1], 3, path, "old");
        }
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

/* On either rank: both get an error, the old checkpoint remains, and no other file. */
static tch_status save_on_both(void *user)
{
    trial *t = user;
    pretend_run(&t->group, save_task, t);
    CHECK((t->status[0] == TCH_OK) == (t->status[1] == TCH_OK), "%s; and the other: %s", t->message[0], t->message[1]);
    return t->status[0];
}

static void check_saved(void *user, bool through)
{
    const trial *t = user;
    CHECK(test_leftover_count() == 0 && count_files(".safetensors") == 2, "files are left");
    check_mark(t->paths[0], through ? "new" : "old");
}

TEST_IN_FOLDER(no_memory_to_save)
{
    const char *path = test_path(INDEX);
    save_well(&cuttings[1], 2, path, "old");
    trial t = trial_of(&cuttings[1], path, "new");
    open_group(&t, 2);
    test_fail_each_allocation("save", save_on_both, check_saved, &t);
    close_group(&t);
    test_counting_check_empty();
}

static tch_status read_with_less_memory(void *path)
{
    double got[ELEMENTS];
    static const int64_t start[3];
    tch_checkpoint *c = NULL;
    tch_tensor out = tch_tensor_view(got, TCH_FLOAT64, 2, wholes[1]);
    tch_status status = tch_checkpoint_open(path, &c);
    status = status != TCH_OK ? status : tch_checkpoint_read_shard(c, NULL, "w", wholes[1], start, &out);
    tch_checkpoint_close(c);
    CHECK(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY, "gave %s", tch_status_name(status));
    return status;
}

TEST_IN_FOLDER(no_memory_to_read)
{
    const char *path = test_path(INDEX);
    save_well(&cuttings[4], 3, path, "old");
    test_fail_each_allocation("read", read_with_less_memory, NULL, (void *)path);
}

/* --- malicious indexes ------------------------------------------------------------------------------------------- */

/* A file of an index is truncated, by a byte or within its header. */
TEST_IN_FOLDER(a_cut_file_is_refused)
{
    const char *path = test_path(INDEX);
    save_well(&cuttings[4], 2, path, "old");
    int64_t bytes;
    const char *name = strstr(test_file_read(path, &bytes), "model-");
    char file[TEST_PATH_SIZE];
    snprintf(file, sizeof file, "%s%.*s", test_path(""), (int)strcspn(name, "\""), name);
    char *content = test_file_read(file, &bytes);
    for (int64_t cut = bytes; cut >= 1; cut = cut == bytes ? bytes - 1 : cut / 8) {
        test_case("%lld of %lld bytes", (long long)cut, (long long)bytes);
        test_file_write(file, content, cut);
        tch_checkpoint *c = NULL;
        CHECK(tch_checkpoint_open(path, &c) == (cut == bytes ? TCH_OK : TCH_ERR_IO), "it said: %s", tch_last_error());
        tch_checkpoint_close(c);
    }
}

/* With a message if it is rejected; the last ones are as other programs write them, with any metadata. */
TEST_IN_FOLDER(good_and_bad_indexes)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "index byte 0: expected '{', the index ends"},
        {"[]", "expected '{'"},
        {"{}", "expected a string"},
        {"{\"metadata\":{}}", "there is no \"weight_map\""},
        {"{\"weight_map\":{\"w\":\"../x.safetensors\"}}", "expected one of its own folder"},
        {"{\"weight_map\":{\"w\":\"a/x.safetensors\"}}", "expected one of its own folder"},
        {"{\"weight_map\":{\"w\":\"\"}}", "expected one of its own folder"},
        {"{\"weight_map\":{\"w\":\"" INDEX "\"}}", "another index"},
        {"{\"weight_map\":{\"w\":\"missing.safetensors\"}}", "missing.safetensors: it cannot be opened"},
        {"{\"weight_map\":{\"w\":\"good\"}}", "lists"},
        {"{\"weight_map\":{\"a\":\"good\",\"a\":\"good\"}}", "two tensors are called \"a\""},
        {"{\"weight_map\":{},\"weight_map\":{}}", "occurs twice"},
        {"{\"metadata\":{\"a\":[1,{},\"\\u0041\"],\"b\":,}},\"weight_map\":{}}", "expected"},
        {"{\"weight_map\":{}} x", "expected the end of the index"},
        {"{\"metadata\":{\"a\":[[[", "expected a value"},
        {"{\"weight_map\":{\"a\":\"good\"}}", NULL},
        {" {\n \"metadata\" : {\"total_size\": 1.5e3, \"x\": [1, -2, {\"y\": null}], \"z\": {}, \"t\": true},\n"
         " \"weight_map\": {\"a\": \"good\"} }\n",
         NULL},
        {"{\"weight_map\":{\"a\":\"good\"},\"metadata\":\"none\"}", NULL},
    };
    test_safetensors_write(test_path("good"), "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", -1,
                           8);
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_checkpoint *c = NULL;
        test_case("%s", cases[i].text);
        test_file_write(test_path(INDEX), cases[i].text, (int64_t)strlen(cases[i].text));
        tch_status status = tch_checkpoint_open(test_path(INDEX), &c);
        if (cases[i].message != NULL) {
            CHECK(status == TCH_ERR_IO, "it was opened, or failed otherwise");
            CHECK(strstr(tch_last_error(), cases[i].message) != NULL, "it said: %s", tch_last_error());
        } else {
            CHECK(status == TCH_OK && tch_checkpoint_count(c) == 1 && tch_checkpoint_has_checksums(c) == 0,
                  "it was misread");
        }
        tch_checkpoint_close(c);
    }
}

/* Rows [from, to) of a tensor of four elements, each with its index as value. */
static void add_rows(tch_checkpoint_writer *writer, double *values, int64_t from, int64_t to)
{
    static const int64_t whole[] = {4};
    int64_t size = to - from;
    tch_tensor view = tch_tensor_view(values + from, TCH_FLOAT64, 1, &size);
    CHECK_OK(tch_checkpoint_writer_add_shard(writer, "w", &view, whole, &from));
}

/* The tensor's number of elements, but with a gap: rejected on load and on save. On load the result does not depend on
 * uninitialized memory. */
TEST_IN_FOLDER(overlapping_shards)
{
    static const struct {
        int64_t ends[2][2];
        const char *message;
    } cases[] = {{{{0, 3}, {1, 2}}, "\"w[0:3]\""},
                 {{{0, 2}, {1, 3}}, "\"w[1:3]\""},
                 {{{0, 4}, {3, 3}}, NULL},
                 {{{0, 3}, {3, 4}}, NULL}};
    double values[] = {0, 1, 2, 3};
    int64_t size[] = {4};
    static const int64_t start[] = {0};
    save_well(&cuttings[1], 1, test_path(INDEX), "old");
    const char *file = test_path("overlap");
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("case %d", (int)i);
        tch_checkpoint_writer *writer = test_checkpoint_writer();
        for (int k = 0; k < 2; k++) {
            add_rows(writer, values, cases[i].ends[k][0], cases[i].ends[k][1]);
        }
        CHECK_OK(tch_checkpoint_writer_save(writer, NULL, file));
        if (cases[i].message != NULL) {
            test_check_refused(tch_checkpoint_writer_save_sharded(writer, NULL, NULL, test_path(INDEX)), TCH_ERR_IO,
                               "of \"w\" overlap");
            check_mark(test_path(INDEX), "old");
        }
        tch_checkpoint *c = test_checkpoint_open(file);
        for (int fill = 0; fill < 256; fill += 255) {
            double got[4];
            memset(got, fill, sizeof got);
            tch_tensor out = tch_tensor_view(got, TCH_FLOAT64, 1, size);
            tch_status status = tch_checkpoint_read_shard(c, NULL, "w", size, start, &out);
            CHECK((status == TCH_OK) == (cases[i].message == NULL), "gave %s", tch_status_name(status));
            CHECK(status != TCH_OK || memcmp(got, values, sizeof got) == 0, "memory shows through");
            CHECK(status == TCH_OK || (strstr(tch_last_error(), "of \"w\" overlap") != NULL &&
                                       strstr(tch_last_error(), cases[i].message) != NULL),
                  "it said: %s", tch_last_error());
        }
    }
}

/* Sizes whose product exceeds 2^63 before a 0: an empty tensor like any other. */
TEST_IN_FOLDER(sizes_that_overflow)
{
    int64_t large[] = {(int64_t)1 << 62, 3, 0};
    int64_t none[] = {0};
    static const int64_t start[3];
    test_safetensors_write(test_path("large"),
                           "{\"w\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,3,0],\"data_offsets\":[0,0]}}", -1,
                           0);
    tch_checkpoint *c = test_checkpoint_open(test_path("large"));
    tch_tensor out = tch_tensor_view(NULL, TCH_FLOAT32, 1, none);
    CHECK_OK(tch_checkpoint_check_shard(c, "w", none, start, &out));
    out = tch_tensor_view(NULL, TCH_FLOAT32, 3, large);
    CHECK_OK(tch_checkpoint_check_shard(c, "w", large, start, &out));
    large[2] = 1;
    CHECK(tch_checkpoint_check_shard(c, "w", large, start, &out) == TCH_ERR_SHAPE, "3 2^62 elements are there");
}

/* The last of several shards is damaged: nothing was written from the others. */
TEST_IN_FOLDER(damage_is_found_first)
{
    double values[] = {0, 1, 2, 3};
    double got[4] = {-1, -1, -1, -1};
    int64_t size[] = {4};
    int64_t bytes;
    static const int64_t start[] = {0};
    for (int damaged = 0; damaged < 2; damaged++) {
        tch_checkpoint_writer *writer = test_checkpoint_writer();
        add_rows(writer, values, 0, 2);
        add_rows(writer, values, 2, 4);
        test_checkpoint_save(writer, NULL, test_path("damaged"));
        char *content = test_file_read(test_path("damaged"), &bytes);
        content[bytes - (damaged == 0 ? 1 : 32)] ^= 1;
        test_file_write(test_path("damaged"), content, bytes);
        tch_checkpoint *c = test_checkpoint_open(test_path("damaged"));
        tch_tensor out = tch_tensor_view(got, TCH_FLOAT64, 1, size);
        test_check_refused(tch_checkpoint_read_shard(c, NULL, "w", size, start, &out), TCH_ERR_IO, "damaged");
        for (int i = 0; i < 4; i++) {
            CHECK(got[i] == -1.0, "element %d was written", i);
        }
    }
}

/* A thousand files and forty descriptors. Reopened files must be unchanged. */
TEST_IN_FOLDER(more_files_than_descriptors)
{
    enum { FILES = 1000 };
    char *text = test_alloc(FILES * 64);
    size_t used = (size_t)snprintf(text, 64, "{\"weight_map\":{");
    char name[32];
    for (int i = 0; i < FILES; i++) {
        char header[96];
        snprintf(name, sizeof name, "%d.safetensors", i);
        snprintf(header, sizeof header, "{\"t%d\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", i);
        test_safetensors_write(test_path(name), header, -1, 8);
        used += (size_t)snprintf(text + used, 64, "%s\"t%d\":\"%s\"", i == 0 ? "" : ",", i, name);
    }
    used += (size_t)snprintf(text + used, 64, "}}");
    test_file_write(test_path(INDEX), text, (int64_t)used);
    struct rlimit limit;
    tch_checkpoint *c = NULL;
    float got[2];
    int64_t size[] = {2};
    tch_tensor out = tch_tensor_view(got, TCH_FLOAT32, 1, size);
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "the test cannot ask for the limit");
    struct rlimit few = {40, limit.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0, "the test cannot set the limit");
    tch_status status = tch_checkpoint_open(test_path(INDEX), &c);
    for (int i = 0; i < FILES && status == TCH_OK; i++) {
        snprintf(name, sizeof name, "t%d", i);
        status = tch_checkpoint_read(c, NULL, name, &out);
        status = status != TCH_OK ? status : tch_checkpoint_verify(c, name);
    }
    CHECK_OK(setrlimit(RLIMIT_NOFILE, &limit) == 0 ? status : TCH_ERR_INTERNAL);
    test_safetensors_write(test_path("new"), "{}", -1, 0);
    CHECK(rename(test_path("new"), test_path("900.safetensors")) == 0, "the test cannot replace a file");
    test_check_refused(tch_checkpoint_read(c, NULL, "t900", &out), TCH_ERR_IO, "replaced after it was opened");
    CHECK(remove(test_path("900.safetensors")) == 0, "the test cannot remove a file");
    test_check_refused(tch_checkpoint_read(c, NULL, "t900", &out), TCH_ERR_IO, "cannot be opened");
    tch_checkpoint_close(c);
}

/* Missing rectangles, or requests for another type or shape. */
TEST_IN_FOLDER(not_what_is_there)
{
    double values[6] = {0};
    int64_t size[2] = {2, 3};
    static const int64_t shape[2] = {4, 3};
    static const int64_t flipped[2] = {3, 4};
    static const int64_t zero[2] = {0, 0};
    static const int64_t later[2] = {1, 0};
    tch_tensor view = tch_tensor_view(values, TCH_FLOAT64, 2, size);
    tch_tensor scalar = tch_tensor_view(values, TCH_FLOAT64, 0, NULL);
    tch_checkpoint_writer *writer = test_checkpoint_writer();
    test_check_refused(tch_checkpoint_writer_add_shard(NULL, "w", &view, shape, zero), TCH_ERR_INVALID_ARGUMENT,
                       "writer");
    test_check_refused(tch_checkpoint_writer_add_shard(writer, NULL, &view, shape, zero), TCH_ERR_INVALID_ARGUMENT,
                       "name");
    test_check_refused(tch_checkpoint_writer_add_shard(writer, "w", &view, NULL, zero), TCH_ERR_INVALID_ARGUMENT,
                       "shape");
    test_check_refused(tch_checkpoint_writer_add_shard(writer, "w", &view, shape, NULL), TCH_ERR_INVALID_ARGUMENT,
                       "start");
    test_check_refused(tch_checkpoint_writer_add_shard(writer, "w", &scalar, shape, zero), TCH_ERR_INVALID_ARGUMENT,
                       "tensor is a scalar");
    test_check_refused(tch_checkpoint_writer_add_shard(writer, "w", &view, shape, (int64_t[]){3, 0}), TCH_ERR_SHAPE,
                       "inside the whole");
    CHECK_OK(tch_checkpoint_writer_add_shard(writer, "w", &view, shape, zero));
    test_check_refused(tch_checkpoint_writer_add_shard(writer, "w", &view, shape, zero), TCH_ERR_INVALID_ARGUMENT,
                       "added before");
    CHECK_OK(tch_checkpoint_writer_save_sharded(writer, NULL, NULL, test_path(INDEX)));
    tch_checkpoint *c = test_checkpoint_open(test_path(INDEX));
    CHECK_OK(tch_checkpoint_read_shard(c, NULL, "w", shape, zero, &view));
    test_check_refused(tch_checkpoint_read_shard(c, NULL, "w", shape, later, &view), TCH_ERR_IO, "3 of 6 elements");
    test_check_refused(tch_checkpoint_read_shard(c, NULL, "v", shape, zero, &view), TCH_ERR_INVALID_ARGUMENT,
                       "no tensor");
    int64_t other[2] = {3, 2};
    tch_tensor turned = tch_tensor_view(values, TCH_FLOAT64, 2, other);
    test_check_refused(tch_checkpoint_read_shard(c, NULL, "w", flipped, zero, &turned), TCH_ERR_SHAPE,
                       "expected float64");
    view.dtype = TCH_INT64;
    test_check_refused(tch_checkpoint_read_shard(c, NULL, "w", shape, zero, &view), TCH_ERR_SHAPE, "expected int64");
    test_check_refused(tch_checkpoint_read_shard(c, NULL, "w", shape, NULL, &view), TCH_ERR_SHAPE, "start");
    test_check_refused(tch_checkpoint_read_shard(NULL, NULL, "w", shape, zero, &view), TCH_ERR_INVALID_ARGUMENT,
                       "checkpoint");
    test_check_refused(tch_checkpoint_writer_save_sharded(NULL, NULL, NULL, test_path(INDEX)), TCH_ERR_INVALID_ARGUMENT,
                       "writer");
}

TEST_MAIN(test_counting_install, test_counting_remove)

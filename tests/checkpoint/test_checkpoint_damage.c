/* A checkpoint of training, parameters and the state of Shampoo, with one byte changed: every byte of the header, and
 * one in a thousand of the data. Whatever comes out is what was saved, or an error; the same for the files of an index.
 * The small file of test_checkpoint_checksums.c has every bit turned. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/files.h"
#include "support/testing.h"

enum { ROWS = 96, COLS = 160, STEPS = 3, EVERY = 1000 };

/* A parameter and its optimizer. */
typedef struct trained {
    float weight[ROWS * COLS], gradient[ROWS * COLS];
    int64_t shape[2];
    tch_tensor parameter, its_gradient;
    tch_optimizer *optimizer;
} trained;

static void make(tch_context *context, trained *t)
{
    *t = (trained){.shape = {ROWS, COLS}};
    t->parameter = tch_tensor_view(t->weight, TCH_FLOAT32, 2, t->shape);
    t->its_gradient = tch_tensor_view(t->gradient, TCH_FLOAT32, 2, t->shape);
    const tch_parameter parameter = {.tensor = &t->parameter, .name = "weight"};
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_SHAMPOO);
    CHECK_OK(tch_optimizer_create(context, &config, 1, &parameter, &t->optimizer));
}

static void train(trained *t)
{
    const tch_tensor *gradients[] = {&t->its_gradient};
    for (int i = 0; i < STEPS; i++) {
        for (int j = 0; j < ROWS * COLS; j++) {
            t->gradient[j] = (float)((i + 1) * (j % 89)) / 89.0F - 0.5F;
        }
        CHECK_OK(tch_optimizer_step(t->optimizer, 1, gradients));
    }
}

static void save(tch_context *context, trained *t, const char *path, bool index)
{
    tch_checkpoint_writer *writer = NULL;
    CHECK_OK(tch_checkpoint_writer_create(&writer));
    CHECK_OK(tch_checkpoint_writer_add(writer, "weight", &t->parameter));
    CHECK_OK(tch_optimizer_save(t->optimizer, writer, "optimizer"));
    CHECK_OK(tch_checkpoint_writer_set_integer(writer, "step", STEPS));
    CHECK_OK(index ? tch_checkpoint_writer_save_sharded(writer, context, NULL, path)
                   : tch_checkpoint_writer_save(writer, context, path));
    tch_checkpoint_writer_destroy(writer);
}

enum { MOST_BYTES = 1 << 20 };
static char expected[MOST_BYTES];
static char got[MOST_BYTES];

/* All tensors' bytes one after the other, and how many; -1 where the file is refused. */
static int64_t content_of(const char *path, char *to)
{
    tch_checkpoint *checkpoint = NULL;
    int64_t step = 0;
    int64_t bytes = 0;
    if (tch_checkpoint_open(path, &checkpoint) != TCH_OK) {
        return -1;
    }
    bool good = tch_checkpoint_integer(checkpoint, "step", &step) == TCH_OK && step == STEPS;
    for (int64_t i = 0; good && i < tch_checkpoint_count(checkpoint); i++) {
        tch_checkpoint_info info = TCH_CHECKPOINT_INFO_INIT;
        CHECK_OK(tch_checkpoint_get_info(checkpoint, i, &info));
        CHECK(bytes + info.bytes <= MOST_BYTES, "the test has too little room");
        tch_tensor out = tch_tensor_view(to + bytes, info.dtype, info.ndim, (int64_t *)info.shape);
        good = tch_checkpoint_read(checkpoint, NULL, info.name, &out) == TCH_OK;
        bytes += info.bytes;
    }
    tch_checkpoint_close(checkpoint);
    return good ? bytes : -1;
}

/* What changes of one byte do to what is read. */
typedef struct outcome {
    int refused, harmless, silent;
} outcome;

/* The path that is read, which may be an index, and the file that is changed. */
typedef struct damaged {
    const char *path;
    int64_t bytes; /* of what is in `expected` */
    int file;
    const char *original;
} damaged;

static void change_one(const damaged *d, int64_t at, outcome *out)
{
    char changed = (char)(d->original[at] ^ (1 + (int)(at % 255)));
    CHECK(pwrite(d->file, &changed, 1, at) == 1, "the test cannot change its file");
    int64_t bytes = content_of(d->path, got);
    bool same = bytes == d->bytes && memcmp(got, expected, (size_t)bytes) == 0;
    out->refused += bytes < 0;
    out->harmless += same;
    out->silent += bytes >= 0 && !same;
    CHECK(pwrite(d->file, &d->original[at], 1, at) == 1, "the test cannot change its file");
}

/* The number of the first byte behind the header. */
static int64_t data_begin(const char *bytes)
{
    int64_t length = 0;
    for (int i = 7; i >= 0; i--) {
        length = length << 8 | (int64_t)(unsigned char)bytes[i];
    }
    return 8 + length;
}

static void change_file(const char *path, const char *name)
{
    int64_t bytes;
    outcome header = {0};
    outcome data = {0};
    damaged d = {.path = path, .bytes = content_of(path, expected), .file = open(name, O_WRONLY | O_CLOEXEC)};
    CHECK(d.bytes > 0 && d.file >= 0, "the file is not read back: %s", tch_last_error());
    d.original = test_file_read(name, &bytes);
    int64_t begin = data_begin(d.original);
    for (int64_t at = 0; at < begin; at++) {
        change_one(&d, at, &header);
    }
    for (int64_t at = begin; at < bytes; at += EVERY) {
        change_one(&d, at, &data);
    }
    close(d.file);
    printf("header: %d changes, of which %d refused and %d harmless; data: %d, of which %d refused\n", (int)begin,
           header.refused, header.harmless, data.refused + data.harmless + data.silent, data.refused);
    CHECK(header.silent == 0 && data.silent == 0, "%d changes came through", header.silent + data.silent);
    CHECK(header.refused > 0 && data.refused > 0 && data.harmless == 0, "the test tries nothing");
}

static void a_file(void **state)
{
    static trained t;
    const char *path = test_path("trained.safetensors");
    make(*state, &t);
    train(&t);
    save(*state, &t, path, false);
    change_file(path, path);
    tch_optimizer_destroy(t.optimizer);
}

/* The name of the one file beside the index. */
static const char *file_of_index(const char *start)
{
    const char *name = NULL;
    DIR *entries = opendir(test_path(""));
    CHECK(entries != NULL, "the test has no folder");
    for (const struct dirent *e = readdir(entries); e != NULL; e = readdir(entries)) {
        if (strncmp(e->d_name, start, strlen(start)) == 0) {
            name = test_path(e->d_name);
        }
    }
    closedir(entries);
    CHECK(name != NULL, "the index has no file");
    return name;
}

static void a_file_of_an_index(void **state)
{
    static trained t;
    const char *path = test_path("whole.safetensors.index.json");
    make(*state, &t);
    train(&t);
    save(*state, &t, path, true);
    change_file(path, file_of_index("whole-"));
    tch_optimizer_destroy(t.optimizer);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_file), cmocka_unit_test(a_file_of_an_index)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context_and_folder, test_close_context_and_folder);
}

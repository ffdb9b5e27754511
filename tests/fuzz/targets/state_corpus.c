/* Writes the seeds of fuzz_state: the state of every optimizer after three steps, without checksums, since a change
 * would not get past them; and one with. Or checks that seeds are still loaded: one that is refused at its first line
 * leads a fuzzer nowhere, and nobody would notice.
 *
 *     state_corpus FOLDER
 *     state_corpus --check FOLDER SPARE_FILE */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

static void save(stateful *s, const char *path, int32_t checksums)
{
    tch_checkpoint_writer *writer;
    must(tch_checkpoint_writer_create(&writer));
    must(stateful_save(s, writer));
    must(tch_checkpoint_writer_set_checksums(writer, checksums));
    must(tch_checkpoint_writer_save(writer, NULL, path));
    tch_checkpoint_writer_destroy(writer);
}

static unsigned char bytes[65536];

static size_t read_all(const char *path)
{
    FILE *file = fopen(path, "rb");
    size_t count = file == NULL ? 0 : fread(bytes, 1, sizeof bytes, file);
    if (file == NULL || count < 8 || count == sizeof bytes || fclose(file) != 0) {
        fprintf(stderr, "%s cannot be read\n", path);
        exit(1);
    }
    return count;
}

static void write_all(const char *path, const unsigned char *first, size_t first_count, const unsigned char *rest,
                      size_t count)
{
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(first, 1, first_count, file) != first_count || fwrite(rest, 1, count, file) != count ||
        fclose(file) != 0) {
        fprintf(stderr, "%s cannot be written\n", path);
        exit(1);
    }
}

/* The file again, behind its kind and the number of bytes of its tensors. */
static void put_before(const char *path, int kind)
{
    size_t count = read_all(path);
    size_t data = count - 8 - ((size_t)bytes[0] | (size_t)bytes[1] << 8);
    const unsigned char first[] = {(unsigned char)kind, (unsigned char)data, (unsigned char)(data >> 8)};
    write_all(path, first, sizeof first, bytes, count);
}

static void write_seed(stateful *s, const char *path, int kind)
{
    for (int i = 0; i < 3; i++) {
        must(stateful_step(s));
    }
    save(s, path, kind == TCH_OPTIM_LION);
    put_before(path, kind);
}

static void check_seed(stateful *s, const char *path, int kind, const char *spare)
{
    tch_checkpoint *checkpoint = NULL;
    size_t count = read_all(path);
    if (bytes[0] != kind) {
        fprintf(stderr, "%s is of kind %d, expected %d: run make_corpus.py\n", path, bytes[0], kind);
        exit(1);
    }
    write_all(spare, bytes, 0, bytes + 3, count - 3);
    must(tch_checkpoint_open(spare, &checkpoint));
    must(stateful_load(s, checkpoint));
    tch_checkpoint_close(checkpoint);
}

int main(int argc, char **argv)
{
    tch_context *context;
    static stateful s;
    bool checks = argc == 4 && strcmp(argv[1], "--check") == 0;
    if (argc != 2 && !checks) {
        fprintf(stderr, "state_corpus FOLDER, or state_corpus --check FOLDER SPARE_FILE\n");
        return 1;
    }
    must(tch_context_create("cpu", &context));
    for (int kind = 0; kind < STATE_KINDS; kind++) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", argv[checks ? 2 : 1], stateful_name(kind));
        must(stateful_make(context, kind, STATE_SMALL, &s));
        if (checks) {
            check_seed(&s, path, kind, argv[3]);
        } else {
            write_seed(&s, path, kind);
        }
        stateful_end(&s);
    }
    tch_context_destroy(context);
    return 0;
}

/* Writes the seeds of fuzz_state: the state of every optimizer after three steps, without checksums, since a change
 * would not get past them; and one with.
 *
 *     state_corpus FOLDER */
#include <stdio.h>
#include <stdlib.h>

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

/* The file again, behind its kind and the number of bytes of its tensors. */
static void put_before(const char *path, int kind)
{
    static unsigned char bytes[65536];
    FILE *file = fopen(path, "rb");
    size_t count = file == NULL ? 0 : fread(bytes, 1, sizeof bytes, file);
    size_t data = count - 8 - ((size_t)bytes[0] | (size_t)bytes[1] << 8);
    const unsigned char first[] = {(unsigned char)kind, (unsigned char)data, (unsigned char)(data >> 8)};
    if (file == NULL || count < 8 || count == sizeof bytes || freopen(path, "wb", file) == NULL ||
        fwrite(first, 1, sizeof first, file) != sizeof first || fwrite(bytes, 1, count, file) != count ||
        fclose(file) != 0) {
        fprintf(stderr, "%s cannot be written\n", path);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    tch_context *context;
    static stateful s;
    must(tch_context_create("cpu", &context));
    for (int kind = 0; argc > 1 && kind < STATE_KINDS; kind++) {
        char path[1024];
        must(stateful_make(context, kind, &s));
        for (int i = 0; i < 3; i++) {
            must(stateful_step(&s));
        }
        snprintf(path, sizeof path, "%s/%s", argv[1],
                 kind == STATE_KFAC ? "kfac" : tch_optim_kind_name((tch_optim_kind)kind));
        save(&s, path, kind == TCH_OPTIM_LION);
        put_before(path, kind);
        stateful_end(&s);
    }
    tch_context_destroy(context);
    return argc > 1 ? 0 : 1;
}

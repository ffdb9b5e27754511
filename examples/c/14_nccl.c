/* Processes that share an optimizer over NCCL, one for each GPU. Every process has the whole model and the same
 * gradient (after an all-reduce of its own, in a real program); Muon's matrices are divided among them. They save one
 * checkpoint together in the middle, train on, go back to it and train again: the bits are equal.
 *
 *     for rank in 0 1 2 3; do
 *         RANK=$rank WORLD_SIZE=4 CUDA_VISIBLE_DEVICES=$rank example_14_nccl shared-folder &
 *     done; wait
 *
 * Without RANK and WORLD_SIZE it is one process. The first one writes NCCL's id into a file of the folder, and the
 * others wait for it: each run wants an empty folder. Where there is no GPU, or no NCCL, it says so and does
 * nothing. */
#include <string.h>
#include <time.h>

#include "example.h"

enum { ROWS = 256, COLS = 128, MATRICES = 4, STEPS = 10, WAIT_S = 60 };

static int from_environment(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? atoi(text) : otherwise;
}

/* --- meeting ----------------------------------------------------------------------------------------------------- */

/* Under another name first, so that no rank reads half of it. */
static void publish_id(const char *path, const char id[TCH_NCCL_ID_BYTES])
{
    char temporary[1100];
    snprintf(temporary, sizeof temporary, "%s.part", path);
    FILE *file = fopen(temporary, "wb");
    if (file == NULL || fwrite(id, 1, TCH_NCCL_ID_BYTES, file) != TCH_NCCL_ID_BYTES || fclose(file) != 0 ||
        rename(temporary, path) != 0) {
        fprintf(stderr, "the id of the group cannot be written to %s\n", path);
        exit(1);
    }
}

static void wait_for_id(const char *path, char id[TCH_NCCL_ID_BYTES])
{
    for (int tries = 0; tries < WAIT_S * 10; tries++) {
        FILE *file = fopen(path, "rb");
        if (file != NULL) {
            size_t got = fread(id, 1, TCH_NCCL_ID_BYTES, file);
            fclose(file);
            if (got == TCH_NCCL_ID_BYTES) {
                return;
            }
        }
        nanosleep(&(struct timespec){0, 100000000}, NULL);
    }
    fprintf(stderr, "%s did not come within %d s\n", path, WAIT_S);
    exit(1);
}

/* NULL where there is no NCCL. A rank that is gone ends the others after the time that is set here. */
static tch_comm *meet(tch_context *context, const char *folder, int rank, int size)
{
    char path[1024];
    char id[TCH_NCCL_ID_BYTES];
    tch_comm *comm = NULL;
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.timeout_s = WAIT_S;
    tch_status status = tch_comm_nccl_id(id);
    if (status == TCH_ERR_UNAVAILABLE) {
        return NULL;
    }
    must(status);
    snprintf(path, sizeof path, "%s/nccl-id", folder);
    if (rank == 0 && size > 1) {
        publish_id(path, id);
    } else if (size > 1) {
        wait_for_id(path, id);
    }
    must(tch_comm_create_nccl_with(context, id, rank, size, &config, &comm));
    return comm;
}

/* --- a small model ----------------------------------------------------------------------------------------------- */

typedef struct model {
    tch_context *context;
    tch_comm *comm;
    tch_tensor *weights[MATRICES], *gradients[MATRICES];
    char names[MATRICES][16];
    tch_optimizer *optimizer;
    float *numbers; /* of one matrix */
} model;

static int64_t shape[2] = {ROWS, COLS};

/* Numbers between -1 and 1, the same on every rank. */
static void fill(model *m, tch_tensor *tensor, int matrix, int step)
{
    tch_tensor host = tch_tensor_view(m->numbers, TCH_FLOAT32, 2, shape);
    for (uint64_t i = 0; i < ROWS * COLS; i++) {
        uint64_t x = i * 2654435761u + (uint64_t)(matrix * 97 + step) * 40503u + 12345u;
        x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
        m->numbers[i] = (float)(x >> 40) / 8388608.0f - 1.0f;
    }
    must(tch_tensor_copy(m->context, tensor, &host));
}

static void open_model(model *m)
{
    tch_parameter entries[MATRICES];
    m->numbers = malloc(sizeof(float) * ROWS * COLS);
    for (int i = 0; i < MATRICES; i++) {
        m->weights[i] = create_tensor(m->context, TCH_FLOAT32, 2, shape);
        m->gradients[i] = create_tensor(m->context, TCH_FLOAT32, 2, shape);
        fill(m, m->weights[i], i, 0);
        snprintf(m->names[i], sizeof m->names[i], "layer%d.weight", i);
        entries[i] = (tch_parameter){.tensor = m->weights[i], .name = m->names[i]};
    }
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_MUON);
    config.weight_decay = 0.1;
    tch_optim_setup setup = TCH_OPTIM_SETUP_INIT;
    setup.comm = m->comm;
    must(tch_optimizer_create(m->context, &config, &setup, MATRICES, entries, &m->optimizer));
}

static void train(model *m, int first, int last)
{
    const tch_tensor *gradients[MATRICES];
    for (int step = first; step <= last; step++) {
        for (int i = 0; i < MATRICES; i++) {
            fill(m, m->gradients[i], i, step);
            gradients[i] = m->gradients[i];
        }
        must(tch_optimizer_step(m->optimizer, MATRICES, gradients));
    }
}

/* Every rank has all weights, and saves some of them; of the optimizer each saves what it owns. */
static void save(model *m, const char *path)
{
    tch_checkpoint_writer *writer;
    must(tch_checkpoint_writer_create(&writer));
    for (int i = tch_comm_rank(m->comm); i < MATRICES; i += tch_comm_size(m->comm)) {
        must(tch_checkpoint_writer_add(writer, m->names[i], m->weights[i]));
    }
    must(tch_optimizer_save(m->optimizer, writer, "optimizer"));
    must(tch_checkpoint_writer_save_sharded(writer, m->context, m->comm, path));
    tch_checkpoint_writer_destroy(writer);
}

static void load(model *m, const char *path)
{
    tch_checkpoint *checkpoint;
    must(tch_checkpoint_open(path, &checkpoint));
    must(tch_optimizer_load(m->optimizer, checkpoint, "optimizer"));
    for (int i = 0; i < MATRICES; i++) {
        must(tch_checkpoint_read(checkpoint, m->context, m->names[i], m->weights[i]));
    }
    tch_checkpoint_close(checkpoint);
}

static void take_out(model *m, float *values)
{
    for (int i = 0; i < MATRICES; i++) {
        tch_tensor host = tch_tensor_view(values + (size_t)i * ROWS * COLS, TCH_FLOAT32, 2, shape);
        must(tch_tensor_copy(m->context, &host, m->weights[i]));
    }
}

static void close_model(model *m)
{
    tch_optimizer_destroy(m->optimizer);
    for (int i = 0; i < MATRICES; i++) {
        tch_tensor_destroy(m->weights[i]);
        tch_tensor_destroy(m->gradients[i]);
    }
    free(m->numbers);
}

/* --- all of it --------------------------------------------------------------------------------------------------- */

static int run(model *m, const char *folder)
{
    size_t bytes = sizeof(float) * MATRICES * ROWS * COLS;
    float *first = malloc(bytes);
    float *again = malloc(bytes);
    char path[1024];
    snprintf(path, sizeof path, "%s/14_nccl.safetensors.index.json", folder);
    open_model(m);
    train(m, 1, STEPS / 2);
    save(m, path);
    train(m, STEPS / 2 + 1, STEPS);
    take_out(m, first);
    load(m, path);
    train(m, STEPS / 2 + 1, STEPS);
    take_out(m, again);
    int same = memcmp(first, again, bytes) == 0;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    must(tch_optimizer_get_memory(m->optimizer, &memory));
    printf("rank %d of %d: %lld of %d matrices are its own; saved to %s; from the checkpoint on: %s\n",
           tch_comm_rank(m->comm), tch_comm_size(m->comm), (long long)memory.blocks, MATRICES, path,
           same ? "bitwise identical" : "DIFFERENT");
    close_model(m);
    free(first);
    free(again);
    return same ? 0 : 1;
}

int main(int argc, char **argv)
{
    model m = {0};
    const char *folder = argc > 1 ? argv[1] : ".";
    if (tch_context_create("cuda", &m.context) != TCH_OK) {
        printf("skipped: there is no GPU to use: %s\n", tch_last_error());
        return 0;
    }
    m.comm = meet(m.context, folder, from_environment("RANK", 0), from_environment("WORLD_SIZE", 1));
    if (m.comm == NULL) {
        printf("skipped: %s\n", tch_last_error());
        tch_context_destroy(m.context);
        return 0;
    }
    int result = run(&m, folder);
    tch_comm_destroy(m.comm);
    tch_context_destroy(m.context);
    return result;
}

/* Processes that share an optimizer over MPI. Each has some rows of every matrix; Shampoo's blocks are divided among
 * them. At the end the first process puts the parameters together and takes the same steps alone: the bits are equal.
 *
 *     mpiexec -n 4 example_13_mpi
 *
 * With the path of a checkpoint's index it saves in the middle; where the checkpoint is there already, it goes on from
 * it, with any number of processes:
 *
 *     mpiexec -n 4 example_13_mpi run.safetensors.index.json
 *     mpiexec -n 3 example_13_mpi run.safetensors.index.json */
#include <stdio.h>
#include <stdlib.h>

#include <mpi.h>

#include <torchium/comm_mpi.h>
#include <torchium/torchium.h>

enum { ROWS = 96, COLS = 64, STEPS = 10, MATRICES = 2 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        tch_status status_ = (call);                                                                                   \
        if (status_ != TCH_OK) {                                                                                       \
            fprintf(stderr, "%s: %s\n", tch_status_name(status_), tch_last_error());                                   \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                                              \
        }                                                                                                              \
    } while (0)

/* A number between -1 and 1 for every element, matrix and step. */
static float number(int64_t element, int matrix, int step)
{
    uint64_t x = (uint64_t)element * 2654435761u + (uint64_t)(matrix * 97 + step) * 40503u + 12345u;
    x = (x ^ (x >> 29)) * 0xBF58476D1CE4E5B9u;
    return (float)(x >> 40) / 8388608.0F - 1.0F;
}

static void fill(float *values, int64_t first_row, int64_t rows, int matrix, int step)
{
    for (int64_t i = 0; i < rows * COLS; i++) {
        values[i] = number(first_row * COLS + i, matrix, step);
    }
}

/* What one process has: rows [first, first + rows) of every matrix. */
typedef struct part {
    tch_context *context;
    tch_comm *comm; /* NULL: the process is alone */
    int64_t first, rows;
    tch_optimizer *optimizer;
    tch_tensor tensors[MATRICES];
} part;

static const char *const names[MATRICES] = {"first", "second"};
static const int64_t whole[2] = {ROWS, COLS};

/* Every process adds its rows of the parameters and its part of the optimizer's state; then all save together. */
static void save(part *p, const char *path, int step)
{
    tch_checkpoint_writer *writer;
    int64_t start[2] = {p->first, 0};
    TRY(tch_checkpoint_writer_create(&writer));
    for (int m = 0; m < MATRICES && p->rows > 0; m++) {
        TRY(tch_checkpoint_writer_add_shard(writer, names[m], &p->tensors[m], whole, start));
    }
    TRY(tch_optimizer_save(p->optimizer, writer, "optimizer"));
    TRY(tch_checkpoint_writer_set_integer(writer, "step", step));
    TRY(tch_checkpoint_writer_save_sharded(writer, p->context, p->comm, path));
    tch_checkpoint_writer_destroy(writer);
}

/* Each reads the rows and the blocks that are its own now, from whichever files have them. */
static int load(part *p, const char *path)
{
    tch_checkpoint *checkpoint;
    int64_t step;
    int64_t start[2] = {p->first, 0};
    TRY(tch_checkpoint_open(path, &checkpoint));
    TRY(tch_optimizer_load(p->optimizer, checkpoint, "optimizer"));
    for (int m = 0; m < MATRICES; m++) {
        TRY(tch_checkpoint_read_shard(checkpoint, p->context, names[m], whole, start, &p->tensors[m]));
    }
    TRY(tch_checkpoint_integer(checkpoint, "step", &step));
    tch_checkpoint_close(checkpoint);
    return (int)step;
}

static int exists(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file != NULL) {
        fclose(file);
    }
    return file != NULL;
}

/* With a group, the other processes have the other rows. */
static void train(part p, const tch_placement *placements, float *parameters[MATRICES], const char *path)
{
    int64_t shape[2] = {p.rows, COLS};
    tch_tensor gradients[MATRICES];
    const tch_tensor *given[MATRICES];
    tch_parameter entries[MATRICES];
    for (int m = 0; m < MATRICES; m++) {
        float *gradient = malloc((size_t)(p.rows * COLS + 1) * sizeof *gradient);
        fill(parameters[m], p.first, p.rows, m, 0);
        p.tensors[m] = tch_tensor_view(parameters[m], TCH_FLOAT32, 2, shape);
        gradients[m] = tch_tensor_view(gradient, TCH_FLOAT32, 2, shape);
        given[m] = &gradients[m];
        entries[m] = (tch_parameter){.tensor = &p.tensors[m], .name = names[m]};
    }
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_SHAMPOO);
    config.shampoo.max_preconditioner_dim = 32;
    config.shampoo.precondition_frequency = 2;
    tch_optim_setup setup = TCH_OPTIM_SETUP_INIT;
    setup.comm = p.comm;
    setup.placements = placements;
    TRY(tch_optimizer_create(p.context, &config, &setup, MATRICES, entries, &p.optimizer));
    int done = path != NULL && exists(path) ? load(&p, path) : 0;
    for (int step = done + 1; step <= STEPS; step++) {
        for (int m = 0; m < MATRICES; m++) {
            fill(gradients[m].data, p.first, p.rows, m, step);
        }
        TRY(tch_optimizer_step(p.optimizer, MATRICES, given));
        if (path != NULL && step == STEPS / 2) {
            save(&p, path, step);
        }
    }
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    TRY(tch_optimizer_get_memory(p.optimizer, &memory));
    printf("rank %d: steps %d to %d, rows %lld to %lld, %lld of the blocks, %.0f kB of state\n",
           p.comm == NULL ? -1 : tch_comm_rank(p.comm), done + 1, STEPS, (long long)p.first,
           (long long)(p.first + p.rows), (long long)memory.blocks, (double)memory.state / 1e3);
    tch_optimizer_destroy(p.optimizer);
    for (int m = 0; m < MATRICES; m++) {
        free(gradients[m].data);
    }
}

int main(int argc, char **argv)
{
    tch_shard shards[64];
    tch_placement placements[MATRICES];
    int counts[64], starts[64];
    MPI_Init(&argc, &argv);
    tch_comm *comm = NULL;
    tch_context *context = NULL;
    TRY(tch_comm_create_mpi(MPI_COMM_WORLD, &comm));
    TRY(tch_context_create("cpu", &context));
    int32_t size = tch_comm_size(comm) < 64 ? tch_comm_size(comm) : 64;
    int32_t rank = tch_comm_rank(comm);
    int64_t each = (ROWS + size - 1) / size;
    for (int32_t r = 0; r < size; r++) {
        int64_t first = r * each < ROWS ? r * each : ROWS;
        int64_t rows = ROWS - first < each ? ROWS - first : each;
        shards[r] = (tch_shard){.rank = r, .start = {first, 0}, .size = {rows, COLS}};
        counts[r] = (int)(rows * COLS);
        starts[r] = (int)(first * COLS);
    }
    for (int m = 0; m < MATRICES; m++) {
        placements[m] = (tch_placement){sizeof placements[m], 2, whole, size, shards};
    }
    float *mine[MATRICES], *together[MATRICES], *alone[MATRICES];
    for (int m = 0; m < MATRICES; m++) {
        mine[m] = malloc((size_t)(counts[rank] + 1) * sizeof(float));
        together[m] = malloc(sizeof(float) * ROWS * COLS);
        alone[m] = malloc(sizeof(float) * ROWS * COLS);
    }
    part own = {.context = context, .comm = comm, .first = shards[rank].start[0], .rows = shards[rank].size[0]};
    train(own, placements, mine, argc > 1 ? argv[1] : NULL);
    int same = 1;
    for (int m = 0; m < MATRICES; m++) {
        MPI_Gatherv(mine[m], counts[rank], MPI_FLOAT, together[m], counts, starts, MPI_FLOAT, 0, MPI_COMM_WORLD);
    }
    if (rank == 0) {
        train((part){.context = context, .rows = ROWS}, NULL, alone, NULL);
        for (int m = 0; m < MATRICES; m++) {
            for (int64_t i = 0; i < ROWS * COLS; i++) {
                same = same && together[m][i] == alone[m][i];
            }
        }
        printf("%d processes and one: %s\n", size, same ? "bitwise identical" : "DIFFERENT");
    }
    for (int m = 0; m < MATRICES; m++) {
        free(mine[m]);
        free(together[m]);
        free(alone[m]);
    }
    tch_context_destroy(context);
    tch_comm_destroy(comm);
    MPI_Finalize();
    return same ? 0 : 1;
}

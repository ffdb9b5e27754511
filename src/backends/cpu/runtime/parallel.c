/* Threading of the CPU backend: across the matrices of a batch or inside one, never both. */
#include <omp.h>

#include "backends/cpu/cpu.h"

/* Below this many operations a parallel region does not pay. It starts in 1 microsecond on a quiet machine, but where
 * another program occupied one of two cores it lasted 8 milliseconds, a scheduler time slice, however little work it
 * had. */
#define WORTH_A_REGION 4e5

/* OpenMP's thread count belongs to the calling thread, and an OpenMP BLAS follows it: it is set for the duration of an
 * operation. */
typedef struct thread_setting {
    int before;
} thread_setting;

static thread_setting set_threads(const tchi_cpu_state *state)
{
    thread_setting setting = {omp_get_max_threads()};
    if (state->threads != setting.before) {
        omp_set_num_threads(state->threads);
    }
    return setting;
}

static void restore_threads(thread_setting setting)
{
    if (omp_get_max_threads() != setting.before) {
        omp_set_num_threads(setting.before);
    }
}

int64_t tchi_cpu_slots(const tchi_cpu_state *state, int64_t batch)
{
    return batch < state->threads ? (batch > 0 ? 1 : 0) : state->threads;
}

void tchi_cpu_for_each(const tchi_cpu_state *state, int64_t batch, double work, tchi_cpu_task task, void *argument)
{
    thread_setting setting = set_threads(state);
    int threads = state->threads;
    int64_t together = threads > 1 && !omp_in_parallel() ? batch - batch % threads : 0;
    if (work * (double)together < WORTH_A_REGION) {
        together = 0;
    }
    if (together > 0) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t i = 0; i < together; i++) {
            task(argument, i, omp_get_thread_num());
        }
    }
    for (int64_t i = together; i < batch; i++) {
        task(argument, i, 0);
    }
    restore_threads(setting);
}

void tchi_cpu_split(const tchi_cpu_state *state, int64_t count, double work,
                    void (*body)(void *argument, int64_t from, int64_t to), void *argument)
{
    thread_setting setting = set_threads(state);
    int threads = state->threads;
    if (threads < 2 || omp_in_parallel() || work < WORTH_A_REGION || count < 2) {
        body(argument, 0, count);
    } else {
#pragma omp parallel num_threads(threads)
        {
            int64_t parts = omp_get_num_threads();
            int64_t part = omp_get_thread_num();
            body(argument, count * part / parts, count * (part + 1) / parts);
        }
    }
    restore_threads(setting);
}

typedef struct rows_ctx {
    int64_t rows; /* of a matrix: rows are numbered across the batch */
    tchi_cpu_row_task body;
    const void *argument;
} rows_ctx;

static void walk_rows(void *argument, int64_t from, int64_t to)
{
    const rows_ctx *ctx = argument;
    for (int64_t r = from; r < to; r++) {
        ctx->body(ctx->argument, r / ctx->rows, r % ctx->rows);
    }
}

void tchi_cpu_for_rows(const tchi_cpu_state *state, const tch_matrices *shape, double work, tchi_cpu_row_task body,
                       const void *argument)
{
    rows_ctx ctx = {shape->rows, body, argument};
    double elements = (double)shape->batch * (double)shape->rows * (double)shape->cols;
    if (elements > 0) {
        tchi_cpu_split(state, shape->batch * shape->rows, work * elements, walk_rows, &ctx);
    }
}

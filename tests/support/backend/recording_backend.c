#include "recording_backend.h"

#include "core/status.h"
#include "support/testing.h"
#include "table_copy.h"

enum { MOST_FILLS = 16 };

/* Fills with one number. */
typedef struct journal {
    int count;
    tch_array to[MOST_FILLS];
    double value[MOST_FILLS];
} journal;

recording_figures recorded;
recording_faults recording_fault;

static const tch_backend *real;
static table_copy table;
static journal *under_way;

static tch_status fill(void *state, const tch_array *dst, double value)
{
    journal *j = under_way;
    if (j == NULL) {
        return real->matrix->fill(state, dst, value);
    }
    CHECK(dst->rank == 0 && j->count < MOST_FILLS, "more than a journal has room for");
    j->to[j->count] = *dst;
    j->value[j->count++] = value;
    return TCH_OK;
}

static void release(void *state, void *recording)
{
    recorded.released++;
    free(recording);
}

static tch_status record(void *state, tch_status (*work)(void *argument), void *argument, void **recording,
                         int64_t *kernels)
{
    *recording = NULL;
    recorded.begun++;
    if (recording_fault.begin_fails) {
        return TCH_OK;
    }
    journal *j = under_way = test_keep(test_alloc(sizeof *under_way));
    *j = (journal){0};
    tch_status status = work(argument);
    under_way = NULL;
    recorded.operations = j->count;
    *kernels = j->count;
    if (recording_fault.end_gives_nothing) {
        free(j);
        return TCH_OK;
    }
    recorded.kept++;
    if (status != TCH_OK || recording_fault.end_fails) {
        release(state, j);
        return recording_fault.end_fails ? tchi_fail(TCH_ERR_BACKEND, "the stream is lost") : TCH_OK;
    }
    *recording = j;
    return TCH_OK;
}

static tch_status replay(void *state, void *recording, int32_t *begun)
{
    const journal *j = recording;
    recorded.replayed++;
    *begun = recording_fault.replay_breaks;
    if (recording_fault.replay_fails || recording_fault.replay_breaks) {
        return tchi_fail(TCH_ERR_BACKEND, "no replay");
    }
    *begun = 1;
    for (int i = 0; i < j->count; i++) {
        TCHI_TRY(real->matrix->fill(state, &j->to[i], j->value[i]));
    }
    return TCH_OK;
}

static int64_t bytes_of(void *state, int64_t kernels)
{
    return recording_fault.impossible || under_way != NULL ? -1 : 1000 * kernels;
}

void recording_backend_install(tch_context *context)
{
    recorded = (recording_figures){0};
    recording_fault = (recording_faults){0};
    real = context->backend;
    table_copy_make(&table, real);
    table.matrix.fill = fill;
    table.recording = (tch_recording_ops){bytes_of, record, replay, release};
    table.backend.recording = &table.recording;
    context->backend = &table.backend;
}

void recording_backend_remove(tch_context *context)
{
    context->backend = real;
}

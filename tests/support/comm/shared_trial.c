/* See shared_trial.h. */
#include "shared_trial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/optim/optim_defaults.h"
#include "support/testing.h"

const placed_shape shared_model[SHARED_PARAMETERS] = {
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {40, 9}},
    {.ndim = 1, .size = {31}},
    {.ndim = 4, .size = {10, 3, 3, 2}},
    {.ndim = 2, .size = {33, 6}, .elementwise = 1},
    {.ndim = 3, .size = {6, 5, 8}},
    {.ndim = 2, .size = {1, 12}},
    {.ndim = 2, .size = {14, 14}},
    {.ndim = 3, .size = {6, 5, 8}, .batch_dims = 1},
    {.ndim = 2, .size = {28, 11}, .cut_count = 3, .cuts = {14, 7, 7}},
};

shared_training shared_training_of(const placed_numbers *numbers, const tch_optim_config *config, tch_dtype dtype)
{
    return (shared_training){.numbers = numbers,
                             .config = *config,
                             .dtype = dtype,
                             .place = placed_replicated,
                             .missing = 4,
                             .bad_rank = -1,
                             .wrong_rank = -1,
                             .lacking_rank = -1};
}

tch_optim_config shared_config(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.01;
    c.weight_decay = 0.1;
    c.precondition_frequency = 2;
    c.max_preconditioner_dim = 16;
    c.root_tolerance = 1e-5;
    c.precision = TCH_PRECISION_HIGHEST;
    return c;
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

static tch_status take_step(const shared_training *t, placed_model *m, tch_context *context, tch_optimizer *optimizer,
                            int32_t rank, int32_t step)
{
    const tch_tensor *gradients[SHARED_PARAMETERS];
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        double values[PLACED_ELEMENTS];
        placed_take(m, i, t->numbers->gradient[step][i], values);
        if (t->bad_rank == rank && t->bad_step == step && i == 2) {
            values[0] = NAN;
        }
        placed_move(context, m->gradient[i], values, true);
        bool lacks = (i == t->missing && step == 2) || (rank == t->lacking_rank && step == 1 && i == 1);
        bool wrong = rank == t->wrong_rank && step == 1 && i == 1;
        gradients[i] = lacks ? NULL : m->gradient[wrong ? 2 : i];
    }
    return tch_optimizer_step(optimizer, SHARED_PARAMETERS, gradients);
}

static void sum_momentum(tch_context *context, tch_optimizer *optimizer, double *sums)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        assert_int_equal(tch_optimizer_get_state(optimizer, i, &s), TCH_OK);
        size_t length = strlen(s.name);
        if (length > 15 && strcmp(s.name + length - 15, "momentum_buffer") == 0) {
            int64_t count = tch_tensor_numel(s.tensor);
            double *values = test_alloc((size_t)(count + 1) * sizeof *values);
            placed_move(context, s.tensor, values, false);
            for (int64_t k = 0; k < count; k++) {
                sums[s.parameter] += values[k] * values[k];
            }
            test_drop(values);
        }
    }
}

/* What is left when the steps are over. */
static void look_at(shared_training *t, const placed_model *m, tch_context *context, tch_optimizer *optimizer,
                    int32_t rank)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (t->end != NULL) {
        placed_read(m, context, t->end);
    }
    if (t->momentum != NULL) {
        sum_momentum(context, optimizer, t->momentum[rank]);
    }
    if (optimizer != NULL && tch_optimizer_get_memory(optimizer, &memory) == TCH_OK) {
        t->state_bytes[rank] = memory.state;
    }
}

void shared_train(tch_comm *comm, int32_t rank, void *training)
{
    shared_training *t = training;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    placed_model *m = test_alloc(sizeof *m);
    placed_config config = {shared_model, SHARED_PARAMETERS, t->place, t->dtype, "p", t->numbers->start};
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (t->group != NULL) {
        pretend_use(t->group, rank, context);
    }
    placed_open(m, &config, context, rank, comm == NULL ? 1 : tch_comm_size(comm));
    tch_status status = tch_optimizer_create_shared(context, &t->config, comm, SHARED_PARAMETERS, m->entries,
                                                    m->placement, NULL, &optimizer);
    for (int32_t s = 0; s < SHARED_STEPS && status == TCH_OK; s++) {
        status = take_step(t, m, context, optimizer, rank, s);
    }
    t->statuses[rank] = status;
    snprintf(t->messages[rank], sizeof t->messages[rank], "%s", status == TCH_OK ? "" : tch_last_error());
    look_at(t, m, context, optimizer, rank);
    tch_optimizer_destroy(optimizer);
    placed_close(m);
    test_drop(m);
    tch_context_destroy(context);
}

/* --- all ranks --------------------------------------------------------------------------------------------------- */

void shared_run(shared_training *training, int32_t ranks, placed_how place, bool late)
{
    pretend_group group;
    pretend_open(&group, ranks);
    group.late = late;
    group.bucket_bytes = ranks % 2 == 1 ? 300 : 0;         /* a bucket for nearly every block batch, or one */
    group.span_bytes = ranks == 2 || ranks == 3 ? 100 : 0; /* the state of vectors is divided too, or not */
    training->group = &group;
    training->place = place;
    pretend_run(&group, shared_train, training);
    for (int32_t r = 0; r < ranks; r++) {
        if (training->statuses[r] != TCH_OK) {
            print_message("rank %d: %s\n", r, training->messages[r]);
        }
    }
    for (int32_t r = 0; r < ranks; r++) {
        CHECK(training->statuses[r] == TCH_OK, "rank %d: %s", r, training->messages[r]);
    }
    CHECK(group.mismatches == 0, "ranks disagree on %lld counts", (long long)group.mismatches);
    pretend_close(&group);
}

int shared_open(void **state)
{
    placed_numbers *numbers = test_keep(test_alloc(sizeof *numbers));
    placed_numbers_open(numbers, 19, SHARED_PARAMETERS, shared_model, SHARED_STEPS);
    *state = numbers;
    return 0;
}

int shared_close(void **state)
{
    placed_numbers_close(*state);
    free(*state);
    return 0;
}

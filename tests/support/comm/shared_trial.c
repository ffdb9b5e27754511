#include "shared_trial.h"

#include "support/optim/optim_defaults.h"
#include "support/testing.h"

const placed_shape shared_model[SHARED_PARAMETERS] = {
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {40, 100}},
    {.ndim = 1, .size = {31}},
    {.ndim = 4, .size = {10, 3, 3, 2}},
    {.ndim = 2, .size = {33, 6}, .elementwise = 1},
    {.ndim = 3, .size = {6, 5, 8}},
    {.ndim = 2, .size = {1, 12}},
    {.ndim = 2, .size = {24, 256}}, /* moments in less memory, as in the last */
    {.ndim = 3, .size = {6, 5, 8}, .batch_dims = 1},
    {.ndim = 2, .size = {28, 11}, .cut_count = 3, .cuts = {14, 7, 7}},
    {.ndim = 2, .size = {36, 128}, .elementwise = 1},
};

shared_training shared_training_of(const placed_numbers *numbers, const tch_optim_config *config, tch_dtype dtype)
{
    return (shared_training){.numbers = numbers,
                             .config = *config,
                             .dtype = dtype,
                             .place = placed_replicated,
                             .missing = 4,
                             .steps = SHARED_STEPS,
                             .bad_rank = -1,
                             .wrong_rank = -1,
                             .lacking_rank = -1,
                             .other_rank = -1,
                             .blind_rank = -1,
                             .poor_rank = -1};
}

tch_optim_config shared_config(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.01;
    c.weight_decay = 0.1;
    c.shampoo.precondition_frequency = 2;
    c.shampoo.max_preconditioner_dim = 16;
    c.numerics.tolerance = 1e-5;
    c.numerics.precision = TCH_PRECISION_HIGHEST;
    return c;
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

/* With loss scaling at every other step. */
static tch_status step_with_scale(tch_context *context, tch_optimizer *optimizer, const tch_tensor *const *gradients,
                                  double scale)
{
    tch_tensor *grad_scale = NULL;
    if (scale == 1.0) {
        return tch_optimizer_step(optimizer, SHARED_PARAMETERS, gradients);
    }
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 0, NULL, TCH_CONTIGUOUS, &grad_scale));
    CHECK_OK(tch_tensor_fill(context, grad_scale, scale));
    tch_status status = tch_optimizer_step_scaled(optimizer, SHARED_PARAMETERS, gradients, grad_scale, NULL);
    tch_tensor_destroy(grad_scale);
    return status;
}

static tch_status take_step(const shared_training *t, placed_model *m, tch_context *context, tch_optimizer *optimizer,
                            int32_t rank, int32_t step)
{
    const tch_tensor *gradients[SHARED_PARAMETERS];
    double scale = step % 2 == 1 ? 4.0 : 1.0;
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        double values[PLACED_ELEMENTS];
        placed_take(m, i, t->numbers->gradient[step][i], values);
        for (int64_t k = 0; k < tch_tensor_numel(m->gradient[i]); k++) {
            values[k] *= scale;
        }
        if (t->bad_rank == rank && t->bad_step == step && i == 2) {
            values[0] = NAN;
        }
        placed_move(context, m->gradient[i], values, true);
        bool lacks = (i == t->missing && step == 2) || (rank == t->lacking_rank && step == 1 && i == 1) ||
                     (t->late && step == 0 && i == 1);
        bool wrong = rank == t->wrong_rank && step == 1 && i == 1;
        gradients[i] = lacks ? NULL : m->gradient[wrong ? 2 : i];
    }
    tch_context_set_workspace_limit(context, rank == t->poor_rank && step == 1 ? 1 : 0);
    tch_status status = step_with_scale(context, optimizer, gradients, scale);
    tch_context_set_workspace_limit(context, 0);
    return status;
}

/* Writes the results after the last step. */
static void look_at(shared_training *t, const placed_model *m, tch_context *context, tch_optimizer *optimizer,
                    int32_t rank)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (t->end != NULL) {
        placed_read(m, context, t->end);
    }
    if (optimizer != NULL && tch_optimizer_get_memory(optimizer, &memory) == TCH_OK) {
        t->state_bytes[rank] = memory.state;
    }
}

/* --- checkpoints ------------------------------------------------------------------------------------------------- */

/* This rank's parameters: a replicated shard is saved by all its ranks, under the same name. */
static tch_status save_model(const placed_model *m, tch_checkpoint_writer *writer)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < SHARED_PARAMETERS && status == TCH_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "model/%d", i);
        if (tch_tensor_numel(m->parameter[i]) > 0) {
            tch_tensor part = placed_part(m, i);
            status = tch_checkpoint_writer_add_shard(writer, name, &part, shared_model[i].size, m->own[i].start);
        }
    }
    return status;
}

tch_status shared_save(const shared_training *t, const placed_model *m, tch_context *context, tch_comm *comm,
                       tch_optimizer *optimizer)
{
    tch_checkpoint_writer *writer = NULL;
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : save_model(m, writer);
    status = status != TCH_OK ? status : tch_optimizer_save(optimizer, writer, "optimizer");
    if (strstr(t->to, ".index.json") == NULL) {
        status = status != TCH_OK ? status : tch_checkpoint_writer_save(writer, context, t->to);
    } else if (status == TCH_OK || comm != NULL) {
        status = tch_checkpoint_writer_save_sharded(status == TCH_OK ? writer : NULL, context, comm, t->to);
    }
    tch_checkpoint_writer_destroy(writer);
    return status;
}

/* The optimizer comes first: its call is collective. */
tch_status shared_load(const shared_training *t, placed_model *m, tch_context *context, tch_optimizer *optimizer,
                       int32_t rank)
{
    tch_checkpoint *c = NULL;
    tch_status status = rank == t->blind_rank ? TCH_ERR_IO : tch_checkpoint_open(t->from, &c);
    tch_status loaded = tch_optimizer_load(optimizer, c, "optimizer");
    status = status != TCH_OK ? status : loaded;
    for (int32_t i = 0; i < SHARED_PARAMETERS && status == TCH_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "model/%d", i);
        tch_tensor part = placed_part(m, i);
        status = tch_checkpoint_read_shard(c, context, name, shared_model[i].size, m->own[i].start, &part);
    }
    tch_checkpoint_close(c);
    return status;
}

/* As if refreshes of the first factors had failed: their damping is raised. */
static tch_status spoil(tch_optimizer *o, int32_t failures)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < SHARED_PARAMETERS && status == TCH_OK; i++) {
        int64_t counts[96] = {0};
        int64_t length = tch_optimizer_counts_length(o, i);
        status = tch_optimizer_get_counts(o, i, length, counts);
        for (int64_t k = 2; k < length; k += 3) {
            counts[k] = failures;
        }
        status = status != TCH_OK ? status : tch_optimizer_set_counts(o, i, length, counts);
    }
    return status;
}

/* --- running all ranks ------------------------------------------------------------------------------------------- */

void shared_open_model(placed_model *m, const shared_training *t, tch_context *context, int32_t rank, int32_t ranks)
{
    const char *prefix = rank == t->other_rank ? "q" : "p";
    placed_config config = {shared_model, SHARED_PARAMETERS, t->place, t->dtype, prefix, t->numbers->start};
    placed_open(m, &config, context, rank, ranks);
}

/* Returns the first error, with its message. */
static tch_status take_steps(shared_training *t, placed_model *m, tch_context *context, tch_optimizer *optimizer,
                             int32_t rank)
{
    tch_status first = TCH_OK;
    for (int32_t s = t->first; s < t->first + t->steps && (first == TCH_OK || t->goes_on); s++) {
        tch_status status = (t->skipped >> s & 1) != 0 ? TCH_OK : take_step(t, m, context, optimizer, rank, s);
        t->taken[rank] += status == TCH_OK;
        if (status != TCH_OK && first == TCH_OK) {
            first = status;
            snprintf(t->messages[rank], sizeof t->messages[rank], "%s", tch_last_error());
        }
    }
    return first;
}

static tch_status train(shared_training *t, placed_model *m, tch_context *context, tch_comm *comm, int32_t rank,
                        tch_optimizer *optimizer)
{
    tch_status status = t->from == NULL ? TCH_OK : shared_load(t, m, context, optimizer, rank);
    if (status == TCH_OK && t->from == NULL && t->failures > 0) {
        status = spoil(optimizer, t->failures);
    }
    if (status == TCH_OK) {
        status = take_steps(t, m, context, optimizer, rank);
    }
    return status != TCH_OK || t->to == NULL ? status : shared_save(t, m, context, comm, optimizer);
}

void shared_train(tch_comm *comm, int32_t rank, void *training)
{
    shared_training *t = training;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    placed_model *m = test_alloc(sizeof *m);
    t->taken[rank] = 0;
    t->messages[rank][0] = '\0';
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (t->group != NULL) {
        pretend_use(t->group, rank, context);
    }
    shared_open_model(m, t, context, rank, comm == NULL ? 1 : tch_comm_size(comm));
    tch_status status = tch_optimizer_create(
        context, &t->config, &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = m->placement},
        SHARED_PARAMETERS, m->entries, &optimizer);
    status = status != TCH_OK ? status : train(t, m, context, comm, rank, optimizer);
    t->statuses[rank] = status;
    if (status != TCH_OK && t->messages[rank][0] == '\0') {
        snprintf(t->messages[rank], sizeof t->messages[rank], "%s", tch_last_error());
    }
    look_at(t, m, context, optimizer, rank);
    tch_optimizer_destroy(optimizer);
    placed_close(m);
    test_drop(m);
    tch_context_destroy(context);
}

void shared_try(shared_training *training, int32_t ranks, placed_how place, bool late)
{
    pretend_group group;
    if (ranks == 0) {
        training->group = NULL;
        training->place = placed_replicated;
        shared_train(NULL, 0, training);
        return;
    }
    pretend_open(&group, ranks);
    group.late = late;
    group.bucket_bytes = ranks % 2 == 1 ? 300 : 0;         /* a bucket for nearly every block batch, or one */
    group.span_bytes = ranks == 2 || ranks == 3 ? 100 : 0; /* whether the state of vectors is sharded */
    training->group = &group;
    training->place = place;
    pretend_run(&group, shared_train, training);
    CHECK(group.mismatches == 0, "ranks disagree on %lld counts", (long long)group.mismatches);
    pretend_close(&group);
}

void shared_run(shared_training *training, int32_t ranks, placed_how place, bool late)
{
    shared_try(training, ranks, place, late);
    for (int32_t r = 0; r < (ranks > 0 ? ranks : 1); r++) {
        CHECK(training->statuses[r] == TCH_OK, "rank %d: %s", r, training->messages[r]);
    }
}

int shared_open(void **state)
{
    placed_numbers *numbers = test_keep(test_alloc(sizeof *numbers));
    placed_numbers_open(numbers, 19, SHARED_PARAMETERS, shared_model, PLACED_STEPS);
    *state = numbers;
    return 0;
}

int shared_close(void **state)
{
    placed_numbers_close(*state);
    free(*state);
    return 0;
}

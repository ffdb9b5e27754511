/* The model of bench/comm_model beside real steps: what it reads from plans, without memory and without a collective,
 * is what every rank of a pretended group counts. Bytes, collectives and bytes of state are equal, not near. */
#include <stdio.h>
#include <string.h>

#include "replay.h"

#include "core/context.h"
#include "support/backend/table_copy.h"
#include "support/comm/pretend_group.h"
#include "support/optim/optim_defaults.h"
#include "support/random.h"
#include "support/testing.h"

enum { STEPS = 3, MOST_RANKS = 8 };

/* Matrices of one shape and of others, one that is wider than a block, vectors, and an embedding. */
static const struct {
    int32_t ndim, elementwise;
    int64_t size[3];
} model[] = {
    {2, 0, {24, 17}}, {2, 0, {24, 17}},  {2, 0, {40, 9}}, {1, 0, {31}},
    {2, 1, {33, 6}},  {3, 0, {6, 5, 8}}, {1, 0, {70}},    {2, 0, {10, 36}},
};
#define PARAMETERS ((int32_t)TEST_COUNT(model))

/* --- placements -------------------------------------------------------------------------------------------------- */

typedef enum placing { REPLICATED, BY_ROWS, IN_REPLICAS, PLACINGS } placing;
static const char *const placing_names[] = {"replicated", "by rows", "in replicas"};

/* In replicas: rows over half of the ranks, the same on the other half; an odd one out has the rows of the first. */
static tch_shard shard_of(int32_t parameter, placing how, int32_t rank, int32_t ranks)
{
    tch_shard s = {.rank = rank};
    int32_t parts = how == IN_REPLICAS ? ranks / 2 : ranks;
    int64_t rows = model[parameter].size[0];
    int64_t each = (rows + parts - 1) / parts;
    int64_t first = rank % parts * each;
    memcpy(s.size, model[parameter].size, sizeof model[parameter].size);
    if (how != REPLICATED) {
        s.start[0] = first < rows ? first : rows;
        s.size[0] = rows - s.start[0] < each ? rows - s.start[0] : each;
    }
    return s;
}

typedef struct rank_model {
    char names[PARAMETERS][8];
    tch_shard shards[PARAMETERS][MOST_RANKS];
    tch_placement placements[PARAMETERS];
    tch_tensor tensors[PARAMETERS];
    tch_parameter parameters[PARAMETERS];
} rank_model;

/* Tensors without memory. */
static void describe(rank_model *m, placing how, int32_t rank, int32_t ranks, tch_dtype dtype)
{
    for (int32_t i = 0; i < PARAMETERS; i++) {
        for (int32_t r = 0; r < ranks; r++) {
            m->shards[i][r] = shard_of(i, how, r, ranks);
        }
        m->placements[i] = (tch_placement)TCH_PLACEMENT_INIT;
        m->placements[i].ndim = model[i].ndim;
        m->placements[i].shape = model[i].size;
        m->placements[i].count = how == REPLICATED ? 0 : ranks;
        m->placements[i].shards = m->shards[i];
        m->tensors[i] = tch_tensor_view(NULL, dtype, model[i].ndim, m->shards[i][rank].size);
        snprintf(m->names[i], sizeof m->names[i], "p%d", i);
        m->parameters[i] =
            (tch_parameter){.tensor = &m->tensors[i], .name = m->names[i], .elementwise = model[i].elementwise};
    }
}

/* --- a CPU that has products in bfloat16, as a GPU does: then Muon's directions travel in it ---------------------- */

static void narrow_rates(void *state, tch_product_rates *rates)
{
    *rates = (tch_product_rates){.f64 = 60.0, .f32 = 50.0, .bf16x2 = 200.0, .bf16 = 700.0};
}

static tch_context *open_context(table_copy *table, bool narrow)
{
    tch_context *context = NULL;
    CHECK_OK(tch_context_create("cpu", &context));
    table_copy_make(table, context->backend);
    table->matrix.product_rates = narrow ? narrow_rates : table->matrix.product_rates;
    context->backend = &table->backend;
    return context;
}

/* --- real steps -------------------------------------------------------------------------------------------------- */

typedef struct counted {
    tch_status status;
    int64_t collectives[STEPS], bytes[STEPS], state_bytes;
} counted;

typedef struct trial {
    tch_optim_config config;
    placing how;
    tch_dtype dtype;
    bool narrow;
    counted ranks[MOST_RANKS];
} trial;

static tch_tensor *new_tensor(tch_context *context, const tch_tensor *like, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    tch_tensor *tensor = NULL;
    int64_t count = tch_tensor_numel(like);
    double *values = test_alloc((size_t)(count + 1) * sizeof *values);
    test_random_fill_normal(&random, values, count);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, like->ndim, like->shape);
    CHECK_OK(tch_tensor_create(context, like->dtype, like->ndim, like->shape, TCH_CONTIGUOUS, &tensor));
    if (count > 0) {
        CHECK_OK(tch_tensor_copy(context, tensor, &host));
    }
    test_drop(values);
    return tensor;
}

static void count_steps(tch_comm *comm, tch_optimizer *optimizer, const tch_tensor *const *gradients, counted *c)
{
    for (int32_t s = 0; s < STEPS && c->status == TCH_OK; s++) {
        tch_comm_traffic before = TCH_COMM_TRAFFIC_INIT;
        tch_comm_traffic after = TCH_COMM_TRAFFIC_INIT;
        CHECK_OK(tch_comm_get_traffic(comm, &before));
        c->status = tch_optimizer_step(optimizer, PARAMETERS, gradients);
        CHECK_OK(tch_comm_get_traffic(comm, &after));
        c->collectives[s] = after.collectives - before.collectives;
        c->bytes[s] = after.bytes - before.bytes;
    }
}

static void run_rank(tch_comm *comm, int32_t rank, void *user)
{
    trial *t = user;
    counted *c = &t->ranks[rank];
    rank_model *m = test_alloc(sizeof *m);
    table_copy table;
    tch_context *context = open_context(&table, t->narrow);
    tch_optimizer *optimizer = NULL;
    tch_tensor *tensors[2][PARAMETERS];
    describe(m, t->how, rank, tch_comm_size(comm), t->dtype);
    for (int32_t i = 0; i < PARAMETERS; i++) {
        for (int32_t k = 0; k < 2; k++) { /* the same on ranks that have the same */
            uint64_t stream = (uint64_t)(64 * k + i) * 64 + (uint64_t)m->shards[i][rank].start[0];
            tensors[k][i] = new_tensor(context, &m->tensors[i], stream);
        }
        m->parameters[i].tensor = tensors[0][i];
    }
    c->status = tch_optimizer_create(
        context, &t->config, &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = m->placements},
        PARAMETERS, m->parameters, &optimizer);
    count_steps(comm, optimizer, (const tch_tensor *const *)tensors[1], c);
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (optimizer != NULL) {
        CHECK_OK(tch_optimizer_get_memory(optimizer, &memory));
    }
    c->state_bytes = memory.state;
    tch_optimizer_destroy(optimizer);
    for (int32_t i = 0; i < PARAMETERS; i++) {
        tch_tensor_destroy(tensors[0][i]);
        tch_tensor_destroy(tensors[1][i]);
    }
    test_drop(m);
    tch_context_destroy(context);
}

/* --- beside the model -------------------------------------------------------------------------------------------- */

static void compare_rank(tch_context *context, const trial *t, const replay_group *group, int32_t rank)
{
    const counted *c = &t->ranks[rank];
    rank_model *m = test_alloc(sizeof *m);
    replay_rank *r = test_alloc(sizeof *r);
    describe(m, t->how, rank, group->size, t->dtype);
    CHECK(c->status == TCH_OK, "rank %d: status %d", rank, c->status);
    CHECK_OK(replay_step(context, &t->config, group, rank, PARAMETERS, m->parameters, m->placements, r));
    for (int32_t s = 0; s < STEPS; s++) {
        CHECK(r->bytes == c->bytes[s], "rank %d, step %d: %lld bytes in the model, %lld in a step", rank, s,
              (long long)r->bytes, (long long)c->bytes[s]);
        CHECK(r->collectives == c->collectives[s], "rank %d, step %d: %lld collectives in the model, %lld in a step",
              rank, s, (long long)r->collectives, (long long)c->collectives[s]);
    }
    CHECK(r->state_bytes == c->state_bytes, "rank %d: %lld bytes of state in the model, %lld in the optimizer", rank,
          (long long)r->state_bytes, (long long)c->state_bytes);
    test_drop(r);
    test_drop(m);
}

static void try_group(tch_context *context, trial *t, int32_t ranks, int64_t bucket_bytes)
{
    pretend_group pretended;
    pretend_open(&pretended, ranks);
    pretended.bucket_bytes = bucket_bytes;
    pretended.span_bytes = 100; /* the embedding and the longer vectors are spans */
    pretend_run(&pretended, run_rank, t);
    replay_group group = {.size = ranks, .bucket_bytes = bucket_bytes, .span_bytes = 100};
    for (int32_t r = 0; r < ranks; r++) {
        compare_rank(context, t, &group, r);
    }
    pretend_close(&pretended);
}

static void try_all(tch_optim_kind kind, tch_dtype dtype, bool narrow)
{
    static const int32_t sizes[] = {2, 3, 8};
    static const int64_t bucket_bytes[] = {300, 0};
    table_copy table;
    tch_context *context = open_context(&table, narrow);
    for (int how = 0; how < PLACINGS; how++) {
        for (size_t s = 0; s < TEST_COUNT(sizes); s++) {
            for (size_t b = 0; b < TEST_COUNT(bucket_bytes); b++) {
                test_case("%s, %s, %s on %d ranks, buckets of %lld", tch_optim_kind_name(kind), tch_dtype_name(dtype),
                          placing_names[how], sizes[s], (long long)bucket_bytes[b]);
                trial t = {.config = test_optim_defaults(kind), .how = (placing)how, .dtype = dtype, .narrow = narrow};
                t.config.precondition_frequency = 2;
                t.config.max_preconditioner_dim = 16;
                try_group(context, &t, sizes[s], bucket_bytes[b]);
            }
        }
    }
    tch_context_destroy(context);
}

static void muon(void **state)
{
    try_all(TCH_OPTIM_MUON, TCH_FLOAT32, false);
    try_all(TCH_OPTIM_MUON, TCH_FLOAT32, true);
    try_all(TCH_OPTIM_MUON, TCH_BFLOAT16, false);
}

static void shampoo(void **state)
{
    try_all(TCH_OPTIM_SHAMPOO, TCH_FLOAT32, false);
    try_all(TCH_OPTIM_SHAMPOO, TCH_BFLOAT16, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(muon), cmocka_unit_test(shampoo)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

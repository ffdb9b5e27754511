/* The model of bench/comm_model beside real steps: what it reads from plans, without memory and without a collective,
 * is what every rank of a pretended group counts. Bytes, collectives and bytes of state are equal, not near. */
#include "replay.h"

#include "core/context.h"
#include "support/backend/table_copy.h"
#include "support/comm/placed_model.h"
#include "support/optim/optim_defaults.h"
#include "support/testing.h"

enum { STEPS = 3, MOST_RANKS = 8 };

/* Matrices of one shape and of others, one that is wider than a block, vectors, and an embedding. */
static const placed_shape model[] = {
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {40, 9}},
    {.ndim = 1, .size = {31}},
    {.ndim = 2, .size = {33, 6}, .elementwise = 1},
    {.ndim = 3, .size = {6, 5, 8}},
    {.ndim = 1, .size = {70}},
    {.ndim = 2, .size = {10, 36}},
};
#define PARAMETERS ((int32_t)TEST_COUNT(model))

/* Rows over half of the ranks, the same on the other half; an odd one out has the rows of the first. */
static int32_t in_uneven_replicas(const placed_shape *shape, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(shape, r);
        placed_cut(&shards[r], 0, ranks / 2, r % (ranks / 2));
    }
    return ranks;
}

static const struct {
    const char *name;
    placed_how place;
} placings[] = {{"replicated", placed_replicated}, {"by rows", placed_by_rows}, {"in replicas", in_uneven_replicas}};

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
    placed_config placed;
    bool narrow;
    const placed_numbers *numbers;
    counted ranks[MOST_RANKS];
} trial;

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
    placed_model *m = test_alloc(sizeof *m);
    table_copy table;
    tch_context *context = open_context(&table, t->narrow);
    tch_optimizer *optimizer = NULL;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    placed_open(m, &t->placed, context, rank, tch_comm_size(comm));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        double values[PLACED_ELEMENTS];
        placed_take(m, i, t->numbers->gradient[0][i], values);
        placed_move(context, m->gradient[i], values, true);
    }
    tch_optim_setup setup = {sizeof setup, .comm = comm, .placements = m->placement};
    c->status = tch_optimizer_create(context, &t->config, &setup, PARAMETERS, m->entries, &optimizer);
    count_steps(comm, optimizer, (const tch_tensor *const *)m->gradient, c);
    if (optimizer != NULL) {
        CHECK_OK(tch_optimizer_get_memory(optimizer, &memory));
    }
    c->state_bytes = memory.state;
    tch_optimizer_destroy(optimizer);
    placed_close(m);
    test_drop(m);
    tch_context_destroy(context);
}

/* --- beside the model -------------------------------------------------------------------------------------------- */

static void compare_rank(tch_context *context, const trial *t, const replay_group *group, int32_t rank)
{
    const counted *c = &t->ranks[rank];
    placed_model *m = test_alloc(sizeof *m);
    replay_rank *r = test_alloc(sizeof *r);
    placed_open(m, &t->placed, context, rank, group->size);
    CHECK(c->status == TCH_OK, "rank %d: status %d", rank, c->status);
    CHECK_OK(replay_step(context, &t->config, group, rank, PARAMETERS, m->entries, m->placement, r));
    placed_close(m);
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

static void try_all(const placed_numbers *numbers, tch_optim_kind kind, tch_dtype dtype, bool narrow)
{
    static const int32_t sizes[] = {2, 3, 8};
    static const int64_t bucket_bytes[] = {300, 0};
    table_copy table;
    tch_context *context = open_context(&table, narrow);
    for (size_t i = 0; i < TEST_COUNT(placings) * TEST_COUNT(sizes) * TEST_COUNT(bucket_bytes); i++) {
        size_t how = i % TEST_COUNT(placings);
        int32_t ranks = sizes[i / TEST_COUNT(placings) % TEST_COUNT(sizes)];
        int64_t bytes = bucket_bytes[i / TEST_COUNT(placings) / TEST_COUNT(sizes)];
        test_case("%s, %s, %s on %d ranks, buckets of %lld", tch_optim_kind_name(kind), tch_dtype_name(dtype),
                  placings[how].name, ranks, (long long)bytes);
        trial t = {.config = test_optim_defaults(kind), .numbers = numbers, .narrow = narrow};
        t.placed = (placed_config){model, PARAMETERS, placings[how].place, dtype, "p", numbers->start};
        t.config.shampoo.precondition_frequency = 2;
        t.config.shampoo.max_preconditioner_dim = 16;
        try_group(context, &t, ranks, bytes);
    }
    tch_context_destroy(context);
}

TEST(counts_are_those_of_steps)
{
    placed_numbers numbers;
    placed_numbers_open(&numbers, 29, PARAMETERS, model, 1);
    try_all(&numbers, TCH_OPTIM_MUON, TCH_FLOAT32, false);
    try_all(&numbers, TCH_OPTIM_MUON, TCH_FLOAT32, true);
    try_all(&numbers, TCH_OPTIM_MUON, TCH_BFLOAT16, false);
    try_all(&numbers, TCH_OPTIM_SHAMPOO, TCH_FLOAT32, false);
    try_all(&numbers, TCH_OPTIM_SHAMPOO, TCH_BFLOAT16, false);
    placed_numbers_close(&numbers);
}

int main(void)
{
    return test_run(__FILE__, NULL, NULL);
}

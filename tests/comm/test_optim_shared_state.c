/* State and communication of each rank of a sharded optimizer: momentum that is equal on all replicas of a shard,
 * sharded state of large vectors, and no communication for matrices that are complete on their owners. */
#include "support/comm/shared_trial.h"
#include "support/random.h"
#include "support/testing.h"

/* --- replicas ---------------------------------------------------------------------------------------------------- */

static bool same_shard(const tch_shard *a, const tch_shard *b)
{
    return memcmp(a->start, b->start, sizeof a->start) == 0 && memcmp(a->size, b->size, sizeof a->size) == 0;
}

/* One of the ranks with a replica of a shard sends it, and all keep its moving average: a checkpoint may take it from
 * any. */
TEST(replicas_keep_the_same_momentum)
{
    enum { RANKS = 4 };
    static const tch_optim_kind kinds[] = {TCH_OPTIM_MUON, TCH_OPTIM_NORMUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = shared_config(kinds[k]);
        double momentum[RANKS][SHARED_PARAMETERS] = {{0}};
        test_case("%s", tch_optim_kind_name(kinds[k]));
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        t.momentum = momentum;
        shared_run(&t, RANKS, placed_in_replicas, false);
        int compared = 0;
        for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
            tch_shard shards[PRETEND_MOST];
            int32_t count = placed_in_replicas(&shared_model[i], RANKS, shards);
            for (int32_t a = 0; a < count; a++) {
                for (int32_t b = 0; b < a; b++) {
                    double *x = &momentum[shards[a].rank][i];
                    double *y = &momentum[shards[b].rank][i];
                    bool same = !same_shard(&shards[a], &shards[b]) || *x == *y;
                    CHECK(same, "parameter %d: %g on one replica, %g on the other", i, *x, *y);
                    compared += same_shard(&shards[a], &shards[b]) && *x > 0.0;
                }
            }
        }
        CHECK(compared >= 8, "only %d shards were compared", compared);
    }
}

/* --- large elementwise parameters -------------------------------------------------------------------------------- */

#define LARGE 2500000 /* ten spans */

typedef struct large_training {
    pretend_group *group;
    double *drawn[3], *end[3]; /* the parameter and two gradients; the parameter of each rank */
    int64_t state_bytes[3];
} large_training;

static tch_tensor *make_large(tch_context *context, double *values)
{
    const int64_t shape[] = {LARGE};
    tch_tensor *tensor = NULL;
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &tensor), TCH_OK);
    placed_move(context, tensor, values, true);
    return tensor;
}

static void train_large(tch_comm *comm, int32_t rank, void *user)
{
    large_training *l = user;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_ADAMW);
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (comm != NULL && !test_on_cpu()) {
        pretend_use(l->group, rank, context);
    }
    tch_tensor *p = make_large(context, l->drawn[0]);
    tch_parameter entry = {.tensor = p};
    assert_int_equal(tch_optimizer_create(context, &c, &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm}, 1,
                                          &entry, &optimizer),
                     TCH_OK);
    for (int step = 1; step < 3; step++) {
        tch_tensor *g = make_large(context, l->drawn[step]);
        assert_int_equal(tch_optimizer_step(optimizer, 1, (const tch_tensor *const[]){g}), TCH_OK);
        tch_tensor_destroy(g);
    }
    placed_move(context, p, l->end[rank], false);
    assert_int_equal(tch_optimizer_get_memory(optimizer, &memory), TCH_OK);
    l->state_bytes[rank] = memory.state;
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(p);
    tch_context_destroy(context);
}

/* Each rank keeps the moments of at most four spans, and the parameter equals that of one process. */
TEST(state_of_large_vectors_is_divided)
{
    large_training l = {0};
    pretend_group group;
    double *alone = test_alloc(LARGE * sizeof(double));
    test_random random = test_random_stream(5);
    test_case("a vector of %d elements on 3 ranks", LARGE);
    for (int32_t i = 0; i < 3; i++) {
        l.drawn[i] = test_alloc(LARGE * sizeof(double));
        l.end[i] = test_alloc(LARGE * sizeof(double));
        test_random_fill_normal(&random, l.drawn[i], LARGE);
    }
    train_large(NULL, 0, &l);
    memcpy(alone, l.end[0], LARGE * sizeof(double));
    int64_t whole = l.state_bytes[0];
    pretend_open(&group, 3);
    l.group = &group;
    pretend_run(&group, train_large, &l);
    pretend_close(&group);
    for (int32_t r = 0; r < 3; r++) {
        CHECK(memcmp(alone, l.end[r], LARGE * sizeof(double)) == 0, "rank %d has other values", r);
        CHECK(l.state_bytes[r] <= 2 * (INT64_C(4) << 20) + 4096 && whole >= INT64_C(8) * LARGE,
              "rank %d keeps %lld bytes, alone %lld", r, (long long)l.state_bytes[r], (long long)whole);
    }
}

/* --- buckets ----------------------------------------------------------------------------------------------------- */

enum { EQUAL = 14, EQUAL_ROWS = 12, EQUAL_COLS = 8, COUNTED_STEPS = 3 };

/* A few steps of a model, and the group's traffic. */
typedef struct counted_training {
    placed_shape shapes[EQUAL];
    int32_t count; /* of parameters */
    placed_how place;
    placed_numbers numbers;
    tch_optim_config config;
    pretend_group group;
    double *end[PRETEND_MOST][EQUAL];
    tch_comm_traffic traffic[PRETEND_MOST]; /* of the steps only */
} counted_training;

static counted_training *begin_counting(tch_optim_kind kind, int32_t count, placed_shape shape, placed_how place)
{
    counted_training *t = test_alloc(sizeof *t);
    *t = (counted_training){.count = count, .place = place, .config = shared_config(kind)};
    t->config.shampoo.max_preconditioner_dim = EQUAL_ROWS; /* one block each */
    for (int32_t i = 0; i < count; i++) {
        t->shapes[i] = shape;
    }
    placed_numbers_open(&t->numbers, 17 + (uint64_t)kind, count, t->shapes, COUNTED_STEPS);
    return t;
}

static void train_counted(tch_comm *comm, int32_t rank, void *user)
{
    counted_training *t = user;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    placed_model m;
    tch_comm_traffic made = TCH_COMM_TRAFFIC_INIT;
    placed_config c = {t->shapes, t->count, t->place, TCH_FLOAT32, "w", t->numbers.start};
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (comm != NULL && !test_on_cpu()) {
        pretend_use(&t->group, rank, context);
    }
    placed_open(&m, &c, context, rank, comm == NULL ? 1 : t->group.size);
    tch_optim_setup setup = {sizeof setup, .comm = comm, .placements = m.placement};
    assert_int_equal(tch_optimizer_create(context, &t->config, &setup, t->count, m.entries, &optimizer), TCH_OK);
    t->traffic[rank] = (tch_comm_traffic)TCH_COMM_TRAFFIC_INIT;
    assert_int_equal(comm == NULL ? TCH_OK : tch_comm_get_traffic(comm, &made), TCH_OK);
    for (int32_t step = 0; step < COUNTED_STEPS; step++) {
        for (int32_t i = 0; i < t->count; i++) {
            double part[PLACED_ELEMENTS];
            placed_take(&m, i, t->numbers.gradient[step][i], part);
            placed_move(context, m.gradient[i], part, true);
        }
        assert_int_equal(tch_optimizer_step(optimizer, t->count, (const tch_tensor *const *)m.gradient), TCH_OK);
    }
    assert_int_equal(comm == NULL ? TCH_OK : tch_comm_get_traffic(comm, &t->traffic[rank]), TCH_OK);
    t->traffic[rank].collectives -= made.collectives;
    t->traffic[rank].bytes -= made.bytes;
    placed_read(&m, context, t->end[rank]);
    tch_optimizer_destroy(optimizer);
    placed_close(&m);
    tch_context_destroy(context);
}

static void train_ranks(counted_training *t, int32_t ranks, int64_t bucket_bytes)
{
    for (int32_t r = 0; r < ranks; r++) {
        placed_room(t->end[r], t->count, t->shapes, 0xFF);
    }
    pretend_open(&t->group, ranks);
    t->group.bucket_bytes = bucket_bytes;
    pretend_run(&t->group, train_counted, t);
    pretend_close(&t->group);
}

/* 14 matrices of one shape on 3 ranks, in buckets of 6 and 8. In the second bucket two ranks have three and one has
 * two: two thirds of a matrix move to that one before all gather segments of equal length. */
TEST(one_shape_in_buckets)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_MUON, TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP};
    static const placed_shape shape = {.ndim = 2, .size = {EQUAL_ROWS, EQUAL_COLS}};
    double *alone[EQUAL];
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        counted_training *t = begin_counting(kinds[k], EQUAL, shape, placed_replicated);
        int64_t bytes = 0;
        test_case("%s", tch_optim_kind_name(kinds[k]));
        placed_room(t->end[0], EQUAL, t->shapes, 0);
        train_counted(NULL, 0, t);
        memcpy(alone, t->end[0], sizeof alone);
        train_ranks(t, 3, 100);
        for (int32_t r = 0; r < 3; r++) {
            CHECK(t->traffic[r].collectives == 4 * COUNTED_STEPS, "%lld collectives on rank %d",
                  (long long)t->traffic[r].collectives, r);
            bytes += t->traffic[r].bytes;
            for (int32_t i = 0; i < EQUAL && test_on_cpu(); i++) {
                CHECK(memcmp(alone[i], t->end[r][i], EQUAL_ROWS * EQUAL_COLS * sizeof(double)) == 0,
                      "parameter %d of rank %d is not what it is alone", i, r);
            }
        }
        /* All results to two ranks, two thirds of a matrix, and the agreement of ranks. */
        int64_t element = kinds[k] == TCH_OPTIM_MUON && !test_on_cpu() ? 2 : 4;
        int64_t matrix = EQUAL_ROWS * EQUAL_COLS * element;
        int64_t expected = COUNTED_STEPS * (2 * EQUAL * matrix + 2 * matrix / 3 + 3 * 32);
        CHECK(bytes == expected, "%lld bytes, expected %lld", (long long)bytes, (long long)expected);
        placed_numbers_close(&t->numbers);
    }
}

/* A rank with every parameter complete communicates nothing; if matrices are complete on their owners, such as experts,
 * only the agreement of each step is communicated. */
TEST(what_lies_whole_is_not_sent)
{
    static const struct {
        tch_optim_kind kind;
        int32_t ranks, collectives; /* the latter per step */
        placed_shape shape;
        placed_how place;
    } cases[] = {
        {TCH_OPTIM_SHAMPOO, 1, 0, {.ndim = 2, .size = {EQUAL_ROWS, EQUAL_COLS}}, placed_replicated},
        {TCH_OPTIM_MUON, 3, 1, {.ndim = 3, .size = {6, 5, 8}, .batch_dims = 1}, placed_by_rows},
        {TCH_OPTIM_SHAMPOO, 3, 1, {.ndim = 3, .size = {12, 5, 8}, .batch_dims = 1}, placed_by_rows},
    };
    for (size_t k = 0; k < TEST_COUNT(cases); k++) {
        counted_training *t = begin_counting(cases[k].kind, k == 0 ? EQUAL : 1, cases[k].shape, cases[k].place);
        test_case("%s on %d ranks", tch_optim_kind_name(cases[k].kind), cases[k].ranks);
        train_ranks(t, cases[k].ranks, 0);
        for (int32_t r = 0; r < cases[k].ranks; r++) {
            CHECK(t->traffic[r].collectives == (int64_t)cases[k].collectives * COUNTED_STEPS,
                  "rank %d: %lld collectives in %d steps", r, (long long)t->traffic[r].collectives, COUNTED_STEPS);
        }
        placed_numbers_close(&t->numbers);
    }
}

TEST_MAIN(shared_open, shared_close)

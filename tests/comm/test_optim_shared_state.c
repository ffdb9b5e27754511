/* What each rank of a shared optimizer keeps and sends: momentum that is the same on all replicas of a shard, the state
 * of large vectors divided, and nothing sent where matrices lie whole with their owners. */
#include <string.h>

#include "support/comm/shared_trial.h"
#include "support/random.h"
#include "support/testing.h"

/* --- replicas ---------------------------------------------------------------------------------------------------- */

static bool same_shard(const tch_shard *a, const tch_shard *b)
{
    return memcmp(a->start, b->start, sizeof a->start) == 0 && memcmp(a->size, b->size, sizeof a->size) == 0;
}

/* Of several ranks that hold a shard one sends it, and all of them keep its moving average: a checkpoint may take it
 * from any. */
static void replicas_keep_the_same_momentum(void **state)
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

/* --- elementwise parameters that are large ----------------------------------------------------------------------- */

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

/* Each rank keeps the moments of four spans at most, and the parameter is what it is alone. */
static void state_of_large_vectors_is_divided(void **state)
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

enum { EQUAL = 14, EQUAL_ROWS = 12, EQUAL_COLS = 8, EQUAL_STEPS = 3 };

typedef struct equal_training {
    placed_shape shapes[EQUAL];
    placed_numbers numbers;
    tch_optim_config config;
    pretend_group *group;
    double *end[PRETEND_MOST][EQUAL];
    tch_comm_traffic made[PRETEND_MOST], ended[PRETEND_MOST];
} equal_training;

static void train_equal(tch_comm *comm, int32_t rank, void *user)
{
    equal_training *t = user;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    placed_model m;
    placed_config c = {t->shapes, EQUAL, placed_replicated, TCH_FLOAT32, "w", t->numbers.start};
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (comm != NULL && !test_on_cpu()) {
        pretend_use(t->group, rank, context);
    }
    placed_open(&m, &c, context, rank, comm == NULL ? 1 : t->group->size);
    assert_int_equal(
        tch_optimizer_create(context, &t->config,
                             &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = m.placement},
                             EQUAL, m.entries, &optimizer),
        TCH_OK);
    t->made[rank] = t->ended[rank] = (tch_comm_traffic)TCH_COMM_TRAFFIC_INIT;
    assert_int_equal(comm == NULL ? TCH_OK : tch_comm_get_traffic(comm, &t->made[rank]), TCH_OK);
    for (int32_t step = 0; step < EQUAL_STEPS; step++) {
        for (int32_t i = 0; i < EQUAL; i++) {
            placed_move(context, m.gradient[i], t->numbers.gradient[step][i], true);
        }
        assert_int_equal(tch_optimizer_step(optimizer, EQUAL, (const tch_tensor *const *)m.gradient), TCH_OK);
    }
    assert_int_equal(comm == NULL ? TCH_OK : tch_comm_get_traffic(comm, &t->ended[rank]), TCH_OK);
    placed_read(&m, context, t->end[rank]);
    tch_optimizer_destroy(optimizer);
    placed_close(&m);
    tch_context_destroy(context);
}

/* 14 matrices of one shape on 3 ranks, in buckets of 6 and 8. In the second two ranks have three and one has two: two
 * thirds of a matrix go to that one before all of them gather segments of equal length. */
static void one_shape_in_buckets(void **state)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_MUON, TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP};
    double *alone[EQUAL];
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        equal_training *t = test_alloc(sizeof *t);
        pretend_group group;
        test_case("%s", tch_optim_kind_name(kinds[k]));
        *t = (equal_training){.config = shared_config(kinds[k]), .group = &group};
        t->config.max_preconditioner_dim = EQUAL_ROWS; /* one block each */
        for (int32_t i = 0; i < EQUAL; i++) {
            t->shapes[i] = (placed_shape){.ndim = 2, .size = {EQUAL_ROWS, EQUAL_COLS}};
        }
        placed_numbers_open(&t->numbers, 17 + k, EQUAL, t->shapes, EQUAL_STEPS);
        for (int32_t r = 0; r < 3; r++) {
            placed_room(t->end[r], EQUAL, t->shapes, 0xFF);
        }
        placed_room(alone, EQUAL, t->shapes, 0);
        train_equal(NULL, 0, t);
        for (int32_t i = 0; i < EQUAL; i++) {
            memcpy(alone[i], t->end[0][i], EQUAL_ROWS * EQUAL_COLS * sizeof(double));
        }
        pretend_open(&group, 3);
        group.bucket_bytes = 100;
        pretend_run(&group, train_equal, t);
        pretend_close(&group);
        int64_t bytes = 0;
        for (int32_t r = 0; r < 3; r++) {
            int64_t collectives = t->ended[r].collectives - t->made[r].collectives;
            CHECK(collectives == 4 * EQUAL_STEPS, "%lld collectives on rank %d", (long long)collectives, r);
            bytes += t->ended[r].bytes - t->made[r].bytes;
            for (int32_t i = 0; i < EQUAL && test_on_cpu(); i++) {
                CHECK(memcmp(alone[i], t->end[r][i], EQUAL_ROWS * EQUAL_COLS * sizeof(double)) == 0,
                      "parameter %d of rank %d is not what it is alone", i, r);
            }
        }
        /* All results to two ranks, two thirds of a matrix, and what ranks agree on. */
        int64_t element = kinds[k] == TCH_OPTIM_MUON && !test_on_cpu() ? 2 : 4;
        int64_t matrix = EQUAL_ROWS * EQUAL_COLS * element;
        int64_t expected = EQUAL_STEPS * (2 * EQUAL * matrix + 2 * matrix / 3 + 3 * 12);
        CHECK(bytes == expected, "%lld bytes, expected %lld", (long long)bytes, (long long)expected);
        placed_numbers_close(&t->numbers);
    }
}

/* A rank that has every parameter whole exchanges nothing. */
static void group_of_one_meets_nobody(void **state)
{
    equal_training *t = test_alloc(sizeof *t);
    pretend_group group;
    *t = (equal_training){.config = shared_config(TCH_OPTIM_SHAMPOO), .group = &group};
    for (int32_t i = 0; i < EQUAL; i++) {
        t->shapes[i] = (placed_shape){.ndim = 2, .size = {EQUAL_ROWS, EQUAL_COLS}};
    }
    placed_numbers_open(&t->numbers, 23, EQUAL, t->shapes, EQUAL_STEPS);
    placed_room(t->end[0], EQUAL, t->shapes, 0xFF);
    pretend_open(&group, 1);
    pretend_run(&group, train_equal, t);
    pretend_close(&group);
    CHECK(t->ended[0].collectives == 0, "%lld collectives", (long long)t->ended[0].collectives);
    placed_numbers_close(&t->numbers);
}

/* --- experts ----------------------------------------------------------------------------------------------------- */

enum { EXPERT_RANKS = 3, EXPERT_STEPS = 2 };

static void train_experts(tch_comm *comm, int32_t rank, void *user)
{
    tch_comm_traffic *traffic = (tch_comm_traffic *)user + 2 * rank; /* before the steps, and after */
    const int64_t whole[] = {6, 5, 8};
    const int64_t shape[] = {2, 5, 8};
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    tch_tensor *p = NULL;
    tch_tensor *g = NULL;
    tch_shard shards[EXPERT_RANKS];
    for (int32_t r = 0; r < EXPERT_RANKS; r++) {
        shards[r] = (tch_shard){.rank = r, .start = {2 * r}, .size = {2, 5, 8}};
    }
    tch_placement placement = TCH_PLACEMENT_INIT;
    placement.ndim = 3;
    placement.shape = whole;
    placement.count = EXPERT_RANKS;
    placement.shards = shards;
    tch_optim_config c = shared_config(TCH_OPTIM_MUON);
    assert_int_equal(tch_context_create("cpu", &context), TCH_OK);
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 3, shape, TCH_CONTIGUOUS, &p), TCH_OK);
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 3, shape, TCH_CONTIGUOUS, &g), TCH_OK);
    assert_int_equal(tch_tensor_fill(context, p, 1.0), TCH_OK);
    assert_int_equal(tch_tensor_fill(context, g, 0.5), TCH_OK);
    tch_parameter entry = {.tensor = p, .batch_dims = 1};
    assert_int_equal(
        tch_optimizer_create(context, &c,
                             &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = &placement}, 1,
                             &entry, &optimizer),
        TCH_OK);
    assert_int_equal(tch_comm_get_traffic(comm, &traffic[0]), TCH_OK);
    for (int step = 0; step < EXPERT_STEPS; step++) {
        assert_int_equal(tch_optimizer_step(optimizer, 1, (const tch_tensor *const[]){g}), TCH_OK);
    }
    assert_int_equal(tch_comm_get_traffic(comm, &traffic[1]), TCH_OK);
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(p);
    tch_tensor_destroy(g);
    tch_context_destroy(context);
}

/* Matrices that lie whole with their owners: of a step only the agreement goes through the group. */
static void experts_send_nothing(void **state)
{
    pretend_group group;
    tch_comm_traffic traffic[2 * EXPERT_RANKS];
    test_case("experts on %d ranks", EXPERT_RANKS);
    for (int i = 0; i < 2 * EXPERT_RANKS; i++) {
        traffic[i] = (tch_comm_traffic)TCH_COMM_TRAFFIC_INIT;
    }
    pretend_open(&group, EXPERT_RANKS);
    pretend_run(&group, train_experts, traffic);
    pretend_close(&group);
    for (int r = 0; r < EXPERT_RANKS; r++) {
        int64_t collectives = traffic[2 * r + 1].collectives - traffic[2 * r].collectives;
        CHECK(collectives == EXPERT_STEPS, "rank %d: %lld collectives in %d steps", r, (long long)collectives,
              EXPERT_STEPS);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(replicas_keep_the_same_momentum),
        cmocka_unit_test(one_shape_in_buckets),
        cmocka_unit_test(group_of_one_meets_nobody),
        cmocka_unit_test(state_of_large_vectors_is_divided),
        cmocka_unit_test(experts_send_nothing),
    };
    return cmocka_run_group_tests(tests, shared_open, shared_close);
}

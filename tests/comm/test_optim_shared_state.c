/* Communication of each rank of a sharded optimizer: its buckets, and none for matrices that are complete on their
 * owners. */
#include "support/comm/shared_trial.h"
#include "support/testing.h"

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

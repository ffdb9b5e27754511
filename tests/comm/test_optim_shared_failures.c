/* Failures on one rank of a sharded optimizer: no rank hangs, none continues alone, and every rank gets an error that
 * says what happened. Invalid placements are rejected by all. */
#include "support/comm/shared_trial.h"
#include "support/testing.h"

/* --- failures ---------------------------------------------------------------------------------------------------- */

static void check_rank(const shared_training *t, int32_t rank, tch_status expected, const char *words)
{
    CHECK(t->statuses[rank] == expected && strstr(t->messages[rank], words) != NULL, "rank %d gave %s: %s", rank,
          tch_status_name(t->statuses[rank]), t->messages[rank]);
}

/* Every rank must return `expected`, with these words in its message. */
static void check_all(const shared_training *t, int32_t ranks, tch_status expected, const char *words)
{
    for (int32_t r = 0; r < ranks; r++) {
        check_rank(t, r, expected, words);
    }
}

/* A new group, in which something fails. */
static void run_bad(shared_training *t, int32_t ranks, placed_how place, pretend_task task)
{
    pretend_group group;
    pretend_open(&group, ranks);
    t->group = &group;
    t->place = place;
    pretend_run(&group, task, t);
    pretend_close(&group);
}

static const placed_how failing_placements[] = {placed_replicated, placed_by_rows, placed_by_columns};

/* A NaN on one rank only: with SKIP all ranks skip the step, so that the result is as without it; with RAISE all get
 * the error. Even if the gradient is replicated, so that ranks have different values, no rank takes the step. */
TEST(nan_on_one_rank)
{
    const placed_numbers *n = *state;
    for (size_t p = 0; p < TEST_COUNT(failing_placements); p++) {
        test_case("placement %d", (int)p);
        tch_optim_config c = shared_config(TCH_OPTIM_MUON);
        c.numerics.nonfinite = TCH_NONFINITE_RAISE;
        shared_training t = shared_training_of(n, &c, TCH_FLOAT32);
        t.bad_rank = 1;
        t.bad_step = 3;
        run_bad(&t, 3, failing_placements[p], shared_train);
        check_all(&t, 3, TCH_ERR_NUMERIC, "nothing was changed");

        double *ends[SHARED_PARAMETERS];
        placed_room(ends, SHARED_PARAMETERS, shared_model, 0xFF);
        c.numerics.nonfinite = TCH_NONFINITE_SKIP;
        t = shared_training_of(n, &c, TCH_FLOAT32);
        t.bad_rank = 1;
        t.bad_step = 3;
        t.end = ends;
        shared_run(&t, 3, failing_placements[p], false);
        for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
            for (int64_t k = 0; k < placed_count(&shared_model[i]); k++) {
                CHECK(isfinite(ends[i][k]), "parameter %d has %g", i, ends[i][k]);
            }
        }
    }
}

/* --- errors of one rank or of all -------------------------------------------------------------------------------- */

static int32_t wrong_on_one_rank(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    placed_by_rows(s, ranks, shards);
    shards[ranks - 1].rank = ranks;
    return ranks;
}

static int32_t overlapping(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    placed_by_rows(s, ranks, shards);
    if (s->size[0] > 20) {
        shards[0].size[0]++;
    }
    return ranks;
}

static int32_t with_a_hole(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    placed_by_rows(s, ranks, shards);
    if (s->size[0] == 40) {
        shards[1].size[0]--;
    }
    return ranks;
}

static int32_t beyond_the_end(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    placed_by_rows(s, ranks, shards);
    shards[1].start[0] = s->size[0];
    return ranks;
}

static double rate_of_the_first; /* 0: the same as the others */

static void train_with_another_rate(tch_comm *comm, int32_t rank, void *user)
{
    shared_training *t = user;
    shared_training mine = *t;
    mine.config.lr = rank == 0 && rate_of_the_first != 0.0 ? rate_of_the_first : t->config.lr;
    shared_train(comm, rank, &mine);
    t->statuses[rank] = mine.statuses[rank];
    memcpy(t->messages[rank], mine.messages[rank], sizeof mine.messages[rank]);
}

enum { NONE = -1 };

/* A rank with an invalid call gets its own error, and the others do not hang; nothing is changed. */
TEST(wrong_calls)
{
    static const char cover[] = "overlap without being equal, or leave elements out";
    static const char outside[] = "outside the tensor or the group";
    static const char apart[] = "gradients of different parameters: some have one of '";
    static const struct {
        const char *name;
        tch_optim_kind kind;
        int32_t ranks;
        placed_how place;
        int32_t lacking_rank, wrong_rank; /* of a gradient */
        double rate_of_the_first;
        tch_state_dtype moments;
        tch_status status; /* of all ranks but one */
        const char *words;
        int32_t at_fault; /* that one */
        tch_status own_status;
        const char *own_words;
    } cases[] = {
        {"gradient missing", TCH_OPTIM_SHAMPOO, 4, placed_replicated, 2, NONE, 0, 0, TCH_ERR_COMM, apart, NONE, 0, ""},
        {"gradient missing", TCH_OPTIM_SHAMPOO, 4, placed_by_rows, 2, NONE, 0, 0, TCH_ERR_COMM, apart, NONE, 0, ""},
        {"gradient missing", TCH_OPTIM_SHAMPOO, 4, placed_by_columns, 2, NONE, 0, 0, TCH_ERR_COMM, apart, NONE, 0, ""},
        {"gradient of another shape", TCH_OPTIM_MUON, 3, placed_replicated, NONE, 1, 0, 0, TCH_ERR_COMM,
         "nothing was changed", 1, TCH_ERR_SHAPE, ""},
        {"another rate", TCH_OPTIM_SOAP, 3, placed_by_rows, NONE, NONE, 0.5, 0, TCH_ERR_COMM,
         "different models, options or placements", NONE, 0, ""},
        {"a rate that is refused", TCH_OPTIM_MUON, 3, placed_by_rows, NONE, NONE, -1.0, 0, TCH_ERR_COMM,
         "could not make its part", 0, TCH_ERR_INVALID_ARGUMENT, "lr is -1"},
        {"a shard of no rank", TCH_OPTIM_MUON, 3, wrong_on_one_rank, NONE, NONE, 0, 0, TCH_ERR_INVALID_ARGUMENT,
         outside, NONE, 0, ""},
        {"overlapping", TCH_OPTIM_MUON, 2, overlapping, NONE, NONE, 0, 0, TCH_ERR_INVALID_ARGUMENT, cover, NONE, 0, ""},
        {"with a hole", TCH_OPTIM_MUON, 2, with_a_hole, NONE, NONE, 0, 0, TCH_ERR_INVALID_ARGUMENT, cover, NONE, 0, ""},
        {"beyond the end", TCH_OPTIM_MUON, 2, beyond_the_end, NONE, NONE, 0, 0, TCH_ERR_INVALID_ARGUMENT, outside, NONE,
         0, ""},
        {"moments in int8", TCH_OPTIM_ADAMW, 2, placed_by_columns, NONE, NONE, 0, TCH_STATE_INT8, TCH_ERR_UNSUPPORTED,
         "the shards of 'p11' cut blocks of 128", NONE, 0, ""},
        {"moments in int8", TCH_OPTIM_MUON, 2, placed_by_rows, NONE, NONE, 0, TCH_STATE_INT8, TCH_ERR_UNSUPPORTED,
         "'p8' is a matrix that ranks share", NONE, 0, ""},
    };
    for (size_t k = 0; k < TEST_COUNT(cases); k++) {
        test_case("%s, case %d", cases[k].name, (int)k);
        tch_optim_config c = shared_config(cases[k].kind);
        c.numerics.nonfinite = TCH_NONFINITE_RAISE; /* so that the host sees it at once on a GPU too */
        c.memory.state_dtype = cases[k].moments;
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        t.lacking_rank = cases[k].lacking_rank;
        t.wrong_rank = cases[k].wrong_rank;
        rate_of_the_first = cases[k].rate_of_the_first;
        run_bad(&t, cases[k].ranks, cases[k].place, train_with_another_rate);
        for (int32_t r = 0; r < cases[k].ranks; r++) {
            bool own = r == cases[k].at_fault;
            check_rank(&t, r, own ? cases[k].own_status : cases[k].status, own ? cases[k].own_words : cases[k].words);
        }
    }
}

TEST_MAIN(shared_open, shared_close)

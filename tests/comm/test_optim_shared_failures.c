/* What goes wrong on one rank of a shared optimizer: no other waits for it, none goes on alone, and every rank gets an
 * error that says what happened. Placements that are wrong are refused by all. */
#include <math.h>
#include <string.h>

#include "support/comm/shared_trial.h"
#include "support/testing.h"

/* --- failures ---------------------------------------------------------------------------------------------------- */

/* Every rank must have ended as `expected`, with these words in its message. */
static void check_all(const shared_training *t, int32_t ranks, tch_status expected, const char *words)
{
    for (int32_t r = 0; r < ranks; r++) {
        CHECK(t->statuses[r] == expected && strstr(t->messages[r], words) != NULL, "rank %d gave %s: %s", r,
              tch_status_name(t->statuses[r]), t->messages[r]);
    }
}

/* Ranks of a group of their own, of which something goes wrong. */
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

/* A NaN that one rank alone sees: with SKIP the step is skipped by all, so that the end is the same as without the
 * step; with RAISE all get the error. Where every rank has the whole gradient, ranks disagree about its value, and all
 * the same none takes the step. */
static void nan_on_one_rank(void **state)
{
    const placed_numbers *n = *state;
    for (size_t p = 0; p < TEST_COUNT(failing_placements); p++) {
        test_case("placement %d", (int)p);
        tch_optim_config c = shared_config(TCH_OPTIM_MUON);
        c.nonfinite = TCH_NONFINITE_RAISE;
        shared_training t = shared_training_of(n, &c, TCH_FLOAT32);
        t.bad_rank = 1;
        t.bad_step = 3;
        run_bad(&t, 3, failing_placements[p], shared_train);
        check_all(&t, 3, TCH_ERR_NUMERIC, "nothing was changed");

        double *ends[SHARED_PARAMETERS];
        placed_room(ends, SHARED_PARAMETERS, shared_model, 0xFF);
        c.nonfinite = TCH_NONFINITE_SKIP;
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

static void gradient_missing_on_one_rank(void **state)
{
    for (size_t p = 0; p < TEST_COUNT(failing_placements); p++) {
        test_case("placement %d", (int)p);
        tch_optim_config c = shared_config(TCH_OPTIM_SHAMPOO);
        c.nonfinite = TCH_NONFINITE_RAISE; /* so that the host learns of it at once on a GPU too */
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        t.lacking_rank = 2;
        run_bad(&t, 4, failing_placements[p], shared_train);
        check_all(&t, 4, TCH_ERR_COMM, "gradients of different parameters");
    }
}

/* A wrong gradient on one rank: that one has its error, the others do not wait for it, and nothing is changed. */
static void wrong_gradient_on_one_rank(void **state)
{
    tch_optim_config c = shared_config(TCH_OPTIM_MUON);
    c.nonfinite = TCH_NONFINITE_RAISE;
    shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
    t.wrong_rank = 1;
    run_bad(&t, 3, placed_replicated, shared_train);
    CHECK(t.statuses[1] == TCH_ERR_SHAPE, "%s", t.messages[1]);
    for (int32_t r = 0; r < 3; r += 2) {
        CHECK(t.statuses[r] == TCH_ERR_COMM && strstr(t.messages[r], "nothing was changed") != NULL, "%s",
              t.messages[r]);
    }
}

static double rate_of_the_first;

static void other_rate_on_the_first(tch_comm *comm, int32_t rank, void *user)
{
    shared_training *t = user;
    shared_training mine = *t;
    mine.config.lr = rank == 0 ? rate_of_the_first : t->config.lr;
    shared_train(comm, rank, &mine);
    t->statuses[rank] = mine.statuses[rank];
    memcpy(t->messages[rank], mine.messages[rank], sizeof mine.messages[rank]);
}

static void different_code(void **state)
{
    tch_optim_config c = shared_config(TCH_OPTIM_SOAP);
    shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
    rate_of_the_first = 0.5;
    run_bad(&t, 3, placed_by_rows, other_rate_on_the_first);
    check_all(&t, 3, TCH_ERR_COMM, "different models, options or placements");
}

static int32_t wrong_on_one_rank(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    placed_by_rows(s, ranks, shards);
    shards[ranks - 1].rank = ranks;
    return ranks;
}

/* A rank that cannot make its part has its own error, and the others do not wait for it. */
static void refused_by_one_rank(void **state)
{
    tch_optim_config c = shared_config(TCH_OPTIM_MUON);
    shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
    rate_of_the_first = -1.0;
    run_bad(&t, 3, placed_by_rows, other_rate_on_the_first);
    CHECK(t.statuses[0] == TCH_ERR_INVALID_ARGUMENT && strstr(t.messages[0], "lr is -1") != NULL, "%s", t.messages[0]);
    for (int32_t r = 1; r < 3; r++) {
        CHECK(t.statuses[r] == TCH_ERR_COMM && strstr(t.messages[r], "could not make its part") != NULL, "%s",
              t.messages[r]);
    }
    run_bad(&t, 3, wrong_on_one_rank, shared_train);
    check_all(&t, 3, TCH_ERR_INVALID_ARGUMENT, "outside the tensor or the group");
}

/* A rank dies at each of the collectives of the first steps, or its transport fails there: every other rank ends with
 * an error that names the group and the operation. */
static void rank_that_dies(void **state)
{
    for (int64_t call = 1; call <= 8; call++) {
        for (int gone = 0; gone < 2; gone++) {
            test_case("collective %lld, %s", (long long)call, gone ? "gone" : "failing");
            pretend_group group;
            pretend_open(&group, 3);
            group.timeout_s = 0.3;
            group.ranks[1].fails_at = gone ? 0 : call;
            group.ranks[1].gone_at = gone ? call : 0;
            tch_optim_config c = shared_config(TCH_OPTIM_MUON);
            shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
            t.group = &group;
            t.place = placed_by_rows;
            pretend_run(&group, shared_train, &t);
            check_all(&t, 3, TCH_ERR_COMM, "of 'pretended', rank ");
            pretend_close(&group);
        }
    }
}

/* --- placements that are wrong ------------------------------------------------------------------------------------ */

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

static void bad_placements(void **state)
{
    static const struct {
        placed_how place;
        const char *words;
    } cases[] = {
        {overlapping, "overlap without being equal, or leave elements out"},
        {with_a_hole, "overlap without being equal, or leave elements out"},
        {beyond_the_end, "outside the tensor or the group"},
    };
    for (size_t k = 0; k < TEST_COUNT(cases); k++) {
        test_case("case %d", (int)k);
        tch_optim_config c = shared_config(TCH_OPTIM_MUON);
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        run_bad(&t, 2, cases[k].place, shared_train);
        check_all(&t, 2, TCH_ERR_INVALID_ARGUMENT, cases[k].words);
    }
}

static void moments_in_less_memory(void **state)
{
    for (int dtype = TCH_STATE_BFLOAT16; dtype <= TCH_STATE_INT8; dtype++) {
        test_case("state_dtype %d", dtype);
        tch_optim_config c = shared_config(TCH_OPTIM_ADAMW);
        c.state_dtype = (tch_state_dtype)dtype;
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        run_bad(&t, 2, placed_by_rows, shared_train);
        check_all(&t, 2, TCH_ERR_UNSUPPORTED, "state_dtype is");
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nan_on_one_rank),
        cmocka_unit_test(wrong_gradient_on_one_rank),
        cmocka_unit_test(gradient_missing_on_one_rank),
        cmocka_unit_test(different_code),
        cmocka_unit_test(refused_by_one_rank),
        cmocka_unit_test(rank_that_dies),
        cmocka_unit_test(bad_placements),
        cmocka_unit_test(moments_in_less_memory),
    };
    return cmocka_run_group_tests(tests, shared_open, shared_close);
}

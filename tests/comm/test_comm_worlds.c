/* Processes that share an optimizer over the fake NCCL, on emulated GPUs with asynchronous streams: bitwise equal to
 * one process, and with one fault on one rank every other rank gets an error that names it.
 *
 * Only ranks have contexts: a process with threads cannot be forked. */
#define _GNU_SOURCE /* MAP_ANONYMOUS */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/comm/shared_trial.h"
#include "support/testing.h"

enum { STEPS = 5, MOST_RANKS = 8, BAD_RANK = 1, ELEMENTS = PLACED_ELEMENTS / 2 };

/* In memory of all processes. Elements of parameters that a rank does not have remain NaN. */
typedef struct outcome {
    tch_status status;
    int32_t taken;
    char message[256];
    double values[SHARED_PARAMETERS][ELEMENTS];
} outcome;

typedef struct world {
    shared_training training;
    int32_t ranks; /* 0: one process without a group */
    double timeout_s;
    const char *fault; /* of the bad rank, see fake_nccl.c */
    char id[TCH_NCCL_ID_BYTES];
    outcome *outcomes;
    int endings[MOST_RANKS];
} world;

static world world_of(const placed_numbers *numbers, tch_optim_kind kind, int32_t ranks, placed_how place)
{
    tch_optim_config config = shared_config(kind);
    world w = {.training = shared_training_of(numbers, &config, TCH_FLOAT32), .ranks = ranks, .timeout_s = 100.0};
    w.training.place = place;
    w.training.steps = STEPS;
    return w;
}

static void run_rank(world *w, int32_t rank)
{
    outcome *o = &w->outcomes[rank];
    double *end[SHARED_PARAMETERS];
    tch_context *context = NULL;
    tch_comm *comm = NULL;
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.name = "world";
    config.timeout_s = w->timeout_s;
    if (rank == BAD_RANK && w->fault != NULL) {
        setenv("FAKE_NCCL_FAULT", w->fault, 1);
    }
    CHECK_OK(tch_context_create(test_device(), &context));
    if (w->ranks > 0) {
        CHECK_OK(tch_comm_create_nccl_with(context, w->id, rank, w->ranks, &config, &comm));
    }
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        end[i] = o->values[i];
    }
    w->training.end = end;
    shared_train(comm, rank, &w->training);
    o->status = w->training.statuses[rank];
    o->taken = w->training.taken[rank];
    memcpy(o->message, w->training.messages[rank], sizeof o->message);
    tch_comm_destroy(comm);
    tch_context_destroy(context);
}

static void close_outcomes(void *outcomes)
{
    munmap(outcomes, MOST_RANKS * sizeof(outcome));
}

static void run_world(world *w)
{
    int32_t processes = w->ranks > 0 ? w->ranks : 1;
    size_t bytes = MOST_RANKS * sizeof *w->outcomes;
    pid_t children[MOST_RANKS];
    w->outcomes = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(w->outcomes != MAP_FAILED);
    test_own(w->outcomes, close_outcomes);
    CHECK_OK(tch_comm_nccl_id(w->id));
    fflush(NULL);
    for (int32_t r = 0; r < processes; r++) {
        memset(w->outcomes[r].values, 0xFF, sizeof w->outcomes[r].values);
        children[r] = fork();
        assert_true(children[r] >= 0);
        if (children[r] == 0) {
            setenv("CMOCKA_TEST_ABORT", "1", 1); /* ends the process, not the test */
            run_rank(w, r);
            _exit(0);
        }
    }
    for (int32_t r = 0; r < processes; r++) {
        assert_int_equal(waitpid(children[r], &w->endings[r], 0), children[r]);
    }
}

static void check_rank(const world *w, int32_t rank, tch_status status, const char *words, int32_t taken)
{
    const outcome *o = &w->outcomes[rank];
    CHECK(WIFEXITED(w->endings[rank]) && WEXITSTATUS(w->endings[rank]) == 0, "rank %d ended with %#x", rank,
          w->endings[rank]);
    CHECK(o->status == status && strstr(o->message, words) != NULL && o->taken <= taken,
          "rank %d gave %s after %d steps: %s", rank, tch_status_name(o->status), o->taken, o->message);
}

/* --- equal to one process ---------------------------------------------------------------------------------------- */

static void compare(const world *alone, const world *w)
{
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        for (int64_t k = 0; k < placed_count(&shared_model[i]); k++) {
            double expected = alone->outcomes[0].values[i][k];
            int32_t found = 0;
            for (int32_t r = 0; r < w->ranks; r++) {
                double value = w->outcomes[r].values[i][k];
                CHECK(isnan(value) || value == expected, "%.17g on rank %d, expected %.17g, at %lld of parameter %d",
                      value, r, expected, (long long)k, i);
                found += !isnan(value);
            }
            CHECK(found > 0 && isfinite(expected), "no rank has element %lld of parameter %d", (long long)k, i);
        }
    }
}

TEST(equal_to_one_process)
{
    static const struct {
        tch_optim_kind kind;
        int32_t ranks;
        placed_how place;
    } cases[] = {
        {TCH_OPTIM_MUON, 2, placed_replicated}, {TCH_OPTIM_MUON, 3, placed_by_columns},
        {TCH_OPTIM_SHAMPOO, 4, placed_by_both}, {TCH_OPTIM_SHAMPOO, 2, placed_by_rows},
        {TCH_OPTIM_SOAP, 3, placed_replicated}, {TCH_OPTIM_ADAMW, 8, placed_by_rows},
    };
    world alone = {.ranks = 0};
    for (size_t c = 0; c < TEST_COUNT(cases); c++) {
        test_case("kind %d on %d ranks", (int)cases[c].kind, cases[c].ranks);
        if (c == 0 || cases[c].kind != cases[c - 1].kind) {
            alone = world_of(*state, cases[c].kind, 0, placed_replicated);
            run_world(&alone);
            check_rank(&alone, 0, TCH_OK, "", STEPS);
        }
        world w = world_of(*state, cases[c].kind, cases[c].ranks, cases[c].place);
        run_world(&w);
        for (int32_t r = 0; r < w.ranks; r++) {
            check_rank(&w, r, TCH_OK, "", STEPS);
        }
        compare(&alone, &w);
    }
}

/* --- faults ------------------------------------------------------------------------------------------------------ */

/* In the second step; the sixth collective is its first exchange. */
TEST(faults)
{
    static const char no_end[] = "all_to_all is not done within 3 s";
    static const char no_progress[] = "has made no progress on the GPU for 3 s";
    static const struct {
        const char *fault; /* NULL: no memory */
        double timeout_s;
        const char *words, *own_words;
    } cases[] = {
        {"loses 6", 100.0, "rank 1 sent message", ""},
        {"miscounts 6", 100.0, "rank 1 sent message", ""},
        {"swaps 5", 100.0, "sent message", ""},
        {"fails 6", 100.0, "a planted error", ""},
        {"never begins 6", 3.0, " 3 s; the communicator was aborted", no_end},
        {"never ends 6", 3.0, no_progress, no_progress},
        {"dies 6", 100.0, "rank 1 has ended without leaving the group", NULL},
        {NULL, 100.0, "rank 1 gave up: this call needs", "workspace limit"},
    };
    for (size_t c = 0; c < TEST_COUNT(cases); c++) {
        bool poor = cases[c].fault == NULL;
        test_case("%s", poor ? "no memory" : cases[c].fault);
        world w = world_of(*state, poor ? TCH_OPTIM_SHAMPOO : TCH_OPTIM_MUON, 3, placed_by_rows);
        w.fault = cases[c].fault;
        w.training.poor_rank = poor ? BAD_RANK : -1;
        w.timeout_s = cases[c].timeout_s;
        run_world(&w);
        check_rank(&w, 0, TCH_ERR_COMM, cases[c].words, STEPS - 1);
        check_rank(&w, 2, TCH_ERR_COMM, cases[c].words, STEPS - 1);
        if (cases[c].own_words != NULL) {
            check_rank(&w, BAD_RANK, poor ? TCH_ERR_OUT_OF_MEMORY : TCH_ERR_COMM, cases[c].own_words, STEPS - 1);
        } else {
            CHECK(WIFSIGNALED(w.endings[BAD_RANK]) && WTERMSIG(w.endings[BAD_RANK]) == SIGKILL, "it lives");
        }
    }
}

/* A step that not all ranks can take, of which some hosts learn only at the next: all go on together. */
static void continue_after(world *w, tch_status own_status, const char *own_words, int32_t own_errors,
                           const char *words, int32_t errors)
{
    w->training.goes_on = true;
    run_world(w);
    for (int32_t r = 0; r < w->ranks; r++) {
        bool own = r == BAD_RANK;
        check_rank(w, r, own ? own_status : TCH_ERR_COMM, own ? own_words : words, STEPS);
        assert_int_equal(w->outcomes[r].taken, STEPS - (own ? own_errors : errors));
    }
}

TEST(refused_step)
{
    world alone = world_of(*state, TCH_OPTIM_MUON, 0, placed_replicated);
    world w = world_of(*state, TCH_OPTIM_MUON, 3, placed_by_rows);
    w.training.wrong_rank = BAD_RANK; /* at step 1 */
    w.training.missing = alone.training.missing = -1;
    alone.training.skipped = 3u << 1;
    run_world(&alone);
    continue_after(&w, TCH_ERR_SHAPE, "the gradient of 'p1'", 2,
                   "at the last step another rank of the group could not take the step", 1);
    compare(&alone, &w);
}

/* Hosts with the first gradient look at the decision, the one without it does not. */
TEST(late_first_gradient)
{
    world w = world_of(*state, TCH_OPTIM_SHAMPOO, 3, placed_by_rows);
    w.training.late = true;
    w.training.lacking_rank = BAD_RANK; /* at step 1 */
    continue_after(&w, TCH_ERR_COMM, "at the last step", 1, "some have one of 'p1'", 2);
}

TEST_MAIN(shared_open, shared_close)

/* A group of one GPU over NCCL: an optimizer takes bitwise the same steps as without a group, with and without
 * timeout_s. If it has all blocks itself it uses no collectives; parameters in two shards are communicated. Skipped
 * without NCCL. With a single GPU, a second rank can only be one that never comes.
 *
 * With support/cuda/fake_nccl.c, a fake NCCL and CUDA, failures are tested too: a collective that never completes ends
 * in an error that names the group, the operation and the reason. */
#include <dlfcn.h>
#include <time.h>

#include <torchium/comm.h>

#include "comm/comm.h"
#include "support/optim/optim_defaults.h"
#include "support/random.h"
#include "support/testing.h"

enum { ROWS = 48, COLS = 32, STEPS = 6 };

static char last_words[512]; /* of the step that failed */

enum { WELL, NEVER_ENDS, NEVER_BEGINS, ERROR_BESIDE, NEVER_MEETS }; /* of fake_nccl.c */
static void (*behave)(int how);                                     /* NULL: NCCL is real */
static int (*aborts)(void);

/* Trains a matrix, replicated or in two shards of this rank; the collectives from step `bad` on behave as set. */
static tch_status train_until(tch_context *context, tch_comm *comm, bool sharded, tch_optim_kind kind, int bad, int how,
                              double *end)
{
    int64_t shape[2] = {ROWS, COLS};
    test_random random = test_random_stream(5);
    double *values = test_alloc(ROWS * COLS * sizeof(double));
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 2, shape);
    tch_tensor *parameter, *gradient;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &parameter));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &gradient));
    test_random_fill_normal(&random, values, ROWS * COLS);
    CHECK_OK(tch_tensor_copy(context, parameter, &host));

    tch_parameter entry = {.tensor = parameter, .name = "w"};
    tch_shard halves[] = {{.rank = 0, .size = {ROWS / 2, COLS}},
                          {.rank = 0, .start = {ROWS / 2}, .offset = {ROWS / 2}, .size = {ROWS / 2, COLS}}};
    tch_placement placement = {sizeof placement, 2, shape, sharded ? 2 : 0, halves};
    tch_optim_config config = test_optim_defaults(kind);
    config.shampoo.precondition_frequency = 2;
    tch_optimizer *optimizer;
    tch_optim_setup setup = {sizeof setup, .comm = comm, .placements = &placement};
    CHECK_OK(tch_optimizer_create(context, &config, &setup, 1, &entry, &optimizer));
    tch_status status = TCH_OK;
    for (int step = 0; step < STEPS && status == TCH_OK; step++) {
        const tch_tensor *gradients[] = {gradient};
        test_random_fill_normal(&random, values, ROWS * COLS);
        CHECK_OK(tch_tensor_copy(context, gradient, &host));
        if (step == bad) {
            behave(how);
        }
        status = tch_optimizer_step(optimizer, 1, gradients);
        if (step >= bad) {
            nanosleep(&(struct timespec){0, 200000000}, NULL); /* longer than the default timeout */
        }
    }
    host.data = end;
    snprintf(last_words, sizeof last_words, "%s", status == TCH_OK ? "" : tch_last_error());
    if (status == TCH_OK) {
        CHECK_OK(tch_tensor_copy(context, &host, parameter));
    }
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(parameter);
    tch_tensor_destroy(gradient);
    return status;
}

static void train(tch_context *context, tch_comm *comm, bool sharded, tch_optim_kind kind, double *end)
{
    CHECK(train_until(context, comm, sharded, kind, STEPS, WELL, end) == TCH_OK, "%s", last_words);
}

static void make_id(char id[TCH_NCCL_ID_BYTES])
{
    if (tch_comm_nccl_id(id) == TCH_ERR_UNAVAILABLE) {
        print_message("%s\n", tch_last_error());
        skip();
    }
}

static int64_t collectives_of(tch_comm *comm)
{
    tch_comm_traffic traffic = TCH_COMM_TRAFFIC_INIT;
    CHECK_OK(tch_comm_get_traffic(comm, &traffic));
    return traffic.collectives;
}

static void compare_all(tch_context *context, tch_comm *comm)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP, TCH_OPTIM_MUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        double alone[ROWS * COLS], whole[ROWS * COLS], sharded[ROWS * COLS];
        test_case("kind %d", (int)kinds[k]);
        int64_t before = collectives_of(comm);
        train(context, NULL, false, kinds[k], alone);
        train(context, comm, false, kinds[k], whole);
        CHECK(collectives_of(comm) == before, "%lld collectives of one rank", (long long)collectives_of(comm) - before);
        train(context, comm, true, kinds[k], sharded);
        CHECK(collectives_of(comm) >= before + STEPS, "nothing went through NCCL");
        assert_memory_equal(alone, whole, sizeof alone);
        assert_memory_equal(alone, sharded, sizeof alone);
    }
}

/* Functions that optimizers of one rank do not call. */
static void gather(tch_context *context, tch_comm *comm)
{
    enum { COUNT = 1000 };
    int64_t shape[] = {COUNT};
    double values[COUNT], back[COUNT];
    test_random random = test_random_stream(6);
    test_random_fill_normal(&random, values, COUNT);
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, 1, shape);
    tch_tensor *send, *receive;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 1, shape, TCH_CONTIGUOUS, &send));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 1, shape, TCH_CONTIGUOUS, &receive));
    CHECK_OK(tch_tensor_copy(context, send, &host));
    CHECK_OK(tchi_comm_all_gather(comm, send->data, receive->data, sizeof values, tchi_comm_stream(context)));
    host.data = back;
    CHECK_OK(tch_tensor_copy(context, &host, receive));
    assert_memory_equal(values, back, sizeof values);
    tch_tensor_destroy(send);
    tch_tensor_destroy(receive);
}

/* Without a timeout if timeout_s is 0; otherwise by a nonblocking communicator and its watch thread. */
static tch_status make_group(tch_context *context, double timeout_s, int32_t ranks, tch_comm **comm)
{
    char id[TCH_NCCL_ID_BYTES];
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.name = "watched";
    config.timeout_s = timeout_s;
    make_id(id);
    return tch_comm_create_nccl_with(context, id, 0, ranks, &config, comm);
}

TEST(one_gpu)
{
    for (int watched = 0; watched < 2; watched++) {
        tch_comm *comm;
        int before = aborts == NULL ? 0 : aborts();
        CHECK_OK(make_group(*state, watched ? 30.0 : 0.0, 1, &comm));
        compare_all(*state, comm);
        gather(*state, comm);
        tch_comm_destroy(comm);
        assert_int_equal(aborts == NULL ? 0 : aborts(), before);
    }
}

TEST(rank_that_never_comes)
{
    tch_comm *comm = NULL;
    if (behave != NULL) {
        behave(NEVER_MEETS);
    }
    tch_status status = make_group(*state, 0.5, behave != NULL ? 1 : 2, &comm);
    CHECK(status == TCH_ERR_COMM && comm == NULL, "gave %s: %s", tch_status_name(status), tch_last_error());
    CHECK(strstr(tch_last_error(), "the meeting of the ranks is not done within 0.5 s") != NULL, "%s",
          tch_last_error());
    if (behave != NULL) {
        behave(WELL);
    }
}

TEST(bad_configurations)
{
    char id[TCH_NCCL_ID_BYTES] = {0};
    tch_comm *comm = NULL;
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    static const double times[] = {-1.0, NAN, INFINITY};
    for (size_t i = 0; i < TEST_COUNT(times); i++) {
        config.timeout_s = times[i];
        assert_int_equal(tch_comm_create_nccl_with(*state, id, 0, 1, &config, &comm), TCH_ERR_INVALID_ARGUMENT);
        CHECK(strstr(tch_last_error(), "timeout_s") != NULL, "%s", tch_last_error());
    }
    config.struct_size = 3;
    assert_int_equal(tch_comm_create_nccl_with(*state, id, 0, 1, &config, &comm), TCH_ERR_INVALID_ARGUMENT);
    assert_null(comm);
}

/* --- with the fake NCCL ------------------------------------------------------------------------------------------ */

static void skip_without_fake(void)
{
    if (behave == NULL) {
        skip();
    }
}

TEST(too_late)
{
    static const struct {
        int how;
        const char *words;
    } cases[] = {
        {NEVER_ENDS, "has made no progress on the GPU for 0.1 s"},
        {NEVER_BEGINS, "is not done within 0.1 s"},
        {ERROR_BESIDE, "remote process exited"},
    };
    skip_without_fake();
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_comm *comm;
        int before = aborts();
        test_case("case %d", (int)i);
        CHECK_OK(make_group(*state, 0.1, 1, &comm));
        tch_status status = train_until(*state, comm, true, TCH_OPTIM_SHAMPOO, 2, cases[i].how, NULL);
        behave(WELL);
        CHECK(status == TCH_ERR_COMM && strstr(last_words, cases[i].words) != NULL &&
                  strstr(last_words, "of 'watched', rank 0 of 1, failed: NCCL: ") != NULL,
              "gave %s: %s", tch_status_name(status), last_words);
        CHECK(aborts() == before + 1, "%d aborts", aborts() - before);
        tch_comm_destroy(comm);
        CHECK(aborts() == before + 1, "%d aborts", aborts() - before);
        CHECK_OK(make_group(*state, 30.0, 1, &comm)); /* another group works */
        tch_comm_destroy(comm);
    }
}

/* The message of each case, from the collective that finds the error. */
TEST(words_of_the_collective)
{
    skip_without_fake();
    tch_comm *comm;
    int64_t shape[1] = {4};
    tch_tensor *tensor;
    tch_optimizer *optimizer;
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    CHECK_OK(make_group(*state, 0.1, 1, &comm));
    CHECK_OK(tch_tensor_create(*state, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &tensor));
    tch_parameter entry = {.tensor = tensor, .name = "w"};
    tch_shard halves[] = {{.rank = 0, .size = {2}}, {.rank = 0, .start = {2}, .offset = {2}, .size = {2}}};
    tch_placement placement = {sizeof placement, 1, shape, 2, halves};
    behave(NEVER_BEGINS);
    CHECK(tch_optimizer_create(*state, &config,
                               &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = &placement}, 1,
                               &entry, &optimizer) == TCH_ERR_COMM,
          "%s", tch_last_error());
    CHECK(strstr(tch_last_error(), "reduce_max of 'watched', rank 0 of 1, failed: NCCL: reduce_max is not done within "
                                   "0.1 s; the communicator was aborted") != NULL,
          "%s", tch_last_error());
    behave(WELL);
    tch_tensor_destroy(tensor);
    tch_comm_destroy(comm);
}

static int find_fake(void **state)
{
    const char *path = getenv("TORCHIUM_NCCL");
    void *fake = path == NULL ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (fake != NULL) {
        void *symbols[2] = {dlsym(fake, "fake_nccl_behave"), dlsym(fake, "fake_nccl_aborts")};
        memcpy(&behave, &symbols[0], sizeof behave);
        memcpy(&aborts, &symbols[1], sizeof aborts);
    }
    return test_open_context(state);
}

TEST_MAIN(find_fake, test_close_context)

/* timeout_s of groups over NCCL, with an NCCL and a CUDA that only pretend: what is on time goes on as without it, and
 * whatever never comes ends in an error that names the group, the operation and the reason. */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <torchium/comm.h>

#include "support/optim/optim_defaults.h"
#include "support/random.h"
#include "support/testing.h"

enum { ROWS = 12, COLS = 8, STEPS = 5 };
enum { WELL, NEVER_ENDS, NEVER_BEGINS, ERROR_BESIDE, NEVER_MEETS }; /* of fake_nccl.c */

static char last_words[512]; /* of the step that failed */
static void (*behave)(int how);
static int (*aborts)(void);

static int find_fake(void **state)
{
    void *fake = dlopen(getenv("TORCHIUM_NCCL"), RTLD_NOW | RTLD_LOCAL);
    void *symbols[2] = {NULL, NULL};
    if (fake != NULL) {
        symbols[0] = dlsym(fake, "fake_nccl_behave");
        symbols[1] = dlsym(fake, "fake_nccl_aborts");
    }
    memcpy(&behave, &symbols[0], sizeof behave);
    memcpy(&aborts, &symbols[1], sizeof aborts);
    return behave == NULL || aborts == NULL ? -1 : test_open_context(state);
}

static tch_status make_group(tch_context *context, double timeout_s, tch_comm **comm)
{
    char id[TCH_NCCL_ID_BYTES];
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.name = "watched";
    config.timeout_s = timeout_s;
    CHECK_OK(tch_comm_nccl_id(id));
    return tch_comm_create_nccl_with(context, id, 0, 1, &config, comm);
}

/* Trains a matrix in a sharded group; the collectives of step `bad` and later behave as told. */
static tch_status train(tch_context *context, tch_comm *comm, int bad, int how, double *end)
{
    int64_t shape[2] = {ROWS, COLS};
    test_random random = test_random_stream(7);
    double values[ROWS * COLS];
    tch_tensor *parameter, *gradient;
    tch_optimizer *optimizer;
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 2, shape, TCH_CONTIGUOUS, &parameter));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT64, 2, shape, TCH_CONTIGUOUS, &gradient));
    tch_parameter entry = {.tensor = parameter, .name = "w"};
    tch_shard halves[] = {{.rank = 0, .size = {ROWS / 2, COLS}}, /* a rank with all in one has nothing to exchange */
                          {.rank = 0, .start = {ROWS / 2}, .offset = {ROWS / 2}, .size = {ROWS - ROWS / 2, COLS}}};
    tch_placement placement = {sizeof placement, 2, shape, 2, halves};
    tch_optim_config config = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    CHECK_OK(tch_optimizer_create(
        context, &config,
        &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = comm == NULL ? NULL : &placement}, 1,
        &entry, &optimizer));
    tch_status status = TCH_OK;
    for (int step = 0; step < STEPS && status == TCH_OK; step++) {
        const tch_tensor *gradients[] = {gradient};
        test_random_fill_normal(&random, values, ROWS * COLS);
        memcpy(gradient->data, values, sizeof values);
        if (step == bad) {
            behave(how);
        }
        status = tch_optimizer_step(optimizer, 1, gradients);
        if (step >= bad) {
            nanosleep(&(struct timespec){0, 200000000}, NULL); /* longer than the time that groups have here */
        }
    }
    if (end != NULL) {
        memcpy(end, parameter->data, sizeof values);
    }
    snprintf(last_words, sizeof last_words, "%s", status == TCH_OK ? "" : tch_last_error());
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(parameter);
    tch_tensor_destroy(gradient);
    behave(WELL);
    return status;
}

static void on_time(void **state)
{
    double alone[ROWS * COLS];
    double watched[ROWS * COLS];
    tch_comm *comm;
    int before = aborts();
    CHECK_OK(train(*state, NULL, STEPS, WELL, alone));
    CHECK_OK(make_group(*state, 30.0, &comm));
    CHECK_OK(train(*state, comm, STEPS, WELL, watched));
    tch_comm_destroy(comm);
    assert_memory_equal(alone, watched, sizeof alone);
    assert_int_equal(aborts(), before);
}

static void too_late(void **state)
{
    static const struct {
        int how;
        const char *words;
    } cases[] = {
        {NEVER_ENDS, "has made no progress on the GPU for 0.1 s"},
        {NEVER_BEGINS, "is not done within 0.1 s"},
        {ERROR_BESIDE, "remote process exited"},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_comm *comm;
        int before = aborts();
        test_case("case %d", (int)i);
        CHECK_OK(make_group(*state, 0.1, &comm));
        tch_status status = train(*state, comm, 2, cases[i].how, NULL);
        CHECK(status == TCH_ERR_COMM && strstr(last_words, cases[i].words) != NULL &&
                  strstr(last_words, "of 'watched', rank 0 of 1, failed: NCCL: ") != NULL,
              "gave %s: %s", tch_status_name(status), last_words);
        CHECK(aborts() == before + 1, "%d aborts", aborts() - before);
        tch_comm_destroy(comm);
        CHECK(aborts() == before + 1, "%d aborts", aborts() - before);
        CHECK_OK(make_group(*state, 30.0, &comm)); /* another one is well */
        tch_comm_destroy(comm);
    }
}

/* The words of each case, from the collective that meets it. */
static void words(void **state)
{
    tch_comm *comm;
    int64_t shape[1] = {4};
    tch_tensor *tensor;
    tch_optimizer *optimizer;
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    CHECK_OK(make_group(*state, 0.1, &comm));
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

static void ranks_that_never_meet(void **state)
{
    tch_comm *comm = NULL;
    behave(NEVER_MEETS);
    CHECK(make_group(*state, 0.1, &comm) == TCH_ERR_COMM && comm == NULL, "it was made");
    CHECK(strstr(tch_last_error(), "the meeting of the ranks is not done within 0.1 s") != NULL, "%s",
          tch_last_error());
    behave(WELL);
}

static void bad_configurations(void **state)
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

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(on_time),
        cmocka_unit_test(too_late),
        cmocka_unit_test(words),
        cmocka_unit_test(ranks_that_never_meet),
        cmocka_unit_test(bad_configurations),
    };
    return cmocka_run_group_tests(tests, find_fake, test_close_context);
}

/* A group of one GPU over NCCL: an optimizer in it takes bit for bit the steps of one without, with a time set and
 * without. One that has all it works on here meets nobody; parameters in two shards travel. Where NCCL is not installed
 * the test is skipped. More GPUs than one are not to be had where this runs; a second rank that never comes is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/comm.h>

#include "comm/comm.h"
#include "support/optim/optim_defaults.h"
#include "support/random.h"
#include "support/testing.h"

enum { ROWS = 48, COLS = 32, STEPS = 6 };

static void train(tch_context *context, tch_comm *comm, bool sharded, tch_optim_kind kind, double *end)
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
    tch_placement placement = TCH_PLACEMENT_INIT;
    placement.ndim = 2;
    placement.shape = shape;
    placement.count = sharded ? 2 : 0;
    placement.shards = halves;
    tch_optim_config config = test_optim_defaults(kind);
    config.precondition_frequency = 2;
    tch_optimizer *optimizer;
    CHECK_OK(tch_optimizer_create(context, &config,
                                  &(tch_optim_setup){sizeof(tch_optim_setup), .comm = comm, .placements = &placement},
                                  1, &entry, &optimizer));
    for (int step = 0; step < STEPS; step++) {
        const tch_tensor *gradients[] = {gradient};
        test_random_fill_normal(&random, values, ROWS * COLS);
        CHECK_OK(tch_tensor_copy(context, gradient, &host));
        CHECK_OK(tch_optimizer_step(optimizer, 1, gradients));
    }
    host.data = end;
    CHECK_OK(tch_tensor_copy(context, &host, parameter));
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(parameter);
    tch_tensor_destroy(gradient);
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

/* What optimizers of one rank do not call. */
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

static void one_gpu(void **state)
{
    tch_context *context = *state;
    char id[TCH_NCCL_ID_BYTES];
    tch_comm *comm;
    make_id(id);
    CHECK_OK(tch_comm_create_nccl(context, id, 0, 1, &comm));
    compare_all(context, comm);
    gather(context, comm);
    tch_comm_destroy(comm);
}

/* The same by a communicator that does not block, with a thread beside it. */
static void one_gpu_with_a_timeout(void **state)
{
    tch_context *context = *state;
    char id[TCH_NCCL_ID_BYTES];
    tch_comm *comm;
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.timeout_s = 30.0;
    make_id(id);
    CHECK_OK(tch_comm_create_nccl_with(context, id, 0, 1, &config, &comm));
    compare_all(context, comm);
    gather(context, comm);
    tch_comm_destroy(comm);
}

static void rank_that_never_comes(void **state)
{
    char id[TCH_NCCL_ID_BYTES];
    tch_comm *comm = NULL;
    tch_comm_nccl_config config = TCH_COMM_NCCL_CONFIG_INIT;
    config.timeout_s = 2.0;
    make_id(id);
    tch_status status = tch_comm_create_nccl_with(*state, id, 0, 2, &config, &comm);
    CHECK(status == TCH_ERR_COMM && comm == NULL, "gave %s: %s", tch_status_name(status), tch_last_error());
    CHECK(strstr(tch_last_error(), "the meeting of the ranks is not done within 2 s") != NULL, "%s", tch_last_error());
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(one_gpu, test_open_context, test_close_context),
        cmocka_unit_test_setup_teardown(one_gpu_with_a_timeout, test_open_context, test_close_context),
        cmocka_unit_test_setup_teardown(rank_that_never_comes, test_open_context, test_close_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

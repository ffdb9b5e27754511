/* A step of every optimizer, captured in a CUDA graph and replayed: parameters must go the same way, to the bit, as
 * with calls. Clocks and decisions live on the device, so a replay corrects for bias and skips a bad gradient like a
 * call. */
#include <stdio.h>

#include "support/cuda/graphs.h"
#include "support/optim/optim_defaults.h"

enum { WARM = 3, REPLAYS = 6 };

static void call(test_training *t)
{
    test_training_draw(t);
    CHECK_OK(test_training_step(t));
}

static void check_kind(tch_context *context, const tch_optim_config *config, const char *name)
{
    tch_memory_info before = TCH_MEMORY_INFO_INIT;
    tch_memory_info after = TCH_MEMORY_INFO_INIT;
    test_case("%s", name);
    cudaStream_t stream = test_enter_stream(context);
    test_training called = test_training_begin(context, config);
    test_training replayed = test_training_begin(context, config);
    for (int step = 0; step < WARM; step++) {
        call(&called);
        call(&replayed);
    }
    CHECK_OK(tch_memory_get_info(context, &before));
    cudaGraphExec_t graph = test_capture(stream, test_training_step, &replayed);
    for (int step = WARM; step < WARM + REPLAYS; step++) {
        call(&called);
        test_training_draw(&replayed);
        CHECK_CUDA(cudaGraphLaunch(graph, stream));
    }
    CHECK_OK(tch_context_synchronize(context));
    CHECK_OK(tch_memory_get_info(context, &after));
    CHECK(after.misses == before.misses, "%lld allocations in the steady state",
          (long long)(after.misses - before.misses));
    test_check_same(TEST_PARAMETERS, called.parameter, replayed.parameter);
    test_training_end(&called);
    test_training_end(&replayed);
    test_leave_stream(context, stream, graph);
}

static void steps_are_captured_and_replayed(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        tch_optim_config config = test_optim_defaults((tch_optim_kind)kind);
        config.lr = 0.01;
        config.momentum = kind == TCH_OPTIM_SGD ? 0.9 : config.momentum;
        config.precondition_frequency = 1;
        config.max_preconditioner_dim = kind == TCH_OPTIM_SHAMPOO ? 40 : config.max_preconditioner_dim;
        char name[64];
        check_kind(*state, &config, tch_optim_kind_name(config.kind));
        for (int dtype = TCH_STATE_BFLOAT16; dtype <= TCH_STATE_INT8; dtype++) {
            tch_optim_config narrow = config;
            narrow.state_dtype = (tch_state_dtype)dtype;
            snprintf(name, sizeof name, "%s, state_dtype %d", tch_optim_kind_name(config.kind), dtype);
            check_kind(*state, &narrow, name);
        }
    }
    tch_optim_config config = test_optim_defaults(TCH_OPTIM_SHAMPOO);
    config.grafting = TCH_GRAFTING_ADAM;
    config.beta2 = 0.99;
    config.momentum = 0.5;
    config.precondition_frequency = 100;
    config.stagger = 0;
    check_kind(*state, &config, "shampoo between refreshes");
}

/* The decision to skip is taken on the device, inside the graph. */
static void a_replay_skips_a_bad_gradient(void **state)
{
    tch_context *context = *state;
    test_case("NaN in a replay");
    cudaStream_t stream = test_enter_stream(context);
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_ADAMW);
    test_training good = test_training_begin(context, &config);
    test_training t = test_training_begin(context, &config);
    call(&good);
    call(&t);
    cudaGraphExec_t graph = test_capture(stream, test_training_step, &t);
    double *values = test_tensor_read(t.gradient[1]);
    values[5] = NAN;
    test_tensor_write(t.gradient[1], values);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    test_training_draw(&t);
    CHECK_CUDA(cudaGraphLaunch(graph, stream));
    call(&good);
    CHECK_OK(tch_context_synchronize(context));
    test_check_same(TEST_PARAMETERS, good.parameter, t.parameter);
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    CHECK_OK(tch_optimizer_get_stats(t.optimizer, &stats));
    CHECK(stats.steps == 3 && stats.skipped == 1, "%lld steps, %lld skipped", (long long)stats.steps,
          (long long)stats.skipped);
    test_training_end(&good);
    test_training_end(&t);
    test_leave_stream(context, stream, graph);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_captured_and_replayed),
        cmocka_unit_test(a_replay_skips_a_bad_gradient),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

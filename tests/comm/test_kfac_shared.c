/* KFAC whose layers the ranks of a group divide, beside one process that sees the same samples: preconditioned
 * gradients are the same to the bit on the CPU, with kl_clip and without, and what a refresh makes has one owner. Ranks
 * are threads, and the group a pretended one. */
#include <stdio.h>
#include <string.h>

#include "support/comm/pretend_group.h"
#include "support/comm/shared_kfac.h"
#include "support/testing.h"

#define STEPS 4
typedef struct trial {
    tch_kfac_config config;
    double *gradients[PRETEND_MOST];          /* KFAC_ELEMENTS, after the last step */
    int32_t owned[PRETEND_MOST][KFAC_LAYERS]; /* tensors that are neither factors nor scales */
    char messages[PRETEND_MOST][512];         /* empty where all went well */
} trial;

static void count_owned(tch_kfac *kfac, int32_t owned[KFAC_LAYERS])
{
    for (int32_t i = 0; i < tch_kfac_state_count(kfac); i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        assert_int_equal(tch_kfac_get_state(kfac, i, &state), TCH_OK);
        owned[state.parameter] += strstr(state.name, "_factor") == NULL && strstr(state.name, "scales") == NULL;
    }
}

static void train(tch_comm *comm, int32_t rank, void *user)
{
    trial *t = user;
    tch_context *context = NULL;
    tch_kfac *kfac = NULL;
    tch_kfac_layer layers[KFAC_LAYERS];
    shared_kfac_describe(layers);
    assert_int_equal(tch_context_create("cpu", &context), TCH_OK);
    tch_status status = tch_kfac_create_shared(context, &t->config, comm, KFAC_LAYERS, layers, NULL, &kfac);
    for (int32_t s = 0; s < STEPS && status == TCH_OK; s++) {
        status = shared_kfac_step(kfac, s, t->gradients[rank]); /* the same numbers on every rank */
    }
    snprintf(t->messages[rank], sizeof t->messages[rank], "%s", status == TCH_OK ? "" : tch_last_error());
    if (kfac != NULL) {
        count_owned(kfac, t->owned[rank]);
    }
    tch_kfac_destroy(kfac);
    tch_context_destroy(context);
}

static const size_t all_bytes = KFAC_ELEMENTS * sizeof(double);

static void check_owners(const trial *t, int32_t ranks)
{
    int32_t results = t->config.method == TCH_KFAC_INVERSE ? 2 : 4;
    for (int32_t i = 0; i < KFAC_LAYERS; i++) {
        int32_t owned = 0;
        for (int32_t rank = 0; rank < ranks; rank++) {
            owned += t->owned[rank][i];
        }
        int32_t expected = t->config.method == TCH_KFAC_EKFAC ? ranks * results : results;
        CHECK(owned == expected, "layer %d has %d tensors on all ranks, expected %d", i, owned, expected);
    }
}

static void compare(trial *t, const double *expected, int32_t ranks)
{
    pretend_group group;
    pretend_open(&group, ranks);
    for (int32_t rank = 0; rank < ranks; rank++) {
        t->gradients[rank] = test_alloc(all_bytes);
        memset(t->gradients[rank], 0, all_bytes);
    }
    memset(t->owned, 0, sizeof t->owned);
    pretend_run(&group, train, t);
    for (int32_t rank = 0; rank < ranks; rank++) {
        CHECK(t->messages[rank][0] == '\0', "rank %d: %s", rank, t->messages[rank]);
        CHECK(memcmp(t->gradients[rank], expected, all_bytes) == 0, "rank %d has other gradients", rank);
        test_drop(t->gradients[rank]);
    }
    CHECK(group.mismatches == 0, "%lld bytes were sent that nobody expected", (long long)group.mismatches);
    check_owners(t, ranks);
    pretend_close(&group);
}

static void like_one_process(void **state)
{
    static const int32_t worlds[] = {1, 2, 3, 5, 16};
    (void)state;
    for (int method = 0; method < TCH_KFAC_METHOD_COUNT; method++) {
        for (int clips = 0; clips < 2; clips++) {
            trial *t = test_alloc(sizeof *t);
            memset(t, 0, sizeof *t);
            t->config = (tch_kfac_config)TCH_KFAC_CONFIG_INIT;
            t->config.method = (tch_kfac_method)method;
            t->config.kl_clip = clips ? 1e-3 : 0.0;
            t->config.factor_dtype = TCH_FLOAT64;
            double *expected = t->gradients[0] = test_alloc(all_bytes);
            memset(expected, 0, all_bytes);
            train(NULL, 0, t);
            CHECK(t->messages[0][0] == '\0', "one process: %s", t->messages[0]);
            for (size_t i = 0; i < TEST_COUNT(worlds); i++) {
                test_case("method %d, %s, %d ranks", method, clips ? "clipped" : "not clipped", worlds[i]);
                compare(t, expected, worlds[i]);
            }
        }
    }
}

/* A rank that is gone: the others have an error, and every later call says that KFAC has failed. */
static void rank_that_dies(void **state)
{
    (void)state;
    trial *t = test_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    t->config = (tch_kfac_config)TCH_KFAC_CONFIG_INIT;
    t->config.factor_dtype = TCH_FLOAT64;
    pretend_group group;
    pretend_open(&group, 3);
    group.timeout_s = 0.2;
    group.ranks[1].gone_at = 2;
    for (int32_t rank = 0; rank < 3; rank++) {
        t->gradients[rank] = test_alloc(all_bytes);
    }
    pretend_run(&group, train, t);
    for (int32_t rank = 0; rank < 3; rank++) {
        CHECK(strstr(t->messages[rank], "all_gather") != NULL, "rank %d: '%s'", rank, t->messages[rank]);
    }
    pretend_close(&group);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(like_one_process),
        cmocka_unit_test(rank_that_dies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

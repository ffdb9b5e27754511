/* The hook that names a step's phases. */
#include <stdio.h>
#include <string.h>

#include "support/messages.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}}, {.ndim = 2, .shape = {21, 6}}, {.ndim = 1, .shape = {19}}, {.ndim = 0}};
#define SHAPES ((int32_t)TEST_COUNT(shapes))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    c.max_preconditioner_dim = 8;
    c.block = 1;
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.grafting = TCH_GRAFTING_ADAM;
    }
    return c;
}

typedef struct record {
    int depth, deepest, pushed;
    char names[4096];
} record;

static void note_push(void *user, const char *name)
{
    record *r = user;
    size_t used = strlen(r->names);
    r->pushed++;
    r->depth++;
    r->deepest = r->depth > r->deepest ? r->depth : r->deepest;
    snprintf(r->names + used, sizeof r->names - used, "[%s]", name);
}

static void note_pop(void *user)
{
    ((record *)user)->depth--;
}

static void phases_have_names(void **state)
{
    static const struct {
        tch_optim_kind kind;
        const char *names[8];
    } expected[] = {
        {TCH_OPTIM_SGD, {"look at gradients", "elementwise"}},
        {TCH_OPTIM_LION, {"look at gradients", "elementwise"}},
        {TCH_OPTIM_SHAMPOO,
         {"look at gradients", "gather gradients", "factors", "refresh", "precondition", "apply", "elementwise"}},
        {TCH_OPTIM_SOAP, {"gather gradients", "factors", "precondition", "apply", "basis", "elementwise"}},
        {TCH_OPTIM_MUON, {"gather gradients", "orthogonalize", "apply", "elementwise"}},
        {TCH_OPTIM_NORMUON, {"gather gradients", "orthogonalize", "apply", "elementwise"}},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        trial t;
        record r = {0};
        tch_optim_config c = config_of(expected[i].kind);
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
        CHECK_OK(tch_context_set_range_hook(*state, note_push, note_pop, &r));
        trial_steps(&t, 2);
        CHECK_OK(tch_context_set_range_hook(*state, NULL, NULL, NULL));
        int pushed = r.pushed;
        trial_step(&t);
        test_case("the phases of %s", tch_optim_kind_name(c.kind));
        CHECK(r.depth == 0 && r.deepest >= 2 && r.pushed == pushed,
              "depth %d, %d deep, %d after the hook was taken away", r.depth, r.deepest, r.pushed - pushed);
        for (int k = 0; k < 8 && expected[i].names[k] != NULL; k++) {
            char name[64];
            snprintf(name, sizeof name, "[%s]", expected[i].names[k]);
            CHECK(strstr(r.names, name) != NULL, "no phase %s in %s", name, r.names);
        }
        trial_close(&t);
    }
}

/* A call that fails has closed its ranges too. */
static void ranges_of_a_refused_call(void **state)
{
    trial t;
    record r = {0};
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    CHECK_OK(tch_context_set_range_hook(*state, note_push, note_pop, &r));
    CHECK(tch_optimizer_step(t.optimizer, 1, NULL) == TCH_ERR_INVALID_ARGUMENT, "accepted");
    CHECK_OK(tch_context_set_range_hook(*state, NULL, NULL, NULL));
    CHECK(r.depth == 0 && r.pushed == 1, "depth %d after %d ranges", r.depth, r.pushed);
    test_check_refused(tch_context_set_range_hook(*state, note_push, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "pop");
    test_check_refused(tch_context_set_range_hook(NULL, NULL, NULL, NULL), TCH_ERR_INVALID_ARGUMENT, "context");
    trial_close(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(phases_have_names), cmocka_unit_test(ranges_of_a_refused_call)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* What a caller needs who keeps an optimizer's state himself: its tensors copied by hand and its counts, with which a
 * new optimizer goes on bit for bit; and the hook that names a step's phases. */
#include <stdio.h>
#include <string.h>

#include "support/messages.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define BEFORE 9
#define AFTER 10
#define MOST_STATES 256
#define MOST_COUNTS 64

/* Several of one class, blocks with a ragged edge, a vector, a scalar, an embedding, a convolution. */
static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {8, 8}},
    {.ndim = 2, .shape = {21, 6}},
    {.ndim = 1, .shape = {19}},
    {.ndim = 0},
    {.ndim = 2, .shape = {5, 7}, .elementwise = 1},
    {.ndim = 4, .shape = {4, 3, 2, 2}},
};
#define SHAPES ((int32_t)(sizeof shapes / sizeof shapes[0]))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.02;
    c.weight_decay = 0.05;
    c.max_preconditioner_dim = 8;
    c.block = 1;
    c.precondition_frequency = 3;
    c.momentum = 0.9;
    c.stochastic_rounding = 1;
    c.seed = 7;
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.grafting = TCH_GRAFTING_ADAM;
    }
    return c;
}

static tch_optim_state state_at(const trial *t, int32_t index)
{
    tch_optim_state s = TCH_OPTIM_STATE_INIT;
    CHECK_OK(tch_optimizer_get_state(t->optimizer, index, &s));
    return s;
}

/* --- by hand ----------------------------------------------------------------------------------------------------- */

typedef struct saved {
    int32_t states;
    tch_tensor *tensors[MOST_STATES];
    int64_t counts[TRIAL_MOST_PARAMETERS][MOST_COUNTS];
} saved;

static void save_by_hand(const trial *t, saved *s)
{
    s->states = tch_optimizer_state_count(t->optimizer);
    CHECK(s->states <= MOST_STATES, "%d states are too many for the test", s->states);
    for (int32_t i = 0; i < s->states; i++) {
        const tch_tensor *from = state_at(t, i).tensor;
        CHECK_OK(tch_tensor_create(t->context, from->dtype, from->ndim, from->shape, TCH_CONTIGUOUS, &s->tensors[i]));
        CHECK_OK(tch_tensor_copy(t->context, s->tensors[i], from));
    }
    for (int32_t p = 0; p < t->count; p++) {
        int64_t length = tch_optimizer_counts_length(t->optimizer, p);
        CHECK(length <= MOST_COUNTS, "%lld counts are too many for the test", (long long)length);
        CHECK_OK(tch_optimizer_get_counts(t->optimizer, p, length, s->counts[p]));
    }
}

static void load_by_hand(const trial *t, saved *s)
{
    CHECK(s->states == tch_optimizer_state_count(t->optimizer), "another number of states");
    for (int32_t i = 0; i < s->states; i++) {
        CHECK_OK(tch_tensor_copy(t->context, state_at(t, i).tensor, s->tensors[i]));
        tch_tensor_destroy(s->tensors[i]);
    }
    for (int32_t p = 0; p < t->count; p++) {
        CHECK_OK(tch_optimizer_set_counts(t->optimizer, p, tch_optimizer_counts_length(t->optimizer, p), s->counts[p]));
    }
}

static void replace_optimizer(trial *t, const tch_optim_config *config)
{
    tch_parameter entries[TRIAL_MOST_PARAMETERS];
    for (int32_t i = 0; i < t->count; i++) {
        entries[i] =
            (tch_parameter){.tensor = &t->parameters[i].tensor, .elementwise = t->parameters[i].shape.elementwise};
    }
    tch_optimizer_destroy(t->optimizer);
    CHECK_OK(tch_optimizer_create(t->context, config, t->count, entries, &t->optimizer));
}

/* One misses gradients now and then, one begins late. */
static void take_steps(trial *t, int first, int last)
{
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    for (int i = first; i < last; i++) {
        t->parameters[1].missing = i % 4 == 1;
        t->parameters[2].missing = i < 5;
        trial_draw(t);
        trial_list_gradients(t, gradients);
        CHECK_OK(tch_optimizer_step(t->optimizer, t->count, gradients));
    }
}

static void check_same(const trial *a, const trial *b)
{
    for (int32_t i = 0; i < a->count; i++) {
        double *first = test_tensor_read(a->parameters[i].memory);
        double *second = test_tensor_read(b->parameters[i].memory);
        CHECK(memcmp(first, second, (size_t)a->parameters[i].memory->count * sizeof *first) == 0,
              "parameter %d differs", i);
    }
}

static void go_on(tch_context *context, tch_optim_kind kind, tch_dtype dtype)
{
    trial through;
    trial resumed;
    saved s;
    tch_optim_config c = config_of(kind);
    trial_open(&through, context, dtype, dtype, &c, SHAPES, shapes);
    trial_open(&resumed, context, dtype, dtype, &c, SHAPES, shapes);
    take_steps(&through, 0, BEFORE + AFTER);
    take_steps(&resumed, 0, BEFORE);
    save_by_hand(&resumed, &s);
    replace_optimizer(&resumed, &c);
    load_by_hand(&resumed, &s);
    take_steps(&resumed, BEFORE, BEFORE + AFTER);
    check_same(&through, &resumed);
    trial_close(&through);
    trial_close(&resumed);
}

static void training_goes_on_to_the_bit(void **state)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_BFLOAT16};
        for (int i = 0; i < 2; i++) {
            test_case("%s, %s, saved by hand", tch_optim_kind_name(kind), tch_dtype_name(dtypes[i]));
            go_on(*state, (tch_optim_kind)kind, dtypes[i]);
        }
    }
}

/* --- counts ------------------------------------------------------------------------------------------------------ */

static void counts_are_what_happened(void **state)
{
    trial t;
    int64_t counts[MOST_COUNTS];
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    take_steps(&t, 0, BEFORE);
    /* Parameters, their steps, and their factors: 21 by 6 is three blocks; a vector has none. */
    const struct {
        int32_t parameter;
        int64_t taken, factors;
    } expected[] = {{0, BEFORE, 2}, {1, BEFORE - 2, 2}, {2, BEFORE - 5, 2}, {3, BEFORE, 6}, {4, BEFORE, 0}};
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        int64_t length = tch_optimizer_counts_length(t.optimizer, expected[i].parameter);
        test_case("the counts of parameter %d", expected[i].parameter);
        CHECK(length == 2 + expected[i].factors, "%lld numbers", (long long)length);
        CHECK_OK(tch_optimizer_get_counts(t.optimizer, expected[i].parameter, length, counts));
        CHECK(counts[0] == BEFORE && counts[1] == expected[i].taken, "%lld and %lld", (long long)counts[0],
              (long long)counts[1]);
    }
    trial_close(&t);
}

/* Each factor of a ragged parameter keeps the number it was given. */
static void trouble_comes_back(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    const int64_t given[] = {40, 30, 0, 1, 2, 0, 2, 1};
    int64_t back[8];
    int64_t other[4];
    trial_open(&t, *state, TCH_FLOAT64, TCH_FLOAT64, &c, SHAPES, shapes);
    CHECK_OK(tch_optimizer_set_counts(t.optimizer, 3, 8, given));
    CHECK_OK(tch_optimizer_get_counts(t.optimizer, 3, 8, back));
    CHECK(memcmp(given, back, sizeof given) == 0, "other numbers came back");
    CHECK_OK(tch_optimizer_get_counts(t.optimizer, 0, 4, other));
    CHECK(other[0] == 40 && other[1] == 0 && other[2] == 0 && other[3] == 0, "another parameter's have changed");
    trial_close(&t);
}

static void wrong_counts_are_refused(void **state)
{
    trial t;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    int64_t counts[MOST_COUNTS] = {1, 1};
    trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, SHAPES, shapes);
    tch_optimizer *o = t.optimizer;
    test_case("no such parameter, no optimizer");
    test_check_refused(tch_optimizer_get_counts(o, SHAPES, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_check_refused(tch_optimizer_set_counts(o, -1, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    test_check_refused(tch_optimizer_set_counts(NULL, 0, 2, counts), TCH_ERR_INVALID_ARGUMENT, "parameter");
    CHECK(tch_optimizer_counts_length(NULL, 0) == 0 && tch_optimizer_counts_length(o, SHAPES) == 0, "a length");
    test_case("another length, NULL");
    test_check_refused(tch_optimizer_set_counts(o, 0, 3, counts), TCH_ERR_INVALID_ARGUMENT, "parameter0");
    test_check_refused(tch_optimizer_get_counts(o, 0, 4, NULL), TCH_ERR_INVALID_ARGUMENT, "parameter0");
    for (int64_t i = 0; i < 4; i++) {
        int64_t wrong[4] = {1, 1, 0, 0};
        wrong[i] = i < 2 ? -1 : 3;
        test_case("counts[%lld] out of range", (long long)i);
        test_check_refused(tch_optimizer_set_counts(o, 0, 4, wrong), TCH_ERR_INVALID_ARGUMENT, "counts");
    }
    CHECK_OK(tch_optimizer_get_counts(o, 0, 4, counts));
    CHECK(counts[0] == 0 && counts[1] == 0, "a refused call has changed them");
    trial_close(&t);
}

/* --- phases by name ---------------------------------------------------------------------------------------------- */

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
         {"look at gradients", "gather gradients", "factors", "refresh", "graft", "precondition", "apply",
          "elementwise"}},
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
        take_steps(&t, 0, 2);
        CHECK_OK(tch_context_set_range_hook(*state, NULL, NULL, NULL));
        int pushed = r.pushed;
        take_steps(&t, 2, 3);
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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(training_goes_on_to_the_bit), cmocka_unit_test(counts_are_what_happened),
        cmocka_unit_test(trouble_comes_back),          cmocka_unit_test(wrong_counts_are_refused),
        cmocka_unit_test(phases_have_names),           cmocka_unit_test(ranges_of_a_refused_call),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

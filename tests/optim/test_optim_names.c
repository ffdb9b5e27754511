/* Names of optimizers, their defaults and their state; and the hook for a step's phases. */
#include "support/messages.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

/* One moment and Lion's step count; NorMuon has a number per row of the tensor, in any layout. */
TEST(state_has_its_names)
{
    static const struct {
        tch_optim_kind kind;
        const char *names[3];
    } cases[] = {{TCH_OPTIM_LION, {"step", "exp_avg"}},
                 {TCH_OPTIM_NORMUON, {"step", "momentum_buffer", "exp_avg_sq.0"}}};
    static const trial_shape shapes[] = {
        {.ndim = 2, .shape = {31, 7}}, {.ndim = 2, .shape = {7, 31}}, {.ndim = 2, .shape = {31, 7}, .order = {1, 0}}};
    static const int64_t rows[] = {31, 7, 7};
    enum { COUNT = 3 };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        trial t;
        tch_optim_config c = trial_config(cases[i].kind);
        test_case("names of the state of %s", tch_optim_kind_name(cases[i].kind));
        trial_open(&t, *state, TCH_FLOAT32, TCH_FLOAT32, &c, COUNT, shapes);
        int32_t each = 2 + (cases[i].names[2] != NULL);
        CHECK(tch_optimizer_state_count(t.optimizer) == each * COUNT, "%d", tch_optimizer_state_count(t.optimizer));
        for (int32_t k = 0; k < each * COUNT; k++) {
            char name[64];
            snprintf(name, sizeof name, "parameter%d/%s", k / each, cases[i].names[k % each]);
            const tch_tensor *tensor = trial_state(&t, name);
            CHECK(k % each != 2 || (tensor->ndim == 2 && tensor->shape[0] == rows[k / each] && tensor->shape[1] == 1),
                  "%s has %lld rows, expected %lld", name, (long long)tensor->shape[0], (long long)rows[k / each]);
        }
    }
}

TEST(names_and_defaults)
{
    static const char *const names[] = {"sgd", "adamw", "shampoo", "soap", "muon", "lion", "normuon", "kl_shampoo"};
    test_case("names");
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        tch_optim_config config = tch_optim_defaults(kind);
        CHECK(strcmp(tch_optim_kind_name(kind), names[kind]) == 0, "%s", tch_optim_kind_name(kind));
        CHECK(tch_optim_kind_parse(names[kind]) == kind, "%s is %d", names[kind], tch_optim_kind_parse(names[kind]));
        CHECK((int)config.kind == kind && config.struct_size == sizeof config, "the defaults of %s", names[kind]);
    }
    CHECK(tch_optim_kind_name((tch_optim_kind)(sizeof names / sizeof *names)) == NULL, "more kinds than names");
    CHECK(tch_optim_kind_name((tch_optim_kind)99) == NULL && tch_optim_kind_name((tch_optim_kind)-1) == NULL, "named");
    CHECK(tch_optim_kind_parse("adam") == -1 && tch_optim_kind_parse("") == -1 && tch_optim_kind_parse(NULL) == -1,
          "a name that is none");
    CHECK(tch_optim_defaults((tch_optim_kind)77).kind == TCH_OPTIM_SGD, "the defaults of no kind");
}

/* PyTorch's, and those of the papers. */
TEST(defaults)
{
    static const struct {
        tch_optim_kind kind;
        trial_setting expected[14];
    } cases[] = {
        {TCH_OPTIM_ADAMW,
         {SET(lr, 1e-3), SET(beta1, 0.9), SET(beta2, 0.999), SET(eps, 1e-8), SET(weight_decay, 1e-2),
          SET(weight_decay_type, TCH_WEIGHT_DECAY_DECOUPLED), SET(amsgrad, 0)}},
        {TCH_OPTIM_SGD, {SET(lr, 1e-3), SET(momentum, 0.0), SET(dampening, 0.0), SET(weight_decay, 0.0)}},
        {TCH_OPTIM_LION, {SET(lr, 1e-4), SET(beta1, 0.9), SET(beta2, 0.99), SET(weight_decay, 0.0)}},
        {TCH_OPTIM_MUON,
         {SET(lr, 0.02), SET(momentum, 0.95), SET(nesterov, 1), SET(weight_decay, 0.1), SET(eps, 1e-7),
          SET(muon.ns_steps, 0), SET(muon.adjust_lr_fn, TCH_ADJUST_LR_ORIGINAL), SET(muon.method, TCH_ORTHO_MINIMAX)}},
        {TCH_OPTIM_NORMUON,
         {SET(lr, 1e-3), SET(weight_decay, 0.1), SET(momentum, 0.95), SET(beta2, 0.95), SET(nesterov, 1),
          SET(eps, 1e-8), SET(muon.adjust_lr_fn, TCH_ADJUST_LR_MATCH_RMS_ADAMW), SET(muon.method, TCH_ORTHO_MINIMAX)}},
        {TCH_OPTIM_SHAMPOO,
         {SET(lr, 3e-3), SET(eps, 1e-12), SET(shampoo.precondition_frequency, 100), SET(shampoo.refresh_drift, 1.5),
          SET(numerics.damping, 1e-6), SET(shampoo.grafting_beta2, 0.999), SET(shampoo.grafting_eps, 1e-8),
          SET(beta1, 0.9), SET(beta2, 0.95), SET(shampoo.max_preconditioner_dim, 1024),
          SET(shampoo.start_preconditioning_step, -1), SET(use_bias_correction, 1), SET(shampoo.stagger, 1),
          SET(shampoo.merge_dims, 1)}},
        {TCH_OPTIM_SHAMPOO,
         {SET(weight_decay, 0.0), SET(shampoo.grafting, TCH_GRAFTING_ADAM), SET(shampoo.exponent_override, 2)}},
        {TCH_OPTIM_KL_SHAMPOO,
         {SET(lr, 3e-3), SET(beta1, 0.9), SET(beta2, 0.95), SET(eps, 0.0), SET(numerics.damping, 1e-6),
          SET(shampoo.precondition_frequency, 100), SET(shampoo.refresh_drift, 1.5), SET(shampoo.exponent_override, 2),
          SET(shampoo.merge_dims, 1), SET(shampoo.max_preconditioner_dim, 1024), SET(use_bias_correction, 1),
          SET(weight_decay, 0.0)}},
        {TCH_OPTIM_SOAP,
         {SET(lr, 3e-3), SET(beta1, 0.95), SET(beta2, 0.95), SET(soap.shampoo_beta, -1.0), SET(eps, 1e-8),
          SET(weight_decay, 0.01), SET(shampoo.precondition_frequency, 100), SET(shampoo.refresh_drift, 2.5),
          SET(shampoo.max_preconditioner_dim, 10000), SET(shampoo.merge_dims, 0), SET(shampoo.precondition_1d, 0),
          SET(soap.normalize_grads, 0), SET(use_bias_correction, 1)}},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        const tch_optim_config c = tch_optim_defaults(cases[i].kind);
        for (int k = 0; k < 14 && cases[i].expected[k].field.name != NULL; k++) {
            const trial_setting *s = &cases[i].expected[k];
            double got = test_field_get(&c, &s->field);
            CHECK(got == s->value, "%s of %s is %g, expected %g", s->field.name, tch_optim_kind_name(c.kind), got,
                  s->value);
        }
    }
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {8, 8}}, {.ndim = 2, .shape = {21, 6}}, {.ndim = 1, .shape = {19}}, {.ndim = 0}};
#define SHAPES ((int32_t)TEST_COUNT(shapes))

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    c.shampoo.max_preconditioner_dim = 8;
    c.soap.block = 1;
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
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

TEST(phases_have_names)
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
        {TCH_OPTIM_KL_SHAMPOO, {"gather gradients", "factors", "refresh", "precondition", "apply", "elementwise"}},
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
    }
}

/* A failed call has closed its ranges too. */
TEST(ranges_of_a_refused_call)
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
}

TEST_MAIN(test_open_context, test_close_context)

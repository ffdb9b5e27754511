/* Several matrices in one tensor: experts by batch_dims; Q, K and V or heads by cuts. Compared with an optimizer that
 * has each as its own parameter: they form the same blocks in the same batches, so every bit is equal, on a GPU too. */
#include "support/bad_input.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define STEPS 6
#define MOST_MATRICES 16

typedef struct stack {
    const char *what;
    int32_t ndim;
    int64_t shape[5];
    int32_t batch_dims, cut_count;
    int64_t cuts[4];
    /* the separate matrices */
    int32_t own_ndim;
    int64_t own_rest[4]; /* the dimensions after the first */
    int32_t matrices;
    int64_t rows[MOST_MATRICES];
} stack;

static const stack stacks[] = {
    {"experts", 3, {4, 9, 13}, 1, 0, {0}, 2, {13}, 4, {9, 9, 9, 9}},
    {"tall experts of two dimensions", 4, {2, 3, 15, 6}, 2, 0, {0}, 2, {6}, 6, {15, 15, 15, 15, 15, 15}},
    {"Q, K and V", 2, {24, 10}, 0, 3, {8, 8, 8}, 2, {10}, 3, {8, 8, 8}},
    {"grouped queries", 2, {22, 11}, 0, 3, {12, 5, 5}, 2, {11}, 3, {12, 5, 5}},
    {"experts of two halves", 3, {3, 16, 7}, 1, 2, {10, 6}, 2, {7}, 6, {10, 6, 10, 6, 10, 6}},
    {"convolutions", 5, {2, 8, 3, 2, 2}, 1, 0, {0}, 4, {3, 2, 2}, 2, {8, 8}},
    {"vectors", 2, {3, 12}, 1, 0, {0}, 1, {0}, 3, {12, 12, 12}},
    {"matrices of one row, which are vectors", 3, {3, 1, 12}, 1, 0, {0}, 1, {0}, 3, {12, 12, 12}},
};

/* One optimizer of the stack, one of its matrices, and the memory of both. */
typedef struct twins {
    const stack *s;
    test_tensor *whole, *whole_gradient, *own[MOST_MATRICES], *own_gradient[MOST_MATRICES];
    tch_optimizer *of_whole, *of_own;
} twins;

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.05;
    c.weight_decay = 0.1;
    c.shampoo.max_preconditioner_dim =
        kind == TCH_OPTIM_SOAP ? 14 : 7; /* SOAP uses AdamW for matrices with longer sides */
    c.shampoo.precondition_frequency = 2;
    c.shampoo.start_preconditioning_step = 1;
    return c;
}

/* The rows of the stack, one matrix after the other. */
static void deal(const twins *t, const test_tensor *whole, test_tensor *const *own)
{
    const double *values = test_tensor_read(whole);
    for (int32_t i = 0; i < t->s->matrices; i++) {
        test_tensor_write(own[i], values);
        values += own[i]->count;
    }
}

static void open_twins(twins *t, tch_context *context, tch_dtype dtype, const stack *s, const tch_optim_config *config)
{
    tch_parameter entries[MOST_MATRICES] = {{0}};
    *t = (twins){.s = s};
    t->whole = test_tensor_make(context, dtype, s->ndim, s->shape, LAYOUT_CONTIGUOUS);
    t->whole_gradient = test_tensor_make(context, dtype, s->ndim, s->shape, LAYOUT_CONTIGUOUS);
    for (int32_t i = 0; i < s->matrices; i++) {
        int64_t shape[4] = {s->rows[i]};
        memcpy(shape + 1, s->own_rest, 3 * sizeof *shape);
        t->own[i] = test_tensor_make(context, dtype, s->own_ndim, shape, LAYOUT_CONTIGUOUS);
        t->own_gradient[i] = test_tensor_make(context, dtype, s->own_ndim, shape, LAYOUT_CONTIGUOUS);
        entries[i].tensor = &t->own[i]->tensor;
    }
    test_tensor_draw(t->whole, 3);
    deal(t, t->whole, t->own);
    tch_parameter whole = {
        .tensor = &t->whole->tensor, .batch_dims = s->batch_dims, .cut_count = s->cut_count, .cuts = s->cuts};
    CHECK_OK(tch_optimizer_create(context, config, NULL, 1, &whole, &t->of_whole));
    CHECK_OK(tch_optimizer_create(context, config, NULL, s->matrices, entries, &t->of_own));
}

static void step_twins(twins *t, uint64_t stream)
{
    const tch_tensor *whole = &t->whole_gradient->tensor;
    const tch_tensor *own[MOST_MATRICES];
    test_tensor_draw(t->whole_gradient, stream);
    deal(t, t->whole_gradient, t->own_gradient);
    for (int32_t i = 0; i < t->s->matrices; i++) {
        own[i] = &t->own_gradient[i]->tensor;
    }
    CHECK_OK(tch_optimizer_step(t->of_whole, 1, &whole));
    CHECK_OK(tch_optimizer_step(t->of_own, t->s->matrices, own));
}

static void compare_twins(const twins *t)
{
    const double *values = test_tensor_read(t->whole);
    for (int32_t i = 0; i < t->s->matrices; i++) {
        const double *own = test_tensor_read(t->own[i]);
        CHECK(memcmp(values, own, (size_t)t->own[i]->count * sizeof *own) == 0,
              "matrix %d is not what it is as a parameter of its own: %g and %g at its beginning", i, values[0],
              own[0]);
        values += t->own[i]->count;
    }
}

static void check_stack(tch_context *context, const stack *s, tch_dtype dtype, const tch_optim_config *config)
{
    twins t;
    open_twins(&t, context, dtype, s, config);
    for (int i = 0; i < STEPS; i++) {
        step_twins(&t, (uint64_t)(10 + i));
    }
    compare_twins(&t);
    tch_optimizer_destroy(t.of_whole);
    tch_optimizer_destroy(t.of_own);
}

TEST(equal_to_parameters_of_their_own)
{
    for (int kind = 0; tch_optim_kind_name((tch_optim_kind)kind) != NULL; kind++) {
        for (size_t i = 0; i < TEST_COUNT(stacks); i++) {
            for (int dtype = 0; dtype < 2; dtype++) {
                tch_optim_config c = config_of((tch_optim_kind)kind);
                test_case("%s of %s, float%d", stacks[i].what, tch_optim_kind_name((tch_optim_kind)kind),
                          dtype ? 64 : 32);
                check_stack(*state, &stacks[i], dtype ? TCH_FLOAT64 : TCH_FLOAT32, &c);
            }
        }
    }
}

/* Every option that depends on a matrix's shape. */
TEST(options_go_by_the_matrix)
{
    for (int lr = 0; lr < 3; lr++) {
        tch_optim_config c = config_of(lr == 2 ? TCH_OPTIM_NORMUON : TCH_OPTIM_MUON);
        c.muon.adjust_lr_fn = lr == 0 ? TCH_ADJUST_LR_ORIGINAL : TCH_ADJUST_LR_MATCH_RMS_ADAMW;
        for (size_t i = 0; i < TEST_COUNT(stacks); i++) {
            test_case("%s, factors of the learning rate %d", stacks[i].what, lr);
            check_stack(*state, &stacks[i], TCH_FLOAT32, &c);
        }
    }
    for (int merged = 0; merged < 2; merged++) {
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        c.shampoo.merge_dims = merged;
        c.shampoo.max_preconditioner_dim = 64;
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
        for (size_t i = 0; i < TEST_COUNT(stacks); i++) {
            bool merges_first = merged && strcmp(stacks[i].what, "convolutions") == 0;
            test_case("%s, merged %d", stacks[i].what, merged);
            if (!merges_first) { /* 8 x 3 x 2 x 2 alone might merge a dimension */
                check_stack(*state, &stacks[i], TCH_FLOAT64, &c);
            }
        }
    }
}

/* A checkpoint names blocks by their index in the tensor. */
TEST(state_is_numbered)
{
    twins t;
    int32_t roots = 0;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    c.shampoo.max_preconditioner_dim = 64;
    test_case("names of the state");
    open_twins(&t, *state, TCH_FLOAT32, &stacks[3], &c);
    for (int32_t i = 0; i < tch_optimizer_state_count(t.of_whole); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        CHECK_OK(tch_optimizer_get_state(t.of_whole, i, &s));
        int block;
        int k;
        if (sscanf(s.name, "parameter0/root.%d.%d", &block, &k) == 2) {
            int64_t expected = k == 0 ? stacks[3].rows[block] : 11;
            CHECK(s.tensor->shape[0] == expected, "'%s' has %lld rows", s.name, (long long)s.tensor->shape[0]);
            roots++;
        }
    }
    CHECK(roots == 6, "%d roots", roots);
    tch_optimizer_destroy(t.of_whole);
    tch_optimizer_destroy(t.of_own);
}

TEST(bad_arguments)
{
    static const struct {
        const char *what;
        int32_t batch_dims, cut_count;
        int64_t cuts[3];
        const char *word;
    } cases[] = {
        {"too few rows", 0, 2, {8, 8}, "cuts"},
        {"too many rows", 0, 3, {8, 8, 9}, "cuts"},
        {"no rows", 0, 3, {0, 16, 8}, "cuts"},
        {"negative rows", 0, 3, {-8, 24, 8}, "cuts"},
        {"rows that overflow", 0, 2, {INT64_MAX, INT64_MAX}, "cuts"},
        {"a negative count", 0, -1, {8, 8, 8}, "cuts"},
        {"all dimensions", 2, 0, {0}, "batch_dims"},
        {"a negative dimension", -1, 0, {0}, "batch_dims"},
    };
    const int64_t shape[] = {24, 10};
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    test_tensor *p = test_tensor_make(*state, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS);
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_optimizer *o = NULL;
        tch_parameter entry = {.tensor = &p->tensor,
                               .batch_dims = cases[i].batch_dims,
                               .cut_count = cases[i].cut_count,
                               .cuts = cases[i].cuts};
        test_case("%s", cases[i].what);
        test_check_refused(tch_optimizer_create(*state, &c, NULL, 1, &entry, &o), TCH_ERR_INVALID_ARGUMENT,
                           cases[i].word);
    }
    tch_optimizer *o = NULL;
    test_tensor *lying = test_tensor_make(*state, TCH_FLOAT32, 2, shape, LAYOUT_TRANSPOSED);
    tch_parameter entry = {.tensor = &lying->tensor, .cut_count = 3, .cuts = (const int64_t[]){8, 8, 8}};
    test_case("columns");
    test_check_refused(tch_optimizer_create(*state, &c, NULL, 1, &entry, &o), TCH_ERR_LAYOUT, "row-major");
    entry = (tch_parameter){.tensor = &p->tensor, .cut_count = 3};
    test_case("no list");
    test_check_refused(tch_optimizer_create(*state, &c, NULL, 1, &entry, &o), TCH_ERR_INVALID_ARGUMENT, "cuts");
}

TEST_MAIN(test_open_context, test_close_context)

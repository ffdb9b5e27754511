/* Training resumed on other numbers of ranks: on the CPU the result is bitwise that of one uninterrupted process, for
 * every optimizer and placement. Parameters are in the same checkpoint as the optimizer's state. Ranks are threads.
 * Also rejected resumes: the checkpoint of another model, one that a rank cannot read. */
#include "support/comm/shared_trial.h"
#include "support/fakes/counting_allocator.h"
#include "support/files.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define EACH 2 /* steps between interruptions */
#define MOST_SEGMENTS (PLACED_STEPS / EACH)
#define INDEX "model.safetensors.index.json"

/* Two halves, on alternating ranks. */
static int32_t in_halves(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(s, r);
        placed_cut(&shards[r], 0, 2, r % 2);
    }
    return ranks < 2 ? 0 : ranks;
}

/* Steps by a number of ranks, from one checkpoint to the next. */
typedef struct segment {
    int32_t ranks; /* 0: one process without a group */
    placed_how how;
} segment;

/* --- interrupted and not ----------------------------------------------------------------------------------------- */

typedef struct sequence {
    const char *name;
    int32_t count;
    segment segments[MOST_SEGMENTS];
} sequence;

static const sequence sequences[] = {
    {"replicated", 4, {{2, placed_replicated}, {3, placed_replicated}, {1, placed_replicated}, {4, placed_replicated}}},
    {"by rows", 4, {{2, placed_by_rows}, {3, placed_by_rows}, {1, placed_by_rows}, {4, placed_by_rows}}},
    {"flattened", 4, {{2, placed_flat}, {3, placed_flat}, {0, placed_by_rows}, {4, placed_flat}}},
    {"by columns", 4, {{2, placed_by_columns}, {3, placed_by_columns}, {1, placed_by_columns}, {4, placed_by_columns}}},
    {"from one process and back",
     5,
     {{0, placed_by_rows}, {2, placed_by_rows}, {3, placed_by_columns}, {0, placed_by_rows}, {4, placed_by_rows}}},
    {"now sharded, now not",
     5,
     {{0, placed_by_rows}, {2, placed_replicated}, {3, placed_by_rows}, {2, in_halves}, {3, placed_replicated}}},
    {"twice", 4, {{4, in_halves}, {3, in_halves}, {2, placed_by_columns}, {0, placed_by_rows}}},
};

static bool cuts_blocks(const sequence *s)
{
    bool cuts = false;
    for (int32_t k = 0; k < s->count; k++) {
        cuts = cuts || s->segments[k].how == placed_by_columns;
    }
    return cuts;
}

static void try_sequence(const placed_numbers *n, const tch_optim_config *config, tch_dtype dtype, int32_t failures,
                         size_t q)
{
    size_t mark = test_mark();
    double *one[SHARED_PARAMETERS];
    double *many[SHARED_PARAMETERS];
    const char *index = test_path(INDEX);
    const char *from = NULL;
    placed_room(one, SHARED_PARAMETERS, shared_model, 0);
    placed_room(many, SHARED_PARAMETERS, shared_model, 0xFF);
    shared_training alone = shared_training_of(n, config, dtype);
    alone.steps = EACH * sequences[q].count;
    alone.failures = failures;
    alone.end = one;
    shared_run(&alone, 0, placed_replicated, false);
    for (int32_t k = 0; k < sequences[q].count; k++) {
        const segment *now = &sequences[q].segments[k];
        shared_training t = shared_training_of(n, config, dtype);
        t.first = EACH * k;
        t.steps = EACH;
        t.failures = failures;
        t.from = from;
        t.to = k == 0 && now->ranks == 0 ? test_path("model.safetensors") : index; /* a single file, or with an index */
        t.end = many;
        shared_run(&t, now->ranks, now->how, false);
        from = t.to;
    }
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        CHECK(memcmp(one[i], many[i], (size_t)placed_count(&shared_model[i]) * sizeof(double)) == 0,
              "parameter %d differs", i);
    }
    test_release_since(mark);
}

/* clang-format off */
#define F64 {TCH_FLOAT, 64, 1}
#define F32 {TCH_FLOAT, 32, 1}
#define BF16 {TCH_BFLOAT, 16, 1}
/* clang-format on */

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = test_optim_defaults(kind);
    c.lr = 0.01;
    c.weight_decay = 0.1;
    c.shampoo.precondition_frequency = 2;
    c.shampoo.max_preconditioner_dim = 16;
    return c;
}

static void *all_numbers;

static int open_folder(void **state)
{
    *state = all_numbers;
    return test_folder_make(state);
}

static int open_all(void **state)
{
    return test_counting_install(state) == 0 ? shared_open(&all_numbers) : -1;
}

static int close_all(void **state)
{
    return shared_close(&all_numbers) == 0 ? test_counting_remove(state) : -1;
}

TEST_WITH(every_kind, open_folder, test_folder_remove)
{
    static const struct {
        const char *name;
        tch_optim_kind kind;
        tch_dtype dtype;
        trial_setting settings[6];
    } cases[] = {
        {"sgd", TCH_OPTIM_SGD, F32, {SET(momentum, 0.9)}},
        {"adamw", TCH_OPTIM_ADAMW, F32, {SET(amsgrad, 1)}},
        {"adamw", TCH_OPTIM_ADAMW, BF16, {SET(amsgrad, 1), SET(memory.master_weights, 1)}},
        {"lion", TCH_OPTIM_LION, F64, {{{0}, 0}}},
        {"adamw with moments in bfloat16", TCH_OPTIM_ADAMW, F32, {SET(memory.state_dtype, TCH_STATE_BFLOAT16)}},
        {"lion with moments in int8", TCH_OPTIM_LION, F32, {SET(memory.state_dtype, TCH_STATE_INT8)}},
        {"shampoo", TCH_OPTIM_SHAMPOO, F32, {SET(shampoo.grafting, TCH_GRAFTING_ADAM), SET(momentum, 0.5)}},
        {"shampoo with master weights, packed, roots in bfloat16",
         TCH_OPTIM_SHAMPOO,
         BF16,
         {SET(shampoo.grafting, TCH_GRAFTING_ADAM), SET(shampoo.merge_dims, 0), SET(memory.master_weights, 1),
          SET(memory.packed_factors, 1), SET(memory.root_dtype, TCH_STATE_BFLOAT16)}},
        {"kl_shampoo", TCH_OPTIM_KL_SHAMPOO, F32, {SET(memory.state_dtype, TCH_STATE_BFLOAT16)}},
        {"soap", TCH_OPTIM_SOAP, F32, {{{0}, 0}}},
        {"soap in blocks, packed", TCH_OPTIM_SOAP, F64, {SET(soap.block, 1), SET(memory.packed_factors, 1)}},
        {"soap of constant norm", TCH_OPTIM_SOAP, F64, {SET(constant_norm, 1), SET(soap.orthogonalize, 1)}},
        {"muon of constant norm", TCH_OPTIM_MUON, BF16, {SET(constant_norm, 1), SET(memory.master_weights, 1)}},
        {"muon", TCH_OPTIM_MUON, F32, {{{0}, 0}}},
        {"muon with master weights", TCH_OPTIM_MUON, BF16, {SET(memory.master_weights, 1)}},
        {"normuon", TCH_OPTIM_NORMUON, F32, {SET(memory.state_dtype, TCH_STATE_BFLOAT16)}},
    };
    for (size_t i = 0; i < TEST_COUNT(cases) * TEST_COUNT(sequences); i++) {
        size_t k = i / TEST_COUNT(sequences);
        size_t q = i % TEST_COUNT(sequences);
        tch_optim_config c = config_of(cases[k].kind);
        trial_set(&c, cases[k].settings);
        if (c.memory.state_dtype == TCH_STATE_INT8 && cuts_blocks(&sequences[q])) {
            continue;
        }
        test_case("%s, %s, %s", cases[k].name, tch_dtype_name(cases[k].dtype), sequences[q].name);
        try_sequence(*state, &c, cases[k].dtype, 0, q);
    }
}

/* Failed refreshes of factors are saved, and make a difference. */
TEST_WITH(failures, open_folder, test_folder_remove)
{
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    double *ends[2][SHARED_PARAMETERS];
    for (int k = 0; k < 2; k++) {
        placed_room(ends[k], SHARED_PARAMETERS, shared_model, 0);
        shared_training alone = shared_training_of(*state, &c, TCH_FLOAT64);
        alone.steps = PLACED_STEPS;
        alone.failures = k;
        alone.end = ends[k];
        shared_run(&alone, 0, placed_replicated, false);
    }
    CHECK(memcmp(ends[0][0], ends[1][0], sizeof(double) * 24 * 17) != 0, "failures make no difference");
    for (size_t q = 4; q < 6; q++) { /* runs that start in one process, which knows its factors */
        test_case("failures, %s", sequences[q].name);
        try_sequence(*state, &c, TCH_FLOAT64, 1, q);
    }
}

/* --- rejected resumes -------------------------------------------------------------------------------------------- */

/* Training that ends after the checkpoint is loaded. */
static shared_training load_by(const placed_numbers *n, const tch_optim_config *c, tch_dtype dtype, const char *from)
{
    shared_training t = shared_training_of(n, c, dtype);
    t.steps = 0;
    t.from = from;
    return t;
}

static const char *saved_by(int32_t ranks, const placed_numbers *n, const tch_optim_config *c, const char *path)
{
    shared_training t = shared_training_of(n, c, TCH_FLOAT32);
    t.steps = EACH;
    t.to = path;
    shared_run(&t, ranks, placed_by_rows, false);
    return path;
}

static void expect(const shared_training *t, int32_t rank, tch_status status, const char *words)
{
    CHECK(t->statuses[rank] == status && strstr(t->messages[rank], words) != NULL, "rank %d gave %s: %s", rank,
          tch_status_name(t->statuses[rank]), t->messages[rank]);
}

/* A rank that could not open the checkpoint: no rank hangs, and none continues alone. */
TEST_WITH(one_rank_cannot_open, open_folder, test_folder_remove)
{
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    shared_training t = load_by(*state, &c, TCH_FLOAT32, saved_by(2, *state, &c, test_path(INDEX)));
    t.blind_rank = 1;
    shared_try(&t, 3, placed_by_columns, false);
    expect(&t, 0, TCH_ERR_COMM, "another rank could not load its part; nothing was changed");
    expect(&t, 1, TCH_ERR_IO, "checkpoint is NULL");
    expect(&t, 2, TCH_ERR_COMM, "another rank could not load its part; nothing was changed");
}

/* Ranks convert no moments, and say what to do. */
TEST_WITH(moments_in_less_memory, open_folder, test_folder_remove)
{
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    c.memory.state_dtype = TCH_STATE_INT8;
    const char *path = saved_by(0, *state, &c, test_path("narrow.safetensors"));
    c.memory.state_dtype = TCH_STATE_FLOAT32;
    shared_training t = load_by(*state, &c, TCH_FLOAT32, path);
    shared_try(&t, 2, placed_by_rows, false);
    expect(&t, 0, TCH_ERR_UNSUPPORTED, "convert no moments");
    expect(&t, 1, TCH_ERR_UNSUPPORTED, "convert no moments");
}

TEST_WITH(another_model, open_folder, test_folder_remove)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_SHAMPOO};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = config_of(kinds[k]);
        const char *path = saved_by(2, *state, &c, test_path(INDEX));
        shared_training t = load_by(*state, &c, TCH_FLOAT32, path);
        t.other_rank = 0;
        shared_try(&t, 0, placed_replicated, false);
        expect(&t, 0, TCH_ERR_INVALID_ARGUMENT, "the checkpoint has no 'optimizer/q0/step'");
        t = load_by(*state, &c, TCH_FLOAT64, path); /* with other dtypes */
        shared_try(&t, 2, placed_by_rows, false);
        expect(&t, 0, TCH_ERR_SHAPE, "expected float64");
        expect(&t, 1, TCH_ERR_SHAPE, "expected float64");
        c = config_of(TCH_OPTIM_LION);
        t = load_by(*state, &c, TCH_FLOAT32, path);
        shared_try(&t, 2, placed_by_rows, false);
        expect(&t, 1, TCH_ERR_INVALID_ARGUMENT, "expected one of lion");
    }
}

/* The hash detects what no single tensor does: here, an additional parameter in the checkpoint. */
TEST_WITH(more_than_this_model, open_folder, test_folder_remove)
{
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    tch_context *context;
    tch_checkpoint *checkpoint;
    tch_tensor *tensor;
    tch_optimizer *o;
    const char *path = saved_by(2, *state, &c, test_path(INDEX));
    CHECK_OK(tch_context_create("cpu", &context));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, shared_model[0].size, TCH_CONTIGUOUS, &tensor));
    tch_parameter entry = {.tensor = tensor, .name = "p0"};
    CHECK_OK(tch_optimizer_create(context, &c, NULL, 1, &entry, &o));
    CHECK_OK(tch_checkpoint_open(path, &checkpoint));
    CHECK(tch_optimizer_load(o, checkpoint, "optimizer") == TCH_ERR_INVALID_ARGUMENT &&
              strstr(tch_last_error(), "is of another model") != NULL,
          "%s", tch_last_error());
    tch_checkpoint_close(checkpoint);
    tch_optimizer_destroy(o);
    tch_tensor_destroy(tensor);
    tch_context_destroy(context);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

typedef struct lone_rank {
    shared_training *training;
    placed_model *model;
    tch_context *context;
    tch_comm *comm;
    tch_optimizer *optimizer;
} lone_rank;

static tch_status save_alone(void *user)
{
    const lone_rank *r = user;
    return shared_save(r->training, r->model, r->context, r->comm, r->optimizer);
}

static tch_status load_alone(void *user)
{
    const lone_rank *r = user;
    return shared_load(r->training, r->model, r->context, r->optimizer, 0);
}

/* Saving and loading with each allocation failing in turn, in a group of one: an error, and nothing is lost. */
TEST_WITH(no_memory, open_folder, test_folder_remove)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_SHAMPOO};
    for (size_t kind = 0; kind < TEST_COUNT(kinds); kind++) {
        tch_optim_config c = config_of(kinds[kind]);
        shared_training t = shared_training_of(*state, &c, TCH_FLOAT32);
        lone_rank r = {.training = &t, .model = test_alloc(sizeof *r.model)};
        pretend_group group;
        pretend_open(&group, 1);
        r.comm = pretend_comm(&group, 0);
        t.place = placed_by_rows;
        t.from = t.to = test_path(INDEX);
        CHECK_OK(tch_context_create("cpu", &r.context));
        shared_open_model(r.model, &t, r.context, 0, 1);
        tch_optim_setup setup = {sizeof setup, .comm = r.comm, .placements = r.model->placement};
        CHECK_OK(tch_optimizer_create(r.context, &c, &setup, SHARED_PARAMETERS, r.model->entries, &r.optimizer));
        CHECK_OK(save_alone(&r)); /* allocated by the first save and kept */
        test_fail_each_allocation("save", save_alone, NULL, &r);
        test_fail_each_allocation("load", load_alone, NULL, &r);
        tch_optimizer_destroy(r.optimizer);
        placed_close(r.model);
        tch_context_destroy(r.context);
        pretend_close(&group);
    }
}

TEST_MAIN(open_all, close_all)

/* Training that is interrupted and goes on with other ranks: on the CPU the end is bitwise that of one process that was
 * never interrupted, for every optimizer and placement. The parameters are in the same checkpoint as the optimizer's
 * state. Ranks are threads. And what must not go on: the checkpoint of another model, one that a rank cannot read. */
#include <stdio.h>
#include <string.h>

#include "support/comm/placed_model.h"
#include "support/fakes/counting_allocator.h"
#include "support/files.h"
#include "support/optim/optim_defaults.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

#define EACH 2 /* steps between interruptions */
#define MOST_SEGMENTS 5
#define MOST_STEPS (EACH * MOST_SEGMENTS)
#define INDEX "model.safetensors.index.json"

/* --- a small model ----------------------------------------------------------------------------------------------- */

static const placed_shape model[] = {
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {40, 9}},
    {.ndim = 1, .size = {31}},
    {.ndim = 4, .size = {10, 3, 3, 2}},
    {.ndim = 2, .size = {33, 6}, .elementwise = 1},
    {.ndim = 3, .size = {6, 5, 8}, .batch_dims = 1},
    {.ndim = 2, .size = {28, 11}, .cut_count = 3, .cuts = {14, 7, 7}},
};
#define PARAMETERS ((int32_t)TEST_COUNT(model))
/* --- placements -------------------------------------------------------------------------------------------------- */

/* Two halves, each on every other rank. */
static int32_t in_halves(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(s, r);
        placed_cut(&shards[r], 0, 2, r % 2);
    }
    return ranks < 2 ? 0 : ranks;
}

/* --- one rank ---------------------------------------------------------------------------------------------------- */

/* Steps by a number of ranks, from a checkpoint on and into the next one. */
typedef struct segment {
    int32_t ranks; /* 0: one process without a group */
    placed_how how;
} segment;

typedef struct run {
    const placed_numbers *numbers;
    tch_optim_config config;
    tch_dtype dtype;
    segment now;
    int32_t first, steps;
    const char *from, *to; /* paths; NULL: from the start, or nowhere */
    int32_t failures;      /* of a factor, set at the start */
    int32_t other_rank;    /* has another model; -1 for none */
    int32_t blind_rank;    /* could not open the checkpoint; -1 for none */
    double **end;
    tch_status status[PRETEND_MOST];
    char message[PRETEND_MOST][256];
} run;

static void open_model(placed_model *m, const run *r, tch_context *context, int32_t rank)
{
    placed_config config = {.shapes = model,
                            .count = PARAMETERS,
                            .place = r->now.ranks > 0 ? r->now.how : placed_replicated,
                            .dtype = r->dtype,
                            .prefix = rank == r->other_rank ? "q" : "p",
                            .start = r->numbers->start};
    placed_open(m, &config, context, rank, r->now.ranks > 0 ? r->now.ranks : 1);
}

/* The parameters that this rank has: a shard that several have is saved by all of them, under the same name. */
static tch_status save_model(const placed_model *m, tch_checkpoint_writer *writer)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < PARAMETERS && status == TCH_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "model/%d", i);
        if (tch_tensor_numel(m->parameter[i]) > 0) {
            status = tch_checkpoint_writer_add_shard(writer, name, m->parameter[i], model[i].size, m->own[i].start);
        }
    }
    return status;
}

static tch_status save(const run *r, const placed_model *m, tch_context *context, tch_comm *comm, tch_optimizer *o)
{
    tch_checkpoint_writer *writer = NULL;
    tch_status status = tch_checkpoint_writer_create(&writer);
    status = status != TCH_OK ? status : save_model(m, writer);
    status = status != TCH_OK ? status : tch_optimizer_save(o, writer, "optimizer");
    if (strstr(r->to, ".index.json") == NULL) {
        status = status != TCH_OK ? status : tch_checkpoint_writer_save(writer, context, r->to);
    } else if (status == TCH_OK || comm != NULL) {
        status = tch_checkpoint_writer_save_sharded(status == TCH_OK ? writer : NULL, context, comm, r->to);
    }
    tch_checkpoint_writer_destroy(writer);
    return status;
}

/* The optimizer comes first: it is the call that all ranks make together. */
static tch_status load(const run *r, placed_model *m, tch_context *context, tch_optimizer *o, int32_t rank)
{
    tch_checkpoint *c = NULL;
    tch_status status = rank == r->blind_rank ? TCH_ERR_IO : tch_checkpoint_open(r->from, &c);
    tch_status loaded = tch_optimizer_load(o, c, "optimizer");
    status = status != TCH_OK ? status : loaded;
    for (int32_t i = 0; i < PARAMETERS && status == TCH_OK; i++) {
        char name[32];
        snprintf(name, sizeof name, "model/%d", i);
        status = tch_checkpoint_read_shard(c, context, name, model[i].size, m->own[i].start, m->parameter[i]);
    }
    tch_checkpoint_close(c);
    return status;
}

/* As if the refreshes of the first factors had failed: they get more damping from then on. */
static tch_status spoil(tch_optimizer *o, int32_t failures)
{
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < PARAMETERS && status == TCH_OK; i++) {
        int64_t counts[32] = {0};
        int64_t length = tch_optimizer_counts_length(o, i);
        status = tch_optimizer_get_counts(o, i, length, counts);
        for (int64_t k = 2; k < length; k += 3) {
            counts[k] = failures;
        }
        status = status != TCH_OK ? status : tch_optimizer_set_counts(o, i, length, counts);
    }
    return status;
}

static tch_status step(const run *r, placed_model *m, tch_context *context, tch_optimizer *o, int32_t number)
{
    const tch_tensor *gradients[PARAMETERS];
    for (int32_t i = 0; i < PARAMETERS; i++) {
        double values[PLACED_ELEMENTS];
        placed_take(m, i, r->numbers->gradient[number][i], values);
        placed_move(context, m->gradient[i], values, true);
        gradients[i] = i == 1 && number == 2 ? NULL : m->gradient[i];
    }
    return tch_optimizer_step(o, PARAMETERS, gradients);
}

static tch_status train(run *r, placed_model *m, tch_context *context, tch_comm *comm, int32_t rank, tch_optimizer *o)
{
    tch_status status = r->from == NULL ? TCH_OK : load(r, m, context, o, rank);
    if (status == TCH_OK && r->from == NULL && r->failures > 0) {
        status = spoil(o, r->failures);
    }
    for (int32_t s = r->first; s < r->first + r->steps && status == TCH_OK; s++) {
        status = step(r, m, context, o, s);
    }
    return status != TCH_OK || r->to == NULL ? status : save(r, m, context, comm, o);
}

static void task(tch_comm *comm, int32_t rank, void *user)
{
    run *r = user;
    placed_model *m = test_alloc(sizeof *m);
    tch_context *context = NULL;
    tch_optimizer *o = NULL;
    assert_int_equal(tch_context_create("cpu", &context), TCH_OK);
    open_model(m, r, context, rank);
    tch_status status =
        tch_optimizer_create_shared(context, &r->config, comm, PARAMETERS, m->entries, m->placement, NULL, &o);
    r->status[rank] = status != TCH_OK ? status : train(r, m, context, comm, rank, o);
    snprintf(r->message[rank], sizeof r->message[rank], "%s", r->status[rank] == TCH_OK ? "" : tch_last_error());
    if (r->end != NULL) {
        placed_read(m, context, r->end);
    }
    tch_optimizer_destroy(o);
    placed_close(m);
    test_drop(m);
    tch_context_destroy(context);
}

static void run_ranks(run *r)
{
    if (r->now.ranks == 0) {
        task(NULL, 0, r);
        return;
    }
    pretend_group group;
    pretend_open(&group, r->now.ranks);
    group.bucket_bytes = 1000;
    group.span_bytes = r->now.ranks % 2 == 0 ? 100 : 0; /* the state of vectors is divided, or not */
    pretend_run(&group, task, r);
    CHECK(group.mismatches == 0, "ranks disagree on counts");
    pretend_close(&group);
}

static void run_well(run *r)
{
    run_ranks(r);
    for (int32_t k = 0; k < (r->now.ranks > 0 ? r->now.ranks : 1); k++) {
        CHECK(r->status[k] == TCH_OK, "rank %d: %s", k, r->message[k]);
    }
}

/* --- interrupted and not ----------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int32_t count;
    segment segments[MOST_SEGMENTS];
} sequences[] = {
    {"replicated", 4, {{2, placed_replicated}, {3, placed_replicated}, {1, placed_replicated}, {4, placed_replicated}}},
    {"by rows", 4, {{2, placed_by_rows}, {3, placed_by_rows}, {1, placed_by_rows}, {4, placed_by_rows}}},
    {"by columns", 4, {{2, placed_by_columns}, {3, placed_by_columns}, {1, placed_by_columns}, {4, placed_by_columns}}},
    {"from one process and back",
     5,
     {{0, placed_by_rows}, {2, placed_by_rows}, {3, placed_by_columns}, {0, placed_by_rows}, {4, placed_by_rows}}},
    {"now sharded, now not",
     5,
     {{0, placed_by_rows}, {2, placed_replicated}, {3, placed_by_rows}, {2, in_halves}, {3, placed_replicated}}},
    {"twice", 4, {{4, in_halves}, {3, in_halves}, {2, placed_by_columns}, {0, placed_by_rows}}},
};

static run run_of(const placed_numbers *n, const tch_optim_config *config, tch_dtype dtype)
{
    return (run){.numbers = n, .config = *config, .dtype = dtype, .other_rank = -1, .blind_rank = -1};
}

static void try_sequence(const placed_numbers *n, const tch_optim_config *config, tch_dtype dtype, int32_t failures,
                         size_t q)
{
    size_t mark = test_mark();
    double *one[PARAMETERS];
    double *many[PARAMETERS];
    const char *index = test_path(INDEX);
    const char *file = test_path("model.safetensors");
    placed_room(one, PARAMETERS, model, 0);
    placed_room(many, PARAMETERS, model, 0xFF);
    run alone = run_of(n, config, dtype);
    alone.steps = EACH * sequences[q].count;
    alone.failures = failures;
    alone.end = one;
    run_well(&alone);
    const char *from = NULL;
    for (int32_t k = 0; k < sequences[q].count; k++) {
        run r = run_of(n, config, dtype);
        r.now = sequences[q].segments[k];
        r.first = EACH * k;
        r.steps = EACH;
        r.failures = failures;
        r.from = from;
        r.to = k == 0 && r.now.ranks == 0 ? file : index; /* of one process a file alone, and one with an index */
        r.end = many;
        run_well(&r);
        from = r.to;
    }
    for (int32_t i = 0; i < PARAMETERS; i++) {
        CHECK(memcmp(one[i], many[i], (size_t)placed_count(&model[i]) * sizeof(double)) == 0, "parameter %d differs",
              i);
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
    c.precondition_frequency = 2;
    c.max_preconditioner_dim = 16;
    return c;
}

static void every_kind(void **state)
{
    static const struct {
        const char *name;
        tch_optim_kind kind;
        tch_dtype dtype;
        trial_setting settings[6];
    } cases[] = {
        {"sgd", TCH_OPTIM_SGD, F32, {SET(momentum, 0.9)}},
        {"adamw", TCH_OPTIM_ADAMW, F32, {SET(amsgrad, 1)}},
        {"adamw", TCH_OPTIM_ADAMW, BF16, {SET(amsgrad, 1), SET(master_weights, 1)}},
        {"lion", TCH_OPTIM_LION, F64, {{{0}, 0}}},
        {"shampoo", TCH_OPTIM_SHAMPOO, F32, {SET(grafting, TCH_GRAFTING_ADAM), SET(momentum, 0.5)}},
        {"shampoo with master weights, packed, roots in bfloat16",
         TCH_OPTIM_SHAMPOO,
         BF16,
         {SET(grafting, TCH_GRAFTING_ADAM), SET(merge_dims, 0), SET(master_weights, 1), SET(packed_factors, 1),
          SET(root_dtype, TCH_STATE_BFLOAT16)}},
        {"soap", TCH_OPTIM_SOAP, F32, {{{0}, 0}}},
        {"soap in blocks, packed", TCH_OPTIM_SOAP, F64, {SET(block, 1), SET(packed_factors, 1)}},
        {"muon", TCH_OPTIM_MUON, F32, {{{0}, 0}}},
        {"muon with master weights", TCH_OPTIM_MUON, BF16, {SET(master_weights, 1)}},
        {"normuon", TCH_OPTIM_NORMUON, F32, {{{0}, 0}}},
    };
    for (size_t i = 0; i < TEST_COUNT(cases) * TEST_COUNT(sequences); i++) {
        size_t k = i / TEST_COUNT(sequences);
        size_t q = i % TEST_COUNT(sequences);
        tch_optim_config c = config_of(cases[k].kind);
        trial_set(&c, cases[k].settings);
        test_case("%s, %s, %s", cases[k].name, tch_dtype_name(cases[k].dtype), sequences[q].name);
        try_sequence(*state, &c, cases[k].dtype, 0, q);
    }
}

/* Failed refreshes of single factors are remembered through all of it, and make a difference. */
static void failures(void **state)
{
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    double *ends[2][PARAMETERS];
    for (int k = 0; k < 2; k++) {
        placed_room(ends[k], PARAMETERS, model, 0);
        run alone = run_of(*state, &c, TCH_FLOAT64);
        alone.steps = MOST_STEPS;
        alone.failures = k;
        alone.end = ends[k];
        run_well(&alone);
    }
    CHECK(memcmp(ends[0][0], ends[1][0], sizeof(double) * 24 * 17) != 0, "failures make no difference");
    for (size_t q = 3; q < 5; q++) { /* those that begin with one process, which knows its factors */
        test_case("failures, %s", sequences[q].name);
        try_sequence(*state, &c, TCH_FLOAT64, 1, q);
    }
}

/* --- what must not go on ----------------------------------------------------------------------------------------- */

static const char *saved_by_two(const placed_numbers *n, tch_optim_config *c, const char *path)
{
    run r = run_of(n, c, TCH_FLOAT32);
    r.now = (segment){2, placed_by_rows};
    r.steps = EACH;
    r.to = path;
    run_well(&r);
    return path;
}

static void expect(const run *r, int32_t rank, tch_status status, const char *words)
{
    CHECK(r->status[rank] == status && strstr(r->message[rank], words) != NULL, "rank %d gave %s: %s", rank,
          tch_status_name(r->status[rank]), r->message[rank]);
}

/* A rank that could not open the checkpoint: no other waits for it, and none goes on alone. */
static void one_rank_cannot_open(void **state)
{
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    const char *path = test_path(INDEX);
    run r = run_of(*state, &c, TCH_FLOAT32);
    r.from = saved_by_two(*state, &c, path);
    r.now = (segment){3, placed_by_columns};
    r.blind_rank = 1;
    run_ranks(&r);
    expect(&r, 0, TCH_ERR_COMM, "another rank could not load its part; nothing was changed");
    expect(&r, 1, TCH_ERR_IO, "checkpoint is NULL");
    expect(&r, 2, TCH_ERR_COMM, "another rank could not load its part; nothing was changed");
}

/* Blocks of moments do not end where shards do: ranks read those in float32 alone, and say what to do. */
static void moments_in_less_memory(void **state)
{
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    const char *path = test_path("narrow.safetensors");
    c.state_dtype = TCH_STATE_INT8;
    run r = run_of(*state, &c, TCH_FLOAT32);
    r.steps = EACH;
    r.to = path;
    run_well(&r);
    c.state_dtype = TCH_STATE_FLOAT32;
    r = run_of(*state, &c, TCH_FLOAT32);
    r.from = path;
    r.now = (segment){2, placed_by_rows};
    run_ranks(&r);
    expect(&r, 0, TCH_ERR_UNSUPPORTED, "state_dtype float32");
    expect(&r, 1, TCH_ERR_UNSUPPORTED, "state_dtype float32");
}

static void another_model(void **state)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_SHAMPOO};
    const char *path = test_path(INDEX);
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = config_of(kinds[k]);
        run r = run_of(*state, &c, TCH_FLOAT32);
        r.from = saved_by_two(*state, &c, path);
        r.other_rank = 0;
        run_ranks(&r);
        expect(&r, 0, TCH_ERR_INVALID_ARGUMENT, "the checkpoint has no 'optimizer/q0/step'");
        r = run_of(*state, &c, TCH_FLOAT64); /* of other types */
        r.from = path;
        r.now = (segment){2, placed_by_rows};
        run_ranks(&r);
        expect(&r, 0, TCH_ERR_SHAPE, "expected float64");
        expect(&r, 1, TCH_ERR_SHAPE, "expected float64");
        c = config_of(TCH_OPTIM_LION);
        r = run_of(*state, &c, TCH_FLOAT32);
        r.from = path;
        r.now = (segment){2, placed_by_rows};
        run_ranks(&r);
        expect(&r, 1, TCH_ERR_INVALID_ARGUMENT, "expected one of lion");
    }
}

/* The hash tells what no single tensor does: here, that the checkpoint has a parameter more. */
static void more_than_this_model(void **state)
{
    tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
    const placed_numbers *n = *state;
    tch_context *context;
    tch_checkpoint *checkpoint;
    tch_tensor *tensor;
    tch_optimizer *o;
    const char *path = test_path(INDEX);
    saved_by_two(n, &c, path);
    CHECK_OK(tch_context_create("cpu", &context));
    CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 2, model[0].size, TCH_CONTIGUOUS, &tensor));
    tch_parameter entry = {.tensor = tensor, .name = "p0"};
    CHECK_OK(tch_optimizer_create(context, &c, 1, &entry, &o));
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

/* Saving and loading with each allocation failing in turn, in a group of one: an error, and nothing is lost. */
static void no_memory(void **state)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_ADAMW, TCH_OPTIM_SHAMPOO};
    const char *path = test_path(INDEX);
    for (size_t kind = 0; kind < TEST_COUNT(kinds); kind++) {
        tch_optim_config c = config_of(kinds[kind]);
        run r = run_of(*state, &c, TCH_FLOAT32);
        placed_model *m = test_alloc(sizeof *m);
        tch_context *context;
        tch_optimizer *o;
        pretend_group group;
        pretend_open(&group, 1);
        tch_comm *comm = pretend_comm(&group, 0);
        r.now = (segment){1, placed_by_rows};
        r.from = r.to = path;
        CHECK_OK(tch_context_create("cpu", &context));
        open_model(m, &r, context, 0);
        CHECK_OK(tch_optimizer_create_shared(context, &c, comm, PARAMETERS, m->entries, m->placement, NULL, &o));
        CHECK_OK(save(&r, m, context, comm, o));
        long long blocks = atomic_load(&test_counting.blocks);
        for (int loads = 0; loads < 2; loads++) {
            bool through = false;
            for (long long k = 1; !through; k++) {
                test_case("kind %d, %s, allocation %lld", (int)kinds[kind], loads ? "load" : "save", k);
                CHECK(k < 20000, "it never gets by");
                counting_allocator_arm(&test_counting, k);
                tch_status status = loads ? load(&r, m, context, o, 0) : save(&r, m, context, comm, o);
                through = atomic_load(&test_counting.calls) < k;
                counting_allocator_arm(&test_counting, 0);
                CHECK((status == TCH_OK) == through, "gave %s: %s", tch_status_name(status), tch_last_error());
                CHECK(atomic_load(&test_counting.blocks) == blocks, "%lld blocks leaked",
                      atomic_load(&test_counting.blocks) - blocks);
            }
        }
        tch_optimizer_destroy(o);
        placed_close(m);
        tch_context_destroy(context);
        tch_comm_destroy(comm);
        pretend_close(&group);
    }
}

/* --- all --------------------------------------------------------------------------------------------------------- */

static placed_numbers all_numbers;

static int open_folder(void **state)
{
    *state = &all_numbers;
    return test_folder_make(state);
}

static int open_all(void **state)
{
    placed_numbers_open(&all_numbers, 23, PARAMETERS, model, MOST_STEPS);
    return test_counting_install(state);
}

static int close_all(void **state)
{
    placed_numbers_close(&all_numbers);
    return test_counting_remove(state);
}

#define IN_A_FOLDER(test) cmocka_unit_test_setup_teardown(test, open_folder, test_folder_remove)

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        IN_A_FOLDER(every_kind),
        IN_A_FOLDER(failures),
        IN_A_FOLDER(one_rank_cannot_open),
        IN_A_FOLDER(another_model),
        IN_A_FOLDER(more_than_this_model),
        IN_A_FOLDER(no_memory),
        IN_A_FOLDER(moments_in_less_memory),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}

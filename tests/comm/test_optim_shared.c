/* Optimizers that ranks of a group divide, beside one process with the same gradients. Ranks are threads, and the group
 * a pretended one. On the CPU every element is compared bit by bit; a GPU's libraries choose by the size of a batch, so
 * there the difference is bounded: by 2^-7 of the way for what goes through bfloat16; by 1e-4 of it for Shampoo, whose
 * roots are asked for within 1e-5 in each of two dimensions, by either of two ways. An eigensolver may take any basis
 * of a null space, so SOAP on a GPU is compared where there is none: the others have moved as far, give or take a
 * half. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/comm/pretend_group.h"
#include "support/random.h"
#include "support/testing.h"

#define STEPS 7
#define MOST_SHARDS (4 * PRETEND_MOST)

/* --- a small model ----------------------------------------------------------------------------------------------- */

typedef struct shape {
    int32_t ndim;
    int64_t size[4];
    int32_t elementwise, batch_dims, cut_count;
    int64_t cuts[3];
} shape;

/* Matrices of one shape and of others, one with a side of 1, a convolution, a vector, an embedding, a tensor; a square
 * one, whose factors have full rank from the first gradient on; experts, and Q, K and V in one. */
static const shape model[] = {
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {24, 17}},
    {.ndim = 2, .size = {40, 9}},
    {.ndim = 1, .size = {31}},
    {.ndim = 4, .size = {10, 3, 3, 2}},
    {.ndim = 2, .size = {33, 6}, .elementwise = 1},
    {.ndim = 3, .size = {6, 5, 8}},
    {.ndim = 2, .size = {1, 12}},
    {.ndim = 2, .size = {14, 14}},
    {.ndim = 3, .size = {6, 5, 8}, .batch_dims = 1},
    {.ndim = 2, .size = {28, 11}, .cut_count = 3, .cuts = {14, 7, 7}},
};
#define PARAMETERS ((int32_t)TEST_COUNT(model))

static int64_t count_of(const shape *s)
{
    int64_t count = 1;
    for (int32_t k = 0; k < s->ndim; k++) {
        count *= s->size[k];
    }
    return count;
}

typedef struct numbers {
    double *start[PARAMETERS], *gradient[STEPS][PARAMETERS], *end[PARAMETERS];
} numbers;

/* All tests of the program read these. */
static void open_numbers(numbers *n)
{
    test_random random = test_random_stream(19);
    for (int32_t i = 0; i < PARAMETERS; i++) {
        int64_t count = count_of(&model[i]);
        n->start[i] = test_keep(test_alloc((size_t)count * sizeof(double)));
        n->end[i] = test_keep(test_alloc((size_t)count * sizeof(double)));
        test_random_fill_normal(&random, n->start[i], count);
        for (int32_t s = 0; s < STEPS; s++) {
            n->gradient[s][i] = test_keep(test_alloc((size_t)count * sizeof(double)));
            test_random_fill_normal(&random, n->gradient[s][i], count);
        }
    }
}

static void close_numbers(numbers *n)
{
    for (int32_t i = 0; i < PARAMETERS; i++) {
        free(n->start[i]);
        free(n->end[i]);
        for (int32_t s = 0; s < STEPS; s++) {
            free(n->gradient[s][i]);
        }
    }
}

/* --- placements -------------------------------------------------------------------------------------------------- */

/* What a parameter's shards are; `shards` has room. Returns how many, 0 for the whole on every rank. */
typedef int32_t (*placer)(const shape *s, int32_t ranks, tch_shard *shards);

static tch_shard whole_shard(const shape *s, int32_t rank)
{
    tch_shard shard = {.rank = rank};
    memcpy(shard.size, s->size, sizeof s->size);
    return shard;
}

/* Dimension k in `parts` parts of equal length, the last ones shorter or empty, as torch.chunk cuts. */
static void cut(tch_shard *shard, int32_t k, int32_t parts, int32_t part)
{
    int64_t each = (shard->size[k] + parts - 1) / parts;
    int64_t first = part * each < shard->size[k] ? part * each : shard->size[k];
    int64_t end = first + each < shard->size[k] ? first + each : shard->size[k];
    shard->start[k] += first;
    shard->size[k] = end - first;
}

static int32_t replicated(const shape *s, int32_t ranks, tch_shard *shards)
{
    (void)s;
    (void)ranks;
    (void)shards;
    return 0;
}

static int32_t by_rows(const shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = whole_shard(s, r);
        cut(&shards[r], 0, ranks, r);
    }
    return ranks;
}

/* The second dimension, where there is one. */
static int32_t by_columns(const shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = whole_shard(s, r);
        cut(&shards[r], s->ndim > 1 ? 1 : 0, ranks, r);
    }
    return ranks;
}

static int32_t smallest_divisor(int32_t n)
{
    int32_t d = 2;
    while (d < n && n % d != 0) {
        d++;
    }
    return n < 2 ? 1 : d;
}

/* Rows over one side of a mesh, columns over the other. */
static int32_t by_both(const shape *s, int32_t ranks, tch_shard *shards)
{
    int32_t side = smallest_divisor(ranks);
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = whole_shard(s, r);
        cut(&shards[r], 0, side, r % side);
        if (s->ndim > 1) {
            cut(&shards[r], 1, ranks / side, r / side);
        } else if (r / side > 0) {
            shards[r].size[0] = 0;
        }
    }
    return ranks;
}

/* Rows over one side of a mesh, the same on every rank of the other. */
static int32_t in_replicas(const shape *s, int32_t ranks, tch_shard *shards)
{
    int32_t side = ranks / smallest_divisor(ranks);
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = whole_shard(s, r);
        cut(&shards[r], 0, side, r % side);
    }
    return ranks;
}

/* The innermost dimension, which others are merged with. */
static int32_t by_the_last(const shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = whole_shard(s, r);
        cut(&shards[r], s->ndim - 1, ranks, r);
    }
    return ranks;
}

/* Some parameters whole on every rank, some sharded: one optimizer, several meshes. */
static int32_t mixed(const shape *s, int32_t ranks, tch_shard *shards)
{
    return s->size[0] == 24 ? 0 : s->size[0] == 40 ? by_columns(s, ranks, shards) : by_rows(s, ranks, shards);
}

static const struct {
    const char *name;
    placer place;
} placements[] = {
    {"replicated", replicated},   {"by rows", by_rows},         {"by columns", by_columns}, {"by both", by_both},
    {"in replicas", in_replicas}, {"by the last", by_the_last}, {"mixed", mixed},
};

/* --- training ---------------------------------------------------------------------------------------------------- */

typedef struct training {
    const numbers *numbers;
    tch_optim_config config;
    tch_dtype dtype;
    placer place;
    pretend_group *group; /* NULL: one process */
    int32_t missing;      /* the parameter without a gradient at step 2, or -1 */
    double **end;
    tch_status statuses[PRETEND_MOST];
    char messages[PRETEND_MOST][256];
    int64_t state_bytes[PRETEND_MOST];
    double (*momentum)[PARAMETERS]; /* of each rank: the sums of squares of what lies beside its shards, or NULL */
    int32_t bad_rank, bad_step;     /* a NaN in the gradients of this rank at this step; -1 for none */
    int32_t wrong_rank;             /* has a gradient of another shape at step 1; -1 for none */
    int32_t lacking_rank;           /* has no gradient where others have one, at step 1; -1 for none */
} training;

static void copy_rectangle(const tch_shard *s, const shape *whole, double *values, double *part, bool out)
{
    int64_t count = 1;
    for (int32_t k = 0; k < whole->ndim; k++) {
        count *= s->size[k];
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i;
        int64_t at = 0;
        int64_t stride = 1;
        for (int32_t k = whole->ndim - 1; k >= 0; k--) {
            at += (s->start[k] + rest % s->size[k]) * stride;
            rest /= s->size[k];
            stride *= whole->size[k];
        }
        if (at >= count_of(whole)) { /* of a shard that lies outside on purpose */
            part[i] = 0.0;
        } else if (out) {
            values[at] = part[i];
        } else {
            part[i] = values[at];
        }
    }
}

static void move_values(tch_context *context, tch_tensor *tensor, double *values, bool to_device)
{
    tch_tensor host = tch_tensor_view(values, TCH_FLOAT64, tensor->ndim, tensor->shape);
    if (tch_tensor_numel(tensor) > 0) {
        assert_int_equal(to_device ? tch_tensor_copy(context, tensor, &host) : tch_tensor_copy(context, &host, tensor),
                         TCH_OK);
    }
}

typedef struct rank_model {
    tch_tensor *parameter[PARAMETERS], *gradient[PARAMETERS];
    tch_shard own[PARAMETERS];
    tch_shard shards[PARAMETERS][PRETEND_MOST];
    tch_placement placement[PARAMETERS];
    tch_parameter entries[PARAMETERS];
    char names[PARAMETERS][16];
    double *values; /* of one */
} rank_model;

static void open_model(rank_model *m, const training *t, tch_context *context, int32_t rank, int32_t ranks)
{
    m->values = test_alloc(4096 * sizeof(double));
    for (int32_t i = 0; i < PARAMETERS; i++) {
        int32_t count = t->place(&model[i], ranks, m->shards[i]);
        m->placement[i] = (tch_placement)TCH_PLACEMENT_INIT;
        m->placement[i].ndim = model[i].ndim;
        m->placement[i].shape = model[i].size;
        m->placement[i].count = count;
        m->placement[i].shards = m->shards[i];
        m->own[i] = count > 0 ? m->shards[i][rank] : whole_shard(&model[i], rank);
        assert_int_equal(
            tch_tensor_create(context, t->dtype, model[i].ndim, m->own[i].size, TCH_CONTIGUOUS, &m->parameter[i]),
            TCH_OK);
        assert_int_equal(
            tch_tensor_create(context, t->dtype, model[i].ndim, m->own[i].size, TCH_CONTIGUOUS, &m->gradient[i]),
            TCH_OK);
        copy_rectangle(&m->own[i], &model[i], t->numbers->start[i], m->values, false);
        move_values(context, m->parameter[i], m->values, true);
        snprintf(m->names[i], sizeof m->names[i], "p%d", i);
        m->entries[i] = (tch_parameter){.tensor = m->parameter[i],
                                        .name = m->names[i],
                                        .elementwise = model[i].elementwise,
                                        .batch_dims = model[i].batch_dims,
                                        .cut_count = model[i].cut_count,
                                        .cuts = model[i].cuts};
    }
}

static void close_model(rank_model *m)
{
    for (int32_t i = 0; i < PARAMETERS; i++) {
        tch_tensor_destroy(m->parameter[i]);
        tch_tensor_destroy(m->gradient[i]);
    }
    test_drop(m->values);
}

static tch_status take_step(const training *t, rank_model *m, tch_context *context, tch_optimizer *optimizer,
                            int32_t rank, int32_t step)
{
    const tch_tensor *gradients[PARAMETERS];
    for (int32_t i = 0; i < PARAMETERS; i++) {
        copy_rectangle(&m->own[i], &model[i], t->numbers->gradient[step][i], m->values, false);
        if (t->bad_rank == rank && t->bad_step == step && i == 2) {
            m->values[0] = NAN;
        }
        move_values(context, m->gradient[i], m->values, true);
        bool lacks = (i == t->missing && step == 2) || (rank == t->lacking_rank && step == 1 && i == 1);
        bool wrong = rank == t->wrong_rank && step == 1 && i == 1;
        gradients[i] = lacks ? NULL : m->gradient[wrong ? 2 : i];
    }
    return tch_optimizer_step(optimizer, PARAMETERS, gradients);
}

static void sum_momentum(tch_context *context, tch_optimizer *optimizer, double *sums)
{
    for (int32_t i = 0; i < tch_optimizer_state_count(optimizer); i++) {
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        assert_int_equal(tch_optimizer_get_state(optimizer, i, &s), TCH_OK);
        size_t length = strlen(s.name);
        if (length > 15 && strcmp(s.name + length - 15, "momentum_buffer") == 0) {
            int64_t count = tch_tensor_numel(s.tensor);
            double *values = test_alloc((size_t)(count + 1) * sizeof *values);
            move_values(context, s.tensor, values, false);
            for (int64_t k = 0; k < count; k++) {
                sums[s.parameter] += values[k] * values[k];
            }
            test_drop(values);
        }
    }
}

static void train(tch_comm *comm, int32_t rank, void *user)
{
    training *t = user;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    rank_model *m = test_alloc(sizeof *m);
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (t->group != NULL) {
        pretend_use(t->group, rank, context);
    }
    open_model(m, t, context, rank, comm == NULL ? 1 : tch_comm_size(comm));
    tch_status status =
        tch_optimizer_create_shared(context, &t->config, comm, PARAMETERS, m->entries, m->placement, NULL, &optimizer);
    for (int32_t s = 0; s < STEPS && status == TCH_OK; s++) {
        status = take_step(t, m, context, optimizer, rank, s);
    }
    t->statuses[rank] = status;
    snprintf(t->messages[rank], sizeof t->messages[rank], "%s", status == TCH_OK ? "" : tch_last_error());
    for (int32_t i = 0; i < PARAMETERS && t->end != NULL; i++) {
        move_values(context, m->parameter[i], m->values, false);
        copy_rectangle(&m->own[i], &model[i], t->end[i], m->values, true);
    }
    if (t->momentum != NULL) {
        sum_momentum(context, optimizer, t->momentum[rank]);
    }
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    if (optimizer != NULL && tch_optimizer_get_memory(optimizer, &memory) == TCH_OK) {
        t->state_bytes[rank] = memory.state;
    }
    tch_optimizer_destroy(optimizer);
    close_model(m);
    test_drop(m);
    tch_context_destroy(context);
}

static training training_of(const numbers *n, const tch_optim_config *config, tch_dtype dtype)
{
    return (training){.numbers = n,
                      .config = *config,
                      .dtype = dtype,
                      .place = replicated,
                      .missing = 4,
                      .bad_rank = -1,
                      .wrong_rank = -1,
                      .lacking_rank = -1};
}

/* --- equal to one process ---------------------------------------------------------------------------------------- */

static double distance(const double *a, const double *b, int64_t count)
{
    double sum = 0.0;
    for (int64_t k = 0; k < count; k++) {
        sum += (a[k] - b[k]) * (a[k] - b[k]);
    }
    return sqrt(sum);
}

static bool has_null_space(const shape *s)
{
    return !s->elementwise && s->ndim > 1 && s->size[0] > 1 && s->size[0] != s->size[1];
}

static void compare(const numbers *n, double *const *expected, double *const *found, double tolerance, bool any_basis)
{
    for (int32_t i = 0; i < PARAMETERS; i++) {
        int64_t count = count_of(&model[i]);
        double way = distance(expected[i], n->start[i], count);
        double error = distance(expected[i], found[i], count);
        if (any_basis && !test_on_cpu() && has_null_space(&model[i])) {
            double theirs = distance(found[i], n->start[i], count);
            CHECK(theirs > 0.5 * way && theirs < 2.0 * way, "parameter %d moved %g, expected %g", i, theirs, way);
            continue;
        }
        CHECK(tolerance > 0.0 ? error <= tolerance * way : memcmp(expected[i], found[i], (size_t)count * 8) == 0,
              "parameter %d is off by %g of a way of %g", i, error, way);
        CHECK(way > 0.0, "parameter %d did not move", i);
    }
}

static void run_group(training *t, int32_t ranks, placer place, bool late)
{
    pretend_group group;
    pretend_open(&group, ranks);
    group.late = late;
    group.bucket_bytes = ranks % 2 == 1 ? 300 : 0;         /* a bucket for nearly every block batch, or one */
    group.span_bytes = ranks == 2 || ranks == 3 ? 100 : 0; /* the state of vectors is divided too, or not */
    t->group = &group;
    t->place = place;
    pretend_run(&group, train, t);
    for (int32_t r = 0; r < ranks; r++) {
        print_message(t->statuses[r] == TCH_OK ? "" : "rank %d: %s\n", r, t->messages[r]);
    }
    for (int32_t r = 0; r < ranks; r++) {
        CHECK(t->statuses[r] == TCH_OK, "rank %d: %s", r, t->messages[r]);
    }
    CHECK(group.mismatches == 0, "ranks disagree on %lld counts", (long long)group.mismatches);
    pretend_close(&group);
}

static const int32_t group_sizes[] = {1, 2, 3, 4, 7};

/* All placements and sizes of one configuration. `placed` are poisoned before each. */
static void try_all(const numbers *n, const char *name, const tch_optim_config *config, tch_dtype dtype,
                    double gpu_tolerance)
{
    double *one[PARAMETERS];
    double *many[PARAMETERS];
    for (int32_t i = 0; i < PARAMETERS; i++) {
        one[i] = test_alloc((size_t)count_of(&model[i]) * sizeof(double));
        many[i] = test_alloc((size_t)count_of(&model[i]) * sizeof(double));
    }
    training alone = training_of(n, config, dtype);
    alone.end = one;
    train(NULL, 0, &alone);
    CHECK(alone.statuses[0] == TCH_OK, "%s alone: %s", name, alone.messages[0]);
    for (size_t p = 0; p < TEST_COUNT(placements); p++) {
        for (size_t s = 0; s < TEST_COUNT(group_sizes); s++) {
            test_case("%s, %s, %s on %d ranks", name, tch_dtype_name(dtype), placements[p].name, group_sizes[s]);
            for (int32_t i = 0; i < PARAMETERS; i++) {
                memset(many[i], 0xFF, (size_t)count_of(&model[i]) * sizeof(double));
            }
            training t = training_of(n, config, dtype);
            t.end = many;
            run_group(&t, group_sizes[s], placements[p].place, s == 1);
            compare(n, one, many, test_on_cpu() ? 0.0 : gpu_tolerance,
                    config->kind == TCH_OPTIM_SOAP && !config->world_invariant);
        }
    }
}

static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = tch_optim_defaults(kind);
    c.lr = 0.01;
    c.weight_decay = 0.1;
    c.precondition_frequency = 2;
    c.max_preconditioner_dim = 16;
    c.root_tolerance = 1e-5;
    c.precision = TCH_PRECISION_HIGHEST;
    return c;
}

static void sgd_adamw_lion(void **state)
{
    const numbers *n = *state;
    tch_optim_config c = config_of(TCH_OPTIM_SGD);
    c.momentum = 0.9;
    try_all(n, "sgd", &c, TCH_FLOAT32, 1e-5);
    c = config_of(TCH_OPTIM_ADAMW);
    try_all(n, "adamw", &c, TCH_FLOAT32, 1e-5);
    c.master_weights = 1;
    try_all(n, "adamw", &c, TCH_BFLOAT16, 1e-5);
    c = config_of(TCH_OPTIM_LION);
    try_all(n, "lion", &c, TCH_FLOAT32, 1e-5);
}

static void shampoo(void **state)
{
    const numbers *n = *state;
    tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
    try_all(n, "shampoo", &c, TCH_FLOAT32, 1e-4);
    c.grafting = TCH_GRAFTING_ADAM;
    c.beta2 = 0.99;
    c.relative_eps = 1e-4;
    c.momentum = 0.5;
    try_all(n, "shampoo with grafting and momentum", &c, TCH_FLOAT32, 1e-4);
    c.momentum = 0.0;
    c.decay = TCH_DECAY_L2;
    c.stagger = 0;
    try_all(n, "shampoo with grafting and l2", &c, TCH_FLOAT64, 1e-4);
    c.master_weights = 1;
    try_all(n, "shampoo with master weights and l2", &c, TCH_BFLOAT16, 1e-2);
}

static void soap(void **state)
{
    const numbers *n = *state;
    tch_optim_config c = config_of(TCH_OPTIM_SOAP);
    try_all(n, "soap", &c, TCH_FLOAT32, 1e-3);
    c.block = 1;
    c.normalize_grads = 1;
    try_all(n, "soap in blocks", &c, TCH_FLOAT64, 1e-4);
}

static void muon(void **state)
{
    const numbers *n = *state;
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    try_all(n, "muon", &c, TCH_FLOAT32, 0x1p-7);
    c.decay = TCH_DECAY_L2; /* which Muon does not read */
    try_all(n, "muon with another's decay", &c, TCH_FLOAT32, 0x1p-7);
    c.nesterov = 0;
    c.muon_lr = TCH_MUON_LR_MATCH_RMS_ADAMW;
    c.maximize = 1;
    c.master_weights = 1;
    try_all(n, "muon with master weights", &c, TCH_BFLOAT16, 0x1p-6);
}

static void normuon(void **state)
{
    tch_optim_config c = config_of(TCH_OPTIM_NORMUON);
    try_all(*state, "normuon", &c, TCH_FLOAT32, 0x1p-7);
}

/* Block by block a GPU too comes to the same bits for any number of ranks. */
static void world_invariant(void **state)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP, TCH_OPTIM_MUON, TCH_OPTIM_NORMUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = config_of(kinds[k]);
        c.world_invariant = 1;
        try_all(*state, "block by block", &c, TCH_FLOAT32, 0.0);
    }
}

/* --- replicas ---------------------------------------------------------------------------------------------------- */

static bool same_shard(const tch_shard *a, const tch_shard *b)
{
    return memcmp(a->start, b->start, sizeof a->start) == 0 && memcmp(a->size, b->size, sizeof a->size) == 0;
}

/* Of several ranks that hold a shard one sends it, and all of them keep its moving average: a checkpoint may take it
 * from any. */
static void replicas_keep_the_same_momentum(void **state)
{
    enum { RANKS = 4 };
    static const tch_optim_kind kinds[] = {TCH_OPTIM_MUON, TCH_OPTIM_NORMUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = config_of(kinds[k]);
        double momentum[RANKS][PARAMETERS] = {{0}};
        test_case("%s", tch_optim_kind_name(kinds[k]));
        training t = training_of(*state, &c, TCH_FLOAT32);
        t.momentum = momentum;
        run_group(&t, RANKS, in_replicas, false);
        int compared = 0;
        for (int32_t i = 0; i < PARAMETERS; i++) {
            tch_shard shards[MOST_SHARDS];
            int32_t count = in_replicas(&model[i], RANKS, shards);
            for (int32_t a = 0; a < count; a++) {
                for (int32_t b = 0; b < a; b++) {
                    double *x = &momentum[shards[a].rank][i];
                    double *y = &momentum[shards[b].rank][i];
                    bool same = !same_shard(&shards[a], &shards[b]) || *x == *y;
                    CHECK(same, "parameter %d: %g on one replica, %g on the other", i, *x, *y);
                    compared += same_shard(&shards[a], &shards[b]) && *x > 0.0;
                }
            }
        }
        CHECK(compared >= 8, "only %d shards were compared", compared);
    }
}

/* --- elementwise parameters that are large ----------------------------------------------------------------------- */

#define LARGE 2500000 /* ten spans */

typedef struct large_training {
    pretend_group *group;
    double *drawn[3], *end[3]; /* the parameter and two gradients; the parameter of each rank */
    int64_t state_bytes[3];
} large_training;

static tch_tensor *make_large(tch_context *context, double *values)
{
    const int64_t shape[] = {LARGE};
    tch_tensor *tensor = NULL;
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &tensor), TCH_OK);
    move_values(context, tensor, values, true);
    return tensor;
}

static void train_large(tch_comm *comm, int32_t rank, void *user)
{
    large_training *l = user;
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    tch_optim_config c = tch_optim_defaults(TCH_OPTIM_ADAMW);
    assert_int_equal(tch_context_create(test_device(), &context), TCH_OK);
    if (comm != NULL && !test_on_cpu()) {
        pretend_use(l->group, rank, context);
    }
    tch_tensor *p = make_large(context, l->drawn[0]);
    tch_parameter entry = {.tensor = p};
    assert_int_equal(tch_optimizer_create_shared(context, &c, comm, 1, &entry, NULL, NULL, &optimizer), TCH_OK);
    for (int step = 1; step < 3; step++) {
        tch_tensor *g = make_large(context, l->drawn[step]);
        assert_int_equal(tch_optimizer_step(optimizer, 1, (const tch_tensor *const[]){g}), TCH_OK);
        tch_tensor_destroy(g);
    }
    move_values(context, p, l->end[rank], false);
    assert_int_equal(tch_optimizer_get_memory(optimizer, &memory), TCH_OK);
    l->state_bytes[rank] = memory.state;
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(p);
    tch_context_destroy(context);
}

/* Each rank keeps the moments of four spans at most, and the parameter is what it is alone. */
static void state_of_large_vectors_is_divided(void **state)
{
    large_training l = {0};
    pretend_group group;
    double *alone = test_alloc(LARGE * sizeof(double));
    test_random random = test_random_stream(5);
    (void)state;
    test_case("a vector of %d elements on 3 ranks", LARGE);
    for (int32_t i = 0; i < 3; i++) {
        l.drawn[i] = test_alloc(LARGE * sizeof(double));
        l.end[i] = test_alloc(LARGE * sizeof(double));
        test_random_fill_normal(&random, l.drawn[i], LARGE);
    }
    train_large(NULL, 0, &l);
    memcpy(alone, l.end[0], LARGE * sizeof(double));
    int64_t whole = l.state_bytes[0];
    pretend_open(&group, 3);
    l.group = &group;
    pretend_run(&group, train_large, &l);
    pretend_close(&group);
    for (int32_t r = 0; r < 3; r++) {
        CHECK(memcmp(alone, l.end[r], LARGE * sizeof(double)) == 0, "rank %d has other values", r);
        CHECK(l.state_bytes[r] <= 2 * (INT64_C(4) << 20) + 4096 && whole >= INT64_C(8) * LARGE,
              "rank %d keeps %lld bytes, alone %lld", r, (long long)l.state_bytes[r], (long long)whole);
    }
}

/* --- experts ----------------------------------------------------------------------------------------------------- */

enum { EXPERT_RANKS = 3, EXPERT_STEPS = 2 };

static void train_experts(tch_comm *comm, int32_t rank, void *user)
{
    tch_comm_traffic *traffic = (tch_comm_traffic *)user + 2 * rank; /* before the steps, and after */
    const int64_t whole[] = {6, 5, 8};
    const int64_t shape[] = {2, 5, 8};
    tch_context *context = NULL;
    tch_optimizer *optimizer = NULL;
    tch_tensor *p = NULL;
    tch_tensor *g = NULL;
    tch_shard shards[EXPERT_RANKS];
    for (int32_t r = 0; r < EXPERT_RANKS; r++) {
        shards[r] = (tch_shard){.rank = r, .start = {2 * r}, .size = {2, 5, 8}};
    }
    tch_placement placement = TCH_PLACEMENT_INIT;
    placement.ndim = 3;
    placement.shape = whole;
    placement.count = EXPERT_RANKS;
    placement.shards = shards;
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    assert_int_equal(tch_context_create("cpu", &context), TCH_OK);
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 3, shape, TCH_CONTIGUOUS, &p), TCH_OK);
    assert_int_equal(tch_tensor_create(context, TCH_FLOAT32, 3, shape, TCH_CONTIGUOUS, &g), TCH_OK);
    assert_int_equal(tch_tensor_fill(context, p, 1.0), TCH_OK);
    assert_int_equal(tch_tensor_fill(context, g, 0.5), TCH_OK);
    tch_parameter entry = {.tensor = p, .batch_dims = 1};
    assert_int_equal(tch_optimizer_create_shared(context, &c, comm, 1, &entry, &placement, NULL, &optimizer), TCH_OK);
    assert_int_equal(tch_comm_get_traffic(comm, &traffic[0]), TCH_OK);
    for (int step = 0; step < EXPERT_STEPS; step++) {
        assert_int_equal(tch_optimizer_step(optimizer, 1, (const tch_tensor *const[]){g}), TCH_OK);
    }
    assert_int_equal(tch_comm_get_traffic(comm, &traffic[1]), TCH_OK);
    tch_optimizer_destroy(optimizer);
    tch_tensor_destroy(p);
    tch_tensor_destroy(g);
    tch_context_destroy(context);
}

/* Matrices that lie whole with their owners: of a step only the agreement goes through the group. */
static void experts_send_nothing(void **state)
{
    pretend_group group;
    tch_comm_traffic traffic[2 * EXPERT_RANKS];
    (void)state;
    test_case("experts on %d ranks", EXPERT_RANKS);
    for (int i = 0; i < 2 * EXPERT_RANKS; i++) {
        traffic[i] = (tch_comm_traffic)TCH_COMM_TRAFFIC_INIT;
    }
    pretend_open(&group, EXPERT_RANKS);
    pretend_run(&group, train_experts, traffic);
    pretend_close(&group);
    for (int r = 0; r < EXPERT_RANKS; r++) {
        int64_t collectives = traffic[2 * r + 1].collectives - traffic[2 * r].collectives;
        CHECK(collectives == EXPERT_STEPS, "rank %d: %lld collectives in %d steps", r, (long long)collectives,
              EXPERT_STEPS);
    }
}

/* --- many ranks -------------------------------------------------------------------------------------------------- */

/* More ranks than tiles, and than rows. */
static void sixty_four_ranks(void **state)
{
    const numbers *n = *state;
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_MUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = config_of(kinds[k]);
        double *one[PARAMETERS];
        double *many[PARAMETERS];
        for (int32_t i = 0; i < PARAMETERS; i++) {
            one[i] = test_alloc((size_t)count_of(&model[i]) * sizeof(double));
            many[i] = test_alloc((size_t)count_of(&model[i]) * sizeof(double));
        }
        training alone = training_of(n, &c, TCH_FLOAT32);
        alone.end = one;
        train(NULL, 0, &alone);
        for (int32_t ranks = 16; ranks <= PRETEND_MOST; ranks *= 2) {
            test_case("kind %d on %d ranks", (int)kinds[k], ranks);
            training t = training_of(n, &c, TCH_FLOAT32);
            t.end = many;
            run_group(&t, ranks, by_rows, false);
            compare(n, one, many, test_on_cpu() ? 0.0 : 0x1p-7, false);
        }
    }
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

/* Every rank must have ended as `expected`, with these words in its message. */
static void check_all(const training *t, int32_t ranks, tch_status expected, const char *words)
{
    for (int32_t r = 0; r < ranks; r++) {
        CHECK(t->statuses[r] == expected && strstr(t->messages[r], words) != NULL, "rank %d gave %s: %s", r,
              tch_status_name(t->statuses[r]), t->messages[r]);
    }
}

static const placer failing_placements[] = {replicated, by_rows, by_columns};

/* A NaN that one rank alone sees: with SKIP the step is skipped by all, so that the end is the same as without the
 * step; with RAISE all get the error. Where every rank has the whole gradient, ranks disagree about its value, and all
 * the same none takes the step. */
static void nan_on_one_rank(void **state)
{
    const numbers *n = *state;
    for (size_t p = 0; p < TEST_COUNT(failing_placements); p++) {
        test_case("placement %d", (int)p);
        pretend_group group;
        pretend_open(&group, 3);
        tch_optim_config c = config_of(TCH_OPTIM_MUON);
        c.nonfinite = TCH_NONFINITE_RAISE;
        training t = training_of(n, &c, TCH_FLOAT32);
        t.group = &group;
        t.place = failing_placements[p];
        t.bad_rank = 1;
        t.bad_step = 3;
        pretend_run(&group, train, &t);
        check_all(&t, 3, TCH_ERR_NUMERIC, "nothing was changed");
        pretend_close(&group);

        double *ends[PARAMETERS];
        for (int32_t i = 0; i < PARAMETERS; i++) {
            ends[i] = test_alloc((size_t)count_of(&model[i]) * sizeof(double));
        }
        c.nonfinite = TCH_NONFINITE_SKIP;
        t = training_of(n, &c, TCH_FLOAT32);
        t.bad_rank = 1;
        t.bad_step = 3;
        t.end = ends;
        run_group(&t, 3, failing_placements[p], false);
        for (int32_t i = 0; i < PARAMETERS; i++) {
            for (int64_t k = 0; k < count_of(&model[i]); k++) {
                CHECK(isfinite(ends[i][k]), "parameter %d has %g", i, ends[i][k]);
            }
        }
    }
}

static void gradient_missing_on_one_rank(void **state)
{
    for (size_t p = 0; p < TEST_COUNT(failing_placements); p++) {
        test_case("placement %d", (int)p);
        pretend_group group;
        pretend_open(&group, 4);
        tch_optim_config c = config_of(TCH_OPTIM_SHAMPOO);
        c.nonfinite = TCH_NONFINITE_RAISE; /* so that the host learns of it at once on a GPU too */
        training t = training_of(*state, &c, TCH_FLOAT32);
        t.group = &group;
        t.place = failing_placements[p];
        t.lacking_rank = 2;
        pretend_run(&group, train, &t);
        check_all(&t, 4, TCH_ERR_COMM, "gradients of different parameters");
        pretend_close(&group);
    }
}

/* A wrong gradient on one rank: that one has its error, the others do not wait for it, and nothing is changed. */
static void wrong_gradient_on_one_rank(void **state)
{
    pretend_group group;
    pretend_open(&group, 3);
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    c.nonfinite = TCH_NONFINITE_RAISE;
    training t = training_of(*state, &c, TCH_FLOAT32);
    t.group = &group;
    t.place = replicated;
    t.wrong_rank = 1;
    pretend_run(&group, train, &t);
    CHECK(t.statuses[1] == TCH_ERR_SHAPE, "%s", t.messages[1]);
    for (int32_t r = 0; r < 3; r += 2) {
        CHECK(t.statuses[r] == TCH_ERR_COMM && strstr(t.messages[r], "nothing was changed") != NULL, "%s",
              t.messages[r]);
    }
    pretend_close(&group);
}

static void other_options_on_one_rank(tch_comm *comm, int32_t rank, void *user)
{
    training *t = user;
    training mine = *t;
    mine.config.lr = rank == 1 ? 0.5 : t->config.lr;
    train(comm, rank, &mine);
    t->statuses[rank] = mine.statuses[rank];
    memcpy(t->messages[rank], mine.messages[rank], sizeof mine.messages[rank]);
}

static void different_code(void **state)
{
    pretend_group group;
    pretend_open(&group, 3);
    tch_optim_config c = config_of(TCH_OPTIM_SOAP);
    training t = training_of(*state, &c, TCH_FLOAT32);
    t.group = &group;
    t.place = by_rows;
    pretend_run(&group, other_options_on_one_rank, &t);
    check_all(&t, 3, TCH_ERR_COMM, "different models, options or placements");
    pretend_close(&group);
}

static int32_t wrong_on_one_rank(const shape *s, int32_t ranks, tch_shard *shards)
{
    by_rows(s, ranks, shards);
    shards[ranks - 1].rank = ranks;
    return ranks;
}

static void bad_options_on_one_rank(tch_comm *comm, int32_t rank, void *user)
{
    training *t = user;
    training mine = *t;
    mine.config.lr = rank == 0 ? -1.0 : t->config.lr;
    train(comm, rank, &mine);
    t->statuses[rank] = mine.statuses[rank];
    memcpy(t->messages[rank], mine.messages[rank], sizeof mine.messages[rank]);
}

/* A rank that cannot make its part has its own error, and the others do not wait for it. */
static void refused_by_one_rank(void **state)
{
    pretend_group group;
    pretend_open(&group, 3);
    tch_optim_config c = config_of(TCH_OPTIM_MUON);
    training t = training_of(*state, &c, TCH_FLOAT32);
    t.group = &group;
    t.place = by_rows;
    pretend_run(&group, bad_options_on_one_rank, &t);
    CHECK(t.statuses[0] == TCH_ERR_INVALID_ARGUMENT && strstr(t.messages[0], "lr is -1") != NULL, "%s", t.messages[0]);
    for (int32_t r = 1; r < 3; r++) {
        CHECK(t.statuses[r] == TCH_ERR_COMM && strstr(t.messages[r], "could not make its part") != NULL, "%s",
              t.messages[r]);
    }
    pretend_close(&group);
    pretend_open(&group, 3);
    t.place = wrong_on_one_rank;
    pretend_run(&group, train, &t);
    check_all(&t, 3, TCH_ERR_INVALID_ARGUMENT, "outside the tensor or the group");
    pretend_close(&group);
}

/* A rank dies at each of the collectives of the first steps, or its transport fails there: every other rank ends with
 * an error that names the group and the operation. */
static void rank_that_dies(void **state)
{
    for (int64_t call = 1; call <= 8; call++) {
        for (int gone = 0; gone < 2; gone++) {
            test_case("collective %lld, %s", (long long)call, gone ? "gone" : "failing");
            pretend_group group;
            pretend_open(&group, 3);
            group.timeout_s = 0.3;
            group.ranks[1].fails_at = gone ? 0 : call;
            group.ranks[1].gone_at = gone ? call : 0;
            tch_optim_config c = config_of(TCH_OPTIM_MUON);
            training t = training_of(*state, &c, TCH_FLOAT32);
            t.group = &group;
            t.place = by_rows;
            pretend_run(&group, train, &t);
            check_all(&t, 3, TCH_ERR_COMM, "of 'pretended', rank ");
            pretend_close(&group);
        }
    }
}

/* --- placements that are wrong ------------------------------------------------------------------------------------ */

static int32_t overlapping(const shape *s, int32_t ranks, tch_shard *shards)
{
    by_rows(s, ranks, shards);
    if (s->size[0] > 20) {
        shards[0].size[0]++;
    }
    return ranks;
}

static int32_t with_a_hole(const shape *s, int32_t ranks, tch_shard *shards)
{
    by_rows(s, ranks, shards);
    if (s->size[0] == 40) {
        shards[1].size[0]--;
    }
    return ranks;
}

static int32_t beyond_the_end(const shape *s, int32_t ranks, tch_shard *shards)
{
    by_rows(s, ranks, shards);
    shards[1].start[0] = s->size[0];
    return ranks;
}

static void bad_placements(void **state)
{
    static const struct {
        placer place;
        const char *words;
    } cases[] = {
        {overlapping, "overlap without being equal, or leave elements out"},
        {with_a_hole, "overlap without being equal, or leave elements out"},
        {beyond_the_end, "outside the tensor or the group"},
    };
    for (size_t k = 0; k < TEST_COUNT(cases); k++) {
        test_case("case %d", (int)k);
        pretend_group group;
        pretend_open(&group, 2);
        tch_optim_config c = config_of(TCH_OPTIM_MUON);
        training t = training_of(*state, &c, TCH_FLOAT32);
        t.group = &group;
        t.place = cases[k].place;
        pretend_run(&group, train, &t);
        check_all(&t, 2, TCH_ERR_INVALID_ARGUMENT, cases[k].words);
        pretend_close(&group);
    }
}

static int open_all(void **state)
{
    numbers *n = test_keep(test_alloc(sizeof *n));
    open_numbers(n);
    *state = n;
    return 0;
}

static int close_all(void **state)
{
    close_numbers(*state);
    free(*state);
    return 0;
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sgd_adamw_lion),
        cmocka_unit_test(shampoo),
        cmocka_unit_test(soap),
        cmocka_unit_test(muon),
        cmocka_unit_test(normuon),
        cmocka_unit_test(world_invariant),
        cmocka_unit_test(replicas_keep_the_same_momentum),
        cmocka_unit_test(state_of_large_vectors_is_divided),
        cmocka_unit_test(experts_send_nothing),
        cmocka_unit_test(sixty_four_ranks),
        cmocka_unit_test(nan_on_one_rank),
        cmocka_unit_test(wrong_gradient_on_one_rank),
        cmocka_unit_test(gradient_missing_on_one_rank),
        cmocka_unit_test(different_code),
        cmocka_unit_test(refused_by_one_rank),
        cmocka_unit_test(rank_that_dies),
        cmocka_unit_test(bad_placements),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}

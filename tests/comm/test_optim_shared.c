/* Sharded optimizers vs one process with the same gradients. Ranks are threads of a fake group. On the CPU every
 * element is bitwise equal; a GPU's libraries choose algorithms by batch size, so there the difference is bounded: by
 * 2^-7 of the path for bfloat16; by 1e-4 of it for Shampoo, whose roots have a tolerance of 1e-5 in each of two
 * dimensions, by either of two methods. An eigensolver may choose any basis of a null space, so SOAP on a GPU is
 * compared where there is none; otherwise path lengths must agree within a half. */
#include "support/comm/shared_trial.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

/* --- placements -------------------------------------------------------------------------------------------------- */

/* The innermost dimension, with which others are merged. */
static int32_t by_the_last(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    for (int32_t r = 0; r < ranks; r++) {
        shards[r] = placed_whole(s, r);
        placed_cut(&shards[r], s->ndim - 1, ranks, r);
    }
    return ranks;
}

/* Some parameters replicated, some sharded: one optimizer, several meshes. */
static int32_t mixed(const placed_shape *s, int32_t ranks, tch_shard *shards)
{
    return s->size[0] == 24   ? 0
           : s->size[0] == 40 ? placed_by_columns(s, ranks, shards)
                              : placed_by_rows(s, ranks, shards);
}

static const struct {
    const char *name;
    placed_how place;
} placements[] = {
    {"replicated", placed_replicated},   {"by rows", placed_by_rows},
    {"by rows, flattened", placed_flat}, {"by columns", placed_by_columns},
    {"by both", placed_by_both},         {"in replicas", placed_in_replicas},
    {"by the last", by_the_last},        {"mixed", mixed},
};

/* --- equal to one process ---------------------------------------------------------------------------------------- */

static double distance(const double *a, const double *b, int64_t count)
{
    double sum = 0.0;
    for (int64_t k = 0; k < count; k++) {
        sum += (a[k] - b[k]) * (a[k] - b[k]);
    }
    return sqrt(sum);
}

static bool has_null_space(const placed_shape *s)
{
    return !s->elementwise && s->ndim > 1 && s->size[0] > 1 && s->size[0] != s->size[1];
}

static void compare(const placed_numbers *n, double *const *expected, double *const *found, double tolerance,
                    bool any_basis)
{
    for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
        int64_t count = placed_count(&shared_model[i]);
        double way = distance(expected[i], n->start[i], count);
        double error = distance(expected[i], found[i], count);
        if (any_basis && !test_on_cpu() && has_null_space(&shared_model[i])) {
            double theirs = distance(found[i], n->start[i], count);
            CHECK(theirs > 0.5 * way && theirs < 2.0 * way, "parameter %d moved %g, expected %g", i, theirs, way);
            continue;
        }
        CHECK(tolerance > 0.0 ? error <= tolerance * way : memcmp(expected[i], found[i], (size_t)count * 8) == 0,
              "parameter %d is off by %g of a way of %g", i, error, way);
        CHECK(way > 0.0, "parameter %d did not move", i);
    }
}

/* clang-format off */
#define F64 {TCH_FLOAT, 64, 1}
#define F32 {TCH_FLOAT, 32, 1}
#define BF16 {TCH_BFLOAT, 16, 1}
/* clang-format on */
#define GRAFTED SET(shampoo.grafting, TCH_GRAFTING_ADAM), SET(beta2, 0.99), SET(numerics.damping, 1e-4)
#define KEPT SET(memory.state_dtype, TCH_STATE_BFLOAT16)
#define CAUTIOUS SET(weight_decay_type, TCH_WEIGHT_DECAY_CAUTIOUS)
#define BLOCKS SET(soap.block, 1), SET(soap.normalize_grads, 1), SET(memory.packed_factors, 1)

/* More ranks than tiles, and than rows, if there are many ranks. */
enum { SIZES = 5 };
static const int32_t few_ranks[SIZES] = {1, 2, 3, 4, 7};
static const int32_t many_ranks[SIZES] = {16, 32, 64};

/* Shards that do not cut blocks of int8. */
static bool keeps_blocks(placed_how place)
{
    return place == placed_replicated || place == placed_by_rows || place == placed_in_replicas;
}

/* Placements of one configuration, each with every second size, beginning with the first or the second by turns. `many`
 * is poisoned before each. */
static void try_all(const placed_numbers *n, const char *name, const tch_optim_config *config, tch_dtype dtype,
                    double gpu_tolerance, const int32_t *group_sizes)
{
    static unsigned turn = 0;
    bool coded = config->memory.state_dtype == TCH_STATE_INT8;
    double *one[SHARED_PARAMETERS];
    double *many[SHARED_PARAMETERS];
    placed_room(one, SHARED_PARAMETERS, shared_model, 0);
    placed_room(many, SHARED_PARAMETERS, shared_model, 0);
    shared_training alone = shared_training_of(n, config, dtype);
    alone.end = one;
    shared_train(NULL, 0, &alone);
    CHECK(alone.statuses[0] == TCH_OK, "%s alone: %s", name, alone.messages[0]);
    for (size_t p = 0; p < TEST_COUNT(placements); p++) {
        bool skipped = group_sizes == many_ranks && placements[p].place != placed_by_rows;
        skipped = skipped || (coded && !keeps_blocks(placements[p].place));
        for (size_t s = group_sizes == many_ranks ? 0 : turn++ % 2; !skipped && s < SIZES && group_sizes[s] > 0;
             s += 2) {
            test_case("%s, %s, %s on %d ranks", name, tch_dtype_name(dtype), placements[p].name, group_sizes[s]);
            for (int32_t i = 0; i < SHARED_PARAMETERS; i++) {
                memset(many[i], 0xFF, (size_t)placed_count(&shared_model[i]) * sizeof(double));
            }
            shared_training t = shared_training_of(n, config, dtype);
            t.end = many;
            shared_run(&t, group_sizes[s], placements[p].place, s == 1);
            compare(n, one, many, test_on_cpu() ? 0.0 : gpu_tolerance,
                    config->kind == TCH_OPTIM_SOAP && !config->numerics.world_invariant);
        }
    }
}

TEST(every_kind)
{
    static const struct {
        const char *name;
        tch_optim_kind kind;
        tch_dtype dtype;
        double gpu_tolerance;
        trial_setting settings[10];
    } cases[] = {
        {"sgd", TCH_OPTIM_SGD, F32, 1e-5, {SET(momentum, 0.9)}},
        {"adamw", TCH_OPTIM_ADAMW, F32, 1e-5, {{{0}, 0}}},
        {"cautious adamw", TCH_OPTIM_ADAMW, BF16, 1e-5, {CAUTIOUS, SET(memory.master_weights, 1)}},
        {"adamw with moments in bfloat16", TCH_OPTIM_ADAMW, F32, 1e-5, {SET(memory.state_dtype, TCH_STATE_BFLOAT16)}},
        {"cautious lion", TCH_OPTIM_LION, F32, 1e-5, {CAUTIOUS}},
        {"shampoo with moments in int8", TCH_OPTIM_SHAMPOO, F32, 1e-4, {SET(memory.state_dtype, TCH_STATE_INT8)}},
        {"shampoo", TCH_OPTIM_SHAMPOO, F32, 1e-4, {{{0}, 0}}},
        {"shampoo with grafting and momentum", TCH_OPTIM_SHAMPOO, F32, 1e-4, {GRAFTED, SET(momentum, 0.5), KEPT}},
        {"shampoo with grafting and l2, packed",
         TCH_OPTIM_SHAMPOO,
         F64,
         1e-4,
         {GRAFTED, SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(shampoo.stagger, 0),
          SET(memory.packed_factors, 1)}},
        {"shampoo with master weights and l2, roots in bfloat16",
         TCH_OPTIM_SHAMPOO,
         BF16,
         1e-2,
         {GRAFTED, SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(shampoo.stagger, 0), SET(memory.packed_factors, 1),
          SET(memory.master_weights, 1), SET(memory.root_dtype, TCH_STATE_BFLOAT16)}},
        {"adaptive shampoo",
         TCH_OPTIM_SHAMPOO,
         F32,
         1e-4,
         {SET(shampoo.refresh_drift, 1.5), SET(shampoo.precondition_frequency, 8), SET(numerics.damping, 1e-4)}},
        {"cautious kl_shampoo", TCH_OPTIM_KL_SHAMPOO, F64, 1e-4, {CAUTIOUS, SET(shampoo.precondition_frequency, 3)}},
        {"kl_shampoo with l2, packed",
         TCH_OPTIM_KL_SHAMPOO,
         F32,
         1e-3,
         {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), SET(memory.packed_factors, 1), SET(beta1, 0.0)}},
        {"soap", TCH_OPTIM_SOAP, F32, 1e-3, {{{0}, 0}}},
        {"cautious soap in blocks, packed", TCH_OPTIM_SOAP, F64, 1e-4, {CAUTIOUS, BLOCKS}},
        {"adaptive soap",
         TCH_OPTIM_SOAP,
         F64,
         1e-4,
         {BLOCKS, SET(shampoo.refresh_drift, 1.0), SET(shampoo.precondition_frequency, 8)}},
        {"orthogonalized soap in blocks",
         TCH_OPTIM_SOAP,
         F32,
         0x1p-6,
         {SET(soap.block, 1), SET(soap.orthogonalize, 1), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2), KEPT}},
        {"muon of constant norm", TCH_OPTIM_MUON, F32, 0x1p-6, {SET(constant_norm, 1), SET(maximize, 1)}},
        {"muon of constant norm with master weights",
         TCH_OPTIM_MUON,
         BF16,
         0x1p-6,
         {SET(constant_norm, 1), SET(memory.master_weights, 1), SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
        {"soap of constant norm in blocks", TCH_OPTIM_SOAP, F64, 1e-4, {BLOCKS, SET(constant_norm, 1)}},
        {"orthogonalized soap in bfloat16", TCH_OPTIM_SOAP, BF16, 0x1p-6, {SET(soap.orthogonalize, 1)}},
        {"muon", TCH_OPTIM_MUON, F32, 0x1p-7, {{{0}, 0}}},
        {"muon with l2", TCH_OPTIM_MUON, F32, 0x1p-7, {SET(weight_decay_type, TCH_WEIGHT_DECAY_L2)}},
        {"muon with master weights",
         TCH_OPTIM_MUON,
         BF16,
         0x1p-6,
         {SET(nesterov, 0), SET(muon.adjust_lr_fn, TCH_ADJUST_LR_MATCH_RMS_ADAMW), SET(maximize, 1),
          SET(memory.master_weights, 1)}},
        {"normuon", TCH_OPTIM_NORMUON, F32, 0x1p-7, {KEPT}},
    };
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        tch_optim_config c = shared_config(cases[i].kind);
        trial_set(&c, cases[i].settings);
        try_all(*state, cases[i].name, &c, cases[i].dtype, cases[i].gpu_tolerance, few_ranks);
    }
}

/* Block by block a GPU is bitwise identical for any number of ranks, too. */
TEST(world_invariant)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_SOAP, TCH_OPTIM_MUON, TCH_OPTIM_NORMUON,
                                           TCH_OPTIM_KL_SHAMPOO};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = shared_config(kinds[k]);
        c.numerics.world_invariant = 1;
        try_all(*state, "block by block", &c, TCH_FLOAT32, 0.0, few_ranks);
    }
}

TEST(sixty_four_ranks)
{
    static const tch_optim_kind kinds[] = {TCH_OPTIM_SHAMPOO, TCH_OPTIM_MUON};
    for (size_t k = 0; k < TEST_COUNT(kinds); k++) {
        tch_optim_config c = shared_config(kinds[k]);
        try_all(*state, tch_optim_kind_name(kinds[k]), &c, TCH_FLOAT32, 0x1p-7, many_ranks);
    }
}

TEST_MAIN(shared_open, shared_close)

/* Every kind of optimizer with every type of parameters and gradients, at sizes around a backend's chunks: long and
 * thin, blocks with gaps between their rows, transposed, aligned for vectors and not, and more rectangles than one
 * launch takes. Compared with references; nothing else is written. */
#include "support/elements.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

typedef struct type_case {
    const char *name;
    tch_dtype dtype, gradients;
    int32_t master, stochastic;
    double scale; /* of the gradients, which the step divides by, and then maximizes; 1 for none */
} type_case;

/* clang-format off */
#define F64 {TCH_FLOAT, 64, 1}
#define F32 {TCH_FLOAT, 32, 1}
#define F16 {TCH_FLOAT, 16, 1}
#define BF16 {TCH_BFLOAT, 16, 1}
/* clang-format on */

static const type_case types[] = {
    {"float64", F64, F64, 0, 0, 1.0},
    {"float64, a loss scale", F64, F64, 0, 0, 8.0},
    {"float32", F32, F32, 0, 0, 1.0},
    {"float32, float16 gradients with a loss scale", F32, F16, 0, 0, 8.0},
    {"float32, bfloat16 gradients", F32, BF16, 0, 0, 1.0},
    {"float16 with master", F16, F16, 1, 0, 8.0},
    {"float16", F16, F16, 0, 0, 1.0},
    {"bfloat16 with master", BF16, BF16, 1, 0, 1.0},
    {"bfloat16", BF16, BF16, 0, 0, 8.0},
    {"bfloat16, rounded at random", BF16, BF16, 0, 1, 1.0},
};

static const trial_shape shapes[] = {
    {.ndim = 2, .shape = {9, 9}},
    {.ndim = 1, .shape = {37}},
    {.ndim = 3, .shape = {3, 4, 5}, .order = {2, 0, 1}},
    {.ndim = 0},
    {.ndim = 2, .shape = {8, 8}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {5, 6}, .elementwise = 1},
    {.ndim = 1, .shape = {4096}},
    {.ndim = 1, .shape = {4097}, .gradient = LAYOUT_OFFSET},
    {.ndim = 2, .shape = {64, 64}},
    {.ndim = 2, .shape = {128, 64}},
    {.ndim = 2, .shape = {65, 63}, .order = {1, 0}},
    {.ndim = 2, .shape = {130, 131}},
    {.ndim = 2, .shape = {2, 5000}},
    {.ndim = 2, .shape = {2500, 3}, .gradient = LAYOUT_ROW_GAPS},
    {.ndim = 2, .shape = {3, 4500}, .order = {1, 0}},
    {.ndim = 2, .shape = {128, 192}, .order = {1, 0}, .gradient_follows = 1},
    {.ndim = 2, .shape = {2, 20011}, .elementwise = 1},
};
#define SMALL 6 /* the first */
#define SOME 11

/* Blocks are larger than a chunk. */
static tch_optim_config config_of(tch_optim_kind kind)
{
    tch_optim_config c = trial_config(kind);
    c.shampoo.max_preconditioner_dim =
        kind == TCH_OPTIM_SOAP ? 9 : 65; /* bases are known to u / gap: small ones in float32 */
    if (kind == TCH_OPTIM_SHAMPOO) {
        c.shampoo.grafting = TCH_GRAFTING_ADAM;
        c.momentum = 0.5;
    }
    return c;
}

static void take_steps(trial *t, int32_t steps, double scale)
{
    const tch_tensor *gradients[TRIAL_MOST_PARAMETERS];
    test_tensor *by = test_tensor_make(t->context, TCH_FLOAT32, 0, NULL, LAYOUT_CONTIGUOUS);
    test_tensor_write(by, &scale);
    trial_list_gradients(t, gradients);
    for (int32_t i = 0; i < steps; i++) {
        trial_draw(t);
        trial_scale_gradients(t, scale);
        CHECK_OK(tch_optimizer_step_scaled(t->optimizer, t->count, gradients, scale == 1.0 ? NULL : &by->tensor, NULL));
        trial_step_references(t);
    }
}

/* With a master copy the only half-precision error is that of the last rounding. Without one each step adds its own,
 * stochastically up to a whole spacing. */
static void check(const trial *t, const type_case *type, int32_t steps)
{
    for (int32_t i = 0; i < t->count; i++) {
        double error = trial_error(t, i, type->master ? 1.01 : (1 + type->stochastic) * steps);
        double most = trial_tolerance(t->configs[0].kind, t->dtype) + (type->master ? 0x1p-24 * steps : 0.0);
        CHECK(error <= most, "parameter %d: off by %.3e of the path, allowed %.1e", i, error, most);
        test_tensor_check_written(t->parameters[i].memory, "the parameter");
        test_tensor_check_unchanged(t->parameters[i].gradient_memory, "the gradient");
    }
}

static void run(tch_context *context, const tch_optim_config *config, const type_case *type, int32_t count,
                const trial_shape *which, int32_t steps)
{
    trial t;
    tch_optim_config c = *config;
    size_t mark = test_mark();
    test_case("%s, %s, %d parameters", tch_optim_kind_name(c.kind), type->name, count);
    c.memory.master_weights = type->master;
    c.memory.stochastic_rounding = type->stochastic;
    c.maximize = type->scale != 1.0;
    trial_open(&t, context, type->dtype, type->gradients, &c, count, which);
    take_steps(&t, steps, type->scale);
    check(&t, type, steps);
    test_release_since(mark);
}

/* Every grafting has some of the types, and so has cautious decay. Half types and every third have all but the largest
 * shapes, and so have, in two steps, an emulated device and a CPU that uses an older one's loops. */
static void every_type(tch_context *context, tch_optim_kind kind)
{
    tch_optim_config c = config_of(kind);
    bool brief = getenv("TORCHIUM_EMULATOR_CAPABILITY") != NULL || getenv("TORCHIUM_CPU") != NULL;
    for (size_t i = 0; i < TEST_COUNT(types); i++) {
        c.shampoo.grafting = kind == TCH_OPTIM_SHAMPOO ? (tch_grafting)(TCH_GRAFTING_SGD + i % 4) : c.shampoo.grafting;
        c.shampoo.start_preconditioning_step = kind == TCH_OPTIM_SHAMPOO && i % 3 == 1 ? 2 : -1;
        c.weight_decay_type = i % 4 == 1 ? TCH_WEIGHT_DECAY_CAUTIOUS : config_of(kind).weight_decay_type;
        bool some = brief || types[i].dtype.bits == 16 || i % 3 == 1;
        int32_t count = some ? SOME : (int32_t)TEST_COUNT(shapes);
        run(context, &c, &types[i], count, shapes, brief ? 2 : 3);
        if (!brief) {
            run(context, &c, &types[i], SMALL, shapes, 12);
        }
    }
}

TEST(types_and_sizes)
{
    trial_for_every_kind(*state, "every type", every_type);
}

/* Square blocks, whose bases SOAP's first gradient determines. */
TEST(blocks_of_soap)
{
    static const trial_shape cut[] = {{.ndim = 2, .shape = {128, 192}},
                                      {.ndim = 2, .shape = {64, 64}, .order = {1, 0}}};
    tch_optim_config c = config_of(TCH_OPTIM_SOAP);
    c.soap.block = 1;
    c.shampoo.max_preconditioner_dim = 8;
    for (size_t i = 0; i < TEST_COUNT(types); i++) {
        run(*state, &c, &types[i], 2, cut, 4);
    }
}

/* 250 matrices of 3 by 3, as many rows of vectors, and 900 blocks: rectangles for several launches of every kernel. */
static void many(tch_context *context, tch_optim_kind kind)
{
    enum { COUNT = 250 };
    static trial_shape small[COUNT + 1];
    tch_optim_config c = config_of(kind);
    c.shampoo.max_preconditioner_dim = 4;
    c.soap.block = 1;
    c.shampoo.precondition_frequency = 2;
    for (int i = 0; i < COUNT; i++) {
        small[i] = (trial_shape){.ndim = 2, .shape = {3, 3}, .elementwise = i % 5 == 4};
    }
    small[COUNT] = (trial_shape){.ndim = 2, .shape = {120, 120}};
    run(context, &c, &types[0], COUNT + 1, small, 4);
}

TEST(many_parameters)
{
    trial_for_every_kind(*state, "many parameters", many);
}

/* One NaN in one gradient, first, in the middle or last, leaves every parameter unchanged; gaps always hold NaN. */
TEST(every_bad_gradient_is_found)
{
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t k = 0; k < TEST_COUNT(types); k += 2) {
        trial t;
        tch_optim_config c = config_of(TCH_OPTIM_ADAMW);
        int32_t count = (int32_t)TEST_COUNT(shapes);
        c.memory.master_weights = types[k].master;
        trial_open(&t, *state, types[k].dtype, types[k].gradients, &c, count, shapes);
        trial_draw(&t);
        for (int i = 0; i < 3 * count; i++) {
            test_tensor *gradient = t.parameters[i / 3].gradient_memory;
            size_t mark = test_mark();
            double *values = test_tensor_read(gradient);
            int64_t at = i % 3 * (gradient->count - 1) / 2;
            double kept = values[at];
            test_case("%s, element %lld of gradient %d", types[k].name, (long long)at, i / 3);
            values[at] = bad[i % 3];
            test_tensor_write(gradient, values);
            CHECK_OK(trial_step_library(&t));
            CHECK(trial_stats(&t).skipped == i + 1, "the step was taken");
            values[at] = kept;
            test_tensor_write(gradient, values);
            test_release_since(mark);
        }
        for (int32_t i = 0; i < count; i++) {
            test_tensor_check_unchanged(t.parameters[i].memory, "a parameter");
        }
        CHECK_OK(trial_step_library(&t));
        CHECK(trial_stats(&t).skipped == 3 * count, "a good step was skipped");
    }
}

TEST_MAIN(test_open_context, test_close_context)

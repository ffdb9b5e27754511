/* Invalid input to the functions of grad.h, for every kind of layer. Every call returns its status and names the error,
 * a number with its value; nothing is written; and afterwards a valid call works. test_bad_input.c has invalid tensors
 * that do not depend on the kind. */

#include <torchium/grad.h>

#include "support/bad_input.h"
#include "support/tensors.h"
#include "support/testing.h"

/* --- a layer of every kind, with all tensors that any function takes --------------------------------------------- */

enum { INPUT, GRADIENT, HIDDEN, LOGITS, SAMPLE_WEIGHT, SAMPLE_BIAS, WEIGHT, BIAS, WEIGHTS, NUMBERS, GRAM, TENSORS };

typedef struct world {
    tch_context *context;
    tch_layer layer;
    const tch_layer *given; /* passed to calls, replaced by tests */
    test_tensor *tensors[TENSORS];
    tch_tensor *t[TENSORS]; /* the same for tensors */
    tch_grad_part parts;
    double beta;
} world;

typedef struct shape {
    int32_t ndim;
    int64_t sizes[6];
} shape;

/* Shapes of one kind for two samples: input, output gradient, weight, bias (rank 0 for none). */
static const struct {
    const char *name;
    shape input, gradient, weight, bias;
} kinds[TCH_LAYER_COUNT] = {
    [TCH_LAYER_LINEAR] = {"linear", {3, {2, 3, 4}}, {3, {2, 3, 5}}, {2, {5, 4}}, {1, {5}}},
    [TCH_LAYER_CONV] = {"conv", {4, {2, 4, 5, 6}}, {4, {2, 6, 3, 4}}, {4, {6, 2, 3, 3}}, {1, {6}}},
    [TCH_LAYER_EMBEDDING] = {"embedding", {2, {2, 3}}, {3, {2, 3, 4}}, {2, {7, 4}}, {0, {0}}},
    [TCH_LAYER_LAYER_NORM] = {"layer norm", {4, {2, 3, 4, 5}}, {4, {2, 3, 4, 5}}, {2, {4, 5}}, {2, {4, 5}}},
    [TCH_LAYER_RMS_NORM] = {"RMS norm", {4, {2, 3, 4, 5}}, {4, {2, 3, 4, 5}}, {2, {4, 5}}, {0, {0}}},
    [TCH_LAYER_GROUP_NORM] = {"group norm", {4, {2, 4, 3, 5}}, {4, {2, 4, 3, 5}}, {1, {4}}, {1, {4}}},
};

static tch_layer good_layer(tch_layer_kind kind)
{
    tch_layer layer = TCH_LAYER_INIT(kind);
    layer.dims = 2;
    layer.kernel[0] = layer.kernel[1] = 3;
    layer.groups = kind == TCH_LAYER_CONV || kind == TCH_LAYER_GROUP_NORM ? 2 : 1;
    layer.rows = 7;
    layer.padding_index = 2;
    layer.normalized = 2;
    return layer;
}

static shape with_samples(shape s)
{
    shape all = {s.ndim + 1, {2}};
    memcpy(all.sizes + 1, s.sizes, (size_t)s.ndim * sizeof *s.sizes);
    return all;
}

static void world_make(world *w, tch_context *context, tch_layer_kind kind)
{
    const shape shapes[TENSORS] = {[INPUT] = kinds[kind].input,
                                   [GRADIENT] = kinds[kind].gradient,
                                   [HIDDEN] = {3, {2, 5, 4}}, /* of a linear layer tied to the embedding */
                                   [LOGITS] = {3, {2, 5, 7}},
                                   [SAMPLE_WEIGHT] = with_samples(kinds[kind].weight),
                                   [SAMPLE_BIAS] = with_samples(kinds[kind].bias),
                                   [WEIGHT] = kinds[kind].weight,
                                   [BIAS] = kinds[kind].bias,
                                   [WEIGHTS] = {1, {2}},
                                   [NUMBERS] = {1, {2}},
                                   [GRAM] = {2, {2, 2}}};
    *w = (world){.context = context, .layer = good_layer(kind), .parts = TCH_GRAD_BOTH};
    for (int i = 0; i < TENSORS; i++) {
        bool tokens = kind == TCH_LAYER_EMBEDDING && i == INPUT;
        tch_dtype dtype = i >= WEIGHTS ? TCH_FLOAT64 : tokens ? TCH_INT32 : TCH_FLOAT32;
        bool none = (i == BIAS || i == SAMPLE_BIAS) && kinds[kind].bias.ndim == 0;
        if (!none) {
            w->tensors[i] = test_tensor_make(context, dtype, shapes[i].ndim, shapes[i].sizes, LAYOUT_CONTIGUOUS);
            test_tensor_draw(w->tensors[i], (uint64_t)(10 + i));
            w->t[i] = &w->tensors[i]->tensor;
        }
    }
}

/* --- the functions ----------------------------------------------------------------------------------------------- */

static tch_status call_samples(const world *w)
{
    return tch_grad_samples(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->t[SAMPLE_WEIGHT], w->t[SAMPLE_BIAS]);
}

static tch_status call_norms(const world *w)
{
    return tch_grad_norms(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->parts, 0, w->t[NUMBERS]);
}

static tch_status call_sum(const world *w)
{
    return tch_grad_weighted_sum(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->t[WEIGHTS], w->beta,
                                 w->t[WEIGHT], w->t[BIAS]);
}

static tch_status call_gram(const world *w)
{
    return tch_grad_gram(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->parts, 0, w->t[GRAM]);
}

static tch_status call_dots(const world *w)
{
    return tch_grad_dots(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->t[WEIGHT], w->t[BIAS], 0, w->t[NUMBERS]);
}

static tch_status call_tied(const world *w)
{
    return tch_grad_tied_norms(w->context, w->given, w->t[INPUT], w->t[GRADIENT], w->t[HIDDEN], w->t[LOGITS],
                               w->t[NUMBERS]);
}

/* A function's tensors besides input and output gradient, and their names. */
typedef struct function {
    const char *name;
    tch_status (*call)(const world *w);
    struct {
        int tensor;
        const char *name;
    } takes[3];
    int count;
} function;

static const function functions[] = {
    {"tch_grad_samples", call_samples, {{SAMPLE_WEIGHT, "weight"}, {SAMPLE_BIAS, "bias"}, {0, NULL}}, 2},
    {"tch_grad_norms", call_norms, {{NUMBERS, "norms"}, {0, NULL}, {0, NULL}}, 1},
    {"tch_grad_weighted_sum", call_sum, {{WEIGHTS, "weights"}, {WEIGHT, "weight"}, {BIAS, "bias"}}, 3},
    {"tch_grad_gram", call_gram, {{GRAM, "gram"}, {0, NULL}, {0, NULL}}, 1},
    {"tch_grad_dots", call_dots, {{WEIGHT, "weight"}, {BIAS, "bias"}, {NUMBERS, "dots"}}, 3},
};
#define FUNCTIONS TEST_COUNT(functions)

static void check_unchanged(const world *w)
{
    for (int i = 0; i < TENSORS; i++) {
        if (w->tensors[i] != NULL) {
            test_tensor_check_unchanged(w->tensors[i], "a tensor");
        }
    }
}

static void refuse(const world *w, const function *f, tch_status expected, const char *argument)
{
    test_check_refused(f->call(w), expected, argument);
    check_unchanged(w);
}

/* --- descriptions of layers -------------------------------------------------------------------------------------- */

enum { CONV = 1 << TCH_LAYER_CONV, EMBEDDING = 1 << TCH_LAYER_EMBEDDING, GROUP = 1 << TCH_LAYER_GROUP_NORM };
enum { LAYER_OR_RMS = 1 << TCH_LAYER_LAYER_NORM | 1 << TCH_LAYER_RMS_NORM, ALL = (1 << TCH_LAYER_COUNT) - 1 };

#define OPTION(member) TEST_FIELD(tch_layer, member)

/* The kinds that have the option. */
static const test_range options[] = {
    {OPTION(kind), ALL, 3, {-1, 6, 1000}},
    {OPTION(scale), ALL, 3, {NAN, INFINITY, -INFINITY}},
    {OPTION(dims), CONV, 3, {0, 4, -1}},
    {OPTION(kernel), CONV, 2, {0, -3}},
    {OPTION(stride), CONV, 2, {0, -1}},
    {OPTION(dilation), CONV, 2, {0, -2}},
    {OPTION(before), CONV, 1, {-1}},
    {OPTION(after), CONV, 1, {-1}},
    {OPTION(padding), CONV, 2, {-1, 4}},
    {OPTION(groups), CONV | GROUP, 2, {0, -1}},
    {OPTION(rows), EMBEDDING, 2, {-1, -7}},
    {OPTION(padding_index), EMBEDDING, 3, {-2, 7, 100}},
    {OPTION(normalized), LAYER_OR_RMS, 3, {0, -1, 1000}},
    {OPTION(eps), LAYER_OR_RMS | GROUP, 3, {-1e-5, NAN, INFINITY}},
};

static void break_options(world *w, const function *f)
{
    tch_layer good = w->layer;
    for (size_t i = 0; i < TEST_COUNT(options); i++) {
        for (int k = 0; k < options[i].count && (options[i].mark & 1 << good.kind); k++) {
            w->layer = good;
            test_field_set(&w->layer, &options[i].field, options[i].bad[k]);
            refuse(w, f, TCH_ERR_INVALID_ARGUMENT, options[i].field.name);
            test_check_value_told(options[i].bad[k]);
        }
    }
}

/* Numbers that do not fit the input or each other, for some kinds and, if named, for one function. */
static const struct {
    int kinds;
    tch_status (*call)(const world *w);
    test_field fields[2];
    double values[2];
    tch_status expected;
    const char *argument;
} misfits[] = {
    /* clang-format off */
    {ALL, NULL, {TEST_FIELD(world, layer.struct_size)}, {0}, TCH_ERR_INVALID_ARGUMENT, "layer"},
    {ALL, NULL, {TEST_FIELD(world, layer.struct_size)}, {sizeof(tch_layer) + 8}, TCH_ERR_INVALID_ARGUMENT, "layer"},
    {ALL, call_norms, {TEST_FIELD(world, parts)}, {0}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_norms, {TEST_FIELD(world, parts)}, {4}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_norms, {TEST_FIELD(world, parts)}, {-1}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_gram, {TEST_FIELD(world, parts)}, {0}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_gram, {TEST_FIELD(world, parts)}, {4}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_gram, {TEST_FIELD(world, parts)}, {-1}, TCH_ERR_INVALID_ARGUMENT, "parts"},
    {ALL, call_sum, {TEST_FIELD(world, beta)}, {NAN}, TCH_ERR_INVALID_ARGUMENT, "beta"},
    {ALL, call_sum, {TEST_FIELD(world, beta)}, {INFINITY}, TCH_ERR_INVALID_ARGUMENT, "beta"},
    {CONV | GROUP, NULL, {TEST_FIELD(world, layer.groups)}, {3}, TCH_ERR_SHAPE, "input"},
    {LAYER_OR_RMS, NULL, {TEST_FIELD(world, layer.normalized)}, {4}, TCH_ERR_SHAPE, "input"},
    {CONV, NULL, {TEST_FIELD(world, layer.kernel[1])}, {0}, TCH_ERR_INVALID_ARGUMENT, "kernel"}, /* not the first */
    {CONV, NULL, {TEST_FIELD(world, layer.after[1])}, {-1}, TCH_ERR_INVALID_ARGUMENT, "after"},
    {CONV, NULL, {TEST_FIELD(world, layer.kernel[0])}, {6}, TCH_ERR_SHAPE, "input"},
    {CONV, NULL, {TEST_FIELD(world, layer.dilation[1])}, {3}, TCH_ERR_SHAPE, "input"},
    {CONV, NULL, {TEST_FIELD(world, layer.stride[0])}, {2}, TCH_ERR_SHAPE, "output_gradient"}, /* another output size */
    {CONV, NULL, {TEST_FIELD(world, layer.padding), TEST_FIELD(world, layer.before[0])}, {TCH_PADDING_REFLECT, 5},
     TCH_ERR_SHAPE, "input"},
    {CONV, NULL, {TEST_FIELD(world, layer.padding), TEST_FIELD(world, layer.after[1])}, {TCH_PADDING_CIRCULAR, 7},
     TCH_ERR_SHAPE, "input"},
    {CONV, NULL, {TEST_FIELD(world, layer.dims)}, {3}, TCH_ERR_SHAPE, "input"},
    /* clang-format on */
};

static void break_numbers(world *w, const function *f)
{
    const world good = *w;
    for (size_t i = 0; i < TEST_COUNT(misfits); i++) {
        if (!(misfits[i].kinds & 1 << good.layer.kind) || (misfits[i].call != NULL && misfits[i].call != f->call)) {
            continue;
        }
        for (int k = 0; k < 2 && misfits[i].fields[k].name != NULL; k++) {
            test_field_set(w, &misfits[i].fields[k], misfits[i].values[k]);
        }
        refuse(w, f, misfits[i].expected, misfits[i].argument);
        *w = good;
    }
}

static void break_description(world *w, const function *f)
{
    w->given = NULL;
    refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "layer");
}

/* --- tensors that do not fit the layer --------------------------------------------------------------------------- */

static void refuse_tensor(world *w, const function *f, int index, tch_tensor *broken, tch_status expected,
                          const char *name)
{
    tch_tensor *kept = w->t[index];
    w->t[index] = broken;
    refuse(w, f, expected, name);
    w->t[index] = kept;
}

/* With a row's change, or with one element less in a dimension. */
static void refuse_flaw(world *w, const function *f, int index, const test_flaw *flaw, const char *name)
{
    test_broken b;
    refuse_tensor(w, f, index, test_broken_make(&b, w->t[index], flaw), flaw->expected, name);
}

static void refuse_fewer(world *w, const function *f, int index, int32_t d, const char *name)
{
    test_broken b;
    test_broken_copy(&b, w->t[index])->strides = NULL;
    b.shape[d] -= 1;
    refuse_tensor(w, f, index, &b.tensor, TCH_ERR_SHAPE, name);
}

static const test_flaw number = {"rank 0", TCH_ERR_SHAPE, PART_RANK, 0, {0}};
static const test_flaw vector = {"rank 1", TCH_ERR_SHAPE, PART_RANK, 1, {0}};
static const test_flaw half = {"half precision", TCH_ERR_DTYPE, PART_DTYPE, 0, {TCH_FLOAT, 16, 1}};

static void refuse_dimension_more(world *w, const function *f, int index, const char *name)
{
    const test_flaw more = {"a dimension more", TCH_ERR_SHAPE, PART_RANK, w->t[index]->ndim + 1, {0}};
    refuse_flaw(w, f, index, &more, name);
}

/* One element too few, in every dimension of the output gradient that the input determines. */
static void break_gradient_sizes(world *w, const function *f)
{
    tch_layer_kind kind = w->layer.kind;
    int32_t last = w->t[GRADIENT]->ndim - 1;
    for (int32_t d = 0; d <= last; d++) {
        bool features = (kind == TCH_LAYER_LINEAR || kind == TCH_LAYER_EMBEDDING) && d == last;
        bool channels = kind == TCH_LAYER_CONV && d == 1;
        if (!features && !channels) {
            refuse_fewer(w, f, GRADIENT, d, "output_gradient");
        }
    }
}

static void break_ranks(world *w, const function *f)
{
    for (int index = INPUT; index <= GRADIENT; index++) {
        const char *name = index == INPUT ? "input" : "output_gradient";
        refuse_flaw(w, f, index, &vector, name);
        refuse_dimension_more(w, f, index, name);
    }
    refuse_flaw(w, f, INPUT, &number, "input");
}

static void break_dtypes(world *w, const function *f)
{
    const tch_dtype others[] = {TCH_FLOAT16, TCH_BFLOAT16, TCH_FLOAT32, TCH_INT32, TCH_INT64};
    bool tokens = w->layer.kind == TCH_LAYER_EMBEDDING;
    for (int i = 0; i < 5; i++) {
        const test_flaw other = {"another type", TCH_ERR_DTYPE, PART_DTYPE, 0, others[i]};
        if (!(tokens ? i >= 3 : i == 2)) {
            refuse_flaw(w, f, INPUT, &other, "input");
        }
        if (tokens ? i >= 3 : i != 2) {
            refuse_flaw(w, f, GRADIENT, &other, "output_gradient");
        }
    }
}

/* Every other tensor with one element more, one dimension more, and of another type. */
static void break_other_tensors(world *w, const function *f)
{
    for (int i = 0; i < f->count; i++) {
        int index = f->takes[i].tensor;
        if (w->t[index] == NULL) {
            continue;
        }
        refuse_dimension_more(w, f, index, f->takes[i].name);
        for (int32_t d = 0; d < w->t[index]->ndim; d++) {
            refuse_fewer(w, f, index, d, f->takes[i].name);
        }
        refuse_flaw(w, f, index, &half, f->takes[i].name);
    }
}

/* Kinds without a bias reject one. */
static void break_bias(world *w, const function *f)
{
    bool takes_bias = f->count > 1;
    if (takes_bias && w->tensors[BIAS] == NULL) {
        w->t[BIAS] = w->t[SAMPLE_BIAS] = w->t[NUMBERS];
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "bias");
        w->t[BIAS] = w->t[SAMPLE_BIAS] = NULL;
    }
}

/* Numbers per sample are contiguous. */
static void break_strides(world *w, const function *f)
{
    const test_flaw every_second = {"stride 2", TCH_ERR_LAYOUT, PART_STRIDE, 2, {0}};
    for (int i = 0; i < f->count; i++) {
        if (f->takes[i].tensor == WEIGHTS || f->takes[i].tensor == NUMBERS) {
            refuse_flaw(w, f, f->takes[i].tensor, &every_second, f->takes[i].name);
        }
    }
}

/* All of the above for every function and kind, each followed by a valid call. */
TEST(broken_calls)
{
    static const struct {
        const char *what;
        void (*breaks)(world *w, const function *f);
    } rows[] = {
        {"an option out of range", break_options},
        {"numbers that do not fit", break_numbers},
        {"no description", break_description},
        {"an output gradient of another size", break_gradient_sizes},
        {"tensors of another rank", break_ranks},
        {"tensors of another type", break_dtypes},
        {"other tensors that do not fit", break_other_tensors},
        {"a bias it does not have", break_bias},
        {"numbers that do not lie together", break_strides},
    };
    for (size_t i = 0; i < TEST_COUNT(rows) * TCH_LAYER_COUNT * FUNCTIONS; i++) {
        const function *f = &functions[i % FUNCTIONS];
        tch_layer_kind kind = (tch_layer_kind)(i / FUNCTIONS % TCH_LAYER_COUNT);
        world w;
        world_make(&w, *state, kind);
        w.given = &w.layer;
        test_case("%s of a %s layer with %s", f->name, kinds[kind].name, rows[i / FUNCTIONS / TCH_LAYER_COUNT].what);
        rows[i / FUNCTIONS / TCH_LAYER_COUNT].breaks(&w, f);
        w.layer = good_layer(kind);
        w.given = &w.layer;
        CHECK_OK(f->call(&w));
    }
}

/* --- tied weights ------------------------------------------------------------------------------------------------ */

/* Its tensors, and the argument named if a dimension of it has one element less: other numbers of positions or samples
 * are detected at the next tensor. */
static const struct {
    int tensor;
    const char *name, *fewer[3];
} tied[] = {
    {INPUT, "tokens", {"embedding_gradient", "embedding_gradient", NULL}},
    {GRADIENT, "embedding_gradient", {"embedding_gradient", "embedding_gradient", "linear_input"}},
    {HIDDEN, "linear_input", {"linear_input", "linear_gradient", "linear_input"}},
    {LOGITS, "linear_gradient", {"linear_gradient", "linear_gradient", "linear_gradient"}},
    {NUMBERS, "norms", {"norms", NULL, NULL}},
};
static const function tied_function = {"tch_grad_tied_norms", call_tied, {{0, NULL}}, 0};

static void break_tied(world *w, int row)
{
    const char *name = tied[row].name;
    test_case("tied norms with %s that does not fit", name);
    refuse_tensor(w, &tied_function, tied[row].tensor, NULL, TCH_ERR_INVALID_ARGUMENT, name);
    for (int32_t d = 0; d < w->t[tied[row].tensor]->ndim; d++) {
        refuse_fewer(w, &tied_function, tied[row].tensor, d, tied[row].fewer[d]);
    }
    refuse_flaw(w, &tied_function, tied[row].tensor, &half, name);
    refuse_flaw(w, &tied_function, tied[row].tensor, &number, name);
}

TEST(tied_norms)
{
    world w;
    world_make(&w, *state, TCH_LAYER_EMBEDDING);
    w.given = &w.layer;
    for (size_t row = 0; row < TEST_COUNT(tied); row++) {
        break_tied(&w, (int)row);
    }
    for (int kind = 0; kind < TCH_LAYER_COUNT; kind++) {
        if (kind != TCH_LAYER_EMBEDDING) {
            test_case("tied norms of a %s layer", kinds[kind].name);
            w.layer = good_layer((tch_layer_kind)kind);
            refuse(&w, &tied_function, TCH_ERR_INVALID_ARGUMENT, "layer");
        }
    }
    test_case("tied norms on top of an input");
    w.layer = good_layer(TCH_LAYER_EMBEDDING);
    tch_tensor overlapping = *w.t[NUMBERS];
    overlapping.data = w.t[LOGITS]->data;
    overlapping.byte_offset = w.t[LOGITS]->byte_offset;
    refuse_tensor(&w, &tied_function, NUMBERS, &overlapping, TCH_ERR_LAYOUT, "norms");
    CHECK_OK(call_tied(&w));
}

/* --- clipping and natural gradient ------------------------------------------------------------------------------- */

TEST(clipping)
{
    const int64_t three = 3;
    const double bad[] = {0.0, -1.0, NAN, -INFINITY};
    test_tensor *norms = test_tensor_make(*state, TCH_FLOAT64, 1, &three, LAYOUT_CONTIGUOUS);
    test_tensor *weights = test_tensor_make(*state, TCH_FLOAT64, 1, &three, LAYOUT_CONTIGUOUS);
    for (int i = 0; i < 4; i++) {
        test_case("max_norm %g", bad[i]);
        tch_status got = tch_grad_clip_weights(*state, &norms->tensor, bad[i], &weights->tensor);
        test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, "max_norm");
    }
    test_case("weights that overlap half of norms");
    tch_tensor shifted = norms->tensor;
    shifted.byte_offset += 8;
    test_check_refused(tch_grad_clip_weights(*state, &norms->tensor, 1.0, &shifted), TCH_ERR_LAYOUT, "weights");
    test_tensor_check_unchanged(norms, "norms");
    test_tensor_check_unchanged(weights, "weights");
}

TEST(natural_weights)
{
    const int64_t square[] = {3, 3};
    const int64_t one[] = {1};
    const double identity[] = {1, 0, 0, 0, 1, 0, 0, 0, 1};
    const double bad[] = {0.0, -1.0, NAN, INFINITY};
    test_tensor *gram = test_tensor_make(*state, TCH_FLOAT64, 2, square, LAYOUT_CONTIGUOUS);
    test_tensor *weights = test_tensor_make(*state, TCH_FLOAT64, 1, square, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(*state, TCH_INT32, 0, one, LAYOUT_CONTIGUOUS);
    test_tensor *reports = test_tensor_make(*state, TCH_INT32, 1, one, LAYOUT_CONTIGUOUS);
    test_tensor_write(gram, identity);
    for (int i = 0; i < 4; i++) {
        test_case("damping %g", bad[i]);
        tch_status got =
            tch_grad_natural_weights(*state, &gram->tensor, NULL, bad[i], &weights->tensor, &report->tensor);
        test_check_refused(got, TCH_ERR_INVALID_ARGUMENT, "damping");
    }
    test_case("a report with a dimension");
    tch_status got = tch_grad_natural_weights(*state, &gram->tensor, NULL, 1.0, &weights->tensor, &reports->tensor);
    test_check_refused(got, TCH_ERR_SHAPE, "report");
    test_case("a report of another type");
    tch_tensor wrong = report->tensor;
    wrong.dtype = TCH_FLOAT32;
    got = tch_grad_natural_weights(*state, &gram->tensor, NULL, 1.0, &weights->tensor, &wrong);
    test_check_refused(got, TCH_ERR_DTYPE, "report");
    test_tensor_check_unchanged(weights, "weights");
    test_tensor_check_unchanged(report, "report");
    CHECK_OK(tch_grad_natural_weights(*state, &gram->tensor, NULL, 1.0, &weights->tensor, &report->tensor));
    test_tensor_check_written(weights, "weights");
}

TEST_MAIN(test_open_context, test_close_context)

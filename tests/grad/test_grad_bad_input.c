/* Bad input to the functions of grad.h, for every kind of layer. Every refusal has its status and names what was wrong, a
 * number with its value; nothing is written; and afterwards the same call works. Tensors that are broken in ways that do
 * not depend on the kind are in test_bad_input.c. */
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <torchium/grad.h>

#include "support/messages.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

/* --- a layer of every kind, with all tensors that any function takes ---------------------------------------------- */

enum { INPUT, GRADIENT, SAMPLE_WEIGHT, SAMPLE_BIAS, WEIGHT, BIAS, WEIGHTS, NUMBERS, GRAM, TENSORS };

typedef struct world {
    tch_context *context;
    tch_layer layer;
    const tch_layer *given; /* what calls get, tests put other things here */
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

static void fill(test_tensor *t, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    double *values = test_alloc((size_t)t->count * sizeof *values + 1);
    test_random_fill_normal(&random, values, t->count);
    test_tensor_write(t, values);
    free(values);
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
            fill(w->tensors[i], (uint64_t)(10 + i));
            w->t[i] = &w->tensors[i]->tensor;
        }
    }
}

static void world_free(world *w)
{
    for (int i = 0; i < TENSORS; i++) {
        test_tensor_free(w->tensors[i]);
    }
}

/* --- the functions ------------------------------------------------------------------------------------------------ */

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

/* Which tensors a function takes, beside the input and the output gradient, and by what name. */
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
#define FUNCTIONS ((int)(sizeof functions / sizeof functions[0]))

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

typedef void (*breaker)(world *w, const function *f);

/* Runs a test for every function and kind, and then the function as it should be called. */
static void for_everything(tch_context *context, const char *what, breaker breaks)
{
    for (int kind = 0; kind < TCH_LAYER_COUNT; kind++) {
        for (int i = 0; i < FUNCTIONS; i++) {
            world w;
            world_make(&w, context, (tch_layer_kind)kind);
            w.given = &w.layer;
            test_case("%s of a %s layer with %s", functions[i].name, kinds[kind].name, what);
            breaks(&w, &functions[i]);
            w.layer = good_layer((tch_layer_kind)kind);
            w.given = &w.layer;
            CHECK_OK(functions[i].call(&w));
            world_free(&w);
        }
    }
}

/* --- descriptions of layers --------------------------------------------------------------------------------------- */

typedef enum field_type { REAL, INT32, INT64 } field_type;

enum { CONV = 1 << TCH_LAYER_CONV, EMBEDDING = 1 << TCH_LAYER_EMBEDDING, GROUP = 1 << TCH_LAYER_GROUP_NORM };
enum { LAYER_OR_RMS = 1 << TCH_LAYER_LAYER_NORM | 1 << TCH_LAYER_RMS_NORM, ALL = (1 << TCH_LAYER_COUNT) - 1 };

/* An option, the kinds that have it, and values it may not have. */
typedef struct option {
    const char *name;
    size_t offset;
    field_type type;
    int kinds;
    int count;
    double bad[4];
} option;

#define AT(name) #name, offsetof(tch_layer, name)

static const option options[] = {
    {AT(kind), INT32, ALL, 3, {-1, 6, 1000}},
    {AT(scale), REAL, ALL, 3, {NAN, INFINITY, -INFINITY}},
    {AT(dims), INT32, CONV, 3, {0, 4, -1}},
    {AT(kernel), INT64, CONV, 2, {0, -3}},
    {AT(stride), INT64, CONV, 2, {0, -1}},
    {AT(dilation), INT64, CONV, 2, {0, -2}},
    {AT(before), INT64, CONV, 1, {-1}},
    {AT(after), INT64, CONV, 1, {-1}},
    {AT(padding), INT32, CONV, 2, {-1, 4}},
    {AT(groups), INT64, CONV | GROUP, 2, {0, -1}},
    {AT(rows), INT64, EMBEDDING, 2, {-1, -7}},
    {AT(padding_index), INT64, EMBEDDING, 3, {-2, 7, 100}},
    {AT(normalized), INT32, LAYER_OR_RMS, 3, {0, -1, 1000}},
    {AT(eps), REAL, LAYER_OR_RMS | GROUP, 3, {-1e-5, NAN, INFINITY}},
};
#define OPTIONS ((int)(sizeof options / sizeof options[0]))

static void set_option(tch_layer *layer, const option *o, double value)
{
    char *at = (char *)layer + o->offset;
    int32_t narrow = o->type == INT32 ? (int32_t)value : 0;
    int64_t wide = o->type == INT64 ? (int64_t)value : 0;
    const void *from = o->type == REAL ? (const void *)&value : o->type == INT32 ? (void *)&narrow : (void *)&wide;
    memcpy(at, from, o->type == INT32 ? sizeof narrow : sizeof value);
}

static void break_options(world *w, const function *f)
{
    tch_layer good = w->layer;
    for (int i = 0; i < OPTIONS; i++) {
        for (int k = 0; k < options[i].count && (options[i].kinds & 1 << good.kind); k++) {
            char text[32];
            w->layer = good;
            set_option(&w->layer, &options[i], options[i].bad[k]);
            refuse(w, f, TCH_ERR_INVALID_ARGUMENT, options[i].name);
            snprintf(text, sizeof text, "%g", options[i].bad[k]);
            CHECK(strstr(tch_last_error(), text) != NULL || isnan(options[i].bad[k]),
                  "the message does not tell the value %s: %s", text, tch_last_error());
        }
    }
}

/* The second of two kernel sizes, not only the first. */
static void break_last_dimension(world *w, const function *f)
{
    if (w->layer.kind == TCH_LAYER_CONV) {
        w->layer.kernel[1] = 0;
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "kernel");
        w->layer = good_layer(w->layer.kind);
        w->layer.after[1] = -1;
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "after");
    }
}

static void break_description(world *w, const function *f)
{
    w->given = NULL;
    refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "layer");
    w->given = &w->layer;
    w->layer.struct_size = 0;
    refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "layer");
    w->layer.struct_size = sizeof w->layer + 8;
    refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "layer");
}

static void options_out_of_range(void **state)
{
    for_everything(*state, "an option out of range", break_options);
    for_everything(*state, "an option out of range in the last dimension", break_last_dimension);
}

static void no_description(void **state)
{
    for_everything(*state, "no good description", break_description);
}

/* --- tensors that do not fit the layer ---------------------------------------------------------------------------- */

/* A tensor of another rank or with another size, over the same memory. */
typedef struct bent {
    tch_tensor tensor;
    int64_t shape[TCH_MAX_RANK];
} bent;

static bent bend(const tch_tensor *tensor)
{
    bent b = {.tensor = *tensor};
    memcpy(b.shape, tensor->shape, (size_t)tensor->ndim * sizeof *b.shape);
    b.tensor.strides = NULL;
    return b;
}

static void refuse_bent(world *w, const function *f, int index, bent *b, tch_status expected, const char *name)
{
    tch_tensor *kept = w->t[index];
    b->tensor.shape = b->shape;
    w->t[index] = &b->tensor;
    refuse(w, f, expected, name);
    w->t[index] = kept;
}

/* One of a size too few, in every dimension of the output gradient that the input decides. */
static void break_gradient_sizes(world *w, const function *f)
{
    tch_layer_kind kind = w->layer.kind;
    int32_t last = w->t[GRADIENT]->ndim - 1;
    for (int32_t d = 0; d <= last; d++) {
        bool features = (kind == TCH_LAYER_LINEAR || kind == TCH_LAYER_EMBEDDING) && d == last;
        bool channels = kind == TCH_LAYER_CONV && d == 1;
        bent b = bend(w->t[GRADIENT]);
        b.shape[d] -= 1;
        if (!features && !channels) {
            refuse_bent(w, f, GRADIENT, &b, TCH_ERR_SHAPE, "output_gradient");
        }
    }
}

static void break_ranks(world *w, const function *f)
{
    for (int index = INPUT; index <= GRADIENT; index++) {
        const char *name = index == INPUT ? "input" : "output_gradient";
        bent fewer = bend(w->t[index]);
        bent more = bend(w->t[index]);
        fewer.tensor.ndim = 1;
        more.shape[more.tensor.ndim++] = 1;
        refuse_bent(w, f, index, &fewer, TCH_ERR_SHAPE, name);
        refuse_bent(w, f, index, &more, TCH_ERR_SHAPE, name);
    }
    bent number = bend(w->t[INPUT]);
    number.tensor.ndim = 0;
    refuse_bent(w, f, INPUT, &number, TCH_ERR_SHAPE, "input");
}

static void break_dtypes(world *w, const function *f)
{
    const tch_dtype others[] = {TCH_FLOAT16, TCH_BFLOAT16, TCH_FLOAT32, TCH_INT32, TCH_INT64};
    bool tokens = w->layer.kind == TCH_LAYER_EMBEDDING;
    for (int i = 0; i < 5; i++) {
        bent input = bend(w->t[INPUT]);
        bent gradient = bend(w->t[GRADIENT]);
        input.tensor.dtype = gradient.tensor.dtype = others[i];
        if (!(tokens ? i >= 3 : i == 2)) {
            refuse_bent(w, f, INPUT, &input, TCH_ERR_DTYPE, "input");
        }
        if (tokens ? i >= 3 : i != 2) {
            refuse_bent(w, f, GRADIENT, &gradient, TCH_ERR_DTYPE, "output_gradient");
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
        bent more = bend(w->t[index]);
        more.shape[more.tensor.ndim++] = 1;
        refuse_bent(w, f, index, &more, TCH_ERR_SHAPE, f->takes[i].name);
        for (int32_t d = 0; d < w->t[index]->ndim; d++) {
            bent fewer = bend(w->t[index]);
            fewer.shape[d] -= 1;
            refuse_bent(w, f, index, &fewer, TCH_ERR_SHAPE, f->takes[i].name);
        }
        bent other = bend(w->t[index]);
        other.tensor.dtype = TCH_FLOAT16;
        refuse_bent(w, f, index, &other, TCH_ERR_DTYPE, f->takes[i].name);
    }
}

/* Kinds without a bias are refused one. */
static void break_bias(world *w, const function *f)
{
    bool takes_bias = f->count > 1;
    if (takes_bias && w->tensors[BIAS] == NULL) {
        w->t[BIAS] = w->t[SAMPLE_BIAS] = w->t[NUMBERS];
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "bias");
        w->t[BIAS] = w->t[SAMPLE_BIAS] = NULL;
    }
}

/* Numbers per sample lie one after the other. */
static void break_strides(world *w, const function *f)
{
    int64_t every_second = 2;
    for (int i = 0; i < f->count; i++) {
        int index = f->takes[i].tensor;
        if (index != WEIGHTS && index != NUMBERS) {
            continue;
        }
        tch_tensor *kept = w->t[index];
        tch_tensor strided = *kept;
        strided.strides = &every_second;
        w->t[index] = &strided;
        refuse(w, f, TCH_ERR_LAYOUT, f->takes[i].name);
        w->t[index] = kept;
    }
}

static void break_numbers(world *w, const function *f)
{
    const int parts[] = {0, 4, -1};
    for (int i = 0; i < 3 && (f->call == call_norms || f->call == call_gram); i++) {
        w->parts = (tch_grad_part)parts[i];
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "parts");
    }
    w->parts = TCH_GRAD_BOTH;
    const double betas[] = {NAN, INFINITY};
    for (int i = 0; i < 2 && f->call == call_sum; i++) {
        w->beta = betas[i];
        refuse(w, f, TCH_ERR_INVALID_ARGUMENT, "beta");
    }
    w->beta = 0;
}

static void tensors_that_do_not_fit(void **state)
{
    for_everything(*state, "an output gradient of another size", break_gradient_sizes);
    for_everything(*state, "tensors of another rank", break_ranks);
    for_everything(*state, "tensors of another type", break_dtypes);
    for_everything(*state, "other tensors that do not fit", break_other_tensors);
}

static void arguments_that_are_refused(void **state)
{
    for_everything(*state, "a bias it does not have", break_bias);
    for_everything(*state, "numbers that do not lie together", break_strides);
    for_everything(*state, "numbers out of range", break_numbers);
}

/* --- layers that do not fit the input ----------------------------------------------------------------------------- */

static void break_groups(world *w, const function *f)
{
    if (w->layer.kind == TCH_LAYER_CONV || w->layer.kind == TCH_LAYER_GROUP_NORM) {
        w->layer.groups = 3;
        refuse(w, f, TCH_ERR_SHAPE, "input");
    }
}

static void break_normalized(world *w, const function *f)
{
    if (w->layer.kind == TCH_LAYER_LAYER_NORM || w->layer.kind == TCH_LAYER_RMS_NORM) {
        w->layer.normalized = 4;
        refuse(w, f, TCH_ERR_SHAPE, "input");
    }
}

static void break_convolution(world *w, const function *f)
{
    if (w->layer.kind != TCH_LAYER_CONV) {
        return;
    }
    w->layer.kernel[0] = 6;
    refuse(w, f, TCH_ERR_SHAPE, "input");
    w->layer = good_layer(TCH_LAYER_CONV);
    w->layer.dilation[1] = 3;
    refuse(w, f, TCH_ERR_SHAPE, "input");
    w->layer = good_layer(TCH_LAYER_CONV);
    w->layer.stride[0] = 2; /* another output size */
    refuse(w, f, TCH_ERR_SHAPE, "output_gradient");
    w->layer = good_layer(TCH_LAYER_CONV);
    w->layer.padding = TCH_PADDING_REFLECT;
    w->layer.before[0] = 5;
    refuse(w, f, TCH_ERR_SHAPE, "input");
    w->layer = good_layer(TCH_LAYER_CONV);
    w->layer.padding = TCH_PADDING_CIRCULAR;
    w->layer.after[1] = 7;
    refuse(w, f, TCH_ERR_SHAPE, "input");
    w->layer = good_layer(TCH_LAYER_CONV);
    w->layer.dims = 3;
    refuse(w, f, TCH_ERR_SHAPE, "input");
}

static void layers_that_do_not_fit(void **state)
{
    for_everything(*state, "groups that do not divide the channels", break_groups);
    for_everything(*state, "more normalised dimensions than there are", break_normalized);
    for_everything(*state, "options that do not fit the input", break_convolution);
}

/* --- tied weights ------------------------------------------------------------------------------------------------- */

enum { TOKENS, EMBEDDED, HIDDEN, LOGITS, TIED_NORMS, TIED };

static const char *const tied_names[] = {"tokens", "embedding_gradient", "linear_input", "linear_gradient", "norms"};

typedef struct tied_world {
    tch_layer layer;
    test_tensor *tensors[TIED];
    tch_tensor *t[TIED];
} tied_world;

static void tied_make(tied_world *w, tch_context *context)
{
    const shape shapes[TIED] = {{2, {2, 3}}, {3, {2, 3, 4}}, {3, {2, 5, 4}}, {3, {2, 5, 7}}, {1, {2}}};
    w->layer = good_layer(TCH_LAYER_EMBEDDING);
    for (int i = 0; i < TIED; i++) {
        tch_dtype dtype = i == TOKENS ? TCH_INT32 : i == TIED_NORMS ? TCH_FLOAT64 : TCH_FLOAT32;
        w->tensors[i] = test_tensor_make(context, dtype, shapes[i].ndim, shapes[i].sizes, LAYOUT_CONTIGUOUS);
        fill(w->tensors[i], (uint64_t)(30 + i));
        w->t[i] = &w->tensors[i]->tensor;
    }
}

static void refuse_tied(tied_world *w, tch_context *context, tch_status expected, const char *argument)
{
    tch_status got = tch_grad_tied_norms(context, &w->layer, w->t[TOKENS], w->t[EMBEDDED], w->t[HIDDEN], w->t[LOGITS],
                                         w->t[TIED_NORMS]);
    test_check_refused(got, expected, argument);
    for (int i = 0; i < TIED; i++) {
        test_tensor_check_unchanged(w->tensors[i], tied_names[i]);
    }
}

static void refuse_tied_bent(tied_world *w, tch_context *context, int index, bent *b, tch_status expected)
{
    tch_tensor *kept = w->t[index];
    b->tensor.shape = b->shape;
    w->t[index] = &b->tensor;
    refuse_tied(w, context, expected, tied_names[index]);
    w->t[index] = kept;
}

static void bend_tied(tied_world *w, tch_context *context, int index)
{
    tch_tensor *kept = w->t[index];
    test_case("tied norms with %s missing", tied_names[index]);
    w->t[index] = NULL;
    refuse_tied(w, context, TCH_ERR_INVALID_ARGUMENT, tied_names[index]);
    w->t[index] = kept;
    for (int32_t d = 0; d < kept->ndim; d++) {
        test_case("tied norms with a dimension %d of %s that does not fit", (int)d, tied_names[index]);
        bent fewer = bend(kept);
        fewer.shape[d] -= 1;
        /* Another number of positions or samples is noticed where the next tensor is compared. */
        bool by_next = index == TOKENS || (index == HIDDEN && d == 1) || (index == EMBEDDED && d == 2);
        tch_tensor *before = w->t[index];
        fewer.tensor.shape = fewer.shape;
        w->t[index] = &fewer.tensor;
        refuse_tied(w, context, TCH_ERR_SHAPE,
                    by_next ? tied_names[index == EMBEDDED ? HIDDEN
                                         : index == HIDDEN ? LOGITS
                                                           : EMBEDDED]
                            : tied_names[index]);
        w->t[index] = before;
    }
    test_case("tied norms with %s of half precision", tied_names[index]);
    bent half = bend(kept);
    half.tensor.dtype = TCH_FLOAT16;
    refuse_tied_bent(w, context, index, &half, TCH_ERR_DTYPE);
    test_case("tied norms with %s of rank 0", tied_names[index]);
    bent number = bend(kept);
    number.tensor.ndim = 0;
    refuse_tied_bent(w, context, index, &number, TCH_ERR_SHAPE);
}

static void tied_norms(void **state)
{
    tied_world w;
    tied_make(&w, *state);
    for (int index = 0; index < TIED; index++) {
        bend_tied(&w, *state, index);
    }
    for (int kind = 0; kind < TCH_LAYER_COUNT; kind++) {
        if (kind != TCH_LAYER_EMBEDDING) {
            test_case("tied norms of a %s layer", kinds[kind].name);
            w.layer = good_layer((tch_layer_kind)kind);
            refuse_tied(&w, *state, TCH_ERR_INVALID_ARGUMENT, "layer");
        }
    }
    test_case("tied norms on top of an input");
    w.layer = good_layer(TCH_LAYER_EMBEDDING);
    bent overlapping = bend(w.t[TIED_NORMS]);
    overlapping.tensor.data = w.t[LOGITS]->data;
    overlapping.tensor.byte_offset = w.t[LOGITS]->byte_offset;
    refuse_tied_bent(&w, *state, TIED_NORMS, &overlapping, TCH_ERR_LAYOUT);
    CHECK_OK(
        tch_grad_tied_norms(*state, &w.layer, w.t[TOKENS], w.t[EMBEDDED], w.t[HIDDEN], w.t[LOGITS], w.t[TIED_NORMS]));
    for (int i = 0; i < TIED; i++) {
        test_tensor_free(w.tensors[i]);
    }
}

/* --- clipping and natural gradient -------------------------------------------------------------------------------- */

static void clipping(void **state)
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
    test_tensor_free(norms);
    test_tensor_free(weights);
}

static void natural_weights(void **state)
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
    test_tensor *all[] = {gram, weights, report, reports};
    for (int i = 0; i < 4; i++) {
        test_tensor_free(all[i]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_out_of_range),
        cmocka_unit_test(no_description),
        cmocka_unit_test(tensors_that_do_not_fit),
        cmocka_unit_test(arguments_that_are_refused),
        cmocka_unit_test(layers_that_do_not_fit),
        cmocka_unit_test(tied_norms),
        cmocka_unit_test(clipping),
        cmocka_unit_test(natural_weights),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* Per-sample gradients of every kind of layer, their norms, weighted sums, Gram matrices and inner products vs loops
 * over single samples in float64.
 *
 * The error of a sum of n products in arithmetic with unit roundoff u is at most n u times the sum of absolute values,
 * which the reference computes. With M the magnitude of a gradient, element by element, of linear layers and
 * convolutions:
 *
 *   gradients      T terms:              T u M
 *   norms          |M|^2 bounds either form (inner products of positions of magnitudes add up to it), with T terms in
 *                  an element of the gradient or d and p in inner products, each factor twice: 2 (T + d + p) u |M|^2
 *   weighted sums  B T terms:            B T u (sum of |w| M), and one more rounding of bfloat16 operands
 *   Gram matrices  as norms, and p d terms if slices are multiplied: (2 (T + d + p) + p d) u <M, M>
 *   inner products (T + d + p) u <M, |V|>
 *
 * Some roundings of scale, storage and conversion are covered by adding 8 to each length. With `rounded` on a GPU the
 * four operands of a norm or Gram matrix may be rounded to 11 bits: 4 * 2^-11 of |M|^2 more; see rounded_operands for
 * half types, whose elements need no rounding.
 *
 * For embeddings and normalization layers the error of an element is at most u (16 + T + features) M: every term and
 * every addition is rounded once, and the error of a statistic over n features is at most n u. Results computed from
 * the gradients propagate these errors and add their own rounding. On the CPU, where float32 and half types have
 * float64 statistics, M has |x - m| / s instead of (|x| + |m|) / s: a mean far larger than the standard deviation costs
 * no accuracy. */

#include "sample_cases.h"
#include "support/elements.h"
#include "support/grad/grad_reference.h"
#include "support/grad/layer_positions.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

/* --- cases ------------------------------------------------------------------------------------------------------- */

#define CHANNELS_LAST ((test_layout)(LAYOUT_EXPANDED + 1)) /* dimension 1 innermost in memory */

typedef struct grad_case {
    tch_context *context;
    tch_layer layer;
    tch_dtype dtype;
    int32_t ndim;
    int64_t shape[TCH_MAX_RANK]; /* of the input */
    int64_t outputs;             /* columns of an embedding */
    test_layout input, gradient, output;
    uint64_t stream;
    int poison;    /* a sample that contains NaN and has weight 0, or -1 */
    int spread;    /* elements are multiplied by powers of two, from -spread to spread */
    token_mix mix; /* of an embedding */
    double mean;   /* of a normalized input, with standard deviation 1 */
    bool little;   /* calls get the least workspace that succeeds */
} grad_case;

typedef struct trial {
    const grad_case *c;
    test_tensor *x, *g;
    grad_reference *reference;
    double u;
    test_limits limits; /* of the latest call */
} trial;

static bool is_matrix(const grad_case *c)
{
    return c->layer.kind == TCH_LAYER_LINEAR || c->layer.kind == TCH_LAYER_CONV;
}

static test_tensor *make_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                test_layout layout)
{
    if (layout != CHANNELS_LAST) {
        return test_tensor_make(context, dtype, ndim, shape, layout);
    }
    int64_t transposed[TCH_MAX_RANK] = {shape[0]};
    memcpy(transposed + 1, shape + 2, (size_t)(ndim - 2) * sizeof *shape);
    transposed[ndim - 1] = shape[1];
    test_tensor *t = test_tensor_make(context, dtype, ndim, transposed, LAYOUT_ROW_GAPS);
    int64_t channel_stride = t->strides[ndim - 1];
    memmove(t->strides + 2, t->strides + 1, (size_t)(ndim - 2) * sizeof *shape);
    t->strides[1] = channel_stride;
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    return t;
}

static double draw_token(test_random *random, const grad_case *c)
{
    int64_t around = c->mix == TOKENS_OUTSIDE ? 3 : 0;
    int64_t token = (int64_t)(test_random_bits(random) % (uint64_t)(c->layer.rows + 2 * around)) - around;
    return c->mix == TOKENS_EQUAL ? 4.0 : (double)token;
}

static test_tensor *random_tensor(const grad_case *c, int32_t ndim, const int64_t *shape, test_layout layout,
                                  bool is_input)
{
    bool tokens = is_input && c->layer.kind == TCH_LAYER_EMBEDDING;
    tch_dtype dtype = !tokens ? c->dtype : c->stream % 2 == 0 ? TCH_INT32 : TCH_INT64;
    test_tensor *t = make_tensor(c->context, dtype, ndim, shape, layout);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    test_random random = test_random_stream(c->stream * 16 + (is_input ? 1 : 2));
    test_random_fill_normal(&random, values, t->count);
    for (int64_t i = 0; i < t->count; i++) {
        values[i] = tokens ? draw_token(&random, c) : values[i] + (is_input ? c->mean : 0.0);
    }
    for (int64_t i = 0; c->spread > 0 && i < t->count; i++) {
        values[i] = ldexp(values[i], (int)(test_random_bits(&random) % (uint64_t)(2 * c->spread + 1)) - c->spread);
    }
    int64_t of_sample = t->count / (shape[0] > 0 ? shape[0] : 1);
    for (int64_t i = 0; layout == LAYOUT_EXPANDED && i < t->count; i++) {
        values[i] = values[i % of_sample];
    }
    bool poisoned = c->poison >= 0 && (!is_input || is_matrix(c));
    for (int64_t i = 0; poisoned && i < of_sample; i++) {
        values[c->poison * of_sample + i] = i % 3 == 0 ? (double)INFINITY : (double)NAN;
    }
    test_tensor_write(t, values);
    return t;
}

static trial set_up(const grad_case *c)
{
    int64_t shape[TCH_MAX_RANK];
    int32_t ndim = test_gradient_shape(&c->layer, c->ndim, c->shape, c->outputs, shape);
    trial t = {.c = c, .u = test_arithmetic_roundoff(c->dtype) + (is_matrix(c) ? 0x1p-53 : 0.0)};
    bool wide_statistics = test_on_cpu() && c->dtype.bits != 64;
    t.x = random_tensor(c, c->ndim, c->shape, c->input, true);
    t.g = random_tensor(c, ndim, shape, c->gradient, false);
    t.reference = grad_reference_make(&c->layer, c->ndim, c->shape, c->outputs, test_tensor_read(t.x),
                                      test_tensor_read(t.g), wide_statistics);
    return t;
}

static void tear_down(trial *t)
{
    test_tensor_check_unchanged(t->x, "input");
    test_tensor_check_unchanged(t->g, "output_gradient");
    test_tensor_free(t->x);
    test_tensor_free(t->g);
}

static bool is_half(tch_dtype dtype)
{
    return dtype.bits == 16;
}

/* The error of rounded operands of a norm or, with `gram`, of a Gram matrix. For half types only the last operands of a
 * Gram matrix, gradients or sums in float32, may be rounded: two operands. */
static double rounded_operands(const grad_case *c, bool gram)
{
    if (test_on_cpu() || !c->layer.rounded) {
        return 0.0;
    }
    return tch_dtype_equal(c->dtype, TCH_FLOAT32) ? 4.0 * 0x1p-11 : gram && is_half(c->dtype) ? 2.0 * 0x1p-11 : 0.0;
}

TEST_REFERENCE static void check_near(const char *what, int64_t index, double got, double expected, double bound)
{
    CHECK(fabs(got - expected) <= bound, "%s: element %lld is %.17g, expected %.17g, off by %.3g > %.3g", what,
          (long long)index, got, expected, fabs(got - expected), bound);
}

/* An element of a gradient. */
TEST_REFERENCE static double element_bound(const trial *t, double magnitude)
{
    const grad_reference *r = t->reference;
    return (double)(r->positions + (is_matrix(t->c) ? 8 : 16 + r->features)) * t->u * magnitude;
}

static double stored(tch_dtype dtype, double value)
{
    return test_unit_roundoff(dtype) * fabs(value) + test_underflow(dtype);
}

/* A tensor for the weight or the bias, or with `samples` one per sample; NULL for a missing bias. */
static test_tensor *parameter_tensor(const trial *t, tch_dtype dtype, bool samples, bool bias, test_layout layout)
{
    const grad_reference *r = t->reference;
    int32_t rank = bias && is_matrix(t->c) ? 2 : r->weight_ndim;
    if (bias && r->biases == 0) {
        return NULL;
    }
    return test_tensor_make(t->c->context, dtype, samples ? rank : rank - 1, r->weight_shape + (samples ? 0 : 1),
                            layout);
}

static tch_tensor *tensor_or_null(test_tensor *t)
{
    return t != NULL ? &t->tensor : NULL;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* A call that fails for lack of workspace leaves `out` unchanged. */
static void check_kept(const test_tensor *out, const double *before)
{
    size_t mark = test_mark();
    CHECK(before == NULL || memcmp(before, test_tensor_read(out), (size_t)out->count * sizeof *before) == 0,
          "out was written");
    test_release_since(mark);
}

#define RUN(t, out, call)                                                                                              \
    do {                                                                                                               \
        tch_status ran_ = TCH_ERR_OUT_OF_MEMORY;                                                                       \
        const double *before_ = (t)->c->little ? test_tensor_read(out) : NULL;                                         \
        (t)->limits = (test_limits){(t)->c->context, (t)->c->little, 0};                                               \
        while (test_limits_next(&(t)->limits, ran_)) {                                                                 \
            check_kept(out, before_);                                                                                  \
            ran_ = (call);                                                                                             \
        }                                                                                                              \
        CHECK(ran_ == TCH_OK, "gave %s: %s", tch_status_name(ran_), tch_last_error());                                 \
    } while (0)

/* --- samples ----------------------------------------------------------------------------------------------------- */

/* The weights' part of all gradients, or the bias's. */
TEST_REFERENCE static void check_elements(const trial *t, const test_tensor *out, bool bias)
{
    const grad_reference *r = t->reference;
    int64_t size = bias ? r->biases : r->weights;
    double *got = test_tensor_read_written(out, bias ? "bias" : "weight");
    for (int64_t i = 0; i < out->count; i++) {
        int64_t at = i / size * (r->weights + r->biases) + (bias ? r->weights : 0) + i % size;
        double bound = element_bound(t, r->magnitude[at]) + stored(out->tensor.dtype, r->gradient[at]);
        check_near(bias ? "bias" : "weight", i, got[i], r->gradient[at], bound);
    }
}

static void check_samples(trial *t, tch_dtype dtype)
{
    const grad_case *c = t->c;
    test_tensor *weight = parameter_tensor(t, dtype, true, false, c->output);
    test_tensor *bias = parameter_tensor(t, dtype, true, true, c->output);
    for (int with_bias = bias != NULL; with_bias >= 0; with_bias--) {
        test_tensor_poison(weight);
        RUN(t, weight,
            tch_grad_samples(c->context, &c->layer, &t->x->tensor, &t->g->tensor, &weight->tensor,
                             with_bias ? &bias->tensor : NULL));
        check_elements(t, weight, false);
    }
    if (bias != NULL) {
        check_elements(t, bias, true);
    }
}

/* --- norms, Gram matrices, inner products ------------------------------------------------------------------------ */

static double positions_length(const trial *t)
{
    const grad_reference *r = t->reference;
    return 2.0 * (double)(r->positions + r->inputs + r->outputs + 8);
}

/* Elements [from, to) of gradient i times those of y, whose magnitudes are `sizes`; adds to *each the propagated
 * rounding errors of the gradient and, with `off_y`, of y. */
TEST_REFERENCE static double products(const trial *t, int64_t i, int64_t from, int64_t to, const double *y,
                                      const double *sizes, bool off_y, double *magnitude, double *each)
{
    const grad_reference *r = t->reference;
    int64_t at = i * (r->weights + r->biases);
    double unit = t->u * (double)(16 + r->features);
    double sum = 0;
    for (int64_t k = from; k < to; k++) {
        double x = r->gradient[at + k];
        double error_x = element_bound(t, r->magnitude[at + k]);
        double error_y = off_y ? element_bound(t, sizes[k]) : 0.0;
        sum += x * y[k];
        *magnitude += r->magnitude[at + k] * fabs(sizes[k]);
        *each += fabs(x) * error_y + fabs(y[k]) * error_x + error_x * error_y + unit * fabs(x * y[k]);
    }
    return sum;
}

/* <gradient i, gradient j> over the parts, and its error bound, as an element of `gram` or as a norm. */
TEST_REFERENCE static double inner(const trial *t, int32_t parts, int64_t i, int64_t j, const test_tensor *gram,
                                   double *bound)
{
    const grad_reference *r = t->reference;
    int64_t all = r->weights + r->biases;
    double magnitude = 0;
    double each = 0;
    double sum = products(t, i, parts & TCH_GRAD_WEIGHT ? 0 : r->weights, parts & TCH_GRAD_BIAS ? all : r->weights,
                          r->gradient + j * all, r->magnitude + j * all, true, &magnitude, &each);
    double length = positions_length(t) + (gram != NULL ? (double)(r->weights + r->outputs) : 0.0);
    double rounded = rounded_operands(t->c, gram != NULL);
    double storing = gram != NULL ? 4 * test_unit_roundoff(gram->tensor.dtype) : 0.0;
    *bound = is_matrix(t->c) ? (length * t->u + rounded + storing) * magnitude : each + storing * fabs(sum);
    return sum;
}

/* With `products`, each followed at the same distance by its error bound; a matrix is symmetric. */
TEST_REFERENCE static void compare_products(const char *what, const double *products, int32_t times,
                                            const test_tensor *out)
{
    int64_t n = out->tensor.ndim == 2 ? out->shape[0] : 0;
    double *got = test_tensor_read_written(out, what);
    for (int64_t i = 0; i < out->count; i++) {
        check_near(what, i, got[i], times * products[i], times * products[out->count + i]);
        CHECK(n == 0 || got[i] == got[i % n * n + i / n], "%s is not symmetric", what);
    }
}

static void check_norms(trial *t, int32_t parts)
{
    const grad_case *c = t->c;
    int64_t n = t->reference->samples;
    test_tensor *norms = test_tensor_make(c->context, TCH_FLOAT64, 1, &n, LAYOUT_CONTIGUOUS);
    double *expected = test_zeros(2 * n);
    for (int64_t i = 0; i < n; i++) {
        expected[i] = inner(t, parts, i, i, NULL, &expected[n + i]);
    }
    for (int32_t times = 1; times <= 2; times++) {
        RUN(t, norms,
            tch_grad_norms(c->context, &c->layer, &t->x->tensor, &t->g->tensor, (tch_grad_part)parts, times - 1,
                           &norms->tensor));
        compare_products("norms", expected, times, norms);
    }
}

/* Of all pairs of samples, followed by their error bounds. */
static double *inner_of_pairs(const trial *t, int32_t parts, const test_tensor *gram)
{
    int64_t n = t->reference->samples;
    double *products = test_zeros(2 * n * n);
    for (int64_t i = 0; i < n * n; i++) {
        int64_t mirrored = i % n * n + i / n;
        if (mirrored < i) {
            products[i] = products[mirrored];
            products[n * n + i] = products[n * n + mirrored];
        } else {
            products[i] = inner(t, parts, i / n, i % n, gram, &products[n * n + i]);
        }
    }
    return products;
}

/* With slightly more than the least workspace a few samples are processed at a time, and some rows of the gradient. */
static void check_gram(trial *t, int32_t parts, tch_dtype dtype, test_layout layout)
{
    const grad_case *c = t->c;
    const int64_t shape[2] = {t->reference->samples, t->reference->samples};
    test_tensor *gram = test_tensor_make(c->context, dtype, 2, shape, layout);
    double *products = inner_of_pairs(t, parts, gram);
    for (int32_t times = 1; times <= 2; times++) {
        RUN(t, gram,
            tch_grad_gram(c->context, &c->layer, &t->x->tensor, &t->g->tensor, (tch_grad_part)parts, times - 1,
                          &gram->tensor));
        compare_products("gram", products, times, gram);
    }
    for (int more = 2; c->little && is_matrix(c) && more <= 8; more *= 2) {
        CHECK_OK(tch_context_set_workspace_limit(c->context, more * t->limits.limit));
        CHECK_OK(
            tch_grad_gram(c->context, &c->layer, &t->x->tensor, &t->g->tensor, (tch_grad_part)parts, 0, &gram->tensor));
        compare_products("gram", products, 1, gram);
    }
    CHECK_OK(tch_context_set_workspace_limit(c->context, 0));
}

/* Random numbers for a parameter, rounded to its type; NULL for no parameter. */
static double *draw_parameter(const trial *t, test_tensor *parameter, uint64_t salt)
{
    if (parameter == NULL) {
        return NULL;
    }
    test_random random = test_random_stream(t->c->stream * 16 + salt);
    double *values = test_alloc((size_t)parameter->count * sizeof *values);
    test_random_fill_normal(&random, values, parameter->count);
    test_tensor_write(parameter, values);
    return test_tensor_read(parameter);
}

/* Of gradients and a direction, whose parts may be missing. */
static void check_dots(trial *t, tch_dtype dtype, bool with_weight, bool with_bias)
{
    const grad_case *c = t->c;
    test_tensor *weight = with_weight ? parameter_tensor(t, dtype, false, false, c->output) : NULL;
    test_tensor *bias = with_bias ? parameter_tensor(t, dtype, false, true, c->output) : NULL;
    const grad_reference *r = t->reference;
    int64_t n = r->samples;
    test_tensor *dots = test_tensor_make(c->context, TCH_FLOAT64, 1, &n, LAYOUT_CONTIGUOUS);
    double *expected = test_zeros(2 * n);
    double *w = draw_parameter(t, weight, 3);
    double *b = draw_parameter(t, bias, 6);
    if (weight == NULL && bias == NULL) {
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        double magnitude = 0;
        double each = 0;
        expected[i] = w == NULL ? 0.0 : products(t, i, 0, r->weights, w, w, false, &magnitude, &each);
        if (b != NULL) {
            const double *shifted = b - r->weights;
            expected[i] +=
                products(t, i, r->weights, r->weights + r->biases, shifted, shifted, false, &magnitude, &each);
        }
        expected[n + i] = is_matrix(c) ? positions_length(t) * t->u * magnitude : each;
    }
    for (int32_t times = 1; times <= 2; times++) {
        RUN(t, dots,
            tch_grad_dots(c->context, &c->layer, &t->x->tensor, &t->g->tensor, tensor_or_null(weight),
                          tensor_or_null(bias), times - 1, &dots->tensor));
        compare_products("dots", expected, times, dots);
    }
    if (weight != NULL) {
        test_tensor_check_unchanged(weight, "weight");
    }
    if (bias != NULL) {
        test_tensor_check_unchanged(bias, "bias");
    }
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

/* w NULL: all ones. `before` is the initial `out`, unused if beta is 0. */
TEST_REFERENCE static void check_sum_of(const trial *t, const test_tensor *out, bool bias, const double *before,
                                        double beta, const double *w)
{
    const grad_reference *r = t->reference;
    double length = (double)(r->samples * (r->positions + 1)) + 8;
    double unit = t->u * (double)(4 + r->samples);
    double weighing = w != NULL && tch_dtype_equal(t->c->dtype, TCH_BFLOAT16) ? test_unit_roundoff(TCH_BFLOAT16) : 0.0;
    double *got = test_tensor_read_written(out, bias ? "sum of biases" : "sum");
    for (int64_t k = 0; k < out->count; k++) {
        double expected = beta == 0.0 ? 0.0 : beta * before[k];
        double magnitude = fabs(expected);
        double each = unit * fabs(expected);
        for (int64_t i = 0; i < r->samples; i++) {
            double weight = w == NULL ? 1.0 : w[i];
            int64_t at = i * (r->weights + r->biases) + (bias ? r->weights : 0) + k;
            if (weight != 0.0) {
                expected += weight * r->gradient[at];
                magnitude += fabs(weight) * r->magnitude[at];
                each += fabs(weight) * (element_bound(t, r->magnitude[at]) + unit * fabs(r->gradient[at]));
            }
        }
        double bound = is_matrix(t->c) ? (length * t->u + weighing) * magnitude : each;
        check_near(bias ? "sum of biases" : "sum", k, got[k], expected, bound + stored(out->tensor.dtype, expected));
    }
}

/* Every fourth weight is 0, and so is that of a poisoned sample. */
static void check_weighted_sum(trial *t, tch_dtype dtype, bool weighed, double beta)
{
    const grad_case *c = t->c;
    test_tensor *weight = parameter_tensor(t, dtype, false, false, c->output);
    test_tensor *bias = parameter_tensor(t, dtype, false, true, c->output);
    test_tensor *weights = test_tensor_make(c->context, TCH_FLOAT64, 1, &t->reference->samples, LAYOUT_CONTIGUOUS);
    double *w = weighed ? draw_parameter(t, weights, 4) : NULL;
    for (int64_t i = 0; weighed && i < weights->count; i++) {
        w[i] = i % 4 == 3 || i == c->poison ? 0.0 : w[i];
    }
    if (weighed) {
        test_tensor_write(weights, w);
    }
    /* With beta = 0 poison must not be read. */
    double *before_weight = beta != 0.0 ? draw_parameter(t, weight, 7) : NULL;
    double *before_bias = beta != 0.0 ? draw_parameter(t, bias, 8) : NULL;
    for (int alone = 0; alone <= (bias != NULL && beta == 0.0); alone++) {
        RUN(t, alone ? bias : weight,
            tch_grad_weighted_sum(c->context, &c->layer, &t->x->tensor, &t->g->tensor,
                                  weighed ? &weights->tensor : NULL, beta, alone ? NULL : &weight->tensor,
                                  tensor_or_null(bias)));
        if (bias != NULL) {
            check_sum_of(t, bias, true, before_bias, beta, w);
            test_tensor_poison(bias);
        }
    }
    check_sum_of(t, weight, false, before_weight, beta, w);
}

/* --- everything, for one case ------------------------------------------------------------------------------------ */

static void check_case(const grad_case *c)
{
    size_t mark = test_mark();
    test_case("kind %d, stream %d, %lld samples, %s, layouts %d, %d and %d", (int)c->layer.kind, (int)c->stream,
              (long long)c->shape[0], tch_dtype_name(c->dtype), (int)c->input, (int)c->gradient, (int)c->output);
    trial t = set_up(c);
    tch_dtype wide = is_half(c->dtype) ? TCH_FLOAT32 : c->dtype;
    check_samples(&t, c->dtype);
    check_samples(&t, wide);
    for (int32_t parts = TCH_GRAD_WEIGHT; parts <= TCH_GRAD_BOTH; parts++) {
        check_norms(&t, parts);
        check_gram(&t, parts, TCH_FLOAT64, LAYOUT_CONTIGUOUS);
        check_gram(&t, parts, TCH_FLOAT32, LAYOUT_ROW_GAPS);
    }
    check_weighted_sum(&t, c->dtype, true, 0.0);
    check_weighted_sum(&t, wide, true, -0.5);
    check_weighted_sum(&t, wide, false, 0.0);
    check_weighted_sum(&t, c->dtype, false, 0.25);
    check_dots(&t, c->dtype, true, true);
    check_dots(&t, wide, true, false);
    check_dots(&t, wide, false, true);
    tear_down(&t);
    test_release_since(mark);
}

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};
/* One case of every type. */
static void check_dtypes(grad_case *c)
{
    for (int k = 0; k < 4; k++) {
        c->dtype = dtypes[k];
        check_case(c);
    }
}

static grad_case case_of(tch_context *context, tch_layer_kind kind, int32_t ndim, const int64_t *shape, int64_t outputs,
                         uint64_t stream)
{
    grad_case c = {.context = context, .layer = TCH_LAYER_INIT(kind), .ndim = ndim, .outputs = outputs};
    memcpy(c.shape, shape, (size_t)ndim * sizeof *shape);
    c.stream = stream;
    c.poison = -1;
    return c;
}

/* --- linear layers ----------------------------------------------------------------------------------------------- */

typedef struct linear_size {
    int32_t ndim;
    int64_t shape[5];
    int64_t outputs;
} linear_size;

static grad_case linear_case(tch_context *context, const linear_size *size, uint64_t stream)
{
    return case_of(context, TCH_LAYER_LINEAR, size->ndim, size->shape, size->outputs, stream);
}

/* The last row of sizes has empty sums: zeros, or beta times the initial values. */
TEST(linear_sizes)
{
    const linear_size sizes[] = {
        {2, {3, 1}, 1},          {2, {5, 17}, 3},      {2, {4, 129}, 65},     {2, {1, 63}, 130},
        {3, {3, 1, 5}, 4},       {3, {3, 2, 3}, 2},    {3, {2, 3, 64}, 63},   {3, {3, 17, 65}, 127},
        {3, {2, 63, 2}, 129},    {3, {2, 64, 17}, 1},  {3, {3, 65, 130}, 64}, {3, {2, 127, 3}, 3},
        {3, {2, 129, 63}, 17},   {3, {1, 130, 1}, 65}, {4, {2, 3, 5, 7}, 6},  {4, {3, 1, 4, 2}, 5},
        {5, {2, 2, 3, 2, 3}, 4}, {2, {0, 3}, 4},       {3, {0, 5, 3}, 4},     {3, {2, 0, 3}, 4},
        {3, {2, 3, 0}, 4},       {3, {2, 3, 4}, 0},    {4, {2, 0, 3, 5}, 2}};
    for (size_t k = 0; k < TEST_COUNT(sizes); k++) {
        grad_case c = linear_case(*state, &sizes[k], 100 + k);
        c.layer.scale = k % 3 == 0 ? 1.0 : k % 3 == 1 ? 3.0 : -0.5;
        c.layer.rounded = k % 2 == 0;
        check_dtypes(&c);
    }
}

/* Larger than the blocks of products, in either form of the norm. */
TEST(linear_large)
{
    const linear_size sizes[] = {{3, {2, 400, 450}, 460}, {3, {3, 300, 385}, 130}, {3, {2, 193, 300}, 257}};
    for (size_t k = 0; k < 2 * TEST_COUNT(sizes); k++) {
        grad_case c = linear_case(*state, &sizes[k / 2], 200 + k / 2);
        c.dtype = k % 2 ? TCH_BFLOAT16 : TCH_FLOAT32;
        check_case(&c);
    }
}

/* Norms only, around the edges of tiles, with aligned and unaligned rows, and with elements of one row that differ by
 * up to 2^32: rounded to 11 bits, and not. Then gradients only, with more terms than the CPU sums in one pass, into
 * partial blocks and tiles, a block being 256 by 1024; and results of more than 16 MB, whose pages the CPU populates
 * first. */
TEST(linear_edges)
{
    const linear_size of_norms[] = {{3, {1, 129, 64}, 96},  {3, {3, 33, 132}, 40},  {3, {2, 257, 36}, 33},
                                    {3, {1, 128, 160}, 32}, {3, {2, 64, 100}, 256}, {3, {5, 2, 32}, 32},
                                    {3, {2, 300, 32}, 36},  {3, {1, 70, 33}, 300}};
    const linear_size of_sums[] = {{3, {3, 257, 33}, 9},     {3, {2, 511, 100}, 257}, {3, {5, 513, 48}, 31},
                                   {3, {1, 1000, 1041}, 12}, {3, {2, 1000, 64}, 300}, {3, {1, 770, 47}, 8},
                                   {2, {20, 528}, 516},      {3, {20, 3, 528}, 516}};
    size_t norms = 4 * TEST_COUNT(of_norms);
    for (size_t i = 0; i < norms + TEST_COUNT(of_sums); i++) {
        size_t k = i < norms ? i : i - norms;
        grad_case c =
            i < norms ? linear_case(*state, &of_norms[k / 4], 270 + k) : linear_case(*state, &of_sums[k], 220 + k);
        c.dtype = TCH_FLOAT32;
        c.layer.rounded = i < norms && k % 2 == 0;
        c.layer.scale = i >= norms ? (k % 2 == 0 ? 1.0 : -2.5) : k % 3 == 0 ? -3.0 : 1.0;
        c.spread = i < norms && k / 2 % 2 ? 16 : 0;
        c.output = k % 3 == 0 || (i >= norms && k > 5) ? LAYOUT_CONTIGUOUS : LAYOUT_ROW_GAPS;
        test_case("%s of case %zu, rounded %d, spread %d", i < norms ? "norms" : "long sums", k, c.layer.rounded,
                  c.spread);
        trial t = set_up(&c);
        if (i < norms) {
            check_norms(&t, TCH_GRAD_WEIGHT);
            check_norms(&t, TCH_GRAD_BOTH);
        } else {
            check_samples(&t, c.dtype);
        }
        tear_down(&t);
    }
}

TEST(linear_layouts)
{
    const linear_size sizes[] = {{2, {3, 5}, 4}, {3, {3, 4, 5}, 6}, {4, {2, 3, 4, 5}, 7}};
    for (size_t k = 0; k < 3; k++) {
        for (int layout = 0; layout <= LAYOUT_EXPANDED; layout++) {
            grad_case c = linear_case(*state, &sizes[k], 300 + k);
            c.input = (test_layout)layout;
            c.gradient = (test_layout)((layout + (int)k) % (LAYOUT_EXPANDED + 1));
            c.output = (test_layout)((layout * 3 + (int)k) % LAYOUT_COUNT);
            check_dtypes(&c);
        }
    }
}

/* --- convolutions ------------------------------------------------------------------------------------------------ */

static grad_case conv_case(tch_context *context, const conv_size *s, uint64_t stream)
{
    grad_case c = case_of(context, TCH_LAYER_CONV, s->dims + 2, s->shape, s->outputs, stream);
    c.layer.dims = s->dims;
    c.layer.groups = s->groups;
    c.layer.padding = s->padding;
    for (int32_t i = 0; i < s->dims; i++) {
        c.layer.kernel[i] = s->kernel[i];
        c.layer.stride[i] = s->stride[i] > 0 ? s->stride[i] : 1;
        c.layer.dilation[i] = s->dilation[i] > 0 ? s->dilation[i] : 1;
        c.layer.before[i] = s->before[i];
        c.layer.after[i] = s->after[i];
    }
    return c;
}

#define CONVOLUTIONS TEST_COUNT(convolutions)

TEST(conv_sizes)
{
    for (size_t k = 0; k < CONVOLUTIONS; k++) {
        grad_case c = conv_case(*state, &convolutions[k], 500 + k);
        c.layer.scale = k % 2 == 0 ? 1.0 : 2.5;
        c.layer.rounded = k % 3 != 0;
        check_dtypes(&c);
    }
}

/* The last of them channels last. */
TEST(conv_layouts)
{
    for (size_t k = 0; k < CONVOLUTIONS; k++) {
        int layout = 0;
        while (layout < (int)CHANNELS_LAST) {
            grad_case c = conv_case(*state, &convolutions[k], 600 + k);
            layout += 1 + (int)(k % 3);
            layout = layout < (int)CHANNELS_LAST ? layout : (int)CHANNELS_LAST;
            c.input = (test_layout)layout;
            c.gradient = (test_layout)(layout == (int)CHANNELS_LAST ? layout : (layout + (int)k) % LAYOUT_COUNT);
            c.output = (test_layout)((layout * 3 + (int)k) % LAYOUT_COUNT);
            check_dtypes(&c);
        }
    }
}

/* --- embeddings and normalization layers ------------------------------------------------------------------------- */

#define KINDS ((int)TEST_COUNT(kinds))

static grad_case kind_case(tch_context *context, int which, test_layout layout, uint64_t stream)
{
    const kind_size *s = &kinds[which];
    grad_case c = case_of(context, s->kind, s->ndim, s->shape, s->cols, stream);
    c.layer.scale = 1.5;
    c.layer.rows = s->rows;
    c.layer.padding_index = s->padding;
    c.layer.normalized = s->normalized;
    c.layer.groups = s->groups;
    c.mix = s->mix;
    c.mean = s->mean;
    c.input = c.gradient = c.output = layout;
    c.dtype = dtypes[stream % 4];
    return c;
}

/* Of every type, and in some layouts, others for the next kind. */
TEST(kind_sizes)
{
    for (int i = 0; i < KINDS; i++) {
        for (int layout = LAYOUT_CONTIGUOUS; layout<LAYOUT_COUNT; layout += layout> 0 ? 3 : 1 + i % 3) {
            bool first = layout == LAYOUT_CONTIGUOUS;
            grad_case c = kind_case(*state, i, (test_layout)layout, (uint64_t)(first ? 1000 + i : 1100 + i + layout));
            if (first) {
                check_dtypes(&c);
            } else {
                check_case(&c);
            }
        }
    }
}

/* --- threads ----------------------------------------------------------------------------------------------------- */

/* Gradients of the weights of all samples, and their sum. */
static double *results_on_threads(const grad_case *c, int32_t threads, size_t *bytes)
{
    grad_case own = *c;
    CHECK_OK(tch_set_num_threads(threads));
    CHECK_OK(tch_context_create(test_device(), &own.context));
    trial t = set_up(&own);
    test_tensor *samples = parameter_tensor(&t, c->dtype, true, false, LAYOUT_CONTIGUOUS);
    test_tensor *sum = parameter_tensor(&t, c->dtype, false, false, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_grad_samples(own.context, &own.layer, &t.x->tensor, &t.g->tensor, &samples->tensor, NULL));
    CHECK_OK(tch_grad_weighted_sum(own.context, &own.layer, &t.x->tensor, &t.g->tensor, NULL, 0.0, &sum->tensor, NULL));
    double *got = test_alloc((size_t)(samples->count + sum->count) * sizeof *got + 1);
    memcpy(got, test_tensor_read(samples), (size_t)samples->count * sizeof *got);
    memcpy(got + samples->count, test_tensor_read(sum), (size_t)sum->count * sizeof *got);
    *bytes = (size_t)(samples->count + sum->count) * sizeof *got;
    test_tensor_free(samples);
    test_tensor_free(sum);
    tear_down(&t);
    tch_context_destroy(own.context);
    return got;
}

/* Products are divided into other blocks with more threads: results are bitwise identical. */
TEST(results_on_any_threads)
{
    const linear_size sizes[] = {{3, {1, 300, 70}, 301}, {3, {3, 40, 97}, 77}};
    int32_t usual = tch_get_num_threads();
    for (int k = 0; k < 2 + KINDS; k++) {
        grad_case c = k < 2 ? linear_case(*state, &sizes[k], 240 + (uint64_t)k)
                            : kind_case(*state, k - 2, LAYOUT_CONTIGUOUS, (uint64_t)(1200 + k));
        c.dtype = TCH_FLOAT32;
        c.shape[0] *= k < 2 ? 1 : 5;
        size_t mark = test_mark();
        size_t bytes;
        double *expected = results_on_threads(&c, 1, &bytes);
        for (int32_t threads = 2; threads <= (k < 2 ? 5 : 2); threads++) {
            test_case("threads, case %d on %d", k, threads);
            CHECK(memcmp(results_on_threads(&c, threads, &bytes), expected, bytes) == 0, "gradients differ");
        }
        test_release_since(mark);
    }
    CHECK_OK(tch_set_num_threads(usual));
}

/* --- skipped samples --------------------------------------------------------------------------------------------- */

/* Samples of weight 0 add nothing, even if they are not finite. */
TEST(weight_zero_leaves_out)
{
    const linear_size linear[] = {{2, {3, 5}, 4}, {3, {4, 6, 5}, 3}};
    const int layers = 2 + (int)CONVOLUTIONS + KINDS;
    for (int k = 0; k < layers * 4; k++) {
        int which = k / 4;
        grad_case c = which < 2 ? linear_case(*state, &linear[which], 800)
                      : which < 2 + (int)CONVOLUTIONS
                          ? conv_case(*state, &convolutions[which - 2], 800 + (uint64_t)k)
                          : kind_case(*state, which - 2 - (int)CONVOLUTIONS, LAYOUT_CONTIGUOUS, 800 + (uint64_t)k);
        c.dtype = dtypes[k % 4];
        c.poison = c.shape[0] > 1 ? 1 : 0;
        c.input = k % 3 == 0 ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED;
        if (c.shape[0] == 0) {
            continue;
        }
        test_case("weight 0, case %d", k);
        trial t = set_up(&c);
        check_weighted_sum(&t, c.dtype, true, 0.0);
        check_weighted_sum(&t, is_half(c.dtype) ? TCH_FLOAT32 : c.dtype, true, 0.5);
        tear_down(&t);
    }
}

/* --- little memory ----------------------------------------------------------------------------------------------- */

/* In the smallest workspace that succeeds, a call processes its samples in chunks. */
TEST(little_memory)
{
    const conv_size many[] = {{2, {19, 4, 6, 5}, 6, 1, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
                              {2, {19, 4, 6, 5}, 6, 2, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
                              {2, {19, 8, 3, 3}, 32, 2, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS}};
    const linear_size linear[] = {{3, {23, 9, 31}, 45}, {2, {70, 33}, 21}};
    for (int k = 0; k < 20 + KINDS; k++) {
        grad_case c =
            k < 12   ? conv_case(*state, &many[k / 4], 900 + (uint64_t)k / 4)
            : k < 20 ? linear_case(*state, &linear[k / 4 - 3], 900 + (uint64_t)k / 4)
                     : kind_case(*state, k - 20, k % 2 == 0 ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED, (uint64_t)(1300 + k));
        c.dtype = dtypes[k < 20 ? k % 4 : k / 2 % 2];
        if (is_matrix(&c)) {
            c.output = LAYOUT_REVERSED;
            c.input = k < 12 ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED;
        } else if (c.layer.rows < 1000) {
            c.shape[0] = c.shape[0] * 3 + 1;
        }
        c.little = true;
        check_case(&c);
    }
}

TEST_MAIN(test_open_context, test_close_context)

/* Per-sample gradients of linear layers and convolutions, their norms, weighted sums, Gram matrices and inner
 * products, against loops over single samples in float64.
 *
 * A sum of n products in arithmetic of round-off u is off by at most n u times the sum of the absolute values, which
 * the reference keeps. With M the magnitude of a gradient, element by element:
 *   gradients      T terms:              T u M
 *   norms          |M|^2 bounds either form (inner products of positions of magnitudes add up to it), with T terms in
 *                  an element of the gradient or d and p in inner products, each factor twice: 2 (T + d + p) u |M|^2
 *   weighted sums  B T terms:            B T u (sum of |w| M), and one more rounding of bfloat16 operands
 *   Gram matrices  as norms, and p d terms where slices are multiplied: (2 (T + d + p) + p d) u <M, M>
 *   inner products (T + d + p) u <M, |V|>
 * Some roundings of scale, storage and conversion are covered by adding 8 to each length. With `rounded` on a GPU the
 * four operands of a norm or Gram matrix may be rounded to 11 bits: 4 * 2^-11 of |M|^2 more; see rounded_gram_operands
 * for half types, whose elements need no rounding. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <torchium/grad.h>

#include "support/elements.h"
#include "support/grad/grad_reference.h"
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
    int64_t outputs;
    test_layout input, gradient, output;
    uint64_t stream;
    int poison; /* a sample that holds NaN and has weight 0, or -1 */
    int spread; /* elements are multiplied by powers of two, from -spread to spread */
} grad_case;

/* A case that has been set up. */
typedef struct trial {
    const grad_case *c;
    test_tensor *x, *g;
    test_tensor *direction; /* of inner products, in the test with little memory */
    grad_reference *reference;
    double u;
} trial;

static test_tensor *make_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                test_layout layout)
{
    if (layout != CHANNELS_LAST) {
        return test_tensor_make(context, dtype, ndim, shape, layout);
    }
    int64_t turned[TCH_MAX_RANK] = {shape[0]};
    memcpy(turned + 1, shape + 2, (size_t)(ndim - 2) * sizeof *shape);
    turned[ndim - 1] = shape[1];
    test_tensor *t = test_tensor_make(context, dtype, ndim, turned, LAYOUT_ROW_GAPS);
    int64_t channel_stride = t->strides[ndim - 1];
    memmove(t->strides + 2, t->strides + 1, (size_t)(ndim - 2) * sizeof *shape);
    t->strides[1] = channel_stride;
    memcpy(t->shape, shape, (size_t)ndim * sizeof *shape);
    return t;
}

static test_tensor *random_tensor(const grad_case *c, int32_t ndim, const int64_t *shape, test_layout layout,
                                  uint64_t salt)
{
    test_tensor *t = make_tensor(c->context, c->dtype, ndim, shape, layout);
    double *values = test_alloc((size_t)t->count * sizeof *values);
    test_random random = test_random_stream(c->stream * 16 + salt);
    test_random_fill_normal(&random, values, t->count);
    for (int64_t i = 0; c->spread > 0 && i < t->count; i++) {
        values[i] = ldexp(values[i], (int)(test_random_bits(&random) % (uint64_t)(2 * c->spread + 1)) - c->spread);
    }
    int64_t of_sample = t->count / (shape[0] > 0 ? shape[0] : 1);
    for (int64_t i = 0; layout == LAYOUT_EXPANDED && i < t->count; i++) {
        values[i] = values[i % of_sample];
    }
    for (int64_t i = 0; c->poison >= 0 && i < of_sample; i++) {
        values[c->poison * of_sample + i] = i % 3 == 0 ? (double)INFINITY : (double)NAN;
    }
    test_tensor_write(t, values);
    return t;
}

static int32_t gradient_shape(const grad_case *c, int64_t *shape)
{
    memcpy(shape, c->shape, sizeof c->shape);
    if (c->layer.kind == TCH_LAYER_CONV) {
        shape[1] = c->outputs;
        grad_reference_outputs(&c->layer, c->shape, shape + 2);
    } else {
        shape[c->ndim - 1] = c->outputs;
    }
    return c->ndim;
}

static trial set_up(const grad_case *c)
{
    int64_t shape[TCH_MAX_RANK];
    int32_t ndim = gradient_shape(c, shape);
    trial t = {.c = c, .u = test_arithmetic_roundoff(c->dtype) + 0x1p-53};
    t.x = random_tensor(c, c->ndim, c->shape, c->input, 1);
    t.g = random_tensor(c, ndim, shape, c->gradient, 2);
    double *x = test_tensor_read(t.x);
    double *g = test_tensor_read(t.g);
    t.reference = grad_reference_make(&c->layer, c->ndim, c->shape, c->outputs, x, g);
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

static double rounded_operands(const grad_case *c)
{
    return !test_on_cpu() && c->layer.rounded && tch_dtype_equal(c->dtype, TCH_FLOAT32) ? 4.0 * 0x1p-11 : 0.0;
}

/* Of half types only what a Gram matrix multiplies last, gradients or sums of float32, may be rounded: two operands. */
static double rounded_gram_operands(const grad_case *c)
{
    bool rounded = !test_on_cpu() && c->layer.rounded && is_half(c->dtype);
    return rounded ? 2.0 * 0x1p-11 : rounded_operands(c);
}

static void check_near(const char *what, int64_t index, double got, double expected, double bound)
{
    CHECK(fabs(got - expected) <= bound, "%s: element %lld is %.17g, expected %.17g, off by %.3g > %.3g", what,
          (long long)index, got, expected, fabs(got - expected), bound);
}

/* The shape of the weight or the bias, with `samples` of them where that is not negative. */
static int32_t parameter_shape(const trial *t, int64_t samples, bool bias, int64_t *shape)
{
    const grad_case *c = t->c;
    int32_t rank = 0;
    if (samples >= 0) {
        shape[rank++] = samples;
    }
    shape[rank++] = c->outputs;
    if (!bias && c->layer.kind == TCH_LAYER_CONV) {
        shape[rank++] = c->shape[1] / c->layer.groups;
        for (int32_t i = 0; i < c->layer.dims; i++) {
            shape[rank++] = c->layer.kernel[i];
        }
    } else if (!bias) {
        shape[rank++] = c->shape[c->ndim - 1];
    }
    return rank;
}

static test_tensor *parameter_tensor(const trial *t, tch_dtype dtype, int64_t samples, bool bias, test_layout layout)
{
    int64_t shape[TCH_MAX_RANK];
    int32_t rank = parameter_shape(t, samples, bias, shape);
    return test_tensor_make(t->c->context, dtype, rank, shape, layout);
}

/* --- samples ----------------------------------------------------------------------------------------------------- */

static void check_elements(const trial *t, const char *what, const test_tensor *out, const double *expected,
                           const double *magnitude, double length)
{
    double *got = test_tensor_read(out);
    tch_dtype dtype = out->tensor.dtype;
    for (int64_t i = 0; i < out->count; i++) {
        double bound = (length + 8) * t->u * magnitude[i] + test_underflow(dtype) * (length + 8);
        check_near(what, i, got[i], expected[i], bound + 1.01 * test_unit_roundoff(dtype) * fabs(expected[i]));
    }
}

static void check_samples(const trial *t, tch_dtype dtype)
{
    const grad_reference *r = t->reference;
    test_tensor *weight = parameter_tensor(t, dtype, r->samples, false, t->c->output);
    test_tensor *bias = parameter_tensor(t, dtype, r->samples, true, t->c->output);
    CHECK_OK(
        tch_grad_samples(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, &weight->tensor, &bias->tensor));
    test_tensor_check_written(weight, "weight");
    test_tensor_check_written(bias, "bias");
    check_elements(t, "weight", weight, r->weight, r->magnitude, (double)r->positions);
    check_elements(t, "bias", bias, r->bias, r->bias_magnitude, (double)r->positions);
    test_tensor_poison(weight);
    CHECK_OK(tch_grad_samples(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, &weight->tensor, NULL));
    check_elements(t, "weight alone", weight, r->weight, r->magnitude, (double)r->positions);
}

/* --- norms, Gram matrices, inner products ------------------------------------------------------------------------ */

static double dot(int64_t n, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

/* <gradient i, gradient j> over the parts, and the same of magnitudes. */
static double expected_product(const trial *t, int32_t parts, int64_t i, int64_t j, double *magnitude)
{
    const grad_reference *r = t->reference;
    double sum = 0;
    *magnitude = 0;
    if (parts & TCH_GRAD_WEIGHT) {
        sum += dot(r->weights, r->weight + i * r->weights, r->weight + j * r->weights);
        *magnitude += dot(r->weights, r->magnitude + i * r->weights, r->magnitude + j * r->weights);
    }
    if (parts & TCH_GRAD_BIAS) {
        sum += dot(r->outputs, r->bias + i * r->outputs, r->bias + j * r->outputs);
        *magnitude += dot(r->outputs, r->bias_magnitude + i * r->outputs, r->bias_magnitude + j * r->outputs);
    }
    return sum;
}

static double positions_length(const trial *t)
{
    const grad_reference *r = t->reference;
    return 2.0 * (double)(r->positions + r->inputs + r->outputs + 8);
}

static void compare_norms(const trial *t, int32_t parts, int32_t times, const test_tensor *norms)
{
    double *got = test_tensor_read(norms);
    for (int64_t i = 0; i < t->reference->samples; i++) {
        double magnitude;
        double expected = expected_product(t, parts, i, i, &magnitude);
        double bound = times * (positions_length(t) * t->u + rounded_operands(t->c)) * magnitude;
        check_near("norms", i, got[i], times * expected, bound);
    }
}

static void check_norms(const trial *t, int32_t parts)
{
    const grad_reference *r = t->reference;
    test_tensor *norms = test_tensor_make(t->c->context, TCH_FLOAT64, 1, &r->samples, LAYOUT_CONTIGUOUS);
    for (int32_t times = 1; times <= 2; times++) {
        CHECK_OK(tch_grad_norms(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, (tch_grad_part)parts,
                                times - 1, &norms->tensor));
        compare_norms(t, parts, times, norms);
    }
    test_tensor_check_written(norms, "norms");
}

static void compare_gram(const trial *t, int32_t parts, int32_t times, const test_tensor *gram)
{
    const grad_reference *r = t->reference;
    double length = positions_length(t) + (double)r->weights + (double)r->outputs;
    double *got = test_tensor_read(gram);
    for (int64_t i = 0; i < r->samples * r->samples; i++) {
        double magnitude;
        double expected = expected_product(t, parts, i / r->samples, i % r->samples, &magnitude);
        double bound = times * (length * t->u + rounded_gram_operands(t->c)) * magnitude;
        bound += 4 * test_unit_roundoff(gram->tensor.dtype) * magnitude;
        check_near("gram", i, got[i], times * expected, bound);
        CHECK(got[i] == got[i % r->samples * r->samples + i / r->samples], "gram is not symmetric");
    }
}

static void check_gram(const trial *t, int32_t parts, tch_dtype dtype, test_layout layout)
{
    const int64_t shape[2] = {t->reference->samples, t->reference->samples};
    test_tensor *gram = test_tensor_make(t->c->context, dtype, 2, shape, layout);
    for (int32_t times = 1; times <= 2; times++) {
        CHECK_OK(tch_grad_gram(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, (tch_grad_part)parts,
                               times - 1, &gram->tensor));
        compare_gram(t, parts, times, gram);
    }
    test_tensor_check_written(gram, "gram");
}

/* The direction's parts may be NULL. */
static void compare_dots(const trial *t, const test_tensor *dots, int32_t times, const double *w, const double *b)
{
    const grad_reference *r = t->reference;
    double *got = test_tensor_read(dots);
    for (int64_t i = 0; i < r->samples; i++) {
        double expected = 0;
        double magnitude = 0;
        for (int64_t k = 0; w != NULL && k < r->weights; k++) {
            expected += w[k] * r->weight[i * r->weights + k];
            magnitude += fabs(w[k]) * r->magnitude[i * r->weights + k];
        }
        for (int64_t k = 0; b != NULL && k < r->outputs; k++) {
            expected += b[k] * r->bias[i * r->outputs + k];
            magnitude += fabs(b[k]) * r->bias_magnitude[i * r->outputs + k];
        }
        check_near("dots", i, got[i], times * expected, times * positions_length(t) * t->u * magnitude);
    }
}

static void check_dots(const trial *t, tch_dtype dtype, bool with_weight, bool with_bias)
{
    const grad_reference *r = t->reference;
    test_tensor *weight = parameter_tensor(t, dtype, -1, false, t->c->output);
    test_tensor *bias = parameter_tensor(t, dtype, -1, true, t->c->output);
    test_tensor *dots = test_tensor_make(t->c->context, TCH_FLOAT64, 1, &r->samples, LAYOUT_CONTIGUOUS);
    test_random random = test_random_stream(t->c->stream * 16 + 3);
    double *v = test_alloc((size_t)(r->weights + r->outputs) * sizeof *v);
    test_random_fill_normal(&random, v, r->weights + r->outputs);
    test_tensor_write(weight, v);
    test_tensor_write(bias, v + r->weights);
    double *w = test_tensor_read(weight);
    double *b = test_tensor_read(bias);
    for (int32_t times = 1; times <= 2; times++) {
        CHECK_OK(tch_grad_dots(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor,
                               with_weight ? &weight->tensor : NULL, with_bias ? &bias->tensor : NULL, times - 1,
                               &dots->tensor));
        compare_dots(t, dots, times, with_weight ? w : NULL, with_bias ? b : NULL);
    }
    test_tensor_check_unchanged(weight, "weight");
    test_tensor_check_unchanged(bias, "bias");
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

static void check_sum_of(const trial *t, const test_tensor *out, const double *before, double beta, const double *w,
                         int64_t size, const double *gradients, const double *magnitudes)
{
    const grad_reference *r = t->reference;
    tch_dtype dtype = out->tensor.dtype;
    double length = (double)(r->samples * (r->positions + 1)) + 8;
    double weighing = w != NULL && tch_dtype_equal(t->c->dtype, TCH_BFLOAT16) ? test_unit_roundoff(TCH_BFLOAT16) : 0.0;
    double *got = test_tensor_read(out);
    for (int64_t k = 0; k < size; k++) {
        double expected = beta == 0.0 ? 0.0 : beta * before[k];
        double magnitude = fabs(expected);
        for (int64_t i = 0; i < r->samples; i++) {
            double weight = w == NULL ? 1.0 : w[i];
            if (weight != 0.0) {
                expected += weight * gradients[i * size + k];
                magnitude += fabs(weight) * magnitudes[i * size + k];
            }
        }
        double bound = (length * t->u + weighing) * magnitude + test_underflow(dtype);
        check_near("weighted sum", k, got[k], expected, bound + 1.01 * test_unit_roundoff(dtype) * fabs(expected));
    }
}

static void check_weighted_sum(const trial *t, tch_dtype dtype, bool weighed, double beta)
{
    const grad_reference *r = t->reference;
    test_tensor *weight = parameter_tensor(t, dtype, -1, false, t->c->output);
    test_tensor *bias = parameter_tensor(t, dtype, -1, true, t->c->output);
    test_tensor *weights = test_tensor_make(t->c->context, TCH_FLOAT64, 1, &r->samples, LAYOUT_CONTIGUOUS);
    test_random random = test_random_stream(t->c->stream * 16 + 4);
    double *before = test_alloc((size_t)(r->weights + r->outputs) * sizeof *before);
    double *w = test_alloc((size_t)r->samples * sizeof *w);
    test_random_fill_normal(&random, before, r->weights + r->outputs);
    test_random_fill_normal(&random, w, r->samples);
    if (t->c->poison >= 0) {
        w[t->c->poison] = 0.0;
    }
    test_tensor_write(weights, w);
    if (beta != 0.0) { /* otherwise poison must not be read */
        test_tensor_write(weight, before);
        test_tensor_write(bias, before + r->weights);
    }
    double *before_weight = test_tensor_read(weight);
    double *before_bias = test_tensor_read(bias);
    CHECK_OK(tch_grad_weighted_sum(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor,
                                   weighed ? &weights->tensor : NULL, beta, &weight->tensor, &bias->tensor));
    check_sum_of(t, weight, before_weight, beta, weighed ? w : NULL, r->weights, r->weight, r->magnitude);
    check_sum_of(t, bias, before_bias, beta, weighed ? w : NULL, r->outputs, r->bias, r->bias_magnitude);
    if (beta == 0.0) {
        test_tensor_check_written(weight, "weight");
        test_tensor_poison(bias);
        CHECK_OK(tch_grad_weighted_sum(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor,
                                       weighed ? &weights->tensor : NULL, beta, NULL, &bias->tensor));
        check_sum_of(t, bias, NULL, beta, weighed ? w : NULL, r->outputs, r->bias, r->bias_magnitude);
    }
}

/* --- everything, for one case ------------------------------------------------------------------------------------ */

static void check_case(const grad_case *c)
{
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
}

static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};
static const char *const dtype_names[] = {"float64", "float32", "float16", "bfloat16"};

static void check_dtypes(grad_case *c, const char *what)
{
    for (int k = 0; k < 4; k++) {
        c->dtype = dtypes[k];
        test_case("%s, %s, input %d, gradient %d, output %d", what, dtype_names[k], (int)c->input, (int)c->gradient,
                  (int)c->output);
        check_case(c);
    }
}

/* --- linear layers ----------------------------------------------------------------------------------------------- */

typedef struct linear_size {
    int32_t ndim;
    int64_t shape[5];
    int64_t outputs;
} linear_size;

static grad_case linear_case(tch_context *context, const linear_size *size, uint64_t stream)
{
    grad_case c = {.context = context, .layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .ndim = size->ndim};
    memcpy(c.shape, size->shape, (size_t)size->ndim * sizeof *size->shape);
    c.outputs = size->outputs;
    c.stream = stream;
    c.poison = -1;
    return c;
}

static void name_case(char *text, size_t size, const grad_case *c)
{
    size_t used = (size_t)snprintf(text, size, "input [");
    for (int32_t i = 0; i < c->ndim; i++) {
        used += (size_t)snprintf(text + used, size - used, " %lld", (long long)c->shape[i]);
    }
    snprintf(text + used, size - used, " ], %lld outputs", (long long)c->outputs);
}

static void run_case(grad_case *c)
{
    char text[128];
    name_case(text, sizeof text, c);
    check_dtypes(c, text);
}

static void linear_sizes(void **state)
{
    const linear_size sizes[] = {{2, {3, 1}, 1},        {2, {5, 17}, 3},        {2, {4, 129}, 65},
                                 {2, {1, 63}, 130},     {3, {3, 1, 5}, 4},      {3, {3, 2, 3}, 2},
                                 {3, {2, 3, 64}, 63},   {3, {3, 17, 65}, 127},  {3, {2, 63, 2}, 129},
                                 {3, {2, 64, 17}, 1},   {3, {3, 65, 130}, 64},  {3, {2, 127, 3}, 3},
                                 {3, {2, 129, 63}, 17}, {3, {1, 130, 1}, 65},   {4, {2, 3, 5, 7}, 6},
                                 {4, {3, 1, 4, 2}, 5},  {5, {2, 2, 3, 2, 3}, 4}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        grad_case c = linear_case(*state, &sizes[k], 100 + k);
        c.layer.scale = k % 3 == 0 ? 1.0 : k % 3 == 1 ? 3.0 : -0.5;
        c.layer.rounded = k % 2 == 0;
        run_case(&c);
    }
}

/* Larger than the blocks that products are cut into, in either form of the norm. */
static void linear_large(void **state)
{
    const linear_size sizes[] = {{3, {2, 400, 450}, 460}, {3, {3, 300, 385}, 130}, {3, {2, 193, 300}, 257}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        for (int half = 0; half < 2; half++) {
            grad_case c = linear_case(*state, &sizes[k], 200 + k);
            c.dtype = half ? TCH_BFLOAT16 : TCH_FLOAT32;
            test_case("large case %zu, %s", k, half ? "bfloat16" : "float32");
            check_case(&c);
        }
    }
}

/* Norms alone, around the edges of tiles, with rows that are aligned and rows that are not, and with elements of one
 * row that differ by up to 2^32: rounded to 11 bits, and not. */
static void linear_norms(void **state)
{
    const linear_size sizes[] = {{3, {1, 129, 64}, 96},  {3, {3, 33, 132}, 40},  {3, {2, 257, 36}, 33},
                                 {3, {1, 128, 160}, 32}, {3, {2, 64, 100}, 256}, {3, {5, 2, 32}, 32},
                                 {3, {2, 300, 32}, 36},  {3, {1, 70, 33}, 300}};
    for (size_t k = 0; k < 4 * (sizeof sizes / sizeof sizes[0]); k++) {
        grad_case c = linear_case(*state, &sizes[k / 4], 270 + k);
        c.dtype = TCH_FLOAT32;
        c.layer.rounded = k % 2 == 0;
        c.layer.scale = k % 3 == 0 ? -3.0 : 1.0;
        c.spread = k / 2 % 2 == 0 ? 0 : 16;
        test_case("norms of case %zu, rounded %d, spread %d", k / 4, c.layer.rounded, c.spread);
        trial t = set_up(&c);
        check_norms(&t, TCH_GRAD_WEIGHT);
        check_norms(&t, TCH_GRAD_BOTH);
        tear_down(&t);
    }
}

/* Sums of more terms than the CPU adds up in one pass, into blocks and tiles that are not filled, a block being 256 by
 * 1024. */
static void linear_long_sums(void **state)
{
    const linear_size sizes[] = {{3, {3, 257, 33}, 9},     {3, {2, 511, 100}, 257}, {3, {5, 513, 48}, 31},
                                 {3, {1, 1000, 1041}, 12}, {3, {2, 1000, 64}, 300}, {3, {1, 770, 47}, 8}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        grad_case c = linear_case(*state, &sizes[k], 220 + k);
        c.dtype = TCH_FLOAT32;
        c.layer.scale = k % 2 == 0 ? 1.0 : -2.5;
        c.output = k % 3 == 0 ? LAYOUT_CONTIGUOUS : LAYOUT_ROW_GAPS;
        test_case("long sums, case %zu", k);
        trial t = set_up(&c);
        check_samples(&t, c.dtype);
        tear_down(&t);
    }
}

static float *samples_on_threads(const grad_case *c, int32_t threads, int64_t *count)
{
    grad_case own = *c;
    CHECK_OK(tch_set_num_threads(threads));
    CHECK_OK(tch_context_create(test_device(), &own.context));
    trial t = set_up(&own);
    int64_t shape[TCH_MAX_RANK];
    int32_t rank = parameter_shape(&t, t.reference->samples, false, shape);
    *count = t.reference->samples * t.reference->weights;
    float *got = test_alloc((size_t)*count * sizeof *got);
    tch_tensor host = tch_tensor_view(got, TCH_FLOAT32, rank, shape);
    test_tensor *out = parameter_tensor(&t, TCH_FLOAT32, t.reference->samples, false, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_grad_samples(own.context, &own.layer, &t.x->tensor, &t.g->tensor, &out->tensor, NULL));
    CHECK_OK(tch_tensor_copy(own.context, &host, &out->tensor));
    CHECK_OK(tch_context_synchronize(own.context));
    test_tensor_free(out);
    tear_down(&t);
    tch_context_destroy(own.context);
    return got;
}

/* Products are cut into other blocks where there are more threads: the bits are the same. */
static void linear_samples_on_any_threads(void **state)
{
    const linear_size sizes[] = {{3, {1, 300, 70}, 301}, {3, {3, 40, 97}, 77}};
    int32_t usual = tch_get_num_threads();
    for (size_t k = 0; k < 2; k++) {
        int64_t count = 0;
        grad_case c = linear_case(*state, &sizes[k], 240 + k);
        c.dtype = TCH_FLOAT32;
        test_case("threads, case %zu", k);
        float *expected = samples_on_threads(&c, 1, &count);
        for (int32_t threads = 2; threads <= 5; threads++) {
            float *got = samples_on_threads(&c, threads, &count);
            CHECK(memcmp(got, expected, (size_t)count * sizeof *got) == 0, "gradients differ on %d threads", threads);
        }
    }
    CHECK_OK(tch_set_num_threads(usual));
}

/* Results of more than 16 MB, which the CPU writes in other ways: into memory that nobody has touched yet, and
 * again. */
static void linear_huge_results(void **state)
{
    const linear_size sizes[] = {{2, {20, 528}, 516}, {3, {20, 3, 528}, 516}};
    for (size_t k = 0; k < 2; k++) {
        grad_case c = linear_case(*state, &sizes[k], 250 + k);
        c.dtype = TCH_FLOAT32;
        test_case("huge result %zu", k);
        trial t = set_up(&c);
        const grad_reference *r = t.reference;
        int64_t shape[3] = {20, 516, 528};
        tch_tensor *out = NULL;
        CHECK_OK(tch_memory_trim(*state, 0));
        CHECK_OK(tch_tensor_create_uninitialized(*state, TCH_FLOAT32, 3, shape, TCH_CONTIGUOUS, &out));
        for (int times = 0; times < 2; times++) {
            float *got = test_alloc((size_t)(20 * r->weights) * sizeof *got);
            tch_tensor host = tch_tensor_view(got, TCH_FLOAT32, 3, shape);
            CHECK_OK(tch_grad_samples(*state, &c.layer, &t.x->tensor, &t.g->tensor, out, NULL));
            CHECK_OK(tch_tensor_copy(*state, &host, out));
            CHECK_OK(tch_context_synchronize(*state));
            CHECK_OK(tch_tensor_fill(*state, out, (double)NAN));
            for (int64_t i = 0; i < 20 * r->weights; i++) {
                check_near("weight", i, (double)got[i], r->weight[i],
                           (double)(r->positions + 8) * t.u * r->magnitude[i]);
            }
        }
        tch_tensor_destroy(out);
        tear_down(&t);
    }
}

static void linear_layouts(void **state)
{
    const linear_size sizes[] = {{2, {3, 5}, 4}, {3, {3, 4, 5}, 6}, {4, {2, 3, 4, 5}, 7}};
    for (size_t k = 0; k < 3; k++) {
        for (int layout = 0; layout <= LAYOUT_EXPANDED; layout++) {
            grad_case c = linear_case(*state, &sizes[k], 300 + k);
            c.input = (test_layout)layout;
            c.gradient = (test_layout)((layout + (int)k) % (LAYOUT_EXPANDED + 1));
            c.output = (test_layout)((layout * 3 + (int)k) % LAYOUT_COUNT);
            run_case(&c);
        }
    }
}

/* Nothing to sum over: zeros, and what is there times beta. */
static void empty_batches_and_positions(void **state)
{
    const linear_size sizes[] = {{2, {0, 3}, 4},    {3, {0, 5, 3}, 4}, {3, {2, 0, 3}, 4},
                                 {3, {2, 3, 0}, 4}, {3, {2, 3, 4}, 0}, {4, {2, 0, 3, 5}, 2}};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        grad_case c = linear_case(*state, &sizes[k], 400 + k);
        run_case(&c);
    }
}

/* --- convolutions ------------------------------------------------------------------------------------------------ */

typedef struct conv_size {
    int32_t dims;
    int64_t shape[5];
    int64_t outputs, groups;
    int64_t kernel[3], stride[3], dilation[3], before[3], after[3];
    tch_padding padding;
} conv_size;

static grad_case conv_case(tch_context *context, const conv_size *s, uint64_t stream)
{
    grad_case c = {.context = context, .layer = TCH_LAYER_INIT(TCH_LAYER_CONV), .ndim = s->dims + 2};
    memcpy(c.shape, s->shape, (size_t)c.ndim * sizeof *s->shape);
    c.outputs = s->outputs;
    c.stream = stream;
    c.poison = -1;
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

static const conv_size convolutions[] = {
    {1, {3, 2, 7}, 3, 1, {3}, {0}, {0}, {0}, {0}, TCH_PADDING_ZEROS},
    {1, {2, 4, 65}, 6, 2, {5}, {2}, {3}, {4}, {3}, TCH_PADDING_ZEROS},
    {1, {2, 3, 300}, 2, 1, {290}, {3}, {0}, {1}, {0}, TCH_PADDING_ZEROS},
    {1, {2, 3, 9}, 3, 3, {3}, {1}, {2}, {3}, {4}, TCH_PADDING_CIRCULAR},
    {2, {3, 3, 5, 6}, 4, 1, {3, 2}, {1, 1}, {1, 1}, {1, 0}, {1, 1}, TCH_PADDING_ZEROS},
    {2, {2, 4, 8, 8}, 8, 4, {3, 3}, {2, 1}, {1, 2}, {2, 1}, {0, 3}, TCH_PADDING_ZEROS},
    {2, {2, 6, 7, 5}, 6, 6, {3, 3}, {0, 0}, {0, 0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
    {2, {2, 3, 6, 7}, 6, 3, {1, 1}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {3, 17, 4, 4}, 5, 1, {1, 1}, {2, 2}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {2, 2, 4, 5}, 3, 1, {3, 3}, {1, 2}, {1, 1}, {3, 2}, {2, 4}, TCH_PADDING_REFLECT},
    {2, {2, 2, 4, 5}, 2, 2, {3, 3}, {2, 1}, {2, 1}, {6, 2}, {2, 7}, TCH_PADDING_REPLICATE},
    {2, {2, 2, 4, 5}, 3, 1, {3, 3}, {1, 1}, {1, 2}, {4, 5}, {1, 3}, TCH_PADDING_CIRCULAR},
    {2, {1, 3, 8, 8}, 4, 1, {8, 8}, {0, 0}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {2, {2, 1, 20, 20}, 2, 1, {17, 17}, {3, 3}, {0, 0}, {0, 0}, {0, 0}, TCH_PADDING_ZEROS},
    {3, {2, 2, 4, 3, 5}, 3, 1, {2, 3, 2}, {1, 1, 1}, {1, 1, 1}, {0, 1, 0}, {1, 1, 0}, TCH_PADDING_ZEROS},
    {3, {2, 4, 5, 4, 6}, 4, 2, {2, 2, 3}, {2, 1, 2}, {1, 2, 1}, {1, 1, 2}, {2, 0, 1}, TCH_PADDING_REFLECT},
    {3, {1, 2, 3, 4, 3}, 2, 2, {3, 1, 2}, {1, 1, 1}, {1, 1, 2}, {1, 2, 3}, {2, 0, 1}, TCH_PADDING_CIRCULAR},
    {3, {0, 2, 3, 4, 3}, 2, 1, {3, 1, 2}, {1, 1, 1}, {1, 1, 1}, {1, 0, 0}, {0, 0, 0}, TCH_PADDING_ZEROS},
};
#define CONVOLUTIONS (sizeof convolutions / sizeof convolutions[0])

static void conv_sizes(void **state)
{
    for (size_t k = 0; k < CONVOLUTIONS; k++) {
        grad_case c = conv_case(*state, &convolutions[k], 500 + k);
        c.layer.scale = k % 2 == 0 ? 1.0 : 2.5;
        c.layer.rounded = k % 3 != 0;
        run_case(&c);
    }
}

static void conv_layouts(void **state)
{
    for (size_t k = 0; k < CONVOLUTIONS; k++) {
        for (int layout = 1; layout <= (int)CHANNELS_LAST; layout += 1 + (int)(k % 3)) {
            grad_case c = conv_case(*state, &convolutions[k], 600 + k);
            c.input = (test_layout)layout;
            c.gradient = (test_layout)(layout == (int)CHANNELS_LAST ? layout : (layout + (int)k) % LAYOUT_COUNT);
            c.output = (test_layout)((layout * 3 + (int)k) % LAYOUT_COUNT);
            run_case(&c);
        }
    }
}

static void conv_channels_last(void **state)
{
    for (size_t k = 0; k < CONVOLUTIONS; k++) {
        grad_case c = conv_case(*state, &convolutions[k], 700 + k);
        c.input = CHANNELS_LAST;
        c.gradient = CHANNELS_LAST;
        run_case(&c);
    }
}

/* --- a sample that is left out ----------------------------------------------------------------------------------- */

static void weight_zero_leaves_out(void **state)
{
    const linear_size linear[] = {{2, {3, 5}, 4}, {3, {4, 6, 5}, 3}};
    for (int k = 0; k < 2 * 4 + (int)CONVOLUTIONS * 4; k++) {
        bool is_linear = k < 8;
        grad_case c = is_linear ? linear_case(*state, &linear[k / 4], 800)
                                : conv_case(*state, &convolutions[(k - 8) / 4], 800 + (uint64_t)k);
        c.dtype = dtypes[k % 4];
        c.poison = c.shape[0] > 1 ? 1 : 0;
        if (c.shape[0] == 0) {
            continue;
        }
        c.input = k % 3 == 0 ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED;
        test_case("weight 0, case %d", k);
        trial t = set_up(&c);
        check_weighted_sum(&t, c.dtype, true, 0.0);
        check_weighted_sum(&t, is_half(c.dtype) ? TCH_FLOAT32 : c.dtype, true, 0.5);
        tear_down(&t);
    }
}

/* --- little memory ----------------------------------------------------------------------------------------------- */

/* The call with the least memory that is enough for it, to an eighth; too little is said to be too little. */
static int64_t with_least_memory(tch_status (*call)(const trial *, test_tensor *), const trial *t, test_tensor *out)
{
    tch_status status = TCH_ERR_OUT_OF_MEMORY;
    int64_t limit = 1024;
    for (; status != TCH_OK; limit += limit / 8 + 1) {
        CHECK(limit < (int64_t)1 << 30, "1 GiB is not enough");
        CHECK_OK(tch_context_set_workspace_limit(t->c->context, limit));
        status = call(t, out);
        CHECK(status == TCH_OK || status == TCH_ERR_OUT_OF_MEMORY, "limit %lld gave %s: %s", (long long)limit,
              tch_status_name(status), tch_last_error());
        if (status != TCH_OK) {
            test_tensor_check_unchanged(out, "out");
        }
    }
    return limit;
}

static tch_status call_norms(const trial *t, test_tensor *out)
{
    return tch_grad_norms(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, TCH_GRAD_BOTH, 0, &out->tensor);
}

static tch_status call_samples(const trial *t, test_tensor *out)
{
    return tch_grad_samples(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, &out->tensor, NULL);
}

static tch_status call_gram(const trial *t, test_tensor *out)
{
    return tch_grad_gram(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, TCH_GRAD_BOTH, 0, &out->tensor);
}

static tch_status call_sum(const trial *t, test_tensor *out)
{
    return tch_grad_weighted_sum(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, NULL, 0.0, &out->tensor,
                                 NULL);
}

static tch_status call_dots(const trial *t, test_tensor *out)
{
    return tch_grad_dots(t->c->context, &t->c->layer, &t->x->tensor, &t->g->tensor, &t->direction->tensor, NULL, 0,
                         &out->tensor);
}

static void check_with_little_memory(tch_context *context, const grad_case *c)
{
    trial t = set_up(c);
    const int64_t pairs[2] = {t.reference->samples, t.reference->samples};
    test_tensor *norms = test_tensor_make(context, TCH_FLOAT64, 1, pairs, LAYOUT_CONTIGUOUS);
    test_tensor *gram = test_tensor_make(context, TCH_FLOAT64, 2, pairs, LAYOUT_CONTIGUOUS);
    test_tensor *weight = parameter_tensor(&t, c->dtype, t.reference->samples, false, LAYOUT_REVERSED);
    test_tensor *sum = parameter_tensor(&t, c->dtype, -1, false, LAYOUT_REVERSED);
    const grad_reference *r = t.reference;
    test_tensor *direction = parameter_tensor(&t, c->dtype, -1, false, LAYOUT_TRANSPOSED);
    double *v = test_alloc((size_t)r->weights * sizeof *v);
    test_random random = test_random_stream(c->stream * 16 + 5);
    test_random_fill_normal(&random, v, r->weights);
    test_tensor_write(direction, v);
    double *w = test_tensor_read(direction);
    t.direction = direction;
    with_least_memory(call_samples, &t, weight);
    check_elements(&t, "weight", weight, r->weight, r->magnitude, (double)r->positions);
    with_least_memory(call_norms, &t, norms);
    compare_norms(&t, TCH_GRAD_BOTH, 1, norms);
    int64_t limit = with_least_memory(call_gram, &t, gram);
    compare_gram(&t, TCH_GRAD_BOTH, 1, gram);
    for (int more = 2; more <= 8; more *= 2) { /* some samples at a time, and some rows of the gradient */
        CHECK_OK(tch_context_set_workspace_limit(context, more * limit));
        CHECK_OK(call_gram(&t, gram));
        compare_gram(&t, TCH_GRAD_BOTH, 1, gram);
    }
    with_least_memory(call_sum, &t, sum);
    check_sum_of(&t, sum, NULL, 0.0, NULL, r->weights, r->weight, r->magnitude);
    test_tensor_poison(norms);
    with_least_memory(call_dots, &t, norms);
    compare_dots(&t, norms, 1, w, NULL);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
    tear_down(&t);
}

static void little_memory(void **state)
{
    const conv_size many[] = {{2, {19, 4, 6, 5}, 6, 1, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
                              {2, {19, 4, 6, 5}, 6, 2, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS},
                              {2, {19, 8, 3, 3}, 32, 2, {3, 3}, {0}, {0}, {1, 1}, {1, 1}, TCH_PADDING_ZEROS}};
    const linear_size linear[] = {{3, {23, 9, 31}, 45}, {2, {70, 33}, 21}};
    for (int k = 0; k < 20; k++) {
        bool conv = k / 4 < 3;
        grad_case c = conv ? conv_case(*state, &many[k / 4], 900) : linear_case(*state, &linear[k / 4 - 3], 901);
        c.dtype = dtypes[k % 4];
        c.output = LAYOUT_STEPPED;
        c.input = conv ? LAYOUT_CONTIGUOUS : LAYOUT_STEPPED;
        test_case("little memory, case %d", k);
        check_with_little_memory(*state, &c);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_sizes),
        cmocka_unit_test(linear_large),
        cmocka_unit_test(linear_norms),
        cmocka_unit_test(linear_long_sums),
        cmocka_unit_test(linear_samples_on_any_threads),
        cmocka_unit_test(linear_huge_results),
        cmocka_unit_test(linear_layouts),
        cmocka_unit_test(empty_batches_and_positions),
        cmocka_unit_test(conv_sizes),
        cmocka_unit_test(conv_layouts),
        cmocka_unit_test(conv_channels_last),
        cmocka_unit_test(weight_zero_leaves_out),
        cmocka_unit_test(little_memory),
    };
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

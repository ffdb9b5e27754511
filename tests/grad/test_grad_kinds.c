/* Per-sample gradients for embeddings and normalizing layers. Every case has its gradients written out by plain float64
 * loops, sample by sample, with a bound for each element; samples, norms, weighted sums, Gram matrices and inner
 * products are then compared with what follows from these, within what follows from the bounds.
 *
 * An element of a gradient is a sum over positions. Its bound is u (16 + positions + features) times the sum of the
 * magnitudes of its terms, u being the round-off of the arithmetic: every term and every addition is rounded once, and
 * a statistic over n features is off by n u at most. For a normalized input (x - m) / s the magnitude is (|x| + |m|) /
 * s; on the CPU, where float32 and half types have float64 statistics, it is |x - m| / s, so that a mean far larger
 * than the spread costs nothing. */
#include <math.h>
#include <string.h>

#include <torchium/grad.h>

#include "support/elements.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

/* --- cases ------------------------------------------------------------------------------------------------------- */

typedef enum token_mix { TOKENS_ANY, TOKENS_EQUAL, TOKENS_OUTSIDE } token_mix;

typedef struct kind_case {
    tch_layer_kind kind;
    int32_t ndim; /* of the input */
    int64_t shape[5];
    int64_t rows, cols, padding; /* EMBEDDING */
    token_mix mix;
    int32_t normalized; /* LAYER_NORM, RMS_NORM */
    int64_t groups;     /* GROUP_NORM */
    double mean;        /* of the inputs, whose spread is 1 */
} kind_case;

#define EMBEDDING(ndim, rows, cols, padding, mix, ...)                                                                 \
    {                                                                                                                  \
        TCH_LAYER_EMBEDDING, ndim, {__VA_ARGS__}, rows, cols, padding, mix, 0, 0, 0.0                                  \
    }
#define LAYER_NORM(ndim, normalized, mean, ...)                                                                        \
    {                                                                                                                  \
        TCH_LAYER_LAYER_NORM, ndim, {__VA_ARGS__}, 0, 0, 0, TOKENS_ANY, normalized, 0, mean                            \
    }
#define RMS_NORM(ndim, normalized, mean, ...)                                                                          \
    {                                                                                                                  \
        TCH_LAYER_RMS_NORM, ndim, {__VA_ARGS__}, 0, 0, 0, TOKENS_ANY, normalized, 0, mean                              \
    }
#define GROUP_NORM(ndim, groups, mean, ...)                                                                            \
    {                                                                                                                  \
        TCH_LAYER_GROUP_NORM, ndim, {__VA_ARGS__}, 0, 0, 0, TOKENS_ANY, 0, groups, mean                                \
    }

static const kind_case cases[] = {
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 3, 7),
    EMBEDDING(2, 1, 1, -1, TOKENS_ANY, 2, 1),
    EMBEDDING(2, 1, 3, 0, TOKENS_ANY, 2, 4), /* the only row is padding */
    EMBEDDING(2, 11, 65, 3, TOKENS_ANY, 4, 33),
    EMBEDDING(2, 300, 17, -1, TOKENS_ANY, 1, 130),
    EMBEDDING(1, 70000, 3, 69999, TOKENS_ANY, 5),
    EMBEDDING(3, 9, 257, -1, TOKENS_ANY, 2, 3, 4),
    EMBEDDING(2, 6, 5, 2, TOKENS_OUTSIDE, 3, 19),
    EMBEDDING(2, 7, 33, -1, TOKENS_EQUAL, 3, 65),
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 0, 3),
    EMBEDDING(2, 5, 4, -1, TOKENS_ANY, 3, 0),
    LAYER_NORM(3, 1, 0.5, 3, 5, 17),
    LAYER_NORM(2, 1, 0.5, 4, 1),
    LAYER_NORM(4, 2, 0.0, 2, 3, 4, 5),
    LAYER_NORM(4, 3, 0.0, 3, 3, 4, 5),
    LAYER_NORM(5, 1, -2.0, 2, 2, 3, 2, 7),
    LAYER_NORM(3, 1, 1e4, 2, 9, 300),
    LAYER_NORM(3, 1, 0.0, 0, 4, 3),
    LAYER_NORM(3, 1, 0.0, 3, 0, 4),
    LAYER_NORM(2, 1, 0.0, 1, 768),
    RMS_NORM(3, 1, 0.5, 3, 5, 17),
    RMS_NORM(2, 1, 0.0, 5, 1),
    RMS_NORM(4, 2, 3.0, 2, 3, 5, 3),
    RMS_NORM(3, 1, 1e4, 2, 2, 257),
    RMS_NORM(2, 1, 0.0, 0, 6),
    GROUP_NORM(3, 1, 0.5, 3, 6, 5),
    GROUP_NORM(3, 2, 0.5, 3, 6, 5),
    GROUP_NORM(4, 6, 0.0, 2, 6, 3, 4),
    GROUP_NORM(2, 2, 0.0, 3, 4),
    GROUP_NORM(2, 4, 0.0, 3, 4), /* one element to a group: normalized to 0 */
    GROUP_NORM(4, 2, 1.0, 2, 4, 1, 1),
    GROUP_NORM(5, 3, -1.0, 2, 6, 3, 5, 2),
    GROUP_NORM(3, 3, 1e4, 2, 3, 300),
    GROUP_NORM(3, 2, 0.0, 2, 4, 0),
    GROUP_NORM(3, 1, 0.0, 0, 4, 5),
};
#define CASES ((int)(sizeof cases / sizeof cases[0]))

static const char *const kind_names[] = {"linear", "conv", "embedding", "layer norm", "RMS norm", "group norm"};
static const tch_dtype dtypes[] = {{TCH_FLOAT, 64, 1}, {TCH_FLOAT, 32, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};
static const double SCALE = 1.5;

/* --- a case with its numbers ------------------------------------------------------------------------------------- */

typedef struct trial {
    tch_context *context;
    tch_layer layer;
    tch_dtype dtype, out_dtype;
    int64_t samples, positions, features; /* features: d of an embedding, channels of a group norm */
    int64_t weights;                      /* parameters of the weight; as many of the bias where there is one */
    int has_bias;
    bool squeezed; /* calls get the least workspace in which they succeed */
    int32_t weight_ndim;
    int64_t weight_shape[6]; /* with the samples in front */
    test_tensor *input, *gradient;
    double *x, *g;     /* as rounded */
    double *j, *bound; /* samples by parameters, the bias's after the weight's: gradients, and how wrong they may be */
} trial;

static int64_t parameters(const trial *s)
{
    return s->weights * (s->has_bias ? 2 : 1);
}

static int64_t product(const int64_t *sizes, int32_t from, int32_t to)
{
    int64_t count = 1;
    for (int32_t i = from; i < to; i++) {
        count *= sizes[i];
    }
    return count;
}

static void set_sizes(trial *s, const kind_case *c)
{
    s->samples = c->shape[0];
    s->has_bias = c->kind == TCH_LAYER_LAYER_NORM || c->kind == TCH_LAYER_GROUP_NORM;
    s->weight_shape[0] = s->samples;
    if (c->kind == TCH_LAYER_EMBEDDING) {
        s->positions = product(c->shape, 1, c->ndim);
        s->features = c->cols;
        s->weight_shape[1] = c->rows;
        s->weight_shape[2] = c->cols;
        s->weight_ndim = 3;
    } else if (c->kind == TCH_LAYER_GROUP_NORM) {
        s->positions = product(c->shape, 2, c->ndim);
        s->features = s->weight_shape[1] = c->shape[1];
        s->weight_ndim = 2;
    } else {
        int32_t inner = c->ndim - c->normalized;
        s->positions = product(c->shape, 1, inner);
        s->features = product(c->shape, inner, c->ndim);
        memcpy(s->weight_shape + 1, c->shape + inner, (size_t)c->normalized * sizeof *c->shape);
        s->weight_ndim = c->normalized + 1;
    }
    s->weights = product(s->weight_shape, 1, s->weight_ndim);
}

static double draw_token(test_random *random, const kind_case *c)
{
    int64_t around = c->mix == TOKENS_OUTSIDE ? 3 : 0;
    int64_t token = (int64_t)(test_random_bits(random) % (uint64_t)(c->rows + 2 * around)) - around;
    return c->mix == TOKENS_EQUAL ? 4.0 : (double)token;
}

static void draw(trial *s, const kind_case *c, test_random *random)
{
    int64_t inputs = product(c->shape, 0, c->ndim);
    int64_t outputs = c->kind == TCH_LAYER_EMBEDDING ? inputs * c->cols : inputs;
    s->x = test_zeros(inputs);
    s->g = test_zeros(outputs);
    for (int64_t i = 0; i < inputs; i++) {
        s->x[i] = c->kind == TCH_LAYER_EMBEDDING ? draw_token(random, c)
                                                 : test_round(s->dtype, c->mean + test_random_normal(random));
    }
    for (int64_t i = 0; i < outputs; i++) {
        s->g[i] = test_round(s->dtype, test_random_normal(random));
    }
}

/* --- gradients by hand ------------------------------------------------------------------------------------------- */

static void reference_embedding(trial *s)
{
    for (int64_t i = 0; i < s->samples * s->positions; i++) {
        int64_t token = (int64_t)s->x[i];
        if (token < 0 || token >= s->layer.rows || token == s->layer.padding_index) {
            continue;
        }
        int64_t row = i / s->positions * s->weights + token * s->features;
        for (int64_t k = 0; k < s->features; k++) {
            double term = SCALE * s->g[i * s->features + k];
            s->j[row + k] += term;
            s->bound[row + k] += fabs(term);
        }
    }
}

/* Number, in the input, of feature f at position p of a sample. */
TEST_REFERENCE static int64_t element_at(const trial *s, int64_t sample, int64_t p, int64_t f)
{
    int64_t inside = s->layer.kind == TCH_LAYER_GROUP_NORM ? f * s->positions + p : p * s->features + f;
    return sample * s->positions * s->features + inside;
}

/* Mean and root of the variance over the elements that are normalized together with feature f at position p. */
TEST_REFERENCE static void statistics(const trial *s, int64_t sample, int64_t p, int64_t f, double *mean, double *root)
{
    bool group = s->layer.kind == TCH_LAYER_GROUP_NORM;
    int64_t width = group ? s->features / s->layer.groups : s->features;
    int64_t first_feature = group ? f / width * width : 0;
    int64_t first = group ? 0 : p;
    int64_t last = group ? s->positions : p + 1;
    int64_t count = width * (last - first);
    long double sum = 0;
    long double squares = 0;
    for (int64_t q = first; q < last; q++) {
        for (int64_t k = 0; k < width; k++) {
            sum += s->x[element_at(s, sample, q, first_feature + k)];
        }
    }
    long double m = s->layer.kind == TCH_LAYER_RMS_NORM ? 0 : sum / count;
    for (int64_t q = first; q < last; q++) {
        for (int64_t k = 0; k < width; k++) {
            long double d = s->x[element_at(s, sample, q, first_feature + k)] - m;
            squares += d * d;
        }
    }
    *mean = (double)m;
    *root = sqrt((double)(squares / count) + s->layer.eps);
}

/* What feature f at position p is normalized with, as a number from 0. */
static int64_t company(const trial *s, int64_t p, int64_t f)
{
    return s->layer.kind == TCH_LAYER_GROUP_NORM ? f / (s->features / s->layer.groups) : p;
}

/* Of one sample, for every company. */
static void every_statistic(const trial *s, int64_t sample, double *means, double *roots)
{
    for (int64_t p = 0; p < s->positions; p++) {
        for (int64_t f = 0; f < s->features; f++) {
            int64_t k = company(s, p, f);
            if (roots[k] == 0.0) {
                statistics(s, sample, p, f, &means[k], &roots[k]);
            }
        }
    }
}

static void reference_normalizing(trial *s)
{
    bool wide_statistics = test_on_cpu() && !tch_dtype_equal(s->dtype, TCH_FLOAT64);
    for (int64_t b = 0; b < s->samples; b++) {
        double *means = test_zeros(s->positions + s->features);
        double *roots = test_zeros(s->positions + s->features);
        every_statistic(s, b, means, roots);
        for (int64_t f = 0; f < s->features; f++) {
            int64_t at = b * parameters(s) + f;
            for (int64_t p = 0; p < s->positions; p++) {
                double mean = means[company(s, p, f)];
                double root = roots[company(s, p, f)];
                double x = s->x[element_at(s, b, p, f)];
                double g = SCALE * s->g[element_at(s, b, p, f)];
                double size = wide_statistics ? fabs(x - mean) : fabs(x) + fabs(mean);
                s->j[at] += (x - mean) / root * g;
                s->bound[at] += size / root * fabs(g);
                if (s->has_bias) {
                    s->j[at + s->weights] += g;
                    s->bound[at + s->weights] += fabs(g);
                }
            }
        }
    }
}

static void reference(trial *s)
{
    int64_t count = s->samples * parameters(s);
    double unit = test_arithmetic_roundoff(s->dtype) * (double)(16 + s->positions + s->features);
    s->j = test_zeros(count);
    s->bound = test_zeros(count);
    if (s->layer.kind == TCH_LAYER_EMBEDDING) {
        reference_embedding(s);
    } else {
        reference_normalizing(s);
    }
    for (int64_t i = 0; i < count; i++) {
        s->bound[i] *= unit;
    }
}

static void trial_make(trial *s, tch_context *context, const kind_case *c, tch_dtype dtype, test_layout layout,
                       uint64_t stream)
{
    test_random random = test_random_stream(stream);
    tch_layer layer = TCH_LAYER_INIT(c->kind);
    int64_t output[6] = {0};
    bool embedding = c->kind == TCH_LAYER_EMBEDDING;
    *s = (trial){.context = context, .layer = layer, .dtype = dtype, .out_dtype = dtype};
    s->layer.scale = SCALE;
    s->layer.rows = c->rows;
    s->layer.padding_index = c->padding;
    s->layer.normalized = c->normalized;
    s->layer.groups = c->groups;
    set_sizes(s, c);
    draw(s, c, &random);
    memcpy(output, c->shape, (size_t)c->ndim * sizeof *output);
    output[c->ndim] = c->cols;
    tch_dtype token = stream % 2 == 0 ? TCH_INT32 : TCH_INT64;
    s->input = test_tensor_make(context, embedding ? token : dtype, c->ndim, c->shape, layout);
    s->gradient = test_tensor_make(context, dtype, embedding ? c->ndim + 1 : c->ndim, output, layout);
    test_tensor_write(s->input, s->x);
    test_tensor_write(s->gradient, s->g);
    reference(s);
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* Limits of the workspace to try, from one where nothing fits upwards; none at all where the trial is not squeezed. */
static bool next_limit(const trial *s, tch_status status, int64_t *limit)
{
    if (status != TCH_ERR_OUT_OF_MEMORY || *limit > (int64_t)1 << 30) {
        CHECK_OK(tch_context_set_workspace_limit(s->context, 0));
        return false;
    }
    *limit += *limit / 8 + 256;
    CHECK_OK(tch_context_set_workspace_limit(s->context, s->squeezed ? *limit : 0));
    return true;
}

#define RUN(s, call)                                                                                                   \
    do {                                                                                                               \
        tch_status ran_ = TCH_ERR_OUT_OF_MEMORY;                                                                       \
        for (int64_t limit_ = 0; next_limit(s, ran_, &limit_);) {                                                      \
            ran_ = (call);                                                                                             \
        }                                                                                                              \
        CHECK(ran_ == TCH_OK, "gave %s: %s", tch_status_name(ran_), tch_last_error());                                 \
    } while (0)

/* --- what follows from the gradients ----------------------------------------------------------------------------- */

static void check_close(const char *what, int64_t index, double got, double expected, double bound)
{
    CHECK(fabs(got - expected) <= bound, "%s %lld is %.17g, expected %.17g within %.3g", what, (long long)index, got,
          expected, bound);
}

/* A value that is stored in the trial's output type. */
static double stored(const trial *s, double value)
{
    return test_unit_roundoff(s->out_dtype) * fabs(value) + test_underflow(s->out_dtype);
}

/* The weights' gradients of sample b begin here in j and bound; the bias's follow. */
static int64_t row_of(const trial *s, int64_t b)
{
    return b * parameters(s);
}

static test_tensor *make_parameter(const trial *s, int32_t from, test_layout layout)
{
    return test_tensor_make(s->context, s->out_dtype, s->weight_ndim - from, s->weight_shape + from, layout);
}

static void check_samples(trial *s, test_layout layout)
{
    test_tensor *out[2] = {make_parameter(s, 0, layout), s->has_bias ? make_parameter(s, 0, layout) : NULL};
    RUN(s, tch_grad_samples(s->context, &s->layer, &s->input->tensor, &s->gradient->tensor, &out[0]->tensor,
                            s->has_bias ? &out[1]->tensor : NULL));
    for (int part = 0; part <= s->has_bias; part++) {
        test_tensor_check_written(out[part], part == 0 ? "weight" : "bias");
        double *got = test_tensor_read(out[part]);
        for (int64_t i = 0; i < s->samples * s->weights; i++) {
            int64_t at = row_of(s, i / s->weights) + part * s->weights + i % s->weights;
            check_close(part == 0 ? "weight" : "bias", i, got[i], s->j[at], s->bound[at] + stored(s, s->j[at]));
        }
    }
}

/* Parameters of the parts, counted from the start of a row. */
static void part_range(const trial *s, tch_grad_part parts, int64_t *from, int64_t *to)
{
    *from = parts & TCH_GRAD_WEIGHT ? 0 : s->weights;
    *to = parts & TCH_GRAD_BIAS ? parameters(s) : s->weights;
}

/* <gradient of sample a, gradient of sample b> over the parts, and how far it may be off: the errors of either, and the
 * rounding of the products and of their sum. */
TEST_REFERENCE static double inner(const trial *s, int64_t a, int64_t b, tch_grad_part parts, double *bound)
{
    int64_t from;
    int64_t to;
    double sum = 0;
    double unit = test_arithmetic_roundoff(s->dtype) * (double)(16 + s->features);
    part_range(s, parts, &from, &to);
    *bound = 0;
    for (int64_t k = from; k < to; k++) {
        int64_t i = row_of(s, a) + k;
        int64_t j = row_of(s, b) + k;
        sum += s->j[i] * s->j[j];
        *bound += fabs(s->j[i]) * s->bound[j] + fabs(s->j[j]) * s->bound[i] + s->bound[i] * s->bound[j] +
                  unit * fabs(s->j[i] * s->j[j]);
    }
    return sum;
}

/* Of all pairs of samples, into new arrays. */
static double *inner_of_pairs(const trial *s, tch_grad_part parts, double **bounds)
{
    int64_t n = s->samples;
    double *products = test_alloc((size_t)(n * n) * sizeof *products);
    *bounds = test_alloc((size_t)(n * n) * sizeof **bounds);
    for (int64_t a = 0; a < n; a++) {
        for (int64_t b = 0; b <= a; b++) {
            products[a * n + b] = products[b * n + a] = inner(s, a, b, parts, &(*bounds)[a * n + b]);
            (*bounds)[b * n + a] = (*bounds)[a * n + b];
        }
    }
    return products;
}

static void check_norms(trial *s, tch_grad_part parts, const double *products, const double *bounds)
{
    test_tensor *norms = test_tensor_make(s->context, TCH_FLOAT64, 1, &s->samples, LAYOUT_CONTIGUOUS);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        RUN(s, tch_grad_norms(s->context, &s->layer, &s->input->tensor, &s->gradient->tensor, parts, accumulate,
                              &norms->tensor));
        test_tensor_check_written(norms, "norms");
        double *got = test_tensor_read(norms);
        for (int64_t i = 0; i < s->samples; i++) {
            int64_t at = i * s->samples + i;
            check_close("norm", i, got[i], (1 + accumulate) * products[at], (1 + accumulate) * bounds[at]);
        }
    }
}

static void check_gram(trial *s, tch_grad_part parts, tch_dtype dtype, test_layout layout, const double *products,
                       const double *bounds)
{
    const int64_t shape[] = {s->samples, s->samples};
    double unit = test_unit_roundoff(dtype);
    test_tensor *gram = test_tensor_make(s->context, dtype, 2, shape, layout);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        RUN(s, tch_grad_gram(s->context, &s->layer, &s->input->tensor, &s->gradient->tensor, parts, accumulate,
                             &gram->tensor));
        test_tensor_check_written(gram, "gram");
        double *got = test_tensor_read(gram);
        for (int64_t i = 0; i < s->samples * s->samples; i++) {
            double expected = (1 + accumulate) * products[i];
            check_close("gram", i, got[i], expected, (1 + accumulate) * bounds[i] + 4 * unit * fabs(expected));
            CHECK(got[i] == got[i % s->samples * s->samples + i / s->samples], "gram is not symmetric at %lld",
                  (long long)i);
        }
    }
}

/* Random numbers as they remain in a parameter's type. */
static double *random_parameter(const trial *s, test_tensor *t, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    double *values = test_zeros(s->weights);
    for (int64_t i = 0; i < s->weights; i++) {
        values[i] = test_round(s->out_dtype, test_random_normal(&random));
    }
    test_tensor_write(t, values);
    return values;
}

static void check_dots(trial *s, test_layout layout)
{
    test_tensor *direction[2] = {make_parameter(s, 1, layout), s->has_bias ? make_parameter(s, 1, layout) : NULL};
    test_tensor *dots = test_tensor_make(s->context, TCH_FLOAT64, 1, &s->samples, LAYOUT_CONTIGUOUS);
    double *v[2] = {random_parameter(s, direction[0], 11), s->has_bias ? random_parameter(s, direction[1], 12) : NULL};
    double unit = test_arithmetic_roundoff(s->dtype) * (double)(16 + s->features);
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        RUN(s, tch_grad_dots(s->context, &s->layer, &s->input->tensor, &s->gradient->tensor, &direction[0]->tensor,
                             s->has_bias ? &direction[1]->tensor : NULL, accumulate, &dots->tensor));
        test_tensor_check_written(dots, "dots");
        double *got = test_tensor_read(dots);
        for (int64_t b = 0; b < s->samples; b++) {
            double sum = 0;
            double bound = 0;
            for (int64_t k = 0; k < parameters(s); k++) {
                double direction_k = v[k / s->weights][k % s->weights];
                sum += s->j[row_of(s, b) + k] * direction_k;
                bound += fabs(direction_k) * (s->bound[row_of(s, b) + k] + unit * fabs(s->j[row_of(s, b) + k]));
            }
            check_close("dot", b, got[b], (1 + accumulate) * sum, (1 + accumulate) * bound);
        }
    }
}

/* One parameter's weighted sum; w NULL: all ones. `before` is what it held, NULL where beta is 0. */
static void compare_sum(const trial *s, const test_tensor *out, int part, const double *w, double beta,
                        const double *before)
{
    double *got = test_tensor_read(out);
    double unit = test_arithmetic_roundoff(s->dtype) * (double)(4 + s->samples);
    for (int64_t k = 0; k < s->weights; k++) {
        double sum = before != NULL ? beta * before[k] : 0;
        double bound = unit * fabs(sum);
        for (int64_t b = 0; b < s->samples; b++) {
            double weight = w != NULL ? w[b] : 1;
            int64_t at = row_of(s, b) + part * s->weights + k;
            sum += weight * s->j[at];
            bound += weight == 0 ? 0 : fabs(weight) * (s->bound[at] + unit * fabs(s->j[at]));
        }
        check_close(part == 0 ? "sum" : "bias sum", k, got[k], sum, bound + stored(s, sum));
    }
}

static void check_sum(trial *s, test_layout layout, const double *w, double beta)
{
    test_tensor *weights = test_tensor_make(s->context, TCH_FLOAT64, 1, &s->samples, LAYOUT_CONTIGUOUS);
    test_tensor *out[2] = {make_parameter(s, 1, layout), s->has_bias ? make_parameter(s, 1, layout) : NULL};
    double *before[2] = {NULL, NULL};
    for (int part = 0; part <= s->has_bias && beta != 0; part++) {
        before[part] = random_parameter(s, out[part], 21 + (uint64_t)part);
    }
    if (w != NULL) {
        test_tensor_write(weights, w);
    }
    RUN(s, tch_grad_weighted_sum(s->context, &s->layer, &s->input->tensor, &s->gradient->tensor,
                                 w != NULL ? &weights->tensor : NULL, beta, &out[0]->tensor,
                                 s->has_bias ? &out[1]->tensor : NULL));
    for (int part = 0; part <= s->has_bias; part++) {
        test_tensor_check_written(out[part], "a sum");
        compare_sum(s, out[part], part, w, beta, before[part]);
    }
}

/* Weights of which every third is 0. */
static double *draw_weights(const trial *s)
{
    test_random random = test_random_stream(31);
    double *w = test_zeros(s->samples);
    for (int64_t i = 0; i < s->samples; i++) {
        w[i] = i % 3 == 1 ? 0.0 : test_random_normal(&random);
    }
    return w;
}

static void check_everything(trial *s, test_layout layout)
{
    size_t mark = test_mark();
    double *w = draw_weights(s);
    check_samples(s, layout);
    for (int parts = TCH_GRAD_WEIGHT; parts <= TCH_GRAD_BOTH; parts++) {
        double *bounds;
        double *products = inner_of_pairs(s, (tch_grad_part)parts, &bounds);
        check_norms(s, (tch_grad_part)parts, products, bounds);
        check_gram(s, (tch_grad_part)parts, parts == TCH_GRAD_BOTH ? TCH_FLOAT64 : TCH_FLOAT32,
                   parts == TCH_GRAD_BOTH ? LAYOUT_ROW_GAPS : LAYOUT_CONTIGUOUS, products, bounds);
    }
    check_dots(s, layout);
    check_sum(s, layout, NULL, 0.0);
    check_sum(s, layout, w, 0.0);
    check_sum(s, layout, w, -0.5);
    test_tensor_check_unchanged(s->input, "input");
    test_tensor_check_unchanged(s->gradient, "output_gradient");
    test_release_since(mark);
}

/* --- tests ------------------------------------------------------------------------------------------------------- */

static void every_case_contiguous(void **state)
{
    for (int i = 0; i < CASES; i++) {
        for (int k = 0; k < 4; k++) {
            trial s;
            test_case("%s, case %d, %s", kind_names[cases[i].kind], i, tch_dtype_name(dtypes[k]));
            trial_make(&s, *state, &cases[i], dtypes[k], LAYOUT_CONTIGUOUS, (uint64_t)(100 + i));
            check_everything(&s, LAYOUT_CONTIGUOUS);
            if (tch_dtype_size(dtypes[k]) == 2) { /* half types, with results in float32 */
                s.out_dtype = TCH_FLOAT32;
                check_everything(&s, LAYOUT_CONTIGUOUS);
            }
        }
    }
}

static void every_layout(void **state)
{
    for (int i = 0; i < CASES; i++) {
        for (int layout = LAYOUT_CONTIGUOUS + 1; layout < LAYOUT_COUNT; layout++) {
            trial s;
            tch_dtype dtype = dtypes[(i + layout) % 4];
            test_case("%s, case %d, %s, %s", kind_names[cases[i].kind], i, tch_dtype_name(dtype),
                      test_layout_name((test_layout)layout));
            trial_make(&s, *state, &cases[i], dtype, (test_layout)layout, (uint64_t)(200 + i));
            check_everything(&s, (test_layout)layout);
        }
    }
}

/* In the smallest workspace in which it gets by, a call works through its samples in chunks. */
static void chunks_that_fit_the_workspace(void **state)
{
    for (int i = 0; i < CASES; i++) {
        for (int layout = LAYOUT_CONTIGUOUS; layout <= LAYOUT_STEPPED; layout += LAYOUT_STEPPED) {
            trial s;
            kind_case c = cases[i];
            c.shape[0] = c.shape[0] * 3 + 1;
            test_case("%s, case %d in chunks, %s", kind_names[c.kind], i, test_layout_name((test_layout)layout));
            trial_make(&s, *state, &c, dtypes[i % 2], (test_layout)layout, (uint64_t)(300 + i));
            s.squeezed = true;
            check_everything(&s, (test_layout)layout);
        }
    }
}

/* A sample of weight 0 adds nothing, even where it is not finite. */
static void a_sample_left_out_may_be_anything(void **state)
{
    for (int i = 0; i < CASES; i++) {
        trial s;
        int64_t bad = 1;
        if (cases[i].shape[0] < 2) {
            continue;
        }
        test_case("%s, case %d with a bad sample", kind_names[cases[i].kind], i);
        trial_make(&s, *state, &cases[i], dtypes[i % 4], LAYOUT_CONTIGUOUS, (uint64_t)(400 + i));
        double *w = draw_weights(&s);
        int64_t outputs = s.gradient->count / s.samples;
        for (int64_t k = bad * outputs; k < (bad + 1) * outputs; k++) {
            s.g[k] = k % 2 == 0 ? NAN : INFINITY;
        }
        test_tensor_write(s.gradient, s.g);
        for (int64_t k = 0; k < parameters(&s); k++) {
            s.j[row_of(&s, bad) + k] = 0;
        }
        check_sum(&s, LAYOUT_CONTIGUOUS, w, 0.5);
    }
}

/* A context with other numbers of threads is bitwise-identical. */
static void results_do_not_depend_on_threads(void **state)
{
    (void)state;
    int32_t threads = tch_get_num_threads();
    for (int i = 0; i < CASES; i++) {
        double *results[2];
        int64_t count = 0;
        for (int run = 0; run < 2; run++) {
            tch_context *context = NULL;
            trial s;
            kind_case c = cases[i];
            c.shape[0] *= 5;
            CHECK_OK(tch_set_num_threads(run + 1));
            CHECK_OK(tch_context_create(test_device(), &context));
            test_case("%s, case %d on %d threads", kind_names[c.kind], i, run + 1);
            trial_make(&s, context, &c, dtypes[1], LAYOUT_CONTIGUOUS, (uint64_t)(500 + i));
            test_tensor *out = make_parameter(&s, 1, LAYOUT_CONTIGUOUS);
            CHECK_OK(tch_grad_weighted_sum(context, &s.layer, &s.input->tensor, &s.gradient->tensor, NULL, 0.0,
                                           &out->tensor, NULL));
            results[run] = test_tensor_read(out);
            count = out->count;
            test_tensor_free(out);
            test_tensor_free(s.input);
            test_tensor_free(s.gradient);
            tch_context_destroy(context);
        }
        CHECK(memcmp(results[0], results[1], (size_t)count * sizeof **results) == 0, "the sums differ");
    }
    CHECK_OK(tch_set_num_threads(threads));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_contiguous),
        cmocka_unit_test(every_layout),
        cmocka_unit_test(chunks_that_fit_the_workspace),
        cmocka_unit_test(a_sample_left_out_may_be_anything),
        cmocka_unit_test(results_do_not_depend_on_threads),
    };
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* After the norms: the cross term of tied weights vs both gradients in full, clipping, and the weights of the natural
 * gradient vs a dense solve. */

#include <torchium/grad.h>

#include "support/elements.h"
#include "support/grad/layer_positions.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static double *normals(test_random *random, int64_t count, tch_dtype dtype)
{
    double *values = test_zeros(count);
    for (int64_t i = 0; i < count; i++) {
        values[i] = test_round(dtype, test_random_normal(random));
    }
    return values;
}

static test_tensor *tensor_of(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                              const double *values, test_layout layout)
{
    test_tensor *t = test_tensor_make(context, dtype, ndim, shape, layout);
    test_tensor_write(t, values);
    return t;
}

/* --- the cross term ---------------------------------------------------------------------------------------------- */

typedef struct tied_case {
    int64_t samples, tokens, positions, rows, cols, padding;
} tied_case;

static const tied_case tied_cases[] = {{3, 5, 7, 11, 6, -1},    {1, 1, 1, 1, 1, -1},        {2, 70, 130, 50, 300, 4},
                                       {5, 64, 64, 9, 16, 0},   {0, 5, 7, 11, 6, -1},       {2, 0, 7, 11, 6, -1},
                                       {2, 5, 0, 11, 6, -1},    {2, 129, 63, 260, 257, -1}, {4, 65, 1, 70, 33, 3},
                                       {2, 1, 200, 1000, 5, -1}};
#define TIED_CASES ((int)TEST_COUNT(tied_cases))

typedef struct tied_trial {
    tied_case c;
    tch_layer layer;
    double *tokens, *h, *a, *g;
    test_tensor *inputs[4];
    test_tensor *norms;
    double *start; /* initial value of norms */
} tied_trial;

/* Tokens from slightly below 0 to slightly above the last row. */
static double *draw_tokens(test_random *random, const tied_case *c)
{
    double *tokens = test_zeros(c->samples * c->tokens);
    for (int64_t i = 0; i < c->samples * c->tokens; i++) {
        tokens[i] = (double)(int64_t)(test_random_bits(random) % (uint64_t)(c->rows + 2)) - 1;
    }
    return tokens;
}

static void tied_make(tied_trial *s, tch_context *context, const tied_case *c, tch_dtype dtype, test_layout layout,
                      uint64_t stream)
{
    test_random random = test_random_stream(stream);
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_EMBEDDING);
    const int64_t shapes[4][3] = {{c->samples, c->tokens, 1},
                                  {c->samples, c->tokens, c->cols},
                                  {c->samples, c->positions, c->cols},
                                  {c->samples, c->positions, c->rows}};
    s->c = *c;
    s->layer = layer;
    s->layer.rows = c->rows;
    s->layer.padding_index = c->padding;
    s->layer.scale = 0.75;
    s->tokens = draw_tokens(&random, c);
    s->h = normals(&random, c->samples * c->tokens * c->cols, dtype);
    s->a = normals(&random, c->samples * c->positions * c->cols, dtype);
    s->g = normals(&random, c->samples * c->positions * c->rows, dtype);
    s->start = normals(&random, c->samples, TCH_FLOAT64);
    tch_dtype token = stream % 2 == 0 ? TCH_INT32 : TCH_INT64;
    s->inputs[0] = tensor_of(context, token, 2, shapes[0], s->tokens, layout);
    s->inputs[1] = tensor_of(context, dtype, 3, shapes[1], s->h, layout);
    s->inputs[2] = tensor_of(context, dtype, 3, shapes[2], s->a, layout);
    s->inputs[3] = tensor_of(context, dtype, 3, shapes[3], s->g, layout);
    s->norms = tensor_of(context, TCH_FLOAT64, 1, shapes[0], s->start, LAYOUT_CONTIGUOUS);
}

/* 2 scale^2 <E, L> of sample b from both gradients, V by d; the bound is u (16 + d + positions) times the sum of the
 * terms' magnitudes: products over d are rounded, and so are their sums. */
static double tied_reference(const tied_trial *s, int64_t b, double unit, double *bound)
{
    const tied_case *c = &s->c;
    double *embedding = test_zeros(c->rows * c->cols);
    double *embedding_sizes = test_zeros(c->rows * c->cols);
    double sum = 0;
    *bound = 0;
    for (int64_t i = b * c->tokens; i < (b + 1) * c->tokens; i++) {
        int64_t token = (int64_t)s->tokens[i];
        for (int64_t k = 0; k < c->cols && token >= 0 && token < c->rows && token != c->padding; k++) {
            embedding[token * c->cols + k] += s->h[i * c->cols + k];
            embedding_sizes[token * c->cols + k] += fabs(s->h[i * c->cols + k]);
        }
    }
    for (int64_t v = 0; v < c->rows; v++) {
        for (int64_t k = 0; k < c->cols; k++) {
            double linear = 0;
            double size = 0;
            for (int64_t t = b * c->positions; t < (b + 1) * c->positions; t++) {
                linear += s->g[t * c->rows + v] * s->a[t * c->cols + k];
                size += fabs(s->g[t * c->rows + v] * s->a[t * c->cols + k]);
            }
            sum += embedding[v * c->cols + k] * linear;
            *bound += embedding_sizes[v * c->cols + k] * size;
        }
    }
    double factor = 2 * s->layer.scale * s->layer.scale;
    *bound *= factor * unit * (double)(16 + c->cols + c->positions + c->tokens);
    return factor * sum;
}

static void check_tied(tied_trial *s, tch_context *context, tch_dtype dtype, bool little)
{
    TEST_WITHIN_LIMITS(context, little,
                       tch_grad_tied_norms(context, &s->layer, &s->inputs[0]->tensor, &s->inputs[1]->tensor,
                                           &s->inputs[2]->tensor, &s->inputs[3]->tensor, &s->norms->tensor));
    double *got = test_tensor_read(s->norms);
    for (int64_t b = 0; b < s->c.samples; b++) {
        double bound;
        double expected = s->start[b] + tied_reference(s, b, test_arithmetic_roundoff(dtype), &bound);
        CHECK(fabs(got[b] - expected) <= bound + 1e-15 * fabs(s->start[b]),
              "norm %lld is %.17g, expected %.17g within %g", (long long)b, got[b], expected, bound);
    }
    for (int i = 0; i < 4; i++) {
        test_tensor_check_unchanged(s->inputs[i], "an input");
    }
}

TEST(the_cross_term_of_tied_weights)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < TIED_CASES; i++) {
        for (int k = 0; k < 4; k++) {
            for (int layout = LAYOUT_CONTIGUOUS; layout < LAYOUT_COUNT; layout++) {
                tied_trial s;
                if (layout != LAYOUT_CONTIGUOUS && (i + layout) % 4 != k) {
                    continue;
                }
                test_case("case %d, %s, %s", i, tch_dtype_name(dtypes[k]), test_layout_name((test_layout)layout));
                tied_make(&s, *state, &tied_cases[i], dtypes[k], (test_layout)layout, (uint64_t)(100 + i));
                check_tied(&s, *state, dtypes[k], false);
            }
        }
    }
}

/* The smallest sufficient workspace makes the call process samples one by one. */
TEST(the_cross_term_in_chunks)
{
    tch_context *context = *state;
    tied_case c = tied_cases[2];
    tied_trial s;
    c.samples = 5;
    test_case("a small workspace");
    tied_make(&s, context, &c, TCH_FLOAT32, LAYOUT_STEPPED, 300);
    check_tied(&s, context, TCH_FLOAT32, true);
}

/* --- clipping ---------------------------------------------------------------------------------------------------- */

TEST(weights_of_clipping)
{
    const double values[] = {0.0, 1.0, 4.0, 100.0, 1e-30, 1e300, INFINITY, NAN, -1e-12, -INFINITY, 2.25};
    for (int variant = 0; variant < 4; variant++) {
        const int64_t count = variant / 2 == 0 ? (int64_t)TEST_COUNT(values) : 0;
        int in_place = variant % 2;
        test_tensor *norms = tensor_of(*state, TCH_FLOAT64, 1, &count, values, LAYOUT_CONTIGUOUS);
        test_tensor *out = in_place ? norms : test_tensor_make(*state, TCH_FLOAT64, 1, &count, LAYOUT_CONTIGUOUS);
        test_case("%lld norms, %s", (long long)count, in_place ? "in place" : "apart");
        CHECK_OK(tch_grad_clip_weights(*state, &norms->tensor, 1.5, &out->tensor));
        double *got = test_tensor_read(out);
        for (int64_t i = 0; i < count; i++) {
            double norm = values[i] > 0 ? sqrt(values[i]) : 0;
            double expected = isfinite(values[i]) ? fmin(1.0, 1.5 / (norm + 1e-6)) : 0.0;
            CHECK(fabs(got[i] - expected) <= 4e-16 * expected, "weight %lld is %.17g, expected %.17g", (long long)i,
                  got[i], expected);
        }
        if (!in_place) {
            test_tensor_check_unchanged(norms, "norms");
        }
    }
}

/* --- natural gradient -------------------------------------------------------------------------------------------- */

/* x = (a + shift I)^-1 b by the eigenvectors of a. */
static double *solve_shifted(int64_t n, const double *a, double shift, const double *b)
{
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    double *x = test_zeros(n);
    ref_eigh(n, a, w, v);
    ref_matmul(n, n, 1, ref_power(n, w, v, shift, -1.0), b, x);
    return x;
}

/* J J' of random J, samples by 2 samples, in the order of the layout. */
static double *random_gram(test_random *random, int64_t n, tch_dtype dtype)
{
    double *j = normals(random, 2 * n * n, TCH_FLOAT64);
    double *transposed = test_zeros(2 * n * n);
    double *gram = test_zeros(n * n);
    ref_transpose(n, 2 * n, j, transposed);
    ref_matmul(n, 2 * n, n, j, transposed, gram);
    for (int64_t i = 0; i < n * n; i++) {
        gram[i] = test_round(dtype, gram[i]);
    }
    return gram;
}

static void check_natural(tch_context *context, int64_t n, tch_dtype dtype, test_layout layout, int with_rhs)
{
    test_random random = test_random_stream((uint64_t)(600 + n));
    const int64_t shape[] = {n, n};
    double damping = 0.1;
    double *a = random_gram(&random, n, dtype);
    double *b = normals(&random, n, TCH_FLOAT64);
    test_tensor *gram = tensor_of(context, dtype, 2, shape, a, layout);
    test_tensor *rhs = tensor_of(context, TCH_FLOAT64, 1, shape, b, LAYOUT_CONTIGUOUS);
    test_tensor *weights = test_tensor_make(context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(context, TCH_INT32, 0, shape, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_grad_natural_weights(context, &gram->tensor, with_rhs ? &rhs->tensor : NULL, damping, &weights->tensor,
                                      &report->tensor));
    double *flag = test_tensor_read(report);
    double *got = test_tensor_read(weights);
    CHECK(flag[0] == TCH_REPORT_OK, "the report is %g", flag[0]);
    for (int64_t i = 0; i < n; i++) {
        b[i] = with_rhs ? b[i] : 1.0;
    }
    double *expected = solve_shifted(n, a, (double)n * damping, b);
    for (int64_t i = 0; i < n; i++) { /* float64 with a condition below 1e3 */
        CHECK(fabs(got[i] - expected[i]) <= 1e-12, "weight %lld is %.15g, expected %.15g", (long long)i, got[i],
              expected[i]);
    }
    test_tensor_check_unchanged(gram, "gram");
}

TEST(natural_weights_of_many_sizes)
{
    const int64_t sizes[] = {0, 1, 2, 3, 17, 64, 65, 130};
    for (int i = 0; i < 8; i++) {
        for (int layout = LAYOUT_CONTIGUOUS; layout < LAYOUT_COUNT; layout++) {
            test_case("%lld samples, %s", (long long)sizes[i], test_layout_name((test_layout)layout));
            check_natural(*state, sizes[i], layout % 2 == 0 ? TCH_FLOAT64 : TCH_FLOAT32, (test_layout)layout, i % 2);
        }
    }
}

/* A bad matrix is reported, or without a report an error, and weights are unchanged. */
static void check_reported(tch_context *context, const double *values, tch_report expected)
{
    const int64_t shape[] = {2, 2};
    test_tensor *gram = tensor_of(context, TCH_FLOAT64, 2, shape, values, LAYOUT_CONTIGUOUS);
    test_tensor *weights = test_tensor_make(context, TCH_FLOAT64, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(context, TCH_INT32, 0, shape, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_grad_natural_weights(context, &gram->tensor, NULL, 0.5, &weights->tensor, &report->tensor));
    double *flag = test_tensor_read(report);
    CHECK(flag[0] == expected, "the report is %g, expected %d", flag[0], (int)expected);
    test_tensor_check_unchanged(weights, "weights");
    tch_status got = tch_grad_natural_weights(context, &gram->tensor, NULL, 0.5, &weights->tensor, NULL);
    test_check_refused(got, TCH_ERR_NUMERIC, "gram");
    test_tensor_check_unchanged(weights, "weights");
}

TEST(bad_gram_matrices)
{
    static const struct {
        const char *what;
        double values[4];
        tch_report expected;
    } rows[] = {
        {"NaN", {1, 0, 0, NAN}, TCH_REPORT_NOT_FINITE},
        {"infinite", {INFINITY, 0, 0, 1}, TCH_REPORT_NOT_FINITE},
        {"not symmetric", {1, 0.5, 0.2, 1}, TCH_REPORT_NOT_SYMMETRIC},
        {"negative", {1, 0, 0, -5}, TCH_REPORT_NOT_POSITIVE},
    };
    for (size_t i = 0; i < TEST_COUNT(rows); i++) {
        test_case("%s", rows[i].what);
        check_reported(*state, rows[i].values, rows[i].expected);
    }
}

TEST_MAIN(test_open_context, test_close_context)

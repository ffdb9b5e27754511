/* Norms of per-sample gradients whose positions cancel vs their exact values.
 *
 * A sample has its positions in threes, with inputs x + y, -x and -y and one output gradient, so that each three
 * cancels; and one more position, which therefore is the sample's gradient, g a'. Its size is a given fraction of |M|,
 * where M = sum of |g| |a|' over all positions, element by element. S is the squared norm, K the sum of the absolute
 * values of its terms <a_s, a_t> <g_s, g_t>. With a bias, inputs and output gradients are exchanged, so that its
 * gradient cancels too except for g, as if inputs had a column of ones.
 *
 *   inner products of positions   |error of S| <= 2 (T + d + p + 8) u |M|^2, and 4 2^-11 |M|^2 more if operands may
 *                                 be rounded to TF32; for K > 256 S it is recomputed
 *   recomputed by tiles           |error of the gradient| <= (T + 8) u |M| = e, of S: 2 e sqrt(S) + e^2
 *   tiles from the beginning      the same, with 2 2^-11 |M| more in e if operands may be rounded to TF32: a GPU's
 *                                 method for small layers
 *   recomputed in float64 (CPU)   as inner products of positions with u = 2^-53
 *   the bias alone (CPU)          as tiles, of one column of ones
 *
 * Sums on a GPU may overestimate K, and rounding may bring a sample over the limit: up to K = 512 S either method is
 * right, and the larger bound applies. */

#include <torchium/grad.h>

#include "support/elements.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static const double parts_left[] = {0.5, 1e-1, 1e-2, 1e-3, 1e-4};
#define SAMPLES ((int64_t)(sizeof parts_left / sizeof parts_left[0]))

typedef struct cancelling_case {
    tch_context *context;
    tch_dtype dtype;
    int64_t groups, positions, d, p; /* T = 3 n + 1; d and p of one group */
    bool gram_on_gpu;                /* an H200 computes these norms by inner products of positions, others by tiles */
    int32_t rounded;
    int32_t bias; /* 1: its part of the norms too */
    uint64_t stream;
} cancelling_case;

/* One sample and group: rows for positions, as rounded to the dtype. */
typedef struct cancelling_matrices {
    double *a, *g;
} cancelling_matrices;

static double dot(int64_t n, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * y[i];
    }
    return sum;
}

static double dot_of_sizes(int64_t n, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += fabs(x[i] * y[i]);
    }
    return sum;
}

/* |M|^2 over the first `positions`, and K. */
static double magnitude(const cancelling_case *c, const cancelling_matrices *m, int64_t positions, double *size)
{
    double sum = 0;
    *size = 0;
    for (int64_t s = 0; s < positions; s++) {
        for (int64_t t = 0; t <= s; t++) {
            double times = s == t ? 1 : 2;
            const double *a = m->a + s * c->d;
            const double *g = m->g + s * c->p;
            double inputs = c->bias + dot(c->d, a, m->a + t * c->d);
            sum += times * (c->bias + dot_of_sizes(c->d, a, m->a + t * c->d)) * dot_of_sizes(c->p, g, m->g + t * c->p);
            *size += times * fabs(inputs * dot(c->p, g, m->g + t * c->p));
        }
    }
    return sum;
}

/* A number in [-1, 1) of so many bits: sums of two of them are exact. */
static double whole(test_random *random, int bits)
{
    return ldexp((double)(int64_t)(test_random_bits(random) >> (64 - bits - 1)), -bits) - 1.0;
}

/* Three rows of n that cancel, and three of m that are one. */
static void fill_three(const cancelling_case *c, test_random *random, const double *scales, int64_t n, double *a,
                       int64_t m, double *g)
{
    tch_dtype dtype = c->dtype; /* bits that leave room for the carry of a sum */
    int bits = dtype.bits == 64 ? 40 : dtype.bits == 32 ? 20 : tch_dtype_equal(dtype, TCH_FLOAT16) ? 9 : 6;
    for (int64_t j = 0; j < n; j++) {
        double x = scales[j] * whole(random, bits);
        double y = scales[j] * whole(random, bits);
        a[j] = x + y;
        a[n + j] = -x;
        a[2 * n + j] = -y;
    }
    for (int64_t j = 0; j < m; j++) {
        g[j] = g[m + j] = g[2 * m + j] = test_round(c->dtype, test_random_normal(random));
    }
}

/* The last position, `part` of the magnitude of the others. */
static void fill_last(const cancelling_case *c, test_random *random, double part, const cancelling_matrices *m)
{
    double size;
    double *a = m->a + (c->positions - 1) * c->d;
    double *g = m->g + (c->positions - 1) * c->p;
    test_random_fill_normal(random, a, c->d);
    test_random_fill_normal(random, g, c->p);
    double others = sqrt(magnitude(c, m, c->positions - 1, &size));
    double factor = part * others / sqrt(dot(c->d, a, a) * dot(c->p, g, g));
    for (int64_t j = 0; j < c->d; j++) {
        a[j] = test_round(c->dtype, factor * a[j]);
    }
    for (int64_t j = 0; j < c->p; j++) {
        g[j] = test_round(c->dtype, g[j]);
    }
}

/* Columns have their own scales, so that sums of few bits are rounded too. */
static cancelling_matrices make_matrices(const cancelling_case *c, test_random *random, double part)
{
    cancelling_matrices m = {test_alloc((size_t)(c->positions * c->d) * sizeof *m.a),
                             test_alloc((size_t)(c->positions * c->p) * sizeof *m.g)};
    int64_t canceling = c->bias ? c->p : c->d;
    double *scales = test_alloc((size_t)canceling * sizeof *scales);
    for (int64_t j = 0; j < canceling; j++) {
        scales[j] = ldexp(1.0, (int)(test_random_bits(random) % 9) - 4);
    }
    for (int64_t t = 0; t + 3 < c->positions; t += 3) {
        double *a = m.a + t * c->d;
        double *g = m.g + t * c->p;
        if (c->bias) {
            fill_three(c, random, scales, c->p, g, c->d, a);
        } else {
            fill_three(c, random, scales, c->d, a, c->p, g);
        }
    }
    fill_last(c, random, part, &m);
    return m;
}

static double bound_of(const cancelling_case *c, double square, double sum_of_sizes, double magnitude_square)
{
    bool wide = tch_dtype_equal(c->dtype, TCH_FLOAT64);
    bool rounded = c->rounded && !test_on_cpu() && tch_dtype_equal(c->dtype, TCH_FLOAT32);
    double u = test_arithmetic_roundoff(c->dtype);
    double length = 2.0 * (double)(c->positions + c->d + c->bias + c->p + 8);
    double tile = (double)(c->positions + 8) * u + (rounded && !c->gram_on_gpu ? 2 * 0x1p-11 : 0.0);
    double e = tile * sqrt(magnitude_square);
    double tiles = 2 * e * sqrt(square) + e * e;
    double again = test_on_cpu() && !wide ? length * 0x1p-53 * magnitude_square : tiles;
    double gram = (length * u + (rounded ? 4 * 0x1p-11 : 0.0)) * magnitude_square;
    return (sum_of_sizes > 512 * square ? again : fmax(gram, again)) + 0x1p-50 * square;
}

/* The error bound of the bias's part, which the CPU sums separately. */
static double bound_of_bias(const cancelling_case *c, const cancelling_matrices *m, double square)
{
    double of_ones = 0;
    for (int64_t j = 0; j < c->p; j++) {
        double sum = 0;
        for (int64_t t = 0; t < c->positions; t++) {
            sum += fabs(m->g[t * c->p + j]);
        }
        of_ones += sum * sum;
    }
    double e = (double)(c->positions + 8) * test_arithmetic_roundoff(c->dtype) * sqrt(of_ones);
    return c->bias && test_on_cpu() ? 2 * e * sqrt(square) + e * e : 0.0;
}

/* Expected norms and their bounds, and the samples' matrices written to tensors [B, T, d] for a linear layer, or [B,
 * groups d, T] for a convolution of one element. */
typedef struct cancelling_trial {
    double expected[sizeof parts_left / sizeof parts_left[0]], bound[sizeof parts_left / sizeof parts_left[0]];
    double *x, *y;
} cancelling_trial;

static void place(const cancelling_case *c, const double *rows, int64_t cols, int64_t sample, int64_t group,
                  double *out)
{
    for (int64_t t = 0; t < c->positions; t++) {
        for (int64_t j = 0; j < cols; j++) {
            int64_t channel = (sample * c->groups + group) * cols + j;
            int64_t at = c->groups == 1 ? (sample * c->positions + t) * cols + j : channel * c->positions + t;
            out[at] = rows[t * cols + j];
        }
    }
}

static void add_group(const cancelling_case *c, test_random *random, int64_t sample, int64_t group, cancelling_trial *t)
{
    double size;
    int64_t last = c->positions - 1;
    cancelling_matrices m = make_matrices(c, random, parts_left[sample]);
    double of_bias = dot(c->p, m.g + last * c->p, m.g + last * c->p);
    double square = (dot(c->d, m.a + last * c->d, m.a + last * c->d) + c->bias) * of_bias;
    double all = magnitude(c, &m, c->positions, &size);
    t->expected[sample] += square;
    t->bound[sample] += bound_of(c, square, size, all) + bound_of_bias(c, &m, of_bias);
    place(c, m.a, c->d, sample, group, t->x);
    place(c, m.g, c->p, sample, group, t->y);
}

static cancelling_trial make_trial(const cancelling_case *c)
{
    cancelling_trial t = {{0}, {0}, NULL, NULL};
    test_random random = test_random_stream(c->stream);
    int64_t rows = SAMPLES * c->groups * c->positions;
    t.x = test_alloc((size_t)(rows * c->d) * sizeof *t.x);
    t.y = test_alloc((size_t)(rows * c->p) * sizeof *t.y);
    for (int64_t i = 0; i < SAMPLES * c->groups; i++) {
        add_group(c, &random, i / c->groups, i % c->groups, &t);
    }
    return t;
}

static test_tensor *tensor_of(const cancelling_case *c, int64_t cols, const double *values)
{
    const int64_t linear[3] = {SAMPLES, c->positions, cols};
    const int64_t conv[3] = {SAMPLES, c->groups * cols, c->positions};
    test_tensor *t = test_tensor_make(c->context, c->dtype, 3, c->groups == 1 ? linear : conv, LAYOUT_CONTIGUOUS);
    test_tensor_write(t, values);
    return t;
}

static tch_layer layer_of(const cancelling_case *c)
{
    tch_layer layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR);
    if (c->groups > 1) {
        layer.kind = TCH_LAYER_CONV;
        layer.dims = 1;
        layer.groups = c->groups;
    }
    layer.rounded = c->rounded;
    return layer;
}

static void check_case(const cancelling_case *c)
{
    const int64_t samples = SAMPLES;
    tch_layer layer = layer_of(c);
    cancelling_trial t = make_trial(c);
    test_tensor *x = tensor_of(c, c->d, t.x);
    test_tensor *y = tensor_of(c, c->p, t.y);
    test_tensor *norms = test_tensor_make(c->context, TCH_FLOAT64, 1, &samples, LAYOUT_CONTIGUOUS);
    tch_grad_part parts = c->bias ? TCH_GRAD_BOTH : TCH_GRAD_WEIGHT;
    CHECK_OK(tch_grad_norms(c->context, &layer, &x->tensor, &y->tensor, parts, 0, &norms->tensor));
    double *got = test_tensor_read(norms);
    for (int64_t i = 0; i < samples; i++) {
        CHECK(fabs(got[i] - t.expected[i]) <= t.bound[i],
              "%g of the terms left: the squared norm is %.9g, expected %.9g, off by %.3g > %.3g of it", parts_left[i],
              got[i], t.expected[i], fabs(got[i] - t.expected[i]) / t.expected[i], t.bound[i] / t.expected[i]);
    }
}

/* Sizes for which the CPU computes norms by inner products of positions. */
TEST(norms_of_what_cancels)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    const cancelling_case sizes[] = {{.groups = 1, .positions = 10, .d = 40, .p = 33},
                                     {.groups = 2, .positions = 31, .d = 96, .p = 80},
                                     {.groups = 1, .positions = 199, .d = 256, .p = 260},
                                     {.groups = 1, .positions = 127, .d = 1024, .p = 1024, .gram_on_gpu = true},
                                     {.groups = 2, .positions = 127, .d = 1024, .p = 1024, .gram_on_gpu = true}};
    size_t count = sizeof sizes / sizeof sizes[0] - (test_on_cpu() ? 2 : 0);
    for (size_t i = 0; i < 2 * 8 * count; i++) {
        size_t k = i / 2;
        cancelling_case c = sizes[k / 8];
        c.context = *state;
        c.dtype = dtypes[k % 4];
        c.rounded = k / 4 % 2 == 0;
        if (c.rounded && test_on_cpu()) {
            continue; /* for GPUs */
        }
        c.bias = i % 2;
        c.stream = (c.bias ? 1400 : 1300) + k;
        test_case("case %zu, %s, rounded %d, bias %d", k / 8, tch_dtype_name(c.dtype), (int)c.rounded, (int)c.bias);
        check_case(&c);
    }
}

TEST_MAIN(test_open_context, test_close_context)

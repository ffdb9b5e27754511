/* Factors and scales vs plain loops over samples and positions in float64.
 *
 * A factor is a sum of N outer products, N samples or samples times positions: the error of an element is at most (N +
 * 8) u times the sum of absolute products, with u the unit roundoff; with `reduce`, whose rows are sums of T
 * themselves, (N + 2 T + 8) u. A scale is a mean of squares of Q_G S Q_A': the error of each coordinate is at most e =
 * (d + p + T + 8) u M with M the same product of absolute values, and of its square 3 e M. If operands may be rounded
 * to 11 bits, 2^-11 for each: 2^-10 for a factor, 2^-8 for a coordinate, which is a product of products. */
#include "support/elements.h"
#include "support/grad/layer_positions.h"
#include "support/linalg/reference.h"
#include "support/messages.h"
#include "support/random.h"
#include "support/testing.h"

#define LINEAR TCH_LAYER_INIT(TCH_LAYER_LINEAR)
#define CONV(dims_, k0, k1, k2, stride_, dilation_, before_, after_, groups_)                                          \
    {                                                                                                                  \
        .struct_size = sizeof(tch_layer), .kind = TCH_LAYER_CONV, .rounded = 1, .scale = 1.0, .dims = (dims_),         \
        .kernel = {k0, k1, k2}, .stride = {stride_, 1, 1}, .dilation = {dilation_, 1, 1}, .before = {before_, 0, 0},   \
        .after = {after_, 0, 0}, .groups = (groups_), .padding_index = -1, .normalized = 1, .eps = 1e-5                \
    }

static const test_layer_case layer_cases[] = {
    {"vectors", LINEAR, 5, 4, 3, {1}},
    {"one sample", LINEAR, 1, 3, 2, {1}},
    {"sequences", LINEAR, 3, 5, 7, {6}},
    {"one number", LINEAR, 4, 1, 1, {3}},
    {"wide", LINEAR, 7, 33, 17, {5}},
    {"larger", LINEAR, 9, 130, 65, {20}},
    {"conv1", CONV(1, 3, 1, 1, 2, 1, 1, 2, 1), 3, 2, 4, {7}},
    {"conv2", CONV(2, 3, 2, 1, 1, 2, 2, 0, 1), 2, 3, 5, {6, 4}},
    {"conv3", CONV(3, 2, 1, 2, 1, 1, 0, 1, 1), 2, 2, 3, {3, 2, 4}},
    {"grouped", CONV(2, 2, 2, 1, 1, 1, 1, 0, 2), 3, 4, 6, {3, 5}},
    {"depthwise", CONV(1, 3, 1, 1, 1, 1, 1, 1, 5), 4, 5, 10, {6}},
};
#define LAYER_CASES ((int)TEST_COUNT(layer_cases))

/* --- factors ----------------------------------------------------------------------------------------------------- */

typedef struct factor_trial {
    tch_dtype dtype, factor_dtype;
    tch_sharing sharing;
    int bias, rounded;
    double scale, alpha, beta;
    test_layout layout, factor_layout;
    bool little; /* with the least workspace that suffices */
} factor_trial;

static double roundoff(const factor_trial *t)
{
    bool wide = t->dtype.bits == 64 || t->factor_dtype.bits == 64;
    return wide ? 0x1p-53 : 0x1p-24;
}

/* `made`: operands computed by the library in float32, unlike half types, which are exact in 11 bits. */
static double rounding_of_operands(const factor_trial *t, bool made, double bound)
{
    bool may = t->rounded && !test_on_cpu() && roundoff(t) == 0x1p-24;
    return may && (made || t->dtype.bits == 32) ? bound : 0.0;
}

static test_tensor *square(tch_context *context, const factor_trial *t, int64_t groups, int64_t rows, int64_t cols,
                           uint64_t stream, double **before)
{
    int64_t shape[3] = {groups, rows, cols};
    test_tensor *f = groups > 1 ? test_tensor_make(context, t->factor_dtype, 3, shape, t->factor_layout)
                                : test_tensor_make(context, t->factor_dtype, 2, shape + 1, t->factor_layout);
    *before = test_alloc((size_t)f->count * sizeof(double) + 1);
    memset(*before, 0, (size_t)f->count * sizeof(double));
    if (t->beta != 0.0) {
        test_random random = test_random_stream(stream);
        test_random_fill_normal(&random, *before, f->count);
        for (int64_t g = 0; g < groups; g++) { /* symmetric where it is square: only one triangle need be read */
            for (int64_t k = 0; rows == cols && k < rows * rows; k++) {
                double *m = *before + g * rows * rows;
                m[k] = k / rows < k % rows ? m[k % rows * rows + k / rows] : m[k];
            }
        }
        for (int64_t k = 0; k < f->count; k++) {
            (*before)[k] = test_round(t->factor_dtype, (*before)[k]);
        }
        test_tensor_write(f, *before);
    }
    return f;
}

static void check_values(const test_tensor *f, const factor_trial *t, const double *before, const double *expected,
                         const double *sizes, double errors, const char *name)
{
    double *got = test_tensor_read(f);
    for (int64_t i = 0; i < f->count; i++) {
        double want = expected[i] + t->beta * before[i];
        double bound = errors * sizes[i] + 4.0 * roundoff(t) * (fabs(t->beta * before[i]) + fabs(expected[i])) +
                       2.0 * test_unit_roundoff(t->factor_dtype) * fabs(want) + 1e-37;
        CHECK(fabs(got[i] - want) <= bound, "%s: element %lld is %.17g, expected %.17g, off by %.3g > %.3g", name,
              (long long)i, got[i], want, fabs(got[i] - want), bound);
    }
}

static void check_symmetric(const test_tensor *f, int64_t n, const char *name)
{
    double *got = test_tensor_read(f);
    for (int64_t i = 0; i < f->count; i++) {
        int64_t k = i % (n * n);
        double mirrored = got[i - k + k % n * n + k / n];
        CHECK(got[i] == mirrored, "%s: element %lld is %.17g, its mirror image %.17g", name, (long long)i, got[i],
              mirrored);
    }
}

static double factor_errors(const factor_trial *t, const test_positions *r)
{
    int64_t rows = t->sharing == TCH_SHARING_EXPAND ? r->samples * r->positions : r->samples + 2 * r->positions;
    return (double)(rows + 8) * roundoff(t) + rounding_of_operands(t, t->sharing == TCH_SHARING_REDUCE, 0x1p-10);
}

static void check_factors(tch_context *context, const test_layer_case *c, const factor_trial *t)
{
    tch_layer layer = c->layer;
    layer.rounded = t->rounded;
    layer.scale = t->scale;
    test_positions r = test_positions_make(context, c, t->dtype, t->layout, 31);
    int64_t n = r.d + t->bias;
    double *before_a;
    double *before_g;
    test_tensor *fa = square(context, t, r.groups, n, n, 41, &before_a);
    test_tensor *fg = square(context, t, r.groups, r.p, r.p, 42, &before_g);
    TEST_WITHIN_LIMITS(context, t->little,
                       tch_grad_factors(context, &layer, &r.input->tensor, &r.gradient->tensor, t->bias, t->sharing,
                                        t->alpha, t->beta, &fa->tensor, &fg->tensor));
    test_tensor_check_unchanged(r.input, "input");
    test_tensor_check_unchanged(r.gradient, "output_gradient");
    test_tensor_check_written(fa, "input_factor");
    test_tensor_check_written(fg, "output_factor");
    int64_t most = r.groups * (n > r.p ? n * n : r.p * r.p);
    double *expected = test_alloc((size_t)most * sizeof *expected);
    double *sizes = test_alloc((size_t)most * sizeof *sizes);
    double *a = test_with_bias(&r, t->bias);
    test_reference_factor(&r, a, n, t->sharing, 1, t->alpha, expected, sizes);
    check_values(fa, t, before_a, expected, sizes, factor_errors(t, &r), "input_factor");
    test_reference_factor(&r, r.g, r.p, t->sharing, 0, t->alpha * t->scale * t->scale, expected, sizes);
    check_values(fg, t, before_g, expected, sizes, factor_errors(t, &r), "output_factor");
    check_symmetric(fa, n, "input_factor");
    check_symmetric(fg, r.p, "output_factor");
}

static void name_trial(const test_layer_case *c, const factor_trial *t, const char *what)
{
    test_case("%s: %s, %s to %s, %s, bias %d, rounded %d, scale %g, alpha %g, beta %g, %s to %s", what, c->name,
              tch_dtype_name(t->dtype), tch_dtype_name(t->factor_dtype),
              t->sharing == TCH_SHARING_EXPAND ? "expand" : "reduce", t->bias, t->rounded, t->scale, t->alpha, t->beta,
              test_layout_name(t->layout), test_layout_name(t->factor_layout));
}

TEST(factors_of_every_layer)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < LAYER_CASES * 4 * 2 * 2 * 2; i++) {
        const test_layer_case *c = &layer_cases[i / 32];
        factor_trial t = {.dtype = dtypes[i / 8 % 4], .sharing = i / 4 % 2, .bias = i / 2 % 2, .rounded = i % 2};
        t.factor_dtype = i / 4 % 3 == 0 ? TCH_FLOAT64 : TCH_FLOAT32;
        t.scale = i % 3 == 0 ? 1.0 : 3.5;
        t.alpha = i % 5 == 0 ? 1.0 : 0.3;
        t.beta = i % 7 < 2 ? 0.0 : 0.7;
        name_trial(c, &t, "factors");
        check_factors(*state, c, &t);
    }
}

TEST(factors_of_every_layout)
{
    for (int i = 0; i < 2 * LAYOUT_COUNT * LAYOUT_COUNT; i++) {
        const test_layer_case *c = &layer_cases[i % 2 == 0 ? 2 : 7];
        factor_trial t = {.dtype = TCH_FLOAT32, .factor_dtype = TCH_FLOAT32, .sharing = i / 3 % 2, .bias = 1};
        t.scale = 1.0;
        t.alpha = 0.05;
        t.beta = 0.95;
        t.layout = i / 2 % LAYOUT_COUNT;
        t.factor_layout = i / 2 / LAYOUT_COUNT;
        name_trial(c, &t, "factors");
        check_factors(*state, c, &t);
    }
}

/* Batches that exceed the workspace are processed a few samples at a time, within the same bounds. */
static const test_layer_case many_cases[] = {
    {"many vectors", LINEAR, 700, 6, 5, {1}},
    {"many sequences", LINEAR, 90, 7, 4, {6}},
    {"many images", CONV(2, 2, 2, 1, 1, 1, 1, 0, 1), 60, 2, 3, {4, 3}},
    {"many grouped", CONV(1, 2, 1, 1, 1, 1, 0, 0, 2), 150, 4, 4, {5}},
};
#define MANY_CASES ((int)TEST_COUNT(many_cases))

static void put(test_tensor *t, int64_t index, double value)
{
    double *values = test_tensor_read(t);
    values[index] = value;
    test_tensor_write(t, values);
}

/* Each factor alone, without the other's operands, is bitwise the same. */
TEST(one_factor_at_a_time)
{
    const test_layer_case *c = &layer_cases[2];
    factor_trial t = {.factor_dtype = TCH_FLOAT32, .beta = 0.5};
    test_positions r = test_positions_make(*state, c, TCH_FLOAT32, LAYOUT_CONTIGUOUS, 37);
    test_tensor *f[4];
    double *before;
    for (int i = 0; i < 4; i++) {
        int64_t n = i % 2 == 0 ? r.d : r.p;
        f[i] = square(*state, &t, 1, n, n, (uint64_t)(47 + i % 2), &before);
    }
    tch_sharing sharing = TCH_SHARING_REDUCE;
    test_case("one factor at a time");
    CHECK_OK(tch_grad_factors(*state, &c->layer, &r.input->tensor, &r.gradient->tensor, 0, sharing, 1.0, 0.5,
                              &f[0]->tensor, &f[1]->tensor));
    CHECK_OK(tch_grad_factors(*state, &c->layer, &r.input->tensor, NULL, 0, sharing, 1.0, 0.5, &f[2]->tensor, NULL));
    CHECK_OK(tch_grad_factors(*state, &c->layer, NULL, &r.gradient->tensor, 0, sharing, 1.0, 0.5, NULL, &f[3]->tensor));
    for (int i = 0; i < 2; i++) {
        double *both = test_tensor_read(f[i]);
        double *alone = test_tensor_read(f[i + 2]);
        CHECK(memcmp(both, alone, (size_t)f[i]->count * sizeof *both) == 0, "factor %d differs", i);
    }
}

/* --- scales ------------------------------------------------------------------------------------------------------ */

/* Random orthogonal rows: eigenvectors of a random symmetric matrix. */
static test_tensor *basis(tch_context *context, tch_dtype dtype, int64_t groups, int64_t n, uint64_t stream, double **q)
{
    int64_t shape[3] = {groups, n, n};
    test_random random = test_random_stream(stream);
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    double *a = test_alloc((size_t)(n * n) * sizeof *a);
    double *v = test_alloc((size_t)(n * n) * sizeof *v);
    *q = test_alloc((size_t)(groups * n * n) * sizeof **q);
    ref_spectrum(n, 10.0, spectrum);
    for (int64_t g = 0; g < groups; g++) {
        ref_symmetric(&random, n, spectrum, a);
        ref_eigh(n, a, spectrum, v);
        ref_transpose(n, n, v, *q + g * n * n);
    }
    for (int64_t i = 0; i < groups * n * n; i++) {
        (*q)[i] = test_round(dtype, (*q)[i]);
    }
    test_tensor *t = groups > 1 ? test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS)
                                : test_tensor_make(context, dtype, 2, shape + 1, LAYOUT_CONTIGUOUS);
    test_tensor_write(t, *q);
    return t;
}

static void check_scales(tch_context *context, const test_layer_case *c, const factor_trial *t)
{
    tch_layer layer = c->layer;
    layer.rounded = t->rounded;
    layer.scale = t->scale;
    test_positions r = test_positions_make(context, c, t->dtype, t->layout, 51);
    int64_t n = r.d + t->bias;
    double *before;
    double *qa;
    double *qg;
    test_tensor *scales = square(context, t, r.groups, r.p, n, 52, &before);
    test_tensor *input_basis = basis(context, t->factor_dtype, r.groups, n, 53, &qa);
    test_tensor *output_basis = basis(context, t->factor_dtype, r.groups, r.p, 54, &qg);
    TEST_WITHIN_LIMITS(context, t->little,
                       tch_grad_scales(context, &layer, &r.input->tensor, &r.gradient->tensor, t->bias,
                                       &input_basis->tensor, &output_basis->tensor, t->alpha, t->beta,
                                       &scales->tensor));
    test_tensor_check_unchanged(r.input, "input");
    test_tensor_check_unchanged(r.gradient, "output_gradient");
    test_tensor_check_unchanged(input_basis, "input_basis");
    test_tensor_check_unchanged(output_basis, "output_basis");
    test_tensor_check_written(scales, "scales");
    double *a = test_with_bias(&r, t->bias);
    double *expected = test_alloc((size_t)scales->count * sizeof *expected);
    double *sizes = test_alloc((size_t)scales->count * sizeof *sizes);
    test_reference_scales(&r, a, n, qa, qg, t->alpha * t->scale * t->scale / (double)r.samples, expected, sizes);
    double u = roundoff(t);
    double errors = 3.0 * ((double)(n + r.p + r.positions + 8) * u + rounding_of_operands(t, true, 0x1p-8));
    check_values(scales, t, before, expected, sizes, errors + (double)(r.samples + 8) * u, "scales");
}

TEST(scales_of_every_layer)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    for (int i = 0; i < LAYER_CASES * 4 * 2 * 2; i++) {
        const test_layer_case *c = &layer_cases[i / 16];
        factor_trial t = {.dtype = dtypes[i / 4 % 4], .bias = i / 2 % 2, .rounded = i % 2, .scale = 2.0, .alpha = 0.25};
        t.factor_dtype = i / 4 % 3 == 0 ? TCH_FLOAT64 : TCH_FLOAT32;
        t.beta = i % 3 == 0 ? 0.0 : 0.75;
        t.factor_layout = i % 5 == 0 ? LAYOUT_TRANSPOSED : LAYOUT_CONTIGUOUS;
        t.layout = i % 7 == 0 ? LAYOUT_STEPPED : LAYOUT_CONTIGUOUS;
        if (c->inputs * c->outputs <= 300) { /* the reference takes their square */
            name_trial(c, &t, "scales");
            check_scales(*state, c, &t);
        }
    }
}

TEST(little_memory)
{
    for (int i = 0; i < MANY_CASES * 4; i++) {
        const test_layer_case *c = &many_cases[i / 4];
        factor_trial t = {.dtype = i % 2 == 0 ? TCH_FLOAT32 : TCH_BFLOAT16, .factor_dtype = TCH_FLOAT32, .bias = 1};
        t.sharing = i / 2 % 2;
        t.layout = LAYOUT_STEPPED;
        t.scale = t.alpha = 1.0;
        t.little = true;
        name_trial(c, &t, "little memory");
        check_factors(*state, c, &t);
        t.layout = LAYOUT_CONTIGUOUS;
        if (i % 4 == 1) {
            check_scales(*state, c, &t);
        }
    }
}

/* --- unchanged outputs ------------------------------------------------------------------------------------------- */

/* Both factors and scales are unchanged if an update is not finite, or empty. */
TEST(bad_and_empty_batches_change_nothing)
{
    static const test_layer_case none = {"no samples", LINEAR, 0, 4, 3, {2}};
    static const test_layer_case nowhere = {"no positions", LINEAR, 3, 4, 3, {0}};
    const test_layer_case *const cases[] = {&layer_cases[2], &layer_cases[9], &none, &nowhere};
    for (int i = 0; i < 16; i++) {
        const test_layer_case *c = cases[i / 4];
        bool empty = c->samples == 0 || c->size[0] == 0;
        factor_trial t = {.dtype = TCH_FLOAT32, .factor_dtype = TCH_FLOAT32, .bias = 1, .scale = 1.0, .beta = 0.5};
        test_positions r = test_positions_make(*state, c, t.dtype, LAYOUT_CONTIGUOUS, 33);
        double *before, *qa, *qg;
        test_tensor *fa = square(*state, &t, r.groups, r.d + 1, r.d + 1, 43, &before);
        test_tensor *fg = square(*state, &t, r.groups, r.p, r.p, 44, &before);
        test_tensor *scales = square(*state, &t, r.groups, r.p, r.d + 1, 56, &before);
        test_tensor *input_basis = basis(*state, t.factor_dtype, r.groups, r.d + 1, 57, &qa);
        test_tensor *output_basis = basis(*state, t.factor_dtype, r.groups, r.p, 58, &qg);
        test_case("%s, %s in %s", c->name, i % 2 == 0 ? "NaN" : "infinity", i / 2 % 2 == 0 ? "input" : "gradient");
        if (!empty) {
            put(i / 2 % 2 == 0 ? r.input : r.gradient, 3, i % 2 == 0 ? NAN : INFINITY);
        }
        CHECK_OK(tch_grad_factors(*state, &c->layer, &r.input->tensor, &r.gradient->tensor, 1, TCH_SHARING_EXPAND, 0.5,
                                  0.5, &fa->tensor, &fg->tensor));
        CHECK_OK(tch_grad_scales(*state, &c->layer, &r.input->tensor, &r.gradient->tensor, 1, &input_basis->tensor,
                                 &output_basis->tensor, 0.5, 0.5, &scales->tensor));
        test_tensor_check_unchanged(fa, "input_factor");
        test_tensor_check_unchanged(fg, "output_factor");
        test_tensor_check_unchanged(scales, "scales");
    }
}

/* --- refused ----------------------------------------------------------------------------------------------------- */

TEST(bad_arguments_are_named)
{
    const test_layer_case *c = &layer_cases[2];
    factor_trial t = {.factor_dtype = TCH_FLOAT32, .beta = 0.5};
    test_positions r = test_positions_make(*state, c, TCH_FLOAT32, LAYOUT_CONTIGUOUS, 61);
    tch_tensor *x = &r.input->tensor;
    tch_tensor *g = &r.gradient->tensor;
    double *before;
    test_tensor *f = square(*state, &t, 1, r.d, r.d, 62, &before);
    tch_layer norm = TCH_LAYER_INIT(TCH_LAYER_LAYER_NORM);
    test_case("bad arguments");
    test_check_refused(tch_grad_factors(*state, &c->layer, x, g, 1, TCH_SHARING_EXPAND, 1.0, 0.0, &f->tensor, NULL),
                       TCH_ERR_SHAPE, "input_factor");
    test_check_refused(tch_grad_factors(*state, &c->layer, x, g, 0, TCH_SHARING_EXPAND, 1.0, 0.0, NULL, &f->tensor),
                       TCH_ERR_SHAPE, "output_factor");
    test_check_refused(tch_grad_factors(*state, &c->layer, NULL, g, 0, TCH_SHARING_EXPAND, 1.0, 0.0, &f->tensor, NULL),
                       TCH_ERR_INVALID_ARGUMENT, "input");
    test_check_refused(tch_grad_factors(*state, &c->layer, x, g, 0, TCH_SHARING_COUNT, 1.0, 0.0, &f->tensor, NULL),
                       TCH_ERR_INVALID_ARGUMENT, "sharing");
    test_check_refused(tch_grad_factors(*state, &c->layer, x, g, 0, TCH_SHARING_EXPAND, NAN, 0.0, &f->tensor, NULL),
                       TCH_ERR_INVALID_ARGUMENT, "alpha");
    test_check_refused(
        tch_grad_factors(*state, &c->layer, x, g, 0, TCH_SHARING_EXPAND, 1.0, INFINITY, &f->tensor, NULL),
        TCH_ERR_INVALID_ARGUMENT, "beta");
    test_check_refused(tch_grad_factors(*state, &norm, x, x, 0, TCH_SHARING_EXPAND, 1.0, 0.0, &f->tensor, NULL),
                       TCH_ERR_UNSUPPORTED, "tch_grad_factors");
    test_check_refused(tch_grad_factors(*state, &c->layer, x, g, 0, TCH_SHARING_EXPAND, 1.0, 0.0, x, NULL),
                       TCH_ERR_SHAPE, "input_factor");
    test_tensor_check_unchanged(f, "input_factor");
}

TEST_MAIN(test_open_context, test_close_context)

/* See layer_positions.h. */
#include "layer_positions.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

static int64_t outputs_along(const tch_layer *layer, int32_t i, int64_t size)
{
    int64_t reach = layer->dilation[i] * (layer->kernel[i] - 1) + 1;
    return (size + layer->before[i] + layer->after[i] - reach) / layer->stride[i] + 1;
}

static double *random_values(int64_t count, tch_dtype dtype, uint64_t stream)
{
    test_random random = test_random_stream(stream);
    double *values = test_alloc((size_t)count * sizeof *values + 1);
    test_random_fill_normal(&random, values, count);
    for (int64_t i = 0; i < count; i++) {
        values[i] = test_round(dtype, values[i]);
    }
    return values;
}

static test_tensor *tensor_of(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                              test_layout layout, const double *values)
{
    test_tensor *t = test_tensor_make(context, dtype, ndim, shape, layout);
    test_tensor_write(t, values);
    return t;
}

/* Sizes and the like in three dimensions, those that are not there being 1. */
typedef struct window {
    int64_t size[3], out[3], kernel[3], stride[3], dilation[3], before[3];
} window;

static window window_of(const test_layer_case *c)
{
    window w = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
    for (int32_t i = 0; i < c->layer.dims; i++) {
        w.size[i] = c->size[i];
        w.kernel[i] = c->layer.kernel[i];
        w.stride[i] = c->layer.stride[i];
        w.dilation[i] = c->layer.dilation[i];
        w.before[i] = c->layer.before[i];
        w.out[i] = outputs_along(&c->layer, i, c->size[i]);
    }
    return w;
}

/* The element that output (o) sees through kernel element (k), or 0 outside. */
static double seen(const window *w, const double *channel, const int64_t *o, const int64_t *k)
{
    int64_t index = 0;
    for (int i = 0; i < 3; i++) {
        int64_t at = o[i] * w->stride[i] + k[i] * w->dilation[i] - w->before[i];
        if (at < 0 || at >= w->size[i]) {
            return 0.0;
        }
        index = index * w->size[i] + at;
    }
    return channel[index];
}

static void split(int64_t index, const int64_t *size, int64_t *at)
{
    for (int i = 2; i >= 0; i--) {
        at[i] = index % size[i];
        index /= size[i];
    }
}

static void unfold(const window *w, test_positions *r, const double *x)
{
    int64_t kernel = w->kernel[0] * w->kernel[1] * w->kernel[2];
    int64_t pixels = w->size[0] * w->size[1] * w->size[2];
    int64_t channels = r->d / kernel;
    for (int64_t row = 0; row < r->samples * r->groups * r->positions; row++) {
        int64_t o[3];
        split(row % r->positions, w->out, o);
        for (int64_t j = 0; j < r->d; j++) {
            int64_t k[3];
            split(j % kernel, w->kernel, k);
            int64_t channel = row / r->positions * channels + j / kernel;
            r->a[row * r->d + j] = seen(w, x + channel * pixels, o, k);
        }
    }
}

/* Channels [samples, groups, p, positions] into [samples, groups, positions, p]. */
static void turn(test_positions *r, const double *y)
{
    for (int64_t b = 0; b < r->samples * r->groups; b++) {
        for (int64_t t = 0; t < r->positions; t++) {
            for (int64_t i = 0; i < r->p; i++) {
                r->g[(b * r->positions + t) * r->p + i] = y[(b * r->p + i) * r->positions + t];
            }
        }
    }
}

static void make_conv(test_positions *r, tch_context *context, const test_layer_case *c, tch_dtype dtype,
                      test_layout layout, uint64_t stream)
{
    window w = window_of(c);
    int32_t ndim = 2 + c->layer.dims;
    int64_t in[5] = {c->samples, c->inputs, w.size[0], w.size[1], w.size[2]};
    int64_t out[5] = {c->samples, c->outputs, w.out[0], w.out[1], w.out[2]};
    r->groups = c->layer.groups;
    r->positions = w.out[0] * w.out[1] * w.out[2];
    r->d = c->inputs / r->groups * w.kernel[0] * w.kernel[1] * w.kernel[2];
    r->p = c->outputs / r->groups;
    double *x = random_values(c->samples * c->inputs * w.size[0] * w.size[1] * w.size[2], dtype, stream);
    double *y = random_values(c->samples * c->outputs * r->positions, dtype, stream + 1);
    r->a = test_alloc((size_t)(r->samples * r->groups * r->positions * r->d) * sizeof(double) + 1);
    r->g = test_alloc((size_t)(r->samples * r->groups * r->positions * r->p) * sizeof(double) + 1);
    unfold(&w, r, x);
    turn(r, y);
    r->input = tensor_of(context, dtype, ndim, in, layout, x);
    r->gradient = tensor_of(context, dtype, ndim, out, layout, y);
    test_drop(x);
    test_drop(y);
}

/* One position is a batch without a middle dimension, an even number two of them. */
static int32_t linear_shape(const test_layer_case *c, int64_t features, int64_t *shape)
{
    int32_t ndim = 0;
    shape[ndim++] = c->samples;
    if (c->size[0] > 1 && c->size[0] % 2 == 0) {
        shape[ndim++] = 2;
        shape[ndim++] = c->size[0] / 2;
    } else if (c->size[0] != 1) {
        shape[ndim++] = c->size[0];
    }
    shape[ndim++] = features;
    return ndim;
}

static void make_linear(test_positions *r, tch_context *context, const test_layer_case *c, tch_dtype dtype,
                        test_layout layout, uint64_t stream)
{
    int64_t in[4];
    int64_t out[4];
    int32_t ndim = linear_shape(c, c->inputs, in);
    linear_shape(c, c->outputs, out);
    r->groups = 1;
    r->positions = c->size[0];
    r->d = c->inputs;
    r->p = c->outputs;
    r->a = random_values(c->samples * r->positions * r->d, dtype, stream);
    r->g = random_values(c->samples * r->positions * r->p, dtype, stream + 1);
    r->input = tensor_of(context, dtype, ndim, in, layout, r->a);
    r->gradient = tensor_of(context, dtype, ndim, out, layout, r->g);
}

test_positions test_positions_make(tch_context *context, const test_layer_case *c, tch_dtype dtype, test_layout layout,
                                   uint64_t stream)
{
    test_positions r = {.samples = c->samples};
    if (c->layer.kind == TCH_LAYER_CONV) {
        make_conv(&r, context, c, dtype, layout, stream);
    } else {
        make_linear(&r, context, c, dtype, layout, stream);
    }
    return r;
}

/* --- curvature --------------------------------------------------------------------------------------------------- */

double *test_with_bias(const test_positions *r, int bias)
{
    int64_t rows = r->samples * r->groups * r->positions;
    int64_t n = r->d + bias;
    double *a = test_alloc((size_t)(rows * n) * sizeof *a + 1);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(a + i * n, r->a + i * r->d, (size_t)r->d * sizeof *a);
        a[i * n + n - 1] = bias ? 1.0 : a[i * n + n - 1];
    }
    return a;
}

/* Positions of each sample made one row: their sum times `factor`. */
static double *pooled(const test_positions *r, const double *x, int64_t n, double factor)
{
    double *y = test_alloc((size_t)(r->samples * r->groups * n) * sizeof *y + 1);
    for (int64_t b = 0; b < r->samples * r->groups; b++) {
        for (int64_t j = 0; j < n; j++) {
            double sum = 0.0;
            for (int64_t t = 0; t < r->positions; t++) {
                sum += x[(b * r->positions + t) * n + j];
            }
            y[b * n + j] = factor * sum;
        }
    }
    return y;
}

/* f [groups, n, n] = weight times the sum of x x' over samples and `rows` rows of each, and the same of |x| |x|'. */
static void outer_products(const test_positions *r, const double *x, int64_t rows, int64_t n, double weight, double *f,
                           double *sizes)
{
    memset(f, 0, (size_t)(r->groups * n * n) * sizeof *f);
    memset(sizes, 0, (size_t)(r->groups * n * n) * sizeof *sizes);
    for (int64_t b = 0; b < r->samples * r->groups * rows; b++) {
        int64_t h = b / rows % r->groups;
        for (int64_t k = 0; k < n * n; k++) {
            double product = x[b * n + k / n] * x[b * n + k % n];
            f[h * n * n + k] += weight * product;
            sizes[h * n * n + k] += fabs(weight * product);
        }
    }
}

void test_reference_factor(const test_positions *r, const double *x, int64_t n, tch_sharing sharing, int mean,
                           double alpha, double *f, double *sizes)
{
    double samples = (double)r->samples;
    double positions = (double)r->positions;
    if (sharing == TCH_SHARING_EXPAND) {
        outer_products(r, x, r->positions, n, alpha / (mean ? samples * positions : samples), f, sizes);
        return;
    }
    double *rows = pooled(r, x, n, mean ? 1.0 / positions : 1.0);
    double *absolute = test_alloc((size_t)(r->samples * r->groups * r->positions * n) * sizeof *absolute + 1);
    double *spare = test_alloc((size_t)(r->groups * n * n) * sizeof *spare + 1);
    for (int64_t i = 0; i < r->samples * r->groups * r->positions * n; i++) {
        absolute[i] = fabs(x[i]);
    }
    double *sizes_of_rows = pooled(r, absolute, n, mean ? 1.0 / positions : 1.0);
    outer_products(r, sizes_of_rows, 1, n, fabs(alpha) / samples, spare, sizes);
    outer_products(r, rows, 1, n, alpha / samples, f, spare);
    test_drop(rows);
    test_drop(absolute);
    test_drop(sizes_of_rows);
    test_drop(spare);
}

/* c (p by n) = the coordinates of one sample's gradient, or with `sizes` those of absolute values throughout. */
static void coordinates(const test_positions *r, int64_t b, const double *a, int64_t n, const double *qa,
                        const double *qg, int sizes, double *c)
{
    double *gradient = test_alloc((size_t)(r->p * n) * sizeof *gradient);
    for (int64_t k = 0; k < r->p * n; k++) {
        double sum = 0.0;
        for (int64_t t = 0; t < r->positions; t++) {
            int64_t row = b * r->positions + t;
            double product = r->g[row * r->p + k / n] * a[row * n + k % n];
            sum += sizes ? fabs(product) : product;
        }
        gradient[k] = sum;
    }
    for (int64_t k = 0; k < r->p * n; k++) {
        c[k] = 0.0;
        for (int64_t m = 0; m < r->p * n; m++) {
            double product = qg[k / n * r->p + m / n] * gradient[m] * qa[k % n * n + m % n];
            c[k] += sizes ? fabs(product) : product;
        }
    }
    test_drop(gradient);
}

void test_reference_scales(const test_positions *r, const double *a, int64_t n, const double *qa, const double *qg,
                           double weight, double *expected, double *sizes)
{
    int64_t each = r->p * n;
    double *c = test_alloc((size_t)each * sizeof *c);
    memset(expected, 0, (size_t)(r->groups * each) * sizeof *expected);
    memset(sizes, 0, (size_t)(r->groups * each) * sizeof *sizes);
    for (int64_t b = 0; b < r->samples * r->groups; b++) {
        int64_t h = b % r->groups;
        coordinates(r, b, a, n, qa + h * n * n, qg + h * r->p * r->p, 0, c);
        for (int64_t k = 0; k < each; k++) {
            expected[h * each + k] += weight * c[k] * c[k];
        }
        coordinates(r, b, a, n, qa + h * n * n, qg + h * r->p * r->p, 1, c);
        for (int64_t k = 0; k < each; k++) {
            sizes[h * each + k] += fabs(weight) * c[k] * c[k];
        }
    }
    test_drop(c);
}

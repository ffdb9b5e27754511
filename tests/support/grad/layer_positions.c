#include "layer_positions.h"

#include "support/elements.h"
#include "support/random.h"
#include "support/testing.h"

static int64_t product(const int64_t *sizes, int32_t count)
{
    int64_t all = 1;
    for (int32_t i = 0; i < count; i++) {
        all *= sizes[i];
    }
    return all;
}

/* --- positions --------------------------------------------------------------------------------------------------- */

int32_t test_gradient_shape(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                            int64_t *shape)
{
    memcpy(shape, input_shape, (size_t)ndim * sizeof *shape);
    if (layer->kind == TCH_LAYER_LINEAR) {
        shape[ndim - 1] = outputs;
    } else if (layer->kind == TCH_LAYER_EMBEDDING) {
        shape[ndim++] = outputs;
    } else if (layer->kind == TCH_LAYER_CONV) {
        shape[1] = outputs;
        for (int32_t i = 0; i < layer->dims; i++) {
            int64_t padded = input_shape[2 + i] + layer->before[i] + layer->after[i];
            shape[2 + i] = (padded - layer->dilation[i] * (layer->kernel[i] - 1) - 1) / layer->stride[i] + 1;
        }
    }
    return ndim;
}

/* The input index of an index in the padded input, or -1 for a zero. */
static int64_t folded(tch_padding padding, int64_t at, int64_t size)
{
    if (padding == TCH_PADDING_CIRCULAR) {
        return (at + size) % size;
    }
    if (padding == TCH_PADDING_REPLICATE) {
        return at < 0 ? 0 : at >= size ? size - 1 : at;
    }
    if (padding == TCH_PADDING_REFLECT) {
        return at < 0 ? -at : at >= size ? 2 * size - 2 - at : at;
    }
    return at < 0 || at >= size ? -1 : at;
}

/* The input index that output `o` sees through kernel element `k`, both flattened over all dimensions. */
static double seen(const tch_layer *layer, const int64_t *size, const int64_t *outputs, const double *channel,
                   int64_t o, int64_t k)
{
    int64_t offset = 0;
    int64_t step = 1;
    for (int32_t i = layer->dims - 1; i >= 0; i--) {
        int64_t at = o % outputs[i] * layer->stride[i] + k % layer->kernel[i] * layer->dilation[i] - layer->before[i];
        int64_t source = folded(layer->padding, at, size[i]);
        if (source < 0) {
            return 0.0;
        }
        offset += source * step;
        step *= size[i];
        o /= outputs[i];
        k /= layer->kernel[i];
    }
    return channel[offset];
}

/* Channels [samples, groups, p, positions] of y become [samples, groups, positions, p]. */
static void unfold(test_positions *r, const tch_layer *layer, const int64_t *size, const int64_t *outputs,
                   const double *x, const double *y)
{
    int64_t taps = product(layer->kernel, layer->dims);
    for (int64_t row = 0; row < r->samples * r->groups * r->positions; row++) {
        int64_t b = row / r->positions;
        int64_t t = row % r->positions;
        for (int64_t j = 0; j < r->d; j++) {
            const double *channel = x + (b * (r->d / taps) + j / taps) * product(size, layer->dims);
            r->a[row * r->d + j] = seen(layer, size, outputs, channel, t, j % taps);
        }
        for (int64_t i = 0; i < r->p; i++) {
            r->g[row * r->p + i] = y[(b * r->p + i) * r->positions + t];
        }
    }
}

test_positions test_positions_of(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                 const double *x, const double *y)
{
    int64_t shape[TCH_MAX_RANK + 1];
    bool conv = layer->kind == TCH_LAYER_CONV;
    test_gradient_shape(layer, ndim, input_shape, outputs, shape);
    test_positions r = {.samples = input_shape[0], .groups = conv ? layer->groups : 1};
    r.positions = conv ? product(shape + 2, layer->dims) : product(shape + 1, ndim - 2);
    r.d = conv ? input_shape[1] / r.groups * product(layer->kernel, layer->dims) : input_shape[ndim - 1];
    r.p = outputs / r.groups;
    int64_t rows = r.samples * r.groups * r.positions;
    r.a = test_zeros(rows * r.d);
    r.g = test_zeros(rows * r.p);
    if (conv) {
        unfold(&r, layer, input_shape + 2, shape + 2, x, y);
    } else {
        memcpy(r.a, x, (size_t)(rows * r.d) * sizeof *r.a);
        memcpy(r.g, y, (size_t)(rows * r.p) * sizeof *r.g);
    }
    return r;
}

/* --- random batches ---------------------------------------------------------------------------------------------- */

static test_tensor *random_tensor(tch_context *context, tch_dtype dtype, int32_t ndim, const int64_t *shape,
                                  test_layout layout, uint64_t stream, double **values)
{
    test_random random = test_random_stream(stream);
    int64_t count = product(shape, ndim);
    *values = test_zeros(count);
    test_random_fill_normal(&random, *values, count);
    for (int64_t i = 0; i < count; i++) {
        (*values)[i] = test_round(dtype, (*values)[i]);
    }
    test_tensor *t = test_tensor_make(context, dtype, ndim, shape, layout);
    test_tensor_write(t, *values);
    return t;
}

/* One position of a linear layer has no middle dimension; an even number has two. */
static int32_t input_shape_of(const test_layer_case *c, int64_t *shape)
{
    int32_t ndim = 0;
    shape[ndim++] = c->samples;
    if (c->layer.kind == TCH_LAYER_CONV) {
        shape[ndim++] = c->inputs;
        memcpy(shape + 2, c->size, sizeof c->size);
        return 2 + c->layer.dims;
    }
    if (c->size[0] > 1 && c->size[0] % 2 == 0) {
        shape[ndim++] = 2;
        shape[ndim++] = c->size[0] / 2;
    } else if (c->size[0] != 1) {
        shape[ndim++] = c->size[0];
    }
    shape[ndim++] = c->inputs;
    return ndim;
}

test_positions test_positions_make(tch_context *context, const test_layer_case *c, tch_dtype dtype, test_layout layout,
                                   uint64_t stream)
{
    int64_t in[TCH_MAX_RANK];
    int64_t out[TCH_MAX_RANK];
    double *x;
    double *y;
    int32_t ndim = input_shape_of(c, in);
    test_gradient_shape(&c->layer, ndim, in, c->outputs, out);
    test_tensor *input = random_tensor(context, dtype, ndim, in, layout, stream, &x);
    test_tensor *gradient = random_tensor(context, dtype, ndim, out, layout, stream + 1, &y);
    test_positions r = test_positions_of(&c->layer, ndim, in, c->outputs, x, y);
    r.input = input;
    r.gradient = gradient;
    return r;
}

bool test_limits_next(test_limits *l, tch_status status)
{
    if (status != TCH_ERR_OUT_OF_MEMORY || l->limit > (int64_t)1 << 30) {
        CHECK_OK(tch_context_set_workspace_limit(l->context, 0));
        return false;
    }
    if (l->little && l->limit == 0) {
        CHECK_OK(tch_memory_trim(l->context, 0));
    }
    l->limit = l->little ? l->limit + l->limit / 4 + 256 : INT64_MAX;
    CHECK_OK(tch_context_set_workspace_limit(l->context, l->little ? l->limit : 0));
    return true;
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

/* Concatenates the positions of each sample: their sum times `factor`. */
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
}

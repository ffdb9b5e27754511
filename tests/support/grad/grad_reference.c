/* See grad_reference.h. */
#include "grad_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/testing.h"

/* Where the gradients of sample b begin. */
static int64_t row_of(const grad_reference *r, int64_t b)
{
    return b * (r->weights + r->biases);
}

static int64_t product(const int64_t *sizes, int32_t count)
{
    int64_t all = 1;
    for (int32_t i = 0; i < count; i++) {
        all *= sizes[i];
    }
    return all;
}

/* --- linear ------------------------------------------------------------------------------------------------------ */

static void add_linear(grad_reference *r, double scale, const double *x, const double *g)
{
    for (int64_t b = 0; b < r->samples; b++) {
        for (int64_t t = 0; t < r->positions; t++) {
            const double *a = x + (b * r->positions + t) * r->inputs;
            const double *o = g + (b * r->positions + t) * r->outputs;
            for (int64_t i = 0; i < r->outputs; i++) {
                double *row = r->gradient + row_of(r, b) + i * r->inputs;
                double *size = r->magnitude + row_of(r, b) + i * r->inputs;
                for (int64_t j = 0; j < r->inputs; j++) {
                    row[j] += scale * o[i] * a[j];
                    size[j] += fabs(scale * o[i] * a[j]);
                }
            }
        }
    }
}

/* --- convolutions ------------------------------------------------------------------------------------------------ */

static void conv_outputs(const tch_layer *layer, const int64_t *input_shape, int64_t *sizes)
{
    for (int32_t i = 0; i < layer->dims; i++) {
        int64_t padded = input_shape[2 + i] + layer->before[i] + layer->after[i];
        sizes[i] = (padded - layer->dilation[i] * (layer->kernel[i] - 1) - 1) / layer->stride[i] + 1;
    }
}

/* The number in the padded input, which is made whole here, one dimension after the other. */
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

typedef struct conv {
    const tch_layer *layer;
    int64_t channels;
    int64_t size[3], out[3], kernel[3];
} conv;

/* x of one sample and channel at output `o` and tap `k`, both as numbers counted through three dimensions. */
static double seen(const conv *c, const double *channel, int64_t o, int64_t k)
{
    int64_t offset = 0;
    int64_t step = 1;
    for (int32_t i = c->layer->dims - 1; i >= 0; i--) {
        int64_t at =
            o % c->out[i] * c->layer->stride[i] + k % c->kernel[i] * c->layer->dilation[i] - c->layer->before[i];
        int64_t source = folded(c->layer->padding, at, c->size[i]);
        if (source < 0) {
            return 0.0;
        }
        offset += source * step;
        step *= c->size[i];
        o /= c->out[i];
        k /= c->kernel[i];
    }
    return channel[offset];
}

static void add_conv(grad_reference *r, const conv *c, double scale, const double *x, const double *g)
{
    int64_t taps = product(c->kernel, c->layer->dims);
    int64_t plane = product(c->size, c->layer->dims);
    int64_t of_group = c->channels / c->layer->groups;
    for (int64_t b = 0; b < r->samples; b++) {
        for (int64_t p = 0; p < r->outputs; p++) {
            const double *o = g + (b * r->outputs + p) * r->positions;
            int64_t group = p / (r->outputs / c->layer->groups);
            for (int64_t j = 0; j < r->inputs; j++) {
                const double *channel = x + (b * c->channels + group * of_group + j / taps) * plane;
                int64_t at = row_of(r, b) + p * r->inputs + j;
                for (int64_t t = 0; t < r->positions; t++) {
                    double term = scale * o[t] * seen(c, channel, t, j % taps);
                    r->gradient[at] += term;
                    r->magnitude[at] += fabs(term);
                }
            }
        }
    }
}

/* Element i of position t of a sample's output gradient: channels come before positions in a convolution. */
static void add_bias(grad_reference *r, const tch_layer *layer, const double *g)
{
    for (int64_t b = 0; b < r->samples; b++) {
        for (int64_t i = 0; i < r->outputs; i++) {
            int64_t to = row_of(r, b) + r->weights + i;
            for (int64_t t = 0; t < r->positions; t++) {
                int64_t at = layer->kind == TCH_LAYER_CONV ? (b * r->outputs + i) * r->positions + t
                                                           : (b * r->positions + t) * r->outputs + i;
                r->gradient[to] += layer->scale * g[at];
                r->magnitude[to] += fabs(layer->scale * g[at]);
            }
        }
    }
}

/* --- embeddings and normalizing layers --------------------------------------------------------------------------- */

typedef struct source {
    const tch_layer *layer;
    const double *x, *g;
    bool wide_statistics;
} source;

static void add_embedding(grad_reference *r, const source *s)
{
    for (int64_t i = 0; i < r->samples * r->positions; i++) {
        int64_t token = (int64_t)s->x[i];
        if (token < 0 || token >= s->layer->rows || token == s->layer->padding_index) {
            continue;
        }
        int64_t row = i / r->positions * r->weights + token * r->features;
        for (int64_t k = 0; k < r->features; k++) {
            double term = s->layer->scale * s->g[i * r->features + k];
            r->gradient[row + k] += term;
            r->magnitude[row + k] += fabs(term);
        }
    }
}

/* Number, in the input, of feature f at position p of a sample. */
static int64_t element_at(const grad_reference *r, const source *s, int64_t sample, int64_t p, int64_t f)
{
    int64_t inside = s->layer->kind == TCH_LAYER_GROUP_NORM ? f * r->positions + p : p * r->features + f;
    return sample * r->positions * r->features + inside;
}

/* Mean and root of the variance over the elements that are normalized together with feature f at position p. */
static void statistics(const grad_reference *r, const source *s, int64_t sample, int64_t p, int64_t f, double *mean,
                       double *root)
{
    bool group = s->layer->kind == TCH_LAYER_GROUP_NORM;
    int64_t width = group ? r->features / s->layer->groups : r->features;
    int64_t first_feature = group ? f / width * width : 0;
    int64_t first = group ? 0 : p;
    int64_t last = group ? r->positions : p + 1;
    int64_t count = width * (last - first);
    long double sum = 0;
    long double squares = 0;
    for (int64_t q = first; q < last; q++) {
        for (int64_t k = 0; k < width; k++) {
            sum += s->x[element_at(r, s, sample, q, first_feature + k)];
        }
    }
    long double m = s->layer->kind == TCH_LAYER_RMS_NORM ? 0 : sum / count;
    for (int64_t q = first; q < last; q++) {
        for (int64_t k = 0; k < width; k++) {
            long double d = s->x[element_at(r, s, sample, q, first_feature + k)] - m;
            squares += d * d;
        }
    }
    *mean = (double)m;
    *root = sqrt((double)(squares / count) + s->layer->eps);
}

/* What feature f at position p is normalized with, as a number from 0. */
static int64_t company(const grad_reference *r, const source *s, int64_t p, int64_t f)
{
    return s->layer->kind == TCH_LAYER_GROUP_NORM ? f / (r->features / s->layer->groups) : p;
}

/* Of one sample, for every company. */
static void every_statistic(const grad_reference *r, const source *s, int64_t sample, double *means, double *roots)
{
    for (int64_t p = 0; p < r->positions; p++) {
        for (int64_t f = 0; f < r->features; f++) {
            int64_t k = company(r, s, p, f);
            if (roots[k] == 0.0) {
                statistics(r, s, sample, p, f, &means[k], &roots[k]);
            }
        }
    }
}

static void add_normalizing(grad_reference *r, const source *s)
{
    for (int64_t b = 0; b < r->samples; b++) {
        double *means = test_zeros(r->positions + r->features);
        double *roots = test_zeros(r->positions + r->features);
        every_statistic(r, s, b, means, roots);
        for (int64_t f = 0; f < r->features; f++) {
            int64_t at = row_of(r, b) + f;
            for (int64_t p = 0; p < r->positions; p++) {
                double mean = means[company(r, s, p, f)];
                double root = roots[company(r, s, p, f)];
                double x = s->x[element_at(r, s, b, p, f)];
                double g = s->layer->scale * s->g[element_at(r, s, b, p, f)];
                double size = s->wide_statistics ? fabs(x - mean) : fabs(x) + fabs(mean);
                r->gradient[at] += (x - mean) / root * g;
                r->magnitude[at] += size / root * fabs(g);
                if (r->biases > 0) {
                    r->gradient[at + r->weights] += g;
                    r->magnitude[at + r->weights] += fabs(g);
                }
            }
        }
    }
}

/* --- every kind -------------------------------------------------------------------------------------------------- */

int32_t grad_reference_gradient_shape(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                      int64_t *shape)
{
    memcpy(shape, input_shape, (size_t)ndim * sizeof *shape);
    if (layer->kind == TCH_LAYER_CONV) {
        shape[1] = outputs;
        conv_outputs(layer, input_shape, shape + 2);
    } else if (layer->kind == TCH_LAYER_LINEAR) {
        shape[ndim - 1] = outputs;
    } else if (layer->kind == TCH_LAYER_EMBEDDING) {
        shape[ndim++] = outputs;
    }
    return ndim;
}

/* Sizes of a linear layer or a convolution, of which `c` has more. */
static void set_matrix_sizes(grad_reference *r, conv *c, int32_t ndim, const int64_t *shape)
{
    const tch_layer *layer = c->layer;
    int32_t dims = layer->kind == TCH_LAYER_CONV ? layer->dims : 0;
    if (dims > 0) {
        conv_outputs(layer, shape, c->out);
        c->channels = shape[1];
        memcpy(c->size, shape + 2, (size_t)dims * sizeof *c->size);
        memcpy(c->kernel, layer->kernel, sizeof c->kernel);
        memcpy(r->weight_shape + 3, layer->kernel, (size_t)dims * sizeof *shape);
    }
    r->positions = dims > 0 ? product(c->out, dims) : product(shape + 1, ndim - 2);
    r->weight_shape[1] = r->biases = r->outputs;
    r->weight_shape[2] = dims > 0 ? c->channels / layer->groups : shape[ndim - 1];
    r->weight_ndim = 3 + dims;
    r->inputs = product(r->weight_shape + 2, 1 + dims);
}

static void set_sizes(grad_reference *r, const tch_layer *layer, int32_t ndim, const int64_t *shape, int64_t cols)
{
    r->weight_ndim = 2;
    if (layer->kind == TCH_LAYER_EMBEDDING) {
        r->positions = product(shape + 1, ndim - 1);
        r->features = r->weight_shape[2] = cols;
        r->weight_shape[1] = layer->rows;
        r->weight_ndim = 3;
    } else if (layer->kind == TCH_LAYER_GROUP_NORM) {
        r->positions = product(shape + 2, ndim - 2);
        r->features = r->weight_shape[1] = shape[1];
    } else {
        int32_t inner = ndim - layer->normalized;
        r->positions = product(shape + 1, inner - 1);
        r->features = product(shape + inner, layer->normalized);
        memcpy(r->weight_shape + 1, shape + inner, (size_t)layer->normalized * sizeof *shape);
        r->weight_ndim = layer->normalized + 1;
    }
    bool biased = layer->kind == TCH_LAYER_LAYER_NORM || layer->kind == TCH_LAYER_GROUP_NORM;
    r->biases = biased ? product(r->weight_shape + 1, r->weight_ndim - 1) : 0;
}

grad_reference *grad_reference_make(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                    const double *x, const double *g, bool wide_statistics)
{
    grad_reference *r = test_alloc(sizeof *r);
    conv c = {.layer = layer};
    const source s = {layer, x, g, wide_statistics};
    bool matrix = layer->kind == TCH_LAYER_LINEAR || layer->kind == TCH_LAYER_CONV;
    *r = (grad_reference){.samples = input_shape[0], .outputs = matrix ? outputs : 0};
    r->weight_shape[0] = r->samples;
    if (matrix) {
        set_matrix_sizes(r, &c, ndim, input_shape);
    } else {
        set_sizes(r, layer, ndim, input_shape, outputs);
    }
    r->weights = product(r->weight_shape + 1, r->weight_ndim - 1);
    r->gradient = test_zeros(r->samples * (r->weights + r->biases));
    r->magnitude = test_zeros(r->samples * (r->weights + r->biases));
    if (layer->kind == TCH_LAYER_LINEAR) {
        add_linear(r, layer->scale, x, g);
    } else if (layer->kind == TCH_LAYER_CONV) {
        add_conv(r, &c, layer->scale, x, g);
    } else if (layer->kind == TCH_LAYER_EMBEDDING) {
        add_embedding(r, &s);
    } else {
        add_normalizing(r, &s);
    }
    if (matrix) {
        add_bias(r, layer, g);
    }
    return r;
}

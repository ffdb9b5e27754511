/* See grad_reference.h. */
#include "grad_reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/testing.h"

/* --- linear ------------------------------------------------------------------------------------------------------ */

static void add_linear(grad_reference *r, double scale, const double *x, const double *g)
{
    for (int64_t b = 0; b < r->samples; b++) {
        for (int64_t t = 0; t < r->positions; t++) {
            const double *a = x + (b * r->positions + t) * r->inputs;
            const double *o = g + (b * r->positions + t) * r->outputs;
            for (int64_t i = 0; i < r->outputs; i++) {
                double *row = r->weight + (b * r->outputs + i) * r->inputs;
                double *size = r->magnitude + (b * r->outputs + i) * r->inputs;
                for (int64_t j = 0; j < r->inputs; j++) {
                    row[j] += scale * o[i] * a[j];
                    size[j] += fabs(scale * o[i] * a[j]);
                }
            }
        }
    }
}

/* --- convolutions ------------------------------------------------------------------------------------------------ */

void grad_reference_outputs(const tch_layer *layer, const int64_t *input_shape, int64_t *sizes)
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

static int64_t product(const int64_t *sizes, int32_t count)
{
    int64_t all = 1;
    for (int32_t i = 0; i < count; i++) {
        all *= sizes[i];
    }
    return all;
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
                int64_t at = (b * r->outputs + p) * r->inputs + j;
                for (int64_t t = 0; t < r->positions; t++) {
                    double term = scale * o[t] * seen(c, channel, t, j % taps);
                    r->weight[at] += term;
                    r->magnitude[at] += fabs(term);
                }
            }
        }
    }
}

/* --- both -------------------------------------------------------------------------------------------------------- */

/* Element i of position t of a sample's output gradient: channels come before positions in a convolution. */
static void add_bias(grad_reference *r, const tch_layer *layer, const double *g)
{
    for (int64_t b = 0; b < r->samples; b++) {
        for (int64_t i = 0; i < r->outputs; i++) {
            for (int64_t t = 0; t < r->positions; t++) {
                int64_t at = layer->kind == TCH_LAYER_CONV ? (b * r->outputs + i) * r->positions + t
                                                           : (b * r->positions + t) * r->outputs + i;
                r->bias[b * r->outputs + i] += layer->scale * g[at];
                r->bias_magnitude[b * r->outputs + i] += fabs(layer->scale * g[at]);
            }
        }
    }
}

grad_reference *grad_reference_make(const tch_layer *layer, int32_t ndim, const int64_t *input_shape, int64_t outputs,
                                    const double *x, const double *g)
{
    grad_reference *r = test_alloc(sizeof *r);
    conv c = {.layer = layer};
    r->samples = input_shape[0];
    r->outputs = outputs;
    if (layer->kind == TCH_LAYER_CONV) {
        grad_reference_outputs(layer, input_shape, c.out);
        c.channels = input_shape[1];
        memcpy(c.size, input_shape + 2, (size_t)layer->dims * sizeof *c.size);
        memcpy(c.kernel, layer->kernel, sizeof c.kernel);
        r->positions = product(c.out, layer->dims);
        r->inputs = c.channels / layer->groups * product(c.kernel, layer->dims);
    } else {
        r->positions = product(input_shape + 1, ndim - 2);
        r->inputs = input_shape[ndim - 1];
    }
    r->weights = r->outputs * r->inputs;
    r->weight = test_zeros(r->samples * r->weights);
    r->magnitude = test_zeros(r->samples * r->weights);
    r->bias = test_zeros(r->samples * r->outputs);
    r->bias_magnitude = test_zeros(r->samples * r->outputs);
    if (layer->kind == TCH_LAYER_CONV) {
        add_conv(r, &c, layer->scale, x, g);
    } else {
        add_linear(r, layer->scale, x, g);
    }
    add_bias(r, layer, g);
    return r;
}

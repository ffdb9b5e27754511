#include "grad_reference.h"

#include "layer_positions.h"
#include "support/testing.h"

/* The offset of sample b's gradients. */
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

static void add_term(grad_reference *r, int64_t at, double term)
{
    r->gradient[at] += term;
    r->magnitude[at] += fabs(term);
}

/* --- linear layers and convolutions ------------------------------------------------------------------------------ */

static void add_positions(grad_reference *r, double scale, const test_positions *q)
{
    for (int64_t row = 0; row < q->samples * q->groups * q->positions; row++) {
        int64_t b = row / q->positions / q->groups;
        int64_t group = row / q->positions % q->groups;
        for (int64_t i = 0; i < q->p; i++) {
            double g = scale * q->g[row * q->p + i];
            int64_t output = group * q->p + i;
            for (int64_t j = 0; j < q->d; j++) {
                add_term(r, row_of(r, b) + output * q->d + j, g * q->a[row * q->d + j]);
            }
            add_term(r, row_of(r, b) + r->weights + output, g);
        }
    }
}

/* --- embeddings and normalization layers ------------------------------------------------------------------------- */

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
            add_term(r, row + k, s->layer->scale * s->g[i * r->features + k]);
        }
    }
}

/* The index in the input of feature f at position p of a sample. */
static int64_t element_at(const grad_reference *r, const source *s, int64_t sample, int64_t p, int64_t f)
{
    int64_t inside = s->layer->kind == TCH_LAYER_GROUP_NORM ? f * r->positions + p : p * r->features + f;
    return sample * r->positions * r->features + inside;
}

/* Mean and standard deviation over the elements normalized together with feature f at position p. */
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

/* The index of the normalization group of feature f at position p. */
static int64_t together(const grad_reference *r, const source *s, int64_t p, int64_t f)
{
    return s->layer->kind == TCH_LAYER_GROUP_NORM ? f / (r->features / s->layer->groups) : p;
}

/* Of one sample, for all groups. */
static void every_statistic(const grad_reference *r, const source *s, int64_t sample, double *means, double *roots)
{
    for (int64_t p = 0; p < r->positions; p++) {
        for (int64_t f = 0; f < r->features; f++) {
            int64_t k = together(r, s, p, f);
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
                double mean = means[together(r, s, p, f)];
                double root = roots[together(r, s, p, f)];
                double x = s->x[element_at(r, s, b, p, f)];
                double g = s->layer->scale * s->g[element_at(r, s, b, p, f)];
                double size = s->wide_statistics ? fabs(x - mean) : fabs(x) + fabs(mean);
                r->gradient[at] += (x - mean) / root * g;
                r->magnitude[at] += size / root * fabs(g);
                if (r->biases > 0) {
                    add_term(r, at + r->weights, g);
                }
            }
        }
    }
}

/* --- every kind -------------------------------------------------------------------------------------------------- */

static void set_product_sizes(grad_reference *r, const tch_layer *layer, const int64_t *shape, const test_positions *q)
{
    bool conv = layer->kind == TCH_LAYER_CONV;
    r->positions = q->positions;
    r->inputs = q->d;
    r->outputs = r->biases = r->weight_shape[1] = q->groups * q->p;
    r->weight_shape[2] = conv ? shape[1] / q->groups : q->d;
    r->weight_ndim = 3 + (conv ? layer->dims : 0);
    memcpy(r->weight_shape + 3, layer->kernel, sizeof layer->kernel);
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
    test_positions q;
    const source s = {layer, x, g, wide_statistics};
    bool products = layer->kind == TCH_LAYER_LINEAR || layer->kind == TCH_LAYER_CONV;
    *r = (grad_reference){.samples = input_shape[0]};
    r->weight_shape[0] = r->samples;
    if (products) {
        q = test_positions_of(layer, ndim, input_shape, outputs, x, g);
        set_product_sizes(r, layer, input_shape, &q);
    } else {
        set_sizes(r, layer, ndim, input_shape, outputs);
    }
    r->weights = product(r->weight_shape + 1, r->weight_ndim - 1);
    r->gradient = test_zeros(r->samples * (r->weights + r->biases));
    r->magnitude = test_zeros(r->samples * (r->weights + r->biases));
    if (products) {
        add_positions(r, layer->scale, &q);
        test_drop(q.a);
        test_drop(q.g);
    } else if (layer->kind == TCH_LAYER_EMBEDDING) {
        add_embedding(r, &s);
    } else {
        add_normalizing(r, &s);
    }
    return r;
}

/* See reference_network.h. */
#include "reference_network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/testing.h"

reference_network reference_network_make(const tch_network_config *config)
{
    reference_network net = {
        .layers = config->hidden_count + 1, .activation = config->activation, .loss = config->loss};
    net.width[0] = config->inputs;
    for (int k = 0; k < config->hidden_count; k++) {
        net.width[k + 1] = config->hidden[k];
    }
    net.width[net.layers] = config->outputs;
    for (int i = 0; i < 2 * net.layers; i++) {
        net.parameter[i] = test_zeros(reference_network_count(&net, i));
        net.gradient[i] = test_zeros(reference_network_count(&net, i));
    }
    return net;
}

int64_t reference_network_count(const reference_network *net, int index)
{
    int64_t outputs = net->width[index / 2 + 1];
    return index % 2 == 0 ? outputs * net->width[index / 2] : outputs;
}

static double apply(tch_activation activation, double z)
{
    switch (activation) {
    case TCH_ACTIVATION_RELU:
        return z < 0 ? 0 : z;
    case TCH_ACTIVATION_TANH:
        return tanh(z);
    case TCH_ACTIVATION_GELU:
        return 0.5 * z * erfc(-z / sqrt(2.0));
    default:
        return z;
    }
}

static double derivative(tch_activation activation, double z)
{
    switch (activation) {
    case TCH_ACTIVATION_RELU:
        return z > 0 ? 1 : 0;
    case TCH_ACTIVATION_TANH:
        return 1 - tanh(z) * tanh(z);
    case TCH_ACTIVATION_GELU:
        return 0.5 * erfc(-z / sqrt(2.0)) + z * exp(-0.5 * z * z) / sqrt(2.0 * acos(-1.0));
    default:
        return 1;
    }
}

static tch_activation activation_of(const reference_network *net, int layer)
{
    return layer + 1 < net->layers ? net->activation : TCH_ACTIVATION_NONE;
}

/* z = a W' + b */
static double *pre_activation(const reference_network *net, int layer, int64_t rows, const double *a)
{
    int64_t in = net->width[layer];
    int64_t out = net->width[layer + 1];
    double *z = test_zeros(rows * out);
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < out; o++) {
            double sum = net->parameter[2 * layer + 1][o];
            for (int64_t i = 0; i < in; i++) {
                sum += a[r * in + i] * net->parameter[2 * layer][o * in + i];
            }
            z[r * out + o] = sum;
        }
    }
    return z;
}

/* z and a = f(z) of every layer. */
typedef struct walk {
    double *z[REFERENCE_MOST_LAYERS];
    double *a[REFERENCE_MOST_LAYERS];
} walk;

static walk walk_forward(const reference_network *net, int64_t rows, const double *inputs)
{
    walk w;
    for (int k = 0; k < net->layers; k++) {
        int64_t count = rows * net->width[k + 1];
        w.z[k] = pre_activation(net, k, rows, k == 0 ? inputs : w.a[k - 1]);
        w.a[k] = test_zeros(count);
        for (int64_t i = 0; i < count; i++) {
            w.a[k][i] = apply(activation_of(net, k), w.z[k][i]);
        }
    }
    return w;
}

static void walk_free(const reference_network *net, walk *w)
{
    for (int k = 0; k < net->layers; k++) {
        test_drop(w->z[k]);
        test_drop(w->a[k]);
    }
}

double *reference_network_forward(const reference_network *net, int64_t rows, const double *inputs)
{
    walk w = walk_forward(net, rows, inputs);
    double *outputs = w.a[net->layers - 1];
    w.a[net->layers - 1] = NULL;
    walk_free(net, &w);
    return outputs;
}

static void cross_entropy(int64_t n, const double *y, double target, double *delta, double *totals)
{
    int64_t label = (int64_t)target;
    int64_t best = 0;
    double sum = 0;
    if (label < 0 || label >= n) {
        totals[TCH_TOTAL_SKIPPED] += 1;
        return;
    }
    for (int64_t j = 1; j < n; j++) {
        best = y[j] > y[best] ? j : best;
    }
    for (int64_t j = 0; j < n; j++) {
        sum += exp(y[j] - y[best]);
    }
    for (int64_t j = 0; j < n; j++) {
        delta[j] = exp(y[j] - y[best]) / sum - (j == label ? 1 : 0);
    }
    totals[TCH_TOTAL_LOSS] += log(sum) + y[best] - y[label];
    totals[TCH_TOTAL_RIGHT] += best == label;
    totals[TCH_TOTAL_ROWS] += 1;
}

static void squared(int64_t n, const double *y, const double *target, double *delta, double *totals)
{
    for (int64_t j = 0; j < n; j++) {
        delta[j] = 2 * (y[j] - target[j]) / (double)n;
        totals[TCH_TOTAL_LOSS] += (y[j] - target[j]) * (y[j] - target[j]) / (double)n;
    }
    totals[TCH_TOTAL_ROWS] += 1;
}

/* The gradients of a layer from its delta; returns the delta of its input. */
static double *backward(reference_network *net, int layer, int64_t rows, const double *a, const double *delta)
{
    int64_t in = net->width[layer];
    int64_t out = net->width[layer + 1];
    double *before = test_zeros(rows * in);
    memset(net->gradient[2 * layer], 0, (size_t)(in * out) * sizeof(double));
    memset(net->gradient[2 * layer + 1], 0, (size_t)out * sizeof(double));
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t o = 0; o < out; o++) {
            double d = delta[r * out + o];
            net->gradient[2 * layer + 1][o] += d / (double)rows;
            for (int64_t i = 0; i < in; i++) {
                net->gradient[2 * layer][o * in + i] += d * a[r * in + i] / (double)rows;
                before[r * in + i] += d * net->parameter[2 * layer][o * in + i];
            }
        }
    }
    return before;
}

void reference_network_loss(reference_network *net, int64_t rows, const double *inputs, const double *targets,
                            int with_gradients, double *totals)
{
    walk w = walk_forward(net, rows, inputs);
    int64_t n = net->width[net->layers];
    double *delta = test_zeros(rows * n);
    memset(totals, 0, TCH_NETWORK_TOTALS * sizeof *totals);
    for (int64_t r = 0; r < rows; r++) {
        const double *y = w.a[net->layers - 1] + r * n;
        if (net->loss == TCH_LOSS_CROSS_ENTROPY) {
            cross_entropy(n, y, targets[r], delta + r * n, totals);
        } else {
            squared(n, y, targets + r * n, delta + r * n, totals);
        }
    }
    for (int k = net->layers - 1; k >= 0 && with_gradients; k--) {
        double *before = backward(net, k, rows, k == 0 ? inputs : w.a[k - 1], delta);
        for (int64_t i = 0; k > 0 && i < rows * net->width[k]; i++) {
            before[i] *= derivative(net->activation, w.z[k - 1][i]);
        }
        test_drop(delta);
        delta = before;
    }
    test_drop(delta);
    walk_free(net, &w);
}

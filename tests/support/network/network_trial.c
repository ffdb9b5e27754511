#include "network_trial.h"

#include "support/fakes/counting_allocator.h"
#include "support/testing.h"

/* --- the reference ------------------------------------------------------------------------------------------------ */

/* Parameters and gradients of the config's shapes, all 0. */
static reference_network reference_network_make(const tch_network_config *config)
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

/* --- trials ------------------------------------------------------------------------------------------------------- */

static double *random_floats(test_random *random, int64_t count, double size)
{
    double *values = test_alloc((size_t)count * sizeof *values + 1);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)(float)(size * test_random_normal(random));
    }
    return values;
}

static void network_trial_write(tch_context *context, tch_tensor *tensor, const double *values)
{
    tch_tensor view = tch_tensor_view((void *)(uintptr_t)values, TCH_FLOAT64, tensor->ndim, tensor->shape);
    tch_context *host = NULL;
    tch_tensor *staged = NULL;
    CHECK_OK(tch_context_create("cpu", &host));
    CHECK_OK(tch_tensor_create(host, TCH_FLOAT32, tensor->ndim, tensor->shape, TCH_CONTIGUOUS, &staged));
    CHECK_OK(tch_tensor_copy(host, staged, &view));
    CHECK_OK(tch_tensor_copy(context, tensor, staged));
    CHECK_OK(tch_context_synchronize(context));
    tch_tensor_destroy(staged);
    tch_context_destroy(host);
}

double *network_trial_read(tch_context *context, const tch_tensor *tensor)
{
    int64_t count = tch_tensor_numel(tensor);
    float *staged = test_alloc((size_t)count * sizeof *staged + 1);
    double *values = test_alloc((size_t)count * sizeof *values + 1);
    tch_tensor view = tch_tensor_view(staged, TCH_FLOAT32, tensor->ndim, tensor->shape);
    CHECK_OK(tch_tensor_copy(context, &view, tensor));
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)staged[i];
    }
    test_drop(staged);
    return values;
}

/* Biases are random too, so that none can be omitted unnoticed. */
static void set_parameters(network_trial *s, test_random *random)
{
    for (int i = 0; i < 2 * s->reference.layers; i++) {
        int64_t count = reference_network_count(&s->reference, i);
        double size = i % 2 == 0 ? sqrt(1.5 / (double)s->reference.width[i / 2]) : 0.3;
        test_drop(s->reference.parameter[i]);
        s->reference.parameter[i] = random_floats(random, count, size);
        network_trial_write(s->context, tch_network_parameter(s->net, i), s->reference.parameter[i]);
    }
}

void network_trial_batch(network_trial *s, test_random *random, int64_t rows, test_layout layout)
{
    const int64_t input_shape[] = {rows, s->config.inputs};
    const int64_t target_shape[] = {rows, s->config.outputs};
    bool labels = s->config.loss == TCH_LOSS_CROSS_ENTROPY;
    int64_t target_count = labels ? rows : rows * s->config.outputs;
    s->rows = rows;
    s->x = random_floats(random, rows * s->config.inputs, 1.0);
    s->t = random_floats(random, target_count, 1.0);
    for (int64_t i = 0; i < rows && labels; i++) {
        s->t[i] = (double)(test_random_bits(random) % (uint64_t)s->config.outputs);
    }
    s->inputs = test_tensor_make(s->context, TCH_FLOAT32, 2, input_shape, layout);
    s->targets = labels ? test_tensor_make(s->context, TCH_INT32, 1, &rows, LAYOUT_CONTIGUOUS)
                        : test_tensor_make(s->context, TCH_FLOAT32, 2, target_shape, layout);
    test_tensor_write(s->inputs, s->x);
    test_tensor_write(s->targets, s->t);
}

static void destroy_network(void *network)
{
    tch_network_destroy(network);
}

tch_network_config network_trial_small_config(void)
{
    static const int64_t hidden[] = {5, 6, 4, 3, 8};
    tch_network_config config = TCH_NETWORK_CONFIG_INIT;
    config.inputs = 7;
    config.outputs = 3;
    config.hidden_count = 1;
    config.hidden = hidden;
    config.seed = 42;
    return config;
}

void network_trial_make(network_trial *s, tch_context *context, const tch_network_config *config, test_random *random)
{
    const int64_t four[] = {TCH_NETWORK_TOTALS};
    const double zeros[TCH_NETWORK_TOTALS] = {0};
    *s = (network_trial){.context = context, .config = *config, .reference = reference_network_make(config)};
    CHECK_OK(tch_network_create(context, config, &s->net));
    test_own(s->net, destroy_network);
    set_parameters(s, random);
    s->totals = test_tensor_make(context, TCH_FLOAT64, 1, four, LAYOUT_CONTIGUOUS);
    test_tensor_write(s->totals, zeros);
}

void network_trial_open(network_trial *s, tch_context *context, const tch_network_config *config, uint64_t stream,
                        int64_t rows)
{
    test_random random = test_random_stream(stream);
    network_trial_make(s, context, config, &random);
    network_trial_batch(s, &random, rows, LAYOUT_CONTIGUOUS);
}

void network_trial_clear(network_trial *s)
{
    CHECK_OK(tch_tensor_fill(s->context, &s->totals->tensor, 0.0));
}

void network_trial_poison(network_trial *s)
{
    for (int i = 0; i < 2 * s->reference.layers; i++) {
        CHECK_OK(tch_tensor_fill(s->context, tch_network_gradient(s->net, i), (double)NAN));
    }
}

int64_t network_trial_requests(tch_context *context)
{
    tch_memory_info info = TCH_MEMORY_INFO_INIT;
    CHECK_OK(tch_memory_get_info(context, &info));
    return info.requests;
}

tch_status network_trial_loss(network_trial *s)
{
    return tch_network_loss_and_gradients(s->net, &s->inputs->tensor, &s->targets->tensor, NULL, &s->totals->tensor);
}

void network_trial_each_allocation(bool (*call)(long long allocation))
{
    bool through = false;
    for (long long k = 1; !through; k++) {
        test_case("allocation %lld", k);
        CHECK(k <= 200, "it never gets by");
        through = call(k);
        test_counting_check_empty();
    }
}

bool network_trial_disarm(long long allocation, tch_status status)
{
    bool through = atomic_load(&test_counting.calls) < allocation;
    counting_allocator_arm(&test_counting, 0);
    CHECK(status == (through ? TCH_OK : TCH_ERR_OUT_OF_MEMORY), "gave %s (%s)", tch_status_name(status),
          tch_last_error());
    return through;
}

double network_trial_largest(int64_t count, const double *values)
{
    double size = 0;
    for (int64_t i = 0; i < count; i++) {
        size = fmax(size, fabs(values[i]));
    }
    return size;
}

void network_trial_close(const char *name, int64_t count, const double *got, const double *wanted, double tolerance)
{
    double unit = network_trial_largest(count, wanted) + 1e-6;
    for (int64_t i = 0; i < count; i++) {
        CHECK(fabs(got[i] - wanted[i]) <= tolerance * unit, "%s [%lld] is %.9g, expected %.9g (largest %.3g)", name,
              (long long)i, got[i], wanted[i], unit);
    }
}

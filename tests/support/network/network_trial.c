/* See network_trial.h. */
#include "network_trial.h"

#include <math.h>
#include <stdlib.h>

#include "support/fakes/counting_allocator.h"
#include "support/testing.h"

static double *random_floats(test_random *random, int64_t count, double size)
{
    double *values = test_alloc((size_t)count * sizeof *values + 1);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (double)(float)(size * test_random_normal(random));
    }
    return values;
}

void network_trial_write(tch_context *context, tch_tensor *tensor, const double *values)
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

/* Biases are random too, so that none of them can be forgotten. */
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

/* A network after a batch: each layer's input and output gradient vs single samples in float64, weighted sums of
 * gradients, and labels sampled by the network. test_network.c tests failed allocations. */

#include <torchium/network.h>

#include "support/messages.h"
#include "support/network/network_trial.h"
#include "support/testing.h"

static tch_network_config tanh_config(void)
{
    tch_network_config config = network_trial_small_config();
    config.activation = TCH_ACTIVATION_TANH;
    return config;
}

/* Gradients of row `row` alone, in the reference. */
static void reference_sample(network_trial *s, int64_t row)
{
    double totals[TCH_NETWORK_TOTALS];
    int64_t targets = s->config.loss == TCH_LOSS_CROSS_ENTROPY ? 1 : s->config.outputs;
    reference_network_loss(&s->reference, 1, s->x + row * s->config.inputs, s->t + row * targets, 1, totals);
}

static tch_network_layer layer_of(network_trial *s, int32_t index)
{
    tch_network_layer at = TCH_NETWORK_LAYER_INIT;
    CHECK_OK(tch_network_get_layer(s->net, index, &at));
    at.layer.rounded = 0;
    return at;
}

/* --- views ------------------------------------------------------------------------------------------------------- */

/* With one sample the bias's gradient is the output gradient g, and the weight's is g a': together they determine both.
 * Errors as in test_network.c: chains of short float32 sums, below 1e-5 of the largest. */
static void check_layer(network_trial *s, int32_t index, int64_t row)
{
    tch_network_layer at = layer_of(s, index);
    int64_t in = s->reference.width[index];
    int64_t out = s->reference.width[index + 1];
    double *a = network_trial_read(s->context, at.input);
    double *g = network_trial_read(s->context, at.output_gradient);
    double *product = test_alloc((size_t)(in * out) * sizeof *product);
    for (int64_t o = 0; o < out; o++) {
        g[row * out + o] *= at.layer.scale;
        for (int64_t i = 0; i < in; i++) {
            product[o * in + i] = g[row * out + o] * a[row * in + i];
        }
    }
    network_trial_close("output_gradient", out, g + row * out, s->reference.gradient[2 * index + 1], 1e-5);
    network_trial_close("output_gradient input'", in * out, product, s->reference.gradient[2 * index], 1e-5);
    if (index == 0) {
        network_trial_close("input", in, a + row * in, s->x + row * in, 0.0);
    }
}

static void check_layers(network_trial *s)
{
    assert_int_equal(tch_network_layer_count(s->net), s->reference.layers);
    for (int32_t k = 0; k < s->reference.layers; k++) {
        tch_network_layer at = layer_of(s, k);
        const int64_t shapes[2][2] = {{s->rows, s->reference.width[k]}, {s->rows, s->reference.width[k + 1]}};
        CHECK(at.layer.kind == TCH_LAYER_LINEAR && at.layer.scale == (double)(s->rows > 0 ? s->rows : 1),
              "layer %d has kind %d and scale %g", k, (int)at.layer.kind, at.layer.scale);
        CHECK_OK(tch_tensor_check(at.input, "input"));
        CHECK_OK(tch_tensor_check(at.output_gradient, "output_gradient"));
        CHECK(at.input->ndim == 2 && memcmp(at.input->shape, shapes[0], sizeof shapes[0]) == 0, "input's shape");
        CHECK(at.output_gradient->ndim == 2 && memcmp(at.output_gradient->shape, shapes[1], sizeof shapes[1]) == 0,
              "output_gradient's shape");
    }
    for (int64_t row = 0; row < s->rows; row++) {
        reference_sample(s, row);
        for (int32_t k = 0; k < s->reference.layers; k++) {
            check_layer(s, k, row);
        }
    }
}

TEST(layers_are_those_of_each_sample)
{
    const int64_t batches[] = {5, 1, 19, 3, 0};
    const test_layout layouts[] = {LAYOUT_CONTIGUOUS, LAYOUT_ROW_GAPS, LAYOUT_OFFSET};
    for (int k = 0; k < TCH_ACTIVATION_COUNT * TCH_LOSS_COUNT; k++) {
        tch_network_config config = tanh_config();
        test_random random = test_random_stream(100 + (uint64_t)k);
        network_trial s;
        config.activation = (tch_activation)(k / TCH_LOSS_COUNT);
        config.loss = (tch_loss)(k % TCH_LOSS_COUNT);
        config.hidden_count = k % 4;
        network_trial_make(&s, *state, &config, &random);
        for (int b = 0; b < 5; b++) {
            test_case("activation %d, loss %d, %lld rows", (int)config.activation, (int)config.loss,
                      (long long)batches[b]);
            network_trial_batch(&s, &random, batches[b], layouts[b % 3]);
            CHECK_OK(network_trial_loss(&s));
            check_layers(&s);
        }
    }
}

/* --- weighted sums ----------------------------------------------------------------------------------------------- */

/* sums[i] = scale times the sum over rows of weights (1 for NULL) times the row's gradient of parameter i. */
static void reference_sums(network_trial *s, const double *weights, double scale, double **sums)
{
    for (int i = 0; i < 2 * s->reference.layers; i++) {
        int64_t count = reference_network_count(&s->reference, i);
        sums[i] = test_alloc((size_t)count * sizeof **sums);
        memset(sums[i], 0, (size_t)count * sizeof **sums);
    }
    for (int64_t row = 0; row < s->rows; row++) {
        reference_sample(s, row);
        for (int i = 0; i < 2 * s->reference.layers; i++) {
            for (int64_t k = 0; k < reference_network_count(&s->reference, i); k++) {
                sums[i][k] += scale * (weights != NULL ? weights[row] : 1.0) * s->reference.gradient[i][k];
            }
        }
    }
}

/* Compares all gradients with sums, which are freed. */
static void check_sums(network_trial *s, double **sums, double tolerance)
{
    for (int i = 0; i < 2 * s->reference.layers; i++) {
        double *got = network_trial_read(s->context, tch_network_gradient(s->net, i));
        network_trial_close(tch_network_parameter_name(s->net, i), reference_network_count(&s->reference, i), got,
                            sums[i], tolerance);
    }
}

/* Weights of both signs cancel in part: 5e-5 of the largest element, five times the bound of plain sums. */
static void check_weighted(network_trial *s, test_random *random)
{
    double *weights = test_alloc((size_t)s->rows * sizeof *weights + 1);
    double *sums[2 * REFERENCE_MOST_LAYERS] = {0};
    for (int64_t i = 0; i < s->rows; i++) {
        weights[i] = i % 4 == 1 ? 0.0 : test_random_normal(random);
    }
    test_tensor *tensor = test_tensor_make(s->context, TCH_FLOAT64, 1, &s->rows, LAYOUT_CONTIGUOUS);
    test_tensor_write(tensor, weights);
    network_trial_poison(s);
    CHECK_OK(tch_network_weigh_samples(s->net, &tensor->tensor, 0.7));
    test_tensor_check_unchanged(tensor, "weights");
    reference_sums(s, weights, 0.7, sums);
    check_sums(s, sums, 5e-5);
    network_trial_poison(s);
    CHECK_OK(tch_network_weigh_samples(s->net, NULL, s->rows > 0 ? 1.0 / (double)s->rows : 1.0));
    reference_sums(s, NULL, s->rows > 0 ? 1.0 / (double)s->rows : 1.0, sums);
    check_sums(s, sums, 1e-5);
    check_layers(s);
}

TEST(weighted_gradients_are_sums_over_single_samples)
{
    const int64_t batches[] = {6, 1, 33, 0};
    for (int loss = 0; loss < TCH_LOSS_COUNT; loss++) {
        tch_network_config config = tanh_config();
        test_random random = test_random_stream(200 + (uint64_t)loss);
        network_trial s;
        config.loss = (tch_loss)loss;
        config.hidden_count = 2;
        network_trial_make(&s, *state, &config, &random);
        for (int b = 0; b < 4; b++) {
            test_case("loss %d, %lld rows", loss, (long long)batches[b]);
            network_trial_batch(&s, &random, batches[b], b % 2 == 0 ? LAYOUT_ROW_GAPS : LAYOUT_CONTIGUOUS);
            CHECK_OK(network_trial_loss(&s));
            check_weighted(&s, &random);
        }
    }
}

/* --- sampled labels ---------------------------------------------------------------------------------------------- */

/* The label of a row with these outputs; *margin is the distance of the uniform number from another label. */
static int64_t expected_label(int64_t n, const double *y, uint64_t row, uint64_t seed, double *margin)
{
    const uint32_t counter[4] = {(uint32_t)row, (uint32_t)(row >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t words[4];
    test_philox(counter, key, words);
    double uniform = (double)(words[0] & 0xFFFFFFu) / 16777216.0;
    double sum = 0, passed = 0;
    int64_t label = -1;
    *margin = 1;
    for (int64_t j = 0; j < n; j++) {
        sum += exp(y[j]);
    }
    for (int64_t j = 0; j < n - 1; j++) {
        passed += exp(y[j]) / sum;
        *margin = fmin(*margin, fabs(passed - uniform));
        label = label < 0 && passed > uniform ? j : label;
    }
    return label < 0 ? n - 1 : label;
}

/* The label of a row's output gradient: its only negative entry. */
static int64_t label_of(int64_t n, const double *gradient)
{
    int64_t label = 0;
    for (int64_t j = 1; j < n; j++) {
        label = gradient[j] < gradient[label] ? j : label;
    }
    return label;
}

/* Samples labels, compares each with the convention, and stores them in s->t. A number within 1e-5 of the border
 * between two labels may fall on either side, by the rounding of outputs in float32. */
static void check_drawn(network_trial *s, uint64_t seed)
{
    int64_t n = s->config.outputs;
    double *outputs = reference_network_forward(&s->reference, s->rows, s->x);
    CHECK_OK(tch_network_draw_labels(s->net, seed));
    tch_network_layer last = layer_of(s, s->reference.layers - 1);
    double *gradient = network_trial_read(s->context, last.output_gradient);
    for (int64_t row = 0; row < s->rows; row++) {
        double margin;
        int64_t wanted = expected_label(n, outputs + row * n, (uint64_t)row, seed, &margin);
        int64_t label = n == 1 ? 0 : label_of(n, gradient + row * n);
        CHECK(label == wanted || margin < 1e-5, "row %lld has label %lld, expected %lld", (long long)row,
              (long long)label, (long long)wanted);
        s->t[row] = (double)label;
    }
}

TEST(drawn_labels_follow_the_convention)
{
    const uint64_t seeds[] = {0, 1, 0x123456789abcdef0u};
    const int64_t batches[] = {40, 1, 17, 0};
    for (int outputs = 1; outputs <= 5; outputs += 2) {
        tch_network_config config = tanh_config();
        test_random random = test_random_stream(500 + (uint64_t)outputs);
        network_trial s;
        config.outputs = outputs;
        config.hidden_count = 2;
        config.activation = outputs == 3 ? TCH_ACTIVATION_GELU : TCH_ACTIVATION_RELU;
        network_trial_make(&s, *state, &config, &random);
        for (int b = 0; b < 4; b++) {
            network_trial_batch(&s, &random, batches[b], LAYOUT_CONTIGUOUS);
            CHECK_OK(network_trial_loss(&s));
            double *before = network_trial_read(*state, tch_network_gradient(s.net, 2));
            for (int k = 0; k < 3; k++) {
                test_case("%d outputs, %lld rows, seed %llu", outputs, (long long)batches[b],
                          (unsigned long long)seeds[k]);
                check_drawn(&s, seeds[k]);
                check_layers(&s);
            }
            double *after = network_trial_read(*state, tch_network_gradient(s.net, 2));
            CHECK(memcmp(before, after, 30 * sizeof *after) == 0, "gradients of parameters changed");
        }
    }
}

/* A row whose outputs are not finite has no softmax: its gradient is 0, and the others are unaffected. */
TEST(rows_that_are_not_finite_draw_nothing)
{
    const double bad[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int k = 0; k < 3; k++) {
        tch_network_config config = tanh_config();
        network_trial s;
        config.hidden_count = 0;
        test_case("%g", bad[k]);
        network_trial_open(&s, *state, &config, 520, 4);
        s.x[2 * config.inputs] = bad[k];
        test_tensor_write(s.inputs, s.x);
        CHECK_OK(network_trial_loss(&s));
        CHECK_OK(tch_network_draw_labels(s.net, 3));
        double *gradient = network_trial_read(*state, layer_of(&s, 0).output_gradient);
        for (int row = 0; row < 4; row++) {
            double size = network_trial_largest(3, gradient + 3 * row);
            CHECK(row == 2 ? size == 0 : size > 0 && isfinite(size), "row %d has a gradient of size %g", row, size);
        }
    }
}

/* --- refusals ---------------------------------------------------------------------------------------------------- */

static void check_no_batch(network_trial *s)
{
    tch_network_layer at = TCH_NETWORK_LAYER_INIT;
    test_check_refused(tch_network_get_layer(s->net, 0, &at), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_weigh_samples(s->net, NULL, 1.0), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_draw_labels(s->net, 0), TCH_ERR_INVALID_ARGUMENT, "network");
    assert_null(at.input);
}

TEST(without_a_batch_everything_is_refused)
{
    tch_network_config config = tanh_config();
    const int64_t shape[] = {6, 3};
    network_trial s;
    network_trial_open(&s, *state, &config, 600, 6);
    test_tensor *outputs = test_tensor_make(*state, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS);
    test_case("before the first batch");
    check_no_batch(&s);
    CHECK_OK(network_trial_loss(&s));
    CHECK_OK(tch_network_evaluate(s.net, &s.inputs->tensor, &s.targets->tensor, &s.totals->tensor));
    test_case("after tch_network_evaluate");
    check_no_batch(&s);
    CHECK_OK(network_trial_loss(&s));
    CHECK_OK(tch_network_forward(s.net, &s.inputs->tensor, &outputs->tensor));
    test_case("after tch_network_forward");
    check_no_batch(&s);
    CHECK_OK(network_trial_loss(&s));
    check_layers(&s);
}

TEST(bad_arguments_are_refused)
{
    tch_network_config config = tanh_config();
    const int64_t seven = 7, six[] = {6, 1};
    tch_network_layer at = TCH_NETWORK_LAYER_INIT, blank = {0};
    network_trial s;
    network_trial_open(&s, *state, &config, 610, 6);
    CHECK_OK(network_trial_loss(&s));
    test_case("missing");
    assert_int_equal(tch_network_layer_count(NULL), 0);
    test_check_refused(tch_network_get_layer(NULL, 0, &at), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_weigh_samples(NULL, NULL, 1.0), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_draw_labels(NULL, 0), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_get_layer(s.net, 0, NULL), TCH_ERR_INVALID_ARGUMENT, "layer");
    test_check_refused(tch_network_get_layer(s.net, 0, &blank), TCH_ERR_INVALID_ARGUMENT, "layer");
    test_check_refused(tch_network_get_layer(s.net, 2, &at), TCH_ERR_INVALID_ARGUMENT, "index");
    test_check_refused(tch_network_get_layer(s.net, -1, &at), TCH_ERR_INVALID_ARGUMENT, "index");
    test_tensor *shape = test_tensor_make(*state, TCH_FLOAT64, 1, &seven, LAYOUT_CONTIGUOUS);
    test_tensor *rank = test_tensor_make(*state, TCH_FLOAT64, 2, six, LAYOUT_CONTIGUOUS);
    test_tensor *dtype = test_tensor_make(*state, TCH_FLOAT32, 1, six, LAYOUT_CONTIGUOUS);
    tch_tensor elsewhere = shape->tensor;
    elsewhere.device.type = test_on_cpu() ? TCH_DEVICE_CUDA : TCH_DEVICE_CPU;
    double *before = network_trial_read(*state, tch_network_gradient(s.net, 0));
    test_case("weights");
    test_check_refused(tch_network_weigh_samples(s.net, &shape->tensor, 1.0), TCH_ERR_SHAPE, "weights");
    test_check_refused(tch_network_weigh_samples(s.net, &rank->tensor, 1.0), TCH_ERR_SHAPE, "weights");
    test_check_refused(tch_network_weigh_samples(s.net, &dtype->tensor, 1.0), TCH_ERR_DTYPE, "weights");
    test_check_refused(tch_network_weigh_samples(s.net, &elsewhere, 1.0), TCH_ERR_DEVICE, "weights");
    test_check_refused(tch_network_weigh_samples(s.net, NULL, (double)NAN), TCH_ERR_INVALID_ARGUMENT, "scale");
    test_check_refused(tch_network_weigh_samples(s.net, NULL, (double)INFINITY), TCH_ERR_INVALID_ARGUMENT, "scale");
    double *after = network_trial_read(*state, tch_network_gradient(s.net, 0));
    CHECK(memcmp(before, after, 35 * sizeof *after) == 0, "a refused call wrote gradients");
    test_case("labels of a squared loss");
    config.loss = TCH_LOSS_SQUARED;
    network_trial_open(&s, *state, &config, 620, 4);
    CHECK_OK(network_trial_loss(&s));
    test_check_refused(tch_network_draw_labels(s.net, 0), TCH_ERR_UNSUPPORTED, "loss");
    check_layers(&s);
}

TEST_MAIN(test_open_context, test_close_context)

/* Networks: initial weights, outputs and gradients vs plain float64 loops, accumulated totals, bad labels and numbers,
 * bad arguments, and allocations. */

#include <torchium/network.h>

#include "support/bad_input.h"
#include "support/fakes/counting_allocator.h"
#include "support/network/network_trial.h"
#include "support/testing.h"

static void check_totals(const network_trial *s, const double *wanted)
{
    double *got = test_tensor_read(s->totals);
    CHECK(fabs(got[TCH_TOTAL_LOSS] - wanted[TCH_TOTAL_LOSS]) <= 2e-6 * (double)(s->rows + 1) + 4e-6 * wanted[0],
          "the loss is %.9g, expected %.9g", got[TCH_TOTAL_LOSS], wanted[TCH_TOTAL_LOSS]);
    for (int k = TCH_TOTAL_RIGHT; k < TCH_NETWORK_TOTALS; k++) {
        CHECK(got[k] == wanted[k], "totals[%d] is %g, expected %g", k, got[k], wanted[k]);
    }
}

/* Rounding errors of sums of n products in float32 are at most n eps / 2 of their size, and usually far less: the error
 * of the longest chain here, five layers of up to 70 terms and a batch of 70, stays below 1e-5. */
static void check_gradients(const network_trial *s)
{
    for (int i = 0; i < 2 * s->reference.layers; i++) {
        double *got = network_trial_read(s->context, tch_network_gradient(s->net, i));
        network_trial_close(tch_network_parameter_name(s->net, i), reference_network_count(&s->reference, i), got,
                            s->reference.gradient[i], 1e-5);
    }
}

/* The small network with a random batch. */
static void small_trial(network_trial *s, tch_context *context, uint64_t stream, int64_t rows)
{
    tch_network_config config = network_trial_small_config();
    network_trial_open(s, context, &config, stream, rows);
}

/* --- creation ---------------------------------------------------------------------------------------------------- */

TEST(parameters_have_names_and_shapes)
{
    const char *const names[] = {"layer1.weight", "layer1.bias", "layer2.weight", "layer2.bias"};
    const int64_t shapes[][2] = {{5, 7}, {5, 0}, {3, 5}, {3, 0}};
    tch_network_config config = network_trial_small_config();
    tch_network *net = NULL;
    CHECK_OK(tch_network_create(*state, &config, &net));
    assert_int_equal(tch_network_parameter_count(net), 4);
    assert_int_equal(tch_network_size(net), 35 + 5 + 15 + 3);
    for (int i = 0; i < 4; i++) {
        const tch_tensor *both[] = {tch_network_parameter(net, i), tch_network_gradient(net, i)};
        assert_string_equal(tch_network_parameter_name(net, i), names[i]);
        CHECK(both[0]->data != both[1]->data, "%s and its gradient share memory", names[i]);
        for (int k = 0; k < 2; k++) {
            CHECK_OK(tch_tensor_check(both[k], names[i]));
            assert_int_equal(both[k]->ndim, i % 2 == 0 ? 2 : 1);
            assert_int_equal(both[k]->shape[0], shapes[i][0]);
            CHECK(i % 2 == 1 || both[k]->shape[1] == shapes[i][1], "%s has the wrong shape", names[i]);
        }
    }
    assert_null(tch_network_parameter(net, 4));
    assert_null(tch_network_gradient(net, -1));
    assert_null(tch_network_parameter_name(net, 4));
    assert_null(tch_network_parameter(NULL, 0));
    assert_int_equal(tch_network_parameter_count(NULL), 0);
    assert_int_equal(tch_network_size(NULL), 0);
    tch_network_destroy(net);
    tch_network_destroy(NULL);
}

/* Computed from the generator's definition by another program, for RELU: hidden layers have He's uniform distribution
 * up to sqrt(6 / inputs). For TANH it is Glorot's, up to sqrt(6 / (inputs + outputs)), with the same random numbers. */
TEST(first_weights_are_the_same_everywhere)
{
    static const int64_t wide[] = {300};
    static const struct {
        bool wide; /* 200 inputs and 300 hidden with seed 1 */
        int parameter;
        int64_t index;
        double value;
    } known[] = {
        {false, 0, 0, 0x1.8af06p-2},
        {false, 0, 34, -0x1.2867d2p-4},
        {false, 2, 0, 0x1.212ffp-2},
        {false, 2, 14, 0x1.05764cp-1},
        {true, 0, 59999, 0x1.7802d6p-5},
        {false, 1, 0, 0},
        {false, 3, 2, 0},
    };
    for (size_t k = 0; k < 2 * sizeof known / sizeof known[0]; k++) {
        int parameter = known[k / 2].parameter;
        tch_network_config config = network_trial_small_config();
        tch_network *net = NULL;
        if (known[k / 2].wide) {
            config.inputs = 200, config.outputs = 10, config.hidden = wide, config.seed = 1;
        }
        config.activation = k % 2 == 0 ? TCH_ACTIVATION_RELU : TCH_ACTIVATION_TANH;
        CHECK_OK(tch_network_create(*state, &config, &net));
        double inputs = (double)config.inputs;
        bool glorot = k % 2 == 1 && parameter == 0; /* the last layer has Glorot's in any case */
        double wanted = known[k / 2].value * (glorot ? sqrt(inputs / (inputs + (double)config.hidden[0])) : 1.0);
        double got = network_trial_read(*state, tch_network_parameter(net, parameter))[known[k / 2].index];
        CHECK(fabs(got - wanted) <= (glorot ? 0x1p-22 * fabs(wanted) : 0.0), "%s [%lld] is %a, expected %a",
              tch_network_parameter_name(net, parameter), (long long)known[k / 2].index, got, wanted);
        tch_network_destroy(net);
    }
}

/* --- outputs and gradients --------------------------------------------------------------------------------------- */

static void check_forward(network_trial *s, test_layout layout)
{
    const int64_t shape[] = {s->rows, s->config.outputs};
    test_tensor *y = test_tensor_make(s->context, TCH_FLOAT32, 2, shape, layout);
    CHECK_OK(tch_network_forward(s->net, &s->inputs->tensor, &y->tensor));
    test_tensor_check_written(y, "outputs");
    double *got = test_tensor_read(y);
    double *wanted = reference_network_forward(&s->reference, s->rows, s->x);
    network_trial_close("outputs", y->count, got, wanted, 1e-5);
}

static void check_loss(network_trial *s)
{
    double totals[TCH_NETWORK_TOTALS];
    reference_network_loss(&s->reference, s->rows, s->x, s->t, 1, totals);
    network_trial_clear(s);
    CHECK_OK(tch_network_evaluate(s->net, &s->inputs->tensor, &s->targets->tensor, &s->totals->tensor));
    check_totals(s, totals);
    network_trial_clear(s);
    network_trial_poison(s);
    CHECK_OK(network_trial_loss(s));
    check_totals(s, totals);
    check_gradients(s);
    test_tensor_check_unchanged(s->inputs, "inputs");
    test_tensor_check_unchanged(s->targets, "targets");
}

/* Batches of varying size through one network, so that stale values would be detected. */
static void check_shape(tch_context *context, const tch_network_config *config, uint64_t stream)
{
    const int64_t batches[] = {5, 1, 70, 33, 64};
    const test_layout layouts[] = {LAYOUT_CONTIGUOUS, LAYOUT_ROW_GAPS, LAYOUT_OFFSET};
    const test_layout written[] = {LAYOUT_CONTIGUOUS, LAYOUT_TRANSPOSED, LAYOUT_STEPPED, LAYOUT_REVERSED};
    test_random random = test_random_stream(stream);
    network_trial s;
    network_trial_make(&s, context, config, &random);
    for (int i = 0; i < 5; i++) {
        test_case("%d hidden, %lld inputs, activation %d, loss %d, %lld rows", config->hidden_count,
                  (long long)config->inputs, (int)config->activation, (int)config->loss, (long long)batches[i]);
        network_trial_batch(&s, &random, batches[i], layouts[i % 3]);
        check_forward(&s, written[i % 4]);
        check_loss(&s);
    }
}

TEST(gradients_agree_with_float64)
{
    const int64_t wide[] = {40, 33};
    for (int activation = 0; activation < TCH_ACTIVATION_COUNT; activation++) {
        for (int loss = 0; loss < TCH_LOSS_COUNT; loss++) {
            tch_network_config config = network_trial_small_config();
            uint64_t stream = 100 + 10 * (uint64_t)activation + (uint64_t)loss;
            config.activation = (tch_activation)activation;
            config.loss = (tch_loss)loss;
            check_shape(*state, &config, stream);
            config.hidden_count = 5;
            check_shape(*state, &config, stream + 2);
            config.hidden_count = 0, config.inputs = 1, config.outputs = 1;
            check_shape(*state, &config, stream + 4);
            config.hidden_count = 2, config.hidden = wide, config.inputs = 70, config.outputs = 37;
            config.max_batch = 33;
            check_shape(*state, &config, stream + 6);
        }
    }
}

/* --- totals, scales, odd batches --------------------------------------------------------------------------------- */

TEST(totals_add_up)
{
    double once[TCH_NETWORK_TOTALS];
    double twice[TCH_NETWORK_TOTALS];
    network_trial s;
    small_trial(&s, *state, 400, 300);
    reference_network_loss(&s.reference, s.rows, s.x, s.t, 0, once);
    for (int k = 0; k < TCH_NETWORK_TOTALS; k++) {
        twice[k] = 2 * once[k];
    }
    CHECK_OK(network_trial_loss(&s));
    CHECK_OK(tch_network_evaluate(s.net, &s.inputs->tensor, &s.targets->tensor, &s.totals->tensor));
    check_totals(&s, twice);
    CHECK(once[TCH_TOTAL_RIGHT] > 0 && once[TCH_TOTAL_RIGHT] < 300, "the test is no test: %g right", once[1]);
}

/* Powers of two change no bit. */
TEST(loss_scale_multiplies_gradients)
{
    for (int loss = 0; loss < TCH_LOSS_COUNT; loss++) {
        tch_network_config config = network_trial_small_config();
        const int64_t one[] = {1};
        const double scale_value[] = {1024};
        network_trial s;
        test_case("loss %d", loss);
        config.loss = (tch_loss)loss;
        network_trial_open(&s, *state, &config, 410, 9);
        CHECK_OK(network_trial_loss(&s));
        double *plain = network_trial_read(*state, tch_network_gradient(s.net, 0));
        test_tensor *scale = test_tensor_make(*state, TCH_FLOAT32, loss == 0 ? 0 : 1, one, LAYOUT_CONTIGUOUS);
        test_tensor_write(scale, scale_value);
        CHECK_OK(tch_network_loss_and_gradients(s.net, &s.inputs->tensor, &s.targets->tensor, &scale->tensor,
                                                &s.totals->tensor));
        double *scaled = network_trial_read(*state, tch_network_gradient(s.net, 0));
        for (int64_t i = 0; i < reference_network_count(&s.reference, 0); i++) {
            CHECK(scaled[i] == 1024 * plain[i], "[%lld] is %.9g, expected %.9g", (long long)i, scaled[i],
                  1024 * plain[i]);
        }
    }
}

TEST(labels_that_are_no_class_are_skipped)
{
    const double bad[] = {-1, 3, 4, INT32_MAX, INT32_MIN, 1000000};
    double totals[TCH_NETWORK_TOTALS];
    network_trial s;
    small_trial(&s, *state, 420, 20);
    for (int i = 0; i < 6; i++) {
        s.t[3 * i] = bad[i];
    }
    test_tensor_write(s.targets, s.t);
    reference_network_loss(&s.reference, s.rows, s.x, s.t, 1, totals);
    assert_true(totals[TCH_TOTAL_SKIPPED] == 6 && totals[TCH_TOTAL_ROWS] == 14);
    network_trial_clear(&s);
    CHECK_OK(network_trial_loss(&s));
    check_totals(&s, totals);
    check_gradients(&s);
}

/* With zero weights all outputs are equal: the first class is predicted. */
TEST(the_first_of_equal_outputs_is_the_answer)
{
    network_trial s;
    small_trial(&s, *state, 430, 12);
    for (int i = 0; i < 4; i++) {
        memset(s.reference.parameter[i], 0, (size_t)reference_network_count(&s.reference, i) * sizeof(double));
        CHECK_OK(tch_tensor_fill(*state, tch_network_parameter(s.net, i), 0.0));
    }
    for (int i = 0; i < 12; i++) {
        s.t[i] = i < 5 ? 0 : i < 9 ? 1 : 2;
    }
    test_tensor_write(s.targets, s.t);
    const double wanted[] = {12 * log(3.0), 5, 12, 0};
    CHECK_OK(network_trial_loss(&s));
    check_totals(&s, wanted);
}

/* Non-finite numbers propagate to the loss and gradients, and no such row counts as correct. */
TEST(bad_numbers_show)
{
    const double bad[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int k = 0; k < 3 * TCH_ACTIVATION_COUNT; k++) {
        tch_network_config config = network_trial_small_config();
        network_trial s;
        config.activation = (tch_activation)(k / 3);
        if (k % 3 > 0 && config.activation == TCH_ACTIVATION_TANH) {
            continue; /* tanh maps an infinity to 1 */
        }
        test_case("%g, activation %d", bad[k % 3], k / 3);
        network_trial_open(&s, *state, &config, 440, 6);
        for (int64_t j = 0; j < config.inputs; j++) {
            s.x[2 * config.inputs + j] = bad[k % 3]; /* of both signs after the first layer */
        }
        test_tensor_write(s.inputs, s.x);
        CHECK_OK(network_trial_loss(&s));
        double *totals = test_tensor_read(s.totals);
        double *gradient = network_trial_read(*state, tch_network_gradient(s.net, 2));
        CHECK(!isfinite(totals[TCH_TOTAL_LOSS]), "the loss is %g", totals[TCH_TOTAL_LOSS]);
        CHECK(totals[TCH_TOTAL_ROWS] == 6 && totals[TCH_TOTAL_RIGHT] <= 5, "%g of %g are right", totals[1], totals[2]);
        CHECK(!isfinite(gradient[0] + gradient[1] + gradient[2] + gradient[3] + gradient[4]), "the gradient is finite");
    }
}

TEST(an_empty_batch_is_nothing)
{
    for (int loss = 0; loss < TCH_LOSS_COUNT; loss++) {
        tch_network_config config = network_trial_small_config();
        const double nothing[TCH_NETWORK_TOTALS] = {0};
        network_trial s;
        config.loss = (tch_loss)loss;
        network_trial_open(&s, *state, &config, 450, 0);
        CHECK_OK(tch_tensor_fill(*state, tch_network_gradient(s.net, 0), 5.0));
        CHECK_OK(network_trial_loss(&s));
        check_totals(&s, nothing);
        double *gradient = network_trial_read(*state, tch_network_gradient(s.net, 0));
        CHECK(network_trial_largest(35, gradient) == 0, "the gradient of nothing is not 0");
    }
}

/* Two runs of the same calls are bitwise equal, and allocate nothing after the first. */
TEST(calls_repeat_themselves)
{
    const int64_t hidden[] = {100, 50};
    tch_network_config config = network_trial_small_config();
    network_trial s;
    config.inputs = 90, config.hidden_count = 2, config.hidden = hidden, config.max_batch = 700;
    config.activation = TCH_ACTIVATION_GELU;
    network_trial_open(&s, *state, &config, 460, 700);
    int64_t requests[3] = {network_trial_requests(*state)};
    double *totals[2], *gradients[2], *weighed[2];
    for (int i = 0; i < 2; i++) {
        network_trial_clear(&s);
        CHECK_OK(network_trial_loss(&s));
        CHECK(i > 0 || network_trial_requests(*state) == requests[0], "the first batch took memory that was reserved");
        totals[i] = test_tensor_read(s.totals);
        gradients[i] = network_trial_read(*state, tch_network_gradient(s.net, 0));
        CHECK_OK(tch_network_draw_labels(s.net, 5));
        CHECK_OK(tch_network_weigh_samples(s.net, NULL, 0.5));
        weighed[i] = network_trial_read(*state, tch_network_gradient(s.net, 0));
        requests[1 + i] = network_trial_requests(*state);
    }
    CHECK(requests[1] == requests[2], "a second batch took memory");
    CHECK(memcmp(gradients[0], gradients[1], 9000 * sizeof **gradients) == 0, "gradients differ from run to run");
    CHECK(memcmp(weighed[0], weighed[1], 9000 * sizeof **weighed) == 0, "weighed gradients differ from run to run");
    CHECK(memcmp(totals[0], totals[1], sizeof(double) * TCH_NETWORK_TOTALS) == 0, "totals differ from run to run");
}

/* --- bad arguments ----------------------------------------------------------------------------------------------- */

static void refuse_config(tch_context *context, const tch_network_config *config, const char *argument)
{
    tch_network *net = (tch_network *)context;
    test_case("config with a bad %s", argument);
    test_check_refused(tch_network_create(context, config, &net), TCH_ERR_INVALID_ARGUMENT, argument);
    CHECK(net == NULL, "a network was returned");
}

#define FIELD(member) TEST_FIELD(tch_network_config, member)

TEST(bad_configs_are_refused)
{
    const int64_t zero_width[] = {4, 0};
    const int64_t too_wide[] = {(int64_t)INT32_MAX + 1};
    static const test_range ranges[] = {
        {FIELD(inputs), 0, 4, {0, -1, INT64_MIN, (int64_t)INT32_MAX + 1}},
        {FIELD(outputs), 0, 4, {0, -1, INT64_MIN, (int64_t)INT32_MAX + 1}},
        {FIELD(max_batch), 0, 4, {-7, -1, INT64_MIN, (int64_t)INT32_MAX + 1}},
        {FIELD(hidden_count), 0, 2, {-1, TCH_NETWORK_MAX_HIDDEN + 1}},
        {FIELD(activation), 0, 1, {TCH_ACTIVATION_COUNT}},
        {FIELD(loss), 0, 1, {-1}},
    };
    tch_network_config config;
    tch_network *net = NULL;
    for (size_t i = 0; i < TEST_COUNT(ranges); i++) {
        for (int k = 0; k < ranges[i].count; k++) {
            config = network_trial_small_config();
            test_field_set(&config, &ranges[i].field, ranges[i].bad[k]);
            refuse_config(*state, &config, ranges[i].field.name);
        }
    }
    config = network_trial_small_config(), config.hidden = NULL;
    refuse_config(*state, &config, "hidden");
    config = network_trial_small_config(), config.hidden = zero_width, config.hidden_count = 2;
    refuse_config(*state, &config, "hidden");
    config = network_trial_small_config(), config.hidden = too_wide;
    refuse_config(*state, &config, "hidden");
    config = network_trial_small_config(), config.struct_size--;
    refuse_config(*state, &config, "config");
    refuse_config(*state, NULL, "config");
    config = network_trial_small_config();
    test_check_refused(tch_network_create(NULL, &config, &net), TCH_ERR_INVALID_ARGUMENT, "context");
    test_check_refused(tch_network_create(*state, &config, NULL), TCH_ERR_INVALID_ARGUMENT, "network");
}

/* Memory for more rows than 64 bits can count is reported as out of memory. */
TEST(absurd_batches_are_refused)
{
    const int64_t hidden[] = {INT32_MAX, 1};
    tch_network_config config = network_trial_small_config();
    tch_network *net = NULL;
    config.inputs = 1, config.outputs = 1, config.hidden_count = 2, config.hidden = hidden;
    config.max_batch = INT32_MAX;
    CHECK(tch_network_create(*state, &config, &net) == TCH_ERR_OUT_OF_MEMORY && net == NULL, "it was not refused");
}

typedef struct bad_call {
    const char *argument;
    tch_status status;
    tch_dtype dtype;
    int32_t ndim;
    int64_t shape[2];
    test_layout layout;
} bad_call;

static void refuse_call(network_trial *s, const bad_call *bad, const tch_tensor *tensor)
{
    tch_tensor totals = s->totals->tensor;
    const tch_tensor *scale = strcmp(bad->argument, "loss_scale") == 0 ? tensor : NULL;
    const tch_tensor *inputs = strcmp(bad->argument, "inputs") == 0 ? tensor : &s->inputs->tensor;
    const tch_tensor *targets = strcmp(bad->argument, "targets") == 0 ? tensor : &s->targets->tensor;
    if (strcmp(bad->argument, "totals") == 0) {
        totals = *tensor;
    }
    test_case("%s: %s, rank %d, %s", bad->argument, tch_dtype_name(bad->dtype), bad->ndim,
              test_layout_name(bad->layout));
    test_check_refused(tch_network_loss_and_gradients(s->net, inputs, targets, scale, &totals), bad->status,
                       bad->argument);
    if (scale == NULL) {
        test_check_refused(tch_network_evaluate(s->net, inputs, targets, &totals), bad->status, bad->argument);
    }
}

TEST(bad_tensors_are_refused)
{
    const bad_call classes[] = {
        {"inputs", TCH_ERR_SHAPE, TCH_FLOAT32, 2, {6, 8}, LAYOUT_CONTIGUOUS},
        {"inputs", TCH_ERR_SHAPE, TCH_FLOAT32, 1, {7}, LAYOUT_CONTIGUOUS},
        {"inputs", TCH_ERR_DTYPE, TCH_FLOAT64, 2, {6, 7}, LAYOUT_CONTIGUOUS},
        {"inputs", TCH_ERR_LAYOUT, TCH_FLOAT32, 2, {6, 7}, LAYOUT_TRANSPOSED},
        {"inputs", TCH_ERR_LAYOUT, TCH_FLOAT32, 2, {6, 7}, LAYOUT_EXPANDED},
        {"targets", TCH_ERR_SHAPE, TCH_INT32, 1, {5}, LAYOUT_CONTIGUOUS},
        {"targets", TCH_ERR_SHAPE, TCH_INT32, 2, {6, 1}, LAYOUT_CONTIGUOUS},
        {"targets", TCH_ERR_DTYPE, TCH_FLOAT32, 2, {6, 3}, LAYOUT_CONTIGUOUS},
        {"targets", TCH_ERR_LAYOUT, TCH_INT32, 1, {6}, LAYOUT_STEPPED},
        {"loss_scale", TCH_ERR_SHAPE, TCH_FLOAT32, 1, {2}, LAYOUT_CONTIGUOUS},
        {"loss_scale", TCH_ERR_DTYPE, TCH_FLOAT64, 1, {1}, LAYOUT_CONTIGUOUS},
        {"totals", TCH_ERR_SHAPE, TCH_FLOAT64, 1, {2}, LAYOUT_CONTIGUOUS},
        {"totals", TCH_ERR_DTYPE, TCH_FLOAT32, 1, {4}, LAYOUT_CONTIGUOUS},
        {"totals", TCH_ERR_LAYOUT, TCH_FLOAT64, 1, {4}, LAYOUT_STEPPED},
    };
    network_trial s;
    small_trial(&s, *state, 500, 6);
    for (size_t i = 0; i < sizeof classes / sizeof classes[0]; i++) {
        const bad_call *bad = &classes[i];
        test_tensor *tensor = test_tensor_make(*state, bad->dtype, bad->ndim, bad->shape, bad->layout);
        refuse_call(&s, bad, &tensor->tensor);
        test_tensor_check_unchanged(tensor, bad->argument);
    }
    test_tensor_check_unchanged(s.totals, "totals");
}

TEST(missing_tensors_are_refused)
{
    network_trial s;
    small_trial(&s, *state, 510, 6);
    tch_tensor *x = &s.inputs->tensor;
    tch_tensor *t = &s.targets->tensor;
    tch_tensor *totals = &s.totals->tensor;
    tch_tensor elsewhere = *totals;
    elsewhere.device.type += 7;
    test_case("NULL, and another device");
    test_check_refused(tch_network_evaluate(NULL, x, t, totals), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_loss_and_gradients(NULL, x, t, NULL, totals), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_forward(NULL, x, x), TCH_ERR_INVALID_ARGUMENT, "network");
    test_check_refused(tch_network_evaluate(s.net, NULL, t, totals), TCH_ERR_INVALID_ARGUMENT, "inputs");
    test_check_refused(tch_network_evaluate(s.net, x, NULL, totals), TCH_ERR_INVALID_ARGUMENT, "targets");
    test_check_refused(tch_network_evaluate(s.net, x, t, NULL), TCH_ERR_INVALID_ARGUMENT, "totals");
    test_check_refused(tch_network_forward(s.net, x, NULL), TCH_ERR_INVALID_ARGUMENT, "outputs");
    test_check_refused(tch_network_evaluate(s.net, x, t, &elsewhere), TCH_ERR_DEVICE, "totals");
    test_tensor_check_unchanged(s.totals, "totals");
}

TEST(outputs_may_not_overlap)
{
    int64_t shape[] = {6, 3};
    network_trial s;
    small_trial(&s, *state, 520, 6);
    tch_tensor outputs = s.inputs->tensor;
    outputs.shape = shape;
    outputs.strides = NULL;
    test_case("outputs in the inputs");
    test_check_refused(tch_network_forward(s.net, &s.inputs->tensor, &outputs), TCH_ERR_LAYOUT, "outputs");
    test_tensor_check_unchanged(s.inputs, "inputs");
    outputs.data = tch_network_parameter(s.net, 0)->data;
    outputs.byte_offset = tch_network_parameter(s.net, 0)->byte_offset;
    test_case("outputs in the weights");
    test_check_refused(tch_network_forward(s.net, &s.inputs->tensor, &outputs), TCH_ERR_LAYOUT, "outputs");
    outputs.data = tch_network_gradient(s.net, 2)->data;
    outputs.byte_offset = tch_network_gradient(s.net, 2)->byte_offset;
    shape[0] = 2, shape[1] = 7;
    test_case("inputs in the gradients");
    tch_tensor two = s.targets->tensor;
    int64_t rows[] = {2};
    two.shape = rows;
    test_check_refused(tch_network_loss_and_gradients(s.net, &outputs, &two, NULL, &s.totals->tensor), TCH_ERR_LAYOUT,
                       "inputs");
}

/* --- no memory --------------------------------------------------------------------------------------------------- */

static bool creation_without(long long allocation)
{
    tch_network_config config = network_trial_small_config();
    tch_context *context = NULL;
    tch_network *net = (tch_network *)&test_counting;
    config.max_batch = 10;
    CHECK_OK(tch_context_create(test_device(), &context));
    counting_allocator_arm(&test_counting, allocation);
    tch_status status = tch_network_create(context, &config, &net);
    bool through = network_trial_disarm(allocation, status);
    CHECK(through || net == NULL, "a network was returned");
    CHECK(!through || allocation > 5, "a network that takes no memory was not expected");
    tch_network_destroy(net);
    tch_context_destroy(context);
    return through;
}

/* A batch that runs out of memory changes nothing, nor do samples and labels; the network continues with the next. */
static bool batch_without(long long allocation)
{
    tch_network_config config = network_trial_small_config();
    tch_context *context = NULL;
    network_trial s;
    CHECK_OK(tch_context_create(test_device(), &context));
    config.max_batch = 4;
    network_trial_open(&s, context, &config, 600, 5000);
    CHECK_OK(tch_memory_trim(context, 0));
    counting_allocator_arm(&test_counting, allocation);
    tch_status loss = network_trial_loss(&s);
    CHECK_OK(tch_memory_trim(context, 0)); /* or the pool retries successfully */
    tch_status status = loss == TCH_OK ? tch_network_draw_labels(s.net, 1) : loss;
    status = status == TCH_OK ? tch_network_weigh_samples(s.net, NULL, 1.0) : status;
    bool through = network_trial_disarm(allocation, status);
    if (loss != TCH_OK) {
        test_tensor_check_unchanged(s.totals, "totals");
    }
    network_trial_clear(&s);
    check_loss(&s);
    test_release_since(0);
    tch_context_destroy(context);
    return through;
}

TEST_ALONE(calls_without_memory, test_counting_install, test_counting_remove)
{
    network_trial_each_allocation(creation_without);
    network_trial_each_allocation(batch_without);
}

TEST_MAIN(test_open_context, test_close_context)

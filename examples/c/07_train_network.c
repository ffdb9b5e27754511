/* Trains a network with Shampoo on whatever device there is. The data are made up: points in the plane, whose class is
 * the arm of a spiral they lie on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <torchium/network.h>
#include <torchium/optim.h>
#include <torchium/torchium.h>

enum { ROWS = 900, ARMS = 3, PARAMETERS = 6, STEPS = 300 };

static void must(tch_status status)
{
    if (status != TCH_OK) {
        fprintf(stderr, "%s: %s\n", tch_status_name(status), tch_last_error());
        exit(1);
    }
}

static void make_spirals(float *points, int32_t *arms)
{
    for (int i = 0; i < ROWS; i++) {
        float radius = 0.05f + 0.95f * (float)i / ROWS;
        float angle = 4.0f * radius + 2.0944f * (float)(i % ARMS);
        points[2 * i] = radius * cosf(angle);
        points[2 * i + 1] = radius * sinf(angle);
        arms[i] = i % ARMS;
    }
}

int main(void)
{
    static float points[2 * ROWS];
    static int32_t arms[ROWS];
    double sums[TCH_NETWORK_TOTALS];
    int64_t point_shape[] = {ROWS, 2}, arm_shape[] = {ROWS}, sum_shape[] = {TCH_NETWORK_TOTALS};
    const int64_t hidden[] = {64, 64};
    make_spirals(points, arms);
    tch_tensor host_points = tch_tensor_view(points, TCH_FLOAT32, 2, point_shape);
    tch_tensor host_arms = tch_tensor_view(arms, TCH_INT32, 1, arm_shape);
    tch_tensor host_sums = tch_tensor_view(sums, TCH_FLOAT64, 1, sum_shape);

    tch_context *context;
    tch_tensor *inputs, *labels, *totals;
    must(tch_context_create("auto", &context));
    must(tch_tensor_create(context, TCH_FLOAT32, 2, point_shape, TCH_CONTIGUOUS, &inputs));
    must(tch_tensor_create(context, TCH_INT32, 1, arm_shape, TCH_CONTIGUOUS, &labels));
    must(tch_tensor_create(context, TCH_FLOAT64, 1, sum_shape, TCH_CONTIGUOUS, &totals));
    must(tch_tensor_copy(context, inputs, &host_points));
    must(tch_tensor_copy(context, labels, &host_arms));

    tch_network_config shape = TCH_NETWORK_CONFIG_INIT;
    shape.inputs = 2, shape.outputs = ARMS, shape.hidden_count = 2, shape.hidden = hidden;
    shape.activation = TCH_ACTIVATION_TANH;
    tch_network *network;
    must(tch_network_create(context, &shape, &network));
    tch_parameter parameters[PARAMETERS];
    const tch_tensor *gradients[PARAMETERS];
    for (int32_t i = 0; i < PARAMETERS; i++) {
        parameters[i] = (tch_parameter){.tensor = tch_network_parameter(network, i),
                                        .name = tch_network_parameter_name(network, i)};
        gradients[i] = tch_network_gradient(network, i);
    }
    tch_optim_config config = tch_optim_defaults(TCH_OPTIM_SHAMPOO);
    config.lr = 0.01;
    config.precondition_frequency = 10;
    config.grafting = TCH_GRAFTING_ADAM;
    tch_optimizer *optimizer;
    must(tch_optimizer_create(context, &config, PARAMETERS, parameters, &optimizer));

    for (int step = 0; step < STEPS; step++) { /* after the first step nothing in here waits */
        must(tch_network_loss_and_gradients(network, inputs, labels, NULL, totals));
        must(tch_optimizer_step(optimizer, PARAMETERS, gradients));
    }
    must(tch_tensor_fill(context, totals, 0.0));
    must(tch_network_evaluate(network, inputs, labels, totals));
    must(tch_tensor_copy(context, &host_sums, totals));
    double loss = sums[TCH_TOTAL_LOSS] / ROWS, right = sums[TCH_TOTAL_RIGHT] / ROWS;
    printf("after %d steps: loss %.4f, %.1f %% right\n", STEPS, loss, 100.0 * right);
    tch_optimizer_destroy(optimizer);
    tch_network_destroy(network);
    tch_tensor_destroy(inputs);
    tch_tensor_destroy(labels);
    tch_tensor_destroy(totals);
    tch_context_destroy(context);
    return right > 0.95 ? 0 : 1;
}

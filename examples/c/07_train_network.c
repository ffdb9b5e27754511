/* Trains a network with Shampoo on the best device of this machine. The data are made up: points in the plane, whose
 * class is the arm of a spiral that they are on. */
#include "example.h"

enum { PARAMETERS = 6, STEPS = 300 };

int main(void)
{
    double sums[TCH_NETWORK_TOTALS];
    int64_t sum_shape[] = {TCH_NETWORK_TOTALS};
    const int64_t hidden[] = {64, 64};
    tch_tensor host_sums = tch_tensor_view(sums, TCH_FLOAT64, 1, sum_shape);

    tch_context *context;
    tch_tensor *inputs, *labels, *totals;
    must(tch_context_create("auto", &context));
    create_spirals(context, &inputs, &labels);
    totals = create_tensor(context, TCH_FLOAT64, 1, sum_shape);

    tch_network_config shape = TCH_NETWORK_CONFIG_INIT;
    shape.inputs = 2, shape.outputs = SPIRAL_ARMS, shape.hidden_count = 2, shape.hidden = hidden;
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
    config.shampoo.precondition_frequency = 10;
    config.shampoo.grafting = TCH_GRAFTING_ADAM;
    tch_optimizer *optimizer;
    must(tch_optimizer_create(context, &config, NULL, PARAMETERS, parameters, &optimizer));

    for (int step = 0; step < STEPS; step++) { /* after the first step nothing here synchronizes */
        must(tch_network_loss_and_gradients(network, inputs, labels, NULL, totals));
        must(tch_optimizer_step(optimizer, PARAMETERS, gradients));
    }
    must(tch_tensor_fill(context, totals, 0.0));
    must(tch_network_evaluate(network, inputs, labels, totals));
    must(tch_tensor_copy(context, &host_sums, totals));
    double loss = sums[TCH_TOTAL_LOSS] / SPIRAL_ROWS, right = sums[TCH_TOTAL_RIGHT] / SPIRAL_ROWS;
    printf("after %d steps: loss %.4f, %.1f %% right\n", STEPS, loss, 100.0 * right);
    tch_optimizer_destroy(optimizer);
    tch_network_destroy(network);
    tch_tensor_destroy(inputs);
    tch_tensor_destroy(labels);
    tch_tensor_destroy(totals);
    tch_context_destroy(context);
    return right > 0.95 ? 0 : 1;
}

/* KFAC in front of plain SGD, on the best device of this machine: KFAC observes the inputs and output gradients of the
 * network's layers and preconditions the gradients in place before the optimizer's step. AdamW on the same data, points
 * in the plane on the arms of a spiral, for comparison. */
#include "example.h"

enum { LAYERS = 3, STEPS = 60 };

static tch_kfac *make_kfac(tch_context *context, tch_network *network)
{
    tch_kfac_layer layers[LAYERS];
    for (int32_t k = 0; k < LAYERS; k++) {
        const tch_tensor *weight = tch_network_parameter(network, 2 * k);
        layers[k] = (tch_kfac_layer){.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .bias = 1};
        layers[k].outputs = weight->shape[0];
        layers[k].inputs = weight->shape[1];
    }
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    config.damping = 1e-2;
    tch_kfac *kfac;
    must(tch_kfac_create(context, &config, NULL, LAYERS, layers, &kfac));
    return kfac;
}

/* The factors see the batch, and the gradients become the preconditioned ones. */
static void precondition(tch_kfac *kfac, tch_network *network, double lr, int step)
{
    tch_tensor *gradients[2 * LAYERS];
    for (int32_t k = 0; k < LAYERS; k++) {
        tch_network_layer seen = TCH_NETWORK_LAYER_INIT;
        must(tch_network_get_layer(network, k, &seen));
        must(tch_kfac_observe(kfac, k, seen.input, seen.output_gradient, seen.layer.scale, NULL));
        gradients[2 * k] = tch_network_gradient(network, 2 * k);
        gradients[2 * k + 1] = tch_network_gradient(network, 2 * k + 1);
    }
    if (step % 5 == 0) {
        must(tch_kfac_refresh(kfac));
    }
    must(tch_kfac_precondition(kfac, lr, 2 * LAYERS, gradients));
}

/* The loss after STEPS steps of `config`, with KFAC in front of it or not. */
static double train(tch_context *context, const tch_optim_config *config, int with_kfac, tch_tensor *inputs,
                    tch_tensor *labels)
{
    const int64_t hidden[LAYERS - 1] = {64, 64};
    int64_t sum_shape[] = {TCH_NETWORK_TOTALS};
    double sums[TCH_NETWORK_TOTALS];
    tch_tensor host_sums = tch_tensor_view(sums, TCH_FLOAT64, 1, sum_shape);
    tch_network_config shape = TCH_NETWORK_CONFIG_INIT;
    shape.inputs = 2, shape.outputs = SPIRAL_ARMS, shape.hidden_count = LAYERS - 1, shape.hidden = hidden;
    shape.activation = TCH_ACTIVATION_TANH;
    tch_network *network;
    tch_tensor *totals = create_tensor(context, TCH_FLOAT64, 1, sum_shape);
    must(tch_network_create(context, &shape, &network));
    tch_parameter parameters[2 * LAYERS];
    const tch_tensor *gradients[2 * LAYERS];
    for (int32_t i = 0; i < 2 * LAYERS; i++) {
        parameters[i] = (tch_parameter){.tensor = tch_network_parameter(network, i),
                                        .name = tch_network_parameter_name(network, i)};
        gradients[i] = tch_network_gradient(network, i);
    }
    tch_optimizer *optimizer;
    tch_kfac *kfac = with_kfac ? make_kfac(context, network) : NULL;
    must(tch_optimizer_create(context, config, NULL, 2 * LAYERS, parameters, &optimizer));
    for (int step = 0; step < STEPS; step++) {
        must(tch_network_loss_and_gradients(network, inputs, labels, NULL, totals));
        if (with_kfac) {
            precondition(kfac, network, config->lr, step);
        }
        must(tch_optimizer_step(optimizer, 2 * LAYERS, gradients));
    }
    must(tch_tensor_fill(context, totals, 0.0));
    must(tch_network_evaluate(network, inputs, labels, totals));
    must(tch_tensor_copy(context, &host_sums, totals));
    tch_kfac_destroy(kfac);
    tch_optimizer_destroy(optimizer);
    tch_network_destroy(network);
    tch_tensor_destroy(totals);
    return sums[TCH_TOTAL_LOSS] / SPIRAL_ROWS;
}

int main(void)
{
    tch_context *context;
    tch_tensor *inputs, *labels;
    must(tch_context_create("auto", &context));
    create_spirals(context, &inputs, &labels);
    tch_optim_config sgd = tch_optim_defaults(TCH_OPTIM_SGD), adamw = tch_optim_defaults(TCH_OPTIM_ADAMW);
    sgd.lr = 0.1;
    sgd.momentum = 0.9;
    adamw.lr = 0.05; /* the best of 0.01, 0.02, 0.05 and 0.1 */
    double with_kfac = train(context, &sgd, 1, inputs, labels), with_adamw = train(context, &adamw, 0, inputs, labels);
    printf("loss after %d steps: KFAC %.4f, AdamW %.4f\n", STEPS, with_kfac, with_adamw);
    tch_tensor_destroy(inputs);
    tch_tensor_destroy(labels);
    tch_context_destroy(context);
    return with_kfac < with_adamw ? 0 : 1;
}

/* Per-sample clipping, the natural gradient in the span of the batch, and KFAC. Gradients change in place; nothing
 * synchronizes, and only KFAC has state. */
#include "curvature.h"

#include <stdio.h>

/* --- creation ----------------------------------------------------------------------------------------------------- */

static tch_status create_kfac(const train_setup *setup, train_curvature_state *state)
{
    tch_kfac_layer layers[TRAIN_HIDDEN + 1];
    char names[TRAIN_HIDDEN + 1][16];
    int32_t count = tch_network_layer_count(state->network);
    for (int32_t k = 0; k < count; k++) {
        const tch_tensor *weight = tch_network_parameter(state->network, 2 * k);
        snprintf(names[k], sizeof names[k], "layer%d", k + 1);
        layers[k] = (tch_kfac_layer){.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR),
                                     .inputs = weight->shape[1],
                                     .outputs = weight->shape[0],
                                     .bias = 1,
                                     .name = names[k]};
    }
    tch_kfac_config config = train_plan_kfac(&setup->plan, state->kind);
    return tch_kfac_create(setup->context, &config, NULL, count, layers, &state->kfac);
}

static tch_status create_natural(const train_setup *setup, train_curvature_state *state)
{
    const int64_t batch = setup->plan.batch, square[] = {batch, batch};
    CLI_TRY(tch_tensor_create(setup->context, TCH_FLOAT64, 2, square, TCH_CONTIGUOUS, &state->gram));
    CLI_TRY(tch_tensor_create(setup->context, TCH_FLOAT64, 1, &batch, TCH_CONTIGUOUS, &state->weights));
    return tch_tensor_create(setup->context, TCH_INT32, 0, NULL, TCH_CONTIGUOUS, &state->report);
}

tch_status train_curvature_create(const train_setup *setup, train_curvature kind, tch_network *network,
                                  train_curvature_state *state)
{
    const int64_t batch = setup->plan.batch;
    *state = (train_curvature_state){.kind = kind, .network = network};
    if (setup->plan.per_sample_clip > 0.0) {
        CLI_TRY(tch_tensor_create(setup->context, TCH_FLOAT64, 1, &batch, TCH_CONTIGUOUS, &state->shares));
    }
    if (state->kind == TRAIN_NATURAL) {
        return create_natural(setup, state);
    }
    return state->kind != TRAIN_PLAIN ? create_kfac(setup, state) : TCH_OK;
}

void train_curvature_destroy(train_curvature_state *state)
{
    tch_kfac_destroy(state->kfac);
    tch_tensor_destroy(state->shares);
    tch_tensor_destroy(state->gram);
    tch_tensor_destroy(state->weights);
    tch_tensor_destroy(state->report);
}

/* --- per-sample gradients ---------------------------------------------------------------------------------------- */

/* The factor of each sample's gradient: 1, or less if its norm exceeds --per-sample-clip. */
static tch_status find_clip_weights(const train_setup *setup, const train_curvature_state *state)
{
    for (int32_t k = 0; k < tch_network_layer_count(state->network); k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        CLI_TRY(tch_network_get_layer(state->network, k, &at));
        CLI_TRY(tch_grad_norms(setup->context, &at.layer, at.input, at.output_gradient, TCH_GRAD_BOTH, k > 0,
                               state->shares));
    }
    return tch_grad_clip_weights(setup->context, state->shares, setup->plan.per_sample_clip, state->shares);
}

static tch_status clip_samples(const train_setup *setup, const train_curvature_state *state)
{
    CLI_TRY(find_clip_weights(setup, state));
    return tch_network_weigh_samples(state->network, state->shares, 1.0 / (double)setup->plan.batch);
}

/* (F + damping I)^-1 times the mean gradient, with F the mean of the samples' outer products. The mean is that of the
 * clipped samples if they are clipped; F is that of the unclipped ones. */
static tch_status apply_natural(const train_setup *setup, const train_curvature_state *state)
{
    CLI_TRY(state->shares != NULL ? find_clip_weights(setup, state) : TCH_OK);
    for (int32_t k = 0; k < tch_network_layer_count(state->network); k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        CLI_TRY(tch_network_get_layer(state->network, k, &at));
        CLI_TRY(
            tch_grad_gram(setup->context, &at.layer, at.input, at.output_gradient, TCH_GRAD_BOTH, k > 0, state->gram));
    }
    CLI_TRY(tch_grad_natural_weights(setup->context, state->gram, state->shares,
                                     train_plan_damping(&setup->plan, state->kind), state->weights, state->report));
    return tch_network_weigh_samples(state->network, state->weights, 1.0);
}

/* --- KFAC -------------------------------------------------------------------------------------------------------- */

static tch_status observe_layers(const train_setup *setup, const train_curvature_state *state, int64_t step)
{
    const train_plan *plan = &setup->plan;
    uint64_t seed = (uint64_t)plan->seed * 0x9E3779B97F4A7C15u + (uint64_t)step;
    CLI_TRY(plan->empirical ? TCH_OK : tch_network_draw_labels(state->network, seed));
    for (int32_t k = 0; k < tch_network_layer_count(state->network); k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        CLI_TRY(tch_network_get_layer(state->network, k, &at));
        CLI_TRY(tch_kfac_observe(state->kfac, k, at.input, at.output_gradient, at.layer.scale, NULL));
    }
    return TCH_OK;
}

/* Every `frequency` steps; during the first of these intervals at each step, since early factors have seen few
 * batches. */
static bool refreshes_at(const train_plan *plan, int64_t step)
{
    int64_t period = train_plan_frequency(plan);
    return step < period || step % period == 0;
}

static tch_status apply_kfac(const train_setup *setup, const train_curvature_state *state, int64_t step, double rate)
{
    tch_tensor *gradients[TRAIN_PARAMETERS];
    int32_t count = tch_network_parameter_count(state->network);
    for (int32_t i = 0; i < count; i++) {
        gradients[i] = tch_network_gradient(state->network, i);
    }
    CLI_TRY(observe_layers(setup, state, step));
    if (refreshes_at(&setup->plan, step)) {
        CLI_TRY(tch_kfac_refresh(state->kfac));
    }
    return tch_kfac_precondition(state->kfac, rate, count, gradients);
}

tch_status train_curvature_apply(const train_setup *setup, const train_curvature_state *state, int64_t step,
                                 double rate)
{
    if (state->kind == TRAIN_NATURAL) {
        return apply_natural(setup, state);
    }
    tch_status status = state->shares != NULL ? clip_samples(setup, state) : TCH_OK;
    return status || state->kfac == NULL ? status : apply_kfac(setup, state, step, rate);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

int64_t train_curvature_bytes(const train_curvature_state *state)
{
    int64_t bytes = 0;
    for (int32_t i = 0; state->kfac != NULL && i < tch_kfac_state_count(state->kfac); i++) {
        tch_optim_state entry = TCH_OPTIM_STATE_INIT;
        if (tch_kfac_get_state(state->kfac, i, &entry) == TCH_OK) {
            bytes += tch_tensor_numel(entry.tensor) * (int64_t)tch_dtype_size(entry.tensor->dtype);
        }
    }
    return bytes;
}

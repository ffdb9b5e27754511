/* What a step does with single samples and curvature, between the gradients of a batch and the optimizer's step: clipping
 * each sample's gradient, the natural gradient in the span of the batch, and KFAC. Gradients change in place; nothing
 * waits for the device, and nothing here has a state of its own but KFAC. */
#include <stdio.h>

#include "train/train.h"

/* --- making and ending -------------------------------------------------------------------------------------------- */

static tch_status create_kfac(const train_session *session, train_run *run)
{
    tch_kfac_layer layers[TRAIN_HIDDEN + 1];
    char names[TRAIN_HIDDEN + 1][16];
    int32_t count = tch_network_layer_count(run->network);
    for (int32_t k = 0; k < count; k++) {
        const tch_tensor *weight = tch_network_parameter(run->network, 2 * k);
        snprintf(names[k], sizeof names[k], "layer%d", k + 1);
        layers[k] = (tch_kfac_layer){.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR),
                                     .inputs = weight->shape[1],
                                     .outputs = weight->shape[0],
                                     .bias = 1,
                                     .name = names[k]};
    }
    tch_kfac_config config = train_plan_kfac(&session->plan, &run->method);
    return tch_kfac_create(session->context, &config, count, layers, &run->kfac);
}

static tch_status create_natural(const train_session *session, train_run *run)
{
    const int64_t batch = session->plan.batch, square[] = {batch, batch};
    tch_status status = tch_tensor_create(session->context, TCH_FLOAT64, 2, square, TCH_CONTIGUOUS, &run->gram);
    if (status == TCH_OK)
        status = tch_tensor_create(session->context, TCH_FLOAT64, 1, &batch, TCH_CONTIGUOUS, &run->weights);
    return status ? status : tch_tensor_create(session->context, TCH_INT32, 0, NULL, TCH_CONTIGUOUS, &run->report);
}

tch_status train_curvature_create(const train_session *session, train_run *run)
{
    const int64_t batch = session->plan.batch;
    tch_status status = TCH_OK;
    if (session->plan.per_sample_clip > 0.0)
        status = tch_tensor_create(session->context, TCH_FLOAT64, 1, &batch, TCH_CONTIGUOUS, &run->shares);
    if (status == TCH_OK && run->method.curvature == TRAIN_NATURAL)
        return create_natural(session, run);
    if (status == TCH_OK && run->method.curvature != TRAIN_PLAIN)
        return create_kfac(session, run);
    return status;
}

void train_curvature_destroy(train_run *run)
{
    tch_kfac_destroy(run->kfac);
    tch_tensor_destroy(run->shares);
    tch_tensor_destroy(run->gram);
    tch_tensor_destroy(run->weights);
    tch_tensor_destroy(run->report);
}

/* --- single samples ----------------------------------------------------------------------------------------------- */

/* How much of each sample's gradient is left: 1, or less where it is longer than --per-sample-clip. */
static tch_status find_shares(const train_session *session, train_run *run)
{
    tch_status status = TCH_OK;
    for (int32_t k = 0; k < tch_network_layer_count(run->network) && status == TCH_OK; k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        status = tch_network_get_layer(run->network, k, &at);
        if (status == TCH_OK)
            status = tch_grad_norms(session->context, &at.layer, at.input, at.output_gradient, TCH_GRAD_BOTH, k > 0,
                                    run->shares);
    }
    return status ? status
                  : tch_grad_clip_weights(session->context, run->shares, session->plan.per_sample_clip, run->shares);
}

static tch_status clip(const train_session *session, train_run *run)
{
    tch_status status = find_shares(session, run);
    return status ? status : tch_network_weigh_samples(run->network, run->shares, 1.0 / (double)session->plan.batch);
}

/* (F + damping I)^-1 times the mean gradient, F being the mean of the samples' outer products. Where samples are clipped
 * it is the mean that is: F stays that of the samples as they are. */
static tch_status make_natural(const train_session *session, train_run *run)
{
    tch_status status = run->shares != NULL ? find_shares(session, run) : TCH_OK;
    for (int32_t k = 0; k < tch_network_layer_count(run->network) && status == TCH_OK; k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        status = tch_network_get_layer(run->network, k, &at);
        if (status == TCH_OK)
            status = tch_grad_gram(session->context, &at.layer, at.input, at.output_gradient, TCH_GRAD_BOTH, k > 0,
                                   run->gram);
    }
    if (status == TCH_OK)
        status = tch_grad_natural_weights(session->context, run->gram, run->shares,
                                          train_plan_damping(&session->plan, &run->method), run->weights, run->report);
    return status ? status : tch_network_weigh_samples(run->network, run->weights, 1.0);
}

/* --- KFAC --------------------------------------------------------------------------------------------------------- */

static tch_status observe(const train_session *session, train_run *run)
{
    const train_plan *plan = &session->plan;
    uint64_t seed = (uint64_t)plan->seed * 0x9E3779B97F4A7C15u + (uint64_t)run->step;
    tch_status status = plan->empirical ? TCH_OK : tch_network_draw_labels(run->network, seed);
    for (int32_t k = 0; k < tch_network_layer_count(run->network) && status == TCH_OK; k++) {
        tch_network_layer at = TCH_NETWORK_LAYER_INIT;
        status = tch_network_get_layer(run->network, k, &at);
        if (status == TCH_OK)
            status = tch_kfac_observe(run->kfac, k, at.input, at.output_gradient, at.layer.scale, NULL);
    }
    return status;
}

/* Every so many steps; in the first of these periods at each, since the factors begin with a single batch. */
static bool refresh_is_due(const train_plan *plan, int64_t step)
{
    int64_t period = train_plan_frequency(plan);
    return step < period || step % period == 0;
}

static tch_status precondition(const train_session *session, train_run *run, double rate)
{
    tch_tensor *gradients[TRAIN_PARAMETERS];
    int32_t count = tch_network_parameter_count(run->network);
    for (int32_t i = 0; i < count; i++)
        gradients[i] = tch_network_gradient(run->network, i);
    tch_status status = observe(session, run);
    if (status == TCH_OK && refresh_is_due(&session->plan, run->step))
        status = tch_kfac_refresh(run->kfac);
    return status ? status : tch_kfac_precondition(run->kfac, rate, count, gradients);
}

tch_status train_curvature_apply(const train_session *session, train_run *run, double rate)
{
    if (run->method.curvature == TRAIN_NATURAL)
        return make_natural(session, run);
    tch_status status = run->shares != NULL ? clip(session, run) : TCH_OK;
    return status || run->kfac == NULL ? status : precondition(session, run, rate);
}

/* --- what it takes ------------------------------------------------------------------------------------------------ */

int64_t train_curvature_bytes(const train_run *run)
{
    int64_t bytes = 0;
    for (int32_t i = 0; run->kfac != NULL && i < tch_kfac_state_count(run->kfac); i++) {
        tch_optim_state state = TCH_OPTIM_STATE_INIT;
        if (tch_kfac_get_state(run->kfac, i, &state) == TCH_OK)
            bytes += tch_tensor_numel(state.tensor) * (int64_t)tch_dtype_size(state.tensor->dtype);
    }
    return bytes;
}

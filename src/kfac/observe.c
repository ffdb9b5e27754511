/* Updates the factors with a batch. The host computes the weights of the moving averages from the counts of
 * observations; whether a batch is finite is decided on the device. */
#include <math.h>

#include "core/check.h"
#include "core/status.h"
#include "grad/factors.h"
#include "grad/layer.h"

#include "kfac.h"

/* The weight of update number `updates`. With correction, the weights of all updates sum to 1; with a decay of 1 that
 * is their mean. */
static double share_of(const tch_kfac_config *config, int64_t updates)
{
    double decay = config->factor_decay;
    if (!config->use_bias_correction) {
        return 1.0 - decay;
    }
    return decay == 1.0 ? 1.0 / (double)updates : (1.0 - decay) / -expm1((double)updates * log(decay));
}

/* The first observation of a step scales the average, and each adds its part. */
static tchi_curvature_update curvature_update(const tch_kfac *k, double share, bool first, const float *grad_scale)
{
    return (tchi_curvature_update){
        .alpha = share / k->config.accumulation_steps, .beta = first ? 1.0 - share : 1.0, .grad_scale = grad_scale};
}

/* The tensors of one layer's state. */
typedef struct layer_views {
    tch_tensor factor[TCHI_SIDES], result[TCHI_SIDES], scales;
    int64_t square[TCHI_SIDES][3], rectangle[3];
} layer_views;

static tch_tensor state_view(const tch_kfac *k, char *data, int64_t groups, int64_t *shape)
{
    tch_tensor t = tch_tensor_view(data, k->config.factor_dtype, groups > 1 ? 3 : 2, groups > 1 ? shape : shape + 1);
    t.device = tch_context_device(k->context);
    return t;
}

static void views_of(const tch_kfac *k, const tchi_kfac_layer *layer, layer_views *v)
{
    const tchi_kfac_block_batch *block_batch = &k->block_batches[layer->block_batch];
    int64_t size = tchi_scalar_size(k->type);
    for (int side = 0; side < TCHI_SIDES; side++) {
        const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, block_batch, side);
        int64_t at = (block_batch->position[side] + layer->unit) * f->n * f->n * size;
        v->square[side][0] = layer->groups;
        v->square[side][1] = v->square[side][2] = f->n;
        v->factor[side] = state_view(k, f->factors + at, layer->groups, v->square[side]);
        v->result[side] =
            state_view(k, k->config.method == TCH_KFAC_EKFAC ? f->results + at : NULL, layer->groups, v->square[side]);
    }
    v->rectangle[0] = layer->groups;
    v->rectangle[1] = block_batch->size[TCHI_OUTPUT];
    v->rectangle[2] = block_batch->size[TCHI_INPUT];
    int64_t at = layer->unit * v->rectangle[1] * v->rectangle[2] * size;
    v->scales =
        state_view(k, block_batch->scales != NULL ? block_batch->scales + at : NULL, layer->groups, v->rectangle);
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static tch_status check_columns(const tchi_kfac_layer *layer, const tch_tensor *input, const tch_tensor *gradient)
{
    tchi_side a = tchi_input_side(&layer->layer, input);
    tchi_side g = tchi_gradient_side(&layer->layer, gradient);
    char text[TCHI_DESCRIBE_SIZE];
    if (a.cols != layer->inputs) {
        return tchi_fail(TCH_ERR_SHAPE, "layer '%s': input is %s, which has %lld inputs to a weight, expected %lld",
                         layer->name, tchi_describe(input, text, sizeof text), (long long)a.cols,
                         (long long)layer->inputs);
    }
    if (g.cols * g.groups != layer->outputs) {
        return tchi_fail(TCH_ERR_SHAPE, "layer '%s': output_gradient is %s, which has %lld outputs, expected %lld",
                         layer->name, tchi_describe(gradient, text, sizeof text), (long long)(g.cols * g.groups),
                         (long long)layer->outputs);
    }
    return TCH_OK;
}

static tch_status check_grad_scale(const tch_context *context, const tch_tensor *grad_scale)
{
    char text[TCHI_DESCRIBE_SIZE];
    if (grad_scale == NULL) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_check_input(context, grad_scale, "grad_scale"));
    if (tchi_scalar_of(grad_scale->dtype) != TCH_SCALAR_F32 || tch_tensor_numel(grad_scale) != 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "grad_scale is %s, expected one float32 number",
                         tchi_describe(grad_scale, text, sizeof text));
    }
    return TCH_OK;
}

static tch_status check_observe(const tch_kfac *k, int32_t index, const tch_tensor *input, const tch_tensor *gradient,
                                double scale, const tch_tensor *grad_scale)
{
    if (index < 0 || index >= k->count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_observe: layer is %d, expected 0 to %d", index,
                         k->count - 1);
    }
    if (!isfinite(scale)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_observe: scale is %g, expected a finite number", scale);
    }
    const tchi_kfac_layer *layer = &k->layers[index];
    TCHI_TRY(check_grad_scale(k->context, grad_scale));
    TCHI_TRY(tchi_check_input(k->context, input, "input"));
    TCHI_TRY(tchi_check_input(k->context, gradient, "output_gradient"));
    TCHI_TRY(tchi_check_curvature(k->context, "tch_kfac_observe", &layer->layer, input, gradient, 1.0, 1.0));
    return check_columns(layer, input, gradient);
}

/* --- one observation --------------------------------------------------------------------------------------------- */

typedef struct observation {
    int32_t index;
    tch_layer layer; /* with the scale of this call */
    const tch_tensor *input, *gradient;
    const float *grad_scale;
    bool first; /* of a step */
    layer_views views;
} observation;

/* Scales are in the basis of the latest refresh and begin at the factors' values, so their average needs no
 * correction. */
static tch_status observe_scales(tch_kfac *k, observation *o, bool rehearse)
{
    layer_views *v = &o->views;
    tchi_curvature_update update = curvature_update(k, 1.0 - k->config.factor_decay, o->first, o->grad_scale);
    update.rehearse = rehearse;
    return tchi_grad_scales(k->context, &o->layer, o->input, o->gradient, k->layers[o->index].bias,
                            &v->result[TCHI_INPUT], &v->result[TCHI_OUTPUT], &update, &v->scales);
}

static tch_status observe_factors(tch_kfac *k, observation *o)
{
    layer_views *v = &o->views;
    double share = share_of(&k->config, tchi_kfac_counts(k, o->index)[TCHI_UPDATES] + o->first);
    tchi_curvature_update update = curvature_update(k, share, o->first, o->grad_scale);
    update.rejected = &k->control->rejected;
    TCHI_TRY(tchi_grad_factors(k->context, &o->layer, o->input, o->gradient, k->layers[o->index].bias,
                               k->config.sharing, &update, &v->factor[TCHI_INPUT], &v->factor[TCHI_OUTPUT]));
    return k->context->backend->update->decide_skip(k->context->state, &k->control->rejected, NULL, NULL,
                                                    &k->control->skip, k->control->counts);
}

/* Reserves the memory of scales first, so that running out of it cannot leave a batch partly observed. */
static tch_status observe_batch(tch_kfac *k, observation *o)
{
    int64_t *counts = tchi_kfac_counts(k, o->index);
    bool scaled = k->config.method == TCH_KFAC_EKFAC && counts[TCHI_REFRESHES] > 0;
    o->first = counts[TCHI_PENDING] == 0;
    views_of(k, &k->layers[o->index], &o->views);
    if (scaled) {
        TCHI_TRY(observe_scales(k, o, true));
    }
    TCHI_TRY(observe_factors(k, o));
    if (scaled) {
        TCHI_TRY(observe_scales(k, o, false));
        counts[TCHI_SCALE_UPDATES] += o->first;
    }
    counts[TCHI_UPDATES] += o->first;
    counts[TCHI_PENDING] = counts[TCHI_PENDING] + 1 < k->config.accumulation_steps ? counts[TCHI_PENDING] + 1 : 0;
    return TCH_OK;
}

tch_status tch_kfac_observe(tch_kfac *kfac, int32_t layer, const tch_tensor *input, const tch_tensor *output_gradient,
                            double scale, const tch_tensor *grad_scale)
{
    TCHI_TRY(tchi_kfac_usable(kfac, "tch_kfac_observe"));
    TCHI_ENTER(kfac->context, "tch_kfac_observe");
    TCHI_TRY(check_observe(kfac, layer, input, output_gradient, scale, grad_scale));
    if (tch_tensor_numel(output_gradient) == 0) { /* an empty batch changes nothing */
        return TCH_OK;
    }
    observation o = {.index = layer, .layer = kfac->layers[layer].layer, .input = input, .gradient = output_gradient};
    o.layer.scale = scale;
    o.grad_scale = grad_scale == NULL ? NULL : tchi_tensor_data(grad_scale);
    return tchi_kfac_note(kfac, observe_batch(kfac, &o));
}

/* See state.h. */
#include "state.h"

#include <stdbool.h>

static const int64_t bias_shape[] = {4};
static const int64_t square_shape[] = {2, 2}; /* of the layer's weight; the other two are a batch of three */

static tch_status make_kfac(tch_context *context, stateful *s)
{
    tch_kfac_layer layer = {.layer = TCH_LAYER_INIT(TCH_LAYER_LINEAR), .bias = 0, .inputs = 2, .outputs = 2};
    tch_kfac_config config = TCH_KFAC_CONFIG_INIT;
    return tch_kfac_create(context, &config, NULL, 1, &layer, &s->kfac);
}

const char *stateful_name(int kind)
{
    return kind == STATE_KFAC     ? "kfac"
           : kind == STATE_NARROW ? "shampoo_narrow"
                                  : tch_optim_kind_name((tch_optim_kind)kind);
}

tch_status stateful_make(tch_context *context, int kind, int form, stateful *s)
{
    bool small = form == STATE_SMALL;
    *s = (stateful){.shape = {small ? 3 : STATE_SIDE, small ? 2 : STATE_SIDE}};
    for (int64_t i = 0; i < s->shape[0] * s->shape[1]; i++) {
        s->weight[i] = 0.1F * (float)(i % 23);
        s->weight_gradient[i] = 0.5F - 0.2F * (float)(i % 19);
    }
    for (int i = 0; i < 4; i++) {
        s->bias[i] = 1.0F;
        s->bias_gradient[i] = 0.1F * (float)(i + 1);
    }
    s->tensors[0] = tch_tensor_view(s->weight, TCH_FLOAT32, 2, s->shape);
    s->tensors[1] = tch_tensor_view(s->bias, TCH_FLOAT32, 1, (int64_t *)bias_shape);
    s->gradients[0] = tch_tensor_view(s->weight_gradient, TCH_FLOAT32, 2, s->shape);
    s->gradients[1] = tch_tensor_view(s->bias_gradient, TCH_FLOAT32, 1, (int64_t *)bias_shape);
    if (kind == STATE_KFAC) {
        return make_kfac(context, s);
    }
    const tch_parameter parameters[] = {{.tensor = &s->tensors[0], .name = "w"},
                                        {.tensor = &s->tensors[1], .name = "b"}};
    tch_optim_config config = tch_optim_defaults(kind == STATE_NARROW ? TCH_OPTIM_SHAMPOO : (tch_optim_kind)kind);
    config.packed_factors = small ? kind == STATE_NARROW : form / 3 % 2;
    config.root_dtype = (small ? kind == STATE_NARROW : form / 6 % 2) ? TCH_STATE_BFLOAT16 : TCH_STATE_FLOAT32;
    config.state_dtype = small ? TCH_STATE_FLOAT32 : (tch_state_dtype)(form % 3);
    config.momentum = 0.9;
    config.precondition_frequency = 2;
    return tch_optimizer_create(context, &config, NULL, 2, parameters, &s->optimizer);
}

void stateful_end(stateful *s)
{
    tch_optimizer_destroy(s->optimizer);
    tch_kfac_destroy(s->kfac);
    s->optimizer = NULL;
    s->kfac = NULL;
}

tch_status stateful_step(stateful *s)
{
    const tch_tensor *gradients[] = {&s->gradients[0], &s->gradients[1]};
    tch_tensor square = tch_tensor_view(s->weight_gradient, TCH_FLOAT32, 2, (int64_t *)square_shape);
    tch_tensor *const changed[] = {&square, NULL};
    if (s->optimizer != NULL) {
        return tch_optimizer_step(s->optimizer, 2, gradients);
    }
    tch_status status = tch_kfac_observe(s->kfac, 0, &s->tensors[0], &s->gradients[0], 1.0, NULL);
    status = status != TCH_OK ? status : tch_kfac_refresh(s->kfac);
    return status != TCH_OK ? status : tch_kfac_precondition(s->kfac, 0.1, 2, changed);
}

tch_status stateful_save(stateful *s, tch_checkpoint_writer *writer)
{
    return s->optimizer != NULL ? tch_optimizer_save(s->optimizer, writer, "o") : tch_kfac_save(s->kfac, writer, "o");
}

tch_status stateful_load(stateful *s, tch_checkpoint *checkpoint)
{
    return s->optimizer != NULL ? tch_optimizer_load(s->optimizer, checkpoint, "o")
                                : tch_kfac_load(s->kfac, checkpoint, "o");
}

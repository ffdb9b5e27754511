/* See elementwise.h. One launch for all parameters of a group that have the same types. */
#include "elementwise.h"

#include "core/check.h"
#include "core/status.h"

#include "pieces.h"

static tch_status sgd(tch_optimizer *o, int32_t group, const tch_update *update)
{
    return o->context->backend->sgd(o->context->state, update, tchi_group_at(o, group)->config.nesterov);
}

static tch_status adamw(tch_optimizer *o, int32_t group, const tch_update *update)
{
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    return o->context->backend->adamw(o->context->state, update, config->kind == TCH_OPTIM_ADAMW && config->amsgrad,
                                      config->decay == TCH_DECAY_L2);
}

tch_status tchi_elementwise_step(tch_optimizer *optimizer, int32_t group)
{
    TCHI_RANGE(optimizer->context, "elementwise");
    const tchi_group *g = tchi_group_at(optimizer, group);
    bool own = g->config.kind == TCH_OPTIM_SGD || g->config.kind == TCH_OPTIM_ADAMW;
    return tchi_for_each_type(optimizer, group, false, own ? &g->numbers->main : &g->numbers->scalar,
                              g->config.kind == TCH_OPTIM_SGD ? sgd : adamw);
}

static bool takes_nothing(const tch_optim_config *config, const tchi_dims *dims)
{
    (void)config;
    (void)dims;
    return false;
}

const tchi_optim_method tchi_method_elementwise = {TCH_OPTIM_ADAMW, takes_nothing, NULL, NULL};

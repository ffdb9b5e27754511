/* See elementwise.h. One launch for all parameters of a group that have the same types. */
#include "elementwise.h"

#include "core/check.h"
#include "core/status.h"

#include "own_kernel.h"
#include "pieces.h"

tch_status tchi_elementwise_built_in(tch_optimizer *optimizer, int32_t group, const tch_update *update)
{
    const tch_backend *t = optimizer->context->backend;
    const tch_optim_config *config = &tchi_group_at(optimizer, group)->config;
    if (config->kind == TCH_OPTIM_SGD) {
        return t->update->sgd(optimizer->context->state, update, config->nesterov);
    }
    return t->update->adamw(optimizer->context->state, update, config->kind == TCH_OPTIM_ADAMW && config->amsgrad,
                            config->decay == TCH_DECAY_L2);
}

static tch_status apply(tch_optimizer *o, int32_t group, const tch_update *update)
{
    tchi_own *own = &o->own[TCH_OPTIM_PART_UPDATE];
    return tchi_own_updates(own, group, update->real) ? tchi_own_update(o, own, group, update)
                                                      : tchi_elementwise_built_in(o, group, update);
}

tch_status tchi_elementwise_step(tch_optimizer *optimizer, int32_t group)
{
    TCHI_RANGE(optimizer->context, "elementwise");
    const tchi_group *g = tchi_group_at(optimizer, group);
    bool own = g->config.kind == TCH_OPTIM_SGD || g->config.kind == TCH_OPTIM_ADAMW;
    return tchi_for_each_type(optimizer, group, false, own ? &g->numbers->main : &g->numbers->scalar, apply);
}

static bool takes_nothing(const tch_optim_config *config, const tchi_dims *dims)
{
    (void)config;
    (void)dims;
    return false;
}

const tchi_optim_method tchi_method_elementwise = {TCH_OPTIM_ADAMW, takes_nothing, NULL, NULL};

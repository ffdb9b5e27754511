/* See elementwise.h. One launch for all parameters of a group that have the same types. */
#include "elementwise.h"

#include "core/check.h"
#include "core/status.h"

#include "method.h"
#include "rects.h"

static tch_status update_elements(tch_optimizer *o, int32_t group, const tch_update *update)
{
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    const tchi_elementwise *method = o->method->elementwise;
    const tch_elementwise_rule rule = {method->kind, config->amsgrad && !method->of_rest, config->decay == TCH_DECAY_L2,
                                       config->nesterov};
    return o->context->backend->update->elementwise(o->context->state, update, &rule);
}

const tch_hyper *tchi_elementwise_hyper(const tch_optimizer *optimizer, const tchi_group *group)
{
    return optimizer->method->elementwise->of_rest ? &group->numbers->scalar : &group->numbers->main;
}

tch_status tchi_elementwise_step(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    TCHI_RANGE(optimizer->context, "elementwise");
    const tch_hyper *hyper = tchi_elementwise_hyper(optimizer, tchi_group_at(optimizer, group));
    return tchi_for_each_type(optimizer, now, group, false, hyper, update_elements);
}

/* See elementwise.h. One launch for all parameters of a group that have the same types. */
#include "elementwise.h"

#include "core/check.h"
#include "core/status.h"

#include "method.h"
#include "rects.h"

static tch_status apply(tch_optimizer *o, int32_t group, const tch_update *update)
{
    return o->method->elementwise->update(o->context, &tchi_group_at(o, group)->config, update);
}

const tch_hyper *tchi_elementwise_hyper(const tch_optimizer *optimizer, const tchi_group *group)
{
    return optimizer->method->elementwise->of_rest ? &group->numbers->scalar : &group->numbers->main;
}

tch_status tchi_elementwise_step(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    TCHI_RANGE(optimizer->context, "elementwise");
    const tch_hyper *hyper = tchi_elementwise_hyper(optimizer, tchi_group_at(optimizer, group));
    return tchi_for_each_type(optimizer, now, group, false, hyper, apply);
}

/* See elementwise.h. One launch for all parameters of a group that have the same types. */
#include "elementwise.h"

#include "core/check.h"
#include "core/status.h"

#include "method.h"
#include "rects.h"
#include "user_kernel.h"

tch_status tchi_elementwise_built_in(tch_optimizer *optimizer, int32_t group, const tch_update *update)
{
    const tchi_elementwise *elementwise = optimizer->method->elementwise;
    tchi_update_flags flags = elementwise->flags(&tchi_group_at(optimizer, group)->config);
    return elementwise->update(optimizer->context, update, &flags);
}

static tch_status apply(tch_optimizer *o, int32_t group, const tch_update *update)
{
    tchi_user_kernel *own = &o->own[TCH_OPTIM_PART_UPDATE];
    bool may = update->moments == TCH_MOMENTS_REAL; /* a custom kernel knows no other */
    return may && tchi_user_kernel_updates(own, group, update->real) ? tchi_user_kernel_update(o, own, group, update)
                                                                     : tchi_elementwise_built_in(o, group, update);
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

#include "constant_norm.h"

#include "core/check.h"
#include "core/status.h"

int64_t tchi_constant_norm_room(const tchi_block_batch *block_batch)
{
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    return tchi_work_bytes(&work, 1);
}

/* Reads parameters, or their masters, as `gather` reads gradients. */
static tch_status gather_values(tch_optimizer *o, const tchi_run *run, const tchi_work *work, void *room)
{
    tch_update update = tchi_update_run(o, run, work, room, NULL);
    update.grad_scale = NULL;
    update.maximize = 0;
    update.grad_type = o->rects[0].master != NULL ? update.real : update.param_type;
    for (int64_t i = 0; i < update.count; i++) {
        o->rects[i].grad = o->rects[i].master != NULL ? o->rects[i].master : o->rects[i].param;
    }
    return o->context->backend->update->gather(o->context->state, &update, &(tch_gathering){0}, NULL);
}

/* Subtracts lr R / |D| times the directions from the gathered values. */
static tch_status step_values(tch_optimizer *o, const tchi_run *run, const tch_matrices *direction,
                              const tch_matrices *values)
{
    const tchi_group *group = tchi_group_at(o, run->block_batch->group);
    tch_update update = tchi_update_of(o, NULL, run->block_batch->group, &group->numbers->main);
    for (int64_t i = 0; i < run->count; i++) {
        o->rects[i] = (tch_rect){
            .param = (char *)values->data + i * values->stride * tchi_scalar_size(values->type),
            .block = {(char *)direction->data + i * direction->stride * tchi_scalar_size(direction->type)},
            .clock = tchi_run_param(o, run)->clock,
            .rows = values->rows,
            .cols = values->cols,
            .stride = values->ld,
            .block_ld = direction->ld,
            .block_index = (int32_t)i,
            .factor = 1.0,
        };
    }
    update.count = run->count;
    update.real = update.param_type = update.grad_type = values->type;
    update.block_type = direction->type;
    return o->context->backend->update->apply(o->context->state, &update, TCH_BLOCK_GRAFT, o->target_norms, o->norms, 0,
                                              TCH_DECAY_L2);
}

tch_status tchi_constant_norm_apply(tch_optimizer *optimizer, const tchi_run *run, const tch_matrices *direction,
                                    void *room)
{
    const tch_backend *t = optimizer->context->backend;
    void *state = optimizer->context->state;
    const tchi_work work = tchi_work_of(run->block_batch, run->block_batch->real);
    const tch_matrices values = tchi_work_matrices(&work, room, run->count);
    TCHI_RANGE(optimizer->context, "apply");
    TCHI_TRY(gather_values(optimizer, run, &work, room));
    TCHI_TRY(t->matrix->reduce(state, TCH_REDUCE_FROBENIUS, &values, optimizer->target_norms));
    TCHI_TRY(t->matrix->reduce(state, TCH_REDUCE_FROBENIUS, direction, optimizer->norms));
    TCHI_TRY(step_values(optimizer, run, direction, &values));
    TCHI_TRY(t->matrix->reduce(state, TCH_REDUCE_FROBENIUS, &values, optimizer->norms));
    tch_update update = tchi_update_run(optimizer, run, &work, room, NULL);
    update.hyper = &tchi_group_at(optimizer, run->block_batch->group)->numbers->tile;
    return t->update->apply(state, &update, TCH_BLOCK_GRAFT, optimizer->target_norms, optimizer->norms, 0,
                            TCH_DECAY_WHOLE);
}

/* The rectangles of each parameter on this rank, which checkpoints write and read. */
#include <string.h>

#include "core/status.h"

#include "shared.h"

/* Of equal rectangles on several ranks, the first rank writes. */
static bool is_first(const tch_placement *p, const tch_shard *shard)
{
    size_t bytes = (size_t)p->ndim * sizeof *shard->start;
    bool first = true;
    for (int32_t i = 0; first && i < p->count; i++) {
        const tch_shard *other = &p->shards[i];
        first = other->rank >= shard->rank || memcmp(other->start, shard->start, bytes) != 0 ||
                memcmp(other->size, shard->size, bytes) != 0;
    }
    return first;
}

static bool lies_inside(const tch_placement *p, const tch_shard *s, const tchi_param *param)
{
    bool good = param->ndim == p->ndim;
    for (int32_t k = 0; good && k < p->ndim; k++) {
        good = s->start[k] >= 0 && s->size[k] >= 0 && s->offset[k] >= 0 && s->start[k] <= p->shape[k] - s->size[k] &&
               s->offset[k] <= param->shape[k] - s->size[k];
    }
    return good;
}

static tch_status note_shard(tch_optimizer *o, const tchi_param *param, const tch_placement *p, const tch_shard *s)
{
    tchi_held held = {.first = is_first(p, s)};
    size_t bytes = (size_t)p->ndim * sizeof *s->start;
    if (!lies_inside(p, s, param)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "a shard of '%s' on this rank is outside the tensor it was given with, or outside the whole",
                         param->name);
    }
    memcpy(held.start, s->start, bytes);
    memcpy(held.size, s->size, bytes);
    memcpy(held.offset, s->offset, bytes);
    return tchi_list_add(&o->shared->held, &held);
}

static tch_status note_param(tch_optimizer *o, const tchi_param *param, const tch_placement *p)
{
    tchi_shared_param noted = {.ndim = param->ndim, .first_held = o->shared->held.count};
    noted.sharded = p != NULL && p->count > 0;
    noted.ndim = noted.sharded ? p->ndim : param->ndim;
    memcpy(noted.shape, noted.sharded ? p->shape : param->shape, (size_t)noted.ndim * sizeof *noted.shape);
    for (int32_t i = 0; noted.sharded && i < p->count; i++) {
        if (p->shards[i].rank == tch_comm_rank(o->shared->comm) && tchi_elements(p->shards[i].size, p->ndim) > 0) {
            TCHI_TRY(note_shard(o, param, p, &p->shards[i]));
        }
    }
    noted.held = o->shared->held.count - noted.first_held;
    return tchi_list_add(&o->shared->params, &noted);
}

tch_status tchi_held_note(tch_optimizer *optimizer, int32_t group, const tch_placement *placements)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = 0; i < g->params; i++) {
        TCHI_TRY(note_param(optimizer, tchi_param_at(optimizer, g->first_param + i),
                            placements == NULL ? NULL : &placements[i]));
    }
    return TCH_OK;
}

void tchi_held_forget(tch_optimizer *optimizer, int64_t params)
{
    tchi_shared *shared = optimizer->shared;
    if (params < shared->params.count) {
        shared->held.count = tchi_shared_param_at(optimizer, (int32_t)params)->first_held;
        shared->params.count = params;
    }
}

/* A rank's part of the group, and agreement between ranks. See shared.h. */
#include "shared.h"

#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"

#include "optim/config.h"
#include "optim/create.h"
#include "optim/method.h"
#include "optim/saved_state.h"
#include "optim/shape.h"

/* --- opening and closing ----------------------------------------------------------------------------------------- */

tch_status tchi_shared_open(tch_optimizer *optimizer, tch_comm *comm)
{
    void *agreement;
    TCHI_TRY(tchi_host_take(sizeof *optimizer->shared, "a shared optimizer", &optimizer->shared));
    optimizer->shared->comm = comm;
    optimizer->shared->tiles.item_size = sizeof(tchi_tile);
    optimizer->shared->rects.item_size = sizeof(tch_rect);
    optimizer->shared->params.item_size = sizeof(tchi_shared_param);
    optimizer->shared->held.item_size = sizeof(tchi_held);
    optimizer->shared->stretches.item_size = sizeof(tchi_stretch);
    TCHI_TRY(tchi_pool_allocate(optimizer->context->pool, sizeof *optimizer->shared->agreement, &agreement));
    optimizer->shared->agreement = agreement;
    const tch_device_ops *d = optimizer->context->backend->device;
    return d->zero_bytes(optimizer->context->state, agreement, sizeof *optimizer->shared->agreement);
}

void tchi_shared_wait(tch_optimizer *optimizer)
{
    const tch_device_ops *d = optimizer->context->backend->device;
    void *state = optimizer->context->state;
    void *last = NULL;
    if (optimizer->shared != NULL && d->side_mark != NULL) {
        if (d->side_mark(state, &last) == TCH_OK && d->side_join(state, last) == TCH_OK) {
            d->synchronize(state);
        }
        d->event_destroy(state, last);
    }
}

void tchi_shared_close(tch_optimizer *optimizer)
{
    if (optimizer->shared == NULL) {
        return;
    }
    const tch_device_ops *d = optimizer->context->backend->device;
    if (optimizer->shared->seen != NULL) {
        d->event_destroy(optimizer->context->state, optimizer->shared->seen);
    }
    tchi_pool_free(optimizer->context->pool, optimizer->shared->agreement);
    tchi_list_release(&optimizer->shared->tiles);
    tchi_list_release(&optimizer->shared->rects);
    tchi_list_release(&optimizer->shared->params);
    tchi_list_release(&optimizer->shared->held);
    tchi_list_release(&optimizer->shared->stretches);
    tchi_host_release(optimizer->shared, sizeof *optimizer->shared);
    optimizer->shared = NULL;
}

/* --- parameters -------------------------------------------------------------------------------------------------- */

/* The index in the whole tensor of the first local element, if the local elements are contiguous there: stochastic
 * rounding is keyed by it. Otherwise local indices are used. */
static int64_t base_of(const tch_placement *placement, int32_t ndim, int32_t rank)
{
    for (int32_t i = 0; i < placement->count; i++) {
        const tch_shard *s = &placement->shards[i];
        int64_t base = 0;
        bool rows = s->rank == rank;
        for (int32_t k = 0; k < placement->ndim; k++) {
            base = base * placement->shape[k] + s->start[k];
            rows = rows && (k == 0 || s->size[k] == placement->shape[k] || tchi_is_flat(placement, ndim));
        }
        if (rows) {
            return base;
        }
    }
    return 0;
}

/* Directions of a smaller type than the parameter are sent, and directions of shards, whose owner does not have the
 * parameter unless it needs its norm. */
static void choose_wire(const tch_optimizer *o, tchi_param *p, bool sharded)
{
    const tchi_block_method *blocks = o->method->blocks;
    const tch_optim_config *config = &tchi_group_at(o, p->group)->config;
    bool l2 = tchi_adds_decay(config);
    tch_scalar direction =
        blocks->direction_type == NULL ? p->real : blocks->direction_type(o->context, config, p->real);
    p->by_value = config->constant_norm || (!sharded && tchi_scalar_size(direction) >= tchi_scalar_size(p->type));
    p->filters = sharded && !p->by_value && blocks->filtered_type != NULL;
    p->wire_in = p->filters           ? blocks->filtered_type(o->context, config, p->real)
                 : l2 && !p->by_value ? p->real
                                      : p->type;
    p->wire_out = p->by_value ? p->type : direction;
}

/* Divides the state of a large replicated parameter, although its update is cheap. */
static void set_span(const tch_optimizer *o, tchi_param *p, bool sharded)
{
    int64_t bytes = p->count * tchi_scalar_size(p->type);
    if (sharded || bytes < tchi_comm_span_bytes(o->shared->comm) || !tchi_is_row_major(p->ndim, p->shape, p->strides)) {
        return;
    }
    p->carried = p->by_value = true;
    p->dims = (tchi_dims){1, {p->count}};
    p->wire_in = p->wire_out = p->type;
}

tch_status tchi_shared_set_dims(const tch_optimizer *optimizer, tchi_param *param, const tch_parameter *parameter,
                                const tch_placement *placement)
{
    bool sharded = placement != NULL && placement->count > 0;
    bool has_blocks;
    tchi_dims dims = param->dims;
    int32_t ndim = sharded ? placement->ndim : param->ndim;
    const int64_t *shape = sharded ? placement->shape : param->shape;
    if (sharded) {
        if (placement->struct_size != sizeof *placement || placement->ndim < 0 || placement->ndim > TCH_MAX_RANK ||
            (placement->ndim > 0 && placement->shape == NULL) || placement->shards == NULL) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the placement of '%s' is not set to TCH_PLACEMENT_INIT",
                             param->name);
        }
        tch_tensor whole = {.ndim = placement->ndim, .shape = (int64_t *)placement->shape};
        tchi_dims_of(&whole, &dims);
        param->base = base_of(placement, param->ndim, tch_comm_rank(optimizer->shared->comm));
        param->whole = tch_tensor_numel(&whole);
    }
    TCHI_TRY(tchi_optim_set_dims(optimizer, param, parameter, ndim, shape, &dims, &has_blocks));
    if (!has_blocks) {
        set_span(optimizer, param, sharded);
        return TCH_OK;
    }
    if (!tchi_is_row_major(param->ndim, param->shape, param->strides)) {
        return tchi_fail(TCH_ERR_LAYOUT, "parameter '%s' is shared, and its elements are not in row-major order",
                         param->name);
    }
    param->blocked = param->carried = true;
    param->dims = dims;
    choose_wire(optimizer, param, sharded);
    return TCH_OK;
}

static tch_status make_regions(const tch_optimizer *o, int32_t group, const tch_parameter *parameters,
                               const tch_placement *placements, tchi_regions *regions)
{
    const tchi_group *g = tchi_group_at(o, group);
    for (int32_t i = 0; i < g->params; i++) {
        const tchi_param *p = tchi_param_at(o, g->first_param + i);
        if (p->carried) {
            TCHI_TRY(tchi_regions_of(placements == NULL ? NULL : &placements[i], &p->dims, parameters[i].tensor,
                                     tch_comm_rank(o->shared->comm), tch_comm_size(o->shared->comm), p->name,
                                     &regions[i]));
        }
    }
    return TCH_OK;
}

tch_status tchi_shared_plan_group(tch_optimizer *optimizer, int32_t group, const tch_parameter *parameters,
                                  const tch_placement *placements)
{
    int32_t count = tchi_group_at(optimizer, group)->params;
    size_t bytes = (size_t)count * sizeof(tchi_regions);
    tchi_regions *regions;
    TCHI_TRY(tchi_host_take(bytes, "the regions of parameters", &regions));
    tch_status status = make_regions(optimizer, group, parameters, placements, regions);
    if (status == TCH_OK) {
        status = tchi_held_note(optimizer, group, placements);
    }
    if (status == TCH_OK) {
        optimizer->shared->hash = tchi_shared_hash(optimizer, group, regions);
    }
    if (status == TCH_OK) {
        status = tchi_shared_plan(optimizer, group, regions);
    }
    if (status == TCH_OK) {
        status = tchi_layout_group(optimizer, group);
    }
    if (status == TCH_OK && tchi_group_at(optimizer, group)->exchange != NULL) {
        status = tchi_exchange_plan(optimizer, group, regions);
    }
    for (int32_t i = 0; i < count; i++) {
        tchi_regions_release(&regions[i]);
    }
    tchi_host_release(regions, bytes);
    return status;
}

/* --- agreement --------------------------------------------------------------------------------------------------- */

static bool is_same(const int32_t pair[2])
{
    return pair[0] == ~pair[1];
}

static tch_status compare(tch_comm *comm, tch_context *context, uint64_t hash)
{
    int32_t low = (int32_t)(hash & 0x7FFFFFFF);
    int32_t high = (int32_t)(hash >> 33);
    int32_t seen[TCHI_AGREED] = {~low, low, high, ~high};
    TCHI_TRY(tchi_comm_largest(comm, context, seen));
    if (!is_same(seen) || !is_same(seen + 2)) {
        return tchi_fail(TCH_ERR_COMM,
                         "the ranks of the group were given different models, options or placements, or one of them "
                         "could not make its part: names, shapes, types, options and shards must be the same on all");
    }
    return TCH_OK;
}

tch_status tchi_shared_compare(tch_comm *comm, tch_context *context, uint64_t hash, tch_status status)
{
    char message[1024];
    snprintf(message, sizeof message, "%s", status == TCH_OK ? "" : tch_last_error());
    uint64_t distinct = hash ^ (0x9E3779B97F4A7C15u * (uint64_t)(tch_comm_rank(comm) + 1));
    tch_status agreed = compare(comm, context, status == TCH_OK ? hash : distinct);
    return status == TCH_OK ? agreed : tchi_fail(status, "%s", message);
}

/* Without the sign bit. */
static int32_t folded(uint64_t hash)
{
    return (int32_t)((hash ^ hash >> 32) & 0x7FFFFFFF);
}

static uint64_t hash_options(const tch_optimizer *o)
{
    uint64_t hash = TCHI_HASH_BEGIN;
    for (int32_t g = 0; g < o->groups.count; g++) {
        for (int32_t i = 0; i < tchi_optim_options.count; i++) {
            double value = tchi_option_value(&tchi_optim_options.rows[i], &tchi_group_at(o, g)->config);
            hash = tchi_hash(hash, &value, sizeof value);
        }
    }
    return hash;
}

/* Asynchronous. */
static tch_status store_agreement(tch_optimizer *o, const tchi_step *now)
{
    int32_t odd = INT32_MAX;
    uint64_t options = now->refuses ? 0 : hash_options(o);
    uint64_t hash = options;
    for (int32_t i = (int32_t)o->params.count - 1; i >= 0 && !now->refuses; i--) {
        const tchi_param *p = tchi_param_at(o, i);
        bool absent = now->gradients[i].data == NULL;
        hash = tchi_hash_number(hash, 2 * p->steps_seen + absent);
        odd = absent != p->was_absent ? i : odd;
    }
    int32_t all = folded(hash);
    int32_t not_all = now->refuses ? ~TCHI_REFUSED : ~all; /* disagrees also if all refuse */
    int32_t numbers[6] = {now->refuses ? -1 : all, not_all, odd, ~odd, folded(options), ~folded(options)};
    double bits[3];
    memcpy(bits, numbers, sizeof numbers);
    return o->context->backend->device->copy_bytes(o->context->state, o->shared->agreement, bits, sizeof bits,
                                                   TCH_COPY_NUMBERS);
}

tch_status tchi_shared_agree(tch_optimizer *optimizer, const tchi_step *now, const int32_t *found,
                             const float *found_inf, const int32_t **found_by_any, const int32_t **agreement)
{
    tchi_agreement *a = optimizer->shared->agreement;
    const tch_backend *t = optimizer->context->backend;
    TCHI_TRY(tchi_comm_check(optimizer->shared->comm));
    TCHI_TRY(store_agreement(optimizer, now));
    TCHI_TRY(t->update->decide_skip(optimizer->context->state, found, found_inf, NULL, &a->found, a->spare));
    TCHI_TRY(tchi_comm_reduce_max(optimizer->shared->comm, optimizer->context, a->all, TCHI_AGREED));
    *found_by_any = &a->found;
    *agreement = a->all;
    return TCH_OK;
}

static tch_status read_agreement(const tch_optimizer *o, tchi_agreement *seen)
{
    return o->context->backend->device->copy_bytes(o->context->state, seen, o->shared->agreement, sizeof *seen,
                                                   TCH_COPY_TO_HOST);
}

tch_status tchi_shared_ends(const tch_optimizer *optimizer, bool skipped, bool *ends)
{
    tchi_agreement seen;
    *ends = skipped;
    if (skipped && optimizer->shared != NULL && !optimizer->context->backend->host_memory) {
        TCHI_TRY(read_agreement(optimizer, &seen));
        *ends = is_same(seen.all);
    }
    return TCH_OK;
}

static tch_status check_agreement(const tch_optimizer *o, const tchi_agreement *seen, const char *when)
{
    int32_t odd = ~seen->odd[1]; /* the least of all ranks' */
    if (is_same(seen->all)) {
        return TCH_OK;
    }
    if (seen->all[1] >= 0) {
        return tchi_fail(
            TCH_ERR_COMM, "%s%s; nothing was changed", when,
            seen->all[1] == ~TCHI_REFUSED
                ? "another rank of the group could not take the step, and its error says why"
                : "the ranks of the group do different things: another one has first gradients or none yet, "
                  "an option changed, or a gradient in another layout");
    }
    if (!is_same(seen->odd) && odd >= 0 && odd < o->params.count) {
        return tchi_fail(TCH_ERR_COMM,
                         "%sthe ranks of the group came with gradients of different parameters: some have one of '%s' "
                         "and some have none; nothing was changed",
                         when, tchi_param_at(o, odd)->name);
    }
    return tchi_fail(TCH_ERR_COMM, "%sthe ranks of the group came with %s; nothing was changed", when,
                     is_same(seen->options) ? "gradients of different parameters, or after different numbers of steps"
                                            : "different options of their groups, such as lr");
}

tch_status tchi_shared_finish(tch_optimizer *optimizer, bool skipped)
{
    tchi_agreement seen;
    if (optimizer->failed != TCH_OK) {
        tchi_comm_abort(optimizer->shared->comm);
        return optimizer->failed;
    }
    const tch_device_ops *d = optimizer->context->backend->device;
    bool all_know = skipped && (optimizer->context->backend->host_memory ||
                                tchi_group_at(optimizer, 0)->config.numerics.nonfinite == TCH_NONFINITE_RAISE);
    optimizer->shared->asked = d->readback_post != NULL && !all_know; /* the hosts of some may not know yet */
    if (optimizer->shared->asked) {
        TCHI_TRY(d->readback_post(optimizer->context->state, &optimizer->shared->seen, optimizer->shared->agreement,
                                  sizeof seen));
    }
    if (!skipped) {
        return TCH_OK;
    }
    TCHI_TRY(read_agreement(optimizer, &seen));
    return check_agreement(optimizer, &seen, "");
}

tch_status tchi_shared_look_back(tch_optimizer *optimizer)
{
    const void *seen = NULL;
    if (optimizer->shared->asked) {
        TCHI_TRY(optimizer->context->backend->device->readback_wait(optimizer->context->state, optimizer->shared->seen,
                                                                    &seen));
    }
    optimizer->shared->asked = false;
    return seen == NULL ? TCH_OK : check_agreement(optimizer, seen, "at the last step ");
}

tchi_param *tchi_shared_find_span(const tch_optimizer *optimizer, tchi_param *tile)
{
    if (!tile->blocked) {
        tile->data =
            tchi_offset(tchi_param_at(optimizer, tile->index)->data, tile->base * tchi_scalar_size(tile->type));
    }
    return tile;
}

void tchi_shared_follow(tch_optimizer *optimizer, const tchi_step *now)
{
    for (int32_t i = 0; i < optimizer->tiles.count; i++) {
        tchi_param *t = tchi_tile_at(optimizer, i);
        const tchi_param *p = tchi_param_at(optimizer, t->index);
        const tchi_gradient *gradient = &now->gradients[t->index];
        now->of_tiles[i] = (tchi_gradient){gradient->data != NULL ? t->staged : NULL, t->wire_in};
        if (!t->blocked) { /* in place */
            tchi_shared_find_span(optimizer, t);
            int64_t bytes = t->base * tchi_scalar_size(gradient->type);
            now->of_tiles[i] = (tchi_gradient){tchi_offset(gradient->data, bytes), gradient->type};
        }
        t->steps_seen = p->steps_seen;
        t->clock_id = p->clock_id;
    }
}

/* --- for callers ------------------------------------------------------------------------------------------------- */

int64_t tch_optimizer_tile_count(const tch_optimizer *optimizer)
{
    return optimizer == NULL || optimizer->shared == NULL ? 0 : optimizer->shared->tiles.count;
}

tch_status tch_optimizer_get_tile(const tch_optimizer *optimizer, int64_t index, tch_optim_tile *tile)
{
    if (index < 0 || index >= tch_optimizer_tile_count(optimizer)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_get_tile: there is no tile %lld", (long long)index);
    }
    if (tile == NULL || tile->struct_size != sizeof *tile) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_optimizer_get_tile: tile must point to a struct set to TCH_OPTIM_TILE_INIT");
    }
    const tchi_tile *t = tchi_shared_tile(optimizer, index);
    const tchi_dims *dims = &tchi_param_at(optimizer, t->param)->dims;
    *tile = (tch_optim_tile){.struct_size = sizeof *tile,
                             .parameter = t->param,
                             .number = t->number,
                             .owner = t->owner,
                             .order = dims->order};
    for (int32_t k = 0; k < dims->order && tchi_param_at(optimizer, t->param)->blocked; k++) {
        tile->factors += tchi_block_batch_at(optimizer, t->block_batch)->factor_batch[k] >= 0;
    }
    memcpy(tile->dims, dims->size, (size_t)dims->order * sizeof *dims->size);
    memcpy(tile->start, t->start, sizeof tile->start);
    memcpy(tile->size, t->size, sizeof tile->size);
    return TCH_OK;
}

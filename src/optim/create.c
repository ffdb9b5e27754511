/* Creating optimizers: checks the parameters, lays out their state and allocates it. Everything is checked before
 * anything is allocated; a group that cannot be added leaves the optimizer unchanged. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "core/list.h"
#include "create.h"
#include "method.h"
#include "tensor_modes.h"
#include "shape.h"
#include "shared/shared.h"

/* --- parameters -------------------------------------------------------------------------------------------------- */

static const char *name_of(const tch_parameter *parameter, int32_t index, char text[32])
{
    snprintf(text, 32, "parameter%d", index);
    return parameter->name != NULL && parameter->name[0] != '\0' ? parameter->name : text;
}

static tch_status check_parameter(const tch_context *context, const tch_parameter *parameter, const char *name,
                                  bool with_data)
{
    static max_align_t nowhere;
    char text[TCHI_DESCRIBE_SIZE];
    tchi_dims dims;
    tch_tensor shape_only;
    const tch_tensor *tensor = parameter->tensor;
    if (tensor == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "parameter '%s' is NULL", name);
    }
    if (strlen(name) >= TCHI_NAME_SIZE) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "a parameter's name has %zu bytes, expected below %d", strlen(name),
                         TCHI_NAME_SIZE);
    }
    if (!with_data) {
        shape_only = *tensor;
        shape_only.data = &nowhere; /* aligned; never read */
        shape_only.byte_offset = 0;
        shape_only.device = tch_context_device(context);
        tensor = &shape_only;
    }
    TCHI_TRY(tchi_check_output(context, tensor, name));
    TCHI_TRY(tchi_check_float(tensor, name));
    if (!tchi_dims_of(tensor, &dims)) {
        return tchi_fail(TCH_ERR_LAYOUT, "parameter '%s' is %s with gaps between its elements; expected a dense one",
                         name, tchi_describe(tensor, text, sizeof text));
    }
    return TCH_OK;
}

typedef struct span {
    const char *low, *high;
    int32_t index;
} span;

static int by_address(const void *a, const void *b)
{
    const char *x = ((const span *)a)->low;
    const char *y = ((const span *)b)->low;
    return (x > y) - (x < y);
}

/* Parameters must not share memory. */
static tch_status check_apart(const tch_optimizer *o)
{
    int64_t count = o->params.count;
    span *spans;
    size_t bytes = (size_t)count * sizeof *spans;
    TCHI_TRY(tchi_host_take(bytes, "the list of parameters", &spans));
    for (int32_t i = 0; i < count; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        spans[i] = (span){p->data, tchi_offset(p->data, p->count * tchi_scalar_size(p->type)), i};
    }
    if (count > 1) {
        qsort(spans, (size_t)count, sizeof *spans, by_address);
    }
    tch_status status = TCH_OK;
    for (int64_t i = 0; i + 1 < count && status == TCH_OK; i++) {
        if (spans[i].high > spans[i + 1].low && spans[i + 1].high > spans[i + 1].low) {
            status = tchi_fail(TCH_ERR_LAYOUT, "parameters '%s' and '%s' share memory",
                               tchi_param_at(o, spans[i].index)->name, tchi_param_at(o, spans[i + 1].index)->name);
        }
    }
    tchi_host_release(spans, bytes);
    return status;
}

/* Merges dimensions of one matrix. With several matrices along the first dimension, that one is not merged. */
static void merge_dims(const tchi_block_method *blocks, const tch_optim_config *config, bool several, tchi_dims *dims)
{
    tchi_dims rest = {.order = dims->order - several};
    memcpy(rest.size, dims->size + several, (size_t)rest.order * sizeof *rest.size);
    if (blocks->set_dims != NULL) {
        blocks->set_dims(config, dims);
        return;
    }
    if (config->shampoo.merge_dims) {
        tchi_dims_merge(&rest, config->shampoo.max_preconditioner_dim, several ? 1 : 2);
    }
    tchi_dims_limit(&rest, TCHI_MOST_ORDER - several);
    dims->order = rest.order + several;
    memcpy(dims->size + several, rest.size, (size_t)rest.order * sizeof *rest.size);
}

/* Sets the sizes of the matrices: as given, or the whole dimension. */
static tch_status take_cuts(tchi_param *p, const tch_parameter *parameter, int64_t rows)
{
    int64_t sum = 0;
    for (int32_t i = 0; i < parameter->cut_count; i++) {
        bool good = parameter->cuts != NULL && parameter->cuts[i] > 0 && parameter->cuts[i] <= rows - sum;
        sum = good ? sum + parameter->cuts[i] : -1;
        if (!good) {
            break;
        }
    }
    if (parameter->cut_count < 0 || (parameter->cut_count > 0 && sum != rows)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the cuts of parameter '%s' must be positive numbers whose sum is %lld, the size of the "
                         "dimension they cut",
                         p->name, (long long)rows);
    }
    p->batch_dims = parameter->batch_dims;
    p->cut_count = parameter->cut_count > 0 ? parameter->cut_count : 1;
    TCHI_TRY(tchi_host_take((size_t)p->cut_count * sizeof *p->cuts, "the cuts of a parameter", &p->cuts));
    bool given = parameter->cut_count > 0 && parameter->cuts != NULL;
    memcpy(p->cuts, given ? parameter->cuts : &rows, (size_t)p->cut_count * sizeof *p->cuts);
    return TCH_OK;
}

/* Sets the dimensions of one matrix of a tensor that holds several, and `batch`, the number of repetitions of
 * `cuts`. */
static tch_status split_matrices(const tch_parameter *parameter, const char *name, int32_t ndim, const int64_t *shape,
                                 tchi_dims *dims, int64_t *batch)
{
    int32_t first = parameter->batch_dims;
    if (first < 0 || first >= ndim) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "batch_dims of parameter '%s' is %d, expected 0 to %d: some dimension must be left", name,
                         first, ndim - 1);
    }
    while (parameter->cut_count == 0 && first + 1 < ndim && shape[first] == 1) {
        first++;
    }
    *batch = 1;
    *dims = (tchi_dims){1, {shape[first]}};
    for (int32_t k = 0; k < ndim; k++) {
        *batch *= k < first ? shape[k] : 1;
        if (k > first && shape[k] != 1) {
            dims->size[dims->order++] = shape[k];
        }
    }
    return TCH_OK;
}

/* A tensor of several matrices has blocks if its smallest matrix would: methods exclude large ones. */
static bool has_blocks(const tchi_block_method *blocks, const tch_optim_config *config, const tchi_param *p,
                       tchi_dims dims)
{
    for (int32_t i = 0; i < p->cut_count; i++) {
        dims.size[0] = p->cuts[i] < dims.size[0] ? p->cuts[i] : dims.size[0];
    }
    return blocks->has_blocks(config, &dims);
}

tch_status tchi_optim_set_dims(const tch_optimizer *o, tchi_param *p, const tch_parameter *parameter, int32_t ndim,
                               const int64_t *shape, tchi_dims *dims, bool *blocked)
{
    const tchi_block_method *blocks = o->method->blocks;
    const tch_optim_config *config = &tchi_group_at(o, p->group)->config;
    bool several = parameter->batch_dims != 0 || parameter->cut_count != 0;
    int64_t batch = 1;
    *blocked = false;
    if (several) {
        TCHI_TRY(split_matrices(parameter, p->name, ndim, shape, dims, &batch));
        TCHI_TRY(take_cuts(p, parameter, dims->size[0]));
    }
    if (blocks == NULL || tchi_dims_count(dims) == 0 || batch == 0 || parameter->use_adamw) {
        return TCH_OK;
    }
    merge_dims(blocks, config, several, dims);
    *blocked = has_blocks(blocks, config, p, *dims);
    if (*blocked && several && !tchi_is_row_major(p->ndim, p->shape, p->strides)) {
        return tchi_fail(TCH_ERR_LAYOUT,
                         "parameter '%s' is several matrices, and its elements are not in row-major order", p->name);
    }
    dims->size[0] *= batch;
    return TCH_OK;
}

static tch_status add_param(tch_optimizer *o, int32_t group, const tch_parameter *parameter,
                            const tch_placement *placement)
{
    char text[32];
    const tch_tensor *tensor = parameter->tensor;
    const char *name = name_of(parameter, (int32_t)o->params.count, text);
    for (int32_t i = 0; i < o->params.count; i++) {
        if (strcmp(tchi_param_at(o, i)->name, name) == 0) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "two parameters are called '%s'", name);
        }
    }
    size_t bytes = strlen(name) + 1;
    char *copy;
    TCHI_TRY(tchi_host_take(bytes, "a parameter's name", &copy));
    memcpy(copy, name, bytes);
    tchi_param *p = tchi_list_extend(&o->params); /* cannot fail: reserved */
    p->name = copy;
    p->name_bytes = bytes;
    p->group = group;
    p->index = (int32_t)o->params.count - 1;
    p->tile = -1;
    p->type = tchi_scalar_of(tensor->dtype);
    p->real = p->type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    p->data = tchi_tensor_data(tensor);
    p->ndim = tensor->ndim;
    for (int32_t k = 0; k < tensor->ndim; k++) {
        p->shape[k] = tensor->shape[k];
        p->strides[k] = tchi_tensor_stride(tensor, k);
    }
    p->count = p->whole = tch_tensor_numel(tensor);
    tchi_dims_of(tensor, &p->dims);
    if (o->shared != NULL) {
        return tchi_shared_set_dims(o, p, parameter, placement);
    }
    return tchi_optim_set_dims(o, p, parameter, p->ndim, p->shape, &p->dims, &p->blocked);
}

/* --- rollback ---------------------------------------------------------------------------------------------------- */

/* Lengths of the lists before a group is added. */
typedef struct mark {
    int64_t groups, params, blocks, block_batches, factor_batches, states, chunks, own_tiles, tiles;
} mark;

static void return_to(tch_optimizer *o, const mark *m)
{
    for (int64_t i = m->states; i < o->states.count; i++) {
        tchi_host_release(tchi_state_at(o, i), tchi_state_at(o, i)->bytes);
    }
    for (int64_t i = m->factor_batches; i < o->factor_batches.count; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(o, (int32_t)i);
        if (f->readback != NULL) {
            o->context->backend->device->event_destroy(o->context->state, f->readback);
        }
        tchi_layout_free_factor_batch(f);
    }
    for (int64_t i = m->params; i < o->params.count; i++) {
        const tchi_param *p = tchi_param_at(o, (int32_t)i);
        tchi_host_release(p->cuts, (size_t)p->cut_count * sizeof *p->cuts);
        tchi_host_release(p->name, p->name_bytes);
    }
    for (int64_t i = m->chunks; i < o->chunks.count; i++) {
        const tchi_chunk *chunk = (const tchi_chunk *)o->chunks.items + i;
        if (chunk->is_state && o->allocator.release != NULL) {
            o->allocator.release(o->allocator.user, chunk->pointer, chunk->bytes);
        } else {
            tchi_pool_free(o->context->pool, chunk->pointer);
        }
    }
    for (int64_t i = m->groups; i < o->groups.count; i++) {
        tchi_exchange_close(o, tchi_group_at(o, (int32_t)i)->exchange);
    }
    o->tiles.count = m->own_tiles;
    if (o->shared != NULL) {
        o->shared->tiles.count = m->tiles;
        tchi_held_forget(o, m->params);
    }
    o->groups.count = m->groups;
    o->params.count = m->params;
    o->blocks.count = m->blocks;
    o->block_batches.count = m->block_batches;
    o->factor_batches.count = m->factor_batches;
    o->states.count = m->states;
    o->chunks.count = m->chunks;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static tch_status take_chunk(tch_optimizer *o, int64_t bytes, bool from_caller, char **pointer)
{
    *pointer = NULL;
    if (bytes == 0) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_list_reserve(&o->chunks, o->chunks.count + 1));
    void *memory = NULL;
    if (from_caller && o->allocator.allocate != NULL) {
        TCHI_TRY(o->allocator.allocate(o->allocator.user, bytes, &memory));
        if (memory == NULL || (uintptr_t)memory % 256 != 0) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                             "the state's allocator gave %p for %lld bytes, expected memory aligned to 256", memory,
                             (long long)bytes);
        }
    } else {
        TCHI_TRY(tchi_pool_allocate_exact(o->context->pool, bytes, &memory));
    }
    *(tchi_chunk *)tchi_list_extend(&o->chunks) = (tchi_chunk){memory, bytes, from_caller};
    *pointer = memory;
    return TCH_OK;
}

static tch_status fill_master(const tch_optimizer *o, const tchi_param *p)
{
    int64_t stride = 1;
    tch_array from = {p->data, p->type, 1, &p->count, &stride};
    tch_array to = {p->master, p->real, 1, &p->count, &stride};
    return p->master == NULL || p->count == 0 ? TCH_OK
                                              : o->context->backend->matrix->copy(o->context->state, &to, &from);
}

/* Zeroes the state, sets roots to the identity and copies parameters to their masters. */
static tch_status fill_state(tch_optimizer *o, int32_t group, char *state, int64_t bytes)
{
    const tch_backend *t = o->context->backend;
    const tchi_group *g = tchi_group_at(o, group);
    if (bytes > 0) {
        TCHI_TRY(t->device->zero_bytes(o->context->state, state, bytes));
    }
    for (int32_t i = 0; i < g->factor_batches; i++) {
        TCHI_TRY(tchi_matrices_begin(o, tchi_factor_batch_at(o, g->first_factor_batch + i)));
    }
    for (int32_t i = 0; i < g->params; i++) {
        TCHI_TRY(fill_master(o, tchi_param_at(o, g->first_param + i)));
    }
    return TCH_OK;
}

/* The same for tiles, by a collective: after the ranks have agreed that they have a state. */
static tch_status fill_tiles(tch_optimizer *o, int32_t group)
{
    if (tchi_group_at(o, group)->exchange != NULL) {
        TCHI_TRY(tchi_exchange_values(o, group));
    }
    for (int32_t i = 0; i < o->tiles.count; i++) {
        tchi_param *tile = tchi_tile_at(o, i);
        if (tile->group == group) {
            TCHI_TRY(fill_master(o, tchi_shared_find_span(o, tile)));
        }
    }
    return TCH_OK;
}

static tch_status take_state(tch_optimizer *o, int32_t group)
{
    tchi_arena state = {0};
    tchi_arena beside = {0};
    TCHI_TRY(tchi_layout_state(o, group, &state, &beside, false));
    int64_t state_bytes = state.used;
    int64_t beside_bytes = beside.used;
    state = beside = (tchi_arena){0};
    TCHI_TRY(take_chunk(o, state_bytes, true, &state.base));
    TCHI_TRY(take_chunk(o, beside_bytes, false, &beside.base));
    TCHI_TRY(tchi_layout_state(o, group, &state, &beside, true));
    TCHI_TRY(o->context->backend->device->zero_bytes(o->context->state, beside.base, beside_bytes));
    TCHI_TRY(fill_state(o, group, state.base, state_bytes));
    o->state_bytes += state_bytes;
    return TCH_OK;
}

/* Allocates scratch for all groups, which may grow with a new one. Host lists come first, so that a failure loses
 * nothing. */
static tch_status take_scratch(tch_optimizer *o)
{
    tchi_arena arena = {0};
    tchi_layout_chunks(o, &arena);
    int64_t bytes = arena.used;
    int64_t most;
    TCHI_TRY(tchi_forecast_refresh(o, &o->least_workspace, &most));
    int64_t whole = o->params.count + o->tiles.count + (o->shared == NULL ? 0 : o->shared->stretches.count);
    int64_t rects = o->most_rects > whole ? o->most_rects : whole;
    void *list;
    TCHI_TRY(tchi_list_reserve(&o->rect_list, rects));
    TCHI_TRY(tchi_list_reserve(&o->clock_list, o->params.count));
    TCHI_TRY(tchi_list_reserve(&o->gradient_list, o->params.count + o->tiles.count + 1));
    TCHI_TRY(tchi_pool_allocate_exact(o->context->pool, bytes, &list));
    tchi_recordings_clear(o->context, &o->recordings); /* they refer to the old scratch */
    tchi_pool_free(o->context->pool, o->scratch_block);
    o->scratch_block = list;
    o->scratch_bytes = bytes;
    o->rects = o->rect_list.items;
    arena = (tchi_arena){.base = list};
    tchi_layout_chunks(o, &arena);
    return TCH_OK;
}

/* --- groups ------------------------------------------------------------------------------------------------------ */

tch_status tchi_optim_check(const tch_context *context, const char *function, const tch_optim_config *config,
                            int32_t count, const tch_parameter *parameters, bool with_data)
{
    TCHI_TRY(tchi_config_check(function, config));
    if (count < 0 || (count > 0 && parameters == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: count is %d and parameters is %s", function, count,
                         parameters == NULL ? "NULL" : "set");
    }
    for (int32_t i = 0; i < count; i++) {
        char text[32];
        TCHI_TRY(check_parameter(context, &parameters[i], name_of(&parameters[i], i, text), with_data));
    }
    return TCH_OK;
}

static tch_status check_packed(const tch_context *context, const tch_optim_config *config)
{
    const tch_matrix_ops *matrix = context->backend->matrix;
    bool packed = config->memory.packed_factors != 0;
    return (!packed && config->memory.root_dtype == TCH_STATE_FLOAT32) || matrix->pack != NULL
               ? TCH_OK
               : tchi_fail(TCH_ERR_UNSUPPORTED, "%s, expected %s: the %s backend does not pack matrices",
                           packed ? "packed_factors is 1" : "root_dtype is bfloat16", packed ? "0" : "float32",
                           context->backend->name);
}

tch_status tchi_optim_plan(tch_optimizer *o, const tch_optim_config *config, int32_t count,
                           const tch_parameter *parameters, const tch_placement *placements, bool with_data)
{
    TCHI_TRY(check_packed(o->context, config));
    TCHI_TRY(tchi_list_reserve(&o->groups, o->groups.count + 1));
    TCHI_TRY(tchi_list_reserve(&o->params, o->params.count + count));
    tchi_group *g = tchi_list_extend(&o->groups);
    *g = (tchi_group){.config = *config,
                      .numbers_changed = true,
                      .first_param = (int32_t)o->params.count,
                      .params = count,
                      .first_block_batch = (int32_t)o->block_batches.count,
                      .first_factor_batch = (int32_t)o->factor_batches.count};
    tchi_config_fix_ratio(&g->config, NULL);
    int32_t group = (int32_t)o->groups.count - 1;
    for (int32_t i = 0; i < count; i++) {
        TCHI_TRY(add_param(o, group, &parameters[i], placements == NULL ? NULL : &placements[i]));
    }
    if (with_data) {
        TCHI_TRY(check_apart(o));
    }
    return o->shared != NULL ? tchi_shared_plan_group(o, group, parameters, placements) : tchi_layout_group(o, group);
}

static bool is_whole(const tch_placement *p, const tch_tensor *tensor)
{
    bool whole = p->struct_size == sizeof *p && p->count == 1 && p->shape != NULL && p->shards != NULL &&
                 p->shards->rank == 0 && p->ndim == tensor->ndim;
    for (int32_t k = 0; whole && k < p->ndim; k++) {
        const tch_shard *s = p->shards;
        whole = s->start[k] == 0 && s->offset[k] == 0 && s->size[k] == p->shape[k] && s->size[k] == tensor->shape[k];
    }
    return whole;
}

/* Returns the index of the first sharded parameter, or `count`. */
static int32_t first_parted(int32_t count, const tch_parameter *parameters, const tch_placement *placements)
{
    int32_t i = 0;
    while (
        placements != NULL && parameters != NULL && i < count &&
        (placements[i].count == 0 || parameters[i].tensor == NULL || is_whole(&placements[i], parameters[i].tensor))) {
        i++;
    }
    return placements == NULL || parameters == NULL ? count : i;
}

static tch_status add_group(tch_optimizer *o, const tch_optim_config *config, int32_t count,
                            const tch_parameter *parameters, const tch_placement *placements)
{
    int32_t parted = o->shared == NULL ? first_parted(count, parameters, placements) : count;
    if (parted < count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the placement of parameter %d is of more than one rank or shard; the optimizer has one",
                         parted);
    }
    mark before = {o->groups.count,        o->params.count,         o->blocks.count,
                   o->block_batches.count, o->factor_batches.count, o->states.count,
                   o->chunks.count,        o->tiles.count,          o->shared == NULL ? 0 : o->shared->tiles.count};
    int64_t state_bytes = o->state_bytes;
    tch_status status = tchi_optim_plan(o, config, count, parameters, placements, true);
    if (status == TCH_OK) {
        status = take_state(o, (int32_t)o->groups.count - 1);
    }
    if (status == TCH_OK) {
        status = take_scratch(o);
    }
    if (o->shared != NULL) {
        status = tchi_shared_compare(o->shared->comm, o->context, o->shared->hash, status);
        status = status == TCH_OK ? fill_tiles(o, (int32_t)o->groups.count - 1) : status;
    }
    if (status != TCH_OK) {
        o->context->backend->device->synchronize(o->context->state);
        return_to(o, &before);
        o->state_bytes = state_bytes;
        if (o->scratch_block != NULL) { /* unchanged: the chunks of the remaining groups */
            tchi_arena arena = {.base = o->scratch_block};
            tchi_layout_chunks(o, &arena);
        }
    }
    return status;
}

static int64_t device_bytes(tch_context *context)
{
    int64_t total;
    int64_t free;
    bool known = tch_context_device(context).type != TCH_DEVICE_CPU &&
                 context->backend->device->memory_info(context->state, &total, &free) == TCH_OK;
    return known ? total : 0;
}

void tchi_optim_prepare(tch_optimizer *o, tch_context *context, const tch_optim_config *config,
                        const tch_state_allocator *allocator)
{
    *o = (tch_optimizer){.context = context, .method = tchi_method_of(config), .device_bytes = device_bytes(context)};
    o->groups.item_size = sizeof(tchi_group);
    o->params.item_size = sizeof(tchi_param);
    o->tiles.item_size = sizeof(tchi_param);
    o->blocks.item_size = sizeof(tchi_block);
    o->block_batches.item_size = sizeof(tchi_block_batch);
    o->factor_batches.item_size = sizeof(tchi_factor_batch);
    o->states.item_size = sizeof(tchi_state *);
    o->chunks.item_size = sizeof(tchi_chunk);
    o->rect_list.item_size = sizeof(tch_rect);
    o->clock_list.item_size = sizeof(tch_clock *);
    o->gradient_list.item_size = sizeof(tchi_gradient);
    o->counts.item_size = sizeof(int64_t);
    if (allocator != NULL) {
        o->allocator = *allocator;
    }
}

void tchi_optim_empty(tch_optimizer *o)
{
    tchi_recordings_close(o->context, &o->recordings);
    tchi_shared_wait(o);
    return_to(o, &(mark){0});
    tchi_shared_close(o);
    tchi_pool_free(o->context->pool, o->control);
    tchi_pool_free(o->context->pool, o->scratch_block);
    tchi_pool_free(o->context->pool, o->copies);
    tchi_list *const lists[] = {&o->groups,         &o->params, &o->blocks, &o->block_batches,
                                &o->factor_batches, &o->states, &o->chunks, &o->rect_list,
                                &o->clock_list,     &o->counts, &o->tiles,  &o->gradient_list};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        tchi_list_release(lists[i]);
    }
}

static tch_status open_optimizer(tch_optimizer *o, tch_comm *comm)
{
    void *control;
    TCHI_TRY(tchi_recordings_open(o->context, &o->recordings));
    TCHI_TRY(tchi_pool_allocate(o->context->pool, sizeof *o->control, &control));
    o->control = control;
    TCHI_TRY(o->context->backend->device->zero_bytes(o->context->state, o->control, sizeof *o->control));
    return comm == NULL ? TCH_OK : tchi_shared_open(o, comm);
}

static void drop_optimizer(tch_optimizer *o)
{
    tchi_optim_empty(o);
    tchi_host_release(o, sizeof *o);
}

/* Everything that can fail before the first collective. */
static tch_status begin_optimizer(tch_context *context, const tch_optim_config *config, tch_comm *comm, int32_t count,
                                  const tch_parameter *parameters, const tch_state_allocator *allocator,
                                  tch_optimizer **optimizer)
{
    TCHI_TRY(tchi_optim_check(context, "tch_optimizer_create", config, count, parameters, true));
    TCHI_TRY(tchi_host_take(sizeof **optimizer, "an optimizer", optimizer));
    tchi_optim_prepare(*optimizer, context, config, allocator);
    tch_status status = open_optimizer(*optimizer, comm);
    if (status != TCH_OK) {
        drop_optimizer(*optimizer);
    }
    return status;
}

tch_optim_setup tchi_setup_of(const tch_optim_setup *setup, int32_t count, const tch_parameter *parameters)
{
    tch_optim_setup with = setup == NULL ? (tch_optim_setup)TCH_OPTIM_SETUP_INIT : *setup;
    if (tch_comm_size(with.comm) == 1 && first_parted(count, parameters, with.placements) == count) {
        with.comm = NULL;
    }
    return with;
}

tch_status tch_optimizer_create(tch_context *context, const tch_optim_config *config, const tch_optim_setup *setup,
                                int32_t count, const tch_parameter *parameters, tch_optimizer **optimizer)
{
    TCHI_ENTER_FOR(context, "tch_optimizer_create", update);
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_create: optimizer is NULL");
    }
    *optimizer = NULL;
    TCHI_TRY(tchi_check_setup("tch_optimizer_create", setup));
    tch_optim_setup with = tchi_setup_of(setup, count, parameters);
    tch_optimizer *o = NULL;
    tch_status begun = begin_optimizer(context, config, with.comm, count, parameters, with.allocator, &o);
    if (begun != TCH_OK) {
        return with.comm == NULL ? begun : tchi_shared_compare(with.comm, context, 0, begun);
    }
    tch_status status = add_group(o, config, count, parameters, with.placements);
    if (status != TCH_OK) {
        drop_optimizer(o);
        return status;
    }
    *optimizer = o;
    return TCH_OK;
}

tch_status tch_optimizer_add_group(tch_optimizer *optimizer, const tch_optim_config *config, int32_t count,
                                   const tch_parameter *parameters, const tch_placement *placements, int32_t *group)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_add_group: optimizer is NULL");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_add_group");
    tch_status checked =
        tchi_optim_check(optimizer->context, "tch_optimizer_add_group", config, count, parameters, true);
    if (checked == TCH_OK && tchi_method_of(config) != optimizer->method) {
        checked = tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_add_group: kind is %s, the optimizer is %s",
                            tchi_method_of(config)->name, optimizer->method->name);
    }
    if (checked != TCH_OK) {
        tchi_shared *shared = optimizer->shared;
        return shared == NULL ? checked : tchi_shared_compare(shared->comm, optimizer->context, 0, checked);
    }
    TCHI_TRY(add_group(optimizer, config, count, parameters, placements));
    if (group != NULL) {
        *group = (int32_t)optimizer->groups.count - 1;
    }
    return TCH_OK;
}

void tch_optimizer_destroy(tch_optimizer *optimizer)
{
    if (optimizer == NULL) {
        return;
    }
    tch_context_synchronize(optimizer->context);
    drop_optimizer(optimizer);
}

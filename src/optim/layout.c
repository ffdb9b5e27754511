#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/arith.h"
#include "core/status.h"

#include "core/list.h"
#include "create.h"
#include "method.h"
#include "refresh.h"
#include "tensor_modes.h"
#include "rects.h"
#include "shared/shared.h"
#include "shape.h"

/* --- blocks and block batches ------------------------------------------------------------------------------------ */

int64_t tchi_layout_cut_at(const tch_optimizer *optimizer, int32_t group)
{
    const tchi_block_method *blocks = optimizer->method->blocks;
    return blocks->cut_at == NULL ? INT64_MAX : blocks->cut_at(&tchi_group_at(optimizer, group)->config);
}

static int32_t transpose_tall(const tchi_block_method *blocks, tchi_block_batch *c)
{
    if (!blocks->transposes_tall || c->size[0] <= c->size[1]) {
        return 0;
    }
    int64_t rows = c->size[0];
    c->size[0] = c->size[1];
    c->size[1] = rows;
    return 1;
}

/* Returns a block batch as a comparable value: that of this parameter's blocks of these sizes. */
static tchi_block_batch describe(const tchi_block_method *blocks, const tch_optim_config *config,
                                 const tchi_param *param, const int64_t *size)
{
    bool direction = param->carried && !param->by_value;
    tchi_block_batch c = {.group = param->group,
                          .order = param->dims.order,
                          .type = param->carried ? param->wire_out : param->type,
                          .real = param->real,
                          .param_type = param->type,
                          .direction = direction,
                          .prepared = direction && (param->filters || tchi_adds_decay(config))};
    memcpy(c.size, size, (size_t)c.order * sizeof *size);
    return c;
}

static bool same_alone(const tchi_block_batch *a, const tchi_block_batch *b)
{
    return a->group == b->group && a->order == b->order && a->param_type == b->param_type && a->real == b->real &&
           memcmp(a->size, b->size, sizeof a->size) == 0;
}

static bool same_block_batch(const tchi_block_batch *a, const tchi_block_batch *b)
{
    return same_alone(a, b) && a->type == b->type && a->direction == b->direction && a->prepared == b->prepared;
}

static tch_status find_block_batch(tch_optimizer *o, const tchi_group *group, const tchi_block_batch *like,
                                   tchi_block_batch **found)
{
    int32_t count = (int32_t)o->block_batches.count;
    int32_t alone = count;
    for (int32_t i = group->first_block_batch; i < count; i++) {
        *found = tchi_block_batch_at(o, i);
        if (same_block_batch(*found, like)) {
            return TCH_OK;
        }
        alone = alone == count && same_alone(*found, like) ? i : alone;
    }
    TCHI_TRY(tchi_list_reserve(&o->block_batches, count + 1));
    *found = tchi_list_extend(&o->block_batches);
    **found = *like;
    (*found)->alone = alone;
    (*found)->elements = 1;
    for (int32_t k = 0; k < like->order; k++) {
        (*found)->elements *= like->size[k];
    }
    return TCH_OK;
}

/* Counts a block in its batch or, with `place`, appends it to the optimizer's list if this rank owns it. */
static tch_status add_block(tch_optimizer *o, const tchi_param *param, const int64_t *size, tchi_block block,
                            bool place, int32_t *number)
{
    const tchi_group *group = tchi_group_at(o, param->group);
    tchi_block_batch like = describe(o->method->blocks, &group->config, param, size);
    block.transposed = transpose_tall(o->method->blocks, &like);
    tchi_block_batch *batch;
    TCHI_TRY(find_block_batch(o, group, &like, &batch));
    *number = (int32_t)(batch - tchi_block_batch_at(o, 0));
    int64_t *alone_all = &tchi_block_batch_at(o, batch->alone)->alone_all;
    block.global_index = batch->all;
    block.alone_index = *alone_all;
    batch->all += place;
    *alone_all += place;
    if (block.param >= 0) {
        if (place) {
            *tchi_block_at(o, batch->first + batch->count) = block;
        }
        batch->count++;
    }
    return TCH_OK;
}

/* Adds tiles in the order of one process's blocks. Tiles of other ranks are blocks of parameter -1. */
static tch_status add_tiles(tch_optimizer *o, const tchi_exchange *exchange, bool place)
{
    for (int64_t i = exchange->first_tile; i < exchange->first_tile + exchange->tiles; i++) {
        tchi_tile *tile = tchi_shared_tile(o, i);
        tchi_block block = {.param = tile->local, .number = 0};
        if (tchi_param_at(o, tile->param)->blocked) {
            TCHI_TRY(add_block(o, tchi_param_at(o, tile->param), tile->size, block, place, &tile->block_batch));
        }
    }
    return TCH_OK;
}

static tch_status add_blocks(tch_optimizer *o, int32_t index, bool place)
{
    const tchi_group *group = tchi_group_at(o, index);
    if (group->exchange != NULL) {
        return add_tiles(o, group->exchange, place);
    }
    for (int32_t p = group->first_param; p < group->first_param + group->params; p++) {
        const tchi_param *param = tchi_param_at(o, p);
        tchi_cut cut = param->blocked ? tchi_cut_of(param, tchi_layout_cut_at(o, index)) : (tchi_cut){0};
        for (int64_t number = 0; number < cut.blocks; number++) {
            tchi_block block = {.param = p, .number = (int32_t)number};
            int64_t size[TCHI_MOST_ORDER];
            int32_t block_batch;
            tchi_cut_block(&cut, number, block.start, size);
            TCHI_TRY(add_block(o, param, size, block, place, &block_batch));
        }
    }
    return TCH_OK;
}

static tch_status make_blocks(tch_optimizer *o, int32_t index)
{
    TCHI_TRY(add_blocks(o, index, false));
    tchi_group *group = tchi_group_at(o, index);
    group->block_batches = (int32_t)o->block_batches.count - group->first_block_batch;
    int64_t total = o->blocks.count;
    for (int32_t i = 0; i < group->block_batches; i++) {
        tchi_block_batch *block_batch = tchi_block_batch_at(o, group->first_block_batch + i);
        block_batch->first = total;
        total += block_batch->count;
        block_batch->count = 0;
    }
    TCHI_TRY(tchi_list_reserve(&o->blocks, total));
    while (o->blocks.count < total) {
        tchi_list_extend(&o->blocks);
    }
    return add_blocks(o, index, true);
}

/* --- factor batches ---------------------------------------------------------------------------------------------- */

static tch_status find_factor_batch(tch_optimizer *o, const tchi_group *group, const tchi_factor_batch *like,
                                    int32_t *found)
{
    for (*found = group->first_factor_batch; *found < o->factor_batches.count; (*found)++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, *found);
        if (f->n == like->n && f->root == like->root && f->real == like->real) {
            return TCH_OK;
        }
    }
    TCHI_TRY(tchi_list_reserve(&o->factor_batches, o->factor_batches.count + 1));
    *(tchi_factor_batch *)tchi_list_extend(&o->factor_batches) = *like;
    return TCH_OK;
}

static tch_status join_factor_batches(tch_optimizer *o, int32_t index, tchi_block_batch *block_batch)
{
    const tchi_block_method *blocks = o->method->blocks;
    const tchi_group *group = tchi_group_at(o, index);
    const tch_optim_config *config = &group->config;
    int32_t root = blocks->root == NULL ? 0 : blocks->root(config, block_batch->order);
    for (int32_t k = 0; k < block_batch->order; k++) {
        block_batch->factor_batch[k] = -1;
        if (blocks->has_factor != NULL && blocks->has_factor(config, block_batch->order, block_batch->size, k)) {
            tchi_factor_batch like = {.group = index,
                                      .n = block_batch->size[k],
                                      .root = root,
                                      .real = block_batch->real,
                                      .packed = config->memory.packed_factors != 0,
                                      .bf16_roots = root != 0 && block_batch->real == TCH_SCALAR_F32 &&
                                                    config->memory.root_dtype == TCH_STATE_BFLOAT16};
            TCHI_TRY(find_factor_batch(o, group, &like, &block_batch->factor_batch[k]));
            tchi_factor_batch *factor_batch = tchi_factor_batch_at(o, block_batch->factor_batch[k]);
            tchi_block_batch *first = tchi_block_batch_at(o, block_batch->alone);
            block_batch->position[k] = factor_batch->count;
            factor_batch->count += block_batch->count;
            if (first == block_batch) {
                block_batch->before[k] = factor_batch->all;
                factor_batch->all += block_batch->alone_all;
            }
            block_batch->before[k] = first->before[k];
        }
    }
    return TCH_OK;
}

/* The lists of a factor batch share one allocation, largest elements first; not NULL if they are empty. */
static size_t list_bytes(const tchi_factor_batch *f)
{
    size_t each = sizeof *f->block + sizeof *f->alone_index + sizeof *f->picked + sizeof *f->refreshed +
                  sizeof *f->phase + sizeof *f->block_batch + sizeof *f->level + 6;
    return (size_t)(f->count > 0 ? f->count : 1) * each;
}

static tch_status take_factor_batch_lists(tchi_factor_batch *f)
{
    TCHI_TRY(tchi_host_take(list_bytes(f), "a factor batch", &f->block));
    f->alone_index = f->block + f->count;
    f->picked = f->alone_index + f->count;
    f->refreshed = f->picked + f->count;
    f->phase = (int32_t *)(f->refreshed + f->count);
    f->block_batch = f->phase + f->count;
    f->level = (uint16_t *)(f->block_batch + f->count);
    f->refresh = (uint8_t *)(f->level + f->count);
    f->failures = f->refresh + f->count;
    f->gap = f->failures + f->count;
    f->next_gap = f->gap + f->count;
    f->unread = f->next_gap + f->count;
    f->stale = f->unread + f->count;
    return TCH_OK;
}

void tchi_layout_free_factor_batch(tchi_factor_batch *f)
{
    tchi_host_release(f->block, list_bytes(f));
}

/* Stores the owner block of each factor. */
static void note_owners(tch_optimizer *o, int32_t block_batch_index)
{
    const tchi_block_batch *block_batch = tchi_block_batch_at(o, block_batch_index);
    for (int32_t k = 0; k < block_batch->order; k++) {
        if (block_batch->factor_batch[k] < 0) {
            continue;
        }
        tchi_factor_batch *factor_batch = tchi_factor_batch_at(o, block_batch->factor_batch[k]);
        for (int64_t b = 0; b < block_batch->count; b++) {
            factor_batch->block_batch[block_batch->position[k] + b] = block_batch_index;
            factor_batch->block[block_batch->position[k] + b] = b;
            factor_batch->alone_index[block_batch->position[k] + b] =
                block_batch->before[k] + tchi_block_at(o, block_batch->first + b)->alone_index;
        }
    }
}

static tch_status make_factor_batches(tch_optimizer *o, int32_t index)
{
    tchi_group *group = tchi_group_at(o, index);
    for (int32_t i = 0; i < group->block_batches; i++) {
        TCHI_TRY(join_factor_batches(o, index, tchi_block_batch_at(o, group->first_block_batch + i)));
    }
    group->factor_batches = (int32_t)o->factor_batches.count - group->first_factor_batch;
    for (int32_t i = 0; i < group->factor_batches; i++) {
        TCHI_TRY(take_factor_batch_lists(tchi_factor_batch_at(o, group->first_factor_batch + i)));
    }
    for (int32_t i = 0; i < group->block_batches; i++) {
        note_owners(o, group->first_block_batch + i);
    }
    return TCH_OK;
}

tch_status tchi_layout_group(tch_optimizer *optimizer, int32_t group)
{
    TCHI_TRY(make_blocks(optimizer, group));
    return make_factor_batches(optimizer, group);
}

/* --- the state in memory ----------------------------------------------------------------------------------------- */

/* Destination of state names; no optimizer while only measuring. */
typedef struct naming {
    tch_optimizer *optimizer;
    bool on;
} naming;

static tch_status name_state(const naming *n, int32_t param, tchi_state_kind kind, void *data, tch_scalar type,
                             int32_t ndim, const int64_t *shape, const int64_t *strides, const char *what)
{
    tch_optimizer *o = n->optimizer;
    if (!n->on) {
        return TCH_OK;
    }
    const tchi_param *p = tchi_param_at(o, param);
    TCHI_TRY(tchi_list_reserve(&o->states, o->states.count + 1));
    size_t bytes = sizeof(tchi_state) + strlen(p->name) + strlen(what) + 2;
    tchi_state *s = NULL;
    TCHI_TRY(tchi_host_take(bytes, "the name of a state", &s));
    *(tchi_state **)tchi_list_extend(&o->states) = s;
    s->bytes = bytes;
    s->param = param;
    s->kind = kind;
    s->tile = -1;
    snprintf(s->name, bytes - sizeof *s, "%s/%s", p->name, what);
    s->tensor = (tch_tensor){.data = data,
                             .device = tch_context_device(o->context),
                             .ndim = ndim,
                             .dtype = tchi_dtype_of(type),
                             .shape = s->shape,
                             .strides = s->strides};
    for (int32_t k = 0; k < ndim; k++) {
        s->shape[k] = shape[k];
        s->strides[k] = strides[k];
    }
    return TCH_OK;
}

/* Sets the names of a parameter's moments, NULL for those it lacks. A carried parameter shares them with its tiles: it
 * keeps the first moment if it filters, the tiles keep the rest. */
static void moment_names(const tch_optimizer *o, const tch_optim_config *config, const tchi_param *p,
                         const char *names[TCHI_MOMENTS])
{
    names[0] = names[1] = names[2] = NULL;
    (p->blocked ? o->method->blocks->moments : o->method->elementwise->moments)(config, names);
    if (p->carried) {
        names[0] = p->filters ? names[0] : NULL;
        names[1] = names[2] = NULL;
    } else if (p->tile >= 0 && tchi_param_at(o, p->index)->filters) {
        names[0] = NULL;
    }
}

static const char *numbered(const tchi_param *p, const char *name, char what[64])
{
    snprintf(what, 64, p->tile < 0 ? "%s" : "%s.%d", name, p->tile);
    return what;
}

static void note_tile(const naming *n, const tchi_param *p)
{
    if (n->on && p->tile >= 0) {
        tchi_state_at(n->optimizer, n->optimizer->states.count - 1)->tile =
            (int32_t)(p - tchi_tile_at(n->optimizer, 0));
    }
}

/* Places a tensor with the layout of the parameter, or of one of its tiles, which is then numbered. */
static tch_status place_like(const naming *n, const tchi_param *p, tch_scalar type, const char *name, tchi_arena *arena,
                             void **data)
{
    char what[64];
    *data = tchi_arena_take(arena, p->count * tchi_scalar_size(type));
    TCHI_TRY(name_state(n, p->index, p->tile < 0 ? TCHI_STATE_LIKE_PARAM : TCHI_STATE_LIKE_TILE, *data, type, p->ndim,
                        p->shape, p->strides, numbered(p, name, what)));
    note_tile(n, p);
    return TCH_OK;
}

/* Small parameters, such as biases and norms, use little memory and are often sensitive. */
#define LEAST_NARROW 4096

static bool may_be_compressed(const tchi_param *p)
{
    return p->real == TCH_SCALAR_F32 && p->whole >= LEAST_NARROW;
}

/* Whether rows of blocks begin and end where blocks of codes do. */
static bool keeps_code_blocks(const tch_optimizer *o, const tchi_param *p)
{
    int64_t cols = p->dims.order == 0 ? 0 : p->dims.size[p->dims.order - 1];
    int64_t most = tchi_layout_cut_at(o, p->group);
    return cols % TCH_CODE_BLOCK == 0 && (cols <= most || most % TCH_CODE_BLOCK == 0);
}

tch_moments tchi_moments_of(const tch_optimizer *optimizer, const tchi_param *param)
{
    static const tch_moments kept[] = {TCH_MOMENTS_REAL, TCH_MOMENTS_BF16, TCH_MOMENTS_CODES};
    const tchi_param *p = param->tile < 0 ? param : tchi_param_at(optimizer, param->index);
    tch_moments asked = kept[tchi_group_at(optimizer, p->group)->config.memory.state_dtype];
    if (!may_be_compressed(p)) {
        return TCH_MOMENTS_REAL;
    }
    return asked == TCH_MOMENTS_CODES && p->blocked && !keeps_code_blocks(optimizer, p) ? TCH_MOMENTS_BF16 : asked;
}

/* Marks the latest entry as one that a file may store in another form. */
static void mark_moment(const naming *n, const tchi_param *p, int32_t moment)
{
    if (n->on && may_be_compressed(p) && n->optimizer->shared == NULL) {
        tchi_state_at(n->optimizer, n->optimizer->states.count - 1)->moment = moment;
    }
}

/* Places a list with an entry for every `per` elements. */
static tch_status place_list(const naming *n, const tchi_param *p, tch_scalar type, int32_t per, const char *name,
                             tchi_arena *arena, void **data)
{
    char what[64];
    int64_t stride = 1;
    int64_t count = tchi_ceil_div(p->count, per);
    *data = tchi_arena_take(arena, count * tchi_scalar_size(type));
    bool whole = p->tile < 0 && p->count == p->whole;
    TCHI_TRY(name_state(n, p->index, whole ? TCHI_STATE_OF_PARAM : TCHI_STATE_OF_ELEMENTS, *data, type, 1, &count,
                        &stride, numbered(p, name, what)));
    note_tile(n, p);
    if (n->on) {
        tchi_state_at(n->optimizer, n->optimizer->states.count - 1)->per = per;
    }
    return TCH_OK;
}

/* int8 codes are in the order of the parameter's memory, four to an int32 element: there is no 8-bit tensor type. */
static tch_status place_codes(const naming *n, tchi_param *p, const char *name, int32_t k, tchi_arena *arena)
{
    char what[64];
    void *scale;
    snprintf(what, sizeof what, "%s_scale", name);
    TCHI_TRY(place_list(n, p, TCH_SCALAR_I32, 4, name, arena, &p->moment[k]));
    mark_moment(n, p, k + 1);
    TCHI_TRY(place_list(n, p, TCH_SCALAR_F32, TCH_CODE_BLOCK, what, arena, &scale));
    mark_moment(n, p, -(k + 1));
    p->scale[k] = scale;
    return TCH_OK;
}

static tch_status place_param(const naming *n, tchi_param *p, const tch_optim_config *config, tchi_arena *arena)
{
    const char *names[TCHI_MOMENTS];
    /* masters are kept by the ranks that apply directions, or with a tile that stands for the parameter */
    bool here = p->tile >= 0 ? p->by_value : !p->carried || !p->by_value;
    if (here && config->memory.master_weights && tchi_scalar_size(p->type) == 2) {
        TCHI_TRY(place_like(n, p, p->real, "master", arena, &p->master));
    }
    moment_names(n->optimizer, config, p, names);
    p->moments = tchi_moments_of(n->optimizer, p);
    for (int32_t k = 0; k < TCHI_MOMENTS; k++) {
        tch_moments kept = tchi_kept_as(p, k);
        if (names[k] != NULL && kept == TCH_MOMENTS_CODES) {
            TCHI_TRY(place_codes(n, p, names[k], k, arena));
        } else if (names[k] != NULL) {
            tch_scalar type = kept == TCH_MOMENTS_BF16 ? TCH_SCALAR_BF16 : p->real;
            TCHI_TRY(place_like(n, p, type, names[k], arena, &p->moment[k]));
            mark_moment(n, p, k < (p->blocked ? 1 : 2) ? k + 1 : 0);
        }
    }
    return TCH_OK;
}

/* The step count is the first field of a clock. */
static tch_status place_params(const naming *n, int32_t group, tchi_arena *state)
{
    tch_optimizer *o = n->optimizer;
    const tchi_group *g = tchi_group_at(o, group);
    tch_clock *clocks = tchi_arena_take(state, g->params * (int64_t)sizeof *clocks);
    for (int32_t i = 0; i < g->params; i++) {
        tchi_param *p = tchi_param_at(o, g->first_param + i);
        p->clock = clocks == NULL ? NULL : clocks + i;
        TCHI_TRY(
            name_state(n, g->first_param + i, TCHI_STATE_OF_PARAM, p->clock, TCH_SCALAR_F64, 0, NULL, NULL, "step"));
        TCHI_TRY(place_param(n, p, &g->config, state));
    }
    for (int32_t i = 0; i < o->tiles.count; i++) {
        tchi_param *t = tchi_tile_at(o, i);
        if (t->group == group) {
            t->clock = tchi_param_at(o, t->index)->clock;
            TCHI_TRY(place_param(n, t, &g->config, state));
        }
    }
    return TCH_OK;
}

/* A packed matrix is a vector. */
static tch_status name_matrix(const naming *n, const tchi_block_batch *block_batch, int64_t block, int32_t k,
                              tchi_matrix_kind kind, const char *name)
{
    tch_optimizer *o = n->optimizer;
    const tchi_factor_batch *f = tchi_factor_batch_at(o, block_batch->factor_batch[k]);
    const tchi_block *b = tchi_block_at(o, block_batch->first + block);
    bool packed = tchi_is_packed(f, kind);
    int64_t shape[2] = {packed ? tchi_kept_elements(f, kind) : f->n, f->n};
    int64_t strides[2] = {packed ? 1 : f->n, 1};
    char what[64];
    snprintf(what, sizeof what, "%s.%d.%d", name, tchi_block_number(o, b), k);
    TCHI_TRY(name_state(n, tchi_block_param(o, b)->index, TCHI_STATE_OF_BLOCK,
                        tchi_kept_at(f, kind, block_batch->position[k] + block), tchi_kept_type(f, kind),
                        packed ? 1 : 2, shape, strides, what));
    if (n->on && (kind == TCHI_FACTORS || f->root != 0)) {
        tchi_state_at(o, o->states.count - 1)->symmetric = f->n;
    }
    return TCH_OK;
}

static tch_status name_block_state(const naming *n, const tchi_block_batch *block_batch, int64_t block)
{
    const tchi_block_method *blocks = n->optimizer->method->blocks;
    const tchi_block *b = tchi_block_at(n->optimizer, block_batch->first + block);
    int64_t shape[TCHI_MOST_ORDER];
    int64_t strides[TCHI_MOST_ORDER];
    int64_t stride = 1;
    int32_t ndim = blocks->block_state_shape(block_batch, b, tchi_block_param(n->optimizer, b), shape);
    for (int32_t k = ndim - 1; k >= 0; k--) {
        strides[k] = stride;
        stride *= shape[k];
    }
    int64_t at = block * blocks->block_state(block_batch) * tchi_scalar_size(block_batch->real);
    char what[64];
    snprintf(what, sizeof what, "%s.%d", blocks->block_state_name, tchi_block_number(n->optimizer, b));
    return name_state(n, tchi_block_param(n->optimizer, b)->index, TCHI_STATE_OF_BLOCK, block_batch->moment + at,
                      block_batch->real, ndim, shape, strides, what);
}

static tch_status name_block_batch(const naming *n, const tchi_block_batch *block_batch)
{
    for (int64_t b = 0; n->on && b < block_batch->count; b++) {
        for (int32_t k = 0; k < block_batch->order; k++) {
            if (block_batch->factor_batch[k] >= 0) {
                bool roots = tchi_factor_batch_of(n->optimizer, block_batch, k)->root != 0;
                TCHI_TRY(name_matrix(n, block_batch, b, k, TCHI_FACTORS, "factor"));
                TCHI_TRY(name_matrix(n, block_batch, b, k, TCHI_ROOTS, roots ? "root" : "basis"));
            }
        }
        if (block_batch->moment != NULL) {
            TCHI_TRY(name_block_state(n, block_batch, b));
        }
    }
    return TCH_OK;
}

static void place_factor_batch(tchi_factor_batch *f, tchi_arena *state, tchi_arena *beside)
{
    f->factors = tchi_arena_take(state, f->count * tchi_kept_bytes(f, TCHI_FACTORS));
    f->roots = tchi_arena_take(state, f->count * tchi_kept_bytes(f, TCHI_ROOTS));
    f->flags = tchi_arena_take(beside, tchi_outcome_bytes(f));
    f->drift = tchi_outcome_drift(f, f->flags);
    f->residuals = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->residuals);
    if (f->root == 0) {
        f->orders = tchi_arena_take(beside, f->count * f->n * (int64_t)sizeof *f->orders);
    }
}

tch_status tchi_layout_state(tch_optimizer *optimizer, int32_t group, tchi_arena *state, tchi_arena *beside, bool names)
{
    naming n = {optimizer, names};
    const tchi_block_method *blocks = optimizer->method->blocks;
    tchi_group *g = tchi_group_at(optimizer, group);
    g->numbers = tchi_arena_take(beside, sizeof *g->numbers);
    tchi_exchange_layout(optimizer, group, beside);
    TCHI_TRY(place_params(&n, group, state));
    for (int32_t i = 0; i < g->factor_batches; i++) {
        place_factor_batch(tchi_factor_batch_at(optimizer, g->first_factor_batch + i), state, beside);
    }
    for (int32_t i = 0; i < g->block_batches; i++) {
        tchi_block_batch *block_batch = tchi_block_batch_at(optimizer, g->first_block_batch + i);
        if (blocks->block_state != NULL) {
            int64_t numbers = block_batch->count * blocks->block_state(block_batch);
            block_batch->moment = tchi_arena_take(state, numbers * tchi_scalar_size(block_batch->real));
        }
        TCHI_TRY(name_block_batch(&n, block_batch));
    }
    return TCH_OK;
}

/* --- scratch of a step ------------------------------------------------------------------------------------------- */

/* An eighth of the state. The minimum, 2 GiB or 1/32 of a training GPU's memory, lets roots and bases of small models
 * be computed in large batches, which is faster. */
int64_t tchi_layout_budget(const tch_optimizer *optimizer)
{
    const int64_t least = (int64_t)2 << 30;
    int64_t asked = optimizer->groups.count > 0 ? tchi_group_at(optimizer, 0)->config.memory.budget : 0;
    int64_t share = tchi_max(optimizer->state_bytes / 8, optimizer->device_bytes / 32);
    return asked > 0 ? asked : tchi_max(share, least);
}

/* A block that splits more than two dimensions is not a single rectangle. */
static int64_t rects_of(const tch_optimizer *o, const tchi_block_batch *block_batch)
{
    int64_t most = 1;
    for (int64_t b = 0; b < block_batch->count; b++) {
        int64_t rects = tchi_block_rects(o, block_batch, b);
        most = rects > most ? rects : most;
    }
    return most;
}

/* Blocks of one pass: as few passes as fit, of equal size, since a small last pass leaves the device underused. */
static int64_t chunk_of(int64_t count, int64_t fit)
{
    if (count == 0) {
        return 0;
    }
    int64_t most = fit < 1 ? 1 : fit > count ? count : fit;
    int64_t passes = (count + most - 1) / most;
    return (count + passes - 1) / passes;
}

void tchi_layout_chunks(tch_optimizer *optimizer, tchi_arena *scratch)
{
    /* refreshes get the rest, since larger batches help roots most */
    int64_t budget = tchi_layout_budget(optimizer) / (optimizer->factor_batches.count > 0 ? 4 : 1);
    int64_t most_work = 0;
    int64_t most_unpacked = 0;
    int64_t most_blocks = 1;
    int64_t most_rects = 1;
    int64_t most_elements = 1;
    for (int32_t i = 0; i < optimizer->block_batches.count; i++) {
        tchi_block_batch *block_batch = tchi_block_batch_at(optimizer, i);
        const tch_optim_config *config = &tchi_group_at(optimizer, block_batch->group)->config;
        int64_t unpacked = tchi_unpacked_bytes(optimizer, block_batch);
        int64_t each = optimizer->method->blocks->work(optimizer->context, config, block_batch);
        int64_t fit = config->numerics.world_invariant ? 1
                      : each + unpacked > 0            ? budget / (each + unpacked)
                                                       : block_batch->count;
        block_batch->rects = rects_of(optimizer, block_batch);
        block_batch->chunk = chunk_of(block_batch->count, fit);
        most_work = block_batch->chunk * each > most_work ? block_batch->chunk * each : most_work;
        most_unpacked = tchi_max(most_unpacked, tchi_max(block_batch->chunk, 2) * unpacked); /* a factor and its root */
        most_blocks = block_batch->chunk > most_blocks ? block_batch->chunk : most_blocks;
        most_rects =
            block_batch->chunk * block_batch->rects > most_rects ? block_batch->chunk * block_batch->rects : most_rects;
        int64_t elements = block_batch->chunk * block_batch->elements;
        most_elements = elements > most_elements ? elements : most_elements;
    }
    const tch_backend *t = optimizer->context->backend;
    optimizer->most_rects = most_rects;
    optimizer->unpacked_bytes = tchi_round_up(most_unpacked, 512); /* both parts are aligned */
    optimizer->work_bytes = most_work + optimizer->unpacked_bytes;
    optimizer->scratch = tchi_arena_take(scratch, most_work);
    optimizer->unpacked = tchi_arena_take(scratch, optimizer->unpacked_bytes);
    optimizer->target_norms = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(double));
    optimizer->norms = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(double));
    optimizer->notes[0] = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(uint32_t));
    optimizer->notes[1] = tchi_arena_take(scratch, most_blocks * (int64_t)sizeof(uint32_t));
    optimizer->graft_scratch =
        tchi_arena_take(scratch, t->device->scratch_bytes(optimizer->context->state, TCH_SCRATCH_GRAFT, TCH_SCALAR_F32,
                                                          most_elements, 1, most_rects, 0));
}

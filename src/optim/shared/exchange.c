/* What travels, and moving it. Rectangles are packed and unpacked by the operations that optimizers use anyway:
 * `gather`, which reads a rectangle of one array into another and converts its type, and `apply`. */
#include <string.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/status.h"

#include "optim/method.h"
#include "optim/rects.h"
#include "shared.h"

enum { ALIGN = 16 }; /* bytes of a part on the wire are rounded up to it */

static int64_t padded(int64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static int64_t elements_of(const int64_t *size, int32_t order)
{
    int64_t count = 1;
    for (int32_t k = 0; k < order; k++) {
        count *= size[k];
    }
    return count;
}

/* --- planning ---------------------------------------------------------------------------------------------------- */

typedef struct route_planner {
    tch_optimizer *optimizer;
    tchi_exchange *exchange;
    int32_t rank, ranks;
    bool fill;         /* false: bytes are counted, parts are not listed */
    int64_t *gathered; /* bytes of each rank's segment */
} route_planner;

static int64_t *counts_at(const tchi_route *route, int32_t ranks, int which)
{
    return route->counts + (int64_t)which * ranks;
}

enum { SEND_OFFSETS, SEND_BYTES, RECEIVE_OFFSETS, RECEIVE_BYTES };

/* Counts the bytes of a part to or from a peer; in the second pass the part is listed where they lie. */
static tch_status add_part(const route_planner *r, tchi_route *route, bool sends, tchi_part part, int64_t bytes)
{
    int64_t *used = counts_at(route, r->ranks, sends ? SEND_BYTES : RECEIVE_BYTES) + part.peer;
    if (r->fill) {
        part.wire = counts_at(route, r->ranks, sends ? SEND_OFFSETS : RECEIVE_OFFSETS)[part.peer] + *used;
        TCHI_TRY(tchi_list_add(sends ? &route->send : &route->receive, &part));
    }
    *used += bytes;
    return TCH_OK;
}

/* The rank that sends a region of a tile: its owner, if it has it; otherwise the holder of the same replica. */
static int32_t source_of(const tchi_regions *regions, const tchi_region *region, int32_t owner)
{
    const int32_t *holders = (const int32_t *)regions->holders.items + region->first_holder;
    for (int32_t h = 0; h < region->holders; h++) {
        if (holders[h] == owner) {
            return owner;
        }
    }
    for (int64_t i = 0; i < regions->list.count; i++) {
        const tchi_region *other = tchi_region_at(regions, i);
        const int32_t *its = (const int32_t *)regions->holders.items + other->first_holder;
        for (int32_t h = 0; h < other->holders; h++) {
            if (its[h] == owner) {
                return holders[region->holders > 0 ? h % region->holders : 0];
            }
        }
    }
    return holders[region->holders > 0 ? owner % region->holders : 0];
}

static tchi_part part_of(const tchi_tile *tile, int64_t number, int32_t order, const tchi_region *region,
                         const int64_t *from, const int64_t *extent)
{
    tchi_part part = {.tile = (int32_t)number, .at = region->at};
    int64_t stride = 1;
    for (int32_t k = order - 1; k >= 0; k--) {
        part.size[k] = extent[k];
        part.in_tile += (from[k] - tile->start[k]) * stride;
        part.at += (from[k] - region->start[k]) * region->stride[k];
        part.stride[k] = region->stride[k];
        stride *= tile->size[k];
    }
    return part;
}

static tch_status plan_sharded(const route_planner *r, int64_t number, const tchi_regions *regions,
                               const tchi_region *region, tchi_part part)
{
    const tchi_tile *tile = tchi_shared_tile(r->optimizer, number);
    const tchi_param *p = tchi_param_at(r->optimizer, tile->param);
    const int32_t *holders = (const int32_t *)regions->holders.items + region->first_holder;
    int64_t count = elements_of(part.size, regions->order);
    int64_t in = padded(count * tchi_scalar_size(p->wire_in));
    int64_t out = padded(count * tchi_scalar_size(p->wire_out));
    int32_t source = source_of(regions, region, tile->owner);
    bool mine = tile->owner == r->rank;
    r->exchange->sharded = true;
    if (source == r->rank) {
        part.peer = tile->owner;
        TCHI_TRY(add_part(r, &r->exchange->in, true, part, in));
    }
    if (mine) {
        part.peer = source;
        TCHI_TRY(add_part(r, &r->exchange->in, false, part, in));
    }
    for (int32_t h = 0; h < region->holders; h++) {
        if (mine) {
            part.peer = holders[h];
            TCHI_TRY(add_part(r, &r->exchange->out, true, part, out));
        }
        if (holders[h] == r->rank) {
            part.peer = tile->owner;
            TCHI_TRY(add_part(r, &r->exchange->out, false, part, out));
        }
    }
    return TCH_OK;
}

static tch_status plan_whole(const route_planner *r, int64_t number, int32_t order, tchi_part part)
{
    const tchi_tile *tile = tchi_shared_tile(r->optimizer, number);
    const tchi_param *p = tchi_param_at(r->optimizer, tile->param);
    int64_t *used = &r->gathered[tile->owner];
    part.peer = tile->owner;
    part.wire = *used;
    *used += padded(elements_of(part.size, order) * tchi_scalar_size(p->wire_out));
    if (!r->fill) {
        return TCH_OK;
    }
    if (tile->owner == r->rank) {
        TCHI_TRY(tchi_list_add(&r->exchange->local, &part));
        TCHI_TRY(tchi_list_add(&r->exchange->spread_in, &part));
    }
    part.wire += tile->owner * r->exchange->segment;
    return tchi_list_add(&r->exchange->spread, &part);
}

static tch_status walk_tiles(const route_planner *r, int32_t first_param, const tchi_regions *regions)
{
    const tchi_exchange *x = r->exchange;
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        const tchi_tile *tile = tchi_shared_tile(r->optimizer, i);
        const tchi_regions *of = &regions[tile->param - first_param];
        for (int64_t k = 0; k < of->list.count; k++) {
            const tchi_region *region = tchi_region_at(of, k);
            int64_t from[TCHI_MOST_ORDER];
            int64_t extent[TCHI_MOST_ORDER];
            if (!tchi_region_meets(region, of->order, tile->start, tile->size, from, extent)) {
                continue;
            }
            tchi_part part = part_of(tile, i, of->order, region, from, extent);
            TCHI_TRY(region->holders < 0 ? plan_whole(r, i, of->order, part) : plan_sharded(r, i, of, region, part));
        }
    }
    return TCH_OK;
}

/* From bytes to offsets; bytes begin again at 0 for the second pass. */
static int64_t lay_out(int64_t *offsets, int64_t *bytes, int32_t ranks)
{
    int64_t total = 0;
    for (int32_t i = 0; i < ranks; i++) {
        offsets[i] = total;
        total += bytes[i];
        bytes[i] = 0;
    }
    return total;
}

static void lay_out_route(tchi_route *route, int32_t ranks)
{
    route->send_bytes = lay_out(counts_at(route, ranks, SEND_OFFSETS), counts_at(route, ranks, SEND_BYTES), ranks);
    route->receive_bytes =
        lay_out(counts_at(route, ranks, RECEIVE_OFFSETS), counts_at(route, ranks, RECEIVE_BYTES), ranks);
}

static tch_status open_lists(tchi_exchange *x, int32_t ranks)
{
    tchi_list *const lists[] = {&x->in.send, &x->in.receive, &x->out.send, &x->out.receive,
                                &x->local,   &x->spread_in,  &x->spread};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        lists[i]->item_size = sizeof(tchi_part);
    }
    x->host_bytes = 9 * (int64_t)ranks * (int64_t)sizeof(int64_t);
    TCHI_TRY(tchi_host_take((size_t)x->host_bytes, "the counts of an exchange", &x->in.counts));
    x->out.counts = x->in.counts + 4 * (int64_t)ranks;
    return TCH_OK;
}

tch_status tchi_exchange_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions)
{
    tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    int32_t first_param = tchi_group_at(optimizer, group)->first_param;
    route_planner r = {.optimizer = optimizer,
                       .exchange = x,
                       .rank = tch_comm_rank(optimizer->shared->comm),
                       .ranks = tch_comm_size(optimizer->shared->comm)};
    TCHI_TRY(open_lists(x, r.ranks));
    r.gathered = x->out.counts + 4 * (int64_t)r.ranks;
    TCHI_TRY(walk_tiles(&r, first_param, regions));
    lay_out_route(&x->in, r.ranks);
    lay_out_route(&x->out, r.ranks);
    for (int32_t i = 0; i < r.ranks; i++) {
        x->segment = r.gathered[i] > x->segment ? r.gathered[i] : x->segment;
        r.gathered[i] = 0;
    }
    r.fill = true;
    return walk_tiles(&r, first_param, regions);
}

void tchi_exchange_release(tchi_exchange *exchange)
{
    tchi_exchange *x = exchange;
    if (x == NULL) {
        return;
    }
    tchi_list *const lists[] = {&x->in.send, &x->in.receive, &x->out.send, &x->out.receive,
                                &x->local,   &x->spread_in,  &x->spread};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        tchi_list_release(lists[i]);
    }
    tchi_host_release(x->in.counts, (size_t)x->host_bytes);
    tchi_host_release(x, sizeof *x);
}

/* --- buffers ----------------------------------------------------------------------------------------------------- */

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static void lay_out_tiles(tch_optimizer *o, int32_t group, tchi_arena *data, tchi_arena *grads)
{
    for (int32_t i = 0; i < o->tiles.count; i++) {
        tchi_param *t = tchi_tile_at(o, i);
        if (t->group == group) {
            t->data = tchi_arena_take(data, t->count * tchi_scalar_size(t->type));
            t->staged = tchi_arena_take(grads, t->count * tchi_scalar_size(t->wire_in));
        }
    }
}

void tchi_exchange_layout(tch_optimizer *o, int32_t group, tchi_arena *beside)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    if (x == NULL) {
        return;
    }
    int64_t ranks = tch_comm_size(o->shared->comm);
    tchi_arena data = {0};
    tchi_arena grads = {0};
    lay_out_tiles(o, group, &data, &grads);
    x->tile_data_bytes = data.used;
    x->tile_data = tchi_arena_take(beside, data.used);
    x->tile_grads = tchi_arena_take(beside, grads.used);
    x->sent = tchi_arena_take(beside, larger(larger(x->in.send_bytes, x->out.send_bytes), x->segment));
    x->received =
        tchi_arena_take(beside, larger(larger(x->in.receive_bytes, x->out.receive_bytes), ranks * x->segment));
    if (x->tile_data != NULL) {
        data = (tchi_arena){.base = x->tile_data};
        grads = (tchi_arena){.base = x->tile_grads};
        lay_out_tiles(o, group, &data, &grads);
    }
}

/* --- moving rectangles ------------------------------------------------------------------------------------------- */

/* Where the elements of a part lie in an array. */
typedef struct view {
    int64_t at; /* elements */
    int64_t stride[TCHI_MOST_ORDER];
} view;

static view dense_view(const int64_t *size, int32_t order, int64_t at)
{
    view v = {.at = at};
    int64_t stride = 1;
    for (int32_t k = order - 1; k >= 0; k--) {
        v.stride[k] = stride;
        stride *= size[k];
    }
    return v;
}

static view tensor_view(const tchi_part *part)
{
    view v = {.at = part->at};
    memcpy(v.stride, part->stride, sizeof v.stride);
    return v;
}

/* One move of parts between two arrays, by one operation. Rectangles of `from` and `to` are those of the two innermost
 * dimensions, once for every index of the outer ones. */
typedef struct move {
    tch_optimizer *optimizer;
    const tchi_step *now; /* NULL for what reads no gradient */
    int32_t group;
    tch_update update;
    bool second; /* the filtered gradient, which is the second block */
} move;

/* A rectangle of this rank's tensor, with all that belongs to it; or of any other array, which is read as a gradient
 * is. */
typedef struct source {
    const tchi_param *param; /* NULL: `data` */
    char *data;
    int64_t bytes; /* of an element */
} source;

static tch_status add_rects(move *m, const tchi_part *part, int32_t order, const source *from, const view *a, char *to,
                            int64_t to_bytes, const view *b, double factor)
{
    int64_t outer = 1;
    int64_t cols = part->size[order - 1];
    int64_t rows = order > 1 ? part->size[order - 2] : 1;
    for (int32_t k = 0; k + 2 < order; k++) {
        outer *= part->size[k];
    }
    for (int64_t i = 0; i < outer; i++) {
        int64_t in_a = a->at;
        int64_t in_b = b->at;
        int64_t rest = i;
        for (int32_t k = order - 3; k >= 0; k--) {
            in_a += rest % part->size[k] * a->stride[k];
            in_b += rest % part->size[k] * b->stride[k];
            rest /= part->size[k];
        }
        int64_t stride = order > 1 ? a->stride[order - 2] : cols;
        tch_rect rect = {.rows = rows, .cols = cols, .stride = stride};
        if (from->param != NULL) {
            const tchi_gradient *gradient = tchi_gradient_of(m->optimizer, m->now, from->param);
            rect = tchi_rect_at(from->param, gradient, in_a, rows, cols, stride);
        } else {
            rect.grad = from->data + in_a * from->bytes;
        }
        rect.block[m->second] = to + in_b * to_bytes;
        rect.block_ld = order > 1 ? b->stride[order - 2] : cols;
        rect.factor = factor;
        TCHI_TRY(tchi_list_add(&m->optimizer->shared->rects, &rect));
    }
    return TCH_OK;
}

static move begin_move(tch_optimizer *o, const tchi_step *now, int32_t group, tch_scalar type)
{
    move m = {.optimizer = o,
              .now = now,
              .group = group,
              .update = tchi_update_of(o, now, group, &tchi_group_at(o, group)->numbers->main)};
    m.update.real = type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
    m.update.param_type = type;
    o->shared->rects.count = 0;
    return m;
}

static tch_update *finish_move(move *m)
{
    m->update.rects = m->optimizer->shared->rects.items;
    m->update.count = m->optimizer->shared->rects.count;
    return &m->update;
}

/* As they are: neither unscaled nor with their sign changed. */
static void keep_raw(move *m)
{
    m->update.grad_scale = NULL;
    m->update.maximize = 0;
    m->update.skip = NULL;
}

static const tchi_param *param_of(const tch_optimizer *o, const tchi_part *part)
{
    return tchi_param_at(o, tchi_shared_tile(o, part->tile)->param);
}

static const tchi_part *parts_of(const tchi_list *list)
{
    return list->items;
}

/* --- gradients to tiles ------------------------------------------------------------------------------------------ */

static bool adds_decay(const tch_optimizer *o, int32_t group)
{
    return tchi_adds_decay(o->method->blocks, &tchi_group_at(o, group)->config);
}

/* Gradients of this rank's tensors, of one pair of types, to the wire or straight to its tiles. What is filtered here,
 * or has decay added to it, is unscaled here too. */
static tch_status pack_gradients(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list,
                                 bool to_wire, tch_scalar type, tch_scalar grad)
{
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    move m = begin_move(o, now, group, type);
    tch_filter filter = TCH_FILTER_NONE;
    bool l2 = false;
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        const tchi_gradient *gradient = &now->gradients[p->index];
        if (gradient->data == NULL || p->type != type || gradient->type != grad) {
            continue;
        }
        int32_t order = p->dims.order;
        int64_t bytes = tchi_scalar_size(p->wire_in);
        source from = {.param = p};
        view a = tensor_view(part);
        view b = to_wire ? dense_view(part->size, order, 0) : dense_view(tile->size, order, part->in_tile);
        if (p->filters) {
            filter = config->nesterov ? TCH_FILTER_NESTEROV : TCH_FILTER_EMA;
        }
        l2 = adds_decay(o, group) && !p->by_value;
        m.second = p->filters;
        m.update.block_type = p->wire_in;
        m.update.grad_type = grad;
        TCHI_TRY(add_rects(&m, part, order, &from, &a,
                           to_wire ? x->sent + part->wire : tchi_tile_at(o, tile->own)->staged, bytes, &b, 1.0));
    }
    if (filter == TCH_FILTER_NONE && !l2) {
        keep_raw(&m);
    }
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), filter, l2);
}

static tch_status pack_all(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list, bool to_wire)
{
    for (int type = 0; type <= TCH_SCALAR_BF16 && list->count > 0; type++) {
        for (int grad = 0; grad <= TCH_SCALAR_BF16; grad++) {
            TCHI_TRY(pack_gradients(o, now, group, list, to_wire, (tch_scalar)type, (tch_scalar)grad));
        }
    }
    return TCH_OK;
}

/* What came in for tiles, of one type. */
static tch_status unpack_tiles(tch_optimizer *o, const tchi_step *now, int32_t group, tch_scalar type)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    const tchi_list *list = &x->in.receive;
    move m = begin_move(o, now, group, type);
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        if (now->gradients[p->index].data == NULL || p->type != type) {
            continue;
        }
        int64_t bytes = tchi_scalar_size(p->wire_in);
        source from = {NULL, x->received + part->wire, bytes};
        view a = dense_view(part->size, p->dims.order, 0);
        view b = dense_view(tile->size, p->dims.order, part->in_tile);
        m.update.grad_type = m.update.block_type = p->wire_in;
        TCHI_TRY(add_rects(&m, part, p->dims.order, &from, &a, tchi_tile_at(o, tile->own)->staged, bytes, &b, 1.0));
    }
    keep_raw(&m);
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), TCH_FILTER_NONE, 0);
}

static tch_comm_counts counts_of(const tchi_route *route, int32_t ranks)
{
    return (tch_comm_counts){counts_at(route, ranks, SEND_OFFSETS), counts_at(route, ranks, SEND_BYTES),
                             counts_at(route, ranks, RECEIVE_OFFSETS), counts_at(route, ranks, RECEIVE_BYTES)};
}

/* Some rank has something to send: known to all, since all have the same plan. */
static tch_status send_route(tch_optimizer *o, tchi_exchange *x, const tchi_route *route)
{
    tch_comm_counts counts = counts_of(route, tch_comm_size(o->shared->comm));
    return x->sharded ? tchi_comm_all_to_all(o->shared->comm, o->context, x->sent, x->received, &counts) : TCH_OK;
}

tch_status tchi_exchange_in(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    TCHI_RANGE(optimizer->context, "exchange in");
    TCHI_TRY(pack_all(optimizer, now, group, &x->in.send, true));
    TCHI_TRY(pack_all(optimizer, now, group, &x->local, false));
    TCHI_TRY(send_route(optimizer, x, &x->in));
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        TCHI_TRY(unpack_tiles(optimizer, now, group, (tch_scalar)type));
    }
    TCHI_TRY(
        optimizer->context->backend->device->zero_bytes(optimizer->context->state, x->tile_data, x->tile_data_bytes));
    return tchi_exchange_values(optimizer, group);
}

/* --- parameters to tiles, and results back ----------------------------------------------------------------------- */

static tch_status copy_values(tch_optimizer *o, int32_t group, tch_scalar type)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    move m = begin_move(o, NULL, group, type);
    for (int64_t i = 0; i < x->local.count; i++) {
        const tchi_part *part = &parts_of(&x->local)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        if (!p->by_value || p->type != type) {
            continue;
        }
        int64_t bytes = tchi_scalar_size(type);
        source from = {NULL, p->data, bytes};
        view a = tensor_view(part);
        view b = dense_view(tile->size, p->dims.order, part->in_tile);
        TCHI_TRY(add_rects(&m, part, p->dims.order, &from, &a, tchi_tile_at(o, tile->own)->data, bytes, &b, 1.0));
    }
    m.update.grad_type = m.update.block_type = type;
    keep_raw(&m);
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), TCH_FILTER_NONE, 0);
}

tch_status tchi_exchange_values(tch_optimizer *optimizer, int32_t group)
{
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        TCHI_TRY(copy_values(optimizer, group, (tch_scalar)type));
    }
    return TCH_OK;
}

/* This rank's tiles, of one type, to the wire. */
static tch_status pack_tiles(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list,
                             tch_scalar type)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    move m = begin_move(o, now, group, type);
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        if (now->gradients[p->index].data == NULL || p->type != type) {
            continue;
        }
        int64_t bytes = tchi_scalar_size(p->wire_out);
        source from = {NULL, tchi_tile_at(o, tile->own)->data, bytes};
        view a = dense_view(tile->size, p->dims.order, part->in_tile);
        view b = dense_view(part->size, p->dims.order, 0);
        m.update.grad_type = m.update.block_type = p->wire_out;
        TCHI_TRY(add_rects(&m, part, p->dims.order, &from, &a, x->sent + part->wire, bytes, &b, 1.0));
    }
    keep_raw(&m);
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), TCH_FILTER_NONE, 0);
}

static double factor_of(const tch_optimizer *o, const tchi_param *p, const tchi_tile *tile)
{
    const tchi_block_method *blocks = o->method->blocks;
    double rows = (double)tile->size[0];
    int64_t rest = elements_of(tile->size + 1, p->dims.order - 1);
    return blocks->step_factor == NULL ? 1.0
                                       : blocks->step_factor(&tchi_group_at(o, p->group)->config, rows, (double)rest);
}

static bool takes_result(const tch_optimizer *o, const tchi_step *now, const tchi_param *p, tch_scalar type,
                         bool by_value)
{
    const tchi_block_method *blocks = o->method->blocks;
    bool waits = blocks->waits != NULL && blocks->waits(p);
    return now->gradients[p->index].data != NULL && p->type == type && p->by_value == by_value && !waits;
}

/* Directions of one type are applied to what this rank holds. */
static tch_status apply_parts(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list,
                              tch_scalar type)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    move m = begin_move(o, now, group, type);
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        if (!takes_result(o, now, p, type, false)) {
            continue;
        }
        source from = {.param = p};
        view a = tensor_view(part);
        view b = dense_view(part->size, p->dims.order, 0);
        m.update.grad_type = now->gradients[p->index].type;
        m.update.block_type = p->wire_out;
        TCHI_TRY(add_rects(&m, part, p->dims.order, &from, &a, x->received + part->wire, tchi_scalar_size(p->wire_out),
                           &b, factor_of(o, p, tile)));
    }
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->apply(o->context->state, finish_move(&m), TCH_BLOCK_AS_IS, NULL, NULL, 0,
                                                    !adds_decay(o, group));
}

/* New values of one type take the place of the old. Where the step was skipped they are the old. */
static tch_status store_values(tch_optimizer *o, const tchi_step *now, int32_t group, tch_scalar type)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    move m = begin_move(o, now, group, type);
    int64_t bytes = tchi_scalar_size(type);
    for (int64_t i = 0; i < x->spread.count; i++) {
        const tchi_part *part = &parts_of(&x->spread)[i];
        const tchi_param *p = param_of(o, part);
        if (!takes_result(o, now, p, type, true)) {
            continue;
        }
        source from = {NULL, x->received + part->wire, bytes};
        view a = dense_view(part->size, p->dims.order, 0);
        view b = tensor_view(part);
        TCHI_TRY(add_rects(&m, part, p->dims.order, &from, &a, p->data, bytes, &b, 1.0));
    }
    m.update.grad_type = m.update.block_type = type;
    keep_raw(&m);
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), TCH_FILTER_NONE, 0);
}

static tch_status send_back(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    for (int type = 0; type <= TCH_SCALAR_BF16 && x->sharded; type++) {
        TCHI_TRY(pack_tiles(o, now, group, &x->out.send, (tch_scalar)type));
    }
    TCHI_TRY(send_route(o, x, &x->out));
    for (int type = 0; type <= TCH_SCALAR_BF16 && x->sharded; type++) {
        TCHI_TRY(apply_parts(o, now, group, &x->out.receive, (tch_scalar)type));
    }
    return TCH_OK;
}

static tch_status spread_back(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    if (x->segment == 0) {
        return TCH_OK;
    }
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        TCHI_TRY(pack_tiles(o, now, group, &x->spread_in, (tch_scalar)type));
    }
    TCHI_TRY(tchi_comm_all_gather(o->shared->comm, o->context, x->sent, x->received, x->segment));
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        TCHI_TRY(store_values(o, now, group, (tch_scalar)type));
        TCHI_TRY(apply_parts(o, now, group, &x->spread, (tch_scalar)type));
    }
    return TCH_OK;
}

tch_status tchi_exchange_out(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    TCHI_RANGE(optimizer->context, "exchange out");
    TCHI_TRY(send_back(optimizer, now, group));
    return spread_back(optimizer, now, group);
}

/* Transfers between ranks: see shared.h and routes.c. Rectangles are packed and unpacked by the operations that
 * optimizers use for updates: `gather`, which reads a rectangle of an array into another and converts its type, and
 * `apply`. */
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "optim/method.h"
#include "optim/rects.h"
#include "shared.h"

/* --- moving rectangles -------------------------------------------------------------------------------------------- */

/* Source or destination of a part. */
typedef enum place {
    ON_WIRE,
    STAGED,   /* the gradient of a tile */
    IN_TILE,  /* the tile itself */
    IN_PARAM, /* this rank's tensor */
    WITH_ALL  /* IN_PARAM with the parameter's gradient and state */
} place;

/* Layout of a part in an array. */
typedef struct view {
    char *data;
    int64_t at; /* elements */
    int64_t stride[TCHI_MOST_ORDER];
} view;

/* A transfer of parts between two arrays by one operation. Its rectangles span the two innermost dimensions, one for
 * every index of the outer ones. */
typedef struct move {
    tch_optimizer *optimizer;
    const tchi_step *now; /* NULL if no gradient is read */
    int32_t group;
    tch_update update;
    bool second; /* the filtered gradient, in block[1] */
} move;

static const tchi_param *param_of(const tch_optimizer *o, const tchi_part *part)
{
    return tchi_param_at(o, tchi_shared_tile(o, part->tile)->param);
}

static view view_of(const tch_optimizer *o, place where, const tchi_part *part, char *wire)
{
    const tchi_tile *tile = tchi_shared_tile(o, part->tile);
    const tchi_param *p = param_of(o, part);
    view v = {.data = p->data, .at = part->at};
    if (where == IN_PARAM || where == WITH_ALL) {
        memcpy(v.stride, part->stride, sizeof v.stride);
        return v;
    }
    const int64_t *size = where == ON_WIRE ? part->size : tile->size;
    int64_t stride = 1;
    for (int32_t k = p->dims.order - 1; k >= 0; k--) {
        v.stride[k] = stride;
        stride *= size[k];
    }
    v.at = where == ON_WIRE ? 0 : part->in_tile;
    v.data = where == ON_WIRE  ? wire + part->wire
             : where == STAGED ? tchi_tile_at(o, tile->local)->staged
                               : tchi_tile_at(o, tile->local)->data;
    return v;
}

/* The numbers of a part's elements in the whole parameter, as a view of it. */
static view numbers_of(const tch_optimizer *o, const tchi_part *part)
{
    const tchi_tile *tile = tchi_shared_tile(o, part->tile);
    const tchi_dims *dims = &param_of(o, part)->dims;
    view v = {0};
    int64_t stride = 1;
    int64_t rest = part->in_tile;
    for (int32_t k = dims->order - 1; k >= 0; k--) {
        v.stride[k] = stride;
        v.at += (tile->start[k] + rest % tile->size[k]) * stride;
        stride *= dims->size[k];
        rest /= tile->size[k];
    }
    return v;
}

/* Adds a part: `a` is read as a gradient or is the parameter; `b` is a block with elements of `type`. */
static tch_status add_part(move *m, const tchi_part *part, place a_place, place b_place, char *wire, tch_scalar type,
                           double factor)
{
    const tchi_param *p = param_of(m->optimizer, part);
    view a = view_of(m->optimizer, a_place, part, wire);
    view b = view_of(m->optimizer, b_place, part, wire);
    view numbers = numbers_of(m->optimizer, part);
    int32_t order = p->dims.order;
    int64_t bytes = tchi_scalar_size(type);
    int64_t outer = 1;
    int64_t cols = part->size[order - 1];
    int64_t rows = order > 1 ? part->size[order - 2] : 1;
    int64_t stride = order > 1 ? a.stride[order - 2] : cols;
    for (int32_t k = 0; k + 2 < order; k++) {
        outer *= part->size[k];
    }
    for (int64_t i = 0; i < outer; i++) {
        int64_t in_a = a.at;
        int64_t in_b = b.at;
        int64_t number = numbers.at;
        int64_t rest = i;
        for (int32_t k = order - 3; k >= 0; k--) {
            in_a += rest % part->size[k] * a.stride[k];
            in_b += rest % part->size[k] * b.stride[k];
            number += rest % part->size[k] * numbers.stride[k];
            rest /= part->size[k];
        }
        tch_rect rect = {.rows = rows, .cols = cols, .stride = stride, .grad = a.data + in_a * bytes};
        if (a_place == WITH_ALL) {
            rect = tchi_rect_at(p, tchi_gradient_of(m->optimizer, m->now, p), in_a, rows, cols, stride);
            rect.first = number;
            rect.skipped = order > 1 ? numbers.stride[order - 2] - stride : 0;
        }
        rect.block[m->second] = b.data + in_b * bytes;
        rect.block_ld = order > 1 ? b.stride[order - 2] : cols;
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

/* Disables unscaling and the sign change of `maximize`. */
static void keep_raw(move *m)
{
    m->update.grad_scale = NULL;
    m->update.maximize = 0;
    m->update.skip = NULL;
}

static const tchi_part *parts_of(const tchi_list *list)
{
    return list->items;
}

/* --- gradients to the wire ---------------------------------------------------------------------------------------- */

/* Copies gradients of this rank's tensors, of one pair of types and one form of moments, to the wire or, if that is
 * NULL, directly to its tiles. Gradients that are filtered or decayed here are unscaled here too. */
static tch_status pack_gradients(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list,
                                 char *wire, tch_scalar type, tch_scalar grad, tch_moments moments)
{
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    move m = begin_move(o, now, group, type);
    m.update.moments = moments;
    tch_filter filter = TCH_FILTER_NONE;
    bool l2 = false;
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_param *p = param_of(o, part);
        const tchi_gradient *gradient = &now->gradients[p->index];
        if (gradient->data == NULL || p->type != type || gradient->type != grad || p->moments != moments) {
            continue;
        }
        if (p->filters) {
            filter = config->nesterov ? TCH_FILTER_NESTEROV : TCH_FILTER_EMA;
        }
        l2 = tchi_adds_decay(config) && !p->by_value;
        m.second = p->filters;
        m.update.block_type = p->wire_in;
        m.update.grad_type = grad;
        TCHI_TRY(add_part(&m, part, WITH_ALL, wire != NULL ? ON_WIRE : STAGED, wire, p->wire_in, 1.0));
    }
    if (filter == TCH_FILTER_NONE && !l2) {
        keep_raw(&m);
    }
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m),
                                                     &(tch_gathering){.filter = filter, .l2 = l2}, NULL);
}

static tch_status pack_all(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list, char *wire)
{
    const int forms = tchi_group_at(o, group)->config.memory.state_dtype == TCH_STATE_FLOAT32 ? 1 : 3;
    for (int type = 0; type <= TCH_SCALAR_BF16 && list->count > 0; type++) {
        for (int i = 0; i < (TCH_SCALAR_BF16 + 1) * forms; i++) {
            TCHI_TRY(pack_gradients(o, now, group, list, wire, (tch_scalar)type, (tch_scalar)(i / forms),
                                    (tch_moments)(i % forms)));
        }
    }
    return TCH_OK;
}

/* --- parts as they are -------------------------------------------------------------------------------------------- */

typedef struct copy {
    tch_optimizer *optimizer;
    const tchi_step *now; /* NULL: values, which are copied whether or not the step is skipped */
    int32_t group;
    const tchi_list *list;
    place from, to;
    char *wire;
} copy;

static bool receives_result(const tch_optimizer *o, const tchi_step *now, const tchi_param *p, tch_scalar type,
                            bool by_value)
{
    const tchi_block_method *blocks = o->method->blocks;
    bool waits = p->blocked && blocks->waits != NULL && blocks->waits(p);
    return now->gradients[p->index].data != NULL && p->type == type && p->by_value == by_value && !waits;
}

/* Applies directions of one type to this rank's shards. */
static tch_status apply_parts(tch_optimizer *o, const tchi_step *now, int32_t group, const tchi_list *list, char *wire,
                              tch_scalar type)
{
    const tchi_block_method *blocks = o->method->blocks;
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    move m = begin_move(o, now, group, type);
    for (int64_t i = 0; i < list->count; i++) {
        const tchi_part *part = &parts_of(list)[i];
        const tchi_tile *tile = tchi_shared_tile(o, part->tile);
        const tchi_param *p = param_of(o, part);
        if (!receives_result(o, now, p, type, false)) {
            continue;
        }
        double rows = (double)tile->size[0];
        double rest = (double)tchi_elements(tile->size + 1, p->dims.order - 1);
        double factor = blocks->step_factor == NULL ? 1.0 : blocks->step_factor(config, rows, rest);
        m.update.grad_type = now->gradients[p->index].type;
        m.update.block_type = p->wire_out;
        TCHI_TRY(add_part(&m, part, WITH_ALL, ON_WIRE, wire, p->wire_out, factor));
    }
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->apply(o->context->state, finish_move(&m), TCH_BLOCK_AS_IS, NULL, NULL, 0,
                                                    (tch_decay)config->weight_decay_type);
}

static bool is_copied(const copy *c, const tchi_param *p, tch_scalar type)
{
    if (c->from == IN_PARAM) {
        return p->by_value && p->type == type;
    }
    if (c->to == IN_PARAM) {
        return receives_result(c->optimizer, c->now, p, type, true);
    }
    return (c->now == NULL ? p->by_value : c->now->gradients[p->index].data != NULL) && p->type == type;
}

/* Copies parts of parameters of one type to or from another type on the wire. */
static tch_status copy_types(const copy *c, tch_scalar type, tch_scalar wire)
{
    tch_optimizer *o = c->optimizer;
    move m = begin_move(o, c->now, c->group, type);
    for (int64_t i = 0; i < c->list->count; i++) {
        const tchi_part *part = &parts_of(c->list)[i];
        const tchi_param *p = param_of(o, part);
        if ((c->to == STAGED ? p->wire_in : p->wire_out) != wire || !is_copied(c, p, type)) {
            continue;
        }
        TCHI_TRY(add_part(&m, part, c->from, c->to, c->wire, wire, 1.0));
    }
    m.update.grad_type = m.update.block_type = wire;
    keep_raw(&m);
    return o->shared->rects.count == 0
               ? TCH_OK
               : o->context->backend->update->gather(o->context->state, finish_move(&m), &(tch_gathering){0}, NULL);
}

static tch_status copy_parts(const copy *c)
{
    for (int type = 0; type <= TCH_SCALAR_BF16 && c->list->count > 0; type++) {
        for (int wire = 0; wire <= TCH_SCALAR_BF16; wire++) {
            TCHI_TRY(copy_types(c, (tch_scalar)type, (tch_scalar)wire));
        }
    }
    return TCH_OK;
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

/* The send buffer is complete after the work queued so far; the second stream waits for it and records an event when
 * done. */
static tch_status begin_side(tch_optimizer *o, void **stream)
{
    const tch_device_ops *d = o->context->backend->device;
    *stream = tchi_comm_stream(o->context);
    return d->side_begin != NULL ? d->side_begin(o->context->state, stream) : TCH_OK;
}

static tch_status end_side(tch_optimizer *o, tchi_wire *wire)
{
    const tch_device_ops *d = o->context->backend->device;
    return d->side_mark != NULL ? d->side_mark(o->context->state, &wire->done) : TCH_OK;
}

static tch_status wait_for(tch_optimizer *o, const tchi_wire *wire)
{
    const tch_device_ops *d = o->context->backend->device;
    return d->side_join != NULL ? d->side_join(o->context->state, wire->done) : TCH_OK;
}

/* Copies what stays on this rank. */
static tch_status keep_route(tch_optimizer *o, const tchi_route *route, const tchi_wire *wire)
{
    return o->context->backend->device->copy_bytes(o->context->state, wire->received, wire->sent, route->send_bytes,
                                                   TCH_COPY_DEVICE);
}

static tch_status send_route(tch_optimizer *o, const tchi_route *route, const char *sent, char *received, void *stream)
{
    int32_t ranks = tch_comm_size(o->shared->comm);
    tch_comm_counts counts = {
        tchi_route_counts(route, ranks, TCHI_SEND_OFFSETS), tchi_route_counts(route, ranks, TCHI_SEND_BYTES),
        tchi_route_counts(route, ranks, TCHI_RECEIVE_OFFSETS), tchi_route_counts(route, ranks, TCHI_RECEIVE_BYTES)};
    return tchi_comm_all_to_all(o->shared->comm, sent, received, &counts, stream);
}

/* Values of shards, by the way of results in reverse. Its buffers are free between steps. */
static tch_status fetch_values(tch_optimizer *o, int32_t group, const tchi_bucket *b, tchi_wire *wire)
{
    int32_t ranks = tch_comm_size(o->shared->comm);
    const tch_comm_counts back = {
        tchi_route_counts(&b->out, ranks, TCHI_RECEIVE_OFFSETS), tchi_route_counts(&b->out, ranks, TCHI_RECEIVE_BYTES),
        tchi_route_counts(&b->out, ranks, TCHI_SEND_OFFSETS), tchi_route_counts(&b->out, ranks, TCHI_SEND_BYTES)};
    copy sent = {o, NULL, group, &b->out.receive, IN_PARAM, ON_WIRE, wire->received};
    copy arrived = {o, NULL, group, &b->out.send, ON_WIRE, IN_TILE, wire->sent};
    void *stream;
    TCHI_TRY(copy_parts(&sent));
    TCHI_TRY(begin_side(o, &stream));
    TCHI_TRY(tchi_comm_all_to_all(o->shared->comm, wire->received, wire->sent, &back, stream));
    TCHI_TRY(end_side(o, wire));
    TCHI_TRY(wait_for(o, wire));
    return copy_parts(&arrived);
}

tch_status tchi_exchange_values(tch_optimizer *optimizer, int32_t group)
{
    tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    for (int64_t i = 0; i < x->buckets.count; i++) {
        const tchi_bucket *b = tchi_bucket_at(x, i);
        copy c = {optimizer, NULL, group, &b->local, IN_PARAM, IN_TILE, NULL};
        TCHI_TRY(copy_parts(&c));
        if (b->sharded && tchi_group_at(optimizer, group)->config.constant_norm) {
            TCHI_TRY(fetch_values(optimizer, group, b, &x->out[i % 2]));
        }
    }
    return TCH_OK;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Sends the next bucket's gradients. Its buffers are free: the second-last bucket has arrived. */
static tch_status call_in(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    const tchi_bucket *b = tchi_bucket_at(x, x->called_in);
    tchi_wire *wire = &x->in[x->called_in++ % 2];
    if (!b->sharded) { /* the same on all ranks, which share the plan */
        return TCH_OK;
    }
    void *stream;
    TCHI_TRY(pack_all(o, now, group, &b->in.send, wire->sent));
    TCHI_TRY(pack_all(o, now, group, &b->unsent, wire->sent + b->in.send_bytes));
    if (!b->crosses) {
        return keep_route(o, &b->in, wire);
    }
    TCHI_TRY(begin_side(o, &stream));
    TCHI_TRY(send_route(o, &b->in, wire->sent, wire->received, stream));
    return end_side(o, wire);
}

static tch_status take_in(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    const tchi_bucket *b = tchi_bucket_at(x, x->arrived);
    const tchi_wire *wire = &x->in[x->arrived++ % 2];
    copy c = {o, now, group, &b->in.receive, ON_WIRE, STAGED, wire->received};
    TCHI_TRY(pack_all(o, now, group, &b->local, NULL));
    if (b->sharded) {
        TCHI_TRY(b->crosses ? wait_for(o, wire) : TCH_OK);
        TCHI_TRY(copy_parts(&c));
    }
    return x->called_in < x->buckets.count ? call_in(o, now, group) : TCH_OK;
}

/* Applies the results of the oldest bucket in flight. */
static tch_status apply_next(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    const tchi_bucket *b = tchi_bucket_at(x, x->applied);
    const tchi_wire *wire = &x->out[x->applied++ % 2];
    TCHI_RANGE(o->context, "apply what came back");
    TCHI_TRY(wait_for(o, wire));
    char *gathered = wire->received + b->out.receive_bytes;
    copy values = {o, now, group, &b->spread, ON_WIRE, IN_PARAM, gathered};
    copy of_shards = {o, now, group, &b->out.receive, ON_WIRE, IN_PARAM, wire->received};
    TCHI_TRY(copy_parts(&values));
    TCHI_TRY(copy_parts(&of_shards));
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        TCHI_TRY(apply_parts(o, now, group, &b->out.receive, wire->received, (tch_scalar)type));
        TCHI_TRY(apply_parts(o, now, group, &b->spread, gathered, (tch_scalar)type));
    }
    return TCH_OK;
}

/* Sends the results of the next bucket's tiles. */
static tch_status send_out(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    const tchi_bucket *b = tchi_bucket_at(x, x->sent_out);
    tchi_wire *wire = &x->out[x->sent_out % 2];
    if (x->sent_out >= 2) {
        TCHI_TRY(apply_next(o, now, group));
    }
    x->sent_out++;
    void *stream;
    char *segment = wire->sent + b->out.send_bytes;
    char *more = segment + b->segment;
    copy results = {o, now, group, &b->out.send, IN_TILE, ON_WIRE, wire->sent};
    copy whole = {o, now, group, &b->spread_in, IN_TILE, ON_WIRE, segment};
    copy for_others = {o, now, group, &b->level.send, IN_TILE, ON_WIRE, more};
    TCHI_TRY(copy_parts(&results));
    TCHI_TRY(copy_parts(&whole));
    TCHI_TRY(copy_parts(&for_others));
    TCHI_TRY(b->sharded && !b->crosses ? keep_route(o, &b->out, wire) : TCH_OK);
    TCHI_TRY(begin_side(o, &stream));
    if (b->crosses) {
        TCHI_TRY(send_route(o, &b->out, wire->sent, wire->received, stream));
    }
    if (b->levels) {
        TCHI_TRY(send_route(o, &b->level, more, segment + b->own_bytes, stream));
    }
    if (b->segment > 0) {
        TCHI_TRY(
            tchi_comm_all_gather(o->shared->comm, segment, wire->received + b->out.receive_bytes, b->segment, stream));
    }
    return end_side(o, wire);
}

tch_status tchi_exchange_begin(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    if (x == NULL) {
        return TCH_OK;
    }
    const tch_device_ops *d = optimizer->context->backend->device;
    TCHI_RANGE(optimizer->context, "exchange gradients");
    x->called_in = x->arrived = x->sent_out = x->applied = 0;
    while (x->called_in < 2 && x->called_in < x->buckets.count) {
        TCHI_TRY(call_in(optimizer, now, group));
    }
    TCHI_TRY(d->zero_bytes(optimizer->context->state, x->tile_data, x->tile_data_bytes));
    return tchi_exchange_values(optimizer, group);
}

tch_status tchi_exchange_arrive(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t bucket)
{
    const tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    while (x != NULL && x->arrived < x->buckets.count && x->arrived <= bucket) {
        TCHI_TRY(take_in(optimizer, now, group));
    }
    return TCH_OK;
}

tch_status tchi_exchange_leave(tch_optimizer *optimizer, const tchi_step *now, int32_t group, int64_t done)
{
    const tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    while (x != NULL && x->sent_out < x->buckets.count && x->sent_out < done) {
        TCHI_TRY(send_out(optimizer, now, group));
    }
    return TCH_OK;
}

tch_status tchi_exchange_finish(tch_optimizer *optimizer, const tchi_step *now, int32_t group)
{
    const tchi_exchange *x = tchi_group_at(optimizer, group)->exchange;
    if (x == NULL) {
        return TCH_OK;
    }
    TCHI_RANGE(optimizer->context, "exchange results");
    TCHI_TRY(tchi_exchange_arrive(optimizer, now, group, TCHI_ALL_BUCKETS));
    TCHI_TRY(tchi_exchange_leave(optimizer, now, group, TCHI_ALL_BUCKETS));
    while (x->applied < x->buckets.count) {
        TCHI_TRY(apply_next(optimizer, now, group));
    }
    return TCH_OK;
}

void tchi_exchange_close(tch_optimizer *optimizer, tchi_exchange *exchange)
{
    const tch_device_ops *d = optimizer->context->backend->device;
    for (int i = 0; exchange != NULL && d->event_destroy != NULL && i < 2; i++) {
        d->event_destroy(optimizer->context->state, exchange->in[i].done);
        d->event_destroy(optimizer->context->state, exchange->out[i].done);
    }
    tchi_exchange_release(exchange);
}

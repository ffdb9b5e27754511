/* Plans tiles and their owners: a pure integer function of names, shapes, types, options, placements and the number of
 * ranks, so every rank computes the same plan without communication. */
#include <stdlib.h>
#include <string.h>

#include "core/allocator.h"
#include "core/status.h"

#include "optim/config.h"
#include "optim/create.h"
#include "optim/method.h"
#include "optim/saved_state.h"
#include "optim/shape.h"
#include "shared.h"

#define SPAN (INT64_C(1) << 18) /* elements per tile of an elementwise parameter */

/* --- tiles ------------------------------------------------------------------------------------------------------- */

tchi_cut tchi_shared_cut(const tch_optimizer *optimizer, const tchi_param *param)
{
    return tchi_cut_of(param, param->blocked ? tchi_layout_cut_at(optimizer, param->group) : SPAN);
}

static tch_status add_tiles(tch_optimizer *o, int32_t index)
{
    tchi_cut cut = tchi_shared_cut(o, tchi_param_at(o, index));
    TCHI_TRY(tchi_list_reserve(&o->shared->tiles, o->shared->tiles.count + cut.blocks));
    for (int64_t number = 0; number < cut.blocks; number++) {
        tchi_tile *tile = tchi_list_extend(&o->shared->tiles);
        *tile = (tchi_tile){.param = index, .number = (int32_t)number, .local = -1};
        tchi_cut_block(&cut, number, tile->start, tile->size);
    }
    return TCH_OK;
}

/* Multiply-adds of a refresh and a step, in millions. */
static int64_t cost_of(const tch_optimizer *o, const tchi_tile *tile)
{
    const tchi_param *p = tchi_param_at(o, tile->param);
    const tchi_block_method *blocks = o->method->blocks;
    const tch_optim_config *config = &tchi_group_at(o, p->group)->config;
    if (!p->blocked) {
        return tile->size[0] / 1024 + 1;
    }
    int64_t elements = 1;
    int64_t cost = 0;
    int64_t least = INT64_MAX;
    for (int32_t k = 0; k < p->dims.order; k++) {
        elements *= tile->size[k];
        least = tile->size[k] < least ? tile->size[k] : least;
    }
    for (int32_t k = 0; k < p->dims.order; k++) {
        int64_t n = tile->size[k];
        if (blocks->has_factor != NULL && blocks->has_factor(config, p->dims.order, tile->size, k)) {
            cost += (n * n / 1024) * n * 16 / 1024 + (elements / 1024) * n * 2 / 1024;
        }
    }
    return cost + (elements / 1024) * least * 4 / 1024 + elements / 1024 + 1;
}

/* --- owners ------------------------------------------------------------------------------------------------------ */

typedef struct candidate {
    int64_t cost;
    int64_t tile;
} candidate;

/* Decreasing cost, then tile order: tiles of equal sizes are adjacent, as in a batch. */
static int by_cost(const void *a, const void *b)
{
    const candidate *x = a;
    const candidate *y = b;
    return x->cost != y->cost ? (x->cost < y->cost) - (x->cost > y->cost) : (x->tile > y->tile) - (x->tile < y->tile);
}

typedef struct planner {
    tch_optimizer *optimizer;
    const tchi_regions *regions; /* of the group's parameters */
    int32_t first_param, ranks, leaves;
    int64_t *load, *held;       /* one per rank */
    int32_t *used, *assigned;   /* per rank: tiles of the window, and of this cost */
    int32_t of_window, of_cost; /* their limits */
    int32_t *holding, holders;  /* ranks that hold some of the tile */
    int64_t elements;           /* of the tile */
    int32_t *least; /* tournament tree over ranks: [1] is the least loaded that may get another tile, or -1 */
} planner;

static void hold(planner *p, int32_t rank, int64_t count)
{
    if (p->held[rank] == 0) {
        p->holding[p->holders++] = rank;
    }
    p->held[rank] += count;
}

static void count_held(planner *p, const tchi_tile *tile)
{
    const tchi_regions *r = &p->regions[tile->param - p->first_param];
    while (p->holders > 0) {
        p->held[p->holding[--p->holders]] = 0;
    }
    p->elements = tchi_elements(tile->size, r->order);
    for (tchi_meeting m = tchi_meetings_of(r, tile->start, tile->size); tchi_next_meeting(&m);) {
        for (int32_t h = 0; h < m.region->holders; h++) {
            hold(p, tchi_region_holders(r, m.region)[h], tchi_elements(m.extent, r->order));
        }
    }
}

static bool may_have(const planner *p, int32_t rank, int32_t of_cost)
{
    return p->used[rank] < p->of_window && p->assigned[rank] < of_cost;
}

/* Returns the less loaded rank, or the lower one. */
static int32_t lighter(const planner *p, int32_t a, int32_t b)
{
    if (a < 0 || b < 0) {
        return a < 0 ? b : a;
    }
    return p->load[a] < p->load[b] || (p->load[a] == p->load[b] && a < b) ? a : b;
}

static void seat(planner *p, int32_t rank)
{
    p->least[p->leaves + rank] = may_have(p, rank, p->of_cost) ? rank : -1;
}

static void open_window(planner *p)
{
    memset(p->used, 0, (size_t)p->ranks * sizeof *p->used);
    memset(p->least, 0xFF, 2 * (size_t)p->leaves * sizeof *p->least);
    for (int32_t r = 0; r < p->ranks; r++) {
        seat(p, r);
    }
    for (int32_t i = p->leaves - 1; i > 0; i--) {
        p->least[i] = lighter(p, p->least[2 * i], p->least[2 * i + 1]);
    }
}

static void assign_tile(planner *p, tchi_tile *tile, int32_t rank, int64_t cost)
{
    tile->owner = rank;
    p->used[rank]++;
    p->assigned[rank]++;
    p->load[rank] += cost;
    seat(p, rank);
    for (int32_t i = (p->leaves + rank) / 2; i > 0; i /= 2) {
        p->least[i] = lighter(p, p->least[2 * i], p->least[2 * i + 1]);
    }
}

/* Of the ranks that hold at least a quarter of the tile: the one that holds most, then the less loaded. If all hold
 * less, locality saves little traffic and costs more through unequal numbers of refreshes per step. */
static int32_t choose_holder(const planner *p, int32_t of_cost)
{
    int32_t best = -1;
    for (int32_t i = 0; i < p->holders; i++) {
        int32_t r = p->holding[i];
        if (may_have(p, r, of_cost) && 4 * p->held[r] >= p->elements && (best < 0 || p->held[r] >= p->held[best])) {
            best = best < 0 || p->held[r] > p->held[best] ? r : lighter(p, best, r);
        }
    }
    return best;
}

/* Of the ranks that hold the whole tile, such as an expert, which must not travel: one within the limits if there is
 * one, the less loaded; -1 if none holds it. */
static int32_t choose_whole(const planner *p)
{
    int32_t best = -1;
    int most = -1;
    for (int32_t i = 0; i < p->holders; i++) {
        int32_t r = p->holding[i];
        int within = may_have(p, r, p->of_cost) + may_have(p, r, INT32_MAX);
        if (p->held[r] == p->elements && within >= most) {
            best = within > most ? r : lighter(p, best, r);
            most = within;
        }
    }
    return best;
}

/* Prefers a rank that holds the whole tile, then, within the limits of the window and of this cost, one that holds most
 * of it, then the least loaded; if there is none, within that of the window. */
static int32_t choose_owner(const planner *p)
{
    int32_t best = choose_whole(p);
    best = best < 0 ? choose_holder(p, p->of_cost) : best;
    best = best < 0 ? p->least[1] : best;
    best = best < 0 ? choose_holder(p, INT32_MAX) : best;
    for (int32_t r = 0, none = best < 0; none && r < p->ranks; r++) {
        best = may_have(p, r, INT32_MAX) ? lighter(p, best, r) : best;
    }
    return best;
}

/* Tiles of equal cost that are refreshed in the same step of an interval are adjacent, so each rank gets its share of
 * every window of that length. */
static void assign(planner *p, const candidate *list, int64_t count)
{
    const tch_optimizer *o = p->optimizer;
    int64_t period = 1;
    if (o->method->blocks != NULL && o->method->blocks->has_factor != NULL) {
        period = tchi_group_at(o, tchi_param_at(o, p->first_param)->group)->config.shampoo.precondition_frequency;
    }
    for (int64_t first = 0; first < count;) {
        int64_t end = first;
        while (end < count && list[end].cost == list[first].cost) {
            end++;
        }
        int64_t window = (end - first + period - 1) / period;
        p->of_cost = (int32_t)((end - first + p->ranks - 1) / p->ranks);
        memset(p->assigned, 0, (size_t)p->ranks * sizeof *p->assigned);
        for (; first < end; first += window) {
            int64_t n = end - first < window ? end - first : window;
            p->of_window = (int32_t)((n + p->ranks - 1) / p->ranks);
            open_window(p);
            for (int64_t i = first; i < first + n; i++) {
                tchi_tile *tile = tchi_shared_tile(o, list[i].tile);
                count_held(p, tile);
                assign_tile(p, tile, choose_owner(p), list[i].cost);
            }
        }
        first = end;
    }
}

static tch_status choose_owners(tch_optimizer *o, int32_t group, const tchi_regions *regions, int64_t first,
                                int64_t count)
{
    planner p = {.optimizer = o,
                 .regions = regions,
                 .first_param = tchi_group_at(o, group)->first_param,
                 .ranks = tch_comm_size(o->shared->comm)};
    for (p.leaves = 1; p.leaves < p.ranks;) {
        p.leaves *= 2;
    }
    size_t list_bytes = (size_t)count * sizeof(candidate);
    size_t rank_bytes =
        (size_t)p.ranks * (2 * sizeof(int64_t) + 3 * sizeof(int32_t)) + 2 * (size_t)p.leaves * sizeof(int32_t);
    candidate *list;
    TCHI_TRY(tchi_host_take(list_bytes, "a plan of tiles", &list));
    tch_status status = tchi_host_take(rank_bytes, "a plan of tiles", &p.load);
    if (status == TCH_OK && count > 0) {
        p.held = p.load + p.ranks;
        p.used = (int32_t *)(p.held + p.ranks);
        p.assigned = p.used + p.ranks;
        p.holding = p.assigned + p.ranks;
        p.least = p.holding + p.ranks;
        for (int64_t i = 0; i < count; i++) {
            list[i] = (candidate){cost_of(o, tchi_shared_tile(o, first + i)), first + i};
        }
        qsort(list, (size_t)count, sizeof *list, by_cost);
        assign(&p, list, count);
    }
    tchi_host_release(p.load, status == TCH_OK ? rank_bytes : 0);
    tchi_host_release(list, list_bytes);
    return status;
}

/* --- this rank's tiles ------------------------------------------------------------------------------------------- */

static void fill_tile(const tch_optimizer *o, const tchi_tile *tile, tchi_param *t)
{
    const tchi_param *p = tchi_param_at(o, tile->param);
    *t = (tchi_param){.name = p->name,
                      .group = p->group,
                      .index = tile->param,
                      .tile = tile->number,
                      .blocked = p->blocked,
                      .by_value = p->by_value,
                      .type = p->wire_out,
                      .real = p->real,
                      .wire_in = p->wire_in,
                      .ndim = p->dims.order,
                      .count = 1,
                      .whole = p->whole,
                      .dims = {.order = p->dims.order}};
    for (int32_t k = 0; k < TCHI_MOST_ORDER && k < p->dims.order; k++) {
        t->shape[k] = t->dims.size[k] = tile->size[k];
        t->cut |= (uint32_t)(tile->size[k] != p->dims.size[k]) << k;
        t->count *= tile->size[k];
        t->base = t->base * p->dims.size[k] + tile->start[k];
    }
    int64_t stride = t->count;
    for (int32_t k = 0; k < TCHI_MOST_ORDER && k < p->dims.order; k++) {
        stride /= tile->size[k];
        t->strides[k] = stride;
    }
}

static tch_status take_own(tch_optimizer *o, int64_t first, int64_t count)
{
    for (int64_t i = first; i < first + count; i++) {
        tchi_tile *tile = tchi_shared_tile(o, i);
        if (tile->owner == tch_comm_rank(o->shared->comm)) {
            TCHI_TRY(tchi_list_reserve(&o->tiles, o->tiles.count + 1));
            tile->local = (int32_t)o->tiles.count;
            fill_tile(o, tile, tchi_list_extend(&o->tiles));
        }
    }
    return TCH_OK;
}

tch_status tchi_shared_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions)
{
    tchi_group *g = tchi_group_at(optimizer, group);
    int64_t first = optimizer->shared->tiles.count;
    for (int32_t i = 0; i < g->params; i++) {
        if (tchi_param_at(optimizer, g->first_param + i)->carried) {
            TCHI_TRY(add_tiles(optimizer, g->first_param + i));
        }
    }
    int64_t count = optimizer->shared->tiles.count - first;
    TCHI_TRY(choose_owners(optimizer, group, regions, first, count));
    TCHI_TRY(take_own(optimizer, first, count));
    if (count == 0) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_host_take(sizeof *g->exchange, "an exchange", &g->exchange));
    g->exchange->first_tile = first;
    g->exchange->tiles = count;
    return TCH_OK;
}

/* --- comparing plans --------------------------------------------------------------------------------------------- */

#define PLAN_VERSION 3

static uint64_t mix_param(uint64_t hash, const tchi_param *p, const tchi_regions *r)
{
    hash = tchi_hash(hash, p->name, strlen(p->name));
    hash = tchi_hash_number(hash, p->type);
    hash = tchi_hash_number(hash, p->carried + 2 * p->blocked);
    for (int32_t k = 0; p->carried && k < p->dims.order; k++) {
        hash = tchi_hash_number(hash, p->dims.size[k]);
    }
    hash = p->cuts == NULL ? hash : tchi_hash(hash, p->cuts, (size_t)p->cut_count * sizeof *p->cuts);
    for (int64_t i = 0; i < r->list.count; i++) {
        const tchi_region *region = tchi_region_at(r, i);
        hash = tchi_hash(hash, region->start, sizeof region->start);
        hash = tchi_hash(hash, region->size, sizeof region->size);
        hash = tchi_hash_number(hash, region->holders);
    }
    return tchi_hash(hash, r->holders.items, (size_t)r->holders.count * sizeof(int32_t));
}

uint64_t tchi_shared_hash(const tch_optimizer *optimizer, int32_t group, const tchi_regions *regions)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    uint64_t hash = tchi_hash_number(TCHI_HASH_BEGIN, PLAN_VERSION);
    hash = tchi_hash_number(hash, tch_comm_size(optimizer->shared->comm));
    hash = tchi_hash_number(hash, tchi_comm_bucket_bytes(optimizer->shared->comm));
    hash = tchi_hash(hash, optimizer->method->name, strlen(optimizer->method->name));
    for (int32_t i = 0; i < tchi_optim_options.count; i++) {
        double value = tchi_option_value(&tchi_optim_options.rows[i], &g->config);
        hash = tchi_hash(hash, &value, sizeof value);
    }
    for (int32_t i = 0; i < g->params; i++) {
        hash = mix_param(hash, tchi_param_at(optimizer, g->first_param + i), &regions[i]);
    }
    return hash;
}

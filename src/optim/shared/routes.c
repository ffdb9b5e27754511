/* Plans the transfers between ranks: rectangles, their buckets, and their offsets in the buffers. A rank's plan follows
 * from tiles, owners and regions, which are equal on all ranks. */
#include <string.h>

#include "core/allocator.h"
#include "core/arith.h"
#include "core/status.h"

#include "shared.h"

enum { ALIGN = 16 }; /* parts are padded to this many bytes */

static int64_t padded(int64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* --- buckets ----------------------------------------------------------------------------------------------------- */

enum { MOST_BUCKETS = 8 };

static int64_t bytes_of(const tch_optimizer *o, const tchi_tile *tile)
{
    const tchi_param *p = tchi_param_at(o, tile->param);
    return tchi_elements(tile->size, p->dims.order) * tchi_scalar_size(p->wire_out);
}

/* Begins a new bucket if the current one is full. Buckets are as few as are worth a collective each, so that one is in
 * flight while the next is computed, with at most two in memory. */
static tch_status fill_bucket(tchi_exchange *x, int32_t end_batch, int64_t end_index, int64_t bytes, int64_t full,
                              int64_t *filled)
{
    if (x->buckets.count == 0 || *filled >= full) {
        TCHI_TRY(tchi_list_reserve(&x->buckets, x->buckets.count + 1));
        memset(tchi_list_extend(&x->buckets), 0, sizeof(tchi_bucket));
        *filled = 0;
    }
    tchi_bucket *last = tchi_bucket_at(x, x->buckets.count - 1);
    last->end_batch = end_batch;
    last->end_index = end_index;
    *filled += bytes;
    return TCH_OK;
}

static bool is_block(const tch_optimizer *o, const tchi_tile *tile)
{
    return tchi_param_at(o, tile->param)->blocked;
}

/* Divides the tiles of a block batch into as many parts as are worth a bucket. Ownership is mostly round robin, so
 * parts of at least two whole rounds balance the ranks; the last part has the rest. */
static tch_status cut_batch(const tch_optimizer *o, tchi_exchange *x, int32_t block_batch, int64_t bytes, int64_t full,
                            int64_t *filled)
{
    int64_t all = tchi_block_batch_at(o, block_batch)->all;
    int64_t ranks = tch_comm_size(o->shared->comm);
    int64_t rounds = all / ranks;
    int64_t filled_by_it = full > 0 ? bytes / full : 1;
    int64_t parts = filled_by_it < rounds / 2 ? filled_by_it : rounds / 2;
    parts = parts > 1 ? parts : 1;
    for (int64_t i = 0, begin = 0; i < parts; i++) { /* longer parts first: these fill a bucket */
        int64_t end = i + 1 < parts ? (rounds * (i + 1) + parts - 1) / parts * ranks : all;
        TCHI_TRY(
            fill_bucket(x, block_batch, i + 1 < parts ? end : INT64_MAX, bytes / all * (end - begin), full, filled));
        begin = end;
    }
    return TCH_OK;
}

/* The bucket of a tile by its global index in the block batch. */
static int32_t find_bucket(const tchi_exchange *x, int32_t block_batch, int64_t global_index)
{
    int32_t i = 0;
    for (const tchi_bucket *b = tchi_bucket_at(x, 0);
         b->end_batch < block_batch || (b->end_batch == block_batch && b->end_index <= global_index); b++) {
        i++;
    }
    return i;
}

/* `filled` has one number per block batch: first its bytes, then its tiles seen. */
static tch_status fill_with_batches(const tch_optimizer *o, const tchi_group *g, int64_t full, int64_t *filled,
                                    int64_t *of_batch)
{
    tchi_exchange *x = g->exchange;
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        const tchi_tile *tile = tchi_shared_tile(o, i);
        if (is_block(o, tile)) {
            of_batch[tile->block_batch - g->first_block_batch] += bytes_of(o, tile);
        }
    }
    for (int32_t b = 0; b < g->block_batches; b++) {
        TCHI_TRY(cut_batch(o, x, g->first_block_batch + b, of_batch[b], full, filled));
        of_batch[b] = 0;
    }
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        tchi_tile *tile = tchi_shared_tile(o, i);
        if (is_block(o, tile)) {
            tile->bucket = find_bucket(x, tile->block_batch, of_batch[tile->block_batch - g->first_block_batch]++);
        }
    }
    return TCH_OK;
}

static tch_status fill_with_blocks(const tch_optimizer *o, const tchi_group *g, int64_t full, int64_t *filled)
{
    int64_t *of_batch;
    size_t bytes = (size_t)g->block_batches * sizeof *of_batch;
    TCHI_TRY(tchi_host_take(bytes, "the buckets of an exchange", &of_batch));
    tch_status status = fill_with_batches(o, g, full, filled, of_batch);
    tchi_host_release(of_batch, bytes);
    return status;
}

static tch_status fill_with_spans(const tch_optimizer *o, const tchi_group *g, int64_t full, int64_t *filled)
{
    tchi_exchange *x = g->exchange;
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        tchi_tile *tile = tchi_shared_tile(o, i);
        if (!is_block(o, tile)) {
            TCHI_TRY(fill_bucket(x, INT32_MAX, INT64_MAX, bytes_of(o, tile), full, filled));
            tile->bucket = (int32_t)x->buckets.count - 1;
        }
    }
    return TCH_OK;
}

static tch_status make_buckets(tch_optimizer *o, const tchi_group *g)
{
    const tchi_exchange *x = g->exchange;
    int64_t total = 0;
    int64_t filled = 0;
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        total += bytes_of(o, tchi_shared_tile(o, i));
    }
    int64_t least = tchi_comm_bucket_bytes(o->shared->comm);
    int64_t full = total / MOST_BUCKETS > least ? total / MOST_BUCKETS : least;
    TCHI_TRY(fill_with_blocks(o, g, full, &filled));
    return fill_with_spans(o, g, full, &filled);
}

/* --- parts ------------------------------------------------------------------------------------------------------- */

typedef struct route_planner {
    tch_optimizer *optimizer;
    tchi_exchange *exchange;
    int32_t rank, ranks;
    bool fill; /* false: only count bytes */
    /* of the parameter being traversed */
    const tchi_regions *regions;
    int64_t first_here, end_here; /* the range of regions on this rank */
    int32_t *replica;             /* per rank: which replica, i.e. which holder of its first region, or -1 */
} route_planner;

static bool is_whole(const tchi_regions *regions)
{
    return regions->list.count > 0 && tchi_region_at(regions, 0)->holders < 0;
}

static void look_at(route_planner *r, const tchi_regions *regions)
{
    r->regions = regions;
    r->first_here = r->end_here = 0;
    memset(r->replica, 0xFF, (size_t)r->ranks * sizeof *r->replica);
    for (int64_t i = 0; i < regions->list.count; i++) {
        const tchi_region *region = tchi_region_at(regions, i);
        const int32_t *holders = tchi_region_holders(regions, region);
        for (int32_t h = 0; h < region->holders; h++) {
            r->replica[holders[h]] = r->replica[holders[h]] < 0 ? h : r->replica[holders[h]];
        }
        if (region->here) {
            r->first_here = r->end_here == 0 ? i : r->first_here;
            r->end_here = i + 1;
        }
    }
}

static tchi_bucket *bucket_of(const route_planner *r, int64_t tile)
{
    return tchi_bucket_at(r->exchange, tchi_shared_tile(r->optimizer, tile)->bucket);
}

/* Counts the bytes of a part to or from a peer; the second pass also lists the part with its offset. */
static tch_status add_part(const route_planner *r, tchi_route *route, bool sends, tchi_part part, int64_t bytes)
{
    int64_t *used = tchi_route_counts(route, r->ranks, sends ? TCHI_SEND_BYTES : TCHI_RECEIVE_BYTES) + part.peer;
    if (r->fill) {
        part.wire =
            tchi_route_counts(route, r->ranks, sends ? TCHI_SEND_OFFSETS : TCHI_RECEIVE_OFFSETS)[part.peer] + *used;
        TCHI_TRY(tchi_list_add(sends ? &route->send : &route->receive, &part));
    }
    *used += bytes;
    return TCH_OK;
}

/* The rank that sends a region of a tile: its owner if it holds it, otherwise the holder of the same replica. */
static int32_t source_of(const route_planner *r, const tchi_region *region, int32_t owner)
{
    const int32_t *holders = tchi_region_holders(r->regions, region);
    for (int32_t h = 0; h < region->holders; h++) {
        if (holders[h] == owner) {
            return owner;
        }
    }
    int32_t replica = r->replica[owner] < 0 ? owner : r->replica[owner];
    return holders[region->holders > 0 ? replica % region->holders : 0];
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

static tch_status plan_sharded(const route_planner *r, int64_t number, const tchi_region *region, tchi_part part)
{
    const tchi_regions *regions = r->regions;
    const tchi_tile *tile = tchi_shared_tile(r->optimizer, number);
    const tchi_param *p = tchi_param_at(r->optimizer, tile->param);
    const int32_t *holders = tchi_region_holders(regions, region);
    int64_t count = tchi_elements(part.size, regions->order);
    int64_t in = padded(count * tchi_scalar_size(p->wire_in));
    int64_t out = padded(count * tchi_scalar_size(p->wire_out));
    int32_t source = source_of(r, region, tile->owner);
    bool mine = tile->owner == r->rank;
    tchi_bucket *bucket = bucket_of(r, number);
    if (source == r->rank) {
        part.peer = tile->owner;
        TCHI_TRY(add_part(r, &bucket->in, true, part, in));
    }
    if (mine) {
        part.peer = source;
        TCHI_TRY(add_part(r, &bucket->in, false, part, in));
    }
    for (int32_t h = 0; h < region->holders && p->filters; h++) {
        if (holders[h] == r->rank && source != r->rank) {
            part.wire = bucket->unsent_bytes;
            bucket->unsent_bytes += in;
            TCHI_TRY(r->fill ? tchi_list_add(&bucket->unsent, &part) : TCH_OK);
        }
    }
    for (int32_t h = 0; h < region->holders; h++) {
        if (mine) {
            part.peer = holders[h];
            TCHI_TRY(add_part(r, &bucket->out, true, part, out));
        }
        if (holders[h] == r->rank) {
            part.peer = tile->owner;
            TCHI_TRY(add_part(r, &bucket->out, false, part, out));
        }
    }
    return TCH_OK;
}

/* The elements of a tile within one segment. `spread` lists them for all ranks; `local`, on the rank that packs them,
 * at an offset of `apart` bytes. */
typedef struct scrap {
    tchi_list *spread, *local;
    int64_t apart;
    int32_t order;
    int64_t element; /* bytes */
} scrap;

/* Indices [first, first + count) along dimension k of a part that spans its tile in the later dimensions. */
static tchi_part slice_of(const scrap *s, tchi_part part, int32_t k, int64_t first, int64_t count)
{
    int64_t row = tchi_elements(part.size + k + 1, s->order - k - 1);
    part.at += first * part.stride[k];
    part.in_tile += first * row;
    part.wire += first * row * s->element;
    part.size[k] = count;
    return part;
}

/* Divides elements [first, end) of a part into rectangles: the end of a row, whole rows, the beginning of a row;
 * recursively for more dimensions. */
static tch_status cut_scrap(const scrap *s, tchi_part part, int64_t first, int64_t end)
{
    int32_t k = 0;
    while (k + 1 < s->order && part.size[k] == 1) {
        k++;
    }
    int64_t row = tchi_elements(part.size + k + 1, s->order - k - 1);
    int64_t whole = (first + row - 1) / row;
    if (whole > end / row) { /* within one row */
        return cut_scrap(s, slice_of(s, part, k, first / row, 1), first % row, end - first / row * row);
    }
    if (first % row > 0) {
        TCHI_TRY(cut_scrap(s, slice_of(s, part, k, first / row, 1), first % row, row));
    }
    if (whole < end / row) {
        tchi_part rows = slice_of(s, part, k, whole, end / row - whole);
        TCHI_TRY(tchi_list_add(s->spread, &rows));
        rows.wire += s->apart;
        TCHI_TRY(s->local == NULL ? TCH_OK : tchi_list_add(s->local, &rows));
    }
    return end % row == 0 ? TCH_OK : cut_scrap(s, slice_of(s, part, k, end / row, 1), 0, end % row);
}

/* Distributes a tile's results, bytes [begin, end) of its owner's, over the owner's shares. */
static tch_status add_scraps(const route_planner *r, tchi_bucket *b, const tchi_param *p, tchi_part part, int64_t begin,
                             int64_t end)
{
    const tchi_share *shares = b->shares.items;
    bool mine = part.peer == r->rank;
    int64_t last = part.peer + 1 < r->ranks ? b->first_share[part.peer + 1] : b->shares.count;
    scrap s = {.spread = &b->spread, .order = p->dims.order, .element = tchi_scalar_size(p->wire_out)};
    int64_t elements = tchi_elements(part.size, s.order);
    for (int64_t i = b->first_share[part.peer]; i < last; i++) {
        int64_t from = begin > shares[i].from ? begin : shares[i].from;
        int64_t until = end < shares[i].from + shares[i].bytes ? end : shares[i].from + shares[i].bytes;
        int64_t stop = (until - begin) / s.element;
        stop = stop < elements ? stop : elements;
        if (from >= until || (from - begin) / s.element >= stop) {
            continue;
        }
        int64_t in_segment = shares[i].at + begin - shares[i].from; /* offset of the tile's start */
        bool kept = shares[i].segment == part.peer;
        part.wire = shares[i].segment * b->segment + in_segment;
        s.local = !mine ? NULL : kept ? &b->spread_in : &b->level.send;
        s.apart = (kept ? in_segment : begin - b->segment) - part.wire;
        TCHI_TRY(cut_scrap(&s, part, (from - begin) / s.element, stop));
    }
    return TCH_OK;
}

static tch_status plan_whole(const route_planner *r, int64_t number, int32_t order, tchi_part part)
{
    const tchi_tile *tile = tchi_shared_tile(r->optimizer, number);
    const tchi_param *p = tchi_param_at(r->optimizer, tile->param);
    tchi_bucket *bucket = bucket_of(r, number);
    int64_t *used = &bucket->gathered[tile->owner];
    int64_t begin = *used;
    part.peer = tile->owner;
    *used += padded(tchi_elements(part.size, order) * tchi_scalar_size(p->wire_out));
    if (!r->fill) {
        return TCH_OK;
    }
    if (tile->owner == r->rank && p->blocked) { /* spans are updated in place */
        TCHI_TRY(tchi_list_add(&bucket->local, &part));
    }
    return add_scraps(r, bucket, p, part, begin, *used);
}

/* Adds a tile of another rank: only the regions on this rank are exchanged. */
static tch_status walk_regions(const route_planner *r, int64_t number)
{
    const tchi_tile *tile = tchi_shared_tile(r->optimizer, number);
    const tchi_regions *of = r->regions;
    bool all = is_whole(of) || tile->owner == r->rank;
    tchi_meeting m = tchi_meetings_of(of, tile->start, tile->size);
    m.next = all ? m.next : tchi_max(m.next, r->first_here);
    m.end = all ? m.end : tchi_min(m.end, r->end_here);
    while (tchi_next_meeting(&m)) {
        if (all || m.region->here) {
            tchi_part part = part_of(tile, number, of->order, m.region, m.from, m.extent);
            TCHI_TRY(m.region->holders < 0 ? plan_whole(r, number, of->order, part)
                                           : plan_sharded(r, number, m.region, part));
        }
    }
    return TCH_OK;
}

/* Whether any rank but the owner holds some of a tile; the same on all ranks. A group of one rank, used by tests, takes
 * the same path as larger ones. */
static bool tile_crosses(const route_planner *r, const tchi_tile *tile)
{
    const tchi_regions *of = r->regions;
    bool crosses = r->ranks == 1;
    for (tchi_meeting m = tchi_meetings_of(of, tile->start, tile->size); !crosses && tchi_next_meeting(&m);) {
        crosses = m.region->holders != 1 || tchi_region_holders(of, m.region)[0] != tile->owner;
    }
    return crosses;
}

static tch_status walk_tiles(route_planner *r, int32_t first_param, const tchi_regions *regions)
{
    const tchi_exchange *x = r->exchange;
    for (int64_t i = x->first_tile; i < x->first_tile + x->tiles; i++) {
        const tchi_regions *of = &regions[tchi_shared_tile(r->optimizer, i)->param - first_param];
        if (of != r->regions) {
            look_at(r, of);
        }
        tchi_bucket *bucket = bucket_of(r, i);
        bucket->sharded = bucket->sharded || !is_whole(of);
        bucket->crosses = bucket->crosses || (!is_whole(of) && tile_crosses(r, tchi_shared_tile(r->optimizer, i)));
        TCHI_TRY(walk_regions(r, i));
    }
    return TCH_OK;
}

/* Turns byte counts into offsets and resets the counts for the second pass. */
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
    route->send_bytes = lay_out(tchi_route_counts(route, ranks, TCHI_SEND_OFFSETS),
                                tchi_route_counts(route, ranks, TCHI_SEND_BYTES), ranks);
    route->receive_bytes = lay_out(tchi_route_counts(route, ranks, TCHI_RECEIVE_OFFSETS),
                                   tchi_route_counts(route, ranks, TCHI_RECEIVE_BYTES), ranks);
}

static tch_status open_bucket(tchi_bucket *b, int32_t ranks)
{
    tchi_list *const lists[] = {&b->in.send, &b->in.receive, &b->out.send, &b->out.receive, &b->local,
                                &b->unsent,  &b->spread_in,  &b->spread,   &b->level.send};
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        lists[i]->item_size = sizeof(tchi_part);
    }
    b->shares.item_size = sizeof(tchi_share);
    b->host_bytes = 14 * (int64_t)ranks * (int64_t)sizeof(int64_t);
    TCHI_TRY(tchi_host_take((size_t)b->host_bytes, "the counts of an exchange", &b->in.counts));
    b->out.counts = b->in.counts + 4 * (int64_t)ranks;
    b->level.counts = b->out.counts + 4 * (int64_t)ranks;
    b->gathered = b->level.counts + 4 * (int64_t)ranks;
    b->first_share = b->gathered + ranks;
    return TCH_OK;
}

/* --- segments ---------------------------------------------------------------------------------------------------- */

/* Assigns what does not fit into an owner's segment to the first segments with room. `to` is the current one and
 * `filled` its additional bytes. */
static tch_status share_results(tchi_bucket *b, int32_t owner, int32_t *to, int64_t *filled)
{
    int64_t own = b->gathered[owner] < b->segment ? b->gathered[owner] : b->segment;
    tchi_share share = {.segment = owner, .bytes = own};
    b->first_share[owner] = b->shares.count;
    TCHI_TRY(tchi_list_add(&b->shares, &share));
    for (share.from = own; share.from < b->gathered[owner]; share.from += share.bytes) {
        while (b->gathered[*to] + *filled >= b->segment) {
            ++*to;
            *filled = 0;
        }
        int64_t left = b->gathered[owner] - share.from;
        share.segment = *to;
        share.at = b->gathered[*to] + *filled;
        share.bytes = left < b->segment - share.at ? left : b->segment - share.at;
        *filled += share.bytes;
        TCHI_TRY(tchi_list_add(&b->shares, &share));
    }
    return TCH_OK;
}

/* Routes a share to another rank's segment. */
static void route_share(tchi_bucket *b, const tchi_share *share, int32_t owner, int32_t rank, int32_t ranks)
{
    if (share->segment != owner && owner == rank) {
        tchi_route_counts(&b->level, ranks, TCHI_SEND_OFFSETS)[share->segment] = share->from - b->segment;
        tchi_route_counts(&b->level, ranks, TCHI_SEND_BYTES)[share->segment] = share->bytes;
        b->level.send_bytes += share->bytes;
    }
    if (share->segment != owner && share->segment == rank) {
        tchi_route_counts(&b->level, ranks, TCHI_RECEIVE_OFFSETS)[owner] = share->at - b->own_bytes;
        tchi_route_counts(&b->level, ranks, TCHI_RECEIVE_BYTES)[owner] = share->bytes;
    }
}

enum { UNEVEN = 32 }; /* a segment may exceed the mean by 1/32 */

/* all_gather needs equal segments. If the longest is much longer than the mean, the excess is first sent to other
 * ranks; that is little traffic compared with the gather. */
static tch_status lay_out_segments(tchi_bucket *b, int32_t rank, int32_t ranks)
{
    int64_t total = 0;
    int64_t longest = 0;
    int32_t to = 0;
    int64_t filled = 0;
    for (int32_t i = 0; i < ranks; i++) {
        total += b->gathered[i];
        longest = b->gathered[i] > longest ? b->gathered[i] : longest;
    }
    int64_t mean = padded((total + ranks - 1) / ranks);
    b->levels = longest - mean > mean / UNEVEN;
    b->segment = b->levels ? mean : longest;
    b->own_bytes = b->gathered[rank] < b->segment ? b->gathered[rank] : b->segment;
    for (int32_t i = 0; i < ranks; i++) {
        TCHI_TRY(share_results(b, i, &to, &filled));
        for (int64_t k = b->first_share[i]; k < b->shares.count; k++) {
            route_share(b, (const tchi_share *)b->shares.items + k, i, rank, ranks);
        }
    }
    memset(b->gathered, 0, (size_t)ranks * sizeof *b->gathered);
    return TCH_OK;
}

static tch_status plan_buckets(route_planner *r, int32_t first_param, const tchi_regions *regions)
{
    tchi_exchange *x = r->exchange;
    for (int64_t i = 0; i < x->buckets.count; i++) {
        TCHI_TRY(open_bucket(tchi_bucket_at(x, i), r->ranks));
    }
    TCHI_TRY(walk_tiles(r, first_param, regions));
    for (int64_t i = 0; i < x->buckets.count; i++) {
        tchi_bucket *b = tchi_bucket_at(x, i); /* from counts to offsets */
        lay_out_route(&b->in, r->ranks);
        lay_out_route(&b->out, r->ranks);
        b->unsent_bytes = 0;
        TCHI_TRY(lay_out_segments(b, r->rank, r->ranks));
    }
    r->fill = true;
    return walk_tiles(r, first_param, regions);
}

tch_status tchi_exchange_plan(tch_optimizer *optimizer, int32_t group, const tchi_regions *regions)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    tchi_exchange *x = g->exchange;
    route_planner r = {.optimizer = optimizer,
                       .exchange = x,
                       .rank = tch_comm_rank(optimizer->shared->comm),
                       .ranks = tch_comm_size(optimizer->shared->comm)};
    size_t bytes = (size_t)r.ranks * sizeof *r.replica;
    x->buckets.item_size = sizeof(tchi_bucket);
    TCHI_TRY(make_buckets(optimizer, g));
    TCHI_TRY(tchi_host_take(bytes, "the routes of an exchange", &r.replica));
    tch_status status = plan_buckets(&r, g->first_param, regions);
    tchi_host_release(r.replica, bytes);
    return status;
}

void tchi_exchange_release(tchi_exchange *exchange)
{
    for (int64_t i = 0; exchange != NULL && i < exchange->buckets.count; i++) {
        tchi_bucket *b = tchi_bucket_at(exchange, i);
        tchi_list *const lists[] = {&b->in.send, &b->in.receive, &b->out.send, &b->out.receive, &b->local,
                                    &b->unsent,  &b->spread_in,  &b->spread,   &b->level.send,  &b->shares};
        for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++) {
            tchi_list_release(lists[k]);
        }
        tchi_host_release(b->in.counts, (size_t)b->host_bytes);
    }
    if (exchange != NULL) {
        tchi_list_release(&exchange->buckets);
        tchi_host_release(exchange, sizeof *exchange);
    }
}

/* --- buffers ----------------------------------------------------------------------------------------------------- */

/* Spans of elementwise parameters are updated in place: see tchi_shared_follow. */
static void lay_out_tiles(tch_optimizer *o, int32_t group, tchi_arena *data, tchi_arena *grads)
{
    for (int32_t i = 0; i < o->tiles.count; i++) {
        tchi_param *t = tchi_tile_at(o, i);
        if (t->group == group && t->blocked) {
            t->data = tchi_arena_take(data, t->count * tchi_scalar_size(t->type));
            t->staged = tchi_arena_take(grads, t->count * tchi_scalar_size(t->wire_in));
        }
    }
}

/* Buckets alternate between two sets of buffers. */
static void lay_out_wires(tchi_exchange *x, int64_t ranks, tchi_arena *beside)
{
    for (int64_t side = 0; side < 2; side++) {
        int64_t in_sent = 0;
        int64_t in_received = 0;
        int64_t out_sent = 0;
        int64_t out_received = 0;
        for (int64_t i = side; i < x->buckets.count; i += 2) {
            const tchi_bucket *b = tchi_bucket_at(x, i);
            in_sent = tchi_max(in_sent, b->in.send_bytes + b->unsent_bytes);
            in_received = tchi_max(in_received, b->in.receive_bytes);
            out_sent = tchi_max(out_sent, b->out.send_bytes + b->segment + b->level.send_bytes);
            out_received = tchi_max(out_received, b->out.receive_bytes + ranks * b->segment);
        }
        x->in[side].sent = tchi_arena_take(beside, in_sent);
        x->in[side].received = tchi_arena_take(beside, in_received);
        x->out[side].sent = tchi_arena_take(beside, out_sent);
        x->out[side].received = tchi_arena_take(beside, out_received);
    }
}

void tchi_exchange_layout(tch_optimizer *o, int32_t group, tchi_arena *beside)
{
    tchi_exchange *x = tchi_group_at(o, group)->exchange;
    if (x == NULL) {
        return;
    }
    tchi_arena data = {0};
    tchi_arena grads = {0};
    lay_out_tiles(o, group, &data, &grads);
    x->tile_data_bytes = data.used;
    x->tile_data = tchi_arena_take(beside, data.used);
    x->tile_grads = tchi_arena_take(beside, grads.used);
    lay_out_wires(x, tch_comm_size(o->shared->comm), beside);
    if (x->tile_data != NULL) {
        data = (tchi_arena){.base = x->tile_data};
        grads = (tchi_arena){.base = x->tile_grads};
        lay_out_tiles(o, group, &data, &grads);
    }
}

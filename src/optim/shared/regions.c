/* A shard is a rectangle in the tensor's dimensions. Where dimensions are merged, a rectangle that does not span the
 * inner ones becomes several, one per row. */
#include "regions.h"

#include <stdlib.h>
#include <string.h>

#include "core/status.h"

enum { MAX_ROWS = 1 << 20 }; /* limit of rectangles per shard */

/* --- from tensor dimensions to parameter dimensions -------------------------------------------------------------- */

/* The tensor's dimensions [first, last] form one dimension of the parameter. */
typedef struct merged {
    int32_t first, last;
} merged;

/* Dimensions of size 1 join the previous one, or the first. */
static void find_merged(const tch_placement *p, const tchi_dims *dims, merged *groups)
{
    int32_t at = 0;
    for (int32_t k = 0; k < dims->order; k++) {
        int64_t product = 1;
        groups[k].first = groups[k].last = at < TCH_MAX_RANK ? at : TCH_MAX_RANK - 1;
        while (at < p->ndim && at < TCH_MAX_RANK && (product < dims->size[k] || p->shape[at] == 1)) {
            product *= p->shape[at];
            groups[k].last = at++;
        }
    }
}

/* A shard along one of the parameter's dimensions: `rows` intervals of `length`. */
typedef struct intervals {
    int32_t partial; /* the innermost tensor dimension that the shard does not span; below `first` if none */
    int64_t rows, length;
} intervals;

static intervals intervals_of(const tch_placement *p, const tch_shard *s, merged g)
{
    intervals v = {.partial = g.last, .rows = 1, .length = 1};
    while (v.partial >= g.first && s->size[v.partial] == p->shape[v.partial]) {
        v.length *= p->shape[v.partial--];
    }
    if (v.partial >= g.first) {
        v.length *= s->size[v.partial];
    }
    for (int32_t i = g.first; i < v.partial; i++) {
        v.rows *= s->size[i];
    }
    return v;
}

/* The start of interval `row` in the whole tensor and in this rank's tensor (by its strides). */
static void place_interval(const tch_placement *p, const tch_shard *s, merged g, const intervals *v, int64_t row,
                           const int64_t *strides, int64_t *start, int64_t *at)
{
    int64_t inner = 1;
    *start = *at = 0;
    for (int32_t i = g.last; i >= g.first; i--) {
        int64_t index = 0;
        if (i < v->partial) {
            index = row % s->size[i];
            row /= s->size[i];
        }
        *start += (s->start[i] + index) * inner;
        *at += (s->offset[i] + index) * strides[i];
        inner *= p->shape[i];
    }
}

/* Adds the rectangles of one shard. `strides` are those of this rank's tensor, zeros for other ranks. */
static tch_status add_shard(const tch_placement *p, const tch_shard *s, const tchi_dims *dims, const int64_t *strides,
                            bool here, tchi_list *list, const char *name)
{
    merged groups[TCH_MAX_RANK] = {{0}};
    intervals v[TCHI_MOST_ORDER] = {{0}};
    int64_t rows = 1;
    int32_t order = dims->order < TCHI_MOST_ORDER ? dims->order : TCHI_MOST_ORDER;
    find_merged(p, dims, groups);
    for (int32_t k = 0; k < order; k++) {
        v[k] = intervals_of(p, s, groups[k]);
        rows *= v[k].rows;
        if (rows > MAX_ROWS) {
            return tchi_fail(TCH_ERR_UNSUPPORTED,
                             "the shard of '%s' on rank %d is cut along dimensions that are merged, into more than %d "
                             "rows; shard an outer dimension, or set merge_dims to 0",
                             name, s->rank, MAX_ROWS);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        tchi_region region = {.first_holder = s->rank, .holders = 1, .here = here};
        int64_t rest = row;
        for (int32_t k = order - 1; k >= 0; k--) {
            int64_t at;
            int64_t of_dimension = v[k].rows > 1 ? v[k].rows : 1;
            place_interval(p, s, groups[k], &v[k], rest % of_dimension, strides, &region.start[k], &at);
            rest /= of_dimension;
            region.size[k] = v[k].length;
            region.at += at;
            region.stride[k] = strides[groups[k].last];
        }
        TCHI_TRY(tchi_list_add(list, &region));
    }
    return TCH_OK;
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static tch_status check_placement(const tch_placement *p, int32_t ranks, const char *name)
{
    bool good = p->struct_size == sizeof *p && p->ndim >= 0 && p->ndim <= TCH_MAX_RANK && p->count >= 0 &&
                (p->ndim == 0 || p->shape != NULL) && (p->count == 0 || p->shards != NULL);
    for (int32_t i = 0; good && i < p->count; i++) {
        const tch_shard *s = &p->shards[i];
        good = s->rank >= 0 && s->rank < ranks;
        for (int32_t k = 0; good && k < p->ndim; k++) {
            good = s->start[k] >= 0 && s->size[k] >= 0 && s->offset[k] >= 0 && s->start[k] <= p->shape[k] - s->size[k];
        }
    }
    if (!good) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the placement of '%s' is not set to TCH_PLACEMENT_INIT, or has a shard outside the tensor or "
                         "the group",
                         name);
    }
    return TCH_OK;
}

static int by_start(const void *a, const void *b)
{
    const tchi_region *x = a;
    const tchi_region *y = b;
    int order = 0;
    for (int k = 0; k < TCHI_MOST_ORDER && order == 0; k++) {
        order = (x->start[k] > y->start[k]) - (x->start[k] < y->start[k]);
    }
    for (int k = 0; k < TCHI_MOST_ORDER && order == 0; k++) {
        order = (x->size[k] > y->size[k]) - (x->size[k] < y->size[k]);
    }
    return order != 0 ? order : (x->first_holder > y->first_holder) - (x->first_holder < y->first_holder);
}

/* Merges equal rectangles of several ranks into one with several holders. */
static tch_status join_equal(tchi_regions *r)
{
    tchi_region *items = r->list.items;
    int64_t kept = 0;
    for (int64_t i = 0; i < r->list.count; i++) {
        int32_t rank = items[i].first_holder;
        bool again = kept > 0 && memcmp(items[kept - 1].start, items[i].start, sizeof items[i].start) == 0 &&
                     memcmp(items[kept - 1].size, items[i].size, sizeof items[i].size) == 0;
        if (!again) {
            items[kept] = items[i];
            items[kept].first_holder = (int32_t)r->holders.count;
            items[kept++].holders = 0;
        } else if (items[i].here) {
            items[kept - 1].here = true;
            items[kept - 1].at = items[i].at;
            memcpy(items[kept - 1].stride, items[i].stride, sizeof items[i].stride);
        }
        items[kept - 1].holders++;
        TCHI_TRY(tchi_list_add(&r->holders, &rank));
    }
    r->list.count = kept;
    return TCH_OK;
}

static bool meets(const tchi_region *region, int32_t order, const int64_t *start, const int64_t *size, int64_t *from,
                  int64_t *extent)
{
    for (int32_t k = 0; k < order; k++) {
        int64_t a = region->start[k] > start[k] ? region->start[k] : start[k];
        int64_t x = region->start[k] + region->size[k];
        int64_t y = start[k] + size[k];
        from[k] = a;
        extent[k] = (x < y ? x : y) - a;
        if (extent[k] <= 0) {
            return false;
        }
    }
    return true;
}

static tch_status check_whole(const tchi_regions *r, const tchi_dims *dims, const char *name)
{
    int64_t have = 0;
    int64_t want = tchi_elements(dims->size, dims->order);
    for (int64_t i = 0; i < r->list.count; i++) {
        const tchi_region *region = tchi_region_at(r, i);
        have += tchi_elements(region->size, dims->order);
        int64_t from[TCHI_MOST_ORDER];
        int64_t extent[TCHI_MOST_ORDER];
        if (i > 0 && meets(tchi_region_at(r, i - 1), dims->order, region->start, region->size, from, extent)) {
            have = -1;
            break;
        }
    }
    return have == want ? TCH_OK
                        : tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                                    "the shards of '%s' overlap without being equal, or leave elements out", name);
}

/* --- creation ---------------------------------------------------------------------------------------------------- */

/* Adds the whole tensor, contiguous on every rank. */
static tch_status add_whole(const tchi_dims *dims, tchi_list *list)
{
    tchi_region region = {.holders = -1, .here = true};
    int64_t stride = 1;
    for (int32_t k = dims->order - 1; k >= 0; k--) {
        region.size[k] = dims->size[k];
        region.stride[k] = stride;
        stride *= dims->size[k];
    }
    return tchi_list_add(list, &region);
}

static tch_status add_shards(const tch_placement *p, const tchi_dims *dims, const tch_tensor *tensor, int32_t rank,
                             const char *name, tchi_regions *r)
{
    int64_t strides[TCH_MAX_RANK] = {0};
    const int64_t nowhere[TCH_MAX_RANK] = {0};
    int64_t stride = 1;
    bool flat = tchi_is_flat(p, tensor->ndim);
    for (int32_t k = (flat ? p->ndim : tensor->ndim) - 1; k >= 0; k--) {
        strides[k] = stride;
        stride *= flat ? p->shape[k] : tensor->shape[k];
    }
    for (int32_t i = 0; i < p->count; i++) {
        const tch_shard *s = &p->shards[i];
        bool here = s->rank == rank;
        int64_t before = r->list.count;
        if (tchi_elements(s->size, p->ndim) == 0) {
            continue;
        }
        TCHI_TRY(add_shard(p, s, dims, here ? strides : nowhere, here, &r->list, name));
        for (; flat && here && before < r->list.count; before++) { /* the others are 0 */
            ((tchi_region *)r->list.items)[before].at -= s->offset[0] * (strides[0] - 1);
        }
    }
    if (r->list.count > 1) {
        qsort(r->list.items, (size_t)r->list.count, sizeof(tchi_region), by_start);
    }
    TCHI_TRY(join_equal(r));
    return check_whole(r, dims, name);
}

static void note_longest(tchi_regions *r)
{
    for (int64_t i = 0; i < r->list.count; i++) {
        const tchi_region *region = tchi_region_at(r, i);
        for (int32_t k = 0; k < TCHI_MOST_ORDER; k++) {
            r->longest[k] = region->size[k] > r->longest[k] ? region->size[k] : r->longest[k];
        }
    }
}

tch_status tchi_regions_of(const tch_placement *placement, const tchi_dims *dims, const tch_tensor *tensor,
                           int32_t rank, int32_t ranks, const char *name, tchi_regions *regions)
{
    *regions = (tchi_regions){
        .order = dims->order, .list = {.item_size = sizeof(tchi_region)}, .holders = {.item_size = sizeof(int32_t)}};
    if (placement == NULL || placement->count == 0) {
        TCHI_TRY(add_whole(dims, &regions->list));
        note_longest(regions);
        return TCH_OK;
    }
    TCHI_TRY(check_placement(placement, ranks, name));
    TCHI_TRY(add_shards(placement, dims, tensor, rank, name, regions));
    note_longest(regions);
    return TCH_OK;
}

void tchi_regions_release(tchi_regions *regions)
{
    tchi_list_release(&regions->list);
    tchi_list_release(&regions->holders);
}

/* The first of [first, end) that begins after `start` along dimension k, in which they are sorted. */
static int64_t first_after(const tchi_regions *r, int32_t k, int64_t start, int64_t first, int64_t end)
{
    while (first < end) {
        int64_t middle = first + (end - first) / 2;
        if (tchi_region_at(r, middle)->start[k] > start) {
            end = middle;
        } else {
            first = middle + 1;
        }
    }
    return first;
}

static void find_near(const tchi_regions *regions, const int64_t *start, const int64_t *size, int64_t *first,
                      int64_t *end)
{
    *first = 0;
    *end = regions->list.count;
    for (int32_t k = 0; k < regions->order; k++) {
        *end = first_after(regions, k, start[k] + size[k] - 1, *first, *end);
        *first = first_after(regions, k, start[k] - regions->longest[k], *first, *end);
        if (*first == *end ||
            tchi_region_at(regions, *first)->start[k] != tchi_region_at(regions, *end - 1)->start[k]) {
            return; /* those with equal starts are sorted along the next dimension */
        }
    }
}

tchi_meeting tchi_meetings_of(const tchi_regions *regions, const int64_t *start, const int64_t *size)
{
    tchi_meeting m = {.regions = regions, .start = start, .size = size};
    find_near(regions, start, size, &m.next, &m.end);
    return m;
}

bool tchi_next_meeting(tchi_meeting *m)
{
    while (m->next < m->end) {
        m->region = tchi_region_at(m->regions, m->next++);
        if (meets(m->region, m->regions->order, m->start, m->size, m->from, m->extent)) {
            return true;
        }
    }
    return false;
}

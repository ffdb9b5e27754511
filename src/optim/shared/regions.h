/* The distribution of a parameter's elements over ranks, in the dimensions that are divided into tiles. */
#ifndef TCHI_OPTIM_REGIONS_H
#define TCHI_OPTIM_REGIONS_H

#include "optim/optimizer.h"

/* A rectangle that its holders have in full, with equal contents. */
typedef struct tchi_region {
    int64_t start[TCHI_MOST_ORDER], size[TCHI_MOST_ORDER];
    int32_t first_holder, holders; /* in the list of holders, by rank; -1 holders: all ranks */
    /* if this rank is a holder */
    bool here;
    int64_t at, stride[TCHI_MOST_ORDER]; /* elements in this rank's tensor */
} tchi_region;

typedef struct tchi_regions {
    int32_t order;
    tchi_list list;                   /* tchi_region, ordered by start, outermost dimension first */
    tchi_list holders;                /* int32_t */
    int64_t longest[TCHI_MOST_ORDER]; /* the largest size along each dimension */
} tchi_regions;

/* Whether this rank's tensor is a range of the elements of a tensor with more dimensions: see tch_placement. */
static inline bool tchi_is_flat(const tch_placement *placement, int32_t ndim)
{
    return placement != NULL && placement->count > 0 && ndim == 1 && placement->ndim > 1;
}

/* The regions of a parameter whose whole tensor has `dims`. A placement of NULL or without shards means replicated.
 * `tensor` is this rank's part. Checks the placement: shards are inside, cover the tensor, and do not overlap unless
 * they are equal. */
tch_status tchi_regions_of(const tch_placement *placement, const tchi_dims *dims, const tch_tensor *tensor,
                           int32_t rank, int32_t ranks, const char *name, tchi_regions *regions);
void tchi_regions_release(tchi_regions *regions);

static inline int64_t tchi_elements(const int64_t *size, int32_t order)
{
    int64_t count = 1;
    for (int32_t k = 0; k < order; k++) {
        count *= size[k];
    }
    return count;
}

static inline const tchi_region *tchi_region_at(const tchi_regions *r, int64_t i)
{
    return (const tchi_region *)r->list.items + i;
}

/* The ranks that hold a region. */
static inline const int32_t *tchi_region_holders(const tchi_regions *r, const tchi_region *region)
{
    return (const int32_t *)tchi_offset(r->holders.items, region->first_holder * (int64_t)sizeof(int32_t));
}

/* Iterates over the intersections of regions with a block: start and sizes, in the parameter's dims. All regions that
 * intersect the block are in [next, end), with no others for row or column sharding and few for a mesh. */
typedef struct tchi_meeting {
    const tchi_regions *regions;
    const int64_t *start, *size; /* of the block */
    int64_t next, end;
    const tchi_region *region;
    int64_t from[TCHI_MOST_ORDER], extent[TCHI_MOST_ORDER];
} tchi_meeting;

tchi_meeting tchi_meetings_of(const tchi_regions *regions, const int64_t *start, const int64_t *size);
bool tchi_next_meeting(tchi_meeting *meeting);

#endif

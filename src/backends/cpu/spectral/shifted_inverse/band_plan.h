/* How a matrix is divided for the reduction to a band: all widths are chosen here, and scratch is counted per chunk of
 * work rather than per thread, so that it does not depend on their number.
 *
 * Rows and columns are divided into blocks of `block`, the bandwidth. Panel j is block column j below the band; its
 * reflectors act on the rows from block j + 1 on. The back-transformation applies the reflectors of several panels, a
 * group, together. Large updates are divided into tiles of columns. Groups and tiles count from the second block on,
 * where the first reflectors begin; before that is tile 0 or strip 0, one block wide. */
#ifndef TCHI_CPU_BAND_PLAN_H
#define TCHI_CPU_BAND_PLAN_H

#include <stdint.h>

#include "core/arith.h"

typedef struct band_plan {
    int64_t n;
    int64_t poles;
    int64_t block;
    int64_t blocks;
    int64_t panels;
    int64_t group; /* columns of a group's reflectors, but for the last */
    int64_t groups;
    int64_t tile; /* a multiple of group */
    int64_t tiles;
} band_plan;

/* Measured on one core of two with AVX-512 (bench/logs/shifted_inverse.md): a band of 32 against 48 and 64 costs 96,
 * 99 and 109 ms at n = 1024 in double, 326, 303 and 320 ms at n = 2048 in float: the poles' share grows with the width,
 * the products' efficiency too. Groups of two panels with tiles of 128, against one panel with tiles of 64, take 45.5
 * and 48.4 ms at n = 1024 in float, 7.5 and 6.6 ms at 512; the border lies somewhere between. Vectors of 128 bits are
 * filled by narrower panels. On two cores of a Neoverse N1, in double, groups of two panels of 16 against one of 32 and
 * two of 32 take 1.48, 1.76 and 2.11 ms at n = 128, 27.2, 28.3 and 30.9 at 512, 76.2, 77.0 and 81.0 at 768, 168, 166
 * and 173 at 1024. */
typedef struct band_widths {
    int64_t below; /* intended sizes */
    int64_t block;
    int64_t panels; /* of a group */
} band_widths;

static const band_widths band_widths_of[] = {
#ifdef __aarch64__
    {1024, 16, 2},
    {1536, 32, 1},
#else
    {768, 32, 1},
    {1536, 32, 2},
#endif
    {INT64_MAX, 48, 2},
};

static inline band_plan make_band_plan(int64_t n, int64_t poles)
{
    band_plan plan = {.n = n, .poles = poles};
    const band_widths *widths = band_widths_of;
    while (n >= widths->below) {
        widths++;
    }
    plan.block = tchi_min(n, widths->block);
    plan.blocks = tchi_ceil_div(n, plan.block);
    plan.panels = tchi_max(plan.blocks - 2, 0);
    plan.group = widths->panels * plan.block;
    plan.groups = tchi_ceil_div(plan.panels * plan.block, plan.group);
    plan.tile = 2 * plan.group;
    plan.tiles = 1 + tchi_ceil_div(n - plan.block, plan.tile);
    return plan;
}

static inline int64_t tile_begin(const band_plan *plan, int64_t tile)
{
    return tile == 0 ? 0 : plan->block + (tile - 1) * plan->tile;
}

static inline int64_t tile_end(const band_plan *plan, int64_t tile)
{
    return tchi_min(plan->block + tile * plan->tile, plan->n);
}

static inline int64_t tile_of(const band_plan *plan, int64_t row)
{
    return row < plan->block ? 0 : 1 + (row - plan->block) / plan->tile;
}

/* Strip s ends where group s begins to act. The last strip has no group and ends with the matrix. */
static inline int64_t strip_begin(const band_plan *plan, int64_t strip)
{
    return strip == 0 ? 0 : plan->block + (strip - 1) * plan->group;
}

static inline int64_t strip_end(const band_plan *plan, int64_t strip)
{
    return strip == plan->groups ? plan->n : plan->block + strip * plan->group;
}

#endif

/* How the tiles of a Gram kernel are shared out to its blocks, which all run at the same time, one on a multiprocessor.
 * Each has whole tiles first, as many as all can have. Of the tiles that are left over, `owners`, each has a block of its
 * own, and the blocks without one, `helpers`, take over the last slabs of G: all of them in a line, cut into equal
 * stretches. A stretch lies in one tile or in several, and what a helper has of one tile is a piece of it.
 *
 * The one thing to know before changing it: <A A', G G'> is a sum over slabs of G, so that pieces can be multiplied with
 * the tile of A A' one by one, but each needs all of A A'. */
#ifndef TCHI_CUDA_SAMPLE_RUNS_CUH
#define TCHI_CUDA_SAMPLE_RUNS_CUH

#include "backends/cuda/cuda.h"
#include "backends/cuda/device/elements.cuh"

typedef struct tchi_runs {
    int32_t blocks;
    int32_t slabs_a, slabs_g;
    int32_t whole; /* tiles that every block has */
    int32_t owners, helpers;
    int32_t cut; /* of G's slabs in a tile left over: its owner has those before it */
} tchi_runs;

/* Slabs of A or of G for one tile. */
typedef struct tchi_run {
    int item, of_g, first, slabs;
} tchi_run;

static __host__ __device__ inline int64_t tchi_runs_line(const tchi_runs &r)
{
    return (int64_t)r.owners * (r.slabs_g - r.cut);
}

/* Where a helper's stretch of the line begins. */
static __host__ __device__ inline int64_t tchi_runs_stretch(const tchi_runs &r, int helper)
{
    return tchi_runs_line(r) * helper / r.helpers;
}

/* --- on the device --------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ bool tchi_runs_helps(const tchi_runs &r)
{
    return (int)blockIdx.x >= r.owners;
}

/* Pieces of a block that helps. */
static __device__ __forceinline__ int tchi_runs_pieces(const tchi_runs &r)
{
    int helper = (int)blockIdx.x - r.owners;
    int each = r.slabs_g - r.cut;
    if (r.owners == 0 || each == 0) {
        return 0;
    }
    int64_t from = tchi_runs_stretch(r, helper);
    int64_t to = tchi_runs_stretch(r, helper + 1);
    return from == to ? 0 : (int)((to - 1) / each - from / each) + 1;
}

static __device__ __forceinline__ int tchi_runs_count(const tchi_runs &r)
{
    return 2 * r.whole + (tchi_runs_helps(r) ? tchi_runs_pieces(r) : 2);
}

static __device__ __forceinline__ tchi_run tchi_runs_piece(const tchi_runs &r, int number)
{
    int helper = (int)blockIdx.x - r.owners;
    int each = r.slabs_g - r.cut;
    int64_t from = tchi_runs_stretch(r, helper);
    int64_t to = tchi_runs_stretch(r, helper + 1);
    int64_t tile = from / each + number;
    int64_t first = from > tile * each ? from : tile * each;
    int64_t end = to < (tile + 1) * each ? to : (tile + 1) * each;
    return {r.whole * r.blocks + (int)tile, 1, r.cut + (int)(first - tile * each), (int)(end - first)};
}

/* Run `number` of this block; A's of a tile comes before G's. */
static __device__ __forceinline__ tchi_run tchi_runs_get(const tchi_runs &r, int number)
{
    bool left_over = number >= 2 * r.whole;
    if (left_over && tchi_runs_helps(r)) {
        return tchi_runs_piece(r, number - 2 * r.whole);
    }
    int of_g = number % 2;
    return {(int)blockIdx.x + number / 2 * r.blocks, of_g, 0, !of_g ? r.slabs_a : left_over ? r.cut : r.slabs_g};
}

/* --- on the host ----------------------------------------------------------------------------------------------------- */

#define TCHI_RUNS_WORTH 8 /* slabs that helping must save: about what storing and joining pieces takes */

/* Owners and helpers end at the same time if A and G up to the cut are as many slabs as a stretch. */
static inline tchi_runs tchi_runs_share(int64_t items, int blocks, int64_t slabs_a, int64_t slabs_g)
{
    tchi_runs r = {};
    r.blocks = blocks;
    r.slabs_a = (int32_t)slabs_a;
    r.slabs_g = (int32_t)slabs_g;
    r.whole = (int32_t)(items / blocks);
    r.owners = (int32_t)(items % blocks);
    r.helpers = blocks - r.owners;
    int64_t less = r.owners * slabs_g - r.helpers * slabs_a;
    int64_t cut = less > 0 ? tchi_cuda_ceil_div(less, blocks) : 0;
    r.cut = (int32_t)(r.owners > 0 && slabs_g - cut >= TCHI_RUNS_WORTH ? cut : slabs_g);
    return r;
}

#endif

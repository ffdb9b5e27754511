/* The rectangles of each parameter on this rank, which checkpoints write and read. */
#include <string.h>

#include "core/status.h"

#include "optim/create.h"
#include "shared.h"

/* Of equal rectangles on several ranks, the first rank writes. */
static bool is_first(const tch_placement *p, const tch_shard *shard)
{
    size_t bytes = (size_t)p->ndim * sizeof *shard->start;
    bool first = true;
    for (int32_t i = 0; first && i < p->count; i++) {
        const tch_shard *other = &p->shards[i];
        first = other->rank >= shard->rank || memcmp(other->start, shard->start, bytes) != 0 ||
                memcmp(other->size, shard->size, bytes) != 0;
    }
    return first;
}

static bool lies_inside(const tch_placement *p, const tch_shard *s, const tchi_param *param)
{
    bool flat = tchi_is_flat(p, param->ndim);
    bool good = flat ? s->offset[0] >= 0 && s->offset[0] <= param->count - tchi_elements(s->size, p->ndim)
                     : param->ndim == p->ndim;
    for (int32_t k = 0; good && k < p->ndim; k++) {
        good = s->start[k] >= 0 && s->size[k] >= 0 && s->start[k] <= p->shape[k] - s->size[k] &&
               (flat ? k == 0 || s->offset[k] == 0 : s->offset[k] >= 0 && s->offset[k] <= param->shape[k] - s->size[k]);
    }
    return good;
}

static tch_status note_shard(tch_optimizer *o, const tchi_param *param, const tch_placement *p, const tch_shard *s)
{
    tchi_held held = {.first = is_first(p, s)};
    size_t bytes = (size_t)p->ndim * sizeof *s->start;
    if (!lies_inside(p, s, param)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "a shard of '%s' on this rank is outside the tensor it was given with, or outside the whole",
                         param->name);
    }
    memcpy(held.start, s->start, bytes);
    memcpy(held.size, s->size, bytes);
    memcpy(held.offset, s->offset, bytes);
    return tchi_list_add(&o->shared->held, &held);
}

/* --- stretches ---------------------------------------------------------------------------------------------------- */

/* A shard as `rows` runs of `length` elements. */
typedef struct runs {
    int32_t partial; /* the innermost dimension that it does not span; -1 if none */
    int64_t rows, length, inner;
} runs;

static runs runs_of(const tch_placement *p, const tch_shard *s)
{
    runs r = {.partial = p->ndim - 1, .rows = 1, .length = 1, .inner = 1};
    while (r.partial >= 0 && s->size[r.partial] == p->shape[r.partial]) {
        r.inner *= p->shape[r.partial--];
    }
    r.length = r.inner * (r.partial < 0 ? 1 : s->size[r.partial]);
    r.rows = r.length == 0 ? 0 : tchi_elements(s->size, p->ndim) / r.length;
    return r;
}

/* The first element of run `row` in a row-major tensor of `shape` that has the shard at `from`. */
static int64_t first_of(const tch_shard *s, const runs *r, const int64_t *from, const int64_t *shape, int64_t row)
{
    int64_t first = r->partial < 0 ? 0 : from[r->partial] * r->inner;
    int64_t stride = r->inner * (r->partial < 0 ? 1 : shape[r->partial]);
    for (int32_t k = r->partial - 1; k >= 0; k--) {
        first += (from[k] + row % s->size[k]) * stride;
        stride *= shape[k];
        row /= s->size[k];
    }
    return first;
}

static tch_status note_stretches(tch_optimizer *o, const tchi_param *param, const tch_placement *p, const tch_shard *s)
{
    runs r = runs_of(p, s);
    for (int64_t row = 0; row < r.rows; row++) {
        tchi_stretch stretch = {
            .start = first_of(s, &r, s->start, p->shape, row), .count = r.length, .first = is_first(p, s)};
        stretch.at =
            tchi_is_flat(p, param->ndim) ? stretch.start - param->base : first_of(s, &r, s->offset, param->shape, row);
        TCHI_TRY(tchi_list_add(&o->shared->stretches, &stretch));
    }
    return TCH_OK;
}

/* Blocks of int8 begin at the same elements for every number of ranks, so no shard may begin or end within one. */
static tch_status check_blocks(const tchi_param *param, const tch_placement *p)
{
    bool rows = p->ndim < 2 || param->whole / p->shape[0] % TCH_CODE_BLOCK == 0;
    bool good = true;
    for (int32_t i = 0; good && i < p->count; i++) {
        runs r = runs_of(p, &p->shards[i]);
        int64_t start = first_of(&p->shards[i], &r, p->shards[i].start, p->shape, 0);
        bool ends = r.length % TCH_CODE_BLOCK == 0 || start + r.length == param->whole;
        good = r.rows == 0 || r.partial < 0 ||
               (rows && start % TCH_CODE_BLOCK == 0 && ends && (r.partial == 0 || p->ndim == 2));
    }
    return good ? TCH_OK
                : tchi_fail(
                      TCH_ERR_UNSUPPORTED,
                      "state_dtype is int8, and the shards of '%s' cut blocks of %d elements: expected rows, or "
                      "stretches of rows and of vectors, of a multiple of %d. Use bfloat16 or float32 in its group",
                      param->name, TCH_CODE_BLOCK, TCH_CODE_BLOCK);
}

static tch_status prepare_stretches(const tch_optimizer *o, const tchi_param *param, const tch_placement *p,
                                    bool *stretches)
{
    tch_moments kept = tchi_moments_of(o, param);
    bool here = !param->blocked || param->filters; /* not with the owners of tiles */
    if (param->blocked && kept == TCH_MOMENTS_CODES) {
        return tchi_fail(
            TCH_ERR_UNSUPPORTED,
            "state_dtype is int8, and '%s' is a matrix that ranks share: expected bfloat16 or float32 in its "
            "group",
            param->name);
    }
    *stretches = kept != TCH_MOMENTS_REAL && here && p != NULL && p->count > 0;
    if (*stretches && !tchi_is_row_major(param->ndim, param->shape, param->strides)) {
        return tchi_fail(TCH_ERR_LAYOUT,
                         "parameter '%s' is shared, and its elements are not in row-major order: state_dtype must be "
                         "float32",
                         param->name);
    }
    return *stretches && kept == TCH_MOMENTS_CODES ? check_blocks(param, p) : TCH_OK;
}

const tchi_stretch *tchi_stretches_of(const tch_optimizer *optimizer, const tchi_param *param, int64_t *count)
{
    *count = 0;
    if (optimizer->shared == NULL || param->tile >= 0 || !tchi_shared_param_at(optimizer, param->index)->sharded) {
        return NULL;
    }
    const tchi_shared_param *noted = tchi_shared_param_at(optimizer, param->index);
    *count = noted->stretches;
    return (const tchi_stretch *)optimizer->shared->stretches.items + noted->first_stretch;
}

static tch_status note_param(tch_optimizer *o, const tchi_param *param, const tch_placement *p)
{
    bool stretches = false;
    tchi_shared_param noted = {
        .ndim = param->ndim, .first_held = o->shared->held.count, .first_stretch = o->shared->stretches.count};
    TCHI_TRY(prepare_stretches(o, param, p, &stretches));
    noted.sharded = p != NULL && p->count > 0;
    noted.ndim = noted.sharded ? p->ndim : param->ndim;
    memcpy(noted.shape, noted.sharded ? p->shape : param->shape, (size_t)noted.ndim * sizeof *noted.shape);
    for (int32_t i = 0; noted.sharded && i < p->count; i++) {
        if (p->shards[i].rank == tch_comm_rank(o->shared->comm) && tchi_elements(p->shards[i].size, p->ndim) > 0) {
            TCHI_TRY(note_shard(o, param, p, &p->shards[i]));
            TCHI_TRY(stretches ? note_stretches(o, param, p, &p->shards[i]) : TCH_OK);
        }
    }
    noted.held = o->shared->held.count - noted.first_held;
    noted.stretches = o->shared->stretches.count - noted.first_stretch;
    return tchi_list_add(&o->shared->params, &noted);
}

tch_status tchi_held_note(tch_optimizer *optimizer, int32_t group, const tch_placement *placements)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    for (int32_t i = 0; i < g->params; i++) {
        TCHI_TRY(note_param(optimizer, tchi_param_at(optimizer, g->first_param + i),
                            placements == NULL ? NULL : &placements[i]));
    }
    return TCH_OK;
}

void tchi_held_forget(tch_optimizer *optimizer, int64_t params)
{
    tchi_shared *shared = optimizer->shared;
    if (params < shared->params.count) {
        shared->held.count = tchi_shared_param_at(optimizer, (int32_t)params)->first_held;
        shared->stretches.count = tchi_shared_param_at(optimizer, (int32_t)params)->first_stretch;
        shared->params.count = params;
    }
}

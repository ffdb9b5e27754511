#include "rects.h"

#include "core/status.h"

#include "shared/shared.h"

/* --- blocks in a work buffer ------------------------------------------------------------------------------------- */

enum { ALIGNED = 8 }; /* elements: 16 bytes of the smallest type */

static int64_t align(int64_t count)
{
    return (count + ALIGNED - 1) / ALIGNED * ALIGNED;
}

tchi_work tchi_work_of(const tchi_block_batch *block_batch, tch_scalar type)
{
    int64_t last = block_batch->size[block_batch->order - 1];
    tchi_work work = {.type = type, .rows = block_batch->elements / last, .cols = last, .ld = last};
    if (block_batch->order == 2) {
        work.ld = align(last);
    }
    work.stride = align(work.rows * work.ld);
    return work;
}

int64_t tchi_work_bytes(const tchi_work *work, int64_t blocks)
{
    int64_t bytes = blocks * work->stride * tchi_scalar_size(work->type);
    return (bytes + 255) / 256 * 256;
}

tch_matrices tchi_work_matrices(const tchi_work *work, void *buffer, int64_t blocks)
{
    return (tch_matrices){buffer, work->type, work->rows, work->cols, work->ld, blocks, work->stride};
}

/* --- runs -------------------------------------------------------------------------------------------------------- */

static const tchi_param *param_of(const tch_optimizer *o, const tchi_block_batch *block_batch, int64_t block)
{
    return tchi_block_param(o, tchi_block_at(o, block_batch->first + block));
}

const tchi_param *tchi_run_param(const tch_optimizer *optimizer, const tchi_run *run)
{
    return param_of(optimizer, run->block_batch, run->first);
}

/* Blocks [at, end) of one block batch that are processed before others are received: all of it, or those whose
 * gradients travel in the same `bucket`. `done` counts the buckets that are complete after them. */
typedef struct turn {
    int32_t block_batch, started;
    int64_t at, end;
    int64_t bucket, done;
} turn;

/* Advances to the next run of a turn; false at the end. */
static bool next_run(const tch_optimizer *optimizer, const tchi_step *now, turn *turn, tchi_run *run)
{
    tchi_block_batch *c = tchi_block_batch_at(optimizer, turn->block_batch);
    while (turn->at < turn->end && tchi_gradient_of(optimizer, now, param_of(optimizer, c, turn->at))->data == NULL) {
        turn->at++;
    }
    if (turn->at >= turn->end) {
        return false;
    }
    const tchi_param *first = param_of(optimizer, c, turn->at);
    *run = (tchi_run){.block_batch = c, .first = turn->at, .now = now};
    for (; turn->at < turn->end && run->count < c->chunk; turn->at++) {
        const tchi_param *p = param_of(optimizer, c, turn->at);
        const tchi_gradient *gradient = tchi_gradient_of(optimizer, now, p);
        if (gradient->data == NULL || gradient->type != tchi_gradient_of(optimizer, now, first)->type ||
            p->clock_id != first->clock_id || p->moments != first->moments) {
            break;
        }
        run->count++;
    }
    return true;
}

/* --- turns ------------------------------------------------------------------------------------------------------- */

/* Returns the number of this rank's blocks of a block batch that precede block `global_index` of all ranks. */
static int64_t blocks_before(const tch_optimizer *o, const tchi_block_batch *c, int64_t global_index)
{
    int64_t first = 0;
    for (int64_t end = c->count; first < end;) {
        int64_t middle = (first + end) / 2;
        bool before = tchi_block_at(o, c->first + middle)->global_index < global_index;
        first = before ? middle + 1 : first;
        end = before ? end : middle;
    }
    return first;
}

/* Advances to the next turn of a group; false at the end. The order is the same on every rank and includes turns
 * without blocks on this rank. Starts from zeros. */
static bool next_turn(const tch_optimizer *optimizer, int32_t group, turn *turn)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    const tchi_exchange *x = g->exchange;
    int32_t batch = turn->started ? turn->block_batch : g->first_block_batch;
    int64_t from = turn->started ? turn->end : 0;
    if (turn->started && (turn->bucket == turn->done || tchi_bucket_at(x, turn->bucket)->end_index == INT64_MAX)) {
        batch++;
        from = 0;
    }
    if (batch >= g->first_block_batch + g->block_batches) {
        return false;
    }
    *turn = (struct turn){batch, 1, from, tchi_block_batch_at(optimizer, batch)->count, turn->done, turn->done};
    const tchi_bucket *b = x == NULL ? NULL : tchi_bucket_at(x, turn->bucket);
    if (b != NULL && b->end_batch == batch) {
        turn->end = blocks_before(optimizer, tchi_block_batch_at(optimizer, batch), b->end_index);
        turn->done++;
    }
    return true;
}

tch_status tchi_for_each_run(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool exchanges,
                             tchi_run_visit visit)
{
    for (turn turn = {0}; next_turn(optimizer, group, &turn);) {
        tchi_run run;
        if (exchanges) {
            TCHI_TRY(tchi_exchange_arrive(optimizer, now, group, turn.bucket));
        }
        while (next_run(optimizer, now, &turn, &run)) {
            TCHI_TRY(visit(optimizer, &run));
        }
        if (exchanges) {
            TCHI_TRY(tchi_exchange_leave(optimizer, now, group, turn.done));
        }
    }
    return TCH_OK;
}

tchi_recording_key tchi_run_key(const tch_optimizer *optimizer, const tchi_run *run, int64_t variant)
{
    int64_t block_batch = run->block_batch - tchi_block_batch_at(optimizer, 0);
    int64_t grad_type = (int64_t)tchi_gradient_of(optimizer, run->now, tchi_run_param(optimizer, run))->type;
    return (tchi_recording_key){{block_batch, run->first, run->count, grad_type, variant}};
}

/* --- rectangles -------------------------------------------------------------------------------------------------- */

tch_update tchi_update_of(const tch_optimizer *optimizer, const tchi_step *now, int32_t group, const tch_hyper *hyper)
{
    const tch_optim_config *config = &tchi_group_at(optimizer, group)->config;
    return (tch_update){
        .rects = optimizer->rects,
        .hyper = hyper,
        .skip = &optimizer->control->skip,
        .grad_scale = now == NULL ? NULL : now->grad_scale,
        .maximize = config->maximize,
        .stochastic = config->memory.stochastic_rounding,
        .seed = tchi_group_at(optimizer, 0)->config.memory.seed,
    };
}

static void *advance_by(void *base, int64_t elements, tch_scalar type)
{
    return base == NULL ? NULL : (char *)base + elements * tchi_scalar_size(type);
}

tch_rect tchi_rect_at(const tchi_param *p, const tchi_gradient *gradient, int64_t first, int64_t rows, int64_t cols,
                      int64_t stride)
{
    tch_rect rect = {
        .param = advance_by(p->data, first, p->type),
        .master = advance_by(p->master, first, p->real),
        .grad = gradient == NULL ? NULL : advance_by(gradient->data, first, gradient->type),
        .clock = p->clock,
        .rows = rows,
        .cols = cols,
        .stride = stride,
        .first = p->base + first,
        .parameter = p->index,
        .factor = 1.0,
    };
    for (int32_t k = 0; k < TCHI_MOMENTS; k++) {
        tch_moments kept = tchi_kept_as(p, k);
        bool coded = kept == TCH_MOMENTS_CODES; /* four to an int32 */
        tch_scalar type = kept == TCH_MOMENTS_BF16 ? TCH_SCALAR_BF16 : coded ? TCH_SCALAR_I32 : p->real;
        rect.state[k] = advance_by(p->moment[k], coded ? first / 4 : first, type);
        if (coded && k < 2) {
            rect.scale[k] = advance_by(p->scale[k], first / TCH_CODE_BLOCK, TCH_SCALAR_F32);
        }
    }
    return rect;
}

/* A block's position in its parameter: sizes and strides, with contiguous neighbors merged. */
typedef struct extent {
    int32_t order;
    int64_t size[TCHI_MOST_ORDER], stride[TCHI_MOST_ORDER];
    int64_t number[TCHI_MOST_ORDER]; /* strides in the whole parameter, of which `p` may be a tile */
    int64_t first;
} extent;

/* Sums are computed per rectangle, so a tile is divided into the same rectangles as the block of a whole parameter. */
static extent extent_of(const tch_optimizer *o, const tchi_block_batch *block_batch, const tchi_block *block, bool join)
{
    const tchi_param *p = tchi_block_param(o, block);
    const tchi_dims *whole_dims = p->tile < 0 ? &p->dims : &tchi_param_at(o, p->index)->dims;
    extent e = {.order = 0};
    int64_t stride = 1;
    int64_t number = 1;
    for (int32_t k = block_batch->order - 1; k >= 0; k--) {
        int64_t size = block_batch->size[block->transposed ? block_batch->order - 1 - k : k];
        e.first += block->start[k] * stride;
        bool whole = e.order > 0 && (p->cut >> (k + 1) & 1) == 0;
        if (join && whole && stride == e.size[e.order - 1] * e.stride[e.order - 1]) {
            e.size[e.order - 1] *= size;
        } else {
            e.size[e.order] = size;
            e.number[e.order] = number;
            e.stride[e.order++] = stride;
        }
        stride *= p->dims.size[k];
        number *= whole_dims->size[k];
    }
    return e; /* innermost first */
}

static int64_t outer_of(const extent *e)
{
    int64_t outer = 1;
    for (int32_t k = 2; k < e->order; k++) {
        outer *= e->size[k];
    }
    return outer;
}

int64_t tchi_block_rects(const tch_optimizer *optimizer, const tchi_block_batch *block_batch, int64_t block)
{
    const tchi_block *b = tchi_block_at(optimizer, block_batch->first + block);
    extent e = extent_of(optimizer, block_batch, b, true);
    return outer_of(&e);
}

static int64_t add_rects(tch_optimizer *o, const tchi_run *run, const tchi_work *work, int64_t index, void *block0,
                         void *block1, int64_t used)
{
    const tchi_block *block = tchi_block_at(o, run->block_batch->first + run->first + index);
    const tchi_param *p = tchi_block_param(o, block);
    bool plain = work->ld == work->cols && !block->transposed;
    extent e = extent_of(o, run->block_batch, block, plain);
    int64_t cols = e.size[0];
    int64_t rows = e.order > 1 ? e.size[1] : 1;
    int64_t outer = outer_of(&e);
    for (int64_t i = 0; i < outer; i++) {
        int64_t first = e.first;
        int64_t number = p->base + e.first;
        int64_t rest = i;
        for (int32_t k = 2; k < e.order; k++) {
            first += rest % e.size[k] * e.stride[k];
            number += rest % e.size[k] * e.number[k];
            rest /= e.size[k];
        }
        tch_rect rect =
            tchi_rect_at(p, tchi_gradient_of(o, run->now, p), first, rows, cols, e.order > 1 ? e.stride[1] : cols);
        int64_t at = index * work->stride + i * rows * cols;
        rect.block[0] = advance_by(block0, at, work->type);
        rect.block[1] = advance_by(block1, at, work->type);
        rect.first = number;
        rect.skipped = e.order > 1 ? e.number[1] - e.stride[1] : 0;
        rect.block_ld = plain ? cols : work->ld;
        rect.block_index = (int32_t)index;
        rect.transposed = block->transposed;
        o->rects[used++] = rect;
    }
    return used;
}

tch_update tchi_update_run(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *block0,
                           void *block1)
{
    const tchi_block_batch *block_batch = run->block_batch;
    tchi_group_numbers *numbers = tchi_group_at(optimizer, block_batch->group)->numbers;
    tch_update update = tchi_update_of(optimizer, run->now, block_batch->group,
                                       block_batch->direction ? &numbers->tile : &numbers->main);
    if (block_batch->prepared) {
        update.grad_scale = NULL;
        update.maximize = 0;
    }
    for (int64_t i = 0; i < run->count; i++) {
        update.count = add_rects(optimizer, run, work, i, block0, block1, update.count);
    }
    update.real = block_batch->real;
    update.param_type = block_batch->type;
    update.grad_type = tchi_gradient_of(optimizer, run->now, tchi_run_param(optimizer, run))->type;
    update.block_type = work->type;
    return update;
}

/* --- whole parameters -------------------------------------------------------------------------------------------- */

static int64_t add_whole(tch_optimizer *o, const tchi_step *now, const tchi_param *p, const tch_update *update,
                         int64_t used)
{
    const tchi_gradient *gradient = tchi_gradient_of(o, now, p);
    int64_t stretches = 0;
    if (gradient->data == NULL || p->type != update->param_type || gradient->type != update->grad_type) {
        return used;
    }
    const tchi_stretch *stretch = update->moments == TCH_MOMENTS_REAL ? NULL : tchi_stretches_of(o, p, &stretches);
    for (int64_t i = 0; i < stretches; i++, stretch++) {
        o->rects[used] = tchi_rect_at(p, gradient, stretch->at, 1, stretch->count, stretch->count);
        o->rects[used++].first = stretch->start;
    }
    if (stretch == NULL) {
        o->rects[used++] = tchi_rect_at(p, gradient, 0, 1, p->count, p->count);
    }
    return used;
}

static bool is_elementwise(const tchi_param *p, const tch_update *update)
{
    return !p->blocked && !p->carried && p->moments == update->moments;
}

/* Collects this rank's spans of an elementwise parameter whose state is divided among ranks. */
static int64_t collect(tch_optimizer *o, const tchi_step *now, int32_t group, bool with_blocks,
                       const tch_update *update)
{
    const tchi_group *g = tchi_group_at(o, group);
    int64_t used = 0;
    for (int32_t i = g->first_param; i < g->first_param + g->params; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        used = with_blocks || is_elementwise(p, update) ? add_whole(o, now, p, update, used) : used;
    }
    for (int32_t i = 0; i < o->tiles.count && !with_blocks; i++) {
        const tchi_param *t = tchi_tile_at(o, i);
        used = is_elementwise(t, update) && t->group == group ? add_whole(o, now, t, update, used) : used;
    }
    return used;
}

static tch_status visit_types(tch_optimizer *o, const tchi_step *now, int32_t group, bool with_blocks,
                              tch_update *update, tchi_update_visit visit)
{
    for (int type = 0; type <= TCH_SCALAR_BF16; type++) {
        for (int grad = 0; grad <= TCH_SCALAR_BF16; grad++) {
            update->param_type = (tch_scalar)type;
            update->grad_type = (tch_scalar)grad;
            update->block_type = update->real = type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
            update->count = collect(o, now, group, with_blocks, update);
            if (update->count > 0) {
                TCHI_TRY(visit(o, group, update));
            }
        }
    }
    return TCH_OK;
}

/* Moments have the group's state_dtype; those of small and of float64 parameters have the arithmetic type. */
tch_status tchi_for_each_type(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool with_blocks,
                              const tch_hyper *hyper, tchi_update_visit visit)
{
    tch_state_dtype asked = tchi_group_at(optimizer, group)->config.memory.state_dtype;
    tch_update update = tchi_update_of(optimizer, now, group, hyper);
    if (!with_blocks && asked != TCH_STATE_FLOAT32) {
        update.moments = asked == TCH_STATE_INT8 ? TCH_MOMENTS_CODES : TCH_MOMENTS_BF16;
        TCHI_TRY(visit_types(optimizer, now, group, with_blocks, &update, visit));
        update.moments = TCH_MOMENTS_REAL;
    }
    return visit_types(optimizer, now, group, with_blocks, &update, visit);
}

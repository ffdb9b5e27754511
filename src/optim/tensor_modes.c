#include "tensor_modes.h"

#include <math.h>

#include "core/arith.h"
#include "core/status.h"
#include "linalg/algebra.h"

/* --- storage ----------------------------------------------------------------------------------------------------- */

static int64_t square_bytes(const tchi_factor_batch *f)
{
    return f->n * f->n * tchi_scalar_size(f->real);
}

bool tchi_is_packed(const tchi_factor_batch *f, tchi_matrix_kind kind)
{
    return kind == TCHI_FACTORS ? f->packed : f->root != 0 && (f->packed || f->bf16_roots);
}

int64_t tchi_kept_elements(const tchi_factor_batch *f, tchi_matrix_kind kind)
{
    return tchi_is_packed(f, kind) ? f->n * (f->n + 1) / 2 : f->n * f->n;
}

tch_scalar tchi_kept_type(const tchi_factor_batch *f, tchi_matrix_kind kind)
{
    return kind == TCHI_ROOTS && f->bf16_roots ? TCH_SCALAR_BF16 : f->real;
}

int64_t tchi_kept_bytes(const tchi_factor_batch *f, tchi_matrix_kind kind)
{
    return tchi_kept_elements(f, kind) * tchi_scalar_size(tchi_kept_type(f, kind));
}

char *tchi_kept_at(const tchi_factor_batch *f, tchi_matrix_kind kind, int64_t index)
{
    return (kind == TCHI_FACTORS ? f->factors : f->roots) + index * tchi_kept_bytes(f, kind);
}

static bool is_any_packed(const tchi_factor_batch *f)
{
    return tchi_is_packed(f, TCHI_FACTORS) || tchi_is_packed(f, TCHI_ROOTS);
}

int64_t tchi_unpacked_bytes(const tch_optimizer *o, const tchi_block_batch *block_batch)
{
    int64_t most = 0;
    for (int32_t k = 0; k < block_batch->order; k++) {
        const tchi_factor_batch *f = tchi_factor_batch_of(o, block_batch, k);
        if (f != NULL && is_any_packed(f) && square_bytes(f) > most) {
            most = square_bytes(f);
        }
    }
    return block_batch->order == 2 ? 2 * most : most;
}

int64_t tchi_unpacked_fit(const tch_optimizer *o, const tchi_factor_batch *f, int64_t count)
{
    int64_t each = square_bytes(f) * (tchi_is_packed(f, TCHI_ROOTS) ? 2 : 1);
    if (!is_any_packed(f) || count <= o->unpacked_bytes / each) {
        return count;
    }
    int64_t parts = tchi_ceil_div(count, o->unpacked_bytes / each);
    return tchi_ceil_div(count, parts);
}

/* `ld` is 0 for packed matrices, as in the operation table. */
static tch_matrices kept_matrices(const tchi_factor_batch *f, tchi_matrix_kind kind, int64_t first, int64_t count)
{
    tch_matrices kept = tchi_matrices_new(tchi_kept_at(f, kind, first), tchi_kept_type(f, kind), count, f->n, f->n);
    if (tchi_is_packed(f, kind)) {
        kept.ld = 0;
        kept.stride = tchi_kept_elements(f, kind);
    }
    return kept;
}

tch_status tchi_matrices_open(const tch_optimizer *o, const tchi_factor_batch *f, tchi_matrix_kind kind, int64_t first,
                              int64_t count, void *room, tch_matrices *matrices)
{
    void *at = tchi_is_packed(f, kind) ? room : tchi_kept_at(f, kind, first);
    *matrices = tchi_matrices_new(at, f->real, count, f->n, f->n);
    return tchi_is_packed(f, kind)
               ? o->context->backend->matrix->pack(o->context->state, matrices, tchi_kept_type(f, kind),
                                                   tchi_kept_at(f, kind, first), 1)
               : TCH_OK;
}

tch_status tchi_matrices_close(const tch_optimizer *o, const tchi_factor_batch *f, tchi_matrix_kind kind, int64_t first,
                               const tch_matrices *matrices)
{
    return tchi_is_packed(f, kind)
               ? o->context->backend->matrix->pack(o->context->state, matrices, tchi_kept_type(f, kind),
                                                   tchi_kept_at(f, kind, first), 0)
               : TCH_OK;
}

/* One matrix at a time: the work buffers are not allocated yet. */
static tch_status begin_packed(const tch_optimizer *o, const tchi_factor_batch *f)
{
    tchi_arena arena = {0};
    tchi_arena_take(&arena, square_bytes(f));
    TCHI_TRY(tchi_arena_reserve(o->context, &arena));
    tch_matrices one = tchi_matrices_new(tchi_arena_take(&arena, square_bytes(f)), f->real, 1, f->n, f->n);
    TCHI_TRY(o->context->backend->matrix->combine(o->context->state, 1.0, 0.0, NULL, 0.0, NULL, &one));
    for (int64_t i = 0; i < f->count; i++) {
        TCHI_TRY(tchi_matrices_close(o, f, TCHI_ROOTS, i, &one));
    }
    return TCH_OK;
}

tch_status tchi_matrices_begin(const tch_optimizer *o, const tchi_factor_batch *f)
{
    if (f->count > 0 && tchi_is_packed(f, TCHI_ROOTS)) {
        return begin_packed(o, f);
    }
    tch_matrices all = tchi_matrices_new(f->roots, f->real, f->count, f->n, f->n);
    return o->context->backend->matrix->combine(o->context->state, 1.0, 0.0, NULL, 0.0, NULL, &all);
}

/* --- along dimensions of blocks ---------------------------------------------------------------------------------- */

/* The factors, roots or bases of a run along dimension k, in their storage format. */
static tch_matrices kept_of(const tch_optimizer *o, const tchi_run *run, int32_t k, tchi_matrix_kind kind)
{
    const tchi_factor_batch *f = tchi_factor_batch_at(o, run->block_batch->factor_batch[k]);
    return kept_matrices(f, kind, run->block_batch->position[k] + run->first, run->count);
}

/* Blocks are matrices with the dimension along their rows or columns, or neither. A matrix with padded rows is only
 * seen in its own two dimensions, however small they are. */
typedef enum mode_kind { ALONG_COLUMNS, ALONG_ROWS, BETWEEN } mode_kind;

typedef struct mode {
    int64_t outer, size, inner;
    mode_kind kind;
} mode;

static mode mode_of(const tchi_block_batch *block_batch, int32_t k)
{
    mode m = {1, block_batch->size[k], 1, BETWEEN};
    for (int32_t i = 0; i < k; i++) {
        m.outer *= block_batch->size[i];
    }
    for (int32_t i = k + 1; i < block_batch->order; i++) {
        m.inner *= block_batch->size[i];
    }
    if (k == block_batch->order - 1 || (m.inner == 1 && m.outer > 1)) {
        m.kind = ALONG_COLUMNS;
    } else if (m.outer == 1) {
        m.kind = ALONG_ROWS;
    }
    return m;
}

bool tchi_block_batch_has_middle(const tchi_block_batch *block_batch)
{
    for (int32_t k = 0; k < block_batch->order; k++) {
        if (block_batch->factor_batch[k] >= 0 && mode_of(block_batch, k).kind == BETWEEN) {
            return true;
        }
    }
    return false;
}

static bool is_rounded(const tch_optimizer *o, const tchi_block_batch *block_batch)
{
    return tchi_group_at(o, block_batch->group)->config.numerics.precision == TCH_PRECISION_HIGH &&
           block_batch->real == TCH_SCALAR_F32;
}

/* The same blocks as size by inner matrices (outer = 1), or as outer by size. */
static tch_matrices view(const tch_matrices *blocks, int64_t rows, int64_t cols)
{
    int64_t ld = rows == blocks->rows && cols == blocks->cols ? blocks->ld : cols;
    return (tch_matrices){blocks->data, blocks->type, rows, cols, ld, blocks->batch, blocks->stride};
}

static bool has_both_sides(const tchi_block_batch *c)
{
    return c->order == 2 && c->size[0] > 1 && c->size[1] > 1 && c->factor_batch[0] >= 0 && c->factor_batch[1] >= 0;
}

/* Whether the run's blocks are matrices with factors on both sides whose products may be rounded. */
static bool sides_of(const tch_optimizer *optimizer, const tchi_run *run, void *const buffers[2],
                     tch_block_sides *sides)
{
    tchi_work work = tchi_work_of(run->block_batch, run->block_batch->real);
    if (!has_both_sides(run->block_batch) || !is_rounded(optimizer, run->block_batch)) {
        return false;
    }
    *sides = (tch_block_sides){.blocks = tchi_work_matrices(&work, NULL, run->count),
                               .buffers = {buffers[0], buffers[1]},
                               .room = optimizer->unpacked};
    for (int32_t k = 0; k < 2; k++) {
        sides->factors[k] = kept_of(optimizer, run, k, TCHI_FACTORS);
        sides->sides[k] = kept_of(optimizer, run, k, TCHI_ROOTS);
    }
    return true;
}

tch_status tchi_run_gather(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work,
                           const tch_gathering *rules, bool products, void *const buffers[2], tch_blocks *gradient,
                           tch_blocks *filtered)
{
    tch_gathering how = *rules;
    tch_block_sides sides;
    tch_scalar type;
    tch_update update = tchi_update_run(optimizer, run, work, buffers[0], buffers[1]);
    update.moments = tchi_run_param(optimizer, run)->moments;
    how.sides = products && sides_of(optimizer, run, buffers, &sides) ? &sides : NULL;
    for (int k = 0; k < 2; k++) {
        how.notes[k] = optimizer->notes[k];
    }
    TCHI_TRY(optimizer->context->backend->update->gather(optimizer->context->state, &update, &how, &type));
    *gradient = (tch_blocks){tchi_work_matrices(work, buffers[0], run->count), how.sides ? how.notes[0] : NULL};
    gradient->matrices.type = type;
    *filtered = *gradient;
    if (buffers[1] != NULL) {
        filtered->matrices.data = buffers[1];
        filtered->notes = how.sides ? how.notes[1] : NULL;
    }
    return TCH_OK;
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

tch_status tchi_transpose_blocks(tch_optimizer *optimizer, const tchi_block_batch *block_batch, int32_t k,
                                 int64_t stride, int64_t blocks, void *plain, void *transposed, bool back)
{
    mode m = mode_of(block_batch, k);
    int64_t shape[4] = {blocks, m.size, m.outer, m.inner};
    int64_t plain_strides[4] = {stride, m.inner, m.size * m.inner, 1};
    int64_t transposed_strides[4] = {stride, m.outer * m.inner, m.inner, 1};
    tch_array a = {plain, block_batch->real, 4, shape, plain_strides};
    tch_array b = {transposed, block_batch->real, 4, shape, transposed_strides};
    return optimizer->context->backend->matrix->copy(optimizer->context->state, back ? &a : &b, back ? &b : &a);
}

static tch_status update_factor(tch_optimizer *o, const tchi_run *run, int32_t k, const tch_matrices *blocks,
                                void *spare, const tch_clock *clock)
{
    mode m = mode_of(run->block_batch, k);
    tch_matrices c = kept_of(o, run, k, TCHI_FACTORS);
    bool by_columns = m.inner == 1 && m.outer > 1;
    tch_blocks a = {by_columns ? view(blocks, m.outer, m.size) : view(blocks, m.size, m.inner), NULL};
    if (run->block_batch->order == 1) { /* a row vector: its Gram matrix is the outer product */
        by_columns = true;
        a.matrices = view(blocks, 1, m.size);
    }
    if (m.inner > 1 && m.outer > 1) {
        TCHI_TRY(tchi_transpose_blocks(o, run->block_batch, k, blocks->stride, run->count, blocks->data, spare, false));
        a.matrices = view(blocks, m.size, m.outer * m.inner);
        a.matrices.data = spare;
    }
    const tch_factor_update how = {.clock = clock,
                                   .rows = by_columns ? NULL : &c,
                                   .columns = by_columns ? &c : NULL,
                                   .rounded = is_rounded(o, run->block_batch),
                                   .room = o->unpacked};
    return o->context->backend->update->update_factors(o->context->state, &a, &how);
}

/* Scratch is the part of the workspace that roots leave free; when it changes, recordings are renewed. */
static tch_status update_both(tch_optimizer *o, const tchi_run *run, const tch_blocks *gradients,
                              const tch_clock *clock)
{
    const tch_context *context = o->context;
    tch_matrices rows = kept_of(o, run, 0, TCHI_FACTORS);
    tch_matrices columns = kept_of(o, run, 1, TCHI_FACTORS);
    void *scratch = o->lends_workspace ? context->workspace : NULL;
    const tch_factor_update how = {.clock = clock,
                                   .rows = &rows,
                                   .columns = &columns,
                                   .rounded = is_rounded(o, run->block_batch),
                                   .room = o->unpacked,
                                   .scratch = scratch,
                                   .scratch_bytes = scratch != NULL ? context->workspace_bytes : 0};
    return context->backend->update->update_factors(context->state, gradients, &how);
}

tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tch_blocks *gradients,
                                   void *spare, const tch_clock *clock)
{
    if (has_both_sides(run->block_batch)) {
        return update_both(optimizer, run, gradients, clock);
    }
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        if (run->block_batch->factor_batch[k] >= 0) {
            TCHI_TRY(update_factor(optimizer, run, k, &gradients->matrices, spare, clock));
        }
    }
    return TCH_OK;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

static tch_status multiply_one_side(tch_optimizer *o, const tch_preconditioner *p, const tch_matrices *x,
                                    const tch_matrices *y)
{
    const tch_blocks blocks = {*x, NULL};
    return o->context->backend->update->precondition(o->context->state, p, &blocks, NULL, y, NULL);
}

/* A dimension between others: block after block, with the outer dimensions as a batch that shares one matrix. */
static tch_status multiply_middle(tch_optimizer *o, const tchi_run *run, tch_preconditioner p, int32_t k,
                                  const tch_matrices *from, void *to)
{
    mode m = mode_of(run->block_batch, k);
    const tchi_factor_batch *f = tchi_factor_batch_at(o, run->block_batch->factor_batch[k]);
    tch_matrices all;
    TCHI_TRY(tchi_matrices_open(o, f, TCHI_ROOTS, run->block_batch->position[k] + run->first, run->count, o->unpacked,
                                &all));
    for (int64_t b = 0; b < run->count; b++) {
        int64_t at = b * from->stride * tchi_scalar_size(from->type);
        tch_matrices shared = tchi_matrices_part(&all, b, 1);
        shared.stride = 0;
        shared.batch = m.outer;
        tch_matrices x = {(char *)from->data + at, from->type, m.size, m.inner, m.inner, m.outer, m.size * m.inner};
        tch_matrices y = x;
        y.data = (char *)to + at;
        p.left = &shared;
        TCHI_TRY(multiply_one_side(o, &p, &x, &y));
    }
    return TCH_OK;
}

/* Along dimension k: new(.., i, ..) = sum over j of c(i, j) old(.., j, ..), with c(j, i) when rotating out of bases. */
static tch_status multiply_along(tch_optimizer *o, const tchi_run *run, tch_preconditioner p, int32_t k,
                                 const tch_matrices *from, void *to)
{
    mode m = mode_of(run->block_batch, k);
    tch_matrices side = kept_of(o, run, k, TCHI_ROOTS);
    if (m.kind == BETWEEN) {
        return multiply_middle(o, run, p, k, from, to);
    }
    bool columns = m.kind == ALONG_COLUMNS;
    tch_matrices x = columns ? view(from, m.outer, m.size) : view(from, m.size, m.inner);
    tch_matrices y = x;
    y.data = to;
    p.left = columns ? NULL : &side;
    p.right = columns ? &side : NULL;
    return multiply_one_side(o, &p, &x, &y);
}

static tch_status multiply_each(tch_optimizer *o, const tchi_run *run, const tch_preconditioner *p, tch_matrices *y,
                                void **other, double *norms)
{
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        if (run->block_batch->factor_batch[k] >= 0) {
            TCHI_TRY(multiply_along(o, run, *p, k, y, *other));
            void *swap = y->data;
            y->data = *other;
            *other = swap;
        }
    }
    return norms == NULL ? TCH_OK
                         : o->context->backend->matrix->reduce(o->context->state, TCH_REDUCE_FROBENIUS, y, norms);
}

static double whitening_scale(const tchi_block_batch *block_batch, int32_t k)
{
    return sqrt((double)block_batch->size[k] / (double)block_batch->elements);
}

static tch_status update_whitened_side(tch_optimizer *o, const tchi_run *run, int32_t k, const tch_blocks *gradients,
                                       void *product, const tch_clock *clock)
{
    tch_matrices factor = kept_of(o, run, k, TCHI_FACTORS);
    tch_matrices root = kept_of(o, run, 1 - k, TCHI_ROOTS);
    const tch_factor_update how = {.clock = clock,
                                   .rows = k == 0 ? &factor : NULL,
                                   .columns = k == 1 ? &factor : NULL,
                                   .rounded = is_rounded(o, run->block_batch),
                                   .room = o->unpacked,
                                   .root = &root,
                                   .scale = whitening_scale(run->block_batch, k),
                                   .product = product};
    return o->context->backend->update->update_factors(o->context->state, gradients, &how);
}

tch_status tchi_run_update_whitened_factor(tch_optimizer *optimizer, const tchi_run *run, int32_t k,
                                           const tch_blocks *gradients, void *const buffers[2], const tch_clock *clock)
{
    const tchi_block_batch *c = run->block_batch;
    const tch_preconditioner p = {
        .sides = TCH_SIDES_ROOTS, .room = optimizer->unpacked, .rounded = is_rounded(optimizer, c)};
    tch_matrices u = gradients->matrices;
    int others = 0;
    if (has_both_sides(c)) {
        return update_whitened_side(optimizer, run, k, gradients, buffers[0], clock);
    }
    if (c->factor_batch[k] < 0) {
        return TCH_OK;
    }
    for (int32_t j = 0; j < c->order; j++) {
        if (j != k && c->factor_batch[j] >= 0) {
            void *to = buffers[others++ % 2];
            TCHI_TRY(multiply_along(optimizer, run, p, j, &u, to));
            u.data = to;
        }
    }
    tch_matrices scaled = u;
    scaled.data = buffers[others == 0 ? 0 : (others - 1) % 2];
    TCHI_TRY(optimizer->context->backend->matrix->combine(optimizer->context->state, 0.0, whitening_scale(c, k), &u,
                                                          0.0, NULL, &scaled));
    return update_factor(optimizer, run, k, &scaled, buffers[others == 0 ? 1 : others % 2], clock);
}

tch_status tchi_run_precondition(tch_optimizer *optimizer, const tchi_run *run, tch_sides sides, tch_blocks *blocks,
                                 void **other, double *norms)
{
    const tchi_block_batch *c = run->block_batch;
    tchi_work work = tchi_work_of(c, c->real);
    tch_matrices y = tchi_work_matrices(&work, blocks->matrices.data, run->count);
    tch_preconditioner p = {.sides = sides, .room = optimizer->unpacked, .rounded = is_rounded(optimizer, c)};
    if (has_both_sides(c)) {
        tch_matrices left = kept_of(optimizer, run, 0, TCHI_ROOTS);
        tch_matrices right = kept_of(optimizer, run, 1, TCHI_ROOTS);
        p.left = &left;
        p.right = &right;
        TCHI_TRY(optimizer->context->backend->update->precondition(optimizer->context->state, &p, blocks, *other, &y,
                                                                   norms));
    } else {
        TCHI_TRY(multiply_each(optimizer, run, &p, &y, other, norms));
    }
    *blocks = (tch_blocks){y, NULL};
    return TCH_OK;
}

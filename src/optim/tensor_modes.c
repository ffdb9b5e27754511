/* See tensor_modes.h. */
#include "tensor_modes.h"

#include "core/status.h"
#include "linalg/algebra.h"

#include "packed.h"

/* The matrices of a factor batch that belong to dimension `k` of a run's blocks. */
static const tchi_factor_batch *of_run(const tch_optimizer *o, const tchi_run *run, int32_t k, int64_t *first)
{
    *first = run->block_batch->position[k] + run->first;
    return tchi_factor_batch_at(o, run->block_batch->factor_batch[k]);
}

/* Blocks are matrices with the dimension along their rows or their columns, or neither. A matrix whose rows have gaps
 * between them is seen in its own two dimensions only, however small they are. */
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

static bool rounded(const tch_optimizer *o, const tchi_block_batch *block_batch)
{
    return tchi_group_at(o, block_batch->group)->config.precision == TCH_PRECISION_HIGH &&
           block_batch->real == TCH_SCALAR_F32;
}

/* Blocks as matrices of size by inner (outer = 1), or of outer by size. */
static tch_matrices view(const tchi_work *work, void *buffer, int64_t rows, int64_t cols, int64_t blocks)
{
    int64_t ld = rows == work->rows && cols == work->cols ? work->ld : cols;
    return (tch_matrices){buffer, work->type, rows, cols, ld, blocks, work->stride};
}

/* --- factors ----------------------------------------------------------------------------------------------------- */

tch_status tchi_turn_blocks(tch_optimizer *optimizer, const tchi_block_batch *block_batch, int32_t k, int64_t stride,
                            int64_t blocks, void *plain, void *turned, bool back)
{
    mode m = mode_of(block_batch, k);
    int64_t shape[4] = {blocks, m.size, m.outer, m.inner};
    int64_t plain_strides[4] = {stride, m.inner, m.size * m.inner, 1};
    int64_t turned_strides[4] = {stride, m.outer * m.inner, m.inner, 1};
    tch_array a = {plain, block_batch->real, 4, shape, plain_strides};
    tch_array b = {turned, block_batch->real, 4, shape, turned_strides};
    return optimizer->context->backend->matrix->copy(optimizer->context->state, back ? &a : &b, back ? &b : &a);
}

static tch_status update_factor(tch_optimizer *o, const tchi_run *run, const tchi_work *work, int32_t k, void *buffer,
                                void *spare, const tch_clock *clock)
{
    mode m = mode_of(run->block_batch, k);
    int64_t first;
    const tchi_factor_batch *f = of_run(o, run, k, &first);
    tch_matrices c;
    int32_t transpose = m.inner == 1 && m.outer > 1;
    tch_matrices a =
        transpose ? view(work, buffer, m.outer, m.size, run->count) : view(work, buffer, m.size, m.inner, run->count);
    if (run->block_batch->order == 1) { /* a row of numbers: its Gram matrix has their products */
        transpose = 1;
        a = view(work, buffer, 1, m.size, run->count);
    }
    if (m.inner > 1 && m.outer > 1) {
        TCHI_TRY(tchi_turn_blocks(o, run->block_batch, k, work->stride, run->count, buffer, spare, false));
        a = view(work, spare, m.size, m.outer * m.inner, run->count);
    }
    TCHI_TRY(tchi_matrices_open(o, f, TCHI_FACTORS, first, run->count, o->unpacked, &c));
    TCHI_TRY(o->context->backend->update->factor_update(o->context->state, &a, transpose, clock,
                                                        rounded(o, run->block_batch), &c));
    return tchi_matrices_close(o, f, TCHI_FACTORS, first, &c);
}

static bool is_matrix_with_both(const tchi_block_batch *c)
{
    return c->order == 2 && c->size[0] > 1 && c->size[1] > 1 && c->factor_batch[0] >= 0 && c->factor_batch[1] >= 0;
}

/* Matrices with both factors, on a backend that gains by updating the two together. */
static bool has_pair(const tch_optimizer *o, const tchi_block_batch *c)
{
    return o->context->backend->update->factors_update != NULL && is_matrix_with_both(c);
}

/* The factors or roots of a run, along rows and along columns, where they lie or will be unpacked to, one side behind
 * the other. */
static void place_both(tch_optimizer *o, const tchi_run *run, tchi_matrix_kind which, tch_matrices both[2])
{
    char *room = o->unpacked;
    for (int32_t k = 0; k < 2; k++) {
        int64_t first;
        const tchi_factor_batch *f = of_run(o, run, k, &first);
        both[k] = tchi_matrices_place(f, which, first, run->count, room);
        room += tchi_is_packed(f, which) ? run->count * both[k].stride * tchi_scalar_size(f->real) : 0;
    }
}

static tch_status open_both(tch_optimizer *o, const tchi_run *run, tchi_matrix_kind which, tch_matrices both[2])
{
    place_both(o, run, which, both);
    for (int32_t k = 0; k < 2; k++) {
        int64_t first;
        const tchi_factor_batch *f = of_run(o, run, k, &first);
        TCHI_TRY(tchi_matrices_open(o, f, which, first, run->count, both[k].data, &both[k]));
    }
    return TCH_OK;
}

static tch_status close_both(tch_optimizer *o, const tchi_run *run, tchi_matrix_kind which, const tch_matrices both[2])
{
    for (int32_t k = 0; k < 2; k++) {
        int64_t first;
        const tchi_factor_batch *f = of_run(o, run, k, &first);
        TCHI_TRY(tchi_matrices_close(o, f, which, first, &both[k]));
    }
    return TCH_OK;
}

/* The factors of a run as they are kept, which the backend has said it takes together with blocks of float16. */
static void kept_both(tch_optimizer *o, const tchi_run *run, tch_matrices both[2])
{
    for (int32_t k = 0; k < 2; k++) {
        int64_t first;
        const tchi_factor_batch *f = of_run(o, run, k, &first);
        both[k] = tchi_matrices_place(f, TCHI_FACTORS, first, run->count, tchi_kept_at(f, TCHI_FACTORS, first));
        if (tchi_is_packed(f, TCHI_FACTORS)) {
            both[k].ld = 0;
            both[k].stride = tchi_kept_elements(f, TCHI_FACTORS);
        }
    }
}

/* The workspace that roots have left is scratch for it. Recordings of ours are made anew when it changes. */
static tch_status update_pair(tch_optimizer *o, const tchi_run *run, const tchi_work *work, void *buffer,
                              const uint32_t *largest, const tch_clock *clock)
{
    const tch_context *context = o->context;
    tch_matrices a = view(work, buffer, run->block_batch->size[0], run->block_batch->size[1], run->count);
    tch_matrices c[2];
    void *scratch = o->lends_workspace ? context->workspace : NULL;
    bool kept = a.type == TCH_SCALAR_F16;
    if (kept) {
        kept_both(o, run, c);
    } else {
        TCHI_TRY(open_both(o, run, TCHI_FACTORS, c));
    }
    TCHI_TRY(context->backend->update->factors_update(context->state, &a, largest, clock, rounded(o, run->block_batch),
                                                      &c[0], &c[1], scratch,
                                                      scratch != NULL ? context->workspace_bytes : 0));
    return kept ? TCH_OK : close_both(o, run, TCHI_FACTORS, c);
}

tch_status tchi_run_update_factors(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *buffer,
                                   void *spare, const uint32_t *largest, const tch_clock *clock)
{
    if (has_pair(optimizer, run->block_batch)) {
        return update_pair(optimizer, run, work, buffer, largest, clock);
    }
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        if (run->block_batch->factor_batch[k] >= 0) {
            TCHI_TRY(update_factor(optimizer, run, work, k, buffer, spare, clock));
        }
    }
    return TCH_OK;
}

/* --- products ---------------------------------------------------------------------------------------------------- */

static tch_status multiply(tch_optimizer *o, const tchi_block_batch *block_batch, const tch_matrices *a,
                           int32_t transpose_a, const tch_matrices *b, int32_t transpose_b, const tch_matrices *c)
{
    const tch_backend *t = o->context->backend;
    return rounded(o, block_batch) && t->matrix->gemm_rounded != NULL
               ? t->matrix->gemm_rounded(o->context->state, 1.0, a, transpose_a, b, transpose_b, 0.0, c)
               : t->matrix->gemm(o->context->state, 1.0, a, transpose_a, b, transpose_b, 0.0, c);
}

/* Dimensions with others on both sides: block after block, its outer ones being a batch that shares one matrix. */
static tch_status multiply_middle(tch_optimizer *o, const tchi_run *run, const tchi_work *work, const mode *m,
                                  const tch_matrices *x, int32_t transpose, char *from, char *to)
{
    int64_t step = m->size * m->inner;
    for (int64_t b = 0; b < run->count; b++) {
        int64_t at = b * work->stride * tchi_scalar_size(work->type);
        tch_matrices one = tchi_matrices_part(x, b, 1);
        one.stride = 0;
        one.batch = m->outer;
        tch_matrices in = {from + at, work->type, m->size, m->inner, m->inner, m->outer, step};
        tch_matrices out = {to + at, work->type, m->size, m->inner, m->inner, m->outer, step};
        TCHI_TRY(multiply(o, run->block_batch, &one, transpose, &in, 0, &out));
    }
    return TCH_OK;
}

/* Along dimension k: new(.., i, ..) = sum over j of x(i, j) old(.., j, ..), or x(j, i) where transposed. */
static tch_status multiply_along(tch_optimizer *o, const tchi_run *run, const tchi_work *work, int32_t k,
                                 int32_t transpose, void *from, void *to)
{
    mode m = mode_of(run->block_batch, k);
    int64_t first;
    const tchi_factor_batch *f = of_run(o, run, k, &first);
    tch_matrices x;
    TCHI_TRY(tchi_matrices_open(o, f, TCHI_ROOTS, first, run->count, o->unpacked, &x));
    if (m.kind == BETWEEN) {
        return multiply_middle(o, run, work, &m, &x, transpose, from, to);
    }
    if (m.kind == ALONG_COLUMNS) {
        tch_matrices in = view(work, from, m.outer, m.size, run->count);
        tch_matrices out = view(work, to, m.outer, m.size, run->count);
        return multiply(o, run->block_batch, &in, 0, &x, !transpose, &out);
    }
    tch_matrices in = view(work, from, m.size, m.inner, run->count);
    tch_matrices out = view(work, to, m.size, m.inner, run->count);
    return multiply(o, run->block_batch, &x, transpose, &in, 0, &out);
}

/* Matrices with roots or bases on both sides, on a backend that has a way for the two. */
static bool has_sides(const tch_optimizer *o, const tchi_block_batch *c)
{
    return rounded(o, c) && o->context->backend->update->two_sided != NULL && is_matrix_with_both(c);
}

static tch_status multiply_both(tch_optimizer *o, const tchi_run *run, tch_sides sides, const tch_matrices *x,
                                const uint32_t *largest, void *other, const tch_matrices *y, double *norms)
{
    tch_matrices side[2];
    TCHI_TRY(open_both(o, run, TCHI_ROOTS, side));
    return o->context->backend->update->two_sided(o->context->state, sides, &side[0], &side[1], x, largest, other, y,
                                                  norms);
}

bool tchi_run_takes_halves(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, void *result)
{
    const tch_update_ops *t = optimizer->context->backend->update;
    tch_matrices y = tchi_work_matrices(work, result, run->count);
    tch_matrices factors[2];
    tch_matrices roots[2];
    if (t->gather_halves == NULL || !has_pair(optimizer, run->block_batch) || !has_sides(optimizer, run->block_batch)) {
        return false;
    }
    kept_both(optimizer, run, factors);
    place_both(optimizer, run, TCHI_ROOTS, roots);
    return t->halves_take(optimizer->context->state, &factors[0], &factors[1], &roots[0], &roots[1], &y) != 0;
}

tch_status tchi_run_multiply_halves(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *halves,
                                    tch_sides sides, void *blocks, const uint32_t *largest, void *other,
                                    const tchi_work *work, void *result, double *norms)
{
    tch_matrices x = tchi_work_matrices(halves, blocks, run->count);
    tch_matrices y = tchi_work_matrices(work, result, run->count);
    return multiply_both(optimizer, run, sides, &x, largest, other, &y, norms);
}

tch_status tchi_run_multiply(tch_optimizer *optimizer, const tchi_run *run, const tchi_work *work, tch_sides sides,
                             const uint32_t *largest, void **from, void **to, double *norms)
{
    bool transpose = sides == TCH_SIDES_OUT_OF_BASES;
    if (has_sides(optimizer, run->block_batch)) {
        tch_matrices x = tchi_work_matrices(work, *from, run->count);
        return multiply_both(optimizer, run, sides, &x, largest, *to, &x, norms);
    }
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        if (run->block_batch->factor_batch[k] < 0) {
            continue;
        }
        TCHI_TRY(multiply_along(optimizer, run, work, k, transpose, *from, *to));
        void *swap = *from;
        *from = *to;
        *to = swap;
    }
    tch_matrices result = tchi_work_matrices(work, *from, run->count);
    return norms == NULL ? TCH_OK
                         : optimizer->context->backend->matrix->reduce(optimizer->context->state, TCH_REDUCE_FROBENIUS,
                                                                       &result, norms);
}

/* See packed.h. */
#include "packed.h"

#include "core/arith.h"
#include "core/context.h"
#include "core/status.h"

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

tch_matrices tchi_matrices_kept(const tchi_factor_batch *f, tchi_matrix_kind kind, int64_t first, int64_t count)
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

/* Before the work buffers are there, so one after the other. */
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

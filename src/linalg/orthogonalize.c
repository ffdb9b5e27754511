/* tch_orthogonalize: the caller's tensors a part of the batch at a time, on the side where X X' is small. The iteration
 * itself is newton_schulz.c. */
#include "orthogonalize.h"

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

/* Only to keep a zero matrix from being divided by zero: any other is divided by its norm, which is no less than the
 * smallest number of its type. */
static double smallest_norm(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? 0x1p-1074 : 0x1p-200;
}

static tch_matrices layout(tchi_arena *arena, const tchi_batch *a, const tchi_ortho *ortho, tch_scalar type,
                           int64_t count, void **scratch)
{
    tch_matrices x = tchi_scratch_aligned(arena, type, count, a->rows, a->cols);
    *scratch = tchi_arena_take(arena, tchi_orthogonalize_bytes(ortho, &x));
    return x;
}

static tch_status ortho_part(tch_context *context, const tchi_batch *a, const tchi_batch *out, const tchi_ortho *ortho,
                             int64_t first, int64_t count)
{
    void *scratch;
    tchi_arena arena = {0};
    tch_scalar type = tchi_ortho_type(context, a->type);
    (void)layout(&arena, a, ortho, type, count, &scratch);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    tch_matrices x = layout(&arena, a, ortho, type, count, &scratch);
    tch_matrices result;
    TCHI_TRY(tchi_batch_read(context, a, first, &x));
    TCHI_TRY(tchi_orthogonalize_blocks(context, ortho, &x, a->count, scratch, &result));
    return tchi_batch_write(context, out, first, &result);
}

static tch_status check_call(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             const tch_tensor *out)
{
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    if (steps < 1 || steps > TCHI_ORTHO_MOST_STEPS) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "steps is %d, expected 1 to %d", steps, TCHI_ORTHO_MOST_STEPS);
    }
    if (method < TCH_ORTHO_POLAR_EXPRESS || method > TCH_ORTHO_MINIMAX) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "method is %d, expected one of tch_ortho_method", (int)method);
    }
    return TCH_OK;
}

tch_status tch_orthogonalize(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             tch_tensor *out)
{
    TCHI_ENTER(context, "tch_orthogonalize");
    TCHI_TRY(check_call(context, a, steps, method, out));
    tchi_batch from = tchi_batch_of(a, 2);
    tchi_batch to = tchi_batch_of(out, 2);
    if (from.rows == 0 || from.cols == 0) {
        return TCH_OK;
    }
    if (from.rows > from.cols) {
        from = tchi_batch_transposed(from);
        to = tchi_batch_transposed(to);
    }
    tch_scalar type = tchi_ortho_type(context, from.type);
    tchi_ortho ortho = tchi_ortho_of(method, steps, smallest_norm(type));
    void *scratch;
    tchi_arena one = {0};
    (void)layout(&one, &from, &ortho, type, 1, &scratch);
    int64_t chunk = tchi_arena_fit(context, from.count, one.used, 0);
    for (int64_t first = 0; first < from.count; first += chunk) {
        int64_t count = from.count - first < chunk ? from.count - first : chunk;
        TCHI_TRY(ortho_part(context, &from, &to, &ortho, first, count));
    }
    return TCH_OK;
}

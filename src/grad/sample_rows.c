/* Rows of samples: see sample_rows.h. Copies go through the table's `copy`, which takes any strides. */
#include "sample_rows.h"

#include "core/status.h"

bool tchi_rows_in_place(const tch_tensor *tensor, tch_scalar type)
{
    int64_t expected = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != 1 && tchi_tensor_stride(tensor, i) != expected) {
            return false;
        }
        expected *= tensor->shape[i];
    }
    return tchi_scalar_of(tensor->dtype) == type;
}

static char *address_of(const tch_tensor *tensor, int64_t first)
{
    int64_t size = tchi_scalar_size(tchi_scalar_of(tensor->dtype));
    return (char *)tchi_tensor_data(tensor) + first * tchi_tensor_stride(tensor, 0) * size;
}

tch_matrices tchi_rows_place(const tch_tensor *tensor, tch_scalar type, tchi_arena *arena, int64_t first, int64_t count)
{
    int64_t cols = tchi_tensor_count(tensor, 1, tensor->ndim);
    if (tchi_rows_in_place(tensor, type)) {
        return tchi_matrices_new(address_of(tensor, first), type, 1, count, cols);
    }
    int64_t bytes;
    if (__builtin_mul_overflow(count, cols * tchi_scalar_size(type), &bytes)) {
        bytes = INT64_MAX; /* reserving it will fail */
    }
    return tchi_matrices_new(tchi_arena_take(arena, bytes), type, 1, count, cols);
}

/* The same rows on both sides, as arrays of the tensor's rank. */
typedef struct both_sides {
    int64_t shape[TCH_MAX_RANK], theirs[TCH_MAX_RANK], ours[TCH_MAX_RANK];
    tch_array outside, inside;
} both_sides;

static void look_at(both_sides *s, const tch_tensor *tensor, int64_t first, const tch_matrices *rows)
{
    int64_t stride = 1;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        s->shape[i] = i == 0 ? rows->rows : tensor->shape[i];
        s->theirs[i] = tchi_tensor_stride(tensor, i);
        s->ours[i] = stride;
        stride *= s->shape[i];
    }
    s->outside =
        (tch_array){address_of(tensor, first), tchi_scalar_of(tensor->dtype), tensor->ndim, s->shape, s->theirs};
    s->inside = (tch_array){rows->data, rows->type, tensor->ndim, s->shape, s->ours};
}

tch_status tchi_rows_read(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows)
{
    both_sides s;
    if (tchi_rows_in_place(tensor, rows->type) || rows->rows == 0 || rows->cols == 0) {
        return TCH_OK;
    }
    look_at(&s, tensor, first, rows);
    return context->backend->matrix->copy(context->state, &s.inside, &s.outside);
}

tch_status tchi_rows_write(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows)
{
    both_sides s;
    if (tchi_rows_in_place(tensor, rows->type) || rows->rows == 0 || rows->cols == 0) {
        return TCH_OK;
    }
    look_at(&s, tensor, first, rows);
    return context->backend->matrix->copy(context->state, &s.outside, &s.inside);
}

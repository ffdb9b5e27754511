#include "tensor_rows.h"

#include "core/status.h"

#include "linalg/batch.h"

/* --- parameters --------------------------------------------------------------------------------------------------- */

static bool is_plain(const tchi_parameter *p, bool per_sample, int64_t samples)
{
    int64_t step = 1;
    for (int32_t i = p->rank - 1; i >= 0; i--) {
        if (p->sizes[i] > 1 && p->strides[i] != step) {
            return false;
        }
        step *= p->sizes[i];
    }
    return !per_sample || samples <= 1 || p->sample_stride == step || (p->groups == 1 && p->sample_stride > step);
}

tchi_parameter tchi_parameter_of(const tch_tensor *tensor, bool per_sample, int64_t groups, int64_t rows, int64_t cols)
{
    int32_t leading = per_sample ? 1 : 0;
    if (tensor == NULL) {
        return (tchi_parameter){0};
    }
    tchi_parameter p = {.given = true, .data = tchi_tensor_data(tensor), .type = tchi_scalar_of(tensor->dtype)};
    p.groups = groups;
    p.rows = rows;
    p.cols = cols;
    p.sample_stride = per_sample ? tchi_tensor_stride(tensor, 0) : 0;
    p.rank = tensor->ndim - leading;
    for (int32_t i = 0; i < p.rank; i++) {
        p.sizes[i] = tensor->shape[leading + i];
        p.strides[i] = tchi_tensor_stride(tensor, leading + i);
    }
    p.plain = is_plain(&p, per_sample, per_sample ? tensor->shape[0] : 1);
    return p;
}

static char *parameter_address(const tchi_parameter *p, int64_t first)
{
    return (char *)p->data + first * p->sample_stride * tchi_scalar_size(p->type);
}

tch_matrices tchi_parameter_place(const tchi_parameter *p, tchi_arena *arena, tch_scalar type, int64_t first,
                                  int64_t count)
{
    if (!p->given) {
        return (tch_matrices){0};
    }
    if (!p->plain || p->type != type) {
        return tchi_scratch_matrices(arena, type, count * p->groups, p->rows, p->cols);
    }
    tch_matrices m = tchi_matrices_new(parameter_address(p, first), type, count * p->groups, p->rows, p->cols);
    if (p->groups == 1 && count > 1) {
        m.stride = p->sample_stride;
    }
    return m;
}

typedef enum direction { READ, WRITE } direction;

static tch_status copy_parameter(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m,
                                 direction dir)
{
    int64_t shape[TCH_MAX_RANK + 1] = {p->groups > 0 ? m->batch / p->groups : 0};
    int64_t theirs[TCH_MAX_RANK + 1] = {p->sample_stride};
    int64_t ours[TCH_MAX_RANK + 1] = {p->groups * m->stride};
    if (!p->given || m->data == parameter_address(p, first) || m->batch == 0 || m->rows == 0 || m->cols == 0) {
        return TCH_OK;
    }
    int64_t step = 1;
    for (int32_t i = p->rank; i >= 1; i--) {
        shape[i] = p->sizes[i - 1];
        theirs[i] = p->strides[i - 1];
        ours[i] = step;
        step *= shape[i];
    }
    int32_t skip = p->sample_stride == 0 ? 1 : 0; /* a single parameter may have the maximum rank */
    tch_array outside = {parameter_address(p, first), p->type, p->rank + 1 - skip, shape + skip, theirs + skip};
    tch_array inside = {m->data, m->type, p->rank + 1 - skip, shape + skip, ours + skip};
    return dir == READ ? context->backend->matrix->copy(context->state, &inside, &outside)
                       : context->backend->matrix->copy(context->state, &outside, &inside);
}

tch_status tchi_parameter_read(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m)
{
    return copy_parameter(context, p, first, m, READ);
}

tch_status tchi_parameter_write(tch_context *context, const tchi_parameter *p, int64_t first, const tch_matrices *m)
{
    return copy_parameter(context, p, first, m, WRITE);
}

/* --- rows of samples ---------------------------------------------------------------------------------------------- */

static bool rows_in_place(const tch_tensor *tensor, tch_scalar type)
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
    if (rows_in_place(tensor, type)) {
        return tchi_matrices_new(address_of(tensor, first), type, 1, count, cols);
    }
    int64_t bytes;
    if (__builtin_mul_overflow(count, cols * tchi_scalar_size(type), &bytes)) {
        bytes = INT64_MAX; /* reserving it will fail */
    }
    return tchi_matrices_new(tchi_arena_take(arena, bytes), type, 1, count, cols);
}

tch_status tchi_rows_read(tch_context *context, const tch_tensor *tensor, int64_t first, const tch_matrices *rows)
{
    int64_t shape[TCH_MAX_RANK];
    int64_t theirs[TCH_MAX_RANK];
    int64_t ours[TCH_MAX_RANK];
    int64_t stride = 1;
    if (rows_in_place(tensor, rows->type) || rows->rows == 0 || rows->cols == 0) {
        return TCH_OK;
    }
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        shape[i] = i == 0 ? rows->rows : tensor->shape[i];
        theirs[i] = tchi_tensor_stride(tensor, i);
        ours[i] = stride;
        stride *= shape[i];
    }
    tch_array outside = {address_of(tensor, first), tchi_scalar_of(tensor->dtype), tensor->ndim, shape, theirs};
    tch_array inside = {rows->data, rows->type, tensor->ndim, shape, ours};
    return context->backend->matrix->copy(context->state, &inside, &outside);
}

tch_matrices tchi_each_row(const tch_matrices *rows)
{
    return (tch_matrices){rows->data, rows->type, 1, rows->cols, rows->cols > 0 ? rows->cols : 1, rows->rows, rows->ld};
}

tch_status tchi_rows_dots(tch_context *context, const tch_matrices *rows, const tch_matrices *direction, double scale,
                          double *dots, void *scratch)
{
    tch_matrices x = tchi_each_row(rows);
    tch_matrices y = x;
    if (rows->rows == 0 || rows->cols == 0) {
        return TCH_OK;
    }
    if (direction != NULL) {
        y.data = direction->data;
        y.stride = 0;
    }
    return context->backend->sample->pair_dots(context->state, &x, &y, 1, scale, dots, scratch);
}

tch_status tchi_rows_sum(tch_context *context, const tch_matrices *rows, const double *weights, double scale,
                         double beta, const tch_matrices *out, void *scratch)
{
    const tch_backend *t = context->backend;
    tch_matrices sum = tchi_matrices_new(out->data, out->type, 1, 1, rows->cols);
    if (rows->cols == 0) {
        return TCH_OK;
    }
    if (rows->rows == 0) {
        return t->matrix->combine(context->state, 0.0, beta, beta == 0.0 ? NULL : &sum, 0.0, NULL, &sum);
    }
    if (weights != NULL) {
        tch_matrices each = tchi_each_row(rows);
        TCHI_TRY(t->sample->weigh_samples(context->state, &each, 1, weights, 0, &each));
    }
    return t->sample->sample_sums(context->state, rows, scale, beta, &sum, scratch);
}

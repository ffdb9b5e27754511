/* Public symmetric products. */
#include <torchium/linalg.h>

#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

/* A, B and C of a call, and the current part of the batch as matrices x, y and z. */
typedef struct half_product {
    tchi_batch a, b, c;
    tch_matrices x, y, z;
    tch_scalar type;
    bool has_b;
    bool in_place[3];
} half_product;

static void layout_operands(half_product *h, tchi_arena *arena, int64_t first, int64_t count)
{
    h->x = tchi_batch_place(&h->a, arena, h->type, first, count, &h->in_place[0]);
    h->y = h->x;
    h->in_place[1] = true;
    if (h->has_b) {
        h->y = tchi_batch_place(&h->b, arena, h->type, first, count, &h->in_place[1]);
    }
    h->z = tchi_batch_place(&h->c, arena, h->type, first, count, &h->in_place[2]);
}

static tch_status multiply_part(tch_context *context, half_product *h, int64_t first, int64_t count, double alpha,
                                int32_t transpose, double beta)
{
    tchi_arena arena = {0};
    layout_operands(h, &arena, first, count);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout_operands(h, &arena, first, count);
    if (!h->in_place[0]) {
        TCHI_TRY(tchi_batch_read(context, &h->a, first, &h->x));
    }
    if (!h->in_place[1]) {
        TCHI_TRY(tchi_batch_read(context, &h->b, first, &h->y));
    }
    if (beta != 0.0 && !h->in_place[2]) {
        TCHI_TRY(tchi_batch_read(context, &h->c, first, &h->z));
    }
    TCHI_TRY(h->has_b ? tchi_symmetric_product(context, &h->x, &h->y, &h->z)
                      : tchi_gram(context, alpha, &h->x, transpose, beta, &h->z));
    return h->in_place[2] ? TCH_OK : tchi_batch_write(context, &h->c, first, &h->z);
}

static tch_status multiply_in_parts(tch_context *context, half_product *h, double alpha, int32_t transpose, double beta)
{
    int64_t size = tchi_scalar_size(h->type);
    int64_t each = (h->a.rows * h->a.cols * (h->has_b ? 2 : 1) + h->c.rows * h->c.cols) * size + 3 * 256;
    int64_t chunk = tchi_arena_fit(context, h->c.count, each, 0);
    for (int64_t first = 0; first < h->c.count; first += chunk) {
        int64_t count = h->c.count - first < chunk ? h->c.count - first : chunk;
        TCHI_TRY(multiply_part(context, h, first, count, alpha, transpose, beta));
    }
    return TCH_OK;
}

tch_status tch_symmetric_product(tch_context *context, const tch_tensor *a, const tch_tensor *b, tch_tensor *out)
{
    TCHI_ENTER(context, "tch_symmetric_product");
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_square(a, "a"));
    TCHI_TRY(tchi_check_input(context, b, "b"));
    TCHI_TRY(tchi_check_same_dtype(b, "b", a, "a"));
    TCHI_TRY(tchi_check_same_shape(b, "b", a));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    TCHI_TRY(tchi_check_disjoint(out, "out", b, "b"));
    half_product h = {tchi_batch_of(a, 2), tchi_batch_of(b, 2), tchi_batch_of(out, 2), .has_b = true};
    h.type = tchi_compute_type(h.a.type);
    return multiply_in_parts(context, &h, 1.0, 0, 0.0);
}

tch_status tch_gram(tch_context *context, double alpha, const tch_tensor *a, int32_t transpose, double beta,
                    tch_tensor *out)
{
    TCHI_ENTER(context, "tch_gram");
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_output(context, out, "out"));
    TCHI_TRY(tchi_check_same_dtype(out, "out", a, "a"));
    int64_t shape[TCH_MAX_RANK];
    memcpy(shape, a->shape, (size_t)a->ndim * sizeof *shape);
    shape[a->ndim - 2] = shape[a->ndim - 1] = a->shape[a->ndim - (transpose ? 1 : 2)];
    TCHI_TRY(tchi_check_shape(out, "out", a->ndim, shape));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    half_product h = {.a = tchi_batch_of(a, 2), .c = tchi_batch_of(out, 2)};
    h.type = tchi_compute_type(h.a.type);
    return multiply_in_parts(context, &h, alpha, transpose != 0, beta);
}

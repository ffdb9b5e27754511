#include "algebra.h"

#include <float.h>
#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "batch.h"

tch_status tchi_symmetric_product(tch_context *context, const tch_matrices *a, const tch_matrices *b,
                                  const tch_matrices *c)
{
    return tchi_symmetric_polynomial(context, 0.0, 0.0, NULL, 1.0, a, b, c);
}

tch_status tchi_symmetric_polynomial(tch_context *context, double c0, double c1, const tch_matrices *d, double c2,
                                     const tch_matrices *a, const tch_matrices *b, const tch_matrices *c)
{
    const tch_backend *t = context->backend;
    if (t->matrix->symmetric_product != NULL) {
        return t->matrix->symmetric_product(context->state, c0, c1, d, c2, a, b, NULL, 0, c);
    }
    TCHI_TRY(t->matrix->gemm(context->state, c2, a, 0, b, 0, 0.0, 0, c));
    return c0 == 0.0 && d == NULL ? TCH_OK : t->matrix->combine(context->state, c0, c1, d, 1.0, c, c);
}

/* Rows of a diagonal block; only the columns up to its right edge are computed, so half of each diagonal block is
 * wasted. 128 costs 0.56 of a full product at n = 1024 and leaves enough tiles for a GPU; with 64 or 256 rows a SOAP
 * step with blocks of 1024 is slower. */
tch_status tchi_lower_product(tch_context *context, const tch_matrices *x, const tch_matrices *s, const tch_matrices *c)
{
    int64_t n = x->rows;
    for (int64_t first = 0; first < n; first += TCH_LOWER_BLOCK) {
        int64_t rows = n - first < TCH_LOWER_BLOCK ? n - first : TCH_LOWER_BLOCK;
        tch_matrices strip = tchi_matrices_block(x, first, 0, rows, first + rows);
        tch_matrices above = tchi_matrices_block(s, 0, 0, first + rows, s->cols);
        tch_matrices out = tchi_matrices_block(c, first, 0, rows, c->cols);
        TCHI_TRY(context->backend->matrix->gemm(context->state, 1.0, &strip, 0, &above, 0, 0.0, 0, &out));
    }
    return TCH_OK;
}

tch_status tchi_transpose(tch_context *context, const tch_matrices *x, const tch_matrices *out)
{
    const int64_t shape[3] = {out->batch, out->rows, out->cols};
    const int64_t from[3] = {x->stride, 1, x->ld};
    const int64_t to[3] = {out->stride, out->ld, 1};
    const tch_array source = {x->data, x->type, 3, shape, from};
    const tch_array target = {out->data, out->type, 3, shape, to};
    return context->backend->matrix->copy(context->state, &target, &source);
}

tch_product_rates tchi_product_rates(const tch_context *context)
{
    tch_product_rates rates = {.f64 = 1.0, .f32 = 2.0};
    if (context->backend->matrix->product_rates != NULL) {
        context->backend->matrix->product_rates(context->state, &rates);
    }
    return rates;
}

tch_status tchi_gram(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                     const tch_matrices *c)
{
    const tch_backend *t = context->backend;
    return t->matrix->gram != NULL ? t->matrix->gram(context->state, alpha, a, transpose, beta, 0, c)
                                   : t->matrix->gemm(context->state, alpha, a, transpose, a, !transpose, beta, 0, c);
}

tch_status tchi_gram_rounded(tch_context *context, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                             const tch_matrices *c)
{
    const tch_backend *t = context->backend;
    return t->matrix->gram != NULL ? t->matrix->gram(context->state, alpha, a, transpose, beta, 1, c)
                                   : tchi_gram(context, alpha, a, transpose, beta, c);
}

void tchi_inspection_layout(tchi_inspection *i, tchi_arena *arena, int64_t batch)
{
    double **const numbers[] = {&i->largest, &i->damping, &i->bound};
    for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++) {
        *numbers[k] = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    }
    i->max_abs = tchi_arena_take(arena, 3 * batch * (int64_t)sizeof(double));
    i->nonfinite = i->max_abs == NULL ? NULL : i->max_abs + batch;
    i->asymmetry = i->max_abs == NULL ? NULL : i->max_abs + 2 * batch;
    i->flags = tchi_arena_take(arena, batch * (int64_t)sizeof(int32_t));
}

double tchi_symmetry_tolerance(tch_scalar type)
{
    switch (type) {
    case TCH_SCALAR_F64:
        return 1e-12;
    case TCH_SCALAR_F32:
        return 1e-5;
    default:
        return 1e-3;
    }
}

tch_status tchi_measure(tch_context *context, const tch_matrices *a, tchi_inspection *i)
{
    return context->backend->matrix->reduce(context->state, TCH_REDUCE_INSPECT, a, i->max_abs);
}

/* The setup of a root checks finiteness and symmetry. Given the largest entry for the largest eigenvalue and some
 * damping, it does nothing else. */
tch_status tchi_inspect(tch_context *context, const tch_matrices *a, tch_scalar type, tchi_inspection *i)
{
    const tch_backend *t = context->backend;
    TCHI_TRY(tchi_measure(context, a, i));
    tch_root_norms norms = {i->max_abs, i->max_abs, i->nonfinite, i->asymmetry};
    return t->matrix->root_setup(context->state, a->batch, &norms, 1.0, 0.0, 1.0, tchi_symmetry_tolerance(type),
                                 i->damping, i->bound, i->flags);
}

/* From half an ulp above the largest number of a type on, rounding gives infinity. */
double tchi_most_number(tch_scalar type)
{
    switch (type) {
    case TCH_SCALAR_F16:
        return 0x1.ffdffffffffffp+15;
    case TCH_SCALAR_BF16:
        return 0x1.fefffffffffffp+127;
    case TCH_SCALAR_F32:
        return 0x1.fffffefffffffp+127;
    default:
        return DBL_MAX;
    }
}

static const char *reason_of(int32_t flag)
{
    switch (flag) {
    case TCH_REPORT_NOT_FINITE:
        return "has entries that are infinite or NaN";
    case TCH_REPORT_NOT_SYMMETRIC:
        return "is not symmetric";
    case TCH_REPORT_NOT_POSITIVE:
        return "is not positive definite; add damping";
    case TCH_REPORT_OVERFLOW:
        return "has a result, or an eigenvalue, that is too large for its type; add damping (eps), scale it down, or "
               "use a "
               "wider type such as float64";
    default:
        return "did not converge: its residual stayed above the tolerance; loosen it, add damping, or use the eigen "
               "method";
    }
}

/* Flags are copied to the host in chunks, which needs no allocation. */
static tch_status find_bad(tch_context *context, int64_t first, int64_t count, const int32_t *flags, const char *name,
                           tch_status *bad)
{
    enum { CHUNK = 256 };
    int32_t here[CHUNK];
    for (int64_t done = 0; done < count && *bad == TCH_OK; done += CHUNK) {
        int64_t n = count - done < CHUNK ? count - done : CHUNK;
        TCHI_TRY(context->backend->device->copy_bytes(context->state, here, flags + done, n * (int64_t)sizeof *here,
                                                      TCH_COPY_TO_HOST));
        for (int64_t k = 0; k < n && *bad == TCH_OK; k++) {
            if (here[k] != TCH_REPORT_OK) {
                *bad = tchi_fail(TCH_ERR_NUMERIC, "matrix %lld of %s %s", (long long)(first + done + k), name,
                                 reason_of(here[k]));
            }
        }
    }
    return TCH_OK;
}

tch_status tchi_report(tch_context *context, const tch_tensor *report, int64_t first, int64_t count,
                       const int32_t *flags, const char *name, tch_status *bad)
{
    if (report == NULL) {
        return find_bad(context, first, count, flags, name, bad);
    }
    tchi_batch batch = tchi_batch_of(report, 0);
    tch_matrices numbers = tchi_matrices_new((void *)flags, TCH_SCALAR_I32, count, 1, 1);
    return tchi_batch_write(context, &batch, first, &numbers);
}

tch_status tchi_check_report(const tch_context *context, const tch_tensor *report, const char *name,
                             const tch_tensor *tensor, tch_dtype dtype)
{
    if (report == NULL) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_check_output(context, report, name));
    TCHI_TRY(tchi_check_dtype(report, name, dtype));
    return tchi_check_shape(report, name, tensor->ndim - 2, tensor->shape);
}

tch_status tchi_check_power(double power, double eps)
{
    if (!isfinite(power)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "power is %g, expected a finite number", power);
    }
    if (!isfinite(eps) || eps < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "eps is %g, expected a finite number, 0 or more", eps);
    }
    return TCH_OK;
}

tch_status tchi_check_matrix_size(const tch_tensor *tensor, const char *name)
{
    if (tensor->shape[tensor->ndim - 1] <= TCHI_MOST_SIZE && tensor->shape[tensor->ndim - 2] <= TCHI_MOST_SIZE) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s: one matrix can have at most %d rows and columns", name,
                     tchi_describe_shape(tensor, text, sizeof text), TCHI_MOST_SIZE);
}

tch_status tchi_check_matrices(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    TCHI_TRY(tchi_check_input(context, tensor, name));
    TCHI_TRY(tchi_check_matrix(tensor, name));
    TCHI_TRY(tchi_check_matrix_size(tensor, name));
    return tchi_check_float(tensor, name);
}

tch_status tchi_check_output_like(const tch_context *context, const tch_tensor *out, const char *out_name,
                                  const tch_tensor *tensor, const char *name)
{
    TCHI_TRY(tchi_check_output(context, out, out_name));
    TCHI_TRY(tchi_check_same_dtype(out, out_name, tensor, name));
    return tchi_check_same_shape(out, out_name, tensor);
}

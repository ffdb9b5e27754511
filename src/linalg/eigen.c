/* Eigendecomposition, and real powers by it. */
#include <torchium/linalg.h>

#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

typedef struct eigen_buffers {
    tch_matrices v;     /* the input, then eigenvectors as rows */
    tch_matrices w;     /* 1 by n */
    tch_matrices x;     /* the result, or scratch for layouts that cannot be written selectively */
    tch_matrices spare; /* the same for w */
    tchi_inspection inspection;
    void *scratch;
} eigen_buffers;

/* What a sharpened power needs beside them, all float64. */
typedef struct sharp_buffers {
    tch_matrices a;         /* the input, then the result */
    tch_matrices v;         /* eigenvectors as rows */
    tch_matrices t;         /* products on the way */
    tch_matrices b;         /* V A V', nearly diagonal */
    tch_matrices lambda, f; /* its diagonal, and the power of it: 1 by n */
} sharp_buffers;

static void layout(eigen_buffers *e, tchi_arena *arena, tch_context *context, tch_scalar type, int64_t batch, int64_t n)
{
    e->v = tchi_scratch_matrices(arena, type, batch, n, n);
    e->x = tchi_scratch_matrices(arena, type, batch, n, n);
    e->w = tchi_scratch_matrices(arena, type, batch, 1, n);
    e->spare = tchi_scratch_matrices(arena, type, batch, 1, n);
    tchi_inspection_layout(&e->inspection, arena, batch);
    e->scratch = tchi_arena_take(
        arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_EIGH, type, n, n, batch, 0));
}

/* The most matrices whose scratch, `each` bytes beside the layout above, stays within the limit. What the solver itself
 * asks for need not grow evenly with the batch, so the count is searched for. */
static int64_t choose_chunk(tch_context *context, tch_scalar type, int64_t batch, int64_t n, int64_t each)
{
    int64_t limit = tch_context_get_workspace_limit(context);
    int64_t usable = limit / 9 * 8; /* the pool rounds up by at most an eighth */
    int64_t fits = limit == 0 ? batch : 1;
    int64_t too_many = batch + 1;
    for (int64_t count = batch; too_many - fits > 1; count = fits + (too_many - fits) / 2) {
        eigen_buffers probe;
        tchi_arena arena = {0};
        layout(&probe, &arena, context, type, count, n);
        bool good = arena.used <= usable - count * each;
        fits = good ? count : fits;
        too_many = good ? too_many : count;
    }
    return fits;
}

static tch_status reserve(eigen_buffers *e, tch_context *context, tch_scalar type, int64_t batch, int64_t n)
{
    tchi_arena arena = {0};
    layout(e, &arena, context, type, batch, n);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(e, &arena, context, type, batch, n);
    return TCH_OK;
}

static tch_status decompose(tch_context *context, eigen_buffers *e, const tchi_batch *a, int64_t first)
{
    TCHI_TRY(tchi_batch_read(context, a, first, &e->v));
    TCHI_TRY(tchi_inspect(context, &e->v, a->type, &e->inspection));
    return context->backend->matrix->eigh(context->state, &e->v, &e->w, e->inspection.flags, e->scratch);
}

static tch_status check_input(tch_context *context, const tch_tensor *a, const tch_tensor *report)
{
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_square(a, "a"));
    return tchi_check_report(context, report, "report", a, TCH_INT32);
}

/* --- eigenvalues and eigenvectors ------------------------------------------------------------------------------- */

static tch_status check_eigh(tch_context *context, const tch_tensor *a, const tch_tensor *w, const tch_tensor *v,
                             const tch_tensor *report)
{
    TCHI_TRY(check_input(context, a, report));
    TCHI_TRY(tchi_check_output(context, w, "w"));
    TCHI_TRY(tchi_check_same_dtype(w, "w", a, "a"));
    TCHI_TRY(tchi_check_shape(w, "w", a->ndim - 1, a->shape));
    if (v != NULL) {
        TCHI_TRY(tchi_check_output_like(context, v, "v", a, "a"));
    }
    const tchi_named inputs[] = {{a, "a"}};
    const tchi_named outputs[] = {{w, "w"}, {v, "v"}, {report, "report"}};
    return tchi_check_all_disjoint(outputs, 3, inputs, 1);
}

static tch_status eigh_part(tch_context *context, const tchi_batch *a, const tch_tensor *w, const tch_tensor *v,
                            const tch_tensor *report, int64_t first, int64_t count, tch_status *bad)
{
    eigen_buffers e;
    TCHI_TRY(reserve(&e, context, tchi_compute_type(a->type), count, a->rows));
    TCHI_TRY(decompose(context, &e, a, first));
    if (a->type != e.w.type) { /* a narrower type may not hold them */
        TCHI_TRY(context->backend->matrix->flag_overflow(context->state, &e.w, tchi_most_number(a->type),
                                                         e.inspection.flags));
    }
    tchi_batch values = tchi_batch_of(w, 1);
    TCHI_TRY(tchi_batch_select(context, &values, first, e.inspection.flags, &e.w, &e.spare));
    if (v != NULL) {
        tchi_batch vectors = tchi_batch_transposed(tchi_batch_of(v, 2));
        TCHI_TRY(tchi_batch_select(context, &vectors, first, e.inspection.flags, &e.v, &e.x));
    }
    return tchi_report(context, report, first, count, e.inspection.flags, "a", bad);
}

tch_status tch_eigh(tch_context *context, const tch_tensor *a, tch_tensor *w, tch_tensor *v, tch_tensor *report)
{
    TCHI_ENTER(context, "tch_eigh");
    TCHI_TRY(check_eigh(context, a, w, v, report));
    tch_status bad = TCH_OK;
    tchi_batch batch = tchi_batch_of(a, 2);
    int64_t chunk = choose_chunk(context, tchi_compute_type(batch.type), batch.count, batch.rows, 0);
    for (int64_t first = 0; first < batch.count; first += chunk) {
        int64_t count = batch.count - first < chunk ? batch.count - first : chunk;
        TCHI_TRY(eigh_part(context, &batch, w, v, report, first, count, &bad));
    }
    return bad;
}

/* --- powers ----------------------------------------------------------------------------------------------------- */

static tch_status check_power(tch_context *context, const tch_tensor *a, double power, double eps,
                              const tch_tensor *out, const tch_tensor *report)
{
    TCHI_TRY(check_input(context, a, report));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    const tchi_named inputs[] = {{a, "a"}};
    const tchi_named outputs[] = {{out, "out"}, {report, "report"}};
    TCHI_TRY(tchi_check_all_disjoint(outputs, 2, inputs, 1));
    return tchi_check_power(power, eps);
}

/* With w^(power/2) on the rows of V' the result is a Gram matrix: half the work, and symmetric to the last bit. */
static tch_status plain_power(tch_context *context, double power, double eps, eigen_buffers *e)
{
    const tch_spectrum_map map = {eps, 0.0, 0.5 * power, 1, INFINITY};
    TCHI_TRY(context->backend->matrix->spectrum_power(context->state, &map, &e->w, NULL, e->inspection.flags));
    TCHI_TRY(context->backend->matrix->scale_rows(context->state, &e->v, &e->w, &e->v));
    return tchi_gram(context, 1.0, &e->v, 1, 0.0, &e->x);
}

/* --- sharpened powers ------------------------------------------------------------------------------------------- */

/* A float32 eigensolver leaves errors of about u times the largest eigenvalue in all of them, which is much for the
 * small ones, and those are what a negative power is made of. With V its eigenvectors, B = V A V' formed in float64 is
 * diagonal up to such errors, and a function of B is known to first order in them: what is left is of second order.
 * Four products in float64, worth it where those are as fast as float32's and the decomposition is slow beside them. */
static bool sharpens(const tch_context *context, tch_scalar type)
{
    tch_product_rates rates = tchi_product_rates(context);
    return type == TCH_SCALAR_F32 && context->backend->matrix->product_rates != NULL && 2.0 * rates.f64 >= rates.f32;
}

static void layout_sharp(sharp_buffers *s, tchi_arena *arena, int64_t batch, int64_t n)
{
    tch_matrices *const squares[] = {&s->a, &s->v, &s->t, &s->b};
    for (size_t i = 0; i < sizeof squares / sizeof squares[0]; i++) {
        *squares[i] = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, n, n);
    }
    s->lambda = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, 1, n);
    s->f = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, 1, n);
}

/* B = V A V', and its diagonal. */
static tch_status rotate_to_basis(tch_context *context, const eigen_buffers *e, sharp_buffers *s)
{
    const tch_backend *t = context->backend;
    const int64_t shape[2] = {s->b.batch, s->b.rows};
    const int64_t along[2] = {s->b.stride, s->b.ld + 1};
    const int64_t packed[2] = {s->lambda.stride, 1};
    const tch_array diagonal = {s->b.data, TCH_SCALAR_F64, 2, shape, along};
    const tch_array lambda = {s->lambda.data, TCH_SCALAR_F64, 2, shape, packed};
    const tch_array f = {s->f.data, TCH_SCALAR_F64, 2, shape, packed};
    TCHI_TRY(t->matrix->shift_scale(context->state, &e->v, NULL, NULL, 1.0, &s->v));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &s->v, 0, &s->a, 0, 0.0, 0, &s->t));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &s->t, 0, &s->v, 1, 0.0, 0, &s->b));
    TCHI_TRY(t->matrix->copy(context->state, &lambda, &diagonal));
    return t->matrix->copy(context->state, &f, &diagonal);
}

static tch_status sharp_power(tch_context *context, const tchi_batch *a, int64_t first, double power, double eps,
                              eigen_buffers *e, sharp_buffers *s)
{
    const tch_backend *t = context->backend;
    const tch_spectrum_map map = {eps, 0.0, power, 1, INFINITY};
    double *damping = e->inspection.damping;
    TCHI_TRY(tchi_batch_read(context, a, first, &s->a));
    TCHI_TRY(rotate_to_basis(context, e, s));
    TCHI_TRY(t->matrix->spectrum_power(context->state, &map, &s->f, damping, e->inspection.flags));
    TCHI_TRY(t->matrix->divided_differences(context->state, &map, &s->lambda, &s->f, damping, &s->b, NULL));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &s->b, 0, &s->v, 0, 0.0, 0, &s->t));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &s->v, 1, &s->t, 0, 0.0, 0, &s->a));
    return t->matrix->shift_scale(context->state, &s->a, NULL, NULL, 1.0, &e->x);
}

/* --- the public call -------------------------------------------------------------------------------------------- */

/* Both sets of buffers, the second where it is used. */
static void layout_power(eigen_buffers *e, sharp_buffers *s, tchi_arena *arena, tch_context *context, tch_scalar type,
                         int64_t batch, int64_t n)
{
    layout(e, arena, context, type, batch, n);
    if (sharpens(context, type)) {
        layout_sharp(s, arena, batch, n);
    }
}

static tch_status power_part(tch_context *context, const tchi_batch *a, double power, double eps, const tch_tensor *out,
                             const tch_tensor *report, int64_t first, int64_t count, tch_status *bad)
{
    eigen_buffers e;
    sharp_buffers s = {0};
    tchi_arena arena = {0};
    tch_scalar type = tchi_compute_type(a->type);
    layout_power(&e, &s, &arena, context, type, count, a->rows);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout_power(&e, &s, &arena, context, type, count, a->rows);
    TCHI_TRY(decompose(context, &e, a, first));
    TCHI_TRY(sharpens(context, type) ? sharp_power(context, a, first, power, eps, &e, &s)
                                     : plain_power(context, power, eps, &e));
    TCHI_TRY(
        context->backend->matrix->flag_overflow(context->state, &e.x, tchi_most_number(a->type), e.inspection.flags));
    tchi_batch result = tchi_batch_of(out, 2);
    TCHI_TRY(tchi_batch_select(context, &result, first, e.inspection.flags, &e.x, &e.v));
    return tchi_report(context, report, first, count, e.inspection.flags, "a", bad);
}

tch_status tch_matrix_power(tch_context *context, const tch_tensor *a, double power, double eps, tch_tensor *out,
                            tch_tensor *report)
{
    TCHI_ENTER(context, "tch_matrix_power");
    TCHI_TRY(check_power(context, a, power, eps, out, report));
    tch_status bad = TCH_OK;
    tchi_batch batch = tchi_batch_of(a, 2);
    tch_scalar type = tchi_compute_type(batch.type);
    sharp_buffers probe;
    tchi_arena sharp = {0};
    if (sharpens(context, type)) {
        layout_sharp(&probe, &sharp, 1, batch.rows);
    }
    int64_t chunk = choose_chunk(context, type, batch.count, batch.rows, sharp.used);
    for (int64_t first = 0; first < batch.count; first += chunk) {
        int64_t count = batch.count - first < chunk ? batch.count - first : chunk;
        TCHI_TRY(power_part(context, &batch, power, eps, out, report, first, count, &bad));
    }
    return bad;
}

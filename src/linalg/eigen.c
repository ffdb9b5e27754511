/* Eigendecompositions and the real powers computed from them. */
#include <torchium/linalg.h>

#include <math.h>

#include "core/arith.h"
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

/* Additional buffers of a sharpened power, all float64. */
typedef struct sharp_buffers {
    tch_matrices a;         /* the input, then the result */
    tch_matrices v;         /* eigenvectors as rows */
    tch_matrices t;         /* intermediate products */
    tch_matrices b;         /* V A V', nearly diagonal */
    tch_matrices lambda, f; /* its diagonal, and the power of that: 1 by n */
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

/* The most matrices whose scratch, `each` bytes in addition to the layout above, fits into the limit. The solver's
 * scratch need not be proportional to the batch, so the count is found by search. */
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

/* With w^(power/2) applied to the rows of V' the result is a Gram matrix: half the work, and exactly symmetric. */
static tch_status plain_power(tch_context *context, double power, double eps, eigen_buffers *e)
{
    const tch_spectrum_map map = {eps, 0.0, 0.5 * power, 1, INFINITY};
    TCHI_TRY(context->backend->matrix->spectrum_power(context->state, &map, &e->w, NULL, e->inspection.flags));
    TCHI_TRY(context->backend->matrix->scale_rows(context->state, &e->v, &e->w, &e->v));
    return tchi_gram(context, 1.0, &e->v, 1, 0.0, &e->x);
}

/* --- sharpened powers ------------------------------------------------------------------------------------------- */

/* A float32 eigensolver has errors of about u times the largest eigenvalue in all eigenvalues, which is large for the
 * small ones that dominate a negative power. With V its eigenvectors, B = V A V' computed in float64 is diagonal up to
 * such errors, and a function of B is known to first order in them; a second-order error remains. This costs four
 * float64 products, worthwhile where those are as fast as float32 products and the decomposition is slow by
 * comparison. */
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

/* --- the public calls ------------------------------------------------------------------------------------------- */

/* Eigenvalues w and, unless NULL, eigenvectors v; or a power. */
typedef struct eigen_call {
    tchi_batch a;
    const tch_tensor *w, *v, *out, *report;
    double power, eps;
    bool sharp; /* a sharpened power */
} eigen_call;

/* Lays out both sets of buffers, the second if it is used. */
static void layout_call(const eigen_call *c, eigen_buffers *e, sharp_buffers *s, tchi_arena *arena,
                        tch_context *context, int64_t count)
{
    layout(e, arena, context, tchi_compute_type(c->a.type), count, c->a.rows);
    if (c->sharp) {
        layout_sharp(s, arena, count, c->a.rows);
    }
}

static tch_status deliver_power(tch_context *context, const eigen_call *c, int64_t first, eigen_buffers *e,
                                sharp_buffers *s)
{
    tchi_batch result = tchi_batch_of(c->out, 2);
    TCHI_TRY(c->sharp ? sharp_power(context, &c->a, first, c->power, c->eps, e, s)
                      : plain_power(context, c->power, c->eps, e));
    TCHI_TRY(context->backend->matrix->flag_overflow(context->state, &e->x, tchi_most_number(c->a.type),
                                                     e->inspection.flags));
    return tchi_batch_select(context, &result, first, e->inspection.flags, &e->x, &e->v);
}

static tch_status deliver_eigenvalues(tch_context *context, const eigen_call *c, int64_t first, eigen_buffers *e)
{
    if (c->a.type != e->w.type) { /* a smaller type may overflow */
        TCHI_TRY(context->backend->matrix->flag_overflow(context->state, &e->w, tchi_most_number(c->a.type),
                                                         e->inspection.flags));
    }
    tchi_batch values = tchi_batch_of(c->w, 1);
    TCHI_TRY(tchi_batch_select(context, &values, first, e->inspection.flags, &e->w, &e->spare));
    if (c->v == NULL) {
        return TCH_OK;
    }
    tchi_batch vectors = tchi_batch_transposed(tchi_batch_of(c->v, 2));
    return tchi_batch_select(context, &vectors, first, e->inspection.flags, &e->v, &e->x);
}

static tch_status decompose_in_parts(tch_context *context, const eigen_call *c)
{
    eigen_buffers e;
    sharp_buffers s = {0};
    tchi_arena one = {0};
    tch_status bad = TCH_OK;
    if (c->sharp) {
        layout_sharp(&s, &one, 1, c->a.rows);
    }
    int64_t chunk = choose_chunk(context, tchi_compute_type(c->a.type), c->a.count, c->a.rows, one.used);
    for (int64_t first = 0; first < c->a.count; first += chunk) {
        int64_t count = tchi_min(chunk, c->a.count - first);
        tchi_arena arena = {0};
        layout_call(c, &e, &s, &arena, context, count);
        TCHI_TRY(tchi_arena_reserve(context, &arena));
        layout_call(c, &e, &s, &arena, context, count);
        TCHI_TRY(decompose(context, &e, &c->a, first));
        TCHI_TRY(c->out != NULL ? deliver_power(context, c, first, &e, &s)
                                : deliver_eigenvalues(context, c, first, &e));
        TCHI_TRY(tchi_report(context, c->report, first, count, e.inspection.flags, "a", &bad));
    }
    return bad;
}

tch_status tch_eigh(tch_context *context, const tch_tensor *a, tch_tensor *w, tch_tensor *v, tch_tensor *report)
{
    TCHI_ENTER(context, "tch_eigh");
    TCHI_TRY(check_eigh(context, a, w, v, report));
    const eigen_call call = {.a = tchi_batch_of(a, 2), .w = w, .v = v, .report = report};
    return decompose_in_parts(context, &call);
}

tch_status tch_matrix_power(tch_context *context, const tch_tensor *a, double power, double eps, tch_tensor *out,
                            tch_tensor *report)
{
    TCHI_ENTER(context, "tch_matrix_power");
    TCHI_TRY(check_power(context, a, power, eps, out, report));
    eigen_call call = {.a = tchi_batch_of(a, 2), .out = out, .report = report, .power = power, .eps = eps};
    call.sharp = sharpens(context, tchi_compute_type(call.a.type));
    return decompose_in_parts(context, &call);
}

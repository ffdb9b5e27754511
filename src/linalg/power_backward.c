/* Gradients of matrix powers and inverse roots. With A = V diag(w) V' and f the function of the eigenvalues, the
 * gradient of <G, f(A)> is V (K o V' G V) V', K being the divided differences of f (Daleckii and Krein). Everything is
 * in float64: the derivative of a negative power amplifies errors of the small eigenvalues once more than the power
 * does. */
#include <torchium/linalg.h>

#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"
#include "root_plan.h"

typedef struct backward_buffers {
    tch_matrices v;    /* the input, then eigenvectors as rows */
    tch_matrices g, t; /* the transformed gradient, and products */
    tch_matrices w;    /* 1 by n */
    tchi_inspection inspection;
    void *scratch;
} backward_buffers;

typedef struct backward_call {
    tchi_batch a, grad, out;
    tch_spectrum_map map;
    const tch_tensor *report;
} backward_call;

static int64_t scratch_of(tch_context *context, int64_t batch, int64_t n)
{
    return context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_EIGH, TCH_SCALAR_F64, n, n, batch, 0);
}

static void layout(backward_buffers *p, tchi_arena *arena, tch_context *context, int64_t batch, int64_t n)
{
    p->v = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, n, n);
    p->g = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, n, n);
    p->t = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, n, n);
    p->w = tchi_scratch_matrices(arena, TCH_SCALAR_F64, batch, 1, n);
    tchi_inspection_layout(&p->inspection, arena, batch);
    p->scratch = tchi_arena_take(arena, scratch_of(context, batch, n));
}

/* G = (G + G') / 2, using T for the transpose. */
static tch_status symmetrize(tch_context *context, const tch_matrices *g, const tch_matrices *t)
{
    TCHI_TRY(tchi_transpose(context, g, t));
    return context->backend->matrix->combine(context->state, 0.0, 0.5, g, 0.5, t, g);
}

static tch_status backward_part(tch_context *context, const backward_call *call, int64_t first, int64_t count,
                                tch_status *bad)
{
    const tch_backend *t = context->backend;
    backward_buffers p;
    tchi_arena arena = {0};
    layout(&p, &arena, context, count, call->a.rows);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(&p, &arena, context, count, call->a.rows);
    TCHI_TRY(tchi_batch_read(context, &call->a, first, &p.v));
    TCHI_TRY(tchi_inspect(context, &p.v, call->a.type, &p.inspection));
    TCHI_TRY(t->matrix->eigh(context->state, &p.v, &p.w, p.inspection.flags, p.scratch));
    TCHI_TRY(tchi_batch_read(context, &call->grad, first, &p.g));
    TCHI_TRY(symmetrize(context, &p.g, &p.t));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &p.v, 0, &p.g, 0, 0.0, 0, &p.t));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &p.t, 0, &p.v, 1, 0.0, 0, &p.g));
    TCHI_TRY(t->matrix->divided_differences(context->state, &call->map, &p.w, NULL, NULL, &p.g, p.inspection.flags));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &p.g, 0, &p.v, 0, 0.0, 0, &p.t));
    TCHI_TRY(t->matrix->gemm(context->state, 1.0, &p.v, 1, &p.t, 0, 0.0, 0, &p.g));
    TCHI_TRY(symmetrize(context, &p.g, &p.t)); /* removes rounding errors: the result is exactly symmetric */
    TCHI_TRY(tchi_batch_select(context, &call->out, first, p.inspection.flags, &p.g, &p.t));
    return tchi_report(context, call->report, first, count, p.inspection.flags, "a", bad);
}

static tch_status backward_in_parts(tch_context *context, const backward_call *call)
{
    tch_status bad = TCH_OK;
    backward_buffers p;
    tchi_arena one = {0};
    int64_t n = call->a.rows;
    layout(&p, &one, context, 1, n);
    int64_t chunk = tchi_arena_fit(context, call->a.count, one.used - scratch_of(context, 1, n),
                                   scratch_of(context, call->a.count, n));
    for (int64_t first = 0; first < call->a.count; first += chunk) {
        int64_t count = call->a.count - first < chunk ? call->a.count - first : chunk;
        TCHI_TRY(backward_part(context, call, first, count, &bad));
    }
    return bad;
}

static tch_status check_call(tch_context *context, const tch_tensor *a, const tch_tensor *grad, const tch_tensor *out,
                             const tch_tensor *report)
{
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_square(a, "a"));
    TCHI_TRY(tchi_check_input(context, grad, "grad"));
    TCHI_TRY(tchi_check_same_dtype(grad, "grad", a, "a"));
    TCHI_TRY(tchi_check_same_shape(grad, "grad", a));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    TCHI_TRY(tchi_check_report(context, report, "report", a, TCH_INT32));
    const tchi_named inputs[] = {{a, "a"}, {grad, "grad"}};
    const tchi_named outputs[] = {{out, "out"}, {report, "report"}};
    return tchi_check_all_disjoint(outputs, 2, inputs, 2);
}

static backward_call call_of(const tch_tensor *a, const tch_tensor *grad, const tch_tensor *out,
                             const tch_tensor *report, tch_spectrum_map map)
{
    map.negative = tchi_root_negative(tchi_scalar_of(a->dtype), a->shape[a->ndim - 1]);
    return (backward_call){tchi_batch_of(a, 2), tchi_batch_of(grad, 2), tchi_batch_of(out, 2), map, report};
}

tch_status tch_matrix_power_backward(tch_context *context, const tch_tensor *a, double power, double eps,
                                     const tch_tensor *grad, tch_tensor *out, tch_tensor *report)
{
    TCHI_ENTER(context, "tch_matrix_power_backward");
    TCHI_TRY(check_call(context, a, grad, out, report));
    TCHI_TRY(tchi_check_power(power, eps));
    backward_call call = call_of(a, grad, out, report, (tch_spectrum_map){eps, 0.0, power, 1, 0.0});
    return backward_in_parts(context, &call);
}

tch_status tch_inverse_root_backward(tch_context *context, const tch_tensor *a, int32_t root,
                                     const tch_root_config *config, const tch_tensor *grad, tch_tensor *out,
                                     tch_tensor *report)
{
    TCHI_ENTER(context, "tch_inverse_root_backward");
    TCHI_TRY(check_call(context, a, grad, out, report));
    static const tch_root_config defaults = TCH_ROOT_CONFIG_INIT;
    const tch_root_config *c = config != NULL ? config : &defaults;
    TCHI_TRY(tchi_root_check(root, c));
    backward_call call =
        call_of(a, grad, out, report, (tch_spectrum_map){c->eps, c->relative_eps, -1.0 / root, 0, 0.0});
    return backward_in_parts(context, &call);
}

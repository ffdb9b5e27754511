/* Inverse p-th roots. For each part of a batch: convert to the compute type, inspect and bound, compute the root by the
 * planned method, certify it, and write the good ones. Roots that fail by a method or in a type that was chosen here
 * are recomputed by the eigen method in float64. */
#include <torchium/linalg.h>

#include <math.h>
#include <string.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"
#include "newton.h"
#include "root_plan.h"

typedef struct root_buffers {
    tch_matrices a;        /* the undamped input in the compute type, kept for the certificate */
    tchi_newton_buffers m; /* m[0]: scaled matrix, then eigenvectors or scratch; m[1]: result of the other methods */
    tch_matrices w;        /* eigenvalues, 1 by n */
    tchi_inspection inspection;
    double *residual, *error;
    void *scratch;
    bool a_in_place;
} root_buffers;

/* The arguments of the public call, as batches. */
typedef struct root_call {
    tchi_batch a, out, residual;
    const tch_tensor *report;
    bool has_residual;
} root_call;

static void layout_work(tchi_newton_buffers *work, tchi_arena *arena, const tchi_root_plan *plan, int64_t batch,
                        int64_t n)
{
    bool iterates = plan->method == TCH_ROOT_NEWTON && !plan->one_launch;
    /* One of them receives X in the type of the matrices, which may be larger than any step's. */
    bool is_smaller = tchi_scalar_size(plan->widest) < tchi_scalar_size(plan->type);
    tch_scalar room = is_smaller ? plan->type : plan->widest;
    for (int k = 0; k < (iterates ? TCHI_NEWTON_BUFFERS : 2); k++) {
        work->m[k] = iterates && plan->mixed ? tchi_scratch_aligned(arena, room, batch, n, n)
                                             : tchi_scratch_matrices(arena, plan->type, batch, n, n);
    }
}

/* The largest scratch of the operations, which run in sequence and share it. */
static int64_t scratch_of(tch_context *context, const tchi_root_plan *plan, int64_t batch, int64_t n)
{
    const struct {
        tch_scratch_for operation;
        bool used;
        int64_t extra;
    } users[] = {
        {TCH_SCRATCH_LARGEST_EIGENVALUE, plan->method != TCH_ROOT_EIGEN, 0},
        {TCH_SCRATCH_ROOT_RESIDUAL, true, plan->probes},
        {TCH_SCRATCH_EIGH, plan->method == TCH_ROOT_EIGEN, 0},
        {TCH_SCRATCH_SHIFTED_INVERSE, plan->method == TCH_ROOT_RATIONAL,
         plan->ready ? plan->poles : TCHI_MINIMAX_MAX_POLES},
    };
    int64_t most = 0;
    for (size_t i = 0; i < sizeof users / sizeof users[0]; i++) {
        int64_t bytes = !users[i].used
                            ? 0
                            : context->backend->device->scratch_bytes(context->state, users[i].operation, plan->type, n,
                                                                      n, batch, users[i].extra);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* `source` may be NULL, to compute sizes only. */
static void layout(root_buffers *r, tchi_arena *arena, tch_context *context, const tchi_root_plan *plan,
                   const tchi_batch *source, int64_t first, int64_t batch, int64_t n)
{
    r->a_in_place = source != NULL && tchi_batch_direct(source, plan->type, first, batch, &r->a);
    if (!r->a_in_place) {
        r->a = tchi_scratch_matrices(arena, plan->type, batch, n, n);
    }
    layout_work(&r->m, arena, plan, batch, n);
    r->w = tchi_scratch_matrices(arena, plan->type, batch, 1, n);
    tchi_inspection_layout(&r->inspection, arena, batch);
    r->residual = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    r->error = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    r->scratch = tchi_arena_take(arena, scratch_of(context, plan, batch, n));
}

static int64_t layout_bytes(tch_context *context, const tchi_root_plan *plan, int64_t batch, int64_t n)
{
    root_buffers r;
    tchi_arena arena = {0};
    layout(&r, &arena, context, plan, NULL, 0, batch, n);
    return arena.used;
}

/* If the batch does not fit, it is processed in parts of a power of two, or of about equal length if only few fit. For
 * products with vectors a GPU divides its multiprocessors by powers of two: of 132 it gives two to each of 34 matrices,
 * but four to each of 32. */
static int64_t choose_chunk(tch_context *context, const tchi_root_plan *plan, int64_t batch, int64_t n)
{
    int64_t limit = tch_context_get_workspace_limit(context);
    if (limit == 0 || layout_bytes(context, plan, batch, n) <= limit / 9 * 8) {
        return batch;
    }
    int64_t scratch = scratch_of(context, plan, batch, n);
    int64_t one = layout_bytes(context, plan, 1, n) - scratch_of(context, plan, 1, n);
    int64_t most = tchi_arena_fit(context, batch, one, scratch);
    int64_t part = 16;
    while (2 * part <= most) {
        part *= 2;
    }
    return part <= most ? part : tchi_ceil_div(batch, tchi_ceil_div(batch, most));
}

/* --- setup ------------------------------------------------------------------------------------------------------ */

/* Computes norms, damping, bound and flags of every matrix. */
static tch_status prepare_part(tch_context *context, const tchi_root_plan *plan, tch_scalar given, root_buffers *r)
{
    const tch_backend *t = context->backend;
    tchi_inspection *i = &r->inspection;
    if (plan->method == TCH_ROOT_EIGEN) { /* its eigenvalues give the damping, and nothing is scaled */
        return tchi_inspect(context, &r->a, given, i);
    }
    TCHI_TRY(tchi_measure(context, &r->a, i));
    TCHI_TRY(t->matrix->largest_eigenvalue(context->state, &r->a, plan->estimate, i->largest, r->scratch));
    tch_root_norms norms = {i->largest, i->max_abs, i->nonfinite, i->asymmetry};
    return t->matrix->root_setup(context->state, r->a.batch, &norms, plan->eps, plan->relative_eps, TCHI_ROOT_MARGIN,
                                 tchi_symmetry_tolerance(given), i->damping, i->bound, i->flags);
}

/* Reads the lower bound of the scaled spectra from the device, if only absolute damping was given. */
static tch_status read_low(tch_context *context, const root_buffers *r, double *low)
{
    enum { CHUNK = 128 };
    double damping[CHUNK];
    double bound[CHUNK];
    *low = 1.0;
    for (int64_t done = 0; done < r->a.batch; done += CHUNK) {
        int64_t n = r->a.batch - done < CHUNK ? r->a.batch - done : CHUNK;
        int64_t bytes = n * (int64_t)sizeof(double);
        TCHI_TRY(context->backend->device->copy_bytes(context->state, damping, r->inspection.damping + done, bytes,
                                                      TCH_COPY_TO_HOST));
        TCHI_TRY(context->backend->device->copy_bytes(context->state, bound, r->inspection.bound + done, bytes,
                                                      TCH_COPY_TO_HOST));
        for (int64_t k = 0; k < n; k++) {
            *low = damping[k] > 0 ? fmin(*low, damping[k] / bound[k]) : *low;
        }
    }
    return TCH_OK;
}

/* --- methods: each leaves the root in *x ------------------------------------------------------------------------- */

static tch_status by_eigen(tch_context *context, const tchi_root_plan *plan, root_buffers *r, tch_matrices *x)
{
    const tch_backend *t = context->backend;
    tch_spectrum_map map = {plan->eps, plan->relative_eps, -0.5 / plan->root, 0, plan->negative};
    TCHI_TRY(t->matrix->combine(context->state, 0.0, 1.0, &r->a, 0.0, NULL, &r->m.m[0]));
    TCHI_TRY(t->matrix->eigh(context->state, &r->m.m[0], &r->w, r->inspection.flags, r->scratch));
    TCHI_TRY(t->matrix->spectrum_power(context->state, &map, &r->w, r->inspection.damping, r->inspection.flags));
    TCHI_TRY(t->matrix->scale_rows(context->state, &r->m.m[0], &r->w, &r->m.m[0]));
    *x = r->m.m[1];
    return tchi_gram(context, 1.0, &r->m.m[0], 1, 0.0, x);
}

/* M = (A + damping I) / bound, in the first buffer. */
static tch_status scale_down(tch_context *context, root_buffers *r)
{
    return context->backend->matrix->shift_scale(context->state, &r->a, r->inspection.damping, r->inspection.bound,
                                                 -1.0, &r->m.m[0]);
}

static tch_status newton_in_one_launch(tch_context *context, const tchi_root_plan *plan, root_buffers *r,
                                       tch_matrices *x)
{
    tch_newton_iteration iteration = {plan->root, plan->newton.degree, plan->newton.steps, {{0}}};
    for (int k = 0; k < plan->newton.steps; k++) {
        memcpy(iteration.c[k], plan->newton.step[k].c, sizeof iteration.c[k]);
    }
    *x = r->m.m[1];
    return context->backend->matrix->newton(context->state, &iteration, &r->a, r->inspection.damping,
                                            r->inspection.bound, x);
}

/* A buffer other than X, as contiguous matrices like the caller's. */
static tch_matrices spare_of(const root_buffers *r, tch_scalar type, const tch_matrices *x)
{
    void *data = x->data == r->m.m[0].data ? r->m.m[1].data : r->m.m[0].data;
    return tchi_matrices_new(data, type, x->batch, x->rows, x->cols);
}

static tch_status by_newton(tch_context *context, const tchi_root_plan *plan, root_buffers *r, tch_matrices *x)
{
    if (plan->one_launch) {
        return newton_in_one_launch(context, plan, r, x);
    }
    r->m.m[0].type = plan->widest;
    TCHI_TRY(scale_down(context, r));
    tch_matrices last;
    TCHI_TRY(tchi_newton(context, &plan->newton, &r->m, r->inspection.flags, &last));
    *x = plan->mixed ? spare_of(r, plan->type, &last) : last;
    return context->backend->matrix->shift_scale(context->state, &last, NULL, r->inspection.bound, -1.0 / plan->root,
                                                 x);
}

static tch_status by_poles(tch_context *context, const tchi_root_plan *plan, root_buffers *r, tch_matrices *x)
{
    *x = r->m.m[1];
    TCHI_TRY(scale_down(context, r));
    TCHI_TRY(context->backend->matrix->shifted_inverse(context->state, &r->m.m[0], plan->poles, plan->shifts,
                                                       plan->weights, x, r->inspection.flags, r->scratch));
    return context->backend->matrix->shift_scale(context->state, x, NULL, r->inspection.bound, -1.0 / plan->root, x);
}

static tch_status take_root(tch_context *context, const tchi_root_plan *plan, root_buffers *r, tch_matrices *x)
{
    switch (plan->method) {
    case TCH_ROOT_NEWTON:
        return by_newton(context, plan, r, x);
    case TCH_ROOT_RATIONAL:
        return by_poles(context, plan, r, x);
    default:
        return by_eigen(context, plan, r, x);
    }
}

/* --- one part of the batch -------------------------------------------------------------------------------------- */

static tch_status reserve_part(root_buffers *r, tch_context *context, const tchi_root_plan *plan,
                               const tchi_batch *source, int64_t first, int64_t count)
{
    tchi_arena arena = {0};
    layout(r, &arena, context, plan, source, first, count, source->rows);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(r, &arena, context, plan, source, first, count, source->rows);
    return TCH_OK;
}

static tch_status certify_root(tch_context *context, const tchi_root_plan *plan, root_buffers *r, const tch_matrices *x)
{
    const tch_backend *t = context->backend;
    tchi_range_push(context, "certificate");
    tch_status status =
        t->matrix->root_residual(context->state, plan->root, &r->a, r->inspection.damping, x, plan->probes, r->residual,
                                 r->error, plan->error, r->inspection.flags, r->scratch);
    tchi_range_pop(context);
    return status;
}

/* Flags roots that overflow the caller's type: inverses can overflow any type, other roots only a smaller one. */
static tch_status check_range(tch_context *context, const tchi_root_plan *plan, const root_call *call, root_buffers *r,
                              const tch_matrices *x)
{
    if (plan->root > 1 && x->type == call->out.type) {
        return TCH_OK;
    }
    return context->backend->matrix->flag_overflow(context->state, x, tchi_most_number(call->out.type),
                                                   r->inspection.flags);
}

/* Checks the certificate and the range. An overflow by the eigen method is final; by another method it may be a
 * failure. */
static tch_status judge_root(tch_context *context, const tchi_root_plan *plan, const root_call *call, root_buffers *r,
                             const tch_matrices *x)
{
    bool exact = plan->method == TCH_ROOT_EIGEN;
    TCHI_TRY(exact ? check_range(context, plan, call, r, x) : TCH_OK);
    TCHI_TRY(certify_root(context, plan, r, x));
    return exact ? TCH_OK : check_range(context, plan, call, r, x);
}

/* Lays out scratch, reads the matrices in the compute type and inspects them. */
static tch_status begin_part(tch_context *context, const tchi_root_plan *plan, const root_call *call, int64_t first,
                             int64_t count, root_buffers *r)
{
    TCHI_TRY(reserve_part(r, context, plan, &call->a, first, count));
    if (!r->a_in_place) {
        TCHI_TRY(tchi_batch_read(context, &call->a, first, &r->a));
    }
    TCHI_RANGE(context, "damping and bound");
    return prepare_part(context, plan, call->a.type, r);
}

/* A plan that depends on the smallest eigenvalues may turn out as another method, which restarts with its own
 * scratch. */
static tch_status finish_plan(tch_context *context, tchi_root_plan *plan, const root_call *call, int64_t first,
                              int64_t count, root_buffers *r)
{
    double low;
    tch_root_method before = plan->method;
    TCHI_TRY(read_low(context, r, &low));
    TCHI_TRY(tchi_root_plan_finish(plan, low));
    return plan->method == before ? TCH_OK : begin_part(context, plan, call, first, count, r);
}

/* Everything up to the flags; the caller's memory is not written yet. */
static tch_status compute_part(tch_context *context, tchi_root_plan *plan, const root_call *call, int64_t first,
                               int64_t count, root_buffers *r, tch_matrices *x)
{
    TCHI_TRY(begin_part(context, plan, call, first, count, r));
    if (!plan->ready) {
        TCHI_TRY(finish_plan(context, plan, call, first, count, r));
    }
    tchi_range_push(context, tch_root_method_name(plan->method));
    tch_status status = take_root(context, plan, r, x);
    tchi_range_pop(context);
    TCHI_TRY(status);
    return judge_root(context, plan, call, r, x);
}

static tch_status deliver_part(tch_context *context, const root_call *call, int64_t first, int64_t count,
                               root_buffers *r, const tch_matrices *x, tch_status *bad)
{
    tch_matrices spare = spare_of(r, x->type, x);
    TCHI_TRY(tchi_batch_select(context, &call->out, first, r->inspection.flags, x, &spare));
    if (call->has_residual) {
        tch_matrices numbers = tchi_matrices_new(r->residual, TCH_SCALAR_F64, count, 1, 1);
        TCHI_TRY(tchi_batch_write(context, &call->residual, first, &numbers));
    }
    if (call->a.picked == NULL) {
        return tchi_report(context, call->report, first, count, r->inspection.flags, "a", bad);
    }
    tchi_batch report = tchi_batch_pick(tchi_batch_of(call->report, 0), call->a.picked, call->a.count);
    tch_matrices flags = tchi_matrices_new(r->inspection.flags, TCH_SCALAR_I32, count, 1, 1);
    return tchi_batch_write(context, &report, first, &flags);
}

/* Whether some matrix failed in a way that another plan may fix. The flags are read only if that costs no extra
 * synchronization: on a backend with host memory, or if the caller passed no report and thus asked for an immediate
 * error. Otherwise the result stays on the device, and failed matrices keep their previous root. */
static tch_status look_for_failures(tch_context *context, const tchi_root_plan *plan, const root_call *call,
                                    const root_buffers *r, int64_t count, bool *found)
{
    enum { CHUNK = 256 };
    int32_t here[CHUNK];
    /* the eigen method itself detects indefinite matrices */
    bool in_doubt = plan->fall_back && plan->method != TCH_ROOT_EIGEN;
    *found = false;
    if (!tchi_root_plan_has_better(plan) || (call->report != NULL && !context->backend->host_memory)) {
        return TCH_OK;
    }
    for (int64_t done = 0; done < count && !*found; done += CHUNK) {
        int64_t n = count - done < CHUNK ? count - done : CHUNK;
        TCHI_TRY(context->backend->device->copy_bytes(context->state, here, r->inspection.flags + done,
                                                      n * (int64_t)sizeof *here, TCH_COPY_TO_HOST));
        for (int64_t k = 0; k < n && !*found; k++) {
            *found = here[k] == TCH_REPORT_NO_CONVERGENCE || (here[k] == TCH_REPORT_NOT_POSITIVE && in_doubt);
        }
    }
    return TCH_OK;
}

static tch_status root_part(tch_context *context, const tchi_root_plan *made, const root_call *call, int64_t first,
                            int64_t count, tch_status *bad)
{
    root_buffers r;
    tch_matrices x;
    tchi_root_plan plan = *made;
    TCHI_TRY(compute_part(context, &plan, call, first, count, &r, &x));
    bool again;
    TCHI_TRY(look_for_failures(context, &plan, call, &r, count, &again));
    if (again) {
        plan = tchi_root_plan_better(&plan);
        TCHI_TRY(compute_part(context, &plan, call, first, count, &r, &x));
    }
    return deliver_part(context, call, first, count, &r, &x, bad);
}

/* --- the public calls ------------------------------------------------------------------------------------------- */

static tch_status check_call(tch_context *context, const tch_tensor *a, const tch_tensor *out,
                             const tch_tensor *residual, const tch_tensor *report)
{
    TCHI_TRY(tchi_check_matrices(context, a, "a"));
    TCHI_TRY(tchi_check_square(a, "a"));
    TCHI_TRY(tchi_check_output_like(context, out, "out", a, "a"));
    TCHI_TRY(tchi_check_report(context, residual, "residual", a, TCH_FLOAT64));
    TCHI_TRY(tchi_check_report(context, report, "report", a, TCH_INT32));
    const tchi_named inputs[] = {{a, "a"}};
    const tchi_named outputs[] = {{out, "out"}, {residual, "residual"}, {report, "report"}};
    return tchi_check_all_disjoint(outputs, 3, inputs, 1);
}

/* For empty matrices, or none, by any method: the eigen method's plan is free and always valid. */
static tch_status plan_nothing(tch_context *context, const root_call *call, int32_t root, const tch_root_config *config,
                               tchi_root_plan *plan)
{
    static const tch_root_config defaults = TCH_ROOT_CONFIG_INIT;
    const tch_root_config *given = config != NULL ? config : &defaults;
    TCHI_TRY(tchi_root_check(root, given));
    tch_root_config c = *given;
    c.method = TCH_ROOT_EIGEN;
    c.degree = 0;
    return tchi_root_plan_make(context, call->a.type, call->a.rows, root, &c, plan);
}

tch_status tchi_inverse_root_of(tch_context *context, const tch_tensor *a, const int64_t *picked, int64_t count,
                                int32_t root, const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                tch_tensor *report)
{
    TCHI_TRY(check_call(context, a, out, residual, report));
    root_call call = {.a = tchi_batch_pick(tchi_batch_of(a, 2), picked, count),
                      .out = tchi_batch_pick(tchi_batch_of(out, 2), picked, count),
                      .report = report};
    if (residual != NULL) {
        call.residual = tchi_batch_pick(tchi_batch_of(residual, 0), picked, count);
        call.has_residual = true;
    }
    tchi_root_plan plan;
    bool nothing = call.a.rows == 0 || call.a.count == 0;
    TCHI_TRY(nothing ? plan_nothing(context, &call, root, config, &plan)
                     : tchi_root_plan_make(context, call.a.type, call.a.rows, root, config, &plan));
    tch_status bad = TCH_OK;
    int64_t chunk = choose_chunk(context, &plan, call.a.count, call.a.rows);
    for (int64_t first = 0; first < call.a.count; first += chunk) {
        int64_t part = call.a.count - first < chunk ? call.a.count - first : chunk;
        TCHI_TRY(root_part(context, &plan, &call, first, part, &bad));
    }
    return bad;
}

tch_status tch_inverse_root(tch_context *context, const tch_tensor *a, int32_t root, const tch_root_config *config,
                            tch_tensor *out, tch_tensor *residual, tch_tensor *report)
{
    TCHI_ENTER(context, "tch_inverse_root");
    return tchi_inverse_root_of(context, a, NULL, 0, root, config, out, residual, report);
}

tch_status tch_inverse_root_plan(tch_context *context, tch_dtype dtype, int64_t batch, int64_t n, int32_t root,
                                 const tch_root_config *config, tch_root_method *method, int64_t *scratch_bytes)
{
    TCHI_ENTER(context, "tch_inverse_root_plan");
    tch_scalar type = tchi_scalar_of(dtype);
    if (type == TCH_SCALAR_COUNT || !tchi_scalar_is_float(type)) {
        return tchi_fail(TCH_ERR_DTYPE, "dtype is %s, expected a float type", tch_dtype_name(dtype));
    }
    if (batch < 0 || n < 0 || n > TCHI_MOST_SIZE) {
        return tchi_fail(TCH_ERR_SHAPE, "batch is %lld and n is %lld, expected 0 or more", (long long)batch,
                         (long long)n);
    }
    tchi_root_plan plan;
    TCHI_TRY(tchi_root_plan_make(context, type, n, root, config, &plan));
    if (method != NULL) {
        *method = plan.method;
    }
    if (scratch_bytes != NULL) {
        /* Beyond a few matrices time is proportional, so large batches need not be planned in full. */
        int64_t some = batch < 64 ? batch : 64;
        *scratch_bytes = some == 0 ? 0 : layout_bytes(context, &plan, some, n) / some;
    }
    return TCH_OK;
}

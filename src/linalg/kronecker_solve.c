/* The damped Kronecker solve of KFAC: (A + pi sqrt(g) I)^-1 X (B + sqrt(g)/pi I)^-1 by two Cholesky factorizations. */
#include <torchium/linalg.h>

#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

typedef struct solve_buffers {
    tch_matrices a, b;
    tch_matrices x; /* m by n */
    tch_matrices y; /* its transpose after the first solve: n by m */
    tchi_inspection of_a, of_b;
    double *trace_a, *trace_b;
    void *scratch;
} solve_buffers;

/* The two solves run one after the other and share it. */
static int64_t scratch_of(tch_context *context, tch_scalar type, int64_t batch, int64_t m, int64_t n)
{
    const tch_backend *t = context->backend;
    int64_t left = t->device->scratch_bytes(context->state, TCH_SCRATCH_SPD_SOLVE, type, m, n, batch, 0);
    int64_t right = t->device->scratch_bytes(context->state, TCH_SCRATCH_SPD_SOLVE, type, n, m, batch, 0);
    return left > right ? left : right;
}

static void layout(solve_buffers *s, tchi_arena *arena, tch_context *context, tch_scalar type, int64_t batch, int64_t m,
                   int64_t n)
{
    s->a = tchi_scratch_matrices(arena, type, batch, m, m);
    s->b = tchi_scratch_matrices(arena, type, batch, n, n);
    s->x = tchi_scratch_matrices(arena, type, batch, m, n);
    s->y = tchi_scratch_matrices(arena, type, batch, n, m);
    tchi_inspection_layout(&s->of_a, arena, batch);
    tchi_inspection_layout(&s->of_b, arena, batch);
    s->trace_a = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    s->trace_b = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    s->scratch = tchi_arena_take(arena, scratch_of(context, type, batch, m, n));
}

/* The arguments as batches. */
typedef struct solve_call {
    tchi_batch a, b, x, out;
    const tch_tensor *report;
    double damping;
} solve_call;

static tch_status transpose_matrices(tch_context *context, const tch_matrices *x, const tch_matrices *y)
{
    const int64_t shape[3] = {x->batch, y->rows, y->cols};
    const int64_t from[3] = {x->stride, 1, x->ld};
    const int64_t to[3] = {y->stride, y->ld, 1};
    tch_array source = {x->data, x->type, 3, shape, from};
    tch_array target = {y->data, y->type, 3, shape, to};
    return context->backend->matrix->copy(context->state, &target, &source);
}

static tch_status find_damping(tch_context *context, solve_buffers *s, double damping)
{
    const tch_backend *t = context->backend;
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_TRACE, &s->a, s->trace_a));
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_TRACE, &s->b, s->trace_b));
    return t->matrix->factored_damping(context->state, s->a.batch, s->trace_a, s->a.rows, s->trace_b, s->b.rows,
                                       damping, s->of_a.damping, s->of_b.damping);
}

/* The flags of A go through both solves, so that a pair with a bad A is skipped in the second too. B is judged first,
 * by itself, and its verdict joined in by solving it last with A's flags: a B that is not finite or not symmetric has
 * to be seen before, which `select` does by bringing B's flags over where A's are good. */
static tch_status join_flags(tch_context *context, const solve_buffers *s)
{
    tch_matrices from = tchi_matrices_new(s->of_b.flags, TCH_SCALAR_I32, s->a.batch, 1, 1);
    tch_matrices to = tchi_matrices_new(s->of_a.flags, TCH_SCALAR_I32, s->a.batch, 1, 1);
    return context->backend->matrix->select(context->state, s->of_a.flags, &from, &to);
}

/* X that is not finite is no overflow of the result. B's flags have been joined in, and serve again. */
static tch_status inspect_x(tch_context *context, solve_buffers *s)
{
    const tch_backend *t = context->backend;
    tchi_inspection *i = &s->of_b;
    int64_t bytes = s->x.batch * (int64_t)sizeof(double);
    tch_root_norms norms = {i->max_abs, i->max_abs, i->nonfinite, i->asymmetry};
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_NONFINITE, &s->x, i->nonfinite));
    TCHI_TRY(t->device->zero_bytes(context->state, i->max_abs, bytes));
    TCHI_TRY(t->device->zero_bytes(context->state, i->asymmetry, bytes));
    TCHI_TRY(
        t->matrix->root_setup(context->state, s->x.batch, &norms, 1.0, 0.0, 1.0, 0.0, i->damping, i->bound, i->flags));
    return join_flags(context, s);
}

static tch_status solve_part(tch_context *context, const solve_call *c, int64_t first, int64_t count, tch_status *bad)
{
    solve_buffers s;
    tchi_arena arena = {0};
    const tch_backend *t = context->backend;
    tch_scalar type = tchi_compute_type(c->x.type);
    layout(&s, &arena, context, type, count, c->x.rows, c->x.cols);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(&s, &arena, context, type, count, c->x.rows, c->x.cols);
    TCHI_TRY(tchi_batch_read(context, &c->a, first, &s.a));
    TCHI_TRY(tchi_batch_read(context, &c->b, first, &s.b));
    TCHI_TRY(tchi_batch_read(context, &c->x, first, &s.x));
    TCHI_TRY(tchi_inspect(context, &s.a, c->a.type, &s.of_a));
    TCHI_TRY(tchi_inspect(context, &s.b, c->b.type, &s.of_b));
    TCHI_TRY(join_flags(context, &s));
    TCHI_TRY(inspect_x(context, &s));
    TCHI_TRY(find_damping(context, &s, c->damping));
    TCHI_TRY(t->matrix->spd_solve(context->state, &s.a, s.of_a.damping, &s.x, s.of_a.flags, s.scratch));
    TCHI_TRY(transpose_matrices(context, &s.x, &s.y));
    TCHI_TRY(t->matrix->spd_solve(context->state, &s.b, s.of_b.damping, &s.y, s.of_a.flags, s.scratch));
    TCHI_TRY(t->matrix->flag_overflow(context->state, &s.y, tchi_most_number(c->x.type), s.of_a.flags));
    tchi_batch out = tchi_batch_transposed(c->out);
    tch_matrices spare = tchi_matrices_new(s.x.data, type, count, s.y.rows, s.y.cols);
    TCHI_TRY(tchi_batch_select(context, &out, first, s.of_a.flags, &s.y, &spare));
    return tchi_report(context, c->report, first, count, s.of_a.flags, "a, b or x", bad);
}

static int64_t choose_chunk(tch_context *context, const tchi_batch *x)
{
    solve_buffers probe;
    tchi_arena one = {0};
    tch_scalar type = tchi_compute_type(x->type);
    layout(&probe, &one, context, type, 1, x->rows, x->cols);
    int64_t fixed = scratch_of(context, type, x->count, x->rows, x->cols);
    return tchi_arena_fit(context, x->count, one.used, fixed);
}

static tch_status check_side(tch_context *context, const tch_tensor *f, const char *name, const tch_tensor *x,
                             int64_t n)
{
    int64_t shape[TCH_MAX_RANK];
    TCHI_TRY(tchi_check_matrices(context, f, name));
    TCHI_TRY(tchi_check_square(f, name));
    TCHI_TRY(tchi_check_same_dtype(f, name, x, "x"));
    for (int32_t i = 0; i < x->ndim; i++) {
        shape[i] = i < x->ndim - 2 ? x->shape[i] : n;
    }
    return tchi_check_shape(f, name, x->ndim, shape);
}

static tch_status check_call(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                             double damping, const tch_tensor *out, const tch_tensor *report)
{
    TCHI_TRY(tchi_check_input(context, x, "x"));
    TCHI_TRY(tchi_check_matrix(x, "x"));
    TCHI_TRY(tchi_check_float(x, "x"));
    TCHI_TRY(check_side(context, a, "a", x, x->shape[x->ndim - 2]));
    TCHI_TRY(check_side(context, b, "b", x, x->shape[x->ndim - 1]));
    TCHI_TRY(tchi_check_output_like(context, out, "out", x, "x"));
    TCHI_TRY(tchi_check_report(context, report, "report", x, TCH_INT32));
    const tchi_named inputs[] = {{a, "a"}, {b, "b"}, {x, "x"}};
    const tchi_named outputs[] = {{out, "out"}, {report, "report"}};
    TCHI_TRY(tchi_check_all_disjoint(outputs, 2, inputs, 3));
    if (!isfinite(damping) || damping < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "damping is %g, expected a finite number, 0 or more", damping);
    }
    return TCH_OK;
}

tch_status tch_kronecker_solve(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                               double damping, tch_tensor *out, tch_tensor *report)
{
    TCHI_ENTER(context, "tch_kronecker_solve");
    TCHI_TRY(check_call(context, a, b, x, damping, out, report));
    solve_call c = {
        tchi_batch_of(a, 2), tchi_batch_of(b, 2), tchi_batch_of(x, 2), tchi_batch_of(out, 2), report, damping};
    int64_t chunk = choose_chunk(context, &c.x);
    tch_status bad = TCH_OK;
    for (int64_t first = 0; first < c.x.count; first += chunk) {
        int64_t count = c.x.count - first < chunk ? c.x.count - first : chunk;
        TCHI_TRY(solve_part(context, &c, first, count, &bad));
    }
    return bad;
}

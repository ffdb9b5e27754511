/* Kronecker algebra without forming the product, and the product itself. Leading dimensions of all tensors of a call
 * are equal; A and B may also be single matrices shared by the batch. */
#include <torchium/linalg.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"

/* --- arguments -------------------------------------------------------------------------------------------------- */

/* `factor` is one matrix, or has the leading dimensions of `like` (which has `inner` trailing dimensions). */
static tch_status check_factor(tch_context *context, const tch_tensor *factor, const char *name, const tch_tensor *like,
                               int32_t like_inner, const char *like_name)
{
    TCHI_TRY(tchi_check_matrices(context, factor, name));
    TCHI_TRY(tchi_check_same_dtype(factor, name, like, like_name));
    bool fits = factor->ndim == 2 || factor->ndim - 2 == like->ndim - like_inner;
    for (int32_t i = 0; fits && i < factor->ndim - 2; i++) {
        fits = factor->shape[i] == like->shape[i];
    }
    if (fits) {
        return TCH_OK;
    }
    char a[TCHI_DESCRIBE_SIZE];
    char b[TCHI_DESCRIBE_SIZE];
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected one matrix or the leading dimensions of %s %s", name,
                     tchi_describe_shape(factor, a, sizeof a), like_name, tchi_describe_shape(like, b, sizeof b));
}

static tch_status check_out(tch_context *context, const tch_tensor *out, const tch_tensor *x, int64_t rows,
                            int64_t cols)
{
    int64_t shape[TCH_MAX_RANK];
    memcpy(shape, x->shape, (size_t)(x->ndim - 2) * sizeof *shape);
    shape[x->ndim - 2] = rows;
    shape[x->ndim - 1] = cols;
    TCHI_TRY(tchi_check_output(context, out, "out"));
    TCHI_TRY(tchi_check_same_dtype(out, "out", x, "x"));
    return tchi_check_shape(out, "out", x->ndim, shape);
}

static int64_t rows_of(const tch_tensor *t)
{
    return t->shape[t->ndim - 2];
}

static int64_t cols_of(const tch_tensor *t)
{
    return t->shape[t->ndim - 1];
}

static tch_status check_size(const tch_tensor *x, const char *name, int64_t rows, int64_t cols)
{
    if (rows_of(x) == rows && (cols < 0 || cols_of(x) == cols)) {
        return TCH_OK;
    }
    char text[TCHI_DESCRIBE_SIZE];
    char want[32] = "r";
    if (cols >= 0) {
        snprintf(want, sizeof want, "%lld", (long long)cols);
    }
    return tchi_fail(TCH_ERR_SHAPE, "%s has shape %s, expected [..., %lld, %s] for these a and b", name,
                     tchi_describe_shape(x, text, sizeof text), (long long)rows, want);
}

/* --- processing a batch in parts -------------------------------------------------------------------------------- */

/* A factor in the compute type: one matrix, read once and repeated, or a part of the batch. */
static tch_matrices place_factor(tchi_arena *arena, const tchi_batch *f, tch_scalar type, int64_t batch)
{
    int64_t count = f->count == 1 ? 1 : batch;
    int64_t bytes = count * f->rows * f->cols * tchi_scalar_size(type);
    return tchi_matrices_new(tchi_arena_take(arena, bytes), type, count, f->rows, f->cols);
}

static tch_status read_factor(tch_context *context, const tchi_batch *f, int64_t first, int64_t batch, tch_matrices *m)
{
    TCHI_TRY(tchi_batch_read(context, f, f->count == 1 ? 0 : first, m));
    if (f->count == 1) {
        m->stride = 0;
        m->batch = batch;
    }
    return TCH_OK;
}

/* --- the explicit product --------------------------------------------------------------------------------------- */

typedef struct kron_ctx {
    tchi_batch a, b, x, out;
    tch_scalar type;
    tch_matrices ma, mb, mx, mt, mo;
    bool x_in_place, out_in_place;
} kron_ctx;

typedef void kron_layout(kron_ctx *j, tchi_arena *arena, int64_t first, int64_t count);
typedef tch_status kron_compute(tch_context *context, kron_ctx *j, int64_t first, int64_t count);

/* `compute` leaves the result of a part in mo. */
static tch_status compute_in_parts(tch_context *context, kron_ctx *j, kron_layout *layout, kron_compute *compute)
{
    tchi_arena one = {0};
    layout(j, &one, 0, 1);
    int64_t chunk = tchi_arena_fit(context, j->out.count, one.used, 0);
    for (int64_t first = 0; first < j->out.count; first += chunk) {
        int64_t count = j->out.count - first < chunk ? j->out.count - first : chunk;
        tchi_arena arena = {0};
        layout(j, &arena, first, count);
        TCHI_TRY(tchi_arena_reserve(context, &arena));
        layout(j, &arena, first, count);
        TCHI_TRY(read_factor(context, &j->a, first, count, &j->ma));
        TCHI_TRY(read_factor(context, &j->b, first, count, &j->mb));
        TCHI_TRY(compute(context, j, first, count));
        TCHI_TRY(j->out_in_place ? TCH_OK : tchi_batch_write(context, &j->out, first, &j->mo));
    }
    return TCH_OK;
}

static void product_layout(kron_ctx *j, tchi_arena *arena, int64_t first, int64_t count)
{
    j->ma = place_factor(arena, &j->a, j->type, count);
    j->mb = place_factor(arena, &j->b, j->type, count);
    j->mo = tchi_batch_place(&j->out, arena, j->type, first, count, &j->out_in_place);
}

static tch_status product_part(tch_context *context, kron_ctx *j, int64_t first, int64_t count)
{
    (void)first, (void)count;
    return context->backend->matrix->kronecker(context->state, &j->ma, &j->mb, &j->mo);
}

static tch_status check_product(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *out)
{
    int64_t rows;
    int64_t cols;
    TCHI_TRY(tchi_check_output(context, out, "out"));
    TCHI_TRY(tchi_check_matrix(out, "out"));
    TCHI_TRY(check_factor(context, a, "a", out, 2, "out"));
    TCHI_TRY(check_factor(context, b, "b", out, 2, "out"));
    const tch_tensor *longer = a->ndim >= b->ndim ? a : b;
    int64_t shape[TCH_MAX_RANK];
    memcpy(shape, longer->shape, (size_t)longer->ndim * sizeof *shape);
    if (__builtin_mul_overflow(rows_of(a), rows_of(b), &rows) ||
        __builtin_mul_overflow(cols_of(a), cols_of(b), &cols)) {
        return tchi_fail(TCH_ERR_SHAPE, "the Kronecker product of a and b has more elements than fit in 64 bits");
    }
    shape[longer->ndim - 2] = rows;
    shape[longer->ndim - 1] = cols;
    TCHI_TRY(tchi_check_shape(out, "out", longer->ndim, shape));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    return tchi_check_disjoint(out, "out", b, "b");
}

tch_status tch_kronecker_product(tch_context *context, const tch_tensor *a, const tch_tensor *b, tch_tensor *out)
{
    TCHI_ENTER(context, "tch_kronecker_product");
    TCHI_TRY(check_product(context, a, b, out));
    kron_ctx j = {.a = tchi_batch_of(a, 2), .b = tchi_batch_of(b, 2), .out = tchi_batch_of(out, 2)};
    j.type = tchi_compute_type(j.out.type);
    return compute_in_parts(context, &j, product_layout, product_part);
}

/* --- product with a matrix -------------------------------------------------------------------------------------- */

static tch_status multiply_x(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                             const tch_tensor *out, kron_layout *layout, kron_compute *compute)
{
    const tchi_named inputs[] = {{a, "a"}, {b, "b"}, {x, "x"}};
    const tchi_named outputs[] = {{out, "out"}};
    TCHI_TRY(tchi_check_all_disjoint(outputs, 1, inputs, 3));
    kron_ctx j = {
        .a = tchi_batch_of(a, 2), .b = tchi_batch_of(b, 2), .x = tchi_batch_of(x, 2), .out = tchi_batch_of(out, 2)};
    j.type = tchi_compute_type(j.x.type);
    return compute_in_parts(context, &j, layout, compute);
}

/* A X B' in the cheaper order; mt holds A X or X B'. */
static bool left_first(const kron_ctx *j)
{
    double m = (double)j->a.rows;
    double n = (double)j->a.cols;
    double p = (double)j->b.rows;
    double q = (double)j->b.cols;
    return m * n * q + m * q * p <= n * q * p + m * n * p;
}

static void apply_layout(kron_ctx *j, tchi_arena *arena, int64_t first, int64_t count)
{
    j->ma = place_factor(arena, &j->a, j->type, count);
    j->mb = place_factor(arena, &j->b, j->type, count);
    j->mx = tchi_batch_place(&j->x, arena, j->type, first, count, &j->x_in_place);
    j->mt = left_first(j) ? tchi_scratch_matrices(arena, j->type, count, j->a.rows, j->b.cols)
                          : tchi_scratch_matrices(arena, j->type, count, j->a.cols, j->b.rows);
    j->mo = tchi_batch_place(&j->out, arena, j->type, first, count, &j->out_in_place);
}

static tch_status apply_part(tch_context *context, kron_ctx *j, int64_t first, int64_t count)
{
    tch_gemm_op *gemm = context->backend->matrix->gemm;
    if (!j->x_in_place) {
        TCHI_TRY(tchi_batch_read(context, &j->x, first, &j->mx));
    }
    if (left_first(j)) {
        TCHI_TRY(gemm(context->state, 1.0, &j->ma, 0, &j->mx, 0, 0.0, 0, &j->mt));
        return gemm(context->state, 1.0, &j->mt, 0, &j->mb, 1, 0.0, 0, &j->mo);
    }
    TCHI_TRY(gemm(context->state, 1.0, &j->mx, 0, &j->mb, 1, 0.0, 0, &j->mt));
    return gemm(context->state, 1.0, &j->ma, 0, &j->mt, 0, 0.0, 0, &j->mo);
}

static tch_status check_apply(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                              const tch_tensor *out)
{
    TCHI_TRY(tchi_check_input(context, x, "x"));
    TCHI_TRY(tchi_check_matrix(x, "x"));
    TCHI_TRY(tchi_check_matrix_size(x, "x"));
    TCHI_TRY(check_factor(context, a, "a", x, 2, "x"));
    TCHI_TRY(check_factor(context, b, "b", x, 2, "x"));
    TCHI_TRY(check_size(x, "x", cols_of(a), cols_of(b)));
    return check_out(context, out, x, rows_of(a), rows_of(b));
}

tch_status tch_kronecker_apply(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                               tch_tensor *out)
{
    TCHI_ENTER(context, "tch_kronecker_apply");
    TCHI_TRY(check_apply(context, a, b, x, out));
    return multiply_x(context, a, b, x, out, apply_layout, apply_part);
}

/* (A (x) B) X for X [n q, r]: with X as [n, q r], T = A X is [m, q r], i.e. m matrices [q, r], each multiplied by B. */
static void matmul_layout(kron_ctx *j, tchi_arena *arena, int64_t first, int64_t count)
{
    int64_t r = j->x.cols;
    j->out_in_place = false;
    j->ma = place_factor(arena, &j->a, j->type, count);
    j->mb = place_factor(arena, &j->b, j->type, count);
    j->mx = tchi_scratch_matrices(arena, j->type, count, j->a.cols, j->b.cols * r);
    j->mt = tchi_scratch_matrices(arena, j->type, count, j->a.rows, j->b.cols * r);
    j->mo = tchi_scratch_matrices(arena, j->type, count, j->out.rows, r);
}

/* The m matrices of one item or, with one column, the m items as a single product. */
static tch_status multiply_by_b(tch_context *context, const kron_ctx *j, int64_t index)
{
    int64_t m = j->a.rows;
    int64_t r = j->x.cols;
    tch_matrices b = tchi_matrices_part(&j->mb, index, 1);
    tch_matrices t = tchi_matrices_part(&j->mt, index, 1);
    tch_matrices o = tchi_matrices_part(&j->mo, index, 1);
    if (r == 1) {
        tch_matrices rows = tchi_matrices_new(o.data, j->type, 1, m, j->b.rows);
        return context->backend->matrix->gemm(context->state, 1.0, &t, 0, &b, 1, 0.0, 0, &rows);
    }
    tch_matrices blocks = tchi_matrices_new(t.data, j->type, m, j->b.cols, r);
    tch_matrices results = tchi_matrices_new(o.data, j->type, m, j->b.rows, r);
    b.batch = m;
    b.stride = 0;
    return context->backend->matrix->gemm(context->state, 1.0, &b, 0, &blocks, 0, 0.0, 0, &results);
}

static tch_status matmul_part(tch_context *context, kron_ctx *j, int64_t first, int64_t count)
{
    tch_matrices whole = tchi_matrices_new(j->mx.data, j->type, count, j->x.rows, j->x.cols);
    TCHI_TRY(tchi_batch_read(context, &j->x, first, &whole));
    TCHI_TRY(context->backend->matrix->gemm(context->state, 1.0, &j->ma, 0, &j->mx, 0, 0.0, 0, &j->mt));
    for (int64_t i = 0; i < count; i++) {
        TCHI_TRY(multiply_by_b(context, j, i));
    }
    return TCH_OK;
}

static tch_status check_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                               const tch_tensor *out)
{
    TCHI_TRY(tchi_check_input(context, x, "x"));
    TCHI_TRY(tchi_check_matrix(x, "x"));
    TCHI_TRY(check_factor(context, a, "a", x, 2, "x"));
    TCHI_TRY(check_factor(context, b, "b", x, 2, "x"));
    TCHI_TRY(check_size(x, "x", cols_of(a) * cols_of(b), -1));
    TCHI_TRY(check_out(context, out, x, rows_of(a) * rows_of(b), cols_of(x)));
    if (cols_of(x) > 0 && cols_of(b) > TCHI_MOST_SIZE / cols_of(x)) {
        return tchi_fail(TCH_ERR_SHAPE, "b has %lld columns and x has %lld: their product must stay below 2^31",
                         (long long)cols_of(b), (long long)cols_of(x));
    }
    return TCH_OK;
}

tch_status tch_kronecker_matmul(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
                                tch_tensor *out)
{
    TCHI_ENTER(context, "tch_kronecker_matmul");
    TCHI_TRY(check_matmul(context, a, b, x, out));
    return multiply_x(context, a, b, x, out, matmul_layout, matmul_part);
}

/* --- damped solve ------------------------------------------------------------------------------------------------- */

/* (A + pi sqrt(g) I)^-1 X (B + sqrt(g)/pi I)^-1, by two Cholesky factorizations. */
typedef struct solve_buffers {
    tch_matrices a, b;
    tch_matrices x; /* m by n */
    tch_matrices y; /* its transpose after the first solve: n by m */
    tchi_inspection of_a, of_b;
    double *trace_a, *trace_b;
    void *scratch;
} solve_buffers;

/* The two solves run in sequence and share it. */
static int64_t solve_scratch(tch_context *context, tch_scalar type, int64_t batch, int64_t m, int64_t n)
{
    const tch_backend *t = context->backend;
    int64_t left = t->device->scratch_bytes(context->state, TCH_SCRATCH_SPD_SOLVE, type, m, n, batch, 0);
    int64_t right = t->device->scratch_bytes(context->state, TCH_SCRATCH_SPD_SOLVE, type, n, m, batch, 0);
    return left > right ? left : right;
}

static void solve_layout(solve_buffers *s, tchi_arena *arena, tch_context *context, tch_scalar type, int64_t batch,
                         int64_t m, int64_t n)
{
    s->a = tchi_scratch_matrices(arena, type, batch, m, m);
    s->b = tchi_scratch_matrices(arena, type, batch, n, n);
    s->x = tchi_scratch_matrices(arena, type, batch, m, n);
    s->y = tchi_scratch_matrices(arena, type, batch, n, m);
    tchi_inspection_layout(&s->of_a, arena, batch);
    tchi_inspection_layout(&s->of_b, arena, batch);
    s->trace_a = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    s->trace_b = tchi_arena_take(arena, batch * (int64_t)sizeof(double));
    s->scratch = tchi_arena_take(arena, solve_scratch(context, type, batch, m, n));
}

typedef struct solve_call {
    tchi_batch a, b, x, out;
    const tch_tensor *report;
    double damping;
} solve_call;

static tch_status find_damping(tch_context *context, solve_buffers *s, double damping)
{
    const tch_backend *t = context->backend;
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_TRACE, &s->a, s->trace_a));
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_TRACE, &s->b, s->trace_b));
    return t->matrix->factored_damping(context->state, s->a.batch, s->trace_a, s->a.rows, s->trace_b, s->b.rows,
                                       damping, s->of_a.damping, s->of_b.damping);
}

/* The flags of A are passed through both solves, so that a pair with a bad A is skipped in the second too. B is checked
 * first on its own, and its flags are merged by solving it last with A's flags: a B that is not finite or not symmetric
 * must be detected before, so `select` copies B's flags where A's are good. */
static tch_status join_flags(tch_context *context, const solve_buffers *s)
{
    tch_matrices from = tchi_matrices_new(s->of_b.flags, TCH_SCALAR_I32, s->a.batch, 1, 1);
    tch_matrices to = tchi_matrices_new(s->of_a.flags, TCH_SCALAR_I32, s->a.batch, 1, 1);
    return context->backend->matrix->select(context->state, s->of_a.flags, &from, &to);
}

/* A non-finite X is not an overflow of the result. The buffer of B's flags, which are merged by now, is reused. */
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
    solve_layout(&s, &arena, context, type, count, c->x.rows, c->x.cols);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    solve_layout(&s, &arena, context, type, count, c->x.rows, c->x.cols);
    TCHI_TRY(tchi_batch_read(context, &c->a, first, &s.a));
    TCHI_TRY(tchi_batch_read(context, &c->b, first, &s.b));
    TCHI_TRY(tchi_batch_read(context, &c->x, first, &s.x));
    TCHI_TRY(tchi_inspect(context, &s.a, c->a.type, &s.of_a));
    TCHI_TRY(tchi_inspect(context, &s.b, c->b.type, &s.of_b));
    TCHI_TRY(join_flags(context, &s));
    TCHI_TRY(inspect_x(context, &s));
    TCHI_TRY(find_damping(context, &s, c->damping));
    TCHI_TRY(t->matrix->spd_solve(context->state, &s.a, s.of_a.damping, &s.x, s.of_a.flags, s.scratch));
    TCHI_TRY(tchi_transpose(context, &s.x, &s.y));
    TCHI_TRY(t->matrix->spd_solve(context->state, &s.b, s.of_b.damping, &s.y, s.of_a.flags, s.scratch));
    TCHI_TRY(t->matrix->flag_overflow(context->state, &s.y, tchi_most_number(c->x.type), s.of_a.flags));
    tchi_batch out = tchi_batch_transposed(c->out);
    tch_matrices spare = tchi_matrices_new(s.x.data, type, count, s.y.rows, s.y.cols);
    TCHI_TRY(tchi_batch_select(context, &out, first, s.of_a.flags, &s.y, &spare));
    return tchi_report(context, c->report, first, count, s.of_a.flags, "a, b or x", bad);
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

static tch_status check_solve(tch_context *context, const tch_tensor *a, const tch_tensor *b, const tch_tensor *x,
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
    TCHI_TRY(check_solve(context, a, b, x, damping, out, report));
    solve_call c = {
        tchi_batch_of(a, 2), tchi_batch_of(b, 2), tchi_batch_of(x, 2), tchi_batch_of(out, 2), report, damping};
    solve_buffers probe;
    tchi_arena one = {0};
    tch_scalar type = tchi_compute_type(c.x.type);
    solve_layout(&probe, &one, context, type, 1, c.x.rows, c.x.cols);
    int64_t fixed = solve_scratch(context, type, c.x.count, c.x.rows, c.x.cols);
    int64_t chunk = tchi_arena_fit(context, c.x.count, one.used, fixed);
    tch_status bad = TCH_OK;
    for (int64_t first = 0; first < c.x.count; first += chunk) {
        int64_t count = c.x.count - first < chunk ? c.x.count - first : chunk;
        TCHI_TRY(solve_part(context, &c, first, count, &bad));
    }
    return bad;
}

/* Newton-Schulz orthogonalisation: X <- a X + b (X X') X + c (X X')^2 X, on the side where X X' is small. */
#include <torchium/linalg.h>

#include "core/check.h"
#include "core/status.h"

#include "algebra.h"
#include "batch.h"
#include "limits.h"

#define MOST_STEPS 100

typedef struct coefficients {
    double a, b, c;
} coefficients;

/* Muon's one set; and Polar Express's, each optimal for what the steps before have left, the last one repeated. Its
 * authors divide all but the last by a safety factor, so that rounding cannot push a singular value out of range. */
static const coefficients muon = {3.4445, -4.7750, 2.0315};
static const coefficients polar_express[] = {
    {8.2872, -23.5959, 17.3004}, {4.1071, -2.9478, 0.5448}, {3.9487, -2.9089, 0.5518},
    {3.3184, -2.4885, 0.5100},   {2.3007, -1.6689, 0.4188}, {1.875, -1.25, 0.375},
};
#define POLAR_SETS ((int)(sizeof polar_express / sizeof polar_express[0]))
#define SAFETY 1.01

static coefficients coefficients_of(tch_ortho_method method, int step)
{
    if (method == TCH_ORTHO_MUON) {
        return muon;
    }
    if (step >= POLAR_SETS - 1) {
        return polar_express[POLAR_SETS - 1];
    }
    coefficients c = polar_express[step];
    double s = SAFETY;
    return (coefficients){c.a / s, c.b / (s * s * s), c.c / (s * s * s * s * s)};
}

typedef struct ortho_buffers {
    tch_matrices x, y;    /* rows <= cols */
    tch_matrices g, g2;   /* rows by rows */
    double *norm, *zeros; /* one per matrix */
    double *damping, *bound;
    int32_t *flags;
} ortho_buffers;

static void layout(ortho_buffers *o, tchi_arena *arena, tch_scalar type, int64_t batch, int64_t rows, int64_t cols)
{
    int64_t numbers = batch * (int64_t)sizeof(double);
    o->x = tchi_scratch_aligned(arena, type, batch, rows, cols);
    o->y = tchi_scratch_aligned(arena, type, batch, rows, cols);
    o->g = tchi_scratch_aligned(arena, type, batch, rows, rows);
    o->g2 = tchi_scratch_aligned(arena, type, batch, rows, rows);
    o->norm = tchi_arena_take(arena, numbers);
    o->zeros = tchi_arena_take(arena, numbers);
    o->damping = tchi_arena_take(arena, numbers);
    o->bound = tchi_arena_take(arena, numbers);
    o->flags = tchi_arena_take(arena, batch * (int64_t)sizeof(int32_t));
}

/* bfloat16 where the device has products for it: the steps pull singular values towards 1 from wherever rounding leaves
 * them, and an optimizer asks for no more. float64 stays what it is. */
static tch_scalar compute_type(const tch_context *context, tch_scalar type)
{
    bool narrow = type != TCH_SCALAR_F64 && tchi_product_rates(context).bf16 > 0;
    return narrow ? TCH_SCALAR_BF16 : tchi_compute_type(type);
}

/* X / |X|: the setup of a root gives the norm plus a floor, which keeps a zero matrix at zero. */
static tch_status normalize(tch_context *context, ortho_buffers *o)
{
    const tch_backend *t = context->backend;
    double floor = o->x.type == TCH_SCALAR_F64 ? 1e-300 : 1e-37;
    TCHI_TRY(t->reduce(context->state, TCH_REDUCE_FROBENIUS, &o->x, o->norm));
    TCHI_TRY(t->zero_bytes(context->state, o->zeros, o->x.batch * (int64_t)sizeof(double)));
    tch_root_norms norms = {o->norm, o->norm, o->zeros, o->zeros};
    TCHI_TRY(t->root_setup(context->state, o->x.batch, &norms, floor, 0.0, 1.0, 1.0, o->damping, o->bound, o->flags));
    return t->shift_scale(context->state, &o->x, NULL, o->bound, -1.0, &o->x);
}

static tch_status step(tch_context *context, coefficients c, ortho_buffers *o)
{
    TCHI_TRY(tchi_gram(context, 1.0, &o->x, 0, 0.0, &o->g));
    TCHI_TRY(tchi_symmetric_polynomial(context, c.a, c.b, &o->g, c.c, &o->g, &o->g, &o->g2));
    TCHI_TRY(context->backend->gemm(context->state, 1.0, &o->g2, 0, &o->x, 0, 0.0, &o->y));
    tch_matrices swap = o->x;
    o->x = o->y;
    o->y = swap;
    return TCH_OK;
}

static tch_status ortho_part(tch_context *context, const tchi_batch *a, const tchi_batch *out, int32_t steps,
                             tch_ortho_method method, int64_t first, int64_t count)
{
    ortho_buffers o;
    tchi_arena arena = {0};
    tch_scalar type = compute_type(context, a->type);
    layout(&o, &arena, type, count, a->rows, a->cols);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    layout(&o, &arena, type, count, a->rows, a->cols);
    TCHI_TRY(tchi_batch_read(context, a, first, &o.x));
    TCHI_TRY(normalize(context, &o));
    for (int32_t k = 0; k < steps; k++) {
        TCHI_TRY(step(context, coefficients_of(method, k), &o));
    }
    return tchi_batch_write(context, out, first, &o.x);
}

static tch_status check_call(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             const tch_tensor *out)
{
    TCHI_TRY(tchi_check_input(context, a, "a"));
    TCHI_TRY(tchi_check_matrix(a, "a"));
    TCHI_TRY(tchi_check_matrix_size(a, "a"));
    TCHI_TRY(tchi_check_float(a, "a"));
    TCHI_TRY(tchi_check_output(context, out, "out"));
    TCHI_TRY(tchi_check_same_dtype(out, "out", a, "a"));
    TCHI_TRY(tchi_check_same_shape(out, "out", a, "a"));
    TCHI_TRY(tchi_check_disjoint(out, "out", a, "a"));
    if (steps < 1 || steps > MOST_STEPS) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "steps is %d, expected 1 to %d", steps, MOST_STEPS);
    }
    if (method != TCH_ORTHO_POLAR_EXPRESS && method != TCH_ORTHO_MUON) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "method is %d, expected one of tch_ortho_method", (int)method);
    }
    return TCH_OK;
}

tch_status tch_orthogonalize(tch_context *context, const tch_tensor *a, int32_t steps, tch_ortho_method method,
                             tch_tensor *out)
{
    TCHI_ENTER(context, "tch_orthogonalize");
    TCHI_TRY(check_call(context, a, steps, method, out));
    tchi_batch from = tchi_batch_of(a, 2);
    tchi_batch to = tchi_batch_of(out, 2);
    if (from.rows == 0 || from.cols == 0) {
        return TCH_OK;
    }
    if (from.rows > from.cols) {
        from = tchi_batch_transposed(from);
        to = tchi_batch_transposed(to);
    }
    ortho_buffers probe;
    tchi_arena one = {0};
    layout(&probe, &one, compute_type(context, from.type), 1, from.rows, from.cols);
    int64_t chunk = tchi_arena_fit(context, from.count, one.used, 0);
    for (int64_t first = 0; first < from.count; first += chunk) {
        int64_t count = from.count - first < chunk ? from.count - first : chunk;
        TCHI_TRY(ortho_part(context, &from, &to, steps, method, first, count));
    }
    return TCH_OK;
}

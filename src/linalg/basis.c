/* Rows are orthonormalized by Cholesky: with W = S S' = L L', the rows of L^-1 S are the result of Gram-Schmidt on S.
 * This squares the condition number of S, which is large even near an eigenbasis, so read docs/numerics/soap-basis.md
 * before changing the precision of a product. For large n, gram_schmidt.c avoids the square. */
#include "basis.h"

#include <float.h>
#include <math.h>

#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"
#include "gram_schmidt.h"

/* A becomes A + shift trace(A) I, which has the same eigenvectors; otherwise rows in the null space of A would be
 * rounding error. The shift bounds the condition number of S by 1 / shift, and rows with smaller eigenvalues keep their
 * positions. Measured for shifts from 1e-7 to 1e-4: larger ones give worse bases. */
#define SHIFT_F64 1e-7
#define SHIFT_F32 1e-6

/* Added to W, whose diagonal is 1, before all passes but the last. In roundoffs; above the error of W, and growing with
 * n as that does. In float32 with n = 256 and factors of wide spectrum, 23 of 24 steps failed without it and none with
 * it. */
#define GRAM_ROUNDOFFS 640.0
#define GRAM_SIZE 1024.0

/* The type and number of orthonormalization passes. Adding to W costs orthogonality, which the next pass restores, but
 * not the span of leading rows, which the iteration relies on. */
typedef struct method {
    tch_scalar type;
    int passes; /* 0: Gram-Schmidt by panels in split products, see gram_schmidt.h */
    double shift;
    double gram_shift;
    bool split; /* S in split products, which are as accurate as float32 */
} method;

/* S is computed in split products from this n on, if they are this many times as fast as float64. */
#define SPLIT_FROM 512
#define SPLIT_GAIN 2.5

/* Panels are used if n times that ratio is at least this: the larger n, the smaller the share of small float64
 * products. On an H200, where split products count as 3.2 times as fast as float64, panels lose at n = 1024 and win at
 * 2304 (bench/logs/cuda_basis.md). */
#define PANELS_FROM 5000.0

/* Scales A, whose trace is 1, into the range of float16: its low parts are accurate to 2^-39. */
#define SPLIT_FACTOR 16384.0

/* Random vectors for measuring the drift of a basis. */
#define PROBES 4

/* Buffers of a product in split types; memory is reused as early as possible. */
typedef struct split_buffers {
    tch_matrices s; /* q A */
    tch_split_matrices a, q;
    tch_matrices sorted; /* the sorted rows of s; float32 or float64 */
} split_buffers;

typedef struct basis_buffers {
    tch_matrices m[3]; /* n by n, of the method's type */
    tch_matrices w;    /* 1 by n */
    void *probes;      /* three times n by PROBES, if n is too small for a matrix to hold them */
    int32_t *order;
    tchi_inspection inspection;
    void *scratch;
} basis_buffers;

/* For float32 rows one pass in float64 is accurate enough, and cheaper than three in float32 except on consumer
 * GPUs. */
static method method_for(const tch_context *context, tch_scalar type, int64_t n)
{
    tch_product_rates rates = tchi_product_rates(context);
    double size = (double)n > GRAM_SIZE ? (double)n / GRAM_SIZE : 1.0;
    if (type == TCH_SCALAR_F64) {
        return (method){TCH_SCALAR_F64, 2, SHIFT_F64, GRAM_ROUNDOFFS * size * DBL_EPSILON / 2, false};
    }
    if (2.0 * rates.f64 >= rates.f32) {
        bool offered = context->backend->matrix->split_rows != NULL;
        bool split = offered && n >= SPLIT_FROM && rates.f16x2 >= SPLIT_GAIN * rates.f64;
        bool panels = split && (double)n * rates.f16x2 >= PANELS_FROM * rates.f64;
        return (method){panels ? TCH_SCALAR_F32 : TCH_SCALAR_F64, panels ? 0 : 1, SHIFT_F64, 0.0, split};
    }
    return (method){TCH_SCALAR_F32, 3, SHIFT_F32, GRAM_ROUNDOFFS * size * FLT_EPSILON / 2, false};
}

/* --- scratch ---------------------------------------------------------------------------------------------------- */

static void layout_numbers(basis_buffers *buffers, tchi_arena *arena, tch_scalar type, int64_t n, int64_t batch)
{
    buffers->w = tchi_scratch_matrices(arena, type, batch, 1, n);
    buffers->probes = tchi_arena_take(arena, n < 3 * PROBES ? 3 * PROBES * batch * n * tchi_scalar_size(type) : 0);
    buffers->order = tchi_arena_take(arena, batch * n * (int64_t)sizeof *buffers->order);
    tchi_inspection_layout(&buffers->inspection, arena, batch);
}

static void layout(basis_buffers *buffers, tchi_arena *arena, tch_context *context, tch_scalar type, int count,
                   tch_scratch_for operation, int64_t n, int64_t batch)
{
    for (int i = 0; i < count; i++) {
        buffers->m[i] = tchi_scratch_aligned(arena, type, batch, n, n);
    }
    layout_numbers(buffers, arena, type, n, batch);
    buffers->scratch = tchi_arena_take(
        arena, context->backend->device->scratch_bytes(context->state, operation, type, n, n, batch, 0));
}

static void layout_track(basis_buffers *buffers, tchi_arena *arena, tch_context *context, tch_scalar type, int64_t n,
                         int64_t batch)
{
    layout(buffers, arena, context, type, 3, TCH_SCRATCH_CHOLESKY_INVERSE, n, batch);
}

/* Memory reuse with panels: `scratch`, used by orthonormalization, first holds q A; the two parts of A are later those
 * of the new q; sorted S replaces the parts of the old q. */
static void layout_panels(split_buffers *buffers, basis_buffers *common, tchi_arena *arena, tch_context *context,
                          int64_t n, int64_t batch)
{
    int64_t scratch = tchi_gram_schmidt_bytes(context, n, batch);
    tchi_arena work = {.base = arena->base == NULL ? NULL : arena->base + arena->used};
    buffers->s = tchi_scratch_aligned(&work, TCH_SCALAR_F32, batch, n, n);
    common->scratch = tchi_arena_take(arena, work.used > scratch ? work.used : scratch);
    buffers->a = tchi_split_layout(arena, batch, n, n);
    tchi_arena rows = {.base = arena->base == NULL ? NULL : arena->base + arena->used};
    buffers->sorted = tchi_scratch_aligned(&rows, TCH_SCALAR_F32, batch, n, n);
    buffers->q = tchi_split_layout(arena, batch, n, n);
    layout_numbers(common, arena, TCH_SCALAR_F32, n, batch);
}

/* The same within three float64 matrices, each with room for two float32 ones; the first becomes S. */
static split_buffers layout_inside(const basis_buffers *common)
{
    const tch_matrices *m = common->m;
    tchi_arena arenas[3] = {{.base = m[0].data}, {.base = m[1].data}, {.base = m[2].data}};
    split_buffers buffers = {.sorted = m[0]};
    buffers.q = tchi_split_layout(&arenas[0], m->batch, m->rows, m->cols);
    buffers.a = tchi_split_layout(&arenas[1], m->batch, m->rows, m->cols);
    buffers.s = tchi_scratch_aligned(&arenas[2], TCH_SCALAR_F32, m->batch, m->rows, m->cols);
    return buffers;
}

static void layout_init(basis_buffers *buffers, tchi_arena *arena, tch_context *context, tch_scalar type, int64_t n,
                        int64_t batch)
{
    layout(buffers, arena, context, type, 2, TCH_SCRATCH_EIGH, n, batch);
}

int64_t tchi_basis_init_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch)
{
    basis_buffers buffers;
    tchi_arena arena = {0};
    layout_init(&buffers, &arena, context, type, n, batch);
    return arena.used;
}

int64_t tchi_basis_track_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch)
{
    basis_buffers buffers;
    split_buffers split;
    tchi_arena arena = {0};
    method chosen = method_for(context, type, n);
    if (chosen.passes == 0) {
        layout_panels(&split, &buffers, &arena, context, n, batch);
    } else {
        layout_track(&buffers, &arena, context, chosen.type, n, batch);
    }
    return arena.used;
}

/* --- the first basis -------------------------------------------------------------------------------------------- */

tch_status tchi_basis_init(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *flags,
                           void *scratch)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    basis_buffers buffers;
    tchi_arena arena = {.base = scratch};
    layout_init(&buffers, &arena, context, a->type, a->rows, a->batch);
    const tch_matrices *ascending = &buffers.m[0];
    const tch_matrices *sorted = &buffers.m[1];
    buffers.inspection.flags = flags;
    TCHI_TRY(tchi_inspect(context, a, a->type, &buffers.inspection));
    TCHI_TRY(t->matrix->shift_scale(state, a, NULL, NULL, 1.0, ascending));
    TCHI_TRY(
        t->device->zero_bytes(state, buffers.w.data, buffers.w.batch * buffers.w.stride * tchi_scalar_size(a->type)));
    TCHI_TRY(t->matrix->eigh(state, ascending, &buffers.w, flags, buffers.scratch));
    TCHI_TRY(t->matrix->descending(state, &buffers.w, NULL, buffers.order));
    TCHI_TRY(t->matrix->permute(state, ascending, buffers.order, NULL, sorted));
    TCHI_TRY(t->matrix->combine(state, 1.0, 0.0, NULL, 0.0, NULL, q));
    return t->matrix->select(state, flags, sorted, q);
}

/* --- one step --------------------------------------------------------------------------------------------------- */

/* Computes A (A + damping I) / bound and flags. This is the setup of a root with the trace, an upper bound, for the
 * largest eigenvalue. */
static tch_status condition(tch_context *context, const tch_matrices *a, double shift, tchi_inspection *i)
{
    const tch_backend *t = context->backend;
    const tch_root_norms norms = {i->largest, i->max_abs, i->nonfinite, i->asymmetry};
    TCHI_TRY(tchi_measure(context, a, i));
    TCHI_TRY(t->matrix->reduce(context->state, TCH_REDUCE_TRACE, a, i->largest));
    return t->matrix->root_setup(context->state, a->batch, &norms, 0.0, shift, 1.0, tchi_symmetry_tolerance(a->type),
                                 i->damping, i->bound, i->flags);
}

static tch_matrices probes_in(void *room, int which, const tch_matrices *s)
{
    int64_t bytes = s->batch * s->rows * PROBES * tchi_scalar_size(s->type);
    return tchi_matrices_new((char *)room + which * bytes, s->type, s->batch, s->rows, PROBES);
}

/* |C - I| with C = D S q' D, where D scales the diagonal to 1, by random signs; S = q A, q and S of one type. The shift
 * in A keeps correlations of rounding error out of it. `spare` is overwritten. */
static tch_status measure_drift(tch_context *context, const tch_matrices *s, const tch_matrices *q,
                                const tch_matrices *spare, double *drift, basis_buffers *buffers)
{
    const tch_matrix_ops *t = context->backend->matrix;
    void *state = context->state;
    void *room = s->rows < 3 * PROBES ? buffers->probes : spare->data;
    tch_matrices v = probes_in(room, 0, s);
    tch_matrices u = probes_in(room, 1, s);
    tch_matrices y = probes_in(room, 2, s);
    if (drift == NULL) {
        return TCH_OK;
    }
    double unit = 1.0 / sqrt((double)PROBES * (double)s->rows);
    TCHI_TRY(t->row_dots(state, s, q, -0.5, &buffers->w));
    TCHI_TRY(t->random_signs(state, 0, &v));
    TCHI_TRY(t->scale_rows(state, &v, &buffers->w, &u));
    TCHI_TRY(t->gemm(state, 1.0, q, 1, &u, 0, 0.0, 0, &y));
    TCHI_TRY(t->gemm(state, 1.0, s, 0, &y, 0, 0.0, 0, &u));
    TCHI_TRY(t->scale_rows(state, &u, &buffers->w, &u));
    TCHI_TRY(t->combine(state, 0.0, unit, &u, -unit, &v, &u));
    return t->reduce(state, TCH_REDUCE_FROBENIUS, &u, drift);
}

/* m[0] = the rows of q A, sorted by their dot products with the rows of q. */
static tch_status multiply_and_sort(tch_context *context, const tch_matrices *a, const tch_matrices *q, double shift,
                                    double *drift, basis_buffers *buffers)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    tch_matrices *m = buffers->m;
    const tchi_inspection *i = &buffers->inspection;
    TCHI_TRY(condition(context, a, shift, &buffers->inspection));
    TCHI_TRY(t->matrix->shift_scale(state, a, i->damping, i->bound, -1.0, &m[0]));
    TCHI_TRY(t->matrix->shift_scale(state, q, NULL, NULL, 1.0, &m[1]));
    TCHI_TRY(t->matrix->gemm(state, 1.0, &m[1], 0, &m[0], 0, 0.0, 0, &m[2]));
    TCHI_TRY(measure_drift(context, &m[2], &m[1], &m[0], drift, buffers));
    TCHI_TRY(t->matrix->row_dots(state, &m[2], &m[1], 1.0, &buffers->w));
    TCHI_TRY(t->matrix->descending(state, &buffers->w, NULL, buffers->order));
    return t->matrix->permute(state, &m[2], buffers->order, NULL, &m[0]);
}

/* buffers->sorted = the same in split products; w is read as float32. */
static tch_status multiply_split(tch_context *context, const tch_matrices *a, const tch_matrices *q, double shift,
                                 double *drift, split_buffers *buffers, basis_buffers *common)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    common->w.type = TCH_SCALAR_F32;
    buffers->a.scale = SPLIT_FACTOR;
    const tch_rows_to_split conditioned = {
        .x = a, .out = &buffers->a, .shift = common->inspection.damping, .bound = common->inspection.bound};
    TCHI_TRY(condition(context, a, shift, &common->inspection));
    TCHI_TRY(t->matrix->split_rows(state, &conditioned));
    TCHI_TRY(tchi_split(context, q, TCHI_SPLIT_UNIT, &buffers->q));
    const tch_split_problem product = {
        .alpha = 1.0, .a = &buffers->q, .b = &buffers->a, .low = TCH_LOW_BOTH, .c = &buffers->s};
    TCHI_TRY(tchi_split_product(context, &product));
    TCHI_TRY(measure_drift(context, &buffers->s, q, &buffers->sorted, drift, common));
    TCHI_TRY(t->matrix->row_dots(state, &buffers->s, q, 1.0, &common->w));
    TCHI_TRY(t->matrix->descending(state, &common->w, NULL, common->order));
    return t->matrix->permute(state, &buffers->s, common->order, NULL, &buffers->sorted);
}

/* Rows are scaled to length 1 first, so that the shift is the same fraction of every diagonal entry of W. */
static tch_status shifted_gram(tch_context *context, double shift, basis_buffers *buffers)
{
    const tch_backend *t = context->backend;
    tch_matrices *m = buffers->m;
    TCHI_TRY(t->matrix->row_dots(context->state, &m[0], &m[0], -0.5, &buffers->w));
    TCHI_TRY(t->matrix->scale_rows(context->state, &m[0], &buffers->w, &m[0]));
    TCHI_TRY(tchi_gram(context, 1.0, &m[0], 0, 0.0, &m[2]));
    return t->matrix->combine(context->state, shift, 1.0, &m[2], 0.0, NULL, &m[2]);
}

/* Orthonormalizes the rows of m[0]. Without a shift Cholesky does not depend on their lengths. */
static tch_status orthonormalize(tch_context *context, double shift, int32_t *flags, basis_buffers *buffers)
{
    tch_matrices *m = buffers->m;
    TCHI_TRY(shift > 0.0 ? shifted_gram(context, shift, buffers) : tchi_gram(context, 1.0, &m[0], 0, 0.0, &m[2]));
    TCHI_TRY(context->backend->matrix->cholesky(context->state, &m[2], 1, &m[1], flags, buffers->scratch));
    TCHI_TRY(tchi_lower_product(context, &m[1], &m[0], &m[2]));
    tch_matrices result = m[2];
    m[2] = m[0];
    m[0] = result;
    return TCH_OK;
}

static tch_status track_by_panels(tch_context *context, const tch_matrices *a, const tch_matrices *q, double shift,
                                  int32_t *order, int32_t *flags, double *drift, void *scratch)
{
    split_buffers buffers;
    basis_buffers common;
    tchi_arena arena = {.base = scratch};
    layout_panels(&buffers, &common, &arena, context, a->rows, a->batch);
    common.inspection.flags = flags;
    common.order = order != NULL ? order : common.order;
    TCHI_TRY(multiply_split(context, a, q, shift, drift, &buffers, &common));
    TCHI_TRY(tchi_gram_schmidt(context, &buffers.sorted, &buffers.a, flags, common.scratch));
    return context->backend->matrix->select(context->state, flags, &buffers.sorted, q);
}

static tch_status track_whole(tch_context *context, const tch_matrices *a, const tch_matrices *q, const method *how,
                              int32_t *order, int32_t *flags, double *drift, void *scratch)
{
    basis_buffers buffers;
    tchi_arena arena = {.base = scratch};
    layout_track(&buffers, &arena, context, how->type, a->rows, a->batch);
    buffers.inspection.flags = flags;
    buffers.order = order != NULL ? order : buffers.order;
    if (how->split) {
        split_buffers inside = layout_inside(&buffers);
        TCHI_TRY(multiply_split(context, a, q, how->shift, drift, &inside, &buffers));
    } else {
        TCHI_TRY(multiply_and_sort(context, a, q, how->shift, drift, &buffers));
    }
    for (int pass = 0; pass < how->passes; pass++) {
        TCHI_TRY(orthonormalize(context, pass + 1 < how->passes ? how->gram_shift : 0.0, flags, &buffers));
    }
    return context->backend->matrix->select(context->state, flags, &buffers.m[0], q);
}

tch_status tchi_basis_track(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *order,
                            int32_t *flags, double *drift, void *scratch)
{
    method how = method_for(context, a->type, a->rows);
    TCHI_TRY(how.passes == 0 ? track_by_panels(context, a, q, how.shift, order, flags, drift, scratch)
                             : track_whole(context, a, q, &how, order, flags, drift, scratch));
    tch_matrices sizes = {NULL, a->type, 1, a->rows, a->rows, a->batch, a->rows};
    return order == NULL ? TCH_OK : context->backend->matrix->descending(context->state, &sizes, flags, order);
}

/* See gram_schmidt.h. By panels: rows are projected against those that are done, and within a panel made orthonormal by
 * Cholesky in float64, whose squared condition number float64 can bear.
 *
 *     for each panel S_k, Q the rows before it:
 *         S_k <- S_k - (S_k Q') Q                 rough; by halves, with all rows below at once
 *         S_k <- S_k - (S_k Q') Q                 full
 *         L L' = S_k S_k',  S_k <- L^-1 S_k       in float64; for the first panel twice
 *         S_k <- S_k - (S_k Q') Q                 of something small
 *
 * Before changing any of it read docs/numerics/soap-basis.md. A projection leaves about 1e-7 of a row's length in the
 * span it projects from, and what is left of a row may be 1e-6 of it, so one is not enough; nor are two, where the
 * panel that comes out of them is badly conditioned and Cholesky magnifies what they left. Coefficients may be rough,
 * since what they miss is in the span, and the next projection takes it; Q may not, where it is subtracted. */
#include "gram_schmidt.h"

#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"

/* Rows of a panel. The fewer, the less there is to do in float64, and the smaller the products and the more of them. */
#define PANEL 256

/* --- split products ---------------------------------------------------------------------------------------------- */

tch_split_matrices tchi_split_layout(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols)
{
    tch_split_matrices split = {.scale = 1.0};
    split.high = tchi_scratch_aligned(arena, TCH_SCALAR_F16, batch, rows, cols);
    split.low = tchi_scratch_aligned(arena, TCH_SCALAR_F16, batch, rows, cols);
    return split;
}

tch_status tchi_split_rows(tch_context *context, const tch_matrices *x, double scale, bool normalize,
                           tch_split_matrices *split)
{
    split->scale = scale;
    return context->backend->matrix->split_rows(context->state, x, scale, normalize, &split->high, &split->low);
}

/* The small parts first, so that they are not lost beside the large one. */
static tch_status multiply_parts(tch_context *context, const tch_split_problem *p)
{
    tch_gemm_op *gemm = context->backend->matrix->gemm;
    void *state = context->state;
    double factor = p->alpha / (p->a->scale * p->b->scale);
    double beta = p->beta;
    if (p->low & TCH_LOW_A) {
        TCHI_TRY(gemm(state, factor, &p->a->low, 0, &p->b->high, p->transpose_b, beta, p->c));
        beta = 1.0;
    }
    if (p->low & TCH_LOW_B) {
        TCHI_TRY(gemm(state, factor, &p->a->high, 0, &p->b->low, p->transpose_b, beta, p->c));
        beta = 1.0;
    }
    return gemm(state, factor, &p->a->high, 0, &p->b->high, p->transpose_b, beta, p->c);
}

tch_status tchi_split_product(tch_context *context, const tch_split_problem *p)
{
    const tch_matrix_ops *t = context->backend->matrix;
    int32_t taken = 0;
    if (t->split_product != NULL) {
        TCHI_TRY(t->split_product(context->state, p, &taken));
    }
    if (taken) {
        return TCH_OK;
    }
    TCHI_TRY(multiply_parts(context, p));
    const tch_split_matrices *split = p->split_c;
    return split == NULL ? TCH_OK : t->split_rows(context->state, p->c, split->scale, 0, &split->high, &split->low);
}

static tch_matrices rows_of(const tch_matrices *m, int64_t first, int64_t rows)
{
    return tchi_matrices_block(m, first, 0, rows, m->cols);
}

static tch_split_matrices split_rows_of(const tch_split_matrices *split, int64_t first, int64_t rows)
{
    return (tch_split_matrices){rows_of(&split->high, first, rows), rows_of(&split->low, first, rows), split->scale};
}

/* --- scratch ----------------------------------------------------------------------------------------------------- */

/* For a projection: the rows, and their coefficients. */
typedef struct projection {
    tch_split_matrices rows;
    tch_matrices c;
    tch_split_matrices coefficients;
} projection;

static projection layout_projection(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols, int64_t done)
{
    projection p;
    p.rows = tchi_split_layout(arena, batch, rows, cols);
    p.c = tchi_scratch_aligned(arena, TCH_SCALAR_F32, batch, rows, done);
    p.coefficients = tchi_split_layout(arena, batch, rows, done);
    return p;
}

/* For Cholesky within a panel, in float64. */
typedef struct panel {
    tch_matrices before, after; /* the rows */
    tch_matrices gram, inverse;
    void *scratch;
} panel;

static panel layout_panel(tchi_arena *arena, tch_context *context, int64_t batch, int64_t rows, int64_t cols)
{
    panel p;
    p.before = tchi_scratch_aligned(arena, TCH_SCALAR_F64, batch, rows, cols);
    p.after = tchi_scratch_aligned(arena, TCH_SCALAR_F64, batch, rows, cols);
    p.gram = tchi_scratch_aligned(arena, TCH_SCALAR_F64, batch, rows, rows);
    p.inverse = tchi_scratch_aligned(arena, TCH_SCALAR_F64, batch, rows, rows);
    p.scratch =
        tchi_arena_take(arena, context->backend->device->scratch_bytes(context->state, TCH_SCRATCH_CHOLESKY_INVERSE,
                                                                       TCH_SCALAR_F64, rows, rows, batch, 0));
    return p;
}

/* Where rows are cut: half of their panels, rounded up, so that only the last panel is ragged. */
static int64_t first_half(int64_t rows)
{
    return ((rows + PANEL - 1) / PANEL + 1) / 2 * PANEL;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t projection_bytes(int64_t batch, int64_t rows, int64_t cols, int64_t done)
{
    tchi_arena arena = {0};
    layout_projection(&arena, batch, rows, cols, done);
    return arena.used;
}

/* What `orthonormalize` of rows [first, first + rows) needs at most at a time. */
static int64_t bytes_for(tch_context *context, int64_t n, int64_t batch, int64_t first, int64_t rows)
{
    if (rows <= PANEL) {
        tchi_arena arena = {0};
        layout_panel(&arena, context, batch, rows, n);
        return larger(arena.used, projection_bytes(batch, rows, n, first));
    }
    int64_t upper = first_half(rows);
    int64_t inside =
        larger(bytes_for(context, n, batch, first, upper), bytes_for(context, n, batch, first + upper, rows - upper));
    return larger(inside, projection_bytes(batch, rows - upper, n, upper));
}

int64_t tchi_gram_schmidt_bytes(tch_context *context, int64_t n, int64_t batch)
{
    return bytes_for(context, n, batch, 0, n);
}

/* --- the steps --------------------------------------------------------------------------------------------------- */

/* What the steps work on. */
typedef struct work {
    tch_context *context;
    const tch_matrices *s;
    const tch_split_matrices *planes;
    int32_t *flags;
    void *scratch;
} work;

/* The low parts that count in coefficients, and in what is subtracted. */
typedef struct precision {
    tch_low coefficients, difference;
} precision;

static const precision rough = {TCH_LOW_NONE, TCH_LOW_B};
static const precision full = {TCH_LOW_BOTH, TCH_LOW_BOTH};
static const precision of_little = {TCH_LOW_BOTH, TCH_LOW_NONE};

/* Rows of S, brought to length 1, less their parts along `count` rows that are done, from row `from` on. */
static tch_status project(const work *w, const tch_matrices *rows, int64_t from, int64_t count, precision how)
{
    tchi_arena arena = {.base = w->scratch};
    projection p = layout_projection(&arena, rows->batch, rows->rows, rows->cols, count);
    tch_split_matrices done = split_rows_of(w->planes, from, count);
    if (count == 0) {
        return TCH_OK;
    }
    done.scale = TCHI_SPLIT_UNIT;
    TCHI_TRY(tchi_split_rows(w->context, rows, TCHI_SPLIT_UNIT, true, &p.rows));
    p.coefficients.scale = TCHI_SPLIT_UNIT;
    const tch_split_problem coefficients = {
        1.0, &p.rows, &done, 1, how.coefficients, 0.0, &p.c, &p.coefficients,
    };
    const tch_split_problem difference = {-1.0, &p.coefficients, &done, 0, how.difference, 1.0, rows, NULL};
    TCHI_TRY(tchi_split_product(w->context, &coefficients));
    return tchi_split_product(w->context, &difference);
}

static tch_status convert(tch_context *context, const tch_matrices *from, const tch_matrices *to)
{
    return context->backend->matrix->shift_scale(context->state, from, NULL, NULL, 1.0, to);
}

static tch_status orthonormalize_panel(const work *w, const tch_matrices *rows)
{
    const tch_matrix_ops *t = w->context->backend->matrix;
    void *state = w->context->state;
    tchi_arena arena = {.base = w->scratch};
    panel p = layout_panel(&arena, w->context, rows->batch, rows->rows, rows->cols);
    TCHI_TRY(convert(w->context, rows, &p.before));
    TCHI_TRY(tchi_gram(w->context, 1.0, &p.before, 0, 0.0, &p.gram));
    TCHI_TRY(t->cholesky_inverse(state, &p.gram, &p.inverse, w->flags, p.scratch));
    TCHI_TRY(tchi_lower_product(w->context, &p.inverse, &p.before, &p.after));
    return convert(w->context, &p.after, rows);
}

/* All others are projected against the first panel again and again, and it has nothing to be projected against: where
 * its rows are nearly one, as after gradients of rank 1, a second time makes it as orthonormal as they will be. */
static tch_status finish_panel(const work *w, int64_t first, int64_t count)
{
    tch_matrices rows = rows_of(w->s, first, count);
    tch_split_matrices planes = split_rows_of(w->planes, first, count);
    TCHI_TRY(project(w, &rows, 0, first, full));
    TCHI_TRY(orthonormalize_panel(w, &rows));
    TCHI_TRY(first == 0 ? orthonormalize_panel(w, &rows) : project(w, &rows, 0, first, of_little));
    return tchi_split_rows(w->context, &rows, TCHI_SPLIT_UNIT, true, &planes);
}

/* Rows [first, first + count), those of one half before those of the other. */
static tch_status orthonormalize(const work *w, int64_t first, int64_t count)
{
    if (count <= PANEL) {
        return finish_panel(w, first, count);
    }
    int64_t upper = first_half(count);
    tch_matrices rest = rows_of(w->s, first + upper, count - upper);
    TCHI_TRY(orthonormalize(w, first, upper));
    TCHI_TRY(project(w, &rest, first, upper, rough));
    return orthonormalize(w, first + upper, count - upper);
}

tch_status tchi_gram_schmidt(tch_context *context, const tch_matrices *s, const tch_split_matrices *planes,
                             int32_t *flags, void *scratch)
{
    const work w = {context, s, planes, flags, scratch};
    return s->rows == 0 ? TCH_OK : orthonormalize(&w, 0, s->rows);
}

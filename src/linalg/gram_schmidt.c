/* See gram_schmidt.h. By panels: rows are projected against those that are done, and within a panel made orthonormal by
 * Cholesky in float64, whose squared condition number float64 can bear.
 *
 *     for each panel S_k, Q the rows before it:
 *         S_k <- S_k - (S_k Q') Q                 rough; by halves, with all rows below at once
 *         S_k <- S_k - (S_k Q') Q                 full
 *         L L' = S_k S_k',  S_k <- L^-1 S_k       in float64; for the first panel twice
 *         S_k <- S_k - (S_k Q') Q                 of something small, where Cholesky has magnified what was left
 *
 * Before changing any of it read docs/numerics/soap-basis.md. A projection leaves about 1e-7 of a row's length in the
 * span it projects from, and what is left of a row may be 1e-6 of it, so one is not enough; nor are two, where the
 * panel that comes out of them is badly conditioned and Cholesky magnifies what they left. Coefficients may be rough,
 * since what they miss is in the span, and the next projection takes it; Q may not, where it is subtracted. */
#include "gram_schmidt.h"

#include "core/arith.h"
#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"

/* Rows of a panel. The fewer, the less there is to do in float64, and the smaller the products and the more of them. */
#define PANEL 256

/* Rows of length 1 or less times this are in the range of float16, and those of 1e-6 still have all bits of it. */
#define ROUGH_UNIT 16384.0

/* The full projection is one of high parts alone where no coefficient is larger than this: then low parts change a row
 * by 2^-13 of what the coefficients add up to, sqrt(n) times this at most and a fourth of that as a rule: by a few
 * roundings to float32. */
#define SMALL_COEFFICIENT 0x1p-13

/* A panel is projected once more where the square of a row of L^-1, which is 1 for orthonormal rows, is more than this:
 * what two projections leave of rows along Q, Cholesky makes larger by as much. */
#define GROWTH 3.0

/* --- split products ---------------------------------------------------------------------------------------------- */

tch_split_matrices tchi_split_layout(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols)
{
    tch_split_matrices split = {.scale = 1.0};
    split.high = tchi_scratch_aligned(arena, TCH_SCALAR_F16, batch, rows, cols);
    split.low = tchi_scratch_aligned(arena, TCH_SCALAR_F16, batch, rows, cols);
    return split;
}

tch_status tchi_split(tch_context *context, const tch_matrices *x, double scale, tch_split_matrices *split)
{
    split->scale = scale;
    return context->backend->matrix->split_rows(context->state, &(tch_rows_to_split){.x = x, .out = split});
}

/* The small parts first, so that they are not lost beside the large one. */
static tch_status multiply_parts(tch_context *context, const tch_split_problem *p)
{
    tch_gemm_op *gemm = context->backend->matrix->gemm;
    void *state = context->state;
    double factor = p->alpha / (p->a->scale * p->b->scale);
    double beta = p->beta;
    if (p->low & TCH_LOW_A) {
        TCHI_TRY(gemm(state, factor, &p->a->low, 0, &p->b->high, p->transpose_b, beta, 0, p->c));
        beta = 1.0;
    }
    if (p->low & TCH_LOW_B) {
        TCHI_TRY(gemm(state, factor, &p->a->high, 0, &p->b->low, p->transpose_b, beta, 0, p->c));
        beta = 1.0;
    }
    return gemm(state, factor, &p->a->high, 0, &p->b->high, p->transpose_b, beta, 0, p->c);
}

tch_status tchi_split_product(tch_context *context, const tch_split_problem *p)
{
    const tch_backend *t = context->backend;
    void *state = context->state;
    int32_t handled = 0;
    if (p->largest != NULL) {
        TCHI_TRY(t->device->zero_bytes(state, p->largest, p->c->batch * (int64_t)sizeof *p->largest));
    }
    if (t->matrix->split_product != NULL) {
        TCHI_TRY(t->matrix->split_product(state, p, &handled));
    }
    if (handled) {
        return TCH_OK;
    }
    TCHI_TRY(multiply_parts(context, p));
    if (p->largest != NULL) {
        TCHI_TRY(t->matrix->reduce(state, TCH_REDUCE_MAX_ABS, p->c, p->largest));
    }
    if (p->wide != NULL) {
        return t->matrix->shift_scale(state, p->c, NULL, NULL, 1.0, p->wide);
    }
    return p->split_c == NULL ? TCH_OK
                              : t->matrix->split_rows(state, &(tch_rows_to_split){.x = p->c, .out = p->split_c});
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

/* In front of a panel's other scratch, and of that of the projection which writes it. */
static tch_matrices layout_before(tchi_arena *arena, int64_t batch, int64_t rows, int64_t cols)
{
    return tchi_scratch_aligned(arena, TCH_SCALAR_F64, batch, rows, cols);
}

static panel layout_panel(tchi_arena *arena, tch_context *context, int64_t batch, int64_t rows, int64_t cols)
{
    panel p;
    p.before = layout_before(arena, batch, rows, cols);
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
        tchi_arena before = {0};
        layout_panel(&arena, context, batch, rows, n);
        layout_before(&before, batch, rows, n);
        return tchi_max(arena.used, before.used + projection_bytes(batch, rows, n, first));
    }
    int64_t upper = first_half(rows);
    int64_t inside =
        tchi_max(bytes_for(context, n, batch, first, upper), bytes_for(context, n, batch, first + upper, rows - upper));
    return tchi_max(inside, projection_bytes(batch, rows - upper, n, upper));
}

/* One for each matrix, in front of everything else. */
typedef struct numbers {
    double *largest; /* of coefficients */
    double *growth;  /* the largest of `squares` */
    double *squares; /* of the rows of L^-1 */
} numbers;

static numbers layout_numbers(tchi_arena *arena, int64_t batch)
{
    numbers all;
    all.largest = tchi_arena_take(arena, batch * (int64_t)sizeof *all.largest);
    all.growth = tchi_arena_take(arena, batch * (int64_t)sizeof *all.growth);
    all.squares = tchi_arena_take(arena, batch * PANEL * (int64_t)sizeof *all.squares);
    return all;
}

int64_t tchi_gram_schmidt_bytes(tch_context *context, int64_t n, int64_t batch)
{
    tchi_arena arena = {0};
    layout_numbers(&arena, batch);
    return arena.used + bytes_for(context, n, batch, 0, n);
}

/* --- the steps --------------------------------------------------------------------------------------------------- */

/* What the steps work on. */
typedef struct work {
    tch_context *context;
    const tch_matrices *s;
    const tch_split_matrices *planes;
    int32_t *flags;
    numbers of_each;
    void *scratch;
} work;

/* The low parts that count in coefficients, and in what is subtracted; and where less will do. */
typedef struct precision {
    tch_low coefficients, difference;
    tch_condition high_alone, negligible;
} precision;

/* X's rows, of length 1, are split; they go to `rows`, too. */
static tch_status split_unit_rows(const work *w, const tch_matrices *x, const tch_matrices *rows,
                                  const tch_split_matrices *out, tch_condition done)
{
    const tch_rows_to_split problem = {.x = x, .rows = rows, .out = out, .done = done};
    return w->context->backend->matrix->split_rows(w->context->state, &problem);
}

/* Rows, which have been split, less their parts along rows that are done, from row `from` on; where `wide` is not NULL,
 * what comes out goes there. */
static tch_status subtract_projection(const work *w, const tch_matrices *rows, const tch_split_matrices *split,
                                      int64_t from, projection *p, const precision *how, const tch_matrices *wide)
{
    tch_split_matrices done = split_rows_of(w->planes, from, p->c.cols);
    p->coefficients.scale = TCHI_SPLIT_UNIT;
    const tch_split_problem coefficients = {.alpha = 1.0,
                                            .a = split,
                                            .b = &done,
                                            .transpose_b = 1,
                                            .low = how->coefficients,
                                            .c = &p->c,
                                            .split_c = &p->coefficients,
                                            .negligible = how->negligible,
                                            .largest = how->high_alone.of != NULL ? w->of_each.largest : NULL};
    const tch_split_problem difference = {.alpha = -1.0,
                                          .a = &p->coefficients,
                                          .b = &done,
                                          .low = how->difference,
                                          .beta = 1.0,
                                          .c = rows,
                                          .high_alone = how->high_alone,
                                          .negligible = how->negligible,
                                          .wide = wide};
    TCHI_TRY(tchi_split_product(w->context, &coefficients));
    return tchi_split_product(w->context, &difference);
}

/* Rows of S less their parts along `count` rows that are done, from row `from` on, roughly: by high parts alone, of
 * rows that are brought to length 1 where they come from S. Later they have been, and are not much shorter. */
static tch_status project_roughly(const work *w, const tch_matrices *rows, int64_t from, int64_t count, bool from_s)
{
    const precision rough = {.coefficients = TCH_LOW_NONE, .difference = TCH_LOW_B};
    tchi_arena arena = {.base = w->scratch};
    projection p = layout_projection(&arena, rows->batch, rows->rows, rows->cols, count);
    p.rows.scale = ROUGH_UNIT;
    tch_split_matrices high = p.rows;
    high.low.data = NULL;
    const tch_rows_to_split problem = {.x = rows, .rows = from_s ? rows : NULL, .out = &high};
    TCHI_TRY(w->context->backend->matrix->split_rows(w->context->state, &problem));
    return subtract_projection(w, rows, &p.rows, from, &p, &rough, NULL);
}

/* The rows of a panel, brought to length 1, less their parts along all before it, to where Cholesky reads them. */
static tch_status project_fully(const work *w, const tch_matrices *rows, int64_t first)
{
    const precision full = {.coefficients = TCH_LOW_BOTH,
                            .difference = TCH_LOW_BOTH,
                            .high_alone = {w->of_each.largest, SMALL_COEFFICIENT}};
    tchi_arena arena = {.base = w->scratch};
    tch_matrices before = layout_before(&arena, rows->batch, rows->rows, rows->cols);
    projection p = layout_projection(&arena, rows->batch, rows->rows, rows->cols, first);
    p.rows.scale = TCHI_SPLIT_UNIT;
    TCHI_TRY(split_unit_rows(w, rows, rows, &p.rows, (tch_condition){0}));
    return subtract_projection(w, rows, &p.rows, 0, &p, &full, &before);
}

static tch_status measure_growth(const work *w, const tch_matrices *inverse)
{
    const tch_matrix_ops *t = w->context->backend->matrix;
    tch_matrices squares = tchi_matrices_new(w->of_each.squares, TCH_SCALAR_F64, inverse->batch, 1, inverse->rows);
    TCHI_TRY(t->row_dots(w->context->state, inverse, inverse, 1.0, &squares));
    return t->reduce(w->context->state, TCH_REDUCE_MAX_ABS, &squares, w->of_each.growth);
}

/* The rows of `before` become orthonormal in `after`; what is above the diagonal of L^-1 are zeros, for its norm. */
static tch_status by_cholesky(const work *w, const panel *p, const tch_matrices *before, const tch_matrices *after)
{
    const tch_matrix_ops *t = w->context->backend->matrix;
    for (int64_t first = 0, end = TCH_LOWER_BLOCK; end < p->inverse.rows; first = end, end += TCH_LOWER_BLOCK) {
        tch_matrices beside = tchi_matrices_block(&p->inverse, first, end, end - first, p->inverse.cols - end);
        TCHI_TRY(t->combine(w->context->state, 0.0, 0.0, NULL, 0.0, NULL, &beside));
    }
    TCHI_TRY(tchi_gram(w->context, 1.0, before, 0, 0.0, &p->gram));
    TCHI_TRY(t->cholesky(w->context->state, &p->gram, 1, &p->inverse, w->flags, p->scratch));
    return tchi_lower_product(w->context, &p->inverse, before, after);
}

/* All others are projected against the first panel again and again, and it has nothing to be projected against: where
 * its rows are nearly one, as after gradients of rank 1, a second time makes it as orthonormal as they will be. */
static tch_status orthonormalize_panel(const work *w, const tch_matrices *rows, bool is_first,
                                       const tch_split_matrices *planes)
{
    tchi_arena arena = {.base = w->scratch};
    panel p = layout_panel(&arena, w->context, rows->batch, rows->rows, rows->cols);
    const tch_matrices *result = &p.after;
    if (is_first) {
        TCHI_TRY(w->context->backend->matrix->shift_scale(w->context->state, rows, NULL, NULL, 1.0, &p.before));
    }
    TCHI_TRY(by_cholesky(w, &p, &p.before, &p.after));
    if (is_first) {
        result = &p.before;
        TCHI_TRY(by_cholesky(w, &p, &p.after, &p.before));
    } else {
        TCHI_TRY(measure_growth(w, &p.inverse));
    }
    return split_unit_rows(w, result, rows, planes, (tch_condition){0});
}

/* The last projection of a panel, where what is left to it is not negligible. */
static tch_status project_again(const work *w, const tch_matrices *rows, const tch_split_matrices *planes,
                                int64_t first)
{
    const tch_condition negligible = {w->of_each.growth, GROWTH};
    const precision of_little = {.coefficients = TCH_LOW_BOTH, .difference = TCH_LOW_NONE, .negligible = negligible};
    tchi_arena arena = {.base = w->scratch};
    projection p = layout_projection(&arena, rows->batch, rows->rows, rows->cols, first);
    TCHI_TRY(subtract_projection(w, rows, planes, 0, &p, &of_little, NULL));
    return split_unit_rows(w, rows, rows, planes, negligible);
}

static tch_status finish_panel(const work *w, int64_t first, int64_t count)
{
    tch_matrices rows = rows_of(w->s, first, count);
    tch_split_matrices planes = split_rows_of(w->planes, first, count);
    if (first == 0) {
        return orthonormalize_panel(w, &rows, true, &planes);
    }
    TCHI_TRY(project_fully(w, &rows, first));
    TCHI_TRY(orthonormalize_panel(w, &rows, false, &planes));
    return project_again(w, &rows, &planes, first);
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
    TCHI_TRY(project_roughly(w, &rest, first, upper, first == 0));
    return orthonormalize(w, first + upper, count - upper);
}

tch_status tchi_gram_schmidt(tch_context *context, const tch_matrices *s, const tch_split_matrices *planes,
                             int32_t *flags, void *scratch)
{
    tchi_arena arena = {.base = scratch};
    numbers of_each = layout_numbers(&arena, s->batch);
    const tch_split_matrices unit = {planes->high, planes->low, TCHI_SPLIT_UNIT};
    const work w = {context, s, &unit, flags, of_each, arena.base + arena.used};
    return s->rows == 0 ? TCH_OK : orthonormalize(&w, 0, s->rows);
}

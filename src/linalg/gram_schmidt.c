/* By panels: rows are projected against the finished ones and, within a panel, orthonormalized by Cholesky in float64,
 * which tolerates the squared condition number.
 *
 *     for each panel S_k, Q the rows before it:
 *         S_k <- S_k - (S_k Q') Q                 rough; recursively, with all rows below at once
 *         S_k <- S_k - (S_k Q') Q                 full
 *         L L' = S_k S_k',  S_k <- L^-1 S_k       in float64; for the first panel twice
 *         S_k <- S_k - (S_k Q') Q                 a small correction, if Cholesky has amplified the remainder
 *
 * Read docs/numerics/soap-basis.md before changing this. A projection leaves about 1e-7 of a row's length in the span
 * it projects from, and the rest of a row may be as small as 1e-6, so one projection is not enough; nor are two if the
 * resulting panel is badly conditioned and Cholesky amplifies the remainder. Coefficients may be rough, since their
 * error is in the span and the next projection removes it; the Q that is subtracted may not. */
#include "gram_schmidt.h"

#include "core/arith.h"
#include "core/status.h"
#include "core/tensor.h"

#include "algebra.h"
#include "batch.h"

/* Rows of a panel. Fewer rows mean less float64 work but smaller and more products. */
#define PANEL 256

/* Rows of length at most 1, multiplied by this, are in the range of float16, and rows of length 1e-6 still have all its
 * bits. */
#define ROUGH_UNIT 16384.0

/* The full projection uses the high parts only if all coefficients are below this. The low parts then change a row by
 * 2^-13 of the sum of the coefficients, which is at most sqrt(n) times this and usually a quarter of that: a few
 * float32 roundoffs. */
#define SMALL_COEFFICIENT 0x1p-13

/* A panel is projected once more if the squared norm of a row of L^-1, which is 1 for orthonormal rows, exceeds this:
 * Cholesky amplifies what two projections leave along Q by that factor. */
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

/* Small parts first: adding them to the large one would lose bits. */
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

/* Buffers of Cholesky within a panel, in float64. */
typedef struct panel {
    tch_matrices before, after; /* the rows */
    tch_matrices gram, inverse;
    void *scratch;
} panel;

/* Precedes a panel's other scratch and that of the projection that writes it. */
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

/* Splits rows at half of their panels, rounded up, so that only the last panel is ragged. */
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

/* The peak scratch of `orthonormalize` on rows [first, first + rows). */
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

/* One per matrix, before everything else. */
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

typedef struct work {
    tch_context *context;
    const tch_matrices *s;
    const tch_split_matrices *planes;
    int32_t *flags;
    numbers of_each;
    void *scratch;
} work;

/* Which low parts are used in coefficients and in the subtraction; and where fewer suffice. */
typedef struct precision {
    tch_low coefficients, difference;
    tch_condition high_alone, negligible;
} precision;

/* Splits X's unit rows, and copies them to `rows`. */
static tch_status split_unit_rows(const work *w, const tch_matrices *x, const tch_matrices *rows,
                                  const tch_split_matrices *out, tch_condition done)
{
    const tch_rows_to_split problem = {.x = x, .rows = rows, .out = out, .done = done};
    return w->context->backend->matrix->split_rows(w->context->state, &problem);
}

/* Subtracts from split rows their projection onto finished rows, from row `from` on; the result also goes to `wide`
 * unless NULL. */
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

/* Subtracts from rows of S a rough projection onto `count` finished rows, from row `from` on: high parts only. Rows
 * read from S are normalized first; later they are, and stay close to length 1. */
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

/* Normalizes the rows of a panel and subtracts their projection onto all rows before it; the result is Cholesky's
 * input. */
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

/* Orthonormalizes the rows of `before` into `after`; the upper triangle of L^-1 is zeroed for its norm. */
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

/* The first panel has no previous rows, and all others are projected against it repeatedly: if its rows are nearly
 * parallel, as after gradients of rank 1, a second pass makes it as orthonormal as the others. */
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

/* The final projection of a panel, if the remainder is not negligible. */
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

/* Rows [first, first + count), recursively: the first half before the second. */
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

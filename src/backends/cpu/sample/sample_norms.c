/* Squares of per-sample gradients, G' A, summed without materializing the gradient: per-sample norms, and per-element
 * sums over samples. BLAS computes products block by block into per-thread scratch; half types are converted one sample
 * at a time.
 *
 * The one thing to know before changing it: inner products of positions have both signs, and where they cancel, a
 * float32 sum loses most digits. Such samples are recomputed, see norm_by_positions. */
#include "backends/cpu/cpu.h"

#include <math.h>

#include "backends/cpu/runtime/blas/parallel_blas.h"
#include "core/arith.h"

/* Blocks of the Gram matrices of positions, and tiles of the gradient: they stay in L2 while they are squared and are
 * large enough for full BLAS speed. */
#define BLOCK 192
#define TILE_ROWS 128
#define TILE_COLS 384
#define TILE_SIZE (TILE_ROWS * TILE_COLS)

static int is_16_bit(tch_scalar type)
{
    return type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16;
}

static tch_scalar compute_type(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
}

/* Part of a row-major matrix of float32 or float64. */
typedef struct view {
    const char *data;
    int64_t ld;
} view;

static view view_at(view v, tch_scalar type, int64_t row, int64_t column)
{
    return (view){v.data + (row * v.ld + column) * tchi_cpu_size(type), v.ld};
}

/* out = op(X) op(Y), m by n and contiguous, with contraction k. */
static void view_product(const tchi_cpu_state *state, tch_scalar type, int trans_x, view x, int trans_y, view y,
                         int64_t m, int64_t n, int64_t k, void *out)
{
    tchi_parallel_blas_for(type)->gemm(state, trans_x, trans_y, m, n, k, 1.0, x.data, x.ld, y.data, y.ld, 0.0, out, n);
}

/* --- one sample -------------------------------------------------------------------------------------------------- */

typedef struct sample {
    const tchi_cpu_state *state;
    tch_scalar type;
    view a, g;
    int64_t positions, d, p;
    char *room; /* two blocks, or a tile */
} sample;

/* Sum of the terms <a_s, a_t> <g_s, g_t>, and of their absolute values, which bounds the rounding error. */
typedef struct terms {
    double sum, size;
} terms;

static void add_terms(terms *all, double times, int64_t n, tch_scalar type, const void *x, const void *y)
{
    terms t;
    tchi_loops_for(type)->sum_terms(n, x, y, &t.sum, &t.size);
    all->sum += times * t.sum;
    all->size += times * t.size;
}

/* All pairs of a diagonal block, from its lower triangle. */
static void add_diagonal_block(const sample *s, int64_t from, int64_t n, terms *all)
{
    int64_t size = tchi_cpu_size(s->type);
    char *of_a = s->room;
    char *of_g = s->room + BLOCK * BLOCK * size;
    const tchi_parallel_blas *blas = tchi_parallel_blas_for(s->type);
    blas->syrk(s->state, TCHI_NO_TRANS, n, s->d, 1.0, view_at(s->a, s->type, from, 0).data, s->a.ld, 0.0, of_a, n);
    blas->syrk(s->state, TCHI_NO_TRANS, n, s->p, 1.0, view_at(s->g, s->type, from, 0).data, s->g.ld, 0.0, of_g, n);
    for (int64_t i = 0; i < n; i++) {
        int64_t row = i * n * size;
        add_terms(all, 2, i, s->type, of_a + row, of_g + row);
        add_terms(all, 1, 1, s->type, of_a + row + i * size, of_g + row + i * size);
    }
}

static void add_lower_block(const sample *s, int64_t row, int64_t m, int64_t column, int64_t n, terms *all)
{
    char *of_a = s->room;
    char *of_g = s->room + BLOCK * BLOCK * tchi_cpu_size(s->type);
    view_product(s->state, s->type, TCHI_NO_TRANS, view_at(s->a, s->type, row, 0), TCHI_TRANS,
                 view_at(s->a, s->type, column, 0), m, n, s->d, of_a);
    view_product(s->state, s->type, TCHI_NO_TRANS, view_at(s->g, s->type, row, 0), TCHI_TRANS,
                 view_at(s->g, s->type, column, 0), m, n, s->p, of_g);
    add_terms(all, 2, m * n, s->type, of_a, of_g);
}

static terms terms_of_positions(const sample *s)
{
    terms all = {0, 0};
    for (int64_t row = 0; row < s->positions; row += BLOCK) {
        int64_t m = tchi_min(BLOCK, s->positions - row);
        for (int64_t column = 0; column < row; column += BLOCK) {
            add_lower_block(s, row, m, column, BLOCK, &all);
        }
        add_diagonal_block(s, row, m, &all);
    }
    return all;
}

/* --- one sample of float32 once more, in float64 ----------------------------------------------------------------- */

/* float64 blocks: two for Gram matrices and two for panels of the operands. They reuse the room of the two float32
 * blocks. */
#define FINE (BLOCK / 2)
#define FINE_SIZE (FINE * FINE)
_Static_assert(4 * FINE_SIZE * sizeof(double) <= 2 * BLOCK * BLOCK * sizeof(float), "norms_room has room for them");

static void widen_panel(view x, int64_t row, int64_t rows, int64_t column, int64_t cols, double *out)
{
    for (int64_t i = 0; i < rows; i++) {
        tchi_convert(cols, TCH_SCALAR_F64, out + i * cols, TCH_SCALAR_F32,
                     view_at(x, TCH_SCALAR_F32, row + i, column).data);
    }
}

/* out (m by n) = rows of X from `row` on times rows from `other` on, of length k. Products of float32 are exact. */
static void fine_products(const sample *s, view x, int64_t row, int64_t m, int64_t other, int64_t n, int64_t k,
                          double *out)
{
    double *left = (double *)s->room + 2 * (int64_t)FINE_SIZE;
    double *right = left + FINE_SIZE;
    for (int64_t column = 0; column < k; column += FINE) {
        int64_t cols = tchi_min(FINE, k - column);
        widen_panel(x, row, m, column, cols, left);
        widen_panel(x, other, n, column, cols, right);
        tchi_parallel_blas_f64.gemm(s->state, TCHI_NO_TRANS, TCHI_TRANS, m, n, cols, 1.0, left, cols, right, cols,
                                    column == 0 ? 0.0 : 1.0, out, n);
    }
}

static double fine_norm(const sample *s)
{
    double *of_a = (double *)s->room;
    double *of_g = of_a + FINE_SIZE;
    double sum = 0;
    for (int64_t row = 0; row < s->positions; row += FINE) {
        int64_t m = tchi_min(FINE, s->positions - row);
        for (int64_t other = 0; other <= row; other += FINE) {
            int64_t n = tchi_min(FINE, s->positions - other);
            fine_products(s, s->a, row, m, other, n, s->d, of_a);
            fine_products(s, s->g, row, m, other, n, s->p, of_g);
            sum += (other < row ? 2 : 1) * tchi_loops_for(TCH_SCALAR_F64)->inner_product(m * n, of_a, of_g);
        }
    }
    return sum;
}

/* --- either form ------------------------------------------------------------------------------------------------- */

static double norm_by_tiles(const sample *s)
{
    const tchi_loops *loops = tchi_loops_for(s->type);
    double sum = 0;
    for (int64_t row = 0; row < s->p; row += TILE_ROWS) {
        int64_t m = tchi_min(TILE_ROWS, s->p - row);
        for (int64_t column = 0; column < s->d; column += TILE_COLS) {
            int64_t n = tchi_min(TILE_COLS, s->d - column);
            view_product(s->state, s->type, TCHI_TRANS, view_at(s->g, s->type, 0, row), TCHI_NO_TRANS,
                         view_at(s->a, s->type, 0, column), m, n, s->positions, s->room);
            sum += loops->sum_squares(m * n, 1.0, s->room);
        }
    }
    return sum;
}

/* Cancellation limit: sum of absolute terms over sum of terms. It is a few for independent numbers, and T / sqrt(p) if
 * all inputs point in one direction. */
#define MOST_CANCELED 256

/* If float32 terms cancel the sum is recomputed in float64; in float64, in tile form, whose error grows with the root
 * of the cancellation. Non-finite sums are kept. */
static double norm_by_positions(const sample *s)
{
    terms t = terms_of_positions(s);
    if (!(t.sum * MOST_CANCELED < t.size)) {
        return t.sum;
    }
    return s->type == TCH_SCALAR_F64 ? norm_by_tiles(s) : fine_norm(s);
}

/* Operations with half of the inner products skipped: T^2 (d + p) vs 2 T p d. */
static int positions_are_fewer(int64_t positions, int64_t d, int64_t p)
{
    return (double)positions * (double)(d + p) < 2.0 * (double)p * (double)d;
}

/* --- sample_norms ------------------------------------------------------------------------------------------------ */

typedef struct norms_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *a, *g;
    char *scratch; /* results, then a chunk for each thread: room, and A and G widened */
    int64_t each;
} norms_ctx;

static int64_t norms_room(tch_scalar type)
{
    int64_t blocks = 2 * (int64_t)BLOCK * BLOCK;
    return TCHI_CPU_SCRATCH_ROUND((blocks > TILE_SIZE ? blocks : TILE_SIZE) * tchi_cpu_size(compute_type(type)));
}

static int64_t widened_bytes(tch_scalar type, int64_t positions, int64_t cols)
{
    return is_16_bit(type) ? TCHI_CPU_SCRATCH_ROUND(positions * cols * (int64_t)sizeof(float)) : 0;
}

static int64_t norms_each(tch_scalar type, int64_t positions, int64_t d, int64_t p)
{
    return norms_room(type) + widened_bytes(type, positions, d) + widened_bytes(type, positions, p);
}

int64_t tchi_cpu_sample_norms_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions, int64_t d,
                                      int64_t batch, int64_t p)
{
    return TCHI_CPU_SCRATCH_ROUND(batch * (int64_t)sizeof(double)) +
           tchi_cpu_slots(state, batch) * norms_each(type, positions, d, p);
}

/* The matrix as float32 or float64: itself, or a copy in `room`. */
static view widened(const tch_matrices *x, int64_t index, void *room)
{
    if (!is_16_bit(x->type)) {
        return (view){tchi_cpu_row(x, index, 0), x->ld};
    }
    tchi_cpu_convert_block(x, index, 0, x->rows, 0, x->cols, TCH_SCALAR_F32, room, x->cols);
    return (view){room, x->cols};
}

static void norm_one(void *argument, int64_t index, int thread)
{
    const norms_ctx *j = argument;
    const tch_matrices *a = j->a;
    const tch_matrices *g = j->g;
    double *results = (double *)j->scratch;
    if (a->rows == 1) {
        results[index] = tchi_cpu_dot(a->cols, a->type, tchi_cpu_row(a, index, 0), tchi_cpu_row(a, index, 0)) *
                         tchi_cpu_dot(g->cols, g->type, tchi_cpu_row(g, index, 0), tchi_cpu_row(g, index, 0));
        return;
    }
    char *room = j->scratch + TCHI_CPU_SCRATCH_ROUND(a->batch * (int64_t)sizeof(double)) + thread * j->each;
    char *wide = room + norms_room(a->type);
    sample s = {.state = j->state, .type = compute_type(a->type), .positions = a->rows, .d = a->cols, .p = g->cols};
    s.a = widened(a, index, wide);
    s.g = widened(g, index, wide + widened_bytes(a->type, a->rows, a->cols));
    s.room = room;
    results[index] = positions_are_fewer(s.positions, s.d, s.p) ? norm_by_positions(&s) : norm_by_tiles(&s);
}

/* The groups of a sample are added in order, whichever thread computed them. */
static void weight_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups, double scale,
                         double *norms, void *scratch)
{
    norms_ctx ctx = {state, a, g, scratch, norms_each(a->type, a->rows, a->cols, g->cols)};
    double pairs = (double)a->rows * (double)(a->cols + g->cols);
    tchi_cpu_for_each(state, a->batch, (double)a->rows * pairs, norm_one, &ctx);
    const double *results = scratch;
    for (int64_t b = 0; b < a->batch; b++) {
        norms[b / groups] += scale * results[b];
    }
}

static tch_status bias_norms(void *state, const tch_matrices *g, int64_t groups, double scale, const tch_matrices *sums,
                             double *norms, void *scratch)
{
    tch_matrices rows = *sums;
    rows.batch = 1;
    rows.rows = sums->batch;
    tch_status status = tchi_cpu_sample_sums(state, g, 1.0, 0.0, &rows, scratch);
    return status == TCH_OK ? tchi_cpu_pair_dots(state, sums, sums, groups, scale, norms, scratch) : status;
}

tch_status tchi_cpu_sample_norms(void *state, const tch_matrices *a, const tch_matrices *g, int64_t groups,
                                 double scale, int32_t rounded, const tch_matrices *sums, double *norms, void *scratch)
{
    if (a->rows == 0 || g->cols == 0) {
        return TCH_OK;
    }
    if (a->cols > 0) {
        weight_norms(state, a, g, groups, scale, norms, scratch);
    }
    return sums != NULL ? bias_norms(state, g, groups, scale, sums, norms, scratch) : TCH_OK;
}

/* --- sample_squares ---------------------------------------------------------------------------------------------- */

#define SQUARES_ROWS 64
#define SQUARES_COLS 256
#define SQUARES_SIZE (SQUARES_ROWS * SQUARES_COLS)

typedef struct squares_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *a, *g, *out;
    double scale, beta;
    char *scratch; /* for each thread: sums and a tile of double, and columns of A and G widened */
    int64_t each, down, across;
} squares_ctx;

/* A tile of one group's result, summed over all samples by one thread. */
typedef struct squares_tile {
    int64_t group, row, column, rows, cols;
    double *sums;
    char *product;
    char *wide;
} squares_tile;

static int64_t squares_each(tch_scalar type, int64_t positions)
{
    int64_t tiles = 2 * (int64_t)SQUARES_SIZE * (int64_t)sizeof(double);
    return tiles + widened_bytes(type, positions, SQUARES_ROWS) + widened_bytes(type, positions, SQUARES_COLS);
}

int64_t tchi_cpu_sample_squares_scratch(const tchi_cpu_state *state, tch_scalar type, int64_t positions)
{
    return (int64_t)state->threads * squares_each(type, positions);
}

/* Columns [from, from + cols) of one matrix. */
static view widened_columns(const tch_matrices *x, int64_t index, int64_t from, int64_t cols, void *room)
{
    tch_matrices part = *x;
    part.data = (char *)x->data + from * tchi_cpu_size(x->type);
    part.cols = cols;
    return widened(&part, index, room);
}

static void add_sample(const squares_ctx *j, const squares_tile *t, int64_t index)
{
    tch_scalar type = compute_type(j->a->type);
    const tchi_loops *loops = tchi_loops_for(type);
    view a = widened_columns(j->a, index, t->column, t->cols, t->wide);
    view g =
        widened_columns(j->g, index, t->row, t->rows, t->wide + widened_bytes(j->a->type, j->a->rows, SQUARES_COLS));
    if (j->a->rows == 1) {
        for (int64_t i = 0; i < t->rows; i++) {
            view element = view_at(g, type, 0, i);
            double square = loops->inner_product(1, element.data, element.data);
            loops->add_scaled_squares(t->cols, square, a.data, t->sums + i * t->cols);
        }
        return;
    }
    view_product(j->state, type, TCHI_TRANS, g, TCHI_NO_TRANS, a, t->rows, t->cols, j->a->rows, t->product);
    loops->add_scaled_squares(t->rows * t->cols, 1.0, t->product, t->sums);
}

static void squares_one(void *argument, int64_t index, int thread)
{
    const squares_ctx *j = argument;
    char *room = j->scratch + thread * j->each;
    squares_tile t = {.group = index / (j->down * j->across)};
    t.row = index / j->across % j->down * SQUARES_ROWS;
    t.column = index % j->across * SQUARES_COLS;
    t.rows = tchi_min(SQUARES_ROWS, j->out->rows - t.row);
    t.cols = tchi_min(SQUARES_COLS, j->out->cols - t.column);
    t.sums = (double *)room;
    t.product = room + SQUARES_SIZE * sizeof(double);
    t.wide = t.product + SQUARES_SIZE * sizeof(double);
    for (int64_t i = 0; i < t.rows * t.cols; i++) {
        t.sums[i] = 0;
    }
    for (int64_t b = t.group; b < j->a->batch; b += j->out->batch) {
        add_sample(j, &t, b);
    }
    for (int64_t i = 0; i < t.rows; i++) {
        void *row = (char *)tchi_cpu_row(j->out, t.group, t.row + i) + t.column * tchi_cpu_size(j->out->type);
        tchi_cpu_write_sums(t.cols, j->scale, t.sums + i * t.cols, j->beta, j->out->type, row);
    }
}

tch_status tchi_cpu_sample_squares(void *state, const tch_matrices *a, const tch_matrices *g, double scale, double beta,
                                   int32_t rounded, const tch_matrices *out, void *scratch)
{
    squares_ctx ctx = {.state = state, .a = a, .g = g, .out = out, .scale = scale, .beta = beta, .scratch = scratch};
    ctx.each = squares_each(a->type, a->rows);
    ctx.down = (out->rows + SQUARES_ROWS - 1) / SQUARES_ROWS;
    ctx.across = (out->cols + SQUARES_COLS - 1) / SQUARES_COLS;
    if (a->rows == 0 || a->batch == 0) {
        return tchi_cpu_combine(state, 0.0, beta, beta == 0.0 ? NULL : out, 0.0, NULL, out);
    }
    int64_t samples = a->batch / out->batch;
    double work = 2.0 * SQUARES_SIZE * (double)(a->rows + 1) * (double)(samples + 1);
    tchi_cpu_for_each(state, out->batch * ctx.down * ctx.across, work, squares_one, &ctx);
    return TCH_OK;
}

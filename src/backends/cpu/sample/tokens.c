/* Sums over the positions of each token, as in gradients of embeddings. A stable radix sort orders positions by token,
 * so that one thread sums a row in float64 in the order of the positions, and results do not depend on the number of
 * threads. */
#include <string.h>

#include "backends/cpu/cpu.h"
#include "backends/cpu/runtime/vector_clones.h"
#include "core/arith.h"

#define STRIP 256 /* columns summed together, in a buffer that stays in L1 */

/* --- tokens in order --------------------------------------------------------------------------------------------- */

/* Position `place`, numbered across all samples, holds `token`. */
typedef struct occurrence {
    int64_t token, place;
} occurrence;

typedef struct token_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *tokens, *g;
    int64_t rows, padding; /* of the embedding */
    const double *weights;
    double scale;
} token_ctx;

/* The used occurrences in samples [from, to), by place; samples of weight 0 are skipped. */
static int64_t collect_occurrences(const token_ctx *j, int64_t from, int64_t to, occurrence *list)
{
    int64_t count = 0;
    int64_t length = j->tokens->cols;
    for (int64_t b = from; b < to; b++) {
        if (j->weights != NULL && j->weights[b] == 0.0) {
            continue;
        }
        for (int64_t s = 0; s < length; s++) {
            int64_t token = tchi_cpu_token(j->tokens, b, s, j->rows, j->padding);
            if (token >= 0) {
                list[count++] = (occurrence){token, b * length + s};
            }
        }
    }
    return count;
}

/* Sorts by token, keeping the order of equal ones. The result is in `list` or in `spare`. */
static occurrence *sort_by_token(occurrence *list, occurrence *spare, int64_t count, int64_t rows)
{
    enum { BITS = 8, DIGITS = 1 << BITS };
    for (int shift = 0; shift < 63 && (rows - 1) >> shift > 0; shift += BITS) {
        int64_t next[DIGITS] = {0};
        for (int64_t i = 0; i < count; i++) {
            next[(list[i].token >> shift) & (DIGITS - 1)]++;
        }
        for (int64_t digit = 0, sum = 0; digit < DIGITS; digit++) {
            int64_t here = next[digit];
            next[digit] = sum;
            sum += here;
        }
        for (int64_t i = 0; i < count; i++) {
            spare[next[(list[i].token >> shift) & (DIGITS - 1)]++] = list[i];
        }
        occurrence *other = list;
        list = spare;
        spare = other;
    }
    return list;
}

/* Length of the leading run of one token. */
static int64_t count_equal_tokens(const occurrence *list, int64_t count)
{
    int64_t length = 0;
    while (length < count && list[length].token == list[0].token) {
        length++;
    }
    return length;
}

/* --- sums of rows ------------------------------------------------------------------------------------------------ */

VECTOR_CLONES static double dot_floats(int64_t n, const float *x, const float *y)
{
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)y[i];
    }
    return sum;
}

/* Columns [column, column + n) of the row of G at a place, converted to float32 if narrower. */
static const void *row_part(const tch_matrices *g, int64_t place, int64_t column, int64_t n, float *buffer)
{
    const char *row = tchi_cpu_row(g, place / g->rows, place % g->rows);
    const char *part = row + column * tchi_cpu_size(g->type);
    if (g->type == TCH_SCALAR_F64 || g->type == TCH_SCALAR_F32) {
        return part;
    }
    tchi_convert(n, TCH_SCALAR_F32, buffer, g->type, part);
    return buffer;
}

/* sums = the weighted sum of columns [column, column + n) over a run of places. */
static void sum_run(const token_ctx *j, const occurrence *run, int64_t length, int64_t column, int64_t n, double *sums)
{
    float buffer[STRIP];
    memset(sums, 0, (size_t)n * sizeof *sums);
    for (int64_t i = 0; i < length; i++) {
        const void *x = row_part(j->g, run[i].place, column, n, buffer);
        double factor = j->weights != NULL ? j->weights[run[i].place / j->g->rows] : 1.0;
        tchi_loops_for(j->g->type)->add_scaled(n, factor, x, sums);
    }
}

/* Two lists of the occurrences of one sample, for each thread. */
static occurrence *list_of_thread(const token_ctx *j, void *scratch, int thread)
{
    return (occurrence *)scratch + 2 * j->tokens->cols * thread;
}

/* --- norms ------------------------------------------------------------------------------------------------------- */

typedef struct norms_ctx {
    token_ctx base;
    double *norms;
    void *scratch;
} norms_ctx;

static double run_squared(const token_ctx *j, const occurrence *run, int64_t length)
{
    const tchi_loops *loops = tchi_loops_for(TCH_SCALAR_F64);
    double sums[STRIP], total = 0;
    for (int64_t column = 0; column < j->g->cols; column += STRIP) {
        int64_t n = tchi_min(STRIP, j->g->cols - column);
        sum_run(j, run, length, column, n, sums);
        total += loops->sum_squares(n, 1.0, sums);
    }
    return total;
}

static void norm_of_sample(void *argument, int64_t sample, int thread)
{
    const norms_ctx *j = argument;
    occurrence *list = list_of_thread(&j->base, j->scratch, thread);
    int64_t count = collect_occurrences(&j->base, sample, sample + 1, list);
    list = sort_by_token(list, list + j->base.tokens->cols, count, j->base.rows);
    double total = 0;
    for (int64_t first = 0; first < count;) {
        int64_t length = count_equal_tokens(list + first, count - first);
        total += run_squared(&j->base, list + first, length);
        first += length;
    }
    j->norms[sample] += j->base.scale * total;
}

/* --- sums -------------------------------------------------------------------------------------------------------- */

#define ROWS_AT_ONCE 64 /* rows of the embedding per task, since some tokens are far more frequent */

typedef struct sums_ctx {
    token_ctx base;
    const tch_matrices *out;
    double beta;
    const occurrence *sorted; /* of the whole batch */
    int64_t count;
    void *scratch;
} sums_ctx;

static void write_run(const sums_ctx *j, void *out, const occurrence *run, int64_t length)
{
    double sums[STRIP];
    for (int64_t column = 0; column < j->out->cols; column += STRIP) {
        int64_t n = tchi_min(STRIP, j->out->cols - column);
        sum_run(&j->base, run, length, column, n, sums);
        tchi_loops_for(j->out->type)
            ->store_sums(n, j->base.scale, sums, j->beta, (char *)out + column * tchi_cpu_size(j->out->type));
    }
}

static void write_without_tokens(const sums_ctx *j, void *out)
{
    if (j->beta == 0.0) {
        memset(out, 0, (size_t)(j->out->cols * tchi_cpu_size(j->out->type)));
    } else if (j->beta != 1.0) {
        tchi_loops_for(j->out->type)->scale(j->out->cols, j->beta, out, out);
    }
}

/* Rows [from, to) of one matrix of out; `list` begins with the first occurrence of a token from `from` on. */
static void write_rows(const sums_ctx *j, int64_t matrix, int64_t from, int64_t to, const occurrence *list,
                       int64_t count)
{
    for (int64_t row = from; row < to; row++) {
        void *out = tchi_cpu_row(j->out, matrix, row);
        if (count > 0 && list[0].token == row) {
            int64_t length = count_equal_tokens(list, count);
            write_run(j, out, list, length);
            list += length;
            count -= length;
        } else {
            write_without_tokens(j, out);
        }
    }
}

static void sums_of_sample(void *argument, int64_t sample, int thread)
{
    const sums_ctx *j = argument;
    occurrence *list = list_of_thread(&j->base, j->scratch, thread);
    int64_t count = collect_occurrences(&j->base, sample, sample + 1, list);
    list = sort_by_token(list, list + j->base.tokens->cols, count, j->base.rows);
    write_rows(j, sample, 0, j->base.rows, list, count);
}

/* The first occurrence of a token that is not below `token`. */
static int64_t lower_bound(const occurrence *list, int64_t count, int64_t token)
{
    int64_t low = 0;
    while (low < count) {
        int64_t middle = low + (count - low) / 2;
        if (list[middle].token < token) {
            low = middle + 1;
        } else {
            count = middle;
        }
    }
    return low;
}

static void sums_of_rows(void *argument, int64_t index, int thread)
{
    const sums_ctx *j = argument;
    int64_t from = index * ROWS_AT_ONCE;
    int64_t to = j->base.rows - from < ROWS_AT_ONCE ? j->base.rows : from + ROWS_AT_ONCE;
    int64_t first = lower_bound(j->sorted, j->count, from);
    write_rows(j, 0, from, to, j->sorted + first, j->count - first);
}

tch_status tchi_cpu_token_sums(void *state, const tch_matrices *tokens, int64_t padding, const tch_matrices *g,
                               const double *weights, double scale, double beta, int32_t apart, const tch_matrices *out,
                               void *scratch)
{
    sums_ctx ctx = {
        .base = {state, tokens, g, out->rows, padding, weights, scale}, .out = out, .beta = beta, .scratch = scratch};
    double cols = (double)out->cols;
    int64_t places = tokens->rows * tokens->cols;
    if (apart) {
        double work = ((double)out->rows + 2.0 * (double)tokens->cols) * cols;
        tchi_cpu_for_each(state, tokens->rows, work, sums_of_sample, &ctx);
        return TCH_OK;
    }
    occurrence *list = scratch;
    ctx.count = collect_occurrences(&ctx.base, 0, tokens->rows, list);
    ctx.sorted = sort_by_token(list, list + places, ctx.count, out->rows);
    int64_t chunks = (out->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    double work = ROWS_AT_ONCE * cols + (chunks > 0 ? 2.0 * (double)ctx.count / (double)chunks : 0.0) * cols;
    tchi_cpu_for_each(state, chunks, work, sums_of_rows, &ctx);
    return TCH_OK;
}

/* --- inner products with rows of a matrix ------------------------------------------------------------------------ */

typedef struct dots_ctx {
    token_ctx base;
    const tch_matrices *w;
    double *dots;
} dots_ctx;

static double dot_of_place(const dots_ctx *j, int64_t place, int64_t token)
{
    const tch_matrices *g = j->base.g;
    const char *w = tchi_cpu_row(j->w, 0, token);
    float buffer[STRIP];
    double sum = 0;
    for (int64_t column = 0; column < g->cols; column += STRIP) {
        int64_t n = tchi_min(STRIP, g->cols - column);
        const void *x = row_part(g, place, column, n, buffer);
        const void *y = w + column * tchi_cpu_size(j->w->type);
        sum += g->type == TCH_SCALAR_F64 ? tchi_loops_for(TCH_SCALAR_F64)->dot(n, x, y) : dot_floats(n, x, y);
    }
    return sum;
}

static void dot_of_sample(void *argument, int64_t sample, int thread)
{
    const dots_ctx *j = argument;
    int64_t length = j->base.tokens->cols;
    double sum = 0;
    for (int64_t s = 0; s < length; s++) {
        int64_t token = tchi_cpu_token(j->base.tokens, sample, s, j->base.rows, j->base.padding);
        if (token >= 0) {
            sum += dot_of_place(j, sample * length + s, token);
        }
    }
    j->dots[sample] += j->base.scale * sum;
}

/* --- a weight that is both an embedding and a linear layer ------------------------------------------------------- */

/* Contribution of a shared weight to the per-sample norms. BLAS computes the inner products of positions in tiles,
 * which are multiplied by entries of the linear layer's output gradients, gathered from rows as long as the
 * vocabulary. */
enum { TILE = 64, PANEL = 256 }; /* positions on either side of a tile; columns of half types widened at once */

typedef struct cross_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *tokens, *h, *a, *g;
    int64_t padding;
    int64_t blocks;   /* of TILE positions of one sample's tokens */
    double *partials; /* one per block and sample */
    float *panels;    /* two per thread: TILE by PANEL */
} cross_ctx;

/* Products of a tile, in float64 or float32. */
typedef union tile_products {
    double f64[TILE * TILE];
    float f32[TILE * TILE];
} tile_products;

/* Scratch is for `samples` by `positions` tokens. */
int64_t tchi_cpu_token_scratch(const tchi_cpu_state *state, int64_t samples, int64_t positions)
{
    const int64_t lists = 2 * 16 * samples * positions; /* token and place, twice */
    const int64_t partials = samples * ((positions + TILE - 1) / TILE) * (int64_t)sizeof(double);
    const int64_t panels = (int64_t)state->threads * 2 * TILE * PANEL * (int64_t)sizeof(float);
    const int64_t cross = TCHI_CPU_SCRATCH_ROUND(partials) + panels;
    return lists > cross ? lists : cross;
}

static void half_type_products(const cross_ctx *j, int64_t sample, int64_t s, int64_t rows, int64_t t, int64_t cols,
                               float *panels, float *out)
{
    for (int64_t column = 0; column < j->h->cols; column += PANEL) {
        int64_t n = tchi_min(j->h->cols - column, PANEL);
        tchi_cpu_convert_block(j->h, sample, s, rows, column, n, TCH_SCALAR_F32, panels, PANEL);
        tchi_cpu_convert_block(j->a, sample, t, cols, column, n, TCH_SCALAR_F32, panels + TILE * PANEL, PANEL);
        j->state->blas->f32.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, (int)n, 1.0F, panels,
                                 PANEL, panels + TILE * PANEL, PANEL, column > 0 ? 1.0F : 0.0F, out, TILE);
    }
}

static void multiply_tile(const cross_ctx *j, int64_t sample, int64_t s, int64_t rows, int64_t t, int64_t cols,
                          float *panels, tile_products *out)
{
    const void *h = tchi_cpu_row(j->h, sample, s);
    const void *a = tchi_cpu_row(j->a, sample, t);
    int depth = (int)j->h->cols;
    if (j->h->type == TCH_SCALAR_F64) {
        j->state->blas->f64.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, depth, 1.0, h,
                                 (int)j->h->ld, a, (int)j->a->ld, 0.0, out->f64, TILE);
    } else if (j->h->type == TCH_SCALAR_F32) {
        j->state->blas->f32.gemm(TCHI_ROW_MAJOR, TCHI_NO_TRANS, TCHI_TRANS, (int)rows, (int)cols, depth, 1.0F, h,
                                 (int)j->h->ld, a, (int)j->a->ld, 0.0F, out->f32, TILE);
    } else {
        half_type_products(j, sample, s, rows, t, cols, panels, out->f32);
    }
}

static double gradient_entry(const tch_matrices *g, const void *row, int64_t column)
{
    double value;
    if (g->type == TCH_SCALAR_F64 || g->type == TCH_SCALAR_F32) {
        return g->type == TCH_SCALAR_F64 ? ((const double *)row)[column] : (double)((const float *)row)[column];
    }
    tchi_convert(1, TCH_SCALAR_F64, &value, g->type, (const uint16_t *)row + column);
    return value;
}

/* Sum over a tile of products times the matching entries of G. */
static double weigh_tile(const cross_ctx *j, int64_t sample, int64_t t, int64_t cols, const int64_t *token,
                         int64_t rows, const tile_products *tile)
{
    double sum = 0;
    for (int64_t k = 0; k < cols; k++) {
        const void *g = tchi_cpu_row(j->g, sample, t + k);
        for (int64_t i = 0; i < rows; i++) {
            if (token[i] >= 0) {
                int64_t at = i * TILE + k;
                double product = j->h->type == TCH_SCALAR_F64 ? tile->f64[at] : (double)tile->f32[at];
                sum += product * gradient_entry(j->g, g, token[i]);
            }
        }
    }
    return sum;
}

static void cross_of_block(void *argument, int64_t index, int thread)
{
    const cross_ctx *j = argument;
    int64_t sample = index / j->blocks;
    int64_t s = index % j->blocks * TILE;
    int64_t rows = tchi_min(j->h->rows - s, TILE);
    int64_t token[TILE];
    tile_products tile;
    double sum = 0;
    for (int64_t i = 0; i < rows; i++) {
        token[i] = tchi_cpu_token(j->tokens, sample, s + i, j->g->cols, j->padding);
    }
    for (int64_t t = 0; t < j->a->rows; t += TILE) {
        int64_t cols = tchi_min(j->a->rows - t, TILE);
        multiply_tile(j, sample, s, rows, t, cols, j->panels + 2 * TILE * PANEL * (int64_t)thread, &tile);
        sum += weigh_tile(j, sample, t, cols, token, rows, &tile);
    }
    j->partials[index] = sum;
}

static tch_status add_token_cross(const tchi_cpu_state *state, const tch_matrices *tokens, int64_t padding,
                                  const tch_matrices *h, const tch_matrices *a, const tch_matrices *g, double scale,
                                  double *dots, void *scratch)
{
    int64_t blocks = (h->rows + TILE - 1) / TILE;
    int64_t count = tokens->rows * blocks;
    double *partials = scratch;
    void *panels = (char *)scratch + TCHI_CPU_SCRATCH_ROUND(count * (int64_t)sizeof *partials);
    cross_ctx ctx = {state, tokens, h, a, g, padding, blocks, partials, panels};
    if (count == 0 || a->rows == 0 || h->cols == 0) {
        return TCH_OK;
    }
    double work = 2.0 * TILE * (double)a->rows * (double)h->cols;
    tchi_cpu_for_each(state, count, work, cross_of_block, &ctx);
    for (int64_t i = 0; i < count; i++) {
        dots[i / blocks] += scale * partials[i];
    }
    return TCH_OK;
}

tch_status tchi_cpu_token_dots(void *state, const tch_matrices *tokens, int64_t rows, int64_t padding,
                               const tch_matrices *g, const tch_matrices *w, const tch_matrices *by, double scale,
                               double *dots, void *scratch)
{
    const token_ctx base = {state, tokens, g, rows, padding, NULL, scale};
    double work = 2.0 * (double)g->rows * (double)g->cols;
    if (by != NULL) {
        return add_token_cross(state, tokens, padding, g, w, by, scale, dots, scratch);
    }
    if (w == NULL) {
        norms_ctx norms = {base, dots, scratch};
        tchi_cpu_for_each(state, tokens->rows, work, norm_of_sample, &norms);
        return TCH_OK;
    }
    dots_ctx ctx = {base, w, dots};
    tchi_cpu_for_each(state, tokens->rows, work, dot_of_sample, &ctx);
    return TCH_OK;
}

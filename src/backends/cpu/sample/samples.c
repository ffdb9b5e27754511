/* Per-sample sums, inner products and weights. Rows are converted to double in small buffers; sums over the rows of a
 * matrix always use the same ranges, so that results do not depend on the number of threads. */
#include "backends/cpu/cpu.h"

#include <string.h>

#include "backends/cpu/runtime/vector_clones.h"
#include "core/arith.h"

#define RUN 256  /* elements of a row at once */
#define PARTS 32 /* ranges of rows per matrix */

static const void *element_of_row(const void *row, tch_scalar type, int64_t column)
{
    return (const char *)row + column * tchi_cpu_size(type);
}

/* --- sample_sums ------------------------------------------------------------------------------------------------- */

void tchi_cpu_write_sums(int64_t n, double scale, double *sums, double beta, tch_scalar type, void *out)
{
    const bool adds = beta != 0.0;
    double before[RUN];
    for (int64_t from = 0; from < n; from += RUN) {
        int64_t width = tchi_min(RUN, n - from);
        void *at = (char *)out + from * tchi_cpu_size(type);
        if (adds) {
            tchi_convert(width, TCH_SCALAR_F64, before, type, at);
        }
        for (int64_t k = from; k < from + width; k++) {
            sums[k] = scale * sums[k] + (adds ? beta * before[k - from] : 0.0);
        }
        tchi_convert(width, type, at, TCH_SCALAR_F64, sums + from);
    }
}

/* A factor of 1 is exact. */
static void add_elements(int64_t n, tch_scalar type, const void *x, double *sums)
{
    double wide[RUN];
    if (type == TCH_SCALAR_F32) {
        tchi_loops_for(type)->add_scaled(n, 1.0, x, sums);
        return;
    }
    tchi_convert(n, TCH_SCALAR_F64, wide, type, x);
    tchi_loops_for(TCH_SCALAR_F64)->add_scaled(n, 1.0, wide, sums);
}

typedef struct sums_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *x, *out;
    double scale, beta;
    int64_t index;
} sums_ctx;

/* Columns in runs [from, to) of one matrix. */
static void sum_runs(void *argument, int64_t from, int64_t to)
{
    const sums_ctx *j = argument;
    for (int64_t run = from; run < to; run++) {
        double sums[RUN] = {0};
        int64_t column = run * RUN;
        int64_t n = tchi_min(RUN, j->x->cols - column);
        for (int64_t i = 0; i < j->x->rows; i++) {
            add_elements(n, j->x->type, element_of_row(tchi_cpu_row(j->x, j->index, i), j->x->type, column), sums);
        }
        void *out = (char *)tchi_cpu_row(j->out, 0, j->index) + column * tchi_cpu_size(j->out->type);
        tchi_cpu_write_sums(n, j->scale, sums, j->beta, j->out->type, out);
    }
}

static void sum_one(void *argument, int64_t index, int thread)
{
    sums_ctx ctx = *(const sums_ctx *)argument;
    ctx.index = index;
    double work = (double)ctx.x->rows * (double)ctx.x->cols;
    tchi_cpu_split(ctx.state, (ctx.x->cols + RUN - 1) / RUN, work, sum_runs, &ctx);
}

tch_status tchi_cpu_sample_sums(void *state, const tch_matrices *x, double scale, double beta, const tch_matrices *out,
                                void *scratch)
{
    sums_ctx ctx = {.state = state, .x = x, .out = out, .scale = scale, .beta = beta};
    tchi_cpu_for_each(state, x->batch, (double)(x->rows + 1) * (double)x->cols, sum_one, &ctx);
    return TCH_OK;
}

/* --- inner products ---------------------------------------------------------------------------------------------- */

double tchi_cpu_dot(int64_t n, tch_scalar type, const void *x, const void *y)
{
    const tchi_loops *loops = tchi_loops_for(type);
    if (type == TCH_SCALAR_F64 || type == TCH_SCALAR_F32) {
        return loops->inner_product(n, x, y);
    }
    float wide_x[RUN], wide_y[RUN];
    double sum = 0;
    for (int64_t from = 0; from < n; from += RUN) {
        int64_t run = tchi_min(RUN, n - from);
        tchi_convert(run, TCH_SCALAR_F32, wide_x, type, element_of_row(x, type, from));
        tchi_convert(run, TCH_SCALAR_F32, wide_y, type, element_of_row(y, type, from));
        sum += loops->inner_product(run, wide_x, wide_y);
    }
    return sum;
}

typedef struct pair_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *x, *y;
    double *results; /* one per pair */
} pair_ctx;

typedef struct pair_parts {
    const pair_ctx *pair;
    int64_t index;
    double part[PARTS];
} pair_parts;

static void dot_parts(void *argument, int64_t from, int64_t to)
{
    pair_parts *p = argument;
    const tch_matrices *x = p->pair->x;
    for (int64_t part = from; part < to; part++) {
        p->part[part] = 0;
        for (int64_t i = x->rows * part / PARTS; i < x->rows * (part + 1) / PARTS; i++) {
            p->part[part] +=
                tchi_cpu_dot(x->cols, x->type, tchi_cpu_row(x, p->index, i), tchi_cpu_row(p->pair->y, p->index, i));
        }
    }
}

static void pair_one(void *argument, int64_t index, int thread)
{
    const pair_ctx *j = argument;
    pair_parts p = {.pair = j, .index = index};
    tchi_cpu_split(j->state, PARTS, (double)j->x->rows * (double)j->x->cols, dot_parts, &p);
    double sum = 0;
    for (int part = 0; part < PARTS; part++) {
        sum += p.part[part];
    }
    j->results[index] = sum;
}

tch_status tchi_cpu_pair_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t groups, double scale,
                              double *out, void *scratch)
{
    pair_ctx ctx = {state, x, y, scratch};
    if (x->rows == 0 || x->cols == 0) {
        return TCH_OK;
    }
    tchi_cpu_for_each(state, x->batch, (double)x->rows * (double)x->cols, pair_one, &ctx);
    for (int64_t b = 0; b < x->batch; b++) {
        out[b / groups] += scale * ctx.results[b];
    }
    return TCH_OK;
}

/* --- block_dots -------------------------------------------------------------------------------------------------- */

typedef struct block_ctx {
    const tch_matrices *x, *y, *out;
    int64_t height, width;
    double scale, beta;
} block_ctx;

VECTOR_CLONES static void multiply_run(int64_t n, const double *restrict x, double *restrict y)
{
    for (int64_t j = 0; j < n; j++) {
        y[j] *= x[j];
    }
}

/* Blocks of one element, columns [from, from + n) of row i. */
static void single_elements(const block_ctx *j, int64_t i, int64_t from, int64_t n, double *sums)
{
    double wide[RUN];
    tchi_convert(n, TCH_SCALAR_F64, wide, j->x->type, element_of_row(tchi_cpu_row(j->x, 0, i), j->x->type, from));
    tchi_convert(n, TCH_SCALAR_F64, sums, j->y->type, element_of_row(tchi_cpu_row(j->y, 0, i), j->y->type, from));
    multiply_run(n, wide, sums);
}

static double block_sum(const block_ctx *j, int64_t i, int64_t k)
{
    double sum = 0;
    for (int64_t r = i * j->height; r < (i + 1) * j->height; r++) {
        sum += tchi_cpu_dot(j->width, j->x->type, element_of_row(tchi_cpu_row(j->x, 0, r), j->x->type, k * j->width),
                            element_of_row(tchi_cpu_row(j->y, 0, r), j->y->type, k * j->width));
    }
    return sum;
}

static void block_run(const block_ctx *j, int64_t i, int64_t from, int64_t n)
{
    double sums[RUN] = {0};
    if (j->height == 1 && j->width == 1) {
        single_elements(j, i, from, n, sums);
    } else {
        for (int64_t k = 0; k < n; k++) {
            sums[k] = block_sum(j, i, from + k);
        }
    }
    void *out = (char *)tchi_cpu_row(j->out, 0, i) + from * tchi_cpu_size(j->out->type);
    tchi_cpu_write_sums(n, j->scale, sums, j->beta, j->out->type, out);
}

static void block_rows(void *argument, int64_t from, int64_t to)
{
    const block_ctx *j = argument;
    for (int64_t i = from; i < to; i++) {
        for (int64_t column = 0; column < j->out->cols; column += RUN) {
            block_run(j, i, column, tchi_min(RUN, j->out->cols - column));
        }
    }
}

tch_status tchi_cpu_block_dots(void *state, const tch_matrices *x, const tch_matrices *y, int64_t height, int64_t width,
                               double scale, double beta, const tch_matrices *out, void *scratch)
{
    block_ctx ctx = {x, y, out, height, width, scale, beta};
    tchi_cpu_split(state, out->rows, (double)x->rows * (double)x->cols, block_rows, &ctx);
    return TCH_OK;
}

/* --- weigh_samples ----------------------------------------------------------------------------------------------- */

typedef struct weigh_ctx {
    const tch_matrices *x, *out;
    int64_t groups;
    const double *weights;
    int32_t drop_only;
} weigh_ctx;

static void weigh_row(const weigh_ctx *j, double weight, const void *x, void *out)
{
    double wide[RUN];
    bool real = j->x->type == TCH_SCALAR_F32 || j->x->type == TCH_SCALAR_F64;
    if (j->x->type == j->out->type && real) {
        tchi_loops_for(j->x->type)->scale(j->x->cols, j->drop_only ? 1.0 : weight, x, out);
        return;
    }
    for (int64_t from = 0; from < j->x->cols; from += RUN) {
        int64_t n = tchi_min(RUN, j->x->cols - from);
        tchi_convert(n, TCH_SCALAR_F64, wide, j->x->type, element_of_row(x, j->x->type, from));
        if (!j->drop_only) {
            tchi_loops_for(TCH_SCALAR_F64)->scale(n, weight, wide, wide);
        }
        tchi_convert(n, j->out->type, (char *)out + from * tchi_cpu_size(j->out->type), TCH_SCALAR_F64, wide);
    }
}

static void weigh_or_drop_row(const void *argument, int64_t b, int64_t i)
{
    const weigh_ctx *j = argument;
    double weight = j->weights[b / j->groups];
    void *out = tchi_cpu_row(j->out, b, i);
    if (weight == 0.0) {
        memset(out, 0, (size_t)(j->x->cols * tchi_cpu_size(j->out->type)));
    } else {
        weigh_row(j, weight, tchi_cpu_row(j->x, b, i), out);
    }
}

tch_status tchi_cpu_weigh_samples(void *state, const tch_matrices *x, int64_t groups, const double *weights,
                                  int32_t drop_only, const tch_matrices *out)
{
    weigh_ctx ctx = {x, out, groups, weights, drop_only};
    tchi_cpu_for_rows(state, x, 1.0, weigh_or_drop_row, &ctx);
    return TCH_OK;
}

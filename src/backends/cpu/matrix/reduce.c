/* Reductions: one number per matrix. A batch is divided by matrices, a single matrix by rows; partial results are
 * combined in a fixed order, independent of the number of threads. */
#include "backends/cpu/cpu.h"
#include "backends/rules.h"

#include <math.h>
#include <stdbool.h>

#define PARTS 32 /* each matrix is divided into this many ranges of rows, which fix the order of summation */

typedef struct reduce_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *x;
    const tchi_loops *loops;
    tch_reduction kind;
    double *out;
    double eps;  /* of normalize */
    double most; /* of flag_overflow */
    int32_t *flags;
} reduce_ctx;

/* One matrix under reduction, and the results of its parts. */
typedef struct matrix_ctx {
    const reduce_ctx *reduce;
    int64_t index;
    double factor; /* of entries, for the Frobenius norm */
    tch_reduction kind;
    double part[PARTS];
} matrix_ctx;

static double reduce_row(const matrix_ctx *m, int64_t i)
{
    const tch_matrices *x = m->reduce->x;
    const tchi_loops *loops = m->reduce->loops;
    const void *row = tchi_cpu_row(x, m->index, i);
    switch (m->kind) {
    case TCH_REDUCE_FROBENIUS:
        return loops->sum_squares(x->cols, m->factor, row);
    case TCH_REDUCE_TRACE:
        return i < x->cols ? tchi_cpu_get(x, m->index, i, i) : 0.0;
    case TCH_REDUCE_NONFINITE:
        return (double)loops->count_nonfinite(x->cols, row);
    default:
        return loops->max_abs(x->cols, row);
    }
}

static double join_partials(tch_reduction kind, double a, double b)
{
    return kind == TCH_REDUCE_MAX_ABS || kind == TCH_REDUCE_ASYMMETRY ? fmax(a, b) : a + b;
}

static void reduce_parts(void *argument, int64_t from, int64_t to)
{
    matrix_ctx *m = argument;
    const tch_matrices *x = m->reduce->x;
    for (int64_t p = from; p < to; p++) {
        int64_t first = x->rows * p / PARTS;
        int64_t last = x->rows * (p + 1) / PARTS;
        m->part[p] = 0;
        if (m->kind == TCH_REDUCE_ASYMMETRY) {
            m->part[p] = m->reduce->loops->asymmetry(x->rows, tchi_cpu_row(x, m->index, 0), x->ld, first, last);
            continue;
        }
        for (int64_t i = first; i < last; i++) {
            m->part[p] = join_partials(m->kind, m->part[p], reduce_row(m, i));
        }
    }
}

static double reduce_matrix(const reduce_ctx *j, int64_t index, tch_reduction kind, double factor)
{
    matrix_ctx m = {.reduce = j, .index = index, .factor = factor, .kind = kind};
    tchi_cpu_split(j->state, PARTS, (double)j->x->rows * (double)j->x->cols, reduce_parts, &m);
    double result = 0;
    for (int p = 0; p < PARTS; p++) {
        result = join_partials(kind, result, m.part[p]);
    }
    return result;
}

/* Squares of float64 entries above about 1e150 overflow and below 1e-150 underflow, so entries are first divided by the
 * largest. float32 entries cannot leave the range of float64 sums and skip that pass. */
static double frobenius(const reduce_ctx *j, int64_t index)
{
    if (j->x->type != TCH_SCALAR_F64) {
        return sqrt(reduce_matrix(j, index, TCH_REDUCE_FROBENIUS, 1.0));
    }
    double largest = reduce_matrix(j, index, TCH_REDUCE_MAX_ABS, 1.0);
    if (largest == 0 || !isfinite(largest)) {
        return largest;
    }
    double unit = fmax(largest, 0x1p-1022);
    return unit * sqrt(reduce_matrix(j, index, TCH_REDUCE_FROBENIUS, 1.0 / unit));
}

static void reduce_one(void *argument, int64_t index, int thread)
{
    const reduce_ctx *j = argument;
    j->out[index] = j->kind == TCH_REDUCE_FROBENIUS ? frobenius(j, index) : reduce_matrix(j, index, j->kind, 1.0);
}

tch_status tchi_cpu_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    if (kind == TCH_REDUCE_INSPECT) {
        (void)tchi_cpu_reduce(state, TCH_REDUCE_MAX_ABS, x, out);
        (void)tchi_cpu_reduce(state, TCH_REDUCE_NONFINITE, x, out + x->batch);
        return tchi_cpu_reduce(state, TCH_REDUCE_ASYMMETRY, x, out + 2 * x->batch);
    }
    reduce_ctx ctx = {.state = state, .x = x, .loops = tchi_loops_for(x->type), .kind = kind, .out = out};
    tchi_cpu_for_each(state, x->batch, (double)x->rows * (double)x->cols, reduce_one, &ctx);
    return TCH_OK;
}

/* --- ranges ----------------------------------------------------------------------------------------------------- */

/* In two steps, because a single power of two could be out of range. */
static void scale_by_power_of_two(const reduce_ctx *j, int64_t index, int exponent)
{
    double first = ldexp(1.0, exponent / 2);
    double second = ldexp(1.0, exponent - exponent / 2);
    for (int64_t i = 0; i < j->x->rows; i++) {
        void *row = tchi_cpu_row(j->x, index, i);
        j->loops->scale(j->x->cols, first, row, row);
        j->loops->scale(j->x->cols, second, row, row);
    }
}

/* Rescales X_b near 1 if its norm would not be accurate to full precision. */
static void rescale_one(void *argument, int64_t index, int thread)
{
    const reduce_ctx *j = argument;
    int most = j->x->type == TCH_SCALAR_F64 ? 1000 : 120;
    double norm = j->out[index];
    bool ends = norm < ldexp(1.0, -most) || norm > ldexp(1.0, most);
    if (!ends || norm == 0 || norm < j->eps) {
        return;
    }
    scale_by_power_of_two(j, index, isinf(norm) ? -most : -ilogb(norm));
    j->out[index] = frobenius(j, index);
}

/* With the norm as the largest eigenvalue and relative damping 1, root_setup returns max(|X|, eps) as the bound, or
 * 1. */
tch_status tchi_cpu_normalize(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                              int32_t *deferred)
{
    reduce_ctx ctx = {.state = state, .x = x, .loops = tchi_loops_for(x->type), .out = scale, .eps = eps};
    *deferred = 0;
    (void)tchi_cpu_reduce(state, TCH_REDUCE_FROBENIUS, x, scale);
    tchi_cpu_for_each(state, x->batch, 1.0, rescale_one, &ctx); /* usually nothing to do */
    for (int64_t b = 0; b < x->batch; b++) {
        const double norm = scale[b], zero = 0.0;
        const tch_root_norms norms = {&norm, &norm, &zero, &zero};
        double damping;
        int32_t flag;
        tchi_rule_root_setup(&norms, 0, eps, 1.0, 0.0, 1.0, &damping, &scale[b], &flag);
    }
    return tchi_cpu_shift_scale(state, x, NULL, scale, -1.0, x);
}

static void flag_one(void *argument, int64_t index, int thread)
{
    const reduce_ctx *j = argument;
    for (int64_t i = 0; i < j->x->rows && j->flags[index] == TCH_REPORT_OK; i++) {
        const void *row = tchi_cpu_row(j->x, index, i);
        bool in_range =
            j->loops->max_abs(j->x->cols, row) <= j->most && j->loops->count_nonfinite(j->x->cols, row) == 0;
        j->flags[index] = in_range ? TCH_REPORT_OK : TCH_REPORT_OVERFLOW;
    }
}

tch_status tchi_cpu_flag_overflow(void *state, const tch_matrices *x, double most, int32_t *flags)
{
    reduce_ctx ctx = {.state = state, .x = x, .loops = tchi_loops_for(x->type), .most = most, .flags = flags};
    tchi_cpu_for_each(state, x->batch, (double)x->rows * (double)x->cols, flag_one, &ctx);
    return TCH_OK;
}

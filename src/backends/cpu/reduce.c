/* Reductions: one number per matrix. */
#include "cpu.h"

#include <math.h>

typedef struct reduce_job {
    const tch_matrices *x;
    const tchi_loops *loops;
    tch_reduction kind;
    double *out;
} reduce_job;

static double largest_entry(const reduce_job *j, int64_t b)
{
    double largest = 0;
    for (int64_t i = 0; i < j->x->rows; i++) {
        largest = fmax(largest, j->loops->max_abs(j->x->cols, tchi_cpu_row(j->x, b, i)));
    }
    return largest;
}

static double largest_row_sum(const reduce_job *j, int64_t b)
{
    double largest = 0;
    for (int64_t i = 0; i < j->x->rows; i++) {
        largest = fmax(largest, j->loops->sum_abs(j->x->cols, tchi_cpu_row(j->x, b, i)));
    }
    return largest;
}

/* Squares of entries beyond about 1e150 overflow and of those below 1e-150 vanish, so entries are divided by the
 * largest first; float32 entries cannot reach that far, and are spared the extra pass. */
static double frobenius(const reduce_job *j, int64_t b)
{
    double largest = j->x->type == TCH_SCALAR_F64 ? largest_entry(j, b) : 1.0;
    if (largest == 0 || !isfinite(largest)) {
        return largest;
    }
    double sum = 0;
    double factor = j->x->type == TCH_SCALAR_F64 ? 1.0 / largest : 1.0;
    if (!isfinite(factor)) {
        factor = 1.0 / 0x1p-1022;
        largest = 0x1p-1022;
    }
    for (int64_t i = 0; i < j->x->rows; i++) {
        sum += j->loops->sum_squares(j->x->cols, factor, tchi_cpu_row(j->x, b, i));
    }
    return largest * sqrt(sum);
}

static double at(const tch_matrices *x, int64_t b, int64_t i, int64_t k)
{
    const void *row = tchi_cpu_row(x, b, i);
    return x->type == TCH_SCALAR_F64 ? ((const double *)row)[k] : (double)((const float *)row)[k];
}

static double trace(const reduce_job *j, int64_t b)
{
    double sum = 0;
    int64_t n = j->x->rows < j->x->cols ? j->x->rows : j->x->cols;
    for (int64_t i = 0; i < n; i++) {
        sum += at(j->x, b, i, i);
    }
    return sum;
}

static double nonfinite(const reduce_job *j, int64_t b)
{
    int64_t count = 0;
    for (int64_t i = 0; i < j->x->rows; i++) {
        count += j->loops->count_nonfinite(j->x->cols, tchi_cpu_row(j->x, b, i));
    }
    return (double)count;
}

/* Pairs of tiles on either side of the diagonal, so that the columns of one stay cached while the other is read. */
static double asymmetry(const reduce_job *j, int64_t b)
{
    enum { TILE = 32 };
    double largest = 0;
    int64_t n = j->x->rows;
    for (int64_t i0 = 0; i0 < n; i0 += TILE) {
        for (int64_t k0 = 0; k0 <= i0; k0 += TILE) {
            for (int64_t i = i0; i < n && i < i0 + TILE; i++) {
                for (int64_t k = k0; k < i && k < k0 + TILE; k++) {
                    double gap = fabs(at(j->x, b, i, k) - at(j->x, b, k, i));
                    largest = gap > largest ? gap : largest;
                }
            }
        }
    }
    return largest;
}

static void reduce_one(void *argument, int64_t b, int thread)
{
    (void)thread;
    static double (*const kinds[TCH_REDUCE_COUNT])(const reduce_job *, int64_t) = {
        [TCH_REDUCE_FROBENIUS] = frobenius, [TCH_REDUCE_MAX_ABS] = largest_entry,
        [TCH_REDUCE_MAX_ROW_SUM] = largest_row_sum, [TCH_REDUCE_TRACE] = trace,
        [TCH_REDUCE_NONFINITE] = nonfinite, [TCH_REDUCE_ASYMMETRY] = asymmetry,
    };
    const reduce_job *j = argument;
    j->out[b] = kinds[j->kind](j, b);
}

tch_status tchi_cpu_reduce(void *state, tch_reduction kind, const tch_matrices *x, double *out)
{
    reduce_job job = {x, tchi_loops_for(x->type), kind, out};
    tchi_cpu_for_each(state, x->batch, (double)x->rows * (double)x->cols, reduce_one, &job);
    return TCH_OK;
}

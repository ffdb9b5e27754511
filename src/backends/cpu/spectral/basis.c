/* Eigenbasis tracking: Cholesky factors and their inverses, dot products of rows, rows split into two float16, sorting
 * and permutation. Each row or matrix is computed by one thread, so that results do not depend on their number. */
#include "backends/cpu/cpu.h"

#include <math.h>
#include <string.h>

#include "backends/cpu/runtime/blas/parallel_blas.h"

/* --- Cholesky factors and their inverses ------------------------------------------------------------------------- */

typedef struct cholesky_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *a, *x;
    int32_t inverse;
    int32_t *flags;
} cholesky_ctx;

/* X = the lower triangle of A, zeros above. */
static void copy_lower(const tch_matrices *a, const tch_matrices *x, int64_t index)
{
    int64_t size = tchi_cpu_size(a->type);
    for (int64_t i = 0; i < a->rows; i++) {
        char *to = tchi_cpu_row(x, index, i);
        memcpy(to, tchi_cpu_row(a, index, i), (size_t)((i + 1) * size));
        memset(to + (i + 1) * size, 0, (size_t)((a->cols - i - 1) * size));
    }
}

/* LAPACK may not report a NaN, but one anywhere in A reaches the diagonal of its factor. */
static int diagonal_is_sound(const tch_matrices *x, int64_t index)
{
    for (int64_t i = 0; i < x->rows; i++) {
        double d = tchi_cpu_get(x, index, i, i);
        if (!(d > 0.0 && isfinite(d))) {
            return 0;
        }
    }
    return 1;
}

static void cholesky_one(void *argument, int64_t i, int thread)
{
    const cholesky_ctx *j = argument;
    if (j->flags[i] != TCH_REPORT_OK) {
        return;
    }
    const tchi_parallel_blas *blas = tchi_parallel_blas_for(j->a->type);
    void *a = tchi_cpu_row(j->a, i, 0), *x = tchi_cpu_row(j->x, i, 0);
    int info = blas->potrf(j->state, j->a->rows, a, j->a->ld);
    copy_lower(j->a, j->x, i);
    if (info != 0 || !diagonal_is_sound(j->x, i) ||
        (j->inverse && blas->trtri(j->state, j->x->rows, a, j->a->ld, x, j->x->ld) != 0)) {
        j->flags[i] = TCH_REPORT_NOT_POSITIVE;
    }
}

tch_status tchi_cpu_cholesky(void *state, const tch_matrices *a, int32_t inverse, const tch_matrices *x, int32_t *flags,
                             void *scratch)
{
    tchi_cpu_state *s = state;
    cholesky_ctx ctx = {s, a, x, inverse, flags};
    double n = (double)a->rows;
    if (a->rows > 0) {
        tchi_cpu_for_each(s, a->batch, 2.0 / 3.0 * n * n * n, cholesky_one, &ctx);
    }
    return TCH_OK;
}

/* --- dot products of rows ---------------------------------------------------------------------------------------- */

typedef struct dots_ctx {
    const tch_matrices *x, *y, *w;
    double exponent;
} dots_ctx;

static double row_dot_f64(int64_t n, const double *x, const double *y)
{
    double sum = 0.0;
    for (int64_t j = 0; j < n; j++) {
        sum += x[j] * y[j];
    }
    return sum;
}

/* Eight accumulators to hide the latency of float64 additions. */
static double row_dot_f32(int64_t n, const float *x, const float *y)
{
    enum { SUMS = 8 };
    double sums[SUMS] = {0};
    int64_t whole = n - n % SUMS;
    for (int64_t j = 0; j < whole; j += SUMS) {
        for (int64_t k = 0; k < SUMS; k++) {
            sums[k] += (double)x[j + k] * (double)y[j + k];
        }
    }
    for (int64_t j = whole; j < n; j++) {
        sums[0] += (double)x[j] * (double)y[j];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

static void dots_rows(void *argument, int64_t from, int64_t to)
{
    const dots_ctx *j = argument;
    for (int64_t r = from; r < to; r++) {
        int64_t b = r / j->x->rows, i = r % j->x->rows;
        const void *x = tchi_cpu_row(j->x, b, i), *y = tchi_cpu_row(j->y, b, i);
        double sum = j->x->type == TCH_SCALAR_F64 ? row_dot_f64(j->x->cols, x, y) : row_dot_f32(j->x->cols, x, y);
        if (j->exponent != 1.0) {
            sum = sum > 0.0 ? pow(sum, j->exponent) : 0.0;
        }
        char *w = tchi_cpu_row(j->w, b, 0);
        tchi_convert(1, j->w->type, w + i * tchi_cpu_size(j->w->type), TCH_SCALAR_F64, &sum);
    }
}

tch_status tchi_cpu_row_dots(void *state, const tch_matrices *x, const tch_matrices *y, double exponent,
                             const tch_matrices *w)
{
    dots_ctx ctx = {x, y, w, exponent};
    double elements = (double)x->batch * (double)x->rows * (double)x->cols;
    tchi_cpu_split(state, x->batch * x->rows, 2.0 * elements, dots_rows, &ctx);
    return TCH_OK;
}

/* --- rows as sums of two float16 --------------------------------------------------------------------------------- */

/* out = x / |x| for x of float32 or float64, or zero; a float32 x may alias out. */
static void normalize_row(int64_t n, tch_scalar type, const void *x, float *out)
{
    for (int64_t j = 0; type == TCH_SCALAR_F64 && j < n; j++) {
        out[j] = (float)((const double *)x)[j];
    }
    const float *from = type == TCH_SCALAR_F64 ? out : x;
    double square = row_dot_f32(n, from, from);
    double inverse = square == 0.0 ? 0.0 : 1.0 / sqrt(square);
    for (int64_t j = 0; j < n; j++) {
        out[j] = (float)((double)from[j] * inverse);
    }
}

/* Element (i, j) of (X_b + shift I) / bound, or of X_b. */
static float split_value(const tch_rows_to_split *p, const tch_matrices *x, int64_t b, int64_t i, int64_t j)
{
    double value = tchi_cpu_get(x, b, i, j);
    if (p->rows != NULL || p->bound == NULL) {
        return (float)value;
    }
    return (float)((value + (i == j ? p->shift[b] : 0.0)) / p->bound[b]);
}

/* The scale is usually a power of two; the residual of the high part is exact. */
static void split_row(const tch_rows_to_split *p, const tch_matrices *x, int64_t b, int64_t i)
{
    enum { SIZE = 2 }; /* bytes of float16 */
    char *high = tchi_cpu_row(&p->out->high, b, i);
    char *low = p->out->low.data != NULL ? tchi_cpu_row(&p->out->low, b, i) : NULL;
    for (int64_t j = 0; j < x->cols; j++) {
        float value = split_value(p, x, b, i, j) * (float)p->out->scale;
        float top;
        tchi_convert(1, TCH_SCALAR_F16, high + SIZE * j, TCH_SCALAR_F32, &value);
        tchi_convert(1, TCH_SCALAR_F32, &top, TCH_SCALAR_F16, high + SIZE * j);
        float rest = isinf(top) ? 0.0F : value - top;
        if (low != NULL) {
            tchi_convert(1, TCH_SCALAR_F16, low + SIZE * j, TCH_SCALAR_F32, &rest);
        }
    }
}

static void normalize_and_split_row(const void *argument, int64_t b, int64_t i)
{
    const tch_rows_to_split *p = argument;
    const tch_matrices *source = p->x;
    if (p->rows != NULL && p->done.of != NULL && p->done.of[b] <= p->done.most) {
        return;
    }
    if (p->rows != NULL) {
        normalize_row(p->x->cols, p->x->type, tchi_cpu_row(p->x, b, i), tchi_cpu_row(p->rows, b, i));
        source = p->rows;
    }
    split_row(p, source, b, i);
}

tch_status tchi_cpu_split_rows(void *state, const tch_rows_to_split *problem)
{
    tchi_cpu_for_rows(state, problem->x, 8.0, normalize_and_split_row, problem);
    return TCH_OK;
}

/* --- order ------------------------------------------------------------------------------------------------------- */

typedef struct order_ctx {
    const tch_matrices *w;
    int32_t *order;
} order_ctx;

/* Whether element i precedes element j; ties are broken by index, so the order is unique. */
static int precedes(const tch_matrices *w, int64_t index, int32_t i, int32_t j)
{
    double a = tchi_cpu_get(w, index, 0, i);
    double b = tchi_cpu_get(w, index, 0, j);
    if (isnan(a) || isnan(b)) {
        return isnan(a) == isnan(b) ? i < j : isnan(b);
    }
    return a != b ? a > b : i < j;
}

/* Sift-down for a max-heap by position in the order. */
static void sink_in_heap(const tch_matrices *w, int64_t index, int32_t *order, int64_t root, int64_t count)
{
    int32_t moving = order[root];
    for (;;) {
        int64_t child = 2 * root + 1;
        if (child >= count) {
            break;
        }
        if (child + 1 < count && precedes(w, index, order[child], order[child + 1])) {
            child++;
        }
        if (precedes(w, index, order[child], moving)) {
            break;
        }
        order[root] = order[child];
        root = child;
    }
    order[root] = moving;
}

/* Heap sort: in place. */
static void order_one(void *argument, int64_t b, int thread)
{
    const order_ctx *j = argument;
    int64_t n = j->w->cols;
    int32_t *order = j->order + b * n;
    for (int64_t i = 0; i < n; i++) {
        order[i] = (int32_t)i;
    }
    for (int64_t root = n / 2 - 1; root >= 0; root--) {
        sink_in_heap(j->w, b, order, root, n);
    }
    for (int64_t last = n - 1; last > 0; last--) {
        int32_t top = order[0];
        order[0] = order[last];
        order[last] = top;
        sink_in_heap(j->w, b, order, 0, last);
    }
}

tch_status tchi_cpu_descending(void *state, const tch_matrices *w, const int32_t *flags, int32_t *order)
{
    for (int64_t k = 0; flags != NULL && k < w->batch * w->cols; k++) {
        order[k] = flags[k / w->cols] != 0 ? (int32_t)(k % w->cols) : order[k];
    }
    order_ctx ctx = {w, order};
    double n = (double)w->cols;
    if (flags == NULL && w->cols > 0) {
        tchi_cpu_for_each(state, w->batch, 20.0 * n * log2(n + 1.0), order_one, &ctx);
    }
    return TCH_OK;
}

typedef struct permute_ctx {
    const tch_matrices *x, *out;
    const int32_t *rows, *cols;
} permute_ctx;

static void gather_columns(int64_t n, int64_t size, const char *from, const int32_t *cols, char *to)
{
    if (size == 4) {
        for (int64_t j = 0; j < n; j++) {
            ((uint32_t *)to)[j] = ((const uint32_t *)from)[cols[j]];
        }
        return;
    }
    for (int64_t j = 0; j < n; j++) {
        memcpy(to + j * size, from + cols[j] * size, (size_t)size);
    }
}

static void permute_row(const void *argument, int64_t b, int64_t i)
{
    const permute_ctx *j = argument;
    int64_t n = j->out->cols;
    int64_t size = tchi_cpu_size(j->out->type);
    const char *source = tchi_cpu_row(j->x, b, j->rows != NULL ? j->rows[b * j->out->rows + i] : i);
    char *out = tchi_cpu_row(j->out, b, i);
    const int32_t *cols = j->cols != NULL ? j->cols + b * n : NULL;
    if (j->x->type != j->out->type) { /* from float32 to float64 */
        for (int64_t k = 0; k < n; k++) {
            ((double *)out)[k] = (double)((const float *)source)[cols != NULL ? cols[k] : k];
        }
    } else if (cols != NULL) {
        gather_columns(n, size, source, cols, out);
    } else {
        memcpy(out, source, (size_t)(n * size));
    }
}

tch_status tchi_cpu_permute(void *state, const tch_matrices *x, const int32_t *rows, const int32_t *cols,
                            const tch_matrices *out)
{
    permute_ctx ctx = {x, out, rows, cols};
    tchi_cpu_for_rows(state, out, 4.0, permute_row, &ctx);
    return TCH_OK;
}

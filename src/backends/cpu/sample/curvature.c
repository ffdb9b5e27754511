/* KFAC's division in the eigenbasis, and clipping weights. */
#include "backends/cpu/cpu.h"

#include <math.h>

#include "backends/rules.h"

typedef struct divide_ctx {
    const tch_matrices *x;
    const tch_matrices *rows, *cols; /* NULL, or NULL is `values` */
    const tch_matrices *values;
    double damping;
} divide_ctx;

static double at_least_0(double x)
{
    return x < 0.0 ? 0.0 : x; /* NaN stays */
}

static void divide_row_f64(int64_t n, double *x, double row, const double *cols, double damping)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] /= row * at_least_0(cols[j]) + damping;
    }
}

/* In float64: the product of two small eigenvalues may be below float32's range, and so may the damping. */
static void divide_row_f32(int64_t n, float *x, double row, const float *cols, double damping)
{
    for (int64_t j = 0; j < n; j++) {
        x[j] = (float)((double)x[j] / (row * at_least_0((double)cols[j]) + damping));
    }
}

static void divide_row(const void *argument, int64_t b, int64_t i)
{
    const divide_ctx *j = argument;
    void *x = tchi_cpu_row(j->x, b, i);
    const void *by = j->values != NULL ? tchi_cpu_row(j->values, b, i) : tchi_cpu_row(j->cols, b, 0);
    double row = j->values != NULL ? 1.0 : at_least_0(tchi_cpu_get(j->rows, b, 0, i));
    if (j->x->type == TCH_SCALAR_F64) {
        divide_row_f64(j->x->cols, x, row, by, j->damping);
    } else {
        divide_row_f32(j->x->cols, x, row, by, j->damping);
    }
}

tch_status tchi_cpu_damped_divide(void *state, const tch_matrices *x, const tch_matrices *rows,
                                  const tch_matrices *cols, const tch_matrices *values, double damping)
{
    divide_ctx ctx = {x, rows, cols, rows == NULL ? values : NULL, damping};
    tchi_cpu_for_rows(state, x, 4.0, divide_row, &ctx);
    return TCH_OK;
}

tch_status tchi_cpu_clip_weights(void *state, tch_clip_rule rule, int64_t count, const double *squares, double scale,
                                 double most, double *weights)
{
    for (int64_t i = 0; i < count; i++) {
        weights[i] = tchi_rule_clip_weight(rule, scale * squares[i], most);
    }
    return TCH_OK;
}

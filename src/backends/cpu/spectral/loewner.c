/* Derivatives of a matrix power: the rotated gradient times divided differences, elementwise. */
#include "backends/loewner.h"

#include "backends/cpu/cpu.h"

/* Two exponentials, two logarithms and a division for an element, in additions. */
#define WORK 200.0

typedef struct loewner_ctx {
    const tch_spectrum_map *map;
    const tch_matrices *w, *b;
    const int32_t *flags;
} loewner_ctx;

static void loewner_rows(void *argument, int64_t from, int64_t to)
{
    const loewner_ctx *ctx = argument;
    int64_t n = ctx->b->rows;
    for (int64_t r = from; r < to; r++) {
        int64_t index = r / n;
        if (ctx->flags[index] != TCH_REPORT_OK) {
            continue;
        }
        const double *w = tchi_cpu_row(ctx->w, index, 0);
        double *row = tchi_cpu_row(ctx->b, index, r % n);
        tchi_spectrum spectrum = tchi_spectrum_of(ctx->map, w[n - 1]);
        tchi_damped here = tchi_damp(ctx->map, &spectrum, w[r % n]);
        for (int64_t j = 0; j < n; j++) {
            row[j] *= tchi_divided_difference(ctx->map->power, here, tchi_damp(ctx->map, &spectrum, w[j]));
        }
    }
}

/* Whether the function has a derivative at every eigenvalue. */
static int32_t judge_spectrum(const tch_spectrum_map *map, const tchi_spectrum *s, const double *w, int64_t n)
{
    if (!map->clamp && w[0] < -fmax(map->negative * s->largest, s->added)) {
        return TCH_REPORT_NOT_POSITIVE;
    }
    for (int64_t i = 0; i < n; i++) {
        tchi_damped d = tchi_damp(map, s, w[i]);
        if (!isfinite(tchi_divided_difference(map->power, d, d))) {
            return d.place > 0.0 ? TCH_REPORT_OVERFLOW : TCH_REPORT_NOT_POSITIVE;
        }
    }
    return TCH_REPORT_OK;
}

/* The diagonal includes each eigenvalue's own damping; the largest eigenvalue determines the damping of all. */
static void add_through_largest(const loewner_ctx *ctx, const tchi_spectrum *s, int64_t index)
{
    int64_t n = ctx->b->rows;
    const double *w = tchi_cpu_row(ctx->w, index, 0);
    int64_t first = n - 1;
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += ((const double *)tchi_cpu_row(ctx->b, index, i))[i];
    }
    while (first > 0 && w[first - 1] >= s->largest * (1.0 - TCHI_LOEWNER_EQUAL)) {
        first--;
    }
    for (int64_t i = first; i < n; i++) {
        ((double *)tchi_cpu_row(ctx->b, index, i))[i] += ctx->map->relative_eps * sum / (double)(n - first);
    }
}

/* Without product_rates `values` and `damping` are NULL. */
tch_status tchi_cpu_divided_differences(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                        const tch_matrices *values, const double *damping, const tch_matrices *b,
                                        int32_t *flags)
{
    int64_t n = b->rows;
    const loewner_ctx ctx = {map, w, b, flags};
    tchi_cpu_split(state, b->batch * n, WORK * (double)b->batch * (double)n * (double)n, loewner_rows, (void *)&ctx);
    for (int64_t index = 0; index < b->batch && n > 0; index++) {
        const double *spectrum = tchi_cpu_row(w, index, 0);
        tchi_spectrum s = tchi_spectrum_of(map, spectrum[n - 1]);
        if (flags[index] != TCH_REPORT_OK) {
            continue;
        }
        flags[index] = judge_spectrum(map, &s, spectrum, n);
        if (s.relative) {
            add_through_largest(&ctx, &s, index);
        }
    }
    return TCH_OK;
}

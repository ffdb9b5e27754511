/* Batched eigendecompositions, solves and shifted inverses. */
#include "backends/cpu/cpu.h"

#include <math.h>
#include <stdbool.h>

#include "backends/cpu/runtime/blas/parallel_blas.h"
#include "backends/cpu/spectral/eigh/eigh.h"
#include "backends/cpu/spectral/shifted_inverse/shifted_inverse.h"

typedef struct decompose_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *a, *b;
    const double *shift;
    int32_t *flags;
    char *scratch;
    int64_t scratch_each;
    int32_t count; /* of poles */
    const double *shifts, *weights;
} decompose_ctx;

/* Eigenvalues can exceed every entry. They are ascending, so checking both ends suffices. */
static int32_t report_of(int code, const tch_matrices *w, int64_t i)
{
    if (code != 0) {
        return code == TCHI_EIGH_NOT_FINITE ? TCH_REPORT_NOT_FINITE : TCH_REPORT_NO_CONVERGENCE;
    }
    bool in_range = isfinite(tchi_cpu_get(w, i, 0, 0)) && isfinite(tchi_cpu_get(w, i, 0, w->cols - 1));
    return in_range ? TCH_REPORT_OK : TCH_REPORT_OVERFLOW;
}

static const tchi_cpu_eigh_solver *eigh_for(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? &tchi_cpu_eigh_f64 : &tchi_cpu_eigh_f32;
}

static void eigh_one(void *argument, int64_t i, int thread)
{
    const decompose_ctx *j = argument;
    if (j->flags[i] != TCH_REPORT_OK) {
        return;
    }
    void *scratch = j->scratch + thread * j->scratch_each;
    void *v = tchi_cpu_row(j->a, i, 0);
    void *w = tchi_cpu_row(j->b, i, 0);
    int code = eigh_for(j->a->type)->solve(j->state->blas, j->a->rows, v, j->a->ld, w, scratch);
    j->flags[i] = report_of(code, j->b, i);
}

tch_status tchi_cpu_eigh(void *state, const tch_matrices *v, const tch_matrices *w, int32_t *flags, void *scratch)
{
    tchi_cpu_state *s = state;
    int64_t n = v->rows;
    if (n == 0) {
        return TCH_OK;
    }
    size_t each = eigh_for(v->type)->scratch_bytes(n);
    decompose_ctx ctx = {.state = s, .a = v, .b = w, .flags = flags, .scratch = scratch};
    ctx.scratch_each = TCHI_CPU_SCRATCH_ROUND((int64_t)each);
    tchi_cpu_for_each(s, v->batch, 9.0 * (double)n * (double)n * (double)n, eigh_one, &ctx);
    return TCH_OK;
}

/* --- powers of a spectrum --------------------------------------------------------------------------------------- */

/* Replaces eigenvalue i by its damped power. A power that is not finite once stored comes from zero or is too large. */
static int32_t raise_eigenvalue(const tch_spectrum_map *map, const tch_matrices *w, int64_t b, int64_t i, double added)
{
    double base = tchi_cpu_get(w, b, 0, i) + added;
    double place = base > (map->clamp ? added : 0.0) ? base : added;
    tchi_cpu_set(w, b, 0, i, pow(place, map->power));
    if (isfinite(tchi_cpu_get(w, b, 0, i))) {
        return TCH_REPORT_OK;
    }
    return place > 0 ? TCH_REPORT_OVERFLOW : TCH_REPORT_NOT_POSITIVE;
}

tch_status tchi_cpu_spectrum_power(void *state, const tch_spectrum_map *map, const tch_matrices *w, double *damping,
                                   int32_t *flags)
{
    int64_t n = w->cols;
    for (int64_t b = 0; b < w->batch; b++) {
        if (flags[b] != TCH_REPORT_OK || n == 0) {
            continue;
        }
        double largest = fmax(tchi_cpu_get(w, b, 0, n - 1), 0.0);
        double added = fmax(map->eps, map->relative_eps * largest);
        if (damping != NULL) {
            damping[b] = added;
        }
        if (!map->clamp && tchi_cpu_get(w, b, 0, 0) < -fmax(map->negative * largest, added)) {
            flags[b] = TCH_REPORT_NOT_POSITIVE;
        }
        for (int64_t i = 0; i < n; i++) {
            int32_t report = raise_eigenvalue(map, w, b, i, added);
            flags[b] = flags[b] == TCH_REPORT_OK ? report : flags[b];
        }
    }
    return TCH_OK;
}

/* --- Cholesky --------------------------------------------------------------------------------------------------- */

/* potrf leaves L with A = L L', and two triangular solves follow. */
static void solve_one(void *argument, int64_t i, int thread)
{
    const decompose_ctx *j = argument;
    if (j->flags[i] != TCH_REPORT_OK) {
        return;
    }
    int64_t n = j->a->rows;
    for (int64_t k = 0; j->shift != NULL && k < n; k++) {
        tchi_cpu_set(j->a, i, k, k, tchi_cpu_get(j->a, i, k, k) + j->shift[i]);
    }
    int64_t columns = j->b->cols;
    const tchi_parallel_blas *blas = tchi_parallel_blas_for(j->a->type);
    void *a = tchi_cpu_row(j->a, i, 0);
    void *b = tchi_cpu_row(j->b, i, 0);
    if (blas->potrf(j->state, n, a, j->a->ld) != 0) {
        j->flags[i] = TCH_REPORT_NOT_POSITIVE;
    } else if (columns > 0) {
        blas->trsm(j->state, TCHI_NO_TRANS, n, columns, a, j->a->ld, b, j->b->ld);
        blas->trsm(j->state, TCHI_TRANS, n, columns, a, j->a->ld, b, j->b->ld);
    }
}

tch_status tchi_cpu_spd_solve(void *state, const tch_matrices *a, const double *shift, const tch_matrices *b,
                              int32_t *flags, void *scratch)
{
    tchi_cpu_state *s = state;
    decompose_ctx ctx = {.state = s, .a = a, .b = b, .shift = shift, .flags = flags};
    double n = (double)a->rows;
    if (a->rows > 0) {
        tchi_cpu_for_each(s, a->batch, n * n * (n / 3.0 + 2.0 * (double)b->cols), solve_one, &ctx);
    }
    return TCH_OK;
}

/* --- shifted inverses ------------------------------------------------------------------------------------------- */

static const tchi_cpu_shifted_inverse_solver *shifted_inverse_for(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? &tchi_cpu_shifted_inverse_f64 : &tchi_cpu_shifted_inverse_f32;
}

static void shifted_one(void *argument, int64_t i, int thread)
{
    const decompose_ctx *j = argument;
    if (j->flags[i] != TCH_REPORT_OK) {
        return;
    }
    void *scratch = j->scratch + thread * j->scratch_each;
    void *a = tchi_cpu_row(j->a, i, 0);
    void *x = tchi_cpu_row(j->b, i, 0);
    int code =
        shifted_inverse_for(j->a->type)
            ->solve(j->state->blas, j->a->rows, a, j->a->ld, j->count, j->shifts, j->weights, x, j->b->ld, scratch);
    if (code != 0) {
        j->flags[i] = code < 0 ? TCH_REPORT_NOT_FINITE : TCH_REPORT_NOT_POSITIVE;
    }
}

tch_status tchi_cpu_shifted_inverse(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                    const double *weights, const tch_matrices *x, int32_t *flags, void *scratch)
{
    tchi_cpu_state *s = state;
    int64_t n = a->rows;
    if (n == 0) {
        return TCH_OK;
    }
    size_t each = shifted_inverse_for(a->type)->scratch_bytes(n, count);
    decompose_ctx ctx = {.state = s,
                         .a = a,
                         .b = x,
                         .flags = flags,
                         .scratch = scratch,
                         .count = count,
                         .shifts = shifts,
                         .weights = weights};
    ctx.scratch_each = TCHI_CPU_SCRATCH_ROUND((int64_t)each);
    tchi_cpu_for_each(s, a->batch, 4.0 * (double)n * (double)n * (double)n, shifted_one, &ctx);
    return TCH_OK;
}

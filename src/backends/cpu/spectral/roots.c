/* Bounds and damping before a root or solve, and the residual after it. */
#include "backends/cpu/cpu.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "backends/cpu/runtime/blas/parallel_blas.h"
#include "backends/rules.h"

/* --- before ----------------------------------------------------------------------------------------------------- */

tch_status tchi_cpu_root_setup(void *state, int64_t batch, const tch_root_norms *norms, double eps, double relative_eps,
                               double margin, double symmetry, double *damping, double *bound, int32_t *flags)
{
    for (int64_t b = 0; b < batch; b++) {
        tchi_rule_root_setup(norms, b, eps, relative_eps, margin, symmetry, &damping[b], &bound[b], &flags[b]);
    }
    return TCH_OK;
}

tch_status tchi_cpu_factored_damping(void *state, int64_t batch, const double *trace_a, int64_t m,
                                     const double *trace_b, int64_t n, double damping, double *shift_a, double *shift_b)
{
    for (int64_t b = 0; b < batch; b++) {
        tchi_rule_factored_damping(trace_a[b], (double)m, trace_b[b], (double)n, damping, &shift_a[b], &shift_b[b]);
    }
    return TCH_OK;
}

/* --- after ------------------------------------------------------------------------------------------------------ */

#define PROBES 4 /* vectors multiplied at once; more probes are processed in groups */

typedef struct residual_ctx {
    const tchi_cpu_state *state;
    const tch_matrices *a, *x;
    const double *shift;
    int32_t root, probes;
    double *out;
    double *error; /* may be NULL */
    char *scratch;
    int64_t scratch_each;
} residual_ctx;

typedef struct block_ctx {
    const tchi_loops *loops;
    const tch_matrices *m;
    int64_t index;
    double shift;
    const double *y; /* PROBES contiguous vectors of n */
    double *out;
} block_ctx;

int64_t tchi_cpu_root_residual_scratch(int64_t n, int64_t probes)
{
    return (probes == 0 ? 4 * n * n : 3 * PROBES * n) * (int64_t)sizeof(double);
}

static void block_rows(void *argument, int64_t from, int64_t to)
{
    const block_ctx *j = argument;
    int64_t n = j->m->cols;
    for (int64_t i = from; i < to; i++) {
        double sums[PROBES];
        j->loops->dot4(n, tchi_cpu_row(j->m, j->index, i), j->y, sums);
        for (int k = 0; k < PROBES; k++) {
            j->out[k * n + i] = sums[k] + j->shift * j->y[k * n + i];
        }
    }
}

/* Swaps y and spare, so that y is the result. */
static void multiply_block(const residual_ctx *j, const tch_matrices *m, int64_t index, double shift, double **y,
                           double **spare)
{
    block_ctx block = {tchi_loops_for(m->type), m, index, shift, *y, *spare};
    double n = (double)m->rows;
    tchi_cpu_split(j->state, m->rows, 2.0 * PROBES * n * n, block_rows, &block);
    double *swap = *y;
    *y = *spare;
    *spare = swap;
}

/* Magnitude of the probes. For p = 1 the row sums of X alone may overflow float64 although no eigenvalue does; this
 * power of two changes nothing else. */
static double probe_size(int32_t root)
{
    return root == 1 ? 0x1p-8 : 1.0;
}

/* Random signs of a group of probes. */
static void draw_probes(int64_t n, uint64_t group, double size, double *v)
{
    uint64_t bits = 0xDA942042E4DD58B5u + group * 0x9E3779B97F4A7C15u;
    for (int64_t i = 0; i < PROBES * n; i++) {
        bits = bits * 0x5851F42D4C957F2Du + 0x14057B7EF767814Fu;
        v[i] = (bits >> 63) != 0 ? size : -size;
    }
}

/* Squared norms, of the matrices or summed over probes. R is the residual. */
typedef struct residual_sums {
    double r, xr, x;
} residual_sums;

static double sum_squares(int64_t count, double factor, const double *y)
{
    return tchi_loops_for(TCH_SCALAR_F64)->sum_squares(count, factor, y);
}

/* The power of two that scales X near 1, so that squares stay in range: diagonal entries lie between the extreme
 * eigenvalues. */
static double unit_of(const residual_ctx *j, int64_t index)
{
    double first = j->x->type == TCH_SCALAR_F64 ? *(const double *)tchi_cpu_row(j->x, index, 0) : 1.0;
    int exponent = isfinite(first) && first != 0.0 ? ilogb(first) : 0;
    return ldexp(1.0, exponent > 1000 ? -1000 : exponent < -1000 ? 1000 : -exponent);
}

/* One group of probes. */
static void probe_group(const residual_ctx *j, int64_t index, uint64_t group, double *scratch, residual_sums *sums)
{
    int64_t n = j->a->rows;
    double *v = scratch;
    double *y = scratch + PROBES * n;
    double *spare = scratch + 2 * PROBES * n;
    double unit = unit_of(j, index);
    draw_probes(n, group, probe_size(j->root), v);
    memcpy(y, v, (size_t)(PROBES * n) * sizeof *v);
    for (int k = 0; k < j->root - j->root / 2; k++) {
        multiply_block(j, j->x, index, 0.0, &y, &spare);
        sums->x += k == 0 ? sum_squares(PROBES * n, unit, y) : 0.0;
    }
    multiply_block(j, j->a, index, j->shift != NULL ? j->shift[index] : 0.0, &y, &spare);
    for (int k = 0; k < j->root / 2; k++) {
        multiply_block(j, j->x, index, 0.0, &y, &spare);
    }
    for (int64_t i = 0; i < PROBES * n; i++) {
        y[i] -= v[i];
    }
    sums->r += sum_squares(PROBES * n, 1 / probe_size(j->root), y);
    if (j->error != NULL) {
        multiply_block(j, j->x, index, 0.0, &y, &spare);
        sums->xr += sum_squares(PROBES * n, unit, y);
    }
}

static residual_sums probe_residual(const residual_ctx *j, int64_t index, double *scratch)
{
    residual_sums sums = {0};
    int groups = (j->probes + PROBES - 1) / PROBES;
    for (int g = 0; g < groups; g++) {
        probe_group(j, index, (uint64_t)g, scratch, &sums);
    }
    sums.r /= (double)groups * PROBES; /* |R|^2 itself is needed, of the others only the ratio */
    return sums;
}

/* y <- m y by BLAS, with `spare` taking the product. */
static void multiply_full(const residual_ctx *j, const double *m, double **y, double **spare)
{
    int64_t n = j->a->rows;
    tchi_parallel_blas_f64.gemm(j->state, TCHI_NO_TRANS, TCHI_NO_TRANS, n, n, n, 1.0, m, n, *y, n, 0.0, *spare, n);
    double *swap = *y;
    *y = *spare;
    *spare = swap;
}

static residual_sums exact_residual(const residual_ctx *j, int64_t index, double *scratch)
{
    int64_t n = j->a->rows;
    double *x = scratch;
    double *a = scratch + n * n;
    double *y = scratch + 2 * n * n;
    double *spare = scratch + 3 * n * n;
    tchi_cpu_convert_block(j->x, index, 0, n, 0, n, TCH_SCALAR_F64, x, n);
    tchi_cpu_convert_block(j->a, index, 0, n, 0, n, TCH_SCALAR_F64, a, n);
    for (int64_t i = 0; i < n; i++) {
        a[i * n + i] += j->shift != NULL ? j->shift[index] : 0.0;
    }
    memcpy(y, x, (size_t)(n * n) * sizeof *y);
    for (int k = 1; k < j->root - j->root / 2; k++) {
        multiply_full(j, x, &y, &spare);
    }
    multiply_full(j, a, &y, &spare);
    for (int k = 0; k < j->root / 2; k++) {
        multiply_full(j, x, &y, &spare);
    }
    for (int64_t i = 0; i < n; i++) {
        y[i * n + i] -= 1.0;
    }
    double unit = unit_of(j, index);
    residual_sums sums = {.r = sum_squares(n * n, 1.0, y), .x = sum_squares(n * n, unit, x)};
    if (j->error != NULL) {
        multiply_full(j, x, &y, &spare);
        sums.xr = sum_squares(n * n, unit, y);
    }
    return sums;
}

static void residual_one(void *argument, int64_t index, int thread)
{
    const residual_ctx *j = argument;
    double *scratch = (double *)(void *)(j->scratch + thread * j->scratch_each);
    residual_sums sums = j->probes == 0 ? exact_residual(j, index, scratch) : probe_residual(j, index, scratch);
    j->out[index] = sqrt(sums.r / (double)j->a->rows);
    if (j->error != NULL) {
        j->error[index] = sqrt(sums.xr / sums.x) / j->root;
    }
}

tch_status tchi_cpu_root_residual(void *state, int32_t root, const tch_matrices *a, const double *shift,
                                  const tch_matrices *x, int32_t probes, double *out, double *error, double tolerance,
                                  int32_t *flags, void *scratch)
{
    residual_ctx ctx = {state, a, x, shift, root, probes, out, error, scratch, 0};
    double n = (double)a->rows;
    ctx.scratch_each = TCHI_CPU_SCRATCH_ROUND(tchi_cpu_root_residual_scratch(a->rows, probes));
    if (a->rows == 0) {
        memset(out, 0, (size_t)a->batch * sizeof *out);
        if (error != NULL) {
            memset(error, 0, (size_t)a->batch * sizeof *error);
        }
    } else {
        double work = (root + 2) * n * n * (probes == 0 ? 2.0 * n : 2.0 * probes);
        tchi_cpu_for_each(state, a->batch, work, residual_one, &ctx);
    }
    for (int64_t b = 0; flags != NULL && b < a->batch; b++) {
        tchi_rule_root_verdict(error != NULL ? error[b] : out[b], tolerance, &flags[b]);
    }
    return TCH_OK;
}

/* Elementwise operations on batches of matrices, row by row, divided among threads. */
#include "backends/cpu/cpu.h"

#include <math.h>

typedef struct row_ctx {
    const tch_matrices *x, *y, *out;
    const tchi_loops *loops;
    double c0, c1, c2;
    const double *shift, *scale; /* one per matrix */
    const int32_t *flags;
    uint64_t seed;
} row_ctx;

/* An element counts as four operations: load, arithmetic, store. */
static void for_rows(void *state, row_ctx *ctx, tchi_cpu_row_task body)
{
    ctx->loops = tchi_loops_for(ctx->out->type);
    tchi_cpu_for_rows(state, ctx->out, 4.0, body, ctx);
}

static void add_at(tch_scalar type, void *row, int64_t column, double value)
{
    if (type == TCH_SCALAR_F64) {
        ((double *)row)[column] += value;
    } else {
        ((float *)row)[column] += (float)value;
    }
}

static void combine_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    void *out = tchi_cpu_row(j->out, b, i);
    j->loops->combine(j->out->cols, j->c1, j->x != NULL ? tchi_cpu_row(j->x, b, i) : NULL, j->c2,
                      j->y != NULL ? tchi_cpu_row(j->y, b, i) : NULL, out);
    if (j->c0 != 0.0 && i < j->out->cols) {
        add_at(j->out->type, out, i, j->c0);
    }
}

tch_status tchi_cpu_combine(void *state, double c0, double c1, const tch_matrices *x, double c2, const tch_matrices *y,
                            const tch_matrices *out)
{
    row_ctx ctx = {.x = x, .y = y, .out = out, .c0 = c0, .c1 = c1, .c2 = c2};
    for_rows(state, &ctx, combine_row);
    return TCH_OK;
}

/* scale^exponent as a product of two factors, so that neither leaves the range of `type` near its ends, as 1 / scale
 * may. The second is 1 everywhere else. */
typedef struct factors {
    double first, second;
} factors;

static factors factors_of(tch_scalar type, double scale, double exponent)
{
    double most = type == TCH_SCALAR_F64 ? 0x1p+1000 : 0x1p+120;
    double factor = pow(scale, exponent);
    if ((factor < most && factor > 1.0 / most) || !(scale > 0) || isinf(scale)) {
        return (factors){factor, 1.0};
    }
    int half = ilogb(scale) / 2;
    return (factors){pow(ldexp(1.0, half), exponent), pow(ldexp(scale, -half), exponent)};
}

/* The shift is added before scaling, in double: it may be far below the rounding error of the diagonal. */
static void shift_scale_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    const tchi_loops *loops = j->loops;
    const void *x = tchi_cpu_row(j->x, b, i);
    void *out = tchi_cpu_row(j->out, b, i);
    double diagonal = 0;
    factors factor = {1.0, 1.0};
    if (j->scale != NULL) {
        factor = factors_of(j->out->type, j->scale[b], j->c0);
    }
    if (i < j->out->cols) {
        tchi_convert(1, TCH_SCALAR_F64, &diagonal, j->x->type, (const char *)x + i * tchi_cpu_size(j->x->type));
    }
    if (x != out) {
        tchi_convert(j->out->cols, j->out->type, out, j->x->type, x);
    }
    loops->scale(j->out->cols, factor.first, out, out);
    if (factor.second != 1.0) {
        loops->scale(j->out->cols, factor.second, out, out);
    }
    if (j->shift != NULL && i < j->out->cols) {
        diagonal = (diagonal + j->shift[b]) * factor.first * factor.second;
        tchi_convert(1, j->out->type, (char *)out + i * tchi_cpu_size(j->out->type), TCH_SCALAR_F64, &diagonal);
    }
}

tch_status tchi_cpu_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                double exponent, const tch_matrices *out)
{
    row_ctx ctx = {.x = x, .out = out, .shift = shift, .scale = scale, .c0 = exponent};
    for_rows(state, &ctx, shift_scale_row);
    return TCH_OK;
}

static void scale_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    double factor;
    const char *w = tchi_cpu_row(j->y, b, 0);
    tchi_convert(1, TCH_SCALAR_F64, &factor, j->y->type, w + i * tchi_cpu_size(j->y->type));
    j->loops->scale(j->out->cols, factor, tchi_cpu_row(j->x, b, i), tchi_cpu_row(j->out, b, i));
}

tch_status tchi_cpu_scale_rows(void *state, const tch_matrices *x, const tch_matrices *w, const tch_matrices *out)
{
    row_ctx ctx = {.x = x, .y = w, .out = out};
    for_rows(state, &ctx, scale_row);
    return TCH_OK;
}

/* Hashes a counter to 64 bits: two rounds of multiply and shift over a Weyl sequence. */
static uint64_t mix(uint64_t counter)
{
    uint64_t z = counter * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 32)) * 0xD6E8FEB86659FD93u;
    z = (z ^ (z >> 29)) * 0xD6E8FEB86659FD93u;
    return z ^ (z >> 32);
}

static void sign_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    void *out = tchi_cpu_row(j->out, b, i);
    for (int64_t c = 0; c < j->out->cols; c++) {
        uint64_t bits = mix(j->seed + mix((uint64_t)i + 1) + (uint64_t)c);
        double sign = (bits >> 63) != 0 ? 1.0 : -1.0;
        tchi_convert(1, j->out->type, (char *)out + c * tchi_cpu_size(j->out->type), TCH_SCALAR_F64, &sign);
    }
}

tch_status tchi_cpu_random_signs(void *state, uint64_t seed, const tch_matrices *out)
{
    row_ctx ctx = {.out = out, .seed = seed};
    for_rows(state, &ctx, sign_row);
    return TCH_OK;
}

static void select_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    if (j->flags[b] == TCH_REPORT_OK) {
        tchi_convert(j->out->cols, j->out->type, tchi_cpu_row(j->out, b, i), j->x->type, tchi_cpu_row(j->x, b, i));
    }
}

tch_status tchi_cpu_select(void *state, const int32_t *flags, const tch_matrices *x, const tch_matrices *out)
{
    row_ctx ctx = {.x = x, .out = out, .flags = flags};
    for_rows(state, &ctx, select_row);
    return TCH_OK;
}

/* --- Kronecker product ------------------------------------------------------------------------------------------ */

static void kronecker_row(const void *argument, int64_t b, int64_t i)
{
    const row_ctx *j = argument;
    int64_t p = j->y->rows;
    j->loops->kronecker(j->x->cols, tchi_cpu_row(j->x, b, i / p), j->y->cols, tchi_cpu_row(j->y, b, i % p),
                        tchi_cpu_row(j->out, b, i));
}

tch_status tchi_cpu_kronecker(void *state, const tch_matrices *a, const tch_matrices *b, const tch_matrices *out)
{
    row_ctx ctx = {.x = a, .y = b, .out = out};
    for_rows(state, &ctx, kronecker_row);
    return TCH_OK;
}

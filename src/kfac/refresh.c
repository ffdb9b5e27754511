/* Recomputes inverses and eigenbases by factor batches: all observed factors of one size are one batch, of any layer
 * and side. A factor that fails keeps its previous result. */
#include <math.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

#include "kfac.h"

/* Flags of factors to refresh. A zero factor has seen nothing: its observations were rejected or zero, and its inverse
 * would be damping alone. */
static tch_status inspect_factors(const tch_kfac *k, const tch_matrices *factors, tchi_inspection *i)
{
    TCHI_TRY(tchi_measure(k->context, factors, i));
    tch_root_norms norms = {i->max_abs, i->max_abs, i->nonfinite, i->asymmetry};
    return k->context->backend->matrix->root_setup(k->context->state, factors->batch, &norms, 0.0, 0.0, 1.0,
                                                   tchi_symmetry_tolerance(k->type), i->damping, i->bound, i->flags);
}

/* A method's refresh of `batch` factors n by n: bytes of scratch, and the work in such an arena. */
typedef struct refresh_method {
    int64_t (*bytes)(const tch_kfac *k, int64_t batch, int64_t n);
    tch_status (*refresh)(tch_kfac *k, const tchi_kfac_factor_batch *f, int64_t first, int64_t count,
                          tchi_arena *arena);
} refresh_method;

/* Refreshes factors [first, first + count) in chunks. Scratch is not proportional to their number, so the chunk is
 * halved until it fits. */
static tch_status refresh_factors(tch_kfac *k, const refresh_method *method, const tchi_kfac_factor_batch *f,
                                  int64_t first, int64_t count)
{
    int64_t limit = tch_context_get_workspace_limit(k->context);
    int64_t chunk = count;
    while (limit > 0 && chunk > 1 && method->bytes(k, chunk, f->n) > limit / 9 * 8) { /* the pool rounds up */
        chunk = (chunk + 1) / 2;
    }
    for (int64_t done = 0; done < count; done += chunk) {
        int64_t here = tchi_min(chunk, count - done);
        tchi_arena arena = {.used = method->bytes(k, here, f->n)};
        TCHI_TRY(tchi_arena_reserve(k->context, &arena));
        TCHI_TRY(method->refresh(k, f, first + done, here, &arena));
    }
    return TCH_OK;
}

/* --- inverses ---------------------------------------------------------------------------------------------------- */

/* Probes of a certificate, and its bound: only nonsense is rejected, since there is no other method. */
#define PROBES 4
#define MOST_RESIDUAL 0.1

/* The rounding error of a float32 factor is about u times its trace, which may make small eigenvalues negative: damping
 * must be at least that. */
static double rounding_of(tch_scalar type)
{
    return type == TCH_SCALAR_F64 ? 0x1p-52 : 0x1p-23;
}

/* shifts = factored damping + rounding times trace, for every factor. */
static tch_status find_shifts(tch_kfac *k)
{
    const tch_backend *t = k->context->backend;
    void *state = k->context->state;
    for (int32_t i = 0; i < k->factor_batch_count; i++) {
        const tchi_kfac_factor_batch *f = &k->factor_batches[i];
        tch_matrices all = tchi_kfac_factors(k, f, 0, f->count);
        TCHI_TRY(t->matrix->reduce(state, TCH_REDUCE_TRACE, &all, f->traces));
    }
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        const tchi_kfac_block_batch *c = &k->block_batches[i];
        const tchi_kfac_factor_batch *a = tchi_kfac_factor_batch_of(k, c, TCHI_INPUT);
        const tchi_kfac_factor_batch *g = tchi_kfac_factor_batch_of(k, c, TCHI_OUTPUT);
        int64_t at_a = c->position[TCHI_INPUT];
        int64_t at_g = c->position[TCHI_OUTPUT];
        TCHI_TRY(t->matrix->factored_damping(state, c->count, a->traces + at_a, a->n, g->traces + at_g, g->n,
                                             k->config.damping, a->shifts + at_a, g->shifts + at_g));
    }
    for (int32_t i = 0; i < k->factor_batch_count; i++) {
        const tchi_kfac_factor_batch *f = &k->factor_batches[i];
        tch_matrices shifts = tchi_matrices_new(f->shifts, TCH_SCALAR_F64, 1, 1, f->count);
        tch_matrices traces = tchi_matrices_new(f->traces, TCH_SCALAR_F64, 1, 1, f->count);
        TCHI_TRY(t->matrix->combine(state, 0.0, 1.0, &shifts, rounding_of(k->type), &traces, &shifts));
    }
    return TCH_OK;
}

/* In float64 where that is nearly as fast as float32, as with float64 tensor cores: the error is then the factor's. */
static tch_scalar inverse_type(const tch_kfac *k)
{
    tch_product_rates rates = tchi_product_rates(k->context);
    return k->type == TCH_SCALAR_F64 || 4.0 * rates.f64 >= rates.f32 ? TCH_SCALAR_F64 : TCH_SCALAR_F32;
}

typedef struct inverse_buffers {
    tch_matrices a; /* the damped factor, then its inverse */
    tch_matrices x; /* its inverse Cholesky factor, then the factor again, for the certificate */
    tchi_inspection inspection;
    void *scratch;
} inverse_buffers;

static int64_t inverse_scratch(const tch_context *context, tch_scalar type, int64_t batch, int64_t n)
{
    const tch_backend *t = context->backend;
    int64_t factoring = t->device->scratch_bytes(context->state, TCH_SCRATCH_CHOLESKY_INVERSE, type, n, n, batch, 0);
    int64_t certifying = t->device->scratch_bytes(context->state, TCH_SCRATCH_ROOT_RESIDUAL, type, n, n, batch, PROBES);
    return factoring > certifying ? factoring : certifying;
}

static void inverse_layout(inverse_buffers *b, tchi_arena *arena, const tch_context *context, tch_scalar type,
                           int64_t batch, int64_t n)
{
    b->a = tchi_scratch_matrices(arena, type, batch, n, n);
    b->x = tchi_scratch_matrices(arena, type, batch, n, n);
    tchi_inspection_layout(&b->inspection, arena, batch);
    b->scratch = tchi_arena_take(arena, inverse_scratch(context, type, batch, n));
}

/* (F + shift I)^-1 = X' X with X the inverse of the Cholesky factor: products except for small leaves, without
 * iteration. */
static tch_status invert_factors(tch_kfac *k, const tchi_kfac_factor_batch *f, int64_t first, int64_t count,
                                 tchi_arena *arena)
{
    inverse_buffers b;
    const tch_backend *t = k->context->backend;
    void *state = k->context->state;
    const double *shifts = f->shifts + first;
    int32_t *flags = f->flags + first;
    tch_matrices factors = tchi_kfac_factors(k, f, first, count);
    tch_matrices results = tchi_kfac_results(k, f, first, count);
    inverse_layout(&b, arena, k->context, inverse_type(k), count, f->n);
    b.inspection.flags = flags;
    TCHI_TRY(inspect_factors(k, &factors, &b.inspection));
    TCHI_TRY(t->matrix->shift_scale(state, &factors, shifts, NULL, 1.0, &b.a));
    TCHI_TRY(t->matrix->combine(state, 0.0, 0.0, NULL, 0.0, NULL, &b.x));
    TCHI_TRY(t->matrix->cholesky(state, &b.a, 1, &b.x, flags, b.scratch));
    TCHI_TRY(tchi_gram(k->context, 1.0, &b.x, 1, 0.0, &b.a));
    TCHI_TRY(t->matrix->shift_scale(state, &factors, NULL, NULL, 1.0, &b.x));
    TCHI_TRY(t->matrix->root_residual(state, 1, &b.x, shifts, &b.a, PROBES, f->residuals + first, NULL, MOST_RESIDUAL,
                                      flags, b.scratch));
    return t->matrix->select(state, flags, &b.a, &results);
}

static int64_t inverse_bytes(const tch_kfac *k, int64_t batch, int64_t n)
{
    inverse_buffers b;
    tchi_arena arena = {0};
    inverse_layout(&b, &arena, k->context, inverse_type(k), batch, n);
    return arena.used;
}

static const refresh_method inverses = {inverse_bytes, invert_factors};

/* --- eigenbases -------------------------------------------------------------------------------------------------- */

typedef struct basis_buffers {
    tch_matrices v, w; /* the factor, then its eigenvectors as rows; eigenvalues */
    tchi_inspection inspection;
    void *scratch;
} basis_buffers;

static void basis_layout(basis_buffers *b, tchi_arena *arena, const tch_kfac *k, int64_t batch, int64_t n)
{
    const tch_backend *t = k->context->backend;
    b->v = tchi_scratch_matrices(arena, k->type, batch, n, n);
    b->w = tchi_scratch_matrices(arena, k->type, batch, 1, n);
    tchi_inspection_layout(&b->inspection, arena, batch);
    b->scratch =
        tchi_arena_take(arena, t->device->scratch_bytes(k->context->state, TCH_SCRATCH_EIGH, k->type, n, n, batch, 0));
}

static int64_t basis_bytes(const tch_kfac *k, int64_t batch, int64_t n)
{
    basis_buffers b;
    tchi_arena arena = {0};
    basis_layout(&b, &arena, k, batch, n);
    return arena.used;
}

/* Eigenvalues below zero are rounding errors, and set to 0. */
static tch_status decompose_factors(tch_kfac *k, const tchi_kfac_factor_batch *f, int64_t first, int64_t count,
                                    tchi_arena *arena)
{
    basis_buffers b;
    static const tch_spectrum_map clamp = {0.0, 0.0, 1.0, 1, INFINITY};
    const tch_backend *t = k->context->backend;
    void *state = k->context->state;
    int32_t *flags = f->flags + first;
    tch_matrices factors = tchi_kfac_factors(k, f, first, count);
    tch_matrices vectors = tchi_kfac_results(k, f, first, count);
    tch_matrices values = tchi_kfac_values(k, f, first, count);
    basis_layout(&b, arena, k, count, f->n);
    b.inspection.flags = flags;
    TCHI_TRY(inspect_factors(k, &factors, &b.inspection));
    TCHI_TRY(t->matrix->combine(state, 0.0, 1.0, &factors, 0.0, NULL, &b.v));
    TCHI_TRY(t->matrix->eigh(state, &b.v, &b.w, flags, b.scratch));
    TCHI_TRY(t->matrix->spectrum_power(state, &clamp, &b.w, NULL, flags));
    TCHI_TRY(t->matrix->select(state, flags, &b.v, &vectors));
    return t->matrix->select(state, flags, &b.w, &values);
}

static const refresh_method bases = {basis_bytes, decompose_factors};

/* --- all of them ------------------------------------------------------------------------------------------------- */

static tch_status refresh_factor_batch(tch_kfac *k, const tchi_kfac_factor_batch *f)
{
    const refresh_method *method = k->config.method == TCH_KFAC_INVERSE ? &inverses : &bases;
    for (int64_t first = 0; first < f->count;) {
        int64_t end = first;
        while (end < f->count && tchi_kfac_counts(k, f->owner[end])[TCHI_UPDATES] > 0 &&
               tchi_kfac_is_mine(k, f->owner[end])) {
            end++;
        }
        if (end > first) {
            TCHI_TRY(refresh_factors(k, method, f, first, end - first));
        }
        first = end > first ? end : first + 1;
    }
    return TCH_OK;
}

static tch_status refresh_factor_batches(tch_kfac *k)
{
    if (k->config.method == TCH_KFAC_INVERSE) {
        TCHI_TRY(find_shifts(k));
    }
    for (int32_t i = 0; i < k->factor_batch_count; i++) {
        TCHI_TRY(refresh_factor_batch(k, &k->factor_batches[i]));
    }
    return TCH_OK;
}

/* EKFAC in a group: every rank updates the scales of all layers, and has their bases. */
static tch_status share_bases(const tch_kfac *k)
{
    int64_t bytes = tchi_kfac_traffic_bytes(k, TCHI_BASES);
    tchi_arena arena = {0};
    tchi_arena_take(&arena, bytes);
    tchi_arena_take(&arena, bytes * tch_comm_size(k->comm));
    TCHI_TRY(tchi_arena_reserve(k->context, &arena));
    char *send = tchi_arena_take(&arena, bytes);
    char *receive = tchi_arena_take(&arena, bytes * tch_comm_size(k->comm));
    return tchi_kfac_exchange(k, TCHI_BASES, send, receive);
}

/* EKFAC: in a new basis, scales begin at the products of eigenvalues, as in KFAC. */
static tch_status start_scales(tch_kfac *k)
{
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        const tchi_kfac_block_batch *c = &k->block_batches[i];
        const tchi_kfac_factor_batch *a = tchi_kfac_factor_batch_of(k, c, TCHI_INPUT);
        const tchi_kfac_factor_batch *g = tchi_kfac_factor_batch_of(k, c, TCHI_OUTPUT);
        tch_matrices cols = tchi_kfac_values(k, a, c->position[TCHI_INPUT], c->count);
        tch_matrices rows = tchi_kfac_values(k, g, c->position[TCHI_OUTPUT], c->count);
        tch_matrices column = {rows.data, rows.type, g->n, 1, 1, c->count, g->n};
        tch_matrices scales = tchi_matrices_new(c->scales, k->type, c->count, g->n, a->n);
        TCHI_TRY(k->context->backend->matrix->kronecker(k->context->state, &column, &cols, &scales));
    }
    for (int32_t i = 0; i < k->count; i++) {
        tchi_kfac_counts(k, i)[TCHI_SCALE_UPDATES] = 0;
    }
    return TCH_OK;
}

tch_status tch_kfac_refresh(tch_kfac *kfac)
{
    TCHI_TRY(tchi_kfac_usable(kfac, "tch_kfac_refresh"));
    TCHI_ENTER(kfac->context, "tch_kfac_refresh");
    tch_status status = refresh_factor_batches(kfac);
    if (kfac->comm != NULL && kfac->config.method == TCH_KFAC_EKFAC && status == TCH_OK) {
        status = share_bases(kfac);
    }
    if (kfac->config.method == TCH_KFAC_EKFAC) { /* also if memory ran out halfway: some bases are new */
        tch_status scales = start_scales(kfac);
        status = status == TCH_OK ? scales : status;
    }
    for (int32_t i = 0; i < kfac->count && status == TCH_OK; i++) {
        int64_t *counts = tchi_kfac_counts(kfac, i);
        counts[TCHI_REFRESHES] += counts[TCHI_UPDATES] > 0;
    }
    return tchi_kfac_note(kfac, status);
}

#include "candidate.h"

#include "core/status.h"

#define MOST_CANDIDATES 2

void tchi_candidate_layout(tchi_candidate *c, tchi_arena *arena, const tch_tensor *target, tch_scalar type,
                           bool is_gram)
{
    c->target = tchi_batch_of(target, 2);
    c->sum = tchi_scratch_matrices(arena, type, c->target.count, c->target.rows, c->target.cols);
    c->before = tchi_batch_place(&c->target, arena, type, 0, c->target.count, &c->in_place);
    c->is_gram = is_gram;
}

/* All matrices of a contiguous batch as one. */
static tch_matrices as_one(const tch_matrices *m)
{
    return tchi_matrices_new(m->data, m->type, 1, m->batch * m->rows, m->cols);
}

tch_status tchi_candidate_divide(tch_context *context, const tchi_candidate *c, const double *divisor)
{
    tch_matrices sum = as_one(&c->sum);
    return context->backend->matrix->shift_scale(context->state, &sum, NULL, divisor, -2.0, &sum);
}

void tchi_verdict_layout(tchi_verdict *verdict, tchi_arena *arena, int64_t matrices)
{
    tchi_inspection_layout(&verdict->of, arena, MOST_CANDIDATES);
    verdict->flags = tchi_arena_take(arena, matrices * (int64_t)sizeof *verdict->flags);
}

/* Counts elements of a sum that are not finite. Of a sum of outer products only the diagonal is read, n numbers instead
 * of n^2: products are bounded by the larger of the two squares. */
static tch_status count_nonfinite(tch_context *context, const tchi_candidate *c, double *bad)
{
    bool few = c->is_gram && c->sum.batch == 1;
    tch_matrices diagonal = {c->sum.data, c->sum.type, c->sum.rows, 1, c->sum.ld + 1, 1, 0};
    tch_matrices looked_at = few ? diagonal : as_one(&c->sum);
    return context->backend->matrix->reduce(context->state, TCH_REDUCE_NONFINITE, &looked_at, bad);
}

/* A flag per candidate. */
static tch_status flag_candidates(tch_context *context, tchi_verdict *v, tchi_candidate *const *candidates,
                                  int32_t count)
{
    const tch_backend *t = context->backend;
    const double *none = v->of.max_abs;
    TCHI_TRY(t->device->zero_bytes(context->state, v->of.max_abs, count * (int64_t)sizeof(double)));
    for (int32_t i = 0; i < count; i++) {
        TCHI_TRY(count_nonfinite(context, candidates[i], v->of.nonfinite + i));
    }
    tch_root_norms norms = {none, none, v->of.nonfinite, none};
    return t->matrix->root_setup(context->state, count, &norms, 1.0, 0.0, 1.0, 1.0, v->of.damping, v->of.bound,
                                 v->of.flags);
}

static tch_status add_previous(tch_context *context, const tchi_candidate *c, double beta)
{
    if (beta == 0.0) {
        return TCH_OK;
    }
    if (!c->in_place) {
        TCHI_TRY(tchi_batch_read(context, &c->target, 0, &c->before));
    }
    return context->backend->matrix->combine(context->state, 0.0, 1.0, &c->sum, beta, &c->before, &c->sum);
}

/* The flag, repeated for every matrix. */
static tch_status keep_candidate(tch_context *context, const tchi_verdict *v, const tchi_candidate *c)
{
    bool single = c->target.count == 1;
    const int64_t repeat = 0;
    const int64_t step = 1;
    const tch_array one = {v->of.flags, TCH_SCALAR_I32, 1, &c->target.count, &repeat};
    const tch_array all = {v->flags, TCH_SCALAR_I32, 1, &c->target.count, &step};
    TCHI_TRY(single ? TCH_OK : context->backend->matrix->copy(context->state, &all, &one));
    return tchi_batch_select(context, &c->target, 0, single ? v->of.flags : v->flags, &c->sum, &c->before);
}

tch_status tchi_candidates_keep(tch_context *context, tchi_verdict *verdict, tchi_candidate *const *candidates,
                                int32_t count, double beta, int32_t *rejected)
{
    TCHI_TRY(flag_candidates(context, verdict, candidates, count));
    if (count == MOST_CANDIDATES) { /* the second flag replaces a first one that is finite */
        tch_matrices first = tchi_matrices_new(verdict->of.flags, TCH_SCALAR_I32, 1, 1, 1);
        tch_matrices second = tchi_matrices_new(verdict->of.flags + 1, TCH_SCALAR_I32, 1, 1, 1);
        TCHI_TRY(context->backend->matrix->select(context->state, verdict->of.flags, &second, &first));
    }
    for (int32_t i = 0; i < count; i++) {
        TCHI_TRY(add_previous(context, candidates[i], beta));
        TCHI_TRY(keep_candidate(context, verdict, candidates[i]));
    }
    return rejected == NULL ? TCH_OK
                            : context->backend->device->copy_bytes(context->state, rejected, verdict->of.flags,
                                                                   (int64_t)sizeof *rejected, TCH_COPY_DEVICE);
}

#include "refresh.h"

#include <math.h>
#include <string.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/algebra.h"

#include "create.h"
#include "method.h"
#include "tensor_modes.h"

/* --- schedule ---------------------------------------------------------------------------------------------------- */

#define MOST_PERIOD 4096 /* longer intervals are planned in this many parts of equal length */

static int32_t parts_of(int32_t period)
{
    return period < MOST_PERIOD ? period : MOST_PERIOD;
}

/* Returns the next factor batch in order of decreasing cost of one factor, so that small factors fill the gaps. */
static int32_t next_factor_batch(const tch_optimizer *o, const tchi_group *group, int64_t below, int32_t after)
{
    int32_t best = -1;
    for (int32_t i = group->first_factor_batch; i < group->first_factor_batch + group->factor_batches; i++) {
        int64_t n = tchi_factor_batch_at(o, i)->n;
        bool left = n < below || (n == below && i > after);
        if (left && (best < 0 || n > tchi_factor_batch_at(o, best)->n)) {
            best = i;
        }
    }
    return best;
}

static double cost_of(const tchi_factor_batch *f)
{
    return (double)f->n * (double)f->n * (double)f->n;
}

static int32_t lightest(const double *load, int32_t parts)
{
    int32_t best = 0;
    for (int32_t i = 1; i < parts; i++) {
        best = load[i] < load[best] ? i : best;
    }
    return best;
}

/* Counts the factors of each part. The part with the least load receives as many as fit into an equal share of the
 * total, and at least one. A part thus has few sizes and many factors of each, which batches better, and loads differ
 * by at most one factor. */
static void count_parts(const tchi_factor_batch *f, double share, double *load, int32_t parts, int64_t *counts)
{
    double cost = cost_of(f);
    for (int64_t left = f->all; left > 0;) {
        int32_t part = lightest(load, parts);
        double room = floor((share - load[part]) / cost);
        int64_t here = room < 1.0 ? 1 : room < (double)left ? (int64_t)room : left;
        counts[part] += here;
        load[part] += cost * (double)here;
        left -= here;
    }
}

/* The factors of one part are contiguous in one process, so that a refresh is one batched call. */
static void spread(tchi_factor_batch *f, double share, double *load, int32_t parts)
{
    int64_t ends[MOST_PERIOD] = {0};
    count_parts(f, share, load, parts, ends);
    for (int32_t i = 1; i < parts; i++) {
        ends[i] += ends[i - 1];
    }
    for (int64_t k = 0; k < f->count; k++) {
        f->phase[k] = 0;
        while (f->alone_index[k] >= ends[f->phase[k]]) {
            f->phase[k]++;
        }
    }
}

/* Assigns every factor of the group a step of the interval, balancing cost. */
static void plan_refreshes(tch_optimizer *optimizer, int32_t group, int32_t period)
{
    const double rounding = 1.0 + 1e-9; /* the sum is rounded; without slack a factor that fits would be left out */
    double load[MOST_PERIOD] = {0.0};
    double all = 0.0;
    const tchi_group *g = tchi_group_at(optimizer, group);
    int32_t parts = parts_of(period);
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        all += cost_of(f) * (double)f->all;
    }
    int64_t below = INT64_MAX;
    for (int32_t i = next_factor_batch(optimizer, g, below, -1); i >= 0;
         i = next_factor_batch(optimizer, g, below, i)) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        below = f->n;
        f->phases = period;
        spread(f, rounding * all / parts, load, parts);
    }
}

/* --- factors to refresh ------------------------------------------------------------------------------------------ */

int64_t tchi_refresh_first(const tch_optim_config *config)
{
    return config->shampoo.start_preconditioning_step > 1 ? config->shampoo.start_preconditioning_step : 1;
}

bool tchi_refresh_by_norm(const tch_optimizer *optimizer, const tch_optim_config *config)
{
    return config->shampoo.refresh_drift > 0.0 && optimizer->method->blocks->refreshes_by_norm > 0;
}

bool tchi_refresh_by_drift(const tch_optimizer *optimizer, const tch_optim_config *config)
{
    return config->shampoo.refresh_drift > 0.0 && optimizer->method->blocks->refreshes_by_norm == 0;
}

/* The norms are stored with the factors of the first dimension that has any. */
double *tchi_refresh_norms(tch_optimizer *optimizer, const tchi_run *run)
{
    const tchi_block_batch *block_batch = run->block_batch;
    int32_t k = 0;
    while (k < block_batch->order && block_batch->factor_batch[k] < 0) {
        k++;
    }
    if (k == block_batch->order ||
        !tchi_refresh_by_norm(optimizer, &tchi_group_at(optimizer, block_batch->group)->config)) {
        return optimizer->norms;
    }
    tchi_factor_batch *f = tchi_factor_batch_of(optimizer, block_batch, k);
    int64_t first = block_batch->position[k] + run->first;
    for (int64_t i = first; i < first + run->count; i++) {
        f->unread[i] |= TCHI_UNREAD_NORM;
    }
    return f->drift + first;
}

/* ceil(log2(number)), at least 0. */
static int32_t exponent_of(double number)
{
    int32_t exponent = 0;
    while (ldexp(1.0, exponent) < number) {
        exponent++;
    }
    return exponent;
}

/* Doubling the interval multiplies the drift by 1.3 to 3, so an interval that keeps the drift between half the limit
 * and the limit usually exists; at worst a factor alternates between two. Powers of two keep the number of distinct
 * batches, and so of recordings, small. */
uint8_t tchi_refresh_next_gap(const tch_optim_config *config, uint8_t gap, double drift)
{
    int32_t most = exponent_of(config->shampoo.precondition_frequency);
    int32_t next = gap + (drift < 0.5 * config->shampoo.refresh_drift) - (drift > config->shampoo.refresh_drift);
    next = next < 0 ? 0 : next;
    return (uint8_t)(next < most ? next : most);
}

/* The largest power of two that is at most a part of the steps since the first refresh: factors of few gradients lack
 * directions that the next ones have, which norms show too late. */
static int32_t early_interval(int64_t steps, int32_t parts)
{
    int32_t interval = 1;
    while (interval < 1 << 30 && 2 * (int64_t)interval * parts <= steps) {
        interval *= 2;
    }
    return interval;
}

int32_t tchi_refresh_interval(const tch_optimizer *optimizer, const tchi_factor_batch *factor_batch, int64_t factor)
{
    const tch_optim_config *config = &tchi_group_at(optimizer, factor_batch->group)->config;
    int32_t most = config->shampoo.precondition_frequency;
    int32_t interval = most;
    if (tchi_refresh_by_norm(optimizer, config)) {
        const tchi_block_batch *block_batch = tchi_block_batch_at(optimizer, factor_batch->block_batch[factor]);
        const tchi_block *block = tchi_block_at(optimizer, block_batch->first + factor_batch->block[factor]);
        int64_t seen = tchi_block_param(optimizer, block)->steps_seen;
        interval = early_interval(seen - optimizer->method->blocks->begins(config),
                                  optimizer->method->blocks->refreshes_by_norm);
    } else if (tchi_refresh_by_drift(optimizer, config) && factor_batch->gap[factor] < exponent_of(most)) {
        interval = 1 << factor_batch->gap[factor];
    }
    return interval < most ? interval : most;
}

static bool needs_refresh(const tch_optimizer *o, const tchi_step *now, const tch_optim_config *config,
                          const tchi_factor_batch *f, int64_t factor)
{
    const tchi_block_batch *block_batch = tchi_block_batch_at(o, f->block_batch[factor]);
    const tchi_param *p = tchi_block_param(o, tchi_block_at(o, block_batch->first + f->block[factor]));
    int64_t first = o->method->blocks->begins(config);
    int32_t gap = tchi_refresh_interval(o, f, factor);
    if (tchi_gradient_of(o, now, p)->data == NULL || p->steps_seen < first) {
        return false;
    }
    if (p->steps_seen == first || f->stale[factor]) {
        return true;
    }
    if (!config->shampoo.stagger) {
        return (p->steps_seen - first) % gap == 0;
    }
    return o->steps % gap == (int64_t)f->phase[factor] * gap / parts_of(config->shampoo.precondition_frequency);
}

tch_status tchi_refresh_mark(tch_optimizer *optimizer, const tchi_step *now, int32_t group, bool *any)
{
    const tchi_group *g = tchi_group_at(optimizer, group);
    *any = false;
    if (tchi_refresh_by_norm(optimizer, &g->config)) {
        TCHI_TRY(tchi_outcomes_settle(optimizer));
    }
    for (int32_t i = g->first_factor_batch; i < g->first_factor_batch + g->factor_batches; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, i);
        if (f->phases != g->config.shampoo.precondition_frequency) {
            plan_refreshes(optimizer, group, g->config.shampoo.precondition_frequency);
        }
        for (int64_t k = 0; k < f->count; k++) {
            f->refresh[k] = needs_refresh(optimizer, now, &g->config, f, k);
            f->refreshed[k] = f->refresh[k] ? optimizer->steps + 1 : f->refreshed[k];
            f->stale[k] = f->stale[k] && !f->refresh[k];
            *any = *any || f->refresh[k];
        }
    }
    return TCH_OK;
}

bool tchi_run_needs_refresh(const tch_optimizer *optimizer, const tchi_run *run)
{
    const tchi_block_batch *block_batch = run->block_batch;
    for (int32_t k = 0; k < block_batch->order; k++) {
        const tchi_factor_batch *f = tchi_factor_batch_of(optimizer, block_batch, k);
        for (int64_t b = run->first; f != NULL && b < run->first + run->count; b++) {
            if (f->refresh[block_batch->position[k] + b]) {
                return true;
            }
        }
    }
    return false;
}

/* --- roots ------------------------------------------------------------------------------------------------------- */

int64_t tchi_workspace_hold(const tch_optimizer *optimizer)
{
    tch_context *context = optimizer->context;
    int64_t before = context->workspace_limit;
    int64_t mine = tchi_layout_budget(optimizer) - optimizer->work_bytes;
    mine = mine > optimizer->least_workspace ? mine : optimizer->least_workspace;
    if (mine > 0 && (before == 0 || mine < before)) {
        context->workspace_limit = mine;
    }
    return before;
}

void tchi_workspace_restore(const tch_optimizer *optimizer, int64_t before)
{
    optimizer->context->workspace_limit = before;
}

/* A float32 factor that accumulated T gradients has T rounding errors: its small eigenvalues are off by about u sqrt(T)
 * of the largest, and some are negative. Smaller damping would give roots of rounding error. T is rounded up to a power
 * of two because the value is part of a recording's key. */
static double relative_damping(const tch_optimizer *o, const tch_optim_config *config, const tchi_factor_batch *f)
{
    double unit = f->real == TCH_SCALAR_F64 ? 0x1p-53 : 0x1p-24;
    double added = (double)(o->steps + 1);
    double memory = config->beta2 < 1.0 ? 1.0 / (1.0 - config->beta2) : added;
    double rounding = 2.0 * unit * sqrt(exp2(ceil(log2(fmin(added, memory)))));
    return config->numerics.damping > 0.0 ? fmax(config->numerics.damping, rounding) : 0.0;
}

/* A root fails because of rounding, either in the iteration or in the factor. On a GPU this tolerance selects float64
 * for the iteration; more damping covers the factor. If that fails too, the eigen method is used, which takes several
 * times as long and synchronizes. */
#define MORE_DAMPING 10.0
#define TIGHTER 1e-5

tch_root_config tchi_refresh_how(const tch_optim_config *config, const tchi_factor_batch *f, double relative_eps,
                                 int failures)
{
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    how.eps = config->eps;
    how.relative_eps = relative_eps;
    how.tolerance = config->numerics.tolerance;
    how.method = config->numerics.method;
    if (failures > 0) {
        bool loose = how.tolerance > TIGHTER || (how.tolerance == 0.0 && f->real == TCH_SCALAR_F32);
        how.relative_eps *= MORE_DAMPING;
        how.tolerance = loose ? TIGHTER : how.tolerance;
        how.method = failures > 1 ? TCH_ROOT_EIGEN : how.method;
    }
    return how;
}

/* Factors of a factor batch by index, ascending, all to be refreshed, with equal failure counts. */
typedef struct root_run {
    tch_optimizer *optimizer;
    tchi_factor_batch *factor_batch;
    const int64_t *picked;
    int64_t count;
    tch_root_config how;
} root_run;

static bool is_contiguous(const int64_t *picked, int64_t count)
{
    return picked[count - 1] - picked[0] == count - 1;
}

static tch_tensor tensor_of(const tch_optimizer *o, const tch_matrices *m, int64_t shape[3])
{
    tch_tensor t = tch_tensor_view(m->data, tchi_dtype_of(m->type), 3, shape);
    t.device = tch_context_device(o->context);
    return t;
}

/* Factors that are not contiguous are picked from all. */
static tch_status compute_part(const root_run *r, const int64_t *picked, int64_t count)
{
    tch_optimizer *o = r->optimizer;
    const tchi_factor_batch *f = r->factor_batch;
    bool contiguous = is_contiguous(picked, count);
    int64_t first = contiguous ? picked[0] : 0;
    int64_t shape[3] = {contiguous ? count : f->count, f->n, f->n};
    tch_matrices factors;
    tch_matrices roots;
    TCHI_TRY(tchi_matrices_open(o, f, TCHI_FACTORS, first, shape[0], o->unpacked, &factors));
    TCHI_TRY(tchi_matrices_open(o, f, TCHI_ROOTS, first, shape[0], o->unpacked + o->unpacked_bytes / 2, &roots));
    tch_tensor a = tensor_of(o, &factors, shape);
    tch_tensor x = tensor_of(o, &roots, shape);
    tch_tensor residuals = tch_tensor_view(f->residuals + first, TCH_FLOAT64, 1, shape);
    tch_tensor report = tch_tensor_view(f->flags + first, TCH_INT32, 1, shape);
    residuals.device = report.device = a.device;
    TCHI_TRY(tchi_inverse_root_of(o->context, &a, contiguous ? NULL : picked, count, f->root, &r->how, &x, &residuals,
                                  &report));
    return tchi_matrices_close(o, f, TCHI_ROOTS, first, &roots);
}

static tch_status compute_roots(void *argument)
{
    const root_run *r = argument;
    int64_t together = tchi_unpacked_fit(r->optimizer, r->factor_batch, r->count);
    for (int64_t done = 0; done < r->count; done += together) {
        TCHI_TRY(compute_part(r, r->picked + done, tchi_min(together, r->count - done)));
    }
    return TCH_OK;
}

/* The eigen method synchronizes, and so does damping by eps alone: neither can be recorded. Refresh by norm rarely
 * selects the same subset twice. The first part of the key is negative, which distinguishes it from the keys of
 * runs. */
static tch_status take_roots(tch_optimizer *o, tchi_factor_batch *f, const int64_t *picked, int64_t count)
{
    const tch_optim_config *config = &tchi_group_at(o, f->group)->config;
    root_run r = {.optimizer = o, .factor_batch = f, .picked = picked, .count = count};
    r.how = tchi_refresh_how(config, f, relative_damping(o, config, f), f->failures[picked[0]]);
    tchi_recording_key key = {{-1 - (f - tchi_factor_batch_at(o, 0)), picked[0], count, (int64_t)r.how.method,
                               tchi_recording_number(r.how.eps), tchi_recording_number(r.how.relative_eps),
                               tchi_recording_number(r.how.tolerance)}};
    bool repeats = is_contiguous(picked, count) && (count == f->count || !tchi_refresh_by_norm(o, config));
    bool may = repeats && r.how.method != TCH_ROOT_EIGEN && r.how.relative_eps > 0.0;
    o->refreshes += count;
    return may ? tchi_recorded(o->context, &o->recordings, &key, compute_roots, &r) : compute_roots(&r);
}

/* Of factors [first, last), all that are due and have failed equally often, in one call; packed ones only with their
 * neighbors, and one by one where results must not depend on their number. */
static tch_status refresh_factors(tch_optimizer *o, tchi_factor_batch *f, int64_t first, int64_t last)
{
    bool alone = tchi_group_at(o, f->group)->config.numerics.world_invariant;
    bool adjacent = alone || tchi_is_packed(f, TCHI_FACTORS) || tchi_is_packed(f, TCHI_ROOTS);
    for (int failures = 0; failures <= TCHI_MOST_FAILURES; failures++) {
        int64_t count = 0;
        for (int64_t k = first; k < last; k++) {
            if (!f->refresh[k] || f->failures[k] != failures) {
                continue;
            }
            if (count > 0 && (alone || (adjacent && f->picked[count - 1] != k - 1))) {
                TCHI_TRY(take_roots(o, f, f->picked, count));
                count = 0;
            }
            f->picked[count++] = k;
        }
        if (count > 0) {
            TCHI_TRY(take_roots(o, f, f->picked, count));
        }
    }
    return TCH_OK;
}

tch_status tchi_refresh_roots(tch_optimizer *optimizer, int32_t group)
{
    TCHI_RANGE(optimizer->context, "refresh");
    const tchi_group *g = tchi_group_at(optimizer, group);
    tch_status status = tchi_outcomes_note(optimizer, group);
    int64_t before = tchi_workspace_hold(optimizer);
    for (int32_t i = 0; i < g->factor_batches && status == TCH_OK; i++) {
        tchi_factor_batch *f = tchi_factor_batch_at(optimizer, g->first_factor_batch + i);
        status = refresh_factors(optimizer, f, 0, f->count);
    }
    tchi_workspace_restore(optimizer, before);
    return status;
}

tch_status tchi_refresh_run_roots(tch_optimizer *optimizer, const tchi_run *run, int32_t k)
{
    tchi_factor_batch *f = tchi_factor_batch_of(optimizer, run->block_batch, k);
    if (f == NULL) {
        return TCH_OK;
    }
    TCHI_RANGE(optimizer->context, "refresh");
    int64_t first = run->block_batch->position[k] + run->first;
    int64_t before = tchi_workspace_hold(optimizer);
    tch_status status = refresh_factors(optimizer, f, first, first + run->count);
    tchi_workspace_restore(optimizer, before);
    return status;
}

/* KL-Shampoo (Lin and others, 2025, arXiv 2509.03378): Shampoo whose factors are the Kronecker product closest to the
 * gradients' covariance in Kullback-Leibler divergence. Each factor sees the gradient whitened along all other
 * dimensions.
 *
 *     U_k = G x_j X_j for all j other than k
 *     C_k <- weight U_k U_k' / (elements / n_k) + weight' C_k     every step, every dimension k
 *     X_k <- (C_k + damping I)^(-1/2)                             in refresh steps
 *     P   <- F x_1 X_1 x_2 X_2 ...                                F the filtered gradient
 *     P   <- P min(1, 1 / rms(P))
 *
 * P is white where the roots fit the gradients, whatever their scale: there is no grafting and no second moment. The
 * clip bounds a step along directions that the roots have not seen yet.
 *
 * Roots begin as the identity, and in refresh steps each factor sees the new roots of the dimensions before it: the
 * scale of the gradients must enter one factor only. For the same reason the root of a factor of zeros stays the
 * identity (eps is 0): the gradients of a layer below a zero-initialized head begin as zeros. */
#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "method.h"
#include "rects.h"
#include "refresh.h"
#include "shape.h"
#include "shared/shared.h"
#include "tensor_modes.h"

/* --- options, blocks and state ----------------------------------------------------------------------------------- */

static void set_defaults(tch_optim_config *c)
{
    c->lr = 3e-3;
    c->beta1 = 0.9;
    c->beta2 = 0.95;
    c->shampoo.exponent_override = 2;
    c->shampoo.precondition_frequency = 100;
    c->shampoo.refresh_drift = 1.5;
    c->shampoo.merge_dims = 1;
}

static tch_status check_kl_shampoo(const char *function, const tch_optim_config *config)
{
    if (config->eps == 0.0 && config->numerics.damping == 0.0) {
        return tchi_config_refuse(function, "eps", 0.0,
                                  "above 0 where numerics.damping is 0, since factors begin singular");
    }
    return config->shampoo.exponent_override == 2
               ? TCH_OK
               : tchi_config_refuse(function, "shampoo.exponent_override", config->shampoo.exponent_override,
                                    "2 for KL-Shampoo, whose factors hold for that root");
}

static tch_status check_change(const tch_optim_config *now, const tch_optim_config *next)
{
    return tchi_config_check_kept("beta1", now->beta1, next->beta1);
}

static void name_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = config->beta1 != 0.0 ? "exp_avg" : NULL;
}

static int32_t square_root(const tch_optim_config *config, int32_t order)
{
    return config->shampoo.exponent_override;
}

static tchi_clock_rule clock_rule(const tch_optim_config *c)
{
    return (tchi_clock_rule){c->use_bias_correction, c->use_bias_correction ? TCH_FACTOR_CORRECTED : TCH_FACTOR_EMA};
}

static int64_t first_roots(const tch_optim_config *config)
{
    return 1;
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

enum { BUFFERS = 4 }; /* gradient, filtered gradient, two for products */

static int count_buffers(const tchi_block_batch *block_batch)
{
    return block_batch->order > 2 ? BUFFERS : BUFFERS - 1;
}

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    return count_buffers(block_batch) * tchi_work_bytes(&work, 1);
}

typedef struct kl_run {
    tch_optimizer *optimizer;
    const tch_optim_config *config;
    tchi_run run;
    tchi_work work;
    void *buffer[BUFFERS];          /* of three, the last two are the same */
    tch_blocks gradient, direction; /* G and F; the same if beta1 is 0 */
    bool factors_done;              /* updated before their roots were refreshed */
    double *norms;                  /* of the directions */
} kl_run;

static kl_run begin_run(tch_optimizer *o, const tchi_run *run)
{
    const tch_optim_config *config = &tchi_group_at(o, run->block_batch->group)->config;
    kl_run r = {.optimizer = o, .config = config, .run = *run, .factors_done = tchi_run_needs_refresh(o, run)};
    r.work = tchi_work_of(run->block_batch, run->block_batch->real);
    int64_t bytes = tchi_work_bytes(&r.work, run->count);
    int last = count_buffers(run->block_batch) - 1;
    for (int k = 0; k < BUFFERS; k++) {
        r.buffer[k] = o->scratch + (k < last ? k : last) * bytes;
    }
    return r;
}

/* Either buffer may be NULL. */
static tch_status gather_into(kl_run *r, tch_filter filter, void *gradient, void *filtered)
{
    TCHI_RANGE(r->optimizer->context, "gather gradients");
    const tch_gathering rules = {
        .filter = filter,
        .l2 = tchi_adds_decay(r->config) && !r->run.block_batch->prepared,
    };
    void *const buffers[2] = {gradient, filtered};
    return tchi_run_gather(r->optimizer, &r->run, &r->work, &rules, true, buffers, &r->gradient, &r->direction);
}

static tch_status update_factor(const kl_run *r, int32_t k)
{
    TCHI_RANGE(r->optimizer->context, "factors");
    return tchi_run_update_whitened_factor(r->optimizer, &r->run, k, &r->gradient, r->buffer + 2,
                                           tchi_run_param(r->optimizer, &r->run)->clock);
}

/* --- factors and roots ------------------------------------------------------------------------------------------- */

static tch_status refresh_run(tch_optimizer *o, const tchi_run *run)
{
    if (!tchi_run_needs_refresh(o, run)) {
        return TCH_OK;
    }
    kl_run r = begin_run(o, run);
    TCHI_TRY(gather_into(&r, TCH_FILTER_NONE, r.buffer[0], NULL));
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        TCHI_TRY(update_factor(&r, k));
        TCHI_TRY(tchi_refresh_run_roots(o, run, k));
    }
    return TCH_OK;
}

/* --- direction and step ------------------------------------------------------------------------------------------ */

static tch_status apply_run(const kl_run *r, const tch_blocks *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    const tch_backend *t = o->context->backend;
    tch_array targets = {o->target_norms, TCH_SCALAR_F64, 1, &r->run.count, &(int64_t){1}};
    TCHI_TRY(t->matrix->fill(o->context->state, &targets, (double)r->run.block_batch->elements));
    tch_update update = tchi_update_run(o, &r->run, &r->work, direction->matrices.data, NULL);
    return t->update->apply(o->context->state, &update, TCH_BLOCK_CLIP_RMS, o->target_norms, r->norms, 0,
                            (tch_decay)r->config->weight_decay_type);
}

/* Everything that does not read gradients from their original memory: its arguments do not change, so it can be
 * recorded. */
static tch_status finish_run(void *argument)
{
    const kl_run *r = argument;
    tch_optimizer *o = r->optimizer;
    for (int32_t k = 0; k < r->run.block_batch->order && !r->factors_done; k++) {
        TCHI_TRY(update_factor(r, k));
    }
    TCHI_RANGE(o->context, "precondition");
    void *other = r->buffer[2];
    tch_blocks direction = r->direction;
    TCHI_TRY(tchi_run_precondition(o, &r->run, TCH_SIDES_ROOTS, &direction, &other, r->norms));
    return apply_run(r, &direction);
}

static tch_status step_run(tch_optimizer *o, const tchi_run *run)
{
    kl_run r = begin_run(o, run);
    bool filters = r.config->beta1 != 0.0;
    r.norms = tchi_refresh_norms(o, run);
    TCHI_TRY(gather_into(&r, filters ? TCH_FILTER_EMA : TCH_FILTER_NONE, r.factors_done && filters ? NULL : r.buffer[0],
                         filters ? r.buffer[1] : NULL));
    int64_t variant = 8 * (int64_t)r.direction.matrices.type + 4 * (r.norms != o->norms) + 2 * filters + r.factors_done;
    tchi_recording_key key = tchi_run_key(o, run, variant);
    return tchi_recorded(o->context, &o->recordings, &key, finish_run, &r);
}

static tch_status step_kl_shampoo(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    bool refreshes;
    TCHI_TRY(tchi_refresh_mark(o, now, group, &refreshes));
    TCHI_TRY(tchi_exchange_arrive(o, now, group, TCHI_ALL_BUCKETS));
    if (refreshes) {
        TCHI_TRY(tchi_outcomes_note(o, group));
        TCHI_TRY(tchi_for_each_run(o, now, group, false, refresh_run));
    }
    TCHI_TRY(tchi_for_each_run(o, now, group, true, step_run));
    return tchi_outcomes_ask(o, group);
}

static const tchi_block_method kl_shampoo_blocks = {
    .has_blocks = tchi_shampoo_has_blocks,
    .cut_at = tchi_shampoo_largest_side,
    .moments = name_moments,
    .has_factor = tchi_shampoo_has_factor,
    .root = square_root,
    .refreshes_by_norm = 50, /* stale roots enter the factors too */
    .clock_rule = clock_rule,
    .begins = first_roots,
    .work = work_bytes,
    .step = step_kl_shampoo,
};

const tchi_optim_method tchi_method_kl_shampoo = {
    .name = "kl_shampoo",
    .set_defaults = set_defaults,
    .check = check_kl_shampoo,
    .check_change = check_change,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &kl_shampoo_blocks,
};

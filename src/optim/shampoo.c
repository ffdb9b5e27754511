/* Shampoo: every dimension of a block has a factor, the running sum or average of its gradients' Gram matrices; the
 * gradient is multiplied by an inverse root of each.
 *
 *     C_k <- weight C_k + weight' G_(k) G_(k)'          every step, every dimension k
 *     X_k <- (C_k + damping I)^(-1/2)                   in refresh steps; in the paper the power is -1 / (2 order)
 *     P   <- F x_1 X_1 x_2 X_2 ...                      F the filtered gradient
 *     P   <- P |D| / |P|                                D the direction of the grafted method
 *
 * The order matters: roots are computed from factors that include this step's gradient, and all blocks of a block batch
 * share its work buffers. So only blocks whose roots are refreshed in a step take a second pass over their
 * gradients. */
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

/* Unlike in the paper, factors are averages, which forget early gradients; the power is -1/2, which trains to lower
 * losses (docs/optimizers.md); damping is relative (this eps only keeps a factor of zeros nonsingular); and grafting
 * onto Adam lets its learning rates carry over. */
static void set_shampoo_defaults(tch_optim_config *c)
{
    c->lr = 3e-3;
    c->beta1 = 0.9;
    c->beta2 = 0.95;
    c->eps = 1e-12;
    c->shampoo.grafting = TCH_GRAFTING_ADAM;
    c->shampoo.precondition_frequency = 100;
    c->shampoo.refresh_drift = 1.5;
    c->shampoo.exponent_override = 2;
    c->shampoo.merge_dims = 1;
}

static tch_status check_shampoo(const char *function, const tch_optim_config *config)
{
    if (config->eps == 0.0 && config->numerics.damping == 0.0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: eps and relative_eps are both 0, expected some damping: the factors begin singular",
                         function);
    }
    return TCH_OK;
}

static tch_status check_shampoo_change(const tch_optim_config *now, const tch_optim_config *next)
{
    TCHI_TRY(tchi_config_check_kept("momentum", now->momentum, next->momentum));
    return tchi_config_check_kept("beta1", now->beta1, next->beta1);
}

bool tchi_shampoo_has_blocks(const tch_optim_config *config, const tchi_dims *dims)
{
    return dims->order >= 2 || (dims->order == 1 && dims->size[0] > 1 && config->shampoo.precondition_1d);
}

int64_t tchi_shampoo_largest_side(const tch_optim_config *config)
{
    return config->shampoo.max_preconditioner_dim;
}

static void name_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = config->beta1 != 0.0 ? "exp_avg" : NULL;
    names[1] = config->shampoo.grafting >= TCH_GRAFTING_ADAGRAD ? "grafting_sq" : NULL;
    names[2] = config->momentum != 0.0 ? "momentum_buffer" : NULL;
}

bool tchi_shampoo_has_factor(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k)
{
    return !tchi_is_thin_side(order, size, k);
}

static int32_t root_of(const tch_optim_config *config, int32_t order)
{
    return config->shampoo.exponent_override > 0 ? config->shampoo.exponent_override : 2 * order;
}

static tchi_clock_rule clock_rule(const tch_optim_config *c)
{
    tch_factor_rule average = c->use_bias_correction ? TCH_FACTOR_CORRECTED : TCH_FACTOR_EMA;
    return (tchi_clock_rule){c->use_bias_correction, c->beta2 >= 1.0 ? TCH_FACTOR_SUM : average};
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

/* Gradient and filtered gradient, or gradient and product; a third if a dimension is neither first nor last. */
static int count_buffers(const tchi_block_batch *block_batch)
{
    return tchi_block_batch_has_middle(block_batch) ? 3 : 2;
}

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    return count_buffers(block_batch) * tchi_work_bytes(&work, 1);
}

typedef struct shampoo_run {
    tch_optimizer *optimizer;
    const tch_optim_config *config;
    tchi_run run;
    tchi_work work;
    void *buffer[3];                /* of two, the last two are the same */
    tch_blocks gradient, direction; /* G, and F or D; the same if beta1 is 0 */
    bool factors_done;              /* updated before their roots were refreshed */
    bool has_roots;                 /* the direction is P, not D */
    double *norms;                  /* of P; NULL: not needed */
} shampoo_run;

static shampoo_run begin_run(tch_optimizer *o, const tchi_run *run)
{
    const tch_optim_config *config = &tchi_group_at(o, run->block_batch->group)->config;
    shampoo_run r = {.optimizer = o, .config = config, .run = *run, .factors_done = tchi_run_needs_refresh(o, run)};
    r.work = tchi_work_of(run->block_batch, run->block_batch->real);
    r.has_roots = tchi_run_param(o, run)->steps_seen >= tchi_refresh_first(config);
    int64_t bytes = tchi_work_bytes(&r.work, run->count);
    for (int k = 0; k < 3; k++) {
        r.buffer[k] = o->scratch + (k < count_buffers(run->block_batch) ? k : 1) * bytes;
    }
    return r;
}

/* Either buffer may be NULL. `products`: only the factors and their roots will read the blocks. */
static tch_status gather_into(shampoo_run *r, tch_filter filter, tch_graft graft, bool products, void *gradient,
                              void *filtered)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    const tch_gathering rules = {
        .filter = filter,
        .l2 = tchi_adds_decay(r->config) && !r->run.block_batch->prepared,
        .graft = graft,
        .norms = products ? o->target_norms : NULL,
        .scratch = o->graft_scratch,
    };
    void *const buffers[2] = {gradient, filtered};
    return tchi_run_gather(o, &r->run, &r->work, &rules, products, buffers, &r->gradient, &r->direction);
}

/* Gathers the gradients and F, or D if there are no roots. D overwrites F; if F is the gradient, which the factors
 * still need, D is computed in a copy. */
static tch_status gather_run(shampoo_run *r)
{
    const tch_optim_config *c = r->config;
    bool filters = c->beta1 != 0.0;
    tch_filter filter = filters ? TCH_FILTER_EMA : TCH_FILTER_NONE;
    tch_graft graft = (tch_graft)c->shampoo.grafting;
    if (r->has_roots) {
        bool unread = r->factors_done && filters;
        return gather_into(r, filter, graft, true, unread ? NULL : r->buffer[0], filters ? r->buffer[1] : NULL);
    }
    graft = graft == TCH_GRAFT_SGD ? TCH_GRAFT_NONE : graft; /* D is F */
    if (filters || graft == TCH_GRAFT_NONE || r->factors_done) {
        return gather_into(r, filter, graft, false, r->buffer[0], filters ? r->buffer[1] : NULL);
    }
    TCHI_TRY(gather_into(r, filter, TCH_GRAFT_NONE, false, r->buffer[0], NULL));
    tch_blocks gradient = r->gradient;
    TCHI_TRY(gather_into(r, filter, graft, false, r->buffer[1], NULL));
    r->gradient = gradient;
    return TCH_OK;
}

/* --- factors and roots ------------------------------------------------------------------------------------------- */

static tch_status update_factors(const shampoo_run *r)
{
    TCHI_RANGE(r->optimizer->context, "factors");
    return tchi_run_update_factors(r->optimizer, &r->run, &r->gradient, r->buffer[2],
                                   tchi_run_param(r->optimizer, &r->run)->clock);
}

static tch_status update_factors_to_refresh(tch_optimizer *o, const tchi_run *run)
{
    if (!tchi_run_needs_refresh(o, run)) {
        return TCH_OK;
    }
    shampoo_run r = begin_run(o, run);
    TCHI_TRY(gather_into(&r, TCH_FILTER_NONE, TCH_GRAFT_NONE, true, r.buffer[0], NULL));
    return update_factors(&r);
}

/* --- direction and step ------------------------------------------------------------------------------------------ */

static tch_status precondition_run(const shampoo_run *r, tch_blocks *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "precondition");
    void *other = r->config->beta1 != 0.0 ? r->buffer[0] : r->buffer[2];
    return tchi_run_precondition(o, &r->run, TCH_SIDES_ROOTS, direction, &other, r->norms);
}

static tch_status apply_run(const shampoo_run *r, const tch_blocks *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    bool grafts = r->has_roots && r->config->shampoo.grafting != TCH_GRAFTING_NONE;
    tch_update update = tchi_update_run(o, &r->run, &r->work, direction->matrices.data, NULL);
    return o->context->backend->update->apply(o->context->state, &update, grafts ? TCH_BLOCK_GRAFT : TCH_BLOCK_AS_IS,
                                              o->target_norms, r->norms, r->config->nesterov,
                                              (tch_decay)r->config->weight_decay_type);
}

/* Everything that does not read gradients from their original memory: its arguments do not change, so it can be
 * recorded. */
static tch_status finish_run(void *argument)
{
    const shampoo_run *r = argument;
    tch_blocks direction = r->direction;
    if (!r->factors_done) {
        TCHI_TRY(update_factors(r));
    }
    if (r->has_roots) {
        TCHI_TRY(precondition_run(r, &direction));
    }
    return apply_run(r, &direction);
}

static tch_status step_run(tch_optimizer *o, const tchi_run *run)
{
    shampoo_run r = begin_run(o, run);
    bool by_norm = r.has_roots && tchi_refresh_by_norm(o, r.config);
    r.norms = by_norm ? tchi_refresh_norms(o, run) : r.config->shampoo.grafting != TCH_GRAFTING_NONE ? o->norms : NULL;
    TCHI_TRY(gather_run(&r));
    int64_t variant = 16 * (int64_t)r.direction.matrices.type + 8 * by_norm + 4 * (r.config->beta1 != 0.0) +
                      2 * r.has_roots + r.factors_done;
    tchi_recording_key key = tchi_run_key(o, run, variant);
    return tchi_recorded(o->context, &o->recordings, &key, finish_run, &r);
}

/* Other ranks refresh other factors in the same step, so all gradients must arrive first. */
static tch_status step_shampoo(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    bool refreshes;
    TCHI_TRY(tchi_refresh_mark(o, now, group, &refreshes));
    TCHI_TRY(tchi_exchange_arrive(o, now, group, TCHI_ALL_BUCKETS));
    if (refreshes) {
        TCHI_TRY(tchi_for_each_run(o, now, group, false, update_factors_to_refresh));
        TCHI_TRY(tchi_refresh_roots(o, group));
    }
    TCHI_TRY(tchi_for_each_run(o, now, group, true, step_run));
    return tchi_outcomes_ask(o, group);
}

static const tchi_block_method shampoo_blocks = {
    .has_blocks = tchi_shampoo_has_blocks,
    .cut_at = tchi_shampoo_largest_side,
    .moments = name_moments,
    .has_factor = tchi_shampoo_has_factor,
    .root = root_of,
    .refreshes_by_norm = 10,
    .clock_rule = clock_rule,
    .begins = tchi_refresh_first,
    .work = work_bytes,
    .step = step_shampoo,
};

const tchi_optim_method tchi_method_shampoo = {
    .name = "shampoo",
    .set_defaults = set_shampoo_defaults,
    .check = check_shampoo,
    .check_change = check_shampoo_change,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &shampoo_blocks,
};

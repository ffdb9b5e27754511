/* Shampoo: every dimension of a block has a factor, the running sum or average of its gradients' Gram matrices; the
 * gradient is multiplied by an inverse root of each.
 *
 *     C_k <- weight C_k + weight' G_(k) G_(k)'          every step, every dimension k
 *     X_k <- (C_k + damping I)^(-1 / (2 order))         when due
 *     P   <- F x_1 X_1 x_2 X_2 ...                      F the filtered gradient
 *     P   <- P |D| / |P|                                D the direction of the grafted method
 *
 * The one thing to know before changing the order of these: roots are taken from factors that hold this step's
 * gradient, and all blocks of a block batch share its work buffers, so a step with a refresh goes twice over the
 * gradients of which a root is due. */
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

/* What trainings use rather than the paper's: averages forget the first gradients, the damping that counts is the
 * relative one (this eps only keeps a factor of zeros from being singular), and Adam's step lengths let its learning
 * rates carry over. */
static void set_defaults(tch_optim_config *c)
{
    c->lr = 1e-3;
    c->beta1 = 0.9;
    c->beta2 = 0.95;
    c->eps = 1e-12;
    c->grafting = TCH_GRAFTING_ADAM;
    c->precondition_frequency = 100;
    c->refresh_drift = 10.0;
    c->merge_dims = 1;
}

static tch_status check(const char *function, const tch_optim_config *config)
{
    if (config->eps == 0.0 && config->relative_eps == 0.0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: eps and relative_eps are both 0, expected some damping: the factors begin singular",
                         function);
    }
    return TCH_OK;
}

static tch_status check_change(const tch_optim_config *now, const tch_optim_config *next)
{
    TCHI_TRY(tchi_config_check_kept("momentum", now->momentum, next->momentum));
    return tchi_config_check_kept("beta1", now->beta1, next->beta1);
}

static bool takes(const tch_optim_config *config, const tchi_dims *dims)
{
    return dims->order >= 2 || (dims->order == 1 && dims->size[0] > 1 && config->precondition_1d);
}

static int64_t cut_at(const tch_optim_config *config)
{
    return config->max_preconditioner_dim;
}

static void moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = config->beta1 != 0.0 ? "exp_avg" : NULL;
    names[1] = config->grafting >= TCH_GRAFTING_ADAGRAD ? "grafting_sq" : NULL;
    names[2] = config->momentum != 0.0 ? "momentum_buffer" : NULL;
}

static bool has_factor(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k)
{
    (void)config;
    return !tchi_is_thin_side(order, size, k);
}

static int32_t root_of(const tch_optim_config *config, int32_t order)
{
    return config->exponent_override > 0 ? config->exponent_override : 2 * order;
}

static tchi_clock_rule clock_rule(const tch_optim_config *c)
{
    tch_factor_rule average = c->bias_correction ? TCH_FACTOR_CORRECTED : TCH_FACTOR_EMA;
    return (tchi_clock_rule){c->bias_correction, c->beta2 >= 1.0 ? TCH_FACTOR_SUM : average};
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

/* Gradient and filtered gradient, or gradient and a place for products; a third where a dimension lies between
 * others. */
static int buffers_of(const tchi_block_batch *block_batch)
{
    return tchi_block_batch_has_middle(block_batch) ? 3 : 2;
}

typedef struct shampoo_run {
    tch_optimizer *optimizer;
    const tch_optim_config *config;
    tchi_run run;
    tchi_work work;
    void *gradient, *filtered; /* filtered is NULL where beta1 is 0 */
    void *spare;
    bool factors_done; /* by the refresh of their roots */
    bool second_order; /* there are roots */
    bool grafted;      /* by what gathered the gradients */
    bool narrow;       /* blocks are float16, both of them where those of float32 would have had their first */
    tchi_work halves;
} shampoo_run;

static shampoo_run begin_run(tch_optimizer *o, const tch_optim_config *config, const tchi_run *run)
{
    shampoo_run r = {.optimizer = o, .config = config, .run = *run};
    r.work = tchi_work_of(run->block_batch, run->block_batch->real);
    r.halves = tchi_work_of(run->block_batch, TCH_SCALAR_F16);
    r.second_order = tchi_run_param(o, run)->steps_seen >= tchi_refresh_first(config);
    int64_t bytes = tchi_work_bytes(&r.work, run->count);
    r.gradient = o->scratch;
    r.filtered = config->beta1 != 0.0 ? o->scratch + bytes : NULL;
    r.spare = o->scratch + (buffers_of(run->block_batch) - 1) * bytes;
    return r;
}

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    (void)context;
    (void)config;
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    return buffers_of(block_batch) * tchi_work_bytes(&work, 1);
}

/* --- factors and roots ------------------------------------------------------------------------------------------- */

static bool has_decay(const shampoo_run *r)
{
    return r->config->decay == TCH_DECAY_L2 && !r->run.block_batch->prepared;
}

static tch_filter filter_of(const shampoo_run *r)
{
    return r->filtered != NULL ? TCH_FILTER_EMA : TCH_FILTER_NONE;
}

static tch_status gather(const shampoo_run *r, bool filter)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    tch_update update = tchi_update_run(o, &r->run, &r->work, r->gradient, filter ? r->filtered : NULL);
    return o->context->backend->update->gather(o->context->state, &update, filter ? filter_of(r) : TCH_FILTER_NONE,
                                               has_decay(r), NULL, NULL);
}

/* In one pass. The gradient itself is left where anyone looks at it afterwards. */
static tch_status gather_and_graft(const shampoo_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "graft");
    bool wanted = !r->narrow && (!r->factors_done || r->filtered == NULL);
    tch_update update =
        tchi_update_run(o, &r->run, &r->work, wanted ? r->gradient : NULL, r->narrow ? NULL : r->filtered);
    return o->context->backend->update->gather_graft(o->context->state, &update, filter_of(r), has_decay(r),
                                                     (tch_graft)r->config->grafting, o->wanted, o->graft_scratch,
                                                     o->largest, o->largest_filtered);
}

/* Where the second of the blocks of float16 lie. */
static void *behind_halves(const shampoo_run *r)
{
    return (char *)r->gradient + r->run.count * r->halves.stride * tchi_scalar_size(r->halves.type);
}

/* Once their largest elements are known. */
static tch_status gather_halves(const shampoo_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    bool wanted = !r->factors_done || r->filtered == NULL;
    tch_update update = tchi_update_run(o, &r->run, &r->halves, wanted ? r->gradient : NULL,
                                        r->filtered != NULL ? behind_halves(r) : NULL);
    return o->context->backend->update->gather_halves(o->context->state, &update, filter_of(r), has_decay(r),
                                                      o->largest, o->largest_filtered);
}

static tch_status update_factors(const shampoo_run *r)
{
    TCHI_RANGE(r->optimizer->context, "factors");
    const tch_clock *clock = tchi_run_param(r->optimizer, &r->run)->clock;
    return tchi_run_update_factors(r->optimizer, &r->run, r->narrow ? &r->halves : &r->work, r->gradient, r->spare,
                                   r->grafted || r->narrow ? r->optimizer->largest : NULL, clock);
}

/* Gradients for factors alone, in float16 where those take it. */
static tch_status gather_for_factors(shampoo_run *r)
{
    tch_optimizer *o = r->optimizer;
    const tch_update_ops *t = o->context->backend->update;
    r->narrow = tchi_run_takes_halves(o, &r->run, &r->work, r->spare);
    if (!r->narrow) {
        return gather(r, false);
    }
    TCHI_RANGE(o->context, "gather gradients");
    tch_update update = tchi_update_run(o, &r->run, &r->work, NULL, NULL);
    TCHI_TRY(t->gather(o->context->state, &update, TCH_FILTER_NONE, has_decay(r), o->largest, o->largest_filtered));
    tch_update halves = tchi_update_run(o, &r->run, &r->halves, r->gradient, NULL);
    return t->gather_halves(o->context->state, &halves, TCH_FILTER_NONE, has_decay(r), o->largest, o->largest_filtered);
}

/* The factors of all runs of which some root is due, then those roots. The runs are those of the step. */
static tch_status refresh(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    const tchi_group *g = tchi_group_at(o, group);
    for (tchi_turn turn = {0}; tchi_next_turn(o, group, &turn);) {
        tchi_run run;
        while (tchi_next_run(o, now, &turn, &run)) {
            if (tchi_run_is_due(o, &run)) {
                shampoo_run r = begin_run(o, &g->config, &run);
                TCHI_TRY(gather_for_factors(&r));
                TCHI_TRY(update_factors(&r));
            }
        }
    }
    return tchi_refresh_roots(o, group);
}

/* --- direction and step ------------------------------------------------------------------------------------------ */

static tch_status graft(const shampoo_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "graft");
    tch_update update = tchi_update_run(o, &r->run, &r->work, r->gradient, r->filtered);
    return o->context->backend->update->graft(o->context->state, &update, (tch_graft)r->config->grafting,
                                              !r->second_order, o->wanted, o->graft_scratch);
}

/* Multiplies by the roots; *result is the buffer that holds P, and its norms are taken where they are wanted. */
static tch_status precondition(const shampoo_run *r, bool with_norms, void **result)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "precondition");
    *result = r->filtered != NULL ? r->filtered : r->gradient;
    void *other = r->filtered != NULL ? r->gradient : r->spare;
    const uint32_t *largest = !r->grafted ? NULL : r->filtered != NULL ? o->largest_filtered : o->largest;
    return tchi_run_multiply(o, &r->run, &r->work, TCH_SIDES_ROOTS, largest, result, &other,
                             with_norms ? o->norms : NULL);
}

/* The same of blocks of float16; what lies between the two products takes the place of the block that is not, or no
 * longer, needed. */
static tch_status precondition_halves(const shampoo_run *r, void **result)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "precondition");
    bool filtered = r->filtered != NULL;
    *result = r->spare;
    return tchi_run_multiply_halves(o, &r->run, &r->halves, TCH_SIDES_ROOTS, filtered ? behind_halves(r) : r->gradient,
                                    filtered ? o->largest_filtered : o->largest,
                                    filtered ? r->gradient : behind_halves(r), &r->work, *result, o->norms);
}

static tch_status apply(const shampoo_run *r, void *direction, bool scale)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    tch_update update = tchi_update_run(o, &r->run, &r->work, direction, NULL);
    return o->context->backend->update->apply(o->context->state, &update, scale ? TCH_BLOCK_GRAFT : TCH_BLOCK_AS_IS,
                                              o->wanted, o->norms, r->config->nesterov,
                                              r->config->decay == TCH_DECAY_DECOUPLED);
}

/* All that does not look at gradients where they lie, with arguments that stay the same. */
static tch_status after_gather(void *argument)
{
    const shampoo_run *r = argument;
    bool grafts = r->config->grafting != TCH_GRAFTING_NONE;
    void *direction = r->filtered != NULL ? r->filtered : r->gradient;
    if (!r->factors_done) {
        TCHI_TRY(update_factors(r));
    }
    if (grafts && !r->grafted) {
        TCHI_TRY(graft(r));
    }
    if (r->second_order) {
        TCHI_TRY(r->narrow ? precondition_halves(r, &direction) : precondition(r, grafts, &direction));
    }
    return apply(r, direction, grafts && r->second_order);
}

static tch_status step_run(tch_optimizer *o, const tch_optim_config *config, const tchi_run *run, bool factors_done)
{
    shampoo_run r = begin_run(o, config, run);
    r.factors_done = factors_done;
    r.grafted =
        r.second_order && config->grafting >= TCH_GRAFTING_ADAGRAD && o->context->backend->update->gather_graft != NULL;
    r.narrow = r.grafted && tchi_run_takes_halves(o, run, &r.work, r.spare);
    int64_t variant = 16 * r.narrow + 8 * r.grafted + 4 * (r.filtered != NULL) + 2 * r.second_order + r.factors_done;
    tchi_recording_key key = tchi_run_key(o, run, variant);
    TCHI_TRY(r.grafted ? gather_and_graft(&r) : gather(&r, true));
    TCHI_TRY(r.narrow ? gather_halves(&r) : TCH_OK);
    return tchi_recorded(o->context, &o->recordings, &key, after_gather, &r);
}

static tch_status step(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    const tchi_group *g = tchi_group_at(o, group);
    bool any_due = tchi_refresh_mark(o, now, group);
    TCHI_TRY(tchi_exchange_arrive(o, now, group, TCHI_ALL_BUCKETS)); /* ranks refresh other factors at the same step */
    if (any_due) {
        TCHI_TRY(refresh(o, now, group));
    }
    for (tchi_turn turn = {0}; tchi_next_turn(o, group, &turn);) {
        tchi_run run;
        while (tchi_next_run(o, now, &turn, &run)) {
            TCHI_TRY(step_run(o, &g->config, &run, any_due && tchi_run_is_due(o, &run)));
        }
        TCHI_TRY(tchi_exchange_leave(o, now, group, turn.done));
    }
    return TCH_OK;
}

static const tchi_block_method blocks = {
    .takes = takes,
    .cut_at = cut_at,
    .moments = moments,
    .has_factor = has_factor,
    .root = root_of,
    .clock_rule = clock_rule,
    .begins = tchi_refresh_first,
    .may_add_decay = true,
    .work = work_bytes,
    .step = step,
};

const tchi_optim_method tchi_method_shampoo = {
    .name = "shampoo",
    .set_defaults = set_defaults,
    .check = check,
    .check_change = check_change,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &blocks,
};

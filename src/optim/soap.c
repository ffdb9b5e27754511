/* SOAP: Adam in the eigenbasis of Shampoo's factors.
 *
 *     C_k <- beta C_k + (1 - beta) G_(k) G_(k)'                   every step, every dimension k
 *     M   <- beta1 M + (1 - beta1) G                              in the parameter's own space
 *     G', M' = G, M rotated into the bases Q_k
 *     V   <- beta2 V + (1 - beta2) G'^2;  N' = M' / (sqrt(V) + eps)
 *     N   = N' rotated back;  p <- (1 - lr weight_decay) p - lr N
 *     Q_k follows C_k by one orthogonal iteration, when due, and V is permuted as the basis is
 *
 * At its first gradient a parameter only finds its bases: the gradient that made them is not used with them. Its clock
 * counts updates of the moments, one less than gradients. */
#include <string.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/basis.h"

#include "config.h"
#include "method.h"
#include "rects.h"
#include "refresh.h"
#include "shared/shared.h"
#include "tensor_modes.h"

/* --- options, blocks and state ----------------------------------------------------------------------------------- */

static void set_defaults(tch_optim_config *c)
{
    c->lr = 3e-3;
    c->beta1 = 0.95;
    c->beta2 = 0.95;
    c->eps = 1e-8;
    c->weight_decay = 0.01;
    c->precondition_frequency = 10;
    c->max_preconditioner_dim = 10000;
}

static void set_numbers(const tch_optim_config *config, tchi_group_numbers *numbers)
{
    numbers->factors.beta2 = config->shampoo_beta >= 0.0 ? config->shampoo_beta : config->beta2;
}

static bool takes(const tch_optim_config *config, const tchi_dims *dims)
{
    bool fits = config->block != 0;
    for (int32_t k = 0; k < dims->order; k++) {
        fits = fits || dims->size[k] <= config->max_preconditioner_dim;
    }
    return fits && (dims->order >= 2 || (dims->order == 1 && dims->size[0] > 1 && config->precondition_1d));
}

static int64_t cut_at(const tch_optim_config *config)
{
    return config->block ? config->max_preconditioner_dim : INT64_MAX;
}

static void moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    (void)config;
    names[0] = "exp_avg";
}

static bool has_factor(const tch_optim_config *config, int64_t size)
{
    return size <= config->max_preconditioner_dim;
}

/* Second moments in the basis. */
static int64_t block_state(const tchi_block_batch *block_batch)
{
    return block_batch->elements;
}

static int32_t block_state_shape(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape)
{
    (void)block;
    (void)param;
    memcpy(shape, block_batch->size, (size_t)block_batch->order * sizeof *shape);
    return block_batch->order;
}

/* --- when -------------------------------------------------------------------------------------------------------- */

/* Factors go by the group's clock. */
static tchi_clock_rule clock_rule(const tch_optim_config *config)
{
    return (tchi_clock_rule){config->bias_correction, TCH_FACTOR_EMA};
}

static bool only_finds_bases(const tchi_param *param)
{
    return param->steps_seen == 1;
}

static tch_status advance_factors(tch_optimizer *o, tchi_group *group)
{
    tch_clock *clock = &group->numbers->clock;
    return o->context->backend->update->advance(o->context->state, 1, &clock, &group->numbers->factors,
                                                &o->control->skip, 0, TCH_FACTOR_EMA);
}

static int64_t first_bases(const tch_optim_config *config)
{
    (void)config;
    return 1;
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

enum { BUFFERS = 3 }; /* gradient, moment, and a place for products */

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    (void)context;
    (void)config;
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    return BUFFERS * tchi_work_bytes(&work, 1);
}

typedef struct soap_run {
    tch_optimizer *optimizer;
    const tchi_group *group;
    tchi_run run;
    tchi_work work;
    void *gradient, *moment, *spare;
    bool first; /* no bases yet */
    bool due;   /* they follow the factors, or are found */
} soap_run;

/* Bases are due by updates of the moments. */
static soap_run begin_run(tch_optimizer *o, const tchi_group *group, const tchi_run *run)
{
    int64_t updates = tchi_run_param(o, run)->steps_seen - 1;
    soap_run r = {
        .optimizer = o, .group = group, .run = *run, .work = tchi_work_of(run->block_batch, run->block_batch->real)};
    int64_t bytes = tchi_work_bytes(&r.work, run->count);
    r.gradient = o->scratch;
    r.moment = o->scratch + bytes;
    r.spare = o->scratch + 2 * bytes;
    r.first = updates == 0;
    r.due = updates % group->config.precondition_frequency == 0;
    return r;
}

/* --- Adam in the basis ------------------------------------------------------------------------------------------- */

/* The second moments of a run as rectangles of their own: they lie block after block, without gaps. */
static tch_update moments_of(tch_optimizer *o, const tchi_run *run, const tchi_work *work, void *gradient, void *moment)
{
    tch_update update = tchi_update_run(o, run, work, gradient, moment);
    int64_t size = tchi_scalar_size(work->type);
    for (int64_t i = 0; i < run->count; i++) {
        int64_t at = i * work->stride * size;
        o->rects[i] = (tch_rect){
            .state = {NULL, run->block_batch->moment + (run->first + i) * run->block_batch->elements * size, NULL},
            .block = {(char *)gradient + at, (char *)moment + at},
            .clock = tchi_run_param(o, run)->clock,
            .rows = work->rows,
            .cols = work->cols,
            .stride = work->cols,
            .block_ld = work->ld,
            .block_index = (int32_t)i,
            .factor = 1.0,
        };
    }
    update.count = run->count;
    return update;
}

/* The filter divides by the correction of the rectangle's clock; rotated_adam will correct the moment, so here the
 * clock is the group's, which corrects nothing. */
static tch_status gather(const soap_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    tch_update update = tchi_update_run(o, &r->run, &r->work, r->gradient, r->first ? NULL : r->moment);
    for (int64_t i = 0; i < update.count; i++) {
        o->rects[i].clock = &r->group->numbers->clock;
    }
    return o->context->backend->update->gather(o->context->state, &update, r->first ? TCH_FILTER_NONE : TCH_FILTER_EMA,
                                               r->group->config.decay == TCH_DECAY_L2 && !r->run.block_batch->prepared);
}

static tch_status apply(const soap_run *r, void *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    const tch_backend *t = o->context->backend;
    const tch_optim_config *config = &r->group->config;
    tch_block_scale scale = config->normalize_grads ? TCH_BLOCK_UNIT_RMS : TCH_BLOCK_AS_IS;
    if (config->normalize_grads) {
        tch_matrices n = tchi_work_matrices(&r->work, direction, r->run.count);
        tch_array wanted = {o->wanted, TCH_SCALAR_F64, 1, &r->run.count, &(int64_t){1}};
        TCHI_TRY(t->matrix->reduce(o->context->state, TCH_REDUCE_FROBENIUS, &n, o->norms));
        TCHI_TRY(t->matrix->fill(o->context->state, &wanted, (double)r->run.block_batch->elements));
    }
    tch_update update = tchi_update_run(o, &r->run, &r->work, direction, NULL);
    return t->update->apply(o->context->state, &update, scale, o->wanted, o->norms, 0,
                            config->decay == TCH_DECAY_DECOUPLED);
}

static tch_status update_factors(const soap_run *r)
{
    TCHI_RANGE(r->optimizer->context, "factors");
    return tchi_run_update_factors(r->optimizer, &r->run, &r->work, r->gradient, r->spare, &r->group->numbers->clock);
}

/* Gradient and moment into the bases, Adam there, and the direction back; *direction is where it is. */
static tch_status precondition(const soap_run *r, void **direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "precondition");
    void *gradient = r->gradient;
    void *spare = r->spare;
    *direction = r->moment;
    TCHI_TRY(tchi_run_multiply(o, &r->run, &r->work, false, &gradient, &spare));
    TCHI_TRY(tchi_run_multiply(o, &r->run, &r->work, false, direction, &spare));
    tch_update moments = moments_of(o, &r->run, &r->work, gradient, *direction);
    TCHI_TRY(o->context->backend->update->rotated_adam(o->context->state, &moments));
    return tchi_run_multiply(o, &r->run, &r->work, true, direction, &spare);
}

static tch_status step_blocks(const soap_run *r)
{
    void *direction;
    TCHI_TRY(update_factors(r));
    if (r->first) {
        return TCH_OK;
    }
    TCHI_TRY(precondition(r, &direction));
    return apply(r, direction);
}

/* --- bases ------------------------------------------------------------------------------------------------------- */

/* As many factors at once as the workspace allows; at least one. */
static int64_t fit(tch_optimizer *o, const tchi_factor_batch *f, int64_t count)
{
    int64_t limit = o->context->workspace_limit;
    while (count > 1 && limit > 0 && tchi_basis_bytes(o->context, f->real, f->n, count) > limit / 9 * 8) {
        count = (count + 1) / 2;
    }
    return count;
}

static tch_status refresh_part(tch_optimizer *o, tchi_factor_batch *f, const tch_matrices *c, const tch_matrices *q,
                               int64_t first, bool begin)
{
    tchi_arena arena = {0};
    int64_t bytes = tchi_basis_bytes(o->context, f->real, f->n, c->batch);
    tchi_arena_take(&arena, bytes);
    TCHI_TRY(tchi_arena_reserve(o->context, &arena));
    void *scratch = tchi_arena_take(&arena, bytes);
    return begin ? tchi_basis_init(o->context, c, q, f->flags + first, scratch)
                 : tchi_basis_track(o->context, c, q, f->orders + first * f->n, f->flags + first, scratch);
}

static tch_status refresh_bases(tch_optimizer *o, const tchi_run *run, int32_t k, bool begin)
{
    tchi_factor_batch *f = tchi_factor_batch_at(o, run->block_batch->factor_batch[k]);
    tch_matrices factors = tchi_run_factors(o, run, k);
    tch_matrices bases = tchi_run_roots(o, run, k);
    int64_t first = run->block_batch->position[k] + run->first;
    int64_t together = fit(o, f, run->count);
    for (int64_t done = 0; done < run->count; done += together) {
        int64_t count = run->count - done < together ? run->count - done : together;
        tch_matrices c = tchi_matrices_part(&factors, done, count);
        tch_matrices q = tchi_matrices_part(&bases, done, count);
        TCHI_TRY(refresh_part(o, f, &c, &q, first + done, begin));
    }
    return TCH_OK;
}

/* The orders of a run's bases along dimension k, or NULL where it has none. */
static const int32_t *orders_of(const tch_optimizer *o, const tchi_run *run, int32_t k)
{
    if (run->block_batch->factor_batch[k] < 0) {
        return NULL;
    }
    const tchi_factor_batch *f = tchi_factor_batch_at(o, run->block_batch->factor_batch[k]);
    return f->orders + (run->block_batch->position[k] + run->first) * f->n;
}

static tch_status permute_matrices(tch_optimizer *o, const tchi_run *run, void *moment, void *spare)
{
    const tchi_block_batch *c = run->block_batch;
    const tch_backend *t = o->context->backend;
    bool matrix = c->order == 2;
    int64_t rows = matrix ? c->size[0] : 1;
    int64_t cols = matrix ? c->size[1] : c->size[0];
    tch_matrices v = tchi_matrices_new(moment, c->real, run->count, rows, cols);
    tch_matrices out = tchi_matrices_new(spare, c->real, run->count, rows, cols);
    TCHI_TRY(t->matrix->permute(o->context->state, &v, matrix ? orders_of(o, run, 0) : NULL,
                                orders_of(o, run, c->order - 1), &out));
    return t->device->copy_bytes(o->context->state, moment, spare, run->count * c->elements * tchi_scalar_size(c->real),
                                 TCH_COPY_DEVICE);
}

/* Higher orders go one dimension at a time, with that dimension in front. */
static tch_status permute_along(tch_optimizer *o, const tchi_run *run, int32_t k, void *moment, char *spare)
{
    const tchi_block_batch *c = run->block_batch;
    const int32_t *order = orders_of(o, run, k);
    if (order == NULL) {
        return TCH_OK;
    }
    int64_t bytes = (run->count * c->elements * tchi_scalar_size(c->real) + 255) / 256 * 256;
    tch_matrices turned = tchi_matrices_new(spare, c->real, run->count, c->size[k], c->elements / c->size[k]);
    tch_matrices sorted = turned;
    sorted.data = spare + bytes;
    TCHI_TRY(tchi_turn_blocks(o, c, k, c->elements, run->count, moment, turned.data, false));
    TCHI_TRY(o->context->backend->matrix->permute(o->context->state, &turned, order, NULL, &sorted));
    return tchi_turn_blocks(o, c, k, c->elements, run->count, moment, sorted.data, true);
}

static tch_status permute_moments(tch_optimizer *o, const tchi_run *run)
{
    const tchi_block_batch *c = run->block_batch;
    void *moment = c->moment + run->first * c->elements * tchi_scalar_size(c->real);
    if (c->order <= 2) {
        return permute_matrices(o, run, moment, o->scratch);
    }
    for (int32_t k = 0; k < c->order; k++) {
        TCHI_TRY(permute_along(o, run, k, moment, o->scratch));
    }
    return TCH_OK;
}

static tch_status refresh_run(const soap_run *r)
{
    TCHI_RANGE(r->optimizer->context, "basis");
    for (int32_t k = 0; k < r->run.block_batch->order; k++) {
        if (r->run.block_batch->factor_batch[k] >= 0) {
            TCHI_TRY(refresh_bases(r->optimizer, &r->run, k, r->first));
        }
    }
    return r->first ? TCH_OK : permute_moments(r->optimizer, &r->run);
}

/* --- the step ---------------------------------------------------------------------------------------------------- */

/* All that does not look at gradients where they lie, with arguments that stay the same. */
static tch_status after_gather(void *argument)
{
    const soap_run *r = argument;
    TCHI_TRY(step_blocks(r));
    return r->due ? refresh_run(r) : TCH_OK;
}

static void count_refreshes(tch_optimizer *o, const tchi_run *run)
{
    for (int32_t k = 0; k < run->block_batch->order; k++) {
        o->refreshes += run->block_batch->factor_batch[k] >= 0 ? run->count : 0;
    }
}

/* Bases are found by an eigensolver, which waits: that cannot be recorded. */
static tch_status step_run(tch_optimizer *o, const tchi_group *group, const tchi_run *run)
{
    soap_run r = begin_run(o, group, run);
    tchi_recording_key key = tchi_run_key(o, run, r.due);
    TCHI_TRY(gather(&r));
    if (r.due) {
        count_refreshes(o, run);
    }
    return r.first ? after_gather(&r) : tchi_recorded(o->context, &o->recordings, &key, after_gather, &r);
}

static tch_status step(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    const tchi_group *g = tchi_group_at(o, group);
    tch_status status = TCH_OK;
    int64_t before = tchi_workspace_hold(o);
    for (tchi_turn turn = {0}; status == TCH_OK && tchi_next_turn(o, group, &turn);) {
        tchi_run run;
        status = tchi_exchange_arrive(o, now, group, turn.bucket);
        while (status == TCH_OK && tchi_next_run(o, now, &turn, &run)) {
            status = step_run(o, g, &run);
        }
        status = status == TCH_OK ? tchi_exchange_leave(o, now, group, turn.done) : status;
    }
    tchi_workspace_restore(o, before);
    return status;
}

static const tchi_block_method blocks = {
    .takes = takes,
    .cut_at = cut_at,
    .moments = moments,
    .has_factor = has_factor,
    .block_state = block_state,
    .block_state_name = "exp_avg_sq",
    .block_state_shape = block_state_shape,
    .clock_rule = clock_rule,
    .waits = only_finds_bases,
    .advance = advance_factors,
    .begins = first_bases,
    .may_add_decay = true,
    .work = work_bytes,
    .step = step,
};

const tchi_optim_method tchi_method_soap = {
    .name = "soap",
    .set_defaults = set_defaults,
    .check = tchi_config_check_beta2,
    .set_numbers = set_numbers,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &blocks,
};

/* SOAP: Adam in the eigenbasis of Shampoo's factors.
 *
 *     C_k <- beta C_k + (1 - beta) G_(k) G_(k)'                   every step, every dimension k
 *     M   <- beta1 M + (1 - beta1) G                              in the parameter's own space
 *     G', M' = G, M rotated into the bases Q_k
 *     V   <- beta2 V + (1 - beta2) G'^2;  N' = M' / (sqrt(V) + eps)
 *     N   = N' rotated back;  p <- (1 - lr weight_decay) p - lr N
 *     Q_k follows C_k by one orthogonal iteration, in refresh steps, and V is permuted as the basis is
 *
 * The first gradient of a parameter only initializes its bases. The clock counts updates of the moments, one less than
 * gradients.
 *
 * With `orthogonalize`, N is replaced by 0.2 sqrt(max(m, n)) times its polar factor, m by n being the first dimension
 * of a block by all others: a direction of Muon, of the root mean square of AdamW's. Blocks are separate matrices here
 * as in everything else, so ranks need not exchange them; without `block` a block is the whole matrix. */
#include <math.h>
#include <string.h>

#include "core/arith.h"
#include "core/check.h"
#include "core/status.h"
#include "linalg/basis.h"
#include "linalg/batch.h"
#include "linalg/orthogonalize.h"

#include "config.h"
#include "constant_norm.h"
#include "method.h"
#include "rects.h"
#include "refresh.h"
#include "shape.h"
#include "shared/shared.h"
#include "tensor_modes.h"

/* --- options, blocks and state ----------------------------------------------------------------------------------- */

static void set_soap_defaults(tch_optim_config *c)
{
    c->lr = 3e-3;
    c->beta1 = 0.95;
    c->beta2 = 0.95;
    c->eps = 1e-8;
    c->weight_decay = 0.01;
    c->shampoo.precondition_frequency = 100;
    c->shampoo.refresh_drift = 2.5;
    c->shampoo.max_preconditioner_dim = 10000;
}

static tch_status check_soap(const char *function, const tch_optim_config *config)
{
    TCHI_TRY(tchi_config_check_beta2(function, config));
    return config->soap.orthogonalize && config->soap.normalize_grads
               ? tchi_config_refuse(function, "soap.normalize_grads", 1.0, "0 if soap.orthogonalize is 1")
               : TCH_OK;
}

static void set_numbers(const tch_optim_config *config, tchi_group_numbers *numbers)
{
    numbers->factors.beta2 = config->soap.shampoo_beta >= 0.0 ? config->soap.shampoo_beta : config->beta2;
}

static bool has_blocks(const tch_optim_config *config, const tchi_dims *dims)
{
    bool fits = config->soap.block != 0;
    for (int32_t k = 0; k < dims->order; k++) {
        fits = fits || dims->size[k] <= config->shampoo.max_preconditioner_dim;
    }
    return fits && (dims->order >= 2 || (dims->order == 1 && dims->size[0] > 1 && config->shampoo.precondition_1d));
}

static int64_t largest_side(const tch_optim_config *config)
{
    return config->soap.block ? config->shampoo.max_preconditioner_dim : INT64_MAX;
}

static void name_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = "exp_avg";
}

static bool has_factor(const tch_optim_config *config, int32_t order, const int64_t *size, int32_t k)
{
    return size[k] <= config->shampoo.max_preconditioner_dim && !tchi_is_thin_side(order, size, k);
}

/* Second moments in the basis. */
static int64_t block_state(const tchi_block_batch *block_batch)
{
    return block_batch->elements;
}

static int32_t block_state_shape(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape)
{
    memcpy(shape, block_batch->size, (size_t)block_batch->order * sizeof *shape);
    return block_batch->order;
}

/* --- schedule ---------------------------------------------------------------------------------------------------- */

/* Factors use the group's clock. */
static tchi_clock_rule clock_rule(const tch_optim_config *config)
{
    return (tchi_clock_rule){config->use_bias_correction, TCH_FACTOR_EMA};
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
    return 1;
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

enum { BUFFERS = 3 }; /* gradient, moment, product */

/* Those of a direction that is orthogonalized: with the type and size of Muon's. */
static tch_scalar ortho_type(const tch_context *context, const tch_optim_config *config, tch_scalar real)
{
    bool exact = !config->soap.orthogonalize || config->numerics.precision == TCH_PRECISION_HIGHEST;
    return exact ? real : tchi_ortho_type(context, real);
}

static tchi_ortho ortho_of(void)
{
    return tchi_ortho_of(TCH_ORTHO_MINIMAX, tchi_ortho_usual_steps(TCH_ORTHO_MINIMAX), 0.0);
}

static double step_factor(const tch_optim_config *config, double rows, double cols)
{
    return config->soap.orthogonalize ? 0.2 * sqrt(fmax(rows, cols)) : 1.0;
}

/* Blocks as matrices: the first dimension by all others. */
static tchi_batch matrices_of(const tchi_block_batch *block_batch, const tch_matrices *blocks)
{
    int64_t rows = block_batch->order == 1 ? 1 : block_batch->size[0];
    int64_t cols = block_batch->elements / rows;
    return (tchi_batch){.data = blocks->data,
                        .type = blocks->type,
                        .rank = 1,
                        .sizes = {blocks->batch},
                        .strides = {blocks->stride},
                        .count = blocks->batch,
                        .rows = rows,
                        .cols = cols,
                        .row_stride = block_batch->order == 2 ? blocks->ld : cols,
                        .col_stride = 1};
}

/* Room for `count` of them with the short side first, and the scratch behind it. */
static tch_matrices place_wide(tchi_arena *arena, const tchi_batch *of, tch_scalar type, int64_t count, void **scratch)
{
    const tchi_ortho ortho = ortho_of();
    int64_t rows = of->rows < of->cols ? of->rows : of->cols;
    tch_matrices x = tchi_scratch_aligned(arena, type, count, rows, of->rows * of->cols / rows);
    *scratch = tchi_arena_take(arena, tchi_orthogonalize_bytes(&ortho, &x));
    return x;
}

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    tchi_work work = tchi_work_of(block_batch, block_batch->real);
    tchi_arena arena = {0};
    if (config->soap.orthogonalize) {
        void *scratch;
        tch_matrices blocks = tchi_work_matrices(&work, NULL, 1);
        tchi_batch one = matrices_of(block_batch, &blocks);
        (void)place_wide(&arena, &one, ortho_type(context, config, block_batch->real), 1, &scratch);
    }
    return BUFFERS * tchi_work_bytes(&work, 1) + tchi_round_up(arena.used, 256);
}

typedef struct soap_run {
    tch_optimizer *optimizer;
    const tchi_group *group;
    tchi_run run;
    tchi_work work;
    void *buffer[BUFFERS];
    tch_blocks gradient, moment;
    uint32_t *notes; /* of the direction, or NULL */
    bool first;      /* no bases yet */
} soap_run;

static soap_run begin_run(tch_optimizer *o, const tchi_group *group, const tchi_run *run)
{
    soap_run r = {
        .optimizer = o, .group = group, .run = *run, .work = tchi_work_of(run->block_batch, run->block_batch->real)};
    for (int k = 0; k < BUFFERS; k++) {
        r.buffer[k] = o->scratch + k * tchi_work_bytes(&r.work, run->count);
    }
    r.first = only_finds_bases(tchi_run_param(o, run));
    return r;
}

/* --- Adam in the basis ------------------------------------------------------------------------------------------- */

/* Describes the second moments of a run as rectangles. Blocks are contiguous there. */
static tch_update describe_moments(const soap_run *r, const tch_blocks *gradient, const tch_blocks *moment)
{
    tch_optimizer *o = r->optimizer;
    const tchi_run *run = &r->run;
    const tchi_work *work = &r->work;
    tch_update update = tchi_update_run(o, run, work, NULL, NULL);
    int64_t size = tchi_scalar_size(work->type);
    for (int64_t i = 0; i < run->count; i++) {
        int64_t at = i * work->stride * size;
        o->rects[i] = (tch_rect){
            .state = {NULL, run->block_batch->moment + (run->first + i) * run->block_batch->elements * size, NULL},
            .block = {(char *)gradient->matrices.data + at, (char *)moment->matrices.data + at},
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

static tch_status gather_run(soap_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    const tch_gathering rules = {
        .filter = r->first ? TCH_FILTER_NONE : TCH_FILTER_EMA,
        .l2 = tchi_adds_decay(&r->group->config) && !r->run.block_batch->prepared,
    };
    void *const buffers[2] = {r->buffer[0], r->first ? NULL : r->buffer[1]};
    TCHI_TRY(tchi_run_gather(o, &r->run, &r->work, &rules, true, buffers, &r->gradient, &r->moment));
    r->notes = r->gradient.notes != NULL ? o->notes[0] : NULL;
    return TCH_OK;
}

/* In place, by way of Muon's type. */
static tch_status orthogonalize_run(const soap_run *r, const tch_blocks *direction)
{
    tch_context *context = r->optimizer->context;
    const tchi_block_batch *block_batch = r->run.block_batch;
    if (!r->group->config.soap.orthogonalize) {
        return TCH_OK;
    }
    TCHI_RANGE(context, "orthogonalize");
    void *scratch;
    tch_matrices result;
    const tchi_ortho ortho = ortho_of();
    tchi_batch blocks = matrices_of(block_batch, &direction->matrices);
    blocks = blocks.rows > blocks.cols ? tchi_batch_transposed(blocks) : blocks;
    tchi_arena arena = {.base = r->optimizer->scratch + BUFFERS * tchi_work_bytes(&r->work, r->run.count)};
    tch_scalar type = ortho_type(context, &r->group->config, block_batch->real);
    tch_matrices x = place_wide(&arena, &blocks, type, r->run.count, &scratch);
    TCHI_TRY(tchi_batch_read(context, &blocks, 0, &x));
    TCHI_TRY(tchi_orthogonalize_blocks(context, &ortho, &x, block_batch->all, scratch, &result));
    return tchi_batch_write(context, &blocks, 0, &result);
}

static tch_status apply_run(const soap_run *r, const tch_blocks *direction)
{
    tch_optimizer *o = r->optimizer;
    const tch_backend *t = o->context->backend;
    const tch_optim_config *config = &r->group->config;
    if (config->constant_norm) {
        bool first = direction->matrices.data == r->buffer[0];
        return tchi_constant_norm_apply(o, &r->run, &direction->matrices, r->buffer[first ? 1 : 0]);
    }
    TCHI_RANGE(o->context, "apply");
    tch_block_scale scale = config->soap.normalize_grads ? TCH_BLOCK_UNIT_RMS : TCH_BLOCK_AS_IS;
    if (config->soap.normalize_grads) {
        tch_array targets = {o->target_norms, TCH_SCALAR_F64, 1, &r->run.count, &(int64_t){1}};
        TCHI_TRY(t->matrix->reduce(o->context->state, TCH_REDUCE_FROBENIUS, &direction->matrices, o->norms));
        TCHI_TRY(t->matrix->fill(o->context->state, &targets, (double)r->run.block_batch->elements));
    }
    tch_update update = tchi_update_run(o, &r->run, &r->work, direction->matrices.data, NULL);
    const int64_t rows = r->run.block_batch->size[0];
    const int64_t cols = r->run.block_batch->elements / rows;
    for (int64_t i = 0; i < update.count && !r->run.block_batch->direction; i++) {
        o->rects[i].factor = step_factor(config, (double)rows, (double)cols);
    }
    return t->update->apply(o->context->state, &update, scale, o->target_norms, o->norms, 0,
                            (tch_decay)config->weight_decay_type);
}

static tch_status update_factors(const soap_run *r)
{
    TCHI_RANGE(r->optimizer->context, "factors");
    return tchi_run_update_factors(r->optimizer, &r->run, &r->gradient, r->buffer[2], &r->group->numbers->clock);
}

/* Rotates gradient and moment into the bases, applies Adam, and rotates the direction back. */
static tch_status precondition_run(const soap_run *r, tch_blocks *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "precondition");
    tch_blocks gradient = r->gradient;
    void *other = r->buffer[2];
    *direction = r->moment;
    TCHI_TRY(tchi_run_precondition(o, &r->run, TCH_SIDES_INTO_BASES, &gradient, &other, NULL));
    TCHI_TRY(tchi_run_precondition(o, &r->run, TCH_SIDES_INTO_BASES, direction, &other, NULL));
    tch_update moments = describe_moments(r, &gradient, direction);
    TCHI_TRY(o->context->backend->update->rotated_adam(o->context->state, &moments, r->notes));
    direction->notes = r->notes;
    return tchi_run_precondition(o, &r->run, TCH_SIDES_OUT_OF_BASES, direction, &other, NULL);
}

/* --- bases ------------------------------------------------------------------------------------------------------- */

/* Factors [first, first + count) of a factor batch, all to be refreshed: either all first bases or none. */
typedef struct basis_run {
    tch_optimizer *optimizer;
    tchi_factor_batch *factor_batch;
    int64_t first, count;
    bool begin;
    bool measured; /* compute the drift of the old bases */
} basis_run;

static int64_t basis_bytes(const basis_run *r, int64_t count)
{
    const tchi_factor_batch *f = r->factor_batch;
    return r->begin ? tchi_basis_init_bytes(r->optimizer->context, f->real, f->n, count)
                    : tchi_basis_track_bytes(r->optimizer->context, f->real, f->n, count);
}

static tch_status refresh_part(const basis_run *r, int64_t first, int64_t count)
{
    tch_context *context = r->optimizer->context;
    const tchi_factor_batch *f = r->factor_batch;
    tch_matrices c;
    tch_matrices q;
    TCHI_TRY(tchi_matrices_open(r->optimizer, f, TCHI_FACTORS, first, count, r->optimizer->unpacked, &c));
    TCHI_TRY(tchi_matrices_open(r->optimizer, f, TCHI_ROOTS, first, count, NULL, &q));
    tchi_arena arena = {0};
    int64_t bytes = basis_bytes(r, count);
    tchi_arena_take(&arena, bytes);
    TCHI_TRY(tchi_arena_reserve(context, &arena));
    void *scratch = tchi_arena_take(&arena, bytes);
    return r->begin ? tchi_basis_init(context, &c, &q, f->flags + first, scratch)
                    : tchi_basis_track(context, &c, &q, f->orders + first * f->n, f->flags + first,
                                       r->measured ? f->drift + first : NULL, scratch);
}

/* As many factors at a time as fit into the workspace, at least one, in passes of about equal length. */
static int64_t count_fitting(const basis_run *r)
{
    int64_t limit = r->optimizer->context->workspace_limit;
    int64_t count = r->count;
    for (int64_t passes = 2; count > 1 && limit > 0 && basis_bytes(r, count) > limit / 9 * 8; passes++) {
        count = (r->count + passes - 1) / passes;
    }
    return count;
}

static tch_status refresh_bases(void *argument)
{
    const basis_run *r = argument;
    TCHI_RANGE(r->optimizer->context, "basis");
    int64_t together = tchi_unpacked_fit(r->optimizer, r->factor_batch, count_fitting(r));
    for (int64_t done = 0; done < r->count; done += together) {
        int64_t left = r->count - done;
        TCHI_TRY(refresh_part(r, r->first + done, left < together ? left : together));
    }
    return TCH_OK;
}

static bool is_first(const tch_optimizer *o, const tchi_factor_batch *f, int64_t factor)
{
    const tchi_block_batch *c = tchi_block_batch_at(o, f->block_batch[factor]);
    return only_finds_bases(tchi_block_param(o, tchi_block_at(o, c->first + f->block[factor])));
}

/* First bases come from an eigensolver, which synchronizes: it cannot be recorded. The first part of the key is
 * negative, which distinguishes it from the keys of runs. */
static tch_status refresh_factors(tch_optimizer *o, tchi_factor_batch *f)
{
    int64_t most = tchi_group_at(o, f->group)->config.numerics.world_invariant ? 1 : f->count;
    for (int64_t first = 0, end; first<f->count; first = end> first ? end : first + 1) {
        basis_run r = {.optimizer = o, .factor_batch = f, .first = first, .begin = is_first(o, f, first)};
        for (end = first; end < f->count && end - first < most && f->refresh[end] && is_first(o, f, end) == r.begin;) {
            end++;
        }
        r.count = end - first;
        r.measured = tchi_refresh_by_drift(o, &tchi_group_at(o, f->group)->config);
        o->refreshes += r.count;
        if (r.count > 0) {
            tchi_recording_key key = {{-1 - (f - tchi_factor_batch_at(o, 0)), first, r.count, r.measured}};
            TCHI_TRY(r.begin ? refresh_bases(&r) : tchi_recorded(o->context, &o->recordings, &key, refresh_bases, &r));
        }
    }
    return TCH_OK;
}

/* --- permuting second moments ------------------------------------------------------------------------------------ */

/* Blocks [first, first + count) of a block batch with new bases along the same dimensions; a bit mask. */
typedef struct permute_run {
    tch_optimizer *optimizer;
    const tchi_block_batch *block_batch;
    int64_t first, count;
    uint32_t dims;
} permute_run;

/* The column orders of a run's bases along dimension k; NULL if unchanged. */
static const int32_t *orders_of(const permute_run *r, int32_t k)
{
    if ((r->dims >> k & 1) == 0) {
        return NULL;
    }
    const tchi_factor_batch *f = tchi_factor_batch_at(r->optimizer, r->block_batch->factor_batch[k]);
    return f->orders + (r->block_batch->position[k] + r->first) * f->n;
}

static tch_status permute_matrices(const permute_run *r, void *moment, void *spare)
{
    const tchi_block_batch *c = r->block_batch;
    const tch_context *context = r->optimizer->context;
    const tch_backend *t = context->backend;
    bool matrix = c->order == 2;
    int64_t rows = matrix ? c->size[0] : 1;
    int64_t cols = matrix ? c->size[1] : c->size[0];
    tch_matrices v = tchi_matrices_new(moment, c->real, r->count, rows, cols);
    tch_matrices out = tchi_matrices_new(spare, c->real, r->count, rows, cols);
    TCHI_TRY(t->matrix->permute(context->state, &v, matrix ? orders_of(r, 0) : NULL, orders_of(r, c->order - 1), &out));
    return t->device->copy_bytes(context->state, moment, spare, r->count * c->elements * tchi_scalar_size(c->real),
                                 TCH_COPY_DEVICE);
}

/* Order above 2: permutes one dimension at a time, transposed to the front. */
static tch_status permute_along(const permute_run *r, int32_t k, void *moment, char *spare)
{
    tch_optimizer *o = r->optimizer;
    const tchi_block_batch *c = r->block_batch;
    const int32_t *order = orders_of(r, k);
    if (order == NULL) {
        return TCH_OK;
    }
    int64_t bytes = (r->count * c->elements * tchi_scalar_size(c->real) + 255) / 256 * 256;
    tch_matrices transposed = tchi_matrices_new(spare, c->real, r->count, c->size[k], c->elements / c->size[k]);
    tch_matrices sorted = transposed;
    sorted.data = spare + bytes;
    TCHI_TRY(tchi_transpose_blocks(o, c, k, c->elements, r->count, moment, transposed.data, false));
    TCHI_TRY(o->context->backend->matrix->permute(o->context->state, &transposed, order, NULL, &sorted));
    return tchi_transpose_blocks(o, c, k, c->elements, r->count, moment, sorted.data, true);
}

static tch_status permute_moments(const permute_run *r)
{
    const tchi_block_batch *c = r->block_batch;
    void *moment = c->moment + r->first * c->elements * tchi_scalar_size(c->real);
    if (c->order <= 2) {
        return permute_matrices(r, moment, r->optimizer->scratch);
    }
    for (int32_t k = 0; k < c->order; k++) {
        TCHI_TRY(permute_along(r, k, moment, r->optimizer->scratch));
    }
    return TCH_OK;
}

/* The dimensions along which a block's basis was updated; first bases do not count. */
static uint32_t moved_dims(const tch_optimizer *o, const tchi_block_batch *c, int64_t block)
{
    uint32_t dims = 0;
    for (int32_t k = 0; k < c->order; k++) {
        const tchi_factor_batch *f = tchi_factor_batch_of(o, c, k);
        int64_t factor = c->position[k] + block;
        dims |= (uint32_t)(f != NULL && f->refresh[factor] && !is_first(o, f, factor)) << k;
    }
    return dims;
}

static tch_status permute_batch(tch_optimizer *o, const tchi_block_batch *c)
{
    for (int64_t first = 0, end; first<c->count; first = end> first ? end : first + 1) {
        permute_run r = {.optimizer = o, .block_batch = c, .first = first, .dims = moved_dims(o, c, first)};
        for (end = first; end < c->count && end - first < c->chunk && r.dims != 0 && moved_dims(o, c, end) == r.dims;) {
            end++;
        }
        r.count = end - first;
        TCHI_TRY(r.count > 0 ? permute_moments(&r) : TCH_OK);
    }
    return TCH_OK;
}

/* Refreshes all marked bases and permutes the second moments to match. */
static tch_status refresh_group(tch_optimizer *o, int32_t group)
{
    const tchi_group *g = tchi_group_at(o, group);
    TCHI_TRY(tchi_outcomes_note(o, group));
    for (int32_t i = 0; i < g->factor_batches; i++) {
        TCHI_TRY(refresh_factors(o, tchi_factor_batch_at(o, g->first_factor_batch + i)));
    }
    TCHI_TRY(tchi_outcomes_ask(o, group));
    for (int32_t i = 0; i < g->block_batches; i++) {
        TCHI_TRY(permute_batch(o, tchi_block_batch_at(o, g->first_block_batch + i)));
    }
    return TCH_OK;
}

/* --- the step ---------------------------------------------------------------------------------------------------- */

/* Everything that does not read gradients from their original memory: its arguments do not change, so it can be
 * recorded. */
static tch_status finish_run(void *argument)
{
    const soap_run *r = argument;
    tch_blocks direction;
    TCHI_TRY(update_factors(r));
    if (r->first) {
        return TCH_OK;
    }
    TCHI_TRY(precondition_run(r, &direction));
    TCHI_TRY(orthogonalize_run(r, &direction));
    return apply_run(r, &direction);
}

static tch_status step_run(tch_optimizer *o, const tchi_run *run)
{
    soap_run r = begin_run(o, tchi_group_at(o, run->block_batch->group), run);
    TCHI_TRY(gather_run(&r));
    tchi_recording_key key = tchi_run_key(o, run, 2 * (int64_t)r.gradient.matrices.type + r.first);
    return tchi_recorded(o->context, &o->recordings, &key, finish_run, &r);
}

static tch_status step_soap(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    bool refreshes;
    TCHI_TRY(tchi_refresh_mark(o, now, group, &refreshes));
    int64_t before = tchi_workspace_hold(o);
    tch_status status = tchi_for_each_run(o, now, group, true, step_run);
    if (status == TCH_OK && refreshes) {
        status = refresh_group(o, group);
    }
    tchi_workspace_restore(o, before);
    return status;
}

static const tchi_block_method soap_blocks = {
    .has_blocks = has_blocks,
    .cut_at = largest_side,
    .moments = name_moments,
    .has_factor = has_factor,
    .block_state = block_state,
    .block_state_name = "exp_avg_sq",
    .block_state_shape = block_state_shape,
    .clock_rule = clock_rule,
    .waits = only_finds_bases,
    .advance = advance_factors,
    .begins = first_bases,
    .direction_type = ortho_type,
    .step_factor = step_factor,
    .work = work_bytes,
    .step = step_soap,
};

const tchi_optim_method tchi_method_soap = {
    .name = "soap",
    .keeps_norm = true,
    .set_defaults = set_soap_defaults,
    .check = check_soap,
    .set_numbers = set_numbers,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &soap_blocks,
};

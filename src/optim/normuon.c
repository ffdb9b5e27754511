/* NorMuon (Li and others, 2025): Muon's direction, with every row of the matrix divided by the root of its own second
 * moment, so that no neuron moves much more than another.
 *
 *     O    = orthogonalize(U), U as in Muon
 *     v_i <- beta2 v_i + (1 - beta2) mean of O_ij^2 over j
 *     D_ij = O_ij / (sqrt(v_i) + eps)
 *     p   <- (1 - lr weight_decay) p - lr s sqrt(min(m, n)) D / |D|
 *
 * s is Muon's factor by muon_lr, and sqrt(min(m, n)) the norm of an orthogonal matrix, so that a step is as long as
 * Muon's would be; with MATCH_RMS_ADAMW the product is the paper's 0.2 sqrt(m n). As in the paper v is not corrected:
 * |D| takes its size out again.
 *
 * A row is one of the parameter by its shape. Blocks have their short side first and parameters may lie by columns, so
 * the rectangles say along which side of theirs the rows are. */
#include <math.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/orthogonalize.h"

#include "config.h"
#include "muon.h"

static void set_normuon_defaults(tch_optim_config *c)
{
    c->lr = 1e-3;
    c->weight_decay = 0.1;
    c->momentum = 0.95;
    c->nesterov = 1;
    c->beta2 = 0.95;
    c->eps = 1e-8;
    c->muon_method = TCH_ORTHO_MINIMAX;
    c->muon_lr = TCH_MUON_LR_MATCH_RMS_ADAMW;
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

/* Whether the first dimension above 1 of a parameter is the inner one of its matrix in memory. Of more than two
 * dimensions the matrix has the outermost in memory on one side and all others on the other: its rows are those of
 * memory. */
static bool lies_by_columns(const tchi_param *p)
{
    int32_t first = -1;
    int32_t sides = 0;
    for (int32_t k = 0; k < p->ndim; k++) {
        first = first < 0 && p->shape[k] > 1 ? k : first;
        sides += p->shape[k] > 1;
    }
    return sides == 2 && p->strides[first] * p->shape[first] != p->count;
}

/* As many as its long side has, since wide and tall matrices share a block batch. */
static int64_t block_state(const tchi_block_batch *block_batch)
{
    return block_batch->size[1];
}

static int32_t block_state_shape(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape)
{
    shape[0] = lies_by_columns(param) ? tchi_block_cols(block_batch, block) : tchi_block_rows(block_batch, block);
    shape[1] = 1;
    return 2;
}

/* --- the step ---------------------------------------------------------------------------------------------------- */

/* What each row adds to the norm of a direction lies behind what Muon works with. */
static int64_t part_bytes(const tchi_block_batch *block_batch)
{
    return (block_batch->size[1] * (int64_t)sizeof(double) + 255) / 256 * 256;
}

static int64_t work_bytes(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    return tchi_muon_work(context, config, block_batch) + part_bytes(block_batch);
}

static double *parts_of(const tchi_muon_run *r)
{
    const tch_optimizer *o = r->optimizer;
    return (double *)(void *)(o->scratch + r->run.count * tchi_muon_work(o->context, r->config, r->run.block_batch));
}

/* Muon's, and the norm of an orthogonal matrix. */
static double step_factor(const tch_optim_config *config, double rows, double cols)
{
    return tchi_muon_step_factor(config, rows, cols) * sqrt(fmin(rows, cols));
}

/* The rectangle of a block is all of a matrix, in rows. */
static tch_update update_of(const tchi_muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    const tchi_block_batch *block_batch = r->run.block_batch;
    tch_update update = tchi_muon_update(r, direction);
    for (int64_t i = 0; i < update.count; i++) {
        tch_rect *rect = &o->rects[i];
        const tchi_block *block = tchi_block_at(o, block_batch->first + r->run.first + rect->block_index);
        tchi_muon_sides s = tchi_muon_sides_of(o, &r->run, rect->block_index);
        rect->state[1] =
            block_batch->moment + (r->run.first + i) * block_state(block_batch) * tchi_scalar_size(block_batch->real);
        rect->by_column = lies_by_columns(tchi_block_param(o, block));
        rect->rows = tchi_block_rows(block_batch, block);
        rect->cols = rect->stride = tchi_block_cols(block_batch, block);
        rect->block_ld = direction->ld;
        if (!block_batch->direction) {
            rect->factor = step_factor(r->config, s.m, s.n);
        }
    }
    return update;
}

static tch_status apply_normuon(const tchi_muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    tch_update update = update_of(r, direction);
    return o->context->backend->update->apply_rows(o->context->state, &update, o->norms, parts_of(r));
}

static tch_status step_normuon(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    return tchi_muon_step(o, now, group, apply_normuon);
}

static const tchi_block_method normuon_blocks = {
    .set_dims = tchi_muon_set_dims,
    .has_blocks = tchi_muon_has_blocks,
    .transposes_tall = true,
    .moments = tchi_muon_moments,
    .block_state = block_state,
    .block_state_name = "exp_avg_sq",
    .block_state_shape = block_state_shape,
    .clock_rule = tchi_muon_clock_rule,
    .filtered_type = tchi_ortho_type,
    .step_factor = step_factor,
    .work = work_bytes,
    .step = step_normuon,
};

const tchi_optim_method tchi_method_normuon = {
    .name = "normuon",
    .set_defaults = set_normuon_defaults,
    .check = tchi_config_check_beta2,
    .set_numbers = tchi_muon_set_numbers,
    .rest_share = tchi_muon_rest_share,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &normuon_blocks,
};

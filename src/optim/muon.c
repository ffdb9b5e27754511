/* Muon: the momentum of a matrix, made orthogonal, is its step.
 *
 *     B <- momentum B + (1 - momentum) G
 *     U  = momentum B + (1 - momentum) G  (nesterov), or B
 *     p <- (1 - lr weight_decay) p - lr factor orthogonalize(U)
 *
 * Matrices are gathered with their short side first and in the type that is orthogonalized, so that all of one shape,
 * wide or tall, go through as one batch. */
#include <math.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/orthogonalize.h"

#include "muon.h"
#include "shape.h"
#include "shared/shared.h"

/* --- options, blocks and state ----------------------------------------------------------------------------------- */

static void set_muon_defaults(tch_optim_config *c)
{
    c->lr = 1e-3;
    c->weight_decay = 0.1;
    c->momentum = 0.95;
    c->nesterov = 1;
    c->eps = 1e-7;
    c->muon_method = TCH_ORTHO_MINIMAX;
}

/* B is what the table calls a filter, which goes by beta1. */
void tchi_muon_set_numbers(const tch_optim_config *config, tchi_group_numbers *numbers)
{
    numbers->main.beta1 = config->momentum;
}

/* Steps of AdamW are about lr an element. With MATCH_RMS_ADAMW a matrix's are too; otherwise its step has the norm of
 * an orthogonal matrix, and 0.02, the usual lr, is far above AdamW's. With 0.3 embeddings and biases get 0.006, the
 * best of the rates tried for the rest of a GPT (bench/results/train-lm-33m.json). */
double tchi_muon_rest_share(const tch_optim_config *config)
{
    return config->muon_lr == TCH_MUON_LR_MATCH_RMS_ADAMW ? 1.0 : 0.3;
}

void tchi_muon_set_dims(const tch_optim_config *config, tchi_dims *dims)
{
    (void)config;
    tchi_dims_as_matrix(dims);
}

bool tchi_muon_has_blocks(const tch_optim_config *config, const tchi_dims *dims)
{
    (void)config;
    return dims->order >= 2;
}

void tchi_muon_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    (void)config;
    names[0] = "momentum_buffer";
}

tchi_clock_rule tchi_muon_clock_rule(const tch_optim_config *config)
{
    (void)config;
    return (tchi_clock_rule){false, TCH_FACTOR_EMA};
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

static tchi_ortho ortho_of(const tch_optim_config *config)
{
    const double *c = config->muon_coefficients;
    int32_t steps = config->muon_steps > 0 ? config->muon_steps : tchi_ortho_usual_steps(config->muon_method);
    if (config->muon_method == TCH_ORTHO_MUON && (c[0] != 0.0 || c[1] != 0.0 || c[2] != 0.0)) {
        return tchi_ortho_repeating((tchi_schulz_step){c[0], c[1], c[2]}, steps, config->eps);
    }
    return tchi_ortho_of(config->muon_method, steps, config->eps);
}

/* The gathered matrices and the scratch of their orthogonalization. */
int64_t tchi_muon_work(const tch_context *context, const tch_optim_config *config, const tchi_block_batch *block_batch)
{
    tchi_ortho ortho = ortho_of(config);
    tchi_work work = tchi_work_of(block_batch, tchi_ortho_type(context, block_batch->real));
    tch_matrices one = tchi_work_matrices(&work, NULL, 1);
    return tchi_work_bytes(&work, 1) + (tchi_orthogonalize_bytes(&ortho, &one) + 255) / 256 * 256;
}

tchi_muon_sides tchi_muon_sides_of(const tch_optimizer *o, const tchi_run *run, int64_t block)
{
    const tchi_block *b = tchi_block_at(o, run->block_batch->first + run->first + block);
    const tchi_param *p = tchi_block_param(o, b);
    int32_t first = 0;
    if (p->cuts != NULL || p->tile >= 0) { /* in the order of memory, which is that of the shape */
        return (tchi_muon_sides){(double)tchi_block_rows(run->block_batch, b),
                                 (double)tchi_block_cols(run->block_batch, b)};
    }
    while (p->shape[first] == 1) {
        first++;
    }
    double m = (double)p->shape[first];
    return (tchi_muon_sides){m, (double)p->count / m};
}

double tchi_muon_step_factor(const tch_optim_config *config, double rows, double cols)
{
    switch (config->muon_lr) {
    case TCH_MUON_LR_ORIGINAL:
        return sqrt(fmax(1.0, rows / cols));
    case TCH_MUON_LR_MATCH_RMS_ADAMW:
        return 0.2 * sqrt(fmax(rows, cols));
    default:
        return 1.0;
    }
}

static tch_status gather_run(const tchi_muon_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    bool filtered = tchi_run_param(o, &r->run)->moment[0] == NULL; /* the gradient of a tile, where it lies */
    tch_filter filter = r->config->nesterov ? TCH_FILTER_NESTEROV : TCH_FILTER_EMA;
    const tch_gathering how = {.filter = filtered ? TCH_FILTER_NONE : filter};
    tch_update update =
        tchi_update_run(o, &r->run, &r->work, filtered ? o->scratch : NULL, filtered ? NULL : o->scratch);
    return o->context->backend->update->gather(o->context->state, &update, &how, NULL);
}

static tch_status orthogonalize_run(const tchi_muon_run *r, tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "orthogonalize");
    tchi_ortho ortho = ortho_of(r->config);
    tch_matrices x = tchi_work_matrices(&r->work, o->scratch, r->run.count);
    void *scratch = o->scratch + tchi_work_bytes(&r->work, r->run.count);
    return tchi_orthogonalize_blocks(o->context, &ortho, &x, r->run.block_batch->all, scratch, direction);
}

tch_update tchi_muon_update(const tchi_muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    tchi_work work = r->work;
    work.ld = direction->ld;
    work.stride = direction->stride;
    tch_update update = tchi_update_run(o, &r->run, &work, direction->data, NULL);
    for (int64_t i = 0; i < update.count; i++) {
        tchi_muon_sides s = tchi_muon_sides_of(o, &r->run, o->rects[i].block_index);
        bool applied_here = !r->run.block_batch->direction;
        o->rects[i].factor = !applied_here ? 1.0 : tchi_muon_step_factor(r->config, s.m, s.n);
    }
    return update;
}

static tch_status apply_muon(const tchi_muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    tch_update update = tchi_muon_update(r, direction);
    return o->context->backend->update->apply(o->context->state, &update, TCH_BLOCK_AS_IS, NULL, NULL, 0, 1);
}

/* All that does not look at gradients where they lie, with arguments that stay the same. */
static tch_status finish_run(void *argument)
{
    const tchi_muon_run *r = argument;
    tch_matrices direction;
    TCHI_TRY(orthogonalize_run(r, &direction));
    return r->apply(r, &direction);
}

/* Of the numbers that may change between steps eps alone is an argument; the others are read on the device. */
static tch_status step_run(tch_optimizer *o, const tch_optim_config *config, const tchi_run *run, tchi_muon_apply apply)
{
    tchi_muon_run r = {.optimizer = o, .config = config, .run = *run, .apply = apply};
    r.work = tchi_work_of(run->block_batch, tchi_ortho_type(o->context, run->block_batch->real));
    tchi_recording_key key = tchi_run_key(o, run, tchi_recording_number(config->eps));
    TCHI_TRY(gather_run(&r));
    return tchi_recorded(o->context, &o->recordings, &key, finish_run, &r);
}

tch_status tchi_muon_step(tch_optimizer *o, const tchi_step *now, int32_t group, tchi_muon_apply apply)
{
    const tchi_group *g = tchi_group_at(o, group);
    for (tchi_turn turn = {0}; tchi_next_turn(o, group, &turn);) {
        tchi_run run;
        TCHI_TRY(tchi_exchange_arrive(o, now, group, turn.bucket));
        while (tchi_next_run(o, now, &turn, &run)) {
            TCHI_TRY(step_run(o, &g->config, &run, apply));
        }
        TCHI_TRY(tchi_exchange_leave(o, now, group, turn.done));
    }
    return TCH_OK;
}

static tch_status step_muon(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    return tchi_muon_step(o, now, group, apply_muon);
}

static const tchi_block_method muon_blocks = {
    .set_dims = tchi_muon_set_dims,
    .has_blocks = tchi_muon_has_blocks,
    .transposes_tall = true,
    .moments = tchi_muon_moments,
    .clock_rule = tchi_muon_clock_rule,
    .filtered_type = tchi_ortho_type,
    .direction_type = tchi_ortho_type,
    .step_factor = tchi_muon_step_factor,
    .work = tchi_muon_work,
    .step = step_muon,
};

const tchi_optim_method tchi_method_muon = {
    .name = "muon",
    .set_defaults = set_muon_defaults,
    .set_numbers = tchi_muon_set_numbers,
    .rest_share = tchi_muon_rest_share,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &muon_blocks,
};

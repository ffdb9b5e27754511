/* Muon: the step of a matrix is its orthogonalized momentum.
 *
 *     B <- momentum B + (1 - momentum) G
 *     U  = momentum B + (1 - momentum) G  (nesterov), or B
 *     O  = orthogonalize(U)
 *     p <- (1 - lr weight_decay) p - lr s O
 *
 * Matrices are gathered with their short side first and in the type of the orthogonalization, so that wide and tall
 * matrices of one shape form one batch.
 *
 * NorMuon (Li and others, 2025) divides every row of O by the root of its second moment, so that neurons move by
 * similar amounts.
 *
 *     v_i <- beta2 v_i + (1 - beta2) mean of O_ij^2 over j
 *     D_ij = O_ij / (sqrt(v_i) + eps)
 *     p   <- (1 - lr weight_decay) p - lr s sqrt(min(m, n)) D / |D|
 *
 * s is the factor of adjust_lr_fn, and sqrt(min(m, n)) the norm of an orthogonal matrix, so a step has the length of
 * Muon's; with MATCH_RMS_ADAMW the product is the paper's 0.2 sqrt(m n). As in the paper, v has no bias correction,
 * which |D| would cancel. Rows are those of the parameter's shape. Since blocks have their short side first and
 * parameters may be column-major, the rectangles state which of their sides holds the rows. */
#include <math.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/orthogonalize.h"

#include "config.h"
#include "constant_norm.h"
#include "method.h"
#include "rects.h"
#include "shape.h"
#include "shared/shared.h"

/* --- options, blocks and state ----------------------------------------------------------------------------------- */

static void set_muon_defaults(tch_optim_config *c)
{
    c->lr = 0.02;
    c->weight_decay = 0.1;
    c->momentum = 0.95;
    c->nesterov = 1;
    c->eps = 1e-7;
    c->muon.method = TCH_ORTHO_MINIMAX;
}

static void set_normuon_defaults(tch_optim_config *c)
{
    set_muon_defaults(c);
    c->lr = 1e-3;
    c->beta2 = 0.95;
    c->eps = 1e-8;
    c->muon.adjust_lr_fn = TCH_ADJUST_LR_MATCH_RMS_ADAMW;
}

/* B is the operation table's filter, whose decay rate is beta1. */
static void set_numbers(const tch_optim_config *config, tchi_group_numbers *numbers)
{
    numbers->main.beta1 = config->momentum;
}

/* An AdamW step is about lr per element, and so is a matrix step with MATCH_RMS_ADAMW. Otherwise a matrix step has the
 * norm of an orthogonal matrix, and the usual lr of 0.02 is far above AdamW's. A ratio of 0.3 gives embeddings and
 * biases 0.006, the best rate tried for the rest of a GPT (bench/results/train-lm-33m.json). */
static double rest_share(const tch_optim_config *config)
{
    return config->muon.adjust_lr_fn == TCH_ADJUST_LR_MATCH_RMS_ADAMW ? 1.0 : 0.3;
}

static void set_dims(const tch_optim_config *config, tchi_dims *dims)
{
    tchi_dims_as_matrix(dims);
}

static bool has_blocks(const tch_optim_config *config, const tchi_dims *dims)
{
    return dims->order >= 2;
}

static void name_moments(const tch_optim_config *config, const char *names[TCHI_MOMENTS])
{
    names[0] = "momentum_buffer";
}

static tchi_clock_rule clock_rule(const tch_optim_config *config)
{
    return (tchi_clock_rule){false, TCH_FACTOR_EMA};
}

/* Whether a parameter's first dimension above 1 is the inner one of its matrix in memory. With more than two dimensions
 * the matrix has the outermost in memory on one side and all others on the other, so its rows are those of memory. */
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

/* One per element of the long side, since wide and tall matrices share a block batch. */
static int64_t row_moments(const tchi_block_batch *block_batch)
{
    return block_batch->size[1];
}

static int32_t row_moments_shape(const tchi_block_batch *block_batch, const tchi_block *block, const tchi_param *param,
                                 int64_t *shape)
{
    shape[0] = lies_by_columns(param) ? tchi_block_cols(block_batch, block) : tchi_block_rows(block_batch, block);
    shape[1] = 1;
    return 2;
}

/* --- a run of blocks --------------------------------------------------------------------------------------------- */

static tch_scalar product_type(const tch_context *context, const tch_optim_config *config, tch_scalar real)
{
    return config->muon.ns_dtype == TCH_NS_FLOAT32 ? real : tchi_ortho_type(context, real);
}

static tchi_ortho ortho_of(const tch_optim_config *config)
{
    const double *c = config->muon.ns_coefficients;
    int32_t steps = config->muon.ns_steps > 0 ? config->muon.ns_steps : tchi_ortho_usual_steps(config->muon.method);
    tchi_ortho ortho = tchi_ortho_of(config->muon.method, steps, config->eps);
    if (config->muon.method == TCH_ORTHO_MUON && (c[0] != 0.0 || c[1] != 0.0 || c[2] != 0.0)) {
        ortho = tchi_ortho_repeating((tchi_schulz_step){c[0], c[1], c[2]}, steps, config->eps);
    }
    ortho.without_f16 = config->muon.ns_dtype == TCH_NS_BFLOAT16;
    return ortho;
}

/* The gathered matrices and the scratch of their orthogonalization. */
static int64_t ortho_work(const tch_context *context, const tch_optim_config *config,
                          const tchi_block_batch *block_batch)
{
    tchi_ortho ortho = ortho_of(config);
    tchi_work work = tchi_work_of(block_batch, product_type(context, config, block_batch->real));
    tch_matrices one = tchi_work_matrices(&work, NULL, 1);
    return tchi_work_bytes(&work, 1) + (tchi_orthogonalize_bytes(&ortho, &one) + 255) / 256 * 256;
}

/* Room for the values follows. */
static int64_t muon_work(const tch_context *context, const tch_optim_config *config,
                         const tchi_block_batch *block_batch)
{
    int64_t values = config->constant_norm ? tchi_constant_norm_room(block_batch) : 0;
    return ortho_work(context, config, block_batch) + values;
}

/* The contribution of each row to the norm of a direction follows Muon's buffers. */
static int64_t normuon_work(const tch_context *context, const tch_optim_config *config,
                            const tchi_block_batch *block_batch)
{
    int64_t parts = row_moments(block_batch) * (int64_t)sizeof(double);
    return muon_work(context, config, block_batch) + (parts + 255) / 256 * 256;
}

typedef struct muon_run {
    tch_optimizer *optimizer;
    const tch_optim_config *config;
    tchi_run run;
    tchi_work work;
} muon_run;

/* A matrix of a run as m by n in the parameter's shape, whatever its memory layout. */
typedef struct sides {
    double m, n;
} sides;

static sides sides_of(const muon_run *r, int64_t block)
{
    const tchi_block_batch *batch = r->run.block_batch;
    const tchi_block *b = tchi_block_at(r->optimizer, batch->first + r->run.first + block);
    const tchi_param *p = tchi_block_param(r->optimizer, b);
    int32_t first = 0;
    if (p->cuts != NULL || p->tile >= 0) { /* the order of memory is that of the shape */
        return (sides){(double)tchi_block_rows(batch, b), (double)tchi_block_cols(batch, b)};
    }
    while (p->shape[first] == 1) {
        first++;
    }
    double m = (double)p->shape[first];
    return (sides){m, (double)p->count / m};
}

/* The factor of the learning rate, by adjust_lr_fn. */
static double muon_factor(const tch_optim_config *config, double rows, double cols)
{
    switch (config->muon.adjust_lr_fn) {
    case TCH_ADJUST_LR_ORIGINAL:
        return sqrt(fmax(1.0, rows / cols));
    case TCH_ADJUST_LR_MATCH_RMS_ADAMW:
        return 0.2 * sqrt(fmax(rows, cols));
    default:
        return 1.0;
    }
}

/* Muon's factor times the norm of an orthogonal matrix. */
static double normuon_factor(const tch_optim_config *config, double rows, double cols)
{
    return muon_factor(config, rows, cols) * sqrt(fmin(rows, cols));
}

static tch_status gather_run(const muon_run *r)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "gather gradients");
    bool filtered = tchi_run_param(o, &r->run)->moment[0] == NULL; /* the gradient of a tile, in its buffer */
    tch_filter filter = r->config->nesterov ? TCH_FILTER_NESTEROV : TCH_FILTER_EMA;
    const tch_gathering how = {
        .filter = filtered ? TCH_FILTER_NONE : filter,
        .l2 = tchi_adds_decay(r->config) && !r->run.block_batch->prepared,
    };
    tch_update update =
        tchi_update_run(o, &r->run, &r->work, filtered ? o->scratch : NULL, filtered ? NULL : o->scratch);
    update.moments = tchi_run_param(o, &r->run)->moments;
    return o->context->backend->update->gather(o->context->state, &update, &how, NULL);
}

static tch_status orthogonalize_run(const muon_run *r, tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "orthogonalize");
    tchi_ortho ortho = ortho_of(r->config);
    tch_matrices x = tchi_work_matrices(&r->work, o->scratch, r->run.count);
    void *scratch = o->scratch + tchi_work_bytes(&r->work, r->run.count);
    return tchi_orthogonalize_blocks(o->context, &ortho, &x, r->run.block_batch->all, scratch, direction);
}

/* Rectangles of a run with the direction in block[0], one per block. */
static tch_update update_of(const muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    tchi_work work = r->work;
    work.ld = direction->ld;
    work.stride = direction->stride;
    tch_update update = tchi_update_run(o, &r->run, &work, direction->data, NULL);
    for (int64_t i = 0; i < update.count && !r->run.block_batch->direction; i++) {
        sides s = sides_of(r, o->rects[i].block_index);
        o->rects[i].factor = o->method->blocks->step_factor(r->config, s.m, s.n);
    }
    return update;
}

static tch_status apply_directions(const muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    if (r->config->constant_norm) {
        char *room = o->scratch + r->run.count * ortho_work(o->context, r->config, r->run.block_batch);
        return tchi_constant_norm_apply(o, &r->run, direction, room);
    }
    TCHI_RANGE(o->context, "apply");
    tch_update update = update_of(r, direction);
    return o->context->backend->update->apply(o->context->state, &update, TCH_BLOCK_AS_IS, NULL, NULL, 0,
                                              (tch_decay)r->config->weight_decay_type);
}

/* Requires that a block's rectangle is the whole matrix, by rows. */
static tch_status apply_rows(const muon_run *r, const tch_matrices *direction)
{
    tch_optimizer *o = r->optimizer;
    TCHI_RANGE(o->context, "apply");
    const tchi_block_batch *batch = r->run.block_batch;
    tch_update update = update_of(r, direction);
    char *parts = o->scratch + r->run.count * muon_work(o->context, r->config, batch);
    for (int64_t i = 0; i < update.count; i++) {
        tch_rect *rect = &o->rects[i];
        const tchi_block *block = tchi_block_at(o, batch->first + r->run.first + rect->block_index);
        rect->state[1] = batch->moment + (r->run.first + i) * row_moments(batch) * tchi_scalar_size(batch->real);
        rect->by_column = lies_by_columns(tchi_block_param(o, block));
        rect->rows = tchi_block_rows(batch, block);
        rect->cols = rect->stride = tchi_block_cols(batch, block);
        rect->block_ld = direction->ld;
    }
    return o->context->backend->update->apply_rows(o->context->state, &update, o->norms, (double *)(void *)parts,
                                                   (tch_decay)r->config->weight_decay_type);
}

/* Everything that does not read gradients from their original memory: its arguments do not change, so it can be
 * recorded. */
static tch_status finish_run(void *argument)
{
    const muon_run *r = argument;
    tch_matrices direction;
    TCHI_TRY(orthogonalize_run(r, &direction));
    return r->run.block_batch->moment != NULL ? apply_rows(r, &direction) : apply_directions(r, &direction);
}

/* Only eps is an argument among the hyperparameters that may change between steps; the device reads the others. */
static tch_status step_run(tch_optimizer *o, const tchi_run *run)
{
    const tch_optim_config *config = &tchi_group_at(o, run->block_batch->group)->config;
    tch_scalar type = product_type(o->context, config, run->block_batch->real);
    muon_run r = {o, config, *run, tchi_work_of(run->block_batch, type)};
    tchi_recording_key key = tchi_run_key(o, run, tchi_recording_number(config->eps));
    TCHI_TRY(gather_run(&r));
    return tchi_recorded(o->context, &o->recordings, &key, finish_run, &r);
}

static tch_status step_group(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    return tchi_for_each_run(o, now, group, true, step_run);
}

static const tchi_block_method muon_blocks = {
    .set_dims = set_dims,
    .has_blocks = has_blocks,
    .transposes_tall = true,
    .moments = name_moments,
    .clock_rule = clock_rule,
    .filtered_type = product_type,
    .direction_type = product_type,
    .step_factor = muon_factor,
    .work = muon_work,
    .step = step_group,
};

const tchi_optim_method tchi_method_muon = {
    .name = "muon",
    .keeps_norm = true,
    .set_defaults = set_muon_defaults,
    .set_numbers = set_numbers,
    .rest_share = rest_share,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &muon_blocks,
};

static const tchi_block_method normuon_blocks = {
    .set_dims = set_dims,
    .has_blocks = has_blocks,
    .transposes_tall = true,
    .moments = name_moments,
    .block_state = row_moments,
    .block_state_name = "exp_avg_sq",
    .block_state_shape = row_moments_shape,
    .clock_rule = clock_rule,
    .filtered_type = product_type,
    .step_factor = normuon_factor,
    .work = normuon_work,
    .step = step_group,
};

const tchi_optim_method tchi_method_normuon = {
    .name = "normuon",
    .set_defaults = set_normuon_defaults,
    .check = tchi_config_check_beta2,
    .set_numbers = set_numbers,
    .rest_share = rest_share,
    .elementwise = &tchi_adamw_of_rest,
    .blocks = &normuon_blocks,
};

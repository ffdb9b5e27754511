/* Multiplies gradients by the inverse curvature, in place. Weight and bias of a layer are concatenated in scratch as a
 * matrix p by d, layers of equal sizes are contiguous, and block batches are multiplied at once. The scale of kl_clip
 * depends on all layers, so nothing is written before all are done: results are kept in scratch or, if the limit does
 * not allow that, computed twice. */
#include <math.h>
#include <stdio.h>

#include "core/check.h"
#include "core/status.h"
#include "linalg/batch.h"

#include "kfac.h"

/* --- checks ------------------------------------------------------------------------------------------------------ */

static tch_status check_gradient(const tch_kfac *k, const tchi_kfac_layer *layer, const tch_tensor *gradient,
                                 int32_t ndim, const int64_t *shape, const char *what)
{
    char name[TCHI_KFAC_NAME + 32];
    snprintf(name, sizeof name, "the gradient of %s of layer '%s'", what, layer->name);
    TCHI_TRY(tchi_check_output(k->context, gradient, name));
    TCHI_TRY(tchi_check_float(gradient, name));
    return tchi_check_shape(gradient, name, ndim, shape);
}

static tch_status check_layer_gradients(const tch_kfac *k, const tchi_kfac_layer *layer, const tch_tensor *weight,
                                        const tch_tensor *bias)
{
    int64_t shape[5] = {layer->outputs, layer->inputs};
    int32_t ndim = 2;
    if (layer->layer.kind == TCH_LAYER_CONV) {
        for (int32_t i = 0; i < layer->layer.dims; i++) {
            shape[1] /= layer->layer.kernel[i];
            shape[ndim++] = layer->layer.kernel[i];
        }
    }
    TCHI_TRY(check_gradient(k, layer, weight, ndim, shape, "the weight"));
    if ((bias != NULL) != (layer->bias != 0)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "the gradient of the bias of layer '%s' is %s, expected %s",
                         layer->name, bias != NULL ? "given" : "NULL",
                         layer->bias ? "one: the layer has a bias" : "NULL: the layer has none");
    }
    if (bias == NULL) {
        return TCH_OK;
    }
    TCHI_TRY(check_gradient(k, layer, bias, 1, shape, "the bias"));
    return tchi_check_disjoint(weight, "the weight's gradient", bias, "the bias' gradient");
}

static tch_status check_precondition(const tch_kfac *k, double lr, int32_t count, tch_tensor *const *gradients)
{
    if (count != 2 * k->count || (count > 0 && gradients == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kfac_precondition: %d gradients were given, expected %d, weight and bias of each layer",
                         count, 2 * k->count);
    }
    if (!isfinite(lr) || lr < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_precondition: lr is %g, expected a number, 0 or more", lr);
    }
    for (int32_t i = 0; i < k->count; i++) {
        if (gradients[2 * i] != NULL) {
            TCHI_TRY(check_layer_gradients(k, &k->layers[i], gradients[2 * i], gradients[2 * i + 1]));
        }
    }
    return TCH_OK;
}

/* --- scratch ----------------------------------------------------------------------------------------------------- */

typedef struct work {
    tch_tensor *const *gradients;
    bool clips; /* kl_clip is on */
    bool keeps; /* results of all layers are kept in scratch */
    int64_t elements;
    char *x, *t, *y;      /* gradients of a chunk, intermediate products, and results that are not kept */
    char *send, *receive; /* of a group that shares the work */
    void *scratch;
} work;

static int64_t elements_of(const tchi_kfac_block_batch *c)
{
    return c->size[TCHI_INPUT] * c->size[TCHI_OUTPUT];
}

/* Elements of all layers of the largest block batch; or of the largest layer. */
static int64_t most_elements(const tch_kfac *k, bool of_one)
{
    int64_t most = 0;
    for (int32_t i = 0; i < k->count; i++) {
        const tchi_kfac_block_batch *c = &k->block_batches[k->layers[i].block_batch];
        int64_t elements = (of_one ? k->layers[i].groups : c->count) * elements_of(c);
        most = elements > most ? elements : most;
    }
    return most;
}

/* For the inner product, a chunk is one matrix. */
static int64_t dots_scratch(const tch_kfac *k, int64_t elements)
{
    int64_t most = 0;
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        int64_t d = k->block_batches[i].size[TCHI_INPUT];
        int64_t bytes = k->context->backend->device->scratch_bytes(k->context->state, TCH_SCRATCH_PAIR_DOTS, k->type,
                                                                   (elements + d - 1) / d, d, 1, 0);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static void work_layout(tch_kfac *k, work *w, tchi_arena *arena)
{
    int64_t bytes = w->elements * tchi_scalar_size(k->type);
    w->x = tchi_arena_take(arena, bytes);
    w->t = tchi_arena_take(arena, bytes);
    w->y = w->keeps ? NULL : tchi_arena_take(arena, bytes);
    for (int32_t i = 0; i < k->block_batch_count && w->keeps; i++) {
        tchi_kfac_block_batch *c = &k->block_batches[i];
        c->kept = tchi_arena_take(arena, c->count * elements_of(c) * tchi_scalar_size(k->type));
    }
    w->scratch = tchi_arena_take(arena, w->clips ? dots_scratch(k, w->elements) : 0);
    if (k->comm != NULL) {
        int64_t sent = tchi_kfac_traffic_bytes(k, TCHI_GRADIENTS);
        w->send = tchi_arena_take(arena, sent);
        w->receive = tchi_arena_take(arena, sent * tch_comm_size(k->comm));
    }
}

static int64_t work_bytes(tch_kfac *k, work *w)
{
    tchi_arena arena = {0};
    work_layout(k, w, &arena);
    return arena.used;
}

/* Everything at once if it fits; else without keeping results; else in chunks. */
static void choose_sizes(tch_kfac *k, work *w)
{
    int64_t limit = tch_context_get_workspace_limit(k->context);
    int64_t usable = limit == 0 ? INT64_MAX : limit / 9 * 8; /* the pool rounds up by at most an eighth */
    w->elements = most_elements(k, false);
    w->keeps = w->clips || k->comm != NULL;
    if (work_bytes(k, w) <= usable) {
        return;
    }
    w->keeps = k->comm != NULL; /* results of other ranks cannot be recomputed */
    int64_t least = most_elements(k, true);
    while (w->elements > least && work_bytes(k, w) > usable) {
        w->elements = w->elements / 2 > least ? w->elements / 2 : least;
    }
}

static tch_status reserve_work(tch_kfac *k, work *w)
{
    tchi_arena arena = {0};
    choose_sizes(k, w);
    work_layout(k, w, &arena);
    TCHI_TRY(tchi_arena_reserve(k->context, &arena));
    work_layout(k, w, &arena);
    return TCH_OK;
}

/* --- one chunk: layers of one block batch that follow each other ------------------------------------------------- */

typedef struct chunk {
    const tchi_kfac_block_batch *block_batch;
    const int32_t *layers;
    int32_t count;
    int64_t unit, units;
} chunk;

static tch_matrices rectangles(const tch_kfac *k, const chunk *c, char *data)
{
    return tchi_matrices_new(data, k->type, c->units, c->block_batch->size[TCHI_OUTPUT],
                             c->block_batch->size[TCHI_INPUT]);
}

/* All of them, concatenated by rows. */
static tch_matrices below_each_other(const tch_matrices *m)
{
    return tchi_matrices_new(m->data, m->type, 1, m->batch * m->rows, m->cols);
}

typedef enum direction { READ, WRITE } direction;

static tch_status copy_gradient(const tch_kfac *k, const tch_tensor *tensor, char *data, const int64_t *inside,
                                direction dir)
{
    int64_t strides[TCH_MAX_RANK];
    const tch_array outside = tchi_array_of(tensor, strides);
    const tch_array here = {data, k->type, tensor->ndim, tensor->shape, inside};
    return dir == READ ? k->context->backend->matrix->copy(k->context->state, &here, &outside)
                       : k->context->backend->matrix->copy(k->context->state, &outside, &here);
}

/* Weight and bias of one layer, and the rows they form; groups are consecutive, as in the weight. */
static tch_status copy_layer(const tch_kfac *k, const tchi_kfac_layer *layer, tch_tensor *const *pair, char *data,
                             direction dir)
{
    int64_t d = layer->inputs + layer->bias;
    int64_t inside[TCH_MAX_RANK];
    int64_t stride = 1;
    for (int32_t i = pair[0]->ndim - 1; i > 0; i--) {
        inside[i] = stride;
        stride *= pair[0]->shape[i];
    }
    inside[0] = d;
    TCHI_TRY(copy_gradient(k, pair[0], data, inside, dir));
    return layer->bias ? copy_gradient(k, pair[1], data + layer->inputs * tchi_scalar_size(k->type), inside, dir)
                       : TCH_OK;
}

static tch_status copy_chunk(const tch_kfac *k, const work *w, const chunk *c, const tch_matrices *m, direction dir)
{
    for (int32_t i = 0; i < c->count; i++) {
        const tchi_kfac_layer *layer = &k->layers[c->layers[i]];
        tch_matrices part = tchi_matrices_part(m, layer->unit - c->unit, layer->groups);
        TCHI_TRY(copy_layer(k, layer, w->gradients + 2 * (int64_t)c->layers[i], part.data, dir));
    }
    return TCH_OK;
}

/* The refreshed results of the chunk's factors on one side. */
static tch_matrices results_of(const tch_kfac *k, const chunk *c, int side)
{
    const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, c->block_batch, side);
    return tchi_kfac_results(k, f, c->block_batch->position[side] + c->unit, c->units);
}

/* Y = G^-1 X A^-1. */
static tch_status by_inverses(const tch_kfac *k, const chunk *c, const tch_matrices *x, const tch_matrices *t,
                              const tch_matrices *y)
{
    const tch_backend *b = k->context->backend;
    tch_matrices a = results_of(k, c, TCHI_INPUT);
    tch_matrices g = results_of(k, c, TCHI_OUTPUT);
    TCHI_TRY(b->matrix->gemm(k->context->state, 1.0, &g, 0, x, 0, 0.0, 0, t));
    return b->matrix->gemm(k->context->state, 1.0, t, 0, &a, 0, 0.0, 0, y);
}

static tch_status divide_by_eigenvalues(const tch_kfac *k, const chunk *c, const tch_matrices *y)
{
    const tch_backend *b = k->context->backend;
    if (c->block_batch->scales != NULL) {
        tch_matrices all = tchi_matrices_new(c->block_batch->scales, k->type, c->block_batch->count, y->rows, y->cols);
        tch_matrices scales = tchi_matrices_part(&all, c->unit, c->units);
        return b->sample->damped_divide(k->context->state, y, NULL, NULL, &scales, k->config.damping);
    }
    const tchi_kfac_factor_batch *a = tchi_kfac_factor_batch_of(k, c->block_batch, TCHI_INPUT);
    const tchi_kfac_factor_batch *g = tchi_kfac_factor_batch_of(k, c->block_batch, TCHI_OUTPUT);
    tch_matrices cols = tchi_kfac_values(k, a, c->block_batch->position[TCHI_INPUT] + c->unit, c->units);
    tch_matrices rows = tchi_kfac_values(k, g, c->block_batch->position[TCHI_OUTPUT] + c->unit, c->units);
    return b->sample->damped_divide(k->context->state, y, &rows, &cols, NULL, k->config.damping);
}

/* Y = Q_G' [(Q_G X Q_A') / ...] Q_A. */
static tch_status by_bases(const tch_kfac *k, const chunk *c, const tch_matrices *x, const tch_matrices *t,
                           const tch_matrices *y)
{
    const tch_backend *b = k->context->backend;
    void *state = k->context->state;
    tch_matrices a = results_of(k, c, TCHI_INPUT);
    tch_matrices g = results_of(k, c, TCHI_OUTPUT);
    TCHI_TRY(b->matrix->gemm(state, 1.0, &g, 0, x, 0, 0.0, 0, t));
    TCHI_TRY(b->matrix->gemm(state, 1.0, t, 0, &a, 1, 0.0, 0, y));
    TCHI_TRY(divide_by_eigenvalues(k, c, y));
    TCHI_TRY(b->matrix->gemm(state, 1.0, &g, 1, y, 0, 0.0, 0, t));
    return b->matrix->gemm(state, 1.0, t, 0, &a, 0, 0.0, 0, y);
}

/* --- all chunks -------------------------------------------------------------------------------------------------- */

/* A pass over all layers: without kl_clip one DELIVER, with it MEASURE first. In a group, MAKE of the local layers
 * precedes. */
typedef enum pass { MAKE, MEASURE, DELIVER } pass;

/* Gathers a chunk's gradients into x, and computes y unless it is kept. */
static tch_status prepare_chunk(tch_kfac *k, const work *w, const chunk *c, pass now, const tch_matrices *x,
                                const tch_matrices *y)
{
    bool computes = now == MAKE || (now == MEASURE && k->comm == NULL) || !w->keeps;
    tch_matrices t = rectangles(k, c, w->t);
    TCHI_TRY(computes || now == MEASURE ? copy_chunk(k, w, c, x, READ) : TCH_OK);
    if (!computes) {
        return TCH_OK;
    }
    return k->config.method == TCH_KFAC_INVERSE ? by_inverses(k, c, x, &t, y) : by_bases(k, c, x, &t, y);
}

static tch_status run_pass_on_chunk(tch_kfac *k, const work *w, const chunk *c, pass now)
{
    const tch_backend *b = k->context->backend;
    int64_t at = c->unit * elements_of(c->block_batch) * tchi_scalar_size(k->type);
    tch_matrices x = rectangles(k, c, w->x);
    tch_matrices y = rectangles(k, c, w->keeps ? c->block_batch->kept + at : w->y);
    tch_matrices x_one = below_each_other(&x);
    tch_matrices y_one = below_each_other(&y);
    TCHI_TRY(prepare_chunk(k, w, c, now, &x, &y));
    if (now == MAKE) {
        return TCH_OK;
    }
    if (now == MEASURE) {
        return b->sample->pair_dots(k->context->state, &x_one, &y_one, 1, 1.0, &k->control->dot, w->scratch);
    }
    if (w->clips) {
        TCHI_TRY(b->matrix->shift_scale(k->context->state, &y_one, NULL, &k->control->scale, 1.0, &y_one));
    }
    return copy_chunk(k, w, c, &y, WRITE);
}

static bool is_preconditioned(const tch_kfac *k, const work *w, int32_t layer, pass now)
{
    return w->gradients[2 * (int64_t)layer] != NULL && tchi_kfac_counts(k, layer)[TCHI_REFRESHES] > 0 &&
           (now != MAKE || tchi_kfac_is_mine(k, layer));
}

/* Consecutive participating layers from `first` on that fit. */
static chunk next_chunk(const tch_kfac *k, const work *w, const tchi_kfac_block_batch *block_batch, int32_t first,
                        pass now)
{
    const int32_t *layers = k->order + block_batch->first;
    chunk c = {.block_batch = block_batch, .layers = layers + first, .unit = k->layers[layers[first]].unit};
    for (int32_t i = first; i < block_batch->layers && is_preconditioned(k, w, layers[i], now); i++) {
        int64_t units = c.units + k->layers[layers[i]].groups;
        if (units * elements_of(block_batch) > w->elements) {
            break;
        }
        c.units = units;
        c.count++;
    }
    return c;
}

static tch_status run_pass(tch_kfac *k, const work *w, pass now)
{
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        for (int32_t first = 0; first < k->block_batches[i].layers;) {
            chunk c = next_chunk(k, w, &k->block_batches[i], first, now);
            if (c.count > 0) {
                TCHI_TRY(run_pass_on_chunk(k, w, &c, now));
            }
            first += c.count > 0 ? c.count : 1;
        }
    }
    return TCH_OK;
}

static tch_status find_kl_scale(tch_kfac *k, const work *w, double lr)
{
    const tch_backend *b = k->context->backend;
    TCHI_TRY(b->device->zero_bytes(k->context->state, &k->control->dot, sizeof k->control->dot));
    TCHI_TRY(run_pass(k, w, MEASURE));
    return b->sample->clip_weights(k->context->state, TCH_CLIP_KL, 1, &k->control->dot, lr * lr, k->config.kl_clip,
                                   &k->control->scale);
}

tch_status tch_kfac_precondition(tch_kfac *kfac, double lr, int32_t count, tch_tensor *const *gradients)
{
    TCHI_TRY(tchi_kfac_usable(kfac, "tch_kfac_precondition"));
    TCHI_ENTER(kfac->context, "tch_kfac_precondition");
    TCHI_TRY(check_precondition(kfac, lr, count, gradients));
    work w = {.gradients = gradients, .clips = kfac->config.kl_clip > 0.0};
    TCHI_TRY(reserve_work(kfac, &w));
    if (kfac->comm != NULL) { /* owners compute their layers, then all ranks receive them */
        TCHI_TRY(run_pass(kfac, &w, MAKE));
        TCHI_TRY(tchi_kfac_note(kfac, tchi_kfac_exchange(kfac, TCHI_GRADIENTS, w.send, w.receive)));
    }
    if (w.clips) {
        TCHI_TRY(find_kl_scale(kfac, &w, lr));
    }
    return run_pass(kfac, &w, DELIVER);
}

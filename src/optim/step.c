/* One step, from the caller's gradients to the operations of each group. All argument errors are found before the first
 * write; a later failure marks the optimizer failed. */
#include <stdio.h>
#include <string.h>

#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "core/list.h"
#include "method.h"
#include "rects.h"
#include "shared/shared.h"

/* --- gradients --------------------------------------------------------------------------------------------------- */

static bool same_shape(const tchi_param *p, const tch_tensor *grad)
{
    bool same = grad->ndim == p->ndim;
    for (int32_t k = 0; same && k < p->ndim; k++) {
        same = grad->shape[k] == p->shape[k];
    }
    return same;
}

static tch_status check_gradient(const tch_context *context, const tchi_param *p, const tch_tensor *grad)
{
    char text[TCHI_DESCRIBE_SIZE];
    char name[TCHI_NAME_SIZE + 32];
    if (tchi_check_input(context, grad, p->name) == TCH_OK && same_shape(p, grad)) {
        tch_scalar type = tchi_scalar_of(grad->dtype);
        bool fp16 = type == TCH_SCALAR_F16 || type == TCH_SCALAR_BF16;
        if (type == p->type || (p->type == TCH_SCALAR_F32 && fp16)) {
            return TCH_OK;
        }
    }
    snprintf(name, sizeof name, "the gradient of '%s'", p->name);
    TCHI_TRY(tchi_check_input(context, grad, name));
    if (!same_shape(p, grad)) {
        tch_tensor shape = {.ndim = p->ndim, .shape = (int64_t *)p->shape};
        char expected[TCHI_DESCRIBE_SIZE];
        return tchi_fail(TCH_ERR_SHAPE, "%s is %s, expected the parameter's shape %s", name,
                         tchi_describe(grad, text, sizeof text),
                         tchi_describe_shape(&shape, expected, sizeof expected));
    }
    return tchi_fail(TCH_ERR_DTYPE, "%s is %s, expected the parameter's type (or, where that is float32, a half type)",
                     name, tchi_describe(grad, text, sizeof text));
}

static bool same_layout(const tchi_param *p, const tch_tensor *grad)
{
    for (int32_t k = 0; k < p->ndim; k++) {
        if (p->shape[k] > 1 && tchi_tensor_stride(grad, k) != p->strides[k]) {
            return false;
        }
    }
    return true;
}

static int64_t copy_bytes_of(const tchi_param *p, const tch_tensor *grad)
{
    int64_t bytes = p->count * tchi_scalar_size(tchi_scalar_of(grad->dtype));
    return (bytes + 255) / 256 * 256;
}

static tch_status check_scalar(const tch_context *context, const tch_tensor *tensor, const char *name)
{
    if (tensor == NULL) {
        return TCH_OK;
    }
    TCHI_TRY(tchi_check_input(context, tensor, name));
    TCHI_TRY(tchi_check_dtype(tensor, name, TCH_FLOAT32));
    if (tch_tensor_numel(tensor) != 1) {
        char text[TCHI_DESCRIBE_SIZE];
        return tchi_fail(TCH_ERR_SHAPE, "%s is %s, expected one element", name,
                         tchi_describe(tensor, text, sizeof text));
    }
    return TCH_OK;
}

/* Checks all arguments, and reserves memory for gradients that must be copied. */
static tch_status check_step(tch_optimizer *o, int32_t count, const tch_tensor *const *gradients,
                             const tch_tensor *grad_scale, const tch_tensor *found_inf)
{
    if (o->failed != TCH_OK) {
        return tchi_fail(o->failed,
                         "an earlier step of this optimizer failed on the device, and its state is incomplete; "
                         "load a checkpoint or make a new one");
    }
    if (count != o->params.count || (count > 0 && gradients == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_optimizer_step: %d gradients were given, expected %lld, one for each parameter", count,
                         (long long)o->params.count);
    }
    TCHI_TRY(check_scalar(o->context, grad_scale, "grad_scale"));
    TCHI_TRY(check_scalar(o->context, found_inf, "found_inf"));
    int64_t copies = 0;
    for (int32_t i = 0; i < count; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        if (gradients[i] != NULL) {
            TCHI_TRY(check_gradient(o->context, p, gradients[i]));
            copies += same_layout(p, gradients[i]) ? 0 : copy_bytes_of(p, gradients[i]);
        }
    }
    if (copies > o->copies_bytes) {
        void *fresh;
        TCHI_TRY(tchi_pool_allocate(o->context->pool, copies, &fresh));
        tchi_pool_free(o->context->pool, o->copies);
        o->copies = fresh;
        o->copies_bytes = copies;
    }
    return TCH_OK;
}

/* Copies a gradient to the parameter's dense layout. */
static tch_status lay_out(tch_optimizer *o, const tchi_param *p, const tch_tensor *grad, int64_t *used,
                          tchi_gradient *gradient)
{
    int64_t strides[TCH_MAX_RANK];
    *gradient = (tchi_gradient){tchi_tensor_data(grad), tchi_scalar_of(grad->dtype)};
    if (p->count == 0) {
        /* never read; a non-NULL address keeps its clock advancing */
        gradient->data = o->shared != NULL ? (char *)o->control : NULL;
    } else if (!same_layout(p, grad)) {
        tch_array from = tchi_array_of(grad, strides);
        gradient->data = o->copies + *used;
        *used += copy_bytes_of(p, grad);
        tch_array to = {gradient->data, gradient->type, p->ndim, p->shape, p->strides};
        return o->context->backend->matrix->copy(o->context->state, &to, &from);
    }
    return TCH_OK;
}

static tch_status take_gradients(tch_optimizer *o, const tch_tensor *const *gradients, const tchi_step *now)
{
    int64_t used = 0;
    for (int32_t i = 0; i < o->params.count; i++) {
        now->gradients[i] = (tchi_gradient){0};
        if (!now->refuses && gradients != NULL && gradients[i] != NULL) {
            TCHI_TRY(lay_out(o, tchi_param_at(o, i), gradients[i], &used, &now->gradients[i]));
        }
    }
    return TCH_OK;
}

/* --- whether to take the step ------------------------------------------------------------------------------------ */

static tch_status find_nonfinite(tch_optimizer *o, int32_t group, const tch_update *update)
{
    return o->context->backend->update->inspect_gradients(o->context->state, update, 0, &o->control->found, NULL);
}

/* Finds the first parameter with a non-finite gradient, for the message. The step has failed, so speed does not
 * matter. */
static tch_status name_nonfinite(tch_optimizer *o, const tchi_step *now)
{
    const tch_backend *t = o->context->backend;
    for (int32_t i = 0; i < o->params.count; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        const tchi_gradient *gradient = &now->gradients[i];
        int32_t found = 0;
        if (gradient->data == NULL) {
            continue;
        }
        tch_update update = tchi_update_of(o, now, p->group, &tchi_group_at(o, p->group)->numbers->main);
        tch_rect rect = {.grad = gradient->data, .clock = p->clock, .rows = 1, .cols = p->count, .stride = p->count};
        update.rects = &rect;
        update.count = 1;
        update.real = update.block_type = p->real;
        update.param_type = p->type;
        update.grad_type = gradient->type;
        TCHI_TRY(t->device->zero_bytes(o->context->state, &o->control->found, sizeof found));
        TCHI_TRY(t->update->inspect_gradients(o->context->state, &update, 0, &o->control->found, NULL));
        TCHI_TRY(t->device->copy_bytes(o->context->state, &found, &o->control->found, sizeof found, TCH_COPY_TO_HOST));
        if (found) {
            return tchi_fail(TCH_ERR_NUMERIC,
                             "the gradient of '%s' has entries that are infinite or NaN; nothing was changed", p->name);
        }
    }
    return tchi_fail(TCH_ERR_NUMERIC, "%s says that a gradient is not finite; nothing was changed",
                     o->shared != NULL ? "another rank of the group, or found_inf," : "found_inf");
}

/* First roots and bases are computed at a parameter's first step, by a schedule on the host, which must know whether
 * that step was taken: loss scaling skips the first steps of most training runs. */
static bool begins_something(const tch_optimizer *o, const tchi_step *now)
{
    const tchi_block_method *blocks = o->method->blocks;
    bool schedules = blocks != NULL && blocks->begins != NULL;
    for (int32_t i = 0; i < o->params.count && schedules; i++) {
        const tchi_param *p = tchi_param_at(o, i);
        if (now->gradients[i].data != NULL && p->blocked &&
            p->steps_seen < blocks->begins(&tchi_group_at(o, p->group)->config)) {
            return true;
        }
    }
    return false;
}

/* The decision stays on the device. It is also copied to *skipped if that needs no synchronization, if non-finite
 * gradients are an error, or if first roots or bases are scheduled. */
static tch_status decide(tch_optimizer *o, const tchi_step *now, const tch_tensor *found_inf, bool *skipped)
{
    const tch_backend *t = o->context->backend;
    tch_nonfinite policy = tchi_group_at(o, 0)->config.numerics.nonfinite;
    bool look = policy != TCH_NONFINITE_IGNORE && found_inf == NULL;
    const float *told = found_inf == NULL ? NULL : tchi_tensor_data(found_inf);
    if (look) {
        TCHI_TRY(t->device->zero_bytes(o->context->state, &o->control->found, sizeof o->control->found));
    }
    for (int32_t i = 0; look && i < o->groups.count; i++) {
        TCHI_TRY(tchi_for_each_type(o, now, i, true, &tchi_group_at(o, i)->numbers->main, find_nonfinite));
    }
    const int32_t *found = look ? &o->control->found : NULL;
    const int32_t *agreement = NULL;
    if (o->shared != NULL) {
        TCHI_TRY(tchi_shared_agree(o, now, found, told, &found, &agreement));
        told = NULL;
    }
    TCHI_TRY(t->update->decide_skip(o->context->state, found, told, agreement, &o->control->skip, o->control->counts));
    *skipped = false;
    bool possible = look || found_inf != NULL || o->shared != NULL;
    if (possible && (policy == TCH_NONFINITE_RAISE || t->host_memory || begins_something(o, now))) {
        int32_t skip;
        TCHI_TRY(t->device->copy_bytes(o->context->state, &skip, &o->control->skip, sizeof skip, TCH_COPY_TO_HOST));
        *skipped = skip != 0;
    }
    return TCH_OK;
}

static tch_status look_at_gradients(tch_optimizer *o, const tch_tensor *const *gradients, const tch_tensor *found_inf,
                                    const tchi_step *now, bool *skipped)
{
    TCHI_RANGE(o->context, "look at gradients");
    TCHI_TRY(take_gradients(o, gradients, now));
    return decide(o, now, found_inf, skipped);
}

/* --- hyperparameters and clocks ---------------------------------------------------------------------------------- */

static tchi_group_numbers numbers_of(const tchi_optim_method *method, const tchi_group *g)
{
    const tch_optim_config *c = &g->config;
    double ratio = tchi_config_adamw_ratio(c);
    bool stays = g->lr != NULL && c->adamw.lr > 0.0 && ratio == 0.0; /* the host does not know the device's value */
    tchi_group_numbers n = {0};
    n.main = (tch_hyper){.lr = c->lr,
                         .beta1 = c->beta1,
                         .beta2 = c->beta2,
                         .eps = c->eps,
                         .weight_decay = c->weight_decay,
                         .momentum = c->momentum,
                         .dampening = c->dampening,
                         .graft_beta2 = c->shampoo.grafting_beta2,
                         .graft_eps = c->shampoo.grafting_eps};
    n.scalar = (tch_hyper){.lr = stays ? c->adamw.lr : tchi_config_adamw_lr(c),
                           .beta1 = c->adamw.beta1,
                           .beta2 = c->adamw.beta2,
                           .eps = c->adamw.eps,
                           .weight_decay = c->adamw.weight_decay >= 0.0 ? c->adamw.weight_decay : c->weight_decay,
                           .spare = {ratio}};
    if (method->set_numbers != NULL) {
        method->set_numbers(c, &n);
    }
    n.tile = n.main;
    n.tile.lr = -1.0;
    n.tile.weight_decay = 0.0;
    return n;
}

static tch_status store_numbers(tch_optimizer *o, tchi_group *g)
{
    tchi_group_numbers n = numbers_of(o->method, g);
    enum { COUNT = 4 * sizeof(tch_hyper) / sizeof(double) }; /* the four are contiguous */
    double values[COUNT];
    memcpy(values, &n, sizeof values);
    return o->context->backend->device->copy_bytes(o->context->state, g->numbers, values, sizeof values,
                                                   TCH_COPY_NUMBERS);
}

static tch_status read_lr(tch_optimizer *o, tchi_group *g)
{
    const tch_array from = {tchi_tensor_data(g->lr), tchi_scalar_of(g->lr->dtype), 0, NULL, NULL};
    const tch_array to = {&g->numbers->main.lr, TCH_SCALAR_F64, 0, NULL, NULL};
    TCHI_TRY(o->context->backend->matrix->copy(o->context->state, &to, &from));
    if (g->config.adamw.lr == 0.0) {
        const tch_array scalar = {&g->numbers->scalar.lr, TCH_SCALAR_F64, 0, NULL, NULL};
        return o->context->backend->matrix->copy(o->context->state, &scalar, &from);
    }
    if (tchi_config_adamw_ratio(&g->config) == 0.0) {
        return TCH_OK;
    }
    const double *ratio = g->numbers->scalar.spare;
    const tch_matrices lr = {from.data, from.type, 1, 1, 1, 1, 1};
    const tch_matrices scalar = {&g->numbers->scalar.lr, TCH_SCALAR_F64, 1, 1, 1, 1, 1};
    return o->context->backend->matrix->shift_scale(o->context->state, &lr, NULL, ratio, 1.0, &scalar);
}

static const tch_hyper *elementwise_numbers(const tch_optimizer *o, const tchi_group *g)
{
    return o->method->elementwise->of_rest ? &g->numbers->scalar : &g->numbers->main;
}

static bool waits(const tchi_block_method *blocks, const tchi_param *p)
{
    return p->blocked && blocks->waits != NULL && blocks->waits(p);
}

static int64_t list_clocks(tch_optimizer *o, const tchi_step *now, const tchi_group *g, bool blocked)
{
    tch_clock **clocks = o->clock_list.items;
    int64_t count = 0;
    for (int32_t i = 0; i < g->params; i++) {
        tchi_param *p = tchi_param_at(o, g->first_param + i);
        if (now->gradients[p->index].data != NULL && p->blocked == blocked && !waits(o->method->blocks, p)) {
            clocks[count++] = p->clock;
        }
    }
    return count;
}

static tch_status advance_blocks(tch_optimizer *o, const tchi_step *now, tchi_group *g)
{
    const tchi_block_method *blocks = o->method->blocks;
    int64_t count = list_clocks(o, now, g, true);
    tchi_clock_rule rule = blocks->clock_rule(&g->config);
    TCHI_TRY(o->context->backend->update->advance(o->context->state, count, o->clock_list.items, &g->numbers->main,
                                                  &o->control->skip, rule.correct, rule.factors));
    return blocks->advance == NULL ? TCH_OK : blocks->advance(o, g);
}

static tch_status advance(tch_optimizer *o, const tchi_step *now, tchi_group *g)
{
    int64_t count = list_clocks(o, now, g, false);
    TCHI_TRY(o->context->backend->update->advance(o->context->state, count, o->clock_list.items,
                                                  elementwise_numbers(o, g), &o->control->skip, 1, TCH_FACTOR_EMA));
    return o->method->blocks == NULL ? TCH_OK : advance_blocks(o, now, g);
}

/* --- the step ---------------------------------------------------------------------------------------------------- */

/* Counts on the host, including steps that were skipped without the host's knowledge; the refresh schedule uses this
 * count. */
static void count_step(tch_optimizer *o, const tch_tensor *const *gradients, const tchi_step *now)
{
    for (int32_t i = 0; i < o->params.count; i++) {
        tchi_param *p = tchi_param_at(o, i);
        p->was_absent = now->refuses ? gradients == NULL || gradients[i] == NULL : now->gradients[i].data == NULL;
        p->clock_before = p->clock_id;
        if (!p->was_absent) {
            p->steps_seen++;
            p->clock_id = (p->clock_id ^ (uint64_t)(o->steps + 1)) * 0x9E3779B97F4A7C15u;
        }
    }
}

/* The ranks have not agreed on the step that was counted last, and the devices have skipped it. */
static void take_back_count(tch_optimizer *o)
{
    for (int32_t i = 0; i < o->params.count && o->counted; i++) {
        tchi_param *p = tchi_param_at(o, i);
        p->steps_seen -= !p->was_absent;
        p->clock_id = p->clock_before;
    }
    o->steps -= o->counted;
    o->counted = false;
}

static tch_status update_elements(tch_optimizer *o, int32_t group, const tch_update *update)
{
    const tch_optim_config *config = &tchi_group_at(o, group)->config;
    const tchi_elementwise *method = o->method->elementwise;
    const tch_elementwise_rule rule = {method->kind, (tch_decay)config->weight_decay_type,
                                       config->amsgrad && !method->of_rest, config->nesterov};
    return o->context->backend->update->elementwise(o->context->state, update, &rule);
}

/* Elementwise updates: one launch for all parameters of the same types. */
static tch_status step_elementwise(tch_optimizer *o, const tchi_step *now, int32_t group)
{
    TCHI_RANGE(o->context, "elementwise");
    return tchi_for_each_type(o, now, group, false, elementwise_numbers(o, tchi_group_at(o, group)), update_elements);
}

static tch_status step_group(tch_optimizer *o, const tchi_step *now, int32_t index)
{
    tchi_group *g = tchi_group_at(o, index);
    if (g->numbers_changed) {
        TCHI_TRY(store_numbers(o, g));
        g->numbers_changed = false;
    }
    if (g->lr != NULL) {
        TCHI_TRY(read_lr(o, g));
    }
    TCHI_TRY(advance(o, now, g));
    TCHI_TRY(tchi_exchange_begin(o, now, index));
    if (g->block_batches > 0) {
        TCHI_TRY(o->method->blocks->step(o, now, index));
    }
    TCHI_TRY(step_elementwise(o, now, index));
    return tchi_exchange_finish(o, now, index);
}

static tch_status run_step(tch_optimizer *o, const tch_tensor *const *gradients, const tch_tensor *found_inf,
                           const tchi_step *now, bool *skipped)
{
    bool ends;
    o->counted = false;
    TCHI_TRY(look_at_gradients(o, gradients, found_inf, now, skipped));
    TCHI_TRY(tchi_shared_ends(o, *skipped, &ends));
    if (ends) {
        return TCH_OK;
    }
    count_step(o, gradients, now);
    if (o->shared != NULL) {
        tchi_shared_follow(o, now);
    }
    o->lends_workspace = tchi_can_record(o->context);
    for (int32_t i = 0; i < o->groups.count; i++) {
        TCHI_TRY(step_group(o, now, i));
    }
    o->steps++;
    o->counted = true;
    return TCH_OK;
}

/* Reports that the ranks do not agree on a step, or their failure. */
static tch_status finish_step(tch_optimizer *o, bool skipped)
{
    tch_status status = o->shared == NULL ? TCH_OK : tchi_shared_finish(o, skipped);
    if (status != TCH_OK && !o->shared->asked) {
        take_back_count(o);
    }
    return status;
}

static tch_status look_back(tch_optimizer *o)
{
    tch_status status = o->shared == NULL ? TCH_OK : tchi_shared_look_back(o);
    if (status != TCH_OK) {
        take_back_count(o);
    }
    return status;
}

tch_status tch_optimizer_step_scaled(tch_optimizer *optimizer, int32_t count, const tch_tensor *const *gradients,
                                     const tch_tensor *grad_scale, const tch_tensor *found_inf)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_step: optimizer is NULL");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_step");
    char message[1024] = "";
    tch_status checked = check_step(optimizer, count, gradients, grad_scale, found_inf);
    bool meets = optimizer->shared != NULL && tch_comm_size(optimizer->shared->comm) > 1;
    if (checked != TCH_OK && (!meets || optimizer->failed != TCH_OK)) {
        return checked;
    }
    snprintf(message, sizeof message, "%s", checked == TCH_OK ? "" : tch_last_error());
    TCHI_TRY(look_back(optimizer));
    bool skipped = false;
    tchi_gradient *gradient_list = optimizer->gradient_list.items; /* has room for all; those of tiles follow */
    const tchi_step now = {gradient_list, gradient_list + optimizer->params.count,
                           grad_scale == NULL || checked != TCH_OK ? NULL : tchi_tensor_data(grad_scale),
                           checked != TCH_OK};
    if (count != optimizer->params.count) {
        gradients = NULL; /* and checked is an error */
    }
    optimizer->failed = run_step(optimizer, gradients, checked == TCH_OK ? found_inf : NULL, &now, &skipped);
    tch_status finished = finish_step(optimizer, skipped);
    if (checked != TCH_OK && optimizer->failed == TCH_OK) {
        return tchi_fail(checked, "%s", message);
    }
    TCHI_TRY(finished);
    bool raise = skipped && tchi_group_at(optimizer, 0)->config.numerics.nonfinite == TCH_NONFINITE_RAISE;
    return raise && optimizer->failed == TCH_OK ? name_nonfinite(optimizer, &now) : optimizer->failed;
}

tch_status tch_optimizer_step(tch_optimizer *optimizer, int32_t count, const tch_tensor *const *gradients)
{
    return tch_optimizer_step_scaled(optimizer, count, gradients, NULL, NULL);
}

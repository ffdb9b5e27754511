/* Queries, and changes between steps. */
#include <math.h>

#include "core/check.h"
#include "core/status.h"

#include "config.h"
#include "refresh.h"
#include "method.h"
#include "shape.h"

static tch_status check_group(const tch_optimizer *o, const char *function, int32_t group)
{
    if (o == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: optimizer is NULL", function);
    }
    if (group < 0 || group >= o->groups.count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: group is %d, expected 0 to %lld", function, group,
                         (long long)o->groups.count - 1);
    }
    return TCH_OK;
}

int32_t tch_optimizer_group_count(const tch_optimizer *optimizer)
{
    return optimizer == NULL ? 0 : (int32_t)optimizer->groups.count;
}

int32_t tch_optimizer_parameter_count(const tch_optimizer *optimizer)
{
    return optimizer == NULL ? 0 : (int32_t)optimizer->params.count;
}

tch_status tch_optimizer_get_config(const tch_optimizer *optimizer, int32_t group, tch_optim_config *config)
{
    TCHI_TRY(check_group(optimizer, "tch_optimizer_get_config", group));
    if (config == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_get_config: config is NULL");
    }
    *config = tchi_group_at(optimizer, group)->config;
    return TCH_OK;
}

tch_status tch_optimizer_set_config(tch_optimizer *optimizer, int32_t group, const tch_optim_config *config)
{
    TCHI_TRY(check_group(optimizer, "tch_optimizer_set_config", group));
    TCHI_TRY(tchi_config_check("tch_optimizer_set_config", config));
    tchi_group *g = tchi_group_at(optimizer, group);
    TCHI_TRY(tchi_config_check_change(&g->config, config));
    if (optimizer->method->check_change != NULL) {
        TCHI_TRY(optimizer->method->check_change(&g->config, config));
    }
    tch_optim_config next = *config;
    tchi_config_fix_ratio(&next, &g->config);
    g->config = next;
    g->numbers_changed = true;
    return TCH_OK;
}

tch_status tch_optimizer_set_lr(tch_optimizer *optimizer, int32_t group, double lr)
{
    TCHI_TRY(check_group(optimizer, "tch_optimizer_set_lr", group));
    tch_optim_config config = tchi_group_at(optimizer, group)->config;
    config.lr = lr;
    TCHI_TRY(tchi_config_check("tch_optimizer_set_lr", &config));
    tchi_group_at(optimizer, group)->config.lr = lr;
    tchi_group_at(optimizer, group)->numbers_changed = true;
    return TCH_OK;
}

tch_status tch_optimizer_set_lr_tensor(tch_optimizer *optimizer, int32_t group, const tch_tensor *lr)
{
    TCHI_TRY(check_group(optimizer, "tch_optimizer_set_lr_tensor", group));
    tchi_group *g = tchi_group_at(optimizer, group);
    if (lr == NULL) {
        g->lr = NULL;
        g->numbers_changed = true;
        return TCH_OK;
    }
    TCHI_TRY(tchi_check_input(optimizer->context, lr, "lr"));
    tch_scalar type = tchi_scalar_of(lr->dtype);
    char text[TCHI_DESCRIBE_SIZE];
    if ((type != TCH_SCALAR_F32 && type != TCH_SCALAR_F64) || tch_tensor_numel(lr) != 1) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "lr is %s, expected one float32 or float64 number",
                         tchi_describe(lr, text, sizeof text));
    }
    g->lr_tensor = (tch_tensor){.data = tchi_tensor_data(lr), .device = lr->device, .dtype = lr->dtype};
    g->numbers_changed = g->numbers_changed || g->lr == NULL; /* lr == 0 no longer disables AdamW's part */
    g->lr = &g->lr_tensor;
    return TCH_OK;
}

static tch_status check_apart_from_others(const tch_optimizer *o, int32_t parameter, const char *data)
{
    const tchi_param *p = tchi_param_at(o, parameter);
    const char *end = data + p->count * tchi_scalar_size(p->type);
    for (int32_t i = 0; i < o->params.count; i++) {
        const tchi_param *other = tchi_param_at(o, i);
        if (i != parameter && other->data < end && data < other->data + other->count * tchi_scalar_size(other->type)) {
            return tchi_fail(TCH_ERR_LAYOUT, "the tensor for '%s' shares memory with parameter '%s'", p->name,
                             other->name);
        }
    }
    return TCH_OK;
}

tch_status tch_optimizer_set_parameter(tch_optimizer *optimizer, int32_t parameter, tch_tensor *tensor)
{
    if (optimizer == NULL || parameter < 0 || parameter >= optimizer->params.count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_set_parameter: there is no parameter %d", parameter);
    }
    tchi_param *p = tchi_param_at(optimizer, parameter);
    char text[TCHI_DESCRIBE_SIZE];
    TCHI_TRY(tchi_check_output(optimizer->context, tensor, p->name));
    bool same = tensor->ndim == p->ndim && tchi_scalar_of(tensor->dtype) == p->type;
    for (int32_t k = 0; same && k < p->ndim; k++) {
        same = tensor->shape[k] == p->shape[k] &&
               (tensor->shape[k] <= 1 || tchi_tensor_stride(tensor, k) == p->strides[k]);
    }
    if (!same) {
        return tchi_fail(TCH_ERR_SHAPE,
                         "the tensor for '%s' is %s, expected the shape, type and layout it was made with", p->name,
                         tchi_describe(tensor, text, sizeof text));
    }
    TCHI_TRY(check_apart_from_others(optimizer, parameter, tchi_tensor_data(tensor)));
    if (p->data != (char *)tchi_tensor_data(tensor)) {
        tchi_recordings_clear(optimizer->context, &optimizer->recordings);
    }
    p->data = tchi_tensor_data(tensor);
    return TCH_OK;
}

/* --- state and statistics ---------------------------------------------------------------------------------------- */

int32_t tch_optimizer_state_count(const tch_optimizer *optimizer)
{
    return optimizer == NULL ? 0 : (int32_t)optimizer->states.count;
}

tch_status tch_optimizer_get_state(tch_optimizer *optimizer, int32_t index, tch_optim_state *state)
{
    if (optimizer == NULL || index < 0 || index >= optimizer->states.count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_get_state: there is no state %d", index);
    }
    if (state == NULL || state->struct_size != sizeof *state) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_optimizer_get_state: state must point to a struct set to TCH_OPTIM_STATE_INIT");
    }
    tchi_state *s = tchi_state_at(optimizer, index);
    *state = (tch_optim_state){sizeof *state, s->name, s->param, &s->tensor};
    return TCH_OK;
}

/* Reads the flags and residuals of one factor batch, in chunks. */
static tch_status read_factor_batch(const tch_optimizer *o, const tchi_factor_batch *f, tch_optim_stats *stats)
{
    enum { CHUNK = 128 };
    const tch_backend *t = o->context->backend;
    const tch_optim_config *config = &tchi_group_at(o, f->group)->config;
    for (int64_t done = 0; done < f->count; done += CHUNK) {
        int32_t flags[CHUNK];
        double residuals[CHUNK];
        int64_t n = f->count - done < CHUNK ? f->count - done : CHUNK;
        TCHI_TRY(t->device->copy_bytes(o->context->state, flags, f->flags + done, n * (int64_t)sizeof *flags,
                                       TCH_COPY_TO_HOST));
        TCHI_TRY(t->device->copy_bytes(o->context->state, residuals, f->residuals + done,
                                       n * (int64_t)sizeof *residuals, TCH_COPY_TO_HOST));
        for (int64_t k = 0; k < n; k++) {
            stats->failed += tchi_refresh_failed(config, flags[k]);
            if (flags[k] == TCH_REPORT_OK && residuals[k] > stats->worst_residual) {
                stats->worst_residual = residuals[k];
            }
        }
    }
    return TCH_OK;
}

/* Adds intervals and staleness to the fields of their means, which are divided later. */
static void add_schedule(const tch_optimizer *o, const tchi_factor_batch *f, tch_optim_stats *stats)
{
    for (int64_t k = 0; k < f->count; k++) {
        if (f->refreshed[k] > 0) {
            double interval = tchi_refresh_interval(o, f, k);
            double staleness = (double)(o->steps - f->refreshed[k]);
            stats->refreshed_factors++;
            stats->interval_mean += interval;
            stats->staleness_mean += staleness;
            stats->interval_max = fmax(stats->interval_max, interval);
            stats->staleness_max = fmax(stats->staleness_max, staleness);
        }
    }
}

tch_status tch_optimizer_get_stats(tch_optimizer *optimizer, tch_optim_stats *stats)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_get_stats: optimizer is NULL");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_get_stats");
    if (stats == NULL || stats->struct_size != sizeof *stats) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_optimizer_get_stats: stats must point to a struct set to TCH_OPTIM_STATS_INIT");
    }
    tch_optim_stats s = TCH_OPTIM_STATS_INIT;
    double counts[2];
    TCHI_TRY(optimizer->context->backend->device->copy_bytes(
        optimizer->context->state, counts, optimizer->control->counts, sizeof counts, TCH_COPY_TO_HOST));
    s.steps = (int64_t)counts[0];
    s.skipped = (int64_t)counts[1];
    s.refreshes = optimizer->refreshes;
    for (int32_t i = 0; i < optimizer->factor_batches.count; i++) {
        TCHI_TRY(read_factor_batch(optimizer, tchi_factor_batch_at(optimizer, i), &s));
        add_schedule(optimizer, tchi_factor_batch_at(optimizer, i), &s);
    }
    double count = s.refreshed_factors > 0 ? (double)s.refreshed_factors : 1.0;
    s.interval_mean /= count;
    s.staleness_mean /= count;
    *stats = s;
    return TCH_OK;
}

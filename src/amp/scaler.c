/* The loss scaler: three numbers in device memory, and on the host only which calls an iteration has made. Only
 * tch_scaler_get_state reads back, so an iteration can be captured in a graph.
 *
 * An infinity skips all later steps of the iteration. */
#include <torchium/amp.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/context.h"
#include "core/list.h"
#include "core/status.h"
#include "core/tensor.h"

/* In device memory. decide_skip accumulates in `decided`; its second number is 1 if an infinity was found. */
typedef struct scaler_numbers {
    float scale;
    int32_t tracker;
    struct {
        float found_inf;
        int32_t found;
    } flags; /* of this iteration */
    double decided[2];
    int32_t skip;
} scaler_numbers;

struct tch_scaler {
    tch_context *context;
    tch_scaler_config config;
    scaler_numbers *numbers; /* on the device */
    tch_tensor scale, found_inf;
    int32_t checked;  /* gradients were looked at in this iteration */
    int32_t unscaled; /* tch_scaler_unscale was called in this iteration */
    tchi_list rects;  /* tch_rect */
};

/* --- configuration ---------------------------------------------------------------------------------------------- */

static tch_status refuse_number(const char *function, const char *name, double value, const char *expected)
{
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: %s is %.10g, expected %s", function, name, value, expected);
}

static tch_status check_numbers(const char *function, const char *name, const tch_scaler_state *s)
{
    if (!((float)s->scale > 0.0f && isfinite((float)s->scale))) {
        return refuse_number(function, name, s->scale, "a number above 0 that float32 can hold");
    }
    if (!(s->growth_factor > 1.0 && isfinite(s->growth_factor))) {
        return refuse_number(function, "growth_factor", s->growth_factor, "a finite number above 1");
    }
    if (!(s->backoff_factor > 0.0 && s->backoff_factor < 1.0)) {
        return refuse_number(function, "backoff_factor", s->backoff_factor, "a number above 0 and below 1");
    }
    if (s->growth_interval < 1) {
        return refuse_number(function, "growth_interval", s->growth_interval, "1 or more");
    }
    if (s->growth_tracker < 0 || s->growth_tracker >= s->growth_interval) {
        return refuse_number(function, "growth_tracker", s->growth_tracker, "0 or more, and below growth_interval");
    }
    return TCH_OK;
}

static tch_status check_config(const tch_scaler_config *c)
{
    static const char function[] = "tch_scaler_create";
    if (c->struct_size != sizeof *c) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: config: struct_size is %zu, expected %zu; start from TCH_SCALER_CONFIG_INIT", function,
                         c->struct_size, sizeof *c);
    }
    if (c->enabled != 0 && c->enabled != 1) {
        return refuse_number(function, "enabled", c->enabled, "0 or 1");
    }
    const tch_scaler_state state = {sizeof state,      c->init_scale,      c->growth_factor,
                                    c->backoff_factor, c->growth_interval, 0};
    return check_numbers(function, "init_scale", &state);
}

/* --- making one ------------------------------------------------------------------------------------------------- */

static tch_tensor number_at(const tch_scaler *scaler, float *number)
{
    tch_tensor tensor = tch_tensor_view(number, TCH_FLOAT32, 0, NULL);
    tensor.device = tch_context_device(scaler->context);
    return tensor;
}

static tch_status store_numbers_of(tch_scaler *scaler, double scale, int32_t tracker)
{
    const scaler_numbers numbers = {.scale = (float)scale, .tracker = tracker};
    const tch_context *context = scaler->context;
    return context->backend->device->copy_bytes(context->state, scaler->numbers, &numbers, sizeof numbers,
                                                TCH_COPY_TO_DEVICE);
}

static void release_scaler(tch_scaler *scaler)
{
    tchi_pool_free(scaler->context->pool, scaler->numbers);
    tchi_list_release(&scaler->rects);
    tchi_host_release(scaler, sizeof *scaler);
}

tch_status tch_scaler_create(tch_context *context, const tch_scaler_config *config, tch_scaler **scaler)
{
    static const tch_scaler_config defaults = TCH_SCALER_CONFIG_INIT;
    if (scaler == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_scaler_create: scaler is NULL");
    }
    *scaler = NULL;
    TCHI_ENTER_FOR(context, "tch_scaler_create", update);
    config = config == NULL ? &defaults : config;
    TCHI_TRY(check_config(config));
    tch_scaler *s;
    TCHI_TRY(tchi_host_take(sizeof *s, "a scaler", &s));
    *s = (tch_scaler){.context = context, .config = *config, .rects = {.item_size = sizeof(tch_rect)}};
    tch_status status = tchi_pool_allocate(context->pool, sizeof *s->numbers, (void **)&s->numbers);
    if (status == TCH_OK) {
        s->scale = number_at(s, &s->numbers->scale);
        s->found_inf = number_at(s, &s->numbers->flags.found_inf);
        status = store_numbers_of(s, config->enabled ? config->init_scale : 1.0, 0);
    }
    if (status != TCH_OK) {
        release_scaler(s);
        return status;
    }
    *scaler = s;
    return TCH_OK;
}

void tch_scaler_destroy(tch_scaler *scaler)
{
    if (scaler != NULL) {
        release_scaler(scaler);
    }
}

const tch_tensor *tch_scaler_scale(const tch_scaler *scaler)
{
    return scaler == NULL ? NULL : &scaler->scale;
}

const tch_tensor *tch_scaler_found_inf(const tch_scaler *scaler)
{
    return scaler == NULL ? NULL : &scaler->found_inf;
}

/* --- rectangles -------------------------------------------------------------------------------------------------- */

/* All elements of a gradient are treated the same, in any order, so its memory is viewed as rectangles that ignore
 * signs and the order of strides. */

/* Sizes with ascending positive strides from the lowest address. Adjacent dimensions are merged; each element occurs
 * once. */
typedef struct footprint {
    char *low;
    int32_t order;
    int64_t size[TCH_MAX_RANK], stride[TCH_MAX_RANK];
} footprint;

static void insert_by_stride(footprint *f, int64_t size, int64_t stride)
{
    int32_t k = f->order++;
    for (; k > 0 && f->stride[k - 1] > stride; k--) {
        f->size[k] = f->size[k - 1];
        f->stride[k] = f->stride[k - 1];
    }
    f->size[k] = size;
    f->stride[k] = stride;
}

static void merge_neighbors(footprint *f)
{
    int32_t last = 0;
    for (int32_t k = 1; k < f->order; k++) {
        if (f->stride[k] == f->stride[last] * f->size[last]) {
            f->size[last] *= f->size[k];
        } else {
            f->size[++last] = f->size[k];
            f->stride[last] = f->stride[k];
        }
    }
    f->order = f->order > 0 ? last + 1 : 0;
}

static footprint footprint_of(const tch_tensor *tensor)
{
    const char *low;
    const char *high;
    footprint f = {0};
    tchi_tensor_extent(tensor, &low, &high);
    f.low = (char *)low;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        int64_t stride = tchi_tensor_stride(tensor, i);
        if (tensor->shape[i] > 1 && stride != 0) {
            insert_by_stride(&f, tensor->shape[i], stride < 0 ? -stride : stride);
        }
    }
    merge_neighbors(&f);
    return f;
}

/* The first two dimensions form a rectangle; without unit stride the first dimension alone forms a column. `used` is
 * the number of dimensions consumed. */
static tch_rect rectangle_of(const footprint *f, int32_t *used)
{
    tch_rect rect = {.rows = 1, .cols = 1, .factor = 1.0};
    bool row = f->order > 0 && f->stride[0] == 1;
    *used = row ? 1 : 0;
    rect.cols = row ? f->size[0] : 1;
    if (f->order > *used) {
        rect.rows = f->size[*used];
        rect.stride = f->stride[*used];
        *used += 1;
    } else {
        rect.stride = rect.cols;
    }
    return rect;
}

/* Number of rectangles: 1 for a dense tensor, 0 for NULL or an empty one. */
static int64_t count_rectangles(const tch_tensor *tensor)
{
    if (tensor == NULL || tch_tensor_numel(tensor) == 0) {
        return 0;
    }
    int32_t used;
    int64_t count = 1;
    footprint f = footprint_of(tensor);
    (void)rectangle_of(&f, &used);
    for (int32_t k = used; k < f.order; k++) {
        count *= f.size[k];
    }
    return count;
}

/* The next place of the dimensions from `from` on, counted like the digits of a number. */
static void advance(const footprint *f, int32_t from, int64_t *index, int64_t *offset)
{
    for (int32_t k = from; k < f->order; k++) {
        *offset += f->stride[k];
        if (++index[k] < f->size[k]) {
            return;
        }
        *offset -= f->size[k] * f->stride[k];
        index[k] = 0;
    }
}

/* Writes them, with `grad` pointing to each; returns how many. */
static int64_t list_rectangles(const tch_tensor *tensor, tch_rect *rects)
{
    int64_t count = count_rectangles(tensor);
    if (count == 0) {
        return 0;
    }
    int32_t used;
    int64_t index[TCH_MAX_RANK] = {0};
    int64_t offset = 0;
    int64_t element = (int64_t)tch_dtype_size(tensor->dtype);
    footprint f = footprint_of(tensor);
    tch_rect rect = rectangle_of(&f, &used);
    for (int64_t i = 0; i < count; i++) {
        rect.grad = f.low + offset * element;
        rects[i] = rect;
        advance(&f, used, index, &offset);
    }
    return count;
}

/* --- looking at gradients --------------------------------------------------------------------------------------- */

/* All gradients of one dtype in one call: they are divided by the scale, or only searched for infinities. */
static tch_status visit_type(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients, tch_scalar type,
                             bool divide)
{
    tch_rect *rects = scaler->rects.items;
    tch_update update = {.rects = rects,
                         .real = type == TCH_SCALAR_F64 ? TCH_SCALAR_F64 : TCH_SCALAR_F32,
                         .grad_type = type,
                         .grad_scale = &scaler->numbers->scale};
    update.param_type = update.block_type = update.real;
    /* rects is NULL if all gradients are empty. */
    for (int32_t i = 0; i < count && rects != NULL; i++) {
        if (gradients[i] != NULL && tchi_scalar_of(gradients[i]->dtype) == type) {
            update.count += list_rectangles(gradients[i], rects + update.count);
        }
    }
    if (update.count == 0) {
        return TCH_OK;
    }
    return scaler->context->backend->update->inspect_gradients(scaler->context->state, &update, divide,
                                                               divide ? NULL : &scaler->numbers->flags.found,
                                                               divide ? &scaler->numbers->flags.found_inf : NULL);
}

static tch_status visit_all(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients, bool divide)
{
    static const tch_scalar types[] = {TCH_SCALAR_F32, TCH_SCALAR_F16, TCH_SCALAR_BF16, TCH_SCALAR_F64};
    int64_t rects = 0;
    for (int32_t i = 0; i < count; i++) {
        rects += count_rectangles(gradients[i]);
    }
    TCHI_TRY(tchi_list_reserve(&scaler->rects, rects));
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        TCHI_TRY(visit_type(scaler, count, gradients, types[k], divide));
    }
    scaler->checked = 1;
    return TCH_OK;
}

/* --- an iteration ----------------------------------------------------------------------------------------------- */

static tch_status check_gradients(const tch_scaler *scaler, const char *function, int32_t count,
                                  const tch_tensor *const *gradients, bool written)
{
    if (count < 0 || (count > 0 && gradients == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: count is %d and gradients is %s", function, count,
                         gradients == NULL ? "NULL" : "set");
    }
    for (int32_t i = 0; i < count; i++) {
        char name[48];
        snprintf(name, sizeof name, "gradients[%d]", i);
        if (gradients[i] != NULL) {
            TCHI_TRY(tchi_check_input(scaler->context, gradients[i], name));
            TCHI_TRY(tchi_check_float(gradients[i], name));
            TCHI_TRY(written ? tchi_check_writable(gradients[i], name) : TCH_OK);
        }
    }
    return TCH_OK;
}

tch_status tch_scaler_unscale(tch_scaler *scaler, int32_t count, tch_tensor *const *gradients)
{
    static const char function[] = "tch_scaler_unscale";
    const tch_tensor *const *list = (const tch_tensor *const *)gradients;
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_ENTER(scaler->context, function);
    TCHI_TRY(check_gradients(scaler, function, count, list, true));
    if (!scaler->config.enabled) {
        return TCH_OK;
    }
    TCHI_TRY(visit_all(scaler, count, list, true));
    scaler->unscaled = 1;
    return TCH_OK;
}

/* found_inf = found or found_inf. decide_skip combines the two and counts the result as a number. */
static tch_status gather_found(tch_scaler *scaler)
{
    const tch_backend *t = scaler->context->backend;
    void *state = scaler->context->state;
    scaler_numbers *n = scaler->numbers;
    const tch_array flag = {&n->flags.found_inf, TCH_SCALAR_F32, 0, NULL, NULL};
    const tch_array counted = {&n->decided[1], TCH_SCALAR_F64, 0, NULL, NULL};
    TCHI_TRY(t->device->zero_bytes(state, n->decided, sizeof n->decided));
    TCHI_TRY(t->update->decide_skip(state, &n->flags.found, &n->flags.found_inf, NULL, &n->skip, n->decided));
    return t->matrix->copy(state, &flag, &counted);
}

static tch_status check_all(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients)
{
    TCHI_TRY(visit_all(scaler, count, gradients, false));
    return gather_found(scaler);
}

tch_status tch_scaler_check(tch_scaler *scaler, int32_t count, const tch_tensor *const *gradients)
{
    static const char function[] = "tch_scaler_check";
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_ENTER(scaler->context, function);
    TCHI_TRY(check_gradients(scaler, function, count, gradients, false));
    return scaler->config.enabled ? check_all(scaler, count, gradients) : TCH_OK;
}

tch_status tch_scaler_step(tch_scaler *scaler, tch_optimizer *optimizer, int32_t count,
                           const tch_tensor *const *gradients)
{
    static const char function[] = "tch_scaler_step";
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_ENTER(scaler->context, function);
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: optimizer is NULL", function);
    }
    TCHI_TRY(check_gradients(scaler, function, count, gradients, false));
    if (!scaler->config.enabled) {
        return tch_optimizer_step(optimizer, count, gradients);
    }
    if (!scaler->unscaled) {
        TCHI_TRY(check_all(scaler, count, gradients));
    }
    return tch_optimizer_step_scaled(optimizer, count, gradients, scaler->unscaled ? NULL : &scaler->scale,
                                     &scaler->found_inf);
}

tch_status tch_scaler_update(tch_scaler *scaler)
{
    static const char function[] = "tch_scaler_update";
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_ENTER(scaler->context, function);
    if (!scaler->config.enabled) {
        return TCH_OK;
    }
    if (!scaler->checked) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: scaler has seen no gradients since its last update; call tch_scaler_step or "
                         "tch_scaler_unscale first",
                         function);
    }
    const tch_backend *t = scaler->context->backend;
    void *state = scaler->context->state;
    scaler_numbers *n = scaler->numbers;
    const tch_scaler_config *c = &scaler->config;
    TCHI_TRY(t->update->update_scale(state, &n->scale, &n->tracker, &n->flags.found_inf, c->growth_factor,
                                     c->backoff_factor, c->growth_interval));
    TCHI_TRY(t->device->zero_bytes(state, &n->flags, sizeof n->flags));
    scaler->checked = scaler->unscaled = 0;
    return TCH_OK;
}

/* --- state ------------------------------------------------------------------------------------------------------ */

static tch_status check_state(const char *function, const tch_scaler_state *state)
{
    if (state == NULL || state->struct_size != sizeof *state) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: state must point to a struct set to TCH_SCALER_STATE_INIT",
                         function);
    }
    return TCH_OK;
}

tch_status tch_scaler_get_state(tch_scaler *scaler, tch_scaler_state *state)
{
    static const char function[] = "tch_scaler_get_state";
    scaler_numbers numbers;
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_TRY(check_state(function, state));
    TCHI_ENTER(scaler->context, function);
    const tch_context *context = scaler->context;
    TCHI_TRY(context->backend->device->copy_bytes(context->state, &numbers, scaler->numbers, sizeof numbers,
                                                  TCH_COPY_TO_HOST));
    const tch_scaler_config *c = &scaler->config;
    *state = (tch_scaler_state){sizeof *state,     numbers.scale,      c->growth_factor,
                                c->backoff_factor, c->growth_interval, numbers.tracker};
    return TCH_OK;
}

tch_status tch_scaler_set_state(tch_scaler *scaler, const tch_scaler_state *state)
{
    static const char function[] = "tch_scaler_set_state";
    TCHI_TRY(tchi_check_not_null(function, "scaler", scaler));
    TCHI_TRY(check_state(function, state));
    TCHI_TRY(check_numbers(function, "scale", state));
    TCHI_ENTER(scaler->context, function);
    if (!scaler->config.enabled) {
        return TCH_OK;
    }
    TCHI_TRY(store_numbers_of(scaler, state->scale, state->growth_tracker));
    scaler->config.growth_factor = state->growth_factor;
    scaler->config.backoff_factor = state->backoff_factor;
    scaler->config.growth_interval = state->growth_interval;
    scaler->checked = scaler->unscaled = 0;
    return TCH_OK;
}

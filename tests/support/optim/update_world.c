/* See update_world.h. The host keeps an image of every array before and after a call; the device's memory is only
 * copied to and from, so that the same checks hold for every backend. */
#include "update_world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support/elements.h"
#include "support/testing.h"

#define GUARD 9 /* elements before the first and after the last rectangle: odd, so that nothing is aligned by chance */

/* Roundings on the longest way from an element's arrays to a result, all taken to fall the same way: AdamW with weight
 * decay in the gradient has 20. A few remain for a device that rounds a square root's reciprocal by itself. */
#define ROUNDINGS 24.0

tch_dtype world_dtype(tch_scalar type)
{
    return type == TCH_SCALAR_F64   ? TCH_FLOAT64
           : type == TCH_SCALAR_F32 ? TCH_FLOAT32
           : type == TCH_SCALAR_F16 ? TCH_FLOAT16
                                    : TCH_BFLOAT16;
}

static int64_t size_of(tch_scalar type)
{
    return world_dtype(type).bits / 8;
}

static bool is_block(ref_field field)
{
    return field == REF_BLOCK_0 || field == REF_BLOCK_1;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static void *device_take(world *w, int64_t bytes)
{
    void *pointer = NULL;
    CHECK_OK(tch_memory_alloc(w->context, bytes > 0 ? bytes : 1, &pointer));
    return pointer;
}

/* Fields begin at different offsets, so that no two arrays are aligned alike. */
static void open_field(world *w, world_field *field, tch_scalar type, int64_t elements)
{
    int64_t bytes = elements * size_of(type);
    *field = (world_field){.type = type, .elements = elements};
    field->device = device_take(w, bytes);
    field->before = test_alloc((size_t)bytes);
    field->after = test_alloc((size_t)bytes);
    memset(field->before, 0xFF, (size_t)bytes);
}

static void close_field(world *w, world_field *field)
{
    if (field->before != NULL) {
        CHECK_OK(tch_memory_free(w->context, field->device));
    }
}

static tch_scalar type_of(const world_types *t, ref_field field)
{
    switch (field) {
    case REF_PARAM:
        return t->master ? TCH_SCALAR_F32 : t->param;
    case REF_GRAD:
        return t->grad;
    case REF_BLOCK_0:
    case REF_BLOCK_1:
        return t->block;
    default:
        return t->real;
    }
}

static void copy_field(world *w, const world_field *field, bool to_device)
{
    int64_t bytes = field->elements * size_of(field->type);
    if (field->before == NULL || bytes == 0) {
        return;
    }
    CHECK_OK(
        to_device
            ? w->backend->device->copy_bytes(w->context->state, field->device, field->before, bytes, TCH_COPY_TO_DEVICE)
            : w->backend->device->copy_bytes(w->context->state, field->after, field->device, bytes, TCH_COPY_TO_HOST));
}

void world_upload(world *w)
{
    for (int f = 0; f < REF_FIELDS; f++) {
        copy_field(w, &w->field[f], true);
    }
    copy_field(w, &w->rounded, true);
}

void world_download(world *w)
{
    for (int f = 0; f < REF_FIELDS; f++) {
        copy_field(w, &w->field[f], false);
    }
    copy_field(w, &w->rounded, false);
}

static void keep_field(world_field *field)
{
    if (field->before != NULL) {
        memcpy(field->before, field->after, (size_t)(field->elements * size_of(field->type)));
    }
}

void world_keep(world *w)
{
    for (int f = 0; f < REF_FIELDS; f++) {
        keep_field(&w->field[f]);
    }
    keep_field(&w->rounded);
}

void world_set(world *w, const void *value, const void *member, int64_t bytes)
{
    CHECK_OK(w->backend->device->copy_bytes(w->context->state, (void *)member, value, bytes, TCH_COPY_TO_DEVICE));
}

void world_get(world *w, void *value, const void *member, int64_t bytes)
{
    CHECK_OK(w->backend->device->copy_bytes(w->context->state, value, member, bytes, TCH_COPY_TO_HOST));
}

void world_set_hyper(world *w, const tch_hyper *hyper)
{
    world_set(w, hyper, &w->numbers->hyper, sizeof *hyper);
}

void world_set_steps(world *w, double steps)
{
    for (int64_t k = 0; k < w->count; k++) {
        tch_clock clock = {.step = steps == 0 ? 0 : steps + (double)(k % 3)};
        world_set(w, &clock, &w->clocks[k], sizeof clock);
    }
}

void world_advance(world *w, bool correct)
{
    CHECK_OK(w->backend->update->advance(w->context->state, w->count, w->clock_list, &w->numbers->hyper, w->update.skip,
                                         correct, TCH_FACTOR_EMA));
}

/* --- rectangles -------------------------------------------------------------------------------------------------- */

int64_t world_index(const world *w, int64_t rect, ref_field field, int64_t i, int64_t j)
{
    const tch_rect *p = &w->rects[rect];
    if (!is_block(field)) {
        return w->param_at[rect] + (int64_t)field % 3 + i * p->stride + j;
    }
    return w->block_at[rect] + (int64_t)field % 2 + (p->transposed ? j * p->block_ld + i : i * p->block_ld + j);
}

static void *device_at(const world *w, const world_field *memory, int64_t rect, ref_field field)
{
    return (char *)memory->device + world_index(w, rect, field, 0, 0) * size_of(memory->type);
}

static void place_rect(world *w, const world_shape *shape, int64_t k, int64_t *param, int64_t *block)
{
    int64_t block_rows = shape->transposed ? shape->cols : shape->rows;
    int64_t block_cols = shape->transposed ? shape->rows : shape->cols;
    w->rects[k] = (tch_rect){
        .rows = shape->rows,
        .cols = shape->cols,
        .stride = shape->cols + shape->gap,
        .block_ld = block_cols + shape->block_gap,
        .first = 5 * k,
        .parameter = (int32_t)k,
        .block_index = (int32_t)(k / 2),
        .transposed = shape->transposed,
        .factor = 0.25F * (float)(k % 7 + 1),
        .clock = &w->clocks[k],
    };
    w->param_at[k] = *param;
    w->block_at[k] = *block;
    *param += shape->rows * w->rects[k].stride + k % 4;
    *block += block_rows * w->rects[k].block_ld + k % 3;
}

static void point_rect(world *w, int64_t k)
{
    tch_rect *p = &w->rects[k];
    p->param = device_at(w, w->types.master ? &w->rounded : &w->field[REF_PARAM], k, REF_PARAM);
    p->master = w->types.master ? device_at(w, &w->field[REF_PARAM], k, REF_PARAM) : NULL;
    p->grad = device_at(w, &w->field[REF_GRAD], k, REF_GRAD);
    for (int s = 0; s < 3; s++) {
        p->state[s] = device_at(w, &w->field[REF_STATE_0 + s], k, (ref_field)(REF_STATE_0 + s));
    }
    for (int b = 0; b < 2; b++) {
        p->block[b] = device_at(w, &w->field[REF_BLOCK_0 + b], k, (ref_field)(REF_BLOCK_0 + b));
    }
}

static void open_numbers(world *w, int64_t elements)
{
    world_numbers zero = {.skip = 0};
    w->numbers = device_take(w, sizeof *w->numbers);
    world_set(w, &zero, w->numbers, sizeof zero);
    w->wanted = device_take(w, (w->blocks + 1) * (int64_t)sizeof(double));
    w->norms = device_take(w, (w->blocks + 1) * (int64_t)sizeof(double));
    w->scratch_bytes = w->backend->device->scratch_bytes(w->context->state, TCH_SCRATCH_GRAFT, w->types.real, elements,
                                                         1, w->count, 0);
    w->scratch = device_take(w, w->scratch_bytes);
    for (int64_t k = 0; k < w->count; k++) {
        w->clock_list[k] = &w->clocks[k];
    }
}

world *world_open(tch_context *context, const world_types *types, const world_shape *shapes, int64_t count)
{
    world *w = test_alloc(sizeof *w);
    int64_t param = GUARD;
    int64_t block = GUARD;
    int64_t elements = 0;
    *w = (world){.context = context, .backend = context->backend, .types = *types, .count = count};
    CHECK_OK(w->backend->device->begin(context->state));
    w->rects = test_alloc((size_t)count * sizeof *w->rects);
    w->param_at = test_alloc((size_t)count * sizeof *w->param_at);
    w->block_at = test_alloc((size_t)count * sizeof *w->block_at);
    w->clock_list = test_alloc((size_t)count * sizeof *w->clock_list);
    w->clocks = device_take(w, count * (int64_t)sizeof *w->clocks);
    w->blocks = (count + 1) / 2;
    for (int64_t k = 0; k < count; k++) {
        place_rect(w, &shapes[k], k, &param, &block);
        elements += shapes[k].rows * shapes[k].cols;
    }
    for (int f = 0; f < REF_FIELDS; f++) {
        open_field(w, &w->field[f], type_of(types, (ref_field)f), (is_block((ref_field)f) ? block : param) + GUARD);
    }
    if (types->master) {
        open_field(w, &w->rounded, types->param, param + GUARD);
    }
    for (int64_t k = 0; k < count; k++) {
        point_rect(w, k);
    }
    open_numbers(w, elements);
    w->update = (tch_update){.rects = w->rects,
                             .count = count,
                             .real = types->real,
                             .param_type = types->param,
                             .grad_type = types->grad,
                             .block_type = types->block,
                             .hyper = &w->numbers->hyper};
    return w;
}

void world_close(world *w)
{
    if (w->backend->device->end != NULL) {
        w->backend->device->end(w->context->state);
    }
    for (int f = 0; f < REF_FIELDS; f++) {
        close_field(w, &w->field[f]);
    }
    close_field(w, &w->rounded);
    void *device[] = {w->clocks, w->numbers, w->wanted, w->norms, w->scratch};
    for (int i = 0; i < 5; i++) {
        CHECK_OK(tch_memory_free(w->context, device[i]));
    }
}

/* --- numbers ----------------------------------------------------------------------------------------------------- */

static unsigned char *element_of(const world_field *field, unsigned char *image, int64_t index)
{
    return image + index * size_of(field->type);
}

static double fresh_number(ref_field field, test_random *random)
{
    double x = test_random_normal(random);
    return field == REF_PARAM ? x : field == REF_STATE_1 || field == REF_STATE_2 ? 0.05 * x * x : 0.2 * x;
}

static void fill_rect(world *w, int64_t k, ref_field field, test_random *random, double constant)
{
    world_field *f = &w->field[field];
    for (int64_t i = 0; i < w->rects[k].rows; i++) {
        for (int64_t j = 0; j < w->rects[k].cols; j++) {
            int64_t index = world_index(w, k, field, i, j);
            double value = random != NULL ? fresh_number(field, random) : constant;
            test_encode(world_dtype(f->type), value, element_of(f, f->before, index));
            if (field == REF_PARAM && w->types.master) {
                value = test_decode(world_dtype(f->type), element_of(f, f->before, index));
                test_encode(world_dtype(w->rounded.type), value, element_of(&w->rounded, w->rounded.before, index));
            }
        }
    }
}

void world_fill(world *w, test_random *random)
{
    for (int64_t k = 0; k < w->count; k++) {
        for (int f = 0; f < REF_FIELDS; f++) {
            fill_rect(w, k, (ref_field)f, random, 0);
        }
    }
}

void world_fill_gradients(world *w, test_random *random)
{
    for (int64_t k = 0; k < w->count; k++) {
        fill_rect(w, k, REF_GRAD, random, 0);
    }
}

void world_fill_constant(world *w, ref_field field, double value)
{
    for (int64_t k = 0; k < w->count; k++) {
        fill_rect(w, k, field, NULL, value);
    }
}

/* --- checks ------------------------------------------------------------------------------------------------------ */

static const char *const field_names[REF_FIELDS] = {"param",    "grad",     "state[0]", "state[1]",
                                                    "state[2]", "block[0]", "block[1]"};

/* The size's share of rounding, that of the arithmetic's smallest numbers, and the last rounding to the field's
 * type. */
static double allowed(const world *w, const world_field *field, double value, double size)
{
    tch_dtype real = world_dtype(w->types.real);
    tch_dtype stored = world_dtype(field->type);
    double error = ROUNDINGS * (test_unit_roundoff(real) * size + test_underflow(real));
    if (stored.bits < real.bits) {
        error += test_unit_roundoff(stored) * (fabs(value) + error) + test_underflow(stored);
    }
    return error;
}

/* A written element is compared with the reference and then accepted: what is left in `before` that differs from
 * `after` was written by mistake. */
static void check_element(world *w, int64_t k, int64_t i, int64_t j, const ref_element *e)
{
    for (int f = 0; f < REF_FIELDS; f++) {
        world_field *field = &w->field[f];
        int64_t index = world_index(w, k, (ref_field)f, i, j);
        if (!e->written[f]) {
            continue;
        }
        double got = test_decode(world_dtype(field->type), element_of(field, field->after, index));
        double error = fabs(got - e->value[f]);
        double most = allowed(w, field, e->value[f], e->size[f]);
        CHECK(error <= most, "%s of rectangle %lld (%lld, %lld): %.9g, expected %.9g, off by %.3g, allowed %.3g",
              field_names[f], (long long)k, (long long)i, (long long)j, got, e->value[f], error, most);
        memcpy(element_of(field, field->before, index), element_of(field, field->after, index),
               (size_t)size_of(field->type));
        if (f == REF_PARAM && w->types.master) {
            test_encode(world_dtype(w->rounded.type), got, element_of(&w->rounded, w->rounded.before, index));
        }
    }
}

static void check_bytes(const world_field *field, const char *name)
{
    int64_t bytes = field->elements * size_of(field->type);
    if (field->before == NULL || memcmp(field->before, field->after, (size_t)bytes) == 0) {
        return;
    }
    for (int64_t i = 0; i < bytes; i++) {
        CHECK(field->before[i] == field->after[i], "%s: byte %lld of element %lld (of %lld) was changed", name,
              (long long)(i % size_of(field->type)), (long long)(i / size_of(field->type)), (long long)field->elements);
    }
}

static void setting_of_rect(world *w, int64_t k, const double *scales, const tch_clock *clock, ref_setting *s)
{
    const tch_rect *p = &w->rects[k];
    const void *arrays[REF_FIELDS] = {p->param,    p->grad,     p->state[0], p->state[1],
                                      p->state[2], p->block[0], p->block[1]};
    for (int f = 0; f < REF_FIELDS; f++) {
        s->has[f] = arrays[f] != NULL;
    }
    s->clock = *clock;
    s->factor = (double)p->factor;
    s->roundoff = test_unit_roundoff(world_dtype(w->types.real));
    s->block_scale = scales != NULL ? scales[p->block_index] : 1.0;
}

static ref_element element_before(const world *w, int64_t k, int64_t i, int64_t j)
{
    ref_element e = {.direction = 0};
    for (int f = 0; f < REF_FIELDS; f++) {
        const world_field *field = &w->field[f];
        e.value[f] = test_decode(world_dtype(field->type),
                                 element_of(field, field->before, world_index(w, k, (ref_field)f, i, j)));
    }
    return e;
}

/* Over the errors of the terms come those of a sum in float64, one for each term at most, here and on the device. */
static void check_norm(world *w, const double *norms, int64_t block, double sum, double size, int64_t terms)
{
    double expected = sqrt(sum);
    double roundoff = test_unit_roundoff(world_dtype(w->types.real));
    double most = ROUNDINGS * roundoff * sqrt(size) + (double)terms * 0x1p-53 * expected;
    CHECK(fabs(norms[block] - expected) <= most, "norm of block %lld: %.9g, expected %.9g", (long long)block,
          norms[block], expected);
}

void world_check(world *w, ref_update operation, const ref_setting *setting, const double *scales)
{
    tch_clock *clocks = test_alloc((size_t)w->count * sizeof *clocks);
    double *norms = test_alloc((size_t)(w->blocks + 1) * sizeof *norms);
    double sum = 0;
    double size = 0;
    int64_t terms = 0;
    world_get(w, clocks, w->clocks, w->count * (int64_t)sizeof *clocks);
    world_get(w, norms, w->norms, w->blocks * (int64_t)sizeof *norms);
    for (int64_t k = 0; k < w->count; k++) {
        ref_setting s = *setting;
        setting_of_rect(w, k, scales, &clocks[k], &s);
        for (int64_t i = 0; i < w->rects[k].rows; i++) {
            for (int64_t j = 0; j < w->rects[k].cols; j++) {
                ref_element e = element_before(w, k, i, j);
                operation(&s, &e);
                check_element(w, k, i, j, &e);
                sum += e.direction * e.direction;
                size += e.direction_size * e.direction_size;
            }
        }
        terms += w->rects[k].rows * w->rects[k].cols;
        bool has_norm = operation == ref_graft || operation == ref_gather_graft;
        if (has_norm && (k % 2 == 1 || k + 1 == w->count)) {
            check_norm(w, norms, k / 2, sum, size, terms);
            sum = size = 0;
            terms = 0;
        }
    }
    for (int f = 0; f < REF_FIELDS; f++) {
        check_bytes(&w->field[f], field_names[f]);
    }
    check_bytes(&w->rounded, "the rounded parameter");
    test_drop(clocks);
    test_drop(norms);
}

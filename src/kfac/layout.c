/* Groups layers and lays out their state. Layers form block batches by the sizes of their factors, and factors form
 * factor batches; each batch is one chunk of the state, so layers are in the order of block batches, not the
 * caller's. */
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/status.h"
#include "linalg/batch.h"
#include "linalg/algebra.h"

#include "kfac.h"

/* --- descriptions ------------------------------------------------------------------------------------------------ */

_Static_assert(TCHI_MOST_SIZE == 2147483647, "messages below spell it");

static tch_status refuse_field(const char *function, const char *name, const char *field, int64_t value,
                               const char *expected)
{
    return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: layer '%s': %s is %lld, expected %s", function, name, field,
                     (long long)value, expected);
}

/* Checks only what determines the factors' sizes: the rest of a layer is checked with its inputs. */
static tch_status check_convolution(const char *function, const tch_kfac_layer *layer, const char *name)
{
    int64_t kernel = 1;
    if (layer->layer.dims < 1 || layer->layer.dims > 3) {
        return refuse_field(function, name, "dims", layer->layer.dims, "1 to 3");
    }
    for (int32_t k = 0; k < layer->layer.dims; k++) {
        if (layer->layer.kernel[k] < 1 || layer->layer.kernel[k] > TCHI_MOST_SIZE) {
            return refuse_field(function, name, "kernel", layer->layer.kernel[k], "1 to 2147483647");
        }
        kernel *= layer->layer.kernel[k];
        if (kernel > TCHI_MOST_SIZE || layer->inputs % kernel != 0) {
            return refuse_field(function, name, "inputs", layer->inputs, "a multiple of the kernel's size");
        }
    }
    if (layer->layer.groups < 1 || layer->outputs % layer->layer.groups != 0) {
        return refuse_field(function, name, "groups", layer->layer.groups, "a divisor of outputs");
    }
    return TCH_OK;
}

tch_status tchi_kfac_check_layer(const char *function, const tch_kfac_layer *layer, const char *name)
{
    if (layer->layer.struct_size != sizeof layer->layer) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: layer '%s' must begin with TCH_LAYER_INIT", function, name);
    }
    if (layer->layer.kind != TCH_LAYER_LINEAR && layer->layer.kind != TCH_LAYER_CONV) {
        return refuse_field(function, name, "kind", layer->layer.kind, "TCH_LAYER_LINEAR or TCH_LAYER_CONV");
    }
    if (strlen(name) >= TCHI_KFAC_NAME) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: a layer's name has %zu bytes, expected below %d", function,
                         strlen(name), TCHI_KFAC_NAME);
    }
    if (layer->inputs < 1 || layer->inputs >= TCHI_MOST_SIZE) {
        return refuse_field(function, name, "inputs", layer->inputs, "1 to 2147483646");
    }
    if (layer->outputs < 1 || layer->outputs > TCHI_MOST_SIZE) {
        return refuse_field(function, name, "outputs", layer->outputs, "1 to 2147483647");
    }
    return layer->layer.kind == TCH_LAYER_CONV ? check_convolution(function, layer, name) : TCH_OK;
}

const char *tchi_kfac_layer_name(const tch_kfac_layer *layer, int32_t index, char text[32])
{
    snprintf(text, 32, "layer%d", index);
    return layer->name != NULL && layer->name[0] != '\0' ? layer->name : text;
}

static tch_status add_layer(tch_kfac *k, int32_t index, const tch_kfac_layer *given)
{
    tchi_kfac_layer *layer = &k->layers[index];
    char text[32];
    snprintf(layer->name, sizeof layer->name, "%s", tchi_kfac_layer_name(given, index, text));
    for (int32_t i = 0; i < index; i++) {
        if (strcmp(k->layers[i].name, layer->name) == 0) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "two layers are called '%s'", layer->name);
        }
    }
    layer->layer = given->layer;
    layer->inputs = given->inputs;
    layer->outputs = given->outputs;
    layer->bias = given->bias != 0;
    layer->groups = given->layer.kind == TCH_LAYER_CONV ? given->layer.groups : 1;
    return TCH_OK;
}

/* --- block batches and factor batches ---------------------------------------------------------------------------- */

static int32_t block_batch_of(tch_kfac *k, const tchi_kfac_layer *layer)
{
    int64_t d = layer->inputs + layer->bias;
    int64_t p = layer->outputs / layer->groups;
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        if (k->block_batches[i].size[TCHI_INPUT] == d && k->block_batches[i].size[TCHI_OUTPUT] == p) {
            return i;
        }
    }
    k->block_batches[k->block_batch_count] = (tchi_kfac_block_batch){.size = {d, p}};
    return k->block_batch_count++;
}

static int32_t factor_batch_of(tch_kfac *k, int64_t n)
{
    for (int32_t i = 0; i < k->factor_batch_count; i++) {
        if (k->factor_batches[i].n == n) {
            return i;
        }
    }
    k->factor_batches[k->factor_batch_count] = (tchi_kfac_factor_batch){.n = n};
    return k->factor_batch_count++;
}

static void make_block_batches(tch_kfac *k)
{
    for (int32_t i = 0; i < k->count; i++) {
        tchi_kfac_layer *layer = &k->layers[i];
        layer->block_batch = block_batch_of(k, layer);
        layer->unit = k->block_batches[layer->block_batch].count;
        k->block_batches[layer->block_batch].count += layer->groups;
    }
    int32_t at = 0;
    for (int32_t c = 0; c < k->block_batch_count; c++) {
        k->block_batches[c].first = at;
        for (int32_t i = 0; i < k->count; i++) {
            if (k->layers[i].block_batch == c) {
                k->order[at++] = i;
            }
        }
        k->block_batches[c].layers = at - k->block_batches[c].first;
    }
}

static void make_factor_batches(tch_kfac *k)
{
    for (int32_t c = 0; c < k->block_batch_count; c++) {
        tchi_kfac_block_batch *block_batch = &k->block_batches[c];
        for (int side = 0; side < TCHI_SIDES; side++) {
            block_batch->factor_batch[side] = factor_batch_of(k, block_batch->size[side]);
            tchi_kfac_factor_batch *factor_batch = tchi_kfac_factor_batch_of(k, block_batch, side);
            block_batch->position[side] = factor_batch->count;
            factor_batch->count += block_batch->count;
        }
    }
}

static void note_owners(tch_kfac *k)
{
    int64_t at = 0;
    for (int32_t f = 0; f < k->factor_batch_count; f++) {
        k->factor_batches[f].owner = k->owners + at;
        k->factor_batches[f].slot = k->slots + at;
        at += k->factor_batches[f].count;
    }
    for (int32_t i = 0; i < k->count; i++) {
        const tchi_kfac_layer *layer = &k->layers[i];
        const tchi_kfac_block_batch *block_batch = &k->block_batches[layer->block_batch];
        for (int side = 0; side < TCHI_SIDES; side++) {
            int32_t *owner =
                tchi_kfac_factor_batch_of(k, block_batch, side)->owner + block_batch->position[side] + layer->unit;
            for (int64_t g = 0; g < layer->groups; g++) {
                owner[g] = i;
            }
        }
    }
}

static void note_slots(tchi_kfac_factor_batch *f, const tch_kfac *k)
{
    for (int64_t i = 0; i < f->count; i++) {
        f->slot[i] = f->held;
        f->held += tchi_kfac_is_held(k, f->owner[i]);
    }
}

tch_status tchi_kfac_plan(tch_kfac *k, const tch_kfac_layer *layers)
{
    size_t count = (size_t)k->count;
    TCHI_TRY(tchi_host_take(count * sizeof *k->layers, "KFAC's layers", &k->layers));
    TCHI_TRY(tchi_host_take(count * TCH_KFAC_COUNTS * sizeof *k->counts, "KFAC's counts", &k->counts));
    TCHI_TRY(tchi_host_take(count * sizeof *k->order, "KFAC's layers", &k->order));
    TCHI_TRY(tchi_host_take(count * sizeof *k->block_batches, "KFAC's block batches", &k->block_batches));
    TCHI_TRY(
        tchi_host_take(TCHI_SIDES * count * sizeof *k->factor_batches, "KFAC's factor batches", &k->factor_batches));
    TCHI_TRY(tchi_host_take(TCHI_KFAC_STATES * count * sizeof *k->states, "KFAC's state", &k->states));
    for (int32_t i = 0; i < k->count; i++) {
        TCHI_TRY(add_layer(k, i, &layers[i]));
    }
    if (k->comm != NULL) {
        TCHI_TRY(tchi_kfac_choose_owners(k));
    }
    make_block_batches(k);
    make_factor_batches(k);
    for (int32_t f = 0; f < k->factor_batch_count; f++) {
        k->owner_count += k->factor_batches[f].count;
    }
    TCHI_TRY(tchi_host_take((size_t)k->owner_count * sizeof *k->owners, "KFAC's factor batches", &k->owners));
    TCHI_TRY(tchi_host_take((size_t)k->owner_count * sizeof *k->slots, "KFAC's factor batches", &k->slots));
    note_owners(k);
    for (int32_t f = 0; f < k->factor_batch_count; f++) {
        note_slots(&k->factor_batches[f], k);
    }
    return TCH_OK;
}

void tchi_kfac_release_plan(tch_kfac *k)
{
    size_t count = (size_t)k->count;
    tchi_host_release(k->layers, count * sizeof *k->layers);
    tchi_host_release(k->counts, count * TCH_KFAC_COUNTS * sizeof *k->counts);
    tchi_host_release(k->order, count * sizeof *k->order);
    tchi_host_release(k->block_batches, count * sizeof *k->block_batches);
    tchi_host_release(k->factor_batches, TCHI_SIDES * count * sizeof *k->factor_batches);
    tchi_host_release(k->states, TCHI_KFAC_STATES * count * sizeof *k->states);
    tchi_host_release(k->owners, (size_t)k->owner_count * sizeof *k->owners);
    tchi_host_release(k->slots, (size_t)k->owner_count * sizeof *k->slots);
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static void place_factor_batch(const tch_kfac *k, tchi_kfac_factor_batch *f, tchi_arena *state, tchi_arena *beside)
{
    tch_matrices squares = tchi_scratch_matrices(state, k->type, f->count, f->n, f->n);
    f->factors = squares.data;
    f->results = tchi_scratch_matrices(state, k->type, f->held, f->n, f->n).data;
    if (k->config.method != TCH_KFAC_INVERSE) {
        f->values = tchi_scratch_matrices(state, k->type, f->held, 1, f->n).data;
    }
    f->flags = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->flags);
    f->residuals = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->residuals);
    f->traces = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->traces);
    f->shifts = tchi_arena_take(beside, f->count * (int64_t)sizeof *f->shifts);
}

void tchi_kfac_place(tch_kfac *k, tchi_arena *state, tchi_arena *beside)
{
    k->control = tchi_arena_take(beside, sizeof *k->control);
    for (int32_t f = 0; f < k->factor_batch_count; f++) {
        place_factor_batch(k, &k->factor_batches[f], state, beside);
    }
    for (int32_t c = 0; c < k->block_batch_count && k->config.method == TCH_KFAC_EKFAC; c++) {
        tchi_kfac_block_batch *block_batch = &k->block_batches[c];
        block_batch->scales = tchi_scratch_matrices(state, k->type, block_batch->count, block_batch->size[TCHI_OUTPUT],
                                                    block_batch->size[TCHI_INPUT])
                                  .data;
    }
}

/* --- names ------------------------------------------------------------------------------------------------------- */

/* `data`: matrices rows by cols of the units of a block batch, from unit `first` on. A single group has no dimension,
 * and a row of numbers none for the row. */
static void name_state(tch_kfac *k, int32_t index, const char *what, char *data, int64_t first, int64_t rows,
                       int64_t cols)
{
    const tchi_kfac_layer *layer = &k->layers[index];
    tchi_kfac_state *s = &k->states[k->state_count++];
    snprintf(s->name, sizeof s->name, "%s/%s", layer->name, what);
    s->layer = index;
    int32_t ndim = 0;
    const int64_t sizes[3] = {layer->groups, rows, cols};
    for (int i = 0; i < 3; i++) {
        bool there = i == 2 || (i == 0 ? layer->groups > 1 : rows > 0);
        if (there) {
            s->shape[ndim++] = sizes[i];
        }
    }
    int64_t each = (rows > 0 ? rows : 1) * cols * tchi_scalar_size(k->type);
    s->tensor = tch_tensor_view(data + first * each, k->config.factor_dtype, ndim, s->shape);
    s->tensor.device = tch_context_device(k->context);
}

static void name_side(tch_kfac *k, int32_t index, int side)
{
    static const char *const results[TCHI_SIDES][2] = {{"input_inverse", "input_basis"},
                                                       {"output_inverse", "output_basis"}};
    static const char *const values[TCHI_SIDES] = {"input_values", "output_values"};
    const tchi_kfac_layer *layer = &k->layers[index];
    const tchi_kfac_block_batch *block_batch = &k->block_batches[layer->block_batch];
    const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, block_batch, side);
    int64_t first = f->slot[block_batch->position[side] + layer->unit];
    name_state(k, index, results[side][f->values != NULL], f->results, first, f->n, f->n);
    if (f->values != NULL) {
        name_state(k, index, values[side], f->values, first, 0, f->n);
    }
}

void tchi_kfac_name_states(tch_kfac *k)
{
    static const char *const factors[TCHI_SIDES] = {"input_factor", "output_factor"};
    for (int32_t i = 0; i < k->count; i++) {
        const tchi_kfac_layer *layer = &k->layers[i];
        const tchi_kfac_block_batch *block_batch = &k->block_batches[layer->block_batch];
        for (int side = 0; side < TCHI_SIDES; side++) {
            const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, block_batch, side);
            name_state(k, i, factors[side], f->factors, block_batch->position[side] + layer->unit, f->n, f->n);
        }
        for (int side = 0; side < TCHI_SIDES && tchi_kfac_is_held(k, i); side++) {
            name_side(k, i, side);
        }
        if (block_batch->scales != NULL) {
            name_state(k, i, "scales", block_batch->scales, layer->unit, block_batch->size[TCHI_OUTPUT],
                       block_batch->size[TCHI_INPUT]);
        }
    }
}

/* --- matrices of a factor batch ---------------------------------------------------------------------------------- */

tch_matrices tchi_kfac_factors(const tch_kfac *k, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count)
{
    tch_matrices all =
        tchi_matrices_new(factor_batch->factors, k->type, factor_batch->count, factor_batch->n, factor_batch->n);
    return tchi_matrices_part(&all, first, count);
}

tch_matrices tchi_kfac_results(const tch_kfac *k, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                               int64_t count)
{
    tch_matrices all =
        tchi_matrices_new(factor_batch->results, k->type, factor_batch->held, factor_batch->n, factor_batch->n);
    return tchi_matrices_part(&all, factor_batch->slot[first], count);
}

tch_matrices tchi_kfac_values(const tch_kfac *k, const tchi_kfac_factor_batch *factor_batch, int64_t first,
                              int64_t count)
{
    tch_matrices all = tchi_matrices_new(factor_batch->values, k->type, factor_batch->held, 1, factor_batch->n);
    return tchi_matrices_part(&all, factor_batch->slot[first], count);
}

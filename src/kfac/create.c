/* Creating KFAC: checks its layers, allocates and initializes the state. Everything is checked before anything is
 * allocated. */
#include <stdint.h>

#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"
#include "linalg/batch.h"

#include "kfac.h"

static tch_status check_description(const char *function, const tch_kfac_config *config, int32_t count,
                                    const tch_kfac_layer *layers)
{
    TCHI_TRY(tchi_kfac_check_config(function, config));
    if (count < 0 || (count > 0 && layers == NULL)) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: count is %d and layers is %s", function, count,
                         layers == NULL ? "NULL" : "set");
    }
    for (int32_t i = 0; i < count; i++) {
        char text[32];
        TCHI_TRY(tchi_kfac_check_layer(function, &layers[i], tchi_kfac_layer_name(&layers[i], i, text)));
    }
    return TCH_OK;
}

/* --- memory ------------------------------------------------------------------------------------------------------ */

static tch_status allocate_state(tch_kfac *k, int64_t bytes)
{
    void *memory = NULL;
    if (bytes == 0) {
        return TCH_OK;
    }
    if (k->allocator.allocate == NULL) {
        TCHI_TRY(tchi_pool_allocate_exact(k->context->pool, bytes, &memory));
    } else {
        TCHI_TRY(k->allocator.allocate(k->allocator.user, bytes, &memory));
    }
    k->state = (tchi_kfac_chunk){memory, bytes};
    if (memory == NULL || (uintptr_t)memory % 256 != 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "the state's allocator gave %p for %lld bytes, expected memory aligned to 256", memory,
                         (long long)bytes);
    }
    return TCH_OK;
}

static tch_status allocate_memory(tch_kfac *k)
{
    tchi_arena state = {0};
    tchi_arena beside = {0};
    tchi_kfac_place(k, &state, &beside);
    TCHI_TRY(allocate_state(k, state.used));
    TCHI_TRY(tchi_pool_allocate_exact(k->context->pool, beside.used, &k->beside.pointer));
    k->beside.bytes = beside.used;
    state = (tchi_arena){.base = k->state.pointer};
    beside = (tchi_arena){.base = k->beside.pointer};
    tchi_kfac_place(k, &state, &beside);
    return TCH_OK;
}

/* --- the beginning ----------------------------------------------------------------------------------------------- */

static tch_status fill_numbers(const tch_kfac *k, char *data, int64_t count, double value)
{
    int64_t stride = 1;
    tch_array all = {data, k->type, 1, &count, &stride};
    return data == NULL ? TCH_OK : k->context->backend->matrix->fill(k->context->state, &all, value);
}

/* Results start at the identity, so that a failed first refresh leaves gradients nearly unchanged; so do factors whose
 * averages have no bias correction. */
static tch_status fill_state(tch_kfac *k)
{
    const tch_backend *t = k->context->backend;
    TCHI_TRY(t->device->zero_bytes(k->context->state, k->beside.pointer, k->beside.bytes));
    TCHI_TRY(
        t->device->copy_bytes(k->context->state, &k->control->scale, &(double){1.0}, sizeof(double), TCH_COPY_NUMBERS));
    double start = k->config.use_bias_correction ? 0.0 : 1.0;
    for (int32_t i = 0; i < k->factor_batch_count; i++) {
        const tchi_kfac_factor_batch *f = &k->factor_batches[i];
        tch_matrices factors = tchi_kfac_factors(k, f, 0, f->count);
        TCHI_TRY(t->matrix->combine(k->context->state, start, 0.0, NULL, 0.0, NULL, &factors));
        if (f->held > 0) {
            tch_matrices results = tchi_matrices_new(f->results, k->type, f->held, f->n, f->n);
            TCHI_TRY(t->matrix->combine(k->context->state, 1.0, 0.0, NULL, 0.0, NULL, &results));
            TCHI_TRY(fill_numbers(k, f->values, f->held * f->n, 1.0));
        }
    }
    for (int32_t i = 0; i < k->block_batch_count; i++) {
        const tchi_kfac_block_batch *c = &k->block_batches[i];
        TCHI_TRY(fill_numbers(k, c->scales, c->count * c->size[TCHI_INPUT] * c->size[TCHI_OUTPUT], 1.0));
    }
    return TCH_OK;
}

/* --- the public calls -------------------------------------------------------------------------------------------- */

static tch_kfac empty_kfac(tch_context *context, const tch_kfac_config *config, int32_t count)
{
    return (tch_kfac){
        .context = context, .config = *config, .type = tchi_scalar_of(config->factor_dtype), .count = count};
}

tch_status tch_kfac_create(tch_context *context, const tch_kfac_config *config, const tch_optim_setup *setup,
                           int32_t count, const tch_kfac_layer *layers, tch_kfac **kfac)
{
    TCHI_ENTER_FOR(context, "tch_kfac_create", sample);
    TCHI_TRY(tchi_check_chapter(context, "tch_kfac_create", context->backend->update, "update"));
    if (kfac == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_create: kfac is NULL");
    }
    *kfac = NULL;
    TCHI_TRY(tchi_check_setup("tch_kfac_create", setup));
    TCHI_TRY(check_description("tch_kfac_create", config, count, layers));
    tch_kfac *k;
    TCHI_TRY(tchi_host_take(sizeof *k, "KFAC", &k));
    *k = empty_kfac(context, config, count);
    if (setup != NULL) {
        k->comm = tch_comm_size(setup->comm) > 1 ? setup->comm : NULL;
        k->allocator = setup->allocator == NULL ? k->allocator : *setup->allocator;
    }
    tch_status status = tchi_kfac_plan(k, layers);
    status = status == TCH_OK ? allocate_memory(k) : status;
    if (status == TCH_OK) {
        tchi_kfac_name_states(k);
        status = fill_state(k);
    }
    if (status != TCH_OK) {
        tch_kfac_destroy(k);
        return status;
    }
    *kfac = k;
    return TCH_OK;
}

void tch_kfac_destroy(tch_kfac *kfac)
{
    if (kfac == NULL) {
        return;
    }
    tch_context_synchronize(kfac->context);
    if (kfac->state.pointer != NULL && kfac->allocator.release != NULL) {
        kfac->allocator.release(kfac->allocator.user, kfac->state.pointer, kfac->state.bytes);
    } else {
        tchi_pool_free(kfac->context->pool, kfac->state.pointer);
    }
    tchi_pool_free(kfac->context->pool, kfac->beside.pointer);
    tchi_kfac_release_plan(kfac);
    tchi_host_release(kfac, sizeof *kfac);
}

tch_status tch_kfac_forecast(const tch_kfac_config *config, int32_t count, const tch_kfac_layer *layers,
                             int64_t *state_bytes)
{
    if (state_bytes == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_forecast: state_bytes is NULL");
    }
    TCHI_TRY(check_description("tch_kfac_forecast", config, count, layers));
    tchi_arena state = {0};
    tchi_arena beside = {0};
    tch_kfac k = empty_kfac(NULL, config, count);
    tch_status status = tchi_kfac_plan(&k, layers);
    if (status == TCH_OK) {
        tchi_kfac_place(&k, &state, &beside);
        *state_bytes = state.used;
    }
    tchi_kfac_release_plan(&k);
    return status;
}

/* Queries, and changes between steps. */
#include "core/check.h"
#include "core/status.h"

#include "kfac.h"

tch_status tchi_kfac_usable(const tch_kfac *kfac, const char *function)
{
    if (kfac == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: kfac is NULL", function);
    }
    if (kfac->failed != TCH_OK) {
        return tchi_fail(kfac->failed,
                         "%s: an earlier call failed on the device, and the state is incomplete; load a checkpoint or "
                         "make a new one",
                         function);
    }
    return TCH_OK;
}

tch_status tchi_kfac_note(tch_kfac *kfac, tch_status status)
{
    if (status > TCH_ERR_OUT_OF_MEMORY) {
        kfac->failed = status;
    }
    return status;
}

int32_t tch_kfac_layer_count(const tch_kfac *kfac)
{
    return kfac == NULL ? 0 : kfac->count;
}

tch_status tch_kfac_get_config(const tch_kfac *kfac, tch_kfac_config *config)
{
    if (kfac == NULL || config == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_get_config: %s is NULL", kfac == NULL ? "kfac" : "config");
    }
    *config = kfac->config;
    return TCH_OK;
}

tch_status tch_kfac_set_config(tch_kfac *kfac, const tch_kfac_config *config)
{
    if (kfac == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_set_config: kfac is NULL");
    }
    TCHI_TRY(tchi_kfac_check_config("tch_kfac_set_config", config));
    TCHI_TRY(tchi_kfac_check_change(&kfac->config, config));
    kfac->config = *config;
    return TCH_OK;
}

/* --- state ------------------------------------------------------------------------------------------------------- */

int32_t tch_kfac_state_count(const tch_kfac *kfac)
{
    return kfac == NULL ? 0 : kfac->state_count;
}

tch_status tch_kfac_get_state(tch_kfac *kfac, int32_t index, tch_optim_state *state)
{
    if (kfac == NULL || index < 0 || index >= kfac->state_count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_get_state: there is no state %d", index);
    }
    if (state == NULL || state->struct_size != sizeof *state) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kfac_get_state: state must point to a struct set to TCH_OPTIM_STATE_INIT");
    }
    tchi_kfac_state *s = &kfac->states[index];
    *state = (tch_optim_state){sizeof *state, s->name, s->layer, &s->tensor};
    return TCH_OK;
}

static tch_status check_layer(const tch_kfac *kfac, const char *function, int32_t layer, const int64_t *counts)
{
    if (kfac == NULL || layer < 0 || layer >= kfac->count) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: there is no layer %d", function, layer);
    }
    if (counts == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: counts is NULL", function);
    }
    return TCH_OK;
}

tch_status tch_kfac_get_counts(const tch_kfac *kfac, int32_t layer, int64_t counts[TCH_KFAC_COUNTS])
{
    TCHI_TRY(check_layer(kfac, "tch_kfac_get_counts", layer, counts));
    for (int i = 0; i < TCH_KFAC_COUNTS; i++) {
        counts[i] = tchi_kfac_counts(kfac, layer)[i];
    }
    return TCH_OK;
}

/* An observation in the current step has begun an update: without one, its weight in the average would be infinite. */
tch_status tchi_kfac_check_counts(const char *what, const char *layer, const int64_t counts[TCH_KFAC_COUNTS])
{
    for (int i = 0; i < TCH_KFAC_COUNTS; i++) {
        if (counts[i] < 0 || counts[i] > TCHI_KFAC_MOST_COUNT) {
            return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: counts[%d] of layer '%s' is %lld, expected 0 to %lld", what,
                             i, layer, (long long)counts[i], (long long)TCHI_KFAC_MOST_COUNT);
        }
    }
    if (counts[TCHI_PENDING] > 0 && counts[TCHI_UPDATES] == 0) {
        return tchi_fail(
            TCH_ERR_INVALID_ARGUMENT,
            "%s: counts[%d] of layer '%s' is %lld and counts[%d] is 0, expected an update with observations", what,
            TCHI_PENDING, layer, (long long)counts[TCHI_PENDING], TCHI_UPDATES);
    }
    return TCH_OK;
}

tch_status tch_kfac_set_counts(tch_kfac *kfac, int32_t layer, const int64_t counts[TCH_KFAC_COUNTS])
{
    TCHI_TRY(check_layer(kfac, "tch_kfac_set_counts", layer, counts));
    TCHI_TRY(tchi_kfac_check_counts("tch_kfac_set_counts", kfac->layers[layer].name, counts));
    for (int i = 0; i < TCH_KFAC_COUNTS; i++) {
        tchi_kfac_counts(kfac, layer)[i] = counts[i];
    }
    return TCH_OK;
}

/* --- statistics -------------------------------------------------------------------------------------------------- */

/* The units of one layer on one side, in chunks. */
static tch_status read_side(const tch_kfac *k, const tchi_kfac_layer *layer, int side, bool *failed, double *worst)
{
    enum { CHUNK = 64 };
    const tch_backend *t = k->context->backend;
    const tchi_kfac_block_batch *block_batch = &k->block_batches[layer->block_batch];
    const tchi_kfac_factor_batch *f = tchi_kfac_factor_batch_of(k, block_batch, side);
    int64_t first = block_batch->position[side] + layer->unit;
    for (int64_t done = 0; done < layer->groups; done += CHUNK) {
        int32_t flags[CHUNK];
        double residuals[CHUNK];
        int64_t n = layer->groups - done < CHUNK ? layer->groups - done : CHUNK;
        TCHI_TRY(t->device->copy_bytes(k->context->state, flags, f->flags + first + done, n * (int64_t)sizeof *flags,
                                       TCH_COPY_TO_HOST));
        TCHI_TRY(t->device->copy_bytes(k->context->state, residuals, f->residuals + first + done,
                                       n * (int64_t)sizeof *residuals, TCH_COPY_TO_HOST));
        for (int64_t i = 0; i < n; i++) {
            *failed = *failed || flags[i] != TCH_REPORT_OK;
            *worst = flags[i] == TCH_REPORT_OK && residuals[i] > *worst ? residuals[i] : *worst;
        }
    }
    return TCH_OK;
}

static tch_status read_layers(const tch_kfac *k, tch_kfac_stats *stats)
{
    for (int32_t i = 0; i < k->count; i++) {
        bool failed = false;
        TCHI_TRY(read_side(k, &k->layers[i], TCHI_INPUT, &failed, &stats->worst_residual));
        TCHI_TRY(read_side(k, &k->layers[i], TCHI_OUTPUT, &failed, &stats->worst_residual));
        stats->failed += failed;
        stats->refreshes += tchi_kfac_counts(k, i)[TCHI_REFRESHES];
    }
    return TCH_OK;
}

tch_status tch_kfac_get_stats(tch_kfac *kfac, tch_kfac_stats *stats)
{
    if (kfac == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_kfac_get_stats: kfac is NULL");
    }
    TCHI_ENTER(kfac->context, "tch_kfac_get_stats");
    if (stats == NULL || stats->struct_size != sizeof *stats) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_kfac_get_stats: stats must point to a struct set to TCH_KFAC_STATS_INIT");
    }
    tchi_kfac_control control;
    tch_kfac_stats s = TCH_KFAC_STATS_INIT;
    TCHI_TRY(kfac->context->backend->device->copy_bytes(kfac->context->state, &control, kfac->control, sizeof control,
                                                        TCH_COPY_TO_HOST));
    s.observations = (int64_t)control.counts[0];
    s.rejected = (int64_t)control.counts[1];
    s.scale = kfac->config.kl_clip > 0.0 ? control.scale : 1.0;
    TCHI_TRY(read_layers(kfac, &s));
    *stats = s;
    return TCH_OK;
}

/* The memory of an optimizer, before and after its creation. A forecast runs the same layout with arenas that only
 * measure. */
#include "core/arith.h"
#include "core/check.h"
#include "core/recording.h"
#include "core/status.h"
#include "linalg/basis.h"

#include "create.h"
#include "refresh.h"
#include "shared/shared.h"

/* Workspace for one factor of a factor batch: the maximum of the matrix-product method and its eigen fallback. */
static tch_status one_refresh(const tch_optimizer *o, const tchi_factor_batch *f, int64_t *bytes)
{
    const tch_optim_config *config = &tchi_group_at(o, f->group)->config;
    if (f->root == 0) {
        *bytes = tchi_max(tchi_basis_init_bytes(o->context, f->real, f->n, 1),
                          tchi_basis_track_bytes(o->context, f->real, f->n, 1));
        return TCH_OK;
    }
    *bytes = 0;
    for (int failures = 0; failures <= TCHI_MOST_FAILURES; failures++) {
        tch_root_config how = tchi_refresh_how(config, f, config->numerics.damping, failures);
        int64_t need;
        TCHI_TRY(tch_inverse_root_plan(o->context, f->real == TCH_SCALAR_F64 ? TCH_FLOAT64 : TCH_FLOAT32, 1, f->n,
                                       f->root, &how, NULL, &need));
        *bytes = need > *bytes ? need : *bytes;
    }
    return TCH_OK;
}

tch_status tchi_forecast_refresh(const tch_optimizer *o, int64_t *least, int64_t *most)
{
    int64_t budget = tchi_layout_budget(o) - o->work_bytes;
    *least = *most = 0;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        int64_t each;
        TCHI_TRY(one_refresh(o, f, &each));
        int64_t count = f->count > 0 ? f->count : 1;
        int64_t all = each > budget / count ? budget : each * count;
        all = all < each ? each : all;
        *least = each > *least ? each : *least;
        *most = all > *most ? all : *most;
    }
    *least += *least / 4;
    return TCH_OK;
}

/* Kernels recorded for a run of blocks, for the method with most. Counted on the emulated device: Shampoo 9, SOAP 12,
 * Muon 22, NorMuon 24. SOAP has at most 24 more with orthogonalize, and both have at most 8 with constant_norm. */
#define RUN_KERNELS 44

/* The number of recordings for refreshes of a factor batch. Fixed intervals repeat the same parts; by drift any subset
 * may be refreshed, and by norm only the whole is recorded. */
static int64_t refresh_parts(const tch_optimizer *o, const tchi_factor_batch *f)
{
    const tch_optim_config *config = &tchi_group_at(o, f->group)->config;
    if (tchi_refresh_by_norm(o, config)) {
        return 1;
    }
    if (config->numerics.world_invariant || tchi_refresh_by_drift(o, config)) {
        return f->count;
    }
    int64_t parts = config->shampoo.stagger ? config->shampoo.precondition_frequency : 1;
    return parts < f->count ? parts : f->count;
}

/* If there are more recordings than slots, an average one is assumed in each slot. */
static int64_t recorded_kernels(const tch_optimizer *o)
{
    int64_t recordings = 0;
    int64_t kernels = 0;
    for (int32_t i = 0; i < o->block_batches.count; i++) {
        const tchi_block_batch *c = tchi_block_batch_at(o, i);
        int64_t runs = c->chunk > 0 ? (c->count + c->chunk - 1) / c->chunk : 0;
        recordings += runs;
        kernels += runs * RUN_KERNELS;
    }
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        int64_t parts = refresh_parts(o, f);
        recordings += parts;
        /* Measured: roots by Newton's iteration 40 for n = 200, and 13 where one launch suffices; bases 18 for n = 64,
         * 24 for 200 and 52 for 520, since they are orthogonalized by panels. */
        kernels += parts * (f->root != 0 ? 48 : 20 + f->n / 12);
    }
    return recordings > TCHI_MOST_RECORDINGS ? kernels / recordings * TCHI_MOST_RECORDINGS : kernels;
}

static tch_status check_memory(const char *function, const tch_optim_memory *memory)
{
    if (memory == NULL || memory->struct_size != sizeof *memory) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: memory must point to a struct set to TCH_OPTIM_MEMORY_INIT",
                         function);
    }
    return TCH_OK;
}

static tch_status fill_memory(const tch_optimizer *o, int64_t scratch, tch_optim_memory *memory)
{
    tch_optim_memory m = TCH_OPTIM_MEMORY_INIT;
    m.state = o->state_bytes;
    m.scratch = scratch;
    m.blocks = o->blocks.count;
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        m.factors += tchi_factor_batch_at(o, i)->count;
    }
    int64_t least;
    TCHI_TRY(tchi_forecast_refresh(o, &least, &m.refresh));
    *memory = m;
    return TCH_OK;
}

static tch_status forecast(tch_optimizer *o, const tch_optim_config *config, const tch_optim_setup *with, int32_t count,
                           const tch_parameter *parameters, tch_optim_memory *memory)
{
    tchi_arena state = {0};
    tchi_arena beside = {0};
    tchi_arena scratch = {0};
    TCHI_TRY(with->comm == NULL ? TCH_OK : tchi_shared_open(o, with->comm));
    TCHI_TRY(tchi_optim_plan(o, config, count, parameters, with->placements, false));
    TCHI_TRY(tchi_layout_state(o, 0, &state, &beside, false));
    o->state_bytes = state.used;
    tchi_layout_chunks(o, &scratch);
    TCHI_TRY(fill_memory(o, scratch.used + beside.used, memory));
    memory->recorded = tchi_recorded_bytes(o->context, recorded_kernels(o));
    return TCH_OK;
}

tch_status tch_optim_forecast(tch_context *context, const tch_optim_config *config, int32_t count,
                              const tch_parameter *parameters, tch_optim_memory *memory)
{
    return tch_optim_forecast_with(context, config, NULL, count, parameters, memory);
}

tch_status tch_optim_forecast_with(tch_context *context, const tch_optim_config *config, const tch_optim_setup *setup,
                                   int32_t count, const tch_parameter *parameters, tch_optim_memory *memory)
{
    TCHI_ENTER_FOR(context, "tch_optim_forecast", update);
    TCHI_TRY(check_memory("tch_optim_forecast", memory));
    TCHI_TRY(tchi_check_setup("tch_optim_forecast", setup));
    TCHI_TRY(tchi_optim_check(context, "tch_optim_forecast", config, count, parameters, false));
    tch_optim_setup with = tchi_setup_of(setup, count, parameters);
    tch_optimizer o;
    tchi_optim_prepare(&o, context, config, NULL);
    tch_status status = forecast(&o, config, &with, count, parameters, memory);
    tchi_optim_empty(&o);
    return status;
}

tch_status tch_optimizer_get_memory(tch_optimizer *optimizer, tch_optim_memory *memory)
{
    if (optimizer == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_optimizer_get_memory: optimizer is NULL");
    }
    TCHI_ENTER(optimizer->context, "tch_optimizer_get_memory");
    TCHI_TRY(check_memory("tch_optimizer_get_memory", memory));
    int64_t beside = 0;
    for (int64_t i = 0; i < optimizer->chunks.count; i++) {
        const tchi_chunk *chunk = (const tchi_chunk *)optimizer->chunks.items + i;
        beside += chunk->is_state ? 0 : chunk->bytes;
    }
    TCHI_TRY(fill_memory(optimizer, optimizer->scratch_bytes + beside, memory));
    memory->recorded = tchi_recorded_bytes(optimizer->context, tchi_recordings_kernels(&optimizer->recordings));
    return TCH_OK;
}

/* See replay.h. */
#include "replay.h"

#include <string.h>
#include <time.h>

#include "core/check.h"
#include "core/status.h"
#include "optim/create.h"
#include "optim/method.h"
#include "optim/refresh.h"
#include "optim/shared/shared.h"

/* --- a group that no rank is to talk over ------------------------------------------------------------------------ */

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    (void)user;
    (void)send;
    (void)receive;
    (void)bytes;
    (void)stream;
    return tchi_fail(TCH_ERR_COMM, "a plan was made by a collective");
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    (void)counts;
    return all_gather(user, send, receive, 0, stream);
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    (void)values;
    (void)count;
    return all_gather(user, NULL, NULL, 0, stream);
}

static tch_status open_silent(const replay_group *group, int32_t rank, tch_comm **comm)
{
    static const tch_comm_ops ops = {sizeof(tch_comm_ops), all_gather, all_to_all, reduce_max, NULL, NULL, NULL};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    config.name = "replayed";
    config.rank = rank;
    config.size = group->size;
    config.ops = &ops;
    config.bucket_bytes = group->bucket_bytes;
    config.span_bytes = group->span_bytes;
    return tch_comm_create(&config, comm);
}

/* --- what travels ------------------------------------------------------------------------------------------------ */

static int64_t sent_bytes(const tchi_route *route, const replay_group *group, int32_t rank)
{
    const int64_t *out = tchi_route_counts(route, group->size, TCHI_SEND_BYTES);
    int64_t sent = 0;
    for (int32_t r = 0; r < group->size; r++) {
        sent += r != rank ? out[r] : 0;
    }
    return sent;
}

/* The collectives of exchange.c: see call_in and send_out. */
static void count_bucket(const tchi_bucket *b, const replay_group *group, int32_t rank, replay_rank *result)
{
    if (b->crosses) {
        result->bytes += sent_bytes(&b->in, group, rank) + sent_bytes(&b->out, group, rank);
        result->collectives += 2;
    }
    if (b->levels) {
        result->bytes += sent_bytes(&b->level, group, rank);
        result->collectives++;
    }
    if (b->segment > 0) {
        result->bytes += b->segment * (group->size - 1);
        result->collectives++;
    }
}

/* --- work -------------------------------------------------------------------------------------------------------- */

/* Five steps of Newton and Schulz: X X' and its square, which are symmetric and count half, and a product with X. */
static double orthogonalization(const int64_t *size, int32_t order)
{
    double n = (double)tchi_elements(size, order) / (double)size[0];
    double least = n < (double)size[0] ? n : (double)size[0];
    double most = n < (double)size[0] ? (double)size[0] : n;
    return 5.0 * (3.0 * least * least * most + least * least * least);
}

/* A factor takes a product of the block with itself, and its root one with the block. */
static double work_of(const tch_optimizer *o, const tchi_tile *tile)
{
    const tchi_param *p = tchi_param_at(o, tile->param);
    const tchi_block_method *blocks = o->method->blocks;
    const tch_optim_config *config = &tchi_group_at(o, p->group)->config;
    double elements = (double)tchi_elements(tile->size, p->dims.order);
    double work = 0.0;
    if (!p->blocked) {
        return 0.0; /* the memory's, and little */
    }
    for (int32_t k = 0; k < p->dims.order && blocks->has_factor != NULL; k++) {
        bool factor = blocks->has_factor(config, p->dims.order, tile->size, k);
        work += factor ? 4.0 * elements * (double)tile->size[k] : 0.0;
    }
    return blocks->has_factor != NULL ? work : orthogonalization(tile->size, p->dims.order);
}

static void count_work(const tch_optimizer *o, int32_t rank, replay_rank *result)
{
    for (int64_t i = 0; i < o->shared->tiles.count; i++) {
        const tchi_tile *tile = tchi_shared_tile(o, i);
        if (tile->owner == rank) {
            result->work += work_of(o, tile);
        }
    }
}

/* 16 products of a factor's size for a root, as the plan of owners counts. */
static void count_refreshes(tch_optimizer *o, replay_rank *result)
{
    int32_t period = tchi_group_at(o, 0)->config.shampoo.precondition_frequency;
    if (o->factor_batches.count > 0) {
        tchi_refresh_plan(o, 0, period);
    }
    for (int32_t i = 0; i < o->factor_batches.count; i++) {
        const tchi_factor_batch *f = tchi_factor_batch_at(o, i);
        for (int64_t k = 0; k < f->count; k++) {
            result->refresh[f->phase[k]] += 32.0 * (double)f->n * (double)f->n * (double)f->n;
        }
    }
}

/* --- a plan ------------------------------------------------------------------------------------------------------ */

static double processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static tch_status read_plan(tch_optimizer *o, const replay_group *group, int32_t rank, replay_rank *result)
{
    const tchi_exchange *x = tchi_group_at(o, 0)->exchange;
    int64_t buckets = x == NULL ? 0 : x->buckets.count;
    tchi_arena state = {0};
    tchi_arena extra = {0};
    TCHI_TRY(tchi_layout_state(o, 0, &state, &extra, false));
    result->state_bytes = state.used;
    result->extra_bytes = extra.used;
    result->tiles = o->shared->tiles.count;
    result->own_tiles = o->tiles.count;
    result->buckets = (int32_t)buckets;
    result->collectives = 1; /* what ranks agree on: see tchi_shared_agree */
    result->bytes = 3 * (int64_t)sizeof(int32_t);
    for (int64_t i = 0; i < buckets; i++) {
        count_bucket(tchi_bucket_at(x, i), group, rank, result);
    }
    count_work(o, rank, result);
    count_refreshes(o, result);
    return TCH_OK;
}

static tch_status plan(tch_optimizer *o, const tch_optim_config *config, const replay_group *group, tch_comm *comm,
                       int32_t count, const tch_parameter *parameters, const tch_placement *placements,
                       replay_rank *result)
{
    TCHI_TRY(tchi_shared_open(o, comm));
    double begin = processor_seconds();
    TCHI_TRY(tchi_optim_plan(o, config, count, parameters, placements, false));
    result->plan_seconds = processor_seconds() - begin;
    return read_plan(o, group, tch_comm_rank(comm), result);
}

tch_status replay_step(tch_context *context, const tch_optim_config *config, const replay_group *group, int32_t rank,
                       int32_t count, const tch_parameter *parameters, const tch_placement *placements,
                       replay_rank *result)
{
    memset(result, 0, sizeof *result);
    tch_comm *comm;
    tch_optimizer o;
    if (config->shampoo.precondition_frequency > REPLAY_MOST_PERIOD) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "precondition_frequency is %d, expected %d at most",
                         config->shampoo.precondition_frequency, REPLAY_MOST_PERIOD);
    }
    TCHI_TRY(tchi_optim_check(context, "replay_step", config, count, parameters, false));
    TCHI_TRY(open_silent(group, rank, &comm));
    tchi_optim_prepare(&o, context, config, NULL);
    tch_status status = plan(&o, config, group, comm, count, parameters, placements, result);
    tchi_optim_empty(&o);
    tch_comm_destroy(comm);
    return status;
}

#include "comm.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "core/allocator.h"
#include "core/list.h"
#include "core/check.h"
#include "core/status.h"

#define NAME_SIZE 64

struct tch_comm {
    tch_comm_ops ops;
    void *user;
    char name[NAME_SIZE];
    int32_t rank, size;
    bool gone; /* aborted */
    int64_t bucket_bytes, span_bytes;
    int64_t collectives, bytes;
};

static tch_status check_config(const tch_comm_config *config)
{
    static const char function[] = "tch_comm_create";
    if (config == NULL || config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: config must point to a struct set to TCH_COMM_CONFIG_INIT",
                         function);
    }
    if (config->size < 1 || config->rank < 0 || config->rank >= config->size) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: rank is %d and size %d, expected 0 <= rank < size", function,
                         config->rank, config->size);
    }
    if (config->bucket_bytes < 0 || config->span_bytes < 0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: bucket_bytes is %lld and span_bytes %lld, expected 0 or more",
                         function, (long long)config->bucket_bytes, (long long)config->span_bytes);
    }
    const tch_comm_ops *ops = config->ops;
    if (ops == NULL || ops->struct_size != sizeof *ops || ops->all_gather == NULL || ops->all_to_all == NULL ||
        ops->reduce_max == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: ops must have its struct_size, all_gather, all_to_all and reduce_max set", function);
    }
    return TCH_OK;
}

tch_status tch_comm_create(const tch_comm_config *config, tch_comm **comm)
{
    TCHI_TRY(tchi_check_not_null("tch_comm_create", "comm", comm));
    *comm = NULL;
    TCHI_TRY(check_config(config));
    tch_comm *c;
    TCHI_TRY(tchi_host_take(sizeof *c, "a group", &c));
    *c = (tch_comm){.ops = *config->ops, .user = config->user, .rank = config->rank, .size = config->size};
    c->bucket_bytes = config->bucket_bytes > 0 ? config->bucket_bytes : INT64_C(64) << 20;
    c->span_bytes = config->span_bytes > 0 ? config->span_bytes : INT64_C(4) << 20;
    snprintf(c->name, sizeof c->name, "%s", config->name == NULL ? "group" : config->name);
    *comm = c;
    return TCH_OK;
}

void tch_comm_destroy(tch_comm *comm)
{
    if (comm == NULL) {
        return;
    }
    if (comm->ops.release != NULL) {
        comm->ops.release(comm->user);
    }
    tchi_host_release(comm, sizeof *comm);
}

int32_t tch_comm_rank(const tch_comm *comm)
{
    return comm == NULL ? -1 : comm->rank;
}

int32_t tch_comm_size(const tch_comm *comm)
{
    return comm == NULL ? 0 : comm->size;
}

tch_status tch_comm_get_traffic(const tch_comm *comm, tch_comm_traffic *traffic)
{
    if (comm == NULL || traffic == NULL || traffic->struct_size != sizeof *traffic) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_comm_get_traffic: comm is NULL, or traffic is not set to TCH_COMM_TRAFFIC_INIT");
    }
    traffic->collectives = comm->collectives;
    traffic->bytes = comm->bytes;
    return TCH_OK;
}

/* --- collectives ------------------------------------------------------------------------------------------------- */

/* The transport's message, if any, after the group and the operation. */
static tch_status report_failure(tch_comm *comm, const char *operation, tch_status status)
{
    if (status == TCH_OK) {
        return TCH_OK;
    }
    char words[512];
    snprintf(words, sizeof words, "%s", tch_last_error());
    return tchi_fail(TCH_ERR_COMM, "%s of '%s', rank %d of %d, failed%s%s", operation, comm->name, comm->rank,
                     comm->size, words[0] == '\0' ? "" : ": ", words);
}

static tch_status begin_collective(tch_comm *comm, const char *operation, int64_t bytes)
{
    if (comm->gone) {
        return tchi_fail(TCH_ERR_COMM, "%s of '%s', rank %d of %d: the group has been given up after an error",
                         operation, comm->name, comm->rank, comm->size);
    }
    comm->collectives++;
    comm->bytes += bytes;
    tch_clear_error();
    return TCH_OK;
}

void *tchi_comm_stream(tch_context *context)
{
    return context->backend->host_memory ? NULL : tch_context_get_stream(context);
}

int64_t tchi_comm_bucket_bytes(const tch_comm *comm)
{
    return comm->bucket_bytes;
}

int64_t tchi_comm_span_bytes(const tch_comm *comm)
{
    return comm->span_bytes;
}

tch_status tchi_comm_all_gather(tch_comm *comm, const void *send, void *receive, int64_t bytes, void *stream)
{
    TCHI_TRY(begin_collective(comm, "all_gather", bytes * (comm->size - 1)));
    return report_failure(comm, "all_gather", comm->ops.all_gather(comm->user, send, receive, bytes, stream));
}

tch_status tchi_comm_all_to_all(tch_comm *comm, const void *send, void *receive, const tch_comm_counts *counts,
                                void *stream)
{
    int64_t bytes = 0;
    for (int32_t r = 0; r < comm->size; r++) {
        bytes += r == comm->rank ? 0 : counts->send_bytes[r];
    }
    TCHI_TRY(begin_collective(comm, "all_to_all", bytes));
    return report_failure(comm, "all_to_all", comm->ops.all_to_all(comm->user, send, receive, counts, stream));
}

tch_status tchi_comm_reduce_max(tch_comm *comm, tch_context *context, int32_t *values, int32_t count)
{
    TCHI_TRY(begin_collective(comm, "reduce_max", (int64_t)sizeof *values * count));
    return report_failure(comm, "reduce_max",
                          comm->ops.reduce_max(comm->user, values, count, tchi_comm_stream(context)));
}

/* Through device memory, if collectives require it. */
static tch_status largest_on_device(tch_comm *comm, tch_context *context, int32_t values[TCHI_AGREED], int32_t *there)
{
    const tch_device_ops *t = context->backend->device;
    double bits[TCHI_AGREED / 2];
    memcpy(bits, values, sizeof bits);
    TCHI_TRY(t->copy_bytes(context->state, there, bits, sizeof bits, TCH_COPY_NUMBERS));
    TCHI_TRY(tchi_comm_reduce_max(comm, context, there, TCHI_AGREED));
    return t->copy_bytes(context->state, values, there, sizeof bits, TCH_COPY_TO_HOST);
}

tch_status tchi_comm_largest(tch_comm *comm, tch_context *context, int32_t values[TCHI_AGREED])
{
    if (context->backend->host_memory) {
        return tchi_comm_reduce_max(comm, context, values, TCHI_AGREED);
    }
    void *there;
    TCHI_TRY(tchi_pool_allocate(context->pool, TCHI_AGREED * (int64_t)sizeof *values, &there));
    tch_status status = largest_on_device(comm, context, values, there);
    tchi_pool_free(context->pool, there);
    return status;
}

tch_status tchi_comm_check(tch_comm *comm)
{
    tch_clear_error();
    return comm->ops.check == NULL ? TCH_OK : report_failure(comm, "a collective", comm->ops.check(comm->user));
}

void tchi_comm_abort(tch_comm *comm)
{
    if (!comm->gone && comm->ops.abort != NULL) {
        comm->ops.abort(comm->user);
    }
    comm->gone = true;
}

/* --- loading together -------------------------------------------------------------------------------------------- */

/* FNV-1a, without the sign bit: ranks compare it by the maximum of it and of its complement. */
static int32_t hash_of_counts(const tchi_loading *l)
{
    uint32_t hash = 0x811C9DC5u;
    for (int64_t i = 0; i < l->count; i++) {
        hash = (hash ^ (uint32_t)l->counts[i]) * 0x01000193u;
    }
    return (int32_t)(hash & 0x7FFFFFFF);
}

tch_status tchi_loading_agree(const tchi_loading *loading, tch_status status, const char *otherwise)
{
    char message[1024];
    if (loading->comm == NULL) {
        return status;
    }
    snprintf(message, sizeof message, "%s", status == TCH_OK ? "" : tch_last_error());
    int32_t number = hash_of_counts(loading);
    int32_t seen[TCHI_AGREED] = {status != TCH_OK, number, ~number};
    TCHI_TRY(tchi_comm_largest(loading->comm, loading->context, seen));
    if (status != TCH_OK) {
        return tchi_fail(status, "%s", message);
    }
    if (seen[0] != 0) {
        return tchi_fail(TCH_ERR_COMM, "%s: another rank could not load its part; %s", loading->function, otherwise);
    }
    return seen[1] == ~seen[2] ? TCH_OK
                               : tchi_fail(TCH_ERR_COMM,
                                           "%s: the ranks have opened different checkpoints: their numbers of steps "
                                           "differ",
                                           loading->function);
}

/* Groups over NCCL, loaded at run time: the library already in the process, as with PyTorch, or the system's. The
 * declarations below are of its stable interface, so the build does not need it. */
#define _GNU_SOURCE /* secure_getenv */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"
#include "nccl_watch.h"
#include "neighbors.h"

typedef struct nccl_comm *nccl_comm;
typedef struct nccl_id {
    char bytes[TCH_NCCL_ID_BYTES];
} nccl_id;

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum { NCCL_INT8 = 0, NCCL_INT32 = 2 };
enum { NCCL_MAX = 2 };

/* The first version of NCCL's own struct: later versions read no more than `size`. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} nccl_config;
#define NCCL_CONFIG_MAGIC 0xCAFEBEEFu
#define NCCL_CONFIG_VERSION 21400u /* 2.14 */

typedef struct nccl_library {
    int (*get_id)(nccl_id *id);
    int (*init_rank)(nccl_comm *comm, int ranks, nccl_id id, int rank);
    int (*init_rank_config)(nccl_comm *comm, int ranks, nccl_id id, int rank,
                            nccl_config *config); /* NULL before 2.14 */
    int (*finalize)(nccl_comm comm);              /* the same */
    const char *(*last_error)(nccl_comm comm);    /* NULL before 2.13 */
    int (*all_gather)(const void *send, void *receive, size_t count, int type, nccl_comm comm, void *stream);
    int (*all_reduce)(const void *send, void *receive, size_t count, int type, int op, nccl_comm comm, void *stream);
    int (*send)(const void *data, size_t count, int type, int peer, nccl_comm comm, void *stream);
    int (*receive)(void *data, size_t count, int type, int peer, nccl_comm comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*async_error)(nccl_comm comm, int *error);
    int (*abort)(nccl_comm comm);
    int (*destroy)(nccl_comm comm);
    const char *(*error_text)(int result);
} nccl_library;

typedef struct nccl_group {
    nccl_library library;
    nccl_comm comm; /* NULL: aborted */
    int32_t size;
    double timeout_s;  /* 0: none */
    tchi_watch watch;  /* its lock also protects `comm`, which the thread may abort */
    char failure[640]; /* the reason of the abort */
    tchi_neighbors neighbors;
} nccl_group;

/* --- the library ------------------------------------------------------------------------------------------------- */

/* Never closed: others in the process use it. */
static void *open_library(void)
{
    static const char name[] = "libnccl.so.2";
    const char *named = secure_getenv("TORCHIUM_NCCL");
    if (named != NULL && named[0] != '\0') {
        return dlopen(named, RTLD_NOW | RTLD_LOCAL);
    }
    void *loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (loaded == NULL) {
        loaded = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return loaded;
}

static tch_status find_library(nccl_library *library)
{
    const struct {
        const char *name;
        void *place;
    } symbols[] = {
        {"ncclGetUniqueId", &library->get_id},
        {"ncclCommInitRank", &library->init_rank},
        {"ncclAllGather", &library->all_gather},
        {"ncclAllReduce", &library->all_reduce},
        {"ncclSend", &library->send},
        {"ncclRecv", &library->receive},
        {"ncclGroupStart", &library->group_start},
        {"ncclGroupEnd", &library->group_end},
        {"ncclCommGetAsyncError", &library->async_error},
        {"ncclCommAbort", &library->abort},
        {"ncclCommDestroy", &library->destroy},
        {"ncclGetErrorString", &library->error_text},
    };
    void *handle = open_library();
    if (handle == NULL) {
        return tchi_fail(TCH_ERR_UNAVAILABLE,
                         "NCCL was not found (%s); install it, or set TORCHIUM_NCCL to the file libnccl.so.2",
                         dlerror());
    }
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (symbol == NULL) {
            return tchi_fail(TCH_ERR_UNAVAILABLE, "this NCCL has no %s: it is older than 2.7", symbols[i].name);
        }
        memcpy(symbols[i].place, &symbol, sizeof symbol);
    }
    void *later[] = {dlsym(handle, "ncclCommInitRankConfig"), dlsym(handle, "ncclCommFinalize"),
                     dlsym(handle, "ncclGetLastError")};
    memcpy(&library->init_rank_config, &later[0], sizeof later[0]);
    memcpy(&library->finalize, &later[1], sizeof later[1]);
    memcpy(&library->last_error, &later[2], sizeof later[2]);
    return TCH_OK;
}

static void explain(const nccl_library *library, nccl_comm comm, int result, char why[512])
{
    const char *more = library->last_error == NULL ? NULL : library->last_error(comm);
    bool known = more != NULL && more[0] != '\0';
    snprintf(why, 512, "%s%s%s", library->error_text(result), known ? ": " : "", known ? more : "");
}

static tch_status check_result(const nccl_library *library, nccl_comm comm, int result)
{
    char why[512];
    if (result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS) {
        return TCH_OK;
    }
    explain(library, comm, result, why);
    return tchi_fail(TCH_ERR_COMM, "NCCL: %s", why);
}

/* --- giving up --------------------------------------------------------------------------------------------------- */

/* Under the lock. Ends kernels that wait on the GPU. */
static void drop(nccl_group *g, const char *operation, const char *why)
{
    snprintf(g->failure, sizeof g->failure, "NCCL: %s %s; the communicator was aborted", operation, why);
    tchi_neighbors_give_up(&g->neighbors, g->failure);
    g->library.abort(g->comm);
    g->comm = NULL;
}

static void lose(void *user, const char *operation)
{
    nccl_group *g = user;
    char why[96];
    snprintf(why, sizeof why, "has made no progress on the GPU for %g s", g->timeout_s);
    drop(g, operation, why);
}

/* Asynchronous errors of NCCL, such as a broken connection; and ranks of this machine that are gone. */
static bool is_healthy(void *user)
{
    nccl_group *g = user;
    int error = NCCL_SUCCESS;
    char why[512];
    if (g->comm == NULL) {
        return false;
    }
    int asked = g->library.async_error(g->comm, &error);
    error = asked != NCCL_SUCCESS ? asked : error;
    bool failed = error != NCCL_SUCCESS && error != NCCL_IN_PROGRESS;
    if (failed) {
        explain(&g->library, g->comm, error, why);
    }
    if (failed || tchi_neighbors_lost(&g->neighbors, why, sizeof why)) {
        drop(g, "a collective:", why);
    }
    return g->comm != NULL;
}

/* Calls of a nonblocking communicator return early, and it accepts no other call until they are done. */
static int wait_for(nccl_group *g, const char *operation, int result)
{
    double begun = tchi_watch_now();
    while (result == NCCL_IN_PROGRESS && g->timeout_s > 0.0) {
        int asked = g->library.async_error(g->comm, &result);
        result = asked != NCCL_SUCCESS ? asked : result;
        if (result == NCCL_IN_PROGRESS && tchi_watch_now() - begun > g->timeout_s) {
            char why[64];
            snprintf(why, sizeof why, "is not done within %g s", g->timeout_s);
            drop(g, operation, why);
            break;
        }
        if (result == NCCL_IN_PROGRESS) {
            nanosleep(&(struct timespec){0, 20000}, NULL);
        }
    }
    return result;
}

/* --- collectives ------------------------------------------------------------------------------------------------- */

static tch_status begin_collective(nccl_group *g)
{
    pthread_mutex_lock(&g->watch.lock);
    if (g->comm != NULL) {
        return TCH_OK;
    }
    pthread_mutex_unlock(&g->watch.lock);
    return tchi_fail(TCH_ERR_COMM, "%s", g->failure);
}

static tch_status finish(nccl_group *g, const char *operation, int result, void *stream)
{
    result = wait_for(g, operation, result);
    tch_status status =
        g->comm == NULL ? tchi_fail(TCH_ERR_COMM, "%s", g->failure) : check_result(&g->library, g->comm, result);
    if (status == TCH_OK) {
        tchi_watch_note(&g->watch, operation, stream);
    }
    pthread_mutex_unlock(&g->watch.lock);
    return status;
}

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    nccl_group *g = user;
    TCHI_TRY(begin_collective(g));
    return finish(g, "all_gather", g->library.all_gather(send, receive, (size_t)bytes, NCCL_INT8, g->comm, stream),
                  stream);
}

static bool is_well(int result)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS;
}

static int exchange(nccl_group *g, const char *send, char *receive, const tch_comm_counts *c, void *stream)
{
    int result = NCCL_SUCCESS;
    for (int32_t r = 0; r < g->size && is_well(result); r++) {
        if (c->send_bytes[r] > 0) {
            result =
                g->library.send(send + c->send_offsets[r], (size_t)c->send_bytes[r], NCCL_INT8, r, g->comm, stream);
        }
        if (c->receive_bytes[r] > 0 && is_well(result)) {
            result = g->library.receive(receive + c->receive_offsets[r], (size_t)c->receive_bytes[r], NCCL_INT8, r,
                                        g->comm, stream);
        }
    }
    return result;
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    nccl_group *g = user;
    TCHI_TRY(begin_collective(g));
    int result = g->library.group_start();
    if (is_well(result)) {
        int queued = exchange(g, send, receive, counts, stream);
        int ended = g->library.group_end();
        result = is_well(queued) ? ended : queued;
    }
    return finish(g, "all_to_all", result, stream);
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    nccl_group *g = user;
    TCHI_TRY(begin_collective(g));
    return finish(g, "reduce_max",
                  g->library.all_reduce(values, values, (size_t)count, NCCL_INT32, NCCL_MAX, g->comm, stream), stream);
}

static tch_status check_errors(void *user)
{
    nccl_group *g = user;
    int error = NCCL_SUCCESS;
    TCHI_TRY(begin_collective(g));
    tch_status status = check_result(&g->library, g->comm, g->library.async_error(g->comm, &error));
    status = status == TCH_OK ? check_result(&g->library, g->comm, error) : status;
    pthread_mutex_unlock(&g->watch.lock);
    return status;
}

static void give_up(void *user)
{
    nccl_group *g = user;
    pthread_mutex_lock(&g->watch.lock);
    if (g->comm != NULL) {
        tchi_neighbors_give_up(&g->neighbors, tch_last_error());
        drop(g, "the group", "was given up");
    }
    pthread_mutex_unlock(&g->watch.lock);
}

/* Under the lock, or as the last user. A nonblocking communicator is flushed first, within its timeout. */
static void destroy(nccl_group *g)
{
    if (g->timeout_s > 0.0 && g->comm != NULL && g->library.finalize != NULL) {
        (void)wait_for(g, "the end of the group", g->library.finalize(g->comm));
    }
    if (g->comm != NULL) {
        g->library.destroy(g->comm);
    }
}

static void release(void *user)
{
    nccl_group *g = user;
    tchi_watch_close(&g->watch);
    destroy(g);
    tchi_neighbors_close(&g->neighbors);
    pthread_mutex_destroy(&g->watch.lock);
    tchi_host_release(g, sizeof *g);
}

/* --- making ------------------------------------------------------------------------------------------------------ */

tch_status tch_comm_nccl_id(char id[TCH_NCCL_ID_BYTES])
{
    nccl_library library;
    nccl_id made;
    TCHI_TRY(tchi_check_not_null("tch_comm_nccl_id", "id", id));
    TCHI_TRY(find_library(&library));
    TCHI_TRY(check_result(&library, NULL, library.get_id(&made)));
    memcpy(id, made.bytes, sizeof made.bytes);
    return TCH_OK;
}

/* Without a timeout, or before NCCL 2.14, uses the blocking call. */
static tch_status init(nccl_group *g, const char *id, int32_t rank)
{
    nccl_config config = {sizeof config, NCCL_CONFIG_MAGIC, NCCL_CONFIG_VERSION, 0};
    nccl_id made;
    memcpy(made.bytes, id, sizeof made.bytes);
    bool waits = g->timeout_s <= 0.0 || g->library.init_rank_config == NULL;
    int result = waits ? g->library.init_rank(&g->comm, g->size, made, rank)
                       : g->library.init_rank_config(&g->comm, g->size, made, rank, &config);
    result = wait_for(g, "the meeting of the ranks", result);
    return result == NCCL_IN_PROGRESS ? tchi_fail(TCH_ERR_COMM, "%s", g->failure)
                                      : check_result(&g->library, g->comm, result);
}

static tch_status join_group(nccl_group *g, const char *id, int32_t rank, const char *name, tch_comm **comm)
{
    static const tch_comm_ops ops = {sizeof ops, all_gather, all_to_all, reduce_max, check_errors, give_up, release};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    config.name = name == NULL ? "NCCL" : name;
    config.rank = rank;
    config.size = g->size;
    config.ops = &ops;
    config.user = g;
    TCHI_TRY(find_library(&g->library));
    tchi_neighbors_open(&g->neighbors, id, TCH_NCCL_ID_BYTES, rank, g->size);
    TCHI_TRY(init(g, id, rank));
    tchi_neighbors_met(&g->neighbors);
    if (g->timeout_s > 0.0) {
        TCHI_TRY(tchi_watch_open(&g->watch));
    }
    return tch_comm_create(&config, comm);
}

static tch_status check_arguments(const tch_context *context, const char *id, int32_t rank, int32_t size,
                                  const tch_comm_nccl_config *config)
{
    static const char function[] = "tch_comm_create_nccl";
    if (id == NULL || size < 1 || rank < 0 || rank >= size) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "%s: comm or id is NULL, or rank is %d and size %d, expected 0 <= rank < size", function, rank,
                         size);
    }
    if (config->struct_size != sizeof *config) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: config must point to a struct set to TCH_COMM_NCCL_CONFIG_INIT",
                         function);
    }
    if (!isfinite(config->timeout_s) || config->timeout_s < 0.0) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "%s: timeout_s is %g, expected 0 for none, or seconds", function,
                         config->timeout_s);
    }
    if (context == NULL || tch_context_device(context).type != TCH_DEVICE_CUDA) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "%s: NCCL is for GPUs, expected a context on one", function);
    }
    return TCH_OK;
}

tch_status tch_comm_create_nccl_with(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank, int32_t size,
                                     const tch_comm_nccl_config *config, tch_comm **comm)
{
    const tch_comm_nccl_config defaults = TCH_COMM_NCCL_CONFIG_INIT;
    config = config == NULL ? &defaults : config;
    TCHI_TRY(tchi_check_not_null("tch_comm_create_nccl", "comm", comm));
    *comm = NULL;
    TCHI_TRY(check_arguments(context, id, rank, size, config));
    TCHI_ENTER(context, "tch_comm_create_nccl");
    nccl_group *g;
    TCHI_TRY(tchi_host_take(sizeof *g, "a group of NCCL", &g));
    g->size = size;
    g->timeout_s = config->timeout_s;
    g->neighbors.file = -1;
    g->watch = (tchi_watch){.timeout_s = config->timeout_s, .look = is_healthy, .lost = lose, .user = g};
    pthread_mutex_init(&g->watch.lock, NULL);
    tch_status status = join_group(g, id, rank, config->name, comm);
    if (status != TCH_OK) {
        give_up(g);
        release(g);
    }
    return status;
}

tch_status tch_comm_create_nccl(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank, int32_t size,
                                tch_comm **comm)
{
    return tch_comm_create_nccl_with(context, id, rank, size, NULL, comm);
}

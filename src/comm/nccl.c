/* Groups over NCCL, which is opened at run time: the one that the process has loaded, as PyTorch does, or the system's.
 * The few declarations below are of its stable interface, so that nothing of it is needed to build. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "core/allocator.h"
#include "core/check.h"
#include "core/list.h"
#include "core/status.h"

typedef struct nccl_comm *nccl_comm;
typedef struct nccl_id {
    char bytes[TCH_NCCL_ID_BYTES];
} nccl_id;

enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum { NCCL_INT8 = 0, NCCL_INT32 = 2 };
enum { NCCL_MAX = 2 };

typedef struct nccl_library {
    int (*get_id)(nccl_id *id);
    int (*init_rank)(nccl_comm *comm, int ranks, nccl_id id, int rank);
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
    nccl_comm comm;
    int32_t size;
} nccl_group;

/* --- the library ------------------------------------------------------------------------------------------------- */

/* Never closed: others of the process use it. */
static void *open_library(void)
{
    static const char name[] = "libnccl.so.2";
    const char *named = getenv("TORCHIUM_NCCL");
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
    return TCH_OK;
}

static tch_status check(const nccl_library *library, int result)
{
    return result == NCCL_SUCCESS || result == NCCL_IN_PROGRESS
               ? TCH_OK
               : tchi_fail(TCH_ERR_COMM, "NCCL: %s", library->error_text(result));
}

/* --- collectives ------------------------------------------------------------------------------------------------- */

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    nccl_group *g = user;
    return check(&g->library, g->library.all_gather(send, receive, (size_t)bytes, NCCL_INT8, g->comm, stream));
}

static int exchange(nccl_group *g, const char *send, char *receive, const tch_comm_counts *c, void *stream)
{
    int result = NCCL_SUCCESS;
    for (int32_t r = 0; r < g->size && result == NCCL_SUCCESS; r++) {
        if (c->send_bytes[r] > 0) {
            result =
                g->library.send(send + c->send_offsets[r], (size_t)c->send_bytes[r], NCCL_INT8, r, g->comm, stream);
        }
        if (c->receive_bytes[r] > 0 && result == NCCL_SUCCESS) {
            result = g->library.receive(receive + c->receive_offsets[r], (size_t)c->receive_bytes[r], NCCL_INT8, r,
                                        g->comm, stream);
        }
    }
    return result;
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    nccl_group *g = user;
    TCHI_TRY(check(&g->library, g->library.group_start()));
    int queued = exchange(g, send, receive, counts, stream);
    int ended = g->library.group_end();
    return check(&g->library, queued != NCCL_SUCCESS ? queued : ended);
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    nccl_group *g = user;
    return check(&g->library,
                 g->library.all_reduce(values, values, (size_t)count, NCCL_INT32, NCCL_MAX, g->comm, stream));
}

static tch_status check_errors(void *user)
{
    nccl_group *g = user;
    int error = NCCL_SUCCESS;
    TCHI_TRY(check(&g->library, g->library.async_error(g->comm, &error)));
    return check(&g->library, error);
}

static void give_up(void *user)
{
    nccl_group *g = user;
    if (g->comm != NULL) {
        g->library.abort(g->comm);
        g->comm = NULL;
    }
}

static void release(void *user)
{
    nccl_group *g = user;
    if (g->comm != NULL) {
        g->library.destroy(g->comm);
    }
    tchi_host_release(g, sizeof *g);
}

/* --- making ------------------------------------------------------------------------------------------------------ */

tch_status tch_comm_nccl_id(char id[TCH_NCCL_ID_BYTES])
{
    nccl_library library;
    nccl_id made;
    if (id == NULL) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "tch_comm_nccl_id: id is NULL");
    }
    TCHI_TRY(find_library(&library));
    TCHI_TRY(check(&library, library.get_id(&made)));
    memcpy(id, made.bytes, sizeof made.bytes);
    return TCH_OK;
}

static tch_status join(nccl_group *g, const char *id, int32_t rank, tch_comm **comm)
{
    static const tch_comm_ops ops = {sizeof ops, all_gather, all_to_all, reduce_max, check_errors, give_up, release};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    config.name = "NCCL";
    config.rank = rank;
    config.size = g->size;
    config.ops = &ops;
    config.user = g;
    nccl_id made;
    memcpy(made.bytes, id, sizeof made.bytes);
    TCHI_TRY(find_library(&g->library));
    TCHI_TRY(check(&g->library, g->library.init_rank(&g->comm, g->size, made, rank)));
    tch_status status = tch_comm_create(&config, comm);
    if (status != TCH_OK) {
        give_up(g);
    }
    return status;
}

tch_status tch_comm_create_nccl(tch_context *context, const char id[TCH_NCCL_ID_BYTES], int32_t rank, int32_t size,
                                tch_comm **comm)
{
    if (comm == NULL || id == NULL || size < 1 || rank < 0 || rank >= size) {
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT,
                         "tch_comm_create_nccl: comm or id is NULL, or rank is %d and size %d, expected 0 <= rank < "
                         "size",
                         rank, size);
    }
    *comm = NULL;
    if (context == NULL || tch_context_device(context).type != TCH_DEVICE_CUDA) {
        return tchi_fail(TCH_ERR_UNSUPPORTED, "tch_comm_create_nccl: NCCL is for GPUs, expected a context on one");
    }
    TCHI_ENTER(context, "tch_comm_create_nccl");
    nccl_group *g;
    TCHI_TRY(tchi_host_take(sizeof *g, "a group of NCCL", &g));
    g->size = size;
    tch_status status = join(g, id, rank, comm);
    if (status != TCH_OK) {
        tchi_host_release(g, sizeof *g);
    }
    return status;
}

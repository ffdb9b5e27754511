/* An NCCL of one rank, and the CUDA driver's events, on the CPU. fake_nccl_behave sets what happens to later
 * collectives: one never completes on the GPU, never starts, or an asynchronous error is reported. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct fake_comm {
    int64_t in_progress;
    int blocking;
} fake_comm;

typedef struct unique_id {
    char bytes[128];
} unique_id;

typedef struct fake_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} fake_config;

enum { SUCCESS = 0, INVALID = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { WELL, NEVER_ENDS, NEVER_BEGINS, ERROR_BESIDE, NEVER_MEETS };

/* One communicator at a time. */
static atomic_int behavior;
static atomic_int aborts;
static fake_comm the_comm;

void fake_nccl_behave(int how)
{
    behavior = how;
}

int fake_nccl_aborts(void)
{
    return aborts;
}

int ncclGetUniqueId(unique_id *id)
{
    memset(id, 0, sizeof *id);
    return SUCCESS;
}

int ncclCommInitRank(fake_comm **comm, int ranks, unique_id id, int rank)
{
    the_comm = (fake_comm){.blocking = 1};
    *comm = &the_comm;
    return ranks == 1 && rank == 0 ? SUCCESS : INVALID;
}

int ncclCommInitRankConfig(fake_comm **comm, int ranks, unique_id id, int rank, fake_config *config)
{
    int result = ncclCommInitRank(comm, ranks, id, rank);
    if (config->size < sizeof *config || config->magic != 0xCAFEBEEFu || config->version != 21400 ||
        config->blocking != 0) {
        return INVALID;
    }
    the_comm.blocking = 0;
    the_comm.in_progress = behavior == NEVER_MEETS ? INT64_MAX : 3;
    return result == SUCCESS ? IN_PROGRESS : result;
}

/* A call of a nonblocking communicator completes after a few polls, or never. */
static int begin(fake_comm *comm)
{
    if (comm->blocking) {
        return SUCCESS;
    }
    if (comm->in_progress > 0) {
        return INVALID; /* the previous call has not completed */
    }
    comm->in_progress = behavior == NEVER_BEGINS ? INT64_MAX : 2;
    return IN_PROGRESS;
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, fake_comm *comm, void *stream)
{
    memmove(receive, send, count);
    return begin(comm);
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, fake_comm *comm, void *stream)
{
    memmove(receive, send, count * sizeof(int32_t));
    return begin(comm);
}

static const void *sent;

int ncclSend(const void *data, size_t count, int type, int peer, fake_comm *comm, void *stream)
{
    sent = data;
    return SUCCESS;
}

int ncclRecv(void *data, size_t count, int type, int peer, fake_comm *comm, void *stream)
{
    memmove(data, sent, count);
    return SUCCESS;
}

int ncclGroupStart(void)
{
    return SUCCESS;
}

int ncclGroupEnd(void)
{
    return begin(&the_comm);
}

int ncclCommGetAsyncError(fake_comm *comm, int *error)
{
    comm->in_progress -= comm->in_progress > 0 && comm->in_progress < INT64_MAX;
    *error = behavior == ERROR_BESIDE ? REMOTE_ERROR : comm->in_progress > 0 ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}

int ncclCommAbort(fake_comm *comm)
{
    aborts++;
    return SUCCESS;
}

int ncclCommFinalize(fake_comm *comm)
{
    return begin(comm);
}

int ncclCommDestroy(fake_comm *comm)
{
    return comm->in_progress > 0 ? INVALID : SUCCESS;
}

const char *ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "another error";
}

/* --- the driver -------------------------------------------------------------------------------------------------- */

static int one_event;

int cuEventCreate(void **event, unsigned flags)
{
    *event = &one_event;
    return 0;
}

int cuEventRecord(void *event, void *stream)
{
    return 0;
}

int cuEventQuery(void *event)
{
    return behavior == NEVER_ENDS ? 600 : 0;
}

int cuEventDestroy_v2(void *event)
{
    return 0;
}

int cuCtxGetCurrent(void **context)
{
    *context = &one_event;
    return 0;
}

int cuCtxSetCurrent(void *context)
{
    return 0;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = 0;
    return 0;
}

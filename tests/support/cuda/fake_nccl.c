/* NCCL for processes of one machine, and the CUDA driver's events. Ranks exchange messages through shared memory, in
 * stream order on streams of the emulator (tests/emulator), and at once where the stream is NULL. A rank that waits is
 * freed by its own abort, as in NCCL, or after a limit.
 *
 * Every message has its operation, count, type and number. A receiver that expects another one, or waits beyond the
 * limit, reports an asynchronous error to all ranks. When a communicator is made, FAKE_NCCL_FAULT may name a fault of
 * this rank and the number of the collective that has it, and FAKE_NCCL_DELAY is the longest delay of collectives, in
 * microseconds. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "emulator/cuda/cuda_runtime_api.h"

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { INT8 = 0, INT32 = 2, MAX = 2, MOST_RANKS = 8, LIMIT_S = 60 };
#define ROOM ((size_t)16 << 20) /* bytes of a message; pages that are not written take no memory */

typedef enum kind { ALL_GATHER, ALL_REDUCE, SEND } kind;
static const char *const kind_names[] = {"all_gather", "all_reduce", "send"};

typedef enum fault {
    WELL,
    NEVER_BEGINS, /* the call is never done */
    NEVER_ENDS,   /* it runs on the GPU until it is aborted */
    LOSES,        /* its messages */
    MISCOUNTS,    /* sends one byte more than it should */
    SWAPS,        /* comes after the next one */
    DIES,         /* kills the process */
    FAILS         /* reports an asynchronous error to all ranks */
} fault;
static const char *const fault_names[] = {"",          "never begins", "never ends", "loses",
                                          "miscounts", "swaps",        "dies",       "fails"};

/* From one rank to another, one message at a time. */
typedef struct header {
    uint32_t number; /* of the messages between these two */
    int32_t kind, type;
    uint64_t bytes;
} header;

typedef struct channel {
    atomic_uint posted, received;
    header header;
} channel;

typedef struct world {
    atomic_uint changes; /* a futex */
    atomic_int joined, error;
    char words[200]; /* of the error */
    channel channels[MOST_RANKS][MOST_RANKS];
    char data[];
} world;

#define WORLD_BYTES (sizeof(world) + MOST_RANKS * MOST_RANKS * ROOM)

typedef struct fake_comm {
    world *world;
    int rank, ranks, issued, calls, fault_at, delay_us;
    fault fault;
    int64_t in_progress; /* polls until the last call is done */
    atomic_int aborted, references, executed;
    uint32_t sent[MOST_RANKS], received[MOST_RANKS];
} fake_comm;

typedef struct transfer {
    int peer, receives;
    void *data;
    header header;
} transfer;

typedef struct operation {
    fake_comm *comm;
    void *stream;
    int number, count;
    fault fault;
    transfer transfers[2 * MOST_RANKS];
    int32_t *maximum, *parts; /* of a reduction: the parts are what the ranks sent */
} operation;

/* --- waiting ------------------------------------------------------------------------------------------------------ */

static void announce(world *w)
{
    w->changes++;
    syscall(SYS_futex, &w->changes, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* The first error stays. */
static void report(world *w, int error, const char *words)
{
    int none = SUCCESS;
    if (atomic_compare_exchange_strong(&w->error, &none, IN_PROGRESS)) {
        snprintf(w->words, sizeof w->words, "%s", words);
        w->error = error;
    }
    announce(w);
}

typedef enum awaited { A_MESSAGE, ROOM_FOR_ONE, ALL_RANKS, ITS_TURN, THE_ABORT } awaited;
static const char *const awaited_names[] = {"a message of rank", "a receive of rank", "ranks:", "operation",
                                            "the abort"};

static int has_come(const fake_comm *c, awaited what, int number)
{
    const world *w = c->world;
    const channel *from = &w->channels[number % MOST_RANKS][c->rank];
    const channel *to = &w->channels[c->rank][number % MOST_RANKS];
    return what == A_MESSAGE      ? from->posted != from->received
           : what == ROOM_FOR_ONE ? to->posted == to->received
           : what == ALL_RANKS    ? w->joined >= number
                                  : what == ITS_TURN && c->executed == number;
}

/* Whether it has come, and not the abort or the limit. */
static int wait_for(const fake_comm *c, awaited what, int number)
{
    world *w = c->world;
    for (time_t end = time(NULL) + LIMIT_S;;) {
        unsigned seen = w->changes;
        if (has_come(c, what, number) || c->aborted) {
            return !c->aborted;
        }
        if (time(NULL) > end) {
            char words[120];
            snprintf(words, sizeof words, "rank %d waited %d s for %s %d", c->rank, LIMIT_S, awaited_names[what],
                     number);
            report(w, REMOTE_ERROR, words);
            return 0;
        }
        syscall(SYS_futex, &w->changes, FUTEX_WAIT, seen, &(struct timespec){0, 20000000}, NULL, 0);
    }
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static char *room_of(world *w, int from, int to)
{
    return w->data + (size_t)(from * MOST_RANKS + to) * ROOM;
}

static int post(const operation *o, const transfer *t)
{
    fake_comm *c = o->comm;
    channel *to = &c->world->channels[c->rank][t->peer];
    header h = t->header;
    h.number = ++c->sent[t->peer];
    if (o->fault == LOSES && t->peer != c->rank) {
        return 1;
    }
    if (!wait_for(c, ROOM_FOR_ONE, t->peer)) {
        return 0;
    }
    memcpy(room_of(c->world, c->rank, t->peer), t->data, h.bytes);
    h.bytes += o->fault == MISCOUNTS;
    to->header = h;
    to->posted++;
    announce(c->world);
    return 1;
}

static int receive(fake_comm *c, const transfer *t)
{
    channel *from = &c->world->channels[t->peer][c->rank];
    header wanted = t->header;
    wanted.number = ++c->received[t->peer];
    if (!wait_for(c, A_MESSAGE, t->peer)) {
        return 0;
    }
    const header *h = &from->header;
    if (h->number != wanted.number || h->kind != wanted.kind || h->type != wanted.type || h->bytes != wanted.bytes) {
        char words[200];
        snprintf(words, sizeof words, "rank %d sent message %u, %s of %llu bytes, and rank %d expected %u, %s of %llu",
                 t->peer, h->number, kind_names[h->kind], (unsigned long long)h->bytes, c->rank, wanted.number,
                 kind_names[wanted.kind], (unsigned long long)wanted.bytes);
        report(c->world, INVALID_USAGE, words);
        return wait_for(c, THE_ABORT, 0); /* as a kernel waits */
    }
    memcpy(t->data, room_of(c->world, t->peer, c->rank), h->bytes);
    from->received++;
    announce(c->world);
    return 1;
}

/* All sends, then all receives. */
static int exchange(const operation *o)
{
    int good = 1;
    for (int i = 0; i < 2 * o->count && good; i++) {
        const transfer *t = &o->transfers[i % o->count];
        good = t->receives != (i >= o->count) || (t->receives ? receive(o->comm, t) : post(o, t));
    }
    return good;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static void drop_comm(fake_comm *c)
{
    if (--c->references == 0) {
        munmap(c->world, WORLD_BYTES);
        free(c);
    }
}

/* Operations of a communicator run in the order of their calls, on any streams. Whether it may run. */
static int begin_operation(const operation *o)
{
    fake_comm *c = o->comm;
    unsigned random = (unsigned)o->number * 2654435761u + (unsigned)c->rank * 40503u;
    nanosleep(&(struct timespec){0, c->delay_us > 0 ? 1000 * (long)(random % (unsigned)c->delay_us) : 0}, NULL);
    if (!wait_for(c, ITS_TURN, o->number)) {
        return 0;
    }
    if (o->fault == DIES) {
        raise(SIGKILL);
    }
    if (o->fault == FAILS) {
        report(c->world, SYSTEM_ERROR, "a planted error");
    }
    return o->fault == NEVER_ENDS || c->world->error != SUCCESS ? wait_for(c, THE_ABORT, 0) : 1;
}

static void run_operation(void *data)
{
    operation *o = *(operation **)data;
    fake_comm *c = o->comm;
    int good = begin_operation(o) && exchange(o);
    size_t count = o->maximum != NULL && good ? o->transfers[0].header.bytes / sizeof(int32_t) : 0;
    for (size_t i = 0; i < count * (size_t)c->ranks; i++) {
        int32_t *maximum = &o->maximum[i % count];
        *maximum = o->parts[i] > *maximum ? o->parts[i] : *maximum;
    }
    c->executed++;
    announce(c->world);
    free(o->parts);
    free(o);
    drop_comm(c);
}

static void issue(operation *o)
{
    o->number = o->comm->issued++;
    o->comm->references++;
    emulator_submit(o->stream, run_operation, &o, sizeof o);
}

/* A call of a nonblocking communicator is done after a few polls, and the next one must wait for it. */
static int begin_call(fake_comm *c)
{
    if (c->in_progress > 0) {
        return INVALID;
    }
    c->in_progress = 2;
    return IN_PROGRESS;
}

static int submit(operation *o, void *stream)
{
    static operation *held; /* behind the next one */
    int result = begin_call(o->comm);
    o->stream = stream;
    o->fault = ++o->comm->calls == o->comm->fault_at ? o->comm->fault : WELL;
    if (o->fault == NEVER_BEGINS) {
        o->comm->in_progress = INT64_MAX;
        free(o->parts);
        free(o);
    } else if (o->fault == SWAPS) {
        held = o;
    } else {
        issue(o);
        if (held != NULL) {
            issue(held);
        }
        held = NULL;
    }
    return result;
}

/* Makes the operation with its first transfer. */
static operation *add_transfer(operation *o, fake_comm *comm, int peer, int receives, const void *data, kind kind,
                               int type, size_t count)
{
    o = o != NULL ? o : calloc(1, sizeof *o);
    o->comm = comm;
    size_t bytes = count * (type == INT32 ? sizeof(int32_t) : 1);
    if (o->count == 2 * MOST_RANKS || bytes > ROOM || (type != INT8 && type != INT32)) {
        fprintf(stderr, "fake NCCL: %d transfers, one of %zu bytes of type %d\n", o->count, bytes, type);
        abort();
    }
    o->transfers[o->count++] = (transfer){peer, receives, (void *)data, {0, (int32_t)kind, type, bytes}};
    return o;
}

/* To and from every rank, this one included. */
static operation *to_all(fake_comm *comm, const void *send, char *receive, kind kind, int type, size_t count)
{
    operation *o = NULL;
    for (int r = 0; r < comm->ranks; r++) {
        o = add_transfer(o, comm, r, 0, send, kind, type, count);
        add_transfer(o, comm, r, 1, receive + (size_t)r * o->transfers[0].header.bytes, kind, type, count);
    }
    return o;
}

int ncclAllGather(const void *send, void *receive, size_t count, int type, fake_comm *comm, void *stream)
{
    return submit(to_all(comm, send, receive, ALL_GATHER, type, count), stream);
}

int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, fake_comm *comm, void *stream)
{
    if (type != INT32 || op != MAX || send != receive) {
        return INVALID;
    }
    int32_t *parts = malloc((size_t)comm->ranks * count * sizeof *parts);
    operation *o = to_all(comm, send, (char *)parts, ALL_REDUCE, type, count);
    o->maximum = receive;
    o->parts = parts;
    return submit(o, stream);
}

/* One group at a time, on one stream. */
static operation *grouped;

int ncclSend(const void *data, size_t count, int type, int peer, fake_comm *comm, void *stream)
{
    grouped = add_transfer(grouped, comm, peer, 0, data, SEND, type, count);
    grouped->stream = stream;
    return SUCCESS;
}

int ncclRecv(void *data, size_t count, int type, int peer, fake_comm *comm, void *stream)
{
    grouped = add_transfer(grouped, comm, peer, 1, data, SEND, type, count);
    grouped->stream = stream;
    return SUCCESS;
}

int ncclGroupStart(void)
{
    return SUCCESS;
}

int ncclGroupEnd(void)
{
    operation *o = grouped;
    grouped = NULL;
    return o != NULL ? submit(o, o->stream) : SUCCESS;
}

/* --- communicators ------------------------------------------------------------------------------------------------ */

typedef struct unique_id {
    char bytes[128];
} unique_id;

typedef struct fake_config {
    size_t size;
    unsigned magic, version;
    int blocking;
} fake_config;

/* The memory is found through this process, which must live until all ranks have it. */
int ncclGetUniqueId(unique_id *id)
{
    int file = memfd_create("fake nccl", MFD_CLOEXEC);
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "/proc/%d/fd/%d", (int)getpid(), file);
    return file >= 0 && ftruncate(file, (off_t)WORLD_BYTES) == 0 ? SUCCESS : SYSTEM_ERROR;
}

static void plant_fault(fake_comm *c)
{
    const char *delay = getenv("FAKE_NCCL_DELAY");
    const char *given = getenv("FAKE_NCCL_FAULT");
    char name[16] = "";
    c->delay_us = delay == NULL ? 0 : atoi(delay);
    if (given == NULL || sscanf(given, "%15[^0-9]%d", name, &c->fault_at) != 2) {
        return;
    }
    for (int f = WELL + 1; f <= FAILS; f++) {
        c->fault = strncmp(name, fault_names[f], strlen(fault_names[f])) == 0 ? (fault)f : c->fault;
    }
}

/* Blocking communicators, of groups without a timeout. */
int ncclCommInitRank(fake_comm **comm, int ranks, unique_id id, int rank)
{
    return INVALID;
}

int ncclCommInitRankConfig(fake_comm **comm, int ranks, unique_id id, int rank, fake_config *config)
{
    bool known = config->size >= sizeof *config && config->magic == 0xCAFEBEEFu && config->version == 21400;
    int file = known && config->blocking == 0 && ranks <= MOST_RANKS ? open(id.bytes, O_RDWR | O_CLOEXEC) : -1;
    void *memory = mmap(NULL, WORLD_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) {
        return SYSTEM_ERROR;
    }
    *comm = calloc(1, sizeof **comm);
    **comm = (fake_comm){.world = memory, .rank = rank, .ranks = ranks, .references = 1};
    plant_fault(*comm);
    (*comm)->world->joined++;
    announce((*comm)->world);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(fake_comm *comm, int *error)
{
    comm->in_progress -= comm->in_progress > 0 && comm->in_progress < INT64_MAX;
    int waits = comm->in_progress > 0 || !has_come(comm, ALL_RANKS, comm->ranks);
    *error = comm->world->error != SUCCESS ? comm->world->error : waits ? IN_PROGRESS : SUCCESS;
    return SUCCESS;
}

int ncclCommAbort(fake_comm *comm)
{
    comm->aborted = 1;
    announce(comm->world);
    drop_comm(comm);
    return SUCCESS;
}

int ncclCommDestroy(fake_comm *comm)
{
    int result = comm->in_progress > 0 ? INVALID : SUCCESS;
    wait_for(comm, ITS_TURN, comm->issued);
    drop_comm(comm);
    return result;
}

const char *ncclGetErrorString(int result)
{
    return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "another error";
}

const char *ncclGetLastError(fake_comm *comm)
{
    return comm == NULL ? "" : comm->world->words;
}

/* --- the driver --------------------------------------------------------------------------------------------------- */

typedef struct fake_event {
    atomic_int recorded, reached, references;
} fake_event;

static void drop_event(fake_event *event)
{
    if (--event->references == 0) {
        free(event);
    }
}

static void reach(void *data)
{
    fake_event *event = *(fake_event **)data;
    event->reached++;
    drop_event(event);
}

int cuEventCreate(fake_event **event, unsigned flags)
{
    *event = calloc(1, sizeof **event);
    (*event)->references = 1;
    return 0;
}

int cuEventRecord(fake_event *event, void *stream)
{
    event->recorded++;
    event->references++;
    emulator_submit(stream, reach, &event, sizeof event);
    return 0;
}

int cuEventQuery(const fake_event *event)
{
    return event->reached == event->recorded ? 0 : 600;
}

int cuEventDestroy_v2(fake_event *event)
{
    drop_event(event);
    return 0;
}

int cuCtxGetCurrent(void **current)
{
    *current = current;
    return 0;
}

int cuCtxSetCurrent(void *current)
{
    return 0;
}

int cuStreamIsCapturing(void *stream, int *status)
{
    *status = 0;
    return 0;
}

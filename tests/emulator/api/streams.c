/* Streams, events and graphs. Work runs immediately unless its stream is being captured: then it is kept with copies of
 * its arguments, and a launch of the graph runs it. A stream that waits for an event of a captured one joins the
 * capture. Calls that CUDA forbids during capture invalidate it, as in CUDA.
 *
 * With TORCHIUM_EMULATOR_STREAMS=asynchronous every stream has a thread that runs its work in order, and only waits of
 * the host wait for it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "control.h"

typedef struct node {
    emulator_action run;
    void *data;
    size_t bytes;
} node;

/* Also of an executable graph, which is the same graph with its own reference. */
struct emulator_graph {
    node *nodes;
    size_t count, room;
    int references;
};

struct emulator_event {
    uint64_t capture;           /* of its recording, or 0 */
    uint64_t recorded, reached; /* recordings so far, and the latest that its stream has reached */
    int references;             /* the program's, and those of queued work */
};

typedef struct work {
    struct work *next;
    emulator_action run;
    max_align_t data[];
} work;

struct emulator_queue {
    pthread_t thread;
    work *first, *last;
    uint64_t submitted, done;
    int closing;
    struct emulator_queue *next; /* of all */
};

enum { MOST_CAPTURES = 8 };

typedef struct capture {
    uint64_t number; /* 0 if free */
    cudaGraph_t graph;
    int blocking, broken;
} capture;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; /* of any queue */
static struct emulator_queue *queues;
static capture captures[MOST_CAPTURES];
static uint64_t latest;
static _Thread_local enum cudaStreamCaptureMode thread_mode;

/* --- queues ------------------------------------------------------------------------------------------------------ */

static void *run_queue(void *argument)
{
    struct emulator_queue *q = argument;
    pthread_mutex_lock(&lock);
    while (q->first != NULL || !q->closing) {
        work *w = q->first;
        if (w == NULL) {
            pthread_cond_wait(&progress, &lock);
            continue;
        }
        q->first = w->next;
        pthread_mutex_unlock(&lock);
        w->run(w->data);
        free(w);
        emulator_keep_error();
        pthread_mutex_lock(&lock);
        q->done++;
        pthread_cond_broadcast(&progress);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Under the lock. */
static void enqueue(struct emulator_queue *q, emulator_action run, const void *data, size_t bytes)
{
    work *w = malloc(sizeof *w + bytes);
    w->next = NULL;
    w->run = run;
    memcpy(w->data, data, bytes);
    *(q->first == NULL ? &q->first : &q->last->next) = w;
    q->last = w;
    q->submitted++;
    pthread_cond_broadcast(&progress);
}

static struct emulator_queue *open_queue(void)
{
    const char *how = getenv("TORCHIUM_EMULATOR_STREAMS");
    struct emulator_queue *q = how != NULL && strcmp(how, "asynchronous") == 0 ? calloc(1, sizeof *q) : NULL;
    pthread_mutex_lock(&lock);
    if (q != NULL && pthread_create(&q->thread, NULL, run_queue, q) == 0) {
        q->next = queues;
        queues = q;
    }
    pthread_mutex_unlock(&lock);
    return q;
}

static void close_queue(struct emulator_queue *q)
{
    struct emulator_queue **link = &queues;
    pthread_mutex_lock(&lock);
    while (*link != q) {
        link = &(*link)->next;
    }
    *link = q->next;
    q->closing = 1;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&lock);
    pthread_join(q->thread, NULL);
    free(q);
}

/* Under the lock. */
static void finish_queue(const struct emulator_queue *q)
{
    for (uint64_t target = q->submitted; q->done < target;) {
        pthread_cond_wait(&progress, &lock);
    }
}

void emulator_finish_all(void)
{
    pthread_mutex_lock(&lock);
    for (const struct emulator_queue *q = queues; q != NULL; q = q->next) {
        finish_queue(q);
    }
    pthread_mutex_unlock(&lock);
}

/* --- captures ---------------------------------------------------------------------------------------------------- */

static capture *find_capture(uint64_t number)
{
    for (int i = 0; number != 0 && i < MOST_CAPTURES; i++) {
        if (captures[i].number == number) {
            return &captures[i];
        }
    }
    return NULL;
}

static capture *capture_of(cudaStream_t stream)
{
    return stream != NULL ? find_capture(stream->capture) : NULL;
}

static void add_node(cudaGraph_t graph, emulator_action run, const void *data, size_t bytes)
{
    if (graph->count == graph->room) {
        graph->room = graph->room > 0 ? 2 * graph->room : 64;
        graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
    }
    node *added = &graph->nodes[graph->count++];
    *added = (node){run, malloc(bytes), bytes};
    memcpy(added->data, data, bytes);
}

static void submit(cudaStream_t stream, emulator_action run, void *data, size_t bytes)
{
    pthread_mutex_lock(&lock);
    const capture *c = capture_of(stream);
    if (c != NULL) {
        add_node(c->graph, run, data, bytes);
    } else if (stream->queue != NULL) {
        enqueue(stream->queue, run, data, bytes);
    }
    pthread_mutex_unlock(&lock);
    if (c == NULL && stream->queue == NULL) {
        run(data);
    }
}

int emulator_breaks_capture(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    capture *c = capture_of(stream);
    if (c != NULL) {
        c->broken = 1;
    }
    pthread_mutex_unlock(&lock);
    return c != NULL;
}

/* Queries of the default stream fail while a stream is captured that it would wait for. */
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    int implicit = 0;
    pthread_mutex_lock(&lock);
    *status = capture_of(stream) != NULL ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    for (int i = 0; stream == NULL && i < MOST_CAPTURES; i++) {
        implicit |= captures[i].number != 0 && captures[i].blocking;
    }
    pthread_mutex_unlock(&lock);
    return emulator_result(implicit ? cudaErrorStreamCaptureImplicit : cudaSuccess);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    EMULATOR_FAULT();
    pthread_mutex_lock(&lock);
    capture *place = NULL;
    for (int i = 0; stream != NULL && capture_of(stream) == NULL && i < MOST_CAPTURES; i++) {
        place = captures[i].number == 0 ? &captures[i] : place;
    }
    if (place != NULL) {
        *place = (capture){++latest, calloc(1, sizeof *place->graph), stream->blocking, 0};
        stream->capture = latest;
    }
    pthread_mutex_unlock(&lock);
    return emulator_result(place != NULL ? cudaSuccess : cudaErrorIllegalState);
}

static void drop_graph(cudaGraph_t graph)
{
    pthread_mutex_lock(&lock);
    int references = --graph->references;
    pthread_mutex_unlock(&lock);
    if (references > 0) {
        return;
    }
    for (size_t i = 0; i < graph->count; i++) {
        free(graph->nodes[i].data);
    }
    free(graph->nodes);
    free(graph);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    pthread_mutex_lock(&lock);
    capture *place = capture_of(stream);
    capture ended = place != NULL ? *place : (capture){0};
    if (place != NULL) {
        *place = (capture){0};
        ended.graph->references = 1;
    }
    pthread_mutex_unlock(&lock);
    *graph = NULL;
    cudaError_t error = ended.broken ? cudaErrorStreamCaptureInvalidated : emulator_fault_of(__func__);
    if (ended.graph != NULL && error != cudaSuccess) {
        drop_graph(ended.graph);
    } else if (ended.graph != NULL) {
        *graph = ended.graph;
        emulated.graphs++;
    }
    return emulator_result(ended.graph != NULL ? error : cudaErrorIllegalState);
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    *count = graph->count;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags)
{
    EMULATOR_FAULT();
    graph->references++;
    emulated.executables++;
    *executable = (cudaGraphExec_t)(void *)graph;
    return cudaSuccess;
}

/* On a captured stream the nodes are added to its graph. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream)
{
    const struct emulator_graph *graph = (const struct emulator_graph *)(void *)executable;
    emulated.replayed_on = stream;
    EMULATOR_FAULT();
    emulator_note("launch", "");
    for (size_t i = 0; i < graph->count; i++) {
        emulator_submit(stream, graph->nodes[i].run, graph->nodes[i].data, graph->nodes[i].bytes);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    drop_graph(graph);
    emulated.graphs--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable)
{
    drop_graph((cudaGraph_t)(void *)executable);
    emulated.executables--;
    return cudaSuccess;
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    EMULATOR_FAULT();
    *stream = calloc(1, sizeof **stream);
    if (*stream == NULL) {
        return emulator_result(cudaErrorMemoryAllocation);
    }
    (*stream)->submit = submit;
    (*stream)->blocking = flags != cudaStreamNonBlocking;
    (*stream)->priority = priority;
    (*stream)->queue = open_queue();
    emulated.streams++;
    return cudaGetDevice(&(*stream)->device);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    EMULATOR_FAULT();
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, 0);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    if (stream->queue != NULL) {
        close_queue(stream->queue);
    }
    free(stream);
    emulated.streams--;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    EMULATOR_FAULT();
    emulated.waits++;
    if (emulator_breaks_capture(stream)) {
        return emulator_result(cudaErrorStreamCaptureUnsupported);
    }
    if (stream == NULL) {
        emulator_finish_all();
    } else if (stream->queue != NULL) {
        pthread_mutex_lock(&lock);
        finish_queue(stream->queue);
        pthread_mutex_unlock(&lock);
    }
    return emulator_result(emulator_kept_error());
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    if (stream == NULL) {
        return cudaGetDevice(device);
    }
    *device = stream->device;
    return emulator_result(emulator_breaks_capture(stream) ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
}

/* --- events ------------------------------------------------------------------------------------------------------ */

/* Work of a queue that reaches a recording of an event, or waits for it. */
typedef struct event_work {
    cudaEvent_t event;
    uint64_t recording;
} event_work;

/* Under the lock. */
static void drop_event(cudaEvent_t event)
{
    if (--event->references == 0) {
        free(event);
    }
}

static void reach(void *data)
{
    const event_work *w = data;
    pthread_mutex_lock(&lock);
    w->event->reached = w->recording;
    drop_event(w->event);
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&lock);
}

static void await(void *data)
{
    const event_work *w = data;
    pthread_mutex_lock(&lock);
    while (w->event->reached < w->recording) {
        pthread_cond_wait(&progress, &lock);
    }
    drop_event(w->event);
    pthread_mutex_unlock(&lock);
}

/* Under the lock: the work runs in the stream's queue, or now if it has none. */
static void submit_event(cudaStream_t stream, emulator_action run, cudaEvent_t event)
{
    event_work w = {event, event->recorded};
    event->references++;
    if (stream != NULL && stream->queue != NULL) {
        enqueue(stream->queue, run, &w, sizeof w);
        return;
    }
    pthread_mutex_unlock(&lock);
    run(&w);
    pthread_mutex_lock(&lock);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = calloc(1, sizeof **event);
    if (*event != NULL) {
        (*event)->references = 1;
    }
    return emulator_result(*event != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    const capture *c = capture_of(stream);
    event->capture = c != NULL ? c->number : 0;
    if (c == NULL) {
        event->recorded++;
        submit_event(stream, reach, event);
    }
    pthread_mutex_unlock(&lock);
    emulated.recorded = stream;
    return cudaSuccess;
}

/* A captured stream cannot wait for events outside its capture. */
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    pthread_mutex_lock(&lock);
    const capture *recorded = find_capture(event->capture);
    capture *waiting = capture_of(stream);
    int foreign = waiting != NULL && recorded != waiting;
    if (foreign) {
        waiting->broken = 1;
    } else if (recorded != NULL && stream != NULL) {
        stream->capture = recorded->number;
    } else if (recorded == NULL) {
        submit_event(stream, await, event);
    }
    pthread_mutex_unlock(&lock);
    emulated.waiting = stream;
    return emulator_result(foreign ? cudaErrorStreamCaptureIsolation : cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    submit_event(NULL, await, event);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    pthread_mutex_lock(&lock);
    drop_event(event);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* Streams, events and graphs. Work runs immediately unless its stream is being captured: then it is kept with copies of
 * its arguments, and a launch of the graph runs it. A stream that waits for an event of a captured one joins the
 * capture. Calls that CUDA forbids during capture invalidate it, as in CUDA. */
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
    uint64_t capture; /* of its recording, or 0 */
};

enum { MOST_CAPTURES = 8 };

typedef struct capture {
    uint64_t number; /* 0 if free */
    cudaGraph_t graph;
    int blocking, broken;
} capture;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static capture captures[MOST_CAPTURES];
static uint64_t latest;
static _Thread_local enum cudaStreamCaptureMode thread_mode;

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
    }
    pthread_mutex_unlock(&lock);
    if (c == NULL) {
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

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    EMULATOR_FAULT();
    *stream = calloc(1, sizeof **stream);
    if (*stream == NULL) {
        return emulator_result(cudaErrorMemoryAllocation);
    }
    (*stream)->submit = submit;
    (*stream)->blocking = flags != cudaStreamNonBlocking;
    emulated.streams++;
    return cudaGetDevice(&(*stream)->device);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithFlags(stream, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    emulated.streams--;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    EMULATOR_FAULT();
    emulated.waits++;
    return emulator_result(emulator_breaks_capture(stream) ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
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

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    *event = calloc(1, sizeof **event);
    return emulator_result(*event != NULL ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    const capture *c = capture_of(stream);
    event->capture = c != NULL ? c->number : 0;
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
    }
    pthread_mutex_unlock(&lock);
    emulated.waiting = stream;
    return emulator_result(foreign ? cudaErrorStreamCaptureIsolation : cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

/* Recorded work: a CUDA graph of the work queued between begin and end, launched as a whole. Captured on a separate
 * stream, since the context's may be the default stream, which cannot be captured; before changing anything read what
 * CUDA forbids during capture, to this thread and to others.
 *
 * A graph is launched by one call, which a profiler sees in the range of that call. With a profiler there is therefore
 * a graph per phase: the capture is split where a range begins or ends, and a replay opens and closes the same ranges
 * around the launches. The same kernels run in the same order. */
#include "backends/cuda/cuda.h"

#include <stdalign.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* --- whether to record ------------------------------------------------------------------------------------------- */

static int is_set(const char *variable, const char *value)
{
    const char *text = getenv(variable);
    return text != NULL && strcmp(text, value) == 0;
}

/* TORCHIUM_DEBUG_SYNC disables recording: a graph cannot synchronize after each kernel. */
void tchi_cuda_recorder_init(tchi_cuda_recorder *recorder)
{
    const char *variable = "TORCHIUM_CUDA_RECORD";
    recorder->enabled = !is_set(variable, "0") && !is_set("TORCHIUM_DEBUG_SYNC", "1");
    recorder->phases = is_set(variable, "phases") || (!is_set(variable, "whole") && tchi_cuda_profiler_attached());
}

/* --- contents ---------------------------------------------------------------------------------------------------- */

typedef enum part_kind { LAUNCH, PUSH, POP } part_kind;

typedef struct part {
    part_kind kind;
    const char *name;           /* of PUSH: a literal */
    cudaGraph_t graph;          /* until the end of the recording */
    cudaGraphExec_t executable; /* of LAUNCH; NULL if empty */
} part;

struct tchi_cuda_recorded {
    part *parts;
    int32_t count, room;
    bool spoiled; /* something is missing */
};

static void spoil_recording(tchi_cuda_recorded *recorded)
{
    if (recorded != NULL) {
        recorded->spoiled = true;
    }
}

static bool make_room(tchi_cuda_recorded *recorded)
{
    int32_t room = recorded->room > 0 ? 4 * recorded->room : 1;
    part *parts = tchi_cuda_host->allocate((size_t)room * sizeof *parts, alignof(max_align_t));
    if (parts == NULL) {
        return false;
    }
    if (recorded->count > 0) {
        memcpy(parts, recorded->parts, (size_t)recorded->count * sizeof *parts);
        tchi_cuda_host->release(recorded->parts, (size_t)recorded->room * sizeof *parts);
    }
    recorded->parts = parts;
    recorded->room = room;
    return true;
}

/* False if out of memory, which spoils the recording. */
static bool add_part(tchi_cuda_recorded *recorded, part p)
{
    if (recorded == NULL || (recorded->count == recorded->room && !make_room(recorded))) {
        spoil_recording(recorded);
        return false;
    }
    recorded->parts[recorded->count++] = p;
    return true;
}

static void drop_graph(part *p)
{
    if (p->graph != NULL) {
        cudaGraphDestroy(p->graph);
    }
    p->graph = NULL;
}

static void destroy_recorded(tchi_cuda_recorded *recorded)
{
    if (recorded == NULL) {
        return;
    }
    for (int32_t i = 0; i < recorded->count; i++) {
        drop_graph(&recorded->parts[i]);
        if (recorded->parts[i].executable != NULL) {
            cudaGraphExecDestroy(recorded->parts[i].executable);
        }
    }
    if (recorded->room > 0) {
        tchi_cuda_host->release(recorded->parts, (size_t)recorded->room * sizeof *recorded->parts);
    }
    tchi_cuda_host->release(recorded, sizeof *recorded);
}

/* --- recording --------------------------------------------------------------------------------------------------- */

/* While another thread captures, CUDA refuses calls that might interfere and may invalidate its capture. Ours touch no
 * other stream, so relaxed mode is safe. A second call with the same variable restores the mode. */
static void exchange_mode(enum cudaStreamCaptureMode *mode)
{
    cudaThreadExchangeStreamCaptureMode(mode);
}

static cudaError_t open_stream(cudaStream_t *stream)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    exchange_mode(&mode);
    cudaError_t error = tchi_cuda_ensure_stream(stream);
    exchange_mode(&mode);
    return error;
}

/* Relaxed, so that lazy loading of a kernel does not invalidate the capture. */
static cudaError_t begin_capture(cudaStream_t stream)
{
    return cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
}

/* NULL if the capture was invalidated; the error is cleared. */
static cudaGraph_t end_capture(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    return graph;
}

static tch_status begin_recording(tchi_cuda_state *s)
{
    tchi_cuda_recorder *recorder = &s->recorder;
    TCHI_CUDA_TRY(open_stream(&recorder->stream), "a stream for recording");
    recorder->main = s->stream;
    tch_status status = tchi_cuda_use_stream(s, recorder->stream);
    if (status == TCH_OK) {
        status = tchi_cuda_check(begin_capture(recorder->stream), "cudaStreamBeginCapture");
    }
    if (status != TCH_OK) {
        tchi_cuda_use_stream(s, recorder->main);
        return status;
    }
    recorder->under_way = tchi_cuda_host->allocate(sizeof *recorder->under_way, alignof(max_align_t));
    if (recorder->under_way != NULL) {
        *recorder->under_way = (tchi_cuda_recorded){0};
    }
    return TCH_OK;
}

/* --- phases ------------------------------------------------------------------------------------------------------ */

/* Ends the capture on a stream and adds it as a part. */
static void keep_capture(tchi_cuda_recorder *recorder, cudaStream_t stream)
{
    cudaGraph_t graph = end_capture(stream);
    if (graph == NULL) {
        spoil_recording(recorder->under_way);
    } else if (!add_part(recorder->under_way, (part){.kind = LAUNCH, .graph = graph})) {
        cudaGraphDestroy(graph);
    }
}

/* Continues the capture on the other stream: it begins there before it ends here, so that work is never executed
 * instead of captured. If it cannot begin the two phases stay one. */
static void cut_capture(tchi_cuda_state *s)
{
    tchi_cuda_recorder *recorder = &s->recorder;
    cudaStream_t before = recorder->stream;
    if (open_stream(&recorder->other) != cudaSuccess || begin_capture(recorder->other) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    if (tchi_cuda_use_stream(s, recorder->other) != TCH_OK) {
        tchi_cuda_use_stream(s, before);
        drop_graph(&(part){.graph = end_capture(recorder->other)});
        return;
    }
    keep_capture(recorder, before);
    recorder->stream = recorder->other;
    recorder->other = before;
}

void tchi_cuda_recording_range(tchi_cuda_state *s, const char *name)
{
    tchi_cuda_recorder *recorder = &s->recorder;
    if (recorder->under_way == NULL || !recorder->phases) {
        return;
    }
    cut_capture(s);
    add_part(recorder->under_way, (part){.kind = name != NULL ? PUSH : POP, .name = name});
}

/* --- finishing --------------------------------------------------------------------------------------------------- */

/* False if CUDA fails; the error is cleared. Parts between two ranges are often empty. */
static bool make_executable(part *p, int64_t *nodes)
{
    size_t here = 0;
    if (p->kind != LAUNCH || cudaGraphGetNodes(p->graph, NULL, &here) != cudaSuccess || here == 0) {
        return true;
    }
    *nodes += (int64_t)here;
    bool made = cudaGraphInstantiate(&p->executable, p->graph, 0) == cudaSuccess;
    if (!made) {
        cudaGetLastError();
        p->executable = NULL;
    }
    return made;
}

static bool make_executables(tchi_cuda_recorded *recorded, int64_t *nodes)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    bool made = recorded != NULL && !recorded->spoiled;
    exchange_mode(&mode);
    for (int32_t i = 0; made && i < recorded->count; i++) {
        made = make_executable(&recorded->parts[i], nodes);
        drop_graph(&recorded->parts[i]);
    }
    exchange_mode(&mode);
    return made;
}

/* Always restores the context's stream: failing to is the only error. */
static tch_status end_recording(tchi_cuda_state *s, void **recording, int64_t *kernels)
{
    tchi_cuda_recorder *recorder = &s->recorder;
    tchi_cuda_recorded *recorded = recorder->under_way;
    keep_capture(recorder, recorder->stream);
    recorder->under_way = NULL;
    tch_status status = tchi_cuda_use_stream(s, recorder->main);
    *kernels = 0;
    bool made = make_executables(recorded, kernels);
    if (!made) {
        destroy_recorded(recorded);
    }
    *recording = made ? recorded : NULL;
    return status;
}

/* If capture cannot begin, nothing changes and `work` is not called. */
tch_status tchi_cuda_recording_record(void *state, tch_status (*work)(void *argument), void *argument, void **recording,
                                      int64_t *kernels)
{
    *recording = NULL;
    if (begin_recording(state) != TCH_OK) {
        return TCH_OK;
    }
    tch_status status = work(argument);
    tch_status ended = end_recording(state, recording, kernels);
    if (*recording != NULL && (status != TCH_OK || ended != TCH_OK)) {
        tchi_cuda_recording_release(state, *recording);
        *recording = NULL;
    }
    return ended;
}

/* --- replaying --------------------------------------------------------------------------------------------------- */

/* Ranges are closed even after a failed launch. */
tch_status tchi_cuda_recording_replay(void *state, void *recording, int32_t *begun)
{
    const tchi_cuda_state *s = state;
    const tchi_cuda_recorded *recorded = recording;
    tch_status status = TCH_OK;
    for (int32_t i = 0; i < recorded->count; i++) {
        const part *p = &recorded->parts[i];
        if (p->kind == PUSH) {
            tchi_cuda_range_open(p->name);
        } else if (p->kind == POP) {
            tchi_cuda_range_close();
        } else if (p->executable != NULL && status == TCH_OK) {
            status = tchi_cuda_check(cudaGraphLaunch(p->executable, s->stream), "cudaGraphLaunch");
            *begun |= status == TCH_OK;
        }
    }
    return status;
}

/* A caller's own capture must contain the work itself: it may outlive our graphs.
 *
 * CUDA reports only memory that a graph allocates, and ours allocate none. The graphs of a step of SOAP on GPT-2, 1448
 * kernels, took 2 to 4 MiB of an H200: the larger value, in the driver's granularity. */
#define KERNEL_BYTES 2896
#define DRIVER_STEP ((int64_t)2 << 20)

int64_t tchi_cuda_recording_bytes(void *state, int64_t kernels)
{
    const tchi_cuda_state *s = state;
    return s->recorder.enabled && !tchi_cuda_is_capturing(s->stream)
               ? (kernels * KERNEL_BYTES + DRIVER_STEP - 1) / DRIVER_STEP * DRIVER_STEP
               : -1;
}

/* CUDA keeps a running graph alive. */
void tchi_cuda_recording_release(void *state, void *recording)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    if (tchi_cuda_begin(state) != TCH_OK) {
        return;
    }
    exchange_mode(&mode);
    destroy_recorded(recording);
    cudaGetLastError();
    exchange_mode(&mode);
    tchi_cuda_end(state);
}

void tchi_cuda_recorder_destroy(tchi_cuda_recorder *recorder)
{
    tchi_cuda_drop_stream(recorder->stream);
    tchi_cuda_drop_stream(recorder->other);
}

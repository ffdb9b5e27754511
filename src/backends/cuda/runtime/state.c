/* The state of a context: its stream, its cuBLAS handle with a workspace of its own, and whose device is current. A
 * change of streams is ordered: what the new stream gets runs after all that the old one was given, so that memory may
 * pass from one to the other without a wait of the host. */
#include "backends/cuda/cuda.h"

#include <stdalign.h>
#include <stddef.h>
#include <string.h>

/* --- the current device ------------------------------------------------------------------------------------------ */

/* The current device belongs to the thread, and a library that changes it would surprise its caller: each call notes
 * the device it found and leaves it as it was. Calls nest, a few levels at most. */
enum { MAX_NESTING = 16 };
static _Thread_local struct {
    int depth;
    int devices[MAX_NESTING];
    int32_t entered[MAX_NESTING]; /* whose device each call made current */
} found;

int32_t tchi_cuda_entered(void)
{
    return found.depth > 0 ? found.entered[found.depth - 1] : -1;
}

static tch_status enter_device(const tchi_cuda_state *s)
{
    int current = 0;
    if (found.depth == MAX_NESTING) {
        return tchi_cuda_host->fail(TCH_ERR_INTERNAL, "calls are nested more than %d deep", MAX_NESTING);
    }
    TCHI_CUDA_TRY(cudaGetDevice(&current), "cudaGetDevice");
    if (current != s->device.index) {
        TCHI_CUDA_TRY(cudaSetDevice(s->device.index), "cudaSetDevice");
    }
    found.entered[found.depth] = s->device.index;
    found.devices[found.depth++] = current;
    return TCH_OK;
}

tch_status tchi_cuda_begin(void *state)
{
    const tchi_cuda_state *s = state;
    TCHI_CUDA_PASS(tchi_cuda_check_device(s->device.index));
    return enter_device(s);
}

void tchi_cuda_end(void *state)
{
    const tchi_cuda_state *s = state;
    int before = found.devices[--found.depth];
    if (before != s->device.index) {
        cudaSetDevice(before);
    }
}

/* --- streams ----------------------------------------------------------------------------------------------------- */

/* NVIDIA's advice for the workspace of cuBLAS: 32 MiB on Hopper and newer, less before. */
int64_t tchi_cuda_workspace_bytes(const tchi_cuda_state *s)
{
    return (int64_t)(s->device.major >= 9 ? 32 : 8) << 20;
}

/* cuBLAS and cuSOLVER follow. cublasSetStream also forgets the workspace, so it is given again. */
tch_status tchi_cuda_use_stream(tchi_cuda_state *s, cudaStream_t stream)
{
    const tchi_cublas *blas = tchi_cublas_open(NULL);
    TCHI_CUBLAS_TRY(blas->set_stream(s->blas, stream), "cublasSetStream");
    TCHI_CUBLAS_TRY(blas->set_workspace(s->blas, s->blas_workspace, (size_t)tchi_cuda_workspace_bytes(s)),
                    "cublasSetWorkspace");
    if (s->solver != NULL) {
        TCHI_CUSOLVER_TRY(tchi_cusolver_open(NULL)->set_stream(s->solver, stream), "cusolverDnSetStream");
    }
    s->stream = stream;
    return TCH_OK;
}

/* A stream under capture may not even be asked for its device: that would end the capture. */
static tch_status check_owner(const tchi_cuda_state *s, cudaStream_t stream)
{
    int device = 0;
    if (tchi_cuda_is_capturing(stream)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaStreamGetDevice(stream, &device), "tch_context_set_stream: the device of the stream");
    if (device != s->device.index) {
        return tchi_cuda_host->fail(
            TCH_ERR_DEVICE,
            "tch_context_set_stream: the stream belongs to cuda:%d, the context to cuda:%d; give "
            "a stream of the context's device",
            device, s->device.index);
    }
    return TCH_OK;
}

/* `next` waits for what `before` was given. A stream under capture cannot wait for one that is not: who captures has
 * waited for earlier work, as capturing demands. */
static tch_status order_streams(cudaStream_t before, cudaStream_t next)
{
    cudaEvent_t event = NULL;
    if (tchi_cuda_is_capturing(before) || tchi_cuda_is_capturing(next)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    cudaError_t error = cudaEventRecord(event, before);
    if (error == cudaSuccess) {
        error = cudaStreamWaitEvent(next, event, 0);
    }
    cudaEventDestroy(event); /* CUDA keeps it until it was reached */
    return tchi_cuda_check(error, "ordering one stream after another");
}

tch_status tchi_cuda_stream(void *state, int32_t set, void **stream)
{
    tchi_cuda_state *s = state;
    cudaStream_t next = *stream;
    if (!set || next == s->stream) {
        *stream = s->stream;
        return TCH_OK;
    }
    TCHI_CUDA_PASS(check_owner(s, next));
    TCHI_CUDA_PASS(order_streams(s->stream, next));
    return tchi_cuda_use_stream(s, next);
}

static tch_status wait_for_stream(const tchi_cuda_state *s)
{
    if (tchi_cuda_is_capturing(s->stream)) {
        return tchi_cuda_host->fail(
            TCH_ERR_UNSUPPORTED, "cannot wait for cuda:%d: its stream is being captured in a graph", s->device.index);
    }
    return tchi_cuda_check(cudaStreamSynchronize(s->stream), "waiting for the stream");
}

/* Also called outside begin and end, when a context is destroyed. */
tch_status tchi_cuda_synchronize(void *state)
{
    TCHI_CUDA_PASS(tchi_cuda_begin(state));
    tch_status status = wait_for_stream(state);
    tchi_cuda_end(state);
    return status;
}

/* --- creation and destruction ------------------------------------------------------------------------------------ */

/* Products are never rounded to TF32, and sums of bfloat16 products are kept in float32 to their end. */
static tch_status open_device(tchi_cuda_state *s)
{
    TCHI_CUDA_TRY(cudaStreamCreate(&s->local), "cudaStreamCreate");
    s->stream = s->local;
    const char *why = "";
    const tchi_cublas *blas = tchi_cublas_open(&why);
    if (blas == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE, "%s", why);
    }
    TCHI_CUDA_PASS(tchi_cuda_allocate(s, tchi_cuda_workspace_bytes(s), &s->blas_workspace));
    TCHI_CUBLAS_TRY(blas->create(&s->blas), "cublasCreate");
    TCHI_CUBLAS_TRY(blas->set_math_mode(s->blas, TCHI_CUBLAS_MATH_FULL_REDUCTIONS), "cublasSetMathMode");
    return tchi_cuda_use_stream(s, s->local);
}

tch_status tchi_cuda_state_create(int32_t index, void **state)
{
    tchi_cuda_state *s = tchi_cuda_host->allocate(sizeof *s, alignof(max_align_t));
    if (s == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for a context", sizeof *s);
    }
    memset(s, 0, sizeof *s);
    tchi_cuda_recorder_init(&s->recorder);
    tch_status status = tchi_cuda_device_read(index, &s->device);
    if (status == TCH_OK) {
        status = tchi_cuda_begin(s);
    }
    if (status == TCH_OK) {
        status = open_device(s);
        tchi_cuda_end(s);
    }
    if (status != TCH_OK) {
        tchi_cuda_state_destroy(s);
        return status;
    }
    *state = s;
    return TCH_OK;
}

static void close_device(tchi_cuda_state *s)
{
    wait_for_stream(s);
    tchi_cuda_recorder_destroy(&s->recorder);
    tchi_cuda_staging_destroy(s->staging);
    if (s->solver_params != NULL) {
        tchi_cusolver_open(NULL)->destroy_params(s->solver_params);
    }
    if (s->solver != NULL) {
        tchi_cusolver_open(NULL)->destroy(s->solver);
    }
    if (s->blas != NULL) {
        tchi_cublas_open(NULL)->destroy(s->blas);
    }
    tchi_cuda_release(s, s->blas_workspace, tchi_cuda_workspace_bytes(s));
    cudaStreamSynchronize(s->local);
    cudaStreamDestroy(s->local);
    if (s->side != NULL) {
        cudaStreamDestroy(s->side);
    }
    if (s->forked != NULL) {
        cudaEventDestroy(s->forked);
    }
    cudaGetLastError();
}

/* Nothing may fail here: after a lost GPU, what CUDA will not take back is left to it. */
void tchi_cuda_state_destroy(void *state)
{
    tchi_cuda_state *s = state;
    if (s->local != NULL && enter_device(s) == TCH_OK) {
        close_device(s);
        tchi_cuda_end(s);
    }
    if (s->solver_host != NULL) {
        tchi_cuda_host->release(s->solver_host, s->solver_host_bytes);
    }
    tchi_cuda_host->release(s, sizeof *s);
}

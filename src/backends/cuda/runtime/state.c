/* The state of a context: its stream, its cuBLAS handle and workspace, and the current device. A change of streams is
 * ordered: the new stream waits for the old one, so that memory may pass from one to the other without host
 * synchronization. */
#include "backends/cuda/cuda.h"
#include "backends/host_memory.h"

/* --- the current device ------------------------------------------------------------------------------------------ */

/* The current device is per thread, and a library must not change it: each call saves and restores it. Calls nest a few
 * levels. */
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
    TCHI_TRY(tchi_cuda_check_device(s->device.index));
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

cudaError_t tchi_cuda_ensure_stream(cudaStream_t *stream)
{
    return *stream != NULL ? cudaSuccess : cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
}

cudaError_t tchi_cuda_ensure_event(cudaEvent_t *event)
{
    return *event != NULL ? cudaSuccess : cudaEventCreateWithFlags(event, cudaEventDisableTiming);
}

void tchi_cuda_drop_stream(cudaStream_t stream)
{
    if (stream != NULL) {
        (void)cudaStreamSynchronize(stream);
        (void)cudaStreamDestroy(stream);
    }
}

void tchi_cuda_drop_event(cudaEvent_t event)
{
    if (event != NULL) {
        (void)cudaEventDestroy(event);
    }
}

/* cuBLAS workspace as recommended by NVIDIA: 32 MiB on Hopper and newer, less before. */
int64_t tchi_cuda_workspace_bytes(const tchi_cuda_state *s)
{
    return (int64_t)(s->device.major >= 9 ? 32 : 8) << 20;
}

/* Includes cuBLAS and cuSOLVER. cublasSetStream also resets the workspace. */
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

/* Not checked for a capturing stream: querying its device would invalidate the capture. */
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

/* `next` waits for `before`. A capturing stream cannot wait for another: the caller has synchronized earlier work, as
 * capture requires. */
static tch_status order_streams(cudaStream_t before, cudaStream_t next)
{
    cudaEvent_t event = NULL;
    if (tchi_cuda_is_capturing(before) || tchi_cuda_is_capturing(next)) {
        return TCH_OK;
    }
    TCHI_CUDA_TRY(tchi_cuda_ensure_event(&event), "cudaEventCreate");
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
    TCHI_TRY(check_owner(s, next));
    TCHI_TRY(order_streams(s->stream, next));
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

/* Also called outside begin and end, on destruction. */
tch_status tchi_cuda_synchronize(void *state)
{
    TCHI_TRY(tchi_cuda_begin(state));
    tch_status status = wait_for_stream(state);
    tchi_cuda_end(state);
    return status;
}

/* --- creation and destruction ------------------------------------------------------------------------------------ */

/* Products are never rounded to TF32, and bfloat16 products accumulate in float32 throughout. */
static tch_status open_device(tchi_cuda_state *s)
{
    TCHI_CUDA_TRY(cudaStreamCreate(&s->local), "cudaStreamCreate");
    s->stream = s->local;
    const char *why = "";
    const tchi_cublas *blas = tchi_cublas_open(&why);
    if (blas == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_UNAVAILABLE, "%s", why);
    }
    TCHI_TRY(tchi_cuda_allocate(s, tchi_cuda_workspace_bytes(s), &s->blas_workspace));
    TCHI_CUBLAS_TRY(blas->create(&s->blas), "cublasCreate");
    TCHI_CUBLAS_TRY(blas->set_math_mode(s->blas, TCHI_CUBLAS_MATH_FULL_REDUCTIONS), "cublasSetMathMode");
    return tchi_cuda_use_stream(s, s->local);
}

tch_status tchi_cuda_state_create(int32_t index, void **state)
{
    tchi_cuda_state *s;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, sizeof *s, "a context", &s));
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
    tchi_cuda_drop_stream(s->local);
    tchi_cuda_drop_stream(s->side);
    tchi_cuda_drop_event(s->forked);
    cudaGetLastError();
}

/* Must not fail: after a fault CUDA may refuse to release resources. */
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

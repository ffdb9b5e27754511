/* Loads, describes and launches kernels of kernel_build.c through the runtime's library API, in the device's primary
 * context like the rest of the module: a launch is one asynchronous call on the context's stream that allocates nothing
 * and can be captured in a graph. */
#include <string.h>

#include "backends/cuda/cuda.h"
#include "backends/host_memory.h"
#include "kernel_text.h"

/* The signature exported by the text after the source. */
typedef struct signature {
    int32_t count;
    tch_kernel_parameter parameters[];
} signature;

typedef struct user_kernel {
    size_t bytes; /* of this block, the name's included */
    cudaLibrary_t library;
    cudaKernel_t function;
    struct cudaFuncAttributes attributes;
    int64_t most_shared; /* dynamic shared memory that a block can have beside its static one */
    signature *signature;
    size_t signature_bytes;
    char name[]; /* the user's, for messages */
} user_kernel;

/* CUDA accepts a library kernel wherever it accepts a function address. */
static const void *function_of(const user_kernel *kernel)
{
    return (const void *)kernel->function;
}

/* --- the image --------------------------------------------------------------------------------------------------- */

typedef struct image_parts {
    const char *lowered;
    const char *name;
    const char *code;
} image_parts;

static tch_status fail_damaged(const char *what)
{
    return tchi_cuda_host->fail(TCH_ERR_IO, "a compiled kernel is damaged: %s", what);
}

static int ends_with_nul(const char *text, uint64_t bytes)
{
    return bytes > 0 && text[bytes - 1] == '\0';
}

/* A cubin's ELF header bounds what CUDA reads; PTX is NUL-terminated. */
static tch_status read_image(const tch_kernel_image *image, image_parts *parts)
{
    tchi_cuda_image header;
    const char *data = image->data;
    if (data == NULL || image->bytes < sizeof header) {
        return fail_damaged("it is shorter than its header");
    }
    memcpy(&header, data, sizeof header);
    if (memcmp(header.magic, TCHI_CUDA_IMAGE_MAGIC, sizeof header.magic) != 0 || header.code > TCHI_CUDA_CODE_PTX) {
        return fail_damaged("it does not begin as one");
    }
    uint64_t names = sizeof header + (uint64_t)header.lowered_bytes + header.name_bytes;
    if (names > header.code_offset || header.code_offset > image->bytes || header.code_bytes < 64 ||
        header.code_bytes != image->bytes - header.code_offset) {
        return fail_damaged("its sizes do not fit");
    }
    parts->lowered = data + sizeof header;
    parts->name = parts->lowered + header.lowered_bytes;
    parts->code = data + header.code_offset;
    int is_elf = memcmp(parts->code, "\177ELF", 4) == 0;
    if (!ends_with_nul(parts->lowered, header.lowered_bytes) || !ends_with_nul(parts->name, header.name_bytes) ||
        (header.code == TCHI_CUDA_CODE_CUBIN ? !is_elf : !ends_with_nul(parts->code, header.code_bytes))) {
        return fail_damaged("its contents are not what they are said to be");
    }
    return TCH_OK;
}

/* --- parameters -------------------------------------------------------------------------------------------------- */

/* The signature is a device variable. Uses a separate stream, so that nothing else synchronizes. */
static tch_status copy_from_device(void *to, const void *from, size_t bytes)
{
    cudaStream_t stream = NULL;
    TCHI_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
    if (error == cudaSuccess) {
        error = cudaStreamSynchronize(stream);
    }
    cudaStreamDestroy(stream);
    return tchi_cuda_check(error, "reading the kernel's parameters");
}

/* Checks the compiler's parameter sizes against those CUDA copies at a launch. */
static tch_status compare_sizes(const user_kernel *kernel)
{
    for (int32_t i = 0; i < kernel->signature->count; i++) {
        int32_t expected = kernel->signature->parameters[i].size;
        size_t offset = 0;
        size_t size = 0;
        TCHI_CUDA_TRY(cudaFuncGetParamInfo(function_of(kernel), (size_t)i, &offset, &size), "cudaFuncGetParamInfo");
        if (size != (size_t)expected) {
            return tchi_cuda_host->fail(TCH_ERR_INTERNAL,
                                        "parameter %d of kernel %s has %d bytes by its signature, %zu by its code", i,
                                        kernel->name, expected, size);
        }
    }
    return TCH_OK;
}

static tch_status read_signature(user_kernel *kernel)
{
    void *place = NULL;
    size_t bytes = 0;
    TCHI_CUDA_TRY(cudaLibraryGetGlobal(&place, &bytes, kernel->library, TCHI_CUDA_SIGNATURE),
                  "the kernel's parameters");
    if (bytes < sizeof(signature)) {
        return fail_damaged("its signature is too short");
    }
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, bytes, "a kernel's parameters", &kernel->signature));
    kernel->signature_bytes = bytes;
    TCHI_TRY(copy_from_device(kernel->signature, place, bytes));
    int32_t count = kernel->signature->count;
    if (count < 0 || bytes != sizeof(signature) + (size_t)count * sizeof(tch_kernel_parameter)) {
        return fail_damaged("the number of its parameters is not that of its signature");
    }
    return compare_sizes(kernel);
}

/* --- loading ----------------------------------------------------------------------------------------------------- */

/* More than 48 KiB of dynamic shared memory needs an opt-in. It is a limit and reserves nothing: opts in to the GPU's
 * maximum once, so that launches need not. */
static tch_status allow_shared(const tchi_cuda_state *s, user_kernel *kernel)
{
    kernel->most_shared = s->device.shared_per_block - (int64_t)kernel->attributes.sharedSizeBytes;
    if (kernel->most_shared <= 0) {
        kernel->most_shared = 0;
        return TCH_OK;
    }
    return tchi_cuda_check(cudaFuncSetAttribute(function_of(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                (int)kernel->most_shared),
                           "cudaFuncSetAttribute");
}

/* Querying attributes makes CUDA load the code now instead of at the first launch, which may be captured. */
static tch_status load_kernel(const tchi_cuda_state *s, user_kernel *kernel, const image_parts *parts)
{
    cudaError_t error = cudaLibraryLoadData(&kernel->library, parts->code, NULL, NULL, 0, NULL, NULL, 0);
    if (error == cudaErrorInvalidKernelImage || error == cudaErrorInvalidPtx) {
        cudaGetLastError();
        return fail_damaged(cudaGetErrorString(error));
    }
    TCHI_CUDA_TRY(error, "loading the kernel");
    error = cudaLibraryGetKernel(&kernel->function, kernel->library, parts->lowered);
    if (error == cudaErrorSymbolNotFound) { /* NVRTC accepts the name of any function */
        cudaGetLastError();
        return tchi_cuda_host->fail(TCH_ERR_INVALID_ARGUMENT, "%.200s is a function without __global__, not a kernel",
                                    parts->name);
    }
    TCHI_CUDA_TRY(error, "looking up the kernel");
    TCHI_CUDA_TRY(cudaFuncGetAttributes(&kernel->attributes, function_of(kernel)), "cudaFuncGetAttributes");
    TCHI_TRY(read_signature(kernel));
    return allow_shared(s, kernel);
}

/* --- properties -------------------------------------------------------------------------------------------------- */

/* The block size with the highest occupancy, the largest of equal ones. */
static tch_status suggest_launch(const tchi_cuda_state *s, const user_kernel *kernel, tch_kernel_info *info)
{
    enum { WARP = 32 };
    int best = 0;
    for (int threads = kernel->attributes.maxThreadsPerBlock / WARP * WARP; threads >= WARP; threads -= WARP) {
        int blocks = 0;
        TCHI_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function_of(kernel), threads, 0),
                      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
        if (blocks * threads > best) {
            best = blocks * threads;
            info->suggested_threads = threads;
            info->suggested_blocks = blocks * s->device.processors;
        }
    }
    return TCH_OK;
}

static tch_status describe_kernel(const tchi_cuda_state *s, const user_kernel *made, tch_kernel_info *info,
                                  int32_t room, tch_kernel_parameter *parameters)
{
    int32_t count = made->signature->count;
    info->parameters = count;
    info->registers = made->attributes.numRegs;
    info->shared_bytes = (int64_t)made->attributes.sharedSizeBytes;
    info->local_bytes = (int64_t)made->attributes.localSizeBytes;
    info->max_threads = made->attributes.maxThreadsPerBlock;
    for (int32_t i = 0; i < count && i < room; i++) {
        parameters[i] = made->signature->parameters[i];
    }
    return suggest_launch(s, made, info);
}

tch_status tchi_cuda_kernel_load(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info,
                                 int32_t room, tch_kernel_parameter *parameters)
{
    const tchi_cuda_state *s = state;
    image_parts parts = {"", "", ""};
    if (tchi_cuda_is_capturing(s->stream)) {
        return tchi_cuda_host->fail(TCH_ERR_UNSUPPORTED, "a kernel cannot be loaded while the stream is captured in a "
                                                         "graph: compile it before capturing");
    }
    TCHI_TRY(read_image(image, &parts));
    size_t name_bytes = strlen(parts.name) + 1;
    size_t bytes = sizeof(user_kernel) + name_bytes;
    user_kernel *made;
    TCHI_TRY(tchi_backend_take(tchi_cuda_host, bytes, "a kernel", &made));
    made->bytes = bytes;
    memcpy(made->name, parts.name, name_bytes);
    tch_status status = load_kernel(s, made, &parts);
    if (status == TCH_OK) {
        status = describe_kernel(s, made, info, room, parameters);
    }
    if (status != TCH_OK) {
        tchi_cuda_kernel_unload(state, made);
        return status;
    }
    *kernel = made;
    return TCH_OK;
}

/* Must not fail: after a fault CUDA may refuse. */
void tchi_cuda_kernel_unload(void *state, void *kernel)
{
    user_kernel *made = kernel;
    if (made->library != NULL && cudaLibraryUnload(made->library) != cudaSuccess) {
        cudaGetLastError();
    }
    if (made->signature != NULL) {
        tchi_cuda_host->release(made->signature, made->signature_bytes);
    }
    tchi_cuda_host->release(made, made->bytes);
}

/* --- launching --------------------------------------------------------------------------------------------------- */

static struct dim3 dim3_of(const int64_t dimensions[3])
{
    return (struct dim3){(unsigned)dimensions[0], (unsigned)dimensions[1], (unsigned)dimensions[2]};
}

tch_status tchi_cuda_kernel_launch(void *state, void *kernel, const tch_kernel_run *run)
{
    const tchi_cuda_state *s = state;
    const user_kernel *made = kernel;
    if (run->shared_bytes > made->most_shared) {
        return tchi_cuda_host->fail(TCH_ERR_INVALID_ARGUMENT,
                                    "kernel %s: shared_bytes is %lld, expected no more than %lld: a block on cuda:%d "
                                    "can have %lld bytes, of which the kernel's own __shared__ variables take %lld",
                                    made->name, (long long)run->shared_bytes, (long long)made->most_shared,
                                    s->device.index, (long long)s->device.shared_per_block,
                                    (long long)made->attributes.sharedSizeBytes);
    }
    TCHI_CUDA_TRY(cudaLaunchKernel(function_of(made), dim3_of(run->grid), dim3_of(run->block), (void **)run->arguments,
                                   (size_t)run->shared_bytes, s->stream),
                  made->name);
    /* Afterwards, since the call may report the fault of an older kernel. */
    tchi_cuda_remember_kernel(s->device.index, made->name);
    return tchi_cuda_launched(s, made->name);
}

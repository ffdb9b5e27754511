/* Custom kernels compiled for a GPU cannot run here, but under a test's control (control.h) every library loads and has
 * one kernel, whose launches are recorded. */
#include <string.h>

#include "control.h"

static char place; /* the target of handles */

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned count, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned library_count)
{
    EMULATOR_FAULT();
    if (emulated.devices == 0) {
        return emulator_result(cudaErrorNotSupported);
    }
    *library = (cudaLibrary_t)(void *)&place;
    emulated.libraries++;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    emulated.libraries--;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    strncpy(emulated.kernel, name, sizeof emulated.kernel - 1);
    *kernel = (cudaKernel_t)(void *)&place;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetGlobal(void **address, size_t *bytes, cudaLibrary_t library, const char *name)
{
    if (strcmp(name, "tchi_signature") != 0 || emulated.signature == NULL) {
        return emulator_result(cudaErrorSymbolNotFound);
    }
    memcpy(address, &emulated.signature, sizeof emulated.signature);
    *bytes = emulated.signature_bytes;
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    *attributes = (struct cudaFuncAttributes){.sharedSizeBytes = (size_t)emulated.static_shared,
                                              .maxThreadsPerBlock = emulated.most_threads,
                                              .numRegs = emulated.registers};
    return cudaSuccess;
}

cudaError_t cudaFuncGetParamInfo(const void *function, size_t index, size_t *offset, size_t *size)
{
    *offset = 8 * index;
    *size = emulated.parameter_size;
    return cudaSuccess;
}

/* 2048 threads fit, and 8 blocks. */
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared)
{
    *blocks = 2048 / threads < 8 ? 2048 / threads : 8;
    return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void *function, struct dim3 grid, struct dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream)
{
    EMULATOR_FAULT();
    emulated.launches++;
    emulated.grid = grid;
    emulated.block = block;
    emulated.launch_shared = shared;
    emulated.launch_arguments = arguments;
    emulated.launch_stream = stream;
    return cudaSuccess;
}

/* Launches of persistent kernels whose blocks come in pairs: clusters of two that share what both multiply by. */
#ifndef TCHI_CUDA_PAIR_LAUNCH_CUH
#define TCHI_CUDA_PAIR_LAUNCH_CUH

#include "backends/cuda/cuda.h"

/* `resident` clusters for every pair of multiprocessors, or fewer where there are fewer items, of which a pair takes
 * one at a time. Should the GPU not hold all clusters at one time, those left over run after the others. */
template <typename problem>
static tch_status tchi_cuda_launch_pairs(tchi_cuda_state *state, const char *name, void (*kernel)(problem),
                                         const problem &p, int items, int threads, size_t shared, int resident = 1)
{
    TCHI_CUDA_TRY(cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared),
                  name);
    int pairs = state->device.processors / 2 * resident;
    pairs = pairs < items ? pairs : items;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = 2;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(2 * pairs));
    config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = shared;
    config.stream = state->stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    TCHI_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, p), name);
    return tchi_cuda_launched(state, name);
}

#endif

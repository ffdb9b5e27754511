/* Whether a stream is being captured in a CUDA graph. Work can be queued then, but nothing can synchronize, and
 * memory that is allocated would belong to the graph. */
#ifndef TCHI_CUDA_CAPTURE_H
#define TCHI_CUDA_CAPTURE_H

#include <cuda_runtime_api.h>

/* CUDA refuses to answer for the legacy default stream while another stream is captured: that counts as captured too,
 * since the same calls are forbidden. */
static inline int tchi_cuda_is_capturing(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaErrorStreamCaptureImplicit) {
        cudaGetLastError();
        return 1;
    }
    return status != cudaStreamCaptureStatusNone;
}

#endif

/* What became of the GPUs. A kernel that faults takes its GPU away from the whole process: CUDA answers every later
 * call with the same error. So that each of those calls can say what happened and not only that something did, the
 * first error is kept, with the name of the last kernel of a user's that was launched before it was seen. Any thread
 * may ask. */
#ifndef TCHI_CUDA_FAULTS_H
#define TCHI_CUDA_FAULTS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

/* Whether CUDA keeps this error until the process ends. */
int tchi_cuda_is_fault(cudaError_t error);

/* A kernel of a user's was launched on the device. */
void tchi_cuda_remember_kernel(int32_t device, const char *name);

/* A fault was seen on the device; the first one stays. */
void tchi_cuda_remember_fault(int32_t device, cudaError_t error);

/* Cheap where there was none: 0. Otherwise the error, with the kernel's name, which may be empty. */
cudaError_t tchi_cuda_fault_of(int32_t device, char *kernel, size_t size);

#endif

/* See faults.h. GPUs are few: a table with a place for each, under one lock, which a launch holds for a comparison of
 * two names. Devices beyond the table go without a memory. */
#include "faults.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { DEVICES = 64, NAME_BYTES = 160 };

static struct {
    pthread_mutex_t lock;
    atomic_int errors[DEVICES];
    char kernels[DEVICES][NAME_BYTES];
} faults = {.lock = PTHREAD_MUTEX_INITIALIZER};

int tchi_cuda_is_fault(cudaError_t error)
{
    switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
        return 1;
    default:
        return 0;
    }
}

/* What is launched after a fault had no part in it. */
void tchi_cuda_remember_kernel(int32_t device, const char *name)
{
    if (device < 0 || device >= DEVICES) {
        return;
    }
    pthread_mutex_lock(&faults.lock);
    if (atomic_load(&faults.errors[device]) == cudaSuccess && strcmp(faults.kernels[device], name) != 0) {
        snprintf(faults.kernels[device], NAME_BYTES, "%s", name);
    }
    pthread_mutex_unlock(&faults.lock);
}

void tchi_cuda_remember_fault(int32_t device, cudaError_t error)
{
    int none = cudaSuccess;
    if (device >= 0 && device < DEVICES) {
        pthread_mutex_lock(&faults.lock);
        atomic_compare_exchange_strong(&faults.errors[device], &none, (int)error);
        pthread_mutex_unlock(&faults.lock);
    }
}

cudaError_t tchi_cuda_fault_of(int32_t device, char *kernel, size_t size)
{
    if (device < 0 || device >= DEVICES || atomic_load(&faults.errors[device]) == cudaSuccess) {
        return cudaSuccess;
    }
    pthread_mutex_lock(&faults.lock);
    snprintf(kernel, size, "%s", faults.kernels[device]);
    pthread_mutex_unlock(&faults.lock);
    return (cudaError_t)atomic_load(&faults.errors[device]);
}

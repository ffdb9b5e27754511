/* What tests of the CUDA module's host side set and see of the emulated device: what the machine is like, which call
 * fails, and what was asked for. The module itself leaves all of it as it is. */
#ifndef EMULATOR_CONTROL_H
#define EMULATOR_CONTROL_H

#include <cuda_runtime_api.h>

enum { EMULATOR_DEVICES = 4 };

/* The calls of one function that fail: none while `failures` is 0. */
typedef struct emulator_fault {
    const char *function;
    cudaError_t error;
    int passes, failures; /* how many calls succeed first, and how many then fail */
} emulator_fault;

typedef struct emulator_control {
    int devices;                      /* 0: one */
    int capability[EMULATOR_DEVICES]; /* 90 for 9.0; 0: what TORCHIUM_EMULATOR_CAPABILITY says */
    emulator_fault fault;

    /* What was not given back yet. */
    int blocks, streams, graphs, executables, libraries;
    /* What was done. */
    int trims, waits;
    cudaStream_t freed_on, replayed_on;
    cudaStream_t recorded, waiting; /* the last event: recorded on one, waited for by the other */
    char timeline[256];             /* launches of graphs; and ranges, where a test writes them down */

    /* The one kernel of every library that is loaded, which exists where `devices` is not 0. */
    const void *signature;
    size_t signature_bytes, parameter_size; /* the latter of each parameter */
    int static_shared, registers, most_threads;
    int shared_allowed;
    char kernel[256]; /* the name last looked up */
    int launches;
    struct dim3 grid, block; /* of the last launch, like the rest */
    size_t launch_shared;
    void **launch_arguments;
    cudaStream_t launch_stream;
} emulator_control;

extern emulator_control emulated;

void emulator_note(const char *what, const char *name);

/* The error that the call of this function is to give, or cudaSuccess. */
cudaError_t emulator_fault_of(const char *function);
/* The same error, kept for cudaGetLastError. */
cudaError_t emulator_result(cudaError_t error);

#define EMULATOR_FAULT()                                                                                               \
    do {                                                                                                               \
        cudaError_t fault_ = emulator_fault_of(__func__);                                                              \
        if (fault_ != cudaSuccess) {                                                                                   \
            return emulator_result(fault_);                                                                            \
        }                                                                                                              \
    } while (0)

/* Whether the stream is being captured, in which case the capture is lost: for calls that capture forbids. */
int emulator_breaks_capture(cudaStream_t stream);

#endif

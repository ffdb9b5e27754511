/* Controls the emulated device in tests of the CUDA module's host side: the machine's properties, failing calls, and a
 * record of calls. The CUDA module does not use it. */
#ifndef EMULATOR_CONTROL_H
#define EMULATOR_CONTROL_H

#include <cuda_runtime_api.h>

enum { EMULATOR_DEVICES = 4 };

/* The calls of one function that fail: none while `failures` is 0. */
typedef struct emulator_fault {
    const char *function;
    cudaError_t error;
    int passes, failures; /* calls that succeed first, and then fail */
} emulator_fault;

typedef struct emulator_control {
    int devices;                      /* 0: one */
    int capability[EMULATOR_DEVICES]; /* 90 for 9.0; 0: TORCHIUM_EMULATOR_CAPABILITY */
    emulator_fault fault;

    /* Not released yet. */
    int blocks, streams, graphs, executables, libraries;
    /* Recorded calls. */
    int trims, waits;
    cudaStream_t freed_on, replayed_on;
    cudaStream_t recorded, waiting; /* the last event: where it was recorded, and which stream waited for it */
    char timeline[256];             /* graph launches; and ranges, if a test records them */

    /* The one kernel of every loaded library, if `devices` is not 0. */
    const void *signature;
    size_t signature_bytes, parameter_size; /* the latter per parameter */
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

/* The injected error of this function, or cudaSuccess. */
cudaError_t emulator_fault_of(const char *function);
/* The same, also stored for cudaGetLastError. */
cudaError_t emulator_result(cudaError_t error);

/* Asynchronous streams: keeps the error of the running thread's last work for the host, and returns the first one. */
void emulator_keep_error(void);
cudaError_t emulator_kept_error(void);

/* Waits for all streams. */
void emulator_finish_all(void);

#define EMULATOR_FAULT()                                                                                               \
    do {                                                                                                               \
        cudaError_t fault_ = emulator_fault_of(__func__);                                                              \
        if (fault_ != cudaSuccess) {                                                                                   \
            return emulator_result(fault_);                                                                            \
        }                                                                                                              \
    } while (0)

/* For calls that capture forbids: invalidates the capture; whether there was one. */
int emulator_breaks_capture(cudaStream_t stream);

#endif

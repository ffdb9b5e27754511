/* A CUDA runtime without a GPU: enough of it to run the host side of the CUDA module and to see what it asked for. The
 * struct is both the remote control and the record. */
#ifndef TORCHIUM_TESTS_FAKE_RUNTIME_H
#define TORCHIUM_TESTS_FAKE_RUNTIME_H

#include <cuda_runtime_api.h>
#include <stdint.h>

enum { FAKE_DEVICES = 4 };

/* CUDA leaves the struct behind cudaStream_t undefined, so it can be ours. */
struct CUstream_st {
    int device;
};

typedef struct fake_runtime {
    /* What the machine is like. */
    int devices;
    int capability[FAKE_DEVICES]; /* 90 for 9.0 */
    int has_pools;
    int failing_allocations;             /* how many of the next ones */
    cudaStream_t captured, captured_too; /* a second one, after the first has begun */
    cudaError_t pending;                 /* what cudaGetLastError will say */
    cudaError_t broken;                  /* what cudaGetDevice answers */
    const void *page_locked;             /* the one host address that is */
    cudaError_t waiting_says;            /* what cudaStreamSynchronize answers */
    enum cudaStreamCaptureMode mode;
    cudaError_t capture_says, end_says, graph_says,
        replay_says;    /* what capturing, its end, graphs and launches answer */
    int replays_before; /* launches of graphs that succeed all the same */
    size_t nodes;       /* of the next graphs */
    int heard;          /* whether a profiler listens to ranges */

    /* The one kernel that every library has: its signature in "device memory", and what CUDA knows of it. */
    const void *signature;
    size_t signature_bytes;
    int static_shared, registers, most_threads;
    size_t parameter_size;   /* of each of them */
    cudaError_t load_says;   /* what cudaLibraryLoadData answers */
    cudaError_t launch_says; /* what cudaLaunchKernel answers */

    /* What was done. */
    int current;   /* device */
    int allocated; /* blocks not freed */
    int pools, streams, trims, synchronized;
    int bad_waits; /* for a stream under capture */
    cudaStream_t freed_on;
    int libraries;      /* not unloaded */
    int shared_allowed; /* of the last kernel that asked */
    int launches;
    struct dim3 grid, block; /* of the last launch, like the rest */
    size_t launch_shared;
    void **launch_arguments;
    cudaStream_t launch_stream;
    char kernel[256];               /* the name last looked up */
    cudaStream_t recorded, waiting; /* the last event: recorded on one, waited for by the other */
    int graphs, executables;        /* not destroyed */
    cudaStream_t replayed_on;
    char timeline[256]; /* what a profiler heard, and launches of graphs: "push name, launch, pop, " */
} fake_runtime;

extern fake_runtime fake;

/* Two devices of capability 9.0, with pools; device 0 is current. */
void fake_runtime_reset(void);

#endif

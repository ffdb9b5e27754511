/* Typical kernels, each with random inputs and a plain reference: one list for all devices. */
#ifndef TORCHIUM_TESTS_KERNEL_SOURCES_H
#define TORCHIUM_TESTS_KERNEL_SOURCES_H

#include <torchium/torchium.h>

typedef struct kernel_trial kernel_trial;

typedef struct kernel_source {
    const char *title;
    const char *name; /* the name expression */
    const char *text;
    void (*check)(kernel_trial *trial);
    int64_t threads, height, blocks, shared; /* of the launch; 0 blocks: one thread per input */
    /* For kernels (const X *x, Y *y, int n): dtypes, sizes, n and the range of integers unless default, whether y is
     * accumulated, and element i of y with its error bound, 0 unless set. */
    const tch_dtype *from, *to;
    int64_t inputs, outputs, n;
    int range, adds;
    double (*reference)(const double *x, int64_t i, double *bound);
} kernel_source;

struct kernel_trial {
    tch_context *context;
    tch_kernel *kernel;
    const kernel_source *source;
    uint64_t number; /* of the source, seeds its random numbers */
};

extern const kernel_source kernel_sources[];
extern const int kernel_source_count;

#endif

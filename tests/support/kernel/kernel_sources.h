/* Kernels as people write them, each with fresh random inputs and a plain reference: the same list runs on every
 * device. */
#ifndef TORCHIUM_TESTS_KERNEL_SOURCES_H
#define TORCHIUM_TESTS_KERNEL_SOURCES_H

#include <torchium/torchium.h>

typedef struct kernel_trial kernel_trial;

typedef struct kernel_source {
    const char *title;
    const char *name; /* the name expression */
    const char *text;
    void (*check)(kernel_trial *trial);
    int64_t threads, height, blocks, shared; /* of the launch; 0 blocks: a thread for each input */
    /* Of kernels (const X *x, Y *y, int n): the dtypes, the numbers of elements, n and the range of integers where they
     * are not the usual ones, whether y is added to, and element i of y with the bound of its error, 0 unless set. */
    const tch_dtype *from, *to;
    int64_t inputs, outputs, n;
    int range, adds;
    double (*reference)(const double *x, int64_t i, double *bound);
} kernel_source;

struct kernel_trial {
    tch_context *context;
    tch_kernel *kernel;
    const kernel_source *source;
    uint64_t number; /* of the source, and so of its random numbers */
};

extern const kernel_source kernel_sources[];
extern const int kernel_source_count;

#endif

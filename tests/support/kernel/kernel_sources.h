/* Kernels as people write them, each with fresh random inputs and a plain reference: the same list runs on every
 * device. */
#ifndef TORCHIUM_TESTS_KERNEL_SOURCES_H
#define TORCHIUM_TESTS_KERNEL_SOURCES_H

#include <torchium/torchium.h>

typedef struct kernel_trial {
    tch_context *context;
    tch_kernel *kernel;
} kernel_trial;

typedef struct kernel_source {
    const char *title;
    const char *name; /* the name expression */
    const char *text;
    void (*check)(kernel_trial *trial);
} kernel_source;

extern const kernel_source kernel_sources[];
extern const int kernel_source_count;

#endif

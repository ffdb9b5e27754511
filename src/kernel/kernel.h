/* Internals of a kernel. */
#ifndef TCHI_KERNEL_H
#define TCHI_KERNEL_H

#include <torchium/backend.h>
#include <torchium/kernel.h>

/* CUDA's limits on every GPU; a launch packs its arguments on the stack. */
#define TCHI_PARAMETERS_MOST 64
#define TCHI_PARAMETER_BYTES_MOST 4096

struct tch_kernel {
    tch_context *context;
    void *handle; /* the backend's */
    tch_kernel_info info;
    tch_kernel_parameter parameters[TCHI_PARAMETERS_MOST];
    size_t bytes; /* of this struct, the name included */
    char name[];
};

/* x in a 16-bit format with `fraction` bits of fraction, 10 for float16 and 7 for bfloat16, rounded once to nearest
 * even. */
uint16_t tchi_round16(double x, int fraction);

#endif

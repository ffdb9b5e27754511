/* One argument of a launch: compared with its parameter, and turned into the bytes that the kernel reads. */
#ifndef TCHI_KERNEL_ARGUMENTS_H
#define TCHI_KERNEL_ARGUMENTS_H

#include "kernel.h"

/* Writes kernel->parameters[index].size bytes to `value`. */
tch_status tchi_argument_pack(const tch_kernel *kernel, int32_t index, const tch_kernel_argument *argument,
                              void *value);

/* x in a format of 16 bits with so many bits of fraction, 10 for float16 and 7 for bfloat16, rounded once, to nearest
 * even. */
uint16_t tchi_round16(double x, int fraction);

#endif

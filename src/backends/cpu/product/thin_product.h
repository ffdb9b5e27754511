/* Products over a batch in which little is summed over: see thin_product.c. */
#ifndef TCHI_CPU_THIN_PRODUCT_H
#define TCHI_CPU_THIN_PRODUCT_H

#include "backends/cpu/cpu.h"

/* C = alpha A' B if that can be done better than by BLAS; 0 if not, with nothing done. */
int tchi_cpu_thin_product(const tchi_cpu_state *state, double alpha, const tch_matrices *a, const tch_matrices *b,
                          const tch_matrices *c);

#endif

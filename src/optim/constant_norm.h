/* Hyperball (Wen and others, 2026, arXiv 2606.16899): steps on the sphere of matrices with one Frobenius norm. For a
 * block W of a parameter, which is a whole matrix unless SOAP splits it, and its direction D:
 *
 *     R = |W|,  V = W - lr R D / |D|,  W <- R V / |V|
 *
 * R is taken at every step rather than once at the beginning, so that it is no state; without rounding the two are
 * equal. A block of zeros stays zero. There is no weight decay. */
#ifndef TCHI_OPTIM_CONSTANT_NORM_H
#define TCHI_OPTIM_CONSTANT_NORM_H

#include "rects.h"

/* Bytes of room for one block. */
int64_t tchi_constant_norm_room(const tchi_block_batch *block_batch);

/* The step of a run's blocks. `direction` has their orientation in the work buffer, and any type and row stride. */
tch_status tchi_constant_norm_apply(tch_optimizer *optimizer, const tchi_run *run, const tch_matrices *direction,
                                    void *room);

#endif

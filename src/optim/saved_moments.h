/* Moments of a checkpoint that are kept otherwise than the optimizer keeps them (state_dtype): read into host memory as
 * float32, and from there to the nearest that the optimizer can keep. From eight bits to bfloat16 or float32 nothing is
 * lost. */
#ifndef TCHI_OPTIM_SAVED_MOMENTS_H
#define TCHI_OPTIM_SAVED_MOMENTS_H

#include "optimizer.h"

/* How the file keeps the moment of this name, which may be in shards. */
tch_moments tchi_saved_moments_of(const tch_checkpoint *file, const char *name);

/* The file has the moment in this form, and of the parameter's size. */
tch_status tchi_saved_moment_check(const tchi_param *param, const tch_checkpoint *file, const char *name);

/* The file has the scales of codes, and they are of these codes. */
tch_status tchi_saved_scales_check(const tchi_param *param, const tch_checkpoint *file, const char *name);

/* Reads moment `k` of a parameter, with the scales it gets. */
tch_status tchi_saved_moment_read(const tch_optimizer *optimizer, const tchi_param *param, int32_t k,
                                  const tch_checkpoint *file, const char *name);

#endif

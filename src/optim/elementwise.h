/* The parameters that are updated element by element: all of an optimizer without blocks, and those that the others
 * leave to AdamW. */
#ifndef TCHI_OPTIM_ELEMENTWISE_H
#define TCHI_OPTIM_ELEMENTWISE_H

#include "optimizer.h"

tch_status tchi_elementwise_step(tch_optimizer *optimizer, const tchi_step *now, int32_t group);

/* Their numbers, on the device. */
const tch_hyper *tchi_elementwise_hyper(const tch_optimizer *optimizer, const tchi_group *group);

#endif

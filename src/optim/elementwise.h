/* The parameters that are updated element by element: all of AdamW's and SGD's, and those the others leave to AdamW. */
#ifndef TCHI_OPTIM_ELEMENTWISE_H
#define TCHI_OPTIM_ELEMENTWISE_H

#include "optimizer.h"

tch_status tchi_elementwise_step(tch_optimizer *optimizer, int32_t group);

/* One update of the group by the backend's own operation. */
tch_status tchi_elementwise_built_in(tch_optimizer *optimizer, int32_t group, const tch_update *update);

#endif

/* What an optimizer takes of memory, before it is made and after. */
#ifndef TCHI_OPTIM_FORECAST_H
#define TCHI_OPTIM_FORECAST_H

#include "optimizer.h"

/* The least workspace with which every factor can be refreshed, the pool's rounding included, and what a refresh of all
 * of them at once takes within the budget. */
tch_status tchi_forecast_refresh(const tch_optimizer *optimizer, int64_t *least, int64_t *most);

#endif

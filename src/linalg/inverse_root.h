/* tch_inverse_root with an extra for optimizers. */
#ifndef TCHI_INVERSE_ROOT_H
#define TCHI_INVERSE_ROOT_H

#include <torchium/linalg.h>

#include "core/context.h"

/* Unless `drift` is NULL, it receives the residual of the previous contents of `out`, one number per matrix. */
tch_status tchi_inverse_root_measured(tch_context *context, const tch_tensor *a, int32_t root,
                                      const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                      tch_tensor *report, double *drift);

#endif

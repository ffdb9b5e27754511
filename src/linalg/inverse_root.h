/* tch_inverse_root with what a refresh of an optimizer asks for besides. */
#ifndef TCHI_INVERSE_ROOT_H
#define TCHI_INVERSE_ROOT_H

#include <torchium/linalg.h>

#include "core/context.h"

/* Unless `drift` is NULL, it becomes the residual of what `out` held, one number for each matrix: how far that is from
 * being the root by now. */
tch_status tchi_inverse_root_measured(tch_context *context, const tch_tensor *a, int32_t root,
                                      const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                      tch_tensor *report, double *drift);

#endif

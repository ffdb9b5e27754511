/* Inverse roots taken by somebody else, and all that surrounds a root from here: inspection, damping, scale,
 * certificate. */
#ifndef TCHI_INVERSE_ROOT_H
#define TCHI_INVERSE_ROOT_H

#include <torchium/linalg.h>

#include "core/context.h"

/* `take` writes M^(-1/root) to X for a batch of symmetric matrices M with eigenvalues in (0, 1], both without gaps and
 * of the input's compute type, and may use `matrices` matrices of scratch for each. It only queues. */
typedef struct tchi_user_root {
    tch_status (*take)(void *user, int32_t root, const tch_matrices *m, const tch_matrices *x, void *scratch);
    void *user;
    int32_t matrices;
} tchi_user_root;

/* tch_inverse_root by `user_root`, unless that is NULL: of the config, method and degree are not looked at then, what
 * fails its certificate keeps what `out` held and is reported, and nothing is done again. Unless `drift` is NULL, it
 * becomes the residual of what `out` held, one number for each matrix: how far that is from being the root by now. */
tch_status tchi_inverse_root_by(tch_context *context, const tchi_user_root *user_root, const tch_tensor *a,
                                int32_t root, const tch_root_config *config, tch_tensor *out, tch_tensor *residual,
                                tch_tensor *report, double *drift);

/* Workspace of it for one matrix; `type` is the input's. */
int64_t tchi_inverse_root_by_bytes(tch_context *context, const tchi_user_root *user_root, tch_scalar type, int64_t n,
                                   int32_t root);

#endif

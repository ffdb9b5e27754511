/* Curvature of one layer for KFAC: grad.h's functions, with loss scales and flags of rejected values. */
#ifndef TCHI_GRAD_FACTORS_H
#define TCHI_GRAD_FACTORS_H

#include <stdbool.h>

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

#include "positions.h"

/* new = alpha batch + beta old */
typedef struct tchi_curvature_update {
    double alpha, beta;
    const float *grad_scale; /* divisor of output gradients on the device, or NULL */
    int32_t *rejected;       /* set to nonzero on the device if nothing was changed, otherwise 0; or NULL */
    bool rehearse;           /* reserve memory only: the same call then cannot run out of it */
} tchi_curvature_update;

tch_status tchi_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing,
                             const tchi_curvature_update *update, tch_tensor *input_factor, tch_tensor *output_factor);

tch_status tchi_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                            const tch_tensor *output_basis, const tchi_curvature_update *update, tch_tensor *scales);

/* Common checks: the layer, its tensors, factors (either may be missing), numbers. */
tch_status tchi_check_curvature(const tch_context *context, const char *function, const tch_layer *layer,
                                const tch_tensor *input, const tch_tensor *output_gradient, double alpha, double beta);

/* A square matrix, or one per group: float32 or float64. */
tch_status tchi_check_factor(const tch_context *context, const tch_tensor *factor, const char *name, int64_t groups,
                             int64_t rows, int64_t cols);

/* The compute type for a result and positions of these types. */
tch_scalar tchi_curvature_type(tch_scalar result, tch_scalar positions);

/* *grad_scale as a double in scratch; no-op for NULL. */
tch_status tchi_widen_scale(tch_context *context, const float *grad_scale, double *wide);

#endif

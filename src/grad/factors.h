/* Curvature of one layer as KFAC asks for it: what grad.h offers, with loss scales and word of what was refused. */
#ifndef TCHI_GRAD_FACTORS_H
#define TCHI_GRAD_FACTORS_H

#include <stdbool.h>

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

#include "positions.h"

/* New = alpha what the batch says + beta old. */
typedef struct tchi_curvature_update {
    double alpha, beta;
    const float *grad_scale; /* one number on the device that output gradients are divided by, or NULL */
    int32_t *rejected;       /* one number on the device that becomes 0, or not where nothing was changed; or NULL */
    bool rehearse;           /* take the memory and change nothing: the same call will then not lack any */
} tchi_curvature_update;

tch_status tchi_grad_factors(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                             const tch_tensor *output_gradient, int32_t bias, tch_sharing sharing,
                             const tchi_curvature_update *update, tch_tensor *input_factor, tch_tensor *output_factor);

tch_status tchi_grad_scales(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                            const tch_tensor *output_gradient, int32_t bias, const tch_tensor *input_basis,
                            const tch_tensor *output_basis, const tchi_curvature_update *update, tch_tensor *scales);

/* Checks shared by the two: the layer, its tensors, of which factors may lack one, and the numbers. */
tch_status tchi_check_curvature(const tch_context *context, const char *function, const tch_layer *layer,
                                const tch_tensor *input, const tch_tensor *output_gradient, double alpha, double beta);

/* A square matrix, or one for each group: float32 or float64. */
tch_status tchi_check_factor(const tch_context *context, const tch_tensor *factor, const char *name, int64_t groups,
                             int64_t rows, int64_t cols);

/* The type to compute in for a result of one type from positions of another. */
tch_scalar tchi_curvature_type(tch_scalar result, tch_scalar positions);

/* *grad_scale as a double in scratch; does nothing without one. */
tch_status tchi_widen_scale(tch_context *context, const float *grad_scale, double *wide);

#endif

/* The layers that are not products: what grad.h's functions do for embeddings and for normalizing layers. Arguments
 * have been checked; numbers per sample are arrays of double on the device; `weights` may be NULL for 1. Without
 * `accumulate` norms, Gram matrices and dots are cleared first, once there is memory for the call. */
#ifndef TCHI_GRAD_KINDS_H
#define TCHI_GRAD_KINDS_H

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

tch_status tchi_embedding_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *gradient, tch_tensor *weight);
tch_status tchi_embedding_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                              const tch_tensor *gradient, const double *weights, double beta, tch_tensor *weight);
tch_status tchi_embedding_gram(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                               const tch_tensor *gradient, int32_t accumulate, tch_tensor *gram);
/* Without a weight: the squared norms. */
tch_status tchi_embedding_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                               const tch_tensor *gradient, const tch_tensor *weight, int32_t accumulate, double *dots);

tch_status tchi_normalizing_samples(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                    const tch_tensor *gradient, tch_tensor *weight, tch_tensor *bias);
tch_status tchi_normalizing_norms(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                  const tch_tensor *gradient, tch_grad_part parts, int32_t accumulate, double *norms);
tch_status tchi_normalizing_sum(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                const tch_tensor *gradient, const double *weights, double beta, tch_tensor *weight,
                                tch_tensor *bias);
tch_status tchi_normalizing_gram(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *gradient, tch_grad_part parts, int32_t accumulate, tch_tensor *gram);
tch_status tchi_normalizing_dots(tch_context *context, const tch_layer *layer, const tch_tensor *input,
                                 const tch_tensor *gradient, const tch_tensor *weight, const tch_tensor *bias,
                                 int32_t accumulate, double *dots);

#endif

/* The arguments of grad.h's functions over samples, for every kind of layer. calls.c checks them; each kind implements
 * the functions. */
#ifndef TCHI_GRAD_CALL_H
#define TCHI_GRAD_CALL_H

#include <torchium/grad.h>

#include "core/context.h"
#include "core/tensor.h"

typedef struct tchi_grad_call {
    const tch_layer *layer;
    const tch_tensor *input, *gradient;
    const tch_tensor *weight, *bias; /* per-sample gradients, a direction or sums; either may be NULL */
    tch_grad_part parts;             /* of norms and Gram matrices; otherwise the parts with a tensor */
    double *numbers;                 /* norms or inner products, one per sample */
    int32_t accumulate;              /* 0: norms, Gram matrices and dots are cleared after all memory is reserved */
    const double *weights;           /* sums: one per sample, or NULL for 1 */
    double beta;                     /* sums: the factor of the previous value */
} tchi_grad_call;

typedef tch_status tchi_grad_function(tch_context *context, const tchi_grad_call *call);

/* LINEAR and CONV. */
tchi_grad_function tchi_product_samples, tchi_product_norms, tchi_product_sum, tchi_product_dots;

/* EMBEDDING and normalization layers; dots without a weight and a bias are squared norms. */
tchi_grad_function tchi_embedding_samples, tchi_embedding_sum, tchi_embedding_dots;
tchi_grad_function tchi_normalizing_samples, tchi_normalizing_sum, tchi_normalizing_dots;

/* gram = 0, unless accumulating. */
tch_status tchi_clear_gram(tch_context *context, int32_t accumulate, const tch_tensor *gram);
tch_status tchi_embedding_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram);
tch_status tchi_normalizing_gram(tch_context *context, const tchi_grad_call *call, const tch_tensor *gram);

#endif

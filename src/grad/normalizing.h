/* Gradients of the weights of normalizing layers for a chunk of samples: what the files on these layers share. */
#ifndef TCHI_GRAD_NORMALIZING_H
#define TCHI_GRAD_NORMALIZING_H

#include <stdbool.h>

#include "call.h"
#include "parameters.h"

typedef struct tchi_normalizing {
    const tch_layer *layer;
    const tch_tensor *input, *gradient;
    tch_grad_part parts; /* those that are wanted and that the kind has */
    tch_scalar type;     /* of the gradients of weights: the type to compute in */
    int64_t samples, positions, features;
} tchi_normalizing;

tchi_normalizing tchi_normalizing_of(const tchi_grad_call *call);

static inline bool tchi_normalizing_has(const tchi_normalizing *c, tch_grad_part part)
{
    return (c->parts & part) != 0;
}

/* Inputs and output gradients of some samples, and the gradients of the weights, samples by features. */
typedef struct tchi_normalizing_chunk {
    tch_matrices x, g, weight, bias;
    void *scratch;
} tchi_normalizing_chunk;

/* Samples [first, first + count) in the layout of a call, which runs twice. Gradients that belong to the caller are
 * written to his memory where `weight` and `bias`, which may be NULL, allow it. */
void tchi_normalizing_layout(const tchi_normalizing *c, tchi_normalizing_chunk *p, const tchi_parameter *weight,
                             const tchi_parameter *bias, tchi_arena *arena, tch_context *context, int64_t first,
                             int64_t count);

/* Fills p->weight and p->bias, those of them that are wanted. */
tch_status tchi_normalizing_form(tch_context *context, const tchi_normalizing *c, const tchi_normalizing_chunk *p,
                                 int64_t first, int64_t count);

/* Samples to do at once beside `bytes_fixed` of scratch. */
int64_t tchi_normalizing_chunk_size(const tchi_normalizing *c, tch_context *context, int64_t bytes_fixed);

#endif

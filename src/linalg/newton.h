/* The coupled Newton iteration for inverse roots, with minimax steps: products only. */
#ifndef TCHI_NEWTON_H
#define TCHI_NEWTON_H

#include "core/context.h"
#include "core/tensor.h"

#include "minimax.h"

#define TCHI_NEWTON_BUFFERS 5

/* Scratch of the iteration: batches of equal shape. On entry buffer 0 holds M, a scaled matrix with spectrum in (0, 1];
 * tchi_newton leaves M^(-1/root) in the buffer it names through *result. */
typedef struct tchi_newton_buffers {
    tch_matrices m[TCHI_NEWTON_BUFFERS];
} tchi_newton_buffers;

tch_status tchi_newton(tch_context *context, int32_t root, int degree, const tchi_minimax_step *steps, int count,
                       tchi_newton_buffers *buffers, tch_matrices *result);

#endif

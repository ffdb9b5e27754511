/* Newton-Schulz orthogonalization of a batch in scratch memory, shared by tch_orthogonalize and the optimizers. The
 * caller gathers the batch, which is overwritten. */
#ifndef TCHI_ORTHOGONALIZE_H
#define TCHI_ORTHOGONALIZE_H

#include <stdbool.h>

#include <torchium/linalg.h>

#include "core/context.h"
#include "core/tensor.h"

#define TCHI_ORTHO_MOST_STEPS 100
#define TCHI_ORTHO_MORE 2 /* additional short steps that replace long ones */

typedef struct tchi_schulz_step {
    double a, b, c; /* X <- a X + b (X X') X + c (X X')^2 X */
} tchi_schulz_step;

/* X / max(|X|, eps) in the Frobenius norm, followed by the steps. The first `longs` are the long steps of
 * newton_schulz.c. */
typedef struct tchi_ortho {
    double eps;
    int32_t steps, longs;
    bool without_f16;                                               /* no Gram matrix in float16 */
    tchi_schulz_step step[TCHI_ORTHO_MOST_STEPS + TCHI_ORTHO_MORE]; /* used from index `longs` on */
} tchi_ortho;

/* The coefficients of a method; 1 <= steps <= TCHI_ORTHO_MOST_STEPS. */
tchi_ortho tchi_ortho_of(tch_ortho_method method, int32_t steps, double eps);

/* The same coefficients at every step. */
tchi_ortho tchi_ortho_repeating(tchi_schulz_step step, int32_t steps, double eps);

/* The type in which to gather tensors of `type`: bfloat16 if the device multiplies it, except for float64. */
tch_scalar tchi_ortho_type(const tch_context *context, tch_scalar type);

/* Bytes of scratch for a batch with the type and shape of x, whose data is not read. */
int64_t tchi_orthogonalize_bytes(const tchi_ortho *ortho, const tch_matrices *x);

/* Orthogonalizes every matrix of x, rows <= cols, with rows aligned to 16 bytes for fast products. `scratch` is aligned
 * to 256 bytes. *result, of x's shape, is in x or in scratch; everything else in both is overwritten. x is a part of
 * `all` matrices over passes and ranks. The choice of polynomials depends on that number, and so neither on available
 * memory nor on the number of ranks. */
tch_status tchi_orthogonalize_blocks(tch_context *context, const tchi_ortho *ortho, const tch_matrices *x, int64_t all,
                                     void *scratch, tch_matrices *result);

/* The default number of steps of a method. */
int32_t tchi_ortho_usual_steps(tch_ortho_method method);

/* --- the plan, for tests ----------------------------------------------------------------------------------------- */

/* How many steps from `step` on run on one Gram matrix before X is multiplied and a new one is formed, for matrices of
 * this shape; `fine` if the Gram matrix of several steps is float16. */
int32_t tchi_ortho_run(const tchi_ortho *ortho, int32_t step, int64_t rows, int64_t cols, bool fine);

#endif

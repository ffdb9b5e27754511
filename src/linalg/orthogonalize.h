/* Newton-Schulz orthogonalization of a batch in scratch memory: what tch_orthogonalize and the optimizers share. The
 * batch is gathered by the caller, in whatever way it has it, and is used up. */
#ifndef TCHI_ORTHOGONALIZE_H
#define TCHI_ORTHOGONALIZE_H

#include <stdbool.h>

#include <torchium/linalg.h>

#include "core/context.h"
#include "core/tensor.h"

#define TCHI_ORTHO_MOST_STEPS 100
#define TCHI_ORTHO_MORE 2 /* short steps that do what long ones would, beyond their number */

typedef struct tchi_schulz_step {
    double a, b, c; /* X <- a X + b (X X') X + c (X X')^2 X */
} tchi_schulz_step;

/* What to compute: X / max(|X|, eps) in the Frobenius norm, and then the steps. The first `longs` are the long steps of
 * newton_schulz.c, by their number. */
typedef struct tchi_ortho {
    double eps;
    int32_t steps, longs;
    tchi_schulz_step step[TCHI_ORTHO_MOST_STEPS + TCHI_ORTHO_MORE]; /* used from number `longs` on */
} tchi_ortho;

/* The coefficients of a method. 1 <= steps <= TCHI_ORTHO_MOST_STEPS. */
tchi_ortho tchi_ortho_of(tch_ortho_method method, int32_t steps, double eps);

/* One set of coefficients at every step. */
tchi_ortho tchi_ortho_repeating(tchi_schulz_step step, int32_t steps, double eps);

/* The type to gather tensors of `type` in: bfloat16 where the device multiplies it and float64 is not asked for. */
tch_scalar tchi_ortho_type(const tch_context *context, tch_scalar type);

/* Bytes of scratch for a batch of the type, the shape and the number of matrices of x, whose data is not read. */
int64_t tchi_orthogonalize_bytes(const tchi_ortho *ortho, const tch_matrices *x);

/* Orthogonalizes every matrix of x, rows <= cols, each row at whole 16 bytes if products are to be fast. `scratch` is
 * aligned to 256 bytes. *result, of x's shape, lies in x or in scratch; all else in both is used up. x is some of `all`
 * matrices, over passes and over ranks: which polynomials are used goes by that number, so that neither the memory at
 * hand nor the number of ranks changes them. */
tch_status tchi_orthogonalize_blocks(tch_context *context, const tchi_ortho *ortho, const tch_matrices *x, int64_t all,
                                     void *scratch, tch_matrices *result);

/* How many steps a method takes unless told otherwise. */
int32_t tchi_ortho_usual_steps(tch_ortho_method method);

/* --- the plan, for tests ----------------------------------------------------------------------------------------- */

/* How many of the steps from `step` on are done on one Gram matrix before X is multiplied and a new one is formed, for
 * matrices of this shape; `fine` where the Gram matrix of several steps is kept in float16. */
int32_t tchi_ortho_run(const tchi_ortho *ortho, int32_t step, int64_t rows, int64_t cols, bool fine);

#endif

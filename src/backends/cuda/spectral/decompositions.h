/* Kernels around the calls of decompositions.c: they remove from a batch what cuSOLVER must not see, and convert its
 * device results to flags. */
#ifndef TCHI_CUDA_DECOMPOSITIONS_H
#define TCHI_CUDA_DECOMPOSITIONS_H

#include "backends/cuda/cuda.h"

TCH_BEGIN_DECLS

/* Flagged matrices, and those with a NaN or an infinity, which are flagged NOT_FINITE, become the identity. Others are
 * multiplied by a power of two; exponents[b] is the power to multiply the eigenvalues by. */
tch_status tchi_cuda_eigh_prepare(const tchi_cuda_state *state, const tch_matrices *v, int32_t *exponents,
                                  int32_t *flags);

/* w = values (n per matrix, contiguous, of w's type) times 2^exponents, and NO_CONVERGENCE if info is not 0; both only
 * where flags are OK. */
tch_status tchi_cuda_eigh_finish(const tchi_cuda_state *state, const void *values, const int32_t *exponents,
                                 const int32_t *info, const tch_matrices *w, int32_t *flags);

/* Orthonormalizes the rows of v where flags are OK and defects[b], |V V' - I| in the Frobenius norm, exceeds a stable
 * solver's; NO_CONVERGENCE if it is not finite. `values`, the eigenvalues as above, determine which rows change least:
 * those of the largest. `rows` is scratch, 2 n numbers per matrix. */
tch_status tchi_cuda_orthonormal_rows(const tchi_cuda_state *state, const tch_matrices *v, const void *values,
                                      const double *defects, double *rows, int32_t *flags);

/* Matrices of one element. */
tch_status tchi_cuda_eigh_single(const tchi_cuda_state *state, const tch_matrices *v, const tch_matrices *w,
                                 int32_t *flags);

/* A += shift I where flags are OK, shift may be NULL; and the addresses of every A and every B. */
tch_status tchi_cuda_solve_prepare(const tchi_cuda_state *state, const tch_matrices *a, const double *shift,
                                   const tch_matrices *b, const int32_t *flags, void **a_addresses, void **b_addresses);

/* NOT_POSITIVE where flags are OK and the factorization failed, by info or by a diagonal of A that is not positive and
 * finite. Every flagged A then becomes the identity, so that solving leaves its B unchanged. */
tch_status tchi_cuda_solve_verdict(const tchi_cuda_state *state, const tch_matrices *a, const int32_t *info,
                                   int32_t *flags);

TCH_END_DECLS

#endif

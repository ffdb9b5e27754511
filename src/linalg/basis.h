/* The eigenbasis of symmetric positive semidefinite factors, for SOAP: computed once, then tracked by products alone.
 * docs/numerics/soap-basis.md has the reasons and measurements.
 *
 * A basis q, n by n, has its vectors as rows, in order of decreasing eigenvalue, so that q A q' is nearly diagonal. All
 * factors of a call have one size and a constant stride; `a` and `q` are both float32 or both float64 and do not
 * overlap. `scratch` is device memory aligned to 256 bytes. Callers split large batches themselves; a part with fewer
 * matrices than the device has multiprocessors leaves some of them idle. Asynchronous, except for tchi_basis_init where
 * the device's eigensolver is not. */
#ifndef TCHI_BASIS_H
#define TCHI_BASIS_H

#include "core/context.h"

/* Scratch for either call on `batch` factors of n by n; not proportional to the batch. */
int64_t tchi_basis_init_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch);
int64_t tchi_basis_track_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch);

/* q = the eigenvectors of A. flags, one int32 per factor on the device, are set to TCH_REPORT_OK or the reason why
 * there is no basis; q is then the identity. */
tch_status tchi_basis_init(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *flags,
                           void *scratch);

/* One orthogonal iteration: the rows of q are sorted by decreasing q_i' A q_i, multiplied by A, and orthonormalized in
 * that order, each keeping its sign. order[b n + k], unless `order` is NULL, is the old index of new row k, for
 * permuting what is stored in the basis. If a factor is zero, not finite or not symmetric, or its basis cannot be
 * orthonormalized, its flag is set, q is unchanged and the order is 0, 1, 2, ... Unless `drift` is NULL, it is set to
 * |C - I| / sqrt(n) of each factor, C being q A q' with its diagonal scaled to 1: the distance of the old q from a
 * basis. */
tch_status tchi_basis_track(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *order,
                            int32_t *flags, double *drift, void *scratch);

#endif

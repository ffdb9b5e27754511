/* The eigenbasis of symmetric positive semidefinite factors, for SOAP: found once, then followed from step to step by
 * products alone. docs/numerics/soap-basis.md says why it is done this way and what was measured.
 *
 * A basis q, n by n, holds its vectors as rows, those of large eigenvalues first, so that q A q' is nearly diagonal.
 * All factors of a call have one size and lie at a constant stride; `a` and `q` are of one type, float32 or float64,
 * and do not overlap. `scratch` is device memory, aligned to 256 bytes. Callers cut a batch into parts themselves; a
 * part of fewer matrices than the device has multiprocessors leaves some of it idle. Nothing waits for the device,
 * except tchi_basis_init where the device's eigensolver does. */
#ifndef TCHI_BASIS_H
#define TCHI_BASIS_H

#include "core/context.h"

/* Scratch for either call on `batch` factors of n by n. It does not grow evenly with the batch. */
int64_t tchi_basis_init_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch);
int64_t tchi_basis_track_bytes(tch_context *context, tch_scalar type, int64_t n, int64_t batch);

/* q = the eigenvectors of A. flags, one int32 on the device per factor, become TCH_REPORT_OK, or say why a factor has
 * no basis; q is then the identity. */
tch_status tchi_basis_init(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *flags,
                           void *scratch);

/* One orthogonal iteration: rows of q are sorted by q_i' A q_i, descending, multiplied by A, and made orthonormal in
 * that order, each keeping its sign. order[b n + k], unless `order` is NULL, is the old number of the new row k, by
 * which the caller permutes what it keeps in the basis. Where a factor is zero, not finite or not symmetric, or where
 * its basis cannot be made orthonormal, flags say so, q stays as it is and the order is 0, 1, 2, ... Unless `drift` is
 * NULL, it becomes |C - I| / sqrt(n) of each factor, C being q A q' with its diagonal scaled to 1: how far the old q is
 * from being a basis by now. */
tch_status tchi_basis_track(tch_context *context, const tch_matrices *a, const tch_matrices *q, int32_t *order,
                            int32_t *flags, double *drift, void *scratch);

#endif

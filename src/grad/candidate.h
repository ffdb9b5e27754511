/* A moving average that must stay finite: the new value is computed in scratch, and stored only if everything that
 * belongs together is finite. The device decides; the host does not wait. */
#ifndef TCHI_GRAD_CANDIDATE_H
#define TCHI_GRAD_CANDIDATE_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

typedef struct tchi_candidate {
    tchi_batch target;   /* the caller's tensor, matrices in its last two dimensions */
    tch_matrices sum;    /* the summand, then the candidate: contiguous, in the compute type */
    tch_matrices before; /* the target in the compute type: its memory, or scratch */
    bool in_place;
    bool is_gram; /* a sum of outer products: its diagonal shows whether it is finite */
} tchi_candidate;

void tchi_candidate_layout(tchi_candidate *candidate, tchi_arena *arena, const tch_tensor *target, tch_scalar type,
                           bool is_gram);

/* sum = sum / square of *divisor, a number on the device. */
tch_status tchi_candidate_divide(tch_context *context, const tchi_candidate *candidate, const double *divisor);

/* The decision over up to two candidates. */
typedef struct tchi_verdict {
    tchi_inspection of;
    int32_t *flags; /* repeated for each matrix of a candidate */
} tchi_verdict;

/* `matrices`: the largest number of matrices of a candidate. */
void tchi_verdict_layout(tchi_verdict *verdict, tchi_arena *arena, int64_t matrices);

/* Every target = its sum + beta target if all sums are finite; otherwise none changes. `rejected` is set to nonzero if
 * not, on the device; may be NULL. */
tch_status tchi_candidates_keep(tch_context *context, tchi_verdict *verdict, tchi_candidate *const *candidates,
                                int32_t count, double beta, int32_t *rejected);

#endif

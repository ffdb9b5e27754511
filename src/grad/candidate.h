/* A moving average that must not be spoiled: the new value is made in scratch, and takes its place only where
 * everything that belongs together is finite. The decision stays on the device. */
#ifndef TCHI_GRAD_CANDIDATE_H
#define TCHI_GRAD_CANDIDATE_H

#include <stdbool.h>

#include "core/context.h"
#include "core/tensor.h"
#include "linalg/algebra.h"
#include "linalg/batch.h"

typedef struct tchi_candidate {
    tchi_batch target;   /* the caller's tensor, matrices in its last two dimensions */
    tch_matrices sum;    /* what is to be added, then the candidate: contiguous, of the type computed in */
    tch_matrices before; /* the target in that type: its own memory, or scratch */
    bool in_place;
    bool is_gram; /* the sum is one of outer products, whose diagonal shows whether it is finite */
} tchi_candidate;

void tchi_candidate_layout(tchi_candidate *candidate, tchi_arena *arena, const tch_tensor *target, tch_scalar type,
                           bool is_gram);

/* sum = sum / square of *divisor, a number on the device. */
tch_status tchi_candidate_divide(tch_context *context, const tchi_candidate *candidate, const double *divisor);

/* What decides over up to two candidates. */
typedef struct tchi_verdict {
    tchi_inspection of;
    int32_t *flags; /* the one decision, once for each matrix of a candidate */
} tchi_verdict;

/* `matrices` is the most that a candidate has. */
void tchi_verdict_layout(tchi_verdict *verdict, tchi_arena *arena, int64_t matrices);

/* Every target = its sum + beta target if all sums are finite, and none changes otherwise. `rejected`, one number on
 * the device that becomes 0 or not, may be NULL. */
tch_status tchi_candidates_keep(tch_context *context, tchi_verdict *verdict, tchi_candidate *const *candidates,
                                int32_t count, double beta, int32_t *rejected);

#endif

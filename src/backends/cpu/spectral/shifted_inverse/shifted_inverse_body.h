/* The shifted inverse for one precision: included by shifted_inverse_f32.c and shifted_inverse_f64.c, which define
 * REAL, REAL_BLAS and REAL_FIELD. Matrices are column by column, and of a symmetric one the lower triangle is used. */
#ifndef REAL
#error "shifted_inverse_body.h is included by a file that defines REAL and REAL_BLAS"
#endif

#include <math.h>
#include <omp.h>
#include <string.h>

#include "backends/cpu/runtime/flush_subnormals.h"
#include "backends/cpu/runtime/vector_clones.h"
#include "backends/cpu/runtime/work_team.h"
#include "band_plan.h"

#include "block_reflector_body.h"
#include "two_sided_body.h"
#include "band_reduction_body.h"
#include "band_inverse_body.h"

/* Whether a column is free of NaN and infinity: either times zero is not zero. */
VECTOR_CLONES static int is_finite(int64_t n, const REAL *x)
{
    REAL sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += x[i] * 0;
    }
    return sum == 0;
}

/* Checks one triangle: both are given and equal. */
static int lower_is_finite(int64_t n, const REAL *a, int64_t lda)
{
    for (int64_t j = 0; j < n; j++) {
        if (!is_finite(n - j, a + j + j * lda)) {
            return 0;
        }
    }
    return 1;
}

/* Rows times poles below which no threads are started: the work then takes about as long as starting them, some ten
 * microseconds. Estimated, not tuned. */
enum { SMALLEST_SHARED_WORK = 200 };

static size_t align_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static size_t shifted_inverse_scratch_bytes(int64_t n, int64_t count)
{
    if (n == 0) {
        return 0;
    }
    const band_plan plan = make_band_plan(n, count);
    return align_up(band_factors_count(&plan) * sizeof(REAL)) + align_up(band_inverse_bytes(&plan));
}

typedef struct shifted_inverse_call {
    const tchi_blas *blas;
    const REAL_BLAS *real;
    band_plan plan;
    band_factors factors;
    band_inverse_scratch inverse;
    const double *shifts;
    const double *weights;
} shifted_inverse_call;

/* Body of every thread of the team; all return the same. */
static int reduce_invert_restore(work_team *team, const shifted_inverse_call *call, REAL *a, int64_t lda, REAL *x,
                                 int64_t ldx)
{
    const band_plan *plan = &call->plan;
    reduce_to_band(team, call->real, plan, &call->factors, a, lda);
    const int status = invert_band(team, call->blas, call->real, plan, &call->factors, call->shifts, call->weights,
                                   &call->inverse, x, ldx);
    if (status == 0) {
        restore_from_band(team, call->real, plan, &call->factors, a, lda, x, ldx);
        mirror_lower(team, plan->n, x, ldx);
    }
    return status;
}

/* Number of threads: one for a small matrix. */
static int threads_for(const band_plan *plan)
{
    const int one = plan->n * plan->poles < SMALLEST_SHARED_WORK;
    return one || omp_in_parallel() ? 1 : omp_get_max_threads();
}

static int solve_shifted_inverse(const tchi_blas *blas, int64_t n, void *a, int64_t lda, int64_t count,
                                 const double *shifts, const double *weights, void *x, int64_t ldx, void *scratch)
{
    if (n == 0) {
        return 0;
    }
    shifted_inverse_call call = {.blas = blas,
                                 .real = &blas->REAL_FIELD,
                                 .plan = make_band_plan(n, count),
                                 .shifts = shifts,
                                 .weights = weights};
    call.factors = make_band_factors(&call.plan, scratch);
    call.inverse = make_band_inverse_scratch(&call.plan,
                                             (char *)scratch + align_up(band_factors_count(&call.plan) * sizeof(REAL)));
    work_team team = WORK_TEAM_INIT;
    int status = 0;
    if (!lower_is_finite(n, a, lda)) {
        return -1;
    }
#pragma omp parallel num_threads(threads_for(&call.plan))
    {
#pragma omp single
        team.threads = omp_get_num_threads();
        const unsigned subnormals = flush_subnormals();
        const int mine = reduce_invert_restore(&team, &call, a, lda, x, ldx);
        restore_subnormals(subnormals);
#pragma omp master
        status = mine;
    }
    return status;
}

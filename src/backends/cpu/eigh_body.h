/* The symmetric eigensolver, written once for the two precisions: reduce to tridiagonal form, divide and conquer,
 * transform back. Only matrix products are borrowed; why, and what each step reached, is in bench/ladder/eigh.md.
 * Before including, define REAL, REAL_BLAS and the numbers that eigh_f32.c explains. */
#include <math.h>
#include <omp.h>
#include <stdbool.h>

#include "eigh.h"

/* Measured in bench/ladder/eigh.md. A leaf of divide and conquer has at most LEAF_ORDER rows: between 12 and 24 the time
 * is the same within the noise. BACK_WIDTH reflections are gathered into a block, half as many for orders under
 * NARROW_UNDER, and BACK_SLICE columns taken through all blocks at once. A thread is worth having for so many rows in
 * the reduction, where threads meet at each column, and in the rest. */
enum { LEAF_ORDER = 24, BACK_WIDTH = 64, NARROW_UNDER = 192, BACK_SLICE = 256, REDUCE_ROWS = 192, DIVIDE_ROWS = 64 };

/* Orders that always have a team of one, and the multiplications in a product up to which OpenBLAS has one too. */
enum { SERIAL_UNDER = 2 * DIVIDE_ROWS, SERIAL_PRODUCT = 262144 };

#include "eigh_divide_body.h"
#include "eigh_back_body.h"
#include "eigh_reduce_body.h"

enum { MAX_THREADS = 64 };

/* The threads of a team of at most limit worth having when each should have so many of the n rows. */
static int team_size(int64_t n, int64_t rows, int limit)
{
    int64_t threads = n / rows < limit ? n / rows : limit;
    return threads > 1 ? (int)threads : 1;
}

/* Everything the solver works in, in the order in which it lies in the scratch. */
typedef struct workspace {
    int64_t padded, ldq;
    REAL *q;      /* padded columns of length ldq: the matrix being reduced, then the tridiagonal vectors */
    REAL *square; /* n by n: the vectors of a merge, then V of the blocks of reflections */
    REAL *packed; /* n by n: the packed columns of a merge, then V T */
    REAL *vectors, *tau, *t, *w;
    double *values, *e, *numbers;
    int *order, *indices;
    size_t bytes;
} workspace;

static void *take(char *scratch, size_t *used, int64_t count, size_t size)
{
    char *here = scratch == NULL ? NULL : scratch + *used;
    *used += ((size_t)count * size + 63) / 64 * 64;
    return here;
}

/* With scratch NULL only the sizes are meant. The odd multiple of 64 bytes between columns keeps them from falling on
 * the same lines of the cache. */
static workspace lay_out(int64_t n, void *scratch)
{
    workspace s = {.padded = round_up(n, BLOCK)};
    s.ldq = s.padded + BLOCK;
    s.q = take(scratch, &s.bytes, s.padded * s.ldq, sizeof(REAL));
    s.square = take(scratch, &s.bytes, n * n, sizeof(REAL));
    s.packed = take(scratch, &s.bytes, n * n, sizeof(REAL));
    int team = team_size(n, REDUCE_ROWS, MAX_THREADS);
    s.vectors = take(scratch, &s.bytes, (VECTORS_PER_THREAD * team + SHARED_VECTORS) * s.padded, sizeof(REAL));
    s.tau = take(scratch, &s.bytes, n, sizeof(REAL));
    s.t = take(scratch, &s.bytes, n * BACK_WIDTH, sizeof(REAL));
    s.w = take(scratch, &s.bytes, n * BACK_WIDTH, sizeof(REAL));
    s.values = take(scratch, &s.bytes, n, sizeof(double));
    s.e = take(scratch, &s.bytes, n, sizeof(double));
    s.numbers = take(scratch, &s.bytes, NUMBER_LISTS * 2 * n, sizeof(double));
    s.order = take(scratch, &s.bytes, n, sizeof(int));
    s.indices = take(scratch, &s.bytes, INDEX_LISTS * 2 * n, sizeof(int));
    return s;
}

static size_t eigh_scratch(int64_t n)
{
    return lay_out(n, NULL).bytes;
}

/* The largest size of an entry of the lower triangle, or a NaN when one is not finite. */
VECTOR_CLONES static REAL largest_entry(int64_t n, const REAL *a, int64_t lda)
{
    REAL most = 0, wrong = 0;
    for (int64_t j = 0; j < n; j++) {
#pragma omp simd reduction(max : most) reduction(+ : wrong)
        for (int64_t i = j; i < n; i++) {
            REAL x = a[j * lda + i] < 0 ? -a[j * lda + i] : a[j * lda + i];
            most = x > most ? x : most;
            wrong += x - x; /* zero unless x is infinite or a NaN */
        }
    }
    return most + wrong;
}

/* Scales the tridiagonal matrix to entries of at most one, exactly, and returns the exponent taken out: deflation
 * compares with the norm of the whole. */
static int normalise(int64_t n, double *d, double *e)
{
    double most = fmax(largest(d, n), largest(e, n - 1));
    int exponent = 0;
    frexp(most, &exponent);
    double scale = ldexp(1.0, -exponent);
    for (int64_t i = 0; i < n; i++) {
        d[i] *= scale;
    }
    for (int64_t i = 0; i + 1 < n; i++) {
        e[i] *= scale;
    }
    return exponent;
}

/* One matrix on its way through the three steps. */
typedef struct job {
    reduction reduction;
    divide divide;
    back back;
    node shared;
    REAL scale;
    int exponent; /* of what the eigenvalues are multiplied by at the end */
    meeting everyone, reducers;
} job;

/* What each thread does. Fewer of them reduce than do the rest. Returns how many eigenvalues it did not find. */
static int solve_share(job *j, const member *me)
{
    int reducers = team_size(j->reduction.n, REDUCE_ROWS, me->threads);
    if (me->thread < reducers) {
        const member reducer = {&j->reducers, me->thread, reducers};
        reduce(&j->reduction, j->back.a, j->back.lda, j->scale, &reducer);
    }
    meet(me);
    if (me->thread == 0) {
        j->exponent += normalise(j->reduction.n, j->reduction.d, j->reduction.e);
    }
    int failed = divide_and_conquer(&j->divide, &j->shared, j->reduction.e, me);
    back_transform(&j->back, me);
    return failed;
}

static job make_job(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, const workspace *s, int exponent)
{
    int64_t width = n < NARROW_UNDER ? BACK_WIDTH / 2 : BACK_WIDTH;
    return (job){
        .reduction = {n, s->padded, s->q, s->ldq, a, lda, s->tau, s->values, s->e, s->vectors},
        .divide = {blas, n, s->q, s->ldq, s->square, s->packed, s->values, s->numbers, s->order, s->indices},
        .back = {blas, n, s->q, s->ldq, s->order, a, lda, s->tau, s->square, s->packed, s->t, s->w, width},
        .scale = (REAL)ldexp(1.0, -exponent),
        .exponent = exponent,
    };
}

static int solve(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, REAL *w, const workspace *s, int exponent)
{
    job j = make_job(blas, n, a, lda, s, exponent);
    int failed = 0, available = omp_in_parallel() ? 1 : omp_get_max_threads();
    int threads = team_size(n, DIVIDE_ROWS, available < MAX_THREADS ? available : MAX_THREADS);
    if (threads == 1) {
        const member alone = {NULL, 0, 1};
        failed = solve_share(&j, &alone);
    } else {
#pragma omp parallel num_threads(threads) reduction(+ : failed)
        {
            const member me = {&j.everyone, omp_get_thread_num(), omp_get_num_threads()};
            failed += solve_share(&j, &me);
        }
    }
    for (int64_t i = 0; i < n; i++) {
        w[i] = (REAL)ldexp(s->values[s->order[i]], j.exponent);
    }
    return failed;
}

/* The matrix is worked on with its largest entry between one half and one, by an exact scaling, so that no square can
 * overflow and what underflows is negligible. At the ends of the range the scaling stops short of factors that are not
 * normal numbers themselves. */
static int eigh(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, REAL *w, void *scratch)
{
    if (n == 0) {
        return 0;
    }
    REAL most = largest_entry(n, a, lda);
    if (!isfinite(most)) {
        return TCHI_EIGH_NOT_FINITE;
    }
    if (n == 1) {
        w[0] = a[0];
        a[0] = 1;
        return 0;
    }
    int exponent = 0;
    frexp((double)most, &exponent);
    exponent = exponent < -MAX_SCALING ? -MAX_SCALING : exponent > MAX_SCALING ? MAX_SCALING : exponent;
    workspace s = lay_out(n, scratch);
    return solve(blas, n, a, lda, w, &s, exponent);
}

/* The symmetric eigensolver, written once for the two precisions: reduce to tridiagonal form, divide and conquer,
 * transform back. Only matrix products are borrowed; why, and what each step reached, is in bench/ladder/eigh.md.
 * Before including, define REAL, REAL_BLAS and the numbers that eigh_f32.c explains. */
#include <math.h>
#include <omp.h>
#include <stdbool.h>

#include "eigh.h"

/* Measured in bench/ladder/eigh.md. A leaf of divide and conquer has at most LEAF_ORDER rows: between 9 and 32 the time
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

/* The parts of the scratch, in their order. */
enum {
    PART_Q,
    PART_SQUARE,
    PART_PACKED,
    PART_VECTORS,
    PART_TAU,
    PART_T,
    PART_W,
    PART_VALUES,
    PART_E,
    PART_NUMBERS,
    PART_ORDER,
    PART_INDICES,
    PARTS
};

typedef struct workspace {
    int64_t padded, ldq;
    REAL *q;      /* padded columns of length ldq: the matrix being reduced, then the tridiagonal vectors */
    REAL *square; /* n by n: the vectors of a merge, then V of the blocks of reflections */
    REAL *packed; /* n by n: the packed columns of a merge, then V T */
    REAL *vectors, *tau, *t, *w;
    double *values, *e, *numbers;
    int *order, *indices;
} workspace;

/* The columns of q are an odd multiple of a block apart, so that they do not fall on the same lines of the cache. */
static int64_t distance_of_columns(int64_t padded)
{
    return padded / BLOCK % 2 == 0 ? padded + BLOCK : padded;
}

static size_t part_bytes(int64_t n, int part)
{
    int64_t padded = tchi_round_up(n, BLOCK), team = team_size(n, REDUCE_ROWS, MAX_THREADS);
    const size_t bytes[PARTS] = {
        [PART_Q] = (size_t)(padded * distance_of_columns(padded)) * sizeof(REAL),
        [PART_SQUARE] = (size_t)(n * n) * sizeof(REAL),
        [PART_PACKED] = (size_t)(n * n) * sizeof(REAL),
        [PART_VECTORS] = (size_t)((VECTORS_PER_THREAD * team + SHARED_VECTORS) * padded) * sizeof(REAL),
        [PART_TAU] = (size_t)n * sizeof(REAL),
        [PART_T] = (size_t)(n * BACK_WIDTH) * sizeof(REAL),
        [PART_W] = (size_t)(n * BACK_WIDTH) * sizeof(REAL),
        [PART_VALUES] = (size_t)n * sizeof(double),
        [PART_E] = (size_t)n * sizeof(double),
        [PART_NUMBERS] = (size_t)(NUMBER_LISTS * 2 * n) * sizeof(double),
        [PART_ORDER] = (size_t)n * sizeof(int),
        [PART_INDICES] = (size_t)(INDEX_LISTS * 2 * n) * sizeof(int),
    };
    return (bytes[part] + 63) / 64 * 64;
}

static size_t eigh_scratch(int64_t n)
{
    size_t bytes = 0;
    for (int part = 0; part < PARTS; part++) {
        bytes += part_bytes(n, part);
    }
    return bytes;
}

static workspace lay_out(int64_t n, char *scratch)
{
    void *at[PARTS];
    for (int part = 0; part < PARTS; part++) {
        at[part] = scratch;
        scratch += part_bytes(n, part);
    }
    int64_t padded = tchi_round_up(n, BLOCK);
    return (workspace){
        .padded = padded,
        .ldq = distance_of_columns(padded),
        .q = at[PART_Q],
        .square = at[PART_SQUARE],
        .packed = at[PART_PACKED],
        .vectors = at[PART_VECTORS],
        .tau = at[PART_TAU],
        .t = at[PART_T],
        .w = at[PART_W],
        .values = at[PART_VALUES],
        .e = at[PART_E],
        .numbers = at[PART_NUMBERS],
        .order = at[PART_ORDER],
        .indices = at[PART_INDICES],
    };
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
static int normalize(int64_t n, double *d, double *e)
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
typedef struct ctx {
    reduction reduction;
    divide divide;
    back back;
    node shared;
    REAL scale;
    int exponent; /* of what the eigenvalues are multiplied by at the end */
    work_team *reducers;
} ctx;

/* What each thread does. Fewer of them reduce than do the rest. Returns how many eigenvalues it did not find. */
static int solve_share(ctx *j, const member *me)
{
    int reducers = team_size(j->reduction.n, REDUCE_ROWS, me->threads);
    if (me->thread < reducers) {
        const member reducer = {j->reducers, me->thread, reducers};
        reduce(&j->reduction, j->back.a, j->back.lda, j->scale, &reducer);
    }
    meet(me);
    if (me->thread == 0) {
        j->exponent += normalize(j->reduction.n, j->reduction.d, j->reduction.e);
    }
    int failed = divide_and_conquer(&j->divide, &j->shared, j->reduction.e, me);
    back_transform(&j->back, me);
    return failed;
}

static ctx make_ctx(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, const workspace *s, int exponent)
{
    int64_t width = n < NARROW_UNDER ? BACK_WIDTH / 2 : BACK_WIDTH;
    return (ctx){
        .reduction = {n, s->padded, s->q, s->ldq, a, lda, s->tau, s->values, s->e, s->vectors},
        .divide = {blas, n, s->q, s->ldq, s->square, s->packed, s->values, s->numbers, s->order, s->indices},
        .back = {blas, n, s->q, s->ldq, s->order, a, lda, s->tau, s->square, s->packed, s->t, s->w, width},
        .scale = (REAL)ldexp(1.0, -exponent),
        .exponent = exponent,
    };
}

static int solve(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, REAL *w, const workspace *s, int exponent)
{
    ctx j = make_ctx(blas, n, a, lda, s, exponent);
    int failed = 0, available = omp_in_parallel() ? 1 : omp_get_max_threads();
    int threads = team_size(n, DIVIDE_ROWS, available < MAX_THREADS ? available : MAX_THREADS);
    if (threads == 1) {
        const member alone = {NULL, 0, 1};
        failed = solve_share(&j, &alone);
    } else {
        work_team everyone = WORK_TEAM_INIT, reducers = WORK_TEAM_INIT;
        j.reducers = &reducers;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
        {
#pragma omp single
            {
                everyone.threads = omp_get_num_threads();
                reducers.threads = team_size(n, REDUCE_ROWS, everyone.threads);
            }
            const member me = {&everyone, omp_get_thread_num(), everyone.threads};
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

/* The symmetric eigensolver for one precision: reduction to tridiagonal form, divide and conquer, back-transformation.
 * Only matrix products come from BLAS; bench/logs/eigh.md has the reasons and the time of each step. Before
 * including, define REAL, REAL_BLAS, REAL_FIELD and the constants that eigh_f32.c explains. */
#include <math.h>
#include <omp.h>
#include <stdbool.h>

#include "backends/cpu/runtime/work_team.h"
#include "eigh.h"

/* Measured in bench/logs/eigh.md. A leaf of divide and conquer has at most LEAF_ORDER rows; times for 9 to 32 are
 * within noise. A block has BACK_WIDTH reflections, half as many for orders below NARROW_UNDER, and is applied to
 * BACK_SLICE columns at a time. The last two are rows per thread in the reduction, where threads synchronize at each
 * column, and elsewhere. */
enum { LEAF_ORDER = 24, BACK_WIDTH = 64, NARROW_UNDER = 192, BACK_SLICE = 256, REDUCE_ROWS = 192, DIVIDE_ROWS = 64 };

/* Orders below which the team has one thread, and the multiplications per product up to which OpenBLAS uses one too. */
enum { SERIAL_UNDER = 2 * DIVIDE_ROWS, SERIAL_PRODUCT = 262144 };

/* The threads of a team are started once per matrix, divide the work by index and synchronize often, between any two
 * columns of the reduction. */

/* One thread of a team. A team of one does not synchronize. */
typedef struct member {
    work_team *team;
    int thread, threads;
} member;

static inline void meet(const member *me)
{
    if (me->threads > 1) {
        team_barrier(me->team);
    }
}

/* This member's part of count things, in whole units. */
static inline void share(const member *me, int64_t count, int64_t unit, int64_t *begin, int64_t *end)
{
    int64_t units = (count + unit - 1) / unit;
    *begin = units * me->thread / me->threads * unit;
    *end = units * (me->thread + 1) / me->threads * unit;
    *begin = *begin < count ? *begin : count;
    *end = *end < count ? *end : count;
}

#include "eigh_divide_body.h"
#include "eigh_back_body.h"
#include "eigh_reduce_body.h"

enum { MAX_THREADS = 64 };

/* Team size, at most `limit`, such that each thread has `rows` of the n rows. */
static int team_size(int64_t n, int64_t rows, int limit)
{
    int64_t threads = n / rows < limit ? n / rows : limit;
    return threads > 1 ? (int)threads : 1;
}

typedef struct workspace {
    int64_t padded, ldq;
    REAL *q;      /* padded columns of length ldq: the matrix being reduced, then the tridiagonal vectors */
    REAL *square; /* n by n: the vectors of a merge, then V of the blocks of reflections */
    REAL *packed; /* n by n: the packed columns of a merge, then V T */
    REAL *vectors, *tau, *t, *w;
    double *values, *e, *numbers;
    int *order, *indices;
} workspace;

/* The stride of q is an odd multiple of a block, so that columns do not map to the same cache lines. */
static int64_t distance_of_columns(int64_t padded)
{
    return padded / BLOCK % 2 == 0 ? padded + BLOCK : padded;
}

/* The next part of the scratch; with scratch NULL parts are only counted. */
static void *take_part(char *scratch, size_t *used, int64_t count, size_t size)
{
    void *part = scratch != NULL ? scratch + *used : NULL;
    *used += ((size_t)count * size + 63) / 64 * 64;
    return part;
}

static workspace lay_out(int64_t n, char *scratch, size_t *used)
{
    int64_t padded = tchi_round_up(n, BLOCK), ldq = distance_of_columns(padded);
    int64_t vectors = VECTORS_PER_THREAD * team_size(n, REDUCE_ROWS, MAX_THREADS) + SHARED_VECTORS;
    workspace s = {.padded = padded, .ldq = ldq};
    *used = 0;
    s.q = take_part(scratch, used, padded * ldq, sizeof(REAL));
    s.square = take_part(scratch, used, n * n, sizeof(REAL));
    s.packed = take_part(scratch, used, n * n, sizeof(REAL));
    s.vectors = take_part(scratch, used, vectors * padded, sizeof(REAL));
    s.tau = take_part(scratch, used, n, sizeof(REAL));
    s.t = take_part(scratch, used, n * BACK_WIDTH, sizeof(REAL));
    s.w = take_part(scratch, used, n * BACK_WIDTH, sizeof(REAL));
    s.values = take_part(scratch, used, n, sizeof(double));
    s.e = take_part(scratch, used, n, sizeof(double));
    s.numbers = take_part(scratch, used, NUMBER_LISTS * 2 * n, sizeof(double));
    s.order = take_part(scratch, used, n, sizeof(int));
    s.indices = take_part(scratch, used, INDEX_LISTS * 2 * n, sizeof(int));
    return s;
}

static size_t eigh_scratch_bytes(int64_t n)
{
    size_t bytes;
    (void)lay_out(n, NULL, &bytes);
    return bytes;
}

/* The largest absolute value in the lower triangle, or NaN if one is not finite. */
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

/* Scales the tridiagonal matrix exactly to entries of at most one and returns the exponent: deflation compares with the
 * norm of the whole. */
static int normalize_tridiagonal(int64_t n, double *d, double *e)
{
    double most = fmax(largest_magnitude(d, n), largest_magnitude(e, n - 1));
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

typedef struct ctx {
    reduction reduction;
    divide divide;
    back back;
    node shared;
    REAL scale;
    int exponent; /* exponent of the final scale of the eigenvalues */
    work_team *reducers;
} ctx;

/* Body of each thread. Fewer threads reduce than run the rest. Returns the number of eigenvalues not found. */
static int solve_share(ctx *j, const member *me)
{
    int reducers = team_size(j->reduction.n, REDUCE_ROWS, me->threads);
    if (me->thread < reducers) {
        const member reducer = {j->reducers, me->thread, reducers};
        reduce_to_tridiagonal(&j->reduction, j->back.a, j->back.lda, j->scale, &reducer);
    }
    meet(me);
    if (me->thread == 0) {
        j->exponent += normalize_tridiagonal(j->reduction.n, j->reduction.d, j->reduction.e);
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

static int run_team(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, REAL *w, const workspace *s, int exponent)
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

/* The matrix is scaled exactly to a largest entry between one half and one, so that squares do not overflow and
 * underflow is negligible. At the ends of the range the scale stays a normal number. */
static int solve_eigh(const tchi_blas *blas, int64_t n, void *a_data, int64_t lda, void *w_data, void *scratch)
{
    REAL *a = a_data, *w = w_data;
    size_t used;
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
    workspace s = lay_out(n, scratch, &used);
    return run_team(&blas->REAL_FIELD, n, a, lda, w, &s, exponent);
}

/* The symmetric eigensolver, written once for the two precisions: reduce to tridiagonal form, divide and conquer,
 * transform back. Only matrix products are borrowed; why, and what each step reached, is in bench/ladder/eigh.md.
 * Before including, define REAL, REAL_BLAS, ROUND_OFF, SMALLEST_SQUARES, LEAF_TOLERANCE and SECULAR_TOLERANCE. */
#include <math.h>
#include <omp.h>
#include <stdbool.h>

#include "eigh.h"

/* Orders up to this are leaves of divide and conquer. */
#ifndef LEAF_ORDER
#define LEAF_ORDER 24
#endif
/* Reflections gathered into one block, and columns taken through all blocks at once. */
#ifndef BACK_WIDTH
#define BACK_WIDTH 64
#endif
#ifndef NARROW_UNDER
#define NARROW_UNDER 192
#endif
#ifndef BACK_SLICE
#define BACK_SLICE 256
#endif
/* Rows of the matrix for each thread: with fewer the threads wait for each other longer than they work. */
#ifndef REDUCE_ROWS
#define REDUCE_ROWS 192
#endif
#ifndef DIVIDE_ROWS
#define DIVIDE_ROWS 64
#endif

#include "eigh_back_body.h"
#include "eigh_divide_body.h"
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
static REAL largest_entry(int64_t n, const REAL *a, int64_t lda)
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

static int solve(const REAL_BLAS *blas, int64_t n, REAL *a, int64_t lda, REAL *w, const workspace *s, int exponent)
{
    int available = omp_in_parallel() ? 1 : omp_get_max_threads();
    available = available < MAX_THREADS ? available : MAX_THREADS;
    int threads = team_size(n, DIVIDE_ROWS, available);
    reduction r = {n, s->padded, s->q, s->ldq, a, lda, s->tau, s->values, s->e, s->vectors};
    reduce(&r, a, lda, (REAL)ldexp(1.0, -exponent), team_size(n, REDUCE_ROWS, available));
    exponent += normalise(n, s->values, s->e);
    divide t = {blas, n, s->q, s->ldq, s->square, s->packed, s->values, s->numbers, s->order, s->indices};
    int failed = divide_and_conquer(&t, s->e, threads);
    if (failed != 0) {
        return failed;
    }
    back b = {blas,
              n,
              s->q,
              s->ldq,
              s->order,
              a,
              lda,
              s->tau,
              s->square,
              s->packed,
              s->t,
              s->w,
              n < NARROW_UNDER ? BACK_WIDTH / 2 : BACK_WIDTH};
    back_transform(&b, threads);
    for (int64_t i = 0; i < n; i++) {
        w[i] = (REAL)ldexp(s->values[s->order[i]], exponent);
    }
    return 0;
}

/* The matrix is worked on with its largest entry between one half and one, by an exact scaling, so that no square can
 * overflow and what underflows is negligible. */
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
    workspace s = lay_out(n, scratch);
    return solve(blas, n, a, lda, w, &s, exponent);
}

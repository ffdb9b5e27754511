/* Body of parallel_blas_f32.c and parallel_blas_f64.c, which define REAL, REAL_BLAS and REAL_FIELD. Each thread
 * computes a rectangle of the result with edges at multiples of GRAIN, so that BLAS's tiles of 4 to 24 rows are mostly
 * full. */
#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <string.h>

#include "core/arith.h"

#include "parallel_blas.h"

enum {
    GRAIN = 16,
    PANEL = 128,     /* columns that a Cholesky factorization finishes before it updates the rest */
    TRTRI_COLS = 64, /* columns of a triangular inverse per task, while there are enough for all threads */
};

/* Columns, or rows, of a lower triangle per call to gemm: narrow strips waste fewer products above the diagonal, wide
 * ones run BLAS faster. Measured in float32 on two cores, widths 32 to 512: this one is within 5 % of the best at every
 * n from 256 to 2048. */
#define STRIP 192

/* Below this many operations one call on one thread is faster; about 100 by 100 by 100. */
#define WORTH_DIVIDING 2e6

static int64_t round_to_grain(double x)
{
    return (int64_t)(x / GRAIN + 0.5) * GRAIN;
}

/* Number of parts to divide a call into; 1 for a single call. */
static int parts_for(const tchi_cpu_state *state, double work)
{
    const int divides_itself = state->blas->threading == TCHI_BLAS_OPENMP;
    return divides_itself || omp_in_parallel() || work < WORTH_DIVIDING ? 1 : state->threads;
}

static const REAL_BLAS *blas_of(const tchi_cpu_state *state)
{
    return &state->blas->REAL_FIELD;
}

/* --- general products ------------------------------------------------------------------------------------------- */

typedef struct product {
    const REAL_BLAS *blas;
    int trans_a, trans_b;
    int64_t m, n, k;
    REAL alpha, beta;
    const REAL *a, *b;
    REAL *c;
    int64_t lda, ldb, ldc;
    int64_t down, across; /* parts */
} product;

/* Rows [row, row + m) and columns [col, col + n) of the result. */
static void product_part(const product *p, int64_t row, int64_t m, int64_t col, int64_t n)
{
    const REAL *a = p->a + row * (p->trans_a == TCHI_TRANS ? 1 : p->lda);
    const REAL *b = p->b + col * (p->trans_b == TCHI_TRANS ? p->ldb : 1);
    if (m > 0 && n > 0) {
        p->blas->gemm(TCHI_ROW_MAJOR, p->trans_a, p->trans_b, (int)m, (int)n, (int)p->k, p->alpha, a, (int)p->lda, b,
                      (int)p->ldb, p->beta, p->c + row * p->ldc + col, (int)p->ldc);
    }
}

/* Start of part `i` of `count`. */
static int64_t part_edge(int64_t n, int64_t i, int64_t count)
{
    return i == count ? n : tchi_min(round_to_grain((double)n * (double)i / (double)count), n);
}

static void product_parts(void *argument, int64_t from, int64_t to)
{
    const product *p = argument;
    for (int64_t i = from; i < to; i++) {
        int64_t down = i / p->across;
        int64_t across = i % p->across;
        int64_t row = part_edge(p->m, down, p->down);
        int64_t col = part_edge(p->n, across, p->across);
        product_part(p, row, part_edge(p->m, down + 1, p->down) - row, col,
                     part_edge(p->n, across + 1, p->across) - col);
    }
}

/* The grid whose parts are closest to squares: every part reads its rows of A and its columns of B. */
static void choose_grid(product *p, int64_t parts)
{
    double least = INFINITY;
    for (int64_t down = 1; down <= parts; down++) {
        double sides = (double)p->m / (double)down + (double)p->n * (double)down / (double)parts;
        if (parts % down == 0 && sides < least) {
            least = sides;
            p->down = down;
            p->across = parts / down;
        }
    }
}

static void divide_gemm(const tchi_cpu_state *state, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                        double alpha, const void *a, int64_t lda, const void *b, int64_t ldb, double beta, void *c,
                        int64_t ldc)
{
    product p = {blas_of(state), trans_a, trans_b, m, n, k, (REAL)alpha, (REAL)beta, a, b, c, lda, ldb, ldc, 1, 1};
    double work = 2.0 * (double)m * (double)n * (double)k;
    choose_grid(&p, parts_for(state, work));
    if (p.down * p.across == 1) {
        product_part(&p, 0, m, 0, n);
    } else {
        tchi_cpu_split(state, p.down * p.across, work, product_parts, &p);
    }
}

/* --- the lower triangle ----------------------------------------------------------------------------------------- */

/* Bands of rows with equal numbers of elements: the first i of them hold i / count of the triangle. */
static int64_t band_edge(int64_t n, int64_t i, int64_t count)
{
    return i == count ? n : tchi_min(round_to_grain((double)n * sqrt((double)i / (double)count)), n);
}

typedef struct triangle {
    product product; /* op(A) op(A)', or A B */
    int64_t bands;
} triangle;

static void syrk_rows(const product *p, int64_t row, int64_t rows)
{
    const REAL *a = p->a + row * (p->trans_a == TCHI_TRANS ? 1 : p->lda);
    product_part(p, row, rows, 0, row);
    if (rows > 0) {
        p->blas->syrk(TCHI_ROW_MAJOR, TCHI_LOWER, p->trans_a, (int)rows, (int)p->k, p->alpha, a, (int)p->lda, p->beta,
                      p->c + row * p->ldc + row, (int)p->ldc);
    }
}

static void syrk_bands(void *argument, int64_t from, int64_t to)
{
    const triangle *t = argument;
    for (int64_t i = from; i < to; i++) {
        int64_t row = band_edge(t->product.n, i, t->bands);
        syrk_rows(&t->product, row, band_edge(t->product.n, i + 1, t->bands) - row);
    }
}

static void divide_syrk(const tchi_cpu_state *state, int trans, int64_t n, int64_t k, double alpha, const void *a,
                        int64_t lda, double beta, void *c, int64_t ldc)
{
    int other = trans == TCHI_TRANS ? TCHI_NO_TRANS : TCHI_TRANS;
    double work = (double)n * (double)n * (double)k;
    triangle t = {{blas_of(state), trans, other, n, n, k, (REAL)alpha, (REAL)beta, a, a, c, lda, lda, ldc, 1, 1},
                  parts_for(state, work)};
    if (t.bands == 1) {
        syrk_rows(&t.product, 0, n);
    } else {
        tchi_cpu_split(state, t.bands, work, syrk_bands, &t);
    }
}

static void symm_bands(void *argument, int64_t from, int64_t to)
{
    const triangle *t = argument;
    int64_t last = band_edge(t->product.n, to, t->bands);
    for (int64_t row = band_edge(t->product.n, from, t->bands); row < last; row += STRIP) {
        int64_t rows = tchi_min(last - row, STRIP);
        product_part(&t->product, row, rows, 0, row + rows);
    }
}

static void divide_symm(const tchi_cpu_state *state, int64_t n, const void *a, int64_t lda, const void *b, int64_t ldb,
                        void *c, int64_t ldc)
{
    double work = (double)n * (double)n * (double)n;
    triangle t = {{blas_of(state), TCHI_NO_TRANS, TCHI_NO_TRANS, n, n, n, 1, 0, a, b, c, lda, ldb, ldc, 1, 1},
                  parts_for(state, work)};
    if (t.bands == 1) {
        for (int64_t from = 0; from < n; from += STRIP) {
            product_part(&t.product, from, n - from, from, tchi_min(STRIP, n - from));
        }
    } else {
        tchi_cpu_split(state, t.bands, work, symm_bands, &t);
    }
}

/* --- triangular solves ------------------------------------------------------------------------------------------ */

typedef struct solve {
    const REAL_BLAS *blas;
    int side, trans;
    int64_t n; /* of the triangle */
    const REAL *l;
    REAL *b;
    int64_t ldl, ldb;
    int64_t vectors, parts; /* columns of B, or rows with the triangle on the right */
} solve;

static void solve_vectors(const solve *s, int64_t from, int64_t count)
{
    int left = s->side == TCHI_LEFT;
    if (count > 0) {
        s->blas->trsm(TCHI_ROW_MAJOR, s->side, TCHI_LOWER, s->trans, TCHI_NON_UNIT, (int)(left ? s->n : count),
                      (int)(left ? count : s->n), 1, s->l, (int)s->ldl, s->b + from * (left ? 1 : s->ldb), (int)s->ldb);
    }
}

static void solve_parts(void *argument, int64_t from, int64_t to)
{
    const solve *s = argument;
    int64_t first = part_edge(s->vectors, from, s->parts);
    solve_vectors(s, first, part_edge(s->vectors, to, s->parts) - first);
}

static void solve_all(const tchi_cpu_state *state, solve *s)
{
    double work = (double)s->n * (double)s->n * (double)s->vectors;
    s->parts = parts_for(state, work);
    if (s->parts == 1) {
        solve_vectors(s, 0, s->vectors);
    } else {
        tchi_cpu_split(state, s->parts, work, solve_parts, s);
    }
}

static void divide_trsm(const tchi_cpu_state *state, int trans, int64_t n, int64_t columns, const void *l, int64_t ldl,
                        void *b, int64_t ldb)
{
    solve s = {blas_of(state), TCHI_LEFT, trans, n, l, b, ldl, ldb, columns, 1};
    solve_all(state, &s);
}

/* --- Cholesky factors ------------------------------------------------------------------------------------------- */

/* Row-major lower is Fortran's upper. */
static int potrf_whole(const tchi_cpu_state *state, int64_t n, REAL *a, int64_t lda)
{
    int order = (int)n, leading = (int)lda, info = 0;
    blas_of(state)->potrf("U", &order, a, &leading, &info, 1);
    return info;
}

/* Right-looking, panel by panel: diagonal block, panel below it, trailing update. */
static int divide_potrf(const tchi_cpu_state *state, int64_t n, void *data, int64_t lda)
{
    REAL *a = data;
    if (n <= 2 * PANEL || parts_for(state, (double)n * (double)n * (double)n / 3.0) == 1) {
        return potrf_whole(state, n, a, lda);
    }
    for (int64_t j = 0; j < n; j += PANEL) {
        int64_t width = tchi_min(PANEL, n - j);
        int64_t rest = n - j - width;
        REAL *square = a + j * lda + j;
        REAL *below = square + width * lda;
        int info = potrf_whole(state, width, square, lda);
        if (info != 0) {
            return (int)j + info;
        }
        solve s = {blas_of(state), TCHI_RIGHT, TCHI_TRANS, width, square, below, lda, lda, rest, 1};
        solve_all(state, &s);
        if (rest > 0) {
            divide_syrk(state, TCHI_NO_TRANS, rest, width, -1, below, lda, 1, below + width, lda);
        }
    }
    return 0;
}

typedef struct inverse {
    const tchi_cpu_state *state;
    int64_t n;
    const REAL *l;
    REAL *x;
    int64_t ldl, ldx;
    int64_t width;
    atomic_llong next;
} inverse;

/* Columns [col, col + width) of the inverse, from the diagonal down. */
static void inverse_columns(const inverse *v, int64_t col, int64_t width)
{
    REAL *x = v->x + col * v->ldx + col;
    solve s = {blas_of(v->state),
               TCHI_LEFT,
               TCHI_NO_TRANS,
               v->n - col,
               v->l + col * v->ldl + col,
               x,
               v->ldl,
               v->ldx,
               width,
               1};
    for (int64_t i = 0; i < s.n; i++) {
        memset(x + i * v->ldx, 0, (size_t)width * sizeof *x);
        if (i < width) {
            x[i * v->ldx + i] = 1;
        }
    }
    solve_vectors(&s, 0, width);
}

/* Longest columns first, so that late threads get the short ones. */
static void invert_columns(void *argument, int64_t from, int64_t to)
{
    inverse *v = argument;
    int64_t col;
    while ((col = atomic_fetch_add(&v->next, 1) * v->width) < v->n) {
        inverse_columns(v, col, tchi_min(v->width, v->n - col));
    }
}

static int divide_trtri(const tchi_cpu_state *state, int64_t n, const void *l, int64_t ldl, void *x, int64_t ldx)
{
    double work = (double)n * (double)n * (double)n / 3.0;
    int parts = parts_for(state, work);
    if (parts == 1) {
        int order = (int)n, leading = (int)ldx, info = 0;
        blas_of(state)->trtri("U", "N", &order, x, &leading, &info, 1, 1);
        return info;
    }
    inverse v = {.state = state, .n = n, .l = l, .x = x, .ldl = ldl, .ldx = ldx};
    v.width = tchi_min(TRTRI_COLS, (n / (4 * parts) / GRAIN + 1) * GRAIN);
    atomic_init(&v.next, 0);
    tchi_cpu_split(state, parts, work, invert_columns, &v);
    return 0;
}

#define PARALLEL_BLAS_TABLE                                                                                            \
    {                                                                                                                  \
        .gemm = divide_gemm, .syrk = divide_syrk, .symm = divide_symm, .potrf = divide_potrf, .trsm = divide_trsm,     \
        .trtri = divide_trtri,                                                                                         \
    }

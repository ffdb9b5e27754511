/* Back-transformation: multiplies the eigenvectors of the tridiagonal matrix by the reflections, last first.
 * Reflections are blocked as I - V T VT, so that the work is matrix products; columns of the result are independent,
 * and each thread takes a slice of them through all blocks. */
#include <stdint.h>
#include <string.h>

#include "backends/cpu/runtime/blas/blas.h"
#include "backends/cpu/runtime/vector_clones.h"

typedef struct back {
    const REAL_BLAS *blas;
    int64_t n;
    const REAL *q; /* the tridiagonal matrix's vectors, and their output order */
    int64_t ldq;
    const int *order;
    REAL *a; /* holds the reflectors, as eigh_reduce_body.h leaves them; receives the result */
    int64_t lda;
    const REAL *tau;
    REAL *v, *vt;  /* n by n each: V and V T of the block of reflectors that begins at j, from column j on */
    REAL *t, *w;   /* n * BACK_WIDTH each */
    int64_t width; /* reflections in a block, at most BACK_WIDTH */
} back;

static int64_t block_width(const back *b, int64_t first)
{
    return first + b->width < b->n - 1 ? b->width : b->n - 1 - first;
}

/* T is upper triangular; column i is -tau_i T VT v_i above tau_i on the diagonal. Given G = VT V in t, it is written
 * over it, column by column. */
VECTOR_CLONES static void form_triangle(const REAL *tau, int64_t width, REAL *t)
{
    REAL column[BACK_WIDTH];
    for (int64_t i = 0; i < width; i++) {
        REAL *restrict ti = t + i * width;
        for (int64_t k = 0; k < i; k++) {
            column[k] = 0;
        }
        for (int64_t k = 0; k < i; k++) {
            const REAL *restrict tk = t + k * width;
            REAL g = -tau[i] * ti[k];
#pragma omp simd
            for (int64_t l = 0; l <= k; l++) {
                column[l] += g * tk[l];
            }
        }
        for (int64_t k = 0; k < width; k++) {
            ti[k] = k < i ? column[k] : (REAL)0;
        }
        ti[i] = tau[i];
    }
}

/* V and V T of the block of reflectors that begins at column first; both have the rows from first + 1 on. */
static void form_block(const back *b, int64_t first)
{
    int64_t rows = b->n - 1 - first, width = block_width(b, first);
    REAL *v = b->v + first * b->n, *vt = b->vt + first * b->n, *t = b->t + first * b->width;
    for (int64_t j = 0; j < width; j++) {
        memset(v + j * rows, 0, (size_t)j * sizeof *v);
        memcpy(v + j * rows + j, b->a + (first + j) * b->lda + first + j + 1, (size_t)(rows - j) * sizeof *v);
    }
    b->blas->gemm(TCHI_COL_MAJOR, TCHI_TRANS, TCHI_NO_TRANS, (int)width, (int)width, (int)rows, 1, v, (int)rows, v,
                  (int)rows, 0, t, (int)width);
    form_triangle(b->tau + first, width, t);
    b->blas->gemm(TCHI_COL_MAJOR, TCHI_NO_TRANS, TCHI_NO_TRANS, (int)rows, (int)width, (int)width, 1, v, (int)rows, t,
                  (int)width, 0, vt, (int)rows);
}

/* Columns begin to end - 1 of the result. */
static void transform_slice(const back *b, int64_t begin, int64_t end)
{
    int columns = (int)(end - begin);
    REAL *w = b->w + begin * b->width;
    for (int64_t j = begin; j < end; j++) {
        memcpy(b->a + j * b->lda, b->q + b->order[j] * b->ldq, (size_t)b->n * sizeof *b->a);
    }
    for (int64_t first = (b->n - 2) / b->width * b->width; first >= 0; first -= b->width) {
        int rows = (int)(b->n - 1 - first), width = (int)block_width(b, first);
        const REAL *v = b->v + first * b->n, *vt = b->vt + first * b->n;
        REAL *c = b->a + begin * b->lda + first + 1;
        b->blas->gemm(TCHI_COL_MAJOR, TCHI_TRANS, TCHI_NO_TRANS, width, columns, rows, 1, v, rows, c, (int)b->lda, 0, w,
                      width);
        b->blas->gemm(TCHI_COL_MAJOR, TCHI_NO_TRANS, TCHI_NO_TRANS, rows, columns, width, -1, vt, rows, w, width, 1, c,
                      (int)b->lda);
    }
}

/* One member's part. */
static void back_transform(const back *b, const member *me)
{
    int64_t blocks = (b->n - 2) / b->width + 1, slice = product_columns(b->n, b->n, b->width), begin, end;
    slice = slice < BACK_SLICE ? slice : BACK_SLICE;
    for (int64_t i = me->thread; i < blocks; i += me->threads) {
        form_block(b, i * b->width);
    }
    meet(me);
    share(me, b->n, 4, &begin, &end);
    for (int64_t first = begin; first < end; first += slice) {
        transform_slice(b, first, first + slice < end ? first + slice : end);
    }
}

/* Reduces a symmetric matrix to tridiagonal form by Householder reflections, H_j = I - tau_j v_j v_jT. Updating by one
 * reflection and multiplying by the next one's vector is a single pass over the triangle, so each number is read and
 * written once per column; threads synchronize once per column. Every thread keeps local copies of the vectors,
 * computed redundantly in the same order and therefore bitwise identical. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "backends/cpu/runtime/vector_clones.h"
#include "core/arith.h"

/* Threads own blocks of columns. Diagonal blocks are stored in full, and rows and columns are padded with zeros to
 * whole blocks, so that all loops have whole vectors. */
enum { BLOCK = 16 };

/* Every thread has four vectors of its local and two partial products; two more are shared. */
enum { VECTORS_PER_THREAD = 6, SHARED_VECTORS = 2 };

typedef struct reduction {
    int64_t n, padded;
    REAL *m; /* the matrix, scaled: columns of length ldm, from the top of their diagonal block down */
    int64_t ldm;
    REAL *reflectors; /* column j, from row j + 1 on, receives v_j, whose first number is 1 */
    int64_t ld;
    REAL *tau;
    double *d, *e;
    REAL *vectors; /* (VECTORS_PER_THREAD * threads + SHARED_VECTORS) * padded */
} reduction;

/* Blocks are assigned to threads back and forth, 0 1 1 0 0 1 1 0, since columns get shorter. */
VECTOR_INLINE int owner(int64_t block, int threads)
{
    int turn = (int)(block % (2 * threads));
    return turn < threads ? turn : 2 * threads - 1 - turn;
}

/* Copies column j of the lower triangle of a, times scale, from the top of its diagonal block down. The part above the
 * diagonal comes from earlier columns. */
VECTOR_INLINE void load_column(const reduction *r, const REAL *a, int64_t lda, REAL scale, int64_t j)
{
    REAL *restrict column = r->m + j * r->ldm;
    const REAL *restrict source = a + j * lda;
    int64_t filled = j < r->n ? r->n : j;
    for (int64_t i = j / BLOCK * BLOCK; i < j; i++) {
        column[i] = r->m[i * r->ldm + j];
    }
#pragma omp simd
    for (int64_t i = j; i < filled; i++) {
        column[i] = scale * source[i];
    }
    memset(column + filled, 0, (size_t)(r->padded - filled) * sizeof *column);
}

/* A member loads the blocks it owns. */
VECTOR_INLINE void load_blocks(const reduction *r, const REAL *a, int64_t lda, REAL scale, const member *me)
{
    for (int64_t j = 0; j < r->padded; j++) {
        if (owner(j / BLOCK, me->threads) == me->thread) {
            load_column(r, a, lda, scale, j);
        }
    }
}

/* The pending update of the stored matrix: M - v wT - w vT. */
typedef struct pass {
    const REAL *old_v, *old_w; /* the pending update */
    const REAL *v;             /* the vector to multiply by */
    REAL *y;                   /* accumulates the product */
} pass;

/* Updates rows begin to end - 1 of four columns and adds their product to y. */
VECTOR_INLINE void pass_square(const pass *p, REAL *m, int64_t ldm, int64_t column, int64_t begin, int64_t end)
{
    const REAL *restrict old_v = p->old_v, *restrict old_w = p->old_w;
    REAL *restrict y = p->y;
    for (int64_t q = column; q < column + 4; q++) {
        REAL *restrict a = m + q * ldm;
        REAL vq = old_v[q], wq = old_w[q], x = p->v[q];
#pragma omp simd
        for (int64_t i = begin; i < end; i++) {
            REAL t = a[i] - old_v[i] * wq - old_w[i] * vq;
            a[i] = t;
            y[i] += t * x;
        }
    }
}

/* The same below the diagonal, where each number counts for its mirror image too. */
VECTOR_INLINE void pass_columns(const pass *p, REAL *m, int64_t ldm, int64_t column, int64_t begin, int64_t end)
{
    const REAL *restrict old_v = p->old_v, *restrict old_w = p->old_w, *restrict v = p->v;
    REAL *restrict y = p->y;
    REAL *restrict a0 = m + column * ldm, *restrict a1 = a0 + ldm, *restrict a2 = a1 + ldm, *restrict a3 = a2 + ldm;
    const REAL v0 = old_v[column], v1 = old_v[column + 1], v2 = old_v[column + 2], v3 = old_v[column + 3];
    const REAL w0 = old_w[column], w1 = old_w[column + 1], w2 = old_w[column + 2], w3 = old_w[column + 3];
    const REAL x0 = v[column], x1 = v[column + 1], x2 = v[column + 2], x3 = v[column + 3];
    REAL s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = begin; i < end; i++) {
        REAL ov = old_v[i], ow = old_w[i], x = v[i];
        REAL t0 = a0[i] - ov * w0 - ow * v0, t1 = a1[i] - ov * w1 - ow * v1;
        REAL t2 = a2[i] - ov * w2 - ow * v2, t3 = a3[i] - ov * w3 - ow * v3;
        a0[i] = t0;
        a1[i] = t1;
        a2[i] = t2;
        a3[i] = t3;
        s0 += t0 * x;
        s1 += t1 * x;
        s2 += t2 * x;
        s3 += t3 * x;
        y[i] += (t0 * x0 + t1 * x1) + (t2 * x2 + t3 * x3);
    }
    y[column] += s0;
    y[column + 1] += s1;
    y[column + 2] += s2;
    y[column + 3] += s3;
}

/* One thread's share of the pass over the columns from first on. */
VECTOR_INLINE void pass_blocks(const reduction *r, const pass *p, int64_t first, int thread, int threads)
{
    for (int64_t block = first / BLOCK; block * BLOCK < r->padded; block++) {
        if (owner(block, threads) != thread) {
            continue;
        }
        int64_t top = block * BLOCK, below = top + BLOCK;
        for (int64_t column = first > top ? first / 4 * 4 : top; column < below; column += 4) {
            pass_square(p, r->m, r->ldm, column, top, below);
            pass_columns(p, r->m, r->ldm, column, below, r->padded);
        }
    }
}

/* Overwrites v, whose entries up to j count as zero, by the vector that reflects it onto entry j + 1; returns tau and
 * sets *beta to the remaining entry. A tail too small to square safely is negligible for a matrix of norm one. */
VECTOR_INLINE REAL make_reflector(REAL *restrict v, int64_t j, int64_t padded, REAL *beta)
{
    REAL alpha = v[j + 1], squares = 0;
    int64_t start = j / BLOCK * BLOCK;
    for (int64_t i = start; i <= j + 1; i++) {
        v[i] = 0;
    }
#pragma omp simd reduction(+ : squares)
    for (int64_t i = start; i < padded; i++) {
        squares += v[i] * v[i];
    }
    *beta = alpha;
    REAL tau = 0, scale = 0;
    if (squares > SMALLEST_SQUARES) {
        REAL norm = (REAL)sqrt((double)alpha * (double)alpha + (double)squares);
        *beta = alpha > 0 ? -norm : norm;
        tau = (*beta - alpha) / *beta;
        scale = 1 / (alpha - *beta);
    }
#pragma omp simd
    for (int64_t i = start; i < padded; i++) {
        v[i] *= scale;
    }
    v[j + 1] = 1;
    return tau;
}

/* w = tau (y - tau/2 (yTv) v), y being the sum of the threads' partial products: then H M H = M - v wT - w vT. */
VECTOR_INLINE void finish_product(const REAL *partials, int threads, int64_t padded, const REAL *restrict v, REAL tau,
                                  int64_t j, REAL *restrict w)
{
    int64_t start = j / BLOCK * BLOCK;
    memcpy(w + start, partials + start, (size_t)(padded - start) * sizeof *w);
    for (int t = 1; t < threads; t++) {
        const REAL *restrict y = partials + t * padded;
#pragma omp simd
        for (int64_t i = start; i < padded; i++) {
            w[i] += y[i];
        }
    }
    for (int64_t i = start; i <= j; i++) {
        w[i] = 0;
    }
    REAL dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = start; i < padded; i++) {
        dot += w[i] * v[i];
    }
    REAL half = (REAL)0.5 * tau * dot;
#pragma omp simd
    for (int64_t i = start; i < padded; i++) {
        w[i] = tau * (w[i] - half * v[i]);
    }
}

/* The next column, with the last reflection applied. */
VECTOR_INLINE void next_column(const REAL *restrict front, const REAL *restrict old_v, const REAL *restrict old_w,
                               int64_t j, int64_t padded, REAL *restrict v)
{
    REAL vj = old_v[j], wj = old_w[j];
#pragma omp simd
    for (int64_t i = j / BLOCK * BLOCK; i < padded; i++) {
        v[i] = front[i] - old_v[i] * wj - old_w[i] * vj;
    }
}

/* The owner of the next column to be reduced copies it out for everyone. */
VECTOR_INLINE void publish_column(const reduction *r, int64_t j, int thread, int threads, REAL *front)
{
    int64_t start = j / BLOCK * BLOCK;
    if (owner(j / BLOCK, threads) == thread) {
        memcpy(front + start, r->m + j * r->ldm + start, (size_t)(r->padded - start) * sizeof *front);
    }
}

VECTOR_INLINE void record_reflector(const reduction *r, int64_t j, const REAL *v, REAL diagonal, REAL beta, REAL tau)
{
    memcpy(r->reflectors + j * r->ld + j + 1, v + j + 1, (size_t)(r->n - j - 1) * sizeof *v);
    r->d[j] = (double)diagonal;
    r->e[j] = (double)beta;
    r->tau[j] = tau;
}

/* One thread's share. Reads the lower triangle of a and overwrites it with the reflectors (r->reflectors may be a).
 * Partial products and the published column are double-buffered, so that one barrier per column suffices. */
VECTOR_CLONES static void reduce_to_tridiagonal(const reduction *r, const REAL *a, int64_t lda, REAL scale,
                                                const member *me)
{
    int thread = me->thread, threads = me->threads;
    int64_t n = r->n, padded = r->padded;
    REAL *fronts = r->vectors, *partials = fronts + SHARED_VECTORS * padded;
    REAL *local = partials + 2 * threads * padded + 4 * thread * padded;
    REAL *v = local, *old_v = local + padded, *w = local + 2 * padded, *old_w = local + 3 * padded;
    memset(local, 0, 4 * (size_t)padded * sizeof *local);
    load_blocks(r, a, lda, scale, me);
    meet(me);
    publish_column(r, 0, thread, threads, fronts);
    meet(me);
    for (int64_t j = 0; j < n; j++) {
        REAL *front = fronts + (j & 1) * padded, *next_front = fronts + (~j & 1) * padded;
        REAL *products = partials + (j & 1) * threads * padded;
        next_column(front, old_v, old_w, j, padded, v);
        REAL diagonal = v[j], beta = 0, tau = 0;
        if (j + 1 == n) {
            if (thread == 0) {
                r->d[j] = (double)diagonal;
            }
            break;
        }
        tau = make_reflector(v, j, padded, &beta);
        if (thread == 0) {
            record_reflector(r, j, v, diagonal, beta, tau);
        }
        old_v[j] = 0;
        old_w[j] = 0;
        pass p = {old_v, old_w, v, products + thread * padded};
        memset(p.y + j / BLOCK * BLOCK, 0, (size_t)(padded - j / BLOCK * BLOCK) * sizeof *p.y);
        pass_blocks(r, &p, j + 1, thread, threads);
        publish_column(r, j + 1, thread, threads, next_front);
        meet(me);
        finish_product(products, threads, padded, v, tau, j, w);
        REAL *swap = old_v;
        old_v = v;
        v = swap;
        swap = old_w;
        old_w = w;
        w = swap;
    }
}

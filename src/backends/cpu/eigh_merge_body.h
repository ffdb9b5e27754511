/* One merge of Cuppen's divide and conquer: from the eigenvectors of the two halves of a tridiagonal matrix to those of
 * the whole, which is diag(d) + rho z zT in their basis. Deflation first takes out what is already an eigenvector to
 * working precision; the rest costs one product with the small matrix of vectors that eigh_secular.h leads to. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "eigh_secular.h"
#include "eigh_team.h"
#include "vector_clones.h"

/* Which rows of an eigenvector can be other than zero. */
enum { TOP, BOTH, BOTTOM };

/* All nodes of one level share these arrays: a node that begins at row r uses the matrices from column r on and the
 * others from 2 r on, since some of its lists have one number more than the node has rows. */
typedef struct divide {
    const REAL_BLAS *blas;
    int64_t n;
    REAL *q; /* block diagonal: the eigenvectors of the nodes of the present level */
    int64_t ldq;
    REAL *s, *packed; /* n by n each */
    double *values;   /* n: the eigenvalue of each column of q, in the order of the columns */
    double *numbers;  /* NUMBER_LISTS * 2 n */
    int *order;       /* n: within each node, its columns by ascending eigenvalue, counted from its first */
    int *indices;     /* INDEX_LISTS * 2 n */
} divide;

enum { NUMBER_LISTS = 7, INDEX_LISTS = 5 };

typedef struct node {
    int64_t begin, top, bottom, size; /* first row, rows of the two halves, their sum */
    REAL *q, *s, *packed;
    double *values, *z, *pole, *weight, *origin, *offset, *new_z, *grouped;
    int *order, *sorted, *kept, *dropped, *group, *support;
    int64_t kept_count, dropped_count;
    int64_t count[3]; /* kept columns by support */
    double rho;
    tchi_secular secular;
} node;

static node node_at(const divide *t, int64_t begin, int64_t middle, int64_t end)
{
    int64_t n = t->n, list = 2 * n;
    double *numbers = t->numbers + 2 * begin;
    int *indices = t->indices + 2 * begin;
    node p = {.begin = begin, .top = middle - begin, .bottom = end - middle, .size = end - begin};
    p.q = t->q + begin * t->ldq + begin;
    p.s = t->s + begin * n;
    p.packed = t->packed + begin * n;
    p.values = t->values + begin;
    p.order = t->order + begin;
    p.z = numbers;
    p.pole = numbers + list;
    p.weight = numbers + 2 * list;
    p.origin = numbers + 3 * list;
    p.offset = numbers + 4 * list;
    p.new_z = numbers + 5 * list;
    p.grouped = numbers + 6 * list;
    p.sorted = indices;
    p.kept = indices + list;
    p.dropped = indices + 2 * list;
    p.group = indices + 3 * list;
    p.support = indices + 4 * list;
    return p;
}

/* Merges two ascending lists of columns (by value) into one. */
static void merge_lists(const double *values, const int *x, int64_t nx, const int *y, int64_t ny, int *out)
{
    int64_t i = 0, j = 0;
    while (i < nx || j < ny) {
        bool take_x = j == ny || (i < nx && values[x[i]] <= values[y[j]]);
        out[i + j] = take_x ? x[i] : y[j];
        if (take_x) {
            i++;
        } else {
            j++;
        }
    }
}

/* z is the last row of the upper half's vectors and the first of the lower half's, with length 1. */
static void form_z(const divide *t, node *p, double coupling)
{
    double up = sqrt(0.5), down = coupling < 0.0 ? -up : up;
    for (int64_t j = 0; j < p->top; j++) {
        p->z[j] = up * (double)p->q[j * t->ldq + p->top - 1];
    }
    for (int64_t j = p->top; j < p->size; j++) {
        p->z[j] = down * (double)p->q[j * t->ldq + p->top];
    }
    p->rho = 2.0 * fabs(coupling);
}

static void sort_columns(node *p)
{
    for (int64_t j = p->top; j < p->size; j++) {
        p->order[j] += (int)p->top;
    }
    merge_lists(p->values, p->order, p->top, p->order + p->top, p->bottom, p->sorted);
}

static double largest(const double *x, int64_t n)
{
    double most = 0.0;
    for (int64_t i = 0; i < n; i++) {
        most = fmax(most, fabs(x[i]));
    }
    return most;
}

/* A deflated column joins the list at its place; it nearly always is the last. */
static void drop(node *p, int column)
{
    int64_t i = p->dropped_count++;
    for (; i > 0 && p->values[p->dropped[i - 1]] > p->values[column]; i--) {
        p->dropped[i] = p->dropped[i - 1];
    }
    p->dropped[i] = column;
}

static void rotate_columns(const divide *t, node *p, int x, int y, REAL c, REAL s)
{
    REAL *restrict qx = p->q + x * t->ldq, *restrict qy = p->q + y * t->ldq;
#pragma omp simd
    for (int64_t i = 0; i < p->size; i++) {
        REAL old = qx[i];
        qx[i] = c * old + s * qy[i];
        qy[i] = c * qy[i] - s * old;
    }
}

/* Two neighbours with nearly equal eigenvalues: a rotation moves all of z's weight to the later one. It is an
 * eigenvector then, to the tolerance, and goes; returns false when the error would be larger. */
static bool merge_close_pair(const divide *t, node *p, int x, int y, double tolerance)
{
    double r = hypot(p->z[x], p->z[y]), c = p->z[y] / r, s = -p->z[x] / r;
    double dx = p->values[x], dy = p->values[y];
    if (fabs((dy - dx) * c * s) > tolerance) {
        return false;
    }
    p->z[y] = r;
    p->z[x] = 0.0;
    p->support[y] = p->support[x] == p->support[y] ? p->support[y] : BOTH;
    rotate_columns(t, p, x, y, (REAL)c, (REAL)s);
    p->values[x] = dx * c * c + dy * s * s;
    p->values[y] = dx * s * s + dy * c * c;
    drop(p, x);
    return true;
}

/* Divides the columns into kept and dropped. The tolerance is LAPACK's, for a matrix of norm one. */
static void deflate(const divide *t, node *p)
{
    double tolerance = 8.0 * ROUND_OFF * fmax(largest(p->values, p->size), largest(p->z, p->size));
    int last = -1;
    for (int64_t i = 0; i < p->size; i++) {
        int column = p->sorted[i];
        p->support[column] = column < p->top ? TOP : BOTTOM;
        if (p->rho * fabs(p->z[column]) <= tolerance) {
            drop(p, column);
            continue;
        }
        if (last >= 0 && !merge_close_pair(t, p, last, column, tolerance)) {
            p->kept[p->kept_count++] = last;
        }
        last = column;
    }
    if (last >= 0) {
        p->kept[p->kept_count++] = last;
    }
}

/* group lists the kept columns by support, so that each half's rows multiply only the vectors that reach into it. */
static void group_by_support(node *p)
{
    int64_t filled = 0;
    for (int wanted = TOP; wanted <= BOTTOM; wanted++) {
        int64_t before = filled;
        for (int64_t i = 0; i < p->kept_count; i++) {
            if (p->support[p->kept[i]] == wanted) {
                p->group[filled++] = (int)i;
            }
        }
        p->count[wanted] = filled - before;
    }
}

/* The packed columns: upper rows of the first two groups, lower rows of the last two, and the dropped ones whole. */
static REAL *packed_bottom(const node *p)
{
    return p->packed + p->top * (p->count[TOP] + p->count[BOTH]);
}

static REAL *packed_dropped(const node *p)
{
    return packed_bottom(p) + p->bottom * (p->count[BOTH] + p->count[BOTTOM]);
}

static void pack(const divide *t, const node *p, const member *me)
{
    REAL *bottom = packed_bottom(p), *dropped = packed_dropped(p);
    size_t top_bytes = (size_t)p->top * sizeof(REAL), bottom_bytes = (size_t)p->bottom * sizeof(REAL);
    int64_t begin, end;
    share(me, p->kept_count, 1, &begin, &end);
    for (int64_t g = begin; g < end; g++) {
        const REAL *column = p->q + p->kept[p->group[g]] * t->ldq;
        if (g < p->count[TOP] + p->count[BOTH]) {
            memcpy(p->packed + g * p->top, column, top_bytes);
        }
        if (g >= p->count[TOP]) {
            memcpy(bottom + (g - p->count[TOP]) * p->bottom, column + p->top, bottom_bytes);
        }
    }
    share(me, p->dropped_count, 1, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        memcpy(dropped + i * p->size, p->q + p->dropped[i] * t->ldq, top_bytes + bottom_bytes);
    }
}

/* Four columns of s from column j on: component g of a vector is z_g / (pole_g - root), rows in the order of the groups,
 * normalised. They share one division. */
VECTOR_INLINE void four_vectors(const node *p, int64_t j)
{
    int64_t k = p->kept_count;
    const double *restrict pole = p->weight, *restrict z = p->grouped, *o = p->origin + j, *x = p->offset + j;
    REAL *restrict s0 = p->s + j * k, *restrict s1 = s0 + k, *restrict s2 = s1 + k, *restrict s3 = s2 + k;
    double n0 = 0.0, n1 = 0.0, n2 = 0.0, n3 = 0.0;
#pragma omp simd reduction(+ : n0, n1, n2, n3)
    for (int64_t i = 0; i < k; i++) {
        double d0 = (pole[i] - o[0]) - x[0], d1 = (pole[i] - o[1]) - x[1];
        double d2 = (pole[i] - o[2]) - x[2], d3 = (pole[i] - o[3]) - x[3];
        double d01 = d0 * d1, d23 = d2 * d3, ratio = z[i] / (d01 * d23);
        double r01 = ratio * d23, r23 = ratio * d01;
        double c0 = r01 * d1, c1 = r01 * d0, c2 = r23 * d3, c3 = r23 * d2;
        n0 += c0 * c0;
        n1 += c1 * c1;
        n2 += c2 * c2;
        n3 += c3 * c3;
        s0[i] = (REAL)c0;
        s1[i] = (REAL)c1;
        s2[i] = (REAL)c2;
        s3[i] = (REAL)c3;
    }
    const REAL f0 = (REAL)(1.0 / sqrt(n0)), f1 = (REAL)(1.0 / sqrt(n1));
    const REAL f2 = (REAL)(1.0 / sqrt(n2)), f3 = (REAL)(1.0 / sqrt(n3));
#pragma omp simd
    for (int64_t i = 0; i < k; i++) {
        s0[i] *= f0;
        s1[i] *= f1;
        s2[i] *= f2;
        s3[i] *= f3;
    }
}

VECTOR_INLINE void one_vector(const node *p, int64_t j)
{
    int64_t k = p->kept_count;
    const double *restrict pole = p->weight, *restrict z = p->grouped;
    REAL *restrict s = p->s + j * k;
    double norm = 0.0;
#pragma omp simd reduction(+ : norm)
    for (int64_t i = 0; i < k; i++) {
        double c = z[i] / ((pole[i] - p->origin[j]) - p->offset[j]);
        norm += c * c;
        s[i] = (REAL)c;
    }
    const REAL factor = (REAL)(1.0 / sqrt(norm));
#pragma omp simd
    for (int64_t i = 0; i < k; i++) {
        s[i] *= factor;
    }
}

VECTOR_CLONES static void inner_vectors(const node *p, int64_t begin, int64_t end)
{
    int64_t j = begin;
    for (; j + 4 <= end; j += 4) {
        four_vectors(p, j);
    }
    for (; j < end; j++) {
        one_vector(p, j);
    }
}

/* How many columns to multiply at once, with so many rows and inner numbers. A matrix of order n that one thread solves
 * although there are others must not wake them for its products. */
static int64_t product_columns(int64_t n, int64_t rows, int64_t inner)
{
    int64_t columns = SERIAL_PRODUCT / (rows * inner + 1);
    return n >= SERIAL_UNDER ? n : columns > 4 ? columns / 4 * 4 : 4;
}

static void product(const divide *t, int64_t rows, int64_t columns, int64_t inner, const REAL *x, const REAL *s,
                    int64_t lds, REAL *out)
{
    if (inner == 0) {
        for (int64_t j = 0; j < columns; j++) {
            memset(out + j * t->ldq, 0, (size_t)rows * sizeof *out);
        }
        return;
    }
    t->blas->gemm(TCHI_COL_MAJOR, TCHI_NO_TRANS, TCHI_NO_TRANS, (int)rows, (int)columns, (int)inner, 1, x, (int)rows, s,
                  (int)lds, 0, out, (int)t->ldq);
}

/* Vectors begin to end - 1 of the merged node, into its first columns. */
static void form_vectors(const divide *t, const node *p, int64_t begin, int64_t end)
{
    int64_t k = p->kept_count, columns = end - begin;
    const REAL *s = p->s + begin * k;
    REAL *out = p->q + begin * t->ldq;
    inner_vectors(p, begin, end);
    product(t, p->top, columns, p->count[TOP] + p->count[BOTH], p->packed, s, k, out);
    product(t, p->bottom, columns, p->count[BOTH] + p->count[BOTTOM], packed_bottom(p), s + p->count[TOP], k,
            out + p->top);
}

static void form_share(const divide *t, const node *p, const member *me)
{
    int64_t begin, end, rows = p->top > p->bottom ? p->top : p->bottom;
    int64_t width = product_columns(t->n, rows, p->kept_count);
    share(me, p->kept_count, 4, &begin, &end);
    for (int64_t first = begin; first < end; first += width) {
        form_vectors(t, p, first, first + width < end ? first + width : end);
    }
}

/* The poles and weights of the secular equation, ascending. */
static void set_up_secular(node *p)
{
    for (int64_t i = 0; i < p->kept_count; i++) {
        p->pole[i] = p->values[p->kept[i]];
        p->weight[i] = p->z[p->kept[i]] * p->z[p->kept[i]];
    }
    p->secular = (tchi_secular){p->kept_count, p->rho, SECULAR_TOLERANCE, p->pole, p->weight, p->origin, p->offset};
    if (p->kept_count > 0) {
        tchi_secular_prepare(&p->secular);
    }
}

/* The poles and z in the order of the groups; the weights are not needed any more and make room for the poles. */
static void group_secular(node *p)
{
    for (int64_t g = 0; g < p->kept_count; g++) {
        int i = p->group[g];
        p->weight[g] = p->pole[i];
        p->grouped[g] = copysign(p->new_z[i], p->z[p->kept[i]]);
    }
}

/* The dropped columns, ascending, come after the roots' vectors. */
static void restore_dropped(const divide *t, const node *p, const member *me)
{
    const REAL *dropped = packed_dropped(p);
    int64_t begin, end;
    share(me, p->dropped_count, 1, &begin, &end);
    for (int64_t i = begin; i < end; i++) {
        memcpy(p->q + (p->kept_count + i) * t->ldq, dropped + i * p->size, (size_t)p->size * sizeof(REAL));
    }
}

static void finish_values(node *p)
{
    int64_t k = p->kept_count;
    for (int64_t i = 0; i < p->dropped_count; i++) {
        p->z[i] = p->values[p->dropped[i]];
    }
    memcpy(p->values + k, p->z, (size_t)p->dropped_count * sizeof *p->z);
    for (int64_t i = 0; i < k; i++) {
        p->values[i] = p->origin[i] + p->offset[i];
    }
    for (int64_t i = 0; i < p->size; i++) {
        p->sorted[i] = (int)i;
    }
    merge_lists(p->values, p->sorted, k, p->sorted + k, p->dropped_count, p->order);
}

/* Everything about a merge that is not worth sharing. */
static void begin_merge(const divide *t, node *p, double coupling)
{
    form_z(t, p, coupling);
    sort_columns(p);
    deflate(t, p);
    group_by_support(p);
    set_up_secular(p);
}

/* Joins the halves of p, between which the matrix had the entry coupling; all members call it with the same p. Returns
 * how many roots this member did not find. */
static int merge_node(const divide *t, node *p, double coupling, const member *me)
{
    int64_t begin, end;
    if (me->thread == 0) {
        begin_merge(t, p, coupling);
    }
    meet(me);
    share(me, p->kept_count, TCHI_SECULAR_LANES, &begin, &end);
    pack(t, p, me);
    int failed = tchi_secular_roots(&p->secular, begin, end);
    meet(me);
    tchi_secular_vector(&p->secular, begin, end, p->new_z);
    meet(me);
    if (me->thread == 0) {
        group_secular(p);
    }
    meet(me);
    form_share(t, p, me);
    restore_dropped(t, p, me);
    meet(me);
    if (me->thread == 0) {
        finish_values(p);
    }
    return failed;
}

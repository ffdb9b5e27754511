/* First half of a merge of Cuppen's divide and conquer: deflation. In the basis of the two halves' eigenvectors the
 * matrix is diag(d) + rho z zT; columns that already are eigenvectors to working precision, in many matrices most of
 * them, are removed. */
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "eigh_secular.h"

/* Rows of an eigenvector that can be nonzero. */
enum { TOP, BOTH, BOTTOM };

/* The nodes of a level share these arrays: a node that begins at row r uses the matrices from column r on and the other
 * arrays from 2 r on, since some lists have one entry more than the node has rows. */
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

static double largest_magnitude(const double *x, int64_t n)
{
    double most = 0.0;
    for (int64_t i = 0; i < n; i++) {
        most = fmax(most, fabs(x[i]));
    }
    return most;
}

/* A deflated column joins the list at its place; it nearly always is the last. */
static void drop_column(node *p, int column)
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

/* Two adjacent, nearly equal eigenvalues: a rotation moves the weight of z to the later one. The earlier is then an
 * eigenvector to the tolerance and is deflated; returns false if the error would be larger. */
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
    drop_column(p, x);
    return true;
}

/* Partitions the columns into kept and deflated. The tolerance is LAPACK's, for a matrix of norm one. */
static void deflate_columns(const divide *t, node *p)
{
    double tolerance = 8.0 * ROUND_OFF * fmax(largest_magnitude(p->values, p->size), largest_magnitude(p->z, p->size));
    int last = -1;
    for (int64_t i = 0; i < p->size; i++) {
        int column = p->sorted[i];
        p->support[column] = column < p->top ? TOP : BOTTOM;
        if (p->rho * fabs(p->z[column]) <= tolerance) {
            drop_column(p, column);
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

/* Groups the kept columns by support, so that each half's rows multiply only vectors that reach into it. */
static void group_by_support(node *p)
{
    int64_t filled = 0;
    for (int kind = TOP; kind <= BOTTOM; kind++) {
        int64_t before = filled;
        for (int64_t i = 0; i < p->kept_count; i++) {
            if (p->support[p->kept[i]] == kind) {
                p->group[filled++] = (int)i;
            }
        }
        p->count[kind] = filled - before;
    }
}

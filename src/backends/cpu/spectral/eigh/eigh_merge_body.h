/* Second half of a merge of Cuppen's divide and conquer: multiplies the columns that deflation kept by the eigenvectors
 * of diag(d) + rho z zT, which follow from the roots of eigh_secular.h. The threads of a team share the work; between
 * two barriers each writes only its own columns. */
#include "eigh_deflate_body.h"
#include "backends/cpu/runtime/vector_clones.h"

/* The packed columns: upper rows of the first two groups, lower rows of the last two, and the dropped ones whole. */
static REAL *packed_bottom(const node *p)
{
    return p->packed + p->top * (p->count[TOP] + p->count[BOTH]);
}

static REAL *packed_dropped(const node *p)
{
    return packed_bottom(p) + p->bottom * (p->count[BOTH] + p->count[BOTTOM]);
}

static void pack_columns(const divide *t, const node *p, const member *me)
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

/* Four columns of s from column j on: component g of a vector is z_g / (pole_g - root), normalized, with the rows in
 * the order of the groups. They share one division. */
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

/* Columns per product for these sizes. A matrix that one thread solves although there are others must not wake them. */
static int64_t product_columns(int64_t n, int64_t rows, int64_t inner)
{
    int64_t columns = SERIAL_PRODUCT / (rows * inner + 1);
    return n >= SERIAL_UNDER ? n : columns > 4 ? columns / 4 * 4 : 4;
}

static void multiply_packed(const divide *t, int64_t rows, int64_t columns, int64_t inner, const REAL *x, const REAL *s,
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
    multiply_packed(t, p->top, columns, p->count[TOP] + p->count[BOTH], p->packed, s, k, out);
    multiply_packed(t, p->bottom, columns, p->count[BOTH] + p->count[BOTTOM], packed_bottom(p), s + p->count[TOP], k,
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

/* The deflated columns, ascending, follow the roots' vectors. */
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
    deflate_columns(t, p);
    group_by_support(p);
    set_up_secular(p);
}

/* Merges the halves of p, coupled by the entry `coupling`; all threads pass the same p. Returns the number of roots
 * this thread did not find. */
static int merge_node(const divide *t, node *p, double coupling, const member *me)
{
    int64_t begin, end;
    if (me->thread == 0) {
        begin_merge(t, p, coupling);
    }
    meet(me);
    share(me, p->kept_count, TCHI_SECULAR_LANES, &begin, &end);
    pack_columns(t, p, me);
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

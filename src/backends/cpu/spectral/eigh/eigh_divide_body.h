/* Divide and conquer on a tridiagonal matrix: cuts it into leaves by removing single off-diagonal entries, solves the
 * leaves and merges neighbors level by level. While a level has as many nodes as there are threads, each thread handles
 * its own nodes; above, all threads work on one node. */
#include "eigh_leaf.h"
#include "eigh_merge_body.h"

/* Leaf i of 2^levels begins here. */
static int64_t leaf_begin(int64_t n, int levels, int64_t i)
{
    return (i * n) >> levels;
}

static int level_count(int64_t n)
{
    int levels = 0;
    while ((n >> levels) + 1 > LEAF_ORDER) {
        levels++;
    }
    return levels;
}

/* A matrix with entry e between two leaves equals the two leaves, each less |e| at that corner, plus a rank-one
 * term. */
static void cut_into_leaves(int64_t n, int levels, double *d, const double *e)
{
    for (int64_t i = 1; i < (int64_t)1 << levels; i++) {
        int64_t row = leaf_begin(n, levels, i);
        d[row - 1] -= fabs(e[row - 1]);
        d[row] -= fabs(e[row - 1]);
    }
}

static void sort_leaf(const double *values, int size, int *order)
{
    for (int i = 0; i < size; i++) {
        int j = i;
        for (; j > 0 && values[order[j - 1]] > values[i]; j--) {
            order[j] = order[j - 1];
        }
        order[j] = i;
    }
}

static int solve_leaf(const divide *t, int64_t begin, int64_t end, const double *e)
{
    double vectors[TCHI_LEAF * TCHI_LEAF], between[TCHI_LEAF];
    int size = (int)(end - begin);
    memcpy(between, e + begin, (size_t)size * sizeof *between);
    int failed = tchi_leaf_eigen(size, LEAF_TOLERANCE, t->values + begin, between, vectors);
    for (int j = 0; j < size; j++) {
        REAL *column = t->q + (begin + j) * t->ldq;
        memset(column, 0, (size_t)t->n * sizeof *column);
        for (int i = 0; i < size; i++) {
            column[begin + i] = (REAL)vectors[j * TCHI_LEAF + i];
        }
    }
    sort_leaf(t->values + begin, size, t->order + begin);
    return failed;
}

/* Joins nodes of 2^(levels - level) leaves in pairs. */
static int merge_level(const divide *t, node *shared, int levels, int level, const double *e, const member *me)
{
    const member alone = {NULL, 0, 1};
    int64_t nodes = (int64_t)1 << level, leaves = (int64_t)1 << (levels - level);
    bool apart = nodes >= me->threads;
    int failed = 0;
    for (int64_t i = apart ? me->thread : 0; i < nodes; i += apart ? me->threads : 1) {
        int64_t begin = leaf_begin(t->n, levels, i * leaves), end = leaf_begin(t->n, levels, (i + 1) * leaves);
        int64_t middle = leaf_begin(t->n, levels, i * leaves + leaves / 2);
        node local;
        node *p = apart ? &local : shared;
        if (apart || me->thread == 0) {
            *p = node_at(t, begin, middle, end);
        }
        failed += merge_node(t, p, e[middle - 1], apart ? &alone : me);
        if (!apart) {
            meet(me);
        }
    }
    return failed;
}

/* One thread's share of the eigenvalues of the matrix with diagonal t->values and off-diagonal e, and of its vectors in
 * t->q; t->order is the ascending order of columns. Returns the number of eigenvalues it did not find. */
static int divide_and_conquer(const divide *t, node *shared, const double *e, const member *me)
{
    int levels = level_count(t->n), failed = 0;
    if (me->thread == 0) {
        cut_into_leaves(t->n, levels, t->values, e);
    }
    meet(me);
    for (int64_t i = me->thread; i < (int64_t)1 << levels; i += me->threads) {
        failed += solve_leaf(t, leaf_begin(t->n, levels, i), leaf_begin(t->n, levels, i + 1), e);
    }
    for (int level = levels - 1; level >= 0; level--) {
        meet(me);
        failed += merge_level(t, shared, levels, level, e, me);
    }
    meet(me);
    return failed;
}

/* Divide and conquer on a tridiagonal matrix: cut it into leaves by taking out single off-diagonal entries, solve the
 * leaves, and merge neighbours level by level. While a level has as many nodes as there are threads, each node is one
 * thread's; above, all threads work on one node. */
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

/* A matrix with the entry e in the corner between two leaves is the two leaves, each less |e| at that corner, plus a
 * term of rank one. */
static void cut(int64_t n, int levels, double *d, const double *e)
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

static int solve_leaves(const divide *t, int levels, const double *e, int threads)
{
    int failed = 0;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(+ : failed)
    for (int64_t i = 0; i < (int64_t)1 << levels; i++) {
        failed += solve_leaf(t, leaf_begin(t->n, levels, i), leaf_begin(t->n, levels, i + 1), e);
    }
    return failed;
}

/* Joins nodes of 2^(levels - level) leaves in pairs. */
static int merge_level(const divide *t, int levels, int level, const double *e, int threads)
{
    int64_t nodes = (int64_t)1 << level;
    int across = nodes >= threads ? threads : 1, within = nodes >= threads ? 1 : threads, failed = 0;
#pragma omp parallel for num_threads(across) if (across > 1) reduction(+ : failed) schedule(dynamic)
    for (int64_t i = 0; i < nodes; i++) {
        int64_t leaves = (int64_t)1 << (levels - level), first = i * leaves;
        int64_t begin = leaf_begin(t->n, levels, first), middle = leaf_begin(t->n, levels, first + leaves / 2);
        int64_t end = leaf_begin(t->n, levels, first + leaves);
        failed += merge_node(t, begin, middle, end, e[middle - 1], within);
    }
    return failed;
}

/* The eigenvalues of the matrix with diagonal t->values and off-diagonal e, and its vectors in t->q; t->order tells the
 * columns' ascending order. Returns how many eigenvalues were not found. */
static int divide_and_conquer(const divide *t, const double *e, int threads)
{
    int levels = level_count(t->n);
    cut(t->n, levels, t->values, e);
    int failed = solve_leaves(t, levels, e, threads);
    for (int level = levels - 1; level >= 0 && failed == 0; level--) {
        failed = merge_level(t, levels, level, e, threads);
    }
    return failed;
}

/* The loops of one precision, REAL, for the instruction set of the including file. The compiler may reorder reductions
 * to vectorize them, always in the same way. A file that defines CUSTOM_RUNS provides scale, kronecker, max_abs,
 * sum_squares and dot. */
#include "loops.h"

#include <math.h>

static void combine(int64_t n, double c1, const void *x_data, double c2, const void *y_data, void *out_data)
{
    const REAL *x = x_data;
    const REAL *y = y_data;
    REAL *out = out_data;
    REAL a = x == NULL ? 0 : (REAL)c1;
    REAL b = y == NULL ? 0 : (REAL)c2;
    if (x != NULL && y != NULL) {
        for (int64_t i = 0; i < n; i++) {
            out[i] = a * x[i] + b * y[i];
        }
    } else if (x != NULL || y != NULL) {
        const REAL *only = x != NULL ? x : y;
        for (int64_t i = 0; i < n; i++) {
            out[i] = (a + b) * only[i];
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            out[i] = 0;
        }
    }
}

#if !defined(CUSTOM_RUNS)

static void scale(int64_t n, double factor, const void *x_data, void *out_data)
{
    const REAL *x = x_data;
    REAL *out = out_data;
    REAL f = (REAL)factor;
    for (int64_t i = 0; i < n; i++) {
        out[i] = f * x[i];
    }
}

/* Non-temporal stores were slower: 24 ms vs 18 ms for a result of 268 MB. */
static void kronecker(int64_t m, const void *a_data, int64_t n, const void *b_data, void *out_data)
{
    const REAL *a = a_data;
    const REAL *restrict b = b_data;
    REAL *out = out_data;
    for (int64_t k = 0; k < m; k++) {
        REAL factor = a[k];
        REAL *restrict part = out + k * n;
        for (int64_t i = 0; i < n; i++) {
            part[i] = factor * b[i];
        }
    }
}

static double max_abs(int64_t n, const void *x_data)
{
    const REAL *x = x_data;
    REAL largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; i++) {
        REAL v = REAL_ABS(x[i]);
        largest = v > largest ? v : largest;
    }
    return (double)largest;
}

static double sum_squares(int64_t n, double factor, const void *x_data)
{
    const REAL *x = x_data;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        double v = (double)x[i] * factor;
        sum += v * v;
    }
    return sum;
}

static double dot(int64_t n, const void *x_data, const double *y)
{
    const REAL *x = x_data;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += (double)x[i] * y[i];
    }
    return sum;
}

#endif

/* x - x is 0 exactly for finite x. */
static int64_t count_nonfinite(int64_t n, const void *x_data)
{
    const REAL *x = x_data;
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        count += !(x[i] - x[i] == 0);
    }
    return count;
}

static void dot4(int64_t n, const void *x_data, const double *y, double sums[4])
{
    const REAL *x = x_data;
    double sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
    for (int64_t i = 0; i < n; i++) {
        double v = (double)x[i];
        sum0 += v * y[i];
        sum1 += v * y[n + i];
        sum2 += v * y[2 * n + i];
        sum3 += v * y[3 * n + i];
    }
    sums[0] = sum0;
    sums[1] = sum1;
    sums[2] = sum2;
    sums[3] = sum3;
}

/* Parallel sums in an order independent of the vector width. */
enum { SIDE_BY_SIDE = 8 };

static double inner_product(int64_t n, const void *x_data, const void *y_data)
{
    const REAL *x = x_data, *y = y_data;
    double sums[SIDE_BY_SIDE] = {0};
    int64_t j = 0;
    for (; j + SIDE_BY_SIDE <= n; j += SIDE_BY_SIDE) {
        for (int k = 0; k < SIDE_BY_SIDE; k++) {
            sums[k] += (double)x[j + k] * (double)y[j + k];
        }
    }
    for (int k = 0; j < n; j++, k++) {
        sums[k] += (double)x[j] * (double)y[j];
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

static void sum_terms(int64_t n, const void *x_data, const void *y_data, double *sum, double *size)
{
    const REAL *x = x_data, *y = y_data;
    double sums[SIDE_BY_SIDE] = {0}, sizes[SIDE_BY_SIDE] = {0};
    int64_t j = 0;
    for (; j + SIDE_BY_SIDE <= n; j += SIDE_BY_SIDE) {
        for (int k = 0; k < SIDE_BY_SIDE; k++) {
            double term = (double)x[j + k] * (double)y[j + k];
            sums[k] += term;
            sizes[k] += fabs(term);
        }
    }
    for (int k = 0; j < n; j++, k++) {
        double term = (double)x[j] * (double)y[j];
        sums[k] += term;
        sizes[k] += fabs(term);
    }
    *sum = *size = 0;
    for (int k = 0; k < SIDE_BY_SIDE; k++) {
        *sum += sums[k];
        *size += sizes[k];
    }
}

static void add_scaled(int64_t n, double factor, const void *x_data, double *restrict sums)
{
    const REAL *restrict x = x_data;
    for (int64_t j = 0; j < n; j++) {
        sums[j] += factor * (double)x[j];
    }
}

static void add_scaled_squares(int64_t n, double factor, const void *x_data, double *restrict sums)
{
    const REAL *restrict x = x_data;
    for (int64_t j = 0; j < n; j++) {
        sums[j] += factor * ((double)x[j] * (double)x[j]);
    }
}

static void store_sums(int64_t n, double scale, const double *restrict sums, double beta, void *out_data)
{
    REAL *restrict out = out_data;
    for (int64_t i = 0; i < n; i++) {
        out[i] = (REAL)((beta == 0.0 ? 0.0 : beta * (double)out[i]) + scale * sums[i]);
    }
}

enum { TILE = 32 };

static double max_gap(const REAL *x, const REAL *y)
{
    REAL largest = 0;
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < TILE * TILE; i++) {
        REAL gap = REAL_ABS(x[i] - y[i]);
        largest = gap > largest ? gap : largest;
    }
    return (double)largest;
}

/* The largest difference between a tile and its mirror image, which is first transposed into a buffer so that the
 * comparison runs along rows. Both are padded with zeros. */
static void tile_gaps(const REAL *a, int64_t ld, int64_t i0, int64_t rows, int64_t j0, int64_t cols, double *largest)
{
    REAL here[TILE][TILE] = {{0}};
    REAL transposed[TILE][TILE] = {{0}};
    for (int64_t i = 0; i < rows; i++) {
        __builtin_memcpy(here[i], a + (i0 + i) * ld + j0, (size_t)cols * sizeof(REAL));
    }
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < rows; i++) {
            transposed[i][j] = a[(j0 + j) * ld + i0 + i];
        }
    }
    *largest = fmax(*largest, max_gap(&here[0][0], &transposed[0][0]));
}

static double asymmetry(int64_t n, const void *a_data, int64_t ld, int64_t from, int64_t to)
{
    double largest = 0;
    for (int64_t i0 = from; i0 < to; i0 += TILE) {
        int64_t rows = to - i0 < TILE ? to - i0 : TILE;
        for (int64_t j0 = 0; j0 < i0 + rows; j0 += TILE) {
            int64_t cols = i0 + rows - j0 < TILE ? i0 + rows - j0 : TILE;
            tile_gaps(a_data, ld, i0, rows, j0, cols, &largest);
        }
    }
    return largest;
}

/* In tiles, so that the rows written and the columns read stay in L1. */
static void mirror(int64_t n, void *a_data, int64_t ld, int64_t from, int64_t to)
{
    REAL *a = a_data;
    for (int64_t i0 = from; i0 < to; i0 += TILE) {
        int64_t i1 = i0 + TILE < to ? i0 + TILE : to;
        for (int64_t j0 = i0; j0 < n; j0 += TILE) {
            int64_t j1 = j0 + TILE < n ? j0 + TILE : n;
            for (int64_t i = i0; i < i1; i++) {
                for (int64_t j = j0 > i ? j0 : i + 1; j < j1; j++) {
                    a[i * ld + j] = a[j * ld + i];
                }
            }
        }
    }
}

#define LOOPS_TABLE                                                                                                    \
    {                                                                                                                  \
        .combine = combine, .scale = scale, .kronecker = kronecker, .max_abs = max_abs, .sum_squares = sum_squares,    \
        .count_nonfinite = count_nonfinite, .dot = dot, .dot4 = dot4, .mirror = mirror, .asymmetry = asymmetry,        \
        .inner_product = inner_product, .sum_terms = sum_terms, .add_scaled = add_scaled,                              \
        .add_scaled_squares = add_scaled_squares, .store_sums = store_sums,                                            \
    }

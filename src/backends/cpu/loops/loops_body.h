/* The loops of one precision, REAL, for whatever instruction set the including file is compiled for. Reductions keep
 * several partial sums so that the compiler can vectorise them without reordering what is written. */
#include "loops.h"

#include <math.h>
#include <stdbool.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 16

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

static void scale(int64_t n, double factor, const void *x_data, void *out_data)
{
    const REAL *x = x_data;
    REAL *out = out_data;
    REAL f = (REAL)factor;
    for (int64_t i = 0; i < n; i++) {
        out[i] = f * x[i];
    }
}

/* Stores that bypass the caches must be aligned: the run is split into a head, aligned vectors and a tail. */
static void stream_scale(int64_t n, REAL factor, const REAL *x, REAL *out)
{
    int64_t i = 0;
#if defined(__AVX512F__)
    enum { WIDTH = 64 / sizeof(REAL) };
    int64_t head = (int64_t)((64 - (uintptr_t)out % 64) % 64 / sizeof(REAL));
    for (; i < head && i < n; i++) {
        out[i] = factor * x[i];
    }
    for (; i + WIDTH <= n; i += WIDTH) {
        REAL lane[WIDTH];
        for (int k = 0; k < WIDTH; k++) {
            lane[k] = factor * x[i + k];
        }
        __m512i vector;
        __builtin_memcpy(&vector, lane, sizeof vector);
        _mm512_stream_si512((void *)(out + i), vector);
    }
#endif
    for (; i < n; i++) {
        out[i] = factor * x[i];
    }
}

static void kronecker(int64_t m, const void *a_data, int64_t n, const void *b_data, void *out_data, int past)
{
    const REAL *a = a_data;
    const REAL *restrict b = b_data;
    REAL *out = out_data;
    for (int64_t k = 0; k < m; k++) {
        REAL factor = a[k];
        REAL *restrict part = out + k * n;
        if (past) {
            stream_scale(n, factor, b, part);
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            part[i] = factor * b[i];
        }
    }
}

static double max_abs(int64_t n, const void *x_data)
{
    const REAL *x = x_data;
    REAL largest[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            REAL v = x[i + k] < 0 ? -x[i + k] : x[i + k];
            largest[k] = v > largest[k] ? v : largest[k];
        }
    }
    for (; i < n; i++) {
        REAL v = x[i] < 0 ? -x[i] : x[i];
        largest[0] = v > largest[0] ? v : largest[0];
    }
    for (int k = 1; k < LANES; k++) {
        largest[0] = largest[k] > largest[0] ? largest[k] : largest[0];
    }
    return (double)largest[0];
}

static double add_lanes(const double *sums)
{
    double total = 0;
    for (int k = 0; k < LANES; k++) {
        total += sums[k];
    }
    return total;
}

static double sum_squares(int64_t n, double factor, const void *x_data)
{
    const REAL *x = x_data;
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            double v = (double)x[i + k] * factor;
            sums[k] += v * v;
        }
    }
    for (; i < n; i++) {
        double v = (double)x[i] * factor;
        sums[0] += v * v;
    }
    return add_lanes(sums);
}

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

static double dot(int64_t n, const void *x_data, const double *y)
{
    const REAL *x = x_data;
    double sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            sums[k] += (double)x[i + k] * y[i + k];
        }
    }
    for (; i < n; i++) {
        sums[0] += (double)x[i] * y[i];
    }
    return add_lanes(sums);
}

static void dot4(int64_t n, const void *x_data, const double *y, double sums[4])
{
    enum { WIDTH = 8 };
    const REAL *x = x_data;
    double partial[4][WIDTH] = {{0}};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        double v[WIDTH];
        for (int k = 0; k < WIDTH; k++) {
            v[k] = (double)x[i + k];
        }
        for (int j = 0; j < 4; j++) {
            for (int k = 0; k < WIDTH; k++) {
                partial[j][k] += v[k] * y[j * n + i + k];
            }
        }
    }
    for (int j = 0; j < 4; j++) {
        double total = 0;
        for (int k = 0; k < WIDTH; k++) {
            total += partial[j][k];
        }
        for (int64_t k = i; k < n; k++) {
            total += (double)x[k] * y[j * n + k];
        }
        sums[j] = total;
    }
}

/* A tile above the diagonal is turned around in a buffer first, so that the comparison runs along rows. */
static double asymmetry(int64_t n, const void *a_data, int64_t ld, int64_t from, int64_t to)
{
    enum { TILE = 32 };
    const REAL *a = a_data;
    REAL largest = 0;
    (void)n;
    for (int64_t i0 = from; i0 < to; i0 += TILE) {
        int64_t rows = to - i0 < TILE ? to - i0 : TILE;
        for (int64_t j0 = 0; j0 < i0 + rows; j0 += TILE) {
            REAL turned[TILE][TILE] = {{0}};
            int64_t cols = i0 + rows - j0 < TILE ? i0 + rows - j0 : TILE;
            for (int64_t j = 0; j < cols; j++) {
                for (int64_t i = 0; i < rows; i++) {
                    turned[i][j] = a[(j0 + j) * ld + i0 + i];
                }
            }
            for (int64_t i = 0; i < rows; i++) {
                const REAL *row = a + (i0 + i) * ld + j0;
                for (int64_t j = 0; j < cols; j++) {
                    REAL gap = row[j] - turned[i][j];
                    gap = gap < 0 ? -gap : gap;
                    largest = gap > largest ? gap : largest;
                }
            }
        }
    }
    return (double)largest;
}

/* In tiles, so that both the rows written and the columns read stay in the nearest cache. */
static void mirror(int64_t n, void *a_data, int64_t ld, int64_t from, int64_t to)
{
    enum { TILE = 32 };
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
        .combine = combine, .scale = scale, .kronecker = kronecker, .max_abs = max_abs, \
        .sum_squares = sum_squares, .count_nonfinite = count_nonfinite, .dot = dot, .dot4 = dot4, .mirror = mirror,    \
        .asymmetry = asymmetry,                                                                                        \
    }

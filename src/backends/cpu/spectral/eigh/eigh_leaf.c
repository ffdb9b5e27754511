/* Implicitly shifted QL on a small tridiagonal matrix. Vectors are contiguous, in columns of fixed length, so that a
 * plane rotation is a few vector instructions. */
#include "eigh_leaf.h"

#include <math.h>
#include <string.h>

#include "backends/cpu/runtime/vector_clones.h"

enum { SWEEPS_PER_VALUE = 60 };

/* Off-diagonal entries below this are negligible for a matrix of norm one, and their squares underflow. */
static const double negligible = 0x1p-400;

VECTOR_INLINE void rotate_vectors(double *restrict x, double *restrict y, double c, double s, int length)
{
#pragma omp simd
    for (int i = 0; i < length; i++) {
        double t = y[i];
        y[i] = s * x[i] + c * t;
        x[i] = c * x[i] - s * t;
    }
}

/* The first index from l on after which the matrix decouples. */
VECTOR_INLINE int block_end(int n, int l, const double *d, const double *e, double tolerance)
{
    int m = l;
    while (m + 1 < n) {
        double size = fabs(e[m]);
        if (size <= tolerance * (fabs(d[m]) + fabs(d[m + 1])) || size <= negligible) {
            break;
        }
        m++;
    }
    return m;
}

/* One sweep from m down to l with Wilkinson's shift: the bulge starts below and leaves at the top. */
VECTOR_INLINE void sweep_ql(int l, int m, double *d, double *e, double *z, int length)
{
    double half = (d[l + 1] - d[l]) / (2.0 * e[l]);
    double shift = d[l] - e[l] / (half + copysign(sqrt(1.0 + half * half), half));
    double c = 1.0, s = 1.0, carry = 0.0, bulge = d[m] - shift;
    for (int i = m - 1; i >= l; i--) {
        double f = s * e[i], b = c * e[i], r = sqrt(f * f + bulge * bulge);
        e[i + 1] = r;
        if (r <= negligible) {
            d[i + 1] -= carry;
            e[m] = 0.0;
            return;
        }
        double inverse = 1.0 / r;
        s = f * inverse;
        c = bulge * inverse;
        double g = d[i + 1] - carry, t = (d[i] - g) * s + 2.0 * c * b;
        carry = s * t;
        d[i + 1] = g + carry;
        bulge = c * t - b;
        rotate_vectors(z + i * TCHI_LEAF, z + (i + 1) * TCHI_LEAF, c, s, length);
    }
    d[l] -= carry;
    e[l] = bulge;
    e[m] = 0.0;
}

VECTOR_CLONES int tchi_leaf_eigen(int n, double tolerance, double *d, double *e, double *z)
{
    int length = (n + 7) / 8 * 8;
    memset(z, 0, (size_t)n * TCHI_LEAF * sizeof *z);
    for (int i = 0; i < n; i++) {
        z[i * TCHI_LEAF + i] = 1.0;
    }
    for (int l = 0; l < n; l++) {
        int tries = 0;
        for (int m = block_end(n, l, d, e, tolerance); m != l; m = block_end(n, l, d, e, tolerance)) {
            if (tries++ == SWEEPS_PER_VALUE) {
                return n - l;
            }
            sweep_ql(l, m, d, e, z, length);
        }
    }
    return 0;
}

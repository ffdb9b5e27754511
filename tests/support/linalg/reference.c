/* Sums run in cache-friendly order, four terms at a time; nothing else is tuned. */
#include "reference.h"

#include "support/testing.h"

/* Most of the time of many tests: with wider vectors where the processor has them. */
#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VECTORIZED
#endif

/* c += a row of the product: `k` factors times as many rows of b. */
VECTORIZED static void add_rows(int64_t k, int64_t n, const double *factor, const double *b, double *c)
{
    int64_t l = 0;
    for (; l + 4 <= k; l += 4) {
        const double *f = factor + l;
        const double *rows = b + l * n;
        for (int64_t j = 0; j < n; j++) {
            c[j] += f[0] * rows[j] + f[1] * rows[n + j] + f[2] * rows[2 * n + j] + f[3] * rows[3 * n + j];
        }
    }
    for (; l < k; l++) {
        for (int64_t j = 0; j < n; j++) {
            c[j] += factor[l] * b[l * n + j];
        }
    }
}

void ref_matmul(int64_t m, int64_t k, int64_t n, const double *a, const double *b, double *c)
{
    memset(c, 0, (size_t)(m * n) * sizeof *c);
    for (int64_t i = 0; i < m; i++) {
        add_rows(k, n, a + i * k, b, c + i * n);
    }
}

void ref_matmul_abs(int64_t m, int64_t k, int64_t n, const double *a, const double *b, double *c)
{
    double *a_abs = test_alloc((size_t)(m * k + k * n + 1) * sizeof *a_abs);
    double *b_abs = a_abs + m * k;
    for (int64_t i = 0; i < m * k; i++) {
        a_abs[i] = fabs(a[i]);
    }
    for (int64_t i = 0; i < k * n; i++) {
        b_abs[i] = fabs(b[i]);
    }
    ref_matmul(m, k, n, a_abs, b_abs, c);
    test_drop(a_abs);
}

void ref_check_sums(const double *got, const double *expected, const double *magnitude, int64_t count, int64_t terms,
                    tch_dtype dtype)
{
    double u = test_arithmetic_roundoff(dtype) + 0x1p-53;
    for (int64_t i = 0; i < count; i++) {
        double bound =
            (double)terms * (u * magnitude[i] + test_underflow(dtype)) + test_unit_roundoff(dtype) * fabs(expected[i]);
        CHECK(fabs(got[i] - expected[i]) <= bound, "element %lld is %.17g, expected %.17g, off by %.3g > %.3g",
              (long long)i, got[i], expected[i], fabs(got[i] - expected[i]), bound);
    }
}

void ref_transpose(int64_t m, int64_t n, const double *a, double *b)
{
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            b[j * m + i] = a[i * n + j];
        }
    }
}

void ref_kronecker(int64_t m, int64_t n, const double *a, int64_t p, int64_t q, const double *b, double *out)
{
    for (int64_t i = 0; i < m * p; i++) {
        const double *a_row = a + i / p * n;
        const double *b_row = b + i % p * q;
        for (int64_t j = 0; j < n; j++) {
            for (int64_t l = 0; l < q; l++) {
                *out++ = a_row[j] * b_row[l];
            }
        }
    }
}

/* A rotation by the angle with sine s and cosine c, computed as an update with r = s / (1 + c), the tangent of half the
 * angle. With c x - s y, each of the thousands of small final rotations would round values it hardly changes, and
 * eigenvectors would lose more norm than an eigensolver under test may: |V'V - I| reached 1.5 times the bound of
 * tests/linalg/test_conformance_eigen.c. As an update, the rounding error shrinks with s. */
static void rotate(double *x, double *y, double s, double r)
{
    double before = *x;
    *x -= s * (*y + r * before);
    *y += s * (before - r * *y);
}

/* Rotates rows p and q of a matrix with n columns. */
VECTORIZED static void rotate_rows(int64_t n, double *restrict x, double *restrict y, double s, double r)
{
    for (int64_t j = 0; j < n; j++) {
        rotate(&x[j], &y[j], s, r);
    }
}

/* Columns p and q of a symmetric matrix whose rows were rotated: only the intersection with those rows remains. */
static void rotate_columns(int64_t n, double *a, int64_t p, int64_t q, double s, double r)
{
    rotate(&a[p * n + p], &a[p * n + q], s, r);
    rotate(&a[q * n + p], &a[q * n + q], s, r);
    for (int64_t i = 0; i < n; i++) {
        a[i * n + p] = a[p * n + i];
        a[i * n + q] = a[q * n + i];
    }
}

/* One rotation that zeroes a_pq; rows of u accumulate the eigenvectors. Returns false if a_pq is at most `small`
 * relative to the diagonal. */
static int annihilate(int64_t n, double *a, double *u, int64_t p, int64_t q, double small)
{
    double apq = a[p * n + q];
    double app = a[p * n + p];
    double aqq = a[q * n + q];
    if (fabs(apq) <= small * sqrt(fabs(app * aqq)) || fabs(apq) < 1e-300) {
        return 0;
    }
    double theta = (aqq - app) / (2.0 * apq);
    double t = copysign(1.0, theta) / (fabs(theta) + sqrt(theta * theta + 1.0));
    double c = 1.0 / sqrt(t * t + 1.0);
    double s = t * c;
    double r = s / (1.0 + c);
    rotate_rows(n, a + p * n, a + q * n, s, r);
    rotate_columns(n, a, p, q, s, r);
    rotate_rows(n, u + p * n, u + q * n, s, r);
    a[p * n + q] = 0.0;
    a[q * n + p] = 0.0;
    return 1;
}

static int sweep(int64_t n, double *a, double *u, double small)
{
    int rotations = 0;
    for (int64_t p = 0; p + 1 < n; p++) {
        for (int64_t q = p + 1; q < n; q++) {
            rotations += annihilate(n, a, u, p, q, small);
        }
    }
    return rotations;
}

static void sort_ascending(int64_t n, double *w, double *u, double *row)
{
    for (int64_t i = 0; i + 1 < n; i++) {
        int64_t least = i;
        for (int64_t j = i + 1; j < n; j++) {
            least = w[j] < w[least] ? j : least;
        }
        double t = w[i];
        w[i] = w[least];
        w[least] = t;
        memcpy(row, u + i * n, (size_t)n * sizeof *row);
        memmove(u + i * n, u + least * n, (size_t)n * sizeof *row);
        memcpy(u + least * n, row, (size_t)n * sizeof *row);
    }
}

void ref_eigh(int64_t n, const double *a, double *w, double *v)
{
    double *work = test_alloc((size_t)(n * n) * sizeof *work);
    double *u = test_alloc((size_t)(n * n) * sizeof *u);
    memcpy(work, a, (size_t)(n * n) * sizeof *work);
    memset(u, 0, (size_t)(n * n) * sizeof *u);
    for (int64_t i = 0; i < n; i++) {
        u[i * n + i] = 1.0;
    }
    /* Ten sweeps usually suffice. For close eigenvalues the remainder is the rounding error of rotations, below the
     * unit roundoff; fifty more sweeps do not change the result. */
    int sweeps = 0;
    while (sweep(n, work, u, sweeps < 15 ? 0x1p-60 : 0x1p-53) > 0 && sweeps < 60) {
        sweeps++;
    }
    CHECK(sweeps < 60, "the reference eigensolver did not converge");
    for (int64_t i = 0; i < n; i++) {
        w[i] = work[i * n + i];
    }
    sort_ascending(n, w, u, work);
    ref_transpose(n, n, u, v);
    test_drop(work);
    test_drop(u);
}

void ref_compose(int64_t n, const double *v, const double *f, double *out)
{
    double *scaled = test_alloc((size_t)(n * n) * sizeof *scaled);
    double *transposed = test_alloc((size_t)(n * n) * sizeof *transposed);
    for (int64_t i = 0; i < n * n; i++) {
        scaled[i] = v[i] * f[i % n];
    }
    ref_transpose(n, n, v, transposed);
    ref_matmul(n, n, n, scaled, transposed, out);
    test_drop(scaled);
    test_drop(transposed);
}

double *ref_power(int64_t n, const double *w, const double *v, double shift, double power)
{
    double *f = test_alloc((size_t)n * sizeof *f);
    double *out = test_alloc((size_t)(n * n) * sizeof *out);
    for (int64_t i = 0; i < n; i++) {
        f[i] = pow(w[i] + shift, power);
    }
    ref_compose(n, v, f, out);
    test_drop(f);
    return out;
}

double ref_trace(int64_t n, const double *a)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        sum += a[i * (n + 1)];
    }
    return sum;
}

double ref_root_residual(int64_t n, int32_t root, const double *a, double shift, const double *x)
{
    size_t bytes = (size_t)(n * n) * sizeof(double);
    double *product = test_alloc(bytes);
    double *next = test_alloc(bytes);
    memcpy(product, a, bytes);
    for (int64_t i = 0; i < n; i++) {
        product[i * n + i] += shift;
    }
    for (int32_t i = 0; i < root; i++) {
        if (i % 2 == 0) {
            ref_matmul(n, n, n, x, product, next);
        } else {
            ref_matmul(n, n, n, product, x, next);
        }
        memcpy(product, next, bytes);
    }
    for (int64_t i = 0; i < n; i++) {
        product[i * n + i] -= 1.0;
    }
    double residual = ref_norm(n * n, product) / sqrt((double)n);
    test_drop(product);
    test_drop(next);
    return residual;
}

/* Scaled by the largest entry, whose square may overflow. */
double ref_norm(int64_t count, const double *x)
{
    double scale = ref_largest(count, x);
    double sum = 0.0;
    if (scale == 0.0 || !isfinite(scale)) {
        return scale;
    }
    for (int64_t i = 0; i < count; i++) {
        sum += x[i] / scale * (x[i] / scale);
    }
    return scale * sqrt(sum);
}

double ref_distance(int64_t count, const double *x, const double *y)
{
    double *difference = test_alloc((size_t)count * sizeof *difference);
    for (int64_t i = 0; i < count; i++) {
        difference[i] = x[i] - y[i];
    }
    double norm = ref_norm(count, difference);
    test_drop(difference);
    return norm;
}

/* Propagates NaN, unlike fmax. */
double ref_largest(int64_t count, const double *x)
{
    double largest = 0.0;
    for (int64_t i = 0; i < count; i++) {
        largest = fabs(x[i]) <= largest ? largest : fabs(x[i]);
        if (isnan(largest)) {
            return largest;
        }
    }
    return largest;
}

/* a = (I - 2 u u') a (I - 2 u u') for a unit vector u: a - u z' - z u' with z = 2 (y - (u' y) u), y = a u. */
static void reflect(int64_t n, double *a, const double *u, double *z)
{
    double along = 0.0;
    for (int64_t i = 0; i < n; i++) {
        z[i] = 0.0;
        for (int64_t j = 0; j < n; j++) {
            z[i] += a[i * n + j] * u[j];
        }
        along += u[i] * z[i];
    }
    for (int64_t i = 0; i < n; i++) {
        z[i] = 2.0 * (z[i] - along * u[i]);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < n; j++) {
            a[i * n + j] -= u[i] * z[j] + z[i] * u[j];
        }
    }
}

void ref_symmetric(test_random *random, int64_t n, const double *w, double *a)
{
    double *u = test_alloc((size_t)n * sizeof *u);
    double *z = test_alloc((size_t)n * sizeof *z);
    memset(a, 0, (size_t)(n * n) * sizeof *a);
    for (int64_t i = 0; i < n; i++) {
        a[i * n + i] = w[i];
    }
    for (int reflection = 0; reflection < 3; reflection++) {
        test_random_fill_normal(random, u, n);
        double norm = ref_norm(n, u);
        for (int64_t i = 0; i < n; i++) {
            u[i] /= norm;
        }
        reflect(n, a, u, z);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            a[j * n + i] = a[i * n + j];
        }
    }
    test_drop(u);
    test_drop(z);
}

void ref_spectrum(int64_t n, double condition, double *w)
{
    for (int64_t i = 0; i < n; i++) {
        w[i] = n > 1 ? pow(condition, -(double)i / (double)(n - 1)) : 1.0;
    }
}

void ref_schulz_step(int64_t n, int64_t m, const double c[3], double *x)
{
    double *t = test_alloc((size_t)(n * m) * sizeof *t);
    double *gram = test_alloc((size_t)(n * n) * sizeof *gram);
    double *once = test_alloc((size_t)(n * m) * sizeof *once);
    double *twice = test_alloc((size_t)(n * m) * sizeof *twice);
    ref_transpose(n, m, x, t);
    ref_matmul(n, m, n, x, t, gram);
    ref_matmul(n, n, m, gram, x, once);
    ref_matmul(n, n, m, gram, once, twice);
    for (int64_t i = 0; i < n * m; i++) {
        x[i] = c[0] * x[i] + c[1] * once[i] + c[2] * twice[i];
    }
    test_drop(t);
    test_drop(gram);
    test_drop(once);
    test_drop(twice);
}

/* --- minimax steps of orthogonalization -------------------------------------------------------------------------- */

/* P(Y) X / top with Y = X X' / top^2 and P = t2 A^2 + t1 Y + t0 I, where A = U or, if f is given, A = U^2 + f1 Y + f0
 * I, and U = Y^2 + u1 Y + u0 I. Expanded, the polynomials would lose six digits. */
typedef struct long_polynomial {
    double top, u[2], f[2], t[3];
} long_polynomial;

static const long_polynomial long_polynomials[] = {
    {1.0, {0.1741972, -1.073597}, {-0.008994106, 0.004077704}, {0.274108, 0.0, 60242.94}},
    {2.00185, {0.1917662, -1.103001}, {-0.01043446, 0.006585975}, {1.025102, 0.0, 30596.31}},
    {1.71889, {0.3180031, -1.235464}, {0.0, 0.0}, {1.9062, -1.078413, 40.38145}},
};

double ref_long_slope(int number)
{
    const long_polynomial *p = &long_polynomials[number];
    double a = number < 2 ? p->u[0] * p->u[0] + p->f[0] : p->u[0];
    return (p->t[2] * a * a + p->t[0]) / p->top;
}

/* out = c2 A^2 + c1 Y + c0 I */
static void square_and_add(int64_t n, const double *a, const double *y, const double c[2], double c2, double *out)
{
    ref_matmul(n, n, n, a, a, out);
    for (int64_t i = 0; i < n * n; i++) {
        out[i] = c2 * out[i] + c[1] * y[i] + (i / n == i % n ? c[0] : 0.0);
    }
}

void ref_long_step(int number, int64_t n, int64_t m, double *x)
{
    const long_polynomial *p = &long_polynomials[number];
    double *t = test_alloc((size_t)(n * m) * sizeof *t);
    double *y = test_alloc((size_t)(n * n) * sizeof *y);
    double *a = test_alloc((size_t)(n * n) * sizeof *a);
    double *b = test_alloc((size_t)(n * n) * sizeof *b);
    for (int64_t i = 0; i < n * m; i++) {
        x[i] /= p->top;
    }
    ref_transpose(n, m, x, t);
    ref_matmul(n, m, n, x, t, y);
    square_and_add(n, y, y, p->u, 1.0, a);
    if (number < 2) {
        square_and_add(n, a, y, p->f, 1.0, b);
        memcpy(a, b, (size_t)(n * n) * sizeof *a);
    }
    square_and_add(n, a, y, p->t, p->t[2], b);
    ref_matmul(n, n, m, b, x, t);
    memcpy(x, t, (size_t)(n * m) * sizeof *x);
    test_drop(t);
    test_drop(y);
    test_drop(a);
    test_drop(b);
}

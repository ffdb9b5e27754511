/* Entries of the operation table for bases and roots: Cholesky factors and their inverses, dot products of rows, and
 * orders. Sizes are small, so that an emulated device also runs their kernels. */
#include <float.h>

#include "support/backend/device_matrices.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

static const tch_scalar types[] = {TCH_SCALAR_F32, TCH_SCALAR_F64};

/* Skipped on an emulated device. */
static bool is_left_out(int64_t n)
{
    return n > 140 && device_is_emulated();
}

/* --- the inverse Cholesky factor --------------------------------------------------------------------------------- */

enum { CHOLESKY_BATCH = 4, NEGATIVE = 1, FLAGGED = 2, HAS_NAN = 3 };

/* Largest |X A X' - I|; X must have a positive diagonal and, within diagonal blocks, zeros above it, and is read as
 * lower triangular. */
static double factor_residual(int64_t n, double *x, const double *a)
{
    double *xa = test_alloc((size_t)(n * n) * sizeof *xa);
    double *xt = test_alloc((size_t)(n * n) * sizeof *xt);
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    for (int64_t k = 0; k < n * n; k++) {
        x[k] = k % n / TCH_LOWER_BLOCK > k / n / TCH_LOWER_BLOCK ? 0.0 : x[k];
        CHECK(k % n <= k / n || x[k] == 0.0, "X(%lld, %lld) is %g", (long long)(k / n), (long long)(k % n), x[k]);
        CHECK(k % (n + 1) != 0 || x[k] > 0.0, "the diagonal of X has %g", x[k]);
    }
    ref_matmul(n, n, n, x, a, xa);
    ref_transpose(n, n, x, xt);
    ref_matmul(n, n, n, xa, xt, product);
    for (int64_t i = 0; i < n; i++) {
        product[i * n + i] -= 1.0;
    }
    return ref_largest(n * n, product);
}

/* Overwrites A by its factor or the inverse of that, and sets the flags. */
static double *factor_on_device(tch_context *context, tch_scalar type, int64_t n, int64_t gap, int32_t inverse,
                                const double *a, int32_t *flags)
{
    const tch_backend *t = context->backend;
    tch_matrices m = device_matrices(context, type, CHOLESKY_BATCH, n, n, gap, a);
    tch_matrices x = device_matrices(context, type, CHOLESKY_BATCH, n, n, gap, NULL);
    int64_t bytes =
        inverse ? t->device->scratch_bytes(context->state, TCH_SCRATCH_CHOLESKY_INVERSE, type, n, n, CHOLESKY_BATCH, 0)
                : CHOLESKY_BATCH * m.stride * (int64_t)sizeof(double);
    int64_t flag_bytes = CHOLESKY_BATCH * (int64_t)sizeof *flags;
    void *scratch = device_poison(context, bytes);
    int32_t *device_flags = device_copy(context, flags, flag_bytes);
    CHECK_OK(t->matrix->cholesky(context->state, &m, inverse, &x, device_flags, scratch));
    memcpy(flags, device_integers(context, device_flags, CHOLESKY_BATCH), (size_t)flag_bytes);
    double *values = device_values(context, &x);
    return values;
}

static void check_flags(const int32_t *flags)
{
    assert_int_equal(flags[0], TCH_REPORT_OK);
    assert_int_equal(flags[NEGATIVE], TCH_REPORT_NOT_POSITIVE);
    assert_int_equal(flags[FLAGGED], TCH_REPORT_NO_CONVERGENCE);
    assert_int_equal(flags[HAS_NAN], TCH_REPORT_NOT_POSITIVE);
}

/* Condition 10, so that |X A X' - I| <= c n u with a small c. */
static void inverse_case(tch_context *context, tch_scalar type, int64_t n, int64_t gap)
{
    test_random random = test_random_stream((uint64_t)(1000 * n + gap));
    double *w = test_alloc((size_t)n * sizeof *w);
    double *a = test_alloc((size_t)(CHOLESKY_BATCH * n * n) * sizeof *a);
    int32_t flags[CHOLESKY_BATCH] = {TCH_REPORT_OK, TCH_REPORT_OK, TCH_REPORT_NO_CONVERGENCE, TCH_REPORT_OK};
    ref_spectrum(n, 10.0, w);
    for (int b = 0; b < CHOLESKY_BATCH; b++) {
        ref_symmetric(&random, n, w, a + b * n * n);
    }
    a[(NEGATIVE + 1) * n * n - 1] = -1.0;
    a[HAS_NAN * n * n + n / 2 * (n + 1)] = NAN;
    device_round(type, CHOLESKY_BATCH * n * n, a);
    double *x = factor_on_device(context, type, n, gap, 1, a, flags);
    check_flags(flags);
    double residual = factor_residual(n, x, a);
    CHECK(residual <= 10.0 * (double)n * device_roundoff(type), "|X A X' - I| is %.3g", residual);
}

TEST(factors_are_inverted)
{
    static const int64_t sizes[] = {1,  2,  3,   15,  16,  17,  20,  31,  33,  48,  63, 64,
                                    65, 77, 100, 127, 128, 129, 140, 200, 257, 330, 577};
    for (int k = 0; k < 2 * 2 * (int)TEST_COUNT(sizes); k++) {
        int64_t n = sizes[k / 4];
        test_case("%s n %lld gap %d", device_type_name(types[k % 2]), (long long)n, k / 2 % 2 * 3);
        if (!is_left_out(n)) {
            inverse_case(*state, types[k % 2], n, k / 2 % 2 * 3);
        }
    }
}

/* V V' / n + 1e-6 I with n / 4 columns in V: most eigenvalues are 1e-6. The last eigenvalue of the second matrix is
 * negative. */
static void fill_nearly_singular(int64_t n, double *a)
{
    int64_t rank = n / 4 + 1;
    test_random random = test_random_stream(5);
    double *v = test_alloc((size_t)(n * rank) * sizeof *v);
    for (int64_t m = 0; m < CHOLESKY_BATCH; m++) {
        test_random_fill_normal(&random, v, n * rank);
        for (int64_t i = 0; i < n * n; i++) {
            double sum = i % (n + 1) != 0                  ? 0.0
                         : i == n * n - 1 && m == NEGATIVE ? -10.0 * (double)n
                                                           : 1e-6 * (double)n;
            for (int64_t k = 0; k < rank; k++) {
                sum += v[i / n * rank + k] * v[i % n * rank + k];
            }
            a[m * n * n + i] = sum / (double)n;
        }
    }
    a[HAS_NAN * n * n + n / 2 * (n + 1)] = NAN;
}

/* L is computed from inverses of its blocks, so rounding errors are magnified by the square root of the condition
 * number. */
static void check_factor(int64_t n, const double *l, const double *a)
{
    double largest = 1e-6; /* the smallest eigenvalue */
    for (int64_t i = 0; i < n; i++) {
        largest = fmax(largest, a[i * (n + 1)]);
    }
    double allowed = (double)n * DBL_EPSILON / 2 * sqrt(largest / 1e-6);
    for (int64_t e = 0; e < n * n; e++) {
        int64_t i = e / n;
        int64_t j = e % n;
        double sum = -a[e];
        for (int64_t k = 0; k <= j && j <= i; k++) {
            sum += l[i * n + k] * l[j * n + k];
        }
        CHECK(j > i || fabs(sum) <= allowed * largest, "L L' is off by %.3g at (%lld, %lld), of %.3g", sum,
              (long long)i, (long long)j, largest);
        bool right = j / TCH_CHOLESKY_BLOCK > i / TCH_CHOLESKY_BLOCK;
        CHECK(!right || isnan(l[e]) || l[e] == 0.0, "(%lld, %lld) was written", (long long)i, (long long)j);
        CHECK(j <= i || right || fabs(l[e]) <= allowed * sqrt(largest), "(%lld, %lld) above the diagonal is %g",
              (long long)i, (long long)j, l[e]);
    }
}

/* Sizes around those of leaves and bands, also on an emulated device. */
TEST(factors_of_float64_are_found)
{
    static const int64_t sizes[] = {1, 20, 128, 129, 257, 512, 530};
    for (size_t i = 0; i < TEST_COUNT(sizes); i++) {
        int64_t n = sizes[i];
        int32_t flags[CHOLESKY_BATCH] = {TCH_REPORT_OK, TCH_REPORT_OK, TCH_REPORT_NO_CONVERGENCE, TCH_REPORT_OK};
        double *a = test_alloc((size_t)(CHOLESKY_BATCH * n * n) * sizeof *a);
        test_case("%lld by %lld", (long long)n, (long long)n);
        fill_nearly_singular(n, a);
        double *l = factor_on_device(*state, TCH_SCALAR_F64, n, i % 2 == 0 ? 3 : 1, 0, a, flags);
        check_flags(flags);
        check_factor(n, l, a);
    }
}

/* --- dot products of rows ---------------------------------------------------------------------------------------- */

enum { BATCH = 3 };

static void dots_case(tch_context *context, tch_scalar type, int64_t rows, int64_t cols, double exponent)
{
    test_random random = test_random_stream((uint64_t)(rows * 7919 + cols));
    int64_t count = BATCH * rows * cols;
    double *x = test_alloc((size_t)count * sizeof *x + 1);
    double *y = test_alloc((size_t)count * sizeof *y + 1);
    test_random_fill_normal(&random, x, count);
    for (int64_t k = 0; k < count; k++) {
        y[k] = exponent == 1.0 ? test_random_normal(&random) : k / cols % 4 == 3 ? -x[k] : x[k];
    }
    device_round(type, count, x);
    device_round(type, count, y);
    tch_matrices mx = device_matrices(context, type, BATCH, rows, cols, 1, x);
    tch_matrices my = device_matrices(context, type, BATCH, rows, cols, 2, y);
    tch_matrices w = device_matrices(context, type, BATCH, 1, rows, 0, NULL);
    CHECK_OK(context->backend->matrix->row_dots(context->state, &mx, &my, exponent, &w));
    double *got = device_values(context, &w);
    for (int64_t r = 0; r < BATCH * rows; r++) {
        double sum = 0.0, size = 0.0;
        for (int64_t k = r * cols; k < (r + 1) * cols; k++) {
            sum += x[k] * y[k];
            size += fabs(x[k] * y[k]);
        }
        double expected = exponent == 1.0 ? sum : sum > 0.0 ? pow(sum, exponent) : 0.0;
        double bound = device_roundoff(type) * fabs(expected) +
                       (double)(cols + 4) * DBL_EPSILON * (exponent == 1.0 ? size : fabs(expected));
        CHECK(fabs(got[r] - expected) <= bound, "row %lld: %.17g, expected %.17g", (long long)r, got[r], expected);
    }
}

TEST(rows_are_multiplied)
{
    static const int64_t sizes[] = {0, 1, 2, 5, 31, 64, 129, 300};
    static const double exponents[] = {1.0, -0.5, 0.5};
    for (int k = 0; k < 8 * 8 * 3 * 2; k++) {
        int64_t rows = sizes[k % 8];
        int64_t cols = sizes[k / 8 % 8];
        double exponent = exponents[k / 64 % 3];
        test_case("%s %lld by %lld, exponent %g", device_type_name(types[k / 192]), (long long)rows, (long long)cols,
                  exponent);
        if (!is_left_out(rows) && !is_left_out(cols)) {
            dots_case(*state, types[k / 192], rows, cols, exponent);
        }
    }
}

/* --- orders ------------------------------------------------------------------------------------------------------ */

static int stands_before(const double *w, int32_t i, int32_t j)
{
    if (isnan(w[i]) != isnan(w[j])) {
        return isnan(w[j]);
    }
    return isnan(w[i]) || w[i] == w[j] ? i < j : w[i] > w[j];
}

/* Few distinct numbers, so that most have duplicates, and all special values. */
static double awkward(test_random *random)
{
    static const double special[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e-30, -1e-30, 1e30, 1.0, 2.0, -2.0, 3.0};
    return special[test_random_bits(random) % (sizeof special / sizeof special[0])];
}

static int32_t *make_order(tch_context *context, tch_scalar type, int64_t n, double *w)
{
    int64_t bytes = BATCH * n * (int64_t)sizeof(int32_t);
    int32_t *order = device_poison(context, bytes);
    device_round(type, BATCH * n, w);
    tch_matrices m = device_matrices(context, type, BATCH, 1, n, 2, w);
    CHECK_OK(context->backend->matrix->descending(context->state, &m, NULL, order));
    return order;
}

/* Of the second matrix only. */
static void check_reset(tch_context *context, int64_t n, int32_t *device, const int32_t *before)
{
    static const int32_t flags[BATCH] = {TCH_REPORT_OK, TCH_REPORT_NOT_POSITIVE, TCH_REPORT_OK};
    int32_t *device_flags = device_copy(context, flags, sizeof flags);
    tch_matrices sizes = {NULL, TCH_SCALAR_F32, 1, n, n, BATCH, n};
    CHECK_OK(context->backend->matrix->descending(context->state, &sizes, device_flags, device));
    int32_t *order = device_integers(context, device, BATCH * n);
    for (int64_t k = 0; k < BATCH * n; k++) {
        CHECK(order[k] == (k / n == 1 ? k % n : before[k]), "place %lld has %d after a reset", (long long)k, order[k]);
    }
}

static void order_case(tch_context *context, tch_scalar type, int64_t n)
{
    test_random random = test_random_stream((uint64_t)(50000 + n));
    double *w = test_alloc((size_t)(BATCH * n) * sizeof *w + 1);
    for (int64_t k = 0; k < BATCH * n; k++) {
        w[k] = k < n ? test_random_normal(&random) : awkward(&random);
    }
    int32_t *device = make_order(context, type, n, w);
    int32_t *order = device_integers(context, device, BATCH * n);
    for (int64_t k = 0; k < BATCH * n; k++) {
        CHECK(order[k] >= 0 && order[k] < n, "place %lld has %d", (long long)k, order[k]);
        CHECK(k % n == 0 || stands_before(w + k / n * n, order[k - 1], order[k]), "places %lld and %lld are exchanged",
              (long long)(k - 1), (long long)k);
    }
    check_reset(context, n, device, order);
}

static void permute_case(tch_context *context, tch_scalar type, tch_scalar result, int64_t rows, int64_t cols,
                         bool by_rows, bool by_cols)
{
    test_random random = test_random_stream((uint64_t)(90000 + 1000 * rows + cols));
    int64_t count = BATCH * rows * cols;
    double *x = test_alloc((size_t)count * sizeof *x);
    double *w = test_alloc((size_t)(BATCH * (rows + cols)) * sizeof *w);
    test_random_fill_normal(&random, x, count);
    test_random_fill_normal(&random, w, BATCH * (rows + cols));
    device_round(type, count, x);
    int32_t *row_order = make_order(context, type, rows, w);
    int32_t *col_order = make_order(context, type, cols, w + BATCH * rows);
    tch_matrices m = device_matrices(context, type, BATCH, rows, cols, cols % 4 == 0 ? 8 : 3, x);
    tch_matrices out = device_matrices(context, result, BATCH, rows, cols, cols % 4 == 0 ? 4 : 1, NULL);
    CHECK_OK(context->backend->matrix->permute(context->state, &m, by_rows ? row_order : NULL,
                                               by_cols ? col_order : NULL, &out));
    double *got = device_values(context, &out);
    int32_t *row = device_integers(context, row_order, BATCH * rows);
    int32_t *col = device_integers(context, col_order, BATCH * cols);
    for (int64_t k = 0; k < count; k++) {
        int64_t b = k / (rows * cols);
        int64_t i = by_rows ? row[k / cols] : k / cols % rows;
        int64_t j = by_cols ? col[b * cols + k % cols] : k % cols;
        CHECK(got[k] == x[(b * rows + i) * cols + j], "element %lld is not that of row %lld, column %lld", (long long)k,
              (long long)i, (long long)j);
    }
}

TEST(numbers_are_put_in_order)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 255, 256, 257, 1000};
    for (size_t i = 0; i < 2 * TEST_COUNT(sizes); i++) {
        test_case("%s n %lld", device_type_name(types[i % 2]), (long long)sizes[i / 2]);
        order_case(*state, types[i % 2], sizes[i / 2]);
    }
}

/* Aligned and unaligned rows, fewer and more of them than a block handles. */
TEST(matrices_are_put_in_order)
{
    static const int64_t sizes[] = {1, 2, 5, 33, 130, 1032};
    for (int k = 0; k < 6 * 6 * 4 * 3; k++) {
        tch_scalar type = types[k / 144 == 1];
        tch_scalar result = types[k / 144 > 0]; /* the third case reads float32 as float64 */
        int64_t rows = sizes[k % 6];
        int64_t cols = sizes[k / 6 % 6];
        test_case("%s to %s, %lld by %lld, kind %d", device_type_name(type), device_type_name(result), (long long)rows,
                  (long long)cols, k / 36 % 4);
        if (rows * cols < 10000) {
            permute_case(*state, type, result, rows, cols, k / 36 % 2 == 1, k / 72 % 2 == 1);
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)

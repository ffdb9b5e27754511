/* Kronecker algebra vs explicit products in float64.
 *
 * A Kronecker product has one multiplication per element: exact up to one rounding. Sums obey the bound of
 * test_conformance_products.c with the lengths of both sums added. The solve is checked by its residual: with A' and B'
 * the damped factors, two stable solves leave |A' Y B' - X| <= (m + n + 20) u |A'| |Y| |B'|. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

static double *absolute(const double *x, int64_t count)
{
    double *y = test_alloc((size_t)count * sizeof *y);
    for (int64_t i = 0; i < count; i++) {
        y[i] = fabs(x[i]);
    }
    return y;
}

/* --- product ----------------------------------------------------------------------------------------------------- */

static void check_product_of(tch_context *context, const test_variation *v, tch_dtype dtype, const int64_t *dims)
{
    int64_t m = dims[0];
    int64_t n = dims[1];
    int64_t p = dims[2];
    int64_t q = dims[3];
    int64_t size = m * n * p * q;
    test_tensor *a = test_case_random(context, v, dtype, m, n, v->in, 21);
    test_tensor *b = test_case_random(context, v, dtype, p, q, v->in, 22);
    test_tensor *out = test_case_tensor(context, v, dtype, m * p, n * q, v->out);
    CHECK_OK(tch_kronecker_product(context, &a->tensor, &b->tensor, &out->tensor));
    double *x = test_tensor_read_unchanged(a, "a");
    double *y = test_tensor_read_unchanged(b, "b");
    double *z = test_tensor_read_written(out, "out");
    double *expected = test_alloc((size_t)size * sizeof *expected);
    for (int64_t i = 0; i < v->matrices; i++) {
        ref_kronecker(m, n, x + i * m * n, p, q, y + i * p * q, expected);
        for (int64_t j = 0; j < size; j++) {
            double error = fabs(z[i * size + j] - expected[j]);
            CHECK(error <= test_unit_roundoff(dtype) * 1.0001 * fabs(expected[j]) + test_underflow(dtype),
                  "element %lld is %.17g, expected %.17g", (long long)j, z[i * size + j], expected[j]);
        }
    }
}

static void check_product(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    check_product_of(context, v, dtype, (const int64_t[]){v->n, v->k, 3, 2});
    check_product_of(context, v, dtype, (const int64_t[]){2, 3, v->k, v->n});
    check_product_of(context, v, dtype, (const int64_t[]){1, 5, v->n, 1});
}

/* --- product without the explicit matrix ------------------------------------------------------------------------- */

static void check_one_matmul(const int64_t *d, int64_t r, const double *a, const double *b, const double *x,
                             const double *got, tch_dtype dtype)
{
    int64_t rows = d[0] * d[2];
    int64_t cols = d[1] * d[3];
    double *formed = test_alloc((size_t)(rows * cols) * sizeof *formed);
    double *expected = test_alloc((size_t)(rows * r) * sizeof *expected);
    double *magnitude = test_alloc((size_t)(rows * r) * sizeof *magnitude);
    ref_kronecker(d[0], d[1], a, d[2], d[3], b, formed);
    ref_matmul(rows, cols, r, formed, x, expected);
    ref_matmul_abs(rows, cols, r, formed, x, magnitude);
    ref_check_sums(got, expected, magnitude, rows * r, d[1] + d[3] + 8, dtype);
}

static void check_matmul_of(tch_context *context, const test_variation *v, tch_dtype dtype, const int64_t *d, int64_t r)
{
    test_tensor *a = test_case_random(context, v, dtype, d[0], d[1], v->in, 23);
    test_tensor *b = test_case_random(context, v, dtype, d[2], d[3], v->in, 24);
    test_tensor *x = test_case_random(context, v, dtype, d[1] * d[3], r, v->in, 25);
    test_tensor *out = test_case_tensor(context, v, dtype, d[0] * d[2], r, v->out);
    CHECK_OK(tch_kronecker_matmul(context, &a->tensor, &b->tensor, &x->tensor, &out->tensor));
    double *av = test_tensor_read_unchanged(a, "a");
    double *bv = test_tensor_read_unchanged(b, "b");
    double *xv = test_tensor_read_unchanged(x, "x");
    double *got = test_tensor_read_written(out, "out");
    for (int64_t i = 0; i < v->matrices; i++) {
        check_one_matmul(d, r, av + i * d[0] * d[1], bv + i * d[2] * d[3], xv + i * d[1] * d[3] * r,
                         got + i * d[0] * d[2] * r, dtype);
    }
}

static void check_matmul(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    check_matmul_of(context, v, dtype, (const int64_t[]){v->n, v->k, 3, 2}, v->m);
    check_matmul_of(context, v, dtype, (const int64_t[]){2, 3, v->k, v->n}, 1);
}

static void check_one_apply(const test_variation *v, int64_t p, const double *a, const double *b, const double *x,
                            const double *got, tch_dtype dtype)
{
    double *middle = test_alloc((size_t)(v->n * v->m) * sizeof *middle);
    double *transposed = test_alloc((size_t)(v->m * p) * sizeof *transposed);
    double *expected = test_alloc((size_t)(v->n * p) * sizeof *expected);
    double *magnitude = test_alloc((size_t)(v->n * p) * sizeof *magnitude);
    double *x_abs = absolute(x, v->k * v->m);
    ref_transpose(p, v->m, b, transposed);
    ref_matmul(v->n, v->k, v->m, a, x, middle);
    ref_matmul(v->n, v->m, p, middle, transposed, expected);
    ref_matmul_abs(v->n, v->k, v->m, a, x_abs, middle);
    ref_matmul_abs(v->n, v->m, p, middle, transposed, magnitude);
    ref_check_sums(got, expected, magnitude, v->n * p, v->k + v->m + 8, dtype);
}

static void check_apply(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    const int64_t p = v->n % 7 + 1;
    test_tensor *a = test_case_random(context, v, dtype, v->n, v->k, v->in, 26);
    test_tensor *b = test_case_random(context, v, dtype, p, v->m, v->in, 27);
    test_tensor *x = test_case_random(context, v, dtype, v->k, v->m, v->in, 28);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, p, v->out);
    CHECK_OK(tch_kronecker_apply(context, &a->tensor, &b->tensor, &x->tensor, &out->tensor));
    double *av = test_tensor_read_unchanged(a, "a");
    double *bv = test_tensor_read_unchanged(b, "b");
    double *xv = test_tensor_read_unchanged(x, "x");
    double *got = test_tensor_read_written(out, "out");
    for (int64_t i = 0; i < v->matrices; i++) {
        check_one_apply(v, p, av + i * v->n * v->k, bv + i * p * v->m, xv + i * v->k * v->m, got + i * v->n * p, dtype);
    }
}

/* One or both factors without a batch are broadcast over the batch. */
static void check_shared(tch_context *context, tch_dtype dtype, bool share_a, bool share_b)
{
    const test_variation one = {.n = 4, .k = 3, .m = 5, .matrices = 1, .stream = 3};
    const test_variation many = {.n = 4, .k = 3, .m = 5, .batch_rank = 2, .batch = {2, 2}, .matrices = 4, .stream = 4};
    const int64_t d[] = {4, 3, 2, 5};
    test_tensor *a = test_case_random(context, share_a ? &one : &many, dtype, 4, 3, LAYOUT_ROW_GAPS, 41);
    test_tensor *b = test_case_random(context, share_b ? &one : &many, dtype, 2, 5, LAYOUT_TRANSPOSED, 42);
    test_tensor *x = test_case_random(context, &many, dtype, 3, 5, LAYOUT_BATCH_GAPS, 43);
    test_tensor *y = test_case_random(context, &many, dtype, 15, 6, LAYOUT_CONTIGUOUS, 44);
    test_tensor *applied = test_case_tensor(context, &many, dtype, 4, 2, LAYOUT_OFFSET);
    test_tensor *multiplied = test_case_tensor(context, &many, dtype, 8, 6, LAYOUT_STEPPED);
    CHECK_OK(tch_kronecker_apply(context, &a->tensor, &b->tensor, &x->tensor, &applied->tensor));
    CHECK_OK(tch_kronecker_matmul(context, &a->tensor, &b->tensor, &y->tensor, &multiplied->tensor));
    test_tensor_check_written(applied, "out of apply");
    test_tensor_check_written(multiplied, "out of matmul");
    test_tensor *tensors[] = {a, b, x, y, applied, multiplied};
    double *values[6];
    for (int i = 0; i < 6; i++) {
        values[i] = test_tensor_read(tensors[i]);
    }
    for (int64_t i = 0; i < 4; i++) {
        const double *one_a = values[0] + (share_a ? 0 : i * 12);
        const double *one_b = values[1] + (share_b ? 0 : i * 10);
        check_one_apply(&many, 2, one_a, one_b, values[2] + i * 15, values[4] + i * 8, dtype);
        check_one_matmul(d, 6, one_a, one_b, values[3] + i * 90, values[5] + i * 48, dtype);
    }
}

/* --- solve ------------------------------------------------------------------------------------------------------- */

static double *shifted(int64_t n, const double *a, double shift)
{
    double *result = test_alloc((size_t)(n * n) * sizeof *result);
    memcpy(result, a, (size_t)(n * n) * sizeof *result);
    for (int64_t i = 0; i < n; i++) {
        result[i * n + i] += shift;
    }
    return result;
}

/* A' out B' = X, with the factored damping of the header. */
static void check_one_solve(const known_matrix *a, const known_matrix *b, const double *x, double damping,
                            const double *got, tch_dtype dtype)
{
    int64_t m = a->n;
    int64_t n = b->n;
    double ratio = sqrt(ref_trace(m, a->a) / (double)m / (ref_trace(n, b->a) / (double)n));
    double *left = shifted(m, a->a, ratio * sqrt(damping));
    double *right = shifted(n, b->a, sqrt(damping) / ratio);
    double *middle = test_alloc((size_t)(m * n) * sizeof *middle);
    double *product = test_alloc((size_t)(m * n) * sizeof *product);
    ref_matmul(m, m, n, left, got, middle);
    ref_matmul(m, n, n, middle, right, product);
    double error = ref_distance(m * n, product, x);
    double norms = (a->w[m - 1] + ratio * sqrt(damping)) * ref_norm(m * n, got) * (b->w[n - 1] + sqrt(damping) / ratio);
    double bound = ((double)(m + n + 20) * test_arithmetic_roundoff(dtype) + test_storage_roundoff(dtype)) * norms;
    CHECK(error <= bound, "|A' Y B' - X| is %.3g > %.3g", error, bound);
}

/* A is of size n, B of size k. */
static void check_solve(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    const double damping = 1e-2;
    const double condition = dtype.bits == 16 ? 10.0 : 100.0;
    test_variation other = *v;
    other.n = v->k;
    other.in = LAYOUT_CONTIGUOUS;
    test_tensor *a = test_known_tensor(context, v, condition, dtype);
    test_tensor *b = test_known_tensor(context, &other, condition, dtype);
    test_tensor *x = test_case_random(context, v, dtype, v->n, v->k, v->in, 29);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->k, v->out);
    test_tensor *report = test_case_tensor(context, v, TCH_INT32, -1, -1, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_kronecker_solve(context, &a->tensor, &b->tensor, &x->tensor, damping, &out->tensor, &report->tensor));
    test_tensor_check_unchanged(a, "a");
    test_tensor_check_unchanged(b, "b");
    double *xv = test_tensor_read_unchanged(x, "x");
    double *got = test_tensor_read_written(out, "out");
    test_check_report_ok(report);
    for (int64_t i = 0; i < v->matrices; i++) {
        check_one_solve(test_known_of(v, i, condition, dtype), test_known_of(&other, i, condition, dtype),
                        xv + i * v->n * v->k, damping, got + i * v->n * v->k, dtype);
    }
}

/* --- nearest Kronecker product ----------------------------------------------------------------------------------- */

/* Entry (i, j) of block (k, l) of M goes to row (k, l), column (i, j): a Kronecker product becomes a rank-one matrix,
 * and the nearest one belongs to the largest singular value. */
static double *rearranged(const int64_t *d, const double *m)
{
    int64_t blocks = d[0] * d[1];
    int64_t size = d[2] * d[3];
    double *r = test_alloc((size_t)(blocks * size) * sizeof *r);
    for (int64_t i = 0; i < blocks * size; i++) {
        int64_t block = i / size;
        int64_t entry = i % size;
        int64_t row = block / d[1] * d[2] + entry / d[3];
        int64_t col = block % d[1] * d[3] + entry % d[3];
        r[i] = m[row * d[1] * d[3] + col];
    }
    return r;
}

/* The minimum of |M - A (x) B|. */
static double least_distance(const int64_t *d, const double *m)
{
    int64_t rows = d[0] * d[1];
    int64_t cols = d[2] * d[3];
    double *r = rearranged(d, m);
    double *t = test_alloc((size_t)(rows * cols) * sizeof *t);
    double *gram = test_alloc((size_t)(rows * rows) * sizeof *gram);
    double *w = test_alloc((size_t)rows * sizeof *w);
    double *v = test_alloc((size_t)(rows * rows) * sizeof *v);
    ref_transpose(rows, cols, r, t);
    ref_matmul(rows, cols, rows, r, t, gram);
    ref_eigh(rows, gram, w, v);
    double rest = 0.0;
    for (int64_t i = 0; i + 1 < rows; i++) {
        rest += fmax(w[i], 0.0);
    }
    return sqrt(rest);
}

/* A's largest entry is positive; entries of opposite sign may have equal magnitude after rounding. */
static void check_sign(const double *a, int64_t count, tch_dtype dtype)
{
    double most = a[0];
    for (int64_t i = 1; i < count; i++) {
        most = fmax(most, a[i]);
    }
    CHECK(most >= (1.0 - 2.0 * test_unit_roundoff(dtype)) * ref_largest(count, a), "the largest entries are %g and %g",
          most, -ref_largest(count, a));
}

/* The distance may exceed the minimum by rounding only, |M| (n + 10) u; the optimum is flat, so an error of the factors
 * enters squared. */
static void check_nearest_one(const int64_t *d, const double *m, const double *a, const double *b, double error,
                              tch_dtype dtype)
{
    int64_t size = d[0] * d[1] * d[2] * d[3];
    double *formed = test_alloc((size_t)size * sizeof *formed);
    double norm = ref_norm(size, m);
    ref_kronecker(d[0], d[1], a, d[2], d[3], b, formed);
    double distance = ref_distance(size, m, formed);
    double least = least_distance(d, m);
    double rounding = ((double)(d[0] * d[1] + d[2] * d[3] + 10) * test_arithmetic_roundoff(dtype) +
                       2.0 * test_storage_roundoff(dtype)) *
                      norm;
    CHECK(distance <= least + rounding, "|M - A (x) B| is %.9g, possible is %.9g", distance, least);
    CHECK(fabs(error * norm - distance) <= rounding, "the error is given as %.9g and is %.9g", error, distance / norm);
    double norm_a = ref_norm(d[0] * d[1], a);
    double norm_b = ref_norm(d[2] * d[3], b);
    double slack = (double)(size + 10) * test_arithmetic_roundoff(dtype) + 2.0 * test_storage_roundoff(dtype);
    CHECK(fabs(norm_a - norm_b) <= slack * norm_a, "the norms are %.9g and %.9g", norm_a, norm_b);
    check_sign(a, d[0] * d[1], dtype);
}

/* A Kronecker product of random factors with 10 % noise. */
static void fill_nearly_kronecker(test_tensor *m, const int64_t *d, const test_variation *v)
{
    int64_t size = d[0] * d[1] * d[2] * d[3];
    double *values = test_alloc((size_t)m->count * sizeof *values);
    double *a = test_alloc((size_t)(d[0] * d[1]) * sizeof *a);
    double *b = test_alloc((size_t)(d[2] * d[3]) * sizeof *b);
    test_random random = test_random_stream(700 + v->stream);
    for (int64_t i = 0; i < v->matrices; i++) {
        test_random_fill_normal(&random, a, d[0] * d[1]);
        test_random_fill_normal(&random, b, d[2] * d[3]);
        ref_kronecker(d[0], d[1], a, d[2], d[3], b, values + i * size);
        for (int64_t j = 0; j < size; j++) {
            values[i * size + j] += 0.1 * test_random_normal(&random);
        }
    }
    test_tensor_write(m, values);
}

static void check_nearest_of(tch_context *context, const test_variation *v, tch_dtype dtype, const int64_t *d)
{
    int64_t size = d[0] * d[1] * d[2] * d[3];
    test_tensor *m = test_case_tensor(context, v, dtype, d[0] * d[2], d[1] * d[3], v->in);
    test_tensor *a = test_case_tensor(context, v, dtype, d[0], d[1], v->out);
    test_tensor *b = test_case_tensor(context, v, dtype, d[2], d[3], v->out);
    test_tensor *error = test_case_tensor(context, v, TCH_FLOAT64, -1, -1, LAYOUT_OFFSET);
    fill_nearly_kronecker(m, d, v);
    CHECK_OK(tch_nearest_kronecker(context, &m->tensor, &a->tensor, &b->tensor, &error->tensor));
    double *mv = test_tensor_read_unchanged(m, "m");
    double *av = test_tensor_read_written(a, "a");
    double *bv = test_tensor_read_written(b, "b");
    double *errors = test_tensor_read_written(error, "error");
    for (int64_t i = 0; i < v->matrices; i++) {
        check_nearest_one(d, mv + i * size, av + i * d[0] * d[1], bv + i * d[2] * d[3], errors[i], dtype);
    }
}

static void check_nearest(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    check_nearest_of(context, v, dtype, (const int64_t[]){2, 3, v->n, v->k});
    check_nearest_of(context, v, dtype, (const int64_t[]){v->n < 8 ? v->n : 8, 2, 3, 4});
}

/* A zero matrix is the product of zeros. */
TEST(zeros_are_products)
{
    const test_variation v = {.matrices = 1};
    const double zeros[120] = {0};
    double formed[120];
    test_case("a zero matrix");
    test_tensor *m = test_case_tensor(*state, &v, TCH_FLOAT64, 15, 8, LAYOUT_CONTIGUOUS);
    test_tensor *a = test_case_tensor(*state, &v, TCH_FLOAT64, 3, 4, LAYOUT_CONTIGUOUS);
    test_tensor *b = test_case_tensor(*state, &v, TCH_FLOAT64, 5, 2, LAYOUT_CONTIGUOUS);
    test_tensor *error = test_case_tensor(*state, &v, TCH_FLOAT64, -1, -1, LAYOUT_CONTIGUOUS);
    test_tensor_write(m, zeros);
    CHECK_OK(tch_nearest_kronecker(*state, &m->tensor, &a->tensor, &b->tensor, &error->tensor));
    double *e = test_tensor_read(error);
    ref_kronecker(3, 4, test_tensor_read(a), 5, 2, test_tensor_read(b), formed);
    CHECK(ref_norm(120, formed) == 0.0 && e[0] == 0.0, "the product is %g, the error %g", ref_norm(120, formed), e[0]);
}

/* --- the tests --------------------------------------------------------------------------------------------------- */

static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};

static const test_conformance operations[] = {
    {"kronecker_product", 200, 33, check_product}, {"kronecker_matmul", 129, 33, check_matmul},
    {"kronecker_apply", 200, 33, check_apply},     {"kronecker_solve", 129, 33, check_solve},
    {"nearest_kronecker", 65, 33, check_nearest},
};

TEST(every_layout_and_size)
{
    test_for_each_operation(*state, operations, TEST_COUNT(operations));
}

TEST(shared_factors)
{
    for (int d = 0; d < 4; d++) {
        for (int shared = 1; shared < 4; shared++) {
            test_case("shared%s%s, %s", shared & 1 ? " a" : "", shared & 2 ? " b" : "", tch_dtype_name(dtypes[d]));
            check_shared(*state, dtypes[d], (shared & 1) != 0, (shared & 2) != 0);
        }
    }
}

TEST_MAIN(test_open_context, test_close_known)

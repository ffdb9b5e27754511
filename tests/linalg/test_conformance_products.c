/* Products vs plain float64 sums, element by element; chunked ones are in test_streamed.c. A sum of k products in
 * arithmetic with unit roundoff u, in any order and with or without fused multiply-add, differs from the exact one by
 * at most gamma(k) |A||B| with gamma(k) = k u / (1 - k u); scaling, accumulation and the reference's own float64
 * rounding add a few u more. Half types are computed in float32 and rounded once, which adds one rounding of the
 * result. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

/* One matrix of the result vs alpha op(a) op(b) + beta before. */
static void check_product(double alpha, const double *a, const double *b, double beta, const double *before, int64_t n,
                          int64_t k, int64_t m, const double *got, tch_dtype dtype)
{
    double *expected = test_alloc((size_t)(n * m) * sizeof *expected);
    double *magnitude = test_alloc((size_t)(n * m) * sizeof *magnitude);
    ref_matmul(n, k, m, a, b, expected);
    ref_matmul_abs(n, k, m, a, b, magnitude);
    for (int64_t i = 0; i < n * m; i++) {
        double old = before != NULL ? beta * before[i] : 0.0;
        expected[i] = alpha * expected[i] + old;
        magnitude[i] = fabs(alpha) * magnitude[i] + fabs(old);
    }
    ref_check_sums(got, expected, magnitude, n * m, k + 4, dtype);
}

static void finish(test_tensor *a, test_tensor *b, test_tensor *out)
{
    test_tensor_check_unchanged(a, "a");
    if (b != NULL) {
        test_tensor_check_unchanged(b, "b");
    }
    test_tensor_check_written(out, "out");
}

static void check_matmul(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    test_tensor *a = test_case_random(context, v, dtype, v->n, v->k, v->in, 1);
    test_tensor *b = test_case_random(context, v, dtype, v->k, v->m, v->in == LAYOUT_EXPANDED ? v->out : v->in, 2);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->m, v->out);
    CHECK_OK(tch_matmul(context, &a->tensor, &b->tensor, &out->tensor));
    finish(a, b, out);
    double *x = test_tensor_read(a);
    double *y = test_tensor_read(b);
    double *z = test_tensor_read(out);
    for (int64_t i = 0; i < v->matrices; i++) {
        check_product(1.0, x + i * v->n * v->k, y + i * v->k * v->m, 0.0, NULL, v->n, v->k, v->m, z + i * v->n * v->m,
                      dtype);
    }
}

/* The four transpositions and accumulation, on the layouts of the case. */
static void check_gemm(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    const double alpha = -1.25;
    const double beta = 0.75;
    int which = (int)v->in + (int)v->out;
    int ta = which & 1;
    int tb = which >> 1 & 1;
    test_tensor *a = test_case_random(context, v, dtype, ta ? v->k : v->n, ta ? v->n : v->k, v->in, 3);
    test_tensor *b = test_case_random(context, v, dtype, tb ? v->m : v->k, tb ? v->k : v->m, LAYOUT_CONTIGUOUS, 4);
    test_tensor *out = test_case_random(context, v, dtype, v->n, v->m, v->out, 5);
    double *before = test_tensor_read(out);
    CHECK_OK(tch_gemm(context, alpha, &a->tensor, ta, &b->tensor, tb, beta, &out->tensor));
    finish(a, b, out);
    double *x = test_tensor_read(a);
    double *y = test_tensor_read(b);
    double *z = test_tensor_read(out);
    double *left = test_alloc((size_t)(v->n * v->k) * sizeof *left);
    double *right = test_alloc((size_t)(v->k * v->m) * sizeof *right);
    for (int64_t i = 0; i < v->matrices; i++) {
        memcpy(left, x + i * v->n * v->k, (size_t)(v->n * v->k) * sizeof *left);
        memcpy(right, y + i * v->k * v->m, (size_t)(v->k * v->m) * sizeof *right);
        if (ta) {
            ref_transpose(v->k, v->n, x + i * v->n * v->k, left);
        }
        if (tb) {
            ref_transpose(v->m, v->k, y + i * v->k * v->m, right);
        }
        check_product(alpha, left, right, beta, before + i * v->n * v->m, v->n, v->k, v->m, z + i * v->n * v->m, dtype);
    }
}

/* Element i of a batch of n by n matrices, mirrored at its matrix's diagonal. */
static int64_t mirrored(int64_t i, int64_t n)
{
    return i / (n * n) * n * n + i % n * n + i / n % n;
}

static bool is_above_the_diagonal(int64_t i, int64_t n)
{
    return i % n > i / n % n;
}

/* Copies the lower triangles over the upper ones. */
static void mirror_lower(double *x, int64_t n, int64_t matrices)
{
    for (int64_t i = 0; i < matrices * n * n; i++) {
        x[i] = is_above_the_diagonal(i, n) ? x[mirrored(i, n)] : x[i];
    }
}

static void check_symmetry(const double *x, int64_t n, int64_t matrices)
{
    for (int64_t i = 0; i < matrices * n * n; i++) {
        CHECK(x[i] == x[mirrored(i, n)], "not symmetric to the last bit: %.17g and %.17g", x[i], x[mirrored(i, n)]);
    }
}

/* Initializes out for accumulation with NaN above the diagonal, which must not be read; returns it as a full matrix. */
static double *fill_lower(test_tensor *out, const test_variation *v)
{
    double *values = test_alloc((size_t)out->count * sizeof *values);
    test_random random = test_random_stream(v->stream + 40);
    test_random_fill_normal(&random, values, out->count);
    for (int64_t i = 0; i < out->count; i++) {
        values[i] = is_above_the_diagonal(i, v->n) ? NAN : values[i];
    }
    test_tensor_write(out, values);
    values = test_tensor_read(out);
    mirror_lower(values, v->n, v->matrices);
    return values;
}

static void check_gram_with(tch_context *context, const test_variation *v, tch_dtype dtype, double beta)
{
    int transpose = (int)v->in % 2;
    int64_t rows = transpose ? v->k : v->n;
    int64_t cols = transpose ? v->n : v->k;
    test_tensor *a = test_case_random(context, v, dtype, rows, cols, v->in, 6);
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->n, v->out);
    double *before = beta != 0.0 ? fill_lower(out, v) : NULL;
    CHECK_OK(tch_gram(context, 0.5, &a->tensor, transpose, beta, &out->tensor));
    finish(a, NULL, out);
    double *x = test_tensor_read(a);
    double *z = test_tensor_read(out);
    double *other = test_alloc((size_t)(v->n * v->k) * sizeof *other);
    check_symmetry(z, v->n, v->matrices);
    for (int64_t i = 0; i < v->matrices; i++) {
        const double *one = x + i * rows * cols;
        ref_transpose(rows, cols, one, other);
        check_product(0.5, transpose ? other : one, transpose ? one : other, beta,
                      before != NULL ? before + i * v->n * v->n : NULL, v->n, v->k, v->n, z + i * v->n * v->n, dtype);
    }
}

static void check_gram(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    check_gram_with(context, v, dtype, 0.0);
    check_gram_with(context, v, dtype, 0.95);
}

/* Two symmetric matrices that do not commute, as after rounding: the lower half of their product is computed, and the
 * upper is bitwise its mirror image. */
static void check_symmetric_product(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    int64_t size = v->n * v->n;
    test_variation whole = *v;
    whole.in = v->in == LAYOUT_EXPANDED && v->batch_rank == 0 ? LAYOUT_CONTIGUOUS : v->in;
    test_tensor *in[2];
    double *values[2];
    for (int i = 0; i < 2; i++) {
        in[i] = test_case_random(context, &whole, dtype, v->n, v->n, i == 0 ? whole.in : LAYOUT_ROW_GAPS,
                                 (uint64_t)(7 + 30 * i));
        values[i] = test_tensor_read(in[i]);
        mirror_lower(values[i], v->n, v->matrices);
        test_tensor_write(in[i], values[i]);
        values[i] = test_tensor_read(in[i]);
    }
    test_tensor *out = test_case_tensor(context, v, dtype, v->n, v->n, v->out);
    CHECK_OK(tch_symmetric_product(context, &in[0]->tensor, &in[1]->tensor, &out->tensor));
    finish(in[0], in[1], out);
    double *z = test_tensor_read(out);
    double *expected = test_alloc((size_t)size * sizeof *expected);
    double *magnitude = test_alloc((size_t)size * sizeof *magnitude);
    check_symmetry(z, v->n, v->matrices);
    for (int64_t i = 0; i < v->matrices; i++) {
        ref_matmul(v->n, v->n, v->n, values[0] + i * size, values[1] + i * size, expected);
        ref_matmul_abs(v->n, v->n, v->n, values[0] + i * size, values[1] + i * size, magnitude);
        mirror_lower(expected, v->n, 1);
        mirror_lower(magnitude, v->n, 1);
        ref_check_sums(z + i * size, expected, magnitude, size, v->n + 4, dtype);
    }
}

static const tch_dtype dtypes[] = {{TCH_FLOAT, 32, 1}, {TCH_FLOAT, 64, 1}, {TCH_FLOAT, 16, 1}, {TCH_BFLOAT, 16, 1}};

static const test_conformance operations[] = {
    {"matmul", 200, 65, check_matmul},
    {"gemm", 200, 65, check_gemm},
    {"gram", 200, 65, check_gram},
    {"symmetric_product", 200, 65, check_symmetric_product},
};

TEST(every_layout_and_size)
{
    test_for_each_operation(*state, operations, TEST_COUNT(operations));
}

/* --- broadcasting ------------------------------------------------------------------------------------------------ */

typedef struct broadcast_case {
    int32_t a_rank, b_rank, out_rank;
    int64_t a[5], b[5], out[5];
} broadcast_case;

/* The batch index into an operand whose dimensions of size 1, or missing ones, repeat. */
static int64_t operand_matrix(int64_t number, int32_t rank, const int64_t *shape, int32_t out_rank, const int64_t *out)
{
    int64_t index = 0;
    int64_t scale = 1;
    for (int32_t back = 3; back <= out_rank; back++) {
        int64_t position = number % out[out_rank - back];
        number /= out[out_rank - back];
        if (back <= rank) {
            index += shape[rank - back] == 1 ? 0 : position * scale;
            scale *= shape[rank - back];
        }
    }
    return index;
}

static void check_broadcast(tch_context *context, const broadcast_case *c, tch_dtype dtype, test_layout layout)
{
    const int64_t n = 4;
    const int64_t k = 3;
    const int64_t m = 5;
    test_random random = test_random_stream(60);
    test_tensor *a = test_tensor_make(context, dtype, c->a_rank, c->a, layout);
    test_tensor *b = test_tensor_make(context, dtype, c->b_rank, c->b, layout);
    test_tensor *out = test_tensor_make(context, dtype, c->out_rank, c->out, layout);
    double *x = test_alloc((size_t)a->count * sizeof *x);
    double *y = test_alloc((size_t)b->count * sizeof *y);
    test_random_fill_normal(&random, x, a->count);
    test_random_fill_normal(&random, y, b->count);
    test_tensor_write(a, x);
    test_tensor_write(b, y);
    CHECK_OK(tch_matmul(context, &a->tensor, &b->tensor, &out->tensor));
    finish(a, b, out);
    x = test_tensor_read(a);
    y = test_tensor_read(b);
    double *z = test_tensor_read(out);
    for (int64_t i = 0; i < out->count / (n * m); i++) {
        int64_t left = operand_matrix(i, c->a_rank, c->a, c->out_rank, c->out);
        int64_t right = operand_matrix(i, c->b_rank, c->b, c->out_rank, c->out);
        check_product(1.0, x + left * n * k, y + right * k * m, 0.0, NULL, n, k, m, z + i * n * m, dtype);
    }
}

TEST(broadcasting)
{
    static const broadcast_case cases[] = {
        {2, 3, 3, {4, 3}, {6, 3, 5}, {6, 4, 5}},
        {3, 2, 3, {6, 4, 3}, {3, 5}, {6, 4, 5}},
        {3, 3, 3, {1, 4, 3}, {6, 3, 5}, {6, 4, 5}},
        {3, 3, 3, {6, 4, 3}, {1, 3, 5}, {6, 4, 5}},
        {4, 4, 4, {2, 1, 4, 3}, {1, 3, 3, 5}, {2, 3, 4, 5}},
        {4, 3, 4, {2, 3, 4, 3}, {3, 3, 5}, {2, 3, 4, 5}},
        {3, 4, 4, {3, 4, 3}, {2, 1, 3, 5}, {2, 3, 4, 5}},
        {5, 4, 5, {2, 1, 3, 4, 3}, {2, 1, 3, 5}, {2, 2, 3, 4, 5}},
        {3, 3, 3, {0, 4, 3}, {1, 3, 5}, {0, 4, 5}},
        {3, 3, 3, {1, 4, 3}, {0, 3, 5}, {0, 4, 5}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
            for (int d = 0; d < 4; d++) {
                test_case("broadcast %zu %s %s", i, test_layout_name((test_layout)layout), tch_dtype_name(dtypes[d]));
                check_broadcast(*state, &cases[i], dtypes[d], (test_layout)layout);
            }
        }
    }
}

TEST(shapes_that_do_not_broadcast)
{
    tch_context *context = *state;
    const int64_t shapes[][4] = {{2, 4, 3, 0}, {3, 3, 5, 0}, {2, 4, 5, 0}, {3, 4, 5, 0}};
    test_tensor *a = test_tensor_make(context, TCH_FLOAT32, 3, shapes[0], LAYOUT_CONTIGUOUS);
    test_tensor *b = test_tensor_make(context, TCH_FLOAT32, 3, shapes[1], LAYOUT_CONTIGUOUS);
    for (int i = 2; i < 4; i++) {
        test_tensor *out = test_tensor_make(context, TCH_FLOAT32, 3, shapes[i], LAYOUT_CONTIGUOUS);
        assert_int_equal(tch_matmul(context, &a->tensor, &b->tensor, &out->tensor), TCH_ERR_SHAPE);
        test_tensor_check_unchanged(out, "out");
    }
}

/* --- special numbers --------------------------------------------------------------------------------------------- */

/* With k = 0 a product is an empty sum: zeros, or beta times the previous values. */
TEST(sums_of_nothing_are_zero)
{
    tch_context *context = *state;
    const int64_t a_shape[] = {2, 3, 0};
    const int64_t b_shape[] = {2, 0, 4};
    const int64_t out_shape[] = {2, 3, 4};
    for (int i = 0; i < 3; i++) {
        test_case("k = 0, call %d", i);
        test_tensor *a = test_tensor_make(context, TCH_FLOAT32, 3, a_shape, LAYOUT_CONTIGUOUS);
        test_tensor *b = test_tensor_make(context, TCH_FLOAT32, 3, b_shape, LAYOUT_CONTIGUOUS);
        test_tensor *out = test_tensor_make(context, TCH_FLOAT32, 3, out_shape, LAYOUT_ROW_GAPS);
        double ones[24];
        for (int j = 0; j < 24; j++) {
            ones[j] = 1.0;
        }
        if (i == 2) {
            test_tensor_write(out, ones);
        }
        CHECK_OK(i == 0   ? tch_matmul(context, &a->tensor, &b->tensor, &out->tensor)
                 : i == 1 ? tch_matmul_chunked(context, &a->tensor, &b->tensor, 0, &out->tensor)
                          : tch_gemm(context, 1.0, &a->tensor, 0, &b->tensor, 0, 0.5, &out->tensor));
        double *z = test_tensor_read(out);
        for (int j = 0; j < 24; j++) {
            CHECK(z[j] == (i == 2 ? 0.5 : 0.0), "element %d is %g", j, z[j]);
        }
    }
}

/* A Gram matrix of no columns: beta times the previous lower triangle, mirrored. */
TEST(gram_matrices_of_nothing)
{
    tch_context *context = *state;
    const int64_t a_shape[] = {2, 3, 0};
    const int64_t out_shape[] = {2, 3, 3};
    const test_variation v = {.n = 3, .matrices = 2, .stream = 12};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        test_case("gram, k = 0, beta %g", 0.5 * accumulate);
        test_tensor *a = test_tensor_make(context, TCH_FLOAT64, 3, a_shape, LAYOUT_CONTIGUOUS);
        test_tensor *out = test_tensor_make(context, TCH_FLOAT64, 3, out_shape, LAYOUT_ROW_GAPS);
        double *before = fill_lower(out, &v);
        CHECK_OK(tch_gram(context, 1.0, &a->tensor, 0, 0.5 * accumulate, &out->tensor));
        double *z = test_tensor_read(out);
        for (int i = 0; i < 18; i++) {
            CHECK(z[i] == 0.5 * accumulate * before[i], "element %d is %g, expected %g", i, z[i],
                  0.5 * accumulate * before[i]);
        }
    }
}

/* --- large, checked at random elements --------------------------------------------------------------------------- */

static void check_samples(const double *a, const double *b, const double *c, int64_t n, tch_dtype dtype)
{
    test_random random = test_random_stream(70);
    for (int sample = 0; sample < 3000; sample++) {
        int64_t i = (int64_t)(test_random_bits(&random) % (uint64_t)n);
        int64_t j = (int64_t)(test_random_bits(&random) % (uint64_t)n);
        double sum = 0.0;
        double magnitude = 0.0;
        for (int64_t l = 0; l < n; l++) {
            sum += a[i * n + l] * b[l * n + j];
            magnitude += fabs(a[i * n + l] * b[l * n + j]);
        }
        ref_check_sums(&c[i * n + j], &sum, &magnitude, 1, n + 4, dtype);
    }
}

TEST(a_thousand)
{
    tch_context *context = *state;
    for (int d = 0; d < 4; d++) {
        test_variation v = {.n = 1000, .matrices = 1, .stream = 10};
        test_case("n = 1000 %s", tch_dtype_name(dtypes[d]));
        test_tensor *a = test_case_random(context, &v, dtypes[d], 1000, 1000, LAYOUT_TRANSPOSED, 9);
        test_tensor *b = test_case_random(context, &v, dtypes[d], 1000, 1000, LAYOUT_OFFSET, 10);
        test_tensor *out = test_case_tensor(context, &v, dtypes[d], 1000, 1000, LAYOUT_ROW_GAPS);
        double *x = test_tensor_read(a);
        double *y = test_tensor_read(b);
        for (int chunked = 0; chunked < 2; chunked++) {
            test_tensor_poison(out);
            CHECK_OK(chunked ? tch_matmul_chunked(context, &a->tensor, &b->tensor, 1 << 20, &out->tensor)
                             : tch_matmul(context, &a->tensor, &b->tensor, &out->tensor));
            finish(a, b, out);
            double *z = test_tensor_read(out);
            check_samples(x, y, z, 1000, dtypes[d]);
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)

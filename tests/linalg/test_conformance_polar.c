/* Orthogonalization vs the same steps in float64, and its purpose: singular values near 1 with unchanged singular
 * vectors.
 *
 * Rounding errors of the first step grow with the slope of the polynomials at zero, the product of the coefficients a:
 * |X - X_ref| <= (n + m + 10) u prod(a) sqrt(min(n, m)), four times that for a minimax step, with u the unit roundoff.
 * A GPU computes all but float64 in bfloat16 with sums in float32: there u is bfloat16's, and a step rounds four times
 * (X, its Gram matrix, the polynomial and the new X), each with up to twice the error of the step's input, for any
 * size. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/testing.h"

typedef struct step {
    double a, b, c;
} step;

/* As published: Muon's single step, and Polar Express's with all but the last divided by a safety factor; the last one
 * also follows minimax steps. */
static step step_of(tch_ortho_method method, int number)
{
    static const step muon = {3.4445, -4.7750, 2.0315};
    static const step polar[] = {{8.2872, -23.5959, 17.3004}, {4.1071, -2.9478, 0.5448}, {3.9487, -2.9089, 0.5518},
                                 {3.3184, -2.4885, 0.5100},   {2.3007, -1.6689, 0.4188}, {1.875, -1.25, 0.375}};
    const double safety = 1.01;
    if (method == TCH_ORTHO_MUON) {
        return muon;
    }
    bool last = number >= 5 || method == TCH_ORTHO_MINIMAX;
    step s = polar[last ? 5 : number];
    if (!last) {
        s = (step){s.a / safety, s.b / pow(safety, 3), s.c / pow(safety, 5)};
    }
    return s;
}

static bool in_bfloat16(tch_dtype dtype)
{
    return !test_on_cpu() && dtype.bits != 64;
}

static double rounding(tch_dtype dtype, int64_t n, int64_t m)
{
    return in_bfloat16(dtype) ? 8.0 * 0x1p-9 : (double)(n + m + 10) * test_arithmetic_roundoff(dtype);
}

static void steps_in_float64(int64_t n, int64_t m, int steps, tch_ortho_method method, double *x)
{
    double norm = ref_norm(n * m, x);
    for (int64_t i = 0; i < n * m; i++) {
        x[i] = norm > 0.0 ? x[i] / norm : 0.0;
    }
    for (int k = 0; k < steps; k++) {
        if (method == TCH_ORTHO_MINIMAX && k < REF_LONG_STEPS) {
            ref_long_step(k, n, m, x);
        } else {
            step s = step_of(method, k);
            ref_schulz_step(n, m, (const double[]){s.a, s.b, s.c}, x);
        }
    }
}

/* In a minimax step terms of up to 0.03 leave an F of 0.021 at zero and 0.004 elsewhere, which is squared and
 * multiplied by t2: with |F| <= 0.0214, errors of 0.04 u in it become 2 * 60243 * 0.0214 * 0.04 = 103 u where the slope
 * is 27.7. */
static double slope_of(tch_ortho_method method, int number)
{
    bool is_long = method == TCH_ORTHO_MINIMAX && number < REF_LONG_STEPS;
    return is_long ? 4.0 * ref_long_slope(number) : step_of(method, number).a;
}

static void check_one(int64_t n, int64_t m, const double *a, int steps, tch_ortho_method method, const double *got,
                      tch_dtype dtype)
{
    double *x = test_alloc((size_t)(n * m) * sizeof *x);
    double growth = 1.0;
    memcpy(x, a, (size_t)(n * m) * sizeof *x);
    steps_in_float64(n, m, steps, method, x);
    for (int k = 0; k < steps; k++) {
        growth *= slope_of(method, k);
    }
    double storage = dtype.bits == 16 ? test_unit_roundoff(dtype) * ref_norm(n * m, x) : 0.0;
    double bound = rounding(dtype, n, m) * growth * sqrt((double)(n < m ? n : m)) + storage;
    double error = ref_distance(n * m, got, x);
    CHECK(error <= bound, "%d steps are off by %.3g > %.3g", steps, error, bound);
}

static void check_steps(tch_context *context, const test_variation *v, tch_dtype dtype, int64_t rows, int64_t cols)
{
    size_t which = (size_t)v->in + (size_t)v->out;
    int ways = in_bfloat16(dtype) ? 2 : 3; /* in bfloat16 small matrices do not use minimax steps */
    tch_ortho_method method = (tch_ortho_method)(which % (size_t)ways);
    int steps = (int)(which % 5) + 1;
    test_tensor *a = test_case_random(context, v, dtype, rows, cols, v->in, 31);
    test_tensor *out = test_case_tensor(context, v, dtype, rows, cols, v->out);
    CHECK_OK(tch_orthogonalize(context, &a->tensor, steps, method, &out->tensor));
    double *x = test_tensor_read_unchanged(a, "a");
    double *got = test_tensor_read_written(out, "out");
    for (int64_t i = 0; i < v->matrices; i++) {
        check_one(rows, cols, x + i * rows * cols, steps, method, got + i * rows * cols, dtype);
    }
}

static void check_shapes(tch_context *context, const test_variation *v, tch_dtype dtype)
{
    check_steps(context, v, dtype, v->n, v->k);
    check_steps(context, v, dtype, v->m, v->n);
}

TEST(steps)
{
    test_for_each_dtype(*state, "orthogonalize", 200, 33, check_shapes);
}

/* Matrices so long that several steps share one Gram matrix. Their singular values are close together, so that the
 * slopes at zero do not accumulate: errors are magnified by a run of steps, up to 150 times, and by the steepest of the
 * polynomials, 22 times at 1. In a model of bfloat16 the error of normal random matrices of 256 by 512 was at most
 * 0.042 of the norm, of 12 by 12 0.08 and of 5 by 7, whose singular values may all be where a polynomial is steepest,
 * 0.26. */
static void check_long(tch_context *context, tch_dtype dtype, int64_t matrices, int64_t rows, int64_t cols, int steps,
                       tch_ortho_method method)
{
    test_variation shape = {.n = rows, .batch_rank = 1, .batch = {matrices}, .matrices = matrices, .stream = 5};
    test_case("%s, %lld x %lld by %lld, method %d, %d steps", tch_dtype_name(dtype), (long long)matrices,
              (long long)rows, (long long)cols, (int)method, steps);
    test_tensor *a = test_case_random(context, &shape, dtype, rows, cols, LAYOUT_CONTIGUOUS, 35);
    test_tensor *out = test_case_tensor(context, &shape, dtype, rows, cols, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_orthogonalize(context, &a->tensor, steps, method, &out->tensor));
    double *x = test_tensor_read(a);
    double *got = test_tensor_read_written(out, "out");
    double relative = !in_bfloat16(dtype) ? 22.0 * 150.0 * test_arithmetic_roundoff(dtype) : rows < 16 ? 0.3 : 0x1p-4;
    for (int64_t i = 0; i<matrices; i += matrices> 3 ? matrices - 1 : 1) { /* of many the first and the last */
        double *want = x + i * rows * cols;
        steps_in_float64(rows, cols, steps, method, want);
        double error = ref_distance(rows * cols, got + i * rows * cols, want) / ref_norm(rows * cols, want);
        CHECK(error <= relative, "matrix %lld is off by %.3g > %.3g", (long long)i, error, relative);
    }
}

TEST(long_matrices)
{
    static const int64_t shapes[][2] = {{1, 9}, {5, 7}, {7, 40}, {24, 67}, {50, 33}, {33, 132}, {130, 65}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int steps = 1; steps <= 7; steps++) {
            for (int method = 0; method < 2; method++) {
                check_long(*state, TCH_FLOAT64, 3, shapes[i][0], shapes[i][1], steps, (tch_ortho_method)method);
                check_long(*state, TCH_FLOAT32, 3, shapes[i][0], shapes[i][1], steps, (tch_ortho_method)method);
            }
        }
    }
}

/* Batches that fill a GPU use other kernels than small ones: X is divided by its norm in the products, and the Gram
 * matrices of several steps are float16. The CPU has one algorithm for all sizes. */
TEST(large_batches)
{
    static const int64_t shapes[][3] = {{45, 256, 264}, {45, 256, 520}, {14, 600, 512}, {45, 776, 264}};
    for (size_t i = 0; !test_on_cpu() && i < sizeof shapes / sizeof shapes[0]; i++) {
        for (int method = 0; method < 3; method++) {
            int steps = method == TCH_ORTHO_MINIMAX ? 3 : 5;
            check_long(*state, TCH_FLOAT32, shapes[i][0], shapes[i][1], shapes[i][2], steps, (tch_ortho_method)method);
        }
    }
    check_long(*state, TCH_FLOAT32, test_on_cpu() ? 1 : 45, 256, 520, 5, TCH_ORTHO_MINIMAX);
    check_long(*state, TCH_FLOAT32, test_on_cpu() ? 1 : 45, 256, 520, 7, TCH_ORTHO_POLAR_EXPRESS);
}

typedef struct near_one {
    tch_ortho_method method;
    int steps;
    double low, high;
} near_one;

/* factor' x has the singular values of x as eigenvalues if and only if the singular vectors are A's. */
static void check_near_one(int64_t n, const near_one *expected, const double *factor, const double *x, double slack)
{
    double *rotated = test_alloc((size_t)(n * n) * sizeof *rotated);
    double *w = test_alloc((size_t)n * sizeof *w);
    double *v = test_alloc((size_t)(n * n) * sizeof *v);
    ref_matmul(n, n, n, factor, x, rotated);
    for (int64_t j = 0; j < n * n; j++) {
        double gap = fabs(rotated[j] - rotated[j % n * n + j / n]);
        CHECK(gap <= slack, "the singular vectors moved by %.3g", gap);
    }
    for (int64_t j = 0; j < n * n; j++) { /* symmetrized for the eigensolver */
        int64_t mirror = j % n * n + j / n;
        rotated[j] = j < mirror ? 0.5 * (rotated[j] + rotated[mirror]) : rotated[mirror];
    }
    ref_eigh(n, rotated, w, v);
    CHECK(w[0] >= expected->low - slack && w[n - 1] <= expected->high + slack, "singular values from %.6f to %.6f",
          w[0], w[n - 1]);
}

static void check_polar_factor(tch_context *context, const known_matrix *known, const double *factor,
                               const near_one *expected, tch_dtype dtype, double slack)
{
    int64_t n = known->n;
    test_variation shape = {.n = n, .matrices = 1};
    test_case("%s, method %d, %d steps", tch_dtype_name(dtype), (int)expected->method, expected->steps);
    test_tensor *a = test_case_tensor(context, &shape, dtype, n, n, LAYOUT_CONTIGUOUS);
    test_tensor *out = test_case_tensor(context, &shape, dtype, n, n, LAYOUT_CONTIGUOUS);
    test_tensor_write(a, known->a);
    CHECK_OK(tch_orthogonalize(context, &a->tensor, expected->steps, expected->method, &out->tensor));
    double *x = test_tensor_read(out);
    check_near_one(n, expected, factor, x, slack);
}

/* For symmetric A = V diag(w) V' the polar factor is V diag(sign w) V'. With singular values above a hundredth of the
 * norm, five Muon steps leave them between 0.68 and 1.14, five of Polar Express between 0.86 and 1.13, eight at 1. The
 * arithmetic adds its own rounding: in bfloat16 a few ulp. */
TEST(singular_values_come_near_one)
{
    static const near_one cases[] = {{TCH_ORTHO_MUON, 5, 0.68, 1.14},          {TCH_ORTHO_MUON, 12, 0.68, 1.14},
                                     {TCH_ORTHO_POLAR_EXPRESS, 5, 0.86, 1.13}, {TCH_ORTHO_POLAR_EXPRESS, 8, 1.0, 1.0},
                                     {TCH_ORTHO_POLAR_EXPRESS, 100, 1.0, 1.0}, {TCH_ORTHO_MINIMAX, 3, 0.86, 1.13},
                                     {TCH_ORTHO_MINIMAX, 6, 1.0, 1.0},         {TCH_ORTHO_MINIMAX, 100, 1.0, 1.0}};
    const int64_t n = 48;
    const known_matrix *known = test_known(n, 0, -10.0, TCH_FLOAT64);
    double *signs = test_alloc((size_t)n * sizeof *signs);
    double *factor = test_alloc((size_t)(n * n) * sizeof *factor);
    for (int64_t i = 0; i < n; i++) {
        signs[i] = copysign(1.0, known->w[i]);
    }
    ref_compose(n, known->v, signs, factor);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_polar_factor(*state, known, factor, &cases[i], TCH_FLOAT64, 1e-9);
        check_polar_factor(*state, known, factor, &cases[i], TCH_FLOAT32, in_bfloat16(TCH_FLOAT32) ? 0x1p-5 : 1e-4);
    }
}

/* Normal random numbers times 2^exponent, rounded to the type, vs the steps on the rounded numbers scaled near 1. */
static void check_scaled(tch_context *context, tch_dtype dtype, int exponent, tch_ortho_method method)
{
    test_variation shape = {.n = 9, .matrices = 1, .stream = 4};
    test_case("%s, method %d, times 2^%d", tch_dtype_name(dtype), (int)method, exponent);
    test_tensor *a = test_case_random(context, &shape, dtype, 9, 7, LAYOUT_CONTIGUOUS, 33);
    test_tensor *out = test_case_tensor(context, &shape, dtype, 9, 7, LAYOUT_CONTIGUOUS);
    double *values = test_tensor_read(a);
    for (int i = 0; i < 63; i++) {
        values[i] = test_round(dtype, ldexp(values[i], exponent));
    }
    test_tensor_write(a, values);
    for (int i = 0; i < 63; i++) {
        values[i] = ldexp(values[i], -exponent);
    }
    CHECK_OK(tch_orthogonalize(context, &a->tensor, 5, method, &out->tensor));
    double *x = test_tensor_read(out);
    check_one(9, 7, values, 5, method, x, dtype);
}

/* The result depends on directions only, from the smallest numbers of a type to the largest. A GPU's bfloat16 has the
 * range of float32 but subnormals with fewer digits below 2^-126: float32 is not tested there. */
TEST(scale_does_not_matter)
{
    static const struct {
        tch_dtype dtype;
        int count, exponents[14];
    } rows[] = {
        {{TCH_FLOAT, 64, 1}, 14, {-1073, -1060, -1030, -1010, -980, -600, -510, -300, 300, 510, 600, 980, 1010, 1020}},
        {{TCH_FLOAT, 32, 1}, 12, {-148, -140, -127, -122, -118, -100, -60, 60, 100, 118, 122, 125}},
        {{TCH_FLOAT, 16, 1}, 5, {-22, -16, -8, 8, 13}},
        {{TCH_BFLOAT, 16, 1}, 2, {-130, 125}},
    };
    for (size_t r = 0; r < TEST_COUNT(rows); r++) {
        bool below_bfloat16 = rows[r].dtype.bits == 32 && !test_on_cpu();
        for (int i = below_bfloat16 ? 4 : 0; i < rows[r].count; i++) {
            check_scaled(*state, rows[r].dtype, rows[r].exponents[i], TCH_ORTHO_POLAR_EXPRESS);
            check_scaled(*state, rows[r].dtype, rows[r].exponents[i], TCH_ORTHO_MUON);
        }
    }
}

/* Two of the smallest numbers: the type cannot represent their norm. And zeros, which have no direction, stay zero
 * without a division by zero. */
TEST(smallest_numbers_and_zeros)
{
    const tch_dtype dtypes[] = {TCH_FLOAT64, TCH_FLOAT32, TCH_FLOAT16, TCH_BFLOAT16};
    const double smallest[] = {0x1p-1074, 0x1p-149, 0x1p-24, 0x1p-133};
    const test_variation shape = {.n = 1, .matrices = 1};
    for (int i = 0; i < 2 * 4; i++) {
        tch_dtype dtype = dtypes[i % 4];
        double size = i < 4 ? smallest[i] : 0.0;
        const double values[] = {size, -size};
        const double signs[] = {i < 4 ? 1.0 : 0.0, i < 4 ? -1.0 : 0.0};
        if (!test_on_cpu() && dtype.bits == 32 && i < 4) {
            continue; /* bfloat16 has no such number */
        }
        test_case("%s, %g", tch_dtype_name(dtype), size);
        test_tensor *a = test_case_tensor(*state, &shape, dtype, 1, 2, LAYOUT_CONTIGUOUS);
        test_tensor *out = test_case_tensor(*state, &shape, dtype, 1, 2, LAYOUT_CONTIGUOUS);
        test_tensor_write(a, values);
        CHECK_OK(tch_orthogonalize(*state, &a->tensor, 5, TCH_ORTHO_MUON, &out->tensor));
        double *x = test_tensor_read(out);
        CHECK(i < 4 || (x[0] == 0.0 && x[1] == 0.0), "zeros became %g and %g", x[0], x[1]);
        check_one(1, 2, signs, 5, TCH_ORTHO_MUON, x, dtype);
    }
}

TEST_MAIN(test_open_context, test_close_known)

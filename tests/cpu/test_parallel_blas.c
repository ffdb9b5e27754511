/* BLAS calls that the library divides among threads, for an OpenBLAS without threads of its own, vs their definitions.
 * Sizes are odd, so that parts differ. Every sum has at most ORDER terms of size one: its error is at most ORDER times
 * the unit roundoff, and triangular solves with matrices near the identity stay below ten times that. */
#include <math.h>

#include "backends/cpu/runtime/blas/parallel_blas.h"
#include "solver_test.h"
#include "support/random.h"

enum { ORDER = 389, SIDE = 421, DEPTH = 203, MOST_THREADS = 7 };

static tchi_blas blas;
static tchi_cpu_state cpu = {.blas = &blas};

/* Exact in both types: multiples of 2^-8 in [-1, 1). */
static void fill_numbers(uint64_t stream, int64_t count, double *x, float *y)
{
    test_random random = test_random_stream(stream);
    for (int64_t i = 0; i < count; i++) {
        x[i] = floor(test_random_uniform(&random) * 512.0) / 256.0 - 1.0;
        y[i] = (float)x[i];
    }
}

/* The same numbers in both types, and expected results. */
typedef struct numbers {
    double *f64;
    float *f32;
} numbers;

static numbers make_numbers(uint64_t stream, int64_t count)
{
    numbers n = {test_zeros(count), test_alloc((size_t)count * sizeof(float))};
    memset(n.f32, 0, (size_t)count * sizeof(float));
    if (stream > 0) {
        fill_numbers(stream, count, n.f64, n.f32);
    }
    return n;
}

static void compare_both(const char *what, double expected, double f64, float f32)
{
    double size = 1.0 + fabs(expected);
    CHECK(fabs(f64 - expected) <= size * 10 * ORDER * 0x1p-53, "%s in float64: %g, expected %g", what, f64, expected);
    CHECK(fabs((double)f32 - expected) <= size * 10 * ORDER * 0x1p-24, "%s in float32: %g, expected %g", what,
          (double)f32, expected);
}

TEST_REFERENCE static double element_at(const double *x, int64_t ld, int trans, int64_t i, int64_t j)
{
    return trans == TCHI_TRANS ? x[j * ld + i] : x[i * ld + j];
}

TEST_REFERENCE static double sum_of(const double *a, int trans_a, const double *b, int trans_b, int64_t i, int64_t j)
{
    double sum = 0;
    for (int64_t k = 0; k < DEPTH; k++) {
        sum += element_at(a, SIDE, trans_a, i, k) * element_at(b, SIDE, trans_b, k, j);
    }
    return sum;
}

static void check_gemm(int trans_a, int trans_b)
{
    numbers a = make_numbers(1, SIDE * SIDE), b = make_numbers(2, SIDE * SIDE), c = make_numbers(3, SIDE * SIDE),
            before = make_numbers(3, SIDE * SIDE);
    tchi_parallel_blas_f64.gemm(&cpu, trans_a, trans_b, ORDER, SIDE - 7, DEPTH, 2.0, a.f64, SIDE, b.f64, SIDE, 0.5,
                                c.f64, SIDE);
    tchi_parallel_blas_f32.gemm(&cpu, trans_a, trans_b, ORDER, SIDE - 7, DEPTH, 2.0, a.f32, SIDE, b.f32, SIDE, 0.5,
                                c.f32, SIDE);
    for (int64_t i = 0; i < SIDE; i++) {
        for (int64_t j = 0; j < SIDE; j++) {
            int inside = i < ORDER && j < SIDE - 7;
            double x = before.f64[i * SIDE + j];
            double expected = inside ? 2.0 * sum_of(a.f64, trans_a, b.f64, trans_b, i, j) + 0.5 * x : x;
            compare_both("gemm", expected, c.f64[i * SIDE + j], c.f32[i * SIDE + j]);
        }
    }
}

static void check_syrk(int trans)
{
    int other = trans == TCHI_TRANS ? TCHI_NO_TRANS : TCHI_TRANS;
    numbers a = make_numbers(4, SIDE * SIDE), c = make_numbers(5, SIDE * SIDE), before = make_numbers(5, SIDE * SIDE);
    tchi_parallel_blas_f64.syrk(&cpu, trans, ORDER, DEPTH, -1.0, a.f64, SIDE, 1.0, c.f64, SIDE);
    tchi_parallel_blas_f32.syrk(&cpu, trans, ORDER, DEPTH, -1.0, a.f32, SIDE, 1.0, c.f32, SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j < ORDER; j++) { /* nothing is written above the diagonal */
            double x = before.f64[i * SIDE + j];
            double expected = j <= i ? x - sum_of(a.f64, trans, a.f64, other, i, j) : x;
            compare_both("syrk", expected, c.f64[i * SIDE + j], c.f32[i * SIDE + j]);
        }
    }
}

/* A sum of `count` products, of contiguous elements of a and elements of b `step` apart. */
TEST_REFERENCE static double dot_of_rows(int64_t count, const double *a, const double *b, int64_t step)
{
    double sum = 0;
    for (int64_t k = 0; k < count; k++) {
        sum += a[k] * b[k * step];
    }
    return sum;
}

/* With B = A for a symmetric A the product is symmetric. */
static void check_symm(void)
{
    numbers a = make_numbers(6, SIDE * SIDE), c = make_numbers(0, SIDE * SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j < i; j++) {
            a.f64[j * SIDE + i] = a.f64[i * SIDE + j];
            a.f32[j * SIDE + i] = a.f32[i * SIDE + j];
        }
    }
    tchi_parallel_blas_f64.symm(&cpu, ORDER, a.f64, SIDE, a.f64, SIDE, c.f64, SIDE);
    tchi_parallel_blas_f32.symm(&cpu, ORDER, a.f32, SIDE, a.f32, SIDE, c.f32, SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double expected = dot_of_rows(ORDER, a.f64 + i * SIDE, a.f64 + j, SIDE);
            compare_both("symm", expected, c.f64[i * SIDE + j], c.f32[i * SIDE + j]);
        }
    }
}

/* A lower triangle near the identity, exact in float32 too, and zeros above. */
static numbers make_lower(uint64_t stream)
{
    numbers l = make_numbers(stream, SIDE * SIDE);
    for (int64_t i = 0; i < SIDE; i++) {
        for (int64_t j = 0; j < SIDE; j++) {
            double x = i == j ? 1.0 + fabs(l.f64[i * SIDE + j]) : i > j ? l.f64[i * SIDE + j] / 512.0 : 0.0;
            l.f64[i * SIDE + j] = x;
            l.f32[i * SIDE + j] = (float)x;
        }
    }
    return l;
}

/* (L L') from the definition; its factor must be L. */
static void check_potrf(void)
{
    numbers l = make_lower(7), a = make_numbers(0, SIDE * SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double sum = dot_of_rows(j + 1, l.f64 + i * SIDE, l.f64 + j * SIDE, 1);
            a.f64[i * SIDE + j] = sum;
            a.f32[i * SIDE + j] = (float)sum;
        }
    }
    assert_int_equal(tchi_parallel_blas_f64.potrf(&cpu, ORDER, a.f64, SIDE), 0);
    assert_int_equal(tchi_parallel_blas_f32.potrf(&cpu, ORDER, a.f32, SIDE), 0);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j <= i; j++) {
            compare_both("potrf", l.f64[i * SIDE + j], a.f64[i * SIDE + j], a.f32[i * SIDE + j]);
        }
    }
}

/* The identity with one nonpositive entry: LAPACK counts minors from 1. */
static void check_not_positive(int64_t where)
{
    numbers a = make_numbers(0, SIDE * SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        a.f64[i * SIDE + i] = i == where ? -1.0 : 1.0;
        a.f32[i * SIDE + i] = i == where ? -1.0F : 1.0F;
    }
    assert_int_equal(tchi_parallel_blas_f64.potrf(&cpu, ORDER, a.f64, SIDE), where + 1);
    assert_int_equal(tchi_parallel_blas_f32.potrf(&cpu, ORDER, a.f32, SIDE), where + 1);
}

/* Row i of L or L', up to element `count`, times column j of the solution in both types. */
TEST_REFERENCE static void multiply_back(const double *l, int trans, numbers x, int64_t count, int64_t i, int64_t j,
                                         double *f64, double *f32)
{
    *f64 = 0;
    *f32 = 0;
    for (int64_t k = 0; k < count; k++) {
        *f64 += element_at(l, SIDE, trans, i, k) * x.f64[k * SIDE + j];
        *f32 += element_at(l, SIDE, trans, i, k) * (double)x.f32[k * SIDE + j];
    }
}

/* L or L' times the solution must be the right-hand side. */
static void check_trsm(int trans)
{
    numbers l = make_lower(8), b = make_numbers(9, SIDE * SIDE), x = make_numbers(9, SIDE * SIDE);
    tchi_parallel_blas_f64.trsm(&cpu, trans, ORDER, DEPTH, l.f64, SIDE, x.f64, SIDE);
    tchi_parallel_blas_f32.trsm(&cpu, trans, ORDER, DEPTH, l.f32, SIDE, x.f32, SIDE);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j < DEPTH; j++) {
            double f64, f32;
            multiply_back(l.f64, trans, x, ORDER, i, j, &f64, &f32);
            compare_both("trsm", b.f64[i * SIDE + j], f64, (float)f32);
        }
    }
}

static void check_trtri(void)
{
    numbers l = make_lower(10), x = make_lower(10);
    assert_int_equal(tchi_parallel_blas_f64.trtri(&cpu, ORDER, l.f64, SIDE, x.f64, SIDE), 0);
    assert_int_equal(tchi_parallel_blas_f32.trtri(&cpu, ORDER, l.f32, SIDE, x.f32, SIDE), 0);
    for (int64_t i = 0; i < ORDER; i++) {
        for (int64_t j = 0; j < ORDER; j++) {
            double f64, f32;
            multiply_back(l.f64, TCHI_NO_TRANS, x, i + 1, i, j, &f64, &f32);
            compare_both("trtri", i == j ? 1.0 : 0.0, f64, (float)f32);
        }
    }
}

TEST(test_divided)
{
    static const int transposes[] = {TCHI_NO_TRANS, TCHI_TRANS};
    for (cpu.threads = 1; cpu.threads <= MOST_THREADS; cpu.threads += 2) {
        size_t mark = test_mark();
        test_case("%d threads", cpu.threads);
        for (int t = 0; t < 2; t++) {
            check_gemm(transposes[t], TCHI_NO_TRANS);
            check_gemm(transposes[t], TCHI_TRANS);
            check_syrk(transposes[t]);
            check_trsm(transposes[t]);
        }
        check_symm();
        check_potrf();
        check_not_positive(0);
        check_not_positive(ORDER - 3);
        check_trtri();
        test_release_since(mark);
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    blas = *open_blas();
    /* With any OpenBLAS: inside the library's parallel regions each call has one thread. */
    blas.threading = TCHI_BLAS_SEQUENTIAL;
    return test_run(__FILE__, NULL, NULL);
}

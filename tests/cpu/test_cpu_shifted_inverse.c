/* Sums of shifted inverses on the CPU: X = sum of w (A + s I)^(-1), vs one Cholesky inversion in float64 per pole.
 * Results are in guarded, poisoned memory with gaps between columns. tests/linalg/roots has difficult spectra and
 * batches in inverse roots by these sums. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "backends/cpu/runtime/flush_subnormals.h"
#include "backends/cpu/spectral/eigh/eigh.h"
#include "backends/cpu/spectral/shifted_inverse/shifted_inverse.h"
#include "solver_test.h"
#include "support/linalg/reference.h"
#include "support/random.h"

enum { A_GAP = 3, X_GAP = 5, MAX_POLES = 24 };

typedef struct problem {
    int64_t n;
    int64_t poles;
    double shifts[MAX_POLES];
    double weights[MAX_POLES];
    double *a;
} problem;

typedef struct precision {
    const char *name;
    double unit;
    tch_dtype dtype;
    const tchi_cpu_shifted_inverse_solver *solver;
    const tchi_cpu_eigh_solver *eigh;
} precision;

static const precision precisions[] = {
    {"float32", FLT_EPSILON / 2, {TCH_FLOAT, 32, 1}, &tchi_cpu_shifted_inverse_f32, &tchi_cpu_eigh_f32},
    {"float64", DBL_EPSILON / 2, {TCH_FLOAT, 64, 1}, &tchi_cpu_shifted_inverse_f64, &tchi_cpu_eigh_f64},
};
enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

static const tchi_blas *blas;

static size_t element_bytes(const precision *kind)
{
    return kind->dtype.bits / 8;
}

/* A matrix between guards; unused elements are poisoned. */
static char *place(const precision *kind, int64_t n, int64_t ld, const double *values)
{
    const size_t bytes = (size_t)(n * ld + 2 * GUARD) * element_bytes(kind);
    char *memory = make_poisoned(bytes);
    for (int64_t i = 0; i < n * n && values != NULL; i++) {
        test_encode(kind->dtype, values[i], memory + (size_t)(GUARD + i % n + i / n * ld) * element_bytes(kind));
    }
    return memory;
}

/* Everything outside the n by n elements must still be poison. */
static void check_surroundings(const void *memory, size_t size, int64_t n, int64_t ld, const char *name)
{
    const unsigned char *bytes = memory;
    for (int64_t i = 0; i < n * ld + 2 * GUARD; i++) {
        const int64_t at = i - GUARD;
        if (at >= 0 && at < n * ld && at % ld < n) {
            continue;
        }
        for (size_t k = 0; k < size; k++) {
            CHECK(bytes[(size_t)i * size + k] == 0xff, "%s was written beside its elements, at %lld", name,
                  (long long)at);
        }
    }
}

/* The problem's solution, or the solver's error status. */
static int solve(const precision *kind, const problem *p, double *x)
{
    const int64_t n = p->n, lda = n + A_GAP, ldx = n + X_GAP;
    const size_t bytes = kind->solver->scratch_bytes(n, p->poles), size = element_bytes(kind), first = GUARD * size;
    char *a = place(kind, n, lda, p->a), *result = place(kind, n, ldx, NULL);
    void *scratch = make_scratch(bytes);
    const int status =
        kind->solver->solve(blas, n, a + first, lda, p->poles, p->shifts, p->weights, result + first, ldx, scratch);
    check_surroundings(a, size, n, lda, "a");
    check_surroundings(result, size, n, ldx, "x");
    for (int64_t i = 0; i < n * n; i++) {
        x[i] = test_decode(kind->dtype, result + (size_t)(GUARD + i % n + i / n * ldx) * size);
    }
    check_scratch(scratch, bytes);
    return status;
}

/* The same by L^-1 of A + s I for each pole, in float64: x = the sum of w L^-T L^-1. */
static void solve_plainly(const problem *p, double *x)
{
    const int n = (int)p->n;
    double *inverse = test_alloc((size_t)(n * n) * sizeof *inverse);
    for (int64_t k = 0; k < p->poles; k++) {
        int failed = 0, info = 0;
        for (int64_t i = 0; i < (int64_t)n * n; i++) { /* columns, and of those the lower triangle */
            inverse[i] = i % n < i / n ? 0.0 : p->a[i] + (i % n == i / n ? p->shifts[k] : 0.0);
        }
        blas->f64.potrf("L", &n, inverse, &n, &failed, 1);
        blas->f64.trtri("L", "N", &n, inverse, &n, &info, 1, 1);
        CHECK(failed == 0 && info == 0, "LAPACK gave %d and %d", failed, info);
        blas->f64.syrk(TCHI_COL_MAJOR, TCHI_LOWER, TCHI_TRANS, n, n, p->weights[k], inverse, n, k > 0 ? 1.0 : 0.0, x,
                       n);
    }
    for (int64_t i = 0; i < (int64_t)n * n; i++) {
        x[i] = i % n < i / n ? x[i / n + i % n * n] : x[i];
    }
}

static double *square(int64_t n)
{
    return test_alloc((size_t)(n * n) * sizeof(double));
}

/* Shifts from half the smallest eigenvalue to five times the largest, weights as for a fourth root. */
static void choose_poles(problem *p, int64_t poles, double smallest)
{
    p->poles = poles;
    for (int64_t k = 0; k < poles; k++) {
        p->shifts[k] = smallest / 2 * pow(10 / smallest, poles > 1 ? (double)k / (double)(poles - 1) : 0.5);
        p->weights[k] = pow(p->shifts[k], 0.75);
    }
}

static void round_problem(const precision *kind, problem *p)
{
    for (int64_t i = 0; i < p->n * p->n; i++) {
        p->a[i] = test_round(kind->dtype, p->a[i]);
    }
}

/* Random eigenvectors, geometric eigenvalues from 1 down to 1/condition. */
static problem make_problem(const precision *kind, int64_t n, int64_t poles, double condition)
{
    problem p = {.n = n, .a = square(n)};
    double *w = test_alloc((size_t)n * sizeof *w);
    test_random random = test_random_stream((uint64_t)n * 1000 + (uint64_t)poles);
    ref_spectrum(n, condition, w);
    ref_symmetric(&random, n, w, p.a);
    round_problem(kind, &p);
    choose_poles(&p, poles, 1 / condition);
    return p;
}

static void check_symmetric(int64_t n, const double *x)
{
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = 0; i < j; i++) {
            CHECK(x[i + j * n] == x[j + i * n], "x is not symmetric at (%lld, %lld): %.17g and %.17g", (long long)i,
                  (long long)j, x[i + j * n], x[j + i * n]);
        }
    }
}

/* The solver must agree with the reference to `tolerance`, relative, in the Frobenius norm. */
static void compare_forms(const precision *kind, const problem *p, double tolerance)
{
    size_t mark = test_mark();
    double *x = square(p->n), *plain = square(p->n);
    solve_plainly(p, plain);
    const int status = solve(kind, p, x);
    CHECK(status == 0, "the solver gave %d", status);
    check_symmetric(p->n, x);
    const double error = ref_distance(p->n * p->n, x, plain) / ref_norm(p->n * p->n, plain);
    CHECK(error <= tolerance, "relative error %.3g, at most %.3g expected", error, tolerance);
    test_release_since(mark);
}

/* Rounding errors in sums of n terms accumulate randomly, and a backward error of a few units in A is magnified by at
 * most the condition number of the worst shifted matrix; a sound method shows a fraction of it. */
static double expected_error(const precision *kind, int64_t n, double condition)
{
    return kind->unit * (8 + 2 * sqrt((double)n) + condition / 4);
}

static void check_random(int64_t n, int64_t poles, double condition)
{
    for (int kind = 0; kind < PRECISIONS; kind++) {
        if (condition * precisions[kind].unit > 0.1) {
            continue; /* rounding a makes it indefinite: either answer is right */
        }
        test_case("%s, n = %lld, %lld poles, condition %g", precisions[kind].name, (long long)n, (long long)poles,
                  condition);
        problem p = make_problem(&precisions[kind], n, poles, condition);
        compare_forms(&precisions[kind], &p, expected_error(&precisions[kind], n, condition));
    }
}

TEST(sizes_conditions_and_poles)
{
    static const int64_t sizes[] = {1,  2,  3,  5,   17,  31,  32,  33,  63,  64,  65,
                                    95, 96, 97, 100, 127, 129, 160, 161, 200, 257, 513};
    static const int64_t some_sizes[] = {33, 65, 200, 300};
    static const double conditions[] = {1e2, 1e4, 1e6, 1e8};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        check_random(sizes[s], 5, 1e4);
    }
    for (int k = 0; k < 4 * 4; k++) {
        check_random(some_sizes[k / 4], 12, conditions[k % 4]);
    }
    for (int64_t poles = 1; poles <= MAX_POLES; poles++) {
        check_random(139, poles, 1e3);
    }
}

/* The eigenvalue -1/2 is harmless for shifts above 1/2 and fatal for those below; the first such pole is reported. */
TEST(the_first_pole_without_a_factor_is_named)
{
    static const int64_t sizes[] = {1, 20, 50, 70, 180};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int kind = 0; kind < PRECISIONS; kind++) {
            const int64_t n = sizes[s];
            test_case("%s, n = %lld", precisions[kind].name, (long long)n);
            problem p = {.n = n, .poles = 4, .a = square(n)};
            double *w = test_alloc((size_t)n * sizeof *w), *x = square(n);
            static const double shifts[] = {2, 0.75, 0.25, 0.1};
            test_random random = test_random_stream((uint64_t)n);
            ref_spectrum(n, 10, w);
            w[n / 2] = -0.5;
            ref_symmetric(&random, n, w, p.a);
            round_problem(&precisions[kind], &p);
            for (int k = 0; k < 4; k++) {
                p.shifts[k] = shifts[k];
                p.weights[k] = 1;
            }
            CHECK(solve(&precisions[kind], &p, x) == 3, "it did not name pole 3");
            p.poles = 2;
            compare_forms(&precisions[kind], &p, expected_error(&precisions[kind], n, 10));
        }
    }
}

/* By the eigensolver, too; the tests of public functions do not get there, since matrices are inspected first. */
TEST(matrices_that_are_not_finite_are_refused)
{
    static const int64_t sizes[] = {1, 2, 30, 80, 200};
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < TEST_COUNT(sizes) * 3 * PRECISIONS; i++) {
        const int64_t n = sizes[i / 3 / PRECISIONS];
        const precision *kind = &precisions[i % PRECISIONS];
        problem p = make_problem(kind, n, 3, 10);
        double *x = square(n);
        p.a[n - 1] = p.a[(n - 1) * n] = bad[i / PRECISIONS % 3];
        test_case("%s, n = %lld, %g", kind->name, (long long)n, p.a[n - 1]);
        CHECK(solve(kind, &p, x) == -1, "it was taken");
        char *a = place(kind, n, n, p.a);
        void *w = make_poisoned((size_t)n * element_bytes(kind));
        void *scratch = make_scratch(kind->eigh->scratch_bytes(n));
        const int status = kind->eigh->solve(blas, n, a + GUARD * element_bytes(kind), n, w, scratch);
        CHECK(status == TCHI_EIGH_NOT_FINITE, "the eigensolver gave %d", status);
    }
}

/* Half of the smallest normal number is zero while subnormals are flushed, and unchanged before and after. */
TEST(subnormals_are_flushed_and_kept_again)
{
    volatile double smallest = DBL_MIN;
    volatile float smallest_float = FLT_MIN;
    const unsigned before = flush_subnormals();
    volatile double half = smallest / 2;
    volatile float half_float = smallest_float / 2;
    restore_subnormals(before);
    volatile double again = smallest / 2;
    assert_true(half == 0 && half_float == 0);
    assert_true(again == DBL_MIN / 2 && again > 0);
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    blas = open_blas();
    return test_run(__FILE__, NULL, NULL);
}

/* Sums of shifted inverses on the CPU: X = sum of w (A + s I)^(-1), vs one Cholesky inversion in float64 per pole,
 * which is checked against Jacobi eigenvalues. Results are in guarded, poisoned memory with gaps between columns. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "backends/cpu/runtime/flush_subnormals.h"
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
} precision;

static const precision precisions[] = {
    {"float32", FLT_EPSILON / 2, {TCH_FLOAT, 32, 1}, &tchi_cpu_shifted_inverse_f32},
    {"float64", DBL_EPSILON / 2, {TCH_FLOAT, 64, 1}, &tchi_cpu_shifted_inverse_f64},
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

TEST(the_reference_agrees_with_eigenvalues)
{
    static const int64_t sizes[] = {1, 2, 3, 5, 17, 33, 64};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const int64_t n = sizes[s];
        test_case("n = %lld", (long long)n);
        problem p = make_problem(&precisions[1], n, 6, 1e3);
        double *w = test_alloc((size_t)n * sizeof *w), *f = test_alloc((size_t)n * sizeof *f);
        double *v = square(n), *x = square(n), *exact = square(n);
        ref_eigh(n, p.a, w, v);
        for (int64_t i = 0; i < n; i++) {
            f[i] = 0;
            for (int64_t k = 0; k < p.poles; k++) {
                f[i] += p.weights[k] / (w[i] + p.shifts[k]);
            }
        }
        ref_compose(n, v, f, exact);
        solve_plainly(&p, x);
        const double error = ref_distance(n * n, x, exact) / ref_norm(n * n, exact);
        CHECK(error <= 1e-12, "relative error %.3g", error);
    }
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

/* Diagonal matrices have a closed form: 0 is zero, 1 the identity, and 2 falls to 1e-6. */
static void check_diagonal(const precision *kind, int64_t n, int which)
{
    problem p = {.n = n, .a = square(n)};
    double *x = square(n);
    memset(p.a, 0, (size_t)(n * n) * sizeof *p.a);
    for (int64_t i = 0; i < n; i++) {
        p.a[i + i * n] =
            test_round(kind->dtype, which < 2 ? which : pow(10, -6.0 * (double)((i * 7919) % n) / (double)n));
    }
    choose_poles(&p, 7, 1e-3);
    CHECK(solve(kind, &p, x) == 0, "it failed");
    check_symmetric(n, x);
    for (int64_t i = 0; i < n * n; i++) {
        double exact = 0;
        for (int64_t k = 0; k < p.poles && i % n == i / n; k++) {
            exact += p.weights[k] / (p.a[i] + p.shifts[k]);
        }
        CHECK(fabs(x[i] - exact) <= 8 * kind->unit * exact, "x(%lld, %lld) is %.17g instead of %.17g",
              (long long)(i % n), (long long)(i / n), x[i], exact);
    }
}

TEST(diagonal_matrices)
{
    static const int64_t sizes[] = {1, 4, 32, 33, 64, 70, 150, 260};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int kind = 0; kind < PRECISIONS; kind++) {
            test_case("%s, n = %lld", precisions[kind].name, (long long)sizes[s]);
            for (int which = 0; which < 3; which++) {
                check_diagonal(&precisions[kind], sizes[s], which);
            }
        }
    }
}

/* Badly scaled rows and columns. tests/linalg/roots/test_root_errors.c has low ranks and matrices of huge and tiny
 * norm. */
TEST(graded_matrices)
{
    const int64_t n = 150;
    for (int kind = 0; kind < PRECISIONS; kind++) {
        test_case("%s", precisions[kind].name);
        problem p = make_problem(&precisions[kind], n, 8, 10);
        for (int64_t i = 0; i < n * n; i++) {
            p.a[i] *= pow(10, -5.0 * (double)((i % n * 31) % n + (i / n * 31) % n) / (double)n);
        }
        round_problem(&precisions[kind], &p);
        choose_poles(&p, 8, 1e-4);
        compare_forms(&precisions[kind], &p, expected_error(&precisions[kind], n, 2e4));
    }
}

TEST(matrices_that_are_not_finite_are_refused)
{
    static const int64_t sizes[] = {1, 30, 80, 200};
    static const double bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int trial = 0; trial < 12; trial++) {
            const int64_t n = sizes[s];
            const precision *kind = &precisions[trial % PRECISIONS];
            test_random random = test_random_stream((uint64_t)(n * 100 + trial));
            const int64_t i = (int64_t)(test_random_uniform(&random) * (double)n);
            const int64_t j = (int64_t)(test_random_uniform(&random) * (double)n);
            test_case("%s, n = %lld, %g at (%lld, %lld)", kind->name, (long long)n, bad[trial % 3], (long long)i,
                      (long long)j);
            problem p = make_problem(kind, n, 3, 10);
            double *x = square(n);
            p.a[i + j * n] = p.a[j + i * n] = bad[trial % 3];
            CHECK(solve(kind, &p, x) == -1, "it was taken");
        }
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

TEST(no_rows)
{
    const double one_pole = 1;
    for (int kind = 0; kind < PRECISIONS; kind++) {
        int status = precisions[kind].solver->solve(blas, 0, NULL, 1, 1, &one_pole, &one_pole, NULL, 1, NULL);
        assert_int_equal(status, 0);
    }
}

/* A batch is distributed over threads, each with its own matrix. */
TEST(calls_in_a_parallel_region_agree)
{
    enum { BATCH = 6 };
    for (int kind = 0; kind < PRECISIONS; kind++) {
        test_case("%s", precisions[kind].name);
        problem problems[BATCH];
        double *alone[BATCH], *together[BATCH];
        int failures = 0;
        for (int i = 0; i < BATCH; i++) {
            problems[i] = make_problem(&precisions[kind], 120 + 25 * i, 6, 1e3);
            alone[i] = square(problems[i].n);
            together[i] = square(problems[i].n);
            failures += solve(&precisions[kind], &problems[i], alone[i]) != 0;
        }
#pragma omp parallel for schedule(dynamic, 1) reduction(+ : failures)
        for (int i = 0; i < BATCH; i++) {
            failures += solve(&precisions[kind], &problems[i], together[i]) != 0;
        }
        CHECK(failures == 0, "%d calls failed", failures);
        for (int i = 0; i < BATCH; i++) {
            const int64_t count = problems[i].n * problems[i].n;
            const double error = ref_distance(count, alone[i], together[i]) / ref_norm(count, alone[i]);
            CHECK(error <= expected_error(&precisions[kind], problems[i].n, 1e3), "matrix %d differs by %.3g", i,
                  error);
        }
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

/* Accesses of the CPU backend's symmetric eigensolver: the other triangle of the input is NaN, columns have gaps, and
 * scratch and gaps are poisoned and checked afterwards. With u the unit roundoff and Frobenius norms:
 *
 *     |A V - V W|  <=  (n + 10) u |A|        |V'V - I|  <=  (n + 10) u sqrt(n)
 *
 * tests/linalg/test_conformance_eigen.c has matrices that are hard for divide and conquer. */
#include <math.h>
#include <string.h>

#include "backends/cpu/spectral/eigh/eigh.h"
#include "solver_test.h"
#include "support/linalg/reference.h"
#include "support/random.h"

enum { GAP = 3 };

static const double gap_value = 12345.0;
static const tchi_blas *blas;

typedef struct precision {
    const char *name;
    tch_dtype dtype;
    double unit; /* unit roundoff */
    const tchi_cpu_eigh_solver *solver;
} precision;

static const precision precisions[] = {
    {"float", {TCH_FLOAT, 32, 1}, 0x1p-24, &tchi_cpu_eigh_f32},
    {"double", {TCH_FLOAT, 64, 1}, 0x1p-53, &tchi_cpu_eigh_f64},
};

static size_t element_bytes(const precision *kind)
{
    return kind->dtype.bits / 8;
}

static double get_number(const precision *kind, const void *array, int64_t i)
{
    return test_decode(kind->dtype, (const char *)array + (size_t)i * element_bytes(kind));
}

static void set_number(const precision *kind, void *array, int64_t i, double value)
{
    test_encode(kind->dtype, value, (char *)array + (size_t)i * element_bytes(kind));
}

enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

/* The solver's input, and a in double, rounded to the precision. */
typedef struct problem {
    const precision *kind;
    int64_t n, lda;
    double *a;
    void *matrix, *w;
    char *scratch;
    size_t scratch_bytes;
} problem;

/* Column by column, the lower triangle; NaN above it and known numbers in the gaps. */
static void store_problem(problem *p)
{
    for (int64_t j = 0; j < p->n; j++) {
        for (int64_t i = 0; i < p->lda; i++) {
            double inside = i >= j ? p->a[j * p->n + (i < p->n ? i : 0)] : NAN;
            set_number(p->kind, p->matrix, j * p->lda + i, i < p->n ? inside : gap_value);
        }
    }
}

/* Of normal numbers. */
static problem make_problem(const precision *kind, int64_t n)
{
    problem p = {.kind = kind, .n = n, .lda = n + GAP, .scratch_bytes = kind->solver->scratch_bytes(n)};
    test_random random = test_random_stream(500 + (uint64_t)n);
    double *g = test_alloc((size_t)(n * n) * sizeof *g);
    test_random_fill_normal(&random, g, n * n);
    p.a = test_alloc((size_t)(n * n) * sizeof *p.a);
    p.matrix = make_poisoned((size_t)(n * p.lda) * element_bytes(kind));
    p.w = make_poisoned((size_t)n * element_bytes(kind));
    p.scratch = make_scratch(p.scratch_bytes);
    for (int64_t i = 0; i < n * n; i++) {
        p.a[i] = test_round(kind->dtype, g[i] + g[i % n * n + i / n]);
    }
    store_problem(&p);
    return p;
}

static void check_surroundings(const problem *p)
{
    check_scratch(p->scratch, p->scratch_bytes);
    for (int64_t j = 0; j < p->n; j++) {
        for (int64_t i = p->n; i < p->lda; i++) {
            CHECK(get_number(p->kind, p->matrix, j * p->lda + i) == gap_value, "the gap after column %lld changed",
                  (long long)j);
        }
    }
}

/* The vectors, one per row. */
static double *read_vectors(const problem *p)
{
    double *v = test_alloc((size_t)(p->n * p->n) * sizeof *v);
    for (int64_t i = 0; i < p->n * p->n; i++) {
        v[i] = get_number(p->kind, p->matrix, i / p->n * p->lda + i % p->n);
    }
    return v;
}

static void check_orthonormal(const problem *p, const double *v)
{
    int64_t n = p->n;
    double *columns = test_alloc((size_t)(n * n) * sizeof *columns), *gram = test_alloc((size_t)(n * n) * sizeof *gram);
    ref_transpose(n, n, v, columns);
    ref_matmul(n, n, n, v, columns, gram);
    for (int64_t i = 0; i < n; i++) {
        gram[i * n + i] -= 1.0;
    }
    double error = ref_norm(n * n, gram), bound = (double)(n + 10) * p->kind->unit * sqrt((double)n);
    CHECK(error <= bound, "|V'V - I| is %.3g > %.3g", error, bound);
}

static void check_residual(const problem *p, const double *v)
{
    int64_t n = p->n;
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    ref_matmul(n, n, n, v, p->a, product);
    for (int64_t i = 0; i < n * n; i++) {
        product[i] -= v[i] * get_number(p->kind, p->w, i / n);
        CHECK(i < n || get_number(p->kind, p->w, i / n) >= get_number(p->kind, p->w, i / n - 1),
              "eigenvalue %lld descends", (long long)(i / n));
    }
    double error = ref_norm(n * n, product), bound = (double)(n + 10) * p->kind->unit * ref_norm(n * n, p->a);
    CHECK(error <= bound, "|AV - VW| is %.3g > %.3g", error, bound);
}

static void check_solved(const problem *p, int result)
{
    CHECK(result == 0, "it returned %d", result);
    check_surroundings(p);
    double *v = read_vectors(p);
    check_orthonormal(p, v);
    check_residual(p, v);
}

static int solve_problem(const problem *p)
{
    return p->kind->solver->solve(blas, p->n, p->matrix, p->lda, p->w, p->scratch);
}

TEST(sizes)
{
    for (int64_t n = 1; n <= 450; n += n < 80 ? 1 : 37) {
        for (int t = 0; t < PRECISIONS; t++) {
            test_case("%s, n = %lld", precisions[t].name, (long long)n);
            problem p = make_problem(&precisions[t], n);
            check_solved(&p, solve_problem(&p));
        }
    }
}

static void check_refused(const precision *kind, int64_t n, int64_t row, int64_t column, double wrong)
{
    test_case("%s, n = %lld, %g at (%lld, %lld)", kind->name, (long long)n, wrong, (long long)row, (long long)column);
    problem p = make_problem(kind, n);
    size_t bytes = (size_t)(n * p.lda) * element_bytes(kind);
    set_number(kind, p.matrix, column * p.lda + row, wrong);
    void *before = test_alloc(bytes);
    memcpy(before, p.matrix, bytes);
    int result = solve_problem(&p);
    CHECK(result == TCHI_EIGH_NOT_FINITE, "it returned %d", result);
    CHECK(memcmp(before, p.matrix, bytes) == 0, "the matrix changed");
    CHECK(isnan(get_number(kind, p.w, 0)), "the eigenvalues changed");
}

TEST(matrices_that_are_not_finite_are_refused)
{
    static const int64_t sizes[] = {1, 2, 20, 70, 300};
    static const double wrong[] = {NAN, INFINITY, -INFINITY};
    for (size_t s = 0; s < TEST_COUNT(sizes); s++) {
        for (size_t k = 0; k < TEST_COUNT(wrong); k++) {
            for (int t = 0; t < PRECISIONS; t++) {
                check_refused(&precisions[t], sizes[s], 0, 0, wrong[k]);
                check_refused(&precisions[t], sizes[s], sizes[s] - 1, 0, wrong[k]);
                check_refused(&precisions[t], sizes[s], sizes[s] - 1, sizes[s] - 1, wrong[k]);
            }
        }
    }
}

TEST(no_rows)
{
    for (int t = 0; t < PRECISIONS; t++) {
        test_case("%s, n = 0", precisions[t].name);
        int result = precisions[t].solver->solve(blas, 0, NULL, 1, NULL, NULL);
        CHECK(result == 0, "it returned %d", result);
    }
}

/* Inside a parallel region each call stays on its thread. */
TEST(a_batch_in_a_parallel_region)
{
    enum { BATCH = 8 };
    static const int64_t sizes[BATCH] = {30, 64, 90, 128, 200, 256, 300, 400};
    for (int t = 0; t < PRECISIONS; t++) {
        problem problems[BATCH];
        int results[BATCH];
        for (int i = 0; i < BATCH; i++) {
            problems[i] = make_problem(&precisions[t], sizes[i]);
        }
#pragma omp parallel for schedule(dynamic)
        for (int i = 0; i < BATCH; i++) {
            results[i] = solve_problem(&problems[i]);
        }
        for (int i = 0; i < BATCH; i++) {
            test_case("%s, number %d of a batch", precisions[t].name, i);
            check_solved(&problems[i], results[i]);
        }
    }
}

int main(int argc, char **argv)
{
    test_begin(argc, argv);
    blas = open_blas();
    return test_run(__FILE__, NULL, NULL);
}

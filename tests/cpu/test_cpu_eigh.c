/* The CPU backend's symmetric eigensolver, on matrices that are hard for divide and conquer. With u the round-off and
 * Frobenius norms:
 *     |A V - V W|  <=  (n + 10) u |A|        |V'V - I|  <=  (n + 10) u sqrt(n)
 *     |w - w_ref|  <=  (n + 10) u |A|        w_ref from LAPACK in double
 * The other triangle of the input is NaN, columns have gaps, and scratch and gaps are poisoned and looked at after. */
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
    double unit, huge, tiny; /* round-off, and factors that leave almost no room above and below */
    const tchi_cpu_eigh_solver *solver;
} precision;

static const precision precisions[] = {
    {"float", {TCH_FLOAT, 32, 1}, 0x1p-24, 1e30, 1e-36, &tchi_cpu_eigh_f32},
    {"double", {TCH_FLOAT, 64, 1}, 0x1p-53, 1e300, 1e-300, &tchi_cpu_eigh_f64},
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

/* The matrices: the first by their entries, those from CLUSTERED on by their eigenvalues. */
typedef enum matrix_kind {
    NORMAL,
    ZERO,
    ONES,
    IDENTITY,
    DIAGONAL,
    SECOND_DIFFERENCE, /* 2 on the diagonal, 1 beside it */
    GLUED_WILKINSON,   /* of order 21, whose eigenvalues come in close pairs, glued together by small entries */
    RANK_ONE_PLUS_IDENTITY,
    GRADED, /* entries fall by thirty orders of magnitude down the diagonal */
    GRADED_UPWARDS,
    CLUSTERED,
    TWO_VALUES,
    GEOMETRIC,
    RANK_THREE,
    KINDS
} matrix_kind;

static const char *const kind_names[KINDS] = {
    "normal",
    "zero",
    "ones",
    "identity",
    "diagonal",
    "second difference",
    "glued Wilkinson",
    "rank one plus identity",
    "graded",
    "graded upwards",
    "clustered",
    "two values",
    "geometric",
    "rank three",
};

/* g holds n by n normal numbers. */
static double entry(matrix_kind kind, int64_t n, const double *g, int64_t row, int64_t col)
{
    int64_t later = row > col ? row : col;
    double diagonal = row == col;
    double beside = row - col == 1 || col - row == 1;
    double random = g[row * n + col] + g[col * n + row];
    double place = (double)(row + col) / (double)(2 * n);
    switch (kind) {
    case NORMAL:
        return random;
    case ZERO:
        return 0.0;
    case ONES:
        return 1.0;
    case IDENTITY:
        return diagonal;
    case DIAGONAL:
        return diagonal * g[row];
    case SECOND_DIFFERENCE:
        return 2.0 * diagonal + beside;
    case GLUED_WILKINSON:
        return diagonal * fabs((double)(row % 21 - 10)) + beside * (later % 21 == 0 ? 1e-7 : 1.0);
    case RANK_ONE_PLUS_IDENTITY:
        return g[row] * g[col] + diagonal;
    default:
        return random * pow(10.0, -30.0 * (kind == GRADED ? place : 1.0 - place));
    }
}

static double eigenvalue(matrix_kind kind, int64_t n, const double *g, int64_t i)
{
    switch (kind) {
    case CLUSTERED:
        return 1.0 + 1e-9 * g[i];
    case TWO_VALUES:
        return i < n / 2 ? -1.0 : 1.0;
    case GEOMETRIC:
        return pow(10.0, -12.0 * (double)i / (double)n);
    default:
        return i < 3 ? 1.0 : 0.0;
    }
}

static void fill_matrix(matrix_kind kind, int64_t n, const double *g, double *a)
{
    test_random random = test_random_stream(900 + (uint64_t)n);
    double *w = test_alloc((size_t)n * sizeof *w);
    for (int64_t i = 0; i < n && kind >= CLUSTERED; i++) {
        w[i] = eigenvalue(kind, n, g, i);
    }
    if (kind >= CLUSTERED) {
        ref_symmetric(&random, n, w, a);
    }
    for (int64_t i = 0; i < n * n && kind < CLUSTERED; i++) {
        a[i] = entry(kind, n, g, i / n, i % n);
    }
}

enum { PRECISIONS = sizeof precisions / sizeof precisions[0] };

/* A problem as the solver sees it, and a in double, rounded to the precision. */
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

static problem make_problem(const precision *kind, int64_t n, matrix_kind matrix, double factor)
{
    problem p = {.kind = kind, .n = n, .lda = n + GAP, .scratch_bytes = kind->solver->scratch_bytes(n)};
    test_random random = test_random_stream(500 + (uint64_t)n);
    double *g = test_alloc((size_t)(n * n) * sizeof *g);
    test_random_fill_normal(&random, g, n * n);
    p.a = test_alloc((size_t)(n * n) * sizeof *p.a);
    p.matrix = make_poisoned((size_t)(n * p.lda) * element_bytes(kind));
    p.w = make_poisoned((size_t)n * element_bytes(kind));
    p.scratch = make_scratch(p.scratch_bytes);
    fill_matrix(matrix, n, g, p.a);
    for (int64_t i = 0; i < n * n; i++) {
        set_number(kind, p.w, 0, p.a[i] * factor);
        p.a[i] = get_number(kind, p.w, 0);
    }
    for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < i; j++) {
            p.a[i * n + j] = p.a[j * n + i];
        }
        set_number(kind, p.w, i, NAN);
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

/* a is compared after division by its largest entry, so that norms neither overflow nor vanish. */
static void check_residual(const problem *p, const double *v)
{
    int64_t n = p->n;
    double scale = ref_largest(n * n, p->a);
    scale = scale > 0.0 ? scale : 1.0;
    double *a = test_alloc((size_t)(n * n) * sizeof *a), *product = test_alloc((size_t)(n * n) * sizeof *product);
    for (int64_t i = 0; i < n * n; i++) {
        a[i] = p->a[i] / scale;
    }
    ref_matmul(n, n, n, v, a, product);
    for (int64_t i = 0; i < n * n; i++) {
        product[i] -= v[i] * (get_number(p->kind, p->w, i / n) / scale);
    }
    double error = ref_norm(n * n, product), bound = (double)(n + 10) * p->kind->unit * ref_norm(n * n, a);
    CHECK(error <= bound, "|AV - VW| / max|A| is %.3g > %.3g", error, bound);
}

static void check_values(const problem *p)
{
    int order = (int)p->n, lwork = 2 * order * order + 6 * order + 1, liwork = 5 * order + 3, info = 0;
    int64_t n = p->n;
    double scale = ref_largest(n * n, p->a);
    scale = scale > 0.0 ? scale : 1.0;
    double *a = test_alloc((size_t)(n * n) * sizeof *a), *w = test_alloc((size_t)n * sizeof *w);
    double *work = test_alloc((size_t)lwork * sizeof *work);
    int *iwork = test_alloc((size_t)liwork * sizeof *iwork);
    for (int64_t i = 0; i < n * n; i++) {
        a[i] = p->a[i] / scale;
    }
    double bound = (double)(n + 10) * p->kind->unit * ref_norm(n * n, a);
    blas->f64.syevd("N", "L", &order, a, &order, w, work, &lwork, iwork, &liwork, &info, 1, 1);
    CHECK(info == 0, "LAPACK's dsyevd gave %d", info);
    for (int64_t i = 0; i < n; i++) {
        double ours = get_number(p->kind, p->w, i) / scale;
        CHECK(fabs(ours - w[i]) <= bound, "eigenvalue %lld is %.17g instead of %.17g", (long long)i, ours, w[i]);
        CHECK(i == 0 || get_number(p->kind, p->w, i) >= get_number(p->kind, p->w, i - 1), "eigenvalue %lld descends",
              (long long)i);
    }
}

static void check_solved(const problem *p, int result)
{
    CHECK(result == 0, "it returned %d", result);
    check_surroundings(p);
    double *v = read_vectors(p);
    check_orthonormal(p, v);
    check_residual(p, v);
    check_values(p);
}

static int solve_problem(const problem *p)
{
    return p->kind->solver->solve(blas, p->n, p->matrix, p->lda, p->w, p->scratch);
}

static void check_one(const precision *kind, int64_t n, matrix_kind matrix, double factor)
{
    test_case("%s, n = %lld, %s times %g", kind->name, (long long)n, kind_names[matrix], factor);
    problem p = make_problem(kind, n, matrix, factor);
    check_solved(&p, solve_problem(&p));
}

static void check_both(int64_t n, matrix_kind matrix)
{
    check_one(&precisions[0], n, matrix, 1.0);
    check_one(&precisions[1], n, matrix, 1.0);
}

TEST(test_kinds)
{
    static const int64_t sizes[] = {1, 2, 3, 4, 7, 16, 17, 24, 25, 33, 64, 65, 100, 129, 257};
    for (size_t s = 0; s < TEST_COUNT(sizes); s++) {
        for (int k = 0; k < KINDS; k++) {
            check_both(sizes[s], (matrix_kind)k);
        }
    }
    for (int64_t n = 1; n <= 80; n++) {
        check_both(n, NORMAL);
    }
}

/* Large enough for several threads to work on one matrix. */
TEST(test_large)
{
    static const matrix_kind some[] = {NORMAL, SECOND_DIFFERENCE, GLUED_WILKINSON, GEOMETRIC};
    for (size_t k = 0; k < TEST_COUNT(some); k++) {
        check_both(450, some[k]);
    }
}

TEST(test_huge_and_tiny)
{
    static const int64_t sizes[] = {1, 2, 5, 40, 130};
    for (size_t s = 0; s < TEST_COUNT(sizes); s++) {
        for (int t = 0; t < PRECISIONS; t++) {
            check_one(&precisions[t], sizes[s], NORMAL, precisions[t].huge);
            check_one(&precisions[t], sizes[s], NORMAL, precisions[t].tiny);
        }
    }
}

static void check_refused(const precision *kind, int64_t n, int64_t row, int64_t column, double wrong)
{
    test_case("%s, n = %lld, %g at (%lld, %lld)", kind->name, (long long)n, wrong, (long long)row, (long long)column);
    problem p = make_problem(kind, n, NORMAL, 1.0);
    size_t bytes = (size_t)(n * p.lda) * element_bytes(kind);
    set_number(kind, p.matrix, column * p.lda + row, wrong);
    void *before = test_alloc(bytes);
    memcpy(before, p.matrix, bytes);
    int result = solve_problem(&p);
    CHECK(result == TCHI_EIGH_NOT_FINITE, "it returned %d", result);
    CHECK(memcmp(before, p.matrix, bytes) == 0, "the matrix changed");
    CHECK(isnan(get_number(kind, p.w, 0)), "the eigenvalues changed");
}

TEST(test_not_finite)
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

TEST(test_empty)
{
    for (int t = 0; t < PRECISIONS; t++) {
        test_case("%s, n = 0", precisions[t].name);
        int result = precisions[t].solver->solve(blas, 0, NULL, 1, NULL, NULL);
        CHECK(result == 0, "it returned %d", result);
    }
}

/* Inside a parallel region each call stays on its thread. */
TEST(test_batch)
{
    enum { BATCH = 8 };
    static const int64_t sizes[BATCH] = {30, 64, 90, 128, 200, 256, 300, 400};
    for (int t = 0; t < PRECISIONS; t++) {
        problem problems[BATCH];
        int results[BATCH];
        for (int i = 0; i < BATCH; i++) {
            problems[i] = make_problem(&precisions[t], sizes[i], (matrix_kind)i, 1.0);
        }
#pragma omp parallel for schedule(dynamic)
        for (int i = 0; i < BATCH; i++) {
            results[i] = solve_problem(&problems[i]);
        }
        for (int i = 0; i < BATCH; i++) {
            test_case("%s, %s of a batch", precisions[t].name, kind_names[i]);
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

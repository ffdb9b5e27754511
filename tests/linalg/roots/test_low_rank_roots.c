/* Roots of many random matrices of low rank by the Newton method, whose polynomials hold only up to the bound they are
 * given. What is looked for is rare: a start of the iteration for the largest eigenvalue with next to nothing along its
 * eigenvector, which settles on the second largest. The damping is far above rounding: every root must be good. */

#include <math.h>

#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

enum { MATRICES = 2000 };

/* One G G' after the other, G [n, rank] normal. */
static double *low_rank(int64_t n, int64_t rank, test_random *random)
{
    double *values = test_alloc((size_t)(MATRICES * n * n) * sizeof *values);
    double *g = test_alloc((size_t)(n * rank) * sizeof *g);
    for (int64_t b = 0; b < MATRICES; b++) {
        test_random_fill_normal(random, g, n * rank);
        for (int64_t i = 0; i < n; i++) {
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t k = 0; k < rank; k++) {
                    sum += g[i * rank + k] * g[j * rank + k];
                }
                values[(b * n + i) * n + j] = sum;
            }
        }
    }
    return values;
}

static void check_roots(tch_context *context, int64_t n, int64_t rank)
{
    const int64_t shape[] = {MATRICES, n, n};
    test_random random = test_random_stream((uint64_t)(1000 * n + rank));
    double *values = low_rank(n, rank, &random);
    test_tensor *a = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *x = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = TCH_ROOT_NEWTON;
    config.relative_eps = 1e-4;
    test_case("%d matrices of %lld by %lld, rank %lld", MATRICES, (long long)n, (long long)n, (long long)rank);
    test_tensor_write(a, values);
    CHECK_OK(tch_inverse_root(context, &a->tensor, 4, &config, &x->tensor, NULL, &report->tensor));
    double *reports = test_tensor_read(report);
    for (int64_t b = 0; b < MATRICES; b++) {
        CHECK(reports[b] == TCH_REPORT_OK, "matrix %lld is reported as %g", (long long)b, reports[b]);
    }
}

static void every_root_is_good(void **state)
{
    check_roots(*state, 21, 3);
    check_roots(*state, 13, 4);
    check_roots(*state, 40, 5);
}

enum { SIZE = 64 };

/* The start of the iteration, and beside it u with 3e-5 along it, both of length 1. */
static void start_and_other(double *start, double *u)
{
    uint64_t bits = 0x853C49E6748FEA9Bu;
    double sum = 0.0;
    for (int i = 0; i < SIZE; i++) {
        bits = bits * 0x5851F42D4C957F2Du + 0x14057B7EF767814Fu;
        start[i] = ((bits >> 63) != 0 ? 1.0 : -1.0) * (1.0 + 0.5 * (double)((bits >> 40) & 0xFFFF) / 65536.0);
        sum += start[i] * start[i];
    }
    for (int i = 0; i < SIZE; i++) {
        start[i] /= sqrt(sum);
    }
    double pair = sqrt(start[0] * start[0] + start[1] * start[1]);
    for (int i = 0; i < SIZE; i++) {
        double across = i == 0 ? start[1] / pair : i == 1 ? -start[0] / pair : 0.0;
        u[i] = sqrt(1.0 - 9e-10) * across + 3e-5 * start[i];
    }
}

/* The largest eigenvalue, 1.05, belongs to u, and the start is nearly the eigenvector of the next, 1: its residual of
 * 1.5e-6 passes unless a tight tolerance asks for less. Scaled by 1 the root would diverge. */
static void a_tight_tolerance_finds_what_the_start_hides(void **state)
{
    const int64_t shape[] = {SIZE, SIZE};
    double start[SIZE];
    double u[SIZE];
    double values[SIZE * SIZE];
    test_case("an eigenvector that the start does not have");
    start_and_other(start, u);
    for (int i = 0; i < SIZE * SIZE; i++) {
        values[i] = 1.05 * u[i / SIZE] * u[i % SIZE] + start[i / SIZE] * start[i % SIZE];
    }
    test_tensor *a = test_tensor_make(*state, TCH_FLOAT64, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor *x = test_tensor_make(*state, TCH_FLOAT64, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(*state, TCH_INT32, 0, NULL, LAYOUT_CONTIGUOUS);
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = TCH_ROOT_NEWTON;
    config.relative_eps = 1e-3;
    config.tolerance = 1e-5;
    test_tensor_write(a, values);
    CHECK_OK(tch_inverse_root(*state, &a->tensor, 4, &config, &x->tensor, NULL, &report->tensor));
    double *flag = test_tensor_read(report);
    CHECK(*flag == TCH_REPORT_OK, "the root was refused: %g", *flag);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_root_is_good),
                                       cmocka_unit_test(a_tight_tolerance_finds_what_the_start_hides)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

/* Roots of many random matrices of low rank by the Newton method, whose polynomials hold only up to the bound they are
 * given. What is looked for is rare: a start of the iteration for the largest eigenvalue with next to nothing along its
 * eigenvector, which settles on the second largest. The damping is far above rounding: every root must be good. */

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

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_root_is_good)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

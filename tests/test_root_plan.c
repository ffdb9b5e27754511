/* What certificate a plan of the Newton method accepts where a backend has products of lower precision: a table with
 * the rates of a GPU stands before the one of the CPU, and nothing is computed. The figures are those of root_plan.c: at
 * low = 1e-6 good roots showed up to 0.057, at large low rounding shows nothing, and above a tenth a root is
 * nonsense. */
#include "support/testing.h"

#include "core/context.h"
#include "linalg/root_plan.h"

static void gpu_rates(void *state, tch_product_rates *rates)
{
    (void)state;
    *rates = (tch_product_rates){60.0, 50.0, 200.0, 700.0};
}

static double residual_at(tch_context *context, double relative_eps)
{
    tchi_root_plan plan;
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    const tch_backend *own = context->backend;
    tch_backend table = *own;
    table.product_rates = gpu_rates;
    table.shifted_inverse = NULL;
    how.relative_eps = relative_eps;
    context->backend = &table;
    tch_status status = tchi_root_plan_make(context, TCH_SCALAR_F32, 512, 4, &how, &plan);
    context->backend = own;
    CHECK_OK(status);
    CHECK(plan.method == TCH_ROOT_NEWTON, "the method is %s", tch_root_method_name(plan.method));
    return plan.residual;
}

static void residuals_allow_for_rounding(void **state)
{
    double usual = 4.0 * 4 * 1e-3; /* root 4, the default tolerance */
    test_case("residuals by damping");
    double residual = residual_at(*state, 1e-6);
    CHECK(residual >= 0.057 && residual <= 0.1, "at 1e-6 %g is accepted", residual);
    residual = residual_at(*state, 1e-2);
    CHECK(residual == usual, "at 1e-2 %g is accepted, expected %g", residual, usual);
    residual = residual_at(*state, 1e-8);
    CHECK(residual <= 0.1, "at 1e-8 %g is accepted", residual);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(residuals_allow_for_rounding)};
    test_begin(argc, argv);
    return cmocka_run_group_tests(tests, test_open_context, test_close_context);
}

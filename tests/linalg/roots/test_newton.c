/* The coupled Newton iteration in mixed precision, and the choice of precision for other GPUs. The split type and
 * mixed-type products are modeled here on top of the CPU's table: the test covers the iteration above them.
 *
 * The error of the result vs the float64 root must be within the plan's tolerance, and the part visible to the
 * certificate within the plan's limit. */
#include "core/context.h"
#include "linalg/newton.h"
#include "linalg/root_plan.h"
#include "support/backend/table_copy.h"
#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/testing.h"

/* --- a model of a GPU's arithmetic ------------------------------------------------------------------------------- */

static float to_bf16(float value)
{
    return (float)test_round(TCH_BFLOAT16, value);
}

/* One of the two parts of a split number: its plane has the upper halves of floats. */
static uint16_t *plane(const tch_matrices *m, int64_t b, int low)
{
    return (uint16_t *)m->data + (2 * b + low) * m->stride;
}

static float part(const tch_matrices *m, int64_t b, int64_t i, int64_t j, int low)
{
    uint32_t bits = (uint32_t)plane(m, b, low)[i * m->ld + j] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put_part(const tch_matrices *m, int64_t b, int64_t i, int64_t j, int low, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    plane(m, b, low)[i * m->ld + j] = (uint16_t)(bits >> 16);
}

static double get(const tch_matrices *m, int64_t b, int64_t i, int64_t j)
{
    int64_t at = b * m->stride + i * m->ld + j;
    switch (m->type) {
    case TCH_SCALAR_F64:
        return ((const double *)m->data)[at];
    case TCH_SCALAR_F32:
        return (double)((const float *)m->data)[at];
    case TCH_SCALAR_BF16: { /* a plane of the split type */
        uint32_t bits = (uint32_t)((const uint16_t *)m->data)[at] << 16;
        float value;
        memcpy(&value, &bits, sizeof value);
        return (double)value;
    }
    default:
        return (double)part(m, b, i, j, 0) + (double)part(m, b, i, j, 1);
    }
}

static void put(const tch_matrices *m, int64_t b, int64_t i, int64_t j, double value)
{
    int64_t at = b * m->stride + i * m->ld + j;
    if (m->type == TCH_SCALAR_F64) {
        ((double *)m->data)[at] = value;
    } else if (m->type == TCH_SCALAR_F32) {
        ((float *)m->data)[at] = (float)value;
    } else {
        float high = to_bf16((float)value);
        put_part(m, b, i, j, 0, high);
        put_part(m, b, i, j, 1, to_bf16((float)value - high));
    }
}

/* Row i of A times row j of B, in their compute type. */
static double dot(const tch_matrices *a, const tch_matrices *b, int64_t matrix, int64_t i, int64_t j)
{
    if (a->type != TCH_SCALAR_BF16X2) {
        double wide = 0.0;
        float narrow = 0.0F;
        for (int64_t k = 0; k < a->cols; k++) {
            wide += get(a, matrix, i, k) * get(b, matrix, j, k);
            narrow += (float)get(a, matrix, i, k) * (float)get(b, matrix, j, k);
        }
        return a->type == TCH_SCALAR_F64 ? wide : (double)narrow;
    }
    float sum = 0.0F;
    for (int64_t k = 0; k < a->cols; k++) {
        sum += part(a, matrix, i, k, 0) * part(b, matrix, j, k, 0);
        sum += part(a, matrix, i, k, 0) * part(b, matrix, j, k, 1);
        sum += part(a, matrix, i, k, 1) * part(b, matrix, j, k, 0);
    }
    return (double)sum;
}

static tch_status model_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                const tch_matrices *a, const tch_matrices *b, const double *scale, int32_t exponent,
                                const tch_matrices *c)
{
    (void)state, (void)scale, (void)exponent;
    for (int64_t m = 0; m < c->batch; m++) {
        for (int64_t i = 0; i < c->rows; i++) {
            for (int64_t j = 0; j <= i; j++) {
                double value = c2 * dot(a, b, m, i, j) + (d != NULL ? c1 * get(d, m, i, j) : 0.0);
                value += i == j ? c0 : 0.0;
                put(c, m, i, j, value);
                put(c, m, j, i, value);
            }
        }
    }
    return TCH_OK;
}

static tch_status model_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                             int32_t rounded, const tch_matrices *c)
{
    CHECK(!transpose && beta == 0.0 && !rounded, "not modeled");
    return model_product(state, 0.0, 0.0, NULL, alpha, a, a, NULL, 0, c);
}

/* Restores the CPU's table after any test. */
static const tch_backend *own_table;

/* The float32 product of two bfloat16 matrices. */
static tch_status model_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                             const tch_matrices *b, int32_t transpose_b, double beta, int32_t rounded,
                             const tch_matrices *c)
{
    if (a->type != TCH_SCALAR_BF16) {
        return own_table->matrix->gemm(state, alpha, a, transpose_a, b, transpose_b, beta, rounded, c);
    }
    CHECK(!transpose_a && !transpose_b && c->type == TCH_SCALAR_F32, "not modeled");
    for (int64_t e = 0; e < c->batch * c->rows * c->cols; e++) {
        int64_t m = e / (c->rows * c->cols);
        int64_t i = e / c->cols % c->rows;
        int64_t j = e % c->cols;
        float sum = 0.0F;
        for (int64_t k = 0; k < a->cols; k++) {
            sum += (float)get(a, m, i, k) * (float)get(b, m, k, j);
        }
        put(c, m, i, j, (double)((float)alpha * sum + (beta != 0.0 ? (float)beta * (float)get(c, m, i, j) : 0.0F)));
    }
    return TCH_OK;
}

static tch_status model_shift_scale(void *state, const tch_matrices *x, const double *shift, const double *scale,
                                    double exponent, const tch_matrices *out)
{
    (void)shift;
    for (int64_t m = 0; m < x->batch; m++) {
        double factor = scale != NULL ? pow(scale[m], exponent) : 1.0;
        for (int64_t i = 0; i < x->rows; i++) {
            for (int64_t j = 0; j < x->cols; j++) {
                put(out, m, i, j, get(x, m, i, j) * factor);
            }
        }
    }
    return TCH_OK;
}

/* --- the iteration ----------------------------------------------------------------------------------------------- */

static const tch_product_rates with_f64_cores = {.f64 = 56.0, .f32 = 50.0, .bf16x2 = 200.0, .bf16 = 700.0};
static const tch_product_rates without_f64_cores = {.f64 = 0.5, .f32 = 30.0, .bf16x2 = 40.0, .bf16 = 130.0};
static const tch_product_rates without_bf16 = {.f64 = 0.5, .f32 = 16.0, .bf16x2 = 0.0, .bf16 = 0.0};
static const tch_product_rates only_f64 = {.f64 = 1.0, .f32 = 0.0, .bf16x2 = 0.0, .bf16 = 0.0};

static const int32_t roots[] = {1, 2, 3, 4, 6, 8};

static tchi_newton_plan make_plan(int32_t root, int degree, double low, double tolerance,
                                  const tch_product_rates *rates)
{
    tchi_newton_plan plan = {.root = root, .degree = degree};
    plan.steps = tchi_minimax_plan(root, degree, low, 0.25 * tolerance, plan.step);
    CHECK(plan.steps > 0, "no plan for root %d, low %g", root, low);
    tchi_newton_end(&plan, 0.25 * tolerance);
    tchi_newton_choose_types(&plan, rates, low, tolerance);
    return plan;
}

/* With steps of degree 4 where they are cheaper. */
static tchi_newton_plan make_steep_plan(int32_t root, double low, double tolerance, const tch_product_rates *rates)
{
    tchi_newton_plan plan = make_plan(root, 2, low, tolerance, rates);
    tchi_newton_steepen(&plan, rates, low, 0.25 * tolerance, tolerance);
    return plan;
}

enum { BATCH = 2 };

typedef struct problem {
    int64_t n;
    double *m, *expected;
} problem;

/* Random matrices with spectra from `low` to 1, or of low rank and damped by `low`, and their inverse roots. */
static problem make_problem(int64_t n, int32_t root, double low, int64_t rank)
{
    size_t size = (size_t)(n * n) * sizeof(double);
    problem p = {n, test_zeros(BATCH * n * n), test_zeros(BATCH * n * n)};
    test_random random = test_random_stream((uint64_t)(n * 100 + root));
    double *spectrum = test_zeros(n);
    double *w = test_zeros(n);
    double *v = test_zeros(n * n);
    ref_spectrum(n, 1.0 / low, spectrum);
    for (int64_t i = 0; i < n && rank < n; i++) {
        spectrum[i] = i < rank ? 0.25 + 0.75 * test_random_uniform(&random) : low;
    }
    for (int64_t at = 0; at < BATCH * n * n; at += n * n) {
        ref_symmetric(&random, n, spectrum, p.m + at);
        ref_eigh(n, p.m + at, w, v);
        memcpy(p.expected + at, ref_power(n, w, v, 0.0, -1.0 / root), size);
    }
    return p;
}

static tch_matrices padded(int64_t n, tch_scalar type)
{
    int64_t ld = (n + 7) / 8 * 8;
    size_t bytes = (size_t)(BATCH * n * ld) * 8;
    tch_matrices m = {test_alloc(bytes), type, n, n, ld, BATCH, n * ld};
    memset(m.data, 0xff, bytes);
    return m;
}

/* |X R| / (p |X|), R = X^floor(p/2) M X^ceil(p/2) - I, as in the certificate. */
static double shown_error(int64_t n, int32_t root, const double *m, const double *x)
{
    double *y = test_alloc((size_t)(n * n) * sizeof *y);
    double *next = test_alloc((size_t)(n * n) * sizeof *next);
    memcpy(y, x, (size_t)(n * n) * sizeof *y);
    for (int step = 1; step <= root + 1; step++) {
        for (int64_t i = 0; i < n && step == root + 1; i++) {
            y[i * n + i] -= 1.0;
        }
        ref_matmul(n, n, n, step == root - root / 2 ? m : x, y, next);
        memcpy(y, next, (size_t)(n * n) * sizeof *y);
    }
    double shown = ref_norm(n * n, y) / ref_norm(n * n, x) / root;
    return shown;
}

/* The largest error of the batch; `shown`, if not NULL, is set to the largest in the certificate. */
static double run_iteration(tch_context *context, const tchi_newton_plan *plan, const problem *p, double *shown)
{
    int64_t n = p->n;
    tchi_newton_buffers buffers;
    for (int k = 0; k < TCHI_NEWTON_BUFFERS; k++) {
        buffers.m[k] = padded(n, tchi_newton_type_of_m(plan, 0));
    }
    for (int64_t i = 0; i < BATCH * n * n; i++) {
        put(&buffers.m[0], i / (n * n), i / n % n, i % n, p->m[i]);
    }
    tch_matrices x;
    int32_t flags[BATCH] = {TCH_REPORT_OK};
    CHECK_OK(tchi_newton(context, plan, &buffers, flags, &x));
    CHECK(flags[0] == TCH_REPORT_OK && flags[1] == TCH_REPORT_OK, "a matrix is flagged");
    double worst = 0.0;
    double *got = test_alloc((size_t)(n * n) * sizeof *got);
    for (int64_t b = 0; b < BATCH; b++) {
        for (int64_t i = 0; i < n * n; i++) {
            got[i] = get(&x, b, i / n, i % n);
        }
        const double *right = p->expected + b * n * n;
        double error = ref_distance(n * n, got, right) / ref_norm(n * n, right);
        worst = error <= worst ? worst : error;
        if (shown != NULL) {
            *shown = fmax(*shown, shown_error(n, plan->root, p->m + b * n * n, got));
        }
    }
    return worst;
}

static void gpu_rates(void *state, tch_product_rates *rates)
{
    *rates = with_f64_cores;
}

static table_copy table;

/* The CPU's table with the model's products. */
static int use_model(void **state)
{
    tch_context *context = *state;
    own_table = context->backend;
    table_copy_make(&table, own_table);
    table.matrix.symmetric_product = model_product;
    table.matrix.gram = model_gram;
    table.matrix.gemm = model_gemm;
    table.matrix.shift_scale = model_shift_scale;
    context->backend = &table.backend;
    return 0;
}

/* And a GPU's choice of methods. */
static int use_gpu_model(void **state)
{
    use_model(state);
    table.matrix.product_rates = gpu_rates;
    table.matrix.shifted_inverse = NULL;
    return 0;
}

static int restore_table(void **state)
{
    ((tch_context *)*state)->backend = own_table;
    return 0;
}

TEST_WITH(mixed_arithmetic_keeps_its_tolerance, use_model, restore_table)
{
    static const struct {
        const char *name;
        const tch_product_rates *rates;
    } devices[] = {{"float64 tensor cores", &with_f64_cores},
                   {"slow float64", &without_f64_cores},
                   {"no bfloat16", &without_bf16},
                   {"float64 alone", &only_f64}};
    static const double lows[] = {1e-1, 1e-3, 1e-5, 1e-6};
    tch_context *context = *state;
    for (int i = 0; i < 6 * 4; i++) {
        int32_t root = roots[i / 4];
        double low = lows[i % 4];
        int64_t n = 20 + i / 4;
        problem p = make_problem(n, root, low, n);
        for (int degree = 1; degree <= 3; degree++) {
            int device = (i + i / 4 + degree) % 4;
            test_case("root %d, degree %d, low %g, %s", root, degree, low, devices[device].name);
            tchi_newton_plan plan = degree < 3 ? make_plan(root, degree, low / 1.02, 1e-3, devices[device].rates)
                                               : make_steep_plan(root, low / 1.02, 1e-3, devices[device].rates);
            double error = run_iteration(context, &plan, &p, NULL);
            CHECK(error <= 1e-3, "error %.3g", error);
        }
    }
}

/* Steps of degree 4 have no larger rounding errors in one type than those of degree 2: float64, for a tolerance of
 * 1e-9. */
TEST_WITH(tight_tolerances_are_kept, use_model, restore_table)
{
    tch_context *context = *state;
    int shorter = 0;
    for (int i = 0; i < 5 * 3; i++) {
        int32_t root = roots[1 + i / 3];
        double low = pow(10.0, -2.0 - i % 3);
        int64_t n = 20 + i;
        test_case("root %d, low %g", root, low);
        problem p = make_problem(n, root, low, n);
        tchi_newton_plan plan = make_steep_plan(root, low / 1.02, 1e-9, &with_f64_cores);
        shorter += plan.steps < make_plan(root, 2, low / 1.02, 1e-9, &with_f64_cores).steps;
        double error = run_iteration(context, &plan, &p, NULL);
        CHECK(error <= 1e-9, "error %.3g", error);
    }
    CHECK(shorter > 5, "%d plans are shorter", shorter);
}

/* Low-rank matrices show most of X's rounding, for which the plan must leave room. */
TEST_WITH(mixed_arithmetic_passes_its_certificate, use_gpu_model, restore_table)
{
    static const double dampings[] = {1e-2, 1e-4, 1e-6};
    static const double tolerances[] = {1e-3, 1e-2, 3e-2};
    tch_context *context = *state;
    const int64_t n = 48;
    for (int i = 0; i < 3 * 6 * 3 * 2; i += 1 + i % 2 * 2) { /* every second damping of a rank */
        tchi_root_plan plan;
        tch_root_config how = TCH_ROOT_CONFIG_INIT;
        double shown = 0.0;
        how.relative_eps = dampings[i / 2 % 3];
        how.tolerance = tolerances[i / 36];
        CHECK_OK(tchi_root_plan_make(context, TCH_SCALAR_F32, n, roots[i / 6 % 6], &how, &plan));
        problem p = make_problem(n, plan.root, plan.low, i % 2 == 0 ? n / 8 : n / 2);
        test_case("root %d, damping %g, rank %d, tolerance %g", plan.root, how.relative_eps,
                  (int)(i % 2 == 0 ? n / 8 : n / 2), how.tolerance);
        double error = run_iteration(context, &plan.newton, &p, &shown);
        CHECK(error <= how.tolerance, "error %.3g", error);
        CHECK(error <= 1.01 * shown, "the certificate shows %.6g of an error of %.6g", shown, error);
        CHECK(shown <= plan.error, "the certificate shows %.3g, and %.3g may pass", shown, plan.error);
    }
}

/* --- the choice of arithmetic ------------------------------------------------------------------------------------ */

static tchi_root_plan plan_of(tch_context *context, double damping, double tolerance)
{
    tchi_root_plan plan;
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    how.relative_eps = damping;
    how.tolerance = tolerance;
    CHECK_OK(tchi_root_plan_make(context, TCH_SCALAR_F32, 1024, 4, &how, &plan));
    return plan;
}

/* Degree 1 would take as many products here, but none of them in the split type. */
TEST_WITH(the_cheaper_degree_is_chosen, use_gpu_model, restore_table)
{
    tch_context *context = *state;
    tchi_root_plan plan = plan_of(context, 1e-3, 1e-2);
    assert_int_equal(plan.newton.degree, 2);
    CHECK(plan.newton.type[plan.newton.steps - 1] == TCH_SCALAR_BF16X2, "the last step is not split");
    tchi_newton_plan other = make_plan(4, 1, plan.low, 1e-2, &with_f64_cores);
    CHECK(tchi_newton_cost(&plan.newton, &with_f64_cores) < tchi_newton_cost(&other, &with_f64_cores), "it costs more");
}

/* A tolerance beyond 1e-2 saves no steps, and is met. */
TEST_WITH(loose_tolerances_are_planned_as_tighter_ones, use_gpu_model, restore_table)
{
    tch_context *context = *state;
    tchi_root_plan loose = plan_of(context, 1e-6, 3e-2);
    tchi_root_plan tight = plan_of(context, 1e-6, 1e-2);
    assert_int_equal(loose.newton.steps, tight.newton.steps);
    assert_memory_equal(loose.newton.type, tight.newton.type, sizeof tight.newton.type);
    CHECK(loose.tolerance == 3e-2 && loose.error >= tight.error, "other errors pass: %g", loose.error);
}

static int steep_steps(const tchi_newton_plan *plan)
{
    int count = 0;
    for (int k = 0; k + (plan->ends > 0) < plan->steps; k++) {
        count += plan->step[k].c[4] != 0.0;
    }
    return count;
}

static void rates_with_newton(void *state, tch_product_rates *rates)
{
    gpu_rates(state, rates);
    rates->newton_limit = 1024;
}

static tch_status never_called(void *state, const tch_newton_iteration *iteration, const tch_matrices *a,
                               const double *damping, const double *bound, const tch_matrices *x)
{
    (void)state, (void)iteration, (void)a, (void)damping, (void)bound, (void)x;
    return TCH_ERR_UNSUPPORTED;
}

/* A requested degree applies to all steps, and a single launch for all steps has no other. */
TEST_WITH(degree_4_is_for_those_who_leave_it_open, use_gpu_model, restore_table)
{
    tch_context *context = *state;
    tchi_root_plan plan = plan_of(context, 1e-6, 1e-3);
    assert_int_equal(steep_steps(&plan.newton), 2);
    assert_int_equal(plan.newton.ends, 6);
    tch_root_config how = TCH_ROOT_CONFIG_INIT;
    how.relative_eps = 1e-6;
    how.degree = 2;
    CHECK_OK(tchi_root_plan_make(context, TCH_SCALAR_F32, 1024, 4, &how, &plan));
    assert_int_equal(steep_steps(&plan.newton), 0);
    assert_int_equal(plan.newton.ends, 4);
    table.matrix.newton = never_called;
    table.matrix.product_rates = rates_with_newton;
    plan = plan_of(context, 1e-6, 1e-3);
    assert_true(plan.one_launch);
    assert_int_equal(steep_steps(&plan.newton), 0);
    assert_int_equal(plan.newton.ends, 0);
}

/* The types of the steps: d float64, s float32, b the split type; capitals for congruent steps. */
static void check_types(int32_t root, double low, double tolerance, const tch_product_rates *rates,
                        const char *expected)
{
    char got[TCHI_MINIMAX_MAX_STEPS + 1] = "";
    tchi_newton_plan plan = make_plan(root, 2, low, tolerance, rates);
    for (int k = 0; k < plan.steps; k++) {
        char letter = plan.type[k] == TCH_SCALAR_F64 ? 'd' : plan.type[k] == TCH_SCALAR_F32 ? 's' : 'b';
        got[k] = (char)(plan.congruent[k] ? letter - 'a' + 'A' : letter);
    }
    test_case("root %d, low %g, tolerance %g, float64 at %g", (int)root, low, tolerance, rates->f64);
    CHECK(strcmp(got, expected) == 0, "the types are %s, expected %s", got, expected);
}

/* Float64 tensor cores are used for the early steps, and for all with a tight tolerance; odd roots have no congruence.
 * If float64 is slow, float32 takes the early steps where possible, and without bfloat16 the late ones. */
TEST(types_are_chosen)
{
    check_types(4, 1e-6, 1e-3, &with_f64_cores, "BBbbb");
    check_types(4, 1e-6, 1e-9, &with_f64_cores, "dddddd");
    check_types(3, 1e-6, 1e-3, &with_f64_cores, "dddbbb");
    check_types(4, 1e-3, 1e-3, &without_f64_cores, "sbb");
    check_types(4, 1e-6, 1e-3, &without_f64_cores, "BBbbb");
    check_types(4, 1e-3, 1e-3, &with_f64_cores, "Bbb");
    check_types(4, 1e-6, 1e-3, &without_bf16, "ddsss");
    tchi_newton_plan plan = make_plan(4, 2, 1e-6, 1e-3, &with_f64_cores);
    assert_int_equal(tchi_newton_type_of_m(&plan, 0), TCH_SCALAR_F64);
    assert_int_equal(tchi_newton_type_of_m(&plan, 1), TCH_SCALAR_BF16X2);
    assert_int_equal(tchi_newton_type_of_m(&plan, 2), TCH_SCALAR_BF16X2);
}

/* The last step has little left to do, for which degree 1 suffices, unless it is the only one. */
TEST(the_last_step_is_short)
{
    tchi_newton_plan plan = {.root = 4, .degree = 2};
    plan.steps = tchi_minimax_plan(4, 2, 1e-6, 2.5e-4, plan.step);
    assert_int_equal(plan.steps, 6);
    assert_true(tchi_newton_shorten(&plan, 2.5e-4));
    assert_true(plan.step[5].c[2] == 0.0 && plan.step[4].c[2] != 0.0);
    CHECK(1.0 - pow(plan.step[5].lo, 0.25) <= 2.5e-4, "X is off by %.3g", 1.0 - pow(plan.step[5].lo, 0.25));
    tchi_newton_plan one = make_plan(4, 2, 0.9, 1e-2, &with_f64_cores);
    assert_int_equal(one.steps, 1);
    assert_true(one.step[0].c[2] != 0.0);
}

static double products_of(const tchi_newton_plan *plan)
{
    static const tch_product_rates one = {.f64 = 1.0, .f32 = 1.0, .bf16x2 = 1.0};
    return tchi_newton_cost(plan, &one);
}

static double polynomial_of(const tchi_newton_plan *plan, int k, double m)
{
    const double *c = plan->step[k].c;
    if (plan->ends == 0 || k + 1 < plan->steps) {
        return c[0] + m * (c[1] + m * (c[2] + m * (c[3] + m * c[4])));
    }
    const tchi_minimax_quartic *q = &plan->ending;
    const tchi_minimax_sextic *r = &plan->longer;
    double s = plan->ends == 4 ? q->s0 + m * (q->s1 + m) : r->s0 + m * (r->s1 + m);
    return plan->ends == 4 ? q->t0 + q->t1 * m + q->t2 * s * s
                           : r->t0 + r->t1 * m + r->t2 * s * (r->u0 + r->u1 * m + s * s);
}

/* The error that a plan leaves, by the scalar iteration. */
static void check_on_numbers(const tchi_newton_plan *plan, double low, double tolerance)
{
    for (int j = 0; j <= 200; j++) {
        double m = low + (1.0 - low) * j / 200.0;
        double x = pow(m, 1.0 / plan->root);
        for (int k = 0; k < plan->steps; k++) {
            double q = polynomial_of(plan, k, m);
            x *= q;
            m *= pow(q, plan->root);
        }
        CHECK(fabs(x - 1.0) <= 1.01 * tolerance, "off by %g", fabs(x - 1.0));
    }
}

/* Three products replace the six of two steps, and never more than without; the remaining error is within the
 * tolerance. */
TEST(endings_save_products)
{
    tchi_newton_plan usual = {.root = 4, .degree = 2};
    usual.steps = tchi_minimax_plan(4, 2, 1e-6, 2.5e-4, usual.step);
    tchi_newton_shorten(&usual, 2.5e-4);
    tchi_newton_plan shorter = usual;
    shorter.steps = tchi_minimax_plan(4, 2, 1e-6, 2.5e-4, shorter.step);
    tchi_newton_end(&shorter, 2.5e-4);
    assert_true(shorter.ends && products_of(&usual) - products_of(&shorter) == 3.0);
    for (int i = 0; i < 6 * 2 * 5 * 4; i++) {
        int32_t root = roots[i % 6];
        double low = pow(10.0, -1.5 * (i / 12 % 5) - 0.3);
        double tolerance = pow(10.0, -2.0 * (i / 60) - 2.0);
        tchi_newton_plan steps = {.root = root, .degree = 1 + i / 6 % 2};
        steps.steps = tchi_minimax_plan(root, steps.degree, low, tolerance, steps.step);
        tchi_newton_plan plan = steps;
        tchi_newton_shorten(&steps, tolerance);
        tchi_newton_end(&plan, tolerance);
        test_case("root %d, degree %d, from %g to %g", (int)root, plan.degree, low, tolerance);
        CHECK(products_of(&plan) <= products_of(&steps), "%g products, %g without", products_of(&plan),
              products_of(&steps));
        check_on_numbers(&plan, low, tolerance);
    }
}

/* For p = 4 at 1e-6 18 symmetric products instead of 20, plus Cholesky, K L and K T, which count as 0.85, 1, 2. */
TEST(steps_of_degree_4_save_products)
{
    tchi_newton_plan usual = make_plan(4, 2, 1e-6 / 1.02, 1e-3, &with_f64_cores);
    tchi_newton_plan steep = make_steep_plan(4, 1e-6 / 1.02, 1e-3, &with_f64_cores);
    CHECK(fabs(products_of(&usual) - 20.0 - 3.85) < 1e-9, "%g products", products_of(&usual));
    CHECK(fabs(products_of(&steep) - 18.0 - 3.85) < 1e-9, "%g products", products_of(&steep));
    assert_int_equal(steep.steps, 4);
    assert_true(steep.step[0].c[4] == 0.0 && steep.step[1].c[4] != 0.0 && steep.step[2].c[4] != 0.0);
    assert_true(steep.congruent[0] && steep.congruent[1] && !steep.congruent[2]);
    assert_int_equal(steep.ends, 6);
}

/* Never more expensive, always within the tolerance, and with degree 2 first; if none is found the plan is
 * unchanged. */
TEST(steps_of_degree_4_cost_no_more)
{
    static const tch_product_rates *const devices[] = {&with_f64_cores, &without_f64_cores, &without_bf16, &only_f64};
    for (int i = 0; i < 6 * 4 * 5 * 5; i++) {
        int32_t root = roots[i % 6];
        const tch_product_rates *rates = devices[i / 6 % 4];
        double low = pow(10.0, -1.5 * (i / 24 % 5) - 0.3);
        double tolerance = pow(10.0, -2.0 * (i / 120) - 2.0);
        test_case("root %d, device %d, from %g to %g", (int)root, i / 6 % 4, low, tolerance);
        tchi_newton_plan usual = make_plan(root, 2, low, tolerance, rates);
        tchi_newton_plan plan = usual;
        bool found = tchi_newton_steepen(&plan, rates, low, 0.25 * tolerance, tolerance);
        CHECK(found == (tchi_newton_cost(&plan, rates) < tchi_newton_cost(&usual, rates)), "it does not cost less");
        CHECK(found || memcmp(&plan, &usual, sizeof plan) == 0, "it is another plan");
        CHECK(plan.step[0].c[4] == 0.0, "the first step is steep");
        CHECK(root > 1 || !found, "root 1 has steep steps");
        check_on_numbers(&plan, low, 0.25 * tolerance + 1e-12);
    }
}

TEST_MAIN(test_open_context, test_close_context)

/* Internals of orthogonalization: which steps share a Gram matrix, and the entry point for optimizers in bfloat16 as on
 * a GPU, modeled on top of the CPU's table by rounding the results of products and elementwise operations. In float32
 * and float64 tests/optim/test_optim_methods.c compares it with plain steps.
 *
 * In bfloat16 the singular values must equal those of the exact iteration up to a few ulp, whichever steps share a Gram
 * matrix. */
#include "core/context.h"
#include "linalg/orthogonalize.h"
#include "support/backend/table_copy.h"
#include "support/elements.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

/* --- the plan ---------------------------------------------------------------------------------------------------- */

/* The lengths of the runs, for 768 rows; `fine` where Gram matrices of several steps are float16. */
static const struct {
    tch_ortho_method method;
    int32_t steps;
    int64_t cols;
    bool fine;
    int32_t runs[8];
} plans[] = {
    {TCH_ORTHO_MUON, 5, 3072, false, {1, 2, 2}},
    {TCH_ORTHO_MUON, 5, 1160, false, {1, 2, 2}},
    {TCH_ORTHO_MUON, 5, 1152, false, {1, 1, 1, 1, 1}},
    {TCH_ORTHO_MUON, 5, 768, false, {1, 1, 1, 1, 1}},
    {TCH_ORTHO_MUON, 4, 3072, false, {1, 1, 2}},
    {TCH_ORTHO_MUON, 7, 3072, false, {1, 2, 2, 2}},
    {TCH_ORTHO_POLAR_EXPRESS, 5, 3072, false, {1, 1, 1, 2}},
    {TCH_ORTHO_POLAR_EXPRESS, 7, 3072, false, {1, 1, 1, 2, 2}},
    {TCH_ORTHO_POLAR_EXPRESS, 1, 3072, false, {1}},
    {TCH_ORTHO_MINIMAX, 7, 3072, false, {1, 1, 1, 1, 3}},
    {TCH_ORTHO_MUON, 5, 3072, true, {1, 2, 2}},
    {TCH_ORTHO_MUON, 5, 768, true, {1, 1, 1, 1, 1}},
    {TCH_ORTHO_POLAR_EXPRESS, 5, 3072, true, {1, 2, 2}},
    {TCH_ORTHO_POLAR_EXPRESS, 7, 3072, true, {1, 1, 2, 3}},
    {TCH_ORTHO_MINIMAX, 7, 3072, true, {1, 1, 1, 4}},
};

static void check_runs(const tchi_ortho *ortho, int64_t cols, bool fine, const int32_t *expected)
{
    int32_t step = 0;
    for (int i = 0; expected[i] != 0; i++) {
        int32_t run = tchi_ortho_run(ortho, step, 768, cols, fine);
        CHECK(run == expected[i], "the run from step %d on is %d long, not %d", step, run, expected[i]);
        step += run;
    }
    assert_int_equal(step, ortho->steps);
}

TEST(runs_are_as_measured)
{
    for (size_t i = 0; i < TEST_COUNT(plans); i++) {
        test_case("plan %zu", i);
        tchi_ortho ortho = tchi_ortho_of(plans[i].method, plans[i].steps, 0.0);
        check_runs(&ortho, plans[i].cols, plans[i].fine, plans[i].runs);
    }
    tchi_ortho gentle = tchi_ortho_repeating((tchi_schulz_step){2.0, -1.5, 0.5}, 7, 0.0);
    check_runs(&gentle, 3072, true, (const int32_t[]){1, 2, 4, 0});
}

/* Custom coefficients, the smallest and the largest: every step is in one run, and nothing loops forever. */
TEST(any_coefficients_have_a_plan)
{
    const double slopes[] = {0.0, 1.0, 1.5, -3.0, 1e9, HUGE_VAL, NAN};
    for (size_t i = 0; i < 2 * (sizeof slopes / sizeof slopes[0]); i++) {
        test_case("a = %g", slopes[i / 2]);
        tchi_ortho ortho = tchi_ortho_repeating((tchi_schulz_step){slopes[i / 2], -0.5, 0.0}, 9, 0.0);
        int32_t step = 0;
        while (step < ortho.steps) {
            int32_t run = tchi_ortho_run(&ortho, step, 8, 64, i % 2 == 1);
            CHECK(run >= 1 && run <= ortho.steps - step, "a run of %d from step %d on", run, step);
            step += run;
        }
    }
}

/* --- the entry point for optimizers ------------------------------------------------------------------------------ */

/* The same steps in float64, from the same X. */
static void reference(const tchi_ortho *ortho, int64_t rows, int64_t cols, double *x)
{
    double norm = fmax(ref_norm(rows * cols, x), ortho->eps);
    for (int64_t i = 0; i < rows * cols; i++) {
        x[i] = norm > 0.0 ? x[i] / norm : 0.0;
    }
    for (int32_t k = 0; k < ortho->steps; k++) {
        const tchi_schulz_step *step = &ortho->step[k];
        if (k < ortho->longs) {
            ref_long_step(k, rows, cols, x);
        } else {
            ref_schulz_step(rows, cols, (const double[]){step->a, step->b, step->c}, x);
        }
    }
}

#define GUARD 0x5A

/* The matrix counts as so many: kernels are chosen by that, not by the actual batch. */
#define MANY 132

/* Runs with scratch of exactly the requested size, poisoned and guarded, and copies the result into `got`. */
static void run_block(tch_context *context, const tchi_ortho *ortho, const tch_matrices *x, double *got)
{
    int64_t bytes = tchi_orthogonalize_bytes(ortho, x);
    unsigned char *scratch = aligned_alloc(256, (size_t)(bytes + 256));
    assert_non_null(scratch);
    test_own(scratch, free);
    memset(scratch, 0xff, (size_t)bytes);
    memset(scratch + bytes, GUARD, 256);
    tch_matrices result;
    CHECK_OK(tchi_orthogonalize_blocks(context, ortho, x, MANY, scratch, &result));
    for (int i = 0; i < 256; i++) {
        CHECK(scratch[bytes + i] == GUARD, "byte %d after the scratch was written", i);
    }
    for (int64_t i = 0; i < x->rows * x->cols; i++) {
        got[i] = (double)((const float *)result.data)[i / x->cols * result.ld + i % x->cols];
    }
}

/* --- bfloat16 ---------------------------------------------------------------------------------------------------- */

static const tch_backend *plain; /* the CPU's table, while a test has replaced it */

static void round_all(const tch_matrices *m)
{
    for (int64_t b = 0; b < m->batch; b++) {
        for (int64_t i = 0; i < m->rows * m->cols; i++) {
            float *value = (float *)m->data + b * m->stride + i / m->cols * m->ld + i % m->cols;
            *value = (float)test_round(TCH_BFLOAT16, *value);
        }
    }
}

static tch_status rounded_gemm(void *state, double alpha, const tch_matrices *a, int32_t transpose_a,
                               const tch_matrices *b, int32_t transpose_b, double beta, int32_t rounded,
                               const tch_matrices *c)
{
    tch_status status = plain->matrix->gemm(state, alpha, a, transpose_a, b, transpose_b, beta, rounded, c);
    round_all(c);
    return status;
}

static tch_status rounded_gram(void *state, double alpha, const tch_matrices *a, int32_t transpose, double beta,
                               int32_t rounded, const tch_matrices *c)
{
    tch_status status = plain->matrix->gram(state, alpha, a, transpose, beta, rounded, c);
    round_all(c);
    return status;
}

static tch_status rounded_product(void *state, double c0, double c1, const tch_matrices *d, double c2,
                                  const tch_matrices *a, const tch_matrices *b, const double *scale, int32_t exponent,
                                  const tch_matrices *c)
{
    tch_status status = plain->matrix->symmetric_product(state, c0, c1, d, c2, a, b, scale, exponent, c);
    round_all(c);
    return status;
}

static tch_status rounded_normalize(void *state, double eps, const tch_matrices *x, int64_t all, double *scale,
                                    int32_t *deferred)
{
    tch_status status = plain->matrix->normalize(state, eps, x, all, scale, deferred);
    round_all(x);
    return status;
}

static int restore_table(void **state)
{
    if (plain != NULL) {
        ((tch_context *)*state)->backend = plain;
        plain = NULL;
    }
    return 0;
}

/* Singular values of about i^-power: a symmetric matrix with these eigenvalues times a long random one. */
static void make_power_law(int64_t rows, int64_t cols, double power, double *x)
{
    test_random random = test_random_stream(77);
    double *w = test_alloc((size_t)rows * sizeof *w);
    double *left = test_alloc((size_t)(rows * rows) * sizeof *left);
    double *right = test_alloc((size_t)(rows * cols) * sizeof *right);
    for (int64_t i = 0; i < rows; i++) {
        w[i] = pow((double)(i + 1), -power);
    }
    ref_symmetric(&random, rows, w, left);
    test_random_fill_normal(&random, right, rows * cols);
    ref_matmul(rows, rows, cols, left, right, x);
}

/* Normal random numbers and one dominant direction, like many layers' gradients. */
static void make_spiked(int64_t rows, int64_t cols, double height, double *x)
{
    test_random random = test_random_stream(78);
    double *left = test_alloc((size_t)rows * sizeof *left);
    double *right = test_alloc((size_t)cols * sizeof *right);
    test_random_fill_normal(&random, left, rows);
    test_random_fill_normal(&random, right, cols);
    test_random_fill_normal(&random, x, rows * cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        x[i] += height * left[i / cols] * right[i % cols];
    }
}

/* The smallest and the largest singular value. */
static void singular_range(int64_t rows, int64_t cols, const double *x, double range[2])
{
    double *t = test_alloc((size_t)(rows * cols) * sizeof *t);
    double *gram = test_alloc((size_t)(rows * rows) * sizeof *gram);
    double *v = test_alloc((size_t)(rows * rows) * sizeof *v);
    double *w = test_alloc((size_t)rows * sizeof *w);
    ref_transpose(rows, cols, x, t);
    ref_matmul(rows, cols, rows, x, t, gram);
    ref_eigh(rows, gram, w, v);
    range[0] = sqrt(fmax(w[0], 0.0));
    range[1] = sqrt(fmax(w[rows - 1], 0.0));
}

/* A negative power is a spike of that height. */
static void check_in_bfloat16(tch_context *context, const tchi_ortho *ortho, double power)
{
    const int64_t rows = 64;
    const int64_t cols = 192;
    double *x = test_alloc((size_t)(rows * cols) * sizeof *x);
    double *got = test_alloc((size_t)(rows * cols) * sizeof *got);
    if (power < 0.0) {
        make_spiked(rows, cols, -power, x);
    } else {
        make_power_law(rows, cols, power, x);
    }
    float *values = test_alloc((size_t)(rows * cols) * sizeof *values);
    for (int64_t i = 0; i < rows * cols; i++) {
        values[i] = (float)x[i];
    }
    tch_matrices gathered = {values, TCH_SCALAR_F32, rows, cols, cols, 1, rows * cols};
    round_all(&gathered);
    run_block(context, ortho, &gathered, got);
    reference(ortho, rows, cols, x);
    double want[2];
    double have[2];
    singular_range(rows, cols, x, want);
    singular_range(rows, cols, got, have);
    CHECK(have[0] >= want[0] - 0x1p-5 && have[1] <= want[1] + 0x1p-5,
          "singular values %.3f to %.3f, exactly %.3f to %.3f", have[0], have[1], want[0], want[1]);
    double error = ref_distance(rows * cols, got, x) / ref_norm(rows * cols, x);
    CHECK(error <= 0.1, "off by %.3f", error);
}

/* By the CPU's table with products that round. */
TEST_WITH(bfloat16_keeps_the_singular_values, NULL, restore_table)
{
    static const double powers[] = {0.0, 0.5, 1.0, -0.5, -1.0, -2.0, -4.0};
    static table_copy rounded;
    tch_context *context = *state;
    plain = context->backend;
    table_copy_make(&rounded, plain);
    rounded.matrix.gemm = rounded_gemm;
    rounded.matrix.gram = rounded_gram;
    rounded.matrix.symmetric_product = rounded_product;
    rounded.matrix.normalize = rounded_normalize;
    context->backend = &rounded.backend;
    for (int method = 0; method < 2; method++) {
        for (int32_t steps = 1; steps <= 7; steps++) {
            tchi_ortho ortho = tchi_ortho_of((tch_ortho_method)method, steps, 1e-7);
            for (size_t i = 0; i < TEST_COUNT(powers); i++) {
                test_case("method %d, %d steps, singular values i^-%g (below 0: a spike)", method, steps, powers[i]);
                check_in_bfloat16(context, &ortho, powers[i]);
            }
        }
    }
}

TEST_MAIN(test_open_context, test_close_context)

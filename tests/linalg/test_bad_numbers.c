/* Bad numbers in valid tensors: one matrix of a batch is not finite, not symmetric or not positive. Only that one is
 * reported and leaves its output unchanged; the others are computed as without it. */
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/testing.h"

#define BATCH 3
#define BAD 1 /* the bad matrix */

/* A function of the batch with a bad matrix. */
typedef enum operation { EIGH, POWER, POWER_BACKWARD, ROOT, ROOT_BACKWARD, SOLVE_FIRST, SOLVE_SECOND } operation;

typedef struct subject {
    const char *name;
    operation operation;
    tch_root_method method;
} subject;

/* The other factor and the right-hand side of tch_kronecker_solve are identities. */
static tch_status solve_with_identity(tch_context *context, const test_tensor *a, test_tensor *out, tch_tensor *report,
                                      bool spoiled_is_first)
{
    int64_t n = a->shape[1];
    test_tensor *identity = test_tensor_make(context, a->tensor.dtype, 3, a->shape, LAYOUT_CONTIGUOUS);
    double *values = test_alloc((size_t)identity->count * sizeof *values);
    for (int64_t i = 0; i < identity->count; i++) {
        values[i] = i % (n * n) % (n + 1) == 0 ? 1.0 : 0.0;
    }
    test_tensor_write(identity, values);
    const tch_tensor *first = spoiled_is_first ? &a->tensor : &identity->tensor;
    const tch_tensor *second = spoiled_is_first ? &identity->tensor : &a->tensor;
    return tch_kronecker_solve(context, first, second, &identity->tensor, 1e-3, &out->tensor, report);
}

/* For eigh, eigenvectors; eigenvalues have their own case below. The matrices are also the gradients of backward
 * functions. */
static tch_status call_subject(tch_context *context, const subject *s, const test_tensor *a, test_tensor *out,
                               tch_tensor *report)
{
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.relative_eps = 1e-3;
    config.method = s->method;
    switch (s->operation) {
    case EIGH: {
        test_tensor *w = test_tensor_make(context, a->tensor.dtype, 2, a->shape, LAYOUT_CONTIGUOUS);
        return tch_eigh(context, &a->tensor, &w->tensor, &out->tensor, report);
    }
    case POWER:
        return tch_matrix_power(context, &a->tensor, -0.5, 0.0, &out->tensor, report);
    case POWER_BACKWARD:
        return tch_matrix_power_backward(context, &a->tensor, 0.5, 0.0, &a->tensor, &out->tensor, report);
    case ROOT_BACKWARD:
        return tch_inverse_root_backward(context, &a->tensor, 4, &config, &a->tensor, &out->tensor, report);
    case ROOT:
        return tch_inverse_root(context, &a->tensor, 4, &config, &out->tensor, NULL, report);
    default:
        return solve_with_identity(context, a, out, report, s->operation == SOLVE_FIRST);
    }
}

static const subject subjects[] = {
    {"eigh", EIGH, 0},
    {"power", POWER, 0},
    {"power backward", POWER_BACKWARD, 0},
    {"root auto", ROOT, TCH_ROOT_AUTO},
    {"root eigen", ROOT, TCH_ROOT_EIGEN},
    {"root newton", ROOT, TCH_ROOT_NEWTON},
    {"root backward", ROOT_BACKWARD, 0},
    {"solve, a", SOLVE_FIRST, 0},
    {"solve, b", SOLVE_SECOND, 0},
    {"root rational", ROOT, TCH_ROOT_RATIONAL},
};
#define ROOT_AUTO 3 /* the first subject that requires positive matrices */

/* Subjects that the device supports; not all support the last. */
static size_t subject_count(void)
{
    return TEST_COUNT(subjects) - !test_offers_method(TCH_ROOT_RATIONAL);
}

typedef struct trial {
    int64_t n;
    tch_dtype dtype;
    double *good; /* the batch before one matrix was changed */
    test_tensor *a, *out, *report;
} trial;

static trial make_trial(tch_context *context, int64_t n, tch_dtype dtype)
{
    const int64_t shape[] = {BATCH, n, n};
    trial t = {n, dtype, NULL, NULL, NULL, NULL};
    double *spectrum = test_alloc((size_t)n * sizeof *spectrum);
    test_random random = test_random_stream((uint64_t)n);
    t.good = test_alloc((size_t)(BATCH * n * n) * sizeof *t.good);
    ref_spectrum(n, 20.0, spectrum);
    for (int64_t b = 0; b < BATCH; b++) {
        ref_symmetric(&random, n, spectrum, t.good + b * n * n);
    }
    t.a = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    t.out = test_tensor_make(context, dtype, 3, shape, LAYOUT_CONTIGUOUS);
    t.report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(t.a, t.good);
    return t;
}

/* The subject's result for the original batch. */
static double *clean_result(tch_context *context, const subject *s, trial *t)
{
    CHECK_OK(call_subject(context, s, t->a, t->out, &t->report->tensor));
    test_check_report_ok(t->report);
    return test_tensor_read(t->out);
}

/* The others are as `expected`, bitwise unless `auto` chose another method for the whole batch, in which case both are
 * within its tolerance of the exact result; the bad one is still poison (NaN). */
static void check_outputs(const subject *s, const trial *t, const double *expected)
{
    int64_t size = t->n * t->n;
    double *got = test_tensor_read(t->out);
    double freedom =
        s->operation == ROOT && s->method == TCH_ROOT_AUTO ? 2.0 * (t->dtype.bits == 64 ? 1e-9 : 1e-3) : 0.0;
    freedom *= ref_norm(size, expected);
    for (int64_t i = 0; i < BATCH * size; i++) {
        if (i / size == BAD) {
            CHECK(isnan(got[i]), "the bad matrix's output was written (element %lld: %g)", (long long)(i % size),
                  got[i]);
        } else {
            CHECK(fabs(got[i] - expected[i]) <= freedom, "matrix %d, element %lld is %.17g, without the bad one %.17g",
                  (int)(i / size), (long long)(i % size), got[i], expected[i]);
        }
    }
}

/* Runs with and without a report. `code` is the expected report, or -1 for any error. */
static void check_spoiled(tch_context *context, const subject *s, trial *t, const double *values, int code,
                          const double *expected)
{
    test_tensor_write(t->a, values);
    test_tensor_poison(t->out);
    test_tensor_poison(t->report);
    CHECK_OK(call_subject(context, s, t->a, t->out, &t->report->tensor));
    double *report = test_tensor_read(t->report);
    CHECK(report[0] == TCH_REPORT_OK && report[2] == TCH_REPORT_OK, "good matrices are reported as %g and %g",
          report[0], report[2]);
    CHECK(code >= 0 ? report[BAD] == code : report[BAD] > TCH_REPORT_OK, "the bad matrix is reported as %g",
          report[BAD]);
    check_outputs(s, t, expected);
    test_tensor_check_unchanged(t->a, "a");
    test_tensor_poison(t->out);
    tch_status status = call_subject(context, s, t->a, t->out, NULL);
    CHECK(status == TCH_ERR_NUMERIC, "without a report it gave %s", tch_status_name(status));
    CHECK(strstr(tch_last_error(), "1") != NULL, "the message does not name matrix 1: %s", tch_last_error());
    check_outputs(s, t, expected);
}

/* The triangle not used in computations must be checked too. */
typedef enum place { NOWHERE, FIRST, MIDDLE, LAST, ABOVE, BELOW } place; /* on the diagonal, or in its corners */

typedef struct spoiling {
    const char *what;
    int code;
    struct {
        place place;
        double added;
    } elements[2];
} spoiling;

static const spoiling spoilings[] = {
    {"NaN on the diagonal", TCH_REPORT_NOT_FINITE, {{MIDDLE, NAN}}},
    {"NaN off the diagonal", TCH_REPORT_NOT_FINITE, {{ABOVE, NAN}, {BELOW, NAN}}},
    {"NaN above the diagonal", TCH_REPORT_NOT_FINITE, {{ABOVE, NAN}}},
    {"infinities", TCH_REPORT_NOT_FINITE, {{FIRST, INFINITY}, {LAST, -INFINITY}}},
    {"asymmetric above", TCH_REPORT_NOT_SYMMETRIC, {{ABOVE, 0.01}}},
    {"asymmetric below", TCH_REPORT_NOT_SYMMETRIC, {{BELOW, -0.01}}},
};

static void spoil(const spoiling *how, double *matrix, int64_t n)
{
    for (int i = 0; i < 2 && how->elements[i].place != NOWHERE; i++) {
        const int64_t at[] = {0, 0, n / 2 * (n + 1), n * n - 1, n - 1, (n - 1) * n};
        matrix[at[how->elements[i].place]] += how->elements[i].added;
    }
}

TEST(not_finite_or_not_symmetric)
{
    static const int64_t sizes[] = {2, 64, 97};
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64};
    tch_context *context = *state;
    for (size_t i = 0; i < subject_count() * 6 * TEST_COUNT(spoilings); i++) {
        const spoiling *how = &spoilings[i % TEST_COUNT(spoilings)];
        const subject *s = &subjects[i / TEST_COUNT(spoilings) / 6];
        int64_t n = sizes[i / TEST_COUNT(spoilings) % 3];
        trial t = make_trial(context, n, dtypes[i / TEST_COUNT(spoilings) / 3 % 2]);
        test_case("%s, n = %d, %s, %s", s->name, (int)n, tch_dtype_name(t.dtype), how->what);
        double *expected = clean_result(context, s, &t);
        spoil(how, t.good + BAD * n * n, n);
        check_spoiled(context, s, &t, t.good, how->code, expected);
    }
}

/* Asymmetry within the tolerance is accepted, and either triangle may be read: a difference E of the input, |E| <= 2
 * delta, is magnified by the steepest of these functions, the inverse at the smallest eigenvalue 1/20, or by the
 * inverse of the smallest gap, which is less. */
TEST(slight_asymmetry_is_accepted)
{
    tch_context *context = *state;
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64};
    const double slight[] = {0.5e-5, 0.5e-12};
    for (size_t i = 0; i < subject_count() * 2; i++) {
        const subject *s = &subjects[i / 2];
        trial t = make_trial(context, 9, dtypes[i % 2]);
        test_case("%s, %s", s->name, tch_dtype_name(t.dtype));
        double *expected = clean_result(context, s, &t);
        double delta = slight[i % 2] * ref_largest(81, t.good + BAD * 81);
        t.good[BAD * 81 + 8] += delta;
        test_tensor_write(t.a, t.good);
        test_tensor_poison(t.out);
        CHECK_OK(call_subject(context, s, t.a, t.out, NULL));
        double *got = test_tensor_read(t.out);
        double moved = ref_distance(t.out->count, got, expected);
        CHECK(moved <= 2.0 * delta * 20.0 * 20.0, "an asymmetry of %.3g moved the result by %.3g", delta, moved);
    }
}

/* Batches of several dimensions and outputs of every layout: the report must have the right index. */
TEST(bad_matrices_in_batches_of_batches)
{
    enum { N = 10, SIZE = N * N, LAST_BUT_ONE = 2 };
    tch_context *context = *state;
    const test_variation v = {.n = N, .batch_rank = 2, .batch = {2, 2}, .matrices = 4};
    for (int layout = 0; layout < LAYOUT_COUNT; layout++) {
        for (int method = TCH_ROOT_EIGEN; method <= TCH_ROOT_RATIONAL; method++) {
            tch_root_config config = TCH_ROOT_CONFIG_INIT;
            config.relative_eps = 1e-3;
            config.method = (tch_root_method)method;
            if (!test_offers_method(config.method)) {
                continue;
            }
            test_case("%s, output %s", tch_root_method_name(config.method), test_layout_name((test_layout)layout));
            test_tensor *a = test_known_tensor(context, &v, 20.0, TCH_FLOAT64);
            test_tensor *out = test_case_tensor(context, &v, TCH_FLOAT64, N, N, (test_layout)layout);
            test_tensor *report = test_case_tensor(context, &v, TCH_INT32, -1, -1, LAYOUT_TRANSPOSED);
            CHECK_OK(tch_inverse_root(context, &a->tensor, 2, &config, &out->tensor, NULL, NULL));
            double *expected = test_tensor_read(out);
            double *values = test_tensor_read(a);
            values[LAST_BUT_ONE * SIZE] = NAN;
            test_tensor_write(a, values);
            test_tensor_poison(out);
            CHECK_OK(tch_inverse_root(context, &a->tensor, 2, &config, &out->tensor, NULL, &report->tensor));
            double *got = test_tensor_read(out);
            double *codes = test_tensor_read(report);
            for (int i = 0; i < 4 * SIZE; i++) {
                bool bad = i / SIZE == LAST_BUT_ONE;
                CHECK(codes[i / SIZE] == (bad ? TCH_REPORT_NOT_FINITE : TCH_REPORT_OK), "matrix %d is reported as %g",
                      i / SIZE, codes[i / SIZE]);
                CHECK(bad ? isnan(got[i]) : got[i] == expected[i], "element %d of matrix %d is %g", i % SIZE, i / SIZE,
                      got[i]);
            }
        }
    }
    test_known_release();
}

/* Every subject but eigh (which accepts indefinite matrices) and powers (which clamp; see below). */
TEST(not_positive)
{
    tch_context *context = *state;
    static const int64_t sizes[] = {2, 64, 97};
    const tch_dtype dtypes[] = {TCH_FLOAT32, TCH_FLOAT64};
    for (size_t i = ROOT_AUTO * 6; i < subject_count() * 6; i++) {
        const subject *s = &subjects[i / 6];
        int64_t n = sizes[i % 3];
        trial t = make_trial(context, n, dtypes[i / 3 % 2]);
        test_case("%s, n = %d, %s, indefinite", s->name, (int)n, tch_dtype_name(t.dtype));
        double *expected = clean_result(context, s, &t);
        for (int64_t k = 0; k < n; k++) { /* the smallest eigenvalue becomes -0.25 */
            t.good[BAD * n * n + k * (n + 1)] -= 0.3;
        }
        bool products_only = s->operation == ROOT && s->method != TCH_ROOT_EIGEN;
        check_spoiled(context, s, &t, t.good, products_only ? -1 : TCH_REPORT_NOT_POSITIVE, expected);
    }
}

/* Relative damping of a zero matrix is zero: there is no inverse root. */
TEST(zero_matrices_without_damping)
{
    tch_context *context = *state;
    for (size_t i = 1; i < subject_count(); i++) {
        if (subjects[i].operation >= SOLVE_FIRST) {
            continue; /* its damping is absolute */
        }
        trial t = make_trial(context, 6, TCH_FLOAT32);
        test_case("%s of zero", subjects[i].name);
        double *expected = clean_result(context, &subjects[i], &t);
        memset(t.good + BAD * 36, 0, 36 * sizeof *t.good);
        check_spoiled(context, &subjects[i], &t, t.good, TCH_REPORT_NOT_POSITIVE, expected);
    }
}

/* (0 + eps I)^(-1/p) = eps^(-1/p) I, by every method. */
TEST(zero_matrices_with_damping)
{
    tch_context *context = *state;
    const tch_root_method methods[] = {TCH_ROOT_AUTO, TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL};
    const int64_t shape[] = {2, 5, 5};
    double zeros[50] = {0};
    for (int i = 0; i < 4; i++) {
        tch_root_config config = TCH_ROOT_CONFIG_INIT;
        config.eps = 1e-4;
        config.method = methods[i];
        if (!test_offers_method(config.method)) {
            continue;
        }
        test_case("%s", tch_root_method_name(methods[i]));
        test_tensor *a = test_tensor_make(context, TCH_FLOAT64, 3, shape, LAYOUT_CONTIGUOUS);
        test_tensor *out = test_tensor_make(context, TCH_FLOAT64, 3, shape, LAYOUT_CONTIGUOUS);
        test_tensor_write(a, zeros);
        CHECK_OK(tch_inverse_root(context, &a->tensor, 4, &config, &out->tensor, NULL, NULL));
        double *x = test_tensor_read(out);
        for (int j = 0; j < 50; j++) {
            double expected = j % 25 % 6 == 0 ? 10.0 : 0.0;
            CHECK(fabs(x[j] - expected) <= 10.0 * 1e-9, "element %d is %.17g", j, x[j]);
        }
    }
}

/* The eigenvalues of a bad matrix are unchanged, like its eigenvectors. */
TEST(eigenvalues_of_a_bad_matrix_are_kept)
{
    tch_context *context = *state;
    for (int with_vectors = 0; with_vectors < 2; with_vectors++) {
        trial t = make_trial(context, 8, TCH_FLOAT32);
        const int64_t shape[] = {BATCH, 8};
        test_case(with_vectors ? "with vectors" : "values only");
        test_tensor *w = test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_STEPPED);
        t.good[BAD * 64 + 9] = NAN;
        test_tensor_write(t.a, t.good);
        CHECK_OK(tch_eigh(context, &t.a->tensor, &w->tensor, with_vectors ? &t.out->tensor : NULL, &t.report->tensor));
        double *values = test_tensor_read(w);
        for (int i = 0; i < 24; i++) {
            CHECK(isnan(values[i]) == (i / 8 == BAD), "eigenvalue %d is %g", i, values[i]);
        }
    }
}

/* Without a report a NaN propagates, only within its own matrix. */
TEST(nan_stays_in_its_matrix)
{
    tch_context *context = *state;
    const int64_t shape[] = {BATCH, 5, 5};
    double values[BATCH * 25];
    test_random random = test_random_stream(3);
    test_random_fill_normal(&random, values, BATCH * 25);
    values[BAD * 25 + 7] = NAN;
    test_tensor *a = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor_write(a, values);
    for (int operation = 0; operation < 3; operation++) {
        test_tensor *out = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
        test_case("operation %d", operation);
        CHECK_OK(operation == 0   ? tch_matmul(context, &a->tensor, &a->tensor, &out->tensor)
                 : operation == 1 ? tch_gram(context, 1.0, &a->tensor, 0, 0.0, &out->tensor)
                                  : tch_orthogonalize(context, &a->tensor, 5, TCH_ORTHO_MUON, &out->tensor));
        double *got = test_tensor_read(out);
        int bad = 0;
        for (int i = 0; i < BATCH * 25; i++) {
            CHECK(i / 25 == BAD || isfinite(got[i]), "element %d of a good matrix is %g", i, got[i]);
            bad += i / 25 == BAD && isnan(got[i]);
        }
        CHECK(bad > 0, "the NaN vanished");
    }
}

TEST_MAIN(test_open_context, test_close_context)

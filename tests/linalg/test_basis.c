/* Tracking an eigenbasis by an iteration of the operations in test_basis_entries.c.
 *
 * After a step rows are orthonormal; they equal Gram-Schmidt of the sorted rows of q (A + s I), with s the shift that
 * the iteration adds; a failing factor leaves its basis unchanged. Nothing depends on the device, given on the command
 * line. */
#include <float.h>

#include "core/context.h"
#include "core/tensor.h"
#include "linalg/algebra.h"
#include "linalg/basis.h"
#include "support/backend/device_matrices.h"
#include "support/backend/table_copy.h"
#include "support/linalg/reference.h"
#include "support/testing.h"

/* The shift of A in float64, relative to A's trace; see docs/numerics/soap-basis.md. */
#define SHIFT 1e-7

static const tch_scalar types[] = {TCH_SCALAR_F32, TCH_SCALAR_F64};

/* --- references -------------------------------------------------------------------------------------------------- */

/* a b'. */
static double *times_transposed(int64_t n, const double *a, const double *b)
{
    double *transposed = test_alloc((size_t)(n * n) * sizeof *transposed);
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    ref_transpose(n, n, b, transposed);
    ref_matmul(n, n, n, a, transposed, product);
    return product;
}

/* q A q'. */
static double *rotated(int64_t n, const double *q, const double *a)
{
    double *s = test_alloc((size_t)(n * n) * sizeof *s);
    ref_matmul(n, n, n, q, a, s);
    double *product = times_transposed(n, s, q);
    return product;
}

/* |q A q' without its diagonal| / |A|. */
static double off_diagonal(int64_t n, const double *q, const double *a)
{
    double *c = rotated(n, q, a);
    for (int64_t i = 0; i < n; i++) {
        c[i * n + i] = 0.0;
    }
    return ref_norm(n * n, c) / ref_norm(n * n, a);
}

/* Gram-Schmidt on the rows in place, with every projection done twice. S was L times them; l receives the lower
 * triangle, for rows of S of length 1. */
TEST_REFERENCE static void gram_schmidt(int64_t n, double *s, double *l)
{
    memset(l, 0, (size_t)(n * n) * sizeof *l);
    for (int64_t i = 0; i < n; i++) {
        double whole = ref_norm(n, s + i * n);
        for (int64_t again = 0; again < 2 * i; again++) {
            const double *earlier = s + again % i * n;
            double dot = 0.0;
            for (int64_t k = 0; k < n; k++) {
                dot += s[i * n + k] * earlier[k];
            }
            for (int64_t k = 0; k < n; k++) {
                s[i * n + k] -= dot * earlier[k];
            }
            l[i * n + again % i] += dot / whole;
        }
        double length = ref_norm(n, s + i * n);
        l[i * n + i] = length / whole;
        for (int64_t k = 0; k < n; k++) {
            s[i * n + k] /= length;
        }
    }
}

/* |L^-1|^2 in the Frobenius norm. */
TEST_REFERENCE static double inverse_square(int64_t n, const double *l)
{
    double *x = test_alloc((size_t)(n * n) * sizeof *x);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < n; k++) {
            double value = k == i ? 1.0 : 0.0;
            for (int64_t j = k; j < i; j++) {
                value -= l[i * n + j] * x[j * n + k];
            }
            x[i * n + k] = value / l[i * n + i];
        }
    }
    double norm = ref_norm(n * n, x);
    return norm * norm;
}

/* The sorted rows of q (A + s I). */
static void multiply_and_sort(int64_t n, const double *a, const double *q, const int32_t *order, double *s)
{
    double *product = test_alloc((size_t)(n * n) * sizeof *product);
    double shift = SHIFT * ref_trace(n, a);
    ref_matmul(n, n, n, q, a, product);
    for (int64_t i = 0; i < n * n; i++) {
        int64_t from = order[i / n] * n + i % n;
        s[i] = product[from] + shift * q[from];
    }
}

/* The step as documented in its header, with the library's order. Returns |L^-1|^2, which magnifies an error in L
 * L'. */
static double reference_step(int64_t n, const double *a, const double *q, const int32_t *order, double *out)
{
    double *l = test_alloc((size_t)(n * n) * sizeof *l);
    multiply_and_sort(n, a, q, order, out);
    gram_schmidt(n, out, l);
    return inverse_square(n, l);
}

/* --- the basis --------------------------------------------------------------------------------------------------- */

/* A batch of factors with their bases, on the host and on the device. */
typedef struct tracked {
    tch_context *context;
    tch_scalar type;
    int64_t n, batch;
    double *a, *q; /* as rounded on the device */
    tch_matrices device_a, device_q;
    int32_t *flags, *order; /* on the device */
    double *drift;
    void *scratch;
    int64_t bytes;
} tracked;

static tracked begin_tracking(tch_context *context, tch_scalar type, int64_t n, int64_t batch)
{
    tracked t = {.context = context, .type = type, .n = n, .batch = batch};
    t.a = test_alloc((size_t)(batch * n * n) * sizeof *t.a + 1);
    t.device_a = device_matrices(context, type, batch, n, n, 1, NULL);
    t.device_q = device_matrices(context, type, batch, n, n, 2, NULL);
    t.flags = device_poison(context, batch * (int64_t)sizeof *t.flags);
    t.order = device_poison(context, batch * n * (int64_t)sizeof *t.order);
    t.drift = device_poison(context, batch * (int64_t)sizeof *t.drift);
    int64_t first = tchi_basis_init_bytes(context, type, n, batch);
    int64_t later = tchi_basis_track_bytes(context, type, n, batch);
    t.bytes = first > later ? first : later;
    t.scratch = device_poison(context, t.bytes);
    return t;
}

static void give_factors(tracked *t)
{
    device_round(t->type, t->batch * t->n * t->n, t->a);
    t->device_a = device_matrices(t->context, t->type, t->batch, t->n, t->n, 1, t->a);
}

static void step_basis(tracked *t)
{
    CHECK_OK(tchi_basis_track(t->context, &t->device_a, &t->device_q, t->order, t->flags, t->drift, t->scratch));
    t->q = device_values(t->context, &t->device_q);
}

static void check_flag(const tracked *t, int64_t b, int32_t expected)
{
    assert_int_equal(device_integers(t->context, t->flags, t->batch)[b], expected);
}

static void check_orthonormal(const tracked *t, double bound)
{
    for (int64_t b = 0; b < t->batch; b++) {
        double *defect = times_transposed(t->n, t->q + b * t->n * t->n, t->q + b * t->n * t->n);
        for (int64_t i = 0; i < t->n; i++) {
            defect[i * t->n + i] -= 1.0;
        }
        double far = ref_largest(t->n * t->n, defect);
        CHECK(far <= bound, "matrix %lld: |q q' - I| is %.3g, allowed %.3g", (long long)b, far, bound);
    }
}

/* For rows rounded to the type, and computed with sums in it. */
static double rounding_bound(const tracked *t)
{
    return (4.0 * sqrt((double)t->n) + 8.0) * device_roundoff(t->type);
}

/* Orthonormal for any factors, like an eigensolver's: zeros have a basis too. */
static void start_basis(tracked *t)
{
    CHECK_OK(tchi_basis_init(t->context, &t->device_a, &t->device_q, t->flags, t->scratch));
    t->q = device_values(t->context, &t->device_q);
    check_orthonormal(t, 2.0 * (double)(t->n + 10) * device_roundoff(t->type));
}

/* A = share G G' + (1 - share) A, G n by m: an optimizer's update of a factor. */
static void add_gradient(tracked *t, test_random *random, double share, int64_t m)
{
    double *g = test_alloc((size_t)(t->n * m) * sizeof *g);
    for (int64_t b = 0; b < t->batch; b++) {
        double *a = t->a + b * t->n * t->n;
        for (int64_t k = 0; k < t->n * m; k++) {
            g[k] = test_random_normal(random) / (double)(1 + k % m);
        }
        for (int64_t i = 0; i < t->n; i++) {
            for (int64_t j = 0; j <= i; j++) {
                double sum = 0.0;
                for (int64_t k = 0; k < m; k++) {
                    sum += g[i * m + k] * g[j * m + k];
                }
                a[i * t->n + j] = share * sum + (share == 1.0 ? 0.0 : (1.0 - share) * a[i * t->n + j]);
                a[j * t->n + i] = a[i * t->n + j];
            }
        }
    }
    give_factors(t);
}

/* With factors of random gradients of rank m, and their bases. */
static tracked start_tracking(tch_context *context, tch_scalar type, int64_t n, int64_t batch, test_random *random,
                              int64_t m)
{
    tracked t = begin_tracking(context, type, n, batch);
    test_case("%s n %lld rank %lld", device_type_name(type), (long long)n, (long long)m);
    add_gradient(&t, random, 1.0, m);
    start_basis(&t);
    return t;
}

/* With factors of these eigenvalues. */
static void give_spectrum(tracked *t, test_random *random, const double *w)
{
    for (int64_t b = 0; b < t->batch; b++) {
        ref_symmetric(random, t->n, w, t->a + b * t->n * t->n);
    }
    give_factors(t);
}

/* An order in which the numbers q_i' A q_i decrease. */
static void check_order(const tracked *t, const double *before, const int32_t *order)
{
    int64_t n = t->n;
    char *seen = test_alloc((size_t)n);
    for (int64_t b = 0; b < t->batch; b++) {
        double last = INFINITY;
        double slack = 16.0 * (double)n * device_roundoff(t->type) * ref_largest(n * n, t->a + b * n * n);
        const double *c = rotated(n, before + b * n * n, t->a + b * n * n);
        memset(seen, 0, (size_t)n);
        for (int64_t i = 0; i < n; i++) {
            int32_t from = order[b * n + i];
            CHECK(from >= 0 && from < n && !seen[from], "row %lld comes from %d", (long long)i, from);
            seen[from] = 1;
            double value = c[from * n + from];
            CHECK(value <= last + slack, "row %lld has %.9g after %.9g", (long long)i, value, last);
            last = value;
        }
    }
}

/* The library works in float64 unless the device is slow at it. */
static bool works_in_float64(const tracked *t)
{
    tch_product_rates rates = tchi_product_rates(t->context);
    return t->type == TCH_SCALAR_F64 || 2.0 * rates.f64 >= rates.f32;
}

/* In float64 every row, not only those of large eigenvalues, equals the reference's, up to the rounding of q itself and
 * that of one pass of Cholesky: a few u |L^-1|^2. A second pass, or a third one in float32, restores orthonormality. */
static void check_step(const tracked *t, const double *before)
{
    int64_t n = t->n;
    double *expected = test_alloc((size_t)(n * n) * sizeof *expected);
    int32_t *order = device_integers(t->context, t->order, t->batch * n);
    double magnified = 0.0;
    check_order(t, before, order);
    for (int64_t b = 0; b < t->batch; b++) {
        check_flag(t, b, TCH_REPORT_OK);
        double one_pass =
            4.0 * DBL_EPSILON * reference_step(n, t->a + b * n * n, before + b * n * n, order + b * n, expected);
        magnified = fmax(magnified, one_pass);
        double far = ref_distance(n * n, t->q + b * n * n, expected);
        double bound = sqrt((double)n) * (device_roundoff(t->type) + one_pass);
        CHECK(!works_in_float64(t) || far <= bound, "matrix %lld is %.3g from the reference, allowed %.3g",
              (long long)b, far, bound);
    }
    bool single_pass = t->type == TCH_SCALAR_F32 && works_in_float64(t);
    check_orthonormal(t, rounding_bound(t) + (single_pass ? magnified : 0.0));
}

typedef void step_check(const tracked *t, const double *before);

/* Gradients of rank m: the factor's rank grows by m with every step, so that it is mostly null space at first. */
static void track_case(tch_context *context, tch_scalar type, int64_t n, int64_t m, int64_t batch, int slow_steps,
                       step_check *check)
{
    size_t mark = test_mark();
    test_random random = test_random_stream((uint64_t)(n * 1000 + m));
    tracked t = start_tracking(context, type, n, batch, &random, m);
    for (int step = 0; step <= slow_steps; step++) {
        add_gradient(&t, &random, step < slow_steps ? 0.05 : 0.9, m);
        double *before = t.q;
        step_basis(&t);
        check(&t, before);
    }
    test_release_since(mark);
}

static void follow_ranks(tch_context *context, tch_scalar type)
{
    static const struct {
        int64_t n, m;
    } shapes[] = {{1, 1}, {2, 1}, {5, 2}, {31, 1}, {64, 16}, {65, 65}, {100, 1}, {100, 25}, {100, 100}, {270, 30}};
    for (size_t i = 0; i < TEST_COUNT(shapes); i++) {
        track_case(context, type, shapes[i].n, shapes[i].m, 2, 3, check_step);
    }
}

TEST(ranks_are_followed)
{
    follow_ranks(*state, types[0]);
    follow_ranks(*state, types[1]);
}

/* --- large bases, mostly by float16 products --------------------------------------------------------------------- */

/* Householder QR in float32 satisfies for any condition: S = L q with a lower triangular L up to errors of a few u in
 * S, which are u |A| where it was multiplied and u |S_i| where its rows were reflected; sums over n numbers may cost a
 * few sqrt(n). And L has a positive diagonal. */
static void check_triangular(const tracked *t, int64_t b, const double *before, const int32_t *order)
{
    int64_t n = t->n;
    const double *a = t->a + b * n * n;
    double *s = test_alloc((size_t)(n * n) * sizeof *s);
    multiply_and_sort(n, a, before + b * n * n, order + b * n, s);
    const double *l = times_transposed(n, s, t->q + b * n * n);
    double size = ref_norm(n * n, a);
    for (int64_t i = 0; i < n; i++) {
        double bound = 8.0 * device_roundoff(TCH_SCALAR_F32) * (size + sqrt((double)n) * ref_norm(n, s + i * n));
        double above = ref_norm(n - i - 1, l + i * n + i + 1);
        CHECK(above <= bound, "row %lld of S is %.3g outside of the rows up to it, allowed %.3g", (long long)i, above,
              bound);
        CHECK(l[i * n + i] >= -bound, "row %lld turned around: %.3g", (long long)i, l[i * n + i]);
    }
}

enum { PROBES = 4 };

/* |C V - V| / sqrt(PROBES n), C being q A q' with its diagonal scaled to 1, A with the shift that keeps rounding out, a
 * share of its trace. */
static double drift_of(int64_t n, const double *a, const double *q, const double *v, double share)
{
    const double *c = rotated(n, q, a);
    double shift = share * ref_trace(n, a);
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < PROBES; k++) {
            double y = 0.0;
            for (int64_t j = 0; j < n; j++) {
                double scale = (c[i * n + i] + shift) * (c[j * n + j] + shift);
                y += i == j ? 0.0 : c[i * n + j] / sqrt(scale) * v[j * PROBES + k];
            }
            sum += y * y;
        }
    }
    return sqrt(sum / (double)(PROBES * n));
}

/* `near` is how many times more or less than the exact drift the result may be. Correlations of rounding matter if a
 * factor is mostly null space, and so as small as the shift: measured, 6e-5. */
static void check_drift(const tracked *t, const double *before, double near)
{
    const double *got = device_fetch(t->context, t->drift, t->batch * (int64_t)sizeof *got);
    tch_matrices signs = device_matrices(t->context, TCH_SCALAR_F64, 1, t->n, PROBES, 0, NULL);
    CHECK_OK(t->context->backend->matrix->random_signs(t->context->state, 0, &signs));
    const double *v = device_values(t->context, &signs);
    double share = works_in_float64(t) ? SHIFT : 1e-6;
    for (int64_t b = 0; b < t->batch; b++) {
        double exact = drift_of(t->n, t->a + b * t->n * t->n, before + b * t->n * t->n, v, share);
        CHECK(got[b] * near > exact && got[b] < near * exact, "matrix %lld: a drift of %.4g, expected %.4g",
              (long long)b, got[b], exact);
    }
}

/* By panels, rows are orthonormal up to rounding for any condition. */
static void check_large_step(const tracked *t, const double *before, double lost)
{
    int32_t *order = device_integers(t->context, t->order, t->batch * t->n);
    check_drift(t, before, 1.05);
    check_order(t, before, order);
    for (int64_t b = 0; b < t->batch; b++) {
        check_flag(t, b, TCH_REPORT_OK);
        check_triangular(t, b, before, order);
    }
    check_orthonormal(t, rounding_bound(t) + lost);
}

static void check_step_by_panels(const tracked *t, const double *before)
{
    check_large_step(t, before, 0.0);
}

/* One pass of Cholesky in float64 may cost a few u |L^-1|^2 of orthogonality. */
static void check_step_in_one_pass(const tracked *t, const double *before)
{
    const int32_t *order = device_integers(t->context, t->order, t->batch * t->n);
    double *expected = test_alloc((size_t)(t->n * t->n) * sizeof *expected);
    double magnified = 0.0;
    for (int64_t at = 0; at < t->batch * t->n; at += t->n) {
        magnified = fmax(magnified, reference_step(t->n, t->a + at * t->n, before + at * t->n, order + at, expected));
    }
    check_large_step(t, before, 4.0 * DBL_EPSILON * magnified);
}

/* Full and partial panels, of full and of low rank. */
static void follow_by_panels(tch_context *context, tch_scalar type)
{
    static const struct {
        int64_t n, m;
    } shapes[] = {{512, 100}, {513, 1}};
    for (size_t i = 0; i < TEST_COUNT(shapes); i++) {
        track_case(context, type, shapes[i].n, shapes[i].m, 1, 1, check_step_by_panels);
    }
}

static void follow_in_one_pass(tch_context *context, tch_scalar type)
{
    track_case(context, type, 515, 30, 1, 1, check_step_in_one_pass);
}

/* --- convergence ------------------------------------------------------------------------------------------------- */

/* More iterations after a larger change, and few if nothing has changed but by an iteration. */
TEST(drift_is_measured)
{
    for (int k = 0; k < 2; k++) {
        test_random random = test_random_stream(4100 + (uint64_t)k);
        tracked t = start_tracking(*state, types[k], 61, 3, &random, 80);
        for (int step = 0; step < 4; step++) {
            add_gradient(&t, &random, 0.05 * (step + 1), 80);
            double *before = t.q;
            step_basis(&t);
            check_drift(&t, before, types[k] == TCH_SCALAR_F64 ? 1.0 + 1e-9 : 1.01);
        }
    }
}

/* With gaps of a factor of ten, every step on one factor reduces the off-diagonal by ten, down to rounding. */
TEST(a_basis_converges)
{
    enum { N = 6, STEPS = 12 };
    static const double w[N] = {1.0, 0.1, 0.01, 0.001, 1e-4, 1e-4};
    for (int k = 0; k < 2; k++) {
        test_case("%s", device_type_name(types[k]));
        test_random random = test_random_stream(77);
        tracked t = begin_tracking(*state, types[k], N, 1);
        give_spectrum(&t, &random, w);
        start_basis(&t);
        give_spectrum(&t, &random, w);
        double first = off_diagonal(N, t.q, t.a);
        for (int step = 0; step < STEPS; step++) {
            step_basis(&t);
            check_orthonormal(&t, rounding_bound(&t));
        }
        double last = off_diagonal(N, t.q, t.a);
        CHECK(first > 0.1, "the second factor has nearly the first one's basis: %.3g", first);
        CHECK(last <= 10.0 * device_roundoff(types[k]) + 1e-11, "off the diagonal %.3g is left of %.3g", last, first);
    }
}

/* Equal eigenvalues do not determine vectors, but the basis spans their space. */
TEST(equal_eigenvalues_do_no_harm)
{
    enum { N = 40 };
    for (int k = 0; k < 2; k++) {
        test_case("%s", device_type_name(types[k]));
        double w[N];
        test_random random = test_random_stream(78);
        tracked t = begin_tracking(*state, types[k], N, 2);
        for (int i = 0; i < N; i++) {
            w[i] = i < N / 2 ? 1.0 : 0.01;
        }
        give_spectrum(&t, &random, w);
        start_basis(&t);
        for (int step = 0; step < 6; step++) {
            double *before = t.q;
            step_basis(&t);
            check_step(&t, before);
        }
        for (int b = 0; b < 2; b++) {
            double off = off_diagonal(N, t.q + b * N * N, t.a + b * N * N);
            CHECK(off <= 40.0 * device_roundoff(types[k]), "off the diagonal: %.3g", off);
        }
    }
}

/* --- the first basis, and failures ------------------------------------------------------------------------------- */

TEST(a_first_basis_is_sorted)
{
    static const int64_t sizes[] = {1, 2, 3, 17, 64, 130};
    for (int k = 0; k < 2 * 6; k++) {
        int64_t n = sizes[k % 6];
        test_random random = test_random_stream((uint64_t)(79000 + n));
        tracked t = start_tracking(*state, types[k / 6], n, 3, &random, n);
        for (int64_t b = 0; b < t.batch; b++) {
            double off = off_diagonal(n, t.q + b * n * n, t.a + b * n * n);
            CHECK(off <= 8.0 * (double)n * device_roundoff(t.type), "matrix %lld: off the diagonal %.3g", (long long)b,
                  off);
            check_flag(&t, b, TCH_REPORT_OK);
        }
        CHECK_OK(tchi_basis_track(t.context, &t.device_a, &t.device_q, NULL, t.flags, NULL, t.scratch));
        step_basis(&t);
        int32_t *order = device_integers(t.context, t.order, t.batch * n);
        for (int64_t b = 0; b < t.batch; b++) {
            assert_int_equal(order[b * n], 0);
        }
    }
}

enum { FAIL_N = 70, GOOD = 0, ZERO = 1, NOT_FINITE = 2, LOPSIDED = 3, FAILING = 4 };

static void spoil(tracked *t)
{
    int64_t n = t->n;
    memset(t->a + ZERO * n * n, 0, (size_t)(n * n) * sizeof *t->a);
    t->a[NOT_FINITE * n * n + n + 2] = INFINITY;
    t->a[LOPSIDED * n * n + 3 * n + 1] += 1.0;
    give_factors(t);
}

static void failures_case(tch_context *context, tch_scalar type, int64_t n, int64_t m)
{
    static const int32_t expected[FAILING] = {TCH_REPORT_OK, TCH_REPORT_NOT_POSITIVE, TCH_REPORT_NOT_FINITE,
                                              TCH_REPORT_NOT_SYMMETRIC};
    test_random random = test_random_stream(80);
    tracked t = start_tracking(context, type, n, FAILING, &random, m);
    int64_t size = t.n * t.n;
    double *before = t.q;
    add_gradient(&t, &random, 0.5, m);
    spoil(&t);
    step_basis(&t);
    int32_t *order = device_integers(t.context, t.order, t.batch * t.n);
    for (int64_t b = 0; b < FAILING; b++) {
        check_flag(&t, b, expected[b]);
        double moved = ref_distance(size, t.q + b * size, before + b * size);
        CHECK(b == GOOD ? moved > 0.01 : moved == 0.0, "basis %lld moved by %.3g", (long long)b, moved);
        for (int64_t i = 0; b != GOOD && i < t.n; i++) {
            assert_int_equal(order[b * t.n + i], i);
        }
    }
}

TEST(failures_keep_the_basis)
{
    failures_case(*state, types[0], FAIL_N, FAIL_N);
    failures_case(*state, types[1], FAIL_N, FAIL_N);
}

static void failures_of_large_bases(tch_context *context, tch_scalar type)
{
    failures_case(context, type, 530, 20);
}

/* A backend's possible rates, by which the library chooses its arithmetic: float32 only, split products for S, or for
 * everything, if the backend can split at all. */
static const struct {
    tch_product_rates rates;
    void (*run)(tch_context *context, tch_scalar type);
} rated[] = {
    {{.f64 = 1.0, .f32 = 64.0}, follow_ranks},
    {{.f64 = 1.0, .f32 = 2.0, .f16x2 = 4.0}, follow_in_one_pass},
    {{.f64 = 1.0, .f32 = 2.0, .f16x2 = 4.0}, failures_of_large_bases},
    {{.f64 = 1.0, .f32 = 2.0, .f16x2 = 16.0}, follow_by_panels},
    {{.f64 = 1.0, .f32 = 2.0, .f16x2 = 16.0}, failures_of_large_bases},
};
static size_t rated_now;

static void rates_now(void *state, tch_product_rates *rates)
{
    *rates = rated[rated_now].rates;
}

TEST(rates_choose_the_arithmetic)
{
    tch_context *context = *state;
    const tch_backend *own = context->backend;
    table_copy changed;
    table_copy_make(&changed, own);
    changed.matrix.product_rates = rates_now;
    for (rated_now = 0; rated_now < TEST_COUNT(rated); rated_now++) {
        if (rated[rated_now].rates.f16x2 == 0.0 || own->matrix->split_rows != NULL) {
            context->backend = &changed.backend;
            rated[rated_now].run(context, TCH_SCALAR_F32);
            context->backend = own;
        }
    }
}

TEST(failures_start_from_the_identity)
{
    test_random random = test_random_stream(81);
    tracked t = begin_tracking(*state, TCH_SCALAR_F32, FAIL_N, FAILING);
    add_gradient(&t, &random, 1.0, FAIL_N);
    spoil(&t);
    start_basis(&t);
    check_flag(&t, NOT_FINITE, TCH_REPORT_NOT_FINITE);
    check_flag(&t, LOPSIDED, TCH_REPORT_NOT_SYMMETRIC);
    for (int64_t k = NOT_FINITE * t.n * t.n; k < FAILING * t.n * t.n; k++) {
        double expected = k % (t.n * t.n) % (t.n + 1) == 0 ? 1.0 : 0.0;
        CHECK(t.q[k] == expected, "element %lld is %g, of the identity %g", (long long)k, t.q[k], expected);
    }
}

/* Zeros have no direction to orthonormalize. */
TEST(a_basis_that_is_none_is_kept)
{
    test_random random = test_random_stream(82);
    tracked t = start_tracking(*state, TCH_SCALAR_F32, 20, 1, &random, 20);
    t.device_q = device_matrices(t.context, t.type, 1, 20, 20, 2, test_zeros(400));
    step_basis(&t);
    check_flag(&t, 0, TCH_REPORT_NOT_POSITIVE);
    assert_true(ref_norm(400, t.q) == 0.0);
}

/* Factors of any magnitude that their type holds give the same basis. */
TEST(magnitude_does_not_matter)
{
    enum { N = 33 };
    test_random random = test_random_stream(83);
    tracked t = begin_tracking(*state, TCH_SCALAR_F32, N, 3);
    add_gradient(&t, &random, 1.0, N);
    memcpy(t.a + N * N, t.a, N * N * sizeof *t.a);
    memcpy(t.a + 2 * N * N, t.a, N * N * sizeof *t.a);
    give_factors(&t);
    start_basis(&t);
    add_gradient(&t, &random, 0.1, N);
    for (int k = 0; k < N * N; k++) {
        t.a[N * N + k] = ldexp(t.a[k], -80);
        t.a[2 * N * N + k] = ldexp(t.a[k], 100);
    }
    give_factors(&t);
    step_basis(&t);
    check_orthonormal(&t, rounding_bound(&t));
    for (int b = 1; b < 3; b++) {
        double moved = ref_distance(N * N, t.q + b * N * N, t.q);
        CHECK(moved <= 1e-5, "matrix %d has another basis: %.3g", b, moved);
    }
}

TEST(nothing_is_fine)
{
    for (int64_t n = 0; n <= 5; n += 5) {
        tracked t = begin_tracking(*state, TCH_SCALAR_F32, n, n == 0 ? 3 : 0);
        start_basis(&t);
        step_basis(&t);
    }
}

TEST_MAIN(test_open_context, test_close_context)

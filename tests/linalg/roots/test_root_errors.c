/* The guarantee of tch_root_config.tolerance on difficult spectra: of low rank, so that the damped null space dominates
 * the root, of few values, graded, and tiny as a whole; by every method of the device, with dampings around those at
 * which the arithmetic changes. A result is within
 *
 *     max(tolerance, (n + 10) u64 (kappa / p + 1)) + u
 *
 * relative to the root's norm, or it is reported or rejected: u64 is float64's unit roundoff, the second term the error
 * of a stable eigensolver in float64, kappa the condition number after damping, and u the rounding to the tensor's
 * type. If the second term is far below the tolerance every method must succeed, unless it rejects the call
 * beforehand. */
#include "support/elements.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/random.h"
#include "support/tensors.h"
#include "support/testing.h"

static const int32_t roots[] = {1, 2, 3, 4, 6, 8};
static const tch_root_method methods[] = {TCH_ROOT_AUTO, TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL};
enum { ROOTS = 6, METHODS = 4 };

typedef enum spectrum_kind {
    RANK_ONE,
    RANK_FEW, /* a sixteenth of the size */
    RANK_HALF,
    TWO_VALUES,
    THREE_VALUES,
    GRADED,     /* geometric, to 1e-6 */
    STEEP,      /* to 1e-12, the smallest dominated by rounding of the matrix */
    TINY,       /* graded, of size 1e-30 */
    LARGE,      /* graded, of size 1e15 */
    EQUAL,      /* a multiple of the identity */
    BELOW_ZERO, /* equal but for one, which is -3e-5 */
    SPECTRA
} spectrum_kind;

static const char *const kind_names[] = {"rank 1",       "rank n/16",    "rank n/2",      "two values",
                                         "three values", "down to 1e-6", "down to 1e-12", "of size 1e-30",
                                         "of size 1e15", "equal",        "one below zero"};

static double eigenvalue(spectrum_kind kind, int64_t i, int64_t n, test_random *random)
{
    double share = n > 1 ? (double)i / (double)(n - 1) : 0.0;
    double some = i == 0 ? 1.0 : 0.25 + 0.75 * test_random_uniform(random);
    switch (kind) {
    case RANK_ONE:
        return i == 0 ? 1.0 : 0.0;
    case RANK_FEW:
        return i < n / 16 ? some : 0.0;
    case RANK_HALF:
        return i < n / 2 ? some : 0.0;
    case TWO_VALUES:
        return i < n / 2 ? 1.0 : 1e-2;
    case THREE_VALUES:
        return i < n / 3 ? 1.0 : i < 2 * n / 3 ? 1e-3 : 1e-6;
    case STEEP:
        return pow(1e-12, share);
    case EQUAL:
    case BELOW_ZERO:
        return kind == BELOW_ZERO && i == n - 1 ? -3e-5 : 1.0;
    default:
        return (kind == TINY ? 1e-30 : kind == LARGE ? 1e15 : 1.0) * pow(1e-6, share);
    }
}

static known_matrix make_known(spectrum_kind kind, int64_t n, tch_dtype dtype)
{
    known_matrix k = {n, test_zeros(n * n), test_zeros(n), test_zeros(n * n)};
    test_random random = test_random_stream(1000 * (uint64_t)n + (uint64_t)kind);
    for (int64_t i = 0; i < n; i++) {
        k.w[i] = eigenvalue(kind, i, n, &random);
    }
    ref_symmetric(&random, n, k.w, k.a);
    for (int64_t i = 0; i < n * n; i++) {
        k.a[i] = test_round(dtype, k.a[i]);
    }
    ref_eigh(n, k.a, k.w, k.v);
    return k;
}

/* --- one call ---------------------------------------------------------------------------------------------------- */

typedef struct trial {
    tch_context *context;
    tch_dtype dtype;
    int64_t n;
    test_tensor *a;
    double kappa; /* of the damped matrix */
} trial;

static void name_case(const trial *t, const char *kind, int32_t root, const tch_root_config *how)
{
    test_case("%s, n = %lld, %s, root %d by %s, relative_eps %g, tolerance %g", kind, (long long)t->n,
              tch_dtype_name(t->dtype), root, tch_root_method_name(how->method), how->relative_eps, how->tolerance);
}

/* NULL if nothing was written, because the matrix was reported or, in *refused, because the call failed. */
static double *take_root(const trial *t, int32_t root, const tch_root_config *how, bool *refused)
{
    const int64_t shape[] = {t->n, t->n};
    test_tensor *x = test_tensor_make(t->context, t->dtype, 2, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(t->context, TCH_INT32, 0, NULL, LAYOUT_CONTIGUOUS);
    tch_status status = tch_inverse_root(t->context, &t->a->tensor, root, how, &x->tensor, NULL, &report->tensor);
    *refused = status == TCH_ERR_INVALID_ARGUMENT && how->method >= TCH_ROOT_NEWTON;
    CHECK(status == TCH_OK || *refused, "gave %s: %s", tch_status_name(status), tch_last_error());
    double *said = status == TCH_OK ? test_tensor_read(report) : NULL;
    double *result = said != NULL && *said == TCH_REPORT_OK ? test_tensor_read(x) : NULL;
    if (result == NULL) {
        test_tensor_check_unchanged(x, "out");
    }
    return result;
}

static void check_promise(const trial *t, int32_t root, const tch_root_config *how, const double *expected)
{
    int64_t size = t->n * t->n;
    double tolerance = how->tolerance > 0.0 ? how->tolerance : t->dtype.bits == 64 ? 1e-9 : 1e-3;
    double least = (double)(t->n + 10) * 0x1p-53 * (t->kappa / root + 1.0); /* of float64 in any case */
    double bound = fmax(tolerance, least) + test_unit_roundoff(t->dtype);
    bool refused;
    double *x = take_root(t, root, how, &refused);
    CHECK(x != NULL || refused || 64.0 * least > tolerance, "it was given up, and float64 reaches %.3g", least);
    if (x != NULL) {
        double error = ref_distance(size, x, expected) / ref_norm(size, expected);
        CHECK(error <= bound, "relative error %.3g > %.3g promised", error, bound);
    }
}

/* --- every kind of spectrum -------------------------------------------------------------------------------------- */

typedef struct settings {
    tch_dtype dtype;
    int64_t n;
    int dampings, tolerances;
    double damping[6], tolerance[2];
} settings;

/* Rounding to float32 moves an eigenvalue too far below zero. Products and poles are for a spectrum that damping has
 * lifted above zero, and with a report `auto` falls back to the eigen method on the CPU only. */
static bool serves_below_zero(const trial *t, tch_root_method method)
{
    return t->dtype.bits == 64 && (method == TCH_ROOT_EIGEN || (method == TCH_ROOT_AUTO && test_on_cpu()));
}

static void check_methods(trial *t, spectrum_kind kind, const known_matrix *k, int32_t root, tch_root_config *how)
{
    double damping = how->relative_eps * k->w[k->n - 1];
    t->kappa = (k->w[k->n - 1] + damping) / (k->w[0] + damping);
    if (k->w[0] + damping <= 0.0) {
        return; /* rounding has made the matrix indefinite, and the damping does not cover it */
    }
    size_t mark = test_mark();
    double *expected = ref_power(k->n, k->w, k->v, damping, -1.0 / root);
    for (int m = 0; m < METHODS; m++) {
        how->method = methods[m];
        if (test_offers_method(how->method) && (kind != BELOW_ZERO || serves_below_zero(t, how->method))) {
            name_case(t, kind_names[kind], root, how);
            check_promise(t, root, how, expected);
        }
    }
    test_release_since(mark);
}

static void check_spectrum(tch_context *context, const settings *s, spectrum_kind kind)
{
    const int64_t shape[] = {s->n, s->n};
    known_matrix k = make_known(kind, s->n, s->dtype);
    trial t = {context, s->dtype, s->n, test_tensor_make(context, s->dtype, 2, shape, LAYOUT_CONTIGUOUS), 0.0};
    test_tensor_write(t.a, k.a);
    for (int i = 0; i < ROOTS * s->dampings * s->tolerances; i++) {
        tch_root_config how = TCH_ROOT_CONFIG_INIT;
        if ((i + i / ROOTS + (int)kind) % 2 == 1) {
            continue; /* half of the roots with each damping and tolerance, the others with the next spectrum */
        }
        how.relative_eps = s->damping[i / ROOTS % s->dampings];
        how.tolerance = s->tolerance[i / ROOTS / s->dampings];
        check_methods(&t, kind, &k, roots[i % ROOTS], &how);
    }
}

/* Float32, around the dampings at which each method switches to it, then with tighter tolerances; float64. */
TEST(promises_for_every_spectrum)
{
    static const settings rows[] = {
        {{TCH_FLOAT, 32, 1}, 128, 6, 1, {4e-4, 1e-4, 3e-5, 8e-6, 1e-6, 1e-7}, {0.0}},
        {{TCH_FLOAT, 32, 1}, 72, 4, 2, {1e-2, 1e-3, 1e-4, 1e-6}, {1e-4, 1e-5}},
        {{TCH_FLOAT, 64, 1}, 72, 4, 2, {1e-3, 1e-5, 1e-7, 1e-9}, {0.0, 1e-6}},
    };
    for (size_t i = 0; i < TEST_COUNT(rows) * SPECTRA; i++) {
        check_spectrum(*state, &rows[i / SPECTRA], (spectrum_kind)(i % SPECTRA));
    }
}

/* Steps in a type narrower than the matrices', for matrices too large for one launch. */
TEST(looser_tolerances)
{
    const settings s = {TCH_FLOAT64, 136, 2, 2, {1e-2, 1e-4}, {1e-1, 1e-2}};
    check_spectrum(*state, &s, RANK_ONE);
    check_spectrum(*state, &s, BELOW_ZERO);
}

/* --- large matrices of low rank with exactly known roots --------------------------------------------------------- */

/* A = G G' with G n by r and of small integers is exact in float32. With G'G = W S W', r by r, and U = G W S^(-1/2),
 * the root is d^(-1/p) I + U ((S + d)^(-1/p) - d^(-1/p)) U'. */
typedef struct low_rank {
    int64_t n, rank;
    double *g, *s, *u; /* u by columns of rank */
} low_rank;

static low_rank make_low_rank(int64_t n, int64_t rank)
{
    low_rank l = {n, rank, test_alloc((size_t)(n * rank) * sizeof(double)), test_alloc((size_t)rank * sizeof(double)),
                  test_alloc((size_t)(n * rank) * sizeof(double))};
    double *transposed = test_alloc((size_t)(n * rank) * sizeof(double));
    double *gram = test_alloc((size_t)(rank * rank) * sizeof(double));
    double *w = test_alloc((size_t)(rank * rank) * sizeof(double));
    test_random random = test_random_stream(5000 * (uint64_t)n + (uint64_t)rank);
    for (int64_t i = 0; i < n * rank; i++) {
        l.g[i] = floor(7.0 * test_random_uniform(&random)) - 3.0;
    }
    ref_transpose(n, rank, l.g, transposed);
    ref_matmul(rank, n, rank, transposed, l.g, gram);
    ref_eigh(rank, gram, l.s, w);
    ref_matmul(n, rank, rank, l.g, w, l.u);
    for (int64_t i = 0; i < n * rank; i++) {
        l.u[i] /= sqrt(l.s[i % rank]);
    }
    return l;
}

/* v diag(f) v' + c I for v n by r; without f v v' + c I. */
static double *compose_low_rank(int64_t n, int64_t rank, const double *v, const double *f, double c)
{
    double *scaled = test_alloc((size_t)(n * rank) * sizeof(double));
    double *transposed = test_alloc((size_t)(n * rank) * sizeof(double));
    double *out = test_alloc((size_t)(n * n) * sizeof(double));
    for (int64_t i = 0; i < n * rank; i++) {
        scaled[i] = f != NULL ? v[i] * f[i % rank] : v[i];
    }
    ref_transpose(n, rank, v, transposed);
    ref_matmul(n, rank, n, scaled, transposed, out);
    for (int64_t i = 0; i < n; i++) {
        out[i * n + i] += c;
    }
    return out;
}

static double *low_rank_root(const low_rank *l, int32_t root, double damping)
{
    double *f = test_alloc((size_t)l->rank * sizeof(double));
    double rest = pow(damping, -1.0 / root);
    for (int64_t i = 0; i < l->rank; i++) {
        f[i] = pow(l->s[i] + damping, -1.0 / root) - rest;
    }
    return compose_low_rank(l->n, l->rank, l->u, f, rest);
}

static void check_low_rank(tch_context *context, int64_t n, int64_t rank, int32_t root, tch_root_method method,
                           const double *relative_eps, int count)
{
    const int64_t shape[] = {n, n};
    size_t mark = test_mark();
    low_rank l = make_low_rank(n, rank);
    double *values = compose_low_rank(n, rank, l.g, NULL, 0.0);
    trial t = {context, TCH_FLOAT32, n, test_tensor_make(context, TCH_FLOAT32, 2, shape, LAYOUT_CONTIGUOUS), 0.0};
    test_tensor_write(t.a, values);
    for (int i = 0; i < count; i++) {
        tch_root_config how = TCH_ROOT_CONFIG_INIT;
        double damping = relative_eps[i] * l.s[rank - 1];
        double *expected = low_rank_root(&l, root, damping);
        how.method = method;
        how.relative_eps = relative_eps[i];
        t.kappa = 1.0 + 1.0 / relative_eps[i];
        name_case(&t, "exactly of low rank", root, &how);
        check_promise(&t, root, &how, expected);
    }
    test_release_since(mark);
}

TEST(large_matrices_of_low_rank)
{
    static const double dampings[] = {8e-6, 3e-5, 1.2e-4, 2e-4, 1e-6, 1e-4};
    for (int m = 0; m < METHODS; m++) {
        if (test_offers_method(methods[m])) {
            check_low_rank(*state, 256, 8, 2, methods[m], dampings, 6);
            check_low_rank(*state, 256, 128, 4, methods[m], dampings, 6);
            check_low_rank(*state, 256, 1, 8, methods[m], dampings, 6);
        }
    }
    check_low_rank(*state, 777, 90, 2, TCH_ROOT_AUTO, dampings + 4, 1);
    if (!test_on_cpu()) {
        check_low_rank(*state, 1024, 16, 4, TCH_ROOT_AUTO, dampings, 3);
        check_low_rank(*state, 2048, 8, 4, TCH_ROOT_AUTO, dampings + 5, 1);
    }
}

/* Above 512 rows a GPU uses another algorithm; this one is small enough for an emulated GPU, too. */
TEST(roots_beyond_a_block)
{
    static const double damping = 1e-6;
    check_low_rank(*state, 520, 5, 4, TCH_ROOT_NEWTON, &damping, 1);
    if (!test_on_cpu() && getenv("TORCHIUM_EMULATOR_CAPABILITY") == NULL) {
        check_low_rank(*state, 520, 130, 8, TCH_ROOT_NEWTON, &damping, 1);
    }
}

/* --- initial vectors that miss the largest eigenvalue ------------------------------------------------------------ */

/* Roots of many random matrices of low rank by the Newton method, whose polynomials hold only up to the given bound.
 * The case is rare: an initial vector with almost no component along the largest eigenvalue's eigenvector, so that the
 * iteration converges to the second largest. The damping is far above rounding: every root must be good. */
enum { MATRICES = 2000 };

/* G G' for random G [n, rank], one after the other. */
static double *many_low_rank(int64_t n, int64_t rank, test_random *random)
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

static void check_many(tch_context *context, int64_t n, int64_t rank)
{
    const int64_t shape[] = {MATRICES, n, n};
    test_random random = test_random_stream((uint64_t)(1000 * n + rank));
    double *values = many_low_rank(n, rank, &random);
    test_tensor *a = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *x = test_tensor_make(context, TCH_FLOAT32, 3, shape, LAYOUT_CONTIGUOUS);
    test_tensor *report = test_tensor_make(context, TCH_INT32, 1, shape, LAYOUT_CONTIGUOUS);
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    config.method = TCH_ROOT_NEWTON;
    config.relative_eps = 1e-4;
    test_case("%d matrices of %lld by %lld, rank %lld", MATRICES, (long long)n, (long long)n, (long long)rank);
    test_tensor_write(a, values);
    CHECK_OK(tch_inverse_root(context, &a->tensor, 4, &config, &x->tensor, NULL, &report->tensor));
    test_check_report_ok(report);
}

TEST(every_root_is_good)
{
    check_many(*state, 21, 3);
    check_many(*state, 13, 4);
    check_many(*state, 40, 5);
}

enum { SIZE = 64 };

/* The iteration's initial vector, and u with a component of 3e-5 along it, both of length 1. */
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

/* The largest eigenvalue, 1.05, belongs to u, and the initial vector is nearly the eigenvector of the next, 1: its
 * residual of 1.5e-6 is accepted unless a tight tolerance requires less. Scaled by 1 the root would diverge. */
TEST(a_tight_tolerance_finds_what_the_start_hides)
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
    trial t = {*state, TCH_FLOAT64, SIZE, test_tensor_make(*state, TCH_FLOAT64, 2, shape, LAYOUT_CONTIGUOUS), 0.0};
    tch_root_config config = TCH_ROOT_CONFIG_INIT;
    bool refused;
    config.method = TCH_ROOT_NEWTON;
    config.relative_eps = 1e-3;
    config.tolerance = 1e-5;
    test_tensor_write(t.a, values);
    CHECK(take_root(&t, 4, &config, &refused) != NULL, "the root was refused or reported");
}

/* A second argument names a single test to run. */

TEST_MAIN(test_open_context, test_close_context)

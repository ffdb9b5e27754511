/* The library above the operation table with behaviors that the CPU backend never has: failing certificates, flags on a
 * device, bracketed calls, sharpened powers. Each case puts a modified copy of the CPU's table into a context. */
#include "core/context.h"
#include "support/backend/table_copy.h"
#include "support/linalg/cases.h"
#include "support/linalg/reference.h"
#include "support/optim/optim_trial.h"
#include "support/testing.h"

static table_copy table;
static const tch_backend *own_table;

static int change_table(void **state)
{
    tch_context *context = *state;
    own_table = context->backend;
    table_copy_make(&table, own_table);
    context->backend = &table.backend;
    return 0;
}

static int restore_table(void **state)
{
    ((tch_context *)*state)->backend = own_table;
    return test_release(state);
}

/* --- calls are bracketed ----------------------------------------------------------------------------------------- */

static int begun, ended, pushed, popped;
static char first_range[64];

static tch_status count_begin(void *state)
{
    begun++;
    return own_table->device->begin(state);
}

static void count_end(void *state)
{
    ended++;
}

static void count_range(void *state, const char *name)
{
    popped += name == NULL;
    if (name != NULL && pushed++ == 0) {
        snprintf(first_range, sizeof first_range, "%s", name);
    }
    CHECK(popped <= pushed, "a range ended that had not begun");
}

TEST_WITH(every_call_ends_what_it_began, change_table, restore_table)
{
    tch_context *context = *state;
    test_variation shape = {.n = 12, .matrices = 1};
    table.device.begin = count_begin;
    table.device.end = count_end;
    table.device.range = count_range;
    test_tensor *a = test_known_tensor(context, &shape, 10.0, TCH_FLOAT32);
    test_tensor *out = test_case_tensor(context, &shape, TCH_FLOAT32, 12, 12, LAYOUT_CONTIGUOUS);
    begun = ended = pushed = popped = 0;
    CHECK_OK(tch_inverse_root(context, &a->tensor, 4, NULL, &out->tensor, NULL, NULL));
    assert_int_equal(begun, 1);
    assert_string_equal(first_range, "tch_inverse_root");
    CHECK(pushed > 1, "the phases of a root have no ranges");
    assert_int_not_equal(tch_inverse_root(context, &a->tensor, 5, NULL, &out->tensor, NULL, NULL), TCH_OK);
    assert_int_equal(begun, 2);
    assert_int_equal(ended, begun);
    assert_int_equal(popped, pushed);
}

/* --- failing certificates ---------------------------------------------------------------------------------------- */

static tch_status wrong_inverse(void *state, const tch_matrices *a, int32_t count, const double *shifts,
                                const double *weights, const tch_matrices *x, int32_t *flags, void *scratch)
{
    (void)a, (void)count, (void)shifts, (void)weights, (void)flags, (void)scratch;
    return own_table->matrix->combine(state, 3.0, 0.0, NULL, 0.0, NULL, x);
}

typedef struct failing_root {
    test_tensor *a, *out, *report;
    const known_matrix *known;
    tch_root_config config;
} failing_root;

enum { N = 80 };

static failing_root make_failing(tch_context *context, tch_root_method method)
{
    static const int64_t one[] = {1};
    test_variation shape = {.n = N, .matrices = 1, .batch_rank = 1, .batch = {1}};
    failing_root f = {.config = TCH_ROOT_CONFIG_INIT};
    table.matrix.shifted_inverse = wrong_inverse;
    f.a = test_known_tensor(context, &shape, 100.0, TCH_FLOAT32);
    f.known = test_known_of(&shape, 0, 100.0, TCH_FLOAT32);
    f.out = test_case_tensor(context, &shape, TCH_FLOAT32, N, N, LAYOUT_CONTIGUOUS);
    f.report = test_tensor_make(context, TCH_INT32, 1, one, LAYOUT_CONTIGUOUS);
    f.config.relative_eps = 1e-3;
    f.config.method = method;
    return f;
}

static tch_status take(tch_context *context, failing_root *f, bool with_report)
{
    return tch_inverse_root(context, &f->a->tensor, 2, &f->config, &f->out->tensor, NULL,
                            with_report ? &f->report->tensor : NULL);
}

static void check_root(const failing_root *f)
{
    double powers[N], expected[N * N];
    double *got = test_tensor_read(f->out);
    double damping = 1e-3 * f->known->w[N - 1];
    for (int i = 0; i < N; i++) {
        powers[i] = 1.0 / sqrt(f->known->w[i] + damping);
    }
    ref_compose(N, f->known->v, powers, expected);
    double error = ref_distance(N * N, got, expected) / ref_norm(N * N, expected);
    CHECK(error <= 1e-3, "the root is off by %.3g", error);
}

static int32_t reported(const failing_root *f)
{
    double *values = test_tensor_read(f->report);
    int32_t flag = (int32_t)values[0];
    return flag;
}

TEST_WITH(auto_falls_back_on_eigen, change_table, restore_table)
{
    failing_root f = make_failing(*state, TCH_ROOT_AUTO);
    for (int with_report = 0; with_report < 2; with_report++) {
        test_case("flags in host memory, report %d", with_report);
        test_tensor_poison(f.out);
        CHECK_OK(take(*state, &f, with_report));
        check_root(&f);
    }
    assert_int_equal(reported(&f), TCH_REPORT_OK);
}

/* The same with a table that claims device memory, only during the call, since the tests' own copies need the truth. */
static tch_status take_as_device(tch_context *context, failing_root *f, bool with_report)
{
    table.backend.host_memory = 0;
    tch_status status = take(context, f, with_report);
    table.backend.host_memory = 1;
    return status;
}

/* Without a report the call synchronizes in any case, and can retry; with one it leaves the verdict on the device. */
TEST_WITH(flags_on_a_device_are_read_only_without_a_report, change_table, restore_table)
{
    failing_root f = make_failing(*state, TCH_ROOT_AUTO);
    test_case("flags on the device, no report");
    CHECK_OK(take_as_device(*state, &f, false));
    check_root(&f);
    test_case("flags on the device, report");
    test_tensor_poison(f.out);
    CHECK_OK(take_as_device(*state, &f, true));
    test_tensor_check_unchanged(f.out, "out");
    assert_int_equal(reported(&f), TCH_REPORT_NO_CONVERGENCE);
}

TEST_WITH(a_method_asked_for_does_not_fall_back, change_table, restore_table)
{
    failing_root f = make_failing(*state, TCH_ROOT_RATIONAL);
    CHECK_OK(take(*state, &f, true));
    test_tensor_check_unchanged(f.out, "out");
    assert_int_equal(reported(&f), TCH_REPORT_NO_CONVERGENCE);
    assert_int_equal(take(*state, &f, false), TCH_ERR_NUMERIC);
    test_tensor_check_unchanged(f.out, "out");
}

/* --- sharpened powers -------------------------------------------------------------------------------------------- */

static void fast_float64(void *state, tch_product_rates *rates)
{
    *rates = (tch_product_rates){.f64 = 56.0, .f32 = 50.0};
}

/* As documented, without optimization. */
static tch_status plain_differences(void *state, const tch_spectrum_map *map, const tch_matrices *w,
                                    const tch_matrices *values, const double *damping, const tch_matrices *b,
                                    int32_t *flags)
{
    (void)state, (void)flags;
    const double *l = w->data;
    const double *f = values->data;
    double *m = b->data;
    for (int64_t i = 0; i < b->rows; i++) {
        for (int64_t j = 0; j < b->rows; j++) {
            double apart = l[i] - l[j];
            double least = fmax(fmin(l[i], l[j]), 0.0) + damping[0];
            double slope = fabs(apart) > 1e-6 * least ? (f[i] - f[j]) / apart : map->power * f[i] / (l[i] + damping[0]);
            double *element = &m[i * b->ld + j];
            *element = i == j ? f[i] : fabs(*element) <= 0.5 * least ? *element * slope : 0.0;
        }
    }
    return TCH_OK;
}

static double power_error(tch_context *context, const known_matrix *known, double power, double eps)
{
    int64_t n = known->n;
    test_variation shape = {.n = n, .matrices = 1};
    test_tensor *a = test_known_tensor(context, &shape, 1e5, TCH_FLOAT32);
    test_tensor *out = test_case_tensor(context, &shape, TCH_FLOAT32, n, n, LAYOUT_CONTIGUOUS);
    CHECK_OK(tch_matrix_power(context, &a->tensor, power, eps, &out->tensor, NULL));
    double *powers = test_alloc((size_t)n * sizeof *powers);
    double *expected = test_alloc((size_t)(n * n) * sizeof *expected);
    double *got = test_tensor_read(out);
    for (int64_t i = 0; i < n; i++) {
        powers[i] = pow(fmax(known->w[i] + eps, eps), power);
    }
    ref_compose(n, known->v, powers, expected);
    double error = ref_distance(n * n, got, expected) / ref_norm(n * n, expected);
    return error;
}

/* At condition 1e5 a float32 eigensolver has an error of some u times that in a negative power; after the correction
 * the error is of second order. */
TEST_WITH(float32_powers_are_sharpened, change_table, restore_table)
{
    static const double exponents[] = {-0.25, -0.5, -1.0, 0.5};
    test_variation shape = {.n = 60, .matrices = 1};
    const known_matrix *known = test_known_of(&shape, 0, 1e5, TCH_FLOAT32);
    for (int i = 0; i < 4; i++) {
        test_case("power %g", exponents[i]);
        table.matrix.product_rates = NULL;
        double plain = power_error(*state, known, exponents[i], 1e-7);
        table.matrix.product_rates = fast_float64;
        table.matrix.divided_differences = plain_differences;
        double sharp = power_error(*state, known, exponents[i], 1e-7);
        CHECK(sharp <= 1e-4, "error %.3g, plain %.3g", sharp, plain);
        CHECK(exponents[i] > 0 || sharp <= 0.1 * plain, "error %.3g is not much below %.3g", sharp, plain);
    }
}

/* --- steps skipped on the device --------------------------------------------------------------------------------- */

/* All values of the state, then of the parameters. */
static double *numbers_of(const trial *t, int64_t *count)
{
    enum { MOST = 4096 };
    double *all = test_zeros(MOST);
    *count = 0;
    for (int32_t i = 0; i < tch_optimizer_state_count(t->optimizer) + t->count; i++) {
        int32_t parameter = i - tch_optimizer_state_count(t->optimizer);
        tch_optim_state s = TCH_OPTIM_STATE_INIT;
        if (parameter < 0) {
            CHECK_OK(tch_optimizer_get_state(t->optimizer, i, &s));
        }
        const tch_tensor *tensor = parameter < 0 ? s.tensor : &t->parameters[parameter].memory->tensor;
        CHECK(*count + tch_tensor_numel(tensor) <= MOST, "too many numbers for the test");
        memcpy(all + *count, trial_read(t, tensor), (size_t)tch_tensor_numel(tensor) * sizeof *all);
        *count += tch_tensor_numel(tensor);
    }
    return all;
}

/* If flags are on the device the step continues, and no operation changes anything. Due roots are recomputed from the
 * same factors; bases are not. */
static void skip_on_a_device(tch_context *context, tch_optim_kind kind)
{
    static const trial_shape shapes[] = {
        {.ndim = 2, .shape = {8, 8}}, {.ndim = 1, .shape = {19}}, {.ndim = 2, .shape = {12, 6}}};
    trial t;
    int64_t count;
    tch_optim_config c = trial_config(kind);
    c.shampoo.precondition_frequency = kind == TCH_OPTIM_SHAMPOO ? 1 : 1000;
    c.shampoo.grafting = TCH_GRAFTING_ADAM;
    c.momentum = 0.9;
    trial_open(&t, context, TCH_FLOAT32, TCH_FLOAT32, &c, (int32_t)TEST_COUNT(shapes), shapes);
    trial_steps(&t, 3);
    double *before = numbers_of(&t, &count);
    trial_draw(&t);
    trial_spoil(&t, 0, (double)NAN);
    table.backend.host_memory = 0;
    tch_status status = trial_step_library(&t);
    table.backend.host_memory = 1;
    CHECK_OK(status);
    CHECK(memcmp(before, numbers_of(&t, &count), (size_t)count * sizeof *before) == 0, "a number has changed");
    CHECK(trial_stats(&t).skipped == 1, "%lld steps were skipped", (long long)trial_stats(&t).skipped);
}

TEST_WITH(skipped_steps_write_nothing, change_table, restore_table)
{
    trial_for_every_kind(*state, "skipped unknown to the host", skip_on_a_device);
}

TEST_MAIN(test_open_context, test_close_known)

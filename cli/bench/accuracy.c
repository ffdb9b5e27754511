/* Errors of the inverse roots over condition numbers. In float32 the reference is the float64 root of the same float32
 * matrices: what rounding the input costs is not the method's fault. In float64 it is the root known from how the
 * matrices were made, which is independent of every method. */
#include "bench.h"

#include <math.h>

#include "measure/random_matrices.h"

enum { SEED = 77 };

static const tch_root_method methods[] = {TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL};

/* Everything one condition number needs. */
typedef struct accuracy_inputs {
    tch_tensor *spectrum;                  /* host, [n] */
    tch_tensor *a32, *a64, *widened;       /* device; widened is a32 in float64 */
    tch_tensor *truth;                     /* device, float64: the root of a64 by construction */
    tch_tensor *reference32, *reference64; /* host */
} accuracy_inputs;

static void release(accuracy_inputs *in)
{
    tch_tensor *all[] = {in->spectrum, in->a32, in->a64, in->widened, in->truth, in->reference32, in->reference64};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        tch_tensor_destroy(all[i]);
    }
}

static tch_status allocate(const workplace *place, accuracy_inputs *in)
{
    const int64_t n = BENCH_ACCURACY_N, batch = BENCH_ACCURACY_BATCH;
    CLI_TRY(workplace_vector(place->host, TCH_FLOAT64, n, &in->spectrum));
    CLI_TRY(workplace_matrices(place->device, TCH_FLOAT32, batch, n, n, &in->a32));
    CLI_TRY(workplace_matrices(place->device, TCH_FLOAT64, batch, n, n, &in->a64));
    CLI_TRY(workplace_matrices(place->device, TCH_FLOAT64, batch, n, n, &in->widened));
    return workplace_matrices(place->device, TCH_FLOAT64, batch, n, n, &in->truth);
}

/* The matrices are singular; damping by 1/condition of the largest eigenvalue makes them what they are said to be. */
static tch_status fill_matrices(const workplace *place, int32_t root, double condition, accuracy_inputs *in)
{
    double *w = in->spectrum->data;
    random_power_law(BENCH_ACCURACY_N, condition, w);
    for (int i = 0; i < BENCH_ACCURACY_N; i++) {
        w[i] -= 1.0 / condition;
    }
    CLI_TRY(random_symmetric(place, SEED, w, in->a64));
    CLI_TRY(tch_tensor_copy(place->device, in->a32, in->a64));
    CLI_TRY(tch_tensor_copy(place->device, in->widened, in->a32));
    double damping = w[0] / condition;
    for (int i = 0; i < BENCH_ACCURACY_N; i++) {
        w[i] = pow(w[i] + damping, -1.0 / root);
    }
    return random_symmetric(place, SEED, w, in->truth);
}

static tch_status take_root(const workplace *place, const tch_tensor *a, const bench_accuracy_row *row,
                            const tch_tensor *reference, root_verdict *verdict, tch_tensor **result)
{
    root_trial trial;
    CLI_TRY(root_trial_start(place, a, &trial));
    trial.root = row->root;
    trial.config.method = row->method;
    trial.config.relative_eps = 1.0 / row->condition;
    trial.config.exact_residual = 1;
    tch_status status = root_trial_run(place->device, &trial);
    if (status == TCH_OK && verdict != NULL) {
        status = root_trial_judge(place, &trial, reference, verdict);
    }
    if (status == TCH_OK && result != NULL) {
        status = workplace_fetch(place, trial.out, result);
    }
    root_trial_end(&trial);
    return status;
}

static tch_status add_rows(const workplace *place, const accuracy_inputs *in, const bench_accuracy_row *first,
                           bench_results *results)
{
    tch_status status = TCH_OK;
    bool wide = tch_dtype_equal(first->dtype, TCH_FLOAT64);
    for (size_t i = 0; i < sizeof methods / sizeof methods[0] && status == TCH_OK; i++) {
        if (results->accuracy_count == BENCH_ACCURACY_ROWS) {
            return TCH_OK;
        }
        bench_accuracy_row *row = &results->accuracy[results->accuracy_count++];
        *row = *first;
        row->method = methods[i];
        status = take_root(place, wide ? in->a64 : in->a32, row, wide ? in->reference64 : in->reference32,
                           &row->verdict, NULL);
        row->offered = status != TCH_ERR_UNSUPPORTED;
        status = row->offered ? status : TCH_OK;
    }
    return status;
}

static tch_status measure(const workplace *place, int32_t root, double condition, accuracy_inputs *in,
                          bench_results *results)
{
    bench_accuracy_row row = {
        .condition = condition, .root = root, .method = TCH_ROOT_EIGEN, .verdict = ROOT_VERDICT_NONE};
    CLI_TRY(allocate(place, in));
    CLI_TRY(fill_matrices(place, root, condition, in));
    CLI_TRY(take_root(place, in->widened, &row, NULL, NULL, &in->reference32));
    CLI_TRY(workplace_fetch(place, in->truth, &in->reference64));
    row.dtype = TCH_FLOAT32;
    CLI_TRY(add_rows(place, in, &row, results));
    row.dtype = TCH_FLOAT64;
    return add_rows(place, in, &row, results);
}

tch_status bench_accuracy_measure(const workplace *place, int32_t root, double condition, bench_results *results)
{
    accuracy_inputs in = {0};
    tch_status status = measure(place, root, condition, &in, results);
    release(&in);
    return status;
}

/* `torchium demo`: a batch of ill-conditioned matrices and their inverse roots by every method, with what each costs
 * and its error. The matrices are singular until damping gives them the condition number asked for, which is how an
 * optimizer meets them. In float32 the reference is the float64 root of the same float32 matrices: what rounding the
 * input costs is not the method's fault. In float64 it is the root known from how the matrices were made, which is
 * independent of every method. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include <torchium/torchium.h>

#include "commands.h"
#include "measure/machine.h"
#include "measure/random_matrices.h"
#include "measure/root_trial.h"
#include "measure/timing.h"
#include "measure/workplace.h"
#include "terminal/options.h"
#include "terminal/output.h"
#include "terminal/progress.h"
#include "text/table.h"

typedef struct demo_options {
    int64_t n, batch, root, seed;
    double condition;
    const char *device, *type;
    bool wide; /* the type is float64 */
} demo_options;

typedef struct demo_row {
    tch_dtype dtype;
    tch_root_method method, used;
    bool offered; /* by the device's backend */
    timing time;
    root_verdict verdict;
} demo_row;

/* The first row is always in float64: the reference of the others where they are in float32, left out elsewhere.
 * Speed is compared with the second. */
static const tch_root_method methods[] = {TCH_ROOT_EIGEN, TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL,
                                          TCH_ROOT_AUTO};
enum { ROWS = sizeof methods / sizeof methods[0] };

/* Seconds spent on timing one row. */
static const double row_seconds = 0.3;

typedef struct demo_inputs {
    tch_tensor *f32;       /* NULL where the type is float64 */
    tch_tensor *f64;       /* the numbers of f32, or unrounded */
    tch_tensor *reference; /* host; where the type is float32, NULL until the first row is done */
} demo_inputs;

/* Eigenvalues falling as a power from nearly 1 to 0; damping by 1/condition makes the smallest 1/condition. */
static tch_status fill_spectrum(const workplace *place, const demo_options *options, tch_tensor **spectrum)
{
    CLI_TRY(workplace_vector(place->host, TCH_FLOAT64, options->n, spectrum));
    double *w = (*spectrum)->data;
    random_power_law(options->n, options->condition, w);
    for (int64_t i = 0; i < options->n && options->n > 1; i++) {
        w[i] -= 1.0 / options->condition;
    }
    return TCH_OK;
}

/* The same seed has the same eigenvectors: the root is made like the matrix, from the roots of its eigenvalues. */
static tch_status make_wide(const workplace *place, const demo_options *options, double *w, demo_inputs *inputs)
{
    uint64_t seed = (uint64_t)options->seed;
    double damping = w[0] / options->condition;
    tch_tensor *truth = NULL;
    CLI_TRY(random_symmetric(place, seed, w, inputs->f64));
    for (int64_t i = 0; i < options->n; i++) {
        w[i] = pow(w[i] + damping, -1.0 / (double)options->root);
    }
    CLI_TRY(workplace_matrices(place->device, TCH_FLOAT64, options->batch, options->n, options->n, &truth));
    tch_status status = random_symmetric(place, seed, w, truth);
    if (status == TCH_OK) {
        status = workplace_fetch(place, truth, &inputs->reference);
    }
    tch_tensor_destroy(truth);
    return status;
}

static tch_status make_inputs(const workplace *place, const demo_options *options, demo_inputs *inputs)
{
    tch_tensor *spectrum = NULL;
    int64_t n = options->n, batch = options->batch;
    CLI_TRY(workplace_matrices(place->device, TCH_FLOAT64, batch, n, n, &inputs->f64));
    tch_status status = fill_spectrum(place, options, &spectrum);
    if (status == TCH_OK && options->wide) {
        status = make_wide(place, options, spectrum->data, inputs);
    } else if (status == TCH_OK &&
               (status = workplace_matrices(place->device, TCH_FLOAT32, batch, n, n, &inputs->f32)) == TCH_OK &&
               (status = random_symmetric(place, (uint64_t)options->seed, spectrum->data, inputs->f32)) == TCH_OK) {
        status = tch_tensor_copy(place->device, inputs->f64, inputs->f32);
    }
    tch_tensor_destroy(spectrum);
    return status;
}

/* Runs one row. The first one, which has no reference yet, leaves its result as the reference. */
static tch_status run_row(const workplace *place, const demo_options *options, demo_inputs *inputs, demo_row *row)
{
    root_trial trial;
    bool wide = tch_dtype_equal(row->dtype, TCH_FLOAT64);
    CLI_TRY(root_trial_start(place, wide ? inputs->f64 : inputs->f32, &trial));
    trial.root = (int32_t)options->root;
    trial.config.method = row->method;
    trial.config.relative_eps = 1.0 / options->condition;
    tch_status status = tch_inverse_root_plan(place->device, row->dtype, options->batch, options->n, trial.root,
                                              &trial.config, &row->used, NULL);
    if (status == TCH_OK &&
        (status = timing_measure(place->device, root_trial_run, &trial, row_seconds, &row->time)) == TCH_OK) {
        status = root_trial_judge(place, &trial, inputs->reference, &row->verdict);
    }
    if (status == TCH_OK && inputs->reference == NULL) {
        status = workplace_fetch(place, trial.out, &inputs->reference);
    }
    root_trial_end(&trial);
    row->offered = status != TCH_ERR_UNSUPPORTED;
    return row->offered ? status : TCH_OK;
}

static tch_status run_rows(const workplace *place, const demo_options *options, demo_row *rows)
{
    demo_inputs inputs = {NULL, NULL, NULL};
    progress p = progress_start(ROWS);
    progress_show(&p, "making the matrices");
    tch_status status = make_inputs(place, options, &inputs);
    for (int i = options->wide; i < ROWS && status == TCH_OK; i++) {
        rows[i] = (demo_row){.dtype = options->wide || i == 0 ? TCH_FLOAT64 : TCH_FLOAT32, .method = methods[i]};
        progress_show(&p, tch_root_method_name(rows[i].method));
        status = run_row(place, options, &inputs, &rows[i]);
        progress_advance(&p, 1.0);
    }
    progress_clear(&p);
    tch_tensor_destroy(inputs.reference);
    tch_tensor_destroy(inputs.f32);
    tch_tensor_destroy(inputs.f64);
    return status;
}

static void print_row(table *t, const demo_options *options, const demo_row *rows, const demo_row *row)
{
    const root_verdict *verdict = &row->verdict;
    table_row(t);
    table_set(t, 0, "%s", tch_root_method_name(row->method));
    table_set(t, 2, "%s", tch_dtype_name(row->dtype));
    if (!row->offered) {
        table_set(t, 7, "not offered on this device");
        return;
    }
    table_set(t, 1, "%s", tch_root_method_name(row->used));
    if (row == rows) {
        table_set(t, 3, "reference");
    } else if (verdict->failed < options->batch) {
        table_set(t, 3, "%.1e", verdict->error);
    }
    if (verdict->failed < options->batch) {
        table_set(t, 4, "%.1e", verdict->residual);
    }
    table_set(t, 5, "%.2f", row->time.median_ms);
    table_set(t, 6, "%.2f x", rows[1].time.least_ms / row->time.least_ms);
    if (verdict->failed > 0) {
        table_set(t, 7, "%lld failed: %s", (long long)verdict->failed, root_report_text(verdict->reason));
    }
}

static void print_table(const demo_options *options, const demo_row *rows)
{
    static table t; /* too large for the stack of a small thread */
    table_start(&t, "method|<used|<type|error|residual|ms|speed|<");
    for (int i = options->wide; i < ROWS; i++) {
        print_row(&t, options, rows, &rows[i]);
    }
    table_print(&t);
}

static void print_heading(const workplace *place, const demo_options *options)
{
    char line[192];
    output_heading("A^(-1/%lld) of %lld matrices %lld x %lld, condition number %.0e", (long long)options->root,
                   (long long)options->batch, (long long)options->n, (long long)options->n, options->condition);
    printf("on %s\n\n", machine_context_line(place->device, line));
}

static void print_explanation(const demo_options *options)
{
    printf(
        "\nerror     largest of the batch, relative Frobenius norm, against %s\n"
        "          matrices, which are singular until damped by %.0e of their largest eigenvalue.\n"
        "residual  largest |X^%lld A X^%lld - I| / sqrt(n), A damped: the certificate every result comes with, found\n"
        "          without knowing the answer; speed is against eigen in %s.\n",
        options->wide ? "the known root of the" : "the float64 root of the same float32", 1.0 / options->condition,
        (long long)(options->root - options->root / 2), (long long)(options->root / 2), options->type);
}

static int check_free(tch_context *context, const char *place, double needed)
{
    tch_memory_info memory = TCH_MEMORY_INFO_INIT;
    if (tch_memory_get_info(context, &memory)) {
        return output_fail_library("demo");
    }
    if (needed <= (double)memory.free) {
        return CLI_OK;
    }
    char need[32], available[32];
    return output_fail("demo", "this takes about %s and %s has %s free: choose a smaller --n or --batch",
                       output_bytes(needed, need), place, output_bytes((double)memory.free, available));
}

/* An absurd size is refused by the library. A size that is only too large for this machine is refused here, because
 * the system may promise more memory than it has and end the process when it is touched. */
static int check_memory(const workplace *place, const demo_options *options)
{
    tch_tensor *largest = NULL;
    if (workplace_matrices(place->device, TCH_FLOAT64, options->batch, options->n, options->n, &largest)) {
        return output_fail_library("demo");
    }
    tch_tensor_destroy(largest);
    double batch = (double)options->batch, n = (double)options->n;
    if (tch_memory_trim(place->device, 0)) {
        return output_fail_library("demo");
    }
    int result = check_free(place->device, "the device", (48.0 * batch + 64.0) * n * n);
    /* A reference and a result in float64, and what one matrix is made from. */
    return result ? result : check_free(place->host, "this machine", (16.0 * batch + 32.0) * n * n);
}

static int run_demo(const demo_options *options)
{
    workplace place;
    if (workplace_open(options->device, &place)) {
        return output_fail_library("demo");
    }
    int result = check_memory(&place, options);
    if (result == CLI_OK) {
        demo_row rows[ROWS];
        print_heading(&place, options);
        fflush(stdout);
        if (run_rows(&place, options, rows)) {
            result = output_fail_library("demo");
        } else {
            print_table(options, rows);
            print_explanation(options);
        }
    }
    workplace_close(&place);
    return result;
}

int command_demo(int argc, char **argv)
{
    demo_options options = {
        .n = 256, .batch = 16, .root = 4, .seed = 1, .condition = 1e6, .device = "auto", .type = "float32"};
    const option_spec specs[] = {
        {"--n", "N", OPTION_INTEGER, &options.n, 1, 0x1p62, "size of the matrices (256)"},
        {"--batch", "B", OPTION_INTEGER, &options.batch, 1, 0x1p62, "how many of them (16)"},
        {"--condition", "K", OPTION_REAL, &options.condition, 10, 1e14, "condition number after damping (1e6)"},
        {"--root", "P", OPTION_INTEGER, &options.root, 1, 8, "which root: 1, 2, 3, 4, 6 or 8 (4)"},
        {"--type", "T", OPTION_TEXT, &options.type, 0, 0, "float32 or float64 (float32)"},
        {"--seed", "S", OPTION_INTEGER, &options.seed, 0, 0x1p62, "random seed (1)"},
        {"--device", "D", OPTION_TEXT, &options.device, 0, 0, "auto, cpu, cuda or cuda:N (auto)"},
    };
    const option_table table = {"demo",
                                "Computes the inverse root A^(-1/P) of a batch of random ill-conditioned symmetric\n"
                                "matrices by every method, and shows error, residual and time of each.",
                                specs, sizeof specs / sizeof specs[0]};
    options_result result = options_read(&table, argc, argv);
    if (result != OPTIONS_GO) {
        return result == OPTIONS_HELPED ? CLI_OK : CLI_USAGE;
    }
    if (options.root == 5 || options.root == 7) {
        return output_usage("demo", "--root takes 1, 2, 3, 4, 6 or 8, not %lld", (long long)options.root);
    }
    options.wide = strcmp(options.type, "float64") == 0;
    if (!options.wide && strcmp(options.type, "float32") != 0) {
        return output_usage("demo", "--type takes float32 or float64, not '%s'", options.type);
    }
    return run_demo(&options);
}

/* `torchium bench`: measures the limits of the machine, then every case, then the accuracy table. A case that fails is
 * a row that says so; the others are still measured, and the command then exits with 1. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "measure/machine.h"
#include "terminal/options.h"
#include "terminal/output.h"
#include "terminal/progress.h"

typedef struct bench_options {
    bool json, quick, list;
    const char *device;
    const char *only;
    double seconds;
} bench_options;

/* The accuracy table's own name for --only and --list. */
static const char accuracy_name[] = "accuracy";
static const double conditions[] = {1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8};
static const int32_t accuracy_roots[] = {2, 4};
enum { CONDITIONS = sizeof conditions / sizeof conditions[0] };

/* A device without arithmetic for bfloat16 widens it, and may be no faster than that. */
static double product_limit(const bench_limits *limits, tch_dtype dtype)
{
    if (tch_dtype_equal(dtype, TCH_FLOAT64)) {
        return limits->flops_f64;
    }
    return tch_dtype_equal(dtype, TCH_BFLOAT16) ? fmax(limits->flops_bf16, limits->flops_f32) : limits->flops_f32;
}

static void count_work(const bench_results *results, bench_row *row)
{
    const bench_case *c = row->c;
    const bench_operation *operation = c->operation;
    double seconds = 1e-3 * row->time.least_ms, batch = (double)c->batch;
    double peak = product_limit(&results->limits, c->dtype);
    if (operation->flops != NULL) {
        row->rate = operation->flops(c) / seconds;
        row->share = row->rate / peak;
    } else if (operation->bytes != NULL) {
        row->rate = operation->bytes(c) / seconds;
        row->share = row->rate / results->limits.copy_bytes;
    } else if (c->m == c->n && c->n == c->k) {
        row->products = seconds * peak / (2.0 * batch * (double)c->n * (double)c->n * (double)c->n);
    }
}

static tch_status judge(const workplace *place, const bench_data *data, bench_row *row)
{
    bool good = true;
    if (row->c->damping > 0.0) {
        tch_status status = tch_inverse_root_plan(place->device, row->c->dtype, row->c->batch, row->c->n,
                                                  data->trial.root, &data->trial.config, &row->used, NULL);
        return status ? status : root_trial_judge(place, &data->trial, NULL, &row->verdict);
    }
    tch_status status = bench_check(place, data, &good);
    if (status == TCH_OK && !good) {
        row->status = TCH_ERR_NUMERIC;
        snprintf(row->failure, sizeof row->failure, "the output was not written completely, or is not finite");
    }
    return status;
}

static void measure_case(const workplace *place, const bench_results *results, const bench_case *c, bench_row *row)
{
    bench_data data;
    *row = (bench_row){
        .c = c, .verdict = ROOT_VERDICT_NONE, .rate = (double)NAN, .share = (double)NAN, .products = (double)NAN};
    row->status = bench_prepare(place, c, &data);
    if (row->status == TCH_OK) {
        row->status = timing_measure(place->device, c->operation->run, &data, results->seconds, &row->time);
        if (row->status == TCH_OK) {
            count_work(results, row);
        }
        tch_status status = row->status == TCH_OK ? judge(place, &data, row) : row->status;
        row->status = status ? status : row->status;
        bench_release(&data);
    }
    if (row->status != TCH_OK && row->failure[0] == '\0') {
        snprintf(row->failure, sizeof row->failure, "%s", tch_last_error());
    }
}

/* Seconds a case is expected to take: its timing, and its runs where they are long. */
static double expected_seconds(const bench_results *results, const bench_case *c)
{
    double n = (double)(c->n > c->m ? c->n : c->m);
    double once = c->operation->products * 2.0 * n * n * n * (double)c->batch / results->limits.flops_f32;
    double runs = once > results->seconds ? 4.0 * once : 2.0 * once + results->seconds;
    return 0.02 + (runs < 10.0 * results->seconds ? runs : 10.0 * results->seconds);
}

/* Seconds per condition number of the accuracy table, as measured on two cores. */
static const double expected_accuracy = 0.5;

/* Measures every case; in text mode each operation's table is printed once its last case is done. */
static int measure_cases(const workplace *place, bool text, progress *p, bench_results *results)
{
    int failed = 0, first = 0;
    for (int i = 0; i < results->case_count; i++) {
        const bench_case *c = &results->cases[i];
        progress_show(p, c->name);
        measure_case(place, results, c, &results->rows[i]);
        tch_status status = results->rows[i].status;
        failed += status != TCH_OK && status != TCH_ERR_UNSUPPORTED;
        results->row_count = i + 1;
        progress_advance(p, expected_seconds(results, c));
        if (i + 1 == results->case_count || results->cases[i + 1].operation != c->operation) {
            progress_clear(p);
            if (text) {
                bench_text_rows(results, first, i + 1);
            }
            first = i + 1;
        }
    }
    return failed;
}

static tch_status measure_accuracy(const workplace *place, progress *p, bench_results *results)
{
    tch_status status = TCH_OK;
    for (size_t r = 0; r < sizeof accuracy_roots / sizeof accuracy_roots[0]; r++) {
        for (int i = 0; i < CONDITIONS && status == TCH_OK; i++) {
            progress_show(p, accuracy_name);
            status = bench_accuracy_measure(place, accuracy_roots[r], conditions[i], results);
            progress_advance(p, expected_accuracy);
        }
    }
    progress_clear(p);
    return status;
}

static bool wants_accuracy(const bench_options *options)
{
    return options->only == NULL || strstr(accuracy_name, options->only) != NULL;
}

static progress start_progress(const bench_options *options, const bench_results *results)
{
    double total = 0.0;
    for (int i = 0; i < results->case_count; i++) {
        total += expected_seconds(results, &results->cases[i]);
    }
    if (wants_accuracy(options)) {
        total += 2.0 * CONDITIONS * expected_accuracy;
    }
    return progress_start(total);
}

static int run_all(const bench_options *options, const workplace *place, bench_results *results)
{
    progress early = progress_start(0.0);
    progress_show(&early, "limits of this machine");
    tch_status status = bench_limits_measure(place, 4.0 * options->seconds, results);
    progress_clear(&early);
    if (status != TCH_OK) {
        return output_fail_library("bench");
    }
    if (!options->json) {
        char line[192];
        printf("Torchium %s on %s\n\n", tch_version(), machine_context_line(place->device, line));
        bench_text_limits(results);
    }
    progress p = start_progress(options, results);
    int failed = measure_cases(place, !options->json, &p, results);
    if (wants_accuracy(options) && measure_accuracy(place, &p, results)) {
        return output_fail_library("bench");
    }
    if (options->json) {
        bench_json(results, place);
    } else {
        bench_text_scaling(results);
        bench_text_accuracy(results);
    }
    return failed == 0 ? CLI_OK : output_fail("bench", "%d of %d cases failed", failed, results->case_count);
}

static int list_cases(const bench_options *options, const bench_results *results)
{
    for (int i = 0; i < results->case_count; i++) {
        puts(results->cases[i].name);
    }
    if (wants_accuracy(options)) {
        puts(accuracy_name);
    }
    return CLI_OK;
}

static int run_bench(const bench_options *options, bench_results *results)
{
    workplace place;
    tch_device device;
    if (tch_device_parse(options->device, &device)) {
        return output_fail_library("bench");
    }
    machine_facts_get(&results->machine);
    results->large = device.type != TCH_DEVICE_CPU;
    results->quick = options->quick;
    results->seconds = options->seconds;
    bench_cases_fill(results, options->only);
    if (results->case_count == 0 && !wants_accuracy(options)) {
        return output_usage("bench", "no case has '%s' in its name; 'torchium bench --list' shows them%s",
                            options->only, options->quick ? ", with --quick those of the short run" : "");
    }
    if (options->list) {
        return list_cases(options, results);
    }
    if (workplace_open(options->device, &place)) {
        return output_fail_library("bench");
    }
    int result = run_all(options, &place, results);
    workplace_close(&place);
    return result;
}

int command_bench(int argc, char **argv)
{
    bench_options options = {.device = "auto", .seconds = 0.0};
    const option_spec specs[] = {
        {"--json", NULL, OPTION_FLAG, &options.json, 0, 0, "one JSON document instead of tables"},
        {"--quick", NULL, OPTION_FLAG, &options.quick, 0, 0, "fewer and smaller cases, less time for each"},
        {"--device", "D", OPTION_TEXT, &options.device, 0, 0, "auto, cpu, cuda or cuda:N (auto)"},
        {"--only", "NAME", OPTION_TEXT, &options.only, 0, 0, "only cases with NAME in their name, or 'accuracy'"},
        {"--seconds", "S", OPTION_REAL, &options.seconds, 0.001, 600, "time spent on each case (0.5, quick 0.1)"},
        {"--list", NULL, OPTION_FLAG, &options.list, 0, 0, "names of the cases, without running them"},
    };
    const option_table table = {
        "bench",
        "Times the operations at named sizes. The limits of the machine are measured first, in the same run; each row\n"
        "shows the fraction of the limit that it reached, or its time in matrix products. Then come the growth of the\n"
        "cost with n and with the batch, and the error of each inverse root over condition numbers. Times are medians\n"
        "with the minimum beside them; rates and ratios use the minimum, which other load disturbs less. On a GPU\n"
        "larger sizes are measured too.",
        specs, sizeof specs / sizeof specs[0]};
    options_result result = options_read(&table, argc, argv);
    if (result != OPTIONS_GO) {
        return result == OPTIONS_HELPED ? CLI_OK : CLI_USAGE;
    }
    if (options.seconds == 0.0) {
        options.seconds = options.quick ? 0.1 : 0.5;
    }
    bench_results *results = calloc(1, sizeof *results);
    if (results == NULL) {
        return output_fail("bench", "out of memory");
    }
    int status = run_bench(&options, results);
    free(results);
    return status;
}

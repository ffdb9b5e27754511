/* `torchium bench`: measures the limits of the machine, then every case, with a table for each operation. A failed case
 * is a row with its error; the others are still measured, and the command exits with 1. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "terminal/options.h"
#include "terminal/output.h"
#include "terminal/progress.h"
#include "text/table.h"

typedef struct bench {
    bool quick, list;
    const char *device, *only;
    double seconds; /* for each case */
    bool large;     /* on a GPU: larger sizes are measured too */
    bench_contexts contexts;
    double flops_f32, flops_f64, flops_bf16; /* per second, of one large product */
    double copy_bytes;                       /* per second, read plus written */
    progress bar;
    int matched, failed;
    double eigen_ms; /* minimum time of the eigendecomposition at this size, or NaN */
} bench;

/* Shared machines preempt some runs for milliseconds: tables show the median, ratios between rows use the minimum. */
typedef struct timing {
    double median_ms, least_ms;
} timing;

typedef struct bench_row {
    timing time;
    tch_root_method used;  /* inverse roots only */
    bench_verdict verdict; /* inverse roots only */
} bench_row;

static const double dampings[] = {1e-6, 1e-4};
static const tch_root_method methods[] = {TCH_ROOT_EIGEN, TCH_ROOT_NEWTON, TCH_ROOT_RATIONAL, TCH_ROOT_AUTO};

static table t; /* one at a time; too large for the stack of a small thread */

/* --- timing ------------------------------------------------------------------------------------------------------ */

enum { MOST_RUNS = 2000, FEWEST_RUNS = 3, PATIENCE = 6 };

typedef tch_status (*timed_call)(tch_context *context, const void *data);

static tch_status time_once(tch_context *context, timed_call call, const void *data, double *seconds)
{
    double start = progress_clock();
    CLI_TRY(call(context, data));
    CLI_TRY(tch_context_synchronize(context));
    *seconds = progress_clock() - start;
    return TCH_OK;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Runs the call once to warm up, then for about `seconds` and at least three times; a call that takes several times
 * `seconds` is run fewer times. */
static tch_status time_call(tch_context *context, timed_call call, const void *data, double seconds, timing *result)
{
    double samples[MOST_RUNS], spent = 0.0;
    int32_t runs = 0;
    CLI_TRY(time_once(context, call, data, &samples[0]));
    /* A call this long has no warm-up cost: it is the first sample. */
    if (samples[0] > seconds) {
        spent = samples[runs++];
    }
    while (runs < MOST_RUNS && spent <= PATIENCE * seconds && (runs < FEWEST_RUNS || spent <= seconds)) {
        CLI_TRY(time_once(context, call, data, &samples[runs]));
        spent += samples[runs++];
    }
    qsort(samples, (size_t)runs, sizeof samples[0], compare_doubles);
    result->median_ms = 1e3 * 0.5 * (samples[(runs - 1) / 2] + samples[runs / 2]);
    result->least_ms = 1e3 * samples[0];
    return TCH_OK;
}

static tch_status call_operation(tch_context *context, const void *data)
{
    return bench_run(context, data);
}

/* --- limits ------------------------------------------------------------------------------------------------------ */

/* Peak rates are measured, since shared machines do not reach published ones: a large product for arithmetic, and
 * copies of memory well beyond the caches for bandwidth. */
static tch_status measure_product(bench *b, int bits, double *flops)
{
    bench_data data;
    timing time;
    const bench_list list = {"matmul", bits, NULL};
    const char *size = b->large ? (b->quick ? "4096" : "8192") : b->quick ? "1024" : "2048";
    const bench_case c = bench_case_of(&list, size, TCH_ROOT_AUTO, 0.0);
    CLI_TRY(bench_prepare(&b->contexts, &c, &data));
    tch_status status = time_call(b->contexts.device, call_operation, &data, 4.0 * b->seconds, &time);
    bench_release(&data);
    *flops = status ? 0.0 : bench_flops(&c) / (1e-3 * time.least_ms);
    return status;
}

static tch_status call_copy(tch_context *context, const void *data)
{
    tch_tensor *const *tensors = data;
    return tch_tensor_copy(context, tensors[1], tensors[0]);
}

static tch_status measure_copy(bench *b)
{
    const int64_t shape[] = {b->large ? 32768 : 8192, 8192};
    tch_tensor *tensors[2] = {NULL, NULL};
    timing time;
    tch_status status = tch_tensor_create(b->contexts.device, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &tensors[0]);
    if (status == TCH_OK &&
        (status = tch_tensor_create(b->contexts.device, TCH_FLOAT32, 2, shape, TCH_CONTIGUOUS, &tensors[1])) ==
            TCH_OK &&
        (status = tch_tensor_fill(b->contexts.device, tensors[0], 1.25)) == TCH_OK &&
        (status = time_call(b->contexts.device, call_copy, tensors, 4.0 * b->seconds, &time)) == TCH_OK) {
        b->copy_bytes = 8.0 * (double)(shape[0] * shape[1]) / (1e-3 * time.least_ms);
    }
    tch_tensor_destroy(tensors[0]);
    tch_tensor_destroy(tensors[1]);
    return status;
}

static tch_status measure_limits(bench *b)
{
    CLI_TRY(measure_product(b, 32, &b->flops_f32));
    CLI_TRY(measure_product(b, 64, &b->flops_f64));
    CLI_TRY(measure_product(b, 16, &b->flops_bf16));
    CLI_TRY(measure_copy(b));
    return tch_memory_trim(b->contexts.device, 0); /* gigabytes; no case needs it */
}

static void print_limits(const bench *b)
{
    char line[192];
    printf("Torchium %s on %s\n\n", tch_version(), output_device(b->contexts.device, line));
    output_heading("Limits measured now");
    printf("  product float32  %8.1f GFLOP/s\n", 1e-9 * b->flops_f32);
    printf("  product float64  %8.1f GFLOP/s\n", 1e-9 * b->flops_f64);
    printf("  product bfloat16 %8.1f GFLOP/s\n", 1e-9 * b->flops_bf16);
    printf("  copy             %8.1f GB/s, read and written\n", 1e-9 * b->copy_bytes);
    fflush(stdout);
}

/* Without bfloat16 arithmetic a device widens, and may be no faster than float32. */
static double product_limit(const bench *b, int bits)
{
    return bits == 64 ? b->flops_f64 : bits == 16 ? fmax(b->flops_bf16, b->flops_f32) : b->flops_f32;
}

/* --- a case ------------------------------------------------------------------------------------------------------ */

static tch_status measure_case(const bench *b, const bench_case *c, bench_row *row, const char **problem)
{
    bench_data data;
    CLI_TRY(bench_prepare(&b->contexts, c, &data));
    tch_status status = time_call(b->contexts.device, call_operation, &data, b->seconds, &row->time);
    if (status == TCH_OK && c->damping > 0.0) {
        const tch_root_config config = bench_root_config(c);
        status =
            tch_inverse_root_plan(b->contexts.device, c->dtype, c->batch, c->n, BENCH_ROOT, &config, &row->used, NULL);
    }
    if (status == TCH_OK) {
        status = bench_judge(&b->contexts, &data, &row->verdict);
        *problem = status == TCH_ERR_NUMERIC ? "the output was not written completely, or is not finite" : NULL;
    }
    bench_release(&data);
    return status;
}

static void set_time(int column, double ms)
{
    table_set(&t, column, ms < 1.0 ? "%.4f" : ms < 100.0 ? "%.2f" : "%.1f", ms);
}

static void set_work(const bench *b, const bench_case *c, double seconds)
{
    double peak = product_limit(b, c->dtype.bits);
    double flops = bench_flops(c), bytes = bench_bytes(c);
    if (flops > 0.0) {
        double rate = flops / seconds;
        table_set(&t, 4, "%.1f GFLOP/s", 1e-9 * rate);
        table_set(&t, 5, "%.0f %%", 100.0 * rate / peak);
    } else if (bytes > 0.0) {
        double rate = bytes / seconds;
        table_set(&t, 4, "%.1f GB/s", 1e-9 * rate);
        table_set(&t, 5, "%.0f %%", 100.0 * rate / b->copy_bytes);
    } else if (c->m == c->n && c->n == c->k) {
        double n = (double)c->n, products = seconds * peak / (2.0 * (double)c->batch * n * n * n);
        table_set(&t, 6, products < 100.0 ? "%.1f" : "%.0f", products);
    }
}

static void set_root(const bench *b, const bench_case *c, const bench_row *row)
{
    if (c->method == TCH_ROOT_AUTO) {
        table_set(&t, 1, "%s: %s", tch_root_method_name(c->method), tch_root_method_name(row->used));
    }
    if (!isnan(b->eigen_ms)) {
        table_set(&t, 7, "%.2f x", b->eigen_ms / row->time.least_ms);
    }
    if (row->verdict.failed < c->batch) {
        table_set(&t, 8, "%.1e", row->verdict.residual);
    }
    if (row->verdict.failed > 0) {
        static const char *const reports[] = {"ok", "not finite", "not symmetric", "not positive", "no convergence"};
        bool known = (unsigned)row->verdict.reason < sizeof reports / sizeof reports[0];
        table_set(&t, 9, "%lld failed: %s", (long long)row->verdict.failed,
                  known ? reports[row->verdict.reason] : "unknown report");
    }
}

static void run_case(bench *b, const bench_case *c)
{
    bench_row row = {.used = TCH_ROOT_AUTO};
    const char *problem = NULL;
    progress_show(&b->bar, c->name);
    tch_status status = measure_case(b, c, &row, &problem);
    progress_advance(&b->bar, 1.0);
    table_row(&t);
    table_set(&t, 0, "%s", c->size);
    if (c->damping > 0.0) {
        table_set(&t, 1, "%s", tch_root_method_name(c->method));
    }
    if (status == TCH_ERR_UNSUPPORTED) {
        table_set(&t, 9, "not offered");
    } else if (status != TCH_OK) {
        progress_clear(&b->bar);
        output_warn("bench", "%s: %s", c->name, problem != NULL ? problem : tch_last_error());
        table_set(&t, 9, "failed");
        b->failed++;
    } else {
        b->eigen_ms = c->damping > 0.0 && c->method == TCH_ROOT_EIGEN ? row.time.least_ms : b->eigen_ms;
        set_time(2, row.time.median_ms);
        set_time(3, row.time.least_ms);
        set_work(b, c, 1e-3 * row.time.least_ms);
        if (c->damping > 0.0) {
            set_root(b, c, &row);
        }
    }
}

static void count_case(bench *b, const bench_case *c)
{
    (void)c;
    b->matched++;
}

static void list_case(bench *b, const bench_case *c)
{
    (void)b;
    puts(c->name);
}

/* --- all of them ------------------------------------------------------------------------------------------------- */

static void print_rows(bench *b, const bench_list *list, double damping)
{
    const bench_case c = bench_case_of(list, list->sizes, TCH_ROOT_AUTO, damping);
    char text[64] = "";
    if (damping > 0.0) {
        snprintf(text, sizeof text, ", damping %.0e of the largest eigenvalue", damping);
    }
    progress_clear(&b->bar);
    puts("");
    output_heading("%s: %s, %s%s", c.operation->name, c.operation->formula, tch_dtype_name(c.dtype), text);
    table_print(&t);
    fflush(stdout);
}

static void visit_size(bench *b, const bench_list *list, const char *size, double damping,
                       void (*visit)(bench *, const bench_case *))
{
    char mark = size[strcspn(size, "*+ ")];
    int count = damping > 0.0 ? (int)(sizeof methods / sizeof methods[0]) : 1;
    b->eigen_ms = (double)NAN;
    for (int i = 0; i < count && (b->quick ? mark == '*' : b->large || mark != '+'); i++) {
        const bench_case c = bench_case_of(list, size, damping > 0.0 ? methods[i] : TCH_ROOT_AUTO, damping);
        if (b->only == NULL || strstr(c.name, b->only) != NULL) {
            visit(b, &c);
        }
    }
}

/* Every case with --only in its name. */
static void visit_cases(bench *b, void (*visit)(bench *, const bench_case *))
{
    for (int i = 0; i < bench_list_count; i++) {
        const bench_list *list = &bench_lists[i];
        bool roots = strcmp(list->operation, "inverse_root") == 0;
        for (int j = 0; j < (roots ? 2 : 1); j++) {
            double damping = roots ? dampings[j] : 0.0;
            table_start(&t, "size|<method|ms|least|rate|of limit|products|to eigen|residual|<");
            for (const char *size = list->sizes; *size != '\0'; size += strspn(size, " ")) {
                visit_size(b, list, size, damping, visit);
                size += strcspn(size, " ");
            }
            if (t.rows > 0) {
                print_rows(b, list, damping);
            }
        }
    }
}

static int run_bench(bench *b)
{
    b->bar = progress_start(0.0);
    progress_show(&b->bar, "limits of this machine");
    tch_status status = measure_limits(b);
    progress_clear(&b->bar);
    if (status != TCH_OK) {
        return output_fail_library("bench");
    }
    print_limits(b);
    b->bar = progress_start(b->matched);
    visit_cases(b, run_case);
    return b->failed == 0 ? CLI_OK : output_fail("bench", "%d of %d cases failed", b->failed, b->matched);
}

int command_bench(int argc, char **argv)
{
    tch_device device;
    bench b = {.device = "auto", .seconds = 0.0};
    const option_spec specs[] = {
        {"--quick", NULL, OPTION_FLAG, &b.quick, 0, 0, "fewer and smaller cases, less time for each"},
        {"--device", "D", OPTION_TEXT, &b.device, 0, 0, "auto, cpu, cuda or cuda:N (auto)"},
        {"--only", "NAME", OPTION_TEXT, &b.only, 0, 0, "only cases with NAME in their name"},
        {"--seconds", "S", OPTION_REAL, &b.seconds, 0.001, 600, "time spent on each case (0.5, quick 0.1)"},
        {"--list", NULL, OPTION_FLAG, &b.list, 0, 0, "names of the cases, without running them"},
    };
    const option_table table = {
        "bench",
        "Times the operations at named sizes. The limits of the machine are measured first, in the same run; each row\n"
        "shows the fraction of the limit that it reached, or its time in matrix products. Times are medians and\n"
        "minima; rates and ratios use the minimum, which other load disturbs less. On a GPU larger sizes are measured\n"
        "too.",
        specs, sizeof specs / sizeof specs[0]};
    options_result result = options_read(&table, argc, argv);
    if (result != OPTIONS_GO) {
        return result == OPTIONS_HELPED ? CLI_OK : CLI_USAGE;
    }
    if (tch_device_parse(b.device, &device)) {
        return output_fail_library("bench");
    }
    b.large = device.type != TCH_DEVICE_CPU;
    b.seconds = b.seconds > 0.0 ? b.seconds : b.quick ? 0.1 : 0.5;
    visit_cases(&b, b.list ? list_case : count_case);
    if (b.list) {
        return CLI_OK;
    }
    if (b.matched == 0) {
        return output_usage("bench", "no case has '%s' in its name; 'torchium bench --list' shows them%s", b.only,
                            b.quick ? ", with --quick those of the short run" : "");
    }
    bool opened = tch_context_create(b.device, &b.contexts.device) == TCH_OK &&
                  tch_context_create("cpu", &b.contexts.host) == TCH_OK;
    int status = opened ? run_bench(&b) : output_fail_library("bench");
    tch_context_destroy(b.contexts.device);
    tch_context_destroy(b.contexts.host);
    return status;
}

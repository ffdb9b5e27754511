/* The benchmark's results for people: a table per operation, how cost grows, and the errors. Tables are printed as soon
 * as their operation is done. */
#include "bench.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "terminal/output.h"
#include "text/table.h"

static table t; /* one at a time, and too large for the stack of a small thread */

void bench_text_limits(const bench_results *results)
{
    const bench_limits *limits = &results->limits;
    output_heading("Limits measured now");
    printf("  product float32  %8.1f GFLOP/s\n", 1e-9 * limits->flops_f32);
    printf("  product float64  %8.1f GFLOP/s\n", 1e-9 * limits->flops_f64);
    printf("  product bfloat16 %8.1f GFLOP/s\n", 1e-9 * limits->flops_bf16);
    printf("  copy             %8.1f GB/s, read and written\n", 1e-9 * limits->copy_bytes);
    if (!isnan(results->machine.load)) {
        printf("  load             %8.1f before the start; where other programs run, times are disturbed\n",
               results->machine.load);
    }
    fflush(stdout);
}

static void set_time(int column, double ms)
{
    table_set(&t, column, ms < 1.0 ? "%.4f" : ms < 100.0 ? "%.2f" : "%.1f", ms);
}

static void set_root_columns(const bench_results *results, const bench_row *row)
{
    const bench_row *eigen = bench_eigen_row(results, row);
    const char *method = tch_root_method_name(row->c->method);
    if (row->c->method == TCH_ROOT_AUTO) {
        table_set(&t, 1, "%s: %s", method, tch_root_method_name(row->used));
    } else {
        table_set(&t, 1, "%s", method);
    }
    if (eigen != NULL && eigen->status == TCH_OK) {
        table_set(&t, 7, "%.2f x", eigen->time.least_ms / row->time.least_ms);
    }
    if (row->verdict.failed < row->c->batch) {
        table_set(&t, 8, "%.1e", row->verdict.residual);
    }
    if (row->verdict.failed > 0) {
        table_set(&t, 9, "%lld failed: %s", (long long)row->verdict.failed, root_report_text(row->verdict.reason));
    }
}

static void set_row(const bench_results *results, const bench_row *row)
{
    table_row(&t);
    table_set(&t, 0, "%s", row->c->size);
    if (row->status != TCH_OK) {
        table_set(&t, 9, row->status == TCH_ERR_UNSUPPORTED ? "not offered" : "failed");
        return;
    }
    set_time(2, row->time.median_ms);
    set_time(3, row->time.least_ms);
    if (!isnan(row->rate)) {
        table_set(&t, 4, "%.1f %s", 1e-9 * row->rate, row->c->operation->bytes ? "GB/s" : "GFLOP/s");
    }
    if (!isnan(row->share)) {
        table_set(&t, 5, "%.0f %%", 100.0 * row->share);
    }
    if (!isnan(row->products)) {
        table_set(&t, 6, row->products < 100.0 ? "%.1f" : "%.0f", row->products);
    }
    if (row->c->damping > 0.0) {
        set_root_columns(results, row);
    }
}

static bool same_table(const bench_case *a, const bench_case *b)
{
    return a->operation == b->operation && tch_dtype_equal(a->dtype, b->dtype) && a->damping == b->damping;
}

/* The messages of the rows that failed, in full. */
static void print_failures(const bench_results *results, int first, int end)
{
    for (int i = first; i < end; i++) {
        const bench_row *row = &results->rows[i];
        if (row->status != TCH_OK) {
            printf("  %s: %s\n", row->c->name, row->failure);
        }
    }
}

void bench_text_rows(const bench_results *results, int first, int end)
{
    for (int i = first; i < end; i++) {
        const bench_case *c = results->rows[i].c;
        if (i == first || !same_table(c, results->rows[i - 1].c)) {
            puts("");
            if (c->damping > 0.0) {
                output_heading("%s: %s, %s, damping %.0e of the largest eigenvalue", c->operation->name,
                               c->operation->formula, tch_dtype_name(c->dtype), c->damping);
            } else {
                output_heading("%s: %s, %s", c->operation->name, c->operation->formula, tch_dtype_name(c->dtype));
            }
            table_start(&t, "size|<method|ms|least|rate|of limit|products|to eigen|residual|<");
        }
        set_row(results, &results->rows[i]);
        if (i + 1 == end || !same_table(c, results->rows[i + 1].c)) {
            table_print(&t);
        }
    }
    print_failures(results, first, end);
    fflush(stdout);
}

/* Column titles of the series that have a row anywhere. */
static void start_scaling(const char *first)
{
    char header[256];
    size_t used = (size_t)snprintf(header, sizeof header, "%s", first);
    for (int j = 0; j < bench_series_count; j++) {
        used += (size_t)snprintf(header + used, sizeof header - used, "|%s|<", bench_all_series[j].title);
    }
    table_start(&t, header);
}

/* One line: the times of every series at this size, each with its growth since the size before. */
static bool set_scaling(const bench_results *results, int64_t batch, int64_t n, int64_t before_batch, int64_t before_n)
{
    bool any = false;
    for (int j = 0; j < bench_series_count; j++) {
        const bench_row *row = bench_series_row(results, &bench_all_series[j], batch, n);
        const bench_row *before = bench_series_row(results, &bench_all_series[j], before_batch, before_n);
        if (row == NULL) {
            continue;
        }
        if (!any) {
            table_row(&t);
        }
        any = true;
        set_time(2 * j + 1, row->time.least_ms);
        if (before != NULL) {
            table_set(&t, 2 * j + 2, "(%.1f x)", row->time.least_ms / before->time.least_ms);
        }
    }
    return any;
}

static void print_over_n(const bench_results *results)
{
    start_scaling("n");
    for (int64_t n = 32; n <= BENCH_SERIES_MOST_N; n *= 2) {
        if (set_scaling(results, 1, n, 1, n / 2)) {
            table_set(&t, 0, "%lld", (long long)n);
        }
    }
    if (t.rows < 2) {
        return;
    }
    puts("");
    output_heading("Cost over n: least ms of one float32 matrix, and its growth when n doubles (8 x is the work's)");
    table_print(&t);
}

static void print_over_batch(const bench_results *results)
{
    int64_t before = 0;
    start_scaling("batch");
    for (int64_t batch = 1; batch <= BENCH_SERIES_MOST_BATCH; batch *= 4) {
        if (set_scaling(results, batch, BENCH_SERIES_N, before, BENCH_SERIES_N)) {
            table_set(&t, 0, "%lld", (long long)batch);
            before = batch;
        }
    }
    if (t.rows < 2) {
        return;
    }
    puts("");
    output_heading(
        "Cost over the batch: least ms of a batch of %d x %d float32 matrices, and its growth from the line above",
        BENCH_SERIES_N, BENCH_SERIES_N);
    table_print(&t);
}

void bench_text_scaling(const bench_results *results)
{
    print_over_n(results);
    print_over_batch(results);
    fflush(stdout);
}

static void set_accuracy(int column, const bench_accuracy_row *row)
{
    if (!row->offered) {
        table_set(&t, column, "not offered");
    } else if (row->verdict.failed == 0) {
        table_set(&t, column, "%.1e", row->verdict.error);
    } else {
        table_set(&t, column, "%s", root_report_text(row->verdict.reason));
    }
}

static void print_accuracy_of(const bench_results *results, int32_t root)
{
    double condition = 0.0;
    table_start(&t, "condition|f32 eigen|f32 newton|f32 rational|f64 eigen|f64 newton|f64 rational");
    for (int i = 0; i < results->accuracy_count; i++) {
        const bench_accuracy_row *row = &results->accuracy[i];
        if (row->root != root) {
            continue;
        }
        if (row->condition != condition) {
            table_row(&t);
            table_set(&t, 0, "%.0e", row->condition);
            condition = row->condition;
        }
        set_accuracy((tch_dtype_equal(row->dtype, TCH_FLOAT64) ? 3 : 0) + (int)row->method, row);
    }
    if (t.rows == 0) {
        return;
    }
    puts("");
    output_heading("Accuracy of A^(-1/%d): largest relative error of %d matrices %d x %d", (int)root,
                   BENCH_ACCURACY_BATCH, BENCH_ACCURACY_N, BENCH_ACCURACY_N);
    table_print(&t);
}

void bench_text_accuracy(const bench_results *results)
{
    print_accuracy_of(results, 2);
    print_accuracy_of(results, 4);
    if (results->accuracy_count > 0) {
        puts("  float32 against the float64 eigen root of the same float32 matrices; float64 against the root known\n"
             "  from how the matrices were made, so that what rounding the input costs is included.");
    }
    fflush(stdout);
}

/* The benchmark's results for programs: one JSON document with the machine, the limits, every row, the series and the
 * errors. Rates are in units of 1e9 per second; what does not apply is null. */
#include "bench.h"

#include <math.h>
#include <stdio.h>

#include "text/json.h"

static void write_machine(json_writer *json, const bench_results *results, const workplace *place)
{
    tch_device device = tch_context_device(place->device);
    tch_device_info info = TCH_DEVICE_INFO_INIT;
    json_object_begin(json, "machine");
    machine_json(json, &results->machine);
    json_text(json, "device_type", device.type == TCH_DEVICE_CPU ? "cpu" : "cuda");
    if (tch_device_info_get(device, &info) == TCH_OK) {
        json_object_begin(json, "device");
        machine_device_json(json, device, &info);
        json_object_end(json);
    }
    json_object_end(json);
}

static void write_limits(json_writer *json, const bench_limits *limits)
{
    json_object_begin(json, "limits");
    json_real(json, "float32_gflops", 1e-9 * limits->flops_f32);
    json_real(json, "float64_gflops", 1e-9 * limits->flops_f64);
    json_real(json, "bfloat16_gflops", 1e-9 * limits->flops_bf16);
    json_real(json, "copy_gbps", 1e-9 * limits->copy_bytes);
    json_object_end(json);
}

static void write_verdict(json_writer *json, const root_verdict *verdict)
{
    json_real(json, "residual", verdict->residual);
    json_integer(json, "failed", verdict->failed);
    json_text(json, "failed_because", verdict->failed > 0 ? root_report_text(verdict->reason) : NULL);
}

static void write_case(json_writer *json, const bench_case *c)
{
    json_text(json, "name", c->name);
    json_text(json, "operation", c->operation->name);
    json_text(json, "size", c->size);
    json_text(json, "dtype", tch_dtype_name(c->dtype));
    json_integer(json, "batch", c->batch);
    json_integer(json, "m", c->m);
    json_integer(json, "n", c->n);
    json_integer(json, "k", c->k);
}

static void write_row(json_writer *json, const bench_results *results, const bench_row *row)
{
    bool done = row->status == TCH_OK, bytes = row->c->operation->bytes != NULL;
    json_object_begin(json, NULL);
    write_case(json, row->c);
    json_text(json, "status", tch_status_name(row->status));
    json_text(json, "problem", done ? NULL : row->failure);
    json_real(json, "median_ms", done ? row->time.median_ms : (double)NAN);
    json_real(json, "least_ms", done ? row->time.least_ms : (double)NAN);
    json_integer(json, "runs", done ? row->time.runs : 0);
    json_real(json, "gflops", bytes ? (double)NAN : 1e-9 * row->rate);
    json_real(json, "gbps", bytes ? 1e-9 * row->rate : (double)NAN);
    json_real(json, "share_of_limit", row->share);
    json_real(json, "products", row->products);
    if (row->c->damping > 0.0) {
        const bench_row *eigen = bench_eigen_row(results, row);
        bool compared = done && eigen != NULL && eigen->status == TCH_OK;
        json_text(json, "method", tch_root_method_name(row->c->method));
        json_text(json, "used", tch_root_method_name(row->used));
        json_integer(json, "root", 4);
        json_real(json, "relative_damping", row->c->damping);
        json_real(json, "speed_to_eigen", compared ? eigen->time.least_ms / row->time.least_ms : (double)NAN);
        write_verdict(json, &row->verdict);
    }
    json_object_end(json);
}

static void write_point(json_writer *json, const bench_row *row, const bench_row *before)
{
    if (row == NULL) {
        return;
    }
    json_object_begin(json, NULL);
    json_integer(json, "n", row->c->n);
    json_integer(json, "batch", row->c->batch);
    json_real(json, "least_ms", row->time.least_ms);
    json_real(json, "growth", before != NULL ? row->time.least_ms / before->time.least_ms : (double)NAN);
    json_object_end(json);
}

static void write_series(json_writer *json, const bench_results *results, const bench_series *series)
{
    const bench_row *before = NULL;
    json_object_begin(json, NULL);
    json_text(json, "title", series->title);
    json_array_begin(json, "over_n");
    for (int64_t n = 32; n <= BENCH_SERIES_MOST_N; n *= 2) {
        const bench_row *row = bench_series_row(results, series, 1, n);
        write_point(json, row, before);
        before = row;
    }
    json_array_end(json);
    before = NULL;
    json_array_begin(json, "over_batch");
    for (int64_t batch = 1; batch <= BENCH_SERIES_MOST_BATCH; batch *= 4) {
        const bench_row *row = bench_series_row(results, series, batch, BENCH_SERIES_N);
        write_point(json, row, before);
        before = row;
    }
    json_array_end(json);
    json_object_end(json);
}

static void write_accuracy(json_writer *json, const bench_accuracy_row *row)
{
    json_object_begin(json, NULL);
    json_integer(json, "root", row->root);
    json_real(json, "condition", row->condition);
    json_text(json, "dtype", tch_dtype_name(row->dtype));
    json_text(json, "method", tch_root_method_name(row->method));
    json_integer(json, "batch", BENCH_ACCURACY_BATCH);
    json_integer(json, "n", BENCH_ACCURACY_N);
    json_bool(json, "offered", row->offered);
    json_real(json, "error", row->verdict.error);
    write_verdict(json, &row->verdict);
    json_object_end(json);
}

void bench_json(const bench_results *results, const workplace *place)
{
    json_writer json = json_start(stdout);
    json_object_begin(&json, NULL);
    json_text(&json, "torchium", tch_version());
    json_bool(&json, "quick", results->quick);
    json_real(&json, "seconds_per_row", results->seconds);
    write_machine(&json, results, place);
    write_limits(&json, &results->limits);
    json_array_begin(&json, "rows");
    for (int i = 0; i < results->row_count; i++) {
        write_row(&json, results, &results->rows[i]);
    }
    json_array_end(&json);
    json_array_begin(&json, "scaling");
    for (int i = 0; i < bench_series_count; i++) {
        write_series(&json, results, &bench_all_series[i]);
    }
    json_array_end(&json);
    json_array_begin(&json, "accuracy");
    for (int i = 0; i < results->accuracy_count; i++) {
        write_accuracy(&json, &results->accuracy[i]);
    }
    json_array_end(&json);
    json_object_end(&json);
}

/* Output of a training run: a progress bar on a terminal, otherwise a few lines, JSON on request, and the final table.
 * Runs are compared by the first measurement whose training loss is at most the baseline's last, so the resolution is
 * the distance between measurements. */
#include "results.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "terminal/output.h"
#include "text/json.h"
#include "text/table.h"
#include "text/text.h"

/* Lines of text per run without a terminal. */
enum { LINES = 10 };

/* Seconds between updates of the bar. */
static const double redraw = 0.1;

/* --- before ------------------------------------------------------------------------------------------------------- */

static const char *data_name(const train_plan *plan)
{
    return plan->data != NULL ? plan->data : "built-in digits";
}

/* "400-256-128-10" */
static const char *shape_text(const train_session *session, char text[TRAIN_TEXT])
{
    const train_plan *plan = &session->setup.plan;
    size_t used = (size_t)snprintf(text, TRAIN_TEXT, "%lld", (long long)session->setup.data.train.cols);
    for (int32_t i = 0; i < plan->hidden_count; i++) {
        used += (size_t)snprintf(text + used, TRAIN_TEXT - used, "-%lld", (long long)plan->widths[i]);
    }
    snprintf(text + used, TRAIN_TEXT - used, "-%lld", (long long)session->setup.data.outputs);
    return text;
}

void train_report_start(const train_session *session)
{
    const train_plan *plan = &session->setup.plan;
    const train_data *data = &session->setup.data;
    char shape[TRAIN_TEXT], device[192], shown[TEXT_SHOWN];
    if (plan->json) {
        return;
    }
    output_heading("Training %s %s (%s)", plan->autoencode ? "an autoencoder" : "a network", shape_text(session, shape),
                   plan->activation);
    printf("on %s: %lld rows to train, %lld to test, %lld %s\n", text_show(data_name(plan), shown),
           (long long)data->train.rows, (long long)data->test.rows, (long long)data->outputs,
           plan->autoencode ? "columns" : "classes");
    printf("with %s: %lld steps of %lld rows, %s rate\n", plan->optimizer, (long long)plan->steps,
           (long long)plan->batch, plan->schedule);
    printf("on %s\n\n", output_device(session->setup.context, device));
    fflush(stdout);
}

/* --- during ------------------------------------------------------------------------------------------------------- */

static void write_point(json_writer *json, const train_point *point)
{
    json_integer(json, "step", point->step);
    json_real(json, "seconds", point->seconds);
    json_real(json, "train_loss", point->train_loss);
    json_real(json, "test_loss", point->test_loss);
    json_real(json, "test_accuracy", point->test_accuracy);
}

static void point_json(const train_session *session, const train_run *run, const train_point *point)
{
    json_writer json = json_start_line(stdout);
    json_object_begin(&json, NULL);
    json_text(&json, "optimizer", run->method.name);
    json_real(&json, "lr", run->method.rate * train_plan_schedule(&session->setup.plan, point->step));
    write_point(&json, point);
    json_object_end(&json);
}

/* ", accuracy 96.62 %", or nothing for an autoencoder. */
static const char *accuracy_text(const train_point *point, char text[32])
{
    text[0] = '\0';
    if (!isnan(point->test_accuracy)) {
        snprintf(text, 32, ", accuracy %.2f %%", 100.0 * point->test_accuracy);
    }
    return text;
}

static void point_text(const train_session *session, const train_run *run, const train_point *point)
{
    const train_plan *plan = &session->setup.plan;
    int64_t before = point->step > plan->log_every ? point->step - plan->log_every : 0;
    char accuracy[32];
    bool tenth = LINES * point->step / plan->steps > LINES * before / plan->steps;
    if (tenth || point->step == plan->steps || run->diverged) {
        printf("%-8s step %lld of %lld, loss %.5f, test %.5f%s, %.1f s\n", run->method.name, (long long)point->step,
               (long long)plan->steps, point->train_loss, point->test_loss, accuracy_text(point, accuracy),
               point->seconds);
    }
}

void train_report_point(train_session *session, const train_run *run, const train_point *point)
{
    if (session->setup.plan.json) {
        point_json(session, run, point);
    } else if (!session->bar.shown) {
        point_text(session, run, point);
    }
    fflush(stdout);
}

void train_report_progress(train_session *session, const train_run *run)
{
    double now = progress_clock();
    session->bar.done += 1.0;
    if (!session->bar.shown || now - session->drawn < redraw) {
        return;
    }
    char text[TRAIN_TEXT], accuracy[32];
    const train_point *last = train_run_last(run);
    double rate = session->bar.done / (now - session->bar.started);
    size_t used = (size_t)snprintf(text, sizeof text, "%s %lld", run->method.name, (long long)run->step);
    if (last != NULL) {
        used += (size_t)snprintf(text + used, sizeof text - used, "  loss %.4f%s", last->train_loss,
                                 accuracy_text(last, accuracy));
    }
    snprintf(text + used, sizeof text - used, "  %.0f steps/s", rate);
    progress_show(&session->bar, text);
    session->drawn = now;
}

/* --- after -------------------------------------------------------------------------------------------------------- */

/* AdamW's run, or else the last: the baseline. */
static const train_run *baseline_of(const train_session *session)
{
    for (int32_t i = 0; i < session->run_count; i++) {
        if (strcmp(session->runs[i].method.name, "adamw") == 0) {
            return &session->runs[i];
        }
    }
    return &session->runs[session->run_count - 1];
}

/* The first measurement with at most the baseline's final loss, or NULL. */
static const train_point *reach_baseline(const train_session *session, const train_run *run)
{
    const train_point *goal = train_run_last(baseline_of(session));
    return goal != NULL ? train_run_reach(run, goal->train_loss) : NULL;
}

/* Counts of the optimizer and KFAC. Synchronizes. */
static bool read_stats(const train_run *run, tch_optim_stats *stats)
{
    tch_kfac_stats kfac = TCH_KFAC_STATS_INIT;
    if (tch_optimizer_get_stats(run->optimizer, stats) ||
        (run->curvature.kfac != NULL && tch_kfac_get_stats(run->curvature.kfac, &kfac))) {
        return false;
    }
    stats->refreshes += kfac.refreshes;
    stats->failed += kfac.failed;
    stats->worst_residual = fmax(stats->worst_residual, kfac.worst_residual);
    return true;
}

/* Persistent bytes in addition to the network. */
static int64_t state_bytes(const train_run *run)
{
    tch_optim_memory memory = TCH_OPTIM_MEMORY_INIT;
    (void)tch_optimizer_get_memory(run->optimizer, &memory);
    return memory.state + train_curvature_bytes(&run->curvature);
}

/* The status of a run; empty if it completed. */
static const char *run_remark(const train_session *session, const train_run *run, char text[TRAIN_TEXT])
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    text[0] = '\0';
    if (run->diverged) {
        snprintf(text, TRAIN_TEXT, "diverged");
    } else if (run->step < session->setup.plan.steps) {
        snprintf(text, TRAIN_TEXT, "interrupted");
    } else if (read_stats(run, &stats) && stats.skipped + stats.failed > 0) {
        snprintf(text, TRAIN_TEXT, "%lld steps skipped, %lld refreshes failed", (long long)stats.skipped,
                 (long long)stats.failed);
    }
    return text;
}

static void table_run(table *t, const train_session *session, const train_run *run)
{
    char text[TRAIN_TEXT];
    const train_point *last = train_run_last(run), *reached = reach_baseline(session, run);
    table_row(t);
    table_set(t, 0, "%s", run->method.name);
    table_set(t, 1, "%.3g", run->method.rate);
    table_set(t, 2, "%lld", (long long)run->step);
    if (last != NULL) {
        table_set(t, 3, "%.5f", last->train_loss);
        table_set(t, 4, "%.5f", last->test_loss);
        if (!isnan(last->test_accuracy)) {
            table_set(t, 5, "%.2f %%", 100.0 * last->test_accuracy);
        }
    }
    table_set(t, 6, "%.2f s", run->seconds);
    if (run->step > 0) {
        table_set(t, 7, "%.2f ms", 1e3 * run->seconds / (double)run->step);
    }
    if (reached != NULL) {
        table_set(t, 8, "%lld", (long long)reached->step);
        table_set(t, 9, "%.2f s", reached->seconds);
    } else {
        table_set(t, 8, "-");
        table_set(t, 9, "-");
    }
    table_set(t, 10, "%s", run_remark(session, run, text));
}

static void report_table(const train_session *session)
{
    table t;
    const train_run *baseline = baseline_of(session);
    const train_point *goal = train_run_last(baseline);
    table_start(&t, "optimizer|rate|steps|train loss|test loss|accuracy|time|a step|steps to L|time to L|<");
    for (int32_t i = 0; i < session->run_count; i++) {
        table_run(&t, session, &session->runs[i]);
    }
    puts("");
    table_print(&t);
    if (goal != NULL && isfinite(goal->train_loss)) {
        printf("\nL = %.5f is the training loss that %s ends with; losses were measured every %lld steps.\n",
               goal->train_loss, baseline->method.name, (long long)session->setup.plan.log_every);
    }
}

static void json_run(json_writer *json, const train_session *session, const train_run *run)
{
    tch_optim_stats stats = TCH_OPTIM_STATS_INIT;
    const train_point *last = train_run_last(run), *reached = reach_baseline(session, run);
    json_object_begin(json, NULL);
    json_text(json, "optimizer", run->method.name);
    json_real(json, "lr", run->method.rate);
    json_integer(json, "steps", run->step);
    json_real(json, "seconds", run->seconds);
    json_real(json, "train_loss", last != NULL ? last->train_loss : (double)NAN);
    json_real(json, "test_loss", last != NULL ? last->test_loss : (double)NAN);
    json_real(json, "test_accuracy", last != NULL ? last->test_accuracy : (double)NAN);
    json_real(json, "baseline_steps", reached != NULL ? (double)reached->step : (double)NAN);
    json_real(json, "baseline_seconds", reached != NULL ? reached->seconds : (double)NAN);
    json_bool(json, "diverged", run->diverged);
    json_integer(json, "state_bytes", state_bytes(run));
    if (read_stats(run, &stats)) {
        json_integer(json, "skipped", stats.skipped);
        json_integer(json, "refreshes", stats.refreshes);
        json_integer(json, "failed", stats.failed);
        json_real(json, "worst_residual", stats.worst_residual);
    }
    json_object_end(json);
}

static void json_settings(json_writer *json, const train_plan *plan)
{
    train_setting settings[TRAIN_SETTINGS];
    train_plan_settings(plan, settings);
    json_object_begin(json, "settings");
    for (int i = 0; i < TRAIN_SETTINGS; i++) {
        if (settings[i].text[0] != '\0') {
            json_text(json, settings[i].option + 2, settings[i].text);
        }
    }
    json_object_end(json);
}

static void report_json(const train_session *session)
{
    char text[192];
    const train_data *data = &session->setup.data;
    json_writer json = json_start_line(stdout);
    json_object_begin(&json, NULL);
    json_bool(&json, "summary", true);
    json_text(&json, "version", tch_version());
    json_text(&json, "device", output_device(session->setup.context, text));
    json_text(&json, "data", data_name(&session->setup.plan));
    json_integer(&json, "train_rows", data->train.rows);
    json_integer(&json, "test_rows", data->test.rows);
    json_integer(&json, "columns", data->train.cols);
    json_integer(&json, "classes", data->train.classes);
    json_integer(&json, "parameters", tch_network_size(session->runs[0].network));
    json_settings(&json, &session->setup.plan);
    json_text(&json, "baseline", baseline_of(session)->method.name);
    json_bool(&json, "interrupted", session->interrupted != 0);
    json_array_begin(&json, "runs");
    for (int32_t i = 0; i < session->run_count; i++) {
        json_run(&json, session, &session->runs[i]);
    }
    json_array_end(&json);
    json_object_end(&json);
}

static void report_interruption(const train_session *session)
{
    const train_plan *plan = &session->setup.plan;
    const char *path = plan->checkpoint;
    fputs("Interrupted.", stdout);
    if (session->saves.run != NULL) {
        fputs(" To go on: torchium train --resume ", stdout);
        text_print_word(stdout, path);
        fputs(" --checkpoint ", stdout);
        text_print_word(stdout, path);
        if (plan->data != NULL) {
            fputs(" --data ", stdout);
            text_print_word(stdout, plan->data);
        }
    }
    fputc('\n', stdout);
}

void train_report_end(train_session *session)
{
    if (session->setup.plan.json) {
        report_json(session);
        return;
    }
    report_table(session);
    if (session->interrupted) {
        report_interruption(session);
    }
}

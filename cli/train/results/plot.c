/* The picture of a training run: the training loss of every run over steps and over seconds. */
#include "results.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "draw/chart.h"
#include "terminal/output.h"
#include "text/text.h"

/* Points to a curve: more than a panel has pixels. */
enum { MOST = 1000 };

/* One run's columns. */
typedef struct curve {
    int64_t count;
    double steps[MOST + 1], seconds[MOST + 1], losses[MOST + 1];
} curve;

/* Every so many measurements, and always the last. */
static void fill_curve(const train_run *run, curve *c)
{
    int64_t every = run->point_count / MOST + 1;
    c->count = 0;
    for (int64_t i = 0; i < run->point_count; i++) {
        if (i % every != 0 && i + 1 != run->point_count) {
            continue;
        }
        c->steps[c->count] = (double)run->points[i].step;
        c->seconds[c->count] = run->points[i].seconds;
        c->losses[c->count++] = run->points[i].train_loss;
    }
}

static bool write_chart(const train_session *session, curve *curves)
{
    chart_series by_step[TRAIN_METHODS], by_time[TRAIN_METHODS];
    char remark[2 * TRAIN_TEXT], names[TRAIN_METHODS][64];
    const train_plan *plan = &session->setup.plan;
    for (int32_t i = 0; i < session->run_count; i++) {
        const train_run *run = &session->runs[i];
        curve *c = &curves[i];
        fill_curve(run, c);
        snprintf(names[i], sizeof names[i], "%s, rate %.3g", run->method.name, run->method.rate);
        by_step[i] = (chart_series){names[i], c->count, c->steps, c->losses};
        by_time[i] = (chart_series){names[i], c->count, c->seconds, c->losses};
    }
    snprintf(remark, sizeof remark, "%lld rows of %lld numbers, hidden layers %s, batches of %lld, %s rate",
             (long long)session->setup.data.train.rows, (long long)session->setup.data.train.cols, plan->hidden_text,
             (long long)plan->batch, plan->schedule);
    const chart c = {.title = "Training loss over steps and over time",
                     .remark = remark,
                     .y_name = "loss",
                     .panel_count = 2,
                     .series_count = session->run_count,
                     .panels = {{"steps", by_step}, {"seconds", by_time}}};
    return chart_write(&c, plan->plot);
}

int train_plot(const train_session *session)
{
    const char *path = session->setup.plan.plot;
    char shown[TEXT_SHOWN];
    curve *curves = malloc(TRAIN_METHODS * sizeof *curves);
    if (curves == NULL) {
        return output_fail("train", "out of memory for the picture");
    }
    bool good = write_chart(session, curves);
    int problem = errno;
    free(curves);
    if (!good) {
        return output_fail("train", "the picture %s could not be written: %s", path, strerror(problem));
    }
    if (!session->setup.plan.json) {
        printf("Learning curves: %s\n", text_show(path, shown));
    }
    return CLI_OK;
}

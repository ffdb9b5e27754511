/* `torchium train`: reads the plan, creates a run for each optimizer, and trains them in turn. All are created first,
 * so that errors are reported before training, and a checkpoint contains them all. */
#define _POSIX_C_SOURCE 200809L
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "results/results.h"
#include "terminal/output.h"

/* --- signals ----------------------------------------------------------------------------------------------------- */

/* The signal that requested a stop after the current step, or 0. A second signal has its default action. */
static volatile sig_atomic_t stop_asked;

static void on_signal(int number)
{
    if (stop_asked) {
        signal(number, SIG_DFL);
        raise(number);
    }
    stop_asked = number;
}

/* Signals ignored at the start (nohup: SIGHUP; background jobs: SIGINT) stay ignored. */
static void watch_signals(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    for (int i = 0; i < 3; i++) {
        struct sigaction before, action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
        sigemptyset(&action.sa_mask);
        if (sigaction(signals[i], NULL, &before) == 0 && before.sa_handler != SIG_IGN) {
            sigaction(signals[i], &action, NULL);
        }
    }
}

/* --- training ---------------------------------------------------------------------------------------------------- */

/* The next step before which training pauses: a measurement, a checkpoint or the end. */
static int64_t next_halt(const train_plan *plan, int64_t step)
{
    int64_t halt = (step / plan->log_every + 1) * plan->log_every;
    if (plan->checkpoint_every > 0) {
        int64_t saved = (step / plan->checkpoint_every + 1) * plan->checkpoint_every;
        halt = saved < halt ? saved : halt;
    }
    return halt < plan->steps ? halt : plan->steps;
}

/* Trains up to `until`, or to the next step after a signal. The time ends with the last step on the device, and
 * excludes measurements. */
static tch_status advance_run(train_session *session, train_run *run, int64_t until)
{
    tch_status status = TCH_OK;
    double started = progress_clock();
    while (status == TCH_OK && run->step < until && !stop_asked) {
        status = train_run_step(&session->setup, run);
        train_report_progress(session, run);
    }
    if (status == TCH_OK) {
        status = tch_context_synchronize(session->setup.context);
    }
    run->seconds += progress_clock() - started;
    return status;
}

/* Reports a failed call of the library on a new line. */
static int fail_library(const train_session *session)
{
    progress_clear(&session->bar);
    return output_fail_library("train");
}

static int measure_run(train_session *session, train_run *run)
{
    train_point point;
    const train_point *last = train_run_last(run);
    if (last != NULL && last->step == run->step) {
        return CLI_OK;
    }
    if (train_run_measure(&session->setup, run, &point)) {
        return fail_library(session);
    }
    if (!train_run_record(run, &point)) {
        return output_fail("train", "out of memory for measurement %lld", (long long)run->point_count + 1);
    }
    train_report_point(session, run, &point);
    return CLI_OK;
}

static int train_run_whole(train_session *session, train_run *run)
{
    const train_plan *plan = &session->setup.plan;
    int status = measure_run(session, run);
    while (status == CLI_OK && run->step < plan->steps && !run->diverged && !stop_asked) {
        if (advance_run(session, run, next_halt(plan, run->step))) {
            return fail_library(session);
        }
        if (run->step % plan->log_every == 0 || run->step == plan->steps) {
            status = measure_run(session, run);
        }
        bool save_now = plan->checkpoint_every > 0 && run->step % plan->checkpoint_every == 0;
        if (status == CLI_OK && save_now && run->step < plan->steps) {
            train_outputs_save(session, run);
        }
    }
    return status;
}

static int create_runs(train_session *session)
{
    const train_plan *plan = &session->setup.plan;
    for (int32_t i = 0; i < plan->method_count; i++) {
        if (train_run_create(&session->setup, &plan->methods[i], &session->runs[i])) {
            return output_fail_library("train");
        }
        session->run_count = i + 1;
    }
    return CLI_OK;
}

static int train_all(train_session *session, tch_checkpoint *checkpoint)
{
    int status = create_runs(session);
    if (status == CLI_OK && checkpoint != NULL) {
        status = train_resume_runs(session, checkpoint, session->setup.plan.resume);
    }
    const train_run *at_work = session->runs;
    for (int32_t i = 0; i < session->run_count && status == CLI_OK && !stop_asked; i++) {
        at_work = &session->runs[i];
        status = train_run_whole(session, &session->runs[i]);
    }
    progress_clear(&session->bar);
    session->interrupted = stop_asked;
    if (status == CLI_OK) {
        train_outputs_save(session, at_work);
    }
    return status;
}

/* The device, the data on it, and what depends on them. */
static int prepare_session(train_session *session)
{
    const int64_t totals = TCH_NETWORK_TOTALS;
    train_plan *plan = &session->setup.plan;
    if ((plan->threads > 0 && tch_set_num_threads((int32_t)plan->threads)) ||
        tch_context_create(plan->device, &session->setup.context) ||
        tch_tensor_create(session->setup.context, TCH_FLOAT64, 1, &totals, TCH_CONTIGUOUS, &session->setup.totals)) {
        return output_fail_library("train");
    }
    int status = train_data_load(plan, &session->setup.data);
    if (status == CLI_OK) {
        status = train_data_upload(session->setup.context, &session->setup.data);
    }
    if (status != CLI_OK) {
        return status;
    }
    return train_plan_settle(plan, session->setup.data.train.rows);
}

static int run_session(train_session *session, tch_checkpoint *checkpoint)
{
    int status = prepare_session(session);
    if (status != CLI_OK) {
        return status;
    }
    watch_signals();
    train_report_start(session);
    session->bar = progress_start((double)session->setup.plan.steps * session->setup.plan.method_count);
    status = train_all(session, checkpoint);
    if (status != CLI_OK) {
        return status;
    }
    train_report_end(session);
    status = train_outputs_finish(session);
    return status == CLI_OK && session->interrupted ? CLI_SIGNAL + session->interrupted : status;
}

static void release_session(train_session *session)
{
    for (int32_t i = 0; i < session->run_count; i++) {
        train_run_destroy(&session->runs[i]);
    }
    train_data_release(&session->setup.data);
    tch_tensor_destroy(session->setup.totals);
    tch_context_destroy(session->setup.context);
}

int command_train(int argc, char **argv)
{
    bool go = false;
    tch_checkpoint *checkpoint = NULL;
    train_session *session = calloc(1, sizeof *session);
    if (session == NULL) {
        return output_fail("train", "out of memory");
    }
    int status = train_plan_read(argc, argv, &session->setup.plan, &go);
    if (status == CLI_OK && go && session->setup.plan.resume != NULL) {
        status = train_resume_plan(argc, argv, &session->setup.plan, &checkpoint);
    }
    if (status == CLI_OK && go) {
        status = train_plan_parse(&session->setup.plan);
    }
    if (status == CLI_OK && go) {
        status = train_outputs_check(&session->setup.plan);
    }
    if (status == CLI_OK && go) {
        status = run_session(session, checkpoint);
    }
    release_session(session);
    tch_checkpoint_close(checkpoint);
    free(session);
    return status;
}

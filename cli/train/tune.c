/* --tune: the same search for every optimizer. Each rate of a geometric grid around the method's own trains for the
 * whole number of steps, and the one with the least training loss at the end wins; test rows are not looked at. */
#include "tune.h"

#include <math.h>

#include "advance.h"
#include "results/report.h"
#include "stop.h"
#include "terminal/output.h"

/* Half a power of ten from one rate to the next: finer differences are within the noise of another seed. */
static double trial_rate(double center, int index)
{
    int from_center = index - TRAIN_RATES / 2;
    return center * pow(10.0, 0.5 * from_center);
}

/* The loss a rate ends with; infinite for one that diverges. */
static tch_status try_rate(train_session *session, const train_method *method, double *loss)
{
    train_run run;
    CLI_TRY(train_run_create(&session->setup, method, &run));
    tch_status status = train_advance(session, &run, session->setup.plan.steps);
    if (status == TCH_OK) {
        status = train_run_loss(&session->setup, &run, loss);
    }
    if (status == TCH_OK && !isfinite(*loss)) {
        *loss = (double)INFINITY;
    }
    train_run_destroy(&run);
    return status;
}

static tch_status tune_method(train_session *session, train_method *method)
{
    train_method trial = *method;
    double least = (double)INFINITY;
    int best = TRAIN_RATES / 2;
    for (int i = 0; i < TRAIN_RATES && !train_stop_asked(); i++) {
        double loss = (double)INFINITY;
        trial.rate = trial_rate(method->rate, i);
        CLI_TRY(try_rate(session, &trial, &loss));
        train_report_trial(session, &trial, loss);
        if (loss < least) {
            least = loss;
            best = i;
        }
    }
    method->rate = trial_rate(method->rate, best);
    train_report_choice(session, method, best == 0 || best == TRAIN_RATES - 1);
    return TCH_OK;
}

int train_tune(train_session *session)
{
    train_plan *plan = &session->setup.plan;
    for (int32_t i = 0; i < plan->method_count && !train_stop_asked(); i++) {
        if (tune_method(session, &plan->methods[i])) {
            return output_fail_library("train");
        }
    }
    train_plan_spell_rates(plan);
    return CLI_OK;
}

/* Takes inverse roots and judges them. Matrices that the library reports as failed are counted and left out of the
 * errors: their outputs still hold the poison. */
#include "root_trial.h"

#include <math.h>

tch_status root_trial_start(const workplace *place, const tch_tensor *a, root_trial *trial)
{
    tch_status status;
    int64_t batch = a->shape[0], n = a->shape[1];
    *trial = (root_trial){.a = a, .root = 4, .config = TCH_ROOT_CONFIG_INIT};
    if ((status = workplace_matrices(place->device, a->dtype, batch, n, n, &trial->out)) ||
        (status = workplace_vector(place->device, TCH_FLOAT64, batch, &trial->residual)) ||
        (status = workplace_vector(place->device, TCH_INT32, batch, &trial->report)) ||
        (status = workplace_poison(place, trial->out)) || (status = workplace_poison(place, trial->residual))) {
        root_trial_end(trial);
    }
    return status;
}

void root_trial_end(root_trial *trial)
{
    tch_tensor_destroy(trial->out);
    tch_tensor_destroy(trial->residual);
    tch_tensor_destroy(trial->report);
    trial->out = trial->residual = trial->report = NULL;
}

tch_status root_trial_run(tch_context *context, void *user)
{
    root_trial *trial = user;
    return tch_inverse_root(context, trial->a, trial->root, &trial->config, trial->out, trial->residual, trial->report);
}

/* |X - R| / |R| of matrix `index`. */
static double relative_error(const tch_tensor *x, const tch_tensor *reference, int64_t index)
{
    int64_t size = x->shape[1] * x->shape[2];
    double difference = 0.0, norm = 0.0;
    for (int64_t i = index * size; i < (index + 1) * size; i++) {
        double r = workplace_entry(reference, i), d = workplace_entry(x, i) - r;
        difference += d * d;
        norm += r * r;
    }
    return sqrt(difference / norm);
}

/* The larger of two, NaN if either is: a NaN must not get lost among good numbers. */
static double worse(double a, double b)
{
    return isnan(a) || isnan(b) ? (double)NAN : fmax(a, b);
}

static void judge_one(int64_t index, tch_report report, double residual, double error, root_verdict *verdict)
{
    if (report != TCH_REPORT_OK) {
        verdict->reason = verdict->failed == 0 ? report : verdict->reason;
        verdict->failed++;
        return;
    }
    bool first = index == verdict->failed;
    verdict->residual = first ? residual : worse(verdict->residual, residual);
    verdict->error = first ? error : worse(verdict->error, error);
}

tch_status root_trial_judge(const workplace *place, const root_trial *trial, const tch_tensor *reference,
                            root_verdict *verdict)
{
    tch_status status;
    tch_tensor *x = NULL, *residual = NULL, *report = NULL;
    *verdict = ROOT_VERDICT_NONE;
    if ((status = workplace_fetch(place, trial->out, &x)) == TCH_OK &&
        (status = workplace_fetch(place, trial->residual, &residual)) == TCH_OK &&
        (status = workplace_fetch(place, trial->report, &report)) == TCH_OK) {
        for (int64_t i = 0; i < trial->a->shape[0]; i++) {
            judge_one(i, (tch_report)workplace_entry(report, i), workplace_entry(residual, i),
                      reference != NULL ? relative_error(x, reference, i) : (double)NAN, verdict);
        }
    }
    tch_tensor_destroy(x);
    tch_tensor_destroy(residual);
    tch_tensor_destroy(report);
    return status;
}

const char *root_report_text(tch_report report)
{
    static const char *const texts[] = {"ok", "not finite", "not symmetric", "not positive", "no convergence"};
    return (unsigned)report < sizeof texts / sizeof texts[0] ? texts[report] : "unknown report";
}

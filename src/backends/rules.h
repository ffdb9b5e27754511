/* Scalar decisions shared by all backends. C and CUDA C include this file; functions here use only <math.h>. Each is
 * documented at the operation of the same name in torchium/backend/, the verdict on a root at `root_residual`. */
#ifndef TCHI_RULES_H
#define TCHI_RULES_H

#include <math.h>
#include <stddef.h>

#include <torchium/backend.h>

#ifdef __CUDACC__
#define TCHI_RULE static __device__ inline
#else
#define TCHI_RULE static inline
#endif

/* --- weight decay ------------------------------------------------------------------------------------------------ */

/* What p is multiplied by where u p >= 0, and elsewhere. */
typedef struct tchi_keep {
    double along, against;
} tchi_keep;

TCHI_RULE tchi_keep tchi_rule_keep(const tch_hyper *h, tch_decay decay)
{
    double keep = decay == TCH_DECAY_WHOLE ? 0.0 : decay == TCH_DECAY_L2 ? 1.0 : 1.0 - h->lr * h->weight_decay;
    tchi_keep k = {keep, decay == TCH_DECAY_CAUTIOUS ? 1.0 : keep};
    return k;
}

/* --- roots ------------------------------------------------------------------------------------------------------- */

TCHI_RULE int32_t tchi_rule_root_flag(const tch_root_norms *norms, int64_t b, double symmetry, double damping,
                                      double bound)
{
    if (norms->nonfinite[b] != 0 || isnan(norms->largest[b])) {
        return TCH_REPORT_NOT_FINITE;
    }
    if (norms->asymmetry[b] > symmetry * norms->max_abs[b]) {
        return TCH_REPORT_NOT_SYMMETRIC;
    }
    if (isinf(bound)) {
        return TCH_REPORT_OVERFLOW;
    }
    return norms->max_abs[b] == 0 && damping == 0 ? TCH_REPORT_NOT_POSITIVE : TCH_REPORT_OK;
}

TCHI_RULE void tchi_rule_root_setup(const tch_root_norms *norms, int64_t b, double eps, double relative_eps,
                                    double margin, double symmetry, double *damping, double *bound, int32_t *flag)
{
    double largest = fmax(norms->largest[b], 0.0);
    double added = fmax(eps, relative_eps * largest);
    *flag = tchi_rule_root_flag(norms, b, symmetry, added, added + margin * largest);
    int good = *flag == TCH_REPORT_OK;
    *damping = good ? added : 0.0;
    *bound = good && added + largest > 0 ? added + margin * largest : 1.0;
}

/* A residual that is NaN is not at most the tolerance. */
TCHI_RULE void tchi_rule_root_verdict(double residual, double tolerance, int32_t *flag)
{
    if (*flag == TCH_REPORT_OK && !(residual <= tolerance)) {
        *flag = TCH_REPORT_NO_CONVERGENCE;
    }
}

/* The ratio of the means of two spectra may overflow float64 although both means do not. */
TCHI_RULE void tchi_rule_factored_damping(double trace_a, double m, double trace_b, double n, double damping,
                                          double *shift_a, double *shift_b)
{
    int usable = trace_a > 0 && trace_b > 0;
    double ratio = usable ? (trace_a / m) / (trace_b / n) : 1.0;
    int in_range = ratio > 0 && isfinite(ratio);
    double pi = in_range ? sqrt(ratio) : sqrt(trace_a / m) / sqrt(trace_b / n);
    *shift_a = pi * sqrt(damping);
    *shift_b = sqrt(damping) / pi;
}

/* --- steps of optimizers ----------------------------------------------------------------------------------------- */

TCHI_RULE void tchi_rule_decide_skip(const int32_t *found, const float *found_inf, const int32_t *agreement,
                                     int32_t *skip, double *counts)
{
    *skip = (found != NULL && *found != 0) || (found_inf != NULL && *found_inf != 0.0f) ||
            (agreement != NULL && agreement[0] != ~agreement[1]);
    counts[0] += 1.0;
    counts[1] += (double)*skip;
}

TCHI_RULE void tchi_rule_set_weights(tch_clock *clock, double gradient, double factor)
{
    clock->factor[0] = gradient;
    clock->factor[1] = factor;
    clock->factor_f32[0] = (float)gradient;
    clock->factor_f32[1] = (float)factor;
}

TCHI_RULE void tchi_rule_advance(tch_clock *clock, const tch_hyper *h, int32_t skipped, int32_t correct,
                                 tch_factor_rule rule)
{
    double step = clock->step + (skipped ? 0.0 : 1.0);
    double correction2 = 1.0 - pow(h->beta2, step);
    clock->step = step;
    clock->correction1 = correct ? 1.0 - pow(h->beta1, step) : 1.0;
    clock->correction2 = correct ? correction2 : 1.0;
    clock->graft = 1.0 - pow(h->graft_beta2, step);
    if (skipped) {
        tchi_rule_set_weights(clock, 0.0, 1.0);
    } else if (rule == TCH_FACTOR_SUM) {
        tchi_rule_set_weights(clock, 1.0, 1.0);
    } else if (rule == TCH_FACTOR_EMA) {
        tchi_rule_set_weights(clock, 1.0 - h->beta2, h->beta2);
    } else {
        double weight = (1.0 - h->beta2) / correction2;
        tchi_rule_set_weights(clock, weight, 1.0 - weight);
    }
}

/* A row's share of the squared norm once it is divided by sqrt(v) + eps. */
TCHI_RULE double tchi_rule_row_share(double sum, double v, double eps)
{
    double divisor = sqrt(v) + eps;
    double length = divisor > 0.0 ? sqrt(sum) / divisor : 0.0;
    return length * length;
}

TCHI_RULE void tchi_rule_update_scale(float *scale, int32_t *tracker, const float *found_inf, double growth,
                                      double backoff, int32_t interval)
{
    int bad = *found_inf != 0.0f;
    int grow = !bad && *tracker + 1 == interval;
    float next = (float)((double)*scale * (bad ? backoff : growth));
    if (bad || (grow && isfinite(next))) {
        *scale = next;
    }
    *tracker = bad || grow ? 0 : *tracker + 1;
}

/* --- per-sample gradients and curvature -------------------------------------------------------------------------- */

/* A squared norm below 0 is a sum of terms that canceled, and counts as 0. */
TCHI_RULE double tchi_rule_clip_weight(tch_clip_rule rule, double square, double most)
{
    if (rule == TCH_CLIP_KL) {
        double weight = sqrt(most / fabs(square));
        return square != 0.0 && isfinite(weight) && weight < 1.0 ? weight : 1.0;
    }
    double weight = most / (sqrt(fmax(square, 0.0)) + 1e-6);
    return !isfinite(square) ? 0.0 : weight < 1.0 ? weight : 1.0;
}

#endif

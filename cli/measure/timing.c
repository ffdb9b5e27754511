/* Measures calls. On a shared machine a scheduler's slice of some milliseconds can fall into any run, so the median
 * says what is seen and the least time what it costs; ratios between rows are taken of the least times. */
#define _POSIX_C_SOURCE 200809L
#include "timing.h"

#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

enum { MOST_RUNS = 2000, FEWEST_RUNS = 3, PATIENCE = 6 };

double timing_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static tch_status run_once(tch_context *context, timed_call call, void *user, double *seconds)
{
    double start = timing_now();
    tch_status status = call(context, user);
    if (status == TCH_OK) {
        status = tch_context_synchronize(context);
    }
    *seconds = timing_now() - start;
    return status;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool has_enough_runs(int32_t runs, double spent, double seconds)
{
    if (runs == MOST_RUNS || spent > PATIENCE * seconds) {
        return true;
    }
    return runs >= FEWEST_RUNS && spent > seconds;
}

tch_status timing_measure(tch_context *context, timed_call call, void *user, double seconds, timing *result)
{
    double samples[MOST_RUNS], spent = 0.0;
    int32_t runs = 0;
    tch_status status = run_once(context, call, user, &samples[0]);
    /* A run this long owes nothing to a cold start: it counts as the first sample. */
    if (samples[0] > seconds) {
        spent = samples[runs++];
    }
    while (status == TCH_OK && !has_enough_runs(runs, spent, seconds)) {
        status = run_once(context, call, user, &samples[runs]);
        spent += samples[runs++];
    }
    if (status != TCH_OK) {
        return status;
    }
    qsort(samples, (size_t)runs, sizeof samples[0], compare_doubles);
    result->median_ms = 1e3 * 0.5 * (samples[(runs - 1) / 2] + samples[runs / 2]);
    result->least_ms = 1e3 * samples[0];
    result->runs = runs;
    return TCH_OK;
}

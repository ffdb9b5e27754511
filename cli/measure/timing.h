/* How long a call takes, as the median of repeated runs. */
#ifndef CLI_TIMING_H
#define CLI_TIMING_H

#include <torchium/torchium.h>

typedef struct timing {
    double median_ms; /* what a caller sees on this machine as it is now */
    double least_ms;  /* what the work costs when nothing else disturbs it: for ratios */
    int32_t runs;
} timing;

typedef tch_status (*timed_call)(tch_context *context, void *user);

/* Runs the call once to warm up, then for about `seconds` and at least three times; a call that takes longer than
 * several times `seconds` is run fewer times. Each run is synchronized. */
tch_status timing_measure(tch_context *context, timed_call call, void *user, double seconds, timing *result);

/* Seconds of a clock that only goes forward. */
double timing_now(void);

#endif

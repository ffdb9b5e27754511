/* A session: the runs of all optimizers, and their progress. */
#ifndef CLI_TRAIN_SESSION_H
#define CLI_TRAIN_SESSION_H

#include <stdint.h>

#include "run.h"
#include "terminal/progress.h"

/* How the saving of checkpoints has gone. A save that fails ends nothing: the next one may succeed, and what is missing
 * in the end is said there. */
typedef struct train_saves {
    int64_t failed;       /* since the last one that succeeded */
    const train_run *run; /* the one that was at work at the last save that succeeded, or NULL */
    int64_t step;         /* its step then */
} train_saves;

typedef struct train_session {
    train_setup setup;
    int32_t run_count;
    train_run runs[TRAIN_METHODS];
    progress bar;
    double drawn;    /* when the bar was, last */
    int interrupted; /* the signal by which it was asked to end before the end, or 0 */
    train_saves saves;
} train_session;

#endif

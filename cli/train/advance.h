/* The steps of a run, one after the other, under the clock. */
#ifndef CLI_TRAIN_ADVANCE_H
#define CLI_TRAIN_ADVANCE_H

#include <stdint.h>

#include "run/session.h"

/* Steps up to `until`, or to the next one after somebody asked to stop. Waits for the device; the time is counted. */
tch_status train_advance(train_session *session, train_run *run, int64_t until);

#endif

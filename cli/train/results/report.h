/* What a training run shows while it runs, and at its end. */
#ifndef CLI_TRAIN_REPORT_H
#define CLI_TRAIN_REPORT_H

#include "train/run/session.h"

void train_report_start(const train_session *session);

/* A measurement: a line of JSON, or now and then one of text. */
void train_report_point(train_session *session, const train_run *run, const train_point *point);

/* Moves the bar, if there is one and it was not moved a moment ago. */
void train_report_progress(train_session *session, const train_run *run);

/* The table, or the last line of JSON. */
void train_report_end(train_session *session);

#endif

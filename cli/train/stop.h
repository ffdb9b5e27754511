/* Stopping a training run before its end. */
#ifndef CLI_TRAIN_STOP_H
#define CLI_TRAIN_STOP_H

/* From now on SIGINT, SIGTERM and SIGHUP ask the run to stop after the current step; the second one ends the
 * process. Those that are ignored stay ignored. */
void train_stop_watch(void);

/* The signal that asked, or 0. */
int train_stop_asked(void);

#endif

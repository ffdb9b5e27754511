/* Stopping a training before its end. */
#ifndef CLI_TRAIN_STOP_H
#define CLI_TRAIN_STOP_H

/* From now on SIGINT, SIGTERM and SIGHUP ask the training to stop after the step at hand; the second one ends the
 * process. Those that are ignored stay ignored. */
void train_stop_watch(void);

/* The signal that asked, or 0. */
int train_stop_asked(void);

#endif

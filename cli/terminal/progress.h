/* A progress line on stderr: percentage, a bar where the terminal is wide enough, and remaining time. Nothing if stderr
 * is not a terminal. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>

typedef struct progress {
    bool shown;
    double started;
    double total; /* in any unit */
    double done;
} progress;

/* Seconds of a monotonic clock. */
double progress_clock(void);

progress progress_start(double total);

/* Draws the line with the name of the current work. */
void progress_show(const progress *p, const char *now);

/* Adds completed work. */
void progress_advance(progress *p, double amount);

/* Erases the line. */
void progress_clear(const progress *p);

#endif

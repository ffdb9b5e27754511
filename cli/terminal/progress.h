/* A progress line on stderr: percent done, a bar where the terminal is wide enough, and time left. Silent when stderr
 * is not a terminal. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H

#include <stdbool.h>

typedef struct progress {
    bool shown;
    double started;
    double total; /* amount of work, in any unit */
    double done;
} progress;

/* Seconds of a clock that only goes forward. */
double progress_clock(void);

progress progress_start(double total);

/* Draws the line with what is being worked on now. */
void progress_show(const progress *p, const char *now);

/* Counts work as done. */
void progress_advance(progress *p, double amount);

/* Wipes the line, so that something else can be printed. */
void progress_clear(const progress *p);

#endif

/* The progress line. It is drawn over itself with a carriage return and wiped before anything else is printed, so it
 * never ends up between the lines of a table. */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include <stdio.h>
#include <unistd.h>

#include "timing.h"

enum { LINE = 72 };

progress progress_start(double total)
{
    return (progress){isatty(STDERR_FILENO) == 1, timing_now(), total, 0.0};
}

static void time_left(const progress *p, char *text, size_t size)
{
    double spent = timing_now() - p->started;
    if (p->done <= 0.02 * p->total) { /* too early for a guess that means anything */
        text[0] = '\0';
        return;
    }
    int left = (int)(spent * (p->total - p->done) / p->done + 0.5);
    if (left >= 60)
        snprintf(text, size, ", %d min %02d s left", left / 60, left % 60);
    else
        snprintf(text, size, ", %d s left", left);
}

void progress_show(const progress *p, const char *now)
{
    char left[48], line[LINE + 1];
    if (!p->shown)
        return;
    time_left(p, left, sizeof left);
    snprintf(line, sizeof line, "%3.0f %%%s  %s", p->total > 0.0 ? 100.0 * p->done / p->total : 0.0, left, now);
    fprintf(stderr, "\r%-*s", LINE, line);
    fflush(stderr);
}

void progress_advance(progress *p, double amount)
{
    p->done += amount;
}

void progress_clear(const progress *p)
{
    if (!p->shown)
        return;
    fprintf(stderr, "\r%*s\r", LINE, "");
    fflush(stderr);
}

/* The progress line. It overwrites itself with a carriage return, is erased before anything else is printed, and is
 * never wider than the terminal, where the carriage return would not reach its beginning. */
#define _DEFAULT_SOURCE
#include "progress.h"

#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { NARROW = 72, WIDE = 110, BAR = 20 };

/* Read each time, since windows are resized. */
static int line_width(void)
{
    struct winsize size;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) {
        return NARROW;
    }
    int width = size.ws_col - 1;
    return width < WIDE ? width : WIDE;
}

/* "[#####...............] ", or nothing on a narrow terminal. */
static void draw_bar(double share, int width, char text[BAR + 4])
{
    int filled = (int)(share * BAR + 0.5);
    text[0] = '\0';
    if (width < WIDE - BAR / 2) {
        return;
    }
    text[0] = '[';
    memset(text + 1, '#', (size_t)filled);
    memset(text + 1 + filled, '.', (size_t)(BAR - filled));
    memcpy(text + 1 + BAR, "] ", 3);
}

double progress_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

progress progress_start(double total)
{
    return (progress){isatty(STDERR_FILENO) == 1, progress_clock(), total, 0.0};
}

static void time_left(const progress *p, char *text, size_t size)
{
    double spent = progress_clock() - p->started;
    if (p->done <= 0.02 * p->total) { /* too early for an estimate */
        text[0] = '\0';
        return;
    }
    int left = (int)(spent * (p->total - p->done) / p->done + 0.5);
    if (left >= 60) {
        snprintf(text, size, ", %d min %02d s left", left / 60, left % 60);
    } else {
        snprintf(text, size, ", %d s left", left);
    }
}

void progress_show(const progress *p, const char *now)
{
    char left[48], drawn[BAR + 4], line[WIDE + 1];
    if (!p->shown) {
        return;
    }
    int width = line_width();
    double share = p->total > 0.0 && p->done < p->total ? p->done / p->total : (double)(p->total > 0.0);
    time_left(p, left, sizeof left);
    draw_bar(share, width, drawn);
    snprintf(line, sizeof line, "%s%3.0f %%%s  %s", drawn, 100.0 * share, left, now);
    fprintf(stderr, "\r%-*.*s", width, width, line);
    fflush(stderr);
}

void progress_advance(progress *p, double amount)
{
    p->done += amount;
}

void progress_clear(const progress *p)
{
    if (!p->shown) {
        return;
    }
    fprintf(stderr, "\r%*s\r", line_width(), "");
    fflush(stderr);
}
